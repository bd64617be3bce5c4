"""The layer: numbers, parameters, caches, files, gradients."""

from __future__ import annotations

import copy
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rapt

from reference import attention, close, softmax_rows


def rows(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected_output(layer: rapt.MultiheadAttention, x: np.ndarray, **options: Any) -> np.ndarray:
    """Self-attention of a batch-first layer with fused weights, in float64."""
    parameters = {name: np.asarray(array, np.float64) for name, array in layer.state_dict().items()}
    projected = x.astype(np.float64) @ parameters["in_proj_weight"].T + parameters.get("in_proj_bias", 0)
    sizes = np.cumsum([layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim])
    heads = [
        part.reshape(*x.shape[:2], -1, layer.head_dim).transpose(0, 2, 1, 3) for part in np.split(projected, sizes, -1)
    ]
    out = attention(*heads, **options)[0].transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return out @ parameters["out_proj.weight"].T + parameters.get("out_proj.bias", 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"num_kv_heads": 2}, {"head_dim": 5}])
def test_forward(dtype: str, settings: dict[str, Any]) -> None:
    layer = rapt.MultiheadAttention(24, 4, batch_first=True, dtype=dtype, seed=7, **settings)
    x = rows(3, 6, 24, dtype=dtype)
    out, weights = layer(x, x, x, is_causal=True)
    assert out.dtype == weights.dtype == dtype and weights.shape == (3, 6, 6)
    close(out, expected_output(layer, x, is_causal=True), dtype)
    assert layer(x, x, x, need_weights=False)[1] is None


def test_layouts_and_masks() -> None:
    layer, first = rapt.MultiheadAttention(24, 4), rapt.MultiheadAttention(24, 4, batch_first=True)
    x = rows(3, 6, 24)
    blocked = np.zeros((3, 6), bool)
    blocked[1, 4:] = True
    out, weights = layer(*[x.transpose(1, 0, 2)] * 3, key_padding_mask=blocked, average_attn_weights=False)
    other, _ = first(x, x, x, key_padding_mask=blocked)
    assert (out.transpose(1, 0, 2) == other).all()
    assert weights.shape == (3, 4, 6, 6) and (weights[1, :, :, 4:] == 0).all()
    single, weights = first(x[1], x[1], x[1], key_padding_mask=blocked[1])
    assert (single == other[1]).all() and weights.shape == (6, 6)
    by_lengths, _ = first(x, x, x, key_lengths=[6, 4, 6])
    assert (by_lengths == other).all()
    upper = np.triu(np.ones((6, 6), bool), 1)
    assert (first(x, x, x, attn_mask=upper)[0] == first(x, x, x, is_causal=True)[0]).all()
    assert (first(x, x, x, attn_mask=upper)[0] == first(x, x, x, window=(None, 0))[0]).all()


def test_cross_attention_with_extra_keys() -> None:
    layer = rapt.MultiheadAttention(24, 4, kdim=10, vdim=11, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    out, weights = layer(rows(2, 3, 24), rows(2, 7, 10), rows(2, 7, 11))
    assert out.shape == (2, 3, 24) and weights.shape == (2, 3, 9)
    assert np.allclose(weights.sum(-1), 1)
    with pytest.raises(ValueError, match="causal"):
        layer(rows(2, 3, 24), rows(2, 7, 10), rows(2, 7, 11), is_causal=True)
    layer(rows(2, 3, 24), rows(2, 7, 10), rows(2, 7, 11), is_causal=True, causal_offset=0)


def test_parameters() -> None:
    layer = rapt.MultiheadAttention(8, 2, batch_first=True)
    x = rows(1, 3, 8)
    names = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert list(layer.state_dict()) == names and layer.num_parameters == 4 * 8 * 8 + 4 * 8
    before = layer(x, x, x)[0]
    layer.state_dict()["out_proj.bias"] += 1
    layer.commit()
    assert np.allclose(layer(x, x, x)[0], before + 1)
    other = rapt.MultiheadAttention(8, 2, batch_first=True, seed=5)
    assert (other(x, x, x)[0] != layer(x, x, x)[0]).any()
    other.load_state_dict({name: array.astype(np.float64) for name, array in layer.state_dict().items()})
    assert (other(x, x, x)[0] == layer(x, x, x)[0]).all()
    with pytest.raises(ValueError, match=r"no in_proj_bias.*expected"):
        other.load_state_dict({name: layer.state_dict()[name] for name in names if name != "in_proj_bias"})
    with pytest.raises(ValueError, match=r"out_proj\.bias has shape"):
        other.load_state_dict({**layer.state_dict(), "out_proj.bias": np.zeros(9, np.float32)})
    assert (other(x, x, x)[0] == layer(x, x, x)[0]).all()
    view = layer.state_dict()["out_proj.bias"]
    expected = view.copy()
    del layer
    assert (view == expected).all()  # a view keeps the layer's memory


def test_settings_and_modes() -> None:
    layer = rapt.MultiheadAttention(16, 4, 0.5, num_kv_heads=2, causal=True)
    assert (layer.embed_dim, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (16, 4, 2, 4)
    assert "embed_dim=16" in repr(layer) and layer.training
    x = rows(5, 16)
    assert (layer(x, x, x)[0] != layer(x, x, x)[0]).any()
    assert layer.eval() is layer and not layer.training
    assert (layer(x, x, x)[0] == layer(x, x, x)[0]).all()
    with pytest.raises(ValueError, match="num_heads 6 does not divide embed_dim 512"):
        rapt.MultiheadAttention(512, 6)
    for device in ("cpu", "cpu:0", None):
        assert rapt.MultiheadAttention(8, 2, 0.0, True, False, False, None, None, True, device, "f64").dtype == "f64"
    for device in ("cuda", "cuda:1", "mps", 0):
        with pytest.raises(ValueError, match=f"device is '{device}', expected 'cpu'"):
            rapt.MultiheadAttention(8, 2, device=device)
    with pytest.raises(TypeError, match="dtype is 'int8'"):
        rapt.MultiheadAttention(8, 2, dtype="int8")


@pytest.mark.parametrize("window", [None, 3])
def test_cache(window: int | None) -> None:
    layer = rapt.MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2)
    x = rows(2, 9, 16)
    rotary = {"base": 10000.0, "scaling": "linear", "factor": 2.0}
    band = {"window": (window - 1, None)} if window else {}
    whole = layer(x, x, x, is_causal=True, rotary=rotary, **band)[0]
    cache = rapt.KVCache(layer, batch=2, capacity=9, window=window)
    parts = []
    for part in np.split(x, [5, 6, 8], axis=1):
        out, weights = layer(part, part, part, is_causal=True, cache=cache, rotary=rotary)
        assert weights.shape == (2, part.shape[1], cache.lengths()[0])
        parts.append(out)
    assert (np.concatenate(parts, axis=1) == whole).all()
    assert cache.lengths() == [9, 9] and cache.settings()["num_kv_heads"] == 2


def test_cache_is_handled() -> None:
    layer = rapt.MultiheadAttention(16, 4, batch_first=True)
    x = rows(2, 4, 16)
    cache = rapt.KVCache(layer, 2, 8)
    layer(x, x, x, is_causal=True, cache=cache, append_lengths=[4, 2], need_weights=False)
    assert cache.lengths() == [4, 2]
    keys, values = cache.export()
    assert keys.shape == values.shape == (2, 4, 4, 4) and (keys[1, 2:] == 0).all()
    cache.reorder([1, 1])
    assert cache.lengths() == [2, 2]
    cache.copy(0, 1)
    cache.truncate(1)
    assert cache.lengths() == [1, 1]
    cache.import_from(keys, values, [4, 2])
    assert cache.lengths() == [4, 2] and (cache.export(np.float64)[0] == keys).all()
    cache.clear()
    assert cache.lengths() == [0, 0]
    layer.append(x, x, cache)
    out, _ = layer(x[:, :1], None, None, cache=cache)
    assert np.allclose(out, layer(x[:, :1], x, x)[0], atol=1e-6)
    with pytest.raises(RuntimeError, match="the cache is full"):
        layer.append(rows(2, 5, 16), rows(2, 5, 16), cache)
    with pytest.raises(ValueError, match="sequences"):
        cache.reorder([0])


def test_files(tmp_path: Path) -> None:
    layer = rapt.MultiheadAttention(16, 4, 0.25, batch_first=True, num_kv_heads=2, causal=True).eval()
    x = rows(2, 5, 16)
    layer.save(tmp_path / "layer.safetensors", scheme="llama", prefix="model.layers.0.self_attn.")
    assert [found["prefix"] for found in rapt.layers(tmp_path / "layer.safetensors")] == ["model.layers.0.self_attn."]
    again = rapt.load(str(tmp_path / "layer.safetensors")).eval()
    assert (again.num_heads, again.num_kv_heads, again.dropout, again.batch_first) == (4, 2, 0.25, True)
    assert (again(x, x, x)[0] == layer(x, x, x)[0]).all()
    double = rapt.load(tmp_path / "layer.safetensors", "model.layers.0.self_attn.", 4, dtype="float64")
    assert double.dtype == "f64"
    rapt.save(layer, tmp_path / "again.safetensors", scheme="llama", prefix="model.layers.0.self_attn.")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "layer.safetensors").read_bytes()
    rapt.save(layer, str(tmp_path / "half.safetensors"), dtype="float16")
    assert rapt.load(tmp_path / "half.safetensors").dtype == "f16"
    with pytest.raises(TypeError, match="layer is <class 'str'>"):
        rapt.save("layer.safetensors", layer)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        rapt.load(tmp_path / "none.safetensors")
    with pytest.raises(OSError, match="none"):
        layer.save(tmp_path / "none" / "layer.safetensors")
    with pytest.raises(ValueError, match="expected one of auto, pytorch"):
        layer.save(tmp_path / "layer.safetensors", scheme="pytroch")
    with pytest.raises(ValueError, match=r"model\.layers\.1"):
        rapt.load(tmp_path / "layer.safetensors", "model.layers.1.self_attn.")
    (tmp_path / "broken.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError):
        rapt.load(tmp_path / "broken.safetensors")


def test_a_layer_that_drops_everything() -> None:
    layer = rapt.MultiheadAttention(16, 4, 1.0, batch_first=True)
    bias = layer.state_dict()["out_proj.bias"]
    bias += 3
    layer.commit()
    x, state = rows(2, 5, 16), rapt.State()
    out, weights = layer(x, x, x, state=state)
    assert (out == bias).all() and (weights == 0).all()
    gradients = layer.backward(state, x)
    assert not any(gradients[name].any() for name in ("query", "in_proj_weight", "out_proj.weight"))
    assert gradients["out_proj.bias"].any()
    assert (layer.eval()(x, x, x)[0] != bias).any()


def test_a_layer_that_is_too_large() -> None:
    with pytest.raises(MemoryError, match="bytes were refused"):
        rapt.MultiheadAttention(1 << 23, 1)  # a petabyte, for which no process has addresses


def test_copies() -> None:
    layer = rapt.MultiheadAttention(16, 4, 0.25, add_bias_kv=True, add_zero_attn=True, kdim=5, scale=0.3).eval()
    q, k, v = rows(3, 16), rows(4, 5), rows(4, 16)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert (other(q, k, v)[0] == layer(q, k, v)[0]).all() and not other.training
    for thing in (rapt.KVCache(layer, 1, 4), rapt.State(), layer.core):
        with pytest.raises(TypeError):
            pickle.dumps(thing)


def test_gradients() -> None:
    layer = rapt.MultiheadAttention(6, 2, batch_first=True, dtype="float64", kdim=4)
    q, k, v = (rows(2, 3, n, dtype=np.float64, seed=n) for n in (6, 4, 6))
    d_out = rows(2, 3, 6, dtype=np.float64, seed=9)
    state = rapt.State()
    layer(q, k, v, is_causal=True, state=state, need_weights=False)
    gradients = layer.backward(state, d_out)
    assert set(gradients) == {"query", "key", "value", *layer.state_dict()}
    for name, array in {"query": q, "key": k, "value": v, **layer.state_dict()}.items():
        at, step, losses = tuple(n // 2 for n in array.shape), 1e-5, []
        for change in (step, -2 * step, step):
            array[at] += change
            layer.commit()
            losses.append((layer(q, k, v, is_causal=True, need_weights=False)[0] * d_out).sum())
        assert gradients[name][at] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-7)
    with pytest.raises(RuntimeError, match="commit"):
        layer.backward(state, d_out)
    x = rows(2, 3, 6, dtype=np.float64)
    plain = rapt.MultiheadAttention(6, 2, batch_first=True, dtype="float64")
    plain(x, x, x, state=state)
    assert list(plain.backward(state, d_out))[:2] == ["query", "in_proj_weight"]


def test_a_state_keeps_what_it_borrows() -> None:
    layer = rapt.MultiheadAttention(8, 2, batch_first=True, dtype="float64")
    x, d_out = rows(2, 64, 8, dtype=np.float64), rows(2, 64, 8, dtype=np.float64, seed=1)
    bias = rows(64, 64, dtype=np.float64)
    state = rapt.State()
    layer(x, x, x, attn_mask=bias, key_lengths=[60, 50], state=state)
    expected = layer.backward(state, d_out)["query"]
    layer(x.copy(), x, x, attn_mask=bias.copy(), key_lengths=[60, 50], state=state)
    for _ in range(20):
        rows(64, 64, dtype=np.float64)  # takes memory that was given back
    gradients = layer.backward(state, d_out)
    assert np.allclose(gradients["query"] + gradients["key"], expected)


def test_states_of_others_are_not_seen() -> None:
    """A new state may have the memory of one that is gone, and shows nothing of it."""
    layer = rapt.MultiheadAttention(8, 2, batch_first=True)
    x, longer = rows(2, 5, 8), rows(3, 9, 8)
    state = rapt.State()
    layer(x, x, x, state=state, need_weights=False)
    expected = layer.backward(state, x)
    kept = [rapt._core.State() for _ in range(70)]  # more than are kept
    for each in kept:
        layer.core.forward(longer, longer, longer, np.empty_like(longer), state=each)
    views = kept[0].saved()
    query = np.array(views["query"])
    del state, each, kept
    fresh = [rapt._core.State() for _ in range(70)]
    for each in fresh:
        assert each.saved() is None
        with pytest.raises(RuntimeError, match="state is empty"):
            layer.core.backward(each, x, None, {})
        with pytest.raises(ValueError):
            layer.core.forward(x[..., :4], x, x, np.empty_like(x), state=each)
        assert each.saved() is None
        layer.core.forward(x, x, x, np.empty_like(x), state=each)
        found = np.empty_like(x)
        layer.core.backward(each, x, None, {"query": found, "key": found, "value": found})
        assert (found == expected["query"]).all()
    assert (np.asarray(views["query"]) == query).all()


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults, and looks at /proc")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@needs_linux
def test_memory_of_states_is_used_again() -> None:
    def fill(batch: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        state = rapt._core.State()
        layer.core.forward(x[:batch], x[:batch], x[:batch], out[:batch], state=state)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    layer = rapt.MultiheadAttention(64, 2, batch_first=True)
    x = rows(1, 1, 64).repeat(160000, 0)
    out = np.zeros_like(x)
    fill(10000)
    assert sum(fill(10000) for _ in range(20)) < 40  # 10 MB each
    fill(10000), fill(160000)  # the largest has 160 MB, and gives them back
    before = resident()
    state = rapt._core.State()
    layer.core.forward(x, x, x, out, state=state)
    assert resident() > before + (100 << 20)
    del state
    assert resident() < before + (30 << 20)


@needs_linux
def test_small_states_do_not_hold_the_memory_of_large_ones() -> None:
    def fill(batch: int) -> rapt._core.State:
        state = rapt._core.State()
        layer.core.forward(x[:batch], x[:batch], x[:batch], out[:batch], state=state)
        return state

    layer = rapt.MultiheadAttention(64, 2, batch_first=True)
    x = rows(1, 1, 64).repeat(30000, 0)
    out = np.zeros_like(x)
    before = resident()
    kept = []
    for _ in range(16):  # 30 MB each
        fill(30000)
        kept.append(fill(1))
    assert resident() < before + (330 << 20)  # what may be kept: 128 MB, and as much with the small ones


def test_weights_are_those_of_the_scores() -> None:
    layer = rapt.MultiheadAttention(8, 1, batch_first=True, dtype="float64")
    x = rows(1, 5, 8, dtype=np.float64)
    parameters = layer.state_dict()
    q, k, _ = np.split(x[0] @ parameters["in_proj_weight"].T + parameters["in_proj_bias"], 3, axis=-1)
    close(layer(x, x, x)[1][0], softmax_rows(q @ k.T / np.sqrt(8))[0], "float64")


def test_errors_of_the_layer() -> None:
    layer = rapt.MultiheadAttention(16, 4, batch_first=True)
    x = rows(2, 5, 16)
    with pytest.raises(ValueError, match="query"):
        layer(x[..., :8], x, x)
    with pytest.raises(TypeError, match="f64"):
        layer(x.astype(np.float64), x, x)
    with pytest.raises(ValueError, match="rotary scaling"):
        layer(x, x, x, rotary={"scaling": "none"})
    with pytest.raises(ValueError, match="positions has 3 numbers"):
        layer(x, x, x, rotary={"positions": [1, 2, 3]})
    with pytest.raises(ValueError, match="append_lengths"):
        layer(x, x, x, need_weights=False, append_lengths=[1, 2])
    with pytest.raises(TypeError, match="cache is"):
        layer(x, x, x, need_weights=False, cache=layer)


def test_functional_of_the_binding() -> None:
    from rapt import _core

    layer = rapt.MultiheadAttention(8, 2, batch_first=True, dtype="float64", num_kv_heads=1)
    x, d_out = rows(2, 5, 8, dtype=np.float64), rows(2, 5, 8, dtype=np.float64, seed=1)
    weights = {name.replace(".", "_"): array for name, array in layer.state_dict().items()}
    weights.update(num_heads=2, num_kv_heads=1, batch_first=True)
    out, state, core_state = np.empty_like(x), rapt.State(), _core.State()
    assert core_state.saved() is None
    _core.functional(weights, x, x, x, out, causal=True, state=core_state)
    assert (out == layer(x, x, x, is_causal=True, state=state)[0]).all()
    saved = core_state.saved()
    assert np.asarray(saved["query"]).shape == (2, 2, 5, 4) and np.asarray(saved["lse"]).shape == (2, 2, 5)
    d_x, d_w = np.empty_like(x), np.empty_like(weights["in_proj_weight"])
    wanted = {"query": d_x, "key": d_x, "value": d_x, "in_proj_weight": d_w}
    _core.functional_backward(weights, core_state, d_out, None, wanted)
    expected = layer.backward(state, d_out)
    assert np.allclose(d_x, expected["query"], atol=1e-14)
    assert np.allclose(d_w, expected["in_proj_weight"], atol=1e-14)
    with pytest.raises(ValueError, match="num_heads"):
        _core.functional({**weights, "num_heads": 3}, x, x, x, out)
