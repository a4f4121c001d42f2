"""LayerNorm and RMSNorm whose result is written as FP8 operands, and their gradient; see `octavo.kernels.norm`.

    d = x - mean (or x)      rstd = 1 / √(Σ d² / K + eps)      n = d · rstd      y = n · weight + bias, rounded to the dtype of x

Everything is FP32, each operation rounded on its own in the written order; a sum along a row or a column has no order of its own, so
other implementations may differ in the last bits of mean, rstd and the gradients. From equal mean and rstd follow equal codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.cast import amax as largest
from octavo.kernels.reference.cast import cast_transpose


def norm_stats(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(mean FP32 [M], or None unless `centered`; rstd FP32 [M]; amax of y, FP32 0-d) of the rows of x [M, K]."""
    values, size = x.float(), x.shape[1]
    mean = values.sum(-1) / size if centered else None
    centred = values if mean is None else values - mean[:, None]
    deviation = (centred.square().sum(-1) / size + eps).sqrt()
    rstd = torch.ones_like(deviation) / deviation
    return mean, rstd, largest(normalize(x, weight, bias, mean, rstd))


def add_norm_stats(
    x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(x + addend, and `norm_stats` of it)."""
    total = (x + addend).contiguous()
    return total, *norm_stats(total, weight, bias, eps, centered=centered)


def norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(codes [Mp, Kp], codes_t [Kp, Mp], amax) of y, as `cast_transpose_amax` gives them."""
    y = normalize(x, weight, bias, mean, rstd)
    return *cast_transpose(y, scale, dtype, row=row, col=col, stats=stats), largest(y) if amax else None


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(dx [M, K] in the dtype of x, dweight FP32 [K], dbias FP32 [K], or None without a mean, amax of dx).

    With g = dy · weight and means over the row: dx = (g - mean(g) - n · mean(g · n)) · rstd + residual_grad; RMSNorm has no mean(g).
    """
    n, dy, size = _standardize(x, mean, rstd), dy.float(), x.shape[1]
    dweight = (dy * n).sum(0)
    dbias = None if mean is None else dy.sum(0)
    g = dy * weight.float()
    dx = g - n * ((g * n).sum(-1, keepdim=True) / size)
    if mean is not None:
        dx -= g.sum(-1, keepdim=True) / size
    dx *= rstd[:, None]
    if residual_grad is not None:
        dx += residual_grad.float()
    dx = dx.to(x.dtype).contiguous()
    return dx, dweight, dbias, largest(dx)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """y [M, K], contiguous: the norm of `x` that has these statistics, in the dtype of `x`."""
    y = _standardize(x, mean, rstd) * weight.float()
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype).contiguous()


def _standardize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """n [M, K], FP32."""
    values = x.float()
    return (values if mean is None else values - mean[:, None]) * rstd[:, None]
