/* backward_case.h - random attention problems with everything that their backward takes */
#ifndef RAPT_TESTS_BACKWARD_CASE_H
#define RAPT_TESTS_BACKWARD_CASE_H

#include "attention_case.h"
#include "internal.h"

enum { D_QUERY, D_KEY, D_VALUE, D_MASK, D_PADDING, D_EXTRA_K, D_EXTRA_V, GRADIENTS };
extern const char *const gradient_names[GRADIENTS];

typedef struct backward_case {
    attention_case f;
    int64_t extra;                /* keys behind the others, as a layer has them: then the backend is called directly */
    rapt_tensor extra_k, extra_v; /* [Hk,extra,D], [Hk,extra,Dv] */
    rapt_tensor d_out, d_weights; /* d_weights may be absent: {0} */
    bool accumulate;
    bool wanted[GRADIENTS]; /* the extra keys' always, if there are any */
    rapt_dtype mask_dtype;  /* of the gradients of masks; 0: the mask's own */
    uint64_t strides;       /* 0: gradients are contiguous, else drawn with this */
} backward_case;

typedef struct backward_result {
    rapt_tensor out, lse, weights;   /* of the forward; weights only if d_weights is there */
    rapt_tensor gradient[GRADIENTS]; /* absent where not wanted */
} backward_result;

/* Whether this context's backend has a backward (and draws dropout). */
bool has_backward(const rapt_context *context);

backward_case make_backward_case(test_random *random, rapt_dtype dtype, int64_t work);
backward_case make_tame_backward_case(test_random *random, int64_t largest); /* f64, masks too */
/* The same in f64, everything wanted and contiguous: the numbers are those of the case, exactly. */
backward_case widen_backward_case(const backward_case *c);
void free_backward_case(backward_case *c);
void describe_backward_case(const backward_case *c, char *text, size_t size);

backward_result run_forward_of(rapt_context *context, const backward_case *c);
/* Forward and backward. Gradients begin as start_value says, and are added to it where the case accumulates. */
backward_result run_backward_case(rapt_context *context, const backward_case *c);
double start_value(int which, int64_t index);
void free_backward_result(backward_result *result);
bool same_gradients(const backward_result *a, const backward_result *b);

#endif
