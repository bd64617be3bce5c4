/* files.h - whole files in and out, and the arrays in them
 *
 * `-` is standard input or output. Files are mapped, streams are read once.
 */
#ifndef RAPT_TOOL_FILES_H
#define RAPT_TOOL_FILES_H

#include <rapt/rapt.h>

typedef struct bytes {
    const void *data;
    size_t size;
} bytes;

/* A stream that goes on after its first 64 kB is read no further than `limit` of these says; NULL: no further at all. */
bytes read_file(const char *path, size_t (*limit)(bytes beginning));
/* The parts, one after another, under the path when all of it is written: what was there before stays until then. */
void write_file(const char *path, int parts, const bytes *part);

/* Where a file may be made on its way to a stream: in a folder of its own below $TMPDIR or /tmp. */
const char *temporary_path(void);
bytes take_temporary(const char *path); /* maps the file and takes it and its folder off the disk, as its end does */

bool looks_like_safetensors(bytes file); /* by its first nine bytes */

/* ---- arrays: FILE.npy, FILE.safetensors with one tensor in it, FILE.safetensors:NAME ---- */

rapt_tensor read_array(const char *where);
/* A file that holds query, key and value gives all three; one that holds `input` gives that as all three. */
void read_inputs(const char *where, rapt_tensor inputs[3]);
/* By the path's ending: safetensors with the given name, else npy, in which bf16 becomes f32. */
void write_array(const char *path, const char *name, const rapt_tensor *tensor);

rapt_tensor new_array(rapt_dtype dtype, int32_t ndim, const int64_t *shape); /* zeros, until exit */
/* The tensor itself if it is of that dtype, else a converted copy. */
rapt_tensor to_dtype(const rapt_tensor *tensor, rapt_dtype dtype);
/* Contiguous f64 elements. */
const double *to_doubles(const rapt_tensor *tensor);

#endif
