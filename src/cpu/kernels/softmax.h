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
INLINE vec v_pow2_fraction(vec r) {
#ifdef RAPT_KERNEL_F32
    static const real coefficient[] = {0x1.41d334p-13f, 0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f,
                                       0x1.ebfbdap-3f,  0x1.62e430p-1f,  0x1p0f};
#else
    static const real coefficient[] = {0x1.e7aa0e4344b27p-32, 0x1.e620fb7ba967fp-28, 0x1.b526788bf2beep-24,
                                       0x1.62bfc3c1c580fp-20, 0x1.ffcbfba7b846ep-17, 0x1.43091310bf6c4p-13,
                                       0x1.5d87fe78cf26ep-10, 0x1.3b2ab6fb9f413p-7,  0x1.c6b08d7049fd1p-5,
                                       0x1.ebfbdff82c5adp-3,  0x1.62e42fefa39efp-1,  0x1p0};
#endif
    enum { TERMS = sizeof coefficient / sizeof *coefficient };
    vec p = v_all(coefficient[0]);
    UNROLL for (int i = 1; i < TERMS; i++) p = v_fma(p, r, v_all(coefficient[i]));
    return p;
}

/* 2^(t - reference), 0 for -inf. */
INLINE vec v_weight(vec t, vec reference) {
    vec n = v_round(t);
    return v_times_pow2(v_pow2_fraction(v_sub(t, n)), v_sub(n, reference));
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

/* Scores t[begin, end) to weights in place, relative to the power that is returned; *sum gets their sum. begin and end
 * are multiples of COLUMNS. Masked scores are -inf, and so is `largest` if there are no others; with mark_masked the
 * weight of a masked key is -0 instead of +0. */
INLINE real softmax_row(real *t, int64_t begin, int64_t end, real largest, bool mark_masked, real *sum) {
    if (largest == (real)-INFINITY) {
        for (int64_t c = begin; c < end; c += LANES) v_store(t + c, v_all((real)-0.0));
        *sum = 0;
        return largest;
    }
    vec reference = v_round(v_all(largest)), partial[COLUMNS / LANES];
    UNROLL for (int v = 0; v < COLUMNS / LANES; v++) partial[v] = v_zero();
    for (int64_t c = begin; c < end; c += COLUMNS) {
        UNROLL for (int v = 0; v < COLUMNS / LANES; v++) {
            vec score = v_load(t + c + v * LANES);
            vec weight = v_weight(score, reference);
            if (mark_masked) weight = v_where_masked(score, v_all((real)-0.0), weight);
            v_store(t + c + v * LANES, weight);
            partial[v] = v_add(partial[v], weight);
        }
    }
    *sum = sum_of_columns(partial);
    return v_first(reference); /* the same in every lane */
}

#endif
