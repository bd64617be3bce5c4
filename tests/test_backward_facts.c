/* test_backward_facts.c - single facts about gradients of the operator, on both backends: what is masked reaches nothing,
 * empty problems, gradients apart from each other, memory; and the gradients of the pieces */
#include "backward_case.h"

typedef void (*fact)(rapt_context *context);

static void on_both_backends(fact check) {
    static const rapt_backend backends[] = {RAPT_BACKEND_REFERENCE, RAPT_BACKEND_CPU};
    for (int b = 0; b < 2; b++) {
        rapt_context *context = make_context(2, RAPT_ISA_AUTO, backends[b]);
        if (has_backward(context)) {
            check(context);
        } else {
            print_message("the CPU backend has no backward yet: not tested\n");
        }
        rapt_context_destroy(context);
    }
}

/* ---- what is not seen ---- */

enum { N = 2, H = 4, HK = 2, L = 70, S = 300, D = 20, DV = 24, DEAD_ROW = 66, HIDDEN_KEY = 77, LENGTH = 290 };

static backward_case make_case(rapt_dtype dtype) {
    test_random random = {31};
    backward_case c = {.f = {.dtype = dtype, .n = N, .heads = H, .kv_heads = HK, .l = L, .s = S, .d = D, .dv = DV}};
    c.f.q = make_tensor(dtype, 4, (int64_t[]){N, H, L, D});
    c.f.k = make_tensor(dtype, 4, (int64_t[]){N, HK, S, D});
    c.f.v = make_tensor(dtype, 4, (int64_t[]){N, HK, S, DV});
    c.d_out = make_tensor(dtype, 4, (int64_t[]){N, H, L, DV});
    fill_random(&random, &c.f.q, 2);
    fill_random(&random, &c.f.k, 2);
    fill_random(&random, &c.f.v, 2);
    fill_random(&random, &c.d_out, 2);
    for (int g = 0; g < GRADIENTS; g++) c.wanted[g] = true;
    return c;
}

/* A mask that hides one key from all queries and all keys from one query, and lengths that hide the last keys. */
static void hide_some(backward_case *c, rapt_dtype mask_dtype) {
    c->f.mask = make_tensor(mask_dtype, 2, (int64_t[]){L, S});
    for (int64_t i = 0; i < L; i++) {
        for (int64_t j = 0; j < S; j++) {
            bool hidden = i == DEAD_ROW || j == HIDDEN_KEY || (i + j) % 3 == 0;
            set_element(&c->f.mask, i * S + j, !hidden ? 0 : mask_dtype == RAPT_BOOL ? 1 : -INFINITY);
        }
    }
    c->f.key_lengths = calloc(N, sizeof(int64_t));
    assert_non_null(c->f.key_lengths);
    for (int n = 0; n < N; n++) c->f.key_lengths[n] = LENGTH;
}

static void fill_row(const rapt_tensor *tensor, int64_t length, int64_t row, double value) { /* of every head */
    int64_t dim = tensor->shape[3], heads = tensor->shape[0] * tensor->shape[1];
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t d = 0; d < dim; d++) set_element(tensor, (h * length + row) * dim + d, value);
    }
}

static void check_row_is_zero(const rapt_tensor *gradient, int64_t length, int64_t row) {
    int64_t dim = gradient->shape[3], heads = gradient->shape[0] * gradient->shape[1];
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t d = 0; d < dim; d++) {
            double value = get_element(gradient, (h * length + row) * dim + d);
            assert_true(value == 0 && !signbit(value));
        }
    }
}

static void check_hidden(rapt_context *context, rapt_dtype dtype, rapt_dtype mask_dtype, double dropout) {
    backward_case c = make_case(dtype);
    hide_some(&c, mask_dtype);
    c.f.options.dropout = dropout;
    c.f.options.set_dropout_seed = true;
    backward_result clean = run_backward_case(context, &c);
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    for (int p = 0; p < 3; p++) {
        fill_row(&c.f.q, L, DEAD_ROW, poisons[p]);
        fill_row(&c.d_out, L, DEAD_ROW, poisons[(p + 1) % 3]);
        fill_row(&c.f.k, S, HIDDEN_KEY, poisons[p]);
        fill_row(&c.f.v, S, HIDDEN_KEY, poisons[(p + 1) % 3]);
        for (int64_t j = LENGTH; j < S; j++) {
            fill_row(&c.f.k, S, j, poisons[(p + 2) % 3]);
            fill_row(&c.f.v, S, j, poisons[p]);
        }
        backward_result poisoned = run_backward_case(context, &c);
        assert_true(same_gradients(&clean, &poisoned));
        for (int g = 0; g < GRADIENTS; g++) {
            int64_t count = clean.gradient[g].data != NULL ? rapt_tensor_count(&clean.gradient[g]) : 0;
            for (int64_t i = 0; i < count; i++) assert_true(isfinite(get_element(&poisoned.gradient[g], i)));
        }
        free_backward_result(&poisoned);
    }
    check_row_is_zero(&clean.gradient[D_QUERY], L, DEAD_ROW);
    check_row_is_zero(&clean.gradient[D_KEY], S, HIDDEN_KEY);
    check_row_is_zero(&clean.gradient[D_VALUE], S, HIDDEN_KEY);
    check_row_is_zero(&clean.gradient[D_KEY], S, S - 1);
    for (int64_t j = 0; j < S && mask_dtype != RAPT_BOOL; j++) {
        assert_true(get_element(&clean.gradient[D_MASK], DEAD_ROW * S + j) == 0);
    }
    assert_true(dropout == 1 || largest_magnitude(&clean.gradient[D_KEY]) > 0);
    free_backward_result(&clean);
    free_backward_case(&c);
}

static void hidden(rapt_context *context) {
    check_hidden(context, RAPT_F32, RAPT_BOOL, 0);
    check_hidden(context, RAPT_F32, RAPT_F32, 0.3);
    check_hidden(context, RAPT_F64, RAPT_F16, 0);
    check_hidden(context, RAPT_BF16, RAPT_BOOL, 0.5);
    check_hidden(context, RAPT_F16, RAPT_F64, 1);
}
static void test_hidden(void **state) {
    (void)state;
    on_both_backends(hidden);
}

/* A query that sees one key has weight 1 whatever the score: d_out is the value's gradient, and no other has any. */
static void sole_keys(rapt_context *context) {
    static const double scores[] = {1, 1e30, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        backward_case c = make_case(RAPT_F32);
        c.f.options.causal = c.f.options.limit_left = true; /* with left 0: each query sees the key of its number */
        fill_value(&c.f.q, scores[i]);
        fill_value(&c.f.k, scores[i]);
        backward_result r = run_backward_case(context, &c);
        int64_t queries = rapt_tensor_count(&c.f.q), keys = rapt_tensor_count(&c.f.k);
        for (int64_t e = 0; e < queries; e++) assert_true(get_element(&r.gradient[D_QUERY], e) == 0);
        for (int64_t e = 0; e < keys; e++) assert_true(get_element(&r.gradient[D_KEY], e) == 0);
        for (int64_t n = 0; n < N; n++) {
            for (int64_t j = 0; j < S; j++) {
                for (int64_t d = 0; d < DV; d++) { /* two query heads share a KV head */
                    float sum = 0;
                    for (int64_t h = 0; h < 2 && j < L; h++) {
                        sum += (float)get_element(&c.d_out, ((n * H + h) * L + j) * DV + d);
                    }
                    assert_true(get_element(&r.gradient[D_VALUE], (n * HK * S + j) * DV + d) == (double)sum);
                }
            }
        }
        free_backward_result(&r);
        free_backward_case(&c);
    }
}
static void test_sole_keys(void **state) {
    (void)state;
    on_both_backends(sole_keys);
}

/* Dropout and gradients of the returned weights change nothing about that: a weight that cannot change has no use for them. */
static void sole_keys_with_more(rapt_context *context) {
    for (int i = 0; i < 2; i++) {
        backward_case c = make_case(RAPT_F32);
        c.f.options.causal = c.f.options.limit_left = true;
        c.f.options.set_scale = true;
        c.f.options.scale = 1000; /* scores whose log-sum-exp is coarse */
        c.f.options.dropout = i == 0 ? 0.3 : 0;
        c.f.options.set_dropout_seed = i == 0;
        c.f.options.per_head_weights = true;
        c.d_weights = make_tensor(RAPT_F32, 4, (int64_t[]){N, H, L, S});
        fill_value(&c.d_weights, 1);
        backward_result r = run_backward_case(context, &c);
        assert_true(largest_magnitude(&r.gradient[D_QUERY]) == 0 && largest_magnitude(&r.gradient[D_KEY]) == 0);
        assert_true(largest_magnitude(&r.gradient[D_VALUE]) > 0);
        free_backward_result(&r);
        free_backward_case(&c);
    }
}
static void test_sole_keys_with_more(void **state) {
    (void)state;
    on_both_backends(sole_keys_with_more);
}

/* A query that no loss reads, padding say, adds nothing to any gradient, even if it is NaN and sees keys. */
static void unread(rapt_context *context) {
    backward_case c = make_case(RAPT_F32);
    fill_row(&c.d_out, L, L - 1, 0);
    backward_result clean = run_backward_case(context, &c);
    fill_row(&c.f.q, L, L - 1, NAN);
    backward_result spoiled = run_backward_case(context, &c);
    assert_true(isnan(get_element(&spoiled.out, (L - 1) * DV)));
    assert_true(same_gradients(&clean, &spoiled));
    check_row_is_zero(&spoiled.gradient[D_QUERY], L, L - 1);
    free_backward_result(&clean);
    free_backward_result(&spoiled);
    free_backward_case(&c);
}
static void test_unread(void **state) {
    (void)state;
    on_both_backends(unread);
}

/* An additive mask of one huge negative number for all keys of a query, as padding often has: gradients are those of the
 * weights that the forward had, but for the rounding of the log-sum-exp; where that is too coarse to say what the weights
 * were, it may not be used. */
static void far_below(rapt_context *context) {
    static const double depths[] = {-1e4, -1e9, -3.4e38, -1e17, -1.7e308};
    enum { KEYS = 100 };
    for (int i = 0; i < 10; i++) {
        rapt_dtype dtype = i % 2 == 0 ? RAPT_F32 : RAPT_F64;
        if (dtype == RAPT_F32 && i / 2 == 4) continue; /* -inf there */
        test_random random = {(uint64_t)i};
        backward_case c = {
            .f = {.dtype = dtype, .n = 1, .heads = 1, .kv_heads = 1, .l = 1, .s = KEYS, .d = 8, .dv = 1}};
        c.f.q = make_tensor(dtype, 4, (int64_t[]){1, 1, 1, 8});
        c.f.k = make_tensor(dtype, 4, (int64_t[]){1, 1, KEYS, 8});
        c.f.v = make_tensor(dtype, 4, (int64_t[]){1, 1, KEYS, 1});
        c.f.mask = make_tensor(dtype, 2, (int64_t[]){1, KEYS});
        c.d_out = make_tensor(dtype, 4, (int64_t[]){1, 1, 1, 1});
        c.d_weights = make_tensor(dtype, 3, (int64_t[]){1, 1, KEYS}); /* of zeros, to have weights */
        c.wanted[D_QUERY] = c.wanted[D_VALUE] = c.wanted[D_MASK] = true;
        fill_random(&random, &c.f.q, 1);
        fill_random(&random, &c.f.k, 1);
        fill_random(&random, &c.f.v, 1);
        fill_value(&c.f.mask, depths[i / 2]);
        fill_value(&c.d_out, 1);
        backward_result r = run_backward_case(context, &c);
        double mean = get_element(&r.out, 0);
        double allowed = fmin(1e-2, (dtype == RAPT_F64 ? 0x1p-51 : 0x1p-22) * fabs(depths[i / 2])) + 1e-6;
        for (int64_t j = 0; j < KEYS; j++) { /* the gradient of value j is weight j */
            double weight = get_element(&r.weights, j), d_value = get_element(&r.gradient[D_VALUE], j);
            double d_score = weight * (get_element(&c.f.v, j) - mean), d_mask = get_element(&r.gradient[D_MASK], j);
            if (!(fabs(d_value - weight) <= allowed * weight && fabs(d_mask - d_score) <= allowed * weight)) {
                fail_msg("%s, mask %g: the gradient of value %d is %g, its weight %g; of its mask %g, expected %g",
                         rapt_dtype_name(dtype), depths[i / 2], (int)j, d_value, weight, d_mask, d_score);
            }
        }
        free_backward_result(&r);
        free_backward_case(&c);
    }
}
static void test_far_below(void **state) {
    (void)state;
    on_both_backends(far_below);
}

/* ---- one at a time, broadcast, empty ---- */

static void one_at_a_time(rapt_context *context) {
    for (int i = 0; i < 60; i++) {
        test_random random = {900 + (uint64_t)i};
        backward_case c = make_backward_case(&random, i % 2 == 0 ? RAPT_F32 : RAPT_F64, 50000);
        for (int g = 0; g < GRADIENTS; g++) c.wanted[g] = true;
        backward_result all = run_backward_case(context, &c);
        for (int only = D_QUERY; only <= D_PADDING; only++) {
            for (int g = 0; g < GRADIENTS; g++) c.wanted[g] = g == only;
            backward_result one = run_backward_case(context, &c);
            if (!same_gradients(&one, &all)) {
                char text[700];
                describe_backward_case(&c, text, sizeof text);
                fail_msg("case %d: %s alone differs\n%s", i, gradient_names[only], text);
            }
            free_backward_result(&one);
        }
        free_backward_result(&all);
        free_backward_case(&c);
    }
}
static void test_one_at_a_time(void **state) {
    (void)state;
    on_both_backends(one_at_a_time);
}

/* d_out and d_weights are inputs: they may repeat elements. */
static void broadcast_inputs(rapt_context *context) {
    backward_case c = make_case(RAPT_F32);
    rapt_tensor own = c.d_out;
    fill_value(&own, 0.75);
    c.d_weights = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, S});
    rapt_tensor own_weights = c.d_weights;
    fill_value(&own_weights, -0.5);
    backward_result expected = run_backward_case(context, &c);
    for (int d = 0; d < 4; d++) c.d_out.stride[d] = c.d_weights.stride[d] = 0;
    backward_result actual = run_backward_case(context, &c);
    assert_true(same_gradients(&expected, &actual));
    free_backward_result(&expected);
    free_backward_result(&actual);
    free_backward_case(&c);
}
static void test_broadcast_inputs(void **state) {
    (void)state;
    on_both_backends(broadcast_inputs);
}

static void empty(rapt_context *context) {
    static const int64_t sizes[][3] = {{0, 3, 4}, {2, 0, 4}, {2, 3, 0}, {0, 0, 0}}; /* N, L, S */
    for (int i = 0; i < 8; i++) {
        int64_t n = sizes[i / 2][0], l = sizes[i / 2][1], s = sizes[i / 2][2];
        backward_case c = {.f = {.dtype = RAPT_F32, .n = n, .heads = 2, .kv_heads = 1, .l = l, .s = s, .d = 3, .dv = 2},
                           .accumulate = i % 2 == 1};
        c.f.q = make_tensor(RAPT_F32, 4, (int64_t[]){n, 2, l, 3});
        c.f.k = make_tensor(RAPT_F32, 4, (int64_t[]){n, 1, s, 3});
        c.f.v = make_tensor(RAPT_F32, 4, (int64_t[]){n, 1, s, 2});
        c.f.mask = make_tensor(RAPT_F32, 2, (int64_t[]){l, s});
        c.f.padding = make_tensor(RAPT_F32, 1, (int64_t[]){s});
        c.d_out = make_tensor(RAPT_F32, 4, (int64_t[]){n, 2, l, 2});
        for (int g = 0; g < GRADIENTS; g++) c.wanted[g] = true;
        backward_result r = run_backward_case(context, &c);
        for (int g = D_QUERY; g <= D_PADDING; g++) {
            int64_t count = rapt_tensor_count(&r.gradient[g]);
            for (int64_t e = 0; e < count; e++) {
                assert_true(get_element(&r.gradient[g], e) == (c.accumulate ? start_value(g, e) : 0));
            }
        }
        free_backward_result(&r);
        free_backward_case(&c);
    }
}
static void test_empty(void **state) {
    (void)state;
    on_both_backends(empty);
}

/* ---- projections ---- */

typedef struct projection {
    linear_gradients g;
    rapt_tensor x, dy, dx, weight, d_weight, d_bias;
} projection;

/* [N, L, features] with any strides, or seen as [N, L, groups, 64] with group after group in memory, as heads lie. */
static rapt_tensor make_rows(test_random *random, rapt_dtype dtype, int64_t n, int64_t l, int64_t features) {
    if (features % 64 != 0 || random_chance(random, 0.2)) {
        return make_strided_tensor(random, dtype, 3, (int64_t[]){n, l, features});
    }
    rapt_tensor groups = make_tensor(dtype, 4, (int64_t[]){features / 64, n, l, 64}), rows = groups;
    for (int d = 0; d < 3; d++) {
        rows.shape[d] = groups.shape[(d + 1) % 3];
        rows.stride[d] = groups.stride[(d + 1) % 3];
    }
    return rows;
}

static rapt_rows rows_of(const rapt_tensor *tensor) {
    int32_t last = tensor->ndim - 1;
    return (rapt_rows){.data = tensor->data,
                       .dtype = tensor->dtype,
                       .stride = {tensor->stride[0], tensor->stride[1], tensor->stride[last]},
                       .group = tensor->shape[last],
                       .group_stride = tensor->stride[2]};
}

static projection make_projection(uint64_t seed, rapt_dtype dtype) {
    test_random random = {seed};
    int64_t n = random_between(&random, 1, 3), l = random_between(&random, 1, 70), k = random_between(&random, 1, 90);
    int64_t o = random_between(&random, 1, 90);
    if (random_chance(&random, 0.4)) k = 64 * random_between(&random, 1, 3);
    if (random_chance(&random, 0.4)) o = 64 * random_between(&random, 1, 3);
    projection p = {.x = make_rows(&random, dtype, n, l, k),
                    .dy = make_rows(&random, dtype, n, l, o),
                    .dx = make_rows(&random, dtype, n, l, k),
                    .weight = make_strided_tensor(&random, dtype, 2, (int64_t[]){o, k}),
                    .d_weight = make_strided_tensor(&random, dtype, 2, (int64_t[]){o, k}),
                    .d_bias = make_tensor(dtype, 1, (int64_t[]){o})};
    rapt_tensor *filled[] = {&p.x, &p.dy, &p.dx, &p.weight, &p.d_weight, &p.d_bias};
    for (int t = 0; t < 6; t++) {
        int64_t count = rapt_tensor_count(filled[t]); /* eighths, so that every dtype holds them */
        for (int64_t i = 0; i < count; i++) set_element(filled[t], i, (double)random_between(&random, -16, 16) / 8);
    }
    p.g = (linear_gradients){.dtype = dtype,
                             .batch = n,
                             .length = l,
                             .features_in = k,
                             .features_out = o,
                             .x = rows_of(&p.x),
                             .dy = rows_of(&p.dy),
                             .weight = p.weight,
                             .adds_dx = random_chance(&random, 0.5),
                             .adds_parameters = random_chance(&random, 0.5)};
    if (random_chance(&random, 0.8)) p.g.dx = rows_of(&p.dx);
    if (random_chance(&random, 0.8)) p.g.d_weight = p.d_weight;
    if (random_chance(&random, 0.8)) p.g.d_bias = p.d_bias;
    return p;
}

static void run_projection(rapt_context *context, const projection *p) {
    size_t bytes = rapt_arena_size(context->backend->linear_backward_scratch(context, &p->g)) + RAPT_ALIGNMENT;
    void *scratch = aligned_alloc(RAPT_ALIGNMENT, bytes);
    assert_non_null(scratch);
    context->backend->linear_backward(context, &p->g, scratch);
    free(scratch);
}

/* With eighths as inputs all sums are exact in f32 and f64, so every backend must give just these numbers. */
static void projections(rapt_context *context) {
    static const rapt_dtype dtypes[] = {RAPT_F64, RAPT_F32, RAPT_BF16, RAPT_F16};
    for (int i = 0; i < 80; i++) {
        projection p = make_projection((uint64_t)i, dtypes[i % 4]), start = make_projection((uint64_t)i, dtypes[i % 4]);
        run_projection(context, &p);
        const linear_gradients *g = &p.g;
        int64_t rows = g->batch * g->length, in = g->features_in, out = g->features_out;
        double tolerance = i % 4 == 2 ? 0x1p-8 : i % 4 == 3 ? 0x1p-11 : 0;
        for (int64_t e = 0; e < rows * in; e++) {
            double sum = g->dx.data == NULL || g->adds_dx ? get_element(&start.dx, e) : 0;
            for (int64_t o = 0; o < out && g->dx.data != NULL; o++) {
                sum += get_element(&p.dy, e / in * out + o) * get_element(&p.weight, o * in + e % in);
            }
            assert_true(fabs(get_element(&p.dx, e) - sum) <= tolerance * fabs(sum));
        }
        for (int64_t e = 0; e < out * in; e++) {
            double sum = g->d_weight.data == NULL || g->adds_parameters ? get_element(&start.d_weight, e) : 0;
            for (int64_t row = 0; row < rows && g->d_weight.data != NULL; row++) {
                sum += get_element(&p.dy, row * out + e / in) * get_element(&p.x, row * in + e % in);
            }
            assert_true(fabs(get_element(&p.d_weight, e) - sum) <= tolerance * fabs(sum));
        }
        for (int64_t e = 0; e < out; e++) {
            double sum = g->d_bias.data == NULL || g->adds_parameters ? get_element(&start.d_bias, e) : 0;
            for (int64_t row = 0; row < rows && g->d_bias.data != NULL; row++) sum += get_element(&p.dy, row * out + e);
            assert_true(fabs(get_element(&p.d_bias, e) - sum) <= tolerance * fabs(sum));
        }
        projection *both[] = {&p, &start};
        for (int b = 0; b < 2; b++) {
            rapt_tensor *tensors[] = {&both[b]->x,      &both[b]->dy,       &both[b]->dx,
                                      &both[b]->weight, &both[b]->d_weight, &both[b]->d_bias};
            for (int t = 0; t < 6; t++) free_tensor(tensors[t]);
        }
    }
}
static void test_projections(void **state) {
    (void)state;
    on_both_backends(projections);
}

/* ---- pieces: a gradient g of y = A x is A^T g, so <y, g> = <x, A^T g> ---- */

static double inner_product(const rapt_tensor *a, const rapt_tensor *b) {
    double sum = 0;
    int64_t count = rapt_tensor_count(a);
    for (int64_t i = 0; i < count; i++) sum += get_element(a, i) * get_element(b, i);
    return sum;
}

static void test_repeat(void **state) {
    (void)state;
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    for (int i = 0; i < 200; i++) {
        test_random random = {(uint64_t)i};
        int64_t n = random_between(&random, 1, 3), heads = random_between(&random, 1, 3), times = i % 5 + 1;
        int64_t l = random_between(&random, 1, 4), d = random_between(&random, 1, 4);
        int64_t few[4] = {n, heads, l, d}, many[4] = {n, heads * times, l, d};
        int first = i % 2; /* without N */
        rapt_tensor x = make_tensor(RAPT_F64, 4 - first, few + first), repeated;
        rapt_tensor buffer = make_tensor(RAPT_F64, 4 - first, many + first);
        rapt_tensor g = make_strided_tensor(&random, RAPT_F64, 4 - first, many + first);
        rapt_tensor dx = make_strided_tensor(&random, RAPT_F64, 4 - first, few + first);
        fill_random(&random, &x, 1);
        fill_random(&random, &g, 1);
        fill_value(&dx, 3);
        assert_ok(context, rapt_repeat_kv_heads(context, &x, times, &buffer, &repeated));
        bool accumulate = random_chance(&random, 0.5);
        assert_ok(context, rapt_repeat_kv_heads_backward(context, &g, times, accumulate, &dx));
        double added = 0;
        for (int64_t e = 0; e < rapt_tensor_count(&x) && accumulate; e++) added += 3 * get_element(&x, e);
        assert_true(fabs(inner_product(&repeated, &g) - (inner_product(&x, &dx) - added)) < 1e-12);
        rapt_tensor *all[] = {&x, &buffer, &g, &dx};
        for (int t = 0; t < 4; t++) free_tensor(all[t]);
    }
    /* Ascending in f32: 1e8 + 1 - 1e8 is 0 in that order, and in f64 it is 1. */
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64};
    for (int t = 0; t < 2; t++) {
        rapt_tensor g = make_tensor(dtypes[t], 3, (int64_t[]){3, 1, 1}),
                    dx = make_tensor(dtypes[t], 3, (int64_t[]){1, 1, 1});
        set_element(&g, 0, 1e8);
        set_element(&g, 1, 1);
        set_element(&g, 2, -1e8);
        assert_ok(context, rapt_repeat_kv_heads_backward(context, &g, 3, false, &dx));
        assert_true(get_element(&dx, 0) == t);
        free_tensor(&g);
        free_tensor(&dx);
    }
    rapt_context_destroy(context);
}

static void test_rotate(void **state) {
    (void)state;
    rapt_context *context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    for (int i = 0; i < 200; i++) {
        test_random random = {(uint64_t)i};
        int64_t n = random_between(&random, 1, 3), l = random_between(&random, 1, 6),
                heads = random_between(&random, 1, 3);
        int64_t dim = 2 * random_between(&random, 1, 8), shape[4] = {n, l, heads, dim}, first[3], positions[18];
        for (int t = 0; t < 3; t++) first[t] = random_between(&random, 0, 1000);
        for (int t = 0; t < 18; t++) positions[t] = random_between(&random, 0, 100000);
        rapt_rotary rotary = rapt_rotary_default(10000);
        rotary.interleaved = i % 2 == 1;
        rotary.dims = random_chance(&random, 0.5) ? RAPT_DEFAULT : 2 * random_between(&random, 1, dim / 2);
        rotary.set_amplitude = random_chance(&random, 0.5);
        if (rotary.set_amplitude) rotary.amplitude = 1.5;
        if (random_chance(&random, 0.3)) rotary.positions = positions;
        rapt_tensor x = make_tensor(RAPT_F64, 4, shape), g = make_tensor(RAPT_F64, 4, shape);
        fill_random(&random, &x, 1);
        fill_random(&random, &g, 1);
        rapt_tensor y = convert_tensor(&x, RAPT_F64), dx = convert_tensor(&g, RAPT_F64);
        assert_ok(context, rapt_rotate(context, &rotary, first, &y));
        assert_ok(context, rapt_rotate_backward(context, &rotary, first, &dx));
        assert_true(fabs(inner_product(&y, &g) - inner_product(&x, &dx)) < 1e-11);
        if (!rotary.set_amplitude) { /* a rotation's transpose is its inverse */
            assert_ok(context, rapt_rotate_backward(context, &rotary, first, &y));
            assert_true(largest_difference(&y, &x) < 1e-14);
        }
        rapt_tensor *all[] = {&x, &g, &y, &dx};
        for (int t = 0; t < 4; t++) free_tensor(all[t]);
    }
    rapt_context_destroy(context);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hidden),           cmocka_unit_test(test_far_below),
        cmocka_unit_test(test_sole_keys),        cmocka_unit_test(test_sole_keys_with_more),
        cmocka_unit_test(test_unread),           cmocka_unit_test(test_one_at_a_time),
        cmocka_unit_test(test_broadcast_inputs), cmocka_unit_test(test_empty),
        cmocka_unit_test(test_projections),      cmocka_unit_test(test_repeat),
        cmocka_unit_test(test_rotate),
    };
    return cmocka_run_group_tests_name("backward facts", tests, NULL, NULL);
}
