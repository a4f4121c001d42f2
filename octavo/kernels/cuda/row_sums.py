"""Sums of rows and the largest value of a matrix in one read: 2 bytes an element of BF16, where apart they are 4.

A head's backward wants both of the gradient of its logits, which is the largest tensor of a step: 4.2 GB at 16,384 tokens and 128,256
words, 1 ms a read. One row of it is 257 KB, so a program has one row, or a part of one where rows are few, or several where they are
short. Programs are many more than run at a time, so that none waits long for the last.

Rows of an odd length begin anywhere. A program loads the part of a row between two addresses that are multiples of 16 bytes in whole
vectors, and what is left at both ends apart: 50,257 columns take as long as 50,304. Short rows have their ends too near for that.

Sums are FP32 and deterministic: how a row is shared out depends on the shape alone, and the parts are added in a fixed order. No sum
of N columns is more than N / 8,192 + 30 roundings deep.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cuda.cast import PROGRAMS, amax
from octavo.kernels.cuda.columns import add_rows
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import flat_max, larger, rows_of

LINES, COLUMNS = 4, 2048
"""Of a tile: four vectors for each of 256 threads. Its lines are pieces of one row, added up where they are."""
VECTOR = 8
"""Elements of 16 bits that a thread loads at once."""
SPAN = 4 * LINES * COLUMNS
"""Columns for which a further program is worth its launch."""


@triton.jit(do_not_specialize=["m_size", "splits", "turns"])
def _long_rows_kernel(
    x_ptr,
    parts_ptr,
    sums_ptr,
    m_size,
    n_size,
    stride,
    splits,
    turns,
    VECTOR: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """parts[p] = max |x|, sums[s, m] = Σ x over the part s = p % splits of row m = p // splits.

    x [m_size, n_size], rows `stride` apart: any float; parts [m_size * splits]: FP32 bits as int32; sums [splits, m_size]: FP32. A part is
    turns * LINES * COLUMNS columns, counted from the first multiple of VECTOR in memory on; the first part has also those before it,
    and those after the last such multiple. VECTOR 1: all rows begin and end at multiples of 16 elements.
    """
    m, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    start = m.to(tl.int64) * stride
    stop = start + n_size
    first = (start + (VECTOR - 1)) // VECTOR * VECTOR
    last = stop // VECTOR * VECTOR
    span = turns * (LINES * COLUMNS)
    lane = tl.arange(0, COLUMNS)
    column = (tl.arange(0, LINES) * COLUMNS)[:, None] + lane[None, :]
    x_ptrs = x_ptr + first + split.to(tl.int64) * span + column
    left = last - first - split.to(tl.int64) * span
    left = tl.where(left < span, left, span).to(tl.int32)
    largest = tl.zeros([COLUMNS], tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in range(turns):
        x = tl.load(x_ptrs, mask=column < left, other=0.0).to(tl.float32)
        largest = larger(tl.max(magnitude_bits(x), 0), largest)
        total += tl.sum(x, 0)
        x_ptrs += LINES * COLUMNS
        left -= LINES * COLUMNS
    if VECTOR > 1:
        at = tl.where(lane < VECTOR, start + lane, last + (lane - VECTOR))
        valid = (at < tl.where(lane < VECTOR, first, stop)) & (lane < 2 * VECTOR) & (split == 0)
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        largest = larger(magnitude_bits(x), largest)
        total += x
    tl.store(parts_ptr + tl.program_id(0), tl.max(largest, 0))
    tl.store(sums_ptr + split.to(tl.int64) * m_size + m, tl.sum(total, 0))


@triton.jit(do_not_specialize=["m_size"])
def _short_rows_kernel(x_ptr, parts_ptr, sums_ptr, m_size, n_size, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """parts[p] = max |x|, sums[m] = Σ x over the rows m of program p, ROWS from p * ROWS on, of no more than COLUMNS columns.

    x [m_size, n_size], rows `stride` apart: any float; parts [programs]: FP32 bits as int32; sums [m_size]: FP32.
    """
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = (m < m_size)[:, None] & (column < n_size)[None, :]
    x = tl.load(x_ptr + (m * stride)[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(parts_ptr + tl.program_id(0), flat_max(magnitude_bits(x)))
    tl.store(sums_ptr + m, tl.sum(x, 1), mask=m < m_size)


_launch_long_rows = Launcher(_long_rows_kernel, num_warps=8)
_launch_short_rows = Launcher(_short_rows_kernel, num_warps=8)


def row_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.row_sums`."""
    if x.numel() == 0:
        return reference.row_sums(x)
    x = rows_of(x)
    (m, n), stride = x.shape, x.stride(0)
    if n <= COLUMNS:
        columns = triton.next_power_of_2(max(n, 2 * VECTOR))
        rows = LINES * COLUMNS // columns
        parts, sums = x.new_empty(-(-m // rows), dtype=torch.int32), x.new_empty(m, dtype=torch.float32)
        _launch_short_rows(len(parts), (x, parts, sums), m, n, stride, rows, columns)
    else:
        splits, turns = _division(m, n)
        parts, sums = x.new_empty(m * splits, dtype=torch.int32), x.new_empty((splits, m), dtype=torch.float32)
        vector = VECTOR if n % 16 or stride % 16 else 1
        _launch_long_rows(len(parts), (x, parts, sums), m, n, stride, splits, turns, vector, LINES, COLUMNS)
        sums = sums.view(m) if splits == 1 else add_rows(sums, m, torch.float32)
    return sums, amax(parts.view(torch.float32))


@cache
def _division(m: int, n: int) -> tuple[int, int]:
    """(programs of a row, turns of each) of `_long_rows_kernel`."""
    splits = max(min(triton.cdiv(4 * PROGRAMS, m), n // SPAN), 1)
    turns = triton.cdiv(triton.cdiv(n, splits), LINES * COLUMNS)
    return triton.cdiv(n, turns * LINES * COLUMNS), turns
