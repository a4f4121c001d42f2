"""Cross-entropy with its gradient in FP8: the loss of PyTorch, and the nearest codes of its gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

from octavo.formats import E4M3, E5M2
from octavo.kernels.cross_entropy import softmax_gradient

FORMATS = pytest.mark.parametrize(("fmt", "scale"), [(E5M2, 2.0**15), (E4M3, 2.0**8)], ids=["E5M2", "E4M3"])


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_pytorch_and_its_gradient_rounded(dtype, fmt, scale, seed):
    logits = (4 * torch.randn(37, 61)).to(dtype)
    classes, weights = torch.randint(61, (37,)), torch.rand(37)
    own = logits.float().requires_grad_()
    expected = F.cross_entropy(own, classes, reduction="none") * weights
    expected.sum().backward()
    losses, codes = softmax_gradient(logits, classes, weights, fmt, scale)
    torch.testing.assert_close(losses, expected.detach())
    assert codes.dtype == fmt.dtype and codes.shape == logits.shape
    error = (codes.float() / scale - own.grad).abs()
    assert (error <= own.grad.abs() * 2.0 ** -(fmt.mantissa_bits + 1) + fmt.tiny / scale + 1e-6).all()


@FORMATS
def test_rows_without_weight_are_zero_and_nan_stays_in_its_row(fmt, scale, seed):
    logits, classes = torch.randn(4, 20), torch.randint(20, (4,))
    weights = torch.tensor([1.0, 0.0, math.nan, 1.0])
    logits[3, 7] = math.nan
    losses, codes = softmax_gradient(logits, classes, weights, fmt, scale)
    values = codes.float()
    assert losses[0].isfinite() and losses[1] == 0 and losses[2:].isnan().all()
    assert values[0].isfinite().all() and not values[1].any() and values[2:].isnan().all()


def test_minus_infinity_takes_no_probability(seed):
    logits, classes = torch.randn(5, 24), torch.randint(20, (5,))
    logits[:, 20:] = -math.inf
    losses, codes = softmax_gradient(logits, classes, torch.ones(5), E5M2, 2.0**15)
    fewer, others = softmax_gradient(logits[:, :20].contiguous(), classes, torch.ones(5), E5M2, 2.0**15)
    assert not codes[:, 20:].float().any()
    torch.testing.assert_close(losses, fewer)
    torch.testing.assert_close(codes[:, :20].float(), others.float(), rtol=2**-2, atol=1e-3)


def test_shapes_that_do_not_match():
    with pytest.raises(ValueError, match=r"are to be \[n, V\], \[n\], \[n\]"):
        softmax_gradient(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), torch.ones(3), E5M2, 1.0)


def test_compiled_it_is_one_operator(seed):
    logits, classes, weights = torch.randn(6, 30), torch.randint(30, (6,)), torch.ones(6)
    compiled = torch.compile(lambda *x: softmax_gradient(*x, E5M2, 2.0**15), fullgraph=True, backend="aot_eager")
    for one, two in zip(
        compiled(logits, classes, weights), softmax_gradient(logits, classes, weights, E5M2, 2.0**15), strict=True
    ):
        assert torch.equal(one.float(), two.float())
