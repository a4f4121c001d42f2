"""The largest magnitude of a gradient, known from whoever made it: always what a look at the codes would find, or else nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.convert import convert
from octavo.distributed.buckets import Bucket
from octavo.distributed.layout import Layout
from octavo.formats import E4M3, FP16
from octavo.kernels import Values
from octavo.linear import scaled_gradient
from octavo.linear.operand import known_amax
from octavo.optim import AdamW, clip_grad_norm_
from octavo.tensor import cast

GRADIENTS = {
    "normal": lambda: torch.randn(30, 40),
    "BF16": lambda: (torch.randn(30, 40) * 1e-3).bfloat16(),
    "FP16": lambda: (torch.randn(7) * 1e3).half(),
    "zero": lambda: torch.zeros(5, 16),
    "empty": lambda: torch.zeros(0, 16),
    "one element": lambda: torch.randn(()),
    "subnormal": lambda: torch.randn(100) * 2.0**-140,
    "tiny": lambda: torch.full((9,), 2.0**-149),
    "huge": lambda: torch.randn(64) * 1e38,
    "many decades": lambda: torch.randn(1000) * 10 ** torch.empty(1000).uniform_(-30, 30),
    "rounds up": lambda: torch.tensor([1.0, 1.9999, -0.3]),
    "infinite": lambda: torch.tensor([1.0, -math.inf, 2.0]),
    "NaN": lambda: torch.tensor([math.nan, 1.0]),
}


def looked_at(codes: Tensor) -> Tensor:
    return kernels.magnitudes([Values(codes)])[0][0]


def same(amax: Tensor | None, codes: Tensor) -> bool:
    want = looked_at(codes)
    return amax is not None and amax.shape == () and (bool(amax == want) or bool(amax.isnan() & want.isnan()))


@pytest.mark.parametrize("name", GRADIENTS)
def test_it_is_that_of_the_codes(name, seed):
    for _ in range(20):
        grad = scaled_gradient(GRADIENTS[name](), torch.float32)
        assert same(known_amax(grad.codes), grad.codes)


def test_the_gradient_of_a_layer_has_it(seed):
    for recipe in ("O1", "O2"):  # from the backward pass, and from a hook on a plain parameter
        model = nn.Sequential(nn.Linear(32, 48))
        convert(model, recipe, filter=lambda module, fqn: True)
        model(torch.randn(20, 32)).square().sum().backward()
        grad = model[0].weight.grad
        assert same(known_amax(grad.codes), grad.codes)


def test_changes_in_place_make_it_void(seed):
    changes = {
        "add": lambda grad: grad.add_(scaled_gradient(torch.randn(8, 16), torch.float32)),
        "negative factor": lambda grad: grad.mul_(torch.tensor(-3.0)),
        "copy": lambda grad: grad.copy_(torch.randn(8, 16)),
        "zero": lambda grad: grad.zero_(),
        "codes": lambda grad: grad.codes.fill_(448.0),
        "element": lambda grad: grad[3].fill_(100.0),
        "data": lambda grad: setattr(grad, "data", torch.randn(8, 16)),
    }
    for name, change in changes.items():
        grad = scaled_gradient(torch.randn(8, 16), torch.float32)
        change(grad)
        assert known_amax(grad.codes) is None, name
    grad = scaled_gradient(torch.randn(8, 16), torch.float32)
    for other in (grad.clone(), copy.deepcopy(grad), grad.codes.clone()):
        assert known_amax(getattr(other, "codes", other)) is None


def test_a_reduction_over_ranks_makes_it_void(seed):
    """Which writes codes by kernels of its own."""
    grad = scaled_gradient(torch.randn(8, 16), torch.float32)
    bucket = Bucket([], Layout([grad.shape], 1), torch.zeros(1), grads=[grad])
    bucket.drop_residuals()
    assert known_amax(grad.codes) is None


@pytest.mark.parametrize("accumulated", [False, True])
def test_clipping_keeps_it_or_finds_it(accumulated, seed):
    params = [nn.Parameter(cast(torch.randn(20, 30), FP16)) for _ in range(3)]
    for param in params:
        param.grad = scaled_gradient(torch.randn(20, 30), param.dtype)
        if accumulated:
            param.grad.add_(scaled_gradient(torch.randn(20, 30), param.dtype))
            assert known_amax(param.grad.codes) is None
    clip_grad_norm_(params, 0.1)
    for param in params:
        assert same(known_amax(param.grad.codes), param.grad.codes)
    params[0].grad.codes.zero_()
    assert known_amax(params[0].grad.codes) is None


def test_other_norms_keep_it_too(seed):
    param = nn.Parameter(cast(torch.randn(20, 30), FP16))
    param.grad = scaled_gradient(torch.randn(20, 30), param.dtype)
    clip_grad_norm_([param], 0.1, math.inf)
    assert same(known_amax(param.grad.codes), param.grad.codes)


def test_the_optimizer_reads_no_gradient_whose_amax_is_known(seed, monkeypatch):
    """And takes the same step."""
    values = torch.randn(3, 20, 30)
    results = []
    for known in (True, False):
        params = [nn.Parameter(cast(value, FP16)) for value in values] + [nn.Parameter(values[0, 0].clone())]
        optimizer = AdamW(params, lr=1e-2)
        looks: list[int] = []
        magnitudes = kernels.magnitudes
        monkeypatch.setattr(kernels, "magnitudes", lambda own, f=magnitudes, n=looks: n.append(len(own)) or f(own))
        for param in params[:3]:
            grad = scaled_gradient(param.dequantize() ** 3, param.dtype)
            param.grad = grad if known else cast(grad.dequantize(), E4M3, grad.scale)
        params[3].grad = params[3].detach() ** 3
        optimizer.step()
        monkeypatch.undo()
        assert looks == ([1] if known else [4])
        results.append([param.codes.view(torch.int16).clone() for param in params[:3]] + [params[3].detach()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
