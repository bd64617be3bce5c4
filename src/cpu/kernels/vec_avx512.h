/* vec_avx512.h - the vector operations of vec.h with AVX-512 (F, BW, DQ, VL) */
#include <immintrin.h>

#define MICRO_ROWS 6
#define MICRO_VECTORS 4 /* 24 accumulators, 4 vectors of B and one of A: 29 of 32 registers */

#ifdef RAPT_KERNEL_F32
typedef __m512 vec;
#define LANES 16
INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_all(real x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const real *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(real *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec v_max_or_second(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(k, v_all(LEAST_POWER), _CMP_NLT_UQ), x, k);
}
INLINE vec v_where_masked(vec score, vec then, vec otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(score, v_all(-INFINITY), _CMP_EQ_OQ), otherwise, then);
}
#else
typedef __m512d vec;
#define LANES 8
INLINE vec v_zero(void) { return _mm512_setzero_pd(); }
INLINE vec v_all(real x) { return _mm512_set1_pd(x); }
INLINE vec v_load(const real *p) { return _mm512_loadu_pd(p); }
INLINE void v_store(real *p, vec x) { _mm512_storeu_pd(p, x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_pd(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_pd(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_pd(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_pd(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vec v_round(vec x) { return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec v_max_or_second(vec a, vec b) { return _mm512_max_pd(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(k, v_all(LEAST_POWER), _CMP_NLT_UQ), x, k);
}
INLINE vec v_where_masked(vec score, vec then, vec otherwise) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(score, v_all((real)-INFINITY), _CMP_EQ_OQ), otherwise, then);
}
#endif
