/* ref_linear.c - projections as the specification says it: y = x * weight^T + bias, in double precision */
#include "ref.h"

size_t rapt_ref_linear_scratch(const rapt_context *context, const linear_problem *problem) {
    (void)context;
    (void)problem;
    return 0;
}

static double dot(const linear_problem *p, const linear_part *part, int64_t n, int64_t l, int64_t o) {
    double sum = 0;
    for (int64_t k = 0; k < p->features; k++) {
        double x =
            rapt_load(p->x.data, p->x.dtype, n * p->x.stride[0] + l * p->x.stride[1] + rapt_feature_at(&p->x, k));
        sum += x * rapt_load(part->weight.data, p->dtype, o * part->weight.stride[0] + k * part->weight.stride[1]);
    }
    if (part->bias.data != NULL) sum += rapt_load(part->bias.data, p->dtype, o * part->bias.stride[0]);
    return sum;
}

void rapt_ref_linear(rapt_context *context, const linear_problem *p, void *scratch) {
    (void)context;
    (void)scratch;
    for (int32_t i = 0; i < p->parts; i++) {
        const linear_part *part = &p->part[i];
        for (int64_t n = 0; n < p->batch; n++) {
            for (int64_t l = 0; l < p->length; l++) {
                for (int64_t o = 0; o < part->features; o++) {
                    int64_t at = n * part->y.stride[0] + l * part->y.stride[1] + rapt_feature_at(&part->y, o);
                    rapt_store(part->y.data, part->y.dtype, at, dot(p, part, n, l, o) + 0.0);
                }
            }
        }
    }
}
