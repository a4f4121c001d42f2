"""The largest value of a matrix less a row: what a cast of x - shift needs first, from one read of x and with nothing written.

A difference that is made by itself is a copy to write and to read twice. Here it exists in registers only, in FP32: rounding keeps the
order of magnitudes, so the largest is rounded for all. A program walks down a strip of columns, whose part of the row it loads once.
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
from octavo.kernels.cuda.tiles import flat_max, larger

ROWS, COLUMNS, WARPS = 32, 256, 8
"""Of a tile, in which a thread has four rows: their maximum, made at once, keeps several loads in flight."""


@triton.jit(do_not_specialize=["m_size", "turns"])
def _shifted_amax_kernel(
    x_ptr,
    shift_ptr,
    parts_ptr,
    m_size,
    k_size,
    strips,
    turns,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """parts[p] = max |x - shift|, rounded to the dtype of x, over the turns * ROWS rows of program p, in strip p % strips.

    x [m_size, k_size] contiguous, shift [k_size]: any float; parts [programs]: FP32 bits as int32.
    """
    program = tl.program_id(0)
    m = (program // strips).to(tl.int64) * (turns * ROWS) + tl.arange(0, ROWS)
    k = (program % strips) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(shift_ptr + k, mask=k < k_size, other=0.0).to(tl.float32)[None, :]
    largest = tl.zeros([WARPS, COLUMNS], tl.int32)
    for _ in range(turns):
        row = tl.where(m < m_size, m, m_size - 1)  # (again, which changes no maximum)
        x = tl.load(x_ptr + (row * k_size)[:, None] + k[None, :], mask=(k < k_size)[None, :], other=0.0).to(tl.float32)
        bits = tl.reshape(magnitude_bits(x - shift), [ROWS // WARPS, WARPS, COLUMNS])
        largest = larger(tl.max(bits, 0), largest)
        m += ROWS
    amax = flat_max(largest).to(tl.float32, bitcast=True)
    tl.store(parts_ptr + program, magnitude_bits(amax.to(x_ptr.dtype.element_ty)))


_launch_shifted_amax = Launcher(_shifted_amax_kernel, num_warps=WARPS)


def shifted_amax_parts(x: Tensor, shift: Tensor) -> Tensor:
    """`octavo.kernels.cuda.cast.amax_parts` of x - shift, rounded to the dtype of both, of a contiguous matrix [M, K] and a row [K]."""
    m, k = x.shape
    programs, strips, turns = _division(m, k)
    parts = x.new_empty(programs, dtype=torch.int32)
    _launch_shifted_amax(programs, (x, shift, parts), m, k, strips, turns, WARPS, ROWS, COLUMNS)
    return parts


@cache
def _division(m: int, k: int) -> tuple[int, int, int]:
    """(programs, strips, turns) of `_shifted_amax_kernel`: at most PROGRAMS, unless the strips alone are more."""
    strips, tiles = triton.cdiv(k, COLUMNS), triton.cdiv(m, ROWS)
    turns = triton.cdiv(tiles, max(PROGRAMS // strips, 1))
    return triton.cdiv(tiles, turns) * strips, strips, turns
