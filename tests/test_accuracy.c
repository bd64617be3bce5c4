/* test_accuracy.c - errors are not larger than PyTorch's in the same dtype
 *
 * golden/make_accuracy.py measured PyTorch's errors over a sweep of cases; golden/accuracy.txt holds them with what it
 * takes to draw the same inputs here. An error is |actual - expected| / largest |expected| of its case. Expected values
 * come from the reference backend on f64 copies of the inputs; for f64 cases, where that would be no better than what
 * it judges, from plain loops in long double.
 *
 * The promise is about the sweep: for each dtype the 99th percentile and the maximum over all elements of all its cases
 * are not larger than PyTorch's. Numbers of single cases are printed and not asserted: a maximum over a few thousand
 * values is a matter of luck, and any two good ways of adding up numbers each win some. The baseline instruction set
 * has no fused multiply-add and rounds twice where PyTorch rounds once: it is measured too and not held to it.
 */
#include "support.h"

#include <float.h>
#include <inttypes.h>

enum { NAME_SIZE = 32, MAX_CASES = 64, TENSORS = 5 };
static const double STORED_DIGITS = 1e-6; /* accuracy.txt has seven: equal errors must compare as equal */

/* ---- accuracy.txt ---- */

typedef struct accuracy {
    double p99, max;
} accuracy;

typedef struct sweep_case {
    char name[NAME_SIZE];
    rapt_dtype dtype;
    bool is_layer;
    int64_t n, heads, l, s, width; /* width is D of the operator, E of the layer */
    bool causal;
    uint64_t seed;
    double largest; /* expected value, by its magnitude */
    accuracy torch;
} sweep_case;

typedef struct sweep {
    sweep_case cases[MAX_CASES];
    int count;
    accuracy pooled[RAPT_F16 + 1]; /* PyTorch's, by dtype */
} sweep;

static rapt_dtype dtype_of_name(const char *name) {
    for (int dtype = RAPT_F32; dtype <= RAPT_F16; dtype++) {
        if (strcmp(rapt_dtype_name((rapt_dtype)dtype), name) == 0) return (rapt_dtype)dtype;
    }
    fail_msg("no dtype %s", name);
    return (rapt_dtype)0;
}

static sweep_case read_case(const char *line) {
    sweep_case c = {0};
    char dtype[NAME_SIZE], kind[NAME_SIZE];
    int causal;
    int found = sscanf(
        line, "%31s %31s %31s %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %d %" SCNu64 " %lf %lf %lf",
        c.name, dtype, kind, &c.n, &c.heads, &c.l, &c.s, &c.width, &causal, &c.seed, &c.largest, &c.torch.p99,
        &c.torch.max);
    if (found != 13) fail_msg("accuracy.txt: what is \"%s\"?", line);
    c.dtype = dtype_of_name(dtype);
    c.causal = causal != 0;
    c.is_layer = strcmp(kind, "layer") == 0;
    assert_true(c.is_layer || strcmp(kind, "operator") == 0);
    return c;
}

static sweep read_sweep(void) {
    sweep s = {0};
    FILE *file = fopen(RAPT_SOURCE_DIR "/tests/golden/accuracy.txt", "r");
    assert_non_null(file);
    char line[512], dtype[NAME_SIZE];
    accuracy pooled;
    while (fgets(line, sizeof line, file) != NULL) {
        if (*line == '#') continue;
        if (sscanf(line, "pooled %31s %lf %lf", dtype, &pooled.p99, &pooled.max) == 3) {
            s.pooled[dtype_of_name(dtype)] = pooled;
        } else {
            assert_true(s.count < MAX_CASES);
            s.cases[s.count++] = read_case(line);
        }
    }
    fclose(file);
    return s;
}

/* ---- inputs ---- */

/* Of the operator: query, key, value. Of the layer: tokens, in_proj_weight, in_proj_bias, out_proj_weight,
 * out_proj_bias. The rest is {0}. */
typedef struct inputs {
    rapt_tensor tensor[TENSORS];
} inputs;

static rapt_tensor draw(test_random *random, rapt_dtype dtype, double magnitude, int32_t ndim, const int64_t *shape) {
    rapt_tensor tensor = make_tensor(dtype, ndim, shape);
    fill_random(random, &tensor, magnitude);
    return tensor;
}

static inputs draw_inputs(const sweep_case *c) { /* in the order of make_accuracy.py */
    test_random random = {c->seed};
    inputs in = {0};
    if (c->is_layer) {
        int64_t e = c->width;
        double of_weight = sqrt(3.0 / (double)e);
        in.tensor[0] = draw(&random, c->dtype, 1.75, 3, (int64_t[]){c->n, c->l, e});
        in.tensor[1] = draw(&random, c->dtype, of_weight, 2, (int64_t[]){3 * e, e});
        in.tensor[2] = draw(&random, c->dtype, 0.5, 1, (int64_t[]){3 * e});
        in.tensor[3] = draw(&random, c->dtype, of_weight, 2, (int64_t[]){e, e});
        in.tensor[4] = draw(&random, c->dtype, 0.5, 1, (int64_t[]){e});
    } else {
        for (int t = 0; t < 3; t++) {
            int64_t length = t == 0 ? c->l : c->s;
            in.tensor[t] = draw(&random, c->dtype, 1.75, 4, (int64_t[]){c->n, c->heads, length, c->width});
        }
    }
    return in;
}

static inputs inputs_in_f64(const inputs *in) {
    inputs wide = {0};
    for (int t = 0; t < TENSORS; t++) {
        if (in->tensor[t].data != NULL) wide.tensor[t] = convert_tensor(&in->tensor[t], RAPT_F64);
    }
    return wide;
}

static void free_inputs(inputs *in) {
    for (int t = 0; t < TENSORS; t++) free_tensor(&in->tensor[t]);
}

/* ---- results by Rapt ---- */

static rapt_tensor forward(rapt_context *context, const sweep_case *c, const inputs *in) {
    const rapt_tensor *t = in->tensor;
    rapt_tensor out = make_tensor(t[0].dtype, t[0].ndim, t[0].shape);
    fill_value(&out, NAN);
    rapt_options options = {.causal = c->causal};
    if (!c->is_layer) {
        assert_ok(context, rapt_attention_forward(context, &t[0], &t[1], &t[2], &options, &out));
        return out;
    }
    rapt_mha_weights weights = rapt_mha_weights_default(c->heads);
    weights.batch_first = true;
    weights.in_proj_weight = &t[1];
    weights.in_proj_bias = &t[2];
    weights.out_proj_weight = &t[3];
    weights.out_proj_bias = &t[4];
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_from_weights(context, &weights, RAPT_BORROW, &layer));
    assert_ok(context, rapt_mha_forward(context, layer, &t[0], &t[0], &t[0], &options, &out));
    rapt_mha_destroy(layer);
    return out;
}

/* ---- results in long double ---- */

/* False where long double is a double, by the compiler's choice or under an emulator that computes with 64 bits: f64
 * cases are skipped there. Where it is a quadruple computed by software (aarch64) they take some seconds, and are left
 * out with RAPT_TEST_QUICK by their size. */
static bool long_double_is_wide(void) {
    volatile long double one = 1, tiny = LDBL_MANT_DIG >= 64 ? LDBL_EPSILON : 0;
    return one + tiny != one;
}

static long double *allocate_wide(int64_t count) {
    long double *values = calloc((size_t)count + 1, sizeof *values);
    assert_non_null(values);
    return values;
}

static long double *wide_copy(const rapt_tensor *tensor) {
    int64_t count = rapt_tensor_count(tensor);
    long double *values = allocate_wide(count);
    for (int64_t i = 0; i < count; i++) values[i] = (long double)get_element(tensor, i);
    return values;
}

static long double wide_dot(const long double *a, const long double *b, int64_t count) {
    long double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* One head of one sequence, added to a zero `out`; rows of query, key and value are `stride` apart. */
static void wide_attention(const sweep_case *c, int64_t dim, int64_t stride, const long double *query,
                           const long double *key, const long double *value, long double *out, int64_t out_stride) {
    long double *weight = allocate_wide(c->s);
    for (int64_t i = 0; i < c->l; i++) {
        int64_t seen = c->causal && i + 1 < c->s ? i + 1 : c->s;
        long double largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < seen; j++) {
            weight[j] = wide_dot(query + i * stride, key + j * stride, dim) / sqrtl((long double)dim);
            if (weight[j] > largest) largest = weight[j];
        }
        for (int64_t j = 0; j < seen; j++) sum += weight[j] = expl(weight[j] - largest);
        for (int64_t j = 0; j < seen; j++) {
            long double share = weight[j] / sum;
            for (int64_t d = 0; d < dim; d++) out[i * out_stride + d] += share * value[j * stride + d];
        }
    }
    free(weight);
}

/* y = x * weight^T + bias for so many tokens. */
static long double *wide_linear(const long double *x, int64_t tokens, const rapt_tensor *weight,
                                const rapt_tensor *bias) {
    int64_t rows = weight->shape[0], columns = weight->shape[1];
    long double *w = wide_copy(weight), *y = allocate_wide(tokens * rows);
    for (int64_t i = 0; i < tokens * rows; i++) {
        int64_t row = i % rows, token = i / rows;
        y[i] = wide_dot(x + token * columns, w + row * columns, columns) + (long double)get_element(bias, row);
    }
    free(w);
    return y;
}

static long double *wide_operator(const sweep_case *c, const inputs *in) {
    long double *query = wide_copy(&in->tensor[0]), *key = wide_copy(&in->tensor[1]),
                *value = wide_copy(&in->tensor[2]);
    long double *out = allocate_wide(rapt_tensor_count(&in->tensor[0]));
    for (int64_t head = 0; head < c->n * c->heads; head++) {
        int64_t q = head * c->l * c->width, k = head * c->s * c->width;
        wide_attention(c, c->width, c->width, query + q, key + k, value + k, out + q, c->width);
    }
    free(query);
    free(key);
    free(value);
    return out;
}

static long double *wide_layer(const sweep_case *c, const inputs *in) {
    int64_t tokens = c->n * c->l, e = c->width, dim = e / c->heads;
    long double *x = wide_copy(&in->tensor[0]);
    long double *projected = wide_linear(x, tokens, &in->tensor[1], &in->tensor[2]); /* query, key, value in a row */
    long double *joined = allocate_wide(tokens * e);
    for (int64_t n = 0; n < c->n; n++) {
        for (int64_t h = 0; h < c->heads; h++) {
            const long double *query = projected + n * c->l * 3 * e + h * dim;
            wide_attention(c, dim, 3 * e, query, query + e, query + 2 * e, joined + n * c->l * e + h * dim, e);
        }
    }
    long double *out = wide_linear(joined, tokens, &in->tensor[3], &in->tensor[4]);
    free(x);
    free(projected);
    free(joined);
    return out;
}

static long double *expected_of(rapt_context *reference, const sweep_case *c, const inputs *in) {
    if (c->dtype == RAPT_F64) return c->is_layer ? wide_layer(c, in) : wide_operator(c, in);
    inputs exact = inputs_in_f64(in);
    rapt_tensor out = forward(reference, c, &exact);
    long double *expected = wide_copy(&out);
    free_tensor(&out);
    free_inputs(&exact);
    return expected;
}

/* ---- errors ---- */

typedef struct error_list {
    double *error;
    int64_t count;
} error_list;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static accuracy accuracy_of(const error_list *list) { /* sorts the list */
    assert_true(list->count > 0);
    qsort(list->error, (size_t)list->count, sizeof *list->error, compare_doubles);
    int64_t rank = (list->count * 99 + 99) / 100; /* at least 99 in 100 are not above the rank's error */
    return (accuracy){list->error[rank - 1], list->error[list->count - 1]};
}

static void append(error_list *list, const error_list *more) {
    list->error = realloc(list->error, (size_t)(list->count + more->count) * sizeof *list->error);
    assert_non_null(list->error);
    memcpy(list->error + list->count, more->error, (size_t)more->count * sizeof *list->error);
    list->count += more->count;
}

static error_list errors_of(const sweep_case *c, const rapt_tensor *actual, const long double *expected) {
    error_list list = {.count = rapt_tensor_count(actual)};
    list.error = malloc((size_t)list.count * sizeof *list.error);
    assert_non_null(list.error);
    long double largest = 0;
    for (int64_t i = 0; i < list.count; i++) largest = fmaxl(largest, fabsl(expected[i]));
    double drift = fabs((double)largest / c->largest - 1); /* other inputs than PyTorch's, or a wrong expectation? */
    if (!(drift < 1e-12))
        fail_msg("%s: expected values go up to %.15g, not %.15g", c->name, (double)largest, c->largest);
    for (int64_t i = 0; i < list.count; i++) {
        double error = (double)(fabsl((long double)get_element(actual, i) - expected[i]) / largest);
        list.error[i] = isfinite(error) ? error : INFINITY; /* no NaN, which would not sort */
    }
    return list;
}

/* ---- the tests ---- */

static void print_row(const char *name, rapt_dtype dtype, accuracy rapt, accuracy torch) {
    print_message("%-12s %-4s  %9.3g %9.3g (%4.2f)  %9.3g %9.3g (%4.2f)\n", name, rapt_dtype_name(dtype), rapt.p99,
                  torch.p99, rapt.p99 / torch.p99, rapt.max, torch.max, rapt.max / torch.max);
}

/* Multiply-adds of the reference backend. */
static int64_t work_of(const sweep_case *c) {
    int64_t projections = c->is_layer ? 4 * c->n * c->l * c->width * c->width : 0;
    return projections + 2 * c->n * c->l * c->s * (c->is_layer ? c->width : c->heads * c->width);
}

static error_list run_case(rapt_context *cpu, rapt_context *reference, const sweep_case *c) {
    inputs in = draw_inputs(c);
    long double *expected = expected_of(reference, c, &in);
    rapt_tensor out = forward(cpu, c, &in);
    error_list errors = errors_of(c, &out, expected);
    print_row(c->name, c->dtype, accuracy_of(&errors), c->torch);
    free_tensor(&out);
    free(expected);
    free_inputs(&in);
    return errors;
}

static void check_dtype(rapt_dtype dtype) {
    sweep s = read_sweep();
    rapt_context *cpu = make_context(2, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    rapt_context *reference = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_REFERENCE);
    const char *isa = rapt_isa_name(rapt_context_isa(cpu));
    bool asserted = rapt_context_isa(cpu) != RAPT_ISA_BASELINE;
    print_message("%-17s  p99: Rapt   PyTorch (ratio)  max: Rapt   PyTorch (ratio)\n", isa);
    error_list pool = {0};
    int found = 0;
    for (int i = 0; i < s.count; i++) {
        const sweep_case *c = &s.cases[i];
        if (c->dtype != dtype) continue;
        found++;
        if (test_is_quick() && work_of(c) > 6 * 1000 * 1000) {
            asserted = false; /* a part of the sweep says nothing about the whole */
            continue;
        }
        error_list errors = run_case(cpu, reference, c);
        append(&pool, &errors);
        free(errors.error);
    }
    assert_in_range(found, 2, MAX_CASES);
    rapt_context_destroy(cpu);
    rapt_context_destroy(reference);
    if (pool.count == 0) skip();
    accuracy rapt = accuracy_of(&pool), torch = s.pooled[dtype];
    free(pool.error);
    print_row(asserted ? "pooled" : "not asserted", dtype, rapt, torch);
    if (!asserted) return;
    if (!(rapt.p99 <= torch.p99 * (1 + STORED_DIGITS) && rapt.max <= torch.max * (1 + STORED_DIGITS))) {
        fail_msg("%s: an error is larger than PyTorch's: 99th percentile %.4g, not %.4g; maximum %.4g, not %.4g",
                 rapt_dtype_name(dtype), rapt.p99, torch.p99, rapt.max, torch.max);
    }
}

static void test_f32(void **state) {
    (void)state;
    check_dtype(RAPT_F32);
}
static void test_f64(void **state) {
    (void)state;
    if (!long_double_is_wide()) {
        print_message("long double has no more bits than a double here: nothing to judge f64 by\n");
        skip();
    }
    check_dtype(RAPT_F64);
}
static void test_bf16(void **state) {
    (void)state;
    check_dtype(RAPT_BF16);
}
static void test_f16(void **state) {
    (void)state;
    check_dtype(RAPT_F16);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f16),
    };
    return cmocka_run_group_tests_name("accuracy", tests, NULL, NULL);
}
