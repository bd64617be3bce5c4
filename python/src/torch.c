/* torch.c - the shortest way through rapt.torch.scaled_dot_product_attention
 *
 * A small call takes 2 us here and PyTorch's own takes 9, so what surrounds it must not cost more than PyTorch's does:
 * checks, the new tensor and what autograd keeps are made here, in one call. It serves plain tensors of four dimensions
 * without dropout or a band of their own; for everything else it returns None, and Python code does it at length, or
 * says what is wrong with it.
 *
 * New tensors come from LibTorch's stable ABI, which takes half the time of torch.empty_strided; Python hands the
 * addresses in, since nothing here is linked with PyTorch, and versions before 2.14 do not have them.
 */
#include "core.h"

#include <sys/mman.h>

typedef int32_t empty_function(int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t dtype,
                               int32_t device_type, int32_t device_index, void **tensor);
typedef int32_t wrap_function(void *tensor, void *type, void **object);
typedef int32_t delete_function(void *tensor);

static struct {
    PyObject *tensor_type, *parameter_type;
    PyObject *apply; /* of the autograd.Function whose forward is core_torch_record */
    PyObject *empty; /* (prototype, shape, strides) -> tensor: for large ones, and where the three below are missing */
    empty_function *make;
    wrap_function *wrap;
    delete_function *delete;
} torch;
static PyObject *name_is_neg, *name_requires_grad, *name_save, *name_materialize, *name_record, *name_saved,
    *name_wanted;

/* ---- what autograd keeps beside tensors ---- */

typedef struct record_object {
    PyObject_HEAD rapt_options options;
    rapt_tensor mask, lse; /* mask: a boolean one, turned around; without one its data is NULL */
    PyObject *out, *kept;  /* until autograd has them: the result, and a mask of numbers or NULL */
} record_object;

static PyObject *record_type;

static record_object *new_record(int64_t batch, int64_t heads, int64_t queries) {
    record_object *record = PyObject_New(record_object, (PyTypeObject *)record_type);
    if (record == NULL) return NULL;
    record->mask.data = NULL;
    record->out = record->kept = NULL;
    void *memory = malloc((size_t)(batch * heads * queries) * sizeof(double));
    record->lse = rapt_tensor_of(memory, RAPT_F64, 3, (int64_t[]){batch, heads, queries});
    if (memory != NULL) return record;
    Py_DECREF(record);
    PyErr_NoMemory();
    return NULL;
}

static void record_free(PyObject *self) {
    record_object *record = (record_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    free(record->mask.data);
    free(record->lse.data);
    Py_XDECREF(record->out);
    Py_XDECREF(record->kept);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *record_lse(PyObject *self, void *none) {
    (void)none;
    return core_view(&((record_object *)self)->lse, self, false);
}

static PyObject *record_mask(PyObject *self, void *none) {
    (void)none;
    const rapt_tensor *mask = &((record_object *)self)->mask;
    return mask->data != NULL ? core_view(mask, self, false) : core_none();
}

static PyObject *record_options(PyObject *self, void *none) {
    (void)none;
    const rapt_options *o = &((record_object *)self)->options;
    return Py_BuildValue("{s:O,s:N}", "causal", o->causal ? Py_True : Py_False, "scale",
                         o->set_scale ? PyFloat_FromDouble(o->scale) : core_none());
}

static PyGetSetDef record_attributes[] = {
    {"lse", record_lse, NULL, "[N, H, L] in float64", NULL},
    {"mask", record_mask, NULL, "a boolean mask that blocks, or None", NULL},
    {"options", record_options, NULL, "a dict", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot record_slots[] = {
    {Py_tp_doc, "What torch_attend keeps for torch_backward."},
    {Py_tp_dealloc, record_free},
    {Py_tp_getset, record_attributes},
    {0, NULL},
};
static PyType_Spec record_spec = {"rapt._core.Record", sizeof(record_object), 0, Py_TPFLAGS_DEFAULT, record_slots};

/* ---- tensors ---- */

static PyObject *sizes_tuple(const int64_t *sizes) {
    return Py_BuildValue("(LLLL)", (long long)sizes[0], (long long)sizes[1], (long long)sizes[2], (long long)sizes[3]);
}

/* A new, dense tensor of four dimensions on the CPU, of the prototype's type. */
static PyObject *new_tensor(PyObject *prototype, rapt_dtype dtype, const int64_t *shape, const int64_t *strides) {
    enum { LARGE = 4 << 20 }; /* bytes, for which there may be memory (_results.py) */
    int64_t bytes = shape[0] * shape[1] * shape[2] * shape[3] * (int64_t)rapt_dtype_size(dtype);
    if (torch.make == NULL || bytes >= LARGE) {
        PyObject *sizes = sizes_tuple(shape), *steps = sizes_tuple(strides), *made = NULL;
        if (sizes != NULL && steps != NULL)
            made = PyObject_CallFunctionObjArgs(torch.empty, prototype, sizes, steps, NULL);
        Py_XDECREF(sizes);
        Py_XDECREF(steps);
        return made;
    }
    static const int32_t codes[] = {[RAPT_F32] = 6, [RAPT_F64] = 7, [RAPT_BF16] = 15, [RAPT_F16] = 5};
    void *tensor, *object;
    if (torch.make(4, shape, strides, codes[dtype], 0, 0, &tensor) != 0) return PyErr_NoMemory();
    int32_t failed = torch.wrap(tensor, NULL, &object);
    torch.delete(tensor);
    return failed == 0 ? object : PyErr_NoMemory();
}

const char core_torch_prefer_large_pages_doc[] =
    "torch_prefer_large_pages(address, size)\n--\n\n"
    "Asks the system for large pages for memory that nobody has written to.";

PyObject *core_torch_prefer_large_pages(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address, size;
    if (!PyArg_ParseTuple(args, "KK", &address, &size)) return NULL;
#ifdef MADV_HUGEPAGE
    enum { PAGE = 4096 };
    uintptr_t begin = ((uintptr_t)address + PAGE - 1) / PAGE * PAGE, end = (uintptr_t)(address + size);
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* or not: it is a wish */
#endif
    return core_none();
}

/* The strides of a dense tensor whose dimensions lie in the order of another's. */
static void strides_like(const rapt_tensor *t, int64_t *strides) {
    int order[4] = {0, 1, 2, 3}; /* from the outermost in */
    for (int i = 1; i < 4; i++)
        for (int j = i; j > 0 && t->stride[order[j - 1]] < t->stride[order[j]] && t->stride[order[j - 1]] != 0; j--) {
            int before = order[j - 1];
            order[j - 1] = order[j];
            order[j] = before;
        }
    int64_t stride = 1;
    for (int i = 3; i >= 0; i--) {
        strides[order[i]] = stride;
        stride *= t->shape[order[i]];
    }
}

/* Whether it is a tensor and nothing more: whatever else has methods of its own, which nobody expects to be called. */
static bool is_tensor(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == torch.tensor_type || type == torch.parameter_type;
}

/* Whether a tensor's memory does not tell all. */
static bool is_negative(PyObject *tensor) {
    PyObject *negative = PyObject_CallMethodObjArgs(tensor, name_is_neg, NULL);
    Py_XDECREF(negative);
    return negative != Py_False;
}

static bool wants_gradient(PyObject *object) {
    PyObject *wants = PyObject_GetAttr(object, name_requires_grad);
    Py_XDECREF(wants);
    return wants == Py_True;
}

/* Views of query, key and value, if they fit each other without being broadcast. */
static bool take_three(core_call *call, PyObject *const *objects, bool grouped, rapt_tensor *t[3]) {
    static const char *const names[] = {"query", "key", "value"};
    for (int i = 0; i < 3; i++) {
        if (is_negative(objects[i]) || (t[i] = core_take(call, objects[i], names[i], false)) == NULL) return false;
        if (t[i]->ndim != 4 || t[i]->dtype != t[0]->dtype || t[i]->dtype == RAPT_BOOL ||
            t[i]->device != RAPT_DEVICE_CPU || t[i]->shape[0] != t[0]->shape[0])
            return false;
        for (int d = 0; d < 4; d++)
            if (t[i]->shape[d] == 0) return false;
    }
    int64_t heads = t[0]->shape[1], shared = t[1]->shape[1];
    return shared == t[2]->shape[1] && (heads == shared || (grouped && heads % shared == 0));
}

/* The mask as [N,H,L,S], where true blocks. */
static bool take_mask(core_call *call, PyObject *object, const rapt_tensor *query, const rapt_tensor *key,
                      rapt_tensor *mask) {
    if (is_negative(object)) return false;
    const int64_t size[] = {1, query->shape[0], query->shape[1], query->shape[2], key->shape[2]};
    const rapt_tensor *taken = core_take_mask(call, object, 4, size);
    if (taken == NULL || taken->device != RAPT_DEVICE_CPU ||
        (taken->dtype != RAPT_BOOL && taken->dtype != RAPT_F32 && taken->dtype != query->dtype))
        return false;
    *mask = core_merge(taken);
    return true;
}

/* ---- calls ---- */

const char core_torch_attend_doc[] =
    "torch_attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, grad_enabled)\n--\n\n"
    "rapt.torch.scaled_dot_product_attention for tensors that make no trouble; None for others.";

/* The result, or NULL, with an exception or without: this is not for us. */
static PyObject *attend(PyObject *const *objects, PyObject *mask_object, rapt_options *o, bool grouped, bool recording,
                        core_call *call, record_object **record) {
    rapt_context *context = core_context();
    rapt_tensor *t[3], mask;
    if (context == NULL || !take_three(call, objects, grouped, t)) return NULL;
    const int64_t batch = t[0]->shape[0], heads = t[0]->shape[1], queries = t[0]->shape[2], width = t[2]->shape[3];
    if (recording && (*record = new_record(batch, heads, queries)) == NULL) return NULL;
    if (mask_object != Py_None) {
        if (!take_mask(call, mask_object, t[0], t[1], &mask)) return NULL;
        o->attn_mask = &mask;
        if (recording && mask.dtype == RAPT_BOOL) {
            (*record)->mask = mask;
            core_call_release(call, mask.data);
        }
    }
    /* The heads of a token side by side, so that merging them is free, as in PyTorch's. */
    const int64_t shape[] = {batch, heads, queries, width};
    const int64_t strides[] = {queries * heads * width, width, heads * width, 1};
    PyObject *out = new_tensor(objects[0], t[0]->dtype, shape, strides);
    const rapt_tensor *view = out != NULL ? core_take(call, out, "out", true) : NULL;
    if (view == NULL) return Py_XDECREF(out), NULL;
    if (recording) {
        (*record)->options = *o; /* but for pointers, which the backward sets anew */
        o->lse = &(*record)->lse;
    }
    PyThreadState *released = PyEval_SaveThread();
    rapt_status status = rapt_attention_forward(context, t[0], t[1], t[2], o, view);
    PyEval_RestoreThread(released);
    return status == RAPT_OK ? out : (Py_DECREF(out), NULL);
}

PyObject *core_torch_attend(PyObject *module, PyObject *args) {
    (void)module;
    enum { QUERY, KEY, VALUE, MASK, CAUSAL, SCALE, GQA, GRAD, ARGUMENTS };
    PyObject *a[ARGUMENTS];
    if (torch.apply == NULL || PyTuple_Size(args) != ARGUMENTS)
        return PyErr_SetString(PyExc_TypeError, "torch_attend is called by rapt.torch alone"), NULL;
    for (int i = 0; i < ARGUMENTS; i++) a[i] = PyTuple_GetItem(args, i);
    if (!is_tensor(a[QUERY]) || !is_tensor(a[KEY]) || !is_tensor(a[VALUE]) ||
        !(a[MASK] == Py_None || is_tensor(a[MASK])))
        return core_none();

    rapt_options o;
    memset(&o, 0, sizeof o);
    o.causal = a[CAUSAL] != Py_False;
    o.set_scale = a[SCALE] != Py_None;
    if (o.set_scale) o.scale = PyFloat_AsDouble(a[SCALE]);
    bool has_mask = a[MASK] != Py_None, mask_wants = has_mask && wants_gradient(a[MASK]);
    if (PyErr_Occurred() || (a[CAUSAL] != Py_False && (a[CAUSAL] != Py_True || has_mask)) ||
        (mask_wants && a[GRAD] == Py_True))
        return PyErr_Clear(), core_none();
    bool recording =
        a[GRAD] == Py_True && (wants_gradient(a[QUERY]) || wants_gradient(a[KEY]) || wants_gradient(a[VALUE]));
    PyErr_Clear();

    core_call call;
    core_call_begin(&call);
    record_object *record = NULL;
    PyObject *out = attend(a, a[MASK], &o, a[GQA] == Py_True, recording, &call, &record);
    core_call_end(&call);
    if (out != NULL && recording) {
        record->out = out;
        if (has_mask && record->mask.data == NULL) {
            Py_INCREF(a[MASK]);
            record->kept = a[MASK];
        }
        /* Not one argument more: each costs a fifth of a microsecond. */
        out = PyObject_CallFunctionObjArgs(torch.apply, a[QUERY], a[KEY], a[VALUE], record, NULL);
        Py_DECREF(record);
        return out;
    }
    Py_XDECREF(record);
    if (out != NULL) return out;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* KeyboardInterrupt */
    PyErr_Clear(); /* the long way finds it again, and says it in its own words */
    return core_none();
}

const char core_torch_record_doc[] = "torch_record(ctx, query, key, value, record)\n--\n\n"
                                     "The forward of an autograd.Function: records what torch_attend has computed.";

PyObject *core_torch_record(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *ctx, *query, *key, *value, *object;
    if (!PyArg_ParseTuple(args, "OOOOO", &ctx, &query, &key, &value, &object)) return NULL;
    record_object *record = (record_object *)object;
    if ((PyObject *)Py_TYPE(object) != record_type || record->out == NULL)
        return PyErr_SetString(PyExc_TypeError, "torch_record is called by torch_attend alone"), NULL;
    PyObject *out = record->out, *mask = record->kept;
    record->out = record->kept = NULL; /* what autograd keeps must not keep the tensor that keeps it */
    PyObject *none = PyObject_CallMethodObjArgs(ctx, name_save, query, key, value, out, mask, NULL); /* NULL ends it */
    Py_XDECREF(mask);
    Py_XDECREF(none);
    if (none == NULL || PyObject_SetAttr(ctx, name_materialize, Py_False) < 0 ||
        PyObject_SetAttr(ctx, name_record, object) < 0)
        Py_CLEAR(out);
    return out;
}

const char core_torch_backward_doc[] = "torch_backward(ctx, d_out)\n--\n\n"
                                       "The backward to torch_record: gradients of its arguments.";

static PyObject *backward(PyObject *saved, PyObject *wanted, const record_object *record, PyObject *d_out,
                          core_call *call) {
    static const char *const names[] = {"query", "key", "value", "out"};
    rapt_context *context = core_context();
    const rapt_tensor *t[4], *d, *g[3] = {NULL};
    rapt_tensor mask;
    if (context == NULL) return NULL;
    for (int i = 0; i < 4; i++)
        if ((t[i] = core_take(call, PyTuple_GetItem(saved, i), names[i], false)) == NULL) return NULL;
    if ((d = core_take(call, d_out, "d_out", false)) == NULL) return NULL;
    rapt_options o = record->options;
    o.lse = &record->lse;
    o.attn_mask = record->mask.data != NULL ? &record->mask : NULL;
    if (PyTuple_Size(saved) > 4) {
        if (!take_mask(call, PyTuple_GetItem(saved, 4), t[0], t[1], &mask)) return NULL;
        o.attn_mask = &mask;
    }
    PyObject *results = PyTuple_New(4); /* as many as torch_record has arguments */
    for (int i = 0; i < 4 && results != NULL; i++) {
        PyObject *result = NULL;
        if (i < 3 && PyTuple_GetItem(wanted, i) == Py_True) {
            int64_t strides[4];
            strides_like(t[i], strides);
            result = new_tensor(PyTuple_GetItem(saved, i), t[i]->dtype, t[i]->shape, strides);
            if (result != NULL && (g[i] = core_take(call, result, names[i], true)) == NULL) Py_CLEAR(result);
        } else {
            result = core_none();
        }
        if (result == NULL)
            Py_CLEAR(results);
        else
            PyTuple_SetItem(results, i, result);
    }
    if (results == NULL) return NULL;
    rapt_attention_gradients gradients;
    memset(&gradients, 0, sizeof gradients);
    gradients.query = g[0];
    gradients.key = g[1];
    gradients.value = g[2];
    PyThreadState *released = PyEval_SaveThread();
    rapt_status status = rapt_attention_backward(context, t[0], t[1], t[2], &o, t[3], d, NULL, &gradients);
    PyEval_RestoreThread(released);
    return status == RAPT_OK ? results : (Py_DECREF(results), core_raise(context, status));
}

PyObject *core_torch_backward(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *ctx, *d_out, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &ctx, &d_out)) return NULL;
    PyObject *saved = PyObject_GetAttr(ctx, name_saved);
    PyObject *wanted = saved != NULL ? PyObject_GetAttr(ctx, name_wanted) : NULL;
    PyObject *record = wanted != NULL ? PyObject_GetAttr(ctx, name_record) : NULL;
    if (record != NULL && (PyObject *)Py_TYPE(record) == record_type) {
        core_call call;
        core_call_begin(&call);
        result = backward(saved, wanted, (record_object *)record, d_out, &call);
        core_call_end(&call);
    }
    if (result == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "torch_backward has nothing to go by");
    Py_XDECREF(saved);
    Py_XDECREF(wanted);
    Py_XDECREF(record);
    return result;
}

const char core_torch_connect_doc[] =
    "torch_connect(tensor, parameter, apply, empty, addresses)\n--\n\n"
    "What torch_attend calls: types of tensors; apply of the Function whose forward is torch_record; (prototype, "
    "shape,\nstrides) -> tensor; and None or the addresses of LibTorch's aoti_torch_empty_strided, "
    "torch_tensor_to_pyobject and\naoti_torch_delete_tensor_object.";

PyObject *core_torch_connect(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensor, *parameter, *apply, *empty, *addresses;
    void *functions[3] = {NULL};
    if (!PyArg_ParseTuple(args, "OOOOO", &tensor, &parameter, &apply, &empty, &addresses)) return NULL;
    if (addresses != Py_None) {
        if (!PyTuple_Check(addresses) || PyTuple_Size(addresses) != 3)
            return PyErr_SetString(PyExc_TypeError, "expected three addresses, or None"), NULL;
        for (int i = 0; i < 3; i++) functions[i] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
        if (PyErr_Occurred()) return NULL;
    }
    Py_INCREF(args); /* for good, with all that is in it */
    torch.tensor_type = tensor;
    torch.parameter_type = parameter;
    torch.apply = apply;
    torch.empty = empty;
    memcpy(&torch.make, &functions[0], sizeof(void *));
    memcpy(&torch.wrap, &functions[1], sizeof(void *));
    memcpy(&torch.delete, &functions[2], sizeof(void *));
    return core_none();
}

int core_add_torch(PyObject *module) {
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_save = PyUnicode_InternFromString("save_for_backward");
    name_materialize = PyUnicode_InternFromString("materialize_grads");
    name_record = PyUnicode_InternFromString("record");
    name_saved = PyUnicode_InternFromString("saved_tensors");
    name_wanted = PyUnicode_InternFromString("needs_input_grad");
    record_type = PyType_FromSpec(&record_spec);
    if (PyErr_Occurred()) return -1;
    Py_INCREF(record_type);
    return PyModule_AddObject(module, "Record", record_type);
}
