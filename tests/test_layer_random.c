/* test_layer_random.c - random layers and calls: the CPU backend against the naive reference, which reads the same layer */
#include "support.h"

typedef struct layer_case {
    rapt_mha_config config;
    rapt_mha *layer;
    bool batched, same_kv, self;
    int64_t n, l, s, extra;
    rapt_tensor query, key, value, mask, padding;
    rapt_options options;
} layer_case;

typedef struct layer_result {
    rapt_tensor out, weights, lse;
} layer_result;

static rapt_mha_config random_config(test_random *random, rapt_dtype dtype) {
    int64_t kv_heads = random_between(random, 1, 3), heads = kv_heads * random_between(random, 1, 3);
    rapt_mha_config config = rapt_mha_config_default(heads * random_between(random, 1, 24), heads);
    config.num_kv_heads = kv_heads;
    if (random_chance(random, 0.3)) config.head_dim = random_between(random, 1, 70);
    if (random_chance(random, 0.1)) config.head_dim = 64 * random_between(random, 1, 2); /* heads one after another */
    if (random_chance(random, 0.3)) config.kdim = random_between(random, 1, 90);
    if (random_chance(random, 0.3)) config.vdim = random_between(random, 1, 90);
    config.bias = random_chance(random, 0.7);
    config.add_bias_kv = random_chance(random, 0.3);
    config.add_zero_attn = random_chance(random, 0.3);
    config.batch_first = random_chance(random, 0.5);
    config.causal = random_chance(random, 0.2);
    config.set_scale = random_chance(random, 0.2);
    config.scale = config.set_scale ? random_unit(random) : 0;
    config.dtype = dtype;
    config.seed = random_bits(random);
    return config;
}

static rapt_tensor random_input(test_random *random, const layer_case *c, int64_t length, int64_t features) {
    int64_t batch_first[3] = {c->n, length, features}, length_first[3] = {length, c->n, features};
    int64_t alone[2] = {length, features};
    const int64_t *shape = !c->batched ? alone : c->config.batch_first ? batch_first : length_first;
    rapt_tensor tensor = make_strided_tensor(random, c->config.dtype, c->batched ? 3 : 2, shape);
    fill_random(random, &tensor, 1.5);
    return tensor;
}

/* Three shares of keys: -inf or true, other numbers, nothing. */
static void fill_mask(test_random *random, const rapt_tensor *mask) {
    int64_t count = rapt_tensor_count(mask);
    for (int64_t i = 0; i < count; i++) {
        bool masked = random_chance(random, 0.3);
        double value = masked ? -INFINITY : random_chance(random, 0.5) ? 2 * random_unit(random) : 0;
        set_element(mask, i, mask->dtype == RAPT_BOOL ? masked : value);
    }
}

static layer_case make_case(rapt_context *context, test_random *random, rapt_dtype dtype) {
    layer_case c = {.config = random_config(random, dtype)};
    assert_ok(context, rapt_mha_create(context, &c.config, &c.layer));
    for (int32_t i = 0; i < rapt_mha_num_tensors(c.layer); i++) { /* biases, too */
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, c.layer, i, NULL, &view));
        fill_random(random, &view, 0.4);
    }
    assert_ok(context, rapt_mha_commit(context, c.layer));
    c.config = *rapt_mha_settings(c.layer);
    c.extra = (c.config.add_bias_kv ? 1 : 0) + (c.config.add_zero_attn ? 1 : 0);
    c.batched = random_chance(random, 0.7);
    c.n = c.batched ? random_between(random, 1, 4) : 1;
    c.l = random_chance(random, 0.2) ? 1 : random_between(random, 1, 60);
    c.self = random_chance(random, 0.5) && c.config.kdim == c.config.embed_dim && c.config.vdim == c.config.embed_dim;
    c.s = c.self ? c.l : random_between(random, 1, 70);
    c.query = random_input(random, &c, c.l, c.config.embed_dim);
    if (!c.self) c.key = random_input(random, &c, c.s, c.config.kdim);
    c.same_kv = c.self || (c.config.kdim == c.config.vdim && random_chance(random, 0.5));
    if (!c.same_kv) c.value = random_input(random, &c, c.s, c.config.vdim);

    bool per_head_mask = random_chance(random, 0.5);
    int64_t flat[2] = {c.l, c.s}, per_head[3] = {c.n * c.config.num_heads, c.l, c.s}, padding[2] = {c.n, c.s};
    if (random_chance(random, 0.4)) {
        rapt_dtype kind = random_chance(random, 0.5) ? RAPT_BOOL : RAPT_F32;
        c.mask = make_tensor(kind, per_head_mask ? 3 : 2, per_head_mask ? per_head : flat);
        fill_mask(random, &c.mask);
    }
    if (random_chance(random, 0.4)) {
        rapt_dtype kind = random_chance(random, 0.5) ? RAPT_BOOL : dtype;
        c.padding = make_tensor(kind, c.batched ? 2 : 1, c.batched ? padding : padding + 1);
        fill_mask(random, &c.padding);
    }
    c.options.align_bottom_right = random_chance(random, 0.3);
    c.options.limit_right = c.config.causal && !c.options.align_bottom_right; /* says how causal is aligned */
    c.options.limit_left = random_chance(random, 0.2);
    c.options.left = c.options.limit_left ? random_between(random, 0, 20) : 0;
    c.options.per_head_weights = random_chance(random, 0.5);
    return c;
}

static void free_case(layer_case *c) {
    rapt_tensor *tensors[] = {&c->query, &c->key, &c->value, &c->mask, &c->padding};
    for (int i = 0; i < 5; i++) free_tensor(tensors[i]);
    rapt_mha_destroy(c->layer);
}

static layer_result run_case(rapt_context *context, const layer_case *c) {
    int64_t keys = c->s + c->extra, heads = c->config.num_heads;
    int64_t per_head[4] = {c->n, heads, c->l, keys}, averaged[3] = {c->n, c->l, keys}, lse[3] = {c->n, heads, c->l};
    int skipped = c->batched ? 0 : 1;
    rapt_dtype dtype = c->config.dtype;
    layer_result result = {.out = make_tensor(dtype, c->query.ndim, c->query.shape)};
    result.lse = make_tensor(dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32, 3 - skipped, lse + skipped);
    result.weights = c->options.per_head_weights ? make_tensor(dtype, 4 - skipped, per_head + skipped)
                                                 : make_tensor(dtype, 3 - skipped, averaged + skipped);
    rapt_options options = c->options;
    options.attn_mask = c->mask.data != NULL ? &c->mask : NULL;
    options.key_padding_mask = c->padding.data != NULL ? &c->padding : NULL;
    options.weights = &result.weights;
    options.lse = &result.lse;
    const rapt_tensor *key = c->self ? &c->query : &c->key, *value = c->same_kv ? key : &c->value;
    assert_ok(context, rapt_mha_forward(context, c->layer, &c->query, key, value, &options, &result.out));
    return result;
}

static void free_result(layer_result *result) {
    free_tensor(&result->out);
    free_tensor(&result->weights);
    free_tensor(&result->lse);
}

static void sweep(rapt_dtype dtype, int cases, double tolerance) {
    rapt_context *reference = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    rapt_context *cpu = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)dtype * 424242 + (uint64_t)i};
        layer_case c = make_case(cpu, &random, dtype);
        layer_result expected = run_case(reference, &c), actual = run_case(cpu, &c);
        double score = largest_magnitude(&expected.lse) > 1 ? largest_magnitude(&expected.lse) : 1;
        double out = largest_difference(&expected.out, &actual.out);
        double weights = largest_difference(&expected.weights, &actual.weights);
        double lse = largest_difference(&expected.lse, &actual.lse);
        double allowed_out = tolerance * score * (1 + largest_magnitude(&expected.out));
        if (!(out <= allowed_out && weights <= tolerance * score && lse <= tolerance * score * score)) {
            char text[300];
            rapt_mha_describe(c.layer, text, sizeof text);
            fail_msg("case %d: out %g of %g, weights %g and lse %g of %g\n%s N%lld L%lld S%lld", i, out, allowed_out,
                     weights, lse, tolerance * score, text, (long long)c.n, (long long)c.l, (long long)c.s);
        }
        free_result(&expected);
        free_result(&actual);
        free_case(&c);
    }
    rapt_context_destroy(reference);
    rapt_context_destroy(cpu);
}

static void test_f32(void **state) {
    (void)state;
    sweep(RAPT_F32, 600, 5e-6);
}
static void test_f64(void **state) {
    (void)state;
    sweep(RAPT_F64, 300, 1e-13);
}
/* Intermediate results are rounded to 16 bits on both sides, and may fall to different sides of a tie. */
static void test_bf16(void **state) {
    (void)state;
    sweep(RAPT_BF16, 100, 0x1p-6);
}
static void test_f16(void **state) {
    (void)state;
    sweep(RAPT_F16, 100, 0x1p-9);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
