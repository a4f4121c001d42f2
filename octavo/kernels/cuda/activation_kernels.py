"""The arithmetic of `octavo.kernels.cuda.activation`, which says what kernels move and what they cost, and the kernel of its maxima.

At 4.2 TB/s an H200 has 7 slots for an instruction of a lane for each byte that it moves: 28 for an element of GELU, and half of them
in the unit for integers, comparisons and conversions. What follows is written for few instructions:

- σ is the square of a reciprocal root, one instruction and a product; a division takes eight. 2^z is one instruction.
- What comes before and after the arithmetic is that of `octavo.kernels.cuda.tiles`.

With z the exponent of σ = 1 / (1 + 2^z), a differs from the reference by at most 2^-20·(1 + |z|/4) of itself, and where |z| ≥ 128 both
are 0. A gradient differs by that, and by 2^-16·|da|, or |da·p| for a gate, as 1 − σ cancels where σ is nearly 1. So some values in ten
thousand are rounded to the other neighbour in 16 bits, and still fewer in eight. Products are rounded apart and sums fused by
`tl.fma` alone, never by the compiler: all kernels have the same values, and an amax is that of the codes.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from octavo.kernels.cuda.numerics import magnitude_bits
from octavo.kernels.cuda.tiles import flat_max, larger, load_floats
from octavo.kernels.reference.activation import CUBIC, SLOPE

LOG2_E = tl.constexpr(math.log2(math.e))
EXPONENT = tl.constexpr(-SLOPE * math.log2(math.e))
EXPONENT_CUBIC = tl.constexpr(-SLOPE * CUBIC * math.log2(math.e))
TWICE_U = tl.constexpr(SLOPE)
TWICE_U_CUBIC = tl.constexpr(3 * SLOPE * CUBIC)


@triton.jit
def _sigmoid(z):
    """1 / (1 + 2^z), FP32."""
    root = tl.rsqrt(1.0 + tl.exp2(z))
    return root * root


@triton.jit
def activate(x, up, GATED: tl.constexpr):
    """x·σ(2u), or x·σ(x)·up; FP32."""
    if GATED:
        a = x * _sigmoid(x * -LOG2_E) * up
    else:
        a = x * _sigmoid(x * tl.fma(x * x, EXPONENT_CUBIC, EXPONENT))
    return a


@triton.jit
def gradients(grad, x, up, GATED: tl.constexpr):
    """The gradients for x and up, FP32; the second is of no use unless GATED."""
    if GATED:
        s = _sigmoid(x * -LOG2_E)
        silu = x * s
        dx = grad * up * tl.fma(silu, 1.0 - s, s)
        up = grad * silu
    else:
        square = x * x
        s = _sigmoid(x * tl.fma(square, EXPONENT_CUBIC, EXPONENT))
        # (s * -1 is a sign on the operand of an instruction; -s is 0 - s, an instruction.)
        dx = grad * tl.fma(x * tl.fma(s * -1.0, s, s), tl.fma(square, TWICE_U_CUBIC, TWICE_U), s)
    return dx, up


@triton.jit(do_not_specialize=["tiles_k"])
def amax_kernel(
    h_ptr,
    da_ptr,
    amax_ptr,
    m_size,
    width,
    h_stride,
    da_stride,
    tiles_k,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """amax = max |a| or, given da, max |dh|; ROUNDS tiles, one below the other, to a program.

    h [m_size, width or 2·width], da [m_size, width] or None, rows h_stride and da_stride apart: any float; amax [1]: FP32 bits as int32,
    zero before.
    """
    program = tl.program_id(0)
    m = (program // tiles_k).to(tl.int64) * (ROUNDS * TILE_M) + tl.arange(0, TILE_M)
    k = (program % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    largest = tl.zeros([TILE_M, TILE_K], tl.int32)
    decided = False
    if da_ptr is None and not GATED and DTYPE != tl.float32:
        # GELU rises where x is positive, by more from one value of 16 bits to the next than it is inexact, and stays within 0.171
        # elsewhere: where one x is beyond 0.5, the largest decides, and no other needs its exponential, for which there is no time.
        # Not so where one is NaN, infinite, or -inf, whose GELU is NaN. (The bits of positive x are ordered as x, negative ones below.)
        highest = largest
        for turn in range(ROUNDS):
            row = m + turn * TILE_M
            inside = (row < m_size)[:, None] & (k < width)[None, :]
            x = load_floats(h_ptr + (row * h_stride)[:, None] + k[None, :], inside, WHOLE)
            largest = larger(magnitude_bits(x), largest)
            highest = larger(x.to(tl.int32, bitcast=True), highest)
        top = flat_max(highest).to(tl.float32, bitcast=True)
        decided = (top > 0.5) & (flat_max(largest) < 0x7F800000)
        if decided:
            tl.atomic_max(amax_ptr, magnitude_bits(activate(top, top, False).to(DTYPE)))
        largest = tl.zeros([TILE_M, TILE_K], tl.int32)
    if not decided:
        for turn in range(ROUNDS):
            row = m + turn * TILE_M
            inside = (row < m_size)[:, None] & (k < width)[None, :]
            at = (row * h_stride)[:, None] + k[None, :]
            x = load_floats(h_ptr + at, inside, WHOLE)
            up = x
            if GATED:
                up = load_floats(h_ptr + at + width, inside, WHOLE)
            if da_ptr is not None:
                grad = load_floats(da_ptr + (row * da_stride)[:, None] + k[None, :], inside, WHOLE)
                x, up = gradients(grad, x, up, GATED)
                if GATED:
                    largest = larger(magnitude_bits(up), largest)
            else:
                x = activate(x, up, GATED)
            largest = larger(magnitude_bits(x), largest)
        # (Rounding keeps the order, so it can come last.)
        tl.atomic_max(amax_ptr, magnitude_bits(flat_max(largest).to(tl.float32, bitcast=True).to(DTYPE)))
