/* pack.h - tensors of any dtype and stride into the layouts that the product reads, and results back */
#ifndef RAPT_CPU_KERNELS_PACK_H
#define RAPT_CPU_KERNELS_PACK_H

#include "../../elements.h"
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
        for (int64_t i = 0; i < count; i++) to[i] = (real)rapt_element_load(data, dtype, offset + i * stride);
    }
}

static void store_row(const void *row, int64_t count, void *to, rapt_dtype dtype, int64_t stride) {
    const real *from = row;
    if (dtype == REAL_DTYPE) {
        real *target = to;
        for (int64_t i = 0; i < count; i++) target[i * stride] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++) rapt_element_store(to, dtype, i * stride, (double)from[i]);
    }
}

static void pack_columns(void *panel, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                         int64_t row_stride, int64_t dim_stride) {
    real *to = panel;
    for (int64_t r = 0; r < count; r++) {
        if (dtype == REAL_DTYPE) {
            const real *from = (const real *)rows + r * row_stride;
            for (int64_t d = 0; d < dim; d++) to[d * width + r] = from[d * dim_stride];
        } else {
            for (int64_t d = 0; d < dim; d++) {
                to[d * width + r] = (real)rapt_element_load(rows, dtype, r * row_stride + d * dim_stride);
            }
        }
    }
    for (int64_t d = 0; d < dim && count < width; d++) {
        memset(to + d * width + count, 0, (size_t)(width - count) * sizeof(real));
    }
}

static bool pack_rows(void *to, int64_t width, const void *rows, rapt_dtype dtype, int64_t count, int64_t dim,
                      int64_t row_stride, int64_t dim_stride) {
    bool all_finite = true;
    for (int64_t r = 0; r < count; r++) {
        real *row = (real *)to + r * width;
        load_row(row, rows, dtype, r * row_stride, dim_stride, dim);
        for (int64_t d = 0; d < dim; d++) all_finite &= row[d] - row[d] == 0; /* inf - inf and NaN - NaN are NaN */
        if (dim < width) memset(row + dim, 0, (size_t)(width - dim) * sizeof(real));
    }
    return all_finite;
}

#endif
