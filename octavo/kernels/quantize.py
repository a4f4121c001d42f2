"""Current scaling: a tensor is cast with the scale of its own largest value, in two launches (see `octavo.kernels`).

The tensor is read twice, 2 + 2 bytes an element of BF16, because the scale needs the largest value before the first code. What else one
wants of it, transposed codes or the sum of its columns, comes from the second read. A `hint` of the scale, one that was right for the
last such tensor, spares a large tensor the first read wherever it is still right: the codes and the scale are the same in every bit.

A hint is int32, 0-d, on the device of the tensor, and zero in the beginning; kernels write to it. It is no result, and none depends on what
it holds: a compiler may drop such a write, repeat it or move it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.formats import Format
from octavo.kernels import ops, ops_quantize
from octavo.kernels.dispatch import backend
from octavo.kernels.maxima import kept_amax


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    column_sum: bool | torch.dtype = False,
    amax: Tensor | None = None,
    keep_amax: bool = False,
    unit: Tensor | None = None,
    return_inverse: bool = False,
    stats: Tensor | None = None,
    hint: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Any, ...]:
    """(codes, codes_t, scale, column_sum): `x` [M, K] as operands of both GEMMs that read it, scaled by its own largest value.

    codes [Mp, Kp] and codes_t [Kp, Mp] as of `cast_transpose` with scale_from_amax(amax(x)). A value that is not finite, which the
    cast saturates, shows in the scale returned: FP32, 0-d, and then NaN.

    Args:
        fmt: E4M3 or E5M2.
        power_of_two: of the scale.
        row, col: codes and codes_t that are not wanted are None.
        column_sum: sum the columns of x (not of the codes), [K], in FP32, which a dtype given here rounds to it; the order of the terms is
            fixed, but is the device's. Else None.
        amax: that of x, FP32 0-d, if whoever made x knows it: then nothing is read for it. (Column sums are made from the first read, so
            that with `column_sum` it is of no use.)
        keep_amax: x is read many times before it changes, as weights are: take its amax from the tensor, where the first call leaves it
            (`octavo.kernels.maxima`).
        unit: FP32, 0-d: x stands for the real values x / unit, and the scale returned is the one of these.
        return_inverse: return 1 / scale as well, as a fifth result, for `scaled_mm_nt`.
        stats: as in `cast`.
        hint: of the scale; read and written where it is of use (see above).
        shift: [K], of the dtype of x: all results are those of x - shift, rounded to that dtype as PyTorch does, which is not written to
            memory. Only with `power_of_two`, `row`, `col`, `return_inverse` and `stats`.

    Raises `ValueError` if `x` is not 2-D, or for a `shift` that does not match it or the other arguments.
    """
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix, but x has shape {tuple(x.shape)}: flatten it to [tokens, features]")
    if shift is not None:
        _check_shift(x, shift, unit=unit, hint=hint, column_sum=column_sum, amax=amax, keep_amax=keep_amax)
        shift = shift.detach()
    if keep_amax and not is_compiling():
        amax = kept_amax(x)
    if x.requires_grad:
        x = x.detach()
    dtype = torch.float32 if column_sum is True else column_sum or None
    if is_compiling():
        count = stats is not None
        codes, codes_t, scale, inverse, sums, counts = ops_quantize.quantize(
            x, fmt.dtype, power_of_two, row, col, dtype is not None, amax, keep_amax, unit, count, hint, shift
        )
        if stats is not None:
            stats += counts
        codes, codes_t = codes if row else None, codes_t if col else None
        sums = None if dtype is None else sums.to(dtype)
    else:
        codes, codes_t, scale, inverse, sums = backend(x).quantize(
            x,
            fmt,
            power_of_two=power_of_two,
            row=row,
            col=col,
            column_sum=dtype,
            amax=amax,
            unit=unit,
            stats=stats,
            hint=hint,
            shift=shift,
        )
    return (codes, codes_t, scale, sums, inverse) if return_inverse else (codes, codes_t, scale, sums)


def row_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """(the sums of the rows of `x` [M, N], FP32 [M]; the amax of x, FP32, 0-d): what `quantize` takes as `amax`, and sums on the way.

    Sums are made in FP32, their terms in a fixed order, which is the device's. Raises `ValueError` if `x` is not 2-D.
    """
    if x.dim() != 2:
        raise ValueError(f"row_sums takes a matrix, but x has shape {tuple(x.shape)}: flatten it to [tokens, features]")
    x = x.detach()
    return ops_quantize.row_sums(x) if is_compiling() else backend(x).row_sums(x)


def cast_current(
    x: Tensor, fmt: Format, *, return_amax: bool = False, stats: Tensor | None = None, hint: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(codes, scale): `cast` of `x` with a power-of-two scale from its own largest value; codes of the shape of `x`, contiguous.

    If a value is not finite, all codes are NaN and the scale is 1: what is stored keeps a finite scale. `fmt` is E4M3 or E5M2;
    `return_amax` returns amax(codes) as well, as a third result; `stats` as in `cast`, `hint` as in `quantize`.
    """
    if x.requires_grad:
        x = x.detach()
    if is_compiling():
        codes, scale, largest, counts = ops_quantize.cast_current(x, fmt.dtype, stats is not None, hint)
        if stats is not None:
            stats += counts
    else:
        codes, scale, largest = backend(x).cast_current(x, fmt, stats=stats, hint=hint)
    return (codes, scale, largest) if return_amax else (codes, scale)


def current_scale(amax: Tensor, max: float, power_of_two: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, visible, inverse) for a cast by other means than `quantize`: `scale_from_amax` of the amax (FP32, 0-d), to cast with, and
    what `visible_scale` makes of it, for the GEMM."""
    if is_compiling():
        scale = ops.scale_from_amax(amax, max, power_of_two, 0)
        return scale, *ops_quantize.visible_scale(scale, amax, None)
    return backend(amax).current_scale(amax, max, power_of_two)


def visible_scale(
    scale: Tensor, amax: Tensor, unit: Tensor | None = None, *, pending: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scale · unit, or NaN where amax is not finite; its reciprocal), all FP32, 0-d; no `unit` is 1.

    For operands cast by other means than `quantize`: what saturation hides of `amax` then shows in every product. `pending` (FP32, 0-d)
    is raised to amax, if that is finite: not for compiled regions.
    """
    if is_compiling():
        return ops_quantize.visible_scale(scale, amax, unit)
    return backend(scale).visible_scale(scale, amax, unit, pending)


def _check_shift(x: Tensor, shift: Tensor, **others: Any) -> None:
    if shift.shape != x.shape[1:] or shift.dtype != x.dtype or x.itemsize == 1:
        raise ValueError(
            f"shift is {shift.dtype} {tuple(shift.shape)}, but x is {x.dtype} {tuple(x.shape)}: "
            f"pass one value for each column, of the dtype of x, which is not FP8"
        )
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ValueError(
            f"quantize got shift and {', '.join(given)}: a shift goes with none of these, so pass x - shift"
        )
