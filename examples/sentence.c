/* sentence.c - what the heads of an attention layer look at
 *
 *     sentence [file.safetensors] [--head h | --all]
 *
 * Opens a layer that PyTorch trained, with a sentence as its input; computes what PyTorch computed, compares, and draws
 * who looks at whom. It is also a tour of the library: open a file, make a layer from its tensors, run it, read the
 * weights of every head.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, isatty */

#include <rapt/rapt.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORDS 24   /* what fits beside each other in a terminal */
#define TOLERANCE 2e-6 /* float32 against PyTorch's float64, relative to the largest value */
#define RUNS 200

enum { SAME = 0, DIFFERENT = 1, FAILED = 2 }; /* exit status */

/* ---- calls that must succeed ---- */

static rapt_context *ctx;

static void check(rapt_status status) {
    if (status == RAPT_OK) return;
    fprintf(stderr, "sentence: %s\n  (%s)\n", rapt_error_message(ctx), rapt_status_text(status));
    exit(FAILED);
}

static void require(bool condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "sentence: %s\n", what);
    exit(FAILED);
}

static rapt_tensor find(const rapt_safetensors *file, const char *name) {
    rapt_tensor tensor;
    check(rapt_safetensors_find(ctx, file, name, &tensor));
    require(tensor.dtype == RAPT_F32, "the tensors must be of type f32");
    return tensor;
}

static const char *metadata(const rapt_safetensors *file, const char *key) {
    const char *value = rapt_safetensors_metadata(file, key);
    require(value != NULL, "the file's metadata lacks words, heads, head_names or torch");
    return value;
}

/* A new tensor, zeroed, of another one's shape. */
static rapt_tensor like(const rapt_tensor *other) {
    float *data = calloc((size_t)rapt_tensor_count(other), sizeof *data);
    require(data != NULL, "out of memory");
    return rapt_tensor_of(data, RAPT_F32, other->ndim, other->shape);
}

/* ---- the layer ---- */

static rapt_mha *make_layer(const rapt_safetensors *file) {
    rapt_tensor in_weight = find(file, "in_proj_weight"), in_bias = find(file, "in_proj_bias");
    rapt_tensor out_weight = find(file, "out_proj.weight"), out_bias = find(file, "out_proj.bias");
    rapt_mha_weights weights = rapt_mha_weights_default(strtol(metadata(file, "heads"), NULL, 10));
    weights.batch_first = true;
    weights.in_proj_weight = &in_weight;
    weights.in_proj_bias = &in_bias;
    weights.out_proj_weight = &out_weight;
    weights.out_proj_bias = &out_bias;
    rapt_mha *layer;
    check(rapt_mha_create_from_weights(ctx, &weights, RAPT_COPY, &layer));
    rapt_mha_eval(layer);
    return layer;
}

/* Self-attention: the sentence is query, key and value at once. Returns the shortest time in microseconds. */
static double run(const rapt_mha *layer, const rapt_tensor *input, const rapt_tensor *output,
                  const rapt_tensor *weights) {
    rapt_options options = {.per_head_weights = true, .weights = weights};
    double best = INFINITY;
    for (int i = 0; i < RUNS; i++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        check(rapt_mha_forward(ctx, layer, input, input, input, &options, output));
        clock_gettime(CLOCK_MONOTONIC, &end);
        best = fmin(best, (double)(end.tv_sec - start.tv_sec) * 1e6 + (double)(end.tv_nsec - start.tv_nsec) / 1e3);
    }
    return best;
}

/* ---- the report ---- */

static const char *shape(const rapt_tensor *tensor) {
    static char text[128];
    int used = 0;
    for (int32_t d = 0; d < tensor->ndim; d++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", d == 0 ? "[" : ", ",
                         (long long)tensor->shape[d]);
    snprintf(text + used, sizeof text - (size_t)used, "]");
    return text;
}

/* Prints how far `ours` is from what PyTorch computed; true if that is rounding. */
static bool compare(const char *name, const rapt_tensor *ours, const rapt_tensor *theirs) {
    const float *a = ours->data, *b = theirs->data;
    double difference = 0, largest = 0;
    bool finite = true; /* fmax skips NaN, so ask for it apart */
    for (int64_t i = 0; i < rapt_tensor_count(ours); i++) {
        difference = fmax(difference, fabs((double)a[i] - (double)b[i]));
        largest = fmax(largest, fabs((double)b[i]));
        finite = finite && isfinite(a[i]);
    }
    printf("  %-8s %-15s at most %.1e from PyTorch's\n", name, shape(ours), difference);
    return finite && difference <= TOLERANCE * largest;
}

/* ---- the picture ---- */

typedef struct picture {
    const char *words, *head_names; /* "the animal did", "previous word|next word" */
    int64_t heads, length;
    const float *weights; /* [heads][length][length] */
    bool colour;
} picture;

/* The index-th part of a text that `separator` divides; its length in *length. */
static const char *part(const char *text, char separator, int64_t index, int *length) {
    for (; index > 0 && *text != '\0'; text++) index -= *text == separator;
    const char *end = strchr(text, separator);
    *length = (int)(end == NULL ? strlen(text) : (size_t)(end - text));
    return text;
}

static int longest_word(const picture *p) {
    int longest = 0, length;
    for (int64_t i = 0; i < p->length; i++) {
        part(p->words, ' ', i, &length);
        if (length > longest) longest = length;
    }
    return longest;
}

/* Words over the columns, written downwards, each ending right above its column. */
static void draw_column_words(const picture *p, int height) {
    for (int line = 0; line < height; line++) {
        printf("  %*s ", height, "");
        for (int64_t j = 0; j < p->length; j++) {
            int length;
            const char *word = part(p->words, ' ', j, &length);
            int letter = line - (height - length);
            printf(" %c  ", letter < 0 ? ' ' : word[letter]);
        }
        printf("\n");
    }
}

/* A cell is four columns wide: in colour with its percentage, else as a shade. */
static void draw_cell(const picture *p, float weight) {
    static const int ramp[] = {234, 235, 53, 89, 125, 161, 203, 209, 215, 221, 228}; /* of the 256 colours */
    static const char *const shades[] = {" .  ", "░░░ ", "▒▒▒ ", "▓▓▓ ", "███ "};
    if (!p->colour) {
        printf("%s", shades[weight < 0.05f ? 0 : weight < 0.25f ? 1 : weight < 0.5f ? 2 : weight < 0.75f ? 3 : 4]);
        return;
    }
    int step = (int)lroundf(fminf(fmaxf(weight, 0), 1) * 10);
    int ink = step > 5 ? 16 : step > 1 ? 255 : 244;
    printf("\033[48;5;%d;38;5;%dm%3.0d \033[0m", ramp[step], ink, (int)lroundf(weight * 100)); /* %.0d: no zeros */
}

static void draw_head(const picture *p, int64_t head) {
    int length, width = longest_word(p);
    const char *name = part(p->head_names, '|', head, &length);
    printf("\n  Head %lld of %lld: %.*s\n", (long long)head + 1, (long long)p->heads, length, name);
    draw_column_words(p, width);
    for (int64_t i = 0; i < p->length; i++) {
        const float *row = p->weights + (head * p->length + i) * p->length;
        const char *word = part(p->words, ' ', i, &length);
        printf("  %*.*s ", width, length, word);
        for (int64_t j = 0; j < p->length; j++) draw_cell(p, row[j]);
        const char *separator = " ";
        for (int64_t j = 0; j < p->length; j++) { /* in words, what it looks at most */
            if (row[j] < 0.2f) continue;
            word = part(p->words, ' ', j, &length);
            printf("%s%.*s %.0f%%", separator, length, word, 100 * (double)row[j]);
            separator = ", ";
        }
        printf("\n");
    }
}

static int usage(FILE *stream, int status) {
    fprintf(stream, "usage: sentence [file.safetensors] [--head h | --all]\n"
                    "Runs a layer that PyTorch trained over a sentence, compares, and draws what its heads look at.\n");
    return status;
}

int main(int argc, char **argv) {
    const char *path = "examples/data/sentence.safetensors";
    long head = 2; /* the one to draw, from 1; 0 for all */
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) return usage(stdout, SAME);
        bool all = strcmp(argv[i], "--all") == 0, one = strcmp(argv[i], "--head") == 0 && i + 1 < argc;
        if (all) head = 0;
        if (one) head = strtol(argv[++i], NULL, 10);
        if (!all && !one) path = argv[i];
        if ((one && head < 1) || path[0] == '-') return usage(stderr, FAILED);
    }

    check(rapt_context_create(NULL, &ctx));
    rapt_safetensors *file;
    check(rapt_safetensors_open(ctx, path, &file));
    rapt_mha *layer = make_layer(file);
    rapt_tensor input = find(file, "input");
    rapt_tensor expected_output = find(file, "expected_output"), expected_weights = find(file, "expected_weights");
    rapt_tensor output = like(&expected_output), weights = like(&expected_weights);
    require(weights.ndim == 4 && weights.shape[2] <= MAX_WORDS, "the sentence is too long to draw");
    require(head <= weights.shape[1], "there is no such head");
    double microseconds = run(layer, &input, &output, &weights);

    char description[256];
    rapt_mha_describe(layer, description, sizeof description);
    printf("\n  Rapt %s, %s, threads: %d\n\n", rapt_version(), rapt_isa_name(rapt_context_isa(ctx)),
           (int)rapt_context_num_threads(ctx));
    printf("  %-8s %s\n", "layer", description);
    printf("  %-8s %-15s \"%s\"\n", "input", shape(&input), metadata(file, "words"));
    bool same = compare("output", &output, &expected_output);
    same = compare("weights", &weights, &expected_weights) && same;
    printf("  %-8s %s PyTorch %s (limit: %.0e of the largest value)\n", "verdict",
           same ? "agrees with" : "does NOT agree with", metadata(file, "torch"), TOLERANCE);
    printf("  %-8s %.1f µs, best of %d runs\n", "time", microseconds, RUNS);

    const char *no_color = getenv("NO_COLOR");
    picture p = {.words = metadata(file, "words"), .head_names = metadata(file, "head_names"), .weights = weights.data};
    p.colour = isatty(STDOUT_FILENO) && (no_color == NULL || no_color[0] == '\0');
    p.heads = weights.shape[1];
    p.length = weights.shape[2];
    for (int64_t h = 0; h < p.heads; h++)
        if (head == 0 || h == head - 1) draw_head(&p, h);
    printf("\n  Each row is a word, the columns are what it looks at%s.\n\n", p.colour ? ", in percent" : "");

    free(output.data);
    free(weights.data);
    rapt_mha_destroy(layer);
    rapt_safetensors_close(file);
    rapt_context_destroy(ctx);
    return same ? SAME : DIFFERENT;
}
