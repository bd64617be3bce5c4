/* terminal.c - a map of weights in a terminal: cells with percentages, plain cells, or half blocks of pooled cells,
 * whichever fits */
#include "picture.h"

#include "cli.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { LONGEST_WORD = 16, MOST_CELL_ROWS = 64, MOST_LINES = 40 };

/* ---- words ---- */

/* The bytes of the character at `text`. */
static int character_bytes(const char *text) {
    unsigned char first = (unsigned char)text[0];
    return first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

/* The index-th character of a word, "" beyond its last; the last one shown of a long word is an ellipsis. */
static const char *character(const char *word, int index, char text[5]) {
    for (int i = 0; i < index && *word != '\0'; i++) word += character_bytes(word);
    int length = *word == '\0' ? 0 : character_bytes(word);
    bool is_cut = index == LONGEST_WORD - 1 && length > 0 && word[length] != '\0';
    if (index >= LONGEST_WORD || length == 0) return "";
    if (is_cut) return "…";
    memcpy(text, word, (size_t)length);
    text[length] = '\0';
    return text;
}

static int word_length(const char *word) {
    char text[5];
    int length = 0;
    while (*character(word, length, text) != '\0') length++;
    return length;
}

/* The word of a row or column, or its number. */
static const char *label(const char *const *words, int64_t index, char text[24]) {
    if (words != NULL) return words[index];
    snprintf(text, 24, "%" PRId64, index + 1);
    return text;
}

static int longest_label(const char *const *words, int64_t count) {
    char text[24];
    int longest = words == NULL ? word_length(label(NULL, count - 1, text)) : 0;
    for (int64_t i = 0; words != NULL && i < count; i++)
        if (word_length(words[i]) > longest) longest = word_length(words[i]);
    return longest;
}

static void print_label(const char *word, int width) {
    char text[5];
    printf("  %*s", width - word_length(word), "");
    for (int i = 0; i < word_length(word); i++) fputs(character(word, i, text), stdout);
    putchar(' ');
}

/* ---- cells ---- */

static const char *const shades[] = {"·", "░", "▒", "▓", "█"};

static int shade(const picture *p, double weight) {
    double share = share_of_top(p, weight);
    return share < 0.05 ? 0 : share < 0.25 ? 1 : share < 0.5 ? 2 : share < 0.75 ? 3 : 4;
}

enum { INK = 38, GROUND = 48 };

static void set_colour(const picture *p, double weight, int layer) {
    static const int of_256[] = {234, 53, 89, 125, 161, 203, 209, 215, 221, 228}; /* ramp_colour's, nearly */
    double share = share_of_top(p, weight);
    const char *terminal = getenv("COLORTERM");
    if (terminal != NULL && (strcmp(terminal, "truecolor") == 0 || strcmp(terminal, "24bit") == 0)) {
        rgb c = ramp_colour(share);
        printf("\033[%d;2;%d;%d;%dm", layer, c.r, c.g, c.b);
    } else {
        printf("\033[%d;5;%dm", layer, of_256[lround(9 * share)]);
    }
}

static void draw_cell(const picture *p, bool colour, int width, double weight) {
    int percent = (int)lround(100 * weight);
    if (!colour) {
        const char *s = shades[shade(p, weight)];
        if (width == 4) printf(shade(p, weight) == 0 ? " %s  " : "%s%s%s ", s, s, s);
        if (width == 2) printf(shade(p, weight) == 0 ? "%s " : "%s%s", s, s);
        return;
    }
    set_colour(p, weight, GROUND);
    const char *ink = weight > 0.45 * p->top ? "38;5;16" : "38;5;252";
    if (width == 4) printf("\033[%sm%3.0d ", ink, percent); /* %.0d: no zeros */
    if (width == 2) fputs("  ", stdout);
    fputs("\033[0m", stdout);
}

/* Words over the columns, written downwards, each ending right above its column. */
static void draw_column_labels(const picture *p, int margin, int width) {
    int height = longest_label(p->column_words, p->columns);
    for (int line = 0; line < height; line++) {
        printf("  %*s ", margin, "");
        for (int64_t j = 0; j < p->columns; j++) {
            char number[24], text[5];
            const char *word = label(p->column_words, j, number);
            int letter = line - (height - word_length(word));
            printf(width == 4 ? " %s  " : "%s ", letter < 0 ? " " : character(word, letter, text));
        }
        putchar('\n');
    }
}

/* In words, what a row looks at most. */
static void draw_row_summary(const picture *p, int64_t row) {
    const char *separator = " ";
    for (int64_t j = 0; j < p->columns; j++) {
        double weight = p->weights[row * p->columns + j];
        if (weight < 0.2) continue;
        fputs(separator, stdout);
        fputs(p->column_words[j], stdout);
        printf(" %.0f%%", 100 * weight);
        separator = ", ";
    }
}

static void draw_cells(const picture *p, bool colour, int margin, int width, bool summaries) {
    draw_column_labels(p, margin, width);
    for (int64_t i = 0; i < p->rows; i++) {
        char number[24];
        print_label(label(p->row_words, i, number), margin);
        for (int64_t j = 0; j < p->columns; j++) draw_cell(p, colour, width, p->weights[i * p->columns + j]);
        if (summaries) draw_row_summary(p, i);
        putchar('\n');
    }
}

/* Two rows of cells to a line: the upper half of a block in ink, the lower in ground. */
static void draw_half_blocks(const picture *p, bool colour, int margin, int64_t most_columns) {
    int64_t columns = p->columns < most_columns ? p->columns : most_columns;
    int64_t rows = p->rows < 2 * MOST_LINES ? p->rows : 2 * MOST_LINES;
    if (rows > columns && p->rows <= p->columns) rows = columns; /* cells stay about square */
    for (int64_t i = 0; i < rows; i += 2) {
        char number[24];
        print_label(i % 16 == 0 ? label(NULL, i * p->rows / rows, number) : "", margin);
        for (int64_t j = 0; j < columns; j++) {
            double upper = pooled_weight(p, rows, columns, i, j);
            double lower = i + 1 < rows ? pooled_weight(p, rows, columns, i + 1, j) : 0;
            if (!colour) {
                int darkness = shade(p, fmax(upper, lower));
                fputs(darkness == 0 ? " " : shades[darkness], stdout);
                continue;
            }
            set_colour(p, upper, INK);
            if (i + 1 < rows) set_colour(p, lower, GROUND);
            fputs("▀", stdout);
        }
        printf("%s\n", colour ? "\033[0m" : "");
    }
    printf("  %*s 1%*" PRId64 "\n", margin, "", (int)columns - 1, p->columns);
}

/* ---- the whole ---- */

static void draw_legend(const picture *p, bool colour, int margin, bool pooled) {
    printf("\n  %*s 0 ", margin, "");
    for (int i = 0; i <= 20; i++) {
        double weight = p->top * i / 20;
        if (colour) set_colour(p, weight, GROUND);
        fputs(colour ? " " : shades[shade(p, weight)], stdout);
    }
    printf("%s %.2g%s   rows: queries, columns: keys%s\n", colour ? "\033[0m" : "", p->top,
           p->top < p->largest ? " and more" : "", pooled ? ", each cell the largest of several weights" : "");
}

void draw_in_terminal(const picture *p, bool colour, int width) {
    int margin = longest_label(p->row_words, p->rows), room = width - margin - 3;
    int cell = p->rows > MOST_CELL_ROWS ? 0 : 4 * p->columns <= room ? 4 : 2 * p->columns <= room ? 2 : 0;
    fputs("\n  ", stdout);
    fputs(p->title, stdout);
    fputs("\n\n", stdout);
    if (cell > 0) {
        bool summaries = p->column_words != NULL && cell * p->columns + 24 <= room;
        draw_cells(p, colour, margin, cell, summaries);
    } else {
        margin = longest_label(NULL, p->rows);
        draw_half_blocks(p, colour, margin, room > 16 ? room : 16);
    }
    bool pooled = cell == 0 && (p->columns > room || p->rows > 2 * MOST_LINES);
    draw_legend(p, colour, margin, pooled);
    if (cell == 4 && colour) printf("  %*s numbers are percent\n", margin, "");
    putchar('\n');
}
