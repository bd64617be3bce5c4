"""ONNX Runtime: the standard Attention and Microsoft's operators, inputs and outputs bound once."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

PRODUCTS_ONLY = False
MICROSOFT = "com.microsoft"
options = ort.SessionOptions()


def start(threads: int) -> str:
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.__version__


def array(binding: ort.IOBinding) -> np.ndarray:
    return binding.get_outputs()[0].numpy()


def session(nodes: list, inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray] = {}, outputs: dict = {}):
    """`out` is the result; outputs names further ones, and the inputs whose memory they share."""
    dtype, info = helper.np_dtype_to_tensor_dtype, helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "graph", [info(name, dtype(a.dtype), a.shape) for name, a in inputs.items()],
        [info(name, TensorProto.FLOAT, None) for name in ("out", *outputs)],
        [numpy_helper.from_array(a, name) for name, a in constants.items()])
    versions = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=11)
    runtime = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = runtime.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    for name, shared in outputs.items():
        if shared:
            binding.bind_ortvalue_output(name, values[shared])
        else:
            binding.bind_output(name)

    def run(values=values):  # which keeps them alive
        runtime.run_with_iobinding(binding)
        return binding

    return run


def flat(a: np.ndarray) -> np.ndarray:
    """[N, H, L, D] as [N, L, H * D]."""
    return np.ascontiguousarray(a.swapaxes(1, 2)).reshape(a.shape[0], a.shape[2], -1)


def attention(p, q, k, v, **heads):
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=p.causal, **heads)
    return session([node], {"q": q, "k": k, "v": v})


def multi_head(p, heads, q, k, v):
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["out"], domain=MICROSOFT, num_heads=heads,
                            unidirectional=int(p.causal))
    return session([node], {"q": q, "k": k, "v": v})


def group_query(p):
    """All keys at once after an empty past, or the last key after a past whose memory the new one shares."""
    first = p.s - p.l
    past = (p.k, p.v) if first > 0 else [np.zeros((p.n, p.kv_heads, 0, p.d), np.float32)] * 2
    inputs = {"q": flat(p.q), "k": flat(p.k[:, :, first:]), "v": flat(p.v[:, :, first:]),
              "past_k": past[0], "past_v": past[1],
              "last": np.full(p.n, p.s - 1, np.int32), "total": np.array(p.s, np.int32)}
    shared = {"new_k": "past_k", "new_v": "past_v"} if first > 0 else {"new_k": None, "new_v": None}
    node = helper.make_node("GroupQueryAttention", list(inputs), ["out", *shared], domain=MICROSOFT,
                            num_heads=p.heads, kv_num_heads=p.kv_heads)
    return session([node], inputs, outputs=shared)


def operator(p):
    flat_all = [flat(a) for a in (p.q, p.k, p.v)]
    yield "Attention", lambda: attention(p, p.q, p.k, p.v)
    yield "Attention, tokens first", lambda: attention(p, *flat_all, q_num_heads=p.heads, kv_num_heads=p.kv_heads)
    k, v = p.expanded(p.k), p.expanded(p.v)
    yield "MultiHeadAttention", lambda: multi_head(p, p.heads, flat_all[0], k, v)
    yield "MultiHeadAttention, tokens first", lambda: multi_head(p, p.heads, flat_all[0], flat(k), flat(v))
    if p.group > 1 and not p.causal:
        yield "Attention, grouped", lambda: attention(p, p.grouped_q(), p.k, p.v)
        yield "MultiHeadAttention, grouped", lambda: multi_head(p, p.kv_heads, flat(p.grouped_q()), p.k, p.v)
    if p.causal or p.l == 1:
        yield "GroupQueryAttention", lambda: group_query(p)


def layer(p):
    constants = {"w_in": p.w_in.T.copy(), "b_in": p.b_in, "w_out": p.w_out.T.copy(), "b_out": p.b_out}
    node = helper.make_node
    last = [node("MatMul", ["heads", "w_out"], ["product"]), node("Add", ["product", "b_out"], ["out"])]
    fused = node("Attention", ["x", "w_in", "b_in"], ["heads"], domain=MICROSOFT, num_heads=p.heads)
    yield "Attention (Microsoft's), MatMul", lambda: session([fused, *last], {"x": p.x}, constants)
    parts = [node("MatMul", ["x", "w_in"], ["projected"]), node("Add", ["projected", "b_in"], ["packed"]),
             node("Split", ["packed"], ["q", "k", "v"], axis=2, num_outputs=3),
             node("MultiHeadAttention", ["q", "k", "v"], ["heads"], domain=MICROSOFT, num_heads=p.heads)]
    yield "MatMul, MultiHeadAttention, MatMul", lambda: session([*parts, *last], {"x": p.x}, constants)


def variants(p):
    return layer(p) if p.is_layer else operator(p)
