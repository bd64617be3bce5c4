"""Arrays of strangers: buffers as NumPy's, and new ones of the caller's kind.

The binding calls this for all but NumPy's own arrays, which it takes and makes itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_ALIGNMENT = 64  # of memory that JAX takes over without a copy


def bfloat16() -> np.dtype[Any] | None:
    """NumPy's type for bfloat16, if the package ml_dtypes, which has it, is there."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The type that Rapt calls f32, f64, bf16 or f16."""
    if name != "bf16":
        return np.dtype({"f32": "float32", "f64": "float64", "f16": "float16"}[name])
    found = bfloat16()
    if found is None:
        raise TypeError("NumPy has no bfloat16: install the package ml_dtypes, or use arrays of another library")
    return found


def is_torch(array: Any) -> bool:
    """Whether it is a tensor of PyTorch's, without importing that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_jax(array: Any) -> bool:
    """Whether it is an array of JAX's, without importing that."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def check_torch(*arrays: Any) -> None:
    """Fails on tensors of PyTorch's whose memory does not tell all: a gradient to record, or numbers to be negated."""
    for array in arrays:
        if getattr(array, "is_neg", bool)():
            raise TypeError("a tensor has its negative bit set: pass tensor.resolve_neg()")
        if getattr(array, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
            raise TypeError("a tensor requires a gradient, which is lost here: use rapt.torch, or pass tensor.detach()")


def view_of_buffer(buffer: Any) -> np.ndarray | None:
    """NumPy's view of an object with the buffer protocol, without a copy; None if it has none."""
    try:
        memory = memoryview(buffer)
    except TypeError:
        return None
    return np.asarray(memory)


def with_shapes(**arrays: Any) -> list[Any]:
    """The arrays, or views of those without an attribute `shape`; what was one object is one view."""
    seen: dict[int, Any] = {}
    for name, array in arrays.items():
        if id(array) in seen:
            continue
        view = array
        if array is not None and not hasattr(array, "shape"):
            view = np.asarray(array) if hasattr(array, "__array_interface__") else view_of_buffer(array)
            if view is None:
                raise TypeError(
                    f"{name} is {type(array)}, expected an array (NumPy's, one with __dlpack__ and shape, or a buffer)"
                )
        seen[id(array)] = view
    return [seen[id(array)] for array in arrays.values()]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def empty_like(prototype: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    """A new array that Rapt can write to, for `finish` to make one of the prototype's kind. dtype None: its own."""
    if is_torch(prototype):
        if dtype is None:
            return prototype.new_empty(shape)
        torch = sys.modules["torch"]
        return prototype.new_empty(shape, dtype={"f32": torch.float32, "f64": torch.float64}[dtype])
    if is_jax(prototype):
        return _aligned(shape, np.dtype(prototype.dtype if dtype is None else numpy_dtype(dtype)))
    if dtype is not None:
        return np.empty(shape, numpy_dtype(dtype))
    return np.empty(shape, prototype.dtype if hasattr(prototype, "dtype") else np.asarray(prototype).dtype)


def finish(prototype: Any, result: Any) -> Any:
    """The array that `empty_like` made as one of the prototype's kind."""
    if result is not None and is_jax(prototype):
        jax = sys.modules["jax"]
        if result.dtype.kind == "V":  # ml_dtypes': not in NumPy's DLPack
            return jax.numpy.asarray(result)
        return jax.numpy.from_dlpack(result)
    return result
