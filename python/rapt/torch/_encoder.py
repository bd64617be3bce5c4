"""nn.TransformerEncoderLayer around Rapt's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

_IN_PLACE: dict[Any, Any] = {F.relu: torch.relu_, F.gelu: torch.ops.aten.gelu_}


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """The same, but for memory: without gradients the activation is computed in place, as PyTorch's fast path does.

    The buffer that this saves is the largest of the layer, and given back to the system after each call.
    """

    def _ff_block(self, x: Tensor) -> Tensor:
        first = self.linear1
        in_place = _IN_PLACE.get(self.activation)
        is_watched = first._forward_hooks or modules._global_forward_hooks  # by somebody who may keep what they see
        if in_place is None or torch.compiler.is_compiling() or type(first) is not nn.Linear or is_watched:
            return super()._ff_block(x)
        hidden = first(x)
        hidden = self.activation(hidden) if hidden.requires_grad else in_place(hidden)
        return self.dropout2(self.linear2(self.dropout(hidden)))
