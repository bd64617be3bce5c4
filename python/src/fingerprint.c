/* fingerprint.c - one number that tells whether arrays still hold the bytes that they held
 *
 * PyTorch's layer asks before it uses weights that were packed earlier, since writes through parameter.data leave no
 * other trace. Every byte counts, at the speed of memory, and what is long is read by all threads. Eight sums of 64 bits
 * each take a word of a block of 64 bytes: the word itself, in a neighbour's sum, so that one changed word always shows,
 * and the product of its halves under a key that is another for each block, so that the order counts. It is no
 * cryptography, and promised to be the same within one process only.
 */
#include "core.h"

#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { BLOCK = 64, SUMS = 8 };

static const uint64_t odd = 0x9E3779B97F4A7C15; /* 2^64 over the golden ratio */

typedef struct stream {
    uint64_t words[SUMS], products[SUMS], keys[SUMS];
    unsigned char rest[BLOCK]; /* bytes that do not fill a block yet */
    size_t num_rest;
} stream;

typedef uint64_t two __attribute__((vector_size(16)));

static inline two product_of_halves(two x) {
#ifdef __x86_64__ /* gcc does not find the instruction by itself */
    return (two)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
#else
    return (x & 0xFFFFFFFF) * (x >> 32);
#endif
}

static void add_blocks_anywhere(stream *s, const unsigned char *bytes, size_t count) {
    two words[SUMS / 2], products[SUMS / 2], keys[SUMS / 2], x;
    memcpy(words, s->words, sizeof words);
    memcpy(products, s->products, sizeof products);
    memcpy(keys, s->keys, sizeof keys);
    for (; count > 0; count--, bytes += BLOCK)
        for (int i = 0; i < SUMS / 2; i++) {
            memcpy(&x, bytes + i * (int)sizeof x, sizeof x);
            words[i] += x;
            products[i] += product_of_halves(x ^ keys[i]);
            keys[i] += odd;
        }
    memcpy(s->words, words, sizeof words);
    memcpy(s->products, products, sizeof products);
    memcpy(s->keys, keys, sizeof keys);
}

#ifdef __x86_64__
/* The same twice as fast: with vectors of two it is computing that takes the time, and not reading. */
typedef uint64_t four __attribute__((vector_size(32)));

__attribute__((target("avx2"))) static void add_blocks_avx2(stream *s, const unsigned char *bytes, size_t count) {
    four words[SUMS / 4], products[SUMS / 4], keys[SUMS / 4], x;
    memcpy(words, s->words, sizeof words);
    memcpy(products, s->products, sizeof products);
    memcpy(keys, s->keys, sizeof keys);
    for (; count > 0; count--, bytes += BLOCK)
        for (int i = 0; i < SUMS / 4; i++) {
            memcpy(&x, bytes + i * (int)sizeof x, sizeof x);
            words[i] += x;
            x ^= keys[i];
            products[i] += (four)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
            keys[i] += odd;
        }
    memcpy(s->words, words, sizeof words);
    memcpy(s->products, products, sizeof products);
    memcpy(s->keys, keys, sizeof keys);
}
#endif

static void add_blocks(stream *s, const unsigned char *bytes, size_t count) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        add_blocks_avx2(s, bytes, count);
        return;
    }
#endif
    add_blocks_anywhere(s, bytes, count);
}

static void begin(stream *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SUMS; i++) /* digits of pi; what tells the eight sums apart */
        s->keys[i] = 0x243F6A8885A308D3 + 0x13198A2E03707344 * (uint64_t)i;
}

static void add(stream *s, const void *memory, size_t size) {
    const unsigned char *bytes = memory;
    if (s->num_rest > 0) {
        size_t part = size < BLOCK - s->num_rest ? size : BLOCK - s->num_rest;
        memcpy(s->rest + s->num_rest, bytes, part);
        bytes += part;
        size -= part;
        if ((s->num_rest += part) < BLOCK) return;
        add_blocks(s, s->rest, 1);
        s->num_rest = 0;
    }
    add_blocks(s, bytes, size / BLOCK);
    s->num_rest = size % BLOCK;
    memcpy(s->rest, bytes + (size - s->num_rest), s->num_rest);
}

static uint64_t end(stream *s) {
    memset(s->rest + s->num_rest, 0, BLOCK - s->num_rest); /* sizes are part of what was added, so zeros are no lie */
    add_blocks(s, s->rest, 1);
    uint64_t mixed = 0;
    for (int i = 0; i < SUMS; i++) {
        uint64_t sum = s->products[i] + s->words[i ^ 1];
        mixed = (mixed ^ sum ^ sum >> 32) * odd;
        mixed ^= mixed >> 29;
    }
    return mixed;
}

/* Long runs of bytes count by the numbers of their parts, however many threads there are. */
enum { PARTS = 16, LONG = 1 << 20 };

typedef struct parts {
    const unsigned char *bytes;
    size_t size, step;
    uint64_t found[PARTS];
} parts;

static void read_part(void *arg, int64_t index) {
    parts *p = arg;
    size_t at = (size_t)index * p->step, size = p->size - at;
    stream s;
    begin(&s);
    add(&s, p->bytes + at, size < p->step ? size : p->step);
    p->found[index] = end(&s);
}

static void add_run(stream *s, const void *memory, size_t size, core_parallel_for *run) {
    if (size < LONG) {
        add(s, memory, size);
        return;
    }
    parts p = {memory, size, (size / PARTS + BLOCK) / BLOCK * BLOCK, {0}};
    if (run != NULL)
        run(NULL, PARTS, read_part, &p);
    else
        for (int64_t i = 0; i < PARTS; i++) read_part(&p, i);
    add(s, p.found, sizeof p.found);
}

/* The bytes of a tensor, in the order of memory, after what says how they are to be read. */
static void add_tensor(stream *s, const rapt_tensor *tensor, core_parallel_for *run_parts) {
    int64_t header[2 + 2 * RAPT_MAX_DIMS] = {(int64_t)tensor->dtype, tensor->ndim};
    int64_t size[RAPT_MAX_DIMS], step[RAPT_MAX_DIMS], at[RAPT_MAX_DIMS] = {0};
    int64_t bytes = (int64_t)rapt_dtype_size(tensor->dtype), run = bytes;
    const char *data = tensor->data;
    int32_t count = 0; /* of dimensions in which memory is stepped through, the largest step first */
    for (int32_t d = 0; d < tensor->ndim; d++) {
        header[2 + 2 * d] = tensor->shape[d];
        header[3 + 2 * d] = tensor->stride[d];
        if (tensor->shape[d] == 0) data = NULL;
    }
    add(s, header, sizeof header);
    if (data == NULL) return;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        int64_t n = tensor->shape[d], stride = tensor->stride[d] * bytes;
        if (n == 1 || stride == 0) continue; /* the same bytes again */
        if (stride < 0) {
            data += (n - 1) * stride;
            stride = -stride;
        }
        int32_t place = count++;
        for (; place > 0 && step[place - 1] < stride; place--) {
            size[place] = size[place - 1];
            step[place] = step[place - 1];
        }
        size[place] = n;
        step[place] = stride;
    }
    while (count > 0 && step[count - 1] == run) run *= size[--count];
    for (int32_t d = 0; d >= 0;) {
        add_run(s, data, (size_t)run, run_parts);
        for (d = count - 1; d >= 0; d--) {
            data += step[d];
            if (++at[d] < size[d]) break;
            data -= step[d] * size[d];
            at[d] = 0;
        }
    }
}

const char core_fingerprint_doc[] = "fingerprint(*arrays)\n--\n\n"
                                    "A number of 64 bits that changes when a byte, a shape or a stride of the arrays "
                                    "does. None counts as an array that\n"
                                    "is not there. Within one process, equal arrays have equal ones.";

PyObject *core_fingerprint(PyObject *module, PyObject *args) {
    (void)module;
    const rapt_tensor *tensors[CORE_MAX_TENSORS];
    Py_ssize_t count = PyTuple_Size(args);
    if (count > CORE_MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "%zd arrays in one call", count);
    core_call call;
    core_call_begin(&call);
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (core_take_optional(&call, PyTuple_GetItem(args, i), "array", false, &tensors[i]) < 0) goto end;
        if (tensors[i] != NULL && tensors[i]->device != RAPT_DEVICE_CPU) {
            PyErr_SetString(PyExc_ValueError, "an array is on another device, expected the CPU");
            goto end;
        }
    }
    stream s;
    core_parallel_for *run_parts = core_borrowed_for();
    PyThreadState *released = PyEval_SaveThread();
    begin(&s);
    add(&s, &count, sizeof count);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t there = tensors[i] != NULL;
        add(&s, &there, sizeof there);
        if (there) add_tensor(&s, tensors[i], run_parts);
    }
    uint64_t found = end(&s);
    PyEval_RestoreThread(released);
    result = PyLong_FromUnsignedLongLong(found);
end:
    core_call_end(&call);
    return result;
}
