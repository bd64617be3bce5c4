/* mha_config.c - settings of a layer: given, or implied by ready weights; checked and completed */
#include "mha.h"

#include <math.h>

typedef long long ll; /* for printf */

static rapt_status check_size(rapt_context *context, const char *name, int64_t size, bool may_default) {
    if (size >= 1 || (may_default && size == RAPT_DEFAULT)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %lld, expected at least 1%s", name, (ll)size,
                     may_default ? ", or RAPT_DEFAULT" : "");
}

/* Heads against each other; all are set. */
static rapt_status check_heads(rapt_context *context, int64_t heads, int64_t kv_heads) {
    if (kv_heads > heads) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "num_kv_heads %lld is above num_heads %lld", (ll)kv_heads,
                         (ll)heads);
    }
    if (heads % kv_heads != 0) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "num_kv_heads %lld does not divide num_heads %lld", (ll)kv_heads,
                         (ll)heads);
    }
    return RAPT_OK;
}

/* The numbers that a config and ready weights have in common. The derived scale, as rapt_mha_settings gives it, needs no
 * set_scale. */
static rapt_status check_numbers(rapt_context *context, int64_t head_dim, bool set_scale, double scale,
                                 double dropout) {
    if (!set_scale && scale != 0 && scale != 1 / sqrt((double)head_dim)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "scale is %g, but set_scale is false", scale);
    }
    if (set_scale && !isfinite(scale)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "scale is %g, expected a finite number", scale);
    }
    return rapt_check_dropout(context, "dropout", dropout);
}

/* Whether all matrices of the layer, packed and in double precision, have sizes that can be counted. */
static rapt_status check_overflow(rapt_context *context, const rapt_mha_config *c) {
    int64_t rows, widest = c->embed_dim, bytes;
    if (c->kdim > widest) widest = c->kdim;
    if (c->vdim > widest) widest = c->vdim;
    bool overflow = __builtin_mul_overflow(c->num_kv_heads, (int64_t)2, &rows);
    overflow |= __builtin_add_overflow(rows, c->num_heads, &rows);
    overflow |= __builtin_mul_overflow(rows, c->head_dim, &rows);
    overflow |= __builtin_add_overflow(rows, (int64_t)64, &rows);
    overflow |= __builtin_mul_overflow(rows, widest, &bytes) || __builtin_mul_overflow(bytes, (int64_t)64, &bytes);
    if (!overflow) return RAPT_OK;
    return rapt_fail(
        context, RAPT_ERROR_OVERFLOW,
        "the layer is too large: embed_dim %lld, kdim %lld, vdim %lld, (num_heads %lld + 2 * num_kv_heads %lld) * "
        "head_dim %lld",
        (ll)c->embed_dim, (ll)c->kdim, (ll)c->vdim, (ll)c->num_heads, (ll)c->num_kv_heads, (ll)c->head_dim);
}

rapt_status rapt_mha_settle_config(rapt_context *context, const rapt_mha_config *given, rapt_mha_config *config) {
    if (given == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "config is NULL");
    rapt_status status =
        rapt_check_struct_size(context, "config", "rapt_mha_config_default", given, given->struct_size, sizeof *given);
    if (status != RAPT_OK) return status;
    rapt_mha_config c = *given;
    c.struct_size = sizeof c;
    status = check_size(context, "embed_dim", c.embed_dim, false);
    if (status == RAPT_OK) status = check_size(context, "num_heads", c.num_heads, false);
    if (status == RAPT_OK) status = check_size(context, "num_kv_heads", c.num_kv_heads, true);
    if (status == RAPT_OK) status = check_size(context, "head_dim", c.head_dim, true);
    if (status == RAPT_OK) status = check_size(context, "kdim", c.kdim, true);
    if (status == RAPT_OK) status = check_size(context, "vdim", c.vdim, true);
    if (status != RAPT_OK) return status;
    if (c.num_kv_heads == RAPT_DEFAULT) c.num_kv_heads = c.num_heads;
    if (c.kdim == RAPT_DEFAULT) c.kdim = c.embed_dim;
    if (c.vdim == RAPT_DEFAULT) c.vdim = c.embed_dim;
    status = check_heads(context, c.num_heads, c.num_kv_heads);
    if (status != RAPT_OK) return status;
    if (c.head_dim == RAPT_DEFAULT) {
        if (c.embed_dim % c.num_heads != 0) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "num_heads %lld does not divide embed_dim %lld (pass head_dim to set it apart)",
                             (ll)c.num_heads, (ll)c.embed_dim);
        }
        c.head_dim = c.embed_dim / c.num_heads;
    }
    status = check_overflow(context, &c);
    if (status == RAPT_OK) status = check_numbers(context, c.head_dim, c.set_scale, c.scale, c.dropout);
    if (status != RAPT_OK) return status;
    if (!c.set_scale) c.scale = 1 / sqrt((double)c.head_dim);
    if (!rapt_is_float(c.dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "dtype is %s (%d), expected f32, f64, bf16 or f16",
                         rapt_dtype_name(c.dtype), (int)c.dtype);
    }
    if (c.device != RAPT_DEVICE_CPU) {
        return rapt_fail(context, RAPT_ERROR_DEVICE, "device %s (%d) has no backend in this build",
                         rapt_device_name(c.device), (int)c.device);
    }
    if (c.init != RAPT_INIT_PYTORCH && c.init != RAPT_INIT_XAVIER) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "init is %d, which is no rapt_init", (int)c.init);
    }
    *config = c;
    return RAPT_OK;
}

/* ---- extra keys ---- */

int64_t rapt_mha_extra_keys(const rapt_mha_config *c) { return (c->add_bias_kv ? 1 : 0) + (c->add_zero_attn ? 1 : 0); }

size_t rapt_mha_extra_bytes(const rapt_mha_config *c) {
    return (size_t)(c->num_kv_heads * c->head_dim * rapt_mha_extra_keys(c)) * rapt_dtype_size(c->dtype);
}

void rapt_mha_fill_extra(const rapt_mha_config *c, const rapt_tensor *bias, void *extra) {
    memset(extra, 0, rapt_mha_extra_bytes(c));
    if (bias->data == NULL) return;
    int64_t dim = c->head_dim, head_stride = dim * rapt_mha_extra_keys(c);
    for (int64_t i = 0; i < bias->shape[0]; i++) {
        double value = rapt_load(bias->data, c->dtype, i * bias->stride[0]);
        rapt_store(extra, c->dtype, i / dim * head_stride + i % dim, value);
    }
}

/* ---- ready weights ---- */

rapt_tensor rapt_rows_of(const rapt_tensor *tensor, int64_t first, int64_t count) {
    rapt_tensor rows = *tensor;
    rows.shape[0] = count;
    rows.data = (char *)tensor->data + first * tensor->stride[0] * (int64_t)rapt_dtype_size(tensor->dtype);
    return rows;
}

static rapt_status check_weight(rapt_context *context, const char *name, const rapt_tensor *tensor, rapt_dtype dtype,
                                int32_t rank, const char *words) {
    rapt_status status = rapt_check_tensor(context, name, tensor);
    if (status == RAPT_OK) status = rapt_check_rank(context, name, tensor, rank, words);
    if (status != RAPT_OK) return status;
    if (!rapt_is_float(tensor->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected f32, f64, bf16 or f16", name,
                         rapt_dtype_name(tensor->dtype));
    }
    if (tensor->dtype != dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as the first weight", name,
                         rapt_dtype_name(tensor->dtype), rapt_dtype_name(dtype));
    }
    for (int32_t d = 0; d < rank; d++) {
        char text[RAPT_SHAPE_TEXT];
        if (tensor->shape[d] < 1) {
            return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected sizes of at least 1", name,
                             rapt_shape_text(tensor, text));
        }
    }
    return RAPT_OK;
}

/* A vector of the given length; leading sizes of 1 (PyTorch's [1,1,E]) are dropped. */
static rapt_status take_vector(rapt_context *context, const char *name, const rapt_tensor *tensor, rapt_dtype dtype,
                               int64_t length, rapt_tensor *vector) {
    if (tensor == NULL) return RAPT_OK;
    rapt_status status = rapt_check_tensor(context, name, tensor);
    if (status != RAPT_OK) return status;
    int32_t last = tensor->ndim - 1;
    bool fits = last >= 0 && tensor->shape[last] == length && rapt_tensor_count(tensor) == length;
    if (!fits) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected [%lld]", name,
                         rapt_shape_text(tensor, text), (ll)length);
    }
    if (tensor->dtype != dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as the weights", name,
                         rapt_dtype_name(tensor->dtype), rapt_dtype_name(dtype));
    }
    *vector = rapt_tensor_strided(tensor->data, dtype, 1, &length, &tensor->stride[last]);
    return RAPT_OK;
}

/* Rows of a matrix must be whole heads. */
static rapt_status divide_rows(rapt_context *context, const char *name, int64_t rows, int64_t parts,
                               const char *parts_words, int64_t *quotient) {
    if (rows % parts != 0) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has %lld rows, which %s %lld does not divide", name, (ll)rows,
                         parts_words, (ll)parts);
    }
    *quotient = rows / parts;
    return RAPT_OK;
}

static rapt_status check_derived(rapt_context *context, const char *name, int64_t given, int64_t derived,
                                 const char *source) {
    if (given == RAPT_DEFAULT || given == derived) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_SHAPE, "%s is %lld, but the rows of %s give %lld", name, (ll)given, source,
                     (ll)derived);
}

static rapt_status take_fused(rapt_context *context, const rapt_mha_weights *w, rapt_mha_config *c, mha_parts *parts) {
    const rapt_tensor *fused = w->in_proj_weight;
    if (w->q_proj_weight != NULL || w->k_proj_weight != NULL || w->v_proj_weight != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "in_proj_weight and separate projection weights are given: expected one or the other");
    }
    rapt_status status = check_weight(context, "in_proj_weight", fused, fused->dtype, 2, "[(H+2Hk)*D, E]");
    if (status != RAPT_OK) return status;
    c->dtype = fused->dtype;
    c->num_kv_heads = w->num_kv_heads == RAPT_DEFAULT ? c->num_heads : w->num_kv_heads;
    int64_t heads;
    if (__builtin_mul_overflow(c->num_kv_heads, (int64_t)2, &heads) ||
        __builtin_add_overflow(heads, c->num_heads, &heads)) {
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "num_heads %lld and num_kv_heads %lld are too large",
                         (ll)c->num_heads, (ll)c->num_kv_heads);
    }
    status =
        divide_rows(context, "in_proj_weight", fused->shape[0], heads, "num_heads + 2 * num_kv_heads =", &c->head_dim);
    if (status == RAPT_OK) status = check_derived(context, "head_dim", w->head_dim, c->head_dim, "in_proj_weight");
    if (status == RAPT_OK) status = check_heads(context, c->num_heads, c->num_kv_heads);
    if (status != RAPT_OK) return status;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    parts->q.weight = rapt_rows_of(fused, 0, q_rows);
    parts->k.weight = rapt_rows_of(fused, q_rows, kv_rows);
    parts->v.weight = rapt_rows_of(fused, q_rows + kv_rows, kv_rows);
    return RAPT_OK;
}

static rapt_status take_separate(rapt_context *context, const rapt_mha_weights *w, rapt_mha_config *c,
                                 mha_parts *parts) {
    rapt_status status = rapt_check_tensor(context, "q_proj_weight", w->q_proj_weight);
    if (status != RAPT_OK) return status;
    c->dtype = w->q_proj_weight->dtype;
    status = check_weight(context, "q_proj_weight", w->q_proj_weight, c->dtype, 2, "[H*D, E]");
    if (status == RAPT_OK)
        status = check_weight(context, "k_proj_weight", w->k_proj_weight, c->dtype, 2, "[Hk*D, kdim]");
    if (status == RAPT_OK)
        status = check_weight(context, "v_proj_weight", w->v_proj_weight, c->dtype, 2, "[Hk*D, vdim]");
    if (status == RAPT_OK)
        status =
            divide_rows(context, "q_proj_weight", w->q_proj_weight->shape[0], c->num_heads, "num_heads", &c->head_dim);
    if (status == RAPT_OK) status = check_derived(context, "head_dim", w->head_dim, c->head_dim, "q_proj_weight");
    if (status == RAPT_OK)
        status = divide_rows(context, "k_proj_weight", w->k_proj_weight->shape[0], c->head_dim, "head_dim",
                             &c->num_kv_heads);
    if (status == RAPT_OK)
        status = check_derived(context, "num_kv_heads", w->num_kv_heads, c->num_kv_heads, "k_proj_weight");
    if (status == RAPT_OK) status = check_heads(context, c->num_heads, c->num_kv_heads);
    if (status != RAPT_OK) return status;
    if (w->v_proj_weight->shape[0] != w->k_proj_weight->shape[0]) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "v_proj_weight has %lld rows, expected %lld as k_proj_weight",
                         (ll)w->v_proj_weight->shape[0], (ll)w->k_proj_weight->shape[0]);
    }
    parts->q.weight = *w->q_proj_weight;
    parts->k.weight = *w->k_proj_weight;
    parts->v.weight = *w->v_proj_weight;
    return RAPT_OK;
}

static rapt_status take_biases(rapt_context *context, const rapt_mha_weights *w, const rapt_mha_config *c,
                               mha_parts *parts) {
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    rapt_tensor fused = {0};
    if (w->in_proj_bias != NULL && (w->q_proj_bias != NULL || w->k_proj_bias != NULL || w->v_proj_bias != NULL)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "in_proj_bias and separate projection biases are given: expected one or the other");
    }
    rapt_status status = take_vector(context, "in_proj_bias", w->in_proj_bias, c->dtype, q_rows + 2 * kv_rows, &fused);
    if (status == RAPT_OK)
        status = take_vector(context, "q_proj_bias", w->q_proj_bias, c->dtype, q_rows, &parts->q.bias);
    if (status == RAPT_OK)
        status = take_vector(context, "k_proj_bias", w->k_proj_bias, c->dtype, kv_rows, &parts->k.bias);
    if (status == RAPT_OK)
        status = take_vector(context, "v_proj_bias", w->v_proj_bias, c->dtype, kv_rows, &parts->v.bias);
    if (status == RAPT_OK)
        status = take_vector(context, "out_proj_bias", w->out_proj_bias, c->dtype, c->embed_dim, &parts->out.bias);
    if (status != RAPT_OK) return status;
    if (fused.data != NULL) {
        parts->q.bias = rapt_rows_of(&fused, 0, q_rows);
        parts->k.bias = rapt_rows_of(&fused, q_rows, kv_rows);
        parts->v.bias = rapt_rows_of(&fused, q_rows + kv_rows, kv_rows);
    }
    if ((w->bias_k == NULL) != (w->bias_v == NULL)) {
        return rapt_fail(context, RAPT_ERROR_NULL, "%s is given without %s: expected both or none",
                         w->bias_k != NULL ? "bias_k" : "bias_v", w->bias_k != NULL ? "bias_v" : "bias_k");
    }
    status = take_vector(context, "bias_k", w->bias_k, c->dtype, kv_rows, &parts->bias_k);
    if (status == RAPT_OK) status = take_vector(context, "bias_v", w->bias_v, c->dtype, kv_rows, &parts->bias_v);
    return status;
}

rapt_status rapt_mha_take_weights(rapt_context *context, const rapt_mha_weights *w, rapt_mha_config *config,
                                  mha_parts *result) {
    if (w == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "weights is NULL");
    rapt_status status =
        rapt_check_struct_size(context, "weights", "rapt_mha_weights_default", w, w->struct_size, sizeof *w);
    if (status == RAPT_OK) status = check_size(context, "num_heads", w->num_heads, false);
    if (status == RAPT_OK) status = check_size(context, "num_kv_heads", w->num_kv_heads, true);
    if (status == RAPT_OK) status = check_size(context, "head_dim", w->head_dim, true);
    if (status != RAPT_OK) return status;

    rapt_mha_config c = rapt_mha_config_default(0, w->num_heads);
    mha_parts parts = {0};
    status = w->in_proj_weight != NULL ? take_fused(context, w, &c, &parts) : take_separate(context, w, &c, &parts);
    if (status != RAPT_OK) return status;
    c.embed_dim = parts.q.weight.shape[1];
    c.kdim = parts.k.weight.shape[1];
    c.vdim = parts.v.weight.shape[1];
    status = check_overflow(context, &c);
    if (status == RAPT_OK) status = check_numbers(context, c.head_dim, w->set_scale, w->scale, w->dropout);
    if (status == RAPT_OK)
        status = check_weight(context, "out_proj_weight", w->out_proj_weight, c.dtype, 2, "[E, H*D]");
    if (status != RAPT_OK) return status;
    int64_t width = c.num_heads * c.head_dim;
    if (w->out_proj_weight->shape[0] != c.embed_dim || w->out_proj_weight->shape[1] != width) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE, "out_proj_weight has shape %s, expected [E, H*D] = [%lld, %lld]",
                         rapt_shape_text(w->out_proj_weight, text), (ll)c.embed_dim, (ll)width);
    }
    parts.out.weight = *w->out_proj_weight;
    status = take_biases(context, w, &c, &parts);
    if (status != RAPT_OK) return status;

    c.bias = parts.q.bias.data != NULL || parts.k.bias.data != NULL || parts.v.bias.data != NULL ||
             parts.out.bias.data != NULL;
    c.add_bias_kv = parts.bias_k.data != NULL;
    c.add_zero_attn = w->add_zero_attn;
    c.batch_first = w->batch_first;
    c.causal = w->causal;
    c.set_scale = w->set_scale;
    c.scale = w->set_scale ? w->scale : 1 / sqrt((double)c.head_dim);
    c.dropout = w->dropout;
    *config = c;
    *result = parts;
    return RAPT_OK;
}
