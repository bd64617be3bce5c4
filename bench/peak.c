/* peak.c - the limits: independent multiply-add chains in registers, as many as the micro-kernel has accumulators, and
 * a plain vectorised read
 *
 * Compiled once for each ISA like the kernels; bench.c picks the one of the ISA in use.
 */
#include "peak.h"

#include "cpu/kernels/vec.h"

enum { CHAINS = MICRO_ROWS * MICRO_VECTORS };

static double run(int64_t rounds) {
    vec sum[CHAINS], a = v_all((real)0.999), b = v_all((real)1e-7);
    for (int i = 0; i < CHAINS; i++) sum[i] = v_all((real)i);
    for (int64_t k = 0; k < rounds; k++) {
#if defined(__clang__)
        _Pragma("clang loop unroll(full)")
#else
        _Pragma("GCC unroll 24")
#endif
            for (int i = 0; i < CHAINS; i++) sum[i] = v_fma(sum[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = v_add(sum[0], sum[i]);
    real lane[LANES];
    v_store(lane, sum[0]);
    return (double)lane[0];
}

static double read(const float *data, size_t count) {
    enum { PIECE = 64, VECTORS = PIECE / LANES };
    vec sum[4];
    for (int i = 0; i < 4; i++) sum[i] = v_zero();
    for (size_t at = 0; at + PIECE <= count; at += PIECE) {
        UNROLL for (int i = 0; i < VECTORS; i++) sum[i % 4] = v_add(sum[i % 4], v_load(data + at + (size_t)i * LANES));
    }
    for (int i = 1; i < 4; i++) sum[0] = v_add(sum[0], sum[i]);
    real lane[LANES];
    v_store(lane, sum[0]);
    return (double)lane[0];
}

extern const peak_loop PEAK_LOOP;
const peak_loop PEAK_LOOP = {.run = run, .operations_per_round = 2.0 * CHAINS * LANES, .read = read};
