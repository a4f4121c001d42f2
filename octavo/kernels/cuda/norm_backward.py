"""Triton kernels of the gradient of LayerNorm and RMSNorm; see `octavo.kernels.norm`.

Bytes an element of BF16, and the time of 16,384 rows of 4,096 at 4.2 TB/s:

    dy, x, residual_grad; dx                    8       128 µs (6, 96 µs, without residual_grad)
    parts of dweight and dbias, FP32            + 3 % or 6 %, of RMSNorm or LayerNorm

As in `norm`, a program walks over rows that it holds in registers, one at a time, and adds up dweight and dbias of its rows there.
It leaves them as one part, and a second kernel adds the parts in their order: atomics would save that and change the sums from run to
run. How rows are shared out depends on the shape alone, and so does each bit. Rows of more than 8,192 columns leave no registers for
sums over rows: these then take a kernel of their own, and another read of dy and x.

From exact, dweight and dbias are at most (M / 128 + 32) · 2^-24 of the sum of their terms' magnitudes; dx, before it is rounded, at
most 2^-19 · rstd · (|g| + mean |g| + |n| · mean |g · n|).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.norm import SHARED_BYTES, block_of, unfit
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import larger, rows_of
from octavo.kernels.cuda.transpose import tile

SUMMED_COLUMNS = 8192
"""Columns up to which sums over rows stay in registers."""


@triton.jit(do_not_specialize=["m_size"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    residual_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    amax_ptr,
    m_size,
    dy_stride,
    x_stride,
    residual_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = (g - n * Σ(g * n) / K - Σ g / K) * rstd + residual; dweight = Σ dy * n, dbias = Σ dy, amax = max |dx| over this program's rows.

    g = dy * weight, n = (x - mean) * rstd; without a mean the last sum in dx is left out. dy, x, residual [m_size, K], their rows
    so far apart, and dx [m_size, K], contiguous: any float; weight [K]: any float; mean, rstd [m_size]: FP32; dweight, dbias
    [programs, K]: FP32, if SUMS; amax [programs]: FP32 bits as int32. A mean or residual that is None is zero.
    """
    k = tl.arange(0, BLOCK)
    valid = k < K
    weight = tl.load(weight_ptr + k, mask=valid, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK // 8], tl.int32)
    for row in tl.range(tl.program_id(0), m_size, tl.num_programs(0), num_stages=STAGES):
        at = row * tl.full([], 1, tl.int64)
        dy = tl.load(dy_ptr + at * dy_stride + k, mask=valid, other=0.0).to(tl.float32)
        n = tl.load(x_ptr + at * x_stride + k, mask=valid, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            n = n - tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        n = n * rstd
        g = dy * weight
        dx = g - n * (tl.sum(g * n, 0) * (1.0 / K))
        if mean_ptr is not None:
            dx = dx - tl.sum(g, 0) * (1.0 / K)
        dx = dx * rstd
        if residual_ptr is not None:
            dx += tl.load(residual_ptr + at * residual_stride + k, mask=valid, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at * K + k, dx.to(dx_ptr.dtype.element_ty), mask=valid)
        bits = magnitude_bits(tl.where(valid, dx, 0.0))
        largest = larger(tl.max(tl.reshape(bits, [BLOCK // 8, 8]), 1), largest)
        if SUMS:
            dweight += dy * n
            dbias += dy
    # Rounding keeps the order of magnitudes, so it can wait for the maximum.
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + tl.program_id(0), magnitude_bits(amax.to(dx_ptr.dtype.element_ty)))
    if SUMS:
        index = tl.program_id(0).to(tl.int64) * K + k
        tl.store(dweight_ptr + index, dweight, mask=valid)
        if mean_ptr is not None:
            tl.store(dbias_ptr + index, dbias, mask=valid)


@triton.jit(do_not_specialize=["m_size", "parts"])
def _sums_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    m_size,
    k_size,
    dy_stride,
    x_stride,
    tiles_k,
    parts,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """dweight = Σ dy * (x - mean) * rstd, dbias = Σ dy over the rows of a part, in a tile of columns; as `_backward_kernel`.

    Part p has the rows p * TILE_M to p * TILE_M + TILE_M - 1 of each parts * TILE_M. dweight, dbias [parts, k_size]: FP32.
    """
    m, k = tile(tl.program_id(0), tiles_k, TILE_M, TILE_K)
    dweight, dbias = tl.zeros([TILE_M, TILE_K], tl.float32), tl.zeros([TILE_M, TILE_K], tl.float32)
    for _ in range(tl.cdiv(m_size, parts * TILE_M)):
        valid = (m < m_size)[:, None] & (k < k_size)[None, :]
        dy = tl.load(dy_ptr + (m * dy_stride)[:, None] + k[None, :], mask=valid, other=0.0).to(tl.float32)
        n = tl.load(x_ptr + (m * x_stride)[:, None] + k[None, :], mask=valid, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            n = n - tl.load(mean_ptr + m, mask=m < m_size, other=0.0)[:, None]
        dweight += dy * (n * tl.load(rstd_ptr + m, mask=m < m_size, other=0.0)[:, None])
        dbias += dy
        m += parts * TILE_M
    index = (tl.program_id(0) // tiles_k).to(tl.int64) * k_size + k
    tl.store(dweight_ptr + index, tl.sum(dweight, 0), mask=k < k_size)
    if mean_ptr is not None:
        tl.store(dbias_ptr + index, tl.sum(dbias, 0), mask=k < k_size)


@triton.jit
def _add_parts_kernel(
    dweight_parts_ptr,
    dbias_parts_ptr,
    dweight_ptr,
    dbias_ptr,
    maxima_ptr,
    amax_ptr,
    parts,
    programs,
    k_size,
    TILE_P: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """dweight = Σ of its parts, dbias likewise, or None; amax = the largest of maxima [programs]: FP32 bits as int32.

    parts [parts, k_size], sums [k_size]: FP32; amax [1]: int32.
    """
    k = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    dweight, dbias = tl.zeros([TILE_P, TILE_K], tl.float32), tl.zeros([TILE_P, TILE_K], tl.float32)
    for first in range(0, parts, TILE_P):
        part = first + tl.arange(0, TILE_P)
        valid = (part < parts)[:, None] & (k < k_size)[None, :]
        index = part.to(tl.int64)[:, None] * k_size + k[None, :]
        dweight += tl.load(dweight_parts_ptr + index, mask=valid, other=0.0)
        if dbias_ptr is not None:
            dbias += tl.load(dbias_parts_ptr + index, mask=valid, other=0.0)
    tl.store(dweight_ptr + k, tl.sum(dweight, 0), mask=k < k_size)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + k, tl.sum(dbias, 0), mask=k < k_size)
    if tl.program_id(0) == 0:
        largest = tl.zeros([TILE_P], tl.int32)
        for first in range(0, programs, TILE_P):
            part = first + tl.arange(0, TILE_P)
            largest = larger(tl.load(maxima_ptr + part, mask=part < programs, other=0), largest)
        tl.store(amax_ptr, tl.max(largest, 0))


_launch_sums = Launcher(_sums_kernel, num_warps=4)
_launch_add_parts = Launcher(_add_parts_kernel, num_warps=4)


@cache
def _launch_backward(warps: int) -> Launcher:
    # dx is stored in one layout and its maximum found in another, which may compute it anew: with products fused into sums at other places
    # the two would differ by a rounding.
    return Launcher(_backward_kernel, num_warps=warps, enable_fp_fusion=False)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See `octavo.kernels.norm`."""
    if unfit(x):
        return reference.norm_backward(dy, x, weight, mean, rstd, residual_grad)
    dy, x, (m, k), block = rows_of(dy), rows_of(x), x.shape, block_of(x)
    residual = None if residual_grad is None else rows_of(residual_grad)
    mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
    summed = k <= SUMMED_COLUMNS
    # 16 elements a thread: two rows of 4,096, or one of 8,192, at a time on each of 128 multiprocessors.
    programs = min(m, max((1 << 20) // block, 128))
    parts = programs if summed else min(-(-m // 32), 16)
    dx = x.new_empty((m, k))
    dweights = x.new_empty((parts, k), dtype=torch.float32)
    dbiases = None if mean is None else torch.empty_like(dweights)
    maxima = x.new_empty(programs, dtype=torch.int32)
    row_bytes = block * (dy.itemsize + x.itemsize + (0 if residual is None else residual.itemsize))
    _launch_backward(min(max(block // 512, 1), 16))(
        programs,
        (dy, x, weight.contiguous(), mean, rstd, residual, dx, dweights, dbiases, maxima),
        *(m, dy.stride(0), x.stride(0), 0 if residual is None else residual.stride(0)),
        *(k, block, summed, 3 if 2 * row_bytes <= SHARED_BYTES else 2),
    )
    if not summed:
        tiles = triton.cdiv(k, 128)
        _launch_sums(
            parts * tiles,
            (dy, x, mean, rstd, dweights, dbiases),
            *(m, k, dy.stride(0), x.stride(0), tiles, parts, 32, 128),
        )
    dweight = x.new_empty(k, dtype=torch.float32)
    dbias = None if mean is None else torch.empty_like(dweight)
    amax = x.new_empty((), dtype=torch.float32)
    _launch_add_parts(
        triton.cdiv(k, 32),
        (dweights, dbiases, dweight, dbias, maxima, amax.view(torch.int32)),
        *(parts, programs, k, 64, 32),
    )
    return dx, dweight, dbias, amax
