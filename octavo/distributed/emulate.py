"""The reduction of many ranks on one device, without any process: for studies at 128 ranks, and as the specification in tests.

Every value passes through the same functions as in `DataParallel`, in the same order: what is returned has the bits that N processes
would have (`nccl` as without FP8 in the backend, in a bucket that holds this tensor alone; `bf16` and `fp32` on two ranks, as on more the
backend chooses the order of the sum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.distributed.autoscale import AutoScale, Strategy, power_of_two_below
from octavo.distributed.codes import exact_sum, rescale, ring_sum, row_amax, share_at_largest
from octavo.distributed.layout import ROW, Layout
from octavo.distributed.scales import local_scales, mean_scale, shared_scales
from octavo.formats import E4M3
from octavo.kernels import cast, scale_from_amax
from octavo.linear import scaled_gradient
from octavo.tensor import ScaledTensor

ALGORITHMS = ("two_shot", "nccl", "hierarchical", "bf16", "fp32")


@dataclass(frozen=True)
class Reduced:
    """The mean of a gradient over ranks, and what it has lost; 0-d FP32 tensors on the device of the gradients."""

    mean: ScaledTensor
    signal: Tensor
    """Σ of the squares of the exact mean, FP64."""
    noise: Tensor
    """Σ of the squares of the errors, FP64."""
    underflow: Tensor
    """Share of the ranks' values that were not zero and were sent as zero."""
    overflow: Tensor
    """Share of the sums that reached the largest code; feeds µ."""

    @property
    def snr_db(self) -> float:
        """10·log10(signal / noise) in dB; waits for the device."""
        return float(10 * torch.log10(self.signal / self.noise))


@torch.no_grad()
def reduce_emulated(
    gradients: Sequence[Tensor],
    algorithm: str = "two_shot",
    strategy: Strategy = "auto",
    *,
    mu: float | Tensor | None = None,
    node_size: int | None = None,
) -> Reduced:
    """The mean of `gradients` (one of each rank, equal shapes: real values, or ScaledTensors as backward leaves them).

    `mu` is that of "auto" now (default: where `AutoScale` begins); between steps, `AutoScale.update` with `overflow` moves it.
    Real values are first stored in E4M3 with a scale of their own. Raises `ValueError` for an unknown algorithm or strategy, no
    gradients, gradients of different shapes, a number `mu` outside of (0, 1] or a `node_size` that does not divide the number of ranks.
    """
    world = len(gradients)
    shapes = {tuple(gradient.shape) for gradient in gradients}
    if len(shapes) != 1:
        raise ValueError(f"the gradients of {world} ranks have the shapes {sorted(shapes)}: one shape is needed")
    if isinstance(mu, float | int) and not 0 < mu <= 1:
        raise ValueError(f"mu is {mu}: it must be in (0, 1], as above 1 the codes of one rank would saturate")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm is called {algorithm!r}: use one of {', '.join(ALGORITHMS)}")
    if algorithm == "hierarchical" and (not node_size or world % node_size):
        raise ValueError(f"node_size is {node_size}: hierarchical needs a divisor of the {world} ranks")
    device, shape = gradients[0].device, gradients[0].shape
    layout = Layout([shape], world, device)
    stored = [g if isinstance(g, ScaledTensor) else scaled_gradient(g, torch.float32) for g in gradients]
    exact = torch.zeros(shape, dtype=torch.float64, device=device)
    for gradient in gradients:
        exact += (
            gradient.double() if not isinstance(gradient, ScaledTensor) else gradient.dequantize(torch.float32).double()
        )
    exact /= world
    if algorithm in ("bf16", "fp32"):
        mean, underflow, overflow = _real_values(stored, torch.bfloat16 if algorithm == "bf16" else torch.float32)
    else:
        exactly = algorithm != "nccl"
        start = AutoScale(["gradient"], world, strategy=strategy, sums_exactly=exactly, device=device).mu
        value = (
            start
            if mu is None or strategy != "auto"
            else torch.as_tensor(mu, dtype=torch.float64, device=device).view(1)
        )
        size = node_size if algorithm == "hierarchical" and node_size else world
        mean, underflow, overflow = _codes(stored, layout, algorithm, power_of_two_below(value), size)
    error = mean.dequantize(torch.float32).double() - exact
    return Reduced(mean, exact.square().sum(), error.square().sum(), underflow, overflow)


def _codes(
    stored: list[ScaledTensor], layout: Layout, algorithm: str, factor: Tensor, node_size: int
) -> tuple[ScaledTensor, Tensor, Tensor]:
    world, device = len(stored), layout.numel.device
    buckets, residuals = (
        [layout.zeros(E4M3.dtype) for _ in stored],
        [None if g.residual is None else layout.zeros(torch.int8) for g in stored],
    )
    for gradient, bucket, residual in zip(stored, buckets, residuals, strict=True):
        layout.views(bucket.view(torch.uint8))[0].copy_(gradient.codes.view(torch.uint8))
        if residual is not None and gradient.residual is not None:
            layout.views(residual)[0].copy_(gradient.residual)
    scales = [gradient.scale.view(1) for gradient in stored]
    locals_ = [local_scales(layout.maximum(row_amax(b)) / s) for b, s in zip(buckets, scales, strict=True)]
    multiplier = shared_scales(torch.stack(locals_).amin(0)).scale * factor
    sent = torch.stack(
        [rescale(b, r, layout.spread(multiplier / s)) for b, r, s in zip(buckets, residuals, scales, strict=True)]
    )
    flushed = sum(((b.float() != 0) & (c.float() == 0)).sum() for b, c in zip(buckets, sent, strict=True))
    underflow = flushed / (layout.numel * world).clamp(min=1)
    gain = torch.ones_like(layout.numel)
    if algorithm == "nccl":
        # The parts of all ranks go around at once: in row h of `hops` stands what the rank h places after the last one of a part adds.
        parts, last = sent.view(world, world, -1, ROW), torch.arange(world, device=device)
        hops = parts[(last[:, None] + last) % world, last]
        codes = ring_sum(hops, 0).view(-1, ROW)
    else:
        codes = sent
        for size in (node_size, world // node_size):
            totals = [exact_sum(group) for group in codes.split(size)]
            amax = layout.maximum(torch.stack([t.abs().amax(-1) for t in totals]).amax(0))
            level = scale_from_amax(amax, E4M3.max)
            visible = layout.spread(level.masked_fill(amax == torch.inf, torch.nan))
            codes = torch.stack([cast(total, visible, E4M3.dtype, block=ROW) for total in totals])
            gain = gain * level
            if len(codes) == 1:
                break
        codes = codes[0]
    overflow = share_at_largest(codes, layout) if algorithm == "nccl" else torch.zeros_like(gain)
    scale = mean_scale(multiplier, gain, world)
    mean = ScaledTensor(layout.views(codes)[0].clone(), scale[0].clone(), stored[0].dtype, residual_on_add=True)
    return mean, underflow[0], overflow[0]


def _real_values(stored: list[ScaledTensor], wire: torch.dtype) -> tuple[ScaledTensor, Tensor, Tensor]:
    total = stored[0].dequantize(wire)
    for gradient in stored[1:]:
        total = total + gradient.dequantize(wire)
    zero = torch.zeros((), device=total.device)
    return scaled_gradient(total / len(stored), stored[0].dtype), zero, zero
