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
from octavo.kernels.cuda.launch import on_device
from octavo.kernels.cuda.numerics import constants, flushed_count, magnitude_bits, saturate, saturated_count
from octavo.kernels.reference import ALIGN

TILE_M = 128
TILE_K = 128


@triton.jit
def _tile(tiles_k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(row, column) int64 indices of the tile of this program; neighbouring programs are neighbours along K."""
    program = tl.program_id(0)
    m = (program // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = (program % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    return m, k


@triton.jit
def _store_tile(codes, codes_ptr, codes_t_ptr, m, k, m_padded, k_padded, ROW: tl.constexpr, COL: tl.constexpr):
    """Store a tile of codes into [m_padded, k_padded], its transpose into [k_padded, m_padded], each if wanted."""
    if ROW:
        mask = (m < m_padded)[:, None] & (k < k_padded)[None, :]
        tl.store(codes_ptr + (m * k_padded)[:, None] + k[None, :], codes, mask=mask)
    if COL:
        mask = (k < k_padded)[:, None] & (m < m_padded)[None, :]
        tl.store(codes_t_ptr + (k * m_padded)[:, None] + m[None, :], tl.trans(codes), mask=mask)


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
    MIN_EXPONENT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    COUNT: tl.constexpr,
    AMAX: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes = saturate(round(x * scale)), codes_t = codesᵀ, amax = max |x|; zero codes in the padding.

    x [m_size, k_size] with any strides: any float; scale [1]: FP32; codes [m_padded, k_padded], codes_t [k_padded, m_padded]: bytes
    of DTYPE; stats [2]: int64; amax [1]: FP32 bits as int32, zero before. Results that are not wanted are None.
    """
    m, k = _tile(tiles_k, TILE_M, TILE_K)
    valid = (m < m_size)[:, None] & (k < k_size)[None, :]
    x = tl.load(x_ptr + (m * stride_m)[:, None] + (k * stride_k)[None, :], mask=valid, other=0.0).to(tl.float32)
    if AMAX:
        tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude_bits(x), 1), 0))
    # The padding is not multiplied: a NaN scale must not reach it.
    y = tl.where(valid, x * tl.load(scale_ptr), 0.0)
    if COUNT:
        tl.atomic_add(stats_ptr, tl.sum(tl.sum(saturated_count(y, MAX), 1), 0).to(tl.int64))
    codes = saturate(y, MAX).to(DTYPE)
    if COUNT:
        tl.atomic_add(stats_ptr + 1, tl.sum(tl.sum(flushed_count(x, codes), 1), 0).to(tl.int64))
    _store_tile(codes.to(tl.uint8, bitcast=True), codes_ptr, codes_t_ptr, m, k, m_padded, k_padded, ROW, COL)


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
    tiles_k,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """codes_t [k_padded, m_padded] = codesᵀ of codes [m_size, k_size] with any strides, bytes; zeros in the padding."""
    m, k = _tile(tiles_k, TILE_M, TILE_K)
    valid = (m < m_size)[:, None] & (k < k_size)[None, :]
    codes = tl.load(codes_ptr + (m * stride_m)[:, None] + (k * stride_k)[None, :], mask=valid, other=0)
    _store_tile(codes, codes_ptr, codes_t_ptr, m, k, m_padded, k_padded, ROW=False, COL=True)


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


def transpose_codes(codes: Tensor) -> Tensor:
    """See `octavo.kernels.transpose_codes`."""
    if 1 in codes.shape:
        return reference.transpose_codes(codes)
    sizes, grid = _geometry(codes)
    m_padded, k_padded = sizes[2:4]
    codes_t = torch.empty((k_padded, m_padded), dtype=torch.uint8, device=codes.device)
    with on_device(codes):
        _transpose_kernel[grid](codes.view(torch.uint8), codes_t, *sizes, TILE_M=TILE_M, TILE_K=TILE_K, num_warps=8)
    return codes_t.view(codes.dtype)


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, row: bool, col: bool, stats: Tensor | None, amax: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if 1 in x.shape:
        if amax is not None:
            amax.copy_(reference.amax(x))
        return reference.cast_transpose(x, scale, dtype, row=row, col=col, stats=stats)
    sizes, grid = _geometry(x)
    m_padded, k_padded = sizes[2:4]
    codes = torch.empty((m_padded, k_padded), dtype=torch.uint8, device=x.device) if row else None
    codes_t = torch.empty((k_padded, m_padded), dtype=torch.uint8, device=x.device) if col else None
    with on_device(x):
        _cast_transpose_kernel[grid](
            x,
            scale,
            codes,
            codes_t,
            stats,
            None if amax is None else amax.view(torch.int32),
            *sizes,
            **constants(Format.of(dtype)),
            DTYPE=_TRITON_DTYPES[dtype],
            ROW=row,
            COL=col,
            COUNT=stats is not None,
            AMAX=amax is not None,
            TILE_M=TILE_M,
            TILE_K=TILE_K,
            num_warps=8,
        )
    return None if codes is None else codes.view(dtype), None if codes_t is None else codes_t.view(dtype)


def _geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int]]:
    """The arguments m_size ... tiles_k of both kernels, and the grid, which covers the padding too."""
    m, k = x.shape
    m_padded, k_padded = -(-m // ALIGN) * ALIGN, -(-k // ALIGN) * ALIGN
    tiles_k = triton.cdiv(k_padded, TILE_K)
    return (m, k, m_padded, k_padded, *x.stride(), tiles_k), (triton.cdiv(m_padded, TILE_M) * tiles_k,)


_TRITON_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
