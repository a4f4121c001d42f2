"""Element-wise Triton kernels of the casts, one pass over flattened contiguous tensors; see `octavo.kernels.reference.cast`.

Offsets are int64 from the start of a tile, so tensors may have more than 2^31 elements.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels import reference
from octavo.kernels.cuda.launch import Launcher, on_device
from octavo.kernels.cuda.numerics import (
    constants,
    flushed_count,
    magnitude_bits,
    random_bits,
    round_stochastic,
    rounded_to,
    saturate,
    saturated_count,
)
from octavo.kernels.reference.cast import largest

TILE = 4096
PROGRAMS = 528
"""That find an amax: four for each multiprocessor of a Hopper GPU, which all run at the same time."""
MAX_PARTS = 1024
MAX_ROUNDS = 4


@triton.jit
def _amax_kernel(x_ptr, parts_ptr, numel, turns, ROUNDS: tl.constexpr, TILE: tl.constexpr):
    """parts[p] = max |x| of the tiles p, p + P, ... of P programs. x [numel]: any float; parts [P]: FP32 bits as int32.

    Programs that run together read neighbouring tiles, and so the end of `x` last: it is what the cache still holds after.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0) * TILE
    lane = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.int32)
    for _ in range(turns):
        for _ in tl.static_range(ROUNDS):
            bits = magnitude_bits(tl.load(x_ptr + start + lane, mask=lane < numel - start, other=0.0))
            largest = tl.where(bits > largest, bits, largest)
            start += step
    tl.store(parts_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def largest_part(parts_ptr, parts, PARTS: tl.constexpr):
    """The FP32 with the largest of `parts` <= PARTS int32, its bits: the amax that `_amax_kernel` left in parts."""
    lane = tl.arange(0, PARTS)
    return tl.max(tl.load(parts_ptr + lane, mask=lane < parts, other=0), 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["parts"])
def _largest_kernel(parts_ptr, amax_ptr, parts, PARTS: tl.constexpr):
    """amax = the largest part, by one program. parts [parts]: int32; amax [1]: FP32."""
    tl.store(amax_ptr, largest_part(parts_ptr, parts, PARTS))


@triton.jit
def scale_of(amax, limit, POWER_OF_TWO: tl.constexpr):
    """limit / amax, or 2^floor(log2(limit / amax)), in [2^-126, 2^126]; 1 if amax is zero or not finite. FP32, a tensor or scalar."""
    if POWER_OF_TWO:
        bits = amax.to(tl.int32, bitcast=True)
        limit_bits = limit.to(tl.int32, bitcast=True)
        exponent = (limit_bits >> 23) - (bits >> 23) - ((bits & 0x7FFFFF) > (limit_bits & 0x7FFFFF)).to(tl.int32)
        exponent = tl.where(exponent > 126, 126, tl.where(exponent < -126, -126, exponent))
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(limit, amax)
        scale = tl.where(scale > 2.0**126, 2.0**126, tl.where(scale < 2.0**-126, 2.0**-126, scale))
    return tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _scale_kernel(amax_ptr, scale_ptr, numel, limit, POWER_OF_TWO: tl.constexpr, TILE: tl.constexpr):
    """scale = `scale_of` amax. amax, scale: FP32 [numel]."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    amax = tl.load(amax_ptr + index, mask=index < numel, other=0.0)
    scale = scale_of(amax, tl.zeros_like(amax) + limit, POWER_OF_TWO)
    tl.store(scale_ptr + index, scale, mask=index < numel)


@triton.jit
def _load_scale(scale_ptr, index, valid, length, blocks, BLOCK: tl.constexpr):
    """The scale of each element `index` of a tensor whose last dim is `length`, in `blocks` blocks; BLOCK 0: one scale."""
    if BLOCK == 0:
        scale = tl.load(scale_ptr)
    else:
        row = index // length
        scale = tl.load(scale_ptr + row * blocks + (index - row * length) // BLOCK, mask=valid, other=1.0)
    return scale


@triton.jit(do_not_specialize=["offset"])
def _cast_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    key_ptr,
    stats_ptr,
    numel,
    length,
    blocks,
    offset,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    """codes = saturate(round(x * scale)).

    x, codes [numel]: any float, the target format; scale: FP32; key [1]: int32 or None; stats [2]: int64 or None.
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    valid = lane < numel - start
    x = tl.load(x_ptr + start + lane, mask=valid, other=0.0).to(tl.float32)
    y = x * _load_scale(scale_ptr, start + lane, valid, length, blocks, BLOCK)
    if COUNT:
        tl.atomic_add(stats_ptr, tl.sum(saturated_count(y, MAX), 0).to(tl.int64))
    y = saturate(y, MAX)
    if STOCHASTIC:
        y = round_stochastic(y, random_bits(start + lane + offset, tl.load(key_ptr)), MANTISSA_BITS, MIN_EXPONENT)
    codes = rounded_to(y, codes_ptr.dtype.element_ty)
    if COUNT:
        tl.atomic_add(stats_ptr + 1, tl.sum(flushed_count(x, codes), 0).to(tl.int64))
    tl.store(codes_ptr + start + lane, codes, mask=valid)


@triton.jit
def _uncast_kernel(
    codes_ptr, scale_ptr, x_ptr, numel, length, blocks, MAX: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """x = codes / scale, within [-MAX, MAX] if the code is finite. codes, x [numel]: any floats; scale: FP32."""
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    valid = lane < numel - start
    codes = tl.load(codes_ptr + start + lane, mask=valid, other=0.0).to(tl.float32)
    scale = _load_scale(scale_ptr, start + lane, valid, length, blocks, BLOCK)
    x = tl.div_rn(codes, tl.zeros_like(codes) + scale)
    x = tl.where(tl.abs(codes) == float("inf"), x, saturate(x, MAX))
    tl.store(x_ptr + start + lane, x.to(x_ptr.dtype.element_ty), mask=valid)


_launch_amax = Launcher(_amax_kernel, num_warps=8)
_launch_largest = Launcher(_largest_kernel, num_warps=4)
_launch_scale = Launcher(_scale_kernel, num_warps=1)


def amax_parts(x: Tensor) -> Tensor:
    """max |x| of parts of a contiguous `x`, FP32 bits as int32 [P], P <= MAX_PARTS: the largest is its amax.

    Whoever wants the amax takes the largest part itself, in registers. One word that all programs raise together would have to
    be zeroed before, by another launch, or be kept zero between calls, which neither two streams nor a captured graph allow.
    """
    numel = x.numel()
    programs, turns, rounds = division(numel)
    parts = x.new_empty(programs, dtype=torch.int32)
    _launch_amax(programs, (x, parts), numel, turns, rounds, TILE)
    return parts


@cache
def division(numel: int) -> tuple[int, int, int]:
    """(programs, turns, rounds) that find a maximum: turns * rounds tiles to a program, `rounds` of them unrolled."""
    tiles = triton.cdiv(numel, TILE)
    programs = min(max(tiles, 1), PROGRAMS)
    each = max(triton.cdiv(tiles, programs), 1)  # many tiles to a program keep more loads in flight than one
    rounds = min(triton.next_power_of_2(each), MAX_ROUNDS)
    return programs, triton.cdiv(each, rounds), rounds


def amax(x: Tensor, *, block: int | None = None) -> Tensor:
    """See `octavo.kernels.amax`. A maximum has no order of terms to depend on: the result is deterministic."""
    if block is not None:
        return reference.amax(x, block=block)
    parts = amax_parts(x if x.is_contiguous() else x.contiguous())
    if parts.numel() == 1:
        return parts.view(torch.float32).view(())
    out = x.new_empty((), dtype=torch.float32)
    _launch_largest(1, (parts, out), parts.numel(), MAX_PARTS)
    return out


def scale_from_amax(amax: Tensor, max: float, power_of_two: bool = True, margin: int = 0) -> Tensor:
    """See `octavo.kernels.scale_from_amax`."""
    amax = amax.contiguous()
    scale = torch.empty_like(amax)
    numel = amax.numel()
    _launch_scale(-(-numel // 256), (amax, scale), numel, max * 2.0**-margin, power_of_two, 256)
    return scale


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
    """See `octavo.kernels.cast`."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    with on_device(x):
        _cast_kernel[(triton.cdiv(x.numel(), TILE),)](
            x.contiguous(),
            scale.contiguous(),
            codes,
            key,
            stats,
            x.numel(),
            *_blocking(x, scale, block),
            offset,
            **constants(Format.of(dtype)),
            BLOCK=block or 0,
            STOCHASTIC=rounding == "stochastic" and dtype != torch.float32,
            COUNT=stats is not None,
            TILE=TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return codes


def uncast(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, block: int | None = None) -> Tensor:
    """See `octavo.kernels.uncast`."""
    x = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    with on_device(codes):
        _uncast_kernel[(triton.cdiv(codes.numel(), TILE),)](
            codes.contiguous(),
            scale.contiguous(),
            x,
            codes.numel(),
            *_blocking(codes, scale, block),
            MAX=largest(dtype),
            BLOCK=block or 0,
            TILE=TILE,
            num_warps=8,
        )
    return x


def _blocking(x: Tensor, scale: Tensor, block: int | None) -> tuple[int, int]:
    """(length of the last dim, its number of blocks), both 1 for one scale."""
    return (1, 1) if block is None else (x.shape[-1], scale.shape[-1])
