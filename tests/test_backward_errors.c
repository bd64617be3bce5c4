/* test_backward_errors.c - backward calls that must be refused: the message says what was wrong, nothing has changed, and
 * a good call with the same context works afterwards */
#include "support.h"

#include "internal.h"

enum { N = 2, H = 4, HK = 2, L = 3, S = 5, D = 6, DV = 7 };

/* Everything that a call gets, and the memory behind it. */
typedef struct scene {
    _Alignas(64) unsigned char memory[32768];
    size_t used;
    rapt_tensor query, key, value, out, lse, weights, d_out, d_weights, attn_mask, padding;
    rapt_tensor d_query, d_key, d_value, d_attn_mask, d_padding;
    int64_t *offsets, *key_start, *key_lengths;
    const rapt_tensor *q, *k, *v, *o, *d_o, *d_w;
    rapt_options options, *given_options;
    rapt_attention_gradients gradients, *given_gradients;
} scene;

static scene s, before;
static rapt_context *context;

static rapt_tensor place(int32_t ndim, const int64_t *shape) {
    rapt_tensor tensor = rapt_tensor_of(s.memory + s.used, RAPT_F32, ndim, shape);
    s.used = (s.used + (size_t)rapt_tensor_count(&tensor) * 4 + 63) / 64 * 64;
    assert_true(s.used <= sizeof s.memory);
    test_random random = {s.used};
    fill_random(&random, &tensor, 1);
    return tensor;
}
#define PLACE(ndim, ...) place(ndim, (int64_t[]){__VA_ARGS__})

static int64_t *place_array(void) {
    int64_t *array = (int64_t *)(void *)(s.memory + s.used);
    memset(array, 0, N * sizeof *array);
    s.used += 64;
    return array;
}

static void set(void) { /* inputs lie in the order in which the checks look at them */
    memset(&s, 0, sizeof s);
    s.query = PLACE(4, N, H, L, D);
    s.key = PLACE(4, N, HK, S, D);
    s.value = PLACE(4, N, HK, S, DV);
    s.out = PLACE(4, N, H, L, DV);
    s.d_out = PLACE(4, N, H, L, DV);
    s.d_weights = PLACE(3, N, L, S);
    s.lse = PLACE(3, N, H, L);
    s.offsets = place_array();
    s.key_start = place_array();
    s.key_lengths = place_array();
    s.attn_mask = PLACE(2, L, S);
    s.padding = PLACE(2, N, S);
    s.d_query = PLACE(4, N, H, L, D);
    s.d_key = PLACE(4, N, HK, S, D);
    s.d_value = PLACE(4, N, HK, S, DV);
    s.d_attn_mask = PLACE(2, L, S);
    s.d_padding = PLACE(2, N, S);
    s.weights = PLACE(3, N, L, S);
    s.q = &s.query;
    s.k = &s.key;
    s.v = &s.value;
    s.o = &s.out;
    s.d_o = &s.d_out;
    s.options = (rapt_options){.lse = &s.lse};
    s.given_options = &s.options;
    s.gradients = (rapt_attention_gradients){.query = &s.d_query, .key = &s.d_key, .value = &s.d_value};
    s.given_gradients = &s.gradients;
}

static void use_everything(void) {
    s.d_w = &s.d_weights;
    s.options.attn_mask = &s.attn_mask;
    s.options.key_padding_mask = &s.padding;
    s.options.offsets = s.offsets;
    s.options.key_start = s.key_start;
    s.options.key_lengths = s.key_lengths;
    for (int n = 0; n < N; n++) s.key_lengths[n] = S;
    s.gradients.attn_mask = &s.d_attn_mask;
    s.gradients.key_padding_mask = &s.d_padding;
}

static rapt_status call(void) {
    return rapt_attention_backward(context, s.q, s.k, s.v, s.given_options, s.o, s.d_o, s.d_w, s.given_gradients);
}

static void check_row(int line, rapt_status expected, const char *text) {
    memcpy(&before, &s, sizeof s);
    rapt_status status = call();
    if (status != expected || (expected != RAPT_OK && strstr(rapt_error_message(context), text) == NULL)) {
        fail_msg("line %d: got %s, \"%s\"; expected %s, \"%s\"", line, rapt_status_name(status),
                 status == RAPT_OK ? "" : rapt_error_message(context), rapt_status_name(expected), text);
    }
    if (expected != RAPT_OK && memcmp(&before, &s, sizeof s) != 0)
        fail_msg("line %d: the call changed something", line);
    set();
    if (call() != RAPT_OK) fail_msg("line %d: a good call afterwards: %s", line, rapt_error_message(context));
}

#define ROW(status, text, ...)                                                                                         \
    do {                                                                                                               \
        set();                                                                                                         \
        __VA_ARGS__;                                                                                                   \
        check_row(__LINE__, RAPT_##status, text);                                                                      \
    } while (0)

static void test_null(void **state) {
    (void)state;
    assert_int_equal(rapt_attention_backward(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), RAPT_ERROR_NULL);
    ROW(ERROR_NULL, "query is NULL", s.q = NULL);
    ROW(ERROR_NULL, "key is NULL", s.k = NULL);
    ROW(ERROR_NULL, "value is NULL", s.v = NULL);
    ROW(ERROR_NULL, "key is NULL", s.k = s.v = NULL);
    ROW(ERROR_NULL, "out is NULL", s.o = NULL);
    ROW(ERROR_NULL, "d_out is NULL", s.d_o = NULL);
    ROW(ERROR_NULL, "options is NULL, expected the forward's with lse", s.given_options = NULL);
    ROW(ERROR_NULL, "options.lse is NULL: the backward reads the forward's", s.options.lse = NULL);
    ROW(ERROR_NULL, "gradients is NULL", s.given_gradients = NULL);
    ROW(ERROR_NULL, "d_out with shape [2, 4, 3, 7] has NULL data", s.d_out.data = NULL);
    ROW(ERROR_NULL, "gradients.key with shape [2, 2, 5, 6] has NULL data", s.d_key.data = NULL);
    ROW(OK, "", memset(&s.gradients, 0, sizeof s.gradients));
    ROW(OK, "", use_everything());
    ROW(OK, "", s.gradients.query = s.gradients.value = NULL);
}

static void test_shapes(void **state) {
    (void)state;
    ROW(ERROR_SHAPE, "key has shape [2, 2, 5, 5] with D 5, expected 6 as query", s.key.shape[3] = 5);
    ROW(ERROR_SHAPE, "out has shape [2, 4, 2, 7] with L 2, expected 3 as query", s.out.shape[2] = 2);
    ROW(ERROR_SHAPE, "key has 3 heads, which does not divide the 4 heads of query",
        s.key.shape[1] = s.value.shape[1] = 3);
    ROW(ERROR_SHAPE, "d_out has shape [2, 4, 3, 6], expected [2, 4, 3, 7]", s.d_out.shape[3] = 6);
    ROW(ERROR_SHAPE, "d_out has shape [2, 4, 3], expected [2, 4, 3, 7]", s.d_out.ndim = 3);
    ROW(ERROR_SHAPE, "lse has shape [2, 4, 2], expected [2, 4, 3]", s.lse.shape[2] = 2);
    ROW(ERROR_SHAPE, "d_weights has shape [2, 3, 4], expected [2, 3, 5]", use_everything(), s.d_weights.shape[2] = 4);
    ROW(ERROR_SHAPE, "d_weights has shape [2, 3, 5], expected [2, 4, 3, 5]", use_everything(),
        s.options.per_head_weights = true);
    ROW(ERROR_SHAPE, "gradients.query has shape [1, 4, 3, 6], expected [2, 4, 3, 6]", s.d_query.shape[0] = 1);
    ROW(ERROR_SHAPE, "gradients.key has shape [2, 1, 5, 6], expected [2, 2, 5, 6]", s.d_key.shape[1] = 1);
    ROW(ERROR_SHAPE, "gradients.value has shape [2, 2, 5, 6], expected [2, 2, 5, 7]", s.d_value.shape[3] = 6);
    ROW(ERROR_SHAPE, "gradients.attn_mask has shape [3, 4], expected [3, 5] as attn_mask", use_everything(),
        s.d_attn_mask.shape[1] = 4);
    ROW(ERROR_SHAPE, "gradients.key_padding_mask has shape [5], expected [2, 5] as key_padding_mask", use_everything(),
        s.d_padding.ndim = 1, s.d_padding.shape[0] = 5, s.d_padding.stride[0] = 1);
    ROW(ERROR_SHAPE, "attn_mask has shape [2, 5], expected [L,S] = [3, 5]", use_everything(), s.attn_mask.shape[0] = 2);
}

static void test_dtypes(void **state) {
    (void)state;
    ROW(ERROR_DTYPE, "value is bf16, expected f32 as query", s.value.dtype = RAPT_BF16);
    ROW(ERROR_DTYPE, "d_out is f16, expected f32", s.d_out.dtype = RAPT_F16);
    ROW(ERROR_DTYPE, "lse is f16, expected f32", s.lse.dtype = RAPT_F16);
    ROW(ERROR_DTYPE, "d_weights is bool, expected f32", use_everything(), s.d_weights.dtype = RAPT_BOOL);
    ROW(ERROR_DTYPE, "gradients.query is bf16, expected f32", s.d_query.dtype = RAPT_BF16);
    ROW(ERROR_DTYPE, "gradients.attn_mask is f16, expected f32 or f64", use_everything(),
        s.d_attn_mask.dtype = RAPT_F16);
    ROW(ERROR_DTYPE, "gradients.attn_mask is bf16, expected f32, f64 or f16", use_everything(),
        s.attn_mask.dtype = RAPT_F16, s.d_attn_mask.dtype = RAPT_BF16);
    ROW(ERROR_DTYPE, "gradients.key_padding_mask is bool, expected f32 or f64", use_everything(),
        s.d_padding.dtype = RAPT_BOOL);
    ROW(ERROR_DTYPE, "gradients.attn_mask is given, but attn_mask is bool: only an additive mask has a gradient",
        use_everything(), s.attn_mask.dtype = RAPT_BOOL);
    ROW(ERROR_DTYPE, "gradients.key_padding_mask is given, but key_padding_mask is bool", use_everything(),
        s.padding.dtype = RAPT_BOOL);
    ROW(ERROR_ARGUMENT, "gradients.attn_mask is given, but options.attn_mask is NULL",
        s.gradients.attn_mask = &s.d_attn_mask);
    ROW(ERROR_ARGUMENT, "gradients.key_padding_mask is given, but options.key_padding_mask is NULL",
        s.gradients.key_padding_mask = &s.d_padding);
    ROW(OK, "", use_everything(), s.attn_mask.dtype = s.d_attn_mask.dtype = RAPT_F16);
    ROW(OK, "", use_everything(), s.padding.dtype = RAPT_BF16);
    ROW(ERROR_DEVICE, "d_out is on device cuda", s.d_out.device = RAPT_DEVICE_CUDA);
    ROW(ERROR_LAYOUT, "gradients.key overlaps itself", s.d_key.stride[2] = 0);
    ROW(ERROR_LAYOUT, "gradients.value has data at", s.d_value.data = (char *)s.d_value.data + 1);
    ROW(OK, "", s.d_out.stride[0] = s.d_out.stride[1] = s.d_out.stride[2] = s.d_out.stride[3] = 0);
}

static void test_options(void **state) {
    (void)state;
    for (int i = 0; i < (int)(sizeof s.gradients.reserved / sizeof *s.gradients.reserved); i++) {
        char text[60];
        snprintf(text, sizeof text, "gradients.reserved[%d] is not 0", i);
        ROW(ERROR_ARGUMENT, text, s.gradients.reserved[i] = 1);
    }
    ROW(ERROR_ARGUMENT, "options.reserved[8] is not 0", s.options.reserved[8] = 1);
    ROW(ERROR_ARGUMENT, "options.mode is set, but the operator has no training mode", s.options.mode = RAPT_MODE_TRAIN);
    ROW(ERROR_ARGUMENT, "options.static_k and static_v are for rapt_mha_functional alone", s.options.static_k = &s.key);
    ROW(ERROR_ARGUMENT, "options.state is for layers", s.options.state = (rapt_mha_state *)(void *)s.memory);
    ROW(ERROR_ARGUMENT, "options.rotary is for layers", s.options.rotary = (const rapt_rotary *)(void *)s.memory);
    ROW(ERROR_ARGUMENT, "options.cache is given: a cache has no gradients",
        s.options.cache = (rapt_cache *)(void *)s.memory);
    ROW(ERROR_ARGUMENT, "options.append_lengths is given without a cache", s.options.append_lengths = s.key_lengths);
    ROW(ERROR_ARGUMENT, "options.scale is 2, but set_scale is false", s.options.scale = 2);
    ROW(ERROR_ARGUMENT, "key_start[1] is 6, expected 0 to S = 5", use_everything(), s.key_start[1] = 6);
    ROW(ERROR_ARGUMENT, "options.per_head_weights is true, but weights and d_weights are NULL",
        s.options.per_head_weights = true);
    ROW(OK, "", s.options.per_head_weights = true, s.options.weights = &s.weights);
    ROW(OK, "", s.options.weights = &s.query); /* which is not read, so the forward's may be anything */

    ROW(ERROR_ARGUMENT, "options.dropout is 1.5, expected a number in [0, 1]", s.options.dropout = 1.5);
    ROW(ERROR_ARGUMENT, "options.dropout is nan", s.options.dropout = NAN);
    ROW(ERROR_ARGUMENT, "options.dropout is 0.5, but set_dropout_seed is false: the backward draws with the seed",
        s.options.dropout = 0.5);
    ROW(ERROR_ARGUMENT, "options.dropout_offset is 7, but set_dropout_seed is false", s.options.dropout_offset = 7);
    ROW(OK, "", s.options.dropout = 0.5, s.options.set_dropout_seed = true, s.options.dropout_seed = 3);
    ROW(OK, "", s.options.set_dropout_seed = true);
}

/* No gradient may share memory with anything that is read, or with another. */
static void test_sharing(void **state) {
    (void)state;
    rapt_tensor *const results[] = {&s.d_query, &s.d_key, &s.d_value, &s.d_attn_mask, &s.d_padding};
    const char *const result_names[] = {"gradients.query", "gradients.key", "gradients.value", "gradients.attn_mask",
                                        "gradients.key_padding_mask"};
    set();
    const struct {
        void *data;
        const char *name;
    } inputs[] = {
        {s.query.data, "query"},
        {s.key.data, "key"},
        {s.value.data, "value"},
        {s.out.data, "out"},
        {s.d_out.data, "d_out"},
        {s.d_weights.data, "d_weights"},
        {s.lse.data, "lse"},
        {s.offsets, "offsets"},
        {s.key_start, "key_start"},
        {s.key_lengths, "key_lengths"},
        {s.attn_mask.data, "attn_mask"},
        {s.padding.data, "key_padding_mask"},
    };
    enum { INPUTS = sizeof inputs / sizeof *inputs };
    for (int r = 0; r < 5; r++) {
        for (int i = 0; i < INPUTS + r; i++) {
            set();
            use_everything();
            results[r]->data = i < INPUTS ? inputs[i].data : results[i - INPUTS]->data;
            char text[100];
            snprintf(text, sizeof text, "shares memory with %s (at ",
                     i < INPUTS ? inputs[i].name : result_names[i - INPUTS]);
            memcpy(&before, &s, sizeof s);
            assert_int_equal(call(), RAPT_ERROR_LAYOUT);
            if (strstr(rapt_error_message(context), text) == NULL ||
                strncmp(rapt_error_message(context), result_names[r], strlen(result_names[r])) != 0) {
                fail_msg("%s on %s: \"%s\"", result_names[r], text, rapt_error_message(context));
            }
            assert_memory_equal(&before, &s, sizeof s);
        }
    }
}

/* ---- memory ---- */

typedef struct counting_allocator {
    int64_t allocations;
    bool refuses;
} counting_allocator;

static void *count_allocate(void *user, size_t size, size_t alignment) {
    counting_allocator *counting = user;
    counting->allocations++;
    return counting->refuses ? NULL : aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
static void count_release(void *user, void *pointer, size_t size) {
    (void)user;
    (void)size;
    free(pointer);
}

static void test_memory(void **state) {
    (void)state;
    counting_allocator counting = {0};
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1;
    config.backend = RAPT_BACKEND_REFERENCE;
    config.allocator = (rapt_allocator){&counting, count_allocate, count_release};
    rapt_context *kept = context;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_OK);
    set();
    use_everything();
    memcpy(&before, &s, sizeof s);
    counting.refuses = true;
    assert_int_equal(call(), RAPT_ERROR_MEMORY);
    assert_memory_equal(&before, &s, sizeof s);
    assert_non_null(strstr(rapt_error_message(context), "out of memory"));
    counting.refuses = false;
    assert_ok(context, call());
    int64_t allocations = counting.allocations;
    assert_ok(context, call());
    s.gradients.attn_mask = NULL;
    assert_ok(context, call());
    assert_int_equal(counting.allocations, allocations);
    rapt_context_destroy(context);
    context = kept;
}

/* ---- the pieces ---- */

#define REPEAT(status, text, repeated, times, heads)                                                                   \
    do {                                                                                                               \
        rapt_status got = rapt_repeat_kv_heads_backward(context, repeated, times, false, heads);                       \
        if (got != RAPT_##status || (got != RAPT_OK && strstr(rapt_error_message(context), text) == NULL))             \
            fail_msg("line %d: %s, \"%s\"", __LINE__, rapt_status_name(got), rapt_error_message(context));             \
    } while (0)

static void test_repeat(void **state) {
    (void)state;
    set();
    rapt_tensor many = s.query, few = s.d_key, wrong; /* [2,4,3,6], [2,2,3,6] */
    few = rapt_tensor_of(s.d_key.data, RAPT_F32, 4, (int64_t[]){N, HK, L, D});
    memcpy(&before, &s, sizeof s);
    REPEAT(ERROR_NULL, "d_repeated is NULL", NULL, 2, &few);
    REPEAT(ERROR_NULL, "d_heads is NULL", &many, 2, NULL);
    REPEAT(ERROR_ARGUMENT, "times is 0, expected at least 1", &many, 0, &few);
    REPEAT(ERROR_SHAPE, "with 4 heads, expected a multiple of times 3", &many, 3, &few);
    REPEAT(ERROR_SHAPE, "d_heads has shape [2, 2, 3, 6], expected [2, 1, 3, 6]", &many, 4, &few);
    REPEAT(ERROR_SHAPE, "d_repeated has shape [3, 5], expected [N,Hk*times,S,D] or [Hk*times,S,D]", &s.attn_mask, 1,
           &few);
    REPEAT(ERROR_LAYOUT, "shares memory with d_repeated", &many, 1, &many);
    wrong = few;
    wrong.dtype = RAPT_F16;
    REPEAT(ERROR_DTYPE, "d_heads is f16, expected f32 as d_repeated", &many, 2, &wrong);
    wrong.dtype = RAPT_BOOL;
    REPEAT(ERROR_DTYPE, "d_repeated is bool, expected f32, f64, bf16 or f16", &wrong, 1, &few);
    wrong = few;
    wrong.stride[1] = 0;
    REPEAT(ERROR_LAYOUT, "d_heads overlaps itself", &many, 2, &wrong);
    assert_memory_equal(&before, &s, sizeof s);
    REPEAT(OK, "", &many, 2, &few);
    assert_int_equal(rapt_repeat_kv_heads_backward(NULL, &many, 2, false, &few), RAPT_ERROR_NULL);
}

static void test_rotate(void **state) {
    (void)state;
    set();
    rapt_rotary rotary = rapt_rotary_default(10000);
    memcpy(&before, &s, sizeof s);
    assert_int_equal(rapt_rotate_backward(NULL, &rotary, NULL, &s.query), RAPT_ERROR_NULL);
    assert_int_equal(rapt_rotate_backward(context, NULL, NULL, &s.query), RAPT_ERROR_NULL);
    assert_int_equal(rapt_rotate_backward(context, &rotary, NULL, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_rotate_backward(context, &rotary, NULL, &s.lse), RAPT_ERROR_SHAPE);
    assert_string_equal(rapt_error_message(context),
                        "tensor has shape [2, 4, 3] with 3 dimensions, expected 4: [N,L,H,D]");
    rotary.dims = 5;
    assert_int_equal(rapt_rotate_backward(context, &rotary, NULL, &s.query), RAPT_ERROR_ARGUMENT);
    assert_memory_equal(&before, &s, sizeof s);
}

static int set_up(void **state) {
    (void)state;
    context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    return 0;
}
static int tear_down(void **state) {
    (void)state;
    rapt_context_destroy(context);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_null),    cmocka_unit_test(test_shapes),  cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_options), cmocka_unit_test(test_sharing), cmocka_unit_test(test_memory),
        cmocka_unit_test(test_repeat),  cmocka_unit_test(test_rotate),
    };
    return cmocka_run_group_tests_name("backward errors", tests, set_up, tear_down);
}
