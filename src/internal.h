/* internal.h - the map of the library
 *
 * The way of a call: rapt_mha_forward (mha.c) projects with the backend's `linear` and hands views to attn_prepare
 * (attn.c), which checks everything once and fills an attn_problem; the backend's `attn_forward` (cpu/attn_cpu.c or
 * ref/ref_attn.c) computes it. Above the backend everything speaks shapes and strides and may fail; below it nothing
 * is checked again and nothing fails: scratch memory is reserved before the first byte of a result is written.
 */
#ifndef RAPT_INTERNAL_H
#define RAPT_INTERNAL_H

#include "rapt/rapt.h"

#include "os.h"

#include <stdarg.h>
#include <stdatomic.h>

#ifdef __FAST_MATH__
#error "Rapt cannot be compiled with -ffast-math: infinities, NaN and the order of sums are part of what it promises"
#endif

#define RAPT_ALIGNMENT 64 /* of every allocation: a cache line and the widest vector */
#define RAPT_MAX_THREADS 1024
#define RAPT_PANEL 64 /* features that a backend's products read together */

/* ---- memory: memory.c ---- */

void *rapt_allocate(const rapt_allocator *allocator, size_t size); /* NULL when out of memory; size 0 is a size of 1 */
void rapt_release(const rapt_allocator *allocator, void *pointer, size_t size);
rapt_allocator rapt_allocator_or_default(const rapt_allocator *allocator);

/* Scratch memory that lives for one call and is kept for the next. One reservation a call, then takes that cannot fail.
 * Sizes are rounded up to RAPT_ALIGNMENT, so the sum of rapt_arena_size over the takes is what to reserve. */
typedef struct rapt_arena {
    char *base;
    size_t capacity, used;
} rapt_arena;

static inline size_t rapt_arena_size(size_t bytes) {
    return bytes > SIZE_MAX - RAPT_ALIGNMENT ? SIZE_MAX : (bytes + RAPT_ALIGNMENT - 1) & ~(size_t)(RAPT_ALIGNMENT - 1);
}
bool rapt_arena_reserve(rapt_arena *arena, const rapt_allocator *allocator, size_t bytes);
void *rapt_arena_take(rapt_arena *arena, size_t bytes);

/* Byte counts that overflow stick at SIZE_MAX, which no allocator grants: one check at the reservation is enough. */
static inline size_t rapt_size_add(size_t a, size_t b) {
    size_t sum;
    return __builtin_add_overflow(a, b, &sum) ? SIZE_MAX : sum;
}
static inline size_t rapt_size_mul(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

/* ---- the context: context.c ---- */

typedef struct rapt_backend_table rapt_backend_table;
typedef struct rapt_cpu_kernels rapt_cpu_kernels;

/* The items of a loop that one lane takes first: next, next + lanes and so on. */
typedef struct rapt_turn {
    _Alignas(RAPT_ALIGNMENT) _Atomic int64_t next; /* alone in its cache line */
} rapt_turn;

struct rapt_context {
    rapt_allocator allocator;
    rapt_backend backend_id;
    rapt_isa isa;
    const rapt_backend_table *backend;
    const rapt_cpu_kernels *kernels[2]; /* for f32 and for f64 accumulation */
    rapt_pool *pool;                    /* NULL with a parallel_for of the caller's, or with one thread */
    bool owns_pool;
    rapt_parallel_for parallel_for;
    void *parallel_for_user;
    int32_t lanes;      /* the most tasks at once; each lane has its own part of the scratch memory */
    int32_t tile_rows;  /* tuning, 0 for the default: rows of a tile. Changes speed and never bits; tests change it. */
    int32_t split_keys; /* tuning: 0 by need, 1 always, -1 never spread the keys of a row over lanes. Likewise. */
    double operations_worth_a_thread;      /* tuning: a loop with less work runs on the calling thread */
    uint64_t dropout_seed, dropout_offset; /* of calls that give none; the offset advances with each */
    rapt_arena arena;
    atomic_flag busy;
    char message[512];
    rapt_turn turns[]; /* [lanes] */
};

/* Every public call that computes or allocates stands between these two: they keep a second thread out, put the
 * floating-point unit in the mode that the bits depend on, and give the scratch memory back. */
typedef struct rapt_call {
    rapt_fp_mode caller_mode;
} rapt_call;
rapt_status rapt_enter(rapt_context *context, rapt_call *call);
rapt_status rapt_leave(rapt_context *context, const rapt_call *call, rapt_status status);

/* Writes the message and returns the status, so that checks read `return rapt_fail(...)`. */
rapt_status rapt_fail(rapt_context *context, rapt_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
rapt_status rapt_fail_memory(rapt_context *context, size_t bytes);
/* A config of a newer program may be longer than ours, if what we do not know is unset. */
bool rapt_extra_bytes_are_zero(const void *object, size_t known, size_t given);
/* The same as a check; `initialiser` is the function that sets struct_size. */
rapt_status rapt_check_struct_size(rapt_context *context, const char *name, const char *initialiser, const void *object,
                                   size_t given, size_t known);

/* Runs work(arg, item, lane) for each item in [0, items) on as many lanes as pay. Items are handed out one by one, so
 * they may be of very different sizes; what one computes never depends on lane or order. A lane begins with items of
 * its own, the same in each loop of as many items, so what it read for them last time may still be in its cache.
 * `operations` is roughly the number of multiply-adds in all: too little work wakes no thread. */
typedef void (*rapt_work)(void *arg, int64_t item, int32_t lane);
void rapt_parallel(rapt_context *context, int64_t items, double operations, rapt_work work, void *arg);

/* ---- threads: pool.c ---- */

rapt_status rapt_pool_start(const rapt_allocator *allocator, int32_t threads, rapt_pool **pool);
int32_t rapt_pool_threads(const rapt_pool *pool);
/* Runs task(arg, i) for i in [0, count), count at most the pool's threads. */
void rapt_pool_run(rapt_pool *pool, int64_t count, void (*task)(void *arg, int64_t index), void *arg);
/* RAPT_NUM_THREADS or the machine's count; 0 if the variable is set to something that is no positive number. */
int32_t rapt_default_threads(void);

/* ---- tensors: tensor.c ---- */

/* Checks a view on its own: pointers, rank, sizes, strides and alignment. `name` is what the message calls it. */
rapt_status rapt_check_tensor(rapt_context *context, const char *name, const rapt_tensor *tensor);
/* The same for a tensor that is written: it may not overlap itself. */
rapt_status rapt_check_output(rapt_context *context, const char *name, const rapt_tensor *tensor);
rapt_status rapt_check_rank(rapt_context *context, const char *name, const rapt_tensor *tensor, int32_t rank,
                            const char *shape_words);
/* Refuses an output that shares memory with another tensor (NULL is skipped). */
rapt_status rapt_check_apart(rapt_context *context, const char *output_name, const rapt_tensor *output,
                             const char *other_name, const rapt_tensor *other);
/* With a stride of 0 wherever it does not matter (one entry, or an empty tensor), so that absurd ones are never used. */
rapt_tensor rapt_normalised(const rapt_tensor *tensor);
bool rapt_is_float(rapt_dtype dtype);
bool rapt_same_view(const rapt_tensor *a, const rapt_tensor *b);
/* "[2, 3, 4]" into text; returns text. */
#define RAPT_SHAPE_TEXT 200
const char *rapt_shape_text(const rapt_tensor *tensor, char text[RAPT_SHAPE_TEXT]);

/* One element as a double, and back, rounded once to nearest: for everything that is not a hot loop. */
double rapt_load(const void *data, rapt_dtype dtype, int64_t index);
void rapt_store(void *data, rapt_dtype dtype, int64_t index, double value);
/* Copies between checked views of equal shape, converting where dtypes differ. `from` may be unaligned. */
void rapt_copy_elements(const rapt_tensor *from, const rapt_tensor *to);
void rapt_set_to_zero(const rapt_tensor *tensor); /* data NULL is fine */

/* ---- arithmetic of our own, the same bits everywhere: scalar_math.c, philox.c ---- */

double rapt_log2(double x);
double rapt_log(double x);
double rapt_exp2(double x);                                       /* |x| at most 1000 */
void rapt_sincos_2pi(double turns, double *sine, double *cosine); /* turns in [0, 1) */
/* Philox 4x32-10: 128 random bits from a 64-bit key and a 128-bit counter. */
void rapt_philox(uint64_t key, const uint32_t counter[4], uint32_t random[4]);

/* Dropout: the weight of (row = n*H+h, query, key) stays if word key % 4 of the block that this counter draws is at least
 * rapt_dropout_threshold(dropout). */
static inline void rapt_dropout_counter(uint64_t offset, int64_t row, int64_t query, int64_t key, uint32_t counter[4]) {
    counter[0] = (uint32_t)offset;
    counter[1] = (uint32_t)row;
    counter[2] = (uint32_t)query;
    counter[3] = (uint32_t)(key / 4);
}
/* The upper half of an offset goes into the key: 2^32 calls draw apart before it does. */
static inline uint64_t rapt_dropout_key(uint64_t seed, uint64_t offset) { return seed ^ (offset >> 32 << 32); }
static inline uint64_t rapt_dropout_threshold(double dropout) { return (uint64_t)(dropout * 0x1p32); } /* 2^32: none */

/* ---- the problem that a backend solves ---- */

/* Up to four dimensions of elements; the problem's dtype says of what type. data NULL: absent. */
typedef struct rapt_view {
    char *data;
    int64_t stride[4];
} rapt_view;

typedef struct attn_mask {
    const void *data;  /* NULL: none */
    rapt_dtype dtype;  /* RAPT_BOOL, true masks; or a floating-point type, added */
    int64_t stride[4]; /* [n, h, i, j] */
} attn_mask;

typedef struct attn_problem {
    rapt_dtype dtype;
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim; /* N H Hk L S D Dv */
    const rapt_cache *cache;    /* holds keys and values instead of k and v; NULL: none */
    int64_t extra_keys;         /* bias_kv and the zero key: 0 to 2 keys after the S real ones, seen by every query */
    rapt_view q, k, v, out;     /* [N,H,L,D] [N,Hk,S,D] [N,Hk,S,Dv] [N,H,L,Dv] */
    rapt_view extra_k, extra_v; /* [0,Hk,extra,D] [0,Hk,extra,Dv], stride[0] = 0 */
    double scale;
    double dropout; /* of weights; what is drawn depends on the two below */
    uint64_t dropout_seed, dropout_offset;
    attn_mask mask;    /* [N,H,L,S] */
    attn_mask padding; /* [N,0,0,S] */
    bool limit_left, limit_right;
    int64_t left, right, offset;
    const int64_t *offsets, *key_start, *key_lengths; /* [N], or NULL: offset for all, 0, up to S */
    bool average_weights;
    rapt_view weights;    /* [N,H,L,S'], or averaged [N,0,L,S'] */
    rapt_view lse;        /* [N,H,L] */
    rapt_dtype lse_dtype; /* the accumulation type, or f64 */
} attn_problem;

/* Where the gradient of an additive mask goes: [N,H,L,S], with a stride of 0 and a size of 1 where it is summed. */
typedef struct mask_gradient {
    void *data; /* NULL: not wanted */
    rapt_dtype dtype;
    int64_t size[3]; /* N or 1, H or 1, L or 1 */
    int64_t stride[4];
} mask_gradient;

/* The backward of a problem whose out and lse are those of its forward. It has no cache. */
typedef struct attn_gradients {
    bool accumulate;                                 /* into what is there, but for the extra keys */
    rapt_dtype out_dtype, q_dtype, k_dtype, v_dtype; /* of these: the problem's dtype, or the accumulation type */
    rapt_view out;                                   /* of the loss by the result, [N,H,L,Dv] */
    rapt_view weights; /* by the returned weights, [N,H,L,S'] or averaged [N,0,L,S']; data NULL: none */
    rapt_view q, k, v; /* to compute, of the problem's shapes; data NULL: not wanted */
    rapt_view extra_k; /* [N,Hk,extra,D] of the accumulation type */
    rapt_view extra_v; /* [N,Hk,extra,Dv] likewise */
    mask_gradient mask, padding;
} attn_gradients;

/* Rows (n, l) of features. Those lie in groups: feature f is f / group * group_stride + f % group * stride[2] elements into
 * its row. A group is all features, or a multiple of RAPT_PANEL. */
typedef struct rapt_rows {
    char *data; /* NULL: absent */
    rapt_dtype dtype;
    int64_t stride[3];
    int64_t group, group_stride;
} rapt_rows;

static inline int64_t rapt_feature_at(const rapt_rows *rows, int64_t feature) {
    return feature / rows->group * rows->group_stride + feature % rows->group * rows->stride[2];
}

/* y = x * weight^T + bias for up to three weights that read the same x: the parts of a fused projection. */
typedef struct linear_part {
    int64_t features;   /* O */
    rapt_tensor weight; /* [O, K] */
    rapt_tensor bias;   /* [O], data NULL: none */
    const void *packed; /* as rapt_linear_pack made it; NULL for a backend that does not read it */
    rapt_rows y;        /* [N, L, O] */
} linear_part;

typedef struct linear_problem {
    rapt_dtype dtype;                /* of the weights; rows are of the same, or of its accumulation type */
    int64_t batch, length, features; /* rows are (n, l); K */
    rapt_rows x;                     /* [N, L, K] */
    bool adds;                       /* to what y is, instead of writing over it */
    int32_t parts;
    linear_part part[3];
} linear_problem;

/* The gradients of y = x * weight^T + bias. */
typedef struct linear_gradients {
    rapt_dtype dtype;                                 /* as above */
    int64_t batch, length, features_in, features_out; /* rows are (n, l); K; O */
    rapt_rows x, dy;                                  /* [N, L, K], [N, L, O] */
    rapt_tensor weight;                               /* [O, K], for dx */
    rapt_rows dx;                                     /* [N, L, K]; data NULL: not wanted, as for the next two */
    rapt_tensor d_weight, d_bias;                     /* [O, K], [O] */
    bool adds_dx, adds_parameters;                    /* to what is there */
    bool hides_rows; /* a row of dy that is all zero adds nothing to d_weight, even if x is NaN or infinite there */
} linear_gradients;

struct rapt_backend_table {
    bool reads_packed_weights;
    size_t (*attn_scratch)(const rapt_context *context, const attn_problem *problem);
    void (*attn_forward)(rapt_context *context, const attn_problem *problem, void *scratch);
    size_t (*linear_scratch)(const rapt_context *context, const linear_problem *problem);
    void (*linear)(rapt_context *context, const linear_problem *problem, void *scratch);
    size_t (*attn_backward_scratch)(const rapt_context *context, const attn_problem *problem,
                                    const attn_gradients *gradients);
    void (*attn_backward)(rapt_context *context, const attn_problem *problem, const attn_gradients *gradients,
                          void *scratch);
    size_t (*linear_backward_scratch)(const rapt_context *context, const linear_gradients *gradients);
    void (*linear_backward)(rapt_context *context, const linear_gradients *gradients, void *scratch);
};

extern const rapt_backend_table rapt_backend_cpu, rapt_backend_reference;

/* ---- the operator: attn.c ---- */

/* Fills in everything that the options hold, which operator and layer share. The problem's sizes, dtype and default scale
 * are set before, and so is its cache. */
rapt_status rapt_attn_options(rapt_context *context, const rapt_options *options, bool batched, attn_problem *problem);
rapt_status rapt_check_aligned(rapt_context *context, const char *name, const int64_t *array); /* NULL is fine */
rapt_status rapt_check_dropout(rapt_context *context, const char *name, double dropout);
/* Sets what the problem draws with: the options' seed and offset if they give them, else the context's. Once a call has
 * succeeded, the other one moves the context's offset on. */
rapt_status rapt_take_dropout(rapt_context *context, const rapt_options *options, double dropout,
                              attn_problem *problem);
void rapt_advance_dropout(rapt_context *context, const rapt_options *options, const attn_problem *problem);

/* What the operator's forward and backward share: its tensors into an empty problem (key and value are both NULL where a
 * cache holds all there is), and the options that are for layers alone. */
rapt_status rapt_attn_tensors(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                              const rapt_tensor *value, const rapt_cache *cache, const rapt_tensor *out,
                              attn_problem *problem);
rapt_status rapt_check_operator_options(rapt_context *context, const rapt_options *options);

/* Where a mask of a shape that is taken lies in [N,H,L,S], with its sizes N or 1, H or 1, L or 1; false for any other. */
bool rapt_fit_attn_mask(const rapt_tensor *mask, const attn_problem *problem, int64_t stride[4], int64_t size[3]);

/* A checked tensor as a view, if it has that dtype and shape; the first size is dropped when there is no batch. Data of an
 * empty one is NULL. The other two: weights or their gradient, [N,L,S'] or [N,H,L,S'] as average_weights says; and the
 * problem's log-sum-exp. */
rapt_status rapt_take_view(rapt_context *context, const char *name, const rapt_tensor *tensor, rapt_dtype dtype,
                           bool batched, int32_t rank, const int64_t *shape, rapt_view *view);
rapt_status rapt_take_weights(rapt_context *context, const char *name, const rapt_tensor *tensor, bool batched,
                              const attn_problem *problem, rapt_view *view);
rapt_status rapt_take_lse(rapt_context *context, const rapt_tensor *tensor, bool batched, attn_problem *problem);

typedef struct rapt_named_tensor {
    const char *name;
    const rapt_tensor *tensor; /* NULL: absent */
} rapt_named_tensor;
/* Refuses results (out, and what the options return) that share memory with each other or with anything that is read. */
rapt_status rapt_check_results_apart(rapt_context *context, const rapt_options *options, int64_t batch,
                                     const rapt_tensor *out, const rapt_named_tensor *inputs, int count);
/* The same for results of any name; what the options return is then none of them. */
rapt_status rapt_check_all_apart(rapt_context *context, const rapt_options *options, int64_t batch,
                                 const rapt_named_tensor *results, int result_count, const rapt_named_tensor *inputs,
                                 int count);

/* ---- the operator's gradients: attn_backward.c ---- */

/* The gradient of attn_mask or key_padding_mask, in the mask's shape; NULL: not wanted. Refuses that of a bool or absent
 * mask. */
rapt_status rapt_take_mask_gradient(rapt_context *context, bool is_padding, const rapt_tensor *tensor,
                                    const rapt_tensor *mask, const attn_problem *problem, mask_gradient *gradient);
/* Whether the backend has a backward at all. */
rapt_status rapt_check_backward(rapt_context *context);

/* ---- packed weights: cpu/linear_cpu.c ----
 * The same layout on every ISA: panels of 64 outputs, each [K][64] followed by its [64] biases (the last panel as wide
 * as its outputs rounded up to 16), in the accumulation type. */
size_t rapt_linear_packed_size(rapt_dtype dtype, int64_t features_out, int64_t features_in);
void rapt_linear_pack(rapt_context *context, const rapt_tensor *weight, const rapt_tensor *bias, void *packed);

/* ---- the layer's first weights: init.c ---- */

typedef enum rapt_draw { RAPT_DRAW_UNIFORM, RAPT_DRAW_NORMAL } rapt_draw;
/* Fills a contiguous tensor: uniform within spread of 0 or normal with that deviation. `stream` tells tensors apart. */
void rapt_draw_tensor(const rapt_tensor *tensor, rapt_draw draw, double spread, uint64_t seed, uint32_t stream);

static inline rapt_dtype rapt_accumulation_dtype(rapt_dtype dtype) { return dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32; }
static inline size_t rapt_accumulation_size(rapt_dtype dtype) { return dtype == RAPT_F64 ? 8 : 4; }

#endif
