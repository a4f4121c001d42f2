"""Triton kernel of rotary positions; see `octavo.kernels.rotary`.

A program takes one token and up to 32 of its heads: both halves of these heads and the row of the table that they share, which is read
once and not once a head. Heads that are not rotated are copied in the same pass, as bits, so that attention finds queries, keys and
values in one tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.launch import Launcher

HEADS = 32
"""Heads of a program at most: 4,096 elements at 128 channels a head, 32 a thread."""


@triton.jit(do_not_specialize=["tokens", "tiles", "total", "heads"])
def _rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    tiles,
    total,
    heads,
    stride_b,
    stride_t,
    stride_h,
    BATCHED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """(out_i, out_j) = (x_i·cos - x_j·sin, x_j·cos + x_i·sin), j = i + HALF, for heads below `heads`; out = x for the others.

    x [B, tokens, total, 2·HALF], channels contiguous, any float; cos and sin [tokens, HALF], or [B, tokens, HALF] if BATCHED: FP32;
    out: the shape of x, contiguous, its dtype. BACKWARD turns by the opposite angle. PAIRS is HALF rounded up to a power of two.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    head = (tl.program_id(0) % tiles) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    place = row % tokens
    table = (row if BATCHED else place) * HALF + pair
    cos = tl.load(cos_ptr + table, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table, mask=pair < HALF, other=0.0)[None, :]
    if BACKWARD:
        sin = -sin
    valid = (head < total)[:, None] & (pair < HALF)[None, :]
    x_ptr += row // tokens * stride_b + place * stride_t
    index = head[:, None].to(tl.int64) * stride_h + pair[None, :]
    first = tl.load(x_ptr + index, mask=valid, other=0.0)
    second = tl.load(x_ptr + index + HALF, mask=valid, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned = (head < heads)[:, None]
    index = head[:, None] * (2 * HALF) + pair[None, :]
    out_ptr += row * total * (2 * HALF)
    tl.store(out_ptr + index, tl.where(turned, (a * cos - b * sin).to(first.dtype), first), mask=valid)
    tl.store(out_ptr + index + HALF, tl.where(turned, (b * cos + a * sin).to(first.dtype), second), mask=valid)


_launch_rotary = Launcher(_rotary_kernel, num_warps=4, enable_fp_fusion=False)


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, *, backward: bool = False) -> Tensor:
    """See `octavo.kernels.rotary`."""
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    batch, tokens, total, channels = qkv.shape
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if out.numel() == 0:
        return out
    half, in_program = channels // 2, min(HEADS, triton.next_power_of_2(total))
    tiles = triton.cdiv(total, in_program)
    _launch_rotary(
        batch * tokens * tiles,
        (qkv, cos.contiguous(), sin.contiguous(), out),
        *(tokens, tiles, total, heads, *qkv.stride()[:3]),
        *(cos.dim() == 3, backward, half, triton.next_power_of_2(half), in_program),
    )
    return out
