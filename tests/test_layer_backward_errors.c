/* test_layer_backward_errors.c - backward calls of the layer that must be refused, and forwards with a state: the message
 * says what was wrong, and neither gradients nor state nor anything else has changed */
#include "error_rows.h"

#include "internal.h"

/* What a call gets beside the scene, which holds all memory. */
static rapt_mha_state *state, *empty_state, *functional_state;
static const rapt_mha_state *given_state;
static rapt_mha_gradients g;
static const rapt_mha_gradients *given;
static rapt_tensor d_out, d_weights, d_query, d_key, d_value, d_mask, d_padding, d_q_weight, d_k_weight, d_v_weight,
    d_in_weight, d_in_bias, d_q_bias, d_k_bias, d_v_bias, d_out_weight, d_out_bias, d_bias_k, d_static_k, d_static_v;
static const rapt_tensor *given_d_out, *given_d_weights;

static rapt_status call_backward(void) {
    return rapt_mha_backward(context, s.layer, given_state, given_d_out, given_d_weights, given);
}
static rapt_status call_functional_backward(void) {
    return rapt_mha_functional_backward(context, s.w, given_state, given_d_out, given_d_weights, given);
}

static void place_gradients(void) {
    d_out = PLACE(true, 3, N, L, E);
    d_weights = PLACE(true, 3, N, L, S);
    d_query = PLACE(true, 3, N, L, E);
    d_key = PLACE(true, 3, N, S, KDIM);
    d_value = PLACE(true, 3, N, S, VDIM);
    d_mask = PLACE(true, 2, L, S);
    d_padding = PLACE(true, 2, N, S);
    d_q_weight = PLACE(true, 2, QUERY_ROWS, E);
    d_k_weight = PLACE(true, 2, KV_ROWS, KDIM);
    d_v_weight = PLACE(true, 2, KV_ROWS, VDIM);
    d_in_weight = PLACE(true, 2, FUSED_ROWS, E);
    d_in_bias = PLACE(true, 1, FUSED_ROWS);
    d_q_bias = PLACE(true, 1, QUERY_ROWS);
    d_k_bias = PLACE(true, 1, KV_ROWS);
    d_v_bias = PLACE(true, 1, KV_ROWS);
    d_out_weight = PLACE(true, 2, E, QUERY_ROWS);
    d_out_bias = PLACE(true, 1, E);
    d_bias_k = PLACE(true, 3, 1, 1, KV_ROWS);
    d_static_k = PLACE(true, 3, N * HK, S, HEAD);
    d_static_v = PLACE(true, 3, N * HK, S, HEAD);
    given_d_out = &d_out;
    given_d_weights = &d_weights;
    given = &g;
    g = (rapt_mha_gradients){.query = &d_query,
                             .attn_mask = &d_mask,
                             .key_padding_mask = &d_padding,
                             .q_proj_weight = &d_q_weight,
                             .out_proj_weight = &d_out_weight,
                             .out_proj_bias = &d_out_bias};
}

/* Forwards have masks and return weights. */
static void set_options(void) {
    s.options.attn_mask = &s.attn_mask;
    s.options.key_padding_mask = &s.padding;
    s.options.weights = &s.weights;
}

static void set_backward(void) {
    set_layer();
    place_gradients();
    g.key = &d_key;
    g.value = &d_value;
    g.k_proj_weight = &d_k_weight;
    g.v_proj_weight = &d_v_weight;
    g.in_proj_bias = &d_in_bias;
    set_options();
    s.options.state = state;
    assert_ok(context, call_layer());
    s.options.state = NULL;
    given_state = state;
}

/* Separate weights, but for the keys and values, which are ready. */
static void set_functional_backward(void) {
    set_functional();
    place_gradients();
    g.q_proj_bias = &d_q_bias;
    g.static_k = &d_static_k;
    g.static_v = &d_static_v;
    set_options();
    s.options.static_k = &s.static_k;
    s.options.static_v = &s.static_v;
    s.options.state = functional_state;
    s.k = s.v = NULL;
    assert_ok(context, call_functional());
    s.options.state = NULL;
    given_state = functional_state;
}

#define BACKWARD(status, ...) ROW_OF(set_backward, call_backward, RAPT_##status, __VA_ARGS__)
#define FUNCTIONAL_BACKWARD(status, ...)                                                                               \
    ROW_OF(set_functional_backward, call_functional_backward, RAPT_##status, __VA_ARGS__)

static void test_pointers_and_state(void **unused) {
    (void)unused;
    BACKWARD(OK, "", s.index = 0);
    BACKWARD(ERROR_NULL, "layer is NULL", s.layer = NULL);
    BACKWARD(ERROR_NULL, "state is NULL", given_state = NULL);
    BACKWARD(ERROR_NULL, "gradients is NULL", given = NULL);
    BACKWARD(ERROR_NULL, "d_out is NULL", given_d_out = NULL);
    BACKWARD(OK, "", given_d_weights = NULL);
    BACKWARD(OK, "", g = (rapt_mha_gradients){0});
    BACKWARD(ERROR_ARGUMENT, "gradients.reserved[7] is not 0: set gradients to zero before use", g.reserved[7] = 1);
    BACKWARD(ERROR_STATE, "state is empty, expected one that a forward with options.state filled",
             given_state = empty_state);
    BACKWARD(ERROR_STATE, "state was filled by another layer", s.layer = token_layer);
    FUNCTIONAL_BACKWARD(OK, "", s.index = 0);
    BACKWARD(ERROR_STATE, "state was filled by rapt_mha_functional, expected a forward of this layer",
             given_state = functional_state);
    FUNCTIONAL_BACKWARD(ERROR_NULL, "weights is NULL", s.w = NULL);
    FUNCTIONAL_BACKWARD(ERROR_STATE, "state was filled by a layer's forward, expected rapt_mha_functional",
                        given_state = state);
    FUNCTIONAL_BACKWARD(ERROR_STATE, "state is empty", given_state = empty_state);
    FUNCTIONAL_BACKWARD(ERROR_STATE, "batch_first is 0, expected 1 as in the forward that filled state",
                        s.ready.weights.batch_first = false);
    FUNCTIONAL_BACKWARD(ERROR_STATE, "add_zero_attn is 1, expected 0", s.ready.weights.add_zero_attn = true);
    FUNCTIONAL_BACKWARD(ERROR_STATE, "num_heads is 2, expected 4", s.ready.weights.num_heads = 2);
    FUNCTIONAL_BACKWARD(ERROR_SHAPE, "out_proj_weight has shape", s.out_weight.shape[0]--);
    assert_int_equal(rapt_mha_backward(NULL, layer, state, &d_out, NULL, &g), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_functional_backward(NULL, s.w, state, &d_out, NULL, &g), RAPT_ERROR_NULL);
}

static void test_gradients_of_results(void **unused) {
    (void)unused;
    BACKWARD(ERROR_DTYPE, "d_out is f64, expected f32 as the layer", d_out.dtype = RAPT_F64);
    BACKWARD(ERROR_SHAPE, "d_out has shape [2, 2, 8], expected [2, 3, 8] as the forward's output", d_out.shape[1] = 2);
    BACKWARD(ERROR_SHAPE, "d_out has shape [2, 3], expected [2, 3, 8]", d_out.ndim = 2);
    BACKWARD(OK, "", d_out.stride[0] = 0); /* the same for all */
    BACKWARD(ERROR_DEVICE, "d_out is on device cuda", d_out.device = RAPT_DEVICE_CUDA);
    BACKWARD(ERROR_SHAPE, "d_weights has shape [2, 3, 4], expected [2, 3, 5]", d_weights.shape[2] = 4);
    BACKWARD(ERROR_DTYPE, "d_weights is bf16, expected f32", d_weights.dtype = RAPT_BF16);
    set_backward(); /* one that returned none */
    s.options.weights = NULL;
    s.options.state = state;
    assert_ok(context, call_layer());
    assert_int_equal(call_backward(), RAPT_ERROR_ARGUMENT);
    assert_string_equal(rapt_error_message(context),
                        "d_weights is given, but the forward returned no weights: expected NULL");
}

static void test_gradients_of_inputs(void **unused) {
    (void)unused;
    BACKWARD(ERROR_SHAPE, "gradients.query has shape [2, 3, 7], expected [2, 3, 8] as query", d_query.shape[2] = 7);
    BACKWARD(ERROR_SHAPE, "gradients.key has shape [2, 5, 5], expected [2, 5, 6] as key", d_key.shape[2] = 5);
    BACKWARD(ERROR_SHAPE, "gradients.value has shape [2, 4, 5], expected [2, 5, 5] as value", d_value.shape[1] = 4);
    BACKWARD(ERROR_DTYPE, "gradients.value is f16, expected f32 as the layer", d_value.dtype = RAPT_F16);
    BACKWARD(ERROR_NULL, "gradients.query", d_query.data = NULL);
    BACKWARD(ERROR_LAYOUT, "gradients.query", d_query.stride[1] = 0);
    BACKWARD(ERROR_ARGUMENT, "gradients.static_k is for rapt_mha_functional_backward alone", g.static_k = &d_static_k);
    BACKWARD(ERROR_ARGUMENT, "gradients.static_v is for rapt_mha_functional_backward alone", g.static_v = &d_static_v);
    FUNCTIONAL_BACKWARD(ERROR_ARGUMENT, "gradients.key is given, but the forward had no key", g.key = &d_key);
    FUNCTIONAL_BACKWARD(ERROR_ARGUMENT, "gradients.value is given, but the forward had no value", g.value = &d_value);
    FUNCTIONAL_BACKWARD(ERROR_SHAPE, "gradients.static_k has shape [4, 4, 3], expected [4, 5, 3] as static_k",
                        d_static_k.shape[1] = 4);
    FUNCTIONAL_BACKWARD(ERROR_DTYPE, "gradients.static_v is f64, expected f32 as the layer",
                        d_static_v.dtype = RAPT_F64);
    set_functional();
    place_gradients();
    s.options.state = functional_state;
    assert_ok(context, call_functional());
    given_state = functional_state;
    given_d_weights = NULL;
    g = (rapt_mha_gradients){.static_v = &d_static_v};
    assert_int_equal(call_functional_backward(), RAPT_ERROR_ARGUMENT);
    assert_string_equal(rapt_error_message(context),
                        "gradients.static_v is given, but the forward had no options.static_v");
    g = (rapt_mha_gradients){.attn_mask = &d_mask};
    assert_int_equal(call_functional_backward(), RAPT_ERROR_ARGUMENT);
    assert_non_null(strstr(rapt_error_message(context), "gradients.attn_mask is given, but"));
    BACKWARD(ERROR_SHAPE, "gradients.attn_mask has shape [3, 4], expected [3, 5] as attn_mask", d_mask.shape[1] = 4);
    BACKWARD(ERROR_DTYPE, "gradients.key_padding_mask is bf16, expected f32 or f64", d_padding.dtype = RAPT_BF16);
}

static void test_gradients_of_parameters(void **unused) {
    (void)unused;
    BACKWARD(ERROR_SHAPE, "gradients.q_proj_weight has shape [12, 7], expected [12, 8] as the weight",
             d_q_weight.shape[1] = 7);
    BACKWARD(ERROR_SHAPE, "gradients.k_proj_weight has shape [5, 6], expected [6, 6]", d_k_weight.shape[0] = 5);
    BACKWARD(ERROR_SHAPE, "gradients.v_proj_weight has shape [6], expected [6, 5]", d_v_weight.ndim = 1);
    BACKWARD(ERROR_SHAPE, "gradients.out_proj_weight has shape [7, 12], expected [8, 12]", d_out_weight.shape[0] = 7);
    BACKWARD(ERROR_DTYPE, "gradients.out_proj_weight is f64, expected f32 as the layer", d_out_weight.dtype = RAPT_F64);
    BACKWARD(ERROR_SHAPE, "gradients.in_proj_bias has shape [23], expected [24]", d_in_bias.shape[0] = 23);
    BACKWARD(ERROR_SHAPE, "gradients.out_proj_bias has shape [7], expected [8]", d_out_bias.shape[0] = 7);
    BACKWARD(ERROR_DTYPE, "gradients.out_proj_bias is bf16, expected f32 as the layer", d_out_bias.dtype = RAPT_BF16);
    BACKWARD(ERROR_ARGUMENT,
             "gradients.in_proj_weight and those of separate projections are given: expected one or the other",
             g.in_proj_weight = &d_in_weight);
    BACKWARD(ERROR_ARGUMENT,
             "gradients.in_proj_weight is given, but kdim is 6 and vdim 5: expected embed_dim 8 for both",
             g.in_proj_weight = &d_in_weight, g.q_proj_weight = g.k_proj_weight = g.v_proj_weight = NULL);
    BACKWARD(ERROR_ARGUMENT,
             "gradients.in_proj_bias and those of separate projections are given: expected one or the other",
             g.v_proj_bias = &d_v_bias);
    BACKWARD(OK, "", g.in_proj_bias = NULL, g.q_proj_bias = &d_q_bias, g.k_proj_bias = &d_k_bias);
    BACKWARD(ERROR_ABSENT, "gradients.bias_k is given, but there is no such bias", g.bias_k = &d_bias_k);
    BACKWARD(ERROR_ABSENT, "gradients.bias_v is given, but there is no such bias", g.bias_v = &d_bias_k);
    FUNCTIONAL_BACKWARD(ERROR_ABSENT, "gradients.q_proj_bias is given, but there is no such bias",
                        s.ready.weights.q_proj_bias = NULL);
    FUNCTIONAL_BACKWARD(ERROR_ABSENT, "gradients.in_proj_bias is given, but there is no such bias",
                        s.ready.weights.k_proj_bias = NULL, g.q_proj_bias = NULL, g.in_proj_bias = &d_in_bias);
    FUNCTIONAL_BACKWARD(ERROR_ABSENT, "gradients.out_proj_bias is given, but there is no such bias",
                        s.ready.weights.out_proj_bias = NULL);
    FUNCTIONAL_BACKWARD(OK, "", g.k_proj_weight = &d_k_weight, g.v_proj_bias = &d_v_bias);
}

/* Every gradient against everything that is read, and against the others. */
static void test_sharing(void **unused) {
    (void)unused;
    set_backward();
    rapt_tensor weight, bias;
    assert_ok(context, rapt_mha_find(context, layer, "k_proj.weight", &weight));
    assert_ok(context, rapt_mha_find(context, layer, "q_proj.bias", &bias));
    const rapt_mha_saved *saved = rapt_mha_state_saved(state);
#define SHARES(other, tensor, place) BACKWARD(ERROR_LAYOUT, "shares memory with " other, tensor.data = place)
    SHARES("d_out ", d_query, d_out.data);
    SHARES("d_weights ", d_key, d_weights.data);
    SHARES("query ", d_query, s.query.data);
    SHARES("key ", d_value, s.key.data);
    SHARES("value ", d_value, s.value.data);
    SHARES("attn_mask ", d_mask, s.attn_mask.data);
    SHARES("key_padding_mask ", d_padding, s.padding.data);
    SHARES("the key projection's weight ", d_k_weight, weight.data);
    SHARES("the query projection's bias ", d_in_bias, bias.data);
    SHARES("state ", d_query, saved->query.data);
    SHARES("state ", d_out_bias, saved->lse.data);
    SHARES("gradients.query ", d_key, d_query.data);
    SHARES("gradients.q_proj_weight ", d_out_bias, d_q_weight.data);
    SHARES("gradients.in_proj_bias ", d_out_weight, d_in_bias.data);
    SHARES("gradients.attn_mask ", d_padding, d_mask.data);
    FUNCTIONAL_BACKWARD(ERROR_LAYOUT, "shares memory with gradients.static_k ", d_static_v.data = d_static_k.data);
    FUNCTIONAL_BACKWARD(ERROR_LAYOUT, "shares memory with static_v ", d_static_v.data = s.static_v.data);
}

static void test_forwards_with_state(void **unused) {
    (void)unused;
    rapt_cache *cache;
    rapt_cache_config settings = rapt_cache_config_default(N, 8);
    assert_ok(context, rapt_cache_create(context, token_layer, &settings, &cache));
    set_backward();
    uint64_t sum = checksum(0, &rapt_mha_state_saved(state)->attended);
    LAYER(ERROR_ARGUMENT, "options.state and options.cache are given", s.layer = token_layer, s.options.state = state,
          s.options.cache = cache, s.k = s.v = &s.query);
    LAYER(ERROR_LAYOUT, "options.state (at", s.options.state = state,
          s.query.data = rapt_mha_state_saved(state)->query.data);
    LAYER(ERROR_LAYOUT, "shares memory with out ", s.options.state = state,
          s.out.data = rapt_mha_state_saved(state)->attended.data);
    LAYER(ERROR_LAYOUT, "shares memory with lse ", s.options.state = state, s.options.lse = &s.lse,
          s.lse.data = rapt_mha_state_saved(state)->lse.data);
    LAYER(ERROR_SHAPE, "out has shape", s.options.state = state, s.out.shape[1] = 2);
    assert_int_equal(checksum(0, &rapt_mha_state_saved(state)->attended), sum); /* refused calls left it alone */
    assert_ok(context, call_backward());
    LAYER(OK, "", s.options.state = state);
    rapt_cache_destroy(cache);

    rapt_mha_state *made = state;
    assert_int_equal(rapt_mha_state_create(NULL, &made), RAPT_ERROR_NULL);
    assert_null(made);
    assert_int_equal(rapt_mha_state_create(context, NULL), RAPT_ERROR_NULL);
    assert_string_equal(rapt_error_message(context), "state is NULL");
    assert_null(rapt_mha_state_saved(NULL));
    rapt_mha_state_destroy(NULL);
}

static void test_commit_in_between(void **unused) {
    (void)unused;
    rapt_mha *own;
    assert_ok(context, rapt_mha_create(context, rapt_mha_settings(layer), &own));
    set_backward();
    s.layer = own;
    s.options.state = state;
    assert_ok(context, call_layer());
    assert_ok(context, call_backward());
    assert_ok(context, rapt_mha_commit(context, own));
    memcpy(&before, &s, sizeof s);
    assert_int_equal(call_backward(), RAPT_ERROR_STATE);
    assert_string_equal(rapt_error_message(context),
                        "state is of the layer's version 1, but the layer was committed since then and has version 2: "
                        "run the forward again");
    assert_memory_equal(&before, &s, sizeof s);
    assert_ok(context, call_layer());
    assert_ok(context, call_backward());
    rapt_mha_destroy(own);
}

/* A backend may lack a backward; this one is made to. */
static void test_backend_without_backward(void **unused) {
    (void)unused;
    const rapt_backend_table *whole = context->backend;
    rapt_backend_table lacking = *whole;
    for (int i = 0; i < 2; i++) {
        set_backward();
        memcpy(&before, &s, sizeof s);
        lacking = *whole;
        if (i == 0) lacking.attn_backward = NULL;
        if (i == 1) lacking.linear_backward = NULL;
        context->backend = &lacking;
        assert_int_equal(call_backward(), RAPT_ERROR_UNSUPPORTED);
        assert_non_null(strstr(rapt_error_message(context), "backend"));
        assert_memory_equal(&before, &s, sizeof s);
        context->backend = whole;
        assert_ok(context, call_backward());
    }
}

static int set_up_states(void **unused) {
    set_up(unused);
    assert_ok(context, rapt_mha_state_create(context, &state));
    assert_ok(context, rapt_mha_state_create(context, &empty_state));
    assert_ok(context, rapt_mha_state_create(context, &functional_state));
    return 0;
}

static int tear_down_states(void **unused) {
    rapt_mha_state_destroy(state);
    rapt_mha_state_destroy(empty_state);
    rapt_mha_state_destroy(functional_state);
    return tear_down(unused);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pointers_and_state),
        cmocka_unit_test(test_gradients_of_results),
        cmocka_unit_test(test_gradients_of_inputs),
        cmocka_unit_test(test_gradients_of_parameters),
        cmocka_unit_test(test_sharing),
        cmocka_unit_test(test_forwards_with_state),
        cmocka_unit_test(test_commit_in_between),
        cmocka_unit_test(test_backend_without_backward),
    };
    return cmocka_run_group_tests_name("layer backward errors", tests, set_up_states, tear_down_states);
}
