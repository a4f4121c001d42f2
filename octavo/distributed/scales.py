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


def local_scales(amax: Tensor, absent: Tensor | None = None) -> Tensor:
    """s'_i of each tensor from its largest magnitude (FP32 [T], infinite if a value is not finite) and whether it is `absent`."""
    scale = torch.where(amax > 0, scale_from_amax(amax, E4M3.max).clamp_(max=LARGEST), LARGEST)
    scale.masked_fill_(amax == torch.inf, 0.0)
    return scale if absent is None else scale.masked_fill_(absent, ABSENT)


class SharedScales(NamedTuple):
    """What the minimum over all ranks says; each FP32 or bool [T]."""

    scale: Tensor
    """s, finite and positive; NaN where some rank has a value that is not finite, so that all codes become NaN."""
    finite: Tensor
    """False where some rank has a value that is not finite: all ranks then make all their codes NaN."""
    minimum: Tensor

    @property
    def present(self) -> Tensor:
        """Whether any rank has a gradient."""
        return self.minimum < ABSENT


def shared_scales(minimum: Tensor) -> SharedScales:
    """Reads the minimum of `local_scales` over all ranks."""
    finite = minimum > 0
    return SharedScales(torch.where(finite, minimum.clamp(max=LARGEST), torch.nan), finite, minimum)


def mean_scale(multiplier: Tensor, gain: Tensor, world: int) -> Tensor:
    """The scale of the mean: N · µ · s · gain, where each rank's values were multiplied by µ · s and the sum of codes by `gain`.

    FP32, finite and positive; 1 where the multiplier is NaN, as codes are then.
    """
    return (multiplier * gain).mul_(world).clamp_(2.0**-126, 2.0**126).nan_to_num_(nan=1.0)
