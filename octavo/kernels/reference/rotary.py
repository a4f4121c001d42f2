"""Rotary positions: the specification of the kernel in `octavo.kernels.cuda.rotary`, which equals it bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, *, backward: bool = False) -> Tensor:
    """See `octavo.kernels.rotary`. Products and sums are rounded apart, to FP32, then once to the dtype of `qkv`."""
    cos, sin = cos.unsqueeze(-2), (-sin if backward else sin).unsqueeze(-2)
    first, second = qkv[..., :heads, :].chunk(2, dim=-1)
    out = qkv.clone(memory_format=torch.contiguous_format)
    out[..., :heads, :] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out
