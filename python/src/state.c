/* state.c - State: what a forward of a layer keeps for its backward, and the arrays that it borrows */
#include "core.h"

typedef struct state_object {
    PyObject_HEAD rapt_mha_state *state;
    core_call borrowed; /* by the forward */
} state_object;

static PyObject *state_type;

rapt_mha_state *core_state_of(PyObject *object, const char *name) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)state_type)) return ((state_object *)object)->state;
    return PyErr_Format(PyExc_TypeError, "%s is %R, expected a State", name, Py_TYPE(object)), NULL;
}

void core_state_keep(PyObject *state, core_call *call) {
    /* No results: one of PyTorch's keeps the function that computed it, and that the state, which nothing would ever free. */
    int num_kept = 0;
    for (int i = 0; i < call->num_kept; i++) {
        if (call->is_result[i]) {
            Py_DECREF(call->kept[i]);
        } else {
            call->kept[num_kept++] = call->kept[i];
        }
    }
    call->num_kept = num_kept;
    core_call *borrowed = &((state_object *)state)->borrowed;
    core_call before = *borrowed;
    *borrowed = *call;
    *call = before; /* for the caller to end */
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "")) return NULL;
    rapt_mha_state *state = NULL;
    rapt_status status = rapt_mha_state_create(context, &state);
    if (status != RAPT_OK) return core_raise(context, status);
    state_object *self = (state_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return rapt_mha_state_destroy(state), NULL;
    self->state = state;
    core_call_begin(&self->borrowed);
    return (PyObject *)self;
}

static void state_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    rapt_mha_state_destroy(((state_object *)self)->state);
    core_call_end(&((state_object *)self)->borrowed);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Views: they stay in place until the next forward. */
static PyObject *state_saved(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_mha_saved *saved = rapt_mha_state_saved(((state_object *)self)->state);
    if (saved == NULL) return core_none();
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N,s:d,s:K,s:K,s:K}", "query", core_view(&saved->query, self, false), "key",
                         core_view(&saved->key, self, false), "value", core_view(&saved->value, self, false),
                         "attended", core_view(&saved->attended, self, false), "lse",
                         core_view(&saved->lse, self, false), "dropout", saved->dropout, "dropout_seed",
                         (unsigned long long)saved->dropout_seed, "dropout_offset",
                         (unsigned long long)saved->dropout_offset, "version", (unsigned long long)saved->version);
}

static PyMethodDef methods[] = {
    {"saved", state_saved, METH_NOARGS,
     "saved()\n--\n\nrapt_mha_saved as a dict of views, which the next forward overwrites; None before the first."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "State()\n--\n\nrapt_mha_state: for the option `state` of a forward, and then for its backward."},
    {Py_tp_new, state_new},
    {Py_tp_dealloc, state_free},
    {Py_tp_methods, methods},
    {0, NULL},
};
static PyType_Spec spec = {"rapt._core.State", sizeof(state_object), 0, Py_TPFLAGS_DEFAULT, slots};

int core_add_states(PyObject *module) {
    state_type = PyType_FromSpec(&spec);
    if (state_type == NULL) return -1;
    Py_INCREF(state_type);
    return PyModule_AddObject(module, "State", state_type);
}
