/* safetensors.c - a strict reader of safetensors files
 *
 * The format: a header length (8 bytes, little-endian), that many bytes of JSON, then the tensors' bytes to the end of
 * the file. The JSON is one object: for each tensor its name with dtype, shape and data_offsets, and optionally
 * "__metadata__" with strings. Files come from strangers, so nothing in them is believed before it is checked.
 */
#include "safetensors.h"

#include "json.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are views of little-endian files");

enum { LENGTH_BYTES = RAPT_SAFETENSORS_LENGTH_BYTES, MAX_HEADER = RAPT_SAFETENSORS_MAX_HEADER };

/* All that the reference implementation knows, which refuses a file with any other. */
static const safetensors_type types[] = {
    {"BOOL", 8, RAPT_BOOL}, {"F16", 16, RAPT_F16}, {"BF16", 16, RAPT_BF16},
    {"F32", 32, RAPT_F32},  {"F64", 64, RAPT_F64}, {"C64", 64, 0},
    {"U8", 8, 0},           {"U16", 16, 0},        {"U32", 32, 0},
    {"U64", 64, 0},         {"I8", 8, 0},          {"I16", 16, 0},
    {"I32", 32, 0},         {"I64", 64, 0},        {"F8_E4M3", 8, 0},
    {"F8_E5M2", 8, 0},      {"F8_E8M0", 8, 0},     {"F8_E4M3FNUZ", 8, 0},
    {"F8_E5M2FNUZ", 8, 0},  {"F6_E2M3", 6, 0},     {"F6_E3M2", 6, 0},
    {"F4", 4, 0},
};
enum { TYPES = sizeof types / sizeof *types };

typedef struct metadata_entry {
    const char *key; /* first, see table.h */
    const char *value;
    size_t at; /* of the key in the header's JSON */
} metadata_entry;

struct rapt_safetensors {
    rapt_allocator allocator; /* a copy, as the file may outlive its context */
    os_file_map map;
    bool mapped;
    const unsigned char *data; /* what follows the header */
    int64_t data_size;
    char *text; /* decoded strings */
    size_t text_size;
    rapt_table tensors, metadata;
};

typedef struct reader {
    rapt_json json;
    rapt_safetensors *file;
    bool has_metadata;
} reader;

/* Something is wrong with a tensor; `at` is the byte of the JSON that says so. */
static __attribute__((format(printf, 4, 5))) rapt_status wrong_tensor(const reader *r, const safetensors_entry *entry,
                                                                      size_t at, const char *format, ...) {
    char text[RAPT_SHOWN_SIZE], what[2 * RAPT_SHOWN_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return rapt_json_wrong(&r->json, at, "tensor '%s' %s", rapt_shown(entry->name, text), what);
}

const safetensors_type *rapt_safetensors_type(rapt_dtype dtype) {
    for (size_t i = 0; i < TYPES; i++)
        if (dtype != 0 && types[i].dtype == dtype) return &types[i];
    return NULL;
}

/* ---- the header ---- */

static rapt_status read_dtype(reader *r, safetensors_entry *entry) {
    const char *name = NULL;
    rapt_status status = rapt_json_string(&r->json, &name);
    if (status != RAPT_OK) return status;
    for (size_t i = 0; i < TYPES; i++)
        if (strcmp(name, types[i].name) == 0) entry->type = &types[i];
    if (entry->type != NULL) return RAPT_OK;
    char text[RAPT_SHOWN_SIZE];
    return wrong_tensor(r, entry, r->json.token, "has an unknown dtype '%s'", rapt_shown(name, text));
}

static rapt_status add_dimension(reader *r, safetensors_entry *entry, int64_t size) {
    /* In order: what follows a 0 does not make the number of elements overflow. */
    if (__builtin_mul_overflow(entry->elements, size, &entry->elements))
        return wrong_tensor(r, entry, r->json.token, "has a shape whose size overflows");
    if (size > 1 && __builtin_mul_overflow(entry->volume, size, &entry->volume)) entry->volume = INT64_MAX;
    if (entry->ndim < RAPT_MAX_DIMS) entry->shape[entry->ndim] = size;
    entry->ndim++;
    return RAPT_OK;
}

static rapt_status read_shape(reader *r, safetensors_entry *entry) {
    entry->has_shape = true;
    entry->elements = entry->volume = 1;
    rapt_status status = rapt_json_expect(&r->json, '[');
    if (status != RAPT_OK || rapt_json_take(&r->json, ']')) return status;
    do {
        int64_t size = 0;
        status = rapt_json_integer(&r->json, &size);
        if (status == RAPT_OK) status = add_dimension(r, entry, size);
    } while (status == RAPT_OK && rapt_json_take(&r->json, ','));
    return status == RAPT_OK ? rapt_json_expect(&r->json, ']') : status;
}

static rapt_status read_offsets(reader *r, safetensors_entry *entry) {
    entry->has_offsets = true;
    rapt_status status = rapt_json_expect(&r->json, '[');
    if (status == RAPT_OK) status = rapt_json_integer(&r->json, &entry->begin);
    if (status == RAPT_OK) status = rapt_json_expect(&r->json, ',');
    if (status == RAPT_OK) status = rapt_json_integer(&r->json, &entry->end);
    return status == RAPT_OK ? rapt_json_expect(&r->json, ']') : status;
}

static rapt_status read_property(reader *r, safetensors_entry *entry, const char *key) {
    bool dtype = strcmp(key, "dtype") == 0, shape = strcmp(key, "shape") == 0;
    bool offsets = strcmp(key, "data_offsets") == 0;
    if (dtype && entry->type == NULL) return read_dtype(r, entry);
    if (shape && !entry->has_shape) return read_shape(r, entry);
    if (offsets && !entry->has_offsets) return read_offsets(r, entry);
    char text[RAPT_SHOWN_SIZE];
    const char *problem = dtype || shape || offsets ? "twice" : "and should not";
    return wrong_tensor(r, entry, r->json.token, "has the key '%s' %s", rapt_shown(key, text), problem);
}

/* What can be said about a tensor without looking at the others. */
static rapt_status check_tensor(const reader *r, const safetensors_entry *entry) {
    if (entry->type == NULL) return wrong_tensor(r, entry, entry->at, "has no dtype");
    if (!entry->has_shape) return wrong_tensor(r, entry, entry->at, "has no shape");
    if (!entry->has_offsets) return wrong_tensor(r, entry, entry->at, "has no data_offsets");
    int64_t bits;
    if (__builtin_mul_overflow(entry->elements, entry->type->bits, &bits))
        return wrong_tensor(r, entry, entry->at, "has a shape whose size overflows");
    if (entry->begin > entry->end || entry->end > r->file->data_size)
        return wrong_tensor(r, entry, entry->at,
                            "has data_offsets [%" PRId64 ", %" PRId64 "] in %" PRId64 " bytes of data", entry->begin,
                            entry->end, r->file->data_size);
    if (bits % 8 != 0)
        return wrong_tensor(r, entry, entry->at,
                            "has %" PRId64 " elements of %" PRId64 " bits, which end within a byte", entry->elements,
                            entry->type->bits);
    int64_t needed = bits / 8, held = entry->end - entry->begin;
    if (needed == held) return RAPT_OK;
    return wrong_tensor(r, entry, entry->at, "needs %" PRId64 " bytes for its shape, it has %" PRId64, needed, held);
}

static rapt_status read_tensor(reader *r, const char *name) {
    safetensors_entry entry = {.name = name, .at = r->json.token};
    const char *key;
    rapt_status status = rapt_json_first_key(&r->json, &key);
    while (status == RAPT_OK && key != NULL) {
        status = read_property(r, &entry, key);
        if (status == RAPT_OK) status = rapt_json_next_key(&r->json, &key);
    }
    if (status == RAPT_OK) status = check_tensor(r, &entry);
    return status == RAPT_OK ? rapt_table_add(r->json.context, &r->file->allocator, &r->file->tensors, &entry) : status;
}

static rapt_status read_metadata(reader *r) {
    if (r->has_metadata) return rapt_json_wrong(&r->json, r->json.token, "__metadata__ is there twice");
    r->has_metadata = true;
    metadata_entry entry = {0};
    rapt_status status = rapt_json_first_key(&r->json, &entry.key);
    while (status == RAPT_OK && entry.key != NULL) {
        entry.at = r->json.token;
        status = rapt_json_string(&r->json, &entry.value);
        if (status == RAPT_OK)
            status = rapt_table_add(r->json.context, &r->file->allocator, &r->file->metadata, &entry);
        if (status == RAPT_OK) status = rapt_json_next_key(&r->json, &entry.key);
    }
    return status;
}

static rapt_status read_header(reader *r) {
    if (rapt_json_here(&r->json) != '{') return rapt_json_wrong(&r->json, 0, "the header does not start with '{'");
    const char *key;
    rapt_status status = rapt_json_first_key(&r->json, &key);
    while (status == RAPT_OK && key != NULL) {
        status = strcmp(key, "__metadata__") == 0 ? read_metadata(r) : read_tensor(r, key);
        if (status == RAPT_OK) status = rapt_json_next_key(&r->json, &key);
    }
    if (status != RAPT_OK) return status;
    while (rapt_json_take_byte(&r->json, ' ')) continue;
    if (rapt_json_here(&r->json) < 0) return RAPT_OK;
    return rapt_json_wrong(&r->json, r->json.at, "something other than spaces follows the header's '}'");
}

static int compare_offsets(const void *a, const void *b) {
    const safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Tensors in the order of their offsets fill the data without a hole, an overlap or a rest. Sorts the index so. */
static rapt_status check_coverage(const reader *r, rapt_table *tensors) {
    int64_t covered = 0;
    rapt_table_sort(tensors, compare_offsets);
    for (size_t i = 0; i < tensors->count; i++) {
        const safetensors_entry *entry = tensors->index[i];
        if (entry->begin != covered)
            return wrong_tensor(r, entry, entry->at, "%s: it begins at data byte %" PRId64 ", not %" PRId64,
                                entry->begin < covered ? "overlaps another" : "follows a hole", entry->begin, covered);
        covered = entry->end;
    }
    if (covered == r->file->data_size) return RAPT_OK;
    return rapt_json_wrong(&r->json, r->json.length + (size_t)covered, "%" PRId64 " bytes follow the last tensor",
                           r->file->data_size - covered);
}

static rapt_status index_file(const reader *r) {
    rapt_safetensors *file = r->file;
    rapt_status status = rapt_table_make_index(r->json.context, &file->allocator, &file->tensors);
    if (status == RAPT_OK) status = rapt_table_make_index(r->json.context, &file->allocator, &file->metadata);
    if (status != RAPT_OK) return status;
    char text[RAPT_SHOWN_SIZE];
    const metadata_entry *key = rapt_table_sort_by_name(&file->metadata);
    if (key != NULL) return rapt_json_wrong(&r->json, key->at, "metadata '%s' twice", rapt_shown(key->key, text));
    /* Names before offsets: of two tensors with one name it is the name that is wrong. */
    const safetensors_entry *tensor = rapt_table_sort_by_name(&file->tensors);
    if (tensor != NULL) return wrong_tensor(r, tensor, tensor->at, "is there twice");
    status = check_coverage(r, &file->tensors);
    rapt_table_sort_by_name(&file->tensors);
    return status;
}

/* ---- opening and closing ---- */

static rapt_status read_file(rapt_context *context, rapt_safetensors *file, const unsigned char *bytes, size_t size) {
    if (size < LENGTH_BYTES)
        return rapt_fail(context, RAPT_ERROR_FORMAT, "safetensors: byte 0: %zu bytes do not hold a header's length",
                         size);
    uint64_t length = 0;
    for (int i = LENGTH_BYTES; i-- > 0;) length = length << 8 | bytes[i];
    if (length > MAX_HEADER || length > size - LENGTH_BYTES)
        return rapt_fail(context, RAPT_ERROR_FORMAT,
                         "safetensors: byte 0: a header of %" PRIu64 " bytes in a file of %zu (at most %d are allowed)",
                         length, size, MAX_HEADER);
    file->data = bytes + LENGTH_BYTES + length;
    file->data_size = (int64_t)(size - LENGTH_BYTES - (size_t)length);
    file->text = rapt_allocate(&file->allocator, (size_t)length);
    if (file->text == NULL) return rapt_fail_memory(context, (size_t)length);
    file->text_size = (size_t)length;
    reader r = {.file = file,
                .json = {.context = context,
                         .format = "safetensors",
                         .bytes = bytes + LENGTH_BYTES,
                         .length = (size_t)length,
                         .offset = LENGTH_BYTES,
                         .text = file->text}};
    rapt_status status = read_header(&r);
    return status == RAPT_OK ? index_file(&r) : status;
}

rapt_status rapt_safetensors_read(rapt_context *context, const char *path, const void *data, size_t size,
                                  rapt_safetensors **opened) {
    rapt_safetensors *file = rapt_allocate(&context->allocator, sizeof *file);
    if (file == NULL) return rapt_fail_memory(context, sizeof *file);
    *file = (rapt_safetensors){.allocator = context->allocator, .map = {.data = data, .size = size}};
    file->tensors.item_size = sizeof(safetensors_entry);
    file->metadata.item_size = sizeof(metadata_entry);
    const char *reason = path == NULL ? NULL : os_file_map_open(path, &file->map);
    file->mapped = path != NULL && reason == NULL;
    rapt_status status = reason == NULL ? read_file(context, file, file->map.data, file->map.size)
                                        : rapt_fail(context, RAPT_ERROR_FILE, "cannot read '%.300s': %s", path, reason);
    if (status != RAPT_OK) rapt_safetensors_close(file);
    if (status == RAPT_OK) *opened = file;
    return status;
}

static rapt_status open_checked(rapt_context *context, const char *source_name, const char *path, const void *data,
                                size_t size, rapt_safetensors **file) {
    if (file != NULL) *file = NULL;
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = path == NULL && data == NULL ? source_name : file == NULL ? "file" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : rapt_safetensors_read(context, path, data, size, file);
    return rapt_leave(context, &call, status);
}

rapt_status rapt_safetensors_open(rapt_context *context, const char *path, rapt_safetensors **file) {
    return open_checked(context, "path", path, NULL, 0, file);
}

rapt_status rapt_safetensors_open_memory(rapt_context *context, const void *data, size_t size,
                                         rapt_safetensors **file) {
    return open_checked(context, "data", NULL, data, size, file);
}

void rapt_safetensors_close(rapt_safetensors *file) {
    if (file == NULL) return;
    rapt_allocator allocator = file->allocator;
    rapt_table_free(&file->tensors, &allocator);
    rapt_table_free(&file->metadata, &allocator);
    rapt_release(&allocator, file->text, file->text_size);
    if (file->mapped) os_file_map_close(&file->map);
    rapt_release(&allocator, file, sizeof *file);
}

/* ---- looking things up ---- */

int64_t rapt_safetensors_count(const rapt_safetensors *file) { return file == NULL ? 0 : (int64_t)file->tensors.count; }

const char *rapt_safetensors_name(const rapt_safetensors *file, int64_t index) {
    if (file == NULL || index < 0 || (uint64_t)index >= file->tensors.count) return NULL;
    return rapt_table_name(rapt_table_at(&file->tensors, (size_t)index));
}

const char *rapt_safetensors_metadata(const rapt_safetensors *file, const char *key) {
    if (file == NULL || key == NULL) return NULL;
    const metadata_entry *entry = rapt_table_find(&file->metadata, key);
    return entry == NULL ? NULL : entry->value;
}

const safetensors_entry *rapt_safetensors_entry_at(const rapt_safetensors *file, size_t index) {
    return rapt_table_at(&file->tensors, index);
}

const safetensors_entry *rapt_safetensors_entry_of(const rapt_safetensors *file, const char *name) {
    return rapt_table_find(&file->tensors, name);
}

rapt_status rapt_safetensors_view(rapt_context *context, const rapt_safetensors *file, const safetensors_entry *entry,
                                  rapt_tensor *view) {
    char text[RAPT_SHOWN_SIZE];
    if (entry->type->dtype == 0)
        return rapt_fail(context, RAPT_ERROR_DTYPE, "tensor '%s' has dtype %s, which Rapt lacks",
                         rapt_shown(entry->name, text), entry->type->name);
    if (entry->ndim > RAPT_MAX_DIMS)
        return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has %" PRId64 " dimensions, at most %d are possible",
                         rapt_shown(entry->name, text), entry->ndim, RAPT_MAX_DIMS);
    if (entry->volume >= INT64_MAX / (entry->type->bits / 8)) /* without elements; yet its strides would overflow */
        return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has a shape whose sizes overflow",
                         rapt_shown(entry->name, text));
    void *data = (void *)(uintptr_t)(file->data + entry->begin);
    *view = rapt_tensor_of(data, entry->type->dtype, (int32_t)entry->ndim, entry->shape);
    return RAPT_OK;
}

rapt_status rapt_safetensors_aligned_view(rapt_context *context, const rapt_safetensors *file,
                                          const safetensors_entry *entry, rapt_tensor *view) {
    rapt_tensor found = {0};
    rapt_status status = rapt_safetensors_view(context, file, entry, &found);
    if (status != RAPT_OK) return status;
    char text[RAPT_SHOWN_SIZE];
    int64_t size = entry->type->bits / 8; /* Rapt's own types are whole bytes */
    if ((uintptr_t)found.data % (uintptr_t)size != 0)
        return rapt_fail(context, RAPT_ERROR_LAYOUT, "tensor '%s' is not aligned to its %" PRId64 "-byte elements",
                         rapt_shown(entry->name, text), size);
    *view = found;
    return RAPT_OK;
}

static rapt_status find(rapt_context *context, const rapt_safetensors *file, const char *name, rapt_tensor *view) {
    char text[RAPT_SHOWN_SIZE];
    const safetensors_entry *entry = rapt_safetensors_entry_of(file, name);
    if (entry == NULL)
        return rapt_fail(context, RAPT_ERROR_ABSENT, "the file has no tensor '%s'", rapt_shown(name, text));
    return rapt_safetensors_aligned_view(context, file, entry, view);
}

rapt_status rapt_safetensors_find(rapt_context *context, const rapt_safetensors *file, const char *name,
                                  rapt_tensor *view) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = file == NULL ? "file" : name == NULL ? "name" : view == NULL ? "view" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null) : find(context, file, name, view);
    return rapt_leave(context, &call, status);
}
