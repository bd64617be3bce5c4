/* rapt.h - multi-head attention as a C library
 *
 * INTRODUCTION
 *
 * Rapt is the attention layer of transformers, without a framework: PyTorch's nn.MultiheadAttention with all its
 * options, grouped and multi-query heads, sliding windows and ragged batches, and the bare operator
 * (scaled dot-product attention) beneath it. This header is the manual; it reads from top to bottom:
 *
 *     1. a whole small program        6. the layer
 *     2. errors                       7. heads: split, merge, repeat
 *     3. contexts                     8. safetensors files
 *     4. tensors                      9. checkpoints: loading and saving layers
 *     5. the attention operator      10. decoding: the cache and rotary positions
 *                                    11. training: backward, dropout, optimisers
 *
 * Three promises hold everywhere:
 *
 *   - Same token, same bits. In f32 and f64 the result for a token depends on that token, on the keys it sees counted
 *     from its sequence's first real key, and on the weights: not on the number of threads, the batch around it, the
 *     padding, or the CPU (any with fused multiply-add). RAPT_NUMERICS_VERSION changes if these bits ever do.
 *   - Nothing is NaN that need not be. A query that may attend to nothing gets zeros; NaN or infinity behind a mask
 *     reaches no result.
 *   - A failed call changes nothing, prints nothing, and leaves a message in its context that names the argument, its
 *     value and what was expected. No call aborts.
 *
 * Sizes are named as in PyTorch's manual: N batch, L queries, S keys, E embed_dim, H query heads, Hk key/value heads,
 * D head_dim, Dv the value's head_dim.
 *
 *
 * 1. A WHOLE SMALL PROGRAM
 *
 *     #include <rapt/rapt.h>
 *     #include <stdio.h>
 *
 *     int main(void) {
 *         rapt_context *ctx;                       // threads, scratch memory, the last error's text
 *         if (rapt_context_create(NULL, &ctx) != RAPT_OK) return 1;
 *         rapt_mha *layer;                         // E = 64, H = 4, weights drawn as PyTorch draws them
 *         rapt_mha_config config = rapt_mha_config_default(64, 4);
 *         config.batch_first = true;
 *         rapt_status status = rapt_mha_create(ctx, &config, &layer);
 *         static float in[2 * 10 * 64], out[2 * 10 * 64];
 *         int64_t shape[3] = {2, 10, 64};          // [N, L, E]
 *         rapt_tensor x = rapt_tensor_of(in, RAPT_F32, 3, shape), y = rapt_tensor_of(out, RAPT_F32, 3, shape);
 *         rapt_options options = {.causal = true};
 *         if (status == RAPT_OK) status = rapt_mha_forward(ctx, layer, &x, &x, &x, &options, &y);
 *         puts(status == RAPT_OK ? "it works" : rapt_error_message(ctx));
 *         rapt_mha_destroy(layer);
 *         rapt_context_destroy(ctx);
 *     }
 */
#ifndef RAPT_RAPT_H
#define RAPT_RAPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define RAPT_API
#else
#define RAPT_API __attribute__((visibility("default")))
#endif

#define RAPT_VERSION_MAJOR 0
#define RAPT_VERSION_MINOR 1
#define RAPT_VERSION_PATCH 0

/* Raised when, and only when, a release gives other bits than the one before for the same f32 or f64 call. */
#define RAPT_NUMERICS_VERSION 1

/* The version of the library that is linked, "0.1.0". */
RAPT_API const char *rapt_version(void);

/* --------------------------------------------------------------------------------------------------------------------
 * 2. ERRORS
 *
 * Every call that can fail returns a status. The message with the offending values is in the context:
 *
 *     rapt_mha_config config = rapt_mha_config_default(512, 6);
 *     if (rapt_mha_create(ctx, &config, &layer) != RAPT_OK) puts(rapt_error_message(ctx));
 *     // num_heads 6 does not divide embed_dim 512 (pass head_dim to set it apart)
 */
#define RAPT_STATUS_LIST(X)                                                                                            \
    X(RAPT_OK, 0, "success")                                                                                           \
    X(RAPT_ERROR_NULL, 1, "a required pointer is NULL")                                                                \
    X(RAPT_ERROR_ARGUMENT, 2, "a value is outside what the call takes")                                                \
    X(RAPT_ERROR_SHAPE, 3, "a tensor has the wrong rank or a wrong size")                                              \
    X(RAPT_ERROR_DTYPE, 4, "a tensor has the wrong element type")                                                      \
    X(RAPT_ERROR_DEVICE, 5, "a device has no backend in this build, or devices differ")                                \
    X(RAPT_ERROR_LAYOUT, 6, "memory is misaligned or overlaps where it must not, or strides do not allow a view")      \
    X(RAPT_ERROR_OVERFLOW, 7, "a size is too large to compute with")                                                   \
    X(RAPT_ERROR_MEMORY, 8, "out of memory")                                                                           \
    X(RAPT_ERROR_ABSENT, 9, "there is nothing of that name")                                                           \
    X(RAPT_ERROR_STATE, 10, "an object is not in a state that allows the call")                                        \
    X(RAPT_ERROR_UNSUPPORTED, 11, "this machine or this release cannot do that")                                       \
    X(RAPT_ERROR_THREAD, 12, "the system refused to start a thread")                                                   \
    X(RAPT_ERROR_FILE, 13, "a file cannot be read or written")                                                         \
    X(RAPT_ERROR_FORMAT, 14, "a file is not what its format allows")

typedef enum rapt_status {
#define RAPT_STATUS_ENUM(name, code, text) name = code,
    RAPT_STATUS_LIST(RAPT_STATUS_ENUM)
#undef RAPT_STATUS_ENUM
} rapt_status;

RAPT_API const char *rapt_status_name(rapt_status status); /* "RAPT_ERROR_SHAPE" */
RAPT_API const char *rapt_status_text(rapt_status status); /* "a tensor has the wrong rank or a wrong size" */

/* --------------------------------------------------------------------------------------------------------------------
 * 3. CONTEXTS
 *
 * A context owns threads, scratch memory and the last error's text. One thread uses a context at a time (a second one
 * that tries gets RAPT_ERROR_STATE and no message); a program with many threads gives each its own, and they share
 * layers freely. After a call, another of the same kind with sizes no larger (and no fewer key/value heads) allocates
 * nothing.
 */
typedef struct rapt_context rapt_context;
typedef struct rapt_pool rapt_pool;

typedef enum rapt_backend {
    RAPT_BACKEND_CPU = 0,       /* fast: tiles, vector kernels, threads */
    RAPT_BACKEND_REFERENCE = 1, /* naive loops in double precision: slow, obvious, the specification of the other */
} rapt_backend;

/* Instruction sets of the CPU backend. AVX2 (with FMA), AVX-512 and NEON give the same bits as each other in f32 and
 * f64; the baseline has no fused multiply-add and differs from them by rounding. */
typedef enum rapt_isa {
    RAPT_ISA_AUTO = 0, /* the best one that this CPU has */
    RAPT_ISA_BASELINE = 1,
    RAPT_ISA_AVX2 = 2,
    RAPT_ISA_AVX512 = 3,
    RAPT_ISA_NEON = 4,
} rapt_isa;

RAPT_API const char *rapt_isa_name(rapt_isa isa); /* "avx512" */
RAPT_API bool rapt_isa_available(rapt_isa isa);   /* in this build and on this CPU */

/* Where memory comes from. allocate returns memory aligned to `alignment` (a power of two), or NULL when there is none;
 * release gets the pointer and size of an earlier allocate. Both may be called from any thread that uses the library. */
typedef struct rapt_allocator {
    void *user;
    void *(*allocate)(void *user, size_t size, size_t alignment);
    void (*release)(void *user, void *pointer, size_t size);
} rapt_allocator;

/* The caller's own threads: run task(arg, i) once for each i in [0, count), in any order, at once or one after another,
 * and return when all are done. count is never above the declared number of workers. */
typedef void (*rapt_parallel_for)(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg);

typedef struct rapt_context_config {
    size_t struct_size;             /* set by rapt_context_config_default */
    int32_t num_threads;            /* 0: RAPT_NUM_THREADS, else all that the process may use (affinity, cgroup) */
    rapt_backend backend;           /* RAPT_BACKEND_CPU */
    rapt_isa isa;                   /* RAPT_ISA_AUTO: the environment's RAPT_ISA, else the best */
    rapt_allocator allocator;       /* all zero: the C library's; blocks from 4 MB on ask for large pages */
    rapt_pool *pool;                /* threads shared with other contexts (borrowed); NULL: the context's own */
    rapt_parallel_for parallel_for; /* not NULL: the caller's threads instead of a pool */
    void *parallel_for_user;        /* handed to parallel_for */
    int32_t parallel_for_workers;   /* the most tasks that parallel_for can run at once, from 1 */
    char *error_text;               /* if not NULL, where a failing rapt_context_create writes its message */
    size_t error_text_size;         /* bytes there */
} rapt_context_config;

static inline rapt_context_config rapt_context_config_default(void) {
    rapt_context_config config;
    memset(&config, 0, sizeof config);
    config.struct_size = sizeof config;
    return config;
}

/* config may be NULL for the defaults. On failure *context is NULL. */
RAPT_API rapt_status rapt_context_create(const rapt_context_config *config, rapt_context **context);
RAPT_API void rapt_context_destroy(rapt_context *context); /* NULL is fine, as for every destroy */

/* The message of the last call that failed with this context, "" before that. Valid until the next call with it. Calls
 * without a context (or with NULL) leave none: their status says it all. */
RAPT_API const char *rapt_error_message(const rapt_context *context);

RAPT_API int32_t rapt_context_num_threads(const rapt_context *context);
RAPT_API rapt_isa rapt_context_isa(const rapt_context *context); /* the one in use */
RAPT_API rapt_backend rapt_context_backend(const rapt_context *context);

/* A pool of threads for several contexts. While one context computes with it, the others compute on their own calling
 * thread alone. It must outlive its contexts. num_threads counts the calling thread; 0 means the default as above.
 * A child process made by fork gets threads of its own when it first needs them. */
RAPT_API rapt_status rapt_pool_create(int32_t num_threads, rapt_pool **pool);
RAPT_API void rapt_pool_destroy(rapt_pool *pool);

/* --------------------------------------------------------------------------------------------------------------------
 * 4. TENSORS
 *
 * A tensor is a borrowed view: Rapt never frees its data. Strides count elements, may be 0 in an input (broadcast) and
 * negative anywhere. Data must be aligned to its element's size. rapt/dlpack.h converts from and to DLPack.
 */
#define RAPT_MAX_DIMS 8

typedef enum rapt_dtype {
    RAPT_F32 = 1,
    RAPT_F64 = 2,
    RAPT_BF16 = 3,
    RAPT_F16 = 4,
    RAPT_BOOL = 5, /* one byte, zero is false */
} rapt_dtype;

typedef enum rapt_device {
    RAPT_DEVICE_CPU = 0,
    RAPT_DEVICE_CUDA = 1,
} rapt_device;

typedef struct rapt_tensor {
    void *data;
    rapt_dtype dtype;
    rapt_device device;
    int32_t device_id; /* which one of its kind; 0 for the CPU */
    int32_t ndim;
    int64_t shape[RAPT_MAX_DIMS];
    int64_t stride[RAPT_MAX_DIMS]; /* in elements */
} rapt_tensor;

RAPT_API size_t rapt_dtype_size(rapt_dtype dtype);      /* 0 for a value that is no dtype */
RAPT_API const char *rapt_dtype_name(rapt_dtype dtype); /* "f32" */
RAPT_API const char *rapt_device_name(rapt_device device);

/* A contiguous (row-major) view of data. An ndim outside [0, RAPT_MAX_DIMS] is kept as it is for the call that gets the
 * tensor to refuse. */
RAPT_API rapt_tensor rapt_tensor_of(void *data, rapt_dtype dtype, int32_t ndim, const int64_t *shape);
RAPT_API rapt_tensor rapt_tensor_strided(void *data, rapt_dtype dtype, int32_t ndim, const int64_t *shape,
                                         const int64_t *stride);
RAPT_API int64_t rapt_tensor_count(const rapt_tensor *tensor); /* elements; -1 if that overflows */
RAPT_API bool rapt_tensor_is_contiguous(const rapt_tensor *tensor);

/* Views of a view: two dimensions exchanged; `count` entries of one dimension from `start` on. */
RAPT_API rapt_status rapt_tensor_transpose(rapt_context *context, const rapt_tensor *tensor, int32_t dim_a,
                                           int32_t dim_b, rapt_tensor *view);
RAPT_API rapt_status rapt_tensor_slice(rapt_context *context, const rapt_tensor *tensor, int32_t dim, int64_t start,
                                       int64_t count, rapt_tensor *view);

/* Copies element by element between views of the same shape and any strides; floating-point types convert (rounding to
 * nearest), bool goes only to bool. */
RAPT_API rapt_status rapt_tensor_copy(rapt_context *context, const rapt_tensor *from, const rapt_tensor *to);

/* --------------------------------------------------------------------------------------------------------------------
 * 5. THE ATTENTION OPERATOR
 *
 *     out = softmax(query * key^T * scale + mask) * value
 *
 * query [N,H,L,D], key [N,Hk,S,D], value [N,Hk,S,Dv], out [N,H,L,Dv], any strides; Hk divides H, and query head h reads
 * key/value head h / (H / Hk). f32, f64, bf16 or f16, all four the same; sums run in f64 for f64, in f32 for the rest.
 * Memory beside the arguments grows with L + S, not with L * S. N = 0 or L = 0 computes nothing; S = 0 gives zeros.
 *
 * The options say which keys a query sees; every limit given holds at once. All zero means: all keys.
 *
 *     masks    attn_mask: RAPT_BOOL, where true means "may NOT attend" (PyTorch's layer says the same, its
 *              scaled_dot_product_attention the opposite), or any floating-point type, added to the scores; -inf masks,
 *              every finite value is a number (in f32 those beyond 2.3e38 count as equal). [L,S], [N*H,L,S] (index n*H+h), or [N,H,L,S], where N, H and L may also
 *              be 1 to broadcast. Through the layer, unbatched: [L,S] or [H,L,S].
 *              key_padding_mask: the same two kinds, [N,S] or [S] for all sequences.
 *     band     query i stands at position p = i + offset and sees keys p - left <= j <= p + right. A side is open
 *              unless limited: limit_left with left, limit_right with right (either may be negative); causal is short
 *              for right = 0.
 *              The offset is 0 (PyTorch's causal, the default), S - L (align_bottom_right, FlashAttention's), the
 *              caller's (offset), or the caller's for each sequence (offsets).
 *     lengths  key_start[n] is the first real key of sequence n (left padding), key_lengths[n] how many real keys there
 *              are from there on (right padding).
 *
 * A query that sees no key: out 0, weights 0, log-sum-exp -inf. One that sees a single key: out is its value and the
 * weight 1, whatever the score.
 */
typedef enum rapt_mode {
    RAPT_MODE_DEFAULT = 0, /* a layer's own mode; training for the functional form, as in PyTorch */
    RAPT_MODE_TRAIN = 1,
    RAPT_MODE_EVAL = 2,
} rapt_mode;

typedef struct rapt_cache rapt_cache;         /* section 10 */
typedef struct rapt_rotary rapt_rotary;       /* section 10 */
typedef struct rapt_mha_state rapt_mha_state; /* section 11 */

/* What a forward takes beside its tensors. Set it to zero ({0} in C, {} in C++) and then what you need. The reserved
 * space lets it grow without breaking compiled programs; it must stay zero. */
typedef struct rapt_options {
    /* which keys a query sees */
    const rapt_tensor *attn_mask;
    const rapt_tensor *key_padding_mask;
    bool causal;
    bool limit_left, limit_right;
    bool align_bottom_right;
    int64_t left, right;
    int64_t offset;
    const int64_t *offsets;     /* [N] */
    const int64_t *key_start;   /* [N] */
    const int64_t *key_lengths; /* [N] */

    /* how it is computed */
    bool set_scale;
    rapt_mode mode; /* layers only: overrides train/eval for this call, so that threads can share a layer */
    double scale;   /* if set_scale: instead of 1/sqrt(D) or the layer's; any finite number, 0 too */
    double dropout; /* the operator only (a layer has its own); in [0, 1] */

    /* what else to return; S' is S plus a layer's extra keys (bias_kv first, then zero_attn) */
    bool per_head_weights;      /* weights for each head, not their average; both in the query's dtype */
    const rapt_tensor *weights; /* [N,L,S'], with per_head_weights [N,H,L,S']; no N when the query has none */
    const rapt_tensor
        *lse; /* log-sum-exp of the scores [N,H,L] in f64, or for other queries f32; no N when they have none */

    /* rapt_mha_functional only: projected keys and values, used instead of projecting key and value */
    const rapt_tensor *static_k, *static_v; /* [N*Hk, S, D] */

    /* decoding, section 10 */
    rapt_cache *cache;             /* keys and values so far, to which this call's are appended */
    const int64_t *append_lengths; /* [N], with a cache: how many of the L tokens are real, from the first on */
    const rapt_rotary *rotary;     /* layers only: turns queries and keys by their positions */

    /* training, section 11 */
    rapt_mha_state *state; /* layers only: keeps what the backward needs */
    bool set_dropout_seed; /* dropout draws with the two below, not with the context's */
    uint64_t dropout_seed, dropout_offset;

    uint64_t reserved[9];
} rapt_options;

/* options may be NULL. out, options->weights and options->lse may not overlap anything else. */
RAPT_API rapt_status rapt_attention_forward(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                                            const rapt_tensor *value, const rapt_options *options,
                                            const rapt_tensor *out);

/* --------------------------------------------------------------------------------------------------------------------
 * 6. THE LAYER
 *
 * Four projections around the operator: out = out_proj(attention(q_proj(query), k_proj(key), v_proj(value))).
 *
 * A layer is made from a config, whose initialiser takes embed_dim and num_heads and fills in PyTorch's defaults.
 * RAPT_DEFAULT stands for "derive it"; a size of 0 is an error.
 */
typedef struct rapt_mha rapt_mha;

#define RAPT_DEFAULT (-1)

typedef enum rapt_init {
    RAPT_INIT_PYTORCH =
        0,                /* Xavier-uniform over the fused input projection, PyTorch's rule for the output projection */
    RAPT_INIT_XAVIER = 1, /* Xavier-uniform for each projection on its own */
} rapt_init;

typedef struct rapt_mha_config {
    size_t struct_size;   /* set by rapt_mha_config_default */
    int64_t embed_dim;    /* E, the query's and the output's last size */
    int64_t num_heads;    /* H */
    int64_t num_kv_heads; /* Hk, divides H; RAPT_DEFAULT: H */
    int64_t head_dim;     /* D; RAPT_DEFAULT: E / H; set, H * D may differ from E */
    int64_t kdim, vdim;   /* the key's and the value's last size; RAPT_DEFAULT: E */
    bool bias;            /* of the four projections; true */
    bool add_bias_kv;     /* a learned key and value at the end of every sequence's */
    bool add_zero_attn;   /* a key and a value of zeros at the very end */
    bool batch_first;     /* [N,L,E] instead of [L,N,E] */
    bool causal;          /* every forward is causal */
    bool set_scale;       /* whether scale is given */
    double scale;         /* if set_scale, instead of 1/sqrt(D) */
    double dropout;       /* of the attention weights while training; in [0, 1] */
    rapt_dtype dtype;     /* of parameters, inputs and outputs; RAPT_F32 */
    rapt_device device;   /* RAPT_DEVICE_CPU */
    rapt_init init;       /* RAPT_INIT_PYTORCH */
    uint64_t seed;        /* one seed, the same weights on every machine */
} rapt_mha_config;

static inline rapt_mha_config rapt_mha_config_default(int64_t embed_dim, int64_t num_heads) {
    rapt_mha_config config;
    memset(&config, 0, sizeof config);
    config.struct_size = sizeof config;
    config.embed_dim = embed_dim;
    config.num_heads = num_heads;
    config.num_kv_heads = config.head_dim = config.kdim = config.vdim = RAPT_DEFAULT;
    config.bias = true;
    config.dtype = RAPT_F32;
    return config;
}

/* On failure *layer is NULL. A layer may outlive the context it was made with; it keeps that context's allocator. */
RAPT_API rapt_status rapt_mha_create(rapt_context *context, const rapt_mha_config *config, rapt_mha **layer);
RAPT_API void rapt_mha_destroy(rapt_mha *layer);

/* Short forms: multi-head, multi-query (Hk = 1) and grouped-query attention with PyTorch's other defaults. */
RAPT_API rapt_status rapt_mha_create_mha(rapt_context *context, int64_t embed_dim, int64_t num_heads, rapt_mha **layer);
RAPT_API rapt_status rapt_mha_create_mqa(rapt_context *context, int64_t embed_dim, int64_t num_heads, rapt_mha **layer);
RAPT_API rapt_status rapt_mha_create_gqa(rapt_context *context, int64_t embed_dim, int64_t num_heads,
                                         int64_t num_kv_heads, rapt_mha **layer);

/* Ready weights: for a layer made from them, or for one call. Either in_proj_weight [(H+2Hk)D, E] or the three separate
 * ones, q_proj_weight [H*D, E], k_proj_weight [Hk*D, kdim], v_proj_weight [Hk*D, vdim]; biases as you have them, NULL
 * for none. With separate weights D comes from q_proj_weight's rows and Hk from k_proj_weight's. Any strides. */
typedef struct rapt_mha_weights {
    size_t struct_size;   /* set by rapt_mha_weights_default */
    int64_t num_heads;    /* H */
    int64_t num_kv_heads; /* RAPT_DEFAULT: from k_proj_weight, or H with in_proj_weight */
    int64_t head_dim;     /* RAPT_DEFAULT: from the rows of q_proj_weight or in_proj_weight */
    bool add_zero_attn, batch_first, causal, set_scale;
    double scale, dropout;
    const rapt_tensor *in_proj_weight;
    const rapt_tensor *q_proj_weight, *k_proj_weight, *v_proj_weight;
    const rapt_tensor *in_proj_bias; /* [(H+2Hk)D], or the three separate ones */
    const rapt_tensor *q_proj_bias, *k_proj_bias, *v_proj_bias;
    const rapt_tensor *bias_k, *bias_v; /* Hk*D values, [1,1,Hk*D] in PyTorch; both or none */
    const rapt_tensor *out_proj_weight; /* [E, H*D] */
    const rapt_tensor *out_proj_bias;   /* [E] */
} rapt_mha_weights;

static inline rapt_mha_weights rapt_mha_weights_default(int64_t num_heads) {
    rapt_mha_weights weights;
    memset(&weights, 0, sizeof weights);
    weights.struct_size = sizeof weights;
    weights.num_heads = num_heads;
    weights.num_kv_heads = weights.head_dim = RAPT_DEFAULT;
    return weights;
}

typedef enum rapt_ownership {
    RAPT_COPY = 0,   /* the layer keeps a copy */
    RAPT_BORROW = 1, /* its parameters are the caller's memory, which must outlive it; commit after writing it */
} rapt_ownership;

RAPT_API rapt_status rapt_mha_create_from_weights(rapt_context *context, const rapt_mha_weights *weights,
                                                  rapt_ownership ownership, rapt_mha **layer);

/* The forward. query [N,L,E] with batch_first, else [L,N,E], or [L,E]; key [..,S,kdim] and value [..,S,vdim] alike; out
 * has the query's shape. One tensor for all three is self-attention and costs one projection. options may be NULL.
 * Causal needs L == S unless the options say how to align: align_bottom_right, offset, offsets, or limit_right with
 * right = 0 for top-left. Weights and log-sum-exp come back as from the operator.
 * A layer is not changed by it: many threads, each with its own context, may share one. */
RAPT_API rapt_status rapt_mha_forward(rapt_context *context, const rapt_mha *layer, const rapt_tensor *query,
                                      const rapt_tensor *key, const rapt_tensor *value, const rapt_options *options,
                                      const rapt_tensor *out);

/* Self-attention of single tokens [N,E], each a sequence of its own: only the value and output projections are computed.
 * The same bits as rapt_mha_forward with L = S = 1, which takes the same short way. */
RAPT_API rapt_status rapt_mha_forward_token(rapt_context *context, const rapt_mha *layer, const rapt_tensor *tokens,
                                            const rapt_tensor *out);

/* The forward with the weights given by the call (PyTorch's F.multi_head_attention_forward). Prefer a layer where the
 * weights stay: it keeps them packed. With static_k and static_v, key and value may be NULL. */
RAPT_API rapt_status rapt_mha_functional(rapt_context *context, const rapt_mha_weights *weights,
                                         const rapt_tensor *query, const rapt_tensor *key, const rapt_tensor *value,
                                         const rapt_options *options, const rapt_tensor *out);

/* Parameters. The names are those of PyTorch's state dict: in_proj_weight or {q,k,v}_proj_weight, in_proj_bias, bias_k,
 * bias_v, out_proj.weight, out_proj.bias; biases that came apart are q_proj.bias and so on. rapt_mha_find also takes
 * q_proj.weight (or q_proj_weight) and its kin for the rows of the fused ones. What a layer lacks is RAPT_ERROR_ABSENT.
 *
 * The views may be written through, and so may borrowed weights. A forward reads packed copies, so writing ends with
 * rapt_mha_commit, which packs the weights anew and raises the layer's version; no forward may run meanwhile. (The
 * reference backend reads the parameters themselves.) */
RAPT_API int64_t rapt_mha_num_parameters(const rapt_mha *layer); /* scalars in all */
RAPT_API int32_t rapt_mha_num_tensors(const rapt_mha *layer);    /* parameters that have a name */
RAPT_API rapt_status rapt_mha_tensor_at(rapt_context *context, const rapt_mha *layer, int32_t index, const char **name,
                                        rapt_tensor *view);
RAPT_API rapt_status rapt_mha_find(rapt_context *context, const rapt_mha *layer, const char *name, rapt_tensor *view);
RAPT_API rapt_status rapt_mha_commit(rapt_context *context, rapt_mha *layer);
RAPT_API uint64_t rapt_mha_version(const rapt_mha *layer); /* 1 for a new layer */

/* Every setting of the layer, with the derived ones filled in. Lives as long as the layer. */
RAPT_API const rapt_mha_config *rapt_mha_settings(const rapt_mha *layer);
RAPT_API bool rapt_mha_is_mha(const rapt_mha *layer); /* Hk == H */
RAPT_API bool rapt_mha_is_mqa(const rapt_mha *layer); /* Hk == 1 */
RAPT_API bool rapt_mha_is_gqa(const rapt_mha *layer); /* 1 < Hk < H */

/* New layers train: dropout, if they have any, is drawn. */
RAPT_API void rapt_mha_train(rapt_mha *layer);
RAPT_API void rapt_mha_eval(rapt_mha *layer);
RAPT_API bool rapt_mha_is_training(const rapt_mha *layer);

/* One line about the layer, written as snprintf writes: returns the length it needs. */
RAPT_API int rapt_mha_describe(const rapt_mha *layer, char *text, size_t size);

/* --------------------------------------------------------------------------------------------------------------------
 * 7. HEADS
 *
 * Each gives a view of its input where strides allow it. Where they do not, it copies into `buffer`, a tensor of the
 * result's shape and dtype, and the result is that; with a NULL buffer it is RAPT_ERROR_LAYOUT instead.
 *
 *     split    [N,L,H*D] -> [N,H,L,D]   or [L,H*D] -> [H,L,D]     always a view
 *     merge    [N,H,L,D] -> [N,L,H*D]   or [H,L,D] -> [L,H*D]     a view of what split gave
 *     repeat   [N,Hk,S,D] -> [N,Hk*times,S,D] or without N        a view when Hk or times is 1
 */
RAPT_API rapt_status rapt_split_heads(rapt_context *context, const rapt_tensor *tensor, int64_t num_heads,
                                      rapt_tensor *heads);
RAPT_API rapt_status rapt_merge_heads(rapt_context *context, const rapt_tensor *heads, const rapt_tensor *buffer,
                                      rapt_tensor *merged);
RAPT_API rapt_status rapt_repeat_kv_heads(rapt_context *context, const rapt_tensor *heads, int64_t times,
                                          const rapt_tensor *buffer, rapt_tensor *repeated);

/* --------------------------------------------------------------------------------------------------------------------
 * 8. SAFETENSORS FILES
 *
 * A strict reader: a file that breaks one of the format's rules is refused with the reason and the byte, and *file is
 * NULL then. Tensors are views into the mapped file, read-only, and live until it is closed. A file may outlive its
 * context.
 */
typedef struct rapt_safetensors rapt_safetensors;

RAPT_API rapt_status rapt_safetensors_open(rapt_context *context, const char *path, rapt_safetensors **file);
/* The same over memory of the caller's, which must outlive it. */
RAPT_API rapt_status rapt_safetensors_open_memory(rapt_context *context, const void *data, size_t size,
                                                  rapt_safetensors **file);
RAPT_API void rapt_safetensors_close(rapt_safetensors *file);
RAPT_API int64_t rapt_safetensors_count(const rapt_safetensors *file);
RAPT_API const char *rapt_safetensors_name(const rapt_safetensors *file, int64_t index); /* NULL beyond the last */
/* RAPT_ERROR_DTYPE for an element type of the format that Rapt has not: integers, 8 bits and less, complex numbers. */
RAPT_API rapt_status rapt_safetensors_find(rapt_context *context, const rapt_safetensors *file, const char *name,
                                           rapt_tensor *view);
RAPT_API const char *rapt_safetensors_metadata(const rapt_safetensors *file, const char *key); /* NULL if absent */

/* Writes tensors of any strides, `count` of them, and `pairs` pairs of key and value as the file's metadata (NULL for
 * none). The path is taken over all at once: the file is written beside it, brought to the disk and renamed. A failed
 * call leaves the old file, and nothing else; a process that is killed may leave a file .rapt-*.tmp there. */
RAPT_API rapt_status rapt_safetensors_save(rapt_context *context, const char *path, int64_t count,
                                           const char *const *names, const rapt_tensor *tensors, int64_t pairs,
                                           const char *const (*metadata)[2]);

/* --------------------------------------------------------------------------------------------------------------------
 * 9. CHECKPOINTS
 *
 * A checkpoint is a safetensors file, or several that an index ties together (model.safetensors.index.json). Attention
 * layers in it are found by the names of their tensors, below any prefix, and loaded one by one:
 *
 *     rapt_checkpoint *model;
 *     rapt_mha *layer;
 *     rapt_load_options options = rapt_load_options_default();
 *     options.prefix = "model.layers.0.self_attn.";
 *     options.num_heads = 32;                  // no tensor shows it; metadata of the file may: "num_heads": "32"
 *     rapt_status status = rapt_checkpoint_open(ctx, "model.safetensors", &model);
 *     if (status == RAPT_OK) status = rapt_mha_load(ctx, model, &options, &layer);
 *     rapt_checkpoint_close(model);            // the layer has its own copy
 *     if (status == RAPT_OK) status = rapt_mha_save(ctx, layer, "layer.safetensors", NULL);
 *
 * What stands below the prefix, by scheme. Weights are [out, in] but for the two that say otherwise; each has its bias
 * where the file has one.
 *
 *     pytorch     in_proj_weight or {q,k,v}_proj_weight, out_proj.weight; in_proj_bias, bias_k, bias_v, out_proj.bias
 *     lucid       the same with out_proj_weight and out_proj_bias
 *     separate    {q,k,v,out}_proj.weight and .bias, bias_k, bias_v
 *     llama       {q,k,v,o}_proj.weight and .bias
 *     wq          {wq,wk,wv,wo}.weight and .bias; also read: wq to wo with bq to bo
 *     scirs2      w_q, w_k, w_v, w_o, stored [in, out], and b_q to b_o
 *     mlx         {query,key,value,out}_proj.weight and .bias
 *     bert        self.{query,key,value} and output.dense, each .weight and .bias
 *     gpt2        c_attn, stored [in, q|k|v], and c_proj, stored [in, out], each .weight and .bias
 *
 * A layer is where all the weights of a scheme are. What else stands below its prefix is looked at by name. Norms around
 * the layer (LayerNorm, output.LayerNorm), tables of rotary positions and of causal masks (rotary_emb.inv_freq, bias,
 * masked_bias) and an example's data (input, query, key, value, expected_*) are left alone: they are the model's
 * business. Any other tensor may belong to what the layer computes, such as the norms of queries and keys in Qwen 3
 * (q_norm, k_norm), relative positions or the factors of LoRA. Without it the numbers would be wrong, so the layer is
 * refused with RAPT_ERROR_UNSUPPORTED and the tensor's name, unless ignore_extra says that this is meant.
 */
typedef enum rapt_scheme {
    RAPT_SCHEME_AUTO = 0,
    RAPT_SCHEME_PYTORCH = 1,
    RAPT_SCHEME_LUCID = 2,
    RAPT_SCHEME_SEPARATE = 3,
    RAPT_SCHEME_LLAMA = 4,
    RAPT_SCHEME_WQ = 5,
    RAPT_SCHEME_SCIRS2 = 6,
    RAPT_SCHEME_MLX = 7,
    RAPT_SCHEME_BERT = 8,
    RAPT_SCHEME_GPT2 = 9,
} rapt_scheme;

RAPT_API const char *rapt_scheme_name(rapt_scheme scheme); /* "pytorch"; NULL for a value that is no scheme */

typedef struct rapt_checkpoint rapt_checkpoint;

/* path is a safetensors file, or an index, which ends in .json: {"weight_map": {"tensor": "file beside it"}} and
 * optionally "metadata". A tensor that its file lacks, a file elsewhere, or a name that is there twice is an error.
 * Files are mapped, not read; whoever shortens one meanwhile takes the memory away. On failure *checkpoint is NULL. */
RAPT_API rapt_status rapt_checkpoint_open(rapt_context *context, const char *path, rapt_checkpoint **checkpoint);
/* A safetensors file in memory of the caller's, which must outlive it. */
RAPT_API rapt_status rapt_checkpoint_open_memory(rapt_context *context, const void *data, size_t size,
                                                 rapt_checkpoint **checkpoint);
RAPT_API void rapt_checkpoint_close(rapt_checkpoint *checkpoint);

/* Every tensor, attention or not. */
RAPT_API int64_t rapt_checkpoint_num_tensors(const rapt_checkpoint *checkpoint);
RAPT_API const char *rapt_checkpoint_tensor_name(const rapt_checkpoint *checkpoint, int64_t index); /* NULL: no more */
RAPT_API rapt_status rapt_checkpoint_find(rapt_context *context, const rapt_checkpoint *checkpoint, const char *name,
                                          rapt_tensor *view); /* as rapt_safetensors_find */

/* An attention layer in a checkpoint. What the file does not tell is 0: the head counts, unless its metadata says them. */
typedef struct rapt_layer_info {
    const char *prefix; /* with its last dot; "" at the top. Lives as long as the checkpoint */
    rapt_scheme scheme;
    rapt_dtype dtype; /* of q's weight */
    int64_t embed_dim, kdim, vdim;
    int64_t q_features, kv_features; /* H*D and Hk*D */
    int64_t num_heads, num_kv_heads, head_dim;
    bool bias, bias_kv;
    int64_t num_parameters;
    int64_t num_extra; /* tensors for which rapt_mha_load refuses the layer unless they are ignored */
    const char *extra; /* the whole name of one, NULL: there is none. Lives as long as the checkpoint */
    uint64_t reserved[6];
} rapt_layer_info;

/* Layers come in the order of their prefixes, with numbers counted: h.2. before h.10. One that has all its names is
 * listed; if its shapes or dtypes make no layer, rapt_checkpoint_layer says why. */
RAPT_API int64_t rapt_checkpoint_num_layers(const rapt_checkpoint *checkpoint);
RAPT_API rapt_status rapt_checkpoint_layer(rapt_context *context, const rapt_checkpoint *checkpoint, int64_t index,
                                           rapt_layer_info *info);

typedef struct rapt_load_options {
    size_t struct_size;   /* set by rapt_load_options_default */
    const char *prefix;   /* of the layer, with its last dot; NULL: the only one in the checkpoint */
    rapt_scheme scheme;   /* RAPT_SCHEME_AUTO: whichever fits */
    int64_t num_heads;    /* H; RAPT_DEFAULT: from head_dim if that is given, else what Rapt wrote into the file */
    int64_t num_kv_heads; /* Hk; RAPT_DEFAULT: from the shapes; if given, they must agree */
    int64_t head_dim;     /* D; likewise */
    bool set_dtype;       /* whether dtype is given */
    rapt_dtype dtype;     /* if set_dtype, what the weights are converted to; else they stay what they are */
    bool ignore_metadata; /* as if the file had none; else the settings below add to those that Rapt wrote there */
    bool batch_first, causal, add_zero_attn, set_scale;
    double scale, dropout;
    bool ignore_extra; /* load the layer without tensors below its prefix that it may need */
} rapt_load_options;

static inline rapt_load_options rapt_load_options_default(void) {
    rapt_load_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.num_heads = options.num_kv_heads = options.head_dim = RAPT_DEFAULT;
    return options;
}

/* options may be NULL. On failure *layer is NULL. Weights are copied once, from the file into the layer. */
RAPT_API rapt_status rapt_mha_load(rapt_context *context, const rapt_checkpoint *checkpoint,
                                   const rapt_load_options *options, rapt_mha **layer);

/* The weights alone, into a layer of the same shapes and biases that owns its memory, converted to its dtype and
 * committed. prefix NULL and RAPT_SCHEME_AUTO as above; extra tensors are always refused. A failed call leaves the
 * layer as it was. */
RAPT_API rapt_status rapt_mha_load_into(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                                        rapt_scheme scheme, rapt_mha *layer);

typedef struct rapt_save_options {
    size_t struct_size; /* set by rapt_save_options_default */
    const char *prefix; /* with its last dot; NULL: none */
    rapt_scheme scheme; /* RAPT_SCHEME_AUTO: pytorch */
    bool set_dtype;     /* whether dtype is given */
    rapt_dtype dtype;   /* if set_dtype, of the file; else the layer's */
} rapt_save_options;

static inline rapt_save_options rapt_save_options_default(void) {
    rapt_save_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    return options;
}

/* A file with this layer, written as rapt_safetensors_save writes; options may be NULL. Its metadata says what the
 * tensors do not (heads, batch_first, causal, add_zero_attn, scale, dropout), so that rapt_mha_load needs no options.
 * Where a scheme has one bias for q, k and v and the layer not all three, the others are zeros. */
RAPT_API rapt_status rapt_mha_save(rapt_context *context, const rapt_mha *layer, const char *path,
                                   const rapt_save_options *options);

/* --------------------------------------------------------------------------------------------------------------------
 * 10. DECODING: THE CACHE AND ROTARY POSITIONS
 *
 * A cache keeps the keys and values of each sequence of a batch as the kernels read them. A forward with options.cache
 * appends those of its tokens and attends to all; queries stand at the positions where their tokens were appended, so
 * causal needs no alignment:
 *
 *     rapt_cache *cache;
 *     rapt_cache_config settings = rapt_cache_config_default(1, 4096);        // one sequence, 4096 positions
 *     rapt_cache_create(ctx, layer, &settings, &cache);
 *     rapt_options options = {.causal = true, .cache = cache};
 *     rapt_mha_forward(ctx, layer, &prompt, &prompt, &prompt, &options, &y);  // [1, 57, E]
 *     rapt_mha_forward(ctx, layer, &token, &token, &token, &options, &y1);    // [1, 1, E], and so on
 *
 * Token by token, in chunks or all at once: the same bits, when the cache has the layer's dtype (f32, f64).
 *
 * Sequences may have different lengths. append_lengths[n] tells how many of the call's L tokens are real for sequence n;
 * output, weights and log-sum-exp of the others are 0, 0 and -inf. With key and value NULL nothing is appended and the queries
 * are the last L positions. Beside a cache, key_padding_mask, key_start, key_lengths, offsets and alignments are refused; masks are [.., L, S]
 * with S the longest sequence after the call. Extra keys of a layer are never put into a cache.
 *
 * The operator takes one too: key and value [N,Hk,L,D] are appended before query [N,H,L,D] attends.
 *
 * Memory for the whole capacity is reserved at once, and taken from the system as positions fill it: in pieces of 2 MB for each head
 * of a sequence where the default allocator got large pages, which decode 10 to 25 % faster. With a window it is
 * memory for the window and 256 positions, rounded up to 256s, if that is less.
 *
 * One thread uses a cache at a time (a second one that tries gets RAPT_ERROR_STATE).
 */
typedef struct rapt_cache_config {
    size_t struct_size;   /* set by rapt_cache_config_default */
    int64_t batch;        /* N */
    int64_t capacity;     /* positions of a sequence; with a window, what it may grow to: any number */
    int64_t num_kv_heads; /* Hk; RAPT_DEFAULT: the layer's */
    int64_t head_dim;     /* D; RAPT_DEFAULT: the layer's */
    int64_t value_dim;    /* Dv; RAPT_DEFAULT: head_dim */
    bool set_dtype;       /* whether dtype is given; if not, the layer's */
    rapt_dtype dtype;     /* of what is stored: any floating-point type, whatever the layer's */
    int64_t window;       /* above 0: a query sees this many positions, its own included, and older ones make room */
} rapt_cache_config;

static inline rapt_cache_config rapt_cache_config_default(int64_t batch, int64_t capacity) {
    rapt_cache_config config;
    memset(&config, 0, sizeof config);
    config.struct_size = sizeof config;
    config.batch = batch;
    config.capacity = capacity;
    config.num_kv_heads = config.head_dim = config.value_dim = RAPT_DEFAULT;
    return config;
}

/* layer may be NULL if the config gives num_kv_heads, head_dim and dtype. A cache may outlive both. */
RAPT_API rapt_status rapt_cache_create(rapt_context *context, const rapt_mha *layer, const rapt_cache_config *config,
                                       rapt_cache **cache);
RAPT_API void rapt_cache_destroy(rapt_cache *cache);
RAPT_API const rapt_cache_config *rapt_cache_settings(const rapt_cache *cache);
RAPT_API int64_t rapt_cache_length(const rapt_cache *cache, int64_t sequence); /* -1 if there is no such sequence */
RAPT_API int64_t rapt_cache_bytes(const rapt_cache *cache);                    /* of memory that it holds */

/* All sequences to length 0. */
RAPT_API rapt_status rapt_cache_clear(rapt_context *context, rapt_cache *cache);
/* Rolls a sequence (or, for RAPT_ALL, each that is longer) back to a length. With a window, as far as keys that are then seen are
 * still there. */
#define RAPT_ALL (-1)
RAPT_API rapt_status rapt_cache_truncate(rapt_context *context, rapt_cache *cache, int64_t sequence, int64_t length);
/* Sequence `to` becomes a copy of `from`. */
RAPT_API rapt_status rapt_cache_copy(rapt_context *context, rapt_cache *cache, int64_t from, int64_t to);
/* Sequence n becomes what source[n] was, for all n at once: the step of a beam search. */
RAPT_API rapt_status rapt_cache_reorder(rapt_context *context, rapt_cache *cache, const int64_t *source);

/* Keys [N,S,Hk,D] and values [N,S,Hk,Dv] of all sequences as plain tensors of any floating-point type; S is at least the longest
 * length, and what a sequence does not have, or what has made room in a window, is 0. Import sets every sequence to lengths[n]
 * positions (NULL: all S), of which a window keeps what the next query sees: it is not rolled back to where older keys were seen. */
RAPT_API rapt_status rapt_cache_export(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                                       const rapt_tensor *values);
RAPT_API rapt_status rapt_cache_import(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                                       const rapt_tensor *values, const int64_t *lengths);

/* Rotary positions: pairs of dimensions of projected queries and keys turn by an angle that grows with the position, before
 * keys are stored. Unless the call gives positions, keys count from their sequence's first real one, or on from the
 * cache's length, and queries stand where the band's offset puts them. Pair i turns base^(-2i/dims) radians a position;
 * the scalings are those of Hugging Face Transformers:
 *
 *     linear    every pair `factor` times slower
 *     ntk       a larger base for sequences of `length` tokens, if that is above original_length ("dynamic")
 *     llama3    pairs that make fewer than low_turns turns within original_length are `factor` times slower, those with
 *               more than high_turns stay, between them it is mixed
 *     yarn      likewise by dimension, low_turns and high_turns being beta_slow and beta_fast; what is turned is
 *               multiplied by 0.1 ln(factor) + 1 unless the amplitude is given: attention_factor, or for a model that has
 *               mscale and mscale_all_dim, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
 */
typedef enum rapt_rotary_scaling {
    RAPT_ROTARY_PLAIN = 0,
    RAPT_ROTARY_LINEAR = 1,
    RAPT_ROTARY_NTK = 2,
    RAPT_ROTARY_LLAMA3 = 3,
    RAPT_ROTARY_YARN = 4,
} rapt_rotary_scaling;

struct rapt_rotary {
    size_t struct_size; /* set by rapt_rotary_default */
    bool interleaved;   /* pairs are (2i, 2i + 1), GPT-J's; else (i, i + dims / 2), Llama's */
    bool set_amplitude;
    rapt_rotary_scaling scaling;
    int64_t dims; /* of each head that turn, an even number; RAPT_DEFAULT: all */
    double base;  /* 10000 */
    double factor;
    int64_t original_length, length;
    double low_turns, high_turns; /* 1 and 4 (llama3), 1 and 32 (yarn) */
    double amplitude;
    const int64_t *positions; /* [N,L] of queries and keys alike, or NULL */
    bool unrounded_bounds;    /* yarn: what low_turns and high_turns bound is not widened to whole dimensions;
                                 Transformers' "truncate": false, as gpt-oss has it */
};

static inline rapt_rotary rapt_rotary_default(double base) {
    rapt_rotary rotary;
    memset(&rotary, 0, sizeof rotary);
    rotary.struct_size = sizeof rotary;
    rotary.dims = RAPT_DEFAULT;
    rotary.base = base;
    rotary.factor = 1;
    return rotary;
}

/* Turns a contiguous [N,L,H,D] in place; token i of sequence n stands at first[n] + i (NULL: i) or where positions say. */
RAPT_API rapt_status rapt_rotate(rapt_context *context, const rapt_rotary *rotary, const int64_t *first,
                                 const rapt_tensor *tensor);

/* Cross-attention: projects an encoder's key and value [..,S,kdim], [..,S,vdim] and appends them, so that forwards with
 * key and value NULL attend to them without projecting again. lengths [N] as append_lengths. */
RAPT_API rapt_status rapt_mha_append(rapt_context *context, const rapt_mha *layer, const rapt_tensor *key,
                                     const rapt_tensor *value, rapt_cache *cache, const int64_t *lengths);

/* --------------------------------------------------------------------------------------------------------------------
 * 11. TRAINING
 *
 * A forward with options.state keeps what its backward needs; the backward takes the gradient of the output and gives
 * those of inputs and parameters; an optimiser takes a step with them:
 *
 *     rapt_mha_state *state;
 *     rapt_mha_gradients *gradients;
 *     rapt_optimizer *optimizer;
 *     rapt_optimizer_config settings = rapt_optimizer_config_default(RAPT_ADAMW);
 *     rapt_mha_state_create(ctx, &state);
 *     rapt_mha_gradients_create(ctx, layer, &gradients);
 *     rapt_optimizer_create(ctx, &settings, &optimizer);
 *     rapt_optimizer_add_layer(ctx, optimizer, "", layer, gradients);
 *     for (int step = 0; step < 1000; step++) {
 *         rapt_options options = {.causal = true, .state = state};
 *         rapt_mha_forward(ctx, layer, &x, &x, &x, &options, &y);
 *         loss_gradient(&y, &dy);                                   // yours
 *         rapt_mha_backward(ctx, layer, state, &dy, NULL, gradients);
 *         rapt_optimizer_step(ctx, optimizer);                      // which also commits the layer
 *     }
 *
 * Gradients are the same bits on every run, for any number of threads, on every ISA with fused multiply-add. Memory grows
 * with L + S: weights are computed again from the log-sum-exp, and dropout is drawn again. There is no second derivative.
 * A query whose gradient is all zero adds nothing to any gradient, even if it is NaN: padding that no loss reads is safe.
 *
 * DROPOUT zeroes each attention weight with probability `dropout` and divides the others by 1 - dropout; returned weights
 * show it. Whether the weight of (n, h, query i, key j) stays is a function of seed, offset, n*H+h, i and j alone
 * (Philox 4x32-10: key = seed, counter = offset, n*H+h, i, j/4). Unless a call gives seed and offset, they come from its
 * context: the seed set there, and an offset that each call with dropout advances by one. Not with a cache.
 */
RAPT_API rapt_status rapt_context_set_seed(rapt_context *context, uint64_t seed); /* and offset 0; a new context's: 0 */

/* Where gradients of the operator go, in their tensors' shapes and dtypes; NULL: not wanted. All zero to begin with. */
typedef struct rapt_attention_gradients {
    bool accumulate;                /* added to what is there, instead of written over it */
    const rapt_tensor *query;       /* [N,H,L,D] */
    const rapt_tensor *key, *value; /* [N,Hk,S,D], [N,Hk,S,Dv]: summed over the heads of a group */
    const rapt_tensor
        *attn_mask; /* of an additive mask: its shape, f32 or f64 or its dtype; summed where it broadcasts */
    const rapt_tensor *key_padding_mask; /* likewise */
    uint64_t reserved[8];
} rapt_attention_gradients;

/* The backward of rapt_attention_forward, with the arguments of the forward and its result. options->lse is required, and
 * read: the forward's; in f64 it makes f32 gradients more exact where scores are large. options->weights is not read. With
 * dropout, options give the seed and offset that the forward had.
 * d_out [N,H,L,Dv] is the gradient of out; d_weights that of the weights, in their shape, or NULL. */
RAPT_API rapt_status rapt_attention_backward(rapt_context *context, const rapt_tensor *query, const rapt_tensor *key,
                                             const rapt_tensor *value, const rapt_options *options,
                                             const rapt_tensor *out, const rapt_tensor *d_out,
                                             const rapt_tensor *d_weights, const rapt_attention_gradients *gradients);

/* What a forward kept. The memory is the state's, until its next forward; inputs, static keys and values, masks and arrays
 * of the options are borrowed and must still be there, unchanged, for the backward. */
typedef struct rapt_mha_saved {
    rapt_tensor query, key, value; /* projected, and turned by rotary positions: [N,H,L,D], [N,Hk,S,D], [N,Hk,S,D] */
    rapt_tensor attended;          /* before the output projection, [N,H,L,D] */
    rapt_tensor lse;               /* [N,H,L] in f64 */
    double dropout;                /* that was in force: 0 in eval mode */
    uint64_t dropout_seed, dropout_offset;
    uint64_t version; /* of the layer */
} rapt_mha_saved;

RAPT_API rapt_status rapt_mha_state_create(rapt_context *context, rapt_mha_state **state);
RAPT_API void rapt_mha_state_destroy(rapt_mha_state *state);
RAPT_API const rapt_mha_saved *rapt_mha_state_saved(const rapt_mha_state *state); /* NULL before its first forward */

/* Where gradients of the layer go; NULL: not wanted. query, key and value have the shapes of the forward's inputs; where
 * one tensor is given for several of them, it gets their sum. Parameters fused in the layer may be given apart, and the
 * other way around. All zero to begin with, or made by rapt_mha_gradients_create. */
typedef struct rapt_mha_gradients {
    bool accumulate; /* added to what is there, instead of written over it */
    const rapt_tensor *query, *key, *value;
    const rapt_tensor *attn_mask, *key_padding_mask; /* as rapt_attention_gradients */
    const rapt_tensor *in_proj_weight;
    const rapt_tensor *q_proj_weight, *k_proj_weight, *v_proj_weight;
    const rapt_tensor *in_proj_bias;
    const rapt_tensor *q_proj_bias, *k_proj_bias, *v_proj_bias;
    const rapt_tensor *bias_k, *bias_v;
    const rapt_tensor *out_proj_weight, *out_proj_bias;
    const rapt_tensor *static_k, *static_v; /* rapt_mha_functional_backward only */
    uint64_t reserved[8];
} rapt_mha_gradients;

/* With memory for the gradient of every parameter of the layer, zeros; query, key, value and masks are the caller's to
 * set. Under the names of rapt_mha_find. */
RAPT_API rapt_status rapt_mha_gradients_create(rapt_context *context, const rapt_mha *layer,
                                               rapt_mha_gradients **gradients);
RAPT_API void rapt_mha_gradients_destroy(rapt_mha_gradients *gradients);

/* The backward of the forward that filled the state, which it does not consume. A layer that was committed since then is
 * RAPT_ERROR_STATE. d_out has the output's shape; d_weights is the gradient of the weights returned, or NULL. */
RAPT_API rapt_status rapt_mha_backward(rapt_context *context, const rapt_mha *layer, const rapt_mha_state *state,
                                       const rapt_tensor *d_out, const rapt_tensor *d_weights,
                                       const rapt_mha_gradients *gradients);
/* The same for rapt_mha_functional, with the weights of the forward. */
RAPT_API rapt_status rapt_mha_functional_backward(rapt_context *context, const rapt_mha_weights *weights,
                                                  const rapt_mha_state *state, const rapt_tensor *d_out,
                                                  const rapt_tensor *d_weights, const rapt_mha_gradients *gradients);

/* Gradients of the pieces. Split's is merge and merge's is split. Repeat's sums over the copies of a head, ascending:
 * d_repeated [N,Hk*times,S,D] -> d_heads [N,Hk,S,D], or without N. rapt_rotate's turns back (and keeps the amplitude). */
RAPT_API rapt_status rapt_repeat_kv_heads_backward(rapt_context *context, const rapt_tensor *d_repeated, int64_t times,
                                                   bool accumulate, const rapt_tensor *d_heads);
RAPT_API rapt_status rapt_rotate_backward(rapt_context *context, const rapt_rotary *rotary, const int64_t *first,
                                          const rapt_tensor *tensor);

/* Optimisers, with PyTorch's names, defaults and numbers (torch.optim.SGD, torch.optim.AdamW). */
typedef enum rapt_optimizer_kind {
    RAPT_SGD = 0,
    RAPT_ADAMW = 1,
} rapt_optimizer_kind;

typedef struct rapt_optimizer_config {
    size_t struct_size; /* set by rapt_optimizer_config_default */
    rapt_optimizer_kind kind;
    double learning_rate; /* 0.001 */
    double weight_decay;  /* SGD 0, added to the gradient; AdamW 0.01, decoupled */
    double momentum;      /* SGD: 0 */
    double dampening;     /* SGD: 0 */
    bool nesterov;        /* SGD: false; needs momentum above 0 and dampening 0 */
    double beta1, beta2;  /* AdamW: 0.9 and 0.999 */
    double epsilon;       /* AdamW: 1e-8 */
} rapt_optimizer_config;

static inline rapt_optimizer_config rapt_optimizer_config_default(rapt_optimizer_kind kind) {
    rapt_optimizer_config config;
    memset(&config, 0, sizeof config);
    config.struct_size = sizeof config;
    config.kind = kind;
    config.learning_rate = 1e-3;
    config.weight_decay = kind == RAPT_ADAMW ? 1e-2 : 0;
    config.beta1 = 0.9;
    config.beta2 = 0.999;
    config.epsilon = 1e-8;
    return config;
}

typedef struct rapt_optimizer rapt_optimizer;

RAPT_API rapt_status rapt_optimizer_create(rapt_context *context, const rapt_optimizer_config *config,
                                           rapt_optimizer **optimizer);
RAPT_API void rapt_optimizer_destroy(rapt_optimizer *optimizer);

/* A parameter of the caller's and its gradient, contiguous, of the same shape and dtype; both are borrowed. Names are
 * those of a checkpoint: they differ from each other and do not begin with "optimizer.". Everything is added before the
 * first step. The optimiser's own state is f64 for f64 parameters and f32 for all others. */
RAPT_API rapt_status rapt_optimizer_add(rapt_context *context, rapt_optimizer *optimizer, const char *name,
                                        const rapt_tensor *parameter, const rapt_tensor *gradient);
/* Every parameter of a layer that the gradients have a tensor for, named prefix + its name in the layer; the others stay
 * as they are. The layer and the tensors' memory are borrowed. prefix is "" or ends in a dot, as in a checkpoint. */
RAPT_API rapt_status rapt_optimizer_add_layer(rapt_context *context, rapt_optimizer *optimizer, const char *prefix,
                                              rapt_mha *layer, const rapt_mha_gradients *gradients);

RAPT_API rapt_status rapt_optimizer_set_learning_rate(rapt_context *context, rapt_optimizer *optimizer, double rate);
RAPT_API int64_t rapt_optimizer_steps(const rapt_optimizer *optimizer); /* taken so far */

RAPT_API rapt_status rapt_optimizer_zero_gradients(rapt_context *context, rapt_optimizer *optimizer);
/* Scales all gradients so that the norm over all of them together is at most max_norm, as clip_grad_norm_ does. *norm, if
 * not NULL, gets what it was before. A norm that is not finite is RAPT_ERROR_ARGUMENT, and nothing is scaled. */
RAPT_API rapt_status rapt_optimizer_clip(rapt_context *context, rapt_optimizer *optimizer, double max_norm,
                                         double *norm);
/* Changes every parameter by its gradient, and commits the layers. */
RAPT_API rapt_status rapt_optimizer_step(rapt_context *context, rapt_optimizer *optimizer);

/* A checkpoint with the layers whole, as rapt_mha_save writes them and rapt_mha_load reads them, the other parameters
 * under their names, and beside them the optimiser's state (optimizer.NAME.exp_avg and so on) and the number of steps;
 * written as rapt_safetensors_save does. It goes back into an optimiser with the same parameters, of the same kind: what
 * that changes is read, its layers are committed, and training goes on bit by bit. The settings are the caller's, the
 * learning rate too. A failed load changes nothing. */
RAPT_API rapt_status rapt_optimizer_save(rapt_context *context, const rapt_optimizer *optimizer, const char *path);
RAPT_API rapt_status rapt_optimizer_load(rapt_context *context, rapt_optimizer *optimizer,
                                         const rapt_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif

#endif
