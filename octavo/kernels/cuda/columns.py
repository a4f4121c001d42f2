"""Sums of columns, deterministic: partial sums, one row for each tile or program, are added in a fixed order, where atomics would in any.

The first step reads a matrix for its largest value, with arithmetic and registers to spare.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.cast import PROGRAMS
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits

ROWS, COLUMNS = 8, 256
ROUNDS = 4


@triton.jit
def _amax_sums_kernel(
    x_ptr,
    parts_ptr,
    sums_ptr,
    m_size,
    k_size,
    programs_k,
    turns,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """parts[p] = max |x| and sums[p // programs_k] = Σ x over the rows of program p, turns * ROUNDS * ROWS of them.

    x [m_size, k_size] contiguous: any float; parts [programs]: FP32 bits as int32; sums [programs / programs_k, k_size]: FP32.
    """
    program = tl.program_id(0)
    m = (program // programs_k).to(tl.int64) * (turns * ROUNDS * ROWS) + tl.arange(0, ROWS)
    k = (program % programs_k) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.int32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(turns):
        for _ in tl.static_range(ROUNDS):
            valid = (m < m_size)[:, None] & (k < k_size)[None, :]
            x = tl.load(x_ptr + (m * k_size)[:, None] + k[None, :], mask=valid, other=0.0).to(tl.float32)
            bits = magnitude_bits(x)
            largest = tl.where(bits > largest, bits, largest)
            total += x
            m += ROWS
    tl.store(parts_ptr + program, tl.max(tl.max(largest, 1), 0))
    sums = (program // programs_k).to(tl.int64) * k_size
    tl.store(sums_ptr + sums + k, tl.sum(total, 0), mask=k < k_size)


@triton.jit
def _add_rows_kernel(parts_ptr, sum_ptr, rows, stride, k_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sum = Σ over the rows of parts, ROWS at a time in their order.

    parts [rows, stride]: FP32, the first k_size columns of it; sum [k_size]: any float.
    """
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        at = (start + row).to(tl.int64) * stride
        valid = (start + row < rows)[:, None] & (k < k_size)[None, :]
        total += tl.load(parts_ptr + at[:, None] + k[None, :], mask=valid, other=0.0)
    tl.store(sum_ptr + k, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=k < k_size)


_launch_amax_sums = Launcher(_amax_sums_kernel, num_warps=8)
_launch_add_rows = Launcher(_add_rows_kernel, num_warps=8)


def amax_parts_and_sum(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(`amax_parts`, the sum of the rows [K], made in FP32 and rounded to `dtype`) of a contiguous matrix, in one read."""
    m, k = x.shape
    programs_m, programs_k, turns = _rows_division(m, k)
    parts = x.new_empty(programs_m * programs_k, dtype=torch.int32)
    sums = x.new_empty((programs_m, k), dtype=torch.float32)
    _launch_amax_sums(programs_m * programs_k, (x, parts, sums), m, k, programs_k, turns, ROUNDS, ROWS, COLUMNS)
    if programs_m == 1:
        return parts, sums.view(k).to(dtype)
    return parts, add_rows(sums, k, dtype)


def add_rows(parts: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of FP32 `parts` [rows, ≥ k], contiguous: [k], rounded to `dtype`. Its terms are rows / 8 + 10 roundings deep."""
    out = parts.new_empty(k, dtype=dtype)
    _launch_add_rows(-(-k // COLUMNS), (parts, out), *parts.shape, k, ROWS, COLUMNS)
    return out


@cache
def _rows_division(m: int, k: int) -> tuple[int, int, int]:
    """(programs along M, along K, turns) of `_amax_sums_kernel`: at most PROGRAMS, unless K alone needs more."""
    each = ROUNDS * ROWS
    programs_k = triton.cdiv(k, COLUMNS)
    turns = triton.cdiv(triton.cdiv(m, each), max(PROGRAMS // programs_k, 1))
    return triton.cdiv(m, turns * each), programs_k, turns
