/* mha.c - the forward of the layer and its functional form: project, attend, project
 *
 * Everything is checked (mha_call.c) and all scratch memory reserved before the first byte of a result is written, so a
 * call that fails has changed nothing.
 */
#include "mha.h"

#include <math.h>

typedef long long ll; /* for printf */

/* ---- the steps ---- */

static linear_problem start_linear(const mha_call *call, const rapt_tensor *x) {
    linear_problem linear = {.dtype = call->config->dtype};
    linear.x = rapt_mha_layout_view(call->config, x, &linear.batch, &linear.length);
    linear.features = x->shape[x->ndim - 1];
    return linear;
}

static void add_part(linear_problem *linear, const mha_projection *projection, rapt_rows y) {
    linear->part[linear->parts++] = (linear_part){.features = projection->weight.shape[0],
                                                  .weight = projection->weight,
                                                  .bias = projection->bias,
                                                  .packed = projection->packed,
                                                  .y = y};
}

/* Memory between the steps. */
typedef struct mha_scratch {
    mha_heads q, attended; /* H heads of L rows a sequence */
    mha_heads k, v;        /* Hk heads of key_rows */
    char *lse;             /* [N, H, L] in f64, with a state, whose memory all of these then are */
    void *rotary;          /* of rapt_rotate_rows */
    int64_t *padding;      /* [N], for that */
    void *stage;           /* of the backend, for one step at a time */
} mha_scratch;

/* The products of a forward. Inputs that are one tensor share one: self-attention needs a single product. */
typedef struct mha_products {
    int count;
    linear_problem linear[4]; /* the last is the output projection */
} mha_products;

static mha_products plan_products(const mha_call *call, const mha_scratch *scratch) {
    const attn_problem *p = &call->problem;
    const rapt_tensor *input[3] = {call->query, call->key, call->value};
    const mha_projection *projection[3] = {&call->parts.q, &call->parts.k, &call->parts.v};
    const mha_heads *heads[3] = {&scratch->q, &scratch->k, &scratch->v};

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
        add_part(linear, projection[i], rapt_mha_rows_view(heads[i]));
    }
    if (call->out == NULL) return products;
    linear_problem *out = &products.linear[products.count++];
    *out = (linear_problem){.dtype = p->dtype,
                            .batch = p->batch,
                            .length = p->queries,
                            .features = p->heads * p->dim,
                            .x = rapt_mha_rows_view(&scratch->attended)};
    int64_t batch, length;
    add_part(out, &call->parts.out, rapt_mha_layout_view(call->config, call->out, &batch, &length));
    return products;
}

void rapt_mha_set_extra(const mha_parts *parts, attn_problem *p) {
    rapt_view extra = {.stride = {0, p->extra_keys * p->dim, p->dim, 1}};
    p->extra_k = p->extra_v = extra;
    p->extra_k.data = parts->extra_k;
    p->extra_v.data = parts->extra_v;
}

/* A single key is what a lone query attends to, whatever the scores: its value is the result. */
static void repeat_value(const mha_call *call, const mha_heads *v, const mha_heads *attended) {
    const attn_problem *p = &call->problem;
    int64_t element = (int64_t)rapt_dtype_size(p->dtype), group = p->heads / p->kv_heads;
    for (int64_t n = 0; n < p->batch; n++) {
        for (int64_t h = 0; h < p->heads; h++) {
            memcpy(attended->data + element * (n * attended->row_stride + h * attended->head_stride),
                   v->data + element * (n * v->row_stride + h / group * v->head_stride), (size_t)(element * p->dim));
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
           o->lse == NULL && o->static_k == NULL && o->cache == NULL && o->state == NULL && p->dropout == 0;
}

/* Backends are not asked for nothing. */
static bool has_queries(const attn_problem *p) { return p->batch > 0 && p->queries > 0; }
static bool has_rows(const linear_problem *linear) { return linear->batch > 0 && linear->length > 0; }

/* ---- scratch memory ---- */

size_t rapt_mha_rows_bytes(const attn_problem *p, rapt_dtype dtype, int64_t length, int64_t features) {
    size_t rows = rapt_size_mul((size_t)p->batch, (size_t)length);
    return rapt_size_mul(rows, rapt_size_mul((size_t)features, rapt_dtype_size(dtype)));
}

bool rapt_mha_makes_extra(const rapt_context *context, const attn_problem *p, const mha_parts *parts) {
    return p->extra_keys > 0 && (parts->extra_k == NULL || !context->backend->reads_packed_weights);
}

static void place_heads(const mha_call *call, char *q, char *k, char *v, char *attended, mha_scratch *scratch) {
    const attn_problem *p = &call->problem;
    scratch->q = rapt_mha_heads(p, p->dtype, q, p->queries, p->heads);
    scratch->k = rapt_mha_heads(p, p->dtype, k, call->key_rows, p->kv_heads);
    scratch->v = rapt_mha_heads(p, p->dtype, v, call->key_rows, p->kv_heads);
    scratch->attended = rapt_mha_heads(p, p->dtype, attended, p->queries, p->heads);
}

static size_t packed_bytes(const mha_projection *projection) {
    return rapt_linear_packed_size(projection->weight.dtype, projection->weight.shape[0], projection->weight.shape[1]);
}

/* What the backend needs for its largest step. */
static size_t stage_bytes(const mha_call *call, bool attends) {
    const rapt_backend_table *backend = call->context->backend;
    size_t most = attends && has_queries(&call->problem) ? backend->attn_scratch(call->context, &call->problem) : 0;
    mha_scratch nowhere = {0};
    place_heads(call, NULL, NULL, NULL, NULL, &nowhere);
    mha_products products = plan_products(call, &nowhere);
    for (int i = 0; i < products.count; i++) {
        const linear_problem *linear = &products.linear[i];
        size_t bytes = has_rows(linear) ? backend->linear_scratch(call->context, linear) : 0;
        if (bytes > most) most = bytes;
    }
    return most;
}

/* A layer comes with its weights packed; those of a functional call are packed here, into scratch memory. What a state
 * keeps is in the state's memory instead. */
static rapt_status reserve(mha_call *call, bool attends, mha_scratch *scratch) {
    rapt_context *context = call->context;
    const attn_problem *p = &call->problem;
    mha_parts *parts = &call->parts;
    rapt_mha_state *state = call->options.state;
    bool packs = context->backend->reads_packed_weights && parts->out.packed == NULL;
    bool makes_extra = rapt_mha_makes_extra(context, p, parts);
    mha_projection *packed[4] = {call->projects[0] ? &parts->q : NULL, call->projects[1] ? &parts->k : NULL,
                                 call->projects[2] ? &parts->v : NULL, call->out != NULL ? &parts->out : NULL};

    size_t q = rapt_mha_rows_bytes(p, p->dtype, p->queries, p->heads * p->dim);
    size_t k = call->projects[2] ? rapt_mha_rows_bytes(p, p->dtype, call->key_rows, p->kv_heads * p->dim) : 0;
    size_t lse = state != NULL ? (size_t)(p->batch * p->heads * p->queries) * sizeof(double) : 0;
    size_t kept = 0, total = 0;
    const size_t kept_sizes[] = {q, q, k, k, lse};
    for (size_t i = 0; i < sizeof kept_sizes / sizeof *kept_sizes; i++) {
        kept = rapt_size_add(kept, rapt_arena_size(kept_sizes[i]));
    }
    size_t extra = makes_extra ? rapt_mha_extra_bytes(call->config) : 0, stage = stage_bytes(call, attends);
    size_t rotary = call->options.rotary != NULL ? rapt_rotary_scratch(context, p->dim) : 0;
    size_t padding = rotary > 0 ? rapt_size_mul(sizeof(int64_t), (size_t)p->batch) : 0;
    const size_t sizes[] = {extra, extra, stage, rotary, padding, state == NULL ? kept : 0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) total = rapt_size_add(total, rapt_arena_size(sizes[i]));
    for (int i = 0; packs && i < 4; i++) {
        if (packed[i] != NULL) total = rapt_size_add(total, rapt_arena_size(packed_bytes(packed[i])));
    }
    rapt_arena *arena = &context->arena, *keeps = arena;
    if (!rapt_arena_reserve(arena, &context->allocator, total)) return rapt_fail_memory(context, total);
    if (state != NULL) {
        keeps = &state->memory;
        if (!rapt_arena_reserve(keeps, &state->allocator, kept)) return rapt_fail_memory(context, kept);
        keeps->used = 0;
    }

    char *q_data = rapt_arena_take(keeps, q), *attended = rapt_arena_take(keeps, q);
    char *k_data = rapt_arena_take(keeps, k), *v_data = rapt_arena_take(keeps, k);
    place_heads(call, q_data, k_data, v_data, attended, scratch);
    scratch->lse = rapt_arena_take(keeps, lse);
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

rotary_rows rapt_mha_rotary_rows(const attn_problem *p, rapt_dtype dtype, const rapt_rotary *rotary, int64_t *padding) {
    for (int64_t n = 0; n < p->batch; n++) padding[n] = p->cache != NULL ? 0 : first_real_key(p, n);
    return (rotary_rows){.dtype = dtype,
                         .dim = p->dim,
                         .batch = p->batch,
                         .positions = rotary->positions,
                         .padding = padding,
                         .q = {.first = p->offsets, .first_of_all = p->offset}};
}

/* Turns projected queries and keys by their positions: the caller's, those after the cache's, or counted from a sequence's
 * first real key, where a query stands by the band's offset. */
static void turn(const mha_call *call, const mha_scratch *scratch) {
    const attn_problem *p = &call->problem;
    if (call->options.rotary == NULL) return;
    rotary_rows rows = rapt_mha_rotary_rows(p, p->dtype, call->options.rotary, scratch->padding);
    rapt_mha_turn_heads(&scratch->q, &rows.q);
    if (call->projects[1]) {
        rapt_mha_turn_heads(&scratch->k, &rows.k);
        rows.k.first = p->cache != NULL ? p->offsets : NULL;
    }
    rapt_rotate_rows(call->context, call->options.rotary, &rows, scratch->rotary);
}

/* The problem with everything in its place. */
static attn_problem place(const mha_call *call, const mha_scratch *scratch) {
    attn_problem p = call->problem;
    p.q = rapt_mha_heads_view(&scratch->q);
    p.out = rapt_mha_heads_view(&scratch->attended);
    if (call->options.static_k == NULL) {
        p.k = rapt_mha_heads_view(&scratch->k);
        p.v = rapt_mha_heads_view(&scratch->v);
    }
    rapt_mha_set_extra(&call->parts, &p);
    if (call->options.state != NULL) {
        p.lse = (rapt_view){.data = scratch->lse, .stride = {p.heads * p.queries, p.queries, 1}};
        p.lse_dtype = RAPT_F64;
    }
    return p;
}

static void attend(const mha_call *call, attn_problem *p, void *stage) {
    if (call->options.cache != NULL) {
        rapt_view k = p->k, v = p->v;
        p->k = p->v = (rapt_view){0}; /* the cache has them */
        rapt_cache_attend(call->context, call->options.cache, &call->append, &k, &v, p, stage);
    } else if (has_queries(p)) {
        call->context->backend->attn_forward(call->context, p, stage);
    }
}

/* Output rows of tokens that are none. */
static void blank_padding(const mha_call *call) {
    const int64_t *lengths = call->options.append_lengths;
    int64_t batch, length;
    rapt_rows out = rapt_mha_layout_view(call->config, call->out, &batch, &length);
    for (int64_t n = 0; n < batch && lengths != NULL; n++) {
        for (int64_t i = lengths[n]; i < length; i++) {
            for (int64_t e = 0; e < call->config->embed_dim; e++) {
                int64_t at = n * out.stride[0] + i * out.stride[1] + e * out.stride[2];
                rapt_store(out.data, call->config->dtype, at, 0);
            }
        }
    }
}

static void project(const mha_call *call, const linear_problem *linear, void *stage) {
    if (has_rows(linear)) call->context->backend->linear(call->context, linear, stage);
}

static rapt_status compute(mha_call *call) {
    bool short_way = takes_short_way(call), projects_keys = call->options.static_k == NULL && call->key != NULL;
    call->projects[0] = !short_way;
    call->projects[1] = !short_way && projects_keys;
    call->projects[2] = projects_keys;
    mha_scratch scratch;
    rapt_status status = reserve(call, !short_way, &scratch);
    if (status != RAPT_OK) return status;

    mha_products products = plan_products(call, &scratch);
    for (int i = 0; i < products.count - 1; i++) project(call, &products.linear[i], scratch.stage);
    if (short_way) {
        repeat_value(call, &scratch.v, &scratch.attended);
    } else {
        turn(call, &scratch);
        attn_problem p = place(call, &scratch);
        attend(call, &p, scratch.stage);
        if (call->options.state != NULL) rapt_mha_state_fill(call, &p);
    }
    project(call, &products.linear[products.count - 1], scratch.stage);
    blank_padding(call);
    return RAPT_OK;
}

static rapt_status forward(mha_call *call, bool default_training) {
    rapt_mode mode = call->options.mode;
    rapt_status status =
        rapt_mha_check_call(call, mode == RAPT_MODE_DEFAULT ? default_training : mode == RAPT_MODE_TRAIN);
    if (status == RAPT_OK && (has_queries(&call->problem) || call->options.state != NULL)) status = compute(call);
    if (status == RAPT_OK) rapt_advance_dropout(call->context, &call->options, &call->problem);
    if (call->holds_cache) rapt_cache_end(call->options.cache);
    return status;
}

/* ---- public entries ---- */

static rapt_status layer_forward(rapt_context *context, const rapt_mha *layer, const rapt_tensor *query,
                                 const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                                 const rapt_tensor *out) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    mha_call call = {.context = context,
                     .layer = layer,
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
    rapt_status status = rapt_mha_check_append(call);
    if (status != RAPT_OK) return status;
    call->projects[1] = call->projects[2] = true;
    mha_scratch scratch;
    status = reserve(call, false, &scratch);
    if (status != RAPT_OK) return status;
    mha_products products = plan_products(call, &scratch);
    for (int i = 0; i < products.count; i++) {
        call->context->backend->linear(call->context, &products.linear[i], scratch.stage);
    }
    attn_problem p = place(call, &scratch);
    attend(call, &p, scratch.stage);
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
