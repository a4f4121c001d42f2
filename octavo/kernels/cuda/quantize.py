"""Current scaling in two launches: the largest value of each part of a tensor, then one kernel for all that follows from it.

Done apart, current scaling of an operand is an amax, a scale from it, a cast, `where(isfinite)` and a reciprocal for the GEMM, and in
backward a sum of columns for the bias: 9 launches and up to three reads of the tensor. Of these only the amax must come first. The
kernels here take the largest part themselves, each program for itself (2 KB from the cache), so scale, its reciprocal, codes and
their transpose come from the second read: 2 + 2 bytes an element of BF16 read, 1 + 1 written. Tiles are taken last to first, because the
end of the tensor is what the first read left in the cache. Nothing here saturates by itself: a scale of its own leaves only
infinities to saturate, and the conversion to FP8 (cvt.rn.satfinite) does that.

The cast has the tiles of `octavo.kernels.cuda.tiles`: 64 registers a thread, eight blocks on a multiprocessor, and 9 or 10 instructions an
element, of the 28 for which its bytes leave time, or 13 where a row is subtracted on the way (`shift`). Column sums come from the first
read, which has arithmetic and registers to spare. They are FP32 and deterministic: each program stores those of its rows, and a second
step adds them in a fixed order, where atomics would add in any. No sum of M rows is more than M/8 + M/32 + 15 roundings deep, and none
at 16,384 x 4,096 more than 82.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels import reference
from octavo.kernels.cuda import speculative
from octavo.kernels.cuda.cast import MAX_PARTS, amax_parts, largest_part, scale_of
from octavo.kernels.cuda.cast import TILE as FLAT_TILE
from octavo.kernels.cuda.columns import amax_parts_and_sum
from octavo.kernels.cuda.hints import hintable
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import as_fp8, flushed_count, magnitude_bits, saturated_count
from octavo.kernels.cuda.scales import visible
from octavo.kernels.cuda.shifted import shifted_amax_parts
from octavo.kernels.cuda.tiles import (
    REPEAT,
    TILE_K,
    TILE_M,
    group_of,
    load_floats,
    place_of,
    round_through,
    store_codes,
    tile_rows,
)
from octavo.kernels.cuda.transpose import geometry


@triton.jit(do_not_specialize=["tiles_k", "parts"])
def _quantize_kernel(
    x_ptr,
    shift_ptr,
    parts_ptr,
    unit_ptr,
    codes_ptr,
    codes_t_ptr,
    scale_ptr,
    inverse_ptr,
    stats_ptr,
    m_size,
    k_size,
    m_padded,
    k_padded,
    tiles_k,
    parts,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes = saturate(round(x * s)), codes_t = codesᵀ, s = `scale_of` the largest part; zero codes in the padding.

    x [m_size, k_size] contiguous: any float; shift [k_size]: of the dtype of x, or None; x - shift, rounded to their dtype, takes the place
    of x; parts [parts]: int32; codes [m_padded, k_padded], codes_t [k_padded, m_padded]: FP8; scale, inverse [1]: FP32, s · unit (NaN if
    x has a value that is not finite) and its reciprocal; unit [1]: FP32; stats [2]: int64. Results that are not wanted are None.
    WHOLE: there is no padding.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, tile_k = place_of(program, tiles_k, GROUP)
    tile = tile.to(tl.int64)
    m = tile_rows(tile, REPEAT, TILE_M)
    k = tile_k.to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    inside = (m < m_size)[:, None] & (k < k_size)[None, :]
    x = load_floats(x_ptr + (m * k_size)[:, None] + k[None, :], inside, WHOLE)
    if shift_ptr is not None:
        shift = load_floats(shift_ptr + k, k < k_size, WHOLE)
    amax = largest_part(parts_ptr, parts, PARTS)
    scale = scale_of(amax, tl.full((), MAX, tl.float32), POWER_OF_TWO)
    if program == 0:
        shown, inverse = visible(scale, amax, unit_ptr)
        tl.store(scale_ptr, shown)
        tl.store(inverse_ptr, inverse)
    if (
        shift_ptr is not None
    ):  # (Before the maximum, which waits for other warps, differences would take twice the registers of x.)
        x = round_through(x - shift[None, :], x_ptr.dtype.element_ty)
        if not WHOLE:
            x = tl.where(inside, x, 0.0)
    store_codes(
        x, inside, tile, m, k, k_padded, scale, codes_ptr, codes_t_ptr, stats_ptr, None,
        m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _cast_current_kernel(
    x_ptr,
    parts_ptr,
    codes_ptr,
    scale_ptr,
    largest_ptr,
    stats_ptr,
    numel,
    parts,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """codes = saturate(round(x * scale)), all NaN if a value of x is not finite; scale = `scale_of` the largest part.

    x, codes [numel]: any float, FP8; parts [parts]: int32; scale, largest [1]: FP32, largest = max |codes|; stats [2]: int64 or None.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    start = program.to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    valid = lane < numel - start
    x = tl.load(x_ptr + start + lane, mask=valid, other=0.0).to(tl.float32)
    amax = largest_part(parts_ptr, parts, PARTS)
    scale = scale_of(amax, tl.full((), MAX, tl.float32), POWER_OF_TWO)
    multiplier = tl.where(amax < float("inf"), scale, float("nan"))
    if program == 0:
        tl.store(scale_ptr, scale)
        # Rounding keeps the order: the largest code is that of the largest value. (Codes are made of whole tiles only.)
        code = as_fp8(tl.full([TILE], 1.0, tl.float32) * (amax * multiplier), MANTISSA_BITS)
        tl.store(largest_ptr, tl.max(magnitude_bits(code), 0).to(tl.float32, bitcast=True))
    y = x * multiplier
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr, tl.sum(saturated_count(y, MAX), 0).to(tl.int64))
    codes = as_fp8(y, MANTISSA_BITS)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr + 1, tl.sum(flushed_count(x, codes), 0).to(tl.int64))
    tl.store(codes_ptr + start + lane, codes, mask=valid)


_launch_quantize = Launcher(_quantize_kernel, num_warps=4)
_launch_cast_current = Launcher(_cast_current_kernel, num_warps=8)


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
    """See `octavo.kernels.reference.quantize`. A matrix of one row or column takes the reference, as in `cast_transpose`."""
    m, k = x.shape
    if m <= 1 or k <= 1:
        return reference.quantize(
            x,
            fmt,
            power_of_two=power_of_two,
            row=row,
            col=col,
            column_sum=column_sum,
            amax=amax,
            unit=unit,
            stats=stats,
            shift=shift,
        )
    if not x.is_contiguous():
        x = x.contiguous()
    if (amax is None or column_sum is not None) and unit is stats is None and power_of_two and hintable(x, hint):
        assert hint is not None
        return speculative.quantize(x, fmt, row, col, column_sum, hint)
    sums = None
    if column_sum is not None:
        parts, sums = amax_parts_and_sum(x, column_sum)
    elif shift is not None:
        shift = shift.contiguous()
        parts = shifted_amax_parts(x, shift)
    else:
        parts = amax_parts(x) if amax is None else amax.view(torch.int32)
    programs, shape, shape_t, scalars = _plan(m, k, fmt.dtype, power_of_two, parts.numel())
    codes = x.new_empty(shape, dtype=fmt.dtype) if row else None
    codes_t = x.new_empty(shape_t, dtype=fmt.dtype) if col else None
    scale, inverse = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    _launch_quantize(programs, (x, shift, parts, unit, codes, codes_t, scale, inverse, stats), *scalars)
    return codes, codes_t, scale, inverse, sums


def cast_current(
    x: Tensor, fmt: Format, *, stats: Tensor | None = None, hint: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.reference.cast_current`."""
    numel = x.numel()
    if numel == 0:
        return reference.cast_current(x, fmt, stats=stats)
    if not x.is_contiguous():
        x = x.contiguous()
    if stats is None and hintable(x, hint):
        assert hint is not None
        return speculative.cast_current(x, fmt, hint)
    parts = amax_parts(x)
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    scale, largest = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    _launch_cast_current(
        -(-numel // FLAT_TILE),
        (x, parts, codes, scale, largest, stats),
        *(numel, parts.numel(), fmt.max, fmt.mantissa_bits, True, MAX_PARTS, FLAT_TILE),
    )
    return codes, scale, largest


@cache
def _plan(
    m: int, k: int, dtype: torch.dtype, power_of_two: bool, parts: int
) -> tuple[int, tuple[int, int], tuple[int, int], tuple[float | bool, ...]]:
    """(programs, shapes of codes and of codes_t, scalars) of `_quantize_kernel`."""
    m_padded, k_padded, tiles_m, tiles_k = geometry(m, k, TILE_M, TILE_K)
    fmt, whole = Format.of(dtype), m % TILE_M == 0 and k % TILE_K == 0
    scalars = (
        *(m, k, m_padded, k_padded, tiles_k, parts, fmt.max, fmt.mantissa_bits, power_of_two),
        triton.next_power_of_2(parts) if parts > MAX_PARTS else MAX_PARTS,
        *(whole, group_of(tiles_m), REPEAT, TILE_M, TILE_K),
    )
    return tiles_m * tiles_k, (m_padded, k_padded), (k_padded, m_padded), scalars
