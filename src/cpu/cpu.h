/* cpu.h - what the files of the CPU backend share above the kernels */
#ifndef RAPT_CPU_CPU_H
#define RAPT_CPU_CPU_H

#include "../internal.h"
#include "kernels/kernels.h"

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Features in panels of PANEL: how many there are, and of one of them the features, and those rounded up to COLUMNS. */
static inline int64_t panels_of(int64_t features) { return divide_up(features, PANEL); }
static inline int64_t columns_of(int64_t features, int64_t panel) { return smaller(PANEL, features - panel * PANEL); }
static inline int64_t panel_width(int64_t features, int64_t panel) {
    return rapt_round_up(columns_of(features, panel), COLUMNS);
}

/* Adds rows [first, first + count) of a view [N, heads, rows, dim] to what is wanted soon. */
static inline void rapt_want_soon(rapt_soon *soon, const rapt_view *view, rapt_dtype dtype, int64_t n, int64_t head,
                                  int64_t first, int64_t count, int64_t dim) {
    if (view->data == NULL || view->stride[3] != 1 || count <= 0 || soon->count == SOON_RANGES) return;
    int64_t element = (int64_t)rapt_dtype_size(dtype), last = soon->count++;
    int64_t at = n * view->stride[0] + head * view->stride[1] + first * view->stride[2];
    bool has_gaps = view->stride[2] != dim; /* else it is all one, of which every line is like a row */
    int64_t stride = has_gaps ? element * view->stride[2] : RAPT_LINE_BYTES;
    soon->range[last].data = view->data + element * at;
    soon->range[last].stride = stride;
    soon->range[last].rows = has_gaps ? count : divide_up(element * dim * count, stride);
    soon->range[last].lines = has_gaps ? divide_up(element * dim, RAPT_LINE_BYTES) : 1;
    soon->range[last].done = 0;
}

/* Sets the context's isa and kernels: the one wanted, else the one that RAPT_ISA names, else the best. */
rapt_status rapt_choose_isa(rapt_context *context, rapt_isa wanted);

size_t rapt_cpu_linear_scratch(const rapt_context *context, const linear_problem *problem);
void rapt_cpu_linear(rapt_context *context, const linear_problem *problem, void *scratch);

size_t rapt_cpu_attn_backward_scratch(const rapt_context *context, const attn_problem *problem,
                                      const attn_gradients *gradients);
void rapt_cpu_attn_backward(rapt_context *context, const attn_problem *problem, const attn_gradients *gradients,
                            void *scratch);
size_t rapt_cpu_linear_backward_scratch(const rapt_context *context, const linear_gradients *gradients);
void rapt_cpu_linear_backward(rapt_context *context, const linear_gradients *gradients, void *scratch);

#endif
