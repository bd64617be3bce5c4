/* plot.c - rapt plot: which map is drawn, and where to */
#include "picture.h"

#include "cli.h"
#include "commands.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

const option plot_options[] = {
    {"--head", "H", "one head, counted from 1; without it, the average of all"},
    {"--sequence", "N", "one sequence of a batch, counted from 1; the first"},
    {"--tokens", "FILE", "words for the keys, and for the queries if there are as many"},
    {"--query-tokens", "FILE", "words for the queries"},
    {"--title", "TEXT", "what stands above; the file's name and the head"},
    {"--svg", "FILE", "draw an SVG with axes and labels"},
    {"--png", "FILE", "draw a PNG, the map alone"},
    {"--color", "WHEN", "always, never, or auto: on a terminal, unless NO_COLOR is set"},
    {0},
};

double share_of_top(const picture *p, double weight) { return p->top > 0 ? fmin(weight / p->top, 1) : 0; }

double pooled_weight(const picture *p, int64_t rows, int64_t columns, int64_t row, int64_t column) {
    int64_t i_end = (row + 1) * p->rows / rows, j_end = (column + 1) * p->columns / columns;
    double largest = 0;
    for (int64_t i = row * p->rows / rows; i < i_end; i++)
        for (int64_t j = column * p->columns / columns; j < j_end; j++)
            largest = fmax(largest, p->weights[i * p->columns + j]);
    return largest;
}

rgb ramp_colour(double share) {
    static const rgb ramp[] = {{28, 28, 30},  {56, 16, 72},   {110, 12, 96},  {160, 20, 96},   {206, 44, 88},
                               {240, 88, 88}, {255, 136, 92}, {255, 176, 96}, {255, 216, 104}, {255, 252, 140}};
    enum { STEPS = sizeof ramp / sizeof *ramp - 1 };
    double at = fmin(fmax(share, 0), 1) * STEPS;
    int step = at >= STEPS ? STEPS - 1 : (int)at;
    double part = at - step;
    const rgb *a = &ramp[step], *b = &ramp[step + 1];
    return (rgb){(unsigned char)lround(a->r + part * (b->r - a->r)), (unsigned char)lround(a->g + part * (b->g - a->g)),
                 (unsigned char)lround(a->b + part * (b->b - a->b))};
}

/* ---- words ---- */

/* Makes a text one that can be drawn: what is no UTF-8 and control characters become question marks. */
static char *clean(char *text) {
    for (char *c = text; *c != '\0';) {
        int length = utf8_length(c);
        if (length == 0 || (unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
        c += length == 0 ? 1 : length;
    }
    return text;
}

/* The words of a text file, which white space divides. */
static const char *const *read_words(const char *path, int64_t expected, const char *of_what) {
    bytes file = read_file(path, NULL);
    char *text = allocate(file.size + 1);
    if (file.size > 0) memcpy(text, file.data, file.size); /* a NUL among them is the end of a word, too */
    const char **words = allocate((size_t)expected * sizeof *words);
    int64_t count = 0;
    for (size_t i = 0; i < file.size; i++) {
        bool space = strchr(" \t\r\n", text[i]) != NULL, begins = i == 0 || text[i - 1] == '\0';
        if (space) text[i] = '\0';
        if (!space && begins && count++ < expected) words[count - 1] = text + i;
    }
    if (count != expected) fail("'%s' has %" PRId64 " words for %" PRId64 " %s", path, count, expected, of_what);
    for (int64_t i = 0; i < count; i++) clean(text + (words[i] - text));
    return words;
}

/* ---- the map ---- */

static int terminal_width(void) {
    struct winsize size;
    const char *columns = getenv("COLUMNS");
    long given = columns == NULL ? 0 : strtol(columns, NULL, 10);
    if (given > 0 && given < 10000) return (int)given;
    return isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 100;
}

/* A weight that one in two hundred of those worth counting exceed: the first rows of a causal map see so few keys that
 * beside their weights all others would be dark. */
static double brightest(const picture *p) {
    enum { PER_OCTAVE = 8, OCTAVES = 10, BINS = PER_OCTAVE * OCTAVES };
    int64_t bins[BINS] = {0}, counted = 0, above = 0, i = 0;
    for (; i < p->rows * p->columns; i++) {
        double below_largest = p->weights[i] > 0 ? -log2(p->weights[i] / p->largest) : OCTAVES;
        if (below_largest >= OCTAVES) continue;
        bins[(int)(below_largest * PER_OCTAVE)]++;
        counted++;
    }
    for (i = 0; i < BINS && (above += bins[i]) <= counted / 200;) i++;
    return p->largest * exp2(-(double)i / PER_OCTAVE);
}

/* One map [L,S] of weights [L,S], [H,L,S] or [N,H,L,S]: a head, or the average over them. */
static void take_map(const arguments *a, const rapt_tensor *weights, picture *p) {
    int32_t n = weights->ndim;
    char shape[SHAPE_SIZE];
    if (n < 2 || n > 4 || rapt_tensor_count(weights) == 0)
        fail("'%s' has shape %s; weights are [L,S], [H,L,S] or [N,H,L,S], and not empty", a->operand[0],
             shape_text(weights, shape));
    p->rows = weights->shape[n - 2];
    p->columns = weights->shape[n - 1];
    int64_t heads = n > 2 ? weights->shape[n - 3] : 1, sequences = n > 3 ? weights->shape[0] : 1;
    int64_t head = integer_option(a, "--head", 1, heads, 0), size = p->rows * p->columns;
    int64_t sequence = integer_option(a, "--sequence", 1, sequences, 1);
    const double *maps = to_doubles(weights) + (sequence - 1) * heads * size;
    double *map = allocate((size_t)size * sizeof *map);
    for (int64_t h = head > 0 ? head - 1 : 0; h < (head > 0 ? head : heads); h++)
        for (int64_t i = 0; i < size; i++) map[i] += maps[h * size + i] / (head > 0 ? 1 : (double)heads);
    for (int64_t i = 0; i < size; i++) {
        if (!isfinite(map[i]) || map[i] < 0) fail("'%s' holds %g, which is no weight", a->operand[0], map[i]);
        p->largest = fmax(p->largest, map[i]);
    }
    p->weights = map;
    p->top = brightest(p);
    char text[256];
    const char *title = text_option(a, "--title");
    if (title == NULL) title = strcmp(a->operand[0], "-") == 0 ? "weights" : a->operand[0];
    int used = snprintf(text, sizeof text, "%.200s", title);
    if (heads > 1 && head > 0)
        snprintf(text + used, sizeof text - (size_t)used, ", head %" PRId64 " of %" PRId64, head, heads);
    if (heads > 1 && head == 0)
        snprintf(text + used, sizeof text - (size_t)used, ", average of %" PRId64 " heads", heads);
    p->title = clean(memcpy(allocate(sizeof text), text, sizeof text));
}

int run_plot(const arguments *a) {
    static const char *const whens[] = {"auto", "always", "never", NULL};
    int when = choice_option(a, "--color", whens);
    const char *tokens = text_option(a, "--tokens"), *query_tokens = text_option(a, "--query-tokens");
    const char *svg = text_option(a, "--svg"), *png = text_option(a, "--png");
    if (svg != NULL && png != NULL && strcmp(svg, "-") == 0 && strcmp(png, "-") == 0)
        fail_usage("--svg and --png cannot both be standard output");
    open_context(a);
    rapt_tensor weights = read_array(a->operand[0]);
    picture p = {0};
    take_map(a, &weights, &p);
    if (tokens != NULL) p.column_words = read_words(tokens, p.columns, "keys");
    if (query_tokens != NULL) p.row_words = read_words(query_tokens, p.rows, "queries");
    if (p.row_words == NULL && p.rows == p.columns) p.row_words = p.column_words;
    if (svg != NULL) write_svg(&p, svg);
    if (png != NULL) write_png(&p, png);
    if (svg == NULL && png == NULL)
        draw_in_terminal(&p, when == 1 || (when != 2 && use_colour(stdout)), terminal_width());
    return SUCCESS;
}
