/* safetensors.c - a strict reader of safetensors files
 *
 * The format: a header length (8 bytes, little-endian), that many bytes of JSON, then the tensors' bytes to the end of
 * the file. The JSON is one object: for each tensor its name with dtype, shape and data_offsets, and optionally
 * "__metadata__" with strings. Files come from strangers, so nothing in them is believed before it is checked.
 *
 * The grammar is fixed, three objects deep at most, so the reader has one function for each thing that can stand in it
 * and needs no recursion and no tree. Strings are decoded once, into one buffer, and live there as names.
 */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are views of little-endian files");

#define LENGTH_BYTES 8
#define MAX_HEADER 100000000 /* the reference implementation's limit */

typedef struct element_type {
    const char *name;
    int64_t size;
    rapt_dtype dtype; /* 0: the format has it and Rapt has not */
} element_type;

static const element_type element_types[] = {
    {"BOOL", 1, RAPT_BOOL}, {"F16", 2, RAPT_F16}, {"BF16", 2, RAPT_BF16}, {"F32", 4, RAPT_F32}, {"F64", 8, RAPT_F64},
    {"U8", 1, 0},           {"U16", 2, 0},        {"U32", 4, 0},          {"U64", 8, 0},        {"F8_E4M3", 1, 0},
    {"I8", 1, 0},           {"I16", 2, 0},        {"I32", 4, 0},          {"I64", 8, 0},        {"F8_E5M2", 1, 0},
};

typedef struct tensor_entry {
    const char *name; /* first, see `table` */
    const element_type *type;
    int64_t ndim, shape[RAPT_MAX_DIMS]; /* dimensions beyond the last are checked and forgotten */
    int64_t elements, volume;           /* volume counts a dimension of 0 as 1: no stride overflows if it does not */
    int64_t begin, end;
    bool has_shape, has_offsets;
} tensor_entry;

typedef struct metadata_entry {
    const char *key; /* first, see `table` */
    const char *value;
} metadata_entry;

/* Entries in the order of the file, and an index of them sorted by name. An entry starts with its name, so that a
 * pointer to one is a pointer to a name. */
typedef struct table {
    char *items;
    size_t count, capacity, item_size;
    const void **index; /* `count` pointers, once all entries are in */
} table;

struct rapt_safetensors {
    rapt_allocator allocator; /* a copy, as the file may outlive its context */
    os_file_map map;
    bool mapped;
    const unsigned char *data; /* what follows the header */
    int64_t data_size;
    char *text; /* decoded strings */
    size_t text_size;
    table tensors, metadata;
};

typedef struct reader {
    rapt_context *context;
    rapt_safetensors *file;
    const unsigned char *header;
    size_t length, at, text_used;
    bool has_metadata;
} reader;

/* ---- messages ---- */

#define SHOWN_SIZE 100

/* A name as a message may hold it: not too long, cut between characters, and without control characters, which could
 * otherwise steer the terminal that shows it. */
static const char *shown(const char *name, char text[SHOWN_SIZE]) {
    size_t used = 0;
    for (; used < SHOWN_SIZE - 4 && name[used] != '\0'; used++) {
        unsigned char c = (unsigned char)name[used];
        text[used] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    if (name[used] != '\0') {
        while (used > 0 && ((unsigned char)name[used] & 0xc0) == 0x80) used--;
        for (int i = 0; i < 3; i++) text[used++] = '.';
    }
    text[used] = '\0';
    return text;
}

static rapt_status wrong_at(const reader *r, size_t at, const char *what) {
    return rapt_fail(r->context, RAPT_ERROR_FORMAT, "safetensors: byte %zu: %s", LENGTH_BYTES + at, what);
}

static __attribute__((format(printf, 3, 4))) rapt_status wrong_tensor(const reader *r, const char *name,
                                                                      const char *format, ...) {
    char text[SHOWN_SIZE], what[2 * SHOWN_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return rapt_fail(r->context, RAPT_ERROR_FORMAT, "safetensors: tensor '%s' %s", shown(name, text), what);
}

/* ---- tables ---- */

static rapt_status table_add(const reader *r, table *t, const void *item) {
    const rapt_allocator *allocator = &r->file->allocator;
    if (t->count == t->capacity) {
        size_t capacity = t->capacity == 0 ? 16 : 2 * t->capacity, bytes = rapt_size_mul(capacity, t->item_size);
        char *items = rapt_allocate(allocator, bytes);
        if (items == NULL) return rapt_fail_memory(r->context, bytes);
        if (t->count > 0) memcpy(items, t->items, t->count * t->item_size);
        rapt_release(allocator, t->items, t->capacity * t->item_size);
        t->items = items;
        t->capacity = capacity;
    }
    memcpy(t->items + t->count++ * t->item_size, item, t->item_size);
    return RAPT_OK;
}

static rapt_status table_index(const reader *r, table *t) {
    size_t bytes = t->count * sizeof *t->index;
    t->index = rapt_allocate(&r->file->allocator, bytes);
    if (t->index == NULL) return rapt_fail_memory(r->context, bytes);
    for (size_t i = 0; i < t->count; i++) t->index[i] = t->items + i * t->item_size;
    return RAPT_OK;
}

static void table_free(table *t, const rapt_allocator *allocator) {
    rapt_release(allocator, t->index, t->count * sizeof *t->index);
    rapt_release(allocator, t->items, t->capacity * t->item_size);
}

static const char *name_of(const void *entry) { return *(const char *const *)entry; }

typedef int (*comparison)(const void *a, const void *b);
static int compare_names(const void *a, const void *b) { return strcmp(name_of(a), name_of(b)); }
static int compare_offsets(const void *a, const void *b) {
    const tensor_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static void swap(const void **a, const void **b) {
    const void *moved = *a;
    *a = *b;
    *b = moved;
}

static void sift_down(const void **items, size_t root, size_t count, comparison compare) {
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && compare(items[child], items[child + 1]) < 0) child++;
        if (compare(items[root], items[child]) >= 0) return;
        swap(&items[root], &items[child]);
    }
}

/* Heapsort, because the C library's qsort may allocate past our allocator and may be quadratic on a chosen input. */
static void sort(const void **items, size_t count, comparison compare) {
    for (size_t root = count / 2; root-- > 0;) sift_down(items, root, count, compare);
    for (size_t last = count; last-- > 1;) {
        swap(&items[0], &items[last]);
        sift_down(items, 0, last, compare);
    }
}

static const void *table_find(const table *t, const char *name) {
    for (size_t low = 0, high = t->count; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, name_of(t->index[middle]));
        if (order == 0) return t->index[middle];
        if (order < 0) high = middle;
        if (order > 0) low = middle + 1;
    }
    return NULL;
}

/* Sorts by name; returns a name that is there twice, or NULL. */
static const char *table_sort_by_name(table *t) {
    sort(t->index, t->count, compare_names);
    for (size_t i = 1; i < t->count; i++)
        if (compare_names(t->index[i - 1], t->index[i]) == 0) return name_of(t->index[i]);
    return NULL;
}

/* ---- JSON: characters ---- */

/* The byte to read next, -1 at the header's end. */
static int here(const reader *r) { return r->at < r->length ? r->header[r->at] : -1; }

static void skip_space(reader *r) {
    while (here(r) == ' ' || here(r) == '\t' || here(r) == '\n' || here(r) == '\r') r->at++;
}

static bool take_byte(reader *r, char c) {
    if (here(r) != c) return false;
    r->at++;
    return true;
}

static bool take(reader *r, char c) {
    skip_space(r);
    return take_byte(r, c);
}

static rapt_status expect(reader *r, char c) {
    if (take(r, c)) return RAPT_OK;
    char what[] = "expected ' '";
    what[sizeof "expected '" - 1] = c;
    return wrong_at(r, r->at, here(r) < 0 ? "the header ends too early" : what);
}

/* ---- JSON: strings ----
 * A decoded string and its final NUL are never longer than its source with the quotes, so a buffer of the header's
 * length holds all of them. */

static void put(reader *r, unsigned int byte) { r->file->text[r->text_used++] = (char)(unsigned char)byte; }

static void put_code_point(reader *r, uint32_t code) {
    static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    put(r, lead[more] | code >> 6 * more);
    while (more-- > 0) put(r, 0x80 | (code >> 6 * more & 0x3f));
}

/* The bytes of the UTF-8 character at p that is no ASCII; 0 if there is none. Overlong forms, surrogates and what lies
 * beyond 0x10ffff show in the second byte. */
static size_t utf8_length(const unsigned char *p, size_t left) {
    unsigned char first = p[0], low = 0x80, high = 0xbf;
    size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first < 0xc2 || first > 0xf4 || left < length) return 0;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
    if (p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return length;
}

static rapt_status read_hex4(reader *r, uint32_t *code) {
    static const char digits[] = "0123456789abcdefABCDEF";
    *code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char *digit = here(r) > 0 ? strchr(digits, here(r)) : NULL;
        if (digit == NULL) return wrong_at(r, r->at, "\\u needs four hexadecimal digits");
        ptrdiff_t value = digit - digits;
        *code = *code << 4 | (uint32_t)(value < 16 ? value : value - 6);
    }
    return RAPT_OK;
}

/* What follows \u: one code unit of UTF-16, or two that belong together. */
static rapt_status read_unicode_escape(reader *r) {
    size_t start = r->at;
    uint32_t code, low;
    rapt_status status = read_hex4(r, &code);
    if (status != RAPT_OK) return status;
    if ((code & 0xfc00) == 0xd800 && take_byte(r, '\\') && take_byte(r, 'u')) {
        status = read_hex4(r, &low);
        if (status != RAPT_OK) return status;
        if ((low & 0xfc00) == 0xdc00) code = 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
    }
    if (code >= 0xd800 && code <= 0xdfff) return wrong_at(r, start, "a surrogate without its other half");
    /* Names are C strings here: "a\u0000b" would pass for "a". */
    if (code == 0) return wrong_at(r, start, "a NUL character in a string");
    put_code_point(r, code);
    return RAPT_OK;
}

/* What follows a backslash. */
static rapt_status read_escape(reader *r) {
    static const char letters[] = "\"\\/bfnrtu", meanings[] = "\"\\/\b\f\n\r\t";
    const char *letter = here(r) > 0 ? strchr(letters, here(r)) : NULL;
    if (letter == NULL) return wrong_at(r, r->at, "an unknown escape in a string");
    r->at++;
    if (*letter == 'u') return read_unicode_escape(r);
    put(r, (unsigned char)meanings[letter - letters]);
    return RAPT_OK;
}

/* One character, not an escape. */
static rapt_status read_character(reader *r) {
    unsigned char c = r->header[r->at];
    if (c < 0x20) return wrong_at(r, r->at, "a control character in a string");
    size_t length = c < 0x80 ? 1 : utf8_length(r->header + r->at, r->length - r->at);
    if (length == 0) return wrong_at(r, r->at, "a string is not valid UTF-8");
    for (size_t i = 0; i < length; i++) put(r, r->header[r->at++]);
    return RAPT_OK;
}

static rapt_status read_string(reader *r, const char **string) {
    rapt_status status = expect(r, '"');
    if (status != RAPT_OK) return status;
    size_t start = r->at - 1;
    *string = r->file->text + r->text_used;
    while (!take_byte(r, '"')) {
        if (here(r) < 0) return wrong_at(r, start, "a string does not end");
        status = take_byte(r, '\\') ? read_escape(r) : read_character(r);
        if (status != RAPT_OK) return status;
    }
    put(r, '\0');
    return RAPT_OK;
}

/* ---- JSON: numbers and objects ---- */

static bool is_digit(int c) { return c >= '0' && c <= '9'; }

static rapt_status read_integer(reader *r, int64_t *number) {
    skip_space(r);
    size_t start = r->at;
    if (!is_digit(here(r))) return wrong_at(r, start, "expected a non-negative integer");
    for (*number = 0; is_digit(here(r)); r->at++) {
        int digit = here(r) - '0';
        if (r->at > start && r->header[start] == '0') return wrong_at(r, start, "a number starts with 0");
        if (*number > (INT64_MAX - digit) / 10) return wrong_at(r, start, "a number is too large");
        *number = *number * 10 + digit;
    }
    bool integer = here(r) != '.' && here(r) != 'e' && here(r) != 'E';
    return integer ? RAPT_OK : wrong_at(r, start, "expected an integer, found a fraction or an exponent");
}

static rapt_status read_key(reader *r, const char **key) {
    rapt_status status = read_string(r, key);
    return status == RAPT_OK ? expect(r, ':') : status;
}

/* An object is walked by its keys; the key is NULL after the last. */
static rapt_status first_key(reader *r, const char **key) {
    *key = NULL;
    rapt_status status = expect(r, '{');
    return status != RAPT_OK || take(r, '}') ? status : read_key(r, key);
}

static rapt_status next_key(reader *r, const char **key) {
    *key = NULL;
    return take(r, ',') ? read_key(r, key) : expect(r, '}');
}

/* ---- the header ---- */

static rapt_status read_dtype(reader *r, tensor_entry *entry) {
    const char *name = NULL;
    rapt_status status = read_string(r, &name);
    if (status != RAPT_OK) return status;
    for (size_t i = 0; i < sizeof element_types / sizeof *element_types; i++)
        if (strcmp(name, element_types[i].name) == 0) entry->type = &element_types[i];
    if (entry->type != NULL) return RAPT_OK;
    char text[SHOWN_SIZE];
    return wrong_tensor(r, entry->name, "has an unknown dtype '%s'", shown(name, text));
}

static rapt_status add_dimension(reader *r, tensor_entry *entry, int64_t size) {
    if (size > 1 && entry->volume > INT64_MAX / size)
        return wrong_tensor(r, entry->name, "has a shape whose size overflows");
    if (size > 1) entry->volume *= size;
    entry->elements = size == 0 || entry->elements == 0 ? 0 : entry->volume;
    if (entry->ndim < RAPT_MAX_DIMS) entry->shape[entry->ndim] = size;
    entry->ndim++;
    return RAPT_OK;
}

static rapt_status read_shape(reader *r, tensor_entry *entry) {
    entry->has_shape = true;
    entry->elements = entry->volume = 1;
    rapt_status status = expect(r, '[');
    if (status != RAPT_OK || take(r, ']')) return status;
    do {
        int64_t size = 0;
        status = read_integer(r, &size);
        if (status == RAPT_OK) status = add_dimension(r, entry, size);
    } while (status == RAPT_OK && take(r, ','));
    return status == RAPT_OK ? expect(r, ']') : status;
}

static rapt_status read_offsets(reader *r, tensor_entry *entry) {
    entry->has_offsets = true;
    rapt_status status = expect(r, '[');
    if (status == RAPT_OK) status = read_integer(r, &entry->begin);
    if (status == RAPT_OK) status = expect(r, ',');
    if (status == RAPT_OK) status = read_integer(r, &entry->end);
    return status == RAPT_OK ? expect(r, ']') : status;
}

static rapt_status read_property(reader *r, tensor_entry *entry, const char *key) {
    bool dtype = strcmp(key, "dtype") == 0, shape = strcmp(key, "shape") == 0;
    bool offsets = strcmp(key, "data_offsets") == 0;
    if (dtype && entry->type == NULL) return read_dtype(r, entry);
    if (shape && !entry->has_shape) return read_shape(r, entry);
    if (offsets && !entry->has_offsets) return read_offsets(r, entry);
    char text[SHOWN_SIZE];
    const char *problem = dtype || shape || offsets ? "twice" : "and should not";
    return wrong_tensor(r, entry->name, "has the key '%s' %s", shown(key, text), problem);
}

/* What can be said about a tensor without looking at the others. */
static rapt_status check_tensor(const reader *r, const tensor_entry *entry) {
    const char *name = entry->name;
    if (entry->type == NULL) return wrong_tensor(r, name, "has no dtype");
    if (!entry->has_shape) return wrong_tensor(r, name, "has no shape");
    if (!entry->has_offsets) return wrong_tensor(r, name, "has no data_offsets");
    if (entry->volume > INT64_MAX / entry->type->size) return wrong_tensor(r, name, "has a shape whose size overflows");
    if (entry->begin > entry->end || entry->end > r->file->data_size)
        return wrong_tensor(r, name, "has data_offsets [%" PRId64 ", %" PRId64 "] in %" PRId64 " bytes of data",
                            entry->begin, entry->end, r->file->data_size);
    int64_t needed = entry->elements * entry->type->size, held = entry->end - entry->begin;
    if (needed == held) return RAPT_OK;
    return wrong_tensor(r, name, "needs %" PRId64 " bytes for its shape, it has %" PRId64, needed, held);
}

static rapt_status read_tensor(reader *r, const char *name) {
    tensor_entry entry = {.name = name};
    const char *key;
    rapt_status status = first_key(r, &key);
    while (status == RAPT_OK && key != NULL) {
        status = read_property(r, &entry, key);
        if (status == RAPT_OK) status = next_key(r, &key);
    }
    if (status == RAPT_OK) status = check_tensor(r, &entry);
    return status == RAPT_OK ? table_add(r, &r->file->tensors, &entry) : status;
}

static rapt_status read_metadata(reader *r) {
    if (r->has_metadata) return wrong_at(r, r->at, "__metadata__ is there twice");
    r->has_metadata = true;
    metadata_entry entry = {0};
    rapt_status status = first_key(r, &entry.key);
    while (status == RAPT_OK && entry.key != NULL) {
        status = read_string(r, &entry.value);
        if (status == RAPT_OK) status = table_add(r, &r->file->metadata, &entry);
        if (status == RAPT_OK) status = next_key(r, &entry.key);
    }
    return status;
}

static rapt_status read_header(reader *r) {
    if (r->length == 0 || r->header[0] != '{') return wrong_at(r, 0, "the header does not start with '{'");
    const char *key;
    rapt_status status = first_key(r, &key);
    while (status == RAPT_OK && key != NULL) {
        status = strcmp(key, "__metadata__") == 0 ? read_metadata(r) : read_tensor(r, key);
        if (status == RAPT_OK) status = next_key(r, &key);
    }
    if (status != RAPT_OK) return status;
    while (take_byte(r, ' ')) continue;
    return here(r) < 0 ? RAPT_OK : wrong_at(r, r->at, "something other than spaces follows the header's '}'");
}

/* Tensors in the order of their offsets fill the data without a hole, an overlap or a rest. Sorts the index so. */
static rapt_status check_coverage(const reader *r, table *tensors) {
    int64_t covered = 0;
    sort(tensors->index, tensors->count, compare_offsets);
    for (size_t i = 0; i < tensors->count; i++) {
        const tensor_entry *entry = tensors->index[i];
        if (entry->begin != covered)
            return wrong_tensor(r, entry->name, "%s: it begins at data byte %" PRId64 ", not %" PRId64,
                                entry->begin < covered ? "overlaps another" : "follows a hole", entry->begin, covered);
        covered = entry->end;
    }
    if (covered == r->file->data_size) return RAPT_OK;
    return rapt_fail(r->context, RAPT_ERROR_FORMAT, "safetensors: %" PRId64 " bytes follow the last tensor",
                     r->file->data_size - covered);
}

static rapt_status index_file(const reader *r) {
    table *tensors = &r->file->tensors, *metadata = &r->file->metadata;
    rapt_status status = table_index(r, tensors);
    if (status == RAPT_OK) status = table_index(r, metadata);
    if (status != RAPT_OK) return status;
    char text[SHOWN_SIZE];
    const char *twice = table_sort_by_name(metadata);
    if (twice != NULL)
        return rapt_fail(r->context, RAPT_ERROR_FORMAT, "safetensors: metadata '%s' twice", shown(twice, text));
    /* Names before offsets: of two tensors with one name it is the name that is wrong. */
    twice = table_sort_by_name(tensors);
    if (twice != NULL) return wrong_tensor(r, twice, "is there twice");
    status = check_coverage(r, tensors);
    table_sort_by_name(tensors);
    return status;
}

/* ---- opening and closing ---- */

static rapt_status read_file(rapt_context *context, rapt_safetensors *file, const unsigned char *bytes, size_t size) {
    if (size < LENGTH_BYTES)
        return rapt_fail(context, RAPT_ERROR_FORMAT, "safetensors: %zu bytes do not hold a header's length", size);
    uint64_t length = 0;
    for (int i = LENGTH_BYTES; i-- > 0;) length = length << 8 | bytes[i];
    if (length > MAX_HEADER || length > size - LENGTH_BYTES)
        return rapt_fail(context, RAPT_ERROR_FORMAT,
                         "safetensors: a header of %" PRIu64 " bytes in a file of %zu (at most %d are allowed)", length,
                         size, MAX_HEADER);
    reader r = {.context = context, .file = file, .header = bytes + LENGTH_BYTES, .length = (size_t)length};
    file->data = r.header + r.length;
    file->data_size = (int64_t)(size - LENGTH_BYTES - r.length);
    file->text = rapt_allocate(&file->allocator, r.length);
    if (file->text == NULL) return rapt_fail_memory(context, r.length);
    file->text_size = r.length;
    rapt_status status = read_header(&r);
    return status == RAPT_OK ? index_file(&r) : status;
}

/* From a path, or from memory where that is NULL. */
static rapt_status open_file(rapt_context *context, const char *path, const void *data, size_t size,
                             rapt_safetensors **opened) {
    rapt_safetensors *file = rapt_allocate(&context->allocator, sizeof *file);
    if (file == NULL) return rapt_fail_memory(context, sizeof *file);
    *file = (rapt_safetensors){.allocator = context->allocator, .map = {.data = data, .size = size}};
    file->tensors.item_size = sizeof(tensor_entry);
    file->metadata.item_size = sizeof(metadata_entry);
    const char *reason = path == NULL ? NULL : os_file_map_open(path, &file->map);
    file->mapped = path != NULL && reason == NULL;
    rapt_status status = reason == NULL ? read_file(context, file, file->map.data, file->map.size)
                                        : rapt_fail(context, RAPT_ERROR_FILE, "cannot read '%s': %s", path, reason);
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
                          : open_file(context, path, data, size, file);
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
    table_free(&file->tensors, &allocator);
    table_free(&file->metadata, &allocator);
    rapt_release(&allocator, file->text, file->text_size);
    if (file->mapped) os_file_map_close(&file->map);
    rapt_release(&allocator, file, sizeof *file);
}

/* ---- looking things up ---- */

int64_t rapt_safetensors_count(const rapt_safetensors *file) { return file == NULL ? 0 : (int64_t)file->tensors.count; }

const char *rapt_safetensors_name(const rapt_safetensors *file, int64_t index) {
    if (file == NULL || index < 0 || (uint64_t)index >= file->tensors.count) return NULL;
    return name_of(file->tensors.items + (size_t)index * file->tensors.item_size);
}

const char *rapt_safetensors_metadata(const rapt_safetensors *file, const char *key) {
    if (file == NULL || key == NULL) return NULL;
    const metadata_entry *entry = table_find(&file->metadata, key);
    return entry == NULL ? NULL : entry->value;
}

static rapt_status find(rapt_context *context, const rapt_safetensors *file, const char *name, rapt_tensor *view) {
    char shown_name[SHOWN_SIZE];
    shown(name, shown_name);
    const tensor_entry *entry = table_find(&file->tensors, name);
    if (entry == NULL) return rapt_fail(context, RAPT_ERROR_ABSENT, "the file has no tensor '%s'", shown_name);
    const element_type *type = entry->type;
    if (type->dtype == 0)
        return rapt_fail(context, RAPT_ERROR_DTYPE, "tensor '%s' has dtype %s, which Rapt lacks", shown_name,
                         type->name);
    if (entry->ndim > RAPT_MAX_DIMS)
        return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has %" PRId64 " dimensions, at most %d are possible",
                         shown_name, entry->ndim, RAPT_MAX_DIMS);
    const unsigned char *data = file->data + entry->begin;
    if ((uintptr_t)data % (uintptr_t)type->size != 0)
        return rapt_fail(context, RAPT_ERROR_LAYOUT, "tensor '%s' is not aligned to its %" PRId64 "-byte elements",
                         shown_name, type->size);
    *view = rapt_tensor_of((void *)data, type->dtype, (int32_t)entry->ndim, entry->shape);
    return RAPT_OK;
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
