"""Rapt in PyTorch: its functions and its layer with Rapt's kernels, on the CPU.

>>> import torch, rapt.torch
>>> x = torch.rand(1, 8, 128, 64, requires_grad=True)
>>> rapt.torch.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
>>> model = rapt.torch.convert(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True))
"""

from rapt.torch._attention import scaled_dot_product_attention
from rapt.torch._functional import multi_head_attention_forward
from rapt.torch._layer import MultiheadAttention, convert, sdpa, unconvert
from rapt.torch._results import release_memory
from rapt.torch._transformers import register_transformers

__all__ = [
    "MultiheadAttention",
    "convert",
    "multi_head_attention_forward",
    "register_transformers",
    "release_memory",
    "scaled_dot_product_attention",
    "sdpa",
    "unconvert",
]
