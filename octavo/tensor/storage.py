"""What a ScaledTensor and its views share: codes, scale, and the ways to write them.

`requantise` casts new real values with a fresh power-of-two scale. Such a scale makes the cast idempotent: it is never below the
scale that made a value from a code, so the value is representable again, and an element that did not change does not move.
`multiply` moves a positive factor into the scale, which loses nothing.

Rounding is to nearest, except for accumulation (`add_`, `lerp_` and the like), which is stochastic: an increment under half a
step would be lost each time, and with it the whole update of an average of weights or of a stock optimizer. A gradient with a
residual has steps fine enough for rounding to nearest.

If any real value is not finite, all codes become NaN and the scale 1: a bad gradient stays visible where saturation would hide
it, and scales stay finite and positive.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import BF16, E4M3, Format


class Storage:
    """Codes (any shape), scale (FP32, 0-d or one per `block` of the last dim) and residual (int8, or None) of a whole tensor.

    The tensors stay the same objects through all writes; only the residual appears when it is first needed.
    """

    __slots__ = ("block", "codes", "residual", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, residual: Tensor | None, block: int | None) -> None:
        self.codes, self.scale, self.residual, self.block = codes, scale, residual, block

    def real(self, dtype: torch.dtype) -> Tensor:
        """The real values of the whole, with the strides of the codes, so that views can be replayed on it."""
        real = uncast(self.codes, self.scale, self.residual, self.block, dtype)
        return real if self.codes.is_contiguous() else torch.empty_like(self.codes, dtype=dtype).copy_(real)

    def requantise(self, real: Tensor, *, residual: bool, stochastic: bool = False) -> None:
        """Writes the whole tensor; `residual` keeps 11 mantissa bits instead of the 3 of E4M3, rounded to nearest."""
        scale, multiplier = fresh_scale(real, Format.of(self.codes.dtype), self.block)
        if residual:
            codes, low = kernels.cast_residual(real, multiplier)
            self.write_residual(low)
        elif stochastic:
            key = torch.randint(-(2**31), 2**31, (), dtype=torch.int32, device=real.device)
            codes = kernels.cast(real, multiplier, self.codes.dtype, block=self.block, rounding="stochastic", key=key)
        else:
            codes = kernels.cast(real, multiplier, self.codes.dtype, block=self.block)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        self.mark_written()

    def write_residual(self, residual: Tensor | None) -> None:
        """Replaces the residual; None is zero."""
        if self.residual is not None:
            self.residual.zero_() if residual is None else self.residual.copy_(residual)
        elif residual is not None:
            self.residual = torch.empty_like(self.codes, dtype=torch.int8).copy_(residual)

    def accumulates(self, other: Storage) -> bool:
        """Whether `accumulate` takes `other`: codes alone, with one scale, laid out as these are; in eager mode."""
        if other is self or is_compiling() or other.block is not None or other.residual is not None:
            return False
        own, codes = self.codes, other.codes
        alike = (codes.dtype, codes.shape, codes.device) == (own.dtype, own.shape, own.device)
        return (
            alike
            and own.is_contiguous()
            and codes.is_contiguous()
            and (self.residual is None or self.residual.is_contiguous())
        )

    def accumulate(self, other: Storage) -> None:
        """`requantise` with the sum of both and a residual, the same bits in one operation: see `kernels.accumulate`."""
        self.residual = kernels.accumulate(self.codes, self.residual, self.scale, other.codes, other.scale)
        self.mark_written()

    def divide_scale(self, divisor: float | Tensor) -> None:
        """Multiplies the real values by a positive finite `divisor`, in the scale."""
        self.scale.copy_(self.scale.div(divisor).clamp_(2.0**-126, 2.0**126))
        self.mark_written()

    def mark_written(self) -> None:
        """Raises the version of the codes: unlike that of the tensor, it counts writes through `.data`, which caches must see."""
        if not self.codes.is_inference():
            increment_version(self.codes)

    def multiply(self, factor: Tensor) -> None:
        """Multiplies the real values by `factor` (0-d, on the device): in the scale if it is positive and finite, as a clip
        coefficient is; else in the codes. The host does not learn which."""
        factor = factor.float()
        in_scale = (factor > 0) & factor.isfinite()
        old_scale = self.scale.clone()
        values = uncast(self.codes, torch.ones_like(self.scale), self.residual, self.block, torch.float32)
        self.requantise(values.mul_(torch.where(in_scale, 1.0, factor)), residual=self.residual is not None)
        # Now the scale is that of the codes as if they were real values, and the old one is still to be divided out.
        self.divide_scale(torch.where(in_scale, factor, 1.0) / old_scale)


def uncast(codes: Tensor, scale: Tensor, residual: Tensor | None, block: int | None, dtype: torch.dtype) -> Tensor:
    """The real values, contiguous, of `dtype`."""
    if residual is not None:
        return kernels.uncast_residual(codes, residual, scale, dtype)
    return kernels.uncast(codes, scale, dtype, block=block)


def fresh_scale(real: Tensor, fmt: Format, block: int | None) -> tuple[Tensor, Tensor]:
    """(scale, multiplier): the scale to store, and the one to cast with, which is NaN where a value is not finite."""
    amax = kernels.amax(real, block=block)
    # BF16 has the range of FP32: scaled to its maximum, it would leave no room for the scale to follow a multiplication.
    scale = torch.ones_like(amax) if fmt is BF16 else kernels.scale_from_amax(amax, fmt.max)
    return scale, torch.where(amax.isfinite(), scale, torch.nan)


def check_parts(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, block: int | None, residual: Tensor | None, residual_on_add: bool
) -> None:
    """Raises `ValueError` if these do not make a ScaledTensor."""
    if codes.dtype is torch.float32 or not codes.is_floating_point():
        raise ValueError(f"codes are {codes.dtype}: use float8_e4m3fn, float8_e5m2, float16 or bfloat16")
    Format.of(codes.dtype)
    if not is_logical(dtype):
        raise ValueError(f"the logical dtype is {dtype}: use a floating dtype of at least 16 bits")
    wanted = () if block is None else (*codes.shape[:-1], -(-codes.shape[-1] // block))
    if scale.dtype is not torch.float32 or tuple(scale.shape) != wanted:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)}: codes {tuple(codes.shape)} with block={block} need float32 {wanted}"
        )
    if (residual is not None or residual_on_add) and (codes.dtype is not E4M3.dtype or block is not None):
        raise ValueError(
            f"a residual extends E4M3 codes with one scale, but these are {codes.dtype} with block={block}"
        )
    if residual is not None and (residual.dtype is not torch.int8 or residual.shape != codes.shape):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}: codes need int8 {tuple(codes.shape)}")


def is_logical(dtype: torch.dtype) -> bool:
    """Whether a ScaledTensor can have this logical dtype."""
    return dtype.is_floating_point and dtype.itemsize >= 2
