/* files.c - whole files in and out: maps, streams, and writing that is done whole or not at all */
#include "files.h"

#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST_READ = 1 << 16 };

static const char *path_text(const char *path, bool reading) {
    return strcmp(path, "-") != 0 ? path : reading ? "standard input" : "standard output";
}

/* ---- reading ---- */

static void unmap(void *object) {
    bytes *map = object;
    munmap((void *)(uintptr_t)map->data, map->size);
    free(map);
}

static bytes map_file(int file, const char *path, size_t size) {
    void *data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    bytes *map = malloc(sizeof *map);
    if (data == MAP_FAILED || map == NULL) fail("cannot read '%s': %s", path, strerror(errno));
    *map = (bytes){data, size};
    keep(map, unmap);
    return *map;
}

static bytes read_stream(int file, const char *path, size_t (*limit)(bytes beginning)) {
    size_t size = 0, capacity = FIRST_READ, most = FIRST_READ, begin = 0; /* begin: where progress is counted from */
    unsigned char *data = malloc(capacity);
    for (ssize_t got = 1; data != NULL && got != 0 && size < most;) {
        if (size == capacity) {
            unsigned char *larger = capacity > SIZE_MAX / 2 ? NULL : realloc(data, 2 * capacity);
            if (larger == NULL) free(data);
            data = larger;
            capacity *= 2;
            continue;
        }
        got = read(file, data + size, (capacity < most ? capacity : most) - size);
        if (got < 0 && errno != EINTR) {
            int problem = errno;
            free(data);
            fail("cannot read %s: %s", path_text(path, true), strerror(problem));
        }
        if (got > 0) size += (size_t)got;
        if (size == FIRST_READ && most == FIRST_READ && limit != NULL) {
            most = limit((bytes){data, size});
            if (most == SIZE_MAX) show_progress("reading"); /* until it ends */
            begin = size;
        }
        if (begin > 0 && most < SIZE_MAX) show_share("reading", (double)(size - begin), (double)(most - begin));
    }
    show_progress(NULL);
    if (data == NULL) fail("out of memory while reading %s", path_text(path, true));
    keep(data, free);
    return (bytes){data, size};
}

bytes read_file(const char *path, size_t (*limit)(bytes beginning)) {
    static bool stdin_is_read;
    struct stat info;
    if (strcmp(path, "-") == 0) {
        if (stdin_is_read) fail("standard input is asked for twice");
        stdin_is_read = true;
        return read_stream(STDIN_FILENO, path, limit);
    }
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &info) != 0) fail("cannot read '%s': %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) fail("cannot read '%s': %s", path, strerror(EISDIR));
    bool mappable = S_ISREG(info.st_mode) && info.st_size > 0;
    bytes whole = mappable ? map_file(file, path, (size_t)info.st_size) : read_stream(file, path, limit);
    close(file);
    return whole;
}

/* ---- writing ---- */

/* Returns 0, or the system's reason. */
static int write_parts(int file, int parts, const bytes *part) {
    enum { MOST_AT_ONCE = 1 << 20 }; /* so that there is something to show */
    size_t before = 0, total = 0;
    for (int i = 0; i < parts; i++) total += part[i].size;
    for (int i = 0; i < parts; i++) {
        for (size_t done = 0; done < part[i].size;) {
            show_share("writing", (double)(before + done), (double)total);
            size_t rest = part[i].size - done;
            ssize_t written = write(file, (const char *)part[i].data + done, rest < MOST_AT_ONCE ? rest : MOST_AT_ONCE);
            if (written < 0 && errno != EINTR) return errno;
            if (written > 0) done += (size_t)written;
        }
        before += part[i].size;
    }
    return 0;
}

/* Through a temporary file beside it, which then takes its place. */
static int replace_file(const char *path, int parts, const bytes *part) {
    static const char suffix[] = ".XXXXXX";
    size_t length = strlen(path);
    char *temporary = allocate(length + sizeof suffix);
    memcpy(temporary, path, length);
    memcpy(temporary + length, suffix, sizeof suffix);
    int file = mkstemp(temporary);
    if (file < 0) return errno;
    mode_t mask = umask(0);
    umask(mask);
    int problem = fchmod(file, 0666 & ~mask) == 0 ? write_parts(file, parts, part) : errno;
    if (problem == 0 && fsync(file) != 0) problem = errno;
    if (close(file) != 0 && problem == 0) problem = errno;
    if (problem == 0 && rename(temporary, path) != 0) problem = errno;
    if (problem != 0) unlink(temporary);
    return problem;
}

/* A device, a pipe or a link is written where it is. */
static int write_through(const char *path, int parts, const bytes *part) {
    int file = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
    if (file < 0) return errno;
    int problem = write_parts(file, parts, part);
    if (close(file) != 0 && problem == 0) problem = errno;
    return problem;
}

void write_file(const char *path, int parts, const bytes *part) {
    struct stat info;
    int problem;
    if (strcmp(path, "-") == 0) {
        problem = fflush(stdout) == 0 ? write_parts(STDOUT_FILENO, parts, part) : errno;
    } else if (lstat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        problem = write_through(path, parts, part);
    } else {
        problem = replace_file(path, parts, part);
    }
    show_progress(NULL);
    if (problem != 0) fail("cannot write %s: %s", path_text(path, false), strerror(problem));
}

/* ---- a file on its way to a stream ---- */

static void remove_temporary(void *object) {
    char *path = object, *slash = strrchr(path, '/');
    if (slash == NULL) return; /* it was taken */
    unlink(path);
    *slash = '\0';
    rmdir(path);
    *path = '\0';
}

const char *temporary_path(void) {
    static const char folder[] = "/rapt-XXXXXX", file[] = "/layer.safetensors";
    const char *given = getenv("TMPDIR"), *below = given == NULL || *given == '\0' ? "/tmp" : given;
    size_t length = strlen(below) + strlen(folder), size = length + sizeof file;
    char *path = allocate(size);
    snprintf(path, size, "%s%s", below, folder);
    if (mkdtemp(path) == NULL) fail("cannot write a temporary file in '%s': %s", below, strerror(errno));
    memcpy(path + length, file, sizeof file);
    keep(path, remove_temporary);
    return path;
}

bytes take_temporary(const char *path) {
    bytes whole = read_file(path, NULL);
    remove_temporary((void *)(uintptr_t)path); /* now: a signal that ends the tool while it writes leaves nothing */
    return whole;
}
