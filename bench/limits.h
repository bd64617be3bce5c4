/* limits.h - what the machine can do at most, measured now: multiply-adds and reads from memory */
#ifndef RAPT_BENCH_LIMITS_H
#define RAPT_BENCH_LIMITS_H

#include <rapt/rapt.h>

double seconds_now(void);

/* Operations a second, two for each multiply-add. */
typedef struct peak_rates {
    double whole; /* over all of the time that it was measured for */
    double best;  /* over the fastest piece of it, some 0.4 ms */
} peak_rates;

/* Of the ISA on that many threads at once, for so many seconds, but at least one piece. */
peak_rates measure_peak(rapt_isa isa, int threads, double seconds);

/* Bytes a second that so many threads read from the buffer, each its part. */
double measure_read(rapt_isa isa, const float *buffer, size_t count, int threads);

#endif
