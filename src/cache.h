/* cache.h - how keys and values of a cache lie in memory: as the kernels read them, so that decoding packs nothing
 *
 * Each (sequence, KV head) has blocks of CUT positions, which are the kernels' cuts, of the cache's dtype:
 *
 *     keys     [CUT / PANEL][D][PANEL]                     a position is a column
 *     values   panels of PANEL dimensions: [CUT][width]    a position is a row; the last panel as wide as it must
 *
 * Position p stands in block p / CUT modulo their number, which for a window are a ring.
 */
#ifndef RAPT_CACHE_H
#define RAPT_CACHE_H

#include "cpu/kernels/kernels.h"

struct rapt_cache {
    rapt_cache_config config; /* nothing left to derive */
    rapt_allocator allocator;
    int64_t blocks;      /* of one (sequence, KV head) */
    int64_t value_width; /* Dv rounded up to COLUMNS */
    size_t block_bytes, value_offset;
    int64_t *length;     /* [N] positions so far, those that fell out of a window included */
    int64_t *oldest;     /* [N] the first of them that is still there */
    int64_t *cleared;    /* [N] of each row: blocks that were ever set to zero */
    int64_t *past, *now; /* [N] for the call in progress: positions of its first queries, lengths after it */
    int64_t *row;        /* [N] which of the N rows of blocks a sequence has */
    uint8_t *non_finite; /* [N][Hk][blocks] whether a value that is not finite was ever put there */
    char *data;          /* [N][Hk][blocks] */
    size_t memory_size;  /* of all of these, from `length` on */
    atomic_flag busy;    /* in a call */
};

static inline int64_t rapt_cache_block_index(const rapt_cache *cache, int64_t n, int64_t kv_head, int64_t cut) {
    return (cache->row[n] * cache->config.num_kv_heads + kv_head) * cache->blocks + cut % cache->blocks;
}

static inline char *rapt_cache_block(const rapt_cache *cache, int64_t n, int64_t kv_head, int64_t cut) {
    return cache->data + (size_t)rapt_cache_block_index(cache, n, kv_head, cut) * cache->block_bytes;
}

/* Where in a block an element of the key or the value of a position stands; r is the position modulo CUT. */
static inline int64_t rapt_cache_key_at(const rapt_cache *cache, int64_t r, int64_t d) {
    return r / PANEL * PANEL * cache->config.head_dim + d * PANEL + r % PANEL;
}
static inline int64_t rapt_cache_value_at(const rapt_cache *cache, int64_t r, int64_t d) {
    int64_t panel = d / PANEL * PANEL, left = cache->value_width - panel;
    return panel * CUT + r * (left < PANEL ? left : PANEL) + d % PANEL;
}

/* What a forward does with a cache. Between begin and end the cache belongs to the call; begin refuses what does not fit and
 * changes nothing that anyone sees. */
typedef struct cache_append {
    int64_t count;          /* new positions, the same for all sequences but where lengths says less */
    const int64_t *lengths; /* [N], or NULL */
    bool attends_only;      /* nothing is appended */
} cache_append;

/* Checks sizes and options against the cache and sets the problem's keys, offsets, lengths and band. Its batch, heads,
 * dims and queries are set before. */
rapt_status rapt_cache_begin(rapt_context *context, rapt_cache *cache, const rapt_options *options,
                             const cache_append *append, attn_problem *problem);
/* Appends keys and values, [N, Hk, count, D] and [N, Hk, count, Dv], and attends, in pieces where a window needs it. */
void rapt_cache_attend(rapt_context *context, rapt_cache *cache, const cache_append *append, const rapt_view *k,
                       const rapt_view *v, const attn_problem *problem, void *scratch);
/* The band that goes with it, once the options' is taken. */
rapt_status rapt_cache_set_band(rapt_context *context, attn_problem *problem);
void rapt_cache_end(rapt_cache *cache);

#endif
