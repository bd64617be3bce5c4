/* arrays.c - Python's arrays as rapt_tensor; memory of Rapt as arrays
 *
 * Four ways in, none of which copies: the exchange table of the array's type (PyTorch 2.10 and later: no Python code
 * runs), __dlpack__ (NumPy 1.22, PyTorch, JAX, CuPy), __array_interface__ for what NumPy does not export by DLPack
 * (read-only arrays, ml_dtypes' bfloat16, booleans of old versions), and what has none of these but is a buffer
 * (memoryview, ctypes) by way of NumPy, for the stable ABI of Python 3.9 has no buffers.
 */
#include "core.h"
#include "dlpack_abi.h"

#include <stdio.h>

static PyObject *numpy_array_type, *numpy_empty, *numpy_dtypes[RAPT_BOOL + 1];
static PyObject *helpers; /* rapt._arrays, imported when first needed */
static PyObject *name_dlpack, *name_exchange, *name_interface, *name_dtype, *name_tolist;

/* ---- calls ---- */

void core_call_end(core_call *call) {
    for (int i = 0; i < call->num_kept; i++) Py_DECREF(call->kept[i]);
    for (int i = 0; i < call->num_blocks; i++) free(call->blocks[i]);
    core_call_begin(call);
}

int core_call_keep(core_call *call, PyObject *reference) {
    if (call->num_kept < CORE_MAX_KEPT) {
        call->is_result[call->num_kept] = false;
        call->kept[call->num_kept++] = reference;
        return 0;
    }
    Py_DECREF(reference);
    PyErr_SetString(PyExc_ValueError, "too many arrays in one call");
    return -1;
}

void *core_call_allocate(core_call *call, size_t size) {
    void *memory = call->num_blocks < CORE_MAX_TENSORS ? malloc(size > 0 ? size : 1) : NULL;
    if (memory == NULL) return PyErr_NoMemory();
    return call->blocks[call->num_blocks++] = memory;
}

void core_call_release(core_call *call, const void *memory) {
    for (int i = 0; i < call->num_blocks; i++)
        if (call->blocks[i] == memory) call->blocks[i] = call->blocks[--call->num_blocks];
}

/* ---- in ---- */

static int from_dl(const dl_tensor *dl, const char *name, rapt_tensor *tensor) {
    int code = dl->dtype.code, bits = dl->dtype.bits;
    rapt_dtype dtype = 0;
    if (code == DL_FLOAT) dtype = bits == 32 ? RAPT_F32 : bits == 64 ? RAPT_F64 : bits == 16 ? RAPT_F16 : 0;
    if (code == DL_BFLOAT && bits == 16) dtype = RAPT_BF16;
    if (code == DL_BOOL && bits == 8) dtype = RAPT_BOOL;
    if (dtype == 0 || dl->dtype.lanes != 1) {
        static const char *const codes[] = {"int", "uint", "float", "opaque ", "bfloat", "complex", "bool"};
        const char *kind = code >= 0 && code <= DL_BOOL ? codes[code] : "unknown ";
        PyErr_Format(PyExc_TypeError, "%s is of type %s%d, expected float32, float64, bfloat16, float16 or bool", name,
                     kind, bits);
        return -1;
    }
    if (dl->ndim > RAPT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions, at most %d are possible", name, dl->ndim, RAPT_MAX_DIMS);
        return -1;
    }
    tensor->data = dl->data != NULL ? (char *)dl->data + dl->byte_offset : NULL;
    tensor->dtype = dtype;
    tensor->device = dl->device.type == DL_CPU || dl->device.type == DL_CUDA_HOST ? RAPT_DEVICE_CPU : RAPT_DEVICE_CUDA;
    tensor->device_id = tensor->device == RAPT_DEVICE_CPU ? 0 : dl->device.id;
    tensor->ndim = dl->ndim;
    int64_t packed = 1;
    for (int32_t d = dl->ndim - 1; d >= 0; d--) {
        tensor->shape[d] = dl->shape[d];
        tensor->stride[d] = dl->strides != NULL ? dl->strides[d] : packed;
        if (dl->strides == NULL) packed *= dl->shape[d];
    }
    return 0;
}

/* The exchange table of a type, NULL: it has none. Types that were asked are remembered. */
static const dl_exchange *exchange_of(PyObject *type) {
    static struct {
        PyObject *type;
        const dl_exchange *table;
    } known[8];
    static int num_known;
    for (int i = 0; i < num_known; i++)
        if (known[i].type == type) return known[i].table;
    const dl_exchange *table = NULL;
    PyObject *capsule = PyObject_GetAttr(type, name_exchange);
    if (capsule != NULL) {
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        Py_DECREF(capsule); /* the type has it */
    }
    PyErr_Clear();
    while (table != NULL && table->major != 1) table = table->previous;
    if (num_known < 8) {
        Py_INCREF(type);
        known[num_known].type = type;
        known[num_known++].table = table;
    }
    return table;
}

/* 1: there it is; 0: it has none, or refuses, with the exception set if it refuses; -1: an exception. */
static int by_dlpack(core_call *call, PyObject *array, const char *name, bool writable, rapt_tensor *tensor) {
    PyObject *capsule = PyObject_CallMethodObjArgs(array, name_dlpack, NULL);
    if (capsule == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
        return 0;
    }
    if (core_call_keep(call, capsule) < 0) return -1;
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        const dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        return from_dl(&managed->tensor, name, tensor) < 0 ? -1 : 1;
    }
    const dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (managed == NULL) return -1;
    if (writable && (managed->flags & DL_READ_ONLY) != 0)
        return PyErr_Format(PyExc_ValueError, "%s is read-only, and would be written to", name), -1;
    return from_dl(&managed->tensor, name, tensor) < 0 ? -1 : 1;
}

static rapt_dtype dtype_of_typestr(PyObject *array, PyObject *typestr) {
    static const struct {
        const char *text;
        rapt_dtype dtype;
    } types[] = {{"<f4", RAPT_F32}, {"<f8", RAPT_F64}, {"<f2", RAPT_F16}, {"|b1", RAPT_BOOL}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyUnicode_CompareWithASCIIString(typestr, types[i].text) == 0) return types[i].dtype;
    rapt_dtype dtype = 0; /* ml_dtypes' bfloat16 is "<V2", raw bytes, so its name must tell */
    PyObject *object = PyObject_GetAttr(array, name_dtype);
    PyObject *text = object != NULL ? PyObject_Str(object) : NULL;
    if (text != NULL && PyUnicode_CompareWithASCIIString(text, "bfloat16") == 0) dtype = RAPT_BF16;
    Py_XDECREF(object);
    Py_XDECREF(text);
    PyErr_Clear();
    return dtype;
}

static int fill_from_interface(PyObject *array, PyObject *interface, const char *name, bool writable,
                               rapt_tensor *tensor) {
    PyObject *typestr = PyDict_GetItemString(interface, "typestr"), *data = PyDict_GetItemString(interface, "data");
    PyObject *shape = PyDict_GetItemString(interface, "shape"), *strides = PyDict_GetItemString(interface, "strides");
    if (typestr == NULL || !PyUnicode_Check(typestr) || shape == NULL || !PyTuple_Check(shape) || data == NULL ||
        !PyTuple_Check(data) || PyTuple_Size(data) != 2)
        return PyErr_Format(PyExc_TypeError, "%s has an __array_interface__ of a kind that is not known", name), -1;
    tensor->dtype = dtype_of_typestr(array, typestr);
    if (tensor->dtype == 0)
        return PyErr_Format(PyExc_TypeError,
                            "%s is of type %U, expected float32, float64, bfloat16, float16 or bool, in the machine's "
                            "byte order",
                            name, typestr),
               -1;
    if (writable && PyObject_IsTrue(PyTuple_GetItem(data, 1)))
        return PyErr_Format(PyExc_ValueError, "%s is read-only, and would be written to", name), -1;
    tensor->data = PyLong_AsVoidPtr(PyTuple_GetItem(data, 0));
    tensor->device = RAPT_DEVICE_CPU;
    tensor->device_id = 0;
    if (PyTuple_Size(shape) > RAPT_MAX_DIMS)
        return PyErr_Format(PyExc_ValueError, "%s has %zd dimensions, at most %d are possible", name,
                            PyTuple_Size(shape), RAPT_MAX_DIMS),
               -1;
    tensor->ndim = (int32_t)PyTuple_Size(shape);
    int64_t size = (int64_t)rapt_dtype_size(tensor->dtype), packed = size;
    bool stepped = strides != NULL && PyTuple_Check(strides) && PyTuple_Size(strides) == tensor->ndim;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        tensor->shape[d] = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
        int64_t bytes = stepped ? PyLong_AsLongLong(PyTuple_GetItem(strides, d)) : packed;
        if (bytes % size != 0 && tensor->shape[d] > 1)
            return PyErr_Format(PyExc_ValueError, "%s has a stride of %lld bytes, which is no multiple of its elements",
                                name, (long long)bytes),
                   -1;
        tensor->stride[d] = bytes / size;
        packed *= tensor->shape[d];
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* As by_dlpack. The array itself keeps the memory. */
static int by_interface(core_call *call, PyObject *array, const char *name, bool writable, rapt_tensor *tensor) {
    PyObject *interface = PyObject_GetAttr(array, name_interface);
    if (interface == NULL) return PyErr_Clear(), 0;
    int filled = PyDict_Check(interface) ? fill_from_interface(array, interface, name, writable, tensor) : -1;
    if (filled < 0 && !PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s has no proper __array_interface__", name);
    Py_DECREF(interface);
    if (filled < 0) return -1;
    Py_INCREF(array);
    return core_call_keep(call, array) < 0 ? -1 : 1;
}

static PyObject *helper(const char *name) {
    if (helpers == NULL && (helpers = PyImport_ImportModule("rapt._arrays")) == NULL) return NULL;
    return PyObject_GetAttrString(helpers, name);
}

/* Turns an exception of the array's library, which may bring a page of its addresses, into one with the first line. */
static void refuse(const char *name, PyObject *type) {
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    PyObject *lines = text != NULL ? PyUnicode_Splitlines(text, 0) : NULL;
    PyObject *first = lines != NULL && PyList_Size(lines) > 0 ? PyList_GetItem(lines, 0) : Py_None;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s is %R that does not show its memory: %S", name, type, first);
    Py_XDECREF(lines);
    Py_XDECREF(text);
    Py_XDECREF(kind);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* As by_dlpack, of NumPy's view of a buffer. */
static int by_buffer(core_call *call, PyObject *buffer, const char *name, bool writable, rapt_tensor *tensor) {
    PyObject *function = helper("view_of_buffer");
    PyObject *view = function != NULL ? PyObject_CallFunctionObjArgs(function, buffer, NULL) : NULL;
    Py_XDECREF(function);
    if (view == NULL) return -1;
    int taken = view != Py_None ? by_dlpack(call, view, name, writable, tensor) : 0;
    if (taken == 0 && view != Py_None) {
        PyErr_Clear(); /* a view that is read-only has the other way */
        taken = by_interface(call, view, name, writable, tensor);
    }
    Py_DECREF(view);
    return taken;
}

static rapt_tensor *take(core_call *call, PyObject *array, const char *name, bool writable) {
    if (call->num_tensors == CORE_MAX_TENSORS)
        return PyErr_SetString(PyExc_ValueError, "too many arrays in one call"), NULL;
    rapt_tensor *tensor = &call->tensors[call->num_tensors++];
    PyObject *type = (PyObject *)Py_TYPE(array);
    const dl_exchange *table = type != numpy_array_type ? exchange_of(type) : NULL;
    if (table != NULL) {
        dl_tensor dl;
        if (table->tensor_from_object(array, &dl) != 0) return refuse(name, type), NULL;
        Py_INCREF(array);
        return core_call_keep(call, array) < 0 || from_dl(&dl, name, tensor) < 0 ? NULL : tensor;
    }
    int taken = by_dlpack(call, array, name, writable, tensor);
    if (taken == 0) {
        PyObject *kind, *value, *traceback; /* of the refusal, which counts if there is no other way */
        PyErr_Fetch(&kind, &value, &traceback);
        taken = by_interface(call, array, name, writable, tensor);
        if (taken == 0 && kind != NULL) {
            PyErr_Restore(kind, value, traceback);
            return NULL;
        }
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    if (taken == 0) taken = by_buffer(call, array, name, writable, tensor);
    if (taken == 0)
        PyErr_Format(PyExc_TypeError, "%s is %R, expected an array (NumPy's, one with __dlpack__, or a buffer)", name,
                     type);
    return taken == 1 ? tensor : NULL;
}

rapt_tensor *core_take(core_call *call, PyObject *array, const char *name, bool writable) {
    int first = call->num_kept;
    rapt_tensor *tensor = take(call, array, name, writable);
    for (int i = first; i < call->num_kept; i++) call->is_result[i] = writable;
    return tensor;
}

int core_take_optional(core_call *call, PyObject *array, const char *name, bool writable, const rapt_tensor **tensor) {
    *tensor = NULL;
    if (array == NULL || array == Py_None) return 0;
    return (*tensor = core_take(call, array, name, writable)) != NULL ? 0 : -1;
}

/* ---- integers ---- */

/* Writes the numbers in nested lists behind each other, as far as there is room, and counts them all. */
static int64_t flatten(PyObject *numbers, const char *name, int64_t *to, int64_t room) {
    if (!PyList_Check(numbers) && !PyTuple_Check(numbers)) {
        PyObject *index = PyNumber_Index(numbers);
        int64_t number = index != NULL ? PyLong_AsLongLong(index) : -1;
        Py_XDECREF(index);
        if (PyErr_Occurred()) return PyErr_Format(PyExc_TypeError, "%s holds %R, expected integers", name, numbers), -1;
        if (room > 0) *to = number;
        return 1;
    }
    int64_t count = 0;
    Py_ssize_t length = PySequence_Size(numbers);
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PySequence_GetItem(numbers, i);
        if (item == NULL) return -1;
        int64_t found = flatten(item, name, to + count, room - count);
        Py_DECREF(item);
        if (found < 0) return -1;
        count += found;
    }
    return count;
}

const int64_t *core_take_integers(core_call *call, PyObject *numbers, const char *name, int64_t count) {
    PyObject *list = PyObject_CallMethodObjArgs(numbers, name_tolist, NULL); /* arrays of any library */
    if (list == NULL) {
        PyErr_Clear();
        Py_INCREF(list = numbers);
    }
    bool single = !PyList_Check(list) && !PyTuple_Check(list);
    int64_t found = flatten(list, name, NULL, 0);
    if (found >= 0 && !single && count >= 0 && found != count) {
        PyErr_Format(PyExc_ValueError, "%s has %lld numbers, expected one for each of %lld sequences", name,
                     (long long)found, (long long)count);
        found = -1;
    }
    if (count < 0) count = found;
    int64_t *memory =
        found >= 0 ? core_call_allocate(call, (size_t)(count > found ? count : found) * sizeof *memory) : NULL;
    if (memory != NULL) {
        flatten(list, name, memory, found);
        for (int64_t i = found; i < count; i++) memory[i] = memory[0];
    }
    Py_DECREF(list);
    return memory;
}

/* ---- out ---- */

bool core_is_numpy(PyObject *array) { return (PyObject *)Py_TYPE(array) == numpy_array_type; }

PyObject *core_empty_like(PyObject *prototype, int32_t ndim, const int64_t *shape, rapt_dtype dtype) {
    PyObject *sizes = PyTuple_New(ndim), *result = NULL;
    for (int32_t d = 0; sizes != NULL && d < ndim; d++) {
        PyObject *size = PyLong_FromLongLong(shape[d]);
        if (size == NULL || PyTuple_SetItem(sizes, d, size) < 0) Py_CLEAR(sizes);
    }
    if (sizes == NULL) return NULL;
    if (core_is_numpy(prototype)) {
        PyObject *type = dtype != 0 ? numpy_dtypes[dtype] : NULL;
        if (type == NULL)
            type = PyObject_GetAttr(prototype, name_dtype);
        else
            Py_INCREF(type);
        if (type != NULL) result = PyObject_CallFunctionObjArgs(numpy_empty, sizes, type, NULL);
        Py_XDECREF(type);
    } else {
        PyObject *function = helper("empty_like");
        PyObject *type = dtype != 0 ? PyUnicode_FromString(rapt_dtype_name(dtype)) : core_none();
        if (function != NULL && type != NULL)
            result = PyObject_CallFunctionObjArgs(function, prototype, sizes, type, NULL);
        Py_XDECREF(function);
        Py_XDECREF(type);
    }
    Py_DECREF(sizes);
    return result;
}

int core_check_torch(PyObject *arrays) {
    PyObject *function = helper("check_torch");
    PyObject *none = function != NULL ? PyObject_CallObject(function, arrays) : NULL;
    Py_XDECREF(function);
    Py_XDECREF(none);
    return none != NULL ? 0 : -1;
}

PyObject *core_finish(PyObject *prototype, PyObject *result) {
    if (result == NULL || Py_TYPE(result) == Py_TYPE(prototype)) return result;
    PyObject *function = helper("finish");
    PyObject *finished = function != NULL ? PyObject_CallFunctionObjArgs(function, prototype, result, NULL) : NULL;
    Py_XDECREF(function);
    Py_DECREF(result);
    return finished;
}

int core_dtype(PyObject *object, rapt_dtype *dtype) {
    static const char *const names[][3] = {[RAPT_F32] = {"float32", "f32", "torch.float32"},
                                           [RAPT_F64] = {"float64", "f64", "torch.float64"},
                                           [RAPT_BF16] = {"bfloat16", "bf16", "torch.bfloat16"},
                                           [RAPT_F16] = {"float16", "f16", "torch.float16"}};
    PyObject *text = PyType_Check(object) ? PyObject_GetAttrString(object, "__name__") : PyObject_Str(object);
    if (text == NULL) return -1;
    *dtype = 0;
    for (int i = RAPT_F32; i <= RAPT_F16; i++)
        for (int j = 0; j < 3; j++)
            if (PyUnicode_CompareWithASCIIString(text, names[i][j]) == 0) *dtype = (rapt_dtype)i;
    Py_DECREF(text);
    if (*dtype == 0)
        PyErr_Format(PyExc_TypeError, "dtype is %R, expected float32, float64, bfloat16 or float16", object);
    return *dtype == 0 ? -1 : 0;
}

/* ---- views of Rapt's memory ---- */

typedef struct view_object {
    PyObject_HEAD rapt_tensor tensor;
    PyObject *owner;
    bool writable;
} view_object;

static PyObject *view_type;

PyObject *core_view(const rapt_tensor *tensor, PyObject *owner, bool writable) {
    view_object *view = PyObject_New(view_object, (PyTypeObject *)view_type);
    if (view == NULL) return NULL;
    view->tensor = *tensor;
    view->writable = writable;
    Py_XINCREF(owner);
    view->owner = owner;
    return (PyObject *)view;
}

static void view_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((view_object *)self)->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *sizes_tuple(int32_t ndim, const int64_t *sizes, int64_t factor) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int32_t d = 0; tuple != NULL && d < ndim; d++) {
        PyObject *size = PyLong_FromLongLong(sizes[d] * factor);
        if (size == NULL || PyTuple_SetItem(tuple, d, size) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *view_interface(PyObject *self, void *none) {
    (void)none;
    static const char *const typestrs[] = {
        [RAPT_F32] = "<f4", [RAPT_F64] = "<f8", [RAPT_BF16] = "<u2", [RAPT_F16] = "<f2", [RAPT_BOOL] = "|b1"};
    view_object *view = (view_object *)self;
    const rapt_tensor *t = &view->tensor;
    PyObject *shape = sizes_tuple(t->ndim, t->shape, 1);
    PyObject *strides = sizes_tuple(t->ndim, t->stride, (int64_t)rapt_dtype_size(t->dtype));
    PyObject *result = NULL;
    if (shape != NULL && strides != NULL)
        result = Py_BuildValue("{s:i,s:s,s:(NO),s:O,s:O}", "version", 3, "typestr", typestrs[t->dtype], "data",
                               PyLong_FromVoidPtr(t->data), view->writable ? Py_False : Py_True, "shape", shape,
                               "strides", strides);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return result;
}

static PyObject *view_shape(PyObject *self, void *none) {
    (void)none;
    return sizes_tuple(((view_object *)self)->tensor.ndim, ((view_object *)self)->tensor.shape, 1);
}

static PyObject *view_dtype(PyObject *self, void *none) {
    (void)none;
    return PyUnicode_FromString(rapt_dtype_name(((view_object *)self)->tensor.dtype));
}

/* A capsule has a copy of the view's description, with a reference to the view in it. */
typedef struct exported {
    dl_managed managed;
    int64_t shape[RAPT_MAX_DIMS], strides[RAPT_MAX_DIMS];
} exported;

static void release_exported(dl_managed *managed) {
    PyGILState_STATE held = PyGILState_Ensure();
    Py_DECREF((PyObject *)managed->owner);
    PyGILState_Release(held);
    free(managed);
}

static void release_capsule(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* somebody took it over */
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

static PyObject *view_dlpack(PyObject *self, PyObject *args, PyObject *keywords) {
    (void)args, (void)keywords; /* a stream means nothing here; the version may be the first */
    const rapt_tensor *t = &((view_object *)self)->tensor;
    exported *out = calloc(1, sizeof *out);
    if (out == NULL) return PyErr_NoMemory();
    dl_tensor *dl = &out->managed.tensor;
    dl->data = t->data;
    dl->device.type = DL_CPU;
    dl->ndim = t->ndim;
    dl->dtype.code = t->dtype == RAPT_BF16 ? DL_BFLOAT : t->dtype == RAPT_BOOL ? DL_BOOL : DL_FLOAT;
    dl->dtype.bits = (uint8_t)(8 * rapt_dtype_size(t->dtype));
    dl->dtype.lanes = 1;
    dl->shape = memcpy(out->shape, t->shape, sizeof out->shape);
    dl->strides = memcpy(out->strides, t->stride, sizeof out->strides);
    out->managed.deleter = release_exported;
    out->managed.owner = self;
    PyObject *capsule = PyCapsule_New(&out->managed, "dltensor", release_capsule);
    if (capsule == NULL) return free(out), NULL;
    Py_INCREF(self);
    return capsule;
}

static PyObject *view_device(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return Py_BuildValue("(ii)", DL_CPU, 0);
}

static PyMethodDef view_methods[] = {
    {"__dlpack__", CORE_METHOD(view_dlpack), METH_VARARGS | METH_KEYWORDS, NULL},
    {"__dlpack_device__", view_device, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef view_attributes[] = {
    {"__array_interface__", view_interface, NULL, NULL, NULL},
    {"shape", view_shape, NULL, NULL, NULL},
    {"dtype", view_dtype, NULL, "\"f32\", \"f64\", \"bf16\" or \"f16\"", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot view_slots[] = {
    {Py_tp_doc, "Memory of Rapt's as an array: for numpy.asarray (bf16 as uint16) or torch.from_dlpack."},
    {Py_tp_dealloc, view_free},
    {Py_tp_methods, view_methods},
    {Py_tp_getset, view_attributes},
    {0, NULL},
};
static PyType_Spec view_spec = {"rapt._core.View", sizeof(view_object), 0, Py_TPFLAGS_DEFAULT, view_slots};

int core_add_arrays(PyObject *module) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) return -1;
    numpy_array_type = PyObject_GetAttrString(numpy, "ndarray");
    numpy_empty = PyObject_GetAttrString(numpy, "empty");
    numpy_dtypes[RAPT_F32] = PyObject_CallMethod(numpy, "dtype", "s", "float32");
    numpy_dtypes[RAPT_F64] = PyObject_CallMethod(numpy, "dtype", "s", "float64");
    Py_DECREF(numpy);
    name_dlpack = PyUnicode_InternFromString("__dlpack__");
    name_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    name_interface = PyUnicode_InternFromString("__array_interface__");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_tolist = PyUnicode_InternFromString("tolist");
    view_type = PyType_FromSpec(&view_spec);
    if (PyErr_Occurred()) return -1;
    Py_INCREF(view_type);
    return PyModule_AddObject(module, "View", view_type);
}
