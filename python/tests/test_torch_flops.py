"""What torch.utils.flop_counter counts for Rapt's operators: the same as for PyTorch's own."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


def count(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def make(*shape):
    return torch.randn(shape, requires_grad=True)


def mask(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("backward", ["none", "within", "alone"])
@pytest.mark.parametrize(
    "shapes, options",
    [
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {}),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {"is_causal": True}),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {"attn_mask": mask(6, 5)}),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {"attn_mask": make(6, 5)}),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {"dropout_p": 0.5}),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3)], {}),
        ([(2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8)], {"enable_gqa": True}),
        ([(3, 6, 8), (3, 5, 8), (3, 5, 8)], {}),
    ],
    ids=str,
)
def test_attention(shapes, options, backward):
    tensors = [make(*s) for s in shapes]
    found = []
    for function in (rapt.torch.scaled_dot_product_attention, F.scaled_dot_product_attention):

        def attend(f=function):
            return f(*tensors, **options).sum()

        if backward == "alone":
            found.append(count(attend().backward))
        else:
            found.append(count(attend if backward == "none" else lambda run=attend: run().backward()))
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("backward", ["none", "within", "alone"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"kdim": 16, "vdim": 16}, {"kdim": 8, "vdim": 12}, {"add_bias_kv": True, "add_zero_attn": True},
        {"dropout": 0.5}, {"batch_first": True},
    ],
    ids=str,
)  # fmt: skip
def test_layer(settings, need_weights, backward):
    theirs = nn.MultiheadAttention(16, 4, **settings)
    ours = rapt.torch.MultiheadAttention(16, 4, **settings)
    query = make(6, 6, 16)
    key, value = (torch.randn(6, 6, settings[name]) if name in settings else query for name in ("kdim", "vdim"))
    found = []
    for layer in (ours, theirs):

        def attend(layer=layer):
            return layer(query, key, value, need_weights=need_weights)[0].sum()

        if backward == "alone":
            found.append(count(attend().backward))
        else:
            found.append(count(attend if backward == "none" else lambda run=attend: run().backward()))
    assert found[0] == found[1] > 0


def test_modules_and_counters_of_the_callers():
    """A formula of the user's own goes first; counts go to the modules that computed."""
    model = nn.Sequential(rapt.torch.MultiheadAttention(16, 4))
    x = make(6, 16)
    with FlopCounterMode(display=False) as counter:
        model[0](x, x, x)
    assert counter.get_flop_counts()["MultiheadAttention"][torch.ops.rapt.attention] == 2 * 6 * 6 * (16 + 16)
    own = FlopCounterMode(display=False, custom_mapping={torch.ops.rapt.attention: lambda *shapes, **more: 7})
    with own:
        rapt.torch.scaled_dot_product_attention(*(make(1, 1, 2, 3) for _ in range(3)))
    assert own.get_total_flops() == 7


def test_nothing_is_imported_for_it():
    code = (
        "import sys, rapt.torch; assert 'torch.utils.flop_counter' not in sys.modules\n"
        "import torch; from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.ones(1, 1, 2, 3)\n"
        "with FlopCounterMode(display=False) as counter: rapt.torch.scaled_dot_product_attention(q, q, q)\n"
        "assert counter.get_total_flops() == 48"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
