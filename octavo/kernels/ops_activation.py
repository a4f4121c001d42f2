"""The kernels of `octavo.kernels.activation` as opaque operators `octavo::*`, by the rules of `octavo.kernels.ops`.

A `hint` is what it is in `octavo.kernels.ops_quantize`.
"""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.kernels.dispatch import backend
from octavo.kernels.operator import operator
from octavo.kernels.ops import fake_operands, new_stats, or_empty
from octavo.kernels.reference.activation import GATED


def _activation_amax(h, kind):
    return h.new_empty((), dtype=torch.float32)


@operator("activation_amax(Tensor h, str kind) -> Tensor", _activation_amax)
def activation_amax(h, kind):
    return backend(h).activation_amax(h, kind)


def _activation_cast(h, kind, scale, dtype, row, col, amax, count):
    columns = h.shape[1] // 2 if GATED[kind] else h.shape[1]
    maximum = h.new_empty(() if amax else 0, dtype=torch.float32)
    return *fake_operands(h, h.shape[0], columns, dtype, row, col), maximum, new_stats(h, count)


@operator(
    "activation_cast(Tensor h, str kind, Tensor scale, ScalarType dtype, bool row, bool col, bool amax, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _activation_cast,
)
def activation_cast(h, kind, scale, dtype, row, col, amax, count):
    stats = new_stats(h, count)
    codes, codes_t, maximum = backend(h).activation_cast(
        h, kind, scale, dtype, row=row, col=col, amax=amax, stats=stats if count else None
    )
    return or_empty(codes, h, dtype), or_empty(codes_t, h, dtype), or_empty(maximum, h, torch.float32), stats


def _activation_backward_amax(da, h, kind):
    return h.new_empty((), dtype=torch.float32)


@operator("activation_backward_amax(Tensor da, Tensor h, str kind) -> Tensor", _activation_backward_amax)
def activation_backward_amax(da, h, kind):
    return backend(h).activation_backward_amax(da, h, kind)


def _activation_backward_cast(da, h, kind, scale, dtype, row, col, bias_sum, amax, count):
    return (
        *fake_operands(h, *h.shape, dtype, row, col),
        h.new_empty(() if amax else 0, dtype=torch.float32),
        h.new_empty(h.shape[1] if bias_sum else 0, dtype=torch.float32),
        new_stats(h, count),
    )


@operator(
    "activation_backward_cast(Tensor da, Tensor h, str kind, Tensor scale, ScalarType dtype, bool row, bool col, bool bias_sum,"
    " bool amax, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _activation_backward_cast,
)
def activation_backward_cast(da, h, kind, scale, dtype, row, col, bias_sum, amax, count):
    stats = new_stats(h, count)
    codes, codes_t, maximum, column_sum = backend(h).activation_backward_cast(
        da, h, kind, scale, dtype, row=row, col=col, bias_sum=bias_sum, amax=amax, stats=stats if count else None
    )
    return (
        or_empty(codes, h, dtype),
        or_empty(codes_t, h, dtype),
        or_empty(maximum, h, torch.float32),
        or_empty(column_sum, h, torch.float32),
        stats,
    )


def _activation_quantize(h, kind, dtype, da, row, col, bias_sum, power_of_two, hint):
    columns = h.shape[1] // 2 if GATED[kind] and da is None else h.shape[1]
    scales = (h.new_empty((), dtype=torch.float32) for _ in range(3))
    column_sum = h.new_empty(h.shape[1] if bias_sum else 0, dtype=torch.float32)
    return *fake_operands(h, h.shape[0], columns, dtype, row, col), *scales, column_sum


@operator(
    "activation_quantize(Tensor h, str kind, ScalarType dtype, Tensor? da, bool row, bool col, bool bias_sum, bool power_of_two,"
    " Tensor? hint) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _activation_quantize,
)
def activation_quantize(h, kind, dtype, da, row, col, bias_sum, power_of_two, hint):
    options = {"row": row, "col": col, "bias_sum": bias_sum, "power_of_two": power_of_two}
    codes, codes_t, *scales, column_sum = backend(h).activation_quantize(
        h, kind, Format.of(dtype), da=da, hint=hint, **options
    )
    return or_empty(codes, h, dtype), or_empty(codes_t, h, dtype), *scales, or_empty(column_sum, h, torch.float32)
