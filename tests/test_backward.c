/* test_backward.c - gradients of the operator: the reference against finite differences, the CPU backend against the
 * reference, every way of computing them against each other */
#include "backward_case.h"

static rapt_context *reference_context(void) { return make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE); }

/* NULL, with a message, while the CPU backend has no backward. */
static rapt_context *cpu_context(int32_t threads) {
    rapt_context *context = make_context(threads, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    if (has_backward(context)) return context;
    print_message("the CPU backend has no backward yet: not tested\n");
    rapt_context_destroy(context);
    return NULL;
}

/* ---- the reference against finite differences ---- */

static double inner_product(const rapt_tensor *a, const rapt_tensor *b) {
    double sum = 0;
    int64_t count = a->data != NULL ? rapt_tensor_count(a) : 0;
    for (int64_t i = 0; i < count; i++) sum += get_element(a, i) * get_element(b, i);
    return sum;
}

/* The scalar whose gradient the backward computes. */
static double loss(rapt_context *context, const backward_case *c) {
    backward_result r = run_forward_of(context, c);
    double sum = inner_product(&r.out, &c->d_out) + inner_product(&r.weights, &c->d_weights);
    free_backward_result(&r);
    return sum;
}

/* The derivative of the loss along a direction of one tensor, by differences of fourth order. */
static double difference_quotient(rapt_context *context, const backward_case *c, const rapt_tensor *variable,
                                  const double *direction) {
    static const double steps[] = {1, -1, 2, -2}, factors[] = {8, -8, -1, 1};
    const double h = 1e-3;
    int64_t count = rapt_tensor_count(variable);
    double *kept = calloc((size_t)count + 1, sizeof *kept), sum = 0;
    assert_non_null(kept);
    for (int64_t i = 0; i < count; i++) kept[i] = get_element(variable, i);
    for (int s = 0; s < 4; s++) {
        for (int64_t i = 0; i < count; i++) set_element(variable, i, kept[i] + steps[s] * h * direction[i]);
        sum += factors[s] * loss(context, c);
    }
    for (int64_t i = 0; i < count; i++) set_element(variable, i, kept[i]);
    free(kept);
    return sum / (12 * h);
}

/* The gradient of element i of the variable; an extra key's is the sum over sequences. */
static double gradient_of(const backward_case *c, const backward_result *r, int which, int64_t count, int64_t i) {
    const rapt_tensor *gradient = &r->gradient[which];
    if (which < D_EXTRA_K) return get_element(gradient, i) - (c->accumulate ? start_value(which, i) : 0);
    double sum = 0;
    for (int64_t n = 0; n < c->f.n; n++) sum += get_element(gradient, n * count + i);
    return sum;
}

static void check_direction(rapt_context *context, const backward_case *c, const backward_result *r, int which,
                            const rapt_tensor *variable, const double *direction, uint64_t seed) {
    int64_t count = rapt_tensor_count(variable);
    double expected = difference_quotient(context, c, variable, direction), actual = 0, magnitude = 1;
    for (int64_t i = 0; i < count; i++) {
        double part = direction[i] * gradient_of(c, r, which, count, i);
        actual += part;
        magnitude += fabs(part);
    }
    if (!(fabs(actual - expected) <= 1e-9 * magnitude)) {
        char text[700];
        describe_backward_case(c, text, sizeof text);
        fail_msg("seed %llu: the derivative by %s is %.15g, differences say %.15g\n%s", (unsigned long long)seed,
                 gradient_names[which], actual, expected, text);
    }
}

static void check_against_differences(rapt_context *context, const backward_case *c, test_random *random,
                                      bool each_element, uint64_t seed) {
    backward_result r = run_backward_case(context, c);
    const rapt_tensor *variables[GRADIENTS] = {&c->f.q,       &c->f.k,     &c->f.v,    &c->f.mask,
                                               &c->f.padding, &c->extra_k, &c->extra_v};
    for (int g = 0; g < GRADIENTS; g++) {
        if (r.gradient[g].data == NULL) continue;
        int64_t count = rapt_tensor_count(variables[g]);
        double *direction = calloc((size_t)count + 1, sizeof *direction);
        assert_non_null(direction);
        for (int64_t i = 0; i < count; i++) { /* what masks stays there */
            bool can_move = isfinite(get_element(variables[g], i));
            direction[i] = can_move ? 2 * random_unit(random) - 1 : 0;
            if (!can_move) assert_true(gradient_of(c, &r, g, count, i) == 0);
        }
        check_direction(context, c, &r, g, variables[g], direction, seed);
        for (int64_t i = 0; i < count && each_element; i++) {
            if (!isfinite(get_element(variables[g], i))) continue;
            for (int64_t other = 0; other < count; other++) direction[other] = other == i;
            check_direction(context, c, &r, g, variables[g], direction, seed);
        }
        free(direction);
    }
    free_backward_result(&r);
}

static void test_finite_differences(void **state) {
    (void)state;
    rapt_context *context = reference_context();
    int cases = test_is_quick() ? 500 : 10000;
    for (int i = 0; i < cases; i++) {
        test_random random = {5000000 + (uint64_t)i};
        bool each_element = i % 10 == 0;
        backward_case c = make_tame_backward_case(&random, each_element ? 4 : 9);
        check_against_differences(context, &c, &random, each_element, (uint64_t)i);
        free_backward_case(&c);
    }
    rapt_context_destroy(context);
}

/* ---- the CPU backend against the reference ---- */

/* For each element of each gradient the sum of the magnitudes of the terms that it is the sum of, which is what rounding
 * errors are relative to; and the largest magnitude of a score, whose rounding error goes into the exponent. */
typedef struct magnitudes {
    double *gradient[GRADIENTS];
    double score;
} magnitudes;

static void add_finite(double *sum, double term) { /* what is not finite is in no finite gradient */
    if (isfinite(term)) *sum += fabs(term);
}

/* One row; P are the weights [S'] before dropout. The tensors of a widened case are contiguous f64. */
static void add_row(const backward_case *c, const attn_problem *p, const mask_gradient *masks, const double *P,
                    int64_t n, int64_t h, int64_t i, double *d_probability, magnitudes *m) {
    const attention_case *f = &c->f;
    int64_t kv = h / (f->heads / f->kv_heads), keys = f->s + c->extra, row = (n * f->heads + h) * f->l + i;
    const double *q = (const double *)f->q.data + row * f->d, *d_out = (const double *)c->d_out.data + row * f->dv;
    const double *k = f->k.data, *v = f->v.data, *extra_k = c->extra_k.data, *extra_v = c->extra_v.data;
    double mean = 0, kept = f->options.dropout < 1 ? 1 / (1 - f->options.dropout) : 0;
    for (int64_t j = 0; j < keys; j++) {
        if (!(P[j] > 0)) continue; /* not seen, or so far below the others that it adds nothing anywhere */
        bool real = j < f->s;
        int64_t at = real ? (n * f->kv_heads + kv) * f->s + j : kv * c->extra + j - f->s;
        const double *value = (real ? v : extra_v) + at * f->dv, *key = (real ? k : extra_k) + at * f->d;
        double score = 0, dw = 0;
        for (int64_t d = 0; d < f->d; d++) add_finite(&score, p->scale * q[d] * key[d]);
        m->score = fmax(m->score, score + 6); /* masks are below 3 */
        for (int64_t d = 0; d < f->dv; d++) {
            add_finite(&dw, d_out[d] * value[d]);
            int64_t to = real ? at : (n * f->kv_heads + kv) * c->extra + j - f->s;
            add_finite(&m->gradient[real ? D_VALUE : D_EXTRA_V][to * f->dv + d], P[j] * kept * d_out[d]);
        }
        if (c->d_weights.data != NULL) {
            bool per_head = f->options.per_head_weights;
            int64_t weight = (per_head ? row : n * f->l + i) * keys + j;
            add_finite(&dw, ((const double *)c->d_weights.data)[weight] / (per_head ? 1 : (double)f->heads));
        }
        d_probability[j] = kept * dw;
        mean += P[j] * d_probability[j];
    }
    for (int64_t j = 0; j < keys; j++) {
        if (!(P[j] > 0)) continue;
        bool real = j < f->s;
        int64_t at = real ? (n * f->kv_heads + kv) * f->s + j : kv * c->extra + j - f->s;
        int64_t to = real ? at : (n * f->kv_heads + kv) * c->extra + j - f->s;
        const double *key = (real ? k : extra_k) + at * f->d;
        double d_score = (P[j] + (P[j] < 0x1p-100 ? 0x1p-100 : 0)) * (d_probability[j] + mean);
        for (int64_t d = 0; d < f->d; d++) {
            add_finite(&m->gradient[D_QUERY][row * f->d + d], p->scale * d_score * key[d]);
            add_finite(&m->gradient[real ? D_KEY : D_EXTRA_K][to * f->d + d], p->scale * d_score * q[d]);
        }
        for (int which = 0; which < 2 && real; which++) {
            const int64_t *size = masks[which].size;
            if (masks[which].data == NULL) continue;
            int64_t a = size[0] > 1 ? n : 0, b = size[1] > 1 ? h : 0, e = size[2] > 1 ? i : 0;
            m->gradient[which == 0 ? D_MASK : D_PADDING][((a * size[1] + b) * size[2] + e) * f->s + j] += d_score;
        }
    }
}

/* `wide` is a widened case, `expected` its gradients. */
static magnitudes find_magnitudes(rapt_context *reference, const backward_case *wide, const backward_result *expected) {
    const attention_case *f = &wide->f;
    magnitudes m = {.score = 1};
    for (int g = 0; g < GRADIENTS; g++) {
        const rapt_tensor *gradient = &expected->gradient[g];
        int64_t count = gradient->data != NULL ? rapt_tensor_count(gradient) : 0;
        m.gradient[g] = calloc((size_t)count + 1, sizeof(double));
        assert_non_null(m.gradient[g]);
        for (int64_t i = 0; i < count && wide->accumulate && g < D_EXTRA_K; i++) {
            m.gradient[g][i] = fabs(start_value(g, i));
        }
    }
    if (f->n == 0 || f->l == 0) return m;
    backward_case plain = *wide; /* without dropout, with weights of each head */
    int64_t keys = f->s + wide->extra;
    plain.d_weights = make_tensor(RAPT_F64, 4, (int64_t[]){f->n, f->heads, f->l, keys});
    plain.f.options.per_head_weights = true;
    plain.f.options.dropout = 0;
    backward_result r = run_forward_of(reference, &plain);
    attn_problem p;
    mask_gradient masks[2] = {{0}, {0}};
    const rapt_tensor *d_mask = &expected->gradient[D_MASK], *d_padding = &expected->gradient[D_PADDING];
    assert_ok(reference, rapt_attn_tensors(reference, &f->q, &f->k, &f->v, NULL, &r.out, &p));
    if (f->options.set_scale) p.scale = f->options.scale;
    assert_ok(reference,
              rapt_take_mask_gradient(reference, false, d_mask->data != NULL ? d_mask : NULL, &f->mask, &p, &masks[0]));
    assert_ok(reference, rapt_take_mask_gradient(reference, true, d_padding->data != NULL ? d_padding : NULL,
                                                 &f->padding, &p, &masks[1]));
    double *d_probability = calloc((size_t)keys + 1, sizeof *d_probability);
    assert_non_null(d_probability);
    for (int64_t row = 0; row < f->n * f->heads * f->l; row++) {
        add_row(wide, &p, masks, (const double *)r.weights.data + row * keys, row / f->l / f->heads,
                row / f->l % f->heads, row % f->l, d_probability, &m);
    }
    free(d_probability);
    free_tensor(&plain.d_weights);
    free_backward_result(&r);
    return m;
}

/* Half a unit in the last place of a result that is stored in this dtype. */
static double rounding_of(rapt_dtype dtype, double value) {
    switch (dtype) {
    case RAPT_BF16: return 0x1p-8 * fabs(value) + 0x1p-134;
    case RAPT_F16: return 0x1p-11 * fabs(value) + 0x1p-25;
    case RAPT_F32: return 0x1p-24 * fabs(value);
    default: return 0;
    }
}

static double largest_finite(rapt_dtype dtype) { return dtype == RAPT_F16 ? 6e4 : dtype == RAPT_F64 ? 1e300 : 1e38; }

typedef struct sweep_summary {
    double worst[GRADIENTS]; /* the largest error, as a share of what is allowed */
} sweep_summary;

static void check_against_reference(rapt_context *cpu, rapt_context *reference, const backward_case *c, uint64_t seed,
                                    sweep_summary *summary) {
    const attention_case *f = &c->f;
    backward_case wide = widen_backward_case(c);
    backward_result actual = run_backward_case(cpu, c), expected = run_backward_case(reference, &wide);
    magnitudes m = find_magnitudes(reference, &wide, &expected);
    double scale = f->options.set_scale ? fabs(f->options.scale) : 1;
    double base = (f->dtype == RAPT_F64 ? 1e-14 : 2e-6) * m.score;
    /* The forward's result is rounded to 16 bits before the sum of P dP is taken from it. */
    double narrow = f->dtype == RAPT_BF16 ? 0x1p-8 : f->dtype == RAPT_F16 ? 0x1p-11 : 0;
    /* Weights below this are 0. */
    double smallest =
        (f->dtype == RAPT_F64 ? 0x1p-1020 : 0x1p-124) * (1 + scale) * (double)(f->l * f->heads + f->s + 10);
    smallest *= 1 + largest_magnitude(&f->q) + largest_magnitude(&f->k) + largest_magnitude(&c->d_out);
    for (int g = 0; g < GRADIENTS; g++) {
        const rapt_tensor *gradient = &actual.gradient[g];
        int64_t count = gradient->data != NULL ? rapt_tensor_count(gradient) : 0;
        for (int64_t i = 0; i < count; i++) {
            double want = get_element(&expected.gradient[g], i), got = get_element(gradient, i);
            if (!(fabs(want) < largest_finite(gradient->dtype))) continue; /* nothing is promised then */
            double allowed = (base + (g == D_VALUE || g == D_EXTRA_V ? 0 : narrow)) * m.gradient[g][i] +
                             rounding_of(gradient->dtype, want) + smallest;
            double error = fabs(got - want);
            if (!(error <= allowed)) {
                char text[700];
                describe_backward_case(c, text, sizeof text);
                fail_msg("seed %llu: %s[%lld] is %.17g, expected %.17g (error %g of %g)\n%s", (unsigned long long)seed,
                         gradient_names[g], (long long)i, got, want, error, allowed, text);
            }
            if (error > summary->worst[g] * allowed) summary->worst[g] = error / allowed;
        }
        free(m.gradient[g]);
    }
    free_backward_result(&actual);
    free_backward_result(&expected);
    free_backward_case(&wide);
}

static void sweep(rapt_dtype dtype, rapt_backend backend, int cases) {
    rapt_context *reference = reference_context(), *tested[2] = {NULL, NULL};
    sweep_summary summary = {{0}};
    if (backend == RAPT_BACKEND_REFERENCE) {
        tested[0] = reference_context();
        tested[1] = reference_context();
    } else {
        tested[0] = cpu_context(1);
        if (tested[0] == NULL) {
            rapt_context_destroy(reference);
            return;
        }
        tested[1] = cpu_context(3);
        tested[1]->operations_worth_a_thread = 0;
    }
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        uint64_t seed = (uint64_t)dtype * 3000000 + (uint64_t)i;
        test_random random = {seed};
        backward_case c = make_backward_case(&random, dtype, i % 10 == 0 ? 2000000 : 100000);
        check_against_reference(tested[i % 2], reference, &c, seed, &summary);
        free_backward_case(&c);
    }
    print_message("%s, largest error as a share of what is allowed:", rapt_dtype_name(dtype));
    for (int g = 0; g < GRADIENTS; g++) print_message(" %s %.2g", gradient_names[g], summary.worst[g]);
    print_message("\n");
    for (int i = 0; i < 2; i++) rapt_context_destroy(tested[i]);
    rapt_context_destroy(reference);
}

static void test_reference_in_narrow_types(void **state) { /* all that it may add is one rounding */
    (void)state;
    sweep(RAPT_F32, RAPT_BACKEND_REFERENCE, 100);
    sweep(RAPT_BF16, RAPT_BACKEND_REFERENCE, 100);
    sweep(RAPT_F16, RAPT_BACKEND_REFERENCE, 100);
}
static void test_f32(void **state) {
    (void)state;
    sweep(RAPT_F32, RAPT_BACKEND_CPU, 800);
}
static void test_f64(void **state) {
    (void)state;
    sweep(RAPT_F64, RAPT_BACKEND_CPU, 400);
}
static void test_bf16(void **state) {
    (void)state;
    sweep(RAPT_BF16, RAPT_BACKEND_CPU, 200);
}
static void test_f16(void **state) {
    (void)state;
    sweep(RAPT_F16, RAPT_BACKEND_CPU, 200);
}

/* ---- same bits ---- */

typedef struct variant {
    const char *name;
    int32_t threads, tile_rows;
    rapt_isa isa;
} variant;

static const variant variants[] = {
    {"2 threads", 2, 0, RAPT_ISA_AUTO}, {"3 threads", 3, 0, RAPT_ISA_AUTO},
    {"7 threads", 7, 0, RAPT_ISA_AUTO}, {"tiles of 5 rows", 2, 5, RAPT_ISA_AUTO},
    {"avx2", 1, 0, RAPT_ISA_AVX2},      {"avx512", 3, 0, RAPT_ISA_AVX512},
    {"neon", 2, 0, RAPT_ISA_NEON},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static void compare_variants(rapt_dtype dtype, int cases) {
    rapt_context *contexts[VARIANTS], *plain = cpu_context(1);
    if (plain == NULL) return;
    bool has_fma = rapt_context_isa(plain) != RAPT_ISA_BASELINE;
    for (int v = 0; v < VARIANTS; v++) {
        contexts[v] = NULL;
        if (variants[v].isa != RAPT_ISA_AUTO && (!rapt_isa_available(variants[v].isa) || !has_fma)) continue;
        contexts[v] = make_context(variants[v].threads, variants[v].isa, RAPT_BACKEND_CPU);
        contexts[v]->tile_rows = variants[v].tile_rows;
        contexts[v]->operations_worth_a_thread = 0; /* small problems, too, go to all threads */
    }
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)dtype * 88888888 + (uint64_t)i};
        backward_case c = make_backward_case(&random, dtype, i % 10 == 0 && !test_is_quick() ? 20000000 : 500000);
        backward_result expected = run_backward_case(plain, &c);
        for (int v = 0; v < VARIANTS; v++) {
            if (contexts[v] == NULL) continue;
            backward_result actual = run_backward_case(contexts[v], &c);
            if (!same_gradients(&expected, &actual)) {
                char text[700];
                describe_backward_case(&c, text, sizeof text);
                fail_msg("case %d differs with %s\n%s", i, variants[v].name, text);
            }
            free_backward_result(&actual);
        }
        free_backward_result(&expected);
        free_backward_case(&c);
    }
    for (int v = 0; v < VARIANTS; v++) rapt_context_destroy(contexts[v]);
    rapt_context_destroy(plain);
}

static void test_same_bits_f32(void **state) {
    (void)state;
    compare_variants(RAPT_F32, 200);
}
static void test_same_bits_f64(void **state) {
    (void)state;
    compare_variants(RAPT_F64, 80);
}
static void test_same_bits_16(void **state) {
    (void)state;
    compare_variants(RAPT_BF16, 40);
    compare_variants(RAPT_F16, 40);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_reference_in_narrow_types),
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_same_bits_f32),
        cmocka_unit_test(test_same_bits_f64),
        cmocka_unit_test(test_same_bits_16),
    };
    return cmocka_run_group_tests_name("backward", tests, NULL, NULL);
}
