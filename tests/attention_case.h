/* attention_case.h - random attention problems: sizes, strides, masks, bands, lengths and nasty values */
#ifndef RAPT_TESTS_ATTENTION_CASE_H
#define RAPT_TESTS_ATTENTION_CASE_H

#include "support.h"

typedef struct attention_case {
    rapt_dtype dtype;
    int64_t n, heads, kv_heads, l, s, d, dv;
    rapt_tensor q, k, v, mask, padding; /* absent ones are all zero */
    int64_t *offsets, *key_start, *key_lengths;
    rapt_options options; /* but for the pointers, which case_options sets */
} attention_case;

typedef struct attention_result {
    rapt_tensor out, weights, lse;
} attention_result;

/* At most `work` multiply-adds in the scores. */
attention_case make_attention_case(test_random *random, rapt_dtype dtype, int64_t work);
/* A tiny one of numbers of order 1, no L or S above `largest`. */
attention_case make_tame_attention_case(test_random *random, rapt_dtype dtype, int64_t largest);
rapt_options case_options(const attention_case *c); /* with pointers into the case; weights and lse are NULL */
void free_attention_case(attention_case *c);
void describe_attention_case(const attention_case *c, char *text, size_t size);

/* Weights are per head or averaged as the options say; out may be strided. */
attention_result run_attention_case(rapt_context *context, const attention_case *c, bool with_weights);
void free_attention_result(attention_result *result);
bool same_result(const attention_result *a, const attention_result *b);

#endif
