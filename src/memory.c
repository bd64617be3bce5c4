/* memory.c - where memory comes from, and the scratch memory of a call */
#include "internal.h"

#include <stdlib.h>

static void *libc_allocate(void *user, size_t size, size_t alignment) {
    (void)user;
    size_t rounded = (size + alignment - 1) / alignment * alignment; /* aligned_alloc wants a multiple */
    return rounded < size ? NULL : aligned_alloc(alignment, rounded);
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
