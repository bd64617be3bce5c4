"""multi_head_attention_forward for PyTorch's tensors.

In eager mode it is one call of the library, forward and backward. In graphs and under transforms it is written out with
PyTorch's linear and the operator, which both can be compiled.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rapt import _core
from rapt.torch import _kernels as kernels
from rapt.torch import _operators as operators
from rapt.torch._attention import (
    _is_autocast,
    _is_compiling,
    attend,
    draw_seed,
    has_memory,
    in_eager_mode,
    lowered,
    num_modes,
    takes,
    takes_in_graph,
)
from rapt.torch._results import empty_contiguous, empty_like

torch_forward = F.multi_head_attention_forward
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

WEIGHTS = (
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "out_proj_weight", "out_proj_bias",
)  # fmt: skip
INPUTS = ("query", "key", "value", "attn_mask", "key_padding_mask", "static_k", "static_v")
_OPTIONAL_INPUTS = INPUTS[3:]
_SHARED = (1, 2)  # among those: key and value
_UNUSED = (1, 2, 9, 10)  # key, value, k_proj_weight and v_proj_weight, with static_k and static_v


def _weights_shape(query: Tensor, settings: dict[str, Any], keys: int, kind: int) -> tuple[int, ...]:
    """Of the attention weights: [N, L, S'] or [N, H, L, S'], without N if the query has none."""
    batched = query.ndim == 3
    first = settings["batch_first"]
    heads = (settings["num_heads"],) if kind == kernels.HEAD_WEIGHTS else ()
    lead = (query.shape[0 if first else 1],) if batched else ()
    return *lead, *heads, query.shape[1 if first and batched else 0], keys


def run(
    settings: dict[str, Any],
    options: dict[str, Any],
    tensors: tuple[Any, ...],
    kind: int,
    keys: int,
    state: _core.State | None,
) -> tuple[Tensor, Tensor | None]:
    """One forward of the library. tensors: as INPUTS and then WEIGHTS say; keys: S'."""
    query, key, value, *more = tensors
    out = empty_contiguous(query)
    shown = query.new_empty(_weights_shape(query, settings, keys, kind)) if kind else None
    if more[2] is not None:
        key = value = None
    _core.functional(
        dict(settings, **dict(zip(WEIGHTS, more[4:]))), query, key, value, out, weights=shown, state=state,
        per_head_weights=kind == kernels.HEAD_WEIGHTS, **dict(zip(_OPTIONAL_INPUTS, more)), **options,
    )  # fmt: skip
    return out, shown


def _differentiate(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> list[Tensor | None]:
    """One backward of the library: gradients of INPUTS and WEIGHTS, None where nobody wants them."""
    tensors = ctx.saved_tensors
    d_out = tensors[0].new_zeros(ctx.shape) if d_out is None else d_out.resolve_neg()
    d_weights = None if d_weights is None else d_weights.resolve_neg()
    gradients = [empty_like(t) if want else None for t, want in zip(tensors, ctx.wanted)]
    into = dict(zip(INPUTS + WEIGHTS, gradients))
    if ctx.shared:
        into["key"] = into["value"] = into["query"]  # the library adds them up
    weights = dict(ctx.settings, **dict(zip(WEIGHTS, tensors[len(INPUTS) :])))
    _core.functional_backward(weights, ctx.state, d_out, d_weights, into)
    return gradients


# vmap, which makes gradients of many, takes them apart for operators alone, and operators are what counters see. What
# this one differentiates is no tensor: it has a number while the operator runs.
_library = torch.library.Library("rapt", "FRAGMENT")
_library.define(f"layer_backward(Tensor? d_out, Tensor? d_weights, int layer) -> ({', '.join(['Tensor'] * 16)})")
_layer_backward = torch.ops.rapt.layer_backward.default
running: dict[int, Any] = {}
_numbers = itertools.count()


def _differentiate_one(d_out: Tensor | None, d_weights: Tensor | None, layer: int) -> tuple[Tensor, ...]:
    ctx = running[layer]
    nothing = ctx.saved_tensors[0].new_empty((0,))
    return tuple(nothing.clone() if g is None else g for g in _differentiate(ctx, d_out, d_weights))


def _differentiate_none(d_out: Tensor | None, d_weights: Tensor | None, layer: int) -> tuple[Tensor, ...]:
    """What results look like; what the layer keeps are real tensors, of which fake ones are not made."""
    ctx = running[layer]
    dtype = ctx.saved_tensors[0].dtype
    return tuple(
        torch.empty_like(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"))
        if want
        else torch.empty((0,), dtype=dtype, device="cpu")
        for t, want in zip(ctx.saved_tensors, ctx.wanted)
    )


def _differentiate_each(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    rows = [
        _layer_backward(*(a if d is None else a.select(d, i) for a, d in zip(args, dims)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(column) for column in zip(*rows)), (0,) * 16


_library.impl("layer_backward", _differentiate_one, "CPU")
torch.library.register_fake("rapt::layer_backward", _differentiate_none, lib=_library)
torch.library.register_vmap("rapt::layer_backward", _differentiate_each, lib=_library)
operators.refuse_second("rapt::layer_backward", _library)


def _differentiate_watched(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None) -> list[Tensor | None]:
    operators.register_flops()
    number = next(_numbers)
    running[number] = ctx
    try:
        results = _layer_backward(d_out, d_weights, number)
    finally:
        del running[number]
    return [r if want else None for r, want in zip(results, ctx.wanted)]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, options: Any, kind: int, keys: int, *tensors: Tensor | None):
        state = _core.State()
        out, shown = run(settings, options, tensors, kind, keys, state)
        ctx.save_for_backward(*tensors)
        ctx.settings, ctx.state, ctx.kind = settings, state, kind
        ctx.set_materialize_grads(False)
        ctx.shape = out.shape
        # One tensor for all three has one gradient; beside static_k and static_v some have none.
        given = tensors[INPUTS.index("static_k")] is not None
        ctx.shared = not given and tensors[0] is tensors[1] and tensors[1] is tensors[2]
        ctx.unused = _UNUSED if given else _SHARED if ctx.shared else ()
        return (out, shown) if kind else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None = None):
        if d_out is None and d_weights is None:
            return (None,) * (4 + len(INPUTS) + len(WEIGHTS))
        if torch.is_grad_enabled():
            raise RuntimeError("rapt: attention has no second derivative, so that create_graph=True is not possible")
        ctx.wanted = [n and i not in ctx.unused for i, n in enumerate(ctx.needs_input_grad[4:])]
        if num_modes() == 0 and (d_out is None or has_memory(d_out)) and (d_weights is None or has_memory(d_weights)):
            results = _differentiate(ctx, d_out, d_weights)
        else:
            results = _differentiate_watched(ctx, d_out, d_weights)
        if not _keeps_graph():  # as PyTorch frees saved tensors: the graph itself may live as long as a loss
            ctx.state = None
        return None, None, None, None, *results


# ---- written out ----


def _add_key(tensor: Tensor, key: Tensor) -> Tensor:
    """[N, H, S, D] with one more key [1, H, 1, D] for all."""
    return torch.cat([tensor, key.expand(tensor.shape[0], -1, -1, -1)], 2)


def _merged_mask(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, extra: int) -> Tensor | None:
    """Both masks as one of four dimensions, where true blocks, with room for the keys that a layer adds."""
    n, h = query.shape[:2]
    if attn_mask is not None:
        attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (n, h))
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    masks = [m for m in (attn_mask, padding) if m is not None]
    if not masks:
        return None
    if all(m.dtype is torch.bool for m in masks):
        merged = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return F.pad(merged, (0, extra), value=False) if extra else merged
    numbers = [
        torch.zeros_like(m, dtype=query.dtype).masked_fill(m, float("-inf")) if m.dtype is torch.bool else m
        for m in masks
    ]
    merged = numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]
    merged = F.pad(merged, (0, extra)) if extra else merged
    return merged.to(query.dtype) if merged.dtype not in (query.dtype, torch.float32) else merged


def _project(query: Tensor, key: Tensor, value: Tensor, w: dict[str, Any], groups: int) -> list[Tensor]:
    """Heads of queries side by side, and those of keys and values, of which each serves a group of the queries'."""
    size = w["out_proj_weight"].shape[1]
    sizes = [size, size // groups, size // groups]
    biases = (None,) * 3 if w["in_proj_bias"] is None else w["in_proj_bias"].split(sizes)
    matrices = w["in_proj_weight"]
    if matrices is None:
        matrices = [w["q_proj_weight"], w["k_proj_weight"], w["v_proj_weight"]]
    elif query is key and key is value:
        return list(F.linear(query, matrices, w["in_proj_bias"]).split(sizes, -1))
    else:
        matrices = matrices.split(sizes)
    return [F.linear(x, m, b) for x, m, b in zip((query, key, value), matrices, biases)]


def _written_out(
    settings: dict[str, Any], options: dict[str, Any], tensors: tuple[Any, ...], kind: int, eager: bool
) -> tuple[Tensor, Tensor | None]:
    query, key, value, attn_mask, padding, static_k, static_v, *weights = tensors
    w = dict(zip(WEIGHTS, weights))
    heads = settings["num_heads"]
    shared = settings.get("num_kv_heads", heads)
    batched = query.ndim == 3
    projected = _project(query, key, value, w, heads // shared)
    if not settings["batch_first"] and batched:
        projected = [p.transpose(0, 1) for p in projected]
    q, k, v = (
        p.reshape(-1, *p.shape[-2:]).unflatten(-1, (h, -1)).transpose(1, 2)
        for p, h in zip(projected, (heads, shared, shared))
    )
    if static_k is not None:
        k = static_k.unflatten(0, (-1, heads))
    if static_v is not None:
        v = static_v.unflatten(0, (-1, heads))
    before = k.shape[2]
    if w["bias_k"] is not None:
        k = _add_key(k, w["bias_k"].reshape(1, shared, 1, -1))
        v = _add_key(v, w["bias_v"].reshape(1, shared, 1, -1))
    if settings["add_zero_attn"]:
        k, v = (_add_key(t, t.new_zeros(1, shared, 1, t.shape[-1])) for t in (k, v))
    mask = _merged_mask(attn_mask, padding, q, k.shape[2] - before)
    q, k, v, mask = lowered(q, k, v, mask)
    options = dict(options, dropout=settings["dropout"])
    result = attend(q, k, v, mask, options, kind, eager)
    out, shown = result if kind else (result, None)
    out = out.transpose(1, 2).flatten(2)
    if not batched:
        out, shown = out.squeeze(0), None if shown is None else shown.squeeze(0)
    elif not settings["batch_first"]:
        out = out.transpose(0, 1)
    return F.linear(out, w["out_proj_weight"], w["out_proj_bias"]), shown


# ---- the function ----


def _refuse(query: Tensor, attn_mask: Tensor | None, is_causal: bool, embed_dim: int, keys: int) -> None:
    """What Rapt would take, but PyTorch does not."""
    if is_causal and attn_mask is None:
        raise RuntimeError("rapt: is_causal is a hint about attn_mask, which is needed with it, as in PyTorch")
    if query.shape[-1] != embed_dim:
        raise AssertionError(f"rapt: query's embedding dimension is {query.shape[-1]}, expected {embed_dim}")
    if attn_mask is not None and (attn_mask.ndim not in (2, 3) or attn_mask.shape[-1] != keys):
        raise RuntimeError(f"rapt: attn_mask has the shape {tuple(attn_mask.shape)}, expected [L, S] or [N*H, L, S]")


def forward(
    tensors: tuple[Any, ...],
    num_heads: int,
    embed_dim: int,
    add_zero_attn: bool,
    dropout: float,
    batch_first: bool,
    kind: int,
    is_causal: bool,
    num_kv_heads: int | None = None,
    rotary: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """The layer on the tensors that INPUTS and WEIGHTS name; None: they are not for Rapt."""
    query, key, value, attn_mask, padding, static_k, static_v, *weights = tensors
    compiling = _is_compiling()
    test = takes_in_graph if compiling else takes
    for t in (query, key, value, static_k, static_v, *weights):
        if t is not None and not test(t):
            return None
    if 0 in (query.shape[-1], key.shape[-1], value.shape[-1]):  # nothing to project
        return None
    masks_fit = True
    for m in (attn_mask, padding):
        if m is not None and m.dtype is not torch.bool and not test(m):
            return None
        if m is not None and (m.device.type != "cpu" or m.layout is not torch.strided):
            return None
        masks_fit = masks_fit and (m is None or m.dtype in (torch.bool, query.dtype))
    source = key if static_k is None else static_k
    keys = source.shape[-2] if static_k is not None or batch_first or source.ndim == 2 else source.shape[0]
    _refuse(query, attn_mask, is_causal, embed_dim, keys)
    settings = {
        "num_heads": num_heads, "add_zero_attn": add_zero_attn, "dropout": dropout, "batch_first": batch_first,
    }  # fmt: skip
    if num_kv_heads is not None:
        settings["num_kv_heads"] = num_kv_heads
    dtype = query.dtype
    eager = not compiling and in_eager_mode()
    if (
        not eager
        or _is_autocast("cpu")
        or not masks_fit
        or (static_k is None) != (static_v is None)
        or any(t is not None and t.dtype is not dtype for t in (key, value, static_k, static_v, *weights))
    ):
        if rotary is not None:
            raise NotImplementedError("rapt: rotary needs eager mode without autocast, and tensors of one type")
        return _written_out(settings, {}, tensors, kind, eager)
    recording = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if recording and rotary is None and _saving_hooks(True) is not None:
        # Somebody keeps saved tensors elsewhere, or computes them again (activation checkpoints): all must be tensors.
        return _written_out(settings, {}, tensors, kind, eager)
    options: dict[str, Any] = {"dropout_seed": int(draw_seed())} if dropout > 0 else {}
    if rotary is not None:
        options["rotary"] = rotary
    keys += (weights[5] is not None) + add_zero_attn
    try:
        if recording:
            result = _Layer.apply(settings, options, kind, keys, *tensors)
            return result if kind else (result, None)
        return run(settings, options, tensors, kind, keys, None)
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"rapt: {error}") from None


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch.nn.functional.multi_head_attention_forward, with the same arguments, and differentiable like it.

    A query that sees no key attends to nothing: zeros and not NaN. is_causal is a hint about attn_mask, which is used.
    """
    if embed_dim_to_check % num_heads:
        raise AssertionError(f"rapt: num_heads {num_heads} does not divide embed_dim {embed_dim_to_check}")
    if use_separate_proj_weight:
        in_proj_weight = None
    else:
        q_proj_weight = k_proj_weight = v_proj_weight = None
    kind = kernels.NO_WEIGHTS
    if need_weights:
        kind = kernels.MEAN_WEIGHTS if average_attn_weights else kernels.HEAD_WEIGHTS
    tensors = (
        query, key, value, attn_mask, key_padding_mask, static_k, static_v, in_proj_weight, q_proj_weight,
        k_proj_weight, v_proj_weight, in_proj_bias, bias_k, bias_v, out_proj_weight, out_proj_bias,
    )  # fmt: skip
    dropout = dropout_p if training else 0.0
    result = forward(tensors, num_heads, embed_dim_to_check, add_zero_attn, dropout, False, kind, is_causal)
    if result is not None:
        return result
    return torch_forward(
        query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn,
        dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights, attn_mask,
        use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
        average_attn_weights, is_causal,
    )  # fmt: skip
