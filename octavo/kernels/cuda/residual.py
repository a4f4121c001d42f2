"""Element-wise Triton kernels of E4M11, a code and a residual byte; see `octavo.kernels.reference.residual`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.launch import on_device
from octavo.kernels.cuda.numerics import saturate
from octavo.kernels.reference.cast import largest
from octavo.kernels.reference.residual import MAX_MAGNITUDE, NAN_CODE

TILE = 2048


@triton.jit
def _cast_residual_kernel(
    x_ptr, scale_ptr, codes_ptr, residual_ptr, numel, LARGEST: tl.constexpr, NAN: tl.constexpr, TILE: tl.constexpr
):
    """(codes, residual) = the E4M11 word nearest to x * scale. x: any float; codes: uint8; residual: int8; scale [1]: FP32."""
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    valid = lane < numel - start
    y = tl.load(x_ptr + start + lane, mask=valid, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    word = y.to(tl.int32, bitcast=True)
    bits = word & 0x7FFFFFFF
    normal = ((bits + 0x7FF + ((bits >> 12) & 1)) >> 12) - (120 << 11)
    # Below 2^23, adding and subtracting it rounds to an integer, ties to even.
    steps = tl.abs(y) * 131072.0
    steps = tl.where(steps < 2048.0, steps, 2048.0)
    subnormal = ((steps + 8388608.0) - 8388608.0).to(tl.int32)
    magnitude = tl.where(bits < (121 << 23), subnormal, normal)
    magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
    magnitude = tl.where(y == y, magnitude, NAN << 8)
    high = (magnitude + 128) >> 8
    code = high | ((word >> 24) & 0x80)
    tl.store(codes_ptr + start + lane, code.to(tl.uint8), mask=valid)
    tl.store(residual_ptr + start + lane, (magnitude - (high << 8)).to(tl.int8), mask=valid)


@triton.jit
def _uncast_residual_kernel(
    codes_ptr, residual_ptr, scale_ptr, x_ptr, numel, MAX: tl.constexpr, NAN: tl.constexpr, TILE: tl.constexpr
):
    """x = E4M11 value / scale, within [-MAX, MAX]. codes: uint8; residual: int8; scale [1]: FP32; x: any float."""
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    valid = lane < numel - start
    code = tl.load(codes_ptr + start + lane, mask=valid, other=0).to(tl.int32)
    residual = tl.load(residual_ptr + start + lane, mask=valid, other=0).to(tl.int32)
    high = code & 0x7F
    magnitude = (high << 8) + residual
    normal = ((magnitude << 12) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2048, magnitude.to(tl.float32) * (1.0 / 131072.0), normal)
    value = tl.where(high == NAN, float("nan"), value)
    value = tl.where(code >= 128, value * -1.0, value)  # (0 - value would lose the sign of zero)
    x = saturate(tl.div_rn(value, tl.zeros_like(value) + tl.load(scale_ptr)), MAX)
    tl.store(x_ptr + start + lane, x.to(x_ptr.dtype.element_ty), mask=valid)


def cast_residual(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.cast_residual`."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    residual = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    with on_device(x):
        _cast_residual_kernel[(triton.cdiv(x.numel(), TILE),)](
            x.contiguous(),
            scale,
            codes,
            residual,
            x.numel(),
            LARGEST=MAX_MAGNITUDE,
            NAN=NAN_CODE,
            TILE=TILE,
            enable_fp_fusion=False,
        )
    return codes.view(torch.float8_e4m3fn), residual


def uncast_residual(codes: Tensor, residual: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `octavo.kernels.uncast_residual`."""
    x = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    with on_device(codes):
        _uncast_residual_kernel[(triton.cdiv(codes.numel(), TILE),)](
            codes.contiguous().view(torch.uint8),
            residual.contiguous(),
            scale,
            x,
            codes.numel(),
            MAX=largest(dtype),
            NAN=NAN_CODE,
            TILE=TILE,
        )
    return x
