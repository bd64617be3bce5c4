"""Measures how far PyTorch's results are from exact ones, for test_accuracy.c: writes accuracy.txt.

    pip install torch==2.15.0 numpy
    python make_accuracy.py            write accuracy.txt beside this script

Rapt promises errors not larger than PyTorch's in the same dtype. The test that shows it must not need PyTorch, so
PyTorch's errors are stored, and both sides draw the same inputs from a seed: splitmix64, as in tests/support.c.

PyTorch computes on the CPU with one thread. Exact means NumPy's long double (64 bits of mantissa or more), computed
from the very inputs that the dtype holds. An error is |PyTorch - exact| / largest |exact| of the case; the 99th
percentile is the smallest error that at least 99 in 100 do not exceed.

accuracy.txt has comments (#), a line for each case:

    NAME DTYPE KIND N H L S WIDTH CAUSAL SEED LARGEST P99 MAX

with KIND operator (WIDTH is D, queries and keys and values [N,H,length,D]) or layer (WIDTH is E, self-attention
[N,L,E], L = S), LARGEST the largest |exact|, and P99 and MAX PyTorch's errors; then a line for each dtype:

    pooled DTYPE P99 MAX

over all elements of all its cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
TORCH_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
Wide = np.longdouble


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    kind: str
    n: int
    heads: int
    l: int
    s: int
    width: int
    causal: bool = False


def operator(name: str, dtype: str, heads: int, l: int, s: int, width: int, causal: bool = False) -> Case:
    return Case(name, dtype, "operator", 1, heads, l, s, width, causal)


def layer(name: str, dtype: str, width: int, heads: int, n: int, l: int) -> Case:
    return Case(name, dtype, "layer", n, heads, l, l, width)


CASES = [
    operator("square", "f32", 4, 256, 256, 64),
    operator("causal", "f32", 4, 256, 256, 64, causal=True),
    operator("many_keys", "f32", 1, 64, 2048, 64),
    operator("width_128", "f32", 4, 128, 128, 128),
    operator("width_320", "f32", 4, 33, 70, 320),
    operator("width_16", "f32", 4, 200, 200, 16),
    operator("decode", "f32", 8, 1, 4096, 128),
    layer("layer_512", "f32", 512, 8, 2, 64),
    layer("layer_1024", "f32", 1024, 16, 1, 40),
    layer("layer_64", "f32", 64, 4, 2, 20),
    layer("tokens_1024", "f32", 1024, 16, 4, 1),
    operator("square", "f64", 4, 256, 256, 64),
    layer("layer_256", "f64", 256, 8, 2, 48),
    operator("square", "bf16", 4, 256, 256, 64),
    layer("layer_512", "bf16", 512, 8, 2, 64),
    operator("square", "f16", 4, 256, 256, 64),
    layer("layer_512", "f16", 512, 8, 2, 64),
]


# ---------------------------------------------------------------------------------------------- drawing


class Random:
    """splitmix64, many numbers at once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drawn = 0

    def uniform(self, magnitude: float, *shape: int) -> np.ndarray:
        """float64 within `magnitude` of 0, drawn in row-major order, as fill_random draws."""
        count = math.prod(shape)
        steps = np.arange(self.drawn + 1, self.drawn + 1 + count, dtype=np.uint64)
        self.drawn += count
        z = np.uint64(self.seed) + steps * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        unit = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return (magnitude * (2 * unit - 1)).reshape(shape)


def stored(values: np.ndarray, dtype: str) -> Tensor:
    """What set_element of tests/support.c stores for them: 16-bit numbers by cutting off the rest of the mantissa."""
    if dtype == "f64":
        return torch.from_numpy(values)
    narrow = values.astype(np.float32)
    if dtype == "f32":
        return torch.from_numpy(narrow)
    bits = narrow.view(np.uint32)
    if dtype == "bf16":
        half = bits >> 16
    else:
        exponent = ((bits >> 23) & 255).astype(np.int64) - 112
        assert exponent.max() < 31
        normal = (exponent.clip(0) << 10).astype(np.uint32) | ((bits >> 13) & 1023)
        half = ((bits >> 16) & 0x8000) | np.where(exponent > 0, normal, 0)
    return torch.from_numpy(half.astype(np.uint16).view(np.int16)).view(TORCH_DTYPES[dtype])


def draw(case: Case, seed: int) -> list[Tensor]:
    """Inputs of about unit variance, so that scores are too; in this order, which test_accuracy.c keeps."""
    random = Random(seed)
    if case.kind == "operator":
        shapes = [(case.n, case.heads, length, case.width) for length in (case.l, case.s, case.s)]
        values = [random.uniform(1.75, *shape) for shape in shapes]
    else:
        e, of_weight = case.width, math.sqrt(3.0 / case.width)
        values = [
            random.uniform(1.75, case.n, case.l, e),  # tokens
            random.uniform(of_weight, 3 * e, e),  # in_proj_weight
            random.uniform(0.5, 3 * e),  # in_proj_bias
            random.uniform(of_weight, e, e),  # out_proj.weight
            random.uniform(0.5, e),  # out_proj.bias
        ]
    return [stored(v, case.dtype) for v in values]


# ---------------------------------------------------------------------------------------------- computing


def forward_by_torch(case: Case, tensors: list[Tensor]) -> Tensor:
    if case.kind == "operator":
        query, key, value = tensors
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)
    tokens, in_weight, in_bias, out_weight, out_bias = tensors
    x = tokens.transpose(0, 1)
    out, _ = F.multi_head_attention_forward(x, x, x, case.width, case.heads, in_weight, in_bias, None, None, False,
                                            0.0, out_weight, out_bias, training=False, need_weights=False)
    return out.transpose(0, 1)


def attend(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(Wide(query.shape[-1]))
    if case.causal:
        scores[..., np.triu(np.ones((case.l, case.s), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ value / weights.sum(-1, keepdims=True)


def forward_exactly(case: Case, tensors: list[Tensor]) -> np.ndarray:
    arrays = [t.to(torch.float64).numpy().astype(Wide) for t in tensors]
    if case.kind == "operator":
        return attend(case, *arrays)
    tokens, in_weight, in_bias, out_weight, out_bias = arrays
    projected = (tokens @ in_weight.T + in_bias).reshape(case.n, case.l, 3, case.heads, -1)
    query, key, value = projected.transpose(2, 0, 3, 1, 4)
    joined = attend(case, query, key, value).swapaxes(1, 2).reshape(tokens.shape)
    return joined @ out_weight.T + out_bias


# ---------------------------------------------------------------------------------------------- measuring


def percentile_99(errors: np.ndarray) -> float:
    return float(np.sort(errors)[math.ceil(errors.size * 99 / 100) - 1])


def main() -> None:
    if np.finfo(Wide).nmant < 63:
        raise SystemExit("NumPy's long double has no more bits than a double here")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lines = [
        f"# errors of PyTorch {torch.__version__.split('+')[0]} on the CPU (one thread,"
        f" {torch.backends.cpu.get_cpu_capability()}) against long double; made by make_accuracy.py, which explains",
        "# name dtype kind N H L S width causal seed largest p99 max",
    ]
    pools: dict[str, list[np.ndarray]] = {}
    for seed, case in enumerate(CASES, start=1):
        tensors = draw(case, seed)
        expected = forward_exactly(case, tensors)
        actual = forward_by_torch(case, tensors).to(torch.float64).numpy().astype(Wide)
        largest = np.abs(expected).max()
        errors = (np.abs(actual - expected) / largest).astype(np.float64).ravel()
        pools.setdefault(case.dtype, []).append(errors)
        lines.append(f"{case.name} {case.dtype} {case.kind} {case.n} {case.heads} {case.l} {case.s} {case.width}"
                     f" {int(case.causal)} {seed} {float(largest):.15e} {percentile_99(errors):.6e} {errors.max():.6e}")
    for dtype, parts in pools.items():
        errors = np.concatenate(parts)
        lines.append(f"pooled {dtype} {percentile_99(errors):.6e} {errors.max():.6e}")
    (HERE / "accuracy.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
