/* cli_support.c - what the tests of the command-line tool share */
#define _GNU_SOURCE /* posix_openpt */
#include "cli_support.h"

#include "npy.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static char work[] = "/tmp/rapt_cli_XXXXXX"; /* where every command runs */
char *out_text, *err_text;
size_t out_size;

/* ---- files ---- */

char *path_of(const char *name) {
    static char path[4][512];
    static int next;
    char *result = path[next++ % 4];
    snprintf(result, sizeof path[0], "%s/%s", work, name);
    return result;
}

char *slurp(const char *name, size_t *size) {
    FILE *file = fopen(path_of(name), "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long length = ftell(file);
    rewind(file);
    char *text = malloc((size_t)length + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)length, file), (size_t)length);
    fclose(file);
    text[length] = '\0';
    if (size != NULL) *size = (size_t)length;
    return text;
}

void spill(const char *name, const void *data, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

void write_npy(const char *name, int version, const char *dict, const void *data, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    size_t length = strlen(dict) + 1;
    fprintf(file, "%cNUMPY%c%c%c%c", 0x93, version, 0, (int)(length & 255), (int)(length >> 8));
    if (version > 1) fprintf(file, "%c%c", 0, 0);
    fprintf(file, "%s\n", dict);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

rapt_tensor read_npy(const char *name, char **file) {
    size_t size;
    npy_header header;
    *file = slurp(name, &size);
    assert_null(npy_read_header((unsigned char *)*file, size, &header));
    assert_int_equal(header.data_at + header.data_size, size);
    assert_int_equal(header.data_at % 64, 0);
    header.tensor.data = *file + header.data_at;
    return header.tensor;
}

/* ---- commands ---- */

int shell(const char *command) {
    char line[4096];
    assert_true(snprintf(line, sizeof line, "cd %s && { %s; } >out 2>err </dev/null", work, command) <
                (int)sizeof line);
    int status = system(line); /* NOLINT(cert-env33-c): a shell is what people use */
    free(out_text);
    free(err_text);
    out_text = slurp("out", &out_size);
    err_text = slurp("err", NULL);
    if (!WIFEXITED(status) || WEXITSTATUS(status) > 2 || strstr(err_text, "Sanitizer") != NULL)
        fail_msg("%s\nended with %d\n%s", command, status, err_text);
    return WEXITSTATUS(status);
}

int rapt(const char *arguments) {
    char line[3500];
    assert_true(snprintf(line, sizeof line, RAPT_TOOL " %s", arguments) < (int)sizeof line);
    return shell(line);
}

int on_terminal(const char *before, const char *arguments, const char *after) {
    enum { MOST = 1 << 16 };
    char line[3500];
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0) skip(); /* a container may have none */
    assert_true(grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    const char *name = ptsname(terminal);
    assert_non_null(name);
    int kept_open = open(name, O_RDWR | O_NOCTTY); /* or what is written there is lost when the tool ends */
    assert_true(kept_open >= 0);
    assert_true(snprintf(line, sizeof line, "%s " RAPT_TOOL " %s 2>%s %s", before, arguments, name, after) <
                (int)sizeof line);
    int status = shell(line);
    free(err_text);
    err_text = calloc(MOST, 1);
    assert_non_null(err_text);
    assert_int_equal(fcntl(terminal, F_SETFL, O_NONBLOCK), 0);
    size_t used = 0;
    for (ssize_t got; (got = read(terminal, err_text + used, MOST - 1 - used)) > 0;) used += (size_t)got;
    close(kept_open);
    close(terminal);
    return status;
}

void assert_has(const char *text, const char *part) {
    if (strstr(text, part) == NULL) fail_msg("expected \"%s\" in:\n%s", part, text);
}

void succeeds(const char *arguments) {
    if (rapt(arguments) != 0) fail_msg("rapt %s failed: %s", arguments, err_text);
    assert_string_equal(err_text, "");
}

void fails(int status, const char *arguments, const char *message) {
    int ended = rapt(arguments);
    if (ended != status || out_size != 0) fail_msg("rapt %s ended with %d\n%s%s", arguments, ended, out_text, err_text);
    if (strncmp(err_text, "rapt: ", 6) != 0) fail_msg("rapt %s said: %s", arguments, err_text);
    assert_has(err_text, message);
}

/* ---- the sentence, computed by the library itself ---- */

rapt_tensor input;
static rapt_safetensors *file;

static rapt_tensor sentence_tensor(const char *name) {
    rapt_tensor tensor;
    assert_ok(context, rapt_safetensors_find(context, file, name, &tensor));
    return tensor;
}

static rapt_tensor expected_output(rapt_dtype dtype, const rapt_options *options) {
    rapt_tensor parameter[4] = {sentence_tensor("in_proj_weight"), sentence_tensor("in_proj_bias"),
                                sentence_tensor("out_proj.weight"), sentence_tensor("out_proj.bias")};
    for (int i = 0; i < 4; i++) parameter[i] = convert_tensor(&parameter[i], dtype);
    rapt_mha_weights weights = rapt_mha_weights_default(HEADS);
    weights.batch_first = true;
    weights.in_proj_weight = &parameter[0];
    weights.in_proj_bias = &parameter[1];
    weights.out_proj_weight = &parameter[2];
    weights.out_proj_bias = &parameter[3];
    rapt_mha *layer;
    assert_ok(context, rapt_mha_create_from_weights(context, &weights, RAPT_COPY, &layer));
    rapt_tensor x = convert_tensor(&input, dtype), y = make_tensor(dtype, 3, input.shape);
    assert_ok(context, rapt_mha_forward(context, layer, &x, &x, &x, options, &y));
    for (int i = 0; i < 4; i++) free_tensor(&parameter[i]);
    free_tensor(&x);
    rapt_mha_destroy(layer);
    return y;
}

void assert_output(const char *name, rapt_dtype dtype, const rapt_options *options) {
    char *memory;
    rapt_tensor ours = read_npy(name, &memory), expected = expected_output(dtype, options);
    assert_int_equal(ours.dtype, dtype);
    assert_true(same_bits(&ours, &expected));
    free_tensor(&expected);
    free(memory);
}

int set_up_cli(void **state) {
    (void)state;
    assert_non_null(mkdtemp(work));
    context = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    assert_ok(context, rapt_safetensors_open(context, SENTENCE, &file));
    input = sentence_tensor("input");
    write_npy("x.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 12, 64), }", input.data,
              sizeof(float) * LENGTH * WIDTH);
    return 0;
}

int tear_down_cli(void **state) {
    (void)state;
    rapt_safetensors_close(file);
    rapt_context_destroy(context);
    free(out_text);
    free(err_text);
    char line[64];
    snprintf(line, sizeof line, "rm -rf %s", work);
    return system(line); /* NOLINT(cert-env33-c) */
}
