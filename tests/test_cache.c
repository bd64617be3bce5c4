/* test_cache.c - decoding through a cache: the same bits as one forward over the whole sequence, however it is cut
 *
 * Also with windows, rotary positions, ragged batches, after rolling back and reordering; caches of other dtypes; and what
 * a cache refuses, which must leave it as it was.
 */
#include "layer_support.h"

#include "internal.h"

static rapt_cache *make_cache(const rapt_mha *layer, rapt_cache_config config) {
    rapt_cache *cache;
    assert_ok(context, rapt_cache_create(context, layer, &config, &cache));
    return cache;
}

static rapt_mha_config random_layer(test_random *random, rapt_dtype dtype) {
    static const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}, {8, 2}};
    const int64_t *h = heads[random_between(random, 0, 4)];
    int64_t dim = (int64_t[]){2, 8, 20, 64, 66}[random_between(random, 0, 4)];
    rapt_mha_config config = rapt_mha_config_default(h[0] * 8, h[0]);
    config.head_dim = dim;
    config.num_kv_heads = h[1];
    config.dtype = dtype;
    config.batch_first = random_chance(random, 0.7);
    config.bias = random_chance(random, 0.5);
    config.add_bias_kv = random_chance(random, 0.2);
    config.add_zero_attn = random_chance(random, 0.2);
    config.seed = random_bits(random);
    return config;
}

/* The forward of tokens [first, first + count) of x through the cache, into the same rows of y. */
static void decode(rapt_context *on, const rapt_mha *layer, const rapt_options *options, const rapt_tensor *x,
                   const rapt_tensor *y, int64_t first, int64_t count) {
    int32_t dim = rapt_mha_settings(layer)->batch_first ? 1 : 0;
    rapt_tensor tokens = slice(x, dim, first, count), out = slice(y, dim, first, count);
    assert_ok(on, rapt_mha_forward(on, layer, &tokens, &tokens, &tokens, options, &out));
}

static int64_t next_chunk(test_random *random, int way) {
    static const int64_t sizes[] = {1, 7, 64, 300, 100000};
    return way < 5 ? sizes[way] : sizes[random_between(random, 0, 3)];
}

static rapt_rotary random_rotary(test_random *random, int64_t head_dim) {
    rapt_rotary rotary = rapt_rotary_default(random_chance(random, 0.5) ? 10000 : 500000);
    rotary.interleaved = random_chance(random, 0.5);
    if (random_chance(random, 0.3)) rotary.dims = head_dim / 4 * 2 > 0 ? head_dim / 4 * 2 : 2;
    rotary.scaling = (rapt_rotary_scaling)random_between(random, 0, 4);
    rotary.factor = 4;
    rotary.original_length = 128;
    rotary.length = 512;
    rotary.low_turns = 1;
    rotary.high_turns = rotary.scaling == RAPT_ROTARY_LLAMA3 ? 4 : 32;
    return rotary;
}

/* ---- the same bits as without a cache ---- */

static void check_decoding(uint64_t seed, rapt_dtype dtype) {
    test_random random = {seed};
    rapt_mha_config config = random_layer(&random, dtype);
    rapt_mha *layer = create_random(&config);
    int64_t n = random_between(&random, 1, 3), l = random_between(&random, 1, test_is_quick() ? 300 : 700);
    int64_t sizes[3] = {config.batch_first ? n : l, config.batch_first ? l : n, config.embed_dim};
    rapt_tensor x = random_tensor(seed, dtype, 3, sizes), y = make_tensor(dtype, 3, sizes);
    rapt_rotary rotary = random_rotary(&random, config.head_dim);
    rapt_options options = {.causal = true, .rotary = random_chance(&random, 0.5) ? &rotary : NULL};
    int64_t window = random_chance(&random, 0.4) ? random_between(&random, 1, 400) : 0;
    rapt_options plain = options;
    if (window > 0) {
        plain.limit_left = true;
        plain.left = window - 1;
    }
    rapt_tensor expected = self_attention(layer, &x, &plain);

    for (int way = 0; way < 6; way++) {
        if (way == 0 && l > 400) continue; /* token by token takes long */
        rapt_cache_config settings = rapt_cache_config_default(n, l + random_between(&random, 0, 100));
        settings.window = window;
        rapt_cache *cache = make_cache(layer, settings);
        rapt_context *on = make_context((int32_t)(way % 3 + 1), RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
        on->operations_worth_a_thread = 0;
        on->split_keys = way % 2;
        on->tile_rows = way == 3 ? 5 : 0;
        options.cache = cache;
        fill_value(&y, NAN);
        int rollbacks = 3;
        for (int64_t first = 0, count; first < l; first += count) {
            count = next_chunk(&random, way);
            if (count > l - first) count = l - first;
            decode(on, layer, &options, &x, &y, first, count);
            assert_int_equal(rapt_cache_length(cache, n - 1), first + count);
            if (window == 0 && rollbacks > 0 && random_chance(&random, 0.1)) { /* speculate, and take it back */
                int64_t back = random_between(&random, 0, first + count);
                assert_ok(on, rapt_cache_truncate(on, cache, RAPT_ALL, back));
                rollbacks--;
                first = back;
                count = 0;
            }
        }
        if (!same_bits(&y, &expected)) {
            print_error("seed %llu way %d: N %lld L %lld H %lld Hk %lld D %lld window %lld rotary %d\n",
                        (unsigned long long)seed, way, (long long)n, (long long)l, (long long)config.num_heads,
                        (long long)config.num_kv_heads, (long long)config.head_dim, (long long)window,
                        options.rotary != NULL);
            fail();
        }
        rapt_context_destroy(on);
        rapt_cache_destroy(cache);
    }
    free_tensors(&x, &y, &expected);
    rapt_mha_destroy(layer);
}

static void test_same_bits_as_one_forward(void **state) {
    (void)state;
    int rounds = test_is_quick() ? 12 : 60;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_F32, RAPT_BF16, RAPT_F16};
    for (int i = 0; i < rounds; i++) check_decoding(100 + (uint64_t)i, dtypes[i % 5]);
}

/* A ring turns many times, also with appends that are longer than it. */
static void test_long_windows(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(16, 2);
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    int64_t l = 3000, window = 200;
    rapt_tensor x = random_tensor(5, RAPT_F32, 3, (int64_t[]){2, l, 16}), y = make_tensor(RAPT_F32, 3, x.shape);
    rapt_tensor expected =
        self_attention(layer, &x, &(rapt_options){.causal = true, .limit_left = true, .left = window - 1});
    static const int64_t steps[] = {3000, 1000, 313, 257, 256, 1};
    for (int i = 0; i < 6; i++) {
        rapt_cache_config settings = rapt_cache_config_default(2, 1000000);
        settings.window = window;
        rapt_cache *cache = make_cache(layer, settings);
        rapt_options options = {.causal = true, .cache = cache};
        int64_t first = 0;
        for (; first < l; first += steps[i]) {
            decode(context, layer, &options, &x, &y, first, steps[i] < l - first ? steps[i] : l - first);
        }
        assert_true(same_bits(&y, &expected));
        /* Back as far as the keys reach that will be seen, and no further. */
        assert_ok(context, rapt_cache_truncate(context, cache, RAPT_ALL, l - 300));
        decode(context, layer, &options, &x, &y, l - 300, 300);
        assert_true(same_bits(&y, &expected));
        assert_int_equal(rapt_cache_truncate(context, cache, 1, l - 400), RAPT_ERROR_STATE);
        assert_int_equal(rapt_cache_length(cache, 1), l);
        rapt_cache_destroy(cache);
    }
    free_tensors(&x, &y, &expected);
    rapt_mha_destroy(layer);
}

static void *adding_allocate(void *user, size_t size, size_t alignment) {
    *(size_t *)user += size;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void subtracting_release(void *user, void *pointer, size_t size) {
    *(size_t *)user -= size;
    free(pointer);
}

/* A ring has room for the window and 256 positions beside it, rounded up to 256s, and no position more or less; what
 * else a cache needs is less than one position. It never grows. */
static void test_memory_of_rings(void **state) {
    (void)state;
    static const struct {
        int64_t window, capacity, positions;
    } rows[] = {
        {1, 1 << 20, 512},    {2, 1 << 20, 512},     {200, 1 << 20, 512},     {255, 1 << 20, 512},
        {256, 1 << 20, 512},  {257, 1 << 20, 768},   {511, 1 << 20, 768},     {512, 1 << 20, 768},
        {513, 1 << 20, 1024}, {4096, 1 << 20, 4352}, {4097, INT64_MAX, 4608}, {300, 556, 768}, /* never more than */
        {300, 512, 512},      {300, 100, 256},       {1 << 20, 600, 768},     {0, 600, 768},   /* the capacity */
    };
    enum { N = 2, HK = 2, D = 64, DV = 128, ELEMENT = 4 };
    const int64_t position = N * HK * (D + DV) * ELEMENT;
    size_t held = 0;
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1;
    config.allocator = (rapt_allocator){&held, adding_allocate, subtracting_release};
    rapt_context *counted;
    assert_int_equal(rapt_context_create(&config, &counted), RAPT_OK);
    rapt_tensor k = random_tensor(1, RAPT_F32, 4, (int64_t[]){N, HK, 90, D}),
                v = random_tensor(2, RAPT_F32, 4, (int64_t[]){N, HK, 90, DV}), out = make_tensor(RAPT_F32, 4, v.shape);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rapt_cache_config settings = rapt_cache_config_default(N, rows[i].capacity);
        settings.num_kv_heads = HK;
        settings.head_dim = D;
        settings.value_dim = DV;
        settings.set_dtype = true;
        settings.dtype = RAPT_F32;
        settings.window = rows[i].window;
        size_t before = held;
        rapt_cache *cache;
        assert_ok(counted, rapt_cache_create(counted, NULL, &settings, &cache));
        int64_t bytes = rapt_cache_bytes(cache);
        assert_int_equal(held - before, bytes);
        assert_int_equal(bytes / position, rows[i].positions);
        rapt_options options = {.causal = true, .cache = cache};
        for (int64_t length = 0; length + 90 <= rows[i].capacity && length < 1000; length += 90) {
            assert_ok(counted, rapt_attention_forward(counted, &k, &k, &v, &options, &out));
        }
        assert_int_equal(rapt_cache_bytes(cache), bytes);
        before = held;
        rapt_cache_destroy(cache);
        assert_int_equal(before - held, bytes);
    }
    rapt_context_destroy(counted);
    assert_int_equal(held, 0);
    free_tensors(&k, &v, &out);
}

/* Sequences of different lengths get the bits that each gets alone; padding comes back as zeros, weights and all. */
static void test_ragged(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(24, 4);
    config.num_kv_heads = 2;
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    enum { N = 3, STEPS = 4, L = 150 };
    static const int64_t lengths[STEPS][N] = {{100, 1, 150}, {0, 150, 7}, {1, 1, 1}, {64, 0, 33}};
    rapt_cache *cache = make_cache(layer, rapt_cache_config_default(N, 400)), *alone[N];
    for (int n = 0; n < N; n++) alone[n] = make_cache(layer, rapt_cache_config_default(1, 400));
    int64_t longest = 0, total[N] = {0};
    for (int step = 0; step < STEPS; step++) {
        rapt_tensor x = random_tensor(10 + (uint64_t)step, RAPT_F32, 3, (int64_t[]){N, L, 24});
        for (int n = 0; n < N; n++) {
            rapt_tensor sequence = slice(&x, 0, n, 1),
                        padding = slice(&sequence, 1, lengths[step][n], L - lengths[step][n]);
            fill_value(&padding, NAN);
            total[n] += lengths[step][n];
            if (total[n] > longest) longest = total[n];
        }
        rapt_tensor weights = make_tensor(RAPT_F32, 4, (int64_t[]){N, 4, L, longest});
        rapt_tensor lse = make_tensor(RAPT_F32, 3, (int64_t[]){N, 4, L});
        rapt_options options = {.causal = true,
                                .cache = cache,
                                .append_lengths = lengths[step],
                                .weights = &weights,
                                .per_head_weights = true,
                                .lse = &lse};
        rapt_tensor y = self_attention(layer, &x, &options);
        for (int n = 0; n < N; n++) {
            int64_t count = lengths[step][n];
            assert_int_equal(rapt_cache_length(cache, n), total[n]);
            rapt_tensor sequence = slice(&x, 0, n, 1), tokens = slice(&sequence, 1, 0, count);
            rapt_tensor result = slice(&y, 0, n, 1), real = slice(&result, 1, 0, count);
            rapt_tensor expected = self_attention(layer, &tokens, &(rapt_options){.causal = true, .cache = alone[n]});
            assert_true(same_bits(&real, &expected));
            rapt_tensor blank = slice(&result, 1, count, L - count), sums = slice(&lse, 0, n, 1);
            rapt_tensor blank_sums = slice(&sums, 2, count, L - count), rows = slice(&weights, 0, n, 1);
            rapt_tensor blank_rows = slice(&rows, 2, count, L - count);
            for (int64_t i = 0; i < rapt_tensor_count(&blank); i++) assert_true(get_element(&blank, i) == 0);
            for (int64_t i = 0; i < rapt_tensor_count(&blank_sums); i++) {
                assert_true(get_element(&blank_sums, i) == (double)-INFINITY);
            }
            for (int64_t i = 0; i < rapt_tensor_count(&blank_rows); i++) assert_true(get_element(&blank_rows, i) == 0);
            free_tensor(&expected);
        }
        free_tensors(&x, &y, &weights, &lse);
    }
    for (int n = 0; n < N; n++) rapt_cache_destroy(alone[n]);
    rapt_cache_destroy(cache);
    rapt_mha_destroy(layer);
}

/* ---- sequences copied and reordered ---- */

static void export_to(rapt_cache *cache, rapt_tensor *keys, rapt_tensor *values, int64_t s) {
    const rapt_cache_config *c = rapt_cache_settings(cache);
    *keys = make_tensor(c->dtype, 4, (int64_t[]){c->batch, s, c->num_kv_heads, c->head_dim});
    *values = make_tensor(c->dtype, 4, (int64_t[]){c->batch, s, c->num_kv_heads, c->value_dim});
    assert_ok(context, rapt_cache_export(context, cache, keys, values));
}

static rapt_cache *random_cache(test_random *random, rapt_dtype dtype, const int64_t *lengths, int64_t n, int64_t s) {
    rapt_cache_config config = rapt_cache_config_default(n, s);
    config.num_kv_heads = 2;
    config.head_dim = 5;
    config.value_dim = 70;
    config.set_dtype = true;
    config.dtype = dtype;
    rapt_cache *cache = make_cache(NULL, config);
    rapt_tensor k = make_tensor(dtype, 4, (int64_t[]){n, s, 2, 5}), v = make_tensor(dtype, 4, (int64_t[]){n, s, 2, 70});
    fill_random(random, &k, 1);
    fill_random(random, &v, 1);
    assert_ok(context, rapt_cache_import(context, cache, &k, &v, lengths));
    free_tensors(&k, &v);
    return cache;
}

static void test_copy_and_reorder(void **state) {
    (void)state;
    enum { N = 5, S = 600 };
    test_random random = {9};
    for (int round = 0; round < 40; round++) {
        int64_t lengths[N], source[N];
        for (int n = 0; n < N; n++) {
            lengths[n] = random_between(&random, 0, S);
            source[n] = round == 0 ? N - 1 - n : random_between(&random, 0, N - 1);
        }
        rapt_cache *cache = random_cache(&random, RAPT_F32, lengths, N, S);
        for (int again = 0; again < 2; again++) { /* rows are no longer in order the second time */
            rapt_tensor keys, values, new_keys, new_values;
            export_to(cache, &keys, &values, S);
            int64_t before[N];
            for (int n = 0; n < N; n++) before[n] = rapt_cache_length(cache, n);
            bool copies = round % 4 == 3;
            if (copies) {
                assert_ok(context, rapt_cache_copy(context, cache, source[0], source[1]));
            } else {
                assert_ok(context, rapt_cache_reorder(context, cache, source));
            }
            export_to(cache, &new_keys, &new_values, S);
            for (int n = 0; n < N; n++) {
                int64_t from = !copies ? source[n] : n == source[1] ? source[0] : n;
                assert_int_equal(rapt_cache_length(cache, n), before[from]);
                rapt_tensor old_k = slice(&keys, 0, from, 1), new_k = slice(&new_keys, 0, n, 1);
                rapt_tensor old_v = slice(&values, 0, from, 1), new_v = slice(&new_values, 0, n, 1);
                assert_true(same_bits(&old_k, &new_k) && same_bits(&old_v, &new_v));
            }
            free_tensors(&keys, &values, &new_keys, &new_values);
        }
        rapt_cache_destroy(cache);
    }
}

/* A beam that took over another goes on as that one would have. */
static void test_beams(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(16, 4);
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    rapt_cache *cache = make_cache(layer, rapt_cache_config_default(3, 400));
    rapt_options options = {.causal = true, .cache = cache};
    rapt_tensor prompts = random_tensor(1, RAPT_F32, 3, (int64_t[]){3, 300, 16});
    rapt_tensor first = self_attention(layer, &prompts, &options);
    const int64_t source[3] = {2, 2, 0};
    assert_ok(context, rapt_cache_reorder(context, cache, source));
    rapt_tensor next = random_tensor(2, RAPT_F32, 3, (int64_t[]){3, 20, 16});
    rapt_tensor actual = self_attention(layer, &next, &options);
    for (int n = 0; n < 3; n++) {
        rapt_tensor whole = make_tensor(RAPT_F32, 3, (int64_t[]){1, 320, 16});
        rapt_tensor head = slice(&whole, 1, 0, 300), tail = slice(&whole, 1, 300, 20);
        rapt_tensor prompt = slice(&prompts, 0, source[n], 1), more = slice(&next, 0, n, 1),
                    row = slice(&actual, 0, n, 1);
        assert_ok(context, rapt_tensor_copy(context, &prompt, &head));
        assert_ok(context, rapt_tensor_copy(context, &more, &tail));
        rapt_tensor expected = self_attention(layer, &whole, &(rapt_options){.causal = true});
        rapt_tensor end = slice(&expected, 1, 300, 20);
        assert_true(same_bits(&row, &end));
        free_tensors(&whole, &expected);
    }
    free_tensors(&prompts, &first, &next, &actual);
    rapt_cache_destroy(cache);
    rapt_mha_destroy(layer);
}

/* ---- the operator, and caches of other dtypes ---- */

/* Keys and values that the cache's dtype holds exactly: then it gives the bits of plain tensors. */
static void test_operator_and_dtypes(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    test_random random = {3};
    int rounds = test_is_quick() ? 40 : 200;
    for (int round = 0; round < rounds; round++) {
        rapt_dtype dtype = round % 2 == 0 ? RAPT_F32 : RAPT_F64, stored = dtypes[random_between(&random, 0, 3)];
        int64_t n = random_between(&random, 1, 2), hk = random_between(&random, 1, 3);
        int64_t h = hk * random_between(&random, 1, 4), d = random_between(&random, 1, 80),
                dv = random_between(&random, 1, 140);
        int64_t past = random_between(&random, 0, 600),
                l = random_chance(&random, 0.5) ? 1 : random_between(&random, 1, 90);
        int64_t s = past + l;
        rapt_tensor q = make_tensor(dtype, 4, (int64_t[]){n, h, l, d});
        rapt_tensor k = make_strided_tensor(&random, dtype, 4, (int64_t[]){n, hk, s, d});
        rapt_tensor v = make_strided_tensor(&random, dtype, 4, (int64_t[]){n, hk, s, dv});
        fill_random(&random, &q, 2);
        for (int64_t i = 0; i < rapt_tensor_count(&k); i++)
            set_element(&k, i, (double)random_between(&random, -64, 64) / 64);
        for (int64_t i = 0; i < rapt_tensor_count(&v); i++)
            set_element(&v, i, (double)random_between(&random, -64, 64) / 64);
        if (random_chance(&random, 0.2)) set_element(&v, random_between(&random, 0, rapt_tensor_count(&v) - 1), NAN);
        rapt_tensor expected = make_tensor(dtype, 4, (int64_t[]){n, h, l, dv}),
                    actual = make_tensor(dtype, 4, expected.shape);
        rapt_tensor weights = make_tensor(dtype, 3, (int64_t[]){n, l, s}),
                    more_weights = make_tensor(dtype, 3, weights.shape);
        rapt_options options = {.causal = random_chance(&random, 0.7), .align_bottom_right = true, .weights = &weights};
        assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &options, &expected));

        rapt_cache_config config = rapt_cache_config_default(n, s);
        config.num_kv_heads = hk;
        config.head_dim = d;
        config.value_dim = dv;
        config.set_dtype = true;
        config.dtype = stored;
        rapt_cache *cache = make_cache(NULL, config);
        rapt_tensor old_k = slice(&k, 2, 0, past), old_v = slice(&v, 2, 0, past), exchanged_k, exchanged_v;
        assert_ok(context, rapt_tensor_transpose(context, &old_k, 1, 2, &exchanged_k));
        assert_ok(context, rapt_tensor_transpose(context, &old_v, 1, 2, &exchanged_v));
        assert_ok(context, rapt_cache_import(context, cache, &exchanged_k, &exchanged_v, NULL));
        rapt_tensor new_k = slice(&k, 2, past, l), new_v = slice(&v, 2, past, l);
        options = (rapt_options){.causal = options.causal, .cache = cache, .weights = &more_weights};
        fill_value(&actual, NAN);
        assert_ok(context, rapt_attention_forward(context, &q, &new_k, &new_v, &options, &actual));
        assert_true(same_bits(&actual, &expected) && same_bits(&weights, &more_weights));
        /* Once more without appending: the same queries, at the same positions. */
        fill_value(&actual, NAN);
        assert_ok(context, rapt_attention_forward(context, &q, NULL, NULL, &options, &actual));
        assert_true(same_bits(&actual, &expected));
        /* The reference backend reads it too. */
        rapt_context *reference = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
        assert_ok(reference, rapt_attention_forward(reference, &q, NULL, NULL, &options, &actual));
        assert_true(largest_difference(&actual, &expected) < (dtype == RAPT_F32 ? 1e-5 : 1e-13));
        rapt_context_destroy(reference);
        rapt_cache_destroy(cache);
        free_tensors(&q, &k, &v, &expected, &actual, &weights, &more_weights);
    }
}

/* An encoder's keys and values, projected once. */
static void test_cross_attention(void **state) {
    (void)state;
    for (int round = 0; round < 4; round++) {
        rapt_mha_config config = rapt_mha_config_default(32, 4);
        config.num_kv_heads = round % 2 == 0 ? 4 : 2;
        config.kdim = 12;
        config.vdim = round < 2 ? 20 : 12;
        config.add_zero_attn = round == 3;
        config.batch_first = true;
        rapt_mha *layer = create_random(&config);
        rapt_tensor query = random_tensor(1, RAPT_F32, 3, (int64_t[]){2, 9, 32});
        rapt_tensor key = random_tensor(2, RAPT_F32, 3, (int64_t[]){2, 270, 12});
        rapt_tensor value = random_tensor(3, RAPT_F32, 3, (int64_t[]){2, 270, config.vdim});
        const int64_t lengths[2] = {270, 41};
        rapt_tensor expected = forward(layer, &query, &key, &value, &(rapt_options){.key_lengths = lengths});
        rapt_cache *cache = make_cache(layer, rapt_cache_config_default(2, 270));
        assert_ok(context, rapt_mha_append(context, layer, &key, &value, cache, lengths));
        rapt_tensor out = make_tensor(RAPT_F32, 3, query.shape);
        assert_ok(context, rapt_mha_forward(context, layer, &query, NULL, NULL, &(rapt_options){.cache = cache}, &out));
        assert_true(same_bits(&out, &expected));
        assert_int_equal(rapt_cache_length(cache, 1), 41);
        free_tensors(&query, &key, &value, &expected, &out);
        rapt_cache_destroy(cache);
        rapt_mha_destroy(layer);
    }
}

/* A ring that was rolled back has lost what came between: it must not be seen again. */
static void test_rolled_back_rings(void **state) {
    (void)state;
    rapt_cache_config config = rapt_cache_config_default(2, 100000);
    config.num_kv_heads = 1;
    config.head_dim = 4;
    config.set_dtype = true;
    config.dtype = RAPT_F32;
    config.window = 256; /* 512 positions are kept */
    rapt_cache *cache = make_cache(NULL, config);
    rapt_tensor x = random_tensor(1, RAPT_F32, 4, (int64_t[]){2, 1, 1000, 4}), y = make_tensor(RAPT_F32, 4, x.shape);
    rapt_options options = {.causal = true, .cache = cache};
    assert_ok(context, rapt_attention_forward(context, &x, &x, &x, &options, &y));
    assert_int_equal(rapt_cache_truncate(context, cache, 0, 600), RAPT_ERROR_STATE);
    assert_ok(context, rapt_cache_truncate(context, cache, 0, 744)); /* whose window begins at 489 */
    assert_int_equal(rapt_cache_truncate(context, cache, 0, 742), RAPT_ERROR_STATE);
    rapt_tensor few = slice(&x, 2, 0, 100), out = slice(&y, 2, 0, 100);
    assert_int_equal(rapt_attention_forward(context, &few, NULL, NULL, &options, &out), RAPT_ERROR_STATE);
    const int64_t swapped[2] = {1, 0};
    assert_ok(context, rapt_cache_reorder(context, cache, swapped)); /* what is lost goes with the sequence */
    assert_int_equal(rapt_cache_truncate(context, cache, 1, 742), RAPT_ERROR_STATE);
    assert_ok(context, rapt_cache_copy(context, cache, 1, 0));
    assert_int_equal(rapt_cache_truncate(context, cache, 0, 742), RAPT_ERROR_STATE);
    /* From nothing it can always begin anew. */
    assert_ok(context, rapt_cache_truncate(context, cache, RAPT_ALL, 0));
    rapt_tensor expected = make_tensor(RAPT_F32, 4, x.shape);
    assert_ok(context,
              rapt_attention_forward(context, &x, &x, &x,
                                     &(rapt_options){.causal = true, .limit_left = true, .left = 255}, &expected));
    assert_ok(context, rapt_attention_forward(context, &x, &x, &x, &options, &y));
    assert_true(same_bits(&y, &expected));
    rapt_cache_destroy(cache);
    free_tensors(&x, &y, &expected);
}

/* Infinity at a position that left the window, or too large for f32 in an f64 cache, reaches nobody who does not see it. */
static void test_values_behind_the_window(void **state) {
    (void)state;
    for (int way = 0; way < 2; way++) {
        rapt_cache_config config = rapt_cache_config_default(1, 1000);
        config.num_kv_heads = 1;
        config.head_dim = 16;
        config.set_dtype = true;
        config.dtype = way == 0 ? RAPT_F32 : RAPT_F64;
        config.window = way == 0 ? 32 : 0;
        rapt_cache *cache = make_cache(NULL, config);
        rapt_tensor x = random_tensor(1, RAPT_F32, 4, (int64_t[]){1, 1, 100, 16}), v = convert_tensor(&x, RAPT_F32);
        rapt_tensor out = make_tensor(RAPT_F32, 4, (int64_t[]){1, 1, 1, 16}),
                    mask = make_tensor(RAPT_BOOL, 2, (int64_t[]){1, 100});
        set_element(&v, 3 * 16 + 5, INFINITY);
        if (way == 1) {
            rapt_tensor keys = make_tensor(RAPT_F64, 4, (int64_t[]){1, 99, 1, 16});
            fill_value(&keys, 0.5);
            set_element(&keys, 3 * 16 + 5, 1e300);
            assert_ok(context, rapt_cache_import(context, cache, &keys, &keys, NULL));
            free_tensor(&keys);
            set_element(&mask, 3, 1);
        }
        for (int64_t i = way == 0 ? 0 : 99; i < 100; i++) {
            rapt_tensor token = slice(&x, 2, i, 1), value = slice(&v, 2, i, 1);
            rapt_options options = {.causal = true, .cache = cache, .attn_mask = way == 1 ? &mask : NULL};
            assert_ok(context, rapt_attention_forward(context, &token, &token, &value, &options, &out));
            bool sees_it = way == 0 && i >= 3 && i < 35;
            assert_true(isfinite(get_element(&out, 5)) == !sees_it);
        }
        rapt_cache_destroy(cache);
        free_tensors(&x, &v, &out, &mask);
    }
}

/* ---- refusals ---- */

static void assert_refused(rapt_status status, rapt_status expected, const char *text) {
    if (status != expected || strstr(rapt_error_message(context), text) == NULL) {
        print_error("%s: %s\n expected %s with \"%s\"\n", rapt_status_name(status), rapt_error_message(context),
                    rapt_status_name(expected), text);
        fail();
    }
}

static void test_refusals(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(16, 2);
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    rapt_cache_config settings = rapt_cache_config_default(2, 10), bad = settings;
    rapt_cache *cache = make_cache(layer, settings), *none = cache;
    struct {
        rapt_cache_config config;
        rapt_status status;
        const char *text;
    } wrong[] = {
        {settings, RAPT_ERROR_ARGUMENT, "batch is 0"},        {settings, RAPT_ERROR_ARGUMENT, "capacity is -3"},
        {settings, RAPT_ERROR_ARGUMENT, "num_kv_heads is 0"}, {settings, RAPT_ERROR_ARGUMENT, "head_dim is -2"},
        {settings, RAPT_ERROR_ARGUMENT, "window is -1"},      {settings, RAPT_ERROR_DTYPE, "dtype is bool"},
        {settings, RAPT_ERROR_ARGUMENT, "struct_size is 8"},  {settings, RAPT_ERROR_OVERFLOW, "more memory"},
        {settings, RAPT_ERROR_ARGUMENT, "value_dim is 0"}};
    wrong[0].config.batch = 0;
    wrong[1].config.capacity = -3;
    wrong[2].config.num_kv_heads = 0;
    wrong[3].config.head_dim = -2;
    wrong[4].config.window = -1;
    wrong[5].config.set_dtype = true;
    wrong[5].config.dtype = RAPT_BOOL;
    wrong[6].config.struct_size = 8;
    wrong[7].config.capacity = INT64_MAX;
    wrong[8].config.value_dim = 0;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        none = cache;
        assert_refused(rapt_cache_create(context, layer, &wrong[i].config, &none), wrong[i].status, wrong[i].text);
        assert_null(none);
    }
    assert_refused(rapt_cache_create(context, layer, NULL, &none), RAPT_ERROR_NULL, "config is NULL");
    assert_refused(rapt_cache_create(context, layer, &bad, NULL), RAPT_ERROR_NULL, "cache is NULL");
    assert_refused(rapt_cache_create(context, NULL, &bad, &none), RAPT_ERROR_ARGUMENT, "without a layer");

    rapt_tensor x = random_tensor(1, RAPT_F32, 3, (int64_t[]){2, 6, 16}), y = make_tensor(RAPT_F32, 3, x.shape);
    rapt_options options = {.causal = true, .cache = cache};
    assert_ok(context, rapt_mha_forward(context, layer, &x, &x, &x, &options, &y));
    rapt_tensor keys, values, same_keys, same_values;
    export_to(cache, &keys, &values, 10);
    rapt_tensor padding = make_tensor(RAPT_BOOL, 2, (int64_t[]){2, 12});
    int64_t numbers[2] = {1, 7}, aligned[4] = {0};
    rapt_tensor token = slice(&x, 1, 0, 1), single = slice(&x, 0, 0, 1), out = slice(&y, 0, 0, 1);
    fill_value(&y, 7);
#define REFUSED(status, text, ...)                                                                                     \
    do {                                                                                                               \
        rapt_options o = options;                                                                                      \
        __VA_ARGS__;                                                                                                   \
        assert_refused(rapt_mha_forward(context, layer, &x, &x, &x, &o, &y), status, text);                            \
    } while (0)
    REFUSED(RAPT_ERROR_STATE, "sequence 0 holds 6 of 10 positions, 6 more do not fit", (void)o);
    REFUSED(RAPT_ERROR_ARGUMENT, "append_lengths[1] is 7, expected 0 to 6", o.append_lengths = numbers);
    REFUSED(RAPT_ERROR_ARGUMENT, "key_padding_mask", o.key_padding_mask = &padding);
    REFUSED(RAPT_ERROR_ARGUMENT, "key_start", o.key_start = numbers);
    REFUSED(RAPT_ERROR_ARGUMENT, "key_lengths", o.key_lengths = numbers);
    REFUSED(RAPT_ERROR_ARGUMENT, "offset ", o.offset = 1);
    REFUSED(RAPT_ERROR_ARGUMENT, "offsets", o.offsets = numbers);
    REFUSED(RAPT_ERROR_ARGUMENT, "align_bottom_right", o.align_bottom_right = true);
    REFUSED(RAPT_ERROR_LAYOUT, "append_lengths is at",
            o.append_lengths = (const int64_t *)(const void *)((char *)aligned + 4));
    REFUSED(RAPT_ERROR_ARGUMENT, "append_lengths is given without a cache", o.cache = NULL, o.append_lengths = numbers);
#undef REFUSED
    rapt_tensor heads = random_tensor(2, RAPT_F32, 4, (int64_t[]){2, 2, 1, 8}),
                attended = make_tensor(RAPT_F32, 4, heads.shape);
    rapt_options dropping = {.cache = cache, .dropout = 0.5};
    assert_refused(rapt_attention_forward(context, &heads, &heads, &heads, &dropping, &attended), RAPT_ERROR_ARGUMENT,
                   "dropout is 0.5, expected 0 with a cache");
    free_tensor(&heads);
    free_tensor(&attended);
    assert_refused(rapt_mha_forward(context, layer, &single, &single, &single, &options, &out), RAPT_ERROR_SHAPE,
                   "made for batch 2, the call has 1");
    assert_refused(rapt_mha_forward(context, layer, &x, &token, &token, &options, &y), RAPT_ERROR_SHAPE,
                   "key has length 1, expected 6");
    assert_refused(rapt_mha_forward(context, layer, &x, NULL, &x, &options, &y), RAPT_ERROR_NULL, "key is NULL");
    assert_refused(rapt_mha_forward(context, layer, &x, &x, NULL, &options, &y), RAPT_ERROR_NULL, "value is NULL");
    assert_refused(rapt_mha_append(context, layer, &x, &x, cache, NULL), RAPT_ERROR_STATE, "the cache is full");
    assert_refused(rapt_cache_truncate(context, cache, 2, 0), RAPT_ERROR_ARGUMENT, "sequence is 2, expected 0 to 1");
    assert_refused(rapt_cache_truncate(context, cache, 0, 7), RAPT_ERROR_ARGUMENT, "length is 7, expected 0 to 6");
    assert_refused(rapt_cache_truncate(context, cache, RAPT_ALL, -1), RAPT_ERROR_ARGUMENT, "length is -1");
    assert_refused(rapt_cache_copy(context, cache, 0, 2), RAPT_ERROR_ARGUMENT, "to is 2");
    assert_refused(rapt_cache_copy(context, cache, -1, 0), RAPT_ERROR_ARGUMENT, "from is -1");
    assert_refused(rapt_cache_reorder(context, cache, (int64_t[]){0, 2}), RAPT_ERROR_ARGUMENT, "source[1] is 2");
    assert_refused(rapt_cache_reorder(context, cache, NULL), RAPT_ERROR_NULL, "source is NULL");
    assert_refused(rapt_cache_clear(context, NULL), RAPT_ERROR_NULL, "cache is NULL");
    rapt_tensor few = slice(&keys, 1, 0, 5), few_values = slice(&values, 1, 0, 5);
    assert_refused(rapt_cache_export(context, cache, &few, &few_values), RAPT_ERROR_SHAPE, "the longest length, 6");
    assert_refused(rapt_cache_import(context, cache, &keys, &few_values, NULL), RAPT_ERROR_SHAPE, "values has S 5");
    assert_refused(rapt_cache_import(context, cache, &keys, &values, (int64_t[]){1, 11}), RAPT_ERROR_ARGUMENT,
                   "sequence 1 would have length 11, expected 0 to 10");
    /* All of that changed nothing. */
    export_to(cache, &same_keys, &same_values, 10);
    assert_true(same_bits(&keys, &same_keys) && same_bits(&values, &same_values));
    assert_int_equal(rapt_cache_length(cache, 0), 6);
    for (int64_t i = 0; i < rapt_tensor_count(&y); i++) assert_true(get_element(&y, i) == 7);
    assert_int_equal(rapt_cache_length(cache, 2), -1);

    settings.window = 4;
    settings.capacity = 5000;
    rapt_cache *ring = make_cache(layer, settings);
    options = (rapt_options){.cache = ring};
    assert_refused(rapt_mha_forward(context, layer, &x, &x, &x, &options, &y), RAPT_ERROR_ARGUMENT, "causal");
    options = (rapt_options){.cache = ring, .causal = true, .limit_left = true, .left = 4};
    assert_refused(rapt_mha_forward(context, layer, &x, &x, &x, &options, &y), RAPT_ERROR_ARGUMENT,
                   "options.left is 4");
    rapt_cache_destroy(ring);
    rapt_cache_destroy(cache);
    rapt_cache_destroy(NULL);
    free_tensors(&x, &y, &keys, &values, &same_keys, &same_values, &padding);
    rapt_mha_destroy(layer);
}

/* Views without strides have any size in little memory. Sizes whose products overflow are refused before anything is
 * computed with them, by caches of either kind, and nothing is appended. */
static void test_too_large_to_append(void **state) {
    (void)state;
    enum { E = 16, H = 2 };
    rapt_mha_config config = rapt_mha_config_default(E, H);
    config.batch_first = true;
    rapt_mha *layer = create_random(&config);
    float row[E] = {0};
    for (int window = 0; window <= 4; window += 4) {
        rapt_cache_config settings = rapt_cache_config_default(2, window > 0 ? INT64_MAX : 10);
        settings.window = window;
        rapt_cache *cache = make_cache(layer, settings);
        const struct {
            int64_t batch, length;
            const char *text;
        } rows[] = {
            {2, (int64_t)1 << 54, "N 2, L 18014398509481984, S 18014398509481984 with 2 heads of 8"},
            {2, INT64_MAX / 64 / E / 2 + 1, "the call is too large: N 2"},
            {1, INT64_MAX / 4 / E, "the call is too large: N 1"},
            {(int64_t)1 << 30, (int64_t)1 << 26, "the call is too large: N 1073741824"},
            {2, INT64_MAX, "key"}, /* the tensor itself cannot be counted */
        };
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            int64_t shape[3] = {rows[i].batch, rows[i].length, E}, stride[3] = {0, 0, 1};
            rapt_tensor x = rapt_tensor_strided(row, RAPT_F32, 3, shape, stride);
            assert_refused(rapt_mha_append(context, layer, &x, &x, cache, NULL), RAPT_ERROR_OVERFLOW, rows[i].text);
            assert_int_equal(rapt_cache_length(cache, 0), 0);
        }
        int64_t most[3] = {2, INT64_MAX / 64 / E / 2, E}, stride[3] = {0, 0, 1};
        rapt_tensor x = rapt_tensor_strided(row, RAPT_F32, 3, most, stride);
        if (window == 0) /* the largest that can be counted is only too much for the cache */
            assert_refused(rapt_mha_append(context, layer, &x, &x, cache, NULL), RAPT_ERROR_STATE, "do not fit");
        rapt_cache_destroy(cache);
    }
    rapt_mha_destroy(layer);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_as_one_forward),
        cmocka_unit_test(test_long_windows),
        cmocka_unit_test(test_memory_of_rings),
        cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_copy_and_reorder),
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_operator_and_dtypes),
        cmocka_unit_test(test_cross_attention),
        cmocka_unit_test(test_rolled_back_rings),
        cmocka_unit_test(test_values_behind_the_window),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_too_large_to_append),
    };
    return cmocka_run_group_tests(tests, make_cpu_context, destroy_shared_context);
}
