/* philox.c - the random numbers behind initial weights and dropout
 *
 * Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). A block is a
 * pure function of key and counter, so any element can be drawn by any thread in any order and is always the same.
 */
#include "internal.h"

void rapt_philox(uint64_t key, const uint32_t counter[4], uint32_t random[4]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = UINT64_C(0xD2511F53) * c0;
        uint64_t p1 = UINT64_C(0xCD9E8D57) * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u; /* the golden ratio's and sqrt(3) - 1's digits: a key of its own for every round */
        k1 += 0xBB67AE85u;
    }
    random[0] = c0;
    random[1] = c1;
    random[2] = c2;
    random[3] = c3;
}
