/* scalar_math.c - logarithms, powers, sine and cosine of our own
 *
 * A C library's log and sin differ in the last bit from one system to the next, and what they give would reach weights
 * and log-sum-exps. These use +, -, * and / on doubles alone, each exactly rounded by IEEE 754 and never fused
 * (-ffp-contract=off), so the bits are the same everywhere. The largest errors found at 320 million points, against 113
 * bits (an exactly rounded result has at most 0.5; tests/test_numerics.c holds them to 0.9):
 *
 *     rapt_log2         0.855 ulp
 *     rapt_log          0.739 ulp
 *     rapt_sincos_2pi   0.818 ulp
 *     rapt_exp2         2 ulp, which is enough for the speeds of rotary positions
 *
 * Polynomials are plain Taylor series, long enough that what they leave out is below 2^-60: their coefficients need no
 * explanation, and nothing here is hot.
 */
#include "internal.h"

#include <math.h> /* INFINITY and NAN: no function of it is called */

static uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The 21 leading bits of x: a product of two such heads, or of one with up to 32 bits, is exact. */
static double head_of(double x) { return from_bits(bits_of(x) & UINT64_C(0xffffffff00000000)); }

/* x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)), and the natural logarithm of m as hi + lo, where hi is a head. */
typedef struct split_log {
    double exponent, hi, lo;
} split_log;

static split_log split(double x) {
    int exponent = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54; /* denormal */
        exponent = -54;
    }
    uint64_t bits = bits_of(x);
    exponent += (int)(bits >> 52) - 1023;
    double m = from_bits((bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000));
    if (m >= 0x1.6a09e667f3bcdp0) { /* sqrt(2): keeps 0 from being the sum of an exponent and its opposite */
        m *= 0.5;
        exponent++;
    }

    /* With s = f / (2 + f): log(1 + f) = log((1 + s) / (1 - s)) = 2s + s * R, R = 2/3 s^2 + 2/5 s^4 + ...
     * Since 2s = f - s * f, this is f - f^2/2 + s * (f^2/2 + R), where f is exact and the rest is small. */
    double f = m - 1.0;
    double s = f / (2.0 + f), z = s * s; /* z < 0.0295 */
    double series = 2.0 / 23;
    series = 2.0 / 21 + z * series;
    series = 2.0 / 19 + z * series;
    series = 2.0 / 17 + z * series;
    series = 2.0 / 15 + z * series;
    series = 2.0 / 13 + z * series;
    series = 2.0 / 11 + z * series;
    series = 2.0 / 9 + z * series;
    series = 2.0 / 7 + z * series;
    series = 2.0 / 5 + z * series;
    series = 2.0 / 3 + z * series;
    double half_square = 0.5 * f * f;
    split_log result;
    result.exponent = exponent;
    result.hi = head_of(f - half_square);
    result.lo = ((f - result.hi) - half_square) + s * (half_square + z * series);
    return result;
}

/* Whether x has no finite logarithm; then *result is what both logarithms give. */
static bool is_special(double x, double *result) {
    if (x > 0.0 && x < INFINITY) return false;
    *result = x == 0.0 ? -INFINITY : x > 0.0 ? INFINITY : (double)NAN;
    return true;
}

double rapt_log2(double x) {
    double special;
    if (is_special(x, &special)) return special;
    const double log2_e_hi = 0x1.7154700000000p+0; /* 22 bits of log2(e), and the next 53 */
    const double log2_e_lo = 0x1.94ae0bf85ddf4p-22;
    split_log l = split(x);
    double hi = l.hi * log2_e_hi; /* exact */
    double lo = (l.lo + l.hi) * log2_e_lo + l.lo * log2_e_hi;
    double sum = l.exponent + hi; /* |exponent| >= 1 > |hi| unless it is 0, so the next line finds what this one lost */
    lo += (l.exponent - sum) + hi;
    return sum + lo;
}

double rapt_log(double x) {
    double special;
    if (is_special(x, &special)) return special;
    const double ln_2_hi = 0x1.62e42fef00000p-1; /* 33 bits of ln(2), and the next 53 */
    const double ln_2_lo = 0x1.473de6af278edp-34;
    split_log l = split(x);
    double big = l.exponent * ln_2_hi; /* exact: the exponent has 11 bits */
    double sum = big + l.hi;
    double lo = (l.lo + l.exponent * ln_2_lo) + ((big - sum) + l.hi);
    return sum + lo;
}

void rapt_sincos_2pi(double turns, double *sine, double *cosine) {
    /* To within an eighth of a turn of the nearest quarter. Exact: 8 * turns is, and so is the difference. */
    int quarter = ((int)(8.0 * turns) + 1) / 2;
    double r = turns - 0.25 * quarter;

    /* The angle x + x_lo = 2 pi r, |x| <= pi/4. */
    const double two_pi = 0x1.921fb54442d18p+2;
    const double two_pi_hi = 0x1.921fb50000000p+2; /* 25 bits of 2 pi, and the next 53 */
    const double two_pi_lo = 0x1.110b4611a6263p-24;
    double r_head = head_of(r);
    double x = r * two_pi;
    double x_lo = ((r_head * two_pi_hi - x) + (r - r_head) * two_pi_hi) + r * two_pi_lo;

    double z = x * x, half_z = 0.5 * z; /* z < 0.617 */
    double s = 1.0 / 355687428096000;   /* 1/17! */
    s = -1.0 / 1307674368000 + z * s;   /* 1/15! */
    s = 1.0 / 6227020800 + z * s;
    s = -1.0 / 39916800 + z * s;
    s = 1.0 / 362880 + z * s;
    s = -1.0 / 5040 + z * s;
    s = 1.0 / 120 + z * s;
    s = -1.0 / 6 + z * s;
    double sin_x = x + (x * z * s + x_lo * (1.0 - half_z)); /* sin' = cos = 1 - z/2 or so */

    double c = -1.0 / 6402373705728000; /* 1/18! */
    c = 1.0 / 20922789888000 + z * c;   /* 1/16! */
    c = -1.0 / 87178291200 + z * c;
    c = 1.0 / 479001600 + z * c;
    c = -1.0 / 3628800 + z * c;
    c = 1.0 / 40320 + z * c;
    c = -1.0 / 720 + z * c;
    c = 1.0 / 24 + z * c;
    double head = 1.0 - half_z;
    double cos_x = head + (((1.0 - head) - half_z) + (z * z * c - x * x_lo));

    /* 0.0 - y negates all but a zero, which stays +0. */
    switch (quarter & 3) {
    case 0: *sine = sin_x, *cosine = cos_x; break;
    case 1: *sine = cos_x, *cosine = 0.0 - sin_x; break;
    case 2: *sine = 0.0 - sin_x, *cosine = 0.0 - cos_x; break;
    default: *sine = 0.0 - cos_x, *cosine = sin_x; break;
    }
}

double rapt_exp2(double x) {
    double whole = (double)(int64_t)x, f = (x - whole) * 0x1.62e42fefa39efp-1; /* ln 2; |f| < 0.7 */
    double series = 1;
    for (int i = 20; i > 0; i--) series = 1 + f / i * series; /* what is left out is below 2^-75 */
    return series * from_bits((uint64_t)((int64_t)whole + 1023) << 52);
}
