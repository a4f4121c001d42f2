"""Triton kernels of LayerNorm and RMSNorm that write FP8; see `octavo.kernels.norm`.

Bytes an element of BF16, and the time of 16,384 rows of 4,096 at 4.2 TB/s:

    norm_stats      x                      2       32 µs
    add_norm_stats  x, addend; sum         6       96 µs
    norm_cast       x; codes, codes_t      4       64 µs

`norm_stats` holds one row at a time in registers, so that mean, variance and maximum take one read. Each program walks over many
rows: the weights are loaded once, and the next rows arrive in shared memory while one is worked on (`num_stages`). A sum along a row
has its own order, the same in each run: mean is within 2^-20 · mean |x| of exact, rstd within 2^-19 of itself (where the mean is at
most 16 standard deviations). `norm_cast` works on tiles, which it can write transposed, so it reads statistics instead of making them;
from equal ones follow equal bits, and the amax of both kernels is one.

Matrices with a size of 1 (see `transpose`), empty ones and rows of more than 16,384 columns take the reference.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels import reference
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import (
    REPEAT,
    TILE_K,
    TILE_M,
    flat_max,
    group_of,
    larger,
    load_floats,
    place_of,
    round_through,
    rows_of,
    store_codes,
    tile_rows,
)
from octavo.kernels.cuda.transpose import geometry

MAX_COLUMNS = 16_384
SHARED_BYTES = 200_000
"""Of shared memory for the rows to come; a multiprocessor of Hopper has 227 KiB."""


@triton.jit(do_not_specialize=["m_size"])
def _stats_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    addend_ptr,
    sum_ptr,
    m_size,
    stride_m,
    addend_stride,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mean = Σ x / K, rstd = 1 / √(Σ (x - mean)² / K + eps), amax = max |(x - mean) * rstd * weight + bias|.

    x [m_size, K], rows stride_m apart: any float; weight, bias [K]: any float; mean, rstd [m_size]: FP32; amax [1]: FP32 bits as
    int32, zero before. A mean or bias that is None is zero. Given an addend, its rows addend_stride apart, x stands for x + addend,
    rounded to the dtype of x and stored in sum [m_size, K], contiguous.
    """
    k = tl.arange(0, BLOCK)
    valid = k < K
    weight = tl.load(weight_ptr + k, mask=valid, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + k, mask=valid, other=0.0).to(tl.float32)
    largest = tl.zeros([BLOCK // 8], tl.int32)
    for row in tl.range(tl.program_id(0), m_size, tl.num_programs(0), num_stages=STAGES):
        at = row * tl.full([], 1, tl.int64)
        x = tl.load(x_ptr + at * stride_m + k, mask=valid, other=0.0).to(tl.float32)
        if addend_ptr is not None:
            x += tl.load(addend_ptr + at * addend_stride + k, mask=valid, other=0.0).to(tl.float32)
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + at * K + k, rounded, mask=valid)
            x = rounded.to(tl.float32)
        if mean_ptr is not None:
            mean = tl.sum(x, 0) * (1.0 / K)
            tl.store(mean_ptr + row, mean)
            x = tl.where(valid, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / K) + eps)
        tl.store(rstd_ptr + row, rstd)
        y = x * rstd * weight
        if bias_ptr is not None:
            y = y + bias
        bits = tl.max(tl.reshape(magnitude_bits(y), [BLOCK // 8, 8]), 1)
        largest = larger(bits, largest)
    # Rounding keeps the order of magnitudes, so it can wait for the maximum.
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.atomic_max(amax_ptr, magnitude_bits(amax.to(x_ptr.dtype.element_ty)), sem="relaxed")


@triton.jit(do_not_specialize=["tiles_k"])
def _cast_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    scale_ptr,
    codes_ptr,
    codes_t_ptr,
    stats_ptr,
    amax_ptr,
    m_size,
    k_size,
    stride_m,
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
    """codes = saturate(round(y * scale)), codes_t = codesᵀ, amax = max |y|, y = (x - mean) * rstd * weight + bias in the dtype of x.

    x [m_size, k_size], rows stride_m apart: any float; weight, bias [k_size]: any float; mean, rstd [m_size]: FP32; scale [1]: FP32;
    codes [m_padded, k_padded], codes_t [k_padded, m_padded]: FP8; stats [2]: int64; amax [1]: FP32 bits as int32, zero before. A mean
    or bias that is None is zero; results that are not wanted are None. Zero codes in the padding. WHOLE: it has none.
    """
    tile, tile_k = place_of(tl.program_id(0), tiles_k, GROUP)
    tile = tile.to(tl.int64)
    m = tile_rows(tile, REPEAT, TILE_M)
    k = tile_k.to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    inside = (m < m_size)[:, None] & (k < k_size)[None, :]
    y = load_floats(x_ptr + (m * stride_m)[:, None] + k[None, :], inside, WHOLE)
    if mean_ptr is not None:
        y = y - load_floats(mean_ptr + m, m < m_size, WHOLE)[:, None]
    y = (
        y
        * load_floats(rstd_ptr + m, m < m_size, WHOLE)[:, None]
        * load_floats(weight_ptr + k, k < k_size, WHOLE)[None, :]
    )
    if bias_ptr is not None:
        y = y + load_floats(bias_ptr + k, k < k_size, WHOLE)[None, :]
    y = round_through(y, x_ptr.dtype.element_ty)
    if not WHOLE:
        y = tl.where(inside, y, 0.0)
    if amax_ptr is not None:  # (Found here, not below, where it would keep y in registers.)
        largest = flat_max(magnitude_bits(y))
    store_codes(
        y, inside, tile, m, k, k_padded, tl.load(scale_ptr), codes_ptr, codes_t_ptr, stats_ptr, None,
        m_padded, k_padded, MAX, MANTISSA_BITS, WHOLE, REPEAT,
    )  # fmt: skip
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


_launch_cast = Launcher(_cast_kernel, num_warps=4, enable_fp_fusion=False)


@cache
def _launch_stats(warps: int, fused: bool) -> Launcher:
    return Launcher(_stats_kernel, num_warps=warps, enable_fp_fusion=fused)


def norm_stats(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """See `octavo.kernels.norm`."""
    if unfit(x):
        return reference.norm_stats(x, weight, bias, eps, centered=centered)
    return _stats(rows_of(x), None, None, weight, bias, eps, centered)


def add_norm_stats(
    x: Tensor, addend: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See `octavo.kernels.norm`."""
    if unfit(x):
        return reference.add_norm_stats(x, addend, weight, bias, eps, centered=centered)
    total = x.new_empty(x.shape)
    return total, *_stats(rows_of(x), rows_of(addend), total, weight, bias, eps, centered)


def _stats(
    x: Tensor,
    addend: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    (m, k), block = x.shape, block_of(x)
    mean = x.new_empty(m, dtype=torch.float32) if centered else None
    rstd = x.new_empty(m, dtype=torch.float32)
    amax = x.new_zeros((), dtype=torch.float32)
    row_bytes = block * x.itemsize * (1 if addend is None else 2)
    # 32 elements a thread, four rows of 4,096 at a time on each multiprocessor. Without mean and bias no product can be fused but the
    # squares into their sum; with them, products that `norm_cast` rounds could be too.
    _launch_stats(min(max(block // 1024, 1), 16), mean is None and bias is None)(
        min(m, (1 << 21) // block),
        (
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            mean,
            rstd,
            amax.view(torch.int32),
            addend,
            total,
        ),
        *(m, x.stride(0), 0 if addend is None else addend.stride(0), float(eps), k, block),
        3 if 2 * row_bytes <= SHARED_BYTES else 2,
    )
    return mean, rstd, amax


def norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    row: bool = True,
    col: bool = True,
    amax: bool = True,
    stats: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See `octavo.kernels.norm`."""
    if unfit(x):
        return reference.norm_cast(x, weight, bias, mean, rstd, scale, dtype, row=row, col=col, amax=amax, stats=stats)
    x, (m, k), fmt = rows_of(x), x.shape, Format.of(dtype)
    m_padded, k_padded, tiles_m, tiles_k = geometry(m, k, TILE_M, TILE_K)
    codes = x.new_empty((m_padded, k_padded), dtype=dtype) if row else None
    codes_t = x.new_empty((k_padded, m_padded), dtype=dtype) if col else None
    maximum = x.new_zeros((), dtype=torch.float32) if amax else None
    vectors = [None if vector is None else vector.contiguous() for vector in (weight, bias, mean, rstd)]
    _launch_cast(
        tiles_m * tiles_k,
        (x, *vectors, scale, codes, codes_t, stats, None if maximum is None else maximum.view(torch.int32)),
        *(m, k, x.stride(0), m_padded, k_padded, tiles_k),
        *(fmt.max, fmt.mantissa_bits, m % TILE_M == 0 and k % TILE_K == 0, group_of(tiles_m), REPEAT, TILE_M, TILE_K),
    )
    return codes, codes_t, maximum


def unfit(x: Tensor) -> bool:
    """Whether the reference takes `x`."""
    return x.numel() == 0 or 1 in x.shape or x.shape[1] > MAX_COLUMNS


def block_of(x: Tensor) -> int:
    """The power of two that holds a row, and is work for a warp."""
    return max(triton.next_power_of_2(x.shape[1]), 256)
