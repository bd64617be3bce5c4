/* test_optimizer.c - SGD and AdamW against PyTorch (golden/optimizer.txt), 16-bit parameters, clipping, and the same bits
 * for any number of threads */
#include "checkpoint_support.h"

#include "internal.h"

static rapt_optimizer *make_optimizer(const rapt_optimizer_config *config) {
    rapt_optimizer *optimizer;
    assert_ok(context, rapt_optimizer_create(context, config, &optimizer));
    return optimizer;
}

static void add(rapt_optimizer *optimizer, const char *name, const rapt_tensor *parameter,
                const rapt_tensor *gradient) {
    assert_ok(context, rapt_optimizer_add(context, optimizer, name, parameter, gradient));
}

static void step(rapt_optimizer *optimizer) { assert_ok(context, rapt_optimizer_step(context, optimizer)); }

/* ---- golden runs ---- */

enum { TENSORS = 3, ELEMENTS = 18 };
static const char *const tensor_names[TENSORS] = {"a.weight", "b", "c"};
static const double gradient_sizes[TENSORS] = {1, 0x1p-10, 0x1p-27};

typedef struct golden_run {
    char name[64]; /* with dtype and kind */
    test_random random;
    rapt_tensor parameter[TENSORS], gradient[TENSORS];
    rapt_optimizer *optimizer;
    double rate_at_50, max_norm, norm;
} golden_run;

/* Uniform within size of 0, as float32 has it. */
static void draw(test_random *random, const rapt_tensor *tensor, double size) {
    for (int64_t i = 0; i < rapt_tensor_count(tensor); i++)
        set_element(tensor, i, (double)(float)(size * (2 * random_unit(random) - 1)));
}

static void begin_run(golden_run *run, const char *line, rapt_dtype dtype) {
    char name[16], kind[8];
    double x[10];
    int used;
    assert_int_equal(sscanf(line, "case %15s %7s%n", name, kind, &used), 2);
    char *rest = (char *)(uintptr_t)line + used;
    for (int i = 0; i < 10; i++) x[i] = strtod(rest, &rest);
    *run = (golden_run){.random = {11}, .rate_at_50 = x[8], .max_norm = x[9]};
    snprintf(run->name, sizeof run->name, "%s %s %s", name, kind, rapt_dtype_name(dtype));
    rapt_optimizer_config config = rapt_optimizer_config_default(strcmp(kind, "sgd") == 0 ? RAPT_SGD : RAPT_ADAMW);
    config.learning_rate = x[0];
    config.weight_decay = x[1];
    config.momentum = x[2];
    config.dampening = x[3];
    config.nesterov = x[4] != 0;
    config.beta1 = x[5];
    config.beta2 = x[6];
    config.epsilon = x[7];
    run->optimizer = make_optimizer(&config);
    static const int64_t shapes[TENSORS][2] = {{3, 4}, {5}, {1}};
    for (int i = 0; i < TENSORS; i++) {
        run->parameter[i] = make_tensor(dtype, i == 0 ? 2 : 1, shapes[i]);
        run->gradient[i] = make_tensor(dtype, i == 0 ? 2 : 1, shapes[i]);
        draw(&run->random, &run->parameter[i], 1);
        add(run->optimizer, tensor_names[i], &run->parameter[i], &run->gradient[i]);
    }
}

static void end_run(golden_run *run) {
    rapt_optimizer_destroy(run->optimizer);
    for (int i = 0; i < TENSORS; i++) free_tensors(&run->parameter[i], &run->gradient[i]);
    *run = (golden_run){0};
}

static void advance(golden_run *run, int64_t until) {
    while (rapt_optimizer_steps(run->optimizer) < until) {
        for (int i = 0; i < TENSORS; i++) draw(&run->random, &run->gradient[i], gradient_sizes[i]);
        if (run->max_norm > 0)
            assert_ok(context, rapt_optimizer_clip(context, run->optimizer, run->max_norm, &run->norm));
        step(run->optimizer);
        if (rapt_optimizer_steps(run->optimizer) == 50 && run->rate_at_50 > 0)
            assert_ok(context, rapt_optimizer_set_learning_rate(context, run->optimizer, run->rate_at_50));
    }
}

/* What the line calls parameter, norm or the name of a state, all tensors in a row; states are read from a file. The
 * sizes are those that errors are measured by. */
static int collect(golden_run *run, const char *what, double values[ELEMENTS], double sizes[ELEMENTS]) {
    if (strcmp(what, "norm") == 0) {
        values[0] = run->norm;
        sizes[0] = 1;
        return 1;
    }
    bool is_state = strcmp(what, "parameter") != 0, is_square = strcmp(what, "exp_avg_sq") == 0;
    const char *path = in_folder("state.safetensors");
    rapt_safetensors *file = NULL;
    if (is_state) {
        assert_ok(context, rapt_optimizer_save(context, run->optimizer, path));
        assert_ok(context, rapt_safetensors_open(context, path, &file));
    }
    int count = 0;
    for (int i = 0; i < TENSORS; i++) {
        rapt_tensor tensor = run->parameter[i];
        char name[64];
        snprintf(name, sizeof name, "optimizer.%s.%s", tensor_names[i], what);
        if (is_state) assert_ok(context, rapt_safetensors_find(context, file, name, &tensor));
        assert_int_equal(tensor.dtype, run->parameter[i].dtype);
        double size = gradient_sizes[i] * (is_square ? gradient_sizes[i] : 1);
        for (int64_t k = 0; k < rapt_tensor_count(&tensor); k++, count++) {
            values[count] = get_element(&tensor, k);
            sizes[count] = is_state ? fmax(size, largest_magnitude(&tensor)) : 1;
        }
    }
    rapt_safetensors_close(file);
    return count;
}

typedef struct errors {
    double f64, f32, pytorch; /* the largest, PyTorch's in f32 */
} errors;

static void check_line(golden_run *run, const char *line, errors *worst) {
    bool is_f64 = run->parameter[0].dtype == RAPT_F64;
    double values[ELEMENTS], sizes[ELEMENTS], tolerance = is_f64 ? 4e-15 : 6e-7;
    double *largest = is_f64 ? &worst->f64 : &worst->f32;
    char what[32];
    long long number;
    int used;
    assert_int_equal(sscanf(line, "%31s %lld%n", what, &number, &used), 2);
    advance(run, number);
    int count = collect(run, what, values, sizes);
    char *rest = (char *)(uintptr_t)line + used;
    worst->pytorch = fmax(worst->pytorch, strtod(rest, &rest));
    for (int i = 0; i < count; i++) {
        double expected = strtod(rest, &rest), error = fabs(values[i] - expected) / sizes[i];
        if (!(error <= tolerance))
            fail_msg("%s: %s after %lld steps: element %d is %.17g, expected %.17g", run->name, what, number, i,
                     values[i], expected);
        *largest = fmax(*largest, error);
    }
    assert_string_equal(rest, "\n");
}

static void test_golden(void **state) {
    (void)state;
    FILE *file = fopen(RAPT_SOURCE_DIR "/tests/golden/optimizer.txt", "r");
    assert_non_null(file);
    golden_run run[2] = {0};
    int cases = 0, lines = 0;
    errors worst = {0};
    for (char line[2048]; fgets(line, sizeof line, file) != NULL;) {
        if (line[0] == '#') continue;
        bool is_case = strncmp(line, "case ", 5) == 0;
        cases += is_case;
        for (int i = 0; i < 2; i++) {
            if (is_case) end_run(&run[i]);
            if (is_case) begin_run(&run[i], line, i == 0 ? RAPT_F32 : RAPT_F64);
            if (!is_case) check_line(&run[i], line, &worst);
        }
        lines += !is_case;
    }
    for (int i = 0; i < 2; i++) end_run(&run[i]);
    fclose(file);
    assert_int_equal(cases, 10);
    assert_int_equal(lines, 96);
    print_message("largest error: f64 %.2g; f32 %.2g, PyTorch's %.2g\n", worst.f64, worst.f32, worst.pytorch);
    assert_true(worst.f32 <= worst.pytorch);
}

/* ---- 16 bits: parameters are rounded once a step, the state stays f32 ---- */

static void test_16_bits(void **state) {
    (void)state;
    enum { COUNT = 40, STEPS = 20 };
    for (int kind = 0; kind < 4; kind++) {
        rapt_dtype dtype = kind % 2 == 0 ? RAPT_BF16 : RAPT_F16;
        rapt_optimizer_config c = rapt_optimizer_config_default(kind < 2 ? RAPT_SGD : RAPT_ADAMW);
        c.learning_rate = 0.02;
        c.momentum = kind < 2 ? 0.9 : 0;
        rapt_tensor p = random_tensor(5, dtype, 1, &(int64_t){COUNT}), g = make_tensor(dtype, 1, &(int64_t){COUNT});
        rapt_tensor expected = make_tensor(RAPT_F64, 1, &(int64_t){COUNT}), rounded = make_tensor(dtype, 1, p.shape);
        float m[COUNT] = {0}, v[COUNT] = {0};
        rapt_optimizer *optimizer = make_optimizer(&c);
        add(optimizer, "p", &p, &g);
        test_random random = {6};
        for (int t = 1; t <= STEPS; t++) {
            fill_random(&random, &g, 1);
            for (int i = 0; i < COUNT; i++) {
                double x = get_element(&p, i), d = get_element(&g, i), average, square;
                if (c.kind == RAPT_SGD) {
                    average = t == 1 ? d : 0.9 * (double)m[i] + d;
                    x -= c.learning_rate * average;
                } else {
                    average = 0.9 * (double)m[i] + (1 - 0.9) * d;
                    square = 0.999 * (double)v[i] + (1 - 0.999) * d * d;
                    x = x * (1 - 0.02 * 0.01) -
                        0.02 / (1 - pow(0.9, t)) * average / (sqrt(square) / sqrt(1 - pow(0.999, t)) + 1e-8);
                    v[i] = (float)square;
                }
                m[i] = (float)average;
                set_element(&expected, i, x);
            }
            assert_ok(context, rapt_tensor_copy(context, &expected, &rounded));
            step(optimizer);
            assert_true(same_bits(&p, &rounded));
        }
        rapt_optimizer_destroy(optimizer);
        free_tensors(&p, &g, &expected, &rounded);
    }
}

/* Without an epsilon, what has no gradient only decays. */
static void test_no_gradient(void **state) {
    (void)state;
    rapt_optimizer_config c = rapt_optimizer_config_default(RAPT_ADAMW);
    c.epsilon = 0;
    c.learning_rate = 0.5;
    c.weight_decay = 1;
    rapt_tensor p = make_tensor(RAPT_F32, 1, &(int64_t){3}), g = make_tensor(RAPT_F32, 1, &(int64_t){3});
    fill_value(&p, 4);
    set_element(&g, 1, -1e-30); /* whose square an f32 does not hold: the step is 0.5 all the same */
    rapt_optimizer *optimizer = make_optimizer(&c);
    add(optimizer, "p", &p, &g);
    step(optimizer);
    assert_true(get_element(&p, 0) == 2 && get_element(&p, 1) == 2.5 && get_element(&p, 2) == 2);
    rapt_optimizer_destroy(optimizer);
    free_tensors(&p, &g);
}

/* ---- the same bits for any number of threads ---- */

enum { LARGE = 3 };
static const int64_t large_sizes[LARGE] = {50000, 8193, 3};

/* Ten steps with clipping; the sum of everything that came out. */
static uint64_t run_large(const rapt_optimizer_config *config, rapt_dtype dtype) {
    test_random random = {9};
    rapt_tensor p[LARGE], g[LARGE];
    rapt_optimizer *optimizer = make_optimizer(config);
    for (int i = 0; i < LARGE; i++) {
        p[i] = make_tensor(dtype, 1, &large_sizes[i]);
        g[i] = make_tensor(dtype, 1, &large_sizes[i]);
        fill_random(&random, &p[i], 1);
        add(optimizer, (const char *[]){"x", "y", "z"}[i], &p[i], &g[i]);
    }
    uint64_t sum = 0;
    for (int t = 0; t < 10; t++) {
        for (int i = 0; i < LARGE; i++) fill_random(&random, &g[i], 1);
        double norm;
        assert_ok(context, rapt_optimizer_clip(context, optimizer, 10 + t, &norm));
        rapt_tensor norm_tensor = rapt_tensor_of(&norm, RAPT_F64, 0, NULL);
        sum = checksum(sum, &norm_tensor);
        step(optimizer);
    }
    for (int i = 0; i < LARGE; i++) sum = checksum(checksum(sum, &p[i]), &g[i]);
    assert_ok(context, rapt_optimizer_zero_gradients(context, optimizer));
    for (int i = 0; i < LARGE; i++) assert_true(largest_magnitude(&g[i]) == 0);
    rapt_optimizer_destroy(optimizer);
    for (int i = 0; i < LARGE; i++) free_tensors(&p[i], &g[i]);
    return sum;
}

static void test_threads(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    static const int32_t threads[] = {1, 2, 3, 7};
    rapt_context *shared = context;
    for (int i = 0; i < 8; i++) {
        rapt_optimizer_config config = rapt_optimizer_config_default(i / 4 == 0 ? RAPT_SGD : RAPT_ADAMW);
        config.momentum = i / 4 == 0 ? 0.9 : 0;
        config.learning_rate = 0.01;
        uint64_t expected = 0;
        for (int t = 0; t < 4; t++) {
            context = make_context(threads[t], RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
            context->operations_worth_a_thread = 0;
            uint64_t sum = run_large(&config, dtypes[i % 4]);
            if (t == 0) expected = sum;
            assert_true(sum == expected);
            rapt_context_destroy(context);
        }
    }
    context = shared;
}

/* One large parameter and the same in small pieces: one result. */
static void test_pieces(void **state) {
    (void)state;
    enum { PIECES = 23, PIECE = 1001 }; /* no multiple of what the work is cut into */
    rapt_tensor p = random_tensor(1, RAPT_F32, 1, &(int64_t){PIECES * PIECE}), q = convert_tensor(&p, RAPT_F32);
    rapt_tensor g = random_tensor(2, RAPT_F32, 1, p.shape), h = convert_tensor(&g, RAPT_F32);
    for (int kind = 0; kind < 2; kind++) {
        rapt_optimizer_config config = rapt_optimizer_config_default(kind == 0 ? RAPT_SGD : RAPT_ADAMW);
        config.momentum = kind == 0 ? 0.9 : 0;
        rapt_optimizer *whole = make_optimizer(&config), *cut = make_optimizer(&config);
        add(whole, "p", &p, &g);
        for (int64_t i = 0; i < PIECES; i++) {
            char name[8];
            snprintf(name, sizeof name, "%d", (int)i);
            rapt_tensor piece = slice(&q, 0, i * PIECE, PIECE), gradient = slice(&h, 0, i * PIECE, PIECE);
            add(cut, name, &piece, &gradient);
        }
        double norm[2];
        for (int t = 0; t < 3; t++) {
            assert_ok(context, rapt_optimizer_clip(context, whole, INFINITY, &norm[0]));
            assert_ok(context, rapt_optimizer_clip(context, cut, INFINITY, &norm[1]));
            assert_true(fabs(norm[0] - norm[1]) <= 1e-14 * norm[0]); /* summed in another order */
            step(whole);
            step(cut);
            assert_true(same_bits(&p, &q));
        }
        assert_ok(context, rapt_optimizer_clip(context, whole, 0.5, NULL));
        assert_ok(context, rapt_optimizer_clip(context, whole, INFINITY, &norm[0]));
        assert_true(fabs(norm[0] - 0.5) < 1e-6);
        assert_ok(context, rapt_optimizer_zero_gradients(context, whole));
        assert_true(largest_magnitude(&g) == 0);
        assert_ok(context, rapt_tensor_copy(context, &h, &g));
        rapt_optimizer_destroy(whole);
        rapt_optimizer_destroy(cut);
    }
    free_tensors(&p, &q, &g, &h);
}

/* ---- clipping ---- */

static void test_clip(void **state) {
    (void)state;
    rapt_optimizer_config config = rapt_optimizer_config_default(RAPT_SGD);
    rapt_optimizer *optimizer = make_optimizer(&config);
    rapt_tensor p = make_tensor(RAPT_F32, 1, &(int64_t){2}), g = make_tensor(RAPT_F32, 1, &(int64_t){2});
    rapt_tensor q = make_tensor(RAPT_F64, 1, &(int64_t){1}), h = make_tensor(RAPT_F64, 1, &(int64_t){1});
    rapt_tensor none = make_tensor(RAPT_F32, 2, (int64_t[]){0, 3}), none_too = make_tensor(RAPT_F32, 2, none.shape);
    double norm = -1;
    assert_ok(context, rapt_optimizer_clip(context, optimizer, 1, &norm)); /* of nothing */
    assert_true(norm == 0);
    add(optimizer, "p", &p, &g);
    add(optimizer, "none", &none, &none_too);
    add(optimizer, "q", &q, &h);
    set_element(&g, 0, 2);
    set_element(&g, 1, -3);
    set_element(&h, 0, 6);
    for (int i = 0; i < 3; i++) { /* just enough, no limit at all, and nobody who wants to know */
        assert_ok(context, rapt_optimizer_clip(context, optimizer, i == 0 ? 7.00001 : INFINITY, i < 2 ? &norm : NULL));
        assert_true(norm == 7 && get_element(&g, 0) == 2 && get_element(&g, 1) == -3 && get_element(&h, 0) == 6);
    }
    assert_ok(context, rapt_optimizer_clip(context, optimizer, 3.5, &norm));
    double factor = 3.5 / (7 + 1e-6);
    assert_true(norm == 7 && get_element(&g, 0) == (double)(float)(2 * factor) && get_element(&h, 0) == 6 * factor);
    assert_ok(context, rapt_optimizer_clip(context, optimizer, 0, NULL));
    assert_true(get_element(&g, 0) == 0 && get_element(&g, 1) == 0 && get_element(&h, 0) == 0);
    step(optimizer); /* an empty parameter is no trouble */
    rapt_optimizer_destroy(optimizer);
    free_tensors(&p, &g, &q, &h, &none, &none_too);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),  cmocka_unit_test(test_16_bits), cmocka_unit_test(test_no_gradient),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_pieces),  cmocka_unit_test(test_clip),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
