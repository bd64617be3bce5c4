/* os.c - the operating system: POSIX (Linux first) */
#define _GNU_SOURCE
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sched.h>
#endif

#ifdef __x86_64__
#include <cpuid.h>
#endif

bool os_thread_start(os_thread *thread, void *(*run)(void *), void *arg) {
    return pthread_create(thread, NULL, run, arg) == 0;
}
void os_thread_join(os_thread thread) { pthread_join(thread, NULL); }
void os_mutex_init(os_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
void os_mutex_destroy(os_mutex *mutex) { pthread_mutex_destroy(mutex); }
void os_mutex_lock(os_mutex *mutex) { pthread_mutex_lock(mutex); }
void os_mutex_unlock(os_mutex *mutex) { pthread_mutex_unlock(mutex); }
void os_condition_init(os_condition *condition) { pthread_cond_init(condition, NULL); }
void os_condition_destroy(os_condition *condition) { pthread_cond_destroy(condition); }
void os_condition_wait(os_condition *condition, os_mutex *mutex) { pthread_cond_wait(condition, mutex); }
void os_condition_wake_all(os_condition *condition) { pthread_cond_broadcast(condition); }

int64_t os_process_id(void) { return getpid(); }

uint64_t os_nanoseconds(void) {
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
const char *os_environment(const char *name) { return getenv(name); }

void os_ask_for_large_pages(void *memory, size_t size) {
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)size;
#endif
}

#ifdef __linux__
/* CPUs' worth of time that one control group allows, or 0 for no limit. Version 2 has one file, "max 100000" or
 * "150000 100000"; version 1 has two, with -1 for no limit. */
static double group_quota(const char *group, bool version_2) {
    char path[600];
    double quota = 0, period = 0;
    snprintf(path, sizeof path, version_2 ? "%s/cpu.max" : "%s/cpu.cfs_quota_us", group);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    int found = fscanf(file, "%lf %lf", &quota, &period);
    fclose(file);
    if (!version_2 && found == 1) {
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", group);
        file = fopen(path, "r");
        if (file == NULL) return 0;
        found += fscanf(file, "%lf", &period);
        fclose(file);
    }
    return found == 2 && quota > 0 && period > 0 ? quota / period : 0;
}

/* The smallest limit of the group at root/inner and of those around it, up to the root. */
static double smallest_quota(const char *root, const char *inner, bool version_2) {
    char group[500];
    size_t root_length = strlen(root);
    double smallest = 0;
    if (snprintf(group, sizeof group, "%s%s", root, inner) >= (int)sizeof group) return 0;
    for (;;) {
        double quota = group_quota(group, version_2);
        if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
        char *end = strrchr(group, '/');
        if (end == NULL || (size_t)(end - group) < root_length) return smallest;
        *end = '\0';
    }
}

/* CPUs' worth of time that the control groups of this process allow, or 0 for no limit. */
static int32_t cgroup_cpus(void) {
    double smallest = 0;
    char line[500];
    FILE *file = fopen("/proc/self/cgroup", "r"); /* "0::/group" in version 2, "4:cpu,cpuacct:/group" in version 1 */
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL) continue;
        *group++ = '\0';
        bool version_2 = controllers[1] == '\0';
        bool is_cpu = strcmp(controllers + 1, "cpu") == 0 || strncmp(controllers + 1, "cpu,", 4) == 0;
        if (!version_2 && !is_cpu) continue;
        double quota = smallest_quota(version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu", group, version_2);
        if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
    }
    if (file != NULL) fclose(file);
    return smallest <= 0 || smallest > 1e6 ? 0 : smallest < 1 ? 1 : (int32_t)smallest;
}

/* A machine may have more CPUs than the fixed cpu_set_t holds, so the set grows until the kernel is content. */
static int32_t affinity_cpus(void) {
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        if (set == NULL) return 0;
        size_t size = CPU_ALLOC_SIZE((size_t)cpus);
        int failed = sched_getaffinity(0, size, set);
        int error = errno;
        int32_t count = failed ? 0 : CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (!failed || error != EINVAL) return count;
    }
    return 0;
}
#endif

int32_t os_cpu_count(void) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t count = online < 1 ? 1 : (int32_t)online;
#ifdef __linux__
    int32_t allowed = affinity_cpus();
    if (allowed > 0 && allowed < count) count = allowed;
    int32_t quota = cgroup_cpus();
    if (quota > 0 && quota < count) count = quota;
#endif
    return count;
}

/* NULL for a regular file. */
static const char *what_it_is(const struct stat *info) {
    if (S_ISREG(info->st_mode)) return NULL;
    return S_ISDIR(info->st_mode) ? "is a directory" : "is not a regular file";
}

const char *os_file_map_open(const char *path, os_file_map *map) {
    /* Without O_NONBLOCK, opening a pipe would wait for a writer. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return strerror(errno);
    struct stat info;
    const char *problem = NULL;
    if (fstat(file, &info) != 0) {
        problem = strerror(errno);
    } else if (what_it_is(&info) != NULL) {
        problem = what_it_is(&info);
    } else if (info.st_size == 0) {
        *map = (os_file_map){0};
    } else {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (data == MAP_FAILED) {
            problem = strerror(errno);
        } else {
            *map = (os_file_map){.data = data, .size = (size_t)info.st_size};
        }
    }
    close(file);
    return problem;
}

void os_file_map_close(os_file_map *map) {
    if (map->size > 0) munmap((void *)(uintptr_t)map->data, map->size);
    *map = (os_file_map){0};
}

/* ---- new files ---- */

const char *os_new_file_begin(os_new_file *new, const char *path) {
    struct stat info;
    bool exists = stat(path, &info) == 0;
    if (!exists && errno != ENOENT) return strerror(errno);
    const char *problem = exists ? what_it_is(&info) : NULL;
    if (problem != NULL) return problem; /* root could replace a device */
    size_t length = strlen(path);
    if (length + 1 > sizeof new->path) return strerror(ENAMETOOLONG);
    memcpy(new->path, path, length + 1);
    if (exists && realpath(path, new->path) == NULL) return strerror(errno);
    const char *slash = strrchr(new->path, '/');
    int folder = slash == NULL ? 0 : (int)(slash - new->path + 1);
    /* A name is taken only by a process of this number that was killed, or by another thread of this one. */
    for (unsigned attempt = 0;; attempt++) {
        int needed = snprintf(new->temporary, sizeof new->temporary, "%.*s.rapt-%lld-%u.tmp", folder, new->path,
                              (long long)getpid(), attempt);
        if (needed >= (int)sizeof new->temporary) return strerror(ENAMETOOLONG);
        new->file = open(new->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (new->file >= 0) break;
        if (errno != EEXIST || attempt == 9999) return strerror(errno);
    }
    if (exists) (void)fchmod(new->file, info.st_mode & 0777); /* if not, it has the mode of a new one */
    return NULL;
}

const char *os_new_file_write(os_new_file *new, const void *data, size_t size) {
    for (const char *next = data; size > 0;) {
        size_t most = (size_t)1 << 30; /* Linux writes less than 2 GiB at once */
        ssize_t written = write(new->file, next, size < most ? size : most);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return strerror(errno);
        next += written;
        size -= (size_t)written;
    }
    return NULL;
}

static int synchronise(int file) {
    int failed;
    do failed = fsync(file);
    while (failed != 0 && errno == EINTR);
    return failed;
}

/* The rename lasts once its folder is on disk. Not an error if that fails: after a power cut there may be the old file
 * again, which is whole as well. */
static void synchronise_folder(os_new_file *new) {
    char *slash = strrchr(new->path, '/');
    if (slash != NULL) slash[slash == new->path ? 1 : 0] = '\0';
    int folder = open(slash == NULL ? "." : new->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;
    synchronise(folder);
    close(folder);
}

const char *os_new_file_finish(os_new_file *new) {
    if (synchronise(new->file) != 0) return strerror(errno);
    int file = new->file;
    new->file = -1; /* closed even if close fails */
    if (close(file) != 0) return strerror(errno);
    if (rename(new->temporary, new->path) != 0) return strerror(errno);
    synchronise_folder(new);
    return NULL;
}

void os_new_file_abandon(os_new_file *new) {
    if (new->file >= 0) close(new->file);
    unlink(new->temporary);
}

#ifdef __x86_64__
/* Which register files the operating system saves on a thread switch. */
static bool os_saves(uint32_t wanted) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & wanted) == wanted;
}

bool os_cpu_has_avx2_fma(void) {
    unsigned a, b, c, d, leaf1;
    if (!__get_cpuid(1, &a, &b, &leaf1, &d)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    unsigned wanted = bit_FMA | bit_F16C | bit_AVX;
    return (leaf1 & wanted) == wanted && (b & bit_AVX2) && os_saves(0x6);
}

bool os_cpu_has_avx512(void) {
    unsigned a, b, c, d;
    if (!os_cpu_has_avx2_fma() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    unsigned wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    return (b & wanted) == wanted && os_saves(0xe6);
}

os_cpu_kind os_kind_of_cpu(void) {
    const unsigned zen5_family = 0x1a;
    unsigned a, b, c, d, version;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return OS_CPU_OTHER;
    if (b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx) return OS_CPU_INTEL;
    if (b != signature_AMD_ebx || c != signature_AMD_ecx || d != signature_AMD_edx) return OS_CPU_OTHER;
    if (!__get_cpuid(1, &version, &b, &c, &d)) return OS_CPU_AMD;
    unsigned family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    return family >= zen5_family ? OS_CPU_AMD_ZEN5 : OS_CPU_AMD;
}
#else
bool os_cpu_has_avx2_fma(void) { return false; }
bool os_cpu_has_avx512(void) { return false; }
os_cpu_kind os_kind_of_cpu(void) { return OS_CPU_OTHER; }
#endif
