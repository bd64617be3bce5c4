/* checkpoint.c - checkpoints: opening and closing them, and their tensors */
#include "checkpoint.h"

#include "json.h"

/* ---- opening and closing ---- */

static rapt_status list_tensors(rapt_context *context, rapt_checkpoint *checkpoint, const rapt_safetensors *file) {
    rapt_status status = RAPT_OK;
    for (int64_t i = 0; status == RAPT_OK && i < rapt_safetensors_count(file); i++) {
        const safetensors_entry *entry = rapt_safetensors_entry_at(file, (size_t)i);
        checkpoint_tensor tensor = {.name = entry->name, .file = file, .entry = entry};
        status = rapt_table_add(context, &checkpoint->allocator, &checkpoint->tensors, &tensor);
    }
    return status;
}

/* One file, at a path or in memory. */
static rapt_status open_single(rapt_context *context, rapt_checkpoint *checkpoint, const char *path, const void *data,
                               size_t size) {
    checkpoint_shard shard = {.name = ""};
    rapt_status status = rapt_safetensors_read(context, path, data, size, &shard.file);
    if (status != RAPT_OK) return status;
    status = rapt_table_add(context, &checkpoint->allocator, &checkpoint->shards, &shard);
    if (status != RAPT_OK) {
        rapt_safetensors_close(shard.file);
        return status;
    }
    return list_tensors(context, checkpoint, shard.file);
}

static rapt_status index_tensors(rapt_context *context, rapt_checkpoint *checkpoint) {
    rapt_table *tensors = &checkpoint->tensors;
    rapt_status status = rapt_table_make_index(context, &checkpoint->allocator, tensors);
    if (status != RAPT_OK) return status;
    rapt_table_sort_by_name(tensors);
    for (size_t i = 0; i < tensors->count; i++) {
        size_t length = strlen(rapt_table_name(tensors->index[i]));
        if (length > checkpoint->longest_name) checkpoint->longest_name = length;
    }
    return rapt_checkpoint_find_layers(context, checkpoint);
}

static bool is_index(const char *path) {
    size_t length = strlen(path);
    return length >= 5 && strcmp(path + length - 5, ".json") == 0;
}

static rapt_status open_checkpoint(rapt_context *context, const char *path, const void *data, size_t size,
                                   rapt_checkpoint **opened) {
    rapt_checkpoint *checkpoint = rapt_allocate(&context->allocator, sizeof *checkpoint);
    if (checkpoint == NULL) return rapt_fail_memory(context, sizeof *checkpoint);
    *checkpoint = (rapt_checkpoint){.allocator = context->allocator,
                                    .shards.item_size = sizeof(checkpoint_shard),
                                    .tensors.item_size = sizeof(checkpoint_tensor),
                                    .layers.item_size = sizeof(checkpoint_layer)};
    rapt_status status = path != NULL && is_index(path) ? rapt_checkpoint_open_shards(context, path, checkpoint)
                                                        : open_single(context, checkpoint, path, data, size);
    if (status == RAPT_OK) status = index_tensors(context, checkpoint);
    if (status != RAPT_OK) rapt_checkpoint_close(checkpoint);
    if (status == RAPT_OK) *opened = checkpoint;
    return status;
}

static rapt_status open_checked(rapt_context *context, const char *source_name, const char *path, const void *data,
                                size_t size, rapt_checkpoint **checkpoint) {
    if (checkpoint != NULL) *checkpoint = NULL;
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = path == NULL && data == NULL ? source_name : checkpoint == NULL ? "checkpoint" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : open_checkpoint(context, path, data, size, checkpoint);
    return rapt_leave(context, &call, status);
}

rapt_status rapt_checkpoint_open(rapt_context *context, const char *path, rapt_checkpoint **checkpoint) {
    return open_checked(context, "path", path, NULL, 0, checkpoint);
}

rapt_status rapt_checkpoint_open_memory(rapt_context *context, const void *data, size_t size,
                                        rapt_checkpoint **checkpoint) {
    return open_checked(context, "data", NULL, data, size, checkpoint);
}

void rapt_checkpoint_close(rapt_checkpoint *checkpoint) {
    if (checkpoint == NULL) return;
    rapt_allocator allocator = checkpoint->allocator;
    for (size_t i = 0; i < checkpoint->shards.count; i++) {
        const checkpoint_shard *shard = rapt_table_at(&checkpoint->shards, i);
        rapt_safetensors_close(shard->file);
    }
    rapt_table_free(&checkpoint->shards, &allocator);
    rapt_table_free(&checkpoint->tensors, &allocator);
    rapt_table_free(&checkpoint->layers, &allocator);
    rapt_release(&allocator, checkpoint->text, checkpoint->text_size);
    rapt_release(&allocator, checkpoint->prefixes, checkpoint->prefixes_size);
    rapt_release(&allocator, checkpoint, sizeof *checkpoint);
}

/* ---- tensors ---- */

int64_t rapt_checkpoint_num_tensors(const rapt_checkpoint *checkpoint) {
    return checkpoint == NULL ? 0 : (int64_t)checkpoint->tensors.count;
}

const char *rapt_checkpoint_tensor_name(const rapt_checkpoint *checkpoint, int64_t index) {
    if (index < 0 || index >= rapt_checkpoint_num_tensors(checkpoint)) return NULL;
    return rapt_table_name(rapt_table_at(&checkpoint->tensors, (size_t)index));
}

static rapt_status find(rapt_context *context, const rapt_checkpoint *checkpoint, const char *name, rapt_tensor *view) {
    char text[RAPT_SHOWN_SIZE];
    const checkpoint_tensor *tensor = rapt_table_find(&checkpoint->tensors, name);
    if (tensor == NULL)
        return rapt_fail(context, RAPT_ERROR_ABSENT, "the checkpoint has no tensor '%s'", rapt_shown(name, text));
    return rapt_safetensors_aligned_view(context, tensor->file, tensor->entry, view);
}

rapt_status rapt_checkpoint_find(rapt_context *context, const rapt_checkpoint *checkpoint, const char *name,
                                 rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = checkpoint == NULL ? "checkpoint" : name == NULL ? "name" : view == NULL ? "view" : NULL;
    status =
        null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : find(context, checkpoint, name, view);
    return rapt_leave(context, &call, status);
}
