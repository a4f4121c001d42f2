"""The shared scalar: one scale for the gradients of all ranks (Eqs. 4-6 of FP8-LM).

    s'_i = largest power of two with which the gradient of rank i does not saturate
    s    = min_i s'_i                               one small collective for all tensors of a bucket
    codes_i = FP8(µ · s · g_i)
    s_mean  = N · µ · s                             the scale of the sum: de-quantising gives the mean

The same collective says what a rank has: 0 where a gradient holds an infinity or NaN, which wins every minimum (a MAX would not
do: NCCL's max(NaN, 3) is 3), the largest scale where a gradient is all zero, so that it does not press the others', and infinity
where a rank has no gradient at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels import scale_from_amax

LARGEST = 2.0**100
"""Scales do not exceed this, so that the scale of a mean cannot leave FP32: values below 2^-109 become zero."""
ABSENT = torch.inf


def local_scales(amax: Tensor, absent: Tensor) -> Tensor:
    """s'_i of each tensor from its largest magnitude (FP32 [T], NaN or infinite if a value is) and whether it is `absent`."""
    scale = scale_from_amax(amax, E4M3.max).clamp(max=LARGEST)
    scale = torch.where(amax == 0, LARGEST, scale)
    scale = torch.where(amax.isfinite(), scale, 0.0)
    return torch.where(absent, ABSENT, scale)


class SharedScales(NamedTuple):
    """What the minimum over all ranks says; each FP32 or bool [T]."""

    scale: Tensor
    """s, finite and positive."""
    finite: Tensor
    """False where some rank has a value that is not finite: all ranks then make all their codes NaN."""
    present: Tensor
    """Whether any rank has a gradient."""

    def multiplier(self, factor: Tensor) -> Tensor:
        """What turns real values into codes: µ · s, or NaN."""
        return torch.where(self.finite, self.scale * factor, torch.nan)


def shared_scales(minimum: Tensor) -> SharedScales:
    """Reads the minimum of `local_scales` over all ranks."""
    finite = minimum > 0
    return SharedScales(torch.where(finite, minimum.clamp(max=LARGEST), 1.0), finite, minimum < ABSENT)


def mean_scale(scale: Tensor, factor: Tensor, gain: Tensor, world: int) -> Tensor:
    """The scale of the mean: N · µ · s · gain, where the sum of codes was multiplied by `gain`. FP32, finite and positive."""
    return (scale * factor * gain * world).clamp(2.0**-126, 2.0**126)
