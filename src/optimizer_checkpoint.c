/* optimizer_checkpoint.c - training runs into files and back
 *
 * A file holds layers as rapt_mha_save writes them, whole, other parameters under their names, and the state of each as
 * optimizer.NAME.exp_avg and so on. Its metadata says what the tensors do not: rapt.optimizer, "kind=adamw steps=1000",
 * and the settings of each layer.
 */
#include "optimizer.h"

#include "checkpoint.h"
#include "json.h"

#include <inttypes.h>
#include <stdio.h>

#define OPTIMIZER_KEY "rapt.optimizer"
#define TEXT_BEGIN "kind=%s steps="
enum { OPTIMIZER_TEXT = 64 };

static const char *kind_name(rapt_optimizer_kind kind) { return kind == RAPT_ADAMW ? "adamw" : "sgd"; }

/* ---- saving ---- */

typedef struct saving {
    safetensors_source *sources;
    int64_t count;
    const char *(*pairs)[2];
    int64_t pair_count;
    char *text; /* of the layers' keys and settings */
} saving;

static void add_source(saving *s, const char *name, const rapt_tensor *tensor) {
    s->sources[s->count++] =
        (safetensors_source){.prefix = "", .name = name, .dtype = tensor->dtype, .pieces = 1, .piece = {*tensor}};
}

static void add_pair(saving *s, const char *key, const char *value) {
    s->pairs[s->pair_count][0] = key;
    s->pairs[s->pair_count++][1] = value;
}

static size_t key_size(const optimizer_layer *layer) { return sizeof RAPT_SETTINGS_KEY - 1 + layer->prefix_size; }

static void list_layers(const rapt_optimizer *optimizer, saving *s) {
    for (size_t i = 0; i < optimizer->layers.count; i++) {
        const optimizer_layer *item = optimizer_layer_at(optimizer, i);
        s->count += rapt_mha_list_sources(item->layer, item->prefix, s->sources + s->count);
        char *settings = s->text, *key = s->text + RAPT_SETTINGS_SIZE;
        rapt_settings_write(&item->layer->config, settings);
        memcpy(key, RAPT_SETTINGS_KEY, sizeof RAPT_SETTINGS_KEY - 1);
        memcpy(key + sizeof RAPT_SETTINGS_KEY - 1, item->prefix, item->prefix_size);
        add_pair(s, key, settings);
        s->text += RAPT_SETTINGS_SIZE + key_size(item);
    }
}

static void list_entries(const rapt_optimizer *optimizer, saving *s) {
    for (size_t i = 0; i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        if (entry->layer == NULL) add_source(s, entry->name, &entry->parameter);
    }
    for (size_t i = 0; i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        for (int k = 0; k < OPTIMIZER_MAX_STATES; k++)
            if (entry->state_name[k] != NULL) add_source(s, entry->state_name[k], &entry->state[k]);
    }
}

static rapt_status save(rapt_context *context, const rapt_optimizer *optimizer, const char *path) {
    size_t layers = optimizer->layers.count, entries = optimizer_count(optimizer);
    size_t most =
        rapt_size_add(rapt_size_mul(layers, RAPT_LAYER_SOURCES), rapt_size_mul(entries, 1 + OPTIMIZER_MAX_STATES));
    size_t sources_size = rapt_arena_size(rapt_size_mul(most, sizeof(safetensors_source)));
    size_t pairs_size = rapt_arena_size(rapt_size_mul(layers + 2, sizeof(const char *[2]))), text_size = 0;
    for (size_t i = 0; i < layers; i++) text_size += RAPT_SETTINGS_SIZE + key_size(optimizer_layer_at(optimizer, i));
    size_t size = rapt_size_add(rapt_size_add(sources_size, pairs_size), text_size);
    char *memory = rapt_allocate(&context->allocator, size); /* the arena is the writer's */
    if (memory == NULL) return rapt_fail_memory(context, size);
    saving s = {.sources = (safetensors_source *)(void *)memory,
                .pairs = (const char *(*)[2])(void *)(memory + sources_size),
                .text = memory + sources_size + pairs_size};
    char text[OPTIMIZER_TEXT];
    snprintf(text, sizeof text, TEXT_BEGIN "%" PRId64, kind_name(optimizer->config.kind), optimizer->steps);
    add_pair(&s, "format", "pt");
    add_pair(&s, OPTIMIZER_KEY, text);
    list_layers(optimizer, &s);
    list_entries(optimizer, &s);
    rapt_status status = rapt_safetensors_write(context, path, s.count, s.sources, s.pair_count, (rapt_pairs)s.pairs);
    rapt_release(&context->allocator, memory, size);
    return status;
}

rapt_status rapt_optimizer_save(rapt_context *context, const rapt_optimizer *optimizer, const char *path) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = optimizer == NULL ? "optimizer" : path == NULL ? "path" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : save(context, optimizer, path);
    return rapt_leave(context, &call, status);
}

/* ---- loading: once to look at everything, and once more to copy ---- */

typedef struct loading {
    rapt_context *context;
    rapt_optimizer *optimizer;
    const rapt_checkpoint *checkpoint;
    bool copies;
} loading;

/* Converting would not continue the same run, so dtypes must agree. */
static rapt_status take(const loading *l, const char *name, const rapt_tensor *from, const rapt_tensor *to) {
    char text[RAPT_SHOWN_SIZE], a[RAPT_SHAPE_TEXT], b[RAPT_SHAPE_TEXT];
    bool same_shape = from->ndim == to->ndim;
    for (int32_t d = 0; same_shape && d < from->ndim; d++) same_shape = from->shape[d] == to->shape[d];
    if (!same_shape)
        return rapt_fail(l->context, RAPT_ERROR_SHAPE, "tensor '%s' has shape %s, expected %s", rapt_shown(name, text),
                         rapt_shape_text(from, a), rapt_shape_text(to, b));
    if (from->dtype != to->dtype)
        return rapt_fail(l->context, RAPT_ERROR_DTYPE, "tensor '%s' is %s, expected %s", rapt_shown(name, text),
                         rapt_dtype_name(from->dtype), rapt_dtype_name(to->dtype));
    if (l->copies) rapt_copy_elements(from, to);
    return RAPT_OK;
}

static rapt_status take_named(const loading *l, const char *name, const rapt_tensor *to) {
    char text[RAPT_SHOWN_SIZE];
    const checkpoint_tensor *tensor = rapt_table_find(&l->checkpoint->tensors, name);
    if (tensor == NULL)
        return rapt_fail(l->context, RAPT_ERROR_ABSENT, "the checkpoint has no tensor '%s'", rapt_shown(name, text));
    rapt_tensor view = {0};
    rapt_status status = rapt_safetensors_view(l->context, tensor->file, tensor->entry, &view);
    return status == RAPT_OK ? take(l, name, &view, to) : status;
}

static rapt_status take_entry(const loading *l, const optimizer_entry *entry) {
    rapt_status status = entry->layer == NULL ? take_named(l, entry->name, &entry->parameter) : RAPT_OK;
    for (int i = 0; status == RAPT_OK && i < OPTIMIZER_MAX_STATES; i++)
        if (entry->state_name[i] != NULL) status = take_named(l, entry->state_name[i], &entry->state[i]);
    return status;
}

/* Whether the optimiser changes this part of the layer: then it lies within a parameter that it has. */
static bool is_trained(const rapt_optimizer *optimizer, const rapt_mha *layer, const rapt_tensor *part) {
    for (size_t i = 0; i < optimizer_count(optimizer); i++) {
        const optimizer_entry *entry = optimizer_entry_at(optimizer, i);
        uintptr_t begin = (uintptr_t)entry->parameter.data, at = (uintptr_t)part->data;
        size_t bytes = (size_t)entry->count * rapt_dtype_size(entry->parameter.dtype);
        if (entry->layer == layer && at >= begin && at - begin < bytes) return true;
    }
    return false;
}

/* Projections one by one, as the file may have them fused where the layer has not. Parts that are not trained stay: they
 * may lie in memory that nobody may write. */
static rapt_status take_layer(const loading *l, const optimizer_layer *item) {
    mha_parts file;
    rapt_status status = rapt_mha_find_parts(l->context, l->checkpoint, item->prefix, RAPT_SCHEME_PYTORCH, &file);
    const mha_parts *own = &item->layer->parts;
    const struct {
        const char *name;
        const rapt_tensor *from, *to;
    } parts[] = {
        {"q_proj.weight", &file.q.weight, &own->q.weight},
        {"q_proj.bias", &file.q.bias, &own->q.bias},
        {"k_proj.weight", &file.k.weight, &own->k.weight},
        {"k_proj.bias", &file.k.bias, &own->k.bias},
        {"v_proj.weight", &file.v.weight, &own->v.weight},
        {"v_proj.bias", &file.v.bias, &own->v.bias},
        {"out_proj.weight", &file.out.weight, &own->out.weight},
        {"out_proj.bias", &file.out.bias, &own->out.bias},
        {"bias_k", &file.bias_k, &own->bias_k},
        {"bias_v", &file.bias_v, &own->bias_v},
    };
    for (size_t i = 0; status == RAPT_OK && i < sizeof parts / sizeof *parts; i++) {
        char text[RAPT_SHOWN_SIZE], name[RAPT_SHOWN_SIZE + 16];
        if (parts[i].to->data == NULL || !is_trained(l->optimizer, item->layer, parts[i].to)) continue;
        snprintf(name, sizeof name, "%s%s", rapt_shown(item->prefix, text), parts[i].name);
        status = parts[i].from->data == NULL
                     ? rapt_fail(l->context, RAPT_ERROR_ABSENT, "the checkpoint has no tensor '%s'", name)
                     : take(l, name, parts[i].from, parts[i].to);
    }
    return status;
}

static rapt_status take_all(const loading *l) {
    rapt_status status = RAPT_OK;
    for (size_t i = 0; status == RAPT_OK && i < optimizer_count(l->optimizer); i++)
        status = take_entry(l, optimizer_entry_at(l->optimizer, i));
    for (size_t i = 0; status == RAPT_OK && i < l->optimizer->layers.count; i++)
        status = take_layer(l, optimizer_layer_at(l->optimizer, i));
    return status;
}

/* A state that nobody asked for: the file is of an optimiser with other parameters, or with momentum. */
static rapt_status check_no_more(const loading *l) {
    int64_t states = 0, asked_for = 0;
    const checkpoint_tensor *last = NULL;
    for (size_t i = 0; i < optimizer_count(l->optimizer); i++)
        for (int k = 0; k < OPTIMIZER_MAX_STATES; k++)
            asked_for += optimizer_entry_at(l->optimizer, i)->state_name[k] != NULL;
    for (size_t i = 0; i < l->checkpoint->tensors.count; i++) {
        const checkpoint_tensor *tensor = rapt_table_at(&l->checkpoint->tensors, i);
        if (strncmp(tensor->name, RAPT_STATE_PREFIX, sizeof RAPT_STATE_PREFIX - 1) != 0) continue;
        states++;
        last = tensor;
    }
    if (states == asked_for) return RAPT_OK;
    char text[RAPT_SHOWN_SIZE];
    return rapt_fail(l->context, RAPT_ERROR_ARGUMENT,
                     "the checkpoint has %" PRId64
                     " tensors of an optimiser's state (the last is '%s'), expected %" PRId64,
                     states, last == NULL ? "" : rapt_shown(last->name, text), asked_for);
}

static const char *find_text(const rapt_checkpoint *checkpoint) {
    const char *text = NULL;
    for (size_t i = 0; text == NULL && i < checkpoint->shards.count; i++)
        text = rapt_safetensors_metadata(((const checkpoint_shard *)rapt_table_at(&checkpoint->shards, i))->file,
                                         OPTIMIZER_KEY);
    return text;
}

/* The number of steps in a text about an optimiser of this kind, -1 if it is none. */
static int64_t steps_in(const char *text, rapt_optimizer_kind kind) {
    char begin[OPTIMIZER_TEXT];
    size_t length = (size_t)snprintf(begin, sizeof begin, TEXT_BEGIN, kind_name(kind));
    if (strncmp(text, begin, length) != 0) return -1;
    const char *digit = text + length;
    int64_t steps = *digit == '\0' ? -1 : 0;
    for (; *digit >= '0' && *digit <= '9' && steps < INT64_MAX / 100; digit++) steps = steps * 10 + (*digit - '0');
    return *digit == '\0' ? steps : -1;
}

static rapt_status read_text(const loading *l, int64_t *steps) {
    const char *text = find_text(l->checkpoint);
    if (text == NULL)
        return rapt_fail(l->context, RAPT_ERROR_ABSENT,
                         "the checkpoint has no metadata '" OPTIMIZER_KEY "': rapt_optimizer_save did not write it");
    rapt_optimizer_kind kind = l->optimizer->config.kind, other = kind == RAPT_SGD ? RAPT_ADAMW : RAPT_SGD;
    *steps = steps_in(text, kind);
    if (*steps >= 0) return RAPT_OK;
    if (steps_in(text, other) >= 0)
        return rapt_fail(l->context, RAPT_ERROR_ARGUMENT, "the checkpoint is of kind %s, the optimiser of kind %s",
                         kind_name(other), kind_name(kind));
    char shown[RAPT_SHOWN_SIZE];
    return rapt_fail(l->context, RAPT_ERROR_FORMAT, "metadata '" OPTIMIZER_KEY "': Rapt %s cannot read '%s'",
                     rapt_version(), rapt_shown(text, shown));
}

static rapt_status load(loading *l) {
    int64_t steps = 0;
    rapt_status status = read_text(l, &steps);
    if (status == RAPT_OK) status = take_all(l);
    if (status == RAPT_OK) status = check_no_more(l);
    if (status != RAPT_OK) return status;
    l->copies = true;
    status = take_all(l);
    l->optimizer->steps = steps;
    for (size_t i = 0; i < l->optimizer->layers.count; i++)
        rapt_mha_pack(l->context, optimizer_layer_at(l->optimizer, i)->layer);
    return status;
}

rapt_status rapt_optimizer_load(rapt_context *context, rapt_optimizer *optimizer, const rapt_checkpoint *checkpoint) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    loading l = {.context = context, .optimizer = optimizer, .checkpoint = checkpoint};
    const char *null = optimizer == NULL ? "optimizer" : checkpoint == NULL ? "checkpoint" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : load(&l);
    return rapt_leave(context, &call, status);
}
