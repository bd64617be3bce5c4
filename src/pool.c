/* pool.c - a small pool of threads
 *
 * One job at a time: tasks 0 to count - 1, posted by one atomic word with the job's number and count. A task is claimed
 * by writing the job's number into its slot, and each thread tries the slot of its own number first, so that many
 * threads that begin at once do not wait for each other; then it takes what nobody has claimed. The caller takes tasks
 * too and can finish a job alone, so a worker that the system does not run delays nobody. Workers spin briefly, then
 * sleep.
 */
#include "internal.h"

#include <stdlib.h>

#define SPINS 4000 /* some tens of microseconds: longer than the gap between the stages of one forward */

typedef struct task_slot {
    _Alignas(RAPT_ALIGNMENT) _Atomic uint64_t claimed; /* the last job in which somebody has taken this task */
    _Atomic uint64_t done;                             /* the last in which it was finished */
} task_slot;

struct rapt_pool {
    /* A cache line that workers look at while they wait, and that is written once a job: */
    _Atomic uint64_t posted; /* job number << 16 | count */
    void (*task)(void *arg, int64_t index);
    void *arg;
    task_slot *slot; /* [threads] */
    atomic_bool stopping;
    atomic_bool caller_sleeps; /* on `all_done` */
    int32_t threads;           /* with the caller's */
    int32_t started;           /* workers that run */
    atomic_llong process; /* whose workers these are: a forked child has none of them; -1 while it starts its own */
    os_thread *worker;    /* [threads - 1] */

    _Alignas(RAPT_ALIGNMENT) atomic_int sleeping; /* workers that wait on `wake` */
    atomic_int numbered;                          /* workers that know their number */
    rapt_allocator allocator;
    os_mutex mutex;
    os_condition wake, all_done;
    atomic_flag taken; /* by a context that computes */
};

static uint64_t job_of(uint64_t posted) { return posted >> 16; }
static int64_t count_of(uint64_t posted) { return (int64_t)(posted & 0xffff); }

static bool is_done(const rapt_pool *pool, uint64_t posted) {
    for (int64_t i = 0; i < count_of(posted); i++)
        if (atomic_load(&pool->slot[i].done) < job_of(posted)) return false;
    return true;
}

/* Runs the tasks that nobody has claimed. A claim that succeeds pins the job: its caller waits for the task, so task and
 * arg stay what they are. Who comes late, when other jobs were posted meanwhile, finds all slots claimed. */
static void work_on(rapt_pool *pool, uint64_t posted, int64_t own) {
    uint64_t job = job_of(posted);
    for (int64_t count = count_of(posted), i = 0; i < count; i++) {
        int64_t index = (own + i) % count;
        task_slot *slot = &pool->slot[index];
        uint64_t before = atomic_load(&slot->claimed);
        if (before >= job || !atomic_compare_exchange_strong(&slot->claimed, &before, job)) continue;
        pool->task(pool->arg, index);
        atomic_store(&slot->done, job);
        if (atomic_load(&pool->caller_sleeps) && is_done(pool, posted)) {
            os_mutex_lock(&pool->mutex);
            os_condition_wake_all(&pool->all_done);
            os_mutex_unlock(&pool->mutex);
        }
    }
}

static bool has_news(rapt_pool *pool, uint64_t last) {
    return atomic_load(&pool->posted) != last || atomic_load(&pool->stopping);
}

static void *run_worker(void *arg) {
    rapt_pool *pool = arg;
    int64_t number = atomic_fetch_add(&pool->numbered, 1) + 1; /* the caller is 0 */
    uint64_t last = 0;
    while (!atomic_load(&pool->stopping)) {
        int spins = 0;
        while (spins++ < SPINS && !has_news(pool, last)) os_cpu_relax();
        if (!has_news(pool, last)) {
            os_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleeping, 1); /* before looking again: a caller that posts now sees us */
            while (!has_news(pool, last)) os_condition_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleeping, 1);
            os_mutex_unlock(&pool->mutex);
        }
        last = atomic_load(&pool->posted);
        work_on(pool, last, number);
    }
    return NULL;
}

static bool start_workers(rapt_pool *pool) {
    atomic_flag_clear(&pool->taken);
    atomic_store(&pool->posted, 0);
    for (int32_t i = 0; i < pool->threads; i++) {
        atomic_store(&pool->slot[i].claimed, 0);
        atomic_store(&pool->slot[i].done, 0);
    }
    atomic_store(&pool->sleeping, 0);
    atomic_store(&pool->numbered, 0);
    atomic_store(&pool->caller_sleeps, false);
    atomic_store(&pool->stopping, false);
    os_mutex_init(&pool->mutex);
    os_condition_init(&pool->wake);
    os_condition_init(&pool->all_done);
    pool->started = 0;
    while (pool->started < pool->threads - 1) {
        if (!os_thread_start(&pool->worker[pool->started], run_worker, pool)) return false;
        pool->started++;
    }
    return true;
}

static void stop_workers(rapt_pool *pool) {
    os_mutex_lock(&pool->mutex);
    atomic_store(&pool->stopping, true);
    os_condition_wake_all(&pool->wake);
    os_mutex_unlock(&pool->mutex);
    for (int32_t i = 0; i < pool->started; i++) os_thread_join(pool->worker[i]);
    os_condition_destroy(&pool->all_done);
    os_condition_destroy(&pool->wake);
    os_mutex_destroy(&pool->mutex);
}

static size_t worker_bytes(int32_t threads) { return (size_t)threads * sizeof(os_thread); }
static size_t slot_bytes(int32_t threads) { return (size_t)threads * sizeof(task_slot); }

rapt_status rapt_pool_start(const rapt_allocator *allocator, int32_t threads, rapt_pool **result) {
    *result = NULL;
    rapt_pool *pool = rapt_allocate(allocator, sizeof *pool);
    if (pool == NULL) return RAPT_ERROR_MEMORY;
    memset(pool, 0, sizeof *pool);
    pool->allocator = *allocator;
    pool->threads = threads;
    pool->worker = rapt_allocate(allocator, worker_bytes(threads));
    pool->slot = rapt_allocate(allocator, slot_bytes(threads));
    if (pool->worker == NULL || pool->slot == NULL) {
        rapt_release(allocator, pool->slot, slot_bytes(threads));
        rapt_release(allocator, pool->worker, worker_bytes(threads));
        rapt_release(allocator, pool, sizeof *pool);
        return RAPT_ERROR_MEMORY;
    }
    atomic_store(&pool->process, os_process_id());
    if (!start_workers(pool)) {
        rapt_pool_destroy(pool);
        return RAPT_ERROR_THREAD;
    }
    *result = pool;
    return RAPT_OK;
}

void rapt_pool_destroy(rapt_pool *pool) {
    if (pool == NULL) return;
    if (atomic_load(&pool->process) == os_process_id()) stop_workers(pool); /* else they live in the parent */
    rapt_allocator allocator = pool->allocator;
    rapt_release(&allocator, pool->slot, slot_bytes(pool->threads));
    rapt_release(&allocator, pool->worker, worker_bytes(pool->threads));
    rapt_release(&allocator, pool, sizeof *pool);
}

int32_t rapt_pool_threads(const rapt_pool *pool) { return pool->threads; }

static void run_alone(int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    for (int64_t i = 0; i < count; i++) task(arg, i);
}

/* True if the workers are this process's, started now if it was forked since. Fewer of them than wanted is fine. */
static bool workers_are_here(rapt_pool *pool) {
    long long here = os_process_id(), owner = atomic_load(&pool->process);
    if (owner == here) return true;
    if (owner == -1 || !atomic_compare_exchange_strong(&pool->process, &owner, -1)) return false;
    start_workers(pool);
    atomic_store(&pool->process, here);
    return true;
}

void rapt_pool_run(rapt_pool *pool, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    if (!workers_are_here(pool) || atomic_flag_test_and_set(&pool->taken)) {
        run_alone(count, task, arg);
        return;
    }
    pool->task = task;
    pool->arg = arg;
    uint64_t posted = (job_of(atomic_load(&pool->posted)) + 1) << 16 | (uint64_t)count;
    atomic_store(&pool->posted, posted);
    if (atomic_load(&pool->sleeping) > 0) {
        os_mutex_lock(&pool->mutex);
        os_condition_wake_all(&pool->wake);
        os_mutex_unlock(&pool->mutex);
    }
    work_on(pool, posted, 0);

    int spins = 0;
    while (spins++ < SPINS && !is_done(pool, posted)) os_cpu_relax();
    if (!is_done(pool, posted)) {
        os_mutex_lock(&pool->mutex);
        atomic_store(&pool->caller_sleeps, true);
        while (!is_done(pool, posted)) os_condition_wait(&pool->all_done, &pool->mutex);
        atomic_store(&pool->caller_sleeps, false);
        os_mutex_unlock(&pool->mutex);
    }
    atomic_flag_clear(&pool->taken);
}

int32_t rapt_default_threads(void) {
    const char *text = os_environment("RAPT_NUM_THREADS");
    if (text == NULL || *text == '\0') {
        int32_t cpus = os_cpu_count();
        return cpus < RAPT_MAX_THREADS ? cpus : RAPT_MAX_THREADS;
    }
    char *end;
    long threads = strtol(text, &end, 10);
    return *end == '\0' && threads >= 1 && threads <= RAPT_MAX_THREADS ? (int32_t)threads : 0;
}

rapt_status rapt_pool_create(int32_t num_threads, rapt_pool **pool) {
    if (pool == NULL) return RAPT_ERROR_NULL;
    *pool = NULL;
    int32_t threads = num_threads == 0 ? rapt_default_threads() : num_threads;
    if (threads < 1 || threads > RAPT_MAX_THREADS) return RAPT_ERROR_ARGUMENT;
    rapt_allocator allocator = rapt_allocator_or_default(NULL);
    return rapt_pool_start(&allocator, threads, pool);
}
