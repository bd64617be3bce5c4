/* mha_save.c - layers into files, by the names of any scheme */
#include "checkpoint.h"
#include "json.h"
#include "mha.h"

typedef struct saving {
    const rapt_mha *layer;
    const rapt_layout *layout;
    const char *prefix;
    rapt_dtype dtype; /* of the file */
    int64_t count;
    safetensors_source source[RAPT_LAYER_SOURCES];
} saving;

static safetensors_source *add_source(saving *s, const char *name) {
    safetensors_source *source = &s->source[s->count++];
    *source = (safetensors_source){.prefix = s->prefix, .name = name, .dtype = s->dtype};
    return source;
}

static void add_piece(safetensors_source *source, const rapt_tensor *piece) {
    source->piece[source->pieces++] = *piece;
}

/* A matrix as the layout stores it. */
static rapt_tensor stored(const saving *s, const rapt_tensor *weight) {
    rapt_tensor matrix = *weight;
    if (!s->layout->in_out) return matrix;
    for (int d = 0; d < 2; d++) {
        matrix.shape[d] = weight->shape[1 - d];
        matrix.stride[d] = weight->stride[1 - d];
    }
    return matrix;
}

/* In the order of the layout, projections that are stored as one together. */
static void list_weights(saving *s) {
    const mha_parts *parts = &s->layer->parts;
    const mha_projection *projection[] = {&parts->q, &parts->k, &parts->v, &parts->out};
    safetensors_source *source = add_source(s, s->layout->weight[0]);
    for (int i = 0; i < 4; i++) {
        if (i > 0 && s->layout->weight[i] != NULL) source = add_source(s, s->layout->weight[i]);
        source->along = s->layout->in_out ? 1 : 0; /* the outputs' dimension */
        rapt_tensor matrix = stored(s, &projection[i]->weight);
        add_piece(source, &matrix);
    }
}

static void list_biases(saving *s) {
    const mha_parts *parts = &s->layer->parts;
    const mha_projection *projection[] = {&parts->q, &parts->k, &parts->v, &parts->out};
    bool is_fused = s->layout->bias[1] == NULL;
    bool any = parts->q.bias.data != NULL || parts->k.bias.data != NULL || parts->v.bias.data != NULL;
    safetensors_source *fused = is_fused && any ? add_source(s, s->layout->bias[0]) : NULL;
    for (int i = 0; i < 4; i++) {
        rapt_tensor bias = projection[i]->bias;
        bool is_part = is_fused && i < 3;
        if (is_part && bias.data == NULL) bias = rapt_tensor_of(NULL, s->dtype, 1, &projection[i]->weight.shape[0]);
        if (is_part && fused != NULL) add_piece(fused, &bias);
        if (!is_part && bias.data != NULL) add_piece(add_source(s, s->layout->bias[i]), &bias);
    }
}

static void list_bias_kv(saving *s) {
    const rapt_tensor *bias[] = {&s->layer->parts.bias_k, &s->layer->parts.bias_v};
    if (bias[0]->data == NULL) return;
    for (int i = 0; i < 2; i++) { /* [1, 1, Hk*D], as PyTorch has it */
        rapt_tensor row = rapt_tensor_strided(bias[i]->data, bias[i]->dtype, 3, (int64_t[]){1, 1, bias[i]->shape[0]},
                                              (int64_t[]){0, 0, bias[i]->stride[0]});
        add_piece(add_source(s, s->layout->bias_kv[i]), &row);
    }
}

static void list_all(saving *s) {
    list_weights(s);
    list_biases(s);
    list_bias_kv(s);
}

static bool inputs_have_one_size(const rapt_mha_config *c) {
    return c->kdim == c->embed_dim && c->vdim == c->embed_dim;
}

int64_t rapt_mha_list_sources(const rapt_mha *layer, const char *prefix,
                              safetensors_source sources[RAPT_LAYER_SOURCES]) {
    saving s = {.layer = layer,
                .layout = rapt_layout_to_save(RAPT_SCHEME_PYTORCH, inputs_have_one_size(&layer->config)),
                .prefix = prefix,
                .dtype = layer->config.dtype};
    list_all(&s);
    memcpy(sources, s.source, (size_t)s.count * sizeof *sources);
    return s.count;
}

static rapt_status choose_layout(rapt_context *context, const rapt_save_options *o, saving *s) {
    const rapt_mha_config *c = &s->layer->config;
    rapt_scheme scheme = o->scheme == RAPT_SCHEME_AUTO ? RAPT_SCHEME_PYTORCH : o->scheme;
    s->layout = rapt_layout_to_save(scheme, inputs_have_one_size(c));
    if (s->layout != NULL && (s->layout->bias_kv[0] != NULL || s->layer->parts.bias_k.data == NULL)) return RAPT_OK;
    if (s->layout != NULL)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "scheme %s has no names for the layer's bias_k and bias_v (pytorch, lucid and separate have)",
                         rapt_scheme_name(scheme));
    return rapt_fail(
        context, RAPT_ERROR_ARGUMENT,
        "scheme %s has one matrix for q, k and v, but the layer's inputs differ: embed_dim %lld, kdim %lld, "
        "vdim %lld",
        rapt_scheme_name(scheme), (long long)c->embed_dim, (long long)c->kdim, (long long)c->vdim);
}

/* "rapt.mha:" and the prefix, in memory that the caller releases. */
static char *settings_key(const rapt_allocator *allocator, const char *prefix, size_t *size) {
    *size = sizeof RAPT_SETTINGS_KEY + strlen(prefix);
    char *key = rapt_allocate(allocator, *size);
    if (key == NULL) return NULL;
    memcpy(key, RAPT_SETTINGS_KEY, sizeof RAPT_SETTINGS_KEY - 1);
    memcpy(key + sizeof RAPT_SETTINGS_KEY - 1, prefix, strlen(prefix) + 1);
    return key;
}

static rapt_status write(rapt_context *context, const char *path, saving *s) {
    char settings[RAPT_SETTINGS_SIZE];
    rapt_settings_write(&s->layer->config, settings);
    size_t key_size;
    char *key = settings_key(&context->allocator, s->prefix, &key_size);
    if (key == NULL) return rapt_fail_memory(context, key_size);
    /* Some readers want to know whose layout of tensors it is. */
    const char *const metadata[][2] = {{"format", "pt"}, {key, settings}};
    rapt_status status = rapt_safetensors_write(context, path, s->count, s->source, 2, metadata);
    rapt_release(&context->allocator, key, key_size);
    return status;
}

static rapt_status save(rapt_context *context, const rapt_mha *layer, const char *path, const rapt_save_options *o) {
    rapt_status status =
        rapt_check_struct_size(context, "options", "rapt_save_options_default", o, o->struct_size, sizeof *o);
    if (status == RAPT_OK) status = rapt_check_prefix(context, o->prefix);
    if (status == RAPT_OK) status = rapt_check_scheme(context, o->scheme);
    if (status != RAPT_OK) return status;
    if (o->set_dtype && !rapt_is_float(o->dtype))
        return rapt_fail(context, RAPT_ERROR_DTYPE, "dtype is %s (%d), expected f32, f64, bf16 or f16",
                         rapt_dtype_name(o->dtype), (int)o->dtype);
    saving s = {.layer = layer,
                .prefix = o->prefix == NULL ? "" : o->prefix,
                .dtype = o->set_dtype ? o->dtype : layer->config.dtype};
    status = choose_layout(context, o, &s);
    if (status != RAPT_OK) return status;
    list_all(&s);
    return write(context, path, &s);
}

rapt_status rapt_mha_save(rapt_context *context, const rapt_mha *layer, const char *path,
                          const rapt_save_options *options) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    rapt_save_options defaults = rapt_save_options_default();
    const char *null = layer == NULL ? "layer" : path == NULL ? "path" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : save(context, layer, path, options != NULL ? options : &defaults);
    return rapt_leave(context, &call, status);
}
