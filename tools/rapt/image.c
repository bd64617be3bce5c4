/* image.c - a map of weights as SVG, with axes and labels, and as PNG */
#include "picture.h"

#include "cli.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- SVG ---- */

enum { SVG_CELLS = 256, SVG_LEVELS = 64, SVG_SIDE = 640, FONT = 13 }; /* most cells a side, colours, points */

static void put_escaped(FILE *f, const char *text) {
    for (; *text != '\0'; text++) {
        bool special = strchr("<>&\"", *text) != NULL;
        fprintf(f, special ? "&#%d;" : "%c", *text);
    }
}

static int level_of(const picture *p, double weight) { return (int)lround((SVG_LEVELS - 1) * share_of_top(p, weight)); }

/* One path for each colour, over a ground of the darkest, in which neighbours of a row are one rectangle: small, and
 * without seams. */
static void put_cells(FILE *f, const picture *p, int64_t rows, int64_t columns) {
    unsigned char *level = allocate((size_t)(rows * columns));
    for (int64_t i = 0; i < rows * columns; i++)
        level[i] = (unsigned char)level_of(p, pooled_weight(p, rows, columns, i / columns, i % columns));
    for (int colour = 0; colour < SVG_LEVELS; colour++) {
        rgb c = ramp_colour((double)colour / (SVG_LEVELS - 1));
        bool any = colour == 0; /* the ground */
        if (any)
            fprintf(f, "<path fill=\"#%02x%02x%02x\" d=\"M0 0h%" PRId64 "v%" PRId64 "H0z", c.r, c.g, c.b, columns,
                    rows);
        for (int64_t i = 0; colour > 0 && i < rows; i++) {
            for (int64_t j = 0, end; j < columns; j = end) {
                for (end = j + 1; end < columns && level[i * columns + end] == level[i * columns + j];) end++;
                if (level[i * columns + j] != colour) continue;
                if (!any) fprintf(f, "<path fill=\"#%02x%02x%02x\" d=\"", c.r, c.g, c.b);
                any = true;
                fprintf(f, "M%" PRId64 " %" PRId64 "h%" PRId64 "v1H%" PRId64 "z", j, i, end - j, j);
            }
        }
        if (any) fprintf(f, "\"/>\n");
    }
}

static void put_numbers(FILE *f, const picture *p, double side) {
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->columns; j++) {
            double weight = p->weights[i * p->columns + j];
            if (weight < 0.005) continue;
            fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" fill=\"%s\">%.0f</text>\n", ((double)j + 0.5) * side,
                    ((double)i + 0.5) * side + 4, weight > 0.45 * p->top ? "#000" : "#ddd", 100 * weight);
        }
    }
}

/* Labels of one axis at the middle of their cells; numbers only at some if they are many. */
static void put_labels(FILE *f, const char *const *words, int64_t count, double side, bool down) {
    int64_t step = 1;
    double room = words == NULL && !down ? 3 * FONT : FONT + 3;
    for (int k = 0; (double)step * side < room && step < count; k++)
        step = k % 3 == 1 ? step * 5 / 2 : step * 2; /* 1 2 5 10 */
    for (int64_t i = 0; i < count; i += step) {
        double at = ((double)i + 0.5) * side;
        if (down) fprintf(f, "<text x=\"-8\" y=\"%.1f\" text-anchor=\"end\">", at + 4);
        if (!down && words != NULL) fprintf(f, "<text transform=\"translate(%.1f -8) rotate(-60)\">", at + 4);
        if (!down && words == NULL) fprintf(f, "<text x=\"%.1f\" y=\"-8\" text-anchor=\"middle\">", at);
        if (words != NULL) put_escaped(f, words[i]);
        if (words == NULL) fprintf(f, "%" PRId64, i + 1);
        fprintf(f, "</text>\n");
    }
}

static size_t longest_bytes(const char *const *words, int64_t count) {
    size_t longest = 5; /* a number's */
    for (int64_t i = 0; words != NULL && i < count; i++)
        if (strlen(words[i]) > longest) longest = strlen(words[i]);
    return longest < 30 ? longest : 30;
}

static void put_colour_bar(FILE *f, const picture *p, double x, double height) {
    enum { STEPS = 32 };
    for (int i = 0; i < STEPS; i++) {
        rgb c = ramp_colour(1 - (double)i / (STEPS - 1));
        fprintf(f, "<rect x=\"%.1f\" y=\"%.2f\" width=\"14\" height=\"%.2f\" fill=\"#%02x%02x%02x\"/>\n", x,
                height * i / STEPS, height / STEPS + 0.5, c.r, c.g, c.b);
    }
    fprintf(f, "<text x=\"%.1f\" y=\"10\">%s%.2g</text>\n", x + 20, p->top < p->largest ? "&#8805; " : "", p->top);
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\">0</text>\n", x + 20, height);
}

static void put_svg(FILE *f, const picture *p) {
    int64_t rows = p->rows < SVG_CELLS ? p->rows : SVG_CELLS, columns = p->columns < SVG_CELLS ? p->columns : SVG_CELLS;
    double longer = (double)(rows > columns ? rows : columns), side = fmin(36, SVG_SIDE / longer);
    double w = side * (double)columns, h = side * (double)rows;
    double left = 24 + FONT * 0.6 * (double)longest_bytes(p->row_words, p->rows) + FONT;
    double top =
        52 +
        (p->column_words == NULL ? 2 * FONT : FONT * 0.56 * (double)longest_bytes(p->column_words, p->columns) + FONT);
    double width = fmax(left + w + 110, 24 + FONT * 0.62 * (double)strlen(p->title));
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
            "font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"%d\" fill=\"#333\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n<text x=\"16\" y=\"26\" font-size=\"15\" "
            "font-weight=\"600\">",
            width, top + h + 40, width, top + h + 40, FONT);
    put_escaped(f, p->title);
    fprintf(f, "</text>\n<g transform=\"translate(%.1f %.1f)\">\n<g transform=\"scale(%.6g %.6g)\">\n", left, top, side,
            side);
    put_cells(f, p, rows, columns);
    fprintf(f, "</g>\n");
    if (side >= 24) {
        fprintf(f, "<g text-anchor=\"middle\" font-size=\"11\">\n");
        put_numbers(f, p, side);
        fprintf(f, "</g>\n");
    }
    put_labels(f, p->row_words, p->rows, h / (double)p->rows, true);
    put_labels(f, p->column_words, p->columns, w / (double)p->columns, false);
    put_colour_bar(f, p, w + 16, h);
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"#777\">keys</text>\n", w / 2, h + 24);
    fprintf(
        f, "<text transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\" fill=\"#777\">queries</text>\n",
        14 - left, h / 2);
    fprintf(f, "</g>\n</svg>\n");
}

void write_svg(const picture *p, const char *path) {
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (f == NULL) fail("out of memory: %s", strerror(errno));
    put_svg(f, p);
    bool failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed) fail("out of memory while drawing '%s'", path);
    keep(text, free);
    bytes whole = {text, size};
    write_file(path, 1, &whole);
}

/* ---- PNG ---- */

enum { PNG_SIDE = 512, PNG_MOST = 4096 }; /* pixels of the longer side: at least about, at most */

typedef struct png {
    unsigned char *data;
    size_t used;
} png;

static void put_byte(png *out, unsigned int value) { out->data[out->used++] = (unsigned char)(value & 255); }
static void put_u32(png *out, uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) put_byte(out, value >> shift);
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

/* A chunk: length, type, content, CRC of the latter two. The length is written when the content is there. */
static size_t begin_chunk(png *out, const char *type) {
    size_t start = out->used;
    put_u32(out, 0);
    for (int i = 0; i < 4; i++) put_byte(out, (unsigned char)type[i]);
    return start;
}

static void end_chunk(png *out, size_t start) {
    png length = {out->data, start};
    put_u32(&length, (uint32_t)(out->used - start - 8));
    put_u32(out, crc32_of(out->data + start + 4, out->used - start - 4));
}

/* A zlib stream of stored blocks: nothing is compressed, so that nothing is needed to write it. */
static void put_stored(png *out, const unsigned char *data, size_t size) {
    enum { BLOCK = 65535 };
    uint32_t a = 1, b = 0; /* Adler-32 */
    put_byte(out, 0x78);
    put_byte(out, 0x01);
    for (size_t at = 0; at < size;) {
        size_t length = size - at < BLOCK ? size - at : BLOCK;
        put_byte(out, at + length == size);
        put_byte(out, (unsigned int)length);
        put_byte(out, (unsigned int)length >> 8);
        put_byte(out, ~(unsigned int)length);
        put_byte(out, ~(unsigned int)length >> 8);
        for (size_t end = at + length; at < end; at++) {
            put_byte(out, data[at]);
            a = (a + data[at]) % 65521;
            b = (b + a) % 65521;
        }
    }
    put_u32(out, b << 16 | a);
}

/* One byte a pixel, an index into 256 colours. */
void write_png(const picture *p, const char *path) {
    int64_t rows = p->rows < PNG_MOST ? p->rows : PNG_MOST, columns = p->columns < PNG_MOST ? p->columns : PNG_MOST;
    int64_t longer = rows > columns ? rows : columns, side = longer < PNG_SIDE ? (PNG_SIDE + longer - 1) / longer : 1;
    size_t width = (size_t)(columns * side), height = (size_t)(rows * side), size = height * (width + 1), at = 0;
    unsigned char *pixels = allocate(size);
    for (size_t y = 0; y < height; y++) {
        pixels[at++] = 0; /* the row's filter: none */
        if (y % (size_t)side != 0) {
            memcpy(pixels + at, pixels + at - width - 1, width);
            at += width;
            continue;
        }
        for (int64_t j = 0; j < columns; j++) {
            double weight = pooled_weight(p, rows, columns, (int64_t)y / side, j);
            memset(pixels + at, (int)lround(255 * share_of_top(p, weight)), (size_t)side);
            at += (size_t)side;
        }
    }

    static const unsigned char signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    png out = {.data = allocate(size + size / 65535 * 5 + 1024)}; /* with room for everything around the pixels */
    memcpy(out.data, signature, sizeof signature);
    out.used = sizeof signature;
    size_t chunk = begin_chunk(&out, "IHDR");
    put_u32(&out, (uint32_t)width);
    put_u32(&out, (uint32_t)height);
    static const unsigned char kind[] = {8, 3, 0, 0, 0}; /* bits, palette, and the only methods there are */
    for (size_t i = 0; i < sizeof kind; i++) put_byte(&out, kind[i]);
    end_chunk(&out, chunk);
    chunk = begin_chunk(&out, "PLTE");
    for (int i = 0; i < 256; i++) {
        rgb c = ramp_colour(i / 255.0);
        put_byte(&out, c.r);
        put_byte(&out, c.g);
        put_byte(&out, c.b);
    }
    end_chunk(&out, chunk);
    chunk = begin_chunk(&out, "IDAT");
    put_stored(&out, pixels, size);
    end_chunk(&out, chunk);
    end_chunk(&out, begin_chunk(&out, "IEND"));
    bytes whole = {out.data, out.used};
    write_file(path, 1, &whole);
}
