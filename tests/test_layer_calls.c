/* test_layer_calls.c - calls of the layer that must agree with each other
 *
 * What the layer computes is shown by the golden cases (test_golden.c). Here two calls that mean the same must give the
 * same bits, with one key or many, contiguous or strided, batched or not.
 */
#include "layer_support.h"

static void check_token(const rapt_mha *layer) {
    if (!takes_self_attention(layer)) return;
    const rapt_mha_config *c = rapt_mha_settings(layer);
    int64_t n = 3, l = 37, e = c->embed_dim;
    rapt_tensor x = random_tensor(4, c->dtype, 3, (int64_t[]){n, l, e});
    rapt_tensor first = slice(&x, 1, 0, 1), tokens = first; /* strided: a token of each sequence */
    tokens.ndim = 2;
    tokens.shape[1] = e;
    tokens.stride[1] = 1;
    rapt_tensor by_token = make_tensor(c->dtype, 2, (int64_t[]){n, e});
    fill_value(&by_token, NAN);
    assert_ok(context, rapt_mha_forward_token(context, layer, &tokens, &by_token));
    rapt_tensor single = self_attention(layer, &first, NULL),
                causal = self_attention(layer, &x, &(rapt_options){.causal = true});
    rapt_tensor row = slice(&causal, 1, 0, 1),
                single_causal = self_attention(layer, &first, &(rapt_options){.causal = true});
    rapt_tensor lse =
        make_tensor(c->dtype, 3, (int64_t[]){n, c->num_heads, 1}); /* asking for it leaves the short way */
    rapt_tensor long_way = self_attention(layer, &first, &(rapt_options){.lse = &lse});
    assert_true(same_bits(&by_token, &single) && same_bits(&by_token, &row));
    assert_true(same_bits(&by_token, &single_causal) && same_bits(&by_token, &long_way));
    assert_true(largest_magnitude(&by_token) > 0.1);
    free_tensors(&x, &by_token, &single, &causal, &single_causal, &lse, &long_way);
}

static void test_single_tokens(void **state) {
    (void)state;
    for_each_layer(check_token);
    rapt_mha_config config = kind_of_layer(5, RAPT_F32); /* kdim apart: there is no self-attention */
    rapt_mha *layer = create(&config);
    rapt_tensor x = make_tensor(RAPT_F32, 2, (int64_t[]){2, 24}), out = make_tensor(RAPT_F32, 2, (int64_t[]){2, 24});
    assert_int_equal(rapt_mha_forward_token(context, layer, &x, &out), RAPT_ERROR_STATE);
    free_tensors(&x, &out);
    rapt_mha_destroy(layer);
}

static void test_empty_sizes(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    const int64_t sizes[][3] = {{0, 4, 5}, {2, 0, 5}, {0, 0, 0}, {2, 4, 0}}; /* N, L, S; the last one computes */
    for (int i = 0; i < 4; i++) {
        int64_t n = sizes[i][0], l = sizes[i][1], s = sizes[i][2];
        inputs x = make_inputs(layer, n, l, s);
        rapt_tensor weights = make_tensor(c->dtype, 4, (int64_t[]){n, c->num_heads, l, s + extra_keys(layer)});
        rapt_tensor lse = make_tensor(c->dtype, 3, (int64_t[]){n, c->num_heads, l});
        rapt_tensor out = forward(layer, &x.query, &x.key, &x.value, NULL);
        rapt_tensor again = forward(layer, &x.query, &x.key, &x.value,
                                    &(rapt_options){.weights = &weights, .per_head_weights = true, .lse = &lse});
        assert_true(same_bits(&out, &again));
        if (i == 3 && !c->add_bias_kv) { /* nothing seen, or a value of zeros: the output projection's bias is left */
            for (int64_t at = 0; at < rapt_tensor_count(&out); at++) {
                rapt_tensor bias = {0};
                if (c->bias) bias = parameter(layer, "out_proj.bias");
                assert_true(get_element(&out, at) == (c->bias ? get_element(&bias, at % c->embed_dim) : 0));
            }
            for (int64_t at = 0; at < rapt_tensor_count(&lse); at++) {
                assert_true(get_element(&lse, at) == (c->add_zero_attn ? 0 : -INFINITY)); /* log(exp(0)) */
            }
            for (int64_t at = 0; at < rapt_tensor_count(&weights); at++) assert_true(get_element(&weights, at) == 1);
        }
        free_tensors(&weights, &lse, &out, &again);
        free_inputs(&x);
    }
}

/* S = 0 with bias_kv: bias_v through the output projection, and nothing else. */
static void test_no_keys_but_bias_kv(void **state) {
    (void)state;
    rapt_mha_config config = kind_of_layer(0, RAPT_F64);
    config.add_bias_kv = true;
    rapt_mha *layer = create_random(&config);
    inputs x = make_inputs(layer, 2, 3, 0);
    rapt_tensor out = forward(layer, &x.query, &x.key, &x.value, NULL);
    rapt_tensor w = parameter(layer, "out_proj.weight"), b = parameter(layer, "out_proj.bias"),
                v = parameter(layer, "bias_v");
    for (int64_t at = 0; at < rapt_tensor_count(&out); at++) {
        double sum = get_element(&b, at % 24);
        for (int64_t i = 0; i < 24; i++) sum += get_element(&w, at % 24 * 24 + i) * get_element(&v, i);
        assert_true(fabs(get_element(&out, at) - sum) < 1e-14);
    }
    free_tensor(&out);
    free_inputs(&x);
    rapt_mha_destroy(layer);
}

static rapt_tensor without_batch(const rapt_tensor *tensor, int64_t n) {
    rapt_tensor one = slice(tensor, 0, n, 1), view = one;
    view.ndim--;
    memmove(view.shape, one.shape + 1, sizeof view.shape - sizeof *view.shape);
    memmove(view.stride, one.stride + 1, sizeof view.stride - sizeof *view.stride);
    return view;
}

static void test_unbatched_equals_a_batch_of_one(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    int64_t keys = 7 + extra_keys(layer);
    inputs x = make_inputs(layer, 2, 5, 7);
    rapt_tensor weights = make_tensor(c->dtype, 3, (int64_t[]){2, 5, keys}),
                lse = make_tensor(c->dtype, 3, (int64_t[]){2, c->num_heads, 5});
    rapt_tensor one_weights = make_tensor(c->dtype, 2, (int64_t[]){5, keys}),
                one_lse = make_tensor(c->dtype, 2, (int64_t[]){c->num_heads, 5});
    rapt_tensor out = forward(layer, &x.query, &x.key, &x.value, &(rapt_options){.weights = &weights, .lse = &lse});
    for (int64_t n = 0; n < 2; n++) {
        rapt_tensor q = without_batch(&x.query, n), k = without_batch(&x.key, n), v = without_batch(&x.value, n);
        rapt_tensor one = forward(layer, &q, &k, &v, &(rapt_options){.weights = &one_weights, .lse = &one_lse});
        rapt_tensor expected[] = {without_batch(&out, n), without_batch(&weights, n), without_batch(&lse, n)};
        assert_true(same_bits(&one, &expected[0]) && same_bits(&one_weights, &expected[1]) &&
                    same_bits(&one_lse, &expected[2]));
        free_tensor(&one);
    }
    free_tensors(&weights, &lse, &one_weights, &one_lse, &out);
    free_inputs(&x);
}

static rapt_tensor transposed_copy(const rapt_tensor *tensor) {
    rapt_tensor view;
    assert_ok(context, rapt_tensor_transpose(context, tensor, 0, 1, &view));
    rapt_tensor copy = make_tensor(view.dtype, view.ndim, view.shape);
    assert_ok(context, rapt_tensor_copy(context, &view, &copy));
    return copy;
}

static void test_sequence_first_equals_batch_first(const rapt_mha *layer) {
    rapt_mha_config config = *rapt_mha_settings(layer);
    config.batch_first = false;
    rapt_mha *other = create_random(&config);
    inputs x = make_inputs(layer, 3, 5, 7);
    inputs y = {transposed_copy(&x.query), transposed_copy(&x.key), transposed_copy(&x.value)};
    rapt_tensor out = forward(layer, &x.query, &x.key, &x.value, NULL),
                other_out = forward(other, &y.query, &y.key, &y.value, NULL);
    assert_same_and_free(transposed_copy(&other_out), out);
    free_tensor(&other_out);
    free_inputs(&x);
    free_inputs(&y);
    rapt_mha_destroy(other);
}

static void test_one_tensor_equals_three_equal_ones(const rapt_mha *layer) {
    if (!takes_self_attention(layer)) return;
    const rapt_mha_config *c = rapt_mha_settings(layer);
    const int64_t shape[3] = {2, 9, c->embed_dim};
    rapt_tensor x[3];
    for (int i = 0; i < 3; i++) x[i] = random_tensor(6, c->dtype, 3, shape);
    rapt_tensor other_view = x[0]; /* the same memory by another struct is the same tensor, too */
    rapt_tensor three = forward(layer, &x[0], &x[1], &x[2], NULL), two = forward(layer, &x[0], &x[1], &x[1], NULL);
    rapt_tensor outer = forward(layer, &x[0], &x[1], &x[0], NULL),
                views = forward(layer, &x[0], &other_view, &x[0], NULL);
    assert_true(same_bits(&two, &three) && same_bits(&outer, &three) && same_bits(&views, &three));
    assert_same_and_free(self_attention(layer, &x[0], NULL), three);
    free_tensors(&x[0], &x[1], &x[2], &two, &outer, &views);
}

static void test_strides_change_nothing(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    test_random random = {8};
    inputs x = make_inputs(layer, 2, 5, 7);
    rapt_tensor weights = make_tensor(c->dtype, 3, (int64_t[]){2, 5, 7 + extra_keys(layer)});
    rapt_tensor expected = forward(layer, &x.query, &x.key, &x.value, &(rapt_options){.weights = &weights});
    for (int round = 0; round < 8; round++) {
        const rapt_tensor *plain[3] = {&x.query, &x.key, &x.value};
        rapt_tensor strided[3];
        for (int i = 0; i < 3; i++) {
            strided[i] = make_strided_tensor(&random, c->dtype, 3, plain[i]->shape);
            assert_ok(context, rapt_tensor_copy(context, plain[i], &strided[i]));
        }
        rapt_tensor out = make_strided_tensor(&random, c->dtype, 3, expected.shape);
        rapt_tensor strided_weights = make_strided_tensor(&random, c->dtype, 3, weights.shape);
        rapt_options options = {.weights = &strided_weights};
        assert_ok(context, rapt_mha_forward(context, layer, &strided[0], &strided[1], &strided[2], &options, &out));
        assert_true(same_bits(&out, &expected) && same_bits(&strided_weights, &weights));
        free_tensors(&strided[0], &strided[1], &strided[2], &out, &strided_weights);
    }
    free_tensors(&expected, &weights);
    free_inputs(&x);
}

static void test_weights_leave_out_alone(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    int64_t n = 2, l = 5, keys = 7 + extra_keys(layer), heads = c->num_heads;
    inputs x = make_inputs(layer, n, l, 7);
    rapt_tensor per_head = make_tensor(c->dtype, 4, (int64_t[]){n, heads, l, keys});
    rapt_tensor average = make_tensor(c->dtype, 3, (int64_t[]){n, l, keys}),
                lse = make_tensor(c->dtype, 3, (int64_t[]){n, heads, l});
    rapt_tensor plain = forward(layer, &x.query, &x.key, &x.value, NULL);
    rapt_tensor with_average = forward(layer, &x.query, &x.key, &x.value, &(rapt_options){.weights = &average});
    rapt_tensor with_all = forward(layer, &x.query, &x.key, &x.value,
                                   &(rapt_options){.weights = &per_head, .per_head_weights = true, .lse = &lse});
    assert_true(same_bits(&with_average, &plain) && same_bits(&with_all, &plain));
    double tolerance = c->dtype == RAPT_F64 ? 4e-16 : 2e-7;
    for (int64_t row = 0; row < n * l; row++) {
        double total = 0;
        for (int64_t j = 0; j < keys; j++) {
            double mean = 0;
            for (int64_t h = 0; h < heads; h++)
                mean += get_element(&per_head, ((row / l * heads + h) * l + row % l) * keys + j);
            mean /= (double)heads;
            assert_true(fabs(get_element(&average, row * keys + j) - mean) <= tolerance);
            total += mean;
        }
        assert_true(fabs(total - 1) <= 4 * tolerance);
    }
    free_tensors(&per_head, &average, &lse, &plain, &with_average, &with_all);
    free_inputs(&x);
}

/* Query 2 of sequence 1 sees nothing; NaN in what only it could see stays out of the others. */
static void test_a_row_that_sees_nothing(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    if (c->add_bias_kv) return; /* it would see bias_k; the zero key adds nothing */
    inputs x = make_inputs(layer, 2, 5, 7);
    rapt_tensor mask = make_tensor(RAPT_BOOL, 4, (int64_t[]){2, 1, 5, 7});
    for (int64_t j = 0; j < 7; j++) set_element(&mask, (5 + 2) * 7 + j, 1);
    for (int64_t i = 0; i < 10; i++) set_element(&mask, i * 7 + 6, 1); /* nobody sees the last key */
    rapt_options options = {.attn_mask = &mask};
    rapt_tensor plain = forward(layer, &x.query, &x.key, &x.value, &options);
    for (int64_t n = 0; n < 2; n++) {
        for (int64_t e = 0; e < c->kdim; e++) set_element(&x.key, (n * 7 + 6) * c->kdim + e, NAN);
        for (int64_t e = 0; e < c->vdim; e++) set_element(&x.value, (n * 7 + 6) * c->vdim + e, INFINITY);
    }
    rapt_tensor out = forward(layer, &x.query, &x.key, &x.value, &options), bias = {0};
    assert_true(same_bits(&out, &plain));
    if (c->bias) bias = parameter(layer, "out_proj.bias");
    for (int64_t e = 0; e < c->embed_dim; e++) {
        assert_true(get_element(&out, (5 + 2) * c->embed_dim + e) == (c->bias ? get_element(&bias, e) : 0));
    }
    free_tensors(&plain, &out, &mask);
    free_inputs(&x);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_single_tokens),
        on_each_layer(test_empty_sizes),
        cmocka_unit_test(test_no_keys_but_bias_kv),
        on_each_layer(test_unbatched_equals_a_batch_of_one),
        on_each_layer(test_sequence_first_equals_batch_first),
        on_each_layer(test_one_tensor_equals_three_equal_ones),
        on_each_layer(test_strides_change_nothing),
        on_each_layer(test_weights_leave_out_alone),
        on_each_layer(test_a_row_that_sees_nothing),
    };
    return cmocka_run_group_tests_name("layer calls", tests, make_cpu_context, destroy_shared_context);
}
