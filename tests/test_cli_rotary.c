/* test_cli_rotary.c - rapt run and rapt check of a layer as Llama's are: heads in groups, rotary positions; against plain
 * loops in double precision that know nothing of the library */
#include "cli_support.h"

#include <math.h>

enum { N = 2, L = 7, E = 10, H = 4, HK = 2, D = 6, ROWS = N * L };
#define LLAMA "llama.safetensors --prefix m.self_attn --heads 4 --input xs.npy --dtype f64 "

static float wq[H * D][E], wk[HK * D][E], wv[HK * D][E], wo[E][H * D], xs[ROWS][E];

/* ---- the layer by plain loops ---- */

typedef struct turning {
    int dims; /* of each head; 0: none */
    bool interleaved;
    double speed[D / 2], amplitude;
} turning;

static void project(int out, int in, const float weight[out][in], const double x[in], double y[out]) {
    for (int o = 0; o < out; o++) {
        y[o] = 0;
        for (int i = 0; i < in; i++) y[o] += (double)weight[o][i] * x[i];
    }
}

static void turn(const turning *t, int position, int heads, double x[heads * D]) {
    for (int h = 0; h < heads; h++) {
        for (int p = 0; p < t->dims / 2; p++) {
            double *a = &x[h * D + (t->interleaved ? 2 * p : p)];
            double *b = &x[h * D + (t->interleaved ? 2 * p + 1 : p + t->dims / 2)];
            double angle = position * t->speed[p], before = *a;
            *a = t->amplitude * (before * cos(angle) - *b * sin(angle));
            *b = t->amplitude * (*b * cos(angle) + before * sin(angle));
        }
    }
}

/* Causal; the files of outputs and weights that rapt check should find right. */
static void write_expected(const turning *t) {
    static double q[ROWS][H * D], k[ROWS][HK * D], v[ROWS][HK * D], y[ROWS][E], weights[N][H][L][L];
    memset(weights, 0, sizeof weights);
    for (int row = 0; row < ROWS; row++) {
        double x[E], attended[H * D] = {0};
        int n = row / L, i = row % L;
        for (int e = 0; e < E; e++) x[e] = (double)xs[row][e];
        project(H * D, E, wq, x, q[row]);
        project(HK * D, E, wk, x, k[row]);
        project(HK * D, E, wv, x, v[row]);
        turn(t, i, H, q[row]);
        turn(t, i, HK, k[row]);
        for (int h = 0; h < H; h++) {
            double *w = weights[n][h][i], sum = 0;
            for (int j = 0; j <= i; j++) {
                double score = 0;
                for (int d = 0; d < D; d++) score += q[row][h * D + d] * k[n * L + j][h / (H / HK) * D + d];
                w[j] = exp(score / sqrt(D));
                sum += w[j];
            }
            for (int j = 0; j <= i; j++) {
                w[j] /= sum;
                for (int d = 0; d < D; d++) attended[h * D + d] += w[j] * v[n * L + j][h / (H / HK) * D + d];
            }
        }
        project(E, H * D, wo, attended, y[row]);
    }
    write_npy("ys.npy", 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 7, 10), }", y, sizeof y);
    write_npy("ws.npy", 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 4, 7, 7), }", weights,
              sizeof weights);
}

/* ---- speeds, as Hugging Face Transformers computes them ---- */

static turning plain(double base, int dims) {
    turning t = {.dims = dims, .amplitude = 1};
    for (int p = 0; p < dims / 2; p++) t.speed[p] = pow(base, -2.0 * p / dims);
    return t;
}

static turning interleaved(double base, int dims) {
    turning t = plain(base, dims);
    t.interleaved = true;
    return t;
}

static turning linear(double base, double factor) {
    turning t = plain(base, D);
    for (int p = 0; p < D / 2; p++) t.speed[p] /= factor;
    return t;
}

static turning ntk(double base, double factor, double original) {
    return plain(base * pow(factor * L / original - (factor - 1), D / (D - 2.0)), D);
}

static turning llama3(double base, double factor, double original, double low, double high) {
    turning t = plain(base, D);
    for (int p = 0; p < D / 2; p++) {
        double wavelength = 2 * M_PI / t.speed[p], smooth = (original / wavelength - low) / (high - low);
        double slow = t.speed[p] / factor;
        if (wavelength > original / low) {
            t.speed[p] = slow;
        } else if (wavelength >= original / high) {
            t.speed[p] = (1 - smooth) * slow + smooth * t.speed[p];
        }
    }
    return t;
}

static turning yarn(double base, double factor, double original, double low_turns, double high_turns) {
    turning t = plain(base, D);
    double low = floor(D * log(original / (high_turns * 2 * M_PI)) / (2 * log(base)));
    double high = ceil(D * log(original / (low_turns * 2 * M_PI)) / (2 * log(base)));
    low = fmax(low, 0);
    high = fmin(high, D - 1);
    for (int p = 0; p < D / 2; p++) {
        double ramp = fmin(fmax((p - low) / (high - low), 0), 1);
        t.speed[p] = t.speed[p] / factor * ramp + t.speed[p] * (1 - ramp);
    }
    t.amplitude = 0.1 * log(factor) + 1;
    return t;
}

/* ---- tests ---- */

static int set_up_llama(void **state) {
    if (set_up_cli(state) != 0) return -1;
    static const char *const names[4] = {"m.self_attn.q_proj.weight", "m.self_attn.k_proj.weight",
                                         "m.self_attn.v_proj.weight", "m.self_attn.o_proj.weight"};
    float *const values[5] = {&wq[0][0], &wk[0][0], &wv[0][0], &wo[0][0], &xs[0][0]};
    const int64_t shapes[5][2] = {{H * D, E}, {HK * D, E}, {HK * D, E}, {E, H * D}, {ROWS, E}};
    rapt_tensor tensors[5];
    for (int i = 0; i < 5; i++) {
        rapt_tensor random = random_tensor((uint64_t)i, RAPT_F32, 2, shapes[i]);
        memcpy(values[i], random.data, (size_t)(shapes[i][0] * shapes[i][1]) * sizeof(float));
        free_tensor(&random);
        tensors[i] = rapt_tensor_of(values[i], RAPT_F32, 2, shapes[i]);
    }
    assert_ok(context, rapt_safetensors_save(context, path_of("llama.safetensors"), 4, names, tensors, 0, NULL));
    write_npy("xs.npy", 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 7, 10), }", xs, sizeof xs);
    return 0;
}

static bool is_as_expected(const char *arguments) {
    char line[512];
    snprintf(line, sizeof line, "check " LLAMA "--causal %s --expect ys.npy --expect-weights ws.npy", arguments);
    return rapt(line) == 0;
}

static void test_positions(void **state) {
    (void)state;
    const struct {
        const char *arguments;
        turning turning;
    } rows[] = {
        {"", {.dims = 0}},
        {"--kv-heads 2", {.dims = 0}},
        {"--rope 10000", plain(10000, D)},
        {"--rope 5e5 --kv-heads 2", plain(500000, D)},
        {"--rope=10 --rope-dims 4", plain(10, 4)},
        {"--rope 10 --rope-interleaved", interleaved(10, D)},
        {"--rope 10 --rope-interleaved --rope-dims=2", interleaved(10, 2)},
        {"--rope 10 --rope-scaling linear:4", linear(10, 4)},
        {"--rope 10 --rope-scaling ntk:2,3", ntk(10, 2, 3)},
        {"--rope 10 --rope-scaling ntk:2,100", plain(10, D)}, /* no longer than it was trained for */
        {"--rope 10 --rope-scaling llama3:8,20", llama3(10, 8, 20, 1, 4)},
        {"--rope 10 --rope-scaling llama3:8,20,0.5,2", llama3(10, 8, 20, 0.5, 2)},
        {"--rope 10 --rope-scaling yarn:4,20", yarn(10, 4, 20, 1, 32)},
        {"--rope 10 --rope-scaling yarn:4,100,1,3", yarn(10, 4, 100, 1, 3)},
    };
    enum { CASES = sizeof rows / sizeof *rows };
    for (int i = 0; i < CASES; i++) {
        write_expected(&rows[i].turning);
        if (!is_as_expected(rows[i].arguments)) fail_msg("%s:\n%s%s", rows[i].arguments, out_text, err_text);
        /* what another row computes is not near, or this would show nothing */
        const turning *other = &rows[(i + 2) % CASES].turning;
        bool same = memcmp(rows[i].turning.speed, other->speed, sizeof other->speed) == 0;
        if (!same && is_as_expected(rows[(i + 2) % CASES].arguments))
            fail_msg("%s and its neighbour", rows[i].arguments);
    }
}

static void test_reports(void **state) {
    (void)state;
    succeeds("run " LLAMA "--rope 10000");
    assert_has(out_text, "num_heads=4, num_kv_heads=2");
    assert_has(out_text, "\nrotary   base 10000, halves\n");
    succeeds("run " LLAMA "--rope 500000 --rope-dims 4 --rope-interleaved --rope-scaling llama3:8,8192");
    assert_has(out_text, "\nrotary   base 500000, interleaved, 4 features, llama3 by 8 from 8192\n");
    succeeds("run " LLAMA);
    assert_null(strstr(out_text, "rotary"));
    succeeds("run " LLAMA "--rope 10000 --json");
    assert_has(out_text, "\"rotary\": {\"base\": 10000, \"dims\": 6, \"interleaved\": false, \"scaling\": null},\n");
    succeeds("run " LLAMA "--rope 10 --rope-dims 2 --rope-interleaved --rope-scaling yarn:4,20 --json");
    assert_has(out_text, "\"rotary\": {\"base\": 10, \"dims\": 2, \"interleaved\": true, \"scaling\": \"yarn\", "
                         "\"factor\": 4, \"original_length\": 20, \"low\": 1, \"high\": 32},\n");
}

static void test_mistakes(void **state) {
    (void)state;
    static const struct {
        int status;
        const char *arguments, *message;
    } rows[] = {
        {2, "--rope llama", "--rope: 'llama' is not a number"},
        {2, "--rope 0.5", "--rope: 0.5 is not from 1 to"},
        {2, "--rope-dims 4", "--rope-dims needs --rope BASE"},
        {2, "--rope-interleaved", "--rope-interleaved needs --rope BASE"},
        {2, "--rope-scaling linear:2", "--rope-scaling needs --rope BASE"},
        {2, "--rope 10 --rope-dims 1", "--rope-dims: 1 is not from 2 to"},
        {2, "--rope 10 --rope-scaling longrope:2", "'longrope:2' begins with none of linear:, ntk:, llama3:, yarn:"},
        {2, "--rope 10 --rope-scaling line:2", "'line:2' begins with none of"},
        {2, "--rope 10 --rope-scaling linear", "linear has 0 numbers, expected 1, the factor"},
        {2, "--rope 10 --rope-scaling linear:2,3", "linear has 2 numbers, expected 1, the factor"},
        {2, "--rope 10 --rope-scaling linear:two", "--rope-scaling: 'two' is not a number"},
        {2, "--rope 10 --rope-scaling linear:", "--rope-scaling: '' is not a number"},
        {2, "--rope 10 --rope-scaling ntk:2", "ntk has 1 numbers, expected 2, the factor and the original length"},
        {2, "--rope 10 --rope-scaling ntk:2,0.5", "the original length is 0.5, expected a whole number from"},
        {2, "--rope 10 --rope-scaling ntk:2,8192.5", "the original length is 8192.5, expected a whole number from"},
        {2, "--rope 10 --rope-scaling linear:0.0000000000000000000000000000000000000000000000000000000000000000001",
         "has a number of 69 characters"},
        {2, "--rope 10 --rope-scaling yarn:2,9,1", "yarn has 3 numbers, expected 2 or 4"},
        {2, "--rope 10 --rope-scaling llama3:1,2,3,4,5,6", "llama3 has 6 numbers, expected 2 or 4"},
        {1, "--rope 1", "rotary.base is 1, expected a number above 1"},
        {1, "--rope 10 --rope-dims 3", "rotary.dims is 3, expected an even number from 2 to head_dim 6"},
        {1, "--rope 10 --rope-dims 8", "rotary.dims is 8, expected an even number from 2 to head_dim 6"},
        {1, "--rope 10 --rope-scaling linear:0", "rotary.factor is 0, expected a number above 0"},
        {1, "--rope 10 --rope-scaling llama3:8,20,4,1", "rotary.high_turns is 1, expected a number above 4"},
        {1, "--kv-heads 4", "num_kv_heads is 4, but the tensors' shapes give 2"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char line[512];
        snprintf(line, sizeof line, "run " LLAMA "%s", rows[i].arguments);
        fails(rows[i].status, line, rows[i].message);
    }
    fails(1, "run llama.safetensors --heads 3 --kv-heads 2 --input xs.npy",
          "num_heads 3 gives head_dim 8, which does not divide the 12 outputs of k");
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_reports),
        cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests_name("command-line tool: rotary positions", tests, set_up_llama, tear_down_cli);
}
