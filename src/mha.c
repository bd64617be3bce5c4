/* mha.c - the forward of the layer and its functional form: project, attend, project
 *
 * Everything is checked and all scratch memory reserved before the first byte of a result is written, so a call that
 * fails has changed nothing.
 */
#include "mha.h"

#include "cache.h"
#include "rotary.h"

#include <math.h>

typedef long long ll; /* for printf */

/* One forward, as it is being prepared. */
typedef struct mha_call {
    rapt_context *context;
    const rapt_mha_config *config;
    mha_parts parts; /* a copy: packed weights of a functional call are filled in here */
    rapt_options options;
    const rapt_tensor *query, *key, *value, *out; /* key and value NULL: static ones are given */
    bool batched;
    attn_problem problem;
    int64_t key_rows;    /* to project: S, or with a cache the new ones */
    bool projects[3];    /* the query, the key, the value */
    bool holds_cache;    /* options.cache is this call's until it ends */
    cache_append append; /* then */
} mha_call;

/* ---- shapes ---- */

/* Where batch and length stand in a tensor of the layer, as [N, L, features] whatever its layout. */
static rapt_view layout_view(const mha_call *call, const rapt_tensor *tensor, int64_t *batch, int64_t *length) {
    rapt_tensor normalised = rapt_normalised(tensor);
    rapt_view view = {.data = tensor->data};
    int32_t length_dim = !call->batched ? 0 : call->config->batch_first ? 1 : 0, batch_dim = 1 - length_dim;
    *batch = call->batched ? tensor->shape[batch_dim] : 1;
    *length = tensor->shape[length_dim];
    view.stride[0] = call->batched ? normalised.stride[batch_dim] : 0;
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
        layout_view(call, call->key, &batch, &p->keys);
        status = check_equal(call, "key", "batch", batch, p->batch, "query");
        if (status == RAPT_OK && o->cache != NULL) {
            status = check_equal(call, "key", "length", p->keys, p->queries, "query, whose keys the cache takes");
        }
        if (status != RAPT_OK) return status;
    }
    if (call->value != NULL) {
        status = check_input(call, "value", call->value, "vdim", c->vdim);
        if (status != RAPT_OK) return status;
        layout_view(call, call->value, &batch, &values);
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

static rapt_status check_dropout(const mha_call *call, bool training) {
    if (call->options.dropout != 0) {
        return rapt_fail(call->context, RAPT_ERROR_ARGUMENT,
                         "options.dropout is %g, but a layer's dropout is in its config: expected 0",
                         call->options.dropout);
    }
    if (training && call->config->dropout > 0) {
        return rapt_fail(call->context, RAPT_ERROR_UNSUPPORTED,
                         "dropout %g is not drawn in Rapt %s: call rapt_mha_eval (or, in a call with options, set "
                         "their mode to RAPT_MODE_EVAL)",
                         call->config->dropout, rapt_version());
    }
    return RAPT_OK;
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

static rapt_status check_call(mha_call *call, bool training) {
    const rapt_mha_config *c = call->config;
    attn_problem *p = &call->problem;
    rapt_status status = check_input(call, "query", call->query, "embed_dim", c->embed_dim);
    if (status != RAPT_OK) return status;
    call->batched = call->query->ndim == 3;
    layout_view(call, call->query, &p->batch, &p->queries);
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
    return check_apart(call);
}

/* ---- the steps ---- */

/* Projected heads [N, length, heads * D], contiguous, and seen as [N, heads, length, D]. */
static rapt_view heads_view(char *data, int64_t length, int64_t heads, int64_t dim) {
    return (rapt_view){.data = data, .stride = {length * heads * dim, dim, heads * dim, 1}};
}
static rapt_view rows_view(char *data, int64_t length, int64_t features) {
    return (rapt_view){.data = data, .stride = {length * features, features, 1}};
}

static linear_problem start_linear(const mha_call *call, const rapt_tensor *x) {
    linear_problem linear = {.dtype = call->config->dtype};
    linear.x = layout_view(call, x, &linear.batch, &linear.length);
    linear.features = x->shape[x->ndim - 1];
    return linear;
}

static void add_part(linear_problem *linear, const mha_projection *projection, rapt_view y) {
    linear->part[linear->parts++] = (linear_part){.features = projection->weight.shape[0],
                                                  .weight = projection->weight,
                                                  .bias = projection->bias,
                                                  .packed = projection->packed,
                                                  .y = y};
}

/* Memory between the steps. */
typedef struct mha_scratch {
    char *q, *attended; /* [N, L, H*D] */
    char *k, *v;        /* [N, key_rows, Hk*D] */
    void *rotary;       /* of rapt_rotate_rows */
    int64_t *padding;   /* [N], for that */
    void *stage;        /* of the backend, for one step at a time */
} mha_scratch;

/* The products of a forward. Inputs that are one tensor share one: self-attention needs a single product. */
typedef struct mha_products {
    int count;
    linear_problem linear[4]; /* the last is the output projection */
} mha_products;

static mha_products plan_products(const mha_call *call, const mha_scratch *scratch) {
    const rapt_mha_config *c = call->config;
    const attn_problem *p = &call->problem;
    int64_t q_features = c->num_heads * c->head_dim, kv_features = c->num_kv_heads * c->head_dim;
    rapt_view q_rows = rows_view(scratch->q, p->queries, q_features),
              k_rows = rows_view(scratch->k, call->key_rows, kv_features);
    rapt_view v_rows = rows_view(scratch->v, call->key_rows, kv_features);
    const rapt_tensor *input[3] = {call->query, call->key, call->value};
    const mha_projection *projection[3] = {&call->parts.q, &call->parts.k, &call->parts.v};
    rapt_view rows[3] = {q_rows, k_rows, v_rows};

    mha_products products = {0};
    int index[3] = {0}; /* which product computes an input's projection */
    for (int i = 0; i < 3; i++) {
        if (!call->projects[i]) continue;
        index[i] = products.count;
        for (int earlier = 0; earlier < i; earlier++) {
            if (call->projects[earlier] && rapt_same_view(input[earlier], input[i])) index[i] = index[earlier];
        }
        linear_problem *linear = &products.linear[index[i]];
        if (index[i] == products.count) {
            *linear = start_linear(call, input[i]);
            products.count++;
        }
        add_part(linear, projection[i], rows[i]);
    }
    if (call->out == NULL) return products;
    linear_problem *out = &products.linear[products.count++];
    *out = (linear_problem){.dtype = c->dtype,
                            .batch = p->batch,
                            .length = p->queries,
                            .features = q_features,
                            .x = rows_view(scratch->attended, p->queries, q_features)};
    int64_t batch, length;
    add_part(out, &call->parts.out, layout_view(call, call->out, &batch, &length));
    return products;
}

static rapt_view extra_view(const attn_problem *p, void *extra) {
    return (rapt_view){.data = extra, .stride = {0, p->extra_keys * p->dim, p->dim, 1}};
}

/* A single key is what a lone query attends to, whatever the scores: its value is the result. */
static void repeat_value(const mha_call *call, const char *v, char *attended) {
    const attn_problem *p = &call->problem;
    size_t head_bytes = (size_t)p->dim * rapt_dtype_size(p->dtype);
    int64_t group = p->heads / p->kv_heads;
    for (int64_t n = 0; n < p->batch; n++) {
        for (int64_t h = 0; h < p->heads; h++) {
            memcpy(attended + (size_t)(n * p->heads + h) * head_bytes,
                   v + (size_t)(n * p->kv_heads + h / group) * head_bytes, head_bytes);
        }
    }
}

static bool takes_short_way(const mha_call *call) {
    const attn_problem *p = &call->problem;
    const rapt_options *o = &call->options;
    bool plain = o->attn_mask == NULL && o->key_padding_mask == NULL && o->key_start == NULL && o->key_lengths == NULL;
    bool open =
        !o->limit_left && !o->limit_right && o->offset == 0 && o->offsets == NULL; /* causal hides nothing here */
    return p->queries == 1 && p->keys == 1 && p->extra_keys == 0 && plain && open && o->weights == NULL &&
           o->lse == NULL && o->static_k == NULL && o->cache == NULL;
}

/* ---- scratch memory ---- */

static size_t rows_bytes(const attn_problem *p, int64_t length, int64_t heads) {
    size_t rows = rapt_size_mul((size_t)p->batch, (size_t)length);
    return rapt_size_mul(rows, rapt_size_mul((size_t)(heads * p->dim), rapt_dtype_size(p->dtype)));
}

static size_t packed_bytes(const mha_projection *projection) {
    return rapt_linear_packed_size(projection->weight.dtype, projection->weight.shape[0], projection->weight.shape[1]);
}

/* What the longest of the steps needs. */
/* What the backend needs for its largest step. */
static size_t stage_bytes(const mha_call *call, bool attends) {
    const rapt_backend_table *backend = call->context->backend;
    size_t most = attends ? backend->attn_scratch(call->context, &call->problem) : 0;
    mha_products products = plan_products(call, &(mha_scratch){0});
    for (int i = 0; i < products.count; i++) {
        size_t bytes = backend->linear_scratch(call->context, &products.linear[i]);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* A layer comes with its weights packed; those of a functional call are packed here, into scratch memory. */
static rapt_status reserve(mha_call *call, bool attends, mha_scratch *scratch) {
    rapt_context *context = call->context;
    const attn_problem *p = &call->problem;
    mha_parts *parts = &call->parts;
    bool packs = context->backend->reads_packed_weights && parts->out.packed == NULL;
    bool makes_extra = p->extra_keys > 0 && (parts->extra_k == NULL || !context->backend->reads_packed_weights);
    mha_projection *packed[4] = {call->projects[0] ? &parts->q : NULL, call->projects[1] ? &parts->k : NULL,
                                 call->projects[2] ? &parts->v : NULL, call->out != NULL ? &parts->out : NULL};

    size_t q = rows_bytes(p, p->queries, p->heads), k = rows_bytes(p, call->key_rows, p->kv_heads);
    if (!call->projects[2]) k = 0;
    size_t extra = makes_extra ? rapt_mha_extra_bytes(call->config) : 0, stage = stage_bytes(call, attends), total = 0;
    size_t rotary = call->options.rotary != NULL ? rapt_rotary_scratch(context, p->dim) : 0;
    size_t padding = rotary > 0 ? rapt_size_mul(sizeof(int64_t), (size_t)p->batch) : 0;
    const size_t sizes[] = {q, q, k, k, extra, extra, stage, rotary, padding};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) total = rapt_size_add(total, rapt_arena_size(sizes[i]));
    for (int i = 0; packs && i < 4; i++) {
        if (packed[i] != NULL) total = rapt_size_add(total, rapt_arena_size(packed_bytes(packed[i])));
    }
    rapt_arena *arena = &context->arena;
    if (!rapt_arena_reserve(arena, &context->allocator, total)) return rapt_fail_memory(context, total);

    *scratch = (mha_scratch){.q = rapt_arena_take(arena, q), .attended = rapt_arena_take(arena, q)};
    scratch->k = rapt_arena_take(arena, k);
    scratch->v = rapt_arena_take(arena, k);
    scratch->stage = rapt_arena_take(arena, stage);
    scratch->rotary = rapt_arena_take(arena, rotary);
    scratch->padding = rapt_arena_take(arena, padding);
    if (makes_extra) {
        parts->extra_k = rapt_arena_take(arena, extra);
        parts->extra_v = rapt_arena_take(arena, extra);
        rapt_mha_fill_extra(call->config, &parts->bias_k, parts->extra_k);
        rapt_mha_fill_extra(call->config, &parts->bias_v, parts->extra_v);
    }
    for (int i = 0; packs && i < 4; i++) {
        if (packed[i] == NULL) continue;
        packed[i]->packed = rapt_arena_take(arena, packed_bytes(packed[i]));
        rapt_linear_pack(context, &packed[i]->weight, &packed[i]->bias, packed[i]->packed);
    }
    return RAPT_OK;
}

/* ---- the whole ---- */

/* The first key of a sequence that neither key_start nor the padding mask hides. */
static int64_t first_real_key(const attn_problem *p, int64_t n) {
    int64_t first = p->key_start != NULL ? p->key_start[n] : 0;
    const attn_mask *mask = &p->padding;
    for (; mask->data != NULL && first < p->keys; first++) {
        double value = rapt_load(mask->data, mask->dtype, n * mask->stride[0] + first * mask->stride[3]);
        if (mask->dtype == RAPT_BOOL ? value == 0 : value != -HUGE_VAL) break;
    }
    return first;
}

/* Turns projected queries and keys by their positions: the caller's, those after the cache's, or counted from a sequence's
 * first real key, where a query stands by the band's offset. */
static void turn(const mha_call *call, const mha_scratch *scratch) {
    const attn_problem *p = &call->problem;
    if (call->options.rotary == NULL) return;
    for (int64_t n = 0; n < p->batch; n++) scratch->padding[n] = p->cache != NULL ? 0 : first_real_key(p, n);
    rotary_rows rows = {.dtype = p->dtype,
                        .dim = p->dim,
                        .batch = p->batch,
                        .positions = call->options.rotary->positions,
                        .padding = scratch->padding,
                        .q = {.data = scratch->q,
                              .length = p->queries,
                              .heads = p->heads,
                              .first = p->offsets,
                              .first_of_all = p->offset}};
    if (call->projects[1]) {
        rows.k = (rotary_heads){.data = scratch->k,
                                .length = call->key_rows,
                                .heads = p->kv_heads,
                                .first = p->cache != NULL ? p->offsets : NULL};
    }
    rapt_rotate_rows(call->context, call->options.rotary, &rows, scratch->rotary);
}

static void attend(const mha_call *call, const mha_scratch *scratch) {
    attn_problem p = call->problem;
    p.q = heads_view(scratch->q, p.queries, p.heads, p.dim);
    p.out = heads_view(scratch->attended, p.queries, p.heads, p.dim);
    rapt_view k = heads_view(scratch->k, call->key_rows, p.kv_heads, p.dim);
    rapt_view v = heads_view(scratch->v, call->key_rows, p.kv_heads, p.dim);
    p.extra_k = extra_view(&p, call->parts.extra_k);
    p.extra_v = extra_view(&p, call->parts.extra_v);
    if (call->options.cache != NULL) {
        rapt_cache_attend(call->context, call->options.cache, &call->append, &k, &v, &p, scratch->stage);
        return;
    }
    if (call->options.static_k == NULL) {
        p.k = k;
        p.v = v;
    }
    call->context->backend->attn_forward(call->context, &p, scratch->stage);
}

/* Output rows of tokens that are none. */
static void blank_padding(const mha_call *call) {
    const int64_t *lengths = call->options.append_lengths;
    int64_t batch, length;
    rapt_view out = layout_view(call, call->out, &batch, &length);
    for (int64_t n = 0; n < batch && lengths != NULL; n++) {
        for (int64_t i = lengths[n]; i < length; i++) {
            for (int64_t e = 0; e < call->config->embed_dim; e++) {
                int64_t at = n * out.stride[0] + i * out.stride[1] + e * out.stride[2];
                rapt_store(out.data, call->config->dtype, at, 0);
            }
        }
    }
}

static rapt_status compute(mha_call *call) {
    const rapt_backend_table *backend = call->context->backend;
    bool short_way = takes_short_way(call), projects_keys = call->options.static_k == NULL && call->key != NULL;
    call->projects[0] = !short_way;
    call->projects[1] = !short_way && projects_keys;
    call->projects[2] = projects_keys;
    mha_scratch scratch;
    rapt_status status = reserve(call, !short_way, &scratch);
    if (status != RAPT_OK) return status;

    mha_products products = plan_products(call, &scratch);
    for (int i = 0; i < products.count - 1; i++) backend->linear(call->context, &products.linear[i], scratch.stage);
    if (short_way) {
        repeat_value(call, scratch.v, scratch.attended);
    } else {
        turn(call, &scratch);
        attend(call, &scratch);
    }
    backend->linear(call->context, &products.linear[products.count - 1], scratch.stage);
    blank_padding(call);
    return RAPT_OK;
}

static rapt_status forward(mha_call *call, bool default_training) {
    rapt_mode mode = call->options.mode;
    rapt_status status = check_call(call, mode == RAPT_MODE_DEFAULT ? default_training : mode == RAPT_MODE_TRAIN);
    if (status == RAPT_OK && call->problem.batch > 0 && call->problem.queries > 0) status = compute(call);
    if (call->holds_cache) rapt_cache_end(call->options.cache);
    return status;
}

/* ---- public entries ---- */

static rapt_status layer_forward(rapt_context *context, const rapt_mha *layer, const rapt_tensor *query,
                                 const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                                 const rapt_tensor *out) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    mha_call call = {.context = context,
                     .config = &layer->config,
                     .parts = layer->parts,
                     .query = query,
                     .key = key,
                     .value = value,
                     .out = out};
    if (options != NULL) call.options = *options;
    if (call.options.static_k != NULL || call.options.static_v != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.static_k and static_v are for rapt_mha_functional alone");
    }
    return forward(&call, layer->training);
}

rapt_status rapt_mha_forward(rapt_context *context, const rapt_mha *layer, const rapt_tensor *query,
                             const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                             const rapt_tensor *out) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, layer_forward(context, layer, query, key, value, options, out));
}

/* [N, E] as [N, 1, E] */
static rapt_tensor as_sequences(const rapt_tensor *tokens) {
    rapt_tensor sequences = *tokens;
    sequences.ndim = 3;
    sequences.shape[2] = tokens->shape[1];
    sequences.stride[2] = tokens->stride[1];
    sequences.shape[1] = 1;
    sequences.stride[1] = 0;
    return sequences;
}

static rapt_status token_forward(rapt_context *context, const rapt_mha *layer, const rapt_tensor *tokens,
                                 const rapt_tensor *out) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    rapt_mha_config config = layer->config;
    config.batch_first = true;
    if (config.kdim != config.embed_dim || config.vdim != config.embed_dim) {
        return rapt_fail(context, RAPT_ERROR_STATE,
                         "the layer has embed_dim %lld, kdim %lld and vdim %lld: a token alone needs them equal",
                         (ll)config.embed_dim, (ll)config.kdim, (ll)config.vdim);
    }
    rapt_status status = rapt_check_tensor(context, "tokens", tokens);
    if (status == RAPT_OK) status = rapt_check_rank(context, "tokens", tokens, 2, "[N, E]");
    if (status == RAPT_OK && tokens->shape[1] != config.embed_dim) {
        status = rapt_fail(context, RAPT_ERROR_SHAPE, "tokens has last size %lld, expected embed_dim %lld",
                           (ll)tokens->shape[1], (ll)config.embed_dim);
    }
    if (status == RAPT_OK && tokens->dtype != config.dtype) {
        status = rapt_fail(context, RAPT_ERROR_DTYPE, "tokens is %s, expected %s as the layer",
                           rapt_dtype_name(tokens->dtype), rapt_dtype_name(config.dtype));
    }
    if (status == RAPT_OK) status = rapt_check_output(context, "out", out);
    if (status == RAPT_OK) status = rapt_check_rank(context, "out", out, 2, "[N, E]");
    if (status != RAPT_OK) return status;
    rapt_tensor x = as_sequences(tokens), y = as_sequences(out);
    mha_call call = {
        .context = context, .config = &config, .parts = layer->parts, .query = &x, .key = &x, .value = &x, .out = &y};
    return forward(&call, layer->training);
}

rapt_status rapt_mha_forward_token(rapt_context *context, const rapt_mha *layer, const rapt_tensor *tokens,
                                   const rapt_tensor *out) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, token_forward(context, layer, tokens, out));
}

static rapt_status functional(rapt_context *context, const rapt_mha_weights *weights, const rapt_tensor *query,
                              const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                              const rapt_tensor *out) {
    rapt_mha_config config;
    mha_call call = {.context = context, .config = &config, .query = query, .key = key, .value = value, .out = out};
    rapt_status status = rapt_mha_take_weights(context, weights, &config, &call.parts);
    if (status != RAPT_OK) return status;
    if (options != NULL) call.options = *options;
    return forward(&call, true);
}

rapt_status rapt_mha_functional(rapt_context *context, const rapt_mha_weights *weights, const rapt_tensor *query,
                                const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                                const rapt_tensor *out) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, functional(context, weights, query, key, value, options, out));
}

/* ---- keys and values of an encoder, kept ---- */

static rapt_status append_keys(mha_call *call) {
    const rapt_mha_config *c = call->config;
    attn_problem *p = &call->problem;
    rapt_status status = rapt_check_tensor(call->context, "key", call->key);
    if (status == RAPT_OK) status = rapt_check_tensor(call->context, "value", call->value);
    if (status != RAPT_OK) return status;
    call->query = call->key; /* whose rank and batch the others must have */
    call->batched = call->key->ndim == 3;
    if (call->key->ndim == 2 || call->key->ndim == 3) layout_view(call, call->key, &p->batch, &p->queries);
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
    call->projects[1] = call->projects[2] = true;
    mha_scratch scratch;
    status = reserve(call, false, &scratch);
    if (status != RAPT_OK) return status;
    mha_products products = plan_products(call, &scratch);
    for (int i = 0; i < products.count; i++) {
        call->context->backend->linear(call->context, &products.linear[i], scratch.stage);
    }
    attend(call, &scratch);
    return RAPT_OK;
}

rapt_status rapt_mha_append(rapt_context *context, const rapt_mha *layer, const rapt_tensor *key,
                            const rapt_tensor *value, rapt_cache *cache, const int64_t *lengths) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    if (layer == NULL) return rapt_leave(context, &gate, rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL"));
    if (cache == NULL) return rapt_leave(context, &gate, rapt_fail(context, RAPT_ERROR_NULL, "cache is NULL"));
    mha_call call = {.context = context,
                     .config = &layer->config,
                     .parts = layer->parts,
                     .key = key,
                     .value = value,
                     .options = {.cache = cache},
                     .append = {.lengths = lengths}};
    status = append_keys(&call);
    if (call.holds_cache) rapt_cache_end(cache);
    return rapt_leave(context, &gate, status);
}
