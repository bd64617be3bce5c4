/* mha_state.c - what a forward of the layer keeps for its backward
 *
 * Projections, attended values and log-sum-exp are computed right in the state's memory. Everything else that the
 * backward reads is the caller's: inputs, masks and arrays, of which only the descriptions are copied.
 */
#include "mha.h"

/* ---- filling ---- */

rapt_tensor rapt_mha_state_bytes(const rapt_mha_state *state) {
    int64_t capacity = (int64_t)state->memory.capacity;
    return rapt_tensor_of(state->memory.base, RAPT_BOOL, 1, &capacity);
}

static rapt_tensor tensor_of_heads(const attn_problem *p, const rapt_view *view, int64_t heads, int64_t length) {
    return rapt_tensor_strided(view->data, p->dtype, 4, (int64_t[]){p->batch, heads, length, p->dim}, view->stride);
}

/* A copy of the description of a tensor that may be absent. */
static const rapt_tensor *keep(const rapt_tensor *tensor, rapt_tensor *copy) {
    if (tensor == NULL) return NULL;
    *copy = *tensor;
    return copy;
}

static void copy_lse(const rapt_tensor *saved, const rapt_tensor *wanted) {
    rapt_tensor from = *saved; /* [N,H,L], or [H,L] of a single sequence */
    for (int32_t d = 0; wanted->ndim == 2 && d < 2; d++) {
        from.shape[d] = saved->shape[d + 1];
        from.stride[d] = saved->stride[d + 1];
    }
    from.ndim = wanted->ndim;
    rapt_copy_elements(&from, wanted);
}

void rapt_mha_state_fill(const mha_call *call, const attn_problem *p) {
    rapt_mha_state *state = call->options.state;
    rapt_mha_saved *saved = &state->saved;
    saved->query = tensor_of_heads(p, &p->q, p->heads, p->queries);
    saved->key = tensor_of_heads(p, &p->k, p->kv_heads, p->keys);
    saved->value = tensor_of_heads(p, &p->v, p->kv_heads, p->keys);
    saved->attended = tensor_of_heads(p, &p->out, p->heads, p->queries);
    saved->lse = rapt_tensor_of(p->lse.data, p->lse_dtype, 3, (int64_t[]){p->batch, p->heads, p->queries});
    saved->dropout = p->dropout;
    saved->dropout_seed = p->dropout_seed;
    saved->dropout_offset = p->dropout_offset;
    saved->version = rapt_mha_version(call->layer);
    if (call->options.lse != NULL) copy_lse(&saved->lse, call->options.lse);

    state->layer = call->layer;
    state->layer_made_at = call->layer != NULL ? call->layer->made_at : 0;
    state->config = *call->config;
    state->problem = *p;
    state->problem.extra_k = state->problem.extra_v = state->problem.weights = (rapt_view){0};
    state->returned_weights = call->options.weights != NULL;
    state->query = *call->query;
    state->has_key = keep(call->key, &state->key) != NULL;
    state->has_value = keep(call->value, &state->value) != NULL;
    state->projects_keys = call->options.static_k == NULL;

    rapt_options *o = &state->options;
    *o = call->options;
    o->attn_mask = keep(o->attn_mask, &state->attn_mask);
    o->key_padding_mask = keep(o->key_padding_mask, &state->key_padding_mask);
    o->static_k = keep(o->static_k, &state->static_k);
    o->static_v = keep(o->static_v, &state->static_v);
    if (o->rotary != NULL) {
        state->rotary = *o->rotary;
        o->rotary = &state->rotary;
    }
    o->weights = o->lse = NULL;
    o->state = NULL;
    state->is_filled = true;
}

/* ---- public entries ---- */

static rapt_status create(rapt_context *context, rapt_mha_state **result) {
    if (result == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "state is NULL");
    rapt_mha_state *state = rapt_allocate(&context->allocator, sizeof *state);
    if (state == NULL) return rapt_fail_memory(context, sizeof *state);
    memset(state, 0, sizeof *state);
    state->allocator = context->allocator;
    *result = state;
    return RAPT_OK;
}

rapt_status rapt_mha_state_create(rapt_context *context, rapt_mha_state **state) {
    rapt_call gate;
    if (state != NULL) *state = NULL;
    rapt_status status = rapt_enter(context, &gate);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &gate, create(context, state));
}

void rapt_mha_state_destroy(rapt_mha_state *state) {
    if (state == NULL) return;
    rapt_allocator allocator = state->allocator;
    rapt_release(&allocator, state->memory.base, state->memory.capacity);
    rapt_release(&allocator, state, sizeof *state);
}

const rapt_mha_saved *rapt_mha_state_saved(const rapt_mha_state *state) {
    return state != NULL && state->is_filled ? &state->saved : NULL;
}
