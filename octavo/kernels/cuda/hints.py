"""Current scaling for one read: cast with the scale of the last time, find the maximum meanwhile, and cast again if it was wrong.

A scale of its own asks for two reads of a tensor, 2 + 2 bytes an element of BF16, because the largest value comes before the first code.
But a power of two often stays from one step to the next. So the first launch casts at once, with a `hint`; the second sees whether
the maximum implies that same scale. If so, all codes are what they would have been. If not, it casts the tensor again. Codes and scale
are those of current scaling in every bit, whatever the hint held: it is a cache, not a state, and nobody has to save or send it.

A hint that was wrong costs the codes that were written in vain, 2 bytes an element, and a right one saves 2. In the first 60 steps of a
small GPT (4,096 tokens a step), scales of activations changed in 4 to 17% of the steps, but those of gradients, whose largest value is an
outlier, in 38 to 52%. So the hint has a doubt in its low bits, counted up by 2 where it would have been wrong and down by 1 where right:
it is above 3 for long only where more than a third are wrong. Then, as without a hint, the first launch finds the maximum and writes
nothing, and the second casts: two reads.

There are no atomics, which would ask for memory set to zero. A program of the first launch leaves two numbers, `parts`: the largest
magnitude of its tile, and a word of two bytes, the scale that it used and whether its tile allows a larger one, asks for this one or
for a smaller one. The least and the largest word of all tell the second launch all it wants, and each of its programs reads them all:
16 KB for 8,192 tiles. That every word names its scale keeps this true if another stream changes the hint between two programs.

The hint is written behind the back of autograd and compilers, as no result depends on it: it may come late, twice or not at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.cast import scale_of
from octavo.kernels.cuda.numerics import INTERPRETED, magnitude_bits
from octavo.kernels.cuda.scales import visible
from octavo.kernels.cuda.tiles import larger

SETTLE_PROGRAMS = 528
"""Of the second launch: four on each of Hopper's multiprocessors, of eight warps. Each reads all words, and casts its part if it has to."""
WORDS = 4096
"""Parts that a program reads at a time."""
MIN_NUMEL = 2**22
"""Below, a second read costs no more than the check of the first, some 3 µs: it finds 8 MB of BF16 in the cache."""
EXACT, OVER = tl.constexpr(1), tl.constexpr(2)
MISS, DOUBTFUL, MOST_DOUBT = tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)


@triton.jit
def hinted_scale(hint_ptr):
    """The scale to try, FP32, a scalar; 0 for none. hint [1]: the bits of the scale of the last time, int32, its doubt in the low four."""
    word = tl.load(hint_ptr)
    return tl.where((word & 0xF) < DOUBTFUL, word & 0x7F800000, 0).to(tl.float32, bitcast=True)


@triton.jit
def remember_scale(hint_ptr, scale):
    """Leave `scale` (FP32, a scalar) in hint, with more doubt or less; whatever it held, it is a hint then."""
    word = tl.load(hint_ptr)
    bits = scale.to(tl.int32, bitcast=True)
    doubt = tl.where((word & 0x7F800000) == bits, (word & 0xF) - 1, (word & 0xF) + MISS)
    doubt = tl.where(doubt < 0, 0, tl.where(doubt > MOST_DOUBT, MOST_DOUBT, doubt))
    tl.store(hint_ptr, bits | doubt)


@triton.jit
def largest_bits(x):
    """`magnitude_bits` of the largest magnitude of a tile of any float, int32; where two of them fill a register, two at a time."""
    x = tl.reshape(x, [x.numel])
    if (
        x.dtype.primitive_bitwidth == 16 and not INTERPRETED
    ):  # (`tl.max` would widen them; the interpreter has no other that is fast)
        bits = tl.reduce(x.to(tl.int16, bitcast=True) & 0x7FFF, 0, larger)
        bits = magnitude_bits(bits.to(x.dtype, bitcast=True))
    else:
        bits = tl.max(magnitude_bits(x), 0)
    return bits


@triton.jit
def _words(parts_ptr, parts):
    return (parts_ptr + parts).to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def store_part(parts_ptr, program, parts, bits, used, MAX: tl.constexpr):
    """What `program` of `parts` found and did: `bits` (int32) of its largest magnitude, and the scale that it `used` (FP32)."""
    amax = bits.to(tl.float32, bitcast=True)
    wanted = scale_of(amax, tl.full((), MAX, tl.float32), True)
    state = tl.where(wanted == used, EXACT, tl.where(wanted < used, OVER, 0))
    state = tl.where(amax > 0, state, 0)  # (zeros allow any scale)
    state = tl.where(amax < float("inf"), state, OVER)
    tl.store(parts_ptr + program, bits)
    tl.store(_words(parts_ptr, parts) + program, ((used.to(tl.int32, bitcast=True) >> 23) * 4 + state).to(tl.int16))


@triton.jit
def settled(parts_ptr, parts, WORDS: tl.constexpr):
    """(whether all programs used the scale that the amax of all implies, that scale, FP32): no tile asks for less, and one for no more."""
    words = _words(parts_ptr, parts)
    lane = tl.arange(0, WORDS)
    first = tl.load(words)
    least = tl.zeros([WORDS], tl.int16) + first
    most = least
    for start in range(0, parts, WORDS):
        word = tl.load(words + start + lane, mask=start + lane < parts, other=first)
        least = tl.where(word < least, word, least)
        most = tl.where(word > most, word, most)
    low, high = tl.min(least, 0).to(tl.int32), tl.max(most, 0).to(tl.int32)
    scale = ((high >> 2) << 23).to(tl.float32, bitcast=True)
    return ((low >> 2) == (high >> 2)) & ((high & 3) == EXACT), scale


@triton.jit
def amax_of_parts(parts_ptr, parts, WORDS: tl.constexpr):
    """The largest magnitude of all parts: FP32, a scalar."""
    lane = tl.arange(0, WORDS)
    most = tl.zeros([WORDS], tl.int32)
    for start in range(0, parts, WORDS):
        bits = tl.load(parts_ptr + start + lane, mask=start + lane < parts, other=0)
        most = tl.where(bits > most, bits, most)
    return tl.max(most, 0).to(tl.float32, bitcast=True)


@triton.jit
def settle(
    program, hint_ptr, parts_ptr, parts, scale_ptr, visible_ptr, inverse_ptr,
    MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """(whether the codes are right as they are, the scale of right ones, FP32): the beginning of a second launch.

    Its first program leaves that scale, what `visible` makes of it, its reciprocal, FP32 [1], and the hint. scale and hint may be None.
    """
    right, scale = settled(parts_ptr, parts, WORDS)
    shown, inverse = scale, tl.div_rn(1.0, scale)
    if not right:
        amax = amax_of_parts(parts_ptr, parts, WORDS)
        scale = scale_of(amax, tl.full((), MAX, tl.float32), POWER_OF_TWO)
        shown, inverse = visible(scale, amax, None)
    if program == 0:
        if scale_ptr is not None:
            tl.store(scale_ptr, scale)
        tl.store(visible_ptr, shown)
        tl.store(inverse_ptr, inverse)
        if hint_ptr is not None:
            remember_scale(hint_ptr, scale)
    return right, scale


def hintable(x: Tensor, hint: Tensor | None) -> bool:
    """Whether a cast of a tensor of the size of `x` gains by `hint`, which is on its device (a layer may have gone elsewhere)."""
    return hint is not None and x.numel() >= MIN_NUMEL and hint.get_device() == x.get_device()


def new_parts(x: Tensor, programs: int) -> Tensor:
    """Room for what `programs` programs find: int32 magnitudes, then int16 words."""
    return x.new_empty(programs + (programs + 1) // 2, dtype=torch.int32)
