"""What a reduction loses, measured in a step now and then: each bucket is also averaged in FP32, and the two are compared.

Costs an FP32 reduction more than a step without it, so it is for samples, not for every step. Counts stay on the device until read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import kernels
from octavo.distributed.algorithms import plain_mean
from octavo.distributed.collectives import Ranks
from octavo.distributed.layout import Layout

SAMPLES = "samples"
"""Kind of bytes on the wire."""


@dataclass(frozen=True)
class Loss:
    """Of one gradient, over all its elements."""

    snr_db: float
    """10·log10 of the FP32 mean's energy over that of the error; infinite where there is no error, NaN where there is no signal."""
    underflow: float
    """Share of this rank's values that were not zero and were sent as zero."""
    overflow: float
    """Share of the sums that reached the largest code; 0 where the sum has a scale of its own."""


class Sampler:
    """Collects the losses of the buckets that are reduced while it is in use."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = Ranks(ranks.group, ranks.wire)
        self._found: list[tuple[list[str], Tensor]] = []

    def exact_mean(self, codes: Tensor, residual: Tensor | None, stored: Tensor, layout: Layout) -> Tensor:
        """The FP32 mean over the ranks [rows, ROW] of the gradients as they are stored: codes (and residual) / `stored` [T]."""
        one = torch.ones((), device=codes.device)
        if residual is None:
            values = kernels.uncast(codes, one)
        else:
            values = kernels.uncast_residual(codes, residual, one)
        mean = values.div_(layout.spread(stored))
        plain_mean(mean.view(-1), self._ranks, in_rank_order=True, kind=SAMPLES)
        return mean

    def add(
        self,
        names: list[str],
        layout: Layout,
        exact: Tensor,
        codes: Tensor,
        scale: Tensor,
        flushed: Tensor,
        ratio: Tensor | None,
    ) -> None:
        """A reduced bucket: its exact mean, its `codes` with `scale` [T], the `flushed` values of each row, the overflow [T] or None."""
        one = torch.ones((), device=codes.device)
        error = kernels.uncast(codes, one).div_(layout.spread(scale)) - exact
        sums = [layout.total(x.square().sum(-1)) for x in (exact, error)]
        underflow = layout.total(flushed) / layout.numel.clamp(min=1)
        overflow = torch.zeros_like(underflow) if ratio is None else ratio
        self._found.append((names, torch.stack([*sums, underflow, overflow])))

    def read(self) -> dict[str, Loss]:
        """The losses by name of the parameter; waits for the device."""
        result = {}
        for names, table in self._found:
            snr = 10 * torch.log10(table[0] / table[1])
            for name, *values in zip(names, snr.tolist(), table[2].tolist(), table[3].tolist(), strict=True):
                result[name] = Loss(*values)
        return result
