/* npy.h - NumPy's file format for one array, versions 1.0 to 3.0
 *
 * Element types are '<f2', '<f4', '<f8' and '|b1'. bf16 has none in the format, so it is written as f32, which holds it
 * exactly.
 */
#ifndef RAPT_TOOL_NPY_H
#define RAPT_TOOL_NPY_H

#include <rapt/rapt.h>

typedef struct npy_header {
    rapt_tensor tensor;        /* without data; in Fortran's order its strides grow */
    size_t data_at, data_size; /* in the file, which ends with the data */
} npy_header;

bool npy_has_magic(const unsigned char *file, size_t size);
/* Reads the header at the beginning of `size` bytes. Returns NULL, or what is wrong with it, valid until the next call. */
const char *npy_read_header(const unsigned char *file, size_t size, npy_header *header);

enum { NPY_WRITTEN_SIZE = 256 };
/* The header of a contiguous tensor, which is not bf16; returns its length. */
size_t npy_write_header(const rapt_tensor *tensor, char text[NPY_WRITTEN_SIZE]);

#endif
