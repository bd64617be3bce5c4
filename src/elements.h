/* elements.h - single elements of each dtype, read and written as double or float, rounded once to nearest even */
#ifndef RAPT_ELEMENTS_H
#define RAPT_ELEMENTS_H

#include "rapt/rapt.h"

static inline uint32_t rapt_bits_of_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float rapt_f32_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float rapt_f32_of_bf16(uint16_t bits) { return rapt_f32_of_bits((uint32_t)bits << 16); }

static inline float rapt_f32_of_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return rapt_f32_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent > 0) return rapt_f32_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 0x1p-24f; /* exact */
    return rapt_f32_of_bits(sign | rapt_bits_of_f32(magnitude));
}

/* Rounds to a 16-bit format of the given field widths: (8, 7) is bf16, (5, 10) is f16. */
static inline uint16_t rapt_round_to_16(double x, int exponent_bits, int mantissa_bits) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = (uint32_t)(bits >> 63) << 15;
    int exponent = (int)((bits >> 52) & 2047) - 1023;
    uint64_t significand = bits & 0xfffffffffffffULL;
    uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    if (exponent == 1024) return (uint16_t)(sign | infinity | (significand != 0 ? 1u << (mantissa_bits - 1) : 0));
    if (exponent == -1023) return (uint16_t)sign; /* zero, or far below the smallest result */
    significand |= 1ULL << 52;

    int bias = (1 << (exponent_bits - 1)) - 1, least = 1 - bias; /* least: exponent of the smallest normal number */
    int shift = 52 - mantissa_bits + (exponent < least ? least - exponent : 0);
    if (shift > 54) return (uint16_t)sign;
    uint64_t quotient = significand >> shift, rest = significand & ((1ULL << shift) - 1), half = 1ULL << (shift - 1);
    if (rest > half || (rest == half && (quotient & 1))) quotient++;
    /* A carry out of the mantissa runs into the exponent, which is just what rounding up means. */
    uint64_t result = quotient;
    if (exponent >= least) result += (uint64_t)(exponent + bias - 1) << mantissa_bits;
    return (uint16_t)(sign | (result > infinity ? infinity : (uint32_t)result));
}

static inline double rapt_element_load(const void *data, rapt_dtype dtype, int64_t index) {
    switch (dtype) {
    case RAPT_F32: return (double)((const float *)data)[index];
    case RAPT_F64: return ((const double *)data)[index];
    case RAPT_BF16: return (double)rapt_f32_of_bf16(((const uint16_t *)data)[index]);
    case RAPT_F16: return (double)rapt_f32_of_f16(((const uint16_t *)data)[index]);
    case RAPT_BOOL: return ((const uint8_t *)data)[index] != 0 ? 1.0 : 0.0;
    }
    return 0;
}

static inline void rapt_element_store(void *data, rapt_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case RAPT_F32: ((float *)data)[index] = (float)value; break;
    case RAPT_F64: ((double *)data)[index] = value; break;
    case RAPT_BF16: ((uint16_t *)data)[index] = rapt_round_to_16(value, 8, 7); break;
    case RAPT_F16: ((uint16_t *)data)[index] = rapt_round_to_16(value, 5, 10); break;
    case RAPT_BOOL: ((uint8_t *)data)[index] = value != 0; break;
    }
}

#endif
