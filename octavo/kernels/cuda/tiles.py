"""Tiles of values in registers that are written as FP8 codes, row-major and transposed: what casts of tensors, norms and activations share.

A kernel of a norm or an activation computes in FP32 what a layer would have stored in 16 bits and cast after, so it rounds twice. All have
few instructions to spare for each byte that they move:

- BF16 is rounded two at a time: Triton converts one by one, in the unit that exponentials and roots share, an eighth as wide.
- A matrix of whole tiles (`WHOLE`) has no masks.
- The transpose moves words of codes through shared memory, not bytes, and codes, not what they are computed from.
- There is no minimum or maximum of floats, because conversions to FP8 saturate on the device.

Tiles of 128 × 64 and four warps: four of them on a multiprocessor are in as many phases of load, compute and store. Tiles that are
worked on at the same time lie in `GROUP` rows: in one row of a wide matrix they would write 128 bytes here and there of the transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.numerics import INTERPRETED, as_fp8, flushed_count, saturate, saturated_count

TILE_M, TILE_K = 128, 64
GROUP = 8
"""Rows of tiles that are taken column by column: 1 KB of a row of the transpose, and some 8 KB of each row that is read."""
REPEAT = 4
"""Rows of a tile that a thread holds: it has 16 columns, and 128 threads have a tile."""


def rows_of(x: Tensor) -> Tensor:
    """`x` with contiguous rows, wherever they lie."""
    return x if x.stride(1) == 1 else x.contiguous()


def group_of(tiles_m: int) -> int:
    """The largest number up to GROUP that shares out the rows of tiles: 393, of a vocabulary of 50,304, in threes."""
    return next(size for size in range(GROUP, 0, -1) if tiles_m % size == 0)


@triton.jit
def place_of(program, tiles_k, GROUP: tl.constexpr):
    """(tile along M, tile along K) of a program: column by column in GROUP rows of tiles, then the next rows."""
    within = program % (GROUP * tiles_k)
    return program // (GROUP * tiles_k) * GROUP + within % GROUP, within // GROUP


@triton.jit
def tile_rows(tile, REPEAT: tl.constexpr, TILE_M: tl.constexpr):
    """The rows of the matrix that are loaded as rows of a tile (int64), in the order that `store_codes` transposes by words.

    A thread holds every (TILE_M / REPEAT)th row of those loaded. They are made neighbours in the matrix, so that its codes of a column
    are a word of the transpose, which would go through shared memory byte by byte otherwise.
    """
    index = tl.arange(0, TILE_M)
    return tile * TILE_M + index % (TILE_M // REPEAT) * REPEAT + index // (TILE_M // REPEAT)


@triton.jit
def round_through(x, DTYPE: tl.constexpr):
    """FP32 `x` rounded to DTYPE, as FP32."""
    if DTYPE == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xFFFF0000; }",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def load_floats(ptr, inside, WHOLE: tl.constexpr):
    """Values as FP32; 0, of which everything else is 0, where they are not `inside`."""
    if WHOLE:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def larger(a, b):
    """max(a, b) of integers."""
    return tl.where(a > b, a, b)


@triton.jit
def flat_max(bits):
    """The largest of a tile of integers."""
    return tl.max(tl.reshape(bits, [bits.shape[0] * bits.shape[1]]), 0)


@triton.jit
def store_sums(x, tile, k, limit, sums_ptr, k_padded):
    """Store the column sums of `x` (FP32), of columns `k`, where `k` < `limit`; sums may be None."""
    if sums_ptr is not None:
        tl.store(sums_ptr + tile * k_padded + k, tl.sum(x, 0), mask=k < limit)


@triton.jit
def store_codes(
    x,
    inside,
    tile,
    m,
    k,
    limit,
    scale,
    codes_ptr,
    codes_t_ptr,
    stats_ptr,
    sums_ptr,
    m_padded,
    k_padded,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """Cast and count `x` (FP32), of rows `m` and columns `k`; store its codes, transpose and column sums where `k` < `limit`.

    `scale` is FP32, a scalar.
    """
    TILE_M: tl.constexpr = x.shape[0]
    TILE_K: tl.constexpr = x.shape[1]
    store_sums(x, tile, k, limit, sums_ptr, k_padded)
    y = x * scale
    if not WHOLE:  # The padding is not multiplied: a NaN scale must not reach it.
        y = tl.where(inside, y, 0.0)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr, tl.sum(tl.sum(saturated_count(y, MAX), 1), 0).to(tl.int64))
    if INTERPRETED:  # (The device's conversion saturates by itself.)
        y = saturate(y, MAX)
    codes = as_fp8(y, MANTISSA_BITS)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr + 1, tl.sum(tl.sum(flushed_count(x, codes), 1), 0).to(tl.int64))
    codes = codes.to(tl.uint8, bitcast=True)
    if codes_ptr is not None:
        at = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + (m * k_padded)[:, None] + k[None, :]
        if WHOLE:
            tl.store(at, codes)
        else:
            tl.store(at, codes, mask=(m < m_padded)[:, None] & (k < limit)[None, :])
    if codes_t_ptr is not None:
        # Widened and narrowed, which leaves no trace in the machine's code: to Triton a value that is widened is the best to move to
        # another layout, and it would find that in `x` or before, move more bytes and compute all that follows in both layouts.
        codes = (codes.to(tl.uint16) & 0xFF).to(tl.uint8)
        codes = tl.permute(tl.reshape(codes, [REPEAT, TILE_M // REPEAT, TILE_K]), [2, 1, 0])
        codes = tl.reshape(codes, [TILE_K, TILE_M])
        m = tile * TILE_M + tl.arange(0, TILE_M)
        at = codes_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + (k * m_padded)[:, None] + m[None, :]
        if WHOLE:
            tl.store(at, codes)
        else:
            tl.store(at, codes, mask=(k < limit)[:, None] & (m < m_padded)[None, :])
