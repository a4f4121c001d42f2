"""The largest magnitude and the sum of squares of many tensors equal those of each one, computed plainly."""

import math

import pytest
import torch

from octavo import kernels
from octavo.formats import E4M3
from octavo.kernels.reference.magnitudes import Values


def test_every_tensor_has_its_own(seed):
    shapes = [(7,), (0,), (33, 17), (), (3, 5, 2), (300_000,)]
    tensors = [torch.randn(shape) * 10.0 ** torch.empty(shape).uniform_(-8, 8) for shape in shapes]
    tensors += [torch.randn(64, 32).t(), torch.randn(50).bfloat16(), torch.randn(40).half()]
    amaxes, sums = kernels.magnitudes([Values(x) for x in tensors])
    assert amaxes.dtype == torch.float32 and sums.dtype == torch.float64
    for x, amax, total in zip(tensors, amaxes, sums, strict=True):
        assert amax == (x.abs().max().float() if x.numel() else 0)
        assert total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)


def test_sums_of_squares_of_E4M3_codes_are_exact(seed):
    codes = (torch.randn(100_003) * 20).to(E4M3.dtype)
    exact = sum(round(value * 2**9) ** 2 for value in codes.double().tolist())
    assert kernels.magnitudes([Values(codes)])[1].item() == exact / 2**18


def test_residuals_count(seed):
    x = torch.empty(5000).uniform_(1.02, 1.06) * (torch.randint(2, (5000,)) * 2 - 1)  # all of them round down
    scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
    codes, residual = kernels.cast_residual(x, scale)
    _, (with_it, without) = kernels.magnitudes([Values(codes, residual), Values(codes)])
    exact = (x.double() * scale).square().sum()
    assert abs(with_it / exact - 1) < 1e-4 and 0.03 < 1 - without / exact < 0.12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(bad, seed):
    x = torch.randn(10_000)
    x[torch.randint(10_000, ())] = bad
    (amax, fine), (total, fine_total) = kernels.magnitudes([Values(x), Values(torch.ones(3))])
    assert not amax.isfinite() and not total.isfinite()
    assert (fine, fine_total) == (1, 3)


def test_huge_values_do_not_overflow():
    amaxes, sums = kernels.magnitudes([Values(torch.full((4,), 3e38))])
    assert sums.item() == pytest.approx(4 * float(torch.tensor(3e38)) ** 2, rel=1e-12)
