"""Writes optimizer.txt: what PyTorch's SGD and AdamW make of three small tensors in 100 steps, for test_optimizer.c.

    pip install torch==2.15.0 numpy
    python make_optimizer.py           write optimizer.txt beside this script

Both sides draw the same parameters and gradients from a seed: splitmix64, as in tests/support.c, rounded to float32. The
tensors' shapes are [3,4], [5] and [1], and their gradients are of the sizes 1, 2^-10 and 2^-27, so that epsilon matters.

PyTorch's numbers are those in float64. In float32 it rounds the settings, too (0.99999 to 24 bits), which adds up over
the steps; how far that takes it from float64 is stored, for Rapt not to be further away.

optimizer.txt has comments (#) and, for each case, a line

    case NAME KIND LEARNING_RATE WEIGHT_DECAY MOMENTUM DAMPENING NESTEROV BETA1 BETA2 EPSILON RATE_AT_50 MAX_NORM

(the learning rate becomes RATE_AT_50 after 50 steps; with MAX_NORM above 0 gradients are clipped before each step) and,
after steps 1, 2, 10 and 100, lines

    norm STEP ERROR NUMBER                   the norm before clipping, where there is clipping
    parameter STEP ERROR 18 NUMBERS          all tensors in a row
    momentum_buffer STEP ERROR 18 NUMBERS    likewise for each state, by PyTorch's name

with numbers as C's %a writes them. ERROR is the largest |float32 - float64|, for states divided by the larger of the size of
the tensor's gradients (for exp_avg_sq its square) and the largest magnitude in the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
SHAPES = [(3, 4), (5,), (1,)]
GRADIENT_SIZES = [1.0, 2.0**-10, 2.0**-27]
STEPS = 100
SHOWN = [1, 2, 10, 100]
SEED = 11


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    rate_at_50: float = 0.0
    max_norm: float = 0.0


CASES = [
    Case("plain", "sgd", learning_rate=0.01),
    Case("decay", "sgd", learning_rate=0.01, weight_decay=0.1),
    Case("momentum", "sgd", learning_rate=0.01, momentum=0.9),
    Case("dampened", "sgd", learning_rate=0.01, momentum=0.9, dampening=0.3, weight_decay=0.05),
    Case("nesterov", "sgd", learning_rate=0.01, momentum=0.9, nesterov=True, weight_decay=0.05, rate_at_50=0.002),
    Case("default", "adamw", weight_decay=0.01),
    Case("large", "adamw", learning_rate=0.05, weight_decay=0.3, beta1=0.8, beta2=0.95, rate_at_50=0.01),
    Case("no_decay", "adamw", learning_rate=0.01, beta1=0.0, beta2=0.5, epsilon=1e-3),
    Case("clipped", "adamw", learning_rate=0.01, weight_decay=0.01, max_norm=1.5),
    Case("clipped", "sgd", learning_rate=0.05, momentum=0.9, max_norm=1.5),
]


class Draw:
    def __init__(self, seed: int) -> None:
        self.state = seed

    def unit(self) -> float:
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def tensor(self, shape: tuple[int, ...], size: float, dtype: torch.dtype) -> torch.Tensor:
        numbers = [np.float32(size * (2 * self.unit() - 1)) for _ in range(int(np.prod(shape)))]
        return torch.tensor(np.array(numbers).reshape(shape), dtype=dtype)


def make(case: Case, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if case.kind == "sgd":
        return torch.optim.SGD(parameters, lr=case.learning_rate, momentum=case.momentum, dampening=case.dampening,
                               weight_decay=case.weight_decay, nesterov=case.nesterov)
    return torch.optim.AdamW(parameters, lr=case.learning_rate, betas=(case.beta1, case.beta2), eps=case.epsilon,
                             weight_decay=case.weight_decay)


def states(case: Case) -> list[str]:
    if case.kind == "adamw":
        return ["exp_avg", "exp_avg_sq"]
    return ["momentum_buffer"] if case.momentum else []


Shown = dict[tuple[str, int], list[torch.Tensor]]


def run(case: Case, dtype: torch.dtype) -> Shown:
    draw = Draw(SEED)
    parameters = [draw.tensor(shape, 1.0, dtype).requires_grad_() for shape in SHAPES]
    optimizer = make(case, parameters)
    shown: Shown = {}
    for step in range(1, STEPS + 1):
        for parameter, size in zip(parameters, GRADIENT_SIZES):
            parameter.grad = draw.tensor(tuple(parameter.shape), size, dtype)
        if case.max_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(parameters, case.max_norm)
            if step in SHOWN:
                shown["norm", step] = [norm]
        optimizer.step()
        if step == STEPS // 2 and case.rate_at_50 > 0:
            for group in optimizer.param_groups:
                group["lr"] = case.rate_at_50
        if step in SHOWN:
            shown["parameter", step] = [p.detach().clone() for p in parameters]
            for state in states(case):
                shown[state, step] = [optimizer.state[p][state].clone() for p in parameters]
    return shown


def error(word: str, narrow: list[torch.Tensor], wide: list[torch.Tensor]) -> float:
    largest = 0.0
    for a, b, size in zip(narrow, wide, GRADIENT_SIZES):
        measure = max(size**2 if word == "exp_avg_sq" else size, float(b.abs().max()))
        difference = float((a.double() - b).abs().max())
        largest = max(largest, difference / (1.0 if word in ("parameter", "norm") else measure))
    return largest


def lines_of(case: Case) -> list[str]:
    settings = [case.learning_rate, case.weight_decay, case.momentum, case.dampening, case.nesterov, case.beta1,
                case.beta2, case.epsilon, case.rate_at_50, case.max_norm]
    lines = [" ".join(["case", case.name, case.kind, *(float(x).hex() for x in settings)])]
    narrow, wide = run(case, torch.float32), run(case, torch.float64)
    for (word, step), tensors in wide.items():
        numbers = [error(word, narrow[word, step], tensors), *(float(x) for t in tensors for x in t.flatten())]
        lines.append(" ".join([word, str(step), *(x.hex() for x in numbers)]))
    return lines


def main() -> None:
    lines = [f"# made by make_optimizer.py with torch {torch.__version__.split('+')[0]}"]
    for case in CASES:
        lines += lines_of(case)
    (HERE / "optimizer.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
