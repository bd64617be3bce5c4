/* test_context.c - contexts and pools: defaults, environment, names, the caller's threads, lifetimes */
#define _POSIX_C_SOURCE 200809L
#include "support.h"

#include "internal.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

/* ---- helpers ---- */

static char text[300]; /* of the last failing creation */

static rapt_status create(rapt_context_config config, rapt_context **context) {
    memset(text, 0, sizeof text);
    config.error_text = text;
    config.error_text_size = sizeof text;
    return rapt_context_create(&config, context);
}

static void assert_refused(rapt_context_config config, rapt_status expected, const char *words) {
    rapt_context *context = (rapt_context *)(void *)text; /* something that is not NULL */
    assert_int_equal(create(config, &context), expected);
    assert_null(context);
    if (strstr(text, words) == NULL) fail_msg("\"%s\", expected \"%s\"", text, words);
}

/* Creates, reads and destroys; returns the number of threads. */
static int32_t threads_of(rapt_context_config config) {
    rapt_context *context;
    if (create(config, &context) != RAPT_OK) fail_msg("%s", text);
    int32_t threads = rapt_context_num_threads(context);
    rapt_context_destroy(context);
    return threads;
}

/* Attention that is worth several threads, into out. */
static rapt_tensor some_input(void) {
    test_random random = {5};
    rapt_tensor x = make_tensor(RAPT_F32, 4, (int64_t[]){2, 3, 150, 16});
    fill_random(&random, &x, 1);
    return x;
}

static uint64_t attend(rapt_context *context, const rapt_tensor *x) {
    rapt_tensor out = make_tensor(x->dtype, x->ndim, x->shape);
    rapt_options options = {.causal = true};
    assert_ok(context, rapt_attention_forward(context, x, x, x, &options, &out));
    uint64_t sum = checksum(0, &out);
    free_tensor(&out);
    return sum;
}

static uint64_t expected_sum(const rapt_tensor *x) {
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    uint64_t sum = attend(context, x);
    rapt_context_destroy(context);
    return sum;
}

static int forget_environment(void **state) {
    (void)state;
    unsetenv("RAPT_NUM_THREADS");
    return 0;
}

/* ---- names ---- */

static void test_names(void **state) {
    (void)state;
    char version[40];
    snprintf(version, sizeof version, "%d.%d.%d", RAPT_VERSION_MAJOR, RAPT_VERSION_MINOR, RAPT_VERSION_PATCH);
    assert_string_equal(rapt_version(), version);
#define CHECK_STATUS(name, code, words)                                                                                \
    assert_int_equal(name, code);                                                                                      \
    assert_string_equal(rapt_status_name(name), #name);                                                                \
    assert_string_equal(rapt_status_text(name), words);
    RAPT_STATUS_LIST(CHECK_STATUS)
    assert_string_equal(rapt_status_name((rapt_status)999), "not a rapt_status");
    assert_string_equal(rapt_status_text((rapt_status)-1), "not a rapt_status");
    const char *const isa[] = {"auto", "baseline", "avx2", "avx512", "neon"};
    for (int i = RAPT_ISA_AUTO; i <= RAPT_ISA_NEON; i++) assert_string_equal(rapt_isa_name((rapt_isa)i), isa[i]);
    assert_string_equal(rapt_isa_name((rapt_isa)99), "unknown");
    assert_true(rapt_isa_available(RAPT_ISA_AUTO));
    assert_true(rapt_isa_available(RAPT_ISA_BASELINE));
    assert_false(rapt_isa_available((rapt_isa)99));
    const char *const dtype[] = {"unknown", "f32", "f64", "bf16", "f16", "bool", "unknown"};
    const size_t size[] = {0, 4, 8, 2, 2, 1, 0};
    for (int i = 0; i < 7; i++) {
        assert_string_equal(rapt_dtype_name((rapt_dtype)i), dtype[i]);
        assert_int_equal(rapt_dtype_size((rapt_dtype)i), size[i]);
    }
    assert_string_equal(rapt_device_name(RAPT_DEVICE_CPU), "cpu");
    assert_string_equal(rapt_device_name(RAPT_DEVICE_CUDA), "cuda");
    assert_string_equal(rapt_device_name((rapt_device)7), "unknown");
}

/* ---- creation ---- */

static void test_defaults(void **state) {
    (void)state;
    rapt_context *context;
    assert_int_equal(rapt_context_create(NULL, &context), RAPT_OK);
    assert_true(rapt_context_num_threads(context) >= 1);
    assert_true(rapt_context_num_threads(context) <= sysconf(_SC_NPROCESSORS_ONLN));
    assert_int_equal(rapt_context_backend(context), RAPT_BACKEND_CPU);
    assert_int_not_equal(rapt_context_isa(context), RAPT_ISA_AUTO);
    assert_true(rapt_isa_available(rapt_context_isa(context)));
    assert_string_equal(rapt_error_message(context), "");
    rapt_context_destroy(context);

    rapt_context_config config = rapt_context_config_default();
    config.backend = RAPT_BACKEND_REFERENCE;
    assert_int_equal(create(config, &context), RAPT_OK);
    assert_int_equal(rapt_context_backend(context), RAPT_BACKEND_REFERENCE);
    rapt_context_destroy(context);
}

static void test_nothing(void **state) {
    (void)state;
    assert_int_equal(rapt_context_create(NULL, NULL), RAPT_ERROR_NULL);
    assert_int_equal(rapt_pool_create(1, NULL), RAPT_ERROR_NULL);
    rapt_context_destroy(NULL);
    rapt_pool_destroy(NULL);
    rapt_mha_destroy(NULL);
    rapt_safetensors_close(NULL);
    assert_int_equal(rapt_context_num_threads(NULL), 0);
    assert_int_equal(rapt_context_isa(NULL), RAPT_ISA_AUTO);
    assert_int_equal(rapt_context_backend(NULL), RAPT_BACKEND_CPU);
    assert_string_equal(rapt_error_message(NULL), "the context is NULL");
    assert_int_equal(rapt_mha_num_parameters(NULL), 0);
    assert_int_equal(rapt_mha_num_tensors(NULL), 0);
    assert_int_equal(rapt_mha_version(NULL), 0);
    assert_null(rapt_mha_settings(NULL));
    assert_false(rapt_mha_is_mha(NULL) || rapt_mha_is_mqa(NULL) || rapt_mha_is_gqa(NULL) || rapt_mha_is_training(NULL));
    rapt_mha_train(NULL);
    rapt_mha_eval(NULL);
    assert_true(rapt_mha_describe(NULL, text, sizeof text) > 0);
    assert_true(rapt_mha_describe(NULL, NULL, 0) > 0);
    assert_int_equal(rapt_tensor_count(NULL), -1);
}

static void *no_memory(void *user, size_t size, size_t alignment) {
    (void)user;
    (void)size;
    (void)alignment;
    return NULL;
}
static void no_release(void *user, void *pointer, size_t size) {
    (void)user;
    (void)pointer;
    (void)size;
}
static void no_threads(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    (void)user;
    for (int64_t i = 0; i < count; i++) task(arg, i);
}

static void test_refused(void **state) {
    (void)state;
    const rapt_context_config good = rapt_context_config_default();
    rapt_context_config c = good;
    c.backend = (rapt_backend)2;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config.backend is 2, expected RAPT_BACKEND_CPU or RAPT_BACKEND_REFERENCE");
    c = good;
    c.num_threads = -1;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config.num_threads is -1, expected 1 to 1024, or 0 for the default");
    c.num_threads = 1025;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config.num_threads is 1025, expected 1 to 1024");
    c = good;
    c.allocator.allocate = no_memory;
    assert_refused(c, RAPT_ERROR_NULL, "config.allocator has no release (set both functions, or neither)");
    c.allocator.release = no_release;
    assert_refused(c, RAPT_ERROR_MEMORY, "out of memory: ");
    c.allocator.allocate = NULL;
    assert_refused(c, RAPT_ERROR_NULL, "config.allocator has no allocate (set both functions, or neither)");
    c = good;
    c.parallel_for = no_threads;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config.parallel_for_workers is 0, expected at least 1");
    c.parallel_for_workers = -5;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config.parallel_for_workers is -5, expected at least 1");
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(2, &pool), RAPT_OK);
    c.parallel_for_workers = 2;
    c.pool = pool;
    assert_refused(c, RAPT_ERROR_ARGUMENT, "config has a pool and a parallel_for: give one of them");
    rapt_pool_destroy(pool);
    pool = (rapt_pool *)(void *)text;
    assert_int_equal(rapt_pool_create(-1, &pool), RAPT_ERROR_ARGUMENT);
    assert_null(pool);
    assert_int_equal(rapt_pool_create(1025, &pool), RAPT_ERROR_ARGUMENT);
}

/* A config of a shorter or longer kind than this library's. */
static void test_struct_size(void **state) {
    (void)state;
    struct {
        rapt_context_config config;
        unsigned char tail[8];
    } grown = {.config = rapt_context_config_default()};
    rapt_context *context;
    grown.config.struct_size = sizeof grown.config - 8;
    assert_int_equal(rapt_context_create(&grown.config, &context), RAPT_ERROR_ARGUMENT);
    assert_null(context);
    grown.config.struct_size = 0;
    assert_int_equal(rapt_context_create(&grown.config, &context), RAPT_ERROR_ARGUMENT);
    grown.config.struct_size = sizeof grown;
    assert_int_equal(rapt_context_create(&grown.config, &context), RAPT_OK);
    rapt_context_destroy(context);
    grown.tail[7] = 1;
    grown.config.error_text = text;
    grown.config.error_text_size = sizeof text;
    assert_int_equal(rapt_context_create(&grown.config, &context), RAPT_ERROR_UNSUPPORTED);
    assert_null(context);
    assert_non_null(strstr(text, "config sets a field that Rapt 0.1.0 does not know"));
}

static void test_error_text(void **state) {
    (void)state;
    rapt_context_config config = rapt_context_config_default();
    rapt_context *context;
    char small[8];
    memset(small, 'x', sizeof small);
    config.num_threads = -1;
    config.error_text = small;
    config.error_text_size = 5; /* cut, ended, and nothing written behind it */
    assert_int_equal(rapt_context_create(&config, &context), RAPT_ERROR_ARGUMENT);
    assert_memory_equal(small, "conf\0xxx", 8);
    config.error_text_size = 0;
    memset(small, 'x', sizeof small);
    assert_int_equal(rapt_context_create(&config, &context), RAPT_ERROR_ARGUMENT);
    assert_memory_equal(small, "xxxxxxxx", 8);
    config.error_text = NULL;
    config.error_text_size = 100;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_ERROR_ARGUMENT);
    config.num_threads = 1;
    config.error_text = small;
    config.error_text_size = sizeof small;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_OK);
    assert_memory_equal(small, "xxxxxxxx", 8); /* success says nothing */
    rapt_context_destroy(context);
}

static void test_error_message(void **state) {
    (void)state;
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    assert_string_equal(rapt_error_message(context), "");
    rapt_mha *layer;
    assert_int_equal(rapt_mha_create_mha(context, 512, 6, &layer), RAPT_ERROR_ARGUMENT);
    const char *words = "num_heads 6 does not divide embed_dim 512 (pass head_dim to set it apart)";
    assert_string_equal(rapt_error_message(context), words);
    assert_ok(context, rapt_mha_create_mha(context, 8, 2, &layer));
    assert_int_equal(rapt_mha_commit(context, NULL), RAPT_ERROR_NULL); /* the next failure replaces it */
    assert_string_equal(rapt_error_message(context), "layer is NULL");
    rapt_tensor view; /* as long as a name may be: cut, not overrun */
    char name[2000];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_int_equal(rapt_mha_find(context, layer, name, &view), RAPT_ERROR_ABSENT);
    assert_true(strlen(rapt_error_message(context)) > 100);
    assert_true(strlen(rapt_error_message(context)) < 1000);
    rapt_mha_destroy(layer);
    rapt_context_destroy(context);
}

/* ---- the environment ---- */

static void test_environment_threads(void **state) {
    (void)state;
    rapt_context_config config = rapt_context_config_default();
    int32_t machine = threads_of(config);
    setenv("RAPT_NUM_THREADS", "3", 1);
    assert_int_equal(threads_of(config), 3);
    config.num_threads = 2; /* the config's word is the last */
    assert_int_equal(threads_of(config), 2);
    config.num_threads = 0;
    setenv("RAPT_NUM_THREADS", "", 1);
    assert_int_equal(threads_of(config), machine);
    const char *const bad[] = {"0", "-2", "many", "2x", "1025", "1.5", " ", "99999999999999999999", "0x2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("RAPT_NUM_THREADS", bad[i], 1);
        char words[100];
        snprintf(words, sizeof words, "RAPT_NUM_THREADS is \"%s\", expected a whole number from 1 to 1024", bad[i]);
        assert_refused(config, RAPT_ERROR_ARGUMENT, words);
        rapt_pool *pool = (rapt_pool *)(void *)text;
        assert_int_equal(rapt_pool_create(0, &pool), RAPT_ERROR_ARGUMENT);
        assert_null(pool);
        config.num_threads = 2; /* not looked at then */
        assert_int_equal(threads_of(config), 2);
        config.num_threads = 0;
    }
    setenv("RAPT_NUM_THREADS", "2", 1);
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(0, &pool), RAPT_OK);
    config.pool = pool;
    assert_int_equal(threads_of(config), 2);
    rapt_pool_destroy(pool);
    unsetenv("RAPT_NUM_THREADS");
}

static void test_environment_isa(void **state) {
    (void)state;
    char *kept = getenv("RAPT_ISA") != NULL ? strdup(getenv("RAPT_ISA")) : NULL;
    rapt_context_config config = rapt_context_config_default();
    rapt_context *context;
    unsetenv("RAPT_ISA");
    assert_int_equal(create(config, &context), RAPT_OK);
    rapt_isa best = rapt_context_isa(context);
    rapt_context_destroy(context);
    for (int isa = RAPT_ISA_BASELINE; isa <= RAPT_ISA_NEON; isa++) {
        const char *name = rapt_isa_name((rapt_isa)isa);
        config.isa = (rapt_isa)isa;
        char words[100];
        if (rapt_isa_available((rapt_isa)isa)) {
            assert_int_equal(create(config, &context), RAPT_OK);
            assert_int_equal(rapt_context_isa(context), isa);
            rapt_context_destroy(context);
        } else {
            snprintf(words, sizeof words, "config.isa is \"%s\", expected one that this build and CPU have: baseline",
                     name);
            assert_refused(config, RAPT_ERROR_UNSUPPORTED, words);
        }
        config.isa = RAPT_ISA_AUTO;
        setenv("RAPT_ISA", name, 1);
        if (rapt_isa_available((rapt_isa)isa)) {
            assert_int_equal(create(config, &context), RAPT_OK);
            assert_int_equal(rapt_context_isa(context), isa);
            rapt_context_destroy(context);
            config.isa = best; /* before the environment */
            assert_int_equal(create(config, &context), RAPT_OK);
            assert_int_equal(rapt_context_isa(context), best);
            rapt_context_destroy(context);
        } else {
            snprintf(words, sizeof words, "RAPT_ISA is \"%s\", expected one that this build and CPU have: baseline",
                     name);
            assert_refused(config, RAPT_ERROR_UNSUPPORTED, words);
        }
        config.isa = RAPT_ISA_AUTO;
        unsetenv("RAPT_ISA");
    }
    const char *const automatic[] = {"", "auto"};
    for (int i = 0; i < 2; i++) {
        setenv("RAPT_ISA", automatic[i], 1);
        assert_int_equal(create(config, &context), RAPT_OK);
        assert_int_equal(rapt_context_isa(context), best);
        rapt_context_destroy(context);
    }
    setenv("RAPT_ISA", "sse9", 1);
    assert_refused(config, RAPT_ERROR_UNSUPPORTED,
                   "RAPT_ISA is \"sse9\", expected one that this build and CPU have: baseline");
    config.isa = RAPT_ISA_BASELINE;
    assert_int_equal(create(config, &context), RAPT_OK);
    rapt_context_destroy(context);
    unsetenv("RAPT_ISA");
    config.isa = (rapt_isa)99;
    assert_refused(config, RAPT_ERROR_ARGUMENT, "config.isa is 99, which is no rapt_isa");
    if (kept != NULL) setenv("RAPT_ISA", kept, 1);
    free(kept);
}

/* ---- threads of the caller's ---- */

typedef struct task_call {
    void (*task)(void *arg, int64_t index);
    void *arg;
    int64_t index;
} task_call;

static int64_t largest_count, calls_of_parallel_for;

static void note_count(int64_t count) {
    calls_of_parallel_for++;
    if (count > largest_count) largest_count = count;
}

static void in_order(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    assert_ptr_equal(user, text);
    note_count(count);
    for (int64_t i = 0; i < count; i++) task(arg, i);
}

static void backwards(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    assert_ptr_equal(user, text);
    note_count(count);
    for (int64_t i = count - 1; i >= 0; i--) task(arg, i);
}

static void *run_task(void *argument) {
    const task_call *call = argument;
    call->task(call->arg, call->index);
    return NULL;
}

static void in_real_threads(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    assert_ptr_equal(user, text);
    note_count(count);
    pthread_t thread[8];
    task_call call[8];
    for (int64_t i = 0; i < count; i++) {
        call[i] = (task_call){task, arg, i};
        assert_int_equal(pthread_create(&thread[i], NULL, run_task, &call[i]), 0);
    }
    for (int64_t i = 0; i < count; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
}

static void test_parallel_for(void **state) {
    (void)state;
    rapt_tensor x = some_input();
    uint64_t expected = expected_sum(&x);
    const rapt_parallel_for kinds[] = {in_order, backwards, in_real_threads};
    for (int kind = 0; kind < 3; kind++) {
        for (int32_t workers = 1; workers <= 8; workers++) {
            rapt_context_config config = rapt_context_config_default();
            config.num_threads = 3; /* says nothing here */
            config.parallel_for = kinds[kind];
            config.parallel_for_user = text;
            config.parallel_for_workers = workers;
            rapt_context *context;
            assert_int_equal(create(config, &context), RAPT_OK);
            assert_int_equal(rapt_context_num_threads(context), workers);
            largest_count = calls_of_parallel_for = 0;
            assert_int_equal(attend(context, &x), expected);
            assert_true(largest_count <= workers);
            if (workers > 1) assert_true(calls_of_parallel_for > 0 && largest_count > 1);
            rapt_context_destroy(context);
        }
    }
    free_tensor(&x);
}

/* ---- loops ---- */

enum { MOST_ITEMS = 100 };
typedef struct counted_loop {
    atomic_int runs[MOST_ITEMS];
    atomic_int first_item[8]; /* of each lane, from 1 */
    atomic_int begun;         /* lanes */
    int32_t wait_for;         /* so many lanes, before the first item of each */
} counted_loop;

static void count_item(void *arg, int64_t item, int32_t lane) {
    counted_loop *loop = arg;
    int none = 0;
    atomic_fetch_add(&loop->runs[item], 1);
    if (atomic_compare_exchange_strong(&loop->first_item[lane], &none, (int)item + 1))
        atomic_fetch_add(&loop->begun, 1);
    while (atomic_load(&loop->begun) < loop->wait_for) sched_yield();
}

/* Every item once, whoever runs the lanes; and where all lanes run, each begins with the item of its number. */
static void check_loop(rapt_context *context, int64_t items, bool together) {
    counted_loop loop;
    memset(&loop, 0, sizeof loop);
    int32_t lanes = rapt_context_num_threads(context);
    if (items < lanes) lanes = (int32_t)items;
    if (together) loop.wait_for = lanes;
    context->operations_worth_a_thread = 0;
    rapt_parallel(context, items, 1, count_item, &loop);
    for (int64_t i = 0; i < items; i++) assert_int_equal(atomic_load(&loop.runs[i]), 1);
    for (int32_t lane = 0; lane < lanes && together; lane++)
        assert_int_equal(atomic_load(&loop.first_item[lane]), lane + 1);
}

static void test_loops(void **state) {
    (void)state;
    const rapt_parallel_for kinds[] = {NULL, in_order, backwards, in_real_threads};
    for (int kind = 0; kind < 4; kind++) {
        for (int32_t threads = 2; threads <= 8; threads++) {
            rapt_context_config config = rapt_context_config_default();
            config.num_threads = threads;
            config.parallel_for = kinds[kind];
            config.parallel_for_user = text;
            config.parallel_for_workers = threads;
            rapt_context *context;
            assert_int_equal(create(config, &context), RAPT_OK);
            for (int64_t items = 0; items < MOST_ITEMS; items++) {
                check_loop(context, items, false);
                if (kinds[kind] == NULL || kinds[kind] == in_real_threads) check_loop(context, items, true);
            }
            rapt_context_destroy(context);
        }
    }
}

static void test_pool_of_any_size(void **state) {
    (void)state;
    rapt_tensor x = some_input();
    uint64_t expected = expected_sum(&x);
    for (int32_t threads = 1; threads <= 9; threads++) {
        rapt_context *context = make_context(threads, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
        assert_int_equal(rapt_context_num_threads(context), threads);
        for (int i = 0; i < 3; i++) assert_int_equal(attend(context, &x), expected);
        rapt_context_destroy(context);
    }
    free_tensor(&x);
}

static void test_shared_pool(void **state) {
    (void)state;
    rapt_tensor x = some_input();
    uint64_t expected = expected_sum(&x);
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(3, &pool), RAPT_OK);
    rapt_context_config config = rapt_context_config_default();
    config.pool = pool;
    config.num_threads = 7; /* the pool's number counts */
    rapt_context *a, *b;
    assert_int_equal(create(config, &a), RAPT_OK);
    assert_int_equal(create(config, &b), RAPT_OK);
    assert_int_equal(rapt_context_num_threads(a), 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(attend(a, &x), expected);
        assert_int_equal(attend(b, &x), expected);
    }
    rapt_context_destroy(a); /* the other one keeps it */
    assert_int_equal(attend(b, &x), expected);
    rapt_context_destroy(b);
    assert_int_equal(create(config, &a), RAPT_OK);
    assert_int_equal(attend(a, &x), expected);
    rapt_context_destroy(a);
    rapt_pool_destroy(pool);
    free_tensor(&x);
}

/* ---- lifetimes ---- */

static void test_layer_outlives_context(void **state) {
    (void)state;
    rapt_context *first = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU),
                 *second = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_mha *layer;
    assert_ok(first, rapt_mha_create_gqa(first, 16, 4, 2, &layer));
    test_random random = {6};
    rapt_tensor x = make_tensor(RAPT_F32, 2, (int64_t[]){5, 16}), y = make_tensor(RAPT_F32, 2, x.shape),
                z = make_tensor(RAPT_F32, 2, x.shape);
    fill_random(&random, &x, 1);
    assert_ok(first, rapt_mha_forward(first, layer, &x, &x, &x, NULL, &y));
    rapt_context_destroy(first);
    assert_ok(second, rapt_mha_forward(second, layer, &x, &x, &x, NULL, &z));
    assert_true(same_bits(&y, &z));
    assert_ok(second, rapt_mha_commit(second, layer));
    assert_int_equal(rapt_mha_version(layer), 2);
    rapt_context_destroy(second);
    rapt_mha_destroy(layer);
    free_tensor(&x);
    free_tensor(&y);
    free_tensor(&z);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),           cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_nothing),         cmocka_unit_test(test_refused),
        cmocka_unit_test(test_struct_size),     cmocka_unit_test(test_error_text),
        cmocka_unit_test(test_error_message),   cmocka_unit_test(test_environment_threads),
        cmocka_unit_test(test_environment_isa), cmocka_unit_test(test_parallel_for),
        cmocka_unit_test(test_loops),           cmocka_unit_test(test_pool_of_any_size),
        cmocka_unit_test(test_shared_pool),     cmocka_unit_test(test_layer_outlives_context),
    };
    return cmocka_run_group_tests(tests, forget_environment, NULL);
}
