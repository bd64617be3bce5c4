/* os.h - what Rapt asks of the operating system and the CPU: threads, memory maps, files, environment, CPU detection,
 * floating-point mode. Another system is another os.c. */
#ifndef RAPT_OS_H
#define RAPT_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <pthread.h>

typedef pthread_t os_thread;
typedef pthread_mutex_t os_mutex;
typedef pthread_cond_t os_condition;

bool os_thread_start(os_thread *thread, void *(*run)(void *), void *arg);
void os_thread_join(os_thread thread);
void os_mutex_init(os_mutex *mutex);
void os_mutex_destroy(os_mutex *mutex);
void os_mutex_lock(os_mutex *mutex);
void os_mutex_unlock(os_mutex *mutex);
void os_condition_init(os_condition *condition);
void os_condition_destroy(os_condition *condition);
void os_condition_wait(os_condition *condition, os_mutex *mutex);
void os_condition_wake_all(os_condition *condition);

int32_t os_cpu_count(void); /* CPUs that this process may use: affinity and cgroup quota; at least 1 */
int64_t os_process_id(void);
uint64_t os_nanoseconds(void); /* since some time in the past */
const char *os_environment(const char *name);

/* For memory that will be used as a whole. Nothing happens where the system has no such pages. */
void os_ask_for_large_pages(void *memory, size_t size);

typedef struct os_file_map {
    const void *data;
    size_t size;
} os_file_map;
/* Maps a whole file read-only. On failure returns the system's reason, else NULL. An empty file maps to size 0. */
const char *os_file_map_open(const char *path, os_file_map *map);
void os_file_map_close(os_file_map *map);

/* A file that takes a path over all at once: it is written beside it under a name of its own, then renamed. Until the
 * very end of finish the path is as it was. Each returns the system's reason on failure, else NULL; after a failure of
 * the latter two comes abandon, which leaves nothing behind. A link is followed. */
enum { OS_PATH_SIZE = 4096 };
typedef struct os_new_file {
    int file;
    char path[OS_PATH_SIZE], temporary[OS_PATH_SIZE];
} os_new_file;
const char *os_new_file_begin(os_new_file *file, const char *path);
const char *os_new_file_write(os_new_file *file, const void *data, size_t size);
const char *os_new_file_finish(os_new_file *file);
void os_new_file_abandon(os_new_file *file);

/* CPUs that differ in what is fast; AMD's to Zen 4 and from Zen 5 on. */
typedef enum os_cpu_kind { OS_CPU_OTHER = 1, OS_CPU_AMD, OS_CPU_AMD_ZEN5, OS_CPU_INTEL, OS_CPU_KINDS } os_cpu_kind;
bool os_cpu_has_avx2_fma(void); /* with the operating system saving the registers */
bool os_cpu_has_avx512(void);   /* F, BW, DQ and VL */
os_cpu_kind os_kind_of_cpu(void);

static inline void os_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Rounding, flush-to-zero and trap settings of this thread. Bits depend on them, so every task runs in the IEEE default
 * (round to nearest, denormals kept, no traps) and gives back what it found. */
typedef uint64_t rapt_fp_mode;

static inline rapt_fp_mode rapt_fp_mode_enter(void) {
#if defined(__x86_64__)
    uint32_t found = __builtin_ia32_stmxcsr();
    if ((found & 0xffc0) != 0x1f80) __builtin_ia32_ldmxcsr(0x1f80); /* the low six bits are only sticky flags */
    return found;
#elif defined(__aarch64__)
    uint64_t found;
    __asm__ volatile("mrs %0, fpcr" : "=r"(found));
    if (found != 0) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return found;
#else
    return 0;
#endif
}

static inline void rapt_fp_mode_leave(rapt_fp_mode found) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)found);
#elif defined(__aarch64__)
    if (found != 0) __asm__ volatile("msr fpcr, %0" : : "r"(found));
#else
    (void)found;
#endif
}

#endif
