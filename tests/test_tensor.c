/* test_tensor.c - views of memory, copies between element types, and heads split, merged and repeated */
#include "support.h"

static rapt_context *context;

static int make_shared_context(void **state) {
    (void)state;
    context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    return 0;
}

static int destroy_shared_context(void **state) {
    (void)state;
    rapt_context_destroy(context);
    return 0;
}

/* The call failed with this status and a message that holds `words`. */
static void assert_fails(rapt_status status, rapt_status expected, const char *words) {
    if (status != expected) fail_msg("%s, expected %s", rapt_status_name(status), rapt_status_name(expected));
    if (strstr(rapt_error_message(context), words) == NULL) {
        fail_msg("message \"%s\" does not hold \"%s\"", rapt_error_message(context), words);
    }
}

static void assert_shape(const rapt_tensor *tensor, int32_t ndim, const int64_t *shape) {
    assert_int_equal(tensor->ndim, ndim);
    for (int32_t d = 0; d < ndim; d++) assert_int_equal(tensor->shape[d], shape[d]);
}

/* ---- making and measuring ---- */

static void test_dtypes_and_devices(void **state) {
    (void)state;
    static const struct {
        rapt_dtype dtype;
        size_t size;
        const char *name;
    } known[] = {{RAPT_F32, 4, "f32"},
                 {RAPT_F64, 8, "f64"},
                 {RAPT_BF16, 2, "bf16"},
                 {RAPT_F16, 2, "f16"},
                 {RAPT_BOOL, 1, "bool"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_int_equal(rapt_dtype_size(known[i].dtype), known[i].size);
        assert_string_equal(rapt_dtype_name(known[i].dtype), known[i].name);
    }
    assert_int_equal(rapt_dtype_size((rapt_dtype)0), 0);
    assert_int_equal(rapt_dtype_size((rapt_dtype)6), 0);
    assert_non_null(rapt_dtype_name((rapt_dtype)6));
    assert_string_equal(rapt_device_name(RAPT_DEVICE_CPU), "cpu");
    assert_string_equal(rapt_device_name(RAPT_DEVICE_CUDA), "cuda");
    assert_non_null(rapt_device_name((rapt_device)99));
}

static void test_tensor_of(void **state) {
    (void)state;
    float data[24];
    const int64_t shape[3] = {2, 3, 4};
    rapt_tensor t = rapt_tensor_of(data, RAPT_F32, 3, shape);
    assert_ptr_equal(t.data, data);
    assert_int_equal(t.dtype, RAPT_F32);
    assert_int_equal(t.device, RAPT_DEVICE_CPU);
    assert_int_equal(t.device_id, 0);
    assert_shape(&t, 3, shape);
    assert_int_equal(t.stride[0], 12);
    assert_int_equal(t.stride[1], 4);
    assert_int_equal(t.stride[2], 1);
    for (int d = 3; d < RAPT_MAX_DIMS; d++) assert_true(t.shape[d] == 0 && t.stride[d] == 0);

    rapt_tensor scalar = rapt_tensor_of(data, RAPT_F32, 0, NULL);
    assert_int_equal(scalar.ndim, 0);
    assert_int_equal(rapt_tensor_count(&scalar), 1);

    const int64_t stride[2] = {-7, 0}, two[2] = {2, 3};
    t = rapt_tensor_strided(data, RAPT_F32, 2, two, stride);
    assert_int_equal(t.stride[0], -7);
    assert_int_equal(t.stride[1], 0);
}

static void test_absurd_ranks_and_sizes_are_kept_for_the_call_to_refuse(void **state) {
    (void)state;
    float data[1] = {0};
    const int64_t ones[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, huge[3] = {INT64_MAX, INT64_MAX, 2};
    rapt_tensor view = {0};
    rapt_tensor t = rapt_tensor_of(data, RAPT_F32, 12, ones);
    assert_int_equal(t.ndim, 12);
    assert_int_equal(rapt_tensor_count(&t), -1);
    assert_false(rapt_tensor_is_contiguous(&t));
    assert_fails(rapt_tensor_slice(context, &t, 0, 0, 1, &view), RAPT_ERROR_SHAPE, "12");
    t = rapt_tensor_of(data, RAPT_F32, -1, ones);
    assert_int_equal(t.ndim, -1);
    assert_int_equal(rapt_tensor_count(&t), -1);
    assert_fails(rapt_tensor_slice(context, &t, 0, 0, 1, &view), RAPT_ERROR_SHAPE, "-1");
    t = rapt_tensor_of(data, RAPT_F32, 3, huge);
    assert_int_equal(rapt_tensor_count(&t), -1);
    assert_fails(rapt_tensor_slice(context, &t, 2, 0, 1, &view), RAPT_ERROR_OVERFLOW, "9223372036854775807");
    assert_null(view.data); /* a failed call changes nothing */
}

static void test_count(void **state) {
    (void)state;
    const int64_t plain[3] = {5, 1, 7}, empty[3] = {5, 0, 7}, most[2] = {INT64_MAX, 1},
                  over[2] = {(int64_t)1 << 32, (int64_t)1 << 31};
    const int64_t empty_and_over[3] = {INT64_MAX, INT64_MAX, 0}, below[2] = {(int64_t)1 << 31, (int64_t)1 << 31};
    rapt_tensor t = rapt_tensor_of(NULL, RAPT_F32, 3, plain);
    assert_int_equal(rapt_tensor_count(&t), 35);
    t = rapt_tensor_of(NULL, RAPT_F32, 3, empty);
    assert_int_equal(rapt_tensor_count(&t), 0);
    t = rapt_tensor_of(NULL, RAPT_F32, 2, most);
    assert_true(rapt_tensor_count(&t) == INT64_MAX);
    t = rapt_tensor_of(NULL, RAPT_F32, 2, over);
    assert_int_equal(rapt_tensor_count(&t), -1);
    t = rapt_tensor_of(NULL, RAPT_F32, 3, empty_and_over);
    assert_int_equal(rapt_tensor_count(&t), 0);
    t = rapt_tensor_of(NULL, RAPT_F32, 2, below);
    assert_true(rapt_tensor_count(&t) == (int64_t)1 << 62);
    assert_int_equal(rapt_tensor_count(NULL), -1);
}

static bool is_contiguous(int32_t ndim, const int64_t *shape, const int64_t *stride) {
    rapt_tensor t = rapt_tensor_strided(NULL, RAPT_F32, ndim, shape, stride);
    return rapt_tensor_is_contiguous(&t);
}

static void test_is_contiguous(void **state) {
    (void)state;
    const int64_t s234[3] = {2, 3, 4}, s214[3] = {2, 1, 4}, s204[3] = {2, 0, 4};
    assert_true(is_contiguous(3, s234, (int64_t[]){12, 4, 1}));
    assert_false(is_contiguous(3, s234, (int64_t[]){13, 4, 1}));
    assert_false(is_contiguous(3, s234, (int64_t[]){4, 12, 1}));
    assert_false(is_contiguous(3, s234, (int64_t[]){24, 8, 2}));
    assert_false(is_contiguous(3, s234, (int64_t[]){12, 4, -1}));
    assert_false(is_contiguous(3, s234, (int64_t[]){0, 4, 1}));
    assert_true(is_contiguous(3, s214, (int64_t[]){4, 99, 1})); /* a size of 1 has no step */
    assert_true(is_contiguous(3, s204, (int64_t[]){5, 6, 7}));  /* nothing there */
    assert_true(is_contiguous(0, s234, s234));
}

/* ---- views of views ---- */

static void test_transpose(void **state) {
    (void)state;
    const int64_t shape[3] = {2, 3, 4}, turned[3] = {4, 3, 2};
    rapt_tensor t = make_tensor(RAPT_F32, 3, shape), view;
    for (int64_t i = 0; i < 24; i++) set_element(&t, i, (double)i);
    assert_ok(context, rapt_tensor_transpose(context, &t, 0, 2, &view));
    assert_ptr_equal(view.data, t.data);
    assert_shape(&view, 3, turned);
    for (int64_t i = 0; i < 24; i++) {
        int64_t a = i / 6, b = i / 2 % 3, c = i % 2;
        assert_true(get_element(&view, i) == (double)(c * 12 + b * 4 + a));
    }
    assert_ok(context, rapt_tensor_transpose(context, &view, 2, 0, &view)); /* in place, and back */
    assert_true(same_bits(&view, &t) && rapt_tensor_is_contiguous(&view));
    assert_ok(context, rapt_tensor_transpose(context, &t, 1, 1, &view));
    assert_shape(&view, 3, shape);

    rapt_tensor kept = view;
    assert_fails(rapt_tensor_transpose(context, &t, 3, 0, &view), RAPT_ERROR_ARGUMENT, "dim_a is 3");
    assert_fails(rapt_tensor_transpose(context, &t, 0, -1, &view), RAPT_ERROR_ARGUMENT, "dim_b is -1");
    assert_fails(rapt_tensor_transpose(context, NULL, 0, 1, &view), RAPT_ERROR_NULL, "tensor");
    assert_fails(rapt_tensor_transpose(context, &t, 0, 1, NULL), RAPT_ERROR_NULL, "view");
    assert_memory_equal(&view, &kept, sizeof view);
    free_tensor(&t);
}

static void test_slice(void **state) {
    (void)state;
    const int64_t shape[2] = {5, 4}, part[2] = {5, 2}, none[2] = {0, 4};
    rapt_tensor t = make_tensor(RAPT_F64, 2, shape), view;
    for (int64_t i = 0; i < 20; i++) set_element(&t, i, (double)i);
    assert_ok(context, rapt_tensor_slice(context, &t, 1, 1, 2, &view));
    assert_shape(&view, 2, part);
    assert_ptr_equal(view.data, (double *)t.data + 1);
    for (int64_t i = 0; i < 10; i++) assert_true(get_element(&view, i) == (double)(i / 2 * 4 + 1 + i % 2));

    rapt_tensor upside_down = t; /* a negative stride */
    upside_down.data = (double *)t.data + 16;
    upside_down.stride[0] = -4;
    assert_ok(context, rapt_tensor_slice(context, &upside_down, 0, 1, 3, &view));
    assert_true(get_element(&view, 0) == 12 && get_element(&view, 8) == 4);

    assert_ok(context, rapt_tensor_slice(context, &t, 0, 5, 0, &view)); /* empty at the very end */
    assert_shape(&view, 2, none);
    assert_ok(context, rapt_tensor_slice(context, &t, 0, 0, 5, &view));
    assert_shape(&view, 2, shape);

    rapt_tensor kept = view;
    assert_fails(rapt_tensor_slice(context, &t, 2, 0, 1, &view), RAPT_ERROR_ARGUMENT, "dim is 2");
    assert_fails(rapt_tensor_slice(context, &t, 0, -1, 1, &view), RAPT_ERROR_ARGUMENT, "start -1");
    assert_fails(rapt_tensor_slice(context, &t, 0, 0, -1, &view), RAPT_ERROR_ARGUMENT, "count -1");
    assert_fails(rapt_tensor_slice(context, &t, 0, 6, 0, &view), RAPT_ERROR_ARGUMENT, "start 6");
    assert_fails(rapt_tensor_slice(context, &t, 0, 3, 3, &view), RAPT_ERROR_ARGUMENT, "size 5");
    assert_fails(rapt_tensor_slice(context, &t, 0, 1, INT64_MAX, &view), RAPT_ERROR_ARGUMENT, "start 1");
    assert_fails(rapt_tensor_slice(context, NULL, 0, 0, 1, &view), RAPT_ERROR_NULL, "tensor");
    assert_fails(rapt_tensor_slice(context, &t, 0, 0, 1, NULL), RAPT_ERROR_NULL, "view");
    assert_memory_equal(&view, &kept, sizeof view);
    free_tensor(&t);
}

/* ---- copies ---- */

static const rapt_dtype float_types[] = {RAPT_F32, RAPT_F64, RAPT_BF16, RAPT_F16};

/* Small integers are exact in every type, so copies through any strides can be compared element by element. */
static void test_copy_between_all_types_and_strides(void **state) {
    (void)state;
    test_random random = {11};
    for (int round = 0; round < 400; round++) {
        int64_t shape[4];
        int32_t ndim = (int32_t)random_between(&random, 0, 4);
        for (int32_t d = 0; d < ndim; d++) shape[d] = random_between(&random, round % 10 == 0 ? 0 : 1, 5);
        rapt_tensor from = make_strided_tensor(&random, float_types[round % 4], ndim, shape);
        rapt_tensor to = make_strided_tensor(&random, float_types[round / 4 % 4], ndim, shape);
        for (int64_t i = 0; i < rapt_tensor_count(&from); i++)
            set_element(&from, i, (double)random_between(&random, -128, 127));
        assert_ok(context, rapt_tensor_copy(context, &from, &to));
        assert_true(largest_difference(&from, &to) == 0);
        free_tensor(&from);
        free_tensor(&to);
    }
}

static void test_copy_of_bool_and_of_broadcasts(void **state) {
    (void)state;
    const int64_t shape[2] = {3, 4}, row[2] = {0, 1};
    rapt_tensor mask = make_tensor(RAPT_BOOL, 2, shape), other = make_tensor(RAPT_BOOL, 2, shape);
    rapt_tensor number = make_tensor(RAPT_F32, 2, shape);
    set_element(&mask, 5, 1);
    assert_ok(context, rapt_tensor_copy(context, &mask, &other));
    assert_true(same_bits(&mask, &other) && get_element(&other, 5) == 1);
    assert_fails(rapt_tensor_copy(context, &mask, &number), RAPT_ERROR_DTYPE, "bool");
    assert_fails(rapt_tensor_copy(context, &number, &mask), RAPT_ERROR_DTYPE, "bool");

    double values[4] = {1, 2, 3, 4};
    rapt_tensor broadcast = rapt_tensor_strided(values, RAPT_F64, 2, shape, row);
    assert_ok(context, rapt_tensor_copy(context, &broadcast, &number));
    for (int64_t i = 0; i < 12; i++) assert_true(get_element(&number, i) == values[i % 4]);
    free_tensor(&mask);
    free_tensor(&other);
    free_tensor(&number);
}

static void test_copy_refuses(void **state) {
    (void)state;
    _Alignas(8) char bytes[128] = {0};
    const int64_t shape[2] = {3, 4}, other_shape[2] = {4, 3}, flat[1] = {12}, broadcast[2] = {0, 1};
    rapt_tensor from = rapt_tensor_of(bytes, RAPT_F32, 2, shape), to = rapt_tensor_of(bytes + 64, RAPT_F32, 2, shape);
    assert_ok(context, rapt_tensor_copy(context, &from, &to));
    rapt_tensor bad = rapt_tensor_of(bytes + 64, RAPT_F32, 2, other_shape);
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_SHAPE, "[4, 3]");
    bad = rapt_tensor_of(bytes + 64, RAPT_F32, 1, flat);
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_SHAPE, "[12]");
    bad = rapt_tensor_of(bytes + 44, RAPT_F32, 2, shape);
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_LAYOUT, "shares memory");
    bad = rapt_tensor_of(bytes + 66, RAPT_F32, 2, shape);
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_LAYOUT, "aligned");
    bad = rapt_tensor_strided(bytes + 64, RAPT_F32, 2, shape, broadcast);
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_LAYOUT, "to");
    bad = to;
    bad.dtype = (rapt_dtype)77;
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_DTYPE, "77");
    bad = to;
    bad.device = RAPT_DEVICE_CUDA;
    assert_fails(rapt_tensor_copy(context, &bad, &from), RAPT_ERROR_DEVICE, "cuda");
    bad = to;
    bad.data = NULL;
    assert_fails(rapt_tensor_copy(context, &from, &bad), RAPT_ERROR_NULL, "to");
    bad = to;
    bad.shape[1] = -4;
    assert_fails(rapt_tensor_copy(context, &bad, &from), RAPT_ERROR_SHAPE, "-4");
    assert_fails(rapt_tensor_copy(context, NULL, &to), RAPT_ERROR_NULL, "from");
    assert_fails(rapt_tensor_copy(context, &from, NULL), RAPT_ERROR_NULL, "to");
    assert_int_equal(rapt_tensor_copy(NULL, &from, &to), RAPT_ERROR_NULL);
}

/* ---- rounding ---- */

enum { PATTERNS = 65536 };

/* A copy of count elements between contiguous arrays. */
static void convert(const void *from, rapt_dtype from_type, void *to, rapt_dtype to_type, int64_t count) {
    rapt_tensor source = rapt_tensor_of((void *)(uintptr_t)from, from_type, 1, &count);
    rapt_tensor target = rapt_tensor_of(to, to_type, 1, &count);
    assert_ok(context, rapt_tensor_copy(context, &source, &target));
}

/* What the bits mean, from the formats' definition. */
static double value_of_pattern(rapt_dtype dtype, unsigned bits) {
    int mantissa_bits = dtype == RAPT_BF16 ? 7 : 10, bias = dtype == RAPT_BF16 ? 127 : 15, top = 2 * bias + 1;
    int exponent = (int)(bits >> mantissa_bits) & top, mantissa = (int)bits & ((1 << mantissa_bits) - 1);
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == top) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static unsigned infinity_pattern(rapt_dtype dtype) { return dtype == RAPT_BF16 ? 0x7f80 : 0x7c00; }

/* Rounding by search: patterns from 0 to infinity's are values in rising order, infinity standing for the next power of
 * two. The nearer neighbour wins, in a tie the even pattern. Distances are exact: neighbours are close.*/
static unsigned nearest_pattern(rapt_dtype dtype, double x) {
    unsigned sign = signbit(x) ? 0x8000 : 0, low = 0, high = infinity_pattern(dtype);
    double magnitude = fabs(x), next_power = dtype == RAPT_BF16 ? 0x1p128 : 0x1p16;
    if (magnitude >= next_power) return sign | high;
    while (high - low > 1) { /* value(low) <= magnitude < value(high) */
        unsigned middle = (low + high) / 2;
        if (value_of_pattern(dtype, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double above = high == infinity_pattern(dtype) ? next_power : value_of_pattern(dtype, high);
    double down = magnitude - value_of_pattern(dtype, low), up = above - magnitude;
    if (down < up) return sign | low;
    if (up < down) return sign | high;
    return sign | (low % 2 == 0 ? low : high);
}

static bool is_nan_pattern(rapt_dtype dtype, unsigned bits) { return (bits & 0x7fff) > infinity_pattern(dtype); }

static void test_all_16_bit_values_round_trip(void **state) {
    (void)state;
    static uint16_t all[PATTERNS], back[PATTERNS];
    static float f32[PATTERNS];
    static double f64[PATTERNS];
    for (unsigned i = 0; i < PATTERNS; i++) all[i] = (uint16_t)i;
    const rapt_dtype types[] = {RAPT_BF16, RAPT_F16};
    for (int t = 0; t < 2; t++) {
        convert(all, types[t], back, types[t], PATTERNS);
        assert_memory_equal(all, back, sizeof all); /* the same type keeps every bit, those of NaN too */
        convert(all, types[t], f32, RAPT_F32, PATTERNS);
        convert(all, types[t], f64, RAPT_F64, PATTERNS);
        for (unsigned i = 0; i < PATTERNS; i++) {
            double value = value_of_pattern(types[t], i);
            if (isnan(value)) {
                assert_true(isnan(f32[i]) && isnan(f64[i]));
            } else {
                assert_true((double)f32[i] == value && f64[i] == value);
            }
            assert_true((signbit(f32[i]) != 0) == (i >= 0x8000) && (signbit(f64[i]) != 0) == (i >= 0x8000));
        }
        for (int wide = 0; wide < 2; wide++) {
            convert(wide ? (void *)f64 : (void *)f32, wide ? RAPT_F64 : RAPT_F32, back, types[t], PATTERNS);
            for (unsigned i = 0; i < PATTERNS; i++) {
                if (is_nan_pattern(types[t], i)) {
                    assert_true(is_nan_pattern(types[t], back[i]) && (back[i] & 0x8000) == (i & 0x8000));
                } else {
                    assert_int_equal(back[i], i);
                }
            }
        }
    }
}

static void test_16_bit_types_into_each_other(void **state) {
    (void)state;
    static uint16_t all[PATTERNS], other[PATTERNS];
    for (unsigned i = 0; i < PATTERNS; i++) all[i] = (uint16_t)i;
    const rapt_dtype types[] = {RAPT_BF16, RAPT_F16};
    for (int t = 0; t < 2; t++) {
        convert(all, types[t], other, types[1 - t], PATTERNS);
        for (unsigned i = 0; i < PATTERNS; i++) {
            if (is_nan_pattern(types[t], i)) {
                assert_true(is_nan_pattern(types[1 - t], other[i]));
            } else {
                assert_int_equal(other[i], nearest_pattern(types[1 - t], value_of_pattern(types[t], i)));
            }
        }
    }
}

/* Rounds x from f32 (if it is one) and from f64 and compares with the search. */
static void check_rounding(rapt_dtype dtype, double x) {
    unsigned expected = nearest_pattern(dtype, x);
    float narrow = (float)x;
    uint16_t from_f64, from_f32;
    convert(&x, RAPT_F64, &from_f64, dtype, 1);
    if (from_f64 != expected)
        fail_msg("%a in %s: 0x%04x, expected 0x%04x", x, rapt_dtype_name(dtype), from_f64, expected);
    if ((double)narrow != x) return;
    convert(&narrow, RAPT_F32, &from_f32, dtype, 1);
    if (from_f32 != expected)
        fail_msg("%a (f32) in %s: 0x%04x, expected 0x%04x", x, rapt_dtype_name(dtype), from_f32, expected);
}

/* Around every midpoint between two neighbours: the tie itself and the nearest numbers on each side, in f32 and in
 * f64 (which shows a rounding that goes through f32 first). Subnormal numbers and the step to infinity are among them.
 * Exact values are in the round trips. */
static void check_rounding_everywhere(rapt_dtype dtype) {
    unsigned infinity = infinity_pattern(dtype);
    for (unsigned i = 0; i < infinity; i++) {
        double low = value_of_pattern(dtype, i);
        double high = i + 1 == infinity ? (dtype == RAPT_BF16 ? 0x1p128 : 0x1p16) : value_of_pattern(dtype, i + 1);
        double middle = low + (high - low) / 2, sign = i % 2 == 0 ? 1 : -1;
        check_rounding(dtype, sign * middle);
        check_rounding(dtype, sign * nextafter(middle, low));
        check_rounding(dtype, sign * nextafter(middle, high));
        check_rounding(dtype, sign * (double)nextafterf((float)middle, 0.0f));
        check_rounding(dtype, sign * (double)nextafterf((float)middle, INFINITY));
        if (i % 16 == 0) check_rounding(dtype, nextafter(high, low));
    }
    const double special[] = {0.0,       -0.0,     INFINITY, -INFINITY, 0x1p-1074,  -0x1p-1074, 1e-320,
                              0x1p-1022, 0x1p-149, 0x1p-134, 0x1p-135,  0x1.8p-134, 0x1p-25,    0x1.000002p-25,
                              0x1p-26,   1e300,    -1e300,   65504,     65519,      65520};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) check_rounding(dtype, special[i]);
    test_random random = {dtype};
    for (int i = 0; i < (test_is_quick() ? 20000 : 200000); i++) {
        uint32_t bits = (uint32_t)random_bits(&random);
        float x;
        memcpy(&x, &bits, sizeof x);
        if (!isnan(x)) check_rounding(dtype, (double)x);
    }
    const uint64_t nans[] = {0x7ff8000000000000, 0xfff8000000000000, 0x7ff0000000000001, 0xfff4000000000000,
                             0x7ff0000000000400};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        uint16_t bits;
        convert(&nans[i], RAPT_F64, &bits, dtype, 1);
        assert_true(is_nan_pattern(dtype, bits));
    }
    const uint32_t narrow_nans[] = {0x7fc00000, 0xffc00000, 0x7f800001,
                                    0xff800001}; /* truncation makes the last two infinite */
    for (size_t i = 0; i < sizeof narrow_nans / sizeof *narrow_nans; i++) {
        uint16_t bits;
        convert(&narrow_nans[i], RAPT_F32, &bits, dtype, 1);
        assert_true(is_nan_pattern(dtype, bits));
    }
}

static void test_rounding_to_bf16(void **state) {
    (void)state;
    check_rounding_everywhere(RAPT_BF16);
}
static void test_rounding_to_f16(void **state) {
    (void)state;
    check_rounding_everywhere(RAPT_F16);
}

static void test_f64_to_f32(void **state) {
    (void)state;
    test_random random = {5};
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)random_bits(&random) & 0x7f7fffff;
        float low, high, rounded;
        memcpy(&low, &bits, sizeof low);
        high = nextafterf(low, INFINITY);
        if (isinf(high)) continue;
        double middle = (double)low + ((double)high - (double)low) / 2, below = nextafter(middle, 0),
               above = nextafter(middle, INFINITY);
        convert(&middle, RAPT_F64, &rounded, RAPT_F32, 1);
        assert_true(rounded == (bits % 2 == 0 ? low : high));
        convert(&below, RAPT_F64, &rounded, RAPT_F32, 1);
        assert_true(rounded == low);
        convert(&above, RAPT_F64, &rounded, RAPT_F32, 1);
        assert_true(rounded == high);
    }
    double large = 0x1.ffffffp127;
    float rounded;
    convert(&large, RAPT_F64, &rounded, RAPT_F32, 1);
    assert_true(isinf(rounded));
}

/* ---- heads ---- */

static const int64_t N = 2, L = 3, H = 4, D = 5;

/* Element [n, h, l, d] of heads, or [h, l, d] for n = 0 without a batch. */
static double head_element(const rapt_tensor *heads, int64_t n, int64_t h, int64_t l, int64_t d) {
    int32_t first = heads->ndim - 3;
    return get_element(heads,
                       ((n * heads->shape[first] + h) * heads->shape[first + 1] + l) * heads->shape[first + 2] + d);
}

/* Whether split[n, h, l, d] is merged[n, l, h*D + d] everywhere. */
static bool match(const rapt_tensor *split, const rapt_tensor *merged) {
    int32_t first = split->ndim - 3;
    int64_t heads = split->shape[first], length = split->shape[first + 1], dim = split->shape[first + 2];
    int64_t batch = first == 1 ? split->shape[0] : 1;
    for (int64_t i = 0; i < batch * length * heads * dim; i++) {
        int64_t d = i % dim, h = i / dim % heads, l = i / dim / heads % length, n = i / dim / heads / length;
        if (head_element(split, n, h, l, d) != get_element(merged, i)) return false;
    }
    return true;
}

static void count_up(const rapt_tensor *tensor) {
    for (int64_t i = 0; i < rapt_tensor_count(tensor); i++) set_element(tensor, i, (double)i);
}

static void test_split_is_always_a_view_and_merge_takes_it_back(void **state) {
    (void)state;
    test_random random = {3};
    for (int round = 0; round < 200; round++) {
        int64_t shape[3] = {random_between(&random, 1, 3), random_between(&random, 1, 4), 0};
        int64_t heads = random_between(&random, 1, 4), dim = random_between(&random, 1, 4);
        shape[2] = heads * dim;
        bool batched = round % 2 == 0;
        rapt_tensor t = make_strided_tensor(&random, RAPT_F32, batched ? 3 : 2, batched ? shape : shape + 1), split,
                    merged;
        count_up(&t);
        assert_ok(context, rapt_split_heads(context, &t, heads, &split));
        assert_ptr_equal(split.data, t.data);
        assert_shape(&split, t.ndim + 1,
                     batched ? (int64_t[]){shape[0], heads, shape[1], dim} : (int64_t[]){heads, shape[1], dim});
        assert_true(match(&split, &t));
        assert_ok(context, rapt_merge_heads(context, &split, NULL, &merged));
        assert_ptr_equal(merged.data, t.data);
        assert_shape(&merged, t.ndim, t.shape);
        assert_true(same_bits(&merged, &t));
        free_tensor(&t);
    }
}

static void test_split_refuses(void **state) {
    (void)state;
    rapt_tensor t = make_tensor(RAPT_F32, 3, (int64_t[]){N, L, H * D}), kept, split;
    memset(&split, 7, sizeof split);
    kept = split;
    assert_fails(rapt_split_heads(context, &t, 3, &split), RAPT_ERROR_ARGUMENT, "num_heads 3");
    assert_fails(rapt_split_heads(context, &t, 0, &split), RAPT_ERROR_ARGUMENT, "num_heads 0");
    assert_fails(rapt_split_heads(context, &t, -1, &split), RAPT_ERROR_ARGUMENT, "num_heads -1");
    assert_fails(rapt_split_heads(context, NULL, 2, &split), RAPT_ERROR_NULL, "tensor");
    assert_fails(rapt_split_heads(context, &t, 2, NULL), RAPT_ERROR_NULL, "heads");
    rapt_tensor wrong_rank = rapt_tensor_of(t.data, RAPT_F32, 1, (int64_t[]){H * D});
    assert_fails(rapt_split_heads(context, &wrong_rank, 2, &split), RAPT_ERROR_SHAPE, "[20]");
    wrong_rank = rapt_tensor_of(t.data, RAPT_F32, 4, (int64_t[]){1, N, L, H * D});
    assert_fails(rapt_split_heads(context, &wrong_rank, 2, &split), RAPT_ERROR_SHAPE, "[1, 2, 3, 20]");
    assert_memory_equal(&split, &kept, sizeof split);
    free_tensor(&t);
}

static void test_merge_copies_where_it_must(void **state) {
    (void)state;
    test_random random = {9};
    for (int batched = 0; batched < 2; batched++) {
        int64_t shape[4] = {N, H, L, D}, wide[3] = {N, L, H * D};
        const int64_t *heads_shape = shape + 1 - batched, *merged_shape = wide + 1 - batched;
        rapt_tensor heads = make_tensor(RAPT_F64, 3 + batched, heads_shape), merged = {0}, same;
        count_up(&heads);
        assert_fails(rapt_merge_heads(context, &heads, NULL, &merged), RAPT_ERROR_LAYOUT,
                     batched ? "[2, 3, 20]" : "[3, 20]");
        assert_null(merged.data);
        for (int round = 0; round < 10; round++) { /* into any strides */
            rapt_tensor buffer = make_strided_tensor(&random, RAPT_F64, 2 + batched, merged_shape);
            assert_ok(context, rapt_merge_heads(context, &heads, &buffer, &merged));
            assert_memory_equal(&merged, &buffer, sizeof merged);
            assert_true(match(&heads, &merged));
            free_tensor(&buffer);
        }
        rapt_tensor buffer = make_tensor(RAPT_F64, 2 + batched, merged_shape), bad = buffer;
        bad.shape[bad.ndim - 1]--;
        assert_fails(rapt_merge_heads(context, &heads, &bad, &merged), RAPT_ERROR_SHAPE, "buffer");
        bad = buffer;
        bad.dtype = RAPT_F32;
        assert_fails(rapt_merge_heads(context, &heads, &bad, &merged), RAPT_ERROR_DTYPE, "buffer is f32");
        bad = rapt_tensor_of(heads.data, RAPT_F64, 2 + batched, merged_shape);
        assert_fails(rapt_merge_heads(context, &heads, &bad, &merged), RAPT_ERROR_LAYOUT, "shares memory");
        assert_fails(rapt_merge_heads(context, NULL, &buffer, &merged), RAPT_ERROR_NULL, "heads");
        assert_fails(rapt_merge_heads(context, &heads, &buffer, NULL), RAPT_ERROR_NULL, "merged");
        rapt_tensor wrong_rank = rapt_tensor_of(heads.data, RAPT_F64, 2, (int64_t[]){L, D});
        assert_fails(rapt_merge_heads(context, &wrong_rank, &buffer, &merged), RAPT_ERROR_SHAPE, "[3, 5]");

        /* A buffer where a view will do: the view is what comes back, and the buffer stays as it was. */
        rapt_tensor split;
        count_up(&buffer);
        assert_ok(context, rapt_split_heads(context, &buffer, H, &split));
        rapt_tensor spare = make_tensor(RAPT_F64, 2 + batched, merged_shape);
        assert_ok(context, rapt_merge_heads(context, &split, &spare, &same));
        assert_ptr_equal(same.data, buffer.data);
        assert_true(largest_magnitude(&spare) == 0);
        free_tensor(&spare);
        free_tensor(&heads);
        free_tensor(&buffer);
    }
}

static void test_merge_of_any_number_of_heads(void **state) {
    (void)state;
    for (int64_t heads_count = 2; heads_count <= 5; heads_count++) {
        for (int64_t dim = 2; dim <= 4; dim++) {
            rapt_tensor heads = make_tensor(RAPT_F32, 3, (int64_t[]){heads_count, L, dim}), merged;
            rapt_tensor buffer = make_tensor(RAPT_F32, 2, (int64_t[]){L, heads_count * dim});
            count_up(&heads);
            assert_fails(rapt_merge_heads(context, &heads, NULL, &merged), RAPT_ERROR_LAYOUT, "buffer");
            assert_ok(context, rapt_merge_heads(context, &heads, &buffer, &merged));
            assert_true(merged.data == buffer.data && match(&heads, &merged));
            free_tensor(&heads);
            free_tensor(&buffer);
        }
    }
}

/* One head, or heads of one, merge without a copy whatever the strides. */
static void test_merge_of_single_heads_is_a_view(void **state) {
    (void)state;
    test_random random = {21};
    for (int round = 0; round < 40; round++) {
        int64_t shape[4] = {N, round % 2 == 0 ? 1 : H, L, round % 2 == 0 ? D : 1};
        rapt_tensor heads = make_strided_tensor(&random, RAPT_BF16, 4, shape), merged;
        count_up(&heads);
        assert_ok(context, rapt_merge_heads(context, &heads, NULL, &merged));
        assert_ptr_equal(merged.data, heads.data);
        assert_true(match(&heads, &merged));
        free_tensor(&heads);
    }
    rapt_tensor empty = make_tensor(RAPT_F32, 4, (int64_t[]){N, H, 0, D}), merged;
    assert_ok(context, rapt_merge_heads(context, &empty, NULL, &merged));
    assert_shape(&merged, 3, (int64_t[]){N, 0, H * D});
    free_tensor(&empty);
}

static void test_repeat(void **state) {
    (void)state;
    test_random random = {31};
    for (int round = 0; round < 200; round++) {
        bool batched = round % 2 == 0;
        int64_t kv_heads = random_between(&random, 1, 3), times = random_between(&random, 1, 3);
        int64_t shape[4] = {N, kv_heads, L, D}, repeated_shape[4] = {N, kv_heads * times, L, D};
        int32_t ndim = batched ? 4 : 3;
        rapt_tensor heads = make_strided_tensor(&random, RAPT_F32, ndim, batched ? shape : shape + 1);
        rapt_tensor buffer =
                        make_strided_tensor(&random, RAPT_F32, ndim, batched ? repeated_shape : repeated_shape + 1),
                    repeated;
        count_up(&heads);
        bool is_view = kv_heads == 1 || times == 1;
        if (!is_view)
            assert_fails(rapt_repeat_kv_heads(context, &heads, times, NULL, &repeated), RAPT_ERROR_LAYOUT, "buffer");
        assert_ok(context, rapt_repeat_kv_heads(context, &heads, times, is_view ? NULL : &buffer, &repeated));
        assert_ptr_equal(repeated.data, is_view ? heads.data : buffer.data);
        assert_shape(&repeated, ndim, batched ? repeated_shape : repeated_shape + 1);
        for (int64_t i = 0; i < rapt_tensor_count(&repeated); i++) {
            int64_t d = i % D, l = i / D % L, h = i / D / L % (kv_heads * times), n = i / D / L / (kv_heads * times);
            assert_true(get_element(&repeated, i) == head_element(&heads, n, h / times, l, d));
        }
        free_tensor(&heads);
        free_tensor(&buffer);
    }
}

static void test_repeat_refuses(void **state) {
    (void)state;
    rapt_tensor heads = make_tensor(RAPT_F32, 4, (int64_t[]){N, 2, L, D}), repeated = {0};
    rapt_tensor buffer = make_tensor(RAPT_F32, 4, (int64_t[]){N, 6, L, D}), bad = buffer;
    assert_fails(rapt_repeat_kv_heads(context, &heads, 0, &buffer, &repeated), RAPT_ERROR_ARGUMENT, "times is 0");
    assert_fails(rapt_repeat_kv_heads(context, &heads, -2, &buffer, &repeated), RAPT_ERROR_ARGUMENT, "times is -2");
    assert_fails(rapt_repeat_kv_heads(context, &heads, INT64_MAX, &buffer, &repeated), RAPT_ERROR_OVERFLOW,
                 "9223372036854775807");
    assert_fails(rapt_repeat_kv_heads(context, &heads, 2, &buffer, &repeated), RAPT_ERROR_SHAPE, "[2, 4, 3, 5]");
    bad.dtype = RAPT_F16;
    assert_fails(rapt_repeat_kv_heads(context, &heads, 3, &bad, &repeated), RAPT_ERROR_DTYPE, "f16");
    bad = buffer;
    bad.stride[1] = 0;
    assert_fails(rapt_repeat_kv_heads(context, &heads, 3, &bad, &repeated), RAPT_ERROR_LAYOUT, "buffer");
    assert_fails(rapt_repeat_kv_heads(context, NULL, 3, &buffer, &repeated), RAPT_ERROR_NULL, "heads");
    assert_fails(rapt_repeat_kv_heads(context, &heads, 3, &buffer, NULL), RAPT_ERROR_NULL, "repeated");
    rapt_tensor wrong_rank = rapt_tensor_of(heads.data, RAPT_F32, 2, (int64_t[]){L, D});
    assert_fails(rapt_repeat_kv_heads(context, &wrong_rank, 3, &buffer, &repeated), RAPT_ERROR_SHAPE, "[3, 5]");
    assert_null(repeated.data);
    free_tensor(&heads);
    free_tensor(&buffer);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_and_devices),
        cmocka_unit_test(test_tensor_of),
        cmocka_unit_test(test_absurd_ranks_and_sizes_are_kept_for_the_call_to_refuse),
        cmocka_unit_test(test_count),
        cmocka_unit_test(test_is_contiguous),
        cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_slice),
        cmocka_unit_test(test_copy_between_all_types_and_strides),
        cmocka_unit_test(test_copy_of_bool_and_of_broadcasts),
        cmocka_unit_test(test_copy_refuses),
        cmocka_unit_test(test_all_16_bit_values_round_trip),
        cmocka_unit_test(test_16_bit_types_into_each_other),
        cmocka_unit_test(test_rounding_to_bf16),
        cmocka_unit_test(test_rounding_to_f16),
        cmocka_unit_test(test_f64_to_f32),
        cmocka_unit_test(test_split_is_always_a_view_and_merge_takes_it_back),
        cmocka_unit_test(test_split_refuses),
        cmocka_unit_test(test_merge_copies_where_it_must),
        cmocka_unit_test(test_merge_of_any_number_of_heads),
        cmocka_unit_test(test_merge_of_single_heads_is_a_view),
        cmocka_unit_test(test_repeat),
        cmocka_unit_test(test_repeat_refuses),
    };
    return cmocka_run_group_tests_name("tensor", tests, make_shared_context, destroy_shared_context);
}
