"""Tensors that are not for Rapt: PyTorch's own functions take or refuse them, as without Rapt."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
E, H = 16, 2
sdpa = rapt.torch.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def nested(layout=torch.strided, width=(E,)):
    return torch.nested.nested_tensor([torch.randn(length, *width) for length in (3, 6, 4)], layout=layout)


def same(ours, theirs):
    assert type(ours) is type(theirs) and ours.is_nested == theirs.is_nested
    for a, b in zip(*(t.unbind() if t.is_nested else [t] for t in (ours, theirs))):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def layers():
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    return rapt.torch.convert(copy.deepcopy(theirs)), theirs


@pytest.mark.parametrize("need_weights", [False, True])
def test_nested_in_the_layer(need_weights):
    x = nested()
    with torch.no_grad():
        (ours, shown), (theirs, their_shown) = (m(x, x, x, need_weights=need_weights) for m in layers())
    same(ours, theirs)
    assert (shown is None) == (their_shown is None)
    if shown is not None:
        same(shown, their_shown)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_that_pytorch_refuses(layout):
    """With gradients, in training and, so far, of the newer layout: the refusal is PyTorch's."""
    x = nested(layout)
    for grad, training in itertools.product([False, True], repeat=2):
        if layout is torch.strided and not grad and not training:
            continue
        for module in layers():
            with torch.set_grad_enabled(grad), pytest.raises(AssertionError, match="NestedTensor"):
                module.train(training)(x, x, x)
    grouped = rapt.torch.MultiheadAttention(E, H, batch_first=True, num_kv_heads=1).eval()
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="num_kv_heads"):
            grouped(x, x, x)
        with pytest.raises(NotImplementedError, match="dense"):
            grouped(x, x, x, cache=grouped.new_cache(3, 6), need_weights=False)


@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_nested_in_converted_encoders(settings):
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, **settings)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = nested()
    before = [t.clone() for t in x.unbind()]
    with torch.no_grad():
        expected, of_layer = model(x), model.layers[0](x)
        rapt.torch.convert(model)
        same(model(x), expected)
        same(model.layers[0](x), of_layer)
    assert all(torch.equal(a, b) for a, b in zip(x.unbind(), before))
    with pytest.raises(AssertionError, match="NestedTensor"):
        model(x)


@pytest.mark.parametrize("converted", [0, 1])
def test_encoders_that_nest_by_themselves(converted, monkeypatch):
    """An encoder with one layer converted, of which nobody has told the encoder."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 6, E), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    nest, seen = torch._nested_tensor_from_mask, []
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", lambda *a, **k: seen.append(1) or nest(*a, **k))
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        rapt.torch.convert(model.layers[converted])
        same(model(x, src_key_padding_mask=padding), expected)
    assert len(seen) == 2


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_in_the_operator(layout):
    x = nested(layout, (H, 8)).transpose(1, 2)
    if layout is torch.strided:  # for which PyTorch's own function wants them dense
        x = x.contiguous()
    same(sdpa(x, x, x), F.scaled_dot_product_attention(x, x, x))
    with pytest.raises(NotImplementedError, match="window"):
        sdpa(x, x, x, window=(1, 1))


# ---- others ----


def outcome(function, *args):
    try:
        return function(*args)
    except (RuntimeError, TypeError) as error:  # of PyTorch's, which are not taken for Rapt's
        return str(error).split("\n", 1)[0]


KINDS = {
    "sparse": torch.Tensor.to_sparse,
    "compressed": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "complex": lambda x: torch.complex(x, x),
    "integers": torch.Tensor.int,
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_pytorch_does_with_them(kind):
    """Its result or its refusal, word by word."""
    x, y = KINDS[kind](torch.randn(2, H, 5, 8)), KINDS[kind](torch.randn(2, 5, E))
    compare(outcome(sdpa, x, x, x), outcome(F.scaled_dot_product_attention, x, x, x))
    ours, theirs = layers()
    for grad, training in itertools.product([False, True], repeat=2):
        with torch.set_grad_enabled(grad):
            results = [outcome(m.train(training), y, y, y) for m in (ours, theirs)]
        compare(*(r[0] if isinstance(r, tuple) else r for r in results))
    with pytest.raises(NotImplementedError, match="window"):
        sdpa(x, x, x, window=(1, 1))


def compare(ours, theirs):
    if isinstance(theirs, str):
        assert ours == theirs and "rapt" not in ours
    elif theirs.is_meta:
        assert ours.is_meta and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    else:
        same(ours, theirs)


class Counted(torch.Tensor):
    """A subclass that sees what is done with it, as those that compute something else do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_in_the_layer(training, grad):
    plain = torch.randn(2, 5, E)
    x = plain.as_subclass(Counted)
    ours, theirs = (m.train(training) for m in layers())
    with torch.set_grad_enabled(grad):
        counts = []
        for module in (ours, theirs):
            Counted.calls = 0
            out, weights = module(x, x, x)
            assert type(out) is type(weights) is Counted
            torch.testing.assert_close(out.as_subclass(torch.Tensor), ours(plain, plain, plain)[0])
            counts.append(Counted.calls)
    assert min(counts) > 0
