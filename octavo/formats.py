"""The number formats of octavo: what each can hold.

A value of a floating-point format with m mantissa bits and smallest normal exponent e0 is ±(1 + f / 2^m) * 2^e for e >= e0, or
±f * 2^(e0 - m) below that (subnormal), where 0 <= f < 2^m. Rounding to nearest so has a relative error of at most 2^-(m + 1)
for normal values, and an absolute error of at most half of `smallest` below `tiny`.

| format | max       | tiny (min normal) | smallest (min subnormal) | eps   |
|--------|-----------|-------------------|--------------------------|-------|
| E4M3   | 448       | 2^-6              | 2^-9                     | 2^-3  |
| E5M2   | 57,344    | 2^-14             | 2^-16                    | 2^-2  |
| FP16   | 65,504    | 2^-14             | 2^-24                    | 2^-10 |
| BF16   | 3.39e38   | 2^-126            | 2^-133                   | 2^-7  |
| FP32   | 3.40e38   | 2^-126            | 2^-149                   | 2^-23 |

E4M3 (`torch.float8_e4m3fn`) has no infinity and one NaN per sign (0x7F, 0xFF): finite overflow has to be saturated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class NumericsError(ArithmeticError):
    """The arithmetic of training went wrong: non-finite values where training cannot go on."""


@dataclass(frozen=True)
class Format:
    """One floating-point storage format; the constants below are its only instances."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest finite value."""
    mantissa_bits: int
    """Stored mantissa bits, without the implied one."""
    min_exponent: int
    """Exponent of the smallest normal value."""

    @property
    def tiny(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """Smallest positive subnormal value: the spacing of values below `tiny`."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Spacing of values in [1, 2)."""
        return 2.0**-self.mantissa_bits

    @property
    def bits(self) -> int:
        """Bits per value."""
        return 8 * self.dtype.itemsize

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """The format of a torch dtype. Raises `ValueError` when octavo has none for it."""
        if dtype not in _BY_DTYPE:
            raise ValueError(f"{dtype} is no format of octavo; use one of {', '.join(str(d) for d in _BY_DTYPE)}")
        return _BY_DTYPE[dtype]

    def __reduce__(self) -> tuple:
        # Copies and unpickled formats stay the constants, so that `is` compares formats.
        return Format.of, (self.dtype,)

    def __repr__(self) -> str:
        return self.name


E4M3 = Format("E4M3", torch.float8_e4m3fn, max=448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Format("E5M2", torch.float8_e5m2, max=57344.0, mantissa_bits=2, min_exponent=-14)
FP16 = Format("FP16", torch.float16, max=65504.0, mantissa_bits=10, min_exponent=-14)
BF16 = Format("BF16", torch.bfloat16, max=torch.finfo(torch.bfloat16).max, mantissa_bits=7, min_exponent=-126)
FP32 = Format("FP32", torch.float32, max=torch.finfo(torch.float32).max, mantissa_bits=23, min_exponent=-126)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, FP16, BF16, FP32)}
"""Formats by name."""

_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}
