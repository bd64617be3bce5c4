"""attn_implementation="rapt" for models of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt.torch._attention import scaled_dot_product_attention


def _biased(bias: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Relative positions (T5's) and who sees whom, as one mask that is added."""
    if is_causal:
        length, keys = bias.shape[-2:]
        mask = torch.ones(length, keys, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype is torch.bool else bias + mask


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function of a model: [N, H, L, D] in, [N, L, H, D] out, and no weights.

    Without a mask, a module that is causal has as many keys as queries, or (an empty cache of a fixed size) keys behind
    them that nobody sees; a single query sees all keys.
    """
    if more.get("softcap") is not None:
        raise ValueError('rapt: there is no softcap; use attn_implementation="eager"')
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = query.shape[2] > 1 and attention_mask is None and bool(is_causal)
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask, is_causal)
        is_causal = False
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal, scaling, enable_gqa=query.shape[1] != key.shape[1]
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def register_transformers(name: str = "rapt") -> None:
    """Lets models of Transformers take attn_implementation="rapt", or another name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
