/* test_checkpoint_names.c - the place of every parameter: files with the names and orientations of other software,
 * written by hand, in one piece and in shards. test_checkpoint.c has round trips, in which a mistake made both ways
 * would not show. */
#include "checkpoint_support.h"

enum { Q, K, V, OUT, PARTS, MOST = 12 };
static const char *const own_names[PARTS] = {"q_proj", "k_proj", "v_proj", "out_proj"};

typedef struct layout {
    rapt_scheme scheme;
    const char *prefix;
    bool in_out;                                          /* stored as x W, not as x W^T */
    const char *weight[PARTS], *bias[PARTS], *bias_kv[2]; /* NULL for K and V: they follow Q in its tensor */
    int64_t embed_dim, kdim, vdim, heads, kv_heads, head_dim;
    bool not_saved; /* it is only read */
} layout;

#define DOTTED_PARTS(q, k, v, out)                                                                                     \
    {q ".weight", k ".weight", v ".weight", out ".weight"}, { q ".bias", k ".bias", v ".bias", out ".bias" }

/* clang-format off */
static const layout layouts[] = {
    /* torch.nn.MultiheadAttention; with kdim or vdim only the weights are apart */
    {RAPT_SCHEME_PYTORCH, "encoder.layers.0.self_attn.", false, {"in_proj_weight", NULL, NULL, "out_proj.weight"},
     {"in_proj_bias", NULL, NULL, "out_proj.bias"}, {"bias_k", "bias_v"}, 6, 6, 6, 3, 3, 2, false},
    {RAPT_SCHEME_PYTORCH, "", false, {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
     {"in_proj_bias", NULL, NULL, "out_proj.bias"}, {"bias_k", "bias_v"}, 6, 5, 7, 3, 3, 2, false},
    {RAPT_SCHEME_LUCID, "", false, {"in_proj_weight", NULL, NULL, "out_proj_weight"},
     {"in_proj_bias", NULL, NULL, "out_proj_bias"}, {"bias_k", "bias_v"}, 6, 6, 6, 3, 3, 2, false},
    {RAPT_SCHEME_LUCID, "a.", false, {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"},
     {"in_proj_bias", NULL, NULL, "out_proj_bias"}, {"bias_k", "bias_v"}, 6, 5, 7, 3, 3, 2, false},
    /* fairseq, OPT, BART, CLIP */
    {RAPT_SCHEME_SEPARATE, "decoder.layers.11.self_attn.", false, DOTTED_PARTS("q_proj", "k_proj", "v_proj", "out_proj"),
     {"bias_k", "bias_v"}, 6, 5, 7, 3, 3, 4, false},
    /* Llama, Mistral, Qwen 2 as Hugging Face has them */
    {RAPT_SCHEME_LLAMA, "model.layers.3.self_attn.", false, DOTTED_PARTS("q_proj", "k_proj", "v_proj", "o_proj"),
     {NULL}, 6, 6, 6, 4, 2, 5, false},
    /* Llama as Meta has it; and the same without .weight */
    {RAPT_SCHEME_WQ, "layers.3.attention.", false, DOTTED_PARTS("wq", "wk", "wv", "wo"), {NULL}, 6, 6, 6, 4, 2, 5, false},
    {RAPT_SCHEME_WQ, "", false, {"wq", "wk", "wv", "wo"}, {"bq", "bk", "bv", "bo"}, {NULL}, 6, 6, 6, 4, 2, 5, true},
    {RAPT_SCHEME_SCIRS2, "attention.", true, {"w_q", "w_k", "w_v", "w_o"}, {"b_q", "b_k", "b_v", "b_o"},
     {NULL}, 6, 5, 7, 4, 2, 5, false},
    /* mlx.nn.MultiHeadAttention */
    {RAPT_SCHEME_MLX, "layers.0.attention.", false, DOTTED_PARTS("query_proj", "key_proj", "value_proj", "out_proj"),
     {NULL}, 6, 5, 7, 3, 3, 4, false},
    {RAPT_SCHEME_BERT, "bert.encoder.layer.0.attention.", false,
     DOTTED_PARTS("self.query", "self.key", "self.value", "output.dense"), {NULL}, 6, 5, 7, 3, 3, 4, false},
    /* GPT-2's Conv1D */
    {RAPT_SCHEME_GPT2, "transformer.h.0.attn.", true, {"c_attn.weight", NULL, NULL, "c_proj.weight"},
     {"c_attn.bias", NULL, NULL, "c_proj.bias"}, {NULL}, 6, 6, 6, 4, 2, 5, false},
};
/* clang-format on */
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* ---- what stands where: every scalar of a layer has a value of its own ---- */

static double weight_at(int part, int64_t out, int64_t in) { return part * 1000 + (double)(out * 40 + in); }
static double bias_at(int part, int64_t out) { return -(part * 1000 + (double)out) - 1; }
static double bias_kv_at(int which, int64_t feature) { return 10000 + which * 1000 + (double)feature; }

static int64_t outputs(const layout *l, int part) {
    return part == OUT ? l->embed_dim : (part == Q ? l->heads : l->kv_heads) * l->head_dim;
}

static int64_t inputs_of(const layout *l, int part) {
    return part == OUT ? l->heads * l->head_dim : part == K ? l->kdim : part == V ? l->vdim : l->embed_dim;
}

/* ---- the file ---- */

typedef struct written {
    char name[MOST][96];
    const char *names[MOST];
    rapt_tensor tensor[MOST];
    int64_t count;
} written;

static rapt_tensor *add(written *w, const layout *l, const char *name, int32_t ndim, const int64_t *shape) {
    assert_true(w->count < MOST);
    snprintf(w->name[w->count], sizeof w->name[0], "%s%s", l->prefix, name);
    w->names[w->count] = w->name[w->count];
    w->tensor[w->count] = make_tensor(RAPT_F32, ndim, shape);
    return &w->tensor[w->count++];
}

/* Q's tensor has the parts behind it whose own names are NULL. */
static int last_in(const char *const names[PARTS], int part) { return part == Q && names[K] == NULL ? V : part; }

static void add_weight(written *w, const layout *l, int part) {
    int64_t rows = 0, in = inputs_of(l, part), row = 0;
    for (int p = part; p <= last_in(l->weight, part); p++) rows += outputs(l, p);
    rapt_tensor *t = add(w, l, l->weight[part], 2, l->in_out ? (int64_t[]){in, rows} : (int64_t[]){rows, in});
    for (int p = part; p <= last_in(l->weight, part); p++)
        for (int64_t o = 0; o < outputs(l, p); o++, row++)
            for (int64_t i = 0; i < in; i++)
                set_element(t, l->in_out ? i * rows + row : row * in + i, weight_at(p, o, i));
}

static void add_bias(written *w, const layout *l, int part) {
    int64_t rows = 0, row = 0;
    for (int p = part; p <= last_in(l->bias, part); p++) rows += outputs(l, p);
    rapt_tensor *t = add(w, l, l->bias[part], 1, &rows);
    for (int p = part; p <= last_in(l->bias, part); p++)
        for (int64_t o = 0; o < outputs(l, p); o++, row++) set_element(t, row, bias_at(p, o));
}

static void write_by_hand(const layout *l, written *w) {
    w->count = 0;
    for (int part = PARTS; part-- > 0;) { /* in no order that a reader could rely on */
        if (l->bias[part] != NULL) add_bias(w, l, part);
        if (l->weight[part] != NULL) add_weight(w, l, part);
    }
    for (int i = 0; i < 2 && l->bias_kv[i] != NULL; i++) {
        rapt_tensor *t = add(w, l, l->bias_kv[i], 3, (int64_t[]){1, 1, outputs(l, K)});
        for (int64_t f = 0; f < outputs(l, K); f++) set_element(t, f, bias_kv_at(i, f));
    }
    assert_ok(context,
              rapt_safetensors_save(context, in_folder("whole.safetensors"), w->count, w->names, w->tensor, 0, NULL));
}

/* The same with every other tensor in another file. */
static void write_shards(const written *w) {
    char index[4096] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
    for (int shard = 0; shard < 2; shard++) {
        const char *names[MOST];
        rapt_tensor tensors[MOST];
        char file[48];
        int64_t count = 0;
        snprintf(file, sizeof file, "model-0000%d-of-00002.safetensors", shard + 1);
        for (int64_t i = shard; i < w->count; i += 2, count++) {
            names[count] = w->names[i];
            tensors[count] = w->tensor[i];
            size_t used = strlen(index);
            snprintf(index + used, sizeof index - used, "%s\"%s\": \"%s\"", shard + i == 0 ? "" : ", ", w->names[i],
                     file);
        }
        assert_ok(context, rapt_safetensors_save(context, in_folder(file), count, names, tensors, 0, NULL));
    }
    strcat(index, "}}");
    write_bytes(in_folder("model.safetensors.index.json"), index, strlen(index));
}

/* ---- the layer ---- */

static void assert_value(const layout *l, const char *name, const rapt_tensor *t, int64_t at, double expected) {
    double found = get_element(t, at);
    if (found != expected)
        fail_msg("%s: %s has %g at %lld, expected %g", l->weight[Q], name, found, (long long)at, expected);
}

static rapt_tensor checked_parameter(const rapt_mha *layer, const char *name, int64_t rows, int64_t columns) {
    rapt_tensor t = parameter(layer, name);
    assert_int_equal(t.dtype, RAPT_F32);
    assert_int_equal(t.ndim, columns > 0 ? 2 : 1);
    assert_int_equal(t.shape[0], rows);
    if (columns > 0) assert_int_equal(t.shape[1], columns);
    return t;
}

static void assert_places(const layout *l, const rapt_mha *layer) {
    char name[32];
    int64_t row = 0;
    rapt_tensor fused = {0};
    bool is_fused = l->kdim == l->embed_dim && l->vdim == l->embed_dim &&
                    rapt_mha_find(context, layer, "in_proj_weight", &fused) == RAPT_OK;
    for (int part = 0; part < PARTS; part++) {
        int64_t rows = outputs(l, part), in = inputs_of(l, part);
        snprintf(name, sizeof name, "%s.weight", own_names[part]);
        rapt_tensor weight = checked_parameter(layer, name, rows, in);
        for (int64_t o = 0; o < rows; o++)
            for (int64_t i = 0; i < in; i++) assert_value(l, name, &weight, o * in + i, weight_at(part, o, i));
        for (int64_t o = 0; is_fused && part != OUT && o < rows; o++, row++) /* PyTorch's order, whatever the file's */
            for (int64_t i = 0; i < in; i++) assert_value(l, "in_proj", &fused, row * in + i, weight_at(part, o, i));
        snprintf(name, sizeof name, "%s.bias", own_names[part]);
        rapt_tensor bias = checked_parameter(layer, name, rows, 0);
        for (int64_t o = 0; o < rows; o++) assert_value(l, name, &bias, o, bias_at(part, o));
    }
    for (int i = 0; i < 2 && l->bias_kv[i] != NULL; i++) {
        rapt_tensor bias = parameter(layer, i == 0 ? "bias_k" : "bias_v");
        assert_int_equal(rapt_tensor_count(&bias), outputs(l, K));
        for (int64_t f = 0; f < outputs(l, K); f++) assert_value(l, "bias_k, bias_v", &bias, f, bias_kv_at(i, f));
    }
}

static rapt_mha *load_and_check(const layout *l, const char *path) {
    rapt_checkpoint *checkpoint = open_checkpoint(path);
    assert_int_equal(rapt_checkpoint_num_layers(checkpoint), 1);
    rapt_layer_info info = layer_info(checkpoint, 0);
    assert_int_equal(info.scheme, l->scheme);
    assert_string_equal(info.prefix, l->prefix);
    assert_int_equal(info.num_extra, 0);
    rapt_load_options options = rapt_load_options_default(); /* found by its names alone */
    options.num_heads = l->heads;
    rapt_mha *layer;
    assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
    const rapt_mha_config *c = rapt_mha_settings(layer);
    assert_int_equal(c->embed_dim, l->embed_dim);
    assert_int_equal(c->kdim, l->kdim);
    assert_int_equal(c->vdim, l->vdim);
    assert_int_equal(c->num_kv_heads, l->kv_heads);
    assert_int_equal(c->head_dim, l->head_dim);
    assert_places(l, layer);
    rapt_checkpoint_close(checkpoint);
    return layer;
}

/* What is saved by the scheme's names is what was written by hand, tensor by tensor. */
static void assert_saved_alike(const layout *l, const rapt_mha *layer, const written *w) {
    rapt_save_options options = rapt_save_options_default();
    options.scheme = l->scheme;
    options.prefix = l->prefix;
    rapt_checkpoint *saved = save_and_open(layer, &options);
    assert_int_equal(rapt_checkpoint_num_tensors(saved), w->count);
    for (int64_t i = 0; i < w->count; i++) {
        rapt_tensor view;
        assert_ok(context, rapt_checkpoint_find(context, saved, w->names[i], &view));
        if (!same_bits(&view, &w->tensor[i])) fail_msg("%s is saved otherwise", w->names[i]);
    }
    rapt_checkpoint_close(saved);
}

static void test_every_place(void **state) {
    (void)state;
    bool seen[RAPT_SCHEME_GPT2 + 1] = {false};
    for (int i = 0; i < LAYOUTS; i++) {
        const layout *l = &layouts[i];
        seen[l->scheme] = true;
        written w;
        write_by_hand(l, &w);
        write_shards(&w);
        rapt_mha_destroy(load_and_check(l, in_folder("model.safetensors.index.json")));
        rapt_mha *layer = load_and_check(l, in_folder("whole.safetensors"));
        if (!l->not_saved) assert_saved_alike(l, layer, &w);
        rapt_mha_destroy(layer);
        for (int64_t t = 0; t < w.count; t++) free_tensor(&w.tensor[t]);
    }
    for (int s = RAPT_SCHEME_PYTORCH; s <= RAPT_SCHEME_GPT2; s++) assert_true(seen[s]);
}

/* A file with tensors of types that Rapt lacks: a layer is refused if they are its own. */
static void test_quantised_neighbours(void **state) {
    (void)state;
    static const char header[] = "{\"a.wq\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]},"
                                 "\"a.wk\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[4,8]},"
                                 "\"a.wv\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[8,12]},"
                                 "\"a.wo\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[12,16]},"
                                 "\"b.wq\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[16,20]},"
                                 "\"b.wk\":{\"dtype\":\"F4\",\"shape\":[1,2],\"data_offsets\":[20,21]},"
                                 "\"b.wv\":{\"dtype\":\"F8_E8M0\",\"shape\":[1,1],\"data_offsets\":[21,22]},"
                                 "\"b.wo\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[22,26]},"
                                 "\"mlp.weight\":{\"dtype\":\"F6_E2M3\",\"shape\":[2,2],\"data_offsets\":[26,29]}}";
    char file[8 + sizeof header - 1 + 29] = {0};
    float weights[4] = {1, 2, 3, 4};
    uint64_t length = sizeof header - 1;
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    memcpy(file + 8 + length, weights, sizeof weights);
    rapt_checkpoint *checkpoint;
    assert_ok(context, rapt_checkpoint_open_memory(context, file, sizeof file, &checkpoint));
    assert_int_equal(rapt_checkpoint_num_tensors(checkpoint), 9);
    assert_int_equal(rapt_checkpoint_num_layers(checkpoint), 2);
    rapt_load_options options = rapt_load_options_default();
    options.num_heads = 1;
    options.prefix = "a.";
    rapt_mha *layer;
    assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
    rapt_tensor v = parameter(layer, "v_proj.weight");
    assert_true(get_element(&v, 0) == 3);
    rapt_mha_destroy(layer);
    options.prefix = "b.";
    assert_int_equal(rapt_mha_load(context, checkpoint, &options, &layer), RAPT_ERROR_DTYPE);
    assert_message("tensor 'b.wk' has dtype F4, which Rapt lacks");
    assert_null(layer);
    rapt_checkpoint_close(checkpoint);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_place),
        cmocka_unit_test(test_quantised_neighbours),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
