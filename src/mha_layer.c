/* mha_layer.c - layers: their memory, parameters, modes and description */
#include "mha.h"

#include <math.h>
#include <stdio.h>

typedef long long ll; /* for printf */

/* ---- memory ---- */

static rapt_mha *allocate_layer(rapt_context *context, const rapt_mha_config *config) {
    rapt_mha *layer = rapt_allocate(&context->allocator, sizeof *layer);
    if (layer == NULL) {
        rapt_fail_memory(context, sizeof *layer);
        return NULL;
    }
    memset(layer, 0, sizeof *layer);
    layer->config = *config;
    layer->allocator = context->allocator;
    layer->training = true;
    layer->made_at = os_nanoseconds();
    return layer;
}

void rapt_mha_destroy(rapt_mha *layer) {
    if (layer == NULL) return;
    rapt_allocator allocator = layer->allocator;
    rapt_release(&allocator, layer->memory, layer->memory_size);
    rapt_release(&allocator, layer->packed, layer->packed_size);
    rapt_release(&allocator, layer, sizeof *layer);
}

/* Parameters are first only listed, with NULL data, then given memory in one block. */
static rapt_tensor *list_parameter(rapt_mha *layer, const char *name, int32_t ndim, const int64_t *shape) {
    mha_parameter *parameter = &layer->parameter[layer->parameters++];
    parameter->name = name;
    parameter->tensor = rapt_tensor_of(NULL, layer->config.dtype, ndim, shape);
    return &parameter->tensor;
}

static rapt_tensor *list_matrix(rapt_mha *layer, const char *name, int64_t rows, int64_t columns) {
    return list_parameter(layer, name, 2, (int64_t[]){rows, columns});
}

static rapt_tensor *list_vector(rapt_mha *layer, const char *name, int64_t length) {
    return list_parameter(layer, name, 1, &length);
}

static rapt_status allocate_parameters(rapt_context *context, rapt_mha *layer) {
    size_t element = rapt_dtype_size(layer->config.dtype), total = 0;
    for (int32_t i = 0; i < layer->parameters; i++) {
        size_t count = (size_t)rapt_tensor_count(&layer->parameter[i].tensor);
        total = rapt_size_add(total, rapt_arena_size(rapt_size_mul(count, element)));
    }
    layer->memory = rapt_allocate(&layer->allocator, total);
    if (layer->memory == NULL) return rapt_fail_memory(context, total);
    layer->memory_size = total;
    memset(layer->memory, 0, total);
    char *next = layer->memory;
    for (int32_t i = 0; i < layer->parameters; i++) {
        layer->parameter[i].tensor.data = next;
        next += rapt_arena_size((size_t)rapt_tensor_count(&layer->parameter[i].tensor) * element);
    }
    return RAPT_OK;
}

/* ---- packed weights ---- */

static size_t packed_size(const mha_projection *projection) {
    const rapt_tensor *weight = &projection->weight;
    return rapt_arena_size(rapt_linear_packed_size(weight->dtype, weight->shape[0], weight->shape[1]));
}

static rapt_status allocate_packed(rapt_context *context, rapt_mha *layer) {
    mha_projection *projections[] = {&layer->parts.q, &layer->parts.k, &layer->parts.v, &layer->parts.out};
    size_t extra = rapt_arena_size(rapt_mha_extra_bytes(&layer->config)), total = rapt_size_mul(2, extra);
    for (int i = 0; i < 4; i++) total = rapt_size_add(total, packed_size(projections[i]));
    layer->packed = rapt_allocate(&layer->allocator, total);
    if (layer->packed == NULL) return rapt_fail_memory(context, total);
    layer->packed_size = total;
    char *next = layer->packed;
    for (int i = 0; i < 4; i++) {
        projections[i]->packed = next;
        next += packed_size(projections[i]);
    }
    if (extra > 0) {
        layer->parts.extra_k = next;
        layer->parts.extra_v = next + extra;
    }
    return RAPT_OK;
}

void rapt_mha_pack(rapt_context *context, rapt_mha *layer) {
    mha_projection *projections[] = {&layer->parts.q, &layer->parts.k, &layer->parts.v, &layer->parts.out};
    for (int i = 0; i < 4; i++) {
        rapt_linear_pack(context, &projections[i]->weight, &projections[i]->bias, projections[i]->packed);
    }
    if (layer->parts.extra_k != NULL) {
        rapt_mha_fill_extra(&layer->config, &layer->parts.bias_k, layer->parts.extra_k);
        rapt_mha_fill_extra(&layer->config, &layer->parts.bias_v, layer->parts.extra_v);
    }
    layer->version++;
}

rapt_status rapt_mha_commit(rapt_context *context, rapt_mha *layer) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    if (layer == NULL) {
        status = rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    } else {
        rapt_mha_pack(context, layer);
    }
    return rapt_leave(context, &call, status);
}

/* ---- parameters that the layer owns, as PyTorch lays them out ---- */

typedef struct owned_parameters {
    rapt_tensor *in_weight, *q_weight, *k_weight, *v_weight; /* the first, or the other three */
    rapt_tensor *in_bias, *q_bias, *k_bias, *v_bias;         /* likewise, each may be absent */
    rapt_tensor *bias_k, *bias_v, *out_weight, *out_bias;
} owned_parameters;

typedef struct bias_presence {
    bool q, k, v, out;
} bias_presence;

/* In the order of PyTorch's state dict. */
static owned_parameters list_owned(rapt_mha *layer, bias_presence bias) {
    const rapt_mha_config *c = &layer->config;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim, rows = q_rows + 2 * kv_rows;
    owned_parameters owned = {0};
    if (c->kdim == c->embed_dim && c->vdim == c->embed_dim) {
        owned.in_weight = list_matrix(layer, "in_proj_weight", rows, c->embed_dim);
    } else {
        owned.q_weight = list_matrix(layer, "q_proj_weight", q_rows, c->embed_dim);
        owned.k_weight = list_matrix(layer, "k_proj_weight", kv_rows, c->kdim);
        owned.v_weight = list_matrix(layer, "v_proj_weight", kv_rows, c->vdim);
    }
    if (bias.q && bias.k && bias.v) {
        owned.in_bias = list_vector(layer, "in_proj_bias", rows);
    } else {
        if (bias.q) owned.q_bias = list_vector(layer, "q_proj.bias", q_rows);
        if (bias.k) owned.k_bias = list_vector(layer, "k_proj.bias", kv_rows);
        if (bias.v) owned.v_bias = list_vector(layer, "v_proj.bias", kv_rows);
    }
    if (c->add_bias_kv) {
        owned.bias_k = list_parameter(layer, "bias_k", 3, (int64_t[]){1, 1, kv_rows});
        owned.bias_v = list_parameter(layer, "bias_v", 3, (int64_t[]){1, 1, kv_rows});
    }
    owned.out_weight = list_matrix(layer, "out_proj.weight", c->embed_dim, q_rows);
    if (bias.out) owned.out_bias = list_vector(layer, "out_proj.bias", c->embed_dim);
    return owned;
}

static rapt_tensor flat(const rapt_tensor *tensor) {
    int64_t count = rapt_tensor_count(tensor);
    return rapt_tensor_of(tensor->data, tensor->dtype, 1, &count);
}

/* The projections as views of what the layer owns. */
static void cut_parts(rapt_mha *layer, const owned_parameters *owned) {
    const rapt_mha_config *c = &layer->config;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    mha_parts *parts = &layer->parts;
    if (owned->in_weight != NULL) {
        parts->q.weight = rapt_rows_of(owned->in_weight, 0, q_rows);
        parts->k.weight = rapt_rows_of(owned->in_weight, q_rows, kv_rows);
        parts->v.weight = rapt_rows_of(owned->in_weight, q_rows + kv_rows, kv_rows);
    } else {
        parts->q.weight = *owned->q_weight;
        parts->k.weight = *owned->k_weight;
        parts->v.weight = *owned->v_weight;
    }
    if (owned->in_bias != NULL) {
        parts->q.bias = rapt_rows_of(owned->in_bias, 0, q_rows);
        parts->k.bias = rapt_rows_of(owned->in_bias, q_rows, kv_rows);
        parts->v.bias = rapt_rows_of(owned->in_bias, q_rows + kv_rows, kv_rows);
    }
    if (owned->q_bias != NULL) parts->q.bias = *owned->q_bias;
    if (owned->k_bias != NULL) parts->k.bias = *owned->k_bias;
    if (owned->v_bias != NULL) parts->v.bias = *owned->v_bias;
    if (owned->bias_k != NULL) parts->bias_k = flat(owned->bias_k);
    if (owned->bias_v != NULL) parts->bias_v = flat(owned->bias_v);
    parts->out.weight = *owned->out_weight;
    if (owned->out_bias != NULL) parts->out.bias = *owned->out_bias;
}

/* ---- first weights ---- */

static double xavier_bound(const rapt_tensor *weight) {
    return sqrt(6.0 / ((double)weight->shape[0] + (double)weight->shape[1]));
}

/* Biases stay zero. Streams keep the tensors' random numbers apart. */
static void draw_weights(rapt_mha *layer, const owned_parameters *owned) {
    const rapt_mha_config *c = &layer->config;
    mha_parts *parts = &layer->parts;
    bool per_projection = c->init == RAPT_INIT_XAVIER || owned->in_weight == NULL;
    if (per_projection) {
        const rapt_tensor *weights[] = {&parts->q.weight, &parts->k.weight, &parts->v.weight};
        for (uint32_t i = 0; i < 3; i++) {
            rapt_draw_tensor(weights[i], RAPT_DRAW_UNIFORM, xavier_bound(weights[i]), c->seed, i);
        }
    } else {
        rapt_draw_tensor(owned->in_weight, RAPT_DRAW_UNIFORM, xavier_bound(owned->in_weight), c->seed, 0);
    }
    /* PyTorch leaves the output projection as its Linear draws it: uniform within 1/sqrt(inputs). */
    const rapt_tensor *out = &parts->out.weight;
    double out_bound = c->init == RAPT_INIT_XAVIER ? xavier_bound(out) : 1 / sqrt((double)out->shape[1]);
    rapt_draw_tensor(out, RAPT_DRAW_UNIFORM, out_bound, c->seed, 3);
    if (c->add_bias_kv) { /* Xavier-normal of a [1,1,Hk*D] tensor: both fans are Hk*D */
        double deviation = 1 / sqrt((double)parts->bias_k.shape[0]);
        rapt_draw_tensor(&parts->bias_k, RAPT_DRAW_NORMAL, deviation, c->seed, 4);
        rapt_draw_tensor(&parts->bias_v, RAPT_DRAW_NORMAL, deviation, c->seed, 5);
    }
}

/* ---- creation ---- */

/* A layer with memory for parameters of its own and for packed weights; what is in them is the caller's to fill in. */
static rapt_status make_owned(rapt_context *context, const rapt_mha_config *config, bias_presence bias,
                              owned_parameters *owned, rapt_mha **made) {
    rapt_mha *layer = allocate_layer(context, config);
    if (layer == NULL) return RAPT_ERROR_MEMORY;
    *owned = list_owned(layer, bias);
    rapt_status status = allocate_parameters(context, layer);
    if (status == RAPT_OK) {
        cut_parts(layer, owned);
        status = allocate_packed(context, layer);
    }
    if (status != RAPT_OK) {
        rapt_mha_destroy(layer);
        return status;
    }
    *made = layer;
    return RAPT_OK;
}

static rapt_status create(rapt_context *context, const rapt_mha_config *given, rapt_mha **result) {
    rapt_mha_config config;
    rapt_status status = rapt_mha_settle_config(context, given, &config);
    if (status != RAPT_OK) return status;
    bias_presence bias = {config.bias, config.bias, config.bias, config.bias};
    owned_parameters owned;
    rapt_mha *layer;
    status = make_owned(context, &config, bias, &owned, &layer);
    if (status != RAPT_OK) return status;
    draw_weights(layer, &owned);
    rapt_mha_pack(context, layer);
    *result = layer;
    return RAPT_OK;
}

static rapt_status create_checked(rapt_context *context, const rapt_mha_config *config, rapt_mha **layer) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    return create(context, config, layer);
}

rapt_status rapt_mha_create(rapt_context *context, const rapt_mha_config *config, rapt_mha **layer) {
    rapt_call call;
    if (layer != NULL) *layer = NULL;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, create_checked(context, config, layer));
}

rapt_status rapt_mha_create_mha(rapt_context *context, int64_t embed_dim, int64_t num_heads, rapt_mha **layer) {
    rapt_mha_config config = rapt_mha_config_default(embed_dim, num_heads);
    return rapt_mha_create(context, &config, layer);
}

rapt_status rapt_mha_create_mqa(rapt_context *context, int64_t embed_dim, int64_t num_heads, rapt_mha **layer) {
    return rapt_mha_create_gqa(context, embed_dim, num_heads, 1, layer);
}

rapt_status rapt_mha_create_gqa(rapt_context *context, int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                                rapt_mha **layer) {
    rapt_call call;
    if (layer != NULL) *layer = NULL;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    rapt_mha_config config = rapt_mha_config_default(embed_dim, num_heads);
    config.num_kv_heads = num_kv_heads;
    if (layer != NULL && num_kv_heads < 1) { /* in a short form -1 is no default */
        status = rapt_fail(context, RAPT_ERROR_ARGUMENT, "num_kv_heads is %lld, expected at least 1", (ll)num_kv_heads);
    } else {
        status = create_checked(context, &config, layer);
    }
    return rapt_leave(context, &call, status);
}

/* ---- creation from ready weights ---- */

static void copy_if_present(const rapt_tensor *from, const rapt_tensor *to) {
    if (from->data != NULL) rapt_copy_elements(from, to);
}

static void copy_parts(const mha_parts *given, rapt_mha *layer) {
    const mha_projection *from[] = {&given->q, &given->k, &given->v, &given->out};
    const mha_projection *to[] = {&layer->parts.q, &layer->parts.k, &layer->parts.v, &layer->parts.out};
    for (int i = 0; i < 4; i++) {
        rapt_copy_elements(&from[i]->weight, &to[i]->weight);
        copy_if_present(&from[i]->bias, &to[i]->bias);
    }
    copy_if_present(&given->bias_k, &layer->parts.bias_k);
    copy_if_present(&given->bias_v, &layer->parts.bias_v);
}

void rapt_mha_fill(rapt_context *context, rapt_mha *layer, const mha_parts *given) {
    copy_parts(given, layer);
    rapt_mha_pack(context, layer);
}

rapt_status rapt_mha_create_copy(rapt_context *context, const rapt_mha_config *config, const mha_parts *given,
                                 rapt_mha **result) {
    bias_presence bias = {given->q.bias.data != NULL, given->k.bias.data != NULL, given->v.bias.data != NULL,
                          given->out.bias.data != NULL};
    owned_parameters owned;
    rapt_mha *layer;
    rapt_status status = make_owned(context, config, bias, &owned, &layer);
    if (status != RAPT_OK) return status;
    rapt_mha_fill(context, layer, given);
    *result = layer;
    return RAPT_OK;
}

static void borrow_weights(rapt_mha *layer, const rapt_mha_weights *w, const mha_parts *given) {
    const rapt_named_tensor lent[] = {
        {"in_proj_weight", w->in_proj_weight},
        {"q_proj_weight", w->q_proj_weight},
        {"k_proj_weight", w->k_proj_weight},
        {"v_proj_weight", w->v_proj_weight},
        {"in_proj_bias", w->in_proj_bias},
        {"q_proj.bias", w->q_proj_bias},
        {"k_proj.bias", w->k_proj_bias},
        {"v_proj.bias", w->v_proj_bias},
        {"bias_k", w->bias_k},
        {"bias_v", w->bias_v},
        {"out_proj.weight", w->out_proj_weight},
        {"out_proj.bias", w->out_proj_bias},
    };
    for (size_t i = 0; i < sizeof lent / sizeof *lent; i++) {
        if (lent[i].tensor == NULL) continue;
        layer->parameter[layer->parameters++] = (mha_parameter){lent[i].name, *lent[i].tensor};
    }
    layer->parts = *given;
}

static rapt_status create_from_weights(rapt_context *context, const rapt_mha_weights *weights, rapt_ownership ownership,
                                       rapt_mha **result) {
    if (result == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    if (ownership != RAPT_COPY && ownership != RAPT_BORROW) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "ownership is %d, expected RAPT_COPY or RAPT_BORROW",
                         (int)ownership);
    }
    rapt_mha_config config;
    mha_parts given;
    rapt_status status = rapt_mha_take_weights(context, weights, &config, &given);
    if (status != RAPT_OK) return status;
    if (ownership == RAPT_COPY) return rapt_mha_create_copy(context, &config, &given, result);
    rapt_mha *layer = allocate_layer(context, &config);
    if (layer == NULL) return RAPT_ERROR_MEMORY;
    borrow_weights(layer, weights, &given);
    status = allocate_packed(context, layer);
    if (status != RAPT_OK) {
        rapt_mha_destroy(layer);
        return status;
    }
    rapt_mha_pack(context, layer);
    *result = layer;
    return RAPT_OK;
}

rapt_status rapt_mha_create_from_weights(rapt_context *context, const rapt_mha_weights *weights,
                                         rapt_ownership ownership, rapt_mha **layer) {
    rapt_call call;
    if (layer != NULL) *layer = NULL;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, create_from_weights(context, weights, ownership, layer));
}

/* ---- parameters ---- */

int64_t rapt_mha_num_parameters(const rapt_mha *layer) {
    int64_t total = 0;
    for (int32_t i = 0; layer != NULL && i < layer->parameters; i++)
        total += rapt_tensor_count(&layer->parameter[i].tensor);
    return total;
}

int32_t rapt_mha_num_tensors(const rapt_mha *layer) { return layer == NULL ? 0 : layer->parameters; }

static rapt_status tensor_at(rapt_context *context, const rapt_mha *layer, int32_t index, const char **name,
                             rapt_tensor *view) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    if (index < 0 || index >= layer->parameters) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "index is %d, expected 0 to %d", (int)index,
                         (int)layer->parameters - 1);
    }
    if (name != NULL) *name = layer->parameter[index].name;
    if (view != NULL) *view = layer->parameter[index].tensor;
    return RAPT_OK;
}

rapt_status rapt_mha_tensor_at(rapt_context *context, const rapt_mha *layer, int32_t index, const char **name,
                               rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, tensor_at(context, layer, index, name, view));
}

static rapt_status find(rapt_context *context, const rapt_mha *layer, const char *name, rapt_tensor *view) {
    if (layer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "layer is NULL");
    if (name == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "name is NULL");
    if (view == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "view is NULL");
    for (int32_t i = 0; i < layer->parameters; i++) {
        if (strcmp(layer->parameter[i].name, name) != 0) continue;
        *view = layer->parameter[i].tensor;
        return RAPT_OK;
    }
    /* Other names: the projections one by one, however they are stored. */
    static const char *const projection[] = {"q_proj", "k_proj", "v_proj", "out_proj"};
    const mha_projection *parts[] = {&layer->parts.q, &layer->parts.k, &layer->parts.v, &layer->parts.out};
    for (int i = 0; i < 4; i++) {
        size_t length = strlen(projection[i]);
        if (strncmp(name, projection[i], length) != 0) continue;
        const char *rest = name + length;
        bool is_weight = strcmp(rest, ".weight") == 0 || strcmp(rest, "_weight") == 0;
        bool is_bias = strcmp(rest, ".bias") == 0 || strcmp(rest, "_bias") == 0;
        const rapt_tensor *found = is_weight ? &parts[i]->weight : &parts[i]->bias;
        if ((is_weight || is_bias) && found->data != NULL) {
            *view = *found;
            return RAPT_OK;
        }
    }
    return rapt_fail(context, RAPT_ERROR_ABSENT, "the layer has no parameter \"%s\"", name);
}

rapt_status rapt_mha_find(rapt_context *context, const rapt_mha *layer, const char *name, rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, find(context, layer, name, view));
}

uint64_t rapt_mha_version(const rapt_mha *layer) { return layer == NULL ? 0 : layer->version; }

/* ---- settings and modes ---- */

const rapt_mha_config *rapt_mha_settings(const rapt_mha *layer) { return layer == NULL ? NULL : &layer->config; }

bool rapt_mha_is_mha(const rapt_mha *layer) {
    return layer != NULL && layer->config.num_kv_heads == layer->config.num_heads;
}
bool rapt_mha_is_mqa(const rapt_mha *layer) { return layer != NULL && layer->config.num_kv_heads == 1; }
bool rapt_mha_is_gqa(const rapt_mha *layer) {
    return layer != NULL && layer->config.num_kv_heads > 1 && layer->config.num_kv_heads < layer->config.num_heads;
}

void rapt_mha_train(rapt_mha *layer) {
    if (layer != NULL) layer->training = true;
}
void rapt_mha_eval(rapt_mha *layer) {
    if (layer != NULL) layer->training = false;
}
bool rapt_mha_is_training(const rapt_mha *layer) { return layer != NULL && layer->training; }

int rapt_mha_describe(const rapt_mha *layer, char *text, size_t size) {
    if (layer == NULL) return snprintf(text, size, "no layer");
    const rapt_mha_config *c = &layer->config;
    char heads[80] = "", inputs[64] = "", numbers[80] = ""; /* what differs from the defaults */
    size_t used = 0;
    if (c->num_kv_heads != c->num_heads) {
        used = (size_t)snprintf(heads, sizeof heads, ", num_kv_heads=%lld", (ll)c->num_kv_heads);
    }
    if (c->num_heads * c->head_dim != c->embed_dim) {
        snprintf(heads + used, sizeof heads - used, ", head_dim=%lld", (ll)c->head_dim);
    }
    if (c->kdim != c->embed_dim || c->vdim != c->embed_dim) {
        snprintf(inputs, sizeof inputs, ", kdim=%lld, vdim=%lld", (ll)c->kdim, (ll)c->vdim);
    }
    used = 0;
    if (c->set_scale) used = (size_t)snprintf(numbers, sizeof numbers, ", scale=%g", c->scale);
    if (c->dropout > 0) snprintf(numbers + used, sizeof numbers - used, ", dropout=%g", c->dropout);
    return snprintf(text, size,
                    "MultiheadAttention(embed_dim=%lld, num_heads=%lld%s%s%s%s%s%s%s%s, dtype=%s, %lld parameters)",
                    (ll)c->embed_dim, (ll)c->num_heads, heads, inputs, c->bias ? "" : ", bias=false",
                    c->add_bias_kv ? ", add_bias_kv" : "", c->add_zero_attn ? ", add_zero_attn" : "",
                    c->batch_first ? ", batch_first" : "", c->causal ? ", causal" : "", numbers,
                    rapt_dtype_name(c->dtype), (ll)rapt_mha_num_parameters(layer));
}
