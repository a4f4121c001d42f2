"""How large many tensors are: the largest magnitude and the sum of squares of each, in one pass.

The maximum bounds what the optimizer will write, the sum of squares is what clipping by the norm needs. Squares are FP64: none
overflows, and of E4M3 codes, which are multiples of 2^-9 up to 448, every sum below 2^53 · 2^-18 is exact, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.cast import amax, chunks, uncast
from octavo.kernels.reference.residual import uncast_residual


class Values(NamedTuple):
    """A tensor of any shape: plain, or codes of 8 bits."""

    values: Tensor
    residual: Tensor | None = None
    """int8, the low bytes of E4M11 words."""


def magnitudes(tensors: Sequence[Values]) -> tuple[Tensor, Tensor]:
    """(max |values|, FP32 [n], without residuals; Σ values², FP64 [n], with them). NaN propagates; an empty tensor gives 0."""
    device = tensors[0].values.device
    sums = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    one = torch.ones((), device=device)
    for number, (values, residual) in enumerate(tensors):
        flat = values.reshape(-1)
        for part in chunks(flat.numel()):
            if residual is not None:
                x = uncast_residual(flat[part], residual.reshape(-1)[part], one)
            else:
                x = uncast(flat[part], one) if flat.itemsize == 1 else flat[part]
            sums[number] += x.double().square().sum()
    return torch.stack([amax(values) for values, _ in tensors]), sums
