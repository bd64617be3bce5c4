/* pool.c - a small pool of threads
 *
 * One job at a time: `count` tasks, handed out by a ticket that holds the job's number, its count and the next task in
 * one atomic word. The caller takes tasks too and can finish a job alone, so a worker that the system does not run
 * delays nobody: it finds the ticket empty and waits for the next. Workers spin briefly, then sleep.
 */
#include "internal.h"

#include <stdlib.h>

#define SPINS 4000 /* some tens of microseconds: longer than the gap between the stages of one forward */

struct rapt_pool {
    rapt_allocator allocator;
    int32_t threads;         /* with the caller's */
    int32_t started;         /* workers that run */
    atomic_llong process;    /* whose workers these are: a forked child has none of them; -1 while it starts its own */
    os_thread *worker;       /* [threads - 1] */
    atomic_flag taken;       /* by a context that computes */
    _Atomic uint64_t ticket; /* job number << 32 | count << 16 | next task */
    atomic_int finished;     /* tasks of the job that are done */
    atomic_int sleeping;     /* workers that wait on `wake` */
    atomic_bool caller_sleeps; /* on `done` */
    atomic_bool stopping;
    void (*task)(void *arg, int64_t index);
    void *arg;
    os_mutex mutex;
    os_condition wake, done;
};

static uint32_t ticket_job(uint64_t ticket) { return (uint32_t)(ticket >> 32); }
static uint32_t ticket_count(uint64_t ticket) { return (uint32_t)(ticket >> 16) & 0xffff; }
static uint32_t ticket_next(uint64_t ticket) { return (uint32_t)ticket & 0xffff; }

/* Takes tasks of the given job until none is left. A claim that succeeds pins the job: its caller waits for the task,
 * so task and arg stay what they are. */
static void work_on(rapt_pool *pool, uint32_t job) {
    uint64_t ticket = atomic_load(&pool->ticket);
    while (ticket_job(ticket) == job && ticket_next(ticket) < ticket_count(ticket)) {
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) continue;
        int count = (int)ticket_count(ticket);
        pool->task(pool->arg, ticket_next(ticket));
        if (atomic_fetch_add(&pool->finished, 1) + 1 == count && atomic_load(&pool->caller_sleeps)) {
            os_mutex_lock(&pool->mutex);
            os_condition_wake_all(&pool->done);
            os_mutex_unlock(&pool->mutex);
        }
        ticket = atomic_load(&pool->ticket);
    }
}

static bool has_news(rapt_pool *pool, uint32_t last_job) {
    return ticket_job(atomic_load(&pool->ticket)) != last_job || atomic_load(&pool->stopping);
}

static void *run_worker(void *arg) {
    rapt_pool *pool = arg;
    uint32_t last_job = 0;
    while (!atomic_load(&pool->stopping)) {
        int spins = 0;
        while (spins++ < SPINS && !has_news(pool, last_job)) os_cpu_relax();
        if (!has_news(pool, last_job)) {
            os_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleeping, 1); /* before looking again: a caller that posts now sees us */
            while (!has_news(pool, last_job)) os_condition_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleeping, 1);
            os_mutex_unlock(&pool->mutex);
        }
        last_job = ticket_job(atomic_load(&pool->ticket));
        work_on(pool, last_job);
    }
    return NULL;
}

static bool start_workers(rapt_pool *pool) {
    atomic_flag_clear(&pool->taken);
    atomic_store(&pool->ticket, 0);
    atomic_store(&pool->sleeping, 0);
    atomic_store(&pool->caller_sleeps, false);
    atomic_store(&pool->stopping, false);
    os_mutex_init(&pool->mutex);
    os_condition_init(&pool->wake);
    os_condition_init(&pool->done);
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
    os_condition_destroy(&pool->done);
    os_condition_destroy(&pool->wake);
    os_mutex_destroy(&pool->mutex);
}

static size_t worker_bytes(int32_t threads) { return (size_t)threads * sizeof(os_thread); }

rapt_status rapt_pool_start(const rapt_allocator *allocator, int32_t threads, rapt_pool **result) {
    *result = NULL;
    rapt_pool *pool = rapt_allocate(allocator, sizeof *pool);
    if (pool == NULL) return RAPT_ERROR_MEMORY;
    memset(pool, 0, sizeof *pool);
    pool->allocator = *allocator;
    pool->threads = threads;
    pool->worker = rapt_allocate(allocator, worker_bytes(threads));
    if (pool->worker == NULL) {
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
    atomic_store(&pool->finished, 0);
    uint32_t job = ticket_job(atomic_load(&pool->ticket)) + 1;
    atomic_store(&pool->ticket, (uint64_t)job << 32 | (uint64_t)count << 16);
    if (atomic_load(&pool->sleeping) > 0) {
        os_mutex_lock(&pool->mutex);
        os_condition_wake_all(&pool->wake);
        os_mutex_unlock(&pool->mutex);
    }
    work_on(pool, job);

    int spins = 0;
    while (spins++ < SPINS && atomic_load(&pool->finished) < count) os_cpu_relax();
    if (atomic_load(&pool->finished) < count) {
        os_mutex_lock(&pool->mutex);
        atomic_store(&pool->caller_sleeps, true);
        while (atomic_load(&pool->finished) < count) os_condition_wait(&pool->done, &pool->mutex);
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
