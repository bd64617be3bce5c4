/* cli_support.h - what the tests of the command-line tool share: a folder, the tool run in it as people run it, and what
 * the library itself makes of the shipped example */
#ifndef RAPT_TESTS_CLI_SUPPORT_H
#define RAPT_TESTS_CLI_SUPPORT_H

#include "layer_support.h"

#define SENTENCE RAPT_SOURCE_DIR "/examples/data/sentence.safetensors"
#define WORDS RAPT_SOURCE_DIR "/examples/data/sentence.txt"
#define RUN "run " SENTENCE " --heads 4 "
#define CHECK "check " SENTENCE " --heads 4 "

enum { LENGTH = 12, WIDTH = 64, HEADS = 4 };

/* A folder with the sentence's input as x.npy, and `context`. */
int set_up_cli(void **state);
int tear_down_cli(void **state);

/* ---- files in the folder ---- */

char *path_of(const char *name);             /* lives until the fourth call after it */
char *slurp(const char *name, size_t *size); /* from malloc; size may be NULL */
void spill(const char *name, const void *data, size_t size);
/* An npy file with any header; the version decides how its length is written. */
void write_npy(const char *name, int version, const char *dict, const void *data, size_t size);
/* The elements of an npy file that the tool wrote, in *file, which the caller frees. */
rapt_tensor read_npy(const char *name, char **file);

/* ---- commands ---- */

extern char *out_text, *err_text; /* what the last one printed */
extern size_t out_size;

int shell(const char *command); /* in the folder; returns its status, which must be 0 to 2 */
int rapt(const char *arguments);
void succeeds(const char *arguments);
/* Fails with that status, says so on stderr, and prints nothing else. */
void fails(int status, const char *arguments, const char *message);
/* The tool with stderr on a terminal, among other words of a shell: what it wrote there becomes err_text. */
int on_terminal(const char *before, const char *arguments, const char *after);
void assert_has(const char *text, const char *part);

/* ---- the sentence, computed by the library itself ---- */

extern rapt_tensor input; /* [1, LENGTH, WIDTH] */

/* The npy file holds, bit by bit, the layer's output for the input. */
void assert_output(const char *name, rapt_dtype dtype, const rapt_options *options);

#endif
