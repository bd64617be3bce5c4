"""The attention operator on plain CPU tensors: what everything else here ends in.

query is [N, H, L, D], key [N, Hk, S, D], value [N, Hk, S, Dv], of any strides. A mask is [N, H, L, S] where N, H and L
may be 1; booleans block where they are true. Options are those of `rapt._core.attention`, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt import _core

NO_WEIGHTS, MEAN_WEIGHTS, HEAD_WEIGHTS = 0, 1, 2  # which attention weights to return

_attend = _core.attention
_f64 = torch.float64
_f32 = torch.float32


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """[N, H, L, Dv], with the heads of a token side by side in memory, so that merging is free, as PyTorch's."""
    n, h, length, _ = query.shape
    width = value.shape[-1]
    shape, strides = (n, h, length, width), (length * h * width, width, h * width, 1)
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


def empty_lse(query: Tensor) -> Tensor:
    """[N, H, L], in the type of the sums."""
    return query.new_empty(query.shape[:3], dtype=_f64 if query.dtype is _f64 else _f32)


def empty_weights(query: Tensor, key: Tensor, kind: int) -> Tensor:
    """[N, L, S] or [N, H, L, S]; without weights an empty tensor."""
    n, h, length, _ = query.shape
    if kind == NO_WEIGHTS:
        return query.new_empty((0,))
    return query.new_empty((n, length, key.shape[2]) if kind == MEAN_WEIGHTS else (n, h, length, key.shape[2]))


def forward_only(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """The output alone."""
    out = empty_out(query, value)
    try:
        _attend(query, key, value, out, **options)
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"rapt: {error}") from None
    return out


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and weights (empty if none are wanted)."""
    out, lse, weights = empty_out(query, value), empty_lse(query), empty_weights(query, key, kind)
    try:
        _attend(
            query, key, value, out, attn_mask=mask, lse=lse, weights=None if kind == NO_WEIGHTS else weights,
            per_head_weights=kind == HEAD_WEIGHTS, **options,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"rapt: {error}") from None
    return out, lse, weights


def backward(
    d_out: Tensor,
    d_weights: Tensor | None,
    saved: tuple[Tensor, ...],
    mask: Tensor | None,
    kind: int,
    wanted: tuple[bool, bool, bool, bool],
    options: dict[str, Any],
) -> list[Tensor | None]:
    """Gradients of query, key, value and mask, where they are wanted. saved: query, key, value, out, lse."""
    query, key, value, out, lse = saved
    names = ("query", "key", "value", "attn_mask")
    tensors: tuple[Any, ...] = (query, key, value, mask)
    results = [torch.empty_like(t) if want else None for t, want in zip(tensors, wanted)]
    gradients = {name: result for name, result in zip(names, results) if result is not None}
    if gradients:
        _core.attention_backward(
            query, key, value, out, d_out, d_weights, gradients, attn_mask=mask, lse=lse,
            per_head_weights=kind == HEAD_WEIGHTS and d_weights is not None, **options,
        )  # fmt: skip
    return results
