/* test_cache_sequences.c - sequences of one cache that go their own ways: whatever befell it, each gets the bits of its tokens alone
 *
 * Beams taken over and copied, one sequence rolled back, appends of unequal lengths, positions of the caller's, a cache
 * cleared and used again, for all kinds of heads, and in windows whose rings have turned. What a sequence should have
 * got is one forward of its tokens, without a cache.
 */
#include "layer_support.h"

#include "internal.h"

enum { N = 4, E = 24, MOST = 1500, CUT_KEYS = 256 };

/* A batch of sequences in a cache, and beside it what each consists of. */
typedef struct story {
    const rapt_mha *layer;
    rapt_context *on; /* computes with the cache; the expected bits come from the test's own */
    rapt_cache *cache;
    int64_t window;
    rapt_rotary rotary;
    bool turns, has_positions; /* rotary positions; and those given by the call */
    test_random random;
    int64_t length[N], oldest[N]; /* which positions a ring still has */
    rapt_tensor tokens[N];        /* [1, MOST, E] */
    int64_t positions[N][MOST];
} story;

typedef struct setting {
    rapt_dtype dtype;
    int64_t heads, kv_heads, window;
    int32_t threads;
} setting;

static int64_t ring_of(int64_t window) { return (window + CUT_KEYS + CUT_KEYS - 1) / CUT_KEYS * CUT_KEYS; }

static story *begin_story(const setting *s, uint64_t seed) {
    rapt_mha_config config = rapt_mha_config_default(E, s->heads);
    config.num_kv_heads = s->kv_heads;
    config.dtype = s->dtype;
    config.batch_first = true;
    config.head_dim = 8;
    story *t = calloc(1, sizeof *t);
    assert_non_null(t);
    t->layer = create_random(&config);
    t->on = make_context(s->threads, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    t->on->operations_worth_a_thread = 0;
    t->on->split_keys = s->threads > 2;
    t->window = s->window;
    t->rotary = rapt_rotary_default(10000);
    t->random = (test_random){seed};
    rapt_cache_config settings = rapt_cache_config_default(N, MOST);
    settings.window = s->window;
    assert_ok(t->on, rapt_cache_create(t->on, t->layer, &settings, &t->cache));
    for (int n = 0; n < N; n++) t->tokens[n] = make_tensor(s->dtype, 3, (int64_t[]){1, MOST, E});
    return t;
}

static void end_story(story *t) {
    for (int n = 0; n < N; n++) free_tensor(&t->tokens[n]);
    rapt_cache_destroy(t->cache);
    rapt_context_destroy(t->on);
    rapt_mha_destroy((rapt_mha *)(uintptr_t)t->layer);
    free(t);
}

/* The last `count` rows of what a sequence's tokens give without a cache. */
static void check_end(story *t, int n, int64_t count, const rapt_tensor *actual) {
    rapt_rotary rotary = t->rotary;
    if (t->has_positions) rotary.positions = t->positions[n];
    rapt_options options = {.causal = true, .rotary = t->turns ? &rotary : NULL};
    if (t->window > 0) {
        options.limit_left = true;
        options.left = t->window - 1;
    }
    rapt_tensor whole = slice(&t->tokens[n], 1, 0, t->length[n]);
    rapt_tensor expected = self_attention(t->layer, &whole, &options);
    rapt_tensor end = slice(&expected, 1, t->length[n] - count, count);
    if (!same_bits(actual, &end)) fail_msg("sequence %d of length %d, last %d", n, (int)t->length[n], (int)count);
    free_tensor(&expected);
}

/* Appends random tokens, lengths[n] (NULL: all) of the call's `count` to sequence n, and compares what they get. */
static void append(story *t, int64_t count, const int64_t *lengths) {
    rapt_dtype dtype = rapt_mha_settings(t->layer)->dtype;
    rapt_tensor x = make_tensor(dtype, 3, (int64_t[]){N, count, E}), y = make_tensor(dtype, 3, x.shape);
    fill_random(&t->random, &x, 2);
    fill_value(&y, NAN);
    int64_t *positions = calloc((size_t)(N * count), sizeof *positions);
    assert_non_null(positions);
    for (int64_t i = 0; i < N * count; i++) positions[i] = random_between(&t->random, 0, 5000);
    for (int n = 0; n < N; n++) {
        int64_t real = lengths != NULL ? lengths[n] : count;
        rapt_tensor row = slice(&x, 0, n, 1), padding = slice(&row, 1, real, count - real);
        fill_value(&padding, NAN);
        rapt_tensor said = slice(&row, 1, 0, real), kept = slice(&t->tokens[n], 1, t->length[n], real);
        assert_ok(context, rapt_tensor_copy(context, &said, &kept));
        if (real > 0) memcpy(t->positions[n] + t->length[n], positions + n * count, (size_t)real * sizeof *positions);
        t->length[n] += real;
        int64_t lost = t->window > 0 ? t->length[n] - ring_of(t->window) : 0;
        if (lost > t->oldest[n]) t->oldest[n] = lost;
    }
    if (t->has_positions) t->rotary.positions = positions;
    rapt_options options = {
        .causal = true, .cache = t->cache, .append_lengths = lengths, .rotary = t->turns ? &t->rotary : NULL};
    assert_ok(t->on, rapt_mha_forward(t->on, t->layer, &x, &x, &x, &options, &y));
    t->rotary.positions = NULL;
    for (int n = 0; n < N; n++) {
        int64_t real = lengths != NULL ? lengths[n] : count;
        assert_int_equal(rapt_cache_length(t->cache, n), t->length[n]);
        rapt_tensor row = slice(&y, 0, n, 1), said = slice(&row, 1, 0, real), rest = slice(&row, 1, real, count - real);
        if (real > 0) check_end(t, n, real, &said);
        for (int64_t i = 0; i < rapt_tensor_count(&rest); i++) assert_true(get_element(&rest, i) == 0);
    }
    free(positions);
    free_tensors(&x, &y);
}

static void copy_tokens(const story *t, int from, rapt_tensor *to) {
    *to = convert_tensor(&t->tokens[from], t->tokens[from].dtype);
}

static void reorder(story *t, const int64_t source[N]) {
    assert_ok(t->on, rapt_cache_reorder(t->on, t->cache, source));
    story old = *t;
    rapt_tensor tokens[N];
    for (int n = 0; n < N; n++) copy_tokens(&old, (int)source[n], &tokens[n]);
    for (int n = 0; n < N; n++) {
        free_tensor(&t->tokens[n]);
        t->tokens[n] = tokens[n];
        t->length[n] = old.length[source[n]];
        t->oldest[n] = old.oldest[source[n]];
        memcpy(t->positions[n], old.positions[source[n]], sizeof t->positions[n]);
    }
}

static void copy(story *t, int from, int to) {
    assert_ok(t->on, rapt_cache_copy(t->on, t->cache, from, to));
    free_tensor(&t->tokens[to]);
    copy_tokens(t, from, &t->tokens[to]);
    t->length[to] = t->length[from];
    t->oldest[to] = t->oldest[from];
    memcpy(t->positions[to], t->positions[from], sizeof t->positions[to]);
}

static void roll_back(story *t, int n, int64_t length) {
    assert_ok(t->on, rapt_cache_truncate(t->on, t->cache, n, length));
    t->length[n] = length;
    if (t->oldest[n] > length) t->oldest[n] = length;
    for (int m = 0; m < N; m++) assert_int_equal(rapt_cache_length(t->cache, m), t->length[m]);
}

/* As far as keys that are then seen are still there: with a window not always to the beginning. */
static void roll_back_furthest(story *t, int n) {
    int64_t length = t->oldest[n] > 0 ? t->oldest[n] + t->window - 1 : 0;
    if (length > 0) {
        assert_int_equal(rapt_cache_truncate(t->on, t->cache, n, length - 1), RAPT_ERROR_STATE);
        assert_int_equal(rapt_cache_length(t->cache, n), t->length[n]);
    }
    roll_back(t, n, length);
}

/* Tells a story with f32 and f64, every kind of heads, with and without a window, on one thread and on several. */
static void for_each_setting(void (*tell)(story *t)) {
    static const int64_t heads[][2] = {{4, 4}, {4, 2}, {4, 1}};
    static const int32_t threads[] = {1, 2, 5};
    for (int i = 0; i < 12; i++) {
        setting s = {i % 2 == 0 ? RAPT_F32 : RAPT_F64, heads[i / 4][0], heads[i / 4][1], i / 2 % 2 == 0 ? 0 : 100, 0};
        for (int k = 0; k < (test_is_quick() ? 1 : 3); k++) {
            s.threads = threads[(i + k) % 3];
            story *t = begin_story(&s, 1 + (uint64_t)(3 * i + k));
            tell(t);
            end_story(t);
        }
    }
}

/* ---- beams ---- */

static void tell_beams(story *t) {
    append(t, 700, (int64_t[]){700, 300, 613, 64});
    assert_true(t->window == 0 || (t->oldest[0] > 0 && t->oldest[2] > 0));
    reorder(t, (int64_t[]){2, 2, 0, 1}); /* a beam twice, one gone */
    append(t, 1, NULL);
    append(t, 1, NULL);
    reorder(t, (int64_t[]){3, 0, 0, 0}); /* three of one, whose rows are no longer in order */
    append(t, 20, NULL);
    copy(t, 3, 0);
    append(t, 300, (int64_t[]){300, 1, 0, 299}); /* the ring turns again, for each of them elsewhere */
    reorder(t, (int64_t[]){1, 2, 3, 0});
    assert_true(t->window == 0 || t->oldest[2] > 0);
    roll_back(t, 1, 0);
    copy(t, 2, 1);
    roll_back_furthest(t, 1); /* what a ring has lost goes with its sequence */
    append(t, 1, NULL);
    append(t, 5, NULL);
    for (int n = 0; n < N; n++) roll_back_furthest(t, n);
    append(t, 3, NULL);
}

static void test_beams(void **state) {
    (void)state;
    for_each_setting(tell_beams);
}

/* ---- rolling back one sequence ---- */

static void tell_rollbacks(story *t) {
    append(t, 500, (int64_t[]){400, 500, 123, 256});
    append(t, 7, NULL); /* what was speculated, of which one sequence takes all back, another some */
    roll_back(t, 1, 500);
    roll_back(t, 2, 127);
    append(t, 1, NULL);
    append(t, 300, (int64_t[]){300, 20, 1, 300});
    assert_true(t->window == 0 || t->oldest[0] > 0);
    roll_back_furthest(t, 0);
    append(t, 1, NULL);
    append(t, 290, (int64_t[]){290, 0, 3, 50});
    roll_back(t, 3, 0); /* from nothing it can always begin anew */
    append(t, 2, NULL);
    append(t, 64, (int64_t[]){1, 0, 0, 64});
}

static void test_rolling_back_one(void **state) {
    (void)state;
    for_each_setting(tell_rollbacks);
}

/* ---- a cache that goes on as another ---- */

/* Exported and imported, as who saves a conversation does. */
static void move_to_another_cache(story *t, int64_t capacity) {
    enum { ROOM = 1200 };
    rapt_cache_config settings = *rapt_cache_settings(t->cache);
    settings.capacity = capacity;
    rapt_tensor keys = make_tensor(settings.dtype, 4, (int64_t[]){N, ROOM, settings.num_kv_heads, settings.head_dim});
    rapt_tensor values = make_tensor(settings.dtype, 4, keys.shape);
    fill_value(&keys, NAN);
    fill_value(&values, NAN);
    assert_ok(t->on, rapt_cache_export(t->on, t->cache, &keys, &values));
    for (int n = 0; n < N; n++) {
        rapt_tensor row = slice(&keys, 0, n, 1), gone = slice(&row, 1, 0, t->oldest[n]);
        rapt_tensor kept = slice(&row, 1, t->oldest[n], t->length[n] - t->oldest[n]);
        rapt_tensor rest = slice(&row, 1, t->length[n], ROOM - t->length[n]);
        for (int64_t i = 0; i < rapt_tensor_count(&gone); i++) assert_true(get_element(&gone, i) == 0);
        for (int64_t i = 0; i < rapt_tensor_count(&rest); i++) assert_true(get_element(&rest, i) == 0);
        for (int64_t i = 0; i < rapt_tensor_count(&kept); i++) assert_true(get_element(&kept, i) != 0);
    }
    rapt_cache *other;
    assert_ok(t->on, rapt_cache_create(t->on, NULL, &settings, &other));
    assert_ok(t->on, rapt_cache_import(t->on, other, &keys, &values, t->length));
    rapt_cache_destroy(t->cache);
    t->cache = other;
    for (int n = 0; n < N; n++) {
        int64_t unseen = t->window > 0 ? t->length[n] - (t->window - 1) : 0;
        if (unseen > t->oldest[n]) t->oldest[n] = unseen;
    }
    free_tensors(&keys, &values);
}

/* It would see zeros. */
static void check_no_way_back(story *t, int n) {
    if (t->oldest[n] == 0) return;
    assert_int_equal(rapt_cache_truncate(t->on, t->cache, n, t->length[n] - 1), RAPT_ERROR_STATE);
    char text[64];
    snprintf(text, sizeof text, "the last %lld positions", (long long)(t->length[n] - t->oldest[n]));
    assert_non_null(strstr(rapt_error_message(t->on), text));
}

static void tell_moves(story *t) {
    append(t, 700, (int64_t[]){700, 300, 64, 513});
    roll_back(t, 0, 650); /* an older position than the ring's length suggests is gone */
    move_to_another_cache(t, MOST);
    check_no_way_back(t, 0);
    append(t, 1, NULL);
    append(t, 300, (int64_t[]){300, 0, 1, 299});
    for (int n = 0; n < N; n++) roll_back_furthest(t, n);
    move_to_another_cache(t, MOST);
    append(t, 3, NULL);
}

/* To a cache with no more room than for a window, which then is no ring. */
static void tell_moves_to_less(story *t) {
    append(t, 700, (int64_t[]){700, 300, 64, 513});
    roll_back(t, 0, 300);
    roll_back(t, 3, 150);
    move_to_another_cache(t, 330);
    check_no_way_back(t, 0);
    append(t, 1, NULL);
    append(t, 29, NULL);
    for (int n = 0; n < N; n++) roll_back_furthest(t, n);
    append(t, 2, NULL);
}

static void test_export_and_import(void **state) {
    (void)state;
    for_each_setting(tell_moves);
    for_each_setting(tell_moves_to_less);
}

/* ---- a cache that is cleared ---- */

static void clear(story *t) {
    assert_ok(t->on, rapt_cache_clear(t->on, t->cache));
    for (int n = 0; n < N; n++) {
        assert_int_equal(rapt_cache_length(t->cache, n), 0);
        t->length[n] = t->oldest[n] = 0;
    }
}

/* Whatever it held: longer sequences in another order, an older ring, infinities. */
static void tell_clearing(story *t) {
    append(t, 650, (int64_t[]){650, 600, 80, 300});
    reorder(t, (int64_t[]){1, 0, 0, 3});
    int64_t bytes = rapt_cache_bytes(t->cache);
    clear(t);
    rapt_tensor x = make_tensor(t->tokens[0].dtype, 3, (int64_t[]){N, 99, E}), y = make_tensor(x.dtype, 3, x.shape);
    fill_value(&x, INFINITY);
    rapt_options options = {.causal = true, .cache = t->cache};
    assert_ok(t->on, rapt_mha_forward(t->on, t->layer, &x, &x, &x, &options, &y));
    assert_true(isnan(get_element(&y, 0)));
    free_tensors(&x, &y);
    clear(t);
    append(t, 1, NULL);
    append(t, 90, (int64_t[]){90, 0, 45, 1}); /* among what was infinite */
    append(t, 560, (int64_t[]){560, 2, 560, 511});
    for (int n = 0; n < N; n++) roll_back_furthest(t, n);
    append(t, 1, NULL);
    assert_int_equal(rapt_cache_bytes(t->cache), bytes);
}

static void test_clearing(void **state) {
    (void)state;
    for_each_setting(tell_clearing);
}

/* ---- unequal lengths, with windows, rotary positions and both ---- */

static void tell_unequal_lengths(story *t) {
    append(t, 150, (int64_t[]){100, 1, 150, 0});
    append(t, 520, (int64_t[]){0, 520, 7, 400}); /* longer than a ring */
    append(t, 1, (int64_t[]){1, 0, 1, 1});
    append(t, 300, (int64_t[]){300, 0, 33, 257});
    append(t, 3, NULL);
    reorder(t, (int64_t[]){1, 1, 3, 0});
    roll_back(t, 2, t->length[2] - 10);
    append(t, 9, (int64_t[]){9, 8, 1, 0});
    append(t, 600, (int64_t[]){0, 600, 430, 5}); /* longer than a ring that has turned */
}

static void tell_turned(story *t) {
    t->turns = true;
    tell_unequal_lengths(t);
}

static void tell_positions(story *t) {
    t->turns = t->has_positions = true;
    t->rotary.interleaved = true;
    t->rotary.dims = 6;
    tell_unequal_lengths(t);
}

static void test_unequal_lengths(void **state) {
    (void)state;
    for_each_setting(tell_unequal_lengths);
}

static void test_unequal_lengths_with_rotary_positions(void **state) {
    (void)state;
    for_each_setting(tell_turned);
}

static void test_positions_of_the_call(void **state) {
    (void)state;
    for_each_setting(tell_positions);
}

/* ---- new keys and values count as they are stored ---- */

static rapt_tensor rounded(const rapt_tensor *tensor, rapt_dtype through) { /* and back to its own dtype */
    rapt_tensor narrow = make_tensor(through, tensor->ndim, tensor->shape),
                result = make_tensor(tensor->dtype, tensor->ndim, tensor->shape);
    assert_ok(context, rapt_tensor_copy(context, tensor, &narrow));
    assert_ok(context, rapt_tensor_copy(context, &narrow, &result));
    free_tensor(&narrow);
    return result;
}

static const struct {
    rapt_dtype computed, stored;
    bool rounds; /* values of the first to what the second can hold */
} dtype_pairs[] = {
    {RAPT_F32, RAPT_BF16, true}, {RAPT_F32, RAPT_F16, true},   {RAPT_F64, RAPT_F32, true},
    {RAPT_F64, RAPT_BF16, true}, {RAPT_F64, RAPT_F16, true},   {RAPT_BF16, RAPT_F16, true},
    {RAPT_F16, RAPT_BF16, true}, {RAPT_BF16, RAPT_F32, false}, {RAPT_BF16, RAPT_F64, false},
    {RAPT_F16, RAPT_F32, false}, {RAPT_F16, RAPT_F64, false},  {RAPT_F32, RAPT_F64, false},
};
enum { PAIRS = sizeof dtype_pairs / sizeof *dtype_pairs };

/* Every other dimension is small, down to where f16 has few bits left and bf16 all of its own. */
static void fill_over_magnitudes(test_random *random, const rapt_tensor *tensor) {
    int64_t dims = tensor->shape[tensor->ndim - 1];
    for (int64_t i = 0; i < rapt_tensor_count(tensor); i++) {
        int64_t d = i % dims;
        set_element(tensor, i, ldexp(2 * random_unit(random) - 1, d % 2 == 0 ? 1 : (int)-(d % 24)));
    }
}

static void test_operator_reads_what_is_stored(void **state) {
    (void)state;
    test_random random = {21};
    for (int pair = 0; pair < PAIRS; pair++) {
        rapt_dtype dtype = dtype_pairs[pair].computed, stored = dtype_pairs[pair].stored;
        for (int round = 0; round < 6; round++) {
            int64_t past = (int64_t[]){0, 300}[round % 2], l = (int64_t[]){1, 40, 270}[round / 2], s = past + l;
            rapt_tensor q = make_tensor(dtype, 4, (int64_t[]){2, 4, l, 20}),
                        k = make_tensor(dtype, 4, (int64_t[]){2, 2, s, 20}),
                        v = make_tensor(dtype, 4, (int64_t[]){2, 2, s, 34});
            fill_random(&random, &q, 2);
            fill_over_magnitudes(&random, &k);
            fill_over_magnitudes(&random, &v);
            rapt_tensor stored_k = rounded(&k, stored), stored_v = rounded(&v, stored);
            rapt_tensor out = make_tensor(dtype, 4, (int64_t[]){2, 4, l, 34}),
                        expected = make_tensor(dtype, 4, out.shape), unrounded = make_tensor(dtype, 4, out.shape);
            rapt_options plain = {.causal = true, .align_bottom_right = true};
            assert_ok(context, rapt_attention_forward(context, &q, &stored_k, &stored_v, &plain, &expected));
            assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &plain, &unrounded));
            assert_int_equal(same_bits(&expected, &unrounded), !dtype_pairs[pair].rounds);

            rapt_cache_config config = rapt_cache_config_default(2, s);
            config.num_kv_heads = 2;
            config.head_dim = 20;
            config.value_dim = 34;
            config.set_dtype = true;
            config.dtype = stored;
            rapt_cache *cache;
            assert_ok(context, rapt_cache_create(context, NULL, &config, &cache));
            rapt_options options = {.causal = true, .cache = cache};
            if (past > 0) {
                rapt_tensor old_q = make_tensor(dtype, 4, (int64_t[]){2, 4, past, 20}),
                            old_out = make_tensor(dtype, 4, (int64_t[]){2, 4, past, 34});
                rapt_tensor old_k = slice(&k, 2, 0, past), old_v = slice(&v, 2, 0, past);
                assert_ok(context, rapt_attention_forward(context, &old_q, &old_k, &old_v, &options, &old_out));
                free_tensors(&old_q, &old_out);
            }
            rapt_tensor new_k = slice(&k, 2, past, l), new_v = slice(&v, 2, past, l);
            assert_ok(context, rapt_attention_forward(context, &q, &new_k, &new_v, &options, &out));
            assert_true(same_bits(&out, &expected));
            rapt_cache_destroy(cache);
            free_tensors(&q, &k, &v, &stored_k, &stored_v, &out, &expected, &unrounded);
        }
    }
}

/* The same of a layer: its own keys and values, taken out of a cache of its dtype, rounded and put back. */
static void test_layers_read_what_is_stored(void **state) {
    (void)state;
    enum { L = 300 };
    for (int pair = 0; pair < PAIRS; pair++) {
        rapt_dtype dtype = dtype_pairs[pair].computed;
        rapt_mha_config config = rapt_mha_config_default(E, 4);
        config.num_kv_heads = 2;
        config.dtype = dtype;
        config.batch_first = true;
        rapt_mha *layer = create_random(&config);
        rapt_rotary rotary = rapt_rotary_default(10000);
        rapt_tensor x = random_tensor(1, dtype, 3, (int64_t[]){2, L, E});
        rapt_cache_config settings = rapt_cache_config_default(2, L);
        rapt_cache *exact, *narrow;
        assert_ok(context, rapt_cache_create(context, layer, &settings, &exact));
        settings.set_dtype = true;
        settings.dtype = dtype_pairs[pair].stored;
        assert_ok(context, rapt_cache_create(context, layer, &settings, &narrow));

        rapt_options options = {.causal = true, .rotary = &rotary, .cache = exact};
        rapt_tensor unrounded = self_attention(layer, &x, &options);
        rapt_tensor keys = make_tensor(dtype, 4, (int64_t[]){2, L, 2, E / 4}),
                    values = make_tensor(dtype, 4, keys.shape);
        assert_ok(context, rapt_cache_export(context, exact, &keys, &values));
        rapt_tensor stored_keys = rounded(&keys, settings.dtype), stored_values = rounded(&values, settings.dtype);
        assert_ok(context, rapt_cache_import(context, exact, &stored_keys, &stored_values, NULL));
        rapt_tensor expected = make_tensor(dtype, 3, x.shape), out = make_tensor(dtype, 3, x.shape);
        assert_ok(context, rapt_mha_forward(context, layer, &x, NULL, NULL, &options, &expected));

        options.cache = narrow;
        static const int64_t chunks[] = {1, 200, 1, 1, L - 203};
        for (int64_t i = 0, first = 0; i < 5; first += chunks[i++]) {
            rapt_tensor tokens = slice(&x, 1, first, chunks[i]), row = slice(&out, 1, first, chunks[i]);
            assert_ok(context, rapt_mha_forward(context, layer, &tokens, &tokens, &tokens, &options, &row));
        }
        assert_true(same_bits(&out, &expected));
        if (dtype != RAPT_BF16) assert_int_equal(same_bits(&out, &unrounded), !dtype_pairs[pair].rounds);
        rapt_cache_destroy(exact);
        rapt_cache_destroy(narrow);
        free_tensors(&x, &unrounded, &keys, &values, &stored_keys, &stored_values, &expected, &out);
        rapt_mha_destroy(layer);
    }
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_rolling_back_one),
        cmocka_unit_test(test_export_and_import),
        cmocka_unit_test(test_clearing),
        cmocka_unit_test(test_unequal_lengths),
        cmocka_unit_test(test_unequal_lengths_with_rotary_positions),
        cmocka_unit_test(test_positions_of_the_call),
        cmocka_unit_test(test_operator_reads_what_is_stored),
        cmocka_unit_test(test_layers_read_what_is_stored),
    };
    return cmocka_run_group_tests(tests, make_cpu_context, destroy_shared_context);
}
