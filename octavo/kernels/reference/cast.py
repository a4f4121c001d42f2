"""Casts between real values and (codes, scale): codes = round(x * scale), x ≈ codes / scale.

Every cast saturates: a product beyond the largest value of the format, infinities included, becomes that value, for E4M3 has no
infinity and a wrapped or NaN weight is lost for good. NaN stays NaN, and signed zeros stay. A NaN *scale* therefore makes all codes
NaN, which is how a non-finite gradient is carried through FP8 storage to where the step is skipped.

Rounding is to nearest, ties to even, or stochastic: up or down with probabilities such that the expectation is exact
(to 23 - m random bits for a format with m mantissa bits), representable values never changing.

A scale is one FP32 number (0-d), or one per block of `block` elements along the last dim (the last block may be shorter).
These functions are plain FP32 PyTorch for any device, and the specification that the kernels in `octavo.kernels.cuda`
equal bit for bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.random import random_bits

ALIGN = 16
"""Rows and columns of GEMM operands are padded to multiples of this, in elements: FP8 tensor cores load 16 bytes at a time."""

CHUNK = 1 << 16
"""Elements that are worked on together: the many temporaries of integer arithmetic then stay in the cache of a CPU."""


def amax(x: Tensor, *, block: int | None = None) -> Tensor:
    """max |x|, FP32: 0-d, or one per block of the last dim. NaN and infinity propagate; an empty `x` gives 0."""
    if x.numel() == 0:
        shape = () if block is None else scale_shape(x.shape, block)
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if block is not None:
        return _blocks(x, block).abs().amax(-1).float()
    if x.itemsize == 1:
        # Magnitudes of FP8 codes are ordered as their bits are, NaN last.
        return (x.view(torch.uint8) & 0x7F).amax().view(x.dtype).float()
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def scale_from_amax(amax: Tensor, max: float, power_of_two: bool = True, margin: int = 0) -> Tensor:
    """The scale max / amax * 2^-margin, FP32 of the shape of `amax`; rounded down to a power of two, 2^floor(log2(...)).

    Always finite and positive: clamped to [2^-126, 2^126], so that its reciprocal is normal too; 1 where `amax` is zero
    or not finite.
    """
    usable = (amax > 0) & (amax < torch.inf)
    if not power_of_two:
        # (A number divided by a tensor would be multiplied by the reciprocal, which rounds twice.)
        scale = torch.full_like(amax, max * 2.0**-margin).div_(amax).clamp_(2.0**-126, 2.0**126)
        return torch.where(usable, scale, 1.0)
    # Exponent and mantissa fields replace log2 and division, which are inexact. A subnormal amax has the field 0 for its exponent,
    # which is too large, but for max >= 1 the result is clamped in any case.
    bits, max_bits = amax.view(torch.int32), _float_bits(max)
    exponent = (max_bits >> 23) - (bits >> 23)
    exponent = exponent - ((bits & 0x7FFFFF) > (max_bits & 0x7FFFFF)).int() - margin
    scale = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(usable, scale, 1.0)


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rounding: str = "nearest",
    key: Tensor | None = None,
    offset: int = 0,
    block: int | None = None,
    stats: Tensor | None = None,
) -> Tensor:
    """codes = saturate(round(x * scale)), of `dtype` and the shape of `x`, contiguous.

    `x` has any shape, strides and floating dtype; `scale` is FP32, 0-d or x.shape[:-1] + (ceil(K / block),).
    Stochastic rounding takes `key` (0-d int32, see `make_key`) and the global index `offset` of the first element.
    `stats`, int64 [2], is increased by the numbers of saturated (|x * scale| > max) and of flushed (x != 0, code 0) elements.
    """
    fmt = Format.of(dtype)
    if _exact_in_bf16(x, scale, fmt, rounding, stats):
        return (x * scale).clamp_(-fmt.max, fmt.max).to(dtype).contiguous()
    y = multiply(x, scale, block)
    if stats is not None:
        stats[0] += (y.abs() > fmt.max).sum()
    y.clamp_(-fmt.max, fmt.max)
    if rounding == "stochastic" and fmt.mantissa_bits < 23:
        assert key is not None
        flat = y.view(-1)
        for part in chunks(y.numel()):
            word = random_bits(key, offset + part.start, part.stop - part.start, y.device)
            flat[part] = round_stochastic(flat[part], word, fmt)
    codes = y.to(dtype)
    if stats is not None:
        stats[1] += ((x != 0) & (codes.float() == 0)).sum()
    return codes


def uncast(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, block: int | None = None) -> Tensor:
    """codes / scale, computed in FP32 and rounded to `dtype`; the shape of `codes`, contiguous.

    Finite codes saturate: a value rounded up by a cast may be beyond the largest of `dtype`.
    """
    # One look-up in a table of results replaces conversion, division and rounding, each a pass over memory.
    # (A traced tensor cannot meet a real table.)
    tabulated = block is None and codes.itemsize == 1 and codes.device.type == "cpu" and type(codes) is Tensor
    values = code_values(codes.dtype) if tabulated else codes.float().contiguous()
    x = values / (scale if block is None else _spread(scale, block, codes.shape))
    limit = largest(dtype)
    if not _known_to_fit(codes.dtype, scale, limit):
        x = torch.where(values.isinf(), x, x.clamp(-limit, limit))
    return _look_up(x.to(dtype), codes) if tabulated else x.to(dtype)


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Operands of both GEMMs that read `x` [M, K]: codes [Mp, Kp] and their transpose [Kp, Mp], both row-major.

    Mp and Kp are M and K rounded up to 16; the padding is zero codes. An operand that is not wanted (`row`, `col`) is None.
    """
    codes = pad_codes(cast(x, scale, dtype, stats=stats))
    return codes if row else None, transpose_codes(codes) if col else None


def cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, stats: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`cast_transpose` and amax(x), for scaling with a scale from the past (delayed)."""
    return *cast_transpose(x, scale, dtype, row=row, col=col, stats=stats), amax(x)


def transpose_codes(codes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Transposed copy [Kp, Mp] of 1-byte `codes` [M, K], padded with zero codes to multiples of 16; in `out` if there is one."""
    codes_t = pad_codes(codes.t().clone(memory_format=torch.contiguous_format))
    return codes_t if out is None else out.copy_(codes_t)


def pad_codes(codes: Tensor) -> Tensor:
    """1-byte `codes` [M, K] as contiguous [Mp, Kp], padded with zero codes to multiples of 16; `codes` itself if it is that."""
    m, k = codes.shape
    if m % ALIGN == 0 and k % ALIGN == 0:
        return codes.contiguous()
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, -k % ALIGN, 0, -m % ALIGN)).view(codes.dtype)


def round_stochastic(y: Tensor, word: Tensor, fmt: Format) -> Tensor:
    """`y` (FP32, |y| <= max or NaN) rounded to a neighbour in `fmt`, as FP32, by the top bits of `word` (int32).

    In the integers that are the bits of |y|, the values of `fmt` are the multiples of 2^(23 - m): add a random number below that,
    and truncate. Values below `tiny` are first moved up by `tiny`, into the binade with the spacing that subnormals have.
    Choices are made by masks, because `torch.where` takes as long on CPU as all else here together.
    """
    drop = 23 - fmt.mantissa_bits
    magnitude = y.view(torch.int32) & 0x7FFFFFFF
    sign = y.view(torch.int32) & -0x80000000
    bits_of_tiny = _float_bits(fmt.tiny)
    shift = (
        ((magnitude - bits_of_tiny) >> 31)
        .bitwise_and_(bits_of_tiny if fmt.min_exponent > -126 else 0)
        .view(torch.float32)
    )
    rounded = magnitude.view(torch.float32).add_(shift).view(torch.int32)
    rounded += (word >> (32 - drop)).bitwise_and_((1 << drop) - 1)
    rounded &= -1 << drop
    rounded = rounded.view(torch.float32).sub_(shift).view(torch.int32).bitwise_or_(sign).view(torch.float32)
    return rounded.add_(y, alpha=0)  # NaN where `y` is NaN, nothing elsewhere: not even the sign of a zero changes


def largest(dtype: torch.dtype) -> float:
    """The largest finite value that is one of both `dtype` and FP32."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def scale_shape(shape: torch.Size, block: int) -> tuple[int, ...]:
    """Shape of the blocked scale of a tensor of that shape."""
    return (*shape[:-1], -(-shape[-1] // block))


def chunks(numel: int) -> list[slice]:
    """Consecutive slices of at most CHUNK elements that cover a flat tensor."""
    return [slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK)]


@cache
def code_values(dtype: torch.dtype) -> Tensor:
    """The FP32 values of all 256 codes of an 8-bit format, by code."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _known_to_fit(dtype: torch.dtype, scale: Tensor, limit: float) -> bool:
    """Whether codes of `dtype` are within `limit` when divided by `scale`, as nearly all are; on a GPU, looking would wait for it."""
    if scale.device.type != "cpu" or type(scale) is not Tensor:
        return False
    return bool((torch.finfo(dtype).max / scale <= limit).all())


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def _exact_in_bf16(x: Tensor, scale: Tensor, fmt: Format, rounding: str, stats: Tensor | None) -> bool:
    """Whether to compute x * scale in BF16: half of the memory traffic on CPU, same codes if the scale is a power of two."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or scale.dim() > 0 or fmt.bits > 8:
        return False
    return rounding == "nearest" and stats is None and float(scale).hex().startswith("0x1.0000000000000p")


def multiply(x: Tensor, scale: Tensor, block: int | None) -> Tensor:
    """x * scale as a new contiguous FP32 tensor."""
    factor = scale if block is None else _spread(scale, block, x.shape)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.mul(x, factor, out=y) if x.dtype == torch.float32 else y.copy_(x).mul_(factor)


def _spread(scale: Tensor, block: int, shape: torch.Size) -> Tensor:
    """Blocked `scale` with one entry for each element, or one for the whole last dim."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(block, -1)[..., : shape[-1]]


def _blocks(x: Tensor, block: int) -> Tensor:
    """`x` as x.shape[:-1] + (blocks, block), the last block filled up with zeros."""
    length = x.shape[-1]
    if length <= block:
        return x.unsqueeze(-2)
    return torch.nn.functional.pad(x, (0, -length % block)).unflatten(-1, (-1, block))


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
