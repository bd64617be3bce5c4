/* rotary.h - queries and keys turned by their positions */
#ifndef RAPT_ROTARY_H
#define RAPT_ROTARY_H

#include "internal.h"

/* Heads of N * length rows. */
typedef struct rotary_heads {
    char *data; /* NULL: none */
    int64_t length, heads;
    int64_t row_stride, head_stride;
    const int64_t *first; /* [N] position of the first row, or NULL: the same for all */
    int64_t first_of_all; /* then */
} rotary_heads;

typedef struct rotary_rows {
    rapt_dtype dtype;
    bool backward; /* turns the other way, as gradients do; the amplitude stays */
    int64_t batch, dim;
    const int64_t *positions; /* [N, length] where all have that length, or NULL: counted */
    const int64_t *padding;   /* [N] rows at the beginning that do not count, or NULL: none */
    rotary_heads q, k;
} rotary_rows;

rapt_status rapt_rotary_check(rapt_context *context, const rapt_rotary *rotary, int64_t head_dim);
size_t rapt_rotary_scratch(const rapt_context *context, int64_t head_dim);
void rapt_rotate_rows(rapt_context *context, const rapt_rotary *rotary, const rotary_rows *rows, void *scratch);

#endif
