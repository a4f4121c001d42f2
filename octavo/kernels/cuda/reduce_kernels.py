"""The Triton kernels of `octavo.kernels.cuda.reduce`, which says what they are for.

A chunk of a tensor is whole tiles, loaded as vectors, and a masked rest. Parts of a bucket end at rows, so that their masks are
multiples of ROW and cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.formats import E4M3
from octavo.kernels.cuda.numerics import as_fp8, merge_e4m11, saturate
from octavo.kernels.cuda.tables import pointer
from octavo.kernels.reference import reduce as reference
from octavo.kernels.reference import reduce_scalars as scalars

ROW = tl.constexpr(reference.ROW)
LARGEST_CODE = tl.constexpr(reference.LARGEST_CODE)
LARGEST_FACTOR = tl.constexpr(reference.LARGEST_FACTOR)
GROUP = tl.constexpr(reference.EXACT_RANKS)
CEILING = tl.constexpr(scalars.CEILING)
LARGEST_SCALE = tl.constexpr(scalars.LARGEST)
LARGEST_VALUE = tl.constexpr(E4M3.max)
REST = tl.constexpr(512)
"""Elements per tile of what is no whole tile. (Loads that are not vectors take many registers.)"""
UNROLLED_RANKS = tl.constexpr(8)
WIDTH = tl.constexpr(6)
"""Columns of the table: addresses of codes, residual and scale, numel, first row, rows."""


@triton.jit
def local_scales(
    table_ptr,  # [T, WIDTH] int64
    chunks_ptr,  # [chunks, 2] int32
    scales_ptr,  # [T] int32, bits of FP32; lowered
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lowers the scale of each tensor to what its codes bear."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    row_ptr = table_ptr + tensor * WIDTH
    codes_ptr = pointer(row_ptr, 0, tl.uint8, ALIGNED)
    numel = tl.load(row_ptr + 3)
    first, whole, stop = _tiles(chunks_ptr, numel, numel, TILE, CHUNK)
    largest = tl.zeros([TILE], tl.int32)
    for tile in range(first, whole):
        index = _index(tile, TILE)
        largest = tl.maximum(largest, tl.load(codes_ptr + index).to(tl.int32) & 0x7F)
    rest = tl.zeros([REST], tl.int32)
    for tile in range(whole * (TILE // REST), stop):
        index = _index(tile, REST)
        rest = tl.maximum(rest, tl.load(codes_ptr + index, index < numel, other=0).to(tl.int32) & 0x7F)
    # The value of the code; NaN counts as infinity.
    code = tl.maximum(tl.max(largest, 0), tl.max(rest, 0))
    amax = tl.where(code < 8, code.to(tl.float32) * 2.0**-9, ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    amax = tl.where(code == 0x7F, float("inf"), amax)
    real = tl.div_rn(amax, tl.load(_scale_ptr(row_ptr)))
    scale = tl.where(real > 0, _power_of_two_scale(real), LARGEST_SCALE)
    scale = tl.where(real == float("inf"), 0.0, tl.where(scale > LARGEST_SCALE, LARGEST_SCALE, scale))
    if scale < LARGEST_SCALE:  # (an absent gradient, which is zero, keeps its infinity)
        tl.atomic_min(scales_ptr + tensor, scale.to(tl.int32, bitcast=True))


@triton.jit
def pack(
    table_ptr,  # [T, WIDTH] int64
    chunks_ptr,  # [chunks, 2] int32
    minimum_ptr,  # [T] FP32
    mu_ptr,  # [T] FP64
    packed_ptr,  # [rows, ROW] E4M3
    RESIDUAL: tl.constexpr,  # whether any tensor has one
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """packed = codes · multiplier / scale; zero between tensors."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    row_ptr = table_ptr + tensor * WIDTH
    codes_ptr = pointer(row_ptr, 0, tl.float8e4nv, ALIGNED)
    residual_ptr = pointer(row_ptr, 1, tl.int8, ALIGNED)
    has_residual = tl.load(row_ptr + 1) != 0
    numel = tl.load(row_ptr + 3)
    packed_ptr += tl.load(row_ptr + 4) * ROW
    span = tl.load(row_ptr + 5) * ROW
    multiplier = _shared_scale(tl.load(minimum_ptr + tensor)) * _power_of_two_below(tl.load(mu_ptr + tensor))
    factor = tl.div_rn(multiplier, tl.load(_scale_ptr(row_ptr)))
    factor = tl.where(factor > LARGEST_FACTOR, LARGEST_FACTOR, factor)  # NaN stays
    first, whole, stop = _tiles(chunks_ptr, numel, span, TILE, CHUNK)
    for tile in range(first, whole):
        index = _index(tile, TILE)
        x = tl.load(codes_ptr + index)
        value = x.to(tl.float32)
        if RESIDUAL:
            low = tl.load(residual_ptr + index, tl.full([TILE], has_residual, tl.int1), other=0)
            value = tl.where(value == value, merge_e4m11(x, low), value)
        sent = as_fp8(saturate(value * factor, LARGEST_VALUE), 3)
        tl.store(packed_ptr + index, sent)
    for tile in range(whole * (TILE // REST), stop):
        index = _index(tile, REST)
        x = tl.load(codes_ptr + index, index < numel, other=0.0)
        value = x.to(tl.float32)
        if RESIDUAL:
            low = tl.load(residual_ptr + index, (index < numel) & has_residual, other=0)
            value = tl.where(value == value, merge_e4m11(x, low), value)
        sent = as_fp8(tl.where(index < numel, saturate(value * factor, LARGEST_VALUE), 0.0), 3)
        tl.store(packed_ptr + index, sent, index < span)


@triton.jit(do_not_specialize=["count"])
def sum_amax(
    received_ptr,  # [WORLD, count, ROW] E4M3
    chunks_ptr,  # [chunks, 3] int32
    amaxes_ptr,  # [T] int32, bits of FP32; raised
    count,
    WORLD: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest |sum over ranks| of each tensor, infinity for NaN."""
    tensor = tl.load(chunks_ptr + 3 * tl.program_id(0))
    start = tl.load(chunks_ptr + 3 * tl.program_id(0) + 1)
    stop = tl.load(chunks_ptr + 3 * tl.program_id(0) + 2)
    largest = tl.zeros([TILE], tl.int32)
    for row in range(start, stop, TILE // ROW):
        index = _index(row, ROW, TILE)
        total = _sum(received_ptr, index, index < stop.to(tl.int64) * ROW, count, WORLD, TILE)
        largest = tl.maximum(largest, total.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(largest, 0)
    tl.atomic_max(amaxes_ptr + tensor, tl.where(bits > 0x7F800000, 0x7F800000, bits))  # NaN as infinity


@triton.jit(do_not_specialize=["count", "chunks", "tensors"])
def cast_sum(
    received_ptr,  # [WORLD, count, ROW] E4M3
    chunks_ptr,  # [chunks, 3] int32
    amaxes_ptr,  # [T] FP32
    codes_ptr,  # [count, ROW] E4M3
    gains_ptr,  # [T] FP32
    count,
    chunks,
    tensors,
    WORLD: tl.constexpr,
    TILE: tl.constexpr,
):
    """codes = gain · sum over ranks; the first programs also store the gains."""
    program = tl.program_id(0)
    if program < tensors:
        tl.store(gains_ptr + program, _power_of_two_scale(tl.load(amaxes_ptr + program)))
    if program < chunks:
        tensor = tl.load(chunks_ptr + 3 * program)
        start = tl.load(chunks_ptr + 3 * program + 1)
        stop = tl.load(chunks_ptr + 3 * program + 2)
        amax = tl.load(amaxes_ptr + tensor)
        gain = tl.where(amax == float("inf"), float("nan"), _power_of_two_scale(amax))
        for row in range(start, stop, TILE // ROW):
            index = _index(row, ROW, TILE)
            mask = index < stop.to(tl.int64) * ROW
            total = _sum(received_ptr, index, mask, count, WORLD, TILE)
            tl.store(codes_ptr + index, as_fp8(saturate(total * gain, LARGEST_VALUE), 3), mask)


@triton.jit(do_not_specialize=["world"])
def unpack(
    table_ptr,  # [T, WIDTH] int64
    chunks_ptr,  # [chunks, 2] int32
    codes_ptr,  # [rows, ROW] uint8
    minimum_ptr,  # [T] FP32
    mu_ptr,  # [T] FP64
    gains_ptr,  # [T] FP32
    largest_ptr,  # [T] int64, raised
    flags_ptr,  # [1 + T] uint8, set to 0
    world,
    COUNT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Codes and the scales of means into the gradients; flags and counts."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    row_ptr = table_ptr + tensor * WIDTH
    own_ptr = pointer(row_ptr, 0, tl.uint8, ALIGNED)
    numel = tl.load(row_ptr + 3)
    codes_ptr += tl.load(row_ptr + 4) * ROW
    if tl.load(chunks_ptr + 2 * tl.program_id(0) + 1) == 0:
        minimum = tl.load(minimum_ptr + tensor)
        multiplier = _shared_scale(minimum) * _power_of_two_below(tl.load(mu_ptr + tensor))
        mean = multiplier * tl.load(gains_ptr + tensor) * tl.cast(world, tl.float32)
        mean = tl.where(mean > 2.0**126, 2.0**126, tl.where(mean < 2.0**-126, 2.0**-126, mean))
        tl.store(_scale_ptr(row_ptr), tl.where(mean == mean, mean, 1.0))
        if minimum <= 0:
            tl.store(flags_ptr, 0)
        if (minimum <= 0) | (minimum == float("inf")):
            tl.store(flags_ptr + 1 + tensor, 0)
    first, whole, stop = _tiles(chunks_ptr, numel, numel, TILE, CHUNK)
    largest = tl.zeros([TILE], tl.int32)
    for tile in range(first, whole):
        index = _index(tile, TILE)
        x = tl.load(codes_ptr + index)
        tl.store(own_ptr + index, x)
        if COUNT:
            largest += ((x & 0x7F) >= LARGEST_CODE).to(tl.int32)
    rest = tl.zeros([REST], tl.int32)
    for tile in range(whole * (TILE // REST), stop):
        index = _index(tile, REST)
        x = tl.load(codes_ptr + index, index < numel, other=0)
        tl.store(own_ptr + index, x, index < numel)
        if COUNT:
            rest += ((x & 0x7F) >= LARGEST_CODE).to(tl.int32)
    if COUNT:
        found = tl.sum(largest, 0) + tl.sum(rest, 0)
        if found > 0:
            tl.atomic_add(largest_ptr + tensor, found.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def update_mu(
    mu_ptr,  # FP64
    ratio_ptr,  # FP32
    floor_steps_ptr,  # int64
    index_ptr,  # [count] int64, where in these three
    new_ratio_ptr,  # [count] FP32
    usable_ptr,  # [count] uint8
    count,
    MOVES: tl.constexpr,
    THRESHOLD: tl.constexpr,
    GROWTH: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """µ of the tensors at `index` after a step."""
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    usable = tl.load(usable_ptr + lane, lane < count, other=0) != 0
    index = tl.load(index_ptr + lane, usable, other=0)
    ratio = tl.load(new_ratio_ptr + lane, usable, other=0.0)
    tl.store(ratio_ptr + index, ratio, usable)
    if MOVES:
        mu = tl.load(mu_ptr + index, usable, other=1.0)
        new = tl.where(ratio <= THRESHOLD, mu * GROWTH, mu * 0.5)
        new = tl.where(new > CEILING, CEILING, tl.where(new < FLOOR, FLOOR, new))
        steps = tl.load(floor_steps_ptr + index, usable, other=0)
        tl.store(mu_ptr + index, new, usable)
        tl.store(floor_steps_ptr + index, tl.where(new <= FLOOR, steps + 1, 0), usable)


@triton.jit
def _tiles(chunks_ptr, numel, end, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Of the chunk of this program: its first tile, the first that is not whole within `numel`, and, in tiles of REST, the end of what
    the chunk has of `end` elements."""
    first = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1) * (CHUNK // TILE)
    after = first + CHUNK // TILE
    whole = tl.minimum(tl.maximum((numel // TILE).to(tl.int32), first), after)
    stop = tl.minimum(after.to(tl.int64) * (TILE // REST), tl.cdiv(end, REST))
    return first, whole, stop


@triton.jit
def _index(number, STEP: tl.constexpr, TILE: tl.constexpr = None):
    """The elements of a tile that begins at `number` steps, int64 [TILE]."""
    SIZE: tl.constexpr = STEP if TILE is None else TILE
    return number * tl.full([], STEP, tl.int64) + tl.arange(0, SIZE)


@triton.jit
def _sum(received_ptr, index, mask, count, WORLD: tl.constexpr, TILE: tl.constexpr):
    """Σ over ranks of the codes at `index`, FP32, see `reference.exact_sum`."""
    each = count.to(tl.int64) * ROW
    total = tl.zeros([TILE], tl.float32)
    for begin in tl.static_range(0, WORLD, GROUP):
        group = tl.zeros([TILE], tl.float32)
        if WORLD <= UNROLLED_RANKS:  # so that all loads are under way together
            for rank in tl.static_range(begin, WORLD if WORLD < begin + GROUP else begin + GROUP):
                group += tl.load(received_ptr + rank * each + index, mask, other=0.0).to(tl.float32)
        else:
            for rank in range(begin, WORLD if WORLD < begin + GROUP else begin + GROUP):
                group += tl.load(received_ptr + rank * each + index, mask, other=0.0).to(tl.float32)
        total += group
    return total


@triton.jit
def _scale_ptr(row_ptr):
    return tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32))


@triton.jit
def _shared_scale(minimum):
    """See `reduce_scalars.shared_scales`."""
    return tl.where(minimum > 0, tl.where(minimum > LARGEST_SCALE, LARGEST_SCALE, minimum), float("nan"))


@triton.jit
def _power_of_two_below(mu):
    """See `reduce_scalars.power_of_two_below`."""
    bits = (mu * (1 + 2.0**-20)).to(tl.float32).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two_scale(amax):
    """`scale_from_amax` of a scalar, for E4M3: 448 / amax rounded down to a power of two, in [2^-126, 2^126]; else 1."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (127 + 8) - (bits >> 23) - tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # 448 = 1.75 · 2^8
    exponent = tl.where(exponent > 126, 126, tl.where(exponent < -126, -126, exponent))
    return tl.where((amax > 0) & (amax < float("inf")), ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)
