"""The operators rapt::attention and rapt::attention_backward, for torch.compile, torch.export and torch.func.

They take what `_kernels` takes, with integers of each sequence and the seed of dropout as tensors, so that a graph may
compute them. Eager code does without: an autograd.Function costs a quarter of a registered operator's call.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rapt.torch import _kernels as kernels

_OPTIONS = (
    "Tensor? seed, Tensor? offsets, Tensor? key_start, Tensor? key_lengths, float dropout_p, bool is_causal, "
    "float? scale, SymInt offset, SymInt? left, SymInt? right, int weights"
)
_FORWARD = (
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "attention_backward(Tensor d_out, Tensor? d_weights, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, Tensor? attn_mask, {_OPTIONS}, bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library = torch.library.Library("rapt", "DEF")
_library.define(_FORWARD)
_library.define(_BACKWARD)


def _options(args: tuple[Any, ...]) -> dict[str, Any]:
    """The operators' options as those of the kernels; all but the kind of weights."""
    seed, offsets, key_start, key_lengths, dropout_p, is_causal, scale, offset, left, right = args
    return {
        "dropout": dropout_p,
        "dropout_seed": None if seed is None else int(seed),
        "causal": is_causal,
        "scale": scale,
        "offset": offset,
        "offsets": offsets,
        "left": left,
        "right": right,
        "key_start": key_start,
        "key_lengths": key_lengths,
    }


def _rows_of(numbers: Any, batch: int) -> Tensor | None:
    """Integers of each sequence as the operators take them."""
    if numbers is None:
        return None
    if isinstance(numbers, int):
        return torch.full((batch,), numbers, dtype=torch.int64, device="cpu")
    return torch.as_tensor(numbers, dtype=torch.int64, device="cpu").reshape(batch)


def arguments(options: dict[str, Any], batch: int, kind: int, seed: Tensor | None = None) -> tuple[Any, ...]:
    """The other way around: options of the kernels as those of the operators."""
    if seed is None and options.get("dropout_seed") is not None:
        seed = torch.tensor(options["dropout_seed"], device="cpu")
    rows = (_rows_of(options.get(name), batch) for name in ("offsets", "key_start", "key_lengths"))
    get = options.get
    return (
        seed, *rows, get("dropout", 0.0), get("causal", False), get("scale"), get("offset", 0), get("left"),
        get("right"), kind,
    )  # fmt: skip


def _forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, weights = kernels.forward(query, key, value, attn_mask, args[-1], _options(args[:-1]))
    return out, lse, query.new_empty((0,)) if weights is None else weights


def _backward(
    d_out: Tensor,
    d_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    *options, kind, wanted = args
    saved = (query, key, value, out, lse)
    results = kernels.backward(d_out, d_weights, saved, attn_mask, kind, wanted, _options(tuple(options)))
    return tuple(query.new_empty((0,)) if r is None else r for r in results)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.empty_out(query, value), kernels.empty_lse(query), kernels.empty_weights(query, key, args[-1])


def _fake_backward(
    d_out: Tensor,
    d_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    tensors: tuple[Any, ...] = (query, key, value, attn_mask)
    return tuple(torch.empty_like(t) if want else query.new_empty((0,)) for t, want in zip(tensors, args[-1]))


_library.impl("attention", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("rapt::attention", _fake_forward, lib=_library)
torch.library.register_fake("rapt::attention_backward", _fake_backward, lib=_library)
attention = torch.ops.rapt.attention.default
attention_backward = torch.ops.rapt.attention_backward.default


def register_flops() -> None:
    """Lets those count who count operations, if anybody does."""
    if torch._C._len_torch_dispatch_stack() > 0 and "torch.utils.flop_counter" in sys.modules:
        from rapt.torch import _flops as flops

        flops.register()


# ---- autograd ----


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, attn_mask, seed, offsets, key_start, key_lengths, *ctx.plain = inputs
    out, lse, weights = output
    ctx.save_for_backward(query, key, value, out, lse, attn_mask, seed, offsets, key_start, key_lengths)
    ctx.mark_non_differentiable(*((lse,) if ctx.plain[-1] != kernels.NO_WEIGHTS else (lse, weights)))
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, d_weights: Tensor | None, run: Any = attention_backward
) -> tuple[Any, ...]:
    wanted = [bool(need) for need in ctx.needs_input_grad[:4]]
    nothing = (None,) * (4 + len(ctx.plain))
    has_weights = d_weights is not None and ctx.plain[-1] != kernels.NO_WEIGHTS
    if d_out is None and not has_weights:
        return (None, None, None, None, *nothing)
    query, key, value, out, lse, attn_mask, *per_sequence = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    gradients = run(
        d_out, d_weights if has_weights else None, query, key, value, out, lse, attn_mask, *per_sequence, *ctx.plain,
        wanted,
    )  # fmt: skip
    return (*(g if want else None for g, want in zip(gradients, wanted)), *nothing)


def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("rapt: attention has no second derivative; PyTorch's own with the backend MATH has")


def _setup_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def refuse_second(operator: str, library: torch.library.Library) -> None:
    """Makes an operator that computes gradients one whose own gradient raises."""
    torch.library.register_autograd(operator, _no_second, setup_context=_setup_nothing, lib=library)


torch.library.register_autograd("rapt::attention", _differentiate, setup_context=_setup, lib=_library)
refuse_second("rapt::attention_backward", _library)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_setup_nothing)
    backward = staticmethod(_no_second)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return attention_backward(*args)


class Transformable(torch.autograd.Function):
    """The operator for torch.func, whose transforms do not take operators with a registered gradient."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return attention(*args)

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any, d_weights: Any) -> tuple[Any, ...]:
        return _differentiate(ctx, d_out, d_lse, d_weights, run=_TransformableBackward.apply)


# ---- vmap: another size of the batch, before N ----


def _folded(tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """The tensor with the mapped dimension merged into its first one, N. What is not mapped is repeated."""
    if tensor is None:
        return None
    tensor = tensor.movedim(dim, 0) if dim is not None else tensor.unsqueeze(0).expand(size, *tensor.shape)
    if tensor.shape[1] == 1 != batch:
        tensor = tensor.expand(size, batch, *tensor.shape[2:])
    return tensor.flatten(0, 1)


def _split(tensor: Tensor, size: int) -> Tensor:
    """What `_folded` did, undone; tensors without elements stand for nothing."""
    return tensor.unflatten(0, (size, -1)) if tensor.ndim > 1 else tensor.unsqueeze(0).expand(size, -1)


def _seed(seed: Tensor | None, dim: int | None, dropout_p: float) -> Tensor | None:
    if seed is not None and dim is None and dropout_p > 0:
        raise RuntimeError('rapt: vmap over attention with dropout needs randomness="different"')
    return seed.select(dim, 0) if seed is not None and dim is not None else seed


def _rows(tensor: Tensor, dim: int | None) -> int:
    """The first size of a tensor as the mapped function sees it."""
    return tensor.shape[0] if dim != 0 else tensor.shape[1]


def _vmap_forward(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size, batch = info.batch_size, _rows(args[0], dims[0])
    tensors = [_folded(t, d, size, batch) for t, d in zip(args[:4], dims)]
    rows = [_folded(t, d, size, batch) for t, d in zip(args[5:8], dims[5:])]
    results = attention(*tensors, _seed(args[4], dims[4], args[8]), *rows, *args[8:])
    return tuple(_split(r, size) for r in results), (0, 0, 0)


def _vmap_backward(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size, batch = info.batch_size, _rows(args[2], dims[2])
    tensors: list[Any] = [_folded(t, d, size, batch) for t, d in zip(args[:8], dims)]
    tensors[5:7] = (t.contiguous() for t in tensors[5:7])  # a result, even a former one, has memory for each element
    rows = [_folded(t, d, size, batch) for t, d in zip(args[9:12], dims[9:])]
    results = attention_backward(*tensors, _seed(args[8], dims[8], args[12]), *rows, *args[12:])
    results = [_split(r, size) for r in results]
    if args[-1][3] and _rows(args[7], dims[7]) != batch:
        results[3] = results[3].sum(1, keepdim=True)
    return tuple(results), (0, 0, 0, 0)


torch.library.register_vmap("rapt::attention", _vmap_forward, lib=_library)
torch.library.register_vmap("rapt::attention_backward", _vmap_backward, lib=_library)
