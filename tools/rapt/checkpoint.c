/* checkpoint.c - rapt inspect and rapt convert: what is in a checkpoint, and a layer of it under other names */
#include "layer.h"

#include "commands.h"
#include "files.h"

#include <inttypes.h>
#include <unistd.h>

const option inspect_options[] = {
    {"--layers", NULL, "only the attention layers"},
    {"--tensors", NULL, "only the tensors"},
    {"--json", NULL, "print JSON"},
    {0},
};

const option convert_options[] = {
    {"--scheme", "S", "how the written tensors are named; pytorch"},
    {"--dtype", "T", "f32, f64, bf16 or f16; the file's"},
    {"--to-prefix", "Q", "what their names begin with; nothing"},
    {"--from-scheme", "S", "how the tensors that are read are named; whichever fits"},
    {"--json", NULL, "print JSON"},
    {0},
};

/* ---- rapt inspect ---- */

/* A column's width once it holds the name, too; longer ones stick out. */
static int wider(int width, const char *name) {
    enum { WIDEST = 60 };
    size_t length = strlen(name);
    return length <= (size_t)width ? width : length < WIDEST ? (int)length : WIDEST;
}

/* Text in a column of its own: counts characters, not bytes. */
static void print_column(const char *text, int width) {
    print_text(stdout, text);
    for (; *text != '\0'; text++) width -= ((unsigned char)*text & 0xc0) != 0x80;
    printf("%*s", width > 0 ? width : 0, "");
}

/* One line, or one object; a tensor whose type Rapt lacks has a reason instead of a shape. */
static double print_tensor(const char *name, int name_width, const rapt_checkpoint *checkpoint, bool json) {
    rapt_tensor t;
    char text[SHAPE_SIZE];
    bool known = rapt_checkpoint_find(ctx, checkpoint, name, &t) == RAPT_OK;
    double size = known ? (double)rapt_tensor_count(&t) * (double)rapt_dtype_size(t.dtype) : 0;
    if (json) {
        printf("{\"name\": ");
        print_json_string(name);
        if (known) {
            printf(", \"dtype\": \"%s\", \"shape\": ", rapt_dtype_name(t.dtype));
            print_json_shape(&t);
            printf(", \"bytes\": %.0f}", size);
        } else {
            printf(", \"problem\": ");
            print_json_string(rapt_error_message(ctx));
            printf("}");
        }
        return size;
    }
    print_column(name, name_width);
    if (known) {
        printf("  %-4s  %-20s", rapt_dtype_name(t.dtype), shape_text(&t, text));
        printf(" %10s\n", size_text(size, text));
    } else {
        printf("  -     ");
        print_text(stdout, rapt_error_message(ctx));
        putchar('\n');
    }
    return size;
}

/* Instead of a layer whose names are there and whose shapes make none. */
static void print_problem(bool json) {
    if (json) {
        printf("{\"problem\": ");
        print_json_string(rapt_error_message(ctx));
        printf("}");
    } else {
        print_text(stdout, rapt_error_message(ctx));
        putchar('\n');
    }
}

static void print_tensors(const rapt_checkpoint *checkpoint, bool json) {
    int width = 0;
    int64_t count = rapt_checkpoint_num_tensors(checkpoint);
    for (int64_t i = 0; i < count; i++) width = wider(width, rapt_checkpoint_tensor_name(checkpoint, i));
    double total = 0;
    if (json) printf("\"tensors\": [");
    for (int64_t i = 0; i < count; i++) {
        if (json) printf(i == 0 ? "\n  " : ",\n  ");
        total += print_tensor(rapt_checkpoint_tensor_name(checkpoint, i), width, checkpoint, json);
    }
    char text[SHAPE_SIZE];
    if (json) printf("]");
    if (!json) printf("tensors: %" PRId64 ", %s\n", count, size_text(total, text));
}

static void print_layer(const rapt_layer_info *l, int prefix_width, bool json) {
    const char *scheme = rapt_scheme_name(l->scheme), *dtype = rapt_dtype_name(l->dtype);
    if (json) {
        printf("{\"prefix\": ");
        print_json_string(l->prefix);
        printf(
            ", \"scheme\": \"%s\", \"dtype\": \"%s\", \"embed_dim\": %" PRId64 ", \"kdim\": %" PRId64
            ", \"vdim\": %" PRId64 ", \"q_features\": %" PRId64 ", \"kv_features\": %" PRId64
            ", \"num_heads\": %" PRId64 ", \"num_kv_heads\": %" PRId64 ", \"head_dim\": %" PRId64
            ", \"bias\": %s, \"bias_kv\": %s, \"num_parameters\": %" PRId64 ", \"num_extra\": %" PRId64 ", \"extra\": ",
            scheme, dtype, l->embed_dim, l->kdim, l->vdim, l->q_features, l->kv_features, l->num_heads, l->num_kv_heads,
            l->head_dim, l->bias ? "true" : "false", l->bias_kv ? "true" : "false", l->num_parameters, l->num_extra);
        if (l->extra != NULL) print_json_string(l->extra);
        printf(l->extra != NULL ? "}" : "null}");
        return;
    }
    print_column(*l->prefix == '\0' ? "(no prefix)" : l->prefix, prefix_width);
    printf("  %s, %s, embed_dim %" PRId64, scheme, dtype, l->embed_dim);
    if (l->kdim != l->embed_dim) printf(", kdim %" PRId64, l->kdim);
    if (l->vdim != l->embed_dim) printf(", vdim %" PRId64, l->vdim);
    if (l->num_heads > 0) {
        printf(", heads %" PRId64, l->num_heads);
        if (l->num_kv_heads != l->num_heads) printf(" over %" PRId64, l->num_kv_heads);
    } else if (l->q_features > 0) {
        printf(", query features %" PRId64, l->q_features);
        if (l->kv_features != l->q_features) printf(", key features %" PRId64, l->kv_features);
    }
    printf("%s%s, parameters: %" PRId64, l->bias ? ", bias" : "", l->bias_kv ? ", bias_kv" : "", l->num_parameters);
    if (l->extra != NULL) {
        printf(", not known: ");
        print_text(stdout, l->extra + strlen(l->prefix));
        if (l->num_extra > 1) printf(" and %" PRId64 " more", l->num_extra - 1);
    }
    putchar('\n');
}

static void print_layers(const rapt_checkpoint *checkpoint, bool json) {
    int width = 0;
    rapt_layer_info info;
    int64_t count = rapt_checkpoint_num_layers(checkpoint);
    for (int64_t i = 0; i < count; i++)
        if (rapt_checkpoint_layer(ctx, checkpoint, i, &info) == RAPT_OK) width = wider(width, info.prefix);
    if (json) printf("\"layers\": [");
    for (int64_t i = 0; i < count; i++) {
        bool known = rapt_checkpoint_layer(ctx, checkpoint, i, &info) == RAPT_OK;
        if (json) printf(i == 0 ? "\n  " : ",\n  ");
        if (known) print_layer(&info, width, json);
        if (!known) print_problem(json);
    }
    if (json) printf("]");
    if (!json) printf("attention layers: %" PRId64 "\n", count);
}

int run_inspect(const arguments *a) {
    bool json = has_option(a, "--json"), layers = has_option(a, "--layers"), tensors = has_option(a, "--tensors");
    if (!layers && !tensors) layers = tensors = true;
    open_context(a);
    const rapt_checkpoint *checkpoint = open_checkpoint(a->operand[0]);
    if (json) printf("{");
    if (tensors) print_tensors(checkpoint, json);
    if (tensors && layers) printf(json ? ",\n " : "\n");
    if (layers) print_layers(checkpoint, json);
    if (json) printf("}\n");
    return SUCCESS;
}

/* ---- rapt convert ---- */

/* The file is whole before the first byte of it goes to standard output: an error writes nothing there. */
static void save(const rapt_mha *layer, const char *out, const rapt_save_options *options, rapt_dtype dtype) {
    bool is_stream = strcmp(out, "-") == 0;
    const char *path = is_stream ? temporary_path() : out;
    char size[SHAPE_SIZE], step[SHAPE_SIZE + 16];
    double bytes_written = (double)rapt_mha_num_parameters(layer) * (double)rapt_dtype_size(dtype);
    snprintf(step, sizeof step, "writing %s", size_text(bytes_written, size));
    show_progress(step);
    rapt_status status = rapt_mha_save(ctx, layer, path, options);
    show_progress(NULL);
    if (status != RAPT_OK) fail("'%s': %s", out, rapt_error_message(ctx));
    if (!is_stream) return;
    bytes whole = take_temporary(path);
    write_file(out, 1, &whole);
}

int run_convert(const arguments *a) {
    const char *out = a->operand[1];
    bool is_stream = strcmp(out, "-") == 0;
    if (is_stream && isatty(STDOUT_FILENO))
        fail_usage("OUT is '-', but standard output is a terminal, expected a file or a pipe");
    bool json = has_option(a, "--json");
    if (is_stream && json) fail_usage("--json and OUT cannot both be standard output");
    rapt_save_options options = rapt_save_options_default();
    options.scheme = scheme_option(a, "--scheme");
    if (options.scheme == RAPT_SCHEME_AUTO) options.scheme = RAPT_SCHEME_PYTORCH; /* to say so below */
    options.set_dtype = dtype_option(a, &options.dtype);
    options.prefix = prefix_option(a, "--to-prefix");
    rapt_load_options load = rapt_load_options_default();
    load.scheme = scheme_option(a, "--from-scheme");
    open_context(a);
    rapt_mha *layer = load_layer(a, a->operand[0], load);
    rapt_dtype dtype = options.set_dtype ? options.dtype : rapt_mha_settings(layer)->dtype;
    save(layer, out, &options, dtype);
    if (is_stream) return SUCCESS;
    if (json) {
        printf("{\"layer\": ");
        print_json_layer(layer);
        printf(",\n \"written\": {\"path\": ");
        print_json_string(out);
        printf(", \"prefix\": ");
        print_json_string(options.prefix == NULL ? "" : options.prefix);
        printf(", \"scheme\": \"%s\", \"dtype\": \"%s\"}}\n", rapt_scheme_name(options.scheme), rapt_dtype_name(dtype));
        return SUCCESS;
    }
    char description[256];
    rapt_mha_describe(layer, description, sizeof description);
    printf("layer    %s\nwritten  %s names, %s  ", description, rapt_scheme_name(options.scheme),
           rapt_dtype_name(dtype));
    print_text(stdout, out);
    putchar('\n');
    return SUCCESS;
}
