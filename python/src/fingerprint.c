/* fingerprint.c - one number that tells whether arrays still hold the bytes that they held
 *
 * PyTorch's layer asks before it uses weights that were packed earlier, since writes through parameter.data leave no
 * other trace. Every byte counts, at the speed of memory. Eight sums of 64 bits each take a word of a block of 64 bytes:
 * the word itself, in a neighbour's sum, so that one changed word always shows, and the product of its halves under a
 * key that is another for each block, so that the order counts. It is no cryptography, and promised to be the same within
 * one process only.
 */
#include "core.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BLOCK = 64, LANES = 4 };

typedef uint64_t pair __attribute__((vector_size(16)));

static const uint64_t odd = 0x9E3779B97F4A7C15; /* 2^64 over the golden ratio */

typedef struct stream {
    pair sum[LANES], key[LANES];
    unsigned char rest[BLOCK]; /* bytes that do not fill a block yet */
    size_t num_rest;
} stream;

static inline pair product_of_halves(pair x) {
#ifdef __SSE2__ /* gcc does not find the instruction by itself */
    return (pair)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
#else
    return (x & 0xFFFFFFFF) * (x >> 32);
#endif
}

static inline pair added(pair sum, pair *key, const unsigned char *bytes) {
    pair x;
    memcpy(&x, bytes, sizeof x);
    sum += product_of_halves(x ^ *key) + (pair){x[1], x[0]};
    *key += odd;
    return sum;
}

static void add_blocks(stream *s, const unsigned char *bytes, size_t count) {
    pair a = s->sum[0], b = s->sum[1], c = s->sum[2], d = s->sum[3];
    pair e = s->key[0], f = s->key[1], g = s->key[2], h = s->key[3];
    for (; count > 0; count--, bytes += BLOCK) {
        a = added(a, &e, bytes);
        b = added(b, &f, bytes + 16);
        c = added(c, &g, bytes + 32);
        d = added(d, &h, bytes + 48);
    }
    s->sum[0] = a, s->sum[1] = b, s->sum[2] = c, s->sum[3] = d;
    s->key[0] = e, s->key[1] = f, s->key[2] = g, s->key[3] = h;
}

static void begin(stream *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < LANES; i++) /* digits of pi; what tells the eight sums apart */
        s->key[i] = (pair){0x243F6A8885A308D3 + 0x13198A2E03707344 * (uint64_t)(2 * i),
                           0x243F6A8885A308D3 + 0x13198A2E03707344 * (uint64_t)(2 * i + 1)};
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
    uint64_t words[2 * LANES], mixed = 0;
    memcpy(words, s->sum, sizeof words);
    for (int i = 0; i < 2 * LANES; i++) {
        mixed = (mixed ^ words[i] ^ words[i] >> 32) * odd;
        mixed ^= mixed >> 29;
    }
    return mixed;
}

/* The bytes of a tensor, in the order of memory, after what says how they are to be read. */
static void add_tensor(stream *s, const rapt_tensor *tensor) {
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
        add(s, data, (size_t)run);
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
    PyThreadState *released = PyEval_SaveThread();
    begin(&s);
    add(&s, &count, sizeof count);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t there = tensors[i] != NULL;
        add(&s, &there, sizeof there);
        if (there) add_tensor(&s, tensors[i]);
    }
    uint64_t found = end(&s);
    PyEval_RestoreThread(released);
    result = PyLong_FromUnsignedLongLong(found);
end:
    core_call_end(&call);
    return result;
}
