"""OpenVINO: ScaledDotProductAttention in f32, compiled for latency."""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

PRODUCTS_ONLY = False
core = ov.Core()
config = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}


def start(threads: int) -> str:
    config["INFERENCE_NUM_THREADS"] = threads
    return ov.__version__.split("-")[0]


def array(request: ov.InferRequest) -> np.ndarray:
    return request.get_output_tensor().data


def compiled(build, *inputs: np.ndarray):
    parameters = [ops.parameter(a.shape, np.float32) for a in inputs]
    request = core.compile_model(ov.Model([build(*parameters)], parameters), "CPU", config).create_infer_request()
    for i, a in enumerate(inputs):
        request.set_input_tensor(i, ov.Tensor(a, shared_memory=True))

    def run(inputs=inputs):  # which keeps them alive
        request.infer()
        return request

    return run


def swapped(node):
    """[N, L, H, D] as [N, H, L, D] and back, which the compiler folds into the attention."""
    return ops.transpose(node, ops.constant([0, 2, 1, 3]))


def operator(p):
    def sdpa(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, causal=p.causal)

    def broadcast(node):
        sizes = [p.n, p.kv_heads, p.group, p.s, p.d]
        wide = ops.broadcast(ops.unsqueeze(node, ops.constant(2)), ops.constant(sizes), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, ops.constant([p.n, p.heads, p.s, p.d]), False)

    def tokens_first(q, k, v):
        out = swapped(sdpa(swapped(q), swapped(k), swapped(v)))
        return ops.reshape(out, ops.constant([p.n, p.l, p.heads * p.d]), False)

    def formula(q, k, v):
        scores = ops.multiply(ops.matmul(q, k, False, True), ops.constant(np.float32(p.d**-0.5)))
        return ops.matmul(ops.softmax(scores, 3), v, False, False)

    k, v = p.expanded(p.k), p.expanded(p.v)
    yield "sdpa", lambda: compiled(sdpa, p.q, k, v)
    lying = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (p.q, k, v)]
    yield "sdpa, tokens first", lambda: compiled(tokens_first, *lying)
    if p.group > 1:
        yield "sdpa, broadcast", lambda: compiled(lambda q, k, v: sdpa(q, broadcast(k), broadcast(v)), p.q, p.k, p.v)
    if p.group > 1 and not p.causal:
        yield "sdpa, grouped", lambda: compiled(sdpa, p.grouped_q(), p.k, p.v)
    if not p.causal:
        yield "MatMul, Softmax, MatMul", lambda: compiled(formula, p.grouped_q(), p.k, p.v)


def layer(p):
    def linear(x, weight, bias):
        return ops.add(ops.matmul(x, ops.constant(weight), False, True), ops.constant(bias))

    def attend(q, k, v):
        heads = swapped(ops.scaled_dot_product_attention(q, k, v))
        return linear(ops.reshape(heads, ops.constant([p.n, p.l, p.embed_dim]), False), p.w_out, p.b_out)

    def separate(x):
        parts = [linear(x, w, b) for w, b in zip(np.split(p.w_in, 3), np.split(p.b_in, 3))]
        sizes = ops.constant([p.n, p.l, p.heads, p.d])
        return attend(*(swapped(ops.reshape(part, sizes, False)) for part in parts))

    def packed(x):
        qkv = ops.reshape(linear(x, p.w_in, p.b_in), ops.constant([p.n, p.l, 3, p.heads, p.d]), False)
        parts = ops.split(ops.transpose(qkv, ops.constant([2, 0, 3, 1, 4])), ops.constant(0), 3).outputs()
        return attend(*(ops.squeeze(part, ops.constant(0)) for part in parts))

    yield "three MatMul, sdpa, MatMul", lambda: compiled(separate, p.x)
    yield "MatMul, sdpa, MatMul", lambda: compiled(packed, p.x)


def variants(p):
    return layer(p) if p.is_layer else operator(p)
