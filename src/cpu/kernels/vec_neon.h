/* vec_neon.h - the vector operations of vec.h with AArch64 Advanced SIMD */
#include <arm_neon.h>

#define MICRO_ROWS 6
#define MICRO_VECTORS 4 /* 24 accumulators, 4 vectors of B and one of A: 29 of 32 registers */

#ifdef RAPT_KERNEL_F32
typedef float32x4_t vec;
#define LANES 4
INLINE vec v_zero(void) { return vdupq_n_f32(0); }
INLINE vec v_all(real x) { return vdupq_n_f32(x); }
INLINE vec v_load(const real *p) { return vld1q_f32(p); }
INLINE void v_store(real *p, vec x) { vst1q_f32(p, x); }
INLINE vec v_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vec v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE real v_first(vec x) { return vgetq_lane_f32(x, 0); }
INLINE vec v_add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec v_sub(vec a, vec b) { return vsubq_f32(a, b); }
INLINE vec v_mul(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec v_div(vec a, vec b) { return vdivq_f32(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
INLINE vec v_round(vec x) { return vrndnq_f32(x); }
INLINE vec v_max_or_second(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    uint32x4_t power = vshlq_n_u32(vreinterpretq_u32_f32(v_add(k, v_all(POWER_MAGIC))), MANTISSA_BITS);
    uint32x4_t result = vreinterpretq_u32_f32(v_mul(x, vreinterpretq_f32_u32(power)));
    return vreinterpretq_f32_u32(vbicq_u32(result, vcltq_f32(k, v_all(LEAST_POWER))));
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return vbslq_f32(vceqq_f32(x, v_all(to)), then, otherwise);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    UNROLL for (int i = 0; i < 4; i++) x[i] = v_load(rows + i * stride);
    float64x2_t a = vreinterpretq_f64_f32(vzip1q_f32(x[0], x[1])), b = vreinterpretq_f64_f32(vzip2q_f32(x[0], x[1]));
    float64x2_t c = vreinterpretq_f64_f32(vzip1q_f32(x[2], x[3])), d = vreinterpretq_f64_f32(vzip2q_f32(x[2], x[3]));
    x[0] = vreinterpretq_f32_f64(vzip1q_f64(a, c));
    x[1] = vreinterpretq_f32_f64(vzip2q_f64(a, c));
    x[2] = vreinterpretq_f32_f64(vzip1q_f64(b, d));
    x[3] = vreinterpretq_f32_f64(vzip2q_f64(b, d));
}
INLINE real v_sum(vec x) {
    float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE real v_largest(vec x) { return vmaxnmvq_f32(x); }
#else
typedef float64x2_t vec;
#define LANES 2
INLINE vec v_zero(void) { return vdupq_n_f64(0); }
INLINE vec v_all(real x) { return vdupq_n_f64(x); }
INLINE vec v_load(const real *p) { return vld1q_f64(p); }
INLINE void v_store(real *p, vec x) { vst1q_f64(p, x); }
INLINE real v_first(vec x) { return vgetq_lane_f64(x, 0); }
INLINE vec v_add(vec a, vec b) { return vaddq_f64(a, b); }
INLINE vec v_sub(vec a, vec b) { return vsubq_f64(a, b); }
INLINE vec v_mul(vec a, vec b) { return vmulq_f64(a, b); }
INLINE vec v_div(vec a, vec b) { return vdivq_f64(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return vfmaq_f64(c, a, b); }
INLINE vec v_round(vec x) { return vrndnq_f64(x); }
INLINE vec v_max_or_second(vec a, vec b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    uint64x2_t power = vshlq_n_u64(vreinterpretq_u64_f64(v_add(k, v_all(POWER_MAGIC))), MANTISSA_BITS);
    uint64x2_t result = vreinterpretq_u64_f64(v_mul(x, vreinterpretq_f64_u64(power)));
    return vreinterpretq_f64_u64(vbicq_u64(result, vcltq_f64(k, v_all(LEAST_POWER))));
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return vbslq_f64(vceqq_f64(x, v_all(to)), then, otherwise);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    vec first = v_load(rows), second = v_load(rows + stride);
    x[0] = vzip1q_f64(first, second);
    x[1] = vzip2q_f64(first, second);
}
INLINE real v_sum(vec x) { return vgetq_lane_f64(x, 0) + vgetq_lane_f64(x, 1); }
INLINE real v_largest(vec x) { return vmaxnmvq_f64(x); }
#endif
