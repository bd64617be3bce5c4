"""scaled_dot_product_attention for PyTorch's tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from rapt.torch import _direct as direct
from rapt.torch import _kernels as kernels
from rapt.torch import _operators as operators
from rapt.torch._shapes import align_mask, bring_together

torch_sdpa = torch.nn.functional.scaled_dot_product_attention  # PyTorch's own, also while `sdpa` replaces it

_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_TYPES = frozenset((Tensor, torch.nn.Parameter, FakeTensor))
_strided = torch.strided
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
num_modes = torch._C._len_torch_dispatch_stack
_level = torch._C._functorch.maybe_current_level
_tracing = torch._C._get_tracing_state
_is_autocast = torch.is_autocast_enabled
_attend_directly = direct.attend
has_memory = torch._C._has_storage

_ROWS = ("offsets", "key_start", "key_lengths")  # integers of each sequence
_ZERO = 0  # the default of causal_offset
Integers = Union[int, Sequence[int], Tensor, None]


def takes(tensor: Any) -> bool:
    """Whether Rapt computes with tensors like this one: dense and floating-point, on the CPU, no subclass."""
    return (
        type(tensor) in _TYPES
        and (type(tensor) is not FakeTensor or num_modes() > 0)  # else calls would end in the kernels
        and tensor.is_cpu
        and tensor.dtype in _DTYPES
        and tensor.layout is _strided
        and not tensor.is_nested
        and not tensor.is_neg()
    )


def takes_in_graph(tensor: Any) -> bool:
    """The same for a tensor of a graph that is being compiled."""
    return tensor.device.type == "cpu" and tensor.dtype in _DTYPES and tensor.layout is _strided


def _is_hollow(tensor: Tensor) -> bool:
    """Whether it has no heads, or heads of no dimension, for which there are no kernels."""
    sizes = tensor.shape
    return 0 in sizes and (0 in sizes[-1:] or 0 in sizes[-3:-2])


def takes_mask(mask: Tensor | None, query: Tensor) -> bool:
    """Whether Rapt takes the mask; its type must be one that PyTorch takes, too."""
    if mask is None:
        return True
    if type(mask) not in _TYPES and not _is_compiling():  # a CausalBias's memory does not say what it stands for
        return False
    if mask.dtype is torch.bool:
        return mask.device.type == "cpu" and mask.layout is _strided and not mask.is_nested
    return takes_in_graph(mask) and not mask.is_nested and mask.dtype in (query.dtype, torch.float32)


def in_eager_mode() -> bool:
    """Whether calls go straight to the CPU: nothing traces, transforms or watches them."""
    return num_modes() == 0 and _level() is None and _tracing() is None and forward_ad._current_level < 0


def lowered(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast, if it is on, has them for attention."""
    if not _is_autocast("cpu"):
        return tensors
    lower = torch.get_autocast_dtype("cpu")
    return tuple(t if t is None or t.dtype in (torch.float64, torch.bool) else t.to(lower) for t in tensors)


def draw_seed() -> Tensor:
    """A seed for dropout, from PyTorch's default generator."""
    return torch.randint(2**63 - 1, (), device="cpu")


def _copied(integers: Any) -> Any:
    return integers.tolist() if hasattr(integers, "tolist") else copy.deepcopy(integers)


class _Attention(torch.autograd.Function):
    """The operator in eager mode."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: int, options: Any):
        out, lse, weights = kernels.forward(query, key, value, mask, kind, options)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.kind, ctx.options = kind, options
        ctx.set_materialize_grads(False)
        return (out, weights) if kind else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None = None):
        if d_out is None and d_weights is None:
            return (None,) * 6
        *saved, mask = ctx.saved_tensors
        d_out = torch.zeros_like(saved[3]) if d_out is None else d_out.resolve_neg()
        d_weights = None if d_weights is None else d_weights.resolve_neg()
        wanted = ctx.needs_input_grad[:4]
        # Somebody may ask for the second derivative, which the operator refuses, or watches; or vmap has made many.
        memory = has_memory(d_out) and (d_weights is None or has_memory(d_weights))
        if _is_grad_enabled() or num_modes() > 0 or not memory:
            operators.register_flops()
            options = operators.arguments(ctx.options, d_out.shape[0], ctx.kind)
            results = operators.attention_backward(d_out, d_weights, *saved, mask, *options, wanted)
            return *(r if want else None for r, want in zip(results, wanted)), None, None
        return *kernels.backward(d_out, d_weights, saved, mask, ctx.kind, wanted, ctx.options), None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    kind: int = kernels.NO_WEIGHTS,
    eager: bool = True,
) -> Any:
    """The operator on tensors of four dimensions, by the shortest way: the output, or (output, weights).

    Options are the kernels'; with dropout there is no seed among them yet. A boolean mask blocks.
    """
    if not eager:
        seed = draw_seed() if options.get("dropout", 0.0) > 0 else None
        plain = _is_compiling()
        if not plain:
            operators.register_flops()
            plain = _level() is None and forward_ad._current_level < 0
        run = operators.attention if plain else operators.Transformable.apply
        out, _, weights = run(query, key, value, mask, *operators.arguments(options, query.shape[0], kind, seed))
        return (out, weights) if kind else out
    if options.get("dropout"):
        options["dropout_seed"] = int(draw_seed())
    if _is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)
    ):
        for name in _ROWS:
            if name in options:  # the backward must find them as they are now
                options[name] = _copied(options[name])
        return _Attention.apply(query, key, value, mask, kind, options)
    if kind:
        out, _, weights = kernels.forward(query, key, value, mask, kind, options)
        return out, weights
    if mask is not None:
        options["attn_mask"] = mask
    return kernels.forward_only(query, key, value, options)


def _band(options: dict[str, Any], is_causal: bool, causal_offset: Any, window: Any, queries: int, keys: int) -> None:
    options["causal"] = is_causal
    if isinstance(causal_offset, str):
        if causal_offset != "bottom_right":
            raise ValueError(f'causal_offset is {causal_offset!r}, expected integers or "bottom_right"')
        options["offset"] = keys - queries
    elif isinstance(causal_offset, (int, torch.SymInt)):
        options["offset"] = causal_offset
    else:
        options["offsets"] = causal_offset
    if window is not None:
        options["left"], options["right"] = window


def _check_extras(*extras: Any) -> None:
    if any(extra is not None for extra in extras):
        raise NotImplementedError(
            "rapt: these tensors go to PyTorch's own function, which has no causal_offset, window, key_lengths or "
            "key_start"
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int | str | Sequence[int] | Tensor = _ZERO,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Integers = None,
    key_start: Integers = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with the same arguments, and differentiable like it.

    Tensors that Rapt does not take (on other devices, sparse, nested, subclasses, complex) go to PyTorch's function.
    A query that sees no key gets zeros, where PyTorch's may give NaN. There is no second derivative.

    causal_offset: query i sees keys up to i + causal_offset; an integer, one for each sequence, or "bottom_right".
    window: (left, right): query i sees keys from i + causal_offset - left to i + causal_offset + right; None: no limit.
    key_lengths, key_start: how many keys of each sequence are real, and the first one; an integer stands for all.
    """
    if _is_compiling():
        eager = False
        taken = takes_in_graph(query) and takes_in_graph(key) and takes_in_graph(value)
    else:
        eager = in_eager_mode()
        if (
            eager
            and not dropout_p
            and causal_offset is _ZERO
            and window is None
            and key_lengths is None
            and key_start is None
            and not _is_autocast("cpu")
        ):
            out = _attend_directly(query, key, value, attn_mask, is_causal, scale, enable_gqa, _is_grad_enabled())
            if out is not None:
                return out
        taken = takes(query) and takes(key) and takes(value)
        if attn_mask is not None and attn_mask.is_neg():
            attn_mask = attn_mask.resolve_neg()
    if (
        not taken
        or (attn_mask is not None and not takes_mask(attn_mask, query))
        or _is_hollow(query)
        or _is_hollow(key)
        or _is_hollow(value)
    ):
        _check_extras(causal_offset or None, window, key_lengths, key_start)
        return torch_sdpa(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    if _is_autocast("cpu"):
        query, key, value, attn_mask = lowered(query, key, value, attn_mask)
    if attn_mask is not None and is_causal:
        raise RuntimeError("rapt: attn_mask and is_causal exclude each other, as in PyTorch")

    sizes, key_sizes = query.shape, key.shape
    value_sizes = value.shape
    lead = None
    if not (
        len(sizes) == len(key_sizes) == len(value_sizes) == 4
        and sizes[0] == key_sizes[0] == value_sizes[0]
        and sizes[1] == key_sizes[1] == value_sizes[1]
    ):
        query, key, value, lead = bring_together(query, key, value, enable_gqa)
    options: dict[str, Any] = {}
    if is_causal and window is None and causal_offset is _ZERO:
        options["causal"] = True
    elif is_causal or window is not None:
        _band(options, is_causal, causal_offset, window, query.shape[2], key.shape[2])
    if scale is not None:
        options["scale"] = scale
    if dropout_p:
        options["dropout"] = dropout_p
    if key_lengths is not None:
        options["key_lengths"] = key_lengths
    if key_start is not None:
        options["key_start"] = key_start
    if attn_mask is not None:
        attn_mask = align_mask(attn_mask, query, key.shape[2], sizes[:2] if lead is None else lead)
    out = attend(query, key, value, attn_mask, options, eager=eager)
    return out if lead is None or len(lead) == 2 else out.reshape(*lead, *out.shape[2:])
