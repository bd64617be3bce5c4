/* dlpack.h - DLPack tensors as Rapt's, and back, without a copy
 *
 * PyTorch, NumPy, JAX and CuPy hand out their arrays as DLPack tensors. The bridge is this header alone; it needs
 * <dlpack/dlpack.h>, of DLPack 0.6 or later.
 *
 *     #include <rapt/dlpack.h>
 *
 *     rapt_tensor x;                           // managed: a DLManagedTensor, from another library
 *     if (rapt_tensor_from_dlpack(&managed->dl_tensor, &x) == RAPT_OK) {
 *         ...                                  // compute with x
 *     }
 *     managed->deleter(managed);               // not before: x borrows its data
 *
 *     int64_t shape[RAPT_MAX_DIMS], strides[RAPT_MAX_DIMS];
 *     DLTensor dl;                             // borrows shape and strides from here, data from y
 *     rapt_status status = rapt_tensor_to_dlpack(&y, &dl, shape, strides);
 *
 * A failed call leaves its outputs as they were. There is no context, so there is no message; the statuses are listed
 * with each function. Neither looks at alignment or at overlap: the call that gets the tensor does. DLPack 1.0 marks a
 * managed tensor as read-only in its flags, which a DLTensor lacks: look at them before you pass one as an output.
 */
#ifndef RAPT_DLPACK_H
#define RAPT_DLPACK_H

#include <rapt/rapt.h>

#include <dlpack/dlpack.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RAPT_DLPACK_BOOL 6 /* kDLBool, which DLPack names since 0.8 */

/* A view of the tensor's data. Types: kDLFloat of 16, 32 and 64 bits, kDLBfloat of 16, kDLBool of 8. Bytes (kDLUInt)
 * are not taken for booleans; whoever knows that they are sets the type's code in a copy of the DLTensor. Devices: the
 * CPU and CUDA; pinned and managed memory are refused. NULL strides mean contiguous (row-major).
 *
 *     RAPT_ERROR_NULL       dl or tensor; shape, unless ndim is 0; data, unless there are no elements
 *     RAPT_ERROR_DTYPE      another type, or vectors of one (lanes)
 *     RAPT_ERROR_DEVICE     another device
 *     RAPT_ERROR_SHAPE      ndim outside [0, RAPT_MAX_DIMS], or a negative size
 *     RAPT_ERROR_OVERFLOW   more elements than an int64_t counts, or a byte_offset beyond the end of memory */
static inline rapt_status rapt_tensor_from_dlpack(const DLTensor *dl, rapt_tensor *tensor) {
    rapt_tensor view;
    int64_t packed = 1; /* the stride of the next dimension to the left, if memory is contiguous */
    bool empty = false;
    int i;

    if (dl == NULL || tensor == NULL) return RAPT_ERROR_NULL;
    memset(&view, 0, sizeof view);

    if (dl->dtype.lanes != 1) return RAPT_ERROR_DTYPE;
    if (dl->dtype.code == kDLFloat && dl->dtype.bits == 32) {
        view.dtype = RAPT_F32;
    } else if (dl->dtype.code == kDLFloat && dl->dtype.bits == 64) {
        view.dtype = RAPT_F64;
    } else if (dl->dtype.code == kDLFloat && dl->dtype.bits == 16) {
        view.dtype = RAPT_F16;
    } else if (dl->dtype.code == kDLBfloat && dl->dtype.bits == 16) {
        view.dtype = RAPT_BF16;
    } else if (dl->dtype.code == RAPT_DLPACK_BOOL && dl->dtype.bits == 8) {
        view.dtype = RAPT_BOOL;
    } else {
        return RAPT_ERROR_DTYPE;
    }

    if (dl->device.device_type == kDLCPU) {
        view.device = RAPT_DEVICE_CPU;
    } else if (dl->device.device_type == kDLCUDA) {
        view.device = RAPT_DEVICE_CUDA;
        view.device_id = dl->device.device_id;
    } else {
        return RAPT_ERROR_DEVICE;
    }

    if (dl->ndim < 0 || dl->ndim > RAPT_MAX_DIMS) return RAPT_ERROR_SHAPE;
    if (dl->ndim > 0 && dl->shape == NULL) return RAPT_ERROR_NULL;
    view.ndim = dl->ndim;
    for (i = 0; i < dl->ndim; i++) {
        if (dl->shape[i] < 0) return RAPT_ERROR_SHAPE;
        view.shape[i] = dl->shape[i];
        if (dl->shape[i] == 0) empty = true;
    }
    for (i = dl->ndim - 1; i >= 0; i--) {
        view.stride[i] = dl->strides != NULL ? dl->strides[i] : packed;
        if (empty) continue; /* no element is ever read through these strides, and sizes beside a 0 may be absurd */
        if (view.shape[i] > INT64_MAX / packed) return RAPT_ERROR_OVERFLOW;
        packed *= view.shape[i];
    }

    if (dl->data == NULL) {
        if (!empty) return RAPT_ERROR_NULL;
    } else {
        if (dl->byte_offset > UINTPTR_MAX - (uintptr_t)dl->data) return RAPT_ERROR_OVERFLOW;
        view.data = (void *)((uintptr_t)dl->data + (uintptr_t)dl->byte_offset);
    }
    *tensor = view;
    return RAPT_OK;
}

/* The same memory as a DLTensor. shape and strides are the caller's, of RAPT_MAX_DIMS entries each: the DLTensor points
 * to them, so they live as long as it does.
 *
 *     RAPT_ERROR_NULL     an argument; data, unless there are no elements
 *     RAPT_ERROR_DTYPE, RAPT_ERROR_DEVICE, RAPT_ERROR_SHAPE   the tensor is none */
static inline rapt_status rapt_tensor_to_dlpack(const rapt_tensor *tensor, DLTensor *dl, int64_t *shape,
                                                int64_t *strides) {
    DLTensor view;
    bool empty = false;
    int i;

    if (tensor == NULL || dl == NULL || shape == NULL || strides == NULL) return RAPT_ERROR_NULL;
    memset(&view, 0, sizeof view);

    view.dtype.lanes = 1;
    switch (tensor->dtype) {
    case RAPT_F32: view.dtype.code = kDLFloat, view.dtype.bits = 32; break;
    case RAPT_F64: view.dtype.code = kDLFloat, view.dtype.bits = 64; break;
    case RAPT_BF16: view.dtype.code = kDLBfloat, view.dtype.bits = 16; break;
    case RAPT_F16: view.dtype.code = kDLFloat, view.dtype.bits = 16; break;
    case RAPT_BOOL: view.dtype.code = RAPT_DLPACK_BOOL, view.dtype.bits = 8; break;
    default: return RAPT_ERROR_DTYPE;
    }

    switch (tensor->device) {
    case RAPT_DEVICE_CPU: view.device.device_type = kDLCPU; break;
    case RAPT_DEVICE_CUDA: view.device.device_type = kDLCUDA, view.device.device_id = tensor->device_id; break;
    default: return RAPT_ERROR_DEVICE;
    }

    if (tensor->ndim < 0 || tensor->ndim > RAPT_MAX_DIMS) return RAPT_ERROR_SHAPE;
    for (i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) return RAPT_ERROR_SHAPE;
        if (tensor->shape[i] == 0) empty = true;
    }
    if (tensor->data == NULL && !empty) return RAPT_ERROR_NULL;

    for (i = 0; i < tensor->ndim; i++) {
        shape[i] = tensor->shape[i];
        strides[i] = tensor->stride[i];
    }
    view.data = tensor->data;
    view.ndim = tensor->ndim;
    view.shape = shape;
    view.strides = strides;
    *dl = view;
    return RAPT_OK;
}

#ifdef __cplusplus
}
#endif

#endif
