"""JAX: its attention function and the formula, compiled by XLA."""

import os

import numpy as np

PRODUCTS_ONLY = False
TRAINS = True


def start(threads: int) -> str:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # XLA takes as many threads as it has cores
    os.environ["JAX_PLATFORMS"] = "cpu"
    global jax, jnp
    import jax
    import jax.numpy as jnp

    return jax.__version__


def array(output) -> np.ndarray:
    return np.asarray(output)


def jitted(function, *inputs: np.ndarray):
    compiled = jax.jit(function).lower(*inputs).compile()
    on_device = [jax.device_put(a) for a in inputs]
    return lambda: compiled(*on_device).block_until_ready()


def jitted_for(p, function, d_out, *inputs: np.ndarray):
    """The function, and if the shape trains its gradients by all inputs."""
    if not p.trains:
        return jitted(function, *inputs)

    def with_gradients(d_out, *inputs):
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(d_out)

    compiled = jax.jit(with_gradients).lower(d_out, *inputs).compile()
    on_device = [jax.device_put(a) for a in (d_out, *inputs)]
    return lambda: jax.block_until_ready(compiled(*on_device))[0]


def operator(p):
    d_out = p.d_out if p.trains else None
    d_rows = None if d_out is None else d_out.swapaxes(1, 2).reshape(p.n, p.l, -1)

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=p.causal).reshape(p.n, p.l, -1)

    def formula(q, k, v):
        scores = q @ k.swapaxes(2, 3) * p.d**-0.5
        if p.causal:
            scores = jnp.where(jnp.tril(jnp.ones((p.l, p.s), bool)), scores, -jnp.inf)
        return jax.nn.softmax(scores) @ v

    yield "dot_product_attention", lambda: jitted_for(p, attention, d_rows, *(a.swapaxes(1, 2) for a in (p.q, p.k, p.v)))
    if p.group == 1 or p.causal:
        yield "formula", lambda: jitted_for(p, formula, d_out, p.q, p.expanded(p.k), p.expanded(p.v))
    else:
        yield "formula, grouped", lambda: jitted_for(
            p, formula, None if d_out is None else d_out.reshape(p.n, p.kv_heads, -1, p.d), p.grouped_q(), p.k, p.v
        )


def layer(p):
    def forward(x, w_in, b_in, w_out, b_out):
        q, k, v = jnp.moveaxis((x @ w_in + b_in).reshape(p.n, p.l, 3, p.heads, p.d), 2, 0)
        return jax.nn.dot_product_attention(q, k, v).reshape(p.n, p.l, -1) @ w_out + b_out

    inputs = p.x, p.w_in.T.copy(), p.b_in, p.w_out.T.copy(), p.b_out
    yield "dense, dot_product_attention, dense", lambda: jitted_for(p, forward, p.d_out if p.trains else None, *inputs)


def variants(p):
    return layer(p) if p.is_layer else operator(p)
