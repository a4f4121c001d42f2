"""Counter-based random bits: a hash of (key, element index), so that rounding is a pure function.

The random word of element i is fmix32(i * 0x9E3779B1 + key) modulo 2^32, where fmix32 is the finaliser of MurmurHash3.
It depends on the *global* index of an element, not on who computes it: sharding, resuming and re-ordering leave every
rounding as it was, and no generator state has to be saved. `key` is a hash of (seed, step, stream); a stream is one
tensor to be rounded.

Words are int32 tensors whose arithmetic wraps around; constants are written as the signed int32 of the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1 - 2**32
"""Odd multiplier near 2^32 / golden ratio: spreads consecutive indices over all words."""
HIGH = 0x7FEB352D
"""Odd multiplier of the high 32 bits of a 64-bit index."""
MIX1 = 0x85EBCA6B - 2**32
MIX2 = 0xC2B2AE35 - 2**32


def fmix32(word: Tensor) -> Tensor:
    """MurmurHash3's finaliser, a bijection of 32-bit words in which each input bit flips each output bit half of the time."""
    word = _half_mixed(word).mul_(MIX2)
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    return word


def _half_mixed(word: Tensor) -> Tensor:
    """The first half of `fmix32`."""
    # `>>` of a signed word copies the sign bit; the mask makes the shift a logical one.
    word = (word ^ ((word >> 16) & 0xFFFF)).mul_(MIX1)
    word ^= (word >> 13).bitwise_and_(0x7FFFF)
    return word


def random_bits(key: Tensor, offset: int, numel: int, device: torch.device | str) -> Tensor:
    """Random words fmix32(i * GOLDEN + (i >> 32) * HIGH + key) for i = offset ... offset + numel - 1.

    `key` is a 0-d int32 tensor on `device`; the result is int32 [numel].
    """
    return fmix32(_indexed(key, offset, numel, device))


def random_top_bits(
    key: Tensor, offset: int, numel: int, device: torch.device | str, factors: Sequence[int]
) -> list[Tensor]:
    """Several random words of each element, int32 [numel] for each of the odd `factors`, of which the top 24 bits may be used.

    `random_bits` with the second multiplier of fmix32 exchanged, and without its last step, which stirs low bits only.
    """
    word = _half_mixed(_indexed(key, offset, numel, device))
    return [word * _int32(factor) for factor in factors]


def _indexed(key: Tensor, offset: int, numel: int, device: torch.device | str) -> Tensor:
    """i * GOLDEN + (i >> 32) * HIGH + key for i = offset ... offset + numel - 1."""
    head = 2**31 - offset % 2**31
    if numel > head:  # the high bits of the index change within
        return torch.cat((_indexed(key, offset, head, device), _indexed(key, offset + head, numel - head, device)))
    first = _int32(offset * GOLDEN + (offset >> 32) * HIGH)
    return torch.arange(numel, dtype=torch.int32, device=device).mul_(GOLDEN).add_(key + first)


def make_key(seed: int, step: Tensor | int, stream: Tensor | int, device: torch.device | str) -> Tensor:
    """The key of one rounding: an int32 tensor, 0-d or of the shape that tensors `step` and `stream` broadcast to.

    `step` and `stream` may be tensors on `device` (of any dtype that holds integers), so that no step needs the host.
    """
    key = torch.full((), _int32(seed ^ (seed >> 32)), dtype=torch.int32, device=device)
    for part in (stream, step):
        part = part.to(torch.int32) if isinstance(part, Tensor) else _int32(part)
        key = fmix32(fmix32(key) + part)
    return key


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
