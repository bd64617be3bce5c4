"""rapt.torch.scaled_dot_product_attention against PyTorch's, and within PyTorch's machinery."""

import inspect
import itertools
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from rapt.torch import _kernels as kernels  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

sdpa = rapt.torch.scaled_dot_product_attention
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 5e-3}
DTYPES = list(TOLERANCE)


def make(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def close(ours, theirs, dtype=None):
    bound = TOLERANCE[dtype or ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


def check(shapes, dtype=torch.float32, mask=None, **arguments):
    """Forward and gradients, of a mask with numbers too."""
    ours = [make(*s, dtype=dtype) for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    masks = [None, None]
    if mask is not None:
        masks = [mask, mask.detach().clone()]
        if mask.is_floating_point():
            masks = [m.requires_grad_() for m in masks]
            ours.append(masks[0])
            theirs.append(masks[1])
    a = sdpa(*ours[:3], attn_mask=masks[0], **arguments)
    b = F.scaled_dot_product_attention(*theirs[:3], attn_mask=masks[1], **arguments)
    assert a.shape == b.shape and a.dtype == b.dtype
    close(a, b)
    with torch.no_grad():
        assert torch.equal(a, sdpa(*ours[:3], attn_mask=masks[0], **arguments))
    g = torch.randn_like(b)
    a.backward(g)
    b.backward(g)
    for x, y in zip(ours, theirs):
        if y.grad is None:  # it did not matter to the result
            assert x.grad is None or not x.grad.any()
        else:
            assert x.grad.shape == y.grad.shape
            close(x.grad, y.grad, dtype)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_ranks_and_types(lead, dtype):
    check([(*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 4)], dtype)
    check([(*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 8)], dtype, is_causal=True, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype):
    shapes = [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)]
    for shape in [(5, 6), (1, 6), (5, 1), (3, 5, 6), (2, 1, 5, 6), (2, 3, 1, 6), (1, 3, 5, 6), (2, 3, 5, 6)]:
        booleans = torch.rand(shape) > 0.3
        booleans[..., :1] = True
        check(shapes, dtype, booleans)
        check(shapes, dtype, torch.randn(shape, dtype=dtype))
        if dtype in (torch.bfloat16, torch.float16):
            check(shapes, dtype, torch.randn(shape))


def test_masks_of_float32_with_float64():
    shapes = [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)]
    for shape in [(5, 6), (2, 1, 5, 6), (2, 3, 1, 6)]:
        q, k, v = (make(*s, dtype=torch.float64) for s in shapes)
        masks = [make(*shape)]
        masks.append(masks[0].detach().requires_grad_())
        for other in (masks[0].detach(), masks[0]):
            close(sdpa(q, k, v, other), F.scaled_dot_product_attention(q, k, v, other))
        for f, mask in zip((sdpa, F.scaled_dot_product_attention), masks):
            f(q, k, v, mask).square().sum().backward()
        close(masks[0].grad, masks[1].grad)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3)])
def test_masks_of_other_ranks(lead):
    shapes = [(*lead, 5, 8), (*lead, 6, 8), (*lead, 6, 8)]
    for mask in [(5, 6), (*lead, 5, 6), (*(1 for _ in lead), 5, 6)]:
        check(shapes, torch.float64, torch.randn(mask, dtype=torch.float64))
    if len(lead) == 3:
        check(shapes, torch.float64, torch.randn((2, 1, 5, 6), dtype=torch.float64)[:, :, :, :])
        check(shapes, torch.float64, torch.randn((2, 1, 1, 5, 6), dtype=torch.float64))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("shape", [(), (1,), (6,)])
def test_masks_of_few_dimensions(lead, shape):
    """They broadcast, as in PyTorch wherever none of its fused kernels is asked whether it takes them."""
    shapes = [(*lead, 5, 8), (*lead, 6, 8), (*lead, 6, 8)]
    check(shapes, torch.float64, torch.randn(shape, dtype=torch.float64))
    booleans = torch.ones(shape, dtype=torch.bool)
    if shape == (6,):
        booleans[::2] = False
    q, k, v = (make(*s, dtype=torch.float64) for s in shapes)
    close(sdpa(q, k, v, booleans), F.scaled_dot_product_attention(q, k, v, booleans.expand(5, 6)))
    if shape == (6,):
        with pytest.raises(RuntimeError):
            sdpa(q, k[..., :4, :], v[..., :4, :], booleans)


def test_broadcasting():
    for q, k, v in itertools.product([(1, 3), (2, 1), (2, 3)], repeat=3):
        check([(*q, 4, 8), (*k, 5, 8), (*v, 5, 8)], torch.float64)
    check([(2, 3, 4, 8), (3, 5, 8), (5, 8)], torch.float64)


def test_grouped_heads():
    check([(2, 6, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)], enable_gqa=True)
    check([(2, 6, 4, 8), (2, 3, 5, 8), (2, 2, 5, 8)], enable_gqa=True)
    check([(6, 4, 8), (2, 5, 8), (2, 5, 8)], enable_gqa=True)
    check([(2, 2, 6, 4, 8), (2, 2, 2, 5, 8), (2, 2, 2, 5, 8)], enable_gqa=True, is_causal=True)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        sdpa(make(2, 6, 4, 8), make(2, 2, 5, 8), make(2, 2, 5, 8))
    with pytest.raises(RuntimeError):
        sdpa(make(2, 6, 4, 8), make(2, 4, 5, 8), make(2, 4, 5, 8), enable_gqa=True)


def test_strides_and_layout():
    q, k, v = (make(2, 7, 3, 8).transpose(1, 2) for _ in range(3))
    out = sdpa(q, k, v)
    close(out, F.scaled_dot_product_attention(q, k, v))
    assert out.transpose(1, 2).is_contiguous()
    q = make(2, 3, 5, 16)[..., ::2]
    close(sdpa(q, q, q), F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_empty(mask):
    """Every size may be 0, in the backward too."""
    for n, h, length, keys, width, value_width in itertools.product([0, 2], [0, 3], [0, 4], [0, 5], [0, 8], [0, 7]):
        shapes = [(n, h, length, width), (n, h, keys, width), (n, h, keys, value_width)]
        if 0 not in (n, h, length, keys, width, value_width):
            continue
        if mask in ("none", "causal"):
            check(shapes, is_causal=mask == "causal")
        else:
            check(shapes, mask=torch.ones(length, keys, dtype=getattr(torch, mask)))
    check([(0, 4, 8), (0, 5, 8), (0, 5, 8)])
    check([(2, 4, 0), (2, 5, 0), (2, 5, 3)])
    check([(4, 0), (5, 0), (5, 3)])
    check([(2, 0, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)])
    out = sdpa(make(2, 3, 4, 8), make(2, 3, 0, 8), make(2, 3, 0, 8))
    assert torch.equal(out, torch.zeros(2, 3, 4, 8))
    with pytest.raises(NotImplementedError, match="window"):
        sdpa(*(make(2, 0, 4, 8) for _ in range(3)), window=(1, 1))


def test_a_row_without_keys_is_zero():
    q, k, v = (make(1, 2, 3, 4) for _ in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    out = sdpa(q, k, v, mask)
    out.sum().backward()
    assert torch.equal(out[0, :, 1], torch.zeros(2, 4))
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def test_additional_arguments():
    q, k, v = (make(2, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    i, j = torch.arange(6)[:, None], torch.arange(6)[None]
    near = (j >= i - 2) & (j <= i + 1)
    close(sdpa(q, k, v, window=(2, 1)), F.scaled_dot_product_attention(q, k, v, near))
    real = torch.stack([j.expand(6, 6) < 4, j.expand(6, 6) < 6])[:, None]
    for lengths in ([4, 6], torch.tensor([4, 6])):
        close(sdpa(q, k, v, key_lengths=lengths), F.scaled_dot_product_attention(q, k, v, real))
    late = (j >= 1).expand(6, 6)
    close(sdpa(q, k, v, key_start=1), F.scaled_dot_product_attention(q, k, v, late))
    few = q[:, :, :2]
    close(
        sdpa(few, k, v, is_causal=True, causal_offset="bottom_right"),
        F.scaled_dot_product_attention(few, k, v, j[:, :6] <= i[:2] + 4),
    )
    each = torch.stack([j <= i + 1, j <= i + 2])[:, None]
    ours = sdpa(q, k, v, is_causal=True, causal_offset=torch.tensor([1, 2]))
    theirs = F.scaled_dot_product_attention(q, k, v, each)
    close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours.sum(), (q, k, v)), torch.autograd.grad(theirs.sum(), (q, k, v))):
        close(a, b)


def test_refusals():
    q = make(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="exclude"):
        sdpa(q, q, q, torch.ones(3, 3, dtype=torch.bool), is_causal=True)
    with pytest.raises(RuntimeError):
        sdpa(q, q, make(1, 2, 4, 4))
    with pytest.raises(RuntimeError):
        sdpa(q, q, q.double())
    with pytest.raises(RuntimeError):
        sdpa(q, q, q, dropout_p=1.5)
    with pytest.raises(RuntimeError):
        sdpa(q, q, q, torch.zeros(3, 3, dtype=torch.float16))
    with pytest.raises(RuntimeError):
        sdpa(q, q, q, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="bottom_right"):
        sdpa(q, q, q, is_causal=True, causal_offset="middle")


@pytest.mark.parametrize("function", [sdpa, rapt.scaled_dot_product_attention])
def test_signature(function):
    """PyTorch's is written in its documentation alone; what is beyond it has names, and defaults."""
    found = re.search(r"scaled_dot_product_attention(\([^()]*\)) ->", F.scaled_dot_product_attention.__doc__)
    names = {}
    exec(f"def wanted{found[1]}: pass", names)
    wanted = [(p.name, p.default) for p in inspect.signature(names["wanted"]).parameters.values()]
    given = list(inspect.signature(function).parameters.values())
    assert [(p.name, p.default) for p in given[: len(wanted)]] == wanted and len(wanted) == 8
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given[: len(wanted)])
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in given[len(wanted) :])


def test_dropout():
    q, k, v = (make(2, 3, 40, 8) for _ in range(3))
    torch.manual_seed(5)
    first, second = sdpa(q, k, v, dropout_p=0.5), sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    again = sdpa(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(sdpa(q, k, v, dropout_p=1.0), torch.zeros(2, 3, 40, 8))
    ones = torch.ones(1, 1, 64, 1)
    zeros = torch.zeros(1, 1, 64, 1)
    assert abs(sdpa(zeros, zeros, ones, dropout_p=0.25).mean().item() - 1) < 0.05


def test_gradient_of_dropout():
    q, k, v = (make(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))

    def f(*t):
        torch.manual_seed(3)
        return sdpa(*t, dropout_p=0.4)

    assert torch.autograd.gradcheck(f, (q, k, v), atol=1e-6)


def test_gradcheck():
    q, k, v = (make(2, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    mask = make(2, 1, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(sdpa, (q, k, v, mask))
    assert torch.autograd.gradcheck(lambda q, v: sdpa(q, q, v, is_causal=True), (q, v))


def test_second_derivative_is_refused():
    q = make(1, 2, 3, 4)
    (g,) = torch.autograd.grad(sdpa(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


def test_changed_inputs_are_noticed():
    q = make(1, 2, 3, 4)
    k = q * 1
    out = sdpa(q, k, k)
    k.data_ptr()
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        out.sum().backward()


@pytest.mark.parametrize("make_rows", [torch.tensor, list, np.array])
def test_changed_integers_do_not_matter(make_rows):
    """Lengths count up in place in many a loop, before the backward."""
    q, k, v = (make(2, 2, 5, 8) for _ in range(3))
    for name in ("key_lengths", "key_start", "causal_offset"):
        rows = make_rows([2, 3])
        out = sdpa(q, k, v, is_causal=name == "causal_offset", **{name: rows}).square().sum()
        expected = torch.autograd.grad(out, (q, k, v), retain_graph=True)
        rows[0] = rows[1] = 1
        for a, b in zip(torch.autograd.grad(out, (q, k, v)), expected):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (make(2, 3, 4, 8) for _ in range(3))
    mask = make(4, 4)
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    assert ours.dtype is theirs.dtype is dtype
    close(ours, theirs)
    ours.sum().backward()
    assert q.grad.dtype is torch.float32 and mask.grad.dtype is torch.float32


def test_what_goes_to_pytorch():
    class Sub(torch.Tensor):
        pass

    q = make(1, 2, 3, 4)
    sub = q.as_subclass(Sub)
    assert type(sdpa(sub, sub, sub)) is type(F.scaled_dot_product_attention(sub, sub, sub))
    keys = make(1, 2, 5, 4)
    bias = causal_lower_right(3, 5)
    close(sdpa(q, keys, keys, bias), F.scaled_dot_product_attention(q, keys, keys, bias))
    meta = torch.empty(1, 2, 3, 4, device="meta")
    assert sdpa(meta, meta, meta).device.type == "meta"
    negative = torch.randn(1, 2, 3, 4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    close(sdpa(negative, negative, negative), F.scaled_dot_product_attention(negative, negative, negative))
    mode = FakeTensorMode()
    with mode:
        layer = rapt.torch.MultiheadAttention(4, 2).eval()
    fake = mode.from_tensor(q)
    with torch.no_grad():
        for out in (sdpa(fake, fake, fake), sdpa(fake, fake, fake, dropout_p=0.5), layer(*[fake[0]] * 3)[0]):
            assert type(out) is type(fake)
    with pytest.raises(NotImplementedError, match="window"):
        sdpa(meta, meta, meta, window=(1, 1))
    with torch.inference_mode():
        close(sdpa(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_another_default_device():
    """Tensors on the CPU are computed there wherever new ones are made."""
    q, k, v = (make(2, 2, 5, 8) for _ in range(3))
    layer = rapt.torch.MultiheadAttention(8, 2, dropout=0.5)
    weights = layer(q[0, 0], k[0, 0], v[0, 0])[1]
    with torch.device("meta"):
        out = sdpa(q, k, v, dropout_p=0.5, key_lengths=[3, 4])
        torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
        torch.func.grad(lambda q: sdpa(q, k, v, dropout_p=0.5, key_lengths=3).sum())(q)
        torch.autograd.grad(weights.sum(), q)
        out = layer(q[0, 0], k[0, 0], v[0, 0])[0]
    assert out.device.type == "cpu"


def test_forward_mode_is_refused():
    """There is no forward derivative; a tangent must not get lost."""
    q, k, v = (make(2, 2, 5, 8, grad=False) for _ in range(3))
    layer = rapt.torch.MultiheadAttention(8, 2).eval().requires_grad_(False)
    expected = sdpa(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert torch.equal(sdpa(q, k, v), expected)
        for f, tensors in ((sdpa, (dual, k, v)), (sdpa, (k, v, dual, q[0, 0, :, :5])), (layer, [dual[0, 0]] * 3)):
            with pytest.raises(NotImplementedError, match="forward"):
                f(*tensors)


@pytest.mark.parametrize("way", ["direct", "long", "grouped"])
def test_gradients_in_batches(way):
    """By autograd's own vmap, and by torch.func's."""
    q, v = (make(2, 4, 5, 8, dtype=torch.float64) for _ in range(2))
    k = make(2, 4, 5, 8, dtype=torch.float64)
    if way == "grouped":
        k, v = (t.detach()[:, :2].requires_grad_() for t in (k, v))
    mask = make(5, 5, dtype=torch.float64, grad=way == "long")
    tensors = (q, k, v, mask)[: 3 + mask.requires_grad]
    out = sdpa(q, k, v, mask, enable_gqa=way == "grouped")
    gradients = torch.randn(3, *out.shape, dtype=torch.float64)

    def differentiate(g, batched=False):
        return torch.autograd.grad(out, tensors, g, is_grads_batched=batched, retain_graph=True)

    expected = [torch.stack(g) for g in zip(*map(differentiate, gradients))]
    for found in (differentiate(gradients, batched=True), torch.func.vmap(differentiate)(gradients)):
        for a, b in zip(found, expected):
            close(a, b)


# ---- operators ----


def operator_arguments(mask=None, kind=0, dropout=0.0, rows=False):
    q, k, v = make(2, 4, 3, 8), make(2, 2, 5, 8), make(2, 2, 5, 8)
    seed = torch.tensor(7) if dropout else None
    offsets, start, lengths = (
        (torch.tensor([2, 1]), torch.tensor([0, 1]), torch.tensor([5, 3])) if rows else (None,) * 3
    )
    return q, k, v, mask, seed, offsets, start, lengths, dropout, rows, 0.4, 0, None, None, kind


@pytest.mark.parametrize("kind", [kernels.NO_WEIGHTS, kernels.MEAN_WEIGHTS, kernels.HEAD_WEIGHTS])
def test_opcheck(kind):
    forward = torch.ops.rapt.attention.default
    for arguments in (
        operator_arguments(kind=kind),
        operator_arguments(mask=make(2, 1, 3, 5), kind=kind),
        operator_arguments(mask=torch.rand(1, 4, 3, 5) > 0.5, kind=kind),
        operator_arguments(kind=kind, dropout=0.3, rows=True),
    ):
        opcheck(forward, arguments)
        q, k, v, mask, *options = (a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        out, lse, weights = forward(q, k, v, mask, *options)
        wanted = [True, True, True, mask is not None and mask.is_floating_point()]
        d_weights = torch.randn_like(weights) if kind else None
        back = (torch.randn_like(out), d_weights, q, k, v, out, lse, mask, *options, wanted)
        opcheck(torch.ops.rapt.attention_backward.default, back)


def test_operator_has_no_second_derivative():
    q, *rest = operator_arguments()
    out, _, _ = torch.ops.rapt.attention.default(q, *rest)
    (g,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend, dynamic):
    mask = make(5, 5)

    def f(q, k, v, mask):
        return sdpa(q * 2, k, v, mask).transpose(1, 2).flatten(2)

    compiled = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)
    for batch in (2, 3):
        inputs = [make(batch, 3, 5, 8) for _ in range(3)]
        g = torch.randn(batch, 5, 24)
        expected = torch.autograd.grad(f(*inputs, mask), (*inputs, mask), g)
        for a, b in zip(torch.autograd.grad(compiled(*inputs, mask), (*inputs, mask), g), expected):
            close(a, b)


def test_compile_with_more_arguments():
    q = make(2, 3, 5, 8)

    def f(q, lengths):
        return sdpa(q, q, q, is_causal=True, causal_offset=1, window=(2, None), key_lengths=lengths)

    lengths = torch.tensor([3, 5])
    close(torch.compile(f, backend="aot_eager", fullgraph=True)(q, lengths), f(q, lengths))
    dropped = torch.compile(lambda q: sdpa(q, q, q, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    first = dropped(q)
    torch.manual_seed(1)
    assert torch.equal(first, dropped(q)) and not torch.equal(first, dropped(q))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True)

    inputs = tuple(make(2, 3, 5, 8, grad=False) for _ in range(3))
    batch = torch.export.Dim("batch")
    program = torch.export.export(Model(), inputs, dynamic_shapes=[{0: batch}] * 3)
    assert any(node.target is torch.ops.rapt.attention.default for node in program.graph.nodes)
    more = tuple(make(4, 3, 5, 8, grad=False) for _ in range(3))
    close(program.module()(*more), sdpa(*more, is_causal=True))


def test_func():
    q, k, v = (make(4, 2, 3, 5, 8, dtype=torch.float64, grad=False) for _ in range(3))
    mask = make(5, 5, dtype=torch.float64, grad=False)

    def loss(q, k, v, mask, f=sdpa):
        return f(q, k, v, mask).square().sum()

    def reference(*args):
        return loss(*args, f=F.scaled_dot_product_attention)

    every = (0, 1, 2, 3)
    for a, b in zip(
        torch.func.grad(loss, every)(q[0], k[0], v[0], mask), torch.func.grad(reference, every)(q[0], k[0], v[0], mask)
    ):
        close(a, b)
    close(torch.func.vmap(sdpa)(q, k, v), F.scaled_dot_product_attention(q, k, v))
    close(torch.func.vmap(sdpa, (0, None, 1))(q, k[0], v.movedim(0, 1)), F.scaled_dot_product_attention(q, k[:1], v))
    ours = torch.func.vmap(torch.func.grad(loss, every), (0, 0, 0, None))(q, k, v, mask)
    for n in range(4):
        theirs = torch.func.grad(reference, every)(q[n], k[n], v[n], mask)
        for a, b in zip(ours, theirs):
            close(a[n], b)
