"""Attention written out in NumPy's float64, and random arrays for it."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def softmax_rows(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and log-sum-exp of each row; a row of -inf alone has weights 0."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return weights / np.where(total > 0, total, 1), lse[..., 0]


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: Any = 0,
    window: Any = None,
    key_lengths: Any = None,
    key_start: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp; heads in groups are shared as the shapes say."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    if q.ndim > 3 and k.shape[-3] not in (1, q.shape[-3]) and q.shape[-3] != 1:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    queries, keys = scores.shape[-2:]
    scores = np.broadcast_to(scores, (*np.broadcast_shapes(scores.shape[:-2], v.shape[:-2]), queries, keys))
    if isinstance(causal_offset, str):
        causal_offset = keys - queries

    def of_each(numbers: Any) -> np.ndarray:  # a number for each sequence, broadcast over heads, queries and keys
        numbers = np.asarray(numbers)
        if numbers.ndim == 0:
            return numbers
        batch = scores.shape[:-3] if scores.ndim > 3 else scores.shape[:-2]
        return numbers.reshape(batch + (1,) * (scores.ndim - len(batch)))

    position = np.arange(queries)[:, None] + of_each(causal_offset)
    key_index = np.arange(keys)
    sees = np.ones(scores.shape, bool)
    if is_causal:
        sees &= key_index <= position
    if window is not None:
        left, right = window
        sees &= True if left is None else key_index >= position - left
        sees &= True if right is None else key_index <= position + right
    first = of_each(0 if key_start is None else key_start)
    sees &= key_index >= first
    if key_lengths is not None:
        sees &= key_index < first + of_each(key_lengths)
    if attn_mask is not None and np.asarray(attn_mask).dtype == bool:
        sees &= attn_mask
    elif attn_mask is not None:
        scores = scores + np.asarray(attn_mask).astype(np.float64)
    weights, lse = softmax_rows(np.where(sees, scores, -np.inf))
    return weights @ v, lse


def close(got: Any, expected: np.ndarray, dtype: str) -> None:
    """Fails unless all are close, in units of the largest value."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    assert (got[~finite] == expected[~finite]).all()
    largest = max(1.0, np.abs(expected[finite]).max(initial=0))
    assert np.abs(got[finite] - expected[finite]).max(initial=0) <= TOLERANCE[dtype] * largest


def strided(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Random numbers whose memory lies in a random order of dimensions, backwards or with gaps."""
    order = rng.permutation(len(shape))
    array = rng.standard_normal([shape[d] * 2 for d in order]).astype(dtype).transpose(np.argsort(order))
    return array[tuple(slice(None, None, 2) if rng.random() < 0.5 else slice(s - 1, None, -1) if s else slice(0)
                       for s in shape)]  # fmt: skip
