/* cache.c - the keys and values of sequences that grow: append, attend, roll back, copy, reorder
 *
 * A sequence's blocks are found through `row`, so that reordering sequences moves numbers, and copies blocks only where a
 * sequence is wanted twice.
 */
#include "cache.h"

#include "elements.h"

#include <math.h>

typedef long long ll; /* for printf */

#define MOST_DIM ((int64_t)1 << 48) /* so that a block's elements can be counted */

static size_t sequence_bytes(const rapt_cache *cache) {
    return cache->block_bytes * (size_t)(cache->config.num_kv_heads * cache->blocks);
}

static int64_t ring_size(const rapt_cache *cache) { return cache->blocks * CUT; }
static bool is_ring(const rapt_cache *cache) {
    return cache->config.window > 0 && ring_size(cache) < cache->config.capacity;
}

/* Whether the keys that a query at `position` of sequence n sees through the window, itself aside, are there. */
static bool sees_all(const rapt_cache *cache, int64_t n, int64_t position) {
    int64_t seen = cache->config.window - 1, first = position > seen ? position - seen : 0;
    return cache->config.window == 0 || first >= cache->oldest[n] || first >= position;
}

/* ---- making one ---- */

static rapt_status check_size(rapt_context *context, const char *name, int64_t size) {
    if (size >= 1) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %lld, expected at least 1", name, (ll)size);
}

static rapt_status settle_config(rapt_context *context, const rapt_mha *layer, const rapt_cache_config *given,
                                 rapt_cache_config *config) {
    if (given == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "config is NULL");
    if (given->struct_size < sizeof *given || !rapt_extra_bytes_are_zero(given, sizeof *config, given->struct_size)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "config.struct_size is %zu, expected %zu: start from rapt_cache_config_default",
                         given->struct_size, sizeof *given);
    }
    *config = *given;
    config->struct_size = sizeof *config;
    rapt_mha_config of_layer = {0};
    if (layer != NULL) of_layer = *rapt_mha_settings(layer);
    if (layer == NULL &&
        (given->num_kv_heads == RAPT_DEFAULT || given->head_dim == RAPT_DEFAULT || !given->set_dtype)) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "without a layer, config must give num_kv_heads, head_dim and dtype (with set_dtype)");
    }
    if (config->num_kv_heads == RAPT_DEFAULT) config->num_kv_heads = of_layer.num_kv_heads;
    if (config->head_dim == RAPT_DEFAULT) config->head_dim = of_layer.head_dim;
    if (config->value_dim == RAPT_DEFAULT) config->value_dim = config->head_dim;
    if (!config->set_dtype) config->dtype = of_layer.dtype;
    config->set_dtype = true;
    rapt_status status = check_size(context, "batch", config->batch);
    if (status == RAPT_OK) status = check_size(context, "capacity", config->capacity);
    if (status == RAPT_OK) status = check_size(context, "num_kv_heads", config->num_kv_heads);
    if (status == RAPT_OK) status = check_size(context, "head_dim", config->head_dim);
    if (status == RAPT_OK) status = check_size(context, "value_dim", config->value_dim);
    if (status != RAPT_OK) return status;
    if (config->window < 0) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "window is %lld, expected 0 for none or a number of positions",
                         (ll)config->window);
    }
    if (!rapt_is_float(config->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "dtype is %s, expected f32, f64, bf16 or f16",
                         rapt_dtype_name(config->dtype));
    }
    return RAPT_OK;
}

static size_t times(int64_t a, int64_t b) { return rapt_size_mul((size_t)a, (size_t)b); }

static rapt_status create(rapt_context *context, const rapt_mha *layer, const rapt_cache_config *given,
                          rapt_cache **result) {
    rapt_cache made = {.allocator = context->allocator};
    rapt_cache_config *c = &made.config;
    rapt_status status = settle_config(context, layer, given, c);
    if (status != RAPT_OK) return status;

    if (c->head_dim > MOST_DIM || c->value_dim > MOST_DIM) {
        return rapt_fail(context, RAPT_ERROR_OVERFLOW, "head_dim %lld and value_dim %lld are too large to compute with",
                         (ll)c->head_dim, (ll)c->value_dim);
    }
    /* A ring holds the window and a block beside it: what a piece of 256 positions overwrites, nobody sees any more. */
    int64_t kept = c->capacity;
    if (c->window > 0 && c->window < c->capacity - CUT) kept = c->window + CUT;
    made.blocks = kept / CUT + (kept % CUT != 0);
    made.value_width = (c->value_dim - 1) / COLUMNS * COLUMNS + COLUMNS;
    size_t element = rapt_dtype_size(c->dtype), sequences = (size_t)c->batch;
    size_t row_reals = rapt_size_add((size_t)c->head_dim, (size_t)made.value_width);
    made.block_bytes = rapt_size_mul(rapt_size_mul(CUT, row_reals), element);
    made.value_offset = rapt_size_mul(times(CUT, c->head_dim), element);
    size_t all_blocks = rapt_size_mul(sequences, times(c->num_kv_heads, made.blocks));
    size_t tables = rapt_arena_size(rapt_size_mul(6 * sizeof(int64_t), sequences)), flags = rapt_arena_size(all_blocks);
    made.memory_size = rapt_size_add(rapt_size_add(tables, flags), rapt_size_mul(all_blocks, made.block_bytes));

    rapt_cache *cache = rapt_allocate(&made.allocator, sizeof *cache);
    char *memory = cache == NULL ? NULL : rapt_allocate(&made.allocator, made.memory_size);
    if (memory == NULL) {
        if (cache != NULL) rapt_release(&made.allocator, cache, sizeof *cache);
        return rapt_fail_memory(context, made.memory_size);
    }
    memset(memory, 0, tables + flags); /* blocks are set to zero when a sequence first reaches them */
    made.length = (int64_t *)(void *)memory;
    made.cleared = made.length + c->batch;
    made.past = made.cleared + c->batch;
    made.now = made.past + c->batch;
    made.row = made.now + c->batch;
    made.oldest = made.row + c->batch;
    made.non_finite = (uint8_t *)memory + tables;
    made.data = memory + tables + flags;
    for (int64_t n = 0; n < c->batch; n++) made.row[n] = n;
    atomic_flag_clear(&made.busy);
    *cache = made;
    *result = cache;
    return RAPT_OK;
}

rapt_status rapt_cache_create(rapt_context *context, const rapt_mha *layer, const rapt_cache_config *config,
                              rapt_cache **cache) {
    if (cache != NULL) *cache = NULL;
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    if (cache == NULL) return rapt_leave(context, &call, rapt_fail(context, RAPT_ERROR_NULL, "cache is NULL"));
    return rapt_leave(context, &call, create(context, layer, config, cache));
}

void rapt_cache_destroy(rapt_cache *cache) {
    if (cache == NULL) return;
    rapt_allocator allocator = cache->allocator;
    rapt_release(&allocator, cache->length, cache->memory_size);
    rapt_release(&allocator, cache, sizeof *cache);
}

const rapt_cache_config *rapt_cache_settings(const rapt_cache *cache) { return cache == NULL ? NULL : &cache->config; }

int64_t rapt_cache_length(const rapt_cache *cache, int64_t sequence) {
    if (cache == NULL || sequence < 0 || sequence >= cache->config.batch) return -1;
    return cache->length[sequence];
}

int64_t rapt_cache_bytes(const rapt_cache *cache) {
    return cache == NULL ? 0 : (int64_t)(cache->memory_size + sizeof *cache);
}

/* ---- putting keys and values in ---- */

typedef struct put_job {
    rapt_cache *cache;
    rapt_view k, v; /* [N, Hk, count, D], [N, Hk, count, Dv] */
    rapt_dtype dtype;
    int64_t first;          /* of the rows of k and v */
    int64_t count;          /* of rows from there on */
    const int64_t *lengths; /* [N] rows that are real, or NULL */
} put_job;

static int64_t rows_of(const put_job *job, int64_t n) {
    int64_t real = job->lengths != NULL ? job->lengths[n] - job->first : job->count;
    return real < 0 ? 0 : real < job->count ? real : job->count;
}

/* An element from one place to another. Sizes tell types apart here: equal dtypes are copied bit by bit. */
static void move_element(char *to, rapt_dtype to_dtype, int64_t to_at, const char *from, rapt_dtype dtype, int64_t at) {
    if (to_dtype != dtype) {
        rapt_element_store(to, to_dtype, to_at, rapt_element_load(from, dtype, at));
        return;
    }
    switch (rapt_dtype_size(dtype)) {
    case 2: ((uint16_t *)(void *)to)[to_at] = ((const uint16_t *)(const void *)from)[at]; break;
    case 4: ((uint32_t *)(void *)to)[to_at] = ((const uint32_t *)(const void *)from)[at]; break;
    default: ((uint64_t *)(void *)to)[to_at] = ((const uint64_t *)(const void *)from)[at]; break;
    }
}

/* Rows [row, row + count) of a head, which become positions of one panel, from column `column` of its block on. */
static void put_panel(const put_job *job, int64_t n, int64_t head, int64_t row, int64_t count, char *block,
                      int64_t column) {
    const rapt_cache *cache = job->cache;
    const rapt_cache_config *c = &cache->config;
    const rapt_view *k = &job->k, *v = &job->v;
    int64_t k_at = n * k->stride[0] + head * k->stride[1] + row * k->stride[2];
    int64_t v_at = n * v->stride[0] + head * v->stride[1] + row * v->stride[2];
    for (int64_t d = 0; d < c->head_dim; d++) {
        int64_t to = rapt_cache_key_at(cache, column, d);
        for (int64_t t = 0; t < count; t++) {
            move_element(block, c->dtype, to + t, k->data, job->dtype, k_at + t * k->stride[2] + d * k->stride[3]);
        }
    }
    char *values = block + cache->value_offset;
    for (int64_t t = 0; t < count; t++) {
        for (int64_t d = 0; d < c->value_dim; d++) {
            move_element(values, c->dtype, rapt_cache_value_at(cache, column + t, d), v->data, job->dtype,
                         v_at + t * v->stride[2] + d * v->stride[3]);
        }
    }
}

static bool all_finite(const rapt_cache *cache, const char *block, int64_t column, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
        for (int64_t d = 0; d < cache->config.value_dim; d++) {
            int64_t at = rapt_cache_value_at(cache, column + t, d);
            float value = (float)rapt_element_load(block + cache->value_offset, cache->config.dtype, at);
            if (!isfinite(value)) return false; /* as f32: whoever reads it may compute in that */
        }
    }
    return true;
}

/* One (sequence, KV head). */
static void put_unit(void *arg, int64_t unit, int32_t lane) {
    (void)lane;
    const put_job *job = arg;
    rapt_cache *cache = job->cache;
    int64_t n = unit / cache->config.num_kv_heads, head = unit % cache->config.num_kv_heads, rows = rows_of(job, n);
    int64_t begin = cache->length[n], end = begin + rows, reached = end / CUT + (end % CUT != 0);
    for (int64_t cut = cache->cleared[cache->row[n]]; cut < reached && cut < cache->blocks; cut++) {
        memset(rapt_cache_block(cache, n, head, cut), 0, cache->block_bytes);
    }
    for (int64_t p = begin, count; p < end; p += count) {
        int64_t column = p % CUT;
        count = PANEL - column % PANEL < end - p ? PANEL - column % PANEL : end - p;
        char *block = rapt_cache_block(cache, n, head, p / CUT);
        put_panel(job, n, head, job->first + (p - begin), count, block, column);
        if (!all_finite(cache, block, column, count)) {
            cache->non_finite[rapt_cache_block_index(cache, n, head, p / CUT)] = 1;
        }
    }
}

static void put(rapt_context *context, const put_job *job) {
    rapt_cache *cache = job->cache;
    const rapt_cache_config *c = &cache->config;
    double elements = (double)(c->batch * c->num_kv_heads * job->count) * (double)(c->head_dim + c->value_dim);
    rapt_parallel(context, c->batch * c->num_kv_heads, 16 * elements, put_unit, (void *)(uintptr_t)job);
    for (int64_t n = 0; n < c->batch; n++) {
        cache->length[n] += rows_of(job, n);
        int64_t reached = cache->length[n] / CUT + (cache->length[n] % CUT != 0);
        if (reached > cache->blocks) reached = cache->blocks;
        if (reached > cache->cleared[cache->row[n]]) cache->cleared[cache->row[n]] = reached;
        if (cache->length[n] - ring_size(cache) > cache->oldest[n])
            cache->oldest[n] = cache->length[n] - ring_size(cache);
    }
}

/* ---- a forward with a cache ---- */

static rapt_status take(rapt_context *context, rapt_cache *cache) {
    if (cache == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "cache is NULL");
    if (!atomic_flag_test_and_set(&cache->busy)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_STATE, "the cache is in use by another call");
}

void rapt_cache_end(rapt_cache *cache) {
    if (cache != NULL) atomic_flag_clear(&cache->busy);
}

static rapt_status check_fit(rapt_context *context, const char *what, int64_t given, int64_t expected) {
    if (given == expected) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_SHAPE, "the cache was made for %s %lld, the call has %lld", what, (ll)expected,
                     (ll)given);
}

static rapt_status check_options(rapt_context *context, const rapt_options *o) {
    const char *refused = o->key_padding_mask != NULL                  ? "key_padding_mask"
                          : o->key_start != NULL                       ? "key_start"
                          : o->key_lengths != NULL                     ? "key_lengths"
                          : o->offset != 0                             ? "offset"
                          : o->offsets != NULL                         ? "offsets"
                          : o->align_bottom_right                      ? "align_bottom_right"
                          : o->static_k != NULL || o->static_v != NULL ? "static_k or static_v"
                                                                       : NULL;
    if (refused == NULL) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                     "options.%s cannot stand beside a cache, which knows lengths and positions itself", refused);
}

static rapt_status check_lengths(rapt_context *context, const rapt_cache *cache, const cache_append *append) {
    for (int64_t n = 0; n < cache->config.batch; n++) {
        int64_t more = append->lengths != NULL ? append->lengths[n] : append->count, length = cache->length[n];
        if (more < 0 || more > append->count) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "append_lengths[%lld] is %lld, expected 0 to %lld", (ll)n,
                             (ll)more, (ll)append->count);
        }
        if (more > cache->config.capacity - length) {
            return rapt_fail(context, RAPT_ERROR_STATE,
                             "the cache is full: sequence %lld holds %lld of %lld positions, %lld more do not fit",
                             (ll)n, (ll)length, (ll)cache->config.capacity, (ll)more);
        }
    }
    return RAPT_OK;
}

static rapt_status begin(rapt_context *context, rapt_cache *cache, const rapt_options *o, const cache_append *append,
                         attn_problem *p) {
    const rapt_cache_config *c = &cache->config;
    rapt_status status = check_fit(context, "batch", p->batch, c->batch);
    if (status == RAPT_OK) status = check_fit(context, "KV heads", p->kv_heads, c->num_kv_heads);
    if (status == RAPT_OK) status = check_fit(context, "head_dim", p->dim, c->head_dim);
    if (status == RAPT_OK) status = check_fit(context, "value_dim", p->value_dim, c->value_dim);
    if (status == RAPT_OK) status = check_options(context, o);
    if (status == RAPT_OK) status = rapt_check_aligned(context, "append_lengths", append->lengths);
    if (status == RAPT_OK && append->attends_only && append->lengths != NULL) {
        status = rapt_fail(context, RAPT_ERROR_ARGUMENT, "append_lengths is given, but key and value are NULL");
    }
    if (status == RAPT_OK) status = check_lengths(context, cache, append);
    if (status != RAPT_OK) return status;
    p->cache = cache;
    p->keys = 0;
    for (int64_t n = 0; n < c->batch; n++) {
        int64_t more = append->lengths != NULL ? append->lengths[n] : append->count;
        cache->now[n] = cache->length[n] + more;
        cache->past[n] = append->attends_only ? cache->length[n] - p->queries : cache->length[n];
        if (cache->now[n] > p->keys) p->keys = cache->now[n];
        if (append->attends_only && p->queries > 0 && !sees_all(cache, n, cache->past[n] > 0 ? cache->past[n] : 0)) {
            return rapt_fail(context, RAPT_ERROR_STATE,
                             "the first of the last %lld positions of sequence %lld sees keys that have made room: "
                             "with a window of %lld the cache keeps the last %lld positions",
                             (ll)p->queries, (ll)n, (ll)c->window, (ll)(cache->length[n] - cache->oldest[n]));
        }
    }
    return RAPT_OK;
}

rapt_status rapt_cache_begin(rapt_context *context, rapt_cache *cache, const rapt_options *options,
                             const cache_append *append, attn_problem *problem) {
    rapt_status status = take(context, cache);
    if (status != RAPT_OK) return status;
    status = begin(context, cache, options, append, problem);
    if (status != RAPT_OK) rapt_cache_end(cache);
    return status;
}

rapt_status rapt_cache_set_band(rapt_context *context, attn_problem *p) {
    const rapt_cache *cache = p->cache;
    int64_t window = cache->config.window;
    p->offsets = cache->past;
    p->key_lengths = cache->now;
    if (window == 0) return RAPT_OK;
    if (!p->limit_right || p->right > 0) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "the cache has a window of %lld positions, which needs causal queries", (ll)window);
    }
    if (p->limit_left && p->left >= window) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "options.left is %lld, expected less than the cache's window of %lld positions", (ll)p->left,
                         (ll)window);
    }
    if (!p->limit_left) p->left = window - 1;
    p->limit_left = true;
    return RAPT_OK;
}

static void advance(rapt_view *view, rapt_dtype dtype, int64_t rows) {
    if (view->data != NULL) view->data += rows * view->stride[2] * (int64_t)rapt_dtype_size(dtype);
}

/* The queries [first, first + count) of a problem. */
static attn_problem queries_of(const attn_problem *p, int64_t first, int64_t count) {
    attn_problem piece = *p;
    piece.queries = count;
    advance(&piece.q, p->dtype, first);
    advance(&piece.out, p->dtype, first);
    advance(&piece.weights, p->dtype, first);
    advance(&piece.lse, p->lse_dtype, first);
    if (p->mask.data != NULL) {
        int64_t bytes = first * p->mask.stride[2] * (int64_t)rapt_dtype_size(p->mask.dtype);
        piece.mask.data = (const char *)p->mask.data + bytes;
    }
    return piece;
}

static void fill_row(const rapt_view *view, rapt_dtype dtype, int64_t n, int64_t h, int64_t i, int64_t count,
                     double value) {
    int64_t at = n * view->stride[0] + h * view->stride[1] + i * view->stride[2];
    for (int64_t j = 0; j < count && view->data != NULL; j++) {
        rapt_element_store(view->data, dtype, at + j * view->stride[3], value);
    }
}

/* Results of rows that are no tokens. */
static void blank_padding(const attn_problem *p, const int64_t *lengths) {
    for (int64_t n = 0; n < p->batch && lengths != NULL; n++) {
        for (int64_t i = lengths[n]; i < p->queries; i++) {
            for (int64_t h = 0; h < p->heads; h++) {
                fill_row(&p->out, p->dtype, n, h, i, p->value_dim, 0);
                fill_row(&p->weights, p->dtype, n, h, i, p->keys + p->extra_keys, 0);
                fill_row(&p->lse, p->lse_dtype, n, h, i, 1, -INFINITY);
            }
        }
    }
}

void rapt_cache_attend(rapt_context *context, rapt_cache *cache, const cache_append *append, const rapt_view *k,
                       const rapt_view *v, const attn_problem *p, void *scratch) {
    int64_t rows = append->attends_only ? p->queries : append->count;
    int64_t most = is_ring(cache) ? ring_size(cache) - cache->config.window : rows; /* overwrite nothing that is seen */
    for (int64_t first = 0; first < rows; first += most) {
        int64_t count = most < rows - first ? most : rows - first;
        if (!append->attends_only) {
            put(context, &(put_job){.cache = cache,
                                    .k = *k,
                                    .v = *v,
                                    .dtype = p->dtype,
                                    .first = first,
                                    .count = count,
                                    .lengths = append->lengths});
            for (int64_t n = 0; n < p->batch; n++) cache->now[n] = cache->length[n];
        }
        attn_problem piece = queries_of(p, first, count);
        if (p->queries > 0) context->backend->attn_forward(context, &piece, scratch);
        for (int64_t n = 0; n < p->batch; n++) cache->past[n] += count;
    }
    if (p->queries > 0) blank_padding(p, append->lengths);
}

/* ---- lengths, copies ---- */

static rapt_status clear(rapt_context *context, rapt_cache *cache) {
    (void)context;
    for (int64_t n = 0; n < cache->config.batch; n++) cache->length[n] = cache->oldest[n] = 0;
    size_t blocks = (size_t)(cache->config.batch * cache->config.num_kv_heads * cache->blocks);
    memset(cache->non_finite, 0, blocks);
    return RAPT_OK;
}

static rapt_status check_sequence(rapt_context *context, const rapt_cache *cache, const char *name, int64_t sequence) {
    if (sequence >= 0 && sequence < cache->config.batch) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %lld, expected 0 to %lld", name, (ll)sequence,
                     (ll)cache->config.batch - 1);
}

static rapt_status check_rollback(rapt_context *context, const rapt_cache *cache, int64_t n, int64_t length) {
    if (length >= cache->length[n] || sees_all(cache, n, length)) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_STATE,
                     "sequence %lld cannot go back from length %lld to %lld: with a window of %lld the cache keeps the "
                     "last %lld positions",
                     (ll)n, (ll)cache->length[n], (ll)length, (ll)cache->config.window,
                     (ll)(cache->length[n] - cache->oldest[n]));
}

static rapt_status truncate_sequences(rapt_context *context, rapt_cache *cache, int64_t sequence, int64_t length) {
    bool all = sequence == RAPT_ALL;
    rapt_status status = all ? RAPT_OK : check_sequence(context, cache, "sequence", sequence);
    if (status != RAPT_OK) return status;
    int64_t most = all ? INT64_MAX : cache->length[sequence];
    if (length < 0 || length > most) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "length is %lld, expected 0 to %lld", (ll)length, (ll)most);
    }
    int64_t first = all ? 0 : sequence, end = all ? cache->config.batch : sequence + 1;
    for (int64_t n = first; n < end && status == RAPT_OK; n++) {
        status = check_rollback(context, cache, n, length);
    }
    for (int64_t n = first; n < end && status == RAPT_OK; n++) {
        if (cache->length[n] > length) cache->length[n] = length;
        if (cache->oldest[n] > cache->length[n]) cache->oldest[n] = cache->length[n]; /* nothing is left */
    }
    return status;
}

/* The blocks of row `from` into row `to`. */
static void copy_row(rapt_cache *cache, int64_t from, int64_t to) {
    int64_t blocks = cache->config.num_kv_heads * cache->blocks, used = cache->cleared[from];
    for (int64_t head = 0; head < cache->config.num_kv_heads; head++) {
        size_t offset = (size_t)(head * cache->blocks) * cache->block_bytes;
        memcpy(cache->data + (size_t)to * sequence_bytes(cache) + offset,
               cache->data + (size_t)from * sequence_bytes(cache) + offset, (size_t)used * cache->block_bytes);
    }
    memcpy(cache->non_finite + to * blocks, cache->non_finite + from * blocks, (size_t)blocks);
    /* Blocks behind the copied ones may hold an older sequence, which is as good as zeros, or nothing yet. */
    if (used > cache->cleared[to]) cache->cleared[to] = used;
}

static rapt_status copy_sequence(rapt_context *context, rapt_cache *cache, int64_t from, int64_t to) {
    rapt_status status = check_sequence(context, cache, "from", from);
    if (status == RAPT_OK) status = check_sequence(context, cache, "to", to);
    if (status != RAPT_OK || from == to) return status;
    copy_row(cache, cache->row[from], cache->row[to]);
    cache->length[to] = cache->length[from];
    cache->oldest[to] = cache->oldest[from];
    return RAPT_OK;
}

static bool contains(const int64_t *list, int64_t count, int64_t x) {
    for (int64_t i = 0; i < count; i++) {
        if (list[i] == x) return true;
    }
    return false;
}

static rapt_status reorder(rapt_context *context, rapt_cache *cache, const int64_t *source) {
    int64_t batch = cache->config.batch;
    if (source == NULL) return rapt_fail(context, RAPT_ERROR_NULL, "source is NULL");
    rapt_status status = rapt_check_aligned(context, "source", source);
    if (status != RAPT_OK) return status;
    for (int64_t n = 0; n < batch; n++) {
        if (source[n] < 0 || source[n] >= batch) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT, "source[%lld] is %lld, expected 0 to %lld", (ll)n,
                             (ll)source[n], (ll)batch - 1);
        }
    }
    enum { NO_ROW = -1 };
    int64_t *row = cache->past, *length = cache->now; /* of the new order; both are free between forwards */
    for (int64_t n = 0; n < batch; n++) {
        row[n] = contains(source, n, source[n]) ? NO_ROW : cache->row[source[n]]; /* the first takes the row over */
        length[n] = cache->length[source[n]];
    }
    int64_t unwanted = 0; /* sequences that nobody takes over leave their rows to the copies */
    for (int64_t n = 0; n < batch; n++) {
        if (row[n] != NO_ROW) continue;
        while (contains(source, batch, unwanted)) unwanted++;
        row[n] = cache->row[unwanted++];
        copy_row(cache, cache->row[source[n]], row[n]);
    }
    memcpy(cache->row, row, (size_t)batch * sizeof *row);
    memcpy(cache->length, length, (size_t)batch * sizeof *length);
    for (int64_t n = 0; n < batch; n++) length[n] = cache->oldest[source[n]];
    memcpy(cache->oldest, length, (size_t)batch * sizeof *length);
    return RAPT_OK;
}

/* ---- plain tensors ---- */

/* Keys or values [N,S,Hk,dim] as a view [N,Hk,S,dim]. */
static rapt_status take_plain(rapt_context *context, const rapt_cache *cache, const char *name,
                              const rapt_tensor *tensor, int64_t dim, bool is_output, rapt_view *view) {
    rapt_status status =
        is_output ? rapt_check_output(context, name, tensor) : rapt_check_tensor(context, name, tensor);
    if (status == RAPT_OK) status = rapt_check_rank(context, name, tensor, 4, "[N,S,Hk,D]");
    if (status != RAPT_OK) return status;
    const rapt_cache_config *c = &cache->config;
    char text[RAPT_SHAPE_TEXT];
    if (tensor->shape[0] != c->batch || tensor->shape[2] != c->num_kv_heads || tensor->shape[3] != dim) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has shape %s, expected [N,S,Hk,D] = [%lld, S, %lld, %lld]",
                         name, rapt_shape_text(tensor, text), (ll)c->batch, (ll)c->num_kv_heads, (ll)dim);
    }
    if (!rapt_is_float(tensor->dtype)) {
        return rapt_fail(context, RAPT_ERROR_DTYPE, "%s is %s, expected a floating-point type", name,
                         rapt_dtype_name(tensor->dtype));
    }
    const rapt_tensor normalised = rapt_normalised(tensor);
    const int64_t *s = normalised.stride;
    *view = (rapt_view){.data = tensor->data, .stride = {s[0], s[2], s[1], s[3]}};
    return RAPT_OK;
}

static rapt_status take_pair(rapt_context *context, const rapt_cache *cache, const rapt_tensor *keys,
                             const rapt_tensor *values, bool is_output, rapt_view *k, rapt_view *v) {
    rapt_status status = take_plain(context, cache, "keys", keys, cache->config.head_dim, is_output, k);
    if (status == RAPT_OK) {
        status = take_plain(context, cache, "values", values, cache->config.value_dim, is_output, v);
    }
    if (status == RAPT_OK && keys->shape[1] != values->shape[1]) {
        status = rapt_fail(context, RAPT_ERROR_SHAPE, "values has S %lld, expected %lld as keys", (ll)values->shape[1],
                           (ll)keys->shape[1]);
    }
    if (status == RAPT_OK && keys->dtype != values->dtype) {
        status = rapt_fail(context, RAPT_ERROR_DTYPE, "values is %s, expected %s as keys",
                           rapt_dtype_name(values->dtype), rapt_dtype_name(keys->dtype));
    }
    if (status == RAPT_OK && is_output) status = rapt_check_apart(context, "keys", keys, "values", values);
    return status;
}

static rapt_status export_all(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                              const rapt_tensor *values) {
    const rapt_cache_config *c = &cache->config;
    rapt_view k = {0}, v = {0};
    rapt_status status = take_pair(context, cache, keys, values, true, &k, &v);
    if (status != RAPT_OK) return status;
    int64_t longest = 0;
    for (int64_t n = 0; n < c->batch; n++) longest = cache->length[n] > longest ? cache->length[n] : longest;
    if (keys->shape[1] < longest) {
        return rapt_fail(context, RAPT_ERROR_SHAPE, "keys has S %lld, expected at least the longest length, %lld",
                         (ll)keys->shape[1], (ll)longest);
    }
    if (k.data == NULL || v.data == NULL) return RAPT_OK; /* of S = 0 */
    for (int64_t n = 0; n < c->batch; n++) {
        for (int64_t head = 0; head < c->num_kv_heads; head++) {
            for (int64_t p = 0; p < keys->shape[1]; p++) {
                if (p < cache->oldest[n] || p >= cache->length[n]) {
                    fill_row(&k, keys->dtype, n, head, p, c->head_dim, 0);
                    fill_row(&v, keys->dtype, n, head, p, c->value_dim, 0);
                    continue;
                }
                const char *block = rapt_cache_block(cache, n, head, p / CUT);
                int64_t k_at = n * k.stride[0] + head * k.stride[1] + p * k.stride[2];
                int64_t v_at = n * v.stride[0] + head * v.stride[1] + p * v.stride[2];
                for (int64_t d = 0; d < c->head_dim; d++) {
                    move_element(k.data, keys->dtype, k_at + d * k.stride[3], block, c->dtype,
                                 rapt_cache_key_at(cache, p % CUT, d));
                }
                for (int64_t d = 0; d < c->value_dim; d++) {
                    move_element(v.data, keys->dtype, v_at + d * v.stride[3], block + cache->value_offset, c->dtype,
                                 rapt_cache_value_at(cache, p % CUT, d));
                }
            }
        }
    }
    return RAPT_OK;
}

static rapt_status import_all(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                              const rapt_tensor *values, const int64_t *lengths) {
    rapt_view k = {0}, v = {0};
    rapt_status status = take_pair(context, cache, keys, values, false, &k, &v);
    if (status == RAPT_OK) status = rapt_check_aligned(context, "lengths", lengths);
    if (status != RAPT_OK) return status;
    for (int64_t n = 0; n < cache->config.batch; n++) {
        int64_t most = keys->shape[1] < cache->config.capacity ? keys->shape[1] : cache->config.capacity;
        int64_t length = lengths != NULL ? lengths[n] : keys->shape[1];
        if (length < 0 || length > most) {
            return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                             "sequence %lld would have length %lld, expected 0 to %lld (S %lld, capacity %lld)", (ll)n,
                             (ll)length, (ll)most, (ll)keys->shape[1], (ll)cache->config.capacity);
        }
    }
    clear(context, cache);
    put(context,
        &(put_job){.cache = cache, .k = k, .v = v, .dtype = keys->dtype, .count = keys->shape[1], .lengths = lengths});
    for (int64_t n = 0; n < cache->config.batch && cache->config.window > 0; n++) {
        /* What is older may be zeros of an export, whose cache had no longer room for it. */
        int64_t seen = cache->length[n] - (cache->config.window - 1);
        if (seen > cache->oldest[n]) cache->oldest[n] = seen;
    }
    return RAPT_OK;
}

/* ---- public entries: each holds the context and the cache while it runs ---- */

#define WITH_CACHE(call_that_computes)                                                                                 \
    rapt_call gate;                                                                                                    \
    rapt_status status = rapt_enter(context, &gate);                                                                   \
    if (status != RAPT_OK) return status;                                                                              \
    status = take(context, cache);                                                                                     \
    if (status == RAPT_OK) {                                                                                           \
        status = call_that_computes;                                                                                   \
        rapt_cache_end(cache);                                                                                         \
    }                                                                                                                  \
    return rapt_leave(context, &gate, status)

rapt_status rapt_cache_clear(rapt_context *context, rapt_cache *cache) { WITH_CACHE(clear(context, cache)); }

rapt_status rapt_cache_truncate(rapt_context *context, rapt_cache *cache, int64_t sequence, int64_t length) {
    WITH_CACHE(truncate_sequences(context, cache, sequence, length));
}

rapt_status rapt_cache_copy(rapt_context *context, rapt_cache *cache, int64_t from, int64_t to) {
    WITH_CACHE(copy_sequence(context, cache, from, to));
}

rapt_status rapt_cache_reorder(rapt_context *context, rapt_cache *cache, const int64_t *source) {
    WITH_CACHE(reorder(context, cache, source));
}

rapt_status rapt_cache_export(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                              const rapt_tensor *values) {
    WITH_CACHE(export_all(context, cache, keys, values));
}

rapt_status rapt_cache_import(rapt_context *context, rapt_cache *cache, const rapt_tensor *keys,
                              const rapt_tensor *values, const int64_t *lengths) {
    WITH_CACHE(import_all(context, cache, keys, values, lengths));
}
