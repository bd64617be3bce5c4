/* table.h - things with names: in the order in which they came, and by name
 *
 * An item starts with its name (a const char *), so that a pointer to an item is a pointer to a name.
 */
#ifndef RAPT_TABLE_H
#define RAPT_TABLE_H

#include "internal.h"

typedef struct rapt_table {
    char *items;
    size_t count, capacity, item_size; /* item_size is set by the owner, before the first item */
    const void **index;                /* `count` pointers, once all items are in */
} rapt_table;

rapt_status rapt_table_add(rapt_context *context, const rapt_allocator *allocator, rapt_table *table, const void *item);
/* Makes the index, in the order of the items. No item may be added after it. */
rapt_status rapt_table_make_index(rapt_context *context, const rapt_allocator *allocator, rapt_table *table);
void rapt_table_free(rapt_table *table, const rapt_allocator *allocator);

static inline const char *rapt_table_name(const void *item) { return *(const char *const *)item; }
static inline const void *rapt_table_at(const rapt_table *table, size_t i) {
    return table->items + i * table->item_size;
}

/* Sorts the index, never by more than n log n comparisons. compare gets two items. */
typedef int (*rapt_comparison)(const void *a, const void *b);
void rapt_table_sort(rapt_table *table, rapt_comparison compare);
/* By name; returns the second of two items that share one, or NULL. */
const void *rapt_table_sort_by_name(rapt_table *table);
/* The first place in the index, which must be sorted by name, whose name is not before the given one; count if none. */
size_t rapt_table_first_from(const rapt_table *table, const char *name);
/* NULL if there is none. The index must be sorted by name. */
const void *rapt_table_find(const rapt_table *table, const char *name);

#endif
