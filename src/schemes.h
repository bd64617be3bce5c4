/* schemes.h - what other software calls the tensors of an attention layer */
#ifndef RAPT_SCHEMES_H
#define RAPT_SCHEMES_H

#include "internal.h"

/* One way to store a layer. A scheme may have several. Names stand below the layer's prefix. */
typedef struct rapt_layout {
    rapt_scheme scheme;
    bool in_out;            /* matrices are stored [in, out]; else [out, in] */
    const char *weight[4];  /* q, k, v, out; k and v NULL: the first holds all three, one after another */
    const char *bias[4];    /* likewise, and each may be absent from a file */
    const char *bias_kv[2]; /* NULL: the scheme has none */
} rapt_layout;

enum { RAPT_LAYOUTS = 12 };
extern const rapt_layout rapt_layouts[RAPT_LAYOUTS];

bool rapt_layout_has(const rapt_layout *layout, const char *name); /* as one of its names */
/* Whether a tensor of that name below a layer's prefix does not take part in what the layer computes. */
bool rapt_is_bystander(const char *name);
bool rapt_is_scheme(rapt_scheme scheme); /* RAPT_SCHEME_AUTO too */
/* The layout to save under: fused if the three projections read inputs of one size and the scheme knows how. NULL if
 * the scheme has only a fused one and the sizes differ. */
const rapt_layout *rapt_layout_to_save(rapt_scheme scheme, bool inputs_have_one_size);

#endif
