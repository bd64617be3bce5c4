/* checkpoint_support.c - what the tests of checkpoints share */
#include "checkpoint_support.h"

#include <dirent.h>
#include <unistd.h>

/* ---- files ---- */

char folder[] = "/tmp/rapt-checkpoint-XXXXXX";

int make_folder(void **state) {
    make_cpu_context(state);
    return mkdtemp(folder) == NULL ? -1 : 0;
}

static int walk_folder(bool remove) {
    int files = 0;
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        files++;
        if (remove) assert_int_equal(unlink(in_folder(entry->d_name)), 0);
    }
    closedir(directory);
    return files;
}

int files_in_folder(void) { return walk_folder(false); }

int remove_folder(void **state) {
    walk_folder(true);
    destroy_shared_context(state);
    return rmdir(folder);
}

const char *in_folder(const char *name) {
    static char paths[4][PATH_SIZE];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, PATH_SIZE, "%s/%s", folder, name);
    return path;
}

void write_bytes(const char *path, const void *bytes, size_t size) {
    FILE *stream = fopen(path, "wb");
    assert_non_null(stream);
    assert_int_equal(fwrite(bytes, 1, size, stream), size);
    assert_int_equal(fclose(stream), 0);
}

void *read_bytes(const char *path, size_t *size) {
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) fail_msg("cannot read %s", path);
    assert_int_equal(fseek(stream, 0, SEEK_END), 0);
    long length = ftell(stream);
    assert_true(length >= 0);
    rewind(stream);
    char *bytes = malloc((size_t)length + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)length, stream), length);
    fclose(stream);
    *size = (size_t)length;
    return bytes;
}

/* ---- checkpoints ---- */

rapt_checkpoint *open_checkpoint(const char *path) {
    rapt_checkpoint *checkpoint;
    assert_ok(context, rapt_checkpoint_open(context, path, &checkpoint));
    return checkpoint;
}

rapt_checkpoint *save_and_open(const rapt_mha *layer, const rapt_save_options *options) {
    const char *path = in_folder("layer.safetensors");
    assert_ok(context, rapt_mha_save(context, layer, path, options));
    return open_checkpoint(path);
}

rapt_layer_info layer_info(const rapt_checkpoint *checkpoint, int64_t index) {
    rapt_layer_info info;
    assert_ok(context, rapt_checkpoint_layer(context, checkpoint, index, &info));
    return info;
}

void write_specs(const char *path, const spec *specs, const char *key, const char *metadata) {
    const char *names[MAX_TENSORS] = {0};
    rapt_tensor tensors[MAX_TENSORS] = {{0}};
    int64_t count = 0;
    test_random random = {5};
    for (; specs[count].name != NULL; count++) {
        assert_true(count < MAX_TENSORS);
        const spec *s = &specs[count];
        int32_t ndim = 0;
        while (ndim < 4 && s->shape[ndim] > 0) ndim++;
        names[count] = s->name;
        tensors[count] = make_tensor(s->dtype == 0 ? RAPT_F32 : s->dtype, ndim, s->shape);
        fill_random(&random, &tensors[count], 1);
    }
    const char *const pairs[1][2] = {{key, metadata}};
    assert_ok(context, rapt_safetensors_save(context, path, count, names, tensors, metadata == NULL ? 0 : 1, pairs));
    for (int64_t i = 0; i < count; i++) free_tensor(&tensors[i]);
}

/* ---- comparing ---- */

void assert_message(const char *fragment) {
    if (strstr(rapt_error_message(context), fragment) == NULL)
        fail_msg("expected \"%s\" in the message \"%s\"", fragment, rapt_error_message(context));
}

void assert_same_settings(const rapt_mha *a, const rapt_mha *b) {
    const rapt_mha_config *x = rapt_mha_settings(a), *y = rapt_mha_settings(b);
    assert_int_equal(x->embed_dim, y->embed_dim);
    assert_int_equal(x->num_heads, y->num_heads);
    assert_int_equal(x->num_kv_heads, y->num_kv_heads);
    assert_int_equal(x->head_dim, y->head_dim);
    assert_int_equal(x->kdim, y->kdim);
    assert_int_equal(x->vdim, y->vdim);
    assert_int_equal(x->bias, y->bias);
    assert_int_equal(x->add_bias_kv, y->add_bias_kv);
    assert_int_equal(x->add_zero_attn, y->add_zero_attn);
    assert_int_equal(x->batch_first, y->batch_first);
    assert_int_equal(x->causal, y->causal);
    assert_int_equal(x->set_scale, y->set_scale);
    assert_true(x->scale == y->scale && x->dropout == y->dropout);
    assert_int_equal(x->dtype, y->dtype);
}

void assert_same_forward(const rapt_mha *a, const rapt_mha *b) {
    inputs x = make_inputs(a, 2, 5, 5);
    rapt_options options = {.mode = RAPT_MODE_EVAL};
    assert_same_and_free(forward(a, &x.query, &x.key, &x.value, &options),
                         forward(b, &x.query, &x.key, &x.value, &options));
    free_inputs(&x);
}

uint64_t sum_layer(const rapt_mha *layer) {
    uint64_t sum = rapt_mha_version(layer);
    for (int32_t i = 0; i < rapt_mha_num_tensors(layer); i++) {
        rapt_tensor view;
        assert_ok(context, rapt_mha_tensor_at(context, layer, i, NULL, &view));
        sum = checksum(sum, &view);
    }
    return sum;
}

/* ---- memory ---- */

static void *counting_allocate(void *user, size_t size, size_t alignment) {
    counting_memory *memory = user;
    if (++memory->calls == memory->refuse_at) return NULL;
    void *pointer = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    assert_non_null(pointer);
    memory->live++;
    memory->bytes += (int64_t)size;
    return pointer;
}

static void counting_release(void *user, void *pointer, size_t size) {
    counting_memory *memory = user;
    memory->live--;
    memory->bytes -= (int64_t)size;
    free(pointer);
}

rapt_context *make_counting_context(counting_memory *memory) {
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = 1;
    config.allocator = (rapt_allocator){.user = memory, .allocate = counting_allocate, .release = counting_release};
    rapt_context *counting;
    assert_int_equal(rapt_context_create(&config, &counting), RAPT_OK);
    return counting;
}
