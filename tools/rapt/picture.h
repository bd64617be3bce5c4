/* picture.h - a map of attention weights, drawn in a terminal, as SVG or as PNG */
#ifndef RAPT_TOOL_PICTURE_H
#define RAPT_TOOL_PICTURE_H

#include "files.h"

typedef struct picture {
    int64_t rows, columns; /* queries, keys */
    const double *weights; /* [rows][columns] */
    double top;            /* the brightest colour's weight; few are above it */
    double largest;
    const char *title;                                  /* it and the words are UTF-8 without control characters */
    const char *const *row_words, *const *column_words; /* NULL: numbers instead */
} picture;

double share_of_top(const picture *p, double weight); /* in [0, 1] */
/* The largest weight of the block of cells that becomes cell (row, column) of a picture of rows x columns. */
double pooled_weight(const picture *p, int64_t rows, int64_t columns, int64_t row, int64_t column);

typedef struct rgb {
    unsigned char r, g, b;
} rgb;
rgb ramp_colour(double share); /* from dark at 0 to bright at 1 */

void draw_in_terminal(const picture *p, bool colour, int width);
void write_svg(const picture *p, const char *path);
void write_png(const picture *p, const char *path);

#endif
