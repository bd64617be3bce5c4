/* contexts.c - a context for each thread, one pool for all, errors as exceptions
 *
 * The pool's threads work for one call at a time; calls of other Python threads meanwhile run on their own thread. A
 * thread's context goes away with the thread; a pool goes away with the last context that uses it. All of this runs
 * under the interpreter's lock but for the end of a thread, hence the atomic count.
 *
 * Beside PyTorch, its threads do the work unless a number was set: after each parallel loop they wait for the next one by
 * spinning, for milliseconds, on the very CPUs that threads of a pool would need.
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
    shared_pool *pool; /* NULL: the context runs on borrowed threads, */
    uint32_t borrowed; /* so many of them */
} thread_context;

/* Of LibTorch's stable ABI; 0 is success. */
typedef int32_t borrowed_for(int64_t begin, int64_t end, int64_t grain, void (*range)(int64_t, int64_t, void *),
                             void *arg);
typedef int32_t borrowed_count(uint32_t *count);

static borrowed_for *borrowed_run; /* NULL: none to be borrowed */
static borrowed_count *borrowed_threads;
static bool is_child;             /* of a process that may have used them */
static shared_pool *current_pool; /* NULL: borrowed threads, or not made yet */
static pthread_key_t key;         /* of a thread_context */
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

/* ---- borrowed threads ---- */

typedef struct borrowed_job {
    void (*task)(void *arg, int64_t index);
    void *arg;
} borrowed_job;

static void run_range(int64_t begin, int64_t end, void *arg) {
    const borrowed_job *job = arg;
    for (int64_t i = begin; i < end; i++) job->task(job->arg, i);
}

static void run_borrowed(void *user, int64_t count, void (*task)(void *arg, int64_t index), void *arg) {
    (void)user;
    borrowed_job job = {task, arg};
    if (borrowed_run(0, count, 1, run_range, &job) != 0) run_range(0, count, &job); /* tasks do what is left to do */
}

core_parallel_for *core_borrowed_for(void) {
    return current_pool == NULL && borrowed_run != NULL && !is_child ? run_borrowed : NULL;
}

/* Threads do not live on in a child, and whoever lent them may not know. There a pool does, with as many. */
static void after_fork(void) { is_child = true; }

PyObject *core_borrow_threads(PyObject *module, PyObject *args) {
    (void)module;
    static bool watches_forks;
    void *functions[2] = {NULL};
    PyObject *addresses[2];
    if (!PyArg_ParseTuple(args, "OO", &addresses[0], &addresses[1])) return NULL;
    for (int i = 0; i < 2; i++) {
        if (addresses[i] != Py_None) functions[i] = PyLong_AsVoidPtr(addresses[i]);
        if (PyErr_Occurred()) return NULL;
    }
    if (functions[0] == NULL || functions[1] == NULL) functions[0] = NULL;
    if (!watches_forks && pthread_atfork(NULL, NULL, after_fork) != 0) return PyErr_NoMemory();
    watches_forks = true;
    memcpy(&borrowed_threads, &functions[1], sizeof(void *));
    memcpy(&borrowed_run, &functions[0], sizeof(void *));
    return core_none();
}

/* ---- contexts ---- */

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

/* A new context for a thread: on the current pool, or on so many borrowed threads. */
static int renew(thread_context *own, uint32_t borrowed) {
    char message[256] = "";
    rapt_context_config config = rapt_context_config_default();
    config.error_text = message;
    config.error_text_size = sizeof message;
    if (borrowed > 0) {
        config.parallel_for = run_borrowed;
        config.parallel_for_workers = (int32_t)borrowed;
    } else {
        config.pool = current_pool->pool;
    }
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
    own->borrowed = borrowed;
    own->pool = borrowed > 0 ? NULL : current_pool;
    if (own->pool != NULL) atomic_fetch_add(&own->pool->users, 1);
    return 0;
}

rapt_context *core_context(void) {
    pthread_once(&key_once, make_key);
    if (key_error != 0)
        return PyErr_SetString(PyExc_RuntimeError, "the system has no room for thread-local data"), NULL;
    uint32_t borrowed = 0;
    if (current_pool == NULL && borrowed_run != NULL && (borrowed_threads(&borrowed) != 0 || borrowed > INT32_MAX))
        borrowed = 0;
    if (current_pool == NULL && (borrowed == 0 || is_child)) {
        if (set_pool((int32_t)borrowed) < 0) return NULL;
        borrowed = 0;
    }
    thread_context *own = pthread_getspecific(key);
    if (own == NULL) {
        own = calloc(1, sizeof *own);
        if (own == NULL || pthread_setspecific(key, own) != 0) return free(own), PyErr_NoMemory(), NULL;
    }
    if ((own->context == NULL || own->borrowed != borrowed || own->pool != current_pool) && renew(own, borrowed) < 0)
        return NULL;
    return own->context;
}

PyObject *core_set_num_threads(PyObject *module, PyObject *count) {
    (void)module;
    long number = PyLong_AsLong(count);
    if (number == -1 && PyErr_Occurred()) return NULL;
    if (number < 0 || number > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "num_threads is %ld, expected at least 1, or 0 for the default", number);
    if (number == 0 && borrowed_run != NULL) { /* the default is theirs */
        release_pool(current_pool);
        current_pool = NULL;
        return core_none();
    }
    return set_pool((int32_t)number) == 0 ? core_none() : NULL;
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
