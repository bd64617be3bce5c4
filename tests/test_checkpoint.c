/* test_checkpoint.c - layers saved and loaded by the names of every scheme; layers found in files of whole models */
#include "checkpoint_support.h"

enum { SCHEMES = 9 };

/* ---- there and back ---- */

static bool has_bias_kv_names(rapt_scheme scheme) {
    return scheme == RAPT_SCHEME_PYTORCH || scheme == RAPT_SCHEME_LUCID || scheme == RAPT_SCHEME_SEPARATE;
}

static bool can_hold(rapt_scheme scheme, const rapt_mha_config *c) {
    bool one_size = c->kdim == c->embed_dim && c->vdim == c->embed_dim;
    return (!c->add_bias_kv || has_bias_kv_names(scheme)) && (scheme != RAPT_SCHEME_GPT2 || one_size);
}

/* kind_of_layer covers heads, biases and input sizes; these are the settings that no tensor shows. */
static rapt_mha_config any_config(int kind, rapt_dtype dtype) {
    rapt_mha_config config = kind_of_layer(kind, dtype);
    config.batch_first = kind != 2;
    config.causal = kind == 1;
    config.dropout = kind == 4 ? 0.1 : 0;
    config.set_scale = kind == 2 || kind == 5;
    config.scale = kind == 2 ? 1.0 / 3 : kind == 5 ? -0x1.fffffffffffffp-1030 : 0;
    return config;
}

static void round_trip(const rapt_mha *layer, rapt_scheme scheme, const char *prefix) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    rapt_save_options options = rapt_save_options_default();
    options.scheme = scheme;
    options.prefix = prefix;
    rapt_checkpoint *checkpoint = save_and_open(layer, &options);
    assert_int_equal(rapt_checkpoint_num_layers(checkpoint), 1);
    rapt_layer_info info = layer_info(checkpoint, 0);
    assert_string_equal(info.prefix, prefix);
    assert_int_equal(info.scheme, scheme);
    assert_int_equal(info.dtype, c->dtype);
    assert_int_equal(info.embed_dim, c->embed_dim);
    assert_int_equal(info.kdim, c->kdim);
    assert_int_equal(info.vdim, c->vdim);
    assert_int_equal(info.q_features, c->num_heads * c->head_dim);
    assert_int_equal(info.kv_features, c->num_kv_heads * c->head_dim);
    assert_int_equal(info.num_heads, c->num_heads);
    assert_int_equal(info.num_kv_heads, c->num_kv_heads);
    assert_int_equal(info.head_dim, c->head_dim);
    assert_int_equal(info.bias, c->bias);
    assert_int_equal(info.bias_kv, c->add_bias_kv);
    assert_int_equal(info.num_parameters, rapt_mha_num_parameters(layer));

    rapt_mha *loaded;
    assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
    assert_same_settings(layer, loaded);
    assert_int_equal(rapt_mha_version(layer), 2); /* create_random committed once */
    rapt_mha_commit(context, loaded);
    assert_int_equal(sum_layer(loaded), sum_layer(layer));
    assert_same_forward(layer, loaded);

    /* The same into a layer that had other weights. */
    rapt_mha *other;
    rapt_mha_config config = *c;
    config.seed = 99;
    assert_ok(context, rapt_mha_create(context, &config, &other));
    assert_ok(context, rapt_mha_load_into(context, checkpoint, prefix, RAPT_SCHEME_AUTO, other));
    assert_int_equal(rapt_mha_version(other), 2);
    assert_same_forward(layer, other);
    rapt_mha_destroy(other);
    rapt_mha_destroy(loaded);
    rapt_checkpoint_close(checkpoint);
}

static void test_round_trips(void **state) {
    (void)state;
    const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    const char *const prefixes[] = {"", "model.layers.10.self_attn."};
    for (int i = 0; i < 4 * KINDS; i++) {
        rapt_mha_config config = any_config(i % KINDS, dtypes[i / KINDS]);
        rapt_mha *layer = create_random(&config);
        for (int s = 1; s <= SCHEMES; s++) {
            for (int p = 0; p < 2 && can_hold((rapt_scheme)s, rapt_mha_settings(layer)); p++)
                round_trip(layer, (rapt_scheme)s, prefixes[p]);
        }
        rapt_mha_destroy(layer);
    }
}

static void test_schemes_that_cannot_hold(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        rapt_mha_config config = any_config(kind, RAPT_F32);
        rapt_mha *layer = create_random(&config);
        for (int s = 1; s <= SCHEMES; s++) {
            rapt_save_options options = rapt_save_options_default();
            options.scheme = (rapt_scheme)s;
            if (can_hold(options.scheme, rapt_mha_settings(layer))) continue;
            assert_int_equal(rapt_mha_save(context, layer, in_folder("no.safetensors"), &options), RAPT_ERROR_ARGUMENT);
            assert_message(rapt_scheme_name(options.scheme));
        }
        rapt_mha_destroy(layer);
    }
    assert_int_equal(files_in_folder(), 0);
}

static rapt_dtype converted(const rapt_mha *layer, rapt_dtype in_file, rapt_dtype after, rapt_mha **loaded) {
    rapt_save_options save = rapt_save_options_default();
    rapt_load_options load = rapt_load_options_default();
    save.set_dtype = load.set_dtype = true;
    save.dtype = in_file;
    save.scheme = RAPT_SCHEME_GPT2; /* transposed both ways */
    load.dtype = after;
    rapt_checkpoint *checkpoint = save_and_open(layer, &save);
    rapt_dtype found = layer_info(checkpoint, 0).dtype;
    assert_ok(context, rapt_mha_load(context, checkpoint, &load, loaded));
    rapt_checkpoint_close(checkpoint);
    return found;
}

/* A copy, rounded to nearest, which convert_tensor does not do. */
static rapt_tensor rounded(const rapt_tensor *tensor, rapt_dtype dtype) {
    rapt_tensor copy = make_tensor(dtype, tensor->ndim, tensor->shape);
    assert_ok(context, rapt_tensor_copy(context, tensor, &copy));
    return copy;
}

static void test_dtypes_convert(void **state) {
    (void)state;
    const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    for (int i = 0; i < 64; i++) {
        rapt_dtype first = dtypes[i % 4], in_file = dtypes[i / 4 % 4], after = dtypes[i / 16];
        rapt_mha_config config = kind_of_layer(1, first);
        rapt_mha *layer = create_random(&config), *loaded;
        assert_int_equal(converted(layer, in_file, after, &loaded), in_file);
        for (int32_t t = 0; t < rapt_mha_num_tensors(layer); t++) {
            const char *name;
            rapt_tensor before, view;
            assert_ok(context, rapt_mha_tensor_at(context, layer, t, &name, &before));
            view = parameter(loaded, name);
            rapt_tensor between = rounded(&before, in_file), expected = rounded(&between, after);
            if (!same_bits(&view, &expected))
                fail_msg("%s by way of %s to %s: %s", rapt_dtype_name(first), rapt_dtype_name(in_file),
                         rapt_dtype_name(after), name);
            free_tensors(&between, &expected);
        }
        rapt_mha_destroy(loaded);
        rapt_mha_destroy(layer);
    }
}

/* Layers whose biases are not PyTorch's all or none, and whose weights are borrowed one by one. */
static void test_unusual_layers(void **state) {
    (void)state;
    enum { E = 6, H = 2, ROWS = 6 };
    rapt_tensor weight[4], bias[4];
    for (uint64_t i = 0; i < 4; i++) {
        weight[i] = random_tensor(i, RAPT_F32, 2, (int64_t[]){ROWS, E});
        bias[i] = random_tensor(10 + i, RAPT_F32, 1, (int64_t[]){ROWS});
    }
    for (int present = 0; present < 16; present++) {
        rapt_mha_weights w = rapt_mha_weights_default(H);
        w.batch_first = true;
        w.q_proj_weight = &weight[0], w.k_proj_weight = &weight[1], w.v_proj_weight = &weight[2];
        w.out_proj_weight = &weight[3];
        w.q_proj_bias = present & 1 ? &bias[0] : NULL;
        w.k_proj_bias = present & 2 ? &bias[1] : NULL;
        w.v_proj_bias = present & 4 ? &bias[2] : NULL;
        w.out_proj_bias = present & 8 ? &bias[3] : NULL;
        rapt_mha *layer, *loaded;
        assert_ok(context, rapt_mha_create_from_weights(context, &w, RAPT_BORROW, &layer));
        for (int s = 1; s <= SCHEMES; s++) {
            rapt_save_options options = rapt_save_options_default();
            options.scheme = (rapt_scheme)s;
            rapt_checkpoint *checkpoint = save_and_open(layer, &options);
            assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
            bool is_fused = s == RAPT_SCHEME_PYTORCH || s == RAPT_SCHEME_LUCID || s == RAPT_SCHEME_GPT2;
            int kept = __builtin_popcount((unsigned)(present & 7));
            int expected =
                (is_fused && kept > 0 ? 3 : kept) + (present >> 3); /* zeros where a scheme has one for all */
            assert_int_equal(rapt_mha_num_parameters(loaded), 4 * E * ROWS + expected * ROWS);
            assert_same_forward(layer, loaded);
            rapt_mha_destroy(loaded);
            rapt_checkpoint_close(checkpoint);
        }
        rapt_mha_destroy(layer);
    }
    for (int i = 0; i < 4; i++) free_tensors(&weight[i], &bias[i]);
}

/* Old writers did not align the data; the copy does not care. */
static void test_unaligned_file(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        rapt_mha_config config = any_config(kind, kind % 2 == 0 ? RAPT_F64 : RAPT_F32);
        rapt_mha *layer = create_random(&config), *loaded;
        assert_ok(context, rapt_mha_save(context, layer, in_folder("layer.safetensors"), NULL));
        size_t size;
        unsigned char *bytes = read_bytes(in_folder("layer.safetensors"), &size);
        uint64_t header;
        memcpy(&header, bytes, 8);
        unsigned char *shifted = malloc(size + 3);
        assert_non_null(shifted);
        memcpy(shifted, bytes, 8 + header);
        memset(shifted + 8 + header, ' ', 3);
        memcpy(shifted + 8 + header + 3, bytes + 8 + header, size - 8 - header);
        header += 3;
        memcpy(shifted, &header, 8);
        rapt_checkpoint *checkpoint;
        assert_ok(context, rapt_checkpoint_open_memory(context, shifted, size + 3, &checkpoint));
        assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
        assert_same_forward(layer, loaded);
        rapt_tensor view;
        assert_int_equal(rapt_checkpoint_find(context, checkpoint, "out_proj.weight", &view), RAPT_ERROR_LAYOUT);
        rapt_mha_destroy(loaded);
        /* The same with another dtype, one element at a time. */
        rapt_load_options options = rapt_load_options_default();
        options.set_dtype = true;
        options.dtype = RAPT_BF16;
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &loaded));
        rapt_mha_destroy(loaded);
        rapt_checkpoint_close(checkpoint);
        rapt_mha_destroy(layer);
        free(bytes);
        free(shifted);
    }
}

/* ---- finding layers ---- */

/* Names as models have them, with what stands beside them there. */
static void test_layers_are_found(void **state) {
    (void)state;
    static const struct {
        const char *names[10]; /* each a matrix of 4 x 4, a name with a star 4 x 12, with two stars 12 x 4 */
        const char *found;     /* prefix and scheme of each, in order */
    } files[] = {
        {{"in_proj_weight**", "out_proj.weight"}, "|pytorch;"},
        {{"in_proj_weight**", "out_proj_weight"}, "|lucid;"},
        {{"x.q_proj_weight", "x.k_proj_weight", "x.v_proj_weight", "x.out_proj.weight"}, "x.|pytorch;"},
        {{"x.q_proj_weight", "x.k_proj_weight", "x.v_proj_weight", "x.out_proj_weight"}, "x.|lucid;"},
        {{"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"}, "|separate;"},
        {{"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}, "|llama;"},
        {{"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "out_proj.weight"}, "|separate;|llama;"},
        {{"wq.weight", "wk.weight", "wv.weight", "wo.weight"}, "|wq;"},
        {{"wq", "wk", "wv", "wo"}, "|wq;"},
        {{"a.w_q", "a.w_k", "a.w_v", "a.w_o", "b.w_q", "b.w_k", "b.w_v"}, "a.|scirs2;"},
        {{"query_proj.weight", "key_proj.weight", "value_proj.weight", "out_proj.weight"}, "|mlx;"},
        {{"encoder.layer.0.attention.self.query.weight", "encoder.layer.0.attention.self.key.weight",
          "encoder.layer.0.attention.self.value.weight", "encoder.layer.0.attention.output.dense.weight",
          "encoder.layer.0.output.dense.weight", "encoder.layer.0.intermediate.dense.weight"},
         "encoder.layer.0.attention.|bert;"},
        {{"h.10.attn.c_attn.weight*", "h.10.attn.c_proj.weight", "h.10.mlp.c_proj.weight", "h.10.attn.bias",
          "h.2.attn.c_attn.weight*", "h.2.attn.c_proj.weight", "h.2.mlp.c_fc.weight", "wte.weight"},
         "h.2.attn.|gpt2;h.10.attn.|gpt2;"},
        {{"l.0.a.in_proj_weight**", "l.0.a.out_proj.weight", "l.0.b.in_proj_weight**", "l.0.b.out_proj.weight"},
         "l.0.a.|pytorch;l.0.b.|pytorch;"},
        {{"l.01.wq", "l.01.wk", "l.01.wv", "l.01.wo", "l.1.wq", "l.1.wk", "l.1.wv", "l.1.wo"}, "l.01.|wq;l.1.|wq;"},
        /* not layers */
        {{"q_proj.weight", "k_proj.weight", "v_proj.weight"}, ""},
        {{"xq_proj.weight", "xk_proj.weight", "xv_proj.weight", "xo_proj.weight"}, ""},
        {{"a.q_proj.weight", "b.k_proj.weight", "a.v_proj.weight", "a.o_proj.weight"}, ""},
        {{"mlp.c_proj.weight", "c_attn.bias"}, ""},
        {{NULL}, ""},
    };
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        spec specs[11] = {{0}};
        char names[10][64], found[200] = "";
        for (int i = 0; i < 10 && files[f].names[i] != NULL; i++) {
            size_t length = strcspn(files[f].names[i], "*"), stars = strlen(files[f].names[i]) - length;
            snprintf(names[i], sizeof names[i], "%.*s", (int)length, files[f].names[i]);
            specs[i] = (spec){.name = names[i], .shape = {stars == 2 ? 12 : 4, stars == 1 ? 12 : 4}};
        }
        write_specs(in_folder("model.safetensors"), specs, NULL, NULL);
        rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
        for (int64_t i = 0; i < rapt_checkpoint_num_layers(checkpoint); i++) {
            rapt_layer_info info = layer_info(checkpoint, i);
            size_t used = strlen(found);
            snprintf(found + used, sizeof found - used, "%s|%s;", info.prefix, rapt_scheme_name(info.scheme));
            assert_int_equal(info.embed_dim, 4);
            assert_int_equal(info.kv_features, 4);
            assert_int_equal(info.num_heads, 0);
            rapt_load_options options = rapt_load_options_default();
            options.prefix = info.prefix;
            options.scheme = info.scheme;
            options.num_heads = 2;
            /* Of two schemes at one place, each has a tensor too many for the other. */
            options.ignore_extra = strcmp(files[f].found, "|separate;|llama;") == 0;
            assert_int_equal(info.num_extra, options.ignore_extra ? 1 : 0);
            rapt_mha *layer;
            assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
            rapt_mha_destroy(layer);
        }
        assert_string_equal(found, files[f].found);
        rapt_checkpoint_close(checkpoint);
    }
}

/* A whole model: each layer's weights are its own. */
static void test_many_layers(void **state) {
    (void)state;
    enum { LAYERS = 12, E = 4 };
    char names[2 * LAYERS][40];
    spec specs[2 * LAYERS + 1] = {{0}};
    for (int i = 0; i < LAYERS; i++) {
        snprintf(names[2 * i], sizeof names[0], "h.%d.attn.c_attn.weight", (i * 5 + 3) % LAYERS); /* in no order */
        snprintf(names[2 * i + 1], sizeof names[0], "h.%d.attn.c_proj.weight", (i * 7 + 1) % LAYERS);
        specs[2 * i] = (spec){.name = names[2 * i], .shape = {E, 3 * E}};
        specs[2 * i + 1] = (spec){.name = names[2 * i + 1], .shape = {E, E}};
    }
    write_specs(in_folder("model.safetensors"), specs, NULL, NULL);
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("model.safetensors"));
    assert_int_equal(rapt_checkpoint_num_tensors(checkpoint), 2 * LAYERS);
    assert_string_equal(rapt_checkpoint_tensor_name(checkpoint, 1), names[1]);
    assert_int_equal(rapt_checkpoint_num_layers(checkpoint), LAYERS);
    for (int i = 0; i < LAYERS; i++) {
        char name[40];
        snprintf(name, sizeof name, "h.%d.attn.", i);
        rapt_load_options options = rapt_load_options_default();
        options.prefix = layer_info(checkpoint, i).prefix;
        assert_string_equal(options.prefix, name);
        options.head_dim = 2; /* instead of num_heads */
        rapt_mha *layer;
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
        assert_int_equal(rapt_mha_settings(layer)->num_heads, 2);
        rapt_tensor stored, own;
        snprintf(name, sizeof name, "h.%d.attn.c_attn.weight", i);
        assert_ok(context, rapt_checkpoint_find(context, checkpoint, name, &stored));
        assert_ok(context, rapt_tensor_transpose(context, &stored, 0, 1, &stored));
        own = parameter(layer, "in_proj_weight");
        assert_true(same_bits(&stored, &own));
        snprintf(name, sizeof name, "h.%d.attn.c_proj.weight", i);
        assert_ok(context, rapt_checkpoint_find(context, checkpoint, name, &stored));
        assert_ok(context, rapt_tensor_transpose(context, &stored, 0, 1, &stored));
        own = parameter(layer, "out_proj.weight");
        assert_true(same_bits(&stored, &own));
        rapt_mha_destroy(layer);
    }
    rapt_checkpoint_close(checkpoint);
}

/* ---- PyTorch's ---- */

/* State dicts as PyTorch writes them (golden/check_checkpoints.py) need no option but the heads. */
static void test_golden_checkpoints(void **state) {
    (void)state;
    const char *const names[] = {"fused", "separate"};
    const char *const roles[] = {"query", "key", "value", "out"};
    rapt_checkpoint *expected = open_checkpoint(RAPT_SOURCE_DIR "/tests/golden/checkpoint_expected.safetensors");
    for (int i = 0; i < 2; i++) {
        char text[PATH_SIZE];
        rapt_tensor tensor[4];
        for (int r = 0; r < 4; r++) {
            snprintf(text, sizeof text, "%s.%s", names[i], roles[r]);
            assert_ok(context, rapt_checkpoint_find(context, expected, text, &tensor[r]));
        }
        snprintf(text, sizeof text, "%s/tests/golden/checkpoint_%s.safetensors", RAPT_SOURCE_DIR, names[i]);
        rapt_checkpoint *checkpoint = open_checkpoint(text);
        assert_int_equal(layer_info(checkpoint, 0).scheme, RAPT_SCHEME_PYTORCH);
        rapt_load_options options = rapt_load_options_default();
        options.num_heads = 2;
        options.batch_first = true;
        rapt_mha *layer;
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
        rapt_tensor out = forward(layer, &tensor[0], &tensor[1], &tensor[2], NULL);
        rapt_tensor rounded_out = convert_tensor(&tensor[3], RAPT_F32);
        assert_true(largest_difference(&out, &rounded_out) < 2e-6 * largest_magnitude(&rounded_out));
        free_tensors(&out, &rounded_out);
        rapt_mha_destroy(layer);
        rapt_checkpoint_close(checkpoint);
    }
    rapt_checkpoint_close(expected);
}

/* ---- settings ---- */

static void test_options_add_to_metadata(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(8, 4);
    config.causal = config.set_scale = true;
    config.scale = 3;
    config.dropout = 0.5;
    rapt_mha *layer = create(&config), *loaded;
    rapt_checkpoint *checkpoint = save_and_open(layer, NULL);
    rapt_load_options options = rapt_load_options_default();
    options.batch_first = options.add_zero_attn = options.set_scale = true;
    options.scale = 2;
    options.num_heads = 2;
    assert_ok(context, rapt_mha_load(context, checkpoint, &options, &loaded));
    const rapt_mha_config *c = rapt_mha_settings(loaded);
    assert_true(c->batch_first && c->causal && c->add_zero_attn && c->num_heads == 2 && c->head_dim == 4);
    assert_true(c->scale == 2 && c->dropout == 0.5);
    rapt_mha_destroy(loaded);

    options = rapt_load_options_default();
    options.ignore_metadata = true;
    assert_int_equal(rapt_mha_load(context, checkpoint, &options, &loaded), RAPT_ERROR_ARGUMENT);
    assert_message("does not say how many heads the layer '' has: set num_heads");
    options.num_heads = 8;
    assert_ok(context, rapt_mha_load(context, checkpoint, &options, &loaded));
    c = rapt_mha_settings(loaded);
    assert_true(!c->batch_first && !c->causal && !c->set_scale && c->dropout == 0 && c->num_heads == 8);
    rapt_mha_destroy(loaded);
    rapt_checkpoint_close(checkpoint);
    rapt_mha_destroy(layer);
}

/* A file that PyTorch wrote needs no option if its metadata says what its tensors do not. */
static void test_heads_in_metadata(void **state) {
    (void)state;
    const spec specs[] = {{"in_proj_weight", RAPT_F32, {24, 8}}, {"out_proj.weight", RAPT_F32, {8, 8}}, {0}};
    const struct {
        const char *text;
        int64_t heads; /* 0: it says nothing */
    } cases[] = {{"2", 2},  {"8", 8},   {"08", 8}, {"0", 0},          {"", 0},
                 {"-2", 0}, {"2.0", 0}, {" 2", 0}, {"1000000000", 0}, {"two", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_specs(in_folder("heads.safetensors"), specs, "num_heads", cases[i].text);
        rapt_checkpoint *checkpoint = open_checkpoint(in_folder("heads.safetensors"));
        rapt_load_options options = rapt_load_options_default();
        rapt_mha *layer;
        assert_int_equal(layer_info(checkpoint, 0).num_heads, cases[i].heads);
        rapt_status status = rapt_mha_load(context, checkpoint, NULL, &layer);
        if (cases[i].heads > 0) {
            assert_ok(context, status);
            assert_int_equal(rapt_mha_settings(layer)->num_heads, cases[i].heads);
            rapt_mha_destroy(layer);
        } else {
            assert_int_equal(status, RAPT_ERROR_ARGUMENT);
            assert_message("does not say how many heads the layer '' has: set num_heads");
        }
        options.num_heads = 4; /* an option counts more */
        assert_ok(context, rapt_mha_load(context, checkpoint, &options, &layer));
        assert_int_equal(rapt_mha_settings(layer)->num_heads, 4);
        rapt_mha_destroy(layer);
        options.num_heads = RAPT_DEFAULT;
        options.ignore_metadata = true;
        assert_int_equal(rapt_mha_load(context, checkpoint, &options, &layer), RAPT_ERROR_ARGUMENT);
        rapt_checkpoint_close(checkpoint);
    }
    write_specs(in_folder("heads.safetensors"), specs, "num_heads", "3");
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("heads.safetensors"));
    rapt_mha *layer;
    assert_int_equal(rapt_mha_load(context, checkpoint, NULL, &layer), RAPT_ERROR_SHAPE);
    assert_message("num_heads 3 does not divide the 8 outputs of q in layer ''");
    rapt_checkpoint_close(checkpoint);
}

static void test_scheme_names(void **state) {
    (void)state;
    assert_string_equal(rapt_scheme_name(RAPT_SCHEME_AUTO), "auto");
    assert_string_equal(rapt_scheme_name(RAPT_SCHEME_PYTORCH), "pytorch");
    assert_string_equal(rapt_scheme_name(RAPT_SCHEME_GPT2), "gpt2");
    assert_null(rapt_scheme_name((rapt_scheme)(SCHEMES + 1)));
    assert_null(rapt_scheme_name((rapt_scheme)-1));
}

static void test_checkpoint_outlives_context(void **state) {
    (void)state;
    counting_memory memory = {0};
    rapt_mha_config config = kind_of_layer(1, RAPT_F32);
    rapt_mha *layer = create_random(&config), *loaded;
    rapt_checkpoint_close(save_and_open(layer, NULL));
    rapt_context *other = make_counting_context(&memory);
    rapt_checkpoint *checkpoint;
    assert_ok(other, rapt_checkpoint_open(other, in_folder("layer.safetensors"), &checkpoint));
    rapt_context_destroy(other);
    assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
    rapt_checkpoint_close(checkpoint);
    assert_int_equal(memory.live, 0);
    assert_int_equal(memory.bytes, 0);
    assert_same_forward(layer, loaded); /* the layer needs no checkpoint */
    rapt_mha_destroy(loaded);
    rapt_mha_destroy(layer);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schemes_that_cannot_hold), /* first: it wants an empty folder */
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_dtypes_convert),
        cmocka_unit_test(test_unusual_layers),
        cmocka_unit_test(test_unaligned_file),
        cmocka_unit_test(test_layers_are_found),
        cmocka_unit_test(test_many_layers),
        cmocka_unit_test(test_golden_checkpoints),
        cmocka_unit_test(test_options_add_to_metadata),
        cmocka_unit_test(test_heads_in_metadata),
        cmocka_unit_test(test_scheme_names),
        cmocka_unit_test(test_checkpoint_outlives_context),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
