"""oneDNN: attention as one partition of its graph API.

PyPI's oneDNN runs on SYCL, for which its fused kernel for attention is not built; DNNL_ROOT names another installation,
such as one built from source with OpenMP.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PRODUCTS_ONLY = False


class Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("ndim", ctypes.c_int64),
                ("sizes", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5)]


NONE = Array()


def start(threads: int) -> str:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # its SYCL takes as many threads as it has cores
    root = Path(os.environ.get("DNNL_ROOT", sys.prefix))
    os.environ.setdefault("OCL_ICD_FILENAMES", str(root / "lib/libintelocl.so"))  # SYCL's CPU device
    os.environ.setdefault("CL_CONFIG_CPU_FORCE_PLATFORM", "1")  # on other makers' CPUs, too
    source = Path(__file__).with_name("onednn_graph.cpp")
    built = Path(os.environ["RAPT_BUILD"]) / "libonednn_graph.so"
    link = [f"-L{root}/lib", "-ldnnl", f"-Wl,-rpath,{root}/lib,--disable-new-dtags,-rpath-link,{root}/lib"]
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{root}/include", source,
                    *link, "-o", built], check=True)
    global library
    library = ctypes.CDLL(str(built))
    library.onednn_message.restype = ctypes.c_char_p
    for name in ("attention", "linear"):
        getattr(library, f"onednn_{name}").restype = ctypes.c_void_p
    library.dnnl_version.restype = ctypes.POINTER(ctypes.c_int)
    return ".".join(map(str, library.dnnl_version()[:3]))


def array(output: np.ndarray) -> np.ndarray:
    return output


class Job:
    def __init__(self, kind: str, *arrays: np.ndarray | None):
        self.arrays = arrays  # kept alive
        self.made = getattr(library, f"onednn_{kind}")(*(ctypes.byref(self.described(a)) for a in arrays))
        if not self.made:
            raise ValueError(library.onednn_message().decode())
        self.made = ctypes.c_void_p(self.made)

    def __del__(self):
        if self.made:
            library.onednn_free(self.made)

    @staticmethod
    def described(a: np.ndarray | None) -> Array:
        if a is None:
            return NONE
        filled = [0] * (5 - a.ndim)
        sizes, strides = [*a.shape, *filled], [*(s // a.itemsize for s in a.strides), *filled]
        return Array(a.ctypes.data, a.ndim, (ctypes.c_int64 * 5)(*sizes), (ctypes.c_int64 * 5)(*strides))

    def run(self) -> None:
        library.onednn_run(self.made)


def attention(p, q, k, v, out) -> Job:
    mask = None
    if p.causal:
        mask = np.triu(np.full((p.l, p.s), -np.inf, np.float32), 1).reshape((1,) * (q.ndim - 2) + (p.l, p.s))
    return Job("attention", q, k, v, np.array([p.d**-0.5], np.float32), mask, out)


def operator(p):
    def call(q, k, v):
        def make():
            out = np.empty_like(q)
            job = attention(p, q, k, v, out)
            return lambda: (job.run(), out)[1]

        return make

    if p.group == 1:
        yield "graph", call(p.q, p.k, p.v)
        lying = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (p.q, p.k, p.v)]
        yield "graph, tokens first", call(*lying)
    else:
        five = p.q.reshape(p.n, p.kv_heads, p.group, p.l, p.d)
        yield "graph, shared keys", call(five, p.k[:, :, None], p.v[:, :, None])
        yield "graph, expanded", call(p.q, p.expanded(p.k), p.expanded(p.v))
        if not p.causal:
            yield "graph, grouped", call(p.grouped_q(), p.k, p.v)


def layer(p):
    def make():
        packed = np.empty((p.n * p.l, 3 * p.embed_dim), np.float32)
        heads, out = np.empty((2, p.n * p.l, p.embed_dim), np.float32)
        q, k, v = packed.reshape(p.n, p.l, 3, p.heads, p.d).transpose(2, 0, 3, 1, 4)
        jobs = [Job("linear", p.x.reshape(-1, p.embed_dim), p.w_in, p.b_in, packed),
                attention(p, q, k, v, heads.reshape(p.n, p.l, p.heads, p.d).swapaxes(1, 2)),
                Job("linear", heads, p.w_out, p.b_out, out)]

        def run():
            for job in jobs:
                job.run()
            return out

        return run

    yield "linear, graph, linear", make


def variants(p):
    return layer(p) if p.is_layer else operator(p)
