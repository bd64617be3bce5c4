"""Random configurations of scaled_dot_product_attention: Rapt's, PyTorch's and the exact one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import rapt.torch
import records
import reordered
import torch
import torch.nn.functional as F
from exact import LONG, attention_gradients, attention_weights, errors, summed_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    """Shapes are those of the tensors; the mask's leading sizes are those of the query's rank."""

    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    mask_kind: str
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    layout: str
    magnitude: float
    grad: bool
    seed: int


@st.composite
def cases(draw: Any) -> Case:
    sizes = st.integers(1, 24)
    rank = draw(st.sampled_from([2, 3, 4, 4, 4, 4, 5]))
    lead = tuple(draw(st.integers(1, 3)) for _ in range(rank - 2))
    length, keys, width = draw(sizes), draw(sizes), draw(st.sampled_from([1, 2, 5, 8, 16, 32]))
    value_width = draw(st.sampled_from([width, width, 1, 3, 16]))
    grouped = rank > 2 and draw(st.booleans())
    q_lead, k_lead, v_lead = lead, lead, lead
    if grouped:
        q_lead = (*lead[:-1], lead[-1] * draw(st.integers(1, 3)))
    elif rank > 2 and draw(st.booleans()):
        q_lead, k_lead, v_lead = (tuple(draw(st.sampled_from([s, s, 1])) for s in lead) for _ in range(3))
    full = (*(q_lead if grouped else np.broadcast_shapes(q_lead, k_lead)), length, keys)  # PyTorch: of the scores
    dtype = draw(st.sampled_from(list(records.DTYPES)))
    mask_kind = draw(st.sampled_from(["none", "bool", "own", "own" if dtype == "f64" else "f32"]))
    mask = None
    if mask_kind != "none":
        shape = tuple(draw(st.sampled_from([s, s, 1])) for s in full)
        mask = shape[draw(st.integers(0, len(shape) - 2)) :]
    return Case(
        dtype=dtype,
        query=(*q_lead, length, width),
        key=(*k_lead, keys, width),
        value=(*v_lead, keys, value_width),
        mask=mask,
        mask_kind=mask_kind,
        is_causal=mask is None and draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.0, 0.25, 1.0, -0.5])),
        enable_gqa=grouped,
        layout=draw(st.sampled_from(["plain", "turned", "strided"])),
        magnitude=draw(st.sampled_from([1.0, 1.0, 0.1, 4.0])),
        grad=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 2**31)),
    )


def make(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> torch.Tensor:
    dtype = records.DTYPES[case.dtype]

    def numbers(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator, dtype=torch.float64) * case.magnitude).to(dtype)

    if case.layout == "turned" and len(shape) > 2:
        return numbers(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
    if case.layout == "strided":
        return numbers(*shape[:-1], 2 * shape[-1])[..., ::2]
    return numbers(*shape)


def make_mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask is None:
        return None
    if case.mask_kind == "bool":
        return torch.rand(case.mask, generator=generator) > 0.3
    dtype = torch.float32 if case.mask_kind == "f32" else records.DTYPES[case.dtype]
    mask = torch.randn(case.mask, generator=generator, dtype=torch.float64).to(dtype)
    return mask.masked_fill(torch.rand(case.mask, generator=generator) < 0.1, float("-inf"))


def exactly(case: Case, tensors: dict[str, torch.Tensor | None], d_out: torch.Tensor) -> tuple[Any, Any]:
    """Results, and the sizes of what they are sums of."""
    q, k, v = (records.long(tensors[n]) for n in ("query", "key", "value"))
    mask = tensors["mask"]
    groups = q.shape[-3] // k.shape[-3] if case.enable_gqa else 1
    bias = np.zeros((q.shape[-2], k.shape[-2]), LONG)
    if case.is_causal:
        bias = np.where(np.tri(*bias.shape, dtype=bool), bias, -np.inf)
    if mask is not None:
        bias = np.where(mask.numpy(), LONG(0), LONG(-np.inf)) if mask.dtype is torch.bool else records.long(mask)
    scale = 1 / np.sqrt(LONG(q.shape[-1])) if case.scale is None else LONG(case.scale)
    wide_k = np.repeat(k, groups, -3) if groups > 1 else k
    weights = attention_weights(q, wide_k, bias, scale)

    def results(sign: int, q: Any, k: Any, v: Any, scale: Any, d_out: Any) -> dict[str, Any]:
        wide_k, wide_v = (np.repeat(t, groups, -3) if groups > 1 else t for t in (k, v))
        found = {"out": weights @ wide_v}
        if case.grad:
            d_q, d_k, d_v, d_scores = attention_gradients(q, wide_k, wide_v, weights, scale, d_out, LONG(0), sign)
            if groups > 1:
                d_k, d_v = (d.reshape(*d.shape[:-3], -1, groups, *d.shape[-2:]).sum(-3) for d in (d_k, d_v))
            found.update(d_query=summed_to(d_q, q.shape), d_key=summed_to(d_k, k.shape))
            found["d_value"] = summed_to(d_v, v.shape)
            if mask is not None and mask.is_floating_point():
                found["d_mask"] = summed_to(d_scores, mask.shape)
        return found

    arguments = (q, k, v, scale, records.long(d_out))
    return results(1, *arguments), results(-1, *(np.abs(a) for a in arguments))


def computed(function: Any, case: Case, tensors: dict[str, torch.Tensor | None], d_out: Any) -> dict[str, Any]:
    used = {n: t.detach() for n, t in tensors.items() if t is not None}
    if case.grad:
        used = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in used.items()}
    out = function(
        used["query"], used["key"], used["value"], attn_mask=used.get("mask"), is_causal=case.is_causal,
        scale=case.scale, enable_gqa=case.enable_gqa,
    )  # fmt: skip
    if d_out is None:
        return {"out": out}
    result = {"out": out}
    if case.grad:
        wanted = {n: t for n, t in used.items() if t.requires_grad}
        grads = torch.autograd.grad(out, list(wanted.values()), d_out)
        result.update({f"d_{n}": g for n, g in zip(wanted, grads)})
    return {n: records.long(t) for n, t in result.items()}


def errors_of(case: Case) -> records.Errors:
    generator = torch.Generator().manual_seed(case.seed)
    tensors = {n: make(getattr(case, n), case, generator) for n in ("query", "key", "value")}
    tensors["mask"] = make_mask(case, generator)
    shape = computed(rapt.torch.scaled_dot_product_attention, case, tensors, None)["out"].shape
    d_out = torch.randn(shape, generator=generator, dtype=torch.float64).to(records.DTYPES[case.dtype])
    exact, sizes = exactly(case, tensors, d_out)
    assert exact["out"].shape == shape
    functions = (
        rapt.torch.scaled_dot_product_attention, F.scaled_dot_product_attention,
        reordered.scaled_dot_product_attention,
    )  # fmt: skip
    ours, theirs, again = (computed(f, case, tensors, d_out) for f in functions)
    assert {n: a.shape for n, a in ours.items()} == {n: a.shape for n, a in theirs.items()}
    return records.Errors(*(errors(r, exact, sizes) for r in (ours, theirs, again)))


records.errors_of["scaled_dot_product_attention"] = errors_of


@settings(
    max_examples=int(3200 * records.SCALE), deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(cases())
def test_scaled_dot_product_attention(case: Case) -> None:
    draws = [errors_of(replace(case, seed=seed)) for seed in records.seeds(case.seed)]
    records.record("scaled_dot_product_attention", case, draws)
