/* bench.c - times attention and the layer on a fixed set of shapes, beside the machine's limits in the same run
 *
 * Each shape runs in many short rounds, interleaved with rounds of its limit: multiply-adds in registers, for as long as a
 * round of the shape, or reads from memory for decoding. The best round of each counts, since neighbours on the machine only
 * ever slow a round down; the longer a round, the less it is spared, so limits of other lengths would not compare.
 * With --serve, rounds are asked for on stdin, so that bench/peers can interleave them with those of other libraries.
 */
#include "bench.h"

#include "limits.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef enum limit { PEAK, READ_COLD, READ_WARM } limit;

typedef struct shape {
    const char *name, *words;
    int64_t n, heads, kv_heads, l, s, d;
    int64_t embed_dim; /* above 0: the layer, self-attention */
    bool causal;
    limit limit;
    rapt_dtype cache; /* of a cache that holds the keys and values before these; 0: none */
    bool trains;      /* forward and backward */
} shape;

static const shape shapes[] = {
    {"P1", "N1 H8 L512 D64", 1, 8, 8, 512, 512, 64, 0, false, PEAK, 0, false},
    {"P1c", "the same, causal", 1, 8, 8, 512, 512, 64, 0, true, PEAK, 0, false},
    {"P2", "N1 H8 L2048 D64", 1, 8, 8, 2048, 2048, 64, 0, false, PEAK, 0, false},
    {"P2c", "the same, causal", 1, 8, 8, 2048, 2048, 64, 0, true, PEAK, 0, false},
    {"P3", "N1 H16 L4096 D128", 1, 16, 16, 4096, 4096, 128, 0, false, PEAK, 0, false},
    {"P3c", "the same, causal", 1, 16, 16, 4096, 4096, 128, 0, true, PEAK, 0, false},
    {"P4", "N1 H32 Hk8 L1024 D128", 1, 32, 8, 1024, 1024, 128, 0, false, PEAK, 0, false},
    {"P4c", "the same, causal", 1, 32, 8, 1024, 1024, 128, 0, true, PEAK, 0, false},
    {"D1", "N1 H32 Hk8 L1 S4096 D128, cold", 1, 32, 8, 1, 4096, 128, 0, false, READ_COLD, 0, false},
    {"D2", "N1 H12 L1 S1024 D64, warm", 1, 12, 12, 1, 1024, 64, 0, false, READ_WARM, 0, false},
    {"D1k", "D1 through a cache, f32", 1, 32, 8, 1, 4096, 128, 0, true, READ_COLD, RAPT_F32, false},
    {"D1h", "D1 through a cache, f16", 1, 32, 8, 1, 4096, 128, 0, true, READ_COLD, RAPT_F16, false},
    {"D1b", "D1 through a cache, bf16", 1, 32, 8, 1, 4096, 128, 0, true, READ_COLD, RAPT_BF16, false},
    {"D2k", "D2 through a cache, f32", 1, 12, 12, 1, 1024, 64, 0, true, READ_WARM, RAPT_F32, false},
    {"D8k", "N8 H32 Hk8 S1024 D128, cache", 8, 32, 8, 1, 1024, 128, 0, true, READ_COLD, RAPT_F32, false},
    {"T1", "layer E4096 H32 Hk8, a token", 1, 32, 8, 1, 1024, 128, 4096, true, READ_COLD, RAPT_F32, false},
    {"S1", "N1 H4 L16 D16", 1, 4, 4, 16, 16, 16, 0, false, PEAK, 0, false},
    {"W1", "N64 H4 L49 D32", 64, 4, 4, 49, 49, 32, 0, false, PEAK, 0, false},
    {"L1", "layer E512 H8 N8 L128", 8, 8, 8, 128, 128, 64, 512, false, PEAK, 0, false},
    {"L2", "layer E1024 H16 N1 L1024", 1, 16, 16, 1024, 1024, 64, 1024, false, PEAK, 0, false},
    {"P1t", "trained: N1 H8 L512 D64", 1, 8, 8, 512, 512, 64, 0, false, PEAK, 0, true},
    {"P1ct", "the same, causal", 1, 8, 8, 512, 512, 64, 0, true, PEAK, 0, true},
    {"P2t", "trained: N1 H8 L2048 D64", 1, 8, 8, 2048, 2048, 64, 0, false, PEAK, 0, true},
    {"P2ct", "the same, causal", 1, 8, 8, 2048, 2048, 64, 0, true, PEAK, 0, true},
    {"P3t", "trained: N1 H16 L4096 D128", 1, 16, 16, 4096, 4096, 128, 0, false, PEAK, 0, true},
    {"P3ct", "the same, causal", 1, 16, 16, 4096, 4096, 128, 0, true, PEAK, 0, true},
    {"P4t", "trained: N1 H32 Hk8 L1024 D128", 1, 32, 8, 1024, 1024, 128, 0, false, PEAK, 0, true},
    {"P4ct", "the same, causal", 1, 32, 8, 1024, 1024, 128, 0, true, PEAK, 0, true},
    {"S1t", "trained: N1 H4 L16 D16", 1, 4, 4, 16, 16, 16, 0, false, PEAK, 0, true},
    {"L1t", "trained: layer E512 H8 N8 L128", 8, 8, 8, 128, 128, 64, 512, false, PEAK, 0, true},
    {"L2t", "trained: layer E1024 H16 N1 L1024", 1, 16, 16, 1024, 1024, 64, 1024, false, PEAK, 0, true},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

#define BIG_BUFFER ((size_t)64 << 20) /* floats, 256 MB: far larger than any last cache */

static const char *program = "rapt_bench"; /* as bench_settings says */

static void check(rapt_context *context, rapt_status status) {
    if (status == RAPT_OK) return;
    fprintf(stderr, "%s: %s\n", program, rapt_error_message(context));
    exit(1);
}

static float *random_floats(size_t count) {
    float *data = malloc(count * sizeof *data);
    if (data == NULL) {
        fprintf(stderr, "%s: out of memory\n", program);
        exit(1);
    }
    uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (float)(state >> 8) * 0x1p-23f - 1;
    }
    return data;
}

static rapt_tensor random_tensor(int32_t ndim, const int64_t *sizes) {
    rapt_tensor tensor = rapt_tensor_of(NULL, RAPT_F32, ndim, sizes);
    tensor.data = random_floats((size_t)rapt_tensor_count(&tensor));
    return tensor;
}

/* ---- one shape ---- */

static double operations_of(const shape *s) {
    double attention = 4.0 * (double)(s->n * s->heads) * (double)(s->l * s->s * s->d) * (s->causal ? 0.5 : 1);
    double projections = 8.0 * (double)(s->n * s->l) * (double)(s->embed_dim * s->embed_dim);
    return s->trains ? 3.5 * attention + 3 * projections : attention + projections; /* two products, and five back */
}

/* Of keys, values and weights, each read once. */
static double bytes_of(const shape *s) {
    double element = s->cache != 0 ? (double)rapt_dtype_size(s->cache) : sizeof(float);
    double weights = 2 * (double)s->embed_dim * (double)((s->heads + s->kv_heads) * s->d) * sizeof(float);
    return 2 * element * (double)(s->n * s->kv_heads * s->s * s->d) + weights;
}

/* What the shape's limit limits. */
static double work_of(const shape *s) { return s->limit == PEAK ? operations_of(s) : bytes_of(s); }

typedef struct job {
    const shape *shape;
    rapt_mha *layer;   /* NULL: the operator */
    rapt_cache *cache; /* NULL: none */
    rapt_tensor q, k, v, out;
    rapt_options options;
    rapt_tensor before, after_it;          /* of a small attention that goes before, if there is a cache */
    rapt_tensor lse, d_out, d_q, d_k, d_v; /* if it trains */
    rapt_mha_state *state;
    rapt_mha_gradients *gradients;
    int repeats;   /* calls in a round, which takes a millisecond or one call */
    double length; /* of a round, in seconds, about */
    bool is_short; /* so that cold caches would show in the time of a call */
} job;

static void run_job(rapt_context *context, const job *j) {
    if (j->layer != NULL) {
        check(context, rapt_mha_forward(context, j->layer, &j->q, &j->k, &j->v, &j->options, &j->out));
        if (j->shape->trains)
            check(context, rapt_mha_backward(context, j->layer, j->state, &j->d_out, NULL, j->gradients));
        if (j->cache != NULL) check(context, rapt_cache_truncate(context, j->cache, RAPT_ALL, j->shape->s));
    } else {
        const rapt_tensor *k = j->cache == NULL ? &j->k : NULL, *v = j->cache == NULL ? &j->v : NULL;
        check(context, rapt_attention_forward(context, &j->q, k, v, &j->options, &j->out));
        if (!j->shape->trains) return;
        rapt_attention_gradients gradients = {.query = &j->d_q, .key = &j->d_k, .value = &j->d_v};
        check(context,
              rapt_attention_backward(context, &j->q, k, v, &j->options, &j->out, &j->d_out, NULL, &gradients));
    }
}

static rapt_cache *make_cache(rapt_context *context, const shape *s) {
    rapt_cache_config config = rapt_cache_config_default(s->n, s->s + 1);
    config.num_kv_heads = s->kv_heads;
    config.head_dim = s->d;
    config.set_dtype = true;
    config.dtype = s->cache;
    rapt_cache *cache;
    check(context, rapt_cache_create(context, NULL, &config, &cache));
    int64_t sizes[4] = {s->n, s->s, s->kv_heads, s->d};
    rapt_tensor keys = random_tensor(4, sizes);
    check(context, rapt_cache_import(context, cache, &keys, &keys, NULL));
    free(keys.data);
    return cache;
}

/* What a backward needs and gives. The job stays where it is, since others point into it. */
static void prepare_training(rapt_context *context, job *j) {
    const shape *s = j->shape;
    j->d_out = random_tensor(j->out.ndim, j->out.shape);
    j->d_q = random_tensor(j->q.ndim, j->q.shape);
    if (s->embed_dim > 0) {
        check(context, rapt_mha_state_create(context, &j->state));
        check(context, rapt_mha_gradients_create(context, j->layer, &j->gradients));
        j->options.state = j->state;
        j->gradients->query = j->gradients->key = j->gradients->value = &j->d_q;
    } else {
        j->lse = random_tensor(3, j->q.shape);
        j->options.lse = &j->lse;
        j->d_k = random_tensor(j->k.ndim, j->k.shape);
        j->d_v = random_tensor(j->v.ndim, j->v.shape);
    }
}

static void make_job(rapt_context *context, const shape *s, job *to) {
    job j = {.shape = s, .options = {.causal = s->causal}, .repeats = 1};
    if (s->embed_dim > 0) {
        rapt_mha_config config = rapt_mha_config_default(s->embed_dim, s->heads);
        config.batch_first = true;
        config.num_kv_heads = s->kv_heads;
        check(context, rapt_mha_create(context, &config, &j.layer));
        int64_t x[3] = {s->n, s->l, s->embed_dim};
        j.q = j.k = j.v = random_tensor(3, x);
        j.out = random_tensor(3, x);
    } else {
        int64_t q[4] = {s->n, s->heads, s->l, s->d}, k[4] = {s->n, s->kv_heads, s->s, s->d};
        j.q = random_tensor(4, q);
        j.k = random_tensor(4, k);
        j.v = random_tensor(4, k);
        j.out = random_tensor(4, q);
    }
    if (s->cache != 0) {
        int64_t small[4] = {1, 8, 64, 64};
        j.cache = j.options.cache = make_cache(context, s);
        j.before = random_tensor(4, small);
        j.after_it = random_tensor(4, small);
    }
    *to = j;
    if (s->trains) prepare_training(context, to);
    run_job(context, to);
    double start = seconds_now();
    run_job(context, to);
    double time = seconds_now() - start;
    to->is_short = time < 100e-3;
    if (time < 1e-3 && s->limit != READ_COLD) to->repeats = (int)(1e-3 / time) + 1;
    to->length = to->repeats * time;
}

static void free_job(job *j) {
    if (j->k.data != j->q.data) { /* the layer's key and value are the query */
        free(j->k.data);
        free(j->v.data);
    }
    free(j->q.data);
    free(j->out.data);
    const rapt_tensor *others[] = {&j->before, &j->after_it, &j->lse, &j->d_out, &j->d_q, &j->d_k, &j->d_v};
    for (int i = 0; i < 7; i++) free(others[i]->data);
    rapt_mha_state_destroy(j->state);
    rapt_mha_gradients_destroy(j->gradients);
    rapt_mha_destroy(j->layer);
    rapt_cache_destroy(j->cache);
}

/* The rest of a model keeps the threads at work until a token comes to its cache. After a round of reading memory they would
 * sleep, and come 40 us late. */
static void wake_threads(rapt_context *context, const job *j) {
    const rapt_options plain = {0};
    const rapt_tensor *x = &j->before;
    for (double begin = seconds_now(); seconds_now() - begin < 0.2e-3;)
        check(context, rapt_attention_forward(context, x, x, x, &plain, &j->after_it));
}

typedef struct round_result {
    double seconds;     /* a call */
    double limit;       /* operations or bytes a second */
    double short_limit; /* the peak over pieces shorter than the round; else as limit */
} round_result;

/* One round of the shape's limit, then one of the shape. */
static round_result run_round(rapt_context *context, const job *j, const float *big_buffer) {
    round_result r = {0};
    int threads = (int)rapt_context_num_threads(context);
    rapt_isa isa = rapt_context_isa(context);
    size_t count = (size_t)(bytes_of(j->shape) / sizeof(float));
    switch (j->shape->limit) {
    case PEAK: {
        peak_rates peak = measure_peak(isa, threads, j->length);
        r.limit = peak.whole;
        r.short_limit = peak.best;
        break;
    }
    case READ_COLD: /* which flushes the caches, too */
        r.limit = r.short_limit = measure_read(isa, big_buffer, BIG_BUFFER, threads);
        if (j->cache != NULL) wake_threads(context, j);
        break;
    case READ_WARM:
        measure_read(isa, big_buffer, count, threads);
        r.limit = r.short_limit = measure_read(isa, big_buffer, count, threads);
        run_job(context, j); /* what it reads is warm again */
        break;
    }
    double start = seconds_now();
    for (int i = 0; i < j->repeats; i++) run_job(context, j);
    r.seconds = (seconds_now() - start) / j->repeats;
    return r;
}

typedef struct result {
    double best, worst;              /* seconds */
    double rate, limit, short_limit; /* operations or bytes a second */
    int rounds;
} result;

static result bench_shape(rapt_context *context, const shape *s, double seconds, const float *big_buffer) {
    job j;
    make_job(context, s, &j);
    result r = {.best = HUGE_VAL};
    for (double begin = seconds_now(); seconds_now() - begin < seconds || r.rounds < 5; r.rounds++) {
        round_result now = run_round(context, &j, big_buffer);
        r.limit = fmax(r.limit, now.limit);
        r.short_limit = fmax(r.short_limit, now.short_limit);
        r.best = fmin(r.best, now.seconds);
        r.worst = fmax(r.worst, now.seconds);
    }
    r.rate = work_of(s) / r.best;
    free_job(&j);
    return r;
}

/* ---- serving ---- */

static const char *const limit_names[] = {"peak", "read cold", "read warm"};

static void print_shapes(void) {
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (s->cache != 0) continue; /* nobody else has this cache */
        printf("%s{\"name\": \"%s\", \"words\": \"%s\", \"n\": %d, \"heads\": %d, \"kv_heads\": %d, \"l\": %d, "
               "\"s\": %d, \"d\": %d, \"embed_dim\": %d, \"causal\": %s, \"trains\": %s, \"limit\": \"%s\", "
               "\"work\": %.0f}",
               i == 0 ? "[" : ", ", s->name, s->words, (int)s->n, (int)s->heads, (int)s->kv_heads, (int)s->l, (int)s->s,
               (int)s->d, (int)s->embed_dim, s->causal ? "true" : "false", s->trains ? "true" : "false",
               limit_names[s->limit], work_of(s));
    }
    printf("]\n");
}

static const shape *shape_by_name(const char *name) {
    for (int i = 0; i < SHAPES; i++) {
        if (strcmp(shapes[i].name, name) == 0) return &shapes[i];
    }
    fprintf(stderr, "%s: there is no shape %s\n", program, name);
    exit(2);
}

/* Each line of stdin gets a line of JSON: `about`, `shapes`, `prepare NAME`, and `round` for seconds a call and the limits. */
static void serve(rapt_context *context, const float *big_buffer) {
    job j = {0};
    char line[64], name[32];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "about\n") == 0) {
            printf("{\"version\": \"%s\", \"compiler\": \"%s\", \"isa\": \"%s\", \"threads\": %d}\n", rapt_version(),
                   __VERSION__, rapt_isa_name(rapt_context_isa(context)), (int)rapt_context_num_threads(context));
        } else if (strcmp(line, "shapes\n") == 0) {
            print_shapes();
        } else if (sscanf(line, "prepare %31s", name) == 1) {
            free_job(&j);
            make_job(context, shape_by_name(name), &j);
            printf("true\n");
        } else if (strcmp(line, "round\n") == 0 && j.shape != NULL) {
            /* Others ran in between, so that caches and threads must be warmed again. */
            for (double begin = seconds_now(); j.is_short && seconds_now() - begin < 5e-3;) run_job(context, &j);
            round_result now = run_round(context, &j, big_buffer);
            printf("[%.9g, %.9g, %.9g]\n", now.seconds, now.limit, now.short_limit);
        } else {
            fprintf(stderr, "%s: cannot serve %s", program, line);
            exit(2);
        }
        fflush(stdout);
    }
    free_job(&j);
}

/* ---- output ---- */

void cpu_name(char *text, size_t size) {
    snprintf(text, size, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256], name[200];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "model name%*[ \t:]%199[^\n]", name) == 1) {
            snprintf(text, size, "%s", name);
            break;
        }
    }
    if (file != NULL) fclose(file);
}

static void print_result(const bench_settings *o, const shape *s, const result *r, int threads, bool is_first) {
    const char *unit = s->limit == PEAK ? "GFLOP/s" : "GB/s";
    if (o->json) {
        printf("%s\n    {\"name\": \"%s\", \"threads\": %d, \"seconds\": %.4g, \"rate\": %.4g, \"unit\": \"%s\", "
               "\"limit\": %.4g, \"share\": %.4f, \"share_of_short_limit\": %.4f, \"slowest_round\": %.2f, "
               "\"rounds\": %d}",
               is_first ? "" : ",", s->name, threads, r->best, r->rate * 1e-9, unit, r->limit * 1e-9,
               r->rate / r->limit, r->rate / r->short_limit, r->worst / r->best, r->rounds);
    } else {
        printf("%-4s %-32s %7d %11.1f us %8.1f %-8s %5.1f %%  %6.2fx\n", s->name, s->words, threads, r->best * 1e6,
               r->rate * 1e-9, unit, 100 * r->rate / r->limit, r->worst / r->best);
    }
    fflush(stdout);
}

static rapt_context *make_context(rapt_context_config config, int threads) {
    char text[256] = "";
    config.error_text = text;
    config.error_text_size = sizeof text;
    config.num_threads = threads;
    rapt_context *context;
    if (rapt_context_create(&config, &context) == RAPT_OK) return context;
    fprintf(stderr, "%s: %s\n", program, text);
    exit(1);
}

int bench_count_shapes(const char *filter) {
    int count = 0;
    for (int i = 0; i < SHAPES; i++) count += strstr(shapes[i].name, filter) != NULL;
    return count;
}

static void bench_all(const bench_settings *o, rapt_context_config config, const float *big_buffer) {
    char cpu[200];
    bool is_first = true;
    int counts[2] = {o->threads > 0 ? o->threads : 1, 0}, passes = o->threads > 0 ? 1 : 2;
    for (int pass = 0; pass < passes; pass++) {
        rapt_context *context = make_context(config, counts[pass]);
        int threads = (int)rapt_context_num_threads(context);
        const char *commit = getenv("RAPT_COMMIT"), *isa = rapt_isa_name(rapt_context_isa(context));
        cpu_name(cpu, sizeof cpu);
        if (pass == 0 && o->json) {
            printf("{\"cpu\": \"%s\", \"compiler\": \"%s\", \"commit\": \"%s\", \"isa\": \"%s\", \"dtype\": \"f32\", "
                   "\"results\": [",
                   cpu, __VERSION__, commit == NULL ? "" : commit, isa);
        } else if (pass == 0) {
            printf("Rapt %s, f32, %s, %s\n%-37s %7s %14s %17s %8s  %7s\n", rapt_version(), isa, cpu, "", "threads",
                   "best time", "rate", "of limit", "slowest");
        }
        for (int i = 0, number = 0; i < SHAPES && (pass == 0 || threads > 1); i++) {
            if (strstr(shapes[i].name, o->filter) == NULL) continue;
            if (o->progress != NULL) o->progress(shapes[i].name, ++number, bench_count_shapes(o->filter), threads);
            result r = bench_shape(context, &shapes[i], o->seconds, big_buffer);
            if (o->progress != NULL) o->progress(NULL, number, 0, threads);
            print_result(o, &shapes[i], &r, threads, is_first);
            is_first = false;
        }
        rapt_context_destroy(context);
    }
    if (o->json) printf("\n]}\n");
}

void bench_run(const bench_settings *o) {
    program = o->program;
    rapt_context_config config = rapt_context_config_default();
    config.isa = o->isa;
    float *big_buffer = random_floats(BIG_BUFFER);
    if (o->serve) {
        rapt_context *context = make_context(config, o->threads);
        serve(context, big_buffer);
        rapt_context_destroy(context);
    } else {
        bench_all(o, config, big_buffer);
    }
    free(big_buffer);
}
