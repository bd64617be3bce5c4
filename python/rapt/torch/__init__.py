"""Rapt in PyTorch: its functions and its layer with Rapt's kernels, on the CPU.

>>> import torch, rapt.torch
>>> x = torch.rand(1, 8, 128, 64, requires_grad=True)
>>> rapt.torch.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
"""

from rapt.torch._attention import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
