"""rapt.torch.MultiheadAttention with num_kv_heads and head_dim."""

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from torch import nn  # noqa: E402

E, H, N, L, S = 12, 4, 3, 4, 5
SETTINGS = [
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "batch_first": True},
    {"head_dim": 5, "batch_first": True},
    {"num_kv_heads": 2, "head_dim": 6, "bias": False},
    {"num_kv_heads": 2, "kdim": 6, "vdim": 7, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"num_kv_heads": 1, "head_dim": 2, "add_bias_kv": True, "add_zero_attn": True},
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def make(dtype=torch.float64, **settings):
    layer = rapt.torch.MultiheadAttention(E, H, dtype=dtype, **settings)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.5)
    return layer


def inputs(layer, batched=True):
    sizes = [(L, E), (S, layer.kdim), (S, layer.vdim)]
    lead = (0 if layer.batch_first else 1) if batched else None
    shapes = [s if lead is None else (*s[:lead], N, *s[lead:]) for s in sizes]
    return [torch.randn(s, dtype=layer.out_proj.weight.dtype).requires_grad_() for s in shapes]


def rows_of(layer):
    """The projections' weights and biases."""
    sizes = [layer.num_heads * layer.head_dim, *[layer.num_kv_heads * layer.head_dim] * 2]
    fused = layer.in_proj_weight
    separate = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    weights = separate if fused is None else fused.split(sizes)
    return weights, [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.split(sizes)


def expected(layer, query, key, value, key_padding_mask=None, attn_mask=None, average_attn_weights=True):
    """The layer, written with PyTorch's operators, heads repeated."""
    batched = query.dim() == 3
    if not layer.batch_first and batched:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    if not batched:
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights, biases = rows_of(layer)
    q, k, v = (nn.functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    n, extra = q.shape[0], 0
    if layer.bias_k is not None:
        k, v = (torch.cat([t, b.expand(n, -1, -1)], 1) for t, b in ((k, layer.bias_k), (v, layer.bias_v)))
        extra += 1
    if layer.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v))
        extra += 1
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / layer.head_dim**0.5
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    if key_padding_mask is not None:
        hidden[..., : scores.shape[3] - extra] |= key_padding_mask[:, None, None]
    if attn_mask is not None:
        hidden[..., : scores.shape[3] - extra] |= attn_mask
    shown = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = nn.functional.linear((shown @ v).transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    shown = shown.mean(1) if average_attn_weights else shown
    if not batched:
        return out.squeeze(0), shown.squeeze(0)
    return out if layer.batch_first else out.transpose(0, 1), shown


def same(ours, theirs):
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_forward_and_gradients(settings):
    layer = make(**settings)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, 3:] = True
    later = torch.ones(L, S, dtype=torch.bool).triu(2)
    calls = [
        {},
        {"average_attn_weights": False, "attn_mask": later},
        {"key_padding_mask": padding, "attn_mask": later},
    ]
    for training, options in itertools.product([True, False], calls):
        layer.train(training)
        x = inputs(layer)
        leaves = [*x, *layer.parameters()]
        ours, theirs = layer(*x, **options), expected(layer, *x, **options)
        same(ours, theirs)
        g = [torch.randn_like(t) for t in ours]
        same(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g))
        with torch.no_grad():
            again = layer(*x, **options)
            assert torch.equal(again[0], ours[0]) and torch.equal(again[1], ours[1])
            out, nothing = layer(*x, need_weights=False, **options)
            assert nothing is None and torch.equal(out, ours[0])
        numbers = {
            name: torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
            for name, mask in options.items()
            if isinstance(mask, torch.Tensor)
        }
        same(layer(*x, **{**options, **numbers}), theirs)  # masks of another type: written out
    x = inputs(layer, batched=False)
    same(layer(*x), expected(layer, *x))
    assert ("_rapt_packed" in vars(layer)) == (not layer.training)


def test_self_attention_and_types():
    for dtype, bound in ((torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        layer = make(dtype, num_kv_heads=2, batch_first=True).eval()
        x = torch.randn(N, L, E).to(dtype)
        out = expected(copy.deepcopy(layer).double(), *[x.double()] * 3)[0]
        with torch.no_grad():
            torch.testing.assert_close(layer(x, x, x)[0].double(), out, atol=bound * 4, rtol=bound)
    layer = make(torch.float32, num_kv_heads=2, batch_first=True)
    x = torch.randn(N, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, x, x)[0]
        assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, x, x)[0], atol=0.1, rtol=0.1)


def test_dropout_is_drawn_from_pytorch():
    layer = make(num_kv_heads=2, dropout=0.5)
    x = inputs(layer)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(layer(*x)[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parameters_are_those_of_the_layer_without_pytorch(settings, tmp_path):
    layer = make(torch.float32, **settings).eval()
    plain = rapt.MultiheadAttention(E, H, **settings).eval()
    assert {n: tuple(p.shape) for n, p in layer.state_dict().items()} == {
        n: p.shape for n, p in plain.state_dict().items()
    }
    plain.load_state_dict(layer.state_dict())
    x = [t.detach() for t in inputs(layer)]
    with torch.no_grad():
        expected_out = layer(*x)[0]
    assert torch.equal(plain(*x)[0], expected_out)
    plain.save(tmp_path / "layer.safetensors")
    loaded = rapt.load(tmp_path / "layer.safetensors")
    other = rapt.torch.MultiheadAttention(E, H, **settings).eval()
    other.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in loaded.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(other(*x)[0], expected_out)


def test_copies_and_names():
    layer = make(torch.float32, num_kv_heads=2, head_dim=5).eval()
    assert (layer.num_kv_heads, layer.head_dim, layer.num_heads, layer.embed_dim) == (2, 5, H, E)
    assert repr(layer) == (
        "MultiheadAttention(\n  num_kv_heads=2, head_dim=5\n"
        f"  (out_proj): NonDynamicallyQuantizableLinear(in_features=20, out_features={E}, bias=True)\n)"
    )
    assert "num_kv_heads=1\n" in repr(make(num_kv_heads=1)) and "(\n  head_dim=5\n" in repr(make(head_dim=5))
    x = inputs(layer)
    with torch.no_grad():
        out = layer(*x)[0]
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(*x)[0], out) and repr(other) == repr(layer)
    assert list(layer.state_dict()) == list(nn.MultiheadAttention(E, H).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(nn.MultiheadAttention(E, H).state_dict())


@pytest.mark.parametrize("settings", [{}, {"kdim": 6}, {"bias": False, "add_bias_kv": True}])
def test_sizes_that_pytorch_has_are_pytorchs(settings):
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, **settings)
    torch.manual_seed(5)
    ours = rapt.torch.MultiheadAttention(E, H, **settings, num_kv_heads=H, head_dim=E // H)
    assert repr(ours) == repr(theirs) and ours.num_kv_heads == H and vars(ours).keys() == vars(theirs).keys()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a, b)
    assert type(rapt.torch.unconvert(ours)) is nn.MultiheadAttention


def test_first_weights():
    torch.manual_seed(7)
    layer = rapt.torch.MultiheadAttention(64, 4, num_kv_heads=2, add_bias_kv=True, dtype=torch.float64)
    assert layer.in_proj_weight.shape == (128, 64) and layer.in_proj_weight.dtype is torch.float64
    bound = (6 / (128 + 64)) ** 0.5
    assert 0.99 * bound < layer.in_proj_weight.abs().max() <= bound
    assert not layer.in_proj_bias.any() and not layer.out_proj.bias.any() and layer.bias_k.std() > 0.05
    separate = rapt.torch.MultiheadAttention(64, 4, num_kv_heads=2, kdim=32)
    bound = (6 / (32 + 32)) ** 0.5
    assert separate.in_proj_weight is None and 0.99 * bound < separate.k_proj_weight.abs().max() <= bound
    before = layer.in_proj_weight.detach().clone()
    layer._reset_parameters()
    assert not torch.equal(before, layer.in_proj_weight)
    assert rapt.torch.MultiheadAttention(8, 2, num_kv_heads=1, device="meta").in_proj_weight.is_meta


def test_refusals():
    for settings in ({"num_kv_heads": 3}, {"num_kv_heads": 0}, {"num_kv_heads": -1}, {"head_dim": 0}):
        with pytest.raises(ValueError, match="rapt"):
            rapt.torch.MultiheadAttention(E, H, **settings)
    with pytest.raises(ValueError, match="pass head_dim"):
        rapt.torch.MultiheadAttention(13, H, num_kv_heads=2)
    with pytest.raises(AssertionError):  # PyTorch's own
        rapt.torch.MultiheadAttention(13, H)
    with pytest.raises(TypeError):
        rapt.torch.MultiheadAttention(E, H, 0.0, True, False, False, None, None, False, None, None, 2)
    assert rapt.torch.MultiheadAttention(13, H, head_dim=3).in_proj_weight.shape == (36, 13)
    layer = make(num_kv_heads=2)
    with pytest.raises(NotImplementedError, match="num_kv_heads"):
        layer.to("meta")(*(t.to("meta") for t in inputs(layer)))
    with pytest.raises(RuntimeError, match="is_causal"):
        layer(*inputs(layer), is_causal=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_graphs_and_transforms(settings):
    layer = make(**settings)
    x = inputs(layer)
    theirs = expected(layer, *x)
    for training in (True, False):
        layer.train(training)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        ours = compiled(*x)
        same(ours, theirs)
        leaves = [*x, *layer.parameters()]
        same(torch.autograd.grad(ours[0].sum(), leaves), torch.autograd.grad(layer(*x)[0].sum(), leaves))
        torch._dynamo.reset()
    program = torch.export.export(layer, tuple(x))
    assert any(node.target is torch.ops.rapt.attention.default for node in program.graph.nodes)
    same(program.module()(*x), theirs)
    grads = torch.func.grad(lambda p: torch.func.functional_call(layer, p, tuple(x))[0].sum())
    parameters = dict(layer.named_parameters())
    found = grads({n: p.detach() for n, p in parameters.items()})
    same(found.values(), torch.autograd.grad(layer(*x)[0].sum(), list(parameters.values())))


def test_in_an_encoder_layer():
    """Its short cut, which would take in_proj_weight for PyTorch's, is not taken; nor is the layer turned into one."""
    model = nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=True)
    model.self_attn = make(torch.float32, num_kv_heads=2, batch_first=True)
    model.eval()
    x = torch.randn(N, L, E)
    with torch.no_grad():
        out = model(x)
        attended = model.norm1(x + expected(model.self_attn, x, x, x)[0])
        torch.testing.assert_close(out, model.norm2(attended + model._ff_block(attended)))
        for change in (rapt.torch.convert, rapt.torch.unconvert):
            assert torch.equal(change(model)(x), out)
            assert type(model.self_attn) is rapt.torch.MultiheadAttention
