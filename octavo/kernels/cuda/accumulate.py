"""Accumulation of FP8 gradients in two launches: the largest sum of each part, then the sums; see `octavo.kernels.accumulate`.

Both launches form the sum of an element anew, from 3 bytes, and the second writes 2. Tiles are taken last to first in the second, because
the end of the tensors is what the first left in the cache.

The second launch writes what all of its programs need: the old scale. So it reads none. The first copies both scales behind the
maxima of its parts, from where every program of the second takes them, together with the maxima; one program writes the new scale.
Codes are in place too, but each element is read and written by one program alone.

Arithmetic is what limits kernels of so few bytes: at 4.2 TB/s, 3 bytes leave time for 24 instructions and 5 for 40. Therefore

- a division by a power of two, as the scale of a gradient is until it is clipped, is a product with its reciprocal: equally exact
  in a range where neither result is subnormal or infinite. Which of both it is holds for all elements, so the branch is taken by all;
- an E4M11 magnitude is put where FP32 has exponent and mantissa, and multiplied by 2^120, which makes a subnormal of one format that
  of the other and spares the choice between two cases;
- the second launch looks for no NaN and nothing to saturate. A fresh scale leaves no sum beyond 448, and one NaN makes all codes NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.cuda.cast import MAX_PARTS, TILE, division, largest_part, scale_of
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits, saturate
from octavo.kernels.reference.cast import largest
from octavo.kernels.reference.residual import NAN_CODE, QUIET_NAN

SPLIT = tl.constexpr(4)
"""A division takes more registers than a product, so there are fewer elements to a thread where scales are not simple."""
MAX_ROUNDS = 2
"""Tiles whose loads are under way together in the first launch, which four times 256 threads on a multiprocessor have registers for; and
tiles of a program of the second, which each find the largest part first: 2 KB from the cache for 20 KB a tile."""


@triton.jit
def _is_simple(scale):
    """Whether `scale` (FP32 scalar) is a power of two in [2^-100, 2^100]: values of E4M11 divided by it are normal numbers or zero."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits & 0x7FFFFF) == 0) & (bits >= (27 << 23)) & (bits <= (227 << 23))


@triton.jit
def _reciprocal(scale):
    """1 / `scale`, for a scale that `_is_simple`."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _sums(
    codes_ptr,
    residual_ptr,
    other_ptr,
    lane,
    valid,
    scale,
    other_scale,
    MAX: tl.constexpr,
    FIRST: tl.constexpr,
    SIMPLE: tl.constexpr,
):
    """(E4M11 value / scale + other / other_scale in FP32, low seven bits of the codes): where these are 0x7F, the sum should be NaN.

    SIMPLE: both scales are.
    """
    code = tl.load(codes_ptr + lane, mask=valid, other=0.0).to(tl.uint8, bitcast=True).to(tl.int32)
    high = code & 0x7F
    magnitude = high << 8
    if not FIRST:
        magnitude += tl.load(residual_ptr + lane, mask=valid, other=0).to(tl.int32)
    word = (magnitude << 12) | ((code & 0x80) << 24)
    value = word.to(tl.float32, bitcast=True) * 2.0**120
    addend = tl.load(other_ptr + lane, mask=valid, other=0.0).to(tl.float32)
    if SIMPLE:
        # Products are exact, and so the sum is rounded once, fused or not.
        sums = tl.fma(value, tl.zeros_like(value) + _reciprocal(scale), addend * _reciprocal(other_scale))
    else:
        own = saturate(tl.div_rn(value, tl.zeros_like(value) + scale), MAX)
        sums = own + saturate(tl.div_rn(addend, tl.zeros_like(addend) + other_scale), MAX)
    return sums, high


@triton.jit
def _largest_sum(
    codes_ptr,
    residual_ptr,
    other_ptr,
    start,
    step,
    numel,
    turns,
    scale,
    other_scale,
    ROUNDS: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    NAN_BITS: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SIMPLE: tl.constexpr,
):
    """The bits of the largest |sum| of turns * ROUNDS tiles from `start` on, `step` elements apart."""
    lane = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.int32)
    for _ in range(turns):
        for _ in tl.static_range(ROUNDS):
            sums, high = _sums(
                codes_ptr + start,
                residual_ptr + start,
                other_ptr + start,
                lane,
                lane < numel - start,
                scale,
                other_scale,
                MAX,
                FIRST,
                SIMPLE,
            )
            bits = tl.where(high == NAN, NAN_BITS, magnitude_bits(sums))
            largest = tl.where(bits > largest, bits, largest)
            start += step
    return tl.max(largest, 0)


@triton.jit
def _largest_kernel(
    codes_ptr,
    residual_ptr,
    scale_ptr,
    other_ptr,
    other_scale_ptr,
    parts_ptr,
    numel,
    turns,
    ROUNDS: tl.constexpr,
    FIRST: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    NAN_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """parts[p] = max |sum| of the tiles p, p + P, ... of P programs; parts[P], parts[P + 1] = the scales.

    codes, other [numel]: E4M3; residual [numel]: int8; scale, other_scale [1]: FP32; parts [P + 2]: FP32 bits as int32.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    scale = tl.load(scale_ptr)
    other_scale = tl.load(other_scale_ptr)
    if program == 0:
        tl.store(parts_ptr + programs, scale.to(tl.int32, bitcast=True))
        tl.store(parts_ptr + programs + 1, other_scale.to(tl.int32, bitcast=True))
    start = program.to(tl.int64) * TILE
    step = programs * TILE
    if _is_simple(scale) & _is_simple(other_scale):
        largest = _largest_sum(
            codes_ptr, residual_ptr, other_ptr, start, step, numel, turns, scale, other_scale,
            ROUNDS, MAX, NAN, NAN_BITS, TILE, FIRST, True,
        )  # fmt: skip
    else:
        largest = _largest_sum(
            codes_ptr, residual_ptr, other_ptr, start // SPLIT, step // SPLIT, numel, turns * (ROUNDS * SPLIT), scale, other_scale,
            1, MAX, NAN, NAN_BITS, TILE // SPLIT, FIRST, False,
        )  # fmt: skip
    tl.store(parts_ptr + program, largest)


@triton.jit
def _write_sums(
    codes_ptr,
    residual_ptr,
    other_ptr,
    start,
    numel,
    scale,
    other_scale,
    multiplier,
    ROUNDS: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SIMPLE: tl.constexpr,
):
    """(codes, residual) = the E4M11 word nearest to sum * multiplier, of ROUNDS tiles from `start` on, the last first."""
    start += (ROUNDS - 1) * TILE
    lane = tl.arange(0, TILE)
    finite = multiplier == multiplier
    for _ in range(ROUNDS):
        valid = lane < numel - start
        sums, _ = _sums(
            codes_ptr + start,
            residual_ptr + start,
            other_ptr + start,
            lane,
            valid,
            scale,
            other_scale,
            MAX,
            FIRST,
            SIMPLE,
        )
        y = sums * multiplier
        word = y.to(tl.int32, bitcast=True)
        bits = word & 0x7FFFFFFF
        normal = (bits + ((bits >> 12) & 1) + (0x7FF - (120 << 23))) >> 12
        # Words below 2^-6 are the multiples of 2^-17, the spacing of FP32 from 64 on: adding 64 rounds to them.
        subnormal = (tl.abs(y) + 64.0).to(tl.int32, bitcast=True) - (133 << 23)
        magnitude = tl.where(bits < (121 << 23), subnormal, normal)
        magnitude = tl.where(finite, magnitude, NAN << 8)
        code = ((magnitude + 128) >> 8) | ((word >> 24) & 0x80)
        # The residual is what the high byte is away from the magnitude, which is the low byte as it stands.
        tl.store(codes_ptr + start + lane, code.to(tl.uint8).to(codes_ptr.dtype.element_ty, bitcast=True), mask=valid)
        tl.store(residual_ptr + start + lane, magnitude.to(tl.int8), mask=valid)
        start -= TILE


@triton.jit(do_not_specialize=["parts"])
def _accumulate_kernel(
    codes_ptr,
    residual_ptr,
    scale_ptr,
    other_ptr,
    parts_ptr,
    numel,
    parts,
    ROUNDS: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """(codes, residual) = the E4M11 word nearest to sum * s, scale = s, the `scale_of` the largest part; ROUNDS tiles to a program.

    parts [parts + 2]: int32, maxima and old scales as `_largest_kernel` left them; the others as there.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    amax = largest_part(parts_ptr, parts, PARTS)
    scale = tl.load(parts_ptr + parts).to(tl.float32, bitcast=True)
    other_scale = tl.load(parts_ptr + parts + 1).to(tl.float32, bitcast=True)
    fresh = scale_of(amax, tl.full((), LIMIT, tl.float32), True)
    if program == 0:
        tl.store(scale_ptr, fresh)
    multiplier = tl.where(amax < float("inf"), fresh, float("nan"))
    start = program.to(tl.int64) * (ROUNDS * TILE)
    if _is_simple(scale) & _is_simple(other_scale):
        _write_sums(
            codes_ptr, residual_ptr, other_ptr, start, numel, scale, other_scale, multiplier,
            ROUNDS, MAX, NAN, TILE, FIRST, True,
        )  # fmt: skip
    else:
        _write_sums(
            codes_ptr, residual_ptr, other_ptr, start, numel, scale, other_scale, multiplier,
            ROUNDS * SPLIT, MAX, NAN, TILE // SPLIT, FIRST, False,
        )  # fmt: skip


_launch_largest = Launcher(_largest_kernel, num_warps=8, enable_fp_fusion=False)
_launch_accumulate = Launcher(_accumulate_kernel, num_warps=8, enable_fp_fusion=False)


def accumulate(codes: Tensor, residual: Tensor, scale: Tensor, other: Tensor, other_scale: Tensor, first: bool) -> None:
    """See `octavo.kernels.accumulate`. `first`: the residual holds nothing yet."""
    numel = codes.numel()
    limit = largest(torch.float32)
    programs, turns, rounds = division(numel)
    if rounds > MAX_ROUNDS:
        turns, rounds = turns * (rounds // MAX_ROUNDS), MAX_ROUNDS
    parts = codes.new_empty(programs + 2, dtype=torch.int32)
    tensors = (codes, residual, scale, other)
    _launch_largest(
        programs, (*tensors, other_scale, parts), numel, turns, rounds, first, limit, NAN_CODE, QUIET_NAN, TILE
    )
    blocks = max(triton.cdiv(numel, rounds * TILE), 1)
    _launch_accumulate(
        blocks, (*tensors, parts), numel, programs, rounds, first, E4M3.max, limit, NAN_CODE, MAX_PARTS, TILE
    )
