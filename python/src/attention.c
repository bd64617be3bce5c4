/* attention.c - the operator and its backward, as rapt.h has them */
#include "core.h"

/* Arrays of a call, the first num_inputs of which are read and the others written; None where one is not given. */
static int take_positional(core_call *call, PyObject *args, int count, const char *const *names, int num_inputs,
                           const rapt_tensor **tensors) {
    if (PyTuple_Size(args) != count)
        return PyErr_Format(PyExc_TypeError, "expected %d positional arguments, not %zd", count, PyTuple_Size(args)),
               -1;
    for (int i = 0; i < count; i++)
        if (core_take_optional(call, PyTuple_GetItem(args, i), names[i], i >= num_inputs, &tensors[i]) < 0) return -1;
    if (tensors[0] != NULL && tensors[0]->ndim == 4) {
        call->batch = tensors[0]->shape[0];
        call->tokens = tensors[0]->shape[0] * tensors[0]->shape[2];
    }
    return 0;
}

const char core_attention_doc[] =
    "attention(query, key, value, out, **options)\n--\n\n"
    "rapt_attention_forward: query [N,H,L,D], key [N,Hk,S,D], value [N,Hk,S,Dv], out [N,H,L,Dv], which is written.\n\n"
    "Options are the fields of rapt_options; left, right, scale and dropout_seed set their flags. A bool mask blocks\n"
    "where it is true.";

PyObject *core_attention(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    static const char *const names[] = {"query", "key", "value", "out"};
    const rapt_tensor *t[4];
    rapt_options options;
    rapt_context *context = core_context();
    if (context == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    PyObject *result = NULL;
    if (take_positional(&call, args, 4, names, 3, t) == 0 && core_fill_options(&call, keywords, &options) == 0) {
        if (options.dropout > 0) core_draw(&options);
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_attention_forward(context, t[0], t[1], t[2], &options, t[3]);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    core_call_end(&call);
    return result;
}

const char core_attention_backward_doc[] =
    "attention_backward(query, key, value, out, d_out, d_weights, gradients, **options)\n--\n\n"
    "rapt_attention_backward: the arguments of the forward and its results (lse among the options). gradients is a "
    "dict\n"
    "of arrays that are written: query, key, value, attn_mask, key_padding_mask, and accumulate=True to add to them.";

PyObject *core_attention_backward(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    static const char *const names[] = {"query", "key", "value", "out", "d_out", "d_weights"};
    const rapt_tensor *t[6];
    rapt_options options;
    rapt_attention_gradients gradients;
    if (PyTuple_Size(args) != 7)
        return PyErr_Format(PyExc_TypeError, "expected 7 positional arguments, not %zd", PyTuple_Size(args));
    rapt_context *context = core_context();
    PyObject *arrays = context != NULL ? PyTuple_GetSlice(args, 0, 6) : NULL;
    if (arrays == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    PyObject *result = NULL;
    if (take_positional(&call, arrays, 6, names, 6, t) == 0 && core_fill_options(&call, keywords, &options) == 0 &&
        core_fill_attention_gradients(&call, PyTuple_GetItem(args, 6), &gradients) == 0) {
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_attention_backward(context, t[0], t[1], t[2], &options, t[3], t[4], t[5], &gradients);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    Py_DECREF(arrays);
    core_call_end(&call);
    return result;
}

PyObject *core_copy(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *from, *to, *result = NULL;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OO", &from, &to)) return NULL;
    core_call call;
    core_call_begin(&call);
    const rapt_tensor *source = core_take(&call, from, "source", false);
    const rapt_tensor *target = source != NULL ? core_take(&call, to, "target", true) : NULL;
    if (target != NULL) result = core_done(context, rapt_tensor_copy(context, source, target));
    core_call_end(&call);
    return result;
}
