"""The scalars of a reduction, one per tensor: see `octavo.distributed.scales` and `octavo.distributed.autoscale` for what they mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.reference.cast import scale_from_amax

LARGEST = 2.0**100
"""Scales do not exceed this, so that the scale of a mean cannot leave FP32: values below 2^-109 become zero."""
ABSENT = torch.inf
CEILING = 1.0
"""µ does not exceed this."""


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


def next_mu(mu: Tensor, ratio: Tensor, *, threshold: float, period: int, floor: float) -> Tensor:
    """Eq. 3: µ of the next step from µ (FP64, any shape) and the share of values that reached the largest code.

    The result is within [floor, 1]. A ratio that is NaN counts as too large.
    """
    grown = mu * 2.0 ** (1.0 / period)
    return torch.where(ratio <= threshold, grown, mu / 2).clamp(floor, CEILING)


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x (positive, normal); FP32. (A little below one counts as one: see `next_mu`.)"""
    bits = (x * (1 + 2.0**-20)).float().view(torch.int32)
    return (bits & 0x7F800000).view(torch.float32)


class MuState(NamedTuple):
    """µ of all tensors whose gradients are FP8, written in place."""

    mu: Tensor
    """FP64."""
    ratio: Tensor
    """Share of values at the largest code in the last step, FP32."""
    floor_steps: Tensor
    """Steps in a row, up to the last, after which µ was at the floor; int64."""


def update_mu(
    state: MuState,
    index: Tensor,
    ratio: Tensor,
    usable: Tensor,
    *,
    moves: bool,
    threshold: float,
    period: int,
    floor: float,
) -> None:
    """Ends a step of the tensors `index` (int64 [t], none twice): `ratio` FP32 [t] as in `next_mu`; nothing changes where `usable`,
    bool [t], is false. µ changes only if it `moves`."""
    state.ratio[index] = torch.where(usable, ratio, state.ratio[index])
    if not moves:
        return
    mu, steps = state.mu[index], state.floor_steps[index]
    new = next_mu(mu, ratio, threshold=threshold, period=period, floor=floor)
    state.mu[index] = torch.where(usable, new, mu)
    at_floor = torch.where(new <= floor, steps + 1, 0)
    state.floor_steps[index] = torch.where(usable, at_floor, steps)
