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
    CUT = 256,   /* keys of one softmax in progress */
    CHAIN = 64,  /* terms of a product after which its sum starts anew, which keeps the error low */
    STRANDS = 2, /* sums that are added to each other first: chains, or halves of a score's chain */
    PAIR = STRANDS * CHAIN,
    COLUMNS = 16, /* partial sums of a row; widths are rounded up to this, too */
};
/* Those that only speed depends on. */
enum {
    PANEL = RAPT_PANEL, /* columns (keys, outputs) of a packed panel, the same on every ISA */
    IN_PLACE_ROWS = 4,  /* packing keys pays from more rows on */
    SOON_RANGES = 24,   /* of memory that is fetched ahead */
    RAPT_LINE_BYTES = 64,
};

/* Which CPU it is (an os_cpu_kind; 0 before the first context is created). Where CPUs differ in what is fast, kernels take
 * one way or the other to the same bits; tests set it to go all of them. */
extern atomic_int rapt_cpu_kind;

static inline int64_t rapt_round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Keys that query i of sequence n may see by band and lengths: [*low, *high), empty if low >= high. */
void rapt_visible_keys(const attn_problem *problem, int64_t n, int64_t i, int64_t *low, int64_t *high);
/* Keys [*begin, *end) of sequence n by lengths, without what the padding mask hides at both ends. */
void rapt_real_keys(const attn_problem *problem, int64_t n, int64_t *begin, int64_t *end);
/* The only key that a query sees (S and on: an extra key), or -1 if it sees none or several. All keys before `first` are
 * hidden. */
int64_t rapt_sole_key(const attn_problem *problem, int64_t n, int64_t head, int64_t i, int64_t first);

/* Memory that is wanted soon, the last range first: products bring a line of it nearer in each of their steps. A range is
 * `rows` rows of `lines` lines; the first line of all of them comes first. */
typedef struct rapt_soon {
    int32_t count;
    struct {
        const char *data; /* of the line that is coming, in the first row */
        int64_t stride;   /* in bytes, from row to row */
        int64_t rows, done;
        int64_t lines; /* that are left */
    } range[SOON_RANGES];
} rapt_soon;

/* Rows are queries of `heads` heads that share their keys, stacked so that the heads of one query stand together:
 * row r is query r / heads of head first_head + r % heads. */
typedef struct attn_rows {
    const attn_problem *problem;
    int64_t n, kv_head, first_head, heads;
    int64_t first, count;
    rapt_soon *soon; /* what to fetch meanwhile; NULL: nothing */
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
    bool is_far; /* all keys and values together are in memory rather than in a cache of the CPU's */
    int64_t k_stride, v_stride;
} attn_keys;

/* The softmax over some keys, in progress: for each row, weights are relative to 2^reference, `sum` of them is taken,
 * and `out` [count][out_stride] is the values weighted by them. A row without keys has reference -inf. */
typedef struct attn_partial {
    void *reference, *sum, *out;
    int64_t out_stride; /* Dv rounded up to COLUMNS */
} attn_partial;

/* ---- the backward works on up to CHAIN rows and up to CHAIN keys at a time; see backward.h for the layouts ---- */

/* Some rows of a unit, and sums for them in progress. Matrices are [64][D] or [64][Dv], as panels of PANEL dimensions. */
typedef struct attn_row_block {
    attn_rows rows;
    void *q;     /* scaled as for scores */
    void *d_out; /* the gradient of the result */
    void *d_q;   /* the sum so far, without the scale */
    /* [64] each. A weight is 2^(score - reference) * factor; the reference is an integer, +inf for a row that sees nothing.
     * delta is what is taken off the gradient of each weight. */
    void *reference, *factor, *delta;
    bool is_finite;     /* q and d_out */
    bool has_odd_lse;   /* of some row: the forward's is no number, or huge, so that it is computed again */
    bool is_odd[CHAIN]; /* which */
    bool has_sole_keys;
    int64_t sole_key[CHAIN]; /* then: the only key that a row sees, or -1 */
} attn_row_block;

typedef struct attn_key_block {
    attn_keys keys;  /* first_key, keys and extra alone */
    void *k, *v;     /* transposed: [D][64], [Dv][64] */
    void *k_rows;    /* [64][D] */
    void *d_k, *d_v; /* sums so far; d_k in powers of two, as the scores are */
    bool is_finite;  /* k and v */
} attn_key_block;

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
    /* y [count][width] = x * panel + bias; rows of x and y are x->stride[1] and y_stride apart, features of x in their
     * groups 1; panel [features][width], then [width] biases; partial [count][width] is scratch, and may be y if that has
     * no gaps. */
    void (*linear_panel)(const rapt_rows *x, int64_t count, int64_t features, const void *panel, int64_t width,
                         void *partial, void *y, int64_t y_stride);
    /* Packs rows and computes their delta; q, d_out, lse and delta are memory to fill. scratch: rapt_tile_reals. */
    void (*backward_rows)(const attn_gradients *gradients, attn_row_block *block, void *scratch);
    /* Packs keys, and sets their sums to 0. */
    void (*backward_keys)(const attn_problem *problem, int64_t n, int64_t kv_head, attn_key_block *block,
                          void *scratch);
    /* For a block with odd rows: adds a tile to their reference and factor; over all keys, then settled, before all that
     * follows. */
    void (*backward_odd_rows)(attn_row_block *rows, const attn_key_block *keys, void *scratch);
    void (*backward_settle_odd_rows)(attn_row_block *rows);
    /* Adds what the returned weights' gradient contributes to the rows' delta. Over all keys, before any tile. */
    void (*backward_delta)(attn_row_block *rows, const attn_key_block *keys, const attn_gradients *gradients,
                           void *scratch);
    /* Adds one tile to the sums of its rows and of its keys. */
    void (*backward_tile)(attn_row_block *rows, attn_key_block *keys, const attn_gradients *gradients, void *scratch);
    /* Adds the gradient of a tile's scores to sums [64][PANEL], or, summed over the rows, to the first row of it. */
    void (*backward_mask)(attn_row_block *rows, const attn_key_block *keys, const attn_gradients *gradients,
                          bool sums_rows, void *sums, void *scratch);
    /* Row r of a block [64][dim], times a factor, or that added to what is there. */
    void (*store_block_row)(const void *block, int64_t r, int64_t dim, double factor, bool accumulate, void *to,
                            rapt_dtype dtype, int64_t stride, void *row_scratch);
    /* y [outputs][width], rows y_stride apart, = the sum over rows of dy [rows][dy_width] transposed times x [rows][width];
     * partial [outputs][width] is scratch, and may be y if that has no gaps. */
    void (*weight_panel)(int64_t rows, const void *dy, int64_t dy_width, int64_t outputs, const void *x, int64_t width,
                         void *partial, void *y, int64_t y_stride);
    /* sums [width] of rows [rows][width]. */
    void (*sum_rows)(int64_t rows, const void *from, int64_t width, void *sums);
    /* Stores a row of results in the dtype asked for. */
    void (*store_row)(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride);
    /* Adds it to what is there. */
    void (*add_row)(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride);
};

/* Scratch of the tile kernels: W and dS [64][64], bias and padding [CUT], two rows, and a block [64][Dv]. */
static inline int64_t rapt_tile_reals(int64_t value_dim) {
    return 2 * CHAIN * PANEL + 2 * CUT + 2 * PANEL + CHAIN * rapt_round_up(value_dim, COLUMNS);
}

#endif
