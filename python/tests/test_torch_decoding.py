"""rapt.torch.MultiheadAttention with a cache, and with rotary positions."""

import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from torch import nn  # noqa: E402

E, H, N, L = 24, 4, 2, 300  # L: more keys than one cut of the softmax has
SETTINGS = [
    {},
    {"batch_first": True, "num_kv_heads": 2},
    {"batch_first": True, "num_kv_heads": 1, "head_dim": 10, "bias": False},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 24, "vdim": 24, "dtype": torch.float64},
]
ROTARY = {"base": 500.0, "scaling": "linear", "factor": 2.0}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def make(**settings):
    layer = rapt.torch.MultiheadAttention(E, H, **settings).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.5)
    return layer


def tokens(layer, length=L, batch=N):
    shape = (batch, length, E) if layer.batch_first else (length, batch, E)
    return torch.randn(shape, dtype=layer.out_proj.weight.dtype)


def later(length=L):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("rotary", [None, ROTARY])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits_token_by_token(settings, rotary):
    layer = make(**settings)
    x = tokens(layer)
    time = 1 if layer.batch_first else 0
    with torch.no_grad():
        whole, shown = layer(x, x, x, attn_mask=later(), is_causal=True, rotary=rotary)
        for sizes in ([1] * L, [L], [255, 1, 1, 43], [17, 270, 13]):
            cache = layer.new_cache(N, L)
            assert isinstance(cache, rapt.KVCache) and cache.settings()["num_kv_heads"] == layer.num_kv_heads
            parts = [
                layer(part, part, part, is_causal=True, cache=cache, rotary=rotary, need_weights=False)
                for part in x.split(sizes, time)
            ]
            assert torch.equal(torch.cat([out for out, _ in parts], time), whole)
            assert all(weights is None for _, weights in parts) and cache.lengths() == [L] * N
        cache.truncate(L - 2)
        last = x.narrow(time, L - 2, 2)
        weights = layer(last, last, last, is_causal=True, cache=cache, rotary=rotary)[1]
        assert torch.equal(weights, shown[:, L - 2 :])
        cache.truncate(L - 2)
        weights = layer(last, last, last, is_causal=True, cache=cache, rotary=rotary, average_attn_weights=False)[1]
        assert weights.shape == (N, H, 2, shown.shape[2]) and torch.allclose(weights.mean(1), shown[:, L - 2 :])


def test_other_layouts_types_and_windows():
    layer = make(batch_first=True, num_kv_heads=2)
    x = tokens(layer, 12, 1)
    with torch.inference_mode():
        whole = layer(x, x, x, attn_mask=later(12))[0]
        cache = layer.new_cache(capacity=12)
        single = [layer(t, t, t, is_causal=True, cache=cache)[0] for t in x[0].split(1)]  # [L, E]
        assert torch.equal(torch.cat(single), whole[0])

        band = later(12) | torch.ones(12, 12, dtype=torch.bool).tril(-4)
        cache = layer.new_cache(1, 12, window=4)
        parts = [layer(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, 1)]
        assert torch.equal(torch.cat(parts, 1), layer(x, x, x, attn_mask=band)[0])

        cache = layer.new_cache(1, 12, torch.bfloat16)
        assert cache.settings()["dtype"] == "bf16"
        out = layer(x, x, x, is_causal=True, cache=cache)[0]
        assert not torch.equal(out, whole)
        torch.testing.assert_close(out, whole, atol=0.05, rtol=0.05)
    half = make(batch_first=True, num_kv_heads=2, dtype=torch.bfloat16)
    x = tokens(half, 12)
    with torch.no_grad():
        cache = half.new_cache(N, 12)
        parts = [half(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, 1)]
        assert torch.equal(torch.cat(parts, 1), half(x, x, x, attn_mask=later(12))[0])


def test_masks_and_lengths():
    layer = make(batch_first=True)
    x = tokens(layer, 6)
    with torch.no_grad():
        cache = layer.new_cache(N, 9)
        out = layer(x, x, x, is_causal=True, cache=cache, append_lengths=torch.tensor([6, 4]))[0]
        assert cache.lengths() == [6, 4] and not out[1, 4:].any() and out[1, :4].any(-1).all()
        part = x[1:, :4]
        assert torch.equal(out[1:, :4], layer(part, part, part, attn_mask=later(4))[0])
        cache.clear()
        layer(x, x, x, is_causal=True, cache=cache)
        token = x[:, :1]
        mask = torch.tensor([[True, False, False, True, False, False, False]])
        out, weights = layer(token, token, token, attn_mask=mask, is_causal=True, cache=cache)  # the mask counts
        assert weights.shape == (N, 1, 7) and not weights[..., mask[0]].any() and weights[..., ~mask[0]].all()
        assert cache.lengths() == [7, 7]
        every = torch.cat([x, token], 1)
        assert torch.equal(out, layer(token, every, every, attn_mask=mask)[0])
        cache.clear()  # without is_causal, the tokens of a call see each other
        assert torch.equal(layer(x, x, x, cache=cache)[0], layer(x, x, x)[0])
        cache.reorder([1, 0])
        assert torch.equal(layer(token, None, None, cache=cache)[0], layer(token, x.flip(0), x.flip(0))[0])


def test_cross_attention():
    layer = make(batch_first=True, kdim=6, vdim=7, num_kv_heads=2)
    key, value, query = torch.randn(N, 9, 6), torch.randn(N, 9, 7), torch.randn(N, 4, E)
    with torch.no_grad():
        cache = layer.new_cache(N, 9)
        layer.append(key, value, cache)
        whole = layer(query, key, value)
        for i in range(4):
            out, weights = layer(query[:, i : i + 1], None, None, cache=cache)
            assert torch.equal(out, whole[0][:, i : i + 1]) and torch.equal(weights, whole[1][:, i : i + 1])
        assert cache.lengths() == [9, 9]
        cache.clear()
        layer.append(key, value, cache, [9, 5])
        hidden = torch.arange(9) >= torch.tensor([[9], [5]])
        torch.testing.assert_close(
            layer(query, None, None, cache=cache)[0], layer(query, key, value, key_padding_mask=hidden)[0]
        )


def test_refusals():
    layer = make(batch_first=True, dropout=0.5)
    x = tokens(layer, 3)
    cache = layer.new_cache(N, 8)
    for call in (lambda: layer(x, x, x, cache=cache), lambda: layer.append(x, x, cache)):
        with pytest.raises(RuntimeError, match="no_grad"):
            call()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="eager"):
            call()
        layer.train()
        with torch.no_grad(), pytest.raises(RuntimeError, match="eval"):
            call()
        layer.eval()
    layer.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x.clone().requires_grad_(), x, x, cache=cache)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x, x, x, attn_mask=torch.zeros(3, 3).requires_grad_(), cache=cache)
    with pytest.raises(NotImplementedError, match="float32"):
        layer(x.double(), x.double(), x.double(), cache=cache)
    with pytest.raises(NotImplementedError, match="CPU"):
        layer(x.to("meta"), x, x, cache=cache)
    with pytest.raises(RuntimeError, match="key_padding_mask cannot stand beside a cache"):
        layer(x, x, x, cache=cache, key_padding_mask=torch.zeros(N, 3, dtype=torch.bool))
    for need in (True, False):
        with pytest.raises(TypeError, match="KVCache"):
            layer(x, x, x, need_weights=need, cache=object())
    with pytest.raises(TypeError, match="KVCache"):
        layer.append(x, x, None)
    with pytest.raises(RuntimeError, match="rapt"):
        layer.append(x[..., :5], x, cache)
    with pytest.raises(RuntimeError, match="dimensions"):
        layer(x[None], x[None], x[None], cache=cache)
    for options in ({"append_lengths": [1, 2]}, {"key": None}, {"value": None}):
        with pytest.raises(RuntimeError, match="need a cache"):
            layer(**{"query": x, "key": x, "value": x, **options})
    other = make(batch_first=True, num_kv_heads=2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="rapt"):
        other(x, x, x, cache=cache)
    assert cache.lengths() == [0, 0]
    layer(x, x, x, cache=cache)  # no gradient is wanted here
    x = tokens(layer, 6)
    with pytest.raises(RuntimeError, match="the cache is full"):
        layer(x, x, x, cache=cache)
    assert cache.lengths() == [3, 3]


def test_weights_that_change_while_decoding():
    layer = make(batch_first=True, num_kv_heads=2).requires_grad_(False)
    x = tokens(layer, 5)
    for frozen in (False, True):
        layer.freeze_weights(frozen)
        cache, plain = layer.new_cache(N, 5), []
        for i, t in enumerate(x.split(1, 1)):
            if i == 3 and not frozen:
                layer.out_proj.weight.data[2, 3] += 1
            layer(t, t, t, is_causal=True, cache=cache)
            plain.append(vars(layer)["_rapt_packed"])
        assert len(set(map(id, plain))) == (1 if frozen else 2)


def test_compiled_code_leaves_the_graph_for_a_cache():
    layer = make(batch_first=True, num_kv_heads=2).requires_grad_(False)
    x = tokens(layer, 6)
    expected = layer(x, x, x, attn_mask=later(6))[0] * 2
    cache, filled = layer.new_cache(N, 6), layer.new_cache(N, 6)
    layer.append(x, x, filled)
    other = layer.new_cache(N, 6)

    @torch.compile(backend="aot_eager")
    def step(t):
        layer.append(t + 0, t + 0, other)
        return layer(t, t, t, is_causal=True, cache=cache, need_weights=False)[0] * 2

    assert torch.equal(torch.cat([step(t) for t in x.split(1, 1)], 1), expected)
    for ours, theirs in zip(other.export(), filled.export()):
        assert (ours == theirs).all()
    compiled = torch.compile(layer, backend="aot_eager")
    cache.clear()
    out = [compiled(t, t, t, is_causal=True, cache=cache)[0] * 2 for t in x.split(1, 1)]
    assert torch.equal(torch.cat(out, 1), expected)


def test_the_compiler_is_imported_by_need_only():
    code = "import sys, torch\nbefore = 'torch._dynamo' in sys.modules\nimport rapt.torch\n"
    code += "assert before or 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- rotary positions without a cache ----


def turned(x, base, factor):
    """[N, H, L, D] with pairs (i, i + D / 2) turned by the position."""
    d = x.shape[-1]
    speed = base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d) / factor
    angle = torch.arange(x.shape[2])[:, None] * speed
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@pytest.mark.parametrize("training", [True, False])
def test_rotary_and_its_gradients(training):
    layer = make(batch_first=True, num_kv_heads=2, dtype=torch.float64).train(training)
    x = torch.randn(N, 7, E, dtype=torch.float64, requires_grad=True)
    q, k, v = (
        t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for t in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).split([E, E // 2, E // 2], -1)
    )
    q, k = turned(q, 500.0, 2.0), turned(k, 500.0, 2.0)
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.out_proj(attended.transpose(1, 2).flatten(2))
    ours = layer(x, x, x, attn_mask=later(7), rotary=ROTARY)[0]
    torch.testing.assert_close(ours, expected)
    leaves, g = [x, *layer.parameters()], torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(expected, leaves, g)):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert torch.equal(layer(x, x, x, attn_mask=later(7), rotary=ROTARY)[0], ours)
        moved = {**ROTARY, "positions": torch.arange(N * 7).view(N, 7) % 7 + 3}  # only distances count
        torch.testing.assert_close(layer(x, x, x, attn_mask=later(7), rotary=moved)[0], ours)
        plain = rapt.MultiheadAttention(E, H, batch_first=True, num_kv_heads=2, dtype="float64").eval()
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(plain(x, x, x, is_causal=True, rotary=ROTARY)[0], ours)


def test_rotary_refusals():
    layer = make(batch_first=True)
    x = tokens(layer, 3)
    with pytest.raises(ValueError, match="rotary scaling"):
        layer(x, x, x, rotary={"scaling": "none"})
    for training, grad in itertools.product([True, False], repeat=2):
        layer.train(training)
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="positions has 3 numbers"):
            layer(x, x, x, rotary={"positions": [1, 2, 3]})
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="rotary"):
        layer(x, x, x, rotary=ROTARY)
    with pytest.raises(NotImplementedError, match="rotary"):
        layer.to("meta")(*[x.to("meta")] * 3, rotary=ROTARY)
