/* pack.h - tensors of any dtype and stride into the layouts that the product reads, and results back */
#ifndef RAPT_CPU_KERNELS_PACK_H
#define RAPT_CPU_KERNELS_PACK_H

#include "kernels.h"
#include "vec.h"

#ifdef RAPT_KERNEL_F32
#define REAL_DTYPE RAPT_F32
#else
#define REAL_DTYPE RAPT_F64
#endif

/* count elements, `stride` apart, as reals. The common case is written out so that it becomes a copy. */
INLINE void load_row(real *to, const void *data, rapt_dtype dtype, int64_t offset, int64_t stride, int64_t count) {
    if (dtype == REAL_DTYPE) {
        const real *from = (const real *)data + offset;
        if (stride == 1) {
            memcpy(to, from, (size_t)count * sizeof(real));
        } else {
            for (int64_t i = 0; i < count; i++) to[i] = from[i * stride];
        }
    } else {
        int64_t i = 0;
#ifdef RAPT_KERNEL_F32
        const uint16_t *from = (const uint16_t *)data + offset;
        for (; dtype == RAPT_F16 && stride == 1 && i + LANES <= count; i += LANES)
            v_store(to + i, v_load_f16(from + i));
        for (; dtype == RAPT_BF16 && stride == 1 && i + LANES <= count; i += LANES)
            v_store(to + i, v_load_bf16(from + i));
#endif
        for (; i < count; i++) to[i] = (real)rapt_element_load(data, dtype, offset + i * stride);
    }
}

static void store_row(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride) {
    const real *from = row;
    if (dtype == REAL_DTYPE && stride == 1) {
        memcpy(to, from, (size_t)count * sizeof(real));
    } else if (dtype == REAL_DTYPE) {
        real *target = to;
        for (int64_t i = 0; i < count; i++) target[i * stride] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++) rapt_element_store(to, dtype, i * stride, (double)from[i]);
    }
}

static void add_row(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride) {
    const real *from = row;
    if (dtype == REAL_DTYPE) {
        real *target = to;
        for (int64_t i = 0; i < count; i++) target[i * stride] += from[i];
    } else {
        for (int64_t i = 0; i < count; i++) {
            real sum = (real)rapt_element_load(to, dtype, i * stride) + from[i];
            rapt_element_store(to, dtype, i * stride, (double)sum);
        }
    }
}

/* The part of a panel that is whole LANES x LANES blocks, for rows of reals without gaps. */
INLINE void pack_blocks(real *to, int64_t width, const real *rows, int64_t count, int64_t dim, int64_t row_stride) {
    for (int64_t r = 0; r < count; r += LANES) {
        for (int64_t d = 0; d < dim; d += LANES) {
            vec block[LANES];
            UNROLL for (int i = 0; i < LANES; i++) __builtin_prefetch(rows + (r + i + LANES) * row_stride + d);
            v_load_transposed(rows + r * row_stride + d, row_stride, block);
            UNROLL for (int i = 0; i < LANES; i++) v_store(to + (d + i) * width + r, block[i]);
        }
    }
}

/* Rows [first_row, count) and dimensions [first_dim, dim) of the others. */
INLINE void pack_elements(real *to, int64_t width, const void *rows, rapt_dtype dtype, int64_t first_row, int64_t count,
                          int64_t first_dim, int64_t dim, int64_t row_stride, int64_t dim_stride) {
    for (int64_t r = first_row; r < count; r++) {
        if (dtype == REAL_DTYPE) {
            const real *from = (const real *)rows + r * row_stride;
            for (int64_t d = first_dim; d < dim; d++) to[d * width + r] = from[d * dim_stride];
        } else {
            for (int64_t d = first_dim; d < dim; d++) {
                to[d * width + r] = (real)rapt_element_load(rows, dtype, r * row_stride + d * dim_stride);
            }
        }
    }
}

static void pack_columns(void *panel, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                         int64_t row_stride, int64_t dim_stride) {
    real *to = panel;
    int64_t block_rows = 0, block_dims = 0;
    if (row_stride == 1 && dim_stride != 1) { /* transposed already */
        for (int64_t d = 0; d < dim; d++) load_row(to + d * width, rows, dtype, d * dim_stride, 1, count);
        block_rows = count;
        block_dims = dim;
    } else if (dtype == REAL_DTYPE && dim_stride == 1) {
        block_rows = count / LANES * LANES;
        block_dims = dim / LANES * LANES;
        pack_blocks(to, width, rows, block_rows, block_dims, row_stride);
    }
    pack_elements(to, width, rows, dtype, 0, block_rows, block_dims, dim, row_stride, dim_stride);
    pack_elements(to, width, rows, dtype, block_rows, count, 0, dim, row_stride, dim_stride);
    int64_t padded = rapt_round_up(count, COLUMNS);
    for (int64_t d = 0; d < dim && count < padded; d++) {
        memset(to + d * width + count, 0, (size_t)(padded - count) * sizeof(real));
    }
}

static bool all_finite(const void *rows, int64_t count, int64_t dim, int64_t row_stride) {
    vec trouble[COLUMNS / LANES]; /* x - x is 0, or NaN where x is not finite */
    UNROLL for (int v = 0; v < COLUMNS / LANES; v++) trouble[v] = v_zero();
    for (int64_t r = 0; r < count; r++) {
        const real *row = (const real *)rows + r * row_stride;
        for (int64_t d = 0; d < dim; d += COLUMNS) {
            UNROLL for (int v = 0; v < COLUMNS / LANES; v++) {
                vec x = v_load(row + d + v * LANES);
                trouble[v] = v_add(trouble[v], v_sub(x, x));
            }
        }
    }
    real lane[COLUMNS], sum = 0;
    UNROLL for (int v = 0; v < COLUMNS / LANES; v++) v_store(lane + v * LANES, trouble[v]);
    for (int i = 0; i < COLUMNS; i++) sum += lane[i];
    return sum == 0;
}

static bool pack_rows(void *to, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                      int64_t row_stride, int64_t dim_stride) {
    vec trouble = v_zero(); /* x - x is 0, or NaN where x is not finite */
    real tail_trouble = 0;
    for (int64_t r = 0; r < count; r++) {
        real *row = (real *)to + r * width;
        load_row(row, rows, dtype, r * row_stride, dim_stride, dim);
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vec x = v_load(row + d);
            trouble = v_add(trouble, v_sub(x, x));
        }
        for (; d < dim; d++) tail_trouble += row[d] - row[d];
        if (dim < width) memset(row + dim, 0, (size_t)(width - dim) * sizeof(real));
    }
    real lane[LANES];
    v_store(lane, trouble);
    for (int i = 0; i < LANES; i++) tail_trouble += lane[i];
    return tail_trouble == 0;
}

#endif
