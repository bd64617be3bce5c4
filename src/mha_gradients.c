/* mha_gradients.c - memory for the gradients of a layer's parameters */
#include "mha.h"

#define FIELD(field, parameter)                                                                                        \
    { #field, parameter, offsetof(rapt_mha_gradients, field) }
const mha_gradient_field rapt_mha_gradient_fields[MHA_GRADIENT_FIELDS] = {
    FIELD(in_proj_weight, "in_proj_weight"),
    FIELD(q_proj_weight, "q_proj_weight"),
    FIELD(k_proj_weight, "k_proj_weight"),
    FIELD(v_proj_weight, "v_proj_weight"),
    FIELD(in_proj_bias, "in_proj_bias"),
    FIELD(q_proj_bias, "q_proj.bias"),
    FIELD(k_proj_bias, "k_proj.bias"),
    FIELD(v_proj_bias, "v_proj.bias"),
    FIELD(bias_k, "bias_k"),
    FIELD(bias_v, "bias_v"),
    FIELD(out_proj_weight, "out_proj.weight"),
    FIELD(out_proj_bias, "out_proj.bias"),
};

int rapt_mha_gradient_field_of(const char *parameter) {
    int field = 0;
    while (strcmp(rapt_mha_gradient_fields[field].parameter, parameter) != 0) field++;
    return field;
}

/* What the caller sees comes first; the gradients' elements follow in the same block. */
typedef struct owned_gradients {
    rapt_mha_gradients gradients;
    rapt_allocator allocator; /* a copy, as gradients may outlive their context */
    size_t size;              /* of the block */
    rapt_tensor tensor[MHA_MAX_PARAMETERS];
} owned_gradients;

static size_t bytes_of(const rapt_tensor *tensor) {
    return rapt_arena_size(rapt_size_mul((size_t)rapt_tensor_count(tensor), rapt_dtype_size(tensor->dtype)));
}

static rapt_status create(rapt_context *context, const rapt_mha *layer, rapt_mha_gradients **result) {
    size_t size = rapt_arena_size(sizeof(owned_gradients)), used = size;
    for (int32_t i = 0; i < layer->parameters; i++) size = rapt_size_add(size, bytes_of(&layer->parameter[i].tensor));
    char *block = rapt_allocate(&context->allocator, size);
    if (block == NULL) return rapt_fail_memory(context, size);
    memset(block, 0, size);
    owned_gradients *owned = (owned_gradients *)(void *)block;
    owned->allocator = context->allocator;
    owned->size = size;
    for (int32_t i = 0; i < layer->parameters; i++) {
        const rapt_tensor *parameter = &layer->parameter[i].tensor; /* of any strides where it is borrowed */
        owned->tensor[i] = rapt_tensor_of(block + used, parameter->dtype, parameter->ndim, parameter->shape);
        used += bytes_of(parameter);
        int field = rapt_mha_gradient_field_of(layer->parameter[i].name);
        *(const rapt_tensor **)(void *)(block + rapt_mha_gradient_fields[field].offset) = &owned->tensor[i];
    }
    *result = &owned->gradients;
    return RAPT_OK;
}

rapt_status rapt_mha_gradients_create(rapt_context *context, const rapt_mha *layer, rapt_mha_gradients **gradients) {
    rapt_call call;
    if (gradients != NULL) *gradients = NULL;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = layer == NULL ? "layer" : gradients == NULL ? "gradients" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : create(context, layer, gradients);
    return rapt_leave(context, &call, status);
}

void rapt_mha_gradients_destroy(rapt_mha_gradients *gradients) {
    if (gradients == NULL) return;
    owned_gradients *owned = (owned_gradients *)(void *)gradients;
    rapt_allocator allocator = owned->allocator;
    rapt_release(&allocator, owned, owned->size);
}
