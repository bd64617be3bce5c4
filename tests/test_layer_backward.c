/* test_layer_backward.c - gradients of the layer: against finite differences, the CPU backend against the reference, and
 * what must give the same bits */
#include "training_case.h"

#include "internal.h"

static rapt_context *reference, *cpu;

static int make_contexts(void **state) {
    (void)state;
    reference = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    cpu = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    return 0;
}

static int destroy_contexts(void **state) {
    (void)state;
    rapt_context_destroy(reference);
    rapt_context_destroy(cpu);
    return 0;
}

static const case_sizes small = {2, 2, 4, 5, 0}, medium = {2, 2, 10, 20, 0.2}, large = {2, 3, 20, 90, 0.2};

static rapt_mha_state *make_state(rapt_context *context) {
    rapt_mha_state *state;
    assert_ok(context, rapt_mha_state_create(context, &state));
    assert_null(rapt_mha_state_saved(state));
    return state;
}

static void run_backward(rapt_context *context, const training_case *c, const rapt_mha_state *state,
                         const gradient_set *set) {
    assert_ok(context, rapt_mha_backward(context, c->layer, state, &c->d_out, c->returns_weights ? &c->d_weights : NULL,
                                         &set->gradients));
}

/* Forward and backward with gradients of a style, which begin as NaN. */
static void train_once(rapt_context *context, const training_case *c, int style, gradient_set *set) {
    test_random random = {5};
    rapt_mha_state *state = make_state(context);
    training_result result = run_forward(context, c, state);
    make_gradients(&random, c, style, NAN, set);
    run_backward(context, c, state, set);
    free_training_result(&result);
    rapt_mha_state_destroy(state);
}

static void fail_case(const char *what, int number, const training_case *c) {
    char text[700];
    describe_training_case(c, text, sizeof text);
    fail_msg("case %d: %s\n%s", number, what, text);
}

/* ---- finite differences ---- */

/* A number whose gradient by out and weights is d_out and d_weights. */
static double loss(const training_case *c) {
    training_result result = run_forward(reference, c, NULL);
    double sum = 0;
    int64_t count = rapt_tensor_count(&result.out);
    for (int64_t i = 0; i < count; i++) sum += get_element(&result.out, i) * get_element(&c->d_out, i);
    count = c->returns_weights ? rapt_tensor_count(&result.weights) : 0;
    for (int64_t i = 0; i < count; i++) sum += get_element(&result.weights, i) * get_element(&c->d_weights, i);
    free_training_result(&result);
    return sum;
}

/* The reference backend reads the parameters themselves, so nothing needs to be committed. */
static double difference_quotient(const training_case *c, const rapt_tensor *x, int64_t index) {
    const double step = 1e-5;
    double value = get_element(x, index);
    set_element(x, index, value + step);
    double above = loss(c);
    set_element(x, index, value - step);
    double below = loss(c);
    set_element(x, index, value);
    return (above - below) / (2 * step);
}

static void check_differences(test_random *random, const training_case *c, int number, int style) {
    gradient_set set;
    train_once(reference, c, style, &set);
    for (int i = 0; i < SOURCES; i++) {
        if (set.tensor[i].data == NULL) continue;
        rapt_tensor x = source_of(reference, c, (source)i);
        int64_t count = rapt_tensor_count(&x);
        for (int tries = 0; tries < 4; tries++) {
            int64_t index = random_between(random, 0, count - 1);
            double gradient = get_element(&set.tensor[i], index), expected = 0;
            if (get_element(&x, index) != -INFINITY) expected = difference_quotient(c, &x, index);
            if (!(fabs(gradient - expected) <= 2e-8 * (1 + fabs(expected)))) {
                char text[200];
                snprintf(text, sizeof text, "%s[%lld] is %.12g, by differences %.12g", source_names[i],
                         (long long)index, gradient, expected);
                fail_case(text, number, c);
            }
        }
    }
    free_gradients(&set);
}

static void test_finite_differences(void **state) {
    (void)state;
    int cases = test_is_quick() ? 30 : 400;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)i + 1};
        training_case c;
        make_training_case(reference, &random, RAPT_F64, small, &c);
        check_differences(&random, &c, i, i % 3 == 0 ? APART : AS_LAYER);
        free_training_case(&c);
    }
}

/* ---- the CPU backend against the reference ---- */

static void compare_backends(rapt_dtype dtype, int cases, case_sizes most, double tolerance) {
    double worst = 0;
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)dtype * 31337 + (uint64_t)i};
        training_case c;
        make_training_case(cpu, &random, dtype, most, &c);
        gradient_set expected, actual;
        train_once(reference, &c, AS_LAYER, &expected);
        train_once(cpu, &c, AS_LAYER, &actual);
        double largest = 0; /* of all: a gradient that cancels to nothing is compared with what it came from */
        for (int s = 0; s < SOURCES; s++) {
            if (expected.tensor[s].data != NULL) largest = fmax(largest, largest_magnitude(&expected.tensor[s]));
        }
        for (int s = 0; s < SOURCES; s++) {
            if (expected.tensor[s].data == NULL) continue;
            double difference = largest_difference(&actual.tensor[s], &expected.tensor[s]);
            if (!(difference <= tolerance * largest)) {
                char text[200];
                snprintf(text, sizeof text, "%s differs by %g of %g", source_names[s], difference, tolerance * largest);
                fail_case(text, i, &c);
            }
            if (largest > 0) worst = fmax(worst, difference / largest);
        }
        free_gradients(&expected);
        free_gradients(&actual);
        free_training_case(&c);
    }
    print_message("%s: %d cases, largest difference %.2g of %.2g\n", rapt_dtype_name(dtype), cases, worst, tolerance);
}

static void test_backends_f32(void **state) {
    (void)state;
    compare_backends(RAPT_F32, 200, large, 5e-6);
}
static void test_backends_f64(void **state) {
    (void)state;
    compare_backends(RAPT_F64, 100, large, 1e-14);
}
static void test_backends_bf16(void **state) {
    (void)state;
    compare_backends(RAPT_BF16, 60, large, 0x1p-6);
}
static void test_backends_f16(void **state) {
    (void)state;
    compare_backends(RAPT_F16, 60, large, 0x1p-8);
}

/* ---- same bits ---- */

/* Runs a check on random cases, f32 and f64, on both backends. */
static void for_each_case(int cases, case_sizes most, void (*check)(rapt_context *context, const training_case *c)) {
    rapt_context *contexts[] = {reference, cpu};
    if (test_is_quick()) cases = (cases + 9) / 10;
    for (int i = 0; i < 4 * cases; i++) {
        test_random random = {(uint64_t)i + 1000};
        training_case c;
        make_training_case(contexts[i % 2], &random, i / 2 % 2 == 0 ? RAPT_F32 : RAPT_F64, most, &c);
        check(contexts[i % 2], &c);
        free_training_case(&c);
    }
}

static void check_state_changes_nothing(rapt_context *context, const training_case *c) {
    rapt_mha_state *state = make_state(context);
    training_result without = run_forward(context, c, NULL), with = run_forward(context, c, state);
    assert_true(same_bits(&with.out, &without.out));
    if (c->returns_weights) assert_true(same_bits(&with.weights, &without.weights));
    free_training_result(&without);
    free_training_result(&with);
    rapt_mha_state_destroy(state);
}

static void test_state_changes_no_bits(void **state) {
    (void)state;
    for_each_case(40, medium, check_state_changes_nothing);
}

/* What a state shows is what the operator takes and gives. */
static void check_saved(rapt_context *context, const training_case *c) {
    rapt_mha_state *state = make_state(context);
    training_result result = run_forward(context, c, state);
    const rapt_mha_saved *saved = rapt_mha_state_saved(state);
    assert_non_null(saved);
    assert_int_equal(saved->version, rapt_mha_version(c->layer));
    assert_true(saved->dropout == c->config.dropout);
    assert_true(saved->dropout_seed == c->options.dropout_seed && saved->dropout_offset == c->options.dropout_offset);
    const int64_t query[4] = {c->n, c->config.num_heads, c->l, c->config.head_dim};
    const int64_t key[4] = {c->n, c->config.num_kv_heads, c->s, c->config.head_dim};
    for (int d = 0; d < 4; d++) {
        assert_int_equal(saved->query.shape[d], query[d]);
        assert_int_equal(saved->key.shape[d], key[d]);
        assert_int_equal(saved->value.shape[d], key[d]);
        assert_int_equal(saved->attended.shape[d], query[d]);
        if (d < 3) assert_int_equal(saved->lse.shape[d], query[d]);
    }
    if (c->extra == 0) {
        rapt_tensor out = make_tensor(c->config.dtype, 4, saved->attended.shape);
        rapt_tensor lse = make_tensor(saved->lse.dtype, 3, saved->lse.shape);
        rapt_options options = c->options;
        options.per_head_weights = false;
        options.rotary = NULL;
        options.causal = c->config.causal;
        options.set_scale = true;
        options.scale = c->config.scale;
        options.dropout = c->config.dropout;
        options.lse = &lse;
        assert_ok(context, rapt_attention_forward(context, &saved->query, &saved->key, &saved->value, &options, &out));
        assert_true(same_bits(&out, &saved->attended));
        assert_true(same_bits(&lse, &saved->lse));
        free_tensor(&out);
        free_tensor(&lse);
    }
    free_training_result(&result);
    rapt_mha_state_destroy(state);
}

static void test_saved(void **state) {
    (void)state;
    for_each_case(40, medium, check_saved);
}

/* The log-sum-exp comes back as without a state. */
static void check_lse(rapt_context *context, const training_case *c) {
    rapt_mha_state *state = make_state(context);
    int64_t shape[3] = {c->n, c->config.num_heads, c->l};
    int skipped = c->batched ? 0 : 1;
    test_random random = {3};
    rapt_tensor lse[2], out = make_tensor(c->config.dtype, c->query.ndim, c->query.shape);
    for (int i = 0; i < 2; i++) {
        lse[i] = make_strided_tensor(&random, c->config.dtype, 3 - skipped, shape + skipped); /* f32 or f64 */
        rapt_options options = c->options;
        options.per_head_weights = false;
        options.lse = &lse[i];
        options.state = i == 0 ? NULL : state;
        assert_ok(context, rapt_mha_forward(context, c->layer, &c->query, key_of(c), value_of(c), &options, &out));
    }
    assert_true(same_bits(&lse[0], &lse[1]));
    free_tensor(&lse[0]);
    free_tensor(&lse[1]);
    free_tensor(&out);
    rapt_mha_state_destroy(state);
}

static void test_lse_with_state(void **state) {
    (void)state;
    for_each_case(20, small, check_lse);
}

/* A state is not consumed, and one that was used for something else before is as good as new. */
static void check_repeated(rapt_context *context, const training_case *c) {
    static rapt_mha_state *used; /* by the cases before, on whatever backend */
    gradient_set first, again, reused;
    if (used == NULL) used = make_state(context);
    train_once(context, c, AS_LAYER, &first);
    training_result result = run_forward(context, c, used);
    for (int i = 0; i < 2; i++) {
        test_random random = {5};
        make_gradients(&random, c, AS_LAYER, i == 0 ? NAN : 7, i == 0 ? &again : &reused);
        run_backward(context, c, used, i == 0 ? &again : &reused);
    }
    assert_true(same_layer_gradients(&first, &again));
    assert_true(same_layer_gradients(&first, &reused));
    free_training_result(&result);
    free_gradients(&first);
    free_gradients(&again);
    free_gradients(&reused);
    if (c->l == 1) { /* sooner or later */
        rapt_mha_state_destroy(used);
        used = NULL;
    }
}

static void test_backward_again(void **state) {
    (void)state;
    for_each_case(30, medium, check_repeated);
    training_case c; /* gives the last one back */
    test_random random = {1};
    make_training_case(reference, &random, RAPT_F64, (case_sizes){1, 1, 4, 1, 0}, &c);
    check_repeated(reference, &c);
    free_training_case(&c);
}

static void test_same_bits_for_threads_and_isas(void **state) {
    (void)state;
    static const int32_t threads[] = {1, 2, 3, 7};
    static const rapt_isa isas[] = {RAPT_ISA_AVX2, RAPT_ISA_AVX512, RAPT_ISA_NEON};
    const char *forced = getenv("RAPT_ISA");
    bool is_baseline = forced != NULL && strcmp(forced, "baseline") == 0; /* no bits to share */
    int cases = test_is_quick() ? 4 : 30;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)i + 5000};
        training_case c;
        make_training_case(cpu, &random, i % 2 == 0 ? RAPT_F32 : RAPT_F64, large, &c);
        gradient_set expected;
        train_once(cpu, &c, AS_LAYER, &expected);
        for (int t = 0; t < 4 + 3; t++) {
            rapt_isa isa = t < 4 ? RAPT_ISA_AUTO : isas[t - 4];
            if (t >= 4 && (is_baseline || !rapt_isa_available(isa))) continue;
            rapt_context *context = make_context(t < 4 ? threads[t] : 2, isa, RAPT_BACKEND_CPU);
            context->operations_worth_a_thread = 1; /* or small cases would run on one */
            gradient_set actual;
            train_once(context, &c, AS_LAYER, &actual);
            if (!same_layer_gradients(&expected, &actual)) {
                fail_case(t < 4 ? "other bits with other threads" : "other bits on another ISA", i, &c);
            }
            free_gradients(&actual);
            rapt_context_destroy(context);
        }
        free_gradients(&expected);
        free_training_case(&c);
    }
}

/* ---- ways to ask for the same ---- */

static void assert_close(const training_case *c, const char *what, double actual, double expected, double unit) {
    double epsilon = c->config.dtype == RAPT_F64 ? 0x1p-50 : 0x1p-21;
    if (!(fabs(actual - expected) <= epsilon * (unit + fabs(expected)))) {
        char text[200];
        snprintf(text, sizeof text, "%s: %.17g, expected %.17g", what, actual, expected);
        fail_case(text, 0, c);
    }
}

static void check_accumulation(rapt_context *context, const training_case *c) {
    test_random random = {5};
    gradient_set written, added;
    rapt_mha_state *state = make_state(context);
    training_result result = run_forward(context, c, state);
    make_gradients(&random, c, AS_LAYER, NAN, &written);
    make_gradients(&random, c, AS_LAYER, 3, &added);
    added.gradients.accumulate = true;
    run_backward(context, c, state, &written);
    run_backward(context, c, state, &added);
    for (int i = 0; i < SOURCES; i++) {
        int64_t count = written.tensor[i].data != NULL ? rapt_tensor_count(&written.tensor[i]) : 0;
        for (int64_t e = 0; e < count; e++) {
            double expected = 3 + get_element(&written.tensor[i], e);
            assert_close(c, source_names[i], get_element(&added.tensor[i], e), expected,
                         3 + largest_magnitude(&written.tensor[i]));
        }
    }
    free_gradients(&written);
    free_gradients(&added);
    free_training_result(&result);
    rapt_mha_state_destroy(state);
}

static void test_accumulation(void **state) {
    (void)state;
    for_each_case(30, medium, check_accumulation);
}

/* Fused and separate gradients are the same bits; inputs that get a tensor each add up to the one that all share. */
static void check_styles(rapt_context *context, const training_case *c) {
    gradient_set fused, apart;
    train_once(context, c, AS_LAYER, &fused);
    train_once(context, c, APART | PER_INPUT, &apart);
    int64_t q_rows = c->config.num_heads * c->config.head_dim, kv_rows = c->config.num_kv_heads * c->config.head_dim;
    const int64_t first[3] = {0, q_rows, q_rows + kv_rows}, rows[3] = {q_rows, kv_rows, kv_rows};
    for (int kind = 0; kind < 2; kind++) {
        const rapt_tensor *whole = &fused.tensor[kind == 0 ? IN_PROJ_WEIGHT : IN_PROJ_BIAS];
        for (int i = 0; i < 3 && whole->data != NULL; i++) {
            rapt_tensor part;
            assert_ok(context, rapt_tensor_slice(context, whole, 0, first[i], rows[i], &part));
            assert_true(same_bits(&part, &apart.tensor[(kind == 0 ? Q_PROJ_WEIGHT : Q_PROJ_BIAS) + i]));
        }
    }
    static const source others[] = {ATTN_MASK,       KEY_PADDING_MASK, BIAS_K,        BIAS_V,
                                    OUT_PROJ_WEIGHT, OUT_PROJ_BIAS,    Q_PROJ_WEIGHT, Q_PROJ_BIAS};
    for (int i = 0; i < 8; i++) {
        if (fused.tensor[others[i]].data == NULL) continue;
        assert_true(same_bits(&fused.tensor[others[i]], &apart.tensor[others[i]]));
    }
    const rapt_tensor *d = apart.tensor;
    if (!c->self) assert_true(same_bits(&fused.tensor[QUERY], &d[QUERY]));
    if (!c->same_kv) assert_true(same_bits(&fused.tensor[KEY], &d[KEY]) && same_bits(&fused.tensor[VALUE], &d[VALUE]));
    const rapt_tensor *sum = &fused.tensor[c->self ? QUERY : KEY];
    double unit = 1; /* rounding is that of the parts, which may be larger than their sum */
    for (int i = c->self ? QUERY : KEY; c->same_kv && i <= VALUE; i++) unit += largest_magnitude(&d[i]);
    for (int64_t e = 0; c->same_kv && e < rapt_tensor_count(sum); e++) {
        double expected = get_element(&d[KEY], e) + get_element(&d[VALUE], e);
        if (c->self) expected += get_element(&d[QUERY], e);
        assert_close(c, "sum of inputs", get_element(sum, e), expected, unit);
    }
    free_gradients(&fused);
    free_gradients(&apart);
}

static void test_styles(void **state) {
    (void)state;
    for_each_case(30, medium, check_styles);
}

/* Whatever else is wanted, a gradient has the same bits. */
static void check_alone(rapt_context *context, const training_case *c) {
    gradient_set all;
    train_once(context, c, APART | PER_INPUT, &all);
    rapt_mha_state *state = make_state(context);
    training_result result = run_forward(context, c, state);
    rapt_mha_gradients *g = &all.gradients;
    const rapt_tensor **given[SOURCES] = {&g->query,
                                          &g->key,
                                          &g->value,
                                          &g->attn_mask,
                                          &g->key_padding_mask,
                                          NULL,
                                          &g->q_proj_weight,
                                          &g->k_proj_weight,
                                          &g->v_proj_weight,
                                          NULL,
                                          &g->q_proj_bias,
                                          &g->k_proj_bias,
                                          &g->v_proj_bias,
                                          &g->bias_k,
                                          &g->bias_v,
                                          &g->out_proj_weight,
                                          &g->out_proj_bias};
    rapt_mha_gradients everything = *g;
    for (int i = 0; i < SOURCES; i++) {
        if (all.tensor[i].data == NULL) continue;
        rapt_tensor alone = make_tensor(all.tensor[i].dtype, all.tensor[i].ndim, all.tensor[i].shape);
        *g = (rapt_mha_gradients){0};
        fill_value(&alone, NAN);
        *given[i] = &alone;
        run_backward(context, c, state, &all);
        if (!same_bits(&alone, &all.tensor[i])) fail_case(source_names[i], 0, c);
        free_tensor(&alone);
    }
    *g = everything;
    free_gradients(&all);
    free_training_result(&result);
    rapt_mha_state_destroy(state);
}

static void test_each_alone(void **state) {
    (void)state;
    for_each_case(20, medium, check_alone);
}

static rapt_mha_weights weights_of(rapt_context *context, const training_case *c, rapt_tensor tensor[SOURCES]) {
    rapt_mha_weights w = rapt_mha_weights_default(c->config.num_heads);
    for (int i = IN_PROJ_WEIGHT; i < SOURCES; i++) tensor[i] = source_of(context, c, (source)i);
    bool fused = tensor[IN_PROJ_WEIGHT].data != NULL, bias = c->config.bias;
    w.num_kv_heads = c->config.num_kv_heads;
    w.head_dim = c->config.head_dim;
    w.add_zero_attn = c->config.add_zero_attn;
    w.batch_first = c->config.batch_first;
    w.causal = c->config.causal;
    w.set_scale = c->config.set_scale;
    w.scale = w.set_scale ? c->config.scale : 0;
    w.dropout = c->config.dropout;
    w.in_proj_weight = fused ? &tensor[IN_PROJ_WEIGHT] : NULL;
    w.q_proj_weight = fused ? NULL : &tensor[Q_PROJ_WEIGHT];
    w.k_proj_weight = fused ? NULL : &tensor[K_PROJ_WEIGHT];
    w.v_proj_weight = fused ? NULL : &tensor[V_PROJ_WEIGHT];
    w.in_proj_bias = bias ? &tensor[IN_PROJ_BIAS] : NULL;
    w.bias_k = c->config.add_bias_kv ? &tensor[BIAS_K] : NULL;
    w.bias_v = c->config.add_bias_kv ? &tensor[BIAS_V] : NULL;
    w.out_proj_weight = &tensor[OUT_PROJ_WEIGHT];
    w.out_proj_bias = bias ? &tensor[OUT_PROJ_BIAS] : NULL;
    return w;
}

static void check_functional(rapt_context *context, const training_case *c) {
    test_random random = {5};
    rapt_tensor tensor[SOURCES], out = make_tensor(c->config.dtype, c->query.ndim, c->query.shape), weights = {0};
    rapt_mha_weights w = weights_of(context, c, tensor);
    gradient_set by_layer, by_call;
    rapt_mha_state *state = make_state(context);
    rapt_options options = c->options;
    options.state = state;
    if (c->returns_weights) {
        weights = make_tensor(c->config.dtype, c->d_weights.ndim, c->d_weights.shape);
        options.weights = &weights;
    }
    train_once(context, c, AS_LAYER, &by_layer);
    make_gradients(&random, c, AS_LAYER, NAN, &by_call);
    assert_ok(context, rapt_mha_functional(context, &w, &c->query, key_of(c), value_of(c), &options, &out));
    assert_ok(context, rapt_mha_functional_backward(context, &w, state, &c->d_out,
                                                    c->returns_weights ? &c->d_weights : NULL, &by_call.gradients));
    assert_true(same_layer_gradients(&by_layer, &by_call));
    assert_int_equal(rapt_mha_state_saved(state)->version, 0);
    free_gradients(&by_layer);
    free_gradients(&by_call);
    free_tensor(&out);
    free_tensor(&weights);
    rapt_mha_state_destroy(state);
}

static void test_functional_is_the_layer(void **state) {
    (void)state;
    for_each_case(30, medium, check_functional);
}

/* ---- edges ---- */

/* A layer and a call of the given sizes, plain but for what the check sets. */
static void make_plain(rapt_context *context, rapt_mha_config config, int64_t n, int64_t l, int64_t s,
                       training_case *c) {
    test_random random = {9};
    config.batch_first = true;
    *c = (training_case){.batched = true, .n = n, .l = l, .s = s};
    assert_ok(context, rapt_mha_create(context, &config, &c->layer));
    c->config = *rapt_mha_settings(c->layer);
    for (int32_t i = 0; i < rapt_mha_num_tensors(c->layer); i++) {
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, c->layer, i, NULL, &view));
        fill_random(&random, &view, 0.5);
    }
    assert_ok(context, rapt_mha_commit(context, c->layer));
    c->query = make_tensor(config.dtype, 3, (int64_t[]){n, l, c->config.embed_dim});
    c->key = make_tensor(config.dtype, 3, (int64_t[]){n, s, c->config.kdim});
    c->value = make_tensor(config.dtype, 3, (int64_t[]){n, s, c->config.vdim});
    c->d_out = make_tensor(config.dtype, 3, c->query.shape);
    const rapt_tensor *filled[] = {&c->query, &c->key, &c->value, &c->d_out};
    for (int i = 0; i < 4; i++) fill_random(&random, filled[i], 1);
}

/* Nothing attends, or nothing is attended to: zeros where nothing reaches, and an output bias that still learns. */
static void test_empty(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{0, 3, 4}, {2, 0, 4}, {2, 3, 0}, {0, 0, 0}};
    rapt_context *contexts[] = {reference, cpu};
    for (int i = 0; i < 2 * 4 * 2; i++) {
        rapt_context *context = contexts[i % 2];
        const int64_t *z = sizes[i / 2 % 4];
        rapt_mha_config config = rapt_mha_config_default(6, 2);
        config.add_bias_kv = i / 8 == 1;
        training_case c;
        make_plain(context, config, z[0], z[1], z[2], &c);
        gradient_set set;
        train_once(context, &c, APART, &set);
        bool attends = z[0] * z[1] > 0;
        for (int s = 0; s < SOURCES; s++) {
            if (set.tensor[s].data == NULL) continue;
            double largest = largest_magnitude(&set.tensor[s]);
            int64_t count = rapt_tensor_count(&set.tensor[s]);
            for (int64_t e = 0; e < count; e++) assert_true(isfinite(get_element(&set.tensor[s], e)));
            bool learns =
                attends && (s == OUT_PROJ_BIAS || (config.add_bias_kv && (s == BIAS_V || s == OUT_PROJ_WEIGHT)));
            assert_true(learns ? largest > 0 : largest == 0);
        }
        free_gradients(&set);
        free_training_case(&c);
    }
}

/* NaN and infinity in keys and values that nobody sees reach no gradient. */
static void check_hidden(rapt_context *context, int way) {
    training_case c;
    rapt_mha_config config = rapt_mha_config_default(8, 2);
    config.kdim = 6;
    config.num_kv_heads = 1;
    make_plain(context, config, 2, 5, 7, &c);
    rapt_tensor mask = make_tensor(way == 0 ? RAPT_BOOL : RAPT_F32, 2, (int64_t[]){2, 7});
    static const int64_t start[2] = {2, 0}, lengths[2] = {5, 6};
    gradient_set clean, spoiled;
    for (int64_t n = 0; n < 2; n++) {
        for (int64_t j = 0; j < 7; j++) {
            bool hidden = j < start[n] || j >= start[n] + lengths[n];
            set_element(&mask, n * 7 + j, way == 0 ? hidden : hidden ? -INFINITY : 0);
        }
    }
    if (way < 2) {
        c.options.key_padding_mask = &mask;
    } else {
        c.options.key_start = start;
        c.options.key_lengths = lengths;
    }
    train_once(context, &c, AS_LAYER, &clean);
    for (int64_t i = 0; i < 2 * 7; i++) {
        int64_t n = i / 7, j = i % 7;
        if (j >= start[n] && j < start[n] + lengths[n]) continue;
        for (int64_t e = 0; e < 6; e++) set_element(&c.key, i * 6 + e, e % 2 == 0 ? NAN : INFINITY);
        for (int64_t e = 0; e < 8; e++) set_element(&c.value, i * 8 + e, e % 2 == 0 ? -INFINITY : NAN);
    }
    train_once(context, &c, AS_LAYER, &spoiled);
    assert_true(same_layer_gradients(&clean, &spoiled));
    free_gradients(&clean);
    free_gradients(&spoiled);
    free_tensor(&mask);
    free_training_case(&c);
}

static void test_hidden_reaches_nothing(void **state) {
    (void)state;
    for (int way = 0; way < 3; way++) {
        check_hidden(reference, way);
        check_hidden(cpu, way);
    }
}

/* Ready keys and values have gradients of their own; the projections that they stand for get zeros. */
static void check_static(rapt_context *context, bool accumulate) {
    training_case c;
    rapt_mha_config config = rapt_mha_config_default(8, 2);
    config.num_kv_heads = 1;
    config.dtype = RAPT_F64;
    make_plain(context, config, 2, 3, 4, &c);
    test_random random = {4};
    int64_t shape[3] = {2 * 1, 4, 4};
    double start = accumulate ? 2 : NAN, added = accumulate ? 2 : 0;
    rapt_tensor tensor[SOURCES], k = make_tensor(RAPT_F64, 3, shape), v = make_tensor(RAPT_F64, 3, shape);
    rapt_tensor dk = make_strided_tensor(&random, RAPT_F64, 3, shape), dv = make_tensor(RAPT_F64, 3, shape);
    rapt_tensor out = make_tensor(RAPT_F64, 3, c.query.shape);
    fill_random(&random, &k, 1);
    fill_random(&random, &v, 1);
    fill_value(&dk, start);
    fill_value(&dv, start);
    rapt_mha_weights w = weights_of(context, &c, tensor);
    rapt_mha_state *state = make_state(context);
    rapt_options options = {.static_k = &k, .static_v = &v, .state = state};
    gradient_set set;
    make_gradients(&random, &c, AS_LAYER, start, &set);
    set.gradients.static_k = &dk;
    set.gradients.static_v = &dv;
    set.gradients.accumulate = accumulate;
    assert_ok(context, rapt_mha_functional(context, &w, &c.query, &c.key, &c.value, &options, &out));
    assert_ok(context, rapt_mha_functional_backward(context, &w, state, &c.d_out, NULL, &set.gradients));
    const rapt_tensor *ready[2] = {&k, &v}, *gradient[2] = {&dk, &dv};
    options.state = NULL;
    for (int64_t i = 0; i < 2 * rapt_tensor_count(&k); i++) {
        const rapt_tensor *x = ready[i % 2];
        double value = get_element(x, i / 2), sums[2];
        for (int side = 0; side < 2; side++) {
            set_element(x, i / 2, value + (side == 0 ? 1e-5 : -1e-5));
            assert_ok(context, rapt_mha_functional(context, &w, &c.query, NULL, NULL, &options, &out));
            sums[side] = 0;
            for (int64_t e = 0; e < rapt_tensor_count(&out); e++) {
                sums[side] += get_element(&out, e) * get_element(&c.d_out, e);
            }
        }
        set_element(x, i / 2, value);
        double expected = added + (sums[0] - sums[1]) / 2e-5;
        assert_true(fabs(get_element(gradient[i % 2], i / 2) - expected) < 1e-8);
    }
    for (int64_t i = 0; i < rapt_tensor_count(&c.key); i++) {
        assert_true(get_element(&set.tensor[KEY], i) == added && get_element(&set.tensor[VALUE], i) == added);
    }
    for (int64_t row = 0; row < 16; row++) { /* H*D = 8 query rows, then the others */
        assert_true((get_element(&set.tensor[IN_PROJ_WEIGHT], row * 8) == added) == (row >= 8));
        if (row >= 8) assert_true(get_element(&set.tensor[IN_PROJ_BIAS], row) == added);
    }
    rapt_tensor *all[] = {&k, &v, &dk, &dv, &out};
    for (int i = 0; i < 5; i++) free_tensor(all[i]);
    free_gradients(&set);
    rapt_mha_state_destroy(state);
    free_training_case(&c);
}

static void test_static_keys(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) check_static(i % 2 == 0 ? reference : cpu, i / 2 == 1);
}

/* Gradients of ready keys and values of bf16 and f16 go straight to the caller, while the query's do not. */
static void test_static_keys_of_16_bits(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        rapt_dtype dtype = i % 2 == 0 ? RAPT_BF16 : RAPT_F16;
        rapt_mha_config config = rapt_mha_config_default(8, 2);
        config.dtype = dtype;
        int64_t shape[3] = {2 * 2, 4, 4};
        rapt_tensor result[2][3]; /* by the reference and by the CPU: query, static_k, static_v */
        for (int on = 0; on < 2; on++) {
            rapt_context *context = on == 0 ? reference : cpu;
            training_case c;
            make_plain(context, config, 2, 3, 4, &c);
            test_random random = {4};
            rapt_tensor tensor[SOURCES], k = make_tensor(dtype, 3, shape), v = make_tensor(dtype, 3, shape);
            rapt_tensor out = make_tensor(dtype, 3, c.query.shape), *r = result[on];
            fill_random(&random, &k, 1);
            fill_random(&random, &v, 1);
            r[0] = make_tensor(dtype, 3, c.query.shape);
            for (int g = 1; g < 3; g++) r[g] = make_strided_tensor(&random, dtype, 3, shape);
            for (int g = 0; g < 3; g++) fill_value(&r[g], 2);
            rapt_mha_weights w = weights_of(context, &c, tensor);
            rapt_mha_state *kept = make_state(context);
            rapt_options options = {.static_k = &k, .static_v = &v, .state = kept};
            rapt_mha_gradients gradients = {
                .query = &r[0], .static_k = &r[1], .static_v = &r[2], .accumulate = i / 2 == 1};
            assert_ok(context, rapt_mha_functional(context, &w, &c.query, NULL, NULL, &options, &out));
            assert_ok(context, rapt_mha_functional_backward(context, &w, kept, &c.d_out, NULL, &gradients));
            rapt_tensor *all[] = {&k, &v, &out};
            for (int t = 0; t < 3; t++) free_tensor(all[t]);
            rapt_mha_state_destroy(kept);
            free_training_case(&c);
        }
        for (int g = 0; g < 3; g++) {
            double largest = largest_magnitude(&result[0][g]);
            assert_true(largest > 0.01);
            assert_true(largest_difference(&result[1][g], &result[0][g]) <=
                        (dtype == RAPT_BF16 ? 0x1p-7 : 0x1p-10) * largest);
            for (int on = 0; on < 2; on++) free_tensor(&result[on][g]);
        }
    }
}

/* Of bf16 and f16, what lies between the steps is not rounded to them: with one key, value's gradient is
 * (1 + u)(1 + u) - (1 + 2u), of which rounding would leave nothing. */
static void test_gradients_are_rounded_once(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        rapt_context *context = i % 2 == 0 ? reference : cpu;
        double u = i < 2 ? 0x1p-7 : 0x1p-10; /* one unit in the last place of 1 */
        rapt_mha_config config = rapt_mha_config_default(2, 1);
        config.dtype = i < 2 ? RAPT_BF16 : RAPT_F16;
        config.bias = false;
        training_case c;
        make_plain(context, config, 1, 1, 1, &c);
        rapt_tensor in, out;
        assert_ok(context, rapt_mha_find(context, c.layer, "in_proj_weight", &in));
        assert_ok(context, rapt_mha_find(context, c.layer, "out_proj.weight", &out));
        const double values[4] = {1, 0, -1, 0}, outputs[4] = {1 + u, 0, 0, 1}, d_out[2] = {1 + u, 1 + 2 * u};
        for (int e = 0; e < 4; e++) {
            set_element(&in, 8 + e, values[e]); /* rows 4 and 5 are value's */
            set_element(&out, e, outputs[e]);
        }
        for (int e = 0; e < 2; e++) set_element(&c.d_out, e, d_out[e]);
        assert_ok(context, rapt_mha_commit(context, c.layer));
        gradient_set set;
        train_once(context, &c, APART, &set);
        assert_true(get_element(&set.tensor[VALUE], 0) == u * u);
        free_gradients(&set);
        free_training_case(&c);
    }
}

/* In eval mode nothing is drawn, and the gradients are those without dropout. */
static void test_modes(void **state) {
    (void)state;
    rapt_context *contexts[] = {reference, cpu};
    for (int i = 0; i < 2; i++) {
        training_case plain, dropping;
        rapt_mha_config config = rapt_mha_config_default(8, 2);
        make_plain(contexts[i], config, 2, 5, 5, &plain);
        config.dropout = 0.5;
        make_plain(contexts[i], config, 2, 5, 5, &dropping);
        gradient_set expected, trained, trained_again, evaluated;
        train_once(contexts[i], &plain, AS_LAYER, &expected);
        assert_ok(contexts[i], rapt_context_set_seed(contexts[i], 11));
        train_once(contexts[i], &dropping, AS_LAYER, &trained);
        train_once(contexts[i], &dropping, AS_LAYER, &trained_again); /* draws the next */
        assert_false(same_layer_gradients(&expected, &trained));
        assert_false(same_layer_gradients(&trained_again, &trained));
        free_gradients(&trained_again);
        dropping.options = (rapt_options){.set_dropout_seed = true, .dropout_seed = 11};
        train_once(contexts[i], &dropping, AS_LAYER, &trained_again);
        assert_true(same_layer_gradients(&trained_again, &trained));
        rapt_mha_eval(dropping.layer);
        train_once(contexts[i], &dropping, AS_LAYER, &evaluated);
        assert_true(same_layer_gradients(&expected, &evaluated));
        gradient_set *all[] = {&expected, &trained, &trained_again, &evaluated};
        for (int s = 0; s < 4; s++) free_gradients(all[s]);
        free_training_case(&plain);
        free_training_case(&dropping);
    }
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_backends_f32),
        cmocka_unit_test(test_backends_f64),
        cmocka_unit_test(test_backends_bf16),
        cmocka_unit_test(test_backends_f16),
        cmocka_unit_test(test_state_changes_no_bits),
        cmocka_unit_test(test_saved),
        cmocka_unit_test(test_lse_with_state),
        cmocka_unit_test(test_backward_again),
        cmocka_unit_test(test_same_bits_for_threads_and_isas),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_styles),
        cmocka_unit_test(test_each_alone),
        cmocka_unit_test(test_functional_is_the_layer),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_hidden_reaches_nothing),
        cmocka_unit_test(test_static_keys),
        cmocka_unit_test(test_static_keys_of_16_bits),
        cmocka_unit_test(test_gradients_are_rounded_once),
        cmocka_unit_test(test_modes),
    };
    return cmocka_run_group_tests_name("layer backward", tests, make_contexts, destroy_contexts);
}
