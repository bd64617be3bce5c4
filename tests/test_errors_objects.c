/* test_errors_objects.c - refusals of everything but the forwards: configs, ready weights, parameters and views */
#include "error_rows.h"

/* ---- construction ---- */

static void test_config(void **state) {
    (void)state;
    rapt_mha_config *c = &s.settings.config;
    CONFIG(ERROR_ARGUMENT, "num_heads 6 does not divide embed_dim 512 (pass head_dim to set it apart)",
           c->num_heads = 6);
    CONFIG(OK, "", c->num_heads = 6, c->head_dim = 3);
    CONFIG(ERROR_ARGUMENT, "embed_dim is 0, expected at least 1", c->embed_dim = 0);
    CONFIG(ERROR_ARGUMENT, "embed_dim is -1, expected at least 1", c->embed_dim = RAPT_DEFAULT);
    CONFIG(ERROR_ARGUMENT, "num_heads is 0, expected at least 1", c->num_heads = 0);
    CONFIG(ERROR_ARGUMENT, "num_heads is -1, expected at least 1", c->num_heads = RAPT_DEFAULT);
    CONFIG(ERROR_ARGUMENT, "num_kv_heads is 0, expected at least 1, or RAPT_DEFAULT", c->num_kv_heads = 0);
    CONFIG(ERROR_ARGUMENT, "num_kv_heads is -2", c->num_kv_heads = -2);
    CONFIG(ERROR_ARGUMENT, "head_dim is 0, expected at least 1, or RAPT_DEFAULT", c->head_dim = 0);
    CONFIG(ERROR_ARGUMENT, "kdim is 0", c->kdim = 0);
    CONFIG(ERROR_ARGUMENT, "vdim is -9223372036854775808", c->vdim = INT64_MIN);
    CONFIG(ERROR_ARGUMENT, "num_kv_heads 16 is above num_heads 8", c->num_kv_heads = 16);
    CONFIG(ERROR_ARGUMENT, "num_kv_heads 3 does not divide num_heads 8", c->num_kv_heads = 3);
    CONFIG(ERROR_OVERFLOW, "the layer is too large: embed_dim 9223372036854775807", c->embed_dim = INT64_MAX,
           c->num_heads = 1);
    CONFIG(ERROR_OVERFLOW, "head_dim 4611686018427387904", c->head_dim = INT64_MAX / 2 + 1);
    CONFIG(ERROR_OVERFLOW, "num_heads 9223372036854775807 + 2 * num_kv_heads 9223372036854775807",
           c->num_heads = INT64_MAX, c->head_dim = 1);
    CONFIG(ERROR_OVERFLOW, "num_heads 9223372036854775807 + 2 * num_kv_heads 1", c->num_heads = INT64_MAX,
           c->num_kv_heads = c->head_dim = c->embed_dim = 1);
    CONFIG(ERROR_OVERFLOW, "kdim 1152921504606846976", c->kdim = (int64_t)1 << 60);
    CONFIG(ERROR_OVERFLOW, "vdim 1152921504606846976", c->vdim = (int64_t)1 << 60);
    CONFIG(ERROR_ARGUMENT, "dropout is -0.5, expected a number in [0, 1]", c->dropout = -0.5);
    CONFIG(ERROR_ARGUMENT, "dropout is 1.25, expected a number in [0, 1]", c->dropout = 1.25);
    CONFIG(ERROR_ARGUMENT, "dropout is nan", c->dropout = NAN);
    CONFIG(OK, "", c->dropout = 1);
    CONFIG(ERROR_ARGUMENT, "scale is nan, expected a finite number", c->set_scale = true, c->scale = NAN);
    CONFIG(ERROR_ARGUMENT, "scale is -inf, expected a finite number", c->set_scale = true, c->scale = -INFINITY);
    CONFIG(OK, "", c->set_scale = true, c->scale = 0);
    CONFIG(ERROR_ARGUMENT, "scale is 2, but set_scale is false", c->scale = 2);
    CONFIG(ERROR_ARGUMENT, "scale is nan, but set_scale is false", c->scale = NAN);
    CONFIG(OK, "", c->scale = 1 / sqrt((double)(c->embed_dim / c->num_heads))); /* as rapt_mha_settings says it */
    CONFIG(ERROR_DTYPE, "dtype is bool (5), expected f32, f64, bf16 or f16", c->dtype = RAPT_BOOL);
    CONFIG(ERROR_DTYPE, "dtype is unknown (0), expected f32", c->dtype = (rapt_dtype)0);
    CONFIG(ERROR_DEVICE, "device cuda (1) has no backend in this build", c->device = RAPT_DEVICE_CUDA);
    CONFIG(ERROR_DEVICE, "device unknown (12) has no backend", c->device = (rapt_device)12);
    CONFIG(ERROR_ARGUMENT, "init is 2, which is no rapt_init", c->init = (rapt_init)2);
    CONFIG(ERROR_ARGUMENT, "config.struct_size is 0, expected", c->struct_size = 0);
    CONFIG(ERROR_ARGUMENT, "(start from rapt_mha_config_default())", c->struct_size = sizeof *c - 1);
    CONFIG(OK, "", c->struct_size = sizeof *c + 16);
    CONFIG(ERROR_UNSUPPORTED, "config sets a field that Rapt 0.1.0 does not know", c->struct_size = sizeof *c + 16,
           s.settings.tail[15] = 1);
    CONFIG(OK, "", c->struct_size = sizeof *c + 8, s.settings.tail[15] = 1);
}

static void test_short_forms(void **state) {
    (void)state;
    const struct {
        int64_t embed_dim, heads, kv_heads; /* kv_heads INT64_MAX: the form without */
        const char *text;
    } rows[] = {
        {0, 2, INT64_MAX, "embed_dim is 0"},
        {-1, 2, INT64_MAX, "embed_dim is -1"},
        {8, 0, INT64_MAX, "num_heads is 0"},
        {8, -1, INT64_MAX, "num_heads is -1"},
        {8, 3, INT64_MAX, "num_heads 3 does not divide embed_dim 8"},
        {8, 4, 0, "num_kv_heads is 0"},
        {8, 4, -1, "num_kv_heads is -1"},
        {8, 4, 3, "num_kv_heads 3 does not divide num_heads 4"},
        {8, 4, 8, "num_kv_heads 8 is above num_heads 4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        bool plain = rows[i].kv_heads == INT64_MAX;
        for (int form = plain ? 0 : 2; form < (plain ? 2 : 3); form++) {
            rapt_mha *made = layer;
            rapt_status status =
                form == 0   ? rapt_mha_create_mha(context, rows[i].embed_dim, rows[i].heads, &made)
                : form == 1 ? rapt_mha_create_mqa(context, rows[i].embed_dim, rows[i].heads, &made)
                            : rapt_mha_create_gqa(context, rows[i].embed_dim, rows[i].heads, rows[i].kv_heads, &made);
            assert_int_equal(status, RAPT_ERROR_ARGUMENT);
            assert_null(made);
            if (strstr(rapt_error_message(context), rows[i].text) == NULL) {
                fail_msg("row %zu, form %d: \"%s\", expected \"%s\"", i, form, rapt_error_message(context),
                         rows[i].text);
            }
        }
    }
}

static void test_weights(void **state) {
    (void)state;
    rapt_mha_weights *w = &s.ready.weights;
    READY(ERROR_ARGUMENT, "ownership is 2, expected RAPT_COPY or RAPT_BORROW", s.ownership = (rapt_ownership)2);
    READY(OK, "", s.ownership = RAPT_BORROW);
    READY(ERROR_ARGUMENT, "weights.struct_size is 8, expected", w->struct_size = 8);
    READY(OK, "", w->struct_size = sizeof *w + 16);
    READY(ERROR_UNSUPPORTED, "weights sets a field that Rapt 0.1.0 does not know", w->struct_size = sizeof *w + 16,
          s.ready.tail[0] = 1);
    READY(ERROR_ARGUMENT, "num_heads is 0", w->num_heads = 0);
    READY(ERROR_ARGUMENT, "num_heads is -1, expected at least 1", w->num_heads = -1);
    READY(ERROR_ARGUMENT, "num_kv_heads is 0, expected at least 1, or RAPT_DEFAULT", w->num_kv_heads = 0);
    READY(ERROR_ARGUMENT, "head_dim is 0", w->head_dim = 0);
    READY(ERROR_ARGUMENT, "scale is inf", w->set_scale = true, w->scale = INFINITY);
    READY(ERROR_ARGUMENT, "dropout is 2, expected a number in [0, 1]", w->dropout = 2);
    READY(ERROR_ARGUMENT, "dropout is nan", w->dropout = NAN);
    READY(ERROR_SHAPE, "q_proj_weight has 12 rows, which num_heads 5 does not divide", w->num_heads = 5);
    READY(ERROR_SHAPE, "head_dim is 4, but the rows of q_proj_weight give 3", w->head_dim = 4);
    READY(ERROR_SHAPE, "k_proj_weight has 5 rows, which head_dim 3 does not divide", s.k_weight.shape[0] = 5);
    READY(ERROR_SHAPE, "num_kv_heads is 4, but the rows of k_proj_weight give 2", w->num_kv_heads = 4);
    READY(ERROR_ARGUMENT, "num_kv_heads 3 does not divide num_heads 4", s.k_weight = PLACE(true, 2, 9, KDIM));
    READY(ERROR_ARGUMENT, "num_kv_heads 5 is above num_heads 4", s.k_weight = PLACE(true, 2, 15, KDIM));
    READY(ERROR_SHAPE, "v_proj_weight has 3 rows, expected 6 as k_proj_weight", s.v_weight.shape[0] = 3);
    READY(ERROR_SHAPE, "q_proj_weight has shape [12] with 1 dimensions, expected 2: [H*D, E]", s.q_weight.ndim = 1);
    READY(ERROR_SHAPE, "k_proj_weight has shape [6, 0], expected sizes of at least 1", s.k_weight.shape[1] = 0);
    READY(ERROR_SHAPE, "out_proj_weight has shape [12, 8], expected [E, H*D] = [8, 12]", s.out_weight = s.q_weight);
    READY(ERROR_SHAPE, "q_proj_bias has shape [11], expected [12]", s.q_bias.shape[0] = 11);
    READY(ERROR_SHAPE, "k_proj_bias has shape [12], expected [6]", s.k_bias = s.q_bias);
    READY(ERROR_SHAPE, "v_proj_bias has shape [6, 1], expected [6]", s.v_bias.ndim = 2, s.v_bias.shape[1] = 1);
    READY(ERROR_SHAPE, "out_proj_bias has shape [], expected [8]", s.out_bias.ndim = 0);
    READY(ERROR_DTYPE, "q_proj_weight is bool, expected f32, f64, bf16 or f16", s.q_weight.dtype = RAPT_BOOL);
    READY(ERROR_DTYPE, "k_proj_weight is f16, expected f32 as the first weight", s.k_weight.dtype = RAPT_F16);
    READY(ERROR_DTYPE, "out_proj_weight is bf16, expected f32 as the first weight", s.out_weight.dtype = RAPT_BF16);
    READY(ERROR_DTYPE, "out_proj_bias is f16, expected f32 as the weights", s.out_bias.dtype = RAPT_F16);
    READY(ERROR_NULL, "bias_k is given without bias_v", w->bias_k = &s.bias_k);
    READY(ERROR_NULL, "bias_v is given without bias_k", w->bias_v = &s.bias_v);
    READY(ERROR_SHAPE, "bias_k has shape [1, 1, 5], expected [6]", w->bias_k = &s.bias_k, w->bias_v = &s.bias_v,
          s.bias_k.shape[2] = 5);
    READY(ERROR_DTYPE, "bias_v is bf16, expected f32 as the weights", w->bias_k = &s.bias_k, w->bias_v = &s.bias_v,
          s.bias_v.dtype = RAPT_BF16);
    READY(OK, "", w->q_proj_bias = w->v_proj_bias = w->out_proj_bias = NULL);

    FUSED(ERROR_ARGUMENT, "in_proj_weight and separate projection weights are given", w->v_proj_weight = &s.v_weight);
    FUSED(ERROR_ARGUMENT, "in_proj_bias and separate projection biases are given", w->k_proj_bias = &s.k_bias);
    FUSED(ERROR_SHAPE, "in_proj_weight has 24 rows, which num_heads + 2 * num_kv_heads = 5 does not divide",
          w->num_heads = 3, w->num_kv_heads = 1);
    FUSED(ERROR_SHAPE, "head_dim is 2, but the rows of in_proj_weight give 3", w->head_dim = 2);
    FUSED(ERROR_ARGUMENT, "num_kv_heads 10 is above num_heads 4", w->num_kv_heads = 10);
    FUSED(ERROR_OVERFLOW, "num_heads 4 and num_kv_heads 9223372036854775807 are too large",
          w->num_kv_heads = INT64_MAX);
    FUSED(ERROR_SHAPE, "in_proj_weight has shape [24] with 1 dimensions, expected 2: [(H+2Hk)*D, E]",
          s.in_weight.ndim = 1);
    FUSED(ERROR_DTYPE, "in_proj_weight is bool, expected f32", s.in_weight.dtype = RAPT_BOOL);
    FUSED(ERROR_SHAPE, "in_proj_bias has shape [12], expected [24]", s.in_bias = s.q_bias);
    FUSED(OK, "", w->in_proj_bias = NULL, w->q_proj_bias = &s.q_bias);
}

/* ---- parameters and views ---- */

static void test_parameters_and_views(void **state) {
    (void)state;
    ROW(set_layer, call_find, ERROR_ABSENT, "the layer has no parameter \"in_proj_weight\"", s.name = "in_proj_weight");
    ROW(set_layer, call_find, ERROR_ABSENT, "the layer has no parameter \"bias_k\"", s.name = "bias_k");
    ROW(set_layer, call_find, ERROR_ABSENT, "no parameter \"q_proj\"", s.name = "q_proj");
    ROW(set_layer, call_find, ERROR_ABSENT, "no parameter \"\"", s.name = "");
    ROW(set_layer, call_tensor_at, ERROR_ARGUMENT, "index is -1, expected 0 to 5", s.index = -1);
    ROW(set_layer, call_tensor_at, ERROR_ARGUMENT, "index is 6, expected 0 to 5", s.index = 6);
    ROW(set_operator, call_transpose, ERROR_ARGUMENT, "dim_a is -1, expected 0 to 3 for a tensor with 4 dimensions",
        s.dim_a = -1);
    ROW(set_operator, call_transpose, ERROR_ARGUMENT, "dim_b is 4, expected 0 to 3", s.dim_b = 4);
    ROW(set_operator, call_slice, ERROR_ARGUMENT, "dim is 4, expected 0 to 3", s.dim_a = 4);
    ROW(set_operator, call_slice, ERROR_ARGUMENT, "start -1 with count 1 is outside dimension 0 of size 2",
        s.number = -1);
    ROW(set_operator, call_slice, ERROR_ARGUMENT, "start 1 with count 2 is outside dimension 0", s.number = 1,
        s.count = 2);
    ROW(set_operator, call_slice, ERROR_ARGUMENT, "start 0 with count -1 is outside", s.number = 0, s.count = -1);
    ROW(set_operator, call_slice, ERROR_ARGUMENT, "start 1 with count 9223372036854775807", s.number = 1,
        s.count = INT64_MAX);
    ROW(set_operator, call_slice, OK, "", s.number = 2, s.count = 0);
    ROW(set_copy, call_copy, ERROR_SHAPE, "to has shape [2, 4, 3, 5], expected from's shape [2, 4, 3, 6]",
        s.view.shape[3] = 5);
    ROW(set_copy, call_copy, ERROR_SHAPE, "to has shape [2, 4, 3], expected from's shape", s.view.ndim = 3);
    ROW(set_copy, call_copy, ERROR_DTYPE, "to is bool and from is f32: bool converts only to bool",
        s.view.dtype = RAPT_BOOL);
    ROW(set_copy, call_copy, ERROR_LAYOUT, "to overlaps itself", s.view.stride[3] = 0);
    ROW(set_copy, call_copy, ERROR_LAYOUT, "shares memory with from", s.buffer = s.tensor);
    ROW(set_split, call_split, ERROR_SHAPE, "tensor has shape [2], expected [N,L,H*D] or [L,H*D]", s.query.ndim = 1);
    ROW(set_split, call_split, ERROR_ARGUMENT, "num_heads 3 does not divide the last size 8 of tensor", s.number = 3);
    ROW(set_split, call_split, ERROR_ARGUMENT, "num_heads 0 does not divide the last size 8", s.number = 0);
    ROW(set_split, call_split, ERROR_ARGUMENT, "num_heads -2 does not divide", s.number = -2);
    ROW(set_merge, call_merge, ERROR_SHAPE, "heads has shape [2, 4], expected [N,H,L,D] or [H,L,D]", s.query.ndim = 2);
    ROW(set_merge, call_merge, ERROR_LAYOUT, "do not allow merging as a view: pass a buffer of shape [2, 3, 24]",
        s.buffer = NULL);
    ROW(set_merge, call_merge, ERROR_SHAPE, "buffer has shape [2, 3, 23], expected [2, 3, 24]",
        s.static_k.shape[2] = 23);
    ROW(set_merge, call_merge, ERROR_DTYPE, "buffer is f16, expected f32 as heads", s.static_k.dtype = RAPT_F16);
    ROW(set_merge, call_merge, ERROR_LAYOUT, "buffer overlaps itself", s.static_k.stride[2] = 0);
    ROW(set_merge, call_merge, ERROR_LAYOUT, "shares memory with heads", s.static_k.data = s.query.data);
    ROW(set_merge, call_merge, ERROR_OVERFLOW, "heads", s.query.shape[1] = s.query.shape[3] = INT64_MAX / 2,
        s.query.shape[0] = 0);
    ROW(set_repeat, call_repeat, ERROR_SHAPE, "heads has shape [2, 2, 5, 6, 1], expected", s.key.ndim = 5,
        s.key.shape[4] = 1);
    ROW(set_repeat, call_repeat, ERROR_ARGUMENT, "times is 0, expected at least 1", s.number = 0);
    ROW(set_repeat, call_repeat, ERROR_OVERFLOW, "2 heads repeated 9223372036854775807 times are too many",
        s.number = INT64_MAX);
    ROW(set_repeat, call_repeat, ERROR_LAYOUT, "do not allow repeating as a view: pass a buffer of shape [2, 4, 5, 6]",
        s.buffer = NULL);
    ROW(set_repeat, call_repeat, ERROR_SHAPE, "buffer has shape [2, 4, 5, 6], expected [2, 6, 5, 6]", s.number = 3);
    ROW(set_repeat, call_repeat, ERROR_DTYPE, "buffer is bf16, expected f32 as heads", s.static_k.dtype = RAPT_BF16);
    ROW(set_repeat, call_repeat, ERROR_LAYOUT, "shares memory with heads", s.static_k.data = s.key.data);
}

/* Sizes of 1 and empty tensors may have any stride: nothing may be computed with them (a sanitizer would see it). */
static void wild_strides(rapt_tensor *tensor, bool all) {
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (all || tensor->shape[d] == 1) tensor->stride[d] = d % 2 == 0 ? INT64_MAX : INT64_MIN;
    }
}

static void test_wild_strides(void **state) {
    (void)state;
    OPERATOR(OK, "", s.key.shape[2] = s.value.shape[2] = 0, wild_strides(&s.key, true), wild_strides(&s.value, true));
    OPERATOR(OK, "", s.query.shape[2] = s.out.shape[2] = 0, wild_strides(&s.query, true), wild_strides(&s.out, true));
    OPERATOR(OK, "", s.query.shape[0] = s.key.shape[0] = s.value.shape[0] = s.out.shape[0] = 1,
             wild_strides(&s.query, false), wild_strides(&s.key, false), wild_strides(&s.value, false),
             wild_strides(&s.out, false));
    OPERATOR(OK, "", s.key.shape[2] = s.value.shape[2] = 0, s.attn_mask = PLACE(true, 3, N * H, L, 0),
             wild_strides(&s.attn_mask, true), s.options.attn_mask = &s.attn_mask);
    OPERATOR(OK, "", s.attn_mask = PLACE(true, 4, 1, 1, 1, S), wild_strides(&s.attn_mask, false),
             s.options.attn_mask = &s.attn_mask);
    LAYER(OK, "", s.key.shape[1] = s.value.shape[1] = 0, wild_strides(&s.key, true), wild_strides(&s.value, true));
    FUNCTIONAL(OK, "", STATIC_BOTH, s.static_k.shape[1] = s.static_v.shape[1] = 0, wild_strides(&s.static_k, true),
               wild_strides(&s.static_v, true));
    ROW(set_split, call_split, OK, "", s.query.shape[1] = 0, wild_strides(&s.query, true));
    ROW(set_merge, call_merge, OK, "", s.query.shape[2] = 0, wild_strides(&s.query, true));
    ROW(set_repeat, call_repeat, OK, "", s.key.shape[2] = 0, wild_strides(&s.key, true));
    ROW(set_copy, call_copy, OK, "", s.query.shape[2] = s.view.shape[2] = s.query.shape[3] = s.view.shape[3] = 1,
        wild_strides(&s.query, false), wild_strides(&s.view, false));
    ROW(set_copy, call_copy, ERROR_OVERFLOW, "to with shape [2] is too large", s.query.dtype = s.view.dtype = RAPT_BOOL,
        s.query.ndim = s.view.ndim = 1, s.view.stride[0] = INT64_MIN); /* from end to end more than an int64 counts */
    ROW(set_copy, call_copy, ERROR_OVERFLOW, "to with shape [2, 4] is too large",
        s.query.dtype = s.view.dtype = RAPT_BOOL, s.query.ndim = s.view.ndim = 2, s.view.stride[0] = INT64_MIN / 2 - 9,
        s.view.stride[1] = INT64_MAX / 6);
    ROW(set_copy, call_copy, OK, "", s.view.dtype = RAPT_BOOL, s.view.ndim = 2, s.view.shape[0] = s.view.shape[1] = 0,
        s.query.ndim = 2, s.query.shape[0] = s.query.shape[1] = 0, s.query.dtype = RAPT_BOOL,
        wild_strides(&s.view, true));
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),       cmocka_unit_test(test_short_forms),
        cmocka_unit_test(test_weights),      cmocka_unit_test(test_parameters_and_views),
        cmocka_unit_test(test_wild_strides),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
