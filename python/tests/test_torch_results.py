"""Memory of large results of rapt.torch: used again when they are gone, never while anybody uses it."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from rapt.torch import _results as results  # noqa: E402

sdpa = rapt.torch.scaled_dot_product_attention
reuses = pytest.mark.skipif(results._count_users is None, reason="this PyTorch does not say who uses memory")
QUERY = (1, 8, 2100, 64)  # 4.3 MB


@pytest.fixture(autouse=True)
def _nothing_held():
    results._held.clear()
    yield
    results._held.clear()


def make(seed, shape=QUERY, keys=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape[:2], n, shape[3], generator=generator).to(dtype) for n in (shape[2], keys, keys)]


USERS = {
    "tensor": lambda out: out,
    "view": lambda out: out[0, :, 3:],
    "array": lambda out: out.numpy(),
    "storage": lambda out: out.untyped_storage(),
    "exported": lambda out: out.__dlpack__(),
    "saved by autograd": lambda out: out * torch.ones((), requires_grad=True),
}


@reuses
@pytest.mark.parametrize("use", USERS.values(), ids=USERS)
def test_memory_is_used_again_when_nobody_uses_it(use):
    q, k, v = make(0)
    out = sdpa(q, k, v)
    place, copy = out.data_ptr(), out.clone()
    user = use(out)
    del out
    second = sdpa(-q, k, v)
    assert second.data_ptr() != place
    del user
    assert sdpa(q, k, v).data_ptr() == place  # and gone again
    third = sdpa(q, k, v)
    assert third.data_ptr() == place and torch.equal(third, copy)
    assert torch.equal(second, sdpa(-q, k, v))


@reuses
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_of_every_type(dtype):
    q, k, v = make(1, (2, 8, 2100, 64), dtype=dtype)
    first = sdpa(q, k, v)
    place, copy = first.data_ptr(), first.clone()
    del first
    again = sdpa(q, k, v)
    assert again.data_ptr() == place and again.dtype is dtype and torch.equal(again, copy)
    assert again.stride() == copy.stride()


@reuses
def test_results_are_tensors_like_others():
    q, k, v = make(2)
    place = sdpa(q, k, v).data_ptr()
    out = sdpa(q, k, v)
    assert out.data_ptr() == place
    count, memory = out.numel(), out.as_strided((out.numel(),), (1,)).clone()
    assert out.untyped_storage().nbytes() == 4 * count and out._base is None and out.is_leaf
    out.resize_(2 * count)  # as PyTorch's: what is there stays, and there is room for more
    out[count:] = 1
    assert torch.equal(out[:count], memory)
    del out  # its memory has another size now, and is not a result's
    assert torch.equal(sdpa(q, k, v).as_strided((count,), (1,)), memory)
    shared = sdpa(q, k, v).share_memory_()
    assert shared.is_shared()
    del shared
    assert not sdpa(q, k, v).is_shared()


@reuses
def test_inference_mode_ends_with_its_block():
    q, k, v = make(3)
    with torch.inference_mode():
        out = sdpa(q, k, v)
        assert out.is_inference()
        place = out.data_ptr()
        del out
    out = sdpa(q, k, v)
    assert out.data_ptr() == place and not out.is_inference()
    del out
    with torch.inference_mode():
        assert sdpa(q, k, v).is_inference()


def test_gradients():
    q, k, v = (t.requires_grad_() for t in make(4, keys=2100))
    functions = (sdpa, torch.nn.functional.scaled_dot_product_attention)
    for _ in range(3):
        ours, theirs = (torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in functions)
        for gradient, expected in zip(ours, theirs):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


@reuses
@pytest.mark.parametrize("trained", [False, True])
def test_layers(trained):
    layer = rapt.torch.MultiheadAttention(64, 4, batch_first=True).train(trained)
    x = torch.randn(33, 513, 64, generator=torch.Generator().manual_seed(5))  # 4.3 MB
    first = layer(x, x, x, need_weights=False)[0].detach()
    place, copy = first.data_ptr(), first.clone()
    second = layer(-x, x, x, need_weights=False)[0].detach()
    assert second.data_ptr() != place and torch.equal(first, copy)
    del first
    again = layer(x, x, x, need_weights=False)[0]
    assert again.data_ptr() == place and torch.equal(again, copy)


def test_many_threads():
    inputs = [make(seed) for seed in range(4)]
    expected = [sdpa(*tensors).clone() for tensors in inputs]

    def work(i):
        alive = []
        for n in range(30):
            alive.append((n % 4, sdpa(*inputs[n % 4])))
            if len(alive) > 1 + i:
                alive.pop(0)
            if not all(torch.equal(out, expected[which]) for which, out in alive):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@reuses
def test_another_thread_takes_it_first(monkeypatch):
    """Between finding memory free and taking it, another call takes it, and holds it again."""
    q, k, v = make(7)
    place = sdpa(q, k, v).data_ptr()
    others, is_whole = [], results._Held.is_whole

    def interrupted(held):
        monkeypatch.setattr(results._Held, "is_whole", is_whole)
        others.append(sdpa(-q, k, v))
        return is_whole(held)

    monkeypatch.setattr(results._Held, "is_whole", interrupted)
    out = sdpa(q, k, v)
    assert others[0].data_ptr() == place != out.data_ptr()
    assert torch.equal(others[0], sdpa(-q, k, v)) and torch.equal(out, sdpa(q, k, v))


@reuses
def test_resized_memory_is_not_held():
    q, k, v = make(8)
    first, second = sdpa(q, k, v), sdpa(q, k, v)
    first.resize_(100 << 20)
    del first, second
    sdpa(q, k, v)
    assert [held.storage.nbytes() for held in results._held] == [q.numel() * 4]


@pytest.mark.parametrize("rows", [7, 2100])
def test_strides_are_those_of_torch(rows):
    x = torch.randn(rows, 1, 512).transpose(0, 1)  # contiguous, with a stride that does not matter
    layer = rapt.torch.MultiheadAttention(512, 4, batch_first=True)
    assert layer.eval()(x, x, x, need_weights=False)[0].stride() == (rows * 512, 512, 1)
    assert layer.train()(x, x, x, need_weights=False)[0].stride() == (rows * 512, 512, 1)


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@reuses
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
def test_memory_is_given_back():
    q, k, v = make(6, (1, 8, 20000, 64), keys=1)  # 41 MB
    before = _resident()
    outs = [sdpa(q, k, v) for _ in range(8)]
    assert _resident() - before > 300e6
    del outs
    assert 100e6 < _resident() - before < 150e6  # at most 128 MiB are held
    sdpa(q[:, :, 1:], k, v)  # another size
    assert _resident() - before < 60e6
    rapt.torch.release_memory()
    assert _resident() - before < 20e6
