/* support.h - what the tests share: random tensors, contexts, comparisons */
#ifndef RAPT_TESTS_SUPPORT_H
#define RAPT_TESTS_SUPPORT_H

#include <rapt/rapt.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* ---- random numbers, the same on every platform ---- */

typedef struct test_random {
    uint64_t state;
} test_random;

uint64_t random_bits(test_random *random);
double random_unit(test_random *random);                                /* in [0, 1) */
int64_t random_between(test_random *random, int64_t low, int64_t high); /* both included */
bool random_chance(test_random *random, double probability);

/* ---- tensors with memory of their own ---- */

rapt_tensor make_tensor(rapt_dtype dtype, int32_t ndim, const int64_t *shape);
/* The same shape with random dimension order, gaps and negative strides. */
rapt_tensor make_strided_tensor(test_random *random, rapt_dtype dtype, int32_t ndim, const int64_t *shape);
void free_tensor(rapt_tensor *tensor); /* of make_tensor and make_strided_tensor; an absent one ({0}) is fine */
/* A contiguous copy in another dtype. */
rapt_tensor convert_tensor(const rapt_tensor *tensor, rapt_dtype dtype);

/* Elements by their row-major number, whatever the strides. */
double get_element(const rapt_tensor *tensor, int64_t index);
void set_element(const rapt_tensor *tensor, int64_t index, double value);
void fill_random(test_random *random, const rapt_tensor *tensor, double magnitude); /* uniform within magnitude of 0 */
void fill_value(const rapt_tensor *tensor, double value);

/* ---- comparing ---- */

double largest_magnitude(const rapt_tensor *tensor); /* of the finite elements */
/* Infinity if one is NaN or infinite and the other not likewise. */
double largest_difference(const rapt_tensor *a, const rapt_tensor *b);
bool same_bits(const rapt_tensor *a, const rapt_tensor *b); /* a NaN equals any NaN */
uint64_t checksum(uint64_t start, const rapt_tensor *tensor);

/* ---- contexts ---- */

rapt_context *make_context(int32_t threads, rapt_isa isa, rapt_backend backend); /* fails the test if it cannot */
void assert_ok(rapt_context *context, rapt_status status);
/* RAPT_TEST_QUICK=1 shortens random sweeps (under emulators and sanitizers). */
bool test_is_quick(void);

/* Exits with 77, which ctest reports as skipped, where RAPT_ISA names what this CPU has not. First line of each main. */
void skip_without_forced_isa(void);

#endif
