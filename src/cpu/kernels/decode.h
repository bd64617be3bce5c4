/* decode.h - one row and one cut of packed keys, all of which it sees: a token that is decoded
 *
 * Most of the time goes by until keys and values have arrived from memory or a far cache. So everything streams: no
 * calls from panel to panel, and weights are computed block by block between the values that they weigh, not all before
 * the first value is asked for. The bits are those of tile_scores(), softmax_rows() and weigh_values().
 */
#ifndef RAPT_CPU_KERNELS_DECODE_H
#define RAPT_CPU_KERNELS_DECODE_H

#include "masks.h"
#include "product.h"
#include "softmax.h"

/* Vectors of a panel's row: all, and as many as have their sums in registers together. */
enum { PANEL_VECTORS = PANEL / LANES, STREAM_VECTORS = PANEL_VECTORS < 8 ? PANEL_VECTORS : 8 };

/* sum += x[i] * row i of a panel, for `count` rows. */
INLINE void stream_rows(int64_t count, const real *x, const real *panel, vec sum[STREAM_VECTORS]) {
    for (int64_t i = 0; i < count; i++) {
        vec factor = v_all(x[i]);
        UNROLL for (int v = 0; v < STREAM_VECTORS; v++) sum[v] = v_fma(factor, v_load(panel + v * LANES), sum[v]);
        panel += PANEL;
    }
}

/* The sums of the first chain are stored, those of the others added. */
INLINE void store_streamed(bool is_first, const vec sum[STREAM_VECTORS], real *to) {
    UNROLL for (int v = 0; v < STREAM_VECTORS; v++) {
        v_store(to + v * LANES, is_first ? sum[v] : v_add(v_load(to + v * LANES), sum[v]));
    }
}

INLINE void clear_streamed(vec sum[STREAM_VECTORS]) {
    UNROLL for (int v = 0; v < STREAM_VECTORS; v++) sum[v] = v_zero();
}

/* Scores of all keys, and of none from the last one to the next multiple of COLUMNS. */
INLINE void stream_scores(const attn_keys *keys, int64_t dim, const real *q, real *scores) {
    int64_t c = 0, end = rapt_round_up(keys->keys, COLUMNS);
    for (; c + PANEL <= end; c += PANEL) {
        for (int at = 0; at < PANEL; at += STREAM_VECTORS * LANES) {
            for (int64_t d = 0; d < dim; d += CHAIN) {
                const real *panel = (const real *)keys->k + c * dim + d * PANEL + at;
                vec sum[STREAM_VECTORS];
                clear_streamed(sum);
                stream_rows(dim - d < CHAIN ? dim - d : CHAIN, q + d, panel, sum);
                store_streamed(d == 0, sum, scores + c + at);
            }
        }
    }
    if (c < end) product(1, dim, q, dim, (const real *)keys->k + c * dim, PANEL, end - c, scores + c, CUT);
    if (keys->keys < end) mask_outside(scores, 0, 0, keys->keys, end);
}

/* Scores t become weights relative to 2^power, which weigh the first panel of values, [keys][PANEL]; `sums` adds them up. */
INLINE void stream_values(const attn_keys *keys, real *t, const vec power[VECTORS], vec sums[VECTORS], real *out) {
    for (int at = 0; at < PANEL; at += STREAM_VECTORS * LANES) {
        for (int64_t k = 0; k < keys->keys; k += CHAIN) {
            int64_t end = keys->keys - k < CHAIN ? keys->keys : k + CHAIN;
            vec sum[STREAM_VECTORS];
            clear_streamed(sum);
            for (int64_t c = k; c < end; c += COLUMNS) {
                if (at == 0) weigh_columns(1, 1, t + c, false, power, sums);
                stream_rows(end - c < COLUMNS ? end - c : COLUMNS, t + c, (const real *)keys->v + c * PANEL + at, sum);
            }
            store_streamed(k == 0, sum, out + at);
        }
    }
}

/* The cut but for values of more than PANEL dimensions, with the weights left in `scores`. False, with nothing done that
 * matters, if no score is a number that has not overflowed. */
static bool stream_cut(const attn_keys *keys, int64_t dim, const real *q, real *scores, attn_partial *partial) {
    stream_scores(keys, dim, q, scores);
    real largest = largest_score(scores, 0, rapt_round_up(keys->keys, COLUMNS));
    if (!(largest > LOWEST)) return false;
    vec power[VECTORS], sums[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        power[v] = v_round(v_all(largest));
        sums[v] = v_zero();
    }
    stream_values(keys, scores, power, sums, partial->out);
    *(real *)partial->reference = v_first(power[0]);
    *(real *)partial->sum = sum_of_columns(sums);
    return true;
}

#endif
