/* attn_backward.c - gradients of scaled dot-product attention: the public entry, and the checks that the layer's shares */
#include "internal.h"

rapt_status rapt_check_backward(rapt_context *context) {
    if (context->backend->attn_backward != NULL && context->backend->linear_backward != NULL) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_UNSUPPORTED, "this backend has no backward in Rapt %s: %s has one",
                     rapt_version(), "RAPT_BACKEND_REFERENCE");
}

/* ---- gradients of masks ---- */

static bool same_shape(const rapt_tensor *a, const rapt_tensor *b) {
    bool same = a->ndim == b->ndim;
    for (int32_t d = 0; same && d < a->ndim; d++) same = a->shape[d] == b->shape[d];
    return same;
}

rapt_status rapt_take_mask_gradient(rapt_context *context, bool is_padding, const rapt_tensor *tensor,
                                    const rapt_tensor *mask, const attn_problem *p, mask_gradient *gradient) {
    const char *mask_name = is_padding ? "key_padding_mask" : "attn_mask";
    const char *name = is_padding ? "gradients.key_padding_mask" : "gradients.attn_mask";
    if (tensor == NULL) return RAPT_OK;
    rapt_status status = rapt_check_output(context, name, tensor);
    if (status != RAPT_OK) return status;
    if (mask == NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is given, but options.%s is NULL", name, mask_name);
    }
    if (mask->dtype == RAPT_BOOL) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is given, but %s is bool: only an additive mask has a gradient",
                         name, mask_name);
    }
    if (tensor->dtype != RAPT_F32 && tensor->dtype != RAPT_F64 && tensor->dtype != mask->dtype) {
        bool is_wide = mask->dtype == RAPT_F32 || mask->dtype == RAPT_F64;
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected f32%s%s", name, rapt_dtype_name(tensor->dtype),
                         is_wide ? " or f64" : ", f64 or ", is_wide ? "" : rapt_dtype_name(mask->dtype));
    }
    if (!same_shape(tensor, mask)) {
        char given[RAPT_SHAPE_TEXT], expected[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s as %s", name,
                         rapt_shape_text(tensor, given), rapt_shape_text(mask, expected), mask_name);
    }
    if (rapt_tensor_count(tensor) == 0) return RAPT_OK;
    mask_gradient result = {.data = tensor->data, .dtype = tensor->dtype, .size = {1, 1, 1}};
    if (is_padding) { /* [S] or [N,S] */
        rapt_tensor normalised = rapt_normalised(tensor);
        if (tensor->ndim == 2) {
            result.size[0] = p->batch;
            result.stride[0] = normalised.stride[0];
        }
        result.stride[3] = normalised.stride[tensor->ndim - 1];
    } else {
        rapt_fit_attn_mask(tensor, p, result.stride, result.size); /* as the mask does, whose shape it has */
    }
    *gradient = result;
    return RAPT_OK;
}

/* ---- the operator ---- */

/* Which keys are seen and how, as in the forward; lse and weights are not results here. */
static rapt_status take_options(rapt_context *context, const rapt_options *options, bool has_d_weights,
                                attn_problem *p) {
    if (options->cache != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.cache is given: a cache has no gradients, expected key and value alone");
    }
    if (options->per_head_weights && options->weights == NULL && !has_d_weights) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.per_head_weights is true, but weights and d_weights are NULL");
    }
    rapt_options seen = *options;
    seen.weights = seen.lse = NULL;
    seen.per_head_weights = false;
    rapt_status status = rapt_attn_options(context, &seen, true, p);
    if (status == RAPT_OK) status = rapt_check_operator_options(context, options);
    if (status != RAPT_OK) return status;
    if (options->dropout > 0 && !options->set_dropout_seed) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.dropout is %g, but set_dropout_seed is false: the backward draws with the seed and "
                         "offset that the forward had",
                         options->dropout);
    }
    p->average_weights = !options->per_head_weights;
    return rapt_take_dropout(context, options, options->dropout, p);
}

static rapt_status take_inputs(rapt_context *context, const rapt_options *options, const rapt_tensor *d_out,
                               const rapt_tensor *d_weights, attn_problem *p, attn_gradients *g) {
    int64_t out_shape[4] = {p->batch, p->heads, p->queries, p->value_dim};
    if (options->lse == NULL) {
        return rapt_fail(context, RAPT_ERROR_NULL, "options.lse is NULL: the backward reads the forward's");
    }
    rapt_status status = rapt_check_tensor(context, "lse", options->lse);
    if (status == RAPT_OK) status = rapt_take_lse(context, options->lse, true, p);
    if (status == RAPT_OK) status = rapt_check_tensor(context, "d_out", d_out);
    if (status == RAPT_OK) status = rapt_take_view(context, "d_out", d_out, p->dtype, true, 4, out_shape, &g->out);
    if (status != RAPT_OK || d_weights == NULL) return status;
    status = rapt_check_tensor(context, "d_weights", d_weights);
    if (status == RAPT_OK) status = rapt_take_weights(context, "d_weights", d_weights, true, p, &g->weights);
    return status;
}

static rapt_status take_gradient(rapt_context *context, const char *name, const rapt_tensor *tensor, rapt_dtype dtype,
                                 const int64_t *shape, rapt_view *view) {
    if (tensor == NULL) return RAPT_OK;
    rapt_status status = rapt_check_output(context, name, tensor);
    if (status == RAPT_OK) status = rapt_take_view(context, name, tensor, dtype, true, 4, shape, view);
    return status;
}

static rapt_status take_gradients(rapt_context *context, const rapt_options *options,
                                  const rapt_attention_gradients *gradients, const attn_problem *p, attn_gradients *g) {
    int64_t q_shape[4] = {p->batch, p->heads, p->queries, p->dim},
            k_shape[4] = {p->batch, p->kv_heads, p->keys, p->dim};
    int64_t v_shape[4] = {p->batch, p->kv_heads, p->keys, p->value_dim};
    g->accumulate = gradients->accumulate;
    g->out_dtype = g->q_dtype = g->k_dtype = g->v_dtype = p->dtype;
    rapt_status status = take_gradient(context, "gradients.query", gradients->query, p->dtype, q_shape, &g->q);
    if (status == RAPT_OK) status = take_gradient(context, "gradients.key", gradients->key, p->dtype, k_shape, &g->k);
    if (status == RAPT_OK)
        status = take_gradient(context, "gradients.value", gradients->value, p->dtype, v_shape, &g->v);
    if (status == RAPT_OK)
        status = rapt_take_mask_gradient(context, false, gradients->attn_mask, options->attn_mask, p, &g->mask);
    if (status == RAPT_OK)
        status = rapt_take_mask_gradient(context, true, gradients->key_padding_mask, options->key_padding_mask, p,
                                         &g->padding);
    return status;
}

static rapt_status backward(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                            const rapt_tensor *value, const rapt_options *options, const rapt_tensor *out,
                            const rapt_tensor *d_out, const rapt_tensor *d_weights,
                            const rapt_attention_gradients *gradients) {
    if (options == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "options is NULL, expected the forward's with lse");
    if (gradients == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "gradients is NULL");
    if (key == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "key is NULL");
    if (value == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "value is NULL");
    for (int i = 0; i < (int)(sizeof gradients->reserved / sizeof *gradients->reserved); i++) {
        if (gradients->reserved[i] != 0) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "gradients.reserved[%d] is not 0: set gradients to zero before use", i);
        }
    }
    attn_problem p;
    attn_gradients g = {0};
    rapt_status status = rapt_attn_tensors(context, query, key, value, NULL, out, &p);
    if (status == RAPT_OK) status = take_options(context, options, d_weights != NULL, &p);
    if (status == RAPT_OK) status = take_inputs(context, options, d_out, d_weights, &p, &g);
    if (status == RAPT_OK) status = take_gradients(context, options, gradients, &p, &g);
    if (status != RAPT_OK) return status;

    const rapt_named_tensor inputs[] = {{"query", query},     {"key", key},     {"value", value},
                                        {"out", out},         {"d_out", d_out}, {"d_weights", d_weights},
                                        {"lse", options->lse}};
    const rapt_named_tensor results[] = {{"gradients.query", gradients->query},
                                         {"gradients.key", gradients->key},
                                         {"gradients.value", gradients->value},
                                         {"gradients.attn_mask", gradients->attn_mask},
                                         {"gradients.key_padding_mask", gradients->key_padding_mask}};
    enum { INPUTS = sizeof inputs / sizeof *inputs, RESULTS = sizeof results / sizeof *results };
    status = rapt_check_all_apart(context, options, p.batch, results, RESULTS, inputs, INPUTS);
    if (status == RAPT_OK) status = rapt_check_backward(context);
    if (status != RAPT_OK) return status;

    if (p.batch == 0 || p.queries == 0 || p.keys == 0) { /* nobody attends to anything */
        for (int r = 0; r < RESULTS && !g.accumulate; r++) {
            if (results[r].tensor != NULL) rapt_set_to_zero(results[r].tensor);
        }
        return RAPT_OK;
    }
    size_t bytes = context->backend->attn_backward_scratch(context, &p, &g);
    if (!rapt_arena_reserve(&context->arena, &context->allocator, bytes)) return rapt_fail_memory(context, bytes);
    context->backend->attn_backward(context, &p, &g, rapt_arena_take(&context->arena, bytes));
    return RAPT_OK;
}

rapt_status rapt_attention_backward(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                                    const rapt_tensor *value, const rapt_options *options, const rapt_tensor *out,
                                    const rapt_tensor *d_out, const rapt_tensor *d_weights,
                                    const rapt_attention_gradients *gradients) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    status = backward(context, query, key, value, options, out, d_out, d_weights, gradients);
    return rapt_leave(context, &call, status);
}
