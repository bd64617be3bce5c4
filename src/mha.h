/* mha.h - what the files of the layer share */
#ifndef RAPT_MHA_H
#define RAPT_MHA_H

#include "internal.h"

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
    mha_parts parts;
    int32_t parameters;
    mha_parameter parameter[MHA_MAX_PARAMETERS];
    void *memory; /* of parameters that the layer owns */
    void *packed;
    size_t memory_size, packed_size;
};

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

/* The rows first .. first + count of a matrix, or those entries of a vector. */
rapt_tensor rapt_rows_of(const rapt_tensor *tensor, int64_t first, int64_t count);

#endif
