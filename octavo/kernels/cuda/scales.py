"""Scales of operands that other kernels cast: one launch before the cast, with current scaling, or one after it, with delayed.

A scale is one number, and its kernel all launch: what follows from a maximum is made by one program at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.cast import scale_of
from octavo.kernels.cuda.launch import Launcher


@triton.jit
def visible(scale, amax, unit_ptr):
    """(scale · unit, or NaN where amax is not finite; its reciprocal): scalars. unit [1]: FP32 or None."""
    shown = tl.where(amax < float("inf"), scale, float("nan"))
    if unit_ptr is not None:
        shown *= tl.load(unit_ptr)
    return shown, tl.div_rn(1.0, shown)


@triton.jit
def _current_scale_kernel(amax_ptr, scale_ptr, visible_ptr, inverse_ptr, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """scale = `scale_of` amax; `visible` of both. All [1]: FP32."""
    amax = tl.load(amax_ptr)
    scale = scale_of(amax, tl.full((), MAX, tl.float32), POWER_OF_TWO)
    shown, inverse = visible(scale, amax, None)
    tl.store(scale_ptr, scale)
    tl.store(visible_ptr, shown)
    tl.store(inverse_ptr, inverse)


@triton.jit
def _visible_scale_kernel(scale_ptr, amax_ptr, unit_ptr, pending_ptr, visible_ptr, inverse_ptr):
    """`visible` of scale and amax; pending = max(pending, amax if finite). All [1]: FP32; unit and pending may be None."""
    amax = tl.load(amax_ptr)
    shown, inverse = visible(tl.load(scale_ptr), amax, unit_ptr)
    tl.store(visible_ptr, shown)
    tl.store(inverse_ptr, inverse)
    if pending_ptr is not None:
        pending = tl.load(pending_ptr)
        tl.store(pending_ptr, tl.where((amax < float("inf")) & (amax > pending), amax, pending))


_launch_current_scale = Launcher(_current_scale_kernel, num_warps=1)
_launch_visible_scale = Launcher(_visible_scale_kernel, num_warps=1)


def current_scale(amax: Tensor, max: float, power_of_two: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.current_scale`."""
    scale, shown, inverse = torch.empty_like(amax), torch.empty_like(amax), torch.empty_like(amax)
    _launch_current_scale(1, (amax, scale, shown, inverse), max, power_of_two)
    return scale, shown, inverse


def visible_scale(
    scale: Tensor, amax: Tensor, unit: Tensor | None = None, pending: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.reference.visible_scale`."""
    shown, inverse = torch.empty_like(scale), torch.empty_like(scale)
    _launch_visible_scale(1, (scale, amax, unit, pending, shown, inverse))
    return shown, inverse
