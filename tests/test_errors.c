/* test_errors.c - refusals of the forward calls: status, a message with the offending values, nothing changed */
#include "error_rows.h"

/* ---- NULL ---- */

static void test_null(void **state) {
    (void)state;
    OPERATOR(ERROR_NULL, "query is NULL", s.q = NULL);
    OPERATOR(ERROR_NULL, "key is NULL", s.k = NULL);
    OPERATOR(ERROR_NULL, "value is NULL", s.v = NULL);
    OPERATOR(ERROR_NULL, "out is NULL", s.o = NULL);
    OPERATOR(ERROR_NULL, "query with shape [2, 4, 3, 6] has NULL data", s.query.data = NULL);
    LAYER(ERROR_NULL, "layer is NULL", s.layer = NULL);
    LAYER(ERROR_NULL, "query is NULL", s.q = NULL);
    LAYER(ERROR_NULL, "key is NULL", s.k = NULL);
    LAYER(ERROR_NULL, "value is NULL", s.v = NULL);
    LAYER(ERROR_NULL, "out is NULL", s.o = NULL);
    TOKEN(ERROR_NULL, "layer is NULL", s.layer = NULL);
    TOKEN(ERROR_NULL, "tokens is NULL", s.q = NULL);
    TOKEN(ERROR_NULL, "out is NULL", s.o = NULL);
    FUNCTIONAL(ERROR_NULL, "weights is NULL", s.w = NULL);
    FUNCTIONAL(ERROR_NULL, "query is NULL", s.q = NULL);
    FUNCTIONAL(ERROR_NULL, "key is NULL", s.k = NULL);
    FUNCTIONAL(ERROR_NULL, "value is NULL", s.v = NULL);
    FUNCTIONAL(ERROR_NULL, "out is NULL", s.o = NULL);
    FUNCTIONAL(ERROR_NULL, "q_proj_weight is NULL", s.ready.weights.q_proj_weight = NULL);
    FUNCTIONAL(ERROR_NULL, "k_proj_weight is NULL", s.ready.weights.k_proj_weight = NULL);
    FUNCTIONAL(ERROR_NULL, "v_proj_weight is NULL", s.ready.weights.v_proj_weight = NULL);
    FUNCTIONAL(ERROR_NULL, "out_proj_weight is NULL", s.ready.weights.out_proj_weight = NULL);
    CONFIG(ERROR_NULL, "config is NULL", s.config = NULL);
    READY(ERROR_NULL, "weights is NULL", s.w = NULL);
    ROW(set_layer, call_find, ERROR_NULL, "layer is NULL", s.layer = NULL);
    ROW(set_layer, call_find, ERROR_NULL, "name is NULL", s.name = NULL);
    ROW(set_layer, call_find, ERROR_NULL, "view is NULL", s.result = NULL);
    ROW(set_layer, call_tensor_at, ERROR_NULL, "layer is NULL", s.layer = NULL);
    ROW(set_operator, call_transpose, ERROR_NULL, "tensor is NULL", s.tensor = NULL);
    ROW(set_operator, call_transpose, ERROR_NULL, "view is NULL", s.result = NULL);
    ROW(set_operator, call_slice, ERROR_NULL, "tensor is NULL", s.tensor = NULL);
    ROW(set_operator, call_slice, ERROR_NULL, "view is NULL", s.result = NULL);
    ROW(set_copy, call_copy, ERROR_NULL, "from is NULL", s.tensor = NULL);
    ROW(set_copy, call_copy, ERROR_NULL, "to is NULL", s.buffer = NULL);
    ROW(set_split, call_split, ERROR_NULL, "tensor is NULL", s.tensor = NULL);
    ROW(set_split, call_split, ERROR_NULL, "heads is NULL", s.result = NULL);
    ROW(set_merge, call_merge, ERROR_NULL, "heads is NULL", s.tensor = NULL);
    ROW(set_merge, call_merge, ERROR_NULL, "merged is NULL", s.result = NULL);
    ROW(set_repeat, call_repeat, ERROR_NULL, "heads is NULL", s.tensor = NULL);
    ROW(set_repeat, call_repeat, ERROR_NULL, "repeated is NULL", s.result = NULL);
    assert_int_equal(rapt_mha_create(context, &s.settings.config, NULL), RAPT_ERROR_NULL);
    assert_string_equal(rapt_error_message(context), "layer is NULL");
    assert_int_equal(rapt_mha_create_from_weights(context, NULL, RAPT_COPY, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_create_mha(context, 8, 2, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_create_mqa(context, 8, 2, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_create_gqa(context, 8, 2, 1, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_commit(context, NULL), RAPT_ERROR_NULL);
    assert_string_equal(rapt_error_message(context), "layer is NULL");
}

/* Without a context there is nowhere for a message, but a status there is. */
static void test_null_context(void **state) {
    (void)state;
    rapt_context *kept = context;
    rapt_status (*const calls[])(void) = {call_operator, call_layer,     call_token,     call_functional,
                                          call_find,     call_tensor_at, call_transpose, call_slice,
                                          call_copy,     call_split,     call_merge,     call_repeat};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        set_functional();
        memcpy(&before, &s, sizeof s);
        context = NULL;
        rapt_status status = calls[i]();
        context = kept;
        assert_int_equal(status, RAPT_ERROR_NULL);
        assert_memory_equal(&before, &s, sizeof s);
    }
    rapt_mha_config config = rapt_mha_config_default(8, 2);
    rapt_mha *made = layer;
    assert_int_equal(rapt_mha_create(NULL, &config, &made), RAPT_ERROR_NULL);
    assert_null(made);
    made = layer;
    assert_int_equal(rapt_mha_create_from_weights(NULL, s.w, RAPT_COPY, &made), RAPT_ERROR_NULL);
    assert_null(made);
    made = layer;
    assert_int_equal(rapt_mha_create_gqa(NULL, 8, 2, 1, &made), RAPT_ERROR_NULL);
    assert_null(made);
    assert_int_equal(rapt_mha_commit(NULL, layer), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_version(layer), 1);
}

/* ---- tensors that are wrong by themselves, in every place of every call ---- */

typedef enum tensor_fault {
    DTYPE_ZERO,
    DTYPE_UNKNOWN,
    DEVICE_CUDA,
    DEVICE_UNKNOWN,
    RANK_NEGATIVE,
    RANK_ABOVE,
    SIZE_NEGATIVE,
    SIZE_OVERFLOW,
    SIZE_OVERFLOW_EMPTY,
    STRIDE_OVERFLOW,
    NO_DATA,
    MISALIGNED,
    TENSOR_FAULTS
} tensor_fault;

static rapt_status spoil(rapt_tensor *tensor, tensor_fault fault, const char **text) {
    switch (fault) {
    case DTYPE_ZERO:
        tensor->dtype = (rapt_dtype)0;
        *text = "has dtype 0,";
        return RAPT_ERROR_DTYPE;
    case DTYPE_UNKNOWN:
        tensor->dtype = (rapt_dtype)77;
        *text = "has dtype 77,";
        return RAPT_ERROR_DTYPE;
    case DEVICE_CUDA:
        tensor->device = RAPT_DEVICE_CUDA;
        *text = "is on device cuda (1)";
        return RAPT_ERROR_DEVICE;
    case DEVICE_UNKNOWN:
        tensor->device = (rapt_device)9;
        *text = "is on device unknown (9)";
        return RAPT_ERROR_DEVICE;
    case RANK_NEGATIVE:
        tensor->ndim = -1;
        *text = "has -1 dimensions, expected 0 to 8";
        return RAPT_ERROR_SHAPE;
    case RANK_ABOVE:
        tensor->ndim = 9;
        *text = "has 9 dimensions, expected 0 to 8";
        return RAPT_ERROR_SHAPE;
    case SIZE_NEGATIVE:
        tensor->shape[0] = -3;
        *text = "has size -3 in dimension 0";
        return RAPT_ERROR_SHAPE;
    case SIZE_OVERFLOW:
        tensor->shape[0] = INT64_MAX;
        *text = "with shape [9223372036854775807";
        return RAPT_ERROR_OVERFLOW;
    case SIZE_OVERFLOW_EMPTY:
        tensor->shape[0] = tensor->ndim > 1 ? 0 : INT64_MAX / 2;
        if (tensor->ndim > 1) tensor->shape[1] = INT64_MAX;
        *text = "is too large: its bytes overflow an int64";
        return RAPT_ERROR_OVERFLOW;
    case STRIDE_OVERFLOW:
        tensor->shape[0] = tensor->shape[0] < 2 ? 2 : tensor->shape[0]; /* else a stride is never used */
        tensor->stride[0] = INT64_MIN / 2;
        *text = "is too large: its bytes overflow an int64";
        return RAPT_ERROR_OVERFLOW;
    case NO_DATA:
        tensor->data = NULL;
        *text = "has NULL data";
        return RAPT_ERROR_NULL;
    default:
        tensor->data = (char *)tensor->data + 1;
        *text = "not aligned to the 4 bytes of a f32";
        return RAPT_ERROR_LAYOUT;
    }
}

static void use_all_options(void) {
    s.options.attn_mask = &s.attn_mask;
    s.options.key_padding_mask = &s.padding;
    s.options.weights = &s.weights;
    s.options.lse = &s.lse;
    s.options.key_start = s.key_start;
    s.key_lengths[0] = s.key_lengths[1] = S;
    s.options.key_lengths = s.key_lengths;
    s.options.offsets = s.offsets;
}

typedef struct place_name {
    rapt_tensor *tensor;
    const char *name;
} place_name;

static const place_name forward_places[] = {{&s.query, "query "},         {&s.key, "key "},
                                            {&s.value, "value "},         {&s.out, "out "},
                                            {&s.attn_mask, "attn_mask "}, {&s.padding, "key_padding_mask "},
                                            {&s.weights, "weights "},     {&s.lse, "lse "}};
static const place_name weight_places[] = {{&s.q_weight, "q_proj_weight "}, {&s.k_weight, "k_proj_weight "},
                                           {&s.v_weight, "v_proj_weight "}, {&s.out_weight, "out_proj_weight "},
                                           {&s.q_bias, "q_proj_bias "},     {&s.k_bias, "k_proj_bias "},
                                           {&s.v_bias, "v_proj_bias "},     {&s.out_bias, "out_proj_bias "},
                                           {&s.bias_k, "bias_k "},          {&s.bias_v, "bias_v "}};

static void check_places(const place_name *places, int count, void (*set)(void), rapt_status (*call)(void)) {
    for (int i = 0; i < count; i++) {
        for (int fault = 0; fault < TENSOR_FAULTS; fault++) {
            set();
            use_all_options();
            if (places == weight_places) {
                s.ready.weights.bias_k = &s.bias_k;
                s.ready.weights.bias_v = &s.bias_v;
            }
            const char *reason;
            rapt_status expected = spoil(places[i].tensor, (tensor_fault)fault, &reason);
            check_row(1000 * (i + 1) + fault, set, call, expected, reason);
            const char *message = rapt_error_message(context); /* still of the row: what came after it was good */
            if (strncmp(message, places[i].name, strlen(places[i].name)) != 0)
                fail_msg("\"%s\" begins not with %s", message, places[i].name);
        }
    }
}

static void test_bad_tensors(void **state) {
    (void)state;
    check_places(forward_places, 8, set_operator, call_operator);
    check_places(forward_places, 8, set_layer, call_layer);
    check_places(weight_places, 10, set_functional, call_functional);
    check_places(weight_places, 10, set_functional, call_from_weights);
    check_places((place_name[]){{&s.query, "tokens "}, {&s.out, "out "}}, 2, set_token, call_token);
    check_places((place_name[]){{&s.in_weight, "in_proj_weight "}, {&s.in_bias, "in_proj_bias "}}, 2, set_fused,
                 call_functional);
    check_places((place_name[]){{&s.query, "tensor "}}, 1, set_operator, call_transpose);
    check_places((place_name[]){{&s.query, "tensor "}}, 1, set_operator, call_slice);
    check_places((place_name[]){{&s.query, "from "}, {&s.view, "to "}}, 2, set_copy, call_copy);
    check_places((place_name[]){{&s.query, "tensor "}}, 1, set_split, call_split);
    check_places((place_name[]){{&s.query, "heads "}, {&s.static_k, "buffer "}}, 2, set_merge, call_merge);
    check_places((place_name[]){{&s.key, "heads "}, {&s.static_k, "buffer "}}, 2, set_repeat, call_repeat);
}

/* ---- shapes and dtypes ---- */

static void test_operator_shapes(void **state) {
    (void)state;
    OPERATOR(ERROR_SHAPE, "query has shape [2, 4, 3] with 3 dimensions, expected 4: [N,H,L,D]", s.query.ndim = 3);
    OPERATOR(ERROR_SHAPE, "key has shape [2, 2, 5] with 3 dimensions, expected 4: [N,Hk,S,D]", s.key.ndim = 3);
    OPERATOR(ERROR_SHAPE, "value has shape [2, 2] with 2 dimensions, expected 4", s.value.ndim = 2);
    OPERATOR(ERROR_SHAPE, "out has shape [] with 0 dimensions, expected 4", s.out.ndim = 0);
    OPERATOR(ERROR_SHAPE, "query has shape [2, 4, 3, 6, 1] with 5 dimensions", s.query.ndim = 5, s.query.shape[4] = 1);
    OPERATOR(ERROR_SHAPE, "query has shape [2, 0, 3, 6], expected [N,H,L,D] with at least 1 head",
             s.query.shape[1] = 0);
    OPERATOR(ERROR_SHAPE, "key has shape [2, 2, 5, 0], expected [N,Hk,S,D] with at least 1 dim", s.key.shape[3] = 0);
    OPERATOR(ERROR_SHAPE, "value has shape [2, 0, 5, 7]", s.value.shape[1] = 0);
    OPERATOR(ERROR_SHAPE, "key has shape [1, 2, 5, 6] with N 1, expected 2 as query", s.key.shape[0] = 1);
    OPERATOR(ERROR_SHAPE, "key has shape [2, 2, 5, 5] with D 5, expected 6 as query", s.key.shape[3] = 5);
    OPERATOR(ERROR_SHAPE, "value has shape [1, 2, 5, 7] with N 1, expected 2 as query", s.value.shape[0] = 1);
    OPERATOR(ERROR_SHAPE, "value has shape [2, 1, 5, 7] with Hk 1, expected 2 as key", s.value.shape[1] = 1);
    OPERATOR(ERROR_SHAPE, "value has shape [2, 2, 4, 7] with S 4, expected 5 as key", s.value.shape[2] = 4);
    OPERATOR(ERROR_SHAPE, "out has shape [1, 4, 3, 7] with N 1, expected 2 as query", s.out.shape[0] = 1);
    OPERATOR(ERROR_SHAPE, "out has shape [2, 3, 3, 7] with H 3, expected 4 as query", s.out.shape[1] = 3);
    OPERATOR(ERROR_SHAPE, "out has shape [2, 4, 2, 7] with L 2, expected 3 as query", s.out.shape[2] = 2);
    OPERATOR(ERROR_SHAPE, "out has shape [2, 4, 3, 6] with Dv 6, expected 7 as value", s.out.shape[3] = 6);
    OPERATOR(ERROR_SHAPE, "key has 2 heads, which does not divide the 3 heads of query",
             s.query.shape[1] = s.out.shape[1] = 3);
    OPERATOR(ERROR_SHAPE, "key has 2 heads, which does not divide the 1 heads of query",
             s.query.shape[1] = s.out.shape[1] = 1);
    OPERATOR(ERROR_DTYPE, "key is bf16, expected f32 as query", s.key.dtype = RAPT_BF16);
    OPERATOR(ERROR_DTYPE, "value is f16, expected f32 as query", s.value.dtype = RAPT_F16);
    OPERATOR(ERROR_DTYPE, "out is bool, expected f32 as query", s.out.dtype = RAPT_BOOL);
    OPERATOR(ERROR_DTYPE, "query is bool, expected f32, f64, bf16 or f16",
             s.query.dtype = s.key.dtype = s.value.dtype = s.out.dtype = RAPT_BOOL);
    OPERATOR(OK, "", s.query.shape[0] = s.key.shape[0] = s.value.shape[0] = s.out.shape[0] = 0);
    OPERATOR(OK, "", s.query.shape[2] = s.out.shape[2] = 0);
    OPERATOR(OK, "", s.key.shape[2] = s.value.shape[2] = 0);
    OPERATOR(OK, "", s.key.shape[2] = s.value.shape[2] = 0, s.key.data = s.value.data = NULL);
    OPERATOR(OK, "", s.query.data = (float *)s.query.data + 5, s.query.stride[3] = -1);
    OPERATOR(OK, "", s.key.data = (float *)s.key.data + D * (S - 1), s.key.stride[2] = -D);
    OPERATOR(OK, "", s.out.data = (float *)s.out.data + DV - 1, s.out.stride[3] = -1);
    OPERATOR(OK, "", s.query.stride[0] = s.query.stride[1] = s.query.stride[2] = s.query.stride[3] = 0);
}

static void test_layer_shapes(void **state) {
    (void)state;
    LAYER(ERROR_SHAPE, "query has shape [2], expected [N,L,E], or [L,E] without a batch", s.query.ndim = 1);
    LAYER(ERROR_SHAPE, "query has shape [2, 3, 8, 1], expected", s.query.ndim = 4, s.query.shape[3] = 1);
    LAYER(ERROR_SHAPE, "key has 2 dimensions, expected 3 as query", s.key.ndim = 2);
    LAYER(ERROR_SHAPE, "value has 2 dimensions, expected 3 as query", s.value.ndim = 2);
    UNBATCHED(ERROR_SHAPE, "key has 3 dimensions, expected 2 as query", s.key.ndim = 3, s.key.shape[2] = 1);
    UNBATCHED(ERROR_SHAPE, "out has shape [3, 8, 1], expected query's shape [3, 8]", s.out.ndim = 3, s.out.shape[2] = 1,
              s.out.stride[2] = 1);
    LAYER(ERROR_SHAPE, "query has shape [2, 3, 7] with last size 7, expected embed_dim 8", s.query.shape[2] = 7);
    LAYER(ERROR_SHAPE, "key has shape [2, 5, 5] with last size 5, expected kdim 6", s.key.shape[2] = 5);
    LAYER(ERROR_SHAPE, "value has shape [2, 5, 4] with last size 4, expected vdim 5", s.value.shape[2] = 4);
    LAYER(ERROR_SHAPE, "key has batch 1, expected 2 as query", s.key.shape[0] = 1);
    LAYER(ERROR_SHAPE, "value has batch 1, expected 2 as query", s.value.shape[0] = 1);
    LAYER(ERROR_SHAPE, "value has length 4, expected 5 as key", s.value.shape[1] = 4);
    LAYER(ERROR_SHAPE, "out has shape [2, 2, 8], expected query's shape [2, 3, 8]", s.out.shape[1] = 2);
    LAYER(ERROR_DTYPE, "query is f16, expected f32 as the layer", s.query.dtype = RAPT_F16);
    LAYER(ERROR_DTYPE, "key is bf16, expected f32 as the layer", s.key.dtype = RAPT_BF16);
    LAYER(ERROR_DTYPE, "value is bool, expected f32 as the layer", s.value.dtype = RAPT_BOOL);
    LAYER(ERROR_DTYPE, "out is f16, expected f32 as the layer", s.out.dtype = RAPT_F16);
    LAYER(OK, "", s.query.shape[0] = s.key.shape[0] = s.value.shape[0] = s.out.shape[0] = 0);
    LAYER(OK, "", s.query.shape[1] = s.out.shape[1] = 0);
    LAYER(OK, "", s.key.shape[1] = s.value.shape[1] = 0);
    LAYER(OK, "", s.key.stride[1] = s.value.stride[2] = 0);
    TOKEN(ERROR_SHAPE, "tokens has shape [2] with 1 dimensions, expected 2: [N, E]", s.query.ndim = 1);
    TOKEN(ERROR_SHAPE, "out has shape [2] with 1 dimensions, expected 2: [N, E]", s.out.ndim = 1);
    TOKEN(ERROR_SHAPE, "tokens has last size 7, expected embed_dim 8", s.query.shape[1] = 7);
    TOKEN(ERROR_SHAPE, "expected query's shape", s.out.shape[0] = 1);
    TOKEN(ERROR_DTYPE, "tokens is bf16, expected f32 as the layer", s.query.dtype = RAPT_BF16);
    TOKEN(ERROR_STATE, "embed_dim 8, kdim 6 and vdim 5", s.layer = layer);
    TOKEN(ERROR_LAYOUT, "out (at ", s.out.data = s.query.data);
    TOKEN(OK, "", s.query.shape[0] = s.out.shape[0] = 0);
}

static void test_masks_and_results(void **state) {
    (void)state;
    OPERATOR(ERROR_SHAPE,
             "attn_mask has shape [2, 5], expected [L,S] = [3, 5], [N*H,L,S] = [8, 3, 5] or [N,H,L,S] = [2, 4, 3, 5]",
             use_all_options(), s.attn_mask.shape[0] = 2);
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [1, 5]", use_all_options(), s.attn_mask.shape[0] = 1);
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [3, 1]", use_all_options(), s.attn_mask.shape[1] = 1);
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [3]", use_all_options(), s.attn_mask.ndim = 1);
    OPERATOR(ERROR_SHAPE, "attn_mask has shape []", use_all_options(), s.attn_mask.ndim = 0);
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [4, 3, 5]", use_all_options(), s.attn_mask = PLACE(true, 3, H, L, S));
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [2, 2, 3, 5]", use_all_options(),
             s.attn_mask = PLACE(true, 4, N, 2, L, S));
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [3, 1, 1, 5]", use_all_options(),
             s.attn_mask = PLACE(true, 4, 3, 1, 1, S));
    OPERATOR(ERROR_SHAPE, "attn_mask has shape [1, 1, 1, 1, 5]", use_all_options(),
             s.attn_mask = PLACE(true, 5, 1, 1, 1, 1, S));
    OPERATOR(OK, "", use_all_options(), s.attn_mask = PLACE(true, 3, N * H, L, S));
    OPERATOR(OK, "", use_all_options(), s.attn_mask = PLACE(true, 4, 1, 1, 1, S));
    OPERATOR(OK, "", use_all_options(), s.attn_mask = PLACE(true, 4, N, 1, L, S));
    OPERATOR(OK, "", use_all_options(), s.attn_mask.dtype = RAPT_BOOL);
    UNBATCHED(OK, "", s.attn_mask = PLACE(true, 3, H, L, S), s.options.attn_mask = &s.attn_mask);
    UNBATCHED(ERROR_SHAPE, "attn_mask has shape [8, 3, 5]", s.attn_mask = PLACE(true, 3, N * H, L, S),
              s.options.attn_mask = &s.attn_mask);
    OPERATOR(ERROR_SHAPE, "key_padding_mask has shape [2, 4], expected [S] = [5] or [N,S] = [2, 5]", use_all_options(),
             s.padding.shape[1] = 4);
    OPERATOR(ERROR_SHAPE, "key_padding_mask has shape [1, 5]", use_all_options(), s.padding.shape[0] = 1);
    OPERATOR(ERROR_SHAPE, "key_padding_mask has shape [2]", use_all_options(), s.padding.ndim = 1);
    OPERATOR(ERROR_SHAPE, "key_padding_mask has shape [2, 5, 1]", use_all_options(), s.padding.ndim = 3,
             s.padding.shape[2] = 1);
    OPERATOR(OK, "", use_all_options(), s.padding = PLACE(true, 1, S));
    LAYER(ERROR_SHAPE, "key_padding_mask has shape [3, 5], expected [S] = [5]", use_all_options(),
          s.padding = PLACE(true, 2, 3, S));

    OPERATOR(ERROR_SHAPE, "weights has shape [2, 3, 4], expected [2, 3, 5]", use_all_options(), s.weights.shape[2] = 4);
    OPERATOR(ERROR_SHAPE, "weights has shape [2, 3, 5], expected [2, 4, 3, 5]", use_all_options(),
             s.options.per_head_weights = true);
    OPERATOR(ERROR_DTYPE, "weights is f16, expected f32", use_all_options(), s.weights.dtype = RAPT_F16);
    OPERATOR(ERROR_LAYOUT, "weights overlaps itself: a dimension of size 5 has stride 0", use_all_options(),
             s.weights.stride[2] = 0);
    OPERATOR(ERROR_SHAPE, "lse has shape [2, 4], expected [2, 4, 3]", use_all_options(), s.lse.ndim = 2);
    OPERATOR(ERROR_DTYPE, "lse is bf16, expected f32", use_all_options(), s.lse.dtype = RAPT_BF16);
    OPERATOR(ERROR_LAYOUT, "lse overlaps itself: a dimension of size 4 has stride 2, expected more than 2",
             use_all_options(), s.lse.stride[1] = 2);
    UNBATCHED(ERROR_SHAPE, "weights has shape [2, 3, 5], expected [3, 5]", s.options.weights = &s.weights);
    UNBATCHED(ERROR_SHAPE, "lse has shape [2, 4, 3], expected [4, 3]", s.options.lse = &s.lse);
    OPERATOR(ERROR_LAYOUT, "out overlaps itself: a dimension of size 2 has stride 0, expected more than 0",
             s.out.stride[0] = 0);
    OPERATOR(ERROR_LAYOUT, "out overlaps itself: a dimension of size 3 has stride 6, expected more than 6",
             s.out.stride[2] = DV - 1);
    OPERATOR(ERROR_LAYOUT, "out overlaps itself: a dimension of size 3 has stride 6, expected more than 6",
             s.out.stride[2] = 1 - DV);
    LAYER(ERROR_LAYOUT, "out overlaps itself: a dimension of size 8 has stride 0, expected more than 0",
          s.out.stride[2] = 0);
}

/* ---- options ---- */

static void test_options(void **state) {
    (void)state;
    for (int i = 0; i < (int)(sizeof((rapt_options *)0)->reserved / sizeof(uint64_t)); i++) {
        char text[60];
        snprintf(text, sizeof text, "options.reserved[%d] is not 0", i);
        OPERATOR(ERROR_ARGUMENT, text, s.options.reserved[i] = 1);
        LAYER(ERROR_ARGUMENT, text, s.options.reserved[i] = UINT64_MAX);
    }
    OPERATOR(ERROR_ARGUMENT, "options.mode is 3, which is no rapt_mode", s.options.mode = (rapt_mode)3);
    OPERATOR(ERROR_ARGUMENT, "options.mode is -1", s.options.mode = (rapt_mode)-1);
    OPERATOR(ERROR_ARGUMENT, "the operator has no training mode", s.options.mode = RAPT_MODE_EVAL);
    LAYER(ERROR_ARGUMENT, "options.mode is 7", s.options.mode = (rapt_mode)7);
    OPERATOR(ERROR_ARGUMENT, "options.scale is nan", s.options.set_scale = true, s.options.scale = NAN);
    OPERATOR(ERROR_ARGUMENT, "options.scale is inf", s.options.set_scale = true, s.options.scale = INFINITY);
    LAYER(ERROR_ARGUMENT, "options.scale is -inf", s.options.set_scale = true, s.options.scale = -INFINITY);
    OPERATOR(OK, "", s.options.set_scale = true, s.options.scale = 0);
    OPERATOR(ERROR_ARGUMENT, "options.scale is 2, but set_scale is false", s.options.scale = 2);
    OPERATOR(ERROR_ARGUMENT, "options.scale is nan, but set_scale is false", s.options.scale = NAN);
    OPERATOR(ERROR_ARGUMENT, "options.left is 3, but limit_left is false", s.options.left = 3);
    LAYER(ERROR_ARGUMENT, "options.right is -1, but limit_right is false", s.options.right = -1);
    OPERATOR(ERROR_ARGUMENT, "options.per_head_weights is true, but weights is NULL",
             s.options.per_head_weights = true);
    OPERATOR(ERROR_ARGUMENT, "options.dropout is -0.1, expected a number in [0, 1]", s.options.dropout = -0.1);
    OPERATOR(ERROR_ARGUMENT, "options.dropout is 1.5, expected a number in [0, 1]", s.options.dropout = 1.5);
    OPERATOR(ERROR_ARGUMENT, "options.dropout is nan", s.options.dropout = NAN);
    OPERATOR(OK, "", s.options.dropout = 0.5);
    OPERATOR(OK, "", s.options.dropout = 1, s.options.set_dropout_seed = true);
    OPERATOR(ERROR_ARGUMENT, "options.dropout_seed is 18446744073709551615, but set_dropout_seed is false",
             s.options.dropout = 0.5, s.options.dropout_seed = UINT64_MAX);
    OPERATOR(ERROR_ARGUMENT, "options.dropout_offset is 3, but set_dropout_seed is false",
             s.options.dropout_offset = 3);
    LAYER(ERROR_ARGUMENT, "options.dropout_seed is 1, but set_dropout_seed is false", s.options.dropout_seed = 1);
    OPERATOR(ERROR_ARGUMENT, "options.state is for layers", s.options.state = (rapt_mha_state *)(void *)s.memory);
    LAYER(ERROR_ARGUMENT, "options.dropout is 0.5, but a layer's dropout is in its config", s.options.dropout = 0.5);
    LAYER(ERROR_ARGUMENT, "options.dropout is nan", s.options.dropout = NAN);
    FUNCTIONAL(OK, "", s.ready.weights.dropout = 0.25);
    FUNCTIONAL(OK, "", s.ready.weights.dropout = 1, s.options.mode = RAPT_MODE_TRAIN);
    FUNCTIONAL(OK, "", s.ready.weights.dropout = 0.25, s.options.mode = RAPT_MODE_EVAL);

    OPERATOR(ERROR_ARGUMENT, "options give 2 of align_bottom_right, offset (4) and offsets",
             s.options.align_bottom_right = true, s.options.offset = 4);
    OPERATOR(ERROR_ARGUMENT, "options give 2 of", s.options.align_bottom_right = true, s.options.offsets = s.offsets);
    LAYER(ERROR_ARGUMENT, "options give 3 of align_bottom_right, offset (-1) and offsets",
          s.options.align_bottom_right = true, s.options.offset = -1, s.options.offsets = s.offsets);
    OPERATOR(ERROR_ARGUMENT, "key_start[1] is -1, expected 0 to S = 5", use_all_options(), s.key_start[1] = -1);
    OPERATOR(ERROR_ARGUMENT, "key_start[0] is 6, expected 0 to S = 5", use_all_options(), s.key_start[0] = 6);
    OPERATOR(ERROR_ARGUMENT, "key_lengths[1] is -2, expected 0 to 5", use_all_options(), s.key_lengths[1] = -2);
    OPERATOR(ERROR_ARGUMENT, "key_lengths[0] is 5, expected 0 to 4 (S 5 less key_start 1)", use_all_options(),
             s.key_start[0] = 1);
    OPERATOR(ERROR_ARGUMENT, "key_lengths[1] is 9223372036854775807", use_all_options(), s.key_lengths[1] = INT64_MAX);
    LAYER(ERROR_ARGUMENT, "key_start[0] is 6, expected 0 to S = 5", use_all_options(), s.key_start[0] = 6);
    OPERATOR(ERROR_LAYOUT, "options.key_start is at ", use_all_options(),
             s.options.key_start = (const int64_t *)(const void *)((const char *)s.key_start + 4));
    OPERATOR(ERROR_LAYOUT, "options.offsets is at ",
             s.options.offsets = (const int64_t *)(const void *)((const char *)s.key_start + 1));
    OPERATOR(OK, "", use_all_options(), s.key_start[0] = 5, s.key_lengths[0] = 0);
    OPERATOR(OK, "", s.options.causal = s.options.limit_left = true, s.options.left = INT64_MIN,
             s.options.offset = INT64_MAX);

    const char *causal =
        "but L is 3 and S is 5: say how they are aligned, bottom-right with options.align_bottom_right";
    LAYER(ERROR_SHAPE, causal, s.options.causal = true);
    LAYER(ERROR_SHAPE, "or top-left with options.limit_right and right 0 (up to i)", s.options.causal = true);
    FUNCTIONAL(ERROR_SHAPE, causal, s.ready.weights.causal = true);
    LAYER(OK, "", s.options.causal = s.options.align_bottom_right = true);
    LAYER(OK, "", s.options.causal = true, s.options.offset = 1);
    LAYER(OK, "", s.options.causal = true, s.options.offsets = s.offsets);
    LAYER(OK, "", s.options.causal = s.options.limit_right = true);
    LAYER(OK, "", s.options.causal = true, s.key.shape[1] = s.value.shape[1] = L);

    const char *alone = "options.static_k and static_v are for rapt_mha_functional alone";
    OPERATOR(ERROR_ARGUMENT, alone, s.options.static_k = &s.key);
    OPERATOR(ERROR_ARGUMENT, alone, s.options.static_v = &s.key);
    LAYER(ERROR_ARGUMENT, alone, s.options.static_k = &s.key);
    FUNCTIONAL(ERROR_NULL, "options.static_k is given without static_v", s.options.static_k = &s.static_k);
    FUNCTIONAL(ERROR_NULL, "options.static_v is given without static_k", s.options.static_v = &s.static_v);
    FUNCTIONAL(ERROR_ARGUMENT, "bias_k and bias_v cannot be added to static_k and static_v", STATIC_BOTH,
               s.ready.weights.bias_k = &s.bias_k, s.ready.weights.bias_v = &s.bias_v);
    FUNCTIONAL(ERROR_SHAPE, "static_k has shape [4, 5] with 2 dimensions, expected 3: [N*Hk, S, D]", STATIC_BOTH,
               s.static_k.ndim = 2);
    FUNCTIONAL(ERROR_SHAPE, "static_k has shape [3, 5, 3], expected [N*Hk, S, D] = [4, S, 3]", STATIC_BOTH,
               s.static_k.shape[0] = 3);
    FUNCTIONAL(ERROR_SHAPE, "static_v has shape [4, 5, 2], expected [N*Hk, S, D] = [4, S, 3]", STATIC_BOTH,
               s.static_v.shape[2] = 2);
    FUNCTIONAL(ERROR_SHAPE, "static_v has length 4, expected 5 as static_k", STATIC_BOTH, s.static_v.shape[1] = 4);
    FUNCTIONAL(ERROR_DTYPE, "static_v is f16, expected f32 as the weights", STATIC_BOTH, s.static_v.dtype = RAPT_F16);
    FUNCTIONAL(ERROR_DEVICE, "static_k is on device cuda", STATIC_BOTH, s.static_k.device = RAPT_DEVICE_CUDA);
    FUNCTIONAL(OK, "", STATIC_BOTH, s.k = s.v = NULL);
    FUNCTIONAL(OK, "", STATIC_BOTH);
}

static void test_layer_modes(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.batch_first = true;
    config.dropout = 0.5;
    rapt_mha *dropping;
    assert_ok(context, rapt_mha_create(context, &config, &dropping));
#define DROPPING(status, ...) LAYER(status, __VA_ARGS__, s.layer = dropping, s.k = s.v = &s.query)
    DROPPING(OK, "", s.index = 0);
    DROPPING(OK, "", s.options.mode = RAPT_MODE_EVAL);
    TOKEN(OK, "", s.layer = dropping);
    rapt_mha_eval(dropping);
    DROPPING(OK, "", s.index = 0);
    DROPPING(OK, "", s.options.mode = RAPT_MODE_TRAIN);
    DROPPING(OK, "", s.options.set_dropout_seed = true, s.options.dropout_seed = 5, s.options.dropout_offset = 6);
    TOKEN(OK, "", s.layer = dropping);
    rapt_mha_destroy(dropping);
}

/* ---- sharing memory ---- */

typedef struct shared_place {
    void *data;
    const char *name;
} shared_place;

static void check_sharing(const shared_place *places, int count, void (*set)(void), rapt_status (*call)(void),
                          void (*use)(void)) {
    rapt_tensor *const results[] = {&s.out, &s.weights, &s.lse};
    static const char *const names[] = {"out", "weights", "lse"};
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < count + r; i++) {
            set();
            use();
            memset(s.out.data, 0, 16); /* valid as lengths, too */
            void *shared = i < count ? places[i].data : results[i - count]->data;
            const char *other = i < count ? places[i].name : names[i - count];
            results[r]->data = shared;
            char text[80];
            snprintf(text, sizeof text, "shares memory with %s (at ", other);
            check_row(2000 + 100 * r + i, set, call, RAPT_ERROR_LAYOUT, text);
        }
    }
}

static void use_everything(void) {
    use_all_options();
    s.options.static_k = &s.static_k;
    s.options.static_v = &s.static_v;
}
static void use_bias_kv(void) {
    use_all_options();
    s.weights = PLACE(false, 3, N, L, S + 1);
    s.ready.weights.bias_k = &s.bias_k;
    s.ready.weights.bias_v = &s.bias_v;
}

static void test_sharing(void **state) {
    (void)state;
#define INPUTS                                                                                                         \
    {s.query.data, "query"}, {s.key.data, "key"}, {s.value.data, "value"}, {s.offsets, "offsets"},                     \
        {s.key_start, "key_start"}, {s.key_lengths, "key_lengths"}, {s.attn_mask.data, "attn_mask"},                   \
        {s.padding.data, "key_padding_mask"}
    set_operator();
    check_sharing((shared_place[]){INPUTS}, 8, set_operator, call_operator, use_all_options);
    set_layer();
    check_sharing((shared_place[]){INPUTS}, 8, set_layer, call_layer, use_all_options);
    set_functional();
    check_sharing((shared_place[]){{s.static_k.data, "static_k"}, {s.static_v.data, "static_v"}}, 2, set_functional,
                  call_functional, use_everything);
    check_sharing((shared_place[]){{s.q_weight.data, "the query projection's weight"},
                                   {s.k_weight.data, "the key projection's weight"},
                                   {s.v_weight.data, "the value projection's weight"},
                                   {s.out_weight.data, "the output projection's weight"},
                                   {s.q_bias.data, "the query projection's bias"},
                                   {s.k_bias.data, "the key projection's bias"},
                                   {s.v_bias.data, "the value projection's bias"},
                                   {s.out_bias.data, "the output projection's bias"},
                                   {s.bias_k.data, "bias_k"},
                                   {s.bias_v.data, "bias_v"}},
                  10, set_functional, call_functional, use_bias_kv);
    rapt_tensor inside;
    assert_ok(context, rapt_mha_find(context, layer, "out_proj.weight", &inside));
    LAYER(ERROR_LAYOUT, "shares memory with the output projection's weight", s.out.data = inside.data);

    /* The last byte of one on the first of another, and exactly beside it. */
    set_operator();
    float *end = (float *)s.key.data + rapt_tensor_count(&s.key);
    OPERATOR(ERROR_LAYOUT, "shares memory with key", s.value.data = s.query.data,
             s.value.stride[0] = s.value.stride[1] = 0, s.value.stride[2] = s.value.stride[3] = 0,
             s.out.data = end - 1);
    OPERATOR(OK, "", s.value.data = s.query.data,
             s.value.stride[0] = s.value.stride[1] = s.value.stride[2] = s.value.stride[3] = 0, s.out.data = end);
}

/* Query and out as columns of one table of 16, and a copy within one table. */
static void interleave(int64_t out_column) {
    float *table = (float *)(void *)(s.memory + s.used);
    memset(table, 0, N * H * L * 16 * sizeof *table);
    int64_t stride[4] = {H * L * 16, L * 16, 16, 1};
    s.query = rapt_tensor_strided(table, RAPT_F32, 4, s.query.shape, stride);
    s.out = rapt_tensor_strided(table + out_column, RAPT_F32, 4, s.out.shape, stride);
}

static void test_interleaved(void **state) {
    (void)state;
    OPERATOR(OK, "", interleave(D));
    OPERATOR(OK, "", interleave(16 - DV));
    OPERATOR(ERROR_LAYOUT, "shares memory with query", interleave(D - 1));
    OPERATOR(ERROR_LAYOUT, "shares memory with query", interleave(16 - DV + 1));
    OPERATOR(ERROR_LAYOUT, "shares memory with query", interleave(0));
}

/* ---- a context in use ---- */

static rapt_context *busy;
static int busy_refusals;

static void call_inside(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    (void)user;
    for (int64_t i = 0; i < count; i++) task(arg, i);
    rapt_context *kept = context;
    rapt_status (*const calls[])(void) = {call_operator,     call_layer, call_token,     call_functional, call_create,
                                          call_from_weights, call_find,  call_tensor_at, call_transpose,  call_slice,
                                          call_copy,         call_split, call_merge,     call_repeat};
    context = busy;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        created = layer;
        if (calls[i]() == RAPT_ERROR_STATE) busy_refusals++;
        if ((calls[i] == call_create || calls[i] == call_from_weights) && created != NULL) busy_refusals = INT_MIN / 2;
    }
    if (rapt_mha_commit(busy, layer) == RAPT_ERROR_STATE) busy_refusals++;
    created = NULL;
    context = kept;
}

static void test_context_in_use(void **state) {
    (void)state;
    rapt_context_config config = rapt_context_config_default();
    config.parallel_for = call_inside;
    config.parallel_for_workers = 2;
    assert_int_equal(rapt_context_create(&config, &busy), RAPT_OK);
    rapt_tensor x = make_tensor(RAPT_F32, 4, (int64_t[]){1, 2, 96, 16}), y = make_tensor(RAPT_F32, 4, x.shape);
    set_functional();
    memcpy(&before, &s, sizeof s);
    busy_refusals = 0;
    assert_ok(busy, rapt_attention_forward(busy, &x, &x, &x, NULL, &y)); /* not disturbed by them */
    assert_true(busy_refusals > 0 && busy_refusals % 15 == 0);
    assert_memory_equal(&before, &s, sizeof s);
    assert_string_equal(rapt_error_message(busy), ""); /* the text belongs to the call that is inside */
    assert_int_equal(sum_parameters(), parameters_sum);
    free_tensor(&x);
    free_tensor(&y);
    rapt_context_destroy(busy);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_null),           cmocka_unit_test(test_null_context),
        cmocka_unit_test(test_bad_tensors),    cmocka_unit_test(test_operator_shapes),
        cmocka_unit_test(test_layer_shapes),   cmocka_unit_test(test_masks_and_results),
        cmocka_unit_test(test_options),        cmocka_unit_test(test_layer_modes),
        cmocka_unit_test(test_sharing),        cmocka_unit_test(test_interleaved),
        cmocka_unit_test(test_context_in_use),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
