/* backward_case.c - random attention problems with everything that their backward takes */
#include "backward_case.h"

const char *const gradient_names[GRADIENTS] = {"query",   "key",    "value", "attn_mask", "key_padding_mask",
                                               "extra_k", "extra_v"};

bool has_backward(const rapt_context *context) {
    return context->backend->attn_backward != NULL && context->backend->linear_backward != NULL;
}

/* ---- making them ---- */

static rapt_tensor random_tensor(test_random *random, rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    return random_chance(random, 0.5) ? make_tensor(dtype, ndim, shape)
                                      : make_strided_tensor(random, dtype, ndim, shape);
}

/* What the backward takes beside the forward's arguments. */
static void add_backward(test_random *random, backward_case *c) {
    attention_case *f = &c->f;
    int64_t out_shape[4] = {f->n, f->heads, f->l, f->dv};
    if (f->n > 0 && f->l > 0 && random_chance(random, 0.2)) {
        c->extra = random_between(random, 1, 2);
        c->extra_k = make_tensor(f->dtype, 3, (int64_t[]){f->kv_heads, c->extra, f->d});
        c->extra_v = make_tensor(f->dtype, 3, (int64_t[]){f->kv_heads, c->extra, f->dv});
        fill_random(random, &c->extra_k, 1);
        fill_random(random, &c->extra_v, 1);
    }
    c->d_out = random_tensor(random, f->dtype, 4, out_shape);
    fill_random(random, &c->d_out, 1);
    if (random_chance(random, 0.3)) {
        int64_t per_head[4] = {f->n, f->heads, f->l, f->s + c->extra}, averaged[3] = {f->n, f->l, f->s + c->extra};
        bool is_per_head = f->options.per_head_weights;
        c->d_weights = random_tensor(random, f->dtype, is_per_head ? 4 : 3, is_per_head ? per_head : averaged);
        fill_random(random, &c->d_weights, 1);
    } else {
        f->options.per_head_weights = false;
    }
    if (random_chance(random, 0.4)) {
        f->options.set_dropout_seed = true;
        f->options.dropout = random_chance(random, 0.1) ? 1 : random_unit(random);
        f->options.dropout_seed = random_bits(random);
        f->options.dropout_offset = random_bits(random);
    }
    c->accumulate = random_chance(random, 0.3);
    for (int g = D_QUERY; g <= D_PADDING; g++) c->wanted[g] = random_chance(random, 0.85);
    static const rapt_dtype mask_dtypes[] = {RAPT_F32, RAPT_F64, (rapt_dtype)0};
    c->mask_dtype = mask_dtypes[random_between(random, 0, 2)];
    c->strides = random_chance(random, 0.5) ? random_bits(random) | 1 : 0;
}

/* NaN or infinity in a whole row of what the backward reads. */
static void plant_non_finite(test_random *random, const backward_case *c) {
    const rapt_tensor *tensor = random_chance(random, 0.5) ? &c->f.q : &c->d_out;
    int64_t dim = tensor->shape[3], rows = c->f.n * c->f.heads * c->f.l;
    if (rows == 0) return;
    int64_t row = random_between(random, 0, rows - 1);
    double value = random_chance(random, 0.5) ? NAN : random_chance(random, 0.5) ? INFINITY : -INFINITY;
    for (int64_t d = 0; d < dim; d++) set_element(tensor, row * dim + d, value);
}

backward_case make_backward_case(test_random *random, rapt_dtype dtype, int64_t work) {
    backward_case c = {.f = make_attention_case(random, dtype, work)};
    add_backward(random, &c);
    if (random_chance(random, 0.1)) plant_non_finite(random, &c);
    return c;
}

backward_case make_tame_backward_case(test_random *random, int64_t largest) {
    backward_case c = {.f = make_tame_attention_case(random, RAPT_F64, largest)};
    rapt_tensor *masks[] = {&c.f.mask, &c.f.padding};
    for (int m = 0; m < 2; m++) { /* of a type whose entries can be moved a little */
        if (masks[m]->data == NULL || masks[m]->dtype == RAPT_BOOL) continue;
        rapt_tensor wide = convert_tensor(masks[m], RAPT_F64);
        free_tensor(masks[m]);
        *masks[m] = wide;
    }
    add_backward(random, &c);
    c.mask_dtype = RAPT_F64;
    return c;
}

static int64_t *copy_array(const int64_t *array, int64_t count) {
    if (array == NULL) return NULL;
    int64_t *copy = calloc((size_t)count + 1, sizeof *copy);
    assert_non_null(copy);
    for (int64_t i = 0; i < count; i++) copy[i] = array[i];
    return copy;
}

static rapt_tensor copy_as(const rapt_tensor *tensor, rapt_dtype dtype) {
    return tensor->data != NULL ? convert_tensor(tensor, dtype) : (rapt_tensor){0};
}

backward_case widen_backward_case(const backward_case *c) {
    backward_case wide = *c;
    wide.f.dtype = RAPT_F64;
    wide.f.q = copy_as(&c->f.q, RAPT_F64);
    wide.f.k = copy_as(&c->f.k, RAPT_F64);
    wide.f.v = copy_as(&c->f.v, RAPT_F64);
    wide.f.mask = copy_as(&c->f.mask, c->f.mask.dtype);
    wide.f.padding = copy_as(&c->f.padding, c->f.padding.dtype);
    wide.f.offsets = copy_array(c->f.offsets, c->f.n);
    wide.f.key_start = copy_array(c->f.key_start, c->f.n);
    wide.f.key_lengths = copy_array(c->f.key_lengths, c->f.n);
    wide.extra_k = copy_as(&c->extra_k, RAPT_F64);
    wide.extra_v = copy_as(&c->extra_v, RAPT_F64);
    wide.d_out = copy_as(&c->d_out, RAPT_F64);
    wide.d_weights = copy_as(&c->d_weights, RAPT_F64);
    wide.mask_dtype = RAPT_F64;
    wide.strides = 0;
    for (int g = D_QUERY; g <= D_PADDING; g++) wide.wanted[g] = true;
    return wide;
}

void free_backward_case(backward_case *c) {
    rapt_tensor *tensors[] = {&c->extra_k, &c->extra_v, &c->d_out, &c->d_weights};
    for (int i = 0; i < 4; i++) free_tensor(tensors[i]);
    free_attention_case(&c->f);
}

void describe_backward_case(const backward_case *c, char *text, size_t size) {
    describe_attention_case(&c->f, text, size);
    size_t used = strlen(text);
    snprintf(text + used, size - used, " seed %llx:%llx extra %lld d_weights %d accumulate %d wanted %d%d%d%d%d",
             (unsigned long long)c->f.options.dropout_seed, (unsigned long long)c->f.options.dropout_offset,
             (long long)c->extra, c->d_weights.data != NULL, c->accumulate, c->wanted[0], c->wanted[1], c->wanted[2],
             c->wanted[3], c->wanted[4]);
}

/* ---- running them ---- */

double start_value(int which, int64_t index) { /* that every dtype holds */
    return (double)((index * 7 + which * 5) % 32 - 16) / 8;
}

static rapt_tensor make_gradient(const backward_case *c, int which) {
    const attention_case *f = &c->f;
    test_random random = {c->strides + (uint64_t)which};
    const rapt_tensor *like[] = {&f->q, &f->k, &f->v, &f->mask, &f->padding};
    rapt_dtype accumulation = rapt_accumulation_dtype(f->dtype);
    if (which == D_EXTRA_K || which == D_EXTRA_V) {
        if (c->extra == 0) return (rapt_tensor){0};
        return make_tensor(accumulation, 4,
                           (int64_t[]){f->n, f->kv_heads, c->extra, which == D_EXTRA_K ? f->d : f->dv});
    }
    const rapt_tensor *of = like[which];
    bool is_mask = which == D_MASK || which == D_PADDING;
    if (!c->wanted[which] || of->data == NULL || of->dtype == RAPT_BOOL) return (rapt_tensor){0};
    rapt_dtype dtype = is_mask && c->mask_dtype != (rapt_dtype)0 ? c->mask_dtype : of->dtype;
    return c->strides != 0 ? make_strided_tensor(&random, dtype, of->ndim, of->shape)
                           : make_tensor(dtype, of->ndim, of->shape);
}

static const rapt_tensor *if_present(const rapt_tensor *tensor) { return tensor->data != NULL ? tensor : NULL; }

static rapt_view contiguous_view(const rapt_tensor *tensor) { /* [a,b,c,d], or [b,c,d] with a stride of 0 before it */
    rapt_view view = {.data = tensor->data};
    for (int32_t d = 0; d < tensor->ndim; d++) view.stride[4 - tensor->ndim + d] = tensor->stride[d];
    return view;
}

/* The problem that a layer with extra keys hands to its backend. */
static attn_problem make_problem(rapt_context *context, const backward_case *c, const backward_result *r,
                                 const rapt_options *options) {
    attn_problem p;
    assert_ok(context, rapt_attn_tensors(context, &c->f.q, &c->f.k, &c->f.v, NULL, &r->out, &p));
    p.extra_keys = c->extra;
    p.extra_k = contiguous_view(&c->extra_k);
    p.extra_v = contiguous_view(&c->extra_v);
    assert_ok(context, rapt_attn_options(context, options, true, &p));
    assert_ok(context, rapt_take_dropout(context, options, options->dropout, &p));
    return p;
}

static void *make_scratch(size_t bytes) {
    void *scratch = aligned_alloc(RAPT_ALIGNMENT, rapt_arena_size(bytes) + RAPT_ALIGNMENT);
    assert_non_null(scratch);
    return scratch;
}

backward_result run_forward_of(rapt_context *context, const backward_case *c) {
    const attention_case *f = &c->f;
    backward_result r = {.out = make_tensor(f->dtype, 4, (int64_t[]){f->n, f->heads, f->l, f->dv}),
                         .lse = make_tensor(f->l % 2 != 0 ? RAPT_F64 : rapt_accumulation_dtype(f->dtype), 3,
                                            (int64_t[]){f->n, f->heads, f->l})};
    rapt_options options = case_options(f);
    options.lse = &r.lse;
    if (c->d_weights.data != NULL) {
        r.weights = make_tensor(f->dtype, c->d_weights.ndim, c->d_weights.shape);
        options.weights = &r.weights;
    }
    if (c->extra == 0) {
        assert_ok(context, rapt_attention_forward(context, &f->q, &f->k, &f->v, &options, &r.out));
        return r;
    }
    attn_problem p = make_problem(context, c, &r, &options);
    void *scratch = make_scratch(context->backend->attn_scratch(context, &p));
    context->backend->attn_forward(context, &p, scratch);
    free(scratch);
    return r;
}

static void backward_with_extra(rapt_context *context, const backward_case *c, const rapt_options *options,
                                backward_result *r) {
    rapt_options seen = *options;
    seen.weights = NULL;
    seen.per_head_weights = false;
    attn_problem p = make_problem(context, c, r, &seen);
    p.average_weights = !options->per_head_weights;
    attn_gradients g = {.accumulate = c->accumulate, .out = contiguous_view(&c->d_out)};
    g.out_dtype = g.q_dtype = g.k_dtype = g.v_dtype = p.dtype;
    if (c->d_weights.data != NULL) {
        assert_ok(context, rapt_take_weights(context, "d_weights", &c->d_weights, true, &p, &g.weights));
    }
    g.q = contiguous_view(&r->gradient[D_QUERY]);
    g.k = contiguous_view(&r->gradient[D_KEY]);
    g.v = contiguous_view(&r->gradient[D_VALUE]);
    g.extra_k = contiguous_view(&r->gradient[D_EXTRA_K]);
    g.extra_v = contiguous_view(&r->gradient[D_EXTRA_V]);
    assert_ok(context, rapt_take_mask_gradient(context, false, if_present(&r->gradient[D_MASK]), options->attn_mask, &p,
                                               &g.mask));
    assert_ok(context, rapt_take_mask_gradient(context, true, if_present(&r->gradient[D_PADDING]),
                                               options->key_padding_mask, &p, &g.padding));
    void *scratch = make_scratch(context->backend->attn_backward_scratch(context, &p, &g));
    context->backend->attn_backward(context, &p, &g, scratch);
    free(scratch);
}

backward_result run_backward_case(rapt_context *context, const backward_case *c) {
    const attention_case *f = &c->f;
    backward_result r = run_forward_of(context, c);
    for (int g = 0; g < GRADIENTS; g++) {
        r.gradient[g] = make_gradient(c, g);
        int64_t count = r.gradient[g].data != NULL ? rapt_tensor_count(&r.gradient[g]) : 0;
        for (int64_t i = 0; i < count; i++) set_element(&r.gradient[g], i, start_value(g, i));
    }
    rapt_options options = case_options(f);
    options.lse = &r.lse;
    if (c->extra > 0) {
        backward_with_extra(context, c, &options, &r);
        return r;
    }
    rapt_attention_gradients gradients = {.accumulate = c->accumulate,
                                          .query = if_present(&r.gradient[D_QUERY]),
                                          .key = if_present(&r.gradient[D_KEY]),
                                          .value = if_present(&r.gradient[D_VALUE]),
                                          .attn_mask = if_present(&r.gradient[D_MASK]),
                                          .key_padding_mask = if_present(&r.gradient[D_PADDING])};
    assert_ok(context, rapt_attention_backward(context, &f->q, &f->k, &f->v, &options, &r.out, &c->d_out,
                                               if_present(&c->d_weights), &gradients));
    return r;
}

void free_backward_result(backward_result *r) {
    free_tensor(&r->out);
    free_tensor(&r->lse);
    free_tensor(&r->weights);
    for (int g = 0; g < GRADIENTS; g++) free_tensor(&r->gradient[g]);
}

bool same_gradients(const backward_result *a, const backward_result *b) {
    bool same = true;
    for (int g = 0; g < GRADIENTS; g++) {
        if (a->gradient[g].data != NULL) same = same && same_bits(&a->gradient[g], &b->gradient[g]);
    }
    return same;
}
