/* linear_cpu.c - projections on the CPU: weights packed once into panels, products of row blocks and panels */
#include "cpu.h"

/* Rows of x that pass over a panel together: as many as fit BLOCK_REALS with their features, which is what the second
 * cache holds beside a panel, but neither fewer nor more than these. */
#define BLOCK_REALS 98304
#define LEAST_BLOCK_ROWS 48
#define MOST_BLOCK_ROWS 192

/* Reals before a panel: all panels before it are PANEL wide, with their biases. */
static int64_t panel_offset(int64_t features_in, int64_t panel) { return panel * PANEL * (features_in + 1); }

/* ---- packing ---- */

size_t rapt_linear_packed_size(rapt_dtype dtype, int64_t features_out, int64_t features_in) {
    size_t width = rapt_size_add((size_t)(features_out - 1) / COLUMNS * COLUMNS, COLUMNS);
    return rapt_size_mul(rapt_accumulation_size(dtype), rapt_size_mul(width, (size_t)features_in + 1));
}

typedef struct pack_job {
    const rapt_cpu_kernels *kernels;
    const rapt_tensor *weight, *bias;
    char *packed;
} pack_job;

static void pack_panel(void *arg, int64_t panel, int32_t lane) {
    (void)lane;
    const pack_job *job = arg;
    const rapt_tensor *weight = job->weight, *bias = job->bias;
    int64_t features = weight->shape[0], inner = weight->shape[1], width = panel_width(features, panel);
    int64_t columns = columns_of(features, panel);
    size_t real = rapt_accumulation_size(weight->dtype), element = rapt_dtype_size(weight->dtype);
    char *to = job->packed + real * (size_t)panel_offset(inner, panel);
    const char *rows = (const char *)weight->data + panel * PANEL * weight->stride[0] * (int64_t)element;
    job->kernels->pack_columns(to, width, rows, weight->dtype, columns, inner, weight->stride[0], weight->stride[1]);
    char *biases = to + real * (size_t)(inner * width);
    if (bias->data != NULL) {
        const char *from = (const char *)bias->data + panel * PANEL * bias->stride[0] * (int64_t)element;
        job->kernels->pack_rows(biases, width, from, bias->dtype, 1, columns, 0, bias->stride[0]);
    } else {
        memset(biases, 0, real * (size_t)width);
    }
}

void rapt_linear_pack(rapt_context *context, const rapt_tensor *weight, const rapt_tensor *bias, void *packed) {
    pack_job job = {
        .kernels = context->kernels[weight->dtype == RAPT_F64], .weight = weight, .bias = bias, .packed = packed};
    double operations = (double)weight->shape[0] * (double)weight->shape[1];
    rapt_parallel(context, panels_of(weight->shape[0]), operations, pack_panel, &job);
}

/* ---- the product ---- */

typedef struct linear_job {
    const rapt_cpu_kernels *kernels;
    const linear_problem *problem;
    int64_t rows, block_rows;
    int64_t panels;      /* of all parts together */
    bool reads_in_place; /* x can be read where it lies: reals, unit stride, rows evenly apart */
    char *lanes;
    size_t lane_bytes;
} linear_job;

static size_t lane_size(const linear_problem *p) {
    /* Not for the rows in use, which are more where features are fewer: never less than a smaller problem needs. */
    size_t x = rapt_size_mul(LEAST_BLOCK_ROWS, (size_t)p->features);
    if (x < BLOCK_REALS) x = BLOCK_REALS;
    return rapt_arena_size(rapt_size_mul(rapt_accumulation_size(p->dtype), rapt_size_add(x, MOST_BLOCK_ROWS * PANEL)));
}

size_t rapt_cpu_linear_scratch(const rapt_context *context, const linear_problem *p) {
    return rapt_size_mul(lane_size(p), (size_t)context->lanes);
}

/* Rows first .. first + count of x, where they lie or packed into `buffer`. */
static rapt_rows block_of_x(const linear_job *job, int64_t first, int64_t count, char *buffer) {
    const linear_problem *p = job->problem;
    int64_t real = (int64_t)rapt_accumulation_size(p->dtype), element = (int64_t)rapt_dtype_size(p->x.dtype);
    rapt_rows block = p->x;
    if (job->reads_in_place) {
        block.stride[1] = p->length == 1 ? p->x.stride[0] : p->x.stride[1];
        block.data += first * block.stride[1] * element;
        return block;
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t n = (first + r) / p->length, l = (first + r) % p->length;
        const char *row = p->x.data + element * (n * p->x.stride[0] + l * p->x.stride[1]);
        for (int64_t f = 0; f < p->features; f += p->x.group) {
            job->kernels->pack_rows(buffer + real * (r * p->features + f), p->x.group,
                                    row + element * rapt_feature_at(&p->x, f), p->x.dtype, 1, p->x.group, 0,
                                    p->x.stride[2]);
        }
    }
    return (rapt_rows){.data = buffer,
                       .dtype = rapt_accumulation_dtype(p->dtype),
                       .stride = {0, p->features, 1},
                       .group = p->features};
}

static void run_block(void *arg, int64_t item, int32_t lane) {
    const linear_job *job = arg;
    const linear_problem *p = job->problem;
    size_t real = rapt_accumulation_size(p->dtype);
    int64_t panel = item % job->panels, first = item / job->panels * job->block_rows;
    int64_t count = job->rows - first < job->block_rows ? job->rows - first : job->block_rows;
    const linear_part *part = p->part;
    while (panel >= panels_of(part->features)) panel -= panels_of(part++->features);

    char *partial = job->lanes + (size_t)lane * job->lane_bytes, *buffer = partial + real * MOST_BLOCK_ROWS * PANEL;
    int64_t width = panel_width(part->features, panel);
    rapt_rows x = block_of_x(job, first, count, buffer);
    const char *weights = (const char *)part->packed + real * (size_t)panel_offset(p->features, panel);
    int64_t columns = columns_of(part->features, panel);
    size_t element = rapt_dtype_size(part->y.dtype);
    bool writes_in_place = real == element && columns == width && part->y.stride[2] == 1 && !p->adds;
    if (!writes_in_place) job->kernels->linear_panel(&x, count, p->features, weights, width, partial, partial, width);
    for (int64_t r = 0, rows; r < count; r += rows) {
        int64_t n = (first + r) / p->length, l = (first + r) % p->length;
        char *y = part->y.data + (int64_t)element * (n * part->y.stride[0] + l * part->y.stride[1] +
                                                     rapt_feature_at(&part->y, panel * PANEL));
        if (writes_in_place) { /* as many rows as lie evenly */
            bool is_even = part->y.stride[0] == p->length * part->y.stride[1];
            rows = is_even || p->length - l > count - r ? count - r : p->length - l;
            rapt_rows some = x;
            some.data += (int64_t)real * r * x.stride[1];
            job->kernels->linear_panel(&some, rows, p->features, weights, width, partial, y, part->y.stride[1]);
        } else {
            rows = 1;
            (p->adds ? job->kernels->add_row : job->kernels->store_row)(partial + real * (size_t)(r * width), columns,
                                                                        y, part->y.dtype, part->y.stride[2]);
        }
    }
}

void rapt_cpu_linear(rapt_context *context, const linear_problem *p, void *scratch) {
    linear_job job = {.kernels = context->kernels[p->dtype == RAPT_F64], .problem = p, .rows = p->batch * p->length};
    double features = 0;
    for (int32_t i = 0; i < p->parts; i++) {
        job.panels += panels_of(p->part[i].features);
        features += (double)p->part[i].features;
    }
    bool rows_even = p->batch == 1 || p->length == 1 || p->x.stride[0] == p->length * p->x.stride[1];
    job.reads_in_place =
        p->x.dtype == rapt_accumulation_dtype(p->dtype) && (p->x.stride[2] == 1 || p->features == 1) && rows_even;
    job.lanes = scratch;
    job.lane_bytes = lane_size(p);
    job.block_rows = BLOCK_REALS / p->features / LEAST_BLOCK_ROWS * LEAST_BLOCK_ROWS;
    if (job.block_rows < LEAST_BLOCK_ROWS) job.block_rows = LEAST_BLOCK_ROWS;
    if (job.block_rows > MOST_BLOCK_ROWS) job.block_rows = MOST_BLOCK_ROWS;
    int64_t blocks = job.rows / job.block_rows + (job.rows % job.block_rows != 0);
    rapt_parallel(context, blocks * job.panels, (double)job.rows * features * (double)p->features, run_block, &job);
}
