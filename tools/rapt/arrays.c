/* arrays.c - arrays from and to npy and safetensors files */
#include "files.h"

#include "cli.h"
#include "npy.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- what is in a file ---- */

typedef struct source {
    const char *path, *name; /* name: the tensor that is asked for, NULL if any */
    bool npy;
    bytes file;
    rapt_safetensors *tensors; /* unless npy */
} source;

/* FILE or FILE:NAME: the first colon after a file's name divides, and a file's name may have one itself. */
static void split(const char *where, source *s) {
    s->path = where;
    s->name = NULL;
    if (access(where, F_OK) == 0 || strcmp(where, "-") == 0) return;
    for (const char *colon = where; (colon = strchr(colon, ':')) != NULL; colon++) {
        size_t length = (size_t)(colon - where);
        char *path = allocate(length + 1);
        memcpy(path, where, length);
        if (access(path, F_OK) != 0 && strcmp(path, "-") != 0) continue;
        s->path = path;
        s->name = colon + 1;
        return;
    }
}

bool looks_like_safetensors(bytes file) {
    const unsigned char *data = file.data; /* a header of less than 4 GB, and its first brace */
    return file.size > 8 && data[8] == '{' && data[4] == 0 && data[5] == 0 && data[6] == 0 && data[7] == 0;
}

/* How much of a stream is worth reading: one byte more than its header says shows that there is too much. */
static size_t stream_limit(bytes beginning) {
    npy_header header;
    if (npy_read_header(beginning.data, beginning.size, &header) == NULL) return header.data_at + header.data_size + 1;
    return looks_like_safetensors(beginning) ? SIZE_MAX : 0;
}

static void close_tensors(void *tensors) { rapt_safetensors_close(tensors); }

static source open_source(const char *where) {
    source s = {0};
    split(where, &s);
    s.file = read_file(s.path, stream_limit);
    s.npy = npy_has_magic(s.file.data, s.file.size);
    if (s.npy && s.name != NULL) fail("'%s': an npy file holds one array, without a name", where);
    if (s.npy) return s;
    if (!looks_like_safetensors(s.file)) fail("'%s' is neither an npy nor a safetensors file", s.path);
    rapt_status status = rapt_safetensors_open_memory(ctx, s.file.data, s.file.size, &s.tensors);
    if (status != RAPT_OK) fail("'%s': %s", s.path, rapt_error_message(ctx));
    keep(s.tensors, close_tensors);
    return s;
}

static rapt_tensor read_npy(const source *s) {
    npy_header header;
    const unsigned char *data = s->file.data;
    const char *problem = npy_read_header(data, s->file.size, &header);
    if (problem != NULL) fail("'%s': %s", s->path, problem);
    size_t held = s->file.size - header.data_at;
    if (held < header.data_size) fail("'%s': it ends too early: %zu bytes of %zu", s->path, held, header.data_size);
    if (held > header.data_size)
        fail("'%s': its %zu bytes of elements are followed by others", s->path, header.data_size);
    header.tensor.data = (void *)(uintptr_t)(data + header.data_at);
    if (header.data_at % rapt_dtype_size(header.tensor.dtype) != 0) { /* maps and allocations begin aligned */
        header.tensor.data = allocate(header.data_size);
        memcpy(header.tensor.data, data + header.data_at, header.data_size);
    }
    return header.tensor;
}

static rapt_tensor find(const source *s, const char *name) {
    rapt_tensor tensor;
    rapt_status status = rapt_safetensors_find(ctx, s->tensors, name, &tensor);
    if (status != RAPT_OK) fail("'%s': %s", s->path, rapt_error_message(ctx));
    return tensor;
}

static bool holds(const source *s, const char *name) {
    for (int64_t i = 0; i < rapt_safetensors_count(s->tensors); i++)
        if (strcmp(rapt_safetensors_name(s->tensors, i), name) == 0) return true;
    return false;
}

/* The tensor asked for, or the only one. */
static rapt_tensor only_tensor(const source *s) {
    if (s->npy) return read_npy(s);
    if (s->name != NULL) return find(s, s->name);
    int64_t count = rapt_safetensors_count(s->tensors);
    if (count != 1) fail("'%s' holds %" PRId64 " tensors: name one as %s:NAME", s->path, count, s->path);
    return find(s, rapt_safetensors_name(s->tensors, 0));
}

rapt_tensor read_array(const char *where) {
    source s = open_source(where);
    return only_tensor(&s);
}

void read_inputs(const char *where, rapt_tensor inputs[3]) {
    static const char *const names[3] = {"query", "key", "value"};
    source s = open_source(where);
    bool any = !s.npy && s.name == NULL; /* the file is to tell */
    if (any && holds(&s, "query") && holds(&s, "key") && holds(&s, "value")) {
        for (int i = 0; i < 3; i++) inputs[i] = find(&s, names[i]);
    } else {
        inputs[0] = any && holds(&s, "input") ? find(&s, "input") : only_tensor(&s);
        inputs[1] = inputs[2] = inputs[0];
    }
}

/* ---- new ones ---- */

rapt_tensor new_array(rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    rapt_tensor tensor = rapt_tensor_of(NULL, dtype, ndim, shape);
    int64_t count = rapt_tensor_count(&tensor);
    if (count < 0 || (uint64_t)count > SIZE_MAX / 8) fail("out of memory: an array is too large");
    tensor.data = allocate((size_t)count * rapt_dtype_size(dtype));
    return tensor;
}

static rapt_tensor copy_as(const rapt_tensor *tensor, rapt_dtype dtype) {
    rapt_tensor copy = new_array(dtype, tensor->ndim, tensor->shape);
    check(rapt_tensor_copy(ctx, tensor, &copy));
    return copy;
}

rapt_tensor to_dtype(const rapt_tensor *tensor, rapt_dtype dtype) {
    return tensor->dtype == dtype ? *tensor : copy_as(tensor, dtype);
}

const double *to_doubles(const rapt_tensor *tensor) { return copy_as(tensor, RAPT_F64).data; }

void write_array(const char *path, const char *name, const rapt_tensor *tensor) {
    static const char ending[] = ".safetensors";
    size_t length = strlen(path), ending_length = sizeof ending - 1;
    if (length > ending_length && strcmp(path + length - ending_length, ending) == 0) {
        show_progress("writing");
        check(rapt_safetensors_save(ctx, path, 1, &name, tensor, 0, NULL));
        show_progress(NULL);
    } else {
        char header[NPY_WRITTEN_SIZE];
        rapt_tensor written = to_dtype(tensor, tensor->dtype == RAPT_BF16 ? RAPT_F32 : tensor->dtype);
        size_t size = (size_t)rapt_tensor_count(&written) * rapt_dtype_size(written.dtype);
        bytes parts[] = {{header, npy_write_header(&written, header)}, {written.data, size}};
        write_file(path, 2, parts);
    }
}
