/* args.c - the command line: options, operands, help */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>

static const command *current; /* for messages about usage; NULL before it is known */

void fail_usage(const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_error(format, values);
    va_end(values);
    fprintf(stderr, "Try 'rapt %s%s'.\n", current == NULL ? "--help" : "help ", current == NULL ? "" : current->name);
    exit(BAD_USAGE);
}

/* The index-th option over all lists of the command, NULL beyond the last. */
static const option *option_at(const command *c, int index) {
    for (int list = 0; list < MOST_LISTS && c->options[list] != NULL; list++) {
        for (const option *o = c->options[list]; o->name != NULL; o++)
            if (index-- == 0) return o;
    }
    return NULL;
}

/* ---- what was perhaps meant ---- */

static int least(int a, int b) { return a < b ? a : b; }

/* Letters to insert, remove, change or swap with their neighbour to get from one word to the other. */
static int edit_distance(const char *a, const char *b) {
    enum { LONGEST = 32 };
    int n = (int)strlen(a), m = (int)strlen(b);
    if (n > LONGEST || m > LONGEST) return LONGEST;
    int cost[LONGEST + 1][LONGEST + 1];
    for (int i = 0; i <= n; i++) {
        for (int j = 0; j <= m; j++) {
            if (i == 0 || j == 0) {
                cost[i][j] = i + j;
                continue;
            }
            int changed = cost[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            cost[i][j] = least(changed, 1 + least(cost[i - 1][j], cost[i][j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                cost[i][j] = least(cost[i][j], cost[i - 2][j - 2] + 1);
        }
    }
    return cost[n][m];
}

const char *nearest_word(const char *word, int count, const char *const *words) {
    const char *nearest = NULL;
    int smallest = 3; /* from here on it is another word */
    for (int i = 0; i < count; i++) {
        size_t typed = strlen(word);
        int distance = typed >= 4 && strncmp(word, words[i], typed) == 0 ? 1 : edit_distance(word, words[i]);
        if (distance >= smallest || distance >= (int)strlen(words[i])) continue;
        smallest = distance;
        nearest = words[i];
    }
    return nearest;
}

/* ---- parsing ---- */

/* The option that `text` names up to its '=' or end, and its number. */
static const option *find_option(const command *c, const char *text, int *index) {
    size_t length = strcspn(text, "=");
    const option *o;
    for (*index = 0; (o = option_at(c, *index)) != NULL; ++*index)
        if (strlen(o->name) == length && strncmp(o->name, text, length) == 0) return o;
    return NULL;
}

_Noreturn static void fail_unknown_option(const command *c, const char *text) {
    const char *names[MOST_OPTIONS];
    int count = 0;
    for (const option *o; (o = option_at(c, count)) != NULL; count++) names[count] = o->name;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "="), text);
    const char *nearest = nearest_word(name, count, names);
    if (nearest == NULL) fail_usage("unknown option %s", name);
    fail_usage("unknown option %s, did you mean %s?", name, nearest);
}

static int count_words(const char *text) {
    int count = 0;
    for (; *text != '\0'; text++) count += *text != ' ' && (text[1] == ' ' || text[1] == '\0');
    return count;
}

arguments parse_arguments(const command *c, int argc, char **argv) {
    arguments a = {.command = c};
    int given = 0, wanted = count_words(c->operands), index;
    bool ended = false;
    current = c;
    for (int i = 0; i < argc; i++) {
        const char *text = argv[i];
        if (!ended && strcmp(text, "--") == 0) {
            ended = true;
        } else if (ended || text[0] != '-' || text[1] == '\0') { /* "-" alone is a stream */
            if (given == wanted) fail_usage("unexpected argument '%s'", text);
            a.operand[given++] = text;
        } else {
            const option *o = find_option(c, text, &index);
            const char *value = strchr(text, '=');
            if (o == NULL) fail_unknown_option(c, text);
            if (o->value == NULL && value != NULL) fail_usage("%s takes no value", o->name);
            if (o->value != NULL && value == NULL && i + 1 == argc) fail_usage("%s needs %s", o->name, o->value);
            if (a.value[index] != NULL) fail_usage("%s is given twice", o->name);
            a.value[index] = o->value == NULL ? "" : value != NULL ? value + 1 : argv[++i];
        }
    }
    if (given < wanted) fail_usage("%s expected", given == 0 ? c->operands : strchr(c->operands, ' ') + 1);
    return a;
}

bool wants_help(const command *c, int argc, char **argv) {
    for (int i = 0, index; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
        const option *o = find_option(c, argv[i], &index);
        if (o != NULL && o->value != NULL && strchr(argv[i], '=') == NULL) i++; /* its value */
    }
    return false;
}

static void print_option(const option *o) {
    char name[64];
    snprintf(name, sizeof name, "%s%s%s", o->name, o->value == NULL ? "" : " ", o->value == NULL ? "" : o->value);
    printf("  %-22s %s\n", name, o->help);
}

void print_help(const command *c) {
    printf("usage: rapt %s%s%s [options]\n%s\n\n", c->name, *c->operands == '\0' ? "" : " ", c->operands, c->summary);
    for (int i = 0; option_at(c, i) != NULL; i++) print_option(option_at(c, i));
    print_option(&(option){"--help", NULL, "print this"});
    if (c->details != NULL) printf("\n%s\n", c->details);
}

/* ---- values ---- */

const char *text_option(const arguments *a, const char *name) {
    int index;
    if (find_option(a->command, name, &index) == NULL) fail("%s has no option %s", a->command->name, name);
    return a->value[index];
}

bool has_option(const arguments *a, const char *name) { return text_option(a, name) != NULL; }

int64_t integer_value(const char *name, const char *text, int64_t low, int64_t high) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end != '\0') fail_usage("%s: '%s' is not a whole number", name, text);
    if (errno == ERANGE || number < low || number > high)
        fail_usage("%s: %s is not from %" PRId64 " to %" PRId64, name, text, low, high);
    return number;
}

int64_t integer_option(const arguments *a, const char *name, int64_t low, int64_t high, int64_t otherwise) {
    const char *text = text_option(a, name);
    return text == NULL ? otherwise : integer_value(name, text, low, high);
}

double real_value(const char *name, const char *text, double low, double high) {
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end != '\0' || isnan(number)) fail_usage("%s: '%s' is not a number", name, text);
    if (number < low || number > high) fail_usage("%s: %s is not from %g to %g", name, text, low, high);
    return number;
}

double real_option(const arguments *a, const char *name, double low, double high, double otherwise) {
    const char *text = text_option(a, name);
    return text == NULL ? otherwise : real_value(name, text, low, high);
}

int choice_option(const arguments *a, const char *name, const char *const *words) {
    const char *text = text_option(a, name);
    if (text == NULL) return -1;
    char all[160] = "";
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(words[i], text) == 0) return i;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i == 0 ? "" : ", ", words[i]);
    }
    fail_usage("%s: '%s' is none of %s", name, text, all);
}
