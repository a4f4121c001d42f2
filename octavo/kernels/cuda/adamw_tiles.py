"""The parts of the AdamW kernel that load, round and store: see `octavo.kernels.cuda.adamw`."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.cuda.numerics import GOLDEN, code_maximum, codes_stochastic, half_mixed, indexed, rounded_to


@triton.jit
def store_maximum(pointer, magnitudes, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Raise `*pointer` to the largest of the magnitudes that `round_codes` gave."""
    amax = tl.max(magnitudes, 0)
    if STOCHASTIC and MANTISSA < 23:
        amax = code_maximum(amax, MANTISSA, EXPONENT)
    tl.atomic_max(pointer, amax.to(tl.int32, bitcast=True))


@triton.jit
def load_tile(pointer, mask, MASKED: tl.constexpr):
    """The values at `pointer`; zero where MASKED and not `mask`."""
    if MASKED:
        return tl.load(pointer, mask, other=0.0)
    return tl.load(pointer)


@triton.jit
def store_tile(pointer, value, mask, MASKED: tl.constexpr):
    """`value` to `pointer`, only where `mask` if MASKED."""
    if MASKED:
        tl.store(pointer, value, mask)
    else:
        tl.store(pointer, value)


@triton.jit
def random_words(key, first, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Words of the elements `first` (int64) ... `first` + TILE - 1, to be multiplied: see `octavo.kernels.reference.random`.

    WIDE if the index of any of them reaches 2^32.
    """
    lane = tl.arange(0, TILE)
    if WIDE:
        word = indexed(first + lane, key)
    else:
        word = lane.to(tl.uint32) * GOLDEN + (first.to(tl.uint32) * GOLDEN + key.to(tl.uint32))
    return half_mixed(word)


@triton.jit
def unscale_blocks(x, factor, scales_ptr, start, numel, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """x * (factor / scale), [TILE], with one power-of-two scale for each BLOCK elements."""
    ROWS: tl.constexpr = TILE // BLOCK
    row = start // BLOCK + tl.arange(0, ROWS)
    scales = tl.load(scales_ptr + row, row < tl.cdiv(numel, BLOCK), other=1.0)
    factors = factor * ((254 << 23) - scales.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # of 2^e, 2^-e
    return tl.reshape(tl.reshape(x, [ROWS, BLOCK]) * factors[:, None], [TILE])


@triton.jit
def scale_blocks(x, scales_ptr, start, numel, MAX: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """x * scale, [TILE], with new scales from the maximum of each BLOCK elements, which are stored."""
    ROWS: tl.constexpr = TILE // BLOCK
    x = tl.reshape(x, [ROWS, BLOCK])
    amax = tl.max(tl.abs(x), 1)
    # As `cast.scale_of`, without its case of an infinity, which cancels the step: 10 instructions on the 608 of the loop.
    bits = amax.to(tl.int32, bitcast=True)
    max_bits = tl.full([ROWS], MAX, tl.float32).to(tl.int32, bitcast=True)
    exponent = (max_bits >> 23) - (bits >> 23) - tl.where((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF), 1, 0)
    exponent = tl.where(exponent > 126, 126, tl.where(exponent < -126, -126, exponent))
    scales = tl.where(amax > 0, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)
    row = start // BLOCK + tl.arange(0, ROWS)
    tl.store(scales_ptr + row, scales, row < tl.cdiv(numel, BLOCK))
    return tl.reshape(x * scales[:, None], [TILE])


@triton.jit
def round_codes(
    y,
    word,
    dtype: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr = True,
    BOUNDED: tl.constexpr = False,
):
    """(codes, a magnitude for `store_maximum`) of y saturated and rounded, stochastically by `word` or to nearest.

    BOUNDED: |y| is known to be at most MAX.
    """
    if STOCHASTIC and MANTISSA < 23:
        SHRINK: tl.constexpr = 2.0 ** (-126 - EXPONENT)
        y = y * SHRINK
        magnitude = tl.abs(y) if SIGNED else y
        if not BOUNDED:
            magnitude = tl.minimum(magnitude, MAX * SHRINK)
        codes, magnitude = codes_stochastic(magnitude, y if SIGNED else None, word, MANTISSA, EXPONENT, dtype)
    else:
        codes = rounded_to(tl.maximum(tl.minimum(y, MAX), -MAX), dtype)
        magnitude = tl.abs(codes.to(tl.float32))
    return codes, magnitude
