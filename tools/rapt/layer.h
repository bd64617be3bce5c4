/* layer.h - a layer from a checkpoint, and its forward, as the options say */
#ifndef RAPT_TOOL_LAYER_H
#define RAPT_TOOL_LAYER_H

#include "cli.h"

rapt_scheme scheme_option(const arguments *a, const char *name); /* RAPT_SCHEME_AUTO if not given */
bool dtype_option(const arguments *a, rapt_dtype *dtype);        /* --dtype; false if not given */
const char *prefix_option(const arguments *a, const char *name); /* with its last dot; NULL if not given */

rapt_checkpoint *open_checkpoint(const char *path);
/* With what layer_options say over the given options. */
rapt_mha *load_layer(const arguments *a, const char *path, rapt_load_options options);

void print_json_layer(const rapt_mha *layer); /* its settings, as an object */

/* --rope and what belongs to it; false if it is not given. The length of the sequence is the caller's to set. */
bool rotary_option(const arguments *a, rapt_rotary *rotary);
void print_rotary(const rapt_rotary *rotary);
void print_json_rotary(const rapt_rotary *rotary, int64_t head_dim);

/* One forward. Shapes: query [N,L,E] (with --seq-first [L,N,E]) or [L,E]. */
typedef struct forward {
    rapt_mha *layer;
    rapt_tensor query, key, value; /* in the layer's dtype */
    rapt_tensor output, weights;   /* weights: of every head, if they were asked for */
    bool has_rotary;
    rapt_rotary rotary;
    double seconds;
} forward;

forward run_forward(const arguments *a, const char *path, bool with_weights);

#endif
