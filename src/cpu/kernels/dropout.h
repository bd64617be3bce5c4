/* dropout.h - which weights of a row stay
 *
 * Sixteen blocks of Philox 4x32-10 at a time, in loops that compilers turn into vector code. Each block is for four keys
 * in absolute positions, so a row may be drawn in any pieces.
 */
#ifndef RAPT_CPU_KERNELS_DROPOUT_H
#define RAPT_CPU_KERNELS_DROPOUT_H

#include "kernels.h"
#include "vec.h"

enum { BLOCKS = 16, DRAWN_KEYS = 4 * BLOCKS };

/* As rapt_philox, for the counters (counter[0 .. 2], counter[3] + i); word w of block i goes to words[4 * i + w]. */
static __attribute__((noinline)) void philox_blocks(uint64_t key, const uint32_t counter[4],
                                                    uint32_t words[DRAWN_KEYS]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0[BLOCKS], c1[BLOCKS], c2[BLOCKS], c3[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++) {
        c0[i] = counter[0];
        c1[i] = counter[1];
        c2[i] = counter[2];
        c3[i] = counter[3] + i;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            uint64_t p0 = UINT64_C(0xD2511F53) * c0[i], p1 = UINT64_C(0xCD9E8D57) * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)p1;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < BLOCKS; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

/* For the keys [first, first + count) of a query of a head: `stays` where a weight stays, else 0. */
static void draw_row(const attn_problem *p, int64_t n, int64_t head, int64_t query, int64_t first, int64_t count,
                     real stays, real *factors) {
    uint64_t key = rapt_dropout_key(p->dropout_seed, p->dropout_offset);
    uint64_t threshold = rapt_dropout_threshold(p->dropout);
    for (int64_t j = first / 4 * 4; j < first + count; j += DRAWN_KEYS) {
        uint32_t counter[4], words[DRAWN_KEYS];
        rapt_dropout_counter(p->dropout_offset, n * p->heads + head, query, j, counter);
        philox_blocks(key, counter, words);
        int64_t begin = j < first ? first - j : 0;
        int64_t end = first + count - j < DRAWN_KEYS ? first + count - j : DRAWN_KEYS;
        for (int64_t i = begin; i < end; i++) factors[j + i - first] = words[i] >= threshold ? stays : 0;
    }
}

/* What a weight that stays is multiplied by. */
INLINE real dropout_factor(const attn_problem *p) { return p->dropout < 1 ? (real)(1 / (1 - p->dropout)) : 0; }

#endif
