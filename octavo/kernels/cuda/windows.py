"""The windows of delayed scaling at the end of a step: a program, of one warp, for each of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.cast import scale_of
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits


@triton.jit
def _update_windows_kernel(
    history_ptr,
    pending_ptr,
    held_ptr,
    scales_ptr,
    limits_ptr,
    rows_ptr,
    done_ptr,
    window,
    stride,
    WINDOW: tl.constexpr,
):
    """See `octavo.kernels.windows`; rows and done are bytes, or None. WINDOW >= window."""
    row = tl.program_id(0)
    takes_part = row >= 0
    if rows_ptr is not None:
        takes_part = tl.load(rows_ptr + row) != 0
    moves = takes_part
    if done_ptr is not None:
        moves = moves & (tl.load(done_ptr) != 0)
    lane = tl.arange(0, WINDOW)
    inside = lane < window
    at = history_ptr + row * window + lane
    pending = tl.load(pending_ptr + row * stride)
    before = tl.load(at - 1, mask=inside & (lane > 0), other=0.0)
    history = tl.load(at, mask=inside, other=0.0)
    history = tl.where(moves, tl.where(lane == 0, pending, before), history)
    history = tl.where(inside, history, 0.0)
    tl.debug_barrier()  # all is read before any is written
    tl.store(at, history, mask=inside)
    new = tl.max(magnitude_bits(history), 0).to(tl.float32, bitcast=True)
    held = tl.load(held_ptr + row * stride)
    held = tl.where(takes_part & (new > 0) & (new < float("inf")), new, held)
    tl.store(held_ptr + row * stride, held)
    tl.store(pending_ptr + row * stride, tl.where(takes_part, 0.0, pending))
    limit = tl.load(limits_ptr + row)
    tl.store(scales_ptr + row * stride, scale_of(held, limit, True), mask=limit > 0)


_launch_update_windows = Launcher(_update_windows_kernel, num_warps=1)


def update_windows(
    history: Tensor,
    pending: Tensor,
    held: Tensor,
    scales: Tensor,
    limits: Tensor,
    rows: Tensor | None = None,
    done: Tensor | None = None,
) -> None:
    """See `octavo.kernels.windows`."""
    n, window = history.shape
    flags = [None if flag is None else flag.view(torch.uint8) for flag in (rows, done)]
    _launch_update_windows(
        n,
        (history, pending, held, scales, limits, *flags),
        *(window, pending.stride(0), triton.next_power_of_2(window)),
    )
