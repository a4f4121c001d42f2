"""Triton kernel of cross-entropy with its gradient in FP8; see `octavo.kernels.cross_entropy`.

One program has one row, and reads it twice: for the largest logit and the sum of exponentials, corrected as the maximum rises, then
for the gradient. A row of 50,304 in BF16 has 100 KB, so the rows of all programs that run at a time lie in the second cache when they
are read again. Two exponentials and some 16 instructions an element are what 3 bytes leave time for.

From the reference differ `exp` and the order of the sum. Losses are within 2^-18 of the largest logit and of themselves; codes are
equal, or in less than one element of 10,000 neighbours, or as far apart as 2^-20: p - 1 of a class that is almost certain has the error
of p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import as_fp8

TILE = 4096
"""Logits of a row at a time: sixteen for each of 256 threads."""


@triton.jit(do_not_specialize=["scale"])
def _softmax_gradient_kernel(
    logits_ptr,
    classes_ptr,
    weights_ptr,
    losses_ptr,
    codes_ptr,
    n_size,
    scale,
    MANTISSA_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """loss = w · (logΣexp - l_c), codes = (softmax - onehot) · w · scale, of one row.

    logits [rows, n_size]: any float; classes [rows]: int64; weights, losses [rows]: FP32; codes [rows, n_size]: FP8.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n_size
    codes_ptr += row * n_size
    lane = tl.arange(0, TILE)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, n_size, TILE):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < n_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))  # (a NaN shows in the sum)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = higher
    log_sum = tl.log(tl.sum(total, 0)) + tl.where(most == float("-inf"), 0.0, most)
    chosen = tl.load(classes_ptr + row)
    weight = tl.load(weights_ptr + row)
    tl.store(losses_ptr + row, (log_sum - tl.load(logits_ptr + chosen).to(tl.float32)) * weight)
    for start in range(0, n_size, TILE):
        column = start + lane
        x = tl.load(logits_ptr + column, mask=column < n_size, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - tl.where(column == chosen, 1.0, 0.0)) * (weight * scale)
        tl.store(codes_ptr + column, as_fp8(gradient, MANTISSA_BITS), mask=column < n_size)


_launch = Launcher(_softmax_gradient_kernel, num_warps=8)


def softmax_gradient(
    logits: Tensor, classes: Tensor, weights: Tensor, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.cross_entropy.softmax_gradient`."""
    logits, (rows, columns) = logits.contiguous(), logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    codes = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if logits.numel():
        tensors = logits, classes.contiguous(), weights.contiguous(), losses, codes
        tile = min(TILE, triton.next_power_of_2(columns))
        _launch(rows, tensors, columns, scale, Format.of(dtype).mantissa_bits, max(tile, 1024))
    return losses, codes
