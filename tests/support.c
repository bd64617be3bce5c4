/* support.c - what the tests share */
#include "support.h"

uint64_t random_bits(test_random *random) { /* splitmix64 */
    uint64_t z = random->state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

double random_unit(test_random *random) { return (double)(random_bits(random) >> 11) * 0x1p-53; }

int64_t random_between(test_random *random, int64_t low, int64_t high) {
    return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

bool random_chance(test_random *random, double probability) { return random_unit(random) < probability; }

/* ---- tensors ---- */

/* With negative strides the data pointer is not what malloc gave: a small registry knows which block belongs to it. */
typedef struct owned_block {
    void *data, *block;
} owned_block;
static owned_block *registry;
static size_t registry_count, registry_capacity;

static void *register_block(void *data, void *block) {
    if (registry_count == registry_capacity) {
        registry_capacity = registry_capacity == 0 ? 64 : 2 * registry_capacity;
        registry = realloc(registry, registry_capacity * sizeof *registry);
        assert_non_null(registry);
    }
    registry[registry_count++] = (owned_block){data, block};
    return data;
}

rapt_tensor make_tensor(rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    rapt_tensor tensor = rapt_tensor_of(NULL, dtype, ndim, shape);
    int64_t count = rapt_tensor_count(&tensor);
    assert_true(count >= 0);
    void *block = calloc((size_t)count + 1, rapt_dtype_size(dtype));
    assert_non_null(block);
    tensor.data = register_block(block, block);
    return tensor;
}

rapt_tensor make_strided_tensor(test_random *random, rapt_dtype dtype, int32_t ndim, const int64_t *shape) {
    int32_t order[RAPT_MAX_DIMS];
    for (int32_t d = 0; d < ndim; d++) order[d] = d;
    for (int32_t d = ndim - 1; d > 0; d--) {
        int32_t other = (int32_t)random_between(random, 0, d), kept = order[d];
        order[d] = order[other];
        order[other] = kept;
    }
    int64_t stride[RAPT_MAX_DIMS] = {0}, next = random_chance(random, 0.5) ? 1 : random_between(random, 1, 3),
            lowest = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        int32_t dim = order[d];
        bool negative = random_chance(random, 0.2);
        stride[dim] = negative ? -next : next;
        if (negative && shape[dim] > 0) lowest += next * (shape[dim] - 1);
        next *= shape[dim] > 0 ? shape[dim] : 1;
        if (random_chance(random, 0.3)) next += random_between(random, 0, 5);
    }
    char *block = calloc((size_t)next + 1, rapt_dtype_size(dtype));
    assert_non_null(block);
    char *data = block + lowest * (int64_t)rapt_dtype_size(dtype);
    return rapt_tensor_strided(register_block(data, block), dtype, ndim, shape, stride);
}

void free_tensor(rapt_tensor *tensor) {
    for (size_t i = registry_count; tensor->data != NULL && i-- > 0;) {
        if (registry[i].data != tensor->data) continue;
        free(registry[i].block);
        registry[i] = registry[--registry_count];
        break;
    }
    if (registry_count == 0) { /* so that leak checkers see nothing left */
        free(registry);
        registry = NULL;
        registry_capacity = 0;
    }
    *tensor = (rapt_tensor){0};
}

static int64_t element_offset(const rapt_tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        offset += index % tensor->shape[d] * tensor->stride[d];
        index /= tensor->shape[d];
    }
    return offset;
}

/* The library's own conversions, which test_tensor.c checks, through one-element copies would be slow: these are
 * independent and simple. */
static float f32_of_f16(uint16_t bits) {
    int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)mantissa, -24);
    return sign * ldexpf((float)(mantissa + 1024), exponent - 25);
}

double get_element(const rapt_tensor *tensor, int64_t index) {
    int64_t at = element_offset(tensor, index);
    switch (tensor->dtype) {
    case RAPT_F32: return (double)((const float *)tensor->data)[at];
    case RAPT_F64: return ((const double *)tensor->data)[at];
    case RAPT_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)tensor->data)[at] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    case RAPT_F16: return (double)f32_of_f16(((const uint16_t *)tensor->data)[at]);
    case RAPT_BOOL: return ((const uint8_t *)tensor->data)[at];
    }
    return NAN;
}

void set_element(const rapt_tensor *tensor, int64_t index, double value) {
    int64_t at = element_offset(tensor, index);
    switch (tensor->dtype) {
    case RAPT_F32: ((float *)tensor->data)[at] = (float)value; return;
    case RAPT_F64: ((double *)tensor->data)[at] = value; return;
    case RAPT_BOOL: ((uint8_t *)tensor->data)[at] = value != 0; return;
    case RAPT_BF16: { /* truncated: tests only need some bf16 near the value */
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof bits);
        ((uint16_t *)tensor->data)[at] = (uint16_t)(isnan(value) ? 0x7fc0 : bits >> 16);
        return;
    }
    case RAPT_F16: { /* likewise; below the smallest normal number it becomes 0 */
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof bits);
        int exponent = (int)((bits >> 23) & 255) - 112;
        uint32_t sign = (bits >> 16) & 0x8000;
        uint32_t half = exponent <= 0 ? 0 : exponent >= 31 ? 0x7c00 : (uint32_t)exponent << 10 | ((bits >> 13) & 1023);
        ((uint16_t *)tensor->data)[at] = (uint16_t)(isnan(value) ? 0x7e00 : (sign | half));
        return;
    }
    }
}

rapt_tensor convert_tensor(const rapt_tensor *tensor, rapt_dtype dtype) {
    rapt_tensor result = make_tensor(dtype, tensor->ndim, tensor->shape);
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) set_element(&result, i, get_element(tensor, i));
    return result;
}

void fill_random(test_random *random, const rapt_tensor *tensor, double magnitude) {
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) set_element(tensor, i, magnitude * (2 * random_unit(random) - 1));
}

void fill_value(const rapt_tensor *tensor, double value) {
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) set_element(tensor, i, value);
}

/* ---- comparing ---- */

double largest_magnitude(const rapt_tensor *tensor) {
    double largest = 0;
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) {
        double value = fabs(get_element(tensor, i));
        if (isfinite(value) && value > largest) largest = value;
    }
    return largest;
}

double largest_difference(const rapt_tensor *a, const rapt_tensor *b) {
    double largest = 0;
    int64_t count = rapt_tensor_count(a);
    assert_int_equal(count, rapt_tensor_count(b));
    for (int64_t i = 0; i < count; i++) {
        double x = get_element(a, i), y = get_element(b, i);
        if ((isnan(x) && isnan(y)) || x == y) continue;
        double difference = fabs(x - y);
        if (!isfinite(difference)) return INFINITY;
        if (difference > largest) largest = difference;
    }
    return largest;
}

static uint64_t element_bits(const rapt_tensor *tensor, int64_t index) {
    double value = get_element(tensor, index);
    if (isnan(value)) return 0x7ff8000000000000ULL;
    uint64_t bits = 0;
    size_t size = rapt_dtype_size(tensor->dtype);
    memcpy(&bits, (const char *)tensor->data + element_offset(tensor, index) * (int64_t)size, size);
    return bits;
}

bool same_bits(const rapt_tensor *a, const rapt_tensor *b) {
    int64_t count = rapt_tensor_count(a);
    if (count != rapt_tensor_count(b) || a->dtype != b->dtype) return false;
    for (int64_t i = 0; i < count; i++) {
        if (element_bits(a, i) != element_bits(b, i)) return false;
    }
    return true;
}

uint64_t checksum(uint64_t start, const rapt_tensor *tensor) { /* FNV-1a over the bits of each element */
    uint64_t hash = start == 0 ? 0xcbf29ce484222325ULL : start;
    int64_t count = rapt_tensor_count(tensor);
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = element_bits(tensor, i);
        for (int byte = 0; byte < 8; byte++) hash = (hash ^ ((bits >> (8 * byte)) & 255)) * 0x100000001b3ULL;
    }
    return hash;
}

/* ---- contexts ---- */

rapt_context *make_context(int32_t threads, rapt_isa isa, rapt_backend backend) {
    char text[512] = "";
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = threads;
    config.isa = isa;
    config.backend = backend;
    config.error_text = text;
    config.error_text_size = sizeof text;
    rapt_context *context = NULL;
    if (rapt_context_create(&config, &context) != RAPT_OK) fail_msg("rapt_context_create: %s", text);
    return context;
}

void assert_ok(rapt_context *context, rapt_status status) {
    if (status != RAPT_OK) fail_msg("%s: %s", rapt_status_name(status), rapt_error_message(context));
}

bool test_is_quick(void) {
    const char *text = getenv("RAPT_TEST_QUICK");
    return text != NULL && *text != '\0' && *text != '0';
}

void skip_without_forced_isa(void) {
    const char *wanted = getenv("RAPT_ISA");
    if (wanted == NULL || *wanted == '\0') return;
    for (int isa = RAPT_ISA_BASELINE; isa <= RAPT_ISA_NEON; isa++) {
        if (strcmp(rapt_isa_name((rapt_isa)isa), wanted) == 0 && rapt_isa_available((rapt_isa)isa)) return;
    }
    printf("skipped: this build or CPU has no %s\n", wanted);
    exit(77);
}
