/* vec_baseline.h - the vector operations of vec.h in the compilers' generic 16-byte vectors, for any CPU
 *
 * There is no fused multiply-add to rely on, so v_fma rounds twice: results differ from the other ISAs' by rounding.
 */
#define MICRO_ROWS 4
#define MICRO_VECTORS 2

typedef real vec __attribute__((vector_size(16)));
typedef bits vec_bits __attribute__((vector_size(16)));
#ifdef RAPT_KERNEL_F32
#define LANES 4
#else
#define LANES 2
#endif

INLINE vec v_all(real x) {
    vec all = {0};
    for (int i = 0; i < LANES; i++) all[i] = x; /* not 0 + x, which loses the sign of -0 */
    return all;
}
INLINE vec v_zero(void) { return (vec){0}; }
INLINE vec v_load(const real *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(real *p, vec x) { memcpy(p, &x, sizeof x); }
#ifdef RAPT_KERNEL_F32
INLINE vec v_load_f16(const uint16_t *p) {
    vec x = {0};
    for (int i = 0; i < LANES; i++) x[i] = rapt_f32_of_f16(p[i]);
    return x;
}
INLINE vec v_load_bf16(const uint16_t *p) {
    vec x = {0};
    for (int i = 0; i < LANES; i++) x[i] = rapt_f32_of_bf16(p[i]);
    return x;
}
#endif
INLINE real v_first(vec x) { return x[0]; }
INLINE vec v_add(vec a, vec b) { return a + b; }
INLINE vec v_sub(vec a, vec b) { return a - b; }
INLINE vec v_mul(vec a, vec b) { return a * b; }
INLINE vec v_div(vec a, vec b) { return a / b; }
INLINE vec v_fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec v_select(vec_bits chosen, vec then, vec otherwise) {
    return (vec)((chosen & (vec_bits)then) | (~chosen & (vec_bits)otherwise));
}
/* Adding and taking away 1.5 * 2^mantissa_bits leaves no room for a fraction; larger numbers have none anyway. */
INLINE vec v_round(vec x) {
    vec magic = v_all(ROUND_MAGIC), limit = v_all(ROUND_LIMIT);
    vec_bits small = (vec_bits)((x < limit) & (x > -limit));
    return v_select(small, (x + magic) - magic, x);
}
INLINE vec v_max_or_second(vec a, vec b) { return v_select((vec_bits)(a > b), a, b); }
INLINE vec v_min_or_second(vec a, vec b) { return v_select((vec_bits)(a < b), a, b); }
INLINE vec v_times_pow2(vec x, vec k) {
    vec_bits power = (vec_bits)(k + v_all(POWER_MAGIC)) << MANTISSA_BITS;
    return (vec)((vec_bits)(x * (vec)power) & ~(vec_bits)(k < v_all(LEAST_POWER)));
}
INLINE vec v_where_equal(vec x, real to, vec then, vec otherwise) {
    return v_select((vec_bits)(x == v_all(to)), then, otherwise);
}
INLINE void v_load_transposed(const real *rows, int64_t stride, vec x[LANES]) {
    for (int i = 0; i < LANES; i++) {
        vec column = v_zero();
        for (int j = 0; j < LANES; j++) column[j] = rows[j * stride + i];
        x[i] = column;
    }
}
INLINE real v_sum(vec x) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}
INLINE real v_largest(vec x) {
    real largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}
