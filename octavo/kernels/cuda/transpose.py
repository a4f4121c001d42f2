"""Triton kernels that write a matrix row-major and transposed in one pass, in 8 bits.

Hopper's FP8 tensor cores read operands along the contracted dim only, so the activation x [M, K] is needed as it lies for the
forward GEMM and as xᵀ for the weight gradient, and the output gradient likewise. Done apart this moves 2 + 1 + 1 + 1 bytes an
element of BF16; here it moves 2 + 1 + 1. A program holds one tile in registers and stores it twice; the transposition happens in
shared memory, where Triton changes the layout of `tl.trans`.

A matrix of one row or one column takes the reference: Triton 3.6 makes a size of 1 a constant of the kernel, and then leaves bytes in
the padding that nobody computed (seen on an H200, at fixed places).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels import reference
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import as_fp8, flushed_count, magnitude_bits, saturate, saturated_count
from octavo.kernels.reference import ALIGN

TILE_M = 128
TILE_K = 128


@triton.jit
def tile(program, tiles_k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(row, column) int64 indices of the tile of a program; neighbouring programs are neighbours along K."""
    m = (program // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = (program % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    return m, k


@triton.jit
def store_tile(codes, codes_ptr, codes_t_ptr, m, k, m_padded, k_padded):
    """Store a tile of bytes into codes [m_padded, k_padded], its transpose into codes_t [k_padded, m_padded]; each may be None."""
    if codes_ptr is not None:
        mask = (m < m_padded)[:, None] & (k < k_padded)[None, :]
        target = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(target + (m * k_padded)[:, None] + k[None, :], codes, mask=mask)
    if codes_t_ptr is not None:
        mask = (k < k_padded)[:, None] & (m < m_padded)[None, :]
        target = codes_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(target + (k * m_padded)[:, None] + m[None, :], tl.trans(codes), mask=mask)


@triton.jit(do_not_specialize=["tiles_k"])
def _cast_transpose_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    codes_t_ptr,
    stats_ptr,
    amax_ptr,
    m_size,
    k_size,
    m_padded,
    k_padded,
    stride_m,
    stride_k,
    tiles_k,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes = saturate(round(x * scale)), codes_t = codesᵀ, amax = max |x|; zero codes in the padding.

    x [m_size, k_size] with any strides: any float; scale [1]: FP32; codes [m_padded, k_padded], codes_t [k_padded, m_padded]: FP8;
    stats [2]: int64; amax [1]: FP32 bits as int32, zero before. Results that are not wanted are None.
    """
    m, k = tile(tl.program_id(0), tiles_k, TILE_M, TILE_K)
    valid = (m < m_size)[:, None] & (k < k_size)[None, :]
    x = tl.load(x_ptr + (m * stride_m)[:, None] + (k * stride_k)[None, :], mask=valid, other=0.0).to(tl.float32)
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude_bits(x), 1), 0))
    # The padding is not multiplied: a NaN scale must not reach it.
    y = tl.where(valid, x * tl.load(scale_ptr), 0.0)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr, tl.sum(tl.sum(saturated_count(y, MAX), 1), 0).to(tl.int64))
    codes = as_fp8(saturate(y, MAX), MANTISSA_BITS)
    if stats_ptr is not None:
        tl.atomic_add(stats_ptr + 1, tl.sum(tl.sum(flushed_count(x, codes), 1), 0).to(tl.int64))
    store_tile(codes.to(tl.uint8, bitcast=True), codes_ptr, codes_t_ptr, m, k, m_padded, k_padded)


@triton.jit(do_not_specialize=["tiles_k"])
def _transpose_kernel(
    codes_ptr,
    codes_t_ptr,
    m_size,
    k_size,
    m_padded,
    k_padded,
    stride_m,
    stride_k,
    stride_out,
    tiles_k,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes_t [k_padded, m_padded] = codesᵀ of codes [m_size, k_size] with any strides, bytes; zeros in the padding.

    Rows of codes_t are stride_out apart.
    """
    m, k = tile(tl.program_id(0), tiles_k, TILE_M, TILE_K)
    valid = (m < m_size)[:, None] & (k < k_size)[None, :]
    codes = tl.load(codes_ptr + (m * stride_m)[:, None] + (k * stride_k)[None, :], mask=valid, other=0)
    mask = (k < k_padded)[:, None] & (m < m_padded)[None, :]
    tl.store(codes_t_ptr + (k * stride_out)[:, None] + m[None, :], tl.trans(codes), mask=mask)


_launch_cast_transpose = Launcher(_cast_transpose_kernel, num_warps=8)
_launch_transpose = Launcher(_transpose_kernel, num_warps=8)


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """See `octavo.kernels.cast_transpose`."""
    return _cast_transpose(x, scale, dtype, row, col, stats, None)


def cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """See `octavo.kernels.cast_transpose_amax`."""
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    return *_cast_transpose(x, scale, dtype, row, col, stats, amax), amax


def transpose_codes(codes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `octavo.kernels.transpose_codes`."""
    if 1 in codes.shape:
        return reference.transpose_codes(codes, out=out)
    (m, k), (stride_m, stride_k) = codes.shape, codes.stride()
    m_padded, k_padded, tiles_m, tiles_k = geometry(m, k)
    codes_t = codes.new_empty((k_padded, m_padded)) if out is None else out
    _launch_transpose(
        tiles_m * tiles_k,
        (codes.view(torch.uint8), codes_t.view(torch.uint8)),
        *(m, k, m_padded, k_padded, stride_m, stride_k, codes_t.stride(0), tiles_k, TILE_M, TILE_K),
    )
    return codes_t


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool, stats: Tensor | None, amax: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if 1 in x.shape:
        if amax is not None:
            amax.copy_(reference.amax(x))
        return reference.cast_transpose(x, scale, dtype, row=row, col=col, stats=stats)
    (m, k), (stride_m, stride_k), fmt = x.shape, x.stride(), Format.of(dtype)
    m_padded, k_padded, tiles_m, tiles_k = geometry(m, k)
    codes = x.new_empty((m_padded, k_padded), dtype=dtype) if row else None
    codes_t = x.new_empty((k_padded, m_padded), dtype=dtype) if col else None
    _launch_cast_transpose(
        tiles_m * tiles_k,
        (x, scale, codes, codes_t, stats, None if amax is None else amax.view(torch.int32)),
        *(m, k, m_padded, k_padded, stride_m, stride_k, tiles_k),
        *(fmt.max, fmt.mantissa_bits, TILE_M, TILE_K),
    )
    return codes, codes_t


def geometry(m: int, k: int, tile_m: int = TILE_M, tile_k: int = TILE_K) -> tuple[int, int, int, int]:
    """(m_padded, k_padded, tiles along M, along K) of a matrix [m, k]; the tiles cover the padding too."""
    m_padded, k_padded = -(-m // ALIGN) * ALIGN, -(-k // ALIGN) * ALIGN
    return m_padded, k_padded, -(-m_padded // tile_m), -(-k_padded // tile_k)
