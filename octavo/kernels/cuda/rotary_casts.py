"""The gradient of queries, keys and values before their positions as FP8 operands: `rotary_backward` and `quantize` in one.

Apart, the first reads three gradients and writes one matrix, which the second reads. Here it exists as codes only. Bytes an element in
BF16, both operands wanted, and the time of 16,384 tokens × 12,288 at 4.2 TB/s:

    rotary_backward, then quantize with its amax    2 + 2, 2 + 2    383 µs
    here, with a right hint of the scale            2 + 2           192 µs
    here, without one                               2, 2 + 2        288 µs

The two launches are those of `octavo.kernels.cuda.hints`: cast with the hint, if there is one, and find the maximum; then settle. Without a
hint the first only finds the maximum, and column sums.

A tile has the first halves of heads and, apart, their second halves: `TILE_K` pairs of channels, of one head or of some narrow ones, so
that each gradient is loaded once. The table is FP32 and shared by all heads, 8 bytes a pair against 4 of a gradient. From the second cache
it would be more than all else that is read, and in registers it leaves no room. So a program takes the same pairs of `TURNS` heads one
after the other, and finds their angles in the first cache, which gradients pass by.

On Hopper both launches have 128 registers a thread, of four blocks on a multiprocessor. The first has 16 instructions an element, 11 where
nothing is turned, of the 28 for which its bytes leave time; 24 with column sums, whose tiles are narrow. A sum is at most
128 + M / 1,024 + 10 roundings deep.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.columns import add_rows
from octavo.kernels.cuda.hints import (
    SETTLE_PROGRAMS,
    hintable,
    hinted_scale,
    new_parts,
    settle,
    store_part,
)
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.quantize import quantize
from octavo.kernels.cuda.rotary import rotary_backward
from octavo.kernels.cuda.tiles import (
    flat_max,
    group_of,
    larger,
    load_floats,
    place_of,
    round_through,
    store_codes,
    store_sums,
    tile_rows,
)
from octavo.kernels.reference import ALIGN

TILE_M, TILE_K = 128, 32
"""Tokens, and pairs of channels of each."""
REPEAT = 4
"""Rows of a half that a thread holds, as in `octavo.kernels.cuda.tiles`."""
TURNS = 4
"""Tiles of a program, at most."""
MIN_PAIRS = 8
"""Neighbouring channels in a tile: 16 bytes."""
WORDS = 1024
"""Parts that a program of the second launch reads at a time."""


@triton.jit
def _rows(
    tile, block, m_size, tokens,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr, REPEAT: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """(rows, their sequences, places in these, whether the rows are some, channels of the first halves) of the tiles of a program."""
    m = tile_rows(tile, REPEAT, TILE_M)
    if WHOLE:  # All rows are of one sequence.
        batch = (tile * TILE_M).to(tl.int32) // tokens
    else:
        batch = m.to(tl.int32) // tokens
    channel = block * PAIRS + tl.arange(0, TILE_K) % PAIRS
    return m, batch, m.to(tl.int32) - batch * tokens, (m < m_size)[:, None], channel


@triton.jit
def _turned_back(
    index, m, batch, place, inside, channel, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, heads, groups, tiles_q, tiles_g,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    BATCHED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """(first halves, second halves, columns of the first) of tile `index` of queries, keys and values, turned and rounded, as FP32."""
    is_q, turned = index < tiles_q, index < tiles_q + tiles_g
    x_ptr = tl.where(is_q, q_ptr, tl.where(turned, k_ptr, v_ptr))
    stride_b = tl.where(is_q, q_b, tl.where(turned, k_b, v_b))
    stride_t = tl.where(is_q, q_t, tl.where(turned, k_t, v_t))
    stride_h = tl.where(is_q, q_h, tl.where(turned, k_h, v_h))
    first = tl.where(is_q, 0, tl.where(turned, heads, heads + groups))
    index -= tl.where(is_q, 0, tl.where(turned, tiles_q, tiles_q + tiles_g))
    head = (index * (TILE_K // PAIRS) + tl.arange(0, TILE_K) // PAIRS).to(tl.int64)
    batch, place = batch.to(tl.int64), place.to(tl.int64)
    x_ptr += (batch * stride_b + place * stride_t)[:, None] + (head * stride_h + channel)[None, :]
    if WHOLE:
        x, y = tl.load(x_ptr, cache_modifier=".cg"), tl.load(x_ptr + HALF, cache_modifier=".cg")
    else:
        x, y = tl.load(x_ptr, mask=inside, other=0.0), tl.load(x_ptr + HALF, mask=inside, other=0.0)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if cos_ptr is not None:
        if turned:
            at = ((m if BATCHED else place) * HALF)[:, None] + channel[None, :]
            cos, sin = load_floats(cos_ptr + at, inside, WHOLE), load_floats(sin_ptr + at, inside, WHOLE)
            DTYPE: tl.constexpr = q_ptr.dtype.element_ty
            a = round_through(x * cos + y * sin, DTYPE)
            y = round_through(y * cos - x * sin, DTYPE)
            x = a
    return x, y, (first + head) * (2 * HALF) + channel


@triton.jit
def _store(
    x, y, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, m_padded, k_size,
    MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """`store_codes` of both halves."""
    store_codes(
        x, inside, tile, m, k, k_size, scale, codes_ptr, codes_t_ptr, None, None,
        m_padded, k_size, MAX, MANTISSA_BITS, WHOLE, REPEAT,
    )  # fmt: skip
    store_codes(
        y, inside, tile, m, k + HALF, k_size, scale, codes_ptr, codes_t_ptr, None, None,
        m_padded, k_size, MAX, MANTISSA_BITS, WHOLE, REPEAT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "heads", "groups", "tiles_q", "tiles_g"])
def _rotary_cast_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, hint_ptr, codes_ptr, codes_t_ptr, parts_ptr, sums_ptr,
    m_size, m_padded, k_size, tokens, heads, groups, tiles_q, tiles_g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BATCHED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, GROUP: tl.constexpr, TURNS: tl.constexpr,
    REPEAT: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """codes = saturate(round(x * s)), codes_t = codesᵀ, s = the hint, if there is one; sums = Σ x over the rows of each tile; of
    x = (q turned back, k turned back, v) along heads, rounded to the dtype of q.

    q [B, tokens, heads, 2·HALF], k and v [B, tokens, groups, 2·HALF], so far apart, channels contiguous: any float; cos and sin [tokens,
    HALF], or [B, tokens, HALF] if BATCHED: FP32, or None; hint [1]: int32 or None; codes [m_padded, k_size], codes_t [k_size, m_padded]:
    FP8; parts: int32, as of `store_part`; sums [tiles, k_size]: FP32. What is not wanted is None. WHOLE: there is no padding, and a tile
    is of one sequence. A tile has PAIRS neighbouring pairs of TILE_K / PAIRS heads.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    BLOCKS: tl.constexpr = HALF // PAIRS
    tile, column = place_of(program, (tiles_q + 2 * tiles_g) // TURNS * BLOCKS, GROUP)
    tile, index = tile.to(tl.int64), column // BLOCKS * TURNS
    m, batch, place, inside, channel = _rows(
        tile, column % BLOCKS, m_size, tokens, PAIRS, WHOLE, REPEAT, TILE_M, TILE_K
    )
    scale = tl.full((), 0.0, tl.float32)
    if hint_ptr is not None:
        scale = hinted_scale(hint_ptr)
    largest = tl.full((), 0, tl.int32)
    for turn in tl.range(TURNS, disable_licm=True):
        x, y, k = _turned_back(
            index + turn, m, batch, place, inside, channel, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
            heads, groups, tiles_q, tiles_g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, BATCHED, HALF, PAIRS, WHOLE, TILE_K,
        )  # fmt: skip
        largest = larger(flat_max(larger(magnitude_bits(x), magnitude_bits(y))), largest)
        store_sums(x, tile, k, k_size, sums_ptr, k_size)
        store_sums(y, tile, k + HALF, k_size, sums_ptr, k_size)
        if hint_ptr is not None:
            if scale > 0:
                _store(
                    x, y, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, m_padded, k_size,
                    MAX, MANTISSA_BITS, HALF, WHOLE, REPEAT,
                )  # fmt: skip
    store_part(parts_ptr, program, tl.num_programs(0), largest, scale, MAX)


@triton.jit(do_not_specialize=["tokens", "heads", "groups", "tiles_q", "tiles_g", "parts"])
def _rotary_settle_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, hint_ptr, codes_ptr, codes_t_ptr, parts_ptr, scale_ptr, inverse_ptr,
    m_size, m_padded, k_size, tokens, heads, groups, tiles_q, tiles_g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, parts,
    MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BATCHED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, GROUP: tl.constexpr, TURNS: tl.constexpr,
    REPEAT: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, POWER_OF_TWO: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """scale = `scale_of` the largest of `parts`, NaN if that is not finite, and inverse its reciprocal: FP32 [1]; if the codes are of
    another one, all again, and the hint. All else as of `_rotary_cast_kernel`, whose programs left one part each.
    """
    program = tl.program_id(0)
    right, scale = settle(program, hint_ptr, parts_ptr, parts, None, scale_ptr, inverse_ptr, MAX, POWER_OF_TWO, WORDS)
    if not right:
        BLOCKS: tl.constexpr = HALF // PAIRS
        for part in range(program, parts, tl.num_programs(0)):
            tile, column = place_of(part, (tiles_q + 2 * tiles_g) // TURNS * BLOCKS, GROUP)
            tile, index = tile.to(tl.int64), column // BLOCKS * TURNS
            m, batch, place, inside, channel = _rows(
                tile, column % BLOCKS, m_size, tokens, PAIRS, WHOLE, REPEAT, TILE_M, TILE_K
            )
            for turn in tl.range(TURNS, disable_licm=True):
                x, y, k = _turned_back(
                    index + turn, m, batch, place, inside, channel, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
                    heads, groups, tiles_q, tiles_g, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
                    BATCHED, HALF, PAIRS, WHOLE, TILE_K,
                )  # fmt: skip
                _store(
                    x, y, inside, tile, m, k, scale, codes_ptr, codes_t_ptr, m_padded, k_size,
                    MAX, MANTISSA_BITS, HALF, WHOLE, REPEAT,
                )  # fmt: skip


# At 128 registers a thread four blocks run on a multiprocessor. What is invariant in the loop over heads stays there (`disable_licm`), for
# hoisted it would go to the stack; with masks or gradients in FP32 a few words still do.
_launch_cast = Launcher(_rotary_cast_kernel, num_warps=4, enable_fp_fusion=False, maxnreg=128)
_launch_settle = Launcher(_rotary_settle_kernel, num_warps=4, enable_fp_fusion=False, maxnreg=128)


def rotary_backward_quantize(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    column_sum: torch.dtype | None = None,
    hint: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """See `octavo.kernels.reference.rotary_backward_quantize`. Heads that do not fill tiles, and a single token, take two kernels."""
    (batch, tokens, heads, channels), groups = dq.shape, dk.shape[2]
    m, k = batch * tokens, (heads + 2 * groups) * channels
    plan = _plan(batch, tokens, heads, groups, channels)
    if plan is None:
        dy, amax = rotary_backward(dq, dk, dv, cos, sin)
        dy = dy.view(m, k)
        return quantize(
            dy, fmt, power_of_two=power_of_two, row=row, col=col, column_sum=column_sum, amax=amax, hint=hint
        )
    programs, tiles_m, m_padded, sizes, (pairs, whole), tiling = plan
    gradients = [one if one.stride(-1) == 1 else one.contiguous() for one in (dq, dk, dv)]
    table = [None if one is None else one.contiguous() for one in (cos, sin)]
    hint = hint if power_of_two and hintable(dq, hint) else None

    codes = dq.new_empty((m_padded, k), dtype=fmt.dtype) if row else None
    codes_t = dq.new_empty((k, m_padded), dtype=fmt.dtype) if col else None
    sums = None if column_sum is None else dq.new_empty((tiles_m, k), dtype=torch.float32)
    scale, inverse = dq.new_empty((), dtype=torch.float32), dq.new_empty((), dtype=torch.float32)
    parts = new_parts(dq, programs)
    strides = [stride for one in gradients for stride in one.stride()[:3]]
    scalars = *sizes, *strides
    constants = fmt.max, fmt.mantissa_bits, cos is not None and cos.dim() == 3, channels // 2, pairs, whole
    tensors = *gradients, *table, hint, codes, codes_t, parts
    _launch_cast(programs, (*tensors, sums), *scalars, *constants, *tiling)
    outputs, settlers = (*tensors, scale, inverse), min(programs, SETTLE_PROGRAMS)
    _launch_settle(settlers, outputs, *scalars, programs, *constants, *tiling, power_of_two, WORDS)
    return codes, codes_t, scale, inverse, None if sums is None or column_sum is None else add_rows(sums, k, column_sum)


Plan = tuple[int, int, int, tuple[int, ...], tuple[int, bool], tuple[int, ...]]


@cache
def _plan(batch: int, tokens: int, heads: int, groups: int, channels: int) -> Plan | None:
    """(programs, tiles along M, M padded, sizes, (PAIRS, WHOLE), tiling) of the kernels; None where heads do not fill tiles."""
    m, half = batch * tokens, channels // 2
    pairs = gcd(half, TILE_K)
    together = TILE_K // pairs
    if m <= 1 or channels % 2 or pairs < MIN_PAIRS or heads % together or groups % together:
        return None
    m_padded = -(-m // ALIGN) * ALIGN
    tiles_m, tiles_q, tiles_g = triton.cdiv(m_padded, TILE_M), heads // together, groups // together
    tiles = tiles_q + 2 * tiles_g
    turns = next(n for n in range(TURNS, 0, -1) if tiles % n == 0)
    sizes = m, m_padded, (heads + 2 * groups) * channels, tokens, heads, groups, tiles_q, tiles_g
    whole = m % TILE_M == 0 and tokens % TILE_M == 0
    tiling = group_of(tiles_m), turns, REPEAT, TILE_M, TILE_K
    return tiles_m * tiles // turns * (half // pairs), tiles_m, m_padded, sizes, (pairs, whole), tiling
