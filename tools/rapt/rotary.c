/* rotary.c - rotary positions as the options say */
#include "layer.h"

#include "commands.h"

#include <inttypes.h>
#include <math.h>

const option rotary_options[] = {
    {"--rope", "BASE", "turn queries and keys by their positions, as Llama does; its base, such as 10000 or 500000"},
    {"--rope-dims", "N", "only the first N features of each head; all"},
    {"--rope-interleaved", NULL, "neighbours make the pairs, as in GPT-J, not the halves, as in Llama"},
    {"--rope-scaling", "HOW", "linear:F, ntk:F,LENGTH, llama3:F,LENGTH[,LOW,HIGH] or yarn:F,LENGTH[,LOW,HIGH]"},
    {0},
};

static const struct {
    const char *name;
    rapt_rotary_scaling scaling;
    int least, most; /* numbers */
    double low, high;
} scalings[] = {
    {"linear", RAPT_ROTARY_LINEAR, 1, 1, 0, 0},
    {"ntk", RAPT_ROTARY_NTK, 2, 2, 0, 0},
    {"llama3", RAPT_ROTARY_LLAMA3, 2, 4, 1, 4},
    {"yarn", RAPT_ROTARY_YARN, 2, 4, 1, 32},
};
enum { SCALINGS = sizeof scalings / sizeof *scalings, MOST_NUMBERS = 4 };

/* The numbers of a list with commas; more than there is room for are counted and not kept. */
static int read_numbers(const char *list, double number[MOST_NUMBERS]) {
    char text[64];
    int count = 0;
    for (const char *at = list; at != NULL; count++) {
        size_t length = strcspn(at, ",");
        if (length >= sizeof text) fail_usage("--rope-scaling: '%s' has a number of %zu characters", list, length);
        snprintf(text, sizeof text, "%.*s", (int)length, at);
        double value = real_value("--rope-scaling", text, 0, 1e100);
        if (count < MOST_NUMBERS) number[count] = value;
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
    return count;
}

static void take_scaling(const char *given, rapt_rotary *rotary) {
    size_t length = strcspn(given, ":");
    int i = 0;
    while (i < SCALINGS && (strlen(scalings[i].name) != length || strncmp(scalings[i].name, given, length) != 0)) i++;
    if (i == SCALINGS) fail_usage("--rope-scaling: '%s' begins with none of linear:, ntk:, llama3:, yarn:", given);
    double number[MOST_NUMBERS] = {0, 0, scalings[i].low, scalings[i].high};
    int count = given[length] == ':' ? read_numbers(given + length + 1, number) : 0;
    if (count < scalings[i].least || count > scalings[i].most || count == 3)
        fail_usage("--rope-scaling: %s has %d numbers, expected %s", scalings[i].name, count,
                   scalings[i].most == 1   ? "1, the factor"
                   : scalings[i].most == 2 ? "2, the factor and the original length"
                                           : "2 or 4, the factor, the original length, and least and most turns");
    if (count > 1 && (number[1] < 1 || number[1] > 1e15 || number[1] != floor(number[1])))
        fail_usage("--rope-scaling: the original length is %.17g, expected a whole number from 1 to 1e15", number[1]);
    rotary->scaling = scalings[i].scaling;
    rotary->factor = number[0];
    rotary->original_length = (int64_t)number[1];
    rotary->low_turns = number[2];
    rotary->high_turns = number[3];
}

bool rotary_option(const arguments *a, rapt_rotary *rotary) {
    static const char *const others[] = {"--rope-dims", "--rope-interleaved", "--rope-scaling"};
    bool given = has_option(a, "--rope");
    for (int i = 0; i < 3; i++)
        if (!given && has_option(a, others[i])) fail_usage("%s needs --rope BASE", others[i]);
    *rotary = rapt_rotary_default(real_option(a, "--rope", 1, 1e100, 0));
    rotary->dims = integer_option(a, "--rope-dims", 2, 1 << 30, RAPT_DEFAULT);
    rotary->interleaved = has_option(a, "--rope-interleaved");
    if (has_option(a, "--rope-scaling")) take_scaling(text_option(a, "--rope-scaling"), rotary);
    return given;
}

static const char *scaling_name(rapt_rotary_scaling scaling) {
    for (int i = 0; i < SCALINGS; i++)
        if (scalings[i].scaling == scaling) return scalings[i].name;
    return "none";
}

void print_rotary(const rapt_rotary *r) {
    printf("%-8s base %g, %s", "rotary", r->base, r->interleaved ? "interleaved" : "halves");
    if (r->dims != RAPT_DEFAULT) printf(", %" PRId64 " features", r->dims);
    if (r->scaling != RAPT_ROTARY_PLAIN) printf(", %s by %g", scaling_name(r->scaling), r->factor);
    if (r->original_length > 0) printf(" from %" PRId64, r->original_length);
    putchar('\n');
}

void print_json_rotary(const rapt_rotary *r, int64_t head_dim) {
    printf("{\"base\": %.17g, \"dims\": %" PRId64 ", \"interleaved\": %s, \"scaling\": ", r->base,
           r->dims == RAPT_DEFAULT ? head_dim : r->dims, r->interleaved ? "true" : "false");
    printf(r->scaling == RAPT_ROTARY_PLAIN ? "null" : "\"%s\", \"factor\": %.17g", scaling_name(r->scaling), r->factor);
    if (r->original_length > 0) printf(", \"original_length\": %" PRId64, r->original_length);
    if (r->high_turns > 0) printf(", \"low\": %.17g, \"high\": %.17g", r->low_turns, r->high_turns);
    putchar('}');
}
