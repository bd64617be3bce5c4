/* vec_avx2.h - the vector operations of vec.h with AVX2 and FMA */
#include <immintrin.h>

#define MICRO_ROWS 6
#define MICRO_VECTORS 2 /* 12 accumulators, 2 vectors of B and one of A: 15 of 16 registers */

#ifdef RAPT_KERNEL_F32
typedef __m256 vec;
#define LANES 8
INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
INLINE vec v_all(real x) { return _mm256_set1_ps(x); }
INLINE vec v_load(const real *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(real *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE vec v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
INLINE vec v_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE real v_first(vec x) { return _mm256_cvtss_f32(x); }
INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec v_round(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec v_max_or_second(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    __m256i power = _mm256_slli_epi32(_mm256_castps_si256(v_add(k, v_all(POWER_MAGIC))), MANTISSA_BITS);
    __m256 keep = _mm256_cmp_ps(k, v_all(LEAST_POWER), _CMP_NLT_UQ);
    return _mm256_and_ps(keep, v_mul(x, _mm256_castsi256_ps(power)));
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, v_all(to), _CMP_EQ_OQ));
}
/* Halves of two rows, four rows apart, load into one vector; 4 x 4 blocks in its halves then remain to be transposed. */
INLINE vec v_load_halves(const real *row, int64_t stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * stride), 1);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    UNROLL for (int i = 0; i < 8; i += 4) {
        vec r0 = v_load_halves(rows + i, stride), r1 = v_load_halves(rows + stride + i, stride);
        vec r2 = v_load_halves(rows + 2 * stride + i, stride), r3 = v_load_halves(rows + 3 * stride + i, stride);
        __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1)), b = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
        __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3)), d = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
        x[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
        x[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
        x[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
        x[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
}
#define FOLD_F32(x, OP128, OP1)                                                                                        \
    __m128 four = OP128(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));                                       \
    __m128 two = OP128(four, _mm_movehl_ps(four, four));                                                               \
    return _mm_cvtss_f32(OP1(two, _mm_movehdup_ps(two)))
INLINE real v_sum(vec x) { FOLD_F32(x, _mm_add_ps, _mm_add_ss); }
INLINE real v_largest(vec x) { FOLD_F32(x, _mm_max_ps, _mm_max_ss); }
#else
typedef __m256d vec;
#define LANES 4
INLINE vec v_zero(void) { return _mm256_setzero_pd(); }
INLINE vec v_all(real x) { return _mm256_set1_pd(x); }
INLINE vec v_load(const real *p) { return _mm256_loadu_pd(p); }
INLINE void v_store(real *p, vec x) { _mm256_storeu_pd(p, x); }
INLINE real v_first(vec x) { return _mm256_cvtsd_f64(x); }
INLINE vec v_add(vec a, vec b) { return _mm256_add_pd(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm256_sub_pd(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm256_mul_pd(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm256_div_pd(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_pd(a, b, c); }
INLINE vec v_round(vec x) { return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec v_max_or_second(vec a, vec b) { return _mm256_max_pd(a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return _mm256_min_pd(a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    __m256i power = _mm256_slli_epi64(_mm256_castpd_si256(v_add(k, v_all(POWER_MAGIC))), MANTISSA_BITS);
    __m256d keep = _mm256_cmp_pd(k, v_all(LEAST_POWER), _CMP_NLT_UQ);
    return _mm256_and_pd(keep, v_mul(x, _mm256_castsi256_pd(power)));
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return _mm256_blendv_pd(otherwise, then, _mm256_cmp_pd(x, v_all(to), _CMP_EQ_OQ));
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    UNROLL for (int i = 0; i < 4; i++) x[i] = v_load(rows + i * stride);
    vec a = _mm256_unpacklo_pd(x[0], x[1]), b = _mm256_unpackhi_pd(x[0], x[1]);
    vec c = _mm256_unpacklo_pd(x[2], x[3]), d = _mm256_unpackhi_pd(x[2], x[3]);
    x[0] = _mm256_permute2f128_pd(a, c, 0x20);
    x[1] = _mm256_permute2f128_pd(b, d, 0x20);
    x[2] = _mm256_permute2f128_pd(a, c, 0x31);
    x[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
#define FOLD_F64(x, OP128, OP1)                                                                                        \
    __m128d two = OP128(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));                                       \
    return _mm_cvtsd_f64(OP1(two, _mm_unpackhi_pd(two, two)))
INLINE real v_sum(vec x) { FOLD_F64(x, _mm_add_pd, _mm_add_sd); }
INLINE real v_largest(vec x) { FOLD_F64(x, _mm_max_pd, _mm_max_sd); }
#endif
