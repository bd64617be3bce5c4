/* bench.c - times attention and the layer on a fixed set of shapes, beside the machine's peak in the same run
 *
 *     rapt_bench [--threads T] [--filter NAME] [--seconds S]
 *
 * Each shape runs in many short rounds, interleaved with rounds of the peak (chains of multiply-adds in registers on one
 * thread), and the best round of each counts: neighbours on the machine only ever slow a round down.
 */
#include <rapt/rapt.h>

#include "peak.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct shape {
    const char *name;
    int64_t n, heads, kv_heads, l, s, d;
    int64_t embed_dim; /* above 0: the layer, self-attention */
    bool causal;
} shape;

static const shape shapes[] = {
    {"P1", 1, 8, 8, 512, 512, 64, 0, false},      {"P1c", 1, 8, 8, 512, 512, 64, 0, true},
    {"P2", 1, 8, 8, 2048, 2048, 64, 0, false},    {"P2c", 1, 8, 8, 2048, 2048, 64, 0, true},
    {"P3", 1, 16, 16, 4096, 4096, 128, 0, false}, {"P3c", 1, 16, 16, 4096, 4096, 128, 0, true},
    {"P4", 1, 32, 8, 1024, 1024, 128, 0, false},  {"P4c", 1, 32, 8, 1024, 1024, 128, 0, true},
    {"D1", 1, 32, 8, 1, 4096, 128, 0, false},     {"D2", 1, 12, 12, 1, 1024, 64, 0, false},
    {"S1", 1, 4, 4, 16, 16, 16, 0, false},        {"W1", 64, 4, 4, 49, 49, 32, 0, false},
    {"L1", 8, 8, 8, 128, 128, 64, 512, false},    {"L2", 1, 16, 16, 1024, 1024, 64, 1024, false},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static double seconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void check(rapt_context *context, rapt_status status) {
    if (status == RAPT_OK) return;
    fprintf(stderr, "rapt_bench: %s\n", rapt_error_message(context));
    exit(1);
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

/* One thread's multiply-add rate in this moment, in operations a second. */
static double measure_peak(const peak_loop *peak) {
    static volatile double sink;
    const int64_t rounds = 100000;
    double start = seconds_now();
    sink = peak->run(rounds);
    (void)sink;
    return peak->operations_per_round * (double)rounds / (seconds_now() - start);
}

static rapt_tensor random_tensor(int32_t ndim, const int64_t *sizes) {
    rapt_tensor tensor = rapt_tensor_of(NULL, RAPT_F32, ndim, sizes);
    int64_t count = rapt_tensor_count(&tensor);
    float *data = malloc((size_t)count * sizeof *data);
    if (data == NULL) exit(1);
    uint32_t state = 1;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (float)(state >> 8) * 0x1p-23f - 1;
    }
    tensor.data = data;
    return tensor;
}

typedef struct job {
    rapt_mha *layer; /* NULL: the operator */
    rapt_tensor q, k, v, out;
    rapt_options options;
    double operations;
} job;

static job make_job(rapt_context *context, const shape *s) {
    job j = {.options = {.causal = s->causal}};
    j.operations = 4.0 * (double)(s->n * s->heads) * (double)(s->l * s->s * s->d) * (s->causal ? 0.5 : 1);
    if (s->embed_dim > 0) {
        rapt_mha_config config = rapt_mha_config_default(s->embed_dim, s->heads);
        config.batch_first = true;
        check(context, rapt_mha_create(context, &config, &j.layer));
        int64_t x[3] = {s->n, s->l, s->embed_dim};
        j.q = j.k = j.v = random_tensor(3, x);
        j.out = random_tensor(3, x);
        j.operations += 8.0 * (double)(s->n * s->l) * (double)(s->embed_dim * s->embed_dim);
    } else {
        int64_t q[4] = {s->n, s->heads, s->l, s->d}, k[4] = {s->n, s->kv_heads, s->s, s->d};
        j.q = random_tensor(4, q);
        j.k = random_tensor(4, k);
        j.v = random_tensor(4, k);
        j.out = random_tensor(4, q);
    }
    return j;
}

static void free_job(job *j) {
    if (j->k.data != j->q.data) { /* the layer's key and value are the query */
        free(j->k.data);
        free(j->v.data);
    }
    free(j->q.data);
    free(j->out.data);
    rapt_mha_destroy(j->layer);
}

static void run_job(rapt_context *context, const job *j) {
    if (j->layer != NULL) {
        check(context, rapt_mha_forward(context, j->layer, &j->q, &j->k, &j->v, &j->options, &j->out));
    } else {
        check(context, rapt_attention_forward(context, &j->q, &j->k, &j->v, &j->options, &j->out));
    }
}

static void bench_shape(rapt_context *context, const shape *s, double seconds) {
    job j = make_job(context, s);
    const peak_loop *peak = peak_of(rapt_context_isa(context));
    run_job(context, &j);
    double start = seconds_now();
    run_job(context, &j);
    double once = seconds_now() - start, best = once, worst = 0, best_peak = 0;
    int repeats = once < 1e-3 ? (int)(1e-3 / once) + 1 : 1; /* a round is at least a millisecond */
    for (double begin = seconds_now(); seconds_now() - begin < seconds || best_peak == 0;) {
        double rate = measure_peak(peak);
        if (rate > best_peak) best_peak = rate;
        start = seconds_now();
        for (int r = 0; r < repeats; r++) run_job(context, &j);
        double time = (seconds_now() - start) / repeats;
        if (time < best) best = time;
        if (time > worst) worst = time;
    }
    double rate = j.operations / best, limit = best_peak * (double)rapt_context_num_threads(context);
    printf("%-4s %12.1f us %9.1f GFLOP/s %6.1f %% of peak   slowest round %.2fx\n", s->name, best * 1e6, rate * 1e-9,
           100 * rate / limit, worst / best);
    fflush(stdout);
    free_job(&j);
}

int main(int argc, char **argv) {
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1;
    const char *filter = "";
    double seconds = 1;
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--threads") == 0 && has_value) {
            config.num_threads = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--filter") == 0 && has_value) {
            filter = argv[++i];
        } else if (strcmp(argv[i], "--seconds") == 0 && has_value) {
            seconds = atof(argv[++i]);
        } else {
            fprintf(stderr, "usage: rapt_bench [--threads T (0: all)] [--filter NAME] [--seconds S]\n");
            return 2;
        }
    }
    char text[256] = "";
    config.error_text = text;
    config.error_text_size = sizeof text;
    rapt_context *context;
    if (rapt_context_create(&config, &context) != RAPT_OK) {
        fprintf(stderr, "rapt_bench: %s\n", text);
        return 1;
    }
    printf("Rapt %s, f32, %s, %d thread%s\n", rapt_version(), rapt_isa_name(rapt_context_isa(context)),
           (int)rapt_context_num_threads(context), rapt_context_num_threads(context) == 1 ? "" : "s");
    for (int i = 0; i < SHAPES; i++) {
        if (strstr(shapes[i].name, filter) != NULL) bench_shape(context, &shapes[i], seconds);
    }
    rapt_context_destroy(context);
    return 0;
}
