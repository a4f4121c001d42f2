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
from octavo.kernels import Gradients

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

    def compare(self, gradients: Gradients, codes: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(exact, flushed) of a bucket before it is reduced, whose `codes` are about to be sent.

        exact, FP32 [rows, ROW]: the mean over the ranks of the gradients as they are stored; flushed, FP32 [T]: shares of this rank.
        """
        exact = layout.zeros(torch.float32)
        flushed = []
        for view, sent, own, residual, scale in zip(
            layout.views(exact),
            layout.views(codes),
            gradients.codes,
            gradients.residuals,
            gradients.scales,
            strict=True,
        ):
            real = kernels.uncast(own, scale) if residual is None else kernels.uncast_residual(own, residual, scale)
            view.copy_(real)
            flushed.append(((own.float() != 0) & (sent.float() == 0)).sum())
        plain_mean(exact.view(-1), self._ranks, in_rank_order=True, kind=SAMPLES)
        return exact, torch.stack(flushed) / layout.numel.clamp(min=1)

    def add(
        self,
        names: list[str],
        layout: Layout,
        compared: tuple[Tensor, Tensor],
        gradients: Gradients,
        ratio: Tensor | None,
    ) -> None:
        """The same bucket when it is reduced: what `compare` has said, and the overflow [T] or None."""
        exact, underflow = compared
        sums = [
            torch.stack([(kernels.uncast(own, scale) - mean).square().sum(), mean.square().sum()])
            for mean, own, scale in zip(layout.views(exact), gradients.codes, gradients.scales, strict=True)
        ]
        noise, signal = torch.stack(sums, 1)
        overflow = torch.zeros_like(underflow) if ratio is None else ratio
        self._found.append((names, torch.stack([signal, noise, underflow, overflow])))

    def read(self) -> dict[str, Loss]:
        """The losses by name of the parameter; waits for the device."""
        result = {}
        for names, table in self._found:
            snr = 10 * torch.log10(table[0] / table[1])
            for name, *values in zip(names, snr.tolist(), table[2].tolist(), table[3].tolist(), strict=True):
                result[name] = Loss(*values)
        return result
