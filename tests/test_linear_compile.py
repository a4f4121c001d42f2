"""FP8Linear under torch.compile: no graph break, the same bits, FP8 gradients, no needless compilation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fp8_layers import (
    DELAYED,
    LEVELS,
    equal_states,
    make,
    relative,
    same_bits,
    scaling_state,
)
from torch import Tensor, nn

from octavo.convert import convert, initialize
from octavo.linear import FP8Linear, collect_stats
from octavo.recipe import O1, O2
from octavo.tensor import ScaledTensor


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_B11_eager_and_compiled_agree(backend, seed):
    layer, x = make(32, 24), torch.randn(16, 32)
    assert same_bits(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))


@LEVELS
def test_H3_compiles_without_a_break(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 33, bias=False))
    convert(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 64, requires_grad=True)
    results = []
    for function in (model, compiled):
        for _ in range(2):  # two micro-batches
            y = function(x)
            y.square().sum().backward()
        grads = [layer.weight.grad for layer in model if isinstance(layer, FP8Linear)]
        assert all(isinstance(grad, ScaledTensor) and grad.residual is not None for grad in grads)
        results.append([y, x.grad, *grads])
        model.zero_grad()
        x.grad = None
    assert all(same_bits(eager, other) for eager, other in zip(*results, strict=True))


@pytest.mark.slow
def test_H3_compiles_with_inductor(seed):
    layers = [make(64, 48, recipe) for recipe in (O1, O2)]
    x = torch.randn(8, 64, requires_grad=True)
    results = []
    for compiled in (False, True):
        function = torch.compile(layers_sum, fullgraph=True) if compiled else layers_sum
        function(layers, x).square().sum().backward()
        assert all(isinstance(layer.weight.grad, ScaledTensor) for layer in layers)
        results.append([x.grad, *(layer.weight.grad for layer in layers)])
        x.grad = layers[0].weight.grad = layers[1].weight.grad = None
    assert all(relative(other, eager) < 1e-2 for eager, other in zip(*results, strict=True))


def layers_sum(layers: list[FP8Linear], x: Tensor) -> Tensor:
    return layers[0](x) + layers[1](x)


@LEVELS
def test_compiled_frozen_weight(recipe, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.requires_grad_(False)
    convert(model, recipe)
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(8, 64)).sum().backward()
    assert isinstance(model[0].weight.grad, ScaledTensor) and model[1].weight.grad is None


def test_compiled_trains_as_eager(seed):
    def run(compiled: bool) -> list[float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), O2)
        function = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        losses = []
        for _ in range(5):
            x = torch.randn(16, 32)
            loss = F.mse_loss(function(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert run(False) == run(True)


@LEVELS
def test_a_step_compiles_with_backward_in_it(recipe, seed):
    """Backward, hooks and the optimizer run as they do in eager mode: Dynamo sees them from the compiled function."""

    def run(compiled: bool) -> list[float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        function = torch.compile(step, backend="aot_eager") if compiled else step
        return [function(torch.randn(16, 32)).item() for _ in range(3)]

    assert run(False) == run(True)


def test_compiled_with_delayed_scales(seed):
    """The same windows as in eager mode, and two compilations: one for the warm-up and one for after it."""

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), DELAYED)
        function = torch.compile(model, backend=counting_backend, fullgraph=True) if compiled else model
        for _ in range(18):
            x = torch.randn(16, 32)
            F.mse_loss(function(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return scaling_state(model[0]) + scaling_state(model[2])

    compilations.clear()
    assert equal_states(run(False), run(True))
    assert len(compilations) == 2


compilations: list[int] = []


def counting_backend(graph, inputs):
    from torch._dynamo.backends.debugging import aot_eager

    compilations.append(1)
    return aot_eager(graph, inputs)


@LEVELS
def test_compiling_again_between_micro_batches(recipe, seed):
    """Dynamo cannot trace a parameter whose gradient is stored differently, so gradients hide while it traces."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))
    convert(model, recipe)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counting_backend, fullgraph=True)
    compilations.clear()
    for tokens in (8, 8, 9, 24, 8):
        x = torch.randn(tokens, 64)
        for function in (compiled, eager):
            function(x).sum().backward()
    assert len(compilations) == 2, "one for eight tokens, one for any number"
    for layer, other in zip(model, eager, strict=True):
        if isinstance(layer, FP8Linear):
            assert same_bits(layer.weight.grad, other.weight.grad)


def test_compiled_steps_compile_once(seed):
    """Optimizer steps, evaluation in between and counting change no guard of the compiled function."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), O2)
    compiled = torch.compile(model, backend=counting_backend, fullgraph=True)
    compilations.clear()
    for _ in range(5):
        compiled(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(torch.randn(3, 64))
        model.train()
    assert len(compilations) == 1
    with collect_stats(model) as stats:
        compiled(torch.randn(8, 64)).sum().backward()
    assert stats["0"]["grad_output"]["numel"] == stats["0"]["input"]["numel"] == 8 * 64


@LEVELS
def test_inference_mode_then_training(recipe, seed):
    layer, x = make(64, 32, recipe), torch.randn(8, 64)
    with torch.inference_mode():
        y = layer(x)
    z = layer(x)
    assert torch.equal(y, z)
    z.sum().backward()
    assert isinstance(layer.weight.grad, ScaledTensor)
