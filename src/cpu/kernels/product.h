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

/* One register tile over one chain. R and V are constants at every call, so the loops over them unroll and `sum` lives in
 * registers. */
INLINE void micro_tile(const int R, const int V, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                       real *c, int64_t ldc, bool add_to_c) {
    vec sum[MICRO_ROWS][MICRO_VECTORS];
    UNROLL for (int r = 0; r < R; r++) { UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_zero(); }
    for (int64_t k = 0; k < inner; k++) {
        vec column[MICRO_VECTORS];
        UNROLL for (int v = 0; v < V; v++) column[v] = v_load(b + k * ldb + v * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            vec x = v_all(a[r * lda + k]);
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_fma(x, column[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) {
            real *at = c + r * ldc + v * LANES;
            v_store(at, add_to_c ? v_add(v_load(at), sum[r][v]) : sum[r][v]);
        }
    }
}

/* All row counts for a constant number of vectors. */
INLINE void micro_rows(const int V, int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                       real *c, int64_t ldc, bool add_to_c) {
    int64_t r = 0;
    for (; r + MICRO_ROWS <= rows; r += MICRO_ROWS) {
        micro_tile(MICRO_ROWS, V, inner, a + r * lda, lda, b, ldb, c + r * ldc, ldc, add_to_c);
    }
    a += r * lda;
    c += r * ldc;
    switch (rows - r) {
#if MICRO_ROWS > 4
    case 5: micro_tile(5, V, inner, a, lda, b, ldb, c, ldc, add_to_c); break;
    case 4: micro_tile(4, V, inner, a, lda, b, ldb, c, ldc, add_to_c); break;
#endif
    case 3: micro_tile(3, V, inner, a, lda, b, ldb, c, ldc, add_to_c); break;
    case 2: micro_tile(2, V, inner, a, lda, b, ldb, c, ldc, add_to_c); break;
    case 1: micro_tile(1, V, inner, a, lda, b, ldb, c, ldc, add_to_c); break;
    default: break;
    }
}

static void product_chain(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                          int64_t columns, real *c, int64_t ldc, bool add_to_c) {
    int64_t j = 0;
    for (; j + MICRO_VECTORS * LANES <= columns; j += MICRO_VECTORS * LANES) {
        micro_rows(MICRO_VECTORS, rows, inner, a, lda, b + j, ldb, c + j, ldc, add_to_c);
    }
    /* What is left is a multiple of COLUMNS, so only wide vectors get here. */
#if LANES == 16
    if (columns - j == 3 * LANES) micro_rows(3, rows, inner, a, lda, b + j, ldb, c + j, ldc, add_to_c);
    if (columns - j == 1 * LANES) micro_rows(1, rows, inner, a, lda, b + j, ldb, c + j, ldc, add_to_c);
#endif
#if LANES >= 8
    if (columns - j == 2 * LANES) micro_rows(2, rows, inner, a, lda, b + j, ldb, c + j, ldc, add_to_c);
#endif
}

/* Chains outside, rows inside: the rows of B of one chain stay in the nearest cache for all rows of A. */
static void product(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                    int64_t columns, real *c, int64_t ldc) {
    int64_t k = 0;
    do { /* at least once: an empty inner dimension gives zeros */
        int64_t length = inner - k < CHAIN ? inner - k : CHAIN;
        product_chain(rows, length, a + k, lda, b + k * ldb, ldb, columns, c, ldc, k > 0);
        k += CHAIN;
    } while (k < inner);
}

#endif
