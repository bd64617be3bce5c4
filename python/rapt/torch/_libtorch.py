"""Functions of LibTorch's stable ABI that the binding calls by address: nothing of Rapt is linked with PyTorch."""

from __future__ import annotations

import ctypes
import os

import torch

from rapt import _core


def addresses(*names: str) -> tuple[int, ...] | None:
    """Where the functions are; None if this PyTorch does not have them all."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        found = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names)
        return tuple(address or 0 for address in found)
    except (AttributeError, OSError):
        return None


def share_threads() -> None:
    """Makes PyTorch's threads compute for Rapt, as many as `torch.set_num_threads` says, unless Rapt has a number."""
    functions = addresses("torch_parallel_for", "torch_get_num_threads")
    if functions is not None and not os.environ.get("RAPT_NUM_THREADS"):
        _core.borrow_threads(*functions)
