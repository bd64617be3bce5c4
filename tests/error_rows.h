/* error_rows.h - calls that must be refused, one a row
 *
 * A row is one call: everything is set up for a good one (the scene), then the row's code spoils it. After a refusal
 * every byte of the scene, inputs and results alike, must be as it was, the layers' versions and parameters too, and a
 * good call with the same context must work. Rows with OK are neighbours of a refusal that must be accepted:
 *
 *     OPERATOR(ERROR_NULL, "query is NULL", s.q = NULL);
 *     OPERATOR(OK, "", s.options.set_scale = true, s.options.scale = 0);
 */
#ifndef RAPT_TESTS_ERROR_ROWS_H
#define RAPT_TESTS_ERROR_ROWS_H

#include "support.h"

#include <inttypes.h>
#include <limits.h>

enum { N = 2, H = 4, HK = 2, L = 3, S = 5, D = 6, DV = 7 }; /* the operator's scene */
enum { E = 8, HEAD = 3, KDIM = 6, VDIM = 5 };               /* the layer's: N, H, HK, L, S as above */
enum { QUERY_ROWS = H * HEAD, KV_ROWS = HK * HEAD, FUSED_ROWS = QUERY_ROWS + 2 * KV_ROWS };

/* ---- the scene ---- */

typedef struct scene {
    _Alignas(64) unsigned char memory[32768]; /* of all tensors and arrays below */
    size_t used;
    rapt_tensor query, key, value, out, weights, lse, attn_mask, padding, static_k, static_v;
    rapt_tensor q_weight, k_weight, v_weight, out_weight, q_bias, k_bias, v_bias, out_bias, bias_k, bias_v;
    rapt_tensor in_weight, in_bias;
    int64_t *offsets, *key_start, *key_lengths;
    const rapt_mha *layer;
    const rapt_tensor *q, *k, *v, *o; /* what the call gets */
    rapt_options options;
    struct {
        rapt_mha_config config;
        unsigned char tail[16]; /* what a newer program may have behind it */
    } settings;
    struct {
        rapt_mha_weights weights;
        unsigned char tail[16];
    } ready;
    const rapt_mha_config *config;
    const rapt_mha_weights *w;
    rapt_ownership ownership;
    const char *name;
    int32_t index, dim_a, dim_b;
    int64_t number, count;
    rapt_tensor view;
    const rapt_tensor *tensor, *buffer;
    rapt_tensor *result;
} scene;

static scene s, before;
static rapt_context *context;
static rapt_mha *layer, *token_layer, *created;
static uint64_t parameters_sum;

static inline rapt_tensor place(rapt_dtype dtype, int32_t ndim, const int64_t *shape, bool is_input) {
    rapt_tensor tensor = rapt_tensor_of(s.memory + s.used, dtype, ndim, shape);
    s.used = (s.used + (size_t)rapt_tensor_count(&tensor) * rapt_dtype_size(dtype) + 63) / 64 * 64;
    assert_true(s.used <= sizeof s.memory);
    test_random random = {s.used};
    if (is_input) fill_random(&random, &tensor, 1);
    return tensor;
}
#define PLACE(is_input, ndim, ...) place(RAPT_F32, ndim, (int64_t[]){__VA_ARGS__}, is_input)

static inline int64_t *place_array(void) {
    int64_t *array = (int64_t *)(void *)(s.memory + s.used);
    memset(array, 0, N * sizeof *array);
    s.used += 64;
    return array;
}

/* Arrays and tensors lie in the order in which the checks look at them. */
static inline void place_forward(const int64_t *q, const int64_t *k, const int64_t *v, const int64_t *out,
                                 int32_t ndim) {
    memset(&s, 0, sizeof s);
    memset(s.memory, 0x5a, sizeof s.memory);
    s.query = place(RAPT_F32, ndim, q, true);
    s.key = place(RAPT_F32, ndim, k, true);
    s.value = place(RAPT_F32, ndim, v, true);
    s.offsets = place_array();
    s.key_start = place_array();
    s.key_lengths = place_array();
    s.attn_mask = PLACE(true, 2, L, S);
    s.padding = PLACE(true, 2, N, S);
    s.out = place(RAPT_F32, ndim, out, false);
    s.weights = PLACE(false, 3, N, L, S);
    s.lse = PLACE(false, 3, N, H, L);
    s.q = &s.query;
    s.k = &s.key;
    s.v = &s.value;
    s.o = &s.out;
}

static inline void set_operator(void) {
    place_forward((int64_t[]){N, H, L, D}, (int64_t[]){N, HK, S, D}, (int64_t[]){N, HK, S, DV},
                  (int64_t[]){N, H, L, DV}, 4);
    s.tensor = &s.query; /* for the calls on views */
    s.result = &s.view;
    s.number = s.count = 1;
    memset(&s.view, 0x5a, sizeof s.view);
}

static inline void set_layer(void) {
    place_forward((int64_t[]){N, L, E}, (int64_t[]){N, S, KDIM}, (int64_t[]){N, S, VDIM}, (int64_t[]){N, L, E}, 3);
    s.layer = layer;
    s.name = "q_proj_weight";
    s.result = &s.view;
}

static inline void set_unbatched(void) {
    set_layer();
    for (rapt_tensor *tensor = &s.query; tensor <= &s.out; tensor++) { /* the first sequence of each */
        tensor->ndim = 2;
        memmove(tensor->shape, tensor->shape + 1, 2 * sizeof *tensor->shape);
        memmove(tensor->stride, tensor->stride + 1, 2 * sizeof *tensor->stride);
    }
}

static inline void set_token(void) {
    place_forward((int64_t[]){N, E}, (int64_t[]){1, 1}, (int64_t[]){1, 1}, (int64_t[]){N, E}, 2);
    s.layer = token_layer;
}

static inline void set_functional(void) {
    set_layer();
    s.static_k = PLACE(true, 3, N * HK, S, HEAD);
    s.static_v = PLACE(true, 3, N * HK, S, HEAD);
    s.q_weight = PLACE(true, 2, QUERY_ROWS, E);
    s.k_weight = PLACE(true, 2, KV_ROWS, KDIM);
    s.v_weight = PLACE(true, 2, KV_ROWS, VDIM);
    s.out_weight = PLACE(true, 2, E, QUERY_ROWS);
    s.q_bias = PLACE(true, 1, QUERY_ROWS);
    s.k_bias = PLACE(true, 1, KV_ROWS);
    s.v_bias = PLACE(true, 1, KV_ROWS);
    s.out_bias = PLACE(true, 1, E);
    s.bias_k = PLACE(true, 3, 1, 1, KV_ROWS);
    s.bias_v = PLACE(true, 3, 1, 1, KV_ROWS);
    rapt_mha_weights *w = &s.ready.weights;
    *w = rapt_mha_weights_default(H);
    w->batch_first = true;
    w->q_proj_weight = &s.q_weight;
    w->k_proj_weight = &s.k_weight;
    w->v_proj_weight = &s.v_weight;
    w->out_proj_weight = &s.out_weight;
    w->q_proj_bias = &s.q_bias;
    w->k_proj_bias = &s.k_bias;
    w->v_proj_bias = &s.v_bias;
    w->out_proj_bias = &s.out_bias;
    s.w = w;
}

static inline void set_fused(void) {
    set_functional();
    s.in_weight = PLACE(true, 2, FUSED_ROWS, E);
    s.in_bias = PLACE(true, 1, FUSED_ROWS);
    rapt_mha_weights *w = &s.ready.weights;
    w->q_proj_weight = w->k_proj_weight = w->v_proj_weight = NULL;
    w->q_proj_bias = w->k_proj_bias = w->v_proj_bias = NULL;
    w->in_proj_weight = &s.in_weight;
    w->in_proj_bias = &s.in_bias;
    w->num_kv_heads = HK;
    s.k = s.v = &s.query;
}

static inline void set_config(void) {
    set_layer();
    s.settings.config = rapt_mha_config_default(512, 8);
    s.config = &s.settings.config;
}

/* ---- rows ---- */

static inline rapt_status call_operator(void) {
    return rapt_attention_forward(context, s.q, s.k, s.v, &s.options, s.o);
}
static inline rapt_status call_layer(void) {
    return rapt_mha_forward(context, s.layer, s.q, s.k, s.v, &s.options, s.o);
}
static inline rapt_status call_token(void) { return rapt_mha_forward_token(context, s.layer, s.q, s.o); }
static inline rapt_status call_functional(void) {
    return rapt_mha_functional(context, s.w, s.q, s.k, s.v, &s.options, s.o);
}
static inline rapt_status call_create(void) { return rapt_mha_create(context, s.config, &created); }
static inline rapt_status call_from_weights(void) {
    return rapt_mha_create_from_weights(context, s.w, s.ownership, &created);
}
static inline rapt_status call_find(void) { return rapt_mha_find(context, s.layer, s.name, s.result); }
static inline rapt_status call_tensor_at(void) {
    return rapt_mha_tensor_at(context, s.layer, s.index, &s.name, s.result);
}
static inline rapt_status call_transpose(void) {
    return rapt_tensor_transpose(context, s.tensor, s.dim_a, s.dim_b, s.result);
}
static inline rapt_status call_slice(void) {
    return rapt_tensor_slice(context, s.tensor, s.dim_a, s.number, s.count, s.result);
}
static inline rapt_status call_copy(void) { return rapt_tensor_copy(context, s.tensor, s.buffer); }
static inline rapt_status call_split(void) { return rapt_split_heads(context, s.tensor, s.number, s.result); }
static inline rapt_status call_merge(void) { return rapt_merge_heads(context, s.tensor, s.buffer, s.result); }
static inline rapt_status call_repeat(void) {
    return rapt_repeat_kv_heads(context, s.tensor, s.number, s.buffer, s.result);
}

static inline void set_copy(void) {
    set_operator();
    s.view = PLACE(false, 4, N, H, L, D);
    s.buffer = &s.view;
}
static inline void set_split(void) {
    set_layer();
    s.tensor = &s.query;
    s.number = 2;
}
static inline void set_merge(void) { /* [N,H,L,D] contiguous, which is no view of [N,L,H*D] */
    set_operator();
    s.static_k = PLACE(false, 3, N, L, H * D);
    s.buffer = &s.static_k;
}
static inline void set_repeat(void) {
    set_operator();
    s.tensor = &s.key;
    s.number = 2;
    s.static_k = PLACE(false, 4, N, 2 * HK, S, D);
    s.buffer = &s.static_k;
}

static inline uint64_t sum_parameters(void) {
    uint64_t sum = rapt_mha_version(layer) * 31 + rapt_mha_version(token_layer);
    const rapt_mha *layers[] = {layer, token_layer};
    for (int i = 0; i < 2; i++) {
        for (int32_t t = 0; t < rapt_mha_num_tensors(layers[i]); t++) {
            rapt_tensor view;
            assert_ok(context, rapt_mha_tensor_at(context, layers[i], t, NULL, &view));
            sum = checksum(sum, &view);
        }
    }
    return sum;
}

static inline void drop_created(void) {
    rapt_mha_destroy(created);
    created = NULL;
}

static inline void check_row(int line, void (*set)(void), rapt_status (*call)(void), rapt_status expected,
                             const char *text) {
    memcpy(&before, &s, sizeof s);
    bool creates = call == call_create || call == call_from_weights;
    created = creates ? (rapt_mha *)(void *)s.memory : NULL; /* something that is not NULL */
    rapt_status status = call();
    if (status != expected || (expected != RAPT_OK && strstr(rapt_error_message(context), text) == NULL)) {
        fail_msg("line %d: got %s, \"%s\"; expected %s, \"%s\"", line, rapt_status_name(status),
                 status == RAPT_OK ? "" : rapt_error_message(context), rapt_status_name(expected), text);
    }
    if (expected != RAPT_OK && created != NULL) fail_msg("line %d: *layer is not NULL", line);
    if (expected != RAPT_OK && memcmp(&before, &s, sizeof s) != 0)
        fail_msg("line %d: the call changed something", line);
    drop_created();
    if (sum_parameters() != parameters_sum) fail_msg("line %d: a layer has changed", line);
    set();
    status = call();
    if (status != RAPT_OK) fail_msg("line %d: a good call afterwards: %s", line, rapt_error_message(context));
    drop_created();
}

#define ROW_OF(set, call, expected, text, ...)                                                                         \
    do {                                                                                                               \
        set();                                                                                                         \
        __VA_ARGS__;                                                                                                   \
        check_row(__LINE__, set, call, expected, text);                                                                \
    } while (0)
#define ROW(set, call, status, ...) ROW_OF(set, call, RAPT_##status, __VA_ARGS__)
#define OPERATOR(status, ...) ROW_OF(set_operator, call_operator, RAPT_##status, __VA_ARGS__)
#define LAYER(status, ...) ROW_OF(set_layer, call_layer, RAPT_##status, __VA_ARGS__)
#define UNBATCHED(status, ...) ROW_OF(set_unbatched, call_layer, RAPT_##status, __VA_ARGS__)
#define TOKEN(status, ...) ROW_OF(set_token, call_token, RAPT_##status, __VA_ARGS__)
#define FUNCTIONAL(status, ...) ROW_OF(set_functional, call_functional, RAPT_##status, __VA_ARGS__)
#define FUSED(status, ...) ROW_OF(set_fused, call_functional, RAPT_##status, __VA_ARGS__)
#define CONFIG(status, ...) ROW_OF(set_config, call_create, RAPT_##status, __VA_ARGS__)
#define READY(status, ...) ROW_OF(set_functional, call_from_weights, RAPT_##status, __VA_ARGS__)

static inline int set_up(void **state) {
    (void)state;
    context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.num_kv_heads = HK;
    config.batch_first = true;
    assert_ok(context, rapt_mha_create(context, &config, &token_layer));
    config.head_dim = HEAD;
    config.kdim = KDIM;
    config.vdim = VDIM;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    parameters_sum = sum_parameters();
    return 0;
}

static inline int tear_down(void **state) {
    (void)state;
    rapt_mha_destroy(layer);
    rapt_mha_destroy(token_layer);
    rapt_context_destroy(context);
    return 0;
}

#define STATIC_BOTH s.options.static_k = &s.static_k, s.options.static_v = &s.static_v

#endif
