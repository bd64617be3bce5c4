/* test_memory.c - every byte comes through the caller's allocator, which may have none left; calls after a first one
 * allocate nothing; scratch memory grows with L + S */
#include "support.h"

#include "internal.h"

/* ---- an allocator that counts, checks and fails on demand ---- */

enum { MAX_BLOCKS = 64 };

typedef struct counter {
    int64_t allocations, fail_at; /* the number of the allocation to refuse, from 1; 0: none */
    size_t limit;                 /* larger ones are refused; 0: none */
    size_t live, largest;
    bool has_failed, is_wrong; /* a release of what was not allocated, or with another size */
    struct {
        void *pointer;
        size_t size;
    } block[MAX_BLOCKS];
} counter;

static void *counting_allocate(void *user, size_t size, size_t alignment) {
    counter *c = user;
    c->allocations++;
    if (c->allocations == c->fail_at || (c->limit > 0 && size > c->limit)) {
        c->has_failed = true;
        return NULL;
    }
    c->is_wrong |= size == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0;
    void *pointer = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    assert_non_null(pointer);
    memset(pointer, 0xa5, size);
    int slot = 0;
    while (slot < MAX_BLOCKS && c->block[slot].pointer != NULL) slot++;
    assert_true(slot < MAX_BLOCKS);
    c->block[slot].pointer = pointer;
    c->block[slot].size = size;
    c->live += size;
    if (size > c->largest) c->largest = size;
    return pointer;
}

static void counting_release(void *user, void *pointer, size_t size) {
    counter *c = user;
    int slot = 0;
    while (slot < MAX_BLOCKS && c->block[slot].pointer != pointer) slot++;
    if (pointer == NULL || slot == MAX_BLOCKS || c->block[slot].size != size) {
        c->is_wrong = true;
        return;
    }
    c->block[slot].pointer = NULL;
    c->live -= size;
    free(pointer);
}

static rapt_context_config counting_config(counter *c, int32_t threads) {
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = threads;
    config.allocator = (rapt_allocator){.user = c, .allocate = counting_allocate, .release = counting_release};
    return config;
}

static rapt_context *counting_context(counter *c, int32_t threads) {
    rapt_context_config config = counting_config(c, threads);
    rapt_context *context;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_OK);
    return context;
}

static void assert_nothing_left(const counter *c) {
    assert_false(c->is_wrong);
    assert_int_equal(c->live, 0);
}

/* Memory that the library gave out is as aligned as it asked for: parameters are where a caller can see it. */
static void assert_aligned(rapt_context *context, const rapt_mha *layer) {
    for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &view));
        assert_int_equal((uintptr_t)view.data % RAPT_ALIGNMENT, 0);
    }
}

/* ---- out of memory at every allocation in turn ---- */

enum { N = 2, L = 5, S = 5, E = 12, H = 4, KV = 2, DIM = 3 };

typedef struct stage { /* what the steps share */
    rapt_context *context;
    rapt_mha *layer;
    rapt_tensor x, y, heads, kv_heads, head_out, weights, lse, tokens, token_out, in_weight, in_bias, out_weight,
        out_bias;
    rapt_mha_weights ready;
} stage;

static stage t;

typedef rapt_status (*step)(void);

static rapt_status create_layer(void) {
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.num_kv_heads = KV;
    config.batch_first = config.add_bias_kv = true;
    return rapt_mha_create(t.context, &config, &t.layer);
}
static rapt_status create_copied(void) {
    return rapt_mha_create_from_weights(t.context, &t.ready, RAPT_COPY, &t.layer);
}
static rapt_status create_borrowed(void) {
    return rapt_mha_create_from_weights(t.context, &t.ready, RAPT_BORROW, &t.layer);
}
static rapt_status run_forward(void) { return rapt_mha_forward(t.context, t.layer, &t.x, &t.x, &t.x, NULL, &t.y); }
static rapt_status run_forward_lse(void) {
    rapt_options options = {.lse = &t.lse, .causal = true};
    return rapt_mha_forward(t.context, t.layer, &t.x, &t.x, &t.x, &options, &t.y);
}
static rapt_status run_token(void) { return rapt_mha_forward_token(t.context, t.layer, &t.tokens, &t.token_out); }
static rapt_status run_functional(void) {
    return rapt_mha_functional(t.context, &t.ready, &t.x, &t.x, &t.x, NULL, &t.y);
}
static rapt_status run_operator(void) {
    return rapt_attention_forward(t.context, &t.heads, &t.kv_heads, &t.kv_heads, NULL, &t.head_out);
}
static rapt_status run_operator_weights(void) {
    rapt_options options = {.weights = &t.weights, .lse = &t.lse};
    return rapt_attention_forward(t.context, &t.heads, &t.kv_heads, &t.kv_heads, &options, &t.head_out);
}

static uint64_t sum_results(void) {
    const rapt_tensor *results[] = {&t.y, &t.head_out, &t.weights, &t.lse, &t.token_out};
    uint64_t sum = 0;
    for (int i = 0; i < 5; i++) sum = checksum(sum, results[i]);
    return sum;
}

static void clear_results(void) {
    const rapt_tensor *results[] = {&t.y, &t.head_out, &t.weights, &t.lse, &t.token_out};
    for (int i = 0; i < 5; i++) fill_value(results[i], 77);
}

static bool creates(step call) { return call == create_layer || call == create_copied || call == create_borrowed; }

/* One step: refused by the allocator it changes nothing, and works the next time. */
static void run_step(counter *c, step call) {
    clear_results();
    uint64_t untouched = sum_results();
    c->has_failed = false;
    t.layer = creates(call) ? (rapt_mha *)(void *)&t : t.layer;
    rapt_status status = call();
    if (c->has_failed) {
        assert_int_equal(status, RAPT_ERROR_MEMORY);
        assert_non_null(strstr(rapt_error_message(t.context), "out of memory: "));
        assert_int_equal(sum_results(), untouched);
        if (creates(call)) assert_null(t.layer);
        status = call();
    }
    assert_ok(t.context, status);
    if (!creates(call)) assert_int_not_equal(sum_results(), untouched);
}

/* Creates a context and a layer and makes one call, with one allocation refused. False when there was none left. */
static bool run_round(step create, step call, int32_t threads, int64_t fail_at) {
    counter c = {.fail_at = fail_at};
    char text[200] = "";
    rapt_context_config config = counting_config(&c, threads);
    config.error_text = text;
    config.error_text_size = sizeof text;
    rapt_status status = rapt_context_create(&config, &t.context);
    if (c.has_failed) {
        assert_int_equal(status, RAPT_ERROR_MEMORY);
        assert_null(t.context);
        assert_non_null(strstr(text, "out of memory: "));
        assert_nothing_left(&c);
        status = rapt_context_create(&config, &t.context);
    }
    assert_int_equal(status, RAPT_OK);
    run_step(&c, create);
    if (create != create_borrowed) assert_aligned(t.context, t.layer);
    int64_t earlier = c.allocations;
    run_step(&c, call);
    assert_true(c.allocations > earlier); /* or the round would not test it */
    rapt_mha_destroy(t.layer);
    rapt_context_destroy(t.context);
    assert_nothing_left(&c);
    return c.allocations >= fail_at;
}

static void set_stage(void) {
    test_random random = {1};
    t.x = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, E});
    t.y = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, E});
    t.heads = make_tensor(RAPT_F32, 4, (int64_t[]){N, H, L, DIM});
    t.kv_heads = make_tensor(RAPT_F32, 4, (int64_t[]){N, KV, S, DIM});
    t.head_out = make_tensor(RAPT_F32, 4, (int64_t[]){N, H, L, DIM});
    t.weights = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, S});
    t.lse = make_tensor(RAPT_F32, 3, (int64_t[]){N, H, L});
    t.tokens = make_tensor(RAPT_F32, 2, (int64_t[]){N, E});
    t.token_out = make_tensor(RAPT_F32, 2, (int64_t[]){N, E});
    t.in_weight = make_tensor(RAPT_F32, 2, (int64_t[]){(H + 2 * KV) * DIM, E});
    t.in_bias = make_tensor(RAPT_F32, 1, (int64_t[]){(H + 2 * KV) * DIM});
    t.out_weight = make_tensor(RAPT_F32, 2, (int64_t[]){E, H * DIM});
    t.out_bias = make_tensor(RAPT_F32, 1, (int64_t[]){E});
    const rapt_tensor *inputs[] = {&t.x,         &t.heads,   &t.kv_heads,   &t.tokens,
                                   &t.in_weight, &t.in_bias, &t.out_weight, &t.out_bias};
    for (int i = 0; i < 8; i++) fill_random(&random, inputs[i], 1);
    t.ready = rapt_mha_weights_default(H);
    t.ready.num_kv_heads = KV;
    t.ready.batch_first = true;
    t.ready.in_proj_weight = &t.in_weight;
    t.ready.in_proj_bias = &t.in_bias;
    t.ready.out_proj_weight = &t.out_weight;
    t.ready.out_proj_bias = &t.out_bias;
}

static void clear_stage(void) {
    for (rapt_tensor *tensor = &t.x; tensor <= &t.out_bias; tensor++) free_tensor(tensor);
}

static void test_out_of_memory(void **state) {
    (void)state;
    const step create[] = {create_layer, create_copied, create_borrowed};
    const step call[] = {run_forward, run_forward_lse, run_token, run_functional, run_operator, run_operator_weights};
    set_stage();
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 6; j++) {
                int64_t fail_at = 1;
                while (run_round(create[i], call[j], threads, fail_at)) fail_at++;
                int64_t of_context = threads > 1 ? 3 : 1, of_layer = create[i] == create_borrowed ? 2 : 3;
                assert_true(fail_at > of_context + of_layer); /* each of them was refused once */
            }
        }
    }
    clear_stage();
}

/* The last context's allocator serves its layers after it is gone. */
/* Blocks of the default allocator: every one is aligned, large ones to large pages, and all of it can be written. */
static void test_default_allocator(void **state) {
    (void)state;
    rapt_allocator allocator = rapt_allocator_or_default(NULL);
    const size_t sizes[] = {1, 63, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) - 64};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *block = rapt_allocate(&allocator, sizes[i]);
        assert_non_null(block);
        assert_int_equal((uintptr_t)block % (sizes[i] < 4 << 20 ? 64 : 2 << 20), 0);
        memset(block, 1, sizes[i]);
        rapt_release(&allocator, block, sizes[i]);
    }
    assert_null(rapt_allocate(&allocator, SIZE_MAX));
}

static void test_layer_keeps_allocator(void **state) {
    (void)state;
    counter c = {0};
    rapt_context *context = counting_context(&c, 1);
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_mha(context, 8, 2, &layer));
    rapt_context_destroy(context);
    assert_true(c.live > 0);
    rapt_mha_destroy(layer);
    assert_nothing_left(&c);
}

/* ---- training ---- */

typedef struct training {
    rapt_context *context;
    rapt_mha *layer;
    rapt_mha_state *state;
    rapt_tensor x, y, d_y, d_x, d_weight, d_bias, d_bias_k; /* of L tokens; a call may take fewer */
    rapt_mha_gradients gradients;
    counter *counter;
} training;

static void set_training(training *a, counter *c) {
    test_random random = {2};
    int64_t shape[3] = {N, L, E}, rows = (H + 2 * KV) * DIM;
    *a = (training){.counter = c};
    a->x = make_tensor(RAPT_F32, 3, shape);
    a->y = make_tensor(RAPT_F32, 3, shape);
    a->d_y = make_tensor(RAPT_F32, 3, shape);
    a->d_x = make_tensor(RAPT_F32, 3, shape);
    a->d_weight = make_tensor(RAPT_F32, 2, (int64_t[]){rows, E});
    a->d_bias = make_tensor(RAPT_F32, 1, &rows);
    a->d_bias_k = make_tensor(RAPT_F32, 3, (int64_t[]){1, 1, KV * DIM});
    const rapt_tensor *filled[] = {&a->x, &a->d_y, &a->y, &a->d_x, &a->d_weight, &a->d_bias, &a->d_bias_k};
    for (int i = 0; i < 7; i++) fill_random(&random, filled[i], 1);
    a->gradients =
        (rapt_mha_gradients){.in_proj_weight = &a->d_weight, .in_proj_bias = &a->d_bias, .bias_k = &a->d_bias_k};
}

static void clear_training(training *a) {
    rapt_tensor *all[] = {&a->x, &a->y, &a->d_y, &a->d_x, &a->d_weight, &a->d_bias, &a->d_bias_k};
    for (int i = 0; i < 7; i++) free_tensor(all[i]);
    rapt_mha_state_destroy(a->state);
    rapt_mha_destroy(a->layer);
    rapt_context_destroy(a->context);
}

static uint64_t sum_training(const training *a) {
    const rapt_tensor *written[] = {&a->y, &a->d_x, &a->d_weight, &a->d_bias, &a->d_bias_k};
    const rapt_mha_saved *saved = rapt_mha_state_saved(a->state);
    uint64_t sum = 0;
    for (int i = 0; i < 5; i++) sum = checksum(sum, written[i]);
    if (saved == NULL) return sum;
    const rapt_tensor *kept[] = {&saved->query, &saved->key, &saved->value, &saved->attended, &saved->lse};
    for (int i = 0; i < 5; i++) sum = checksum(sum, kept[i]);
    return sum;
}

static rapt_status make_training_layer(training *a, int64_t tokens) {
    (void)tokens;
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.num_kv_heads = KV;
    config.batch_first = config.add_bias_kv = true;
    config.dropout = 0.5;
    return rapt_mha_create(a->context, &config, &a->layer);
}
static rapt_status make_training_state(training *a, int64_t tokens) {
    (void)tokens;
    return rapt_mha_state_create(a->context, &a->state);
}
static rapt_status forward_with_state(training *a, int64_t tokens) {
    rapt_tensor x, y;
    rapt_options options = {.causal = true, .state = a->state, .set_dropout_seed = true};
    assert_ok(a->context, rapt_tensor_slice(a->context, &a->x, 1, 0, tokens, &x));
    assert_ok(a->context, rapt_tensor_slice(a->context, &a->y, 1, 0, tokens, &y));
    return rapt_mha_forward(a->context, a->layer, &x, &x, &x, &options, &y);
}
static rapt_status run_backward(training *a, int64_t tokens) {
    rapt_tensor d_x, d_y;
    assert_ok(a->context, rapt_tensor_slice(a->context, &a->d_x, 1, 0, tokens, &d_x));
    assert_ok(a->context, rapt_tensor_slice(a->context, &a->d_y, 1, 0, tokens, &d_y));
    a->gradients.query = a->gradients.key = a->gradients.value = &d_x;
    return rapt_mha_backward(a->context, a->layer, a->state, &d_y, NULL, &a->gradients);
}

/* Refused by the allocator, a step changes neither results nor what the state keeps, and works the next time. */
static void train_step(training *a, rapt_status (*call)(training *a, int64_t tokens), int64_t tokens) {
    uint64_t untouched = sum_training(a);
    a->counter->has_failed = false;
    rapt_status status = call(a, tokens);
    if (a->counter->has_failed) {
        assert_int_equal(status, RAPT_ERROR_MEMORY);
        assert_non_null(strstr(rapt_error_message(a->context), "out of memory: "));
        assert_int_equal(sum_training(a), untouched);
        status = call(a, tokens);
    }
    assert_ok(a->context, status);
}

/* A short sequence, then a longer one for which the state must grow. False when nothing was left to refuse. */
static bool train_round(int32_t threads, int64_t fail_at, uint64_t *sum) {
    counter c = {0};
    training a;
    set_training(&a, &c);
    a.context = counting_context(&c, threads);
    c.fail_at = fail_at == 0 ? 0 : c.allocations + fail_at;
    train_step(&a, make_training_layer, 0);
    train_step(&a, make_training_state, 0);
    for (int64_t tokens = 2; tokens <= L; tokens += L - 2) {
        train_step(&a, forward_with_state, tokens);
        train_step(&a, run_backward, tokens);
    }
    *sum = sum_training(&a);
    int64_t allocations = c.allocations;
    for (int64_t tokens = L; tokens > 0; tokens--) { /* none with sizes no larger allocates */
        train_step(&a, forward_with_state, tokens);
        train_step(&a, run_backward, tokens);
    }
    assert_int_equal(c.allocations, allocations);
    clear_training(&a);
    assert_nothing_left(&c);
    return allocations >= c.fail_at;
}

static void test_training_out_of_memory(void **state) {
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        uint64_t expected, sum;
        int64_t fail_at = 1;
        train_round(threads, 0, &expected);
        for (; train_round(threads, fail_at, &sum); fail_at++) assert_int_equal(sum, expected);
        assert_true(fail_at > 3 + 1 + 2 + 2); /* the layer, the state, its memory twice, scratch memory */
    }
}

static void test_state_keeps_allocator(void **state) {
    (void)state;
    counter c = {0};
    training a;
    set_training(&a, &c);
    a.context = counting_context(&c, 1);
    train_step(&a, make_training_layer, 0);
    train_step(&a, make_training_state, 0);
    train_step(&a, forward_with_state, L);
    rapt_context_destroy(a.context); /* the state stays */
    a.context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    train_step(&a, run_backward, L);
    clear_training(&a);
    assert_nothing_left(&c);
}

/* ---- after a call, none with sizes no larger allocates ---- */

typedef struct operator_sizes {
    int64_t n, heads, kv_heads, l, s, d, dv;
} operator_sizes;

static void call_operator(rapt_context *context, rapt_dtype dtype, operator_sizes z, int weights) {
    rapt_tensor q = make_tensor(dtype, 4, (int64_t[]){z.n, z.heads, z.l, z.d});
    rapt_tensor k = make_tensor(dtype, 4, (int64_t[]){z.n, z.kv_heads, z.s, z.d});
    rapt_tensor v = make_tensor(dtype, 4, (int64_t[]){z.n, z.kv_heads, z.s, z.dv});
    rapt_tensor out = make_tensor(dtype, 4, (int64_t[]){z.n, z.heads, z.l, z.dv});
    rapt_tensor w = make_tensor(dtype, weights == 2 ? 4 : 3,
                                weights == 2 ? (int64_t[]){z.n, z.heads, z.l, z.s} : (int64_t[]){z.n, z.l, z.s, 0});
    rapt_options options = {.weights = weights > 0 ? &w : NULL, .per_head_weights = weights == 2};
    assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &options, &out));
    rapt_tensor *all[] = {&q, &k, &v, &out, &w};
    for (int i = 0; i < 5; i++) free_tensor(all[i]);
}

static int64_t some_divisor(test_random *random, int64_t number, int64_t at_most) {
    int64_t divisor = random_between(random, 1, at_most < number ? at_most : number);
    while (number % divisor != 0) divisor--;
    return divisor;
}

static void test_operator_allocates_once(void **state) {
    (void)state;
    test_random random = {2};
    const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    int rounds = test_is_quick() ? 12 : 120;
    for (int round = 0; round < rounds; round++) {
        counter c = {0};
        int32_t threads = round % 2 == 0 ? 1 : 3;
        rapt_context *context = counting_context(&c, threads);
        rapt_dtype dtype = dtypes[round / 2 % 4];
        int weights = round / 8 % 3;
        int64_t heads = random_between(&random, 1, 6);
        operator_sizes most = {random_between(&random, 1, 3),
                               heads,
                               some_divisor(&random, heads, heads),
                               random_between(&random, 1, 60),
                               random_between(&random, 1, random_chance(&random, 0.5) ? 40 : 600),
                               random_between(&random, 1, 24),
                               random_between(&random, 1, 40)};
        call_operator(context, dtype, most, weights);
        for (int i = 0; i < 12; i++) {
            operator_sizes z = most;
            bool all = random_chance(&random, 0.5); /* or just a few of them shrink */
            if (all || random_chance(&random, 0.3)) z.n = random_between(&random, 1, most.n);
            if (all || random_chance(&random, 0.3)) z.heads = random_between(&random, 1, most.heads);
            z.kv_heads = some_divisor(&random, z.heads, most.kv_heads);
            if (all || random_chance(&random, 0.3)) z.l = random_between(&random, 1, most.l);
            if (all || random_chance(&random, 0.3)) z.s = random_between(&random, 1, most.s);
            if (all || random_chance(&random, 0.3)) z.d = random_between(&random, 1, most.d);
            if (all || random_chance(&random, 0.3)) z.dv = random_between(&random, 1, most.dv);
            int64_t earlier = c.allocations;
            call_operator(context, dtype, z, random_chance(&random, 0.5) ? weights : 0);
            if (c.allocations != earlier) {
                fail_msg("%s, %d threads, weights %d: N %d H %d Hk %d L %d S %d D %d Dv %d, then N %d H %d Hk %d L %d "
                         "S %d D %d Dv %d",
                         rapt_dtype_name(dtype), threads, weights, (int)most.n, (int)most.heads, (int)most.kv_heads,
                         (int)most.l, (int)most.s, (int)most.d, (int)most.dv, (int)z.n, (int)z.heads, (int)z.kv_heads,
                         (int)z.l, (int)z.s, (int)z.d, (int)z.dv);
            }
        }
        rapt_context_destroy(context);
        assert_nothing_left(&c);
    }
}

/* Units of 73 to 256 rows are one tile if there are many of them, several if there are few. */
static void test_fewer_units_allocate_nothing(void **state) {
    (void)state;
    const operator_sizes most[] = {{4, 4, 4, 200, 4096, 64, 64}, {16, 1, 1, 200, 25600, 16, 16}};
    for (int i = 0; i < 2; i++) {
        counter c = {0};
        rapt_context *context = counting_context(&c, 2);
        call_operator(context, RAPT_F32, most[i], 0);
        int64_t earlier = c.allocations;
        for (int64_t n = most[i].n; n >= 1; n /= 2) {
            operator_sizes fewer = most[i];
            fewer.n = n;
            call_operator(context, RAPT_F32, fewer, 0);
        }
        assert_int_equal(c.allocations, earlier);
        rapt_context_destroy(context);
        assert_nothing_left(&c);
    }
}

/* Token after token within a window, long after the ring has turned: no memory is asked for any more. */
static void test_decoding_allocates_nothing(void **state) {
    (void)state;
    counter c = {0};
    rapt_context *context = counting_context(&c, 2);
    rapt_mha *layer;
    rapt_cache *cache;
    assert_int_equal(rapt_mha_create_gqa(context, 16, 4, 2, &layer), RAPT_OK);
    rapt_cache_config config = rapt_cache_config_default(2, 1000000);
    config.window = 300;
    assert_int_equal(rapt_cache_create(context, layer, &config, &cache), RAPT_OK);
    rapt_rotary rotary = rapt_rotary_default(10000);
    rapt_options options = {.causal = true, .cache = cache, .rotary = &rotary};
    rapt_tensor x = make_tensor(RAPT_F32, 3, (int64_t[]){40, 2, 16}), y = make_tensor(RAPT_F32, 3, x.shape), token, out;
    int64_t allocations = 0;
    for (int i = 0; i < 200; i++) {
        int64_t tokens = i % 50 == 0 ? 40 : 1;
        assert_int_equal(rapt_tensor_slice(context, &x, 0, 0, tokens, &token), RAPT_OK);
        assert_int_equal(rapt_tensor_slice(context, &y, 0, 0, tokens, &out), RAPT_OK);
        assert_int_equal(rapt_mha_forward(context, layer, &token, &token, &token, &options, &out), RAPT_OK);
        if (i == 49) { /* the window is full */
            rapt_tensor many = make_tensor(RAPT_F32, 3, (int64_t[]){600, 2, 16}),
                        all = make_tensor(RAPT_F32, 3, many.shape);
            assert_int_equal(rapt_mha_forward(context, layer, &many, &many, &many, &options, &all), RAPT_OK);
            free_tensor(&many);
            free_tensor(&all);
            allocations = c.allocations;
        }
    }
    assert_int_equal(c.allocations, allocations);
    free_tensor(&x);
    free_tensor(&y);
    rapt_cache_destroy(cache);
    rapt_mha_destroy(layer);
    rapt_context_destroy(context);
    assert_nothing_left(&c);
}

/* A larger call replaces the scratch memory; one that cannot have it leaves the old one for smaller calls. */
static void test_scratch_is_replaced(void **state) {
    (void)state;
    counter c = {0};
    rapt_context *context = counting_context(&c, 2);
    size_t earlier = c.live;
    for (int64_t length = 20; length <= 500; length *= 5) {
        call_operator(context, RAPT_F32, (operator_sizes){1, 2, 2, length, length, 8, 8}, 1);
        assert_int_equal(c.live, earlier + c.largest);
    }
    int64_t allocations = c.allocations;
    c.limit = c.largest;
    rapt_tensor x = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, 3000, 8}), y = make_tensor(RAPT_F32, 4, x.shape);
    assert_int_equal(rapt_attention_forward(context, &x, &x, &x, NULL, &y), RAPT_ERROR_MEMORY);
    assert_int_equal(c.allocations, allocations + 1);
    assert_int_equal(c.live, earlier + c.largest);
    call_operator(context, RAPT_F32, (operator_sizes){1, 2, 2, 500, 500, 8, 8}, 1);
    assert_int_equal(c.allocations, allocations + 1);
    free_tensor(&x);
    free_tensor(&y);
    rapt_context_destroy(context);
    assert_nothing_left(&c);
}

typedef struct layer_sizes {
    int64_t n, l, s; /* s 0: self-attention with one tensor */
} layer_sizes;

static void call_layer(rapt_context *context, const rapt_mha *layer, layer_sizes z, int weights) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    int64_t s = z.s == 0 ? z.l : z.s, columns = s + (c->add_bias_kv ? 1 : 0) + (c->add_zero_attn ? 1 : 0);
    rapt_tensor q = make_tensor(c->dtype, 3, (int64_t[]){z.n, z.l, c->embed_dim});
    rapt_tensor k = make_tensor(c->dtype, 3, (int64_t[]){z.n, s, c->embed_dim});
    rapt_tensor v = make_tensor(c->dtype, 3, (int64_t[]){z.n, s, c->embed_dim});
    rapt_tensor out = make_tensor(c->dtype, 3, q.shape);
    rapt_tensor w =
        make_tensor(c->dtype, weights == 2 ? 4 : 3,
                    weights == 2 ? (int64_t[]){z.n, c->num_heads, z.l, columns} : (int64_t[]){z.n, z.l, columns, 0});
    rapt_options options = {.weights = weights > 0 ? &w : NULL, .per_head_weights = weights == 2};
    assert_ok(context, rapt_mha_forward(context, layer, &q, z.s == 0 ? &q : &k, z.s == 0 ? &q : &v, &options, &out));
    rapt_tensor *all[] = {&q, &k, &v, &out, &w};
    for (int i = 0; i < 5; i++) free_tensor(all[i]);
}

static void call_tokens(rapt_context *context, const rapt_mha *layer, int64_t n) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    rapt_tensor x = make_tensor(c->dtype, 2, (int64_t[]){n, c->embed_dim}), y = make_tensor(c->dtype, 2, x.shape);
    assert_ok(context, rapt_mha_forward_token(context, layer, &x, &y));
    free_tensor(&x);
    free_tensor(&y);
}

static void test_layer_allocates_once(void **state) {
    (void)state;
    test_random random = {3};
    const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    int rounds = test_is_quick() ? 12 : 96;
    for (int round = 0; round < rounds; round++) {
        counter c = {0};
        int32_t threads = round % 2 == 0 ? 1 : 3;
        int weights = round / 8 % 3;
        rapt_context *context = counting_context(&c, threads);
        rapt_mha_config config = rapt_mha_config_default(random_between(&random, 1, 40), random_between(&random, 1, 4));
        config.head_dim = random_between(&random, 1, 20);
        config.num_kv_heads = some_divisor(&random, config.num_heads, config.num_heads);
        config.add_bias_kv = random_chance(&random, 0.3);
        config.add_zero_attn = random_chance(&random, 0.3);
        config.batch_first = true;
        config.dtype = dtypes[round / 2 % 4];
        rapt_mha *layer;
        assert_ok(context, rapt_mha_create(context, &config, &layer));
        layer_sizes most = {random_between(&random, 1, 3),
                            random_between(&random, 1, random_chance(&random, 0.2) ? 300 : 50),
                            random_between(&random, 1, random_chance(&random, 0.5) ? 40 : 400)};
        call_layer(context, layer, most, weights);
        for (int i = 0; i < 12; i++) {
            layer_sizes z = {random_between(&random, 1, most.n), random_between(&random, 1, most.l),
                             random_between(&random, 1, most.s)};
            if (random_chance(&random, 0.3) && z.l <= most.s) z.s = 0;
            bool tokens = random_chance(&random, 0.2);
            int64_t earlier = c.allocations;
            if (tokens) {
                call_tokens(context, layer, z.n);
            } else {
                call_layer(context, layer, z, random_chance(&random, 0.5) ? weights : 0);
            }
            if (c.allocations != earlier) {
                char text[300];
                rapt_mha_describe(layer, text, sizeof text);
                fail_msg("%s, %d threads, weights %d: N %d L %d S %d, then %sN %d L %d S %d", text, threads, weights,
                         (int)most.n, (int)most.l, (int)most.s, tokens ? "tokens " : "", (int)z.n, (int)z.l, (int)z.s);
            }
        }
        rapt_mha_destroy(layer);
        rapt_context_destroy(context);
        assert_nothing_left(&c);
    }
}

/* ---- memory grows with L + S ---- */

static size_t operator_arena(int64_t length, int32_t threads) {
    counter c = {0};
    rapt_context *context = counting_context(&c, threads);
    size_t earlier = c.live;
    call_operator(context, RAPT_F32, (operator_sizes){1, 2, 2, length, length, 8, 8}, 0);
    size_t arena = c.live - earlier;
    rapt_context_destroy(context);
    return arena;
}

static size_t layer_arena(int64_t length, int32_t threads) {
    counter c = {0};
    rapt_context *context = counting_context(&c, threads);
    rapt_mha *layer;
    rapt_mha_config config = rapt_mha_config_default(16, 2);
    config.batch_first = true;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    size_t earlier = c.live;
    call_layer(context, layer, (layer_sizes){1, length, 0}, 0);
    size_t arena = c.live - earlier;
    rapt_mha_destroy(layer);
    rapt_context_destroy(context);
    return arena;
}

static void test_linear_growth(void **state) {
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads++) {
        size_t one = operator_arena(1024, threads), two = operator_arena(2048, threads);
        assert_true(one > 0 && (double)two < 2.2 * (double)one);
        one = layer_arena(1024, threads);
        two = layer_arena(2048, threads);
        assert_true(one > 0 && (double)two < 2.2 * (double)one);
    }
}

/* A long sequence of a large model, without computing it: 16 heads of 128, 4096 queries and keys. */
static void test_scratch_of_long_sequences(void **state) {
    (void)state;
    const int64_t length = 4096;
    attn_problem p = {.dtype = RAPT_F32,
                      .batch = 1,
                      .heads = 16,
                      .kv_heads = 16,
                      .queries = length,
                      .keys = length,
                      .dim = 128,
                      .value_dim = 128};
    for (int32_t lanes = 1; lanes <= 64; lanes *= 2) {
        const rapt_context imagined = {.lanes = lanes};
        size_t bytes = rapt_backend_cpu.attn_scratch(&imagined, &p);
        assert_true(bytes > 0 && bytes < (size_t)lanes * 8 * 1000 * 1000);
    }
}

/* ---- sizes that no machine has ---- */

#define HUGE_SIZE ((int64_t)1 << 40)

static float one_number[64] = {1};

/* A tensor of any size over a single number. */
static rapt_tensor broadcast(int32_t ndim, const int64_t *shape) {
    return rapt_tensor_strided(one_number, RAPT_F32, ndim, shape, (int64_t[]){0, 0, 0, 0});
}

/* A result that would be too large for any memory: a call that does not fail before it writes there crashes. */
static rapt_tensor imaginary(int32_t ndim, const int64_t *shape) {
    return rapt_tensor_of((void *)((uintptr_t)1 << 62), RAPT_F32, ndim, shape); // NOLINT(performance-no-int-to-ptr)
}

static void assert_too_large(rapt_context *context, rapt_status status) {
    if (status != RAPT_ERROR_MEMORY && status != RAPT_ERROR_OVERFLOW) {
        fail_msg("%s: %s", rapt_status_name(status), status == RAPT_OK ? "" : rapt_error_message(context));
    }
}

static void huge_operator(rapt_context *context, operator_sizes z, bool weights) {
    rapt_tensor q = broadcast(4, (int64_t[]){z.n, z.heads, z.l, z.d}),
                k = broadcast(4, (int64_t[]){z.n, z.kv_heads, z.s, z.d});
    rapt_tensor v = broadcast(4, (int64_t[]){z.n, z.kv_heads, z.s, z.dv}),
                out = imaginary(4, (int64_t[]){z.n, z.heads, z.l, z.dv});
    rapt_tensor w = imaginary(3, (int64_t[]){z.n, z.l, z.s});
    w.data = (char *)w.data + ((uintptr_t)1 << 61);
    rapt_options options = {.weights = weights ? &w : NULL};
    assert_too_large(context, rapt_attention_forward(context, &q, &k, &v, &options, &out));
}

/* The functional form with stride-0 weights: heads of one dimension, E = 1. */
static void huge_functional(rapt_context *context, int64_t n, int64_t heads, int64_t l, int64_t s, bool mask) {
    rapt_tensor q_weight = broadcast(2, (int64_t[]){heads, 1}), out_weight = broadcast(2, (int64_t[]){1, heads});
    rapt_mha_weights w = rapt_mha_weights_default(heads);
    w.q_proj_weight = w.k_proj_weight = w.v_proj_weight = &q_weight;
    w.out_proj_weight = &out_weight;
    w.batch_first = true;
    rapt_tensor q = broadcast(3, (int64_t[]){n, l, 1}), k = broadcast(3, (int64_t[]){n, s, 1}),
                out = imaginary(3, q.shape);
    rapt_tensor mask_row = broadcast(4, (int64_t[]){1, 1, 1, s});
    rapt_options options = {.attn_mask = mask ? &mask_row : NULL};
    assert_too_large(context, rapt_mha_functional(context, &w, &q, &k, &k, &options, &out));
}

static void test_huge_sizes(void **state) {
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        counter c = {.limit = (size_t)1 << 30};
        rapt_context *context = counting_context(&c, threads);
        int64_t earlier = c.allocations;
        huge_operator(context, (operator_sizes){1, 1, 1, 1, HUGE_SIZE, 1, 1}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, HUGE_SIZE, 1, 1}, true);
        huge_operator(context, (operator_sizes){HUGE_SIZE, 1, 1, 1, 1, 1, 1}, false);
        huge_operator(context, (operator_sizes){HUGE_SIZE, 1, 1, 1, 0, 1, 1}, false);
        huge_operator(context, (operator_sizes){1, HUGE_SIZE, HUGE_SIZE, 1, 1, 1, 1}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, 1, HUGE_SIZE, 1}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, 1, 1, HUGE_SIZE}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, HUGE_SIZE, 1, 1, 1}, true);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, HUGE_SIZE << 20, 1, 1}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, 1, HUGE_SIZE << 20, HUGE_SIZE << 20}, false);
        huge_operator(context, (operator_sizes){1, 1, 1, 1, 0, HUGE_SIZE << 20, HUGE_SIZE << 20}, false);
        huge_operator(context, (operator_sizes){HUGE_SIZE, 1, 1, 1, HUGE_SIZE, 1, 1},
                      false); /* more bytes than int64 */
        huge_functional(context, HUGE_SIZE, 1, 1, 1, false);
        huge_functional(context, 1, 1, HUGE_SIZE, 1, false);
        huge_functional(context, 1, 1, 1, HUGE_SIZE, false);
        huge_functional(context, 1, HUGE_SIZE, 1, 1, false);
        huge_functional(context, HUGE_SIZE, HUGE_SIZE, 1, 1, false); /* N * H overflows, though no tensor does */
        huge_functional(context, HUGE_SIZE, HUGE_SIZE, 2, 2, true);
        huge_functional(context, 1, HUGE_SIZE, HUGE_SIZE, 1, false); /* H * L */
        huge_functional(context, 1, HUGE_SIZE, 1, HUGE_SIZE, false);
        rapt_mha *layer;
        assert_too_large(context, rapt_mha_create_mha(context, (int64_t)1 << 26, 1, &layer));
        assert_null(layer);
        assert_too_large(context, rapt_mha_create_mqa(context, (int64_t)1 << 50, (int64_t)1 << 10, &layer));
        assert_null(layer);
        assert_true(c.allocations > earlier);
        call_operator(context, RAPT_F32, (operator_sizes){1, 1, 1, 2, 3, 4, 5}, 0);
        rapt_context_destroy(context);
        assert_nothing_left(&c);
    }
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_default_allocator),
        cmocka_unit_test(test_layer_keeps_allocator),
        cmocka_unit_test(test_training_out_of_memory),
        cmocka_unit_test(test_state_keeps_allocator),
        cmocka_unit_test(test_operator_allocates_once),
        cmocka_unit_test(test_fewer_units_allocate_nothing),
        cmocka_unit_test(test_layer_allocates_once),
        cmocka_unit_test(test_decoding_allocates_nothing),
        cmocka_unit_test(test_scratch_is_replaced),
        cmocka_unit_test(test_linear_growth),
        cmocka_unit_test(test_scratch_of_long_sequences),
        cmocka_unit_test(test_huge_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
