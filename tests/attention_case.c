/* attention_case.c - random attention problems */
#include "attention_case.h"

static int64_t random_size(test_random *random) {
    static const int64_t sizes[] = {1, 2, 3, 4, 7, 16, 17, 31, 33, 48, 63, 65, 127, 129, 255, 256, 257, 300, 513, 1000};
    return sizes[random_between(random, 0, (int64_t)(sizeof sizes / sizeof *sizes) - 1)];
}

static int64_t random_dim(test_random *random) {
    static const int64_t sizes[] = {1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 80, 128, 200, 256, 300};
    return random_chance(random, 0.3) ? random_between(random, 1, 256)
                                      : sizes[random_between(random, 0, (int64_t)(sizeof sizes / sizeof *sizes) - 1)];
}

static void random_sizes(test_random *random, attention_case *c, int64_t work) {
    do {
        c->n = random_between(random, 1, 4);
        c->kv_heads = random_between(random, 1, 3);
        c->heads = c->kv_heads * random_between(random, 1, 4);
        c->l = random_size(random);
        c->s = random_size(random);
        c->d = random_dim(random);
        c->dv = random_chance(random, 0.7) ? c->d : random_dim(random);
    } while (c->n * c->heads * c->l * c->s * (c->d + c->dv) > work);
    if (random_chance(random, 0.02)) c->n = 0;
    if (random_chance(random, 0.02)) c->l = 0;
    if (random_chance(random, 0.03)) c->s = 0;
}

static rapt_tensor random_tensor(test_random *random, rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    return random_chance(random, 0.5) ? make_tensor(dtype, ndim, shape)
                                      : make_strided_tensor(random, dtype, ndim, shape);
}

/* Masks in every shape and kind that is taken. */
static void random_masks(test_random *random, attention_case *c) {
    static const rapt_dtype kinds[] = {RAPT_BOOL, RAPT_BOOL, RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};
    if (random_chance(random, 0.4)) {
        int64_t shapes[4][4] = {{c->l, c->s, 0, 0},
                                {c->n * c->heads, c->l, c->s, 0},
                                {c->n, c->heads, c->l, c->s},
                                {random_chance(random, 0.5) ? 1 : c->n, random_chance(random, 0.5) ? 1 : c->heads,
                                 random_chance(random, 0.3) ? 1 : c->l, c->s}};
        static const int32_t ranks[] = {2, 3, 4, 4};
        int64_t which = random_between(random, 0, 3);
        c->mask = random_tensor(random, kinds[random_between(random, 0, 5)], ranks[which], shapes[which]);
    }
    if (random_chance(random, 0.3)) {
        int64_t shapes[2][2] = {{c->s, 0}, {c->n, c->s}};
        int64_t which = random_between(random, 0, 1);
        c->padding = random_tensor(random, kinds[random_between(random, 0, 5)], (int32_t)which + 1, shapes[which]);
    }
    const rapt_tensor *masks[] = {&c->mask, &c->padding};
    for (int m = 0; m < 2; m++) {
        double share =
            random_chance(random, 0.2) ? 0.98 : random_unit(random); /* of masked keys; some rows see nothing */
        int64_t count = masks[m]->data == NULL ? 0 : rapt_tensor_count(masks[m]);
        for (int64_t i = 0; i < count; i++) {
            bool masked = random_chance(random, share);
            double value = masked ? -INFINITY : 3 * (2 * random_unit(random) - 1);
            set_element(masks[m], i, masks[m]->dtype == RAPT_BOOL ? masked : value);
        }
    }
}

static int64_t *random_array(test_random *random, int64_t count, int64_t low, int64_t high) {
    int64_t *array = calloc((size_t)count + 1, sizeof *array);
    assert_non_null(array);
    for (int64_t i = 0; i < count; i++) array[i] = random_between(random, low, high);
    return array;
}

static void random_band(test_random *random, attention_case *c) {
    rapt_options *o = &c->options;
    o->causal = random_chance(random, 0.3);
    o->limit_left = random_chance(random, 0.25);
    o->limit_right = random_chance(random, 0.25);
    o->left = random_chance(random, 0.05) ? INT64_MAX : random_between(random, -3, c->s);
    o->right = random_chance(random, 0.05) ? INT64_MAX : random_between(random, -3, c->s);
    if (!o->limit_left) o->left = 0;
    if (!o->limit_right) o->right = 0;
    int64_t kind = random_between(random, 0, 5);
    if (kind == 0) o->align_bottom_right = true;
    if (kind == 1) o->offset = random_chance(random, 0.05) ? INT64_MIN : random_between(random, -c->l, c->s + 2);
    if (kind == 2) c->offsets = random_array(random, c->n, -c->l, c->s + 2);
    if (random_chance(random, 0.3)) c->key_start = random_array(random, c->n, 0, c->s);
    if (random_chance(random, 0.3)) {
        c->key_lengths = random_array(random, c->n, 0, c->s);
        for (int64_t n = 0; n < c->n && c->key_start != NULL; n++) {
            if (c->key_lengths[n] > c->s - c->key_start[n]) c->key_lengths[n] = c->s - c->key_start[n];
        }
    }
    o->set_scale = random_chance(random, 0.2);
    o->scale = random_chance(random, 0.2) ? 0 : 2 * random_unit(random) - 1;
    if (!o->set_scale) o->scale = 0;
}

/* Whole keys of NaN or infinity: rows that see them are NaN, no other row may notice. */
static void plant_non_finite(test_random *random, const attention_case *c) {
    for (int64_t planted = 0; planted < 3 && c->s > 0; planted++) {
        const rapt_tensor *tensor = random_chance(random, 0.5) ? &c->k : &c->v;
        int64_t dim = tensor->shape[3], row = random_between(random, 0, c->n * c->kv_heads * c->s - 1);
        double value = random_chance(random, 0.5) ? NAN : random_chance(random, 0.5) ? INFINITY : -INFINITY;
        for (int64_t d = 0; d < dim; d++) set_element(tensor, row * dim + d, value);
    }
}

static void random_values(test_random *random, attention_case *c) {
    double kind = random_unit(random);
    double magnitude = kind < 0.7 ? 2 : kind < 0.8 ? 0 : kind < 0.9 ? 1e-40 : 1;
    fill_random(random, &c->q, magnitude);
    fill_random(random, &c->k, magnitude);
    fill_random(random, &c->v, random_chance(random, 0.1) ? 1e-40 : 2);
    if (kind >= 0.9 && c->dtype != RAPT_F16) { /* scores of order 1e4 */
        c->options.set_scale = true;
        c->options.scale = 1e4 / (double)c->d;
    }
    if (c->n > 0 && random_chance(random, 0.2)) plant_non_finite(random, c);
}

static void random_tensors(test_random *random, attention_case *c) {
    int64_t q_shape[4] = {c->n, c->heads, c->l, c->d}, k_shape[4] = {c->n, c->kv_heads, c->s, c->d};
    int64_t v_shape[4] = {c->n, c->kv_heads, c->s, c->dv};
    c->q = random_tensor(random, c->dtype, 4, q_shape);
    c->k = random_tensor(random, c->dtype, 4, k_shape);
    c->v = random_tensor(random, c->dtype, 4, v_shape);
    random_masks(random, c);
    random_band(random, c);
}

attention_case make_attention_case(test_random *random, rapt_dtype dtype, int64_t work) {
    attention_case c = {.dtype = dtype};
    random_sizes(random, &c, work);
    random_tensors(random, &c);
    random_values(random, &c);
    c.options.per_head_weights = random_chance(random, 0.5);
    return c;
}

attention_case make_tame_attention_case(test_random *random, rapt_dtype dtype, int64_t largest) {
    attention_case c = {.dtype = dtype};
    c.n = random_between(random, 1, 2);
    c.kv_heads = random_between(random, 1, 2);
    c.heads = c.kv_heads * random_between(random, 1, 2);
    c.l = random_between(random, 1, largest);
    c.s = random_between(random, random_chance(random, 0.02) ? 0 : 1, largest);
    c.d = random_between(random, 1, 4);
    c.dv = random_chance(random, 0.5) ? c.d : random_between(random, 1, 4);
    random_tensors(random, &c);
    fill_random(random, &c.q, 1);
    fill_random(random, &c.k, 1);
    fill_random(random, &c.v, 1);
    c.options.per_head_weights = random_chance(random, 0.5);
    return c;
}

rapt_options case_options(const attention_case *c) {
    rapt_options options = c->options;
    options.attn_mask = c->mask.data != NULL ? &c->mask : NULL;
    options.key_padding_mask = c->padding.data != NULL ? &c->padding : NULL;
    options.offsets = c->offsets;
    options.key_start = c->key_start;
    options.key_lengths = c->key_lengths;
    return options;
}

void free_attention_case(attention_case *c) {
    rapt_tensor *tensors[] = {&c->q, &c->k, &c->v, &c->mask, &c->padding};
    for (int i = 0; i < 5; i++) free_tensor(tensors[i]);
    free(c->offsets);
    free(c->key_start);
    free(c->key_lengths);
}

void describe_attention_case(const attention_case *c, char *text, size_t size) {
    const rapt_options *o = &c->options;
    snprintf(text, size,
             "%s N%lld H%lld Hk%lld L%lld S%lld D%lld Dv%lld mask %s rank %d, padding %s, causal %d left %d:%lld right "
             "%d:%lld "
             "offset %lld bottom-right %d offsets %d start %d lengths %d scale %d:%g per head %d dropout %g",
             rapt_dtype_name(c->dtype), (long long)c->n, (long long)c->heads, (long long)c->kv_heads, (long long)c->l,
             (long long)c->s, (long long)c->d, (long long)c->dv, c->mask.data ? rapt_dtype_name(c->mask.dtype) : "none",
             (int)c->mask.ndim, c->padding.data ? rapt_dtype_name(c->padding.dtype) : "none", o->causal, o->limit_left,
             (long long)o->left, o->limit_right, (long long)o->right, (long long)o->offset, o->align_bottom_right,
             c->offsets != NULL, c->key_start != NULL, c->key_lengths != NULL, o->set_scale, o->scale,
             o->per_head_weights, o->dropout);
}

attention_result run_attention_case(rapt_context *context, const attention_case *c, bool with_weights) {
    int64_t out_shape[4] = {c->n, c->heads, c->l, c->dv}, per_head[4] = {c->n, c->heads, c->l, c->s};
    int64_t averaged[3] = {c->n, c->l, c->s}, lse_shape[3] = {c->n, c->heads, c->l};
    rapt_dtype accumulation = c->dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32;
    attention_result result = {.out = make_tensor(c->dtype, 4, out_shape),
                               .lse = make_tensor(accumulation, 3, lse_shape)};
    rapt_options options = case_options(c);
    options.lse = &result.lse;
    options.per_head_weights &= with_weights;
    if (with_weights) {
        bool per_head_weights = options.per_head_weights;
        result.weights = make_tensor(c->dtype, per_head_weights ? 4 : 3, per_head_weights ? per_head : averaged);
        options.weights = &result.weights;
    }
    /* What was there before must not matter. */
    fill_value(&result.out, 7);
    fill_value(&result.lse, 7);
    if (with_weights) fill_value(&result.weights, 7);
    assert_ok(context, rapt_attention_forward(context, &c->q, &c->k, &c->v, &options, &result.out));
    return result;
}

void free_attention_result(attention_result *result) {
    free_tensor(&result->out);
    free_tensor(&result->weights);
    free_tensor(&result->lse);
}

bool same_result(const attention_result *a, const attention_result *b) {
    bool weights = a->weights.data == NULL || b->weights.data == NULL || same_bits(&a->weights, &b->weights);
    return weights && same_bits(&a->out, &b->out) && same_bits(&a->lse, &b->lse);
}
