"""Makes the golden cases of the tests from PyTorch: mha.safetensors and sdpa.safetensors.

    pip install torch==2.15.0 numpy safetensors
    python make_golden.py            write both files beside this script
    python make_golden.py --check    recompute everything and compare with the stored files

Every input and weight is float32; outputs and gradients are computed in float64 from them.

A file holds tensors named CASE.TENSOR. Its metadata holds `cases` (the names in order, one a line), `torch`
(the version) and, for each case, `case.CASE`: a line of key=value settings.

mha.safetensors (settings: the function `LayerCase.settings`)
    query, key, value      key and value are absent when self=1, value when same_kv=1, both when static_kv=1
    static_k, static_v     [N*H, S, D], when static_kv=1
    attn_mask              bool (true = may not attend) or float (added), [L,S] or [N*H,L,S] (unbatched
                           [H,L,S]); causal=1 is not part of it: the mask, if there is one, holds besides
    key_padding_mask       bool or float, [N,S] or [S]
    in_proj_weight, ...    parameters under their state-dict names
    out                    F64
    weights                F64, when need_weights=1; [N,L,S'] when average=1, else [N,H,L,S'];
                           no N when unbatched
    grad_out               F32, the cotangent of out
    grad_weights           F32, the cotangent of weights, when grad_weights=1
    grad.NAME              F64, d(sum(out*grad_out) + sum(weights*grad_weights)) / d NAME, for every float
                           input above; the total where one tensor is passed more than once (self, same_kv)

sdpa.safetensors (settings: the function `SdpaCase.settings`)
    query [N,H,L,D], key [N,Hk,S,D], value [N,Hk,S,Dv], attn_mask (bool: true = may not attend, the inverse
    of PyTorch's SDPA), out, lse [N,H,L], grad_out, grad.query, grad.key, grad.value, grad.attn_mask (when
    float). Causal is top-left: query i sees keys j <= i, also when L != S.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-12
MINUS_INF = float("-inf")

Tensors = dict[str, Tensor]
Settings = dict[str, int | float | str]


# ---------------------------------------------------------------------------------------------- drawing


def draw(*shape: int, magnitude: float = 1.0) -> Tensor:
    """Uniform float32 in [-magnitude, magnitude); magnitude must be a power of two.

    Integers over a power of two, not randn: randn's last bits depend on the CPU's instruction set.
    """
    steps = 1 << 22
    return torch.randint(-steps, steps, shape).to(torch.float32) * (magnitude / steps)


def draw_bool(*shape: int, one_in: int = 3) -> Tensor:
    """True with a chance of 1 in `one_in`."""
    return torch.randint(0, one_in, shape) == 0


def draw_float_mask(*shape: int, extreme: float | None) -> Tensor:
    """An additive mask; about a third of it is `extreme` (-inf or -1e9) when that is given."""
    mask = draw(*shape, magnitude=2.0)
    return mask if extreme is None else mask.masked_fill(draw_bool(*shape), extreme)


def seed_from(name: str) -> None:
    """Seeds by the case's name, so that adding or moving cases leaves the others as they are."""
    torch.manual_seed(zlib.crc32(name.encode()))


def leaves(tensors: Tensors) -> Tensors:
    """Float64 copies that collect gradients; bool masks stay as they are."""
    return {name: x if x.dtype == torch.bool else x.to(torch.float64).requires_grad_(True)
            for name, x in tensors.items()}


def additive(mask: Tensor | None) -> Tensor | None:
    """A mask in the additive form: bool true (may not attend) becomes -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, MINUS_INF)


def causal_mask(l: int, s: int) -> Tensor:
    """True where a query may not attend: keys after its own position, counted from the top left."""
    return torch.ones(l, s, dtype=torch.bool).triu(1)


def require_close(what: str, actual: Tensor, expected: Tensor, slack: float = 1.0) -> None:
    """Raises unless both are equal within TOLERANCE times `slack`, relative to the largest value or 1."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(f"{what}: {actual.dtype} {list(actual.shape)}, "
                         f"expected {expected.dtype} {list(expected.shape)}")
    if expected.numel() == 0:
        return
    # Infinities must match exactly: their difference would be NaN.
    error = torch.where(actual == expected, torch.zeros_like(actual), (actual - expected).abs()).max().item()
    limit = TOLERANCE * slack * max(1.0, expected[expected.isfinite()].abs().max().item())
    if not error <= limit:
        raise ValueError(f"{what}: differs by {error:.3g}, more than {limit:.3g}")


# ---------------------------------------------------------------------------------------------- layer cases


@dataclass(frozen=True)
class LayerCase:
    """One layer and one call of it. Sizes of 0 stand for their defaults."""

    name: str
    embed_dim: int = 16
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    kdim: int = 0
    vdim: int = 0
    n: int = 2
    l: int = 5
    s: int = 0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    batch_first: bool = True
    causal: bool = False
    unbatched: bool = False
    average: bool = True
    need_weights: bool = True
    inputs: str = "self"  # self, same_kv, or different
    attn_mask: str = ""  # bool or float
    per_head_mask: bool = False
    padding: str = ""  # bool or float
    extreme: float | None = None  # also put this value into float masks
    only_extra_keys: bool = False  # mask all real keys for some rows: they see bias_kv and zero only
    grad_weights: bool = False
    from_ops: bool = False
    static_kv: bool = False

    @property
    def key_length(self) -> int:
        return self.s or self.l

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        return self.head_dim or self.embed_dim // self.heads

    @property
    def key_dim(self) -> int:
        return self.kdim or self.embed_dim

    @property
    def value_dim(self) -> int:
        return self.vdim or self.embed_dim

    @property
    def batch(self) -> int:
        return 1 if self.unbatched else self.n

    def settings(self) -> Settings:
        return {
            "embed_dim": self.embed_dim,
            "num_heads": self.heads,
            "num_kv_heads": self.groups,
            "head_dim": self.width,
            "kdim": self.key_dim,
            "vdim": self.value_dim,
            "bias": int(self.bias),
            "add_bias_kv": int(self.add_bias_kv),
            "add_zero_attn": int(self.add_zero_attn),
            "batch_first": int(self.batch_first),
            "causal": int(self.causal),
            "unbatched": int(self.unbatched),
            "average": int(self.average),
            "need_weights": int(self.need_weights),
            "same_kv": int(self.inputs in ("self", "same_kv") and not self.static_kv),
            "self": int(self.inputs == "self"),
            "grad_weights": int(self.grad_weights),
            "made_from_ops": int(self.from_ops),
            "static_kv": int(self.static_kv),
        }


def draw_sequence(case: LayerCase, length: int, size: int) -> Tensor:
    if case.unbatched:
        return draw(length, size, magnitude=2.0)
    lead = (case.n, length) if case.batch_first else (length, case.n)
    return draw(*lead, size, magnitude=2.0)


def draw_layer_inputs(case: LayerCase) -> Tensors:
    s = case.key_length
    inputs = {"query": draw_sequence(case, case.l, case.embed_dim)}
    if case.static_kv:
        inputs["static_k"] = draw(case.batch * case.heads, s, case.width, magnitude=2.0)
        inputs["static_v"] = draw(case.batch * case.heads, s, case.width, magnitude=2.0)
    elif case.inputs != "self":
        inputs["key"] = draw_sequence(case, s, case.key_dim)
        if case.inputs == "different":
            inputs["value"] = draw_sequence(case, s, case.value_dim)
    return inputs


def draw_layer_masks(case: LayerCase) -> Tensors:
    l, s = case.l, case.key_length
    masks: Tensors = {}
    if case.attn_mask:
        shape = (case.batch * case.heads, l, s) if case.per_head_mask else (l, s)
        masks["attn_mask"] = (draw_bool(*shape) if case.attn_mask == "bool"
                              else draw_float_mask(*shape, extreme=case.extreme))
    if case.padding:
        shape = (s,) if case.unbatched else (case.n, s)
        masks["key_padding_mask"] = (draw_bool(*shape) if case.padding == "bool"
                                     else draw_float_mask(*shape, extreme=case.extreme))
    # One key stays open for every row, since PyTorch gives NaN for a row that sees nothing.
    open_key = 0 if case.causal else int(torch.randint(0, s, ()))
    for mask in masks.values():
        mask[..., open_key] = False if mask.dtype == torch.bool else 0.5
        if case.only_extra_keys:
            # The first query (of a whole mask or of each head), or the first sequence.
            mask[..., 0, :] = True if mask.dtype == torch.bool else MINUS_INF
    return masks


def draw_parameters(case: LayerCase) -> Tensors:
    e, q_rows, kv_rows = case.embed_dim, case.heads * case.width, case.groups * case.width
    parameters: Tensors = {}
    if case.key_dim == e and case.value_dim == e:
        parameters["in_proj_weight"] = draw(q_rows + 2 * kv_rows, e, magnitude=0.5)
    else:
        parameters["q_proj_weight"] = draw(q_rows, e, magnitude=0.5)
        parameters["k_proj_weight"] = draw(kv_rows, case.key_dim, magnitude=0.5)
        parameters["v_proj_weight"] = draw(kv_rows, case.value_dim, magnitude=0.5)
    if case.bias:
        parameters["in_proj_bias"] = draw(q_rows + 2 * kv_rows, magnitude=0.5)
    if case.add_bias_kv:
        parameters["bias_k"] = draw(1, 1, kv_rows)
        parameters["bias_v"] = draw(1, 1, kv_rows)
    parameters["out_proj.weight"] = draw(e, q_rows, magnitude=0.5)
    if case.bias:
        parameters["out_proj.bias"] = draw(e, magnitude=0.5)
    return parameters


def pick_key_and_value(inputs: Tensors) -> tuple[Tensor, Tensor]:
    key = inputs.get("key", inputs["query"])
    return key, inputs.get("value", key)


def layer_mask(case: LayerCase, masks: Tensors) -> Tensor | None:
    """attn_mask with the causal mask in it; additive if any of the case's masks is."""
    mask = masks.get("attn_mask")
    if any(m.dtype != torch.bool for m in masks.values()):
        # PyTorch warns when one mask is bool and the other is not.
        mask = additive(mask)
    if not case.causal:
        return mask
    future = causal_mask(case.l, case.key_length)
    if mask is None:
        return future if all(m.dtype == torch.bool for m in masks.values()) else additive(future)
    return mask | future if mask.dtype == torch.bool else mask.masked_fill(future, MINUS_INF)


def layer_padding(masks: Tensors) -> Tensor | None:
    padding = masks.get("key_padding_mask")
    return padding if all(m.dtype == torch.bool for m in masks.values()) else additive(padding)


def forward_with_torch_layer(case: LayerCase, inputs: Tensors, masks: Tensors,
                             parameters: Tensors) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention with the given parameters."""
    layer = nn.MultiheadAttention(
        case.embed_dim, case.heads, dropout=0.0, bias=case.bias, add_bias_kv=case.add_bias_kv,
        add_zero_attn=case.add_zero_attn, kdim=case.key_dim, vdim=case.value_dim,
        batch_first=case.batch_first, dtype=torch.float64)
    # is_causal lets PyTorch drop the mask, and what it puts in its place hides the extra keys as well.
    plain_causal = case.causal and not (masks or case.add_bias_kv or case.add_zero_attn)
    arguments = {
        "key_padding_mask": layer_padding(masks),
        "need_weights": case.need_weights,
        "attn_mask": layer_mask(case, masks),
        "average_attn_weights": case.average,
        "is_causal": plain_causal,
    }
    # functional_call replaces parameters for the call and is strict about their names.
    return torch.func.functional_call(layer, parameters, (inputs["query"], *pick_key_and_value(inputs)),
                                      arguments, strict=True)


def forward_with_static_kv(case: LayerCase, inputs: Tensors, masks: Tensors,
                           parameters: Tensors) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward with ready keys and values."""
    # It projects key and value even so, and throws the result away: their values do not matter.
    unused = torch.zeros(case.key_length, case.n, case.embed_dim, dtype=torch.float64)
    return F.multi_head_attention_forward(
        inputs["query"], unused, unused, case.embed_dim, case.heads, parameters["in_proj_weight"],
        parameters.get("in_proj_bias"), None, None, case.add_zero_attn, 0.0, parameters["out_proj.weight"],
        parameters.get("out_proj.bias"), key_padding_mask=layer_padding(masks),
        need_weights=case.need_weights, attn_mask=layer_mask(case, masks), static_k=inputs["static_k"],
        static_v=inputs["static_v"], average_attn_weights=case.average)


def project(case: LayerCase, inputs: Tensors, parameters: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Query [N,H,L,D], key and value [N,Hk,S,D]."""
    rows = (case.heads * case.width, case.groups * case.width, case.groups * case.width)
    if "in_proj_weight" in parameters:
        weights = parameters["in_proj_weight"].split(rows)
    else:
        weights = tuple(parameters[f"{which}_proj_weight"] for which in "qkv")
    biases = parameters["in_proj_bias"].split(rows) if case.bias else (None, None, None)

    def split_heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if case.unbatched:
            x = x.unsqueeze(0)
        elif not case.batch_first:
            x = x.transpose(0, 1)
        return F.linear(x, weight, bias).unflatten(-1, (-1, case.width)).transpose(1, 2)

    sources = (inputs["query"], *pick_key_and_value(inputs))
    q, k, v = (split_heads(x, w, b) for x, w, b in zip(sources, weights, biases))
    if case.static_kv:
        k, v = (inputs[name].unflatten(0, (case.n, case.heads)) for name in ("static_k", "static_v"))
    return q, k, v


def append_extra_keys(case: LayerCase, x: Tensor, bias: Tensor | None) -> Tensor:
    """Key or value [N,Hk,S,D] with bias_kv's entry, then the zero entry."""
    parts = [x]
    if bias is not None:
        parts.append(bias.view(1, case.groups, 1, case.width).expand(case.batch, -1, -1, -1))
    if case.add_zero_attn:
        parts.append(torch.zeros(case.batch, case.groups, 1, case.width, dtype=torch.float64))
    return torch.cat(parts, dim=2)


def forward_from_ops(case: LayerCase, inputs: Tensors, masks: Tensors,
                     parameters: Tensors) -> tuple[Tensor, Tensor | None]:
    """The same from F.linear and F.scaled_dot_product_attention, with KV heads and head_dim free."""
    q, k, v = project(case, inputs, parameters)
    k = append_extra_keys(case, k, parameters.get("bias_k"))
    v = append_extra_keys(case, v, parameters.get("bias_v"))

    mask = torch.zeros(case.batch, case.heads, case.l, case.key_length, dtype=torch.float64)
    attn_mask = additive(layer_mask(case, masks))
    if attn_mask is not None:
        per_head = attn_mask.dim() == 3
        mask = mask + (attn_mask.unflatten(0, (case.batch, case.heads)) if per_head else attn_mask)
    padding = additive(layer_padding(masks))
    if padding is not None:
        mask = mask + padding.view(case.batch, 1, 1, -1)
    mask = F.pad(mask, (0, k.size(2) - case.key_length))

    context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = F.linear(context.transpose(1, 2).flatten(2), parameters["out_proj.weight"],
                   parameters.get("out_proj.bias"))
    if case.unbatched:
        out = out.squeeze(0)
    elif not case.batch_first:
        out = out.transpose(0, 1)
    if not case.need_weights:
        return out, None

    repeated = k.repeat_interleave(case.heads // case.groups, dim=1)
    weights = (q @ repeated.transpose(-1, -2) / math.sqrt(case.width) + mask).softmax(-1)
    if case.average:
        weights = weights.mean(1)
    return out, weights.squeeze(0) if case.unbatched else weights


def make_layer_case(case: LayerCase) -> Tensors:
    seed_from(case.name)
    inputs, masks, parameters = draw_layer_inputs(case), draw_layer_masks(case), draw_parameters(case)
    tensors = {**inputs, **masks, **parameters}

    live = (leaves(inputs), leaves(masks), leaves(parameters))
    if case.from_ops:
        out, weights = forward_from_ops(case, *live)
    else:
        forward = forward_with_static_kv if case.static_kv else forward_with_torch_layer
        out, weights = forward(case, *live)
        # The ops must say what PyTorch's layer says: they stand in for it where it lacks a setting.
        out_from_ops, weights_from_ops = forward_from_ops(case, *live)
        require_close(f"{case.name}: out from ops", out_from_ops, out)
        if weights is not None and weights_from_ops is not None:
            require_close(f"{case.name}: weights from ops", weights_from_ops, weights)

    tensors["out"] = out.detach()
    tensors["grad_out"] = draw(*out.shape)
    loss = (out * tensors["grad_out"]).sum()
    if weights is not None:
        tensors["weights"] = weights.detach()
    if case.grad_weights:
        if weights is None:
            raise ValueError(f"{case.name}: grad_weights needs weights")
        tensors["grad_weights"] = draw(*weights.shape, magnitude=4.0)
        loss = loss + (weights * tensors["grad_weights"]).sum()
    loss.backward()
    return tensors | gradients(live[0] | live[1] | live[2])


def gradients(live: Tensors) -> Tensors:
    """grad.NAME for each float leaf."""
    found: Tensors = {}
    for name, x in live.items():
        if x.requires_grad:
            if x.grad is None:
                raise ValueError(f"no gradient reached {name}")
            found[f"grad.{name}"] = x.grad
    return found


def layer_cases() -> list[LayerCase]:
    C = LayerCase
    return [
        # Shapes and layouts of self-attention.
        C("self_basic", l=7),
        C("self_seq_first", l=6, n=3, batch_first=False),
        C("self_unbatched", l=7, unbatched=True, batch_first=False),
        C("self_no_bias", l=6, bias=False, average=False),
        C("self_per_head", l=5, average=False),
        C("self_no_weights", l=9, need_weights=False),
        C("self_one_head", embed_dim=8, heads=1, l=6),
        C("self_one_token", l=1, n=3),
        C("self_one_token_unbatched", l=1, unbatched=True, average=False),
        C("self_width_1", embed_dim=8, heads=8, l=5, average=False),
        C("self_width_5", embed_dim=15, heads=3, l=6),
        C("self_width_17", embed_dim=17, heads=1, n=1, l=5),
        C("self_width_16", embed_dim=32, heads=2, n=1, l=13, average=False),
        # Cross-attention.
        C("cross_same_kv", l=4, s=9, inputs="same_kv"),
        C("cross_different", l=6, s=5, inputs="different", average=False),
        C("cross_seq_first", l=3, s=8, n=3, inputs="different", batch_first=False),
        C("cross_unbatched", l=5, s=7, inputs="different", unbatched=True),
        C("cross_one_query", l=1, s=13, inputs="same_kv"),
        C("cross_one_key", l=6, s=1, inputs="different"),
        C("cross_all_lengths_equal", l=5, inputs="different", need_weights=False),
        C("cross_s300", embed_dim=8, heads=2, n=1, l=5, s=300, inputs="same_kv"),
        C("cross_s600", embed_dim=8, heads=2, n=1, l=17, s=600, inputs="same_kv", need_weights=False,
          padding="bool"),
        # kdim and vdim.
        C("kdim_vdim", embed_dim=12, heads=3, kdim=7, vdim=9, l=4, s=6, inputs="different"),
        C("kdim_only", embed_dim=12, heads=2, kdim=5, l=4, s=6, inputs="different", average=False),
        C("vdim_only", embed_dim=12, heads=2, vdim=20, l=4, s=6, inputs="different", batch_first=False),
        C("kdim_vdim_no_bias", embed_dim=8, heads=2, kdim=10, vdim=10, l=3, s=5, inputs="same_kv",
          bias=False),
        C("kdim_vdim_extra_keys", embed_dim=8, heads=2, kdim=6, vdim=4, l=4, s=5, inputs="different",
          add_bias_kv=True, add_zero_attn=True, padding="bool"),
        # Extra keys.
        C("bias_kv", l=6, add_bias_kv=True),
        C("zero_attn", l=6, add_zero_attn=True, average=False),
        C("bias_kv_zero_attn", l=5, s=7, inputs="different", add_bias_kv=True, add_zero_attn=True,
          batch_first=False),
        C("bias_kv_no_weights", l=6, add_bias_kv=True, bias=False, need_weights=False),
        C("bias_kv_unbatched", l=4, unbatched=True, add_bias_kv=True, add_zero_attn=True, average=False),
        C("bias_kv_masks", l=5, add_bias_kv=True, attn_mask="float", padding="float"),
        C("bias_kv_causal", l=6, causal=True, add_bias_kv=True, add_zero_attn=True),
        C("zero_attn_causal_no_weights", l=6, causal=True, add_zero_attn=True, need_weights=False),
        C("only_bias_kv", l=5, add_bias_kv=True, padding="bool", only_extra_keys=True),
        C("only_zero_attn", l=5, add_zero_attn=True, attn_mask="bool", only_extra_keys=True, average=False),
        C("only_extra_keys_float", l=4, add_bias_kv=True, add_zero_attn=True, attn_mask="float",
          per_head_mask=True, only_extra_keys=True, average=False),
        # Masks.
        C("mask_bool", l=7, attn_mask="bool"),
        C("mask_bool_per_head", l=5, attn_mask="bool", per_head_mask=True, average=False),
        C("mask_bool_per_head_unbatched", l=5, attn_mask="bool", per_head_mask=True, unbatched=True),
        C("mask_float", l=6, attn_mask="float", average=False),
        C("mask_float_inf", l=4, s=9, inputs="same_kv", attn_mask="float", extreme=MINUS_INF),
        C("mask_float_1e9", l=6, attn_mask="float", extreme=-1e9, need_weights=False),
        C("mask_float_per_head", l=5, s=6, inputs="different", attn_mask="float", per_head_mask=True),
        C("mask_float_per_head_unbatched", l=5, attn_mask="float", per_head_mask=True, unbatched=True,
          average=False),
        C("mask_float_per_head_no_weights", l=5, s=4, inputs="same_kv", attn_mask="float", per_head_mask=True,
          need_weights=False, batch_first=False),
        C("padding_bool", l=7, n=3, padding="bool"),
        C("padding_bool_unbatched", l=7, padding="bool", unbatched=True, average=False),
        C("padding_float", l=5, s=8, inputs="different", padding="float"),
        C("padding_float_inf", l=6, padding="float", extreme=MINUS_INF, need_weights=False),
        C("padding_float_unbatched", l=6, padding="float", unbatched=True),
        C("both_bool", l=6, attn_mask="bool", padding="bool"),
        C("both_float", l=6, attn_mask="float", padding="float", average=False),
        C("mask_float_padding_bool", l=6, attn_mask="float", padding="bool"),
        C("mask_bool_padding_float", l=4, s=7, inputs="same_kv", attn_mask="bool", per_head_mask=True,
          padding="float"),
        # Causal.
        C("causal", l=9, causal=True),
        C("causal_no_weights", l=9, causal=True, need_weights=False),
        C("causal_seq_first", l=7, causal=True, batch_first=False, average=False),
        C("causal_unbatched", l=8, causal=True, unbatched=True),
        C("causal_cross", l=6, causal=True, inputs="different"),
        C("causal_padding_bool", l=8, causal=True, padding="bool", average=False),
        C("causal_padding_float", l=7, causal=True, padding="float"),
        C("causal_mask_bool", l=7, causal=True, attn_mask="bool", per_head_mask=True),
        C("causal_mask_float_padding_bool", l=7, causal=True, attn_mask="float", padding="bool",
          need_weights=False),
        # Gradients through the returned weights.
        C("grad_weights_average", l=6, grad_weights=True),
        C("grad_weights_per_head", l=5, average=False, grad_weights=True),
        C("grad_weights_masks", l=5, s=7, inputs="different", attn_mask="float", padding="float",
          average=False, grad_weights=True),
        C("grad_weights_extra_keys", l=5, add_bias_kv=True, add_zero_attn=True, attn_mask="bool",
          grad_weights=True),
        C("grad_weights_causal_unbatched", l=7, causal=True, unbatched=True, average=False,
          grad_weights=True),
        # Ready keys and values.
        C("static_kv", l=5, s=7, inputs="different", batch_first=False, static_kv=True),
        C("static_kv_masks", l=4, s=6, inputs="different", batch_first=False, static_kv=True,
          add_zero_attn=True, attn_mask="float", padding="bool", average=False),
        # What nn.MultiheadAttention has not: fewer KV heads, and a width of its own for a head.
        C("gqa", kv_heads=2, l=7, from_ops=True),
        C("gqa_per_head", embed_dim=24, heads=6, kv_heads=3, l=5, average=False, from_ops=True),
        C("gqa_causal", kv_heads=2, l=9, causal=True, from_ops=True),
        C("gqa_cross", kv_heads=2, l=4, s=9, inputs="different", average=False, from_ops=True),
        C("gqa_kdim_vdim", kv_heads=2, kdim=6, vdim=10, l=4, s=5, inputs="different", from_ops=True),
        C("gqa_mask_bool_per_head", kv_heads=2, l=6, attn_mask="bool", per_head_mask=True, average=False,
          from_ops=True),
        C("gqa_mask_float_padding_bool", kv_heads=2, l=5, s=7, inputs="same_kv", attn_mask="float",
          padding="bool", from_ops=True),
        C("gqa_extra_keys", kv_heads=2, l=5, add_bias_kv=True, add_zero_attn=True, padding="bool",
          from_ops=True),
        C("gqa_grad_weights", kv_heads=2, l=5, causal=True, grad_weights=True, from_ops=True),
        C("gqa_seq_first", kv_heads=2, l=5, n=3, batch_first=False, need_weights=False, from_ops=True),
        C("mqa", kv_heads=1, l=7, from_ops=True),
        C("mqa_causal_unbatched", kv_heads=1, l=8, causal=True, unbatched=True, average=False, from_ops=True),
        C("mqa_one_token", kv_heads=1, l=1, n=3, from_ops=True),
        C("mqa_mask_float_per_head", kv_heads=1, l=5, attn_mask="float", per_head_mask=True,
          need_weights=False, from_ops=True),
        C("mqa_s300", embed_dim=8, heads=3, kv_heads=1, head_dim=5, n=1, l=5, s=300, inputs="same_kv",
          average=False, from_ops=True),
        C("wide_heads", embed_dim=10, heads=2, head_dim=17, l=6, from_ops=True),
        C("wide_heads_no_bias", embed_dim=8, heads=1, head_dim=33, l=5, bias=False, from_ops=True),
        C("narrow_heads_gqa", embed_dim=20, heads=4, kv_heads=2, head_dim=3, l=6, causal=True, average=False,
          from_ops=True),
    ]


# ---------------------------------------------------------------------------------------------- SDPA cases


@dataclass(frozen=True)
class SdpaCase:
    name: str
    n: int = 2
    heads: int = 2
    kv_heads: int = 0
    l: int = 5
    s: int = 7
    d: int = 8
    dv: int = 0
    causal: bool = False
    scale: float | None = None
    mask: str = ""  # bool or float
    mask_shape: str = "ls"  # which of n, h, l, s the mask has; the others are 1, and ls is two-dimensional
    extreme: float | None = None  # also put this value into a float mask

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def value_width(self) -> int:
        return self.dv or self.d

    @property
    def used_scale(self) -> float:
        return 1.0 / math.sqrt(self.d) if self.scale is None else self.scale

    def settings(self) -> Settings:
        return {
            "n": self.n,
            "heads": self.heads,
            "kv_heads": self.groups,
            "l": self.l,
            "s": self.s,
            "d": self.d,
            "dv": self.value_width,
            "causal": int(self.causal),
            "set_scale": int(self.scale is not None),
            "scale": self.used_scale,
        }


def draw_sdpa_mask(case: SdpaCase) -> Tensor:
    shape: tuple[int, ...] = (case.l, case.s)
    if case.mask_shape != "ls":
        shape = (case.n if "n" in case.mask_shape else 1, case.heads if "h" in case.mask_shape else 1, *shape)
    mask = draw_bool(*shape) if case.mask == "bool" else draw_float_mask(*shape, extreme=case.extreme)
    # One key stays open for every row, since PyTorch gives NaN for a row that sees nothing.
    open_key = 0 if case.causal else int(torch.randint(0, case.s, ()))
    mask[..., open_key] = False if case.mask == "bool" else 0.5
    return mask


def sdpa_by_formula(case: SdpaCase, q: Tensor, k: Tensor, v: Tensor,
                    mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, written out."""
    repeats = case.heads // case.groups
    scores = q @ k.repeat_interleave(repeats, dim=1).transpose(-1, -2) * case.used_scale
    if mask is not None:
        scores = scores + additive(mask)
    if case.causal:
        scores = scores.masked_fill(causal_mask(case.l, case.s), MINUS_INF)
    return scores.softmax(-1) @ v.repeat_interleave(repeats, dim=1), scores.logsumexp(-1)


def torch_sdpa(case: SdpaCase, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    is_causal = case.causal and mask is None
    if mask is not None:
        if case.causal:
            # PyTorch refuses a mask together with is_causal.
            mask = additive(mask).masked_fill(causal_mask(case.l, case.s), MINUS_INF)
        elif mask.dtype == torch.bool:
            mask = ~mask  # its true means "may attend"
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=case.scale,
                                          enable_gqa=case.groups != case.heads)


def make_sdpa_case(case: SdpaCase) -> Tensors:
    seed_from(case.name)
    tensors = {
        "query": draw(case.n, case.heads, case.l, case.d, magnitude=2.0),
        "key": draw(case.n, case.groups, case.s, case.d, magnitude=2.0),
        "value": draw(case.n, case.groups, case.s, case.value_width, magnitude=2.0),
    }
    if case.mask:
        tensors["attn_mask"] = draw_sdpa_mask(case)
    live = leaves(tensors)
    arguments = (live["query"], live["key"], live["value"], live.get("attn_mask"))
    out = torch_sdpa(case, *arguments)
    out_by_formula, lse = sdpa_by_formula(case, *arguments)
    require_close(f"{case.name}: out by formula", out_by_formula, out, slack=max(1.0, case.used_scale))

    tensors["out"], tensors["lse"] = out.detach(), lse.detach()
    tensors["grad_out"] = draw(*out.shape)
    (out * tensors["grad_out"]).sum().backward()
    return tensors | gradients(live)


def sdpa_cases() -> list[SdpaCase]:
    C = SdpaCase
    return [
        # Sizes.
        C("basic"),
        C("one_of_each", n=1, heads=1, l=1, s=1, d=1),
        C("one_query", l=1, s=13),
        C("one_key", l=6, s=1),
        C("more_queries_than_keys", l=11, s=3),
        C("n3", n=3, l=4, s=5, d=4),
        C("d1", d=1),
        C("d5", d=5),
        C("d17", n=1, d=17),
        C("d33", n=1, d=33),
        C("d64", n=1, heads=1, d=64, l=3, s=5),
        C("dv_larger", d=5, dv=9),
        C("dv_smaller", d=17, dv=3, n=1),
        C("dv1", d=8, dv=1),
        C("s256", n=1, heads=1, l=3, s=256, d=4),
        C("s257", n=1, heads=1, l=3, s=257, d=4),
        C("s300", n=1, heads=2, kv_heads=1, l=5, s=300, d=5),
        C("s600", n=1, heads=2, kv_heads=1, l=17, s=600, d=3, dv=4),
        C("l300_s20", n=1, heads=1, l=300, s=20, d=4),
        # Causal, aligned at the top left.
        C("causal_square", l=9, s=9, causal=True),
        C("causal_wide", l=4, s=9, causal=True),
        C("causal_tall", l=9, s=4, causal=True),
        C("causal_one_query", l=1, s=6, causal=True),
        C("causal_s300", n=1, heads=1, l=300, s=300, d=3, causal=True),
        C("causal_mask_bool", l=7, s=7, causal=True, mask="bool"),
        C("causal_mask_float", l=5, s=8, causal=True, mask="float", mask_shape="nhls"),
        # Scale.
        C("scale_half", scale=0.5),
        C("scale_zero", scale=0.0),
        C("scale_zero_causal", l=6, s=6, scale=0.0, causal=True),
        C("scale_scores_1e2", scale=32.0),
        C("scale_scores_1e4", scale=2048.0, l=4, s=6),
        # Query heads that share KV heads.
        C("gqa", heads=4, kv_heads=2),
        C("gqa_groups_of_3", n=1, heads=6, kv_heads=2, d=5, dv=3),
        C("gqa_causal", heads=4, kv_heads=2, l=6, s=6, causal=True),
        C("gqa_mask_float_per_head", heads=4, kv_heads=2, mask="float", mask_shape="1hls"),
        C("mqa", heads=4, kv_heads=1),
        C("mqa_mask_bool", heads=3, kv_heads=1, mask="bool", mask_shape="nhls"),
        # Masks.
        C("mask_bool", mask="bool"),
        C("mask_bool_full", mask="bool", mask_shape="nhls"),
        C("mask_bool_per_batch", n=3, mask="bool", mask_shape="n1ls"),
        C("mask_bool_per_head", heads=3, mask="bool", mask_shape="1hls"),
        C("mask_float", mask="float"),
        C("mask_float_full", mask="float", mask_shape="nhls"),
        C("mask_float_per_batch", n=3, mask="float", mask_shape="n1ls"),
        C("mask_float_per_head", heads=3, mask="float", mask_shape="1hls"),
        C("mask_float_inf", mask="float", extreme=MINUS_INF),
        C("mask_float_inf_full", mask="float", mask_shape="nhls", extreme=MINUS_INF),
        C("mask_float_1e9", mask="float", extreme=-1e9),
        C("mask_float_1e9_per_batch", mask="float", mask_shape="n1ls", extreme=-1e9),
        C("mask_float_scale", mask="float", scale=1.5, d=5),
        C("mask_bool_s600", n=1, heads=1, l=5, s=600, d=4, mask="bool"),
        C("mask_float_s300", n=1, heads=2, l=5, s=300, d=4, mask="float", extreme=MINUS_INF),
    ]


# ---------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class GoldenFile:
    tensors: Tensors
    metadata: dict[str, str]


def settings_line(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def collect(made: list[tuple[str, Settings, Tensors]]) -> GoldenFile:
    names = [name for name, _, _ in made]
    if len(set(names)) != len(names):
        raise ValueError("two cases have the same name")
    metadata = {"cases": "\n".join(names), "torch": torch.__version__.split("+")[0]}
    tensors: Tensors = {}
    for name, settings, of_case in made:
        metadata[f"case.{name}"] = settings_line(settings)
        for tensor_name, x in of_case.items():
            # Only additive masks may hold an infinity.
            if not (tensor_name in ("attn_mask", "key_padding_mask") or bool(x.isfinite().all())):
                raise ValueError(f"{name}.{tensor_name} is not finite")
            tensors[f"{name}.{tensor_name}"] = x.contiguous()
    return GoldenFile(tensors, metadata)


def make_files() -> dict[str, GoldenFile]:
    # The plain backend, since the others sum in an order that depends on the CPU.
    with sdpa_kernel(SDPBackend.MATH):
        return {
            "mha.safetensors": collect([(c.name, c.settings(), make_layer_case(c)) for c in layer_cases()]),
            "sdpa.safetensors": collect([(c.name, c.settings(), make_sdpa_case(c)) for c in sdpa_cases()]),
        }


def to_bytes(made: GoldenFile) -> bytes:
    """The file's bytes with its metadata sorted: safetensors writes it in another order on every run."""
    raw = save(made.tensors, made.metadata)
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data_start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[data_start:]


def read(path: Path) -> GoldenFile:
    with safe_open(path, framework="pt") as stored:
        return GoldenFile({name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata())


def check_file(name: str, made: GoldenFile, stored: GoldenFile) -> None:
    if stored.metadata != made.metadata:
        different = sorted(key for key in stored.metadata.keys() | made.metadata.keys()
                           if stored.metadata.get(key) != made.metadata.get(key))
        raise ValueError(f"{name}: metadata differs in {different}")
    if stored.tensors.keys() != made.tensors.keys():
        raise ValueError(f"{name}: tensors differ: {sorted(stored.tensors.keys() ^ made.tensors.keys())}")
    for tensor_name, expected in stored.tensors.items():
        actual = made.tensors[tensor_name]
        # What is F64 was computed; all else was drawn, and must be the same bits.
        if expected.dtype == torch.float64:
            case = tensor_name.split(".")[0]
            settings = dict(pair.split("=") for pair in stored.metadata[f"case.{case}"].split())
            require_close(f"{name}: {tensor_name}", actual, expected,
                          slack=max(1.0, float(settings.get("scale", 1.0))))
        elif actual.dtype != expected.dtype or not torch.equal(actual, expected):
            raise ValueError(f"{name}: input {tensor_name} differs")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or check the golden cases.")
    parser.add_argument("--check", action="store_true", help="compare with the stored files, write nothing")
    check = parser.parse_args().check
    torch.set_num_threads(1)

    for name, made in make_files().items():
        path = HERE / name
        if not check:
            path.write_bytes(to_bytes(made))
        try:
            check_file(name, made, read(path))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        cases = len(made.metadata["cases"].split("\n"))
        print(f"{name}: {cases} cases, {len(made.tensors)} tensors, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
