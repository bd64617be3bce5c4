"""Operations of Rapt's operators for torch.utils.flop_counter, counted as PyTorch counts those of its own.

Masks, bands and lengths change no count. PyTorch computes attention with dropout, returned weights, a mask's gradient
or values of another width step by step, keeping the weights, and counts what is left to do in the backward; else its
fused backward computes them again and counts them, whatever gradients are wanted.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rapt.torch import _functional as functional

Shape = Any  # tensors come as their shapes


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **results: Any) -> int:
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _backward(shapes: Any, wanted: Any, whole: bool) -> int:
    query, key, value = shapes
    width, value_width = query[3], value[3]
    if whole and width == value_width:
        widths = 5 * width
    else:
        weights_too = any((*wanted[:2], wanted[3]))
        widths = (wanted[0] + wanted[1]) * width + (wanted[2] + weights_too) * value_width
    return 2 * prod(query[:3]) * key[2] * widths


def _attention_backward(*args: Any, **results: Any) -> int:
    dropout, kind, wanted = args[12], args[-2], args[-1]
    return _backward(args[2:5], wanted, whole=not (dropout or kind or wanted[3]))


def _layer_backward(d_out: Shape, d_weights: Shape, layer: int, **results: Any) -> int:
    ctx = functional.running[layer]
    names = functional.INPUTS + functional.WEIGHTS
    needs, tensors = dict(zip(names, ctx.needs_input_grad[4:])), dict(zip(names, ctx.saved_tensors))
    saved = ctx.state.saved()
    shapes = {name: torch.from_dlpack(saved[name]).shape for name in ("query", "key", "value")}
    given = tensors["static_k"] is not None
    count = 0
    for name, (_, heads, _, width) in shapes.items():
        if name == "query" or not given:
            weight = "in_proj_weight" if tensors["in_proj_weight"] is not None else f"{name[0]}_proj_weight"
            count += 2 * tensors[name].numel() * heads * width * (needs[name] + needs[weight])
    count += 2 * prod(d_out or ctx.shape) * tensors["out_proj_weight"].shape[1] * (1 + needs["out_proj_weight"])
    mask = needs["attn_mask"] or needs["key_padding_mask"]
    whole = not (ctx.kind or ctx.settings["dropout"] or mask)
    added = (tensors["bias_k"] is not None) + ctx.settings["add_zero_attn"]
    keys = [(n, heads, size + added, width) for n, heads, size, width in (shapes["key"], shapes["value"])]
    return count + _backward((shapes["query"], *keys), (True, True, True, mask), whole)


_FORMULAS = {
    torch.ops.rapt.attention: _attention,
    torch.ops.rapt.attention_backward: _attention_backward,
    torch.ops.rapt.layer_backward: _layer_backward,
}


def register() -> None:
    """Tells PyTorch's counters, those that count now included. To be called under a dispatch mode: not sooner, since
    the counter's module takes longer to import than all of Rapt, and counters copy the table when they are made.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    for operator, formula in _FORMULAS.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator)(formula)
        for mode in _get_current_dispatch_mode_stack():
            table = getattr(getattr(mode, "counter", mode), "flop_registry", None)
            if table is not None:
                table.setdefault(operator, module.flop_registry[operator])
