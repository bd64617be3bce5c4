/* optimizer_step.c - what optimisers compute: steps, norms, zeros
 *
 * Every element is computed in double precision from what is stored, and rounded once when it is stored again, so the
 * bits depend on neither threads nor vectors. sqrt is exactly rounded; powers are products of our own.
 */
#include "optimizer.h"

#include "elements.h"
#include "json.h"

#include <math.h>

/* Runs over the elements `first` to before `end` of one parameter. */
typedef void (*chunk_work)(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk);

typedef struct chunk_job {
    const rapt_optimizer *optimizer;
    chunk_work work;
    const void *arg;
} chunk_job;

static void run_chunk(void *arg, int64_t chunk, int32_t lane) {
    (void)lane;
    const chunk_job *job = arg;
    size_t low = 0, high = optimizer_count(job->optimizer); /* the last entry that begins at or before the chunk */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (optimizer_entry_at(job->optimizer, middle)->first_chunk <= chunk) low = middle;
        if (optimizer_entry_at(job->optimizer, middle)->first_chunk > chunk) high = middle;
    }
    const optimizer_entry *entry = optimizer_entry_at(job->optimizer, low);
    int64_t first = (chunk - entry->first_chunk) * OPTIMIZER_CHUNK, rest = entry->count - first;
    job->work(job->arg, entry, first, first + (rest < OPTIMIZER_CHUNK ? rest : OPTIMIZER_CHUNK), chunk);
}

/* `cost` is roughly the number of multiply-adds that an element is worth. */
static void for_each_chunk(rapt_context *context, const rapt_optimizer *optimizer, double cost, chunk_work work,
                           const void *arg) {
    chunk_job job = {.optimizer = optimizer, .work = work, .arg = arg};
    int64_t chunks = rapt_optimizer_chunks(optimizer);
    rapt_parallel(context, chunks, cost * OPTIMIZER_CHUNK * (double)chunks, run_chunk, &job);
}

/* A loop over elements, written once and compiled for each dtype: `dtype` is a constant in each copy. */
#define FOR_DTYPE(dtype, run, ...)                                                                                     \
    switch (dtype) {                                                                                                   \
    case RAPT_F32: run(RAPT_F32, __VA_ARGS__); break;                                                                  \
    case RAPT_F64: run(RAPT_F64, __VA_ARGS__); break;                                                                  \
    case RAPT_BF16: run(RAPT_BF16, __VA_ARGS__); break;                                                                \
    case RAPT_F16: run(RAPT_F16, __VA_ARGS__); break;                                                                  \
    case RAPT_BOOL: break;                                                                                             \
    }
#define EVERY_DTYPE static inline __attribute__((always_inline))

/* ---- SGD ---- */

typedef struct sgd_step {
    double rate, decay, momentum, fresh; /* fresh: 1 - dampening */
    bool is_first, nesterov;
} sgd_step;

EVERY_DTYPE void sgd_run(rapt_dtype dtype, const sgd_step *given, const optimizer_entry *entry, int64_t first,
                         int64_t end) {
    const sgd_step s = *given;
    rapt_dtype wide = rapt_accumulation_dtype(dtype);
    void *restrict parameter = entry->parameter.data, *restrict momentum = entry->state[0].data;
    const void *restrict gradient = entry->gradient.data;
    for (int64_t i = first; i < end; i++) {
        double p = rapt_element_load(parameter, dtype, i), d = rapt_element_load(gradient, dtype, i);
        if (s.decay != 0) d += s.decay * p;
        if (s.momentum != 0) {
            double m = s.is_first ? d : s.momentum * rapt_element_load(momentum, wide, i) + s.fresh * d;
            rapt_element_store(momentum, wide, i, m);
            d = s.nesterov ? d + s.momentum * m : m;
        }
        rapt_element_store(parameter, dtype, i, p - s.rate * d);
    }
}

static void sgd_chunk(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk) {
    (void)chunk;
    FOR_DTYPE(entry->parameter.dtype, sgd_run, arg, entry, first, end)
}

static sgd_step plan_sgd(const rapt_optimizer *optimizer) {
    const rapt_optimizer_config *c = &optimizer->config;
    return (sgd_step){.rate = c->learning_rate,
                      .decay = c->weight_decay,
                      .momentum = c->momentum,
                      .fresh = 1 - c->dampening,
                      .is_first = optimizer->steps == 0,
                      .nesterov = c->nesterov};
}

/* ---- AdamW ----
 *
 * PyTorch's p -= rate / c1 * m / (sqrt(v) / sqrt(c2) + epsilon), with c = 1 - beta^step, multiplied through by sqrt(c2). */

typedef struct adamw_step {
    double keep;           /* 1 - rate * weight_decay */
    double fresh1;         /* 1 - beta1 */
    double beta2, fresh2;  /* and 1 - beta2 */
    double scaled_rate;    /* rate / c1 * sqrt(c2) */
    double scaled_epsilon; /* epsilon * sqrt(c2) */
} adamw_step;

/* can_be_zero: there is no epsilon. Then what has no gradient stays where it is instead of becoming 0 / 0. It is a constant
 * in each copy, too, as the condition would keep the loop from being vectorised. */
EVERY_DTYPE void adamw_run(rapt_dtype dtype, bool can_be_zero, const adamw_step *given, const optimizer_entry *entry,
                           int64_t first, int64_t end) {
    const adamw_step s = *given;
    rapt_dtype wide = rapt_accumulation_dtype(dtype);
    void *restrict parameter = entry->parameter.data;
    void *restrict average = entry->state[0].data, *restrict square = entry->state[1].data;
    const void *restrict gradient = entry->gradient.data;
    for (int64_t i = first; i < end; i++) {
        double p = rapt_element_load(parameter, dtype, i), g = rapt_element_load(gradient, dtype, i);
        double m = rapt_element_load(average, wide, i), v = rapt_element_load(square, wide, i);
        m += s.fresh1 * (g - m);
        v = s.beta2 * v + s.fresh2 * g * g;
        double divisor = sqrt(v) + s.scaled_epsilon, change = s.scaled_rate * m / divisor;
        if (can_be_zero && divisor == 0) change = 0;
        rapt_element_store(average, wide, i, m);
        rapt_element_store(square, wide, i, v);
        rapt_element_store(parameter, dtype, i, s.keep * p - change);
    }
}

static void adamw_chunk(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk) {
    (void)chunk;
    if (((const adamw_step *)arg)->scaled_epsilon == 0) {
        FOR_DTYPE(entry->parameter.dtype, adamw_run, true, arg, entry, first, end)
    } else {
        FOR_DTYPE(entry->parameter.dtype, adamw_run, false, arg, entry, first, end)
    }
}

/* By squaring: the same products in the same order everywhere, and on a run that was continued from a file. */
static double power(double base, int64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
    }
    return result;
}

static adamw_step plan_adamw(const rapt_optimizer *optimizer) {
    const rapt_optimizer_config *c = &optimizer->config;
    int64_t step = optimizer->steps + 1;
    double root = sqrt(1 - power(c->beta2, step));
    return (adamw_step){.keep = 1 - c->learning_rate * c->weight_decay,
                        .fresh1 = 1 - c->beta1,
                        .beta2 = c->beta2,
                        .fresh2 = 1 - c->beta2,
                        .scaled_rate = c->learning_rate / (1 - power(c->beta1, step)) * root,
                        .scaled_epsilon = c->epsilon * root};
}

/* ---- a step ---- */

static rapt_status step(rapt_context *context, rapt_optimizer *optimizer) {
    if (optimizer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "optimizer is NULL");
    if (optimizer_count(optimizer) == 0)
        return rapt_fail(context, RAPT_ERROR_STATE, "the optimiser has no parameters, expected some to be added first");
    if (optimizer->config.kind == RAPT_ADAMW) {
        adamw_step plan = plan_adamw(optimizer);
        for_each_chunk(context, optimizer, 16, adamw_chunk, &plan);
    } else {
        sgd_step plan = plan_sgd(optimizer);
        for_each_chunk(context, optimizer, 2, sgd_chunk, &plan);
    }
    optimizer->steps++;
    for (size_t i = 0; i < optimizer->layers.count; i++)
        rapt_mha_pack(context, optimizer_layer_at(optimizer, i)->layer);
    return RAPT_OK;
}

rapt_status rapt_optimizer_step(rapt_context *context, rapt_optimizer *optimizer) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, step(context, optimizer));
}

/* ---- gradients: zeros, norm, clipping ---- */

static void zero_chunk(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk) {
    (void)arg;
    (void)chunk;
    size_t size = rapt_dtype_size(entry->gradient.dtype);
    memset((char *)entry->gradient.data + (size_t)first * size, 0, (size_t)(end - first) * size);
}

rapt_status rapt_optimizer_zero_gradients(rapt_context *context, rapt_optimizer *optimizer) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    if (optimizer == NULL) {
        status = rapt_fail(context, RAPT_ERROR_NULL, "optimizer is NULL");
    } else {
        for_each_chunk(context, optimizer, 0.25, zero_chunk, NULL);
    }
    return rapt_leave(context, &call, status);
}

/* Element i goes to sum i % 8, and these are added up in pairs: an order that vectors keep. */
EVERY_DTYPE void squares_run(rapt_dtype dtype, const void *data, int64_t first, int64_t end, double *result) {
    double sum[8] = {0};
    int64_t i = first;
    for (; i + 8 <= end; i += 8) {
        for (int k = 0; k < 8; k++) {
            double g = rapt_element_load(data, dtype, i + k);
            sum[k] += g * g;
        }
    }
    for (int k = 0; i + k < end; k++) {
        double g = rapt_element_load(data, dtype, i + k);
        sum[k] += g * g;
    }
    *result = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

static void squares_chunk(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk) {
    double *const *sums = arg;
    double *result = *sums + chunk;
    FOR_DTYPE(entry->gradient.dtype, squares_run, entry->gradient.data, first, end, result)
}

EVERY_DTYPE void scale_run(rapt_dtype dtype, void *data, int64_t first, int64_t end, double factor) {
    for (int64_t i = first; i < end; i++)
        rapt_element_store(data, dtype, i, factor * rapt_element_load(data, dtype, i));
}

static void scale_chunk(const void *arg, const optimizer_entry *entry, int64_t first, int64_t end, int64_t chunk) {
    (void)chunk;
    double factor = *(const double *)arg;
    FOR_DTYPE(entry->gradient.dtype, scale_run, entry->gradient.data, first, end, factor)
}

static rapt_status fail_not_finite(rapt_context *context, const rapt_optimizer *optimizer, double norm) {
    for (size_t i = 0; i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        for (int64_t k = 0; k < entry->count; k++) {
            double g = rapt_load(entry->gradient.data, entry->gradient.dtype, k);
            char text[RAPT_SHOWN_SIZE];
            if (!isfinite(g))
                return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                                 "the gradient of '%s' is %g at element %lld, expected finite numbers",
                                 rapt_shown(entry->name, text), g, (long long)k);
        }
    }
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "the norm of all gradients is %g, expected a finite number", norm);
}

static rapt_status clip(rapt_context *context, const rapt_optimizer *optimizer, double max_norm, double *norm) {
    if (!(max_norm >= 0)) /* infinity only measures */
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "max_norm is %g, expected 0 or more", max_norm);
    int64_t chunks = rapt_optimizer_chunks(optimizer);
    size_t bytes = rapt_size_mul((size_t)chunks, sizeof(double));
    if (!rapt_arena_reserve(&context->arena, &context->allocator, bytes)) return rapt_fail_memory(context, bytes);
    double *sums = rapt_arena_take(&context->arena, bytes), total = 0;
    for_each_chunk(context, optimizer, 0.5, squares_chunk, &sums);
    for (int64_t i = 0; i < chunks; i++) total += sums[i];
    total = sqrt(total);
    if (!isfinite(total)) return fail_not_finite(context, optimizer, total);
    double factor = max_norm / (total + 1e-6); /* PyTorch's */
    if (factor < 1) for_each_chunk(context, optimizer, 0.5, scale_chunk, &factor);
    if (norm != NULL) *norm = total;
    return RAPT_OK;
}

rapt_status rapt_optimizer_clip(rapt_context *context, rapt_optimizer *optimizer, double max_norm, double *norm) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    status = optimizer == NULL ? rapt_fail(context, RAPT_ERROR_NULL, "optimizer is NULL")
                               : clip(context, optimizer, max_norm, norm);
    return rapt_leave(context, &call, status);
}
