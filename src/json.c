/* json.c - JSON from strangers, read one thing at a time */
#include "json.h"

#include <stdio.h>

enum { MAX_DEPTH = 32 }; /* of a value that is skipped */

/* ---- messages ---- */

const char *rapt_shown(const char *string, char text[RAPT_SHOWN_SIZE]) {
    size_t used = 0;
    for (; used < RAPT_SHOWN_SIZE - 4 && string[used] != '\0'; used++) {
        unsigned char c = (unsigned char)string[used];
        text[used] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    if (string[used] != '\0') {
        while (used > 0 && ((unsigned char)string[used] & 0xc0) == 0x80) used--;
        for (int i = 0; i < 3; i++) text[used++] = '.';
    }
    text[used] = '\0';
    return text;
}

rapt_status rapt_json_wrong(const rapt_json *j, size_t at, const char *format, ...) {
    char what[4 * RAPT_SHOWN_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return rapt_fail(j->context, RAPT_ERROR_FORMAT, "%s: byte %zu: %s", j->format, j->offset + at, what);
}

/* ---- characters ---- */

static void skip_space(rapt_json *j) {
    while (rapt_json_here(j) == ' ' || rapt_json_here(j) == '\t' || rapt_json_here(j) == '\n' ||
           rapt_json_here(j) == '\r') {
        j->at++;
    }
}

bool rapt_json_take_byte(rapt_json *j, char c) {
    if (rapt_json_here(j) != c) return false;
    j->at++;
    return true;
}

bool rapt_json_take(rapt_json *j, char c) {
    skip_space(j);
    return rapt_json_take_byte(j, c);
}

bool rapt_json_ends(rapt_json *j) {
    skip_space(j);
    return rapt_json_here(j) < 0;
}

rapt_status rapt_json_expect(rapt_json *j, char c) {
    if (rapt_json_take(j, c)) return RAPT_OK;
    if (rapt_json_here(j) < 0) return rapt_json_wrong(j, j->at, "the JSON ends too early");
    return rapt_json_wrong(j, j->at, "expected '%c'", c);
}

/* ---- strings ---- */

static void put(rapt_json *j, unsigned int byte) { j->text[j->text_used++] = (char)(unsigned char)byte; }

static void put_code_point(rapt_json *j, uint32_t code) {
    static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    put(j, lead[more] | code >> 6 * more);
    while (more-- > 0) put(j, 0x80 | (code >> 6 * more & 0x3f));
}

/* Overlong forms, surrogates and what lies beyond 0x10ffff show in the second byte. */
size_t rapt_utf8_length(const unsigned char *p, size_t left) {
    unsigned char first = p[0], low = 0x80, high = 0xbf;
    size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first < 0xc2 || first > 0xf4 || left < length) return 0;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
    if (p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return length;
}

bool rapt_is_utf8(const char *string) {
    const unsigned char *p = (const unsigned char *)string;
    for (size_t left = strlen(string), length; left > 0; p += length, left -= length) {
        length = *p < 0x80 ? 1 : rapt_utf8_length(p, left);
        if (length == 0) return false;
    }
    return true;
}

static rapt_status read_hex4(rapt_json *j, uint32_t *code) {
    static const char digits[] = "0123456789abcdefABCDEF";
    *code = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        const char *digit = rapt_json_here(j) > 0 ? strchr(digits, rapt_json_here(j)) : NULL;
        if (digit == NULL) return rapt_json_wrong(j, j->at, "\\u needs four hexadecimal digits");
        ptrdiff_t value = digit - digits;
        *code = *code << 4 | (uint32_t)(value < 16 ? value : value - 6);
    }
    return RAPT_OK;
}

/* What follows \u: one code unit of UTF-16, or two that belong together. */
static rapt_status read_unicode_escape(rapt_json *j) {
    size_t start = j->at;
    uint32_t code, low;
    rapt_status status = read_hex4(j, &code);
    if (status != RAPT_OK) return status;
    if ((code & 0xfc00) == 0xd800 && rapt_json_take_byte(j, '\\') && rapt_json_take_byte(j, 'u')) {
        status = read_hex4(j, &low);
        if (status != RAPT_OK) return status;
        if ((low & 0xfc00) == 0xdc00) code = 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
    }
    if (code >= 0xd800 && code <= 0xdfff) return rapt_json_wrong(j, start, "a surrogate without its other half");
    /* Names are C strings here: "a\u0000b" would pass for "a". */
    if (code == 0) return rapt_json_wrong(j, start, "a NUL character in a string");
    put_code_point(j, code);
    return RAPT_OK;
}

/* What follows a backslash. */
static rapt_status read_escape(rapt_json *j) {
    static const char letters[] = "\"\\/bfnrtu", meanings[] = "\"\\/\b\f\n\r\t";
    const char *letter = rapt_json_here(j) > 0 ? strchr(letters, rapt_json_here(j)) : NULL;
    if (letter == NULL) return rapt_json_wrong(j, j->at, "an unknown escape in a string");
    j->at++;
    if (*letter == 'u') return read_unicode_escape(j);
    put(j, (unsigned char)meanings[letter - letters]);
    return RAPT_OK;
}

/* One character, not an escape. */
static rapt_status read_character(rapt_json *j) {
    unsigned char c = j->bytes[j->at];
    if (c < 0x20) return rapt_json_wrong(j, j->at, "a control character in a string");
    size_t length = c < 0x80 ? 1 : rapt_utf8_length(j->bytes + j->at, j->length - j->at);
    if (length == 0) return rapt_json_wrong(j, j->at, "a string is not valid UTF-8");
    for (size_t i = 0; i < length; i++) put(j, j->bytes[j->at++]);
    return RAPT_OK;
}

rapt_status rapt_json_string(rapt_json *j, const char **string) {
    rapt_status status = rapt_json_expect(j, '"');
    if (status != RAPT_OK) return status;
    size_t start = j->token = j->at - 1;
    *string = j->text + j->text_used;
    while (!rapt_json_take_byte(j, '"')) {
        if (rapt_json_here(j) < 0) return rapt_json_wrong(j, start, "a string does not end");
        status = rapt_json_take_byte(j, '\\') ? read_escape(j) : read_character(j);
        if (status != RAPT_OK) return status;
    }
    put(j, '\0');
    return RAPT_OK;
}

/* ---- numbers and objects ---- */

static bool is_digit(int c) { return c >= '0' && c <= '9'; }

rapt_status rapt_json_integer(rapt_json *j, int64_t *number) {
    skip_space(j);
    size_t start = j->token = j->at;
    if (!is_digit(rapt_json_here(j))) return rapt_json_wrong(j, start, "expected a non-negative integer");
    for (*number = 0; is_digit(rapt_json_here(j)); j->at++) {
        int digit = rapt_json_here(j) - '0';
        if (j->at > start && j->bytes[start] == '0') return rapt_json_wrong(j, start, "a number starts with 0");
        if (*number > (INT64_MAX - digit) / 10) return rapt_json_wrong(j, start, "a number is too large");
        *number = *number * 10 + digit;
    }
    int next = rapt_json_here(j);
    bool is_integer = next != '.' && next != 'e' && next != 'E';
    return is_integer ? RAPT_OK : rapt_json_wrong(j, start, "expected an integer, found a fraction or an exponent");
}

static rapt_status read_key(rapt_json *j, const char **key) {
    rapt_status status = rapt_json_string(j, key);
    return status == RAPT_OK ? rapt_json_expect(j, ':') : status;
}

rapt_status rapt_json_first_key(rapt_json *j, const char **key) {
    *key = NULL;
    rapt_status status = rapt_json_expect(j, '{');
    return status != RAPT_OK || rapt_json_take(j, '}') ? status : read_key(j, key);
}

rapt_status rapt_json_next_key(rapt_json *j, const char **key) {
    *key = NULL;
    return rapt_json_take(j, ',') ? read_key(j, key) : rapt_json_expect(j, '}');
}

/* ---- any value ---- */

static bool skip_digits(rapt_json *j) {
    if (!is_digit(rapt_json_here(j))) return false;
    while (is_digit(rapt_json_here(j))) j->at++;
    return true;
}

static rapt_status skip_number(rapt_json *j) {
    size_t start = j->at;
    rapt_json_take_byte(j, '-');
    bool is_number = rapt_json_take_byte(j, '0') || skip_digits(j);
    if (is_number && rapt_json_take_byte(j, '.')) is_number = skip_digits(j);
    if (is_number && (rapt_json_take_byte(j, 'e') || rapt_json_take_byte(j, 'E'))) {
        if (!rapt_json_take_byte(j, '+')) rapt_json_take_byte(j, '-');
        is_number = skip_digits(j);
    }
    return is_number ? RAPT_OK : rapt_json_wrong(j, start, "expected a value");
}

static bool skip_word(rapt_json *j, const char *word) {
    size_t length = strlen(word);
    if (j->length - j->at < length || memcmp(j->bytes + j->at, word, length) != 0) return false;
    j->at += length;
    return true;
}

/* Calls itself through objects and arrays, MAX_DEPTH deep at most. */
static rapt_status skip_value(rapt_json *j, int depth);

static rapt_status skip_object(rapt_json *j, int depth) {
    const char *key;
    rapt_status status = rapt_json_first_key(j, &key);
    while (status == RAPT_OK && key != NULL) {
        status = skip_value(j, depth);
        if (status == RAPT_OK) status = rapt_json_next_key(j, &key);
    }
    return status;
}

static rapt_status skip_array(rapt_json *j, int depth) {
    rapt_status status = rapt_json_expect(j, '[');
    if (status != RAPT_OK || rapt_json_take(j, ']')) return status;
    do status = skip_value(j, depth);
    while (status == RAPT_OK && rapt_json_take(j, ','));
    return status == RAPT_OK ? rapt_json_expect(j, ']') : status;
}

static rapt_status skip_value(rapt_json *j, int depth) {
    const char *string;
    skip_space(j);
    if (depth == MAX_DEPTH) return rapt_json_wrong(j, j->at, "values are nested more than %d deep", MAX_DEPTH);
    switch (rapt_json_here(j)) {
    case '{': return skip_object(j, depth + 1);
    case '[': return skip_array(j, depth + 1);
    case '"': return rapt_json_string(j, &string);
    default: break;
    }
    if (skip_word(j, "true") || skip_word(j, "false") || skip_word(j, "null")) return RAPT_OK;
    return skip_number(j);
}

rapt_status rapt_json_skip_value(rapt_json *j) { return skip_value(j, 0); }
