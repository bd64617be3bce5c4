/* layer.c - a layer from a checkpoint, as the options say */
#include "layer.h"

#include "commands.h"
#include "files.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

const option layer_options[] = {
    {"--prefix", "P", "the layer's names begin with it; without it, the only layer in the file"},
    {"--heads", "H", "query heads; they or --head-dim are needed unless Rapt wrote the file"},
    {"--kv-heads", "K", "key and value heads; from the shapes, where they tell"},
    {"--head-dim", "D", "features of a head, from which the number of heads follows"},
    {"--scale", "S", "what scores are multiplied by; 1/sqrt(D), or what Rapt wrote into the file"},
    {"--ignore-extra", NULL, "leave out tensors below the prefix that the layer may need, such as q_norm.weight"},
    {0},
};

const option as_options[] = {
    {"--scheme", "S", "how its tensors are named: pytorch, llama, gpt2 and so on; whichever fits"},
    {"--dtype", "T", "compute in f32, f64, bf16 or f16; the file's"},
    {0},
};

rapt_scheme scheme_option(const arguments *a, const char *name) {
    const char *names[RAPT_SCHEME_GPT2 + 1] = {0};
    for (int i = RAPT_SCHEME_PYTORCH; i <= RAPT_SCHEME_GPT2; i++) names[i - 1] = rapt_scheme_name((rapt_scheme)i);
    int choice = choice_option(a, name, names);
    return choice < 0 ? RAPT_SCHEME_AUTO : (rapt_scheme)(choice + RAPT_SCHEME_PYTORCH);
}

bool dtype_option(const arguments *a, rapt_dtype *dtype) {
    const char *names[] = {rapt_dtype_name(RAPT_F32), rapt_dtype_name(RAPT_F64), rapt_dtype_name(RAPT_BF16),
                           rapt_dtype_name(RAPT_F16), NULL};
    int choice = choice_option(a, "--dtype", names);
    if (choice >= 0) *dtype = (rapt_dtype)(choice + RAPT_F32);
    return choice >= 0;
}

const char *prefix_option(const arguments *a, const char *name) {
    const char *given = text_option(a, name);
    size_t length = given == NULL ? 0 : strlen(given);
    if (length == 0 || given[length - 1] == '.') return given;
    char *dotted = allocate(length + 2);
    snprintf(dotted, length + 2, "%s.", given);
    return dotted;
}

static void close_checkpoint(void *checkpoint) { rapt_checkpoint_close(checkpoint); }
static void destroy_layer(void *layer) { rapt_mha_destroy(layer); }

/* Not a stream of anything without an end. */
static size_t checkpoint_limit(bytes beginning) { return looks_like_safetensors(beginning) ? SIZE_MAX : 0; }

rapt_checkpoint *open_checkpoint(const char *path) {
    rapt_checkpoint *checkpoint;
    bool is_stream = strcmp(path, "-") == 0;
    bytes whole = is_stream ? read_file(path, checkpoint_limit) : (bytes){0};
    rapt_status status = is_stream ? rapt_checkpoint_open_memory(ctx, whole.data, whole.size, &checkpoint)
                                   : rapt_checkpoint_open(ctx, path, &checkpoint);
    if (status == RAPT_ERROR_FILE) fail("%s", rapt_error_message(ctx)); /* which names it */
    if (status != RAPT_OK) fail("'%s': %s", path, rapt_error_message(ctx));
    keep(checkpoint, close_checkpoint);
    return checkpoint;
}

rapt_mha *load_layer(const arguments *a, const char *path, rapt_load_options options) {
    enum { MOST_HEADS = 1 << 20, LARGEST_HEAD = 1 << 30 };
    options.prefix = prefix_option(a, "--prefix");
    options.num_heads = integer_option(a, "--heads", 1, MOST_HEADS, RAPT_DEFAULT);
    options.num_kv_heads = integer_option(a, "--kv-heads", 1, MOST_HEADS, RAPT_DEFAULT);
    options.head_dim = integer_option(a, "--head-dim", 1, LARGEST_HEAD, RAPT_DEFAULT);
    options.set_scale = has_option(a, "--scale");
    options.scale = real_option(a, "--scale", -DBL_MAX, DBL_MAX, 0);
    options.ignore_extra = has_option(a, "--ignore-extra");
    const rapt_checkpoint *checkpoint = open_checkpoint(path);
    rapt_mha *layer;
    show_progress("reading the layer");
    rapt_status status = rapt_mha_load(ctx, checkpoint, &options, &layer);
    show_progress(NULL);
    const char *problem = rapt_error_message(ctx), *hint = "";
    if (strstr(problem, "set num_heads") != NULL) hint = " (--heads or --head-dim)";
    if (status == RAPT_ERROR_UNSUPPORTED && strstr(problem, "ignore_extra") != NULL) hint = " (--ignore-extra)";
    if (status != RAPT_OK) fail("'%s': %s%s", path, problem, hint);
    keep(layer, destroy_layer);
    rapt_mha_eval(layer);
    return layer;
}

void print_json_layer(const rapt_mha *layer) {
    const rapt_mha_config *c = rapt_mha_settings(layer);
    printf("{\"dtype\": \"%s\", \"embed_dim\": %" PRId64 ", \"kdim\": %" PRId64 ", \"vdim\": %" PRId64
           ", \"num_heads\": %" PRId64 ", \"num_kv_heads\": %" PRId64 ", \"head_dim\": %" PRId64,
           rapt_dtype_name(c->dtype), c->embed_dim, c->kdim, c->vdim, c->num_heads, c->num_kv_heads, c->head_dim);
    printf(", \"bias\": %s, \"bias_kv\": %s, \"zero_attn\": %s, \"causal\": %s, \"scale\": %.17g"
           ", \"num_parameters\": %" PRId64 "}",
           c->bias ? "true" : "false", c->add_bias_kv ? "true" : "false", c->add_zero_attn ? "true" : "false",
           c->causal ? "true" : "false", c->set_scale ? c->scale : 1 / sqrt((double)c->head_dim),
           rapt_mha_num_parameters(layer));
}
