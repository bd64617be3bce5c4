/* optimizer.h - what the files of the optimisers share
 *
 * optimizer.c makes them and collects their parameters, optimizer_step.c computes, optimizer_checkpoint.c saves and loads.
 */
#ifndef RAPT_OPTIMIZER_H
#define RAPT_OPTIMIZER_H

#include "mha.h"
#include "table.h"

#define RAPT_STATE_PREFIX "optimizer." /* of the names of states; no parameter's name begins so */

enum { OPTIMIZER_MAX_STATES = 2 };

/* A parameter. All its tensors are contiguous and of one shape. */
typedef struct optimizer_entry {
    const char *name; /* first, see table.h */
    rapt_tensor parameter, gradient;
    rapt_tensor state[OPTIMIZER_MAX_STATES]; /* in the accumulation type */
    const char *state_name[OPTIMIZER_MAX_STATES];
    int64_t count, first_chunk; /* elements; number of its first chunk among all */
    const rapt_mha *layer;      /* whose parameter it is, or a part of one; NULL: the caller's */
    void *memory;               /* of states and names */
    size_t memory_size;
} optimizer_entry;

typedef struct optimizer_layer {
    const char *prefix; /* first, see table.h */
    rapt_mha *layer;
    size_t prefix_size;
} optimizer_layer;

struct rapt_optimizer {
    rapt_optimizer_config config;
    rapt_allocator allocator; /* a copy, as an optimiser may outlive its context */
    int64_t steps;
    rapt_table entries, layers;
};

static inline size_t optimizer_count(const rapt_optimizer *optimizer) { return optimizer->entries.count; }
static inline const optimizer_entry *optimizer_entry_at(const rapt_optimizer *optimizer, size_t i) {
    return rapt_table_at(&optimizer->entries, i);
}
static inline const optimizer_layer *optimizer_layer_at(const rapt_optimizer *optimizer, size_t i) {
    return rapt_table_at(&optimizer->layers, i);
}

/* Work is cut into chunks of so many elements of one parameter, whatever the number of threads. */
enum { OPTIMIZER_CHUNK = 8192 };
int64_t rapt_optimizer_chunks(const rapt_optimizer *optimizer); /* in all */

/* How many tensors of state a parameter has, and what PyTorch calls them. */
int32_t rapt_optimizer_states(const rapt_optimizer_config *config, const char *names[OPTIMIZER_MAX_STATES]);

#endif
