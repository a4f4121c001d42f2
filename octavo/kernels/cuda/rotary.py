"""Triton kernel of rotary positions; see `octavo.kernels.rotary`.

A program takes one token and up to 32 of its heads: both halves of these heads and the row of the table that they share, which is read
once and not once a head. Heads that are not rotated are copied in the same pass, as bits, so that attention finds queries, keys and
values in one tensor; `rotary_` leaves them alone. `rotary_backward` takes heads of one of its three gradients to a program, whose
largest magnitude ends in an atomic maximum: 1 in 8 KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cuda.launch import Launcher
from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import flat_max, larger

HEADS = 32
"""Heads of a program at most: 4,096 elements at 128 channels a head, 32 a thread."""


@triton.jit(do_not_specialize=["tokens", "tiles", "total", "written", "heads"])
def _rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    tiles,
    total,
    written,
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
    """(out_i, out_j) = (x_i·cos - x_j·sin, x_j·cos + x_i·sin), j = i + HALF, for heads below `heads`; out = x for others below `written`.

    x [B, tokens, total, 2·HALF], channels contiguous, any float; cos and sin [tokens, HALF], or [B, tokens, HALF] if BATCHED: FP32;
    out: the shape of x, contiguous, its dtype, or x itself. BACKWARD turns back. PAIRS is HALF rounded up to a power of two.
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
    valid = (head < written)[:, None] & (pair < HALF)[None, :]
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


@triton.jit
def _turn_back(
    x_ptr, stride_h, cos_ptr, sin_ptr, table, out_ptr, head, heads,
    TURN: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out = x turned by the opposite angle if TURN, x if not, of heads `head` below `heads`; returns max |out| before it is rounded.

    x_ptr and out_ptr point to a token, whose heads are stride_h apart in x and contiguous in out, and whose angles begin at `table`.
    """
    pair = tl.arange(0, PAIRS)
    valid = (head < heads)[:, None] & (pair < HALF)[None, :]
    index = head[:, None].to(tl.int64) * stride_h + pair[None, :]
    first = tl.load(x_ptr + index, mask=valid, other=0.0)
    second = tl.load(x_ptr + index + HALF, mask=valid, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if TURN:
        cos = tl.load(cos_ptr + table + pair, mask=pair < HALF, other=0.0)[None, :]
        sin = -tl.load(sin_ptr + table + pair, mask=pair < HALF, other=0.0)[None, :]
        a, b = a * cos - b * sin, b * cos + a * sin
        first, second = a.to(first.dtype), b.to(first.dtype)
    index = head[:, None] * (2 * HALF) + pair[None, :]
    tl.store(out_ptr + index, first, mask=valid)
    tl.store(out_ptr + index + HALF, second, mask=valid)
    return flat_max(larger(magnitude_bits(a), magnitude_bits(b)))


@triton.jit(do_not_specialize=["tokens", "heads", "groups", "tiles_q", "tiles_k"])
def _rotary_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    amax_ptr,
    tokens,
    heads,
    groups,
    tiles_q,
    tiles_k,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    BATCHED: tl.constexpr,
    TURN: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """out = (q turned back, k turned back, v) along heads, amax = max |out|; TURN: if not, q and k are copied too.

    q [B, tokens, heads, 2·HALF], k and v [B, tokens, groups, 2·HALF], so far apart, channels contiguous: any float; cos, sin as in
    `_rotary_kernel`; out [B, tokens, heads + 2·groups, 2·HALF], contiguous, its dtype; amax [1]: FP32 bits as int32, zero before.
    """
    tiles = tiles_q + 2 * tiles_k
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    batch, place = row // tokens, row % tokens
    head = tl.arange(0, HEADS)
    table = (row if BATCHED else place) * HALF
    out_ptr += row * (heads + 2 * groups) * (2 * HALF)
    if tile < tiles_q:
        largest = _turn_back(
            q_ptr + batch * q_b + place * q_t, q_h, cos_ptr, sin_ptr, table,
            out_ptr, tile * HEADS + head, heads, TURN, HALF, PAIRS,
        )  # fmt: skip
    elif tile < tiles_q + tiles_k:
        largest = _turn_back(
            k_ptr + batch * k_b + place * k_t, k_h, cos_ptr, sin_ptr, table,
            out_ptr + heads * (2 * HALF), (tile - tiles_q) * HEADS + head, groups, TURN, HALF, PAIRS,
        )  # fmt: skip
    else:
        largest = _turn_back(
            v_ptr + batch * v_b + place * v_t, v_h, cos_ptr, sin_ptr, table,
            out_ptr + (heads + groups) * (2 * HALF), (tile - tiles_q - tiles_k) * HEADS + head, groups, False, HALF, PAIRS,
        )  # fmt: skip
    # (Rounding keeps the order of magnitudes, so it can wait for the maximum.)
    rounded = largest.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty)
    tl.atomic_max(amax_ptr, magnitude_bits(rounded), sem="relaxed")


_launch_rotary = Launcher(_rotary_kernel, num_warps=4, enable_fp_fusion=False)
_launch_rotary_backward = Launcher(_rotary_backward_kernel, num_warps=4, enable_fp_fusion=False)


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, *, backward: bool = False) -> Tensor:
    """See `octavo.kernels.rotary`."""
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _rotary(qkv, out, cos, sin, heads, qkv.shape[2], backward)
    return out


def rotary_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """See `octavo.kernels.rotary`."""
    _rotary(qkv, qkv, cos, sin, heads, heads, False)


def _rotary(qkv: Tensor, out: Tensor, cos: Tensor, sin: Tensor, heads: int, written: int, backward: bool) -> None:
    batch, tokens, total, channels = qkv.shape
    if batch * tokens * written == 0:
        return
    half, in_program = channels // 2, min(HEADS, triton.next_power_of_2(written))
    tiles = triton.cdiv(written, in_program)
    _launch_rotary(
        batch * tokens * tiles,
        (qkv, cos.contiguous(), sin.contiguous(), out),
        *(tokens, tiles, total, written, heads, *qkv.stride()[:3]),
        *(cos.dim() == 3, backward, half, triton.next_power_of_2(half), in_program),
    )


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.rotary`."""
    gradients = [one if one.stride(-1) == 1 else one.contiguous() for one in (dq, dk, dv)]
    (batch, tokens, heads, channels), groups = dq.shape, dk.shape[2]
    if dq.numel() == 0 or channels % 2:
        return reference.rotary_backward(dq, dk, dv, cos, sin)
    out = dq.new_empty((batch, tokens, heads + 2 * groups, channels))
    amax = torch.zeros((), dtype=torch.float32, device=dq.device)
    half, in_program = channels // 2, min(HEADS, triton.next_power_of_2(max(heads, groups)))
    tiles_q, tiles_k = triton.cdiv(heads, in_program), triton.cdiv(groups, in_program)
    table = [None if one is None else one.contiguous() for one in (cos, sin)]
    strides = [stride for one in gradients for stride in one.stride()[:3]]
    _launch_rotary_backward(
        batch * tokens * (tiles_q + 2 * tiles_k),
        (*gradients, *table, out, amax.view(torch.int32)),
        *(tokens, heads, groups, tiles_q, tiles_k, *strides),
        *(cos is not None and cos.dim() == 3, cos is not None, half, triton.next_power_of_2(half), in_program),
    )
    return out, amax
