/* test_dropout.c - which weights dropout takes: the rule of the manual, its statistics, and where the seed comes from */
#include "backward_case.h"

static rapt_context *contexts[2]; /* reference and CPU; the second is NULL while it draws nothing */

static int set_up(void **state) {
    (void)state;
    contexts[0] = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    contexts[1] = make_context(3, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    if (!has_backward(contexts[1])) {
        print_message("the CPU backend has no dropout yet: not tested\n");
        rapt_context_destroy(contexts[1]);
        contexts[1] = NULL;
    }
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    rapt_context_destroy(contexts[0]);
    rapt_context_destroy(contexts[1]);
    return 0;
}

/* The rule: Philox with key = seed and counter = offset, n*H+h, i, j/4; the upper half of the offset is in the key. */
static bool stays(const rapt_options *o, int64_t row, int64_t query, int64_t key) {
    uint32_t counter[4] = {(uint32_t)o->dropout_offset, (uint32_t)row, (uint32_t)query, (uint32_t)(key / 4)};
    uint32_t random[4];
    rapt_philox(o->dropout_seed ^ (o->dropout_offset & UINT64_C(0xffffffff00000000)), counter, random);
    return (double)random[key % 4] >= floor(o->dropout * 4294967296.0);
}

/* ---- what is drawn ---- */

/* All scores are equal, so that each weight is 1 / S, times 0 or 1 / (1 - dropout). */
typedef struct uniform {
    int64_t n, heads, l, s;
    rapt_tensor q, k, v, out, lse, weights; /* weights [N,H,L,S] */
    rapt_options options;
} uniform;

static void make_uniform(uniform *u, int64_t n, int64_t heads, int64_t l, int64_t s) {
    *u = (uniform){.n = n, .heads = heads, .l = l, .s = s};
    u->q = make_tensor(RAPT_F32, 4, (int64_t[]){n, heads, l, 1});
    u->k = make_tensor(RAPT_F32, 4, (int64_t[]){n, heads, s, 1});
    u->v = make_tensor(RAPT_F32, 4, (int64_t[]){n, heads, s, 1});
    u->out = make_tensor(RAPT_F32, 4, (int64_t[]){n, heads, l, 1});
    u->lse = make_tensor(RAPT_F32, 3, (int64_t[]){n, heads, l});
    u->weights = make_tensor(RAPT_F32, 4, (int64_t[]){n, heads, l, s});
    fill_value(&u->v, 1);
    u->options = (rapt_options){.lse = &u->lse, .weights = &u->weights, .per_head_weights = true};
}

static void free_uniform(uniform *u) {
    rapt_tensor *all[] = {&u->q, &u->k, &u->v, &u->out, &u->lse, &u->weights};
    for (int t = 0; t < 6; t++) free_tensor(all[t]);
}

static void draw(rapt_context *context, uniform *u, double dropout, uint64_t seed, uint64_t offset) {
    u->options.dropout = dropout;
    u->options.set_dropout_seed = true;
    u->options.dropout_seed = seed;
    u->options.dropout_offset = offset;
    assert_ok(context, rapt_attention_forward(context, &u->q, &u->k, &u->v, &u->options, &u->out));
}

static void test_rule(void **state) {
    (void)state;
    static const double rates[] = {0, 1e-10, 0.1, 0.5, 0.9, 1 - 1e-9, 1};
    static const uint64_t offsets[] = {0, 1, UINT32_MAX, UINT64_C(0x100000000), UINT64_MAX};
    for (int b = 0; b < 2 && contexts[b] != NULL; b++) {
        uniform u;
        make_uniform(&u, 2, 3, 5, 523);
        for (int r = 0; r < 7; r++) {
            for (int t = 0; t < 5; t++) {
                draw(contexts[b], &u, rates[r], UINT64_C(0x123456789abcdef0) + (uint64_t)t, offsets[t]);
                double kept = rates[r] < 1 ? 1 / (523 * (1 - rates[r])) : 0;
                int64_t count = rapt_tensor_count(&u.weights);
                for (int64_t e = 0; e < count; e++) {
                    double weight = get_element(&u.weights, e);
                    bool is_kept = stays(&u.options, e / 523 / 5, e / 523 % 5, e % 523);
                    assert_true(is_kept ? fabs(weight - kept) <= 1e-6 * kept : weight == 0 && !signbit(weight));
                }
                for (int64_t row = 0; row < 30; row++) {
                    double sum = 0;
                    for (int64_t j = 0; j < 523; j++) sum += get_element(&u.weights, row * 523 + j);
                    assert_true(fabs(get_element(&u.out, row) - sum) <= 1e-5 * (sum + 1e-30));
                    assert_true(fabs(get_element(&u.lse, row) - log(523)) < 1e-6);
                }
            }
        }
        free_uniform(&u);
    }
}

/* Of any problem: dropped weights are the plain ones times 0 or 1 / (1 - dropout), the output is made of them, and the
 * log-sum-exp has the bits that it has without dropout. */
static void check_random_case(rapt_context *context, attention_case *c, test_random *random) {
    c->options.per_head_weights = true;
    attention_result plain = run_attention_case(context, c, true);
    c->options.dropout = random_unit(random);
    c->options.set_dropout_seed = true;
    c->options.dropout_seed = random_bits(random);
    c->options.dropout_offset = random_bits(random);
    attention_result dropped = run_attention_case(context, c, true), without = run_attention_case(context, c, false);
    assert_true(same_result(&dropped, &without)); /* asking for weights changes no bit of the rest */
    assert_true(same_bits(&plain.lse, &dropped.lse));
    double tolerance = c->dtype == RAPT_F64 ? 1e-14 : 1e-6, kept = 1 / (1 - c->options.dropout);
    int64_t rows = c->n * c->heads * c->l, group = c->heads / c->kv_heads;
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = row / c->l, i = row % c->l, kv_head = head / c->heads * c->kv_heads + head % c->heads / group;
        for (int64_t j = 0; j < c->s; j++) {
            double weight = get_element(&dropped.weights, row * c->s + j);
            double expected = (stays(&c->options, head, i, j) ? kept : 0) * get_element(&plain.weights, row * c->s + j);
            if (isfinite(expected)) assert_true(fabs(weight - expected) <= tolerance * fabs(expected) + 1e-37 * kept);
        }
        for (int64_t d = 0; d < c->dv; d += 7) {
            double sum = 0, magnitude = 0;
            for (int64_t j = 0; j < c->s; j++) {
                double weight = get_element(&dropped.weights, row * c->s + j);
                double value = get_element(&c->v, (kv_head * c->s + j) * c->dv + d);
                bool is_seen = get_element(&plain.weights, row * c->s + j) != 0;
                if (is_seen) sum += weight * value;
                if (is_seen) magnitude += fabs(weight * value);
            }
            double out = get_element(&dropped.out, row * c->dv + d);
            if (isfinite(sum)) assert_true(fabs(out - sum) <= 4 * tolerance * magnitude + 1e-37 * kept);
        }
    }
    free_attention_result(&plain);
    free_attention_result(&dropped);
    free_attention_result(&without);
}

static void test_random_problems(void **state) {
    (void)state;
    for (int b = 0; b < 2 && contexts[b] != NULL; b++) {
        for (int i = 0; i < (test_is_quick() ? 30 : 300); i++) {
            test_random random = {6000 + (uint64_t)i};
            attention_case c = make_attention_case(&random, i % 3 == 0 ? RAPT_F64 : RAPT_F32, 100000);
            check_random_case(contexts[b], &c, &random);
            free_attention_case(&c);
        }
    }
}

/* ---- statistics ---- */

/* Of pairs of draws (0 or 1), those at the same place of two arrays. */
static void check_uncorrelated(const char *what, const double *a, const double *b, int64_t count, double rate) {
    double sum = 0, variance = rate * (1 - rate);
    for (int64_t e = 0; e < count; e++) sum += (a[e] - (1 - rate)) * (b[e] - (1 - rate));
    double correlation = sum / (double)count / variance;
    if (!(fabs(correlation) < 5 / sqrt((double)count))) {
        fail_msg("%s: correlation %g over %lld pairs at dropout %g", what, correlation, (long long)count, rate);
    }
}

static double *drawn(uniform *u, double rate, uint64_t seed, uint64_t offset) {
    int64_t count = rapt_tensor_count(&u->weights);
    double *kept = calloc((size_t)count + 1, sizeof *kept);
    assert_non_null(kept);
    draw(contexts[contexts[1] != NULL], u, rate, seed, offset);
    for (int64_t e = 0; e < count; e++) kept[e] = get_element(&u->weights, e) > 0;
    return kept;
}

static void test_statistics(void **state) {
    (void)state;
    enum { N = 2, H = 4, L = 128, S = 128, ALL = N * H * L * S };
    static const double rates[] = {0.05, 0.3, 0.5, 0.8};
    static const struct {
        const char *what;
        int64_t step;
    } neighbours[] = {{"next key", 1},
                      {"key in the next block", 4},
                      {"next query", S},
                      {"next head", L * S},
                      {"next sequence", H * L * S}};
    uniform u;
    make_uniform(&u, N, H, L, S);
    for (int r = 0; r < 4; r++) {
        double rate = rates[r], sum = 0;
        double *kept = drawn(&u, rate, 77, 5);
        for (int64_t e = 0; e < ALL; e++) sum += kept[e];
        assert_true(fabs(sum / ALL - (1 - rate)) < 5 * sqrt(rate * (1 - rate) / ALL));
        for (int i = 0; i < 5; i++) {
            check_uncorrelated(neighbours[i].what, kept, kept + neighbours[i].step, ALL - neighbours[i].step, rate);
        }
        double *other = drawn(&u, rate, 77, 6);
        check_uncorrelated("next call", kept, other, ALL, rate);
        free(other);
        other = drawn(&u, rate, 78, 5);
        check_uncorrelated("next seed", kept, other, ALL, rate);
        free(other);
        other = drawn(&u, rate, 77, 5 + UINT64_C(0x100000000));
        check_uncorrelated("2^32 calls later", kept, other, ALL, rate);
        free(other);
        other = drawn(&u, rate, 77, 5);
        assert_memory_equal(other, kept, ALL * sizeof *kept);
        free(other);
        free(kept);
    }
    free_uniform(&u);
}

/* ---- where seed and offset come from ---- */

static rapt_tensor weights_of(rapt_context *context, uniform *u) {
    assert_ok(context, rapt_attention_forward(context, &u->q, &u->k, &u->v, &u->options, &u->out));
    return convert_tensor(&u->weights, RAPT_F32);
}

static void test_seeds(void **state) {
    (void)state;
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    uniform u, given;
    make_uniform(&u, 1, 2, 3, 64);
    make_uniform(&given, 1, 2, 3, 64);
    u.options.dropout = 0.5;
    for (int round = 0; round < 3; round++) { /* a new context's seed is 0; setting one begins at offset 0 again */
        uint64_t seed = round == 0 ? 0 : 40 + (uint64_t)(round / 2);
        if (round > 0) assert_ok(context, rapt_context_set_seed(context, seed));
        for (uint64_t call = 0; call < 3; call++) {
            rapt_tensor own = weights_of(context, &u);
            draw(contexts[0], &given, 0.5, seed, call);
            assert_true(same_bits(&own, &given.weights));
            free_tensor(&own);
            /* What does not count: no dropout, a seed of its own, a failure, a backward. */
            u.options.dropout = 0;
            own = weights_of(context, &u);
            free_tensor(&own);
            draw(context, &given, 0.25, 9, 9);
            u.options.dropout = 2;
            assert_int_equal(rapt_attention_forward(context, &u.q, &u.k, &u.v, &u.options, &u.out),
                             RAPT_ERROR_ARGUMENT);
            u.options.dropout = 0.5;
            rapt_attention_gradients none = {0};
            given.options.weights = NULL;
            given.options.per_head_weights = false;
            assert_ok(context, rapt_attention_backward(context, &given.q, &given.k, &given.v, &given.options,
                                                       &given.out, &given.out, NULL, &none));
            given.options.weights = &given.weights;
            given.options.per_head_weights = true;
        }
    }
    assert_int_equal(rapt_context_set_seed(NULL, 1), RAPT_ERROR_NULL);
    free_uniform(&u);
    free_uniform(&given);
    rapt_context_destroy(context);
}

/* ---- the backward draws what the forward drew ---- */

static void test_backward_draws_the_same(void **state) {
    (void)state;
    for (int b = 0; b < 2 && contexts[b] != NULL; b++) {
        uniform u; /* one query of one feature: the gradient of value j is weight j */
        make_uniform(&u, 3, 2, 1, 700);
        rapt_tensor d_out = make_tensor(RAPT_F32, 4, u.out.shape), d_value = make_tensor(RAPT_F32, 4, u.v.shape);
        fill_value(&d_out, 1);
        for (int i = 0; i < 20; i++) {
            double rate = i == 0 ? 0 : i == 19 ? 1 : 0.05 * i;
            draw(contexts[b], &u, rate, (uint64_t)i, 3 * (uint64_t)i);
            rapt_attention_gradients gradients = {.value = &d_value};
            assert_ok(contexts[b], rapt_attention_backward(contexts[b], &u.q, &u.k, &u.v, &u.options, &u.out, &d_out,
                                                           NULL, &gradients));
            int64_t count = rapt_tensor_count(&u.weights);
            for (int64_t e = 0; e < count; e++) {
                double weight = get_element(&u.weights, e), gradient = get_element(&d_value, e);
                assert_true(weight == 0 ? gradient == 0 : fabs(gradient - weight) <= 1e-6 * weight);
            }
        }
        free_tensor(&d_out);
        free_tensor(&d_value);
        free_uniform(&u);
    }
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule),  cmocka_unit_test(test_random_problems),         cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_seeds), cmocka_unit_test(test_backward_draws_the_same),
    };
    return cmocka_run_group_tests_name("dropout", tests, set_up, tear_down);
}
