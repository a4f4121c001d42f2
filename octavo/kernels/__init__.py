"""Kernels: tensors in, tensors out; nothing here knows of modules, gradients or recipes.

Every function runs the Triton or cuBLASLt kernel of `octavo.kernels.cuda` for CUDA tensors and its twin in `octavo.kernels.reference`,
the specification, for all others. In eager mode it is called directly; while `torch.compile` traces, as the opaque operator of
`octavo.kernels.ops`, so a region compiles with `fullgraph=True` and gives the same bits.

Legend: M, N, K are the dims of a GEMM; Mp, Kp are rounded up to 16; codes are tensors of a storage dtype; a scale is FP32, 0-d or
one per block of the last dim, and `real = codes / scale`. Nothing is differentiable: inputs are read detached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import ops
from octavo.kernels.accumulate import accumulate
from octavo.kernels.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_cast,
    activation_cast,
    activation_quantize,
)
from octavo.kernels.dispatch import backend
from octavo.kernels.gemm import scaled_mm_nt
from octavo.kernels.maxima import known_amax, remember_amax
from octavo.kernels.norm import add_norm_stats, norm_backward, norm_cast, norm_stats
from octavo.kernels.quantize import cast_current, current_scale, quantize, row_sums, visible_scale
from octavo.kernels.reference import ALIGN, adamw_scalars, make_key, merge_e4m11, pad_codes, random_bits, split_e4m11
from octavo.kernels.reference.adamw import Operands
from octavo.kernels.reference.adamw_step import Numbers, Prepared, UpdateSettings
from octavo.kernels.reference.cast import scale_shape
from octavo.kernels.reference.magnitudes import Values
from octavo.kernels.reference.reduce import ROW, Gradients, Places, Unpacked
from octavo.kernels.reference.reduce_scalars import MuState
from octavo.kernels.rotary import rotary, rotary_, rotary_backward, rotary_backward_quantize
from octavo.kernels.transpose import transpose_codes
from octavo.kernels.windows import update_windows

__all__ = [
    "ALIGN",
    "ROW",
    "Gradients",
    "MuState",
    "Numbers",
    "Operands",
    "Places",
    "Prepared",
    "Unpacked",
    "UpdateSettings",
    "Values",
    "accumulate",
    "activation_amax",
    "activation_backward_amax",
    "activation_backward_cast",
    "activation_cast",
    "activation_quantize",
    "add_norm_stats",
    "adamw",
    "adamw_commit",
    "adamw_prepare",
    "adamw_scalars",
    "amax",
    "cast",
    "cast_current",
    "cast_residual",
    "cast_sum",
    "cast_transpose",
    "cast_transpose_amax",
    "current_scale",
    "known_amax",
    "local_scales",
    "magnitudes",
    "make_key",
    "merge_e4m11",
    "norm_backward",
    "norm_cast",
    "norm_stats",
    "pack_codes",
    "pad_codes",
    "quantize",
    "random_bits",
    "remember_amax",
    "rotary",
    "rotary_",
    "rotary_backward",
    "rotary_backward_quantize",
    "row_sums",
    "scale_from_amax",
    "scaled_mm_nt",
    "split_e4m11",
    "sum_codes",
    "transpose_codes",
    "uncast",
    "uncast_residual",
    "unpack_codes",
    "update_mu",
    "update_windows",
    "visible_scale",
]


def amax(x: Tensor, *, block: int | None = None) -> Tensor:
    """max |x|, FP32: 0-d, or one per block of the last dim. NaN and infinity propagate; an empty `x` gives 0."""
    _check_block(x, block)
    x = x.detach()
    return ops.amax(x, block) if is_compiling() else backend(x).amax(x, block=block)


def scale_from_amax(amax: Tensor, max: float, power_of_two: bool = True, margin: int = 0) -> Tensor:
    """The scale max / amax * 2^-margin for a format with largest value `max` >= 1, rounded down to a power of two unless told not to.

    FP32, of the shape of `amax`, always finite and positive: within [2^-126, 2^126], and 1 where `amax` is zero or not finite.
    """
    if is_compiling():
        return ops.scale_from_amax(amax, max, power_of_two, margin)
    return backend(amax).scale_from_amax(amax, max, power_of_two, margin)


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rounding: str = "nearest",
    key: Tensor | None = None,
    offset: int = 0,
    block: int | None = None,
    stats: Tensor | None = None,
) -> Tensor:
    """codes = saturate(round(x * scale)), of `dtype` and the shape of `x`, contiguous.

    Infinities saturate, NaN stays NaN (a NaN scale makes every code NaN), signed zeros stay.

    Args:
        x: any shape, strides and floating dtype.
        scale: FP32; 0-d, or x.shape[:-1] + (ceil(K / block),) if `block` is given.
        dtype: FP8, FP16, BF16 or FP32.
        rounding: "nearest" (ties to even), or "stochastic", which takes `key` (0-d int32, see `make_key`) and the global
            index `offset` of the first element.
        block: elements per scale along the last dim.
        stats: int64 [2], increased by the numbers of saturated (|x * scale| > max) and flushed (x != 0, code 0) elements.

    Raises `ValueError` for a block, scale shape or rounding that cannot be, or a missing key.
    """
    _check_block(x, block)
    _check_scale(scale, x.shape, block)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding is {rounding!r}: use 'nearest' or 'stochastic'")
    if rounding == "stochastic" and key is None:
        raise ValueError("stochastic rounding needs a key: pass key=make_key(seed, step, stream, device)")
    x = x.detach()
    if is_compiling():
        codes, counts = ops.cast(x, scale, dtype, rounding, key, offset, block, stats is not None)
        if stats is not None:
            stats += counts
        return codes
    return backend(x).cast(x, scale, dtype, rounding=rounding, key=key, offset=offset, block=block, stats=stats)


def uncast(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, block: int | None = None) -> Tensor:
    """codes / scale, computed in FP32 and rounded to `dtype`; the shape of `codes`, contiguous.

    Saturates at the largest finite value of `dtype`, except for codes that are infinite or NaN.

    Raises `ValueError` for a block or scale shape that cannot be.
    """
    _check_block(codes, block)
    _check_scale(scale, codes.shape, block)
    if is_compiling():
        return ops.uncast(codes, scale, dtype, block)
    return backend(codes).uncast(codes, scale, dtype, block=block)


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Operands of both GEMMs that read `x` [M, K]: codes [Mp, Kp] and their transpose [Kp, Mp], both row-major, in one pass.

    Mp and Kp are M and K rounded up to 16; the padding is zero codes. An operand that is not wanted (`row`, `col`) is None.
    `scale` is FP32, 0-d; `stats` as in `cast`. Raises `ValueError` if `x` is not 2-D.
    """
    _check_matrix(x, scale)
    x = x.detach()
    if is_compiling():
        codes, codes_t, counts, _ = ops.cast_transpose(x, scale, dtype, row, col, stats is not None, False)
        if stats is not None:
            stats += counts
        return codes if row else None, codes_t if col else None
    return backend(x).cast_transpose(x, scale, dtype, row=row, col=col, stats=stats)


def cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`cast_transpose` and amax(x), in one pass: for scaling with a scale from the past (delayed)."""
    _check_matrix(x, scale)
    x = x.detach()
    if is_compiling():
        codes, codes_t, counts, maximum = ops.cast_transpose(x, scale, dtype, row, col, stats is not None, True)
        if stats is not None:
            stats += counts
        return codes if row else None, codes_t if col else None, maximum
    return backend(x).cast_transpose_amax(x, scale, dtype, row=row, col=col, stats=stats)


def cast_residual(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(codes E4M3, residual int8) of the E4M11 words nearest to x * scale (`scale` 0-d), of the shape of `x`, contiguous.

    Saturates at 463.875; NaN becomes a NaN code. Relative error at most 2^-12 where |x * scale| >= 2^-6.
    """
    _check_scale(scale, x.shape, None)
    x = x.detach()
    return ops.cast_residual(x, scale) if is_compiling() else backend(x).cast_residual(x, scale)


def uncast_residual(codes: Tensor, residual: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M11 value / scale, computed in FP32 and rounded to `dtype`; the shape of `codes`, contiguous."""
    if is_compiling():
        return ops.uncast_residual(codes, residual, scale, dtype)
    return backend(codes).uncast_residual(codes, residual, scale, dtype)


def adamw(operands: Sequence[Operands], *args, **kwargs) -> None:
    """One AdamW step of many parameters, in place: see `octavo.kernels.reference.adamw`. Not for compiled regions."""
    backend(operands[0].param).adamw(operands, *args, **kwargs)


def adamw_prepare(numbers: Sequence[Sequence[Numbers]], settings: Sequence[UpdateSettings]) -> Prepared:
    """All scalars of an AdamW step: see `octavo.kernels.reference.adamw_step`. Not for compiled regions."""
    return backend(numbers[0][0].step).adamw_prepare(numbers, settings)


def adamw_commit(numbers: Sequence[Sequence[Numbers]], prepared: Prepared, ok: Tensor) -> None:
    """Step counts, scales and maxima after an AdamW step, in place: see `octavo.kernels.reference.adamw_step`."""
    backend(ok).adamw_commit(numbers, prepared, ok)


def magnitudes(tensors: Sequence[Values]) -> tuple[Tensor, Tensor]:
    """(max |values| FP32 [n], Σ values² FP64 [n]) of n tensors: see `octavo.kernels.reference.magnitudes`. Not for compiled regions."""
    return backend(tensors[0].values).magnitudes(tensors)


def local_scales(gradients: Gradients) -> Tensor:
    """The largest scale that each gradient of a bucket bears, FP32 [T]: see `octavo.kernels.reference.reduce`. Not for compiled regions."""
    return backend(gradients.codes[0]).local_scales(gradients)


def pack_codes(gradients: Gradients, minimum: Tensor, mu: Tensor) -> Tensor:
    """The codes of a bucket to send, E4M3 [rows, ROW]: see `octavo.kernels.reference.reduce`."""
    return backend(minimum).pack_codes(gradients, minimum, mu)


def sum_codes(received: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """(largest sums FP32 [T], sums for `cast_sum`) of N ranks' codes: see `octavo.kernels.reference.reduce`."""
    return backend(received).sum_codes(received, places, first)


def cast_sum(sums: Tensor, amax: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """(codes E4M3 of the sums, their gain FP32 [T]): see `octavo.kernels.reference.reduce`."""
    return backend(sums).cast_sum(sums, amax, places, first)


def unpack_codes(gradients: Gradients, codes: Tensor, *args, **kwargs) -> Unpacked:
    """A reduced bucket into its gradients, in place: see `octavo.kernels.reference.reduce`."""
    return backend(codes).unpack_codes(gradients, codes, *args, **kwargs)


def update_mu(state: MuState, index: Tensor, *args, **kwargs) -> None:
    """µ after a step, in place: see `octavo.kernels.reference.reduce_scalars`."""
    backend(index).update_mu(state, index, *args, **kwargs)


def _check_block(x: Tensor, block: int | None) -> None:
    if block is None:
        return
    if not 1 <= block < 2**31:
        raise ValueError(f"block is {block}: a block has from 1 to 2^31 - 1 elements")
    if x.dim() == 0:
        raise ValueError(f"block={block} needs a tensor with a last dim to split, but this one is 0-d")


def _check_scale(scale: Tensor, shape: torch.Size, block: int | None) -> None:
    wanted = () if block is None else scale_shape(shape, block)
    if scale.shape != torch.Size(wanted):
        raise ValueError(
            f"the scale of a tensor {tuple(shape)} with block={block} has shape {wanted}, not {tuple(scale.shape)}"
        )


def _check_matrix(x: Tensor, scale: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(
            f"cast_transpose takes a matrix, but x has shape {tuple(x.shape)}: flatten it to [tokens, features]"
        )
    _check_scale(scale, x.shape, None)
