"""The kernel of cross-entropy with its gradient in FP8 is near its reference, and as near as it says to FP64.

Without a GPU it can be interpreted, see `interpreter`.
"""

import math

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from test_kernels_gpu import on

from octavo.formats import E4M3, E5M2
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SHAPES = [(1, 2), (3, 7), (5, 331), (4, 1024), (3, 4097), (2, 9001), (2, 50_257)]
LARGE = [pytest.param(2560, 50_304, marks=pytest.mark.gpu), pytest.param(1037, 128_256, marks=pytest.mark.gpu)]
SCALE = {E5M2: 2.0**15, E4M3: 2.0**8}


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


def steps(codes: torch.Tensor) -> torch.Tensor:
    """Codes in the order of their values, as int16."""
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("fmt", [E5M2, E4M3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES + LARGE)
def test_near_the_reference_and_exact_losses(rows, columns, dtype, fmt, cuda, seed):
    logits = on((torch.randn(rows, columns) * 5 + torch.randn(rows, 1) * 20).to(dtype))
    classes, weights = torch.randint(columns, (rows,), device=DEVICE), torch.rand(rows, device=DEVICE)
    losses, codes = cuda.softmax_gradient(logits, classes, weights, fmt.dtype, SCALE[fmt])
    expected, expected_codes = reference.softmax_gradient(logits, classes, weights, fmt.dtype, SCALE[fmt])
    exact = logits.double().log_softmax(1).gather(1, classes[:, None]).squeeze(1) * -weights
    assert ((losses - exact).abs() <= 2**-18 * (logits.abs().amax(1) + exact.abs() + 1)).all()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=2e-5)
    apart = (steps(codes) - steps(expected_codes)).abs()
    cancelled = (codes.float() - expected_codes.float()).abs() <= 2**-20 * SCALE[
        fmt
    ]  # p - 1 of a class that is certain
    assert ((apart <= 1) | cancelled).all() and (apart > 0).sum() <= max(2, 1e-4 * apart.numel())
    assert codes.dtype == fmt.dtype and codes.is_contiguous()


def test_masked_and_odd_rows(cuda, seed):
    logits = on(torch.randn(6, 5000).bfloat16())
    logits[:, 4000:] = -math.inf  # padding of the vocabulary
    logits[2, 17] = math.nan
    logits[3, 4] = math.inf
    weights = on(torch.tensor([1.0, 0.0, 1.0, 1.0, math.nan, 1.0]))
    classes = on(torch.tensor([0, 3999, 5, 6, 7, 8]))
    losses, codes = cuda.softmax_gradient(logits, classes, weights, E5M2.dtype, 2.0**15)
    values = codes.float()
    assert not values[[0, 1, 5], 4000:].any() and losses[[0, 5]].isfinite().all()
    assert losses[1] == 0 and not values[1].any()
    assert losses[2:5].isnan().all() and values[2:5].isnan().any(1).all() and values[4].isnan().all()
    assert values[0, 0] < 0 and abs(values[0].sum() / 2**15) < 0.05


def test_strided_logits_and_none_at_all(cuda, seed):
    logits = on(torch.randn(9, 64).bfloat16())
    weights, classes = torch.ones(4, device=DEVICE), torch.randint(48, (4,), device=DEVICE)
    losses, codes = cuda.softmax_gradient(logits[1::2, :48], classes, weights, E5M2.dtype, 2.0**15)
    again, other = cuda.softmax_gradient(logits[1::2, :48].contiguous(), classes, weights, E5M2.dtype, 2.0**15)
    assert torch.equal(losses, again) and torch.equal(codes.view(torch.uint8), other.view(torch.uint8))
    losses, codes = cuda.softmax_gradient(logits[:0], classes[:0], weights[:0], E5M2.dtype, 2.0**15)
    assert losses.shape == (0,) and codes.shape == (0, 64)
