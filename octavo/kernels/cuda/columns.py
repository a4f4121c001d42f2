"""Sums of columns, second step: partial sums, one row for each tile or program, are added in a fixed order, where atomics would in any."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.launch import Launcher

ROWS, COLUMNS = 8, 256


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


_launch_add_rows = Launcher(_add_rows_kernel, num_warps=8)


def add_rows(parts: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of FP32 `parts` [rows, ≥ k], contiguous: [k], rounded to `dtype`. Its terms are rows / 8 + 10 roundings deep."""
    out = parts.new_empty(k, dtype=dtype)
    _launch_add_rows(-(-k // COLUMNS), (parts, out), *parts.shape, k, ROWS, COLUMNS)
    return out
