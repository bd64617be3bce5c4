/* init.c - the layer's first weights
 *
 * Element i is a function of (seed, stream, i) and of nothing else: not of the shape, the elements before it or the
 * threads. Elements 2p and 2p + 1 share block p of Philox, 64 bits each. All arithmetic is in double precision, exactly
 * rounded or our own (scalar_math.c), so one seed gives the same bits on every machine, and a narrower type holds the
 * f64 draw rounded.
 */
#include "internal.h"

#include <math.h> /* sqrt, which IEEE 754 rounds exactly */

/* The counter's last word. Whoever else draws with a layer's seed (dropout) takes another. */
#define DOMAIN_WEIGHTS 0x696e6974u /* "init" */

/* 53 random bits, as an integer: times 2^-53 a uniform double in [0, 1). */
static double bits53(uint32_t low, uint32_t high) { return (double)(((uint64_t)high << 32 | low) >> 11); }

/* Two independent values, uniform in [-1, 1) on the multiples of 2^-52. Exact: 2u - 1 loses nothing. */
static void draw_uniform(const uint32_t random[4], double pair[2]) {
    pair[0] = bits53(random[0], random[1]) * 0x1p-52 - 1.0;
    pair[1] = bits53(random[2], random[3]) * 0x1p-52 - 1.0;
}

/* Two independent values of the standard normal distribution (Box and Muller). The radius takes a uniform in (0, 1],
 * so its logarithm is finite and no value is larger than sqrt(106 ln 2) = 8.58. */
static void draw_normal(const uint32_t random[4], double pair[2]) {
    double u = (bits53(random[0], random[1]) + 1.0) * 0x1p-53;
    double radius = sqrt(0.0 - 2.0 * rapt_log(u));
    double sine, cosine;
    rapt_sincos_2pi(bits53(random[2], random[3]) * 0x1p-53, &sine, &cosine);
    pair[0] = radius * cosine;
    pair[1] = radius * sine;
}

/* In f64 a uniform value is below +spread. In a narrower type it may round to the type's nearest value to spread, so
 * there the interval is closed (and its ends are spread, rounded to the type). */
void rapt_draw_tensor(const rapt_tensor *tensor, rapt_draw draw, double spread, uint64_t seed, uint32_t stream) {
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i += 2) {
        uint64_t block = (uint64_t)i / 2;
        uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), stream, DOMAIN_WEIGHTS};
        uint32_t random[4];
        double pair[2];
        rapt_philox(seed, counter, random);
        if (draw == RAPT_DRAW_NORMAL)
            draw_normal(random, pair);
        else
            draw_uniform(random, pair);
        rapt_store(tensor->data, tensor->dtype, i, spread * pair[0]);
        if (i + 1 < count) rapt_store(tensor->data, tensor->dtype, i + 1, spread * pair[1]);
    }
}
