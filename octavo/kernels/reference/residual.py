"""E4M11: an E4M3 code with a residual byte, together a 16-bit float whose high byte alone is a usable FP8 value.

A word is 1 sign, 4 exponent and 11 mantissa bits, with the exponent bias of E4M3. Its 15-bit magnitude u splits into
hi = (u + 128) >> 8 and lo = u - (hi << 8) in [-128, 127]: hi with the sign is the nearest E4M3 code, lo the residual, and
u = (hi << 8) + lo gives the word back, losslessly. Truncation to hi = u >> 8 would be biased towards zero.
The largest word with a finite code is u = 0x7E7F, the value 463.875; the relative error is at most 2^-12 above 2^-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_MAGNITUDE = 0x7E7F
NAN_CODE = 0x7F


def split_e4m11(word: Tensor) -> tuple[Tensor, Tensor]:
    """(codes E4M3, residual int8) of E4M11 words (int16, sign in the top bit); exact for magnitudes up to 0x7E7F."""
    word = word.int()
    magnitude = word & 0x7FFF
    high = (magnitude + 128) >> 8
    codes = (high | ((word >> 8) & 0x80)).to(torch.uint8).view(torch.float8_e4m3fn)
    return codes, (magnitude - (high << 8)).to(torch.int8)


def merge_e4m11(codes: Tensor, residual: Tensor) -> Tensor:
    """The int16 words of (codes, residual): the inverse of `split_e4m11`."""
    bits = codes.view(torch.uint8).int()
    return ((((bits & 0x7F) << 8) + residual) | ((bits & 0x80) << 8)).to(torch.int16)


def cast_residual(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(codes E4M3, residual int8) of the E4M11 words nearest to x * scale, of the shape of `x`, contiguous.

    Saturates at 463.875; NaN becomes a NaN code with residual 0. `scale` is FP32, 0-d.
    """
    y = x.float().contiguous() * scale
    bits = y.view(torch.int32) & 0x7FFFFFFF
    # The exponent bias is 127 in FP32 and 7 here; 12 mantissa bits are dropped, to nearest even.
    normal = ((bits + 0x7FF + ((bits >> 12) & 1)) >> 12) - (120 << 11)
    subnormal = (y.abs() * 2.0**17).clamp_(max=2.0**11).round_().int()
    magnitude = torch.where(bits < (121 << 23), subnormal, normal).clamp_(max=MAX_MAGNITUDE)
    magnitude = torch.where(y.isnan(), NAN_CODE << 8, magnitude)
    return split_e4m11(magnitude | ((y.view(torch.int32) >> 16) & 0x8000))


def uncast_residual(codes: Tensor, residual: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M11 value / scale, computed in FP32 and rounded to `dtype`; the shape of `codes`."""
    word = merge_e4m11(codes, residual).int()
    magnitude = word & 0x7FFF
    normal = ((magnitude << 12) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < (1 << 11), magnitude * 2.0**-17, normal)
    value = torch.where((codes.view(torch.uint8) & 0x7F) == NAN_CODE, torch.nan, value)
    return (torch.where(word < 0, -value, value) / scale).to(dtype)
