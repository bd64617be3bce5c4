/* checkpoint_layers.c - attention layers in a checkpoint, found by the names of their tensors */
#include "checkpoint.h"

#include "json.h"

#include <inttypes.h>
#include <stdio.h>

enum { LONGEST_BELOW_PREFIX = 32 }; /* of all names in the layouts, and of RAPT_SETTINGS_KEY */

/* ---- finding ---- */

typedef struct search {
    rapt_context *context;
    rapt_checkpoint *checkpoint;
    char *name; /* room for any name that can be there */
    size_t name_size;
} search;

/* The tensor `name` below a prefix, which need not end where its length says. NULL if there is none. */
static const checkpoint_tensor *below(const search *s, const char *prefix, size_t length, const char *name) {
    if (name == NULL) return NULL;
    memcpy(s->name, prefix, length);
    memcpy(s->name + length, name, strlen(name) + 1);
    return rapt_table_find(&s->checkpoint->tensors, s->name);
}

/* The length of the prefix before `anchor`, if that is how the name ends; -1 if not. */
static int64_t prefix_length(const char *name, const char *anchor) {
    size_t length = strlen(name), tail = strlen(anchor);
    if (length < tail || strcmp(name + length - tail, anchor) != 0) return -1;
    size_t prefix = length - tail;
    return prefix == 0 || name[prefix - 1] == '.' ? (int64_t)prefix : -1;
}

/* The metadata num_heads, if it is a whole number from 1 on: a line of the user's, so anything else says nothing. */
static int64_t written_heads(const rapt_safetensors *file) {
    const char *text = rapt_safetensors_metadata(file, "num_heads");
    int64_t heads = 0;
    if (text == NULL || strlen(text) > 9) return RAPT_DEFAULT;
    for (; *text >= '0' && *text <= '9'; text++) heads = 10 * heads + (*text - '0');
    return *text == '\0' && heads > 0 ? heads : RAPT_DEFAULT;
}

/* Adds the layer that `anchor`, a tensor in the place of the first weight, belongs to, if it is whole. */
static rapt_status add_if_whole(const search *s, const rapt_layout *layout, const checkpoint_tensor *anchor,
                                size_t length) {
    checkpoint_layer layer = {.prefix = anchor->name, .prefix_length = length, .layout = layout};
    for (int i = 0; i < 4; i++) {
        layer.weight[i] = below(s, anchor->name, length, layout->weight[i]);
        layer.bias[i] = below(s, anchor->name, length, layout->bias[i]);
        if (layout->weight[i] != NULL && layer.weight[i] == NULL) return RAPT_OK;
    }
    for (int i = 0; i < 2; i++) layer.bias_kv[i] = below(s, anchor->name, length, layout->bias_kv[i]);
    snprintf(s->name, s->name_size, "%s%.*s", RAPT_SETTINGS_KEY, (int)length, anchor->name);
    layer.settings = rapt_safetensors_metadata(anchor->file, s->name);
    layer.num_heads = written_heads(anchor->file);
    return rapt_table_add(s->context, &s->checkpoint->allocator, &s->checkpoint->layers, &layer);
}

static rapt_status find_all(const search *s) {
    rapt_status status = RAPT_OK;
    for (size_t i = 0; i < s->checkpoint->tensors.count; i++) {
        const checkpoint_tensor *tensor = rapt_table_at(&s->checkpoint->tensors, i);
        for (int l = 0; status == RAPT_OK && l < RAPT_LAYOUTS; l++) {
            int64_t length = prefix_length(tensor->name, rapt_layouts[l].weight[0]);
            if (length >= 0) status = add_if_whole(s, &rapt_layouts[l], tensor, (size_t)length);
        }
    }
    return status;
}

/* Prefixes become strings of their own. */
static rapt_status end_prefixes(rapt_context *context, rapt_checkpoint *checkpoint) {
    rapt_table *layers = &checkpoint->layers;
    size_t total = 0;
    for (size_t i = 0; i < layers->count; i++)
        total += ((const checkpoint_layer *)rapt_table_at(layers, i))->prefix_length + 1;
    checkpoint->prefixes = rapt_allocate(&checkpoint->allocator, total);
    if (checkpoint->prefixes == NULL) return rapt_fail_memory(context, total);
    checkpoint->prefixes_size = total;
    char *next = checkpoint->prefixes;
    for (size_t i = 0; i < layers->count; i++) {
        checkpoint_layer *layer = (checkpoint_layer *)(void *)(layers->items + i * layers->item_size);
        memcpy(next, layer->prefix, layer->prefix_length);
        next[layer->prefix_length] = '\0';
        layer->prefix = next;
        next += layer->prefix_length + 1;
    }
    return RAPT_OK;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static size_t digits_at(const char *text) {
    size_t count = 0;
    while (is_digit(text[count])) count++;
    return count;
}

/* Numbers by their value, the rest by its bytes: "h.2." before "h.10.". */
static int compare_natural(const char *a, const char *b) {
    const char *x = a, *y = b;
    while (*x != '\0' && *y != '\0') {
        if (is_digit(*x) && is_digit(*y)) {
            while (*x == '0') x++;
            while (*y == '0') y++;
            size_t length = digits_at(x), other = digits_at(y);
            int order = length != other ? (length < other ? -1 : 1) : strncmp(x, y, length);
            if (order != 0) return order;
            x += length;
            y += other;
        } else if (*x != *y) {
            break;
        } else {
            x++;
            y++;
        }
    }
    int order = strcmp(x, y);
    return order != 0 ? order : strcmp(a, b); /* "h.01." and "h.1." are two */
}

static int compare_layers(const void *a, const void *b) {
    const checkpoint_layer *x = a, *y = b;
    int order = compare_natural(x->prefix, y->prefix);
    return order != 0 ? order : (x->layout > y->layout) - (x->layout < y->layout);
}

rapt_status rapt_checkpoint_find_layers(rapt_context *context, rapt_checkpoint *checkpoint) {
    search s = {.context = context, .checkpoint = checkpoint};
    s.name_size = checkpoint->longest_name + LONGEST_BELOW_PREFIX;
    s.name = rapt_allocate(&checkpoint->allocator, s.name_size);
    if (s.name == NULL) return rapt_fail_memory(context, s.name_size);
    rapt_status status = find_all(&s);
    rapt_release(&checkpoint->allocator, s.name, s.name_size);
    if (status == RAPT_OK) status = end_prefixes(context, checkpoint);
    if (status == RAPT_OK) status = rapt_table_make_index(context, &checkpoint->allocator, &checkpoint->layers);
    if (status == RAPT_OK) rapt_table_sort(&checkpoint->layers, compare_layers);
    return status;
}

int64_t rapt_checkpoint_num_layers(const rapt_checkpoint *checkpoint) {
    return checkpoint == NULL ? 0 : (int64_t)checkpoint->layers.count;
}

/* ---- choosing ---- */

rapt_status rapt_check_prefix(rapt_context *context, const char *prefix) {
    size_t length = prefix == NULL ? 0 : strlen(prefix);
    if (length > 0 && !rapt_is_utf8(prefix))
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "prefix is not valid UTF-8");
    if (length == 0 || prefix[length - 1] == '.') return RAPT_OK;
    char text[RAPT_SHOWN_SIZE];
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "prefix is '%s', expected one that ends in a dot, or \"\"",
                     rapt_shown(prefix, text));
}

rapt_status rapt_check_scheme(rapt_context *context, rapt_scheme scheme) {
    if (rapt_is_scheme(scheme)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "scheme is %d, which is no rapt_scheme", (int)scheme);
}

/* The layout that comes closest below a prefix, and its first weight that is not there. */
typedef struct near_miss {
    const rapt_layout *layout;
    int present; /* weights */
    const char *missing;
} near_miss;

static near_miss find_near_miss(const search *s, const char *prefix, rapt_scheme scheme) {
    near_miss best = {0};
    for (int l = 0; l < RAPT_LAYOUTS; l++) {
        const rapt_layout *layout = &rapt_layouts[l];
        if (scheme != RAPT_SCHEME_AUTO && layout->scheme != scheme) continue;
        near_miss miss = {.layout = layout};
        for (int i = 3; i >= 0; i--) {
            if (below(s, prefix, strlen(prefix), layout->weight[i]) != NULL) {
                miss.present++;
            } else if (layout->weight[i] != NULL) {
                miss.missing = layout->weight[i];
            }
        }
        if (miss.present > best.present) best = miss;
    }
    return best;
}

static rapt_status fail_absent(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                               rapt_scheme scheme) {
    const rapt_table *layers = &checkpoint->layers;
    char text[RAPT_SHOWN_SIZE], first[RAPT_SHOWN_SIZE];
    const char *scheme_words = scheme == RAPT_SCHEME_AUTO ? "any scheme" : rapt_scheme_name(scheme);
    if (prefix != NULL) {
        size_t size = rapt_size_add(strlen(prefix), LONGEST_BELOW_PREFIX);
        if (!rapt_arena_reserve(&context->arena, &context->allocator, size)) return rapt_fail_memory(context, size);
        search s = {.context = context, .checkpoint = (rapt_checkpoint *)(uintptr_t)checkpoint, .name_size = size};
        s.name = rapt_arena_take(&context->arena, size);
        near_miss miss = find_near_miss(&s, prefix, scheme);
        if (miss.present > 0)
            return rapt_fail(context, RAPT_ERROR_ABSENT, "the layer '%s' is not whole: %s names want a tensor '%s%s'",
                             rapt_shown(prefix, text), rapt_scheme_name(miss.layout->scheme), text, miss.missing);
    }
    if (layers->count == 0)
        return rapt_fail(context, RAPT_ERROR_ABSENT, "the checkpoint has no attention layer by the names of %s",
                         scheme_words);
    const checkpoint_layer *layer = layers->index[0];
    return rapt_fail(context, RAPT_ERROR_ABSENT,
                     "the checkpoint has no attention layer '%s' by the names of %s; the first of its %zu is '%s' (%s)",
                     prefix == NULL ? "" : rapt_shown(prefix, text), scheme_words, layers->count,
                     rapt_shown(layer->prefix, first), rapt_scheme_name(layer->layout->scheme));
}

static rapt_status fail_ambiguous(rapt_context *context, size_t matches, const checkpoint_layer *first,
                                  const checkpoint_layer *last) {
    char a[RAPT_SHOWN_SIZE], b[RAPT_SHOWN_SIZE];
    if (strcmp(first->prefix, last->prefix) != 0)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "the checkpoint has %zu attention layers, from '%s' to '%s': choose one by its prefix",
                         matches, rapt_shown(first->prefix, a), rapt_shown(last->prefix, b));
    return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                     "the layer '%s' is there by the names of %s (%s) and of %s (%s): choose one by its scheme",
                     rapt_shown(first->prefix, a), rapt_scheme_name(first->layout->scheme), first->layout->weight[0],
                     rapt_scheme_name(last->layout->scheme), last->layout->weight[0]);
}

rapt_status rapt_checkpoint_choose(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                                   rapt_scheme scheme, const checkpoint_layer **chosen) {
    rapt_status status = rapt_check_prefix(context, prefix);
    if (status == RAPT_OK) status = rapt_check_scheme(context, scheme);
    if (status != RAPT_OK) return status;
    const checkpoint_layer *first = NULL, *last = NULL;
    size_t matches = 0;
    for (size_t i = 0; i < checkpoint->layers.count; i++) {
        const checkpoint_layer *layer = checkpoint->layers.index[i];
        if (prefix != NULL && strcmp(prefix, layer->prefix) != 0) continue;
        if (scheme != RAPT_SCHEME_AUTO && scheme != layer->layout->scheme) continue;
        matches++;
        if (first == NULL) first = layer;
        last = layer;
    }
    if (matches == 0) return fail_absent(context, checkpoint, prefix, scheme);
    if (matches > 1) return fail_ambiguous(context, matches, first, last);
    *chosen = first;
    return RAPT_OK;
}

/* ---- what else is below a prefix ---- */

int64_t rapt_checkpoint_count_extra(const rapt_checkpoint *checkpoint, const checkpoint_layer *layer,
                                    const checkpoint_tensor **first) {
    const rapt_table *tensors = &checkpoint->tensors;
    int64_t count = 0;
    *first = NULL;
    for (size_t i = rapt_table_first_from(tensors, layer->prefix); i < tensors->count; i++) {
        const checkpoint_tensor *tensor = tensors->index[i];
        if (strncmp(tensor->name, layer->prefix, layer->prefix_length) != 0) break;
        const char *name = tensor->name + layer->prefix_length;
        if (rapt_layout_has(layer->layout, name) || rapt_is_bystander(name)) continue;
        if (count++ == 0) *first = tensor;
    }
    return count;
}
