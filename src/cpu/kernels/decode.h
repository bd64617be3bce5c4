/* decode.h - few rows and one cut of a cache, all of which they see: a token that is decoded
 *
 * Most of the time goes by until keys and values have arrived. So everything streams: no calls from panel to panel, and
 * weights are computed block by block between the values that they weigh, not all before the first value is asked for.
 * The bits are those of tile_scores(), softmax_rows() and weigh_values().
 */
#ifndef RAPT_CPU_KERNELS_DECODE_H
#define RAPT_CPU_KERNELS_DECODE_H

#include "masks.h"
#include "product.h"
#include "softmax.h"

enum {
    STREAM_ROWS = 4,
    PANEL_VECTORS = PANEL / LANES,
    STREAM_VECTORS = PANEL_VECTORS < 8 ? PANEL_VECTORS : 8, /* of one row's sums, more than of several */
};
#define VECTORS_FOR(R) ((R) == 1 ? STREAM_VECTORS : MICRO_VECTORS)

typedef vec stream_sums[STREAM_ROWS][STREAM_VECTORS];

INLINE void stream_clear(const int R, stream_sums sum) {
    const int V = VECTORS_FOR(R);
    UNROLL for (int r = 0; r < R; r++) { UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_zero(); }
}

/* A chain ahead if it comes from memory; else nothing new: a cache is read as fast without. */
INLINE int64_t stream_ahead(const attn_keys *keys) { return keys->is_far ? CHAIN * PANEL : 0; }

/* sum[r] += x[r][i] * row i of a panel, for `count` rows of it, from element `at` on; rows of x are `stride` apart. What
 * is `ahead` of each row is fetched: the first line of reals, or all, and both of 16-bit numbers. */
INLINE void stream_rows(const number_kind kind, const bool all_lines, const int R, int64_t count, const real *x,
                        int64_t stride, matrix panel, int64_t at, int64_t ahead, stream_sums sum) {
    const int V = VECTORS_FOR(R);
    for (int64_t i = 0; i < count; i++) {
        vec numbers[STREAM_VECTORS];
        fetch_ahead(kind, panel, at + ahead);
        if (kind != REALS) fetch_ahead(kind, panel, at + ahead + PANEL / 2);
        for (int c = LINE; c < V * LANES && all_lines; c += LINE) fetch_ahead(kind, panel, at + ahead + c);
        UNROLL for (int v = 0; v < V; v++) numbers[v] = load_numbers(kind, panel, at + v * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            vec factor = v_all(x[r * stride + i]);
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_fma(factor, numbers[v], sum[r][v]);
        }
        at += PANEL;
    }
}

INLINE void stream_add(const int R, stream_sums sum, const real *from, int64_t stride) {
    const int V = VECTORS_FOR(R);
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_add(v_load(from + r * stride + v * LANES), sum[r][v]);
    }
}

INLINE void stream_store(const int R, stream_sums sum, real *to, int64_t stride) {
    const int V = VECTORS_FOR(R);
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) v_store(to + r * stride + v * LANES, sum[r][v]);
    }
}

/* Scores [R][CUT] of all keys. A panel is there as a whole in a cache, so its last columns may be anything. */
INLINE void stream_scores(const number_kind kind, const bool all_lines, const int R, const attn_keys *keys, int64_t dim,
                          const real *q, real *scores) {
    const matrix k = {keys->k, PANEL};
    const int64_t ahead = stream_ahead(keys);
    for (int64_t c = 0; c < keys->keys; c += PANEL) {
        for (int at = 0; at < PANEL; at += VECTORS_FOR(R) * LANES) {
            for (int64_t d = 0; d < dim; d += CHAIN) {
                int64_t count = dim - d < CHAIN ? dim - d : CHAIN, half = (count + 1) / STRANDS;
                real first[STREAM_ROWS * PANEL], *to = scores + c + at; /* first: the sums of the first half */
                stream_sums sum;
                stream_clear(R, sum);
                stream_rows(kind, all_lines, R, half, q + d, dim, k, c * dim + d * PANEL + at, ahead, sum);
                stream_store(R, sum, first, PANEL);
                stream_clear(R, sum);
                stream_rows(kind, all_lines, R, count - half, q + d + half, dim, k, c * dim + (d + half) * PANEL + at,
                            ahead, sum);
                stream_add(R, sum, first, PANEL);
                if (d > 0) stream_add(R, sum, to, CUT);
                stream_store(R, sum, to, CUT);
            }
        }
    }
}

/* sum[r] = the chain of values from key `first` on, weighed, from element `at` of a row on. If `t` holds scores yet, they
 * become weights relative to 2^power, and `total` adds them up. */
INLINE void stream_chain(const number_kind kind, const bool all_lines, const int R, const attn_keys *keys,
                         int64_t first, int64_t at, bool has_scores, real *t, const vec power[], vec total[],
                         stream_sums sum) {
    const int64_t ahead = stream_ahead(keys), end = keys->keys - first < CHAIN ? keys->keys : first + CHAIN;
    stream_clear(R, sum);
    for (int64_t c = first; c < end; c += COLUMNS) {
        if (has_scores) weigh_columns(R, 1, t + c, false, power, total);
        stream_rows(kind, all_lines, R, end - c < COLUMNS ? end - c : COLUMNS, t + c, CUT, (matrix){keys->v, PANEL},
                    c * PANEL + at, ahead, sum);
    }
}

/* Values of PANEL dimensions from d on, weighed; before the first of them, `t` holds scores. */
INLINE void stream_values(const number_kind kind, const bool all_lines, const int R, const attn_keys *keys, int64_t d,
                          real *t, const vec power[], vec total[], real *out, int64_t out_stride) {
    for (int at = 0; at < PANEL; at += VECTORS_FOR(R) * LANES) {
        const bool has_scores = d + at == 0;
        for (int64_t k = 0; k < keys->keys; k += PAIR) {
            real first[STREAM_ROWS * PANEL], *to = out + d + at; /* first: the sums of a pair's first chain */
            stream_sums sum;
            stream_chain(kind, all_lines, R, keys, k, d * CUT + at, has_scores, t, power, total, sum);
            if (k + CHAIN < keys->keys) {
                stream_store(R, sum, first, PANEL);
                stream_chain(kind, all_lines, R, keys, k + CHAIN, d * CUT + at, has_scores, t, power, total, sum);
                stream_add(R, sum, first, PANEL);
            }
            if (k > 0) stream_add(R, sum, to, out_stride);
            stream_store(R, sum, to, out_stride);
        }
    }
}

INLINE bool stream_some(const number_kind kind, const bool all_lines, const int R, const attn_keys *keys, int64_t dim,
                        const real *q, real *scores, attn_partial *partial) {
    int64_t end = rapt_round_up(keys->keys, COLUMNS);
    vec power[STREAM_ROWS * VECTORS], total[STREAM_ROWS * VECTORS];
    stream_scores(kind, all_lines, R, keys, dim, q, scores);
    for (int r = 0; r < R; r++) {
        if (keys->keys < end) mask_outside(scores + r * CUT, 0, 0, keys->keys, end);
        real largest = largest_score(scores + r * CUT, 0, end);
        if (!(largest > LOWEST)) return false;
        for (int v = 0; v < VECTORS; v++) {
            power[r * VECTORS + v] = v_round(v_all(largest));
            total[r * VECTORS + v] = v_zero();
        }
    }
    for (int64_t d = 0; d + PANEL <= partial->out_stride; d += PANEL) {
        stream_values(kind, all_lines, R, keys, d, scores, power, total, partial->out, partial->out_stride);
    }
    for (int r = 0; r < R; r++) {
        ((real *)partial->reference)[r] = v_first(power[r * VECTORS]);
        ((real *)partial->sum)[r] = sum_of_columns(total + r * VECTORS);
    }
    return true;
}

INLINE bool stream_kind(const number_kind kind, const bool all_lines, int64_t rows, const attn_keys *keys, int64_t dim,
                        const real *q, real *scores, attn_partial *partial) {
    switch (rows) {
    case 1: return stream_some(kind, all_lines, 1, keys, dim, q, scores, partial);
    case 2: return stream_some(kind, all_lines, 2, keys, dim, q, scores, partial);
    case 3: return stream_some(kind, all_lines, 3, keys, dim, q, scores, partial);
    default: return stream_some(kind, all_lines, 4, keys, dim, q, scores, partial);
    }
}

/* The cut for up to STREAM_ROWS rows, but for the last values if their dimensions are no multiple of PANEL; weights are
 * left in `scores`. False, with nothing done that matters, if a row has no score that is a number and no overflow. */
static __attribute__((noinline)) bool stream_cut(int64_t rows, const attn_keys *keys, int64_t dim, const real *q,
                                                 real *scores, attn_partial *partial) {
#ifdef RAPT_KERNEL_F32
    if (keys->dtype == RAPT_F16) return stream_kind(HALVES, false, rows, keys, dim, q, scores, partial);
    if (keys->dtype == RAPT_BF16) return stream_kind(BRAIN_HALVES, false, rows, keys, dim, q, scores, partial);
#endif
    /* AMD's CPUs find the other lines of a row sooner by themselves; Intel's are faster if asked for each. */
    if (keys->is_far && cpu_is_of(OS_CPU_INTEL)) return stream_kind(REALS, true, rows, keys, dim, q, scores, partial);
    return stream_kind(REALS, false, rows, keys, dim, q, scores, partial);
}

#endif
