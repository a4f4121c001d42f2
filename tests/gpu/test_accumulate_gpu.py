"""The kernels of accumulation equal their reference bit for bit. With TRITON_INTERPRET=1 they run on CPU, see `interpreter`."""

import importlib

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits

from octavo import kernels
from octavo.formats import E4M3
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SIZES = [0, 1, 15, 16, 17, 4095, 4096, 4097, 5 * 4096 + 48]
LARGE = [(1024, 4096), (5120, 5120), (4097, 8191), (16384, 4096)]


@pytest.fixture(autouse=True)
def exact_conversion():
    if INTERPRETED:
        convert_exactly()


def operands(shape, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, residual, other) with zeros of both signs and every binade."""
    x, y = (
        torch.randn(shape, device=DEVICE) * torch.exp2(torch.empty(shape, device=DEVICE).uniform_(-18, 8))
        for _ in range(2)
    )
    x, y = (torch.where(torch.rand(shape, device=DEVICE) < 0.1, part * 0, part) for part in (x, y))
    one = torch.ones((), device=DEVICE)
    codes, residual = kernels.cast_residual(x, one)
    other = kernels.cast(y, one, E4M3.dtype)
    return codes, torch.full_like(residual, 99) if first else residual, other


def check(codes, residual, other, scales, first: bool) -> None:
    from octavo.kernels.cuda import accumulate

    scale, other_scale = (torch.tensor(value, dtype=torch.float32, device=DEVICE) for value in scales)
    got, want = ([part.clone() for part in (codes, residual, scale)] for _ in range(2))
    accumulate(*got, other, other_scale, first)
    reference.accumulate(*want, other, other_scale, first)
    for mine, its in zip(got, want, strict=True):
        assert_same_bits(mine, its)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, first, seed):
    inputs = operands((size,), first)
    check(*inputs, torch.exp2(torch.randint(-30, 30, (2,)).float()).tolist(), first)
    check(*inputs, torch.exp2(torch.empty(2).uniform_(-30, 30)).tolist(), first)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("simple", [True, False])
def test_several_turns_of_a_program(simple, first, seed, monkeypatch):
    cast = importlib.import_module("octavo.kernels.cuda.cast")
    monkeypatch.setattr(cast, "PROGRAMS", 3)
    cast.division.cache_clear()
    assert cast.division(31 * 4096 + 5)[1:] == (3, 4)
    check(*operands((31 * 4096 + 5,), first), [4.0, 0.5] if simple else [4.1, 0.3], first)
    cast.division.cache_clear()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "exponents", [(-126, -126), (-120, 3), (-118, 126), (126, 126), (-101, 101), (-100, 100), (100, -100)], ids=str
)
def test_scales_at_the_ends_of_their_range(exponents, first, seed):
    for factor in (1.0, 1.25):
        check(*operands((2000,), first), [2.0**e * (factor if -126 < e < 126 else 1) for e in exponents], first)


@pytest.mark.parametrize("simple", [True, False])
def test_every_word_and_every_code(simple, seed):
    """2^16 words, each with a code; and, as sums with zero, all codes."""
    words = torch.arange(2**16, dtype=torch.int32, device=DEVICE)
    words = words[(words & 0x7FFF) <= 0x7E7F].to(torch.int16)
    codes, residual = kernels.split_e4m11(words)
    finite = torch.arange(256, device=DEVICE).to(torch.uint8)
    finite = finite[(finite & 0x7F) != 0x7F]
    other = finite[torch.randint(len(finite), (len(words),), device=DEVICE)].view(E4M3.dtype)
    scales = [2.0**-7, 2.0**-4] if simple else [0.011, 0.07]
    check(codes, residual, other, scales, False)
    check(codes, residual, torch.zeros_like(other), scales, False)
    check(torch.zeros_like(other), residual, other, scales, True)


@pytest.mark.parametrize("where", ["sum", "other", "both"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("simple", [True, False])
def test_one_nan(simple, first, where, seed):
    codes, residual, other = operands((9000,), first)
    for name, part in (("sum", codes), ("other", other)):
        if where in (name, "both"):
            place = torch.randint(9000, (), device=DEVICE)
            part.view(torch.uint8)[place] = 0x7F + 128 * int(torch.randint(2, ()))
            residual[place] = 0
    check(codes, residual, other, [2.0**3, 2.0**-2] if simple else [3.0, 0.3], first)


@pytest.mark.parametrize("first", [True, False])
def test_nothing_but_zeros(first, seed):
    codes, residual, other = operands((5000,), first)
    check(
        codes.float().mul(0).to(E4M3.dtype),
        torch.zeros_like(residual),
        other.float().mul(0).to(E4M3.dtype),
        [8.0, 3.0],
        first,
    )


def test_scales_may_be_the_same_tensor(seed):
    """The one that is written is read by no program that writes it, nor by any that runs with it."""
    from octavo.kernels.cuda import accumulate

    codes, residual, other = operands((70_000,), False)
    scale = torch.tensor(0.25, device=DEVICE)
    want = [codes.clone(), residual.clone(), scale.clone()]
    reference.accumulate(*want, other, scale.clone(), False)
    accumulate(codes, residual, scale, other, scale, False)
    for mine, its in zip((codes, residual, scale), want, strict=True):
        assert_same_bits(mine, its)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_tensors_again_and_again(shape, first, seed):
    codes, residual, other = operands(shape, first)
    check(codes, residual, other, [4.0, 0.5], first)
    check(codes, residual, other, [4.1, 0.3], first)


@pytest.mark.gpu
def test_no_memory_of_the_size_of_the_tensor(seed):
    codes, residual, other = operands((4096, 4096), False)
    scale, other_scale = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    kernels.accumulate(codes, residual, scale, other, other_scale)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.accumulate(codes, residual, scale, other, other_scale)
    assert torch.cuda.max_memory_allocated() - before <= 16 << 10
