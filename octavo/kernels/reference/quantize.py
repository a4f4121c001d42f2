"""Current scaling: the scale of a tensor is that of its own largest value, and codes follow from both.

Two kinds of result treat a value that is not finite, which a cast would hide by saturating it, in two ways. An operand of a GEMM gets
the scale NaN, so that all that is computed from it is NaN. A stored tensor must keep a usable scale, and gets NaN codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.cast import amax as largest
from octavo.kernels.reference.cast import cast, cast_transpose, scale_from_amax


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    column_sum: torch.dtype | None = None,
    amax: Tensor | None = None,
    unit: Tensor | None = None,
    stats: Tensor | None = None,
    hint: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """(codes, codes_t, scale, inverse, column_sum) of `x` [M, K], or of x - shift: `cast_transpose` with the scale of its own amax.

    The scale returned is visible (see `visible_scale`), and inverse is its reciprocal; column_sum is [K], before the cast.
    No result depends on `hint`.
    """
    if shift is not None:
        x = x - shift
    maximum = largest(x) if amax is None else amax
    scale = scale_from_amax(maximum, fmt.max, power_of_two)
    codes, codes_t = cast_transpose(x, scale, fmt.dtype, row=row, col=col, stats=stats)
    visible, inverse = visible_scale(scale, maximum, unit)
    sums = None if column_sum is None else x.sum(0, dtype=torch.float32).to(column_sum)
    return codes, codes_t, visible, inverse, sums


def row_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """(the sums of the rows of `x` [M, N], FP32 [M]; its amax, FP32, 0-d)."""
    return x.sum(1, dtype=torch.float32), largest(x)


def cast_current(
    x: Tensor, fmt: Format, *, stats: Tensor | None = None, hint: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, largest): `cast` of `x`, of any shape, with the scale of its own amax; codes all NaN and scale 1 if a value is
    not finite. largest is the amax of the codes: rounding keeps the order, so that it is the code of the amax. No result
    depends on `hint`.
    """
    maximum = largest(x)
    scale = scale_from_amax(maximum, fmt.max)
    multiplier = torch.where(maximum.isfinite(), scale, torch.nan)
    return cast(x, multiplier, fmt.dtype, stats=stats), scale, cast(maximum, multiplier, fmt.dtype).float()


def current_scale(amax: Tensor, max: float, power_of_two: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(scale_from_amax(amax), and `visible_scale` of it), FP32, 0-d."""
    scale = scale_from_amax(amax, max, power_of_two)
    return scale, *visible_scale(scale, amax)


def visible_scale(
    scale: Tensor, amax: Tensor, unit: Tensor | None = None, pending: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scale · unit, or NaN where amax is not finite; its reciprocal), FP32, 0-d; pending = max(pending, amax if finite), in place."""
    visible = torch.where(amax.isfinite(), scale, torch.nan)
    if unit is not None:
        visible = visible * unit
    if pending is not None:
        pending.copy_(torch.where(amax.isfinite(), torch.maximum(pending, amax), pending))
    return visible, visible.reciprocal()
