/* decode.h - few rows and one cut of a cache, all of which they see: a token that is decoded
 *
 * Most of the time goes by until keys and values have arrived. So everything streams: no calls from panel to panel, and
 * weights are computed chain by chain between the values that they weigh, not all before the first value is asked for.
 * The functions that are not inlined keep that apart from the loops over panels, whose sums a compiler would else move
 * out of registers. The bits are those of tile_scores(), softmax_rows() and weigh_values().
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

/* How a CPU wants to be asked for keys and values. AMD's to Zen 4 find the other lines of a row of reals sooner by themselves;
 * Intel's are faster if asked for each. Both read what is in a cache of theirs as fast without being asked. Zen 5's want
 * every line in the nearest cache, wherever it is; where vectors are narrow, of 16-bit numbers from memory alone. */
typedef enum stream_fetch { FETCH_FIRST_LINES, FETCH_LINES, FETCH_LINES_NEAR } stream_fetch;

INLINE stream_fetch how_to_fetch(const attn_keys *keys) {
    bool is_real = keys->dtype == REAL_DTYPE, one_pass = MICRO_VECTORS * LANES >= PANEL;
    if (cpu_is(OS_CPU_AMD_ZEN5) && (one_pass || (keys->is_far && !is_real))) return FETCH_LINES_NEAR;
    return keys->is_far && is_real && cpu_is(OS_CPU_INTEL) ? FETCH_LINES : FETCH_FIRST_LINES;
}

INLINE void fetch_line(const stream_fetch how, const number_kind kind, matrix b, int64_t at) {
    const char *line = (const char *)b.data + at * (int64_t)(kind == REALS ? sizeof(real) : 2);
    if (how == FETCH_LINES_NEAR) {
        __builtin_prefetch(line, 0, 3);
    } else {
        __builtin_prefetch(line, 0, 2);
    }
}

/* What is fetched while rows of a panel are read, from row i and column `at` on: what is a chain ahead, or less. 16-bit
 * numbers whose columns take several passes: in each pass its share of the next panel, or memory would idle after the first.
 * The panel's first element is `begin`. */
typedef struct stream_ahead {
    int64_t at, step; /* elements */
} stream_ahead;

INLINE stream_ahead stream_fetches(const stream_fetch how, const number_kind kind, const int R, const attn_keys *keys,
                                   int64_t begin, int64_t rows, int64_t i, int64_t at) {
    const int WIDTH = VECTORS_FOR(R) * LANES;
    int64_t ahead = CHAIN;
    if (how == FETCH_LINES_NEAR) {
        if (kind == REALS) ahead = keys->is_far ? CHAIN / 2 : CHAIN / 4;
    } else if (!keys->is_far) {
        ahead = 0; /* nothing new */
    }
    if (kind == REALS || WIDTH == PANEL || ahead == 0) return (stream_ahead){begin + (i + ahead) * PANEL + at, PANEL};
    return (stream_ahead){begin + rows * (PANEL + at) + i * WIDTH, WIDTH};
}

/* sum[r] = the sum of x[r][i] * row i of a panel, for `count` rows of it, from element `at` on; rows of x are `stride`
 * apart. Of 16-bit numbers all lines are fetched. */
INLINE void stream_rows(const stream_fetch how, const number_kind kind, const int R, int64_t count, const real *x,
                        int64_t stride, matrix panel, int64_t at, stream_ahead ahead, stream_sums sum) {
    const int V = VECTORS_FOR(R), WIDTH = V * LANES, NUMBERS = kind == REALS ? LINE : PANEL / 2; /* in a line */
    UNROLL for (int r = 0; r < R; r++) { UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_zero(); }
    for (int64_t i = 0; i < count; i++) {
        vec numbers[STREAM_VECTORS];
        fetch_line(how, kind, panel, ahead.at);
        for (int c = NUMBERS; c < WIDTH && (how != FETCH_FIRST_LINES || kind != REALS); c += NUMBERS)
            fetch_line(how, kind, panel, ahead.at + c);
        UNROLL for (int v = 0; v < V; v++) numbers[v] = load_numbers(kind, panel, at + v * LANES);
        UNROLL for (int r = 0; r < R; r++) add_multiples(kind, V, &x[r * stride + i], numbers, sum[r]);
        at += PANEL;
        ahead.at += ahead.step;
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

/* A cut and its rows. */
typedef struct stream {
    const attn_keys *keys;
    int64_t rows, dim;
    const real *q;      /* [rows][dim] */
    real *scores;       /* [rows][CUT], which become weights */
    vec *power, *total; /* [rows][VECTORS] what the weights are relative to, as a power of 2; their sums */
    real *out;          /* [rows][out_stride] */
    int64_t out_stride;
    real *first; /* [rows][PANEL] sums that wait: for a chain's other half, or for a pair's other chain */
} stream;

/* Scores of all keys. A panel is there as a whole in a cache, so its last columns may be anything. */
INLINE void stream_scores(const stream_fetch how, const number_kind kind, const int R, const stream *s) {
    const matrix k = {s->keys->k, PANEL};
    const int64_t dim = s->dim;
    for (int64_t c = 0; c < s->keys->keys; c += PANEL) {
        for (int at = 0; at < PANEL; at += VECTORS_FOR(R) * LANES) {
            for (int64_t d = 0; d < dim; d += CHAIN) {
                int64_t count = dim - d < CHAIN ? dim - d : CHAIN, half = (count + 1) / STRANDS;
                int64_t begin = c * dim, middle = d + half;
                real *to = s->scores + c + at;
                stream_sums sum;
                stream_rows(how, kind, R, half, s->q + d, dim, k, begin + d * PANEL + at,
                            stream_fetches(how, kind, R, s->keys, begin, dim, d, at), sum);
                stream_store(R, sum, s->first, PANEL);
                stream_rows(how, kind, R, count - half, s->q + middle, dim, k, begin + middle * PANEL + at,
                            stream_fetches(how, kind, R, s->keys, begin, dim, middle, at), sum);
                stream_add(R, sum, s->first, PANEL);
                if (d > 0) stream_add(R, sum, to, CUT);
                stream_store(R, sum, to, CUT);
            }
        }
    }
}

INLINE void weigh_chain_of_rows(const int R, const stream *s, int64_t first, int64_t end) {
    const int vectors = R * VECTORS, STEPS = vectors < IN_STEP ? IN_STEP / vectors : 1;
    vec power[STREAM_ROWS * VECTORS], total[STREAM_ROWS * VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) {
        power[v] = s->power[v];
        total[v] = s->total[v];
    }
    int64_t c = first;
    for (; c + STEPS * COLUMNS <= end; c += STEPS * COLUMNS)
        weigh_columns(R, STEPS, s->scores + c, false, power, total);
    for (; c < end; c += COLUMNS) weigh_columns(R, 1, s->scores + c, false, power, total);
    UNROLL for (int v = 0; v < vectors; v++) s->total[v] = total[v];
}

/* Scores of keys [first, end) become weights, and `total` adds them up. */
static __attribute__((noinline)) void weigh_chain(const stream *s, int64_t first, int64_t end) {
    switch (s->rows) {
    case 1: weigh_chain_of_rows(1, s, first, end); break;
    case 2: weigh_chain_of_rows(2, s, first, end); break;
    case 3: weigh_chain_of_rows(3, s, first, end); break;
    default: weigh_chain_of_rows(4, s, first, end); break;
    }
}

/* Values of PANEL dimensions from d on, weighed. Before the first of all there are scores. */
INLINE void stream_values(const stream_fetch how, const number_kind kind, const int R, const stream *s, int64_t d) {
    const int64_t keys = s->keys->keys, begin = d * CUT;
    for (int at = 0; at < PANEL; at += VECTORS_FOR(R) * LANES) {
        real *to = s->out + d + at;
        for (int64_t k = 0; k < keys; k += CHAIN) {
            int64_t count = keys - k < CHAIN ? keys - k : CHAIN;
            stream_sums sum;
            if (d + at == 0) weigh_chain(s, k, k + count);
            stream_rows(how, kind, R, count, s->scores + k, CUT, (matrix){s->keys->v, PANEL}, begin + k * PANEL + at,
                        stream_fetches(how, kind, R, s->keys, begin, CUT, k, at), sum);
            if (k % PAIR == 0 && k + CHAIN < keys) {
                stream_store(R, sum, s->first, PANEL);
            } else {
                if (k % PAIR != 0) stream_add(R, sum, s->first, PANEL);
                if (k >= PAIR) stream_add(R, sum, to, s->out_stride);
                stream_store(R, sum, to, s->out_stride);
            }
        }
    }
}

enum { ALL_SCORES = -1 }; /* instead of a panel */

INLINE void stream_part(const stream_fetch how, const number_kind kind, const int R, const stream *s, int64_t panel) {
    if (panel == ALL_SCORES) {
        stream_scores(how, kind, R, s);
    } else {
        stream_values(how, kind, R, s, panel);
    }
}

INLINE void stream_kind(const stream_fetch how, const number_kind kind, const stream *s, int64_t panel) {
    switch (s->rows) {
    case 1: stream_part(how, kind, 1, s, panel); break;
    case 2: stream_part(how, kind, 2, s, panel); break;
    case 3: stream_part(how, kind, 3, s, panel); break;
    default: stream_part(how, kind, 4, s, panel); break;
    }
}

INLINE void stream_numbers(const stream_fetch how, const stream *s, int64_t panel) {
    switch (s->keys->dtype) {
#ifdef RAPT_KERNEL_F32
    case RAPT_F16: stream_kind(how, HALVES, s, panel); break;
    case RAPT_BF16: stream_kind(how, BRAIN_HALVES, s, panel); break;
#endif
    default: stream_kind(how, REALS, s, panel); break;
    }
}

/* All scores, or the values of a panel. */
static __attribute__((noinline)) void stream_any(const stream *s, int64_t panel) {
    switch (how_to_fetch(s->keys)) {
    case FETCH_LINES_NEAR: stream_numbers(FETCH_LINES_NEAR, s, panel); break;
    case FETCH_LINES: stream_kind(FETCH_LINES, REALS, s, panel); break;
    default: stream_numbers(FETCH_FIRST_LINES, s, panel); break;
    }
}

/* The cut for up to STREAM_ROWS rows, but for the last values if their dimensions are no multiple of PANEL; weights are
 * left in `scores`. False, with nothing done that matters, if a row has no score that is a number and no overflow. */
static __attribute__((noinline)) bool stream_cut(int64_t rows, const attn_keys *keys, int64_t dim, const real *q,
                                                 real *scores, attn_partial *partial) {
    int64_t end = rapt_round_up(keys->keys, COLUMNS);
    vec power[STREAM_ROWS * VECTORS], total[STREAM_ROWS * VECTORS];
    real first[STREAM_ROWS * PANEL];
    const stream s = {keys, rows, dim, q, scores, power, total, partial->out, partial->out_stride, first};
    stream_any(&s, ALL_SCORES);
    for (int64_t r = 0; r < rows; r++) {
        if (keys->keys < end) mask_outside(scores + r * CUT, 0, 0, keys->keys, end);
        real largest = largest_score(scores + r * CUT, 0, end);
        if (!(largest > LOWEST)) return false;
        for (int v = 0; v < VECTORS; v++) {
            power[r * VECTORS + v] = v_round(v_all(largest));
            total[r * VECTORS + v] = v_zero();
        }
    }
    for (int64_t d = 0; d + PANEL <= partial->out_stride; d += PANEL) stream_any(&s, d);
    for (int64_t r = 0; r < rows; r++) {
        ((real *)partial->reference)[r] = v_first(power[r * VECTORS]);
        ((real *)partial->sum)[r] = sum_of_columns(total + r * VECTORS);
    }
    return true;
}

#endif
