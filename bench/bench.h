/* bench.h - the benchmark, as a program of its own (rapt_bench) and as a command of the tool (rapt bench) */
#ifndef RAPT_BENCH_BENCH_H
#define RAPT_BENCH_BENCH_H

#include <rapt/rapt.h>

typedef struct bench_settings {
    const char *program; /* whose messages begin with it */
    int threads;         /* 0: one, then all */
    rapt_isa isa;
    const char *filter; /* part of a shape's name; "" for all */
    double seconds;     /* for each shape */
    bool json, serve;
    /* Before each shape, the number-th of `count` on so many threads, and with NULL after it; may be NULL. */
    void (*progress)(const char *shape, int number, int count, int threads);
} bench_settings;

int bench_count_shapes(const char *filter); /* whose name has it in it */

/* Prints to stdout as it goes. Ends the program with status 1 when something fails. */
void bench_run(const bench_settings *settings);

/* What the system calls the CPU, or "unknown". */
void cpu_name(char *text, size_t size);

#endif
