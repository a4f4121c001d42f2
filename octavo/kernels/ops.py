"""The kernels as opaque operators `octavo::*`, for `torch.compile`.

A compiled region must not look into a kernel: its code would be traced, fused and rounded differently (the compiler's division on
a GPU, for one, is not IEEE's), so the bits would change.
Each operator but `accumulate` and `rotary_`, which work in place, is functional (no argument is changed, no result aliases one) and has a
fake implementation, the function `_name` above it, that knows shapes only.
Results that are not wanted are empty tensors, because a schema has no optional results.
In eager mode nobody calls these: the dispatcher of PyTorch costs more than a launch (see `octavo.kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.dispatch import backend
from octavo.kernels.operator import operator
from octavo.kernels.reference import ALIGN


def new_stats(x: Tensor, count: bool) -> Tensor:
    """Zeros for counts of saturated and flushed elements, or nothing if none are counted."""
    return torch.zeros(2, dtype=torch.int64, device=x.device) if count else x.new_empty(0, dtype=torch.int64)


def or_empty(x: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, or an empty tensor on the device of `like` where it is not wanted."""
    return like.new_empty(0, dtype=dtype) if x is None else x


def padded(size: int) -> int:
    """`size` rounded up to what the tensor cores take."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def fake_operands(x, rows, columns, dtype, row, col):
    """For a fake: the codes of a matrix [rows, columns] and of its transpose, padded, or empty where not wanted."""
    m, k = padded(rows), padded(columns)
    return x.new_empty((m, k) if row else 0, dtype=dtype), x.new_empty((k, m) if col else 0, dtype=dtype)


def _amax(x, block):
    shape = () if block is None else (*x.shape[:-1], (x.shape[-1] + block - 1) // block)
    return x.new_empty(shape, dtype=torch.float32)


@operator("amax(Tensor x, SymInt? block) -> Tensor", _amax)
def amax(x, block):
    return backend(x).amax(x, block=block)


def _scale_from_amax(amax, max, power_of_two, margin):
    return torch.empty_like(amax)


@operator("scale_from_amax(Tensor amax, float max, bool power_of_two, int margin) -> Tensor", _scale_from_amax)
def scale_from_amax(amax, max, power_of_two, margin):
    return backend(amax).scale_from_amax(amax, max, power_of_two, margin)


def _cast(x, scale, dtype, rounding, key, offset, block, count):
    return x.new_empty(x.shape, dtype=dtype), new_stats(x, count)


@operator(
    "cast(Tensor x, Tensor scale, ScalarType dtype, str rounding, Tensor? key, SymInt offset, SymInt? block, bool count)"
    " -> (Tensor, Tensor)",
    _cast,
)
def cast(x, scale, dtype, rounding, key, offset, block, count):
    stats = new_stats(x, count)
    codes = backend(x).cast(
        x, scale, dtype, rounding=rounding, key=key, offset=offset, block=block, stats=stats if count else None
    )
    return codes, stats


def _uncast(codes, scale, dtype, block):
    return codes.new_empty(codes.shape, dtype=dtype)


@operator("uncast(Tensor codes, Tensor scale, ScalarType dtype, SymInt? block) -> Tensor", _uncast)
def uncast(codes, scale, dtype, block):
    return backend(codes).uncast(codes, scale, dtype, block=block)


def _cast_transpose(x, scale, dtype, row, col, count, amax):
    return (
        *fake_operands(x, *x.shape, dtype, row, col),
        new_stats(x, count),
        x.new_empty(() if amax else 0, dtype=torch.float32),
    )


@operator(
    "cast_transpose(Tensor x, Tensor scale, ScalarType dtype, bool row, bool col, bool count, bool amax)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _cast_transpose,
)
def cast_transpose(x, scale, dtype, row, col, count, amax):
    stats = new_stats(x, count)
    options = {"row": row, "col": col, "stats": stats if count else None}
    if amax:
        codes, codes_t, maximum = backend(x).cast_transpose_amax(x, scale, dtype, **options)
    else:
        codes, codes_t = backend(x).cast_transpose(x, scale, dtype, **options)
        maximum = None
    return or_empty(codes, x, dtype), or_empty(codes_t, x, dtype), stats, or_empty(maximum, x, torch.float32)


def _transpose_codes(codes):
    return codes.new_empty(padded(codes.shape[1]), padded(codes.shape[0]))


@operator("transpose_codes(Tensor codes) -> Tensor", _transpose_codes)
def transpose_codes(codes):
    return backend(codes).transpose_codes(codes)


def _scaled_mm_nt(a_codes, b_codes, a_scale, b_scale, out_dtype, fast_accum, bias, inverse_scales=False):
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=out_dtype)


@operator(
    "scaled_mm_nt(Tensor a_codes, Tensor b_codes, Tensor a_scale, Tensor b_scale, ScalarType out_dtype, bool fast_accum, Tensor? bias,"
    " bool inverse_scales=False) -> Tensor",
    _scaled_mm_nt,
)
def scaled_mm_nt(a_codes, b_codes, a_scale, b_scale, out_dtype, fast_accum, bias, inverse_scales=False):
    return backend(a_codes).scaled_mm_nt(
        a_codes, b_codes, a_scale, b_scale, out_dtype, fast_accum=fast_accum, bias=bias, inverse_scales=inverse_scales
    )


def _cast_residual(x, scale):
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape, dtype=torch.int8)


@operator("cast_residual(Tensor x, Tensor scale) -> (Tensor, Tensor)", _cast_residual)
def cast_residual(x, scale):
    return backend(x).cast_residual(x, scale)


def _uncast_residual(codes, residual, scale, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)


@operator("uncast_residual(Tensor codes, Tensor residual, Tensor scale, ScalarType dtype) -> Tensor", _uncast_residual)
def uncast_residual(codes, residual, scale, dtype):
    return backend(codes).uncast_residual(codes, residual, scale, dtype)
