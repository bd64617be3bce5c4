// A C++17 program that uses Rapt through its C header: the header must read well from here too.
#include <rapt/rapt.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace {

struct Close {
    void operator()(rapt_context *context) const { rapt_context_destroy(context); }
    void operator()(rapt_mha *layer) const { rapt_mha_destroy(layer); }
};

int fail(const char *what, const char *why) {
    std::fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

} // namespace

int main() {
    rapt_context_config settings = rapt_context_config_default();
    settings.num_threads = 2;
    rapt_context *made = nullptr;
    if (rapt_context_create(&settings, &made) != RAPT_OK) return fail("rapt_context_create", "failed");
    const std::unique_ptr<rapt_context, Close> context(made);

    rapt_mha_config config = rapt_mha_config_default(32, 4);
    config.num_kv_heads = 2;
    config.batch_first = true;
    rapt_mha *created = nullptr;
    if (rapt_mha_create(context.get(), &config, &created) != RAPT_OK)
        return fail("rapt_mha_create", rapt_error_message(context.get()));
    const std::unique_ptr<rapt_mha, Close> layer(created);

    const std::array<int64_t, 3> shape = {1, 5, 32}; // [N, L, E]
    std::vector<float> in(1 * 5 * 32, 0.5F), out(in.size(), NAN);
    rapt_tensor x = rapt_tensor_of(in.data(), RAPT_F32, 3, shape.data());
    rapt_tensor y = rapt_tensor_of(out.data(), RAPT_F32, 3, shape.data());
    rapt_options options = {};
    options.causal = true;
    if (rapt_mha_forward(context.get(), layer.get(), &x, &x, &x, &options, &y) != RAPT_OK)
        return fail("rapt_mha_forward", rapt_error_message(context.get()));
    for (const float value : out)
        if (!std::isfinite(value)) return fail("rapt_mha_forward", "the output is not finite");

    // A wrong shape is refused with a message, and no exception crosses the C calls.
    y.shape[1] = 4;
    if (rapt_mha_forward(context.get(), layer.get(), &x, &x, &x, &options, &y) != RAPT_ERROR_SHAPE)
        return fail("rapt_mha_forward", "an output of the wrong shape was accepted");
    if (std::strlen(rapt_error_message(context.get())) == 0) return fail("rapt_error_message", "empty after a failure");

    std::printf("rapt %s works from C++\n", rapt_version());
    return 0;
}
