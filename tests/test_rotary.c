/* test_rotary.c - rotary positions against Hugging Face Transformers (golden/rotary.txt), alone and in the layer */
#include "layer_support.h"

typedef struct golden_line {
    char scaling[16];
    double number[160];
    int count;
} golden_line;

static bool read_line(FILE *file, golden_line *line) {
    char text[8192], *at = text;
    if (fgets(text, sizeof text, file) == NULL) return false;
    int used;
    assert_int_equal(sscanf(text, "%15s%n", line->scaling, &used), 1);
    at += used;
    line->count = 0;
    for (double number; sscanf(at, "%lf%n", &number, &used) == 1; at += used) {
        assert_true(line->count < 160);
        line->number[line->count++] = number;
    }
    return true;
}

static rapt_rotary_scaling scaling_by_name(const char *name) {
    static const char *const names[] = {"plain", "linear", "ntk", "llama3", "yarn"};
    for (int i = 0; i < 5; i++) {
        if (strcmp(name, names[i]) == 0) return (rapt_rotary_scaling)i;
    }
    fail();
    return RAPT_ROTARY_PLAIN;
}

/* dims base factor original length low high given mscale mscale_all_dim unrounded amplitude, then speeds: a pair (1, 0) at
 * position 1 shows its own. What a head has beyond dims stays as it is. */
static void check_speeds(const golden_line *line) {
    int64_t dims = (int64_t)line->number[0], pairs = dims / 2, head = dims + 6;
    assert_int_equal(line->count, 12 + pairs);
    rapt_rotary rotary = rapt_rotary_default(line->number[1]);
    rotary.dims = dims;
    rotary.scaling = scaling_by_name(line->scaling);
    rotary.factor = line->number[2];
    rotary.original_length = (int64_t)line->number[3];
    rotary.length = (int64_t)line->number[4];
    rotary.low_turns = line->number[5];
    rotary.high_turns = line->number[6];
    rotary.set_amplitude = line->number[7] != 0;
    rotary.amplitude = line->number[7];
    if (line->number[8] != 0) { /* as the header says */
        double stretch = 0.1 * log(rotary.factor);
        rotary.set_amplitude = true;
        rotary.amplitude = (line->number[8] * stretch + 1) / (line->number[9] * stretch + 1);
    }
    rotary.unrounded_bounds = line->number[10] != 0;
    rapt_tensor x = make_tensor(RAPT_F64, 4, (int64_t[]){1, 2, 1, head});
    for (int64_t i = 0; i < head; i++) set_element(&x, head + i, i < pairs ? 1 : i < dims ? 0 : 7);
    assert_ok(context, rapt_rotate(context, &rotary, NULL, &x));
    for (int64_t i = 0; i < pairs; i++) {
        double cosine = get_element(&x, head + i), sine = get_element(&x, head + pairs + i);
        double speed = line->number[12 + i];
        assert_true(fabs(atan2(sine, cosine) - speed) < 4e-7 * speed); /* theirs are rounded to f32, several times */
        assert_true(fabs(sqrt(sine * sine + cosine * cosine) - line->number[11]) < 1e-7);
    }
    for (int64_t i = dims; i < head; i++) assert_true(get_element(&x, head + i) == 7);
    free_tensor(&x);
}

/* interleaved dims position, eight numbers, the eight they become, of which those beyond dims are as they were */
static void check_application(const golden_line *line) {
    assert_int_equal(line->count, 19);
    for (int type = 0; type < 4; type++) {
        static const rapt_dtype dtypes[] = {RAPT_F64, RAPT_F32, RAPT_F16, RAPT_BF16};
        static const double tolerance[] = {1e-12, 2e-7, 1e-3, 1e-2};
        rapt_rotary rotary = rapt_rotary_default(10000);
        rotary.interleaved = line->number[0] != 0;
        int64_t dims = (int64_t)line->number[1], position = (int64_t)line->number[2];
        if (dims < 8) rotary.dims = dims;
        for (int way = 0; way < 2; way++) { /* by a first position, and by a list of positions */
            rapt_tensor x = make_tensor(dtypes[type], 4, (int64_t[]){1, 1, 2, 8});
            for (int64_t i = 0; i < 16; i++) set_element(&x, i, line->number[3 + i % 8]);
            rapt_tensor before = convert_tensor(&x, x.dtype);
            rotary.positions = way == 1 ? &position : NULL;
            assert_ok(context, rapt_rotate(context, &rotary, way == 0 ? &position : NULL, &x));
            for (int64_t i = 0; i < 16; i++) {
                assert_true(fabs(get_element(&x, i) - line->number[11 + i % 8]) < tolerance[type]);
                if (i % 8 >= dims) assert_true(get_element(&x, i) == get_element(&before, i));
            }
            free_tensors(&x, &before);
        }
    }
}

static void test_golden_cases(void **state) {
    (void)state;
    FILE *file = fopen(RAPT_SOURCE_DIR "/tests/golden/rotary.txt", "r");
    assert_non_null(file);
    int speeds = 0, applications = 0;
    for (golden_line line; read_line(file, &line);) {
        bool applies = strcmp(line.scaling, "apply") == 0;
        *(applies ? &applications : &speeds) += 1;
        (applies ? check_application : check_speeds)(&line);
    }
    fclose(file);
    assert_int_equal(speeds, 14);
    assert_int_equal(applications, 24);
}

/* Scores depend on distances alone: the same tokens further on give the same output, but for rounding. */
static void test_only_distances_matter(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(64, 4);
    config.dtype = RAPT_F64;
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    rapt_rotary rotary = rapt_rotary_default(10000);
    rapt_tensor x = random_tensor(1, RAPT_F64, 3, (int64_t[]){1, 30, 64});
    int64_t positions[30];
    for (int i = 0; i < 30; i++) positions[i] = i + 100000;
    rapt_options options = {.causal = true, .rotary = &rotary};
    rapt_tensor near = self_attention(layer, &x, &options),
                plain = self_attention(layer, &x, &(rapt_options){.causal = true});
    rotary.positions = positions;
    rapt_tensor far = self_attention(layer, &x, &options);
    assert_true(largest_difference(&near, &far) < 1e-9);
    assert_true(largest_difference(&near, &plain) > 1e-3);
    free_tensors(&x, &near, &far, &plain);
    rapt_mha_destroy(layer);
}

/* Left padding does not count: the same bits as without it. */
static void test_padding(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(32, 4);
    config.num_kv_heads = 2;
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    rapt_rotary rotary = rapt_rotary_default(10000);
    rotary.dims = 4;
    rapt_tensor padded = random_tensor(1, RAPT_F32, 3, (int64_t[]){1, 40, 32}), x = slice(&padded, 1, 13, 27);
    int64_t start = 13;
    rapt_tensor all =
        self_attention(layer, &padded, &(rapt_options){.causal = true, .rotary = &rotary, .key_start = &start});
    rapt_tensor expected = self_attention(layer, &x, &(rapt_options){.causal = true, .rotary = &rotary});
    rapt_tensor actual = slice(&all, 1, 13, 27);
    assert_true(same_bits(&actual, &expected));
    free_tensors(&padded, &all, &expected);
    rapt_mha_destroy(layer);
}

/* So does padding by a mask, and a query that comes alone stands where the band puts it. */
static void test_alignment(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(32, 4);
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    rapt_rotary rotary = rapt_rotary_default(10000);
    rapt_tensor padded = random_tensor(1, RAPT_F32, 3, (int64_t[]){2, 40, 32}),
                mask = make_tensor(RAPT_BOOL, 2, (int64_t[]){2, 40});
    for (int64_t j = 0; j < 13; j++) set_element(&mask, 40 + j, 1);
    rapt_tensor all =
        self_attention(layer, &padded, &(rapt_options){.causal = true, .rotary = &rotary, .key_padding_mask = &mask});
    rapt_tensor second = slice(&padded, 0, 1, 1), real = slice(&second, 1, 13, 27), row = slice(&all, 0, 1, 1);
    rapt_tensor expected = self_attention(layer, &real, &(rapt_options){.causal = true, .rotary = &rotary});
    rapt_tensor actual = slice(&row, 1, 13, 27);
    assert_true(same_bits(&actual, &expected));

    rapt_tensor last = slice(&real, 1, 24, 3), end = slice(&expected, 1, 24, 3);
    int64_t offsets[1] = {24};
    for (int way = 0; way < 3; way++) {
        rapt_options options = {.causal = true, .rotary = &rotary};
        if (way == 0) options.align_bottom_right = true;
        if (way == 1) options.offset = 24;
        if (way == 2) options.offsets = offsets;
        rapt_tensor some = forward(layer, &last, &real, &real, &options);
        assert_true(same_bits(&some, &end));
        free_tensor(&some);
    }
    int64_t positions[3] = {0};
    rotary.positions = positions;
    rapt_options options = {.rotary = &rotary};
    assert_int_equal(rapt_mha_forward(context, layer, &last, &real, &real, &options, &end), RAPT_ERROR_SHAPE);
    free_tensors(&padded, &mask, &all, &expected);
    rapt_mha_destroy(layer);
}

static void test_refusals(void **state) {
    (void)state;
    rapt_tensor x = make_tensor(RAPT_F32, 4, (int64_t[]){1, 2, 1, 8}), flags = make_tensor(RAPT_BOOL, 4, x.shape);
    const struct {
        rapt_rotary rotary;
        const char *text;
    } wrong[] = {
        {{.struct_size = 3}, "struct_size is 3"},
        {{.dims = 3, .base = 2}, "rotary.dims is 3, expected an even number from 2 to head_dim 8"},
        {{.dims = 10, .base = 2}, "rotary.dims is 10"},
        {{.dims = 8, .base = 1}, "rotary.base is 1"},
        {{.dims = 8, .base = (double)NAN}, "rotary.base is"},
        {{.dims = 8, .base = 9, .scaling = (rapt_rotary_scaling)5}, "scaling is 5"},
        {{.dims = 8, .base = 9, .scaling = RAPT_ROTARY_LINEAR}, "rotary.factor is 0"},
        {{.dims = 8, .base = 9, .scaling = RAPT_ROTARY_NTK, .factor = 2}, "rotary.original_length is 0"},
        {{.dims = 8, .base = 9, .scaling = RAPT_ROTARY_YARN, .factor = 2, .original_length = 9},
         "rotary.low_turns is 0"},
        {{.dims = 8, .base = 9, .scaling = RAPT_ROTARY_YARN, .factor = 2, .original_length = 9, .low_turns = 2},
         "rotary.high_turns is 0, expected a number above 2"},
        {{.dims = 4, .base = 9, .scaling = RAPT_ROTARY_NTK, .factor = 1e100, .original_length = 1, .length = 100},
         "too much"},
        {{.dims = 8, .base = 1e300}, "rotary.base is 1e+300"},
        {{.dims = 8, .base = 9, .set_amplitude = true, .amplitude = -1}, "rotary.amplitude is -1"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rapt_rotary rotary = wrong[i].rotary;
        if (rotary.struct_size == 0) rotary.struct_size = sizeof rotary;
        assert_int_equal(rapt_rotate(context, &rotary, NULL, &x), RAPT_ERROR_ARGUMENT);
        assert_non_null(strstr(rapt_error_message(context), wrong[i].text));
    }
    rapt_rotary rotary = rapt_rotary_default(10000);
    int64_t far = INT64_MAX; /* a position like any other */
    assert_ok(context, rapt_rotate(context, &rotary, &far, &x));
    rapt_tensor strided = slice(&x, 3, 0, 4);
    assert_int_equal(rapt_rotate(context, NULL, NULL, &x), RAPT_ERROR_NULL);
    assert_int_equal(rapt_rotate(context, &rotary, NULL, &strided), RAPT_ERROR_LAYOUT);
    assert_int_equal(rapt_rotate(context, &rotary, NULL, &flags), RAPT_ERROR_DTYPE);
    rapt_options options = {.rotary = &rotary};
    rapt_tensor out = make_tensor(RAPT_F32, 4, x.shape);
    assert_int_equal(rapt_attention_forward(context, &x, &x, &x, &options, &out), RAPT_ERROR_ARGUMENT);
    assert_non_null(strstr(rapt_error_message(context), "options.rotary"));
    free_tensors(&x, &flags, &out);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_cases), cmocka_unit_test(test_only_distances_matter),
        cmocka_unit_test(test_padding),      cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, make_cpu_context, destroy_shared_context);
}
