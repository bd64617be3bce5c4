/* test_cli.c - the command-line tool around its forward: help, mistakes, the other commands */
#include "cli_support.h"

#include <unistd.h>

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
        {"run a --input x --head-dim 0", "--head-dim: 0 is not from 1 to"},
        {"run a --input x --head-dim 6.5", "--head-dim: '6.5' is not a whole number"},
        {"run a --input x --scale much", "--scale: 'much' is not a number"},
        {"run a --input x --scale nan", "--scale: 'nan' is not a number"},
        {"check a --input x --expect y --scale -inf", "--scale: -inf is not from"},
        {"convert a b --scale 1e999", "--scale: 1e999 is not from"},
        {"run a --input x --window -1", "--window: -1 is not from 0 to"},
        {"run a --input x --window wide", "--window: 'wide' is not a whole number"},
        {"run a --input x --window 4,x", "--window: 'x' is not a whole number"},
        {"run a --input x --window 4,5,6", "--window: '5,6' is not a whole number"},
        {"run a --input x --window ,", "--window: ',' limits neither side"},
        {"check a --input x --expect y --window ''", "--window: '' limits neither side"},
        {"run a --input x --window 99999999999999999999", "--window: 99999999999999999999 is not from 0 to"},
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
        {"plot w --svg - --png -", "--svg and --png cannot both be standard output"},
        {"run a --input x --output - --json", "--json and --output cannot both be standard output"},
        {"run a --input x --weights - --json", "--json and --weights cannot both be standard output"},
        {"convert a - --json", "--json and OUT cannot both be standard output"},
        {"plot w --color=perhaps", "--color: 'perhaps' is none of auto, always, never"},
        {"bench --filter nothing", "no shape has 'nothing' in its name"},
        {"bench --seconds -1", "--seconds: -1 is not from 0"},
        {"info now", "unexpected argument 'now'"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) fails(2, rows[i].arguments, rows[i].message);
}

static void test_info(void **state) {
    (void)state;
    char line[256], available[128] = "";
    for (int i = RAPT_ISA_BASELINE; i <= RAPT_ISA_NEON; i++) {
        size_t used = strlen(available);
        if (!rapt_isa_available((rapt_isa)i)) continue;
        snprintf(available + used, sizeof available - used, "%s%s", used == 0 ? "" : ", ", rapt_isa_name((rapt_isa)i));
    }
    rapt_context *usual;
    assert_int_equal(rapt_context_create(NULL, &usual), RAPT_OK);
    int threads = (int)rapt_context_num_threads(usual);
    rapt_context_destroy(usual);
    succeeds("info");
    snprintf(line, sizeof line, "version    %s, numerics %d\ncpu        ", rapt_version(), RAPT_NUMERICS_VERSION);
    assert_int_equal(strncmp(out_text, line, strlen(line)), 0);
    snprintf(line, sizeof line, "\nisa        %s, of %s\nthreads    %d\nbackends   cpu, reference\n",
             rapt_isa_name(rapt_context_isa(context)), available, threads);
    assert_has(out_text, line);
    assert_int_equal(shell("RAPT_ISA=baseline RAPT_NUM_THREADS=3 " RAPT_TOOL " info"), 0);
    snprintf(line, sizeof line, "\nisa        baseline, of %s\nthreads    3\n", available);
    assert_has(out_text, line);
    succeeds("info --json");
    assert_has(out_text, "\"numerics_version\": 1");
    snprintf(line, sizeof line, "\"isa\": \"%s\", \"available\": [\"baseline\"",
             rapt_isa_name(rapt_context_isa(context)));
    assert_has(out_text, line);
    snprintf(line, sizeof line, "], \"threads\": %d, \"backends\": [\"cpu\", \"reference\"]}\n", threads);
    assert_has(out_text, line);
}

static void test_bench(void **state) {
    (void)state;
#ifdef RAPT_TEST_EMULATED
    skip();
#endif
    succeeds("bench --filter W1 --seconds 0 --threads 1 --json");
    assert_has(out_text, "\"name\": \"W1\", \"threads\": 1");
    assert_int_equal(on_terminal("", "bench --filter W1 --seconds 0 --threads 1", ""), 0);
    assert_has(err_text, "timing W1, 1 of 1, threads: 1\r\033[K");
    const char *missing = rapt_isa_available(RAPT_ISA_NEON) ? "avx2" : "neon";
    char line[64];
    snprintf(line, sizeof line, "bench --filter W1 --isa %s", missing);
    fails(1, line, missing);
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

/* A layer with norms of queries and keys, which Rapt would leave out. */
static void test_extra_tensors(void **state) {
    (void)state;
    static const char *const names[] = {"a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight",
                                        "a.o_proj.weight", "a.q_norm.weight", "a.k_norm.weight"};
    rapt_tensor tensors[6];
    for (uint64_t i = 0; i < 6; i++) tensors[i] = random_tensor(i, RAPT_F32, i < 4 ? 2 : 1, (int64_t[]){WIDTH, WIDTH});
    assert_ok(context, rapt_safetensors_save(context, path_of("norms.safetensors"), 6, names, tensors, 0, NULL));
    for (int i = 0; i < 6; i++) free_tensor(&tensors[i]);
    succeeds("inspect --layers norms.safetensors");
    assert_has(out_text, "parameters: 16384, not known: k_norm.weight and 1 more\n");
    succeeds("inspect --layers --json norms.safetensors");
    assert_has(out_text, "\"num_extra\": 2, \"extra\": \"a.k_norm.weight\"}");
    fails(1, "run norms.safetensors --heads 4 --input x.npy", "tensor 'a.k_norm.weight' has no place");
    assert_has(err_text, "(--ignore-extra)");
    fails(1, "convert norms.safetensors out.safetensors --heads 4", "(--ignore-extra)");
    succeeds("run norms.safetensors --heads 4 --input x.npy --ignore-extra");
    succeeds("convert norms.safetensors there.safetensors --heads 4 --ignore-extra");
    succeeds("inspect --layers --json there.safetensors");
    assert_has(out_text, "\"num_extra\": 0, \"extra\": null}");
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
    fails(1, "run " SENTENCE " --input x.npy", "(--heads or --head-dim)");
    succeeds("convert " SENTENCE " there.safetensors --head-dim 16 --scale 0.5");
    succeeds("run there.safetensors --input x.npy --output y.npy"); /* knows its scale */
    assert_has(out_text, "num_heads=4, batch_first, scale=0.5");
    rapt_options half = {.set_scale = true, .scale = 0.5};
    assert_output("y.npy", RAPT_F32, &half);
    succeeds("run there.safetensors --scale 0.25 --input x.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    succeeds("convert " SENTENCE
             " there.safetensors --heads 4 --to-prefix model.0"); /* a dot that goes without saying */
    succeeds("run there.safetensors --prefix model.0 --input x.npy --output y.npy");
    assert_output("y.npy", RAPT_F32, NULL);
    fails(1, "run there.safetensors --prefix modl.0 --input x.npy", "'model.0.'");
    succeeds("convert " SENTENCE " there.safetensors --heads 4 --to-prefix m.0 --scheme llama --dtype f16 --json");
    assert_string_equal(out_text, "{\"layer\": {\"dtype\": \"f32\", \"embed_dim\": 64, \"kdim\": 64, \"vdim\": 64, "
                                  "\"num_heads\": 4, \"num_kv_heads\": 4, \"head_dim\": 16, \"bias\": true, "
                                  "\"bias_kv\": false, \"zero_attn\": false, \"causal\": false, \"scale\": 0.25, "
                                  "\"num_parameters\": 16640},\n"
                                  " \"written\": {\"path\": \"there.safetensors\", \"prefix\": \"m.0.\", "
                                  "\"scheme\": \"llama\", \"dtype\": \"f16\"}}\n");
    fails(1, "convert " SENTENCE " no/such/there.safetensors --heads 4", "no/such/there.safetensors");
    fails(1, "convert missing there.safetensors", "No such file or directory");
    fails(1, "convert " SENTENCE " there.safetensors --heads 7", "7");
}

/* A stream in, a stream out: the bytes of a file, nothing beside them, and nothing at all if something goes wrong. */
static void test_convert_streams(void **state) {
    (void)state;
    static const char refusal[] = "OUT is '-', but standard output is a terminal, expected a file or a pipe";
    succeeds("convert " SENTENCE " file.safetensors --heads 4 --scheme gpt2 --dtype f64");
    assert_int_equal(shell("rm -rf tmp && mkdir tmp"), 0);
    assert_int_equal(shell("TMPDIR=$PWD/tmp " RAPT_TOOL " convert " SENTENCE
                           " - --heads 4 --scheme gpt2 --dtype f64 | cat >stream.safetensors"),
                     0);
    assert_string_equal(err_text, "");
    assert_int_equal(shell("cmp file.safetensors stream.safetensors && [ ! -e ./- ] && ls tmp"), 0);
    assert_string_equal(out_text, "");
    assert_int_equal(shell("cat " SENTENCE " | " RAPT_TOOL " convert - in.safetensors --heads 4 --scheme gpt2"
                           " --dtype f64"),
                     0);
    assert_has(out_text, "written  gpt2 names, f64  in.safetensors");
    assert_int_equal(shell("cmp file.safetensors in.safetensors"), 0);
    assert_int_equal(shell("cat " SENTENCE " | " RAPT_TOOL " convert - - --heads 4 | " RAPT_TOOL
                           " run - --input x.npy --output y.npy"),
                     0);
    assert_output("y.npy", RAPT_F32, NULL);
    fails(1, "convert " SENTENCE " - --heads 7", "7");
    fails(1, "convert missing -", "No such file or directory");
    rapt_mha_config config = rapt_mha_config_default(WIDTH, HEADS); /* a layer that gpt2's names cannot say */
    config.kdim = WIDTH / 2;
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    assert_ok(context, rapt_mha_save(context, layer, path_of("kdim.safetensors"), NULL));
    rapt_mha_destroy(layer);
    assert_int_equal(shell("TMPDIR=$PWD/tmp " RAPT_TOOL " convert kdim.safetensors - --scheme gpt2"), 1);
    assert_int_equal(out_size, 0);
    assert_has(err_text, "rapt: '-': ");
    assert_int_equal(shell("ls tmp"), 0);
    assert_string_equal(out_text, "");
    assert_int_equal(shell("TMPDIR=no/such " RAPT_TOOL " convert " SENTENCE " - --heads 4"), 1);
    assert_has(err_text, "rapt: cannot write a temporary file in 'no/such': No such file or directory");
    assert_int_equal(on_terminal("", "convert " SENTENCE " - --heads 4", ">&2"), 2);
    assert_has(err_text, refusal);
    if (access("/dev/full", W_OK) != 0) return;
    assert_int_equal(shell(RAPT_TOOL " convert " SENTENCE " - --heads 4 >/dev/full"), 1);
    assert_has(err_text, "rapt: cannot write standard output: No space left on device");
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

/* Without --color a terminal gets colours, unless NO_COLOR says that nobody wants them. */
static void test_colour_on_terminals(void **state) {
    (void)state;
#define A_CHECK CHECK "--input x.npy --expect " SENTENCE ":expected_output"
    static const struct {
        const char *environment, *arguments, *shown, *colour; /* colour NULL: none */
    } rows[] = {
        {"env -u NO_COLOR -u COLORTERM", "plot w.npy", "queries", "\033[48;5;"},
        {"env -u NO_COLOR COLORTERM=truecolor", "plot w.npy", "queries", "\033[48;2;"},
        {"env -u COLORTERM NO_COLOR=", "plot w.npy --color auto", "queries", "\033[48;5;"},
        {"env NO_COLOR=1", "plot w.npy", "queries", NULL},
        {"env NO_COLOR=1", "plot w.npy --color auto", "queries", NULL},
        {"env -u NO_COLOR", "plot w.npy --color never", "queries", NULL},
        {"env -u COLORTERM NO_COLOR=1", "plot w.npy --color always", "queries", "\033[48;5;"},
        {"env -u NO_COLOR", A_CHECK, "output", "\033[32mok"},
        {"env NO_COLOR=1", A_CHECK, "output", NULL},
    };
    static const float two[4] = {1, 0, 0.25f, 0.75f};
    write_npy("w.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", two, sizeof two);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(on_terminal(rows[i].environment, rows[i].arguments, ">&2"), 0); /* both streams */
        assert_has(err_text, rows[i].shown);
        if (rows[i].colour != NULL) assert_has(err_text, rows[i].colour);
        if (rows[i].colour == NULL && (strstr(err_text, "\033[4") != NULL || strstr(err_text, "\033[3") != NULL))
            fail_msg("%s %s has colours", rows[i].environment, rows[i].arguments);
    }
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
        cmocka_unit_test(test_bench),          cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_convert),        cmocka_unit_test(test_convert_streams),
        cmocka_unit_test(test_extra_tensors),  cmocka_unit_test(test_plot_terminal),
        cmocka_unit_test(test_plot_files),     cmocka_unit_test(test_colour_on_terminals),
    };
    return cmocka_run_group_tests_name("command-line tool", tests, set_up_cli, tear_down_cli);
}
