/* checkpoint_index.c - checkpoints of several files, tied together by an index
 *
 *     {"metadata": {"total_size": 123}, "weight_map": {"tensor": "model-00001-of-00002.safetensors", ...}}
 *
 * The index comes from strangers as the files do. It may name files beside itself and nowhere else.
 */
#include "checkpoint.h"

#include "json.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- the index ---- */

typedef struct index_reader {
    rapt_json json;
    const rapt_allocator *allocator;
    rapt_table *entries;
} index_reader;

static rapt_status check_file_name(const rapt_json *j, const char *name) {
    bool is_beside = *name != '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strpbrk(name, "/\\") == NULL;
    if (is_beside) return RAPT_OK;
    char text[RAPT_SHOWN_SIZE];
    return rapt_json_wrong(j, j->token, "'%s' is no name of a file beside the index", rapt_shown(name, text));
}

static rapt_status read_weight_map(index_reader *r) {
    index_entry entry = {0};
    rapt_status status = rapt_json_first_key(&r->json, &entry.name);
    while (status == RAPT_OK && entry.name != NULL) {
        entry.at = r->json.token;
        status = rapt_json_string(&r->json, &entry.file);
        if (status == RAPT_OK) status = check_file_name(&r->json, entry.file);
        if (status == RAPT_OK) status = rapt_table_add(r->json.context, r->allocator, r->entries, &entry);
        if (status == RAPT_OK) status = rapt_json_next_key(&r->json, &entry.name);
    }
    return status;
}

static rapt_status read_object(index_reader *r) {
    rapt_json *j = &r->json;
    bool has_map = false, has_metadata = false;
    char text[RAPT_SHOWN_SIZE];
    const char *key;
    rapt_status status = rapt_json_first_key(j, &key);
    while (status == RAPT_OK && key != NULL) {
        bool is_map = strcmp(key, "weight_map") == 0, is_metadata = strcmp(key, "metadata") == 0;
        if (!is_map && !is_metadata)
            return rapt_json_wrong(j, j->token, "the key '%s' should not be there", rapt_shown(key, text));
        if ((is_map && has_map) || (is_metadata && has_metadata))
            return rapt_json_wrong(j, j->token, "the key '%s' is there twice", key);
        has_map |= is_map;
        has_metadata |= is_metadata;
        status = is_map ? read_weight_map(r) : rapt_json_skip_value(j);
        if (status == RAPT_OK) status = rapt_json_next_key(j, &key);
    }
    if (status != RAPT_OK) return status;
    if (!has_map) return rapt_json_wrong(j, j->at, "there is no weight_map");
    return rapt_json_ends(j) ? RAPT_OK : rapt_json_wrong(j, j->at, "something follows the index");
}

rapt_status rapt_index_read(rapt_context *context, const rapt_allocator *allocator, const void *json, size_t size,
                            rapt_table *entries, char **text, size_t *text_size) {
    if (size > RAPT_SAFETENSORS_MAX_HEADER)
        return rapt_fail(context, RAPT_ERROR_FORMAT, "index: %zu bytes, at most %d are allowed", size,
                         RAPT_SAFETENSORS_MAX_HEADER);
    *text = rapt_allocate(allocator, size);
    if (*text == NULL) return rapt_fail_memory(context, size);
    *text_size = size;
    index_reader r = {.allocator = allocator,
                      .entries = entries,
                      .json = {.context = context, .format = "index", .bytes = json, .length = size, .text = *text}};
    rapt_status status = read_object(&r);
    if (status == RAPT_OK) status = rapt_table_make_index(context, allocator, entries);
    if (status != RAPT_OK) return status;
    const index_entry *twice = rapt_table_sort_by_name(entries);
    char shown_name[RAPT_SHOWN_SIZE];
    if (twice == NULL) return RAPT_OK;
    return rapt_json_wrong(&r.json, twice->at, "tensor '%s' is there twice", rapt_shown(twice->name, shown_name));
}

/* ---- the files ---- */

static rapt_status open_shard(rapt_context *context, const char *path, const char *name, rapt_checkpoint *checkpoint) {
    checkpoint_shard shard = {.name = name};
    rapt_status status = rapt_safetensors_read(context, path, NULL, 0, &shard.file);
    if (status == RAPT_ERROR_FORMAT) { /* the other messages name the file, or do not need to */
        char text[RAPT_SHOWN_SIZE], message[sizeof context->message];
        memcpy(message, context->message, sizeof message);
        return rapt_fail(context, status, "file '%s': %s", rapt_shown(name, text), message);
    }
    if (status == RAPT_OK) {
        status = rapt_table_add(context, &checkpoint->allocator, &checkpoint->shards, &shard);
        if (status != RAPT_OK) rapt_safetensors_close(shard.file);
    }
    return status;
}

static int compare_files(const void *a, const void *b) {
    const index_entry *x = a, *y = b;
    return strcmp(x->file, y->file);
}

/* Each file once. Leaves the index of `entries` sorted by file, and that of the shards by name. */
static rapt_status open_files(rapt_context *context, const char *path, rapt_table *entries,
                              rapt_checkpoint *checkpoint) {
    const char *slash = strrchr(path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash - path + 1), longest = 0;
    for (size_t i = 0; i < entries->count; i++) {
        size_t length = strlen(((const index_entry *)entries->index[i])->file);
        if (length > longest) longest = length;
    }
    size_t size = folder + longest + 1;
    char *shard_path = rapt_allocate(&checkpoint->allocator, size);
    if (shard_path == NULL) return rapt_fail_memory(context, size);
    memcpy(shard_path, path, folder);
    rapt_table_sort(entries, compare_files);
    rapt_status status = RAPT_OK;
    for (size_t i = 0; status == RAPT_OK && i < entries->count; i++) {
        const index_entry *entry = entries->index[i];
        if (i > 0 && compare_files(entry, entries->index[i - 1]) == 0) continue;
        memcpy(shard_path + folder, entry->file, strlen(entry->file) + 1);
        status = open_shard(context, shard_path, entry->file, checkpoint);
    }
    rapt_release(&checkpoint->allocator, shard_path, size);
    return status == RAPT_OK ? rapt_table_make_index(context, &checkpoint->allocator, &checkpoint->shards) : status;
}

/* In the order of the index. */
static rapt_status list_tensors(rapt_context *context, const rapt_table *entries, rapt_checkpoint *checkpoint) {
    rapt_status status = RAPT_OK;
    for (size_t i = 0; status == RAPT_OK && i < entries->count; i++) {
        const index_entry *entry = rapt_table_at(entries, i);
        const checkpoint_shard *shard = rapt_table_find(&checkpoint->shards, entry->file);
        checkpoint_tensor tensor = {.file = shard->file, .entry = rapt_safetensors_entry_of(shard->file, entry->name)};
        if (tensor.entry == NULL) {
            char shown_name[RAPT_SHOWN_SIZE], shown_file[RAPT_SHOWN_SIZE];
            return rapt_fail(context, RAPT_ERROR_FORMAT, "index: byte %zu: tensor '%s' is not in its file '%s'",
                             entry->at, rapt_shown(entry->name, shown_name), rapt_shown(entry->file, shown_file));
        }
        tensor.name = tensor.entry->name;
        status = rapt_table_add(context, &checkpoint->allocator, &checkpoint->tensors, &tensor);
    }
    return status;
}

rapt_status rapt_checkpoint_open_shards(rapt_context *context, const char *path, rapt_checkpoint *checkpoint) {
    os_file_map map;
    const char *reason = os_file_map_open(path, &map);
    if (reason != NULL) return rapt_fail(context, RAPT_ERROR_FILE, "cannot read '%.300s': %s", path, reason);
    rapt_table entries = {.item_size = sizeof(index_entry)};
    rapt_status status = rapt_index_read(context, &checkpoint->allocator, map.data, map.size, &entries,
                                         &checkpoint->text, &checkpoint->text_size);
    os_file_map_close(&map);
    if (status == RAPT_OK) status = open_files(context, path, &entries, checkpoint);
    if (status == RAPT_OK) status = list_tensors(context, &entries, checkpoint);
    rapt_table_free(&entries, &checkpoint->allocator);
    return status;
}
