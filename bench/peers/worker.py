"""One library in a process of its own: prepares a shape, then times one round each time it is asked to.

    worker.py PEER THREADS    talks in lines, each answered by a line of JSON:
    about                     {"version": ...}
    prepare {shape}           {"seconds": {variant: estimate}, "refused": {variant: why}}
    round VARIANT             seconds a call

A peer is a module peer_NAME.py:
    start(threads) -> version
    variants(problem)         yields (name, make); make() returns run(), which computes everything once
    array(output)             what run() returned as a NumPy array, [N, H, L, D] or [N, L, H * D]
    PRODUCTS_ONLY             whether it leaves out the softmax
    TRAINS                    whether it knows shapes that train: run() then computes all gradients too (default: no)
    SIDES                     what names of variants begin with, if the module times several libraries in one process
"""

import functools
import gc
import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

TOLERANCE = 1e-3  # loose: it finds wrong setups, not rounding
ROUND = 1e-3  # seconds that a round takes at least
SHORT = 100e-3  # a call below this would show caches that others emptied and threads that slept, so
WARM_UP = 5e-3  # seconds of such calls come before a round untimed
SLOWER = 1.25  # a variant so much slower than its library's best is not asked for
BIG_BUFFER = 256 << 20  # bytes: far larger than any last cache
CACHE_LINE = 64  # bytes: where tensors of Rapt's and PyTorch's begin, and what NumPy allocates does not


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins with a cache line."""
    memory = np.empty(array.nbytes + CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Problem:
    """A shape with its inputs: q, k, v, or for the layer x and its weights."""

    def __init__(self, shape: dict, has_softmax: bool):
        self.layers = 0  # of an encoder
        self.__dict__.update(shape)  # n, heads, kv_heads, l, s, d, embed_dim, causal, trains, limit
        self.has_softmax = has_softmax
        self.is_layer = self.embed_dim > 0
        self.group = self.heads // self.kv_heads
        random = np.random.default_rng(1)

        def uniform(*sizes: int, scale: float = 1) -> np.ndarray:
            return aligned(((2 * random.random(sizes, np.float32) - 1) * scale).astype(np.float32))

        if self.is_layer:
            e = self.embed_dim
            self.x = uniform(self.n, self.l, e)
            self.w_in, self.b_in = uniform(3 * e, e, scale=e**-0.5), uniform(3 * e)
            self.w_out, self.b_out = uniform(e, e, scale=e**-0.5), uniform(e)
        else:
            self.q = uniform(self.n, self.heads, self.l, self.d)
            self.k, self.v = (uniform(self.n, self.kv_heads, self.s, self.d) for _ in range(2))
        if self.trains:
            self.d_out = uniform(*(self.x if self.is_layer else self.q).shape)  # the gradient of the output

    def grouped_q(self) -> np.ndarray:
        """Without a causal mask, query heads that share keys are rows of one head: [N, Hk, group * L, D]."""
        return self.q.reshape(self.n, self.kv_heads, -1, self.d)

    def expanded(self, array: np.ndarray) -> np.ndarray:
        """Keys or values with a copy for each query head."""
        return np.repeat(array, self.group, axis=1)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The queries whose outputs are verified."""
        return np.unique(np.linspace(0, self.l - 1, 8).astype(int))

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """The outputs of those queries in f64: [N, H, rows, D], of the layer [N, rows, E]."""
        if self.is_layer:
            packed = self.x.astype(np.float64) @ self.w_in.T + self.b_in
            q, k, v = packed.reshape(self.n, self.l, 3, self.heads, self.d).transpose(2, 0, 3, 1, 4)
        else:
            q, k, v = self.q.astype(np.float64), self.expanded(self.k), self.expanded(self.v)
        scores = q[:, :, self.rows] @ k.swapaxes(2, 3) * (self.d**-0.5 if self.has_softmax else 1)
        if self.causal:
            scores[..., np.arange(self.s) > self.rows[:, None]] = -np.inf
        if self.has_softmax:
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        out = scores @ v
        if self.is_layer:
            return out.swapaxes(1, 2).reshape(self.n, -1, self.embed_dim) @ self.w_out.T + self.b_out
        return out

    def verify(self, out: np.ndarray) -> None:
        if self.is_layer:
            out = out.reshape(self.n, self.l, self.embed_dim)[:, self.rows]
        else:
            if out.ndim == 3:
                out = out.reshape(self.n, out.shape[1], -1, self.d).swapaxes(1, 2)
            out = out.reshape(self.n, self.heads, self.l, self.d)[:, :, self.rows]
        error = np.abs(out - self.expected).max() / max(1, np.abs(self.expected).max())
        if not error < TOLERANCE:
            raise ValueError(f"wrong by {error:.2g}")


class Worker:
    def __init__(self, name: str, threads: int):
        self.peer = importlib.import_module(f"peer_{name}")
        self.version = self.peer.start(threads)
        self.pool = ThreadPoolExecutor(threads)
        self.big_buffer = np.array_split(np.ones(BIG_BUFFER // 4, np.float32), threads)

    def flush(self) -> None:
        list(self.pool.map(np.sum, self.big_buffer))

    def round(self, run, repeats: int, is_short: bool) -> float:
        is_cold = self.problem.limit == "read cold"
        if is_cold:
            self.flush()
        start = perf_counter()
        while is_short and not is_cold and perf_counter() - start < WARM_UP:
            run()
        start = perf_counter()
        for _ in range(repeats):
            run()
        return (perf_counter() - start) / repeats

    def prepare(self, shape: dict) -> dict:
        self.rounds, self.problem = {}, None  # the last shape's memory first
        gc.collect()
        self.problem = Problem(shape, has_softmax=not self.peer.PRODUCTS_ONLY)
        seconds, refused = {}, {}
        if self.problem.trains and not getattr(self.peer, "TRAINS", False):
            return {"seconds": {}, "refused": {}}
        for name, make in self.peer.variants(self.problem):
            try:
                run = make()
                self.problem.verify(self.peer.array(run()))
                once = self.round(run, 1, False)
                repeats = 1 if self.problem.limit == "read cold" else int(ROUND / once) + 1
                self.rounds[name] = functools.partial(self.round, run, repeats, once < SHORT)
                seconds[name] = min(self.rounds[name]() for _ in range(3)) if once < SHORT else once
            except Exception as error:  # whatever a library throws, the others are timed
                refused[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        kept = set()
        for side in getattr(self.peer, "SIDES", ("",)):
            names = [name for name in seconds if name.startswith(side)]
            limit = SLOWER * min((seconds[name] for name in names), default=0)
            kept |= {name for name in names if seconds[name] <= limit}
        self.rounds = {name: round for name, round in self.rounds.items() if name in kept}
        return {"seconds": {name: seconds[name] for name in self.rounds}, "refused": refused}

    def answer(self, line: str):
        command, _, rest = line.partition(" ")
        if command == "about":
            return {"version": self.version}
        if command == "prepare":
            return self.prepare(json.loads(rest))
        return self.rounds[rest]()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    gc.disable()
    for line in sys.stdin:
        print(json.dumps(worker.answer(line.rstrip("\n"))), file=answers, flush=True)


main()
