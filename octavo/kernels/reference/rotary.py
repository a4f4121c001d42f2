"""Rotary positions: the specification of the kernel in `octavo.kernels.cuda.rotary`, which equals it bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.cast import amax


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, *, backward: bool = False) -> Tensor:
    """See `octavo.kernels.rotary`. Products and sums are rounded apart, to FP32, then once to the dtype of `qkv`."""
    out = qkv.clone(memory_format=torch.contiguous_format)
    rotary_(out, cos, -sin if backward else sin, heads)
    return out


def rotary_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """See `octavo.kernels.rotary`."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = qkv[..., :heads, :].chunk(2, dim=-1)
    qkv[..., :heads, :] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.rotary`."""
    out = torch.cat((dq, dk, dv), dim=-2)
    if cos is not None and sin is not None:
        rotary_(out, cos, -sin, dq.shape[-2] + dk.shape[-2])
    return out, amax(out)
