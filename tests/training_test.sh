#!/bin/sh
# The program in the manual's section on training, as it stands there: it must compile without a single warning, and what
# it trains must learn. What the section leaves to its reader (a layer, tensors, a loss) is put around it here.
# usage: training_test.sh INCLUDE_DIR LIBRARY     (CC from the environment)
set -eu
include=$1
library=$2
cc=${CC:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

{
    cat <<'BEFORE'
#include <rapt/rapt.h>
#include <stdio.h>

enum { N = 2, L = 6, E = 16, COUNT = N * L * E };
static float in[COUNT], out[COUNT], gradient[COUNT], target[COUNT];
static double loss;

/* Half the mean squared distance from the target, and its gradient. */
static void loss_gradient(const rapt_tensor *y, const rapt_tensor *dy) {
    const float *from = (const float *)y->data;
    float *to = (float *)dy->data;
    loss = 0;
    for (int i = 0; i < COUNT; i++) {
        to[i] = (from[i] - target[i]) / COUNT;
        loss += 0.5 * (double)(from[i] - target[i]) * (double)(from[i] - target[i]) / COUNT;
    }
}

int main(void) {
    rapt_context *ctx;
    rapt_mha *layer;
    rapt_mha_config config = rapt_mha_config_default(E, 4);
    config.batch_first = true;
    if (rapt_context_create(NULL, &ctx) != RAPT_OK || rapt_mha_create(ctx, &config, &layer) != RAPT_OK) return 1;
    for (int i = 0; i < COUNT; i++) {
        in[i] = (float)(i * 37 % 101) / 50 - 1;
        target[i] = (float)(i * 53 % 97) / 48 - 1;
    }
    int64_t shape[3] = {N, L, E};
    rapt_tensor x = rapt_tensor_of(in, RAPT_F32, 3, shape), y = rapt_tensor_of(out, RAPT_F32, 3, shape);
    rapt_tensor dy = rapt_tensor_of(gradient, RAPT_F32, 3, shape);
    rapt_mha_forward(ctx, layer, &x, &x, &x, NULL, &y);
    loss_gradient(&y, &dy);
    double before = loss;
BEFORE
    sed -n '/^ \* 11\. TRAINING/,/^ \*\//s/^ \*     /    /p' "$include/rapt/rapt.h" | sed '/^    }$/q'
    cat <<'AFTER'
    printf("loss %g before, %g after\n", before, loss);
    if (*rapt_error_message(ctx) != '\0') puts(rapt_error_message(ctx));
    rapt_optimizer_destroy(optimizer);
    rapt_mha_gradients_destroy(gradients);
    rapt_mha_state_destroy(state);
    rapt_mha_destroy(layer);
    rapt_context_destroy(ctx);
    return loss < before / 4 ? 0 : 1;
}
AFTER
} >"$work/main.c"
grep -q 'rapt_mha_backward(' "$work/main.c" || { echo "no program found in the manual's section on training"; exit 1; }
"$cc" -std=c17 -Wall -Wextra -Wshadow -Wconversion -Wpedantic -Werror -I "$include" "$work/main.c" "$library" -lm -lpthread \
    -o "$work/train"
"$work/train"
