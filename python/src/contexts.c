/* contexts.c - a context for each thread, one pool for all, errors as exceptions
 *
 * The pool's threads work for one call at a time; calls of other Python threads meanwhile run on their own thread. A
 * thread's context goes away with the thread; a pool goes away with the last context that uses it. All of this runs
 * under the interpreter's lock but for the end of a thread, hence the atomic count.
 */
#include "core.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct shared_pool {
    rapt_pool *pool;
    atomic_int users; /* contexts, and one for being the current pool */
} shared_pool;

typedef struct thread_context {
    rapt_context *context;
    shared_pool *pool;
} thread_context;

static shared_pool *current_pool;
static pthread_key_t key; /* of a thread_context */
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static int key_error;

static void release_pool(shared_pool *pool) {
    if (pool == NULL || atomic_fetch_sub(&pool->users, 1) > 1) return;
    rapt_pool_destroy(pool->pool);
    free(pool);
}

static void release_context(void *pointer) {
    thread_context *own = pointer;
    rapt_context_destroy(own->context);
    release_pool(own->pool);
    free(own);
}

static void make_key(void) { key_error = pthread_key_create(&key, release_context); }

PyObject *core_raise(const rapt_context *context, rapt_status status) {
    const char *message = rapt_error_message(context);
    PyObject *type = PyExc_ValueError;
    switch (status) {
    case RAPT_ERROR_NULL:
    case RAPT_ERROR_DTYPE: type = PyExc_TypeError; break;
    case RAPT_ERROR_MEMORY: type = PyExc_MemoryError; break;
    case RAPT_ERROR_STATE:
    case RAPT_ERROR_THREAD: type = PyExc_RuntimeError; break;
    case RAPT_ERROR_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    case RAPT_ERROR_FILE: type = PyExc_OSError; break;
    default: break;
    }
    PyErr_SetString(type, message != NULL && *message != '\0' ? message : rapt_status_text(status));
    return NULL;
}

PyObject *core_done(const rapt_context *context, rapt_status status) {
    if (status != RAPT_OK) return core_raise(context, status);
    return core_none();
}

/* Makes a pool the current one; 0 threads: the default number. */
static int set_pool(int32_t num_threads) {
    shared_pool *made = malloc(sizeof *made);
    if (made == NULL) return PyErr_NoMemory(), -1;
    rapt_status status = rapt_pool_create(num_threads, &made->pool);
    if (status != RAPT_OK) return free(made), core_raise(NULL, status), -1;
    atomic_init(&made->users, 1);
    release_pool(current_pool);
    current_pool = made;
    return 0;
}

static int renew(thread_context *own) {
    char message[256] = "";
    rapt_context_config config = rapt_context_config_default();
    config.pool = current_pool->pool;
    config.error_text = message;
    config.error_text_size = sizeof message;
    rapt_context *context;
    rapt_status status = rapt_context_create(&config, &context);
    if (status != RAPT_OK) {
        core_raise(NULL, status);
        if (*message != '\0' && status != RAPT_ERROR_MEMORY) PyErr_SetString(PyExc_RuntimeError, message);
        return -1;
    }
    rapt_context_destroy(own->context);
    release_pool(own->pool);
    own->context = context;
    own->pool = current_pool;
    atomic_fetch_add(&current_pool->users, 1);
    return 0;
}

rapt_context *core_context(void) {
    pthread_once(&key_once, make_key);
    if (key_error != 0)
        return PyErr_SetString(PyExc_RuntimeError, "the system has no room for thread-local data"), NULL;
    if (current_pool == NULL && set_pool(0) < 0) return NULL;
    thread_context *own = pthread_getspecific(key);
    if (own == NULL) {
        own = calloc(1, sizeof *own);
        if (own == NULL || pthread_setspecific(key, own) != 0) return free(own), PyErr_NoMemory(), NULL;
    }
    if (own->pool != current_pool && renew(own) < 0) return NULL;
    return own->context;
}

PyObject *core_set_num_threads(PyObject *module, PyObject *count) {
    (void)module;
    long number = PyLong_AsLong(count);
    if (number == -1 && PyErr_Occurred()) return NULL;
    if (number < 0 || number > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "num_threads is %ld, expected at least 1, or 0 for the default", number);
    if (set_pool((int32_t)number) < 0) return NULL;
    return core_none();
}

PyObject *core_get_num_threads(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    rapt_context *context = core_context();
    return context != NULL ? PyLong_FromLong(rapt_context_num_threads(context)) : NULL;
}

/* ---- dropout ----
 * Every call that draws takes the next offset of one sequence, so that no two calls draw alike, in whatever thread. */
static uint64_t draw_seed, draw_offset;

void core_draw(rapt_options *options) {
    if (options->set_dropout_seed) return;
    options->set_dropout_seed = true;
    options->dropout_seed = draw_seed;
    options->dropout_offset = draw_offset++;
}

PyObject *core_manual_seed(PyObject *module, PyObject *seed) {
    (void)module;
    unsigned long long value = PyLong_AsUnsignedLongLongMask(seed);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    draw_seed = value;
    draw_offset = 0;
    return core_none();
}
