/* test_optimizer_layers.c - optimisers of layers: gradients' memory, parameters fused, apart or frozen, commits, and runs
 * that go on from a file */
#include "checkpoint_support.h"

static rapt_optimizer *make_optimizer(const rapt_optimizer_config *config) {
    rapt_optimizer *optimizer;
    assert_ok(context, rapt_optimizer_create(context, config, &optimizer));
    return optimizer;
}

static void step(rapt_optimizer *optimizer) { assert_ok(context, rapt_optimizer_step(context, optimizer)); }

static void test_gradients_of_layers(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        rapt_mha_config config = kind_of_layer(kind, kind % 2 == 0 ? RAPT_F32 : RAPT_BF16);
        rapt_mha *layer = create_random(&config);
        rapt_mha_gradients *g, zero = {0};
        assert_ok(context, rapt_mha_gradients_create(context, layer, &g));
        const rapt_tensor *fields[] = {g->in_proj_weight, g->q_proj_weight,   g->k_proj_weight, g->v_proj_weight,
                                       g->in_proj_bias,   g->q_proj_bias,     g->k_proj_bias,   g->v_proj_bias,
                                       g->bias_k,         g->out_proj_weight, g->out_proj_bias, g->bias_v};
        const char *const names[] = {"in_proj_weight", "q_proj_weight",   "k_proj_weight", "v_proj_weight",
                                     "in_proj_bias",   "q_proj.bias",     "k_proj.bias",   "v_proj.bias",
                                     "bias_k",         "out_proj.weight", "out_proj.bias", "bias_v"};
        int32_t found = 0;
        for (int i = 0; i < 12; i++) {
            bool has = false;
            rapt_tensor view = {0};
            for (int32_t k = 0; k < rapt_mha_num_tensors(layer) && !has; k++) {
                const char *name;
                assert_ok(context, rapt_mha_tensor_at(context, layer, k, &name, &view));
                has = strcmp(name, names[i]) == 0;
            }
            assert_int_equal(fields[i] != NULL, has);
            if (!has) continue;
            found++;
            assert_int_equal(fields[i]->dtype, view.dtype);
            assert_int_equal(fields[i]->ndim, view.ndim);
            assert_memory_equal(fields[i]->shape, view.shape, sizeof view.shape);
            assert_true(rapt_tensor_is_contiguous(fields[i]) && largest_magnitude(fields[i]) == 0);
            fill_value(fields[i], i + 1); /* memory of its own: the others stay as they are */
        }
        for (int i = 0; i < 12; i++) {
            for (int64_t k = 0; fields[i] != NULL && k < rapt_tensor_count(fields[i]); k++)
                assert_true(get_element(fields[i], k) == i + 1);
        }
        assert_int_equal(found, rapt_mha_num_tensors(layer));
        assert_null(g->query);
        assert_null(g->attn_mask);
        assert_null(g->static_k);
        assert_false(g->accumulate);
        assert_memory_equal(g->reserved, zero.reserved, sizeof zero.reserved);
        rapt_mha_gradients_destroy(g);
        rapt_mha_destroy(layer);
    }
    rapt_mha_gradients_destroy(NULL);
    rapt_optimizer_destroy(NULL);
    assert_int_equal(rapt_optimizer_steps(NULL), 0);
}

static void fill_gradients(test_random *random, const rapt_mha_gradients *g) {
    const rapt_tensor *fields[] = {g->in_proj_weight, g->q_proj_weight,   g->k_proj_weight, g->v_proj_weight,
                                   g->in_proj_bias,   g->q_proj_bias,     g->k_proj_bias,   g->v_proj_bias,
                                   g->bias_k,         g->out_proj_weight, g->out_proj_bias, g->bias_v};
    for (int i = 0; i < 12; i++)
        if (fields[i] != NULL) fill_random(random, fields[i], 1);
}

/* A step commits: what a forward computes is what a later commit would give, and every parameter has changed. */
static void check_committed(const rapt_mha *layer_to_copy) {
    rapt_mha_config config = *rapt_mha_settings(layer_to_copy);
    rapt_mha *layer = create_random(&config);
    rapt_mha_gradients *gradients;
    assert_ok(context, rapt_mha_gradients_create(context, layer, &gradients));
    test_random random = {4};
    fill_gradients(&random, gradients);
    rapt_optimizer_config settings = rapt_optimizer_config_default(RAPT_ADAMW);
    settings.learning_rate = 0.1;
    rapt_optimizer *optimizer = make_optimizer(&settings);
    assert_ok(context, rapt_optimizer_add_layer(context, optimizer, NULL, layer, gradients));
    uint64_t version = rapt_mha_version(layer);
    inputs x = make_inputs(layer, 2, 5, 5);
    rapt_tensor before = forward(layer, &x.query, &x.key, &x.value, NULL);
    step(optimizer);
    assert_int_equal(rapt_mha_version(layer), version + 1);
    rapt_tensor after = forward(layer, &x.query, &x.key, &x.value, NULL);
    assert_true(largest_difference(&before, &after) > 1e-3);
    for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
        rapt_tensor was, is;
        assert_ok(context, rapt_mha_tensor_at(context, layer_to_copy, i, NULL, &was));
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &is));
        for (int64_t k = 0; k < rapt_tensor_count(&is); k++) assert_true(get_element(&was, k) != get_element(&is, k));
    }
    assert_ok(context, rapt_mha_commit(context, layer));
    assert_same_and_free(after, forward(layer, &x.query, &x.key, &x.value, NULL));
    free_tensor(&before);
    free_inputs(&x);
    rapt_optimizer_destroy(optimizer);
    rapt_mha_gradients_destroy(gradients);
    rapt_mha_destroy(layer);
}

/* A step of a layer with these gradients; its parameters' sum. The names are those in the file. */
static uint64_t step_layer(rapt_mha *layer, const rapt_mha_gradients *gradients, rapt_optimizer **kept) {
    rapt_optimizer_config settings = rapt_optimizer_config_default(RAPT_ADAMW);
    settings.learning_rate = 0.1;
    *kept = make_optimizer(&settings);
    assert_ok(context, rapt_optimizer_add_layer(context, *kept, "m.", layer, gradients));
    step(*kept);
    uint64_t sum = 0;
    static const char *const names[] = {"q_proj.weight", "k_proj.weight",  "v_proj.weight", "q_proj.bias",
                                        "k_proj.bias",   "v_proj.bias",    "out_proj.bias", "bias_k",
                                        "bias_v",        "out_proj.weight"};
    for (int i = 0; i < 10; i++) {
        rapt_tensor view;
        if (rapt_mha_find(context, layer, names[i], &view) == RAPT_OK) sum = checksum(sum, &view);
    }
    return sum;
}

/* The layer that `fused` is, in memory of the test's, with projections apart. */
typedef struct apart_layer {
    rapt_tensor weight[3], bias[3], out_weight, out_bias;
    rapt_mha *layer;
} apart_layer;

static apart_layer take_apart(const rapt_mha *fused) {
    apart_layer a;
    rapt_mha_weights w = rapt_mha_weights_default(rapt_mha_settings(fused)->num_heads);
    static const char *const names[2][3] = {{"q_proj.weight", "k_proj.weight", "v_proj.weight"},
                                            {"q_proj.bias", "k_proj.bias", "v_proj.bias"}};
    for (int i = 0; i < 3; i++) {
        rapt_tensor weight = parameter(fused, names[0][i]), bias = parameter(fused, names[1][i]);
        a.weight[i] = convert_tensor(&weight, weight.dtype);
        a.bias[i] = convert_tensor(&bias, bias.dtype);
    }
    rapt_tensor out_weight = parameter(fused, "out_proj.weight"), out_bias = parameter(fused, "out_proj.bias");
    a.out_weight = convert_tensor(&out_weight, out_weight.dtype);
    a.out_bias = convert_tensor(&out_bias, out_bias.dtype);
    w.q_proj_weight = &a.weight[0], w.k_proj_weight = &a.weight[1], w.v_proj_weight = &a.weight[2];
    w.q_proj_bias = &a.bias[0], w.k_proj_bias = &a.bias[1], w.v_proj_bias = &a.bias[2];
    w.out_proj_weight = &a.out_weight;
    w.out_proj_bias = &a.out_bias;
    w.batch_first = true;
    assert_ok(context, rapt_mha_create_from_weights(context, &w, RAPT_BORROW, &a.layer));
    return a;
}

static void free_apart(apart_layer *a) {
    rapt_mha_destroy(a->layer);
    for (int i = 0; i < 3; i++) free_tensors(&a->weight[i], &a->bias[i]);
    free_tensors(&a->out_weight, &a->out_bias);
}

/* Loading the file into a layer that is 0 now gives the bits back, and rapt_mha_load reads the layer without options. */
static void check_file(rapt_optimizer *optimizer, rapt_mha *layer, const rapt_tensor *trained) {
    const char *path = in_folder("layer.safetensors");
    assert_ok(context, rapt_optimizer_save(context, optimizer, path));
    rapt_checkpoint *checkpoint = open_checkpoint(path);
    rapt_mha *loaded;
    assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
    assert_same_forward(layer, loaded);
    rapt_tensor kept = convert_tensor(trained, trained->dtype);
    uint64_t version = rapt_mha_version(layer);
    fill_value(trained, 0);
    assert_ok(context, rapt_optimizer_load(context, optimizer, checkpoint));
    assert_int_equal(rapt_mha_version(layer), version + 1);
    assert_same_forward(layer, loaded);
    assert_true(same_bits(trained, &kept));
    rapt_mha_destroy(loaded);
    rapt_checkpoint_close(checkpoint);
    free_tensor(&kept);
}

/* Fused or apart, layer and gradients: one result. */
static void test_fused_and_apart(void **state) {
    (void)state;
    rapt_mha_config config = kind_of_layer(1, RAPT_F32);
    rapt_mha *fused = create_random(&config), *fused_too = create_random(&config), *frozen = create_random(&config);
    rapt_mha_gradients *together, *apart;
    apart_layer a = take_apart(fused), b = take_apart(fused);
    assert_ok(context, rapt_mha_gradients_create(context, fused, &together));
    assert_ok(context, rapt_mha_gradients_create(context, a.layer, &apart));
    test_random random = {8};
    fill_gradients(&random, together);
    rapt_tensor row[2][3];
    int64_t rows[] = {24, 12, 12};
    for (int64_t i = 0, first = 0; i < 3; first += rows[i++]) {
        row[0][i] = slice(together->in_proj_weight, 0, first, rows[i]);
        row[1][i] = slice(together->in_proj_bias, 0, first, rows[i]);
    }
    const rapt_tensor *targets[2][3] = {{apart->q_proj_weight, apart->k_proj_weight, apart->v_proj_weight},
                                        {apart->q_proj_bias, apart->k_proj_bias, apart->v_proj_bias}};
    for (int i = 0; i < 6; i++)
        assert_ok(context, rapt_tensor_copy(context, &row[i / 3][i % 3], targets[i / 3][i % 3]));
    assert_ok(context, rapt_tensor_copy(context, together->out_proj_weight, apart->out_proj_weight));
    assert_ok(context, rapt_tensor_copy(context, together->out_proj_bias, apart->out_proj_bias));

    rapt_optimizer *optimizer[4];
    uint64_t expected = step_layer(fused, together, &optimizer[0]);
    assert_true(step_layer(fused_too, apart, &optimizer[1]) == expected);
    assert_true(step_layer(a.layer, together, &optimizer[2]) == expected);
    assert_true(step_layer(b.layer, apart, &optimizer[3]) == expected);
    rapt_tensor weight = parameter(fused, "in_proj_weight"), weight_too = parameter(fused_too, "in_proj_weight");
    check_file(optimizer[0], fused, &weight);
    check_file(optimizer[1], fused_too, &weight_too);
    check_file(optimizer[2], a.layer, &a.bias[1]); /* in the file, biases are fused */
    check_file(optimizer[3], b.layer, &b.weight[2]);
    for (int i = 0; i < 4; i++) rapt_optimizer_destroy(optimizer[i]);

    /* The value's rows alone: the rest is frozen, and in the file. */
    rapt_mha_gradients some = {.v_proj_weight = apart->v_proj_weight, .out_proj_bias = apart->out_proj_bias};
    rapt_mha *original = create_random(&config);
    step_layer(frozen, &some, &optimizer[0]);
    static const char *const names[] = {"q_proj.weight",   "k_proj.weight", "in_proj_bias",
                                        "out_proj.weight", "v_proj.weight", "out_proj.bias"};
    for (int i = 0; i < 6; i++) {
        rapt_tensor was = parameter(original, names[i]), is = parameter(frozen, names[i]);
        rapt_tensor stepped = parameter(fused, names[i]);
        assert_true(same_bits(&is, i < 4 ? &was : &stepped));
    }
    rapt_tensor value = parameter(frozen, "v_proj.weight"), query = parameter(frozen, "q_proj.weight");
    check_file(optimizer[0], frozen, &value);
    set_element(&query, 0, 77); /* loading leaves what is frozen alone */
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("layer.safetensors"));
    assert_ok(context, rapt_optimizer_load(context, optimizer[0], checkpoint));
    assert_true(get_element(&query, 0) == 77);
    rapt_checkpoint_close(checkpoint);
    rapt_optimizer_destroy(optimizer[0]);
    free_apart(&a);
    free_apart(&b);
    rapt_mha *layers[] = {fused, fused_too, frozen, original};
    for (int i = 0; i < 4; i++) rapt_mha_destroy(layers[i]);
    rapt_mha_gradients_destroy(together);
    rapt_mha_gradients_destroy(apart);
}

/* ---- a run that goes on from a file ---- */

typedef struct training {
    rapt_mha *layer[2];
    rapt_mha_gradients *gradients[2];
    rapt_tensor norm, norm_gradient;
    rapt_optimizer *optimizer;
} training;

static training begin_training(const rapt_optimizer_config *config, int kind, rapt_dtype dtype) {
    rapt_mha_config layer_config = kind_of_layer(kind, dtype);
    training t = {.optimizer = make_optimizer(config)};
    for (int i = 0; i < 2; i++) {
        t.layer[i] = create_random(&layer_config);
        assert_ok(context, rapt_mha_gradients_create(context, t.layer[i], &t.gradients[i]));
        assert_ok(context, rapt_optimizer_add_layer(context, t.optimizer, (const char *[]){"h.0.attn.", "h.1.attn."}[i],
                                                    t.layer[i], t.gradients[i]));
    }
    t.norm = random_tensor(3, RAPT_F64, 1, &(int64_t){7});
    t.norm_gradient = make_tensor(RAPT_F64, 1, &(int64_t){7});
    assert_ok(context, rapt_optimizer_add(context, t.optimizer, "h.0.norm.weight", &t.norm, &t.norm_gradient));
    return t;
}

static void train(training *t, int64_t until) {
    while (rapt_optimizer_steps(t->optimizer) < until) {
        test_random random = {(uint64_t)rapt_optimizer_steps(t->optimizer)};
        for (int i = 0; i < 2; i++) fill_gradients(&random, t->gradients[i]);
        fill_random(&random, &t->norm_gradient, 1);
        step(t->optimizer);
    }
}

static void end_training(training *t) {
    rapt_optimizer_destroy(t->optimizer);
    for (int i = 0; i < 2; i++) {
        rapt_mha_destroy(t->layer[i]);
        rapt_mha_gradients_destroy(t->gradients[i]);
    }
    free_tensors(&t->norm, &t->norm_gradient);
}

static void check_resumed(const rapt_optimizer_config *config, int kind, rapt_dtype dtype) {
    const char *path = in_folder("run.safetensors");
    training whole = begin_training(config, kind, dtype), resumed = begin_training(config, kind, dtype);
    train(&whole, 7);
    assert_ok(context, rapt_optimizer_save(context, whole.optimizer, path));
    train(&whole, 12);
    train(&resumed, 2); /* whatever it did before is forgotten */
    rapt_checkpoint *checkpoint = open_checkpoint(path);
    assert_ok(context, rapt_optimizer_load(context, resumed.optimizer, checkpoint));
    assert_int_equal(rapt_optimizer_steps(resumed.optimizer), 7);
    assert_int_equal(rapt_checkpoint_num_layers(checkpoint), 2);
    for (int i = 0; i < 2; i++) { /* the layers alone, without an option but the prefix */
        rapt_load_options options = rapt_load_options_default();
        options.prefix = layer_info(checkpoint, i).prefix;
        rapt_mha *loaded;
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &loaded));
        assert_same_settings(loaded, resumed.layer[i]);
        assert_same_forward(loaded, resumed.layer[i]);
        rapt_mha_destroy(loaded);
    }
    rapt_checkpoint_close(checkpoint);
    train(&resumed, 12);
    for (int i = 0; i < 2; i++) {
        for (int32_t k = 0; k < rapt_mha_num_tensors(whole.layer[i]); k++) {
            rapt_tensor x, y;
            assert_ok(context, rapt_mha_tensor_at(context, whole.layer[i], k, NULL, &x));
            assert_ok(context, rapt_mha_tensor_at(context, resumed.layer[i], k, NULL, &y));
            assert_true(same_bits(&x, &y));
        }
        assert_same_forward(whole.layer[i], resumed.layer[i]);
    }
    assert_true(same_bits(&whole.norm, &resumed.norm));
    end_training(&whole);
    end_training(&resumed);
}

static void test_resume(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16};
    for (int i = 0; i < 3 * KINDS; i++) {
        rapt_optimizer_config config = rapt_optimizer_config_default(i % 3 == 0 ? RAPT_ADAMW : RAPT_SGD);
        config.learning_rate = 0.01;
        config.momentum = i % 3 == 1 ? 0.9 : 0;
        config.dampening = i % 3 == 1 ? 0.1 : 0; /* by which the first step differs from the others */
        check_resumed(&config, i / 3, dtypes[(i + i / 3) % 3]);
    }
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_of_layers),
        on_each_layer(check_committed),
        cmocka_unit_test(test_fused_and_apart),
        cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
