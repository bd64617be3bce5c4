/* test_dlpack.c - the bridge to DLPack, both ways */
#include <rapt/dlpack.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static int64_t test_shape[RAPT_MAX_DIMS + 1] = {2, 3, 4, 1, 1, 1, 1, 1, 1};
static int64_t test_strides[RAPT_MAX_DIMS + 1] = {1, -8, 0, 5, 6, 7, 8, 9, 10};
static double memory[64];

/* A sound f32 [2, 3, 4] on the CPU. Each test of a refusal breaks one thing in it. */
static DLTensor sound(void) {
    DLTensor dl;
    memset(&dl, 0, sizeof dl);
    dl.data = memory;
    dl.device.device_type = kDLCPU;
    dl.dtype.code = kDLFloat;
    dl.dtype.bits = 32;
    dl.dtype.lanes = 1;
    dl.ndim = 3;
    dl.shape = test_shape;
    return dl;
}

static void assert_refused(const DLTensor *dl, rapt_status expected) {
    rapt_tensor tensor, before;
    memset(&tensor, 0x5a, sizeof tensor);
    memset(&before, 0x5a, sizeof before);
    assert_int_equal(rapt_tensor_from_dlpack(dl, &tensor), expected);
    assert_memory_equal(&tensor, &before, sizeof tensor);
}

static void assert_taken(const DLTensor *dl, rapt_tensor *tensor) {
    memset(tensor, 0x5a, sizeof *tensor);
    assert_int_equal(rapt_tensor_from_dlpack(dl, tensor), RAPT_OK);
}

static void test_from_contiguous(void **state) {
    (void)state;
    DLTensor dl = sound();
    rapt_tensor tensor;
    assert_taken(&dl, &tensor);
    assert_ptr_equal(tensor.data, memory);
    assert_int_equal(tensor.dtype, RAPT_F32);
    assert_int_equal(tensor.device, RAPT_DEVICE_CPU);
    assert_int_equal(tensor.ndim, 3);
    const int64_t shape[3] = {2, 3, 4}, stride[3] = {12, 4, 1};
    assert_memory_equal(tensor.shape, shape, sizeof shape);
    assert_memory_equal(tensor.stride, stride, sizeof stride);
}

static void test_from_strided(void **state) {
    (void)state;
    DLTensor dl = sound();
    dl.strides = test_strides; /* one of them negative, one a broadcast */
    dl.byte_offset = 64;
    rapt_tensor tensor;
    assert_taken(&dl, &tensor);
    assert_ptr_equal(tensor.data, memory + 8);
    assert_memory_equal(tensor.shape, test_shape, 3 * sizeof *test_shape);
    assert_memory_equal(tensor.stride, test_strides, 3 * sizeof *test_strides);
}

static void test_from_ranks(void **state) {
    (void)state;
    DLTensor dl = sound();
    rapt_tensor tensor;
    dl.ndim = 0; /* a scalar has one element and needs neither shape nor strides */
    dl.shape = NULL;
    assert_taken(&dl, &tensor);
    assert_int_equal(tensor.ndim, 0);
    assert_ptr_equal(tensor.data, memory);
    dl = sound();
    dl.ndim = RAPT_MAX_DIMS;
    assert_taken(&dl, &tensor);
    assert_int_equal(tensor.ndim, RAPT_MAX_DIMS);
    assert_int_equal(tensor.stride[0], 12);
    assert_int_equal(tensor.stride[7], 1);
}

static void test_from_empty(void **state) {
    (void)state;
    int64_t shape[3] = {2, 0, 4};
    DLTensor dl = sound();
    rapt_tensor tensor;
    dl.shape = shape;
    assert_taken(&dl, &tensor);
    assert_ptr_equal(tensor.data, memory);
    dl.data = NULL; /* as DLPack wants it */
    dl.byte_offset = 8;
    assert_taken(&dl, &tensor);
    assert_null(tensor.data);
    assert_int_equal(tensor.shape[1], 0);
    assert_int_equal(tensor.shape[2], 4);
    assert_int_equal(tensor.stride[2], 1);
    shape[0] = shape[2] = INT64_MAX; /* still no elements */
    assert_taken(&dl, &tensor);
}

static void test_from_types(void **state) {
    (void)state;
    static const struct {
        int code, bits;
        rapt_dtype dtype;
    } types[] = {{kDLFloat, 32, RAPT_F32},
                 {kDLFloat, 64, RAPT_F64},
                 {kDLFloat, 16, RAPT_F16},
                 {kDLBfloat, 16, RAPT_BF16},
                 {6, 8, RAPT_BOOL}};
    /* Every code and every width: the five above are taken, all others refused. */
    for (int code = 0; code < 256; code++) {
        for (int bits = 0; bits < 256; bits++) {
            DLTensor dl = sound();
            dl.dtype.code = (uint8_t)code;
            dl.dtype.bits = (uint8_t)bits;
            const size_t count = sizeof types / sizeof *types;
            size_t found = 0;
            while (found < count && (types[found].code != code || types[found].bits != bits)) found++;
            if (found == count) {
                assert_refused(&dl, RAPT_ERROR_DTYPE);
                continue;
            }
            rapt_tensor tensor;
            assert_taken(&dl, &tensor);
            assert_int_equal(tensor.dtype, types[found].dtype);
            dl.dtype.lanes = 4;
            assert_refused(&dl, RAPT_ERROR_DTYPE);
            dl.dtype.lanes = 0;
            assert_refused(&dl, RAPT_ERROR_DTYPE);
        }
    }
}

static void test_from_devices(void **state) {
    (void)state;
    DLTensor dl = sound();
    rapt_tensor tensor;
    dl.device.device_type = kDLCUDA;
    assert_taken(&dl, &tensor);
    assert_int_equal(tensor.device, RAPT_DEVICE_CUDA);
    dl.device.device_id = 3;
    assert_taken(&dl, &tensor);
    assert_int_equal(tensor.device_id, 3);
    dl.device.device_type = kDLCPU; /* which has no number */
    assert_taken(&dl, &tensor);
    assert_int_equal(tensor.device, RAPT_DEVICE_CPU);
    assert_int_equal(tensor.device_id, 0);
    static const DLDeviceType refused[] = {kDLCUDAHost, kDLOpenCL,   kDLVulkan, kDLMetal,      kDLVPI,
                                           kDLROCM,     kDLROCMHost, kDLExtDev, kDLCUDAManaged};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        dl = sound();
        dl.device.device_type = refused[i];
        assert_refused(&dl, RAPT_ERROR_DEVICE);
    }
}

static void test_from_refusals(void **state) {
    (void)state;
    assert_refused(NULL, RAPT_ERROR_NULL);
    DLTensor dl = sound();
    assert_int_equal(rapt_tensor_from_dlpack(&dl, NULL), RAPT_ERROR_NULL);
    dl.data = NULL;
    assert_refused(&dl, RAPT_ERROR_NULL);
    dl.ndim = 0; /* a scalar is not empty */
    assert_refused(&dl, RAPT_ERROR_NULL);
    dl = sound();
    dl.shape = NULL;
    assert_refused(&dl, RAPT_ERROR_NULL);

    dl = sound();
    dl.ndim = -1;
    assert_refused(&dl, RAPT_ERROR_SHAPE);
    dl.ndim = RAPT_MAX_DIMS + 1;
    assert_refused(&dl, RAPT_ERROR_SHAPE);
    int64_t shape[3] = {2, -3, 4};
    dl = sound();
    dl.shape = shape;
    assert_refused(&dl, RAPT_ERROR_SHAPE);

    shape[0] = 4, shape[1] = INT64_C(1) << 31, shape[2] = INT64_C(1) << 30; /* 2^63 elements */
    assert_refused(&dl, RAPT_ERROR_OVERFLOW);
    dl.strides = test_strides;
    assert_refused(&dl, RAPT_ERROR_OVERFLOW);
    shape[0] = INT64_MAX, shape[1] = 1, shape[2] = 1;
    rapt_tensor tensor;
    assert_taken(&dl, &tensor);

    dl = sound();
    dl.byte_offset = UINT64_MAX;
    assert_refused(&dl, RAPT_ERROR_OVERFLOW);
    dl.byte_offset = UINTPTR_MAX - (uintptr_t)memory + 1;
    assert_refused(&dl, RAPT_ERROR_OVERFLOW);
}

/* A sound view with every field of its own value. */
static rapt_tensor sound_tensor(void) {
    rapt_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = memory + 2;
    tensor.dtype = RAPT_F64;
    tensor.ndim = 3;
    memcpy(tensor.shape, test_shape, 3 * sizeof *test_shape);
    memcpy(tensor.stride, test_strides, 3 * sizeof *test_strides);
    return tensor;
}

static void test_round_trip(void **state) {
    (void)state;
    for (int dtype = RAPT_F32; dtype <= RAPT_BOOL; dtype++) {
        for (int device = RAPT_DEVICE_CPU; device <= RAPT_DEVICE_CUDA; device++) {
            for (int32_t ndim = 0; ndim <= RAPT_MAX_DIMS; ndim++) {
                rapt_tensor tensor = sound_tensor(), back;
                tensor.dtype = (rapt_dtype)dtype;
                tensor.device = (rapt_device)device;
                tensor.ndim = ndim;
                for (int32_t i = 0; i < RAPT_MAX_DIMS; i++) {
                    tensor.shape[i] = i < ndim ? test_shape[i] : 0;
                    tensor.stride[i] = i < ndim ? test_strides[i] : 0;
                }
                tensor.device_id = device == RAPT_DEVICE_CPU ? 0 : 2;
                int64_t shape[RAPT_MAX_DIMS], strides[RAPT_MAX_DIMS];
                DLTensor dl;
                memset(&dl, 0x5a, sizeof dl);
                assert_int_equal(rapt_tensor_to_dlpack(&tensor, &dl, shape, strides), RAPT_OK);
                assert_ptr_equal(dl.data, tensor.data);
                assert_int_equal(dl.device.device_type, device == RAPT_DEVICE_CPU ? kDLCPU : kDLCUDA);
                assert_int_equal(dl.device.device_id, device == RAPT_DEVICE_CPU ? 0 : 2);
                assert_int_equal(dl.ndim, ndim);
                assert_int_equal(dl.dtype.lanes, 1);
                assert_ptr_equal(dl.shape, shape);
                assert_ptr_equal(dl.strides, strides);
                assert_int_equal(dl.byte_offset, 0);
                assert_taken(&dl, &back);
                assert_ptr_equal(back.data, tensor.data);
                assert_int_equal(back.dtype, tensor.dtype);
                assert_int_equal(back.device, tensor.device);
                assert_int_equal(back.ndim, tensor.ndim);
                assert_memory_equal(back.shape, tensor.shape, sizeof tensor.shape);
                assert_memory_equal(back.stride, tensor.stride, sizeof tensor.stride);
            }
        }
    }
}

static void assert_not_written(const rapt_tensor *tensor, rapt_status expected) {
    int64_t shape[RAPT_MAX_DIMS], strides[RAPT_MAX_DIMS], before[RAPT_MAX_DIMS];
    DLTensor dl, dl_before;
    memset(&dl, 0x5a, sizeof dl);
    memset(&dl_before, 0x5a, sizeof dl_before);
    memset(shape, 0x5a, sizeof shape);
    memset(strides, 0x5a, sizeof strides);
    memset(before, 0x5a, sizeof before);
    assert_int_equal(rapt_tensor_to_dlpack(tensor, &dl, shape, strides), expected);
    assert_memory_equal(&dl, &dl_before, sizeof dl);
    assert_memory_equal(shape, before, sizeof shape);
    assert_memory_equal(strides, before, sizeof strides);
}

static void test_to_refusals(void **state) {
    (void)state;
    int64_t shape[RAPT_MAX_DIMS], strides[RAPT_MAX_DIMS];
    DLTensor dl;
    rapt_tensor tensor = sound_tensor();
    assert_not_written(NULL, RAPT_ERROR_NULL);
    assert_int_equal(rapt_tensor_to_dlpack(&tensor, NULL, shape, strides), RAPT_ERROR_NULL);
    assert_int_equal(rapt_tensor_to_dlpack(&tensor, &dl, NULL, strides), RAPT_ERROR_NULL);
    assert_int_equal(rapt_tensor_to_dlpack(&tensor, &dl, shape, NULL), RAPT_ERROR_NULL);
    tensor.data = NULL;
    assert_not_written(&tensor, RAPT_ERROR_NULL);
    tensor.shape[2] = 0;
    assert_int_equal(rapt_tensor_to_dlpack(&tensor, &dl, shape, strides), RAPT_OK);
    assert_null(dl.data);
    tensor = sound_tensor();
    tensor.dtype = (rapt_dtype)0;
    assert_not_written(&tensor, RAPT_ERROR_DTYPE);
    tensor.dtype = (rapt_dtype)6;
    assert_not_written(&tensor, RAPT_ERROR_DTYPE);
    tensor = sound_tensor();
    tensor.device = (rapt_device)2;
    assert_not_written(&tensor, RAPT_ERROR_DEVICE);
    tensor = sound_tensor();
    tensor.ndim = -1;
    assert_not_written(&tensor, RAPT_ERROR_SHAPE);
    tensor.ndim = RAPT_MAX_DIMS + 1;
    assert_not_written(&tensor, RAPT_ERROR_SHAPE);
    tensor = sound_tensor();
    tensor.shape[2] = -1;
    assert_not_written(&tensor, RAPT_ERROR_SHAPE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_contiguous), cmocka_unit_test(test_from_strided),
        cmocka_unit_test(test_from_ranks),      cmocka_unit_test(test_from_empty),
        cmocka_unit_test(test_from_types),      cmocka_unit_test(test_from_devices),
        cmocka_unit_test(test_from_refusals),   cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_to_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
