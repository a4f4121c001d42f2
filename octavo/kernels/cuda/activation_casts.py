"""The Triton kernels of `octavo.kernels.cuda.activation` that cast, with a scale that is known or with a hint of it."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.cuda.activation_kernels import activate, gradients
from octavo.kernels.cuda.hints import hinted_scale, settle, store_part
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import (
    flat_max,
    larger,
    load_floats,
    place_of,
    round_through,
    store_codes,
    store_sums,
    tile_rows,
)


@triton.jit
def _values(
    program,
    h_ptr,
    da_ptr,
    m_size,
    width,
    h_stride,
    da_stride,
    tiles_k,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """(y, its second half, inside, tile along M, rows, columns) of the tile of `program`, rounded to the dtype of h, as FP32.

    The second half is that of a gated gradient, and of no use otherwise.
    """
    tile, tile_k = place_of(program, tiles_k, GROUP)
    tile = tile.to(tl.int64)
    m = tile_rows(tile, REPEAT, TILE_M)
    k = tile_k.to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    inside = (m < m_size)[:, None] & (k < width)[None, :]
    at = (m * h_stride)[:, None] + k[None, :]
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    x = load_floats(h_ptr + at, inside, WHOLE)
    up = x
    if GATED:
        up = load_floats(h_ptr + at + width, inside, WHOLE)
    if da_ptr is None:
        x = round_through(activate(x, up, GATED), DTYPE)
    else:
        grad = load_floats(da_ptr + (m * da_stride)[:, None] + k[None, :], inside, WHOLE)
        x, up = gradients(grad, x, up, GATED)
        x = round_through(x, DTYPE)
    if GATED and da_ptr is not None:
        up = round_through(up, DTYPE)
    return x, up, inside, tile, m, k


@triton.jit
def _store(
    x,
    up,
    inside,
    tile,
    m,
    k,
    scale,
    codes_ptr,
    codes_t_ptr,
    stats_ptr,
    width,
    m_padded,
    k_padded,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    REPEAT: tl.constexpr,
    TWO: tl.constexpr,
):
    """`store_codes` of one half or of TWO."""
    limit = k_padded
    if TWO:
        limit = width
    store_codes(
        x, inside, tile, m, k, limit, scale, codes_ptr, codes_t_ptr, stats_ptr, None,
        m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
    )  # fmt: skip
    if TWO:  # The second half ends in the padding.
        store_codes(
            up, inside, tile, m, k + width, k_padded, scale, codes_ptr, codes_t_ptr, stats_ptr, None,
            m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_k"])
def cast_kernel(
    h_ptr,
    da_ptr,
    scale_ptr,
    codes_ptr,
    codes_t_ptr,
    stats_ptr,
    sums_ptr,
    amax_ptr,
    parts_ptr,
    m_size,
    width,
    h_stride,
    da_stride,
    m_padded,
    k_padded,
    tiles_k,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes = saturate(round(y * scale)), codes_t = codesᵀ, amax = max |y|, sums = Σ y over rows, of y = a or, given da, y = dh.

    h [m_size, width or 2·width], da [m_size, width] or None, rows h_stride and da_stride apart: any float; scale [1]: FP32; codes
    [m_padded, k_padded], codes_t [k_padded, m_padded]: FP8; stats [2]: int64; sums [tiles, k_padded]: FP32, of each tile; amax [1]: FP32
    bits as int32, zero before; parts, int32, as of `store_part`: scale is a hint then, int32. Results that are not wanted are None. Zero
    codes in the padding.
    """
    program = tl.program_id(0)
    x, up, inside, tile, m, k = _values(
        program, h_ptr, da_ptr, m_size, width, h_stride, da_stride, tiles_k, GATED, WHOLE, GROUP, REPEAT, TILE_M, TILE_K
    )
    TWO: tl.constexpr = GATED and da_ptr is not None
    if amax_ptr is not None or parts_ptr is not None:
        largest = magnitude_bits(x)
        if TWO:
            largest = larger(magnitude_bits(up), largest)
        largest = flat_max(largest)
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, largest)
    store_sums(x, tile, k, width if TWO else k_padded, sums_ptr, k_padded)
    if TWO:
        store_sums(up, tile, k + width, k_padded, sums_ptr, k_padded)
    if parts_ptr is None:
        scale = tl.load(scale_ptr)
        _store(
            x, up, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, stats_ptr,
            width, m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT, TWO,
        )  # fmt: skip
    else:
        scale = hinted_scale(scale_ptr)
        store_part(parts_ptr, program, tl.num_programs(0), largest, scale, MAX)
        if scale > 0:
            _store(
                x, up, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, None,
                width, m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT, TWO,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_k", "tiles"])
def settle_kernel(
    h_ptr,
    da_ptr,
    hint_ptr,
    codes_ptr,
    codes_t_ptr,
    parts_ptr,
    scale_ptr,
    visible_ptr,
    inverse_ptr,
    m_size,
    width,
    h_stride,
    da_stride,
    m_padded,
    k_padded,
    tiles_k,
    parts,
    tiles,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    REPEAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WORDS: tl.constexpr,
):
    """scale = `scale_of` the largest of `parts`, `visible` and inverse: FP32 [1]; if the codes are of another one, all again, and the hint.

    See `octavo.kernels.cuda.hints`; all else is as of `cast_kernel`, with tiles of another size.
    """
    program = tl.program_id(0)
    right, scale = settle(program, hint_ptr, parts_ptr, parts, scale_ptr, visible_ptr, inverse_ptr, MAX, True, WORDS)
    if not right:
        for turn in range(program, tiles, tl.num_programs(0)):
            x, up, inside, tile, m, k = _values(
                turn, h_ptr, da_ptr, m_size, width, h_stride, da_stride, tiles_k,
                GATED, WHOLE, GROUP, REPEAT, TILE_M, TILE_K,
            )  # fmt: skip
            _store(
                x, up, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, None,
                width, m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT, GATED and da_ptr is not None,
            )  # fmt: skip
