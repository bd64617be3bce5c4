/* dlpack_abi.h - the parts of DLPack's binary interface that the binding reads, so that building it needs no package
 *
 * Names and layouts are DLPack's (1.x, and the unversioned struct of before).
 */
#ifndef RAPT_PYTHON_DLPACK_ABI_H
#define RAPT_PYTHON_DLPACK_ABI_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA_HOST = 3 };                                      /* device types */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 }; /* type codes */
#define DL_READ_ONLY UINT64_C(1)                                            /* in the flags */

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides count elements; NULL: contiguous */
    uint64_t byte_offset;
} dl_tensor;

/* What a capsule "dltensor" points to. */
typedef struct dl_managed {
    dl_tensor tensor;
    void *owner;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

/* What a capsule "dltensor_versioned" points to. */
typedef struct dl_managed_versioned {
    uint32_t major, minor;
    void *owner;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* What a type's attribute __dlpack_c_exchange_api__, a capsule "dlpack_exchange_api", points to. */
typedef struct dl_exchange {
    uint32_t major, minor;
    const struct dl_exchange *previous; /* of an older version */
    void (*allocate)(void);             /* four that are not used here ... */
    void (*managed_from_object)(void);
    void (*managed_to_object)(void);
    int (*tensor_from_object)(void *object, dl_tensor *out); /* borrows from the object; -1 with a Python error set */
    void (*current_stream)(void);
} dl_exchange;

#endif
