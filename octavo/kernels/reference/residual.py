"""E4M11: an E4M3 code with a residual byte, together a 16-bit float whose high byte alone is a usable FP8 value.

A word is 1 sign, 4 exponent and 11 mantissa bits, with the exponent bias of E4M3. Its 15-bit magnitude u splits into
hi = (u + 128) >> 8 and lo = u - (hi << 8) in [-128, 127]: hi with the sign is the nearest E4M3 code, lo the residual, and
u = (hi << 8) + lo gives the word back, losslessly. Truncation to hi = u >> 8 would be biased towards zero.
The largest word with a finite code is u = 0x7E7F, the value 463.875; the relative error is at most 2^-12 above 2^-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.cast import chunks, largest

MAX_MAGNITUDE = 0x7E7F
NAN_CODE = 0x7F
INFINITY = 0x7F800000
"""The bits of infinity in FP32; those of NaN are greater."""
QUIET_NAN = 0x7FC00000


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
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    residual = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    flat = x.reshape(-1)
    for part in chunks(x.numel()):
        codes.view(-1)[part], residual.view(-1)[part] = split_e4m11(_nearest_word(flat[part].float() * scale))
    return codes, residual


def uncast_residual(codes: Tensor, residual: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M11 value / scale, computed in FP32, saturated and rounded to `dtype`; the shape of `codes`, contiguous."""
    x = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    limit = largest(dtype)
    flat, flat_residual = codes.reshape(-1), residual.reshape(-1)
    for part in chunks(codes.numel()):
        x.view(-1)[part] = _value(merge_e4m11(flat[part], flat_residual[part])).div_(scale).clamp_(-limit, limit)
    return x


def _nearest_word(y: Tensor) -> Tensor:
    """The E4M11 words nearest to `y` (FP32), as int32."""
    sign = (y.view(torch.int32) >> 16) & 0x8000
    bits = y.view(torch.int32) & 0x7FFFFFFF
    # The exponent bias is 127 in FP32 and 7 here; 12 mantissa bits are dropped, to nearest even.
    normal = (((bits >> 12) & 1).add_(bits).add_(0x7FF) >> 12).sub_(120 << 11)
    # Below 2^-6 the words are the multiples of 2^-17, the spacing of FP32 from 64 on: adding 64 rounds to them.
    subnormal = y.abs().add_(64.0).view(torch.int32).sub_(133 << 23)
    magnitude = _choose(bits - (121 << 23), subnormal, normal).clamp_(max=MAX_MAGNITUDE)
    return _choose(INFINITY - bits, NAN_CODE << 8, magnitude).bitwise_or_(sign)


def _value(word: Tensor) -> Tensor:
    """The values of E4M11 words (int16), FP32; NaN where the code is NaN."""
    word = word.int()
    magnitude = word & 0x7FFF
    normal = (magnitude << 12).add_(120 << 23)
    subnormal = (magnitude * 2.0**-17).view(torch.int32)
    bits = _choose(magnitude - (1 << 11), subnormal, normal)
    return _choose(MAX_MAGNITUDE - magnitude, QUIET_NAN, bits).bitwise_or_(word & -0x80000000).view(torch.float32)


def _choose(difference: Tensor, if_negative: Tensor | int, otherwise: Tensor) -> Tensor:
    """Elements of int32 tensors by the sign of `difference`: by masks, for `torch.where` is some 30 times slower on CPU."""
    return (otherwise ^ if_negative).bitwise_and_(difference >> 31).bitwise_xor_(otherwise)
