"""The attention operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rapt import _core

Array = TypeVar("Array")
_compute = _core.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int | str | Sequence[int] | Any = 0,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    key_start: Any = None,
    return_lse: bool = False,
) -> Any:
    """softmax(query @ key.T * scale + mask) @ value, as PyTorch's function of that name.

    query is [..., H, L, D], key [..., Hk, S, D], value [..., Hk, S, Dv], of 2 to 5 dimensions (three are [N, L, D]) and
    float32, float64, bfloat16 or float16; sizes of 1 before the last two broadcast. Nothing is copied.

    attn_mask: what is true attends, or numbers that are added; broadcasts to [..., H, L, S].
    dropout_p: zeroes weights with this probability, as `manual_seed` says; there is no eval mode here.
    is_causal: query i sees keys up to i + causal_offset; holds beside a mask.
    scale: 1/sqrt(D) if not given.
    enable_gqa: H may be a multiple of Hk; each run of H/Hk query heads shares a head of key and value.
    causal_offset: an integer, one for each sequence, or "bottom_right" for S - L. It also places the window.
    window: (left, right): query i sees keys from i + causal_offset - left to i + causal_offset + right; None: no limit.
    key_lengths, key_start: how many keys of each sequence are real, and the first one; an integer stands for all.
    return_lse: returns (out, lse), with the logarithm of each row's sum of exponentials [..., H, L].

    A query that sees no key gets zeros. Results are arrays of the query's kind, and NumPy's if that is a buffer.
    """
    return _compute(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_offset, window, key_lengths,
        key_start, return_lse,
    )  # fmt: skip
