"""E4M11: lossless by exhaustion, and accurate to half of its last bit."""

import pytest
import torch

from octavo import kernels
from octavo.formats import E4M3

ONE = torch.ones(())
MAX = 463.875


def finite_words() -> torch.Tensor:
    words = torch.arange(2**16, dtype=torch.int32)
    return words[(words & 0x7FFF) <= 0x7E7F].to(torch.int16)


def value_of(words: torch.Tensor) -> torch.Tensor:
    """The value of E4M11 words by its definition, FP64."""
    words = words.int() & 0xFFFF
    exponent, mantissa = (words >> 11) & 15, (words & 0x7FF).double() / 2048
    magnitude = torch.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * torch.exp2(exponent.double() - 7))
    return torch.where(words >= 2**15, -magnitude, magnitude)


def test_D16_split_and_merge_are_lossless_for_all_words():
    words = finite_words()
    codes, residual = kernels.split_e4m11(words)
    assert codes.dtype == E4M3.dtype and residual.dtype == torch.int8
    assert codes.float().isfinite().all()
    assert torch.equal(kernels.merge_e4m11(codes, residual), words)
    # Words beyond the largest are NaN codes, never finite ones.
    rest = torch.arange(0x7E80, 0x7F80, dtype=torch.int32).to(torch.int16)
    assert kernels.split_e4m11(rest)[0].float().isnan().all()


def test_the_high_byte_is_the_nearest_code():
    words = finite_words()
    codes, _ = kernels.split_e4m11(words)
    nearest = kernels.cast(value_of(words).float(), ONE, E4M3.dtype)
    tie = (words & 0xFF) == 0x80
    assert torch.equal(codes.view(torch.uint8)[~tie], nearest.view(torch.uint8)[~tie])
    assert ((codes.double() - value_of(words)).abs() == (nearest.double() - value_of(words)).abs()).all()


def test_every_word_survives_the_casts():
    words = finite_words()
    codes, residual = kernels.split_e4m11(words)
    for scale in (ONE, torch.tensor(2.0**-20), torch.tensor(2.0**100)):
        x = kernels.uncast_residual(codes, residual, scale)
        assert torch.equal(x.double() * scale.double(), value_of(words))
        again = kernels.cast_residual(x, scale)
        assert torch.equal(kernels.merge_e4m11(*again), words)


def test_ties_between_words_go_to_even():
    words = torch.arange(0x7E7F, dtype=torch.int32)
    ties = (value_of(words) + value_of(words + 1)) / 2
    assert torch.equal(ties.float().double(), ties)
    even = words + words % 2
    for sign in (1, -1):
        codes, residual = kernels.cast_residual(sign * ties.float(), ONE)
        assert torch.equal(kernels.merge_e4m11(codes, residual) & 0x7FFF, even.to(torch.int16))
        assert torch.equal(codes.float().signbit(), torch.full((len(ties),), sign < 0))


def test_error_bounds(seed):
    x = torch.randn(50000) * torch.exp2(torch.empty(50000).uniform_(-20, 8))
    x = x.clamp(-460, 460)
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype)
        back = kernels.uncast_residual(*kernels.cast_residual(y, ONE), ONE)
        error = (back.double() - y.double()).abs()
        assert (error <= torch.maximum(y.double().abs() * 2.0**-12, torch.tensor(2.0**-18))).all()


def test_special_values():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 464.0, 1e30, 1e-30])
    codes, residual = kernels.cast_residual(x, ONE)
    back = kernels.uncast_residual(codes, residual, ONE)
    assert back[2].isnan() and residual[2] == 0
    assert back[[0, 1, 3, 4, 5, 6, 7]].tolist() == [MAX, -MAX, 0, 0, MAX, MAX, 0]
    assert back[4].signbit() and not back[3].signbit()
    poisoned, _ = kernels.cast_residual(torch.randn(64), torch.tensor(torch.nan))
    assert poisoned.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_words_have_finite_values(dtype):
    codes, residual = kernels.cast_residual(torch.tensor([MAX, -MAX, torch.nan]), ONE)
    x = kernels.uncast_residual(codes, residual, torch.tensor(2.0**-126), dtype)
    assert x[:2].tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max] and x[2].isnan()


def test_accumulation_keeps_the_sum(seed):
    """A constant gradient over 320 micro-batches: a code and a residual keep the sum that a code alone loses."""
    g = torch.rand(4096) + 0.5
    total, lossy = torch.zeros(4096), torch.zeros(4096)
    for _ in range(320):
        total, lossy = total + g, lossy + g
        scale = kernels.scale_from_amax(kernels.amax(total), E4M3.max)
        total = kernels.uncast_residual(*kernels.cast_residual(total, scale), scale)
        scale = kernels.scale_from_amax(kernels.amax(lossy), E4M3.max)
        lossy = kernels.uncast(kernels.cast(lossy, scale, E4M3.dtype), scale)
    assert (total / (320 * g) - 1).abs().max() < 0.03
    assert abs(total.sum() / (320 * g).sum() - 1) < 0.003
    assert lossy.sum() < 0.7 * total.sum()
