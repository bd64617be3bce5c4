/* training_case.c - random layers and calls with everything that a backward goes through, and their gradients */
#include "training_case.h"

const char *const source_names[SOURCES] = {
    "query",         "key",           "value",         "attn_mask",       "key_padding_mask", "in_proj_weight",
    "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",    "q_proj_bias",      "k_proj_bias",
    "v_proj_bias",   "bias_k",        "bias_v",        "out_proj.weight", "out_proj.bias",
};

/* ---- cases ---- */

static rapt_mha_config random_config(test_random *random, rapt_dtype dtype, case_sizes most) {
    int64_t kv_heads = random_between(random, 1, most.kv_heads);
    int64_t heads = kv_heads * random_between(random, 1, most.group);
    rapt_mha_config config = rapt_mha_config_default(heads * random_between(random, 1, most.head_dim), heads);
    config.num_kv_heads = kv_heads;
    if (random_chance(random, 0.3)) config.head_dim = random_between(random, 1, most.head_dim);
    if (random_chance(random, most.whole_panels)) config.head_dim = 64 * random_between(random, 1, 2);
    if (random_chance(random, 0.3)) config.kdim = random_between(random, 1, 2 * most.head_dim);
    if (random_chance(random, 0.3)) config.vdim = random_between(random, 1, 2 * most.head_dim);
    config.bias = random_chance(random, 0.7);
    config.add_bias_kv = random_chance(random, 0.4);
    config.add_zero_attn = random_chance(random, 0.3);
    config.batch_first = random_chance(random, 0.5);
    config.causal = random_chance(random, 0.2);
    config.set_scale = random_chance(random, 0.2);
    config.scale = config.set_scale ? 0.2 + random_unit(random) : 0;
    config.dropout = random_chance(random, 0.3) ? 0.3 : 0;
    config.dtype = dtype;
    return config;
}

static rapt_tensor random_input(test_random *random, const training_case *c, int64_t length, int64_t features) {
    int64_t batch_first[3] = {c->n, length, features}, length_first[3] = {length, c->n, features};
    int64_t alone[2] = {length, features};
    const int64_t *shape = !c->batched ? alone : c->config.batch_first ? batch_first : length_first;
    rapt_tensor tensor = make_strided_tensor(random, c->config.dtype, c->batched ? 3 : 2, shape);
    fill_random(random, &tensor, 1.5);
    return tensor;
}

static void fill_mask(test_random *random, const rapt_tensor *mask) {
    int64_t count = rapt_tensor_count(mask);
    for (int64_t i = 0; i < count; i++) {
        bool masked = random_chance(random, 0.25);
        double value = masked ? -INFINITY : 2 * random_unit(random) - 1;
        set_element(mask, i, mask->dtype == RAPT_BOOL ? masked : value);
    }
}

static void choose_masks(test_random *random, training_case *c) {
    int64_t heads = c->config.num_heads;
    int64_t shapes[3][4] = {{c->l, c->s}, {c->n * heads, c->l, c->s}, {c->n, heads, c->l, c->s}};
    int kind = (int)random_between(random, 0, c->batched ? 2 : 1);
    for (int d = 0; kind == 2 && d < 3; d++) {
        if (random_chance(random, 0.4)) shapes[2][d] = 1;
    }
    rapt_dtype additive = c->config.dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32;
    if (random_chance(random, 0.5)) {
        c->mask = make_tensor(random_chance(random, 0.4) ? RAPT_BOOL : additive, kind + 2, shapes[kind]);
        fill_mask(random, &c->mask);
        c->options.attn_mask = &c->mask;
    }
    if (random_chance(random, 0.4)) {
        int64_t padding[2] = {c->n, c->s};
        bool of_all = !c->batched || random_chance(random, 0.2);
        c->padding = make_tensor(random_chance(random, 0.4) ? RAPT_BOOL : additive, of_all ? 1 : 2,
                                 of_all ? padding + 1 : padding);
        fill_mask(random, &c->padding);
        c->options.key_padding_mask = &c->padding;
    }
}

static void choose_band(test_random *random, training_case *c) {
    rapt_options *o = &c->options;
    o->align_bottom_right = random_chance(random, 0.2);
    o->limit_right = c->config.causal && !o->align_bottom_right; /* says how causal is aligned */
    o->limit_left = random_chance(random, 0.2);
    o->left = o->limit_left ? random_between(random, 0, c->s) : 0;
    for (int64_t n = 0; n < c->n; n++) {
        c->key_start[n] = random_between(random, 0, c->s / 2);
        c->key_lengths[n] = random_between(random, 0, c->s - c->key_start[n]);
        c->offsets[n] = random_between(random, -1, c->s);
    }
    if (random_chance(random, 0.2)) o->key_start = c->key_start;
    if (random_chance(random, 0.2)) {
        o->key_lengths = c->key_lengths;
        o->key_start = c->key_start;
    }
    if (!o->align_bottom_right && random_chance(random, 0.15)) o->offsets = c->offsets;
}

static void choose_rotary(test_random *random, training_case *c) {
    if (c->config.head_dim < 2 || !random_chance(random, 0.3)) return;
    c->rotary = rapt_rotary_default(100);
    c->rotary.interleaved = random_chance(random, 0.5);
    c->rotary.dims = 2 * random_between(random, 1, c->config.head_dim / 2);
    c->rotary.set_amplitude = random_chance(random, 0.5);
    c->rotary.amplitude = c->rotary.set_amplitude ? 1.3 : 0;
    c->options.rotary = &c->rotary;
}

void make_training_case(rapt_context *context, test_random *random, rapt_dtype dtype, case_sizes most,
                        training_case *c) {
    *c = (training_case){.config = random_config(random, dtype, most)};
    assert_ok(context, rapt_mha_create(context, &c->config, &c->layer));
    for (int32_t i = 0; i < rapt_mha_num_tensors(c->layer); i++) { /* biases, too */
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, c->layer, i, NULL, &view));
        fill_random(random, &view, view.ndim == 2 ? 2 / sqrt((double)view.shape[1]) : 0.7); /* scores stay small */
    }
    assert_ok(context, rapt_mha_commit(context, c->layer));
    c->config = *rapt_mha_settings(c->layer);
    c->extra = (c->config.add_bias_kv ? 1 : 0) + (c->config.add_zero_attn ? 1 : 0);
    c->batched = random_chance(random, 0.7);
    c->n = c->batched ? random_between(random, 1, 3) : 1;
    c->l = random_between(random, 1, most.length);
    bool one_width = c->config.kdim == c->config.embed_dim && c->config.vdim == c->config.embed_dim;
    c->self = one_width && random_chance(random, 0.6);
    c->s = c->self ? c->l : random_between(random, 1, most.length);
    c->query = random_input(random, c, c->l, c->config.embed_dim);
    if (!c->self) c->key = random_input(random, c, c->s, c->config.kdim);
    c->same_kv = c->self || (c->config.kdim == c->config.vdim && random_chance(random, 0.5));
    if (!c->same_kv) c->value = random_input(random, c, c->s, c->config.vdim);
    choose_masks(random, c);
    choose_band(random, c);
    choose_rotary(random, c);
    c->options.set_dropout_seed = true;
    c->options.dropout_seed = random_bits(random);
    c->options.dropout_offset = random_bits(random);

    c->d_out = random_input(random, c, c->l, c->config.embed_dim);
    c->returns_weights = random_chance(random, 0.4);
    if (c->returns_weights) {
        bool per_head = random_chance(random, 0.5);
        int64_t keys = c->s + c->extra, heads[4] = {c->n, c->config.num_heads, c->l, keys};
        int64_t averaged[3] = {c->n, c->l, keys};
        int skipped = c->batched ? 0 : 1;
        c->options.per_head_weights = per_head;
        c->d_weights =
            make_strided_tensor(random, dtype, (per_head ? 4 : 3) - skipped, (per_head ? heads : averaged) + skipped);
        fill_random(random, &c->d_weights, 1);
    }
}

void free_training_case(training_case *c) {
    rapt_tensor *tensors[] = {&c->query, &c->key, &c->value, &c->mask, &c->padding, &c->d_out, &c->d_weights};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) free_tensor(tensors[i]);
    rapt_mha_destroy(c->layer);
}

const rapt_tensor *key_of(const training_case *c) { return c->self ? &c->query : &c->key; }
const rapt_tensor *value_of(const training_case *c) { return c->same_kv ? key_of(c) : &c->value; }

void describe_training_case(const training_case *c, char *text, size_t size) {
    int used = rapt_mha_describe(c->layer, text, size);
    const rapt_options *o = &c->options;
    snprintf(text + used, size - (size_t)used,
             " N%d L%d S%d%s%s%s mask %s%d, padding %s%d, rotary %d, weights %d%d, left %d, bottom right %d, start %d, "
             "lengths %d, offsets %d",
             (int)c->n, (int)c->l, (int)c->s, c->batched ? "" : " unbatched", c->self ? " self" : "",
             c->same_kv ? " same_kv" : "", rapt_dtype_name(c->mask.dtype), c->mask.ndim,
             rapt_dtype_name(c->padding.dtype), c->padding.ndim, o->rotary != NULL, c->returns_weights,
             o->per_head_weights, o->limit_left, o->align_bottom_right, o->key_start != NULL, o->key_lengths != NULL,
             o->offsets != NULL);
}

/* ---- runs ---- */

training_result run_forward(rapt_context *context, const training_case *c, rapt_mha_state *state) {
    training_result result = {.out = make_tensor(c->config.dtype, c->query.ndim, c->query.shape)};
    rapt_options options = c->options;
    options.state = state;
    if (c->returns_weights) {
        result.weights = make_tensor(c->config.dtype, c->d_weights.ndim, c->d_weights.shape);
        options.weights = &result.weights;
    }
    assert_ok(context, rapt_mha_forward(context, c->layer, &c->query, key_of(c), value_of(c), &options, &result.out));
    return result;
}

void free_training_result(training_result *result) {
    free_tensor(&result->out);
    free_tensor(&result->weights);
}

/* ---- gradients ---- */

rapt_tensor source_of(rapt_context *context, const training_case *c, source which) {
    const rapt_tensor *inputs[] = {&c->query, key_of(c), value_of(c), &c->mask, &c->padding};
    if (which <= KEY_PADDING_MASK) return *inputs[which];
    rapt_tensor view = {0};
    rapt_status status = rapt_mha_find(context, c->layer, source_names[which], &view);
    if (status != RAPT_ERROR_ABSENT) assert_ok(context, status);
    return view;
}

void make_gradients(test_random *random, const training_case *c, int style, double value, gradient_set *set) {
    *set = (gradient_set){0};
    rapt_mha_gradients *g = &set->gradients;
    const rapt_tensor **given[SOURCES] = {
        &g->query,           &g->key,           &g->value,         &g->attn_mask,     &g->key_padding_mask,
        &g->in_proj_weight,  &g->q_proj_weight, &g->k_proj_weight, &g->v_proj_weight, &g->in_proj_bias,
        &g->q_proj_bias,     &g->k_proj_bias,   &g->v_proj_bias,   &g->bias_k,        &g->bias_v,
        &g->out_proj_weight, &g->out_proj_bias};
    rapt_context *context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE); /* for its messages */
    bool fuses = (style & APART) == 0 && source_of(context, c, IN_PROJ_WEIGHT).data != NULL;
    for (int i = 0; i < SOURCES; i++) {
        rapt_tensor like = source_of(context, c, (source)i);
        bool is_fused_one = i == IN_PROJ_WEIGHT || i == IN_PROJ_BIAS;
        bool is_separate = (i >= Q_PROJ_WEIGHT && i <= V_PROJ_WEIGHT) || (i >= Q_PROJ_BIAS && i <= V_PROJ_BIAS);
        if (like.data == NULL || like.dtype == RAPT_BOOL) continue;
        if ((is_fused_one && !fuses) || (is_separate && fuses)) continue;
        bool shares = (style & PER_INPUT) == 0 && ((i == KEY && c->self) || (i == VALUE && c->same_kv));
        if (!shares) {
            set->tensor[i] = make_strided_tensor(random, like.dtype, like.ndim, like.shape);
            fill_value(&set->tensor[i], value);
            *given[i] = &set->tensor[i];
        } else {
            *given[i] = *given[i - 1];
        }
    }
    rapt_context_destroy(context);
}

void free_gradients(gradient_set *set) {
    for (int i = 0; i < SOURCES; i++) free_tensor(&set->tensor[i]);
}

bool same_layer_gradients(const gradient_set *a, const gradient_set *b) {
    for (int i = 0; i < SOURCES; i++) {
        if ((a->tensor[i].data == NULL) != (b->tensor[i].data == NULL)) return false;
        if (a->tensor[i].data != NULL && !same_bits(&a->tensor[i], &b->tensor[i])) return false;
    }
    return true;
}
