/* ref.h - what the files of the reference backend share */
#ifndef RAPT_REF_REF_H
#define RAPT_REF_REF_H

#include "../internal.h"

/* ---- attention: ref_attn.c ---- */

/* One element of a view, as a double. */
static inline double rapt_ref_element(const rapt_view *view, rapt_dtype dtype, int64_t a, int64_t b, int64_t c,
                                      int64_t d) {
    return rapt_load(view->data, dtype,
                     a * view->stride[0] + b * view->stride[1] + c * view->stride[2] + d * view->stride[3]);
}

/* Key j of a KV head, or its value: a real one, or one of the extra ones behind them. */
double rapt_ref_key_element(const attn_problem *problem, int64_t n, int64_t kv_head, int64_t j, int64_t d);
double rapt_ref_value_element(const attn_problem *problem, int64_t n, int64_t kv_head, int64_t j, int64_t d);

/* What one query of one head sees, and how much it attends to each before dropout. */
typedef struct ref_row {
    int64_t count;       /* of keys that it sees */
    int64_t *key;        /* [S'], the first count are which, ascending */
    double *probability; /* [S'], likewise */
    double lse;
} ref_row;
size_t rapt_ref_row_scratch(const attn_problem *problem);
ref_row rapt_ref_row_take(const attn_problem *problem, char **scratch);
void rapt_ref_row_fill(const attn_problem *problem, int64_t n, int64_t h, int64_t i, ref_row *row);
/* What dropout multiplies a weight by: 0, or 1 / (1 - dropout). */
double rapt_ref_dropout(const attn_problem *problem, int64_t n, int64_t h, int64_t i, int64_t j);

/* ---- entries of the backend's table ---- */

size_t rapt_ref_attn_backward_scratch(const rapt_context *context, const attn_problem *problem,
                                      const attn_gradients *gradients);
void rapt_ref_attn_backward(rapt_context *context, const attn_problem *problem, const attn_gradients *gradients,
                            void *scratch);
size_t rapt_ref_linear_scratch(const rapt_context *context, const linear_problem *problem);
void rapt_ref_linear(rapt_context *context, const linear_problem *problem, void *scratch);
size_t rapt_ref_linear_backward_scratch(const rapt_context *context, const linear_gradients *gradients);
void rapt_ref_linear_backward(rapt_context *context, const linear_gradients *gradients, void *scratch);

#endif
