"""The errors of a sweep, and the table of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
BOUND = {"f32": 1e-5, "f64": 1e-13, "bf16": 8e-2, "f16": 1e-2}  # no configuration's error of Rapt's may exceed this,
TIMES = 4  # and this many of PyTorch's, which is what counts where scores are large
SCALE = float(os.environ.get("RAPT_PARITY_SCALE", "1"))  # of the number of configurations
DRAWS = 8  # of a configuration's numbers: the error of a single one has a long tail, and maxima would compare luck
FURTHEST, DRAWS_OF_FURTHEST = 2, 64  # configurations, by either side's errors, that are drawn anew for the maximum


class Errors(NamedTuple):
    """What each side is off by: Rapt, PyTorch, and PyTorch with its sums in another order."""

    rapt: Any
    torch: Any
    again: Any

    def ratio(self) -> float:
        """How many times PyTorch's Rapt's error is."""
        return float(self.rapt / self.torch)

    def noise(self) -> float:
        """How many times PyTorch's the one of the other order is."""
        return float(self.again / self.torch)


@dataclass
class Entry:
    """A configuration in a row of the table, with the errors of its draws, [draws, sides]."""

    case: Any
    draws: Any


@dataclass
class Row:
    """A line of the table."""

    function: str
    dtype: str
    kind: str
    count: int
    percentile: Errors  # the 99th of all draws
    maximum: Errors  # of the means over many new draws of the configurations that are furthest off
    largest: Errors  # of a single draw
    worst: Entry  # the configuration of Rapt's maximum


_entries: dict[tuple[str, str, str], list[Entry]] = defaultdict(list)
configurations: dict[str, int] = defaultdict(int)
errors_of: dict[str, Callable[[Any], Errors]] = {}  # one draw of a configuration, by the function that it calls


def long(tensor: torch.Tensor) -> Any:
    """A tensor as an array of the longest type."""
    return tensor.detach().double().numpy().astype(np.longdouble)


def seeds(seed: int, first: int = 0, count: int = DRAWS) -> list[int]:
    """One for each draw of a configuration; all even, or all odd."""
    return [seed + 1_000_002 * i for i in range(first, first + count)]


def kind_of(name: str) -> str:
    """Which row of the table a result belongs to."""
    return "gradients" if name.startswith("d_") else "weights" if name == "weights" else "output"


def without_nan(draws: list[Errors]) -> list[Errors]:
    """Those without a NaN of PyTorch's."""
    return [draw for draw in draws if all(np.isfinite(e) for e in draw.torch.values())]


def worst_of(kind: str, draws: list[Errors]) -> Any:
    """The worst of a kind of result, [draws, sides]."""
    return np.array([[max(e for n, e in side.items() if kind_of(n) == kind) for side in draw] for draw in draws])


def record(function: str, case: Any, draws: list[Errors]) -> None:
    """Takes a configuration into the table, with the mean of its draws, and judges Rapt's errors.

    Each draw has the sides' errors by the names of results. Those with a NaN of PyTorch's are judged, but not taken.
    """
    configurations[function] += 1
    usable = without_nan(draws)
    for name in draws[0].rapt:
        error = np.mean([draw.rapt[name] for draw in draws])
        theirs = np.mean([draw.torch[name] for draw in usable]) if usable else 0.0
        bound = max(BOUND[case.dtype], TIMES * theirs)
        assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g} (PyTorch's: {theirs:.3g})"
    if not usable:
        return
    for kind in {kind_of(name) for name in draws[0].rapt}:
        _entries[function, case.dtype, kind].append(Entry(case, worst_of(kind, usable)))


def furthest(function: str, kind: str, entries: list[Entry]) -> list[Entry]:
    """The configurations that are furthest off, drawn anew: those that were found by luck are not so far off then."""
    means = np.array([entry.draws.mean(0) for entry in entries])
    found = {int(i) for side in range(means.shape[1]) for i in np.argsort(means[:, side])[-FURTHEST:]}
    drawn = []
    for case in (entries[i].case for i in sorted(found)):
        new = [errors_of[function](replace(case, seed=s)) for s in seeds(case.seed, DRAWS, DRAWS_OF_FURTHEST)]
        if usable := without_nan(new):
            drawn.append(Entry(case, worst_of(kind, usable)))
    return drawn


@cache
def rows() -> list[Row]:
    """The table, after the last configuration."""
    result = []
    for (function, dtype, kind), entries in sorted(_entries.items()):
        pool = np.concatenate([entry.draws for entry in entries])
        drawn = furthest(function, kind, entries)
        maximum = np.max([entry.draws.mean(0) for entry in drawn], 0)
        sides = (Errors(*e) for e in (np.percentile(pool, 99, axis=0), maximum, pool.max(0)))
        worst = max(drawn, key=lambda entry: float(entry.draws[:, 0].mean()))
        result.append(Row(function, dtype, kind, len(entries), *sides, worst))
    return result


def table() -> str:
    """The rows in Markdown."""
    lines = [
        "| function | dtype | | configurations | 99%: Rapt | PyTorch | ratio | reordered | maximum: Rapt | PyTorch "
        "| ratio | reordered | one draw: Rapt | PyTorch |",
        "|---|---|---|" + "---:|" * 11,
    ]
    for row in rows():
        cells = [f"`{row.function}`", row.dtype, row.kind, str(row.count)]
        for e in (row.percentile, row.maximum):
            cells += [f"{e.rapt:.2e}", f"{e.torch:.2e}", f"{e.ratio():.2f}", f"{e.noise():.2f}"]
        cells += [f"{row.largest.rapt:.2e}", f"{row.largest.torch:.2e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def worst() -> str:
    """The configuration behind Rapt's maximum in each row, to repeat it."""
    lines = []
    for row in rows():
        ours, theirs, _ = row.worst.draws.mean(0)
        lines.append(f"{row.dtype} {row.kind}: {ours:.2e} (PyTorch {theirs:.2e}), {row.function}, {row.worst.case}")
    return "\n".join(lines)
