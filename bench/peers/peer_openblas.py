"""OpenBLAS as it comes with NumPy's wheel: the matrix products alone, without the softmax between them."""

import numpy as np

PRODUCTS_ONLY = True
BLOCK = 256  # rows of scores that stay in a cache between the products


def start(threads: int) -> str:  # OPENBLAS_NUM_THREADS is set for every worker
    return np.show_config("dicts")["Build Dependencies"]["blas"]["version"]


def array(output: np.ndarray) -> np.ndarray:
    return output


def attention(p, block: int, q, k, v, out):
    """All are [N, H, L, D]; query heads that share keys are rows of one head."""
    scores = np.empty((min(block, q.shape[2]), p.s), np.float32)

    def run():
        for i in np.ndindex(q.shape[:2]):
            for row in range(0, q.shape[2], block):
                rows = q[i][row : row + block]
                part = scores[: len(rows)]
                np.matmul(rows, k[i].T, out=part)
                np.matmul(part, v[i], out=out[i][row : row + block])
        return out

    return run


def layer(p, block: int):
    packed = np.empty((p.n * p.l, 3 * p.embed_dim), np.float32)
    heads, out = np.empty((2, p.n * p.l, p.embed_dim), np.float32)
    q, k, v = packed.reshape(p.n, p.l, 3, p.heads, p.d).transpose(2, 0, 3, 1, 4)
    attend = attention(p, block, q, k, v, heads.reshape(p.n, p.l, p.heads, p.d).swapaxes(1, 2))

    def run():
        np.matmul(p.x.reshape(-1, p.embed_dim), p.w_in.T, out=packed)
        np.add(packed, p.b_in, out=packed)
        attend()
        np.matmul(heads, p.w_out.T, out=out)
        return np.add(out, p.b_out, out=out)

    return run


def variants(p):
    if p.causal:  # whole products would be twice the work
        return

    def products(block: int):
        if p.is_layer:
            return layer(p, block)
        return attention(p, block, p.grouped_q(), p.k, p.v, np.empty_like(p.grouped_q()))

    yield "whole heads", lambda: products(p.group * p.l)
    if p.group * p.l > BLOCK:
        yield f"{BLOCK} rows at a time", lambda: products(BLOCK)
