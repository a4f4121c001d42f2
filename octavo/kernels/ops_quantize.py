"""Current scaling as opaque operators, for `torch.compile`; see `octavo.kernels.ops`.

A `hint` is written to and yet not declared as changed: no result of any operator depends on what it holds, so that calls may be repeated,
reordered or dropped, which is all that a compiler does with a functional operator.
"""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.kernels.dispatch import backend
from octavo.kernels.maxima import kept_amax, remember_amax
from octavo.kernels.operator import operator
from octavo.kernels.ops import fake_operands, new_stats, or_empty


def _quantize(x, dtype, power_of_two, row, col, column_sum, amax, keep_amax, unit, count, hint=None, shift=None):
    return (
        *fake_operands(x, *x.shape, dtype, row, col),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape[1] if column_sum else 0, dtype=torch.float32),
        new_stats(x, count),
    )


@operator(
    "quantize(Tensor x, ScalarType dtype, bool power_of_two, bool row, bool col, bool column_sum, Tensor? amax,"
    " bool keep_amax, Tensor? unit, bool count, Tensor? hint=None, Tensor? shift=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize,
)
def quantize(x, dtype, power_of_two, row, col, column_sum, amax, keep_amax, unit, count, hint=None, shift=None):
    stats = new_stats(x, count)
    codes, codes_t, scale, inverse, sums = backend(x).quantize(
        x,
        Format.of(dtype),
        power_of_two=power_of_two,
        row=row,
        col=col,
        column_sum=torch.float32 if column_sum else None,
        amax=kept_amax(x) if keep_amax else amax,
        unit=unit,
        stats=stats if count else None,
        hint=hint,
        shift=shift,
    )
    return (
        or_empty(codes, x, dtype),
        or_empty(codes_t, x, dtype),
        scale,
        inverse,
        or_empty(sums, x, torch.float32),
        stats,
    )


def _row_sums(x):
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty((), dtype=torch.float32)


@operator("row_sums(Tensor x) -> (Tensor, Tensor)", _row_sums)
def row_sums(x):
    return backend(x).row_sums(x)


def _cast_current(x, dtype, count, hint=None):
    scale, largest = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale, largest, new_stats(x, count)


@operator(
    "cast_current(Tensor x, ScalarType dtype, bool count, Tensor? hint=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast_current,
)
def cast_current(x, dtype, count, hint=None):
    stats = new_stats(x, count)
    codes, scale, largest = backend(x).cast_current(x, Format.of(dtype), stats=stats if count else None, hint=hint)
    return remember_amax(codes, largest), scale, largest, stats


def _visible_scale(scale, amax, unit):
    return torch.empty_like(scale), torch.empty_like(scale)


@operator("visible_scale(Tensor scale, Tensor amax, Tensor? unit) -> (Tensor, Tensor)", _visible_scale)
def visible_scale(scale, amax, unit):
    return backend(scale).visible_scale(scale, amax, unit)
