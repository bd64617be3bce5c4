"""The operator beside NumPy's float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention, close, strided

import rapt


@pytest.mark.parametrize("seed", range(300))
def test_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = rng.choice(["float32", "float64", "float16"], p=[0.5, 0.3, 0.2])
    rank = rng.integers(2, 6)
    groups, heads_kv = (int(rng.integers(1, 4)), int(rng.integers(1, 4))) if rank > 3 else (1, 1)
    lead = [int(n) for n in rng.integers(1, 4, max(rank - 3, 0))]
    queries, keys, width, width_v = (int(n) for n in rng.integers(1, 40, 4))

    def lead_of(heads: int) -> list[int]:
        sizes = [1 if rng.random() < 0.2 else n for n in lead]
        return sizes + ([heads] if rank > 3 else [])

    q = strided(rng, (*lead_of(heads_kv * groups), queries, width), dtype)
    k = strided(rng, (*lead_of(heads_kv), keys, width), dtype)
    v = strided(rng, (*lead_of(heads_kv), keys, width_v), dtype)
    batch = np.broadcast_shapes(*(x.shape[: max(rank - 3, 0)] for x in (q, k, v)))
    options: dict[str, Any] = {"is_causal": bool(rng.random() < 0.5)}
    if rng.random() < 0.5:
        full = (*batch, *((heads_kv * groups,) if rank > 3 else ()), queries, keys)
        shape = [1 if rng.random() < 0.3 else n for n in full][int(rng.integers(0, rank - 1)) :]
        kind = rng.choice(["bool", dtype, "float32"])
        options["attn_mask"] = strided(rng, tuple(shape)) > -0.5 if kind == "bool" else strided(rng, tuple(shape), kind)
    if rng.random() < 0.3:
        options["window"] = (
            [None, int(rng.integers(0, keys))][rng.integers(2)],
            [None, int(rng.integers(0, keys))][rng.integers(2)],
        )
    sequences = int(np.prod(batch)) if rank > 2 else 1
    choice = rng.integers(4)
    if choice == 1:
        options["causal_offset"] = int(rng.integers(-3, 10))
    elif choice == 2:
        options["causal_offset"] = "bottom_right"
    elif choice == 3 and rank > 2:
        options["causal_offset"] = rng.integers(-3, 10, sequences)
    if rng.random() < 0.3:
        options["key_lengths"] = rng.integers(0, keys + 1, sequences) if rank > 2 else int(rng.integers(0, keys + 1))
        if rng.random() < 0.5:
            options["key_start"] = keys - np.max(options["key_lengths"])
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0, 1))

    out, lse = rapt.scaled_dot_product_attention(q, k, v, **options, enable_gqa=groups > 1, return_lse=True)
    expected, expected_lse = attention(q, k, v, **options)
    assert type(out) is np.ndarray and out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    close(out, expected, dtype)
    close(lse, expected_lse, dtype)
