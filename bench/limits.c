/* limits.c - what the machine can do at most */
#include "limits.h"

#include "peak.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_THREADS = 256 };

double seconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static const peak_loop *peak_of(rapt_isa isa) {
#if defined(__x86_64__)
    if (isa == RAPT_ISA_AVX512) return &peak_avx512;
    if (isa == RAPT_ISA_AVX2) return &peak_avx2;
#elif defined(__aarch64__)
    if (isa == RAPT_ISA_NEON) return &peak_neon;
#endif
    (void)isa;
    return &peak_baseline;
}

/* Threads begin together: a warm read takes less time than starting a thread, and one after the other they would not share
 * what they share in a call. */
typedef struct start_line {
    atomic_int there;
    atomic_bool go;
} start_line;

/* One thread's share of a measurement; the sum only keeps the loops alive. */
typedef struct share {
    void (*run)(struct share *share);
    start_line *line;
    const peak_loop *peak;
    const float *begin;
    size_t count;
    double seconds;
    double rate, best, sum;
} share;

static void run_peak(share *s) {
    const int64_t rounds = 60000; /* a piece: 0.4 ms of a CPU with 3.7 GHz and one 512-bit unit, or two of 256 */
    const double operations = s->peak->operations_per_round * (double)rounds;
    double start = seconds_now(), now = start, pieces = 0;
    do {
        double before = now;
        s->sum += s->peak->run(rounds);
        now = seconds_now();
        pieces++;
        if (operations / (now - before) > s->best) s->best = operations / (now - before);
    } while (now - start < s->seconds);
    s->rate = pieces * operations / (now - start);
}

static void run_read(share *s) {
    double start = seconds_now();
    s->sum = s->peak->read(s->begin, s->count);
    s->rate = (double)(s->count * sizeof(float)) / (seconds_now() - start);
}

static void *run_share(void *arg) {
    share *s = arg;
    atomic_fetch_add(&s->line->there, 1);
    while (!atomic_load(&s->line->go)) sched_yield(); /* there may be fewer CPUs than threads */
    s->run(s);
    return NULL;
}

/* All shares at once; returns the sum of their rates. */
static double run_all(share *shares, int threads, void (*run)(share *)) {
    static volatile double sink;
    pthread_t thread[MOST_THREADS];
    bool started[MOST_THREADS] = {false};
    start_line line = {0};
    int others = 0;
    for (int i = 1; i < threads; i++) {
        shares[i].run = run;
        shares[i].line = &line;
        started[i] = pthread_create(&thread[i], NULL, run_share, &shares[i]) == 0;
        others += started[i];
    }
    while (atomic_load(&line.there) < others) sched_yield();
    atomic_store(&line.go, true);
    run(&shares[0]);
    double rate = shares[0].rate;
    for (int i = 1; i < threads; i++) {
        if (!started[i]) continue;
        pthread_join(thread[i], NULL);
        rate += shares[i].rate;
        sink = shares[i].sum;
    }
    sink = shares[0].sum;
    (void)sink;
    return rate;
}

static int possible_threads(int threads) { return threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads; }

peak_rates measure_peak(rapt_isa isa, int threads, double seconds) {
    share shares[MOST_THREADS] = {0};
    threads = possible_threads(threads);
    for (int i = 0; i < threads; i++) {
        shares[i].peak = peak_of(isa);
        shares[i].seconds = seconds;
    }
    peak_rates rates = {.whole = run_all(shares, threads, run_peak)};
    for (int i = 0; i < threads; i++) rates.best += shares[i].best;
    return rates;
}

double measure_read(rapt_isa isa, const float *buffer, size_t count, int threads) {
    share shares[MOST_THREADS] = {0};
    threads = possible_threads(threads);
    size_t part = count / (size_t)threads;
    for (int i = 0; i < threads; i++) {
        shares[i].peak = peak_of(isa);
        shares[i].begin = buffer + (size_t)i * part;
        shares[i].count = part;
    }
    return run_all(shares, threads, run_read);
}
