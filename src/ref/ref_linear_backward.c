/* ref_linear_backward.c - the gradients of y = x * weight^T + bias, in double precision:
 *
 *     dx = dy * weight        d_weight = dy^T * x        d_bias = sum of dy's rows
 */
#include "ref.h"

#include <math.h>

size_t rapt_ref_linear_backward_scratch(const rapt_context *context, const linear_gradients *gradients) {
    (void)context;
    (void)gradients;
    return 0;
}

static double at(const rapt_rows *rows, int64_t n, int64_t l, int64_t feature) {
    return rapt_load(rows->data, rows->dtype,
                     n * rows->stride[0] + l * rows->stride[1] + rapt_feature_at(rows, feature));
}

static void put(void *data, rapt_dtype dtype, bool adds, int64_t index, double value) {
    rapt_store(data, dtype, index, (adds ? rapt_load(data, dtype, index) : 0) + value);
}

static void input_gradient(const linear_gradients *g) {
    for (int64_t n = 0; n < g->batch; n++) {
        for (int64_t l = 0; l < g->length; l++) {
            for (int64_t k = 0; k < g->features_in; k++) {
                double sum = 0;
                for (int64_t o = 0; o < g->features_out; o++) {
                    int64_t weight = o * g->weight.stride[0] + k * g->weight.stride[1];
                    sum += at(&g->dy, n, l, o) * rapt_load(g->weight.data, g->dtype, weight);
                }
                int64_t index = n * g->dx.stride[0] + l * g->dx.stride[1] + rapt_feature_at(&g->dx, k);
                put(g->dx.data, g->dx.dtype, g->adds_dx, index, sum);
            }
        }
    }
}

static bool is_hidden(const linear_gradients *g, int64_t n, int64_t l) {
    for (int64_t o = 0; o < g->features_out && g->hides_rows; o++) {
        if (at(&g->dy, n, l, o) != 0) return false;
    }
    return g->hides_rows;
}

static void weight_gradient(const linear_gradients *g) {
    for (int64_t o = 0; o < g->features_out; o++) {
        for (int64_t k = 0; k < g->features_in; k++) {
            double sum = 0;
            for (int64_t n = 0; n < g->batch; n++) {
                for (int64_t l = 0; l < g->length; l++) {
                    double x = at(&g->x, n, l, k);
                    if (isfinite(x) || !is_hidden(g, n, l)) sum += at(&g->dy, n, l, o) * x;
                }
            }
            put(g->d_weight.data, g->d_weight.dtype, g->adds_parameters,
                o * g->d_weight.stride[0] + k * g->d_weight.stride[1], sum);
        }
    }
}

static void bias_gradient(const linear_gradients *g) {
    for (int64_t o = 0; o < g->features_out; o++) {
        double sum = 0;
        for (int64_t n = 0; n < g->batch; n++) {
            for (int64_t l = 0; l < g->length; l++) sum += at(&g->dy, n, l, o);
        }
        put(g->d_bias.data, g->d_bias.dtype, g->adds_parameters, o * g->d_bias.stride[0], sum);
    }
}

void rapt_ref_linear_backward(rapt_context *context, const linear_gradients *g, void *scratch) {
    (void)context;
    (void)scratch;
    if (g->dx.data != NULL) input_gradient(g);
    if (g->d_weight.data != NULL) weight_gradient(g);
    if (g->d_bias.data != NULL) bias_gradient(g);
}
