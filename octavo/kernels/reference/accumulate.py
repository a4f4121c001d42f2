"""Accumulation of FP8 gradients: the specification of the kernels in `octavo.kernels.cuda.accumulate`, which equal it bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.reference.cast import amax, chunks, scale_from_amax, uncast
from octavo.kernels.reference.residual import cast_residual, uncast_residual


def accumulate(codes: Tensor, residual: Tensor, scale: Tensor, other: Tensor, other_scale: Tensor, first: bool) -> None:
    """See `octavo.kernels.accumulate`. `first`: the residual holds nothing yet."""
    codes, residual, other = codes.view(-1), residual.view(-1), other.view(-1)
    parts = chunks(codes.numel())

    def sums(part: slice) -> Tensor:
        own = uncast(codes[part], scale) if first else uncast_residual(codes[part], residual[part], scale)
        return own.add_(uncast(other[part], other_scale))

    largest = torch.zeros((), device=codes.device)
    for part in parts:
        largest = torch.maximum(largest, amax(sums(part)))  # NaN propagates
    fresh = scale_from_amax(largest, E4M3.max)
    multiplier = torch.where(largest.isfinite(), fresh, torch.nan)
    for part in parts:
        codes[part], residual[part] = cast_residual(sums(part), multiplier)
    scale.copy_(fresh)
