"""Random configurations of multi_head_attention_forward: Rapt's, PyTorch's and the exact one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import rapt.torch
import records
import reordered
import torch
import torch.nn.functional as F
from exact import LONG, attention_gradients, attention_weights, errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    """One call; masks are "none", "bool" or "numbers", and attn_mask of two or three dimensions."""

    dtype: str
    heads: int
    width: int
    batch: int  # 0: without one
    length: int
    keys: int
    same: bool
    kdim: int
    vdim: int
    separate: bool
    bias: bool
    bias_kv: bool
    zero_attn: bool
    static: bool
    mask: str
    mask_dims: int
    padding: str
    is_causal: bool
    weights: str
    turned: bool
    grad: bool
    seed: int


@st.composite
def cases(draw: Any) -> Case:
    yes = st.booleans()
    heads, width = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 8, 16]))
    length = draw(st.integers(1, 12))
    same = draw(yes)
    separate = draw(yes)
    static = draw(st.sampled_from([False, False, False, True]))
    sizes = st.sampled_from([heads * width, 5, 24])
    mask = draw(st.sampled_from(["none", "bool", "numbers"]))
    dims = draw(st.sampled_from([2, 3]))
    bias_kv, zero_attn = not static and draw(yes), draw(yes)
    return Case(
        dtype=draw(st.sampled_from(list(records.DTYPES))),
        heads=heads,
        width=width,
        batch=draw(st.integers(0, 3)),
        length=length,
        keys=length if same else draw(st.integers(1, 12)),
        same=same,
        kdim=draw(sizes) if separate and not same else heads * width,
        vdim=draw(sizes) if separate and not same else heads * width,
        separate=separate,
        bias=draw(yes),
        bias_kv=bias_kv,
        zero_attn=zero_attn,
        static=static,
        mask=mask,
        mask_dims=dims,
        padding=draw(st.sampled_from(["none", "bool", "numbers"])),
        # PyTorch takes the hint for the mask, and hides the keys that the layer adds as well
        is_causal=mask == "bool" and dims == 2 and not bias_kv and not zero_attn and draw(yes),
        weights=draw(st.sampled_from(["none", "mean", "heads"])),
        turned=draw(yes),
        grad=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 2**31)),
    )


class Numbers:
    """Draws tensors of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64) * size
        return numbers.to(records.DTYPES[self.case.dtype])

    def input(self, *shape: int) -> torch.Tensor:
        if self.case.turned and len(shape) == 3:
            return self.normal(shape[1], shape[0], shape[2]).transpose(0, 1)
        return self.normal(*shape)

    def mask(self, kind: str, *shape: int) -> torch.Tensor | None:
        if kind == "none":
            return None
        hidden = torch.rand(shape, generator=self.generator) < 0.2
        return hidden if kind == "bool" else self.normal(*shape).masked_fill(hidden, float("-inf"))


def make(case: Case) -> dict[str, torch.Tensor]:
    """The tensors of the call, under its names."""
    numbers = Numbers(case)
    e, lead = case.heads * case.width, (case.batch,) if case.batch else ()
    spread = e**-0.5
    t: dict[str, torch.Tensor | None] = {"query": numbers.input(case.length, *lead, e)}
    t["key"] = t["query"] if case.same else numbers.input(case.keys, *lead, case.kdim)
    shared = case.same or (case.kdim == case.vdim and not case.separate and case.seed % 2)
    t["value"] = t["key"] if shared else numbers.input(case.keys, *lead, case.vdim)
    if case.separate:
        for name, size in (("q", e), ("k", case.kdim), ("v", case.vdim)):
            t[f"{name}_proj_weight"] = numbers.normal(e, size, size=size**-0.5)
    else:
        t["in_proj_weight"] = numbers.normal(3 * e, e, size=spread)
    t["in_proj_bias"] = numbers.normal(3 * e) if case.bias else None
    t["out_proj_weight"] = numbers.normal(e, e, size=spread)
    t["out_proj_bias"] = numbers.normal(e) if case.bias else None
    if case.bias_kv:
        t["bias_k"], t["bias_v"] = numbers.normal(1, 1, e), numbers.normal(1, 1, e)
    n = max(case.batch, 1)
    if case.static:
        t["static_k"], t["static_v"] = (numbers.normal(n * case.heads, case.keys, case.width) for _ in "kv")
    three = (n * case.heads,) if case.mask_dims == 3 else ()
    t["attn_mask"] = numbers.mask(case.mask, *three, case.length, case.keys)
    if case.is_causal:
        t["attn_mask"] = torch.ones(case.length, case.keys, dtype=torch.bool).triu(1)
    t["key_padding_mask"] = numbers.mask(case.padding, *lead, case.keys)
    return {name: tensor for name, tensor in t.items() if tensor is not None}


def computed(function: Any, case: Case, tensors: dict[str, torch.Tensor], rng: int) -> dict[str, Any]:
    """Output, weights and gradients; those of the results themselves under "of_out" and "of_weights"."""
    once = {id(t): t.detach() for t in tensors.values()}  # a tensor that is given twice stays one
    if case.grad:
        once = {i: t.requires_grad_() if t.is_floating_point() else t for i, t in once.items()}
    used = {name: once[id(t)] for name, t in tensors.items()}
    given_ = dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about masks of two types
        out, weights = function(
            **{**given_, **used}, embed_dim_to_check=case.heads * case.width, num_heads=case.heads,
            # two ways to ask for none: what is dropped is each generator's own, and is not compared
            add_zero_attn=case.zero_attn, dropout_p=0.4 * (case.seed % 2), training=case.seed % 2 == 0,
            need_weights=case.weights != "none",
            average_attn_weights=case.weights == "mean", use_separate_proj_weight=case.separate,
            is_causal=case.is_causal,
        )  # fmt: skip
    result = {"out": out} if weights is None else {"out": out, "weights": weights}
    generator = torch.Generator().manual_seed(rng)
    given = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for n, t in result.items()}
    wanted = {name: t for name, t in used.items() if t.requires_grad}
    distinct = {id(t): name for name, t in reversed(wanted.items())}
    if case.grad:
        names = [n for n in wanted if distinct[id(wanted[n])] == n]
        grads = torch.autograd.grad(
            list(result.values()), [wanted[n] for n in names], list(given.values()), allow_unused=True
        )  # fmt: skip
        result.update({f"d_{n}": g for n, g in zip(names, grads) if g is not None})
    arrays = {n: records.long(t) for n, t in result.items()}
    return {**arrays, **{f"of_{n}": records.long(t) for n, t in given.items()}}


# ---- exactly ----


def split(array: Any, heads: int) -> Any:
    """[L, N, E] as [N, H, L, D]."""
    return array.reshape(*array.shape[:2], heads, -1).transpose(1, 2, 0, 3)


def merge(array: Any) -> Any:
    """The other way around."""
    return array.transpose(2, 0, 1, 3).reshape(array.shape[2], array.shape[0], -1)


def weight_gradient(d_out: Any, x: Any) -> Any:
    """Of a matrix that was applied to every token."""
    return d_out.reshape(-1, d_out.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class Exact:
    """The layer on arrays; `weights` are given in the pass that adds up sizes, since those have no softmax."""

    def __init__(self, case: Case, arrays: dict[str, Any], bias: Any, weights: Any = None) -> None:
        self.case, self.a = case, arrays
        e, h = case.heads * case.width, case.heads
        fused = arrays.get("in_proj_weight")
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        self.matrices = [arrays[n] for n in names] if fused is None else [fused[i * e : i * e + e] for i in range(3)]
        shift = arrays.get("in_proj_bias", np.zeros(3 * e, LONG))
        self.x = [a[:, None] if a.ndim == 2 else a for a in (arrays["query"], arrays["key"], arrays["value"])]
        projected = (x @ m.T + shift[i * e : i * e + e] for i, (x, m) in enumerate(zip(self.x, self.matrices)))
        self.q, self.k, self.v = (split(p, h) for p in projected)
        n = self.q.shape[0]
        if case.static:
            self.k, self.v = (arrays[s].reshape(n, h, case.keys, -1) for s in ("static_k", "static_v"))
        for used, extra in ((case.bias_kv, ("bias_k", "bias_v")), (case.zero_attn, (None, None))):
            if used:
                rows = [(arrays[s] if s else np.zeros(e, LONG)).reshape(1, h, 1, -1) for s in extra]
                rows = [np.broadcast_to(r, (n, h, 1, case.width)) for r in rows]
                self.k, self.v = (np.concatenate([t, r], 2) for t, r in zip((self.k, self.v), rows))
        self.scale = 1 / np.sqrt(LONG(case.width))
        self.weights = attention_weights(self.q, self.k, bias, self.scale) if weights is None else weights
        self.attended = merge(self.weights @ self.v)

    def results(self, sign: int, d_out: Any, d_weights: Any) -> dict[str, Any]:
        """All results; sign -1: nothing cancels."""
        case, a = self.case, self.a
        lonely = case.batch == 0
        out = self.attended @ a["out_proj_weight"].T + a.get("out_proj_bias", LONG(0))
        found = {"out": out[:, 0] if lonely else out}
        if case.weights != "none":
            shown = self.weights.mean(1) if case.weights == "mean" else self.weights
            found["weights"] = shown[0] if lonely else shown
        if not case.grad:
            return found
        d_out = d_out[:, None] if lonely else d_out
        d_p = LONG(0)
        if case.weights != "none":
            d_p = d_weights[None] if lonely else d_weights
            d_p = d_p[:, None] / case.heads if case.weights == "mean" else d_p
        d_attended = split(d_out @ a["out_proj_weight"], case.heads)
        d_q, d_k, d_v, d_scores = attention_gradients(
            self.q, self.k, self.v, self.weights, self.scale, d_attended, d_p, sign
        )  # fmt: skip
        keys = case.keys
        d_bias = d_out.sum((0, 1))
        found.update(d_out_proj_weight=weight_gradient(d_out, self.attended), d_out_proj_bias=d_bias)
        found.update(d_bias_k=merge(d_k.sum(0, keepdims=True))[keys : keys + 1])
        found.update(d_bias_v=merge(d_v.sum(0, keepdims=True))[keys : keys + 1])
        flat = d_scores[..., :keys]
        found["d_key_padding_mask"] = flat.sum((1, 2))[0] if lonely else flat.sum((1, 2))
        found["d_attn_mask"] = flat.sum((0, 1)) if case.mask_dims == 2 else flat.reshape(-1, *flat.shape[2:])
        if case.static:
            found["d_static_k"], found["d_static_v"] = (
                d[:, :, :keys].reshape(-1, keys, case.width) for d in (d_k, d_v)
            )
        zero = np.zeros_like(self.x[1][..., :1]) * np.zeros(case.heads * case.width, LONG)
        rows = [merge(d_q), *((zero, zero) if case.static else (merge(d[:, :, :keys]) for d in (d_k, d_v)))]
        found["d_in_proj_bias"] = np.concatenate([r.sum((0, 1)) for r in rows])
        grads = [weight_gradient(r, x) for r, x in zip(rows, self.x)]
        found.update(zip(("d_q_proj_weight", "d_k_proj_weight", "d_v_proj_weight"), grads))
        if not case.separate:
            found["d_in_proj_weight"] = np.concatenate(grads)
        inputs = [r @ m for r, m in zip(rows, self.matrices)]
        if case.same:
            inputs[0] = sum(inputs)
        elif a["key"] is a["value"]:
            inputs[1] = inputs[1] + inputs[2]
        inputs = [i[:, 0] if lonely else i for i in inputs]
        found.update(zip(("d_query", "d_key", "d_value"), inputs))
        return found


def exactly(case: Case, tensors: dict[str, torch.Tensor], ours: dict[str, Any]) -> tuple[Any, Any]:
    """Results, and the sizes of what they are sums of."""
    once = {id(t): records.long(t) for t in tensors.values() if t.is_floating_point()}
    arrays = {name: once[id(t)] for name, t in tensors.items() if t.is_floating_point()}
    n, extra = max(case.batch, 1), case.bias_kv + case.zero_attn
    bias = np.zeros((n, case.heads, case.length, case.keys), LONG)
    for name in ("attn_mask", "key_padding_mask"):
        if name in tensors:
            t = tensors[name]
            mask = np.where(t.numpy(), LONG(-np.inf), LONG(0)) if t.dtype is torch.bool else arrays[name]
            if name == "attn_mask" and mask.ndim == 3:
                bias = bias + mask.reshape(n, case.heads, *mask.shape[1:])
            else:
                bias = bias + (mask if name == "attn_mask" else mask.reshape(n, 1, 1, -1))
    bias = np.pad(bias, ((0, 0),) * 3 + ((0, extra),))
    exact = Exact(case, arrays, bias)
    positive = {i: np.abs(a) for i, a in once.items()}
    sizes = Exact(case, {name: positive[id(tensors[name])] for name in arrays}, bias, exact.weights)
    d_out, d_weights = ours["of_out"], ours.get("of_weights", LONG(0))
    return exact.results(1, d_out, d_weights), sizes.results(-1, np.abs(d_out), np.abs(d_weights))


def errors_of(case: Case) -> records.Errors:
    tensors = make(case)
    functions = (
        rapt.torch.multi_head_attention_forward, F.multi_head_attention_forward,
        reordered.multi_head_attention_forward,
    )  # fmt: skip
    ours, theirs, again = (computed(f, case, tensors, case.seed) for f in functions)
    assert {n: a.shape for n, a in ours.items()} == {n: a.shape for n, a in theirs.items()}
    exact, sizes = exactly(case, tensors, ours)
    named = ({n: a for n, a in r.items() if not n.startswith("of_")} for r in (ours, theirs, again))
    return records.Errors(*(errors(r, exact, sizes) for r in named))


records.errors_of["multi_head_attention_forward"] = errors_of


@settings(
    max_examples=int(1600 * records.SCALE), deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(cases())
def test_multi_head_attention_forward(case: Case) -> None:
    draws = [errors_of(replace(case, seed=seed)) for seed in records.seeds(case.seed)]
    records.record("multi_head_attention_forward", case, draws)
