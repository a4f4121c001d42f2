"""Random bits equal Python integers; stochastic rounding is unbiased, and changes nothing that is representable."""

import math

import pytest
import torch
from oracle import assert_same_bits, spread_out, values_of

from octavo import kernels
from octavo.formats import BF16, E4M3, E5M2, FP16, FP32

LOW = (E4M3, E5M2, FP16, BF16)
ONE = torch.ones(())


def fmix32(word: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = (word ^ (word >> shift)) * factor & 0xFFFFFFFF
    return word


def key_of(value: int) -> torch.Tensor:
    return torch.tensor((value + 2**31) % 2**32 - 2**31, dtype=torch.int32)


@pytest.mark.parametrize("offset", [0, 1, 2**31 - 3, 2**32 - 3, 5 * 2**32 - 2, 2**40 + 17])
def test_random_bits_equal_python_integers(offset, seed):
    key = seed * 2654435761 % 2**32
    want = [fmix32((i * 0x9E3779B1 + (i >> 32) * 0x7FEB352D + key) % 2**32) for i in range(offset, offset + 7)]
    got = kernels.random_bits(key_of(key), offset, 7, "cpu")
    assert [word % 2**32 for word in got.tolist()] == want


def test_keys_are_distinct_and_need_no_host():
    keys = [kernels.make_key(s, t, u, "cpu").item() for s in (0, 1, 2**40) for t in range(50) for u in range(50)]
    assert len(set(keys)) == len(keys)
    steps = torch.arange(50, dtype=torch.float32)
    batched = kernels.make_key(1, steps, torch.arange(50).view(50, 1), "cpu")
    assert batched.tolist() == [[kernels.make_key(1, t, u, "cpu").item() for t in range(50)] for u in range(50)]
    assert kernels.make_key(1, 2, 3, "meta").shape == ()


def test_bits_are_fair_and_uncorrelated_between_keys(seed):
    words = torch.stack([kernels.random_bits(kernels.make_key(seed, t, 0, "cpu"), 0, 1 << 16, "cpu") for t in range(4)])
    planes = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).double() * 2 - 1
    assert planes.mean(1).abs().max() < 6 / 2**8
    assert (planes[:-1] * planes[1:]).mean(1).abs().max() < 6 / 2**8


@pytest.mark.parametrize("fmt", LOW, ids=repr)
def test_representable_values_never_change(fmt, seed):
    values = values_of(fmt)
    x = torch.cat([values, -values]).float()
    codes = kernels.cast(x, ONE, fmt.dtype, rounding="stochastic", key=kernels.make_key(seed, 0, 0, "cpu"))
    assert_same_bits(codes, x.to(fmt.dtype))


@pytest.mark.parametrize("fmt", LOW, ids=repr)
def test_results_are_neighbours(fmt, seed):
    x = spread_out(20000)
    x = x[x.isfinite()].clamp(-fmt.max, fmt.max)
    rounded = kernels.cast(x, ONE, fmt.dtype, rounding="stochastic", key=kernels.make_key(seed, 0, 0, "cpu")).double()
    values, magnitude = values_of(fmt), x.double().abs()
    upper = torch.searchsorted(values, magnitude)
    lower = torch.where(values[upper] == magnitude, upper, upper - 1)
    assert ((rounded.abs() == values[lower]) | (rounded.abs() == values[upper])).all()
    assert torch.equal(rounded.signbit(), x.signbit())


@pytest.mark.parametrize("fmt", LOW, ids=repr)
@pytest.mark.parametrize("binade", ["normal", "subnormal", "edge"])
def test_the_mean_is_exact(fmt, binade, seed):
    """The mean of n roundings of x is within 6 standard errors of x, and each mean has the variance of a fair coin of that bias."""
    low = {"normal": 1.0, "subnormal": fmt.smallest, "edge": fmt.tiny / 2}[binade]
    n = 1 << 14
    x = low * (1 + torch.rand(16, 1)).expand(16, n)
    codes = kernels.cast(x, ONE, fmt.dtype, rounding="stochastic", key=kernels.make_key(seed, 0, 0, "cpu"))
    spacing = max(low, fmt.tiny) * fmt.eps
    error = (codes.double().mean(1) - x[:, 0].double()) / spacing
    assert error.abs().max() < 6 * 0.5 / math.sqrt(n)


def test_small_updates_survive_on_average(seed):
    """A change of 1/50 of the spacing at each of 500 steps: to nearest all of it is lost, stochastically nothing."""
    x = torch.full((4096,), 1.0)
    nearest = x.clone()
    for step in range(500):
        key = kernels.make_key(seed, step, 0, "cpu")
        x = kernels.cast(x + FP16.eps / 50, ONE, FP16.dtype, rounding="stochastic", key=key).float()
        nearest = kernels.cast(nearest + FP16.eps / 50, ONE, FP16.dtype).float()
    assert (nearest == 1).all()
    assert abs((x.double().mean() - 1) / (10 * FP16.eps) - 1) < 0.05


def test_rounding_depends_on_the_global_index_alone(seed):
    x, key = torch.randn(1000), kernels.make_key(seed, 1, 1, "cpu")
    whole = kernels.cast(x, ONE, E4M3.dtype, rounding="stochastic", key=key, offset=100)
    for cut in (1, 333, 999):
        first = kernels.cast(x[:cut], ONE, E4M3.dtype, rounding="stochastic", key=key, offset=100)
        second = kernels.cast(x[cut:], ONE, E4M3.dtype, rounding="stochastic", key=key, offset=100 + cut)
        assert_same_bits(torch.cat([first.view(torch.uint8), second.view(torch.uint8)]).view(E4M3.dtype), whole)
    other = kernels.cast(x, ONE, E4M3.dtype, rounding="stochastic", key=kernels.make_key(seed, 2, 1, "cpu"))
    assert not torch.equal(other.float(), whole.float())


def test_fp32_is_left_alone(seed):
    x = torch.randn(1000)
    assert torch.equal(kernels.cast(x, ONE, FP32.dtype, rounding="stochastic", key=kernels.make_key(0, 0, 0, "cpu")), x)
