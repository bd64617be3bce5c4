/* checkpoint.h - what the files about checkpoints share
 *
 * checkpoint.c opens files and lists their tensors, checkpoint_index.c reads what ties several files together,
 * checkpoint_layers.c finds attention layers among the names; mha_load.c and mha_save.c turn them into layers and back.
 */
#ifndef RAPT_CHECKPOINT_H
#define RAPT_CHECKPOINT_H

#include "mha.h"
#include "safetensors.h"
#include "schemes.h"
#include "table.h"

typedef struct checkpoint_shard {
    const char *name; /* first, see table.h; of the file, "" where there is only one */
    rapt_safetensors *file;
} checkpoint_shard;

typedef struct checkpoint_tensor {
    const char *name; /* first, see table.h */
    const rapt_safetensors *file;
    const safetensors_entry *entry;
} checkpoint_tensor;

/* A layer that is there by its names; whether its shapes make sense is seen when somebody asks. */
typedef struct checkpoint_layer {
    const char *prefix; /* first, see table.h */
    size_t prefix_length;
    const rapt_layout *layout;
    const checkpoint_tensor *weight[4], *bias[4], *bias_kv[2]; /* in the layout's places; NULL: absent */
    const char *settings;                                      /* what Rapt wrote about the layer; NULL: nothing */
    int64_t num_heads; /* what whoever else wrote the file says of all its layers; RAPT_DEFAULT: nothing */
} checkpoint_layer;

struct rapt_checkpoint {
    rapt_allocator allocator; /* a copy, as a checkpoint may outlive its context */
    rapt_table shards, tensors, layers;
    char *text; /* of the index: the shards' names */
    size_t text_size;
    char *prefixes; /* of the layers */
    size_t prefixes_size;
    size_t longest_name;
};

/* ---- the index: checkpoint_index.c ---- */

typedef struct index_entry {
    const char *name; /* of a tensor; first, see table.h */
    const char *file;
    size_t at; /* of the name in the JSON */
} index_entry;

/* The entries of an index, sorted by name. Their strings lie in *text, which the caller frees like the table, also
 * after a failure. */
rapt_status rapt_index_read(rapt_context *context, const rapt_allocator *allocator, const void *json, size_t size,
                            rapt_table *entries, char **text, size_t *text_size);
/* Opens the files that the index at `path` names, and lists its tensors. */
rapt_status rapt_checkpoint_open_shards(rapt_context *context, const char *path, rapt_checkpoint *checkpoint);

/* ---- layers: checkpoint_layers.c ---- */

/* Lists every prefix below which all weights of a layout are there. */
rapt_status rapt_checkpoint_find_layers(rapt_context *context, rapt_checkpoint *checkpoint);
/* The one layer with this prefix (NULL: any) and scheme (RAPT_SCHEME_AUTO: any). */
rapt_status rapt_checkpoint_choose(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                                   rapt_scheme scheme, const checkpoint_layer **layer);
/* How many tensors below the layer's prefix may change what it computes and are not in its layout; the first of them. */
int64_t rapt_checkpoint_count_extra(const rapt_checkpoint *checkpoint, const checkpoint_layer *layer,
                                    const checkpoint_tensor **first);
rapt_status rapt_check_prefix(rapt_context *context, const char *prefix); /* "" or one that ends in a dot */
rapt_status rapt_check_scheme(rapt_context *context, rapt_scheme scheme);

/* The layer's weights as views into the file, possibly unaligned and of several dtypes: mha_load.c */
rapt_status rapt_mha_find_parts(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                                rapt_scheme scheme, mha_parts *parts);

/* What rapt_mha_save writes of a layer unless told otherwise; returns how many tensors that is: mha_save.c */
enum { RAPT_LAYER_SOURCES = 10 }; /* at most: four weights, four biases, bias_k and bias_v */
int64_t rapt_mha_list_sources(const rapt_mha *layer, const char *prefix,
                              safetensors_source sources[RAPT_LAYER_SOURCES]);

/* ---- settings that no tensor shows, as text in a file's metadata: settings_text.c ---- */

#define RAPT_SETTINGS_KEY "rapt.mha:" /* and the layer's prefix */
#define RAPT_SETTINGS_SIZE 256
void rapt_settings_write(const rapt_mha_config *config, char text[RAPT_SETTINGS_SIZE]);
/* Sets the config's fields that the text names. `prefix` is for messages. */
rapt_status rapt_settings_read(rapt_context *context, const char *prefix, const char *text, rapt_mha_config *config);

#endif
