"""Arithmetic on buckets of E4M3 codes ([rows, ROW]): maxima, changes of scale, sums. All of it on the device, in FP32.

For emulation, samples and sums along a ring; the buckets of `DataParallel` pass through the kernels of `octavo.kernels.reference.reduce`,
and have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import kernels
from octavo.distributed.layout import ROW, Layout
from octavo.formats import E4M3
from octavo.kernels.reference.reduce import LARGEST_CODE, exact_sum

__all__ = ["exact_sum", "rescale", "ring_sum", "row_amax", "share_at_largest"]


def row_amax(codes: Tensor) -> Tensor:
    """The largest |code| of each row as a value, FP32 [rows]; NaN if there is one."""
    # Magnitudes are ordered as their bits are, NaN last.
    return (codes.view(torch.uint8) & 0x7F).amax(-1).view(E4M3.dtype).float()


def rescale(codes: Tensor, residual: Tensor | None, factor: Tensor) -> Tensor:
    """codes · factor, rounded once, saturated; with a residual (int8, like `codes`) from the 11 mantissa bits of both.

    `factor` is FP32 [rows, 1]; NaN makes a row NaN. A power of two changes no code that stays normal.
    """
    one = torch.ones((), device=codes.device)
    if residual is None:
        values = kernels.uncast(codes, one, torch.bfloat16)  # exact
    else:
        values = kernels.uncast_residual(codes, residual, one)
    # Zeros that were left with a tiny scale ask for an infinite factor, which would make them NaN.
    factor = factor.clamp(max=2.0**126)
    return kernels.cast(values, factor, E4M3.dtype, block=ROW)


def ring_sum(codes: Tensor, last: int) -> Tensor:
    """Σ over dim 0 of codes [N, ...], rounded to E4M3 at each hop, as a ring that ends at rank `last` does it.

    NCCL adds on its way: the rank after `last` sends its codes on, each rank adds its own, rounds, saturates and sends. The partial
    sum is so rounded N - 1 times, and what is small beside it is lost.
    """
    world = codes.shape[0]
    one = torch.ones((), device=codes.device)
    total = codes[(last + 1) % world]
    for hop in range(2, world + 1):
        partial = kernels.uncast(total, one).add_(kernels.uncast(codes[(last + hop) % world], one))
        total = kernels.cast(partial, one, E4M3.dtype)
    return total


def share_at_largest(codes: Tensor, layout: Layout) -> Tensor:
    """The share of values of each tensor that reached the largest code (±448 or NaN), FP32 [T]: what feeds µ."""
    rows = ((codes.view(torch.uint8) & 0x7F) >= LARGEST_CODE).sum(-1, dtype=torch.float32)
    return layout.total(rows) / layout.numel.clamp(min=1)
