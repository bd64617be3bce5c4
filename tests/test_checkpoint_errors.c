/* test_checkpoint_errors.c - checkpoints that must be refused: layers that make no sense, options that do not fit them,
 * an index that breaks its rules, and memory that runs out. A refusal names its reason and changes nothing. */
#include "checkpoint_support.h"

#include <unistd.h>

/* ---- layers and options ---- */

enum { E = 6, H = 3 };

static rapt_load_options options;

/* Loads the file "model.safetensors"; on failure there is no layer. */
static rapt_status load(void) {
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    rapt_mha *layer = (rapt_mha *)(void *)folder; /* something that is not NULL */
    rapt_status status = rapt_mha_load(context, checkpoint, &options, &layer);
    rapt_checkpoint_close(checkpoint);
    if (status != RAPT_OK) assert_null(layer);
    if (status == RAPT_OK) rapt_mha_destroy(layer);
    return status;
}

static void check(int line, rapt_status expected, const char *text) {
    rapt_status status = load();
    if (status != expected || (status != RAPT_OK && strstr(rapt_error_message(context), text) == NULL))
        fail_msg("line %d: got %s, \"%s\"; expected %s, \"%s\"", line, rapt_status_name(status),
                 status == RAPT_OK ? "" : rapt_error_message(context), rapt_status_name(expected), text);
}

/* One layer by llama's names, GQA with 3 heads of 2 and one key/value head, spoilt by a row's code. */
enum { Q, K, V, O, Q_BIAS, O_BIAS, SPARE, SPECS };
static spec specs[SPECS + 1];
static const char *metadata;

static void set_llama(void) {
    const spec good[SPECS + 1] = {{"a.q_proj.weight", RAPT_F32, {E, E}},
                                  {"a.k_proj.weight", RAPT_F32, {2, E}},
                                  {"a.v_proj.weight", RAPT_F32, {2, E}},
                                  {"a.o_proj.weight", RAPT_F32, {E, E}},
                                  {"a.q_proj.bias", RAPT_F32, {E}},
                                  {"a.o_proj.bias", RAPT_F32, {E}},
                                  {"spare", RAPT_F32, {1}},
                                  {0}};
    memcpy(specs, good, sizeof specs);
    metadata = NULL;
    options = rapt_load_options_default();
    options.num_heads = H;
}

static void set_gpt2(void) {
    set_llama();
    specs[Q] = (spec){"a.c_attn.weight", RAPT_F32, {E, 10}}; /* in, q|k|v */
    specs[K] = (spec){"a.c_attn.bias", RAPT_F32, {10}};
    specs[V] = (spec){"a.c_proj.weight", RAPT_F32, {E, E}};
    specs[O] = (spec){"b.c_proj.weight", RAPT_F32, {E, 9}};
    specs[Q_BIAS].name = "a.bias"; /* a mask */
    specs[O_BIAS].name = "a.c_proj.bias";
}

static void set_pytorch(void) {
    set_llama();
    specs[Q] = (spec){"a.in_proj_weight", RAPT_F32, {10, E}};
    specs[K] = (spec){"a.in_proj_bias", RAPT_F32, {10}};
    specs[V] = (spec){"a.out_proj.weight", RAPT_F32, {E, E}};
    specs[O] = (spec){"a.bias_k", RAPT_F32, {1, 1, 2}};
    specs[SPARE] = (spec){"a.bias_v", RAPT_F32, {1, 1, 2}};
    specs[Q_BIAS].name = "q_proj.bias";
    specs[O_BIAS].name = "a.out_proj.bias";
}

#define ROW(set, status, text, ...)                                                                                    \
    do {                                                                                                               \
        set();                                                                                                         \
        __VA_ARGS__;                                                                                                   \
        write_specs(in_folder("model.safetensors"), specs, "rapt.mha:a.", metadata);                                   \
        check(__LINE__, RAPT_##status, text);                                                                          \
    } while (0)
#define LLAMA(...) ROW(set_llama, __VA_ARGS__)
#define GPT2(...) ROW(set_gpt2, __VA_ARGS__)
#define PYTORCH(...) ROW(set_pytorch, __VA_ARGS__)
#define NAMED(place, text) specs[place].name = text
#define SHAPED(place, ...) memcpy(specs[place].shape, (int64_t[4]){__VA_ARGS__}, sizeof specs[place].shape)

static void test_shapes(void **state) {
    (void)state;
    LLAMA(OK, "", (void)0);
    GPT2(OK, "", (void)0);
    PYTORCH(OK, "", (void)0);
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.weight' has shape [4, 6], expected [6, 6]", SHAPED(Q, 4, E));
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.weight' has shape [6, 5], expected [6, 6]", SHAPED(Q, E, 5));
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.weight' has shape [6], expected two dimensions of at least 1", SHAPED(Q, E));
    LLAMA(ERROR_SHAPE, "tensor 'a.k_proj.weight' has shape [2, 3, 2], expected two dim", SHAPED(K, 2, 3, 2));
    LLAMA(OK, "", SHAPED(K, 2, 5)); /* kdim */
    LLAMA(OK, "", SHAPED(V, 2, 7)); /* vdim */
    LLAMA(ERROR_SHAPE, "tensor 'a.v_proj.weight' has shape [4, 6], expected [2, 6]", SHAPED(V, 4, E));
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.weight' has shape [6, 6], expected [8, 6]", SHAPED(O, E, 8));
    LLAMA(ERROR_SHAPE, "tensor 'a.o_proj.weight' has shape [], expected two dim", SHAPED(O, 0));
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.bias' has shape [5], expected [6]", SHAPED(Q_BIAS, 5));
    LLAMA(OK, "", SHAPED(Q_BIAS, 1, 6));
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.bias' has shape [6, 1], expected [6]", SHAPED(Q_BIAS, 6, 1));
    LLAMA(ERROR_SHAPE, "tensor 'a.o_proj.bias' has shape [], expected [6]", SHAPED(O_BIAS, 0));
    GPT2(ERROR_SHAPE, "tensor 'a.c_attn.weight' maps 6 features to 6, expected 6 (by 'a.c_proj.weight') to 6 for the",
         SHAPED(Q, E, E));
    GPT2(ERROR_SHAPE, "maps 6 features to 9, expected 6", SHAPED(Q, E, 9));
    GPT2(ERROR_SHAPE, "maps 5 features to 10, expected 6", SHAPED(Q, 5, 10));
    GPT2(ERROR_SHAPE, "maps 6 features to 5, expected 6", SHAPED(Q, E, 5));
    GPT2(ERROR_SHAPE, "maps 10 features to 6", SHAPED(Q, 10, E)); /* as if it were stored [out, in] */
    GPT2(ERROR_SHAPE, "tensor 'a.c_attn.bias' has shape [9], expected [10]", SHAPED(K, 9));
    PYTORCH(ERROR_SHAPE, "tensor 'a.bias_k' has shape [1, 1, 6], expected [2]", SHAPED(O, 1, 1, 6));
    PYTORCH(ERROR_ABSENT, "the layer 'a.' has bias_k without bias_v", NAMED(SPARE, "spare"));
    PYTORCH(ERROR_ABSENT, "the layer 'a.' has bias_v without bias_k", NAMED(O, "spare"));
}

static void test_dtypes(void **state) {
    (void)state;
    LLAMA(ERROR_DTYPE, "tensor 'a.q_proj.weight' is f32 and 'a.o_proj.weight' is bf16: set_dtype and dtype choose one",
          specs[O].dtype = RAPT_BF16);
    LLAMA(ERROR_DTYPE, "'a.q_proj.bias' is f64", specs[Q_BIAS].dtype = RAPT_F64);
    LLAMA(OK, "", specs[Q_BIAS].dtype = RAPT_F64, options.set_dtype = true, options.dtype = RAPT_F16);
    LLAMA(ERROR_DTYPE, "tensor 'a.k_proj.weight' is bool, expected f32, f64, bf16 or f16", specs[K].dtype = RAPT_BOOL);
    LLAMA(ERROR_DTYPE, "dtype is bool (5), expected f32", options.set_dtype = true, options.dtype = RAPT_BOOL);
    LLAMA(ERROR_DTYPE, "dtype is unknown (0), expected f32", options.set_dtype = true);
}

static void test_heads(void **state) {
    (void)state;
    LLAMA(ERROR_ARGUMENT, "the checkpoint does not say how many heads the layer 'a.' has: set num_heads",
          options.num_heads = RAPT_DEFAULT);
    LLAMA(OK, "", options.num_heads = RAPT_DEFAULT, options.head_dim = 2);
    LLAMA(ERROR_SHAPE, "head_dim 4 does not divide the 6 outputs of q in layer 'a.'", options.num_heads = RAPT_DEFAULT,
          options.head_dim = 4);
    LLAMA(ERROR_SHAPE, "head_dim 7 does not divide", options.num_heads = RAPT_DEFAULT, options.head_dim = 7);
    LLAMA(OK, "", options.num_kv_heads = 1, options.head_dim = 2);
    LLAMA(ERROR_ARGUMENT, "num_kv_heads is 3, but the tensors' shapes give 1", options.num_kv_heads = 3);
    LLAMA(ERROR_ARGUMENT, "head_dim is 3, but the tensors' shapes give 2", options.head_dim = 3);
    LLAMA(ERROR_SHAPE, "num_heads 4 does not divide the 6 outputs of q in layer 'a.'", options.num_heads = 4);
    LLAMA(ERROR_SHAPE, "num_heads 2 gives head_dim 3, which does not divide the 2 outputs of k", options.num_heads = 2);
    LLAMA(ERROR_ARGUMENT, "num_kv_heads 2 does not divide num_heads 3", SHAPED(K, 4, E), SHAPED(V, 4, E));
    LLAMA(ERROR_ARGUMENT, "num_kv_heads 4 is above num_heads 3", SHAPED(K, 8, E), SHAPED(V, 8, E));
    LLAMA(ERROR_ARGUMENT, "num_heads is 0, expected at least 1, or RAPT_DEFAULT", options.num_heads = 0);
    LLAMA(ERROR_ARGUMENT, "num_kv_heads is -2, expected", options.num_kv_heads = -2);
    LLAMA(ERROR_ARGUMENT, "head_dim is -9223372036854775808, expected", options.head_dim = INT64_MIN);
    LLAMA(ERROR_SHAPE, "num_heads 9223372036854775807 does not divide", options.num_heads = INT64_MAX);
    LLAMA(ERROR_ARGUMENT, "dropout is 2, expected a number in [0, 1]", options.dropout = 2);
    LLAMA(ERROR_ARGUMENT, "scale is nan, expected a finite number", options.set_scale = true, options.scale = NAN);
    LLAMA(ERROR_ARGUMENT, "scale is 2, but set_scale is false", options.scale = 2);
}

static void test_choice(void **state) {
    (void)state;
    LLAMA(OK, "", options.prefix = "a.", options.scheme = RAPT_SCHEME_LLAMA);
    LLAMA(ERROR_ABSENT, "no attention layer 'b.' by the names of any scheme; the first of its 1 is 'a.' (llama)",
          options.prefix = "b.");
    LLAMA(ERROR_ABSENT, "no attention layer '' by the names of gpt2; the first of its 1 is 'a.' (llama)",
          options.scheme = RAPT_SCHEME_GPT2);
    LLAMA(ERROR_ABSENT, "the layer 'a.' is not whole: separate names want a tensor 'a.out_proj.weight'",
          options.prefix = "a.", options.scheme = RAPT_SCHEME_SEPARATE);
    LLAMA(ERROR_ABSENT, "the layer 'a.' is not whole: separate names want a tensor 'a.k_proj.weight'",
          options.prefix = "a.", NAMED(K, "a.x"), NAMED(O, "a.out_proj.weight"));
    LLAMA(ERROR_ABSENT, "the checkpoint has no attention layer by the names of any scheme", NAMED(V, "a.x"));
    LLAMA(ERROR_ABSENT, "the checkpoint has no attention layer by the names of wq", NAMED(V, "a.x"),
          options.scheme = RAPT_SCHEME_WQ);
    LLAMA(ERROR_ARGUMENT,
          "the layer 'a.' is there by the names of separate (q_proj.weight) and of llama (q_proj.weight): choose one",
          specs[SPARE] = (spec){"a.out_proj.weight", RAPT_F32, {E, E}});
    LLAMA(OK, "", specs[SPARE] = (spec){"a.out_proj.weight", RAPT_F32, {E, E}}, options.scheme = RAPT_SCHEME_SEPARATE,
          options.ignore_extra = true);
    LLAMA(ERROR_ARGUMENT, "prefix is 'a', expected one that ends in a dot, or \"\"", options.prefix = "a");
    LLAMA(ERROR_ARGUMENT, "prefix is not valid UTF-8", options.prefix = "\xff.");
    LLAMA(ERROR_ARGUMENT, "scheme is 10, which is no rapt_scheme", options.scheme = (rapt_scheme)10);
    LLAMA(ERROR_ARGUMENT, "options.struct_size is 0, expected", options.struct_size = 0);
    LLAMA(ERROR_ARGUMENT, "(start from rapt_load_options_default())", options.struct_size = 8);
    spec two[] = {{"x.9.in_proj_weight", 0, {18, E}},
                  {"x.9.out_proj.weight", 0, {E, E}},
                  {"x.10.in_proj_weight", 0, {18, E}},
                  {"x.10.out_proj.weight", 0, {E, E}},
                  {0}};
    write_specs(in_folder("model.safetensors"), two, NULL, NULL);
    options = rapt_load_options_default();
    options.num_heads = H;
    check(__LINE__, RAPT_ERROR_ARGUMENT, "2 attention layers, from 'x.9.' to 'x.10.': choose one by its prefix");
    options.prefix = "x.10.";
    check(__LINE__, RAPT_OK, "");
}

static void test_metadata(void **state) {
    (void)state;
    LLAMA(OK, "", metadata = "num_heads=3", options.num_heads = RAPT_DEFAULT);
    LLAMA(OK, "", metadata = "");
    LLAMA(OK, "", metadata = "batch_first=1 causal=1 add_zero_attn=0 scale=-5p-1074 dropout=1p0 num_heads=3",
          options.num_heads = RAPT_DEFAULT);
    const char *const bad[] = {"num_heads=",   "num_heads=0",   "num_heads=-3",
                               "num_heads=3x", "heads=3",       "num_heads",
                               "causal=2",     "causal=",       "causal=11",
                               "scale=0.5",    "scale=1p",      "scale=1p9999",
                               "dropout=p1",   "dropout=1",     "num_heads=3  causal=1",
                               "rotary=1",     "num_heads = 3", "scale=1p-99999",
                               "\x1b[31m",     " num_heads=3",  "num_heads=99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        LLAMA(ERROR_FORMAT, "metadata 'rapt.mha:a.': Rapt 0.1.0 cannot read '", metadata = bad[i]);
        LLAMA(OK, "", metadata = bad[i], options.ignore_metadata = true);
    }
    LLAMA(ERROR_SHAPE, "num_heads 5 does not divide", metadata = "num_heads=5", options.num_heads = RAPT_DEFAULT);
    LLAMA(ERROR_ARGUMENT, "dropout is 2, expected", metadata = "num_heads=3 dropout=1p1");
    LLAMA(ERROR_ARGUMENT, "scale is inf, expected", metadata = "num_heads=3 scale=1p2000");
    /* The same trouble when somebody asks about the layer. */
    LLAMA(ERROR_FORMAT, "cannot read 'x'", metadata = "x");
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    rapt_layer_info info = {.embed_dim = 77};
    assert_int_equal(rapt_checkpoint_layer(context, checkpoint, 0, &info), RAPT_ERROR_FORMAT);
    assert_int_equal(info.embed_dim, 77);
    assert_int_equal(rapt_checkpoint_layer(context, checkpoint, 1, &info), RAPT_ERROR_ARGUMENT);
    assert_message("index is 1, the checkpoint has 1 attention layers");
    assert_int_equal(rapt_checkpoint_layer(context, checkpoint, -1, &info), RAPT_ERROR_ARGUMENT);
    rapt_checkpoint_close(checkpoint);
}

/* What else may stand below a layer's prefix, and what not. */
static void test_extra_tensors(void **state) {
    (void)state;
    const char *const refused[] = {"a.q_norm.weight",
                                   "a.k_norm.weight",
                                   "a.q_layernorm.bias",
                                   "a.k_layernorm.weight",
                                   "a.q_layernorm.norms.0.weight",
                                   "a.attn_sub_norm.weight",
                                   "a.norm.weight",
                                   "a.sinks",
                                   "a.q_proj.lora_A.weight",
                                   "a.q_proj.weight_scale",
                                   "a.relative_position_bias_table",
                                   "a.self.distance_embedding.weight",
                                   "a.bias_k",
                                   "a.o_proj",
                                   "a.mlp.gate_proj.weight",
                                   "a."};
    const char *const harmless[] = {"a.rotary_emb.inv_freq",
                                    "a.rotary_emb.cos_cached",
                                    "a.self.rotary_embeddings.inv_freq",
                                    "a.inner_attention.rope.freqs",
                                    "a.bias",
                                    "a.masked_bias",
                                    "a.LayerNorm.weight",
                                    "a.output.LayerNorm.bias",
                                    "a.input",
                                    "a.query",
                                    "a.expected_output",
                                    "q_norm.weight",
                                    "a",
                                    "ab.q_norm.weight",
                                    "b.a.q_norm.weight"};
    rapt_layer_info info;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char text[160];
        snprintf(text, sizeof text, "tensor '%s' has no place in a layer of llama names", refused[i]);
        LLAMA(ERROR_UNSUPPORTED, text, NAMED(SPARE, refused[i]));
        LLAMA(ERROR_UNSUPPORTED, "(ignore_extra leaves it out)", NAMED(SPARE, refused[i]), options.prefix = "a.");
        rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
        info = layer_info(checkpoint, 0);
        assert_string_equal(info.extra, refused[i]);
        assert_int_equal(info.num_extra, 1);
        rapt_checkpoint_close(checkpoint);
        LLAMA(OK, "", NAMED(SPARE, refused[i]), options.ignore_extra = true);
    }
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        LLAMA(OK, "", NAMED(SPARE, harmless[i]));
        rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
        info = layer_info(checkpoint, 0);
        assert_null(info.extra);
        assert_int_equal(info.num_extra, 0);
        rapt_checkpoint_close(checkpoint);
    }
    /* At the top of a file everything is below the prefix. Other mistakes come first. */
    LLAMA(ERROR_UNSUPPORTED, "tensor 'k_norm.weight' has no place", NAMED(Q, "q_proj.weight"),
          NAMED(K, "k_proj.weight"), NAMED(V, "v_proj.weight"), NAMED(O, "o_proj.weight"),
          NAMED(Q_BIAS, "q_norm.weight"), NAMED(O_BIAS, "k_norm.weight"), NAMED(SPARE, "input"));
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    assert_int_equal(layer_info(checkpoint, 0).num_extra, 2);
    rapt_checkpoint_close(checkpoint);
    LLAMA(ERROR_SHAPE, "tensor 'a.q_proj.weight' has shape [4, 6]", NAMED(SPARE, "a.sinks"), SHAPED(Q, 4, E));
}

static void test_null_arguments(void **state) {
    (void)state;
    set_llama();
    write_specs(in_folder("model.safetensors"), specs, NULL, NULL);
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors")), *none = checkpoint;
    rapt_mha *layer;
    rapt_tensor view;
    rapt_layer_info info;
    assert_int_equal(rapt_checkpoint_open(NULL, "x", &none), RAPT_ERROR_NULL);
    assert_null(none);
    assert_int_equal(rapt_checkpoint_open(context, NULL, &none), RAPT_ERROR_NULL);
    assert_message("path is NULL");
    assert_int_equal(rapt_checkpoint_open(context, "x", NULL), RAPT_ERROR_NULL);
    assert_message("checkpoint is NULL");
    assert_int_equal(rapt_checkpoint_open_memory(context, NULL, 1, &none), RAPT_ERROR_NULL);
    assert_message("data is NULL");
    assert_int_equal(rapt_checkpoint_find(context, NULL, "x", &view), RAPT_ERROR_NULL);
    assert_int_equal(rapt_checkpoint_find(context, checkpoint, NULL, &view), RAPT_ERROR_NULL);
    assert_int_equal(rapt_checkpoint_find(context, checkpoint, "spare", NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_checkpoint_find(context, checkpoint, "x", &view), RAPT_ERROR_ABSENT);
    assert_message("the checkpoint has no tensor 'x'");
    assert_ok(context, rapt_checkpoint_find(context, checkpoint, "spare", &view));
    assert_int_equal(rapt_checkpoint_layer(context, NULL, 0, &info), RAPT_ERROR_NULL);
    assert_int_equal(rapt_checkpoint_layer(context, checkpoint, 0, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_load(context, NULL, NULL, &layer), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_load(context, checkpoint, NULL, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_load(NULL, checkpoint, NULL, &layer), RAPT_ERROR_NULL);
    assert_int_equal(rapt_mha_load_into(context, checkpoint, NULL, RAPT_SCHEME_AUTO, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_checkpoint_num_tensors(NULL), 0);
    assert_int_equal(rapt_checkpoint_num_layers(NULL), 0);
    assert_null(rapt_checkpoint_tensor_name(NULL, 0));
    assert_null(rapt_checkpoint_tensor_name(checkpoint, -1));
    assert_null(rapt_checkpoint_tensor_name(checkpoint, SPECS));
    rapt_checkpoint_close(checkpoint);
    rapt_checkpoint_close(NULL);
    assert_int_equal(rapt_checkpoint_open(context, in_folder("none.safetensors"), &none), RAPT_ERROR_FILE);
    assert_message("none.safetensors");
    assert_int_equal(rapt_checkpoint_open(context, in_folder("none.json"), &none), RAPT_ERROR_FILE);
    assert_null(none);
}

/* ---- into a layer ---- */

static void refuse_into(rapt_mha *layer, rapt_status expected, const char *text) {
    uint64_t before = sum_layer(layer);
    write_specs(in_folder("model.safetensors"), specs, NULL, NULL);
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    assert_int_equal(rapt_mha_load_into(context, checkpoint, options.prefix, options.scheme, layer), expected);
    assert_message(text);
    assert_int_equal(sum_layer(layer), before); /* as it was */
    rapt_checkpoint_close(checkpoint);
}

#define INTO(status, text, ...)                                                                                        \
    do {                                                                                                               \
        set_llama();                                                                                                   \
        __VA_ARGS__;                                                                                                   \
        refuse_into(layer, RAPT_##status, text);                                                                       \
    } while (0)

static void test_load_into(void **state) {
    (void)state;
    rapt_mha *layer, *plain;
    set_llama();
    write_specs(in_folder("model.safetensors"), specs, NULL, NULL);
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
    assert_ok(context, rapt_mha_load_into(context, checkpoint, "a.", RAPT_SCHEME_LLAMA, layer));
    assert_int_equal(rapt_mha_version(layer), 2);
    INTO(ERROR_SHAPE, "k_proj.weight is [4, 6] in the checkpoint and [2, 6] in the layer", SHAPED(K, 4, E),
         SHAPED(V, 4, E));
    INTO(ERROR_SHAPE, "v_proj.weight is [2, 5] in the checkpoint", SHAPED(V, 2, 5));
    INTO(ERROR_SHAPE, "q_proj.weight is [8, 6] in the checkpoint", SHAPED(Q, 8, E), SHAPED(O, E, 8), SHAPED(Q_BIAS, 8));
    INTO(ERROR_SHAPE, "the layer has q_proj.bias and the checkpoint has not", NAMED(Q_BIAS, "x"));
    INTO(ERROR_SHAPE, "the checkpoint has v_proj.bias and the layer has not",
         specs[SPARE] = (spec){"a.v_proj.bias", RAPT_F32, {2}});
    INTO(ERROR_SHAPE, "tensor 'a.o_proj.bias' has shape [5], expected [6]", SHAPED(O_BIAS, 5));
    INTO(ERROR_DTYPE, "is bool", specs[V].dtype = RAPT_BOOL);
    INTO(ERROR_ABSENT, "no attention layer 'b.'", options.prefix = "b.");
    INTO(ERROR_ARGUMENT, "ends in a dot", options.prefix = "a");
    INTO(ERROR_ARGUMENT, "no rapt_scheme", options.scheme = (rapt_scheme)77);
    INTO(ERROR_UNSUPPORTED, "tensor 'a.q_norm.weight' has no place", NAMED(SPARE, "a.q_norm.weight"));
    set_pytorch(); /* the layer has no bias_k */
    refuse_into(layer, RAPT_ERROR_SHAPE, "the checkpoint has k_proj.bias and the layer has not");
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.num_kv_heads = 1;
    plain = create(&config);
    refuse_into(plain, RAPT_ERROR_SHAPE, "the checkpoint has bias_k and the layer has not");
    rapt_mha_destroy(plain);

    /* Borrowed weights may be anywhere, in this very map for one. */
    rapt_tensor q, k, v, o;
    assert_ok(context, rapt_checkpoint_find(context, checkpoint, "a.q_proj.weight", &q));
    assert_ok(context, rapt_checkpoint_find(context, checkpoint, "a.k_proj.weight", &k));
    assert_ok(context, rapt_checkpoint_find(context, checkpoint, "a.v_proj.weight", &v));
    assert_ok(context, rapt_checkpoint_find(context, checkpoint, "a.o_proj.weight", &o));
    rapt_mha_weights w = rapt_mha_weights_default(H);
    w.q_proj_weight = &q, w.k_proj_weight = &k, w.v_proj_weight = &v, w.out_proj_weight = &o;
    assert_ok(context, rapt_mha_create_from_weights(context, &w, RAPT_BORROW, &plain));
    set_llama();
    refuse_into(plain, RAPT_ERROR_STATE, "the layer borrows its weights");
    rapt_mha_destroy(plain);
    rapt_checkpoint_close(checkpoint);
    rapt_mha_destroy(layer);
}

/* Every byte of a saved layer's header broken in turn: the layer that was to be loaded into stays as it was, or gets a
 * layer that makes sense. */
static void test_broken_files_change_nothing(void **state) {
    (void)state;
    rapt_mha_config config = kind_of_layer(1, RAPT_F32);
    rapt_mha *layer = create_random(&config);
    rapt_save_options save = rapt_save_options_default();
    save.scheme = RAPT_SCHEME_LLAMA;
    rapt_checkpoint_close(save_and_open(layer, &save));
    size_t size;
    unsigned char *bytes = read_bytes(in_folder("layer.safetensors"), &size);
    uint64_t before = sum_layer(layer), header;
    memcpy(&header, bytes, 8);
    int step = test_is_quick() ? 5 : 1, refused = 0;
    for (size_t at = 0; at < 8 + header; at += (size_t)step) {
        unsigned char kept = bytes[at];
        bytes[at] = (unsigned char)(kept ^ (1 + at % 7));
        rapt_checkpoint *checkpoint;
        rapt_status status = rapt_checkpoint_open_memory(context, bytes, size, &checkpoint);
        if (status == RAPT_OK) status = rapt_mha_load_into(context, checkpoint, NULL, RAPT_SCHEME_AUTO, layer);
        rapt_checkpoint_close(checkpoint);
        if (status != RAPT_OK) {
            refused++;
            assert_int_equal(sum_layer(layer), before);
        } else {
            before = sum_layer(layer); /* the byte was in the metadata or in a name that does not matter */
        }
        bytes[at] = kept;
    }
    assert_true(refused > (int)header / (2 * step));
    rapt_mha_destroy(layer);
    free(bytes);
}

/* ---- the index ---- */

#define MAP(map) "{\"weight_map\":{" map "}}"
#define ONE "\"wq\":\"one.safetensors\",\"wk\":\"one.safetensors\""
#define TWO "\"wv\":\"two.safetensors\",\"wo\":\"two.safetensors\""

static rapt_status open_index(const char *json, rapt_checkpoint **checkpoint) {
    const char *path = in_folder("model.safetensors.index.json");
    write_bytes(path, json, strlen(json));
    return rapt_checkpoint_open(context, path, checkpoint);
}

static void write_shards(void) {
    write_specs(in_folder("one.safetensors"), (spec[]){{"wq", 0, {E, E}}, {"wk", 0, {E, E}}, {"x", 0, {1}}, {0}}, NULL,
                NULL);
    write_specs(in_folder("two.safetensors"), (spec[]){{"wv", 0, {E, E}}, {"wo", 0, {E, E}}, {0}}, NULL, NULL);
}

static void test_index(void **state) {
    (void)state;
    write_shards();
    const char *const good[] = {
        MAP(ONE "," TWO),
        (" { \"metadata\" : { \"total_size\" : 1, \"x\":[-1.5e+3, true ,false, null, \"s\", {}, [], 0] } , \n"
         "\"weight_map\":{" TWO ",\t" ONE "}\r\n}\n\n"),
        ("{\"metadata\":null,\"weight_map\":{\"wo\":\"two.safetensors\",\"\\u0077q\":\"\\u006fne.safetensors\","
         "\"wk\":\"one.safetensors\",\"wv\":\"two.safetensors\"}}"),
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        rapt_checkpoint *checkpoint = NULL;
        assert_ok(context, open_index(good[i], &checkpoint));
        assert_int_equal(rapt_checkpoint_num_tensors(checkpoint), 4); /* x is in a file and not in the index */
        assert_int_equal(rapt_checkpoint_num_layers(checkpoint), 1);
        options = rapt_load_options_default();
        options.num_heads = H;
        rapt_mha *layer;
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
        rapt_mha_destroy(layer);
        rapt_checkpoint_close(checkpoint);
    }
    rapt_checkpoint *empty;
    assert_ok(context, open_index(MAP(""), &empty));
    assert_int_equal(rapt_checkpoint_num_tensors(empty), 0);
    rapt_checkpoint_close(empty);
}

static void test_broken_index(void **state) {
    (void)state;
    write_shards();
    write_bytes(in_folder("bad.safetensors"), "12345678{}", 10);
    const struct {
        const char *json, *text;
        rapt_status status;
    } rows[] = {
        {"", "index: byte 0: the JSON ends too early", RAPT_ERROR_FORMAT},
        {"[]", "index: byte 0: expected '{'", RAPT_ERROR_FORMAT},
        {"{}", "index: byte 2: there is no weight_map", RAPT_ERROR_FORMAT},
        {"{\"metadata\":{}}", "index: byte 15: there is no weight_map", RAPT_ERROR_FORMAT},
        {"{\"weight_map\":[]}", "index: byte 14: expected '{'", RAPT_ERROR_FORMAT},
        {"{\"weight_map\":{},\"weight_map\":{}}", "index: byte 17: the key 'weight_map' is there twice",
         RAPT_ERROR_FORMAT},
        {"{\"metadata\":1,\"metadata\":1}", "index: byte 14: the key 'metadata' is there twice", RAPT_ERROR_FORMAT},
        {"{\"weight_map\":{},\"x\":1}", "index: byte 17: the key 'x' should not be there", RAPT_ERROR_FORMAT},
        {MAP(ONE) "x", "something follows the index", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":1"), "index: byte 20: expected '\"'", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"one.safetensors\",\"wq\":\"one.safetensors\""), "index: byte 38: tensor 'wq' is there twice",
         RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"one.safetensors\",\"wq\":\"two.safetensors\""), "tensor 'wq' is there twice", RAPT_ERROR_FORMAT},
        {MAP("\"wz\":\"one.safetensors\""), "index: byte 15: tensor 'wz' is not in its file 'one.safetensors'",
         RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"two.safetensors\""), "tensor 'wq' is not in its file 'two.safetensors'", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"../one.safetensors\""),
         "index: byte 20: '../one.safetensors' is no name of a file beside the index", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"/etc/passwd\""), "'/etc/passwd' is no name of a file", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"a\\\\b\""), "'a\\b' is no name of a file", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"..\""), "'..' is no name of a file", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\".\""), "'.' is no name of a file", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"\""), "'' is no name of a file", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"a\\u0000b\""), "a NUL character in a string", RAPT_ERROR_FORMAT},
        {MAP("\"wq\":\"none.safetensors\""), "none.safetensors", RAPT_ERROR_FILE},
        {MAP("\"wq\":\"bad.safetensors\""), "file 'bad.safetensors': safetensors: byte 0: a header of",
         RAPT_ERROR_FORMAT},
        {"{\"metadata\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "values are nested more than 32 deep",
         RAPT_ERROR_FORMAT},
        {"{\"metadata\":tru,", "index: byte 12: expected a value", RAPT_ERROR_FORMAT},
        {"{\"metadata\":-,", "expected a value", RAPT_ERROR_FORMAT},
        {"{\"metadata\":1.,", "expected a value", RAPT_ERROR_FORMAT},
        {"{\"metadata\":1e,", "expected a value", RAPT_ERROR_FORMAT},
        {"{\"metadata\":01}", "expected '}'", RAPT_ERROR_FORMAT},
        {"{\"metadata\":[1 2]", "expected ']'", RAPT_ERROR_FORMAT},
        {"{\"metadata\":{\"a\":}", "expected a value", RAPT_ERROR_FORMAT},
        {"{\"metadata\":", "expected a value", RAPT_ERROR_FORMAT},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rapt_checkpoint *checkpoint = (rapt_checkpoint *)(void *)folder;
        assert_int_equal(open_index(rows[i].json, &checkpoint), rows[i].status);
        assert_null(checkpoint);
        assert_message(rows[i].text);
    }
}

/* ---- memory that runs out ---- */

typedef rapt_status (*memory_step)(rapt_context *with);

static rapt_status open_both(rapt_context *with) {
    rapt_checkpoint *checkpoint = NULL;
    rapt_status status = rapt_checkpoint_open(with, in_folder("model.safetensors.index.json"), &checkpoint);
    assert_int_equal(status == RAPT_OK, checkpoint != NULL);
    rapt_checkpoint_close(checkpoint);
    return status;
}

static rapt_status load_one(rapt_context *with) {
    rapt_checkpoint *checkpoint = NULL;
    rapt_mha *layer = NULL;
    rapt_status status = rapt_checkpoint_open(with, in_folder("layer.safetensors"), &checkpoint);
    if (status == RAPT_OK) status = rapt_mha_load(with, checkpoint, NULL, &layer);
    assert_int_equal(status == RAPT_OK, layer != NULL);
    rapt_checkpoint_close(checkpoint);
    rapt_mha_destroy(layer);
    return status;
}

static rapt_status ask_for_none(rapt_context *with) { /* the message takes memory */
    rapt_checkpoint *checkpoint = NULL;
    rapt_mha *layer;
    rapt_load_options none = rapt_load_options_default();
    none.prefix = "none.";
    rapt_status status = rapt_checkpoint_open(with, in_folder("layer.safetensors"), &checkpoint);
    if (status == RAPT_OK) status = rapt_mha_load(with, checkpoint, &none, &layer);
    rapt_checkpoint_close(checkpoint);
    return status == RAPT_ERROR_ABSENT ? RAPT_OK : status;
}

static rapt_mha *to_save;

static rapt_status save_one(rapt_context *with) {
    return rapt_mha_save(with, to_save, in_folder("new.safetensors"), NULL);
}

static rapt_status save_any(rapt_context *with) {
    rapt_tensor view = parameter(to_save, "out_proj.weight");
    const char *const pairs[1][2] = {{"key", "value"}};
    return rapt_safetensors_save(with, in_folder("new.safetensors"), 1, (const char *const[]){"x"}, &view, 1, pairs);
}

static void test_every_allocation_refused(void **state) {
    (void)state;
    write_shards();
    rapt_checkpoint *checkpoint;
    assert_ok(context, open_index(MAP(ONE "," TWO), &checkpoint));
    rapt_checkpoint_close(checkpoint);
    rapt_mha_config config = kind_of_layer(3, RAPT_F32);
    to_save = create_random(&config);
    rapt_checkpoint_close(save_and_open(to_save, NULL));
    unlink(in_folder("new.safetensors"));
    int files = files_in_folder();
    const memory_step steps[] = {open_both, load_one, ask_for_none, save_one, save_any};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        for (int64_t refused = 1;; refused++) {
            counting_memory memory = {0};
            rapt_context *with = make_counting_context(&memory);
            int64_t live = memory.live;
            memory.refuse_at = memory.calls + refused;
            rapt_status status = steps[i](with);
            bool was_refused = memory.calls >= memory.refuse_at;
            memory.refuse_at = 0;
            if (was_refused) {
                assert_int_equal(status, RAPT_ERROR_MEMORY);
                assert_non_null(strstr(rapt_error_message(with), "out of memory"));
                assert_int_equal(files_in_folder(), files);
                assert_ok(with, steps[i](with)); /* the next time there is some */
            } else {
                assert_ok(with, status);
            }
            assert_true(memory.live <= live + 1); /* scratch memory may have come */
            rapt_context_destroy(with);
            assert_int_equal(memory.live, 0);
            assert_int_equal(memory.bytes, 0);
            unlink(in_folder("new.safetensors"));
            if (was_refused) continue;
            assert_true(refused > 1);
            break;
        }
    }
    rapt_mha_destroy(to_save);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_extra_tensors),
        cmocka_unit_test(test_null_arguments),
        cmocka_unit_test(test_load_into),
        cmocka_unit_test(test_broken_files_change_nothing),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_broken_index),
        cmocka_unit_test(test_every_allocation_refused),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
