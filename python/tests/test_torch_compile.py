"""torch.compile as it is called by default, with the backend that writes C++, and torch.export with sizes left open."""

import os
import shutil

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

E, H, N, L, S = 16, 2, 2, 6, 5
sdpa = rapt.torch.scaled_dot_product_attention
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), reason="there is no C++ compiler"
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.reset()


def close(ours, expected):
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def compare(function, inputs, leaves=(), **options):
    """Compiled and not, results and gradients; the graph is one, and Rapt's operators compute in it."""
    compiled = torch.compile(function, fullgraph=True)
    results = []
    for f in (function, compiled, compiled):
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            out = f(*inputs, **options)
            out = out[0] if isinstance(out, tuple) else out
            gradients = torch.autograd.grad((out * out.detach().cos()).sum(), leaves) if leaves else ()
        results.append((out, *gradients))
    called = {event.key for event in watched.key_averages()}
    assert "rapt::attention" in called and ("rapt::attention_backward" in called) == bool(leaves)
    for again in results[1:]:
        for a, b in zip(again, results[0]):
            close(a, b)


@needs_compiler
@pytest.mark.parametrize(("masked", "grad"), [(False, True), (True, False), (True, True)])
def test_operator(masked, grad):
    q, k, v = (torch.randn(N, H, n, 8, requires_grad=grad) for n in (L, S, S))
    mask = torch.randn(L, S, requires_grad=grad) if masked else None

    def f(q, k, v, mask):
        out = sdpa(q.sin(), k * 2, v, mask, is_causal=mask is None, window=None if masked else (3, None))
        return out.transpose(1, 2).flatten(2).relu()

    compare(f, (q, k, v, mask), tuple(t for t in (q, k, v, mask) if t is not None) if grad else ())


@needs_compiler
@pytest.mark.parametrize(
    ("training", "settings"),
    [(False, {}), (True, {"add_bias_kv": True, "kdim": 7}), (False, {"num_kv_heads": 1})],
    ids=str,
)
def test_layer(training, settings):
    layer = rapt.torch.MultiheadAttention(E, H, batch_first=True, **settings).train(training)
    x, y = torch.randn(N, L, E, requires_grad=True), torch.randn(N, S, layer.kdim, requires_grad=True)
    value = torch.randn(N, S, E)
    padding = torch.arange(S) >= torch.tensor([[S], [S - 2]])
    compare(layer, (x, y, value), (x, y, *layer.parameters()), key_padding_mask=padding)
    with torch.no_grad():
        compare(layer, (x, y, value), key_padding_mask=padding)


@needs_compiler
@pytest.mark.parametrize(("training", "norm_first"), [(False, False), (True, True)])
def test_converted_encoder(training, norm_first):
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=False).train(training)
    x = torch.randn(N, L, E, requires_grad=True)
    padding = torch.arange(L) >= torch.tensor([[L], [L - 2]])
    expected = model(x, src_key_padding_mask=padding)
    rapt.torch.convert(model)
    close(model(x, src_key_padding_mask=padding), expected)
    compare(model, (x,), (x, *model.parameters()), src_key_padding_mask=padding)
    with torch.no_grad():
        compare(model, (x,))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_export_with_sizes_left_open(training, first):
    """Batch and lengths, of self-attention and of another sequence's keys."""
    layer = rapt.torch.MultiheadAttention(E, H, batch_first=first).train(training)
    batch, length, keys = (torch.export.Dim(name, max=1024) for name in ("batch", "length", "keys"))

    def make(n, size):
        return torch.randn(*((n, size) if first else (size, n)), E)

    def sizes(count):
        return {0: batch, 1: count} if first else {0: count, 1: batch}

    for cross in (False, True):
        x, y = make(N, L), make(N, S)
        inputs, shapes = ((x, y, y), (length, keys, keys)) if cross else ((x, x, x), (length,) * 3)
        program = torch.export.export(layer, inputs, dynamic_shapes=[sizes(count) for count in shapes])
        assert any(node.target is torch.ops.rapt.attention.default for node in program.graph.nodes)
        for n, queries, others in ((N, L, S), (1, 1, 3), (5, 40, 17)):
            x, y = make(n, queries), make(n, others)
            inputs = (x, y, y) if cross else (x, x, x)
            for ours, eager in zip(program.module()(*inputs), layer(*inputs)):
                close(ours, eager)
