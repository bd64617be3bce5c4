/* backward.h - the tile work of the backward: up to 64 rows against up to 64 keys
 *
 * With P the weights, recomputed from the log-sum-exp, Z what dropout multiplies them by, and W = P * Z:
 *
 *     dW = dO V^T + gradient of the returned weights      dP = Z * dW      dS = P * (dP - delta)
 *     dV += W^T dO      dK += dS^T Q      dQ += dS K      delta = the sum of P * dP over a row
 *
 * A tile is one chain (CHAIN = PANEL = 64) of every one of these sums, so they are added up in the order of tiles: dK and
 * dV over ascending rows, dQ over ascending keys. Which tiles run first otherwise, and on which lane, changes nothing.
 *
 * Matrices of 64 rows or keys are kept as panels of 64 dimensions, [panel][64][width], the last panel as wide as it must:
 * a chain of the left factor of a product, and a panel of the right one.
 */
#ifndef RAPT_CPU_KERNELS_BACKWARD_H
#define RAPT_CPU_KERNELS_BACKWARD_H

#include "dropout.h"
#include "masks.h"
#include "product.h"
#include "softmax.h"

_Static_assert((int)CHAIN == (int)PANEL, "a panel of dimensions is a chain of a product over them");

enum { EDGE_STEP = 2 * MICRO_ROWS }; /* rows or keys that are taken together where a band ends within a tile */

/* Columns of the panel that begins at dimension d. */
INLINE int64_t width_at(int64_t dim, int64_t d) {
    int64_t left = rapt_round_up(dim, COLUMNS) - d;
    return left < PANEL ? left : PANEL;
}

/* ---- packing ---- */

/* `count` rows of `dim` elements, row_stride apart from `offset` on, into a block from row `first` on, times a factor. True
 * if all are finite. */
static bool pack_block_rows(real *block, int64_t first, int64_t count, const void *data, rapt_dtype dtype,
                            int64_t offset, int64_t row_stride, int64_t stride, int64_t dim, real factor) {
    bool is_dense = dtype == REAL_DTYPE && stride == 1;
    vec trouble = v_zero(), times = v_all(factor); /* x - x is 0, or NaN where x is not finite */
    real tail_trouble = 0;
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t width = width_at(dim, d), columns = dim - d < PANEL ? dim - d : PANEL;
        for (int64_t r = 0; r < count; r++) {
            int64_t at = offset + r * row_stride + d * stride, i = 0;
            real *to = block + d * CHAIN + (first + r) * width;
            const real *from = is_dense ? (const real *)data + at : to;
            if (!is_dense) load_row(to, data, dtype, at, stride, columns);
            for (; i + LANES <= columns; i += LANES) {
                vec x = v_mul(v_load(from + i), times);
                v_store(to + i, x);
                trouble = v_add(trouble, v_sub(x, x));
            }
            for (; i < columns; i++) {
                to[i] = from[i] * factor;
                tail_trouble += to[i] - to[i];
            }
            for (; i < width; i++) to[i] = 0;
        }
    }
    return v_sum(trouble) + tail_trouble == 0;
}

/* Rows of queries, or of what has their shape. */
INLINE bool pack_query_block(real *block, const attn_rows *rows, const rapt_view *view, rapt_dtype dtype, int64_t dim,
                             real factor) {
    const int64_t *stride = view->stride;
    bool is_finite = true;
    int64_t step = rows->heads == 1 ? rows->count : 1; /* evenly apart, or one by one */
    for (int64_t r = 0; r < rows->count; r += step) {
        int64_t at = rows->n * stride[0] + row_head(rows, r) * stride[1] + row_query(rows, r) * stride[2];
        is_finite &= pack_block_rows(block, r, step, view->data, dtype, at, stride[2], stride[3], dim, factor);
    }
    return is_finite;
}

INLINE void clear_block(real *block, int64_t rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d += PANEL) {
        memset(block + d * CHAIN, 0, (size_t)(rows * width_at(dim, d)) * sizeof(real));
    }
}

/* [panel][64][width] of up to 64 rows to [dim][64]. */
INLINE void transpose_block(real *to, const real *block, int64_t rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t count = dim - d < PANEL ? dim - d : PANEL;
        pack_columns(to + d * PANEL, PANEL, block + d * CHAIN, REAL_DTYPE, rows, count, width_at(dim, d), 1);
    }
}

/* delta = the row sums of dO * out, each in the order in which a product sums: a query that sees a single key, whose
 * value is `out`, then finds dP equal to delta, and its dS exactly 0. */
static void sum_deltas(const attn_row_block *block, const real *out, int64_t dim, real *scratch) {
    real *left = scratch, *right = scratch + CHAIN * PANEL, *delta = block->delta;
    int64_t columns = rapt_round_up(block->rows.count, COLUMNS);
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t width = width_at(dim, d), count = dim - d < PANEL ? dim - d : PANEL;
        const real *d_out = (const real *)block->d_out + d * CHAIN;
        pack_columns(left, PANEL, d_out, REAL_DTYPE, block->rows.count, count, width, 1);
        pack_columns(right, PANEL, out + d * CHAIN, REAL_DTYPE, block->rows.count, count, width, 1);
        for (int64_t r = 0; r < columns; r += LANES) {
            vec sum = v_zero();
            for (int64_t i = 0; i < count; i++) {
                sum = v_fma(v_load(left + i * PANEL + r), v_load(right + i * PANEL + r), sum);
            }
            v_store(delta + r, d > 0 ? v_add(v_load(delta + r), sum) : sum);
        }
    }
}

/* Which rows see a single key. Without anything that hides keys they all see all. */
static void find_sole_keys(attn_row_block *block) {
    const attn_rows *rows = &block->rows;
    const attn_problem *p = rows->problem;
    bool hides_some = p->limit_left || p->limit_right || p->mask.data != NULL || p->padding.data != NULL ||
                      p->key_start != NULL || p->key_lengths != NULL;
    block->has_sole_keys = false;
    int64_t first = 0, end;
    if (hides_some) rapt_real_keys(p, rows->n, &first, &end);
    for (int64_t r = 0; r < rows->count && (hides_some || p->keys + p->extra_keys == 1); r++) {
        block->sole_key[r] = rapt_sole_key(p, rows->n, row_head(rows, r), row_query(rows, r), first);
        block->has_sole_keys |= block->sole_key[r] >= 0;
    }
}

/* A log-sum-exp that is larger than this, by masks or by wild scores, is too coarse to compute weights from. In f64, which
 * is there for accuracy and where nothing holds it more exactly, every one is. */
#ifdef RAPT_KERNEL_F32
#define LSE_LIMIT 65536.0
#else
#define LSE_LIMIT 0.0
#endif

/* A weight is 2^(score - power) with the log-sum-exp as a power of two. The whole part goes into the exponent and the rest
 * into a factor: taking all of it off a score would round that to the log-sum-exp's last place. */
static void load_lse(attn_row_block *block) {
    const attn_rows *rows = &block->rows;
    const rapt_view *view = &rows->problem->lse;
    block->has_odd_lse = false;
    for (int64_t r = 0; r < rows->count; r++) {
        int64_t at =
            rows->n * view->stride[0] + row_head(rows, r) * view->stride[1] + row_query(rows, r) * view->stride[2];
        double power = rapt_element_load(view->data, rows->problem->lse_dtype, at) * 0x1.71547652b82fep+0;
        bool sees_nothing = power == -INFINITY;
        double reference = INFINITY, factor = 1; /* all weights come out as 0 */
        block->is_odd[r] = !sees_nothing && !(power < LSE_LIMIT && power > -LSE_LIMIT);
        block->has_odd_lse |= block->is_odd[r];
        if (block->is_odd[r]) { /* backward_odd_rows() begins here */
            reference = -INFINITY;
            factor = 0;
        } else if (!sees_nothing) {
            double whole = power + 0x1.8p52 - 0x1.8p52; /* to the nearest integer */
            reference = whole + 1;                      /* no score is rounded to more */
            factor = 2 * pow2_fraction(whole - power);
        }
        ((real *)block->reference)[r] = (real)reference;
        ((real *)block->factor)[r] = (real)factor;
    }
}

INLINE bool row_is(bool wanted_finite, const real *block, int64_t r, int64_t dim) {
    bool all = true;
    for (int64_t d = 0; d < dim; d++) {
        int64_t panel = d / PANEL * PANEL;
        real x = block[panel * CHAIN + r * width_at(dim, panel) + d - panel];
        all &= wanted_finite ? x - x == 0 : x == 0;
    }
    return all;
}

/* Rows without a gradient add nothing anywhere, though 0 * NaN would: such as padding, whose result no loss reads. */
static __attribute__((noinline)) void leave_out_rows_without_gradient(attn_row_block *block) {
    const attn_problem *p = block->rows.problem;
    real *q = block->q, *d_out = block->d_out;
    block->is_finite = true;
    for (int64_t r = 0; r < block->rows.count; r++) {
        if (row_is(false, d_out, r, p->value_dim)) {
            for (int64_t d = 0; d < p->dim; d += PANEL) {
                memset(q + d * CHAIN + r * width_at(p->dim, d), 0, (size_t)width_at(p->dim, d) * sizeof(real));
            }
            ((real *)block->reference)[r] = (real)INFINITY;
            ((real *)block->delta)[r] = 0;
            block->is_odd[r] = false;
            ((real *)block->factor)[r] = 1;
            if (block->has_sole_keys) block->sole_key[r] = -1;
        }
        block->is_finite &= row_is(true, q, r, p->dim) && row_is(true, d_out, r, p->value_dim);
    }
}

static void backward_rows(const attn_gradients *gradients, attn_row_block *block, void *scratch) {
    const attn_rows *rows = &block->rows;
    const attn_problem *p = rows->problem;
    real scale = (real)(p->scale * 0x1.71547652b82fep+0), *out = (real *)scratch + 2 * CHAIN * PANEL;
    block->is_finite = pack_query_block(block->q, rows, &p->q, p->dtype, p->dim, scale);
    block->is_finite &= pack_query_block(block->d_out, rows, &gradients->out, gradients->out_dtype, p->value_dim, 1);
    bool out_is_finite = pack_query_block(out, rows, &p->out, p->dtype, p->value_dim, 1);
    sum_deltas(block, out, p->value_dim, scratch);
    clear_block(block->d_q, rows->count, p->dim);
    load_lse(block);
    find_sole_keys(block);
    if (!(block->is_finite && out_is_finite) && gradients->weights.data == NULL) leave_out_rows_without_gradient(block);
}

static void backward_keys(const attn_problem *p, int64_t n, int64_t kv_head, attn_key_block *block, void *scratch) {
    const attn_keys *keys = &block->keys;
    const rapt_view *k = keys->extra ? &p->extra_k : &p->k, *v = keys->extra ? &p->extra_v : &p->v;
    int64_t first = keys->extra ? 0 : keys->first_key;
    int64_t k_at = n * k->stride[0] + kv_head * k->stride[1] + first * k->stride[2];
    int64_t v_at = n * v->stride[0] + kv_head * v->stride[1] + first * v->stride[2];
    real *v_rows = scratch;
    block->is_finite =
        pack_block_rows(block->k_rows, 0, keys->keys, k->data, p->dtype, k_at, k->stride[2], k->stride[3], p->dim, 1);
    block->is_finite &=
        pack_block_rows(v_rows, 0, keys->keys, v->data, p->dtype, v_at, v->stride[2], v->stride[3], p->value_dim, 1);
    transpose_block(block->k, block->k_rows, keys->keys, p->dim);
    transpose_block(block->v, v_rows, keys->keys, p->value_dim);
    clear_block(block->d_k, keys->keys, p->dim);
    clear_block(block->d_v, keys->keys, p->value_dim);
}

/* ---- weights and the gradients of scores ---- */

/* Rows [first, first + rows) of left [64][dim] times right [dim][64], columns [begin, end), into c [64][64]. */
INLINE void tile_product(const int S, int64_t first, int64_t rows, int64_t dim, const real *left, const real *right,
                         int64_t begin, int64_t end, rapt_soon *soon, real *c) {
    real *to = c + first * PANEL + begin;
    for (int64_t d = 0; d < dim; d += CHAIN) {
        int64_t width = width_at(dim, d), count = dim - d < CHAIN ? dim - d : CHAIN;
        const real *a = left + d * CHAIN + first * width, *b = right + d * PANEL + begin;
        if (S == 1)
            product_chain(rows, count, a, width, b, PANEL, end - begin, soon, sums_in_place(d > 0, to, PANEL));
        else
            score_chain(rows, count, a, width, b, PANEL, end - begin, soon, d > 0, to, PANEL);
    }
}

/* What a row's weights and their gradients need beside the two products; NULL where there is none. */
typedef struct row_extras {
    const real *dropped;   /* [64], what dropout multiplies a weight by */
    const real *d_weights; /* [64], of the returned weights */
} row_extras;

/* Scores t and products dO V^T to W and dS. What is masked becomes -0 in both, which nothing else does. */
INLINE void gradient_row(int64_t begin, int64_t end, real reference, real factor, real delta, const bool masks,
                         const row_extras extras, real *t, real *dw) {
    vec row_reference = v_all(reference), row_factor = v_all(factor), row_delta = v_all(delta);
    for (int64_t c = begin; c < end; c += LANES) {
        vec score = v_load(t + c), p = v_mul(v_weight(score, row_reference), row_factor), d = v_load(dw + c);
        vec w = p;
        if (extras.d_weights != NULL) d = v_add(d, v_load(extras.d_weights + c));
        if (extras.dropped != NULL) {
            vec z = v_load(extras.dropped + c);
            w = v_mul(p, z);
            d = v_mul(d, z);
        }
        vec ds = v_mul(p, v_sub(d, row_delta));
        if (masks) {
            w = v_where_masked(score, v_all((real)-0.0), w);
            ds = v_where_masked(score, v_all((real)-0.0), v_add(ds, v_zero()));
        }
        v_store(t + c, w);
        v_store(dw + c, ds);
    }
}

/* The gradient of a row of returned weights. */
INLINE void load_weight_gradient(const attn_rows *rows, const attn_keys *keys, const attn_gradients *gradients,
                                 int64_t r, real *d_weights) {
    const attn_problem *p = rows->problem;
    const int64_t *stride = gradients->weights.stride;
    int64_t head = p->average_weights ? 0 : row_head(rows, r);
    int64_t at = rows->n * stride[0] + head * stride[1] + row_query(rows, r) * stride[2] + keys->first_key * stride[3];
    load_row(d_weights, gradients->weights.data, p->dtype, at, stride[3], keys->keys);
    for (int64_t c = 0; c < keys->keys && p->average_weights; c++) d_weights[c] /= (real)p->heads;
    for (int64_t c = keys->keys; c < PANEL; c++) d_weights[c] = 0;
}

/* The scratch of a tile, in reals: W and dS [64][64], then bias and padding [CUT], then two rows of row_extras. */
typedef struct tile_scratch {
    real *weights, *d_scores, *bias, *dropped, *d_weights;
} tile_scratch;

INLINE tile_scratch tile_scratch_of(void *scratch) {
    real *weights = scratch, *d_scores = weights + CHAIN * PANEL, *bias = d_scores + CHAIN * PANEL;
    return (tile_scratch){weights, d_scores, bias, bias + 2 * CUT, bias + 2 * CUT + PANEL};
}

/* A lone key weighs exactly 1, whatever its score, which has no gradient. */
static __attribute__((noinline)) void settle_sole_key(const attn_row_block *block, const attn_keys *keys, int64_t r,
                                                      row_extras extras, real *weights, real *d_scores) {
    int64_t key = block->sole_key[r] - keys->first_key;
    if (block->sole_key[r] < 0 || key < 0 || key >= keys->keys) return;
    weights[r * PANEL + key] = extras.dropped != NULL ? extras.dropped[key] : 1;
    d_scores[r * PANEL + key] = (real)-0.0; /* as if masked: what its key and query are does not matter */
}

/* W and dS of rows [first, first + count) in the columns of the range, 0 outside it. */
INLINE void gradient_rows(const attn_row_block *block, const attn_key_block *key_block, const attn_gradients *gradients,
                          int64_t first, int64_t count, tile_range range, const bool masks, padding_bias padding,
                          tile_scratch tile) {
    const attn_rows *rows = &block->rows;
    const attn_keys *keys = &key_block->keys;
    const attn_problem *p = rows->problem;
    if (range.begin < range.end) {
        tile_product(STRANDS, first, count, p->dim, block->q, key_block->k, range.begin, range.end, block->rows.soon,
                     tile.weights);
        tile_product(1, first, count, p->value_dim, block->d_out, key_block->v, range.begin, range.end,
                     block->rows.soon, tile.d_scores);
    }
    for (int64_t r = first; r < first + count; r++) {
        real *t = tile.weights + r * PANEL, *dw = tile.d_scores + r * PANEL;
        real reference = ((const real *)block->reference)[r], factor = ((const real *)block->factor)[r];
        real delta = ((const real *)block->delta)[r];
        row_extras extras = {0};
        if (p->dropout > 0) {
            draw_row(p, rows->n, row_head(rows, r), row_query(rows, r), keys->first_key, PANEL, dropout_factor(p),
                     tile.dropped);
            extras.dropped = tile.dropped;
        }
        if (gradients->weights.data != NULL) {
            load_weight_gradient(rows, keys, gradients, r, tile.d_weights);
            extras.d_weights = tile.d_weights;
        }
        if (masks && range.begin < range.end) {
            mask_row(rows, keys, r, range.begin, range.end, padding, tile.bias, t);
            gradient_row(range.begin, range.end, reference, factor, delta, true, extras, t, dw);
            if (block->has_sole_keys) settle_sole_key(block, keys, r, extras, tile.weights, tile.d_scores);
        } else if (extras.dropped != NULL || extras.d_weights != NULL) {
            gradient_row(range.begin, range.end, reference, factor, delta, false, extras, t, dw);
        } else {
            gradient_row(range.begin, range.end, reference, factor, delta, false, (row_extras){0}, t, dw);
        }
        for (int64_t c = 0; c < PANEL && masks; c += LANES) {
            if (c >= range.begin && c < range.end) continue;
            v_store(t + c, v_all((real)-0.0));
            v_store(dw + c, v_all((real)-0.0));
        }
    }
}

/* For rows with an odd log-sum-exp, the softmax's reference and sum over the keys of a tile, as the forward finds them. */
static void backward_odd_rows(attn_row_block *block, const attn_key_block *key_block, void *scratch) {
    tile_scratch tile = tile_scratch_of(scratch);
    const attn_rows *rows = &block->rows;
    const attn_keys *keys = &key_block->keys;
    tile_range range = tile_columns(rows, keys);
    if (range.begin >= range.end) return;
    padding_bias padding = load_padding(rows, keys, tile.bias + CUT);
    tile_product(STRANDS, 0, rows->count, rows->problem->dim, block->q, key_block->k, range.begin, range.end,
                 block->rows.soon, tile.weights);
    for (int64_t r = 0; r < rows->count; r++) {
        real *t = tile.weights + r * PANEL, *reference = (real *)block->reference + r, *sum = (real *)block->factor + r,
             added;
        if (!block->is_odd[r]) continue;
        mask_row(rows, keys, r, range.begin, range.end, padding, tile.bias, t);
        if (all_masked(t, range.begin, range.end)) continue;
        real power = largest_score(t, range.begin, range.end);
        if (!(power > LOWEST)) power = LOWEST;
        softmax_row(t, range.begin, range.end, false, &power, &added);
        real higher = *reference > power ? *reference : power;
        *sum = *sum * pow2_or_zero(*reference - higher) + added * pow2_or_zero(power - higher);
        *reference = higher;
    }
}

static void backward_settle_odd_rows(attn_row_block *block) {
    for (int64_t r = 0; r < block->rows.count; r++) {
        if (block->is_odd[r]) ((real *)block->factor)[r] = 1 / ((real *)block->factor)[r];
    }
}

/* Whether all rows see all keys, with nothing added to a score, and no vector holds more than these. */
INLINE bool tile_is_plain(const attn_row_block *block, const attn_keys *keys, tile_range whole) {
    const attn_problem *p = block->rows.problem;
    bool has_mask = (p->mask.data != NULL || p->padding.data != NULL) && !keys->extra;
    bool all_there = whole.all_seen && whole.begin == 0 && whole.last == keys->keys && whole.end == keys->keys;
    return all_there && !has_mask && !block->has_odd_lse;
}

/* Rows [first, first + count) of a block on their own. */
INLINE tile_range range_of_rows(const attn_row_block *block, const attn_keys *keys, int64_t first, int64_t count) {
    attn_rows some = block->rows;
    some.first += first;
    some.count = count;
    return tile_columns(&some, keys);
}

/* W and dS of a tile. False, with nothing written, if no row sees any of its keys. */
static bool tile_gradients(const attn_row_block *block, const attn_key_block *key_block,
                           const attn_gradients *gradients, tile_scratch tile, bool *is_plain) {
    const attn_rows *rows = &block->rows;
    tile_range whole = tile_columns(rows, &key_block->keys);
    if (whole.begin >= whole.end) return false;
    *is_plain = tile_is_plain(block, &key_block->keys, whole);
    if (*is_plain) {
        gradient_rows(block, key_block, gradients, 0, rows->count, whole, false, (padding_bias){0}, tile);
        return true;
    }
    padding_bias padding = load_padding(rows, &key_block->keys, tile.bias + CUT);
    int64_t step = whole.all_seen ? rows->count : EDGE_STEP;
    for (int64_t r = 0; r < rows->count; r += step) {
        int64_t count = rows->count - r < step ? rows->count - r : step;
        tile_range range = range_of_rows(block, &key_block->keys, r, count);
        gradient_rows(block, key_block, gradients, r, count, range, true, padding, tile);
    }
    return true;
}

/* ---- sums ---- */

/* Keys [first_key, + keys) of total [64][dim] += the transposed of weights [64][64], rows [first, + rows), times right. */
INLINE void add_over_rows(int64_t first_key, int64_t keys, int64_t first, int64_t rows, const real *weights,
                          int64_t dim, const real *right, real *total) {
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t width = width_at(dim, d);
        real *to = total + d * CHAIN + first_key * width;
        product_chain_transposed(keys, rows, weights + first * PANEL + first_key, PANEL,
                                 right + d * CHAIN + first * width, width, width, NULL, sums_in_place(true, to, width));
    }
}

/* Rows [first, + rows) of total [64][dim] += weights, columns [begin, end), times right. */
INLINE void add_over_keys(int64_t first, int64_t rows, int64_t begin, int64_t end, const real *weights, int64_t dim,
                          const real *right, real *total) {
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t width = width_at(dim, d);
        real *to = total + d * CHAIN + first * width;
        product_chain(rows, end - begin, weights + first * PANEL + begin, PANEL, right + d * CHAIN + begin * width,
                      width, width, NULL, sums_in_place(true, to, width));
    }
}

/* The same two where the right factor holds NaN or infinity: a masked pair (-0) must add nothing, and 0 * NaN would. */
static __attribute__((noinline)) void select_sum(bool over_rows, int64_t rows, int64_t keys, const real *weights,
                                                 int64_t dim, const real *right, real *total) {
    int64_t outer = over_rows ? keys : rows, inner = over_rows ? rows : keys;
    for (int64_t d = 0; d < rapt_round_up(dim, COLUMNS); d += LANES) {
        int64_t panel = d / PANEL * PANEL, width = width_at(dim, panel), at = panel * CHAIN + d - panel;
        for (int64_t o = 0; o < outer; o++) {
            vec sum = v_zero();
            for (int64_t i = 0; i < inner; i++) {
                real weight = over_rows ? weights[i * PANEL + o] : weights[o * PANEL + i];
                if (weight == 0 && signbit(weight)) continue;
                sum = v_fma(v_all(weight), v_load(right + at + i * width), sum);
            }
            v_store(total + at + o * width, v_add(v_load(total + at + o * width), sum));
        }
    }
}

/* Rows that see any of the keys [begin, end): [*first, *last). Both ends of a band grow with the query. */
INLINE void rows_that_see(const attn_row_block *block, const attn_keys *keys, int64_t begin, int64_t end,
                          int64_t *first, int64_t *last) {
    int64_t low, high;
    *first = 0;
    *last = block->rows.count;
    for (; *first < *last; ++*first) {
        visible_columns(&block->rows, keys, *first, &low, &high);
        if (high > begin) break;
    }
    for (; *last > *first; --*last) {
        visible_columns(&block->rows, keys, *last - 1, &low, &high);
        if (low < end) break;
    }
}

static void backward_tile(attn_row_block *block, attn_key_block *key_block, const attn_gradients *gradients,
                          void *scratch) {
    tile_scratch tile = tile_scratch_of(scratch);
    const attn_problem *p = block->rows.problem;
    const attn_keys *keys = &key_block->keys;
    bool is_plain, wants_k = gradients->k.data != NULL || keys->extra,
                   wants_v = gradients->v.data != NULL || keys->extra;
    if (!tile_gradients(block, key_block, gradients, tile, &is_plain)) return;
    int64_t rows = block->rows.count;
    if (!is_plain && !(block->is_finite && key_block->is_finite)) {
        if (wants_v) select_sum(true, rows, keys->keys, tile.weights, p->value_dim, block->d_out, key_block->d_v);
        if (wants_k) select_sum(true, rows, keys->keys, tile.d_scores, p->dim, block->q, key_block->d_k);
        if (gradients->q.data != NULL) {
            select_sum(false, rows, keys->keys, tile.d_scores, p->dim, key_block->k_rows, block->d_q);
        }
        return;
    }
    tile_range whole = tile_columns(&block->rows, keys);
    int64_t key_step = whole.all_seen ? keys->keys : EDGE_STEP, row_step = whole.all_seen ? rows : EDGE_STEP;
    for (int64_t c = 0; c < keys->keys && (wants_k || wants_v); c += key_step) {
        int64_t count = keys->keys - c < key_step ? keys->keys - c : key_step, first = 0, last = rows;
        if (!whole.all_seen) rows_that_see(block, keys, c, c + count, &first, &last);
        if (first >= last) continue;
        if (wants_v) {
            add_over_rows(c, count, first, last - first, tile.weights, p->value_dim, block->d_out, key_block->d_v);
        }
        if (wants_k) add_over_rows(c, count, first, last - first, tile.d_scores, p->dim, block->q, key_block->d_k);
    }
    for (int64_t r = 0; r < rows && gradients->q.data != NULL; r += row_step) {
        int64_t count = rows - r < row_step ? rows - r : row_step;
        tile_range range = range_of_rows(block, keys, r, count);
        if (range.begin >= range.end) continue;
        add_over_keys(r, count, range.begin, range.last, tile.d_scores, p->dim, key_block->k_rows, block->d_q);
    }
}

/* Adds the sum over a tile's keys of W times the gradient of returned weights to the rows' delta. */
static void backward_delta(attn_row_block *block, const attn_key_block *key_block, const attn_gradients *gradients,
                           void *scratch) {
    tile_scratch tile = tile_scratch_of(scratch);
    bool is_plain;
    if (!tile_gradients(block, key_block, gradients, tile, &is_plain)) return;
    for (int64_t r = 0; r < block->rows.count; r++) {
        const real *weights = tile.weights + r * PANEL;
        load_weight_gradient(&block->rows, &key_block->keys, gradients, r, tile.d_weights);
        vec partial[COLUMNS / LANES];
        UNROLL for (int v = 0; v < COLUMNS / LANES; v++) partial[v] = v_zero();
        for (int64_t c = 0; c < key_block->keys.keys; c += COLUMNS) {
            UNROLL for (int v = 0; v < COLUMNS / LANES; v++) {
                vec w = v_load(weights + c + v * LANES), d = v_load(tile.d_weights + c + v * LANES);
                d = v_where_equal(w, 0, v_zero(), d); /* what is masked may be anything */
                partial[v] = v_fma(w, d, partial[v]);
            }
        }
        ((real *)block->delta)[r] += sum_of_columns(partial);
    }
}

/* ---- masks ---- */

/* Adds dS of a tile to sums [64][64], or, if rows are summed too, their sum to the first of its rows. */
static void backward_mask(attn_row_block *block, const attn_key_block *key_block, const attn_gradients *gradients,
                          bool sums_rows, void *sums, void *scratch) {
    tile_scratch tile = tile_scratch_of(scratch);
    bool is_plain;
    if (!tile_gradients(block, key_block, gradients, tile, &is_plain)) return;
    int64_t step = sums_rows ? block->rows.count : 1;
    for (int64_t r = 0; r < block->rows.count; r += step) {
        for (int64_t c = 0; c < key_block->keys.keys; c += LANES) {
            real *to = (real *)sums + (sums_rows ? 0 : r * PANEL) + c;
            vec sum = v_zero();
            for (int64_t i = r; i < r + step; i++) sum = v_add(sum, v_load(tile.d_scores + i * PANEL + c));
            v_store(to, v_add(v_load(to), sum));
        }
    }
}

/* ---- results ---- */

/* Row r of a block [64][dim], times a factor, to where `to` says. */
static void store_block_row(const void *block, int64_t r, int64_t dim, double factor, bool accumulate, void *to,
                            rapt_dtype dtype, int64_t stride, void *row_scratch) {
    bool in_place = dtype == REAL_DTYPE && stride == 1 && dim % COLUMNS == 0 && !accumulate;
    real *row = in_place ? to : row_scratch;
    for (int64_t d = 0; d < dim; d += PANEL) {
        int64_t width = width_at(dim, d);
        const real *from = (const real *)block + d * CHAIN + r * width;
        for (int64_t i = 0; i < width; i += LANES) {
            v_store(row + d + i, v_add(v_mul(v_load(from + i), v_all((real)factor)), v_zero())); /* zeros are +0 */
        }
    }
    if (!in_place) (accumulate ? add_row : store_row)(row, dim, to, dtype, stride);
}

#endif
