/* vec.h - the element type and the vector operations that all kernels are written in
 *
 * `real` is the accumulation type of this compilation, `vec` holds LANES of them. Every operation is exactly rounded, so
 * all ISAs with a fused multiply-add give the same bits as long as the kernels sum in one order. The ones that need
 * a word:
 *
 *   v_load_f16, v_load_bf16    numbers of those types, in the compilation for float
 *   v_fma(a, b, c)             a * b + c, rounded once
 *   v_fma_of(a, b, c)          the same with *a in all lanes, straight from memory
 *   v_round(x)                 to the nearest integer, ties to even
 *   v_max_or_second(a, b)      a > b ? a : b, so b when either is NaN; v_min_or_second likewise
 *   v_times_pow2(x, k)         x * 2^k for integers k <= 0, and exactly 0 below LEAST_POWER (never a denormal power),
 *                              whatever x; else a NaN in x or k stays NaN
 *   v_where_equal(x, a, t, o)  t in the lanes where x equals a, else o
 *   v_load_transposed(r, s, x) a LANES x LANES block of which rows lie s apart: x[i] is column i
 *   v_kept(x)                  x, in a register: for numbers from memory that gcc would load again for each use
 *   v_sum(x), v_largest(x)     over the lanes, folded in halves: lane i with lane i + LANES / 2, and so on
 */
#ifndef RAPT_CPU_KERNELS_VEC_H
#define RAPT_CPU_KERNELS_VEC_H

#include "../../elements.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

/* For loops with a constant count over arrays that must live in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#ifdef RAPT_KERNEL_F32
typedef float real;
typedef uint32_t bits;
#define MANTISSA_BITS 23
#define LEAST_POWER (-125.0f)         /* so that a weight, at least 2^-0.5 * 2^-125, is a normal number */
#define POWER_MAGIC (0x1.8p23f + 127) /* k + this has the biased exponent k + 127 in its low bits */
#define ROUND_MAGIC 0x1.8p23f
#define ROUND_LIMIT 0x1p22f
#define LOWEST (-FLT_MAX)
#define LOG2_E 0x1.715476p+0f
#else
typedef double real;
typedef uint64_t bits;
#define MANTISSA_BITS 52
#define LEAST_POWER (-1021.0)
#define POWER_MAGIC (0x1.8p52 + 1023)
#define ROUND_MAGIC 0x1.8p52
#define ROUND_LIMIT 0x1p51
#define LOWEST (-DBL_MAX)
#define LOG2_E 0x1.71547652b82fep+0
#endif

#if defined(RAPT_KERNEL_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(RAPT_KERNEL_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(RAPT_KERNEL_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_baseline.h"
#endif

INLINE vec v_kept(vec x) {
#ifdef RAPT_KERNEL_ISA_AVX512
    __asm__("" : "+v"(x)); /* may have changed it, as far as the compiler knows */
#endif
    return x;
}

/* A broadcast to a register takes a slot of AMD's vector units, which have none left beside multiply-adds and 16-bit numbers
 * to be widened; one that is part of a multiply-add takes none. */
INLINE vec v_fma_of(const real *a, vec b, vec c) {
#if defined(RAPT_KERNEL_ISA_AVX512) && defined(RAPT_KERNEL_F32)
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*a));
    return c;
#else
    return v_fma(v_all(*a), b, c);
#endif
}

/* Masked scores are -inf. */
INLINE vec v_where_masked(vec score, vec then, vec otherwise) {
    return v_where_equal(score, (real)-INFINITY, then, otherwise);
}

#endif
