/* forward.c - rapt run and rapt check: one forward of a layer in a checkpoint */
#include "layer.h"

#include "commands.h"
#include "files.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

const option input_options[] = {
    {"--input", "FILE", "query, and key and value if the file has no others; FILE:NAME picks a tensor"},
    {"--key", "FILE", "another key, and value"},
    {"--value", "FILE", "another value"},
    {"--seq-first", NULL, "batches are [L,N,E], not [N,L,E]"},
    {"--causal", NULL, "a query sees no later key"},
    {"--window", "W", "a query sees W keys before its own and W after it; LEFT,RIGHT sets them apart"},
    {"--mask", "FILE", "[L,S], [N*H,L,S] or [N,H,L,S]: bool, true hides; or numbers, added to the scores"},
    {"--padding", "FILE", "[N,S]: the same for keys"},
    {0},
};

const option run_options[] = {
    {"--output", "FILE", "write the output, as .npy or .safetensors"},
    {"--weights", "FILE", "write the attention weights of every head, [N,H,L,S]"},
    {"--json", NULL, "print JSON"},
    {0},
};

const option check_options[] = {
    {"--expect", "FILE", "what the output should be"},
    {"--expect-weights", "FILE", "what the weights of every head should be"},
    {"--tolerance", "T", "largest difference allowed, as a share of the largest value expected"},
    {"--json", NULL, "print JSON"},
    {0},
};

/* ---- the forward ---- */

/* Layers are loaded batch first, so that with --seq-first their first two dimensions are exchanged. */
static rapt_tensor batch_first_view(const rapt_tensor *tensor, bool seq_first) {
    rapt_tensor view = *tensor;
    if (seq_first && tensor->ndim == 3) check(rapt_tensor_transpose(ctx, tensor, 0, 1, &view));
    return view;
}

static void read_all_inputs(const arguments *a, forward *f) {
    const char *input = text_option(a, "--input"), *key = text_option(a, "--key"), *value = text_option(a, "--value");
    rapt_dtype dtype = rapt_mha_settings(f->layer)->dtype;
    rapt_tensor inputs[3];
    read_inputs(input, inputs);
    if (key != NULL) inputs[1] = inputs[2] = read_array(key);
    if (value != NULL) inputs[2] = read_array(value);
    /* One tensor stays one, which the layer sees and projects once. */
    f->query = to_dtype(&inputs[0], dtype);
    f->key = inputs[1].data == inputs[0].data ? f->query : to_dtype(&inputs[1], dtype);
    f->value = inputs[2].data == inputs[1].data ? f->key : to_dtype(&inputs[2], dtype);
}

/* [N,H,L,S'], without N for an input that has none; S' counts the layer's own extra keys. */
static rapt_tensor new_weights(const rapt_mha *layer, const rapt_tensor *query, const rapt_tensor *key) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    int32_t n = query->ndim;
    if ((n != 2 && n != 3) || key->ndim != n) return new_array(c->dtype, 0, NULL); /* the forward will refuse them */
    int64_t keys = key->shape[n - 2] + c->add_bias_kv + c->add_zero_attn;
    int64_t shape[4] = {query->shape[0], c->num_heads, query->shape[n - 2], keys};
    return n == 3 ? new_array(c->dtype, 4, shape) : new_array(c->dtype, 3, shape + 1);
}

/* W, or LEFT,RIGHT, of which a side that is left out has no limit. */
static void take_window(const arguments *a, rapt_options *options) {
    const char *given = text_option(a, "--window");
    if (given == NULL) return;
    size_t length = strlen(given);
    char *left = allocate(length + 1), *comma;
    memcpy(left, given, length);
    const char *right = left;
    int64_t least = 0;
    if ((comma = strchr(left, ',')) != NULL) {
        *comma = '\0';
        right = comma + 1;
        least = INT64_MIN; /* a negative side leaves out the query's own key */
    }
    options->limit_left = *left != '\0';
    options->limit_right = *right != '\0';
    if (!options->limit_left && !options->limit_right) fail_usage("--window: '%s' limits neither side", given);
    if (options->limit_left) options->left = integer_value("--window", left, least, INT64_MAX);
    if (options->limit_right) options->right = integer_value("--window", right, least, INT64_MAX);
}

/* Into how many pieces a batch is cut: each is work enough for many threads. */
static int64_t count_pieces(const rapt_mha *layer, const rapt_tensor *query, const rapt_tensor *key) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    if (query->ndim != 3 || key->ndim != 3) return 1;
    double tokens = (double)(query->shape[0] * query->shape[1]), keys = (double)key->shape[1];
    double features = (double)(c->num_heads * c->head_dim);
    double work = tokens * ((double)rapt_mha_num_parameters(layer) + 2 * keys * features); /* multiply-adds */
    return (int64_t)fmin(fmin(work / 2e9, (double)query->shape[0]), 100);
}

/* The forward; on a terminal in pieces of a few sequences, which give the same bits as all at once, so that there is
 * something to show. What does not fit is left for the layer to refuse. */
static void compute(const rapt_mha *layer, const rapt_tensor *query, const rapt_tensor *key, const rapt_tensor *value,
                    const rapt_options *options, const rapt_tensor *output) {
    enum { QUERY, KEY, VALUE, OUTPUT, WEIGHTS, MASK, PADDING, TENSORS };
    const rapt_tensor *mask = options->attn_mask, *padding = options->key_padding_mask;
    const rapt_tensor *whole[TENSORS] = {query, key, value, output, options->weights, mask, padding};
    int64_t rows[TENSORS] = {1, 1, 1, 1, 1, 1, 1}; /* of the first dimension for each sequence; 0: it has none of N */
    int64_t pieces = count_pieces(layer, query, key), n = query->shape[0];
    bool in_pieces = pieces > 1 && progress_is_shown();
    if (mask != NULL && mask->ndim == 3) rows[MASK] = rapt_mha_settings(layer)->num_heads;
    if (mask != NULL && (mask->ndim == 2 || (mask->ndim == 4 && mask->shape[0] == 1))) rows[MASK] = 0;
    if (padding != NULL && padding->ndim == 1) rows[PADDING] = 0;
    for (int t = 0; t < TENSORS; t++)
        in_pieces = in_pieces && (whole[t] == NULL || rows[t] == 0 || whole[t]->shape[0] == n * rows[t]);
    if (!in_pieces) {
        show_progress("computing");
        check(rapt_mha_forward(ctx, layer, query, key, value, options, output));
        return;
    }
    for (int64_t i = 0; i < pieces; i++) {
        int64_t first = i * n / pieces, count = (i + 1) * n / pieces - first;
        rapt_tensor piece[TENSORS];
        rapt_options o = *options;
        show_share("computing", (double)first, (double)n);
        for (int t = 0; t < TENSORS; t++) {
            if (whole[t] == NULL) continue;
            piece[t] = *whole[t];
            if (rows[t] > 0) check(rapt_tensor_slice(ctx, whole[t], 0, first * rows[t], count * rows[t], &piece[t]));
        }
        if (o.weights != NULL) o.weights = &piece[WEIGHTS];
        if (o.attn_mask != NULL) o.attn_mask = &piece[MASK];
        if (o.key_padding_mask != NULL) o.key_padding_mask = &piece[PADDING];
        check(rapt_mha_forward(ctx, layer, &piece[QUERY], &piece[KEY], &piece[VALUE], &o, &piece[OUTPUT]));
    }
}

forward run_forward(const arguments *a, const char *path, bool with_weights) {
    const char *mask = text_option(a, "--mask"), *padding = text_option(a, "--padding");
    bool seq_first = has_option(a, "--seq-first");
    if (!has_option(a, "--input")) fail_usage("--input FILE expected");
    rapt_options options = {.causal = has_option(a, "--causal"), .per_head_weights = with_weights};
    take_window(a, &options);
    rapt_load_options load = rapt_load_options_default();
    load.batch_first = true;
    load.scheme = scheme_option(a, "--scheme");
    load.set_dtype = dtype_option(a, &load.dtype);
    forward f = {0};
    f.has_rotary = rotary_option(a, &f.rotary);
    f.layer = load_layer(a, path, load);
    read_all_inputs(a, &f);
    f.output = new_array(f.query.dtype, f.query.ndim, f.query.shape);
    rapt_tensor query = batch_first_view(&f.query, seq_first), key = batch_first_view(&f.key, seq_first);
    rapt_tensor value = batch_first_view(&f.value, seq_first), output = batch_first_view(&f.output, seq_first);
    if (f.has_rotary) {
        if (key.ndim > 1) f.rotary.length = key.shape[key.ndim - 2]; /* which ntk looks at */
        options.rotary = &f.rotary;
    }
    rapt_tensor mask_tensor, padding_tensor;
    if (mask != NULL) {
        mask_tensor = read_array(mask);
        options.attn_mask = &mask_tensor;
    }
    if (padding != NULL) {
        padding_tensor = read_array(padding);
        options.key_padding_mask = &padding_tensor;
    }
    if (with_weights) {
        f.weights = new_weights(f.layer, &query, &key);
        options.weights = &f.weights;
    }
    double start = seconds_passed();
    compute(f.layer, &query, &key, &value, &options, &output);
    f.seconds = seconds_passed() - start;
    show_progress(NULL);
    return f;
}

/* ---- rapt run ---- */

static void print_tensor(const char *what, const rapt_tensor *t, const char *path) {
    char shape[SHAPE_SIZE];
    printf("%-8s %s %s", what, shape_text(t, shape), rapt_dtype_name(t->dtype));
    if (path != NULL) fputs("  ", stdout);
    if (path != NULL) print_text(stdout, path);
    putchar('\n');
}

typedef struct range {
    double least, largest; /* but for NaN */
    bool finite;           /* all of them */
} range;

static range range_of(const rapt_tensor *t) {
    const double *x = to_doubles(t);
    range r = {INFINITY, -INFINITY, true};
    for (int64_t i = 0; i < rapt_tensor_count(t); i++) {
        r.least = fmin(r.least, x[i]);
        r.largest = fmax(r.largest, x[i]);
        r.finite = r.finite && isfinite(x[i]);
    }
    return r;
}

/* What is not written is at least said in short. */
static void print_range(const char *what, const rapt_tensor *t) {
    char shape[SHAPE_SIZE];
    range r = range_of(t);
    printf("%-8s %s %s, from %.4g to %.4g\n", what, shape_text(t, shape), rapt_dtype_name(t->dtype), r.least,
           r.largest);
}

/* An object's member; what was not written, or has no range that JSON could say, is left out of it. */
static void print_json_tensor(const char *what, const rapt_tensor *t, const char *path, const range *r) {
    printf(",\n \"%s\": {\"shape\": ", what);
    print_json_shape(t);
    printf(", \"dtype\": \"%s\"", rapt_dtype_name(t->dtype));
    if (path != NULL) printf(", \"path\": ");
    if (path != NULL) print_json_string(path);
    if (r != NULL) printf(", \"finite\": %s", r->finite ? "true" : "false");
    if (r != NULL && isfinite(r->least)) printf(", \"least\": %.9g", r->least);
    if (r != NULL && isfinite(r->largest)) printf(", \"largest\": %.9g", r->largest);
    putchar('}');
}

static void report_run_as_json(const arguments *a, const forward *f) {
    range r = range_of(&f->output);
    printf("{\"layer\": ");
    print_json_layer(f->layer);
    printf(",\n \"rotary\": ");
    if (f->has_rotary) print_json_rotary(&f->rotary, rapt_mha_settings(f->layer)->head_dim);
    if (!f->has_rotary) printf("null");
    print_json_tensor("input", &f->query, text_option(a, "--input"), NULL);
    if (f->key.data != f->query.data) print_json_tensor("key", &f->key, text_option(a, "--key"), NULL);
    if (f->value.data != f->key.data) print_json_tensor("value", &f->value, text_option(a, "--value"), NULL);
    print_json_tensor("output", &f->output, text_option(a, "--output"), &r);
    if (has_option(a, "--weights")) print_json_tensor("weights", &f->weights, text_option(a, "--weights"), NULL);
    printf(",\n \"seconds\": %.9g, \"isa\": \"%s\", \"threads\": %d}\n", f->seconds,
           rapt_isa_name(rapt_context_isa(ctx)), (int)rapt_context_num_threads(ctx));
}

static void report_run(const arguments *a, const forward *f) {
    const char *output = text_option(a, "--output"), *weights = text_option(a, "--weights");
    char description[256];
    rapt_mha_describe(f->layer, description, sizeof description);
    printf("%-8s %s\n", "layer", description);
    if (f->has_rotary) print_rotary(&f->rotary);
    print_tensor("input", &f->query, text_option(a, "--input"));
    if (f->key.data != f->query.data) print_tensor("key", &f->key, NULL);
    if (f->value.data != f->key.data) print_tensor("value", &f->value, NULL);
    if (output != NULL) print_tensor("output", &f->output, output);
    if (output == NULL) print_range("output", &f->output);
    if (weights != NULL) print_tensor("weights", &f->weights, weights);
    printf("%-8s %.3g ms, %s, threads: %d\n", "time", 1e3 * f->seconds, rapt_isa_name(rapt_context_isa(ctx)),
           (int)rapt_context_num_threads(ctx));
}

int run_run(const arguments *a) {
    const char *output = text_option(a, "--output"), *weights = text_option(a, "--weights");
    bool output_is_stream = output != NULL && strcmp(output, "-") == 0, json = has_option(a, "--json");
    bool weights_is_stream = weights != NULL && strcmp(weights, "-") == 0;
    if (output_is_stream && weights_is_stream) fail_usage("--output and --weights cannot both be standard output");
    if (json && (output_is_stream || weights_is_stream))
        fail_usage("--json and --%s cannot both be standard output", output_is_stream ? "output" : "weights");
    open_context(a);
    forward f = run_forward(a, a->operand[0], weights != NULL);
    if (output != NULL) write_array(output, "output", &f.output);
    if (weights != NULL) write_array(weights, "weights", &f.weights);
    if (json) report_run_as_json(a, &f);
    if (!json && !output_is_stream && !weights_is_stream) report_run(a, &f);
    return SUCCESS;
}

/* ---- rapt check ---- */

typedef struct comparison {
    double largest;    /* of the expected values that are finite */
    double difference; /* the largest; infinite where one is NaN or infinite and the other is not so */
    int64_t at;        /* where, counted in row-major order */
} comparison;

static comparison compare(const char *what, const rapt_tensor *ours, const rapt_tensor *expected) {
    char a[SHAPE_SIZE], b[SHAPE_SIZE];
    bool same = ours->ndim == expected->ndim;
    for (int32_t d = 0; same && d < ours->ndim; d++) same = ours->shape[d] == expected->shape[d];
    if (!same) fail("the %s has shape %s, expected is %s", what, shape_text(ours, a), shape_text(expected, b));
    const double *x = to_doubles(ours), *y = to_doubles(expected);
    comparison c = {0};
    for (int64_t i = 0; i < rapt_tensor_count(ours); i++) {
        double difference = x[i] == y[i] || (isnan(x[i]) && isnan(y[i])) ? 0 : fabs(x[i] - y[i]);
        if (isnan(difference)) difference = INFINITY;
        if (isfinite(y[i])) c.largest = fmax(c.largest, fabs(y[i]));
        if (difference <= c.difference) continue;
        c.difference = difference;
        c.at = i;
    }
    return c;
}

static bool report(const char *what, const rapt_tensor *ours, const comparison *c, double tolerance, bool json) {
    bool passed = isfinite(c->difference) && c->difference <= tolerance * c->largest;
    double relative = c->difference == 0 ? 0 : c->difference / c->largest;
    rapt_tensor at = *ours; /* its shape: where the difference is */
    int64_t rest = c->at;
    for (int32_t d = at.ndim; d-- > 0;) {
        if (ours->shape[d] == 0) continue;
        at.shape[d] = rest % ours->shape[d];
        rest /= ours->shape[d];
    }
    if (json) {
        printf("{\"what\": \"%s\", \"shape\": ", what);
        print_json_shape(ours);
        if (isfinite(c->difference)) printf(", \"absolute\": %.9g", c->difference);
        if (isfinite(relative)) printf(", \"relative\": %.9g", relative);
        printf(", \"at\": ");
        print_json_shape(&at);
        printf(", \"tolerance\": %.9g, \"passed\": %s}", tolerance, passed ? "true" : "false");
        return passed;
    }
    char shape[SHAPE_SIZE], place[SHAPE_SIZE];
    bool colour = use_colour(stdout);
    const char *ink = passed ? "\033[32m" : "\033[31m";
    printf("%s%-4s%s %-8s %-16s", colour ? ink : "", passed ? "ok" : "BAD", colour ? "\033[0m" : "", what,
           shape_text(ours, shape));
    if (c->difference == 0) {
        printf(" no difference\n");
    } else {
        printf(" at most %.2g off at %s, %.2g of the largest value; %.2g is allowed\n", c->difference,
               shape_text(&at, place), relative, tolerance);
    }
    return passed;
}

/* What rounding explains, as a share of the largest value. */
static double usual_tolerance(rapt_dtype dtype) {
    return dtype == RAPT_F64 ? 1e-12 : dtype == RAPT_F32 ? 1e-5 : dtype == RAPT_F16 ? 5e-3 : 3e-2;
}

int run_check(const arguments *a) {
    const char *expect = text_option(a, "--expect"), *expect_weights = text_option(a, "--expect-weights");
    bool json = has_option(a, "--json"), passed = true;
    double given = real_option(a, "--tolerance", 0, 1e9, -1);
    if (expect == NULL && expect_weights == NULL) fail_usage("--expect FILE expected");
    open_context(a);
    forward f = run_forward(a, a->operand[0], expect_weights != NULL);
    double tolerance = given >= 0 ? given : usual_tolerance(f.output.dtype);
    comparison output = {0}, weights = {0};
    rapt_tensor expected;
    if (expect != NULL) {
        expected = read_array(expect);
        output = compare("output", &f.output, &expected);
    }
    if (expect_weights != NULL) {
        expected = read_array(expect_weights);
        weights = compare("weights", &f.weights, &expected);
    }
    if (json) printf("[");
    if (expect != NULL) passed = report("output", &f.output, &output, tolerance, json);
    if (json && expect != NULL && expect_weights != NULL) printf(", ");
    if (expect_weights != NULL) passed = report("weights", &f.weights, &weights, tolerance, json) && passed;
    if (json) printf("]\n");
    return passed ? SUCCESS : FAILURE;
}
