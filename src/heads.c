/* heads.c - split, merge and repeat heads: views where strides allow it, copies where not; and repeat's gradient */
#include "internal.h"

/* Both layouts of heads, [N,H,L,D] and [H,L,D], end in the same three dimensions; this is where they start. */
static rapt_status check_heads(rapt_context *context, const rapt_tensor *heads, int32_t *first) {
    rapt_status status = rapt_check_tensor(context, "heads", heads);
    if (status != RAPT_OK) return status;
    if (heads->ndim != 3 && heads->ndim != 4) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE, "heads has shape %s, expected [N,H,L,D] or [H,L,D]",
                         rapt_shape_text(heads, text));
    }
    *first = heads->ndim - 3;
    return RAPT_OK;
}

/* What a buffer to copy into must be like: `shape_of` has the result's shape. */
static rapt_status check_buffer(rapt_context *context, const char *what, const rapt_tensor *heads,
                                const rapt_tensor *shape_of, const rapt_tensor *buffer) {
    char wanted[RAPT_SHAPE_TEXT], given[RAPT_SHAPE_TEXT];
    if (buffer == NULL) {
        return rapt_fail(context, RAPT_ERROR_LAYOUT,
                         "the strides of heads do not allow %s as a view: pass a buffer of shape %s", what,
                         rapt_shape_text(shape_of, wanted));
    }
    rapt_status status = rapt_check_output(context, "buffer", buffer);
    if (status == RAPT_OK) status = rapt_check_apart(context, "buffer", buffer, "heads", heads);
    if (status != RAPT_OK) return status;
    bool fits = buffer->ndim == shape_of->ndim;
    for (int32_t d = 0; fits && d < buffer->ndim; d++) fits = buffer->shape[d] == shape_of->shape[d];
    if (!fits) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "buffer has shape %s, expected %s", rapt_shape_text(buffer, given),
                         rapt_shape_text(shape_of, wanted));
    }
    if (buffer->dtype != heads->dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "buffer is %s, expected %s as heads",
                         rapt_dtype_name(buffer->dtype), rapt_dtype_name(heads->dtype));
    }
    return RAPT_OK;
}

/* [.., L, H*D] as [.., H, L, D]; the last dimension is known to divide. */
static rapt_tensor split_view(const rapt_tensor *whole, int64_t num_heads) {
    const rapt_tensor normalised = rapt_normalised(whole), *tensor = &normalised;
    rapt_tensor heads = *tensor;
    int32_t length = tensor->ndim - 2, last = tensor->ndim - 1;
    int64_t dim = tensor->shape[last] / num_heads;
    heads.ndim = tensor->ndim + 1;
    heads.shape[length] = num_heads;
    heads.stride[length] = dim * tensor->stride[last];
    heads.shape[length + 1] = tensor->shape[length];
    heads.stride[length + 1] = tensor->stride[length];
    heads.shape[length + 2] = dim;
    heads.stride[length + 2] = tensor->stride[last];
    return heads;
}

static rapt_status split(rapt_context *context, const rapt_tensor *tensor, int64_t num_heads, rapt_tensor *heads) {
    rapt_status status = rapt_check_tensor(context, "tensor", tensor);
    if (status != RAPT_OK) return status;
    if (heads == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "heads is NULL");
    char text[RAPT_SHAPE_TEXT];
    if (tensor->ndim != 2 && tensor->ndim != 3) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor has shape %s, expected [N,L,H*D] or [L,H*D]",
                         rapt_shape_text(tensor, text));
    }
    int64_t width = tensor->shape[tensor->ndim - 1];
    if (num_heads < 1 || width % num_heads != 0) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "num_heads %lld does not divide the last size %lld of tensor",
                         (long long)num_heads, (long long)width);
    }
    *heads = split_view(tensor, num_heads);
    return RAPT_OK;
}

rapt_status rapt_split_heads(rapt_context *context, const rapt_tensor *tensor, int64_t num_heads, rapt_tensor *heads) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, split(context, tensor, num_heads, heads));
}

static rapt_status merge(rapt_context *context, const rapt_tensor *given, const rapt_tensor *buffer,
                         rapt_tensor *merged) {
    int32_t first = 0;
    rapt_status status = check_heads(context, given, &first);
    if (status != RAPT_OK) return status;
    const rapt_tensor normalised = rapt_normalised(given), *heads = &normalised;
    if (merged == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "merged is NULL");
    int64_t num_heads = heads->shape[first], dim = heads->shape[first + 2];
    rapt_tensor result = *heads; /* [.., L, H*D] */
    result.ndim = heads->ndim - 1;
    result.shape[first] = heads->shape[first + 1];
    result.stride[first] = heads->stride[first + 1];
    if (__builtin_mul_overflow(num_heads, dim, &result.shape[first + 1])) {
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "heads has %lld heads of %lld, too many to merge",
                         (long long)num_heads, (long long)dim);
    }
    /* Heads that lie one behind the other are one long row. With one of either, the other's stride is all that counts. */
    bool is_view = num_heads <= 1 || dim <= 1 || heads->stride[first] == dim * heads->stride[first + 2];
    if (is_view || rapt_tensor_count(heads) == 0) {
        result.stride[first + 1] = dim == 1 ? heads->stride[first] : heads->stride[first + 2];
        *merged = result;
        return RAPT_OK;
    }
    status = check_buffer(context, "merging", heads, &result, buffer);
    if (status != RAPT_OK) return status;
    rapt_tensor target = split_view(buffer, num_heads);
    rapt_copy_elements(heads, &target);
    *merged = *buffer;
    return RAPT_OK;
}

rapt_status rapt_merge_heads(rapt_context *context, const rapt_tensor *heads, const rapt_tensor *buffer,
                             rapt_tensor *merged) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, merge(context, heads, buffer, merged));
}

/* Heads [.., Hk, S, D] seen as [.., Hk, times, S, D]: the source with stride 0 in the new dimension, or the buffer
 * with its heads cut into groups. */
static rapt_tensor grouped_view(const rapt_tensor *tensor, int32_t first, int64_t groups, int64_t times,
                                int64_t group_stride, int64_t member_stride) {
    rapt_tensor view = *tensor;
    view.ndim = tensor->ndim + 1;
    view.shape[first] = groups;
    view.stride[first] = group_stride;
    view.shape[first + 1] = times;
    view.stride[first + 1] = member_stride;
    for (int32_t d = first + 1; d < tensor->ndim; d++) {
        view.shape[d + 1] = tensor->shape[d];
        view.stride[d + 1] = tensor->stride[d];
    }
    return view;
}

static rapt_status repeat(rapt_context *context, const rapt_tensor *heads, int64_t times, const rapt_tensor *buffer,
                          rapt_tensor *repeated) {
    int32_t first = 0;
    rapt_status status = check_heads(context, heads, &first);
    if (status != RAPT_OK) return status;
    if (repeated == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "repeated is NULL");
    if (times < 1)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "times is %lld, expected at least 1", (long long)times);
    int64_t kv_heads = heads->shape[first];
    rapt_tensor result = *heads;
    if (__builtin_mul_overflow(kv_heads, times, &result.shape[first]) || rapt_tensor_count(&result) < 0) {
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "%lld heads repeated %lld times are too many",
                         (long long)kv_heads, (long long)times);
    }
    if (kv_heads <= 1 || times == 1 || rapt_tensor_count(heads) == 0) {
        if (times > 1) result.stride[first] = 0;
        *repeated = result;
        return RAPT_OK;
    }
    status = check_buffer(context, "repeating", heads, &result, buffer);
    if (status != RAPT_OK) return status;
    rapt_tensor from = grouped_view(heads, first, kv_heads, times, heads->stride[first], 0);
    rapt_tensor to = grouped_view(buffer, first, kv_heads, times, buffer->stride[first] * times, buffer->stride[first]);
    rapt_copy_elements(&from, &to);
    *repeated = *buffer;
    return RAPT_OK;
}

rapt_status rapt_repeat_kv_heads(rapt_context *context, const rapt_tensor *heads, int64_t times,
                                 const rapt_tensor *buffer, rapt_tensor *repeated) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, repeat(context, heads, times, buffer, repeated));
}

/* ---- the gradient of repeat ---- */

static rapt_status check_repeated(rapt_context *context, const rapt_tensor *d_repeated, int64_t times,
                                  const rapt_tensor *d_heads) {
    char given[RAPT_SHAPE_TEXT], other[RAPT_SHAPE_TEXT];
    rapt_status status = rapt_check_tensor(context, "d_repeated", d_repeated);
    if (status == RAPT_OK) status = rapt_check_output(context, "d_heads", d_heads);
    if (status != RAPT_OK) return status;
    if (!rapt_is_float(d_repeated->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "d_repeated is %s, expected f32, f64, bf16 or f16",
                         rapt_dtype_name(d_repeated->dtype));
    }
    if (d_heads->dtype != d_repeated->dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "d_heads is %s, expected %s as d_repeated",
                         rapt_dtype_name(d_heads->dtype), rapt_dtype_name(d_repeated->dtype));
    }
    if (times < 1)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "times is %lld, expected at least 1", (long long)times);
    int32_t rank = d_repeated->ndim, first = rank - 3;
    if (rank != 3 && rank != 4) {
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "d_repeated has shape %s, expected [N,Hk*times,S,D] or [Hk*times,S,D]",
                         rapt_shape_text(d_repeated, given));
    }
    if (d_repeated->shape[first] % times != 0) {
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "d_repeated has shape %s with %lld heads, expected a multiple of times %lld",
                         rapt_shape_text(d_repeated, given), (long long)d_repeated->shape[first], (long long)times);
    }
    rapt_tensor wanted = *d_repeated;
    wanted.shape[first] /= times;
    bool fits = d_heads->ndim == rank;
    for (int32_t d = 0; fits && d < rank; d++) fits = d_heads->shape[d] == wanted.shape[d];
    if (!fits) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "d_heads has shape %s, expected %s",
                         rapt_shape_text(d_heads, given), rapt_shape_text(&wanted, other));
    }
    return rapt_check_apart(context, "d_heads", d_heads, "d_repeated", d_repeated);
}

/* [N,Hk,S,D], or [1,Hk,S,D] of a tensor without N. */
static rapt_tensor with_batch(const rapt_tensor *tensor) {
    rapt_tensor result = rapt_normalised(tensor);
    if (tensor->ndim == 4) return result;
    result.ndim = 4;
    for (int32_t d = 3; d > 0; d--) {
        result.shape[d] = result.shape[d - 1];
        result.stride[d] = result.stride[d - 1];
    }
    result.shape[0] = 1;
    result.stride[0] = 0;
    return result;
}

/* The copies of one element, `stride` apart, added in order and rounded each time as the dtype sums. */
static double sum_copies(const rapt_tensor *tensor, int64_t at, int64_t stride, int64_t times) {
    double sum = 0;
    for (int64_t t = 0; t < times; t++) {
        sum += rapt_load(tensor->data, tensor->dtype, at + t * stride);
        if (tensor->dtype != RAPT_F64)
            sum = (double)(float)sum; /* a sum of two floats, so this is f32's own rounding */
    }
    return sum;
}

static rapt_status repeat_backward(rapt_context *context, const rapt_tensor *d_repeated, int64_t times, bool accumulate,
                                   const rapt_tensor *d_heads) {
    rapt_status status = check_repeated(context, d_repeated, times, d_heads);
    if (status != RAPT_OK || rapt_tensor_count(d_heads) == 0) return status;
    const rapt_tensor from = with_batch(d_repeated), to = with_batch(d_heads);
    const int64_t *a = from.stride, *b = to.stride;
    for (int64_t n = 0; n < to.shape[0]; n++) {
        for (int64_t h = 0; h < to.shape[1]; h++) {
            for (int64_t j = 0; j < to.shape[2]; j++) {
                for (int64_t d = 0; d < to.shape[3]; d++) {
                    int64_t at = n * b[0] + h * b[1] + j * b[2] + d * b[3];
                    double sum = sum_copies(&from, n * a[0] + h * times * a[1] + j * a[2] + d * a[3], a[1], times);
                    rapt_store(to.data, to.dtype, at, (accumulate ? rapt_load(to.data, to.dtype, at) : 0) + sum);
                }
            }
        }
    }
    return RAPT_OK;
}

rapt_status rapt_repeat_kv_heads_backward(rapt_context *context, const rapt_tensor *d_repeated, int64_t times,
                                          bool accumulate, const rapt_tensor *d_heads) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, repeat_backward(context, d_repeated, times, accumulate, d_heads));
}
