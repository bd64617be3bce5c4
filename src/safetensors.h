/* safetensors.h - what reader, writer and checkpoints share beside the public calls */
#ifndef RAPT_SAFETENSORS_H
#define RAPT_SAFETENSORS_H

#include "internal.h"

#define RAPT_SAFETENSORS_LENGTH_BYTES 8
#define RAPT_SAFETENSORS_MAX_HEADER 100000000 /* the reference implementation's limit */

typedef struct safetensors_type {
    const char *name; /* "F32" */
    int64_t bits;     /* of an element */
    rapt_dtype dtype; /* 0: the format has it and Rapt has not */
} safetensors_type;

typedef struct safetensors_entry {
    const char *name; /* first, see table.h */
    const safetensors_type *type;
    size_t at;                          /* of the name in the header's JSON, for messages */
    int64_t ndim, shape[RAPT_MAX_DIMS]; /* dimensions beyond the last are checked and forgotten */
    int64_t elements, volume;           /* volume counts a 0 as 1 and stops at INT64_MAX: what strides reach */
    int64_t begin, end;
    bool has_shape, has_offsets;
} safetensors_entry;

const safetensors_type *rapt_safetensors_type(rapt_dtype dtype); /* NULL for a value that is no dtype */

/* The public calls without the gate: they are part of others. Memory where path is NULL. */
rapt_status rapt_safetensors_read(rapt_context *context, const char *path, const void *data, size_t size,
                                  rapt_safetensors **file);
const safetensors_entry *rapt_safetensors_entry_at(const rapt_safetensors *file, size_t index);
const safetensors_entry *rapt_safetensors_entry_of(const rapt_safetensors *file, const char *name); /* NULL: none */
/* The view may be unaligned where the file is, and is then good for rapt_copy_elements alone. */
rapt_status rapt_safetensors_view(rapt_context *context, const rapt_safetensors *file, const safetensors_entry *entry,
                                  rapt_tensor *view);
rapt_status rapt_safetensors_aligned_view(rapt_context *context, const rapt_safetensors *file,
                                          const safetensors_entry *entry, rapt_tensor *view);

/* A tensor to be written: up to three views of one shape but for dimension `along`, one after another there. Views with
 * NULL data are zeros. Views convert to `dtype`. The name is two strings in a row. */
typedef struct safetensors_source {
    const char *prefix, *name;
    rapt_dtype dtype;
    int32_t along, pieces;
    rapt_tensor piece[3];
    int64_t begin, end; /* the writer's: where it goes */
} safetensors_source;

typedef const char *const (*rapt_pairs)[2]; /* keys and values of a file's metadata */

rapt_status rapt_safetensors_write(rapt_context *context, const char *path, int64_t count, safetensors_source *sources,
                                   int64_t pairs, rapt_pairs metadata);

#endif
