/* test_golden.c - every case of the golden files, which PyTorch computed (golden/make_golden.py)
 *
 * Expected values are f64, computed from inputs that f32 holds exactly. A result may differ from them by
 *
 *     tolerance * max(1, largest score) * largest expected value
 *
 * with a tolerance of 5e-7 in f32 and 3e-15 in f64. The largest |query * key^T * scale| over all pairs, before masks,
 * is part of it because a score is rounded relative to its size and exp() turns that into a relative error of a weight.
 * Masks are left out: the finite ones are small, but for -1e9, which takes its key out of the sum. A log-sum-exp may
 * differ by tolerance * max(1, largest score): it is as large as the scores. Gradients of the operator are differences of
 * products of d_out and value, times scale and key or query: they may differ relative to the largest of those. Those of
 * the layer are compared with the largest of all gradients of the case: some are zero but for rounding.
 */
#include "backward_case.h"

enum { NAME_SIZE = 64 };
static const double TOLERANCE_F32 = 5e-7, TOLERANCE_F64 = 3e-15;

/* ---- golden files ---- */

typedef struct golden {
    rapt_context *reader;
    rapt_safetensors *file;
    const char *rest; /* of the metadata's case names, one a line */
    char name[NAME_SIZE];
    const char *settings; /* of the case `name` */
} golden;

static golden open_golden(const char *file_name) {
    golden g = {.reader = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU)};
    char path[1024];
    snprintf(path, sizeof path, "%s/tests/golden/%s", RAPT_SOURCE_DIR, file_name);
    assert_ok(g.reader, rapt_safetensors_open(g.reader, path, &g.file));
    g.rest = rapt_safetensors_metadata(g.file, "cases");
    assert_non_null(g.rest);
    return g;
}

static void close_golden(golden *g) {
    rapt_safetensors_close(g->file);
    rapt_context_destroy(g->reader);
}

static void find_settings(golden *g) {
    char key[NAME_SIZE + 8];
    snprintf(key, sizeof key, "case.%s", g->name);
    g->settings = rapt_safetensors_metadata(g->file, key);
    if (g->settings == NULL) fail_msg("no metadata %s", key);
}

/* Moves on to the next case; false behind the last. */
static bool next_case(golden *g) {
    if (*g->rest == '\0') return false;
    size_t length = strcspn(g->rest, "\n");
    assert_in_range(length, 1, NAME_SIZE - 1);
    memcpy(g->name, g->rest, length);
    g->name[length] = '\0';
    g->rest += length + (g->rest[length] == '\n');
    find_settings(g);
    return true;
}

static void pick_case(golden *g, const char *name) {
    snprintf(g->name, sizeof g->name, "%s", name);
    find_settings(g);
}

/* The value of key in a line of key=value. */
static double setting(const golden *g, const char *key) {
    size_t length = strlen(key);
    for (const char *word = g->settings; *word != '\0'; word += strcspn(word, " "), word += *word == ' ') {
        if (strncmp(word, key, length) == 0 && word[length] == '=') return strtod(word + length + 1, NULL);
    }
    fail_msg("%s: no setting %s", g->name, key);
    return 0;
}
static int64_t size_setting(const golden *g, const char *key) { return (int64_t)setting(g, key); }
static bool bool_setting(const golden *g, const char *key) { return setting(g, key) != 0; }

/* A copy of a tensor of the case; {0} if it has none of that name. dtype 0 keeps the stored one, and bool stays. */
static rapt_tensor load_tensor(const golden *g, const char *tensor_name, rapt_dtype dtype) {
    char name[2 * NAME_SIZE];
    snprintf(name, sizeof name, "%s.%s", g->name, tensor_name);
    rapt_tensor stored;
    rapt_status status = rapt_safetensors_find(g->reader, g->file, name, &stored);
    if (status == RAPT_ERROR_ABSENT) return (rapt_tensor){0};
    assert_ok(g->reader, status);
    bool keep = dtype == (rapt_dtype)0 || stored.dtype == RAPT_BOOL;
    rapt_tensor copy = make_tensor(keep ? stored.dtype : dtype, stored.ndim, stored.shape);
    assert_ok(g->reader, rapt_tensor_copy(g->reader, &stored, &copy));
    return copy;
}

static const rapt_tensor *if_present(const rapt_tensor *tensor) { return tensor->data != NULL ? tensor : NULL; }

/* ---- runs and their comparison ---- */

typedef struct run {
    rapt_context *context;
    rapt_dtype dtype;
    double tolerance;
    double worst; /* the largest difference seen, as a share of the largest value, for max(1, largest score) = 1 */
    int cases;
} run;

static run start_run(rapt_backend backend, rapt_dtype dtype, double tolerance) {
    return (run){.context = make_context(2, RAPT_ISA_AUTO, backend), .dtype = dtype, .tolerance = tolerance};
}

static void end_run(run *r, const char *what) {
    print_message("%s, %s, %s: %d cases, largest difference %.2g of %.2g\n", what,
                  rapt_context_backend(r->context) == RAPT_BACKEND_CPU ? "cpu" : "reference", rapt_dtype_name(r->dtype),
                  r->cases, r->worst, r->tolerance);
    rapt_context_destroy(r->context);
}

/* `unit` is what the difference is relative to. */
static void compare(run *r, const golden *g, const char *what, const rapt_tensor *actual, const rapt_tensor *expected,
                    double unit) {
    assert_int_equal(actual->ndim, expected->ndim);
    for (int32_t d = 0; d < actual->ndim; d++) assert_int_equal(actual->shape[d], expected->shape[d]);
    double difference = largest_difference(actual, expected);
    if (!(difference <= r->tolerance * unit)) {
        fail_msg("%s (%s): %s differs by %g, more than %g", g->name, rapt_dtype_name(r->dtype), what, difference,
                 r->tolerance * unit);
    }
    if (difference / unit > r->worst) r->worst = difference / unit;
}

typedef struct head_sizes {
    int64_t n, heads, kv_heads, l, s, d;
} head_sizes;

/* query [N, L, H*D] and key [N, S, Hk*D] as plain arrays; at least 1. */
static double largest_score(const double *query, const double *key, head_sizes z, double scale) {
    double largest = 1;
    int64_t group = z.heads / z.kv_heads;
    for (int64_t pair = 0; pair < z.n * z.heads * z.l * z.s; pair++) {
        int64_t j = pair % z.s, i = pair / z.s % z.l, h = pair / z.s / z.l % z.heads, n = pair / z.s / z.l / z.heads;
        const double *q = query + ((n * z.l + i) * z.heads + h) * z.d;
        const double *k = key + ((n * z.s + j) * z.kv_heads + h / group) * z.d;
        double sum = 0;
        for (int64_t d = 0; d < z.d; d++) sum += q[d] * k[d];
        largest = fmax(largest, fabs(sum * scale));
    }
    return largest;
}

static double *allocate_doubles(int64_t count) {
    double *values = calloc((size_t)count + 1, sizeof *values);
    assert_non_null(values);
    return values;
}

/* Heads [N, H, L, D] (or [N*H, L, D]) as an array [N, L, H*D]. */
static double *array_of_heads(const rapt_tensor *tensor, int64_t heads, int64_t length, int64_t dim) {
    int64_t count = rapt_tensor_count(tensor);
    double *rows = allocate_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        int64_t d = i % dim, l = i / dim % length, h = i / dim / length % heads, n = i / dim / length / heads;
        rows[((n * length + l) * heads + h) * dim + d] = get_element(tensor, i);
    }
    return rows;
}

/* ---- layer cases ---- */

enum {
    QUERY,
    KEY,
    VALUE,
    STATIC_K,
    STATIC_V,
    ATTN_MASK,
    KEY_PADDING_MASK,
    FIRST_PARAMETER,
    IN_PROJ_WEIGHT = FIRST_PARAMETER,
    Q_PROJ_WEIGHT,
    K_PROJ_WEIGHT,
    V_PROJ_WEIGHT,
    IN_PROJ_BIAS,
    BIAS_K,
    BIAS_V,
    OUT_PROJ_WEIGHT,
    OUT_PROJ_BIAS,
    TENSORS
};
static const char *const tensor_names[TENSORS] = {
    "query",
    "key",
    "value",
    "static_k",
    "static_v",
    "attn_mask",
    "key_padding_mask",
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "out_proj.weight",
    "out_proj.bias",
};

typedef struct layer_case {
    rapt_mha_config config;
    bool unbatched, static_kv, causal;
    rapt_tensor tensor[TENSORS];
    const rapt_tensor *key, *value;
    rapt_options options; /* without causal and results */
    bool per_head, need_weights;
    rapt_tensor expected_out, expected_weights;
    rapt_tensor d_out, d_weights; /* d_weights may be absent */
    rapt_tensor expected_gradient[TENSORS];
    double score;
    double largest_gradient;
} layer_case;

static int64_t batch_of(const layer_case *c) {
    return c->unbatched ? 1 : c->tensor[QUERY].shape[c->config.batch_first ? 0 : 1];
}
static int64_t length_of(const layer_case *c, const rapt_tensor *x) {
    return x->shape[!c->unbatched && c->config.batch_first ? 1 : 0];
}

/* Rows of the fused weight, or a separate weight, applied to x: an array [N, length, rows]. */
static double *project(const layer_case *c, const rapt_tensor *x, int separate_weight, int64_t first, int64_t rows) {
    bool fused = c->tensor[IN_PROJ_WEIGHT].data != NULL;
    const rapt_tensor *weight = &c->tensor[fused ? IN_PROJ_WEIGHT : separate_weight], *bias = &c->tensor[IN_PROJ_BIAS];
    int64_t batch = batch_of(c), length = length_of(c, x), inputs = weight->shape[1];
    double *y = allocate_doubles(batch * length * rows);
    for (int64_t i = 0; i < batch * length * rows; i++) {
        int64_t row = i % rows, l = i / rows % length, n = i / rows / length;
        int64_t token = c->config.batch_first ? n * length + l : l * batch + n, from = fused ? first + row : row;
        y[i] = bias->data != NULL ? get_element(bias, first + row) : 0;
        for (int64_t e = 0; e < inputs; e++) {
            y[i] += get_element(weight, from * inputs + e) * get_element(x, token * inputs + e);
        }
    }
    return y;
}

static double layer_score(const layer_case *c) {
    const rapt_mha_config *k = &c->config;
    const rapt_tensor *key = c->static_kv ? NULL : c->key;
    int64_t q_rows = k->num_heads * k->head_dim, kv_rows = k->num_kv_heads * k->head_dim;
    head_sizes z = {.n = batch_of(c),
                    .heads = k->num_heads,
                    .kv_heads = k->num_kv_heads,
                    .d = k->head_dim,
                    .l = length_of(c, &c->tensor[QUERY]),
                    .s = key ? length_of(c, key) : c->tensor[STATIC_K].shape[1]};
    double *q = project(c, &c->tensor[QUERY], Q_PROJ_WEIGHT, 0, q_rows);
    double *keys = key != NULL ? project(c, key, K_PROJ_WEIGHT, q_rows, kv_rows)
                               : array_of_heads(&c->tensor[STATIC_K], z.kv_heads, z.s, z.d);
    double score = largest_score(q, keys, z, 1 / sqrt((double)z.d));
    free(q);
    free(keys);
    return score;
}

/* Fills in *c, which must not move afterwards: it points into itself. */
static void load_layer_case(const golden *g, rapt_dtype dtype, layer_case *c) {
    *c = (layer_case){.config = rapt_mha_config_default(size_setting(g, "embed_dim"), size_setting(g, "num_heads"))};
    c->config.num_kv_heads = size_setting(g, "num_kv_heads");
    c->config.head_dim = size_setting(g, "head_dim");
    c->config.kdim = size_setting(g, "kdim");
    c->config.vdim = size_setting(g, "vdim");
    c->config.bias = bool_setting(g, "bias");
    c->config.add_bias_kv = bool_setting(g, "add_bias_kv");
    c->config.add_zero_attn = bool_setting(g, "add_zero_attn");
    c->config.batch_first = bool_setting(g, "batch_first");
    c->config.dtype = dtype;
    c->causal = bool_setting(g, "causal");
    c->unbatched = bool_setting(g, "unbatched");
    c->static_kv = bool_setting(g, "static_kv");
    c->need_weights = bool_setting(g, "need_weights");
    c->per_head = !bool_setting(g, "average");
    for (int t = 0; t < TENSORS; t++) { /* masks stay f32 or bool: a float mask may be of any floating-point type */
        bool is_mask = t == ATTN_MASK || t == KEY_PADDING_MASK;
        c->tensor[t] = load_tensor(g, tensor_names[t], is_mask ? (rapt_dtype)0 : dtype);
    }
    bool self = bool_setting(g, "self"), same_kv = bool_setting(g, "same_kv");
    c->key = self ? &c->tensor[QUERY] : if_present(&c->tensor[KEY]);
    c->value = same_kv ? c->key : if_present(&c->tensor[VALUE]);
    assert_true((c->key == NULL) == c->static_kv && (c->value == NULL) == c->static_kv);
    assert_true((c->tensor[STATIC_K].data != NULL) == c->static_kv);
    c->options.attn_mask = if_present(&c->tensor[ATTN_MASK]);
    c->options.key_padding_mask = if_present(&c->tensor[KEY_PADDING_MASK]);
    c->options.static_k = if_present(&c->tensor[STATIC_K]);
    c->options.static_v = if_present(&c->tensor[STATIC_V]);
    c->expected_out = load_tensor(g, "out", RAPT_F64);
    c->expected_weights = load_tensor(g, "weights", RAPT_F64);
    assert_non_null(c->expected_out.data);
    assert_true((c->expected_weights.data != NULL) == c->need_weights);
    c->d_out = load_tensor(g, "grad_out", dtype);
    c->d_weights = load_tensor(g, "grad_weights", dtype);
    for (int t = 0; t < TENSORS; t++) {
        char name[NAME_SIZE];
        snprintf(name, sizeof name, "grad.%s", tensor_names[t]);
        c->expected_gradient[t] = load_tensor(g, name, RAPT_F64);
        bool is_float = c->tensor[t].data != NULL && c->tensor[t].dtype != RAPT_BOOL;
        assert_true(is_float == (c->expected_gradient[t].data != NULL));
        if (is_float) c->largest_gradient = fmax(c->largest_gradient, largest_magnitude(&c->expected_gradient[t]));
    }
    c->score = layer_score(c);
}

static void free_layer_case(layer_case *c) {
    for (int t = 0; t < TENSORS; t++) {
        free_tensor(&c->tensor[t]);
        free_tensor(&c->expected_gradient[t]);
    }
    rapt_tensor *others[] = {&c->expected_out, &c->expected_weights, &c->d_out, &c->d_weights};
    for (int i = 0; i < 4; i++) free_tensor(others[i]);
}

static rapt_mha_weights weights_of(const layer_case *c) {
    rapt_mha_weights w = rapt_mha_weights_default(c->config.num_heads);
    w.add_zero_attn = c->config.add_zero_attn;
    w.batch_first = c->config.batch_first;
    w.in_proj_weight = if_present(&c->tensor[IN_PROJ_WEIGHT]);
    w.q_proj_weight = if_present(&c->tensor[Q_PROJ_WEIGHT]);
    w.k_proj_weight = if_present(&c->tensor[K_PROJ_WEIGHT]);
    w.v_proj_weight = if_present(&c->tensor[V_PROJ_WEIGHT]);
    w.in_proj_bias = if_present(&c->tensor[IN_PROJ_BIAS]);
    w.bias_k = if_present(&c->tensor[BIAS_K]);
    w.bias_v = if_present(&c->tensor[BIAS_V]);
    w.out_proj_weight = if_present(&c->tensor[OUT_PROJ_WEIGHT]);
    w.out_proj_bias = if_present(&c->tensor[OUT_PROJ_BIAS]);
    if (w.in_proj_weight != NULL) w.num_kv_heads = c->config.num_kv_heads; /* separate weights tell by their rows */
    return w;
}

/* A new layer of the case's settings, its parameters written over. */
static rapt_mha *make_and_write(rapt_context *context, const layer_case *c) {
    rapt_mha_config config = c->config;
    config.causal = c->causal; /* here by the layer, elsewhere by the call */
    config.seed = 1;
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create(context, &config, &layer));
    int32_t written = 0;
    for (int t = FIRST_PARAMETER; t < TENSORS; t++) {
        if (c->tensor[t].data == NULL) continue;
        rapt_tensor view;
        assert_ok(context, rapt_mha_find(context, layer, tensor_names[t], &view));
        assert_ok(context, rapt_tensor_copy(context, &c->tensor[t], &view));
        written++;
    }
    assert_int_equal(written, rapt_mha_num_tensors(layer)); /* exactly the state dict's tensors */
    assert_ok(context, rapt_mha_commit(context, layer));
    return layer;
}

typedef enum way { WRITTEN, BORROWED, COPIED, FUNCTIONAL, WAYS } way;
static const char *const way_names[WAYS] = {"written layer", "borrowed layer", "copied layer", "functional"};

typedef struct layer_run {
    rapt_tensor out, weights; /* weights may be absent */
    rapt_tensor gradient[TENSORS];
} layer_run;

/* Gradients of all that has one: inputs that are one tensor share one, as they do in PyTorch. */
static rapt_mha_gradients make_gradients(const layer_case *c, rapt_tensor gradient[TENSORS]) {
    for (int t = 0; t < TENSORS; t++) {
        const rapt_tensor *like = &c->expected_gradient[t];
        gradient[t] = (rapt_tensor){0};
        if (like->data == NULL) continue;
        bool is_mask = t == ATTN_MASK || t == KEY_PADDING_MASK;
        rapt_dtype wide = c->config.dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32;
        gradient[t] = make_tensor(is_mask ? wide : c->config.dtype, like->ndim, like->shape);
        fill_value(&gradient[t], NAN);
    }
    rapt_mha_gradients g = {.query = &gradient[QUERY]};
    g.key = c->key == &c->tensor[QUERY] ? &gradient[QUERY] : if_present(&gradient[KEY]);
    g.value = c->value == c->key ? g.key : if_present(&gradient[VALUE]);
    g.attn_mask = if_present(&gradient[ATTN_MASK]);
    g.key_padding_mask = if_present(&gradient[KEY_PADDING_MASK]);
    g.static_k = if_present(&gradient[STATIC_K]);
    g.static_v = if_present(&gradient[STATIC_V]);
    g.in_proj_weight = if_present(&gradient[IN_PROJ_WEIGHT]);
    g.q_proj_weight = if_present(&gradient[Q_PROJ_WEIGHT]);
    g.k_proj_weight = if_present(&gradient[K_PROJ_WEIGHT]);
    g.v_proj_weight = if_present(&gradient[V_PROJ_WEIGHT]);
    g.in_proj_bias = if_present(&gradient[IN_PROJ_BIAS]);
    g.bias_k = if_present(&gradient[BIAS_K]);
    g.bias_v = if_present(&gradient[BIAS_V]);
    g.out_proj_weight = if_present(&gradient[OUT_PROJ_WEIGHT]);
    g.out_proj_bias = if_present(&gradient[OUT_PROJ_BIAS]);
    return g;
}

static layer_run run_layer_case(rapt_context *context, const layer_case *c, way by) {
    const rapt_tensor *query = &c->tensor[QUERY], *d_weights = if_present(&c->d_weights);
    layer_run r = {.out = make_tensor(c->config.dtype, query->ndim, query->shape)};
    fill_value(&r.out, NAN);
    rapt_options options = c->options;
    options.causal = c->causal && by != WRITTEN;
    if (c->need_weights) {
        r.weights = make_tensor(c->config.dtype, c->expected_weights.ndim, c->expected_weights.shape);
        fill_value(&r.weights, NAN);
        options.weights = &r.weights;
        options.per_head_weights = c->per_head;
    }
    rapt_mha_weights ready = weights_of(c);
    rapt_mha_gradients gradients = make_gradients(c, r.gradient);
    assert_ok(context, rapt_mha_state_create(context, &options.state));
    if (by == FUNCTIONAL) {
        assert_ok(context, rapt_mha_functional(context, &ready, query, c->key, c->value, &options, &r.out));
        assert_ok(context,
                  rapt_mha_functional_backward(context, &ready, options.state, &c->d_out, d_weights, &gradients));
        rapt_mha_state_destroy(options.state);
        return r;
    }
    rapt_mha *layer;
    if (by == WRITTEN) {
        layer = make_and_write(context, c);
    } else {
        rapt_ownership ownership = by == BORROWED ? RAPT_BORROW : RAPT_COPY;
        assert_ok(context, rapt_mha_create_from_weights(context, &ready, ownership, &layer));
    }
    const rapt_mha_config *settings = rapt_mha_settings(layer);
    assert_int_equal(settings->num_kv_heads, c->config.num_kv_heads);
    assert_int_equal(settings->head_dim, c->config.head_dim);
    assert_ok(context, rapt_mha_forward(context, layer, query, c->key, c->value, &options, &r.out));
    assert_ok(context, rapt_mha_backward(context, layer, options.state, &c->d_out, d_weights, &gradients));
    rapt_mha_state_destroy(options.state);
    rapt_mha_destroy(layer);
    return r;
}

static void free_layer_run(layer_run *r) {
    free_tensor(&r->out);
    free_tensor(&r->weights);
    for (int t = 0; t < TENSORS; t++) free_tensor(&r->gradient[t]);
}

static void assert_same(const golden *g, const char *what, const rapt_tensor *a, const rapt_tensor *b, int by,
                        int first) {
    if (!same_bits(a, b)) fail_msg("%s: %s of %s and %s differ", g->name, what, way_names[by], way_names[first]);
}

static void check_layer_case(run *r, const golden *g) {
    layer_case c;
    load_layer_case(g, r->dtype, &c);
    layer_run runs[WAYS];
    int first = c.static_kv ? FUNCTIONAL : WRITTEN; /* a layer takes no ready keys */
    for (int by = first; by < WAYS; by++) {
        const layer_run *x = &runs[by], *y = &runs[first];
        runs[by] = run_layer_case(r->context, &c, (way)by);
        compare(r, g, way_names[by], &x->out, &c.expected_out, largest_magnitude(&c.expected_out) * c.score);
        assert_same(g, "out", &x->out, &y->out, by, first);
        for (int t = 0; t < TENSORS; t++) {
            if (x->gradient[t].data == NULL) continue;
            compare(r, g, tensor_names[t], &x->gradient[t], &c.expected_gradient[t], c.largest_gradient * c.score);
            assert_same(g, tensor_names[t], &x->gradient[t], &y->gradient[t], by, first);
        }
        if (!c.need_weights) continue;
        compare(r, g, "weights", &x->weights, &c.expected_weights, largest_magnitude(&c.expected_weights) * c.score);
        assert_same(g, "weights", &x->weights, &y->weights, by, first);
    }
    for (int by = first; by < WAYS; by++) free_layer_run(&runs[by]);
    free_layer_case(&c);
    r->cases++;
}

/* ---- operator cases ---- */

/* The backward of a case, with the forward's arguments and result. */
static void check_operator_gradients(run *r, const golden *g, const rapt_tensor *query, const rapt_tensor *key,
                                     const rapt_tensor *value, const rapt_options *options, const rapt_tensor *out,
                                     double score) {
    const rapt_tensor *inputs[] = {query, key, value, options->attn_mask};
    static const char *const names[] = {"grad.query", "grad.key", "grad.value", "grad.attn_mask"};
    rapt_tensor grad_out = load_tensor(g, "grad_out", r->dtype), expected[4], actual[4];
    for (int i = 0; i < 4; i++) {
        expected[i] = load_tensor(g, names[i], RAPT_F64);
        actual[i] = (rapt_tensor){0};
        rapt_dtype dtype = i < 3 ? r->dtype : rapt_accumulation_dtype(r->dtype);
        if (expected[i].data != NULL) actual[i] = make_tensor(dtype, inputs[i]->ndim, inputs[i]->shape);
    }
    rapt_attention_gradients gradients = {.query = if_present(&actual[0]),
                                          .key = if_present(&actual[1]),
                                          .value = if_present(&actual[2]),
                                          .attn_mask = if_present(&actual[3])};
    assert_ok(r->context,
              rapt_attention_backward(r->context, query, key, value, options, out, &grad_out, NULL, &gradients));
    double product = sqrt((double)value->shape[3]) * largest_magnitude(&grad_out) * largest_magnitude(value);
    double scaled = fabs(setting(g, "scale")) * product;
    double units[4] = {scaled * largest_magnitude(key), scaled * largest_magnitude(query), largest_magnitude(&grad_out),
                       product};
    for (int i = 0; i < 4; i++) {
        if (expected[i].data == NULL) continue;
        compare(r, g, names[i], &actual[i], &expected[i], fmax(units[i], largest_magnitude(&expected[i])) * score);
        free_tensor(&expected[i]);
        free_tensor(&actual[i]);
    }
    free_tensor(&grad_out);
}

static void check_operator_case(run *r, const golden *g) {
    head_sizes z = {.n = size_setting(g, "n"),
                    .heads = size_setting(g, "heads"),
                    .kv_heads = size_setting(g, "kv_heads"),
                    .l = size_setting(g, "l"),
                    .s = size_setting(g, "s"),
                    .d = size_setting(g, "d")};
    rapt_tensor query = load_tensor(g, "query", r->dtype), key = load_tensor(g, "key", r->dtype);
    rapt_tensor value = load_tensor(g, "value", r->dtype), mask = load_tensor(g, "attn_mask", (rapt_dtype)0);
    rapt_tensor expected_out = load_tensor(g, "out", RAPT_F64), expected_lse = load_tensor(g, "lse", RAPT_F64);
    int64_t shape[4] = {z.n, z.heads, z.l, size_setting(g, "dv")};
    rapt_tensor out = make_tensor(r->dtype, 4, shape),
                lse = make_tensor(r->dtype == RAPT_F64 ? RAPT_F64 : RAPT_F32, 3, shape);
    fill_value(&out, NAN);
    fill_value(&lse, NAN);
    rapt_options options = {.attn_mask = if_present(&mask),
                            .causal = bool_setting(g, "causal"),
                            .lse = &lse,
                            .set_scale = bool_setting(g, "set_scale")};
    if (options.set_scale) options.scale = setting(g, "scale");
    assert_ok(r->context, rapt_attention_forward(r->context, &query, &key, &value, &options, &out));

    double *q = array_of_heads(&query, z.heads, z.l, z.d), *k = array_of_heads(&key, z.kv_heads, z.s, z.d);
    double score = largest_score(q, k, z, setting(g, "scale"));
    compare(r, g, "out", &out, &expected_out, largest_magnitude(&expected_out) * score);
    compare(r, g, "lse", &lse, &expected_lse, score);
    if (has_backward(r->context)) {
        check_operator_gradients(r, g, &query, &key, &value, &options, &out, score);
    } else if (r->cases == 0) {
        print_message("the CPU backend has no backward yet: gradients are not compared\n");
    }
    free(q);
    free(k);
    rapt_tensor *all[] = {&query, &key, &value, &mask, &expected_out, &expected_lse, &out, &lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_tensor(all[i]);
    r->cases++;
}

/* ---- the tests ---- */

typedef void (*case_check)(run *r, const golden *g);

static int count_listed_cases(const char *file_name) {
    golden g = open_golden(file_name);
    int listed = 0, stored = 0;
    while (next_case(&g)) listed++;
    for (int64_t i = 0; i < rapt_safetensors_count(g.file); i++) { /* each has one tensor CASE.out */
        const char *name = rapt_safetensors_name(g.file, i), *dot = strchr(name, '.');
        if (dot != NULL && strcmp(dot, ".out") == 0) stored++;
    }
    assert_int_equal(listed, stored);
    close_golden(&g);
    return listed;
}

static void test_files_hold_enough_cases(void **state) {
    (void)state;
    int layer_cases = count_listed_cases("mha.safetensors"), operator_cases = count_listed_cases("sdpa.safetensors");
    assert_in_range(layer_cases + operator_cases, 60, 10000);
    assert_int_equal(layer_cases + operator_cases, 142); /* raise it with new cases: none may get lost */
}

static void run_all(const char *file_name, case_check check, rapt_backend backend, rapt_dtype dtype, double tolerance) {
    golden g = open_golden(file_name);
    run r = start_run(backend, dtype, tolerance);
    while (next_case(&g)) check(&r, &g);
    assert_int_equal(r.cases, count_listed_cases(file_name));
    end_run(&r, file_name);
    close_golden(&g);
}

static void test_layer_f32(void **state) {
    (void)state;
    run_all("mha.safetensors", check_layer_case, RAPT_BACKEND_CPU, RAPT_F32, TOLERANCE_F32);
}
static void test_layer_f64(void **state) {
    (void)state;
    run_all("mha.safetensors", check_layer_case, RAPT_BACKEND_CPU, RAPT_F64, TOLERANCE_F64);
}
static void test_layer_reference(void **state) {
    (void)state;
    run_all("mha.safetensors", check_layer_case, RAPT_BACKEND_REFERENCE, RAPT_F64, TOLERANCE_F64);
}
static void test_operator_f32(void **state) {
    (void)state;
    run_all("sdpa.safetensors", check_operator_case, RAPT_BACKEND_CPU, RAPT_F32, TOLERANCE_F32);
}
static void test_operator_f64(void **state) {
    (void)state;
    run_all("sdpa.safetensors", check_operator_case, RAPT_BACKEND_CPU, RAPT_F64, TOLERANCE_F64);
}
static void test_operator_reference(void **state) {
    (void)state;
    run_all("sdpa.safetensors", check_operator_case, RAPT_BACKEND_REFERENCE, RAPT_F64, TOLERANCE_F64);
}

/* 16-bit storage: inputs, weights and all tensors in between are rounded to 8 bits (bf16) or 11 bits (f16), so results
 * are some units of 2^-8 or 2^-11 away from those of the unrounded inputs. Two units, by the rule above, tell rounding
 * from a wrong type, stride or bit pattern. */
static void check_some(rapt_dtype dtype, double tolerance) {
    static const char *const layers[] = {"self_basic",           "cross_different", "kdim_vdim", "bias_kv_zero_attn",
                                         "causal_padding_float", "gqa_causal",      "static_kv"};
    static const char *const operators[] = {"basic", "gqa_causal", "mask_float_inf", "dv_larger", "s300"};
    static const rapt_backend backends[] = {RAPT_BACKEND_CPU, RAPT_BACKEND_REFERENCE};
    golden layer_file = open_golden("mha.safetensors"), operator_file = open_golden("sdpa.safetensors");
    for (size_t b = 0; b < 2; b++) {
        run r = start_run(backends[b], dtype, tolerance);
        for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
            pick_case(&layer_file, layers[i]);
            check_layer_case(&r, &layer_file);
        }
        for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
            pick_case(&operator_file, operators[i]);
            check_operator_case(&r, &operator_file);
        }
        end_run(&r, "16-bit storage");
    }
    close_golden(&layer_file);
    close_golden(&operator_file);
}

static void test_bf16(void **state) {
    (void)state;
    check_some(RAPT_BF16, 2 * 0x1p-8);
}
static void test_f16(void **state) {
    (void)state;
    check_some(RAPT_F16, 2 * 0x1p-11);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files_hold_enough_cases),
        cmocka_unit_test(test_layer_f32),
        cmocka_unit_test(test_layer_f64),
        cmocka_unit_test(test_layer_reference),
        cmocka_unit_test(test_operator_f32),
        cmocka_unit_test(test_operator_f64),
        cmocka_unit_test(test_operator_reference),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
    };
    return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
