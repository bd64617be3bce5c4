/* mha_backward_call.c - the checks of a layer's backward: that the state is the forward's, and where gradients go */
#include "mha.h"

#include <inttypes.h>

typedef long long ll; /* for printf */

/* ---- the state ---- */

static rapt_status check_settings(rapt_context *context, const rapt_mha_config *now, const rapt_mha_config *then) {
    const struct {
        const char *name;
        int64_t now, then;
    } settings[] = {
        {"embed_dim", now->embed_dim, then->embed_dim},
        {"num_heads", now->num_heads, then->num_heads},
        {"num_kv_heads", now->num_kv_heads, then->num_kv_heads},
        {"head_dim", now->head_dim, then->head_dim},
        {"kdim", now->kdim, then->kdim},
        {"vdim", now->vdim, then->vdim},
        {"dtype", now->dtype, then->dtype},
        {"add_bias_kv", now->add_bias_kv, then->add_bias_kv},
        {"add_zero_attn", now->add_zero_attn, then->add_zero_attn},
        {"batch_first", now->batch_first, then->batch_first},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (settings[i].now == settings[i].then) continue;
        return rapt_fail(context, RAPT_ERROR_STATE, "%s is %lld, expected %lld as in the forward that filled state",
                         settings[i].name, (ll)settings[i].now, (ll)settings[i].then);
    }
    return RAPT_OK;
}

static rapt_status check_state(rapt_context *context, const rapt_mha *layer, const rapt_mha_config *config,
                               const rapt_mha_state *state) {
    if (state == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "state is NULL");
    if (!state->is_filled) {
        return rapt_fail(context, RAPT_ERROR_STATE,
                         "state is empty, expected one that a forward with options.state filled");
    }
    if ((layer == NULL) != (state->layer == NULL)) {
        return rapt_fail(context, RAPT_ERROR_STATE, "state was filled by %s, expected %s",
                         layer == NULL ? "a layer's forward" : "rapt_mha_functional",
                         layer == NULL ? "rapt_mha_functional" : "a forward of this layer");
    }
    if (layer != state->layer || (layer != NULL && layer->made_at != state->layer_made_at)) {
        return rapt_fail(context, RAPT_ERROR_STATE,
                         "state was filled by another layer, expected a forward of this one");
    }
    if (layer != NULL && layer->version != state->saved.version) {
        return rapt_fail(context, RAPT_ERROR_STATE,
                         "state is of the layer's version %" PRIu64 ", but the layer was committed since then and has "
                         "version %" PRIu64 ": run the forward again",
                         state->saved.version, layer->version);
    }
    return check_settings(context, config, &state->config);
}

/* ---- one tensor ---- */

static rapt_status check_dtype(const mha_backward *b, const char *name, const rapt_tensor *tensor) {
    rapt_dtype dtype = b->state->config.dtype;
    if (tensor->dtype == dtype) return RAPT_OK;
    return rapt_fail(b->context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as the layer", name,
                     rapt_dtype_name(tensor->dtype), rapt_dtype_name(dtype));
}

static rapt_status check_shape(const mha_backward *b, const char *name, const rapt_tensor *tensor,
                               const rapt_tensor *like, const char *like_name) {
    bool fits = tensor->ndim == like->ndim;
    for (int32_t d = 0; fits && d < tensor->ndim; d++) fits = tensor->shape[d] == like->shape[d];
    if (fits) return RAPT_OK;
    char given[RAPT_SHAPE_TEXT], expected[RAPT_SHAPE_TEXT];
    return rapt_fail(b->context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s as %s", name,
                     rapt_shape_text(tensor, given), rapt_shape_text(like, expected), like_name);
}

/* A gradient that has the shape of `like`; NULL is not wanted. */
static rapt_status take_like(const mha_backward *b, const char *name, const rapt_tensor *tensor,
                             const rapt_tensor *like, const char *like_name, rapt_tensor *taken) {
    if (tensor == NULL) return RAPT_OK;
    rapt_status status = rapt_check_output(b->context, name, tensor);
    if (status == RAPT_OK) status = check_dtype(b, name, tensor);
    if (status == RAPT_OK) status = check_shape(b, name, tensor, like, like_name);
    if (status == RAPT_OK) *taken = rapt_normalised(tensor);
    return status;
}

static rapt_status take_matrix(const mha_backward *b, const char *name, const rapt_tensor *tensor, int64_t rows,
                               int64_t columns, rapt_tensor *taken) {
    rapt_tensor like = rapt_tensor_of(NULL, b->state->config.dtype, 2, (int64_t[]){rows, columns});
    return take_like(b, name, tensor, &like, "the weight", taken);
}

/* Leading sizes of 1 (PyTorch's [1,1,E]) are dropped. `there` is the parameter: what a layer lacks has no gradient. */
static rapt_status take_vector(const mha_backward *b, const char *name, const rapt_tensor *tensor, int64_t length,
                               const rapt_tensor *there, rapt_tensor *taken) {
    if (tensor == NULL) return RAPT_OK;
    if (there->data == NULL) {
        return rapt_fail(b->context, RAPT_ERROR_ABSENT, "%s is given, but there is no such bias", name);
    }
    rapt_status status = rapt_check_output(b->context, name, tensor);
    if (status == RAPT_OK) status = check_dtype(b, name, tensor);
    if (status != RAPT_OK) return status;
    int32_t last = tensor->ndim - 1;
    if (last < 0 || tensor->shape[last] != length || rapt_tensor_count(tensor) != length) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(b->context, RAPT_ERROR_SHAPE, "%s has shape %s, expected [%lld]", name,
                         rapt_shape_text(tensor, text), (ll)length);
    }
    rapt_tensor vector = rapt_tensor_strided(tensor->data, tensor->dtype, 1, &length, &tensor->stride[last]);
    *taken = rapt_normalised(&vector);
    return RAPT_OK;
}

/* ---- parameters ---- */

static rapt_status check_one_kind(const mha_backward *b, const char *what, bool fused, bool apart) {
    if (!fused || !apart) return RAPT_OK;
    return rapt_fail(b->context, RAPT_ERROR_ARGUMENT,
                     "gradients.in_proj_%s and those of separate projections are given: expected one or the other",
                     what);
}

static rapt_status take_weights(mha_backward *b, const rapt_mha_gradients *g) {
    const rapt_mha_config *c = &b->state->config;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    mha_parts *taken = &b->parameters;
    rapt_status status =
        check_one_kind(b, "weight", g->in_proj_weight != NULL,
                       g->q_proj_weight != NULL || g->k_proj_weight != NULL || g->v_proj_weight != NULL);
    if (status != RAPT_OK) return status;
    if (g->in_proj_weight != NULL) {
        rapt_tensor fused;
        if (c->kdim != c->embed_dim || c->vdim != c->embed_dim) {
            return rapt_fail(b->context, RAPT_ERROR_ARGUMENT,
                             "gradients.in_proj_weight is given, but kdim is %lld and vdim %lld: expected embed_dim "
                             "%lld for both, or separate gradients",
                             (ll)c->kdim, (ll)c->vdim, (ll)c->embed_dim);
        }
        status =
            take_matrix(b, "gradients.in_proj_weight", g->in_proj_weight, q_rows + 2 * kv_rows, c->embed_dim, &fused);
        if (status != RAPT_OK) return status;
        taken->q.weight = rapt_rows_of(&fused, 0, q_rows);
        taken->k.weight = rapt_rows_of(&fused, q_rows, kv_rows);
        taken->v.weight = rapt_rows_of(&fused, q_rows + kv_rows, kv_rows);
    }
    status = take_matrix(b, "gradients.q_proj_weight", g->q_proj_weight, q_rows, c->embed_dim, &taken->q.weight);
    if (status == RAPT_OK)
        status = take_matrix(b, "gradients.k_proj_weight", g->k_proj_weight, kv_rows, c->kdim, &taken->k.weight);
    if (status == RAPT_OK)
        status = take_matrix(b, "gradients.v_proj_weight", g->v_proj_weight, kv_rows, c->vdim, &taken->v.weight);
    if (status == RAPT_OK)
        status =
            take_matrix(b, "gradients.out_proj_weight", g->out_proj_weight, c->embed_dim, q_rows, &taken->out.weight);
    return status;
}

static rapt_status take_biases(mha_backward *b, const rapt_mha_gradients *g) {
    const rapt_mha_config *c = &b->state->config;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    const mha_parts *there = &b->parts;
    mha_parts *taken = &b->parameters;
    rapt_status status = check_one_kind(b, "bias", g->in_proj_bias != NULL,
                                        g->q_proj_bias != NULL || g->k_proj_bias != NULL || g->v_proj_bias != NULL);
    if (status != RAPT_OK) return status;
    if (g->in_proj_bias != NULL) {
        bool all = there->q.bias.data != NULL && there->k.bias.data != NULL && there->v.bias.data != NULL;
        rapt_tensor fused = {0}, absent = {0};
        status = take_vector(b, "gradients.in_proj_bias", g->in_proj_bias, q_rows + 2 * kv_rows,
                             all ? &there->q.bias : &absent, &fused);
        if (status != RAPT_OK) return status;
        taken->q.bias = rapt_rows_of(&fused, 0, q_rows);
        taken->k.bias = rapt_rows_of(&fused, q_rows, kv_rows);
        taken->v.bias = rapt_rows_of(&fused, q_rows + kv_rows, kv_rows);
    }
    const struct {
        const char *name;
        const rapt_tensor *tensor;
        int64_t length;
        const rapt_tensor *there;
        rapt_tensor *taken;
    } biases[] = {
        {"gradients.q_proj_bias", g->q_proj_bias, q_rows, &there->q.bias, &taken->q.bias},
        {"gradients.k_proj_bias", g->k_proj_bias, kv_rows, &there->k.bias, &taken->k.bias},
        {"gradients.v_proj_bias", g->v_proj_bias, kv_rows, &there->v.bias, &taken->v.bias},
        {"gradients.out_proj_bias", g->out_proj_bias, c->embed_dim, &there->out.bias, &taken->out.bias},
        {"gradients.bias_k", g->bias_k, kv_rows, &there->bias_k, &taken->bias_k},
        {"gradients.bias_v", g->bias_v, kv_rows, &there->bias_v, &taken->bias_v},
    };
    for (size_t i = 0; i < sizeof biases / sizeof *biases && status == RAPT_OK; i++) {
        status = take_vector(b, biases[i].name, biases[i].tensor, biases[i].length, biases[i].there, biases[i].taken);
    }
    return status;
}

/* ---- inputs ---- */

static rapt_status take_inputs(mha_backward *b, const rapt_mha_gradients *g) {
    const rapt_mha_state *s = b->state;
    const struct {
        const char *name, *like_name;
        const rapt_tensor *tensor, *like;
        bool is_there;
    } inputs[3] = {
        {"gradients.query", "query", g->query, &s->query, true},
        {"gradients.key", "key", g->key, &s->key, s->has_key},
        {"gradients.value", "value", g->value, &s->value, s->has_value},
    };
    rapt_status status = RAPT_OK;
    for (int i = 0; i < 3 && status == RAPT_OK; i++) {
        if (inputs[i].tensor != NULL && !inputs[i].is_there) {
            return rapt_fail(b->context, RAPT_ERROR_ARGUMENT, "%s is given, but the forward had no %s", inputs[i].name,
                             inputs[i].like_name);
        }
        status = take_like(b, inputs[i].name, inputs[i].tensor, inputs[i].like, inputs[i].like_name, &b->inputs[i]);
    }
    return status;
}

/* A gradient [N*Hk, S, D] as [N, Hk, S, D]. */
static rapt_status take_static(mha_backward *b, const char *name, const rapt_tensor *tensor, const rapt_tensor *like,
                               const char *like_name, rapt_view *view) {
    if (tensor == NULL) return RAPT_OK;
    if (like == NULL) {
        return rapt_fail(b->context, RAPT_ERROR_ARGUMENT, "%s is given, but the forward had no options.%s", name,
                         like_name);
    }
    rapt_tensor taken = {0};
    rapt_status status = take_like(b, name, tensor, like, like_name, &taken);
    if (status != RAPT_OK || rapt_tensor_count(tensor) == 0) return status;
    const attn_problem *p = &b->state->problem;
    rapt_tensor normalised = rapt_normalised(&taken);
    const int64_t *stride = normalised.stride;
    *view = (rapt_view){.data = taken.data,
                        .stride = {p->batch > 1 ? p->kv_heads * stride[0] : 0, stride[0], stride[1], stride[2]}};
    return RAPT_OK;
}

static rapt_status take_attention(mha_backward *b, const rapt_tensor *d_weights, const rapt_mha_gradients *g) {
    const rapt_mha_state *s = b->state;
    const attn_problem *p = &s->problem;
    rapt_context *context = b->context;
    rapt_status status = RAPT_OK;
    if (d_weights != NULL) {
        if (!s->returned_weights) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "d_weights is given, but the forward returned no weights: expected NULL");
        }
        status = rapt_check_tensor(context, "d_weights", d_weights);
        if (status != RAPT_OK) return status;
        status = rapt_take_weights(context, "d_weights", d_weights, s->query.ndim == 3, p, &b->attention.weights);
        if (status != RAPT_OK) return status;
    }
    const rapt_options *o = &s->options;
    status = take_static(b, "gradients.static_k", g->static_k, o->static_k, "static_k", &b->attention.k);
    if (status == RAPT_OK)
        status = take_static(b, "gradients.static_v", g->static_v, o->static_v, "static_v", &b->attention.v);
    if (status == RAPT_OK)
        status = rapt_take_mask_gradient(context, false, g->attn_mask, o->attn_mask, p, &b->attention.mask);
    if (status == RAPT_OK)
        status =
            rapt_take_mask_gradient(context, true, g->key_padding_mask, o->key_padding_mask, p, &b->attention.padding);
    return status;
}

/* ---- apart from everything that is read, and from each other ---- */

static const rapt_tensor *if_there(const rapt_tensor *tensor) { return tensor->data != NULL ? tensor : NULL; }

/* NULL if an earlier one is the same: a sum of several is written as one. */
static const rapt_tensor *unless_same(const rapt_tensor *tensor, const rapt_tensor *a, const rapt_tensor *b) {
    if (tensor == NULL || (a != NULL && rapt_same_view(tensor, a)) || (b != NULL && rapt_same_view(tensor, b))) {
        return NULL;
    }
    return tensor;
}

static rapt_status check_apart(const mha_backward *b, const rapt_tensor *d_out, const rapt_tensor *d_weights,
                               const rapt_mha_gradients *g) {
    const rapt_mha_state *s = b->state;
    const mha_parts *w = &b->parts;
    rapt_tensor memory = rapt_mha_state_bytes(s), positions = {0};
    if (s->options.rotary != NULL && s->rotary.positions != NULL) { /* [N, L], as wide as an f64 */
        positions = rapt_tensor_of((void *)(uintptr_t)s->rotary.positions, RAPT_F64, 2,
                                   (int64_t[]){s->problem.batch, s->problem.queries});
    }
    const rapt_named_tensor read[] = {
        {"d_out", d_out},
        {"d_weights", d_weights},
        {"query", if_there(&s->query)},
        {"key", s->has_key ? &s->key : NULL},
        {"value", s->has_value ? &s->value : NULL},
        {"static_k", s->options.static_k},
        {"static_v", s->options.static_v},
        {"state", &memory},
        {"rotary.positions", if_there(&positions)},
        {"the query projection's weight", &w->q.weight},
        {"the key projection's weight", &w->k.weight},
        {"the value projection's weight", &w->v.weight},
        {"the output projection's weight", &w->out.weight},
        {"the query projection's bias", if_there(&w->q.bias)},
        {"the key projection's bias", if_there(&w->k.bias)},
        {"the value projection's bias", if_there(&w->v.bias)},
        {"the output projection's bias", if_there(&w->out.bias)},
        {"bias_k", if_there(&w->bias_k)},
        {"bias_v", if_there(&w->bias_v)},
    };
    const rapt_named_tensor written[] = {
        {"gradients.query", g->query},
        {"gradients.key", unless_same(g->key, g->query, NULL)},
        {"gradients.value", unless_same(g->value, g->query, g->key)},
        {"gradients.attn_mask", g->attn_mask},
        {"gradients.key_padding_mask", g->key_padding_mask},
        {"gradients.in_proj_weight", g->in_proj_weight},
        {"gradients.q_proj_weight", g->q_proj_weight},
        {"gradients.k_proj_weight", g->k_proj_weight},
        {"gradients.v_proj_weight", g->v_proj_weight},
        {"gradients.in_proj_bias", g->in_proj_bias},
        {"gradients.q_proj_bias", g->q_proj_bias},
        {"gradients.k_proj_bias", g->k_proj_bias},
        {"gradients.v_proj_bias", g->v_proj_bias},
        {"gradients.bias_k", g->bias_k},
        {"gradients.bias_v", g->bias_v},
        {"gradients.out_proj_weight", g->out_proj_weight},
        {"gradients.out_proj_bias", g->out_proj_bias},
        {"gradients.static_k", g->static_k},
        {"gradients.static_v", g->static_v},
    };
    return rapt_check_all_apart(b->context, &s->options, s->problem.batch, written,
                                (int)(sizeof written / sizeof *written), read, (int)(sizeof read / sizeof *read));
}

rapt_status rapt_mha_check_backward(const rapt_mha *layer, const rapt_mha_config *config, const rapt_tensor *d_out,
                                    const rapt_tensor *d_weights, const rapt_mha_gradients *g, mha_backward *b) {
    rapt_status status = check_state(b->context, layer, config, b->state);
    if (status != RAPT_OK) return status;
    if (g == NULL) return rapt_fail(b->context, RAPT_ERROR_NULL, "gradients is NULL");
    for (int i = 0; i < (int)(sizeof g->reserved / sizeof *g->reserved); i++) {
        if (g->reserved[i] != 0) {
            return rapt_fail(b->context, RAPT_ERROR_ARGUMENT,
                             "gradients.reserved[%d] is not 0: set gradients to zero before use", i);
        }
    }
    if (layer != NULL && (g->static_k != NULL || g->static_v != NULL)) {
        return rapt_fail(b->context, RAPT_ERROR_ARGUMENT, "gradients.%s is for rapt_mha_functional_backward alone",
                         g->static_k != NULL ? "static_k" : "static_v");
    }
    status = rapt_check_tensor(b->context, "d_out", d_out);
    if (status == RAPT_OK) status = check_dtype(b, "d_out", d_out);
    if (status == RAPT_OK) status = check_shape(b, "d_out", d_out, &b->state->query, "the forward's output");
    if (status != RAPT_OK) return status;
    b->d_out = *d_out;
    b->accumulate = g->accumulate;
    status = take_attention(b, d_weights, g);
    if (status == RAPT_OK) status = take_inputs(b, g);
    if (status == RAPT_OK) status = take_weights(b, g);
    if (status == RAPT_OK) status = take_biases(b, g);
    if (status == RAPT_OK) status = check_apart(b, d_out, d_weights, g);
    return status == RAPT_OK ? rapt_check_backward(b->context) : status;
}
