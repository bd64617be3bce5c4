/* attn_cpu.c - attention on the CPU: cut into tiles, hand them to the lanes
 *
 * A unit is one (sequence, key/value head). Units are taken in waves that fit a memory budget; in each wave
 *
 *     1. tiles of rows (queries of the unit's group of heads) run over the unit's cuts of 256 keys and merge them in
 *        order; where there are few tiles, their cuts are computed apart, and merged in the same order by who is last;
 *     2. if weights are asked for, rows are scored again with the finished sums, heads ascending.
 *
 * The first tile that needs a cut packs its keys and values for all; one that comes while that is going on packs them for
 * itself alone, in its lane's scratch, so nobody waits. So does the only tile of a unit.
 *
 * Cuts are counted from the first real key of a sequence. Everything else here (waves, tiles, lanes) changes speed and
 * memory and never a bit.
 */
#include "../cache.h"
#include "cpu.h"

#include <math.h>

#define FEW_ROWS 72           /* of a unit are one tile */
#define LEAST_TILE_ROWS 48    /* of the others */
#define MOST_TILE_ROWS 256    /* of any */
#define ROWS_TOGETHER 6       /* that kernels like to take */
#define TILES_OF_A_LANE 8     /* so many that all lanes end at much the same time */
#define PIECES_OF_A_LANE 16   /* likewise, of tiles that are split */
#define DECODED_ROWS 8        /* of a unit: a token, or few */
#define ROWS_TO_LOOK_AHEAD 32 /* of a tile: with fewer it takes longer than it saves */
#define WEIGHTS_ROWS 48       /* whole rows of weights that a lane holds */
#define FAR_BYTES ((size_t)16 << 20)
#define WAVE_BYTES_PER_LANE ((size_t)4 << 20)

/* ---- which keys are seen ---- */

void rapt_visible_keys(const attn_problem *p, int64_t n, int64_t i, int64_t *low, int64_t *high) {
    int64_t begin = p->key_start != NULL ? p->key_start[n] : 0;
    int64_t end = p->key_lengths != NULL ? begin + p->key_lengths[n] : p->keys;
    __int128 position = (__int128)i + (p->offsets != NULL ? p->offsets[n] : p->offset); /* any caller's int64 */
    __int128 band_low = position - p->left, band_high = position + p->right + 1;
    if (p->limit_left && band_low > begin) begin = band_low > p->keys ? p->keys : (int64_t)band_low;
    if (p->limit_right && band_high < end) end = band_high < 0 ? 0 : (int64_t)band_high;
    *low = begin;
    *high = end;
}

static bool is_masked(const attn_mask *mask, int64_t offset) {
    if (mask->data == NULL) return false;
    if (mask->dtype == RAPT_BOOL) return ((const uint8_t *)mask->data)[offset] != 0;
    return rapt_load(mask->data, mask->dtype, offset) == -HUGE_VAL;
}

static bool is_padding(const attn_problem *p, int64_t n, int64_t j) {
    return is_masked(&p->padding, n * p->padding.stride[0] + j * p->padding.stride[3]);
}

void rapt_real_keys(const attn_problem *p, int64_t n, int64_t *begin, int64_t *end) {
    *begin = p->key_start != NULL ? p->key_start[n] : 0;
    *end = p->key_lengths != NULL ? *begin + p->key_lengths[n] : p->keys;
    while (*begin < *end && is_padding(p, n, *begin)) ++*begin;
    while (*end > *begin && is_padding(p, n, *end - 1)) --*end;
}

int64_t rapt_sole_key(const attn_problem *p, int64_t n, int64_t head, int64_t i, int64_t first) {
    if (p->extra_keys > 1) return -1;
    int64_t sole = p->extra_keys == 1 ? p->keys : -1, seen = p->extra_keys, low, high;
    rapt_visible_keys(p, n, i, &low, &high);
    int64_t row = n * p->mask.stride[0] + head * p->mask.stride[1] + i * p->mask.stride[2];
    for (int64_t j = low > first ? low : first; j < high && seen < 2; j++) {
        if (is_masked(&p->mask, row + j * p->mask.stride[3]) || is_padding(p, n, j)) continue;
        sole = j;
        seen++;
    }
    return seen == 1 ? sole : -1;
}

/* ---- the plan: sizes that follow from the problem ---- */

typedef struct attn_plan {
    int64_t group, rows_per_unit, units;
    int64_t tile_rows, tiles_per_unit; /* tile_rows: at most */
    int64_t row_step;     /* rows that tiles consist of, as many of these in one as in another, or one more */
    int64_t room_rows;    /* what memory is laid out for: at least tile_rows, and no larger for a smaller problem */
    int64_t out_stride;   /* Dv rounded up */
    int64_t max_cuts;     /* of a unit, without the extra keys */
    int64_t slots;        /* with them, which are a cut of their own */
    int64_t cut_capacity; /* keys that a cut has room for */
    int64_t wave_units;
    bool split;                                  /* spread the cuts of a tile over lanes: */
    int64_t pieces, piece_cuts;                  /* so many pieces, of so many cuts each */
    bool in_place;                               /* keys and values are read where they lie */
    bool v_in_place;                             /* values at least */
    bool is_far;                                 /* all keys and values together hardly fit a cache */
    bool masks_some;                             /* of the keys of a unit may be masked for a row */
    bool streams;                                /* a tile packs its cuts itself */
    size_t real;                                 /* bytes of one */
    size_t cut_bytes, extra_bytes, unit_bytes;   /* packed keys and values */
    size_t lane_bytes, lane_keys, weights_bytes; /* scratch of a lane; lane_keys: where it packs a cut */
    size_t partial_bytes;                        /* of a tile in progress */
    int64_t split_rows;                          /* the most of a (tile, cut) that is computed apart */
    size_t split_bytes, partials_bytes;          /* one of those, and all */
    size_t left_bytes;                           /* the numbers of a tile's pieces that are not computed yet */
    size_t stats_bytes, average_bytes;           /* for returned weights */
    size_t table_bytes;                          /* attn_unit, attn_keys and their states */
} attn_plan;

typedef struct attn_unit {
    int64_t n, kv_head;
    int64_t first_key, end;  /* real keys, without the padding at both ends; cuts are counted from first_key */
    int64_t first_cut, cuts; /* that any row sees */
    attn_keys *keys;         /* [cuts], then one for extra keys */
    atomic_int *state;       /* of each of them */
} attn_unit;

enum { UNPACKED, BEING_PACKED, PACKED };

static size_t smaller_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t product_of(int64_t a, int64_t b) { return rapt_size_mul((size_t)a, (size_t)b); }

static size_t partial_size(const attn_plan *plan, int64_t rows) {
    return rapt_arena_size(rapt_size_mul(plan->real, product_of(rows, plan->out_stride + 2)));
}

/* Decoding: a few rows of one query that see every key of a range, so that nothing of it must be kept from any of them,
 * over keys and values that lie as the kernels want them. */
static bool reads_in_place(const attn_problem *p, int64_t rows) {
    bool plain = p->mask.data == NULL && p->padding.data == NULL && !p->limit_left && p->queries == 1;
    bool real = p->dtype == rapt_accumulation_dtype(p->dtype) && p->k.stride[3] == 1 && p->v.stride[3] == 1;
    return plain && real && rows <= IN_PLACE_ROWS && p->dim % COLUMNS == 0 && p->value_dim % COLUMNS == 0;
}

/* Values that already lie as a panel of them would; wider ones lose more to the caches' sets than packing costs. So do many
 * rows where vectors of values lie in two lines each, as they do in memory from malloc. */
static bool reads_values_in_place(const attn_problem *p, int64_t rows) {
    if (p->dtype != rapt_accumulation_dtype(p->dtype) || p->cache != NULL || p->v.stride[3] != 1) return false;
    if (p->v.stride[2] != p->value_dim || p->value_dim > PANEL || p->value_dim % COLUMNS != 0) return false;
    uintptr_t line = RAPT_LINE_BYTES, heads = (uintptr_t)(p->v.stride[0] | p->v.stride[1]);
    bool in_lines = ((uintptr_t)p->v.data | heads * rapt_dtype_size(p->dtype)) % line == 0;
    return in_lines || rows <= FEW_ROWS;
}

/* The more rows a tile has, the less often keys come from a far cache, and a unit's only tile packs them for itself alone;
 * but there must be enough tiles for all lanes. */
static int64_t choose_tile_rows(const rapt_context *context, const attn_problem *p, int64_t rows, int64_t units) {
    if (context->tile_rows > 0) return smaller(context->tile_rows, rows);
    if (rows <= FEW_ROWS) return rows;
    int64_t enough = context->lanes > 1 ? TILES_OF_A_LANE * (int64_t)context->lanes : 1;
    int64_t many = p->limit_left || p->limit_right ? 128 : 192; /* fewer where rows see different keys */
    const int64_t sizes[] = {rows <= MOST_TILE_ROWS ? rows : many, 96};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (units * divide_up(rows, sizes[i]) >= enough) return smaller(sizes[i], rows);
    }
    return LEAST_TILE_ROWS;
}

/* Tiles are split where there are fewer than lanes. Those of decoded tokens are, too, where there are less than two for each
 * lane: they are long stretches of memory, and while some lanes take a second one the others would wait. Room for it is
 * kept even by a call that does not split, so that a smaller one after it has it. */
static void plan_split(const rapt_context *context, const attn_problem *p, attn_plan *plan) {
    int64_t tiles = plan->units * plan->tiles_per_unit, rows = p->batch * p->heads * p->queries, lanes = context->lanes;
    bool is_decoded = plan->rows_per_unit <= DECODED_ROWS && lanes > 1;
    int64_t few = lanes - 1, few_decoded = lanes > 1 ? 2 * lanes - 1 : 0;
    int64_t few_rows = smaller(plan->room_rows, FEW_ROWS); /* tiles that are so few are small */
    int64_t decoded_rows = smaller(plan->room_rows, DECODED_ROWS);
    plan->split = plan->max_cuts > 1 && tiles <= (is_decoded ? few_decoded : few) && context->split_keys >= 0;
    if (context->split_keys > 0) {
        plan->split = true;
        few = few_decoded = rows =
            plan->wave_units * divide_up(plan->rows_per_unit, smaller(plan->tile_rows, LEAST_TILE_ROWS));
    }
    if (context->split_keys > 0 || context->tile_rows > 0) few_rows = decoded_rows = plan->room_rows;
    plan->split_rows = is_decoded ? decoded_rows : few_rows;
    plan->split_bytes = partial_size(plan, plan->split_rows);
    int64_t enough = tiles > 0 ? divide_up(PIECES_OF_A_LANE * lanes, tiles) : 1;
    plan->piece_cuts = plan->slots > enough ? divide_up(plan->slots, enough) : 1;
    plan->pieces = plan->slots > 1 ? divide_up(plan->slots, plan->piece_cuts) : 1;
    if (plan->max_cuts <= 1 && context->split_keys <= 0) return;
    size_t some = rapt_size_mul(partial_size(plan, few_rows), (size_t)smaller(few, rows));
    size_t decoded = rapt_size_mul(partial_size(plan, decoded_rows), (size_t)smaller(few_decoded, rows));
    plan->partials_bytes = rapt_size_mul(some > decoded ? some : decoded, (size_t)plan->slots);
    plan->left_bytes = rapt_arena_size(sizeof(atomic_int) * (size_t)smaller(few_decoded, rows));
}

static void make_plan(const rapt_context *context, const attn_problem *p, attn_plan *plan) {
    *plan = (attn_plan){.group = p->heads / p->kv_heads, .units = p->batch * p->kv_heads};
    plan->real = rapt_accumulation_size(p->dtype);
    plan->rows_per_unit = p->queries * plan->group;
    int64_t most_rows = context->tile_rows > 0 ? context->tile_rows : MOST_TILE_ROWS;
    plan->tile_rows = choose_tile_rows(context, p, plan->rows_per_unit, plan->units);
    plan->room_rows = smaller(most_rows, p->queries * p->heads); /* a unit has more rows where KV heads are fewer */
    plan->tiles_per_unit = divide_up(plan->rows_per_unit, plan->tile_rows);
    /* Under a band all but the last are whole, so that rows begin where panels of keys do. */
    bool is_banded = p->limit_left || p->limit_right;
    plan->row_step = plan->tile_rows % ROWS_TOGETHER == 0 && !is_banded ? ROWS_TOGETHER : plan->tile_rows;
    plan->out_stride = rapt_round_up(p->value_dim, COLUMNS);
    plan->max_cuts = divide_up(p->keys, CUT);
    if (p->cache != NULL) plan->max_cuts = smaller(plan->max_cuts, p->cache->blocks + 1); /* a ring keeps no more */
    plan->slots = plan->max_cuts + (p->extra_keys > 0);
    plan->cut_capacity = smaller(CUT, rapt_round_up(p->keys, PANEL));

    size_t key_bytes = rapt_size_mul(plan->real, (size_t)(p->dim + plan->out_stride));
    plan->cut_bytes = rapt_arena_size(rapt_size_mul(key_bytes, (size_t)plan->cut_capacity));
    plan->extra_bytes = p->extra_keys > 0 ? rapt_arena_size(rapt_size_mul(key_bytes, PANEL)) : 0;
    plan->unit_bytes = rapt_size_add(rapt_size_mul(plan->cut_bytes, (size_t)plan->max_cuts), plan->extra_bytes);

    size_t budget = rapt_size_mul(WAVE_BYTES_PER_LANE, (size_t)context->lanes);
    plan->streams = plan->tiles_per_unit == 1 || p->cache != NULL; /* a cache is packed already */
    plan->in_place = plan->streams && p->cache == NULL && reads_in_place(p, plan->rows_per_unit);
    plan->is_far = rapt_size_mul(key_bytes, product_of(plan->units, p->keys)) > FAR_BYTES;
    plan->masks_some = p->mask.data != NULL || p->padding.data != NULL || p->limit_left || p->limit_right;
    plan->v_in_place = reads_values_in_place(p, plan->rows_per_unit);
    plan->wave_units = plan->units;
    if (!plan->streams && rapt_size_mul(plan->unit_bytes, (size_t)plan->units) > budget) {
        plan->wave_units = plan->unit_bytes > budget ? 1 : (int64_t)(budget / plan->unit_bytes);
    }
    /* For all units, which is more than one wave needs, but never less than what a smaller problem needs. */
    size_t cut_table = rapt_size_mul(sizeof(attn_keys) + sizeof(atomic_int), (size_t)plan->max_cuts + 1);
    if (plan->streams && (p->cache != NULL || plan->room_rows <= FEW_ROWS))
        cut_table = 0; /* as for all that are smaller */
    size_t unit_table = rapt_size_add(sizeof(attn_unit), cut_table);
    plan->table_bytes = rapt_arena_size(rapt_size_mul(unit_table, (size_t)plan->units));

    /* A lane: a partial and a total, scores and biases [rows + 2][CUT], q [rows][D]; then room to pack a cut; for weights
     * also whole rows of them. */
    size_t q_and_scores = rapt_size_mul(plan->real, product_of(plan->room_rows + 2, p->dim + CUT));
    plan->partial_bytes = partial_size(plan, plan->room_rows);
    plan->lane_keys = rapt_arena_size(rapt_size_add(q_and_scores, rapt_size_mul(2, plan->partial_bytes)));
    size_t cut = plan->cut_bytes > plan->extra_bytes ? plan->cut_bytes : plan->extra_bytes;
    plan->lane_bytes = rapt_size_add(plan->lane_keys, cut);
    if (p->weights.data != NULL) {
        int64_t columns = p->keys + p->extra_keys;
        plan->weights_bytes =
            rapt_arena_size(rapt_size_mul(plan->real, product_of(smaller(plan->room_rows, WEIGHTS_ROWS), columns)));
        plan->stats_bytes = rapt_arena_size(rapt_size_mul(2 * plan->real, product_of(p->batch * p->heads, p->queries)));
        if (p->average_weights && rapt_dtype_size(p->dtype) < plan->real) {
            size_t rows = product_of(p->batch, p->queries);
            plan->average_bytes = rapt_arena_size(rapt_size_mul(rapt_size_mul(plan->real, rows), (size_t)columns));
        }
    }

    plan_split(context, p, plan);
}

static size_t attn_scratch(const rapt_context *context, const attn_problem *p) {
    attn_plan plan;
    make_plan(context, p, &plan);
    size_t budget = rapt_size_mul(WAVE_BYTES_PER_LANE, (size_t)context->lanes);
    /* The wave's memory must not be smaller for a larger problem, so it is the budget once that is reached. */
    size_t all_units = rapt_size_mul(plan.unit_bytes, (size_t)plan.units);
    size_t total = smaller_size(all_units, plan.unit_bytes > budget ? plan.unit_bytes : budget);
    total = rapt_size_add(rapt_arena_size(total), plan.table_bytes);
    total =
        rapt_size_add(total, rapt_size_mul(rapt_size_add(plan.lane_bytes, plan.weights_bytes), (size_t)context->lanes));
    total = rapt_size_add(total, rapt_size_add(plan.left_bytes, plan.partials_bytes));
    return rapt_size_add(total, rapt_size_add(plan.stats_bytes, plan.average_bytes));
}

/* ---- a wave ---- */

typedef struct attn_job {
    const rapt_cpu_kernels *kernels;
    const attn_problem *problem;
    attn_plan plan;
    attn_unit *units; /* of this wave */
    int64_t unit_count, lane_count;
    char *packed, *lanes, *partials;
    atomic_int *left;                  /* [tiles], if they are split: pieces that are not computed yet */
    char *reference_stats, *sum_stats; /* [N, H, L] */
    void *average;
} attn_job;

/* `previous` is the unit before, whose sequence it may share, or NULL: padding is searched once for each sequence. */
static void find_unit(const attn_job *job, int64_t index, const attn_unit *previous, attn_unit *unit) {
    const attn_problem *p = job->problem;
    unit->n = index / p->kv_heads;
    unit->kv_head = index % p->kv_heads;
    if (previous != NULL && previous->n == unit->n) {
        unit->first_key = previous->first_key;
        unit->end = previous->end;
        unit->first_cut = previous->first_cut;
        unit->cuts = previous->cuts;
        return;
    }
    int64_t begin, end;
    rapt_real_keys(p, unit->n, &begin, &end);
    unit->first_key = begin;
    unit->end = end;
    int64_t low, high, unused;
    rapt_visible_keys(p, unit->n, 0, &low, &unused); /* both ends of the band grow with the query */
    rapt_visible_keys(p, unit->n, p->queries - 1, &unused, &high);
    if (low < begin) low = begin;
    if (high > end) high = end;
    if (job->plan.in_place && high < end) unit->end = high > begin ? high : begin; /* the one query sees no further */
    unit->first_cut = (low - begin) / CUT;
    unit->cuts = low < high ? divide_up(high - begin, CUT) - unit->first_cut : 0;
}

static int64_t cuts_with_extra(const attn_job *job, const attn_unit *unit) {
    return unit->cuts + (job->problem->extra_keys > 0);
}

/* Packs one cut of a unit (the last one is the extra keys) into memory. */
static void pack_keys(const attn_job *job, const attn_unit *unit, int64_t cut, char *packed, attn_keys *keys) {
    const attn_problem *p = job->problem;
    const attn_plan *plan = &job->plan;
    keys->extra = cut == unit->cuts;
    keys->first_key = keys->extra ? p->keys : unit->first_key + (unit->first_cut + cut) * CUT;
    keys->keys = keys->extra ? p->extra_keys : smaller(CUT, unit->end - keys->first_key);
    keys->capacity = keys->extra ? PANEL : plan->cut_capacity;
    keys->dtype = rapt_accumulation_dtype(p->dtype);
    keys->k_in_place = keys->v_in_place = keys->has_non_finite_values = false;
    keys->is_far = plan->is_far;
    if (p->cache != NULL && !keys->extra) {
        const rapt_cache *cache = p->cache;
        int64_t at = unit->first_cut + cut, block = rapt_cache_block_index(cache, unit->n, unit->kv_head, at);
        keys->capacity = CUT;
        keys->dtype = cache->config.dtype;
        keys->k = rapt_cache_block(cache, unit->n, unit->kv_head, at);
        keys->v = (const char *)keys->k + cache->value_offset;
        keys->widened = packed;
        keys->has_non_finite_values = cache->non_finite[block] != 0;
        return;
    }
    keys->k = packed;
    const rapt_view *k = keys->extra ? &p->extra_k : &p->k, *v = keys->extra ? &p->extra_v : &p->v;
    int64_t first = keys->extra ? 0 : keys->first_key, element = (int64_t)rapt_dtype_size(p->dtype);
    const char *k_rows =
        k->data + element * (unit->n * k->stride[0] + unit->kv_head * k->stride[1] + first * k->stride[2]);
    const char *v_rows =
        v->data + element * (unit->n * v->stride[0] + unit->kv_head * v->stride[1] + first * v->stride[2]);
    keys->k_stride = k->stride[2];
    keys->v_stride = v->stride[2];
    keys->k_in_place = plan->in_place && !keys->extra;
    keys->v_in_place = (plan->in_place || plan->v_in_place) && !keys->extra;
    if (keys->v_in_place) {
        keys->v = v_rows;
        if (plan->masks_some && !plan->in_place) { /* else it does not matter */
            keys->has_non_finite_values = !job->kernels->all_finite(v_rows, keys->keys, p->value_dim, v->stride[2]);
        }
    } else {
        char *values = packed + plan->real * (size_t)(keys->capacity * p->dim);
        for (int64_t d = 0; d < p->value_dim; d += PANEL) {
            int64_t width = smaller(PANEL, plan->out_stride - d);
            keys->has_non_finite_values |= !job->kernels->pack_rows(
                values + plan->real * (size_t)(d * keys->capacity), width, v_rows + element * d * v->stride[3],
                p->dtype, keys->keys, smaller(PANEL, p->value_dim - d), v->stride[2], v->stride[3]);
        }
        keys->v = values;
    }
    if (keys->k_in_place) {
        keys->k = k_rows;
        return;
    }
    for (int64_t j = 0; j < keys->keys; j += PANEL) {
        int64_t count = smaller(PANEL, keys->keys - j);
        job->kernels->pack_columns(packed + plan->real * (size_t)(j * p->dim), PANEL,
                                   k_rows + element * j * k->stride[2], p->dtype, count, p->dim, k->stride[2],
                                   k->stride[3]);
    }
}

/* ---- tiles ---- */

typedef struct lane_scratch {
    void *q, *scores;
    attn_partial partial, total;
    char *packed; /* a cut, where tiles pack their own */
    attn_keys keys;
    void *weights;
} lane_scratch;

static attn_partial partial_at(const attn_plan *plan, int64_t rows, char *memory) {
    size_t row_reals = plan->real * (size_t)rows;
    size_t out_bytes = row_reals * (size_t)plan->out_stride;
    return (attn_partial){.out = memory,
                          .reference = memory + out_bytes,
                          .sum = memory + out_bytes + row_reals,
                          .out_stride = plan->out_stride};
}

/* All but keys, which is filled in for each cut. */
static void lay_out_scratch(const attn_job *job, int32_t lane, lane_scratch *scratch) {
    const attn_plan *plan = &job->plan;
    char *memory = job->lanes + (size_t)lane * (plan->lane_bytes + plan->weights_bytes);
    scratch->partial = partial_at(plan, plan->room_rows, memory);
    scratch->total = partial_at(plan, plan->room_rows, memory + plan->partial_bytes);
    scratch->scores = memory + 2 * plan->partial_bytes;
    scratch->q = (char *)scratch->scores + plan->real * (size_t)((plan->room_rows + 2) * CUT);
    scratch->packed = memory + plan->lane_keys;
    scratch->weights = memory + plan->lane_bytes;
}

static const attn_keys *keys_of_cut(const attn_job *job, const attn_unit *unit, int64_t cut, lane_scratch *scratch) {
    if (!job->plan.streams) {
        atomic_int *state = &unit->state[cut];
        int found = UNPACKED;
        if (atomic_load_explicit(state, memory_order_acquire) == PACKED) return &unit->keys[cut];
        if (atomic_compare_exchange_strong(state, &found, BEING_PACKED)) {
            size_t offset = (size_t)(unit - job->units) * job->plan.unit_bytes + (size_t)cut * job->plan.cut_bytes;
            pack_keys(job, unit, cut, job->packed + offset, &unit->keys[cut]);
            atomic_store_explicit(state, PACKED, memory_order_release);
        }
        if (found != BEING_PACKED) return &unit->keys[cut];
    }
    pack_keys(job, unit, cut, scratch->packed, &scratch->keys);
    return &scratch->keys;
}

/* The first row of a tile, counted from the unit's first rows on; of the one behind the last, the number of rows. */
static int64_t tile_begin(const attn_plan *plan, int64_t tile) {
    int64_t steps = divide_up(plan->rows_per_unit, plan->row_step);
    return smaller(plan->row_step * (steps * tile / plan->tiles_per_unit), plan->rows_per_unit);
}

/* Late rows see more keys under a causal band: they go first, so that no long tile is left for the end. */
static attn_rows tile_rows(const attn_job *job, const attn_unit *unit, int64_t tile) {
    const attn_plan *plan = &job->plan;
    int64_t place = plan->tiles_per_unit - 1 - tile, first = tile_begin(plan, place);
    return (attn_rows){.problem = job->problem,
                       .n = unit->n,
                       .kv_head = unit->kv_head,
                       .first_head = unit->kv_head * plan->group,
                       .heads = plan->group,
                       .first = first,
                       .count = tile_begin(plan, place + 1) - first};
}

static void finish_tile(const attn_job *job, const attn_rows *rows, const attn_partial *total) {
    const attn_problem *p = job->problem;
    if (job->plan.stats_bytes > 0) {
        size_t real = job->plan.real;
        for (int64_t r = 0; r < rows->count; r++) {
            int64_t row = rows->first + r, head = rows->first_head + row % rows->heads, query = row / rows->heads;
            size_t at = real * (size_t)((rows->n * p->heads + head) * p->queries + query);
            memcpy(job->reference_stats + at, (char *)total->reference + real * (size_t)r, real);
            memcpy(job->sum_stats + at, (char *)total->sum + real * (size_t)r, real);
        }
    }
    job->kernels->attn_finish(rows, total);
}

/* Rows of queries, or of what has their shape. */
static void want_rows(rapt_soon *soon, const attn_rows *rows, const rapt_view *view, int64_t dim) {
    for (int64_t h = 0; h < rows->heads; h++) {
        rapt_want_soon(soon, view, rows->problem->dtype, rows->n, rows->first_head + h, rows->first / rows->heads,
                       rows->count / rows->heads, dim);
    }
}

static void want_keys(const attn_job *job, const attn_unit *unit, int64_t cut, rapt_soon *soon) {
    const attn_problem *p = job->problem;
    if (p->cache != NULL || cut >= unit->cuts) return;
    int64_t first = unit->first_key + (unit->first_cut + cut) * CUT, count = smaller(CUT, unit->end - first);
    rapt_want_soon(soon, &p->v, p->dtype, unit->n, unit->kv_head, first, count, p->value_dim);
    rapt_want_soon(soon, &p->k, p->dtype, unit->n, unit->kv_head, first, count, p->dim);
}

/* As many units at a time as there are lanes, and of these one tile after the other: so every lane begins with a unit of
 * its own, and packs it. */
static const attn_unit *unit_of_item(const attn_job *job, int64_t item, int64_t *tile) {
    int64_t tiles = job->plan.tiles_per_unit, first = item / (job->lane_count * tiles) * job->lane_count;
    int64_t together = smaller(job->lane_count, job->unit_count - first), place = item - first * tiles;
    *tile = place / together;
    return &job->units[first + place % together];
}

/* Where this tile will write, and what the lane's next one will read: the lanes take turns, more or less. */
static void look_ahead(const attn_job *job, int64_t item, const attn_rows *rows, rapt_soon *soon) {
    const attn_problem *p = job->problem;
    int64_t next = item + job->lane_count, tile;
    if (next < job->unit_count * job->plan.tiles_per_unit) {
        const attn_unit *unit = unit_of_item(job, next, &tile);
        attn_rows then = tile_rows(job, unit, tile);
        if (tile == 0) want_keys(job, unit, 0, soon); /* the first tile of a unit packs them */
        want_rows(soon, &then, &p->q, p->dim);
    }
    want_rows(soon, rows, &p->out, p->value_dim);
}

static void run_tile(void *arg, int64_t item, int32_t lane) {
    const attn_job *job = arg;
    int64_t tile;
    const attn_unit *unit = unit_of_item(job, item, &tile);
    attn_rows rows = tile_rows(job, unit, tile);
    rapt_soon soon;
    soon.count = 0;
    if (rows.count >= ROWS_TO_LOOK_AHEAD) {
        rows.soon = &soon;
        look_ahead(job, item, &rows, &soon);
    }
    lane_scratch scratch;
    lay_out_scratch(job, lane, &scratch);
    job->kernels->pack_queries(&rows, scratch.q);
    bool is_empty = true; /* the first cut is the total: merging it into nothing would change nothing */
    for (int64_t cut = 0; cut < cuts_with_extra(job, unit); cut++) {
        const attn_keys *keys = keys_of_cut(job, unit, cut, &scratch);
        attn_partial *target = is_empty ? &scratch.total : &scratch.partial;
        if (rows.soon != NULL && tile == 0) want_keys(job, unit, cut + 1, &soon);
        if (!job->kernels->attn_cut(&rows, keys, scratch.q, scratch.scores, target)) continue;
        if (!is_empty) job->kernels->attn_merge(rows.count, &scratch.total, &scratch.partial);
        is_empty = false;
    }
    if (is_empty) job->kernels->attn_begin(rows.count, &scratch.total);
    finish_tile(job, &rows, &scratch.total);
}

/* The same in pieces: each cut of a tile on its own; who computes the last merges them in order. */
static attn_partial split_partial(const attn_job *job, int64_t tile, int64_t cut) {
    const attn_plan *plan = &job->plan;
    return partial_at(plan, plan->split_rows, job->partials + (size_t)(tile * plan->slots + cut) * plan->split_bytes);
}

/* Sums in progress are read and written many times, which would have to wait for memory that no cache holds yet. */
static void keep_partial(const attn_job *job, int64_t rows, const attn_partial *partial, int64_t tile, int64_t cut) {
    attn_partial kept = split_partial(job, tile, cut);
    size_t real = job->plan.real;
    memcpy(kept.reference, partial->reference, real * (size_t)rows);
    memcpy(kept.sum, partial->sum, real * (size_t)rows);
    memcpy(kept.out, partial->out, real * (size_t)(rows * partial->out_stride));
}

static void merge_split_tile(const attn_job *job, const attn_rows *rows, int64_t tile, int64_t cuts,
                             attn_partial *total) {
    job->kernels->attn_begin(rows->count, total);
    for (int64_t cut = 0; cut < cuts; cut++) {
        attn_partial partial = split_partial(job, tile, cut);
        job->kernels->attn_merge(rows->count, total, &partial);
    }
    finish_tile(job, rows, total);
}

static void run_piece(void *arg, int64_t item, int32_t lane) {
    const attn_job *job = arg;
    const attn_plan *plan = &job->plan;
    int64_t tile = item / plan->pieces, first = item % plan->pieces * plan->piece_cuts;
    const attn_unit *unit = &job->units[tile / plan->tiles_per_unit];
    int64_t cuts = cuts_with_extra(job, unit), end = smaller(first + plan->piece_cuts, cuts);
    attn_rows rows = tile_rows(job, unit, tile % plan->tiles_per_unit);
    lane_scratch scratch;
    lay_out_scratch(job, lane, &scratch);
    if (first < end) job->kernels->pack_queries(&rows, scratch.q);
    for (int64_t cut = first; cut < end; cut++) {
        const attn_keys *keys = keys_of_cut(job, unit, cut, &scratch);
        if (!job->kernels->attn_cut(&rows, keys, scratch.q, scratch.scores, &scratch.partial)) {
            job->kernels->attn_begin(rows.count, &scratch.partial); /* nothing seen: nothing to add */
        }
        keep_partial(job, rows.count, &scratch.partial, tile, cut);
    }
    if (atomic_fetch_sub(&job->left[tile], 1) == 1) merge_split_tile(job, &rows, tile, cuts, &scratch.total);
}

/* ---- returned weights ---- */

/* One item: some queries of a sequence, for all heads that the wave holds of it. Heads ascend within the item, and waves
 * ascend too, so an average sums its heads in order. */
static void run_weights(void *arg, int64_t item, int32_t lane) {
    const attn_job *job = arg;
    const attn_problem *p = job->problem;
    const attn_plan *plan = &job->plan;
    int64_t most = smaller(plan->tile_rows, WEIGHTS_ROWS), blocks = divide_up(p->queries, most);
    int64_t n = job->units[0].n + item / blocks, first = item % blocks * most;
    int64_t columns = p->keys + p->extra_keys;
    lane_scratch scratch;
    lay_out_scratch(job, lane, &scratch);
    for (int64_t u = 0; u < job->unit_count; u++) {
        const attn_unit *unit = &job->units[u];
        if (unit->n != n) continue;
        for (int64_t g = 0; g < plan->group; g++) {
            attn_rows rows = {.problem = p,
                              .n = n,
                              .kv_head = unit->kv_head,
                              .heads = 1,
                              .first_head = unit->kv_head * plan->group + g,
                              .first = first,
                              .count = smaller(most, p->queries - first)};
            size_t stats = plan->real * (size_t)((n * p->heads + rows.first_head) * p->queries + first);
            job->kernels->pack_queries(&rows, scratch.q);
            memset(scratch.weights, 0, plan->real * (size_t)(rows.count * columns));
            for (int64_t cut = 0; cut < cuts_with_extra(job, unit); cut++) {
                job->kernels->attn_weights(&rows, keys_of_cut(job, unit, cut, &scratch), scratch.q, scratch.scores,
                                           job->reference_stats + stats, job->sum_stats + stats, scratch.weights,
                                           columns);
            }
            job->kernels->store_weights(&rows, scratch.weights, columns, job->average);
        }
    }
}

/* ---- all waves ---- */

static void run_wave(rapt_context *context, attn_job *job, int64_t first_unit) {
    const attn_problem *p = job->problem;
    const attn_plan *plan = &job->plan;
    for (int64_t u = 0; u < job->unit_count; u++) {
        attn_unit *unit = &job->units[u];
        find_unit(job, first_unit + u, u > 0 ? unit - 1 : NULL, unit);
        int64_t cuts = plan->streams ? 0 : cuts_with_extra(job, unit);
        for (int64_t cut = 0; cut < cuts; cut++) atomic_init(&unit->state[cut], UNPACKED);
    }

    int64_t tiles = job->unit_count * plan->tiles_per_unit;
    double row = (double)p->keys * (double)(p->dim + p->value_dim);
    double scoring = row * (double)(job->unit_count * plan->rows_per_unit);
    if (plan->split) {
        for (int64_t tile = 0; tile < tiles; tile++) atomic_init(&job->left[tile], (int)plan->pieces);
        rapt_parallel(context, tiles * plan->pieces, scoring, run_piece, job);
    } else {
        rapt_parallel(context, tiles, scoring, run_tile, job);
    }
    if (p->weights.data != NULL) {
        int64_t sequences = job->units[job->unit_count - 1].n - job->units[0].n + 1;
        int64_t blocks = divide_up(p->queries, smaller(plan->tile_rows, WEIGHTS_ROWS));
        rapt_parallel(context, sequences * blocks, scoring, run_weights, job);
    }
}

static char *carve(char **memory, size_t bytes) {
    char *taken = *memory;
    *memory += bytes;
    return taken;
}

static void attn_forward(rapt_context *context, const attn_problem *p, void *scratch) {
    attn_job job = {.kernels = context->kernels[p->dtype == RAPT_F64], .problem = p, .lane_count = context->lanes};
    make_plan(context, p, &job.plan);
    const attn_plan *plan = &job.plan;
    char *memory = scratch;
    if (!plan->streams) job.packed = carve(&memory, plan->unit_bytes * (size_t)plan->wave_units);
    job.units = (attn_unit *)(void *)carve(&memory, plan->table_bytes);
    job.lanes = carve(&memory, (plan->lane_bytes + plan->weights_bytes) * (size_t)context->lanes);
    job.partials = carve(&memory, plan->partials_bytes);
    job.left = (atomic_int *)(void *)carve(&memory, plan->left_bytes);
    job.reference_stats = carve(&memory, plan->stats_bytes);
    job.sum_stats = job.reference_stats + plan->stats_bytes / 2;
    if (plan->average_bytes > 0) job.average = carve(&memory, plan->average_bytes);

    attn_keys *keys = (attn_keys *)(void *)(job.units + plan->wave_units);
    atomic_int *states = (atomic_int *)(void *)(keys + plan->wave_units * (plan->max_cuts + 1));
    for (int64_t u = 0; u < plan->wave_units && !plan->streams; u++) {
        job.units[u].keys = keys + u * (plan->max_cuts + 1);
        job.units[u].state = states + u * (plan->max_cuts + 1);
    }
    for (int64_t first = 0; first < plan->units; first += plan->wave_units) {
        job.unit_count = smaller(plan->wave_units, plan->units - first);
        run_wave(context, &job, first);
    }
}

const rapt_backend_table rapt_backend_cpu = {
    .reads_packed_weights = true,
    .attn_scratch = attn_scratch,
    .attn_forward = attn_forward,
    .linear_scratch = rapt_cpu_linear_scratch,
    .linear = rapt_cpu_linear,
    .attn_backward_scratch = rapt_cpu_attn_backward_scratch,
    .attn_backward = rapt_cpu_attn_backward,
    .linear_backward_scratch = rapt_cpu_linear_backward_scratch,
    .linear_backward = rapt_cpu_linear_backward,
};
