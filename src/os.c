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
const char *os_environment(const char *name) { return getenv(name); }

#ifdef __linux__
/* CPUs' worth of time that the control group allows, or 0 for no limit. */
static int32_t cgroup_cpus(void) {
    double quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r"); /* version 2: "max 100000" or "150000 100000" */
    if (file != NULL) {
        if (fscanf(file, "%lf %lf", &quota, &period) != 2) quota = 0;
        fclose(file);
    } else {
        file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"); /* version 1: -1 for no limit */
        if (file == NULL) return 0;
        if (fscanf(file, "%lf", &quota) != 1) quota = 0;
        fclose(file);
        file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r");
        if (file == NULL) return 0;
        if (fscanf(file, "%lf", &period) != 1) period = 0;
        fclose(file);
    }
    if (!(quota > 0 && period > 0)) return 0;
    double cpus = quota / period;
    return cpus < 1 ? 1 : cpus > 1e6 ? 0 : (int32_t)cpus;
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

const char *os_file_map_open(const char *path, os_file_map *map) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return strerror(errno);
    struct stat info;
    const char *problem = NULL;
    if (fstat(file, &info) != 0) {
        problem = strerror(errno);
    } else if (!S_ISREG(info.st_mode)) {
        problem = S_ISDIR(info.st_mode) ? "is a directory" : "is not a regular file";
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
#else
bool os_cpu_has_avx2_fma(void) { return false; }
bool os_cpu_has_avx512(void) { return false; }
#endif
