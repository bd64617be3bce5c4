/* test_cli.c - the command-line tool, run as people run it: what it prints, where, and how it ends */
#include "support.h"

#include "npy.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SENTENCE RAPT_SOURCE_DIR "/examples/data/sentence.safetensors"
#define WORDS RAPT_SOURCE_DIR "/examples/data/sentence.txt"
#define RUN "run " SENTENCE " --heads 4 "
#define CHECK "check " SENTENCE " --heads 4 "

enum { LENGTH = 12, WIDTH = 64, HEADS = 4 };

static char work[] = "/tmp/rapt_cli_XXXXXX"; /* where every command runs */
static char *out_text, *err_text;            /* of the last one */
static size_t out_size;

/* ---- files ---- */

static char *path_of(const char *name) {
    static char path[4][512];
    static int next;
    char *result = path[next++ % 4];
    snprintf(result, sizeof path[0], "%s/%s", work, name);
    return result;
}

static char *slurp(const char *name, size_t *size) {
    FILE *file = fopen(path_of(name), "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long length = ftell(file);
    rewind(file);
    char *text = malloc((size_t)length + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)length, file), (size_t)length);
    fclose(file);
    text[length] = '\0';
    if (size != NULL) *size = (size_t)length;
    return text;
}

static void spill(const char *name, const void *data, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* An npy file with any header; the version decides how its length is written. */
static void write_npy(const char *name, int version, const char *dict, const void *data, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    size_t length = strlen(dict) + 1;
    fprintf(file, "%cNUMPY%c%c%c%c", 0x93, version, 0, (int)(length & 255), (int)(length >> 8));
    if (version > 1) fprintf(file, "%c%c", 0, 0);
    fprintf(file, "%s\n", dict);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* The elements of an npy file that the tool wrote. */
static rapt_tensor read_npy(const char *name, char **file) {
    size_t size;
    npy_header header;
    *file = slurp(name, &size);
    assert_null(npy_read_header((unsigned char *)*file, size, &header));
    assert_int_equal(header.data_at + header.data_size, size);
    assert_int_equal(header.data_at % 64, 0);
    header.tensor.data = *file + header.data_at;
    return header.tensor;
}

/* ---- commands ---- */

static int shell(const char *command) {
    char line[4096];
    assert_true(snprintf(line, sizeof line, "cd %s && { %s; } >out 2>err </dev/null", work, command) <
                (int)sizeof line);
    int status = system(line); /* NOLINT(cert-env33-c): a shell is what people use */
    free(out_text);
    free(err_text);
    out_text = slurp("out", &out_size);
    err_text = slurp("err", NULL);
    if (!WIFEXITED(status) || WEXITSTATUS(status) > 2 || strstr(err_text, "Sanitizer") != NULL)
        fail_msg("%s\nended with %d\n%s", command, status, err_text);
    return WEXITSTATUS(status);
}

static int rapt(const char *arguments) {
    char line[3500];
    assert_true(snprintf(line, sizeof line, RAPT_TOOL " %s", arguments) < (int)sizeof line);
    return shell(line);
}

static void assert_has(const char *text, const char *part) {
    if (strstr(text, part) == NULL) fail_msg("expected \"%s\" in:\n%s", part, text);
}

static void succeeds(const char *arguments) {
    if (rapt(arguments) != 0) fail_msg("rapt %s failed: %s", arguments, err_text);
    assert_string_equal(err_text, "");
}

/* Fails with that status, says so on stderr, and prints nothing else. */
static void fails(int status, const char *arguments, const char *message) {
    int ended = rapt(arguments);
    if (ended != status || out_size != 0) fail_msg("rapt %s ended with %d\n%s%s", arguments, ended, out_text, err_text);
    if (strncmp(err_text, "rapt: ", 6) != 0) fail_msg("rapt %s said: %s", arguments, err_text);
    assert_has(err_text, message);
}

/* ---- the sentence, computed by the library itself ---- */

static rapt_context *context;
static rapt_safetensors *file;
static rapt_tensor input; /* [1, LENGTH, WIDTH] */

static rapt_tensor sentence_tensor(const char *name) {
    rapt_tensor tensor;
    assert_ok(context, rapt_safetensors_find(context, file, name, &tensor));
    return tensor;
}

static rapt_tensor expected_output(rapt_dtype dtype, const rapt_options *options) {
    rapt_tensor parameter[4] = {sentence_tensor("in_proj_weight"), sentence_tensor("in_proj_bias"),
                                sentence_tensor("out_proj.weight"), sentence_tensor("out_proj.bias")};
    for (int i = 0; i < 4; i++) parameter[i] = convert_tensor(&parameter[i], dtype);
    rapt_mha_weights weights = rapt_mha_weights_default(HEADS);
    weights.batch_first = true;
    weights.in_proj_weight = &parameter[0];
    weights.in_proj_bias = &parameter[1];
    weights.out_proj_weight = &parameter[2];
    weights.out_proj_bias = &parameter[3];
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_from_weights(context, &weights, RAPT_COPY, &layer));
    rapt_tensor x = convert_tensor(&input, dtype), y = make_tensor(dtype, 3, input.shape);
    assert_ok(context, rapt_mha_forward(context, layer, &x, &x, &x, options, &y));
    for (int i = 0; i < 4; i++) free_tensor(&parameter[i]);
    free_tensor(&x);
    rapt_mha_destroy(layer);
    return y;
}

static void assert_output(const char *name, rapt_dtype dtype, const rapt_options *options) {
    char *memory;
    rapt_tensor ours = read_npy(name, &memory), expected = expected_output(dtype, options);
    assert_int_equal(ours.dtype, dtype);
    assert_true(same_bits(&ours, &expected));
    free_tensor(&expected);
    free(memory);
}

static int set_up(void **state) {
    (void)state;
    assert_non_null(mkdtemp(work));
    context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    assert_ok(context, rapt_safetensors_open(context, SENTENCE, &file));
    input = sentence_tensor("input");
    write_npy("x.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64), }", input.data,
              sizeof(float) * LENGTH * WIDTH);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    rapt_safetensors_close(file);
    rapt_context_destroy(context);
    free(out_text);
    free(err_text);
    char line[64];
    snprintf(line, sizeof line, "rm -rf %s", work);
    return system(line); /* NOLINT(cert-env33-c) */
}

/* ---- help and mistakes ---- */

static void test_help(void **state) {
    (void)state;
    static const char *const commands[] = {"run", "check", "inspect", "convert", "plot", "bench", "info"};
    succeeds("--version");
    assert_has(out_text, rapt_version());
    succeeds("--help");
    char *general = strdup(out_text);
    succeeds("help");
    assert_string_equal(out_text, general);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char line[64];
        assert_has(general, commands[i]);
        snprintf(line, sizeof line, "help %s", commands[i]);
        succeeds(line);
        char *help = strdup(out_text);
        snprintf(line, sizeof line, "%s --help --no-such-option", commands[i]);
        succeeds(line);
        assert_string_equal(out_text, help);
        free(help);
    }
    free(general);
}

/* The manual and the completions know every option that the tool knows. */
static void test_manual_is_complete(void **state) {
    (void)state;
    static const char *const commands[] = {"run", "check", "inspect", "convert", "plot", "bench", "info"};
    static const char *const shells[] = {"rapt.bash", "_rapt", "rapt.fish"};
    char command[1024];
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        snprintf(
            command, sizeof command,
            RAPT_TOOL
            " help %s | sed -n 's/^  --\\([a-z-]*\\).*/\\1/p' | while read -r o; do "
            "grep -q -- \"-$(echo \"$o\" | sed 's/-/.*-/g')\" %s/tools/rapt/rapt.1 || echo \"rapt.1 lacks $o\"; done",
            commands[i], RAPT_SOURCE_DIR);
        assert_int_equal(shell(command), 0);
        assert_string_equal(out_text, "");
        for (size_t s = 0; s < sizeof shells / sizeof *shells; s++) {
            snprintf(command, sizeof command,
                     RAPT_TOOL
                     " help %s | sed -n 's/^  --\\([a-z-]*\\).*/\\1/p' | while read -r o; do "
                     "grep -qE -- \"(--|-l )$o\\b\" %s/tools/rapt/completions/%s || echo \"%s lacks $o\"; done",
                     commands[i], RAPT_SOURCE_DIR, shells[s], shells[s]);
            assert_int_equal(shell(command), 0);
            assert_string_equal(out_text, "");
        }
    }
}

static void test_usage_mistakes(void **state) {
    (void)state;
    static const struct {
        const char *arguments, *message;
    } rows[] = {
        {"", "a command is expected"},
        {"--json info", "a command is expected before --json"},
        {"rnu", "no command 'rnu', did you mean run?"},
        {"help inspct", "did you mean inspect?"},
        {"frobnicate", "no command 'frobnicate'\nTry 'rapt --help'."},
        {"run", "LAYER expected\nTry 'rapt help run'."},
        {"run a b", "unexpected argument 'b'"},
        {"run a", "--input FILE expected"},
        {"run a --haeds 4", "unknown option --haeds, did you mean --heads?"},
        {"run a --caus=1", "unknown option --caus, did you mean --causal?"},
        {"run a --xyzzy", "unknown option --xyzzy\n"},
        {"run a -x", "unknown option -x"},
        {"run a --heads", "--heads needs H"},
        {"run a --causal=yes", "--causal takes no value"},
        {"run a --causal --causal", "--causal is given twice"},
        {"run a --input x --heads four", "--heads: 'four' is not a whole number"},
        {"run a --input x --heads ''", "--heads: '' is not a whole number"},
        {"run a --input x --heads 0", "--heads: 0 is not from 1 to"},
        {"run a --input x --heads 99999999999999999999", "--heads: 99999999999999999999 is not from 1 to"},
        {"run a --input x --threads -1", "--threads: -1 is not from 1 to"},
        {"run a --input x --dtype f8", "--dtype: 'f8' is none of f32, f64, bf16, f16"},
        {"run a --input x --scheme tf", "--scheme: 'tf' is none of pytorch, lucid"},
        {"run a --input x --backend gpu", "--backend: 'gpu' is none of cpu, reference"},
        {"run a --input x --output - --weights -", "cannot both be standard output"},
        {"check a --input x", "--expect FILE expected"},
        {"check a --input x --expect y --tolerance tiny", "--tolerance: 'tiny' is not a number"},
        {"check a --input x --expect y --tolerance nan", "--tolerance: 'nan' is not a number"},
        {"check a --input x --expect y --tolerance -1", "--tolerance: -1 is not from 0"},
        {"inspect", "FILE expected"},
        {"inspect -- --json x", "unexpected argument 'x'"},
        {"convert in", "OUT expected"},
        {"convert", "IN OUT expected"},
        {"plot", "WEIGHTS expected"},
        {"plot w --color=perhaps", "--color: 'perhaps' is none of auto, always, never"},
        {"bench --filter nothing", "no shape has 'nothing' in its name"},
        {"bench --seconds -1", "--seconds: -1 is not from 0"},
        {"info now", "unexpected argument 'now'"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) fails(2, rows[i].arguments, rows[i].message);
}

static void test_info(void **state) {
    (void)state;
    succeeds("info");
    assert_has(out_text, rapt_version());
    assert_has(out_text, "baseline");
    succeeds("info --json");
    assert_has(out_text, "\"numerics_version\": 1");
    assert_has(out_text, "\"backends\": [\"cpu\", \"reference\"]}");
}

static void test_bench(void **state) {
    (void)state;
#ifdef RAPT_TEST_EMULATED
    skip();
#endif
    succeeds("bench --filter S1 --seconds 0 --threads 1 --json");
    assert_has(out_text, "\"name\": \"S1\", \"threads\": 1");
    const char *missing = rapt_isa_available(RAPT_ISA_NEON) ? "avx2" : "neon";
    char line[64];
    snprintf(line, sizeof line, "bench --filter S1 --isa %s", missing);
    fails(1, line, missing);
}

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

/* ---- inspect and convert ---- */

static void test_inspect(void **state) {
    (void)state;
    succeeds("inspect " SENTENCE);
    assert_has(out_text, "in_proj_weight    f32   [192, 64]");
    assert_has(out_text, "tensors: 7, 75.0 kB");
    assert_has(out_text, "pytorch, f32, embed_dim 64");
    assert_has(out_text, "attention layers: 1");
    succeeds("inspect --tensors " SENTENCE);
    assert_null(strstr(out_text, "layers"));
    succeeds("inspect --layers --json " SENTENCE);
    assert_has(out_text, "\"num_parameters\": 16640");
    assert_null(strstr(out_text, "tensors"));
    succeeds("inspect --json " SENTENCE);
    assert_has(out_text, "{\"name\": \"input\", \"dtype\": \"f32\", \"shape\": [1, 12, 64], \"bytes\": 3072}");
    char *from_file = strdup(out_text);
    assert_int_equal(shell("cat " SENTENCE " | " RAPT_TOOL " inspect --json -"), 0);
    assert_string_equal(out_text, from_file);
    free(from_file);
    fails(1, "inspect - </dev/zero", "'-'");
    /* a name with an escape in it, and a type that Rapt lacks */
    static const char header[] = "{\"a\\u001b\\\"\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}} ";
    char odd[8 + sizeof header + 7] = {(char)(sizeof header - 1)};
    memcpy(odd + 8, header, sizeof header - 1);
    spill("odd.safetensors", odd, 8 + sizeof header - 1 + 8);
    succeeds("inspect odd.safetensors");
    assert_has(out_text, "a?\"");
    assert_has(out_text, "I64");
    succeeds("inspect --json odd.safetensors");
    assert_has(out_text, "\"name\": \"a\\u001b\\\"\"");
}

static void test_convert(void **state) {
    (void)state;
    static const char *const schemes[] = {"pytorch", "lucid", "separate", "llama", "wq",
                                          "scirs2",  "mlx",   "bert",     "gpt2"};
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) { /* out and back, the same bits */
        char line[512];
        snprintf(line, sizeof line, "convert " SENTENCE " there.safetensors --heads 4 --scheme %s --to-prefix model.0.",
                 schemes[i]);
        succeeds(line);
        assert_has(out_text, schemes[i]);
        snprintf(line, sizeof line, "run there.safetensors --prefix model.0. --scheme %s --input x.npy --output y.npy",
                 schemes[i]);
        succeeds(line);
        assert_output("y.npy", RAPT_F32, NULL);
    }
    succeeds("convert " SENTENCE " half.safetensors --heads 4 --dtype bf16");
    succeeds("inspect half.safetensors");
    assert_has(out_text, "bf16  [192, 64]");
    succeeds("run half.safetensors --input x.npy --output y.npy"); /* knows its heads; bf16 becomes f32 in npy */
    char *memory;
    assert_int_equal(read_npy("y.npy", &memory).dtype, RAPT_F32);
    free(memory);
    succeeds("run half.safetensors --input x.npy --output y.safetensors");
    succeeds("check half.safetensors --input x.npy --expect y.npy --tolerance 0");
    succeeds("check half.safetensors --input x.npy --expect y.safetensors --tolerance 0");
    fails(1, "run " SENTENCE " --input x.npy", "(--heads)");
    succeeds("convert " SENTENCE
             " there.safetensors --heads 4 --to-prefix model.0"); /* a dot that goes without saying */
    succeeds("run there.safetensors --prefix model.0 --input x.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    fails(1, "run there.safetensors --prefix modl.0 --input x.npy", "'model.0.'");
    fails(1, "convert " SENTENCE " no/such/there.safetensors --heads 4", "no/such/there.safetensors");
    fails(1, "convert missing there.safetensors", "No such file or directory");
    fails(1, "convert " SENTENCE " there.safetensors --heads 7", "7");
}

/* ---- plot ---- */

static uint32_t big_endian(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Walks the chunks of a PNG, whose CRCs must hold; returns the stored pixels with their filter bytes. */
static unsigned char *read_png(const char *name, uint32_t *width, uint32_t *height) {
    size_t size, used = 0;
    unsigned char *png = (unsigned char *)slurp(name, &size), *pixels = malloc(size);
    assert_non_null(pixels);
    assert_memory_equal(png, "\x89PNG\r\n\x1a\n", 8);
    bool ended = false;
    for (size_t at = 8; at < size; at += 12 + big_endian(png + at)) {
        uint32_t length = big_endian(png + at), crc = ~0u;
        assert_true(at + 12 + length <= size);
        for (size_t i = at + 4; i < at + 8 + length; i++) {
            crc ^= png[i];
            for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
        }
        assert_int_equal(~crc, big_endian(png + at + 8 + length));
        if (memcmp(png + at + 4, "IHDR", 4) == 0) {
            *width = big_endian(png + at + 8);
            *height = big_endian(png + at + 12);
        }
        if (memcmp(png + at + 4, "IDAT", 4) == 0) {
            const unsigned char *block = png + at + 10; /* after the two bytes of zlib's header */
            assert_int_equal((png[at + 8] * 256 + png[at + 9]) % 31, 0);
            for (bool last = false; !last; block += 5 + (block[1] | block[2] << 8)) {
                size_t stored = (size_t)(block[1] | block[2] << 8);
                assert_int_equal(stored ^ 0xffff, block[3] | block[4] << 8);
                last = block[0] == 1;
                memcpy(pixels + used, block + 5, stored);
                used += stored;
            }
            uint32_t a = 1, b = 0;
            for (size_t i = 0; i < used; i++) {
                a = (a + pixels[i]) % 65521;
                b = (b + a) % 65521;
            }
            assert_int_equal(big_endian(block), b << 16 | a);
            assert_ptr_equal(block + 4, png + at + 8 + length);
        }
        ended = memcmp(png + at + 4, "IEND", 4) == 0;
    }
    assert_true(ended);
    assert_int_equal(used, (size_t)*height * (*width + 1));
    free(png);
    return pixels;
}

static void test_plot_terminal(void **state) {
    (void)state;
    static const float two[4] = {1, 0, 0.25f, 0.75f};
    static const float turned[4] = {1, 0.25f, 0, 0.75f};
    write_npy("w.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", two, sizeof two);
    spill("words", "ab\xff\x1b c", 6);
    succeeds("plot w.npy --tokens words");
    assert_string_equal(out_text, "\n  w.npy\n\n"
                                  "        a      \n"
                                  "        b      \n"
                                  "        ?      \n"
                                  "        ?   c  \n"
                                  "  ab?? ███  ·   ab?? 100%\n"
                                  "     c ▒▒▒ ███  ab?? 25%, c 75%\n\n"
                                  "       0 ·░░░░▒▒▒▒▒▓▓▓▓▓██████ 1   rows: queries, columns: keys\n\n");
    char *drawn = strdup(strchr(out_text + 3, '\n'));
    write_npy("f.npy", 2, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", turned, sizeof turned);
    succeeds("plot f.npy --tokens words");
    assert_string_equal(strchr(out_text + 3, '\n'), drawn);
    assert_int_equal(shell(RAPT_TOOL " plot - --tokens words <w.npy"), 0);
    assert_string_equal(strchr(out_text + 3, '\n'), drawn);
    free(drawn);
    assert_null(strchr(out_text, '\033'));
    succeeds("plot w.npy --color always");
    assert_has(out_text, "\033[48;5;");
    assert_has(out_text, " 75 ");
    succeeds("plot " SENTENCE ":expected_weights --head 2 --tokens " WORDS);
    assert_has(out_text, "head 2 of 4");
    assert_has(out_text, "animal 51%, cross 49%");
    assert_int_equal(shell("COLUMNS=40 " RAPT_TOOL " plot " SENTENCE ":expected_weights"), 0);
    assert_has(out_text, "average of 4 heads");
    fails(1, "plot " SENTENCE ":in_proj_weight", "which is no weight");
    fails(1, "plot " SENTENCE ":in_proj_bias", "has shape [192]; weights are [L,S]");
    fails(1, "plot w.npy --tokens " WORDS, "has 12 words for 2 keys");
    fails(1, "plot w.npy --query-tokens " WORDS, "has 12 words for 2 queries");
    fails(2, "plot " SENTENCE ":expected_weights --head 5", "--head: 5 is not from 1 to 4");
    fails(2, "plot " SENTENCE ":expected_weights --sequence 2", "--sequence: 2 is not from 1 to 1");
}

static void test_plot_files(void **state) {
    (void)state;
    enum { ROWS = 300, COLUMNS = 700 };
    static float large[ROWS][COLUMNS];
    for (int i = 0; i < ROWS; i++) large[i][2 * i] = 1;
    write_npy("l.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (300, 700), }", large, sizeof large);
    succeeds("plot l.npy --svg l.svg --png l.png --title 'a<b>&\"c\"'");
    assert_string_equal(out_text, "");
    char *svg = slurp("l.svg", NULL);
    assert_int_equal(strncmp(svg, "<svg xmlns", 10), 0);
    assert_has(svg, "a&#60;b&#62;&#38;&#34;c&#34;");
    assert_has(svg, "</svg>\n");
    free(svg);
    uint32_t width, height;
    unsigned char *pixels = read_png("l.png", &width, &height);
    assert_int_equal(width, COLUMNS);
    assert_int_equal(height, ROWS);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) assert_int_equal(pixels[i * (COLUMNS + 1) + 1 + j], j == 2 * i ? 255 : 0);
    free(pixels);
    assert_int_equal(shell(RAPT_TOOL " plot " SENTENCE ":expected_weights --png - >s.png"), 0);
    free(read_png("s.png", &width, &height));
    assert_true(width >= 512 && width == height);
    succeeds("plot l.npy");
    assert_has(out_text, "each cell the largest of several weights");
    assert_int_equal(shell("COLUMNS=1 " RAPT_TOOL " plot l.npy --color=always"), 0);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help),           cmocka_unit_test(test_manual_is_complete),
        cmocka_unit_test(test_usage_mistakes), cmocka_unit_test(test_info),
        cmocka_unit_test(test_bench),          cmocka_unit_test(test_run),
        cmocka_unit_test(test_npy_inputs),     cmocka_unit_test(test_seq_first),
        cmocka_unit_test(test_masks),          cmocka_unit_test(test_cross_attention),
        cmocka_unit_test(test_bad_npy),        cmocka_unit_test(test_npy_header_sweep),
        cmocka_unit_test(test_bad_files),      cmocka_unit_test(test_write_errors),
        cmocka_unit_test(test_check),          cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_convert),        cmocka_unit_test(test_plot_terminal),
        cmocka_unit_test(test_plot_files),
    };
    return cmocka_run_group_tests_name("command-line tool", tests, set_up, tear_down);
}
