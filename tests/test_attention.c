/* test_attention.c - thousands of random problems: the CPU backend against the naive reference */
#include "attention_case.h"

/* Relative to the largest value, and scaled up with the largest score: its rounding error goes into the exponent. */
typedef struct tolerance {
    double out, weights, lse;
} tolerance;

static tolerance tolerance_for(const attention_case *c, const attention_result *expected) {
    double scale = c->options.set_scale ? fabs(c->options.scale) : 1 / sqrt((double)c->d);
    double score = scale * largest_magnitude(&c->q) * largest_magnitude(&c->k) * sqrt((double)c->d);
    double lse = largest_magnitude(&expected->lse);
    if (score < 1) score = 1;
    if (lse > score && lse < 1e37) score = lse;
    double base = c->dtype == RAPT_F64 ? 1e-13 : 2e-6;
    tolerance t = {
        .weights = base * score, .lse = base * score, .out = base * score * largest_magnitude(&c->v) + 1e-44};
    /* 16-bit storage: half a unit in the last place of the result; weights and outputs are below twice the largest. */
    double rounding = c->dtype == RAPT_BF16 ? 0x1p-8 : c->dtype == RAPT_F16 ? 0x1p-11 : 0;
    t.weights += rounding + (c->dtype == RAPT_F16 ? 0x1p-24 : 0);
    t.out += rounding * largest_magnitude(&c->v) + (c->dtype == RAPT_F16 ? 0x1p-24 : 0);
    return t;
}

/* Non-finite matches non-finite: 0 * inf in f32 may be a tiny number times inf in double precision. */
static double difference(const rapt_tensor *a, const rapt_tensor *b) {
    double largest = 0;
    int64_t count = rapt_tensor_count(a);
    for (int64_t i = 0; i < count; i++) {
        double x = get_element(a, i), y = get_element(b, i);
        if (!isfinite(x) && !isfinite(y)) continue;
        if (x < -1e38 && y < -1e38) continue; /* the log-sum-exp of scores that overflowed */
        double apart = fabs(x - y);
        if (!(apart <= largest)) largest = apart;
    }
    return largest;
}

static void check_case(rapt_context *cpu, rapt_context *reference, const attention_case *c, uint64_t seed) {
    attention_result expected = run_attention_case(reference, c, true), actual = run_attention_case(cpu, c, true);
    tolerance allowed = tolerance_for(c, &expected);
    double out = difference(&actual.out, &expected.out), lse = difference(&actual.lse, &expected.lse);
    double weights = difference(&actual.weights, &expected.weights);
    if (!(out <= allowed.out && lse <= allowed.lse && weights <= allowed.weights)) {
        char text[500];
        describe_attention_case(c, text, sizeof text);
        fail_msg("seed %llu: out %g of %g, lse %g of %g, weights %g of %g\n%s", (unsigned long long)seed, out,
                 allowed.out, lse, allowed.lse, weights, allowed.weights, text);
    }
    attention_result without = run_attention_case(cpu, c, false);
    assert_true(same_result(&actual, &without)); /* asking for weights changes no bit of the rest */
    free_attention_result(&expected);
    free_attention_result(&actual);
    free_attention_result(&without);
}

static void sweep(rapt_dtype dtype, int cases) {
    rapt_context *reference = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    rapt_context *cpu[2] = {make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU),
                            make_context(3, RAPT_ISA_AUTO, RAPT_BACKEND_CPU)};
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        uint64_t seed = (uint64_t)dtype * 1000000 + (uint64_t)i;
        test_random random = {seed};
        attention_case c = make_attention_case(&random, dtype, i % 10 == 0 ? 3000000 : 200000);
        check_case(cpu[i % 2], reference, &c, seed);
        free_attention_case(&c);
    }
    rapt_context_destroy(cpu[0]);
    rapt_context_destroy(cpu[1]);
    rapt_context_destroy(reference);
}

static void test_f32(void **state) {
    (void)state;
    sweep(RAPT_F32, 2000);
}
static void test_f64(void **state) {
    (void)state;
    sweep(RAPT_F64, 1000);
}
static void test_bf16(void **state) {
    (void)state;
    sweep(RAPT_BF16, 300);
}
static void test_f16(void **state) {
    (void)state;
    sweep(RAPT_F16, 300);
}

/* ---- single facts ---- */

typedef struct small_problem {
    rapt_tensor q, k, v, out, weights, lse;
    rapt_options options;
} small_problem;

static small_problem make_small(int64_t l, int64_t s, int64_t d) {
    test_random random = {77};
    small_problem p = {.q = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, l, d}),
                       .k = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, s, d}),
                       .v = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, s, d}),
                       .out = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, l, d}),
                       .weights = make_tensor(RAPT_F32, 3, (int64_t[]){1, l, s}),
                       .lse = make_tensor(RAPT_F32, 3, (int64_t[]){1, 1, l})};
    fill_random(&random, &p.q, 1);
    fill_random(&random, &p.k, 1);
    fill_random(&random, &p.v, 1);
    return p;
}

static void run_small(small_problem *p) {
    rapt_context *context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    p->options.weights = &p->weights;
    p->options.lse = &p->lse;
    assert_ok(context, rapt_attention_forward(context, &p->q, &p->k, &p->v, &p->options, &p->out));
    rapt_context_destroy(context);
}

static void free_small(small_problem *p) {
    rapt_tensor *tensors[] = {&p->q, &p->k, &p->v, &p->out, &p->weights, &p->lse};
    for (int i = 0; i < 6; i++) free_tensor(tensors[i]);
}

static void test_row_that_sees_nothing(void **state) {
    (void)state;
    small_problem p = make_small(4, 6, 5);
    rapt_tensor mask = make_tensor(RAPT_BOOL, 2, (int64_t[]){4, 6});
    for (int64_t j = 0; j < 6; j++) set_element(&mask, 2 * 6 + j, 1);
    p.options.attn_mask = &mask;
    run_small(&p);
    for (int64_t d = 0; d < 5; d++)
        assert_true(get_element(&p.out, 2 * 5 + d) == 0 && !signbit(get_element(&p.out, 2 * 5 + d)));
    for (int64_t j = 0; j < 6; j++) assert_true(get_element(&p.weights, 2 * 6 + j) == 0);
    assert_true(get_element(&p.lse, 2) == -INFINITY);
    assert_true(isfinite(get_element(&p.lse, 1)));
    free_tensor(&mask);
    free_small(&p);
}

/* The lowest finite number, as Transformers masks with: a number, so a row of nothing else is uniform. */
static void test_lowest_finite_mask_is_a_number(void **state) {
    (void)state;
    small_problem p = make_small(2, 4, 3);
    rapt_tensor mask = make_tensor(RAPT_F32, 2, (int64_t[]){2, 4});
    rapt_tensor padding = make_tensor(RAPT_F32, 1, (int64_t[]){4});
    fill_value(&mask, -3.4028234663852886e38);
    set_element(&mask, 4, 0); /* the second query sees its first key properly */
    fill_value(&padding, -3.4028234663852886e38);
    set_element(&padding, 0, 0);
    p.options.attn_mask = &mask;
    run_small(&p);
    for (int64_t j = 0; j < 4; j++) assert_true(get_element(&p.weights, j) == 0.25);
    assert_true(get_element(&p.weights, 4) == 1);
    p.options.key_padding_mask = &padding; /* two lowest numbers together are still a number */
    run_small(&p);
    for (int64_t j = 0; j < 4; j++) assert_true(isfinite(get_element(&p.weights, j)) && get_element(&p.weights, j) > 0);
    free_tensor(&mask);
    free_tensor(&padding);
    free_small(&p);
}

/* The highest finite number is a number too: it wins. Only infinity has no answer. */
static void test_highest_finite_mask_wins(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F32, RAPT_F64};
    static const double values[] = {3.4028234663852886e38, 2.5e38, 1e300};
    for (int i = 0; i < 3; i++) {
        small_problem p = make_small(1, 4, 3);
        rapt_tensor mask = make_tensor(dtypes[i], 2, (int64_t[]){1, 4});
        set_element(&mask, 2, values[i]);
        p.options.attn_mask = &mask;
        run_small(&p);
        for (int64_t j = 0; j < 4; j++) assert_true(get_element(&p.weights, j) == (j == 2 ? 1 : 0));
        set_element(&mask, 2, INFINITY);
        run_small(&p);
        assert_true(isnan(get_element(&p.out, 0)));
        free_tensor(&mask);
        free_small(&p);
    }
}

/* Values that overflow in one cut of keys must not spoil a row to which that cut adds nothing. */
static void test_huge_values_that_weigh_nothing(void **state) {
    (void)state;
    for (int order = 0; order < 2; order++) { /* the key that counts comes last, or first */
        small_problem p = make_small(1, 600, 1);
        int64_t counts = order == 0 ? 599 : 0;
        fill_value(&p.q, 1);
        fill_value(&p.k, 0);
        fill_value(&p.v, 3e38);
        set_element(&p.k, counts, 200);
        set_element(&p.v, counts, 1);
        for (int64_t j = 1; j < 80; j++) set_element(&p.v, order == 0 ? 599 - j : j, 1); /* its own cut stays finite */
        run_small(&p);
        assert_true(get_element(&p.out, 0) == 1);
        free_small(&p);
    }
}

static void test_weights_of_a_row_sum_to_one(void **state) {
    (void)state;
    small_problem p = make_small(3, 700, 16);
    run_small(&p);
    for (int64_t i = 0; i < 3; i++) {
        double sum = 0;
        for (int64_t j = 0; j < 700; j++) sum += get_element(&p.weights, i * 700 + j);
        assert_true(fabs(sum - 1) < 1e-6);
    }
    free_small(&p);
}

/* exp over its whole range, through rows of two keys whose scores differ by x: weights are the logistic function. */
static void test_exponential(void **state) {
    (void)state;
    enum { STEPS = 20001 };
    small_problem p = make_small(STEPS, 2, 1);
    p.options.set_scale = true;
    p.options.scale = 1;
    set_element(&p.k, 0, 0);
    set_element(&p.k, 1, 1);
    for (int64_t i = 0; i < STEPS; i++) set_element(&p.q, i, ((double)i - STEPS / 2) * 0.01);
    run_small(&p);
    for (int64_t i = 0; i < STEPS; i++) {
        double x = get_element(&p.q, i), expected = 1 / (1 + exp(-x)), actual = get_element(&p.weights, 2 * i + 1);
        double lost = x < -85 ? 1e-37 : 0; /* exactly 0 far below */
        assert_true(fabs(actual - expected) <= expected * (6e-7 + 1e-7 * fabs(x)) + lost);
    }
    free_small(&p);
}

/* A band that begins within a chain of products: what lies before it in the chain is weighed 0, and may be anything. */
static void test_values_before_the_band(void **state) {
    (void)state;
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    for (int64_t d = 16; d <= 20; d += 4) { /* read in place, and packed */
        for (int64_t first = 1; first < 300; first += 5) {
            test_random random = {1};
            rapt_tensor q = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, 1, d}), out = make_tensor(RAPT_F32, 4, q.shape);
            rapt_tensor k = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, 320, d}), v = make_tensor(RAPT_F32, 4, k.shape);
            fill_random(&random, &q, 1);
            fill_random(&random, &k, 1);
            fill_random(&random, &v, 1);
            for (int64_t i = 0; i < first * d; i++) set_element(&v, i, i % 2 == 0 ? NAN : INFINITY);
            rapt_options options = {.limit_left = true, .offset = first};
            assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &options, &out));
            for (int64_t i = 0; i < d; i++) assert_true(isfinite(get_element(&out, i)));
            free_tensor(&q);
            free_tensor(&k);
            free_tensor(&v);
            free_tensor(&out);
        }
    }
    rapt_context_destroy(context);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_values_before_the_band),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_row_that_sees_nothing),
        cmocka_unit_test(test_lowest_finite_mask_is_a_number),
        cmocka_unit_test(test_highest_finite_mask_wins),
        cmocka_unit_test(test_huge_values_that_weigh_nothing),
        cmocka_unit_test(test_weights_of_a_row_sum_to_one),
        cmocka_unit_test(test_exponential),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
