"""Tensors of 2 to 5 dimensions that broadcast, as PyTorch's attention takes them, brought to [N, H, L, D]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _common(sizes: Sequence[int], what: str) -> int:
    found = 1
    for size in sizes:
        if size != 1:
            if found not in (1, size):
                raise RuntimeError(f"rapt: {what} of query, key and value do not broadcast: {tuple(sizes)}")
            found = size
    return found


def _to_four(tensor: Tensor, rank: int, as_heads: bool) -> Tensor:
    """[N, H, L, D] of a tensor of `rank` dimensions or fewer; [A, N, H, L, D] if there are five."""
    for _ in range(rank - tensor.ndim):
        tensor = tensor.unsqueeze(0)
    if rank == 2:
        return tensor[None, None]
    if rank == 3:
        return tensor.unsqueeze(0 if as_heads else 1)
    return tensor


def _flatten(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    return tensor.expand(*lead, *tensor.shape[2:]).flatten(0, 1)


def _share_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of [N, H, L, D] as the kernels take them: key and value have the same, which divide the query's."""
    h, hk, hv = query.shape[1], key.shape[1], value.shape[1]
    if grouped:
        if hk == 0 or hv == 0 or h % hk or h % hv:
            raise RuntimeError(f"rapt: {h} heads of query are no multiple of {hk} of key and {hv} of value")
        if hk != hv:
            key, value = key.repeat_interleave(h // hk, 1), value.repeat_interleave(h // hv, 1)
        return query, key, value
    heads = _common((h, hk, hv), "heads (pass enable_gqa=True for heads in groups)")
    query = query.expand(-1, heads, -1, -1)
    if hk != hv:
        key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return query, key, value


def bring_together(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Tensors of 2 to 5 dimensions as [N, H, L, D], and the sizes before [L, D] that the result has."""
    rank = max(query.ndim, key.ndim, value.ndim)
    if min(query.ndim, key.ndim, value.ndim) < 2 or rank > 5:
        raise RuntimeError(f"rapt: expected 2 to 5 dimensions, not {query.ndim}, {key.ndim} and {value.ndim}")
    q, k, v = (_to_four(t, rank, grouped) for t in (query, key, value))
    lead: tuple[int, ...] = ()
    if rank == 5:
        lead = tuple(_common([t.shape[d] for t in (q, k, v)], "batch sizes") for d in (0, 1))
        q, k, v = (_flatten(t, lead) for t in (q, k, v))
    else:
        batch = _common([t.shape[0] for t in (q, k, v)], "batch sizes")
        q, k, v = (t.expand(batch, -1, -1, -1) for t in (q, k, v))
    q, k, v = _share_heads(q, k, v, grouped)
    if rank == 5:
        return q, k, v, (*lead, q.shape[1])
    return q, k, v, () if rank == 2 else q.shape[1:2] if rank == 3 and grouped else q.shape[: rank - 2]


def align_mask(mask: Tensor, query: Tensor, keys: int, lead: tuple[int, ...]) -> Tensor:
    """A mask that says who attends as [N, H, L, S], where true blocks."""
    if mask.dtype is torch.bool:
        mask = mask.logical_not()
    while mask.ndim < 2:
        mask = mask.unsqueeze(0)
    if mask.ndim > len(lead) + 2:
        raise RuntimeError(f"rapt: attn_mask has {mask.ndim} dimensions, expected at most {len(lead) + 2}")
    if len(lead) == 3:
        for _ in range(5 - mask.ndim):
            mask = mask.unsqueeze(0)
        mask = mask.flatten(0, 1) if mask.shape[:2] == (1, 1) else _flatten(mask, lead[:2])
    elif len(lead) == 1 and mask.ndim == 3 and query.shape[0] == lead[0]:
        mask = mask.unsqueeze(1)
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask if mask.shape[3] == keys else mask.expand(-1, -1, -1, keys)
