/* softmax.h - weights from scores, with a power of two as reference
 *
 * Scores arrive multiplied by log2(e), so a weight is 2^t = 2^n * 2^r with n = round(t) and r = t - n, both exact. It is
 * kept relative to the integer power M = round(largest t): weight = 2^(n - M) * poly(r). Going over to another
 * reference multiplies by a power of two, which rounds nothing; with the largest score itself as reference it would.
 */
#ifndef RAPT_CPU_KERNELS_SOFTMAX_H
#define RAPT_CPU_KERNELS_SOFTMAX_H

#include "kernels.h"
#include "vec.h"

/* 2^r for |r| <= 1/2: the polynomial with the least relative error, 1.9e-9 in degree 6 for float and 3.1e-18 in
 * degree 11 for double (before the coefficients are rounded), by Horner's rule. poly(0) is exactly 1. */
#ifdef RAPT_KERNEL_F32
static const real pow2_coefficients[] = {0x1.41d334p-13f, 0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f,
                                         0x1.ebfbdap-3f,  0x1.62e430p-1f,  0x1p0f};
#else
static const real pow2_coefficients[] = {0x1.e7aa0e4344b27p-32, 0x1.e620fb7ba967fp-28, 0x1.b526788bf2beep-24,
                                         0x1.62bfc3c1c580fp-20, 0x1.ffcbfba7b846ep-17, 0x1.43091310bf6c4p-13,
                                         0x1.5d87fe78cf26ep-10, 0x1.3b2ab6fb9f413p-7,  0x1.c6b08d7049fd1p-5,
                                         0x1.ebfbdff82c5adp-3,  0x1.62e42fefa39efp-1,  0x1p0};
#endif
enum { POW2_TERMS = sizeof pow2_coefficients / sizeof *pow2_coefficients };

INLINE void v_pow2_fractions(const int N, const vec r[], vec p[]) {
    UNROLL for (int v = 0; v < N; v++) p[v] = v_all(pow2_coefficients[0]);
    UNROLL for (int i = 1; i < POW2_TERMS; i++) {
        UNROLL for (int v = 0; v < N; v++) p[v] = v_fma(p[v], r[v], v_all(pow2_coefficients[i]));
    }
}

/* The same of one number, where all roundings but the coefficients' are those of double. */
INLINE double pow2_fraction(double r) {
    double p = (double)pow2_coefficients[0];
    UNROLL for (int i = 1; i < POW2_TERMS; i++) p = p * r + (double)pow2_coefficients[i];
    return p;
}

/* weight = 2^(t - reference), 0 for -inf, for N vectors in step: each is one long chain of operations that wait for each
 * other, and a CPU looks ahead over only a few such chains. */
enum { IN_STEP = 4 };
INLINE void v_weights(const int N, const vec t[], const vec reference[], vec weight[]) {
    vec n[IN_STEP], r[IN_STEP], p[IN_STEP];
    UNROLL for (int v = 0; v < N; v++) n[v] = v_round(t[v]);
    UNROLL for (int v = 0; v < N; v++) r[v] = v_sub(t[v], n[v]);
    v_pow2_fractions(N, r, p);
    UNROLL for (int v = 0; v < N; v++) weight[v] = v_times_pow2(p[v], v_sub(n[v], reference[v]));
}

INLINE vec v_weight(vec t, vec reference) {
    vec weight;
    v_weights(1, &t, &reference, &weight);
    return weight;
}

/* 2^k for an integer k <= 0, and 0 where v_times_pow2 gives 0. */
INLINE real pow2_or_zero(real k) {
    if (!(k >= LEAST_POWER)) return 0;
    real shifted = k + POWER_MAGIC;
    bits power;
    memcpy(&power, &shifted, sizeof power);
    power <<= MANTISSA_BITS;
    memcpy(&shifted, &power, sizeof power);
    return shifted;
}

/* Sixteen partial sums, folded in halves: the one order in which a row is summed. */
INLINE real sum_of_columns(vec partial[COLUMNS / LANES]) {
    UNROLL for (int half = COLUMNS / LANES / 2; half > 0; half /= 2) {
        UNROLL for (int v = 0; v < half; v++) partial[v] = v_add(partial[v], partial[v + half]);
    }
    return v_sum(partial[0]);
}

INLINE real largest_score(const real *t, int64_t begin, int64_t end) {
    enum { APART = 4 }; /* maxima that need not wait for each other */
    vec largest[APART];
    UNROLL for (int v = 0; v < APART; v++) largest[v] = v_all((real)-INFINITY);
    int64_t c = begin;
    if (end - begin >= APART * LANES) {
        for (; c + APART * LANES <= end; c += APART * LANES) {
            UNROLL for (int v = 0; v < APART; v++) {
                largest[v] = v_max_or_second(v_load(t + c + v * LANES), largest[v]); /* drops NaN */
            }
        }
        for (int v = 1; v < APART; v++) largest[0] = v_max_or_second(largest[v], largest[0]);
    }
    for (; c < end; c += LANES) largest[0] = v_max_or_second(v_load(t + c), largest[0]);
    return v_largest(largest[0]);
}

/* Weights of STEPS * COLUMNS scores of each of R rows, in place; `partial` adds them up, block after block. */
enum { VECTORS = COLUMNS / LANES, ROWS_IN_STEP = VECTORS < IN_STEP ? IN_STEP / VECTORS : 1 };
INLINE void weigh_columns(const int R, const int STEPS, real *t, bool mark_masked, const vec power[], vec partial[]) {
    const int vectors = R * VECTORS, all = vectors * STEPS;
    const int N = all < IN_STEP ? all : all % IN_STEP == 0 ? IN_STEP : 3; /* a divisor: of six, three */
    UNROLL for (int first = 0; first < all; first += N) {
        vec score[IN_STEP], weight[IN_STEP], reference[IN_STEP];
        real *at[IN_STEP];
        UNROLL for (int i = 0; i < N; i++) {
            const int block = (first + i) / vectors, v = (first + i) % vectors;
            at[i] = t + v / VECTORS * CUT + block * COLUMNS + v % VECTORS * LANES;
            score[i] = v_load(at[i]);
            reference[i] = power[v];
        }
        v_weights(N, score, reference, weight);
        UNROLL for (int i = 0; i < N; i++) {
            const int v = (first + i) % vectors;
            if (mark_masked) weight[i] = v_where_masked(score[i], v_all((real)-0.0), weight[i]);
            v_store(at[i], weight[i]);
            partial[v] = v_add(partial[v], weight[i]);
        }
    }
}

INLINE void raise_largest(const int R, const real *t, vec largest[]) {
    UNROLL for (int v = 0; v < R * VECTORS; v++) {
        vec score = v_load(t + v / VECTORS * CUT + v % VECTORS * LANES);
        largest[v] = v_max_or_second(score, largest[v]); /* drops NaN */
    }
}

/* Scores t[begin, end) of R rows, CUT apart, to weights in place; begin and end are multiples of COLUMNS. `reference` holds
 * the rows' largest scores and gets the powers that weights are relative to, `sum` gets their sums. Masked scores are
 * -inf; with mark_masked the weight of a masked key is -0 instead of +0. If it looks ahead (with
 * ROWS_IN_STEP rows), reference[R] and so on get the largest scores of the next R: finding those takes none of the
 * multipliers, which weights keep busy. */
INLINE void softmax_rows(const int R, const bool looks_ahead, real *t, int64_t begin, int64_t end, bool mark_masked,
                         real *reference, real *sum) {
    enum { MOST = ROWS_IN_STEP * VECTORS };
    const int vectors = R * VECTORS, STEPS = vectors < IN_STEP ? IN_STEP / vectors : 1;
    vec power[MOST], partial[MOST], largest[MOST];
    UNROLL for (int v = 0; v < vectors; v++) {
        power[v] = v_round(v_all(reference[v / VECTORS]));
        partial[v] = v_zero();
        largest[v] = v_all((real)-INFINITY);
    }
    int64_t c = begin;
    for (; c + STEPS * COLUMNS <= end; c += STEPS * COLUMNS) {
        if (looks_ahead) raise_largest(R, t + R * CUT + c, largest);
        weigh_columns(R, STEPS, t + c, mark_masked, power, partial);
    }
    for (; c < end; c += COLUMNS) weigh_columns(R, 1, t + c, mark_masked, power, partial);
    UNROLL for (int r = 0; r < R; r++) {
        reference[r] = v_first(power[r * VECTORS]); /* the same in every lane */
        sum[r] = sum_of_columns(partial + r * VECTORS);
        if (!looks_ahead) continue;
        vec all = largest[r * VECTORS];
        for (int v = 1; v < VECTORS; v++) all = v_max_or_second(all, largest[r * VECTORS + v]);
        reference[R + r] = v_largest(all);
    }
}

/* The same for one row, of which all scores may be masked: then its largest is -inf. */
INLINE void softmax_row(real *t, int64_t begin, int64_t end, bool mark_masked, real *reference, real *sum) {
    if (*reference == (real)-INFINITY) {
        for (int64_t c = begin; c < end; c += LANES) v_store(t + c, v_all((real)-0.0));
        *sum = 0;
    } else {
        softmax_rows(1, false, t, begin, end, mark_masked, reference, sum);
    }
}

#endif
