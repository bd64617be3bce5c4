/* cli.c - endings, memory until then, and output for people and programs */
#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

rapt_context *ctx;

/* ---- ending ---- */

void print_error(const char *format, va_list values) {
    show_progress(NULL);
    fputs("rapt: ", stderr);
    char text[1024];
    vsnprintf(text, sizeof text, format, values);
    print_text(stderr, text);
    fputc('\n', stderr);
}

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_error(format, values);
    va_end(values);
    exit(FAILURE);
}

void check(rapt_status status) {
    if (status != RAPT_OK)
        fail("%s", *rapt_error_message(ctx) != '\0' ? rapt_error_message(ctx) : rapt_status_text(status));
}

void close_output(void) {
    bool failed = ferror(stdout) != 0;
    if (fclose(stdout) == 0 && !failed) return;
    fail("cannot write standard output: %s", strerror(errno));
}

/* ---- memory ---- */

typedef struct kept {
    struct kept *before;
    void *object;
    void (*release)(void *);
} kept;

static kept *last_kept;

static void release_kept(void) {
    while (last_kept != NULL) {
        kept *one = last_kept;
        last_kept = one->before;
        one->release(one->object);
        free(one);
    }
}

void keep(void *object, void (*release)(void *)) {
    static bool registered;
    if (!registered && atexit(release_kept) != 0) fail("out of memory");
    registered = true;
    kept *one = malloc(sizeof *one);
    if (one == NULL) fail("out of memory");
    *one = (kept){.before = last_kept, .object = object, .release = release};
    last_kept = one;
}

void *allocate(size_t size) {
    void *memory = calloc(size > 0 ? size : 1, 1);
    if (memory == NULL) fail("out of memory: %zu bytes are not to be had", size);
    keep(memory, free);
    return memory;
}

/* ---- the library ---- */

const option machine_options[] = {
    {"--threads", "T", "how many threads compute; all that the process may use"},
    {"--isa", "NAME", "the instruction set: auto, baseline, avx2, avx512 or neon"},
    {"--backend", "NAME", "cpu, or reference: slow, in double precision, the specification"},
    {0},
};

rapt_isa isa_option(const arguments *a) {
    const char *names[RAPT_ISA_NEON + 2] = {0};
    for (int i = RAPT_ISA_AUTO; i <= RAPT_ISA_NEON; i++) names[i] = rapt_isa_name((rapt_isa)i);
    int isa = choice_option(a, "--isa", names);
    return isa < 0 ? RAPT_ISA_AUTO : (rapt_isa)isa;
}

static void destroy_context(void *context) { rapt_context_destroy(context); }

void open_context(const arguments *a) {
    static const char *const backends[] = {"cpu", "reference", NULL};
    char text[256] = "";
    rapt_context_config config = rapt_context_config_default();
    config.error_text = text;
    config.error_text_size = sizeof text;
    bool has_machine = false;
    for (int i = 0; i < MOST_LISTS; i++) has_machine = has_machine || a->command->options[i] == machine_options;
    if (has_machine) {
        int backend = choice_option(a, "--backend", backends);
        config.num_threads = (int32_t)integer_option(a, "--threads", 1, 4096, 0);
        if (backend >= 0) config.backend = (rapt_backend)backend;
        config.isa = isa_option(a);
    }
    rapt_status status = rapt_context_create(&config, &ctx);
    if (status != RAPT_OK) fail("%s", *text != '\0' ? text : rapt_status_text(status));
    keep(ctx, destroy_context);
}

/* ---- output ---- */

bool use_colour(FILE *stream) {
    const char *no_color = getenv("NO_COLOR");
    return isatty(fileno(stream)) && (no_color == NULL || *no_color == '\0');
}

double seconds_passed(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

bool progress_is_shown(void) { return isatty(STDERR_FILENO); }

void show_progress(const char *what) {
    static bool shown;
    if (!shown && (what == NULL || !progress_is_shown())) return;
    fprintf(stderr, "\r\033[K%s", what == NULL ? "" : what);
    fflush(stderr);
    shown = what != NULL;
}

void show_share(const char *what, double done, double total) {
    static double due;
    double now = seconds_passed();
    char line[64];
    if (done == 0) due = now + 0.3;
    if (now < due) return;
    due = now + 0.1;
    snprintf(line, sizeof line, "%s, %.0f %%", what, 100 * done / total);
    show_progress(line);
}

void print_text(FILE *stream, const char *text) {
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        fputc(c < 0x20 || c == 0x7f ? '?' : c, stream);
    }
}

/* The second byte tells overlong forms, surrogates and what lies beyond Unicode. */
int utf8_length(const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    int length = c[0] < 0x80 ? 1 : c[0] < 0xe0 ? 2 : c[0] < 0xf0 ? 3 : 4;
    unsigned char low = c[0] == 0xe0 ? 0xa0 : c[0] == 0xf0 ? 0x90 : 0x80;
    unsigned char high = c[0] == 0xed ? 0x9f : c[0] == 0xf4 ? 0x8f : 0xbf;
    if (length > 1 && (c[0] < 0xc2 || c[0] > 0xf4 || c[1] < low || c[1] > high)) return 0;
    for (int i = 2; i < length; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    return length;
}

void print_json_string(const char *text) {
    putchar('"');
    while (*text != '\0') {
        int length = utf8_length(text);
        if (length == 0) {
            printf("\\ufffd");
        } else if ((unsigned char)*text < 0x20) {
            printf("\\u%04x", (unsigned)*text);
        } else {
            printf(*text == '"' || *text == '\\' ? "\\%.*s" : "%.*s", length, text);
        }
        text += length == 0 ? 1 : length;
    }
    putchar('"');
}

void print_json_shape(const rapt_tensor *t) {
    putchar('[');
    for (int32_t d = 0; d < t->ndim; d++) printf("%s%" PRId64, d == 0 ? "" : ", ", t->shape[d]);
    putchar(']');
}

const char *shape_text(const rapt_tensor *t, char text[SHAPE_SIZE]) {
    int used = snprintf(text, SHAPE_SIZE, "[");
    for (int32_t d = 0; d < t->ndim; d++)
        used += snprintf(text + used, SHAPE_SIZE - (size_t)used, "%s%" PRId64, d == 0 ? "" : ", ", t->shape[d]);
    snprintf(text + used, SHAPE_SIZE - (size_t)used, "]");
    return text;
}

const char *size_text(double bytes, char text[SHAPE_SIZE]) {
    static const char *const units[] = {"bytes", "kB", "MB", "GB", "TB"};
    int unit = 0;
    for (; bytes >= 1000 && unit < 4; unit++) bytes /= 1000;
    snprintf(text, SHAPE_SIZE, unit == 0 || bytes >= 100 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return text;
}
