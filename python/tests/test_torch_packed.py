"""Packed weights of rapt.torch.MultiheadAttention follow every change of the parameters."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402

N, L, E, H = 2, 5, 48, 4
X = torch.randn(N, L, E, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def random_layer(**settings):
    layer = rapt.torch.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True, **settings).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.uniform_(-0.3, 0.3)
    return layer


def packed(layer):
    """What a call computes with packed weights, which must be there after it."""
    with torch.no_grad():
        out = layer(X, X, X)[0]
        before = vars(layer)["_rapt_packed"]
        again = layer(X, X, X)[0]
    assert vars(layer)["_rapt_packed"] is before and torch.equal(out, again)
    return out


def fresh(layer):
    """The same with weights that nobody packed before."""
    return packed(copy.deepcopy(layer))


def spots(parameter):
    count = parameter.numel()
    numbers = torch.randint(count, (6,), generator=torch.Generator().manual_seed(count)).tolist()
    return sorted({0, 1, count // 2, count - 2, count - 1, *numbers})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_through_data(dtype):
    layer = random_layer().to(dtype)
    for name, parameter in layer.named_parameters():
        for spot in spots(parameter):
            with torch.no_grad():
                layer(X.to(dtype), X.to(dtype), X.to(dtype))
            before = vars(layer)["_rapt_packed"]
            version = parameter._version
            parameter.data.view(-1)[spot] += 1
            assert parameter._version == version, "the write shows by itself, so the test shows nothing"
            with torch.no_grad():
                ours = layer(X.to(dtype), X.to(dtype), X.to(dtype))[0]
                expected = copy.deepcopy(layer)(X.to(dtype), X.to(dtype), X.to(dtype))[0]
            assert vars(layer)["_rapt_packed"] is not before, (name, spot)
            assert torch.equal(ours, expected), (name, spot)


def test_the_smallest_change_through_numpy():
    layer = random_layer()
    for spot in spots(layer.out_proj.weight):
        packed(layer)
        before = vars(layer)["_rapt_packed"]
        layer.out_proj.weight.detach().numpy().reshape(-1).view("int32")[spot] ^= 1
        packed(layer)
        assert vars(layer)["_rapt_packed"] is not before


def gradient_step(layer, kind):
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(X, X, X)[0].square().sum().backward()
    optimizer.step()


def swap_rows(layer):
    weight = layer.in_proj_weight.data
    weight[[1, 7]] = weight[[7, 1]]


def negate(layer):
    layer.in_proj_weight.data.neg_()


def transpose(layer):  # same memory, same version
    layer.out_proj.weight.data = layer.out_proj.weight.data.t()


def replace(layer):
    layer.out_proj.weight.data = layer.out_proj.weight.data * 2


def back_and_forth(layer):
    old = layer.out_proj.weight.data
    layer.out_proj.weight.data = old * 3
    layer.out_proj.weight.data = old
    old[0, 0] += 5


def copied(layer):
    with torch.no_grad():
        layer.in_proj_bias.copy_(torch.arange(3 * E) / E)


def from_vector(layer):
    numbers = torch.nn.utils.parameters_to_vector(layer.parameters()).detach()
    torch.nn.utils.vector_to_parameters(numbers * 1.25, layer.parameters())


def state_dict(layer):
    layer.load_state_dict(random_layer().state_dict())


def assigned(layer):
    layer.load_state_dict(random_layer().state_dict(), assign=True)


def new_parameter(layer):
    layer.out_proj.bias = nn.Parameter(torch.ones(E))


def other_type(layer):
    layer.in_proj_weight.data.add_(1e-3)
    layer.double().float()


def inference(layer):
    with torch.inference_mode():
        layer.in_proj_weight.mul_(1.5)


CHANGES = [
    swap_rows, negate, transpose, replace, back_and_forth, copied, from_vector, state_dict, assigned, new_parameter,
    other_type, inference,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes(change):
    layer = random_layer()
    for _ in range(2):
        before = packed(layer)
        change(layer)
        after = packed(layer)
        assert torch.equal(after, fresh(layer))
        if change not in (copied, new_parameter):  # which do the same twice
            assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers(kind):
    layer = random_layer()
    for _ in range(3):
        before = packed(layer)
        gradient_step(layer, kind)
        after = packed(layer)
        assert torch.equal(after, fresh(layer)) and not torch.equal(before, after)


def test_changes_of_what_is_no_parameter():
    """Weights that are computed, or masked, stand in the place of a parameter."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    ours = rapt.torch.convert(copy.deepcopy(theirs))

    def same():
        with torch.no_grad():
            torch.testing.assert_close(ours(X, X, X)[0], theirs(X, X, X)[0])

    for module in (ours, theirs):
        mask = torch.arange(3 * E * E).view(3 * E, E) % 3 > 0
        prune.custom_from_mask(module, "in_proj_weight", mask)
        assert "in_proj_weight" not in module._parameters
    same()
    for module in (ours, theirs):
        module.in_proj_weight_orig.data[0, 1] = 9
    same()
    for module in (ours, theirs):
        prune.remove(module, "in_proj_weight")
        parametrizations.weight_norm(module, "in_proj_weight")
        parametrizations.weight_norm(module.out_proj, "weight")
    same()
    for module in (ours, theirs):
        module.parametrizations.in_proj_weight.original0.data[3] *= 1.5
        module.out_proj.parametrizations.weight.original1.data[3, 4] += 1.5
    same()


def test_changes_of_settings():
    layer = random_layer()
    for name, value in (("batch_first", False), ("num_heads", 2 * H), ("add_zero_attn", True)):
        before = packed(layer)
        setattr(layer, name, value)
        layer.head_dim = E // layer.num_heads
        assert torch.equal(packed(layer), layer(X, X, X)[0].detach()) and not torch.equal(packed(layer), before)


@pytest.mark.parametrize("missing", ["in_proj_bias", "out_proj.bias"])
def test_one_bias_of_two(missing):
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    module = theirs.out_proj if "." in missing else theirs
    setattr(module, missing.split(".")[-1], None)
    ours = rapt.torch.convert(copy.deepcopy(theirs))
    expected = theirs(X, X, X)[0]
    with torch.no_grad():
        torch.testing.assert_close(ours(X, X, X)[0], expected, atol=1e-5, rtol=1e-5)
    assert "_rapt_packed" in vars(ours)


def test_inference_tensors():
    with torch.inference_mode():
        layer = random_layer()
        for spot in (0, 77, -1):
            packed(layer)
            before = vars(layer)["_rapt_packed"]
            layer.in_proj_weight.view(-1)[spot] += 1
            assert torch.equal(packed(layer), fresh(layer)) and vars(layer)["_rapt_packed"] is not before


def test_frozen_weights():
    layer = random_layer()
    assert layer.freeze_weights() is layer
    before = packed(layer)
    layer.in_proj_weight.data[0, 0] += 1  # breaks the promise
    assert torch.equal(packed(layer), before)
    layer.repack()
    assert torch.equal(packed(layer), fresh(layer)) and not torch.equal(packed(layer), before)
    for change in (copied, state_dict, replace, new_parameter):  # show without a look at the numbers
        change(layer)
        assert torch.equal(packed(layer), fresh(layer))
    gradient_step(layer, torch.optim.SGD)
    assert torch.equal(packed(layer), fresh(layer))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._rapt_frozen and torch.equal(packed(other), packed(layer))
    layer.freeze_weights(False)
    layer.in_proj_weight.data[0, 0] += 1
    assert torch.equal(packed(layer), fresh(layer))
    layer.in_proj_weight.data[0, 0] += 1
    layer.freeze_weights()
    rapt.torch.unconvert(layer)
    assert "_rapt_frozen" not in vars(layer) and "_rapt_packed" not in vars(layer)
