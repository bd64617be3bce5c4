"""The shortest way of rapt.torch.scaled_dot_product_attention: the bits of the long one, and nothing kept too long."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from rapt.torch import _direct as direct  # noqa: E402
from rapt.torch._attention import attend  # noqa: E402
from rapt.torch._shapes import align_mask  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPE = (2, 4, 7, 8)  # [N, H, L, D]


@pytest.fixture(autouse=True, params=[True, False], ids=["stable ABI", "empty_strided"])
def seeded(request):
    torch.manual_seed(0)
    direct.connect(request.param)
    yield
    direct.connect()


def make(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def by_call(q, k, v, mask=None, causal=False, scale=None, grouped=False, grad=True):
    return direct.attend(q, k, v, mask, causal, scale, grouped, grad)


def long_way(q, k, v, mask=None, causal=False, scale=None):
    if mask is not None:
        mask = align_mask(mask, q, k.shape[2], q.shape[:2])
    return attend(q, k, v, mask, {"causal": causal, "scale": scale})


def check(q, k, v, **arguments):
    grouped = {"grouped": q.shape[1] != k.shape[1]}
    a, b = by_call(q, k, v, **arguments, **grouped), long_way(q, k, v, **arguments)
    assert torch.equal(a, b) and a.stride() == b.stride()
    with torch.no_grad():
        silent = by_call(q, k, v, **arguments, **grouped, grad=False)
    assert torch.equal(silent, b) and not silent.requires_grad
    wanted = [t for t in (q, k, v) if t.requires_grad]
    g = torch.randn_like(b)
    for x, y, t in zip(torch.autograd.grad(a, wanted, g), torch.autograd.grad(b, wanted, g), wanted):
        assert torch.equal(x, y) and x.dtype == t.dtype and x.stride() == torch.empty_like(t).stride()


def test_interrupts_get_through(monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(direct, "empty_strided", interrupt)
    direct.connect(stable=False)
    with pytest.raises(KeyboardInterrupt):
        by_call(*(make(*SHAPE) for _ in range(3)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_options(dtype):
    q, k, v = (make(*SHAPE, dtype=dtype) for _ in range(3))
    check(q, k, v)
    check(q, k, v, causal=True)
    check(q, k, v, scale=0.3)
    check(q, k.detach(), v)
    check(q.detach(), k.detach(), v, causal=True, scale=2)
    check(q, make(2, 2, 5, 8, dtype=dtype), make(2, 2, 5, 3, dtype=dtype))


@pytest.mark.parametrize("shape", [(7, 5), (5,), (1, 5), (7, 1), (4, 7, 5), (2, 1, 7, 5), (2, 4, 7, 5), (1, 1, 1, 5)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
def test_masks(shape, kind):
    dtype = torch.float32 if kind is torch.bool else kind
    q, k, v = make(*SHAPE, dtype=dtype), make(2, 4, 5, 8, dtype=dtype), make(2, 4, 5, 8, dtype=dtype)
    mask = torch.rand(shape) < 0.6 if kind is torch.bool else torch.randn(shape, dtype=kind)
    check(q, k, v, mask=mask)
    check(q, k, v, mask=mask.expand(2, 4, 7, 5))


def test_strides():
    def other(*shape):
        return make(2, 7, 4, 8).detach().transpose(1, 2).requires_grad_()

    check(other(), other(), other())
    check(make(2, 4, 7, 16)[..., ::2], make(1, 1, 7, 8).expand(2, 4, 7, 8), make(2, 4, 7, 8)[:, :, ::1])
    q = make(*SHAPE)
    a, b = by_call(q, q, q), long_way(q, q, q)
    for loss in (torch.sum, lambda t: t[0, 0, 0, 0], lambda t: t.transpose(1, 2).flatten(2)[..., ::3].sum()):
        (x,), (y,) = (torch.autograd.grad(loss(t), q, retain_graph=True) for t in (a, b))
        assert torch.equal(x, y)


def test_a_gradient_with_its_negative_bit():
    q = make(*SHAPE)
    g = torch.randn(*SHAPE, dtype=torch.complex64).conj().imag
    assert g.is_neg()
    for way in (by_call, long_way):
        (x,), (y,) = (torch.autograd.grad(way(q, q, q), q, d) for d in (g, g.resolve_neg()))
        assert torch.equal(x, y)


def test_what_it_does_not_take():
    q = make(*SHAPE)

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            pytest.fail("nobody asked")

    negative = torch.randn(*SHAPE, dtype=torch.complex64).conj().imag
    for other in (
        None, 1, q.detach().numpy(), q[0], q.double(), q.to("meta"), q.to_sparse(), q.detach().as_subclass(Other),
        negative, q.int(), q.to(torch.complex64), q[:1], q[:, :2], q[:, :0], q[..., :3],
    ):  # fmt: skip
        assert by_call(q, other, q, grad=False) is None
        assert by_call(q, other, other) is None
    for mask in (
        torch.randn(7, 7, requires_grad=True), torch.randn(7, 7).double(), torch.randn(7, 6), torch.ones(7, 7).int(),
        torch.tensor(True), torch.ones(3, 7, 7).bool(), torch.ones(1, 2, 4, 7, 7).bool(),
        negative[0, 0, :, :7], torch.ones(7, 7).to("meta"), 5,
    ):  # fmt: skip
        assert by_call(q, q, q, mask=mask) is None
    assert by_call(q, q, q, mask=torch.ones(7, 7).bool(), causal=True) is None
    assert by_call(q, q, q, scale="one") is None
    assert by_call(q, q, q, scale=float("nan")) is None
    assert by_call(torch.nn.Parameter(q.detach()), q, q) is not None


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32])
def test_nothing_is_kept(kind):
    """Without the garbage collector: there are no circles."""
    q = make(*SHAPE)
    mask = None if kind is None else torch.ones(7, 7, dtype=kind)
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            out = by_call(q, q, q, mask=mask)
            ends = [weakref.ref(out), weakref.ref(out.grad_fn)]
            if backward:
                out.sum().backward()
            del out
            assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_autograd_watches():
    q, k = make(*SHAPE), make(*SHAPE)
    mask = torch.randn(7, 7)
    out = by_call(q, k, k)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out = by_call(q, k, k, mask=mask)
    mask.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = by_call(q, k, k)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    mask = torch.rand(7, 7) < 0.5  # this one was copied
    out = by_call(q, k, k, mask=mask)
    expected = torch.autograd.grad(out.sum(), q, retain_graph=True)
    mask.logical_not_()
    assert torch.equal(*expected, *torch.autograd.grad(out.sum(), q))


@pytest.mark.parametrize("mask", [None, torch.ones(7, 7).tril().bool(), torch.ones(7, 7)])
def test_a_graph_of_the_gradient(mask):
    q, k = make(*SHAPE), make(*SHAPE)
    out = by_call(q, k, k.detach(), mask=mask, scale=0.5)
    plain = torch.autograd.grad(out.sum(), (q, k), retain_graph=True)
    traced = torch.autograd.grad(out.sum(), (q, k), create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(plain, traced))
    with pytest.raises(RuntimeError, match="no second derivative"):
        traced[0].sum().backward()


def test_mistakes_of_callers():
    q = make(*SHAPE)
    for function in ("torch_attend", "torch_record", "torch_backward", "torch_connect"):
        with pytest.raises((TypeError, AttributeError)):
            getattr(direct._core, function)(q, q)
    with pytest.raises(TypeError):
        direct._core.torch_record(None, q, q, q, q)
