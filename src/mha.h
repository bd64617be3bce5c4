/* mha.h - what the files of the layer share */
#ifndef RAPT_MHA_H
#define RAPT_MHA_H

#include "cache.h"
#include "rotary.h"

typedef struct mha_projection {
    rapt_tensor weight; /* [out, in] */
    rapt_tensor bias;   /* [out], data NULL: none */
    void *packed;       /* by rapt_linear_pack; NULL: not packed yet */
} mha_projection;

/* The weights of a layer or of one call, checked, and cut into projections if they came fused. */
typedef struct mha_parts {
    mha_projection q, k, v, out;
    rapt_tensor bias_k, bias_v; /* [Hk*D], data NULL: none */
    void *extra_k, *extra_v;    /* the keys and values behind every sequence's, [Hk, extra, D]; NULL: not made yet */
} mha_parts;

typedef struct mha_parameter {
    const char *name;
    rapt_tensor tensor;
} mha_parameter;

enum { MHA_MAX_PARAMETERS = 10 };

struct rapt_mha {
    rapt_mha_config config; /* every setting, nothing left to derive */
    rapt_allocator allocator;
    bool training;
    uint64_t version;
    uint64_t made_at; /* in nanoseconds: tells a layer from one that had its address before */
    mha_parts parts;
    int32_t parameters;
    mha_parameter parameter[MHA_MAX_PARAMETERS];
    void *memory; /* of parameters that the layer owns */
    void *packed;
    size_t memory_size, packed_size;
};

/* One call of the layer, as it is being prepared. */
typedef struct mha_call {
    rapt_context *context;
    const rapt_mha *layer; /* NULL: a functional call */
    const rapt_mha_config *config;
    mha_parts parts; /* a copy: packed weights of a functional call are filled in here */
    rapt_options options;
    const rapt_tensor *query, *key, *value, *out; /* key and value NULL: static ones are given */
    bool batched;
    attn_problem problem;
    int64_t key_rows;    /* to project: S, or with a cache the new ones */
    bool projects[3];    /* the query, the key, the value */
    bool holds_cache;    /* options.cache is this call's until it ends */
    cache_append append; /* then */
} mha_call;

/* What a forward kept for its backward. */
struct rapt_mha_state {
    rapt_allocator allocator;
    rapt_arena memory; /* of what `saved` views (but for static keys and values); kept for the next forward */
    bool is_filled;
    rapt_mha_saved saved;
    const rapt_mha *layer; /* whose forward it was; NULL: that of rapt_mha_functional */
    uint64_t layer_made_at;
    rapt_mha_config config;
    attn_problem problem;  /* of that forward, but for the extra keys; masks and arrays are the caller's */
    bool projects_keys;    /* keys and values came from key and value, not from static_k and static_v */
    bool returned_weights; /* averaged or not, as the problem says */
    rapt_options options;  /* its results are gone; its tensors and rotary positions are these: */
    rapt_tensor query, key, value, attn_mask, key_padding_mask, static_k, static_v;
    bool has_key, has_value;
    rapt_rotary rotary;
};

/* One backward of the layer, as it is being prepared. Of gradients that are not wanted data is NULL. */
typedef struct mha_backward {
    rapt_context *context;
    const rapt_mha_state *state;
    mha_parts parts;          /* of the layer, or of a functional call */
    rapt_tensor d_out;        /* the output's shape */
    bool accumulate;          /* into what the caller has there */
    rapt_tensor inputs[3];    /* of query, key and value */
    mha_parts parameters;     /* fused ones are cut */
    attn_gradients attention; /* static keys and values, masks, and the gradient of returned weights */
} mha_backward;

/* Checks ready weights and derives the settings that they imply. */
rapt_status rapt_mha_take_weights(rapt_context *context, const rapt_mha_weights *weights, rapt_mha_config *config,
                                  mha_parts *parts);
rapt_status rapt_mha_settle_config(rapt_context *context, const rapt_mha_config *given, rapt_mha_config *config);

/* A layer with a copy of the parts, converted to the config's dtype. The config is settled; the parts have its shapes,
 * and may be unaligned and of several dtypes. */
rapt_status rapt_mha_create_copy(rapt_context *context, const rapt_mha_config *config, const mha_parts *given,
                                 rapt_mha **layer);
/* The same for a layer that is there and has the same parts. Cannot fail. */
void rapt_mha_fill(rapt_context *context, rapt_mha *layer, const mha_parts *given);

/* What rapt_mha_commit does: packs the weights anew and raises the version. Cannot fail. */
void rapt_mha_pack(rapt_context *context, rapt_mha *layer);

/* The fields of rapt_mha_gradients that are parameters', with the names that a layer gives those. A fused one is followed
 * by its parts: q, k, v. */
enum {
    MHA_IN_WEIGHT = 0,
    MHA_IN_BIAS = 4,
    MHA_BIAS_K = 8,
    MHA_BIAS_V = 9,
    MHA_OUT_WEIGHT = 10,
    MHA_OUT_BIAS = 11,
    MHA_GRADIENT_FIELDS = 12,
};
typedef struct mha_gradient_field {
    const char *field, *parameter;
    size_t offset; /* in the struct */
} mha_gradient_field;
extern const mha_gradient_field rapt_mha_gradient_fields[MHA_GRADIENT_FIELDS];
int rapt_mha_gradient_field_of(const char *parameter);

/* bias_k and bias_v, and zeros for add_zero_attn: how many extra keys there are, their bytes, and making them. */
int64_t rapt_mha_extra_keys(const rapt_mha_config *config);
size_t rapt_mha_extra_bytes(const rapt_mha_config *config);
void rapt_mha_fill_extra(const rapt_mha_config *config, const rapt_tensor *bias, void *extra);

/* Batch and length of a tensor of the layer, and the tensor as [N, L, features] whatever its layout. */
rapt_rows rapt_mha_layout_view(const rapt_mha_config *config, const rapt_tensor *tensor, int64_t *batch,
                               int64_t *length);
/* Checks a forward, and fills in its problem. A cache that is given belongs to the call afterwards if holds_cache says so,
 * even when the check fails. */
rapt_status rapt_mha_check_call(mha_call *call, bool training);
/* The same for key and value that are only put into the cache. */
rapt_status rapt_mha_check_append(mha_call *call);

/* Keeps a forward that was computed as the problem p says, which lies in the memory of call->options.state. */
void rapt_mha_state_fill(const mha_call *call, const attn_problem *p);
/* Its memory as a tensor of bytes, to check that others are apart from it. */
rapt_tensor rapt_mha_state_bytes(const rapt_mha_state *state);

/* ---- the backward's checks: mha_backward_call.c ---- */

/* Fills in all of it; `layer` is that of the call or NULL for a functional one, whose settings and parts are given. */
rapt_status rapt_mha_check_backward(const rapt_mha *layer, const rapt_mha_config *config, const rapt_tensor *d_out,
                                    const rapt_tensor *d_weights, const rapt_mha_gradients *gradients,
                                    mha_backward *backward);

/* ---- pieces of forward and backward: mha.c ---- */

/* How projected heads lie: head after head, [heads, N, length, D], where a head is whole panels, so that both attention
 * and products read them without gaps; else row after row, [N, length, heads, D]. */
typedef struct mha_heads {
    char *data;
    rapt_dtype dtype;
    int64_t length, heads, dim;
    int64_t row_stride, head_stride;
} mha_heads;

static inline mha_heads rapt_mha_heads(const attn_problem *p, rapt_dtype dtype, char *data, int64_t length,
                                       int64_t heads) {
    mha_heads result = {.data = data, .dtype = dtype, .length = length, .heads = heads, .dim = p->dim};
    bool head_after_head = p->dim % RAPT_PANEL == 0;
    result.row_stride = head_after_head ? p->dim : heads * p->dim;
    result.head_stride = head_after_head ? p->batch * length * p->dim : p->dim;
    return result;
}
/* Some of them. */
static inline mha_heads rapt_mha_some_heads(mha_heads all, int64_t first, int64_t heads) {
    int64_t bytes = first * all.head_stride * (int64_t)rapt_dtype_size(all.dtype);
    all.data = (char *)((uintptr_t)all.data + (uintptr_t)bytes); /* an address of a plan may be none of memory yet */
    all.heads = heads;
    return all;
}
/* Seen as [N, heads, length, D] and as rows of heads * D features. */
static inline rapt_view rapt_mha_heads_view(const mha_heads *heads) {
    int64_t row = heads->row_stride;
    return (rapt_view){.data = heads->data, .stride = {heads->length * row, heads->head_stride, row, 1}};
}
static inline rapt_rows rapt_mha_rows_view(const mha_heads *heads) {
    int64_t row = heads->row_stride;
    bool has_gaps = heads->head_stride != heads->dim;
    return (rapt_rows){.data = heads->data,
                       .dtype = heads->dtype,
                       .stride = {heads->length * row, row, 1},
                       .group = has_gaps ? heads->dim : heads->heads * heads->dim,
                       .group_stride = heads->head_stride};
}
/* Bytes of [N, length, features]. */
size_t rapt_mha_rows_bytes(const attn_problem *problem, rapt_dtype dtype, int64_t length, int64_t features);
/* Whether the extra keys must be made in scratch memory: a backend that reads no packed weights wants them as they are
 * now, and those of a functional call are nowhere. */
bool rapt_mha_makes_extra(const rapt_context *context, const attn_problem *problem, const mha_parts *parts);
void rapt_mha_set_extra(const mha_parts *parts, attn_problem *problem);
/* What rotary positions turn: queries and keys; where these lie is left to set by the next. Fills in padding [N]. */
rotary_rows rapt_mha_rotary_rows(const attn_problem *problem, rapt_dtype dtype, const rapt_rotary *rotary,
                                 int64_t *padding);
static inline void rapt_mha_turn_heads(const mha_heads *heads, rotary_heads *turned) {
    turned->data = heads->data;
    turned->length = heads->length;
    turned->heads = heads->heads;
    turned->row_stride = heads->row_stride;
    turned->head_stride = heads->head_stride;
}

/* The rows first .. first + count of a matrix, or those entries of a vector. */
rapt_tensor rapt_rows_of(const rapt_tensor *tensor, int64_t first, int64_t count);

#endif
