"""Arithmetic that Triton kernels share, on values in registers: the device side of `octavo.kernels.reference`.

Kernels that use it are launched with `enable_fp_fusion=False`, for a product fused into a sum is rounded once instead of twice.
Minima and maxima are spelled `tl.where`: NaN fails both comparisons and so passes unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.formats import Format

GOLDEN = tl.constexpr(0x9E3779B1)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_WORD = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}x2.f32 low, $2, $1; cvt.rn.satfinite.{0}x2.f32 high, $4, $3; "
    "mov.b32 $0, {{low, high}}; }}"
)
E4M3_WORD = tl.constexpr(_WORD.format("e4m3"))
E5M2_WORD = tl.constexpr(_WORD.format("e5m2"))


def constants(fmt: Format) -> dict[str, float | int]:
    """The constexpr arguments that describe a format to a kernel."""
    return {"MAX": fmt.max, "MANTISSA_BITS": fmt.mantissa_bits, "MIN_EXPONENT": fmt.min_exponent}


@triton.jit
def random_bits(index, key):
    """fmix32(index * GOLDEN + (index >> 32) * HIGH + key): uint32 words of int64 `index` and an int32 `key`."""
    return fmix32(indexed(index, key))


@triton.jit
def indexed(index, key):
    """index * GOLDEN + (index >> 32) * HIGH + key: uint32 words of int64 `index` and an int32 `key`."""
    return index.to(tl.uint32) * GOLDEN + (index >> 32).to(tl.uint32) * 0x7FEB352D + key.to(tl.uint32)


@triton.jit
def half_mixed(word):
    """The first half of fmix32, see `octavo.kernels.reference.random`."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    return word ^ (word >> 13)


@triton.jit
def fmix32(word):
    """`octavo.kernels.reference.random.fmix32` of uint32 words."""
    word = half_mixed(word) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def saturate(y, MAX: tl.constexpr):
    """`y` (FP32) clamped to [-MAX, MAX]; NaN stays."""
    y = tl.where(y > MAX, MAX, y)
    return tl.where(y < -MAX, -MAX, y)


@triton.jit
def as_fp8(y, MANTISSA_BITS: tl.constexpr):
    """`y` (FP32, saturated) rounded to E4M3 or E5M2.

    Four codes at a time leave one instruction as one word. Where Triton converts by itself, ptxas 12.8 and 12.9 join halves of a word for a
    store and forget that others read them too, a transposed store or a maximum of what was stored: those then see other registers
    (triton#11111, seen on an H200).
    """
    DTYPE: tl.constexpr = tl.float8e4nv if MANTISSA_BITS == 3 else tl.float8e5
    if INTERPRETED:
        codes = y.to(DTYPE)
    else:
        WORD: tl.constexpr = E4M3_WORD if MANTISSA_BITS == 3 else E5M2_WORD
        codes = tl.inline_asm_elementwise(WORD, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
        codes = codes.to(DTYPE, bitcast=True)
    return codes


@triton.jit
def rounded_to(y, DTYPE: tl.constexpr):
    """`y` (FP32, saturated) rounded to DTYPE, to nearest."""
    if DTYPE == tl.float8e4nv:
        codes = as_fp8(y, 3)
    elif DTYPE == tl.float8e5:
        codes = as_fp8(y, 2)
    else:
        codes = y.to(DTYPE)
    return codes


@triton.jit
def round_stochastic(y, word, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """`y` (FP32, saturated) rounded to a neighbour with that many (< 23) mantissa bits, by the top bits of `word` (uint32); FP32.

    The sign takes part in the integers: adding to the magnitude below it does not change it. Subnormals of the format move to the
    binade that has their spacing, and back.
    """
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    bits = y.to(tl.uint32, bitcast=True)
    noise = word >> (32 - DROP)
    if MIN_EXPONENT <= -126:
        rounded = (((bits + noise) >> DROP) << DROP).to(tl.float32, bitcast=True)
    else:
        TINY: tl.constexpr = 2.0**MIN_EXPONENT
        tiny = ((bits & 0x80000000) | ((MIN_EXPONENT + 127) << 23)).to(tl.float32, bitcast=True)
        shift = tl.where(tl.abs(y) < TINY, tiny, 0.0)
        moved = (y + shift).to(tl.uint32, bitcast=True) + noise
        rounded = ((moved >> DROP) << DROP).to(tl.float32, bitcast=True) - shift
        # The sign of a zero.
        rounded = (rounded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(y == y, rounded, y)


@triton.jit
def codes_stochastic(magnitude, y, word, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr, DTYPE: tl.constexpr):
    """(codes of DTYPE, a magnitude) as of `round_stochastic`, of a `magnitude` (FP32, saturated, no NaN) with the sign of `y`, if not None.

    Both are FP32 times 2^(-126 - MIN_EXPONENT). This makes subnormals of the format subnormals of FP32, so that the bits of a rounded
    magnitude are those of the code, further left, and no binade is special. What comes back has bits of noise below the code;
    `code_maximum` takes them off a maximum.
    """
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth
    magnitude = magnitude.to(tl.uint32, bitcast=True) + (word >> (32 - DROP))
    codes = magnitude << (32 - WIDTH - DROP)
    if y is not None:
        codes |= y.to(tl.uint32, bitcast=True) & 0x80000000
    codes = (codes >> (32 - WIDTH)).to(tl.core.get_int_dtype(WIDTH, False)).to(DTYPE, bitcast=True)
    return codes, magnitude.to(tl.float32, bitcast=True)


@triton.jit
def code_maximum(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """The value of the largest code, from the maximum of what `codes_stochastic` returned with the codes."""
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    bits = magnitude.to(tl.uint32, bitcast=True) >> DROP << DROP
    return bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + MIN_EXPONENT)


@triton.jit
def sqrt_normal(x):
    """The IEEE square root of `x` in [2^-100, 2^127].

    One Newton step from an estimate of 22 bits, whose remainder is exact; `tl.sqrt_rn` does the same behind a branch, for any x.
    """
    if INTERPRETED:
        root = tl.sqrt_rn(x)
    else:
        estimate = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        root = x * estimate
        root = tl.fma(tl.fma(-root, root, x), estimate * 0.5, root)
    return root


@triton.jit
def reciprocal_normal(x):
    """1 / x in IEEE arithmetic for `x` in [2^-126, 2^126]: as `sqrt_normal`, and `tl.div_rn`."""
    if INTERPRETED:
        reciprocal = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        estimate = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        reciprocal = tl.fma(tl.fma(-x, estimate, 1.0), estimate, estimate)
    return reciprocal


@triton.jit
def merge_e4m11(codes, residual):
    """FP32 value of finite E4M11 words: E4M3 code and int8 low byte."""
    bits = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = ((bits & 0x7F) << 8) + residual.to(tl.int32)
    normal = ((magnitude << 12) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2048, magnitude.to(tl.float32) * 7.62939453125e-06, normal)  # 2^-17
    return tl.where(bits >= 128, value * -1.0, value)  # (0 - value would lose the sign of zero)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32, ordered like |x| with NaN above infinity: an integer maximum of them propagates NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def saturated_count(y, MAX: tl.constexpr):
    """How many |y| are beyond MAX, int32 in the shape of `y`."""
    return (tl.abs(y) > MAX).to(tl.int32)


@triton.jit
def flushed_count(x, codes):
    """How many non-zero `x` have the code zero, int32 in the shape of `x`."""
    return ((x != 0) & (codes.to(tl.float32) == 0)).to(tl.int32)
