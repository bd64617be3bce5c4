"""PyTorch: its attention operator and nn.MultiheadAttention, eager, and the formulas compiled."""

import torch
from torch.nn import functional as F

PRODUCTS_ONLY = False
TRAINS = True

inference = None  # entered once for a shape: entering it for each call costs microseconds


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    return torch.__version__.split("+")[0]


def array(output: torch.Tensor):
    return output.detach().numpy()


def set_inference(enabled: bool) -> None:
    global inference
    if inference is not None:
        inference.__exit__(None, None, None)
        inference = None
    if enabled:
        inference = torch.inference_mode()
        inference.__enter__()


def with_gradients(function, inputs, d_out):
    """function(*inputs) and its gradients by all inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]

    def run():
        out = function(*inputs)
        torch.autograd.grad(out, inputs, d_out)
        return out

    return lambda: run


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


def trained_operator(p):
    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=p.group > 1)

    def by_formula(q, k, v):
        k, v = (t.repeat_interleave(p.group, 1) if p.group > 1 else t for t in (k, v))
        return formula(q, k, v, p.d**-0.5, p.causal)

    inputs, d_out = [torch.from_numpy(a) for a in (p.q, p.k, p.v)], torch.from_numpy(p.d_out)
    yield "sdpa", with_gradients(sdpa, inputs, d_out)
    yield "sdpa, tokens first", with_gradients(sdpa, [tokens_first(t) for t in inputs], tokens_first(d_out))
    yield "formula", with_gradients(by_formula, inputs, d_out)
    yield "formula, compiled", with_gradients(torch.compile(by_formula, dynamic=False), inputs, d_out)


def trained_layer(p):
    inputs = [torch.from_numpy(a) for a in (p.x, p.w_in, p.b_in, p.w_out, p.b_out)]
    d_out = torch.from_numpy(p.d_out)

    def module(x, w_in, b_in, w_out, b_out):
        x = x.transpose(0, 1)  # what the module does with batch_first
        out, _ = F.multi_head_attention_forward(
            x, x, x, p.embed_dim, p.heads, w_in, b_in, None, None, False, 0.0, w_out, b_out, need_weights=False
        )
        return out.transpose(0, 1)

    def by_hand(x, w_in, b_in, w_out, b_out):
        q, k, v = F.linear(x, w_in, b_in).view(p.n, p.l, 3, p.heads, p.d).permute(2, 0, 3, 1, 4).unbind(0)
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), w_out, b_out)

    yield "multi_head_attention_forward", with_gradients(module, inputs, d_out)
    yield "linear, sdpa, linear", with_gradients(by_hand, inputs, d_out)
    yield "linear, sdpa, linear, compiled", with_gradients(torch.compile(by_hand, dynamic=False), inputs, d_out)


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
    set_inference(not p.trains)
    if p.trains:
        return trained_layer(p) if p.is_layer else trained_operator(p)
    return layer(p) if p.is_layer else operator(p)
