/* ref_attn.c - attention as the specification says it, in double precision, one query at a time
 *
 * This is the backend to read first. It keeps one row of scores and has no tiles, no threads and no tricks.
 */
#include "ref.h"

#include "../cache.h"

#include <float.h>
#include <math.h>

static void put(const rapt_view *view, rapt_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d, double value) {
    int64_t at = a * view->stride[0] + b * view->stride[1] + c * view->stride[2] + d * view->stride[3];
    rapt_store(view->data, dtype, at, value + 0.0); /* zeros are +0 */
}

/* What a mask adds to a score: -inf where a bool mask is true. */
static double mask_value(const attn_mask *mask, int64_t n, int64_t h, int64_t i, int64_t j) {
    if (mask->data == NULL) return 0;
    int64_t at = n * mask->stride[0] + h * mask->stride[1] + i * mask->stride[2] + j * mask->stride[3];
    double value = rapt_load(mask->data, mask->dtype, at);
    if (mask->dtype == RAPT_BOOL) return value != 0 ? -INFINITY : 0;
    return value;
}

static bool is_seen(const attn_problem *p, int64_t n, int64_t h, int64_t i, int64_t j) {
    if (j >= p->keys) return true; /* extra keys */
    int64_t start = p->key_start != NULL ? p->key_start[n] : 0;
    int64_t length = p->key_lengths != NULL ? p->key_lengths[n] : p->keys - start;
    if (j < start || j >= start + length) return false;
    __int128 position = (__int128)i + (p->offsets != NULL ? p->offsets[n] : p->offset);
    if (p->limit_left && j < position - p->left) return false;
    if (p->limit_right && j > position + p->right) return false;
    return mask_value(&p->mask, n, h, i, j) != -INFINITY && mask_value(&p->padding, n, h, i, j) != -INFINITY;
}

double rapt_ref_key_element(const attn_problem *p, int64_t n, int64_t kv_head, int64_t j, int64_t d) {
    if (j >= p->keys) return rapt_ref_element(&p->extra_k, p->dtype, n, kv_head, j - p->keys, d);
    if (p->cache == NULL) return rapt_ref_element(&p->k, p->dtype, n, kv_head, j, d);
    const char *block = rapt_cache_block(p->cache, n, kv_head, j / CUT);
    return rapt_load(block, p->cache->config.dtype, rapt_cache_key_at(p->cache, j % CUT, d));
}

double rapt_ref_value_element(const attn_problem *p, int64_t n, int64_t kv_head, int64_t j, int64_t d) {
    if (j >= p->keys) return rapt_ref_element(&p->extra_v, p->dtype, n, kv_head, j - p->keys, d);
    if (p->cache == NULL) return rapt_ref_element(&p->v, p->dtype, n, kv_head, j, d);
    const char *block = rapt_cache_block(p->cache, n, kv_head, j / CUT);
    return rapt_load(block + p->cache->value_offset, p->cache->config.dtype, rapt_cache_value_at(p->cache, j % CUT, d));
}

static double score(const attn_problem *p, int64_t n, int64_t h, int64_t i, int64_t j) {
    int64_t kv_head = h / (p->heads / p->kv_heads);
    double sum = 0;
    for (int64_t d = 0; d < p->dim; d++) {
        sum += rapt_ref_element(&p->q, p->dtype, n, h, i, d) * rapt_ref_key_element(p, n, kv_head, j, d);
    }
    sum *= p->scale;
    if (j < p->keys) sum += mask_value(&p->mask, n, h, i, j) + mask_value(&p->padding, n, h, i, j);
    return sum < -DBL_MAX ? -DBL_MAX : sum; /* two finite masks stay a number */
}

/* ---- one row of weights ---- */

static size_t row_array(const attn_problem *p) {
    return rapt_arena_size(rapt_size_mul(sizeof(double), rapt_size_add((size_t)p->keys, (size_t)p->extra_keys)));
}

size_t rapt_ref_row_scratch(const attn_problem *p) { return rapt_size_mul(2, row_array(p)); }

ref_row rapt_ref_row_take(const attn_problem *p, char **scratch) {
    ref_row row = {.key = (int64_t *)(void *)*scratch, .probability = (double *)(void *)(*scratch + row_array(p))};
    *scratch += rapt_ref_row_scratch(p);
    return row;
}

void rapt_ref_row_fill(const attn_problem *p, int64_t n, int64_t h, int64_t i, ref_row *row) {
    double largest = -INFINITY, sum = 0;
    row->count = 0;
    for (int64_t j = 0; j < p->keys + p->extra_keys; j++) {
        if (!is_seen(p, n, h, i, j)) continue;
        double s = score(p, n, h, i, j);
        if (s > largest) largest = s;
        row->key[row->count] = j;
        row->probability[row->count++] = s;
    }
    for (int64_t c = 0; c < row->count; c++) {
        row->probability[c] = exp(row->probability[c] - largest);
        sum += row->probability[c];
    }
    for (int64_t c = 0; c < row->count; c++) {
        row->probability[c] = row->count == 1 ? 1 : row->probability[c] / sum; /* 1 even if the score is no number */
    }
    row->lse = largest + log(sum);
}

double rapt_ref_dropout(const attn_problem *p, int64_t n, int64_t h, int64_t i, int64_t j) {
    if (p->dropout == 0) return 1;
    uint32_t counter[4], random[4];
    rapt_dropout_counter(p->dropout_offset, n * p->heads + h, i, j, counter);
    rapt_philox(rapt_dropout_key(p->dropout_seed, p->dropout_offset), counter, random);
    return random[j % 4] >= rapt_dropout_threshold(p->dropout) ? 1 / (1 - p->dropout) : 0;
}

/* ---- forward ---- */

/* One query of one head: its weights into `weight` [S'], output and log-sum-exp into the problem's tensors. */
static void attend(const attn_problem *p, int64_t n, int64_t h, int64_t i, ref_row *row, double *weight) {
    int64_t kv_head = h / (p->heads / p->kv_heads);
    rapt_ref_row_fill(p, n, h, i, row);
    for (int64_t j = 0; j < p->keys + p->extra_keys; j++) weight[j] = 0;
    for (int64_t c = 0; c < row->count; c++) {
        weight[row->key[c]] = row->probability[c] * rapt_ref_dropout(p, n, h, i, row->key[c]);
    }
    for (int64_t d = 0; d < p->value_dim; d++) {
        double out = 0;
        for (int64_t c = 0; c < row->count; c++) {
            out += weight[row->key[c]] * rapt_ref_value_element(p, n, kv_head, row->key[c], d);
        }
        put(&p->out, p->dtype, n, h, i, d, out);
    }
    if (p->lse.data != NULL) put(&p->lse, p->lse_dtype, n, h, i, 0, row->lse);
}

static size_t attn_scratch(const rapt_context *context, const attn_problem *p) {
    (void)context;
    return rapt_size_add(rapt_ref_row_scratch(p), rapt_size_mul(2, row_array(p)));
}

static void attn_forward(rapt_context *context, const attn_problem *p, void *scratch) {
    (void)context;
    int64_t keys = p->keys + p->extra_keys;
    char *rest = scratch;
    ref_row row = rapt_ref_row_take(p, &rest);
    double *weight = (double *)(void *)rest, *average = (double *)(void *)(rest + row_array(p));
    for (int64_t n = 0; n < p->batch; n++) {
        for (int64_t i = 0; i < p->queries; i++) {
            for (int64_t j = 0; j < keys; j++) average[j] = 0;
            for (int64_t h = 0; h < p->heads; h++) {
                attend(p, n, h, i, &row, weight);
                for (int64_t j = 0; j < keys; j++) {
                    average[j] += weight[j];
                    if (p->weights.data != NULL && !p->average_weights)
                        put(&p->weights, p->dtype, n, h, i, j, weight[j]);
                }
            }
            for (int64_t j = 0; j < keys && p->weights.data != NULL && p->average_weights; j++) {
                put(&p->weights, p->dtype, n, 0, i, j, average[j] / (double)p->heads);
            }
        }
    }
}

const rapt_backend_table rapt_backend_reference = {
    .reads_packed_weights = false,
    .attn_scratch = attn_scratch,
    .attn_forward = attn_forward,
    .linear_scratch = rapt_ref_linear_scratch,
    .linear = rapt_ref_linear,
    .attn_backward_scratch = rapt_ref_attn_backward_scratch,
    .attn_backward = rapt_ref_attn_backward,
    .linear_backward_scratch = rapt_ref_linear_backward_scratch,
    .linear_backward = rapt_ref_linear_backward,
};
