/* layer.c - Layer: rapt_mha, from settings or from a checkpoint */
#include "core.h"

typedef struct layer_object {
    PyObject_HEAD rapt_mha *layer;
} layer_object;

static PyObject *layer_type;

rapt_mha *core_layer_of(PyObject *object, const char *name) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)layer_type)) return ((layer_object *)object)->layer;
    return PyErr_Format(PyExc_TypeError, "%s is %R, expected a Layer", name, Py_TYPE(object)), NULL;
}

#define SETTING(kind, member) CORE_FIELD(rapt_mha_config, kind, member)
static core_field settings_fields[] = {
    SETTING(CORE_INTEGER, embed_dim),
    SETTING(CORE_INTEGER, num_heads),
    SETTING(CORE_INTEGER, num_kv_heads),
    SETTING(CORE_INTEGER, head_dim),
    SETTING(CORE_INTEGER, kdim),
    SETTING(CORE_INTEGER, vdim),
    SETTING(CORE_BOOL, bias),
    SETTING(CORE_BOOL, add_bias_kv),
    SETTING(CORE_BOOL, add_zero_attn),
    SETTING(CORE_BOOL, batch_first),
    SETTING(CORE_BOOL, causal),
    CORE_FLAGGED(rapt_mha_config, CORE_REAL, scale, set_scale),
    SETTING(CORE_REAL, dropout),
    SETTING(CORE_DTYPE, dtype),
    SETTING(CORE_CHOICE, init),
    SETTING(CORE_UNSIGNED, seed),
    {0},
};

#define LOAD(kind, member) CORE_FIELD(rapt_load_options, kind, member)
static core_field load_fields[] = {
    LOAD(CORE_TEXT, prefix),
    LOAD(CORE_CHOICE, scheme),
    LOAD(CORE_INTEGER, num_heads),
    LOAD(CORE_INTEGER, num_kv_heads),
    LOAD(CORE_INTEGER, head_dim),
    CORE_FLAGGED(rapt_load_options, CORE_DTYPE, dtype, set_dtype),
    LOAD(CORE_BOOL, ignore_metadata),
    LOAD(CORE_BOOL, batch_first),
    LOAD(CORE_BOOL, causal),
    LOAD(CORE_BOOL, add_zero_attn),
    CORE_FLAGGED(rapt_load_options, CORE_REAL, scale, set_scale),
    LOAD(CORE_REAL, dropout),
    LOAD(CORE_BOOL, ignore_extra),
    {0},
};

static core_field save_fields[] = {
    CORE_FIELD(rapt_save_options, CORE_TEXT, prefix),
    CORE_FIELD(rapt_save_options, CORE_CHOICE, scheme),
    CORE_FLAGGED(rapt_save_options, CORE_DTYPE, dtype, set_dtype),
    {0},
};

/* ---- making ---- */

/* Takes the layer over, also when it fails. */
static PyObject *wrap(PyTypeObject *type, rapt_mha *layer) {
    layer_object *self = (layer_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return rapt_mha_destroy(layer), NULL;
    self->layer = layer;
    return (PyObject *)self;
}

static PyObject *layer_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "")) return NULL;
    rapt_mha_config config = rapt_mha_config_default(0, 0);
    core_call call;
    core_call_begin(&call);
    int filled = core_fill(&call, keywords, settings_fields, &config);
    core_call_end(&call);
    if (filled < 0) return NULL;
    rapt_mha *layer = NULL;
    PyThreadState *released = PyEval_SaveThread();
    rapt_status status = rapt_mha_create(context, &config, &layer);
    PyEval_RestoreThread(released);
    return status == RAPT_OK ? wrap(type, layer) : core_raise(context, status);
}

static void layer_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    rapt_mha_destroy(((layer_object *)self)->layer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

const char core_load_doc[] = "load(path, **options)\n--\n\n"
                             "A Layer of a checkpoint: rapt_mha_load, with the fields of rapt_load_options.";

PyObject *core_load(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    PyObject *path = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path)) return NULL;
    rapt_load_options options = rapt_load_options_default();
    rapt_checkpoint *checkpoint = NULL;
    rapt_mha *layer = NULL;
    PyObject *result = NULL;
    core_call call;
    core_call_begin(&call);
    if (core_fill(&call, keywords, load_fields, &options) == 0) {
        const char *name = PyBytes_AsString(path);
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_checkpoint_open(context, name, &checkpoint);
        if (status == RAPT_OK) status = rapt_mha_load(context, checkpoint, &options, &layer);
        PyEval_RestoreThread(released);
        result = status == RAPT_OK ? wrap((PyTypeObject *)layer_type, layer) : core_raise(context, status);
        rapt_checkpoint_close(checkpoint);
    }
    core_call_end(&call);
    Py_DECREF(path);
    return result;
}

const char core_layers_doc[] = "layers(path)\n--\n\nThe attention layers of a checkpoint, a list of dicts.";

static PyObject *describe_layer(const rapt_layer_info *info) {
    return Py_BuildValue("{s:s,s:s,s:s,s:L,s:L,s:L,s:L,s:L,s:L,s:O,s:L,s:z}", "prefix", info->prefix, "scheme",
                         rapt_scheme_name(info->scheme), "dtype", rapt_dtype_name(info->dtype), "embed_dim",
                         (long long)info->embed_dim, "kdim", (long long)info->kdim, "vdim", (long long)info->vdim,
                         "num_heads", (long long)info->num_heads, "num_kv_heads", (long long)info->num_kv_heads,
                         "head_dim", (long long)info->head_dim, "bias", info->bias ? Py_True : Py_False,
                         "num_parameters", (long long)info->num_parameters, "extra", info->extra);
}

PyObject *core_layers(PyObject *module, PyObject *path) {
    (void)module;
    PyObject *bytes = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyUnicode_FSConverter(path, &bytes)) return NULL;
    rapt_checkpoint *checkpoint = NULL;
    rapt_status status = rapt_checkpoint_open(context, PyBytes_AsString(bytes), &checkpoint);
    Py_DECREF(bytes);
    if (status != RAPT_OK) return core_raise(context, status);
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < rapt_checkpoint_num_layers(checkpoint); i++) {
        rapt_layer_info info;
        status = rapt_checkpoint_layer(context, checkpoint, i, &info);
        PyObject *item = status == RAPT_OK ? describe_layer(&info) : core_raise(context, status);
        if (item == NULL || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    rapt_checkpoint_close(checkpoint);
    return list;
}

/* ---- computing ---- */

static PyObject *layer_forward(PyObject *self, PyObject *args, PyObject *keywords) {
    const rapt_mha *layer = ((layer_object *)self)->layer;
    const rapt_mha_config *config = rapt_mha_settings(layer);
    PyObject *arrays[4], *result = NULL;
    const rapt_tensor *t[4];
    rapt_options options;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OOOO", &arrays[0], &arrays[1], &arrays[2], &arrays[3])) return NULL;
    core_call call;
    core_call_begin(&call);
    if (core_take_forward(&call, arrays, config->batch_first, keywords, t, &options) == 0) {
        bool training =
            options.mode == RAPT_MODE_DEFAULT ? rapt_mha_is_training(layer) : options.mode == RAPT_MODE_TRAIN;
        if (config->dropout > 0 && training) core_draw(&options);
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_mha_forward(context, layer, t[0], t[1], t[2], &options, t[3]);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    return core_end_forward(&call, keywords, result);
}

static PyObject *layer_backward(PyObject *self, PyObject *args) {
    PyObject *state_object, *d_out, *d_weights, *wanted, *result = NULL;
    const rapt_tensor *out_gradient, *weights_gradient;
    rapt_mha_gradients gradients;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OOOO", &state_object, &d_out, &d_weights, &wanted)) return NULL;
    const rapt_mha_state *state = core_filled_state_of(state_object, "state");
    if (state == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    if (core_take_optional(&call, d_out, "d_out", false, &out_gradient) == 0 &&
        core_take_optional(&call, d_weights, "d_weights", false, &weights_gradient) == 0 &&
        core_fill_gradients(&call, wanted, &gradients) == 0) {
        const rapt_mha *layer = ((layer_object *)self)->layer;
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_mha_backward(context, layer, state, out_gradient, weights_gradient, &gradients);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    core_call_end(&call);
    return result;
}

static PyObject *layer_append(PyObject *self, PyObject *args) {
    PyObject *key, *value, *cache_object, *lengths = Py_None, *result = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OOO|O", &key, &value, &cache_object, &lengths)) return NULL;
    rapt_cache *cache = core_cache_of(cache_object, "cache");
    if (cache == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    const rapt_tensor *k = core_take(&call, key, "key", false);
    const rapt_tensor *v = k != NULL ? core_take(&call, value, "value", false) : NULL;
    const int64_t *n = NULL;
    if (v != NULL && lengths != Py_None)
        n = core_take_integers(&call, lengths, "lengths", rapt_cache_settings(cache)->batch);
    if (v != NULL && !PyErr_Occurred()) {
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_mha_append(context, ((layer_object *)self)->layer, k, v, cache, n);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    core_call_end(&call);
    return result;
}

/* ---- parameters, settings, files ---- */

static PyObject *layer_tensors(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_mha *layer = ((layer_object *)self)->layer;
    rapt_context *context = core_context();
    PyObject *dict = context != NULL ? PyDict_New() : NULL;
    for (int32_t i = 0; dict != NULL && i < rapt_mha_num_tensors(layer); i++) {
        const char *name;
        rapt_tensor tensor;
        rapt_status status = rapt_mha_tensor_at(context, layer, i, &name, &tensor);
        PyObject *view = status == RAPT_OK ? core_view(&tensor, self, true) : core_raise(context, status);
        if (view == NULL || PyDict_SetItemString(dict, name, view) < 0) Py_CLEAR(dict);
        Py_XDECREF(view);
    }
    return dict;
}

static PyObject *layer_commit(PyObject *self, PyObject *none) {
    (void)none;
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    PyThreadState *released = PyEval_SaveThread();
    rapt_status status = rapt_mha_commit(context, ((layer_object *)self)->layer);
    PyEval_RestoreThread(released);
    return core_done(context, status);
}

static PyObject *layer_train(PyObject *self, PyObject *mode) {
    int training = PyObject_IsTrue(mode);
    if (training < 0) return NULL;
    (training ? rapt_mha_train : rapt_mha_eval)(((layer_object *)self)->layer);
    return core_none();
}

static PyObject *layer_settings(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_mha *layer = ((layer_object *)self)->layer;
    const rapt_mha_config *c = rapt_mha_settings(layer);
#define BOOL(value) ((value) ? Py_True : Py_False)
    PyObject *scale = c->set_scale ? PyFloat_FromDouble(c->scale) : core_none();
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:O,s:O,s:O,s:O,s:O,s:N,s:d,s:s,s:O,s:K}", "embed_dim",
                         (long long)c->embed_dim, "num_heads", (long long)c->num_heads, "num_kv_heads",
                         (long long)c->num_kv_heads, "head_dim", (long long)c->head_dim, "kdim", (long long)c->kdim,
                         "vdim", (long long)c->vdim, "bias", BOOL(c->bias), "add_bias_kv", BOOL(c->add_bias_kv),
                         "add_zero_attn", BOOL(c->add_zero_attn), "batch_first", BOOL(c->batch_first), "causal",
                         BOOL(c->causal), "scale", scale, "dropout", c->dropout, "dtype", rapt_dtype_name(c->dtype),
                         "training", BOOL(rapt_mha_is_training(layer)), "version",
                         (unsigned long long)rapt_mha_version(layer));
#undef BOOL
}

static PyObject *layer_repr(PyObject *self) {
    char text[512];
    rapt_mha_describe(((layer_object *)self)->layer, text, sizeof text);
    return PyUnicode_FromString(text);
}

static PyObject *layer_save(PyObject *self, PyObject *args, PyObject *keywords) {
    PyObject *path = NULL, *result = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path)) return NULL;
    rapt_save_options options = rapt_save_options_default();
    core_call call;
    core_call_begin(&call);
    if (core_fill(&call, keywords, save_fields, &options) == 0) {
        const char *name = PyBytes_AsString(path);
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_mha_save(context, ((layer_object *)self)->layer, name, &options);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    core_call_end(&call);
    Py_DECREF(path);
    return result;
}

static PyMethodDef methods[] = {
    {"forward", CORE_METHOD(layer_forward), METH_VARARGS | METH_KEYWORDS,
     "forward(query, key, value, out, **options)\n--\n\nrapt_mha_forward, with the fields of rapt_options."},
    {"backward", layer_backward, METH_VARARGS,
     "backward(state, d_out, d_weights, gradients)\n--\n\n"
     "rapt_mha_backward: gradients is a dict of arrays that are written, with the fields of rapt_mha_gradients."},
    {"append", layer_append, METH_VARARGS, "append(key, value, cache, lengths=None)\n--\n\nrapt_mha_append."},
    {"tensors", layer_tensors, METH_NOARGS, "tensors()\n--\n\nViews of the parameters by name; commit after writing."},
    {"commit", layer_commit, METH_NOARGS, "commit()\n--\n\nTakes over what was written to the parameters."},
    {"train", layer_train, METH_O, "train(mode)\n--\n\n"},
    {"settings", layer_settings, METH_NOARGS, "settings()\n--\n\nrapt_mha_config, training and version."},
    {"save", CORE_METHOD(layer_save), METH_VARARGS | METH_KEYWORDS,
     "save(path, **options)\n--\n\nrapt_mha_save, with the fields of rapt_save_options."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Layer(**config)\n--\n\nrapt_mha_create, with the fields of rapt_mha_config."},
    {Py_tp_new, layer_new},
    {Py_tp_dealloc, layer_free},
    {Py_tp_repr, layer_repr},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"rapt._core.Layer", sizeof(layer_object), 0, Py_TPFLAGS_DEFAULT, slots};

int core_add_layers(PyObject *module) {
    layer_type = PyType_FromSpec(&spec);
    if (layer_type == NULL) return -1;
    Py_INCREF(layer_type);
    return PyModule_AddObject(module, "Layer", layer_type);
}
