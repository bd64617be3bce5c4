/* safetensors_write.c - writing safetensors files, all at once or not at all
 *
 * The header lists tensors in the order given; their bytes come by falling element size, so that each is aligned, after
 * a header padded to 8 bytes. What lies in memory as the file has it is written from there; the rest goes through a
 * buffer.
 */
#include "safetensors.h"

#include "json.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>

enum { BUFFER_SIZE = 1 << 16, ALIGNMENT = 8 };

/* ---- the header ---- */

/* Counts where there is no text to write into. */
typedef struct header {
    char *text;
    size_t used;
} header;

static void put_bytes(header *h, const char *bytes, size_t count) {
    if (h->text != NULL) memcpy(h->text + h->used, bytes, count);
    h->used = rapt_size_add(h->used, count);
}

static void put_text(header *h, const char *text) { put_bytes(h, text, strlen(text)); }

static void put_number(header *h, int64_t number) {
    char digits[24];
    put_bytes(h, digits, (size_t)snprintf(digits, sizeof digits, "%" PRId64, number));
}

/* Two strings in a row, as one in quotes. */
static void put_string(header *h, const char *first, const char *second) {
    put_text(h, "\"");
    for (int i = 0; i < 2; i++) {
        for (const char *c = i == 0 ? first : second; *c != '\0'; c++) {
            char escape[8];
            if (*c == '"' || *c == '\\') put_text(h, "\\");
            if ((unsigned char)*c < 0x20) {
                put_bytes(h, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*c));
            } else {
                put_bytes(h, c, 1);
            }
        }
    }
    put_text(h, "\"");
}

static int64_t size_along(const safetensors_source *source, int32_t dim) {
    int64_t size = source->piece[0].shape[dim];
    for (int32_t i = 1; dim == source->along && i < source->pieces; i++) size += source->piece[i].shape[dim];
    return size;
}

static void put_header(header *h, int64_t count, const safetensors_source *sources, int64_t pairs,
                       rapt_pairs metadata) {
    put_text(h, "{");
    if (pairs > 0) put_text(h, "\"__metadata__\":{");
    for (int64_t i = 0; i < pairs; i++) {
        if (i > 0) put_text(h, ",");
        put_string(h, metadata[i][0], "");
        put_text(h, ":");
        put_string(h, metadata[i][1], "");
    }
    if (pairs > 0) put_text(h, count > 0 ? "}," : "}");
    for (int64_t i = 0; i < count; i++) {
        const safetensors_source *source = &sources[i];
        if (i > 0) put_text(h, ",");
        put_string(h, source->prefix, source->name);
        put_text(h, ":{\"dtype\":\"");
        put_text(h, rapt_safetensors_type(source->dtype)->name);
        put_text(h, "\",\"shape\":[");
        for (int32_t d = 0; d < source->piece[0].ndim; d++) {
            if (d > 0) put_text(h, ",");
            put_number(h, size_along(source, d));
        }
        put_text(h, "],\"data_offsets\":[");
        put_number(h, source->begin);
        put_text(h, ",");
        put_number(h, source->end);
        put_text(h, "]}");
    }
    put_text(h, "}");
    while (h->used % ALIGNMENT != 0) put_text(h, " ");
}

/* Where each tensor's bytes go: larger elements first. Strides that do not matter become harmless on the way. */
static rapt_status place_sources(rapt_context *context, int64_t count, safetensors_source *sources) {
    int64_t used = 0;
    for (size_t size = 8; size > 0; size /= 2) {
        for (int64_t i = 0; i < count; i++) {
            safetensors_source *source = &sources[i];
            if (rapt_dtype_size(source->dtype) != size) continue;
            int64_t elements = 0, bytes;
            for (int32_t p = 0; p < source->pieces; p++) {
                source->piece[p] = rapt_normalised(&source->piece[p]);
                elements += rapt_tensor_count(&source->piece[p]);
            }
            source->begin = used;
            if (__builtin_mul_overflow(elements, (int64_t)size, &bytes) || __builtin_add_overflow(used, bytes, &used))
                return rapt_fail(context, RAPT_ERROR_OVERFLOW, "the file's size overflows an int64");
            source->end = used;
        }
    }
    return RAPT_OK;
}

/* ---- the data ---- */

typedef struct output {
    os_new_file file;
    const char *problem; /* the system's reason for the first failure; nothing is written after it */
    char *buffer;
    size_t used;
} output;

static void flush(output *out) {
    if (out->problem == NULL) out->problem = os_new_file_write(&out->file, out->buffer, out->used);
    out->used = 0;
}

static void emit(output *out, const void *data, size_t size) {
    flush(out);
    if (out->problem == NULL) out->problem = os_new_file_write(&out->file, data, size);
}

/* `count` elements of one dimension from `data` on (NULL: zeros), converted, through the buffer. */
static void emit_run(output *out, rapt_dtype dtype, char *data, rapt_dtype from, int64_t stride, int64_t count) {
    int64_t size = (int64_t)rapt_dtype_size(dtype), from_size = (int64_t)rapt_dtype_size(from);
    while (count > 0) {
        if (out->used > BUFFER_SIZE - (size_t)size) flush(out);
        int64_t room = (int64_t)(BUFFER_SIZE - out->used) / size, some = count < room ? count : room;
        char *to = out->buffer + out->used;
        if (data == NULL) {
            memset(to, 0, (size_t)(some * size));
        } else {
            rapt_tensor source = rapt_tensor_strided(data, from, 1, &some, &stride);
            rapt_tensor target = rapt_tensor_of(to, dtype, 1, &some);
            rapt_copy_elements(&source, &target);
            data += some * stride * from_size;
        }
        out->used += (size_t)(some * size);
        count -= some;
    }
}

/* One row, a run along the last dimension: row number `row` of all those before it. */
static void emit_row(output *out, rapt_dtype dtype, const rapt_tensor *view, int64_t row) {
    int32_t last = view->ndim - 1;
    int64_t offset = 0;
    for (int32_t d = last - 1; d >= 0; d--) {
        offset += row % view->shape[d] * view->stride[d];
        row /= view->shape[d];
    }
    char *data = view->data == NULL ? NULL : (char *)view->data + offset * (int64_t)rapt_dtype_size(view->dtype);
    emit_run(out, dtype, data, view->dtype, last < 0 ? 1 : view->stride[last], last < 0 ? 1 : view->shape[last]);
}

static int64_t rows_of(const rapt_tensor *view) {
    int64_t rows = 1;
    for (int32_t d = 0; d < view->ndim - 1; d++) rows *= view->shape[d];
    return rows;
}

static void emit_view(output *out, rapt_dtype dtype, const rapt_tensor *view) {
    int64_t count = rapt_tensor_count(view);
    if (count == 0) return;
    if (view->data != NULL && view->dtype == dtype && rapt_tensor_is_contiguous(view)) {
        emit(out, view->data, (size_t)count * rapt_dtype_size(dtype));
        return;
    }
    for (int64_t row = 0; row < rows_of(view); row++) emit_row(out, dtype, view, row);
}

static void emit_source(output *out, const safetensors_source *source) {
    if (source->along == 0) {
        for (int32_t p = 0; p < source->pieces; p++) emit_view(out, source->dtype, &source->piece[p]);
        return;
    }
    for (int64_t row = 0; row < rows_of(&source->piece[0]); row++) /* along the last dimension of matrices */
        for (int32_t p = 0; p < source->pieces; p++) emit_row(out, source->dtype, &source->piece[p], row);
}

static void emit_all(output *out, const header *h, int64_t count, const safetensors_source *sources) {
    unsigned char length[RAPT_SAFETENSORS_LENGTH_BYTES];
    for (int i = 0; i < RAPT_SAFETENSORS_LENGTH_BYTES; i++) length[i] = (unsigned char)((uint64_t)h->used >> 8 * i);
    emit(out, length, sizeof length);
    emit(out, h->text, h->used);
    for (size_t size = 8; size > 0; size /= 2)
        for (int64_t i = 0; i < count; i++)
            if (rapt_dtype_size(sources[i].dtype) == size) emit_source(out, &sources[i]);
    flush(out);
}

rapt_status rapt_safetensors_write(rapt_context *context, const char *path, int64_t count, safetensors_source *sources,
                                   int64_t pairs, rapt_pairs metadata) {
    rapt_status status = place_sources(context, count, sources);
    if (status != RAPT_OK) return status;
    header h = {0};
    put_header(&h, count, sources, pairs, metadata);
    if (h.used > RAPT_SAFETENSORS_MAX_HEADER)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "the header has %zu bytes, at most %d are allowed", h.used,
                         RAPT_SAFETENSORS_MAX_HEADER);
    size_t header_size = rapt_arena_size(h.used), scratch = rapt_size_add(header_size, rapt_arena_size(BUFFER_SIZE));
    if (!rapt_arena_reserve(&context->arena, &context->allocator, scratch)) return rapt_fail_memory(context, scratch);
    h = (header){.text = rapt_arena_take(&context->arena, h.used)};
    put_header(&h, count, sources, pairs, metadata);
    output out = {.buffer = rapt_arena_take(&context->arena, BUFFER_SIZE)};
    out.problem = os_new_file_begin(&out.file, path);
    if (out.problem == NULL) {
        emit_all(&out, &h, count, sources);
        if (out.problem == NULL) out.problem = os_new_file_finish(&out.file);
        if (out.problem != NULL) os_new_file_abandon(&out.file);
    }
    if (out.problem == NULL) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_FILE, "cannot write '%.300s': %s", path, out.problem);
}

/* ---- any tensors ---- */

static rapt_status check_string(rapt_context *context, const char *what, int64_t index, const char *string) {
    if (string == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "%s[%" PRId64 "] is NULL", what, index);
    if (rapt_is_utf8(string)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s[%" PRId64 "] is not valid UTF-8", what, index);
}

/* No string may be there twice: `strings` has `count` of them, `step` apart. */
static rapt_status check_unique(rapt_context *context, const char *what, int64_t count, const char *const *strings,
                                size_t step) {
    rapt_table table = {.item_size = sizeof *strings};
    rapt_status status = RAPT_OK;
    for (int64_t i = 0; status == RAPT_OK && i < count; i++)
        status = rapt_table_add(context, &context->allocator, &table, &strings[(size_t)i * step]);
    if (status == RAPT_OK) status = rapt_table_make_index(context, &context->allocator, &table);
    const void *twice = status == RAPT_OK ? rapt_table_sort_by_name(&table) : NULL;
    char text[RAPT_SHOWN_SIZE];
    if (twice != NULL)
        status = rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s has '%s' twice", what,
                           rapt_shown(rapt_table_name(twice), text));
    rapt_table_free(&table, &context->allocator);
    return status;
}

static rapt_status check_tensors(rapt_context *context, int64_t count, const char *const *names,
                                 const rapt_tensor *tensors) {
    for (int64_t i = 0; i < count; i++) {
        char label[40];
        snprintf(label, sizeof label, "tensors[%" PRId64 "]", i);
        rapt_status status = check_string(context, "names", i, names[i]);
        if (status == RAPT_OK) status = rapt_check_tensor(context, label, &tensors[i]);
        if (status != RAPT_OK) return status;
        if (strcmp(names[i], "__metadata__") == 0)
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "names[%" PRId64 "] is __metadata__, which is no tensor's",
                             i);
    }
    return count == 0 ? RAPT_OK : check_unique(context, "names", count, names, 1);
}

static rapt_status check_metadata(rapt_context *context, int64_t pairs, rapt_pairs metadata) {
    for (int64_t i = 0; i < pairs; i++) {
        rapt_status status = check_string(context, "metadata", i, metadata[i][0]);
        if (status == RAPT_OK) status = check_string(context, "metadata", i, metadata[i][1]);
        if (status != RAPT_OK) return status;
    }
    return pairs == 0 ? RAPT_OK : check_unique(context, "metadata", pairs, &metadata[0][0], 2);
}

static rapt_status save(rapt_context *context, const char *path, int64_t count, const char *const *names,
                        const rapt_tensor *tensors, int64_t pairs, rapt_pairs metadata) {
    const char *null = path == NULL                    ? "path"
                       : count > 0 && names == NULL    ? "names"
                       : count > 0 && tensors == NULL  ? "tensors"
                       : pairs > 0 && metadata == NULL ? "metadata"
                                                       : NULL;
    if (null != NULL) return rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null);
    if (count < 0 || pairs < 0)
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %" PRId64 ", expected 0 or more",
                         count < 0 ? "count" : "pairs", count < 0 ? count : pairs);
    rapt_status status = check_tensors(context, count, names, tensors);
    if (status == RAPT_OK) status = check_metadata(context, pairs, metadata);
    if (status != RAPT_OK) return status;
    size_t bytes = rapt_size_mul((size_t)count, sizeof(safetensors_source));
    safetensors_source *sources = rapt_allocate(&context->allocator, bytes);
    if (sources == NULL) return rapt_fail_memory(context, bytes);
    for (int64_t i = 0; i < count; i++)
        sources[i] = (safetensors_source){
            .prefix = "", .name = names[i], .dtype = tensors[i].dtype, .pieces = 1, .piece = {tensors[i]}};
    status = rapt_safetensors_write(context, path, count, sources, pairs, metadata);
    rapt_release(&context->allocator, sources, bytes);
    return status;
}

rapt_status rapt_safetensors_save(rapt_context *context, const char *path, int64_t count, const char *const *names,
                                  const rapt_tensor *tensors, int64_t pairs, const char *const (*metadata)[2]) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    return rapt_leave(context, &call, save(context, path, count, names, tensors, pairs, metadata));
}
