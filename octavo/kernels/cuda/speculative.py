"""`quantize` and `cast_current` with a hint: one read of the tensor if the scale is that of the last time. See `octavo.kernels.cuda.hints`.

Column sums come with the cast: FP32 sums over the rows of a tile, in an order that the compiler chose once, and then over the tiles. No
sum is more than 128 + M / 1,024 + 10 roundings deep; as Triton adds up a tile, it is 8 instead of the 128.

The first launch has the instructions of the cast of two reads, 9.5 an element, and 13.5 with column sums, of the 28 for which its bytes
leave time; 72 registers a thread, or 117. The magnitudes of values of 16 bits are compared two at a time.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.cast import TILE as FLAT_TILE
from octavo.kernels.cuda.cast import scale_of
from octavo.kernels.cuda.columns import add_rows
from octavo.kernels.cuda.hints import (
    SETTLE_PROGRAMS,
    WORDS,
    amax_of_parts,
    hinted_scale,
    largest_bits,
    new_parts,
    remember_scale,
    settle,
    settled,
    store_part,
)
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import as_fp8, magnitude_bits
from octavo.kernels.cuda.tiles import (
    REPEAT,
    TILE_K,
    TILE_M,
    group_of,
    place_of,
    store_codes,
    store_sums,
    tile_rows,
)
from octavo.kernels.cuda.transpose import geometry

SETTLE_TILE_M = 2 * TILE_M
"""Of twice as many warps: half as many programs read each part."""
SETTLE_FLAT_TILE = 4 * FLAT_TILE


@triton.jit
def _load_tile(
    x_ptr,
    program,
    m_size,
    k_size,
    tiles_k,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """(values, inside, tile along M, rows, columns) of the tile of `program`."""
    tile, tile_k = place_of(program, tiles_k, GROUP)
    tile = tile.to(tl.int64)
    m = tile_rows(tile, REPEAT, TILE_M)
    k = tile_k.to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    inside = (m < m_size)[:, None] & (k < k_size)[None, :]
    at = x_ptr + (m * k_size)[:, None] + k[None, :]
    if WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x, inside, tile, m, k


@triton.jit(do_not_specialize=["tiles_k"])
def _quantize_kernel(
    x_ptr,
    hint_ptr,
    codes_ptr,
    codes_t_ptr,
    parts_ptr,
    sums_ptr,
    m_size,
    k_size,
    m_padded,
    k_padded,
    tiles_k,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes = saturate(round(x * s)), codes_t = codesᵀ, s = the hint, if there is one; sums = Σ x over the rows of each tile.

    x [m_size, k_size] contiguous: any float; hint [1]: int32; codes [m_padded, k_padded], codes_t [k_padded, m_padded]: FP8; parts:
    int32, as of `store_part`; sums [tiles, k_padded]: FP32. Codes and sums that are not wanted are None. WHOLE: there is no padding.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    x, inside, tile, m, k = _load_tile(x_ptr, program, m_size, k_size, tiles_k, WHOLE, GROUP, REPEAT, TILE_M, TILE_K)
    scale = hinted_scale(hint_ptr)
    store_part(parts_ptr, program, tl.num_programs(0), largest_bits(x), scale, MAX)
    store_sums(x.to(tl.float32), tile, k, k_padded, sums_ptr, k_padded)
    if scale > 0:
        store_codes(
            x.to(tl.float32), inside, tile, m, k, k_padded, scale, codes_ptr, codes_t_ptr, None, None,
            m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_k", "tiles"])
def _settle_quantize_kernel(
    x_ptr,
    hint_ptr,
    codes_ptr,
    codes_t_ptr,
    parts_ptr,
    scale_ptr,
    inverse_ptr,
    m_size,
    k_size,
    m_padded,
    k_padded,
    tiles_k,
    parts,
    tiles,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WORDS: tl.constexpr,
):
    """scale = `scale_of` the largest of `parts`, NaN if that is not finite, and inverse its reciprocal: FP32 [1]; if the codes are of
    another one, all again, and the hint. All else as of `_quantize_kernel`, with tiles of another size.
    """
    program = tl.program_id(0)
    right, scale = settle(program, hint_ptr, parts_ptr, parts, None, scale_ptr, inverse_ptr, MAX, True, WORDS)
    if not right:
        for turn in range(program, tiles, tl.num_programs(0)):
            x, inside, tile, m, k = _load_tile(
                x_ptr, turn, m_size, k_size, tiles_k, WHOLE, GROUP, REPEAT, TILE_M, TILE_K
            )
            store_codes(
                x.to(tl.float32), inside, tile, m, k, k_padded, scale, codes_ptr, codes_t_ptr, None, None,
                m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
            )  # fmt: skip


@triton.jit
def _cast_current_kernel(
    x_ptr, hint_ptr, codes_ptr, parts_ptr, numel, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, TILE: tl.constexpr
):
    """codes = saturate(round(x * s)), s = the hint; parts as of `store_part`. x, codes [numel]: any float, FP8; hint [1]: int32."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    start = program.to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    x = tl.load(x_ptr + start + lane, mask=lane < numel - start, other=0.0)
    scale = hinted_scale(hint_ptr)
    store_part(parts_ptr, program, tl.num_programs(0), largest_bits(x), scale, MAX)
    if scale > 0:
        tl.store(codes_ptr + start + lane, as_fp8(x.to(tl.float32) * scale, MANTISSA_BITS), mask=lane < numel - start)


@triton.jit
def _settle_current_kernel(
    x_ptr,
    hint_ptr,
    codes_ptr,
    parts_ptr,
    scale_ptr,
    largest_ptr,
    numel,
    parts,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """scale = `scale_of` the largest of `parts`, largest = max |codes|: FP32 [1]; if the codes are of another one, all again, and the hint.

    All codes are NaN if a value of x is not finite. All else as of `_cast_current_kernel`.
    """
    program = tl.program_id(0)
    right, scale = settled(parts_ptr, parts, WORDS)
    if not right or program == 0:
        amax = amax_of_parts(parts_ptr, parts, WORDS)
        scale = scale_of(amax, tl.full((), MAX, tl.float32), True)
        multiplier = tl.where(amax < float("inf"), scale, float("nan"))
        if program == 0:
            tl.store(scale_ptr, scale)
            # Rounding keeps the order: the largest code is that of the largest value. (Codes are made of whole tiles only.)
            code = as_fp8(tl.full([WORDS], 1.0, tl.float32) * (amax * multiplier), MANTISSA_BITS)
            tl.store(largest_ptr, tl.max(magnitude_bits(code), 0).to(tl.float32, bitcast=True))
            remember_scale(hint_ptr, scale)
        if not right:
            lane = tl.arange(0, TILE)
            for turn in range(program, (numel - 1) // TILE + 1, tl.num_programs(0)):  # (`tl.cdiv` would pass 2³¹)
                start = tl.cast(turn, tl.int64) * TILE
                x = tl.load(x_ptr + start + lane, mask=lane < numel - start, other=0.0).to(tl.float32)
                tl.store(codes_ptr + start + lane, as_fp8(x * multiplier, MANTISSA_BITS), mask=lane < numel - start)


_launch_quantize = Launcher(_quantize_kernel, num_warps=4)
_launch_settle_quantize = Launcher(_settle_quantize_kernel, num_warps=8)
_launch_cast_current = Launcher(_cast_current_kernel, num_warps=8)
_launch_settle_current = Launcher(_settle_current_kernel, num_warps=8)


def quantize(
    x: Tensor, fmt: Format, row: bool, col: bool, column_sum: torch.dtype | None, hint: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """`octavo.kernels.cuda.quantize.quantize` of a contiguous matrix with neither side below 2, with a power-of-two scale."""
    m, k = x.shape
    first, again, padded = _plan(m, k, fmt.dtype)
    (programs, scalars), (settlers, settle_scalars), (m_padded, k_padded) = first, again, padded
    codes = x.new_empty((m_padded, k_padded), dtype=fmt.dtype) if row else None
    codes_t = x.new_empty((k_padded, m_padded), dtype=fmt.dtype) if col else None
    sums = None
    if column_sum is not None:
        sums = x.new_empty((-(-m_padded // TILE_M), k_padded), dtype=torch.float32)
    parts = new_parts(x, programs)
    scale, inverse = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    _launch_quantize(programs, (x, hint, codes, codes_t, parts, sums), *scalars)
    _launch_settle_quantize(settlers, (x, hint, codes, codes_t, parts, scale, inverse), *settle_scalars)
    return codes, codes_t, scale, inverse, None if sums is None or column_sum is None else add_rows(sums, k, column_sum)


def cast_current(x: Tensor, fmt: Format, hint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`octavo.kernels.cuda.quantize.cast_current` of a contiguous tensor that is not empty."""
    numel = x.numel()
    programs = -(-numel // FLAT_TILE)
    parts = new_parts(x, programs)
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    scale, largest = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    constants = fmt.max, fmt.mantissa_bits
    _launch_cast_current(programs, (x, hint, codes, parts), numel, *constants, FLAT_TILE)
    _launch_settle_current(
        min(-(-numel // SETTLE_FLAT_TILE), SETTLE_PROGRAMS),
        (x, hint, codes, parts, scale, largest),
        *(numel, programs, *constants, SETTLE_FLAT_TILE, WORDS),
    )
    return codes, scale, largest


Scalars = tuple[float | bool, ...]


@cache
def _plan(m: int, k: int, dtype: torch.dtype) -> tuple[tuple[int, Scalars], tuple[int, Scalars], tuple[int, int]]:
    """(programs, scalars) of `_quantize_kernel` and of `_settle_quantize_kernel`, and the padded size."""
    fmt = Format.of(dtype)
    m_padded, k_padded, tiles_m, tiles_k = geometry(m, k, TILE_M, TILE_K)
    settle_tiles_m = -(-m_padded // SETTLE_TILE_M)
    sizes, constants = (m, k, m_padded, k_padded, tiles_k), (fmt.max, fmt.mantissa_bits)
    parts, tiles = tiles_m * tiles_k, settle_tiles_m * tiles_k

    def tiling(tile_m: int, tiles: int) -> Scalars:
        return m % tile_m == 0 and k % TILE_K == 0, group_of(tiles), REPEAT, tile_m, TILE_K

    first = parts, (*sizes, *constants, *tiling(TILE_M, tiles_m))
    settle = *sizes, parts, tiles, *constants, *tiling(SETTLE_TILE_M, settle_tiles_m), WORDS
    return first, (min(tiles, SETTLE_PROGRAMS), settle), (m_padded, k_padded)
