/* kernels.h - what a compilation of kernels.c offers: the tile work of attention and projections
 *
 * There is one table for each ISA and accumulation type (`real`: float, or double for f64 problems); buffers of reals
 * are void pointers here. Nothing in a kernel fails or allocates.
 */
#ifndef RAPT_CPU_KERNELS_H
#define RAPT_CPU_KERNELS_H

#include "../../internal.h"

/* The sizes that results depend on. Changing one changes bits, and so the numerics version. */
enum {
    CUT = 256,    /* keys of one softmax in progress */
    CHAIN = 64,   /* terms of a product after which its sum starts anew, which keeps the error low */
    COLUMNS = 16, /* partial sums of a row; widths are rounded up to this, too */
};
/* Those that only speed depends on. */
enum {
    PANEL = 64,        /* columns (keys, outputs) of a packed panel, the same on every ISA */
    IN_PLACE_ROWS = 4, /* packing keys pays from more rows on */
};

static inline int64_t rapt_round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Keys that query i of sequence n may see by band and lengths: [*low, *high), empty if low >= high. */
void rapt_visible_keys(const attn_problem *problem, int64_t n, int64_t i, int64_t *low, int64_t *high);
/* The only key that a query sees (S and on: an extra key), or -1 if it sees none or several. */
int64_t rapt_sole_key(const attn_problem *problem, int64_t n, int64_t head, int64_t i);

/* Rows are queries of `heads` heads that share their keys, stacked so that the heads of one query stand together:
 * row r is query r / heads of head first_head + r % heads. */
typedef struct attn_rows {
    const attn_problem *problem;
    int64_t n, kv_head, first_head, heads;
    int64_t first, count;
} attn_rows;

/* Keys of one cut, packed: columns 0 to keys - 1 are keys first_key and on. */
typedef struct attn_keys {
    int64_t first_key, keys;
    int64_t capacity; /* rows of a value panel */
    bool extra;       /* bias_kv and the zero key: seen by all, masked by nothing; first_key is S */
    bool has_non_finite_values;
    const void *k;    /* panels of PANEL keys: [panel][D][PANEL] */
    const void *v;    /* panels of PANEL value dimensions: [panel][capacity][PANEL], the last as wide as it must */
    rapt_dtype dtype; /* of k and v */
    void *widened;    /* room for a panel of keys or a chain of values as reals, if dtype is another type */
    /* Not packed, but rows of reals where they lie, D and Dv multiples of COLUMNS: k [keys][D] for at most IN_PLACE_ROWS
     * rows, which all see all of these keys; v [keys][Dv]. */
    bool k_in_place, v_in_place;
    bool is_far; /* k in place are in memory rather than in a cache */
    int64_t k_stride, v_stride;
} attn_keys;

/* The softmax over some keys, in progress: for each row, weights are relative to 2^reference, `sum` of them is taken,
 * and `out` [count][out_stride] is the values weighted by them. A row without keys has reference -inf. */
typedef struct attn_partial {
    void *reference, *sum, *out;
    int64_t out_stride; /* Dv rounded up to COLUMNS */
} attn_partial;

struct rapt_cpu_kernels {
    /* panel[d * width + r] = rows[r][d] for r < count, 0 from there to the next multiple of COLUMNS */
    void (*pack_columns)(void *panel, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                         int64_t row_stride, int64_t dim_stride);
    /* to[r * width + d] = rows[r][d] for d < dim, 0 for dim <= d < width. True if all are finite. */
    bool (*pack_rows)(void *to, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                      int64_t row_stride, int64_t dim_stride);
    /* Whether all of rows of reals are finite; dim is a multiple of COLUMNS. */
    bool (*all_finite)(const void *rows, int64_t count, int64_t dim, int64_t row_stride);
    /* Queries [count][D], scaled so that scores come out as powers of two. */
    void (*pack_queries)(const attn_rows *rows, void *q);
    /* A total without keys, to merge into. */
    void (*attn_begin)(int64_t rows, attn_partial *total);
    /* One cut for some rows, from nothing. False, with nothing written, if no row sees any of its keys.
     * q [count][D]; scratch [count + 2][CUT] reals. */
    bool (*attn_cut)(const attn_rows *rows, const attn_keys *keys, const void *q, void *scratch, attn_partial *partial);
    /* total += partial. Scaling by powers of two is exact, so each sum is rounded once. */
    void (*attn_merge)(int64_t rows, attn_partial *total, const attn_partial *partial);
    /* Writes output and log-sum-exp of finished rows. */
    void (*attn_finish)(const attn_rows *rows, const attn_partial *total);
    /* The attention weights of rows of one head for one cut, given the finished reference and sum, into
     * weights[row][first_key + column], which is zero before. */
    void (*attn_weights)(const attn_rows *rows, const attn_keys *keys, const void *q, void *scratch,
                         const void *reference, const void *sum, void *weights, int64_t weights_stride);
    /* Puts finished rows of weights where the problem wants them. Averages are summed over ascending heads in
     * `average` [N, L, S'] (contiguous reals), or in the problem's own weights if that is NULL. */
    void (*store_weights)(const attn_rows *rows, const void *weights, int64_t weights_stride, void *average);
    /* y [count][width] = x * panel + bias; x and y have rows `stride` and `y_stride` apart; panel [features][width], then
     * [width] biases; partial [count][width] is scratch, and may be y if that has no gaps. */
    void (*linear_panel)(const void *x, int64_t stride, int64_t count, int64_t features, const void *panel,
                         int64_t width, void *partial, void *y, int64_t y_stride);
    /* Stores a row of results in the dtype asked for. */
    void (*store_row)(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride);
};

#endif
