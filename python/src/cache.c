/* cache.c - Cache: the keys and values of growing sequences */
#include "core.h"

typedef struct cache_object {
    PyObject_HEAD rapt_cache *cache;
} cache_object;

static PyObject *cache_type;

rapt_cache *core_cache_of(PyObject *object, const char *name) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)cache_type)) return ((cache_object *)object)->cache;
    return PyErr_Format(PyExc_TypeError, "%s is %R, expected a KVCache", name, Py_TYPE(object)), NULL;
}

#define FIELD(kind, member) CORE_FIELD(rapt_cache_config, kind, member)
static core_field fields[] = {
    FIELD(CORE_INTEGER, batch),        FIELD(CORE_INTEGER, capacity),
    FIELD(CORE_INTEGER, num_kv_heads), FIELD(CORE_INTEGER, head_dim),
    FIELD(CORE_INTEGER, value_dim),    CORE_FLAGGED(rapt_cache_config, CORE_DTYPE, dtype, set_dtype),
    FIELD(CORE_INTEGER, window),       {0},
};

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *layer_object = NULL;
    if (!PyArg_ParseTuple(args, "|O", &layer_object)) return NULL;
    rapt_mha *layer = NULL;
    if (layer_object != NULL && layer_object != Py_None && (layer = core_layer_of(layer_object, "layer")) == NULL)
        return NULL;
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    rapt_cache_config config = rapt_cache_config_default(1, 0);
    rapt_cache *cache = NULL;
    core_call call;
    core_call_begin(&call);
    int filled = core_fill(&call, keywords, fields, &config);
    core_call_end(&call);
    if (filled < 0) return NULL;
    rapt_status status = rapt_cache_create(context, layer, &config, &cache);
    if (status != RAPT_OK) return core_raise(context, status);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    cache_object *self = (cache_object *)allocate(type, 0);
    if (self == NULL) return rapt_cache_destroy(cache), NULL;
    self->cache = cache;
    return (PyObject *)self;
}

static void cache_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    rapt_cache_destroy(((cache_object *)self)->cache);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *cache_lengths(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_cache *cache = ((cache_object *)self)->cache;
    int64_t batch = rapt_cache_settings(cache)->batch;
    PyObject *list = PyList_New((Py_ssize_t)batch);
    for (int64_t n = 0; list != NULL && n < batch; n++) {
        PyObject *length = PyLong_FromLongLong(rapt_cache_length(cache, n));
        if (length == NULL || PyList_SetItem(list, (Py_ssize_t)n, length) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *cache_settings(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_cache *cache = ((cache_object *)self)->cache;
    const rapt_cache_config *c = rapt_cache_settings(cache);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:s,s:L,s:L}", "batch", (long long)c->batch, "capacity",
                         (long long)c->capacity, "num_kv_heads", (long long)c->num_kv_heads, "head_dim",
                         (long long)c->head_dim, "value_dim", (long long)c->value_dim, "dtype",
                         rapt_dtype_name(c->dtype), "window", (long long)c->window, "bytes",
                         (long long)rapt_cache_bytes(cache));
}

static PyObject *cache_clear(PyObject *self, PyObject *none) {
    (void)none;
    rapt_context *context = core_context();
    return context != NULL ? core_done(context, rapt_cache_clear(context, ((cache_object *)self)->cache)) : NULL;
}

static PyObject *cache_truncate(PyObject *self, PyObject *args) {
    long long sequence, length;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "LL", &sequence, &length)) return NULL;
    return core_done(context, rapt_cache_truncate(context, ((cache_object *)self)->cache, sequence, length));
}

static PyObject *cache_copy(PyObject *self, PyObject *args) {
    long long from, to;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "LL", &from, &to)) return NULL;
    return core_done(context, rapt_cache_copy(context, ((cache_object *)self)->cache, from, to));
}

static PyObject *cache_reorder(PyObject *self, PyObject *source) {
    rapt_cache *cache = ((cache_object *)self)->cache;
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    const int64_t *numbers = core_take_integers(&call, source, "source", rapt_cache_settings(cache)->batch);
    PyObject *result = numbers != NULL ? core_done(context, rapt_cache_reorder(context, cache, numbers)) : NULL;
    core_call_end(&call);
    return result;
}

static PyObject *cache_export(PyObject *self, PyObject *args) {
    PyObject *keys, *values, *result = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OO", &keys, &values)) return NULL;
    core_call call;
    core_call_begin(&call);
    const rapt_tensor *k = core_take(&call, keys, "keys", true);
    const rapt_tensor *v = k != NULL ? core_take(&call, values, "values", true) : NULL;
    if (v != NULL) result = core_done(context, rapt_cache_export(context, ((cache_object *)self)->cache, k, v));
    core_call_end(&call);
    return result;
}

static PyObject *cache_import(PyObject *self, PyObject *args) {
    PyObject *keys, *values, *lengths = Py_None, *result = NULL;
    rapt_cache *cache = ((cache_object *)self)->cache;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OO|O", &keys, &values, &lengths)) return NULL;
    core_call call;
    core_call_begin(&call);
    const rapt_tensor *k = core_take(&call, keys, "keys", false);
    const rapt_tensor *v = k != NULL ? core_take(&call, values, "values", false) : NULL;
    const int64_t *n = NULL;
    if (v != NULL && lengths != Py_None)
        n = core_take_integers(&call, lengths, "lengths", rapt_cache_settings(cache)->batch);
    if (v != NULL && !PyErr_Occurred()) result = core_done(context, rapt_cache_import(context, cache, k, v, n));
    core_call_end(&call);
    return result;
}

static PyMethodDef methods[] = {
    {"lengths", cache_lengths, METH_NOARGS, "lengths()\n--\n\nOf each sequence."},
    {"settings", cache_settings, METH_NOARGS, "settings()\n--\n\nrapt_cache_config, and bytes of memory."},
    {"clear", cache_clear, METH_NOARGS, "clear()\n--\n\n"},
    {"truncate", cache_truncate, METH_VARARGS, "truncate(sequence, length)\n--\n\nsequence -1: all."},
    {"copy", cache_copy, METH_VARARGS, "copy(source, target)\n--\n\n"},
    {"reorder", cache_reorder, METH_O, "reorder(source)\n--\n\n"},
    {"export_to", cache_export, METH_VARARGS, "export_to(keys, values)\n--\n\nInto [N,S,Hk,D], [N,S,Hk,Dv]."},
    {"import_from", cache_import, METH_VARARGS, "import_from(keys, values, lengths=None)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Cache(layer=None, /, **config)\n--\n\nrapt_cache_create, with the fields of rapt_cache_config."},
    {Py_tp_new, cache_new},
    {Py_tp_dealloc, cache_free},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"rapt._core.Cache", sizeof(cache_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           slots};

int core_add_caches(PyObject *module) {
    cache_type = PyType_FromSpec(&spec);
    if (cache_type == NULL) return -1;
    Py_INCREF(cache_type);
    return PyModule_AddObject(module, "Cache", cache_type);
}
