/* npy.c - NumPy's file format: 6 bytes of magic, 2 of version, the length of the header (2 bytes in version 1.0, else 4),
 * the header, the elements
 *
 * The header is a Python dict, {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }, then spaces and a newline.
 */
#include "npy.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define MAGIC "\x93NUMPY"
enum { MAGIC_SIZE = 6, VERSION_SIZE = 2, MOST_HEADER = 60000 }; /* far above what any array of ours needs */

static const struct {
    const char *descr;
    rapt_dtype dtype;
} types[] = {{"<f2", RAPT_F16}, {"<f4", RAPT_F32}, {"<f8", RAPT_F64}, {"|b1", RAPT_BOOL}};
enum { TYPES = sizeof types / sizeof *types };

static __attribute__((format(printf, 1, 2))) const char *wrong(const char *format, ...) {
    static char message[160];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return message;
}

/* ---- the dict ---- */

typedef struct reader {
    const char *at, *end;
    char descr[16];
    bool fortran;
    int32_t ndim;
    int64_t shape[RAPT_MAX_DIMS];
} reader;

static bool take(reader *r, const char *token) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t')) r->at++;
    size_t length = strlen(token);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, token, length) != 0) return false;
    r->at += length;
    return true;
}

/* A quoted string without escapes that fits; an empty one where there is none. */
static void read_string(reader *r, char *text, size_t size) {
    text[0] = '\0';
    const char *quote = take(r, "'") ? "'" : take(r, "\"") ? "\"" : NULL;
    if (quote == NULL) return;
    size_t length = 0;
    while (r->at + length < r->end && r->at[length] != *quote && length + 1 < size) length++;
    memcpy(text, r->at, length);
    text[length] = '\0';
    r->at += length;
    if (!take(r, quote)) text[0] = '\0';
}

static const char *read_shape(reader *r) {
    bool has_comma = false;
    if (!take(r, "(")) return wrong("its shape is not a tuple");
    for (r->ndim = 0; !take(r, ")"); r->ndim++) {
        if (r->ndim == RAPT_MAX_DIMS) return wrong("it has more than %d dimensions", RAPT_MAX_DIMS);
        if (r->ndim > 0 && !has_comma) return wrong("its shape is not a tuple of whole numbers");
        take(r, "");
        const char *start = r->at;
        int64_t size = 0;
        for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
            int digit = *r->at - '0';
            if (size > (INT64_MAX - digit) / 10) return wrong("a size in its shape is too large");
            size = size * 10 + digit;
        }
        if (r->at == start) return wrong("its shape is not a tuple of whole numbers");
        r->shape[r->ndim] = size;
        has_comma = take(r, ",");
    }
    return r->ndim == 1 && !has_comma ? wrong("its shape is a number, not a tuple") : NULL;
}

static const char *read_value(reader *r, const char *key) {
    if (strcmp(key, "descr") == 0) {
        if (take(r, "[")) return wrong("it holds records, not numbers");
        read_string(r, r->descr, sizeof r->descr);
        return *r->descr == '\0' ? wrong("its descr is not a string") : NULL;
    }
    if (strcmp(key, "shape") == 0) return read_shape(r);
    r->fortran = take(r, "True");
    return r->fortran || take(r, "False") ? NULL : wrong("its fortran_order is neither True nor False");
}

static const char *read_dict(reader *r) {
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    enum { KEYS = 3 };
    bool seen[KEYS] = {false}, has_comma = true;
    if (!take(r, "{")) return wrong("its header is not a dict");
    while (!take(r, "}")) {
        char text[16];
        int key = 0;
        read_string(r, text, sizeof text);
        while (key < KEYS && strcmp(keys[key], text) != 0) key++;
        if (!has_comma || key == KEYS || seen[key] || !take(r, ":"))
            return wrong("its header is not a dict of descr, fortran_order and shape");
        seen[key] = true;
        const char *problem = read_value(r, text);
        if (problem != NULL) return problem;
        has_comma = take(r, ",");
    }
    for (int key = 0; key < KEYS; key++)
        if (!seen[key]) return wrong("its header lacks %s", keys[key]);
    take(r, "");
    take(r, "\n");
    return r->at == r->end ? NULL : wrong("its header goes on after the dict");
}

/* ---- the header ---- */

static const char *read_type(const char *descr, rapt_dtype *dtype) {
    for (int i = 0; i < TYPES; i++) {
        *dtype = types[i].dtype;
        if (strcmp(types[i].descr, descr) == 0) return NULL;
    }
    if (descr[0] == '>') return wrong("its elements are big-endian (%s)", descr);
    return wrong("its dtype is '%s'; <f2, <f4, <f8 and |b1 are possible%s", descr,
                 strstr(descr, "V2") != NULL ? " (bf16 is in safetensors alone)" : "");
}

/* The tensor and the size of its elements, with every product checked. */
static const char *measure(const reader *r, npy_header *header) {
    rapt_dtype dtype;
    const char *problem = read_type(r->descr, &dtype);
    if (problem != NULL) return problem;
    int64_t volume = (int64_t)rapt_dtype_size(dtype), stride[RAPT_MAX_DIMS] = {0}; /* volume counts a size of 0 as 1 */
    for (int32_t d = 0; d < r->ndim; d++) {
        stride[d] = volume / (int64_t)rapt_dtype_size(dtype);
        int64_t size = r->shape[d] > 0 ? r->shape[d] : 1;
        if (volume > INT64_MAX / size) return wrong("its shape is too large");
        volume *= size;
    }
    header->tensor = r->fortran ? rapt_tensor_strided(NULL, dtype, r->ndim, r->shape, stride)
                                : rapt_tensor_of(NULL, dtype, r->ndim, r->shape);
    header->data_size = rapt_tensor_count(&header->tensor) == 0 ? 0 : (size_t)volume;
    return NULL;
}

bool npy_has_magic(const unsigned char *file, size_t size) {
    return size >= MAGIC_SIZE && memcmp(file, MAGIC, MAGIC_SIZE) == 0;
}

const char *npy_read_header(const unsigned char *file, size_t size, npy_header *header) {
    if (!npy_has_magic(file, size)) return wrong("it does not begin as an npy file does");
    if (size < MAGIC_SIZE + VERSION_SIZE) return wrong("it ends before its header");
    int major = file[MAGIC_SIZE], minor = file[MAGIC_SIZE + 1], length_bytes = major == 1 ? 2 : 4;
    if (major < 1 || major > 3 || minor != 0)
        return wrong("its format version %d.%d is none of 1.0 to 3.0", major, minor);
    size_t start = MAGIC_SIZE + VERSION_SIZE + (size_t)length_bytes, length = 0;
    if (size < start) return wrong("it ends before its header");
    for (int i = length_bytes; i-- > 0;) length = length << 8 | file[MAGIC_SIZE + VERSION_SIZE + i];
    if (length > MOST_HEADER) return wrong("its header claims %zu bytes, more than %d", length, MOST_HEADER);
    if (size - start < length) return wrong("it ends within its header");
    reader r = {.at = (const char *)file + start, .end = (const char *)file + start + length};
    const char *problem = read_dict(&r);
    header->data_at = start + length;
    return problem != NULL ? problem : measure(&r, header);
}

size_t npy_write_header(const rapt_tensor *tensor, char text[NPY_WRITTEN_SIZE]) {
    enum { START = MAGIC_SIZE + VERSION_SIZE + 2, UNIT = 64 }; /* elements begin at a multiple of UNIT */
    const char *descr = "";
    for (int i = 0; i < TYPES; i++)
        if (types[i].dtype == tensor->dtype) descr = types[i].descr;
    int used = START + snprintf(text + START, NPY_WRITTEN_SIZE - START,
                                "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
    for (int32_t d = 0; d < tensor->ndim; d++)
        used += snprintf(text + used, NPY_WRITTEN_SIZE - (size_t)used, "%s%" PRId64 "%s", d == 0 ? "" : ", ",
                         tensor->shape[d], tensor->ndim == 1 ? "," : "");
    used += snprintf(text + used, NPY_WRITTEN_SIZE - (size_t)used, "), }");
    size_t size = ((size_t)used + 1 + UNIT - 1) / UNIT * UNIT, length = size - START;
    memset(text + used, ' ', size - (size_t)used);
    text[size - 1] = '\n';
    memcpy(text, MAGIC "\x01", MAGIC_SIZE + VERSION_SIZE); /* with the terminating 0 as the minor version */
    text[START - 2] = (char)(unsigned char)(length & 255);
    text[START - 1] = (char)(unsigned char)(length >> 8);
    return size;
}
