/* mha_load.c - layers from checkpoints: what the tensors' shapes say, and the copy into a layer */
#include "checkpoint.h"
#include "json.h"
#include "mha.h"

typedef long long ll; /* for printf */

/* A layer in a checkpoint, measured: views into the file, cut into projections, and the sizes that follow. The views
 * may be unaligned and of several dtypes, and are only copied from. */
typedef struct measured {
    const checkpoint_layer *found;
    mha_parts parts;
    int64_t embed_dim, kdim, vdim;
    int64_t q_features, kv_features; /* H*D, Hk*D */
    int64_t parameters;
    const checkpoint_tensor *other_dtype; /* a tensor whose dtype is not that of q's weight; NULL: none */
} measured;

/* ---- tensors ---- */

static rapt_status view_of(rapt_context *context, const checkpoint_tensor *tensor, measured *m, rapt_tensor *view) {
    rapt_status status = rapt_safetensors_view(context, tensor->file, tensor->entry, view);
    if (status != RAPT_OK) return status;
    char text[RAPT_SHOWN_SIZE];
    if (!rapt_is_float(view->dtype))
        return rapt_fail(context, RAPT_ERROR_DTYPE, "tensor '%s' is %s, expected f32, f64, bf16 or f16",
                         rapt_shown(tensor->name, text), rapt_dtype_name(view->dtype));
    if (tensor->entry->type != m->found->weight[0]->entry->type) m->other_dtype = tensor;
    m->parameters += rapt_tensor_count(view);
    return RAPT_OK;
}

static rapt_status wrong_shape(rapt_context *context, const checkpoint_tensor *tensor, const rapt_tensor *view,
                               const char *expected) {
    char name[RAPT_SHOWN_SIZE], shape[RAPT_SHAPE_TEXT];
    return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has shape %s, expected %s", rapt_shown(tensor->name, name),
                     rapt_shape_text(view, shape), expected);
}

/* A matrix as [out, in], however it is stored. */
static rapt_status take_matrix(rapt_context *context, measured *m, int place, rapt_tensor *matrix) {
    const checkpoint_tensor *tensor = m->found->weight[place];
    rapt_tensor view = {0};
    rapt_status status = view_of(context, tensor, m, &view);
    if (status != RAPT_OK) return status;
    if (view.ndim != 2 || rapt_tensor_count(&view) == 0)
        return wrong_shape(context, tensor, &view, "two dimensions of at least 1");
    *matrix = view;
    if (m->found->layout->in_out) {
        for (int d = 0; d < 2; d++) {
            matrix->shape[d] = view.shape[1 - d];
            matrix->stride[d] = view.stride[1 - d];
        }
    }
    return RAPT_OK;
}

/* The message speaks of the shape as it is stored. */
static rapt_status check_matrix(rapt_context *context, const measured *m, int place, const rapt_tensor *matrix,
                                int64_t out, int64_t in) {
    if (matrix->shape[0] == out && matrix->shape[1] == in) return RAPT_OK;
    bool in_out = m->found->layout->in_out;
    char name[RAPT_SHOWN_SIZE];
    return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has shape [%lld, %lld], expected [%lld, %lld]",
                     rapt_shown(m->found->weight[place]->name, name), (ll)matrix->shape[in_out],
                     (ll)matrix->shape[!in_out], (ll)(in_out ? in : out), (ll)(in_out ? out : in));
}

/* `length` values behind leading sizes of 1; absent if there is no tensor. */
static rapt_status take_vector(rapt_context *context, measured *m, const checkpoint_tensor *tensor, int64_t length,
                               rapt_tensor *vector) {
    if (tensor == NULL) return RAPT_OK;
    rapt_tensor view = {0};
    rapt_status status = view_of(context, tensor, m, &view);
    if (status != RAPT_OK) return status;
    bool fits = view.ndim > 0 && view.shape[view.ndim - 1] == length && rapt_tensor_count(&view) == length;
    if (fits) {
        *vector = rapt_tensor_of(view.data, view.dtype, 1, &length);
        return RAPT_OK;
    }
    char name[RAPT_SHOWN_SIZE], shape[RAPT_SHAPE_TEXT];
    return rapt_fail(context, RAPT_ERROR_SHAPE, "tensor '%s' has shape %s, expected [%lld]",
                     rapt_shown(tensor->name, name), rapt_shape_text(&view, shape), (ll)length);
}

/* ---- measuring ---- */

/* The output projection tells q's rows from the others. */
static rapt_status take_fused(rapt_context *context, measured *m) {
    rapt_tensor fused = {0};
    rapt_status status = take_matrix(context, m, 0, &fused);
    if (status != RAPT_OK) return status;
    int64_t rest = fused.shape[0] - m->q_features;
    if (fused.shape[1] != m->embed_dim || rest < 2 || rest % 2 != 0) {
        char name[RAPT_SHOWN_SIZE], out_name[RAPT_SHOWN_SIZE];
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "tensor '%s' maps %lld features to %lld, expected %lld (by '%s') to %lld for the queries and, "
                         "behind them, as many for the keys as for the values",
                         rapt_shown(m->found->weight[0]->name, name), (ll)fused.shape[1], (ll)fused.shape[0],
                         (ll)m->embed_dim, rapt_shown(m->found->weight[3]->name, out_name), (ll)m->q_features);
    }
    m->kv_features = rest / 2;
    m->kdim = m->vdim = m->embed_dim;
    m->parts.q.weight = rapt_rows_of(&fused, 0, m->q_features);
    m->parts.k.weight = rapt_rows_of(&fused, m->q_features, m->kv_features);
    m->parts.v.weight = rapt_rows_of(&fused, m->q_features + m->kv_features, m->kv_features);
    return RAPT_OK;
}

static rapt_status take_separate(rapt_context *context, measured *m) {
    rapt_tensor *q = &m->parts.q.weight, *k = &m->parts.k.weight, *v = &m->parts.v.weight;
    rapt_status status = take_matrix(context, m, 0, q);
    if (status == RAPT_OK) status = take_matrix(context, m, 1, k);
    if (status == RAPT_OK) status = take_matrix(context, m, 2, v);
    if (status == RAPT_OK) status = check_matrix(context, m, 0, q, m->q_features, m->embed_dim);
    if (status != RAPT_OK) return status;
    m->kv_features = k->shape[0];
    m->kdim = k->shape[1];
    m->vdim = v->shape[1];
    return check_matrix(context, m, 2, v, m->kv_features, m->vdim);
}

static rapt_status take_biases(rapt_context *context, measured *m) {
    const checkpoint_layer *found = m->found;
    mha_parts *parts = &m->parts;
    int64_t q = m->q_features, kv = m->kv_features;
    rapt_tensor fused = {0};
    rapt_status status;
    if (found->layout->bias[1] == NULL) {
        status = take_vector(context, m, found->bias[0], q + 2 * kv, &fused);
    } else {
        status = take_vector(context, m, found->bias[0], q, &parts->q.bias);
        if (status == RAPT_OK) status = take_vector(context, m, found->bias[1], kv, &parts->k.bias);
        if (status == RAPT_OK) status = take_vector(context, m, found->bias[2], kv, &parts->v.bias);
    }
    if (status == RAPT_OK) status = take_vector(context, m, found->bias[3], m->embed_dim, &parts->out.bias);
    if (status == RAPT_OK) status = take_vector(context, m, found->bias_kv[0], kv, &parts->bias_k);
    if (status == RAPT_OK) status = take_vector(context, m, found->bias_kv[1], kv, &parts->bias_v);
    if (status != RAPT_OK) return status;
    if (fused.data != NULL) {
        parts->q.bias = rapt_rows_of(&fused, 0, q);
        parts->k.bias = rapt_rows_of(&fused, q, kv);
        parts->v.bias = rapt_rows_of(&fused, q + kv, kv);
    }
    if ((parts->bias_k.data == NULL) == (parts->bias_v.data == NULL)) return RAPT_OK;
    char text[RAPT_SHOWN_SIZE];
    bool has_k = parts->bias_k.data != NULL;
    return rapt_fail(context, RAPT_ERROR_ABSENT, "the layer '%s' has %s without %s", rapt_shown(found->prefix, text),
                     found->layout->bias_kv[!has_k], found->layout->bias_kv[has_k]);
}

static rapt_status measure(rapt_context *context, const checkpoint_layer *found, measured *m) {
    *m = (measured){.found = found};
    rapt_tensor *out = &m->parts.out.weight;
    rapt_status status = take_matrix(context, m, 3, out);
    if (status != RAPT_OK) return status;
    m->embed_dim = out->shape[0];
    m->q_features = out->shape[1];
    status = found->layout->weight[1] == NULL ? take_fused(context, m) : take_separate(context, m);
    return status == RAPT_OK ? take_biases(context, m) : status;
}

rapt_status rapt_mha_find_parts(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                                rapt_scheme scheme, mha_parts *parts) {
    const checkpoint_layer *found;
    measured m;
    rapt_status status = rapt_checkpoint_choose(context, checkpoint, prefix, scheme, &found);
    if (status == RAPT_OK) status = measure(context, found, &m);
    if (status == RAPT_OK) *parts = m.parts;
    return status;
}

static rapt_status refuse_extra(rapt_context *context, const rapt_checkpoint *checkpoint,
                                const checkpoint_layer *found) {
    const checkpoint_tensor *extra;
    if (rapt_checkpoint_count_extra(checkpoint, found, &extra) == 0) return RAPT_OK;
    char name[RAPT_SHOWN_SIZE];
    return rapt_fail(context, RAPT_ERROR_UNSUPPORTED,
                     "tensor '%s' has no place in a layer of %s names, and may change what it computes (ignore_extra "
                     "leaves it out)",
                     rapt_shown(extra->name, name), rapt_scheme_name(found->layout->scheme));
}

/* ---- heads ---- */

static rapt_status check_given(rapt_context *context, const char *name, int64_t given, int64_t derived) {
    if (given == RAPT_DEFAULT || given == derived) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %lld, but the tensors' shapes give %lld", name, (ll)given,
                     (ll)derived);
}

static rapt_status check_positive(rapt_context *context, const char *name, int64_t size) {
    if (size == RAPT_DEFAULT || size >= 1) return RAPT_OK;
    return rapt_fail(context, RAPT_ERROR_ARGUMENT, "%s is %lld, expected at least 1, or RAPT_DEFAULT", name, (ll)size);
}

/* H as given, D and Hk from the shapes. */
static rapt_status divide_heads(rapt_context *context, const measured *m, int64_t heads, rapt_mha_config *c) {
    char text[RAPT_SHOWN_SIZE];
    if (m->q_features % heads != 0)
        return rapt_fail(context, RAPT_ERROR_SHAPE,
                         "num_heads %lld does not divide the %lld outputs of q in layer '%s'", (ll)heads,
                         (ll)m->q_features, rapt_shown(m->found->prefix, text));
    int64_t dim = m->q_features / heads;
    if (m->kv_features % dim != 0)
        return rapt_fail(
            context, RAPT_ERROR_SHAPE,
            "num_heads %lld gives head_dim %lld, which does not divide the %lld outputs of k in layer '%s'", (ll)heads,
            (ll)dim, (ll)m->kv_features, rapt_shown(m->found->prefix, text));
    c->num_heads = heads;
    c->head_dim = dim;
    c->num_kv_heads = m->kv_features / dim;
    return RAPT_OK;
}

static rapt_status settle_heads(rapt_context *context, const measured *m, const rapt_load_options *o,
                                int64_t written_heads, rapt_mha_config *c) {
    rapt_status status = check_positive(context, "num_heads", o->num_heads);
    if (status == RAPT_OK) status = check_positive(context, "num_kv_heads", o->num_kv_heads);
    if (status == RAPT_OK) status = check_positive(context, "head_dim", o->head_dim);
    if (status != RAPT_OK) return status;
    int64_t heads = o->num_heads;
    char text[RAPT_SHOWN_SIZE];
    if (heads == RAPT_DEFAULT && o->head_dim != RAPT_DEFAULT) {
        heads = m->q_features / o->head_dim;
        if (m->q_features % o->head_dim != 0)
            return rapt_fail(context, RAPT_ERROR_SHAPE,
                             "head_dim %lld does not divide the %lld outputs of q in layer '%s'", (ll)o->head_dim,
                             (ll)m->q_features, rapt_shown(m->found->prefix, text));
    }
    if (heads == RAPT_DEFAULT) heads = written_heads;
    if (heads == RAPT_DEFAULT) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT,
                         "the checkpoint does not say how many heads the layer '%s' has: set num_heads",
                         rapt_shown(m->found->prefix, text));
    }
    status = divide_heads(context, m, heads, c);
    if (status == RAPT_OK) status = check_given(context, "head_dim", o->head_dim, c->head_dim);
    if (status == RAPT_OK) status = check_given(context, "num_kv_heads", o->num_kv_heads, c->num_kv_heads);
    return status;
}

/* ---- about a layer ---- */

static bool has_bias(const mha_parts *parts) {
    return parts->q.bias.data != NULL || parts->k.bias.data != NULL || parts->v.bias.data != NULL ||
           parts->out.bias.data != NULL;
}

static rapt_status describe(rapt_context *context, const rapt_checkpoint *checkpoint, int64_t index,
                            rapt_layer_info *info) {
    if (index < 0 || index >= rapt_checkpoint_num_layers(checkpoint))
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "index is %lld, the checkpoint has %lld attention layers",
                         (ll)index, (ll)rapt_checkpoint_num_layers(checkpoint));
    const checkpoint_layer *found = checkpoint->layers.index[index];
    measured m;
    rapt_mha_config c = rapt_mha_config_default(0, found->num_heads);
    rapt_status status = measure(context, found, &m);
    if (status == RAPT_OK && found->settings != NULL)
        status = rapt_settings_read(context, found->prefix, found->settings, &c);
    bool has_heads = c.num_heads != RAPT_DEFAULT;
    if (status == RAPT_OK && has_heads) status = divide_heads(context, &m, c.num_heads, &c);
    if (status != RAPT_OK) return status;
    const checkpoint_tensor *extra;
    int64_t num_extra = rapt_checkpoint_count_extra(checkpoint, found, &extra);
    *info = (rapt_layer_info){.prefix = found->prefix,
                              .scheme = found->layout->scheme,
                              .dtype = m.parts.q.weight.dtype,
                              .embed_dim = m.embed_dim,
                              .kdim = m.kdim,
                              .vdim = m.vdim,
                              .q_features = m.q_features,
                              .kv_features = m.kv_features,
                              .num_heads = has_heads ? c.num_heads : 0,
                              .num_kv_heads = has_heads ? c.num_kv_heads : 0,
                              .head_dim = has_heads ? c.head_dim : 0,
                              .bias = has_bias(&m.parts),
                              .bias_kv = m.parts.bias_k.data != NULL,
                              .num_parameters = m.parameters,
                              .num_extra = num_extra,
                              .extra = extra == NULL ? NULL : extra->name};
    return RAPT_OK;
}

rapt_status rapt_checkpoint_layer(rapt_context *context, const rapt_checkpoint *checkpoint, int64_t index,
                                  rapt_layer_info *info) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = checkpoint == NULL ? "checkpoint" : info == NULL ? "info" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : describe(context, checkpoint, index, info);
    return rapt_leave(context, &call, status);
}

/* ---- loading ---- */

/* What the tensors do not show: from the file, most of it only if Rapt wrote that, and from the options on top. */
static rapt_status take_settings(rapt_context *context, const checkpoint_layer *found, const rapt_load_options *o,
                                 rapt_mha_config *c) {
    if (!o->ignore_metadata) c->num_heads = found->num_heads;
    if (found->settings != NULL && !o->ignore_metadata) {
        rapt_status status = rapt_settings_read(context, found->prefix, found->settings, c);
        if (status != RAPT_OK) return status;
    }
    c->batch_first |= o->batch_first;
    c->causal |= o->causal;
    c->add_zero_attn |= o->add_zero_attn;
    if (o->set_scale || o->scale != 0) { /* a scale without set_scale is refused where all configs are checked */
        c->set_scale = o->set_scale;
        c->scale = o->scale;
    }
    if (o->dropout != 0) c->dropout = o->dropout;
    return RAPT_OK;
}

static rapt_status settle_dtype(rapt_context *context, const measured *m, const rapt_load_options *o,
                                rapt_mha_config *c) {
    c->dtype = o->set_dtype ? o->dtype : m->parts.q.weight.dtype;
    if (o->set_dtype || m->other_dtype == NULL) return RAPT_OK;
    char name[RAPT_SHOWN_SIZE], other[RAPT_SHOWN_SIZE];
    return rapt_fail(context, RAPT_ERROR_DTYPE, "tensor '%s' is %s and '%s' is %s: set_dtype and dtype choose one",
                     rapt_shown(m->found->weight[0]->name, name), rapt_dtype_name(c->dtype),
                     rapt_shown(m->other_dtype->name, other), rapt_dtype_name(m->other_dtype->entry->type->dtype));
}

static rapt_status load(rapt_context *context, const rapt_checkpoint *checkpoint, const rapt_load_options *o,
                        rapt_mha **layer) {
    rapt_status status =
        rapt_check_struct_size(context, "options", "rapt_load_options_default", o, o->struct_size, sizeof *o);
    if (status != RAPT_OK) return status;
    const checkpoint_layer *found;
    measured m;
    status = rapt_checkpoint_choose(context, checkpoint, o->prefix, o->scheme, &found);
    if (status == RAPT_OK) status = measure(context, found, &m);
    if (status == RAPT_OK && !o->ignore_extra) status = refuse_extra(context, checkpoint, found);
    if (status != RAPT_OK) return status;
    rapt_mha_config c = rapt_mha_config_default(m.embed_dim, RAPT_DEFAULT), settled;
    c.kdim = m.kdim;
    c.vdim = m.vdim;
    c.bias = has_bias(&m.parts);
    c.add_bias_kv = m.parts.bias_k.data != NULL;
    status = take_settings(context, found, o, &c);
    if (status == RAPT_OK) status = settle_heads(context, &m, o, c.num_heads, &c);
    if (status == RAPT_OK) status = settle_dtype(context, &m, o, &c);
    if (status == RAPT_OK) status = rapt_mha_settle_config(context, &c, &settled);
    return status == RAPT_OK ? rapt_mha_create_copy(context, &settled, &m.parts, layer) : status;
}

rapt_status rapt_mha_load(rapt_context *context, const rapt_checkpoint *checkpoint, const rapt_load_options *options,
                          rapt_mha **layer) {
    if (layer != NULL) *layer = NULL;
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    rapt_load_options defaults = rapt_load_options_default();
    const char *null = checkpoint == NULL ? "checkpoint" : layer == NULL ? "layer" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : load(context, checkpoint, options != NULL ? options : &defaults, layer);
    return rapt_leave(context, &call, status);
}

/* ---- loading into a layer ---- */

static rapt_status check_same_presence(rapt_context *context, const char *name, const rapt_tensor *in_file,
                                       const rapt_tensor *in_layer) {
    if ((in_file->data == NULL) == (in_layer->data == NULL)) return RAPT_OK;
    bool file_has = in_file->data != NULL;
    return rapt_fail(context, RAPT_ERROR_SHAPE, "%s has %s and %s has not", file_has ? "the checkpoint" : "the layer",
                     name, file_has ? "the layer" : "the checkpoint");
}

static rapt_status check_same_shapes(rapt_context *context, const measured *m, const rapt_mha *layer) {
    static const char *const name[4][2] = {
        {"q_proj.weight", "q_proj.bias"},
        {"k_proj.weight", "k_proj.bias"},
        {"v_proj.weight", "v_proj.bias"},
        {"out_proj.weight", "out_proj.bias"},
    };
    const mha_projection *file[] = {&m->parts.q, &m->parts.k, &m->parts.v, &m->parts.out};
    const mha_projection *own[] = {&layer->parts.q, &layer->parts.k, &layer->parts.v, &layer->parts.out};
    for (int i = 0; i < 4; i++) {
        const rapt_tensor *from = &file[i]->weight, *to = &own[i]->weight;
        if (from->shape[0] != to->shape[0] || from->shape[1] != to->shape[1])
            return rapt_fail(context, RAPT_ERROR_SHAPE,
                             "%s is [%lld, %lld] in the checkpoint and [%lld, %lld] in the layer", name[i][0],
                             (ll)from->shape[0], (ll)from->shape[1], (ll)to->shape[0], (ll)to->shape[1]);
        rapt_status status = check_same_presence(context, name[i][1], &file[i]->bias, &own[i]->bias);
        if (status != RAPT_OK) return status;
    }
    return check_same_presence(context, "bias_k", &m->parts.bias_k, &layer->parts.bias_k);
}

static rapt_status load_into(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                             rapt_scheme scheme, rapt_mha *layer) {
    const checkpoint_layer *found;
    measured m;
    if (layer->memory == NULL) /* it may be a map that nobody may write */
        return rapt_fail(context, RAPT_ERROR_STATE, "the layer borrows its weights, expected one that owns them");
    rapt_status status = rapt_checkpoint_choose(context, checkpoint, prefix, scheme, &found);
    if (status == RAPT_OK) status = measure(context, found, &m);
    if (status == RAPT_OK) status = refuse_extra(context, checkpoint, found);
    if (status == RAPT_OK) status = check_same_shapes(context, &m, layer);
    if (status == RAPT_OK) rapt_mha_fill(context, layer, &m.parts);
    return status;
}

rapt_status rapt_mha_load_into(rapt_context *context, const rapt_checkpoint *checkpoint, const char *prefix,
                               rapt_scheme scheme, rapt_mha *layer) {
    rapt_call call;
    rapt_status status = rapt_enter(context, &call);
    if (status != RAPT_OK) return status;
    const char *null = checkpoint == NULL ? "checkpoint" : layer == NULL ? "layer" : NULL;
    status = null != NULL ? rapt_fail(context, RAPT_ERROR_NULL, "%s is NULL", null)
                          : load_into(context, checkpoint, prefix, scheme, layer);
    return rapt_leave(context, &call, status);
}
