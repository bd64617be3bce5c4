/* test_numerics.c - our own arithmetic and random numbers: accuracy, distribution, and the exact bits */
#include "internal.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* ---- Philox ---- */

static void test_philox(void **state) {
    (void)state;
    /* The vectors that Random123, its authors' library, comes with: zeros, ones, digits of pi. */
    static const struct {
        uint32_t counter[4], key[2], random[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        uint32_t random[4];
        rapt_philox((uint64_t)vectors[i].key[1] << 32 | vectors[i].key[0], vectors[i].counter, random);
        assert_memory_equal(random, vectors[i].random, sizeof random);
        memcpy(random, vectors[i].counter, sizeof random); /* in place */
        rapt_philox((uint64_t)vectors[i].key[1] << 32 | vectors[i].key[0], random, random);
        assert_memory_equal(random, vectors[i].random, sizeof random);
    }
}

/* ---- logarithms, sine and cosine ---- */

/* The largest error allowed, in ulp. Where long double is no wider than double the C library's own error comes on top
 * and this only finds blunders. */
#if LDBL_MANT_DIG >= 64
#define ERROR_BOUND 0.9L
#else
#define ERROR_BOUND 4.0L
#endif

/* Random doubles for points to try, apart from what is tested. */
static uint64_t next_bits(uint64_t *seed) {
    uint64_t z = *seed += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static double next_uniform(uint64_t *seed) { return (double)(next_bits(seed) >> 11) * 0x1p-53; }

static double next_scaled(uint64_t *seed, int exponents) {
    double u = next_uniform(seed);
    return ldexp(u, -(int)(next_bits(seed) % (uint64_t)exponents));
}

static long double ulp_error(double got, long double expected) {
    if (expected == 0) return got == 0 ? 0 : HUGE_VALL;
    int exponent;
    frexpl(expected, &exponent);
    return fabsl((long double)got - expected) / ldexpl(1, exponent - 53);
}

static void check_error(const char *what, double x, double got, long double expected) {
    if (ulp_error(got, expected) <= ERROR_BOUND) return;
    fail_msg("%s of %a is %a, off by %.3Lf ulp", what, x, got, ulp_error(got, expected));
}

static void check_logarithms(double x) {
    check_error("log2", x, rapt_log2(x), log2l(x));
    check_error("log", x, rapt_log(x), logl(x));
}

static void test_logarithms(void **state) {
    (void)state;
    uint64_t seed = 1;
    for (int i = 0; i < 200000; i++) {
        uint64_t bits = next_bits(&seed) >> 1; /* any positive double */
        double x;
        memcpy(&x, &bits, sizeof x);
        if (isfinite(x) && x > 0) check_logarithms(x);
        check_logarithms(0.5 + next_uniform(&seed));
        check_logarithms(1.0 + next_scaled(&seed, 52)); /* ever closer to 1 */
        check_logarithms(1.0 - next_scaled(&seed, 52) * 0.5);
        check_logarithms((next_uniform(&seed) + 0x1p-53) * 0x1p-1022); /* denormal */
    }
    const double edges[] = {0x1p-1074,
                            DBL_MIN - 0x1p-1074,
                            DBL_MIN,
                            DBL_MAX,
                            1 - 0x1p-53,
                            1 + 0x1p-52,
                            0x1.6a09e667f3bccp0,
                            0x1.6a09e667f3bcdp0,
                            10,
                            0x1.6a09e667f3bcdp-1};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) check_logarithms(edges[i]);
}

static void test_logarithms_exact(void **state) {
    (void)state;
    for (int exponent = -1074; exponent < 1024; exponent++) assert_true(rapt_log2(ldexp(1.0, exponent)) == exponent);
    assert_true(rapt_log(1.0) == 0.0 && !signbit(rapt_log(1.0)) && !signbit(rapt_log2(1.0)));
    double (*const logarithms[])(double) = {rapt_log2, rapt_log};
    for (int i = 0; i < 2; i++) {
        assert_true(logarithms[i](0.0) == -INFINITY);
        assert_true(logarithms[i](-0.0) == -INFINITY);
        assert_true(logarithms[i](INFINITY) == INFINITY);
        assert_true(isnan(logarithms[i](-INFINITY)));
        assert_true(isnan(logarithms[i](-1.0)));
        assert_true(isnan(logarithms[i](-0x1p-1074)));
        assert_true(isnan(logarithms[i]((double)NAN)));
    }
}

static void check_sincos(double turns) {
    const long double two_pi = 6.28318530717958647692528676655900577L;
    /* The nearest quarter turn goes off first, exactly: 2 pi turns, rounded, would not vanish where sin or cos does. */
    int quarter = ((int)(turns * 8) + 1) / 2;
    long double angle = two_pi * ((long double)turns - 0.25L * quarter);
    long double sin_angle = sinl(angle), cos_angle = cosl(angle);
    long double sine[4] = {sin_angle, cos_angle, -sin_angle, -cos_angle};
    double got_sine, got_cosine;
    rapt_sincos_2pi(turns, &got_sine, &got_cosine);
    check_error("sine", turns, got_sine, sine[quarter & 3]);
    check_error("cosine", turns, got_cosine, sine[(quarter + 1) & 3]);
}

static void test_sincos(void **state) {
    (void)state;
    uint64_t seed = 2;
    for (int i = 0; i < 200000; i++) {
        check_sincos(next_uniform(&seed));
        check_sincos(next_scaled(&seed, 200));
        double near = (double)(next_bits(&seed) % 8) * 0.125; /* around the eighths of a turn, where octants change */
        check_sincos(near + next_scaled(&seed, 48) * 0.125);
        check_sincos(near + 0.125 - (next_scaled(&seed, 48) + 0x1p-50) * 0.125);
    }
    check_sincos(1 - 0x1p-53);
    check_sincos(0x1p-53);
    static const struct {
        double turns, sine, cosine;
    } exact[] = {{0, 0, 1}, {0.25, 1, 0}, {0.5, 0, -1}, {0.75, -1, 0}};
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        double sine, cosine;
        rapt_sincos_2pi(exact[i].turns, &sine, &cosine);
        assert_memory_equal(&sine, &exact[i].sine, sizeof sine); /* no zero is negative */
        assert_memory_equal(&cosine, &exact[i].cosine, sizeof cosine);
    }
}

/* ---- draws ---- */

#define MANY 1000000

static void draw(void *data, rapt_dtype dtype, int64_t count, rapt_draw kind, double spread, uint64_t seed,
                 uint32_t stream) {
    rapt_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.ndim = 1;
    tensor.shape[0] = count;
    tensor.stride[0] = 1;
    rapt_draw_tensor(&tensor, kind, spread, seed, stream);
}

static double *draw_many(rapt_draw kind, double spread, uint64_t seed, uint32_t stream) {
    double *data = malloc(MANY * sizeof *data);
    assert_non_null(data);
    draw(data, RAPT_F64, MANY, kind, spread, seed, stream);
    return data;
}

static uint64_t fnv1a(const void *data, size_t size) {
    const unsigned char *bytes = data;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* What a seed gives is a promise: these may change only with RAPT_NUMERICS_VERSION. Hashes of little-endian bytes. */
static void test_draw_bits(void **state) {
    (void)state;
    enum { COUNT = 10007 };
    static const struct {
        rapt_dtype dtype;
        rapt_draw kind;
        uint64_t seed;
        uint32_t stream;
        uint64_t hash;
    } draws[] = {
        {RAPT_F32, RAPT_DRAW_UNIFORM, 0, 0, UINT64_C(0x0a94bd36ddccf9c7)},
        {RAPT_F64, RAPT_DRAW_UNIFORM, 0, 0, UINT64_C(0x8bc36307fe6defc8)},
        {RAPT_F32, RAPT_DRAW_NORMAL, 0, 0, UINT64_C(0x6d846e3de815aff9)},
        {RAPT_F64, RAPT_DRAW_NORMAL, 0, 0, UINT64_C(0x9cbf44017c379aa4)},
        {RAPT_F64, RAPT_DRAW_UNIFORM, UINT64_C(0x0123456789abcdef), 7, UINT64_C(0xece3c1f111aecb47)},
        {RAPT_F64, RAPT_DRAW_NORMAL, UINT64_C(0x0123456789abcdef), 7, UINT64_C(0xca376708d4aa7d93)},
    };
    bool same = true;
    for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) {
        static double data[COUNT];
        memset(data, 0, sizeof data);
        draw(data, draws[i].dtype, COUNT, draws[i].kind, 0.1, draws[i].seed, draws[i].stream);
        uint64_t hash = fnv1a(data, COUNT * (draws[i].dtype == RAPT_F64 ? sizeof(double) : sizeof(float)));
        if (hash == draws[i].hash) continue;
        print_error("draw %zu: 0x%016" PRIx64 ", not 0x%016" PRIx64 "\n", i, hash, draws[i].hash);
        same = false;
    }
    assert_true(same);
}

/* Element i as the comment of init.c defines it. */
static void test_draw_definition(void **state) {
    (void)state;
    enum { COUNT = 101 };
    const uint64_t seed = UINT64_C(0xfedcba9876543210);
    double uniform[COUNT], normal[COUNT];
    draw(uniform, RAPT_F64, COUNT, RAPT_DRAW_UNIFORM, 3.0, seed, 5);
    draw(normal, RAPT_F64, COUNT, RAPT_DRAW_NORMAL, 3.0, seed, 5);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t counter[4] = {i / 2, 0, 5, 0x696e6974}, random[4];
        rapt_philox(seed, counter, random);
        double u[2];
        for (int j = 0; j < 2; j++)
            u[j] = (double)(((uint64_t)random[2 * j + 1] << 32 | random[2 * j]) >> 11) * 0x1p-53;
        assert_true(uniform[i] == 3.0 * (2.0 * u[i % 2] - 1.0));
        double angle = 2 * 3.14159265358979323846 * u[1];
        double expected = 3.0 * sqrt(-2.0 * log(u[0] + 0x1p-53)) * (i % 2 == 0 ? cos(angle) : sin(angle));
        assert_true(fabs(normal[i] - expected) < 1e-14);
    }
}

static void test_draw_ranges(void **state) {
    (void)state;
    /* A shorter tensor, odd or even, is the beginning of a longer one, and nothing is written beyond it. */
    double longer[10], shorter[10];
    for (int kind = RAPT_DRAW_UNIFORM; kind <= RAPT_DRAW_NORMAL; kind++) {
        draw(longer, RAPT_F64, 10, (rapt_draw)kind, 1.0, 42, 0);
        for (int64_t count = 0; count <= 9; count++) {
            for (int i = 0; i < 10; i++) shorter[i] = 77.0;
            draw(shorter, RAPT_F64, count, (rapt_draw)kind, 1.0, 42, 0);
            assert_memory_equal(shorter, longer, (size_t)count * sizeof *longer);
            for (int64_t i = count; i < 10; i++) assert_true(shorter[i] == 77.0);
        }
        /* Two dimensions are read row by row. */
        rapt_tensor matrix;
        memset(&matrix, 0, sizeof matrix);
        matrix.data = shorter;
        matrix.dtype = RAPT_F64;
        matrix.ndim = 2;
        matrix.shape[0] = 2, matrix.shape[1] = 5;
        matrix.stride[0] = 5, matrix.stride[1] = 1;
        rapt_draw_tensor(&matrix, (rapt_draw)kind, 1.0, 42, 0);
        assert_memory_equal(shorter, longer, sizeof longer);
    }
}

/* Narrow types hold the f64 draw, rounded. */
static void test_draw_types(void **state) {
    (void)state;
    enum { COUNT = 20000 };
    static double wide[COUNT];
    static uint16_t narrow[COUNT];
    static float single[COUNT];
    for (int kind = RAPT_DRAW_UNIFORM; kind <= RAPT_DRAW_NORMAL; kind++) {
        draw(wide, RAPT_F64, COUNT, (rapt_draw)kind, 0.3, 9, 1);
        draw(single, RAPT_F32, COUNT, (rapt_draw)kind, 0.3, 9, 1);
        for (int i = 0; i < COUNT; i++) assert_true(single[i] == (float)wide[i]);
        const rapt_dtype types[] = {RAPT_BF16, RAPT_F16};
        for (int t = 0; t < 2; t++) {
            draw(narrow, types[t], COUNT, (rapt_draw)kind, 0.3, 9, 1);
            for (int i = 0; i < COUNT; i++) {
                uint16_t expected;
                rapt_store(&expected, types[t], 0, wide[i]);
                assert_int_equal(narrow[i], expected);
            }
        }
    }
}

static void test_uniform_distribution(void **state) {
    (void)state;
    const double spread = 0.25;
    double *x = draw_many(RAPT_DRAW_UNIFORM, spread, 123, 0);
    double sum = 0, squares = 0, smallest = 1, largest = -1;
    enum { BINS = 256 };
    int64_t bin[BINS] = {0};
    for (int i = 0; i < MANY; i++) {
        assert_true(x[i] >= -spread && x[i] < spread);
        sum += x[i];
        squares += x[i] * x[i];
        if (x[i] < smallest) smallest = x[i];
        if (x[i] > largest) largest = x[i];
        bin[(int)((x[i] + spread) / (2 * spread) * BINS)]++;
    }
    free(x);
    /* Within four standard deviations of what the mean, the mean square and chi-square (255 degrees) should be. */
    const double variance = spread * spread / 3;
    assert_true(fabs(sum / MANY) < 4 * sqrt(variance / MANY));
    assert_true(fabs(squares / MANY - variance) < 4 * spread * spread * sqrt(4.0 / 45 / MANY));
    assert_true(smallest < -spread * (1 - 2e-5) && largest > spread * (1 - 2e-5));
    double chi_square = 0, expected = (double)MANY / BINS;
    for (int i = 0; i < BINS; i++) chi_square += ((double)bin[i] - expected) * ((double)bin[i] - expected) / expected;
    assert_true(fabs(chi_square - (BINS - 1)) < 4 * sqrt(2.0 * (BINS - 1)));
}

static void test_normal_distribution(void **state) {
    (void)state;
    const double spread = 0.5;
    double *x = draw_many(RAPT_DRAW_NORMAL, spread, 321, 0);
    double moment[5] = {0}, largest = 0;
    int64_t beyond[5] = {0}; /* how many lie more than 0, 1, 2, 3, 4 deviations from 0 */
    for (int i = 0; i < MANY; i++) {
        double z = x[i] / spread, power = 1;
        for (int k = 1; k <= 4; k++) moment[k] += power *= z;
        for (int k = 1; k <= 4; k++) beyond[k] += fabs(z) > k;
        if (fabs(z) > largest) largest = fabs(z);
    }
    free(x);
    /* The moments are 0, 1, 0, 3; the variance of z^k is E z^2k - (E z^k)^2: 1, 2, 15, 96. */
    const double expected[5] = {1, 0, 1, 0, 3}, variance[5] = {0, 1, 2, 15, 96};
    for (int k = 1; k <= 4; k++) assert_true(fabs(moment[k] / MANY - expected[k]) < 4 * sqrt(variance[k] / MANY));
    for (int k = 1; k <= 4; k++) {
        double share = erfc(k / sqrt(2.0));
        assert_true(fabs((double)beyond[k] - MANY * share) < 4 * sqrt(MANY * share));
    }
    assert_true(largest > 4.5 && largest < 8.58);
}

static double correlation(const double *x, const double *y, int64_t count, int64_t step) {
    double xy = 0, xx = 0, yy = 0;
    for (int64_t i = 0; i < count; i += step) xy += x[i] * y[i], xx += x[i] * x[i], yy += y[i] * y[i];
    return xy / sqrt(xx * yy);
}

static void test_independence(void **state) {
    (void)state;
    const double bound = 4 / sqrt((double)MANY); /* four standard deviations of a correlation that is none */
    static const struct {
        uint64_t seed;
        uint32_t stream;
    } others[] = {{0, 1}, {0, 2}, {0, 0x80000000}, {1, 0}, {2, 0}, {UINT64_C(1) << 32, 0}, {UINT64_C(1) << 63, 0},
                  {1, 1}};
    for (int kind = RAPT_DRAW_UNIFORM; kind <= RAPT_DRAW_NORMAL; kind++) {
        double *x = draw_many((rapt_draw)kind, 1.0, 0, 0);
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            double *y = draw_many((rapt_draw)kind, 1.0, others[i].seed, others[i].stream);
            assert_true(fabs(correlation(x, y, MANY, 1)) < bound);
            free(y);
        }
        for (int64_t lag = 1; lag <= 8; lag++) assert_true(fabs(correlation(x, x + lag, MANY - lag, 1)) < bound * 1.01);
        /* The two of a block, and their squares: the normal ones share a radius and an angle. */
        assert_true(fabs(correlation(x, x + 1, MANY, 2)) < bound * sqrt(2.0));
        double mean = kind == RAPT_DRAW_NORMAL ? 1.0 : 1.0 / 3;
        for (int i = 0; i < MANY; i++) x[i] = x[i] * x[i] - mean;
        assert_true(fabs(correlation(x, x + 1, MANY, 2)) < bound * sqrt(2.0));
        free(x);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        cmocka_unit_test(test_logarithms),
        cmocka_unit_test(test_logarithms_exact),
        cmocka_unit_test(test_sincos),
        cmocka_unit_test(test_draw_bits),
        cmocka_unit_test(test_draw_definition),
        cmocka_unit_test(test_draw_ranges),
        cmocka_unit_test(test_draw_types),
        cmocka_unit_test(test_uniform_distribution),
        cmocka_unit_test(test_normal_distribution),
        cmocka_unit_test(test_independence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
