"""LayerNorm and RMSNorm that write FP8: what a linear layer reads of the norm before it, without the norm in between.

A norm in BF16 reads x and writes y, and the cast of y reads that twice, for its largest value and for the codes: 8 bytes an element,
before the two that a linear layer keeps. Here y exists in registers only, and 4 bytes are left: `norm_stats` reads x for the statistics
of its rows and the largest |y|, `norm_cast` for the codes. A scale from the past saves neither read, for a program that writes
transposed codes holds a part of many rows, and not their sums. Where x is a sum with which the residual stream goes on,
`add_norm_stats` makes it on the way, and so saves a read of 2 bytes.

Saved for backward are x and 4 or 8 bytes a row. n = (x - mean) · rstd would save backward a subtraction and a product, and cost 2
bytes an element, for x, the residual stream, lives anyway. y is rounded to the dtype of x before it is cast, so that the codes are
those of the separate operations.

`mean` is None for RMSNorm throughout. weight and bias [K] are of any float and are read as they are, not rounded to the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import ops_norm
from octavo.kernels.dispatch import backend


def norm_stats(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Statistics of the rows of x [M, K] and of y = (x - mean) · rstd · weight + bias: (mean FP32 [M], rstd FP32 [M], amax of y).

    rstd = 1 / √(mean of (x - mean)² + eps); the amax is FP32, 0-d, of y in the dtype of x, NaN and infinity included.

    Args:
        centered: LayerNorm if true; RMSNorm if not, whose mean is None and which takes no bias.

    Raises `ValueError` for shapes that do not match, or a bias of RMSNorm.
    """
    _check(x, weight, bias, centered)
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    if is_compiling():
        mean, rstd, amax = ops_norm.norm_stats(x, weight, bias, eps, centered)
        return mean if centered else None, rstd, amax
    return backend(x).norm_stats(x, weight, bias, eps, centered=centered)


def add_norm_stats(
    x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(x + addend, contiguous, in the dtype of x; mean, rstd and amax as `norm_stats` of it).

    `addend` [M, K] has the dtype of x. Raises `ValueError` as `norm_stats`, and for an addend of another shape or dtype.
    """
    _check(x, weight, bias, centered)
    if addend.shape != x.shape or addend.dtype != x.dtype:
        raise ValueError(
            f"the addend {addend.dtype} {tuple(addend.shape)} is to be like x, {x.dtype} {tuple(x.shape)}: a sum does not broadcast here"
        )
    x, addend, weight, bias = x.detach(), addend.detach(), weight.detach(), None if bias is None else bias.detach()
    if is_compiling():
        total, mean, rstd, amax = ops_norm.add_norm_stats(x, addend, weight, bias, eps, centered)
        return total, mean if centered else None, rstd, amax
    return backend(x).add_norm_stats(x, addend, weight, bias, eps, centered=centered)


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
    """`cast_transpose_amax` of the norm y of x [M, K] with the statistics mean and rstd: (codes [Mp, Kp], codes_t [Kp, Mp], amax of y).

    What is not wanted (`row`, `col`, `amax`) is None. One pass over x. Given the same statistics, every device gives the same bits.
    `scale` is FP32, 0-d.
    Raises `ValueError` for shapes that do not match, or a bias of RMSNorm.
    """
    _check(x, weight, bias, mean is not None, mean, rstd)
    if scale.dim() != 0:
        raise ValueError(f"the scale of a norm's operand is 0-d, not {tuple(scale.shape)}")
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    if is_compiling():
        counted = stats is not None
        codes, codes_t, counts, maximum = ops_norm.norm_cast(
            x, weight, bias, mean, rstd, scale, dtype, row, col, amax, counted
        )
        if stats is not None:
            stats += counts
        return codes if row else None, codes_t if col else None, maximum if amax else None
    return backend(x).norm_cast(x, weight, bias, mean, rstd, scale, dtype, row=row, col=col, amax=amax, stats=stats)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of a norm for that of its result, dy [M, K]: (dx [M, K] in the dtype of x, dweight and dbias FP32 [K], amax of dx).

    `residual_grad` [M, K], what reaches x past the norm, is added to dx in FP32 before the one rounding. RMSNorm's dbias is None.
    The amax, FP32 0-d, is for whoever casts dx: the layer before reads it as the gradient of its output.
    The sums over rows are the same in each run. Raises `ValueError` for shapes that do not match.
    """
    _check(x, weight, None, mean is not None, mean, rstd)
    if dy.shape != x.shape or residual_grad is not None and residual_grad.shape != x.shape:
        raise ValueError(
            f"dy {tuple(dy.shape)}, and residual_grad if given, are to have the shape of x, {tuple(x.shape)}"
        )
    dy, x, weight = dy.detach(), x.detach(), weight.detach()
    residual_grad = None if residual_grad is None else residual_grad.detach()
    if is_compiling():
        dx, dweight, dbias, amax = ops_norm.norm_backward(dy, x, weight, mean, rstd, residual_grad)
        return dx, dweight, None if mean is None else dbias, amax
    return backend(x).norm_backward(dy, x, weight, mean, rstd, residual_grad)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool, *stats: Tensor | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"a norm takes a matrix, but x has shape {tuple(x.shape)}: flatten it to [tokens, features]")
    if bias is not None and not centered:
        raise ValueError("RMSNorm has no bias: its gradient would be lost")
    m, k = x.shape
    for name, vector, size in [("weight", weight, k), ("bias", bias, k), *[("a statistic", one, m) for one in stats]]:
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{name} of a norm of x {tuple(x.shape)} has shape ({size},), not {tuple(vector.shape)}")
