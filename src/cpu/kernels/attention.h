/* attention.h - the tile work of attention: scores, weights and weighted values of one cut of keys, and cuts merged */
#ifndef RAPT_CPU_KERNELS_ATTENTION_H
#define RAPT_CPU_KERNELS_ATTENTION_H

#include "../../cache.h"
#include "decode.h"
#include "dropout.h"
#include "masks.h"
#include "product.h"
#include "softmax.h"

static void pack_queries(const attn_rows *rows, void *q) {
    const attn_problem *p = rows->problem;
    const attn_rows of = *rows; /* copies, so that nothing is read again after each store */
    const rapt_view view = p->q;
    const int64_t sequence = of.n * view.stride[0];
    bool in_one_go = p->dtype == REAL_DTYPE && view.stride[3] == 1;
    int64_t count = of.count, dim = p->dim;
    if (in_one_go && of.heads == 1 && view.stride[2] == dim) { /* without gaps: all of them are like one row */
        dim *= count;
        count = 1;
    }
    real factor = (real)(p->scale * 0x1.71547652b82fep+0); /* log2(e): scores become powers of two */
    for (int64_t r = 0; r < count; r++) {
        real *to = (real *)q + r * dim;
        int64_t offset = sequence + row_head(&of, r) * view.stride[1] + row_query(&of, r) * view.stride[2];
        if (in_one_go) {
            const real *from = (const real *)(const void *)view.data + offset;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) v_store(to + d, v_mul(v_load(from + d), v_all(factor)));
            for (; d < dim; d++) to[d] = from[d] * factor;
            continue;
        }
        load_row(to, view.data, p->dtype, offset, view.stride[3], dim);
        for (int64_t d = 0; d < dim; d++) to[d] *= factor;
    }
}

/* ---- one cut ---- */

static void attn_begin(int64_t rows, attn_partial *total) {
    for (int64_t r = 0; r < rows; r++) {
        ((real *)total->reference)[r] = (real)-INFINITY;
        ((real *)total->sum)[r] = 0;
    }
    memset(total->out, 0, (size_t)(rows * total->out_stride) * sizeof(real));
}

/* Keys [c, c + LANES) by LANES dimensions from d on, transposed; unless all are there, those behind the last are zeros. */
INLINE void load_key_block(const attn_keys *keys, int64_t c, int64_t d, const bool all_there, vec block[LANES]) {
    const real *k = (const real *)keys->k + c * keys->k_stride + d;
    if (all_there) {
        v_load_transposed(k, keys->k_stride, block);
    } else {
        real rows[LANES * LANES] = {0};
        for (int64_t i = 0; c + i < keys->keys; i++) v_store(rows + i * LANES, v_load(k + i * keys->k_stride));
        v_load_transposed(rows, LANES, block);
    }
}

/* sum[r] += the products of dimensions [d + begin, d + end), of a block from d on. */
INLINE void in_place_terms(const int R, const int begin, const int end, int64_t dim, const real *q, int64_t d,
                           const vec block[LANES], vec sum[]) {
    UNROLL for (int i = begin; i < end; i++) {
        UNROLL for (int r = 0; r < R; r++) sum[r] = v_fma(v_all(q[r * dim + d + i]), block[i], sum[r]);
    }
}

/* Both halves of a chain over dimensions [d, end), which are a multiple of COLUMNS. */
INLINE void in_place_chain(const int R, int64_t dim, const attn_keys *keys, const real *q, int64_t c, int64_t d,
                           int64_t end, const bool all_there, vec first[], vec second[]) {
    vec block[LANES];
    /* Whole chains are unrolled, with one set of addresses; with narrow vectors in turn, so that neither half waits for
     * its last product. */
    if (end - d == CHAIN && LANES < COLUMNS) {
        UNROLL for (int i = 0; i < CHAIN / 2; i += LANES) {
            load_key_block(keys, c, d + i, all_there, block);
            in_place_terms(R, 0, LANES, dim, q, d + i, block, first);
            load_key_block(keys, c, d + CHAIN / 2 + i, all_there, block);
            in_place_terms(R, 0, LANES, dim, q, d + CHAIN / 2 + i, block, second);
        }
        return;
    }
    if (end - d == CHAIN) {
        UNROLL for (int i = 0; i < CHAIN; i += LANES) {
            load_key_block(keys, c, d + i, all_there, block);
            in_place_terms(R, 0, LANES, dim, q, d + i, block, i < CHAIN / 2 ? first : second);
        }
        return;
    }
    const int part = LANES < COLUMNS ? LANES : COLUMNS / 2; /* of a block, all of it in one half of the chain */
    for (int64_t middle = (d + end) / 2; d < end; d += LANES) {
        load_key_block(keys, c, d, all_there, block);
        UNROLL for (int i = 0; i < LANES; i += part) {
            in_place_terms(R, i, i + part, dim, q, d, block, d + i < middle ? first : second);
        }
    }
}

/* Scores of R rows with keys [c, c + LANES) that are not packed, each the same sum as score_product()'s. */
INLINE void in_place_columns(const int R, int64_t dim, const attn_keys *keys, const real *q, int64_t c,
                             const bool all_there, real *scores) {
    for (int i = 0; i < LANES && keys->is_far; i++) {
        const real *soon = (const real *)keys->k + (c + 2 * LANES + i) * keys->k_stride;
        for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(soon + d, 0, 2);
    }
    vec total[IN_PLACE_ROWS];
    UNROLL for (int r = 0; r < R; r++) total[r] = v_zero();
    for (int64_t d = 0; d < dim; d += CHAIN) {
        vec first[IN_PLACE_ROWS], second[IN_PLACE_ROWS]; /* the halves of a chain */
        UNROLL for (int r = 0; r < R; r++) first[r] = second[r] = v_zero();
        in_place_chain(R, dim, keys, q, c, d, dim - d < CHAIN ? dim : d + CHAIN, all_there, first, second);
        UNROLL for (int r = 0; r < R; r++) {
            vec chain = v_add(first[r], second[r]);
            total[r] = d == 0 ? chain : v_add(total[r], chain);
        }
    }
    UNROLL for (int r = 0; r < R; r++) v_store(scores + r * CUT + c, total[r]);
}

INLINE void in_place_scores(const int R, int64_t dim, const attn_keys *keys, const real *q, int64_t begin, int64_t end,
                            real *scores) {
    int64_t c = begin;
    for (; c + LANES <= keys->keys && c < end; c += LANES) in_place_columns(R, dim, keys, q, c, true, scores);
    for (; c < end; c += LANES) in_place_columns(R, dim, keys, q, c, false, scores);
}

/* `count` elements of keys or values from `at` on: where they lie, or as reals in `widened`. */
INLINE const real *as_reals(const attn_keys *keys, const void *data, int64_t at, int64_t count) {
    if (keys->dtype == REAL_DTYPE) return (const real *)data + at;
    load_row(keys->widened, data, keys->dtype, at, 1, count);
    return keys->widened;
}

/* Whether a product is better off with the numbers as they are stored than with a widened copy of them. */
INLINE bool stays_narrow(const attn_rows *rows, const attn_keys *keys) {
    return sizeof(real) == sizeof(float) && rapt_dtype_size(keys->dtype) == 2 && rows->count <= MICRO_ROWS;
}

/* Scores [count][CUT] of the columns [begin, end). */
static void tile_scores(const attn_rows *rows, const attn_keys *keys, const real *q, int64_t begin, int64_t end,
                        real *scores) {
    int64_t dim = rows->problem->dim;
    if (keys->k_in_place) {
        switch (rows->count) {
        case 1: in_place_scores(1, dim, keys, q, begin, end, scores); return;
        case 2: in_place_scores(2, dim, keys, q, begin, end, scores); return;
        case 3: in_place_scores(3, dim, keys, q, begin, end, scores); return;
        default: in_place_scores(4, dim, keys, q, begin, end, scores); return;
        }
    }
    for (int64_t panel = begin / PANEL; panel * PANEL < end; panel++) {
        int64_t first = panel * PANEL > begin ? panel * PANEL : begin;
        int64_t last = (panel + 1) * PANEL < end ? (panel + 1) * PANEL : end;
        if (stays_narrow(rows, keys)) {
            const uint16_t *k = (const uint16_t *)keys->k + panel * PANEL * dim + (first - panel * PANEL);
            for (int64_t d = 0; d < dim; d += CHAIN) {
                sums_to to = sums_in_place(d > 0, scores + first, CUT);
                int64_t count = dim - d < CHAIN ? dim - d : CHAIN;
                narrow_score_chain(keys->dtype, rows->count, count, q + d, dim, k + d * PANEL, PANEL, last - first, to);
            }
            continue;
        }
        const real *k = as_reals(keys, keys->k, panel * PANEL * dim, PANEL * dim) + (first - panel * PANEL);
        score_product(rows->count, dim, q, dim, k, PANEL, last - first, rows->soon, scores + first, CUT);
    }
}

/* A pair of chains of the product of weights and values where values hold NaN or infinity: a masked key (weight -0) must
 * add nothing, and 0 * NaN would. Otherwise as product_pair(). */
static void select_pair(int64_t rows, int64_t inner, const real *weights, const real *v, int64_t v_stride,
                        int64_t width, sums_to to) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < width; d += LANES) {
            vec strand[STRANDS] = {v_zero(), v_zero()};
            for (int64_t c = 0; c < inner; c++) {
                real weight = weights[r * CUT + c];
                vec *sum = &strand[c / CHAIN];
                if (!signbit(weight)) *sum = v_fma(v_all(weight), v_load(v + c * v_stride + d), *sum);
            }
            vec sum = v_add(strand[0], strand[1]);
            if (to.before != NULL) sum = v_add(v_load(to.before + r * to.ld_before + d), sum);
            v_store(to.c + r * to.ldc + d, sum);
        }
    }
}

/* Values of the keys [first, first + inner) weighted by scores [count][CUT], into partial->out, from a dimension on. `first`
 * is the first of a pair of chains. */
static void weigh_values(const attn_rows *rows, const attn_keys *keys, int64_t dimension, int64_t first, int64_t inner,
                         bool mark_masked, const real *scores, attn_partial *partial) {
    int64_t ldo = partial->out_stride;
    for (int64_t d = dimension; d < ldo; d += PANEL) {
        int64_t width = ldo - d < PANEL ? ldo - d : PANEL, stride = keys->v_in_place ? keys->v_stride : width;
        int64_t panel_at = keys->v_in_place ? d : d * keys->capacity;
        real *out = (real *)partial->out + d;
        for (int64_t k = 0; k < inner || k == 0; k += PAIR) { /* at least once: no keys give zeros */
            int64_t count = inner - k < PAIR ? inner - k : PAIR;
            sums_to to = sums_in_place(k > 0, out, ldo);
            int64_t at = panel_at + (first + k) * stride;
            if (stays_narrow(rows, keys) && !mark_masked) {
                const uint16_t *v = (const uint16_t *)keys->v + at;
                narrow_pair(keys->dtype, rows->count, count, scores + first + k, CUT, v, stride, width, to);
                continue;
            }
            const real *v = as_reals(keys, keys->v, at, count * stride);
            if (mark_masked) {
                select_pair(rows->count, count, scores + first + k, v, stride, width, to);
            } else {
                product_pair(rows->count, count, scores + first + k, CUT, 0, v, stride, width, to);
            }
        }
    }
}

/* The largest score that a row sees, with band and masks brought in: -inf if it sees none. */
INLINE real largest_seen(const attn_rows *rows, const attn_keys *keys, int64_t r, tile_range range, bool needs_bias,
                         padding_bias padding, real *bias, real *t) {
    int64_t begin = range.begin, end = range.end;
    real largest = largest_score(t, begin, end);
    if (largest > LOWEST) return largest;
    /* Every score that is seen is the lowest number, or overflowed, or NaN: what is masked must be told apart now. */
    if (!needs_bias) mask_row(rows, keys, r, begin, end, padding, bias, t);
    return all_masked(t, begin, end) ? (real)-INFINITY : LOWEST;
}

enum { LONG_ROW = 64 }; /* columns */

/* Weights of rows that see all columns, up to the first that has no score that is a number. Gives the number of rows. The
 * largest scores of some rows are found while the weights of those before are computed. */
static __attribute__((noinline)) int64_t softmax_of_long_rows(int64_t rows, int64_t begin, int64_t end, real *scores,
                                                              real *reference, real *sum) {
    int64_t r = 0, known = 0; /* rows whose largest score is */
    while (r < rows) {
        int64_t count = rows - r < ROWS_IN_STEP ? 1 : ROWS_IN_STEP;
        real *t = scores + r * CUT;
        for (; known < r + count; known++) reference[known] = largest_score(scores + known * CUT, begin, end);
        for (int64_t i = r; i < r + count; i++) {
            if (!(reference[i] > LOWEST)) return r;
        }
        if (rows - r >= 2 * ROWS_IN_STEP) {
            softmax_rows(ROWS_IN_STEP, true, t, begin, end, false, &reference[r], &sum[r]);
            known += ROWS_IN_STEP;
        } else if (count > 1) {
            softmax_rows(ROWS_IN_STEP, false, t, begin, end, false, &reference[r], &sum[r]);
        } else {
            softmax_rows(1, false, t, begin, end, false, &reference[r], &sum[r]);
        }
        r += count;
    }
    return r;
}

/* The same of short rows, where that would take longer, since a row would wait for those before. */
INLINE int64_t softmax_of_short_rows(int64_t rows, int64_t begin, int64_t end, real *scores, real *reference,
                                     real *sum) {
    int64_t r = 0;
    for (; r < rows; r++) {
        reference[r] = largest_score(scores + r * CUT, begin, end);
        if (!(reference[r] > LOWEST)) return 0;
    }
    for (r = 0; r + ROWS_IN_STEP <= rows; r += ROWS_IN_STEP) {
        softmax_rows(ROWS_IN_STEP, false, scores + r * CUT, begin, end, false, &reference[r], &sum[r]);
    }
    for (; r < rows; r++) softmax_rows(1, false, scores + r * CUT, begin, end, false, &reference[r], &sum[r]);
    return rows;
}

/* Weights of rows from `first` on of which some may not see all columns, or see no score that is a number. */
static __attribute__((noinline)) void masked_softmax(const attn_rows *rows, const attn_keys *keys, int64_t first,
                                                     tile_range range, bool mark_masked, real *scratch,
                                                     attn_partial *partial) {
    real *bias = scratch, *scores = bias + 2 * CUT, *reference = partial->reference, *sum = partial->sum;
    padding_bias padding = load_padding(rows, keys, bias + CUT);
    bool needs_bias = mark_masked || padding.bias != NULL || (rows->problem->mask.data != NULL && !keys->extra);
    for (int64_t r = first; r < rows->count; r++) {
        real *t = scores + r * CUT;
        if (needs_bias) {
            mask_row(rows, keys, r, range.begin, range.end, padding, bias, t);
        } else {
            band_row(rows, keys, r, range.begin, range.end, t);
        }
    }
    for (int64_t r = first; r < rows->count; r++) {
        reference[r] = largest_seen(rows, keys, r, range, needs_bias, padding, bias, scores + r * CUT);
    }
    for (int64_t r = first; r < rows->count; r++) {
        bool mark = mark_masked || reference[r] <= LOWEST;
        softmax_row(scores + r * CUT, range.begin, range.end, mark, &reference[r], &sum[r]);
    }
}

/* Weights that do not stay become 0; the others are divided when the rows are finished. */
static __attribute__((noinline)) void drop_weights(const attn_rows *rows, const attn_keys *keys, tile_range range,
                                                   real *scores) {
    for (int64_t r = 0; r < rows->count; r++) {
        real stays[CUT], *t = scores + r * CUT;
        draw_row(rows->problem, rows->n, row_head(rows, r), row_query(rows, r), keys->first_key + range.begin,
                 range.end - range.begin, 1, stays);
        for (int64_t c = range.begin; c < range.end; c += LANES) {
            v_store(t + c, v_mul(v_load(t + c), v_load(stays + c - range.begin)));
        }
    }
}

/* Whether the cut is one that decode.h takes. */
INLINE bool can_stream(const attn_rows *rows, const attn_keys *keys, tile_range range, const attn_partial *partial) {
    const attn_problem *p = rows->problem;
    bool is_known = keys->dtype == REAL_DTYPE || stays_narrow(rows, keys);
    return p->cache != NULL && !keys->extra && is_known && rows->count <= STREAM_ROWS && range.begin == 0 &&
           range.last == keys->keys && p->dropout == 0 && partial->out_stride >= PANEL;
}

/* One cut for rows that see much the same columns of it. */
static void attn_block(const attn_rows *rows, const attn_keys *keys, tile_range range, const real *q, real *scratch,
                       attn_partial *partial) {
    real *scores = scratch + 2 * CUT;
    const attn_problem *p = rows->problem;
    bool has_mask = (p->mask.data != NULL || p->padding.data != NULL) && !keys->extra;
    /* Some of the keys that are weighed may be masked: by a mask, by the band, or before `begin` in its pair. */
    bool weighs_masked = has_mask || !range.all_seen || range.begin % PAIR != 0;
    bool mark_masked = keys->has_non_finite_values && weighs_masked;
    if (!weighs_masked && can_stream(rows, keys, range, partial) &&
        stream_cut(rows->count, keys, p->dim, q, scores, partial)) {
        weigh_values(rows, keys, partial->out_stride / PANEL * PANEL, 0, keys->keys, false, scores, partial);
        return;
    }
    tile_scores(rows, keys, q, range.begin, range.end, scores);

    /* Passes over the rows: in each of them no row waits for another. */
    bool is_plain = !has_mask && range.all_seen;
    for (int64_t r = 0; r < rows->count && is_plain && range.last < range.end; r++) {
        mask_outside(scores + r * CUT, range.begin, range.begin, range.last, range.end);
    }
    int64_t done = 0;
    if (is_plain && range.end - range.begin > LONG_ROW) {
        done = softmax_of_long_rows(rows->count, range.begin, range.end, scores, partial->reference, partial->sum);
    } else if (is_plain) {
        done = softmax_of_short_rows(rows->count, range.begin, range.end, scores, partial->reference, partial->sum);
    }
    if (done < rows->count) masked_softmax(rows, keys, done, range, mark_masked, scratch, partial);
    if (p->dropout > 0) drop_weights(rows, keys, range, scores);

    /* Chains are counted from the cut's first key, so the product begins at a pair's; weights before that are 0. */
    int64_t first = range.begin / PAIR * PAIR;
    int64_t inner = range.last - first;
    for (int64_t r = 0; r < rows->count && first < range.begin; r++) {
        for (int64_t c = first; c < range.begin; c++) scores[r * CUT + c] = (real)-0.0;
    }
    weigh_values(rows, keys, 0, first, inner, mark_masked, scores, partial);
}

static bool attn_cut(const attn_rows *rows, const attn_keys *keys, const void *q, void *scratch,
                     attn_partial *partial) {
    tile_range whole = tile_columns(rows, keys);
    if (whole.begin >= whole.end) return false;
    int64_t step = 2 * MICRO_ROWS;
    if (whole.all_seen || rows->count <= step) {
        attn_block(rows, keys, whole, q, scratch, partial);
        return true;
    }
    /* Across the edge of a band, few rows at a time: fewer scores are computed only to be masked. */
    for (int64_t r = 0; r < rows->count; r += step) {
        attn_rows block = *rows;
        block.first += r;
        block.count = rows->count - r < step ? rows->count - r : step;
        attn_partial result = {.reference = (real *)partial->reference + r,
                               .sum = (real *)partial->sum + r,
                               .out = (real *)partial->out + r * partial->out_stride,
                               .out_stride = partial->out_stride};
        tile_range range = tile_columns(&block, keys);
        if (range.begin < range.end) {
            attn_block(&block, keys, range, (const real *)q + r * rows->problem->dim, scratch, &result);
        } else {
            attn_begin(block.count, &result); /* sees nothing here: nothing to add */
        }
    }
    return true;
}

/* ---- cuts together ---- */

/* x * factor, where infinity times 0 is 0: huge values may overflow in a cut that turns out to weigh nothing. */
INLINE vec v_times_or_zero(vec x, real factor) {
    if (factor == 0) x = v_max_or_second(v_all(LOWEST), v_sub(v_zero(), v_max_or_second(v_all(LOWEST), x)));
    return v_mul(x, v_all(factor));
}

static void attn_merge(int64_t rows, attn_partial *total, const attn_partial *partial) {
    for (int64_t r = 0; r < rows; r++) {
        real *reference = (real *)total->reference + r, *sum = (real *)total->sum + r;
        real added_reference = ((const real *)partial->reference)[r], added_sum = ((const real *)partial->sum)[r];
        if (added_reference == (real)-INFINITY) continue;
        real higher = *reference > added_reference ? *reference : added_reference;
        real shrink = pow2_or_zero(*reference - higher), shrink_added = pow2_or_zero(added_reference - higher);
        *reference = higher;
        *sum = *sum * shrink + added_sum * shrink_added;
        real *out = (real *)total->out + r * total->out_stride;
        const real *added = (const real *)partial->out + r * partial->out_stride;
        for (int64_t d = 0; d < total->out_stride; d += LANES) {
            vec scaled = v_times_or_zero(v_load(out + d), shrink);
            v_store(out + d, v_add(scaled, v_times_or_zero(v_load(added + d), shrink_added)));
        }
    }
}

/* A query that sees a single key gets its value as it is, whatever the score, an overflow included: weight / weight is 1,
 * but (weight * value) / weight need not be the value, and a single token that takes the short way through the layer
 * must get these bits too. *weight is then 1, or what dropout makes of it. */
static __attribute__((noinline)) void copy_sole_value(const attn_rows *rows, int64_t r, real *out, real *weight) {
    const attn_problem *p = rows->problem;
    int64_t head = row_head(rows, r), query = row_query(rows, r), key = rapt_sole_key(p, rows->n, head, query, 0);
    if (key < 0) return;
    *weight = 1;
    if (p->dropout > 0) draw_row(p, rows->n, head, query, key, 1, dropout_factor(p), weight);
    if (p->cache != NULL && key < p->keys) {
        const rapt_cache *cache = p->cache;
        const char *values = rapt_cache_block(cache, rows->n, rows->kv_head, key / CUT) + cache->value_offset;
        for (int64_t d = 0; d < p->value_dim; d += PANEL) {
            int64_t count = p->value_dim - d < PANEL ? p->value_dim - d : PANEL;
            load_row(out + d, values, cache->config.dtype, rapt_cache_value_at(cache, key % CUT, d), 1, count);
        }
        return;
    }
    const rapt_view *v = key < p->keys ? &p->v : &p->extra_v;
    if (key >= p->keys) key -= p->keys;
    int64_t offset = rows->n * v->stride[0] + rows->kv_head * v->stride[1] + key * v->stride[2];
    load_row(out, v->data, p->dtype, offset, v->stride[3], p->value_dim);
}

/* What the sum of a row's weighted values is multiplied by: 1 where it is the result already. */
INLINE real finishing_factor(const attn_rows *rows, int64_t r, real reference, real sum, real *out) {
    const attn_problem *p = rows->problem;
    real factor = p->dropout > 0 ? 1 / sum * dropout_factor(p) : 1 / sum;
    if (sum > (real)1.42) return factor; /* of several weights: a lone one is 2^r with |r| <= 1/2, or NaN */
    if (reference == (real)-INFINITY) return 1;
    if (!(sum < (real)0.7)) copy_sole_value(rows, r, out, &factor);
    return factor;
}

static __attribute__((noinline)) void store_lse(const attn_rows *rows, const attn_partial *total) {
    const rapt_view *lse = &rows->problem->lse;
    for (int64_t r = 0; r < rows->count; r++) {
        real reference = ((const real *)total->reference)[r], sum = ((const real *)total->sum)[r];
        double value = ((double)reference + rapt_log2((double)sum)) * 0x1.62e42fefa39efp-1; /* ln 2 */
        int64_t to =
            rows->n * lse->stride[0] + row_head(rows, r) * lse->stride[1] + row_query(rows, r) * lse->stride[2];
        if (reference == (real)-INFINITY) value = -INFINITY;
        rapt_element_store(lse->data, rows->problem->lse_dtype, to, value);
    }
}

static void attn_finish(const attn_rows *rows, const attn_partial *total) {
    const attn_problem *p = rows->problem;
    const attn_rows of = *rows; /* copies, so that nothing is read again after each store */
    const attn_partial from = *total;
    const rapt_view view = p->out;
    int64_t element = (int64_t)rapt_dtype_size(p->dtype), width = from.out_stride;
    bool stores_in_place = p->dtype == REAL_DTYPE && view.stride[3] == 1 && p->value_dim == width;
    char *sequence = view.data + of.n * view.stride[0] * element;
    for (int64_t r = 0; r < of.count; r++) {
        real reference = ((const real *)from.reference)[r], sum = ((const real *)from.sum)[r];
        real *out = (real *)from.out + r * width;
        vec factor = v_all(finishing_factor(rows, r, reference, sum, out));
        char *target = sequence + (row_head(&of, r) * view.stride[1] + row_query(&of, r) * view.stride[2]) * element;
        real *result = stores_in_place ? (real *)(void *)target : out;
        for (int64_t d = 0; d < width; d += LANES) {
            v_store(result + d, v_add(v_mul(v_load(out + d), factor), v_zero())); /* final zeros are +0 */
        }
        if (!stores_in_place) store_row(out, p->value_dim, target, p->dtype, view.stride[3]);
    }
    if (p->lse.data != NULL) store_lse(rows, total);
}

/* ---- returned weights ---- */

static void attn_weights(const attn_rows *rows, const attn_keys *keys, const void *q, void *scratch,
                         const void *reference, const void *sum, void *weights, int64_t weights_stride) {
    tile_range range = tile_columns(rows, keys);
    int64_t begin = range.begin, end = range.end;
    if (begin >= end) return;
    const attn_problem *p = rows->problem;
    real *bias = scratch, *scores = bias + 2 * CUT;
    padding_bias padding = load_padding(rows, keys, bias + CUT);
    tile_scores(rows, keys, q, begin, end, scores);
    int64_t last = end < keys->keys ? end : keys->keys;
    for (int64_t r = 0; r < rows->count; r++) {
        real *t = scores + r * CUT;
        /* With the bias even where there is no mask: it lifts scores that overflowed to -inf off the masked ones. */
        mask_row(rows, keys, r, begin, end, padding, bias, t);
        vec row_reference = v_all(((const real *)reference)[r]), row_sum = v_all(((const real *)sum)[r]);
        for (int64_t c = begin; c < end; c += LANES) {
            vec score = v_load(t + c);
            v_store(t + c, v_where_masked(score, v_zero(), v_div(v_weight(score, row_reference), row_sum)));
        }
        if (isnan(((const real *)sum)[r])) { /* a lone key weighs 1 even if its score is no number */
            int64_t key = rapt_sole_key(p, rows->n, row_head(rows, r), row_query(rows, r), 0) - keys->first_key;
            if (key >= begin && key < last) t[key] = 1;
        }
        if (p->dropout > 0) {
            real *z = bias;
            draw_row(p, rows->n, row_head(rows, r), row_query(rows, r), keys->first_key + begin, last - begin,
                     dropout_factor(p), z);
            for (int64_t c = begin; c < last; c++) t[c] *= z[c - begin];
        }
        memcpy((real *)weights + r * weights_stride + keys->first_key + begin, t + begin,
               (size_t)(last - begin) * sizeof(real));
    }
}

static void store_weights(const attn_rows *rows, const void *weights, int64_t weights_stride, void *average) {
    const attn_problem *p = rows->problem;
    int64_t columns = p->keys + p->extra_keys, element = (int64_t)rapt_dtype_size(p->dtype);
    bool first_head = rows->first_head == 0, last_head = rows->first_head == p->heads - 1;
    for (int64_t r = 0; r < rows->count; r++) {
        const real *row = (const real *)weights + r * weights_stride;
        int64_t query = row_query(rows, r);
        char *target = p->weights.data + element * (rows->n * p->weights.stride[0] + query * p->weights.stride[2]);
        if (!p->average_weights) {
            target += element * rows->first_head * p->weights.stride[1];
            store_row(row, columns, target, p->dtype, p->weights.stride[3]);
            continue;
        }
        real *sum =
            average == NULL ? (real *)(void *)target : (real *)average + (rows->n * p->queries + query) * columns;
        int64_t stride = average == NULL ? p->weights.stride[3] : 1;
        for (int64_t j = 0; j < columns; j++) {
            real value = first_head ? row[j] : sum[j * stride] + row[j];
            sum[j * stride] = last_head ? value / (real)p->heads : value;
        }
        if (last_head && average != NULL) store_row(sum, columns, target, p->dtype, p->weights.stride[3]);
    }
}

#endif
