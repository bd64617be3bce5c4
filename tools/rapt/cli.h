/* cli.h - what the commands of the tool share: their options, errors, and memory that lives until the end
 *
 * A run of the tool is one command. Whatever goes wrong ends it: `rapt: message` on stderr, status 2 for a mistake in
 * the command line and 1 for everything else. So nothing here returns an error, and commands do not clean up: what they
 * take is kept in a list and released at exit.
 */
#ifndef RAPT_TOOL_CLI_H
#define RAPT_TOOL_CLI_H

#include <rapt/rapt.h>

#include <stdarg.h>
#include <stdio.h>

enum { SUCCESS = 0, FAILURE = 1, BAD_USAGE = 2 }; /* exit status */

/* ---- the command line ---- */

typedef struct option {
    const char *name;  /* "--heads" */
    const char *value; /* what the help calls its value; NULL for a flag */
    const char *help;
} option;

enum { MOST_OPTIONS = 32, MOST_LISTS = 6, MOST_OPERANDS = 2 };

typedef struct arguments arguments;

typedef struct command {
    const char *name, *operands, *summary; /* operands: "IN OUT" takes exactly two, "" none */
    const char *details;                   /* the help's last part; NULL for none */
    int (*run)(const arguments *arguments);
    const option *options[MOST_LISTS]; /* lists that commands share; each ends with {0} */
} command;

struct arguments {
    const command *command;
    const char *operand[MOST_OPERANDS];
    const char *value[MOST_OPTIONS]; /* of the command's options in their order; NULL where not given */
};

/* Options stand anywhere, as `--name value` or `--name=value`; `--` ends them. */
arguments parse_arguments(const command *command, int argc, char **argv);
bool wants_help(const command *command, int argc, char **argv);
void print_help(const command *command);
/* The one of `count` words that was perhaps meant; NULL if none is near. */
const char *nearest_word(const char *word, int count, const char *const *words);

/* An option's value by its name, which must be one of the command's. */
bool has_option(const arguments *a, const char *name);
const char *text_option(const arguments *a, const char *name); /* NULL if not given */
int64_t integer_option(const arguments *a, const char *name, int64_t low, int64_t high, int64_t otherwise);
int64_t integer_value(const char *name, const char *text, int64_t low, int64_t high); /* part of an option's value */
double real_value(const char *name, const char *text, double low, double high);       /* likewise */
double real_option(const arguments *a, const char *name, double low, double high, double otherwise);
/* The number of the word among `words`, which end with NULL; -1 if not given. */
int choice_option(const arguments *a, const char *name, const char *const *words);

/* ---- ending ---- */

__attribute__((noreturn, format(printf, 1, 2))) void fail(const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void fail_usage(const char *format, ...);
void print_error(const char *format, va_list values); /* "rapt: message" on stderr */
void check(rapt_status status);
void close_output(void); /* fails if something of stdout could not be written */

/* ---- memory ---- */

void keep(void *object, void (*release)(void *)); /* until exit; the last one kept is released first */
void *allocate(size_t size);                      /* kept */

/* ---- the library ---- */

extern rapt_context *ctx;
extern const option machine_options[];
rapt_isa isa_option(const arguments *a); /* --isa */
void open_context(const arguments *a);   /* by machine_options, if the command has them */

/* ---- output ---- */

bool use_colour(FILE *stream); /* a terminal, and no NO_COLOR */
double seconds_passed(void);   /* since some moment, the same for all calls */
bool progress_is_shown(void);  /* stderr is a terminal */
/* A line on stderr, if that is a terminal, that the next one replaces; NULL takes it away. */
void show_progress(const char *what);
/* The same with a percentage, for work that is done in many steps and begins with done = 0: such a line comes when a
 * third of a second has passed, so that short work shows none, and changes a few times a second. */
void show_share(const char *what, double done, double total);
void print_text(FILE *stream, const char *text); /* without control characters, which could steer the terminal */
/* The bytes of the UTF-8 character at `text`, 0 if there is none. */
int utf8_length(const char *text);
void print_json_string(const char *text); /* what is no UTF-8 becomes U+FFFD */
void print_json_shape(const rapt_tensor *tensor);

enum { SHAPE_SIZE = 192 };
const char *shape_text(const rapt_tensor *tensor, char text[SHAPE_SIZE]); /* "[2, 10, 64]" */
const char *size_text(double bytes, char text[SHAPE_SIZE]);               /* "1.5 MB" */

#endif
