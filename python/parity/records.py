"""The errors of a sweep, and the table of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
BOUND = {"f32": 1e-5, "f64": 1e-13, "bf16": 8e-2, "f16": 1e-2}  # no single error of Rapt's may exceed this,
TIMES = 4  # and this many of PyTorch's, which is what counts where scores are large
SCALE = float(os.environ.get("RAPT_PARITY_SCALE", "1"))  # of the number of configurations

_errors: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
configurations: dict[str, int] = defaultdict(int)


def long(tensor: torch.Tensor) -> Any:
    """A tensor as an array of the longest type."""
    return tensor.detach().double().numpy().astype(np.longdouble)


def kind_of(name: str) -> str:
    """Which row of the table a result belongs to."""
    return "gradients" if name.startswith("d_") else "weights" if name == "weights" else "output"


def record(function: str, dtype: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Takes the errors of one configuration into the table, unless PyTorch's result is NaN, and judges Rapt's."""
    configurations[function] += 1
    for name, error in ours.items():
        bound = max(BOUND[dtype], TIMES * theirs[name] if np.isfinite(theirs[name]) else 0.0)
        assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g} (PyTorch's: {theirs[name]:.3g})"
    if not all(np.isfinite(e) for e in theirs.values()):
        return
    kinds = {kind_of(name) for name in ours}
    for kind in kinds:
        names = [name for name in ours if kind_of(name) == kind]
        _errors[function, dtype, kind].append((max(ours[n] for n in names), max(theirs[n] for n in names)))


def rows() -> list[tuple[str, str, str, int, float, float, float, float]]:
    """function, dtype, kind, configurations, then 99th percentile and maximum of Rapt's and of PyTorch's errors."""
    result = []
    for (function, dtype, kind), pairs in sorted(_errors.items()):
        ours, theirs = np.array(pairs).T
        a, b = (np.percentile(e, 99) for e in (ours, theirs))
        result.append((function, dtype, kind, len(pairs), a, b, ours.max(), theirs.max()))
    return result


def table(marked: Collection[tuple[str, str, str]] = ()) -> str:
    """The rows in Markdown; some have a star."""
    lines = [
        "| function | dtype | | configurations | 99%, Rapt | 99%, PyTorch | maximum, Rapt | maximum, PyTorch |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for function, dtype, kind, count, *numbers in rows():
        cells = " | ".join(f"{n:.2e}" for n in numbers)
        star = " *" if (function, dtype, kind) in marked else ""
        lines.append(f"| `{function}` | {dtype} | {kind}{star} | {count} | {cells} |")
    return "\n".join(lines)
