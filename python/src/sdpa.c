/* sdpa.c - the operator with the meaning of PyTorch's scaled_dot_product_attention
 *
 * Arrays of 2 to 5 dimensions are brought to [A,N,H,L,D] by strides alone: missing sizes and sizes of 1 are broadcast.
 * Masks say who attends, so boolean ones are turned around, in memory of the call's. The two sizes of the batch become
 * one where strides allow it; where they do not, there is a call for each A.
 */
#include "core.h"

enum { QUERY, KEY, VALUE, MASK, DROPOUT, CAUSAL, SCALE, GQA, OFFSET, WINDOW, LENGTHS, START, LSE, ARGUMENTS };
enum { A, N, H, DIMS = 5 };

/* Writes the tensor as one of five dimensions; `rank` is the highest of query, key and value. What has no size for the
 * heads at all, since the rank is 3, is a batch of sequences of one head. */
static int to_five(rapt_tensor *t, const char *name, int32_t rank) {
    if (t->ndim < 2 || t->ndim > rank)
        return PyErr_Format(PyExc_ValueError, "%s has %d dimensions, expected 2 to %d", name, t->ndim,
                            rank < 2 ? DIMS : rank),
               -1;
    int32_t lead = t->ndim - 2;
    int64_t shape[DIMS] = {1, 1, 1, t->shape[lead], t->shape[lead + 1]};
    int64_t stride[DIMS] = {0, 0, 0, t->stride[lead], t->stride[lead + 1]};
    for (int32_t d = 0; d < lead; d++) {
        int32_t to = rank == 3 ? N : 3 - lead + d;
        shape[to] = t->shape[d];
        stride[to] = t->stride[d];
    }
    t->ndim = DIMS;
    memcpy(t->shape, shape, sizeof shape);
    memcpy(t->stride, stride, sizeof stride);
    return 0;
}

static int broadcast(rapt_tensor *t, const char *name, int32_t d, int64_t size) {
    if (t->shape[d] == size) return 0;
    if (t->shape[d] != 1)
        return PyErr_Format(PyExc_ValueError, "%s has a size of %lld that does not broadcast to %lld", name,
                            (long long)t->shape[d], (long long)size),
               -1;
    t->shape[d] = size;
    t->stride[d] = 0;
    return 0;
}

/* The size that three broadcast to, if they do. */
static int64_t common(const rapt_tensor *const *t, int32_t d) {
    for (int i = 0; i < 3; i++)
        if (t[i]->shape[d] != 1) return t[i]->shape[d];
    return 1;
}

/* Brings batch and heads of query, key and value together. Key and value with a single head stay so: the library shares
 * it among the query's. */
static int match(rapt_tensor *q, rapt_tensor *k, rapt_tensor *v, bool grouped) {
    const rapt_tensor *all[] = {q, k, v};
    for (int32_t d = A; d <= N; d++) {
        int64_t size = common(all, d);
        if (broadcast(q, "query", d, size) < 0 || broadcast(k, "key", d, size) < 0 ||
            broadcast(v, "value", d, size) < 0)
            return -1;
    }
    int64_t heads = k->shape[H] != 1 ? k->shape[H] : v->shape[H];
    if (broadcast(k, "key", H, heads) < 0 || broadcast(v, "value", H, heads) < 0) return -1;
    if (q->shape[H] == 1 && !grouped) return broadcast(q, "query", H, heads);
    if (!grouped && heads != 1 && heads != q->shape[H])
        return PyErr_Format(PyExc_ValueError,
                            "query has %lld heads, key and value have %lld: pass enable_gqa=True for heads in groups",
                            (long long)q->shape[H], (long long)heads),
               -1;
    return 0;
}

/* The mask, where true attends, as one where true blocks; contiguous, in memory of the call's. */
static int turn_around(core_call *call, rapt_tensor *mask) {
    rapt_tensor turned = *mask;
    int64_t count = 1;
    for (int32_t d = DIMS - 1; d >= 0; d--) {
        if (mask->stride[d] == 0 && mask->shape[d] > 0) turned.shape[d] = 1; /* no need to write it out */
        turned.stride[d] = count;
        count *= turned.shape[d];
    }
    unsigned char *to = core_call_allocate(call, (size_t)count);
    if (to == NULL) return -1;
    turned.data = to;
    const int64_t *n = turned.shape, *s = mask->stride;
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t c = 0; c < n[2]; c++)
                for (int64_t i = 0; i < n[3]; i++) {
                    const unsigned char *from =
                        (const unsigned char *)mask->data + a * s[0] + b * s[1] + c * s[2] + i * s[3];
                    if (s[4] == 1)
                        for (int64_t j = 0; j < n[4]; j++) *to++ = from[j] == 0;
                    else
                        for (int64_t j = 0; j < n[4]; j++) *to++ = from[j * s[4]] == 0;
                }
    for (int32_t d = 0; d < DIMS; d++) {
        if (turned.shape[d] != mask->shape[d]) turned.stride[d] = 0;
        turned.shape[d] = mask->shape[d];
    }
    *mask = turned;
    return 0;
}

/* Checks the mask against [A,N,H,L,S]. H and L may stay 1, and so may A with N. */
static int match_mask(core_call *call, rapt_tensor *mask, const int64_t *size) {
    for (int32_t d = 0; d < DIMS; d++)
        if (mask->shape[d] != 1 && mask->shape[d] != size[d])
            return PyErr_Format(PyExc_ValueError,
                                "attn_mask has a size of %lld that does not broadcast to [..., L, S] = [%lld, %lld, "
                                "%lld, %lld, %lld]",
                                (long long)mask->shape[d], (long long)size[0], (long long)size[1], (long long)size[2],
                                (long long)size[3], (long long)size[4]),
                   -1;
    broadcast(mask, "attn_mask", 4, size[4]);
    for (int32_t d = A; d <= N && mask->shape[A] * mask->shape[N] != 1; d++) broadcast(mask, "attn_mask", d, size[d]);
    return mask->dtype == RAPT_BOOL ? turn_around(call, mask) : 0;
}

rapt_tensor *core_take_mask(core_call *call, PyObject *object, int32_t rank, const int64_t *size) {
    rapt_tensor *mask = core_take(call, object, "attn_mask", false);
    if (mask != NULL && mask->ndim == 1) { /* [S] */
        mask->ndim = 2;
        mask->shape[1] = mask->shape[0];
        mask->stride[1] = mask->stride[0];
        mask->shape[0] = 1;
    }
    if (mask == NULL || to_five(mask, "attn_mask", rank) < 0 || match_mask(call, mask, size) < 0) return NULL;
    return mask;
}

/* [A,N,...] as [A*N,...], if strides allow it. */
static bool mergeable(const rapt_tensor *t) {
    return t->shape[A] == 1 || t->shape[N] == 1 || t->stride[A] == t->stride[N] * t->shape[N];
}

rapt_tensor core_merge(const rapt_tensor *t) {
    rapt_tensor four = *t;
    four.ndim = 4;
    memmove(four.shape, t->shape + 1, 4 * sizeof *t->shape);
    memmove(four.stride, t->stride + 1, 4 * sizeof *t->stride);
    four.shape[0] *= t->shape[A];
    if (t->shape[N] == 1) four.stride[0] = t->stride[A];
    return four;
}

static rapt_tensor slice(const rapt_tensor *t, int64_t a) {
    rapt_tensor part = *t;
    if (t->shape[A] > 1) part.data = (char *)t->data + a * t->stride[A] * (int64_t)rapt_dtype_size(t->dtype);
    part.shape[A] = 1;
    return core_merge(&part);
}

static int take_band(core_call *call, PyObject *args, rapt_options *o) {
    PyObject *offset = PyTuple_GetItem(args, OFFSET), *window = PyTuple_GetItem(args, WINDOW);
    int causal = PyObject_IsTrue(PyTuple_GetItem(args, CAUSAL));
    if (causal < 0) return -1;
    o->causal = causal > 0;
    if (PyUnicode_Check(offset)) {
        if (PyUnicode_CompareWithASCIIString(offset, "bottom_right") != 0)
            return PyErr_Format(PyExc_ValueError, "causal_offset is %R, expected integers or \"bottom_right\"", offset),
                   -1;
        o->align_bottom_right = true;
    } else if (PyLong_Check(offset)) {
        o->offset = PyLong_AsLongLong(offset);
        if (PyErr_Occurred()) return -1;
    } else if ((o->offsets = core_take_integers(call, offset, "causal_offset", call->batch)) == NULL) {
        return -1;
    }
    if (window == Py_None) return 0;
    if (!PySequence_Check(window) || PySequence_Size(window) != 2)
        return PyErr_Format(PyExc_ValueError, "window is %R, expected a pair (left, right)", window), -1;
    for (int side = 0; side < 2; side++) {
        PyObject *item = PySequence_GetItem(window, side);
        if (item == NULL) return -1;
        int64_t limit = item != Py_None ? PyLong_AsLongLong(item) : 0;
        *(side == 0 ? &o->limit_left : &o->limit_right) = item != Py_None;
        *(side == 0 ? &o->left : &o->right) = limit;
        Py_DECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static int take_options(core_call *call, PyObject *args, rapt_options *o) {
    memset(o, 0, sizeof *o);
    PyObject *scale = PyTuple_GetItem(args, SCALE), *lengths = PyTuple_GetItem(args, LENGTHS),
             *start = PyTuple_GetItem(args, START);
    o->dropout = PyFloat_AsDouble(PyTuple_GetItem(args, DROPOUT));
    o->set_scale = scale != Py_None;
    if (o->set_scale) o->scale = PyFloat_AsDouble(scale);
    if (PyErr_Occurred() || take_band(call, args, o) < 0) return -1;
    if (lengths != Py_None && (o->key_lengths = core_take_integers(call, lengths, "key_lengths", call->batch)) == NULL)
        return -1;
    if (start != Py_None && (o->key_start = core_take_integers(call, start, "key_start", call->batch)) == NULL)
        return -1;
    if (o->dropout > 0) core_draw(o);
    return 0;
}

typedef struct problem {
    rapt_tensor *query, *key, *value, *mask, *lse, *out; /* of five dimensions; mask and lse may be NULL */
    rapt_options options;
} problem;

static rapt_status compute(rapt_context *context, const problem *p) {
    rapt_tensor *const all[] = {p->query, p->key, p->value, p->out, p->mask, p->lse};
    bool one = true;
    for (int i = 0; i < 6; i++)
        if (all[i] != NULL && !mergeable(all[i])) one = false;
    int64_t batch = p->query->shape[N];
    for (int64_t a = 0; a < (one ? 1 : p->query->shape[A]); a++) {
        rapt_tensor t[6];
        for (int i = 0; i < 6; i++)
            if (all[i] != NULL) t[i] = one ? core_merge(all[i]) : slice(all[i], a);
        if (p->lse != NULL) t[5].ndim = 3;
        rapt_options o = p->options;
        o.attn_mask = p->mask != NULL ? &t[4] : NULL;
        o.lse = p->lse != NULL ? &t[5] : NULL;
        if (o.offsets != NULL) o.offsets += a * batch;
        if (o.key_lengths != NULL) o.key_lengths += a * batch;
        if (o.key_start != NULL) o.key_start += a * batch;
        if (o.dropout > 0) o.dropout_offset += (uint64_t)a << 40; /* each draws for itself */
        rapt_status status = rapt_attention_forward(context, &t[0], &t[1], &t[2], &o, &t[3]);
        if (status != RAPT_OK) return status;
    }
    return RAPT_OK;
}

/* A new array of [lead..., L, width], or [lead..., L] for a width of 0, and its view of five dimensions. */
static PyObject *make_result(core_call *call, PyObject *prototype, const problem *p, int32_t rank, int64_t width,
                             rapt_dtype dtype, rapt_tensor **view) {
    const rapt_tensor *q = p->query;
    int64_t shape[DIMS], five[DIMS] = {q->shape[A], q->shape[N], q->shape[H], q->shape[3], width};
    int32_t ndim = 0;
    for (int32_t d = 0; d < rank - 2; d++) shape[ndim++] = rank == 3 ? five[N] : five[3 - (rank - 2) + d];
    shape[ndim++] = five[3];
    if (dtype == 0) shape[ndim++] = width;
    PyObject *result = core_empty_like(prototype, ndim, shape, dtype);
    if (result == NULL) return NULL;
    *view = core_take(call, result, dtype == 0 ? "out" : "lse", true);
    if (*view == NULL) return Py_DECREF(result), NULL;
    if (dtype != 0) five[4] = 1;
    **view = rapt_tensor_of((*view)->data, (*view)->dtype, DIMS, five);
    return result;
}

const char core_sdpa_doc[] = "scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, "
                             "enable_gqa, causal_offset,\n"
                             "                             window, key_lengths, key_start, return_lse)\n--\n\n"
                             "rapt.scaled_dot_product_attention without defaults.";

PyObject *core_sdpa(PyObject *module, PyObject *args) {
    (void)module;
    if (PyTuple_Size(args) != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "expected %d arguments, not %zd", ARGUMENTS, PyTuple_Size(args));
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    PyObject *query = PyTuple_GetItem(args, QUERY), *mask = PyTuple_GetItem(args, MASK), *result = NULL;
    PyObject *out = NULL, *lse = NULL;
    int grouped = PyObject_IsTrue(PyTuple_GetItem(args, GQA)), with_lse = PyObject_IsTrue(PyTuple_GetItem(args, LSE));
    if (grouped < 0 || with_lse < 0) return NULL;
    if (!core_is_numpy(query)) {
        PyObject *arrays = PyTuple_GetSlice(args, QUERY, MASK + 1);
        int checked = arrays != NULL ? core_check_torch(arrays) : -1;
        Py_XDECREF(arrays);
        if (checked < 0) return NULL;
    }
    problem p = {0};
    core_call call;
    core_call_begin(&call);

    p.query = core_take(&call, query, "query", false);
    if (p.query != NULL) p.key = core_take(&call, PyTuple_GetItem(args, KEY), "key", false);
    if (p.key != NULL) p.value = core_take(&call, PyTuple_GetItem(args, VALUE), "value", false);
    if (p.value == NULL) goto end;
    int32_t rank = p.query->ndim > p.key->ndim ? p.query->ndim : p.key->ndim;
    if (p.value->ndim > rank) rank = p.value->ndim;
    if (rank > DIMS) rank = DIMS;
    if (to_five(p.query, "query", rank) < 0 || to_five(p.key, "key", rank) < 0 || to_five(p.value, "value", rank) < 0 ||
        match(p.query, p.key, p.value, grouped > 0) < 0)
        goto end;
    call.batch = p.query->shape[A] * p.query->shape[N];
    if (take_options(&call, args, &p.options) < 0) goto end;
    if (mask != Py_None) {
        const int64_t *q = p.query->shape, size[DIMS] = {q[A], q[N], q[H], q[3], p.key->shape[3]};
        p.mask = core_take_mask(&call, mask, rank, size);
        if (p.mask == NULL) goto end;
    }
    out = make_result(&call, query, &p, rank, p.value->shape[4], 0, &p.out);
    if (out == NULL) goto end;
    rapt_dtype sums = p.query->dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32;
    if (with_lse > 0 && (lse = make_result(&call, query, &p, rank, 0, sums, &p.lse)) == NULL) goto end;

    PyThreadState *released = PyEval_SaveThread();
    rapt_status status = compute(context, &p);
    PyEval_RestoreThread(released);
    if (status != RAPT_OK) {
        core_raise(context, status);
        goto end;
    }
    result = core_finish(query, out);
    out = NULL;
    if (result != NULL && lse != NULL) {
        lse = core_finish(query, lse);
        PyObject *pair = lse != NULL ? PyTuple_New(2) : NULL;
        if (pair != NULL) {
            PyTuple_SetItem(pair, 0, result);
            PyTuple_SetItem(pair, 1, lse);
            lse = NULL;
        } else {
            Py_DECREF(result);
        }
        result = pair;
    }
end:
    Py_XDECREF(out);
    Py_XDECREF(lse);
    core_call_end(&call);
    return result;
}
