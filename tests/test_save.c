/* test_save.c - writing safetensors files: what is in them, and that a path has the old file or the new one, whole, at
 * every moment: while the writer is killed, on a full disk, and beyond a limit on the size of files */
#define _GNU_SOURCE /* unshare */
#include "checkpoint_support.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>
#endif

/* ---- what is written ---- */

enum { TENSORS = 9 };

/* Any dtype, rank, strides and name comes back, in the order given, aligned. */
static void test_any_tensors(void **state) {
    (void)state;
    static const char *const names[TENSORS] = {
        "flags",   "a.b", "quote\"back\\slash", "tab\tand\x01\x1f", "\xc3\xa9\xf0\x9f\x99\x82", "scalar",
        "nothing", "",    "broadcast"};
    const rapt_dtype dtypes[TENSORS] = {RAPT_BOOL, RAPT_BF16, RAPT_F64,  RAPT_F16, RAPT_F32,
                                        RAPT_F32,  RAPT_F64,  RAPT_BOOL, RAPT_BF16};
    test_random random = {3};
    rapt_tensor tensors[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        int64_t shape[3] = {3, 1 + i, 5};
        if (i == 6) shape[1] = 0;
        tensors[i] = i == 5 ? make_tensor(dtypes[i], 0, shape) : make_strided_tensor(&random, dtypes[i], 3, shape);
        fill_random(&random, &tensors[i], 2);
    }
    rapt_tensor whole = tensors[8];
    tensors[8].stride[1] = 0;
    const char *const metadata[][2] = {{"k\n", "v\"\\"}, {"", ""}, {"\xe2\x82\xac", "\x7f"}};
    assert_ok(context,
              rapt_safetensors_save(context, in_folder("any.safetensors"), TENSORS, names, tensors, 3, metadata));
    rapt_safetensors *file;
    assert_ok(context, rapt_safetensors_open(context, in_folder("any.safetensors"), &file));
    assert_int_equal(rapt_safetensors_count(file), TENSORS);
    for (int i = 0; i < TENSORS; i++) {
        rapt_tensor view;
        assert_string_equal(rapt_safetensors_name(file, i), names[i]);
        assert_ok(context, rapt_safetensors_find(context, file, names[i], &view));
        assert_int_equal(view.ndim, tensors[i].ndim);
        for (int32_t d = 0; d < view.ndim; d++) assert_int_equal(view.shape[d], tensors[i].shape[d]);
        assert_true(same_bits(&view, &tensors[i]));
    }
    for (int i = 0; i < 3; i++) assert_string_equal(rapt_safetensors_metadata(file, metadata[i][0]), metadata[i][1]);
    rapt_safetensors_close(file);
    tensors[8] = whole;
    for (int i = 0; i < TENSORS; i++) free_tensor(&tensors[i]);
}

static void test_empty_files(void **state) {
    (void)state;
    const char *const metadata[][2] = {{"k", "v"}};
    for (int64_t pairs = 0; pairs < 2; pairs++) {
        rapt_safetensors *file;
        assert_ok(context,
                  rapt_safetensors_save(context, in_folder("any.safetensors"), 0, NULL, NULL, pairs, metadata));
        assert_ok(context, rapt_safetensors_open(context, in_folder("any.safetensors"), &file));
        assert_int_equal(rapt_safetensors_count(file), 0);
        assert_int_equal(rapt_safetensors_metadata(file, "k") != NULL, pairs == 1);
        rapt_safetensors_close(file);
    }
}

/* Larger than the buffer, in every way that a tensor goes to the file. */
static void test_large_tensors(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(300, 3);
    rapt_mha *layer = create_random(&config), *loaded;
    for (int scheme = 1; scheme <= 9; scheme++) {
        rapt_save_options options = rapt_save_options_default();
        options.scheme = (rapt_scheme)scheme;
        rapt_checkpoint *checkpoint = save_and_open(layer, &options);
        assert_ok(context, rapt_mha_load(context, checkpoint, NULL, &loaded));
        rapt_tensor a = parameter(layer, "in_proj_weight"), b = parameter(loaded, "in_proj_weight");
        assert_true(same_bits(&a, &b));
        a = parameter(layer, "out_proj.weight"), b = parameter(loaded, "out_proj.weight");
        assert_true(same_bits(&a, &b));
        rapt_mha_destroy(loaded);
        rapt_checkpoint_close(checkpoint);
    }
    rapt_mha_destroy(layer);
}

/* ---- refusals ---- */

static void refuse(rapt_status status, rapt_status expected, const char *text) {
    assert_int_equal(status, expected);
    assert_message(text);
    assert_int_equal(files_in_folder(), 0);
}

static void test_refusals(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(4, 2);
    rapt_mha *layer = create(&config);
    rapt_tensor x = parameter(layer, "out_proj.weight"), two[2] = {x, x};
    const char *const pairs[][2] = {{"k", "v"}, {"k", "w"}, {"\xff", "v"}, {"k", "\xff"}, {NULL, "v"}, {"k", NULL}};
    const char *path = in_folder("no.safetensors");
    const char *const a = "a", *const metadata = "__metadata__", *const bad = "\xc3", *const none = NULL;
#define SAVE(count, names, tensors, pairs_count, pairs)                                                                \
    rapt_safetensors_save(context, path, count, names, tensors, pairs_count, pairs)
    refuse(rapt_safetensors_save(context, NULL, 1, &a, &x, 0, NULL), RAPT_ERROR_NULL, "path is NULL");
    refuse(SAVE(1, NULL, &x, 0, NULL), RAPT_ERROR_NULL, "names is NULL");
    refuse(SAVE(1, &a, NULL, 0, NULL), RAPT_ERROR_NULL, "tensors is NULL");
    refuse(SAVE(1, &a, &x, 1, NULL), RAPT_ERROR_NULL, "metadata is NULL");
    refuse(SAVE(1, &none, &x, 0, NULL), RAPT_ERROR_NULL, "names[0] is NULL");
    refuse(SAVE(-1, &a, &x, 0, NULL), RAPT_ERROR_ARGUMENT, "count is -1, expected 0 or more");
    refuse(SAVE(1, &a, &x, -2, NULL), RAPT_ERROR_ARGUMENT, "pairs is -2, expected 0 or more");
    refuse(SAVE(1, &bad, &x, 0, NULL), RAPT_ERROR_ARGUMENT, "names[0] is not valid UTF-8");
    refuse(SAVE(1, &metadata, &x, 0, NULL), RAPT_ERROR_ARGUMENT, "names[0] is __metadata__");
    refuse(SAVE(2, ((const char *const[]){"a", "a"}), two, 0, NULL), RAPT_ERROR_ARGUMENT, "names has 'a' twice");
    refuse(SAVE(1, &a, &x, 2, pairs), RAPT_ERROR_ARGUMENT, "metadata has 'k' twice");
    refuse(SAVE(1, &a, &x, 1, pairs + 2), RAPT_ERROR_ARGUMENT, "metadata[0] is not valid UTF-8");
    refuse(SAVE(1, &a, &x, 1, pairs + 3), RAPT_ERROR_ARGUMENT, "metadata[0] is not valid UTF-8");
    refuse(SAVE(1, &a, &x, 1, pairs + 4), RAPT_ERROR_NULL, "metadata[0] is NULL");
    refuse(SAVE(1, &a, &x, 1, pairs + 5), RAPT_ERROR_NULL, "metadata[0] is NULL");
    two[1].data = NULL;
    refuse(SAVE(2, ((const char *const[]){"a", "b"}), two, 0, NULL), RAPT_ERROR_NULL, "tensors[1] with shape [4, 4]");
    two[1].dtype = (rapt_dtype)77;
    refuse(SAVE(2, ((const char *const[]){"a", "b"}), two, 0, NULL), RAPT_ERROR_DTYPE, "tensors[1] has dtype 77");
    for (int i = 0; i < 2; i++) { /* one element for all, but a file that no int64 counts */
        int64_t shape[2] = {(int64_t)1 << 31, (int64_t)1 << 28}, stride[2] = {0, 0};
        two[i] = rapt_tensor_strided(x.data, RAPT_F64, 2, shape, stride);
    }
    rapt_tensor three[4] = {two[0], two[0], two[0], two[0]};
    refuse(SAVE(4, ((const char *const[]){"a", "b", "c", "d"}), three, 0, NULL), RAPT_ERROR_OVERFLOW,
           "overflows an int64");
#undef SAVE

    rapt_save_options o = rapt_save_options_default();
    refuse(rapt_mha_save(context, NULL, path, NULL), RAPT_ERROR_NULL, "layer is NULL");
    refuse(rapt_mha_save(context, layer, NULL, NULL), RAPT_ERROR_NULL, "path is NULL");
    o.prefix = "layer";
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_ARGUMENT,
           "prefix is 'layer', expected one that ends in");
    o.prefix = "\xff.";
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_ARGUMENT, "prefix is not valid UTF-8");
    o = rapt_save_options_default();
    o.scheme = (rapt_scheme)-1;
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_ARGUMENT, "scheme is -1, which is no rapt_scheme");
    o = rapt_save_options_default();
    o.set_dtype = true;
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_DTYPE, "dtype is unknown (0), expected f32");
    o.dtype = RAPT_BOOL;
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_DTYPE, "dtype is bool (5), expected f32");
    o.struct_size = 1;
    refuse(rapt_mha_save(context, layer, path, &o), RAPT_ERROR_ARGUMENT, "(start from rapt_save_options_default())");

    refuse(rapt_mha_save(context, layer, in_folder("none/x.safetensors"), NULL), RAPT_ERROR_FILE, "none/x.safetensors");
    refuse(rapt_mha_save(context, layer, folder, NULL), RAPT_ERROR_FILE, "is a directory");
    refuse(rapt_mha_save(context, layer, "", NULL), RAPT_ERROR_FILE, "cannot write ''");
    char *longest = malloc(9000);
    assert_non_null(longest);
    memset(longest, 'x', 8999);
    longest[8999] = '\0';
    refuse(rapt_mha_save(context, layer, longest, NULL), RAPT_ERROR_FILE, "File name too long");
    refuse(rapt_mha_save(context, layer, longest + 9000 - 300, NULL), RAPT_ERROR_FILE, "File name too long");
    free(longest);
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    assert_int_equal(rapt_mha_save(context, layer, in_folder("pipe"), NULL), RAPT_ERROR_FILE);
    assert_message("is not a regular file");
    struct stat info;
    assert_int_equal(stat(in_folder("pipe"), &info), 0);
    assert_true(S_ISFIFO(info.st_mode));
    assert_int_equal(unlink(in_folder("pipe")), 0);
    rapt_mha_destroy(layer);
}

/* ---- links and modes ---- */

static mode_t mode_of(const char *path) {
    struct stat info;
    assert_int_equal(lstat(path, &info), 0);
    return info.st_mode;
}

static void test_links_and_modes(void **state) {
    (void)state;
    rapt_mha_config config = rapt_mha_config_default(4, 2);
    rapt_mha *layer = create(&config);
    const char *target = in_folder("target.safetensors"), *link = in_folder("link.safetensors");
    mode_t mask = umask(027);
    assert_ok(context, rapt_mha_save(context, layer, target, NULL));
    umask(mask);
    assert_int_equal(mode_of(target) & 0777, 0640);
    assert_int_equal(chmod(target, 0604), 0);
    assert_int_equal(symlink("target.safetensors", link), 0);
    write_bytes(target, "old", 3);
    assert_ok(context, rapt_mha_save(context, layer, link, NULL));
    assert_true(S_ISLNK(mode_of(link)));
    assert_int_equal(mode_of(target) & 0777, 0604);
    rapt_checkpoint_close(open_checkpoint(target));
    assert_int_equal(files_in_folder(), 2);
    assert_int_equal(unlink(link), 0);

    /* A file that is open lives on while another takes its place. */
    rapt_checkpoint *open = open_checkpoint(target);
    rapt_mha *loaded;
    config.seed = 5;
    rapt_mha *other = create(&config);
    assert_ok(context, rapt_mha_save(context, other, target, NULL));
    assert_ok(context, rapt_mha_load(context, open, NULL, &loaded));
    assert_same_forward(layer, loaded);
    rapt_checkpoint_close(open);
    rapt_mha_destroy(loaded);
    assert_int_equal(unlink(target), 0);

    /* Without a folder in the path. */
    char before[PATH_SIZE];
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(folder), 0);
    assert_ok(context, rapt_mha_save(context, layer, "here.safetensors", NULL));
    rapt_checkpoint_close(open_checkpoint("here.safetensors"));
    assert_int_equal(chdir(before), 0);
    assert_int_equal(files_in_folder(), 1);
    assert_int_equal(unlink(in_folder("here.safetensors")), 0);
    rapt_mha_destroy(other);
    rapt_mha_destroy(layer);
}

/* ---- all at once or not at all ---- */

typedef struct two_versions {
    rapt_mha *layer[2];
    void *bytes[2];
    size_t size[2];
} two_versions;

static two_versions make_versions(int64_t embed_dim) {
    two_versions v;
    for (int i = 0; i < 2; i++) {
        rapt_mha_config config = rapt_mha_config_default(embed_dim, 2);
        config.seed = (uint64_t)i;
        config.bias = i == 0; /* the sizes differ too */
        v.layer[i] = create(&config);
        assert_ok(context, rapt_mha_save(context, v.layer[i], in_folder("version"), NULL));
        v.bytes[i] = read_bytes(in_folder("version"), &v.size[i]);
        assert_int_equal(unlink(in_folder("version")), 0);
    }
    return v;
}

static void free_versions(two_versions *v) {
    for (int i = 0; i < 2; i++) {
        rapt_mha_destroy(v->layer[i]);
        free(v->bytes[i]);
    }
}

/* Which version a file is, -1 for neither. */
static int version_of(const two_versions *v, const char *path) {
    size_t size;
    void *bytes = read_bytes(path, &size);
    int version = -1;
    for (int i = 0; i < 2; i++)
        if (size == v->size[i] && memcmp(bytes, v->bytes[i], size) == 0) version = i;
    free(bytes);
    return version;
}

static void sleep_microseconds(int64_t microseconds) {
    struct timespec time = {.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static _Noreturn void keep_writing(const two_versions *v, const char *path) {
    rapt_context *own = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    for (int i = 1;; i++)
        if (rapt_mha_save(own, v->layer[i % 2], path, NULL) != RAPT_OK) _exit(1);
}

static void test_killed_writer(void **state) {
    (void)state;
    two_versions v = make_versions(128);
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s", in_folder("model.safetensors"));
    assert_ok(context, rapt_mha_save(context, v.layer[0], path, NULL));
    test_random random = {8};
    int rounds = test_is_quick() ? 30 : 200, seen[2] = {0}, left_behind = 0;
    for (int round = 0; round < rounds; round++) {
        pid_t writer = fork();
        assert_true(writer >= 0);
        if (writer == 0) keep_writing(&v, path);
        sleep_microseconds(random_between(&random, 0, 20000));
        assert_int_not_equal(version_of(&v, path), -1); /* while it writes */
        int status;
        assert_int_equal(kill(writer, SIGKILL), 0);
        assert_int_equal(waitpid(writer, &status, 0), writer);
        assert_true(WIFSIGNALED(status)); /* or a save failed */
        int version = version_of(&v, path);
        assert_int_not_equal(version, -1);
        seen[version]++;
        left_behind += files_in_folder() > 1;
        assert_ok(context, rapt_mha_save(context, v.layer[0], path, NULL)); /* whatever the killed one left */
        char name[64];
        for (int i = 0; i < 3; i++) { /* its temporary file goes with the test's folder, or it would be full */
            snprintf(name, sizeof name, ".rapt-%lld-%d.tmp", (long long)writer, i);
            unlink(in_folder(name));
        }
        assert_int_equal(files_in_folder(), 1);
    }
    print_message("the old version %d times, the new one %d times; %d times killed while writing\n", seen[0], seen[1],
                  left_behind);
    assert_true(seen[0] > 0 && seen[1] > 0 && left_behind > 0); /* or the kills came too early or too late */
    free_versions(&v);
    assert_int_equal(unlink(path), 0);
}

/* Runs in a child, whose exit code is the result: limits and mounts end with it. */
static int in_child(int (*run)(const two_versions *v), const two_versions *v) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(run(v));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Saves version 1 over version 0, which must fail for this reason and leave version 0 alone. 0 if all is well. */
static int fail_to_save(rapt_context *own, const two_versions *v, const char *path, const char *reason) {
    if (rapt_mha_save(own, v->layer[1], path, NULL) != RAPT_ERROR_FILE) return 10;
    if (strstr(rapt_error_message(own), reason) == NULL) return 11;
    return version_of(v, path) == 0 ? 0 : 12;
}

static int run_limited(const two_versions *v) {
    rapt_context *own = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    const char *path = in_folder("model.safetensors");
    signal(SIGXFSZ, SIG_IGN); /* then write fails with EFBIG */
    size_t most = v->size[1];
    const size_t limits[] = {0, 1, 7, 8, 9, 100, 1000, most / 3, most / 2, most - 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit = {.rlim_cur = limits[i], .rlim_max = RLIM_INFINITY};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 77;
        int failed = fail_to_save(own, v, path, strerror(EFBIG));
        if (failed != 0) return failed;
        if (files_in_folder() != 1) return 13;
    }
    struct rlimit enough = {.rlim_cur = most, .rlim_max = RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &enough) != 0) return 77;
    if (rapt_mha_save(own, v->layer[1], path, NULL) != RAPT_OK || version_of(v, path) != 1) return 14;
    rapt_context_destroy(own);
    return 0;
}

static void test_file_size_limit(void **state) {
    (void)state;
    two_versions v = make_versions(40);
    assert_ok(context, rapt_mha_save(context, v.layer[0], in_folder("model.safetensors"), NULL));
    int result = in_child(run_limited, &v);
    free_versions(&v);
    assert_int_equal(unlink(in_folder("model.safetensors")), 0);
    if (result == 77) {
        print_message("skipped: the system has no limit on the size of files\n");
        skip();
    }
    assert_int_equal(result, 0);
}

#ifdef __linux__
/* A file system of 64 KiB over the test's folder, for this process alone. */
static bool mount_small_disk(void) {
    if (unshare(CLONE_NEWNS) != 0) return false;
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return false;
    return mount("none", folder, "tmpfs", 0, "size=64k,nr_inodes=64") == 0;
}

static int run_on_small_disk(const two_versions *v) {
    if (!mount_small_disk()) return 77;
    rapt_context *own = make_context(1, RAPT_ISA_AUTO, RAPT_BACKEND_CPU);
    const char *path = in_folder("model.safetensors");
    if (rapt_mha_save(own, v->layer[0], path, NULL) != RAPT_OK) return 9;
    for (int i = 0; i < 3; i++) { /* two of them do not fit side by side */
        int failed = fail_to_save(own, v, path, strerror(ENOSPC));
        if (failed != 0) return failed;
        if (files_in_folder() != 1) return 13;
    }
    rapt_context_destroy(own);
    return 0;
}
#else
static int run_on_small_disk(const two_versions *v) {
    (void)v;
    return 77;
}
#endif

static void test_full_disk(void **state) {
    (void)state;
    two_versions v = make_versions(50); /* 40 KB */
    int result = in_child(run_on_small_disk, &v);
    free_versions(&v);
    if (result == 77) {
        print_message("skipped: this process may not mount a small file system\n");
        skip();
    }
    assert_int_equal(result, 0);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), /* first, and those below: they want an empty folder */
        cmocka_unit_test(test_links_and_modes), cmocka_unit_test(test_killed_writer),
        cmocka_unit_test(test_file_size_limit), cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_any_tensors),     cmocka_unit_test(test_empty_files),
        cmocka_unit_test(test_large_tensors),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
