/* fields.c - keywords into the fields of a struct, by tables */
#include "core.h"

#define OPTION(kind, member) CORE_FIELD(rapt_options, kind, member)
static core_field option_fields[] = {
    OPTION(CORE_INPUT, attn_mask),
    OPTION(CORE_INPUT, key_padding_mask),
    OPTION(CORE_BOOL, causal),
    OPTION(CORE_BOOL, align_bottom_right),
    CORE_FLAGGED(rapt_options, CORE_INTEGER, left, limit_left),
    CORE_FLAGGED(rapt_options, CORE_INTEGER, right, limit_right),
    OPTION(CORE_INTEGER, offset),
    OPTION(CORE_INTEGERS, offsets),
    OPTION(CORE_INTEGERS, key_start),
    OPTION(CORE_INTEGERS, key_lengths),
    CORE_FLAGGED(rapt_options, CORE_REAL, scale, set_scale),
    OPTION(CORE_CHOICE, mode),
    OPTION(CORE_REAL, dropout),
    OPTION(CORE_BOOL, per_head_weights),
    OPTION(CORE_OUTPUT, weights),
    OPTION(CORE_OUTPUT, lse),
    OPTION(CORE_INPUT, static_k),
    OPTION(CORE_INPUT, static_v),
    OPTION(CORE_CACHE, cache),
    OPTION(CORE_INTEGERS, append_lengths),
    OPTION(CORE_ROTARY, rotary),
    OPTION(CORE_STATE, state),
    CORE_FLAGGED(rapt_options, CORE_UNSIGNED, dropout_seed, set_dropout_seed),
    OPTION(CORE_UNSIGNED, dropout_offset),
    {0},
};

#define WEIGHT(kind, member) CORE_FIELD(rapt_mha_weights, kind, member)
static core_field weight_fields[] = {
    WEIGHT(CORE_INTEGER, num_heads),
    WEIGHT(CORE_INTEGER, num_kv_heads),
    WEIGHT(CORE_INTEGER, head_dim),
    WEIGHT(CORE_BOOL, add_zero_attn),
    WEIGHT(CORE_BOOL, batch_first),
    WEIGHT(CORE_BOOL, causal),
    CORE_FLAGGED(rapt_mha_weights, CORE_REAL, scale, set_scale),
    WEIGHT(CORE_REAL, dropout),
    WEIGHT(CORE_INPUT, in_proj_weight),
    WEIGHT(CORE_INPUT, q_proj_weight),
    WEIGHT(CORE_INPUT, k_proj_weight),
    WEIGHT(CORE_INPUT, v_proj_weight),
    WEIGHT(CORE_INPUT, in_proj_bias),
    WEIGHT(CORE_INPUT, q_proj_bias),
    WEIGHT(CORE_INPUT, k_proj_bias),
    WEIGHT(CORE_INPUT, v_proj_bias),
    WEIGHT(CORE_INPUT, bias_k),
    WEIGHT(CORE_INPUT, bias_v),
    WEIGHT(CORE_INPUT, out_proj_weight),
    WEIGHT(CORE_INPUT, out_proj_bias),
    {0},
};

#define GRADIENT(kind, member) CORE_FIELD(rapt_mha_gradients, kind, member)
static core_field gradient_fields[] = {
    GRADIENT(CORE_BOOL, accumulate),
    GRADIENT(CORE_OUTPUT, query),
    GRADIENT(CORE_OUTPUT, key),
    GRADIENT(CORE_OUTPUT, value),
    GRADIENT(CORE_OUTPUT, attn_mask),
    GRADIENT(CORE_OUTPUT, key_padding_mask),
    GRADIENT(CORE_OUTPUT, in_proj_weight),
    GRADIENT(CORE_OUTPUT, q_proj_weight),
    GRADIENT(CORE_OUTPUT, k_proj_weight),
    GRADIENT(CORE_OUTPUT, v_proj_weight),
    GRADIENT(CORE_OUTPUT, in_proj_bias),
    GRADIENT(CORE_OUTPUT, q_proj_bias),
    GRADIENT(CORE_OUTPUT, k_proj_bias),
    GRADIENT(CORE_OUTPUT, v_proj_bias),
    GRADIENT(CORE_OUTPUT, bias_k),
    GRADIENT(CORE_OUTPUT, bias_v),
    GRADIENT(CORE_OUTPUT, out_proj_weight),
    GRADIENT(CORE_OUTPUT, out_proj_bias),
    GRADIENT(CORE_OUTPUT, static_k),
    GRADIENT(CORE_OUTPUT, static_v),
    {0},
};

static core_field attention_gradient_fields[] = {
    CORE_FIELD(rapt_attention_gradients, CORE_BOOL, accumulate),
    CORE_FIELD(rapt_attention_gradients, CORE_OUTPUT, query),
    CORE_FIELD(rapt_attention_gradients, CORE_OUTPUT, key),
    CORE_FIELD(rapt_attention_gradients, CORE_OUTPUT, value),
    CORE_FIELD(rapt_attention_gradients, CORE_OUTPUT, attn_mask),
    CORE_FIELD(rapt_attention_gradients, CORE_OUTPUT, key_padding_mask),
    {0},
};

#define ROTARY(kind, member) CORE_FIELD(rapt_rotary, kind, member)
static core_field rotary_fields[] = {
    ROTARY(CORE_REAL, base),
    ROTARY(CORE_BOOL, interleaved),
    ROTARY(CORE_CHOICE, scaling),
    ROTARY(CORE_INTEGER, dims),
    ROTARY(CORE_REAL, factor),
    ROTARY(CORE_INTEGER, original_length),
    ROTARY(CORE_INTEGER, length),
    ROTARY(CORE_REAL, low_turns),
    ROTARY(CORE_REAL, high_turns),
    CORE_FLAGGED(rapt_rotary, CORE_REAL, amplitude, set_amplitude),
    ROTARY(CORE_POSITIONS, positions),
    ROTARY(CORE_BOOL, unrounded_bounds),
    {0},
};

static core_field *find(core_field *fields, PyObject *name) {
    core_field *field = fields;
    for (; field->name != NULL && field->interned != NULL; field++)
        if (field->interned == name) return field;
    for (field = fields; field->name != NULL; field++) {
        if (field->interned == NULL) field->interned = PyUnicode_InternFromString(field->name);
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, field->name) == 0) return field;
    }
    return PyErr_Format(PyExc_TypeError, "there is no option %R", name), NULL;
}

/* Text lives as long as the call does. */
static int take_text(core_call *call, PyObject *value, const char **text) {
    PyObject *bytes = NULL;
    if (!PyUnicode_FSConverter(value, &bytes)) return -1;
    *text = PyBytes_AsString(bytes);
    return core_call_keep(call, bytes);
}

static int take_rotary(core_call *call, PyObject *value, const rapt_rotary **rotary) {
    rapt_rotary *memory = core_call_allocate(call, sizeof *memory);
    if (memory == NULL) return -1;
    if (!PyDict_Check(value)) return PyErr_Format(PyExc_TypeError, "rotary is %R, expected a dict", value), -1;
    *rotary = memory;
    return core_fill_rotary(call, value, memory);
}

static int set(core_call *call, const core_field *field, PyObject *value, void *target) {
    void *to = (char *)target + field->offset;
    switch (field->kind) {
    case CORE_INPUT:
    case CORE_OUTPUT:
        return (*(const rapt_tensor **)to = core_take(call, value, field->name, field->kind == CORE_OUTPUT)) ? 0 : -1;
    case CORE_BOOL: {
        int truth = PyObject_IsTrue(value);
        *(bool *)to = truth > 0;
        return truth < 0 ? -1 : 0;
    }
    case CORE_INTEGER: *(int64_t *)to = PyLong_AsLongLong(value); break;
    case CORE_INTEGERS:
        return (*(const int64_t **)to = core_take_integers(call, value, field->name, call->batch)) ? 0 : -1;
    case CORE_POSITIONS:
        return (*(const int64_t **)to = core_take_integers(call, value, field->name, call->tokens)) ? 0 : -1;
    case CORE_UNSIGNED: *(uint64_t *)to = PyLong_AsUnsignedLongLongMask(value); break;
    case CORE_REAL: *(double *)to = PyFloat_AsDouble(value); break;
    case CORE_DTYPE: return core_dtype(value, to);
    case CORE_CHOICE: {
        long number = PyLong_AsLong(value);
        if (number < 0 || number > INT32_MAX) number = INT32_MAX; /* the library refuses it */
        *(int *)to = (int)number;
        break;
    }
    case CORE_TEXT: return take_text(call, value, to);
    case CORE_CACHE: return (*(rapt_cache **)to = core_cache_of(value, field->name)) != NULL ? 0 : -1;
    case CORE_STATE: return (*(rapt_mha_state **)to = core_state_of(value, field->name)) != NULL ? 0 : -1;
    case CORE_ROTARY: return take_rotary(call, value, to);
    }
    return PyErr_Occurred() ? -1 : 0;
}

int core_fill(core_call *call, PyObject *dict, core_field *fields, void *target) {
    if (dict == NULL || dict == Py_None) return 0;
    if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "expected a dict, not %R", dict), -1;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &name, &value)) {
        const core_field *field = find(fields, name);
        if (field == NULL) return -1;
        if (value == Py_None) continue;
        if (set(call, field, value, target) < 0) return -1;
        if (field->flag != CORE_NO_FLAG) *((bool *)target + field->flag) = true;
    }
    return 0;
}

int core_fill_options(core_call *call, PyObject *dict, rapt_options *options) {
    memset(options, 0, sizeof *options);
    return core_fill(call, dict, option_fields, options);
}

int core_fill_weights(core_call *call, PyObject *dict, rapt_mha_weights *weights) {
    *weights = rapt_mha_weights_default(0);
    return core_fill(call, dict, weight_fields, weights);
}

int core_fill_gradients(core_call *call, PyObject *dict, rapt_mha_gradients *gradients) {
    memset(gradients, 0, sizeof *gradients);
    return core_fill(call, dict, gradient_fields, gradients);
}

int core_fill_attention_gradients(core_call *call, PyObject *dict, rapt_attention_gradients *gradients) {
    memset(gradients, 0, sizeof *gradients);
    return core_fill(call, dict, attention_gradient_fields, gradients);
}

int core_fill_rotary(core_call *call, PyObject *dict, rapt_rotary *rotary) {
    *rotary = rapt_rotary_default(10000);
    return core_fill(call, dict, rotary_fields, rotary);
}
