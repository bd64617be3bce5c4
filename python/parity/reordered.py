"""PyTorch's functions with sums taken in another order: the same numbers but for rounding.

What PyTorch's errors and these differ by is luck, so it tells how far Rapt's may be from PyTorch's by luck alone.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The dimensions of a head from the last to the first, and the keys likewise."""
    query, key = query.flip(-1), key.flip(-1)
    if not options["is_causal"]:
        mask = options["attn_mask"]
        key, value = key.flip(-2), value.flip(-2)
        options["attn_mask"] = None if mask is None else mask.flip(-1)
    return F.scaled_dot_product_attention(query, key, value, **options)


def multi_head_attention_forward(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    """The features of tokens from the last to the first."""
    flipped: dict[int, Tensor] = {}  # a tensor that is given twice stays one
    for name in ("query", "key", "value", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        tensor = arguments.get(name)
        if tensor is not None:
            arguments[name] = flipped.setdefault(id(tensor), tensor.flip(-1))
    return F.multi_head_attention_forward(**arguments)
