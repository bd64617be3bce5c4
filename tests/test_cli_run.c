/* test_cli_run.c - the command-line tool at work on a layer: rapt run and rapt check, their inputs and outputs */
#include "cli_support.h"

#include "npy.h"

#include <math.h>
#include <time.h>
#include <unistd.h>

/* ---- run ---- */

static void test_run(void **state) {
    (void)state;
    rapt_options causal = {.causal = true};
    succeeds(RUN "--input x.npy --output y.npy");
    assert_has(out_text, "output   [1, 12, 64] f32  y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    succeeds("run --causal --output=y.npy --heads=4 --input " SENTENCE ":input -- " SENTENCE);
    assert_output("y.npy", RAPT_F32, &causal);
    succeeds(RUN "--input " SENTENCE " --output y.npy --threads 2"); /* the tensor `input` of a file with many */
    assert_output("y.npy", RAPT_F32, NULL);
    succeeds(RUN "--input x.npy --dtype f64 --output y.npy");
    assert_output("y.npy", RAPT_F64, NULL);
    succeeds(RUN "--input x.npy --dtype f16 --output y.npy");
    assert_int_equal(shell(RAPT_TOOL " " RUN "--input - --output - <x.npy | cat >y.npy"), 0);
    assert_output("y.npy", RAPT_F32, NULL);
    assert_int_equal(shell("cat " SENTENCE " | " RAPT_TOOL " " RUN "--input -:input --output y.npy"), 0);
    assert_output("y.npy", RAPT_F32, NULL);
    assert_int_equal(shell("cat " SENTENCE " | " RAPT_TOOL " run - --heads 4 --input x.npy --output y.npy"), 0);
    assert_output("y.npy", RAPT_F32, NULL);
    fails(1, "run - --heads 4 --input - <" SENTENCE, "standard input is asked for twice");
    succeeds(RUN "--input x.npy --output y.safetensors");
    succeeds(CHECK "--input x.npy --expect y.safetensors --tolerance 0");
    succeeds(RUN "--input x.npy"); /* says what it did */
    assert_has(out_text, "output   [1, 12, 64] f32, from -");
}

/* All of what is printed but for the time, which no test knows. */
static void test_run_json(void **state) {
    (void)state;
    static const char layer[] = "{\"layer\": {\"dtype\": \"f32\", \"embed_dim\": 64, \"kdim\": 64, \"vdim\": 64, "
                                "\"num_heads\": 4, \"num_kv_heads\": 4, \"head_dim\": 16, \"bias\": true, "
                                "\"bias_kv\": false, \"zero_attn\": false, \"causal\": false, \"scale\": 0.25, "
                                "\"num_parameters\": 16640},\n";
    char expected[1024];
    succeeds(RUN "--input x.npy --json --threads 1 --output 'y\xff\"y.npy' --weights w.npy");
    assert_int_equal(strncmp(out_text, layer, sizeof layer - 1), 0);
    assert_int_equal(shell("mv y*y.npy y.npy"), 0);
    assert_output("y.npy", RAPT_F32, NULL);
    char *memory;
    rapt_tensor y = read_npy("y.npy", &memory);
    const float *values = y.data;
    float least = values[0], largest = values[0];
    for (int i = 0; i < LENGTH * WIDTH; i++) {
        least = fminf(least, values[i]);
        largest = fmaxf(largest, values[i]);
    }
    free(memory);
    snprintf(expected, sizeof expected,
             " \"rotary\": null,\n \"input\": {\"shape\": [1, 12, 64], \"dtype\": \"f32\", \"path\": \"x.npy\"},\n"
             " \"output\": {\"shape\": [1, 12, 64], \"dtype\": \"f32\", \"path\": \"y\\ufffd\\\"y.npy\", "
             "\"finite\": true, \"least\": %.9g, \"largest\": %.9g},\n"
             " \"weights\": {\"shape\": [1, 4, 12, 12], \"dtype\": \"f32\", \"path\": \"w.npy\"},\n \"seconds\": ",
             (double)least, (double)largest);
    succeeds(RUN "--input x.npy --json --threads 1 --output 'y\xff\"y.npy' --weights w.npy");
    const char *rest = out_text + sizeof layer - 1;
    assert_int_equal(strncmp(rest, expected, strlen(expected)), 0);
    char *end;
    assert_true(strtod(rest + strlen(expected), &end) > 0);
    snprintf(expected, sizeof expected, ", \"isa\": \"%s\", \"threads\": 1}\n",
             rapt_isa_name(rapt_context_isa(context)));
    assert_string_equal(end, expected);
    float infinite[LENGTH * WIDTH] = {INFINITY}; /* which makes NaN of the first row, seen by all others */
    write_npy("inf.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64), }", infinite,
              sizeof infinite);
    succeeds(RUN "--input x.npy --value inf.npy --json");
    assert_has(out_text, " \"value\": {\"shape\": [1, 12, 64], \"dtype\": \"f32\", \"path\": \"inf.npy\"},\n");
    assert_has(out_text, " \"output\": {\"shape\": [1, 12, 64], \"dtype\": \"f32\", \"finite\": false},\n");
}

/* The input as f64, f16 and in Fortran's order, in each version of the format. */
static void test_npy_inputs(void **state) {
    (void)state;
    const float *x = input.data;
    double as_f64[LENGTH * WIDTH], turned[LENGTH * WIDTH];
    for (int i = 0; i < LENGTH * WIDTH; i++) as_f64[i] = (double)x[i];
    for (int i = 0; i < LENGTH; i++)
        for (int j = 0; j < WIDTH; j++) turned[j * LENGTH + i] = as_f64[i * WIDTH + j];
    for (int version = 1; version <= 3; version++) {
        write_npy("a.npy", version, "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 12, 64)}", as_f64,
                  sizeof as_f64);
        succeeds(RUN "--input a.npy --output y.npy");
        assert_output("y.npy", RAPT_F32, NULL);
        write_npy("a.npy", version, "{\"shape\":(1,12,64,) ,'fortran_order':True, 'descr':'<f8',}   ", turned,
                  sizeof turned);
        succeeds(RUN "--input a.npy --output y.npy");
        assert_output("y.npy", RAPT_F32, NULL);
    }
    rapt_tensor half = convert_tensor(&input, RAPT_F16);
    write_npy("a.npy", 1, "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 12, 64), }", half.data,
              2 * LENGTH * WIDTH);
    succeeds(CHECK "--input a.npy --dtype f16 --expect " SENTENCE ":expected_output");
    write_npy("a.npy", 1, "{'descr': '<f2', 'fortran_order': False, 'shape': (12, 64), }", half.data,
              2 * LENGTH * WIDTH);
    succeeds(RUN "--input a.npy --output y.npy --weights w.npy"); /* unbatched */
    assert_has(out_text, "output   [12, 64] f32");
    assert_has(out_text, "weights  [4, 12, 12] f32");
    free_tensor(&half);
    /* one padding byte less: the elements are not aligned */
    write_npy("a.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64)}  ", x,
              sizeof(float) * LENGTH * WIDTH);
    succeeds(RUN "--input a.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
}

/* Two sequences, one after the other and interleaved. */
static void test_seq_first(void **state) {
    (void)state;
    const float *x = input.data;
    float batch_first[2][LENGTH][WIDTH], seq_first[LENGTH][2][WIDTH];
    for (int i = 0; i < 2 * LENGTH * WIDTH; i++) {
        int n = i / (LENGTH * WIDTH), l = i / WIDTH % LENGTH, e = i % WIDTH;
        batch_first[n][l][e] = seq_first[l][n][e] = x[(n == 0 ? l : LENGTH - 1 - l) * WIDTH + e];
    }
    write_npy("a.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 12, 64), }", batch_first,
              sizeof batch_first);
    write_npy("b.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (12, 2, 64), }", seq_first,
              sizeof seq_first);
    succeeds(RUN "--input a.npy --causal --output ya.npy --weights wa.npy");
    succeeds(RUN "--input b.npy --causal --seq-first --output yb.npy --weights wb.npy");
    assert_int_equal(shell("cmp wa.npy wb.npy"), 0);
    char *memory_a, *memory_b;
    rapt_tensor a = read_npy("ya.npy", &memory_a), b = read_npy("yb.npy", &memory_b);
    assert_ok(context, rapt_tensor_transpose(context, &b, 0, 1, &b));
    assert_true(same_bits(&a, &b));
    free(memory_a);
    free(memory_b);
}

/* Windows, scales and the size of a head, against what the library says. */
static void test_bands_and_scales(void **state) {
    (void)state;
    static const struct {
        const char *arguments;
        rapt_options options;
    } rows[] = {
        {"--window 2", {.limit_left = true, .left = 2, .limit_right = true, .right = 2}},
        {"--window 0", {.limit_left = true, .limit_right = true}},
        {"--window=3,1", {.limit_left = true, .left = 3, .limit_right = true, .right = 1}},
        {"--window 3,", {.limit_left = true, .left = 3}},
        {"--window ,3", {.limit_right = true, .right = 3}},
        {"--window ,0", {.causal = true}},
        {"--window 4,-1", {.limit_left = true, .left = 4, .limit_right = true, .right = -1}},
        {"--window 9223372036854775807", {0}},
        {"--causal --window 2", {.causal = true, .limit_left = true, .left = 2}},
        {"--scale 0.5", {.set_scale = true, .scale = 0.5}},
        {"--scale 0", {.set_scale = true}},
        {"--scale -1e-3 --causal", {.set_scale = true, .scale = -1e-3, .causal = true}},
        {"--head-dim 16", {0}},
    };
    char line[512];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(line, sizeof line, RUN "%s --input x.npy --output y.npy", rows[i].arguments);
        succeeds(line);
        assert_output("y.npy", RAPT_F32, &rows[i].options);
        snprintf(line, sizeof line, CHECK "%s --input x.npy --expect y.npy --tolerance 0", rows[i].arguments);
        succeeds(line);
    }
    succeeds("run " SENTENCE " --head-dim 16 --input x.npy --output y.npy"); /* instead of the heads */
    assert_output("y.npy", RAPT_F32, NULL);
    fails(1, RUN "--head-dim 8 --input x.npy", "head_dim is 8, but the tensors' shapes give 16");
    fails(1, "run " SENTENCE " --head-dim 7 --input x.npy", "head_dim 7 does not divide the 64 outputs of q");
    assert_null(strstr(err_text, "--heads"));
}

static void test_masks(void **state) {
    (void)state;
    bool hidden[LENGTH * LENGTH];
    float added[LENGTH * LENGTH];
    uint8_t padded[LENGTH] = {[LENGTH - 1] = 1};
    for (int i = 0; i < LENGTH * LENGTH; i++) {
        hidden[i] = i % LENGTH > i / LENGTH;
        added[i] = hidden[i] ? -INFINITY : 0;
    }
    rapt_options causal = {.causal = true};
    write_npy("m.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (12, 12), }", hidden, sizeof hidden);
    succeeds(RUN "--input x.npy --mask m.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, &causal);
    write_npy("m.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (12, 12), }", added, sizeof added);
    succeeds(RUN "--input x.npy --mask m.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, &causal);
    write_npy("p.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (1, 12), }", padded, sizeof padded);
    rapt_tensor padding = rapt_tensor_of(padded, RAPT_BOOL, 2, (int64_t[]){1, LENGTH});
    rapt_options options = {.key_padding_mask = &padding};
    succeeds(RUN "--input x.npy --padding p.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, &options);
    fails(1, RUN "--input x.npy --mask x.npy --output z.npy", "attn_mask");
    assert_int_equal(access(path_of("z.npy"), F_OK), -1);
}

/* A file with query, key and value, and the same three files apart. */
static void test_cross_attention(void **state) {
    (void)state;
    rapt_tensor query, key;
    assert_ok(context, rapt_tensor_slice(context, &input, 1, 0, 3, &query));
    assert_ok(context, rapt_tensor_slice(context, &input, 1, 2, 7, &key));
    const char *names[3] = {"query", "key", "value"};
    rapt_tensor three[3] = {query, key, key};
    assert_ok(context, rapt_safetensors_save(context, path_of("qkv.safetensors"), 3, names, three, 0, NULL));
    succeeds(RUN "--input qkv.safetensors --output y.npy --weights w.npy");
    assert_has(out_text, "output   [1, 3, 64]");
    assert_has(out_text, "weights  [1, 4, 3, 7]");
    succeeds(CHECK "--input qkv.safetensors:query --key qkv.safetensors:key --value qkv.safetensors:value "
                   "--expect y.npy --expect-weights w.npy --tolerance 0");
    assert_has(out_text, "no difference");
    fails(1, RUN "--input qkv.safetensors:other", "'qkv.safetensors': the file has no tensor 'other'");
    fails(1, RUN "--input x.npy --key qkv.safetensors", "holds 3 tensors: name one as qkv.safetensors:NAME");
    fails(1, RUN "--input x.npy:query", "an npy file holds one array, without a name");
    fails(1, RUN "--input qkv.safetensors --causal", "causal");
}

/* The sentence's layer in two files that an index ties together. */
static void test_shards(void **state) {
    (void)state;
    static const char *const names[] = {"l.in_proj_weight", "l.out_proj.bias", "l.in_proj_bias", "l.out_proj.weight"};
    static const char index[] = "{\"weight_map\": {\"l.in_proj_weight\": \"one.safetensors\", "
                                "\"l.out_proj.bias\": \"one.safetensors\", "
                                "\"l.in_proj_bias\": \"two.safetensors\", "
                                "\"l.out_proj.weight\": \"two.safetensors\"}}";
    rapt_safetensors *whole;
    rapt_tensor tensors[4];
    assert_ok(context, rapt_safetensors_open(context, SENTENCE, &whole));
    for (int i = 0; i < 4; i++) assert_ok(context, rapt_safetensors_find(context, whole, names[i] + 2, &tensors[i]));
    assert_int_equal(shell("rm -rf model && mkdir model"), 0);
    assert_ok(context, rapt_safetensors_save(context, path_of("model/one.safetensors"), 2, names, tensors, 0, NULL));
    assert_ok(context,
              rapt_safetensors_save(context, path_of("model/two.safetensors"), 2, names + 2, tensors + 2, 0, NULL));
    rapt_safetensors_close(whole);
    spill("model/model.safetensors.index.json", index, sizeof index - 1);
    succeeds("inspect model/model.safetensors.index.json");
    assert_has(out_text, "l.in_proj_bias     f32   [192]");
    assert_has(out_text, "tensors: 4, 66.6 kB\n");
    assert_has(out_text, "l.  pytorch, f32, embed_dim 64, query features 64, bias, parameters: 16640\n");
    assert_has(out_text, "attention layers: 1\n");
    succeeds("run model/model.safetensors.index.json --heads 4 --input x.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    succeeds("convert model/model.safetensors.index.json joined.safetensors --heads 4");
    succeeds("run joined.safetensors --input x.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    assert_int_equal(shell("rm model/two.safetensors"), 0);
    fails(1, "inspect model/model.safetensors.index.json", "model/two.safetensors': No such file or directory");
}

/* ---- check ---- */

static void test_check(void **state) {
    (void)state;
    succeeds(CHECK "--input x.npy --expect " SENTENCE ":expected_output --expect-weights " SENTENCE
                   ":expected_weights");
    assert_has(out_text, "ok   output   [1, 12, 64]");
    assert_has(out_text, "ok   weights  [1, 4, 12, 12]");
    succeeds(CHECK "--input x.npy --expect " SENTENCE ":expected_output --json");
    assert_has(out_text, "\"passed\": true");
    assert_int_equal(rapt(CHECK "--input x.npy --expect " SENTENCE ":expected_output --tolerance 1e-12"), 1);
    assert_has(out_text, "BAD  output");
    assert_int_equal(rapt(CHECK "--input x.npy --expect x.npy --json"), 1);
    assert_has(out_text, "\"passed\": false");
    fails(1, CHECK "--input x.npy --expect " SENTENCE ":in_proj_bias",
          "the output has shape [1, 12, 64], expected is [192]");
    float values[LENGTH * WIDTH]; /* NaN is expected of NaN alone */
    memcpy(values, input.data, sizeof values);
    values[0] = NAN;
    write_npy("nan.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64), }", values, sizeof values);
    assert_int_equal(rapt(CHECK "--input nan.npy --expect " SENTENCE ":expected_output --tolerance 1e9"), 1);
    assert_has(out_text, "BAD  output   [1, 12, 64]      at most inf off");
    succeeds(RUN "--input nan.npy --output y.npy");
    succeeds(CHECK "--input nan.npy --expect y.npy --tolerance 0");
    succeeds(CHECK "--input x.npy --expect " SENTENCE ":expected_output --backend reference --tolerance 1e-6");
    succeeds(CHECK "--input x.npy --expect " SENTENCE ":expected_output --dtype bf16");
}

/* ---- progress ---- */

/* A line is shown on the terminal, and none is left there at the end. */
static void shows(const char *before, const char *arguments, const char *after, const char *line) {
    static const char erase[] = "\r\033[K";
    assert_int_equal(on_terminal(before, arguments, after), 0);
    assert_has(err_text, line);
    assert_true(strlen(err_text) >= sizeof erase - 1);
    assert_string_equal(err_text + strlen(err_text) - (sizeof erase - 1), erase);
}

static void test_progress(void **state) {
    (void)state;
    enum { ROWS = 10000 };
    shows("", RUN "--input x.npy --output y.npy", "", "\r\033[Kcomputing");
    assert_output("y.npy", RAPT_F32, NULL);
    shows("", "convert " SENTENCE " there.safetensors --heads 4", "", "\r\033[Kwriting 66.6 kB");
    /* streams that wait in the middle */
    rapt_tensor x = random_tensor(1, RAPT_F32, 2, (int64_t[]){ROWS, WIDTH});
    write_npy("long.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 10, 64), }", x.data,
              sizeof(float) * ROWS * WIDTH);
    free_tensor(&x);
    shows("", RUN "--input long.npy --output -", "| { head -c 999 >part; sleep 0.5; cat part - >y.npy; }",
          "\r\033[Kwriting, ");
    shows("{ head -c 999999 long.npy; sleep 0.5; tail -c +1000000 long.npy; } |", RUN "--input - --output z.npy", "",
          "\r\033[Kreading, ");
    assert_int_equal(shell("cmp y.npy z.npy"), 0);
}

/* On a terminal a large batch is computed in pieces: the same bits. */
static void test_pieces(void **state) {
    (void)state;
#ifdef RAPT_TEST_EMULATED
    skip();
#endif
    enum { N = 300, L = 16, E = 512, H = 8 };
    rapt_mha_config config = rapt_mha_config_default(E, H);
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    assert_ok(context, rapt_mha_save(context, layer, path_of("large.safetensors"), NULL));
    rapt_mha_destroy(layer);
    rapt_tensor x = random_tensor(2, RAPT_F32, 3, (int64_t[]){N, L, E});
    write_npy("x3.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (300, 16, 512), }", x.data,
              sizeof(float) * N * L * E);
    static bool hidden[N * H * L * L], padded[N * L];
    test_random random = {.state = 3};
    for (size_t i = 0; i < sizeof hidden; i++) hidden[i] = random_chance(&random, 0.3);
    for (size_t i = 0; i < sizeof padded; i++) padded[i] = random_chance(&random, 0.1);
    write_npy("m3.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (2400, 16, 16), }", hidden,
              sizeof hidden);
    write_npy("m4.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (300, 8, 16, 16), }", hidden,
              sizeof hidden);
    write_npy("m1.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (1, 8, 16, 16), }", hidden, H * L * L);
    write_npy("p2.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (300, 16), }", padded, sizeof padded);
    write_npy("p1.npy", 1, "{'descr': '|b1', 'fortran_order': False, 'shape': (16,), }", padded, L);
    static const char *const rows[] = {"--mask m3.npy --padding p2.npy --weights w_", "--mask m4.npy --padding p1.npy",
                                       "--mask m1.npy", "--seq-first"};
    for (size_t i = 0; i < (test_is_quick() ? 1 : sizeof rows / sizeof *rows); i++) {
        char line[256];
        snprintf(line, sizeof line, "run large.safetensors --input x3.npy --output y_ %s", rows[i]);
        succeeds(line);
        assert_int_equal(shell("mv y_ y; [ ! -e w_ ] || mv w_ w"), 0);
        assert_int_equal(on_terminal("", line, ""), 0);
        assert_null(strstr(err_text, "computing\r")); /* what it says when all is one piece */
        assert_int_equal(shell("cmp y_ y && { [ ! -e w_ ] || cmp w_ w; }"), 0);
    }
    assert_int_equal(on_terminal("", "run large.safetensors --input x3.npy --padding x.npy", ""), 1);
    assert_has(err_text, "key_padding_mask");
    free_tensor(&x);
}

/* ---- files that are wrong ---- */

static void test_bad_npy(void **state) {
    (void)state;
    static const struct {
        const char *dict, *message;
    } rows[] = {
        {"{'descr': '>f4', 'fortran_order': False, 'shape': (4,), }", "big-endian (>f4)"},
        {"{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }", "its dtype is '<i8'"},
        {"{'descr': '|V2', 'fortran_order': False, 'shape': (4,), }", "bf16 is in safetensors alone"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }", "it holds records"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (4,), }", "neither True nor False"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4), }", "a number, not a tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': [4], }", "not a tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }", "whole numbers"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2 2), }", "whole numbers"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,4), }", "more than 8 dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999,), }", "too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", "too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4294967296, 4294967296), }", "too large"},
        {"{'descr': '<f4', 'fortran_order': False, }", "lacks shape"},
        {"{'descr': '<f4', 'descr': '<f4', 'shape': (4,), }", "not a dict of descr, fortran_order and shape"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'more': 1}", "not a dict of descr"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (4,)}", "not a dict of descr"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), } 7", "goes on after the dict"},
        {"['descr']", "not a dict"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (25000000000,), }",
         "ends too early: 16 bytes of 100000000000"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }", "ends too early: 16 bytes of 20"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", "12 bytes of elements are followed by others"},
    };
    float four[4] = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_npy("bad.npy", 1 + (int)(i % 3), rows[i].dict, four, sizeof four);
        fails(1, RUN "--input bad.npy", rows[i].message);
        assert_has(err_text, "'bad.npy': ");
        int status = shell(RAPT_TOOL " " RUN "--input - <bad.npy");
        assert_int_equal(status, 1);
        assert_has(err_text, rows[i].message);
    }
    write_npy("bad.npy", 4, "{}", four, sizeof four);
    fails(1, RUN "--input bad.npy", "version 4.0 is none of 1.0 to 3.0");
    spill("bad.npy", "\x93NUMPY\x02\0\xff\xff\xff\x7f{", 13);
    fails(1, RUN "--input bad.npy", "claims 2147483647 bytes");
}

/* Every beginning of a file, and every change of one byte in its header, is read or refused. */
static void test_npy_header_sweep(void **state) {
    (void)state;
    rapt_tensor tensor = rapt_tensor_of(NULL, RAPT_F64, 3, (int64_t[]){2, 30, 4});
    unsigned char text[NPY_WRITTEN_SIZE];
    npy_header header;
    size_t size = npy_write_header(&tensor, (char *)text);
    assert_null(npy_read_header(text, size, &header));
    assert_int_equal(header.data_size, 2 * 30 * 4 * 8);
    for (size_t length = 0; length < size; length++) {
        unsigned char *copy = malloc(length + 1);
        assert_non_null(copy);
        memcpy(copy, text, length);
        assert_non_null(npy_read_header(copy, length, &header));
        free(copy);
    }
    for (size_t at = 0; at < size; at++) {
        for (int byte = 0; byte < 256; byte++) {
            unsigned char kept = text[at];
            text[at] = (unsigned char)byte;
            if (npy_read_header(text, size, &header) == NULL) assert_true(header.tensor.ndim <= RAPT_MAX_DIMS);
            text[at] = kept;
        }
    }
    static const int64_t shapes[][2] = {{0, 0}, {1, 5}, {2, 0}};
    for (int i = 0; i < 3; i++) { /* (), (5,) and (0, 0) */
        tensor = rapt_tensor_of(NULL, RAPT_BOOL, (int32_t)shapes[i][0], (int64_t[]){shapes[i][1], 0});
        size = npy_write_header(&tensor, (char *)text);
        assert_null(npy_read_header(text, size, &header));
        assert_int_equal(header.tensor.ndim, shapes[i][0]);
        assert_int_equal(rapt_tensor_count(&header.tensor), rapt_tensor_count(&tensor));
    }
}

static void test_bad_files(void **state) {
    (void)state;
    fails(1, RUN "--input missing.npy", "cannot read 'missing.npy': No such file or directory");
    fails(1, RUN "--input .", "cannot read '.': Is a directory");
    fails(1, "run missing --input x.npy --heads 4", "No such file or directory");
    fails(1, "run . --input x.npy --heads 4", "'.'");
    fails(1, "run x.npy --input x.npy --heads 4", "'x.npy'");
    fails(1, RUN "--input x.npy --prefix nothing.", "nothing.");
    fails(1, "inspect missing", "No such file or directory");
    fails(1, "inspect x.npy", "'x.npy'");
    fails(1, "plot missing", "No such file or directory");
    spill("empty", "", 0);
    fails(1, RUN "--input empty", "'empty' is neither an npy nor a safetensors file");
    fails(1, "inspect empty", "'empty'");
    spill("garbage", "NUL\0and\nmore\0of\033[31mit", 22);
    fails(1, RUN "--input garbage", "neither an npy nor a safetensors file");
    fails(1, "inspect garbage", "'garbage'");
    fails(1, RUN "--input '\033[31mred'", "?[31mred"); /* a name that steers no terminal */
    size_t size;
    assert_int_equal(shell("cp " SENTENCE " cut.safetensors"), 0);
    char *whole = slurp("cut.safetensors", &size);
    for (size_t length = 0; length < size; length += size / 16) {
        spill("cut.safetensors", whole, length);
        fails(1, "inspect cut.safetensors", "cut.safetensors");
        fails(1, RUN "--input cut.safetensors:input", "cut.safetensors");
    }
    free(whole);
    /* streams without an end are not read to it */
    fails(1, RUN "--input /dev/zero", "neither an npy nor a safetensors file");
    assert_int_equal(shell("cat x.npy /dev/zero | " RAPT_TOOL " " RUN "--input -"), 1);
    assert_has(err_text, "bytes of elements are followed by others");
    assert_int_equal(shell(RAPT_TOOL " " RUN "--input - <&-"), 1);
    assert_has(err_text, "rapt: cannot read standard input");
}

/* Files that are mostly a hole, far larger than memory, and say something else of themselves. */
static void test_huge_files(void **state) {
    (void)state;
    static const char small[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    static const char large[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[99999999999],\"data_offsets\":[0,399999999996]}}";
    static const struct {
        const char *header;
        uint64_t length; /* what the file says; 0: the truth */
        const char *message;
    } rows[] = {
        {"", 1ull << 40, "a header of 1099511627776 bytes in a file of 200000000000"},
        {"", UINT64_MAX, "a header of 18446744073709551615 bytes in a file of 200000000000"},
        {"", 100000000, "the header does not start with '{'"},
        {"{", 100000000, "byte 9: "}, /* a hundred million zeros */
        {small, 0, "bytes follow the last tensor"},
        {large, 0, "tensor 'x' has data_offsets [0, 399999999996]"},
    };
    static const char *const commands[] = {"inspect huge.safetensors", "run huge.safetensors --heads 4 --input x.npy",
                                           "convert huge.safetensors there.safetensors --heads 4",
                                           RUN "--input huge.safetensors:x"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char file[128] = {0};
        size_t length = strlen(rows[i].header);
        uint64_t said = rows[i].length > 0 ? rows[i].length : length;
        memcpy(file, &said, 8);
        memcpy(file + 8, rows[i].header, length);
        spill("huge.safetensors", file, 8 + length);
        if (truncate(path_of("huge.safetensors"), 200000000000) != 0) skip(); /* a file system may not have it */
        for (size_t c = 0; c < sizeof commands / sizeof *commands; c++) {
            bool as_input = strstr(commands[c], "huge.safetensors:") != NULL;
            time_t begin = time(NULL);
            fails(1, commands[c], as_input ? "huge.safetensors'" : rows[i].message);
            assert_true(difftime(time(NULL), begin) < 20); /* reading it would take minutes */
        }
    }
    write_npy("huge.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64), }", "", 0);
    assert_int_equal(truncate(path_of("huge.npy"), 200000000000), 0);
    fails(1, RUN "--input huge.npy", "its 3072 bytes of elements are followed by others");
    assert_int_equal(shell("rm huge.safetensors huge.npy"), 0);
}

static void test_write_errors(void **state) {
    (void)state;
    if (access("/dev/full", W_OK) != 0) skip();
    static const char *const to_stdout[] = {"info", "help run", "inspect " SENTENCE, RUN "--input x.npy --output -",
                                            "plot " SENTENCE ":expected_weights"};
    char line[1024];
    for (size_t i = 0; i < sizeof to_stdout / sizeof *to_stdout; i++) {
        snprintf(line, sizeof line, RAPT_TOOL " %s >/dev/full", to_stdout[i]);
        assert_int_equal(shell(line), 1);
        assert_has(err_text, "rapt: cannot write standard output: No space left on device");
        snprintf(line, sizeof line, RAPT_TOOL " %s >&-", to_stdout[i]);
        assert_int_equal(shell(line), 1);
        assert_has(err_text, "rapt: cannot write standard output");
    }
    fails(1, RUN "--input x.npy --output /dev/full", "cannot write /dev/full: No space left on device");
    fails(1, RUN "--input x.npy --output no/such/y.npy", "cannot write no/such/y.npy: No such file or directory");
    fails(1, RUN "--input x.npy --output .", "cannot write .: Is a directory");
    fails(1, "plot w.npy --svg /dev/full", "cannot write /dev/full");
    /* what is printed does not end up in a file that got the number of a closed stdout */
    assert_int_equal(shell(RAPT_TOOL " " RUN "--input x.npy --output y.npy >&-"), 1);
    assert_output("y.npy", RAPT_F32, NULL);
    /* a link is written through, and no temporary file stays */
    assert_int_equal(shell("rm -rf d && mkdir d && ln -s real.npy d/link.npy && : >d/real.npy"), 0);
    succeeds(RUN "--input x.npy --output d/link.npy");
    assert_output("d/real.npy", RAPT_F32, NULL);
    assert_int_equal(shell("ls d"), 0);
    assert_string_equal(out_text, "link.npy\nreal.npy\n");
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run),
        cmocka_unit_test(test_run_json),
        cmocka_unit_test(test_npy_inputs),
        cmocka_unit_test(test_seq_first),
        cmocka_unit_test(test_bands_and_scales),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_cross_attention),
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_bad_npy),
        cmocka_unit_test(test_npy_header_sweep),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_huge_files),
        cmocka_unit_test(test_write_errors),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests_name("command-line tool: run and check", tests, set_up_cli, tear_down_cli);
}
