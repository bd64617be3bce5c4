"""Multi-head attention on the CPU: PyTorch's numbers, the same bits everywhere.

>>> import numpy as np, rapt
>>> x = np.random.rand(1, 8, 128, 64).astype(np.float32)
>>> y = rapt.scaled_dot_product_attention(x, x, x, is_causal=True)

Arrays are NumPy's, PyTorch's or JAX's, or buffers, of any strides; they are not copied, and results are of the query's
kind. Each Python thread computes for itself while the interpreter's lock is released; one pool of threads serves all.
"""

from rapt._attention import scaled_dot_product_attention
from rapt._cache import KVCache
from rapt._core import get_num_threads, manual_seed, set_num_threads
from rapt._core import version as __version__
from rapt._layer import MultiheadAttention, State, layers, load, save

__all__ = [
    "KVCache",
    "MultiheadAttention",
    "State",
    "__version__",
    "get_num_threads",
    "layers",
    "load",
    "manual_seed",
    "save",
    "scaled_dot_product_attention",
    "set_num_threads",
]
