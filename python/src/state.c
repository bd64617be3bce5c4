/* state.c - State: what a forward of a layer keeps for its backward, and the arrays that it borrows
 *
 * Training makes a state for each layer in each step. Its memory is large, and new memory takes the system time, 2 % of
 * a step, so the states of objects that are gone serve the next ones.
 */
#include "core.h"

typedef struct state_object {
    PyObject_HEAD rapt_mha_state *state;
    size_t bytes;       /* of its memory, about */
    size_t idle;        /* of those, what its last forward did not need */
    bool is_filled;     /* by a forward with this object: before that, what the state holds is not for its eyes */
    core_call borrowed; /* by the forward */
} state_object;

static PyObject *state_type;

/* ---- states of objects that are gone ---- */

enum { MOST_SPARES = 64, MOST_SPARE_BYTES = 128 << 20 };

static struct {
    rapt_mha_state *state;
    size_t bytes;
} spares[MOST_SPARES];
static int num_spares;
static size_t spare_bytes, idle_bytes; /* of spares, and of objects: large memory may end up with small forwards */

static size_t size_of(const rapt_mha_state *state) {
    const rapt_mha_saved *saved = rapt_mha_state_saved(state);
    if (saved == NULL) return 0;
    const rapt_tensor *tensors[] = {&saved->query, &saved->key, &saved->value, &saved->attended, &saved->lse};
    size_t size = 0;
    for (int i = 0; i < 5; i++) {
        size_t bytes = rapt_dtype_size(tensors[i]->dtype);
        for (int32_t d = 0; d < tensors[i]->ndim; d++) bytes *= (size_t)tensors[i]->shape[d];
        size += bytes;
    }
    return size;
}

static void give_back(rapt_mha_state *state, size_t bytes) {
    if (bytes == 0 || num_spares == MOST_SPARES || bytes > MOST_SPARE_BYTES - spare_bytes) {
        rapt_mha_state_destroy(state);
        return;
    }
    spares[num_spares].state = state;
    spares[num_spares++].bytes = bytes;
    spare_bytes += bytes;
}

/* A state for a new object; false with an exception. */
static bool take_state(rapt_mha_state **state, size_t *bytes) {
    if (num_spares > 0 && idle_bytes < MOST_SPARE_BYTES) {
        num_spares--;
        *state = spares[num_spares].state;
        *bytes = spares[num_spares].bytes;
        spare_bytes -= *bytes;
        return true;
    }
    rapt_context *context = core_context();
    rapt_status status = context != NULL ? rapt_mha_state_create(context, state) : RAPT_OK;
    *bytes = 0;
    if (status != RAPT_OK) core_raise(context, status);
    return context != NULL && status == RAPT_OK;
}

/* ---- objects ---- */

rapt_mha_state *core_state_of(PyObject *object, const char *name) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)state_type)) return ((state_object *)object)->state;
    return PyErr_Format(PyExc_TypeError, "%s is %R, expected a State", name, Py_TYPE(object)), NULL;
}

const rapt_mha_state *core_filled_state_of(PyObject *object, const char *name) {
    static rapt_mha_state *empty; /* the library says what is wrong with one */
    rapt_mha_state *state = core_state_of(object, name);
    if (state == NULL || ((state_object *)object)->is_filled) return state;
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    rapt_status status = empty == NULL ? rapt_mha_state_create(context, &empty) : RAPT_OK;
    return status == RAPT_OK ? empty : (core_raise(context, status), NULL);
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
    state_object *self = (state_object *)state;
    size_t bytes = size_of(self->state);
    if (bytes > self->bytes) self->bytes = bytes;
    idle_bytes += self->bytes - bytes - self->idle;
    self->idle = self->bytes - bytes;
    self->is_filled = true;
    core_call *borrowed = &self->borrowed;
    core_call before = *borrowed;
    *borrowed = *call;
    *call = before; /* for the caller to end */
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    rapt_mha_state *state = NULL;
    size_t bytes;
    if (!PyArg_ParseTuple(args, "") || !take_state(&state, &bytes)) return NULL;
    state_object *self = (state_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return give_back(state, bytes), NULL;
    self->state = state;
    self->bytes = bytes;
    self->idle = 0;
    self->is_filled = false;
    core_call_begin(&self->borrowed);
    return (PyObject *)self;
}

static void state_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    idle_bytes -= ((state_object *)self)->idle;
    give_back(((state_object *)self)->state, ((state_object *)self)->bytes);
    core_call_end(&((state_object *)self)->borrowed);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Views: they stay in place until the next forward. */
static PyObject *state_saved(PyObject *self, PyObject *none) {
    (void)none;
    const rapt_mha_saved *saved = rapt_mha_state_saved(((state_object *)self)->state);
    if (saved == NULL || !((state_object *)self)->is_filled) return core_none();
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
