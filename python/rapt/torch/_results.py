"""Memory for large results, used again once nobody uses it.

malloc gives blocks of this size back to the system, which clears them page by page before the next call has them again:
for a result of 33 MB that takes 2 % of the time of computing it, for its gradients up to 10 %. The last few results'
memory is held here as well, and is taken for the next of its size when no tensor, view or array uses it. It is asked
for in large pages: the heads of a token lie side by side, so that the rows of one head are on a page each.
"""

from __future__ import annotations

from math import prod
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from rapt import _core

_LARGE = 4 << 20  # bytes of a result; smaller ones stay with malloc
_MOST_BYTES, _MOST = 128 << 20, 8  # of memory that is held here, in all

_count_users: Any = getattr(torch._C, "_storage_Use_Count", None)  # how many in C++ hold a storage


class _Held:
    def __init__(self, storage: Any):
        self.storage, self.address, self.size = storage, storage.data_ptr(), storage.nbytes()

    def references(self) -> int:
        return getrefcount(self.storage)

    def is_free(self) -> bool:
        """Nobody else has the storage, in Python or in C++. Asked again: one may turn into the other meanwhile."""
        alone = self.references() == _NO_OTHER and _count_users(self.storage._cdata) == 1
        return alone and self.references() == _NO_OTHER

    def is_whole(self) -> bool:
        """Nobody has resized it, or moved it into shared memory."""
        return self.storage.data_ptr() == self.address and self.storage.nbytes() == self.size


_NO_OTHER = _Held(torch.UntypedStorage(0)).references()
_held: list[_Held] = []  # the one that was taken last is last


def _remove(held: _Held) -> bool:
    """False: another thread was faster."""
    try:
        _held.remove(held)
        return True
    except ValueError:
        return False


def _take(size: int) -> _Held | None:
    for held in _held.copy():
        if not held.is_free() or (held.is_whole() and held.size != size) or not _remove(held):
            continue
        if not held.is_free():  # another thread has taken it, and held it again, since we asked
            _hold(held)
        elif held.is_whole():
            return held
    return None


def _hold(held: _Held) -> None:
    _held.append(held)
    while len(_held) > _MOST or sum(each.size for each in _held) > _MOST_BYTES:
        del _held[:1]


def empty_strided(prototype: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A new tensor of the prototype's type, on the CPU; the strides leave no gaps."""
    size = prod(shape) * prototype.element_size()
    if size < _LARGE or _count_users is None:
        return torch.empty_strided(shape, strides, dtype=prototype.dtype, device="cpu")
    held = _take(size)
    if held is not None:
        made = torch.empty(0, dtype=prototype.dtype, device="cpu").set_(held.storage, 0, shape, strides)
        _hold(held)
        return made
    release_memory()  # sizes have changed
    made = torch.empty_strided(shape, strides, dtype=prototype.dtype, device="cpu")
    _core.torch_prefer_large_pages(made.data_ptr(), size)
    _hold(_Held(made.untyped_storage()))
    return made


def empty_like(prototype: Tensor) -> Tensor:
    """As torch.empty_like."""
    if prototype.nbytes < _LARGE or not prototype.is_contiguous():
        return torch.empty_like(prototype)
    return empty_strided(prototype, prototype.shape, prototype.stride())


def empty_contiguous(prototype: Tensor) -> Tensor:
    """A contiguous tensor of the prototype's shape."""
    if prototype.nbytes < _LARGE:
        return torch.empty_like(prototype, memory_format=torch.contiguous_format)
    strides, step = [], 1
    for size in reversed(prototype.shape):
        strides.append(step)
        step *= max(size, 1)
    return empty_strided(prototype, prototype.shape, tuple(reversed(strides)))


def release_memory() -> None:
    """Gives memory of results that nobody uses any more back to the system.

    Up to 128 MiB of it are kept for the next results, until one of another size is computed.
    """
    for held in _held.copy():
        if held.is_free():
            _remove(held)
