/* masks.h - which keys a row sees: band and lengths as ranges of columns, masks as numbers to add to scores */
#ifndef RAPT_CPU_KERNELS_MASKS_H
#define RAPT_CPU_KERNELS_MASKS_H

#include "pack.h"

/* Without a division where each head has keys of its own. */
INLINE int64_t row_query(const attn_rows *rows, int64_t r) {
    return rows->heads == 1 ? rows->first + r : (rows->first + r) / rows->heads;
}
INLINE int64_t row_head(const attn_rows *rows, int64_t r) {
    return rows->heads == 1 ? rows->first_head : rows->first_head + (rows->first + r) % rows->heads;
}

/* ---- ranges ---- */

/* Columns [*begin, *end) of the cut that the row sees by band and lengths. */
INLINE void visible_columns(const attn_rows *rows, const attn_keys *keys, int64_t r, int64_t *begin, int64_t *end) {
    *begin = 0;
    *end = keys->keys;
    if (keys->extra) return;
    int64_t low, high;
    rapt_visible_keys(rows->problem, rows->n, row_query(rows, r), &low, &high);
    if (low - keys->first_key > *begin) *begin = low - keys->first_key;
    if (high - keys->first_key < *end) *end = high - keys->first_key;
}

/* Columns [begin, last) that any of the rows sees, begin rounded down to COLUMNS and last rounded up to end. */
typedef struct tile_range {
    int64_t begin, end; /* empty if begin >= end */
    int64_t last;
    bool all_seen; /* by all rows, from begin to last */
} tile_range;

INLINE tile_range tile_columns(const attn_rows *rows, const attn_keys *keys) {
    int64_t low, high, last_low, last_high;
    visible_columns(rows, keys, 0, &low, &high); /* both ends grow with the query */
    visible_columns(rows, keys, rows->count - 1, &last_low, &last_high);
    tile_range range = {0};
    if (low >= last_high) return range;
    range.begin = low / COLUMNS * COLUMNS;
    range.end = rapt_round_up(last_high, COLUMNS);
    range.last = last_high;
    range.all_seen = last_low <= range.begin && high == last_high;
    return range;
}

/* ---- masks ---- */

/* A sum or product of finite numbers stays one, however large; what was +inf before stays +inf. */
INLINE vec v_keep_finite(vec result, vec before) {
    vec kept = v_min_or_second(v_all(-LOWEST), v_max_or_second(v_all(LOWEST), result));
    return v_where_equal(before, (real)INFINITY, before, kept);
}

/* A mask for `count` keys as numbers to add, -inf where it masks. True if there are others than 0 and -inf. */
static bool load_mask(const attn_mask *mask, int64_t offset, int64_t count, real *bias) {
    int64_t stride = mask->stride[3];
    if (mask->dtype == RAPT_BOOL) {
        const uint8_t *masked = (const uint8_t *)mask->data + offset;
        if (stride == 1) { /* written out, so that it becomes vector code */
            for (int64_t c = 0; c < count; c++) bias[c] = masked[c] ? (real)-INFINITY : 0;
        } else {
            for (int64_t c = 0; c < count; c++) bias[c] = masked[c * stride] ? (real)-INFINITY : 0;
        }
        return false;
    }
    load_row(bias, mask->data, mask->dtype, offset, stride, count);
    for (int64_t c = 0; c < count && rapt_dtype_size(mask->dtype) > sizeof(real); c++) {
        double wide = ((const double *)mask->data)[offset + c * stride]; /* finite there, so a number here */
        if (wide - wide == 0) bias[c] = bias[c] < LOWEST ? LOWEST : bias[c] > -LOWEST ? -LOWEST : bias[c];
    }
    return true;
}

/* What key_padding_mask adds to all rows of a sequence, for the columns of a cut. NULL if there is none. */
typedef struct padding_bias {
    const real *bias; /* [CUT] */
    bool has_numbers; /* others than 0 and -inf */
} padding_bias;

INLINE padding_bias load_padding(const attn_rows *rows, const attn_keys *keys, real *bias) {
    const attn_mask *padding = &rows->problem->padding;
    if (padding->data == NULL || keys->extra) return (padding_bias){0};
    int64_t at = rows->n * padding->stride[0] + keys->first_key * padding->stride[3];
    bool has_numbers = load_mask(padding, at, keys->keys, bias);
    for (int64_t c = keys->keys; c % COLUMNS != 0; c++) bias[c] = (real)-INFINITY;
    return (padding_bias){.bias = bias, .has_numbers = has_numbers};
}

INLINE void add_padding(real *bias, const real *padding, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += LANES) {
        vec m = v_load(bias + c), p = v_load(padding + c), sum = v_keep_finite(v_keep_finite(v_add(m, p), m), p);
        v_store(bias + c, v_where_masked(m, m, v_where_masked(p, p, sum)));
    }
}

/* What is added to the scores of one row in the columns [begin, end), in natural units; -inf for what it does not see.
 * Padding that only masks need not be in it. It is put into `bias` unless it lies somewhere already. */
INLINE const real *bias_row(const attn_rows *rows, const attn_keys *keys, int64_t r, int64_t begin, int64_t end,
                            padding_bias padding, real *bias, bool *has_numbers) {
    const attn_problem *p = rows->problem;
    int64_t low, high;
    visible_columns(rows, keys, r, &low, &high);
    if (low > end || high < begin || low > high) low = high = begin;
    bool has_mask = p->mask.data != NULL && !keys->extra, sees_all = low <= begin && high >= end;
    *has_numbers = padding.has_numbers;
    if (!has_mask && padding.bias != NULL && sees_all) return padding.bias;
    if (has_mask) {
        const int64_t *m = p->mask.stride;
        int64_t at = rows->n * m[0] + row_head(rows, r) * m[1] + row_query(rows, r) * m[2] + keys->first_key * m[3];
        if (!padding.has_numbers && sees_all && p->mask.dtype == REAL_DTYPE && m[3] == 1) {
            *has_numbers = true;
            return (const real *)p->mask.data + at;
        }
        *has_numbers |= load_mask(&p->mask, at + low * m[3], high - low, bias + low);
    } else {
        memset(bias + low, 0, (size_t)(high - low) * sizeof(real));
    }
    for (int64_t c = begin; c < low; c++) bias[c] = (real)-INFINITY;
    for (int64_t c = high; c < end; c++) bias[c] = (real)-INFINITY;
    if (padding.has_numbers) add_padding(bias, padding.bias, begin, end);
    return bias;
}

/* Brings band and masks into the scores of one row: what is masked becomes -inf, whatever was there; the rest is at least
 * the lowest number. */
static void mask_row(const attn_rows *rows, const attn_keys *keys, int64_t r, int64_t begin, int64_t end,
                     padding_bias padding, real *bias, real *t) {
    bool has_numbers, only_masks = padding.bias != NULL && !padding.has_numbers;
    const real *added = bias_row(rows, keys, r, begin, end, padding, bias, &has_numbers);
    for (int64_t c = begin; c < end; c += LANES) {
        vec m = v_load(added + c), score = v_load(t + c);
        if (only_masks) {
            vec p = v_load(padding.bias + c);
            m = v_where_masked(p, p, m);
        }
        if (has_numbers) score = v_add(score, v_keep_finite(v_mul(m, v_all(LOG2_E)), m));
        v_store(t + c, v_where_masked(m, m, v_max_or_second(v_all(LOWEST), score)));
    }
}

/* Whether all scores of a row are masked. */
INLINE bool all_masked(const real *t, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        if (t[c] != (real)-INFINITY) return false;
    }
    return true;
}

/* ---- the band alone, which leaves what is seen as it is ---- */

#define REPEAT_16(x) x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x
static const real edges[3 * COLUMNS] = {REPEAT_16((real)-INFINITY), REPEAT_16(0), REPEAT_16((real)-INFINITY)};

INLINE void mask_columns(real *t, const real *edge) {
    UNROLL for (int v = 0; v < COLUMNS / LANES; v++) {
        vec m = v_load(edge + v * LANES);
        v_store(t + v * LANES, v_where_masked(m, m, v_load(t + v * LANES)));
    }
}

/* Columns from begin to before low and from high to before end become -inf; whole vectors, since a vector that is read
 * soon after single numbers were written into it has to wait for them. */
INLINE void mask_outside(real *t, int64_t begin, int64_t low, int64_t high, int64_t end) {
    for (int64_t c = begin; c < low; c += COLUMNS) {
        mask_columns(t + c, edges + COLUMNS - (low - c < COLUMNS ? low - c : COLUMNS));
    }
    for (int64_t c = high / COLUMNS * COLUMNS; c < end; c += COLUMNS) {
        mask_columns(t + c, edges + 2 * COLUMNS - (high > c ? high - c : 0));
    }
}

INLINE void band_row(const attn_rows *rows, const attn_keys *keys, int64_t r, int64_t begin, int64_t end, real *t) {
    int64_t low, high;
    visible_columns(rows, keys, r, &low, &high);
    if (low >= high || low >= end || high <= begin) low = high = begin; /* it sees nothing */
    mask_outside(t, begin, low, high, end);
}

#endif
