"""The element-wise work of a reduction over ranks, Triton; equal bit for bit to `octavo.kernels.reference.reduce`.

All are bound by memory. Of each of n elements of a bucket the passes move, in bytes: 1 for the maxima, 2 to pack (3 with a residual),
1 for the maxima of the sums, 1 + 1/N for the cast of the sums, 2 to unpack. Sums are made twice, since keeping them in FP32 would
take 8/N bytes, and memory, instead of 1. Each pass is one launch for all tensors: `_table` goes to the device once a bucket, with a
small area in which scales and counts are gathered; a program finds its chunk in a table that depends on shapes alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.cuda import reduce_kernels
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.tables import addresses, aligned, upload
from octavo.kernels.reference import reduce as reference
from octavo.kernels.reference import reduce_scalars as scalars
from octavo.kernels.reference.reduce import Gradients, Places, Unpacked
from octavo.kernels.reference.reduce_scalars import MuState

TILE = 4096
CHUNK = 1 << 15
"""Elements of a program: an atomic for each does not count, and the last programs end at about the same time."""


def _launcher(kernel: Any) -> Launcher:
    return Launcher(kernel, num_warps=4, enable_fp_fusion=False)


_launch_local_scales = _launcher(reduce_kernels.local_scales)
_launch_pack = _launcher(reduce_kernels.pack)
_launch_sum_amax = _launcher(reduce_kernels.sum_amax)
_launch_cast_sum = _launcher(reduce_kernels.cast_sum)
_launch_unpack = _launcher(reduce_kernels.unpack)
_launch_update_mu = _launcher(reduce_kernels.update_mu)


class _Table(NamedTuple):
    """A bucket on its device."""

    rows: Tensor
    """int64 [T, reduce_kernels.WIDTH]."""
    scales: Tensor
    """FP32 [T], where local scales are gathered: begins with the largest, or what says that there is no gradient."""
    largest: Tensor
    """int64 [T], zero: counts of the largest codes."""
    flags: Tensor
    """uint8 [1 + T], ones: those of `Unpacked`."""
    codes: list[Tensor]
    """Those of the gradients, contiguous."""
    residuals: list[Tensor | None]
    aligned: bool


def _table(gradients: Gradients) -> _Table:
    """Made at the first call, in one copy that the host does not wait for."""
    if gradients.on_device is None:
        codes = [codes.contiguous() for codes in gradients.codes]
        residuals = [None if residual is None else residual.contiguous() for residual in gradients.residuals]
        places, count = gradients.places, len(codes)
        numbers: list[int] = []
        for one, residual, scale, numel, (start, stop) in zip(
            codes, residuals, gradients.scales, places.numels, places.spans(), strict=True
        ):
            low = 0 if residual is None else residual.data_ptr()
            numbers += [one.data_ptr(), low, scale.data_ptr(), numel, start, stop - start]
        half = -(-count // 2)
        words = torch.full((2 * half,), scalars.LARGEST, dtype=torch.float32)
        words[:count].masked_fill_(torch.tensor(gradients.absent), scalars.ABSENT)
        numbers += words.view(torch.int64).tolist()
        flags = count // 8 + 1
        area = upload([*numbers, *[0] * count, *[0x0101010101010101] * flags], codes[0].device)
        rows, packed, largest, ones = area.split([count * reduce_kernels.WIDTH.value, half, count, flags])
        gradients.on_device = _Table(
            rows, packed.view(torch.float32)[:count], largest, ones.view(torch.uint8)[: 1 + count], codes, residuals,
            aligned(addresses([*codes, *residuals])),
        )  # fmt: skip
    return gradients.on_device


@lru_cache(maxsize=256)
def _chunks(places: Places, device: torch.device) -> Tensor:
    """int32 [chunks, 2]: tensor, and number of a chunk of its rows; at least one for each tensor."""
    counts = [max(1, -(-(stop - start) * reference.ROW // CHUNK)) for start, stop in places.spans()]
    pairs = [(tensor, chunk) for tensor, count in enumerate(counts) for chunk in range(count)]
    return torch.tensor(pairs, dtype=torch.int32).to(device)


@lru_cache(maxsize=256)
def _part_chunks(places: Places, first: int, count: int, device: torch.device) -> Tensor:
    """int32 [chunks, 3] of `count` rows of a bucket from `first` on: tensor, start and stop among these rows."""
    step = CHUNK // reference.ROW
    triples = [
        (tensor, row, min(row + step, stop))
        for tensor, start, stop in places.pieces(first, count)
        for row in range(start, stop, step)
    ]
    return torch.tensor(triples, dtype=torch.int32).to(device)


def local_scales(gradients: Gradients) -> Tensor:
    """See `octavo.kernels.reference.reduce.local_scales`."""
    table = _table(gradients)
    chunks = _chunks(gradients.places, table.rows.device)
    _launch_local_scales(len(chunks), (table.rows, chunks, table.scales.view(torch.int32)), table.aligned, TILE, CHUNK)
    return table.scales


def pack_codes(gradients: Gradients, minimum: Tensor, mu: Tensor) -> Tensor:
    """See `octavo.kernels.reference.reduce.pack_codes`."""
    table = _table(gradients)
    chunks = _chunks(gradients.places, table.rows.device)
    packed = torch.empty(gradients.places.rows, reference.ROW, dtype=E4M3.dtype, device=table.rows.device)
    residual = any(low is not None for low in table.residuals)
    _launch_pack(len(chunks), (table.rows, chunks, minimum, mu, packed), residual, table.aligned, TILE, CHUNK)
    return packed


def sum_codes(received: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.reference.reduce.sum_codes`."""
    world, count, _ = received.shape
    chunks = _part_chunks(places, first, count, received.device)
    amax = torch.zeros(len(places.numels), dtype=torch.float32, device=received.device)
    _launch_sum_amax(len(chunks), (received, chunks, amax.view(torch.int32)), count, world, TILE)
    return amax, received


def cast_sum(sums: Tensor, amax: Tensor, places: Places, first: int) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.reference.reduce.cast_sum`."""
    world, count, _ = sums.shape
    chunks = _part_chunks(places, first, count, sums.device)
    codes = torch.empty(count, reference.ROW, dtype=E4M3.dtype, device=sums.device)
    gain = torch.empty_like(amax)
    programs = max(len(chunks), len(gain))
    _launch_cast_sum(programs, (sums, chunks, amax, codes, gain), count, len(chunks), len(gain), world, TILE)
    return codes, gain


def unpack_codes(
    gradients: Gradients, codes: Tensor, minimum: Tensor, mu: Tensor, gain: Tensor, world: int, count: bool = False
) -> Unpacked:
    """See `octavo.kernels.reference.reduce.unpack_codes`."""
    table = _table(gradients)
    chunks = _chunks(gradients.places, table.rows.device)
    _launch_unpack(
        len(chunks), (table.rows, chunks, codes.view(torch.uint8), minimum, mu, gain, table.largest, table.flags),
        world, count, table.aligned, TILE, CHUNK,
    )  # fmt: skip
    for own, written in zip(gradients.codes, table.codes, strict=True):
        if written is not own:
            own.copy_(written)
    flags = table.flags.view(torch.bool)
    return Unpacked(flags[0], flags[1:], table.largest if count else None)


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
    """See `octavo.kernels.reference.reduce_scalars.update_mu`."""
    _launch_update_mu(
        triton.cdiv(len(index), 256), (*state, index, ratio, usable.view(torch.uint8)),
        len(index), moves, threshold, 2.0 ** (1.0 / period), floor, 256,
    )  # fmt: skip
