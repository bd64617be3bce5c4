/* attn.c - scaled dot-product attention: the public entry, and the checks that operator and layer share */
#include "cache.h"

#include <math.h>
#include <stdio.h>

typedef long long ll; /* for printf */

/* ---- masks: bool and every floating-point type, which is all there are ---- */

bool rapt_fit_attn_mask(const rapt_tensor *mask, const attn_problem *p, int64_t stride[4], int64_t size[3]) {
    rapt_tensor normalised = rapt_normalised(mask);
    const int64_t *shape = mask->shape;
    int32_t row = mask->ndim - 2; /* where L stands */
    if (mask->ndim < 2 || mask->ndim > 4) return false;
    stride[0] = stride[1] = 0;
    stride[2] = normalised.stride[row];
    stride[3] = normalised.stride[row + 1];
    size[0] = size[1] = 1;
    size[2] = shape[row];
    bool fits = (shape[row] == p->queries || (mask->ndim == 4 && shape[row] == 1)) && shape[row + 1] == p->keys;
    if (mask->ndim == 3) {
        fits = fits && shape[0] == p->batch * p->heads;
        stride[0] = p->batch > 1 ? p->heads * normalised.stride[0] : 0;
        stride[1] = normalised.stride[0];
        size[0] = p->batch;
        size[1] = p->heads;
    } else if (mask->ndim == 4) {
        fits = fits && (shape[0] == p->batch || shape[0] == 1) && (shape[1] == p->heads || shape[1] == 1);
        stride[0] = normalised.stride[0];
        stride[1] = normalised.stride[1];
        size[0] = shape[0];
        size[1] = shape[1];
    }
    return fits;
}

static rapt_status take_attn_mask(rapt_context *context, const rapt_tensor *mask, attn_problem *p) {
    rapt_status status = rapt_check_tensor(context, "attn_mask", mask);
    if (status != RAPT_OK) return status;
    attn_mask result = {.data = mask->data, .dtype = mask->dtype};
    int64_t size[3];
    if (!rapt_fit_attn_mask(mask, p, result.stride, size)) {
        char text[RAPT_SHAPE_TEXT];
        ll n = p->batch, h = p->heads, l = p->queries, s = p->keys;
        return rapt_fail(
            context, RAPT_ERROR_SHAPE,
            "attn_mask has shape %s, expected [L,S] = [%lld, %lld], [N*H,L,S] = [%lld, %lld, %lld] or [N,H,L,S] = "
            "[%lld, %lld, %lld, %lld]",
            rapt_shape_text(mask, text), l, s, n * h, l, s, n, h, l, s);
    }
    if (rapt_tensor_count(mask) > 0) p->mask = result;
    return RAPT_OK;
}

static rapt_status take_padding_mask(rapt_context *context, const rapt_tensor *mask, attn_problem *p) {
    rapt_status status = rapt_check_tensor(context, "key_padding_mask", mask);
    if (status != RAPT_OK) return status;
    rapt_tensor normalised = rapt_normalised(mask);
    attn_mask result = {.data = mask->data, .dtype = mask->dtype};
    bool fits = false;
    if (mask->ndim == 1) {
        fits = mask->shape[0] == p->keys;
        result.stride[3] = normalised.stride[0];
    } else if (mask->ndim == 2) {
        fits = mask->shape[0] == p->batch && mask->shape[1] == p->keys;
        result.stride[0] = normalised.stride[0];
        result.stride[3] = normalised.stride[1];
    }
    if (!fits) {
        char text[RAPT_SHAPE_TEXT];
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "key_padding_mask has shape %s, expected [S] = [%lld] or [N,S] = [%lld, %lld]",
                         rapt_shape_text(mask, text), (ll)p->keys, (ll)p->batch, (ll)p->keys);
    }
    if (rapt_tensor_count(mask) > 0) p->padding = result;
    return RAPT_OK;
}

/* ---- band and lengths ---- */

rapt_status rapt_check_aligned(rapt_context *context, const char *name, const int64_t *array) {
    if ((uintptr_t)array % sizeof *array == 0) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_LAYOUT, "%s is at %p, which is not aligned to the 8 bytes of an int64", name,
                     (const void *)array);
}

static rapt_status take_band(rapt_context *context, const rapt_options *o, attn_problem *p) {
    int offsets = (o->align_bottom_right ? 1 : 0) + (o->offset != 0 ? 1 : 0) + (o->offsets != NULL ? 1 : 0);
    if (offsets > 1) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options give %d of align_bottom_right, offset (%lld) and offsets: "
                         "expected at most one",
                         offsets, (ll)o->offset);
    }
    if ((o->left != 0 && !o->limit_left) || (o->right != 0 && !o->limit_right)) {
        bool is_left = o->left != 0 && !o->limit_left;
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.%s is %lld, but limit_%s is false",
                         is_left ? "left" : "right", (ll)(is_left ? o->left : o->right), is_left ? "left" : "right");
    }
    rapt_status status = rapt_check_aligned(context, "options.offsets", o->offsets);
    if (status != RAPT_OK) return status;
    p->limit_left = o->limit_left;
    p->left = o->left;
    p->limit_right = o->limit_right || o->causal;
    p->right = !o->limit_right ? 0 : o->causal && o->right > 0 ? 0 : o->right;
    p->offset = o->align_bottom_right ? p->keys - p->queries : o->offset;
    p->offsets = o->offsets;
    return RAPT_OK;
}

static rapt_status take_lengths(rapt_context *context, const rapt_options *o, attn_problem *p) {
    rapt_status status = rapt_check_aligned(context, "options.key_start", o->key_start);
    if (status == RAPT_OK) status = rapt_check_aligned(context, "options.key_lengths", o->key_lengths);
    if (status != RAPT_OK || (o->key_start == NULL && o->key_lengths == NULL)) return status;
    for (int64_t n = 0; n < p->batch; n++) {
        int64_t start = o->key_start != NULL ? o->key_start[n] : 0;
        if (start < 0 || start > p->keys) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "key_start[%lld] is %lld, expected 0 to S = %lld", (ll)n,
                             (ll)start, (ll)p->keys);
        }
        if (o->key_lengths != NULL && (o->key_lengths[n] < 0 || o->key_lengths[n] > p->keys - start)) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "key_lengths[%lld] is %lld, expected 0 to %lld (S %lld less key_start %lld)", (ll)n,
                             (ll)o->key_lengths[n], (ll)(p->keys - start), (ll)p->keys, (ll)start);
        }
    }
    p->key_start = o->key_start;
    p->key_lengths = o->key_lengths;
    return RAPT_OK;
}

/* ---- returned weights and log-sum-exp ---- */

rapt_status rapt_take_view(rapt_context *context, const char *name, const rapt_tensor *tensor, rapt_dtype dtype,
                           bool batched, int32_t rank, const int64_t *shape, rapt_view *view) {
    if (tensor->dtype != dtype) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s", name, rapt_dtype_name(tensor->dtype),
                         rapt_dtype_name(dtype));
    }
    int32_t skipped = batched ? 0 : 1;
    bool fits = tensor->ndim == rank - skipped;
    for (int32_t d = skipped; fits && d < rank; d++) fits = tensor->shape[d - skipped] == shape[d];
    if (!fits) {
        char given[RAPT_SHAPE_TEXT], expected[RAPT_SHAPE_TEXT];
        rapt_tensor wanted = rapt_tensor_of(NULL, dtype, rank - skipped, shape + skipped);
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s", name,
                         rapt_shape_text(tensor, given), rapt_shape_text(&wanted, expected));
    }
    rapt_tensor normalised = rapt_normalised(tensor);
    view->data = tensor->data;
    for (int32_t d = skipped; d < rank; d++) view->stride[d] = normalised.stride[d - skipped];
    if (rapt_tensor_count(tensor) == 0) view->data = NULL;
    return RAPT_OK;
}

rapt_status rapt_take_weights(rapt_context *context, const char *name, const rapt_tensor *tensor, bool batched,
                              const attn_problem *p, rapt_view *view) {
    int64_t keys = p->keys + p->extra_keys;
    int64_t per_head[4] = {p->batch, p->heads, p->queries, keys}, averaged[3] = {p->batch, p->queries, keys};
    if (!p->average_weights) return rapt_take_view(context, name, tensor, p->dtype, batched, 4, per_head, view);
    rapt_status status = rapt_take_view(context, name, tensor, p->dtype, batched, 3, averaged, view);
    view->stride[3] = view->stride[2]; /* [N, L, S'] as [N, 0, L, S'] */
    view->stride[2] = view->stride[1];
    view->stride[1] = 0;
    return status;
}

rapt_status rapt_take_lse(rapt_context *context, const rapt_tensor *tensor, bool batched, attn_problem *p) {
    int64_t shape[3] = {p->batch, p->heads, p->queries};
    p->lse_dtype = tensor->dtype == RAPT_F64 ? RAPT_F64 : rapt_accumulation_dtype(p->dtype);
    return rapt_take_view(context, "lse", tensor, p->lse_dtype, batched, 3, shape, &p->lse);
}

static rapt_status take_results(rapt_context *context, const rapt_options *o, bool batched, attn_problem *p) {
    rapt_status status = RAPT_OK;
    if (o->weights != NULL) {
        p->average_weights = !o->per_head_weights;
        status = rapt_check_output(context, "weights", o->weights);
        if (status == RAPT_OK) status = rapt_take_weights(context, "weights", o->weights, batched, p, &p->weights);
    }
    if (status == RAPT_OK && o->lse != NULL) {
        status = rapt_check_output(context, "lse", o->lse);
        if (status == RAPT_OK) status = rapt_take_lse(context, o->lse, batched, p);
    }
    return status;
}

rapt_status rapt_attn_options(rapt_context *context, const rapt_options *o, bool batched, attn_problem *p) {
    for (int i = 0; i < (int)(sizeof o->reserved / sizeof *o->reserved); i++) {
        if (o->reserved[i] != 0) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "options.reserved[%d] is not 0: set options to zero before use", i);
        }
    }
    if (o->mode != RAPT_MODE_DEFAULT && o->mode != RAPT_MODE_TRAIN && o->mode != RAPT_MODE_EVAL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.mode is %d, which is no rapt_mode", (int)o->mode);
    }
    if (o->scale != 0 && !o->set_scale) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.scale is %g, but set_scale is false", o->scale);
    }
    if ((o->dropout_seed != 0 || o->dropout_offset != 0) && !o->set_dropout_seed) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.%s is %llu, but set_dropout_seed is false",
                         o->dropout_seed != 0 ? "dropout_seed" : "dropout_offset",
                         (unsigned long long)(o->dropout_seed != 0 ? o->dropout_seed : o->dropout_offset));
    }
    if (o->per_head_weights && o->weights == NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.per_head_weights is true, but weights is NULL");
    }
    if (o->set_scale && !isfinite(o->scale)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.scale is %g, expected a finite number", o->scale);
    }
    if (o->set_scale) p->scale = o->scale;
    rapt_status status = take_band(context, o, p);
    if (status == RAPT_OK) status = take_lengths(context, o, p);
    if (status == RAPT_OK && p->cache != NULL) status = rapt_cache_set_band(context, p);
    if (status == RAPT_OK && p->cache == NULL && o->append_lengths != NULL) {
        status = rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.append_lengths is given without a cache");
    }
    if (status == RAPT_OK && o->attn_mask != NULL) status = take_attn_mask(context, o->attn_mask, p);
    if (status == RAPT_OK && o->key_padding_mask != NULL) status = take_padding_mask(context, o->key_padding_mask, p);
    if (status == RAPT_OK) status = take_results(context, o, batched, p);
    return status;
}

rapt_status rapt_check_dropout(rapt_context *context, const char *name, double dropout) {
    if (dropout >= 0 && dropout <= 1) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %g, expected a number in [0, 1]", name, dropout);
}

rapt_status rapt_take_dropout(rapt_context *context, const rapt_options *o, double dropout, attn_problem *p) {
    if (dropout > 0 && o->cache != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "dropout is %g, expected 0 with a cache", dropout);
    }
    p->dropout = dropout;
    p->dropout_seed = o->set_dropout_seed ? o->dropout_seed : context->dropout_seed;
    p->dropout_offset = o->set_dropout_seed ? o->dropout_offset : context->dropout_offset;
    return RAPT_OK;
}

void rapt_advance_dropout(rapt_context *context, const rapt_options *o, const attn_problem *p) {
    if (p->dropout > 0 && !o->set_dropout_seed) context->dropout_offset++;
}

/* ---- results apart from everything else ---- */

rapt_status rapt_check_results_apart(rapt_context *context, const rapt_options *o, int64_t batch,
                                     const rapt_tensor *out, const rapt_named_tensor *inputs, int count) {
    const rapt_named_tensor results[] = {{"out", out}, {"weights", o->weights}, {"lse", o->lse}};
    return rapt_check_all_apart(context, o, batch, results, 3, inputs, count);
}

rapt_status rapt_check_all_apart(rapt_context *context, const rapt_options *o, int64_t batch,
                                 const rapt_named_tensor *results, int result_count, const rapt_named_tensor *inputs,
                                 int count) {
    /* The arrays of int64 are read during the call like tensors, and an element of them is as wide as an f64. */
    enum { ARRAYS = 4 };
    rapt_tensor arrays[ARRAYS];
    const int64_t *array[ARRAYS] = {o->offsets, o->key_start, o->key_lengths, o->append_lengths};
    const char *array_name[ARRAYS] = {"offsets", "key_start", "key_lengths", "append_lengths"};
    for (int a = 0; a < ARRAYS; a++) {
        if (array[a] != NULL) arrays[a] = rapt_tensor_of((void *)(uintptr_t)array[a], RAPT_F64, 1, &batch);
    }
    for (int r = 0; r < result_count; r++) {
        if (results[r].tensor == NULL) continue;
        rapt_status status = RAPT_OK;
        const char *name = results[r].name;
        const rapt_tensor *result = results[r].tensor;
        for (int i = 0; i < count && status == RAPT_OK; i++) {
            status = rapt_check_apart(context, name, result, inputs[i].name, inputs[i].tensor);
        }
        for (int a = 0; a < ARRAYS && status == RAPT_OK; a++) {
            if (array[a] != NULL) status = rapt_check_apart(context, name, result, array_name[a], &arrays[a]);
        }
        if (status == RAPT_OK) status = rapt_check_apart(context, name, result, "attn_mask", o->attn_mask);
        if (status == RAPT_OK)
            status = rapt_check_apart(context, name, result, "key_padding_mask", o->key_padding_mask);
        for (int other = 0; other < r && status == RAPT_OK; other++) {
            status = rapt_check_apart(context, name, result, results[other].name, results[other].tensor);
        }
        if (status != RAPT_OK) return status;
    }
    return RAPT_OK;
}

/* ---- the operator ---- */

/* As rapt_normalised, of a tensor with four dimensions. */
static void set_view(const rapt_tensor *tensor, rapt_view *view) {
    bool is_empty = rapt_tensor_count(tensor) == 0;
    view->data = tensor->data;
    for (int32_t d = 0; d < 4; d++) view->stride[d] = is_empty || tensor->shape[d] == 1 ? 0 : tensor->stride[d];
}

static rapt_status check_size(rapt_context *context, const char *name, const rapt_tensor *tensor, int32_t dim,
                              const char *dim_name, int64_t expected, const char *because) {
    if (tensor->shape[dim] == expected) return RAPT_OK;
    char text[RAPT_SHAPE_TEXT];
    return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s with %s %lld, expected %lld as %s", name,
                     rapt_shape_text(tensor, text), dim_name, (ll)tensor->shape[dim], (ll)expected, because);
}

static rapt_status check_same_dtype(rapt_context *context, const char *name, const rapt_tensor *tensor,
                                    const rapt_tensor *query) {
    if (tensor->dtype == query->dtype) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as query", name, rapt_dtype_name(tensor->dtype),
                     rapt_dtype_name(query->dtype));
}

/* key and value are both NULL where a cache holds all there is. */
static rapt_status check_shapes(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                                const rapt_tensor *value, const rapt_tensor *out) {
    const rapt_named_tensor tensors[] = {{"query", query}, {"key", key}, {"value", value}, {"out", out}};
    static const char *const words[] = {"[N,H,L,D]", "[N,Hk,S,D]", "[N,Hk,S,Dv]", "[N,H,L,Dv]"};
    bool has_keys = key != NULL && value != NULL;
    for (int i = 0; i < 4; i++) {
        if (!has_keys && (i == 1 || i == 2)) continue;
        rapt_status status = i < 3 ? rapt_check_tensor(context, tensors[i].name, tensors[i].tensor)
                                   : rapt_check_output(context, tensors[i].name, tensors[i].tensor);
        if (status == RAPT_OK) status = rapt_check_rank(context, tensors[i].name, tensors[i].tensor, 4, words[i]);
        if (status == RAPT_OK) status = check_same_dtype(context, tensors[i].name, tensors[i].tensor, query);
        if (status != RAPT_OK) return status;
        for (int32_t d = 1; d < 4; d += 2) { /* heads and head_dim; N, L and S may be 0 */
            if (tensors[i].tensor->shape[d] < 1) {
                char text[RAPT_SHAPE_TEXT];
                return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s with at least 1 %s",
                                 tensors[i].name, rapt_shape_text(tensors[i].tensor, text), words[i],
                                 d == 1 ? "head" : "dimension in a head");
            }
        }
    }
    if (!rapt_is_float(query->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "query is %s, expected f32, f64, bf16 or f16",
                         rapt_dtype_name(query->dtype));
    }
    rapt_status status = check_size(context, "out", out, 0, "N", query->shape[0], "query");
    if (status == RAPT_OK) status = check_size(context, "out", out, 1, "H", query->shape[1], "query");
    if (status == RAPT_OK) status = check_size(context, "out", out, 2, "L", query->shape[2], "query");
    if (status != RAPT_OK || !has_keys) return status;
    status = check_size(context, "key", key, 0, "N", query->shape[0], "query");
    if (status == RAPT_OK) status = check_size(context, "key", key, 3, "D", query->shape[3], "query");
    if (status == RAPT_OK) status = check_size(context, "value", value, 0, "N", query->shape[0], "query");
    if (status == RAPT_OK) status = check_size(context, "value", value, 1, "Hk", key->shape[1], "key");
    if (status == RAPT_OK) status = check_size(context, "value", value, 2, "S", key->shape[2], "key");
    if (status == RAPT_OK) status = check_size(context, "out", out, 3, "Dv", value->shape[3], "value");
    return status;
}

rapt_status rapt_check_operator_options(rapt_context *context, const rapt_options *options) {
    if (options->mode != RAPT_MODE_DEFAULT) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.mode is set, but the operator has no training mode: dropout is what "
                         "options.dropout says");
    }
    if (options->static_k != NULL || options->static_v != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.static_k and static_v are for rapt_mha_functional alone");
    }
    if (options->rotary != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "options.rotary is for layers: turn tensors with rapt_rotate");
    }
    if (options->state != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.state is for layers: rapt_attention_backward takes what the forward took");
    }
    return rapt_check_dropout(context, "options.dropout", options->dropout);
}

rapt_status rapt_attn_tensors(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                              const rapt_tensor *value, const rapt_cache *cache, const rapt_tensor *out,
                              attn_problem *p) {
    rapt_status status = check_shapes(context, query, key, value, out);
    if (status != RAPT_OK) return status;
    bool has_keys = key != NULL;
    *p = (attn_problem){.dtype = query->dtype,
                        .batch = query->shape[0],
                        .heads = query->shape[1],
                        .queries = query->shape[2],
                        .dim = query->shape[3],
                        .value_dim = out->shape[3]};
    p->scale = 1 / sqrt((double)p->dim);
    set_view(query, &p->q);
    set_view(out, &p->out);
    if (has_keys) {
        p->kv_heads = key->shape[1];
        p->keys = key->shape[2];
        set_view(key, &p->k);
        set_view(value, &p->v);
    } else if (cache != NULL) {
        p->kv_heads = cache->config.num_kv_heads;
    }
    if (p->heads % p->kv_heads != 0) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has %lld heads, which does not divide the %lld heads of query",
                         has_keys ? "key" : "the cache", (ll)p->kv_heads, (ll)p->heads);
    }
    return RAPT_OK;
}

/* A call that is checked as far as its tensors go, whose cache, if it has one, is its own. */
static rapt_status attend(rapt_context *context, attn_problem *p, const rapt_tensor *query, const rapt_tensor *key,
                          const rapt_tensor *value, const rapt_options *options, const cache_append *append,
                          const rapt_tensor *out) {
    rapt_status status = rapt_attn_options(context, options, true, p);
    if (status == RAPT_OK) status = rapt_check_operator_options(context, options);
    if (status == RAPT_OK) status = rapt_take_dropout(context, options, options->dropout, p);
    const rapt_named_tensor inputs[] = {{"query", query}, {"key", key}, {"value", value}};
    if (status == RAPT_OK) status = rapt_check_results_apart(context, options, p->batch, out, inputs, 3);
    if (status != RAPT_OK || p->batch == 0 || p->queries == 0) return status;

    size_t bytes = context->backend->attn_scratch(context, p);
    if (!rapt_arena_reserve(&context->arena, &context->allocator, bytes)) return rapt_fail_memory(context, bytes);
    void *scratch = rapt_arena_take(&context->arena, bytes);
    if (options->cache != NULL) {
        rapt_cache_attend(context, options->cache, append, &p->k, &p->v, p, scratch);
    } else {
        context->backend->attn_forward(context, p, scratch);
    }
    return RAPT_OK;
}

static rapt_status attention(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                             const rapt_tensor *value, const rapt_options *options, const rapt_tensor *out) {
    rapt_cache *cache = options->cache;
    if (key == NULL && (cache == NULL || value != NULL)) return rapt_fail(context, RAPT_ERROR_NULL, "key is NULL");
    if (value == NULL && key != NULL) return rapt_fail(context, RAPT_ERROR_NULL, "value is NULL");
    attn_problem p;
    rapt_status status = rapt_attn_tensors(context, query, key, value, cache, out, &p);
    if (status != RAPT_OK) return status;
    if (cache == NULL) {
        status = attend(context, &p, query, key, value, options, NULL, out);
        if (status == RAPT_OK) rapt_advance_dropout(context, options, &p);
        return status;
    }

    bool has_keys = key != NULL;
    if (has_keys && p.keys != p.queries) {
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "key has S %lld, expected L %lld: with a cache, key and value are those of the queries",
                         (ll)p.keys, (ll)p.queries);
    }
    cache_append append = {.count = p.keys, .lengths = options->append_lengths, .attends_only = !has_keys};
    status = rapt_cache_begin(context, cache, options, &append, &p);
    if (status != RAPT_OK) return status;
    status = attend(context, &p, query, key, value, options, &append, out);
    rapt_cache_end(cache);
    return status;
}

rapt_status rapt_attention_forward(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                                   const rapt_tensor *value, const rapt_options *options, const rapt_tensor *out) {
    static const rapt_options nothing_special = {0};
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    status = attention(context, query, key, value, options == NULL ? &nothing_special : options, out);
    return rapt_leave(context, &call, status);
}
