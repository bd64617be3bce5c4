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
INLINE vec v_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
INLINE vec v_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE real v_first(vec x) { return _mm512_cvtss_f32(x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion" /* in gcc's macro of it, without optimisation */
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#pragma GCC diagnostic pop
INLINE vec v_max_or_second(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(k, v_all(LEAST_POWER), _CMP_NLT_UQ), x, k);
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, v_all(to), _CMP_EQ_OQ), otherwise, then);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    vec t[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = v_load(rows + i * stride);
    UNROLL for (int i = 0; i < 16; i += 4) { /* 4 x 4 blocks: pairs, then quadruples */
        vec a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
        vec c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
        t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    }
    UNROLL for (int i = 0; i < 4; i++) { /* the 4 x 4 arrangement of those blocks */
        vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        vec c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}
/* From eight lanes on, the fold is the same for sums and maxima. */
#define FOLD_F32(x, OP256, OP128, OP1)                                                                                 \
    __m256 eight = OP256(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));                                     \
    __m128 four = OP128(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));                               \
    __m128 two = OP128(four, _mm_movehl_ps(four, four));                                                               \
    return _mm_cvtss_f32(OP1(two, _mm_movehdup_ps(two)))
INLINE real v_sum(vec x) { FOLD_F32(x, _mm256_add_ps, _mm_add_ps, _mm_add_ss); }
INLINE real v_largest(vec x) { FOLD_F32(x, _mm256_max_ps, _mm_max_ps, _mm_max_ss); }
#else
typedef __m512d vec;
#define LANES 8
INLINE vec v_zero(void) { return _mm512_setzero_pd(); }
INLINE vec v_all(real x) { return _mm512_set1_pd(x); }
INLINE vec v_load(const real *p) { return _mm512_loadu_pd(p); }
INLINE void v_store(real *p, vec x) { _mm512_storeu_pd(p, x); }
INLINE real v_first(vec x) { return _mm512_cvtsd_f64(x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_pd(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_pd(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_pd(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_pd(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_pd(a, b, c); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion" /* as above */
INLINE vec v_round(vec x) { return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#pragma GCC diagnostic pop
INLINE vec v_max_or_second(vec a, vec b) { return _mm512_max_pd(a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return _mm512_min_pd(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(k, v_all(LEAST_POWER), _CMP_NLT_UQ), x, k);
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(x, v_all(to), _CMP_EQ_OQ), otherwise, then);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    vec t[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = v_load(rows + i * stride);
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_pd(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_pd(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        vec a = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88), b = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
        vec c = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88), d = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
        x[i] = _mm512_shuffle_f64x2(a, c, 0x88);
        x[i + 2] = _mm512_shuffle_f64x2(b, d, 0x88);
        x[i + 4] = _mm512_shuffle_f64x2(a, c, 0xdd);
        x[i + 6] = _mm512_shuffle_f64x2(b, d, 0xdd);
    }
}
#define FOLD_F64(x, OP256, OP128, OP1)                                                                                 \
    __m256d four = OP256(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));                                     \
    __m128d two = OP128(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));                                 \
    return _mm_cvtsd_f64(OP1(two, _mm_unpackhi_pd(two, two)))
INLINE real v_sum(vec x) { FOLD_F64(x, _mm256_add_pd, _mm_add_pd, _mm_add_sd); }
INLINE real v_largest(vec x) { FOLD_F64(x, _mm256_max_pd, _mm_max_pd, _mm_max_sd); }
#endif
