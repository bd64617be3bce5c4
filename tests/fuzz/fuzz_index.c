/* fuzz_index.c - libFuzzer over the index of a checkpoint with several files */
#include "checkpoint.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool holds) {
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static rapt_context *context;
    if (context == NULL) must(rapt_context_create(NULL, &context) == RAPT_OK);
    rapt_table entries = {.item_size = sizeof(index_entry)};
    char *text = NULL;
    size_t text_size = 0;
    rapt_status status = rapt_index_read(context, &context->allocator, data, size, &entries, &text, &text_size);
    must(status == RAPT_OK || status == RAPT_ERROR_FORMAT);
    for (size_t i = 0; status == RAPT_OK && i < entries.count; i++) {
        const index_entry *entry = rapt_table_at(&entries, i);
        must(rapt_table_find(&entries, entry->name) == entry);
        must(strpbrk(entry->file, "/\\") == NULL && entry->file[0] != '\0' && strcmp(entry->file, "..") != 0);
    }
    rapt_table_free(&entries, &context->allocator);
    rapt_release(&context->allocator, text, text_size);
    return 0;
}
