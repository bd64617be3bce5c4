/* tensor.c - views: making, checking, comparing and copying them */
#include "internal.h"

#include "elements.h"

#include <stdio.h>

size_t rapt_dtype_size(rapt_dtype dtype) {
    switch (dtype) {
    case RAPT_F32: return 4;
    case RAPT_F64: return 8;
    case RAPT_BF16:
    case RAPT_F16: return 2;
    case RAPT_BOOL: return 1;
    }
    return 0;
}

const char *rapt_dtype_name(rapt_dtype dtype) {
    switch (dtype) {
    case RAPT_F32: return "f32";
    case RAPT_F64: return "f64";
    case RAPT_BF16: return "bf16";
    case RAPT_F16: return "f16";
    case RAPT_BOOL: return "bool";
    }
    return "unknown";
}

const char *rapt_device_name(rapt_device device) {
    switch (device) {
    case RAPT_DEVICE_CPU: return "cpu";
    case RAPT_DEVICE_CUDA: return "cuda";
    }
    return "unknown";
}

bool rapt_is_float(rapt_dtype dtype) { return rapt_dtype_size(dtype) != 0 && dtype != RAPT_BOOL; }

double rapt_load(const void *data, rapt_dtype dtype, int64_t index) { return rapt_element_load(data, dtype, index); }

void rapt_store(void *data, rapt_dtype dtype, int64_t index, double value) {
    rapt_element_store(data, dtype, index, value);
}

/* ---- making views ---- */

rapt_tensor rapt_tensor_strided(void *data, rapt_dtype dtype, int32_t ndim, const int64_t *shape,
                                const int64_t *stride) {
    rapt_tensor tensor = {.data = data, .dtype = dtype, .ndim = ndim};
    for (int32_t d = 0; d < ndim && d < RAPT_MAX_DIMS; d++) {
        tensor.shape[d] = shape[d];
        tensor.stride[d] = stride[d];
    }
    return tensor;
}

rapt_tensor rapt_tensor_of(void *data, rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t stride[RAPT_MAX_DIMS] = {0}, next = 1;
    for (int32_t d = (ndim < RAPT_MAX_DIMS ? ndim : RAPT_MAX_DIMS) - 1; d >= 0; d--) {
        stride[d] = next;
        /* Absurd sizes are refused by the call that gets the tensor; here they only must not overflow. */
        if (__builtin_mul_overflow(next, shape[d], &next)) next = INT64_MAX;
    }
    return rapt_tensor_strided(data, dtype, ndim, shape, stride);
}

int64_t rapt_tensor_count(const rapt_tensor *tensor) {
    if (tensor == NULL || tensor->ndim < 0 || tensor->ndim > RAPT_MAX_DIMS) return -1;
    bool overflow = false, is_empty = false;
    int64_t count = 1;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] < 0) return -1;
        is_empty |= tensor->shape[d] == 0;
        overflow |= __builtin_mul_overflow(count, tensor->shape[d], &count);
    }
    return is_empty ? 0 : overflow ? -1 : count;
}

bool rapt_tensor_is_contiguous(const rapt_tensor *tensor) {
    int64_t count = rapt_tensor_count(tensor), expected = 1;
    if (count < 0) return false;
    if (count == 0) return true;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        if (tensor->shape[d] != 1 && tensor->stride[d] != expected) return false;
        expected *= tensor->shape[d];
    }
    return true;
}

rapt_tensor rapt_normalised(const rapt_tensor *tensor) {
    rapt_tensor result = *tensor;
    bool is_empty = rapt_tensor_count(tensor) == 0;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (is_empty || tensor->shape[d] == 1) result.stride[d] = 0;
    }
    return result;
}

bool rapt_same_view(const rapt_tensor *a, const rapt_tensor *b) {
    if (a == b) return true;
    if (a->data != b->data || a->dtype != b->dtype || a->device != b->device || a->ndim != b->ndim) return false;
    for (int32_t d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d] || (a->stride[d] != b->stride[d] && a->shape[d] > 1)) return false;
    }
    return true;
}

const char *rapt_shape_text(const rapt_tensor *tensor, char text[RAPT_SHAPE_TEXT]) {
    size_t used = 0;
    text[used++] = '[';
    for (int32_t d = 0; d < tensor->ndim && d < RAPT_MAX_DIMS; d++) {
        int length =
            snprintf(text + used, RAPT_SHAPE_TEXT - used, d == 0 ? "%lld" : ", %lld", (long long)tensor->shape[d]);
        used += (size_t)length;
    }
    text[used++] = ']';
    text[used] = '\0';
    return text;
}

/* ---- checking views ---- */

/* The bytes from the lowest to behind the highest element, relative to data. False if that overflows. */
static bool byte_range(const rapt_tensor *tensor, int64_t *low, int64_t *high) {
    int64_t size = (int64_t)rapt_dtype_size(tensor->dtype), lowest = 0, highest = 0;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        int64_t reach;
        if (tensor->shape[d] > 1 && tensor->stride[d] == INT64_MIN) return false; /* has no magnitude */
        if (__builtin_mul_overflow(tensor->stride[d], tensor->shape[d] - 1, &reach)) return false;
        if (__builtin_add_overflow(lowest, reach < 0 ? reach : 0, &lowest)) return false;
        if (__builtin_add_overflow(highest, reach > 0 ? reach : 0, &highest)) return false;
    }
    int64_t length;
    if (__builtin_add_overflow(highest, (int64_t)1, &highest) || __builtin_mul_overflow(highest, size, high))
        return false;
    return !__builtin_mul_overflow(lowest, size, low) && !__builtin_sub_overflow(*high, *low, &length);
}

/* Whether the sizes other than 0 can be multiplied: an empty tensor, too, has no sizes that overflow in a loop bound. */
static bool sizes_multiply(const rapt_tensor *tensor) {
    int64_t product = (int64_t)rapt_dtype_size(tensor->dtype);
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] != 0 && __builtin_mul_overflow(product, tensor->shape[d], &product)) return false;
    }
    return true;
}

rapt_status rapt_check_tensor(rapt_context *context, const char *name, const rapt_tensor *tensor) {
    if (tensor == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", name);
    if (rapt_dtype_size(tensor->dtype) == 0) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s has dtype %d, which is no rapt_dtype", name,
                         (int)tensor->dtype);
    }
    if (tensor->device != RAPT_DEVICE_CPU) {
        return rapt_fail(context, RAPT_ERROR_DEVICE, "%s is on device %s (%d), which has no backend in this build",
                         name, rapt_device_name(tensor->device), (int)tensor->device);
    }
    if (tensor->ndim < 0 || tensor->ndim > RAPT_MAX_DIMS) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has %d dimensions, expected 0 to %d", name, (int)tensor->ndim,
                         RAPT_MAX_DIMS);
    }
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] < 0) {
            return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has size %lld in dimension %d, expected 0 or more", name,
                             (long long)tensor->shape[d], (int)d);
        }
    }
    char text[RAPT_SHAPE_TEXT];
    int64_t count = rapt_tensor_count(tensor), low, high;
    if (!sizes_multiply(tensor) || (count != 0 && !byte_range(tensor, &low, &high))) {
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "%s with shape %s is too large: its bytes overflow an int64",
                         name, rapt_shape_text(tensor, text));
    }
    if (count == 0) return RAPT_OK;
    if (tensor->data == NULL) {
        return rapt_fail(context, RAPT_ERROR_NULL, "%s with shape %s has NULL data", name,
                         rapt_shape_text(tensor, text));
    }
    size_t size = rapt_dtype_size(tensor->dtype);
    if ((uintptr_t)tensor->data % size != 0) {
        return rapt_fail(context, RAPT_ERROR_LAYOUT, "%s has data at %p, which is not aligned to the %zu bytes of a %s",
                         name, tensor->data, size, rapt_dtype_name(tensor->dtype));
    }
    return RAPT_OK;
}

/* Dimensions with more than one entry, by the size of their stride. */
typedef struct sorted_dims {
    int32_t count;
    int64_t stride[RAPT_MAX_DIMS], shape[RAPT_MAX_DIMS];
} sorted_dims;

static void sort_dims(const rapt_tensor *tensor, sorted_dims *sorted) {
    sorted->count = 0;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] <= 1) continue;
        int64_t stride = tensor->stride[d] < 0 ? -tensor->stride[d] : tensor->stride[d];
        int32_t at = sorted->count++;
        for (; at > 0 && sorted->stride[at - 1] > stride; at--) {
            sorted->stride[at] = sorted->stride[at - 1];
            sorted->shape[at] = sorted->shape[at - 1];
        }
        sorted->stride[at] = stride;
        sorted->shape[at] = tensor->shape[d];
    }
}

rapt_status rapt_check_output(rapt_context *context, const char *name, const rapt_tensor *tensor) {
    rapt_status status = rapt_check_tensor(context, name, tensor);
    if (status != RAPT_OK || rapt_tensor_count(tensor) == 0) return status;
    sorted_dims dims;
    sort_dims(tensor, &dims);
    int64_t reach = 0; /* of the dimensions so far: the next stride must step over it */
    for (int32_t d = 0; d < dims.count; d++) {
        if (dims.stride[d] <= reach) {
            return rapt_fail(context, RAPT_ERROR_LAYOUT,
                             "%s overlaps itself: a dimension of size %lld has stride %lld, expected more than %lld",
                             name, (long long)dims.shape[d], (long long)dims.stride[d], (long long)reach);
        }
        reach += dims.stride[d] * (dims.shape[d] - 1);
    }
    return RAPT_OK;
}

rapt_status rapt_check_rank(rapt_context *context, const char *name, const rapt_tensor *tensor, int32_t rank,
                            const char *shape_words) {
    if (tensor->ndim == rank) return RAPT_OK;
    char text[RAPT_SHAPE_TEXT];
    return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s with %d dimensions, expected %d: %s", name,
                     rapt_shape_text(tensor, text), (int)tensor->ndim, (int)rank, shape_words);
}

/* Length in bytes of the contiguous runs that a view consists of; the strides between runs go into *period by gcd. */
static int64_t run_bytes(const rapt_tensor *tensor, int64_t *period) {
    sorted_dims dims;
    sort_dims(tensor, &dims);
    int64_t size = (int64_t)rapt_dtype_size(tensor->dtype), run = size;
    int32_t d = 0;
    while (d < dims.count && dims.stride[d] * size == run) run *= dims.shape[d++];
    for (; d < dims.count; d++) {
        int64_t a = *period, b = dims.stride[d] * size;
        while (b != 0) {
            int64_t rest = a % b;
            a = b;
            b = rest;
        }
        *period = a;
    }
    return run;
}

/* True if no byte belongs to both: their ranges are apart, or they interleave like columns of one table. */
static bool are_apart(const rapt_tensor *a, const rapt_tensor *b) {
    if (rapt_tensor_count(a) == 0 || rapt_tensor_count(b) == 0) return true;
    int64_t low_a, high_a, low_b, high_b;
    if (!byte_range(a, &low_a, &high_a) || !byte_range(b, &low_b, &high_b)) return false;
    uintptr_t first_a = (uintptr_t)a->data + (uintptr_t)low_a, first_b = (uintptr_t)b->data + (uintptr_t)low_b;
    uintptr_t end_a = (uintptr_t)a->data + (uintptr_t)high_a, end_b = (uintptr_t)b->data + (uintptr_t)high_b;
    if (end_a <= first_b || end_b <= first_a) return true;
    int64_t period = 0;
    int64_t run_a = run_bytes(a, &period), run_b = run_bytes(b, &period);
    if (period == 0) return false;
    int64_t shift = (int64_t)(first_b - first_a) % period;
    if (shift < 0) shift += period;
    return run_a <= shift && run_b <= period - shift;
}

rapt_status rapt_check_apart(rapt_context *context, const char *output_name, const rapt_tensor *output,
                             const char *other_name, const rapt_tensor *other) {
    if (output == NULL || other == NULL || are_apart(output, other)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_LAYOUT, "%s (at %p) shares memory with %s (at %p), expected memory of its own",
                     output_name, output->data, other_name, other->data);
}

/* ---- views of views ---- */

static rapt_status check_dim(rapt_context *context, const char *name, const rapt_tensor *tensor, int32_t dim) {
    if (dim >= 0 && dim < tensor->ndim) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %d, expected 0 to %d for a tensor with %d dimensions", name,
                     (int)dim, (int)tensor->ndim - 1, (int)tensor->ndim);
}

static rapt_status transpose(rapt_context *context, const rapt_tensor *tensor, int32_t dim_a, int32_t dim_b,
                             rapt_tensor *view) {
    rapt_status status = rapt_check_tensor(context, "tensor", tensor);
    if (status == RAPT_OK) status = check_dim(context, "dim_a", tensor, dim_a);
    if (status == RAPT_OK) status = check_dim(context, "dim_b", tensor, dim_b);
    if (status != RAPT_OK) return status;
    if (view == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "view is NULL");
    rapt_tensor result = *tensor;
    result.shape[dim_a] = tensor->shape[dim_b];
    result.stride[dim_a] = tensor->stride[dim_b];
    result.shape[dim_b] = tensor->shape[dim_a];
    result.stride[dim_b] = tensor->stride[dim_a];
    *view = result;
    return RAPT_OK;
}

rapt_status rapt_tensor_transpose(rapt_context *context, const rapt_tensor *tensor, int32_t dim_a, int32_t dim_b,
                                  rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, transpose(context, tensor, dim_a, dim_b, view));
}

static rapt_status slice(rapt_context *context, const rapt_tensor *tensor, int32_t dim, int64_t start, int64_t count,
                         rapt_tensor *view) {
    rapt_status status = rapt_check_tensor(context, "tensor", tensor);
    if (status == RAPT_OK) status = check_dim(context, "dim", tensor, dim);
    if (status != RAPT_OK) return status;
    if (view == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "view is NULL");
    if (start < 0 || count < 0 || start > tensor->shape[dim] || count > tensor->shape[dim] - start) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "start %lld with count %lld is outside dimension %d of size %lld", (long long)start,
                         (long long)count, (int)dim, (long long)tensor->shape[dim]);
    }
    rapt_tensor result = *tensor;
    result.shape[dim] = count;
    if (rapt_tensor_count(&result) > 0) { /* an empty view may start one past the end: leave its pointer alone */
        result.data = (char *)tensor->data + start * tensor->stride[dim] * (int64_t)rapt_dtype_size(tensor->dtype);
    }
    *view = result;
    return RAPT_OK;
}

rapt_status rapt_tensor_slice(rapt_context *context, const rapt_tensor *tensor, int32_t dim, int64_t start,
                              int64_t count, rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, slice(context, tensor, dim, start, count, view));
}

/* ---- copying ---- */

typedef struct element_run {
    char *data;
    rapt_dtype dtype;
    int64_t stride;
} element_run;

/* Elements may be unaligned, as in a file's views, so they are moved by memcpy. */
static void copy_run(element_run from, element_run to, int64_t count) {
    size_t size = rapt_dtype_size(from.dtype);
    bool same = from.dtype == to.dtype;
    if (same && from.stride == 1 && to.stride == 1) {
        memcpy(to.data, from.data, (size_t)count * size);
        return;
    }
    int64_t step = from.stride * (int64_t)size, to_step = to.stride * (int64_t)rapt_dtype_size(to.dtype);
    for (int64_t i = 0; i < count; i++) {
        const char *source = from.data + i * step;
        char *target = to.data + i * to_step;
        if (same) {
            memcpy(target, source, size);
        } else {
            uint64_t element; /* room for any */
            memcpy(&element, source, size);
            rapt_store(target, to.dtype, 0, rapt_load(&element, from.dtype, 0));
        }
    }
}

void rapt_copy_elements(const rapt_tensor *from_any, const rapt_tensor *to_any) {
    const rapt_tensor from = rapt_normalised(from_any), to = rapt_normalised(to_any);
    if (rapt_tensor_count(&from) == 0) return;
    int32_t last = from.ndim - 1; /* the dimension of a run */
    int64_t run = last < 0 ? 1 : from.shape[last], runs = rapt_tensor_count(&from) / run;
    int64_t from_size = (int64_t)rapt_dtype_size(from.dtype), to_size = (int64_t)rapt_dtype_size(to.dtype);
    int64_t index[RAPT_MAX_DIMS] = {0}, source = 0, target = 0;
    for (int64_t done = 0; done < runs; done++) {
        copy_run((element_run){(char *)from.data + source * from_size, from.dtype, last < 0 ? 1 : from.stride[last]},
                 (element_run){(char *)to.data + target * to_size, to.dtype, last < 0 ? 1 : to.stride[last]}, run);
        for (int32_t d = last - 1; d >= 0; d--) { /* the next run, as an odometer counts */
            source += from.stride[d];
            target += to.stride[d];
            if (++index[d] < from.shape[d]) break;
            index[d] = 0;
            source -= from.stride[d] * from.shape[d];
            target -= to.stride[d] * from.shape[d];
        }
    }
}

void rapt_set_to_zero(const rapt_tensor *tensor) {
    static const double zero = 0; /* of every dtype */
    rapt_tensor zeros = *tensor;
    zeros.data = (void *)(uintptr_t)&zero;
    for (int32_t d = 0; d < zeros.ndim; d++) zeros.stride[d] = 0;
    if (tensor->data != NULL) rapt_copy_elements(&zeros, tensor);
}

static rapt_status copy(rapt_context *context, const rapt_tensor *from, const rapt_tensor *to) {
    rapt_status status = rapt_check_tensor(context, "from", from);
    if (status == RAPT_OK) status = rapt_check_output(context, "to", to);
    if (status == RAPT_OK) status = rapt_check_apart(context, "to", to, "from", from);
    if (status != RAPT_OK) return status;
    bool same_shape = from->ndim == to->ndim;
    for (int32_t d = 0; same_shape && d < from->ndim; d++) same_shape = from->shape[d] == to->shape[d];
    if (!same_shape) {
        char a[RAPT_SHAPE_TEXT], b[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE, "to has shape %s, expected from's shape %s", rapt_shape_text(to, a),
                         rapt_shape_text(from, b));
    }
    if ((from->dtype == RAPT_BOOL) != (to->dtype == RAPT_BOOL)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "to is %s and from is %s: bool converts only to bool",
                         rapt_dtype_name(to->dtype), rapt_dtype_name(from->dtype));
    }
    rapt_copy_elements(from, to);
    return RAPT_OK;
}

rapt_status rapt_tensor_copy(rapt_context *context, const rapt_tensor *from, const rapt_tensor *to) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, copy(context, from, to));
}
