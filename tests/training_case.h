/* training_case.h - random layers and calls with everything that a backward goes through, and their gradients */
#ifndef RAPT_TESTS_TRAINING_CASE_H
#define RAPT_TESTS_TRAINING_CASE_H

#include "support.h"

/* What has a gradient. */
typedef enum source {
    QUERY,
    KEY,
    VALUE,
    ATTN_MASK,
    KEY_PADDING_MASK,
    IN_PROJ_WEIGHT,
    Q_PROJ_WEIGHT,
    K_PROJ_WEIGHT,
    V_PROJ_WEIGHT,
    IN_PROJ_BIAS,
    Q_PROJ_BIAS,
    K_PROJ_BIAS,
    V_PROJ_BIAS,
    BIAS_K,
    BIAS_V,
    OUT_PROJ_WEIGHT,
    OUT_PROJ_BIAS,
    SOURCES
} source;
extern const char *const source_names[SOURCES];

/* Must not move: it points into itself. */
typedef struct training_case {
    rapt_mha_config config; /* nothing left to derive */
    rapt_mha *layer;
    bool batched, self, same_kv, returns_weights;
    int64_t n, l, s, extra;
    rapt_tensor query, key, value, mask, padding; /* key and value are {0} where they are the query, or the key */
    rapt_tensor d_out, d_weights;
    rapt_options options; /* without what it returns and the state */
    rapt_rotary rotary;
    int64_t key_start[4], key_lengths[4], offsets[4];
} training_case;

typedef struct case_sizes {
    int64_t kv_heads, group, head_dim, length; /* the most of each */
    double whole_panels; /* the chance of heads of 64 or 128 instead, which lie one after another */
} case_sizes;

void make_training_case(rapt_context *context, test_random *random, rapt_dtype dtype, case_sizes most,
                        training_case *c);
void free_training_case(training_case *c);
const rapt_tensor *key_of(const training_case *c);
const rapt_tensor *value_of(const training_case *c);
void describe_training_case(const training_case *c, char *text, size_t size);

/* The results of a forward, with a state if one is given. */
typedef struct training_result {
    rapt_tensor out, weights; /* {0} unless returned */
} training_result;
training_result run_forward(rapt_context *context, const training_case *c, rapt_mha_state *state);
void free_training_result(training_result *result);

/* Where gradients go: all that the case has, filled with a value. Must not move. */
typedef struct gradient_set {
    rapt_tensor tensor[SOURCES]; /* {0}: none */
    rapt_mha_gradients gradients;
} gradient_set;

typedef enum gradient_style {
    AS_LAYER,      /* parameters fused if they can be, one tensor for inputs that are one */
    APART = 1,     /* each projection's on its own */
    PER_INPUT = 2, /* one tensor each for query, key and value */
} gradient_style;

void make_gradients(test_random *random, const training_case *c, int style, double value, gradient_set *set);
void free_gradients(gradient_set *set);
/* The tensor that a gradient is the gradient of: an input, a mask, or a parameter of the layer. */
rapt_tensor source_of(rapt_context *context, const training_case *c, source which);
bool same_layer_gradients(const gradient_set *a, const gradient_set *b);

#endif
