"""Clipping: the norm of real values whatever their size, and nothing rounded in an FP8 gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from octavo.formats import E4M3, FP16
from octavo.optim import AdamW, clip_grad_norm_
from octavo.optim.devices import moved
from octavo.tensor import ScaledTensor, cast


def parameters(*grads: Tensor) -> list[nn.Parameter]:
    params = []
    for grad in grads:
        real = grad.dequantize() if isinstance(grad, ScaledTensor) else grad
        params.append(nn.Parameter(torch.randn(grad.shape).to(real.dtype)))
        params[-1].grad = grad
    return params


def real(params: list[nn.Parameter]) -> Tensor:
    grads = [p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad for p in params]
    return torch.cat([grad.double().flatten() for grad in grads])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norm_and_factor_are_those_of_torch(seed, norm_type):
    summed = cast(torch.randn(9, 40), E4M3, residual_on_add=True)
    summed.add_(cast(torch.randn(9, 40), E4M3))
    for max_norm in (0.5, 1e6):
        grads = [
            cast(torch.randn(7, 33) * 10, E4M3),
            summed.clone(),
            torch.randn(11),
            torch.randn(4).bfloat16(),
            torch.randn(()),
        ]
        params, plain = parameters(*grads), parameters(*[real(parameters(g)).float() for g in grads])
        norm = clip_grad_norm_(iter(params), max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(plain, max_norm, norm_type)
        torch.testing.assert_close(norm.float(), expected)
        torch.testing.assert_close(real(params), real(plain), rtol=1e-2, atol=1e-5)  # the BF16 one is rounded


def test_fp8_gradients_change_their_scale_only(seed):
    grad = cast(torch.randn(30, 30), E4M3)
    codes, version = grad.codes.view(torch.uint8).clone(), grad._version
    (p,) = parameters(grad)
    clip_grad_norm_(p, 0.01)
    assert torch.equal(grad.codes.view(torch.uint8), codes)
    assert real([p]).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert grad._version > version


@pytest.mark.parametrize("fmt", [None, E4M3])
def test_A13_huge_gradients_are_clipped_to_the_norm(seed, fmt):
    grad = torch.randn(64) * 1e20
    params = parameters(grad if fmt is None else cast(grad, fmt))
    expected = real(params).norm()
    norm = clip_grad_norm_(params, 1.0)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert real(params).norm().item() == pytest.approx(1.0, rel=1e-5)
    optimizer = AdamW(params)
    optimizer.step()
    assert optimizer.skipped_steps == 0 and params[0].isfinite().all()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_A13_non_finite_gradients_skip_the_step(seed, bad, norm_type):
    for fmt in (None, E4M3):
        grad = torch.tensor([1.0, 1e20, bad, 2.0])
        params = parameters(grad.clone() if fmt is None else cast(grad, fmt), torch.randn(5))
        before = [p.detach().clone() for p in params]
        other = params[1].grad.clone()
        optimizer = AdamW(params)
        norm = clip_grad_norm_(params, 1.0, norm_type)
        assert not norm.isfinite()
        assert torch.equal(params[1].grad, other)
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_small_inputs_and_errors(seed):
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0) == 0
    params = parameters(torch.zeros(3), torch.empty(0, 4), cast(torch.zeros(4), E4M3), cast(torch.empty(0), E4M3))
    assert clip_grad_norm_(params, 1.0) == 0
    assert clip_grad_norm_(params, 1.0, math.inf) == 0
    assert (real(params) == 0).all()
    params = parameters(torch.randn(3), cast(torch.randn(4), FP16))
    clip_grad_norm_(params, 0.0)
    assert real(params).norm() == 0
    with pytest.raises(ValueError, match="max_norm is -1.0"):
        clip_grad_norm_(params, -1.0)


@pytest.mark.parametrize("fmt", [E4M3, FP16])
@pytest.mark.parametrize("max_norm", [0.0, 1e-300, 1e-38])
def test_a_tiny_norm_leaves_finite_scales(seed, max_norm, fmt):
    params = parameters(cast(torch.randn(9, 40), fmt), cast(torch.randn(9, 40), fmt, block=16))
    clip_grad_norm_(params, max_norm)
    assert all((p.grad.scale.isfinite() & (p.grad.scale > 0)).all() for p in params)
    assert real(params).abs().max() <= (2.0**-100 if max_norm else 0.0)


def test_chunks_add_up(seed, monkeypatch):
    import octavo.optim.clip as clip

    params = parameters(torch.randn(1000), cast(torch.randn(10, 100), E4M3))
    values = real(params)
    monkeypatch.setattr(clip, "CHUNK", 64)
    assert clip_grad_norm_(params, 1e9).item() == pytest.approx(values.norm().item(), rel=1e-9)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_cpu_reads_is_waited_for(device):
    class Scalar:
        def to(self, device: torch.device, *, non_blocking: bool) -> tuple[torch.device, bool]:
            return device, non_blocking

    assert moved(Scalar(), torch.device(device)) == (torch.device(device), device != "cpu")
    x = torch.randn(())
    assert moved(x, x.device) is x
