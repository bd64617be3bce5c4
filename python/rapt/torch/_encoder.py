"""nn.TransformerEncoderLayer around Rapt's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

_IN_PLACE: dict[Any, Any] = {F.relu: torch.relu_, F.gelu: torch.ops.aten.gelu_}


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody sees what the module computes, and may keep it."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own or modules._global_forward_hooks or modules._global_forward_pre_hooks)


def _drop(dropout: nn.Module, x: Tensor) -> Tensor:
    if type(dropout) is nn.Dropout and not dropout.training and not _is_watched(dropout):
        return x
    return dropout(x)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """The same with less around it in eval mode, so that small calls take no longer than PyTorch's fast path.

    Without masks nothing asks whether there is a fast path, and no dropout is called that does nothing. Without
    gradients the activation is computed in place, as the fast path does: the buffer that this saves is the largest of
    the layer, and given back to the system after each call.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As in PyTorch."""
        if self.training or src_mask is not None or src_key_padding_mask is not None:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), None, None, is_causal=is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, None, None, is_causal=is_causal))
        return self.norm2(x + self._ff_block(x))

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        x, _ = self.self_attn(
            x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False, is_causal=is_causal
        )  # fmt: skip
        return _drop(self.dropout1, x)

    def _ff_block(self, x: Tensor) -> Tensor:
        first = self.linear1
        in_place = _IN_PLACE.get(self.activation)
        if in_place is None or torch.compiler.is_compiling() or type(first) is not nn.Linear or _is_watched(first):
            return super()._ff_block(x)
        hidden = first(x)
        hidden = self.activation(hidden) if hidden.requires_grad else in_place(hidden)
        return _drop(self.dropout2, self.linear2(_drop(self.dropout, hidden)))
