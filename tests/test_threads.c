/* test_threads.c - many threads, shared layers, shared pools, forked children: the same bits, no race, no hang */
#define _POSIX_C_SOURCE 200809L
#include "support.h"

#include "internal.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define HAS_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAS_THREAD_SANITIZER 1
#endif
#endif

enum { THREADS = 8, E = 48, HEADS = 4, N = 2, L = 40 };

/* ---- what the threads share: one layer, one input, the right answer ---- */

static rapt_mha *layer, *dropping; /* the second one has dropout, which eval mode does not draw */
static rapt_tensor input, expected, expected_gradient, heads, expected_heads;

static rapt_status run_layer(rapt_context *context, const rapt_mha *which, rapt_mode mode, const rapt_tensor *out) {
    rapt_options options = {.causal = true, .mode = mode};
    return rapt_mha_forward(context, which, &input, &input, &input, &options, out);
}

/* Forward into `out` and backward, with the input as the gradient of the output, into `gradient`: that of the input. */
static rapt_status train_layer(rapt_context *context, const rapt_tensor *out, const rapt_tensor *gradient) {
    rapt_options options = {.causal = true, .set_dropout_seed = true, .dropout_seed = 3};
    rapt_mha_gradients gradients = {.query = gradient, .key = gradient, .value = gradient};
    rapt_status status = rapt_mha_state_create(context, &options.state);
    if (status == RAPT_OK) status = rapt_mha_forward(context, dropping, &input, &input, &input, &options, out);
    if (status == RAPT_OK) status = rapt_mha_backward(context, dropping, options.state, &input, NULL, &gradients);
    rapt_mha_state_destroy(options.state);
    return status;
}

static int set_up(void **state) {
    (void)state;
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_mha_config config = rapt_mha_config_default(E, HEADS);
    config.num_kv_heads = 2;
    config.batch_first = true;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    config.dropout = 0.5;
    assert_ok(context, rapt_mha_create(context, &config, &dropping));
    test_random random = {7};
    input = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, E});
    expected = make_tensor(RAPT_F32, 3, input.shape);
    expected_gradient = make_tensor(RAPT_F32, 3, input.shape);
    heads = make_tensor(RAPT_F32, 4, (int64_t[]){1, 3, 100, 16});
    expected_heads = make_tensor(RAPT_F32, 4, heads.shape);
    fill_random(&random, &input, 1);
    fill_random(&random, &heads, 1);
    assert_ok(context, train_layer(context, &expected, &expected_gradient));
    assert_ok(context, run_layer(context, layer, RAPT_MODE_DEFAULT, &expected));
    assert_ok(context, rapt_attention_forward(context, &heads, &heads, &heads, NULL, &expected_heads));
    assert_true(largest_magnitude(&expected) > 0 && largest_magnitude(&expected_heads) > 0);
    rapt_context_destroy(context);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    rapt_mha_destroy(layer);
    rapt_mha_destroy(dropping);
    rapt_tensor *tensors[] = {&input, &expected, &expected_gradient, &heads, &expected_heads};
    for (int i = 0; i < 5; i++) free_tensor(tensors[i]);
    return 0;
}

static bool layer_is_right(rapt_context *context, rapt_tensor *out) {
    memset(out->data, 0xff, (size_t)rapt_tensor_count(out) * sizeof(float));
    return run_layer(context, layer, RAPT_MODE_DEFAULT, out) == RAPT_OK && same_bits(out, &expected);
}

static bool operator_is_right(rapt_context *context, rapt_tensor *out) {
    memset(out->data, 0xff, (size_t)rapt_tensor_count(out) * sizeof(float));
    return rapt_attention_forward(context, &heads, &heads, &heads, NULL, out) == RAPT_OK &&
           same_bits(out, &expected_heads);
}

/* ---- threads that run a piece of work; asserting is left to the test's own thread ---- */

typedef struct worker {
    pthread_t thread;
    int index;
    rapt_pool *pool;       /* to share, or NULL */
    rapt_context *context; /* to share, or NULL */
    rapt_tensor out, head_out;
    int rounds, right, refused, other;
} worker;

static void run_workers(void *(*work)(void *), rapt_pool *pool, rapt_context *context, worker workers[THREADS]) {
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.index = i, .pool = pool, .context = context, .rounds = test_is_quick() ? 5 : 30};
        workers[i].out = make_tensor(RAPT_F32, 3, input.shape);
        workers[i].head_out = make_tensor(RAPT_F32, 4, heads.shape);
    }
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        free_tensor(&workers[i].out);
        free_tensor(&workers[i].head_out);
    }
}

static rapt_context *context_for(const worker *w) {
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1 + w->index % 3;
    config.pool = w->pool;
    rapt_context *context;
    return rapt_context_create(&config, &context) == RAPT_OK ? context : NULL;
}

static void *compute(void *arg) {
    worker *w = arg;
    rapt_context *context = context_for(w);
    for (int i = 0; context != NULL && i < w->rounds; i++) {
        if (layer_is_right(context, &w->out)) w->right++;
        if (operator_is_right(context, &w->head_out)) w->right++;
    }
    rapt_context_destroy(context);
    return NULL;
}

static void assert_all_right(const worker workers[THREADS], int per_round) {
    for (int i = 0; i < THREADS; i++) assert_int_equal(workers[i].right, per_round * workers[i].rounds);
}

static void test_shared_layer(void **state) {
    (void)state;
    worker workers[THREADS];
    run_workers(compute, NULL, NULL, workers);
    assert_all_right(workers, 2);
    assert_int_equal(rapt_mha_version(layer), 1);
}

static void test_shared_pool(void **state) {
    (void)state;
    for (int32_t threads = 1; threads <= 4; threads++) {
        rapt_pool *pool;
        assert_int_equal(rapt_pool_create(threads, &pool), RAPT_OK);
        worker workers[THREADS];
        run_workers(compute, pool, NULL, workers);
        assert_all_right(workers, 2);
        rapt_pool_destroy(pool);
    }
}

/* Half of the threads train, half evaluate: the layer's own mode stays what it is. */
static void *compute_in_own_mode(void *arg) {
    worker *w = arg;
    rapt_context *context = context_for(w);
    for (int i = 0; context != NULL && i < w->rounds; i++) {
        bool training = (w->index + i) % 2 == 0;
        rapt_status status = run_layer(context, dropping, training ? RAPT_MODE_TRAIN : RAPT_MODE_EVAL, &w->out);
        if (status == RAPT_OK) w->right++;
        if (same_bits(&w->out, &expected) != training) w->right++; /* same seed, and eval draws no dropout */
        if (run_layer(context, dropping, RAPT_MODE_DEFAULT, &w->out) != RAPT_OK) w->other++;
        if (same_bits(&w->out, &expected)) w->other++;
    }
    rapt_context_destroy(context);
    return NULL;
}

static void test_mode_per_call(void **state) {
    (void)state;
    worker workers[THREADS];
    assert_true(rapt_mha_is_training(dropping));
    run_workers(compute_in_own_mode, NULL, NULL, workers);
    assert_all_right(workers, 2);
    for (int i = 0; i < THREADS; i++) assert_int_equal(workers[i].other, 0);
    assert_true(rapt_mha_is_training(dropping));
}

/* Threads that share a layer train it, each with a state of its own. */
static void *train_shared(void *arg) {
    worker *w = arg;
    rapt_context *context = context_for(w);
    rapt_tensor gradient = rapt_tensor_of(w->head_out.data, RAPT_F32, 3, input.shape); /* which is large enough */
    for (int i = 0; context != NULL && i < w->rounds; i++) {
        memset(gradient.data, 0xff, N * L * E * sizeof(float));
        rapt_status status = train_layer(context, &w->out, &gradient);
        if (status == RAPT_OK && same_bits(&gradient, &expected_gradient)) w->right++;
    }
    rapt_context_destroy(context);
    return NULL;
}

static void test_shared_training(void **state) {
    (void)state;
    worker workers[THREADS];
    assert_true(N * L * E <= rapt_tensor_count(&heads));
    run_workers(train_shared, NULL, NULL, workers);
    assert_all_right(workers, 1);
}

/* One context for all threads is a mistake, but one with a status: whoever gets in computes rightly. */
static void *compute_with_one_context(void *arg) {
    worker *w = arg;
    for (int i = 0; i < w->rounds; i++) {
        memset(w->out.data, 0xff, (size_t)rapt_tensor_count(&w->out) * sizeof(float));
        rapt_status status = run_layer(w->context, layer, RAPT_MODE_DEFAULT, &w->out);
        if (status == RAPT_OK && same_bits(&w->out, &expected)) {
            w->right++;
        } else if (status == RAPT_ERROR_STATE) {
            w->refused++;
        } else {
            w->other++;
        }
    }
    return NULL;
}

static void test_one_context_for_all(void **state) {
    (void)state;
    rapt_context *context = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    worker workers[THREADS];
    run_workers(compute_with_one_context, NULL, context, workers);
    int right = 0;
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(workers[i].other, 0);
        assert_int_equal(workers[i].right + workers[i].refused, workers[i].rounds);
        right += workers[i].right;
    }
    assert_true(right > 0);
    assert_string_equal(rapt_error_message(context), "");
    rapt_context_destroy(context);
}

/* Contexts and pools that come and go, some before their workers ever woke. */
static void *create_and_destroy(void *arg) {
    worker *w = arg;
    for (int i = 0; i < w->rounds; i++) {
        rapt_context *context = context_for(w);
        if (context != NULL && (i % 2 == 0 || operator_is_right(context, &w->head_out))) w->right++;
        rapt_context_destroy(context);
    }
    return NULL;
}

static void test_short_lives(void **state) {
    (void)state;
    worker workers[THREADS];
    run_workers(create_and_destroy, NULL, NULL, workers);
    assert_all_right(workers, 1);
    rapt_tensor out = make_tensor(RAPT_F32, 4, heads.shape);
    for (int i = 0; i < (test_is_quick() ? 10 : 100); i++) {
        rapt_context *context = make_context(1 + i % 5, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
        if (i % 3 != 0) assert_true(operator_is_right(context, &out));
        rapt_context_destroy(context);
    }
    free_tensor(&out);
}

/* Tasks that wait for each other: they end only if a pool really runs them at once. */
enum { MEETING = 3 };
static atomic_int arrived;

static void meet(void *arg, int64_t index) {
    (void)index;
    atomic_fetch_add(&arrived, 1);
    for (int i = 0; i < 20000 && atomic_load(&arrived) < MEETING; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (atomic_load(&arrived) < MEETING) atomic_store((atomic_bool *)arg, true);
}

static bool all_meet(rapt_pool *pool) {
    atomic_bool missed = false;
    atomic_store(&arrived, 0);
    rapt_pool_run(pool, MEETING, meet, &missed);
    return !atomic_load(&missed) && atomic_load(&arrived) == MEETING;
}

static void test_workers_work(void **state) {
    (void)state;
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(MEETING, &pool), RAPT_OK);
    for (int i = 0; i < 20; i++) {
        assert_true(all_meet(pool));
        if (i % 2 == 0) nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL); /* they sleep and must be woken */
    }
    rapt_pool_destroy(pool);
}

/* Long idle times put workers to sleep; the next call wakes them. */
static void test_sleeping_workers(void **state) {
    (void)state;
    rapt_context *context = make_context(4, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_tensor out = make_tensor(RAPT_F32, 4, heads.shape);
    for (int i = 0; i < 20; i++) {
        assert_true(operator_is_right(context, &out));
        nanosleep(&(struct timespec){.tv_nsec = i % 2 == 0 ? 3000000 : 20000}, NULL);
    }
    free_tensor(&out);
    rapt_context_destroy(context);
}

/* ---- fork ---- */

#if defined(HAS_THREAD_SANITIZER) || defined(__SANITIZE_ADDRESS__) || defined(RAPT_TEST_EMULATED)
/* ThreadSanitizer does not follow threads that a forked child starts, and qemu-user falls over them. AddressSanitizer's
 * allocator may be locked by a thread that starts or ends during the fork, and stays so in the child. */
static void skip_fork(void **state) {
    (void)state;
    skip();
}
#define test_fork skip_fork
#define test_fork_while_computing skip_fork
#define test_fork_shared_pool skip_fork
#define test_fork_starts_workers skip_fork
#else

enum { SECONDS_TO_HANG = 60 };

/* Waits for a child, which an alarm ends if it hangs. */
static void assert_exits_well(pid_t child) {
    int status = 0;
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) fail_msg("the child was ended by signal %d", WTERMSIG(status));
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* In a child: with the parent's context, with one of its own, then everything is destroyed. Never returns. */
static void run_child(rapt_context *context, rapt_pool *pool, rapt_tensor *out, bool destroys_first) {
    alarm(SECONDS_TO_HANG);
    int step = 1;
    if (!destroys_first) {
        for (int i = 0; i < 3; i++, step++) {
            if (!operator_is_right(context, out)) _exit(step);
        }
    }
    rapt_context_destroy(context);
    rapt_pool_destroy(pool);
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 3;
    rapt_context *own;
    if (rapt_context_create(&config, &own) != RAPT_OK) _exit(10);
    for (int i = 0; i < 3; i++) {
        if (!operator_is_right(own, out)) _exit(11);
    }
    rapt_context_destroy(own);
    _exit(0);
}

static void test_fork(void **state) {
    (void)state;
    rapt_tensor out = make_tensor(RAPT_F32, 4, heads.shape);
    for (int round = 0; round < 12; round++) {
        rapt_context *context = make_context(1 + round % 4, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
        if (round % 3 != 0) assert_true(operator_is_right(context, &out));
        if (round % 2 == 0) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* the workers sleep */
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) run_child(context, NULL, &out, round % 5 == 4);
        assert_true(operator_is_right(context, &out)); /* the parent goes on meanwhile */
        assert_exits_well(child);
        assert_true(operator_is_right(context, &out));
        rapt_context_destroy(context);
    }
    free_tensor(&out);
}

/* A grandchild, too: the child's workers are not there either. */
static void test_fork_shared_pool(void **state) {
    (void)state;
    rapt_tensor out = make_tensor(RAPT_F32, 4, heads.shape);
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(3, &pool), RAPT_OK);
    rapt_context_config config = rapt_context_config_default();
    config.pool = pool;
    rapt_context *context;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_OK);
    assert_true(operator_is_right(context, &out));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(SECONDS_TO_HANG);
        if (!operator_is_right(context, &out)) _exit(20);
        pid_t grandchild = fork();
        if (grandchild == 0) run_child(context, pool, &out, false);
        int status = 0;
        if (waitpid(grandchild, &status, 0) != grandchild || status != 0) _exit(21);
        if (!operator_is_right(context, &out)) _exit(22);
        run_child(context, pool, &out, false);
    }
    assert_exits_well(child);
    assert_true(operator_is_right(context, &out));
    rapt_context_destroy(context);
    rapt_pool_destroy(pool);
    free_tensor(&out);
}

/* A child has workers of its own when it needs them, also when the fork came in the middle of a job. */
typedef struct fork_job {
    rapt_pool *pool;
    pid_t child;
} fork_job;

static void fork_meeting(void *arg, int64_t index) {
    (void)index;
    fork_job *job = arg;
    job->child = fork();
    if (job->child != 0) return;
    alarm(SECONDS_TO_HANG);
    for (int i = 0; i < 3; i++) {
        if (!all_meet(job->pool)) _exit(30);
    }
    rapt_pool_destroy(job->pool);
    _exit(0);
}

static void test_fork_starts_workers(void **state) {
    (void)state;
    fork_job job = {0};
    assert_int_equal(rapt_pool_create(MEETING, &job.pool), RAPT_OK);
    fflush(NULL);
    fork_meeting(&job, 0);
    assert_exits_well(job.child);
    assert_true(all_meet(job.pool));
    rapt_pool_run(job.pool, 1, fork_meeting, &job);
    assert_exits_well(job.child);
    assert_true(all_meet(job.pool));
    rapt_pool_destroy(job.pool);
}

/* Another thread keeps the pool busy, taken and half way through a job, when the process forks. */
static atomic_bool keeps_going;

static void *keep_pool_busy(void *arg) {
    worker *w = arg;
    rapt_context *context = context_for(w);
    while (context != NULL && atomic_load(&keeps_going)) {
        if (!operator_is_right(context, &w->head_out)) w->other++;
        w->right++;
    }
    rapt_context_destroy(context);
    return NULL;
}

static void test_fork_while_computing(void **state) {
    (void)state;
    rapt_tensor out = make_tensor(RAPT_F32, 4, heads.shape);
    rapt_pool *pool;
    assert_int_equal(rapt_pool_create(3, &pool), RAPT_OK);
    rapt_context_config config = rapt_context_config_default();
    config.pool = pool;
    rapt_context *context;
    assert_int_equal(rapt_context_create(&config, &context), RAPT_OK);
    worker busy = {.pool = pool, .head_out = make_tensor(RAPT_F32, 4, heads.shape)};
    atomic_store(&keeps_going, true);
    assert_int_equal(pthread_create(&busy.thread, NULL, keep_pool_busy, &busy), 0);
    for (int round = 0; round < (test_is_quick() ? 5 : 20); round++) {
        nanosleep(&(struct timespec){.tv_nsec = 100000L * (round + 1)}, NULL);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) run_child(context, pool, &out, round % 4 == 3);
        assert_exits_well(child);
    }
    atomic_store(&keeps_going, false);
    assert_int_equal(pthread_join(busy.thread, NULL), 0);
    assert_int_equal(busy.other, 0);
    assert_true(busy.right > 0);
    rapt_context_destroy(context);
    rapt_pool_destroy(pool);
    free_tensor(&busy.head_out);
    free_tensor(&out);
}
#endif

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_layer),
        cmocka_unit_test(test_shared_pool),
        cmocka_unit_test(test_mode_per_call),
        cmocka_unit_test(test_shared_training),
        cmocka_unit_test(test_one_context_for_all),
        cmocka_unit_test(test_short_lives),
        cmocka_unit_test(test_workers_work),
        cmocka_unit_test(test_sleeping_workers),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_fork_shared_pool),
        cmocka_unit_test(test_fork_starts_workers),
        cmocka_unit_test(test_fork_while_computing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
