/* test_layer.c - the layer: settings, parameters, first weights, modes */
#include "layer_support.h"

/* Of all first weights of the two layers in test_one_seed_gives_the_same_weights_everywhere. */
static const uint64_t CHECKSUM_PLAIN = 0x1a95a05fba17e59e, CHECKSUM_RICH = 0x7722176a0262acd2;

/* ---- settings ---- */

static void test_config_defaults(void **state) {
    (void)state;
    rapt_mha_config c = rapt_mha_config_default(64, 4);
    assert_int_equal(c.struct_size, sizeof c);
    assert_true(c.embed_dim == 64 && c.num_heads == 4);
    assert_true(c.num_kv_heads == RAPT_DEFAULT && c.head_dim == RAPT_DEFAULT && c.kdim == RAPT_DEFAULT &&
                c.vdim == RAPT_DEFAULT);
    assert_true(c.bias && !c.add_bias_kv && !c.add_zero_attn && !c.batch_first && !c.causal && !c.set_scale);
    assert_true(c.dropout == 0 && c.dtype == RAPT_F32 && c.device == RAPT_DEVICE_CPU && c.init == RAPT_INIT_PYTORCH &&
                c.seed == 0);
}

static void test_settings_are_derived(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(64, 4);
    rapt_mha *layer = create(&config);
    const rapt_mha_config *c = rapt_mha_settings(layer);
    assert_true(c->num_kv_heads == 4 && c->head_dim == 16 && c->kdim == 64 && c->vdim == 64);
    assert_true(c->scale == 0.25 && !c->set_scale && c->bias);
    rapt_mha *again = create(c); /* settings make the same layer again */
    assert_int_equal(rapt_mha_num_parameters(again), rapt_mha_num_parameters(layer));
    rapt_mha_destroy(again);
    rapt_mha_destroy(layer);

    config = rapt_mha_config_default(30, 4); /* not divisible: head_dim is set apart */
    config.head_dim = 9;
    config.num_kv_heads = 2;
    config.kdim = 5;
    config.set_scale = true;
    config.scale = 0;
    config.causal = config.batch_first = config.add_bias_kv = config.add_zero_attn = true;
    config.bias = false;
    config.dropout = 0.5;
    config.dtype = RAPT_F64;
    config.init = RAPT_INIT_XAVIER;
    config.seed = 12;
    layer = create(&config);
    c = rapt_mha_settings(layer);
    assert_true(c->embed_dim == 30 && c->num_heads == 4 && c->num_kv_heads == 2 && c->head_dim == 9 && c->kdim == 5 &&
                c->vdim == 30);
    assert_true(c->set_scale && c->scale == 0 && c->causal && c->batch_first && c->add_bias_kv && c->add_zero_attn &&
                !c->bias);
    assert_true(c->dropout == 0.5 && c->dtype == RAPT_F64 && c->init == RAPT_INIT_XAVIER && c->seed == 12);
    rapt_mha_destroy(layer);
    assert_null(rapt_mha_settings(NULL));
}

static void assert_kind(rapt_mha *layer, int64_t kv_heads, bool is_mha, bool is_mqa, bool is_gqa) {
    assert_int_equal(rapt_mha_settings(layer)->num_kv_heads, kv_heads);
    assert_true(rapt_mha_is_mha(layer) == is_mha && rapt_mha_is_mqa(layer) == is_mqa &&
                rapt_mha_is_gqa(layer) == is_gqa);
    rapt_mha_destroy(layer);
}

static void test_short_forms_and_kinds_of_heads(void **state) {
    (void)state;
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_mha(context, 24, 6, &layer));
    assert_kind(layer, 6, true, false, false);
    assert_ok(context, rapt_mha_create_mqa(context, 24, 6, &layer));
    assert_kind(layer, 1, false, true, false);
    assert_ok(context, rapt_mha_create_gqa(context, 24, 6, 3, &layer));
    assert_kind(layer, 3, false, false, true);
    assert_ok(context, rapt_mha_create_gqa(context, 24, 6, 6, &layer));
    assert_kind(layer, 6, true, false, false);
    assert_ok(context, rapt_mha_create_mha(context, 24, 1, &layer)); /* one head is both */
    assert_kind(layer, 1, true, true, false);
    assert_int_equal(rapt_mha_create_gqa(context, 24, 6, RAPT_DEFAULT, &layer), RAPT_ERROR_ARGUMENT);
    assert_null(layer);
    assert_false(rapt_mha_is_mha(NULL) || rapt_mha_is_mqa(NULL) || rapt_mha_is_gqa(NULL));
}

/* ---- parameters ---- */

typedef struct expected_parameter {
    const char *name;
    int32_t ndim;
    int64_t shape[3];
} expected_parameter;

/* Names, order and shapes, by number and by name; and the number of scalars. */
static void assert_parameters(const rapt_mha_config *config, int32_t count, const expected_parameter *expected,
                              int64_t scalars) {
    rapt_mha *layer = create(config);
    assert_int_equal(rapt_mha_num_tensors(layer), count);
    for (int32_t i = 0; i < count; i++) {
        const char *name;
        rapt_tensor view, found = parameter(layer, expected[i].name);
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, &name, &view));
        assert_string_equal(name, expected[i].name);
        assert_int_equal(view.ndim, expected[i].ndim);
        for (int32_t d = 0; d < view.ndim; d++) assert_int_equal(view.shape[d], expected[i].shape[d]);
        assert_int_equal(view.dtype, config->dtype);
        assert_true(rapt_tensor_is_contiguous(&view));
        assert_memory_equal(&found, &view, sizeof view);
    }
    assert_int_equal(rapt_mha_num_parameters(layer), scalars);
    rapt_tensor view;
    assert_int_equal(rapt_mha_tensor_at(context, layer, count, NULL, &view), RAPT_ERROR_ARGUMENT);
    assert_int_equal(rapt_mha_tensor_at(context, layer, -1, NULL, &view), RAPT_ERROR_ARGUMENT);
    rapt_mha_destroy(layer);
}

static void test_parameter_names_order_and_shapes(void **state) {
    (void)state;
    rapt_mha_config c = rapt_mha_config_default(12, 3); /* fused: 4 E^2 + 4 E */
    assert_parameters(&c, 4,
                      (expected_parameter[]){{"in_proj_weight", 2, {36, 12}},
                                             {"in_proj_bias", 1, {36}},
                                             {"out_proj.weight", 2, {12, 12}},
                                             {"out_proj.bias", 1, {12}}},
                      4 * 12 * 12 + 4 * 12);
    c.bias = false;
    assert_parameters(&c, 2, (expected_parameter[]){{"in_proj_weight", 2, {36, 12}}, {"out_proj.weight", 2, {12, 12}}},
                      4 * 12 * 12);
    c = rapt_mha_config_default(12, 3); /* separate, and bias_k, bias_v */
    c.kdim = 5;
    c.vdim = 7;
    c.add_bias_kv = true;
    c.add_zero_attn = true; /* has no parameter */
    assert_parameters(&c, 8,
                      (expected_parameter[]){{"q_proj_weight", 2, {12, 12}},
                                             {"k_proj_weight", 2, {12, 5}},
                                             {"v_proj_weight", 2, {12, 7}},
                                             {"in_proj_bias", 1, {36}},
                                             {"bias_k", 3, {1, 1, 12}},
                                             {"bias_v", 3, {1, 1, 12}},
                                             {"out_proj.weight", 2, {12, 12}},
                                             {"out_proj.bias", 1, {12}}},
                      12 * (12 + 5 + 7) + 36 + 24 + 144 + 12);
    c = rapt_mha_config_default(12, 3);
    c.vdim = 7; /* one of the two suffices */
    c.bias = false;
    assert_parameters(&c, 4,
                      (expected_parameter[]){{"q_proj_weight", 2, {12, 12}},
                                             {"k_proj_weight", 2, {12, 12}},
                                             {"v_proj_weight", 2, {12, 7}},
                                             {"out_proj.weight", 2, {12, 12}}},
                      12 * (12 + 12 + 7 + 12));
    c = rapt_mha_config_default(10, 4); /* (H + 2 Hk) D rows */
    c.num_kv_heads = 2;
    c.head_dim = 3;
    c.add_bias_kv = true;
    c.dtype = RAPT_BF16;
    assert_parameters(&c, 6,
                      (expected_parameter[]){{"in_proj_weight", 2, {24, 10}},
                                             {"in_proj_bias", 1, {24}},
                                             {"bias_k", 3, {1, 1, 6}},
                                             {"bias_v", 3, {1, 1, 6}},
                                             {"out_proj.weight", 2, {10, 12}},
                                             {"out_proj.bias", 1, {10}}},
                      24 * 10 + 24 + 12 + 120 + 10);
}

static void assert_absent(const rapt_mha *layer, const char *name) {
    rapt_tensor view = {0};
    assert_int_equal(rapt_mha_find(context, layer, name, &view), RAPT_ERROR_ABSENT);
    if (strstr(rapt_error_message(context), name) == NULL)
        fail_msg("\"%s\" does not name %s", rapt_error_message(context), name);
    assert_null(view.data);
}

/* `name` finds the rows from `first` on of the fused parameter. */
static void assert_rows_of(const rapt_mha *layer, const char *name, const char *fused_name, int64_t first,
                           int64_t rows) {
    rapt_tensor view = parameter(layer, name), fused = parameter(layer, fused_name);
    assert_ptr_equal(view.data, (float *)fused.data + first * fused.stride[0]);
    assert_int_equal(view.ndim, fused.ndim);
    assert_int_equal(view.shape[0], rows);
    if (view.ndim == 2) assert_int_equal(view.shape[1], fused.shape[1]);
    assert_memory_equal(view.stride, fused.stride, sizeof view.stride);
}

static void test_other_names_find_rows_of_fused_parameters(void **state) {
    (void)state;
    rapt_mha_config config = kind_of_layer(1, RAPT_F32); /* H D = 24, Hk D = 12 */
    rapt_mha *layer = create(&config);
    static const char *const weights[3][2] = {
        {"q_proj.weight", "q_proj_weight"}, {"k_proj.weight", "k_proj_weight"}, {"v_proj.weight", "v_proj_weight"}};
    static const char *const biases[3] = {"q_proj.bias", "k_proj.bias", "v_proj.bias"};
    const int64_t first[3] = {0, 24, 36}, rows[3] = {24, 12, 12};
    for (int i = 0; i < 3; i++) {
        assert_rows_of(layer, weights[i][0], "in_proj_weight", first[i], rows[i]);
        assert_rows_of(layer, weights[i][1], "in_proj_weight", first[i], rows[i]);
        assert_rows_of(layer, biases[i], "in_proj_bias", first[i], rows[i]);
    }
    const char *const missing[] = {"bias_k",  "bias_v",         "",       "q_proj",
                                   "in_proj", "q_proj.weights", "weight", "IN_PROJ_WEIGHT"};
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) assert_absent(layer, missing[i]);
    rapt_mha_destroy(layer);

    config.kdim = 5;
    config.bias = false;
    layer = create(&config);
    assert_rows_of(layer, "k_proj.weight", "k_proj_weight", 0, 12);
    const char *const absent[] = {"in_proj_weight", "in_proj_bias", "q_proj.bias", "out_proj.bias"};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) assert_absent(layer, absent[i]);
    rapt_mha_destroy(layer);
}

/* A write takes effect with rapt_mha_commit, not before. */
static void test_writing_and_commit(void **state) {
    (void)state;
    static const char *const names[] = {"in_proj_weight", "q_proj.weight",   "k_proj_weight",
                                        "v_proj.bias",    "out_proj.weight", "out_proj.bias"};
    rapt_mha_config config = kind_of_layer(1, RAPT_F32);
    rapt_mha *layer = create_random(&config);
    rapt_tensor x = random_tensor(5, RAPT_F32, 3, (int64_t[]){2, 6, 24});
    assert_int_equal(rapt_mha_version(layer), 2); /* 1 when new, then create_random committed */
    rapt_tensor before = self_attention(layer, &x, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        rapt_tensor view = parameter(layer, names[i]);
        uint64_t version = rapt_mha_version(layer);
        set_element(&view, 7, get_element(&view, 7) + 1);
        rapt_tensor uncommitted = self_attention(layer, &x, NULL);
        assert_true(same_bits(&uncommitted, &before));
        assert_int_equal(rapt_mha_version(layer), version);
        assert_ok(context, rapt_mha_commit(context, layer));
        assert_int_equal(rapt_mha_version(layer), version + 1);
        rapt_tensor after = self_attention(layer, &x, NULL);
        if (same_bits(&after, &before)) fail_msg("writing %s changed nothing", names[i]);
        free_tensors(&uncommitted, &before);
        before = after;
    }
    free_tensors(&before, &x);
    rapt_mha_destroy(layer);
    assert_int_equal(rapt_mha_commit(context, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_version(NULL), 0);
    assert_int_equal(rapt_mha_num_parameters(NULL), 0);
}

/* ---- ready weights ---- */

typedef struct ready {
    rapt_tensor in_weight, q_bias, k_bias, v_bias, fused_bias, out_weight, out_bias;
} ready;

static ready make_ready(void) { /* E = 12, H = 3, Hk = 1, D = 4 */
    return (ready){
        random_tensor(1, RAPT_F32, 2, (int64_t[]){20, 12}), random_tensor(2, RAPT_F32, 1, (int64_t[]){12}),
        random_tensor(3, RAPT_F32, 1, (int64_t[]){4}),      random_tensor(4, RAPT_F32, 1, (int64_t[]){4}),
        random_tensor(5, RAPT_F32, 1, (int64_t[]){20}),     random_tensor(6, RAPT_F32, 2, (int64_t[]){12, 12}),
        random_tensor(7, RAPT_F32, 1, (int64_t[]){12})};
}

static void free_ready(ready *w) {
    free_tensors(&w->in_weight, &w->q_bias, &w->k_bias, &w->v_bias, &w->fused_bias, &w->out_weight, &w->out_bias);
}

static rapt_mha_weights ready_weights(const ready *w) {
    rapt_mha_weights weights = rapt_mha_weights_default(3);
    weights.num_kv_heads = 1;
    weights.batch_first = true;
    weights.in_proj_weight = &w->in_weight;
    weights.out_proj_weight = &w->out_weight;
    return weights;
}

static rapt_mha *create_ready(const rapt_mha_weights *weights, rapt_ownership ownership) {
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_from_weights(context, weights, ownership, &layer));
    return layer;
}

/* The weights' struct and tensors are overwritten and freed: the layer has what it needs of them. */
static rapt_mha *create_and_forget(const ready *w, rapt_ownership ownership) {
    struct {
        rapt_mha_weights weights;
        ready tensors;
    } *gone = malloc(sizeof *gone);
    assert_non_null(gone);
    gone->tensors = *w;
    gone->weights = ready_weights(&gone->tensors);
    gone->weights.in_proj_bias = &gone->tensors.fused_bias;
    gone->weights.out_proj_bias = &gone->tensors.out_bias;
    rapt_mha *layer = create_ready(&gone->weights, ownership);
    memset(gone, 0xa5, sizeof *gone);
    free(gone);
    return layer;
}

/* Names in the same order, each with the same values. */
static void assert_same_parameters(const rapt_mha *a, const rapt_mha *b) {
    assert_int_equal(rapt_mha_num_tensors(a), rapt_mha_num_tensors(b));
    for (int32_t i = 0; i < rapt_mha_num_tensors(a); i++) {
        const char *name_a, *name_b;
        rapt_tensor view_a, view_b;
        assert_ok(context, rapt_mha_tensor_at(context, a, i, &name_a, &view_a));
        assert_ok(context, rapt_mha_tensor_at(context, b, i, &name_b, &view_b));
        assert_string_equal(name_a, name_b);
        assert_true(same_bits(&view_a, &view_b));
    }
}

static void test_borrowed_and_copied_weights(void **state) {
    (void)state;
    ready w = make_ready();
    rapt_mha *borrowed = create_and_forget(&w, RAPT_BORROW), *copied = create_and_forget(&w, RAPT_COPY);
    rapt_tensor x = random_tensor(9, RAPT_F32, 3, (int64_t[]){2, 5, 12});
    rapt_tensor first = self_attention(borrowed, &x, NULL), same = self_attention(copied, &x, NULL);
    assert_true(same_bits(&first, &same));
    assert_ptr_equal(parameter(borrowed, "in_proj_weight").data, w.in_weight.data);
    assert_ptr_equal(parameter(borrowed, "k_proj.weight").data, (float *)w.in_weight.data + 12 * 12);
    assert_ptr_not_equal(parameter(copied, "in_proj_weight").data, w.in_weight.data);
    assert_int_equal(rapt_mha_num_parameters(borrowed), rapt_mha_num_parameters(copied));
    assert_int_equal(rapt_mha_num_tensors(borrowed), 4);
    assert_same_parameters(borrowed, copied);

    set_element(&w.in_weight, 3, 5); /* through the caller's memory */
    assert_ok(context, rapt_mha_commit(context, borrowed));
    assert_ok(context, rapt_mha_commit(context, copied));
    rapt_tensor changed = self_attention(borrowed, &x, NULL), kept = self_attention(copied, &x, NULL);
    assert_false(same_bits(&changed, &first));
    assert_true(same_bits(&kept, &first));

    rapt_mha *renewed = create_and_forget(&w, RAPT_COPY); /* what a new layer makes of the changed memory */
    assert_same_and_free(self_attention(renewed, &x, NULL), changed);
    rapt_mha_destroy(renewed);
    rapt_mha_destroy(borrowed);
    rapt_mha_destroy(copied);
    free_tensors(&first, &same, &kept, &x);
    free_ready(&w);
}

/* Biases of the query and the value alone: as if the key's were zeros. */
static void test_partial_biases(void **state) {
    (void)state;
    ready w = make_ready();
    rapt_mha_weights weights = ready_weights(&w);
    weights.q_proj_bias = &w.q_bias;
    weights.v_proj_bias = &w.v_bias;
    rapt_tensor x = random_tensor(9, RAPT_F32, 3, (int64_t[]){2, 5, 12});
    rapt_mha *partial[2] = {create_ready(&weights, RAPT_BORROW), create_ready(&weights, RAPT_COPY)};
    fill_value(&w.k_bias, 0);
    weights.k_proj_bias = &w.k_bias;
    rapt_mha *full = create_ready(&weights, RAPT_COPY);
    assert_int_equal(parameter(full, "in_proj_bias").shape[0], 20); /* all three are one */
    rapt_tensor expected = self_attention(full, &x, NULL);
    assert_same_parameters(partial[0], partial[1]);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rapt_mha_num_tensors(partial[i]), 4);
        assert_int_equal(rapt_mha_num_parameters(partial[i]), 20 * 12 + 12 + 4 + 12 * 12);
        assert_true(rapt_mha_settings(partial[i])->bias);
        rapt_tensor q_bias = parameter(partial[i], "q_proj.bias"), v_bias = parameter(partial[i], "v_proj.bias");
        assert_true(same_bits(&q_bias, &w.q_bias) && same_bits(&v_bias, &w.v_bias));
        assert_absent(partial[i], "k_proj.bias");
        assert_absent(partial[i], "in_proj_bias");
        assert_absent(partial[i], "out_proj.bias");
        rapt_tensor out = self_attention(partial[i], &x, NULL);
        assert_true(same_bits(&out, &expected));
        free_tensor(&out);
        rapt_mha_destroy(partial[i]);
    }
    rapt_mha_destroy(full);
    free_tensors(&expected, &x);
    free_ready(&w);
}

/* ---- first weights ---- */

/* Uniform within bound: never outside, nearly reaching it, mean 0 and variance bound^2 / 3. */
static void assert_uniform(const rapt_mha *layer, const char *name, double bound) {
    rapt_tensor view = parameter(layer, name);
    int64_t count = rapt_tensor_count(&view);
    double sum = 0, squares = 0, largest = largest_magnitude(&view), n = (double)count;
    for (int64_t i = 0; i < count; i++) {
        double value = get_element(&view, i);
        sum += value;
        squares += value * value;
    }
    bool fits = largest <= (double)(float)bound && largest > bound * (1 - 10 / n) &&
                fabs(sum / n) < 5 * bound / sqrt(3 * n) && fabs(squares / n / (bound * bound / 3) - 1) < 5 / sqrt(n);
    if (!fits)
        fail_msg("%s: largest %g, mean %g, mean square %g, bound %g", name, largest, sum / n, squares / n, bound);
}

static void assert_normal(const rapt_mha *layer, const char *name, double deviation) {
    rapt_tensor view = parameter(layer, name);
    int64_t count = rapt_tensor_count(&view), within = 0;
    double sum = 0, squares = 0, n = (double)count;
    for (int64_t i = 0; i < count; i++) {
        double value = get_element(&view, i);
        sum += value;
        squares += value * value;
        within += fabs(value) < deviation;
    }
    bool fits = fabs(sum / n) < 5 * deviation / sqrt(n) &&
                fabs(squares / n / (deviation * deviation) - 1) < 8 / sqrt(n) &&
                fabs((double)within / n - 0.6827) < 3 / sqrt(n) && largest_magnitude(&view) > 2 * deviation;
    if (!fits) fail_msg("%s: mean %g, mean square %g, deviation %g", name, sum / n, squares / n, deviation);
}

static void assert_zero(const rapt_mha *layer, const char *name) {
    rapt_tensor view = parameter(layer, name);
    assert_true(largest_magnitude(&view) == 0);
}

static void test_first_weights_follow_pytorch(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(32, 4); /* H D = 256, Hk D = 128: fused [512, 32] */
    config.num_kv_heads = 2;
    config.head_dim = 64;
    config.add_bias_kv = true;
    rapt_mha *layer = create(&config);
    assert_uniform(layer, "in_proj_weight", sqrt(6.0 / (512 + 32)));
    assert_uniform(layer, "k_proj.weight", sqrt(6.0 / (512 + 32))); /* the fused shape counts, not the projection's */
    assert_uniform(layer, "out_proj.weight", 1 / sqrt(256.0));
    assert_zero(layer, "in_proj_bias");
    assert_zero(layer, "out_proj.bias");
    assert_normal(layer, "bias_k", 1 / sqrt(128.0));
    assert_normal(layer, "bias_v", 1 / sqrt(128.0));
    rapt_mha_destroy(layer);

    config.kdim = 100; /* separate weights: each by its own shape */
    config.vdim = 10;
    layer = create(&config);
    assert_uniform(layer, "q_proj_weight", sqrt(6.0 / (256 + 32)));
    assert_uniform(layer, "k_proj_weight", sqrt(6.0 / (128 + 100)));
    assert_uniform(layer, "v_proj_weight", sqrt(6.0 / (128 + 10)));
    assert_uniform(layer, "out_proj.weight", 1 / sqrt(256.0));
    rapt_mha_destroy(layer);
}

static void test_first_weights_by_xavier(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(32, 4);
    config.num_kv_heads = 2;
    config.head_dim = 64;
    config.init = RAPT_INIT_XAVIER;
    rapt_mha *layer = create(&config);
    assert_uniform(layer, "q_proj.weight", sqrt(6.0 / (256 + 32)));
    assert_uniform(layer, "k_proj.weight", sqrt(6.0 / (128 + 32)));
    assert_uniform(layer, "v_proj.weight", sqrt(6.0 / (128 + 32)));
    assert_uniform(layer, "out_proj.weight", sqrt(6.0 / (32 + 256)));
    assert_zero(layer, "in_proj_bias");
    rapt_tensor k = parameter(layer, "k_proj.weight"), v = parameter(layer, "v_proj.weight");
    assert_false(same_bits(&k, &v));
    rapt_mha_destroy(layer);
}

static uint64_t parameters_checksum(const rapt_mha *layer) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &view));
        sum = checksum(sum, &view);
    }
    return sum;
}

static uint64_t checksum_with_threads(const rapt_mha_config *config, int32_t threads) {
    rapt_context *shared = context;
    context = make_context(threads, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_mha *layer = create(config);
    uint64_t sum = parameters_checksum(layer);
    rapt_mha_destroy(layer);
    rapt_context_destroy(context);
    context = shared;
    return sum;
}

/* The checksums hold on every platform: a change of theirs is a change of everyone's first weights. */
static void test_one_seed_gives_the_same_weights_everywhere(void **state) {
    (void)state;
    rapt_mha_config plain = rapt_mha_config_default(64, 4), rich = rapt_mha_config_default(40, 8);
    plain.seed = 1;
    rich.seed = 0x123456789abcdef0;
    rich.num_kv_heads = 2;
    rich.kdim = 24;
    rich.add_bias_kv = true;
    rich.dtype = RAPT_F64;
    rich.init = RAPT_INIT_XAVIER;
    uint64_t plain_sum = checksum_with_threads(&plain, 1), rich_sum = checksum_with_threads(&rich, 1);
    if (plain_sum != CHECKSUM_PLAIN || rich_sum != CHECKSUM_RICH) {
        fail_msg("checksums 0x%016llx and 0x%016llx", (unsigned long long)plain_sum, (unsigned long long)rich_sum);
    }
    assert_true(checksum_with_threads(&plain, 4) == plain_sum && checksum_with_threads(&rich, 4) == rich_sum);
    plain.seed = 2;
    assert_true(checksum_with_threads(&plain, 1) != plain_sum);
    rich.seed ^= (uint64_t)1 << 63; /* every bit of the seed counts */
    assert_true(checksum_with_threads(&rich, 1) != rich_sum);
}

/* A narrower type holds the f64 draw, rounded. */
static void test_first_weights_of_narrower_types(void **state) {
    (void)state;
    static const rapt_dtype narrow[] = {RAPT_F32, RAPT_BF16, RAPT_F16};
    rapt_mha_config config = kind_of_layer(3, RAPT_F64);
    rapt_mha *wide = create(&config);
    for (int t = 0; t < 3; t++) {
        config.dtype = narrow[t];
        rapt_mha *layer = create(&config);
        for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
            rapt_tensor view, wide_view;
            assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &view));
            assert_ok(context, rapt_mha_tensor_at(context, wide, i, NULL, &wide_view));
            rapt_tensor rounded = make_tensor(narrow[t], view.ndim, view.shape);
            assert_ok(context, rapt_tensor_copy(context, &wide_view, &rounded));
            assert_true(same_bits(&rounded, &view));
            free_tensor(&rounded);
        }
        rapt_mha_destroy(layer);
    }
    rapt_mha_destroy(wide);
}

/* ---- description and modes ---- */

static void assert_description(const rapt_mha_config *config, const char *expected) {
    rapt_mha *layer = create(config);
    char text[400], small[11];
    int length = (int)strlen(expected);
    assert_int_equal(rapt_mha_describe(layer, text, sizeof text), length);
    assert_string_equal(text, expected);
    memset(small, '#', sizeof small);
    assert_int_equal(rapt_mha_describe(layer, small, 10), length); /* as snprintf: cut, ended, and the length needed */
    assert_memory_equal(small, expected, 9);
    assert_true(small[9] == '\0' && small[10] == '#');
    assert_int_equal(rapt_mha_describe(layer, NULL, 0), length);
    assert_int_equal(rapt_mha_describe(layer, text, (size_t)length + 1), length);
    assert_string_equal(text, expected);
    rapt_mha_destroy(layer);
}

static void test_describe(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(64, 4);
    assert_description(&config, "MultiheadAttention(embed_dim=64, num_heads=4, dtype=f32, 16640 parameters)");
    config = rapt_mha_config_default(10, 4);
    config.num_kv_heads = 2;
    config.head_dim = 3;
    config.kdim = 5;
    config.bias = false;
    config.add_bias_kv = config.add_zero_attn = config.batch_first = config.causal = config.set_scale = true;
    config.scale = 0.125;
    config.dropout = 0.5;
    config.dtype = RAPT_BF16;
    assert_description(
        &config,
        "MultiheadAttention(embed_dim=10, num_heads=4, num_kv_heads=2, head_dim=3, kdim=5, vdim=10, bias=false, "
        "add_bias_kv, add_zero_attn, batch_first, causal, scale=0.125, dropout=0.5, dtype=bf16, 342 parameters)");
}

static void modes_and_dropout(void) {
    rapt_mha_config config = kind_of_layer(0, RAPT_F32);
    rapt_mha *plain = create_random(&config);
    config.dropout = 0.25;
    rapt_mha *layer = create_random(&config);
    assert_true(rapt_mha_is_training(layer)); /* new layers train */
    rapt_tensor x = random_tensor(5, RAPT_F32, 3, (int64_t[]){2, 6, 24});
    rapt_options train = {.mode = RAPT_MODE_TRAIN}, eval = {.mode = RAPT_MODE_EVAL};
    rapt_tensor expected = self_attention(plain, &x, NULL), by_call = self_attention(layer, &x, &eval);
    assert_true(same_bits(&by_call, &expected));
    assert_true(rapt_mha_is_training(layer));
    rapt_tensor dropped = self_attention(layer, &x, NULL);
    assert_false(same_bits(&dropped, &expected));

    rapt_mha_eval(layer);
    assert_false(rapt_mha_is_training(layer));
    rapt_tensor by_layer = self_attention(layer, &x, NULL);
    assert_true(same_bits(&by_layer, &expected));
    rapt_tensor dropped_by_call = self_attention(layer, &x, &train);
    assert_false(same_bits(&dropped_by_call, &expected));
    assert_false(same_bits(&dropped_by_call, &dropped)); /* each call draws anew */
    rapt_mha_train(layer);
    assert_true(rapt_mha_is_training(layer));
    assert_same_and_free(self_attention(plain, &x, &train), expected); /* without dropout both modes are one */

    assert_ok(context, rapt_context_set_seed(context, 0)); /* from the beginning */
    assert_same_and_free(self_attention(layer, &x, NULL), dropped);
    rapt_options second = {.set_dropout_seed = true, .dropout_offset = 1}; /* calls in eval mode do not count */
    assert_same_and_free(self_attention(layer, &x, &second), dropped_by_call);
    free_tensors(&by_call, &by_layer, &x);
    rapt_mha_destroy(layer);
    rapt_mha_destroy(plain);
    rapt_mha_train(NULL);
    rapt_mha_eval(NULL);
    assert_false(rapt_mha_is_training(NULL));
}

static void test_modes_and_dropout(void **state) {
    (void)state;
    rapt_context *shared = context;
    context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    modes_and_dropout();
    rapt_context_destroy(context);
    context = shared;
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_defaults),
        cmocka_unit_test(test_settings_are_derived),
        cmocka_unit_test(test_short_forms_and_kinds_of_heads),
        cmocka_unit_test(test_parameter_names_order_and_shapes),
        cmocka_unit_test(test_other_names_find_rows_of_fused_parameters),
        cmocka_unit_test(test_writing_and_commit),
        cmocka_unit_test(test_borrowed_and_copied_weights),
        cmocka_unit_test(test_partial_biases),
        cmocka_unit_test(test_first_weights_follow_pytorch),
        cmocka_unit_test(test_first_weights_by_xavier),
        cmocka_unit_test(test_one_seed_gives_the_same_weights_everywhere),
        cmocka_unit_test(test_first_weights_of_narrower_types),
        cmocka_unit_test(test_describe),
        cmocka_unit_test(test_modes_and_dropout),
    };
    return cmocka_run_group_tests_name("layer", tests, make_cpu_context, destroy_shared_context);
}
