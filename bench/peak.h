/* peak.h - the loops that measure an ISA's limits */
#ifndef RAPT_BENCH_PEAK_H
#define RAPT_BENCH_PEAK_H

#include <stddef.h>
#include <stdint.h>

typedef struct peak_loop {
    double (*run)(int64_t rounds); /* multiply-adds; the result only keeps the loop alive, as the other's */
    double operations_per_round;
    double (*read)(const float *data, size_t count); /* of which it reads whole 256-byte pieces */
} peak_loop;

#if defined(RAPT_KERNEL_ISA_AVX512)
#define PEAK_LOOP peak_avx512
#elif defined(RAPT_KERNEL_ISA_AVX2)
#define PEAK_LOOP peak_avx2
#elif defined(RAPT_KERNEL_ISA_NEON)
#define PEAK_LOOP peak_neon
#elif defined(RAPT_KERNEL_ISA_BASELINE)
#define PEAK_LOOP peak_baseline
#endif

extern const peak_loop peak_baseline, peak_avx2, peak_avx512, peak_neon;

#endif
