/* layer_support.c - what the tests of the layer share */
#include "layer_support.h"

rapt_context *context;

int make_cpu_context(void **state) {
    (void)state;
    context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    return 0;
}

int destroy_shared_context(void **state) {
    (void)state;
    rapt_context_destroy(context);
    return 0;
}

rapt_mha *create(const rapt_mha_config *config) {
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create(context, config, &layer));
    return layer;
}

rapt_tensor parameter(const rapt_mha *layer, const char *name) {
    rapt_tensor view;
    assert_ok(context, rapt_mha_find(context, layer, name, &view));
    return view;
}

/* A layer with every parameter random, biases too; the same for configs of the same shapes. */
rapt_mha *create_random(const rapt_mha_config *config) {
    rapt_mha *layer = create(config);
    test_random random = {77};
    for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &view));
        fill_random(&random, &view, 0.5);
    }
    assert_ok(context, rapt_mha_commit(context, layer));
    return layer;
}

rapt_tensor random_tensor(uint64_t seed, rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    test_random random = {seed};
    rapt_tensor tensor = make_tensor(dtype, ndim, shape);
    fill_random(&random, &tensor, 2);
    return tensor;
}

rapt_tensor forward(const rapt_mha *layer, const rapt_tensor *query, const rapt_tensor *key, const rapt_tensor *value,
                    const rapt_options *options) {
    rapt_tensor out = make_tensor(query->dtype, query->ndim, query->shape);
    fill_value(&out, NAN);
    assert_ok(context, rapt_mha_forward(context, layer, query, key, value, options, &out));
    return out;
}

rapt_tensor self_attention(const rapt_mha *layer, const rapt_tensor *x, const rapt_options *options) {
    return forward(layer, x, x, x, options);
}

rapt_tensor slice(const rapt_tensor *tensor, int32_t dim, int64_t start, int64_t count) {
    rapt_tensor view;
    assert_ok(context, rapt_tensor_slice(context, tensor, dim, start, count, &view));
    return view;
}

void free_list(rapt_tensor *const *tensors) {
    for (; *tensors != NULL; tensors++) free_tensor(*tensors);
}

void assert_same_and_free(rapt_tensor actual, rapt_tensor expected) {
    assert_true(same_bits(&actual, &expected));
    free_tensors(&actual, &expected);
}

/* ---- layers of all kinds ---- */

rapt_mha_config kind_of_layer(int kind, rapt_dtype dtype) {
    rapt_mha_config config = rapt_mha_config_default(24, 4);
    config.batch_first = true;
    config.dtype = dtype;
    if (kind == 1) config.num_kv_heads = 2;
    if (kind == 2) {
        config.num_kv_heads = 1;
        config.head_dim = 7;
    }
    if (kind == 3) config.add_bias_kv = config.add_zero_attn = true;
    if (kind == 4) config.bias = false;
    if (kind == 5) {
        config.num_kv_heads = 2;
        config.kdim = 9;
        config.vdim = 11;
        config.add_zero_attn = true;
    }
    return config;
}

bool takes_self_attention(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    return c->kdim == c->embed_dim && c->vdim == c->embed_dim;
}

/* Runs check for each kind of layer, f32 and f64, on both backends. */
void for_each_layer(layer_check check) {
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64};
    rapt_context *shared = context;
    for (int backend = 0; backend < 2; backend++) {
        context = make_context(2, RAPT_ISA_AUTO, backend == 0 ? RAPT_BACKEND_CPU : RAPT_BACKEND_REFERENCE);
        for (int i = 0; i < 2 * KINDS; i++) {
            rapt_mha_config config = kind_of_layer(i / 2, dtypes[i % 2]);
            rapt_mha *layer = create_random(&config);
            check(layer);
            rapt_mha_destroy(layer);
        }
        rapt_context_destroy(context);
    }
    context = shared;
}

/* A check as a test of its own, by its name. */
void run_on_each_layer(void **state) { for_each_layer(*(layer_check *)*state); }

inputs make_inputs(const rapt_mha *layer, int64_t n, int64_t l, int64_t s) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    return (inputs){random_tensor(1, c->dtype, 3, (int64_t[]){n, l, c->embed_dim}),
                    random_tensor(2, c->dtype, 3, (int64_t[]){n, s, c->kdim}),
                    random_tensor(3, c->dtype, 3, (int64_t[]){n, s, c->vdim})};
}

void free_inputs(inputs *x) { free_tensors(&x->query, &x->key, &x->value); }

int64_t extra_keys(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    return (c->add_bias_kv ? 1 : 0) + (c->add_zero_attn ? 1 : 0);
}
