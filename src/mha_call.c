/* mha_call.c - the checks of a layer's call: shapes, layouts, options
 *
 * After them the call is a problem for the backend, but for where its projections lie.
 */
#include "mha.h"

#include "rotary.h"

typedef long long ll; /* for printf */

/* ---- shapes ---- */

rapt_rows rapt_mha_layout_view(const rapt_mha_config *config, const rapt_tensor *tensor, int64_t *batch,
                               int64_t *length) {
    rapt_tensor normalised = rapt_normalised(tensor);
    rapt_rows view = {.data = tensor->data, .dtype = tensor->dtype, .group = tensor->shape[tensor->ndim - 1]};
    bool batched = tensor->ndim == 3;
    int32_t length_dim = batched && config->batch_first ? 1 : 0, batch_dim = 1 - length_dim;
    *batch = batched ? tensor->shape[batch_dim] : 1;
    *length = tensor->shape[length_dim];
    view.stride[0] = batched ? normalised.stride[batch_dim] : 0;
    view.stride[1] = normalised.stride[length_dim];
    view.stride[2] = normalised.stride[tensor->ndim - 1];
    return view;
}

static rapt_status check_input(const mha_call *call, const char *name, const rapt_tensor *tensor, const char *last_name,
                               int64_t last) {
    rapt_context *context = call->context;
    const rapt_mha_config *c = call->config;
    rapt_status status = rapt_check_tensor(context, name, tensor);
    if (status != RAPT_OK) return status;
    char text[RAPT_SHAPE_TEXT];
    if (tensor->ndim != 2 && tensor->ndim != 3) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s, or [L,E] without a batch", name,
                         rapt_shape_text(tensor, text), c->batch_first ? "[N,L,E]" : "[L,N,E]");
    }
    if (tensor->ndim != call->query->ndim) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has %d dimensions, expected %d as query", name,
                         (int)tensor->ndim, (int)call->query->ndim);
    }
    if (tensor->dtype != c->dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as the layer", name,
                         rapt_dtype_name(tensor->dtype), rapt_dtype_name(c->dtype));
    }
    if (tensor->shape[tensor->ndim - 1] != last) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s with last size %lld, expected %s %lld", name,
                         rapt_shape_text(tensor, text), (ll)tensor->shape[tensor->ndim - 1], last_name, (ll)last);
    }
    return RAPT_OK;
}

static rapt_status check_equal(const mha_call *call, const char *name, const char *what, int64_t size, int64_t expected,
                               const char *other) {
    if (size == expected) return RAPT_OK;
    return rapt_fail(call->context, RAPT_ERROR_SHAPE, "%s has %s %lld, expected %lld as %s", name, what, (ll)size,
                     (ll)expected, other);
}

/* Ready keys or values [N*Hk, S, D] as the problem's [N, Hk, S, D]. */
static rapt_status take_static(mha_call *call, const char *name, const rapt_tensor *tensor, rapt_view *view,
                               int64_t *keys) {
    const rapt_mha_config *c = call->config;
    rapt_status status = rapt_check_tensor(call->context, name, tensor);
    if (status == RAPT_OK) status = rapt_check_rank(call->context, name, tensor, 3, "[N*Hk, S, D]");
    if (status != RAPT_OK) return status;
    if (tensor->dtype != c->dtype) {
        return rapt_fail(call->context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as the weights", name,
                         rapt_dtype_name(tensor->dtype), rapt_dtype_name(c->dtype));
    }
    int64_t first = call->problem.batch * c->num_kv_heads;
    if (tensor->shape[0] != first || tensor->shape[2] != c->head_dim) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(call->context, RAPT_ERROR_SHAPE, "%s has shape %s, expected [N*Hk, S, D] = [%lld, S, %lld]",
                         name, rapt_shape_text(tensor, text), (ll)first, (ll)c->head_dim);
    }
    rapt_tensor normalised = rapt_normalised(tensor);
    const int64_t *stride = normalised.stride;
    int64_t sequence_stride = call->problem.batch > 1 ? c->num_kv_heads * stride[0] : 0;
    *view = (rapt_view){.data = tensor->data, .stride = {sequence_stride, stride[0], stride[1], stride[2]}};
    *keys = tensor->shape[1];
    return RAPT_OK;
}

static rapt_status check_keys(mha_call *call) {
    const rapt_mha_config *c = call->config;
    attn_problem *p = &call->problem;
    const rapt_options *o = &call->options;
    rapt_status status = RAPT_OK;
    if ((o->static_k == NULL) != (o->static_v == NULL)) {
        return rapt_fail(call->context, RAPT_ERROR_NULL, "options.%s is given without %s: expected both or none",
                         o->static_k != NULL ? "static_k" : "static_v", o->static_k != NULL ? "static_v" : "static_k");
    }
    int64_t batch, values = 0;
    if (call->key != NULL) {
        status = check_input(call, "key", call->key, "kdim", c->kdim);
        if (status != RAPT_OK) return status;
        rapt_mha_layout_view(c, call->key, &batch, &p->keys);
        status = check_equal(call, "key", "batch", batch, p->batch, "query");
        if (status == RAPT_OK && o->cache != NULL) {
            status = check_equal(call, "key", "length", p->keys, p->queries, "query, whose keys the cache takes");
        }
        if (status != RAPT_OK) return status;
    }
    if (call->value != NULL) {
        status = check_input(call, "value", call->value, "vdim", c->vdim);
        if (status != RAPT_OK) return status;
        rapt_mha_layout_view(c, call->value, &batch, &values);
        status = check_equal(call, "value", "batch", batch, p->batch, "query");
        if (status == RAPT_OK && call->key != NULL) {
            status = check_equal(call, "value", "length", values, p->keys, "key");
        }
        if (status != RAPT_OK) return status;
    }
    if (o->static_k != NULL) {
        if (c->add_bias_kv)
            return rapt_fail(call->context, RAPT_ERROR_ARGUMENT,
                             "bias_k and bias_v cannot be added to static_k and static_v");
        status = take_static(call, "static_k", o->static_k, &p->k, &p->keys);
        if (status == RAPT_OK) status = take_static(call, "static_v", o->static_v, &p->v, &values);
        if (status == RAPT_OK) status = check_equal(call, "static_v", "length", values, p->keys, "static_k");
    }
    return status;
}

static rapt_status check_causal(const mha_call *call) {
    const rapt_options *o = &call->options;
    const attn_problem *p = &call->problem;
    bool aligned = o->align_bottom_right || o->offset != 0 || o->offsets != NULL || o->limit_right;
    if (!o->causal || aligned || p->queries == p->keys || o->cache != NULL) return RAPT_OK;
    return rapt_fail(call->context, RAPT_ERROR_SHAPE,
                     "causal needs as many queries as keys, but L is %lld and S is %lld: say how they are aligned, "
                     "bottom-right with "
                     "options.align_bottom_right (query i sees keys up to i + S - L) or top-left with "
                     "options.limit_right and right 0 "
                     "(up to i)",
                     (ll)p->queries, (ll)p->keys);
}

static rapt_status check_dropout(mha_call *call, bool training) {
    if (call->options.dropout != 0) {
        return rapt_fail(call->context, RAPT_ERROR_ARGUMENT,
                         "options.dropout is %g, but a layer's dropout is in its config: expected 0",
                         call->options.dropout);
    }
    double dropout = training ? call->config->dropout : 0;
    return rapt_take_dropout(call->context, &call->options, dropout, &call->problem);
}

/* A state's memory is written by the call: nothing that it reads or returns may lie there. */
static rapt_status check_state(const mha_call *call) {
    const rapt_options *o = &call->options;
    if (o->state == NULL) return RAPT_OK;
    if (o->cache != NULL) {
        return rapt_fail(call->context, RAPT_ERROR_ARGUMENT,
                         "options.state and options.cache are given: expected one or the other, for there is no "
                         "backward through a cache");
    }
    rapt_tensor memory = rapt_mha_state_bytes(o->state);
    const rapt_named_tensor others[] = {
        {"query", call->query},    {"key", call->key},
        {"value", call->value},    {"static_k", o->static_k},
        {"static_v", o->static_v}, {"attn_mask", o->attn_mask},
        {"out", call->out},        {"weights", o->weights},
        {"lse", o->lse},           {"key_padding_mask", o->key_padding_mask},
    };
    rapt_status status = RAPT_OK;
    for (size_t i = 0; i < sizeof others / sizeof *others && status == RAPT_OK; i++) {
        status = rapt_check_apart(call->context, "options.state", &memory, others[i].name, others[i].tensor);
    }
    return status;
}

static rapt_status check_apart(const mha_call *call) {
    const mha_parts *w = &call->parts;
    const rapt_named_tensor inputs[] = {
        {"query", call->query},
        {"key", call->key},
        {"value", call->value},
        {"static_k", call->options.static_k},
        {"static_v", call->options.static_v},
        {"the query projection's weight", &w->q.weight},
        {"the key projection's weight", &w->k.weight},
        {"the value projection's weight", &w->v.weight},
        {"the output projection's weight", &w->out.weight},
        {"the query projection's bias", w->q.bias.data ? &w->q.bias : NULL},
        {"the key projection's bias", w->k.bias.data ? &w->k.bias : NULL},
        {"the value projection's bias", w->v.bias.data ? &w->v.bias : NULL},
        {"the output projection's bias", w->out.bias.data ? &w->out.bias : NULL},
        {"bias_k", w->bias_k.data ? &w->bias_k : NULL},
        {"bias_v", w->bias_v.data ? &w->bias_v : NULL},
    };
    return rapt_check_results_apart(call->context, &call->options, call->problem.batch, call->out, inputs,
                                    (int)(sizeof inputs / sizeof *inputs));
}

/* N * L * H * D can then be counted anywhere. */
static rapt_status check_total(const mha_call *call) {
    const attn_problem *p = &call->problem;
    int64_t longest = p->queries > p->keys ? p->queries : p->keys, bytes;
    if (!__builtin_mul_overflow(p->batch, longest, &bytes) && !__builtin_mul_overflow(bytes, p->heads, &bytes) &&
        !__builtin_mul_overflow(bytes, p->dim, &bytes) && !__builtin_mul_overflow(bytes, (int64_t)64, &bytes)) {
        return RAPT_OK;
    }
    return rapt_fail(call->context, RAPT_ERROR_OVERFLOW,
                     "the call is too large: N %lld, L %lld, S %lld with %lld heads of %lld", (ll)p->batch,
                     (ll)p->queries, (ll)p->keys, (ll)p->heads, (ll)p->dim);
}

static rapt_status check_rotary(const mha_call *call) {
    const rapt_rotary *rotary = call->options.rotary;
    rapt_status status = rapt_rotary_check(call->context, rotary, call->problem.dim);
    if (status != RAPT_OK || rotary->positions == NULL || call->key == NULL) return status;
    return check_equal(call, "key", "length", call->key_rows, call->problem.queries,
                       "query, since rotary.positions are those of both");
}

rapt_status rapt_mha_check_call(mha_call *call, bool training) {
    const rapt_mha_config *c = call->config;
    attn_problem *p = &call->problem;
    rapt_status status = check_input(call, "query", call->query, "embed_dim", c->embed_dim);
    if (status != RAPT_OK) return status;
    call->batched = call->query->ndim == 3;
    rapt_mha_layout_view(c, call->query, &p->batch, &p->queries);
    p->dtype = c->dtype;
    p->heads = c->num_heads;
    p->kv_heads = c->num_kv_heads;
    p->dim = p->value_dim = c->head_dim;
    p->scale = c->scale;
    p->extra_keys = rapt_mha_extra_keys(c);
    bool has_others = call->options.static_k != NULL || call->options.cache != NULL;
    if (call->key == NULL && (!has_others || (call->options.cache != NULL && call->value != NULL)))
        return rapt_fail(call->context, RAPT_ERROR_NULL, "key is NULL");
    if (call->value == NULL && (!has_others || (call->options.cache != NULL && call->key != NULL)))
        return rapt_fail(call->context, RAPT_ERROR_NULL, "value is NULL");
    status = check_keys(call);
    if (status != RAPT_OK) return status;
    call->key_rows = p->keys;
    if (call->options.cache != NULL) {
        call->append = (cache_append){
            .count = p->keys, .lengths = call->options.append_lengths, .attends_only = call->key == NULL};
        status = rapt_cache_begin(call->context, call->options.cache, &call->options, &call->append, p);
        if (status != RAPT_OK) return status;
        call->holds_cache = true;
    }

    status = check_total(call);
    if (status != RAPT_OK) return status;
    call->options.causal |= c->causal;
    status = rapt_attn_options(call->context, &call->options, call->batched, p);
    if (status == RAPT_OK) status = check_causal(call);
    if (status == RAPT_OK && call->options.rotary != NULL) {
        status = check_rotary(call);
    }
    if (status == RAPT_OK) status = check_dropout(call, training);
    if (status == RAPT_OK) status = rapt_check_output(call->context, "out", call->out);
    if (status != RAPT_OK) return status;
    bool same_shape = call->out->ndim == call->query->ndim;
    for (int32_t d = 0; same_shape && d < call->out->ndim; d++)
        same_shape = call->out->shape[d] == call->query->shape[d];
    if (!same_shape) {
        char given[RAPT_SHAPE_TEXT], expected[RAPT_SHAPE_TEXT];
        return rapt_fail(call->context, RAPT_ERROR_SHAPE, "out has shape %s, expected query's shape %s",
                         rapt_shape_text(call->out, given), rapt_shape_text(call->query, expected));
    }
    if (call->out->dtype != c->dtype) {
        return rapt_fail(call->context, RAPT_ERROR_DTYPE, "out is %s, expected %s as the layer",
                         rapt_dtype_name(call->out->dtype), rapt_dtype_name(c->dtype));
    }
    status = check_apart(call);
    return status == RAPT_OK ? check_state(call) : status;
}

rapt_status rapt_mha_check_append(mha_call *call) {
    const rapt_mha_config *c = call->config;
    attn_problem *p = &call->problem;
    rapt_status status = rapt_check_tensor(call->context, "key", call->key);
    if (status == RAPT_OK) status = rapt_check_tensor(call->context, "value", call->value);
    if (status != RAPT_OK) return status;
    call->query = call->key; /* whose rank and batch the others must have */
    call->batched = call->key->ndim == 3;
    if (call->key->ndim == 2 || call->key->ndim == 3) rapt_mha_layout_view(c, call->key, &p->batch, &p->queries);
    p->dtype = c->dtype;
    p->heads = c->num_heads;
    p->kv_heads = c->num_kv_heads;
    p->dim = p->value_dim = c->head_dim;
    status = check_keys(call);
    if (status != RAPT_OK) return status;
    status = check_total(call);
    if (status != RAPT_OK) return status;
    call->key_rows = p->keys;
    call->append.count = p->keys;
    p->queries = 0;
    status = rapt_cache_begin(call->context, call->options.cache, &call->options, &call->append, p);
    if (status != RAPT_OK) return status;
    call->holds_cache = true;
    return RAPT_OK;
}
