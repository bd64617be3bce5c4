/* rotary.c - rotary positions: pairs of dimensions turn by an angle that grows with the position, each pair at its own speed
 *
 * Speeds and angles are computed in double precision, in turns instead of radians so that whole ones drop out exactly;
 * sine and cosine are rounded once to the accumulation type. The bits are the same on every machine.
 */
#include "rotary.h"

#include "elements.h"

#include <math.h>

typedef long long ll; /* for printf */

#define TWO_PI 0x1.921fb54442d18p+2

/* ---- speeds ---- */

static double power(double base, double exponent) { return rapt_exp2(exponent * rapt_log2(base)); }

static double clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* The dimension whose pair makes so many turns within the original length. */
static double dimension_of_turns(const rapt_rotary *r, double dims, double turns) {
    return dims * rapt_log((double)r->original_length / (turns * TWO_PI)) / (2 * rapt_log(r->base));
}

/* log2 of what the base is multiplied by for sequences longer than the original ones. */
static double stretch_of_base(const rapt_rotary *r, double dims) {
    if (r->length <= r->original_length) return 0;
    double stretch = r->factor * (double)r->length / (double)r->original_length - (r->factor - 1);
    return rapt_log2(stretch) * dims / (dims - 2);
}

/* Radians that pair i of `pairs` turns for each position. */
static double speed(const rapt_rotary *r, int64_t pairs, int64_t i) {
    double dims = 2 * (double)pairs, base = r->base, exponent = 2 * (double)i / dims;
    if (r->scaling == RAPT_ROTARY_NTK && pairs > 1) base *= rapt_exp2(stretch_of_base(r, dims));
    double plain = power(base, -exponent);
    switch (r->scaling) {
    case RAPT_ROTARY_LINEAR: return plain / r->factor;
    case RAPT_ROTARY_LLAMA3: {
        double turns = (double)r->original_length * plain / TWO_PI; /* within the original length */
        if (turns < r->low_turns) return plain / r->factor;
        if (turns > r->high_turns) return plain;
        double smooth = (turns - r->low_turns) / (r->high_turns - r->low_turns);
        return (1 - smooth) * plain / r->factor + smooth * plain;
    }
    case RAPT_ROTARY_YARN: {
        double low = dimension_of_turns(r, dims, r->high_turns), high = dimension_of_turns(r, dims, r->low_turns);
        if (!r->unrounded_bounds) {
            low = floor(low);
            high = ceil(high);
        }
        low = low < 0 ? 0 : low;
        high = high > dims - 1 ? dims - 1 : high;
        if (low == high) high += 0.001;
        double ramp = clamp(((double)i - low) / (high - low), 0, 1);
        return plain / r->factor * ramp + plain * (1 - ramp);
    }
    default: return plain;
    }
}

static double amplitude(const rapt_rotary *r) {
    if (r->set_amplitude) return r->amplitude;
    return r->scaling == RAPT_ROTARY_YARN && r->factor > 1 ? 0.1 * rapt_log(r->factor) + 1 : 1;
}

/* ---- checks ---- */

static int64_t pairs_of(const rapt_rotary *r, int64_t head_dim) {
    return (r->dims == RAPT_DEFAULT ? head_dim : r->dims) / 2;
}

static rapt_status check_number(rapt_context *context, const char *name, double value, double above) {
    if (value > above && value < 0x1p400) return RAPT_OK; /* no power of it overflows */
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "rotary.%s is %g, expected a number above %g", name, value, above);
}

rapt_status rapt_rotary_check(rapt_context *context, const rapt_rotary *r, int64_t head_dim) {
    if (r->struct_size < sizeof *r || !rapt_extra_bytes_are_zero(r, sizeof *r, r->struct_size)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "rotary.struct_size is %zu, expected %zu: start from rapt_rotary_default", r->struct_size,
                         sizeof *r);
    }
    int64_t dims = r->dims == RAPT_DEFAULT ? head_dim : r->dims;
    if (dims < 2 || dims > head_dim || dims % 2 != 0) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "rotary.dims is %lld, expected an even number from 2 to head_dim %lld", (ll)dims,
                         (ll)head_dim);
    }
    if (r->scaling < RAPT_ROTARY_PLAIN || r->scaling > RAPT_ROTARY_YARN) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "rotary.scaling is %d, which is no rapt_rotary_scaling",
                         (int)r->scaling);
    }
    rapt_status status = check_number(context, "base", r->base, 1);
    if (status == RAPT_OK && r->scaling != RAPT_ROTARY_PLAIN) status = check_number(context, "factor", r->factor, 0);
    if (status == RAPT_OK && r->scaling > RAPT_ROTARY_LINEAR) {
        status = check_number(context, "original_length", (double)r->original_length, 0);
    }
    if (status == RAPT_OK && r->scaling >= RAPT_ROTARY_LLAMA3) {
        status = check_number(context, "low_turns", r->low_turns, 0);
        if (status == RAPT_OK) status = check_number(context, "high_turns", r->high_turns, r->low_turns);
    }
    if (status == RAPT_OK && r->scaling == RAPT_ROTARY_NTK && dims > 2 && !(stretch_of_base(r, (double)dims) < 500)) {
        status = rapt_fail(context, RAPT_ERROR_ARGUMENT,
                           "rotary.factor %g with length %lld and original_length %lld is too much", r->factor,
                           (ll)r->length, (ll)r->original_length);
    }
    if (status == RAPT_OK && r->set_amplitude) status = check_number(context, "amplitude", r->amplitude, 0);
    return status == RAPT_OK ? rapt_check_aligned(context, "rotary.positions", r->positions) : status;
}

/* ---- turning ---- */

typedef struct turn_job {
    const rapt_rotary *rotary;
    const rotary_rows *rows;
    int64_t pairs;
    double amplitude;
    double *speeds; /* [pairs], turns a position */
    char *lanes;    /* [lanes][pairs][2] doubles: cosine and sine */
} turn_job;

size_t rapt_rotary_scratch(const rapt_context *context, int64_t head_dim) {
    size_t pairs = rapt_arena_size(rapt_size_mul(2 * sizeof(double), (size_t)head_dim / 2));
    return rapt_size_mul(pairs, (size_t)context->lanes + 1);
}

/* x' = x cos - y sin, y' = y cos + x sin, each product and sum rounded in the accumulation type. */
static void turn_pair(char *head, rapt_dtype dtype, int64_t first, int64_t second, const double *turn) {
    if (dtype == RAPT_F64) {
        double *values = (double *)(void *)head, x = values[first], y = values[second];
        values[first] = x * turn[0] - y * turn[1];
        values[second] = y * turn[0] + x * turn[1];
        return;
    }
    float x = (float)rapt_element_load(head, dtype, first), y = (float)rapt_element_load(head, dtype, second);
    float cosine = (float)turn[0], sine = (float)turn[1];
    rapt_element_store(head, dtype, first, (double)(x * cosine - y * sine));
    rapt_element_store(head, dtype, second, (double)(y * cosine + x * sine));
}

static void turn_heads(const turn_job *job, const rotary_heads *heads, int64_t n, int64_t i, double *turns) {
    const rotary_rows *rows = job->rows;
    /* As doubles: no sum of a caller's int64 overflows, and up to 2^53 each is exact. */
    double position = (double)i + (double)(heads->first != NULL ? heads->first[n] : heads->first_of_all);
    if (rows->padding != NULL) position -= (double)rows->padding[n];
    if (position < 0) position = 0; /* padding: no token */
    if (rows->positions != NULL) position = (double)rows->positions[n * heads->length + i];
    for (int64_t p = 0; p < job->pairs; p++) {
        double angle = position * job->speeds[p];
        rapt_sincos_2pi(angle - floor(angle), &turns[2 * p + 1], &turns[2 * p]);
        turns[2 * p] *= job->amplitude;
        turns[2 * p + 1] *= rows->backward ? -job->amplitude : job->amplitude;
    }
    int64_t element = (int64_t)rapt_dtype_size(rows->dtype);
    for (int64_t h = 0; h < heads->heads; h++) {
        char *head = heads->data + element * ((n * heads->length + i) * heads->row_stride + h * heads->head_stride);
        for (int64_t p = 0; p < job->pairs; p++) {
            bool apart = job->rotary->interleaved;
            turn_pair(head, rows->dtype, apart ? 2 * p : p, apart ? 2 * p + 1 : p + job->pairs, turns + 2 * p);
        }
    }
}

static void turn_row(void *arg, int64_t item, int32_t lane) {
    const turn_job *job = arg;
    const rotary_rows *rows = job->rows;
    int64_t q_rows = rows->batch * rows->q.length;
    double *turns = (double *)(void *)job->lanes + (int64_t)lane * 2 * job->pairs;
    if (item < q_rows) {
        turn_heads(job, &rows->q, item / rows->q.length, item % rows->q.length, turns);
    } else {
        turn_heads(job, &rows->k, (item - q_rows) / rows->k.length, (item - q_rows) % rows->k.length, turns);
    }
}

void rapt_rotate_rows(rapt_context *context, const rapt_rotary *rotary, const rotary_rows *rows, void *scratch) {
    turn_job job = {.rotary = rotary, .rows = rows, .pairs = pairs_of(rotary, rows->dim), .speeds = scratch};
    job.amplitude = amplitude(rotary);
    job.lanes = (char *)scratch + rapt_arena_size((size_t)job.pairs * sizeof(double));
    for (int64_t p = 0; p < job.pairs; p++) job.speeds[p] = speed(rotary, job.pairs, p) / TWO_PI;
    int64_t items = rows->batch * (rows->q.length + rows->k.length);
    double work =
        (double)rows->dim * (double)(rows->q.heads + rows->k.heads + 40); /* a sine costs some 40 times more */
    rapt_parallel(context, items, (double)items * work, turn_row, &job);
}

/* ---- on their own: [N, L, H, D] ---- */

static rapt_status rotate(rapt_context *context, const rapt_rotary *rotary, const int64_t *first,
                          const rapt_tensor *tensor, bool backward) {
    if (rotary == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "rotary is NULL");
    rapt_status status = rapt_check_output(context, "tensor", tensor);
    if (status == RAPT_OK) status = rapt_check_rank(context, "tensor", tensor, 4, "[N,L,H,D]");
    if (status != RAPT_OK) return status;
    if (!rapt_is_float(tensor->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "tensor is %s, expected f32, f64, bf16 or f16",
                         rapt_dtype_name(tensor->dtype));
    }
    char text[RAPT_SHAPE_TEXT];
    if (!rapt_tensor_is_contiguous(tensor)) {
        return rapt_fail(context, RAPT_ERROR_LAYOUT, "tensor with shape %s is not contiguous",
                         rapt_shape_text(tensor, text));
    }
    if (rapt_tensor_count(tensor) == 0) return RAPT_OK;
    status = rapt_rotary_check(context, rotary, tensor->shape[3]);
    if (status == RAPT_OK) status = rapt_check_aligned(context, "first", first);
    if (status != RAPT_OK) return status;
    size_t bytes = rapt_rotary_scratch(context, tensor->shape[3]);
    if (!rapt_arena_reserve(&context->arena, &context->allocator, bytes)) return rapt_fail_memory(context, bytes);
    rotary_rows rows = {.dtype = tensor->dtype,
                        .backward = backward,
                        .dim = tensor->shape[3],
                        .batch = tensor->shape[0],
                        .positions = rotary->positions,
                        .q = {.data = tensor->data,
                              .length = tensor->shape[1],
                              .heads = tensor->shape[2],
                              .row_stride = tensor->shape[2] * tensor->shape[3],
                              .head_stride = tensor->shape[3],
                              .first = first}};
    rapt_rotate_rows(context, rotary, &rows, rapt_arena_take(&context->arena, bytes));
    return RAPT_OK;
}

rapt_status rapt_rotate(rapt_context *context, const rapt_rotary *rotary, const int64_t *first,
                        const rapt_tensor *tensor) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, rotate(context, rotary, first, tensor, false));
}

rapt_status rapt_rotate_backward(rapt_context *context, const rapt_rotary *rotary, const int64_t *first,
                                 const rapt_tensor *tensor) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, rotate(context, rotary, first, tensor, true));
}
