/* ref_attn_backward.c - the gradients of attention as the specification says them, one query at a time
 *
 * With P the softmax of a row, Z what dropout multiplies it by, W = P Z the weights and dO, dW' the gradients of the
 * output and of returned weights:
 *
 *     out = W V             dW = dO V^T + dW'      dV = W^T dO
 *     W   = P Z             dP = Z dW
 *     P   = softmax(S)      dS = P (dP - sum over keys of P dP)
 *     S   = scale Q K^T + masks
 *                           dQ = scale dS K        dK = scale dS^T Q        dmask = dS
 *
 * Scores are computed again, in double precision; neither the forward's output nor its log-sum-exp is read. A key that a
 * query does not see takes no part in any of these sums. Where a query sees a single key, P is 1 whatever the score, so
 * no gradient goes through it.
 */
#include "ref.h"

/* Sums in double precision, which are rounded once when all are done. */
typedef struct gradient_sums {
    double *k, *v;          /* [S'][D], [S'][Dv] of one KV head of one sequence */
    double *mask, *padding; /* [N or 1][H or 1][L or 1][S], or NULL: not wanted */
    double *d_probability;  /* [S'], of one row */
} gradient_sums;

static size_t doubles(size_t count) { return rapt_arena_size(rapt_size_mul(sizeof(double), count)); }

static size_t mask_count(const attn_problem *p, const mask_gradient *mask) {
    if (mask->data == NULL) return 0;
    size_t rows = rapt_size_mul((size_t)mask->size[0], rapt_size_mul((size_t)mask->size[1], (size_t)mask->size[2]));
    return rapt_size_mul(rows, (size_t)p->keys);
}

size_t rapt_ref_attn_backward_scratch(const rapt_context *context, const attn_problem *p, const attn_gradients *g) {
    (void)context;
    size_t keys = rapt_size_add((size_t)p->keys, (size_t)p->extra_keys), bytes = rapt_ref_row_scratch(p);
    bytes = rapt_size_add(bytes, doubles(keys));
    bytes = rapt_size_add(bytes, doubles(rapt_size_mul(keys, (size_t)p->dim)));
    bytes = rapt_size_add(bytes, doubles(rapt_size_mul(keys, (size_t)p->value_dim)));
    bytes = rapt_size_add(bytes, doubles(mask_count(p, &g->mask)));
    return rapt_size_add(bytes, doubles(mask_count(p, &g->padding)));
}

static double *take(char **scratch, size_t count) {
    double *sums = (double *)(void *)*scratch;
    *scratch += doubles(count);
    for (size_t i = 0; i < count; i++) sums[i] = 0;
    return sums;
}

/* ---- one row ---- */

static double weight_gradient(const attn_problem *p, const attn_gradients *g, int64_t n, int64_t h, int64_t i,
                              int64_t j) {
    int64_t kv_head = h / (p->heads / p->kv_heads);
    double sum = 0;
    for (int64_t d = 0; d < p->value_dim; d++) {
        sum += rapt_ref_element(&g->out, g->out_dtype, n, h, i, d) * rapt_ref_value_element(p, n, kv_head, j, d);
    }
    if (g->weights.data == NULL) return sum;
    if (!p->average_weights) return sum + rapt_ref_element(&g->weights, p->dtype, n, h, i, j);
    return sum + rapt_ref_element(&g->weights, p->dtype, n, 0, i, j) / (double)p->heads;
}

static void add_to_mask(const mask_gradient *mask, double *sums, int64_t keys, int64_t n, int64_t h, int64_t i,
                        int64_t j, double d_score) {
    if (sums == NULL || j >= keys) return; /* not wanted, or an extra key, which no mask reaches */
    int64_t a = mask->size[0] > 1 ? n : 0, b = mask->size[1] > 1 ? h : 0, c = mask->size[2] > 1 ? i : 0;
    sums[((a * mask->size[1] + b) * mask->size[2] + c) * keys + j] += d_score;
}

static void put(const rapt_view *view, rapt_dtype dtype, bool accumulate, int64_t at, double value) {
    if (view->data == NULL) return;
    rapt_store(view->data, dtype, at, (accumulate ? rapt_load(view->data, dtype, at) : 0) + value);
}

static void backward_row(const attn_problem *p, const attn_gradients *g, int64_t n, int64_t h, int64_t i,
                         const ref_row *row, const gradient_sums *sums) {
    int64_t kv_head = h / (p->heads / p->kv_heads);
    double mean = 0; /* of dP, weighted by P */
    for (int64_t c = 0; c < row->count; c++) {
        int64_t j = row->key[c];
        double kept = rapt_ref_dropout(p, n, h, i, j);
        sums->d_probability[c] = kept * weight_gradient(p, g, n, h, i, j);
        mean += row->probability[c] * sums->d_probability[c];
        for (int64_t d = 0; d < p->value_dim; d++) {
            sums->v[j * p->value_dim + d] +=
                row->probability[c] * kept * rapt_ref_element(&g->out, g->out_dtype, n, h, i, d);
        }
    }
    int64_t count = row->count == 1 ? 0 : row->count; /* of scores that matter */
    for (int64_t c = 0; c < count; c++) {
        int64_t j = row->key[c];
        double d_score = row->probability[c] * (sums->d_probability[c] - mean);
        sums->d_probability[c] = d_score;
        for (int64_t d = 0; d < p->dim; d++) {
            sums->k[j * p->dim + d] += p->scale * d_score * rapt_ref_element(&p->q, p->dtype, n, h, i, d);
        }
        add_to_mask(&g->mask, sums->mask, p->keys, n, h, i, j, d_score);
        add_to_mask(&g->padding, sums->padding, p->keys, n, h, i, j, d_score);
    }
    for (int64_t d = 0; d < p->dim && g->q.data != NULL; d++) {
        double sum = 0;
        for (int64_t c = 0; c < count; c++) {
            sum += sums->d_probability[c] * rapt_ref_key_element(p, n, kv_head, row->key[c], d);
        }
        const int64_t *stride = g->q.stride;
        put(&g->q, g->q_dtype, g->accumulate, n * stride[0] + h * stride[1] + i * stride[2] + d * stride[3],
            p->scale * sum);
    }
}

/* A row that no loss reads takes part in nothing, whatever is in it. */
static bool has_no_gradient(const attn_problem *p, const attn_gradients *g, int64_t n, int64_t h, int64_t i) {
    bool all_zero = g->weights.data == NULL;
    for (int64_t d = 0; d < p->value_dim && all_zero; d++)
        all_zero = rapt_ref_element(&g->out, g->out_dtype, n, h, i, d) == 0;
    return all_zero;
}

/* ---- what is summed over rows ---- */

/* The gradients of a KV head's keys (or values) [S'][dim], the real ones and the extra ones. */
static void put_keys(const attn_problem *p, const double *sums, int64_t dim, bool accumulate, const rapt_view *real,
                     rapt_dtype dtype, const rapt_view *extra, int64_t n, int64_t kv_head) {
    for (int64_t j = 0; j < p->keys + p->extra_keys; j++) {
        bool is_real = j < p->keys;
        const rapt_view *view = is_real ? real : extra;
        int64_t row = n * view->stride[0] + kv_head * view->stride[1] + (is_real ? j : j - p->keys) * view->stride[2];
        for (int64_t d = 0; d < dim; d++) {
            put(view, is_real ? dtype : rapt_accumulation_dtype(p->dtype), is_real && accumulate,
                row + d * view->stride[3], sums[j * dim + d]);
        }
    }
}

static void put_mask(const attn_problem *p, const mask_gradient *mask, bool accumulate, const double *sums) {
    if (mask->data == NULL) return;
    const rapt_view view = {.data = mask->data};
    for (int64_t a = 0; a < mask->size[0]; a++) {
        for (int64_t b = 0; b < mask->size[1]; b++) {
            for (int64_t c = 0; c < mask->size[2]; c++) {
                int64_t row = a * mask->stride[0] + b * mask->stride[1] + c * mask->stride[2];
                for (int64_t j = 0; j < p->keys; j++) {
                    put(&view, mask->dtype, accumulate, row + j * mask->stride[3], *sums++);
                }
            }
        }
    }
}

void rapt_ref_attn_backward(rapt_context *context, const attn_problem *p, const attn_gradients *g, void *scratch) {
    (void)context;
    size_t keys = (size_t)(p->keys + p->extra_keys);
    char *rest = scratch;
    ref_row row = rapt_ref_row_take(p, &rest);
    gradient_sums sums = {.d_probability = take(&rest, keys),
                          .k = take(&rest, keys * (size_t)p->dim),
                          .v = take(&rest, keys * (size_t)p->value_dim)};
    if (g->mask.data != NULL) sums.mask = take(&rest, mask_count(p, &g->mask));
    if (g->padding.data != NULL) sums.padding = take(&rest, mask_count(p, &g->padding));
    int64_t group = p->heads / p->kv_heads;
    for (int64_t n = 0; n < p->batch; n++) {
        for (int64_t kv_head = 0; kv_head < p->kv_heads; kv_head++) {
            for (size_t e = 0; e < keys * (size_t)p->dim; e++) sums.k[e] = 0;
            for (size_t e = 0; e < keys * (size_t)p->value_dim; e++) sums.v[e] = 0;
            for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
                for (int64_t i = 0; i < p->queries; i++) {
                    rapt_ref_row_fill(p, n, h, i, &row);
                    if (has_no_gradient(p, g, n, h, i)) row.count = 0;
                    backward_row(p, g, n, h, i, &row, &sums);
                }
            }
            put_keys(p, sums.k, p->dim, g->accumulate, &g->k, g->k_dtype, &g->extra_k, n, kv_head);
            put_keys(p, sums.v, p->value_dim, g->accumulate, &g->v, g->v_dtype, &g->extra_v, n, kv_head);
        }
    }
    put_mask(p, &g->mask, g->accumulate, sums.mask);
    put_mask(p, &g->padding, g->accumulate, sums.padding);
}
