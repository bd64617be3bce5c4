/* test_optimizer_errors.c - what optimisers refuse, and that a refused call, or one without memory, changes nothing */
#include "checkpoint_support.h"

/* ---- a scene: a layer, a parameter of the caller's, and the optimiser that has both ---- */

typedef struct scene {
    rapt_optimizer_config config;
    rapt_mha *layer;
    rapt_mha_gradients *gradients;
    rapt_tensor p, g; /* "p", [2,3] */
    rapt_optimizer *optimizer;
} scene;

static scene make_scene(rapt_optimizer_kind kind) {
    scene s = {.config = rapt_optimizer_config_default(kind)};
    rapt_mha_config layer_config = kind_of_layer(3, RAPT_F32);
    s.layer = create_random(&layer_config);
    assert_ok(context, rapt_mha_gradients_create(context, s.layer, &s.gradients));
    fill_value(s.gradients->bias_v, 0.25);
    s.p = random_tensor(1, RAPT_F32, 2, (int64_t[]){2, 3});
    s.g = random_tensor(2, RAPT_F32, 2, (int64_t[]){2, 3});
    assert_ok(context, rapt_optimizer_create(context, &s.config, &s.optimizer));
    assert_ok(context, rapt_optimizer_add_layer(context, s.optimizer, "m.", s.layer, s.gradients));
    assert_ok(context, rapt_optimizer_add(context, s.optimizer, "p", &s.p, &s.g));
    return s;
}

static void free_scene(scene *s) {
    rapt_optimizer_destroy(s->optimizer);
    rapt_mha_gradients_destroy(s->gradients);
    rapt_mha_destroy(s->layer);
    free_tensors(&s->p, &s->g);
}

/* Everything that a call could change: the file shows the states, names and steps. */
static uint64_t sum_scene(const scene *s) {
    uint64_t sum = checksum(checksum(sum_layer(s->layer), &s->p), &s->g);
    sum = checksum(sum, s->gradients->bias_v);
    const char *path = in_folder("sum.safetensors");
    assert_ok(context, rapt_optimizer_save(context, s->optimizer, path));
    size_t size;
    unsigned char *bytes = read_bytes(path, &size);
    for (size_t i = 0; i < size; i++) sum = (sum ^ bytes[i]) * 0x100000001b3ULL;
    free(bytes);
    return sum;
}

static void refused(int line, rapt_status status, rapt_status expected, const char *text) {
    if (status != expected || strstr(rapt_error_message(context), text) == NULL)
        fail_msg("line %d: got %s, \"%s\"; expected %s, \"%s\"", line, rapt_status_name(status),
                 status == RAPT_OK ? "" : rapt_error_message(context), rapt_status_name(expected), text);
}
#define REFUSED(expected, text, call) refused(__LINE__, call, RAPT_##expected, text)

/* ---- settings ---- */

static rapt_optimizer_config sgd(void) { return rapt_optimizer_config_default(RAPT_SGD); }
static rapt_optimizer_config adamw(void) { return rapt_optimizer_config_default(RAPT_ADAMW); }

#define CONFIG(status, text, kind, change)                                                                             \
    do {                                                                                                               \
        struct {                                                                                                       \
            rapt_optimizer_config c;                                                                                   \
            unsigned char tail[16];                                                                                    \
        } given = {.c = kind()};                                                                                       \
        rapt_optimizer_config *c = &given.c;                                                                           \
        change;                                                                                                        \
        rapt_optimizer *made = (rapt_optimizer *)(void *)&given;                                                       \
        rapt_status result = rapt_optimizer_create(context, c, &made);                                                 \
        if (RAPT_##status == RAPT_OK) assert_ok(context, result);                                                      \
        if (RAPT_##status != RAPT_OK) refused(__LINE__, result, RAPT_##status, text);                                  \
        assert_int_equal(made != NULL, RAPT_##status == RAPT_OK);                                                      \
        rapt_optimizer_destroy(made);                                                                                  \
    } while (0)

static void test_settings(void **state) {
    (void)state;
    CONFIG(ERROR_ARGUMENT, "config.struct_size is 3, expected", sgd, c->struct_size = 3);
    CONFIG(ERROR_ARGUMENT, "(start from rapt_optimizer_config_default())", sgd, c->struct_size = 0);
    CONFIG(OK, "", sgd, c->struct_size += 16);
    CONFIG(ERROR_UNSUPPORTED, "config sets a field", sgd, (c->struct_size += 16, given.tail[15] = 1));
    CONFIG(ERROR_ARGUMENT, "config.kind is 2, expected RAPT_SGD or RAPT_ADAMW", sgd, c->kind = (rapt_optimizer_kind)2);
    CONFIG(ERROR_ARGUMENT, "config.learning_rate is -0.1, expected a finite number", sgd, c->learning_rate = -0.1);
    CONFIG(ERROR_ARGUMENT, "config.learning_rate is inf", adamw, c->learning_rate = INFINITY);
    CONFIG(ERROR_ARGUMENT, "config.learning_rate is nan", adamw, c->learning_rate = (double)NAN);
    CONFIG(OK, "", sgd, c->learning_rate = 0);
    CONFIG(ERROR_ARGUMENT, "config.weight_decay is -1, expected a finite", sgd, c->weight_decay = -1);
    CONFIG(ERROR_ARGUMENT, "config.weight_decay is nan", adamw, c->weight_decay = (double)NAN);
    CONFIG(ERROR_ARGUMENT, "config.momentum is 1, expected at least 0 and below 1", sgd, c->momentum = 1);
    CONFIG(ERROR_ARGUMENT, "config.momentum is -0.5", sgd, c->momentum = -0.5);
    CONFIG(ERROR_ARGUMENT, "config.momentum is nan", sgd, c->momentum = (double)NAN);
    CONFIG(ERROR_ARGUMENT, "config.dampening is 1.5, expected 0 to 1", sgd, c->dampening = 1.5);
    CONFIG(ERROR_ARGUMENT, "config.dampening is nan", sgd, c->dampening = (double)NAN);
    CONFIG(ERROR_ARGUMENT, "config.nesterov needs momentum above 0 and dampening 0; they are 0 and 0", sgd,
           c->nesterov = true);
    CONFIG(ERROR_ARGUMENT, "they are 0.9 and 0.1", sgd, (c->nesterov = true, c->momentum = 0.9, c->dampening = 0.1));
    CONFIG(OK, "", sgd, (c->nesterov = true, c->momentum = 0.9));
    CONFIG(ERROR_ARGUMENT, "config.beta1 is 1, expected at least 0 and below 1", adamw, c->beta1 = 1);
    CONFIG(ERROR_ARGUMENT, "config.beta1 is nan", adamw, c->beta1 = (double)NAN);
    CONFIG(ERROR_ARGUMENT, "config.beta2 is -0.1", adamw, c->beta2 = -0.1);
    CONFIG(ERROR_ARGUMENT, "config.beta2 is 2", adamw, c->beta2 = 2);
    CONFIG(OK, "", adamw, c->beta1 = c->beta2 = c->epsilon = 0);
    CONFIG(ERROR_ARGUMENT, "config.epsilon is -1e-08", adamw, c->epsilon = -1e-8);
    CONFIG(ERROR_ARGUMENT, "config.epsilon is inf", adamw, c->epsilon = INFINITY);
    CONFIG(ERROR_ARGUMENT, "config.momentum is set, which AdamW has not", adamw, c->momentum = 0.9);
    CONFIG(ERROR_ARGUMENT, "config.dampening is set", adamw, c->dampening = 0.1);
    CONFIG(ERROR_ARGUMENT, "config.nesterov is set", adamw, c->nesterov = true);
    rapt_optimizer *made;
    rapt_optimizer_config config = sgd();
    REFUSED(ERROR_NULL, "config is NULL", rapt_optimizer_create(context, NULL, &made));
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_create(context, &config, NULL));
    assert_int_equal(rapt_optimizer_create(NULL, &config, &made), RAPT_ERROR_NULL);
}

/* ---- calls ---- */

#define ADD(status, text, change)                                                                                      \
    do {                                                                                                               \
        rapt_tensor a = x, b = y;                                                                                      \
        const rapt_tensor *parameter_given = &a, *gradient_given = &b;                                                 \
        const char *name = "new";                                                                                      \
        change;                                                                                                        \
        REFUSED(status, text, rapt_optimizer_add(context, s.optimizer, name, parameter_given, gradient_given));        \
        if (sum_scene(&s) != before) fail_msg("line %d: the call changed something", __LINE__);                        \
    } while (0)

static void test_add(void **state) {
    (void)state;
    scene s = make_scene(RAPT_ADAMW);
    rapt_tensor x = make_tensor(RAPT_F32, 2, (int64_t[]){4, 4}), y = make_tensor(RAPT_F32, 2, (int64_t[]){4, 4});
    uint64_t before = sum_scene(&s);
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_add(context, NULL, "new", &x, &y));
    ADD(ERROR_NULL, "name is NULL", name = NULL);
    ADD(ERROR_NULL, "parameter is NULL", parameter_given = NULL);
    ADD(ERROR_NULL, "gradient is NULL", gradient_given = NULL);
    ADD(ERROR_ARGUMENT, "name is not valid UTF-8", name = "\xff");
    ADD(ERROR_ARGUMENT, "name is __metadata__", name = "__metadata__");
    ADD(ERROR_ARGUMENT, "name is 'optimizer.p.exp_avg', but those that begin with optimizer.",
        name = "optimizer.p.exp_avg");
    ADD(ERROR_ARGUMENT, "name is 'p', which the optimiser has already", name = "p");
    ADD(ERROR_ARGUMENT, "name is 'm.bias_k', which the optimiser has already", name = "m.bias_k");
    ADD(ERROR_ARGUMENT, "name is 'm.q_proj_weight', which belongs to the layer 'm.'", name = "m.q_proj_weight");
    ADD(ERROR_NULL, "parameter with shape [4, 4] has NULL data", a.data = NULL);
    ADD(ERROR_NULL, "gradient with shape [4, 4] has NULL data", b.data = NULL);
    ADD(ERROR_DTYPE, "parameter is bool, expected f32, f64, bf16 or f16", a.dtype = RAPT_BOOL);
    ADD(ERROR_DTYPE, "gradient has dtype 99", b.dtype = (rapt_dtype)99);
    ADD(ERROR_DTYPE, "gradient is bf16, expected f32 as parameter is", b.dtype = RAPT_BF16);
    ADD(ERROR_LAYOUT, "parameter with shape [4, 4] is not contiguous", (a.stride[0] = 1, a.stride[1] = 4));
    ADD(ERROR_LAYOUT, "gradient with shape [4, 2] is not contiguous", b.shape[1] = 2);
    ADD(ERROR_SHAPE, "gradient has shape [2, 4], expected [4, 4] as parameter has", b.shape[0] = 2);
    ADD(ERROR_SHAPE, "gradient has shape [16], expected [4, 4]",
        b = rapt_tensor_of(y.data, RAPT_F32, 1, (int64_t[]){16}));
    ADD(ERROR_DEVICE, "parameter is on device cuda", a.device = RAPT_DEVICE_CUDA);
    ADD(ERROR_LAYOUT, "shares memory with gradient", b = a);
    ADD(ERROR_LAYOUT, "shares memory with p (at", (a = s.p, b = rapt_tensor_of(x.data, RAPT_F32, 2, s.p.shape)));
    ADD(ERROR_LAYOUT, "shares memory with p (at", (a = s.g, b = rapt_tensor_of(x.data, RAPT_F32, 2, s.g.shape)));
    ADD(ERROR_LAYOUT, "gradient (at", (b = s.p, a = rapt_tensor_of(x.data, RAPT_F32, 2, s.p.shape)));
    ADD(ERROR_LAYOUT, "gradient (at", (b = s.g, a = rapt_tensor_of(x.data, RAPT_F32, 2, s.p.shape)));
    assert_ok(context, rapt_optimizer_step(context, s.optimizer));
    before = sum_scene(&s);
    ADD(ERROR_STATE, "the optimiser has taken 1 steps: add everything before the first", (void)0);
    free_scene(&s);
    free_tensors(&x, &y);
}
#undef ADD

#define LAYER(status, text, change)                                                                                    \
    do {                                                                                                               \
        rapt_mha_gradients g = *gradients;                                                                             \
        const rapt_mha_gradients *given = &g;                                                                          \
        const char *prefix = "n.";                                                                                     \
        rapt_mha *layer = other;                                                                                       \
        change;                                                                                                        \
        REFUSED(status, text, rapt_optimizer_add_layer(context, s.optimizer, prefix, layer, given));                   \
        if (sum_scene(&s) != before) fail_msg("line %d: the call changed something", __LINE__);                        \
    } while (0)

static void test_add_layer(void **state) {
    (void)state;
    scene s = make_scene(RAPT_SGD);
    rapt_mha_config config = kind_of_layer(4, RAPT_F32), apart_config = kind_of_layer(5, RAPT_F32);
    rapt_mha *other = create_random(&config),
             *apart = create_random(&apart_config); /* without biases; kdim 9, vdim 11 */
    rapt_mha_gradients *gradients;
    assert_ok(context, rapt_mha_gradients_create(context, other, &gradients));
    rapt_tensor x = make_tensor(RAPT_F32, 1, &(int64_t){72}), wide = make_tensor(RAPT_F64, 2, (int64_t[]){24, 24});
    rapt_tensor apart_weight = make_tensor(RAPT_F32, 2, (int64_t[]){48, 24}), nothing;
    uint64_t before = sum_scene(&s);
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_add_layer(context, NULL, "n.", other, gradients));
    LAYER(ERROR_NULL, "layer is NULL", layer = NULL);
    LAYER(ERROR_NULL, "gradients is NULL", given = NULL);
    LAYER(ERROR_ARGUMENT, "prefix is 'n', expected one that ends in a dot", prefix = "n");
    LAYER(ERROR_ARGUMENT, "prefix is not valid UTF-8", prefix = "\xff.");
    LAYER(ERROR_ARGUMENT, "prefix is 'optimizer.a.', but names that begin with", prefix = "optimizer.a.");
    LAYER(ERROR_ARGUMENT, "prefix is 'm.', which another layer has", prefix = "m.");
    LAYER(ERROR_ARGUMENT, "layer is in the optimiser already, with prefix 'm.'", layer = s.layer);
    LAYER(ERROR_ARGUMENT, "gradients.reserved[7] is not 0", g.reserved[7] = 1);
    LAYER(ERROR_ARGUMENT, "gradients has no tensor for a parameter of the layer",
          (memset(&g, 0, sizeof g), g.query = &x));
    LAYER(ERROR_ABSENT, "gradients has in_proj_bias, and the layer has no such parameter", g.in_proj_bias = &x);
    LAYER(ERROR_ABSENT, "gradients has k_proj_bias, and", g.k_proj_bias = &x);
    LAYER(ERROR_ABSENT, "gradients has bias_v, and", g.bias_v = &x);
    LAYER(ERROR_ABSENT, "gradients has out_proj_bias, and", g.out_proj_bias = &x);
    LAYER(ERROR_ABSENT, "gradients has in_proj_weight, and", layer = apart);
    LAYER(ERROR_ARGUMENT, "gradients has in_proj_weight and v_proj_weight: give one", g.v_proj_weight = &wide);
    LAYER(ERROR_SHAPE, "gradients.in_proj_weight has shape [72], expected [72, 24]", g.in_proj_weight = &x);
    LAYER(ERROR_SHAPE, "gradients.out_proj_weight has shape [72], expected [24, 24] as the layer's out_proj.weight has",
          g.out_proj_weight = &x);
    LAYER(ERROR_DTYPE, "gradients.out_proj_weight is f64, expected f32 as the layer's out_proj.weight is",
          g.out_proj_weight = &wide); /* when the first one is in already */
    LAYER(ERROR_DTYPE, "gradients.q_proj_weight is f64", (g.in_proj_weight = NULL, g.q_proj_weight = &wide));
    LAYER(ERROR_SHAPE, "gradients.q_proj_weight has shape [48, 24], expected [24, 24] as the layer's q_proj_weight has",
          (g.in_proj_weight = NULL, g.q_proj_weight = &apart_weight));
    LAYER(ERROR_LAYOUT, "shares memory with m.out_proj.weight", g.out_proj_weight = s.gradients->out_proj_weight);
    LAYER(ERROR_NULL, "gradients.in_proj_weight with shape [72, 24] has NULL data",
          (nothing = *gradients->in_proj_weight, nothing.data = NULL, g.in_proj_weight = &nothing));

    /* A name below the prefix that the caller has given away. */
    rapt_tensor y = make_tensor(RAPT_F32, 1, &(int64_t){72});
    assert_ok(context, rapt_optimizer_add(context, s.optimizer, "n.out_proj.bias", &x, &y));
    before = sum_scene(&s);
    LAYER(ERROR_ARGUMENT, "prefix is 'n.', but 'n.out_proj.bias' is another parameter's name", (void)0);
    assert_ok(context, rapt_optimizer_add_layer(context, s.optimizer, "n.n.", other, gradients));
    assert_ok(context, rapt_optimizer_step(context, s.optimizer));
    before = sum_scene(&s);
    LAYER(ERROR_STATE, "has taken 1 steps", layer = apart);
    rapt_mha_gradients *none = gradients;
    REFUSED(ERROR_NULL, "layer is NULL", rapt_mha_gradients_create(context, NULL, &none));
    assert_null(none);
    REFUSED(ERROR_NULL, "gradients is NULL", rapt_mha_gradients_create(context, other, NULL));
    free_scene(&s);
    rapt_mha_gradients_destroy(gradients);
    rapt_mha_destroy(other);
    rapt_mha_destroy(apart);
    free_tensors(&x, &y, &wide, &apart_weight);
}
#undef LAYER

static void test_calls(void **state) {
    (void)state;
    scene s = make_scene(RAPT_ADAMW);
    uint64_t before = sum_scene(&s);
    double norm = 123;
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_set_learning_rate(context, NULL, 1));
    REFUSED(ERROR_ARGUMENT, "rate is -1, expected a finite",
            rapt_optimizer_set_learning_rate(context, s.optimizer, -1));
    REFUSED(ERROR_ARGUMENT, "rate is nan", rapt_optimizer_set_learning_rate(context, s.optimizer, (double)NAN));
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_zero_gradients(context, NULL));
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_step(context, NULL));
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_clip(context, NULL, 1, NULL));
    REFUSED(ERROR_ARGUMENT, "max_norm is -1, expected 0 or more", rapt_optimizer_clip(context, s.optimizer, -1, &norm));
    REFUSED(ERROR_ARGUMENT, "max_norm is nan", rapt_optimizer_clip(context, s.optimizer, (double)NAN, &norm));
    set_element(&s.g, 4, INFINITY);
    uint64_t spoilt = sum_scene(&s);
    REFUSED(ERROR_ARGUMENT, "the gradient of 'p' is inf at element 4",
            rapt_optimizer_clip(context, s.optimizer, 1, &norm));
    assert_true(sum_scene(&s) == spoilt && norm == 123);
    set_element(&s.g, 4, 0);
    rapt_optimizer *empty;
    assert_ok(context, rapt_optimizer_create(context, &s.config, &empty));
    REFUSED(ERROR_STATE, "the optimiser has no parameters", rapt_optimizer_step(context, empty));
    assert_int_equal(rapt_optimizer_steps(empty), 0);
    rapt_tensor large = make_tensor(RAPT_F64, 1, &(int64_t){1}), huge = make_tensor(RAPT_F64, 1, &(int64_t){1});
    set_element(&huge, 0, 1e200);
    assert_ok(context, rapt_optimizer_add(context, empty, "x", &large, &huge));
    REFUSED(ERROR_ARGUMENT, "the norm of all gradients is inf", rapt_optimizer_clip(context, empty, 1, &norm));
    rapt_optimizer_destroy(empty);
    free_tensors(&large, &huge);
    REFUSED(ERROR_NULL, "optimizer is NULL", rapt_optimizer_save(context, NULL, in_folder("x")));
    REFUSED(ERROR_NULL, "path is NULL", rapt_optimizer_save(context, s.optimizer, NULL));
    REFUSED(ERROR_FILE, "cannot write", rapt_optimizer_save(context, s.optimizer, in_folder("none/x")));
    REFUSED(ERROR_NULL, "checkpoint is NULL", rapt_optimizer_load(context, s.optimizer, NULL));
    assert_int_equal(rapt_optimizer_step(NULL, s.optimizer), RAPT_ERROR_NULL);
    assert_true(sum_scene(&s) != before); /* by the gradient that was set to 0 */
    free_scene(&s);
}

/* ---- files ---- */

/* The scene's file with one tensor or the metadata changed. */
typedef struct change {
    const char *leave_out; /* a tensor */
    const char *add;       /* a tensor of shape [2,3], f32 */
    const char *replace;   /* a tensor by one of shape [2,2], or f64 if to_f64 */
    bool to_f64;
    const char *text; /* of the metadata; NULL: as it is, "" none */
} change;

static void write_changed(const scene *s, const change *c, const char *path) {
    const char *whole = in_folder("whole.safetensors");
    assert_ok(context, rapt_optimizer_save(context, s->optimizer, whole));
    rapt_safetensors *file;
    assert_ok(context, rapt_safetensors_open(context, whole, &file));
    const char *names[MAX_TENSORS];
    rapt_tensor tensors[MAX_TENSORS], made = {0};
    int64_t count = 0;
    for (int64_t i = 0; i < rapt_safetensors_count(file); i++) {
        names[count] = rapt_safetensors_name(file, i);
        if (c->leave_out != NULL && strcmp(names[count], c->leave_out) == 0) continue;
        assert_ok(context, rapt_safetensors_find(context, file, names[count], &tensors[count]));
        if (c->replace != NULL && strcmp(names[count], c->replace) == 0) {
            made = c->to_f64 ? convert_tensor(&tensors[count], RAPT_F64) : make_tensor(RAPT_F32, 2, (int64_t[]){2, 2});
            tensors[count] = made;
        }
        count++;
    }
    if (c->add != NULL) {
        names[count] = c->add;
        tensors[count++] = made = make_tensor(RAPT_F32, 2, (int64_t[]){2, 3});
    }
    const char *text = c->text != NULL ? c->text : rapt_safetensors_metadata(file, "rapt.optimizer");
    const char *const metadata[][2] = {{"rapt.optimizer", text}};
    assert_ok(context, rapt_safetensors_save(context, path, count, names, tensors, *text != '\0', metadata));
    rapt_safetensors_close(file);
    free_tensor(&made);
}

static void check_load(int line, const change *c, rapt_status expected, const char *text) {
    scene s = make_scene(RAPT_ADAMW);
    assert_ok(context, rapt_optimizer_step(context, s.optimizer));
    const char *path = in_folder("changed.safetensors");
    write_changed(&s, c, path);
    assert_ok(context, rapt_optimizer_step(context, s.optimizer));
    uint64_t before = sum_scene(&s);
    rapt_checkpoint *checkpoint = open_checkpoint(path);
    rapt_status status = rapt_optimizer_load(context, s.optimizer, checkpoint);
    if (expected != RAPT_OK) refused(line, status, expected, text);
    if (expected == RAPT_OK) assert_ok(context, status);
    assert_int_equal(sum_scene(&s) == before, expected != RAPT_OK);
    assert_int_equal(rapt_optimizer_steps(s.optimizer), expected == RAPT_OK ? 1 : 2);
    rapt_checkpoint_close(checkpoint);
    free_scene(&s);
}
#define LOAD(status, text, ...) check_load(__LINE__, &(change){__VA_ARGS__}, RAPT_##status, text)

static void test_load(void **state) {
    (void)state;
    LOAD(OK, "", .text = NULL);
    LOAD(OK, "", .text = "kind=adamw steps=1");
    LOAD(OK, "", .add = "another");
    LOAD(ERROR_ABSENT, "the checkpoint has no metadata 'rapt.optimizer'", .text = "");
    LOAD(ERROR_ARGUMENT, "the checkpoint is of kind sgd, the optimiser of kind adamw", .text = "kind=sgd steps=1");
    static const char *const wrong[] = {"kind=adamw",
                                        "kind=adamw steps=",
                                        "kind=adamw steps",
                                        "kind=adamw steps=-1",
                                        "kind=adamw steps=1x",
                                        "kind=adamw steps=1 x=1",
                                        "kind=lion steps=1",
                                        "steps=1",
                                        "kind=adamw steps=99999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        LOAD(ERROR_FORMAT, "metadata 'rapt.optimizer': Rapt", .text = wrong[i]);
    LOAD(ERROR_ABSENT, "the checkpoint has no tensor 'p'", .leave_out = "p");
    LOAD(ERROR_ABSENT, "has no tensor 'optimizer.p.exp_avg_sq'", .leave_out = "optimizer.p.exp_avg_sq");
    LOAD(ERROR_ABSENT, "has no tensor 'optimizer.m.bias_k.exp_avg'", .leave_out = "optimizer.m.bias_k.exp_avg");
    LOAD(ERROR_ABSENT, "the layer 'm.' is not whole", .leave_out = "m.out_proj.weight");
    LOAD(ERROR_ABSENT, "has no tensor 'm.q_proj.bias'", .leave_out = "m.in_proj_bias");
    LOAD(ERROR_ABSENT, "has no tensor 'm.out_proj.bias'", .leave_out = "m.out_proj.bias");
    LOAD(ERROR_ABSENT, "bias_v", .leave_out = "m.bias_v");
    LOAD(ERROR_SHAPE, "tensor 'p' has shape [2, 2], expected [2, 3]", .replace = "p");
    LOAD(ERROR_SHAPE, "tensor 'optimizer.p.exp_avg' has shape [2, 2], expected [2, 3]",
         .replace = "optimizer.p.exp_avg");
    LOAD(ERROR_SHAPE, "out_proj.weight", .replace = "m.out_proj.weight");
    LOAD(ERROR_DTYPE, "tensor 'p' is f64, expected f32", .replace = "p", .to_f64 = true);
    LOAD(ERROR_DTYPE, "tensor 'optimizer.p.exp_avg_sq' is f64, expected f32", .replace = "optimizer.p.exp_avg_sq",
         .to_f64 = true);
    LOAD(ERROR_DTYPE, "tensor 'm.out_proj.weight' is f64, expected f32", .replace = "m.out_proj.weight",
         .to_f64 = true);
    LOAD(ERROR_ARGUMENT, "has 15 tensors of an optimiser's state (the last is 'optimizer.other.exp_avg'), expected 14",
         .add = "optimizer.other.exp_avg");
}

/* SGD with momentum has a state, without it has none. */
static void test_load_momentum(void **state) {
    (void)state;
    rapt_optimizer_config config = sgd();
    rapt_tensor p = make_tensor(RAPT_F32, 1, &(int64_t){3}), g = make_tensor(RAPT_F32, 1, &(int64_t){3});
    rapt_optimizer *optimizer[2];
    for (int i = 0; i < 2; i++) {
        config.momentum = i == 0 ? 0 : 0.9;
        assert_ok(context, rapt_optimizer_create(context, &config, &optimizer[i]));
        assert_ok(context, rapt_optimizer_add(context, optimizer[i], "p", &p, &g));
    }
    for (int i = 0; i < 2; i++) {
        assert_ok(context, rapt_optimizer_save(context, optimizer[i], in_folder("sgd.safetensors")));
        rapt_checkpoint *checkpoint = open_checkpoint(in_folder("sgd.safetensors"));
        if (i == 0)
            REFUSED(ERROR_ABSENT, "has no tensor 'optimizer.p.momentum_buffer'",
                    rapt_optimizer_load(context, optimizer[1], checkpoint));
        if (i == 1)
            REFUSED(ERROR_ARGUMENT, "has 1 tensors of an optimiser's state (the last is 'optimizer.p.momentum_buffer')",
                    rapt_optimizer_load(context, optimizer[0], checkpoint));
        assert_ok(context, rapt_optimizer_load(context, optimizer[i], checkpoint));
        rapt_checkpoint_close(checkpoint);
    }
    for (int i = 0; i < 2; i++) rapt_optimizer_destroy(optimizer[i]);
    free_tensors(&p, &g);
}

/* ---- out of memory at each allocation ---- */

enum { MEMORY_CALLS = 7 };

static rapt_status memory_call(scene *s, int call, const rapt_checkpoint *checkpoint) {
    switch (call) {
    case 0: return rapt_mha_gradients_create(context, s->layer, &s->gradients);
    case 1: return rapt_optimizer_create(context, &s->config, &s->optimizer);
    case 2: return rapt_optimizer_add_layer(context, s->optimizer, "m.", s->layer, s->gradients);
    case 3: return rapt_optimizer_add(context, s->optimizer, "p", &s->p, &s->g);
    case 4: return rapt_optimizer_clip(context, s->optimizer, 1, NULL);
    case 5: return rapt_optimizer_save(context, s->optimizer, in_folder("memory.safetensors"));
    default: return rapt_optimizer_load(context, s->optimizer, checkpoint);
    }
}

/* The calls in a row, of which one is refused memory once and works the second time. False when none was refused. */
static bool run_without_memory(scene *s, int64_t refuse_at, const rapt_checkpoint *checkpoint, int refusals[]) {
    counting_memory memory = {0};
    rapt_context *shared = context;
    context = make_counting_context(&memory);
    int64_t own = memory.live;
    memory.refuse_at = refuse_at + memory.calls;
    bool was_refused = false;
    for (int call = 0; call < MEMORY_CALLS; call++) {
        uint64_t before = sum_layer(s->layer) ^ checksum(0, &s->p);
        rapt_status status = memory_call(s, call, checkpoint);
        if (status == RAPT_ERROR_MEMORY) {
            assert_message("out of memory: ");
            assert_true((sum_layer(s->layer) ^ checksum(0, &s->p)) == before);
            if (call == 0) assert_null(s->gradients);
            if (call == 1) assert_null(s->optimizer);
            refusals[call]++;
            was_refused = true;
            status = memory_call(s, call, checkpoint);
        }
        assert_ok(context, status);
    }
    assert_ok(context, rapt_optimizer_step(context, s->optimizer));
    int64_t calls = memory.calls;
    assert_ok(context, rapt_optimizer_step(context, s->optimizer));
    assert_ok(context, rapt_optimizer_clip(context, s->optimizer, 1, NULL));
    assert_ok(context, rapt_optimizer_zero_gradients(context, s->optimizer));
    assert_int_equal(memory.calls, calls); /* steps allocate nothing */
    rapt_optimizer_destroy(s->optimizer);
    rapt_mha_gradients_destroy(s->gradients);
    assert_true(memory.live <= own + 1); /* the context's scratch memory */
    rapt_context_destroy(context);
    assert_int_equal(memory.live, 0);
    assert_int_equal(memory.bytes, 0);
    context = shared;
    return was_refused;
}

static void test_memory(void **state) {
    (void)state;
    scene s = make_scene(RAPT_ADAMW), other = s;
    assert_ok(context, rapt_optimizer_save(context, s.optimizer, in_folder("source.safetensors")));
    rapt_checkpoint *checkpoint = open_checkpoint(in_folder("source.safetensors"));
    int refusals[MEMORY_CALLS] = {0};
    int64_t refuse_at = 1;
    while (run_without_memory(&other, refuse_at, checkpoint, refusals)) refuse_at++;
    for (int call = 0; call < MEMORY_CALLS - 1; call++) assert_true(refusals[call] > 0);
    assert_int_equal(refusals[MEMORY_CALLS - 1], 0); /* loading needs none */
    assert_int_equal(refuse_at, 16);
    rapt_checkpoint_close(checkpoint);
    free_scene(&s);
}

int main(void) {
    skip_without_forced_isa();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_settings), cmocka_unit_test(test_add),  cmocka_unit_test(test_add_layer),
        cmocka_unit_test(test_calls),    cmocka_unit_test(test_load), cmocka_unit_test(test_load_momentum),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
