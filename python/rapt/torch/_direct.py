"""The shortest way of the operator, `_core.torch_attend`, and what it needs of PyTorch.

It takes plain tensors of four dimensions in eager mode: it computes, makes the result and records it for autograd in
one call. For what it does not take it returns None. docs/DESIGN.md says what it was measured against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapt import _core
from rapt.torch import _kernels as kernels
from rapt.torch import _operators as operators
from rapt.torch._libtorch import addresses, share_threads
from rapt.torch._results import empty_strided
from rapt.torch._shapes import align_mask

attend = _core.torch_attend
_backward = _core.torch_backward
_is_grad_enabled = torch.is_grad_enabled
_has_memory = torch._C._has_storage
_num_modes = torch._C._len_torch_dispatch_stack
_STABLE = ("aoti_torch_empty_strided", "torch_tensor_to_pyobject", "aoti_torch_delete_tensor_object")


class _Recorded(torch.autograd.Function):
    """A call that `_core.torch_attend` has made already."""

    forward = staticmethod(_core.torch_record)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None) -> tuple[Any, ...]:
        if d_out is None:
            return (None,) * 4
        if not _is_grad_enabled() and _has_memory(d_out) and not _num_modes():
            return _backward(ctx, d_out.resolve_neg())
        # Somebody may ask for the second derivative, which the operator refuses, or watches; or vmap has made many.
        operators.register_flops()
        record, (query, key, value, out, *masks) = ctx.record, ctx.saved_tensors
        mask = None if record.mask is None else torch.from_dlpack(record.mask)
        if masks:
            mask = align_mask(masks[0], query, key.shape[2], query.shape[:2])
        wanted = [*ctx.needs_input_grad[:3], False]
        options = operators.arguments(record.options, query.shape[0], kernels.NO_WEIGHTS)
        results = operators.attention_backward(
            d_out, None, query, key, value, out, torch.from_dlpack(record.lse), mask, *options, wanted
        )
        return tuple(r if want else None for r, want in zip(results, wanted))


def connect(stable: bool = True) -> None:
    """Tells the binding what to call. `stable`: make tensors by the stable ABI, if it is there (PyTorch 2.14)."""
    # The apply of Function itself looks first whether transforms of torch.func are active, which is known here.
    apply = super(torch.autograd.Function, _Recorded).apply
    _core.torch_connect(Tensor, torch.nn.Parameter, apply, empty_strided, addresses(*_STABLE) if stable else None)


connect()
share_threads()
