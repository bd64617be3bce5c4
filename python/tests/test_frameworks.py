"""Arrays of PyTorch and JAX, where they are installed."""

from __future__ import annotations

import numpy as np
import pytest
import rapt

X = np.random.default_rng(0).standard_normal((3, 2, 4, 7, 8)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch.from_numpy(X).to(getattr(torch, dtype))
    reference = torch.nn.functional.scaled_dot_product_attention
    mask = torch.rand(4, 7, 7) > 0.3
    mask[..., 0] = True
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.randn(7, 7).to(q.dtype)}):
        out, lse = rapt.scaled_dot_product_attention(q, k, v, **options, return_lse=True)
        assert isinstance(out, torch.Tensor) and out.dtype == q.dtype
        assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        in_double = {name: o.double() if name == "attn_mask" and o is not mask else o for name, o in options.items()}
        expected = reference(q.double(), k.double(), v.double(), **in_double)
        tolerance = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 3e-2, "float16": 3e-3}[dtype]
        assert (out.double() - expected).abs().max() < tolerance


def test_torch_layer() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=True).eval()
    ours = rapt.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 24)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        expected, expected_weights = theirs(x, x, x, key_padding_mask=padding)
    out, weights = ours(x, x, x, key_padding_mask=padding)
    assert isinstance(out, torch.Tensor) and isinstance(weights, torch.Tensor)
    assert (out - expected).abs().max() < 2e-6 and (weights - expected_weights).abs().max() < 2e-6
    state = rapt.State()
    ours(x, x, x, key_padding_mask=padding, state=state)
    gradients = ours.backward(state, torch.ones_like(x))
    leaf = x.clone().requires_grad_()
    theirs(leaf, leaf, leaf, key_padding_mask=padding)[0].sum().backward()
    assert isinstance(gradients["query"], torch.Tensor)
    assert (gradients["query"] - leaf.grad).abs().max() < 1e-5
    assert np.abs(gradients["in_proj_weight"] - theirs.in_proj_weight.grad.numpy()).max() < 1e-4


def test_torch_tensors_that_are_more_than_memory() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch.from_numpy(X)
    with pytest.raises(TypeError, match=r"rapt\.torch"):
        rapt.scaled_dot_product_attention(q, k.clone().requires_grad_(), v)
    with pytest.raises(TypeError, match="resolve_neg"):
        rapt.scaled_dot_product_attention(q, k, torch.complex(v, v).conj().imag)
    with torch.no_grad():
        rapt.scaled_dot_product_attention(q, k.clone().requires_grad_(), v)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in X)
    lengths = jax.numpy.asarray([3, 5])
    out, lse = rapt.scaled_dot_product_attention(q, k, v, is_causal=True, key_lengths=lengths, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    expected = rapt.scaled_dot_product_attention(*X, is_causal=True, key_lengths=[3, 5])
    assert (np.asarray(out) == expected).all()
    half = rapt.scaled_dot_product_attention(*(x.astype(jax.numpy.bfloat16) for x in (q, k, v)))
    assert isinstance(half, jax.Array) and half.dtype == jax.numpy.bfloat16
