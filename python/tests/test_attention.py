"""The operator beside NumPy's float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rapt

from reference import attention, close, strided


@pytest.mark.parametrize("seed", range(300))
def test_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = rng.choice(["float32", "float64", "float16"], p=[0.5, 0.3, 0.2])
    rank = rng.integers(2, 6)
    groups, heads_kv = (int(rng.integers(1, 4)), int(rng.integers(1, 4))) if rank > 3 else (1, 1)
    lead = [int(n) for n in rng.integers(1, 4, max(rank - 3, 0))]
    queries, keys, width, width_v = (int(n) for n in rng.integers(1, 40, 4))

    def lead_of(heads: int) -> list[int]:
        sizes = [1 if rng.random() < 0.2 else n for n in lead]
        return sizes + ([heads] if rank > 3 else [])

    q = strided(rng, (*lead_of(heads_kv * groups), queries, width), dtype)
    k = strided(rng, (*lead_of(heads_kv), keys, width), dtype)
    v = strided(rng, (*lead_of(heads_kv), keys, width_v), dtype)
    batch = np.broadcast_shapes(*(x.shape[: max(rank - 3, 0)] for x in (q, k, v)))
    options: dict[str, Any] = {"is_causal": bool(rng.random() < 0.5)}
    if rng.random() < 0.5:
        full = (*batch, *((heads_kv * groups,) if rank > 3 else ()), queries, keys)
        shape = [1 if rng.random() < 0.3 else n for n in full][int(rng.integers(0, rank - 1)) :]
        kind = rng.choice(["bool", dtype, "float32"])
        options["attn_mask"] = strided(rng, tuple(shape)) > -0.5 if kind == "bool" else strided(rng, tuple(shape), kind)
    if rng.random() < 0.3:
        options["window"] = (
            [None, int(rng.integers(0, keys))][rng.integers(2)],
            [None, int(rng.integers(0, keys))][rng.integers(2)],
        )
    sequences = int(np.prod(batch)) if rank > 2 else 1
    choice = rng.integers(4)
    if choice == 1:
        options["causal_offset"] = int(rng.integers(-3, 10))
    elif choice == 2:
        options["causal_offset"] = "bottom_right"
    elif choice == 3 and rank > 2:
        options["causal_offset"] = rng.integers(-3, 10, sequences)
    if rng.random() < 0.3:
        options["key_lengths"] = rng.integers(0, keys + 1, sequences) if rank > 2 else int(rng.integers(0, keys + 1))
        if rng.random() < 0.5:
            options["key_start"] = keys - np.max(options["key_lengths"])
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0, 1))

    out, lse = rapt.scaled_dot_product_attention(q, k, v, **options, enable_gqa=groups > 1, return_lse=True)
    expected, expected_lse = attention(q, k, v, **options)
    assert type(out) is np.ndarray and out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    close(out, expected, dtype)
    close(lse, expected_lse, dtype)


def arrays(*shape: int, dtype: Any = np.float32, count: int = 3, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


def test_a_true_mask_attends() -> None:
    q, k, v = arrays(2, 5, 8)
    mask = np.zeros((5, 5), bool)
    mask[:, 2] = True
    out = rapt.scaled_dot_product_attention(q, k, v, mask)
    assert (out == v[:, 2:3]).all()


def test_no_key_gives_zeros() -> None:
    q, k, v = arrays(2, 5, 8)
    out, lse = rapt.scaled_dot_product_attention(q, k, v, np.zeros((5, 5), bool), return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    assert (rapt.scaled_dot_product_attention(q, k[:, :0], v[:, :0]) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_query_without_numbers_disturbs_no_other(value: float, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for queries, keys in [(1, 65), (7, 128), (20, 128), (200, 300)]:  # rows of scores long enough to be taken together
        q, k, v = (rng.standard_normal((2, n, 64)).astype(dtype) for n in (queries, keys, keys))
        expected = rapt.scaled_dot_product_attention(q, k, v)
        for row in {0, queries // 2, queries - 1}:
            spoiled = q.copy()
            spoiled[1, row] = value
            out = rapt.scaled_dot_product_attention(spoiled, k, v)
            alone = rapt.scaled_dot_product_attention(spoiled[:, row : row + 1], k, v)
            np.testing.assert_array_equal(out[:, row], alone[:, 0])
            np.testing.assert_array_equal(np.delete(out[1], row, 0), np.delete(expected[1], row, 0))
            np.testing.assert_array_equal(out[0], expected[0])


def test_empty() -> None:
    q, k, v = arrays(0, 3, 5, 8)
    assert rapt.scaled_dot_product_attention(q, k, v).shape == (0, 3, 5, 8)
    q, k, v = arrays(2, 3, 5, 8)
    assert rapt.scaled_dot_product_attention(q[:, :, :0], k, v).shape == (2, 3, 0, 8)


def test_batch_that_does_not_merge() -> None:
    q, k, v = (x.transpose(1, 0, 2, 3, 4) for x in arrays(3, 2, 4, 5, 8))
    mask = np.random.default_rng(1).random((2, 1, 1, 5, 5)) > 0.3
    lengths = [[1, 2, 3], [4, 5, 2]]
    options = {"attn_mask": mask, "key_lengths": lengths, "causal_offset": [3, 2, 1, 0, 1, 2], "is_causal": True}
    close(rapt.scaled_dot_product_attention(q, k, v, **options), attention(q, k, v, **options)[0], "float32")


def test_read_only_and_unowned() -> None:
    q, k, v = arrays(2, 5, 8)
    expected = rapt.scaled_dot_product_attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    assert (rapt.scaled_dot_product_attention(q, k, v) == expected).all()
    assert (rapt.scaled_dot_product_attention(np.broadcast_to(q[:1], q.shape), k, v)[0] == expected[0]).all()


def test_inputs_are_not_changed() -> None:
    q, k, v = arrays(2, 4, 16, 8)
    before = [x.copy() for x in (q, k, v)]
    mask = np.tril(np.ones((16, 16), bool))
    rapt.scaled_dot_product_attention(q, k, v, mask)
    assert all((x == y).all() for x, y in zip((q, k, v), before))
    assert (mask == np.tril(np.ones((16, 16), bool))).all()


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = arrays(2, 5, 8, dtype=ml_dtypes.bfloat16)
    out, lse = rapt.scaled_dot_product_attention(q, k, v, return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    close(out, attention(q, k, v)[0], "bfloat16")


def test_subclasses_and_arrays_of_strangers() -> None:
    q, k, v = arrays(5, 8)

    class Mine(np.ndarray):
        pass

    class Stranger:
        def __init__(self, array: np.ndarray) -> None:
            self.__array_interface__ = array.__array_interface__
            self.array = array

    expected = rapt.scaled_dot_product_attention(q, k, v)
    assert (rapt.scaled_dot_product_attention(q.view(Mine), k, v) == expected).all()
    assert (rapt.scaled_dot_product_attention(q, Stranger(k), Stranger(v)) == expected).all()


def test_dropout() -> None:
    q, k = np.zeros((2, 4, 50, 8), np.float32), np.zeros((2, 4, 200, 8), np.float32)
    v = np.ones((2, 4, 200, 1), np.float32)
    rapt.manual_seed(3)
    first, second = (rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.25) for _ in range(2))
    assert (first != second).any()
    assert abs(first.mean() - 1) < 0.02
    rapt.manual_seed(3)
    assert (rapt.scaled_dot_product_attention(q, k, v, dropout_p=0.25) == first).all()
    out, lse = rapt.scaled_dot_product_attention(q, k, v, dropout_p=1.0, return_lse=True)
    assert (out == 0).all() and np.allclose(lse, np.log(200))


def test_backward_of_the_binding() -> None:
    from rapt import _core

    q, k, v, d_out, bias = arrays(1, 2, 6, 6, dtype=np.float64, count=5)
    out, lse = np.empty_like(q), np.empty((1, 2, 6))
    _core.attention(q, k, v, out, lse=lse, attn_mask=bias, causal=True)
    gradients = {name: np.empty_like(q) for name in ("query", "key", "value", "attn_mask")}
    _core.attention_backward(q, k, v, out, d_out, None, gradients, lse=lse, attn_mask=bias, causal=True)
    for name, array in (("query", q), ("key", k), ("value", v), ("attn_mask", bias)):
        at, step = (0, 1, 3, 2), 1e-5
        losses = []
        for sign in (1, -1):
            array[at] += sign * step
            losses.append((attention(q, k, v, bias, is_causal=True)[0] * d_out).sum())
            array[at] -= sign * step
        assert gradients[name][at] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6, abs=1e-8)


ONE = np.zeros((4, 5, 8), np.float32)
FOUR = np.zeros((1, 4, 5, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "message", "args", "options"),
    [
        (TypeError, "expected an array", (ONE, ONE, None), {}),
        (TypeError, "query is <class 'list'>", ([1.0], ONE, ONE), {}),
        (TypeError, "key is of type int64", (ONE, ONE.astype(np.int64), ONE), {}),
        (TypeError, "complex", (ONE.astype(complex), ONE, ONE), {}),
        (TypeError, "byte order", (ONE.astype(">f4"), ONE, ONE), {}),
        (TypeError, "f64", (ONE, ONE.astype(np.float64), ONE), {}),
        (ValueError, "query has 1 dimensions", (ONE[0, 0], ONE, ONE), {}),
        (ValueError, "6 dimensions", (FOUR[None, None], ONE, ONE), {}),
        (ValueError, "does not broadcast", (ONE, ONE[:3], ONE), {}),
        (ValueError, "enable_gqa", (FOUR, FOUR[:, :2], FOUR[:, :2]), {}),
        (ValueError, "head", (FOUR, FOUR[:, :3], FOUR[:, :3]), {"enable_gqa": True}),
        (ValueError, "attn_mask", (ONE, ONE, ONE, np.zeros((5, 4), bool)), {}),
        (ValueError, "attn_mask has 4 dimensions", (ONE, ONE, ONE, np.zeros((1, 1, 5, 5), bool)), {}),
        (ValueError, "dropout", (ONE, ONE, ONE), {"dropout_p": 1.5}),
        (ValueError, "scale", (ONE, ONE, ONE), {"scale": float("nan")}),
        (TypeError, "real number", (ONE, ONE, ONE), {"scale": "x"}),
        (ValueError, "window", (ONE, ONE, ONE), {"window": (1, 2, 3)}),
        (ValueError, "causal_offset", (ONE, ONE, ONE), {"causal_offset": "top"}),
        (ValueError, "causal_offset has 2 numbers", (ONE, ONE, ONE), {"causal_offset": [1, 2]}),
        (TypeError, "key_lengths holds 1.5", (ONE, ONE, ONE), {"key_lengths": [1.5, 1, 1, 1]}),
        (ValueError, "key_lengths", (ONE, ONE, ONE), {"key_lengths": 6}),
        (ValueError, "stride", (np.zeros((5, 5), "f4,u1")["f0"], ONE, ONE), {}),
    ],
)
def test_errors(error: type[Exception], message: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        rapt.scaled_dot_product_attention(*args, **options)


def test_options_of_the_binding_are_known() -> None:
    from rapt import _core

    with pytest.raises(TypeError, match="no option 'casual'"):
        _core.attention(FOUR, FOUR, FOUR, FOUR.copy(), casual=True)
    with pytest.raises(ValueError, match="read-only"):
        _core.attention(FOUR, FOUR, FOUR, np.broadcast_to(FOUR, FOUR.shape))
