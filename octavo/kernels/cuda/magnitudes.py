"""Largest magnitude and sum of squares of many tensors, Triton; see `octavo.kernels.reference.magnitudes`.

One pass over each tensor, as the maximum, whose order does not matter, and the sum in FP64 of each chunk; a second kernel adds the
sums of the chunks of a tensor in their order, so that the result is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits, merge_e4m11
from octavo.kernels.cuda.tables import (
    CHUNK,
    TRITON_DTYPES,
    addresses,
    aligned,
    chunk_starts,
    chunk_table,
    pointer,
    tail_table,
    upload,
)
from octavo.kernels.reference.magnitudes import Values

TILE = 2048


def magnitudes(tensors: Sequence[Values]) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.reference.magnitudes.magnitudes`."""
    device, n = tensors[0].values.device, len(tensors)
    amaxes = torch.zeros(n, dtype=torch.int32, device=device)
    sums = torch.zeros(n, dtype=torch.float64, device=device)
    tensors = [
        Values(values.contiguous(), None if residual is None else residual.contiguous()) for values, residual in tensors
    ]
    alike: dict[tuple, tuple[list[int], list[int]]] = {}
    for number, one in enumerate(tensors):
        places = addresses(one)
        sizes, words = alike.setdefault((one.values.dtype, one.residual is not None, aligned(places)), ([], []))
        sizes.append(one.values.numel())
        words += (*places, sizes[-1], number)
    for (dtype, residual, all_aligned), (sizes, words) in alike.items():
        numels = tuple(sizes)
        table, chunks = upload(words, device), chunk_table(numels, TILE, device)
        parts = torch.empty(len(chunks), dtype=torch.float64, device=device)
        for masked, programs in ((False, chunks), (True, tail_table(numels, TILE, device))):
            if len(programs):
                _launch_magnitudes(
                    len(programs),
                    (table, programs, amaxes, sums if masked else parts),
                    *(TRITON_DTYPES[dtype], residual, all_aligned, TILE, TILE if masked else CHUNK, masked),
                )
        _launch_add_parts(len(sizes), (table, chunk_starts(numels, TILE, device), parts, sums), 1024)
    return amaxes.view(torch.float32), sums


@triton.jit
def _magnitudes(
    table_ptr,  # [tensors, 4] int64: addresses of values and residual, numel, number among all tensors
    chunks_ptr,  # [chunks, 2] int32
    amaxes_ptr,  # [all tensors] int32, bits of FP32
    sums_ptr,  # FP64: [chunks]; if MASKED, [all tensors], of their tails
    DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0))
    chunk = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1)
    table_ptr += tensor.to(tl.int64) * 4
    values_ptr = pointer(table_ptr, 0, DTYPE, ALIGNED)
    residual_ptr = pointer(table_ptr, 1, tl.int8, ALIGNED)
    numel = tl.load(table_ptr + 2)
    number = tl.load(table_ptr + 3)
    largest = tl.zeros([TILE], tl.int32)
    squares = tl.zeros([TILE], tl.float64)
    first = chunk * (CHUNK // TILE)
    tiles = (numel // TILE).to(tl.int32) + (1 if MASKED else 0)
    for tile in range(first, tl.minimum(first + CHUNK // TILE, tiles)):
        index = tile * tl.full([], TILE, tl.int64) + tl.arange(0, TILE)
        if MASKED:
            x = tl.load(values_ptr + index, index < numel, other=0.0)
        else:
            x = tl.load(values_ptr + index)
        bits = magnitude_bits(x)
        largest = tl.where(bits > largest, bits, largest)
        if RESIDUAL:
            if MASKED:
                low = tl.load(residual_ptr + index, index < numel, other=0)
            else:
                low = tl.load(residual_ptr + index)
            code = x.to(tl.float32)
            value = tl.where(code == code, merge_e4m11(x, low), float("nan")).to(tl.float64)
        else:
            value = x.to(tl.float32).to(tl.float64)
        squares += value * value
    tl.atomic_max(amaxes_ptr + number, tl.max(largest, 0))
    row = number if MASKED else tl.program_id(0)
    tl.store(sums_ptr + row, tl.sum(squares, 0))


@triton.jit
def _add_parts(
    table_ptr,  # as in _magnitudes
    starts_ptr,  # [tensors + 1] int32: the chunks of a tensor are those from its start to the next
    parts_ptr,  # [chunks] FP64
    sums_ptr,  # [all tensors] FP64, raised
    TILE: tl.constexpr,
):
    tensor = tl.program_id(0)
    number = tl.load(table_ptr + tensor.to(tl.int64) * 4 + 3)
    start, stop = tl.load(starts_ptr + tensor), tl.load(starts_ptr + tensor + 1)
    total = tl.zeros([TILE], tl.float64)
    for begin in range(start, stop, TILE):
        index = begin + tl.arange(0, TILE)
        total += tl.load(parts_ptr + index, index < stop, other=0.0)
    tl.store(sums_ptr + number, tl.load(sums_ptr + number) + tl.sum(total, 0))


_launch_magnitudes = Launcher(_magnitudes, num_warps=8, enable_fp_fusion=False)
_launch_add_parts = Launcher(_add_parts, num_warps=4)
