"""Rotary positions: the specification of the kernels in `octavo.kernels.cuda.rotary`, which equal it bit for bit, and their casts."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.cast import amax
from octavo.kernels.reference.quantize import quantize


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


def rotary_backward_quantize(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    column_sum: torch.dtype | None = None,
    hint: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """(codes, codes_t, scale, inverse, column_sum) of what `rotary_backward` returns, as `quantize`. No result depends on `hint`."""
    dy, maximum = rotary_backward(dq, dk, dv, cos, sin)
    dy = dy.flatten(2).flatten(0, 1)
    return quantize(dy, fmt, power_of_two=power_of_two, row=row, col=col, column_sum=column_sum, amax=maximum)
