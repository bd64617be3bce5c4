/* memory.c - where memory comes from, and the scratch memory of a call */
#include "internal.h"
#include "os.h"

#include <stdlib.h>

/* Large blocks stand at the beginning of a large page, and ask for such pages: caches and weights are read from end to end,
 * and at each end of a small page a CPU stops foreseeing what comes next. */
enum { LARGE_PAGE = 2 << 20, LARGE_BLOCK = 2 * LARGE_PAGE };

static void *libc_allocate(void *user, size_t size, size_t alignment) {
    (void)user;
    bool is_large = size >= LARGE_BLOCK;
    if (is_large && alignment < LARGE_PAGE) alignment = LARGE_PAGE;
    size_t rounded = (size + alignment - 1) / alignment * alignment; /* aligned_alloc wants a multiple */
    void *memory = rounded < size ? NULL : aligned_alloc(alignment, rounded);
    if (memory != NULL && is_large) os_ask_for_large_pages(memory, size / LARGE_PAGE * LARGE_PAGE);
    return memory;
}

static void libc_release(void *user, void *pointer, size_t size) {
    (void)user;
    (void)size;
    free(pointer);
}

rapt_allocator rapt_allocator_or_default(const rapt_allocator *allocator) {
    if (allocator != NULL && allocator->allocate != NULL) return *allocator;
    return (rapt_allocator){.allocate = libc_allocate, .release = libc_release};
}

void *rapt_allocate(const rapt_allocator *allocator, size_t size) {
    if (size > SIZE_MAX / 2) return NULL;
    return allocator->allocate(allocator->user, size == 0 ? 1 : size, RAPT_ALIGNMENT);
}

void rapt_release(const rapt_allocator *allocator, void *pointer, size_t size) {
    if (pointer != NULL) allocator->release(allocator->user, pointer, size == 0 ? 1 : size);
}

bool rapt_arena_reserve(rapt_arena *arena, const rapt_allocator *allocator, size_t bytes) {
    if (bytes <= arena->capacity) return true;
    /* The new block first: if there is none, the old one stays for smaller calls. */
    char *base = rapt_allocate(allocator, bytes);
    if (base == NULL) return false;
    rapt_release(allocator, arena->base, arena->capacity);
    *arena = (rapt_arena){.base = base, .capacity = bytes};
    return true;
}

void *rapt_arena_take(rapt_arena *arena, size_t bytes) {
    char *taken = arena->base + arena->used;
    arena->used += rapt_arena_size(bytes);
    return taken;
}
