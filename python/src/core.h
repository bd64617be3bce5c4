/* core.h - rapt._core: the C library as Python sees it
 *
 * The module is a thin table-driven binding: arrays of any library come in by DLPack, options by keywords with the names
 * of rapt.h, results go into arrays of the caller's. scaled_dot_product_attention alone does more (sdpa.c): it gives the
 * call PyTorch's meaning, and is written in C because it is called most.
 *
 *     arrays.c     Python's arrays as rapt_tensor; memory of Rapt as arrays
 *     contexts.c   a context for each thread, one pool for all, errors as exceptions
 *     fields.c     keywords into the fields of a struct
 *     fingerprint.c whether arrays still hold the same bytes
 *     attention.c  the operator and its backward
 *     sdpa.c       the operator with PyTorch's meaning
 *     torch.c      the same for PyTorch's tensors, with what its autograd needs
 *     layer.c      layers, made or loaded
 *     functional.c the layer with weights of the call's
 *     state.c      what a forward keeps for its backward
 *     cache.c      caches
 *     module.c     the module
 *
 * Everything here is in the stable ABI of Python 3.9, so one binary serves all later versions.
 */
#ifndef RAPT_PYTHON_CORE_H
#define RAPT_PYTHON_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <rapt/rapt.h>

#include <stdlib.h>

/* A function of the module that takes keywords, as the method table wants it. */
#define CORE_METHOD(function) ((PyCFunction)(void (*)(void))(function))

/* None, with a reference. */
static inline PyObject *core_none(void) {
    Py_INCREF(Py_None);
    return Py_None;
}

/* ---- one call ----
 * Everything that a call borrows: views of arrays, and what keeps their memory there until the call has ended. */
enum { CORE_MAX_TENSORS = 40, CORE_MAX_KEPT = 96 };

typedef struct core_call {
    int64_t batch, tokens; /* how many sequences, and tokens in all, arrays of integers must speak of; -1: not known */
    int num_tensors, num_kept, num_blocks;
    rapt_tensor tensors[CORE_MAX_TENSORS];
    PyObject *kept[CORE_MAX_KEPT];  /* references */
    bool is_result[CORE_MAX_KEPT];  /* of each: it is there for what the call writes to */
    void *blocks[CORE_MAX_TENSORS]; /* memory */
} core_call;

static inline void core_call_begin(core_call *call) {
    call->batch = call->tokens = -1;
    call->num_tensors = call->num_kept = call->num_blocks = 0;
}
void core_call_end(core_call *call);
/* Takes the reference over, also when it fails. */
int core_call_keep(core_call *call, PyObject *reference);
void *core_call_allocate(core_call *call, size_t size);
void core_call_release(core_call *call, const void *memory); /* it is the caller's from now on */

/* ---- arrays.c ---- */

/* A view of an array; `name` is for messages. NULL with an exception. */
rapt_tensor *core_take(core_call *call, PyObject *array, const char *name, bool writable);
/* The same, where None means that there is none; *tensor is NULL then. */
int core_take_optional(core_call *call, PyObject *array, const char *name, bool writable, const rapt_tensor **tensor);
/* `count` integers from an integer, which stands for all, or from numbers in any nesting; count below 0: as many as
 * there are, if found. NULL with an exception. */
const int64_t *core_take_integers(core_call *call, PyObject *numbers, const char *name, int64_t count);
/* A new array of the prototype's kind (NumPy, PyTorch, or one that is finished later). dtype 0: the prototype's. */
PyObject *core_empty_like(PyObject *prototype, int32_t ndim, const int64_t *shape, rapt_dtype dtype);
bool core_is_numpy(PyObject *array); /* an ndarray itself: such arrays take the shortest ways */
/* Fails if there are tensors of PyTorch's in the tuple whose memory does not tell all. */
int core_check_torch(PyObject *arrays);
/* A result as the caller's kind of array. Takes the reference over. */
PyObject *core_finish(PyObject *prototype, PyObject *result);
/* Memory of Rapt as an object that NumPy and others take as an array; it keeps `owner` alive. */
PyObject *core_view(const rapt_tensor *tensor, PyObject *owner, bool writable);
/* A dtype from its name, "f32" or "float32" or what has such a name. 0 with an exception. */
int core_dtype(PyObject *object, rapt_dtype *dtype);
int core_add_arrays(PyObject *module);

/* ---- contexts.c ---- */

/* This thread's context, or NULL with an exception. */
rapt_context *core_context(void);
/* What runs tasks on threads of PyTorch's, or NULL if the work is not theirs; user is ignored. */
typedef void core_parallel_for(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg);
core_parallel_for *core_borrowed_for(void);
/* The exception of a status that is not RAPT_OK; always NULL. */
PyObject *core_raise(const rapt_context *context, rapt_status status);
/* None, or the exception. */
PyObject *core_done(const rapt_context *context, rapt_status status);
/* Gives a call that draws dropout the next draw, unless it has one. */
void core_draw(rapt_options *options);
PyObject *core_borrow_threads(PyObject *module, PyObject *args);
PyObject *core_set_num_threads(PyObject *module, PyObject *count);
PyObject *core_get_num_threads(PyObject *module, PyObject *none);
PyObject *core_manual_seed(PyObject *module, PyObject *seed);

/* ---- fields.c ---- */

typedef enum core_kind {
    CORE_INPUT,     /* const rapt_tensor *, from an array */
    CORE_OUTPUT,    /* the same, written to */
    CORE_BOOL,      /* bool */
    CORE_INTEGER,   /* int64_t */
    CORE_INTEGERS,  /* const int64_t *, one for each sequence */
    CORE_POSITIONS, /* const int64_t *, one for each token */
    CORE_UNSIGNED,  /* uint64_t */
    CORE_REAL,      /* double */
    CORE_DTYPE,     /* rapt_dtype */
    CORE_CHOICE,    /* an enum, int in size: a number */
    CORE_TEXT,      /* const char * */
    CORE_CACHE,     /* rapt_cache *, from a Cache */
    CORE_STATE,     /* rapt_mha_state *, from a State */
    CORE_ROTARY,    /* const rapt_rotary *, from a dict */
} core_kind;

typedef struct core_field {
    const char *name;
    core_kind kind;
    size_t offset;
    size_t flag; /* of a bool that says that the field is given, or CORE_NO_FLAG */
    PyObject *interned;
} core_field;

#define CORE_NO_FLAG ((size_t)-1)
#define CORE_FIELD(type, kind, member)                                                                                 \
    { #member, kind, offsetof(type, member), CORE_NO_FLAG, NULL }
#define CORE_FLAGGED(type, kind, member, flag)                                                                         \
    { #member, kind, offsetof(type, member), offsetof(type, flag), NULL }

/* Fills what a dict (or NULL) names. None leaves a field alone. -1 with an exception. */
int core_fill(core_call *call, PyObject *dict, core_field *fields, void *target);

int core_fill_options(core_call *call, PyObject *dict, rapt_options *options);
int core_fill_weights(core_call *call, PyObject *dict, rapt_mha_weights *weights);
int core_fill_gradients(core_call *call, PyObject *dict, rapt_mha_gradients *gradients);
int core_fill_attention_gradients(core_call *call, PyObject *dict, rapt_attention_gradients *gradients);
int core_fill_rotary(core_call *call, PyObject *dict, rapt_rotary *rotary);

/* ---- attention.c, sdpa.c ---- */

extern const char core_attention_doc[], core_attention_backward_doc[], core_sdpa_doc[];
PyObject *core_copy(PyObject *module, PyObject *args);
PyObject *core_attention(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *core_attention_backward(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *core_sdpa(PyObject *module, PyObject *args);
/* A mask that says who attends, for [A,N,H,L,S]: as one of five dimensions, where true blocks. rank: query's and key's. */
rapt_tensor *core_take_mask(core_call *call, PyObject *object, int32_t rank, const int64_t *size);
/* [A,N,...] as [A*N,...]: one of both is 1, or strides allow it. */
rapt_tensor core_merge(const rapt_tensor *t);

/* ---- torch.c ---- */

extern const char core_torch_connect_doc[], core_torch_attend_doc[], core_torch_record_doc[], core_torch_backward_doc[],
    core_torch_prefer_large_pages_doc[];
PyObject *core_torch_connect(PyObject *module, PyObject *args);
PyObject *core_torch_prefer_large_pages(PyObject *module, PyObject *args);
PyObject *core_torch_attend(PyObject *module, PyObject *args);
PyObject *core_torch_record(PyObject *module, PyObject *args);
PyObject *core_torch_backward(PyObject *module, PyObject *args);
int core_add_torch(PyObject *module);

/* ---- fingerprint.c ---- */

extern const char core_fingerprint_doc[];
PyObject *core_fingerprint(PyObject *module, PyObject *arrays);

/* ---- functional.c, layer.c, state.c, cache.c ---- */

extern const char core_functional_doc[], core_functional_backward_doc[], core_load_doc[], core_layers_doc[];
PyObject *core_functional(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *core_functional_backward(PyObject *module, PyObject *args);
PyObject *core_load(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *core_layers(PyObject *module, PyObject *path);

/* Takes query, key, value (None where there is none), out and the options of a layer's forward. */
int core_take_forward(core_call *call, PyObject *const arrays[4], bool batch_first, PyObject *keywords,
                      const rapt_tensor *t[4], rapt_options *options);
/* Ends the call and passes the result on. What it borrowed stays with the state among the keywords, if there is one. */
PyObject *core_end_forward(core_call *call, PyObject *keywords, PyObject *result);

/* The struct in a Layer, a Cache, a State; NULL with a TypeError that names the argument. */
rapt_mha *core_layer_of(PyObject *object, const char *name);
rapt_cache *core_cache_of(PyObject *object, const char *name);
rapt_mha_state *core_state_of(PyObject *object, const char *name);
/* The same for a backward: the state is one that a forward of the object's filled, or empty. */
const rapt_mha_state *core_filled_state_of(PyObject *object, const char *name);
/* Hands what a call borrows to the state, but for its results, and what the state had before to the call. */
void core_state_keep(PyObject *state, core_call *call);
int core_add_layers(PyObject *module);
int core_add_states(PyObject *module);
int core_add_caches(PyObject *module);

#endif
