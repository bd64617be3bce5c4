/* mha_backward.c - the backward of the layer and its functional form: the forward's steps in reverse
 *
 *     d_attended          = d_out * out_proj.weight
 *     dq, dk, dv          = the operator's backward, then rotary positions turned back
 *     dx                  = dq * q_proj.weight, and so on; those of one tensor are summed: query, key, value
 *     parameters          = d_y^T * x for each projection
 *
 * Only what somebody wants is computed. Everything is checked (mha_backward_call.c) and all scratch memory reserved
 * before the first byte of a gradient is written, so a call that fails has changed nothing.
 */
#include "mha.h"

enum { QUERY, KEY, VALUE };

/* Memory between the steps. Gradients are of the accumulation type there: those of bf16 and f16 are rounded once, at the
 * end. */
typedef struct backward_scratch {
    char *d_attended;        /* H heads of L rows a sequence */
    char *d_heads[3];        /* dq, dk, dv: H heads of L rows, Hk of S; joint ones are all in the first */
    char *extra_k, *extra_v; /* [N, Hk, extra, D] */
    void *rotary;            /* of rapt_rotate_rows */
    int64_t *padding;        /* [N], for that */
    void *stage;             /* of the backend, for one step at a time */
} backward_scratch;

typedef struct backward_plan {
    bool wanted[3];     /* dq, dk and dv in scratch memory */
    bool is_joint;      /* they are the heads of one buffer of H + 2 Hk: self-attention */
    int64_t heads[3];   /* H, Hk, Hk */
    int64_t length[3];  /* rows of a sequence: L, S, S */
    bool attends;       /* anything beyond the output projection is wanted */
    bool adds_directly; /* the operator's backward adds to what the caller has */
    bool hides;         /* rows may be hidden from everyone */
    attn_problem problem;
    attn_gradients attention;
    linear_gradients output;
    int count; /* of the input projections' products: first for inputs, then for parameters */
    linear_gradients input[6];
} backward_plan;

/* ---- zeros ---- */

static const mha_projection *projection_of(const mha_parts *parts, int i) {
    return i == QUERY ? &parts->q : i == KEY ? &parts->k : &parts->v;
}

/* Where nothing reaches: an input whose projection the forward did not compute. */
static void clear_projection(const mha_backward *b, int i) {
    const mha_projection *parameters = projection_of(&b->parameters, i);
    if (b->accumulate) return;
    rapt_set_to_zero(&b->inputs[i]);
    rapt_set_to_zero(&parameters->weight);
    rapt_set_to_zero(&parameters->bias);
}

static void clear_view(const mha_backward *b, const rapt_view *view, const int64_t shape[4]) {
    rapt_tensor tensor = rapt_tensor_strided(view->data, b->state->problem.dtype, 4, shape, view->stride);
    rapt_set_to_zero(&tensor);
}

static void clear_mask(const mask_gradient *mask, int64_t keys) {
    int64_t shape[4] = {mask->size[0], mask->size[1], mask->size[2], keys};
    rapt_tensor tensor = rapt_tensor_strided(mask->data, mask->dtype, 4, shape, mask->stride);
    rapt_set_to_zero(&tensor);
}

/* No query, no gradient: all of them are zero. */
static void clear_all(const mha_backward *b) {
    const attn_problem *p = &b->state->problem;
    int64_t keys[4] = {p->batch, p->kv_heads, p->keys, p->dim};
    for (int i = 0; i < 3; i++) clear_projection(b, i);
    if (b->accumulate) return;
    rapt_set_to_zero(&b->parameters.out.weight);
    rapt_set_to_zero(&b->parameters.out.bias);
    rapt_set_to_zero(&b->parameters.bias_k);
    rapt_set_to_zero(&b->parameters.bias_v);
    clear_view(b, &b->attention.k, keys);
    clear_view(b, &b->attention.v, keys);
    clear_mask(&b->attention.mask, p->keys);
    clear_mask(&b->attention.padding, p->keys);
}

/* ---- the plan ---- */

static bool is_wanted(const mha_backward *b, int i) {
    const mha_projection *parameters = projection_of(&b->parameters, i);
    bool is_computed = i == QUERY || b->state->projects_keys;
    return is_computed &&
           (b->inputs[i].data != NULL || parameters->weight.data != NULL || parameters->bias.data != NULL);
}

static const rapt_tensor *input_of(const rapt_mha_state *state, int i) {
    return i == QUERY ? &state->query : i == KEY ? &state->key : &state->value;
}

/* How large everything is, and which of it there is. */
static backward_plan start_plan(const mha_backward *b) {
    const rapt_mha_state *s = b->state;
    const attn_problem *p = &s->problem;
    const attn_gradients *g = &b->attention;
    backward_plan plan = {.heads = {p->heads, p->kv_heads, p->kv_heads}, .length = {p->queries, p->keys, p->keys}};
    bool all = true;
    for (int i = 0; i < 3; i++) {
        plan.wanted[i] = is_wanted(b, i);
        plan.attends |= plan.wanted[i];
        all &= plan.wanted[i];
    }
    plan.is_joint = all && rapt_same_view(&s->query, &s->key) && rapt_same_view(&s->query, &s->value);
    bool is_direct = g->k.data != NULL || g->v.data != NULL || g->mask.data != NULL || g->padding.data != NULL;
    plan.attends |= is_direct || b->parameters.bias_k.data != NULL || b->parameters.bias_v.data != NULL;
    plan.adds_directly = is_direct && b->accumulate;
    plan.hides = p->mask.data != NULL || p->padding.data != NULL || p->key_start != NULL || p->key_lengths != NULL ||
                 p->limit_left || p->limit_right;
    return plan;
}

static int64_t all_heads(const attn_problem *p) { return p->heads + 2 * p->kv_heads; }

static mha_heads d_attended(const attn_problem *p, const backward_scratch *scratch) {
    return rapt_mha_heads(p, rapt_accumulation_dtype(p->dtype), scratch->d_attended, p->queries, p->heads);
}

/* dq, dk or dv. */
static mha_heads d_heads(const mha_backward *b, const backward_scratch *scratch, const backward_plan *plan, int i) {
    const attn_problem *p = &b->state->problem;
    rapt_dtype dtype = rapt_accumulation_dtype(p->dtype);
    if (!plan->is_joint) return rapt_mha_heads(p, dtype, scratch->d_heads[i], plan->length[i], plan->heads[i]);
    mha_heads all = rapt_mha_heads(p, dtype, scratch->d_heads[QUERY], p->queries, all_heads(p));
    int64_t first = i == QUERY ? 0 : i == KEY ? p->heads : p->heads + p->kv_heads;
    return rapt_mha_some_heads(all, first, plan->heads[i]);
}

static void plan_output(const mha_backward *b, const backward_scratch *scratch, backward_plan *plan) {
    const attn_problem *p = &b->state->problem;
    mha_heads attended = rapt_mha_heads(p, p->dtype, p->out.data, p->queries, p->heads);
    linear_gradients *output = &plan->output;
    *output = (linear_gradients){.dtype = p->dtype,
                                 .features_in = p->heads * p->dim,
                                 .features_out = b->state->config.embed_dim,
                                 .x = rapt_mha_rows_view(&attended),
                                 .weight = b->parts.out.weight,
                                 .d_weight = b->parameters.out.weight,
                                 .d_bias = b->parameters.out.bias,
                                 .adds_parameters = b->accumulate};
    output->dy = rapt_mha_layout_view(&b->state->config, &b->d_out, &output->batch, &output->length);
    mha_heads dx = d_attended(p, scratch);
    if (plan->attends) output->dx = rapt_mha_rows_view(&dx);
}

static void plan_attention(const mha_backward *b, const backward_scratch *scratch, backward_plan *plan) {
    const attn_problem *p = &plan->problem;
    plan->problem = b->state->problem;
    rapt_mha_set_extra(&b->parts, &plan->problem);
    attn_gradients *g = &plan->attention;
    *g = b->attention; /* static keys and values, masks, d_weights */
    g->accumulate = plan->adds_directly;
    mha_heads d_out = d_attended(p, scratch);
    g->out = rapt_mha_heads_view(&d_out);
    g->out_dtype = d_out.dtype;
    rapt_view *views[3] = {&g->q, &g->k, &g->v};
    rapt_dtype *dtypes[3] = {&g->q_dtype, &g->k_dtype, &g->v_dtype};
    for (int i = 0; i < 3; i++) {
        mha_heads heads = d_heads(b, scratch, plan, i);
        if (plan->wanted[i]) *views[i] = rapt_mha_heads_view(&heads);
        *dtypes[i] = plan->wanted[i] ? heads.dtype : p->dtype;
    }
    rapt_view extra = {.stride = {p->kv_heads * p->extra_keys * p->dim, p->extra_keys * p->dim, p->dim, 1}};
    g->extra_k = g->extra_v = extra;
    if (b->parameters.bias_k.data != NULL) g->extra_k.data = scratch->extra_k;
    if (b->parameters.bias_v.data != NULL) g->extra_v.data = scratch->extra_v;
}

/* One input's projection, or that of all, whose weights are rows of one; what of its gradients is wanted is filled in by
 * the caller. */
static linear_gradients start_input(const mha_backward *b, const backward_scratch *scratch, const backward_plan *plan,
                                    int i, bool is_one) {
    const rapt_mha_state *s = b->state;
    const rapt_tensor *x = input_of(s, i);
    mha_heads dy = d_heads(b, scratch, plan, i);
    if (is_one) dy.heads = all_heads(&s->problem);
    linear_gradients linear = {.dtype = s->config.dtype,
                               .features_in = x->shape[x->ndim - 1],
                               .features_out = dy.heads * dy.dim,
                               .dy = rapt_mha_rows_view(&dy),
                               .weight = projection_of(&b->parts, i)->weight};
    linear.weight.shape[0] = linear.features_out;
    linear.x = rapt_mha_layout_view(&s->config, x, &linear.batch, &linear.length);
    return linear;
}

/* Whether the rows of b lie behind those of a, as in a fused weight. Two that are absent do. */
static bool follows(const rapt_tensor *a, const rapt_tensor *b) {
    if (a->data == NULL || b->data == NULL) return a->data == b->data;
    bool same = a->ndim == b->ndim && a->stride[0] == b->stride[0];
    if (same && a->ndim == 2) same = a->stride[1] == b->stride[1] && a->shape[1] == b->shape[1];
    int64_t bytes = a->shape[0] * a->stride[0] * (int64_t)rapt_dtype_size(a->dtype);
    return same && (uintptr_t)a->data + (uintptr_t)bytes == (uintptr_t)b->data;
}
static bool are_rows_of_one(const rapt_tensor *q, const rapt_tensor *k, const rapt_tensor *v) {
    return follows(q, k) && follows(k, v);
}

/* dx of the inputs. Self-attention with a fused weight is one product: its sums are then over all three projections. */
static void plan_inputs(const mha_backward *b, const backward_scratch *scratch, backward_plan *plan) {
    const rapt_tensor *dx = b->inputs;
    const mha_parts *w = &b->parts;
    bool one_result = dx[QUERY].data != NULL && dx[KEY].data != NULL && dx[VALUE].data != NULL &&
                      rapt_same_view(&dx[QUERY], &dx[KEY]) && rapt_same_view(&dx[QUERY], &dx[VALUE]);
    bool is_one = plan->is_joint && one_result && are_rows_of_one(&w->q.weight, &w->k.weight, &w->v.weight);
    for (int i = 0; i < (is_one ? 1 : 3); i++) {
        if (!plan->wanted[i] || dx[i].data == NULL) continue;
        linear_gradients *linear = &plan->input[plan->count++];
        *linear = start_input(b, scratch, plan, i, is_one);
        linear->dx = rapt_mha_layout_view(&b->state->config, &dx[i], &linear->batch, &linear->length);
        linear->adds_dx = b->accumulate;
        for (int earlier = 0; earlier < i; earlier++) {
            if (dx[earlier].data != NULL && rapt_same_view(&dx[earlier], &dx[i])) linear->adds_dx = true;
        }
    }
}

/* Parameters of the input projections: one product where x is one and the gradients are rows of one tensor, too. */
static void plan_parameters(const mha_backward *b, const backward_scratch *scratch, backward_plan *plan) {
    const mha_parts *d = &b->parameters;
    bool is_one = plan->is_joint && are_rows_of_one(&d->q.weight, &d->k.weight, &d->v.weight) &&
                  are_rows_of_one(&d->q.bias, &d->k.bias, &d->v.bias);
    for (int i = 0; i < (is_one ? 1 : 3); i++) {
        const mha_projection *parameters = projection_of(d, i);
        if (!plan->wanted[i] || (parameters->weight.data == NULL && parameters->bias.data == NULL)) continue;
        linear_gradients *linear = &plan->input[plan->count++];
        *linear = start_input(b, scratch, plan, i, is_one);
        linear->d_weight = parameters->weight;
        linear->d_bias = parameters->bias;
        linear->adds_parameters = b->accumulate;
        linear->hides_rows = plan->hides;
        linear->d_weight.shape[0] = linear->d_bias.shape[0] = linear->features_out;
    }
}

/* Needs the scratch memory's addresses only to put them into views. */
static void finish_plan(const mha_backward *b, const backward_scratch *scratch, backward_plan *plan) {
    plan->count = 0;
    plan_output(b, scratch, plan);
    plan_attention(b, scratch, plan);
    plan_inputs(b, scratch, plan);
    plan_parameters(b, scratch, plan);
}

/* Backends are not asked for nothing. */
static bool has_keys(const attn_problem *p) { return p->keys + p->extra_keys > 0; }
static bool has_rows(const linear_gradients *linear) { return linear->batch > 0 && linear->length > 0; }

/* ---- scratch memory ---- */

/* What the backend needs for its largest step. */
static size_t stage_bytes(const mha_backward *b, const backward_plan *plan) {
    const rapt_backend_table *backend = b->context->backend;
    size_t most = backend->linear_backward_scratch(b->context, &plan->output);
    if (plan->attends && has_keys(&plan->problem)) {
        size_t bytes = backend->attn_backward_scratch(b->context, &plan->problem, &plan->attention);
        if (bytes > most) most = bytes;
    }
    for (int i = 0; i < plan->count; i++) {
        if (!has_rows(&plan->input[i])) continue;
        size_t bytes = backend->linear_backward_scratch(b->context, &plan->input[i]);
        if (bytes > most) most = bytes;
    }
    return most;
}

static rapt_status reserve(mha_backward *b, backward_plan *plan, backward_scratch *scratch) {
    rapt_context *context = b->context;
    const attn_problem *p = &b->state->problem;
    const rapt_rotary *rotary = b->state->options.rotary;
    mha_parts *parts = &b->parts;
    bool makes_extra = plan->attends && rapt_mha_makes_extra(context, p, parts);

    rapt_dtype dtype = rapt_accumulation_dtype(p->dtype);
    size_t attended = plan->attends ? rapt_mha_rows_bytes(p, dtype, p->queries, p->heads * p->dim) : 0, heads[3] = {0};
    for (int i = 0; i < 3; i++) {
        bool has_own = plan->wanted[i] && (i == QUERY || !plan->is_joint);
        int64_t count = plan->is_joint ? all_heads(p) : plan->heads[i];
        if (has_own) heads[i] = rapt_mha_rows_bytes(p, dtype, plan->length[i], count * p->dim);
    }
    size_t extra_sums = rapt_size_mul((size_t)p->batch, (size_t)(p->kv_heads * p->extra_keys * p->dim));
    extra_sums = rapt_size_mul(extra_sums, rapt_accumulation_size(p->dtype));
    size_t extra_k = b->parameters.bias_k.data != NULL ? extra_sums : 0;
    size_t extra_v = b->parameters.bias_v.data != NULL ? extra_sums : 0;
    size_t extra = makes_extra ? rapt_mha_extra_bytes(&b->state->config) : 0;
    size_t turns = rotary != NULL ? rapt_rotary_scratch(context, p->dim) : 0;
    size_t padding = rotary != NULL ? rapt_size_mul(sizeof(int64_t), (size_t)p->batch) : 0;

    /* A plan with any address tells the backend what there is to do. */
    char *anywhere = (char *)scratch;
    *scratch = (backward_scratch){
        .d_attended = anywhere, .d_heads = {anywhere, anywhere, anywhere}, .extra_k = anywhere, .extra_v = anywhere};
    finish_plan(b, scratch, plan);
    size_t stage = stage_bytes(b, plan), total = 0;
    const size_t sizes[] = {attended, heads[0], heads[1], heads[2], extra_k, extra_v,
                            extra,    extra,    turns,    padding,  stage};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) total = rapt_size_add(total, rapt_arena_size(sizes[i]));
    rapt_arena *arena = &context->arena;
    if (!rapt_arena_reserve(arena, &context->allocator, total)) return rapt_fail_memory(context, total);

    scratch->d_attended = rapt_arena_take(arena, attended);
    for (int i = 0; i < 3; i++) scratch->d_heads[i] = rapt_arena_take(arena, heads[i]);
    scratch->extra_k = rapt_arena_take(arena, extra_k);
    scratch->extra_v = rapt_arena_take(arena, extra_v);
    scratch->rotary = rapt_arena_take(arena, turns);
    scratch->padding = rapt_arena_take(arena, padding);
    scratch->stage = rapt_arena_take(arena, stage);
    if (makes_extra) {
        parts->extra_k = rapt_arena_take(arena, extra);
        parts->extra_v = rapt_arena_take(arena, extra);
        rapt_mha_fill_extra(&b->state->config, &parts->bias_k, parts->extra_k);
        rapt_mha_fill_extra(&b->state->config, &parts->bias_v, parts->extra_v);
    }
    for (int i = 0; i < 3; i++) { /* what is added to, or what nobody writes */
        if (plan->adds_directly || !has_keys(p)) memset(scratch->d_heads[i], 0, heads[i]);
    }
    finish_plan(b, scratch, plan);
    return RAPT_OK;
}

/* ---- the steps ---- */

/* The gradient of the query heads and of the key heads by what they were before rotary positions turned them. */
static void turn_back(const mha_backward *b, const backward_plan *plan, const backward_scratch *scratch) {
    const rapt_rotary *rotary = b->state->options.rotary;
    if (rotary == NULL || (!plan->wanted[QUERY] && !plan->wanted[KEY])) return;
    const attn_problem *p = &b->state->problem;
    rotary_rows rows = rapt_mha_rotary_rows(p, rapt_accumulation_dtype(p->dtype), rotary, scratch->padding);
    rows.backward = true;
    mha_heads q = d_heads(b, scratch, plan, QUERY), k = d_heads(b, scratch, plan, KEY);
    if (plan->wanted[QUERY]) rapt_mha_turn_heads(&q, &rows.q);
    if (plan->wanted[KEY]) rapt_mha_turn_heads(&k, &rows.k);
    rapt_rotate_rows(b->context, rotary, &rows, scratch->rotary);
}

/* The learned key or value is the first of the extra ones, the same for every sequence: the sum over n, ascending. */
static void sum_extra(const mha_backward *b, const char *sums, const rapt_tensor *gradient) {
    const attn_problem *p = &b->state->problem;
    rapt_dtype type = rapt_accumulation_dtype(p->dtype);
    for (int64_t i = 0; gradient->data != NULL && i < gradient->shape[0]; i++) {
        int64_t head = i / p->dim, at = i * gradient->stride[0];
        double total = 0;
        for (int64_t n = 0; n <= p->batch; n++) { /* last comes what the caller has there */
            if (n == p->batch && !b->accumulate) break;
            double next = n < p->batch
                              ? rapt_load(sums, type, ((n * p->kv_heads + head) * p->extra_keys) * p->dim + i % p->dim)
                              : rapt_load(gradient->data, gradient->dtype, at);
            total = type == RAPT_F64 ? total + next : (double)((float)total + (float)next);
        }
        rapt_store(gradient->data, gradient->dtype, at, total);
    }
}

static void run_linear(const mha_backward *b, const linear_gradients *linear, void *stage) {
    if (has_rows(linear)) {
        b->context->backend->linear_backward(b->context, linear, stage);
    } else if (!linear->adds_parameters) { /* sums over no rows */
        rapt_set_to_zero(&linear->d_weight);
        rapt_set_to_zero(&linear->d_bias);
    }
}

static rapt_status compute(mha_backward *b) {
    const attn_problem *p = &b->state->problem;
    if (p->batch == 0 || p->queries == 0) {
        clear_all(b);
        return RAPT_OK;
    }
    backward_plan plan = start_plan(b);
    backward_scratch scratch;
    rapt_status status = reserve(b, &plan, &scratch);
    if (status != RAPT_OK) return status;

    if (!b->state->projects_keys) {
        clear_projection(b, KEY);
        clear_projection(b, VALUE);
    }
    const linear_gradients *output = &plan.output;
    if (output->dx.data != NULL || output->d_weight.data != NULL || output->d_bias.data != NULL) {
        run_linear(b, output, scratch.stage);
    }
    if (plan.attends && has_keys(p)) {
        b->context->backend->attn_backward(b->context, &plan.problem, &plan.attention, scratch.stage);
    }
    turn_back(b, &plan, &scratch);
    sum_extra(b, scratch.extra_k, &b->parameters.bias_k);
    sum_extra(b, scratch.extra_v, &b->parameters.bias_v);
    for (int i = 0; i < plan.count; i++) run_linear(b, &plan.input[i], scratch.stage);
    return RAPT_OK;
}

/* ---- public entries ---- */

static rapt_status layer_backward(rapt_context *context, const rapt_mha *layer, const rapt_mha_state *state,
                                  const rapt_tensor *d_out, const rapt_tensor *d_weights,
                                  const rapt_mha_gradients *gradients) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    mha_backward backward = {.context = context, .state = state, .parts = layer->parts};
    rapt_status status = rapt_mha_check_backward(layer, &layer->config, d_out, d_weights, gradients, &backward);
    return status == RAPT_OK ? compute(&backward) : status;
}

rapt_status rapt_mha_backward(rapt_context *context, const rapt_mha *layer, const rapt_mha_state *state,
                              const rapt_tensor *d_out, const rapt_tensor *d_weights,
                              const rapt_mha_gradients *gradients) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, layer_backward(context, layer, state, d_out, d_weights, gradients));
}

static rapt_status functional_backward(rapt_context *context, const rapt_mha_weights *weights,
                                       const rapt_mha_state *state, const rapt_tensor *d_out,
                                       const rapt_tensor *d_weights, const rapt_mha_gradients *gradients) {
    rapt_mha_config config;
    mha_backward backward = {.context = context, .state = state};
    rapt_status status = rapt_mha_take_weights(context, weights, &config, &backward.parts);
    if (status != RAPT_OK) return status;
    status = rapt_mha_check_backward(NULL, &config, d_out, d_weights, gradients, &backward);
    return status == RAPT_OK ? compute(&backward) : status;
}

rapt_status rapt_mha_functional_backward(rapt_context *context, const rapt_mha_weights *weights,
                                         const rapt_mha_state *state, const rapt_tensor *d_out,
                                         const rapt_tensor *d_weights, const rapt_mha_gradients *gradients) {
    rapt_call gate;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, functional_backward(context, weights, state, d_out, d_weights, gradients));
}
