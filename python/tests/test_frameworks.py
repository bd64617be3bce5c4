"""Arrays of PyTorch and JAX, where they are installed, and Python's own buffers."""

from __future__ import annotations

import array
import ctypes
import inspect
import signal
import subprocess
import sys
from typing import Any

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


def test_torch_settings_and_parameters() -> None:
    """PyTorch's arguments in PyTorch's order, its objects for them, and its modules take the parameters."""
    torch = pytest.importorskip("torch")
    settings = (24, 4, 0.0, True, True, False, 7, None, True, torch.device("cpu"), torch.float64)
    ours, theirs = rapt.MultiheadAttention(*settings), torch.nn.MultiheadAttention(*settings)
    names = [list(inspect.signature(c.__init__).parameters) for c in (type(ours), type(theirs))]
    assert names[0][: len(names[1])] == names[1]
    with pytest.raises(ValueError, match="device is 'cuda:0'"):
        rapt.MultiheadAttention(8, 2, device=torch.device("cuda", 0))
    theirs.load_state_dict({name: torch.from_numpy(x) for name, x in ours.state_dict().items()})
    q, k, v = (torch.randn(2, 5, width, dtype=torch.float64) for width in (24, 7, 24))
    for found, expected in zip(ours(q, k, v), theirs(q, k, v)):
        torch.testing.assert_close(found, expected.detach(), atol=1e-13, rtol=1e-13)


def test_torch_tensors_that_are_more_than_memory() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch.from_numpy(X)
    with pytest.raises(TypeError, match=r"rapt\.torch"):
        rapt.scaled_dot_product_attention(q, k.clone().requires_grad_(), v)
    with pytest.raises(TypeError, match="resolve_neg"):
        rapt.scaled_dot_product_attention(q, k, torch.complex(v, v).conj().imag)
    with torch.no_grad():
        rapt.scaled_dot_product_attention(q, k.clone().requires_grad_(), v)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "quantised", "nested", "meta"])
def test_torch_tensors_without_dense_memory(kind: str) -> None:
    torch = pytest.importorskip("torch", minversion="2.10")
    x = torch.from_numpy(X[0])
    if kind == "sparse":
        x = x.to_sparse()
    elif kind == "quantised":
        x = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    elif kind == "nested":
        x = torch.nested.nested_tensor(list(x))
    else:
        x = x.to("meta")
    layer = rapt.MultiheadAttention(8, 2, batch_first=True)
    y = torch.from_numpy(X[0, 0])
    for call in (
        lambda: rapt.scaled_dot_product_attention(torch.from_numpy(X[0]), x, x),
        lambda: rapt.scaled_dot_product_attention(x, x, x),
        lambda: layer(y, x, x, need_weights=False),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert "\n" not in str(raised.value)


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


# ---- buffers ----


def as_memoryview(x: np.ndarray) -> memoryview:
    return memoryview(x)


def as_bytes(x: np.ndarray) -> memoryview:
    """Memory that nobody may write to, of Python's own."""
    return memoryview(np.ascontiguousarray(x).tobytes()).cast(x.dtype.char, x.shape)  # type: ignore[call-overload]


def as_array(x: np.ndarray) -> memoryview:
    flat = array.array("f" if x.dtype == np.float32 else "d", x.ravel().tolist())
    return memoryview(flat).cast("B").cast(flat.typecode, x.shape)  # type: ignore[call-overload]


def as_ctypes(x: np.ndarray) -> Any:
    """Nothing about it but the buffer tells its shape."""
    kind: Any = ctypes.c_float if x.dtype == np.float32 else ctypes.c_double
    for size in reversed(x.shape):
        kind = kind * size
    return kind.from_buffer_copy(np.ascontiguousarray(x))


class Stranger:
    def __init__(self, x: np.ndarray) -> None:
        self.__array_interface__ = x.__array_interface__
        self.kept = x


STRANGERS = [as_memoryview, as_bytes, as_array, as_ctypes, Stranger]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("strange", STRANGERS)
def test_buffers(strange: Any, dtype: str) -> None:
    q, k, v = X.astype(dtype)
    mask = np.random.default_rng(1).standard_normal((7, 7)).astype(dtype)
    expected, sums = rapt.scaled_dot_product_attention(q, k, v, mask, return_lse=True)
    out, lse = rapt.scaled_dot_product_attention(*(strange(x) for x in (q, k, v, mask)), return_lse=True)
    assert type(out) is type(lse) is np.ndarray and out.dtype == dtype
    assert (out == expected).all() and (lse == sums).all()
    assert (rapt.scaled_dot_product_attention(q, strange(k), v, mask) == expected).all()

    layer = rapt.MultiheadAttention(8, 2, batch_first=True, dtype=dtype)
    x, y = q[0], k[0, :, :5]
    out, weights = layer(strange(x), strange(y), strange(y))
    for found, known in zip((out, weights), layer(x, y, y)):
        assert type(found) is np.ndarray and found.dtype == dtype and (found == known).all()
    same, state, known_state = strange(x), rapt.State(), rapt.State()
    layer(same, same, same, state=state), layer(x, x, x, state=known_state)
    del same  # the state keeps what it needs of it
    gradients, known = layer.backward(state, strange(x)), layer.backward(known_state, x)
    assert list(gradients) == list(known) and all((gradients[name] == known[name]).all() for name in known)

    other = rapt.MultiheadAttention(8, 2, batch_first=True, dtype=dtype, seed=1)
    other.load_state_dict({name: strange(array) for name, array in layer.state_dict().items()})
    assert (other(x, x, x)[0] == layer(x, x, x)[0]).all()


def test_buffers_of_other_types() -> None:
    q, k, v = (memoryview(x.astype(np.float16)) for x in X)
    assert rapt.scaled_dot_product_attention(q, k, v).dtype == np.float16
    attends = np.tri(7, dtype=bool)
    by_mask = rapt.scaled_dot_product_attention(*X, memoryview(attends))
    assert (by_mask == rapt.scaled_dot_product_attention(*X, is_causal=True)).all()
    strided = [memoryview(x.transpose(3, 1, 2, 0).copy().transpose(3, 1, 2, 0))[::-1] for x in X]
    expected = rapt.scaled_dot_product_attention(*(x[::-1] for x in X))
    assert (rapt.scaled_dot_product_attention(*strided) == expected).all()


def test_results_into_buffers() -> None:
    q, k, v = X[0].copy(), X[1].copy(), X[2].copy()
    out = np.zeros_like(q)
    rapt._core.attention(*(memoryview(x) for x in (q, k, v, out)))
    assert (out == rapt.scaled_dot_product_attention(q, k, v)).all()
    for nobody_writes in (as_bytes(out), memoryview(out).toreadonly()):
        with pytest.raises(ValueError, match="out is read-only"):
            rapt._core.attention(q, k, v, nobody_writes)


PROTECTED = """
import ctypes, mmap, resource, sys
import numpy as np, rapt
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
half = 1 << 20  # bytes, of keys that are seen; whoever reads the others dies
memory = mmap.mmap(-1, 2 * half)
keys = np.frombuffer(memory, np.float32).reshape(1, 1, -1, 16)
seen, q = keys.shape[2] // 2, np.ones((1, 1, 2, 16), np.float32)
keys[:, :, :seen] = np.random.default_rng(0).standard_normal((seen, 16))
expected = rapt.scaled_dot_product_attention(q, keys[:, :, :seen].copy(), keys[:, :, :seen].copy())
address = ctypes.c_void_p(keys.ctypes.data + half)
assert ctypes.CDLL(None, use_errno=True).mprotect(address, ctypes.c_size_t(half), 0) == 0
if sys.argv[1] == "torch":
    import torch
    q, keys = torch.from_numpy(q), torch.from_numpy(keys)
elif sys.argv[1] == "ctypes":
    keys = (ctypes.c_float * 16 * (2 * seen) * 1 * 1).from_buffer(memory)
elif sys.argv[1] == "memoryview":
    keys = memoryview(keys).toreadonly()
elif sys.argv[1] == "copy":
    keys = keys.copy()
out = rapt.scaled_dot_product_attention(q, keys, keys, key_lengths=seen)
if sys.argv[1] == "torch":
    import rapt.torch
    again = rapt.torch.scaled_dot_product_attention(q, keys, keys, key_lengths=seen)
    assert torch.equal(out, again)
    keys.requires_grad_()
    assert torch.equal(rapt.torch.scaled_dot_product_attention(q, keys, keys, key_lengths=seen), out)
print((np.asarray(out) == expected).all())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects memory as Linux does")
@pytest.mark.parametrize("kind", ["numpy", "memoryview", "ctypes", "torch", "copy"])
def test_inputs_are_not_copied(kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch", minversion="2.10")
    done = subprocess.run([sys.executable, "-c", PROTECTED, kind], capture_output=True, text=True)
    if kind == "copy":
        assert done.returncode == -signal.SIGSEGV
    else:
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_what_is_no_array() -> None:
    layer = rapt.MultiheadAttention(8, 2, batch_first=True)
    x = X[0, 0]
    with pytest.raises(TypeError, match="key is <class 'list'>, expected an array"):
        layer(x, x.tolist(), x)
    with pytest.raises(TypeError, match="key is <class 'list'>, expected an array"):
        rapt.scaled_dot_product_attention(x, x.tolist(), x)
    with pytest.raises(TypeError, match=r"query is of type \|u1"):
        rapt.scaled_dot_product_attention(b"12345678", x, x)
    with pytest.raises(TypeError, match="byte order"):
        rapt.scaled_dot_product_attention(x, memoryview(x.astype(">f4")), x)
    view = memoryview(x)
    view.release()
    with pytest.raises(ValueError, match="released"):
        rapt.scaled_dot_product_attention(x, view, x)
