/* linear_backward_cpu.c - gradients of a projection y = x * weight^T + bias on the CPU
 *
 *     dx       = dy * weight     the forward's product with the weight transposed, packed for this call
 *     d_weight = dy^T * x        summed over ascending rows in chains, for a panel of outputs by a panel of inputs at a time
 *     d_bias   = the sum of dy   likewise
 */
#include "cpu.h"

/* ---- scratch: what dx needs, or what the parameters need, one after the other ---- */

static linear_problem input_problem(const linear_gradients *g) {
    rapt_tensor transposed = g->weight; /* [K, O] */
    for (int i = 0; i < 2; i++) {
        transposed.shape[i] = g->weight.shape[1 - i];
        transposed.stride[i] = g->weight.stride[1 - i];
    }
    linear_problem problem = {.dtype = g->dtype,
                              .batch = g->batch,
                              .length = g->length,
                              .features = g->features_out,
                              .x = g->dy,
                              .parts = 1,
                              .adds = g->adds_dx};
    problem.part[0] = (linear_part){.features = g->features_in, .weight = transposed, .y = g->dx};
    return problem;
}

static size_t packed_size(const linear_gradients *g) {
    return rapt_arena_size(rapt_linear_packed_size(g->dtype, g->features_in, g->features_out));
}

/* x or dy as panels of 64 features, [panel][rows][width]. */
static size_t panels_size(const linear_gradients *g, int64_t features) {
    size_t rows = rapt_size_mul((size_t)g->batch, (size_t)g->length);
    size_t reals = rapt_size_mul(rows, (size_t)rapt_round_up(features, COLUMNS));
    return rapt_arena_size(rapt_size_mul(rapt_accumulation_size(g->dtype), reals));
}

static size_t lane_size(const linear_gradients *g) { return rapt_accumulation_size(g->dtype) * PANEL * PANEL; }

size_t rapt_cpu_linear_backward_scratch(const rapt_context *context, const linear_gradients *g) {
    size_t input = 0, parameters = 0;
    if (g->dx.data != NULL) {
        linear_problem problem = input_problem(g);
        input = rapt_size_add(packed_size(g), rapt_cpu_linear_scratch(context, &problem));
    }
    if (g->d_weight.data != NULL || g->d_bias.data != NULL) {
        parameters = rapt_size_add(panels_size(g, g->features_in), panels_size(g, g->features_out));
        parameters = rapt_size_add(parameters, rapt_size_mul(lane_size(g), (size_t)context->lanes));
    }
    return input > parameters ? input : parameters;
}

/* ---- parameters ---- */

typedef struct parameter_job {
    const rapt_cpu_kernels *kernels;
    const linear_gradients *gradients;
    char *x, *dy, *lanes;
    bool packs_x, packs_dy;
    size_t real;
    int64_t rows;
    atomic_bool has_non_finite_x;
} parameter_job;

static char *panel_at(const parameter_job *job, char *panels, int64_t panel) {
    return panels + job->real * (size_t)(panel * PANEL * job->rows);
}

/* Whether rows are panels where they lie, as a layer's heads of 64 are. */
static bool are_panels(const linear_gradients *g, const rapt_rows *rows, int64_t features) {
    int64_t panel = g->batch * g->length * PANEL;
    return rows->dtype == rapt_accumulation_dtype(g->dtype) && features % PANEL == 0 && rows->stride[2] == 1 &&
           rows->stride[1] == PANEL && (g->batch == 1 || rows->stride[0] == g->length * PANEL) &&
           (features == PANEL || (rows->group == PANEL && rows->group_stride == panel));
}

/* Items are the panels of dy, then those of x, as far as they are packed; each by rows of all sequences. */
static void pack_panel(void *arg, int64_t panel, int32_t lane) {
    (void)lane;
    parameter_job *job = arg;
    const linear_gradients *g = job->gradients;
    int64_t outputs = job->packs_dy ? panels_of(g->features_out) : 0;
    bool is_x = panel >= outputs;
    if (is_x) panel -= outputs;
    int64_t features = is_x ? g->features_in : g->features_out, width = panel_width(features, panel);
    const rapt_rows *from = is_x ? &g->x : &g->dy;
    char *to = panel_at(job, is_x ? job->x : job->dy, panel);
    int64_t element = (int64_t)rapt_dtype_size(from->dtype);
    bool is_finite = true;
    for (int64_t n = 0; n < g->batch; n++) {
        is_finite &= job->kernels->pack_rows(
            to + job->real * (size_t)(n * g->length * width), width,
            from->data + element * (n * from->stride[0] + rapt_feature_at(from, panel * PANEL)), from->dtype, g->length,
            columns_of(features, panel), from->stride[1], from->stride[2]);
    }
    if (is_x && !is_finite) atomic_store_explicit(&job->has_non_finite_x, true, memory_order_relaxed);
}

static bool is_zero_row(const parameter_job *job, int64_t row) {
    rapt_dtype type = rapt_accumulation_dtype(job->gradients->dtype);
    for (int64_t o = 0; o < job->gradients->features_out; o++) {
        int64_t width = panel_width(job->gradients->features_out, o / PANEL);
        if (rapt_load(panel_at(job, job->dy, o / PANEL), type, row * width + o % PANEL) != 0) return false;
    }
    return true;
}

/* Once packed: zeros for x where dy is all zero, so that nothing of it reaches a sum. Rare, so never mind the speed. */
static void hide_row(void *arg, int64_t row, int32_t lane) {
    (void)lane;
    const parameter_job *job = arg;
    if (!is_zero_row(job, row)) return;
    for (int64_t k = 0; k < panels_of(job->gradients->features_in); k++) {
        size_t bytes = job->real * (size_t)panel_width(job->gradients->features_in, k);
        memset(panel_at(job, job->x, k) + (size_t)row * bytes, 0, bytes);
    }
}

static void store(const parameter_job *job, const char *row, int64_t count, const rapt_tensor *tensor, int64_t offset,
                  int64_t stride) {
    const linear_gradients *g = job->gradients;
    char *to = (char *)tensor->data + offset * (int64_t)rapt_dtype_size(g->dtype);
    (g->adds_parameters ? job->kernels->add_row : job->kernels->store_row)(row, count, to, g->dtype, stride);
}

/* One item: a panel of outputs by a panel of inputs. */
static void run_panels(void *arg, int64_t item, int32_t lane) {
    const parameter_job *job = arg;
    const linear_gradients *g = job->gradients;
    int64_t inputs = panels_of(g->features_in), o = item / inputs, k = item % inputs;
    int64_t outputs = columns_of(g->features_out, o), width = panel_width(g->features_in, k);
    const char *dy = panel_at(job, job->dy, o);
    int64_t dy_width = panel_width(g->features_out, o);
    char *c = job->lanes + (size_t)lane * lane_size(g);
    if (g->d_weight.data != NULL) {
        int64_t columns = columns_of(g->features_in, k), element = (int64_t)rapt_dtype_size(g->dtype);
        const int64_t *stride = g->d_weight.stride;
        int64_t first = o * PANEL * stride[0] + k * PANEL * stride[1];
        bool writes_in_place =
            job->real == (size_t)element && columns == width && stride[1] == 1 && !g->adds_parameters;
        char *y = writes_in_place ? (char *)g->d_weight.data + element * first : c;
        job->kernels->weight_panel(job->rows, dy, dy_width, outputs, panel_at(job, job->x, k), width, c, y,
                                   writes_in_place ? stride[0] : width);
        for (int64_t i = 0; i < outputs && !writes_in_place; i++) {
            store(job, c + job->real * (size_t)(i * width), columns, &g->d_weight, first + i * stride[0], stride[1]);
        }
    }
    if (g->d_bias.data != NULL && k == 0) {
        job->kernels->sum_rows(job->rows, dy, dy_width, c);
        store(job, c, outputs, &g->d_bias, o * PANEL * g->d_bias.stride[0], g->d_bias.stride[0]);
    }
}

void rapt_cpu_linear_backward(rapt_context *context, const linear_gradients *g, void *scratch) {
    double rows = (double)g->batch * (double)g->length, weights = (double)g->features_in * (double)g->features_out;
    if (g->dx.data != NULL) {
        linear_problem problem = input_problem(g);
        linear_part *part = &problem.part[0];
        rapt_linear_pack(context, &part->weight, &part->bias, scratch);
        part->packed = scratch;
        rapt_cpu_linear(context, &problem, (char *)scratch + packed_size(g));
    }
    if (g->d_weight.data == NULL && g->d_bias.data == NULL) return;
    parameter_job job = {.kernels = context->kernels[g->dtype == RAPT_F64],
                         .gradients = g,
                         .x = scratch,
                         .packs_x = g->hides_rows || !are_panels(g, &g->x, g->features_in),
                         .packs_dy = !are_panels(g, &g->dy, g->features_out),
                         .real = rapt_accumulation_size(g->dtype),
                         .rows = g->batch * g->length};
    job.dy = job.x + panels_size(g, g->features_in);
    job.lanes = job.dy + panels_size(g, g->features_out);
    if (!job.packs_x) job.x = g->x.data;
    if (!job.packs_dy) job.dy = g->dy.data;
    int64_t inputs = panels_of(g->features_in), outputs = panels_of(g->features_out);
    int64_t packed = (job.packs_x ? inputs : 0) + (job.packs_dy ? outputs : 0);
    rapt_parallel(context, packed, rows * (double)(packed * PANEL), pack_panel, &job);
    if (g->hides_rows && atomic_load_explicit(&job.has_non_finite_x, memory_order_relaxed)) {
        rapt_parallel(context, job.rows, rows * (double)(inputs + outputs) * PANEL, hide_row, &job);
    }
    rapt_parallel(context, inputs * outputs, rows * weights, run_panels, &job);
}
