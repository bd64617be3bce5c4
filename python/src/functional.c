/* functional.c - the layer with the weights given by the call */
#include "core.h"

int core_take_forward(core_call *call, PyObject *const arrays[4], bool batch_first, PyObject *keywords,
                      const rapt_tensor *t[4], rapt_options *options) {
    static const char *const names[] = {"query", "key", "value", "out"};
    for (int i = 0; i < 4; i++) {
        int same = i; /* one array given twice is one tensor: self-attention needs one projection */
        for (int j = 0; j < i && i < 3; j++)
            if (arrays[j] == arrays[i]) same = j;
        if (same < i)
            t[i] = t[same];
        else if (core_take_optional(call, arrays[i], names[i], i == 3, &t[i]) < 0)
            return -1;
    }
    if (t[0] != NULL && (t[0]->ndim == 2 || t[0]->ndim == 3)) {
        call->batch = t[0]->ndim == 2 ? 1 : t[0]->shape[batch_first ? 0 : 1];
        call->tokens = t[0]->ndim == 2 ? t[0]->shape[0] : t[0]->shape[0] * t[0]->shape[1];
    }
    return core_fill_options(call, keywords, options);
}

PyObject *core_end_forward(core_call *call, PyObject *keywords, PyObject *result) {
    PyObject *state = result != NULL && keywords != NULL ? PyDict_GetItemString(keywords, "state") : NULL;
    if (state != NULL && state != Py_None) core_state_keep(state, call);
    core_call_end(call);
    return result;
}

const char core_functional_doc[] =
    "functional(weights, query, key, value, out, **options)\n--\n\n"
    "rapt_mha_functional: weights is a dict with the fields of rapt_mha_weights, options those of rapt_options. key "
    "and\n"
    "value may be None with static_k and static_v. Arrays of a call with a state are kept by it.";

PyObject *core_functional(PyObject *module, PyObject *args, PyObject *keywords) {
    (void)module;
    PyObject *dict, *arrays[4], *result = NULL;
    const rapt_tensor *t[4];
    rapt_mha_weights weights;
    rapt_options options;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OOOOO", &dict, &arrays[0], &arrays[1], &arrays[2], &arrays[3]))
        return NULL;
    core_call call;
    core_call_begin(&call);
    if (core_fill_weights(&call, dict, &weights) == 0 &&
        core_take_forward(&call, arrays, weights.batch_first, keywords, t, &options) == 0) {
        if (weights.dropout > 0 && options.mode != RAPT_MODE_EVAL) core_draw(&options);
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status = rapt_mha_functional(context, &weights, t[0], t[1], t[2], &options, t[3]);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    return core_end_forward(&call, keywords, result);
}

const char core_functional_backward_doc[] =
    "functional_backward(weights, state, d_out, d_weights, gradients)\n--\n\n"
    "rapt_mha_functional_backward: gradients is a dict of arrays that are written, with the fields of\n"
    "rapt_mha_gradients; d_weights may be None.";

PyObject *core_functional_backward(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *dict, *state_object, *d_out, *d_weights, *wanted, *result = NULL;
    const rapt_tensor *out_gradient, *weights_gradient;
    rapt_mha_weights weights;
    rapt_mha_gradients gradients;
    rapt_context *context = core_context();
    if (context == NULL || !PyArg_ParseTuple(args, "OOOOO", &dict, &state_object, &d_out, &d_weights, &wanted))
        return NULL;
    const rapt_mha_state *state = core_filled_state_of(state_object, "state");
    if (state == NULL) return NULL;
    core_call call;
    core_call_begin(&call);
    if (core_fill_weights(&call, dict, &weights) == 0 &&
        core_take_optional(&call, d_out, "d_out", false, &out_gradient) == 0 &&
        core_take_optional(&call, d_weights, "d_weights", false, &weights_gradient) == 0 &&
        core_fill_gradients(&call, wanted, &gradients) == 0) {
        PyThreadState *released = PyEval_SaveThread();
        rapt_status status =
            rapt_mha_functional_backward(context, &weights, state, out_gradient, weights_gradient, &gradients);
        PyEval_RestoreThread(released);
        result = core_done(context, status);
    }
    core_call_end(&call);
    return result;
}
