"""Gradients of the layer in batches: by autograd's own vmap, by torch.func's, and one by one."""

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import functional_call, jacrev, vmap  # noqa: E402

E, H, N, L, S = 8, 2, 3, 4, 5
f64 = torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def make(*shape):
    return torch.randn(shape, dtype=f64, requires_grad=True)


def pair(**settings):
    theirs = nn.MultiheadAttention(E, H, dtype=f64, **settings)
    ours = rapt.torch.MultiheadAttention(E, H, dtype=f64, **settings)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"dropout": 0.5}], ids=str)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_in_batches(settings, same, which):
    """The same bits as one by one, and with dropout the same draw."""
    layer, _ = pair(**settings)
    query, mask = make(L, N, E), make(L, L if same else S)
    key, value = (query, query) if same else (make(S, N, E), make(S, N, E))
    tensors = [query, mask, *layer.parameters()] + ([] if same else [key, value])
    result = layer(query, key, value, attn_mask=mask)[which]
    gradients = torch.randn(6, *result.shape, dtype=f64)

    def differentiate(g, batched=False):
        found = torch.autograd.grad(
            result, tensors, g, is_grads_batched=batched, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return tuple(found)

    expected = [torch.stack(rows) for rows in zip(*map(differentiate, gradients))]
    for found in (differentiate(gradients, batched=True), vmap(differentiate)(gradients)):
        for a, b in zip(found, expected):
            assert torch.equal(a, b)
    twice = vmap(vmap(differentiate))(gradients.unflatten(0, (2, 3)))
    for a, b in zip(twice, expected):
        assert torch.equal(a.flatten(0, 1), b)


def test_both_results_in_batches():
    layer, theirs = pair()
    x = make(L, E)
    found = []
    for module in (layer, theirs):
        torch.manual_seed(1)
        results = module(x, x, x)
        gradients = [torch.randn(2, *r.shape, dtype=f64) for r in results]
        found.append(torch.autograd.grad(results, x, gradients, is_grads_batched=True)[0])
    close(*found)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_jacobians(training, which):
    ours, theirs = (module.train(training) for module in pair())
    x = torch.randn(L, E, dtype=f64)  # one sequence: what vmap repeats lies in memory once
    batch = torch.randn(S, N, E, dtype=f64)
    hidden = torch.zeros(N, S, dtype=torch.bool)
    hidden[1, 3:] = True

    def jacobians(module):
        def f(x):
            return module(x, x, x)[which]

        def g(x):
            return module(x, x, x, key_padding_mask=hidden)[which]

        def h(parameters):
            return functional_call(module, parameters, (x, x, x))[which]

        yield jacrev(f)(x)
        yield jacrev(f, chunk_size=3)(x)
        yield torch.autograd.functional.jacobian(f, x, vectorize=True)
        yield jacrev(g)(batch)
        yield torch.autograd.functional.jacobian(g, batch, vectorize=True)
        yield from jacrev(h)({k: v.detach() for k, v in module.named_parameters()}).values()

    for a, b in zip(jacobians(ours), jacobians(theirs)):
        close(a, b)


def test_functional_jacobians():
    query, key, weight, bias, out = make(L, N, E), make(S, N, E), make(3 * E, E), make(3 * E), make(E, E)

    def run(function):
        def f(query, weight):
            return function(query, key, key, E, H, weight, bias, None, None, True, 0.0, out, None)[0]

        yield from jacrev(f, (0, 1))(query, weight)
        yield from torch.autograd.functional.jacobian(f, (query, weight), vectorize=True)

    for a, b in zip(run(rapt.torch.multi_head_attention_forward), run(F.multi_head_attention_forward)):
        close(a, b)


def test_rotary_in_batches():
    layer = rapt.torch.MultiheadAttention(E, H, dtype=f64, num_kv_heads=1)
    x = make(L, E)
    result = layer(x, x, x, rotary={"base": 100.0})[0]
    gradients = torch.randn(2, *result.shape, dtype=f64)
    found = torch.autograd.grad(result, x, gradients, is_grads_batched=True, retain_graph=True)[0]
    for a, g in zip(found, gradients):
        assert torch.equal(a, torch.autograd.grad(result, x, g, retain_graph=True)[0])


def test_second_derivatives_are_refused_in_batches():
    layer, _ = pair()
    x = make(L, E)
    result = layer(x, x, x)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(result, x, result.detach()[None], is_grads_batched=True, create_graph=True)
