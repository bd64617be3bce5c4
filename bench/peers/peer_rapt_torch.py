"""rapt.torch and PyTorch in one process: what replaces a call of PyTorch's beside that call.

PyTorch's other ways to the same numbers (formulas, compiled ones) are peer_pytorch's.
"""

import copy

import peer_pytorch
import rapt
import rapt.torch
import torch
from peer_pytorch import array, set_inference, tokens_first, with_gradients  # noqa: F401 - array is the worker's
from torch import nn
from torch.nn import functional as F

PRODUCTS_ONLY = False
TRAINS = True
SIDES = ("rapt.torch", "PyTorch")  # what a variant's name begins with; the best of each is timed


def start(threads: int) -> str:
    """The threads are PyTorch's; rapt.torch computes on them, too."""
    return f"{rapt.__version__} with PyTorch {peer_pytorch.start(threads)}"


def operator(p):
    tensors = [torch.from_numpy(a) for a in ((p.q, p.k, p.v, p.d_out) if p.trains else (p.q, p.k, p.v))]
    options = {"is_causal": p.causal, "enable_gqa": p.group > 1}
    for layout in ("", ", tokens first"):
        *inputs, last = (tokens_first(t) for t in tensors) if layout else tensors
        for side, sdpa in zip(SIDES, (rapt.torch.scaled_dot_product_attention, F.scaled_dot_product_attention)):
            if p.trains:
                make = with_gradients(lambda *inputs, sdpa=sdpa: sdpa(*inputs, **options), inputs, last)
            else:
                make = lambda sdpa=sdpa, inputs=(*inputs, last): lambda: sdpa(*inputs, **options)  # noqa: E731
            yield side + layout, make


def on_modules(p, modules):
    """Modules that are called with x, and give gradients of x and of all parameters if the shape trains."""
    x = torch.from_numpy(p.x)
    for side, (module, call) in zip(SIDES, modules):
        if p.trains:
            inputs = x.clone().requires_grad_()
            wanted, d_out = (inputs, *module.parameters()), torch.from_numpy(p.d_out)

            def run(call=call, inputs=inputs, wanted=wanted, d_out=d_out):
                out = call(inputs)
                torch.autograd.grad(out, wanted, d_out)
                return out

        else:
            module.eval().requires_grad_(False)

            def run(call=call):
                return call(x)

        yield side, lambda run=run: run


def layer(p):
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    weights = dict(zip(names, (torch.from_numpy(a) for a in (p.w_in, p.b_in, p.w_out, p.b_out))))

    def made(kind):
        module = kind(p.embed_dim, p.heads, batch_first=True)
        module.load_state_dict(weights)
        return module, lambda x: module(x, x, x, need_weights=False)[0]

    return on_modules(p, [made(rapt.torch.MultiheadAttention), made(nn.MultiheadAttention)])


def encoder(p):
    """A model of PyTorch's, and a copy of it converted in one line. Without dropout, so that they can be compared."""
    block = nn.TransformerEncoderLayer(p.embed_dim, p.heads, p.feed_forward, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(block, p.layers)
    ours = rapt.torch.convert(copy.deepcopy(theirs))
    x = torch.from_numpy(p.x)
    with torch.no_grad():
        p.expected = theirs(x)[:, p.rows].numpy()
    return on_modules(p, [(ours, ours), (theirs, theirs)])


def variants(p):
    set_inference(not p.trains)
    return encoder(p) if p.layers > 0 else layer(p) if p.is_layer else operator(p)
