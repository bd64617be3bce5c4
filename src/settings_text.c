/* settings_text.c - settings of a layer that no tensor shows, as text in a file's metadata
 *
 *     num_heads=8 batch_first=1 causal=0 add_zero_attn=0 scale=1p-3 dropout=3602879701896397p-55
 *
 * Other sizes follow from the tensors' shapes. Numbers are m * 2^e, exact, and the same in every locale. scale is there
 * if the layer has one of its own. A word that this release does not know is refused: it could change the result.
 */
#include "checkpoint.h"

#include "json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static int write_number(char *text, size_t size, const char *name, double x) {
    int exponent = 0;
    int64_t mantissa = (int64_t)ldexp(frexp(x, &exponent), 53);
    for (exponent -= 53; mantissa != 0 && mantissa % 2 == 0; exponent++) mantissa /= 2;
    return snprintf(text, size, " %s=%" PRId64 "p%d", name, mantissa, mantissa == 0 ? 0 : exponent);
}

void rapt_settings_write(const rapt_mha_config *c, char text[RAPT_SETTINGS_SIZE]) {
    int used = snprintf(text, RAPT_SETTINGS_SIZE, "num_heads=%" PRId64 " batch_first=%d causal=%d add_zero_attn=%d",
                        c->num_heads, c->batch_first, c->causal, c->add_zero_attn);
    if (c->set_scale) used += write_number(text + used, RAPT_SETTINGS_SIZE - (size_t)used, "scale", c->scale);
    write_number(text + used, RAPT_SETTINGS_SIZE - (size_t)used, "dropout", c->dropout);
}

/* Each reads one value and returns what follows it, NULL if there is none. */
static const char *read_integer(const char *text, int64_t *number) {
    bool is_negative = *text == '-';
    const char *digit = text + is_negative;
    int64_t value = 0;
    if (*digit < '0' || *digit > '9') return NULL;
    for (; *digit >= '0' && *digit <= '9'; digit++) {
        if (value > (INT64_MAX - 9) / 10) return NULL;
        value = value * 10 + (*digit - '0');
    }
    *number = is_negative ? -value : value;
    return digit;
}

static const char *read_number(const char *text, double *x) {
    int64_t mantissa, exponent;
    const char *rest = read_integer(text, &mantissa);
    if (rest == NULL || *rest != 'p') return NULL;
    rest = read_integer(rest + 1, &exponent);
    if (rest == NULL || exponent < -2000 || exponent > 2000) return NULL;
    *x = ldexp((double)mantissa, (int)exponent);
    return rest;
}

static const char *read_bool(const char *text, bool *flag) {
    if (*text != '0' && *text != '1') return NULL;
    *flag = *text == '1';
    return text + 1;
}

/* If the word at text is name=, returns what follows. */
static const char *value_of(const char *text, const char *name) {
    size_t length = strlen(name);
    return strncmp(text, name, length) == 0 && text[length] == '=' ? text + length + 1 : NULL;
}

/* One word; returns what follows it, NULL if it makes no sense. */
static const char *read_word(const char *word, rapt_mha_config *c) {
    const char *value;
    if ((value = value_of(word, "num_heads")) != NULL) {
        value = read_integer(value, &c->num_heads);
        return c->num_heads >= 1 ? value : NULL;
    }
    if ((value = value_of(word, "batch_first")) != NULL) return read_bool(value, &c->batch_first);
    if ((value = value_of(word, "causal")) != NULL) return read_bool(value, &c->causal);
    if ((value = value_of(word, "add_zero_attn")) != NULL) return read_bool(value, &c->add_zero_attn);
    if ((value = value_of(word, "dropout")) != NULL) return read_number(value, &c->dropout);
    if ((value = value_of(word, "scale")) != NULL) {
        c->set_scale = true;
        return read_number(value, &c->scale);
    }
    return NULL;
}

rapt_status rapt_settings_read(rapt_context *context, const char *prefix, const char *text, rapt_mha_config *config) {
    rapt_mha_config c = *config;
    for (const char *word = text; *word != '\0';) {
        const char *rest = read_word(word, &c);
        if (rest == NULL || (*rest != ' ' && *rest != '\0')) {
            char shown_prefix[RAPT_SHOWN_SIZE], shown_word[RAPT_SHOWN_SIZE];
            return rapt_fail(context, RAPT_ERROR_FORMAT,
                             "metadata '" RAPT_SETTINGS_KEY "%s': Rapt %s cannot read '%s' (ignore_metadata leaves it "
                             "out)",
                             rapt_shown(prefix, shown_prefix), rapt_version(), rapt_shown(word, shown_word));
        }
        word = *rest == ' ' ? rest + 1 : rest;
    }
    *config = c;
    return RAPT_OK;
}
