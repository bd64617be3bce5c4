/* attn_backward_cpu.c - the backward of attention on the CPU: five products a tile, one pass over the tiles
 *
 * A unit is one (sequence, key/value head) with the rows of its group of query heads stacked. Its rows and its keys are cut
 * into blocks of 64; a tile is one of each, and adds to the sums of both:
 *
 *     d_q of a row block        over ascending key blocks
 *     d_k, d_v of a key block   over ascending row blocks
 *
 * A lane takes a whole unit: key block after key block, all row blocks for each. The last units, where fewer are left than
 * lanes, are shared: tiles whose row block and key block add up to the same number have neither in common, so these
 * run at once, one wave of them after the other. Both ways every sum takes its tiles in the same order: same bits.
 *
 * Gradients of masks take a pass of their own, over tiles of what a mask's element is summed from.
 */
#include "cpu.h"

#define SOON_BYTES ((int64_t)256 << 10) /* of a unit that is fetched ahead */

enum { ROW_STATS = 3 }; /* reference, factor and delta */

/* ---- sizes ---- */

static size_t rounded(int64_t dim) { return rapt_size_add((size_t)(dim - 1) / COLUMNS * COLUMNS, COLUMNS); }

typedef struct backward_plan {
    int64_t group, units, rows, row_blocks; /* of a unit */
    int64_t key_blocks;                     /* at most; the extra keys are the last one */
    int64_t shared_units;                   /* the last ones, which all lanes share */
    size_t real;
    size_t q_bytes, v_bytes;        /* of a matrix [64][D], [64][Dv] */
    size_t row_bytes, key_bytes;    /* memory of a block */
    size_t row_table, key_table;    /* structs of a unit's blocks */
    size_t own_bytes, shared_bytes; /* a unit that a lane runs, or that lanes share */
    size_t lane_bytes;              /* scratch of a tile, and a row to store */
    size_t stats_bytes;             /* those of all rows, [ROW_STATS][N,H,L], for the pass over masks */
} backward_plan;

typedef struct backward_unit {
    int64_t n, kv_head;
    int64_t first_key, end; /* real keys, without the padding at both ends; blocks are counted from first_key */
    int64_t key_blocks;     /* the extra keys' included */
    attn_row_block *rows;
    attn_key_block *keys;
    char *row_memory, *key_memory;
} backward_unit;

static backward_plan make_plan(const rapt_context *context, const attn_problem *p, const attn_gradients *gradients) {
    backward_plan plan = {.group = p->heads / p->kv_heads, .units = p->batch * p->kv_heads};
    plan.real = rapt_accumulation_size(p->dtype);
    plan.rows = p->queries * plan.group;
    plan.row_blocks = divide_up(plan.rows, CHAIN);
    plan.key_blocks = divide_up(p->keys, CHAIN) + (p->extra_keys > 0);
    plan.shared_units = plan.units % context->lanes;
    plan.q_bytes = rapt_size_mul(plan.real * CHAIN, rounded(p->dim));
    plan.v_bytes = rapt_size_mul(plan.real * CHAIN, rounded(p->value_dim));
    size_t blocks = rapt_size_add(rapt_size_mul(2, plan.q_bytes), plan.v_bytes); /* of rows: q, d_q, d_out */
    plan.row_bytes = rapt_arena_size(rapt_size_add(blocks, ROW_STATS * plan.real * CHAIN));
    size_t transposed = rapt_size_add(plan.q_bytes, plan.v_bytes); /* of keys: k, v; then k_rows, d_k, d_v */
    plan.key_bytes = rapt_arena_size(rapt_size_add(blocks, transposed));
    plan.row_table = rapt_arena_size(rapt_size_mul(sizeof(attn_row_block), (size_t)plan.row_blocks));
    plan.key_table = rapt_arena_size(rapt_size_mul(sizeof(attn_key_block), (size_t)plan.key_blocks));
    size_t rows = rapt_size_add(rapt_size_mul(plan.row_bytes, (size_t)plan.row_blocks), plan.row_table);
    size_t keys = rapt_size_add(rapt_size_mul(plan.key_bytes, (size_t)plan.key_blocks), plan.key_table);
    plan.own_bytes = rapt_size_add(rows, rapt_size_add(plan.key_bytes, rapt_arena_size(sizeof(attn_key_block))));
    plan.shared_bytes = rapt_size_add(rows, keys);
    size_t longest = rounded(p->dim > p->value_dim ? p->dim : p->value_dim);
    size_t tile = rapt_size_add(plan.real * (size_t)rapt_tile_reals(0), plan.v_bytes);
    plan.lane_bytes = rapt_arena_size(rapt_size_add(tile, rapt_size_mul(plan.real, longest)));
    /* A mask's pass: a row block, a key block and sums [64][64] beside the tile's scratch. */
    if (gradients->mask.data != NULL || gradients->padding.data != NULL) {
        size_t block = rapt_size_add(plan.row_bytes, rapt_size_add(plan.key_bytes, plan.real * CHAIN * PANEL));
        plan.lane_bytes = rapt_size_add(plan.lane_bytes, block);
        size_t rows_in_all = rapt_size_mul((size_t)(p->batch * p->heads), (size_t)p->queries);
        plan.stats_bytes = rapt_arena_size(rapt_size_mul(ROW_STATS * plan.real, rows_in_all));
    }
    return plan;
}

size_t rapt_cpu_attn_backward_scratch(const rapt_context *context, const attn_problem *p,
                                      const attn_gradients *gradients) {
    backward_plan plan = make_plan(context, p, gradients);
    /* As much as it takes to share all but one lane's units, even if there are none to share: a smaller problem may. */
    size_t own = rapt_size_mul(plan.own_bytes, (size_t)smaller(plan.units, context->lanes));
    size_t shared = rapt_size_mul(plan.shared_bytes, (size_t)smaller(plan.units, context->lanes - 1));
    size_t total = rapt_size_add(own > shared ? own : shared, plan.stats_bytes);
    total = rapt_size_add(total, rapt_arena_size(sizeof(backward_unit) * (size_t)context->lanes));
    return rapt_size_add(total, rapt_size_mul(plan.lane_bytes, (size_t)context->lanes));
}

/* ---- a unit ---- */

typedef struct backward_job {
    const rapt_cpu_kernels *kernels;
    const attn_problem *problem;
    const attn_gradients *gradients;
    backward_plan plan;
    char *units, *lanes, *stats;
    backward_unit *shared; /* the units that lanes share */
    int64_t wave;          /* then: row block + key block of the tiles that run, */
    int64_t first_block;   /* and the first and the number of the row blocks that have one */
    int64_t block_count;
    int64_t lane_count;
    const mask_gradient *mask; /* in the pass of one */
} backward_job;

static char *lane_scratch(const backward_job *job, int32_t lane) {
    return job->lanes + (size_t)lane * job->plan.lane_bytes;
}

static backward_unit find_unit(const backward_job *job, int64_t index, char *memory, bool is_shared) {
    const attn_problem *p = job->problem;
    const backward_plan *plan = &job->plan;
    backward_unit unit = {.n = index / p->kv_heads, .kv_head = index % p->kv_heads};
    rapt_real_keys(p, unit.n, &unit.first_key, &unit.end);
    unit.key_blocks = divide_up(unit.end - unit.first_key, CHAIN) + (p->extra_keys > 0);
    unit.rows = (attn_row_block *)(void *)memory;
    unit.row_memory = memory + plan->row_table;
    unit.keys = (attn_key_block *)(void *)(unit.row_memory + plan->row_bytes * (size_t)plan->row_blocks);
    unit.key_memory = (char *)unit.keys + (is_shared ? plan->key_table : rapt_arena_size(sizeof(attn_key_block)));
    return unit;
}

/* Lays a block out in memory. */
static attn_row_block row_block_at(const backward_plan *plan, char *memory, attn_rows rows) {
    size_t q = plan->q_bytes, v = plan->v_bytes;
    return (attn_row_block){.rows = rows,
                            .q = memory,
                            .d_q = memory + q,
                            .d_out = memory + 2 * q,
                            .reference = memory + 2 * q + v,
                            .factor = memory + 2 * q + v + plan->real * CHAIN,
                            .delta = memory + 2 * q + v + plan->real * CHAIN * 2};
}

static attn_key_block key_block_at(const backward_plan *plan, char *memory, attn_keys keys) {
    size_t q = plan->q_bytes, v = plan->v_bytes;
    return (attn_key_block){.keys = keys,
                            .k = memory,
                            .v = memory + q,
                            .k_rows = memory + q + v,
                            .d_k = memory + 2 * q + v,
                            .d_v = memory + 3 * q + v};
}

static void prepare_rows(const backward_job *job, const backward_unit *unit, int64_t b, int32_t lane) {
    const backward_plan *plan = &job->plan;
    attn_rows rows = {.problem = job->problem,
                      .n = unit->n,
                      .kv_head = unit->kv_head,
                      .first_head = unit->kv_head * plan->group,
                      .heads = plan->group,
                      .first = b * CHAIN,
                      .count = smaller(CHAIN, plan->rows - b * CHAIN)};
    attn_row_block *block = &unit->rows[b];
    *block = row_block_at(plan, unit->row_memory + (size_t)b * plan->row_bytes, rows);
    job->kernels->backward_rows(job->gradients, block, lane_scratch(job, lane));
}

/* Key block b of the unit, in slot `slot` of its memory. */
static attn_key_block *prepare_keys(const backward_job *job, const backward_unit *unit, int64_t b, int64_t slot,
                                    int32_t lane) {
    const attn_problem *p = job->problem;
    attn_keys keys = {.extra = p->extra_keys > 0 && b == unit->key_blocks - 1};
    keys.first_key = keys.extra ? p->keys : unit->first_key + b * CHAIN;
    keys.keys = keys.extra ? p->extra_keys : smaller(CHAIN, unit->end - keys.first_key);
    attn_key_block *block = &unit->keys[slot];
    *block = key_block_at(&job->plan, unit->key_memory + (size_t)slot * job->plan.key_bytes, keys);
    job->kernels->backward_keys(p, unit->n, unit->kv_head, block, lane_scratch(job, lane));
    return block;
}

/* Where the stats of a row are kept for the pass over masks, each of them for all rows. */
static char *stats_at(const backward_job *job, int which, int64_t n, int64_t head, int64_t query) {
    const attn_problem *p = job->problem;
    int64_t row = ((which * p->batch + n) * p->heads + head) * p->queries + query;
    return job->stats + job->plan.real * (size_t)row;
}

static void keep_stats(const backward_job *job, const attn_row_block *block) {
    const attn_rows *rows = &block->rows;
    const char *stats[ROW_STATS] = {block->reference, block->factor, block->delta};
    size_t real = job->plan.real;
    for (int64_t r = 0; r < rows->count && job->plan.stats_bytes > 0; r++) {
        int64_t row = rows->first + r, head = rows->first_head + row % rows->heads, query = row / rows->heads;
        for (int i = 0; i < ROW_STATS; i++) {
            memcpy(stats_at(job, i, rows->n, head, query), stats[i] + real * (size_t)r, real);
        }
    }
}

static char *row_of(const rapt_view *view, rapt_dtype dtype, int64_t a, int64_t b, int64_t c) {
    return view->data +
           (int64_t)rapt_dtype_size(dtype) * (a * view->stride[0] + b * view->stride[1] + c * view->stride[2]);
}

static void finish_rows(const backward_job *job, const attn_row_block *block, int32_t lane) {
    const attn_problem *p = job->problem;
    const attn_rows *rows = &block->rows;
    const rapt_view *to = &job->gradients->q;
    rapt_dtype dtype = job->gradients->q_dtype;
    void *row_scratch = lane_scratch(job, lane);
    keep_stats(job, block);
    for (int64_t r = 0; r < rows->count && to->data != NULL; r++) {
        int64_t row = rows->first + r, head = rows->first_head + row % rows->heads, query = row / rows->heads;
        job->kernels->store_block_row(block->d_q, r, p->dim, p->scale, job->gradients->accumulate,
                                      row_of(to, dtype, rows->n, head, query), dtype, to->stride[3], row_scratch);
    }
}

static void finish_keys(const backward_job *job, const backward_unit *unit, const attn_key_block *block, int32_t lane) {
    const attn_problem *p = job->problem;
    const attn_gradients *g = job->gradients;
    bool extra = block->keys.extra, adds = g->accumulate && !extra;
    rapt_dtype k_dtype = extra ? rapt_accumulation_dtype(p->dtype) : g->k_dtype;
    rapt_dtype v_dtype = extra ? rapt_accumulation_dtype(p->dtype) : g->v_dtype;
    const rapt_view *k = extra ? &g->extra_k : &g->k, *v = extra ? &g->extra_v : &g->v;
    double natural = 0x1.62e42fefa39efp-1; /* ln 2: q was multiplied by scale * log2(e) */
    void *row_scratch = lane_scratch(job, lane);
    for (int64_t j = 0; j < block->keys.keys; j++) {
        int64_t key = extra ? j : block->keys.first_key + j;
        if (k->data != NULL) {
            job->kernels->store_block_row(block->d_k, j, p->dim, natural, adds,
                                          row_of(k, k_dtype, unit->n, unit->kv_head, key), k_dtype, k->stride[3],
                                          row_scratch);
        }
        if (v->data != NULL) {
            job->kernels->store_block_row(block->d_v, j, p->value_dim, 1, adds,
                                          row_of(v, v_dtype, unit->n, unit->kv_head, key), v_dtype, v->stride[3],
                                          row_scratch);
        }
    }
}

/* Keys that no query sees by lengths or padding have a gradient of 0. */
static void clear_hidden_keys(const backward_job *job, const backward_unit *unit) {
    const attn_problem *p = job->problem;
    const attn_gradients *g = job->gradients;
    if (g->accumulate) return;
    const rapt_view *views[2] = {&g->k, &g->v};
    rapt_dtype dtypes[2] = {g->k_dtype, g->v_dtype};
    int64_t dims[2] = {p->dim, p->value_dim};
    for (int64_t j = 0; j < p->keys; j++) {
        if (j == unit->first_key && j < unit->end) j = unit->end;
        if (j == p->keys) break;
        for (int i = 0; i < 2; i++) {
            if (views[i]->data == NULL) continue;
            char *row = row_of(views[i], dtypes[i], unit->n, unit->kv_head, j);
            for (int64_t d = 0; d < dims[i]; d++) rapt_store(row, dtypes[i], d * views[i]->stride[3], 0);
        }
    }
}

/* ---- a unit on one lane ---- */

/* What is read when a unit begins, if that is so little that it may wait in the second cache. The memory is not touched. */
static void want_unit(const backward_job *job, int64_t index, char *memory, rapt_soon *soon) {
    const attn_problem *p = job->problem;
    const backward_plan *plan = &job->plan;
    int64_t rows = plan->rows * (p->dim + 2 * p->value_dim), keys = CHAIN * (p->dim + p->value_dim);
    bool pays = plan->rows >= CHAIN / 2 && (rows + keys) * (int64_t)rapt_dtype_size(p->dtype) <= SOON_BYTES;
    if (!pays || index >= plan->units) return;
    backward_unit next = find_unit(job, index, memory, false), *unit = &next;
    int64_t count = smaller(CHAIN, unit->end - unit->first_key);
    rapt_want_soon(soon, &p->v, p->dtype, unit->n, unit->kv_head, unit->first_key, count, p->value_dim);
    rapt_want_soon(soon, &p->k, p->dtype, unit->n, unit->kv_head, unit->first_key, count, p->dim);
    for (int64_t h = unit->kv_head * plan->group; h < (unit->kv_head + 1) * plan->group; h++) {
        rapt_want_soon(soon, &p->out, p->dtype, unit->n, h, 0, p->queries, p->value_dim);
        rapt_want_soon(soon, &job->gradients->out, job->gradients->out_dtype, unit->n, h, 0, p->queries, p->value_dim);
        rapt_want_soon(soon, &p->q, p->dtype, unit->n, h, 0, p->queries, p->dim);
    }
}

/* Before the tiles of a block of keys: the next block, and where the gradients of this one go. */
static void want_keys(const backward_job *job, const backward_unit *unit, const attn_keys *keys, rapt_soon *soon) {
    const attn_problem *p = job->problem;
    int64_t next = keys->first_key + CHAIN, count = smaller(CHAIN, unit->end - next);
    if (keys->extra) return;
    rapt_want_soon(soon, &p->v, p->dtype, unit->n, unit->kv_head, next, count, p->value_dim);
    rapt_want_soon(soon, &p->k, p->dtype, unit->n, unit->kv_head, next, count, p->dim);
    const attn_gradients *g = job->gradients;
    rapt_want_soon(soon, &g->v, g->v_dtype, unit->n, unit->kv_head, keys->first_key, keys->keys, p->value_dim);
    rapt_want_soon(soon, &g->k, g->k_dtype, unit->n, unit->kv_head, keys->first_key, keys->keys, p->dim);
}

static void run_unit(void *arg, int64_t index, int32_t lane) {
    const backward_job *job = arg;
    const backward_plan *plan = &job->plan;
    char *memory = job->units + (size_t)lane * plan->own_bytes;
    backward_unit unit = find_unit(job, index, memory, false);
    char *scratch = lane_scratch(job, lane);
    rapt_soon soon;
    soon.count = 0;
    want_unit(job, index + job->lane_count, memory, &soon); /* the lanes take turns, more or less */
    bool has_odd_lse = false;
    for (int64_t b = 0; b < plan->row_blocks; b++) {
        prepare_rows(job, &unit, b, lane);
        unit.rows[b].rows.soon = &soon;
        has_odd_lse |= unit.rows[b].has_odd_lse;
    }
    if (has_odd_lse) {
        for (int64_t k = 0; k < unit.key_blocks; k++) {
            const attn_key_block *keys = prepare_keys(job, &unit, k, 0, lane);
            for (int64_t b = 0; b < plan->row_blocks; b++)
                job->kernels->backward_odd_rows(&unit.rows[b], keys, scratch);
        }
        for (int64_t b = 0; b < plan->row_blocks; b++) job->kernels->backward_settle_odd_rows(&unit.rows[b]);
    }
    for (int64_t k = 0; k < unit.key_blocks && job->gradients->weights.data != NULL; k++) {
        const attn_key_block *keys = prepare_keys(job, &unit, k, 0, lane);
        for (int64_t b = 0; b < plan->row_blocks; b++) {
            job->kernels->backward_delta(&unit.rows[b], keys, job->gradients, scratch);
        }
    }
    for (int64_t k = 0; k < unit.key_blocks; k++) {
        attn_key_block *keys = prepare_keys(job, &unit, k, 0, lane);
        want_keys(job, &unit, &keys->keys, &soon);
        for (int64_t b = 0; b < plan->row_blocks; b++) {
            job->kernels->backward_tile(&unit.rows[b], keys, job->gradients, scratch);
        }
        finish_keys(job, &unit, keys, lane);
    }
    for (int64_t b = 0; b < plan->row_blocks; b++) finish_rows(job, &unit.rows[b], lane);
    clear_hidden_keys(job, &unit);
}

/* ---- units that lanes share ---- */

static void prepare_shared(void *arg, int64_t item, int32_t lane) {
    const backward_job *job = arg;
    int64_t blocks = job->plan.row_blocks + job->plan.key_blocks, b = item % blocks;
    const backward_unit *unit = &job->shared[item / blocks];
    if (b < job->plan.row_blocks) {
        prepare_rows(job, unit, b, lane);
    } else if (b - job->plan.row_blocks < unit->key_blocks) {
        prepare_keys(job, unit, b - job->plan.row_blocks, b - job->plan.row_blocks, lane);
    }
}

/* What of a row block must be known before its first tile. */
static void complete_shared_rows(void *arg, int64_t item, int32_t lane) {
    const backward_job *job = arg;
    const backward_unit *unit = &job->shared[item / job->plan.row_blocks];
    attn_row_block *rows = &unit->rows[item % job->plan.row_blocks];
    for (int64_t k = 0; k < unit->key_blocks && rows->has_odd_lse; k++) {
        job->kernels->backward_odd_rows(rows, &unit->keys[k], lane_scratch(job, lane));
    }
    job->kernels->backward_settle_odd_rows(rows);
    for (int64_t k = 0; k < unit->key_blocks && job->gradients->weights.data != NULL; k++) {
        job->kernels->backward_delta(rows, &unit->keys[k], job->gradients, lane_scratch(job, lane));
    }
}

static void shared_tile(void *arg, int64_t item, int32_t lane) {
    const backward_job *job = arg;
    const backward_unit *unit = &job->shared[item / job->block_count];
    int64_t b = job->first_block + item % job->block_count, k = job->wave - b;
    if (k >= unit->key_blocks) return;
    job->kernels->backward_tile(&unit->rows[b], &unit->keys[k], job->gradients, lane_scratch(job, lane));
}

static void finish_shared(void *arg, int64_t item, int32_t lane) {
    const backward_job *job = arg;
    int64_t blocks = job->plan.row_blocks + job->plan.key_blocks, b = item % blocks;
    const backward_unit *unit = &job->shared[item / blocks];
    if (b < job->plan.row_blocks) {
        finish_rows(job, &unit->rows[b], lane);
    } else if (b - job->plan.row_blocks < unit->key_blocks) {
        finish_keys(job, unit, &unit->keys[b - job->plan.row_blocks], lane);
    }
    if (b == 0) clear_hidden_keys(job, unit);
}

static void run_shared_units(rapt_context *context, backward_job *job, double operations) {
    const backward_plan *plan = &job->plan;
    int64_t blocks = plan->row_blocks + plan->key_blocks, count = plan->shared_units;
    for (int64_t u = 0; u < count; u++) {
        char *memory = job->units + (size_t)u * plan->shared_bytes;
        job->shared[u] = find_unit(job, plan->units - count + u, memory, true);
    }
    double packing = operations / (double)CHAIN, tiles = operations / (double)blocks;
    rapt_parallel(context, count * blocks, packing, prepare_shared, job);
    bool has_d_weights = job->gradients->weights.data != NULL;
    rapt_parallel(context, count * plan->row_blocks, has_d_weights ? operations : packing, complete_shared_rows, job);
    for (job->wave = 0; job->wave < blocks - 1; job->wave++) {
        job->first_block = job->wave < plan->key_blocks ? 0 : job->wave - plan->key_blocks + 1;
        job->block_count = smaller(job->wave + 1, plan->row_blocks) - job->first_block;
        rapt_parallel(context, count * job->block_count, tiles, shared_tile, job);
    }
    rapt_parallel(context, count * blocks, packing, finish_shared, job);
}

/* ---- gradients of masks ---- */

/* One item: a block of 64 keys for up to 64 queries (or all, if they are summed) of one of the mask's (n, h). It goes
 * over what is summed in the order n, h, query. */
static void run_mask(void *arg, int64_t item, int32_t lane) {
    const backward_job *job = arg;
    const attn_problem *p = job->problem;
    const backward_plan *plan = &job->plan;
    const mask_gradient *mask = job->mask;
    int64_t key_blocks = divide_up(p->keys, CHAIN), all_row_blocks = divide_up(p->queries, CHAIN);
    bool sums_rows = mask->size[2] == 1;
    int64_t row_blocks = sums_rows ? 1 : all_row_blocks, key_block = item % key_blocks;
    int64_t block = item / key_blocks % row_blocks, head = item / key_blocks / row_blocks % mask->size[1];
    int64_t sequence = item / key_blocks / row_blocks / mask->size[1];
    char *scratch = lane_scratch(job, lane), *memory = scratch + plan->lane_bytes - plan->row_bytes - plan->key_bytes;
    char *sums = memory - plan->real * CHAIN * PANEL;
    memset(sums, 0, plan->real * CHAIN * PANEL);
    attn_keys keys = {.first_key = key_block * CHAIN, .keys = smaller(CHAIN, p->keys - key_block * CHAIN)};
    int64_t n_end = mask->size[0] == 1 ? p->batch : sequence + 1, h_end = mask->size[1] == 1 ? p->heads : head + 1;
    int64_t b_end = sums_rows ? all_row_blocks : block + 1;
    for (int64_t n = mask->size[0] == 1 ? 0 : sequence; n < n_end; n++) {
        for (int64_t h = mask->size[1] == 1 ? 0 : head; h < h_end; h++) {
            attn_key_block key = key_block_at(plan, memory + plan->row_bytes, keys);
            bool has_keys = false;
            for (int64_t b = sums_rows ? 0 : block; b < b_end; b++) {
                int64_t last = smaller(p->queries, (b + 1) * CHAIN) - 1, low, high, unused;
                rapt_visible_keys(p, n, b * CHAIN, &low, &unused); /* both ends grow with the query */
                rapt_visible_keys(p, n, last, &unused, &high);
                if (low >= keys.first_key + keys.keys || high <= keys.first_key) continue;
                if (!has_keys) job->kernels->backward_keys(p, n, h / plan->group, &key, scratch);
                has_keys = true;
                attn_rows some = {.problem = p,
                                  .n = n,
                                  .kv_head = h / plan->group,
                                  .first_head = h,
                                  .heads = 1,
                                  .first = b * CHAIN,
                                  .count = smaller(CHAIN, p->queries - b * CHAIN)};
                attn_row_block rows = row_block_at(plan, memory, some);
                job->kernels->backward_rows(job->gradients, &rows, scratch);
                void *stats[ROW_STATS] = {rows.reference, rows.factor, rows.delta};
                for (int i = 0; i < ROW_STATS; i++) {
                    memcpy(stats[i], stats_at(job, i, n, h, b * CHAIN), plan->real * (size_t)some.count);
                }
                job->kernels->backward_mask(&rows, &key, job->gradients, sums_rows, sums, scratch);
            }
        }
    }
    int64_t element = (int64_t)rapt_dtype_size(mask->dtype),
            row_count = sums_rows ? 1 : smaller(CHAIN, p->queries - block * CHAIN);
    rapt_dtype real = rapt_accumulation_dtype(p->dtype);
    for (int64_t r = 0; r < row_count; r++) {
        int64_t query = sums_rows ? 0 : block * CHAIN + r;
        char *to = (char *)mask->data + element * (sequence * mask->stride[0] + head * mask->stride[1] +
                                                   query * mask->stride[2] + keys.first_key * mask->stride[3]);
        for (int64_t c = 0; c < keys.keys; c++) {
            double value = rapt_load(sums, real, r * PANEL + c) + 0.0;
            if (job->gradients->accumulate) value += rapt_load(to, mask->dtype, c * mask->stride[3]);
            rapt_store(to, mask->dtype, c * mask->stride[3], value);
        }
    }
}

static void run_masks(rapt_context *context, backward_job *job, double operations) {
    const attn_problem *p = job->problem;
    const mask_gradient *masks[2] = {&job->gradients->mask, &job->gradients->padding};
    for (int i = 0; i < 2; i++) {
        job->mask = masks[i];
        if (job->mask->data == NULL) continue;
        int64_t row_blocks = job->mask->size[2] == 1 ? 1 : divide_up(p->queries, CHAIN);
        int64_t items = job->mask->size[0] * job->mask->size[1] * row_blocks * divide_up(p->keys, CHAIN);
        rapt_parallel(context, items, operations, run_mask, job);
    }
}

/* ---- all ---- */

void rapt_cpu_attn_backward(rapt_context *context, const attn_problem *p, const attn_gradients *gradients,
                            void *scratch) {
    backward_job job = {.kernels = context->kernels[p->dtype == RAPT_F64],
                        .lane_count = context->lanes,
                        .problem = p,
                        .gradients = gradients,
                        .plan = make_plan(context, p, gradients)};
    const backward_plan *plan = &job.plan;
    job.lanes = scratch;
    job.stats = job.lanes + plan->lane_bytes * (size_t)context->lanes;
    job.shared = (backward_unit *)(void *)(job.stats + plan->stats_bytes);
    job.units = (char *)job.shared + rapt_arena_size(sizeof(backward_unit) * (size_t)context->lanes);

    double unit_operations = 5.0 * (double)plan->rows * (double)p->keys * (double)(p->dim + p->value_dim) / 2;
    int64_t own = plan->units - plan->shared_units;
    rapt_parallel(context, own, unit_operations * (double)own, run_unit, &job);
    if (plan->shared_units > 0) run_shared_units(context, &job, unit_operations * (double)plan->shared_units);
    run_masks(context, &job, unit_operations * (double)plan->units);
}
