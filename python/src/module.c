/* module.c - the module rapt._core */
#include "core.h"

static PyMethodDef methods[] = {
    {"scaled_dot_product_attention", core_sdpa, METH_VARARGS, core_sdpa_doc},
    {"attention", CORE_METHOD(core_attention), METH_VARARGS | METH_KEYWORDS, core_attention_doc},
    {"attention_backward", CORE_METHOD(core_attention_backward), METH_VARARGS | METH_KEYWORDS,
     core_attention_backward_doc},
    {"functional", CORE_METHOD(core_functional), METH_VARARGS | METH_KEYWORDS, core_functional_doc},
    {"functional_backward", core_functional_backward, METH_VARARGS, core_functional_backward_doc},
    {"torch_connect", core_torch_connect, METH_VARARGS, core_torch_connect_doc},
    {"torch_prefer_large_pages", core_torch_prefer_large_pages, METH_VARARGS, core_torch_prefer_large_pages_doc},
    {"torch_attend", core_torch_attend, METH_VARARGS, core_torch_attend_doc},
    {"torch_record", core_torch_record, METH_VARARGS, core_torch_record_doc},
    {"torch_backward", core_torch_backward, METH_VARARGS, core_torch_backward_doc},
    {"load", CORE_METHOD(core_load), METH_VARARGS | METH_KEYWORDS, core_load_doc},
    {"layers", core_layers, METH_O, core_layers_doc},
    {"copy", core_copy, METH_VARARGS, "copy(source, target)\n--\n\nrapt_tensor_copy: types convert."},
    {"fingerprint", core_fingerprint, METH_VARARGS, core_fingerprint_doc},
    {"borrow_threads", core_borrow_threads, METH_VARARGS,
     "borrow_threads(parallel_for, num_threads)\n--\n\n"
     "Addresses of LibTorch's torch_parallel_for and torch_get_num_threads, to compute with while no number is set; "
     "None: not."},
    {"set_num_threads", core_set_num_threads, METH_O, "set_num_threads(count)\n--\n\n0: the default."},
    {"get_num_threads", core_get_num_threads, METH_NOARGS,
     "get_num_threads()\n--\n\n"
     "How many threads calls compute with: those of set_num_threads, of RAPT_NUM_THREADS, of PyTorch, or all CPUs that "
     "the process may use, whichever is the first to say."},
    {"manual_seed", core_manual_seed, METH_O, "manual_seed(seed)\n--\n\nOf dropout, from its first draw on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The C library: see core.h and rapt.h.", -1, methods, NULL, NULL, NULL, NULL};

/* The names of schemes, each at its number. */
static int add_schemes(PyObject *module) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && rapt_scheme_name((rapt_scheme)i) != NULL; i++) {
        PyObject *name = PyUnicode_FromString(rapt_scheme_name((rapt_scheme)i));
        if (name == NULL || PyList_Append(list, name) < 0) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    PyObject *tuple = list != NULL ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple != NULL ? PyModule_AddObject(module, "schemes", tuple) : -1;
}

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (core_add_arrays(module) < 0 || core_add_layers(module) < 0 || core_add_states(module) < 0 ||
        core_add_caches(module) < 0 || core_add_torch(module) < 0 || add_schemes(module) < 0 ||
        PyModule_AddStringConstant(module, "version", rapt_version()) < 0 ||
        PyModule_AddIntConstant(module, "numerics_version", RAPT_NUMERICS_VERSION) < 0)
        Py_CLEAR(module);
    return module;
}
