"""The kernels of many tensors in one launch equal their references: maxima and E4M3 sums bit for bit, other sums within FP64's rounding.

With TRITON_INTERPRET=1 they run on CPU, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits

from octavo import kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.reference.magnitudes import Values

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SIZES = (0, 1, 2047, 2048, 2049, 65_536, 65_536 * 2 + 5000)


def tensors(dtype: torch.dtype) -> list[Values]:
    values = [torch.randn(n, device=DEVICE) * 10.0 ** torch.empty(n, device=DEVICE).uniform_(-4, 1) for n in SIZES]
    result = [Values(x.to(dtype)) for x in values]
    return [*result, Values(values[4].to(dtype)[3:]), Values(torch.randn(40, 30, device=DEVICE).to(dtype).t())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3.dtype, E5M2.dtype], ids=str)
def test_magnitudes(dtype, seed):
    from octavo.kernels.cuda import magnitudes

    inputs = tensors(dtype) + tensors(torch.float32)[:3]
    got, want = magnitudes(inputs), reference.magnitudes(inputs)
    assert_same_bits(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-13, atol=0)
    assert torch.equal(got[1], magnitudes(inputs)[1])
    if dtype == E4M3.dtype:
        assert torch.equal(got[1][: len(SIZES)], want[1][: len(SIZES)])


def test_residuals_and_what_is_not_finite(seed):
    from octavo.kernels.cuda import magnitudes

    if INTERPRETED:
        convert_exactly()
    x = torch.randn(70_000, device=DEVICE)
    words = Values(*kernels.cast_residual(x, torch.tensor(64.0, device=DEVICE)))
    x[torch.randint(70_000, ())] = torch.nan
    bad = Values(*kernels.cast_residual(x, torch.tensor(64.0, device=DEVICE)))
    for inputs in ([words, Values(words.values)], [bad, words, Values(x)]):
        for got, want in zip(magnitudes(inputs), reference.magnitudes(inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=0, equal_nan=True)
