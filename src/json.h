/* json.h - JSON from strangers, read one thing at a time
 *
 * What Rapt reads has a fixed grammar a few objects deep, so there is no tree: the caller asks for what must come next.
 * Strings are decoded once, into one buffer, and live there as C strings. Every refusal names its byte.
 */
#ifndef RAPT_JSON_H
#define RAPT_JSON_H

#include "internal.h"

typedef struct rapt_json {
    rapt_context *context;
    const char *format; /* what messages begin with: "safetensors" */
    const unsigned char *bytes;
    size_t length, at;
    size_t token;     /* where the last string or integer began */
    size_t offset;    /* of the first byte in its file, for messages */
    char *text;       /* decoded strings, `length` bytes: with its NUL none is longer than its source with the quotes */
    size_t text_used; /* bytes */
} rapt_json;

/* The byte to read next, -1 at the end. */
static inline int rapt_json_here(const rapt_json *j) { return j->at < j->length ? j->bytes[j->at] : -1; }
bool rapt_json_take_byte(rapt_json *j, char c); /* steps over c if it comes next */
bool rapt_json_take(rapt_json *j, char c);      /* the same after white space */
bool rapt_json_ends(rapt_json *j);              /* whether nothing but white space is left */
rapt_status rapt_json_expect(rapt_json *j, char c);
rapt_status rapt_json_string(rapt_json *j, const char **string);
rapt_status rapt_json_integer(rapt_json *j, int64_t *number); /* not negative */
/* Any value, checked and forgotten. */
rapt_status rapt_json_skip_value(rapt_json *j);

/* An object is walked by its keys, each with its value behind it; the key is NULL after the last. */
rapt_status rapt_json_first_key(rapt_json *j, const char **key);
rapt_status rapt_json_next_key(rapt_json *j, const char **key);

/* RAPT_ERROR_FORMAT, "safetensors: byte 12: ..."; `at` counts from the first byte of the JSON. */
rapt_status rapt_json_wrong(const rapt_json *j, size_t at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A string from a file as a message may hold it: not too long, cut between characters, and without control characters,
 * which could otherwise steer the terminal that shows it. Returns text. */
#define RAPT_SHOWN_SIZE 100
const char *rapt_shown(const char *string, char text[RAPT_SHOWN_SIZE]);

/* The bytes of the UTF-8 character at p that is no ASCII; 0 if there is none. */
size_t rapt_utf8_length(const unsigned char *p, size_t left);
bool rapt_is_utf8(const char *string);

#endif
