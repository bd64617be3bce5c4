/* test_same_bits.c - same token, same bits: one path against another, compared with memcmp's strictness
 *
 * Threads, tiles, batch neighbours, padding, chunks and ISAs may change nothing. What the outputs are is frozen too:
 * checksums.txt holds their checksums for this numerics version, the same on every ISA with fused multiply-add.
 */
#include "backward_case.h"
#include "cpu/kernels/kernels.h"
#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- random problems on every way of computing them ---- */

typedef struct variant {
    const char *name;
    int32_t threads, tile_rows, split_keys;
    rapt_isa isa;
} variant;

static const variant variants[] = {
    {"2 threads", 2, 0, 0, RAPT_ISA_AUTO},         {"3 threads", 3, 0, 0, RAPT_ISA_AUTO},
    {"7 threads", 7, 0, 0, RAPT_ISA_AUTO},         {"tiles of 1 row", 1, 1, 0, RAPT_ISA_AUTO},
    {"tiles of 5 rows", 2, 5, 0, RAPT_ISA_AUTO},   {"tiles of 100 rows", 3, 100, 0, RAPT_ISA_AUTO},
    {"keys split", 1, 0, 1, RAPT_ISA_AUTO},        {"keys split, tiles of 7 rows", 3, 7, 1, RAPT_ISA_AUTO},
    {"keys never split", 7, 0, -1, RAPT_ISA_AUTO}, {"avx2", 1, 0, 0, RAPT_ISA_AVX2},
    {"avx512", 2, 0, 0, RAPT_ISA_AVX512},          {"neon", 2, 0, 0, RAPT_ISA_NEON},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static rapt_context *one_thread(void) { return make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU); }

static bool uses_fma(void) {
    rapt_context *context = one_thread();
    bool fma = rapt_context_isa(context) != RAPT_ISA_BASELINE;
    rapt_context_destroy(context);
    return fma;
}

/* NULL if this machine cannot, or if the ISA under test has no fused multiply-add and the variant's has. */
static rapt_context *variant_context(const variant *v) {
    if (v->isa != RAPT_ISA_AUTO && (!rapt_isa_available(v->isa) || !uses_fma())) return NULL;
    rapt_context *context = make_context(v->threads, v->isa, RAPT_BACKEND_CPU);
    context->tile_rows = v->tile_rows;
    context->split_keys = v->split_keys;
    context->operations_worth_a_thread = 0; /* small problems, too, go to all threads */
    return context;
}

static void compare_variants(rapt_dtype dtype, int cases) {
    rapt_context *contexts[VARIANTS], *plain = one_thread();
    for (int v = 0; v < VARIANTS; v++) contexts[v] = variant_context(&variants[v]);
    if (test_is_quick()) cases /= 10;
    for (int i = 0; i < cases; i++) {
        test_random random = {(uint64_t)dtype * 77777777 + (uint64_t)i};
        attention_case c = make_attention_case(&random, dtype, i % 10 == 0 && !test_is_quick() ? 20000000 : 1000000);
        attention_result expected = run_attention_case(plain, &c, true);
        for (int v = 0; v < VARIANTS; v++) {
            if (contexts[v] == NULL) continue;
            bool sixteen_bit = dtype == RAPT_BF16 || dtype == RAPT_F16;
            if (sixteen_bit && variants[v].isa != RAPT_ISA_AUTO) continue; /* promised within one ISA */
            attention_result actual = run_attention_case(contexts[v], &c, true);
            if (!same_result(&expected, &actual)) {
                char text[500];
                describe_attention_case(&c, text, sizeof text);
                fail_msg("case %d differs with %s\n%s", i, variants[v].name, text);
            }
            free_attention_result(&actual);
        }
        free_attention_result(&expected);
        free_attention_case(&c);
    }
    for (int v = 0; v < VARIANTS; v++) rapt_context_destroy(contexts[v]);
    rapt_context_destroy(plain);
}

static void test_variants_f32(void **state) {
    (void)state;
    compare_variants(RAPT_F32, 300);
}
static void test_variants_f64(void **state) {
    (void)state;
    compare_variants(RAPT_F64, 150);
}
static void test_variants_bf16(void **state) {
    (void)state;
    compare_variants(RAPT_BF16, 40);
}
static void test_variants_f16(void **state) {
    (void)state;
    compare_variants(RAPT_F16, 40);
}

/* A token that sees many keys: few tiles for many threads, and about as many, in pieces of one cut and of several. */
static void test_decoded_tokens_on_threads(void **state) {
    (void)state;
    rapt_context *plain = one_thread();
    for (int32_t threads = 2; threads <= 7; threads++) {
        rapt_context *context = make_context(threads, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
        for (int64_t kv_heads = 1; kv_heads <= 2 * threads; kv_heads += 1 + threads / 3) {
            int64_t group = 1 + kv_heads % 3 * 4,
                    length = kv_heads % 2 == 0 ? 700 : 256 * 40 + 3; /* to 9 rows a tile */
            test_random random = {(uint64_t)(threads * 100 + kv_heads)};
            rapt_tensor q = make_tensor(RAPT_F32, 4, (int64_t[]){1, kv_heads * group, 1, 16});
            rapt_tensor k = make_tensor(RAPT_F32, 4, (int64_t[]){1, kv_heads, length, 16});
            rapt_tensor v = make_tensor(RAPT_F32, 4, k.shape), expected = make_tensor(RAPT_F32, 4, q.shape);
            rapt_tensor actual = make_tensor(RAPT_F32, 4, q.shape);
            const rapt_tensor *filled[] = {&q, &k, &v};
            for (int i = 0; i < 3; i++) fill_random(&random, filled[i], 3);
            assert_ok(plain, rapt_attention_forward(plain, &q, &k, &v, NULL, &expected));
            for (int again = 0; again < 3; again++) {
                fill_value(&actual, NAN);
                assert_ok(context, rapt_attention_forward(context, &q, &k, &v, NULL, &actual));
                if (!same_bits(&expected, &actual))
                    fail_msg("%lld heads on %d threads differ", (long long)kv_heads, threads);
            }
            rapt_tensor *all[] = {&q, &k, &v, &expected, &actual};
            for (int i = 0; i < 5; i++) free_tensor(all[i]);
        }
        rapt_context_destroy(context);
    }
    rapt_context_destroy(plain);
}

/* Keys and values that come from memory are asked for ahead as the CPU likes it: in each way to the same bits. */
static void test_far_cache_on_any_cpu(void **state) {
    (void)state;
    enum { HEADS = 8, KEYS = 9000, DIM = 64 }; /* 18 MB of 16-bit numbers */
    rapt_context *context = one_thread();
    const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F16, RAPT_BF16};
    int own = atomic_load(&rapt_cpu_kind);
    test_random random = {8};
    rapt_tensor q = make_tensor(RAPT_F32, 4, (int64_t[]){1, 2 * HEADS, 1, DIM});
    rapt_tensor keys = make_tensor(RAPT_F32, 4, (int64_t[]){1, KEYS, HEADS, DIM});
    rapt_tensor expected = make_tensor(RAPT_F32, 4, q.shape), actual = make_tensor(RAPT_F32, 4, q.shape);
    fill_random(&random, &q, 3);
    fill_random(&random, &keys, 3);
    for (int i = 0; i < 3; i++) {
        rapt_cache_config config = rapt_cache_config_default(1, KEYS);
        config.num_kv_heads = HEADS;
        config.head_dim = DIM;
        config.set_dtype = true;
        config.dtype = dtypes[i];
        rapt_cache *cache;
        assert_ok(context, rapt_cache_create(context, NULL, &config, &cache));
        assert_ok(context, rapt_cache_import(context, cache, &keys, &keys, NULL));
        rapt_options options = {.cache = cache};
        for (int kind = OS_CPU_OTHER; kind < OS_CPU_KINDS; kind++) {
            rapt_tensor *out = kind == OS_CPU_OTHER ? &expected : &actual;
            atomic_store(&rapt_cpu_kind, kind);
            assert_ok(context, rapt_attention_forward(context, &q, NULL, NULL, &options, out));
            if (!same_bits(&expected, out))
                fail_msg("%s: the CPU's kind %d has other bits", rapt_dtype_name(dtypes[i]), kind);
        }
        rapt_cache_destroy(cache);
    }
    atomic_store(&rapt_cpu_kind, own);
    rapt_tensor *all[] = {&q, &keys, &expected, &actual};
    for (int i = 0; i < 4; i++) free_tensor(all[i]);
    rapt_context_destroy(context);
}

/* Values that begin a line of the caches are read where they lie, others are packed if there are many rows. */
static void test_values_anywhere(void **state) {
    (void)state;
    enum { ROWS = 100, KEYS = 300, LINE_FLOATS = 16 };
    rapt_context *context = one_thread();
    for (int64_t dim = 16; dim <= 64; dim += 16) {
        test_random random = {(uint64_t)dim};
        rapt_tensor q = make_tensor(RAPT_F32, 4, (int64_t[]){1, 2, ROWS, dim});
        rapt_tensor k = make_tensor(RAPT_F32, 4, (int64_t[]){1, 2, KEYS, dim}), v = make_tensor(RAPT_F32, 4, k.shape);
        rapt_tensor expected = make_tensor(RAPT_F32, 4, q.shape), actual = make_tensor(RAPT_F32, 4, q.shape);
        const rapt_tensor *filled[] = {&q, &k, &v};
        for (int i = 0; i < 3; i++) fill_random(&random, filled[i], 3);
        assert_ok(context, rapt_attention_forward(context, &q, &k, &v, NULL, &expected));
        size_t count = (size_t)rapt_tensor_count(&v);
        float *memory = aligned_alloc(sizeof(float) * LINE_FLOATS, sizeof(float) * (count + LINE_FLOATS));
        assert_non_null(memory);
        for (int shift = 0; shift < LINE_FLOATS; shift += 4) {
            rapt_tensor moved = rapt_tensor_of(memory + shift, RAPT_F32, 4, v.shape);
            memcpy(memory + shift, v.data, sizeof(float) * count);
            fill_value(&actual, NAN);
            assert_ok(context, rapt_attention_forward(context, &q, &k, &moved, NULL, &actual));
            if (!same_bits(&expected, &actual)) fail_msg("D %lld, values %d floats on", (long long)dim, shift);
        }
        free(memory);
        rapt_tensor *all[] = {&q, &k, &v, &expected, &actual};
        for (int i = 0; i < 5; i++) free_tensor(all[i]);
    }
    rapt_context_destroy(context);
}

/* ---- one sequence, placed and cut in different ways ---- */

enum { H = 4, HK = 2, D = 32, LENGTH = 600 }; /* two rows of one token, D a multiple of 16: read in place */

/* Keys, values and queries of one sequence of LENGTH tokens; the tests below copy parts of it elsewhere. */
typedef struct sequence {
    rapt_tensor q, k, v, out, lse; /* [1,H,LENGTH,D] ... */
} sequence;

static rapt_tensor tensor4(rapt_dtype dtype, int64_t n, int64_t h, int64_t l, int64_t d) {
    return make_tensor(dtype, 4, (int64_t[]){n, h, l, d});
}

/* Causal attention over the whole sequence is what everything else must reproduce. */
static sequence make_sequence(rapt_context *context, rapt_dtype dtype) {
    test_random random = {4711};
    sequence s = {.q = tensor4(dtype, 1, H, LENGTH, D),
                  .k = tensor4(dtype, 1, HK, LENGTH, D),
                  .v = tensor4(dtype, 1, HK, LENGTH, D),
                  .out = tensor4(dtype, 1, H, LENGTH, D),
                  .lse = make_tensor(dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32, 3, (int64_t[]){1, H, LENGTH})};
    fill_random(&random, &s.q, 3);
    fill_random(&random, &s.k, 3);
    fill_random(&random, &s.v, 3);
    rapt_options options = {.causal = true, .lse = &s.lse};
    assert_ok(context, rapt_attention_forward(context, &s.q, &s.k, &s.v, &options, &s.out));
    return s;
}

static void free_sequence(sequence *s) {
    rapt_tensor *tensors[] = {&s->q, &s->k, &s->v, &s->out, &s->lse};
    for (int i = 0; i < 5; i++) free_tensor(tensors[i]);
}

static rapt_tensor slice(rapt_context *context, const rapt_tensor *tensor, int32_t dim, int64_t start, int64_t count) {
    rapt_tensor view;
    assert_ok(context, rapt_tensor_slice(context, tensor, dim, start, count, &view));
    return view;
}

/* Rows [first, first + count) of the sequence computed apart must be the rows of the whole. */
static void check_rows(rapt_context *context, const sequence *s, const rapt_tensor *out, int64_t first,
                       const char *what) {
    rapt_tensor expected = slice(context, &s->out, 2, first, out->shape[2]);
    if (!same_bits(&expected, out))
        fail_msg("%s: rows %lld to %lld differ", what, (long long)first, (long long)(first + out->shape[2] - 1));
}

static void check_chunks(rapt_dtype dtype, int64_t chunk) {
    rapt_context *context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    sequence s = make_sequence(context, dtype);
    for (int64_t first = 0; first < LENGTH; first += chunk) {
        int64_t count = first + chunk < LENGTH ? chunk : LENGTH - first, past = first + count;
        rapt_tensor q = slice(context, &s.q, 2, first, count), out = tensor4(dtype, 1, H, count, D);
        rapt_tensor k = slice(context, &s.k, 2, 0, past),
                    v = slice(context, &s.v, 2, 0, past); /* what a cache holds by then */
        rapt_options options = {.causal = true, .offset = first};
        assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &options, &out));
        check_rows(context, &s, &out, first, "in chunks");
        free_tensor(&out);
    }
    free_sequence(&s);
    rapt_context_destroy(context);
}

static void test_chunks(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    for (int i = 0; i < 4; i++) {
        if (!test_is_quick()) check_chunks(dtypes[i], 1);
        if (!test_is_quick()) check_chunks(dtypes[i], 7);
        check_chunks(dtypes[i], 97);
        check_chunks(dtypes[i], 256);
    }
}

/* The sequence as one of three in a batch, with `before` keys of padding on its left and `after` on its right. Padding
 * is said by lengths, by a bool mask or by a float mask, and holds NaN. */
static void check_padding(rapt_dtype dtype, int64_t before, int64_t after, int how) {
    rapt_context *context = make_context(3, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    sequence s = make_sequence(context, dtype);
    int64_t total = before + LENGTH + after;
    test_random random = {99};
    rapt_tensor q = tensor4(dtype, 3, H, total, D), k = tensor4(dtype, 3, HK, total, D),
                v = tensor4(dtype, 3, HK, total, D);
    rapt_tensor out = tensor4(dtype, 3, H, total, D);
    fill_random(&random, &q, 1);
    fill_random(&random, &k, 1);
    fill_random(&random, &v, 1);
    const rapt_tensor *from[] = {&s.q, &s.k, &s.v}, *to[] = {&q, &k, &v};
    for (int i = 0; i < 3; i++) {
        rapt_tensor mine = slice(context, to[i], 0, 1, 1);
        if (i > 0) fill_value(&mine, NAN);
        rapt_tensor middle = slice(context, &mine, 2, before, LENGTH);
        assert_ok(context, rapt_tensor_copy(context, from[i], &middle));
    }
    int64_t start[3] = {0, before, 1}, lengths[3] = {total, LENGTH, total - 1};
    rapt_options options = {.causal = true};
    rapt_tensor padding = make_tensor(how == 1 ? RAPT_BOOL : RAPT_F32, 2, (int64_t[]){3, total});
    for (int64_t j = 0; j < total; j++) {
        bool padded = j < before || j >= before + LENGTH;
        set_element(&padding, total + j, !padded ? 0 : how == 1 ? 1 : -INFINITY);
    }
    if (how == 0) {
        options.key_start = start;
        options.key_lengths = lengths;
    } else {
        options.key_padding_mask = &padding;
    }
    assert_ok(context, rapt_attention_forward(context, &q, &k, &v, &options, &out));
    rapt_tensor mine = slice(context, &out, 0, 1, 1), middle = slice(context, &mine, 2, before, LENGTH);
    check_rows(context, &s, &middle, 0, "in a padded batch");
    rapt_tensor *all[] = {&q, &k, &v, &out, &padding};
    for (int i = 0; i < 5; i++) free_tensor(all[i]);
    free_sequence(&s);
    rapt_context_destroy(context);
}

static void test_padding(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16};
    for (int i = 0; i < (test_is_quick() ? 1 : 3); i++) {
        for (int how = 0; how < 3; how++) {
            check_padding(dtypes[i], 0, 0, how);
            check_padding(dtypes[i], 37, 0, how);
            check_padding(dtypes[i], 0, 300, how);
            check_padding(dtypes[i], 129, 5, how);
        }
    }
}

/* Masks that hide nothing, a band that hides nothing, and a causal band written as a mask: all the same. */
static void test_ways_to_say_causal(void **state) {
    (void)state;
    rapt_context *context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    sequence s = make_sequence(context, RAPT_F32);
    rapt_tensor out = tensor4(RAPT_F32, 1, H, LENGTH, D), zero = make_tensor(RAPT_F32, 2, (int64_t[]){LENGTH, LENGTH});
    rapt_tensor blocked = make_tensor(RAPT_BOOL, 2, (int64_t[]){LENGTH, LENGTH}),
                low = make_tensor(RAPT_F64, 2, (int64_t[]){LENGTH, LENGTH});
    for (int64_t i = 0; i < LENGTH; i++) {
        for (int64_t j = i + 1; j < LENGTH; j++) {
            set_element(&blocked, i * LENGTH + j, 1);
            set_element(&low, i * LENGTH + j, -INFINITY);
        }
    }
    const rapt_options options[] = {
        {.causal = true, .attn_mask = &zero},
        {.attn_mask = &blocked},
        {.attn_mask = &low},
        {.limit_right = true, .limit_left = true, .left = LENGTH},
        {.causal = true, .align_bottom_right = true},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        assert_ok(context, rapt_attention_forward(context, &s.q, &s.k, &s.v, &options[i], &out));
        check_rows(context, &s, &out, 0, "said in another way");
    }
    rapt_tensor *all[] = {&out, &zero, &blocked, &low};
    for (int i = 0; i < 4; i++) free_tensor(all[i]);
    free_sequence(&s);
    rapt_context_destroy(context);
}

/* ---- the caller's floating-point mode ---- */

static uint64_t set_strange_mode(void) {
#if defined(__x86_64__)
    unsigned found = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040 | 0x4000); /* flush to zero, denormals are zero, round up */
    return found;
#elif defined(__aarch64__)
    uint64_t found, strange = (1ULL << 24) | (1ULL << 22); /* flush to zero, round up */
    __asm__ volatile("mrs %0, fpcr" : "=r"(found));
    __asm__ volatile("msr fpcr, %0" : : "r"(strange));
    return found;
#else
    return 0;
#endif
}

static uint64_t restore_mode(uint64_t mode) {
    uint64_t left = 0;
#if defined(__x86_64__)
    left = _mm_getcsr() & 0xffc0;
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(left));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
    return left;
}

static void run_tasks_in_strange_mode(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    (void)user;
    for (int64_t i = count - 1; i >= 0; i--) {
        uint64_t mode = set_strange_mode();
        task(arg, i);
        restore_mode(mode);
    }
}

static void test_floating_point_mode(void **state) {
    (void)state;
    rapt_context_config config = rapt_context_config_default();
    config.parallel_for = run_tasks_in_strange_mode;
    config.parallel_for_workers = 3;
    rapt_context *plain = one_thread(), *strange;
    assert_int_equal(rapt_context_create(&config, &strange), RAPT_OK);
    strange->operations_worth_a_thread = 0;
    for (int i = 0; i < 60; i++) {
        test_random random = {(uint64_t)i + 5000};
        attention_case c = make_attention_case(&random, i % 2 ? RAPT_F32 : RAPT_F64, 100000);
        fill_random(&random, &c.v, i % 3 == 0 ? (c.dtype == RAPT_F32 ? 1e-39 : 1e-310) : 1); /* denormals survive */
        attention_result expected = run_attention_case(plain, &c, true);
        uint64_t mode = set_strange_mode();
        attention_result on_caller = run_attention_case(plain, &c, true);
        uint64_t left = restore_mode(mode);
        mode = set_strange_mode();
        uint64_t strange_mode = restore_mode(mode);
        assert_int_equal(left, strange_mode); /* given back as it was found */
        attention_result on_tasks = run_attention_case(strange, &c, true);
        assert_true(same_result(&expected, &on_caller));
        assert_true(same_result(&expected, &on_tasks));
        free_attention_result(&expected);
        free_attention_result(&on_caller);
        free_attention_result(&on_tasks);
        free_attention_case(&c);
    }
    rapt_context_destroy(plain);
    rapt_context_destroy(strange);
}

/* A layer made in a strange mode has the same weights and gives the same output. */
static void test_layer_in_floating_point_mode(void **state) {
    (void)state;
    rapt_context *context = one_thread();
    rapt_mha_config config = rapt_mha_config_default(40, 4);
    config.add_bias_kv = true;
    config.seed = 3;
    rapt_mha *plain, *strange;
    assert_ok(context, rapt_mha_create(context, &config, &plain));
    uint64_t mode = set_strange_mode();
    rapt_status status = rapt_mha_create(context, &config, &strange);
    restore_mode(mode);
    assert_ok(context, status);
    for (int32_t i = 0; i < rapt_mha_num_tensors(plain); i++) {
        rapt_tensor a, b;
        assert_ok(context, rapt_mha_tensor_at(context, plain, i, NULL, &a));
        assert_ok(context, rapt_mha_tensor_at(context, strange, i, NULL, &b));
        assert_true(same_bits(&a, &b));
    }
    rapt_mha_destroy(plain);
    rapt_mha_destroy(strange);
    rapt_context_destroy(context);
}

/* ---- the layer ---- */

typedef struct layer_setup {
    rapt_mha *layer;
    rapt_tensor x, y; /* [N, L, E], causal */
} layer_setup;

static layer_setup make_layer(rapt_context *context, rapt_dtype dtype, bool extra_keys) {
    rapt_mha_config config = rapt_mha_config_default(72, 6);
    config.num_kv_heads = 2;
    config.head_dim = 20;
    config.batch_first = config.causal = true;
    config.add_bias_kv = config.add_zero_attn = extra_keys;
    config.dtype = dtype;
    config.seed = 11;
    layer_setup setup = {.x = make_tensor(dtype, 3, (int64_t[]){3, 290, 72}),
                         .y = make_tensor(dtype, 3, (int64_t[]){3, 290, 72})};
    assert_ok(context, rapt_mha_create(context, &config, &setup.layer));
    test_random random = {31};
    fill_random(&random, &setup.x, 2);
    assert_ok(context, rapt_mha_forward(context, setup.layer, &setup.x, &setup.x, &setup.x, NULL, &setup.y));
    return setup;
}

static void free_layer(layer_setup *setup) {
    free_tensor(&setup->x);
    free_tensor(&setup->y);
    rapt_mha_destroy(setup->layer);
}

/* Threads, tiles and ISA; then each sequence alone, and each prefix of one, as a decoder would see it. */
static void check_layer(rapt_dtype dtype, bool extra_keys) {
    rapt_context *plain = one_thread();
    layer_setup setup = make_layer(plain, dtype, extra_keys);
    for (int v = 0; v < VARIANTS; v++) {
        rapt_context *context = variant_context(&variants[v]);
        bool sixteen_bit = dtype == RAPT_BF16 || dtype == RAPT_F16;
        if (context == NULL || (sixteen_bit && variants[v].isa != RAPT_ISA_AUTO)) {
            rapt_context_destroy(context);
            continue;
        }
        rapt_tensor y = make_tensor(dtype, 3, setup.y.shape);
        assert_ok(context, rapt_mha_forward(context, setup.layer, &setup.x, &setup.x, &setup.x, NULL, &y));
        if (!same_bits(&setup.y, &y)) fail_msg("the layer differs with %s", variants[v].name);
        free_tensor(&y);
        rapt_context_destroy(context);
    }
    static const int64_t lengths[] = {1, 2, 17, 48, 49, 256, 257, 290};
    for (int64_t n = 0; n < 3; n++) {
        for (int i = 0; i < 8; i++) {
            rapt_tensor alone = slice(plain, &setup.x, 0, n, 1), prefix = slice(plain, &alone, 1, 0, lengths[i]);
            rapt_tensor all = slice(plain, &setup.y, 0, n, 1), expected = slice(plain, &all, 1, 0, lengths[i]);
            rapt_tensor y = make_tensor(dtype, 3, prefix.shape);
            assert_ok(plain, rapt_mha_forward(plain, setup.layer, &prefix, &prefix, &prefix, NULL, &y));
            if (!same_bits(&expected, &y))
                fail_msg("sequence %lld, first %lld tokens alone differ", (long long)n, (long long)lengths[i]);
            free_tensor(&y);
        }
    }
    free_layer(&setup);
    rapt_context_destroy(plain);
}

static void test_layer(void **state) {
    (void)state;
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    for (int i = 0; i < (test_is_quick() ? 2 : 4); i++) {
        check_layer(dtypes[i], false);
        check_layer(dtypes[i], true);
    }
}

/* ---- frozen outputs ---- */

static uint64_t checksum_of_result(const attention_result *result) {
    return checksum(checksum(checksum(0, &result->out), &result->lse), &result->weights);
}

/* Every gradient of a layer's parameters and of its input. */
static uint64_t checksum_of_training(rapt_context *context, const layer_setup *setup) {
    rapt_mha_state *state;
    rapt_mha_gradients *gradients;
    rapt_tensor dx = make_tensor(setup->x.dtype, 3, setup->x.shape), y = make_tensor(setup->x.dtype, 3, setup->x.shape);
    assert_ok(context, rapt_mha_state_create(context, &state));
    assert_ok(context, rapt_mha_gradients_create(context, setup->layer, &gradients));
    rapt_options options = {.state = state};
    assert_ok(context, rapt_mha_forward(context, setup->layer, &setup->x, &setup->x, &setup->x, &options, &y));
    gradients->query = gradients->key = gradients->value = &dx;
    assert_ok(context, rapt_mha_backward(context, setup->layer, state, &setup->y, NULL, gradients));
    const rapt_tensor *written[] = {&dx,
                                    gradients->in_proj_weight,
                                    gradients->in_proj_bias,
                                    gradients->bias_k,
                                    gradients->bias_v,
                                    gradients->out_proj_weight,
                                    gradients->out_proj_bias};
    uint64_t sum = 0;
    for (int i = 0; i < 7; i++) sum = written[i] != NULL ? checksum(sum, written[i]) : sum;
    free_tensor(&dx);
    free_tensor(&y);
    rapt_mha_gradients_destroy(gradients);
    rapt_mha_state_destroy(state);
    return sum;
}

/* Prints "name checksum" lines: what tests/checksums.txt holds. */
static size_t write_checksums(char *text, size_t size) {
    size_t used = 0;
    rapt_context *context = one_thread();
    static const rapt_dtype dtypes[] = {RAPT_F32, RAPT_F64};
    used += (size_t)snprintf(text, size, "numerics %d\n", RAPT_NUMERICS_VERSION);
    for (int t = 0; t < 2; t++) {
        const char *dtype = rapt_dtype_name(dtypes[t]);
        for (int i = 0; i < 40; i++) {
            test_random random = {(uint64_t)i + 123456};
            attention_case c = make_attention_case(&random, dtypes[t], i % 8 == 0 ? 5000000 : 300000);
            attention_result result = run_attention_case(context, &c, true);
            used += (size_t)snprintf(text + used, size - used, "attention %s %d %016llx\n", dtype, i,
                                     (unsigned long long)checksum_of_result(&result));
            free_attention_result(&result);
            free_attention_case(&c);
        }
        for (int extra = 0; extra < 2; extra++) {
            layer_setup setup = make_layer(context, dtypes[t], extra != 0);
            used += (size_t)snprintf(text + used, size - used, "layer %s %d %016llx\n", dtype, extra,
                                     (unsigned long long)checksum(0, &setup.y));
            used += (size_t)snprintf(text + used, size - used, "training %s %d %016llx\n", dtype, extra,
                                     (unsigned long long)checksum_of_training(context, &setup));
            free_layer(&setup);
        }
        for (int i = 0; i < 40; i++) {
            test_random random = {(uint64_t)i + 654321};
            backward_case c = make_backward_case(&random, dtypes[t], i % 8 == 0 ? 2000000 : 100000);
            backward_result result = run_backward_case(context, &c);
            uint64_t sum = 0;
            for (int g = 0; g < GRADIENTS; g++) {
                if (result.gradient[g].data != NULL) sum = checksum(sum, &result.gradient[g]);
            }
            used += (size_t)snprintf(text + used, size - used, "backward %s %d %016llx\n", dtype, i,
                                     (unsigned long long)sum);
            free_backward_result(&result);
            free_backward_case(&c);
        }
    }
    rapt_context_destroy(context);
    return used;
}

static void test_checksums(void **state) {
    (void)state;
    if (!uses_fma()) skip(); /* the baseline differs by rounding */
    static char actual[20000], expected[20000];
    FILE *file = fopen(RAPT_SOURCE_DIR "/tests/checksums.txt", "r");
    assert_non_null(file);
    size_t read = fread(expected, 1, sizeof expected - 1, file);
    fclose(file);
    int own = atomic_load(&rapt_cpu_kind);
    for (int kind = OS_CPU_OTHER; kind < OS_CPU_KINDS; kind++) { /* which must not matter */
        atomic_store(&rapt_cpu_kind, kind);
        size_t length = write_checksums(actual, sizeof actual);
        assert_int_equal(read, length);
        assert_string_equal(actual, expected);
    }
    atomic_store(&rapt_cpu_kind, own);
}

int main(int argc, char **argv) {
    skip_without_forced_isa();
    if (argc > 1 && strcmp(argv[1], "--print-checksums") == 0) {
        static char text[20000];
        fwrite(text, 1, write_checksums(text, sizeof text), stdout);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_variants_f32),
        cmocka_unit_test(test_variants_f64),
        cmocka_unit_test(test_variants_bf16),
        cmocka_unit_test(test_variants_f16),
        cmocka_unit_test(test_decoded_tokens_on_threads),
        cmocka_unit_test(test_far_cache_on_any_cpu),
        cmocka_unit_test(test_values_anywhere),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_padding),
        cmocka_unit_test(test_ways_to_say_causal),
        cmocka_unit_test(test_floating_point_mode),
        cmocka_unit_test(test_layer_in_floating_point_mode),
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_checksums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
