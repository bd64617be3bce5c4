/* test_safetensors.c - the reader of safetensors files: good files, every rule broken once, damage everywhere, and
 * memory that runs out. Files are built in memory, in blocks of exactly their size, so that a sanitizer sees a byte
 * read too many. */
#define _POSIX_C_SOURCE 200809L /* mkstemp, mkdtemp */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <rapt/rapt.h>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- memory that counts, and refuses on demand ---- */

typedef struct counter {
    long live, calls, refuse_at; /* refuse_at: the call that gets NULL, counted from 1; 0 for none */
    size_t bytes;                /* lent and not given back, by the sizes that release was told */
} counter;

static void *count_allocate(void *user, size_t size, size_t alignment) {
    counter *c = user;
    if (++c->calls == c->refuse_at) return NULL;
    void *pointer = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (pointer == NULL) return NULL;
    c->live++;
    c->bytes += size;
    return pointer;
}

static void count_release(void *user, void *pointer, size_t size) {
    counter *c = user;
    c->live--;
    c->bytes -= size;
    free(pointer);
}

static counter memory;
static rapt_context *ctx;

static int setup(void **state) {
    (void)state;
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1;
    config.allocator = (rapt_allocator){.user = &memory, .allocate = count_allocate, .release = count_release};
    return rapt_context_create(&config, &ctx) == RAPT_OK ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    rapt_context_destroy(ctx);
    return memory.live == 0 && memory.bytes == 0 ? 0 : -1;
}

/* ---- files in memory ---- */

typedef struct bytes {
    unsigned char *data; /* from malloc */
    size_t size;
} bytes;

static void put_length(unsigned char *data, uint64_t length) {
    for (int i = 0; i < 8; i++) data[i] = (unsigned char)(length >> 8 * i);
}

/* A file with this header and data of 0, 1, 2, ... */
static bytes build_sized(const char *header, size_t header_size, size_t data_size) {
    bytes file = {.size = 8 + header_size + data_size};
    file.data = malloc(file.size);
    assert_non_null(file.data);
    put_length(file.data, header_size);
    memcpy(file.data + 8, header, header_size);
    for (size_t i = 0; i < data_size; i++) file.data[8 + header_size + i] = (unsigned char)i;
    return file;
}

static bytes build(const char *header, size_t data_size) { return build_sized(header, strlen(header), data_size); }

/* The same with spaces after the header, as writers do, so that the data is aligned. */
static bytes build_aligned(const char *header, size_t data_size) {
    char padded[4096];
    int length = snprintf(padded, sizeof padded, "%s%*s", header, (int)(7 - (strlen(header) + 7) % 8), "");
    assert_in_range(length, 2, sizeof padded - 1);
    return build(padded, data_size);
}

static rapt_safetensors *open_good(const bytes *file) {
    rapt_safetensors *opened = NULL;
    rapt_status status = rapt_safetensors_open_memory(ctx, file->data, file->size, &opened);
    if (status != RAPT_OK) fail_msg("%s: %s", rapt_status_name(status), rapt_error_message(ctx));
    assert_non_null(opened);
    return opened;
}

static void assert_message(const char *fragment) {
    if (strstr(rapt_error_message(ctx), fragment) == NULL)
        fail_msg("expected \"%s\" in the message \"%s\"", fragment, rapt_error_message(ctx));
}

static void expect_refusal(const bytes *file, const char *fragment) {
    long live = memory.live;
    rapt_safetensors *opened = (rapt_safetensors *)&memory; /* anything but NULL: a failure must overwrite it */
    assert_int_equal(rapt_safetensors_open_memory(ctx, file->data, file->size, &opened), RAPT_ERROR_FORMAT);
    assert_null(opened);
    assert_message("safetensors: byte "); /* every refusal says where */
    assert_message(fragment);
    assert_int_equal(memory.live, live);
}

#define TENSOR(name, dtype, shape, offsets)                                                                            \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* clang-format off */
static const char good_header[] =
    "{\"__metadata__\":{\"format\":\"pt\",\"empty\":\"\"},"
    TENSOR("zeta", "F32", "[2,3]", "[16,40]") ","
    TENSOR("alpha", "F64", "[2]", "[0,16]") ","
    TENSOR("half", "F16", "[1,2,1]", "[40,44]") ","
    TENSOR("brain", "BF16", "[2]", "[44,48]") ","
    TENSOR("truth", "BOOL", "[4]", "[48,52]") ","
    TENSOR("scalar", "F32", "[]", "[52,56]") ","
    TENSOR("nothing", "F32", "[3,0,2]", "[56,56]") ","
    TENSOR("integers", "I32", "[2]", "[56,64]") "}";

/* For rapt_safetensors_find to refuse: 'odd' is off its alignment, nine dimensions are one too many. */
static const char odd_header[] =
    "{" TENSOR("one", "U8", "[1]", "[0,1]") ","
    TENSOR("odd", "F32", "[1]", "[1,5]") ","
    TENSOR("nine", "F32", "[1,1,1,1,1,1,1,1,1]", "[5,9]") ","
    TENSOR("eight", "BOOL", "[1,1,1,1,1,1,1,7]", "[9,16]") "}";

/* Types that Rapt has not, at offsets that suit none of them, beside one that it has; and shapes without elements. */
static const char packed_header[] =
    "{" TENSOR("b", "I8", "[1]", "[0,1]") "," TENSOR("a", "U16", "[1]", "[1,3]") ","
    TENSOR("c", "I16", "[1]", "[3,5]") "," TENSOR("d", "U32", "[]", "[5,9]") ","
    TENSOR("e", "U64", "[1]", "[9,17]") "," TENSOR("f", "I64", "[]", "[17,25]") ","
    TENSOR("g", "F8_E8M0", "[2,1]", "[25,27]") "," TENSOR("h", "F8_E4M3FNUZ", "[3]", "[27,30]") ","
    TENSOR("i", "F8_E5M2FNUZ", "[1]", "[30,31]") "," TENSOR("j", "F6_E2M3", "[2,2]", "[31,34]") ","
    TENSOR("k", "F6_E3M2", "[8]", "[34,40]") "," TENSOR("l", "F4", "[2,3]", "[40,43]") ","
    TENSOR("m", "F4", "[0,3]", "[43,43]") "," TENSOR("n", "C64", "[1]", "[43,51]") ","
    TENSOR("usable", "BOOL", "[5]", "[51,56]") "," TENSOR("wide", "F32", "[0,4294967296,4294967296]", "[56,56]") ","
    TENSOR("long", "BOOL", "[0,4294967296,4294967296]", "[56,56]") ","
    TENSOR("tall", "F64", "[1152921504606846976,0]", "[56,56]") ","
    TENSOR("most", "F64", "[0,1152921504606846974]", "[56,56]") "}";
/* clang-format on */

#define GOOD_DATA 64

/* ---- good files ---- */

static void test_reads_tensors(void **state) {
    (void)state;
    bytes file = build_aligned(good_header, GOOD_DATA);
    rapt_safetensors *opened = open_good(&file);
    const unsigned char *data = file.data + file.size - GOOD_DATA;
    static const struct {
        const char *name;
        rapt_dtype dtype; /* 0: Rapt has no such type */
        int32_t ndim;
        int64_t shape[3], begin;
    } expected[] = {
        {"zeta", RAPT_F32, 2, {2, 3}, 16},       {"alpha", RAPT_F64, 1, {2}, 0},   {"half", RAPT_F16, 3, {1, 2, 1}, 40},
        {"brain", RAPT_BF16, 1, {2}, 44},        {"truth", RAPT_BOOL, 1, {4}, 48}, {"scalar", RAPT_F32, 0, {0}, 52},
        {"nothing", RAPT_F32, 3, {3, 0, 2}, 56}, {"integers", 0, 1, {2}, 56},
    };
    int64_t count = (int64_t)(sizeof expected / sizeof *expected);
    assert_int_equal(rapt_safetensors_count(opened), count);
    for (int64_t i = 0; i < count; i++) {
        assert_string_equal(rapt_safetensors_name(opened, i), expected[i].name);
        rapt_tensor view;
        memset(&view, 0, sizeof view);
        rapt_status status = rapt_safetensors_find(ctx, opened, expected[i].name, &view);
        if (expected[i].dtype == 0) {
            assert_int_equal(status, RAPT_ERROR_DTYPE);
            assert_message("'integers' has dtype I32");
            assert_null(view.data); /* a failed call changes nothing */
            continue;
        }
        assert_int_equal(status, RAPT_OK);
        assert_int_equal(view.dtype, expected[i].dtype);
        assert_int_equal(view.device, RAPT_DEVICE_CPU);
        assert_int_equal(view.ndim, expected[i].ndim);
        assert_ptr_equal(view.data, data + expected[i].begin);
        assert_true(rapt_tensor_is_contiguous(&view));
        for (int32_t d = 0; d < view.ndim; d++) assert_int_equal(view.shape[d], expected[i].shape[d]);
    }
    assert_null(rapt_safetensors_name(opened, count));
    assert_null(rapt_safetensors_name(opened, -1));
    assert_null(rapt_safetensors_name(opened, INT64_MAX));
    assert_string_equal(rapt_safetensors_metadata(opened, "format"), "pt");
    assert_string_equal(rapt_safetensors_metadata(opened, "empty"), "");
    assert_null(rapt_safetensors_metadata(opened, "missing"));
    assert_null(rapt_safetensors_metadata(opened, "zeta"));
    rapt_safetensors_close(opened);
    free(file.data);
}

/* A type that Rapt lacks, or sizes that no loop could count to, are no reason to refuse the file, only the tensor. */
static void test_usable_beside_others(void **state) {
    (void)state;
    static const char *const lacking[] = {"b I8",          "a U16",     "c I16",     "d U32", "e U64",
                                          "f I64",         "g F8_E8M0", "j F6_E2M3", "l F4",  "h F8_E4M3FNUZ",
                                          "i F8_E5M2FNUZ", "n C64",     "k F6_E3M2", "m F4"};
    bytes file = build_aligned(packed_header, 56);
    rapt_safetensors *opened = open_good(&file);
    rapt_tensor view = {.ndim = 77};
    for (size_t i = 0; i < sizeof lacking / sizeof *lacking; i++) {
        char message[64], name[2] = {lacking[i][0], '\0'};
        snprintf(message, sizeof message, "tensor '%s' has dtype %s, which Rapt lacks", name, lacking[i] + 2);
        assert_int_equal(rapt_safetensors_find(ctx, opened, name, &view), RAPT_ERROR_DTYPE);
        assert_message(message);
    }
    assert_int_equal(rapt_safetensors_find(ctx, opened, "wide", &view), RAPT_ERROR_SHAPE);
    assert_message("'wide' has a shape whose sizes overflow");
    assert_int_equal(rapt_safetensors_find(ctx, opened, "long", &view), RAPT_ERROR_SHAPE);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "tall", &view), RAPT_ERROR_SHAPE);
    assert_int_equal(view.ndim, 77);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "most", &view), RAPT_OK);
    assert_int_equal(rapt_tensor_count(&view), 0);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "usable", &view), RAPT_OK);
    assert_ptr_equal(view.data, file.data + file.size - 5);
    rapt_safetensors_close(opened);
    free(file.data);
}

static void test_find_refuses(void **state) {
    (void)state;
    bytes file = build_aligned(odd_header, 16);
    rapt_safetensors *opened = open_good(&file);
    rapt_tensor view = {.ndim = 77};
    assert_int_equal(rapt_safetensors_find(ctx, opened, "none\x1b[31m", &view), RAPT_ERROR_ABSENT);
    assert_message("no tensor 'none?[31m'");
    assert_int_equal(rapt_safetensors_find(ctx, opened, "", &view), RAPT_ERROR_ABSENT);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "__metadata__", &view), RAPT_ERROR_ABSENT);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "one", &view), RAPT_ERROR_DTYPE);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "odd", &view), RAPT_ERROR_LAYOUT);
    assert_message("'odd' is not aligned to its 4-byte elements");
    assert_int_equal(rapt_safetensors_find(ctx, opened, "nine", &view), RAPT_ERROR_SHAPE);
    assert_message("'nine' has 9 dimensions");
    assert_int_equal(view.ndim, 77);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "eight", &view), RAPT_OK);
    assert_int_equal(view.ndim, 8);
    assert_int_equal(view.shape[7], 7);
    rapt_safetensors_close(opened);
    free(file.data);
}

static void test_null_arguments(void **state) {
    (void)state;
    bytes file = build("{}", 0);
    rapt_safetensors *opened = (rapt_safetensors *)&memory;
    rapt_tensor view;
    assert_int_equal(rapt_safetensors_open(NULL, "x", &opened), RAPT_ERROR_NULL);
    assert_null(opened);
    assert_int_equal(rapt_safetensors_open(ctx, NULL, &opened), RAPT_ERROR_NULL);
    assert_message("path is NULL");
    assert_int_equal(rapt_safetensors_open(ctx, "x", NULL), RAPT_ERROR_NULL);
    assert_message("file is NULL");
    assert_int_equal(rapt_safetensors_open_memory(NULL, file.data, file.size, &opened), RAPT_ERROR_NULL);
    assert_int_equal(rapt_safetensors_open_memory(ctx, NULL, 10, &opened), RAPT_ERROR_NULL);
    assert_message("data is NULL");
    assert_int_equal(rapt_safetensors_open_memory(ctx, file.data, file.size, NULL), RAPT_ERROR_NULL);
    opened = open_good(&file);
    assert_int_equal(rapt_safetensors_find(NULL, opened, "x", &view), RAPT_ERROR_NULL);
    assert_int_equal(rapt_safetensors_find(ctx, NULL, "x", &view), RAPT_ERROR_NULL);
    assert_int_equal(rapt_safetensors_find(ctx, opened, NULL, &view), RAPT_ERROR_NULL);
    assert_int_equal(rapt_safetensors_find(ctx, opened, "x", NULL), RAPT_ERROR_NULL);
    assert_null(rapt_safetensors_metadata(opened, NULL));
    rapt_safetensors_close(opened);
    assert_int_equal(rapt_safetensors_count(NULL), 0);
    assert_null(rapt_safetensors_name(NULL, 0));
    assert_null(rapt_safetensors_metadata(NULL, "x"));
    rapt_safetensors_close(NULL);
    free(file.data);
}

/* What the format allows and a hasty reader refuses. */
static void test_unusual_but_good(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_size;
        int64_t count;
    } files[] = {
        {"{}", 0, 0},
        {"{}      ", 0, 0},
        {"{ \t\r\n }", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{\"a\" : { \"data_offsets\" :[ 0 , 4 ] , \"shape\":[ 2 ,\n2 ],\"dtype\" : \"U8\" } }", 4, 1},
        {"{" TENSOR("a", "U8", "[0]", "[0,0]") "," TENSOR("b", "I64", "[0,5]", "[0,0]") "}", 0, 2},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") ",\"__metadata__\":{\"k\":\"v\"}}", 4, 1},
        {"{" TENSOR("", "U8", "[4]", "[0,4]") "}", 4, 1},
        {"{" TENSOR("b", "F8_E4M3", "[1]", "[1,2]") "," TENSOR("a", "F8_E5M2", "[1]", "[0,1]") "}", 2, 2},
        {packed_header, 56, 19},
        {"{\"\\u0061\":{\"d\\u0074ype\":\"\\u00558\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 1},
        {"{" TENSOR("a", "U8", "[9223372036854775807,0]", "[0,0]") "}", 0, 1},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        bytes file = build(files[i].header, files[i].data_size);
        rapt_safetensors *opened = open_good(&file);
        assert_int_equal(rapt_safetensors_count(opened), files[i].count);
        rapt_safetensors_close(opened);
        free(file.data);
    }
}

static void test_strings_are_decoded(void **state) {
    (void)state;
    static const struct {
        const char *source, *decoded;
    } strings[] = {
        {"plain", "plain"},
        {"\\\"\\\\\\/\\b\\f\\n\\r\\t", "\"\\/\b\f\n\r\t"},
        {"\\u0041\\u007f\\u0080\\u07ff", "A\x7f\xc2\x80\xdf\xbf"},
        {"\\u0800\\uFFFF\\uabCD", "\xe0\xa0\x80\xef\xbf\xbf\xea\xaf\x8d"},
        {"\\ud800\\udc00 \\uDBFF\\uDFFF", "\xf0\x90\x80\x80 \xf4\x8f\xbf\xbf"},
        {"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82"},
        {"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf", "\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf"},
        {"{}[],: 12", "{}[],: 12"},
    };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        char header[512];
        snprintf(header, sizeof header, "{\"__metadata__\":{\"%s\":\"%s\"}," TENSOR("%s", "U8", "[1]", "[0,1]") "}",
                 strings[i].source, strings[i].source, strings[i].source);
        bytes file = build(header, 1);
        rapt_safetensors *opened = open_good(&file);
        assert_string_equal(rapt_safetensors_name(opened, 0), strings[i].decoded);
        assert_string_equal(rapt_safetensors_metadata(opened, strings[i].decoded), strings[i].decoded);
        rapt_tensor view;
        assert_int_equal(rapt_safetensors_find(ctx, opened, strings[i].decoded, &view), RAPT_ERROR_DTYPE);
        rapt_safetensors_close(opened);
        free(file.data);
    }
}

/* Quadratic checks would take minutes here. Names are in no order, and each must be found. */
static void test_many_tensors(void **state) {
    (void)state;
    enum { COUNT = 50000 };
    size_t capacity = COUNT * 100, used = 0;
    char *header = malloc(capacity);
    assert_non_null(header);
    for (int i = 0; i < COUNT; i++) {
        int place = (int)((int64_t)i * 7919 % COUNT); /* 7919 is prime, so this visits each place once */
        used += (size_t)snprintf(header + used, capacity - used, "%c" TENSOR("t%d", "BOOL", "[1]", "[%d,%d]"),
                                 i == 0 ? '{' : ',', place, place, place + 1);
    }
    header[used++] = '}';
    bytes file = build_sized(header, used, COUNT);
    rapt_safetensors *opened = open_good(&file);
    assert_int_equal(rapt_safetensors_count(opened), COUNT);
    for (int i = 0; i < COUNT; i++) {
        char name[20];
        rapt_tensor view;
        snprintf(name, sizeof name, "t%d", i);
        assert_int_equal(rapt_safetensors_find(ctx, opened, name, &view), RAPT_OK);
        assert_ptr_equal(view.data, file.data + file.size - COUNT + i);
    }
    rapt_safetensors_close(opened);
    free(file.data);
    free(header);
}

/* ---- broken rules ---- */

static void test_broken_length(void **state) {
    (void)state;
    static const struct {
        uint64_t length;
        size_t size;
        const char *fragment;
    } files[] = {
        {0, 8, "byte 8: the header does not start with '{'"},
        {1, 8, "a header of 1 bytes in a file of 8"},
        {3, 10, "a header of 3 bytes in a file of 10"},
        {100000001, 10, "a header of 100000001 bytes"},
        {UINT64_MAX, 10, "a header of 18446744073709551615 bytes"},
        {UINT64_MAX - 7, 10, "a header of 18446744073709551608 bytes"},
        {2, 7, "7 bytes"},
        {2, 0, "0 bytes"},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        unsigned char whole[10] = {0};
        put_length(whole, files[i].length);
        whole[8] = '{', whole[9] = '}';
        bytes file = {.data = malloc(files[i].size > 0 ? files[i].size : 1), .size = files[i].size};
        assert_non_null(file.data);
        memcpy(file.data, whole, file.size);
        expect_refusal(&file, files[i].fragment);
        free(file.data);
    }
    /* The limit itself, in a file that is large enough for it. */
    size_t size = 100000001;
    bytes large = {.data = calloc(8 + size, 1), .size = 8 + size};
    assert_non_null(large.data);
    memset(large.data + 8, ' ', size);
    large.data[8] = '{', large.data[9] = '}';
    put_length(large.data, size);
    expect_refusal(&large, "at most 100000000 are allowed");
    put_length(large.data, size - 1);
    expect_refusal(&large, "1 bytes follow the last tensor");
    large.size--;
    rapt_safetensors_close(open_good(&large));
    free(large.data);
}

#define A_BODY(body) "{\"a\":{" body "}}"
#define A_SHAPE(shape) A_BODY("\"dtype\":\"U8\",\"data_offsets\":[0,4],\"shape\":" shape)
#define A_OFFSETS(offsets) A_BODY("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets)
#define A_METADATA(metadata) "{\"__metadata__\":" metadata "," TENSOR("a", "U8", "[4]", "[0,4]") "}"
#define A_NAME(name) "{" TENSOR(name, "U8", "[4]", "[0,4]") "}"

/* Each has four bytes of data and breaks one rule. */
static const struct {
    const char *header, *fragment;
} broken[] = {
    /* the object */
    {"", "byte 8: the header does not start with '{'"},
    {" {}", "byte 8: the header does not start with '{'"},
    {"[]", "byte 8: the header does not start with '{'"},
    {"{", "byte 9: the JSON ends too early"},
    {"{\"a\"", "byte 12: the JSON ends too early"},
    {"{\"a\":", "byte 13: the JSON ends too early"},
    {"{a:1}", "byte 9: expected '\"'"},
    {"{'a':1}", "byte 9: expected '\"'"},
    {"{\"a\" 1}", "byte 13: expected ':'"},
    {"{\"a\":1}", "byte 13: expected '{'"},
    {"{\"a\":null}", "byte 13: expected '{'"},
    {"{\"a\":[]}", "byte 13: expected '{'"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") ",}", "expected '\"'"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") " " TENSOR("b", "U8", "[0]", "[4,4]") "}", "expected '}'"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "}\n", "something other than spaces follows"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "}{}", "something other than spaces follows"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "} // remark", "something other than spaces follows"},
    {"{[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "byte 9: expected '\"'"},
    {"{\"a\":{\"a\":{\"a\":{", "tensor 'a' has the key 'a' and should not"},
    /* strings */
    {A_NAME("\xff"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\x80"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xc0\x80"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xc1\xbf"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xe0\x9f\xbf"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xed\xa0\x80"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xf0\x8f\xbf\xbf"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xf4\x90\x80\x80"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xf5\x80\x80\x80"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xe2\x82"), "byte 10: a string is not valid UTF-8"},
    {A_NAME("\xe2\x82z"), "byte 10: a string is not valid UTF-8"},
    {"{\"\xe2\x82", "byte 10: a string is not valid UTF-8"},
    {A_NAME("\n"), "byte 10: a control character in a string"},
    {A_NAME("\x1f"), "byte 10: a control character in a string"},
    {A_NAME("\\x"), "byte 11: an unknown escape in a string"},
    {A_NAME("\\U0041"), "byte 11: an unknown escape in a string"},
    {"{\"\\", "byte 11: an unknown escape in a string"},
    {A_NAME("\\u00g0"), "byte 14: \\u needs four hexadecimal digits"},
    {A_NAME("\\u00"), "byte 14: \\u needs four hexadecimal digits"},
    {"{\"\\u12", "byte 14: \\u needs four hexadecimal digits"},
    {A_NAME("\\ud800"), "byte 12: a surrogate without its other half"},
    {A_NAME("\\ud800\\n"), "byte 12: a surrogate without its other half"},
    {A_NAME("\\ud800\\ud800"), "byte 12: a surrogate without its other half"},
    {A_NAME("\\ud800\\u0041"), "byte 12: a surrogate without its other half"},
    {A_NAME("\\udc00\\ud800"), "byte 12: a surrogate without its other half"},
    {A_NAME("\\ud800\\u00"), "\\u needs four hexadecimal digits"},
    {A_NAME("\\u0000"), "byte 12: a NUL character in a string"},
    {"{\"abc", "byte 9: a string does not end"},
    {"{\"abc\\\"", "byte 9: a string does not end"},
    /* keys */
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("a", "U8", "[4]", "[0,4]") "}",
     "byte 61: tensor 'a' is there twice"},
    {"{" TENSOR("a", "U8", "[2]", "[0,2]") "," TENSOR("\\u0061", "U8", "[2]", "[2,4]") "}",
     "tensor 'a' is there twice"},
    {A_BODY("\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]"), "'a' has the key 'dtype' twice"},
    {A_BODY("\"dtype\":\"U8\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,4]"), "'a' has the key 'shape' twice"},
    {A_BODY("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"data_offsets\":[0,4]"), "'data_offsets' twice"},
    {A_BODY("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":1"), "'a' has the key 'x' and should not"},
    {A_BODY("\"shape\":[4],\"data_offsets\":[0,4]"), "tensor 'a' has no dtype"},
    {A_BODY("\"dtype\":\"U8\",\"data_offsets\":[0,4]"), "tensor 'a' has no shape"},
    {A_BODY("\"dtype\":\"U8\",\"shape\":[4]"), "tensor 'a' has no data_offsets"},
    {A_BODY(""), "tensor 'a' has no dtype"},
    {"{\"a\\u001b\":{}}", "tensor 'a?' has no dtype"},
    /* metadata */
    {A_METADATA("\"text\""), "byte 24: expected '{'"},
    {A_METADATA("null"), "byte 24: expected '{'"},
    {A_METADATA("{\"k\":1}"), "expected '\"'"},
    {A_METADATA("{\"k\":null}"), "expected '\"'"},
    {A_METADATA("{\"k\":{}}"), "expected '\"'"},
    {A_METADATA("{\"k\":[\"v\"]}"), "expected '\"'"},
    {A_METADATA("{\"k\":\"v\",}"), "expected '\"'"},
    {A_METADATA("{\"k\":\"v\",\"\\u006b\":\"w\"}"), "byte 33: metadata 'k' twice"},
    {A_METADATA("{},\"__metadata__\":{}"), "byte 27: __metadata__ is there twice"},
    /* dtypes */
    {"{" TENSOR("a", "F31", "[1]", "[0,4]") "}", "byte 22: tensor 'a' has an unknown dtype 'F31'"},
    {"{" TENSOR("a", "f32", "[1]", "[0,4]") "}", "tensor 'a' has an unknown dtype 'f32'"},
    {"{" TENSOR("a", "F32 ", "[1]", "[0,4]") "}", "tensor 'a' has an unknown dtype 'F32 '"},
    {"{" TENSOR("a", "", "[1]", "[0,4]") "}", "tensor 'a' has an unknown dtype ''"},
    {A_BODY("\"dtype\":1"), "byte 22: expected '\"'"},
    /* shapes */
    {A_SHAPE("4"), "expected '['"},
    {A_SHAPE("null"), "expected '['"},
    {A_SHAPE("[4"), "expected ']'"},
    {A_SHAPE("[4,]"), "expected a non-negative integer"},
    {A_SHAPE("[,4]"), "expected a non-negative integer"},
    {A_SHAPE("[2 2]"), "expected ']'"},
    {A_SHAPE("[[4]]"), "expected a non-negative integer"},
    {A_SHAPE("[\"4\"]"), "expected a non-negative integer"},
    {A_SHAPE("[-4]"), "expected a non-negative integer"},
    {A_SHAPE("[-0]"), "expected a non-negative integer"},
    {A_SHAPE("[+4]"), "expected a non-negative integer"},
    {A_SHAPE("[04]"), "a number starts with 0"},
    {A_SHAPE("[00]"), "a number starts with 0"},
    {A_SHAPE("[4.0]"), "expected an integer"},
    {A_SHAPE("[4e0]"), "expected an integer"},
    {A_SHAPE("[4E0]"), "expected an integer"},
    {A_SHAPE("[0x4]"), "expected ']'"},
    {A_SHAPE("[9223372036854775808]"), "a number is too large"},
    {A_SHAPE("[18446744073709551620]"), "a number is too large"},
    {A_SHAPE("[4294967296,4294967296]"), "tensor 'a' has a shape whose size overflows"},
    {A_SHAPE("[3,4294967296,4294967296,0]"), "tensor 'a' has a shape whose size overflows"},
    {"{" TENSOR("a", "F64", "[1152921504606846976]", "[0,0]") "}", "tensor 'a' has a shape whose size overflows"},
    {"{" TENSOR("a", "F4", "[1,3]", "[0,2]") "}", "tensor 'a' has 3 elements of 4 bits, which end within a byte"},
    {"{" TENSOR("a", "F6_E2M3", "[2]", "[0,2]") "}", "tensor 'a' has 2 elements of 6 bits, which end within a byte"},
    {"{" TENSOR("a", "F4", "[4]", "[0,4]") "}", "tensor 'a' needs 2 bytes for its shape, it has 4"},
    {"{" TENSOR("a", "F6_E3M2", "[4]", "[0,4]") "}", "tensor 'a' needs 3 bytes for its shape, it has 4"},
    {"{" TENSOR("a", "C64", "[1]", "[0,4]") "}", "tensor 'a' needs 8 bytes for its shape, it has 4"},
    {A_SHAPE("[4294967296,4294967296,0]"), "tensor 'a' has a shape whose size overflows"},
    {"{" TENSOR("a", "F32", "[4611686018427387905]", "[0,4]") "}", "tensor 'a' has a shape whose size overflows"},
    {A_SHAPE("[3]"), "tensor 'a' needs 3 bytes for its shape, it has 4"},
    {A_SHAPE("[]"), "tensor 'a' needs 1 bytes for its shape, it has 4"},
    {A_SHAPE("[4,0]"), "tensor 'a' needs 0 bytes for its shape, it has 4"},
    {A_SHAPE("[1,1,1,1,1,1,1,1,1,5]"), "tensor 'a' needs 5 bytes for its shape, it has 4"},
    {"{" TENSOR("a", "F32", "[4]", "[0,4]") "}", "tensor 'a' needs 16 bytes for its shape, it has 4"},
    /* offsets */
    {A_OFFSETS("[]"), "expected a non-negative integer"},
    {A_OFFSETS("[0]"), "expected ','"},
    {A_OFFSETS("[0,4,4]"), "expected ']'"},
    {A_OFFSETS("4"), "expected '['"},
    {A_OFFSETS("[0,-4]"), "expected a non-negative integer"},
    {A_OFFSETS("[0,4.0]"), "expected an integer"},
    {A_OFFSETS("[0,99999999999999999999]"), "a number is too large"},
    {A_OFFSETS("[4,0]"), "tensor 'a' has data_offsets [4, 0] in 4 bytes of data"},
    {A_OFFSETS("[0,5]"), "tensor 'a' has data_offsets [0, 5] in 4 bytes of data"},
    {A_OFFSETS("[0,9223372036854775807]"), "in 4 bytes of data"},
    {A_OFFSETS("[1,4]"), "tensor 'a' needs 4 bytes for its shape, it has 3"},
    {"{" TENSOR("a", "U8", "[3]", "[1,4]") "}", "tensor 'a' follows a hole"},
    {"{" TENSOR("a", "U8", "[1]", "[0,1]") "," TENSOR("b", "U8", "[2]", "[2,4]") "}", "tensor 'b' follows a hole"},
    {"{" TENSOR("a", "U8", "[3]", "[0,3]") "," TENSOR("b", "U8", "[2]", "[2,4]") "}", "tensor 'b' overlaps another"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("b", "U8", "[4]", "[0,4]") "}", "overlaps another"},
    {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("b", "U8", "[0]", "[2,2]") "}", "tensor 'b' overlaps another"},
    {"{" TENSOR("a", "U8", "[3]", "[0,3]") "}", "1 bytes follow the last tensor"},
    {"{}", "byte 10: 4 bytes follow the last tensor"},
};

static void test_broken_rules(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        bytes file = build(broken[i].header, 4);
        expect_refusal(&file, broken[i].fragment);
        free(file.data);
    }
}

/* A NUL byte cannot stand in the table above. */
static void test_nul_bytes(void **state) {
    (void)state;
    static const char inside[] = "{\"a\0b\":{}}", between[] = "{\0}", escaped[] = "{\"\\\0\"", after[] = "{}\0";
    const struct {
        const char *header;
        size_t size;
        const char *fragment;
    } files[] = {
        {inside, sizeof inside - 1, "byte 11: a control character in a string"},
        {between, sizeof between - 1, "byte 9: expected '\"'"},
        {escaped, sizeof escaped - 1, "byte 11: an unknown escape"},
        {after, sizeof after - 1, "byte 10: something other than spaces"},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        bytes file = build_sized(files[i].header, files[i].size, 0);
        expect_refusal(&file, files[i].fragment);
        free(file.data);
    }
}

static void test_long_names_in_messages(void **state) {
    (void)state;
    char name[1001], header[2048];
    for (size_t i = 0; i < 500; i++) memcpy(name + 2 * i, "\xc3\xa9", 3);
    for (int shift = 0; shift < 2; shift++) { /* the cut must fall between characters, wherever they start */
        snprintf(header, sizeof header, "{\"%s%s\":{}}", shift ? "x" : "", name);
        bytes file = build(header, 0);
        expect_refusal(&file, "\xc3\xa9...' has no dtype");
        free(file.data);
    }
}

/* ---- damage ---- */

static void test_every_truncation(void **state) {
    (void)state;
    bytes good = build_aligned(good_header, GOOD_DATA);
    for (size_t size = 0; size < good.size; size++) {
        bytes file = {.data = malloc(size > 0 ? size : 1), .size = size};
        assert_non_null(file.data);
        memcpy(file.data, good.data, size);
        expect_refusal(&file, "safetensors: ");
        free(file.data);
        /* The header cut short, with a length that fits and no data. */
        if (size <= 8 || size > good.size - GOOD_DATA) continue;
        file = build_sized((const char *)good.data + 8, size - 8, 0);
        expect_refusal(&file, "safetensors: ");
        free(file.data);
    }
    free(good.data);
}

/* Whatever a damaged file says: no crash, a message if it is refused, and views inside the file if it is not. */
static void examine(const bytes *file) {
    long live = memory.live;
    rapt_safetensors *opened = NULL;
    rapt_status status = rapt_safetensors_open_memory(ctx, file->data, file->size, &opened);
    if (status != RAPT_OK) {
        assert_int_equal(status, RAPT_ERROR_FORMAT);
        assert_message("safetensors: ");
    }
    for (int64_t i = 0; i < rapt_safetensors_count(opened); i++) {
        rapt_tensor view;
        const char *name = rapt_safetensors_name(opened, i);
        status = rapt_safetensors_find(ctx, opened, name, &view);
        if (status != RAPT_OK) continue;
        size_t size = (size_t)rapt_tensor_count(&view) * rapt_dtype_size(view.dtype);
        assert_true((unsigned char *)view.data >= file->data + 8);
        assert_true((unsigned char *)view.data + size <= file->data + file->size);
    }
    rapt_safetensors_close(opened);
    assert_int_equal(memory.live, live);
}

static void test_every_byte_corrupted(void **state) {
    (void)state;
    bytes file = build_aligned(good_header, GOOD_DATA);
    for (size_t i = 0; i < file.size - GOOD_DATA; i++) {
        unsigned char kept = file.data[i];
        for (int value = 0; value < 256; value++) {
            file.data[i] = (unsigned char)value;
            examine(&file);
        }
        file.data[i] = kept;
    }
    free(file.data);
}

static void test_random_damage(void **state) {
    (void)state;
    static const char spice[] = "{}[]\",:\\u0123456789abtrue-.eE \n\xff\xc3\xa9";
    uint64_t random = 42;
    for (int round = 0; round < 20000; round++) {
        bytes file = build_aligned(good_header, GOOD_DATA);
        for (int changes = 1 + round % 4; changes > 0; changes--) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            size_t at = 8 + (size_t)(random >> 33) % (file.size - 8 - GOOD_DATA);
            file.data[at] = (unsigned char)spice[(random >> 20) % (sizeof spice - 1)];
        }
        examine(&file);
        free(file.data);
    }
}

/* ---- files on disk ---- */

static void write_file(const char *path, const bytes *file) {
    FILE *stream = fopen(path, "wb");
    assert_non_null(stream);
    assert_int_equal(fwrite(file->data, 1, file->size, stream), file->size);
    assert_int_equal(fclose(stream), 0);
}

static void test_files_on_disk(void **state) {
    (void)state;
    char path[] = "/tmp/rapt-safetensors-XXXXXX";
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    close(descriptor);
    rapt_safetensors *opened = NULL;

    assert_int_equal(rapt_safetensors_open(ctx, path, &opened), RAPT_ERROR_FORMAT); /* it is empty as yet */
    assert_message("safetensors: byte 0: 0 bytes");
    bytes file = build_aligned(good_header, GOOD_DATA);
    write_file(path, &file);
    assert_int_equal(rapt_safetensors_open(ctx, path, &opened), RAPT_OK);
    assert_int_equal(unlink(path), 0); /* an open file lives on without its name */
    rapt_tensor view;
    assert_int_equal(rapt_safetensors_find(ctx, opened, "zeta", &view), RAPT_OK);
    assert_memory_equal(view.data, file.data + file.size - GOOD_DATA + 16, 24);
    rapt_safetensors_close(opened);

    assert_int_equal(rapt_safetensors_open(ctx, path, &opened), RAPT_ERROR_FILE);
    assert_null(opened);
    assert_message(path);
    char folder[] = "/tmp/rapt-safetensors-XXXXXX";
    assert_non_null(mkdtemp(folder));
    assert_int_equal(rapt_safetensors_open(ctx, folder, &opened), RAPT_ERROR_FILE);
    assert_message(folder);
    assert_int_equal(rmdir(folder), 0);
    free(file.data);
}

static void test_file_outlives_context(void **state) {
    (void)state;
    rapt_context *other;
    assert_int_equal(rapt_context_create(NULL, &other), RAPT_OK);
    bytes file = build_aligned(good_header, GOOD_DATA);
    rapt_safetensors *opened;
    assert_int_equal(rapt_safetensors_open_memory(other, file.data, file.size, &opened), RAPT_OK);
    rapt_context_destroy(other);
    rapt_tensor view;
    assert_int_equal(rapt_safetensors_find(ctx, opened, "zeta", &view), RAPT_OK);
    rapt_safetensors_close(opened);
    free(file.data);
}

/* ---- memory that runs out ---- */

static void test_every_allocation_refused(void **state) {
    (void)state;
    char header[8192] = "{\"__metadata__\":{";
    size_t used = strlen(header);
    for (int i = 0; i < 40; i++) /* enough for the tables to grow twice */
        used += (size_t)snprintf(header + used, sizeof header - used, "%s\"k%d\":\"v\"", i == 0 ? "" : ",", i);
    for (int i = 0; i < 40; i++)
        used += (size_t)snprintf(header + used, sizeof header - used, "%s" TENSOR("t%d", "F32", "[]", "[%d,%d]"),
                                 i == 0 ? "}," : ",", i, 4 * i, 4 * i + 4);
    header[used] = '}'; /* the rest of the array is zeros */
    bytes file = build(header, 160);
    char path[] = "/tmp/rapt-safetensors-XXXXXX";
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    close(descriptor);
    write_file(path, &file);
    long live = memory.live;
    size_t lent = memory.bytes;
    for (int from_disk = 0; from_disk < 2; from_disk++) {
        long refused = 0;
        for (;; refused++) {
            rapt_safetensors *opened = (rapt_safetensors *)&memory;
            memory.calls = 0;
            memory.refuse_at = refused + 1;
            rapt_status status = from_disk ? rapt_safetensors_open(ctx, path, &opened)
                                           : rapt_safetensors_open_memory(ctx, file.data, file.size, &opened);
            long calls = memory.calls;
            memory.refuse_at = 0;
            if (status != RAPT_OK) assert_null(opened);
            if (status == RAPT_OK) rapt_safetensors_close(opened);
            assert_int_equal(memory.live, live);
            assert_int_equal(memory.bytes, lent);
            if (calls <= refused) break; /* the call made no more allocations than have been refused in turn */
            assert_int_equal(status, RAPT_ERROR_MEMORY);
            assert_message("out of memory");
        }
        assert_int_equal(refused, 2 + 2 * 3 + 2); /* object and strings, two tables of three sizes, their indices */
    }
    assert_int_equal(unlink(path), 0);
    free(file.data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_tensors),
        cmocka_unit_test(test_usable_beside_others),
        cmocka_unit_test(test_find_refuses),
        cmocka_unit_test(test_null_arguments),
        cmocka_unit_test(test_unusual_but_good),
        cmocka_unit_test(test_strings_are_decoded),
        cmocka_unit_test(test_many_tensors),
        cmocka_unit_test(test_broken_length),
        cmocka_unit_test(test_broken_rules),
        cmocka_unit_test(test_nul_bytes),
        cmocka_unit_test(test_long_names_in_messages),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_every_byte_corrupted),
        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_files_on_disk),
        cmocka_unit_test(test_file_outlives_context),
        cmocka_unit_test(test_every_allocation_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
