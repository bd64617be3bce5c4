"""PyTorch: its attention operator and nn.MultiheadAttention, eager, and the formulas compiled."""

import torch
from torch.nn import functional as F

PRODUCTS_ONLY = False


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    torch.inference_mode().__enter__()  # once for all: entering it for each call costs microseconds
    return torch.__version__.split("+")[0]


def array(output: torch.Tensor):
    return output.numpy()


def tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, lying in memory as [N, L, H, D], which is what projections give."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def formula(q, k, v, scale: float, causal: bool):
    scores = q @ k.transpose(-2, -1) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def operator(p):
    def call(function, *args, **options):
        return lambda: lambda: function(*args, **options)

    sdpa = F.scaled_dot_product_attention
    q, k, v = (torch.from_numpy(a) for a in (p.q, p.k, p.v))
    options = {"is_causal": p.causal, "enable_gqa": p.group > 1}
    yield "sdpa", call(sdpa, q, k, v, **options)
    yield "sdpa, tokens first", call(sdpa, *(tokens_first(t) for t in (q, k, v)), **options)
    rows, shared = q, (k, v)
    if p.group > 1:
        shared = [torch.from_numpy(p.expanded(a)) for a in (p.k, p.v)]
        yield "sdpa, expanded", call(sdpa, q, *shared, is_causal=p.causal)
    if p.group > 1 and not p.causal:
        rows, shared = torch.from_numpy(p.grouped_q()), (k, v)
        yield "sdpa, grouped", call(sdpa, rows, *shared)
    scale = p.d**-0.5
    yield "formula", call(formula, rows, *shared, scale, p.causal)
    yield "formula, compiled", call(torch.compile(formula, dynamic=False), rows, *shared, scale, p.causal)


def layer(p):
    x = torch.from_numpy(p.x)
    w_in, b_in, w_out, b_out = (torch.from_numpy(a) for a in (p.w_in, p.b_in, p.w_out, p.b_out))

    def module():
        mha = torch.nn.MultiheadAttention(p.embed_dim, p.heads, batch_first=True).eval().requires_grad_(False)
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        mha.load_state_dict(dict(zip(names, (w_in, b_in, w_out, b_out))))
        return lambda: mha(x, x, x, need_weights=False)[0]

    def by_hand(x):
        q, k, v = F.linear(x, w_in, b_in).view(p.n, p.l, 3, p.heads, p.d).permute(2, 0, 3, 1, 4).unbind(0)
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), w_out, b_out)

    def compiled():
        function = torch.compile(by_hand, dynamic=False)
        return lambda: function(x)

    yield "nn.MultiheadAttention", module
    yield "linear, sdpa, linear", lambda: lambda: by_hand(x)
    yield "linear, sdpa, linear, compiled", compiled


def variants(p):
    return layer(p) if p.is_layer else operator(p)
