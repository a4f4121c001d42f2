"""The element-wise work of a reduction of E4M3 gradients over ranks, a bucket of many tensors at a time.

    scales = local_scales(gradients)                 [minimum over the ranks]
    codes = pack_codes(gradients, minimum, factor)   [all-to-all]
    amax, sums = sum_codes(received, ...)            [maximum over the ranks]
    codes, gain = cast_sum(sums, amax, ...)          [all-gather]
    unpack_codes(gradients, codes, ...)

In a bucket each tensor begins at a row of `ROW` elements; what is between two tensors is zero when it is sent, and nobody reads it later.
Scalars of tensors are FP32 [T], and stay on the device.

E4M3 codes of one scale are multiples of 2^-9 up to 448, 18 bits wide. FP32 therefore adds up to 64 of them without rounding, in
any order; with more ranks, sums of 64 are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.reference import reduce_scalars as scalars
from octavo.kernels.reference.cast import amax as largest_magnitude
from octavo.kernels.reference.cast import cast, scale_from_amax, uncast
from octavo.kernels.reference.residual import uncast_residual

ROW = 256
"""Elements of a row; weights of linear layers are nearly always a multiple of it."""
LARGEST_CODE = 0x7E
LARGEST_FACTOR = 2.0**126
EXACT_RANKS = 64
"""Codes that FP32 adds without rounding."""


class Places(NamedTuple):
    """Where T >= 1 tensors lie in a bucket [rows, ROW]."""

    numels: tuple[int, ...]
    first_rows: tuple[int, ...]
    """The row where each begins, ascending from 0."""
    rows: int

    def spans(self) -> list[tuple[int, int]]:
        """(first row, end) of each tensor; the last one has what is left."""
        return list(zip(self.first_rows, (*self.first_rows[1:], self.rows), strict=True))

    def pieces(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """(tensor, start, stop) of the tensors in `count` rows of the bucket from `first` on, as rows of that part."""
        clipped = [(t, max(start - first, 0), min(stop - first, count)) for t, (start, stop) in enumerate(self.spans())]
        return [piece for piece in clipped if piece[1] < piece[2]]


@dataclass
class Gradients:
    """The gradients of a bucket as they are stored, of any shapes and strides: real = (codes and residual) / scale."""

    codes: Sequence[Tensor]
    """E4M3."""
    residuals: Sequence[Tensor | None]
    """int8, the low bytes of E4M11 words."""
    scales: Sequence[Tensor]
    """FP32, 0-d."""
    absent: Sequence[bool]
    """Whether this rank has no such gradient; its codes are then zero."""
    places: Places
    on_device: Any = field(default=None, repr=False)
    """What the kernels for CUDA have made of all this."""


class Unpacked(NamedTuple):
    """What is known of the gradients of a bucket when they are reduced."""

    finite: Tensor
    """Whether all are finite on all ranks, bool, 0-d."""
    usable: Tensor
    """Whether each is finite, and some rank has it; bool [T]."""
    largest: Tensor | None
    """How many codes of each are the largest, ±448, or NaN; int64 [T]."""


def local_scales(gradients: Gradients) -> Tensor:
    """The largest scale that each tensor bears on this rank, FP32 [T]: see `reduce_scalars.local_scales`. Codes alone count."""
    amaxes = torch.stack([largest_magnitude(codes) for codes in gradients.codes])
    stored = torch.stack(list(gradients.scales))
    return scalars.local_scales(
        amaxes.nan_to_num_(nan=torch.inf, posinf=torch.inf) / stored, torch.tensor(gradients.absent).to(stored.device)
    )


def pack_codes(gradients: Gradients, minimum: Tensor, mu: Tensor) -> Tensor:
    """The codes to send, E4M3 [rows, ROW]: those of gradient · scale · µ, rounded once, saturated.

    `minimum`, FP32 [T], is that of `local_scales` over all ranks, and gives the scale; of `mu`, FP64 [T], the power of two below counts.
    All codes of a tensor that is not finite on some rank are NaN.
    """
    places = gradients.places
    packed = torch.zeros(places.rows, ROW, dtype=E4M3.dtype, device=minimum.device)
    flat = packed.view(torch.uint8).view(-1)
    one = torch.ones((), device=minimum.device)
    multiplier = scalars.shared_scales(minimum).scale * scalars.power_of_two_below(mu)
    # Zeros that were left with a tiny scale ask for an infinite factor, which would make them NaN.
    factors = (multiplier / torch.stack(list(gradients.scales))).clamp_(max=LARGEST_FACTOR)
    for codes, residual, row, factor in zip(
        gradients.codes, gradients.residuals, places.first_rows, factors, strict=True
    ):
        if residual is None:
            values = uncast(codes, one, torch.bfloat16)  # exact
        else:
            values = uncast_residual(codes, residual, one)
        sent = cast(values, factor, E4M3.dtype).view(torch.uint8)
        flat[row * ROW : row * ROW + codes.numel()] = sent.reshape(-1)
    return packed


def exact_sum(codes: Tensor) -> Tensor:
    """Σ over dim 0 of codes [N, ...] in FP32; exact for 64 ranks, and sums of 64 are added in the order of the ranks."""
    values = uncast(codes, torch.ones((), device=codes.device), torch.bfloat16)  # exact
    first, *others = (part.sum(0, dtype=torch.float32) for part in values.split(EXACT_RANKS))
    for other in others:
        first += other
    return first


def sum_codes(received: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """(amax, sums) of codes [N, count, ROW] of N ranks, which are the rows from `first` on of the bucket.

    amax is that of each tensor's sums in this part, FP32 [T], 0 where it has none, infinite for NaN. `sums` is for `cast_sum`: here
    FP32 [count, ROW], on CUDA the codes, which are added again, for this moves fewer bytes.
    """
    sums = exact_sum(received)
    amax = torch.zeros(len(places.numels), dtype=torch.float32, device=sums.device)
    for tensor, start, stop in places.pieces(first, len(sums)):
        amax[tensor] = largest_magnitude(sums[start:stop])
    return amax.nan_to_num_(nan=torch.inf, posinf=torch.inf), sums


def cast_sum(sums: Tensor, amax: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """(codes E4M3 [count, ROW], gain FP32 [T]): codes = gain · sum, gain the largest power of two with which no sum saturates.

    `amax` is the largest sum of each whole tensor; the codes of a tensor where it is infinite are NaN, and its gain is 1.
    """
    # Another gain, 448 / amax, rounds sums of few codes better (they lie half-way between two codes less often: 0.4 dB on 2 ranks, 0.1
    # on 4), but moves the codes of equal gradients all in one direction: their mean can be 2% too small, and here is exact.
    gain = scale_from_amax(amax, E4M3.max)
    visible = gain.masked_fill(amax == torch.inf, torch.nan)
    codes = torch.empty(sums.shape, dtype=E4M3.dtype, device=sums.device)
    for tensor, start, stop in places.pieces(first, len(sums)):
        codes[start:stop] = cast(sums[start:stop], visible[tensor], E4M3.dtype)
    return codes, gain


def unpack_codes(
    gradients: Gradients, codes: Tensor, minimum: Tensor, mu: Tensor, gain: Tensor, world: int, count: bool = False
) -> Unpacked:
    """Writes the reduced `codes` [rows, ROW] and the scales of the means into the gradients; residuals are not touched.

    `minimum` and `mu` are those of `pack_codes`; `gain`, FP32 [T], has multiplied the sums of `world` ranks; largest codes are counted
    if asked.
    """
    places, flat = gradients.places, codes.view(torch.uint8).view(-1)
    shared = scalars.shared_scales(minimum)
    means = scalars.mean_scale(shared.scale * scalars.power_of_two_below(mu), gain, world)
    largest = torch.zeros(len(places.numels), dtype=torch.int64, device=codes.device) if count else None
    for tensor, (own, scale, row) in enumerate(zip(gradients.codes, gradients.scales, places.first_rows, strict=True)):
        new = flat[row * ROW : row * ROW + own.numel()]
        own.view(torch.uint8).copy_(new.view(own.shape))
        scale.copy_(means[tensor])
        if largest is not None:
            largest[tensor] = ((new & 0x7F) >= LARGEST_CODE).sum()
    return Unpacked(shared.finite.all(), shared.finite & shared.present, largest)
