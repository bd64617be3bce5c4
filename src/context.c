/* context.c - contexts: lifetime, error text, the gate that every call passes, and parallel loops */
#include "internal.h"

#include "cpu/cpu.h"

#include <stdio.h>

/* Below this many multiply-adds a loop is done sooner than a sleeping thread wakes. */
#define OPERATIONS_WORTH_A_THREAD 2e5 /* some microseconds */

const char *rapt_version(void) {
#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)
    return VERSION_TEXT(RAPT_VERSION_MAJOR, RAPT_VERSION_MINOR, RAPT_VERSION_PATCH);
}

const char *rapt_status_name(rapt_status status) {
    switch (status) {
#define STATUS_NAME(name, code, text)                                                                                  \
    case name: return #name;
        RAPT_STATUS_LIST(STATUS_NAME)
    }
    return "not a rapt_status";
}

const char *rapt_status_text(rapt_status status) {
    switch (status) {
#define STATUS_TEXT(name, code, text)                                                                                  \
    case name: return text;
        RAPT_STATUS_LIST(STATUS_TEXT)
    }
    return "not a rapt_status";
}

rapt_status rapt_fail(rapt_context *context, rapt_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(context->message, sizeof context->message, format, args);
    va_end(args);
    return status;
}

rapt_status rapt_fail_memory(rapt_context *context, size_t bytes) {
    if (bytes == SIZE_MAX)
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "the call needs more memory than a size_t counts");
    return rapt_fail(context, RAPT_ERROR_MEMORY, "out of memory: %zu bytes were refused", bytes);
}

bool rapt_extra_bytes_are_zero(const void *object, size_t known, size_t given) {
    if (given > known + 1024) return false; /* no struct grew that much: struct_size is garbage */
    const unsigned char *bytes = object;
    for (size_t i = known; i < given; i++) {
        if (bytes[i] != 0) return false;
    }
    return true;
}

rapt_status rapt_check_struct_size(rapt_context *context, const char *name, const char *initialiser, const void *object,
                                   size_t given, size_t known) {
    if (given < known) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s.struct_size is %zu, expected %zu (start from %s())", name,
                         given, known, initialiser);
    }
    if (!rapt_extra_bytes_are_zero(object, known, given)) {
        return rapt_fail(context, RAPT_ERROR_UNSUPPORTED,
                         "%s sets a field that Rapt %s does not know (struct_size %zu, known %zu)", name,
                         rapt_version(), given, known);
    }
    return RAPT_OK;
}

/* ---- creation ---- */

/* Fills in everything but the threads and allocates nothing; `context` is only a draft on the caller's stack. */
static rapt_status settle_config(const rapt_context_config *config, rapt_context *context, int32_t *threads) {
    rapt_status status = rapt_check_struct_size(context, "config", "rapt_context_config_default", config,
                                                config->struct_size, sizeof *config);
    if (status != RAPT_OK) return status;
    if ((config->allocator.allocate == NULL) != (config->allocator.release == NULL)) {
        return rapt_fail(context, RAPT_ERROR_NULL, "config.allocator has no %s (set both functions, or neither)",
                         config->allocator.allocate == NULL ? "allocate" : "release");
    }
    context->allocator = rapt_allocator_or_default(&config->allocator);

    if (config->backend != RAPT_BACKEND_CPU && config->backend != RAPT_BACKEND_REFERENCE) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "config.backend is %d, expected RAPT_BACKEND_CPU or "
                         "RAPT_BACKEND_REFERENCE",
                         (int)config->backend);
    }
    context->backend_id = config->backend;
    context->backend = config->backend == RAPT_BACKEND_CPU ? &rapt_backend_cpu : &rapt_backend_reference;

    status = rapt_choose_isa(context, config->isa);
    if (status != RAPT_OK) return status;

    if (config->pool != NULL && config->parallel_for != NULL) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config has a pool and a parallel_for: give one of them");
    }
    if (config->num_threads < 0 || config->num_threads > RAPT_MAX_THREADS) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "config.num_threads is %d, expected 1 to %d, or 0 for the default", (int)config->num_threads,
                         RAPT_MAX_THREADS);
    }
    if (config->parallel_for != NULL) {
        if (config->parallel_for_workers < 1) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config.parallel_for_workers is %d, expected at least 1",
                             (int)config->parallel_for_workers);
        }
        *threads = config->parallel_for_workers < RAPT_MAX_THREADS ? config->parallel_for_workers : RAPT_MAX_THREADS;
    } else if (config->pool != NULL) {
        *threads = rapt_pool_threads(config->pool);
    } else {
        *threads = config->num_threads > 0 ? config->num_threads : rapt_default_threads();
        if (*threads == 0) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "RAPT_NUM_THREADS is \"%s\", expected a whole number from 1 to %d",
                             os_environment("RAPT_NUM_THREADS"), RAPT_MAX_THREADS);
        }
    }
    return RAPT_OK;
}

static size_t context_bytes(int32_t lanes) { return sizeof(rapt_context) + (size_t)lanes * sizeof(rapt_turn); }

static rapt_status create(const rapt_context_config *config, rapt_context *draft, rapt_context **result) {
    int32_t threads = 1;
    rapt_status status = settle_config(config, draft, &threads);
    if (status != RAPT_OK) return status;
    draft->lanes = threads;
    draft->operations_worth_a_thread = OPERATIONS_WORTH_A_THREAD;
    draft->parallel_for = config->parallel_for;
    draft->parallel_for_user = config->parallel_for_user;
    draft->pool = config->pool;
    if (draft->pool == NULL && draft->parallel_for == NULL && threads > 1) {
        status = rapt_pool_start(&draft->allocator, threads, &draft->pool);
        if (status == RAPT_ERROR_MEMORY) return rapt_fail_memory(draft, (size_t)threads * sizeof(os_thread));
        if (status != RAPT_OK) {
            return rapt_fail(draft, status, "the system refused to start %d threads (num_threads 1 needs none)",
                             (int)threads - 1);
        }
        draft->owns_pool = true;
    }
    rapt_context *context = rapt_allocate(&draft->allocator, context_bytes(threads));
    if (context == NULL) {
        if (draft->owns_pool) rapt_pool_destroy(draft->pool);
        return rapt_fail_memory(draft, context_bytes(threads));
    }
    memcpy(context, draft, sizeof *context);
    atomic_flag_clear(&context->busy);
    *result = context;
    return RAPT_OK;
}

rapt_status rapt_context_create(const rapt_context_config *config, rapt_context **context) {
    if (context == NULL) return RAPT_ERROR_NULL;
    *context = NULL;
    rapt_context_config defaults = rapt_context_config_default();
    if (config == NULL) config = &defaults;
    rapt_context draft;
    memset(&draft, 0, sizeof draft);
    rapt_status status = create(config, &draft, context);
    bool has_error_text = config->struct_size >= sizeof *config && config->error_text != NULL;
    if (status != RAPT_OK && has_error_text && config->error_text_size > 0) {
        snprintf(config->error_text, config->error_text_size, "%s", draft.message);
    }
    return status;
}

void rapt_context_destroy(rapt_context *context) {
    if (context == NULL) return;
    if (context->owns_pool) rapt_pool_destroy(context->pool);
    rapt_allocator allocator = context->allocator;
    rapt_release(&allocator, context->arena.base, context->arena.capacity);
    rapt_release(&allocator, context, context_bytes(context->lanes));
}

const char *rapt_error_message(const rapt_context *context) {
    return context == NULL ? "the context is NULL" : context->message;
}

int32_t rapt_context_num_threads(const rapt_context *context) { return context == NULL ? 0 : context->lanes; }
rapt_isa rapt_context_isa(const rapt_context *context) { return context == NULL ? RAPT_ISA_AUTO : context->isa; }
rapt_backend rapt_context_backend(const rapt_context *context) {
    return context == NULL ? RAPT_BACKEND_CPU : context->backend_id;
}

rapt_status rapt_context_set_seed(rapt_context *context, uint64_t seed) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    context->dropout_seed = seed;
    context->dropout_offset = 0;
    return rapt_leave(context, &call, RAPT_OK);
}

/* ---- the gate ---- */

rapt_status rapt_enter(rapt_context *context, rapt_call *call) {
    if (context == NULL) return RAPT_ERROR_NULL;
    /* No message here: the text belongs to the thread that is inside. */
    if (atomic_flag_test_and_set(&context->busy)) return RAPT_ERROR_STATE;
    call->caller_mode = rapt_fp_mode_enter();
    return RAPT_OK;
}

rapt_status rapt_leave(rapt_context *context, const rapt_call *call, rapt_status status) {
    context->arena.used = 0;
    rapt_fp_mode_leave(call->caller_mode);
    atomic_flag_clear(&context->busy);
    return status;
}

/* ---- parallel loops ---- */

typedef struct parallel_job {
    rapt_work work;
    void *arg;
    int64_t items, lanes;
    rapt_turn *turns; /* [lanes] */
} parallel_job;

/* One lane: it takes its own items and then what others have left of theirs, so one that starts late finds less. */
static void run_lane(void *arg, int64_t lane) {
    const parallel_job *job = arg;
    rapt_fp_mode mode = rapt_fp_mode_enter();
    for (int64_t i = 0; i < job->lanes; i++) {
        _Atomic int64_t *next = &job->turns[(lane + i) % job->lanes].next;
        int64_t item = 0;
        while (atomic_load(next) < job->items && (item = atomic_fetch_add(next, job->lanes)) < job->items)
            job->work(job->arg, item, (int32_t)lane);
    }
    rapt_fp_mode_leave(mode);
}

void rapt_parallel(rapt_context *context, int64_t items, double operations, rapt_work work, void *arg) {
    int64_t lanes = items < context->lanes ? items : context->lanes;
    if (lanes <= 1 || operations < context->operations_worth_a_thread) {
        for (int64_t item = 0; item < items; item++) work(arg, item, 0);
        return;
    }
    parallel_job job = {.work = work, .arg = arg, .items = items, .lanes = lanes, .turns = context->turns};
    for (int64_t lane = 0; lane < lanes; lane++) atomic_init(&job.turns[lane].next, lane);
    if (context->parallel_for != NULL) {
        context->parallel_for(context->parallel_for_user, lanes, run_lane, &job);
    } else {
        rapt_pool_run(context->pool, lanes, run_lane, &job);
    }
}
