/* layer_support.h - what the tests of the layer share: layers of all kinds, and calls on the running test's context */
#ifndef RAPT_TESTS_LAYER_SUPPORT_H
#define RAPT_TESTS_LAYER_SUPPORT_H

#include "support.h"

extern rapt_context *context; /* of the running test */

typedef struct inputs {
    rapt_tensor query, key, value;
} inputs;

typedef void (*layer_check)(const rapt_mha *layer);

enum { KINDS = 6 };

int make_cpu_context(void **state);
int destroy_shared_context(void **state);
rapt_mha *create(const rapt_mha_config *config);
rapt_tensor parameter(const rapt_mha *layer, const char *name);
rapt_mha *create_random(const rapt_mha_config *config);
rapt_tensor random_tensor(uint64_t seed, rapt_dtype dtype, int32_t ndim, const int64_t *shape);
rapt_tensor forward(const rapt_mha *layer, const rapt_tensor *query, const rapt_tensor *key, const rapt_tensor *value,
                    const rapt_options *options);
rapt_tensor self_attention(const rapt_mha *layer, const rapt_tensor *x, const rapt_options *options);
rapt_tensor slice(const rapt_tensor *tensor, int32_t dim, int64_t start, int64_t count);
void free_list(rapt_tensor *const *tensors);
void assert_same_and_free(rapt_tensor actual, rapt_tensor expected);
rapt_mha_config kind_of_layer(int kind, rapt_dtype dtype);
bool takes_self_attention(const rapt_mha *layer);
void for_each_layer(layer_check check);
void run_on_each_layer(void **state);
inputs make_inputs(const rapt_mha *layer, int64_t n, int64_t l, int64_t s);
void free_inputs(inputs *x);
int64_t extra_keys(const rapt_mha *layer);

#define free_tensors(...) free_list((rapt_tensor *const[]){__VA_ARGS__, NULL})

/* A check as a test of its own, by its name, for each kind of layer, f32 and f64, on both backends. */
/* clang-format off */
#define on_each_layer(check) {#check, run_on_each_layer, NULL, NULL, &(layer_check){check}}
/* clang-format on */

#endif
