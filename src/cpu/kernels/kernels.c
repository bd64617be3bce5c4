/* kernels.c - compiled once for each ISA and accumulation type; each object offers one table
 *
 * RAPT_KERNEL_ISA_{BASELINE,AVX2,AVX512,NEON} and RAPT_KERNEL_{F32,F64} say which. Everything is static but the table.
 */
#include "kernels.h"

#include "attention.h"
#include "backward.h"

/* Sums of a product that takes several pairs of chains wait in `partial`. */
static void linear_panel(const rapt_rows *x, int64_t count, int64_t features, const void *panel, int64_t width,
                         void *partial, void *y, int64_t y_stride) {
    const real *weights = panel, *bias = weights + features * width;
    for (int64_t k = 0; k < features; k += PAIR) {
        bool is_last = features - k <= PAIR;
        sums_to to = {.before = k > 0 ? partial : NULL,
                      .ld_before = width,
                      .bias = is_last ? bias : NULL,
                      .c = is_last ? y : partial,
                      .ldc = is_last ? y_stride : width};
        int64_t first = rapt_feature_at(x, k), gap = rapt_feature_at(x, k + CHAIN) - first - CHAIN;
        product_pair(count, is_last ? features - k : PAIR, (const real *)(const void *)x->data + first, x->stride[1],
                     gap, weights + k * width, width, width, to);
    }
}

static void weight_panel(int64_t rows, const void *dy, int64_t dy_width, int64_t outputs, const void *x, int64_t width,
                         void *partial, void *y, int64_t y_stride) {
    for (int64_t r = 0; r < rows; r += PAIR) {
        bool is_last = rows - r <= PAIR;
        sums_to to = {.before = r > 0 ? partial : NULL,
                      .ld_before = width,
                      .c = is_last ? y : partial,
                      .ldc = is_last ? y_stride : width};
        product_pair_transposed(outputs, is_last ? rows - r : PAIR, (const real *)dy + r * dy_width, dy_width,
                                (const real *)x + r * width, width, width, to);
    }
}

/* In chains of CHAIN rows, these in order. */
static void sum_rows(int64_t rows, const void *from, int64_t width, void *sums) {
    for (int64_t c = 0; c < width; c += LANES) {
        vec total = v_zero();
        for (int64_t r = 0; r < rows; r += CHAIN) {
            vec sum = v_zero();
            for (int64_t i = r; i < rows && i < r + CHAIN; i++) {
                sum = v_add(sum, v_load((const real *)from + i * width + c));
            }
            total = v_add(total, sum);
        }
        v_store((real *)sums + c, total);
    }
}

#if defined(RAPT_KERNEL_ISA_AVX512)
#define TABLE_NAME(type) rapt_kernels_avx512_##type
#elif defined(RAPT_KERNEL_ISA_AVX2)
#define TABLE_NAME(type) rapt_kernels_avx2_##type
#elif defined(RAPT_KERNEL_ISA_NEON)
#define TABLE_NAME(type) rapt_kernels_neon_##type
#else
#define TABLE_NAME(type) rapt_kernels_baseline_##type
#endif

#ifdef RAPT_KERNEL_F32
#define TABLE TABLE_NAME(f32)
#else
#define TABLE TABLE_NAME(f64)
#endif

extern const rapt_cpu_kernels TABLE;
const rapt_cpu_kernels TABLE = {
    .pack_columns = pack_columns,
    .pack_rows = pack_rows,
    .all_finite = all_finite,
    .pack_queries = pack_queries,
    .attn_begin = attn_begin,
    .attn_cut = attn_cut,
    .attn_merge = attn_merge,
    .attn_finish = attn_finish,
    .attn_weights = attn_weights,
    .store_weights = store_weights,
    .linear_panel = linear_panel,
    .backward_rows = backward_rows,
    .backward_keys = backward_keys,
    .backward_odd_rows = backward_odd_rows,
    .backward_settle_odd_rows = backward_settle_odd_rows,
    .backward_delta = backward_delta,
    .backward_tile = backward_tile,
    .backward_mask = backward_mask,
    .store_block_row = store_block_row,
    .weight_panel = weight_panel,
    .sum_rows = sum_rows,
    .store_row = store_row,
    .add_row = add_row,
};
