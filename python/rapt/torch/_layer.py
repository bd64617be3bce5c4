"""nn.MultiheadAttention with Rapt's kernels, and models with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapt import _core
from rapt.torch import _kernels as kernels
from rapt.torch._attention import _is_autocast, _is_compiling, in_eager_mode, scaled_dot_product_attention, takes
from rapt.torch._encoder import TransformerEncoderLayer
from rapt.torch._functional import WEIGHTS, forward

Model = TypeVar("Model", bound=nn.Module)
_PROBES = 64  # numbers of each weight that are compared before packed ones are used


def _parameters(module: nn.MultiheadAttention) -> tuple[Tensor | None, ...]:
    own, out = module._parameters, module.out_proj._parameters
    return tuple(
        out[name[len("out_proj_") :]] if name.startswith("out_proj_") else own.get(name) for name in WEIGHTS
    )  # fmt: skip


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _key(parameters: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(p if p is None else (p.data_ptr(), _version(p), p.dtype) for p in parameters)


class _Packed:
    """A layer of the library with a module's weights. Writing through `.data` changes no version, so samples tell."""

    def __init__(self, module: nn.MultiheadAttention, parameters: tuple[Tensor | None, ...]) -> None:
        self.key = _key(parameters)
        self.kept = parameters  # memory with these addresses belongs to nobody else meanwhile
        self.probes = []
        for p in parameters:
            if p is not None:
                view = p.detach()
                if view.is_contiguous():
                    view = view.view(-1)[:: max(1, view.numel() // _PROBES)]
                self.probes.append((view, view.clone()))
        named = {n: p for n, p in zip(WEIGHTS, parameters) if p is not None}
        dtype = str(module.out_proj.weight.dtype).removeprefix("torch.")
        self.layer = _core.Layer(
            embed_dim=module.embed_dim, num_heads=module.num_heads, kdim=module.kdim, vdim=module.vdim,
            bias=module.in_proj_bias is not None, add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn, batch_first=module.batch_first, dtype=dtype,
        )  # fmt: skip
        with torch.no_grad():
            for name, memory in self.layer.tensors().items():
                target = torch.from_dlpack(memory)
                target.copy_(named[name.replace("out_proj.", "out_proj_")].reshape(target.shape))
        self.layer.commit()
        self.layer.train(False)

    def is_current(self, parameters: tuple[Tensor | None, ...]) -> bool:
        return self.key == _key(parameters) and all(torch.equal(view, then) for view, then in self.probes)


def _takes_constant_mask(mask: Tensor) -> bool:
    if mask.dtype is torch.bool:
        return type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided and not mask.is_nested
    return takes(mask) and not (mask.requires_grad and torch.is_grad_enabled())


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention: the same arguments, parameters, state dict and behaviour.

    While training, or where a gradient is wanted, each call takes the parameters as they are. In eval mode without
    gradients the weights are packed once, and again when they changed. (A change of single numbers through
    `parameter.data` may go unnoticed: call `repack()` after that.) A query that sees no key attends to nothing: zeros
    and not NaN.
    """

    def repack(self) -> None:
        """Forgets packed weights; the next call packs anew."""
        self.__dict__.pop("_rapt_packed", None)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_rapt_packed", None)
        return state

    def train(self, mode: bool = True) -> MultiheadAttention:
        """As in PyTorch."""
        self.repack()
        return super().train(mode)

    def _packed(self, parameters: tuple[Tensor | None, ...]) -> _Packed:
        packed = self.__dict__.get("_rapt_packed")
        if packed is None or not packed.is_current(parameters):
            packed = self.__dict__["_rapt_packed"] = _Packed(self, parameters)
        return packed

    def _takes_packed(self, inputs: tuple[Tensor, ...], parameters: tuple[Tensor | None, ...]) -> bool:
        query = inputs[0]
        if self.training or _is_autocast("cpu") or not in_eager_mode():
            return False
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, *parameters)):
            return False
        if query.ndim not in (2, 3) or query.shape[-1] != self.embed_dim:
            return False
        return all(t is None or (takes(t) and t.dtype is query.dtype) for t in (*inputs, *parameters))

    def _forward_packed(
        self, inputs: tuple[Tensor, ...], parameters: Any, mask: Tensor | None, padding: Tensor | None, kind: int
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = inputs
        layer = self._packed(parameters).layer
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        options: dict[str, Any] = {}
        shown = None
        if kind:
            first = self.batch_first and query.ndim == 3
            n = query.shape[:2][0 if first else 1 : 1 if first else 2] if query.ndim == 3 else ()
            keys = key.shape[1 if first else 0] + (self.bias_k is not None) + self.add_zero_attn
            heads = (self.num_heads,) if kind == kernels.HEAD_WEIGHTS else ()
            shown = options["weights"] = query.new_empty((*n, *heads, query.shape[1 if first else 0], keys))
            options["per_head_weights"] = kind == kernels.HEAD_WEIGHTS
        if mask is not None:
            options["attn_mask"] = mask
        if padding is not None:
            options["key_padding_mask"] = padding
        try:
            layer.forward(query, key, value, out, **options)
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"rapt: {error}") from None
        return out, shown

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in PyTorch. is_causal is a hint about attn_mask, which is used."""
        kind = kernels.NO_WEIGHTS
        if need_weights:
            kind = kernels.MEAN_WEIGHTS if average_attn_weights else kernels.HEAD_WEIGHTS
        inputs = (query, key, value)
        parameters = _parameters(self)
        if is_causal and attn_mask is None:
            raise RuntimeError("rapt: is_causal is a hint about attn_mask, which is needed with it, as in PyTorch")
        if (
            not _is_compiling()
            and self._takes_packed(inputs, parameters)
            and (attn_mask is None or (attn_mask.dim() in (2, 3) and _takes_constant_mask(attn_mask)))
            and (key_padding_mask is None or _takes_constant_mask(key_padding_mask))
        ):
            return self._forward_packed(inputs, parameters, attn_mask, key_padding_mask, kind)
        tensors = (query, key, value, attn_mask, key_padding_mask, None, None, *parameters)
        first = self.batch_first and query.dim() == 3
        dropout = self.dropout if self.training else 0.0
        result = forward(
            tensors, self.num_heads, self.embed_dim, self.add_zero_attn, dropout, first, kind, is_causal
        )  # fmt: skip
        if result is not None:
            return result
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )  # fmt: skip


# ---- models ----


def convert(model: Model, back: bool = False) -> Model:
    """Makes every nn.MultiheadAttention in a model (or the model itself) one of Rapt's, in place; `back` undoes it.

    Parameters, hooks and identities stay. nn.TransformerEncoderLayer and nn.TransformerEncoder, which have a shorter
    way around their attention layer in eval mode, take the long one while converted.
    """
    pairs = ((nn.MultiheadAttention, MultiheadAttention), (nn.TransformerEncoderLayer, TransformerEncoderLayer))
    swapped: dict[type, type] = {new: old for old, new in pairs} if back else dict(pairs)
    shortcuts = (
        (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
        (nn.TransformerEncoder, "use_nested_tensor", False),
    )
    for module in model.modules():
        if type(module) in swapped:
            module.__dict__.pop("_rapt_packed", None)
            module.__class__ = swapped[type(module)]
        for kind, name, closed in shortcuts:
            if isinstance(module, kind):
                if back and "_rapt_shortcut" in module.__dict__:
                    setattr(module, name, module.__dict__.pop("_rapt_shortcut"))
                elif not back and "_rapt_shortcut" not in module.__dict__:
                    module.__dict__["_rapt_shortcut"] = getattr(module, name, closed)
                    setattr(module, name, closed)
    return model


def unconvert(model: Model) -> Model:
    """convert(model, back=True)."""
    return convert(model, back=True)


@contextmanager
def sdpa() -> Iterator[None]:
    """Within it, F.scaled_dot_product_attention is Rapt's, for all code that calls it by that name."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
