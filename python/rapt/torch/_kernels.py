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
_attend_backward = _core.attention_backward
_NAMES = ("query", "key", "value", "attn_mask")
_f64 = torch.float64


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """[N, H, L, Dv], with the heads of a token side by side in memory, so that merging is free, as PyTorch's."""
    n, h, length, _ = query.shape
    width = value.shape[-1]
    shape, strides = (n, h, length, width), (length * h * width, width, h * width, 1)
    return torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)


def empty_lse(query: Tensor) -> Tensor:
    """[N, H, L], in float64: gradients are more exact than with the type of the sums."""
    n, h, length, _ = query.shape
    return torch.empty((n, h, length), dtype=_f64, device=query.device)


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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, log-sum-exp and weights, None if they are not wanted."""
    out, lse, weights = empty_out(query, value), empty_lse(query), None
    if mask is not None:
        options = {"attn_mask": mask, **options}
    if kind:
        weights = empty_weights(query, key, kind)
        options = {"weights": weights, "per_head_weights": kind == HEAD_WEIGHTS, **options}
    try:
        _attend(query, key, value, out, lse=lse, **options)
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
    results: list[Any] = []
    gradients = {}
    for name, tensor, want in zip(_NAMES, (query, key, value, mask), wanted):
        results.append(torch.empty_like(tensor) if want and tensor is not None else None)
        if want:
            gradients[name] = results[-1]
    if mask is not None:
        options = {"attn_mask": mask, **options}
    if d_weights is not None and kind == HEAD_WEIGHTS:
        options = {"per_head_weights": True, **options}
    if gradients:
        _attend_backward(query, key, value, out, d_out, d_weights, gradients, lse=lse, **options)
    return results
