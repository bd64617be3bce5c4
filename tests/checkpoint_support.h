/* checkpoint_support.h - what the tests of checkpoints share: a folder, files made of shapes, comparisons of layers */
#ifndef RAPT_TESTS_CHECKPOINT_SUPPORT_H
#define RAPT_TESTS_CHECKPOINT_SUPPORT_H

#include "layer_support.h"

enum { PATH_SIZE = 512, MAX_TENSORS = 64 };

/* A folder of the test's own, and `context`. */
int make_folder(void **state);
int remove_folder(void **state); /* with what is in it */
extern char folder[];
const char *in_folder(const char *name); /* lives until the fourth call after it */
int files_in_folder(void);

void write_bytes(const char *path, const void *bytes, size_t size);
void *read_bytes(const char *path, size_t *size); /* from malloc */

/* Opens and closes; fails the test if it cannot. */
rapt_checkpoint *open_checkpoint(const char *path);
rapt_checkpoint *save_and_open(const rapt_mha *layer, const rapt_save_options *options);
rapt_layer_info layer_info(const rapt_checkpoint *checkpoint, int64_t index);

/* A tensor by its shape, to write: sizes up to the first 0. */
typedef struct spec {
    const char *name;
    rapt_dtype dtype;
    int64_t shape[4];
} spec;
/* Writes random values; `metadata` is one value for the key, NULL for none. */
void write_specs(const char *path, const spec *specs, const char *key, const char *metadata);

void assert_message(const char *fragment);
void assert_same_settings(const rapt_mha *a, const rapt_mha *b);
void assert_same_forward(const rapt_mha *a, const rapt_mha *b); /* bit by bit */
uint64_t sum_layer(const rapt_mha *layer);                      /* of parameters and version */

/* ---- memory that counts, and refuses on demand ---- */

typedef struct counting_memory {
    int64_t calls, refuse_at; /* the call that gets NULL, counted from 1; 0 for none */
    int64_t live, bytes;      /* lent and not given back */
} counting_memory;

rapt_context *make_counting_context(counting_memory *memory);

#endif
