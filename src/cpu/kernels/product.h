/* product.h - C = A * B, the one product that scores, weighted values and projections are all made of
 *
 *     A [rows, inner], rows apart by lda     B [inner, columns], rows apart by ldb     C [rows, columns]
 *
 * Columns are a multiple of COLUMNS. Each element of C is summed over the inner dimension in ascending order: chains of
 * CHAIN fused multiply-adds, each begun at zero, are added up in order. Neither the number of rows nor the width of a
 * vector enters, so one row or a thousand, on any ISA, get the same bits.
 */
#ifndef RAPT_CPU_KERNELS_PRODUCT_H
#define RAPT_CPU_KERNELS_PRODUCT_H

#include "kernels.h"
#include "vec.h"

enum { LINE = 64 / sizeof(real) }; /* reals of a line of the cache */

/* Where a chain's sums go: c = before + sum (+ bias). A NULL is left out. */
typedef struct chain_sums {
    const real *before; /* sums of the chains so far, rows apart by ld_before */
    int64_t ld_before;
    const real *bias; /* [columns] */
    real *c;
    int64_t ldc;
} chain_sums;

INLINE chain_sums sums_at(chain_sums sums, int64_t row, int64_t column) {
    if (sums.before != NULL) sums.before += row * sums.ld_before + column;
    if (sums.bias != NULL) sums.bias += column;
    sums.c += row * sums.ldc + column;
    return sums;
}

/* One register tile over one chain. R and V are constants at every call, so the loops over them unroll and `sum` lives in
 * registers. Meanwhile rows of B that the next chain will need come nearer, a line of each: `ahead` is in the first. */
INLINE void micro_tile(const int R, const int V, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                       const real *ahead, chain_sums to) {
    vec sum[MICRO_ROWS][MICRO_VECTORS];
    UNROLL for (int r = 0; r < R; r++) { UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_zero(); }
    for (int64_t k = 0; k < inner; k++) {
        vec column[MICRO_VECTORS];
        __builtin_prefetch(ahead + k * ldb, 0, 2);
        UNROLL for (int v = 0; v < V; v++) column[v] = v_load(b + k * ldb + v * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            vec x = v_all(a[r * lda + k]);
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_fma(x, column[v], sum[r][v]);
        }
    }
    if (to.before != NULL) {
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < V; v++) {
                sum[r][v] = v_add(v_load(to.before + r * to.ld_before + v * LANES), sum[r][v]);
            }
        }
    }
    if (to.bias != NULL) {
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_add(sum[r][v], v_load(to.bias + v * LANES));
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) v_store(to.c + r * to.ldc + v * LANES, sum[r][v]);
    }
}

/* All row counts for a constant number of vectors. */
INLINE void micro_rows(const int V, int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                       chain_sums to) {
    const real *next = b + CHAIN * ldb;
    int64_t r = 0, line = 0;
    for (; r + MICRO_ROWS <= rows; r += MICRO_ROWS) {
        micro_tile(MICRO_ROWS, V, inner, a + r * lda, lda, b, ldb, next + line, sums_at(to, r, 0));
        line = (line + LINE) % PANEL;
    }
    a += r * lda;
    next += line;
    to = sums_at(to, r, 0);
    switch (rows - r) {
#if MICRO_ROWS > 4
    case 5: micro_tile(5, V, inner, a, lda, b, ldb, next, to); break;
    case 4: micro_tile(4, V, inner, a, lda, b, ldb, next, to); break;
#endif
    case 3: micro_tile(3, V, inner, a, lda, b, ldb, next, to); break;
    case 2: micro_tile(2, V, inner, a, lda, b, ldb, next, to); break;
    case 1: micro_tile(1, V, inner, a, lda, b, ldb, next, to); break;
    default: break;
    }
}

static void product_chain(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                          int64_t columns, chain_sums to) {
    int64_t j = 0;
    for (; j + MICRO_VECTORS * LANES <= columns; j += MICRO_VECTORS * LANES) {
        micro_rows(MICRO_VECTORS, rows, inner, a, lda, b + j, ldb, sums_at(to, 0, j));
    }
    /* What is left is a multiple of COLUMNS, so only wide vectors get here. */
#if LANES == 16
    if (columns - j == 3 * LANES) micro_rows(3, rows, inner, a, lda, b + j, ldb, sums_at(to, 0, j));
    if (columns - j == 1 * LANES) micro_rows(1, rows, inner, a, lda, b + j, ldb, sums_at(to, 0, j));
#endif
#if LANES >= 8
    if (columns - j == 2 * LANES) micro_rows(2, rows, inner, a, lda, b + j, ldb, sums_at(to, 0, j));
#endif
}

/* Chains outside, rows inside: the rows of B of one chain stay in the nearest cache for all rows of A. Sums of a product
 * that takes several chains wait in `partial`, rows apart by ldp, which may be C. */
INLINE void product_with_bias(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                              int64_t columns, const real *bias, real *partial, int64_t ldp, real *c, int64_t ldc) {
    int64_t k = 0;
    do { /* at least once: an empty inner dimension gives zeros */
        bool is_last = inner - k <= CHAIN;
        chain_sums to = {.before = k > 0 ? partial : NULL,
                         .ld_before = ldp,
                         .bias = is_last ? bias : NULL,
                         .c = is_last ? c : partial,
                         .ldc = is_last ? ldc : ldp};
        product_chain(rows, is_last ? inner - k : CHAIN, a + k, lda, b + k * ldb, ldb, columns, to);
        k += CHAIN;
    } while (k < inner);
}

INLINE void product(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                    int64_t columns, real *c, int64_t ldc) {
    product_with_bias(rows, inner, a, lda, b, ldb, columns, NULL, c, ldc, c, ldc);
}

#endif
