// onednn_graph.cpp - attention and linear layers in oneDNN's graph API, as C functions for peer_onednn.py
#include <oneapi/dnnl/dnnl_graph.hpp>

#include <stdexcept>
#include <string>
#include <vector>

using namespace dnnl::graph;
using dims = logical_tensor::dims;
using property = logical_tensor::property_type;

struct array { // as NumPy has it, strides in elements
    float *data;
    int64_t ndim, sizes[5], strides[5];
};

namespace {

constexpr auto f32 = logical_tensor::data_type::f32;

const dnnl::engine &cpu() {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    return engine;
}

dnnl::stream &stream() {
    static dnnl::stream stream(cpu());
    return stream;
}

// A graph, which must become one partition. Its inputs and outputs are tensors over arrays.
class job {
  public:
    logical_tensor input(const array &a, property kind = property::variable) { return port(a, kind, inputs_, in_); }
    logical_tensor output(const array &a) { return port(a, property::variable, outputs_, out_); }
    logical_tensor between(const dims &sizes) { return {id_++, f32, sizes, logical_tensor::layout_type::strided}; }
    void add(op step) { graph_.add_op(step); }
    size_t id() { return id_++; }

    void compile() {
        graph_.finalize();
        const std::vector<partition> partitions = graph_.get_partitions();
        if (partitions.size() != 1)
            throw std::runtime_error(std::to_string(partitions.size()) + " partitions, not one");
        compiled_ = partitions[0].compile(inputs_, outputs_, cpu());
    }
    void run() const {
        compiled_.execute(stream(), in_, out_);
        stream().wait();
    }

  private:
    logical_tensor port(const array &a, property kind, std::vector<logical_tensor> &ports,
                        std::vector<tensor> &tensors) {
        const dims sizes(a.sizes, a.sizes + a.ndim), strides(a.strides, a.strides + a.ndim);
        ports.emplace_back(id_++, f32, sizes, strides, kind);
        tensors.emplace_back(ports.back(), cpu(), a.data);
        return ports.back();
    }
    size_t id_ = 0;
    graph graph_{dnnl::engine::kind::cpu};
    std::vector<logical_tensor> inputs_, outputs_;
    std::vector<tensor> in_, out_;
    compiled_partition compiled_;
};

std::string message;

template <typename Fill> job *make(Fill fill) {
    auto *made = new job;
    try {
        fill(*made);
        made->compile();
        return made;
    } catch (const std::exception &error) {
        message = error.what();
        delete made;
        return nullptr;
    }
}

} // namespace

extern "C" {

const char *onednn_message() { return message.c_str(); }
void onednn_run(const job *j) { j->run(); }
void onednn_free(job *j) { delete j; }

// The mask is added to the scores unless its data is null. Where heads share keys there are five dimensions: queries
// [N, Hk, group, L, D], keys [N, Hk, 1, S, D].
job *onednn_attention(const array *q, const array *k, const array *v, const array *scale, const array *mask,
                      const array *out) {
    return make([&](job &j) {
        dims sizes(q->sizes, q->sizes + q->ndim);
        sizes.back() = k->sizes[k->ndim - 2];
        const logical_tensor product = j.between(sizes), scaled = j.between(sizes), probabilities = j.between(sizes);
        op first(j.id(), op::kind::MatMul, {j.input(*q), j.input(*k)}, {product}, "first");
        first.set_attr<bool>(op::attr::transpose_b, true);
        j.add(first);
        j.add({j.id(), op::kind::Multiply, {product, j.input(*scale)}, {scaled}, "scale"});
        logical_tensor scores = scaled;
        if (mask->data != nullptr) {
            scores = j.between(sizes);
            j.add({j.id(), op::kind::Add, {scaled, j.input(*mask)}, {scores}, "mask"});
        }
        op softmax(j.id(), op::kind::SoftMax, {scores}, {probabilities}, "softmax");
        softmax.set_attr<int64_t>(op::attr::axis, -1);
        j.add(softmax);
        j.add({j.id(), op::kind::MatMul, {probabilities, j.input(*v)}, {j.output(*out)}, "second"});
    });
}

// Weights are [to, from] and do not change, so that oneDNN may keep them in a layout of its own.
job *onednn_linear(const array *x, const array *weight, const array *bias, const array *out) {
    return make([&](job &j) {
        const logical_tensor w = j.input(*weight, property::constant), b = j.input(*bias, property::constant);
        op product(j.id(), op::kind::MatMul, {j.input(*x), w, b}, {j.output(*out)}, "linear");
        product.set_attr<bool>(op::attr::transpose_b, true);
        j.add(product);
    });
}
}
