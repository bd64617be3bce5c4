/* reverse.c - an attention layer learns to read backwards, from nothing, in seconds
 *
 * The model reads 16 symbols and a bar, and then writes the symbols backwards: attention please|esaelp noitnetta
 *
 *     x = token[symbol] + position[t]      embeddings
 *     y = attention(x)                     Rapt's layer, causal
 *     p = softmax(y . head)                the next symbol's probabilities
 *
 * All that training takes is here: data, loss, gradients, the loop, a checkpoint, and decoding from it with a cache. The
 * losses are the same on every run, for any number of threads, on every machine with fused multiply-add.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, isatty */

#include <rapt/rapt.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { LENGTH = 16, TIME = 2 * LENGTH };    /* symbols to reverse; tokens that are read: all but the last answer */
enum { BLANK = 26, BAR = 27, TOKENS = 28 }; /* letters are 0 to 25 */
enum { WIDTH = 64, HEADS = 2 };             /* the layer's embed_dim and num_heads */
enum { BATCH = 64, ROWS = BATCH * TIME, ANSWERS = BATCH * LENGTH, TESTS = 16 }; /* TESTS batches at the end */
typedef float vector[WIDTH];

static const char symbols[] = "abcdefghijklmnopqrstuvwxyz |";
static unsigned char tokens[BATCH][TIME + 1]; /* the bar is a mirror; [n][t] is read, [n][t + 1] foretold */
static vector x[ROWS], y[ROWS], mean[ROWS], d_x[ROWS], d_y[ROWS];
static float p[ROWS][TOKENS], lse[ROWS];
static vector token[TOKENS], position[TIME], head[TOKENS], d_token[TOKENS], d_position[TIME], d_head[TOKENS];
static const struct table {
    const char *name; /* in the checkpoint */
    vector *values, *gradients;
    int64_t rows;
} tables[3] = {{"token.weight", token, d_token, TOKENS},
               {"position.weight", position, d_position, TIME},
               {"head.weight", head, d_head, TOKENS}};

static uint64_t random_state;
static rapt_context *ctx;
static rapt_mha *layer;
static rapt_mha_gradients *gradients;
static rapt_mha_state *state; /* what a forward keeps for its backward */
static rapt_optimizer *optimizer;

static void check(rapt_status status) {
    if (status == RAPT_OK) return;
    fprintf(stderr, "reverse: %s\n", ctx == NULL ? rapt_status_text(status) : rapt_error_message(ctx));
    exit(2);
}

static rapt_tensor tensor(void *data, int64_t a, int64_t b, int64_t c) {
    return rapt_tensor_of(data, RAPT_F32, 3, (int64_t[]){a, b, c});
}

static uint32_t random_bits(void) { /* 31 of them */
    random_state = random_state * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(random_state >> 33);
}

static void create(uint64_t seed) {
    rapt_mha_config config = rapt_mha_config_default(WIDTH, HEADS);
    rapt_optimizer_config adamw = rapt_optimizer_config_default(RAPT_ADAMW);
    config.batch_first = config.causal = true;
    config.seed = random_state = seed;
    check(rapt_mha_create(ctx, &config, &layer));
    check(rapt_mha_gradients_create(ctx, layer, &gradients));
    check(rapt_mha_state_create(ctx, &state));
    check(rapt_optimizer_create(ctx, &adamw, &optimizer));
    check(rapt_optimizer_add_layer(ctx, optimizer, "attention.", layer, gradients));
    for (const struct table *t = tables; t < tables + 3; t++) {
        rapt_tensor values = tensor(t->values, 1, t->rows, WIDTH), d_values = tensor(t->gradients, 1, t->rows, WIDTH);
        check(rapt_optimizer_add(ctx, optimizer, t->name, &values, &d_values));
        for (int64_t i = 0; i < t->rows * WIDTH; i++) /* uniform within 0.1 */
            t->values[i / WIDTH][i % WIDTH] = 0.1F * ((float)(random_bits() >> 7) / 8388608 - 1);
    }
}

/* y [count, length, WIDTH] of the first sequences, from position `first` on. */
static void forward(int count, int first, int length, const rapt_options *options) {
    rapt_tensor in = tensor(x, count, length, WIDTH), out = tensor(y, count, length, WIDTH);
    for (int row = 0; row < count * length; row++)
        for (int e = 0; e < WIDTH; e++)
            x[row][e] = token[tokens[row / length][first + row % length]][e] + position[first + row % length][e];
    check(rapt_mha_forward(ctx, layer, &in, &in, &in, options, &out));
}

/* softmax(y . head) is attention, too: rows of y are the queries, head's are the keys, and the weights p [rows, TOKENS].
 * With head's rows for values, too, the output is their mean. The log-sum-exp of the scores comes with it. */
static void foretell(vector *from, int64_t rows) {
    rapt_tensor query = rapt_tensor_of(from, RAPT_F32, 4, (int64_t[]){1, 1, rows, WIDTH});
    rapt_tensor keys = rapt_tensor_of(head, RAPT_F32, 4, (int64_t[]){1, 1, TOKENS, WIDTH});
    rapt_tensor out = rapt_tensor_of(mean, RAPT_F32, 4, (int64_t[]){1, 1, rows, WIDTH});
    rapt_tensor weights = tensor(p, 1, rows, TOKENS), sums = tensor(lse, 1, 1, rows);
    rapt_options options = {.set_scale = true, .scale = 1, .weights = &weights, .lse = &sums};
    check(rapt_attention_forward(ctx, &query, &keys, &keys, &options, &out));
}

static unsigned char likeliest(int row) {
    int best = 0;
    for (int v = 1; v < TOKENS; v++) best = p[row][v] > p[row][best] ? v : best;
    return (unsigned char)best;
}

/* The mean loss of the answers, each log(sum(exp(y . head))) - y . head[answer], and its gradients: d_head, and d_y, which
 * is head's mean - head[answer]. *accuracy is the share of answers that were likeliest, in percent. */
static double cross_entropy(double *accuracy) {
    double loss = 0, right = 0;
    foretell(y, ROWS);
    for (int row = 0; row < ROWS; row++) {
        if (row % TIME < LENGTH) continue; /* what is only read is not foretold: d_y stays 0 */
        const unsigned char answer = tokens[row / TIME][row % TIME + 1];
        right += likeliest(row) == answer;
        loss += (double)lse[row];
        for (int e = 0; e < WIDTH; e++) {
            loss -= (double)y[row][e] * (double)head[answer][e];
            d_y[row][e] = (mean[row][e] - head[answer][e]) / ANSWERS;
        }
        p[row][answer] -= 1; /* now the gradient of y . head */
        for (int v = 0; v < TOKENS; v++)
            for (int e = 0; e < WIDTH; e++) d_head[v][e] += p[row][v] * y[row][e] / ANSWERS;
    }
    *accuracy = 100 * right / ANSWERS;
    return loss / ANSWERS;
}

/* A batch of new sequences (there are 27^16), what the model makes of them, and if it is to learn, a step. */
static double batch(bool learn, double *accuracy) {
    rapt_tensor d_in = tensor(d_x, BATCH, TIME, WIDTH), d_out = tensor(d_y, BATCH, TIME, WIDTH);
    for (int n = 0; n < BATCH; n++) {
        tokens[n][LENGTH] = BAR;
        for (int i = 0; i < LENGTH; i++) tokens[n][i] = tokens[n][TIME - i] = (unsigned char)(random_bits() % BAR);
    }
    check(rapt_optimizer_zero_gradients(ctx, optimizer));
    forward(BATCH, 0, TIME, &(rapt_options){.state = state});
    double loss = cross_entropy(accuracy);
    if (!learn) return loss;
    gradients->query = gradients->key = gradients->value = &d_in; /* x is all three: d_x gets the sum */
    check(rapt_mha_backward(ctx, layer, state, &d_out, NULL, gradients));
    for (int row = 0; row < ROWS; row++)
        for (int e = 0; e < WIDTH; e++) {
            d_token[tokens[row / TIME][row % TIME]][e] += d_x[row][e];
            d_position[row % TIME][e] += d_x[row][e];
        }
    check(rapt_optimizer_step(ctx, optimizer));
    return loss;
}

static void train(int steps, bool terminal) {
    static const char bar[] = "━━━━━━━━━━"; /* 10 times 3 bytes */
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 1; i <= steps; i++) {
        double accuracy, loss = batch(true, &accuracy);
        if (i % (terminal ? 5 : 50) != 0 && i != steps) continue;
        clock_gettime(CLOCK_MONOTONIC, &now);
        double seconds = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
        printf("%s  step %4d  loss %.4f  accuracy %5.1f %%  %4.0fk tokens/s  %4.1f s  %s", terminal ? "\r" : "\n", i,
               loss, accuracy, i * ROWS / seconds / 1000, seconds, terminal ? bar + 30 - 10 * i / steps * 3 : "");
        fflush(stdout);
    }
}

/* What the heads look at: a row for each symbol that is written, a column for each that is read. */
static void draw_attention(bool colour) {
    static const int ramp[] = {234, 53, 89, 125, 161, 203, 209, 215, 221, 228}; /* of the 256 colours */
    static float weights[HEADS][TIME][TIME];
    rapt_tensor map = rapt_tensor_of(weights, RAPT_F32, 4, (int64_t[]){1, HEADS, TIME, TIME});
    forward(1, 0, TIME, &(rapt_options){.weights = &map, .per_head_weights = true});
    for (int t = LENGTH - 1; t < TIME; t++, printf("\n")) /* the first line heads the columns */
        for (int h = 0; h < HEADS; h++) {
            printf("    %c ", t < LENGTH ? ' ' : symbols[tokens[0][t + 1]]);
            for (int j = 0; j < LENGTH; j++) {
                const int shade = (int)(9.99F * weights[h][t][j]);
                if (colour && t >= LENGTH) printf("\033[48;5;%dm", ramp[shade]);
                printf("%c ", t < LENGTH ? symbols[tokens[0][j]] : colour ? ' ' : ".:-=+*#%@@"[shade]);
            }
            if (colour) printf("\033[0m");
        }
}

/* Loads the model, and writes over the first sequence's answers what it makes of the symbols. */
static void decode(const char *path) {
    rapt_checkpoint *file;
    rapt_cache *cache;
    rapt_cache_config config = rapt_cache_config_default(1, TIME);
    check(rapt_checkpoint_open(ctx, path, &file));
    check(rapt_mha_load(ctx, file, NULL, &layer)); /* the only one there, and the file tells its heads */
    for (const struct table *t = tables; t < tables + 3; t++) {
        rapt_tensor from, to = tensor(t->values, 1, t->rows, WIDTH);
        memset(t->values, 0, (size_t)t->rows * sizeof *t->values); /* nothing is left but what is in the file */
        check(rapt_checkpoint_find(ctx, file, t->name, &from));
        check(rapt_tensor_copy(ctx, &from, &to));
    }
    rapt_checkpoint_close(file);
    check(rapt_cache_create(ctx, layer, &config, &cache));
    for (int t = 0, length = LENGTH + 1; t < TIME; t += length, length = 1) { /* what is given, then one by one */
        forward(1, t, length, &(rapt_options){.cache = cache});
        foretell(y + length - 1, 1);
        tokens[0][t + length] = likeliest(0);
    }
    rapt_cache_destroy(cache);
}

int main(int argc, char **argv) {
    enum { STEPS, THREADS, SEED, TEXT, SAVE, EXPECT_LOSS, OPTIONS };
    const char *names[] = {"--steps", "--threads", "--seed", "--text", "--save", "--expect-loss"};
    const char *values[] = {"400", "0", "1", "attention please", "reverse.safetensors", "inf"};
    for (int i = 1, o = 0; i < argc; i += 2, o = 0) {
        while (o < OPTIONS && strcmp(argv[i], names[o]) != 0) o++;
        if (o == OPTIONS || i + 1 == argc) {
            FILE *out = strcmp(argv[i], "--help") == 0 ? stdout : stderr;
            fputs("usage: reverse [--steps N] [--threads N] [--seed N] [--text T] [--save F] [--expect-loss X]\n", out);
            return out == stdout ? 0 : 2;
        }
        values[o] = argv[i + 1];
    }
    const bool terminal = isatty(STDOUT_FILENO) && getenv("NO_COLOR") == NULL;
    rapt_context_config config = rapt_context_config_default();
    config.num_threads = (int32_t)strtol(values[THREADS], NULL, 10);
    check(rapt_context_create(&config, &ctx));
    create(strtoull(values[SEED], NULL, 10));
    train((int)strtol(values[STEPS], NULL, 10), terminal);
    double loss = 0, accuracy = 0, one;
    for (int i = 0; i < TESTS; i++, accuracy += one / TESTS) loss += batch(false, &one) / TESTS;
    printf("\n  test       loss %.4f  accuracy %5.1f %%  on %d new sequences\n\n", loss, accuracy, TESTS * BATCH);
    printf("  What each head looks at: a row for each symbol written, a column for each read\n\n");

    for (int i = 0; i < LENGTH; i++) { /* blanks for other characters, and up to the bar */
        const char *symbol = *values[TEXT] == '\0' ? NULL : strchr(symbols, *values[TEXT]++);
        tokens[0][i] = tokens[0][TIME - i] = symbol == NULL ? BLANK : (unsigned char)(symbol - symbols);
    }
    draw_attention(terminal);
    check(rapt_optimizer_save(ctx, optimizer, values[SAVE]));
    rapt_optimizer_destroy(optimizer);
    rapt_mha_gradients_destroy(gradients);
    rapt_mha_state_destroy(state);
    rapt_mha_destroy(layer);
    bool right = true;
    decode(values[SAVE]);
    printf("\n  decoded from %s: ", values[SAVE]);
    for (int t = 0; t <= TIME; t++) putchar(symbols[tokens[0][t]]);
    for (int t = 0; t < LENGTH; t++) right = right && tokens[0][t] == tokens[0][TIME - t];
    printf("  %s\n", right ? "right" : "wrong");
    rapt_mha_destroy(layer);
    rapt_context_destroy(ctx);
    return right && loss <= strtod(values[EXPECT_LOSS], NULL) ? 0 : 1;
}
