/* fuzz_safetensors.c - libFuzzer over files of strangers: opens one in memory, looks at all tensors, loads all layers */
#include <rapt/rapt.h>

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static rapt_context *context;

static void must(bool holds) {
    if (!holds) abort();
}

/* A sum over every byte of a tensor, so that one outside the file is noticed. */
static void touch(const rapt_tensor *view) {
    const unsigned char *bytes = view->data;
    size_t count = (size_t)rapt_tensor_count(view) * rapt_dtype_size(view->dtype);
    volatile unsigned sum = 0;
    for (size_t i = 0; i < count; i++) sum = sum + bytes[i];
}

/* A layer that loads can be used, and takes the same weights again. */
static void use_layer(const rapt_checkpoint *checkpoint, const rapt_layer_info *info, rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    must(c->embed_dim == info->embed_dim && c->num_heads * c->head_dim == info->q_features);
    must(rapt_mha_num_parameters(layer) == info->num_parameters);
    if (rapt_mha_load_into(context, checkpoint, info->prefix, info->scheme, layer) == RAPT_OK)
        must(rapt_mha_version(layer) == 2);
    if (c->kdim != c->embed_dim || c->vdim != c->embed_dim) return;
    size_t bytes = (size_t)c->embed_dim * rapt_dtype_size(c->dtype);
    void *x = calloc(2, bytes);
    must(x != NULL);
    rapt_tensor in = rapt_tensor_of(x, c->dtype, 2, (int64_t[]){1, c->embed_dim});
    rapt_tensor out = rapt_tensor_of((char *)x + bytes, c->dtype, 2, in.shape);
    rapt_mha_eval(layer);
    must(rapt_mha_forward(context, layer, &in, &in, &in, NULL, &out) == RAPT_OK);
    free(x);
}

static void load(const rapt_checkpoint *checkpoint, const rapt_layer_info *info) {
    for (int64_t heads = RAPT_DEFAULT; heads <= 2; heads++) {
        rapt_load_options options = rapt_load_options_default();
        options.prefix = info->prefix;
        options.scheme = info->scheme;
        options.num_heads = heads;
        options.set_dtype = heads == 2;
        options.dtype = RAPT_BF16;
        rapt_mha *layer;
        rapt_status status = rapt_mha_load(context, checkpoint, &options, &layer);
        must((status == RAPT_OK) == (layer != NULL));
        if (layer != NULL) use_layer(checkpoint, info, layer);
        rapt_mha_destroy(layer);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (context == NULL) {
        rapt_context_config config = rapt_context_config_default();
        config.num_threads = 1;
        must(rapt_context_create(&config, &context) == RAPT_OK);
    }
    rapt_checkpoint *checkpoint;
    rapt_status status = rapt_checkpoint_open_memory(context, data, size, &checkpoint);
    if (status != RAPT_OK) {
        must(status == RAPT_ERROR_FORMAT && checkpoint == NULL);
        must(strncmp(rapt_error_message(context), "safetensors: byte ", 18) == 0);
        return 0;
    }
    for (int64_t i = 0; i < rapt_checkpoint_num_tensors(checkpoint); i++) {
        rapt_tensor view;
        const char *name = rapt_checkpoint_tensor_name(checkpoint, i);
        if (rapt_checkpoint_find(context, checkpoint, name, &view) == RAPT_OK) touch(&view);
    }
    for (int64_t i = 0; i < rapt_checkpoint_num_layers(checkpoint); i++) {
        rapt_layer_info info;
        if (rapt_checkpoint_layer(context, checkpoint, i, &info) == RAPT_OK) load(checkpoint, &info);
    }
    rapt_checkpoint_close(checkpoint);
    return 0;
}
