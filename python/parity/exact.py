"""Attention in NumPy's longest floating-point type, with gradients by hand: what both sides are held against.

A tensor that is broadcast gets the sum of its gradients. A query that sees no key attends to nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
LONG = np.longdouble


def summed_to(array: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of what was broadcast from `shape`."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    for d, size in enumerate(shape):
        if size == 1:
            array = array.sum(d, keepdims=True)
    return array


def turned(array: Array) -> Array:
    """The last two dimensions exchanged."""
    return np.swapaxes(array, -1, -2)


def softmax(scores: Array) -> Array:
    """Over the last dimension; zeros where all of it is -inf."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    numerator = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = numerator.sum(-1, keepdims=True)
    return numerator / np.where(total == 0, 1, total)


def attention_weights(q: Array, k: Array, bias: Array, scale: Array) -> Array:
    """softmax(q @ k.T * scale + bias); bias holds -inf where a query does not see a key."""
    return softmax(q @ turned(k) * scale + bias)


def attention_gradients(
    q: Array, k: Array, v: Array, weights: Array, scale: Array, d_out: Array, d_weights: Array, sign: int
) -> tuple[Array, Array, Array, Array]:
    """Gradients of q, k, v and the scores, none of them summed. sign -1: nothing cancels, for the sizes of summands."""
    d_p = d_out @ turned(v) + d_weights
    d_scores = weights * (d_p - sign * (weights * d_p).sum(-1, keepdims=True))
    return d_scores @ k * scale, turned(d_scores) @ q * scale, turned(weights) @ d_out, d_scores


def errors(results: dict[str, Array], exact: dict[str, Array], sizes: dict[str, Array]) -> dict[str, float]:
    """The largest difference of each result, in parts of the largest sum, without signs, that leads to its numbers."""
    found = {}
    for name, array in results.items():
        size = float(sizes[name].max(initial=0))
        difference = float(np.abs(array - exact[name]).max(initial=0))
        found[name] = difference / size if size > 0 else difference
    return found
