"""Keys and values of growing sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rapt import _core
from rapt._arrays import numpy_dtype

if TYPE_CHECKING:
    from rapt._layer import MultiheadAttention


class KVCache(_core.Cache):
    """Keeps what a layer's forwards with `cache=` append, for a batch of sequences of `capacity` positions.

    dtype is what is stored, the layer's if not given. With a window, a query sees that many positions, its own
    included, and older ones make room. Without a layer, num_kv_heads, head_dim and dtype are needed.
    """

    def __new__(
        cls,
        layer: MultiheadAttention | None = None,
        batch: int = 1,
        capacity: int = 2048,
        *,
        dtype: Any = None,
        window: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
    ) -> KVCache:
        """Takes the memory at once."""
        return super().__new__(
            cls,
            None if layer is None else layer.core,
            batch=batch,
            capacity=capacity,
            dtype=dtype,
            window=window,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )

    def truncate(self, length: int, sequence: int | None = None) -> None:
        """Rolls a sequence, or all that are longer, back to a length."""
        super().truncate(-1 if sequence is None else sequence, length)

    def export(self, dtype: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Keys [N,S,Hk,D] and values [N,S,Hk,Dv], zeros where a sequence is shorter or has made room in a window.

        dtype None: the cache's.
        """
        settings = self.settings()
        kind = np.dtype(numpy_dtype(settings["dtype"]) if dtype is None else dtype)
        shape = (settings["batch"], max(self.lengths()), settings["num_kv_heads"])
        keys = np.zeros((*shape, settings["head_dim"]), kind)
        values = np.zeros((*shape, settings["value_dim"]), kind)
        self.export_to(keys, values)
        return keys, values

    def longest(self, added: Any = 0) -> int:
        """The longest sequence's length, if `added` more positions come to all, or so many to each."""
        return int(np.max(np.asarray(self.lengths()) + np.asarray(added)))

    def __repr__(self) -> str:
        return "KVCache(" + ", ".join(f"{name}={value!r}" for name, value in self.settings().items()) + ")"
