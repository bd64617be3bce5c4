/* product.h - C = A * B, the one product that scores, weighted values and projections are all made of
 *
 *     A [rows, inner], rows apart by lda     B [inner, columns], rows apart by ldb     C [rows, columns]
 *
 * or the same with A transposed, [inner, rows].
 *
 * Columns are a multiple of COLUMNS. Each element of C is summed over the inner dimension in ascending order: chains of
 * CHAIN fused multiply-adds, each begun at zero, are added two by two, and these pairs in order. Neither the number of rows
 * nor the width of a vector enters, so one row or a thousand, on any ISA, get the same bits.
 *
 * Scores, whose errors count for more, have chains half as long: a chain of theirs is a pair of its first half (the longer
 * one of an odd number) and its second.
 *
 * Where the two strands of a pair run side by side, a register tile has half as many rows and takes twice as many steps
 * before its sums are stored; narrow tiles compute them in turn.
 */
#ifndef RAPT_CPU_KERNELS_PRODUCT_H
#define RAPT_CPU_KERNELS_PRODUCT_H

#include "kernels.h"
#include "vec.h"

_Static_assert(STRANDS == 2, "a pair");

enum { LINE = RAPT_LINE_BYTES / sizeof(real) }; /* reals of a line of the cache */

/* What becomes of sums: c = before + (first + sum) + bias. A NULL is left out. */
typedef struct sums_to {
    const real *before; /* sums of the pairs so far, rows apart by ld_before */
    int64_t ld_before;
    const real *first; /* sums of a pair's first chain, rows apart by PANEL */
    const real *bias;  /* [columns] */
    real *c;
    int64_t ldc;
} sums_to;

/* To c, or added to what is there. */
INLINE sums_to sums_in_place(bool adds, real *c, int64_t ldc) {
    return (sums_to){.before = adds ? c : NULL, .ld_before = ldc, .c = c, .ldc = ldc};
}

INLINE sums_to sums_to_tile(sums_to to, int64_t row, int64_t column) {
    if (to.before != NULL) to.before += row * to.ld_before + column;
    if (to.first != NULL) to.first += row * PANEL + column;
    if (to.bias != NULL) to.bias += column;
    to.c += row * to.ldc + column;
    return to;
}

/* What B consists of. 16-bit numbers are widened as they are loaded, which pays for few rows of A. */
typedef enum number_kind { REALS, HALVES, BRAIN_HALVES } number_kind;

typedef struct matrix {
    const void *data;
    int64_t ld; /* elements from row to row */
} matrix;

/* LANES numbers from element `at` on. */
INLINE vec load_numbers(const number_kind kind, matrix b, int64_t at) {
#ifdef RAPT_KERNEL_F32
    if (kind == HALVES) return v_load_f16((const uint16_t *)b.data + at);
    if (kind == BRAIN_HALVES) return v_load_bf16((const uint16_t *)b.data + at);
#endif
    (void)kind;
    return v_load((const real *)b.data + at);
}

/* Element [row][inner] of A is data[row * row_stride + inner * inner_stride]; one of the two is 1. All of the second strand
 * is `gap` elements further on. */
typedef struct left_matrix {
    const real *data;
    int64_t row_stride, inner_stride, gap;
} left_matrix;

INLINE left_matrix from_row(left_matrix a, int64_t row) {
    a.data += row * a.row_stride;
    return a;
}

/* Narrow tiles have registers for all rows of both strands, and compute one after the other. */
INLINE bool strands_in_turn(const int S, const int V) { return S == 1 || S * V <= MICRO_VECTORS; }

/* What comes nearer while a chain is computed: a line in each of its steps. */
typedef struct fetching {
    const char *data;
    int64_t step; /* in bytes */
} fetching;

/* What is wanted soon, if there is something; else rows that the next product will need, a line of each in every register
 * tile (or, of S strands, in S tiles, since they take 1 / S of the steps): four tiles fetch those of B; if A is transposed,
 * so that its rows are as far apart, the next four fetch those. */
INLINE fetching fetch_for(const number_kind kind, const int S, const int V, int64_t tile, int64_t inner, left_matrix a,
                          matrix b, int64_t column, rapt_soon *soon) {
    if (kind == REALS && V == 1) return (fetching){NULL, 0}; /* so little work that it is not worth it */
    int64_t line = tile / S * LINE % PANEL, size = kind == REALS ? sizeof(real) : 2;
    if (soon != NULL && soon->count > 0) {
        int32_t last = soon->count - 1;
        int64_t stride = soon->range[last].stride;
        fetching ahead = {soon->range[last].data + soon->range[last].done * stride, stride};
        soon->range[last].done += strands_in_turn(S, V) ? inner : inner / S;
        if (soon->range[last].done >= soon->range[last].rows) {
            soon->range[last].done = 0;
            soon->range[last].data += RAPT_LINE_BYTES;
            if (--soon->range[last].lines <= 0) soon->count = last;
        }
        return ahead;
    }
    int64_t row = inner + tile % S * (inner / S);
    if (a.inner_stride != 1 && tile / S % 8 >= 4) {
        const real *next = a.data + row * a.inner_stride + line;
        return (fetching){(const char *)next, a.inner_stride * (int64_t)sizeof(real)};
    }
    return (fetching){(const char *)b.data + (row * b.ld + column + line) * size, b.ld * size};
}

typedef vec micro_sums[MICRO_ROWS][MICRO_VECTORS];

/* sum[v] += *x * numbers[v], for numbers that were stored as `kind`. */
INLINE void add_multiples(const number_kind kind, const int V, const real *x, const vec numbers[], vec sum[]) {
    const vec all = v_all(*x);
    UNROLL for (int v = 0; v < V; v++) {
        sum[v] = kind == REALS ? v_fma(all, numbers[v], sum[v]) : v_fma_of(x, numbers[v], sum[v]);
    }
}

/* sum[r] += A[r][k] * B[k]. */
INLINE void micro_term(const number_kind kind, const int R, const int V, const bool fetches, int64_t k, left_matrix a,
                       matrix b, int64_t column, fetching ahead, micro_sums sum) {
    vec numbers[MICRO_VECTORS];
    if ((fetches && V > 1) || kind != REALS) __builtin_prefetch(ahead.data + k * ahead.step, 0, 2);
    if (kind != REALS) __builtin_prefetch(ahead.data + k * ahead.step + PANEL, 0, 2); /* few rows fetch all lines */
    UNROLL for (int v = 0; v < V; v++) numbers[v] = v_kept(load_numbers(kind, b, k * b.ld + column + v * LANES));
    UNROLL for (int r = 0; r < R; r++) {
        add_multiples(kind, V, &a.data[r * a.row_stride + k * a.inner_stride], numbers, sum[r]);
    }
}

/* One register tile over S strands, of which the first has `strand` terms and the second no more. S, R and V are constants
 * at every call, so the loops over them unroll and `sums` lives in registers. */
INLINE void micro_tile(const number_kind kind, const int S, const int R, const int V, int64_t inner, int64_t strand,
                       left_matrix a, matrix b, int64_t column, fetching ahead, sums_to to) {
    micro_sums sums[STRANDS];
    UNROLL for (int s = 0; s < S; s++) {
        UNROLL for (int r = 0; r < R; r++) { UNROLL for (int v = 0; v < V; v++) sums[s][r][v] = v_zero(); }
    }
    const bool in_turn = strands_in_turn(S, V);
    left_matrix second = a;
    second.data += a.gap;
    int64_t k = 0;
    for (; k < inner - strand && !in_turn; k++) {
        micro_term(kind, R, V, true, k, a, b, column, ahead, sums[0]);
        micro_term(kind, R, V, false, strand + k, second, b, column, ahead, sums[1]);
    }
    for (; k < strand; k++) micro_term(kind, R, V, true, k, a, b, column, ahead, sums[0]);
    for (; k < inner && in_turn && S > 1; k++) micro_term(kind, R, V, true, k, second, b, column, ahead, sums[1]);
    UNROLL for (int r = 0; r < R && S > 1; r++) {
        UNROLL for (int v = 0; v < V; v++) sums[0][r][v] = v_add(sums[0][r][v], sums[1][r][v]);
    }
    vec(*sum)[MICRO_VECTORS] = sums[0];
    if (to.first != NULL) {
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = v_add(v_load(to.first + r * PANEL + v * LANES), sum[r][v]);
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

/* All row counts for a constant number of vectors, from a column of B on. */
INLINE void micro_rows(const number_kind kind, const int S, const int V, int64_t rows, int64_t inner, int64_t strand,
                       left_matrix a, matrix b, int64_t column, rapt_soon *soon, sums_to to) {
    const int ROWS = strands_in_turn(S, V) ? MICRO_ROWS : MICRO_ROWS / S;
    int64_t r = 0, tile = 0;
    to = sums_to_tile(to, 0, column);
    for (; r + ROWS <= rows; r += ROWS) {
        fetching ahead = fetch_for(kind, S, V, tile++, inner, a, b, column, soon);
        micro_tile(kind, S, ROWS, V, inner, strand, from_row(a, r), b, column, ahead, sums_to_tile(to, r, 0));
    }
    fetching ahead = fetch_for(kind, S, V, tile, inner, a, b, column, NULL);
    a = from_row(a, r);
    to = sums_to_tile(to, r, 0);
    switch (rows - r) {
#if MICRO_ROWS > 4
    case 5:
        if (ROWS > 5) micro_tile(kind, S, 5, V, inner, strand, a, b, column, ahead, to);
        break;
    case 4:
        if (ROWS > 4) micro_tile(kind, S, 4, V, inner, strand, a, b, column, ahead, to);
        break;
#endif
    case 3:
        if (ROWS > 3) micro_tile(kind, S, 3, V, inner, strand, a, b, column, ahead, to);
        break;
    case 2:
        if (ROWS > 2) micro_tile(kind, S, 2, V, inner, strand, a, b, column, ahead, to);
        break;
    case 1: micro_tile(kind, S, 1, V, inner, strand, a, b, column, ahead, to); break;
    default: break;
    }
}

INLINE void product_of_kind(const number_kind kind, const int S, int64_t rows, int64_t inner, int64_t strand,
                            left_matrix a, matrix b, int64_t columns, rapt_soon *soon, sums_to to) {
    int64_t j = 0;
    for (; j + MICRO_VECTORS * LANES <= columns; j += MICRO_VECTORS * LANES) {
        micro_rows(kind, S, MICRO_VECTORS, rows, inner, strand, a, b, j, soon, to);
    }
    /* What is left is a multiple of COLUMNS, so only wide vectors get here. */
#if LANES == 16
    if (columns - j == 3 * LANES) micro_rows(kind, S, 3, rows, inner, strand, a, b, j, soon, to);
    if (columns - j == 1 * LANES) micro_rows(kind, S, 1, rows, inner, strand, a, b, j, soon, to);
#endif
#if LANES >= 8
    if (columns - j == 2 * LANES) micro_rows(kind, S, 2, rows, inner, strand, a, b, j, soon, to);
#endif
}

/* One chain. */
static void product_chain(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                          int64_t columns, rapt_soon *soon, sums_to to) {
    product_of_kind(REALS, 1, rows, inner, inner, (left_matrix){a, lda, 1, 0}, (matrix){b, ldb}, columns, soon, to);
}

/* With A [inner, rows], inner apart by lda. */
static void product_chain_transposed(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b,
                                     int64_t ldb, int64_t columns, rapt_soon *soon, sums_to to) {
    product_of_kind(REALS, 1, rows, inner, inner, (left_matrix){a, 1, lda, 0}, (matrix){b, ldb}, columns, soon, to);
}

/* The halves of a score's chain, to c, or, if `adds`, added to what is there. No sums_to: addresses of what no score has, a
 * bias or a first chain, would crowd those of the rows out of their registers. */
static void score_chain(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                        int64_t columns, rapt_soon *soon, bool adds, real *c, int64_t ldc) {
    product_of_kind(REALS, STRANDS, rows, inner, (inner + 1) / STRANDS, (left_matrix){a, lda, 1, 0}, (matrix){b, ldb},
                    columns, soon, sums_in_place(adds, c, ldc));
}

INLINE bool cpu_is(os_cpu_kind kind) { return atomic_load_explicit(&rapt_cpu_kind, memory_order_relaxed) == (int)kind; }

/* Whether the two chains of a pair run side by side. What that saves, many stores at once, stops the multipliers of AMD's
 * CPUs; those of Intel's rather lack slots for its additional loads. And where tiles are narrower than a panel, one would
 * touch a line or two in each of 128 rows of B, more than the sets of the nearest cache hold where those are. */
INLINE bool pairs_side_by_side(void) {
    return MICRO_VECTORS * LANES >= PANEL && (cpu_is(OS_CPU_AMD) || cpu_is(OS_CPU_AMD_ZEN5));
}

/* All rows get the one chain, then the other. */
INLINE void chains_in_turn(const bool transposed, int64_t rows, int64_t inner, left_matrix a, const real *b,
                           int64_t ldb, int64_t columns, sums_to to) {
    enum { MOST = 8 * MICRO_ROWS };
    real sums[MOST * PANEL];
    for (int64_t r = 0; r < rows; r += MOST) {
        int64_t count = rows - r < MOST ? rows - r : MOST;
        const real *first = a.data + r * a.row_stride, *second = first + CHAIN * a.inner_stride + a.gap;
        sums_to then = sums_to_tile(to, r, 0);
        then.first = sums;
        if (transposed) {
            product_chain_transposed(count, CHAIN, first, a.inner_stride, b, ldb, columns, NULL,
                                     (sums_to){.c = sums, .ldc = PANEL});
            product_chain_transposed(count, inner - CHAIN, second, a.inner_stride, b + CHAIN * ldb, ldb, columns, NULL,
                                     then);
        } else {
            product_chain(count, CHAIN, first, a.row_stride, b, ldb, columns, NULL, (sums_to){.c = sums, .ldc = PANEL});
            product_chain(count, inner - CHAIN, second, a.row_stride, b + CHAIN * ldb, ldb, columns, NULL, then);
        }
    }
}

/* Two chains. That there is no `first` is for the compiler to know. */
static void product_strands(int64_t rows, int64_t inner, const real *a, int64_t lda, int64_t gap, const real *b,
                            int64_t ldb, int64_t columns, sums_to to) {
    left_matrix left = {a, lda, 1, gap};
    to.first = NULL;
    if (pairs_side_by_side()) {
        product_of_kind(REALS, STRANDS, rows, inner, CHAIN, left, (matrix){b, ldb}, columns, NULL, to);
    } else {
        chains_in_turn(false, rows, inner, left, b, ldb, columns, to);
    }
}

static void product_strands_transposed(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b,
                                       int64_t ldb, int64_t columns, sums_to to) {
    left_matrix left = {a, 1, lda, 0};
    to.first = NULL;
    if (pairs_side_by_side()) {
        product_of_kind(REALS, STRANDS, rows, inner, CHAIN, left, (matrix){b, ldb}, columns, NULL, to);
    } else {
        chains_in_turn(true, rows, inner, left, b, ldb, columns, to);
    }
}

/* A pair of chains, or less. */
INLINE void product_pair(int64_t rows, int64_t inner, const real *a, int64_t lda, int64_t gap, const real *b,
                         int64_t ldb, int64_t columns, sums_to to) {
    if (inner <= CHAIN) {
        product_chain(rows, inner, a, lda, b, ldb, columns, NULL, to);
    } else {
        product_strands(rows, inner, a, lda, gap, b, ldb, columns, to);
    }
}

INLINE void product_pair_transposed(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                                    int64_t columns, sums_to to) {
    if (inner <= CHAIN) {
        product_chain_transposed(rows, inner, a, lda, b, ldb, columns, NULL, to);
    } else {
        product_strands_transposed(rows, inner, a, lda, b, ldb, columns, to);
    }
}

/* The same with B of 16-bit numbers, for up to MICRO_ROWS rows. */
INLINE void narrow_product(const int S, rapt_dtype dtype, int64_t rows, int64_t inner, int64_t strand, const real *a,
                           int64_t lda, const uint16_t *b, int64_t ldb, int64_t columns, sums_to to) {
    left_matrix left = {a, lda, 1, 0};
    matrix right = {b, ldb};
    if (dtype == RAPT_F16) {
        product_of_kind(HALVES, S, rows, inner, strand, left, right, columns, NULL, to);
    } else {
        product_of_kind(BRAIN_HALVES, S, rows, inner, strand, left, right, columns, NULL, to);
    }
}

static void narrow_strands(rapt_dtype dtype, int64_t rows, int64_t inner, int64_t strand, const real *a, int64_t lda,
                           const uint16_t *b, int64_t ldb, int64_t columns, sums_to to) {
    narrow_product(STRANDS, dtype, rows, inner, strand, a, lda, b, ldb, columns, to);
}

static void narrow_pair(rapt_dtype dtype, int64_t rows, int64_t inner, const real *a, int64_t lda, const uint16_t *b,
                        int64_t ldb, int64_t columns, sums_to to) {
    if (inner <= CHAIN) {
        narrow_product(1, dtype, rows, inner, inner, a, lda, b, ldb, columns, to);
    } else {
        narrow_strands(dtype, rows, inner, CHAIN, a, lda, b, ldb, columns, to);
    }
}

INLINE void narrow_score_chain(rapt_dtype dtype, int64_t rows, int64_t inner, const real *a, int64_t lda,
                               const uint16_t *b, int64_t ldb, int64_t columns, sums_to to) {
    narrow_strands(dtype, rows, inner, (inner + 1) / STRANDS, a, lda, b, ldb, columns, to);
}

/* All chains of scores. Chains outside, rows inside: the rows of B of one chain stay in the nearest cache for all rows of
 * A. */
INLINE void score_product(int64_t rows, int64_t inner, const real *a, int64_t lda, const real *b, int64_t ldb,
                          int64_t columns, rapt_soon *soon, real *c, int64_t ldc) {
    for (int64_t k = 0; k < inner; k += CHAIN) {
        int64_t count = inner - k < CHAIN ? inner - k : CHAIN;
        score_chain(rows, count, a + k, lda, b + k * ldb, ldb, columns, soon, k > 0, c, ldc);
    }
}

#endif
