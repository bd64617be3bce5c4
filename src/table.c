/* table.c - things with names: in the order in which they came, and by name */
#include "table.h"

rapt_status rapt_table_add(rapt_context *context, const rapt_allocator *allocator, rapt_table *t, const void *item) {
    if (t->count == t->capacity) {
        size_t capacity = t->capacity == 0 ? 16 : 2 * t->capacity, bytes = rapt_size_mul(capacity, t->item_size);
        char *items = rapt_allocate(allocator, bytes);
        if (items == NULL) return rapt_fail_memory(context, bytes);
        if (t->count > 0) memcpy(items, t->items, t->count * t->item_size);
        rapt_release(allocator, t->items, t->capacity * t->item_size);
        t->items = items;
        t->capacity = capacity;
    }
    memcpy(t->items + t->count++ * t->item_size, item, t->item_size);
    return RAPT_OK;
}

rapt_status rapt_table_make_index(rapt_context *context, const rapt_allocator *allocator, rapt_table *t) {
    size_t bytes = t->count * sizeof *t->index;
    t->index = rapt_allocate(allocator, bytes);
    if (t->index == NULL) return rapt_fail_memory(context, bytes);
    for (size_t i = 0; i < t->count; i++) t->index[i] = rapt_table_at(t, i);
    return RAPT_OK;
}

void rapt_table_free(rapt_table *t, const rapt_allocator *allocator) {
    rapt_release(allocator, t->index, t->count * sizeof *t->index);
    rapt_release(allocator, t->items, t->capacity * t->item_size);
}

/* ---- sorting and finding ---- */

static void swap(const void **a, const void **b) {
    const void *moved = *a;
    *a = *b;
    *b = moved;
}

static void sift_down(const void **items, size_t root, size_t count, rapt_comparison compare) {
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && compare(items[child], items[child + 1]) < 0) child++;
        if (compare(items[root], items[child]) >= 0) return;
        swap(&items[root], &items[child]);
    }
}

/* Heapsort, because the C library's qsort may allocate past our allocator and may be quadratic on a chosen input. */
void rapt_table_sort(rapt_table *t, rapt_comparison compare) {
    for (size_t root = t->count / 2; root-- > 0;) sift_down(t->index, root, t->count, compare);
    for (size_t last = t->count; last-- > 1;) {
        swap(&t->index[0], &t->index[last]);
        sift_down(t->index, 0, last, compare);
    }
}

/* Of one name, in the order in which they came: items lie in one array. */
static int compare_names(const void *a, const void *b) {
    int order = strcmp(rapt_table_name(a), rapt_table_name(b));
    if (order != 0) return order;
    return ((const char *)a > (const char *)b) - ((const char *)a < (const char *)b);
}

const void *rapt_table_sort_by_name(rapt_table *t) {
    rapt_table_sort(t, compare_names);
    for (size_t i = 1; i < t->count; i++)
        if (strcmp(rapt_table_name(t->index[i - 1]), rapt_table_name(t->index[i])) == 0) return t->index[i];
    return NULL;
}

size_t rapt_table_first_from(const rapt_table *t, const char *name) {
    size_t low = 0, high = t->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(rapt_table_name(t->index[middle]), name) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const void *rapt_table_find(const rapt_table *t, const char *name) {
    size_t first = rapt_table_first_from(t, name);
    return first < t->count && strcmp(rapt_table_name(t->index[first]), name) == 0 ? t->index[first] : NULL;
}
