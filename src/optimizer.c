/* optimizer.c - optimisers: settings, and the parameters that they change */
#include "optimizer.h"

#include "checkpoint.h"
#include "json.h"

#include <math.h>

typedef long long ll; /* for printf */

/* ---- settings ---- */

static rapt_status check_not_negative(rapt_context *context, const char *name, double value) {
    if (isfinite(value) && value >= 0) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %g, expected a finite number of 0 or more", name, value);
}

static rapt_status check_fraction(rapt_context *context, const char *name, double value) {
    if (value >= 0 && value < 1) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %g, expected at least 0 and below 1", name, value);
}

static rapt_status check_sgd(rapt_context *context, const rapt_optimizer_config *c) {
    rapt_status status = check_fraction(context, "config.momentum", c->momentum);
    if (status != RAPT_OK) return status;
    if (!(c->dampening >= 0 && c->dampening <= 1))
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config.dampening is %g, expected 0 to 1", c->dampening);
    if (!c->nesterov || (c->momentum > 0 && c->dampening == 0)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                     "config.nesterov needs momentum above 0 and dampening 0; they are %g and %g", c->momentum,
                     c->dampening);
}

static rapt_status check_adamw(rapt_context *context, const rapt_optimizer_config *c) {
    rapt_status status = check_fraction(context, "config.beta1", c->beta1);
    if (status == RAPT_OK) status = check_fraction(context, "config.beta2", c->beta2);
    if (status == RAPT_OK) status = check_not_negative(context, "config.epsilon", c->epsilon);
    if (status != RAPT_OK) return status;
    const char *foreign = c->momentum != 0    ? "momentum"
                          : c->dampening != 0 ? "dampening"
                          : c->nesterov       ? "nesterov"
                                              : NULL;
    if (foreign == NULL) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config.%s is set, which AdamW has not (beta1 is its momentum)",
                     foreign);
}

static rapt_status check_config(rapt_context *context, const rapt_optimizer_config *c) {
    rapt_status status =
        rapt_check_struct_size(context, "config", "rapt_optimizer_config_default", c, c->struct_size, sizeof *c);
    if (status != RAPT_OK) return status;
    if (c->kind != RAPT_SGD && c->kind != RAPT_ADAMW)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config.kind is %d, expected RAPT_SGD or RAPT_ADAMW",
                         (int)c->kind);
    status = check_not_negative(context, "config.learning_rate", c->learning_rate);
    if (status == RAPT_OK) status = check_not_negative(context, "config.weight_decay", c->weight_decay);
    if (status != RAPT_OK) return status;
    return c->kind == RAPT_SGD ? check_sgd(context, c) : check_adamw(context, c);
}

int32_t rapt_optimizer_states(const rapt_optimizer_config *config, const char *names[OPTIMIZER_MAX_STATES]) {
    if (config->kind == RAPT_ADAMW) {
        names[0] = "exp_avg";
        names[1] = "exp_avg_sq";
        return 2;
    }
    names[0] = "momentum_buffer";
    return config->momentum != 0 ? 1 : 0;
}

/* ---- creation ---- */

static rapt_status create(rapt_context *context, const rapt_optimizer_config *config, rapt_optimizer **result) {
    rapt_status status = check_config(context, config);
    if (status != RAPT_OK) return status;
    rapt_optimizer *optimizer = rapt_allocate(&context->allocator, sizeof *optimizer);
    if (optimizer == NULL) return rapt_fail_memory(context, sizeof *optimizer);
    *optimizer = (rapt_optimizer){.config = *config,
                                  .allocator = context->allocator,
                                  .entries.item_size = sizeof(optimizer_entry),
                                  .layers.item_size = sizeof(optimizer_layer)};
    *result = optimizer;
    return RAPT_OK;
}

rapt_status rapt_optimizer_create(rapt_context *context, const rapt_optimizer_config *config,
                                  rapt_optimizer **optimizer) {
    rapt_call call;
    if (optimizer != NULL) *optimizer = NULL;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = config == NULL ? "config" : optimizer == NULL ? "optimizer" : NULL;
    status =
        null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : create(context, config, optimizer);
    return rapt_leave(context, &call, status);
}

/* Forgets the entries and layers behind the first so many: all of them, or those of a call that failed. */
static void drop_from(rapt_optimizer *optimizer, size_t entries, size_t layers) {
    for (size_t i = entries; i < optimizer->entries.count; i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        rapt_release(&optimizer->allocator, entry->memory, entry->memory_size);
    }
    for (size_t i = layers; i < optimizer->layers.count; i++) {
        const optimizer_layer *layer = optimizer_layer_at(optimizer, i);
        rapt_release(&optimizer->allocator, (void *)(uintptr_t)layer->prefix, layer->prefix_size);
    }
    optimizer->entries.count = entries;
    optimizer->layers.count = layers;
}

void rapt_optimizer_destroy(rapt_optimizer *optimizer) {
    if (optimizer == NULL) return;
    rapt_allocator allocator = optimizer->allocator;
    drop_from(optimizer, 0, 0);
    rapt_table_free(&optimizer->entries, &allocator);
    rapt_table_free(&optimizer->layers, &allocator);
    rapt_release(&allocator, optimizer, sizeof *optimizer);
}

int64_t rapt_optimizer_steps(const rapt_optimizer *optimizer) { return optimizer == NULL ? 0 : optimizer->steps; }

static rapt_status set_learning_rate(rapt_context *context, rapt_optimizer *optimizer, double rate) {
    if (optimizer == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "optimizer is NULL");
    rapt_status status = check_not_negative(context, "rate", rate);
    if (status == RAPT_OK) optimizer->config.learning_rate = rate;
    return status;
}

rapt_status rapt_optimizer_set_learning_rate(rapt_context *context, rapt_optimizer *optimizer, double rate) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, set_learning_rate(context, optimizer, rate));
}

/* ---- names ---- */

/* Whether a layer with this prefix writes a tensor of that name, or has a parameter called so. */
static bool is_of_layer(const char *prefix, const char *name) {
    size_t length = strlen(prefix);
    if (strncmp(prefix, name, length) != 0) return false;
    for (int i = 0; i < MHA_GRADIENT_FIELDS; i++)
        if (strcmp(name + length, rapt_mha_gradient_fields[i].parameter) == 0) return true;
    return false;
}

static bool begins_as_state(const char *name) {
    return strncmp(name, RAPT_STATE_PREFIX, sizeof RAPT_STATE_PREFIX - 1) == 0;
}

static rapt_status check_name(rapt_context *context, const rapt_optimizer *optimizer, const char *name) {
    char text[RAPT_SHOWN_SIZE], other[RAPT_SHOWN_SIZE];
    if (!rapt_is_utf8(name)) return rapt_fail(context, RAPT_ERROR_ARGUMENT, "name is not valid UTF-8");
    rapt_shown(name, text);
    if (strcmp(name, "__metadata__") == 0)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "name is __metadata__, which is no tensor's");
    if (begins_as_state(name))
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "name is '%s', but those that begin with " RAPT_STATE_PREFIX " are the optimiser's own", text);
    for (size_t i = 0; i < optimizer_count(optimizer); i++)
        if (strcmp(optimizer_entry_at(optimizer, i)->name, name) == 0)
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "name is '%s', which the optimiser has already", text);
    for (size_t i = 0; i < optimizer->layers.count; i++) {
        const char *prefix = optimizer_layer_at(optimizer, i)->prefix;
        if (is_of_layer(prefix, name))
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "name is '%s', which belongs to the layer '%s'", text,
                             rapt_shown(prefix, other));
    }
    return RAPT_OK;
}

static rapt_status check_layer_names(rapt_context *context, const rapt_optimizer *optimizer, const char *prefix,
                                     const rapt_mha *layer) {
    rapt_status status = rapt_check_prefix(context, prefix);
    if (status != RAPT_OK) return status;
    char text[RAPT_SHOWN_SIZE], other[RAPT_SHOWN_SIZE];
    rapt_shown(prefix, text);
    if (begins_as_state(prefix))
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "prefix is '%s', but names that begin with " RAPT_STATE_PREFIX " are the optimiser's own",
                         text);
    for (size_t i = 0; i < optimizer->layers.count; i++) {
        const optimizer_layer *earlier = optimizer_layer_at(optimizer, i);
        if (earlier->layer == layer)
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "layer is in the optimiser already, with prefix '%s'",
                             rapt_shown(earlier->prefix, other));
        if (strcmp(earlier->prefix, prefix) == 0)
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "prefix is '%s', which another layer has", text);
    }
    for (size_t i = 0; i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        if (entry->layer == NULL && is_of_layer(prefix, entry->name))
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "prefix is '%s', but '%s' is another parameter's name", text,
                             rapt_shown(entry->name, other));
    }
    return RAPT_OK;
}

/* ---- a parameter and its gradient ---- */

static rapt_status check_elements(rapt_context *context, const char *label, const rapt_tensor *tensor) {
    rapt_status status = rapt_check_tensor(context, label, tensor);
    if (status != RAPT_OK) return status;
    if (!rapt_is_float(tensor->dtype))
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected f32, f64, bf16 or f16", label,
                         rapt_dtype_name(tensor->dtype));
    if (rapt_tensor_is_contiguous(tensor)) return RAPT_OK;
    char shape[RAPT_SHAPE_TEXT];
    return rapt_fail(context, RAPT_ERROR_LAYOUT, "%s with shape %s is not contiguous, as it must be", label,
                     rapt_shape_text(tensor, shape));
}

static bool have_one_shape(const rapt_tensor *a, const rapt_tensor *b) {
    bool same = a->ndim == b->ndim;
    for (int32_t d = 0; same && d < a->ndim; d++) same = a->shape[d] == b->shape[d];
    return same;
}

/* What is about to be added, and what messages call it. */
typedef struct candidate {
    const char *prefix, *name; /* in a row */
    rapt_tensor parameter, gradient;
    const char *parameter_label, *gradient_label;
    const rapt_mha *layer;
} candidate;

static rapt_status check_tensors(rapt_context *context, const rapt_optimizer *optimizer, const candidate *c) {
    const char *label = c->parameter_label, *gradient_label = c->gradient_label;
    const rapt_tensor *parameter = &c->parameter, *gradient = &c->gradient;
    rapt_status status = check_elements(context, label, parameter);
    if (status == RAPT_OK) status = check_elements(context, gradient_label, gradient);
    if (status != RAPT_OK) return status;
    char a[RAPT_SHAPE_TEXT], b[RAPT_SHAPE_TEXT];
    if (gradient->dtype != parameter->dtype)
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected %s as %s is", gradient_label,
                         rapt_dtype_name(gradient->dtype), rapt_dtype_name(parameter->dtype), label);
    if (!have_one_shape(gradient, parameter))
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s as %s has", gradient_label,
                         rapt_shape_text(gradient, a), rapt_shape_text(parameter, b), label);
    status = rapt_check_apart(context, label, parameter, gradient_label, gradient);
    for (size_t i = 0; status == RAPT_OK && i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        char shown[RAPT_SHOWN_SIZE]; /* its name will do: "shares memory with in_proj_weight" */
        rapt_shown(entry->name, shown);
        const rapt_tensor *mine[] = {parameter, gradient}, *theirs[] = {&entry->parameter, &entry->gradient};
        const char *labels[] = {label, gradient_label};
        for (int k = 0; status == RAPT_OK && k < 4; k++)
            status = rapt_check_apart(context, labels[k / 2], mine[k / 2], shown, theirs[k % 2]);
    }
    return status;
}

int64_t rapt_optimizer_chunks(const rapt_optimizer *optimizer) {
    if (optimizer_count(optimizer) == 0) return 0;
    const optimizer_entry *last = optimizer_entry_at(optimizer, optimizer_count(optimizer) - 1);
    return last->first_chunk + (last->count + OPTIMIZER_CHUNK - 1) / OPTIMIZER_CHUNK;
}

static char *put(char *at, const char *text) {
    size_t length = strlen(text);
    memcpy(at, text, length + 1);
    return at + length;
}

/* One block: the states, zeros, then the names. */
static rapt_status add_entry(rapt_context *context, rapt_optimizer *optimizer, const candidate *c) {
    const char *state_words[OPTIMIZER_MAX_STATES];
    int32_t states = rapt_optimizer_states(&optimizer->config, state_words);
    optimizer_entry entry = {.parameter = c->parameter,
                             .gradient = c->gradient,
                             .count = rapt_tensor_count(&c->parameter),
                             .first_chunk = rapt_optimizer_chunks(optimizer),
                             .layer = c->layer};
    rapt_dtype dtype = rapt_accumulation_dtype(c->parameter.dtype);
    size_t state_size = rapt_arena_size(rapt_size_mul((size_t)entry.count, rapt_dtype_size(dtype)));
    size_t name_size = strlen(c->prefix) + strlen(c->name) + 1;
    entry.memory_size = rapt_size_add(rapt_size_mul(state_size, (size_t)states), name_size);
    for (int32_t i = 0; i < states; i++)
        entry.memory_size =
            rapt_size_add(entry.memory_size, sizeof RAPT_STATE_PREFIX + name_size + strlen(state_words[i]));
    char *next = rapt_allocate(&optimizer->allocator, entry.memory_size);
    if (next == NULL) return rapt_fail_memory(context, entry.memory_size);
    memset(next, 0, entry.memory_size);
    entry.memory = next;
    for (int32_t i = 0; i < states; i++, next += state_size)
        entry.state[i] = rapt_tensor_of(next, dtype, c->parameter.ndim, c->parameter.shape);
    entry.name = next;
    next = put(put(next, c->prefix), c->name) + 1;
    for (int32_t i = 0; i < states; i++) {
        entry.state_name[i] = next;
        next = put(put(put(put(next, RAPT_STATE_PREFIX), entry.name), "."), state_words[i]) + 1;
    }
    rapt_status status = rapt_table_add(context, &optimizer->allocator, &optimizer->entries, &entry);
    if (status != RAPT_OK) rapt_release(&optimizer->allocator, entry.memory, entry.memory_size);
    return status;
}

static rapt_status check_not_begun(rapt_context *context, const rapt_optimizer *optimizer) {
    if (optimizer->steps == 0) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_STATE, "the optimiser has taken %lld steps: add everything before the first",
                     (ll)optimizer->steps);
}

static rapt_status add(rapt_context *context, rapt_optimizer *optimizer, const char *name, const rapt_tensor *parameter,
                       const rapt_tensor *gradient) {
    candidate c = {.prefix = "",
                   .name = name,
                   .parameter = *parameter,
                   .gradient = *gradient,
                   .parameter_label = "parameter",
                   .gradient_label = "gradient"};
    rapt_status status = check_not_begun(context, optimizer);
    if (status == RAPT_OK) status = check_name(context, optimizer, name);
    if (status == RAPT_OK) status = check_tensors(context, optimizer, &c);
    return status == RAPT_OK ? add_entry(context, optimizer, &c) : status;
}

rapt_status rapt_optimizer_add(rapt_context *context, rapt_optimizer *optimizer, const char *name,
                               const rapt_tensor *parameter, const rapt_tensor *gradient) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = optimizer == NULL   ? "optimizer"
                       : name == NULL      ? "name"
                       : parameter == NULL ? "parameter"
                       : gradient == NULL  ? "gradient"
                                           : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : add(context, optimizer, name, parameter, gradient);
    return rapt_leave(context, &call, status);
}

/* ---- the parameters of a layer ---- */

typedef struct addition {
    rapt_context *context;
    rapt_optimizer *optimizer;
    const char *prefix;
    const rapt_mha *layer;
    const rapt_mha_gradients *gradients;
} addition;

static const rapt_tensor *given(const addition *a, int field) {
    const char *at = (const char *)a->gradients + rapt_mha_gradient_fields[field].offset;
    return *(const rapt_tensor *const *)(const void *)at;
}

/* The rows of q, k or v (part 1 to 3) of a fused tensor. */
static rapt_tensor part_of(const addition *a, const rapt_tensor *fused, int part) {
    const rapt_mha_config *c = &a->layer->config;
    int64_t q_rows = c->num_heads * c->head_dim, kv_rows = c->num_kv_heads * c->head_dim;
    return rapt_rows_of(fused, part == 1 ? 0 : q_rows + (part - 2) * kv_rows, part == 1 ? q_rows : kv_rows);
}

/* Whether the layer has what this field is the gradient of, fused or apart. */
static bool has_parameter(const addition *a, int field) {
    const rapt_mha_config *c = &a->layer->config;
    const mha_parts *parts = &a->layer->parts;
    const void *bias[] = {parts->q.bias.data, parts->k.bias.data, parts->v.bias.data};
    if (field == MHA_IN_WEIGHT) return c->kdim == c->embed_dim && c->vdim == c->embed_dim;
    if (field == MHA_IN_BIAS) return bias[0] != NULL || bias[1] != NULL || bias[2] != NULL;
    if (field > MHA_IN_BIAS && field < MHA_BIAS_K) return bias[field - MHA_IN_BIAS - 1] != NULL;
    if (field == MHA_BIAS_K || field == MHA_BIAS_V) return parts->bias_k.data != NULL;
    return field != MHA_OUT_BIAS || parts->out.bias.data != NULL;
}

static rapt_status check_fused(const addition *a, int field) {
    const rapt_tensor *fused = given(a, field);
    for (int part = 1; part <= 3; part++)
        if (given(a, field + part) != NULL)
            return rapt_fail(a->context, RAPT_ERROR_ARGUMENT, "gradients has %s and %s: give one of them",
                             rapt_mha_gradient_fields[field].field, rapt_mha_gradient_fields[field + part].field);
    const rapt_mha_config *c = &a->layer->config;
    int64_t shape[] = {(c->num_heads + 2 * c->num_kv_heads) * c->head_dim, c->embed_dim};
    rapt_tensor expected = rapt_tensor_of(NULL, c->dtype, field == MHA_IN_WEIGHT ? 2 : 1, shape);
    char label[40] = "gradients.", actual_text[RAPT_SHAPE_TEXT], expected_text[RAPT_SHAPE_TEXT];
    put(label + strlen(label), rapt_mha_gradient_fields[field].field);
    rapt_status status = rapt_check_tensor(a->context, label, fused);
    if (status != RAPT_OK || have_one_shape(fused, &expected)) return status;
    return rapt_fail(a->context, RAPT_ERROR_SHAPE, "%s has shape %s, expected %s", label,
                     rapt_shape_text(fused, actual_text), rapt_shape_text(&expected, expected_text));
}

static rapt_status check_gradients(const addition *a) {
    for (int i = 0; i < (int)(sizeof a->gradients->reserved / sizeof *a->gradients->reserved); i++)
        if (a->gradients->reserved[i] != 0)
            return rapt_fail(a->context, RAPT_ERROR_ARGUMENT,
                             "gradients.reserved[%d] is not 0: set gradients to zero before use", i);
    bool any = false;
    for (int field = 0; field < MHA_GRADIENT_FIELDS; field++) {
        if (given(a, field) == NULL) continue;
        any = true;
        if (!has_parameter(a, field))
            return rapt_fail(a->context, RAPT_ERROR_ABSENT, "gradients has %s, and the layer has no such parameter",
                             rapt_mha_gradient_fields[field].field);
        bool is_fused = field == MHA_IN_WEIGHT || field == MHA_IN_BIAS;
        rapt_status status = is_fused ? check_fused(a, field) : RAPT_OK;
        if (status != RAPT_OK) return status;
    }
    return any ? RAPT_OK
               : rapt_fail(a->context, RAPT_ERROR_ARGUMENT, "gradients has no tensor for a parameter of the layer");
}

/* `field` names the parameter, `gradient_field` the gradient, of which it may be a part. */
static rapt_status add_pair(const addition *a, int field, const rapt_tensor *parameter, int gradient_field,
                            const rapt_tensor *gradient) {
    char label[40] = "the layer's ", gradient_label[40] = "gradients.";
    put(label + strlen(label), rapt_mha_gradient_fields[field].parameter);
    put(gradient_label + strlen(gradient_label), rapt_mha_gradient_fields[gradient_field].field);
    candidate c = {.prefix = a->prefix,
                   .name = rapt_mha_gradient_fields[field].parameter,
                   .parameter = *parameter,
                   .gradient = *gradient,
                   .parameter_label = label,
                   .gradient_label = gradient_label,
                   .layer = a->layer};
    rapt_status status = check_tensors(a->context, a->optimizer, &c);
    return status == RAPT_OK ? add_entry(a->context, a->optimizer, &c) : status;
}

/* One parameter of the layer: with its gradient, with those of its parts, or with a part of the fused one's. */
static rapt_status add_parameter(const addition *a, const mha_parameter *parameter) {
    int field = rapt_mha_gradient_field_of(parameter->name);
    if (given(a, field) != NULL) return add_pair(a, field, &parameter->tensor, field, given(a, field));
    if (field >= MHA_BIAS_K) return RAPT_OK;
    int part = field % 4, fused = field - part; /* part 0: it is the fused one */
    if (part != 0 && given(a, fused) != NULL) {
        rapt_tensor gradient = part_of(a, given(a, fused), part);
        return add_pair(a, field, &parameter->tensor, fused, &gradient);
    }
    rapt_status status = RAPT_OK;
    for (int i = 1; part == 0 && status == RAPT_OK && i <= 3; i++) {
        if (given(a, fused + i) == NULL) continue;
        rapt_tensor rows = part_of(a, &parameter->tensor, i);
        status = add_pair(a, fused + i, &rows, fused + i, given(a, fused + i));
    }
    return status;
}

static rapt_status add_prefix(const addition *a, rapt_mha *layer) {
    size_t size = strlen(a->prefix) + 1;
    char *prefix = rapt_allocate(&a->optimizer->allocator, size);
    if (prefix == NULL) return rapt_fail_memory(a->context, size);
    put(prefix, a->prefix);
    optimizer_layer item = {.prefix = prefix, .layer = layer, .prefix_size = size};
    rapt_status status = rapt_table_add(a->context, &a->optimizer->allocator, &a->optimizer->layers, &item);
    if (status != RAPT_OK) rapt_release(&a->optimizer->allocator, prefix, size);
    return status;
}

static rapt_status add_layer(const addition *a, rapt_mha *layer) {
    rapt_status status = check_not_begun(a->context, a->optimizer);
    if (status == RAPT_OK) status = check_layer_names(a->context, a->optimizer, a->prefix, layer);
    if (status == RAPT_OK) status = check_gradients(a);
    if (status != RAPT_OK) return status;
    size_t entries = a->optimizer->entries.count, layers = a->optimizer->layers.count;
    for (int32_t i = 0; status == RAPT_OK && i < layer->parameters; i++)
        status = add_parameter(a, &layer->parameter[i]);
    if (status == RAPT_OK) status = add_prefix(a, layer);
    if (status != RAPT_OK) drop_from(a->optimizer, entries, layers);
    return status;
}

rapt_status rapt_optimizer_add_layer(rapt_context *context, rapt_optimizer *optimizer, const char *prefix,
                                     rapt_mha *layer, const rapt_mha_gradients *gradients) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    addition a = {.context = context,
                  .optimizer = optimizer,
                  .prefix = prefix == NULL ? "" : prefix,
                  .layer = layer,
                  .gradients = gradients};
    const char *null = optimizer == NULL   ? "optimizer"
                       : layer == NULL     ? "layer"
                       : gradients == NULL ? "gradients"
                                           : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : add_layer(&a, layer);
    return rapt_leave(context, &call, status);
}
