"""A layer while a CUDA graph is captured, and on several streams: what is cast anew, and how delayed scales follow replays.

Streams and captures are pretended on CPU (`on_stream`): what is asked is which casts would be part of a graph. The graphs themselves
are in `gpu/test_linear_gpu.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fp8_layers import DELAYED, LEVELS, count_casts, equal_states, make, on_stream, scaling_state
from torch import nn

from octavo.convert import convert
from octavo.formats import E4M3
from octavo.kernels import streams
from octavo.linear import FP8Linear, weight_operand
from octavo.scaling import DelayedScaling, update_all

WEIGHT, TOKENS = (96, 64), (8, 64)


def run(layer: nn.Module, grad: bool = True) -> None:
    with torch.set_grad_enabled(grad):
        y = layer(torch.randn(TOKENS, requires_grad=True))
    if grad:
        y.sum().backward()


@LEVELS
def test_a_captured_step_casts_the_weight_itself(recipe, seed, monkeypatch):
    """Whatever was cast before: a loop that accumulates keeps the operand for the next micro-batch."""
    layer = make(64, 96, recipe)
    on_stream(monkeypatch, 1)
    for _ in range(3):
        run(layer)
    casts = count_casts(monkeypatch)
    run(layer)
    assert WEIGHT not in casts
    on_stream(monkeypatch, streams.CAPTURED)
    run(layer)
    assert casts.count(WEIGHT) == 2  # for forward and for dgrad: nothing stays between them


@LEVELS
@pytest.mark.parametrize("grad", [False, True], ids=["generation", "training"])
def test_nothing_passes_from_eager_code_to_a_graph_or_back(recipe, grad, seed, monkeypatch):
    layer = make(64, 96, recipe)
    casts = count_casts(monkeypatch)
    for stream in (1, streams.CAPTURED, 1):
        casts.clear()
        on_stream(monkeypatch, stream)
        before = layer.weight.__dict__.get("_octavo_cast")
        with torch.set_grad_enabled(grad):
            layer(torch.randn(TOKENS, requires_grad=True))
        left = layer.weight.__dict__.get("_octavo_cast")
        if stream == streams.CAPTURED:
            assert casts.count(WEIGHT) == 1 and left is before
        else:
            assert (WEIGHT in casts) == (before is None) and left is not None


def test_a_captured_operand_has_no_half_that_nobody_reads(seed, monkeypatch):
    layer = make(64, 96)
    halves = []
    monkeypatch.setattr(
        "octavo.linear.module.weight_operand", lambda *a, **k: halves.append(k["col"]) or weight_operand(*a, **k)
    )
    for stream in (1, streams.CAPTURED):
        on_stream(monkeypatch, stream)
        run(layer)
    assert halves == [True, False]


@LEVELS
def test_an_operand_of_a_weight_serves_the_stream_that_made_it(recipe, seed, monkeypatch):
    layer = make(64, 96, recipe)
    casts = count_casts(monkeypatch)
    for stream, cast in ((1, True), (1, False), (2, True), (2, False), (1, True)):
        casts.clear()
        on_stream(monkeypatch, stream)
        weight_operand(layer.weight, E4M3)
        assert casts == [WEIGHT] * cast


def test_an_operand_of_an_input_is_shared_on_one_stream_or_within_a_graph(seed, monkeypatch):
    layers = [make(64, 96) for _ in range(2)]
    x = torch.randn(TOKENS, requires_grad=True) * 1.0
    casts = count_casts(monkeypatch)
    for stream in (1, 2, streams.CAPTURED, 1):
        casts.clear()
        on_stream(monkeypatch, stream)
        for layer in layers:
            layer(x)
        assert casts.count(TOKENS) == 1


# --- delayed scaling


def capture(monkeypatch: pytest.MonkeyPatch, scalings: list[DelayedScaling]) -> None:
    """What is captured records on the device in replays only."""
    on_stream(monkeypatch, streams.CAPTURED)
    for scaling in scalings:
        pending = scaling.pending.clone()
        scaling.visible_scale(scaling.scale(torch.ones(1), E4M3.max), torch.tensor(1.0), record=True)
        scaling.pending.copy_(pending)
    on_stream(monkeypatch, 1)


def replay(scaling: DelayedScaling, amax: float) -> None:
    scaling.pending.copy_(torch.maximum(scaling.pending, torch.tensor(amax)))


def record(scaling: DelayedScaling, amax: float) -> None:
    scaling.visible_scale(scaling.scale(torch.tensor([amax]), E4M3.max), torch.tensor(amax), record=True)


def test_windows_follow_the_replays_of_a_graph(seed, monkeypatch):
    """As they follow eager steps; the graph goes on finding its tensors where they were."""
    ours, eager = ([DelayedScaling(window=4, warmup=2) for _ in range(3)] for _ in range(2))
    on_stream(monkeypatch, 1)
    for scalings in (ours, eager):
        for scaling in scalings:
            record(scaling, 1.0)
        update_all(scalings)
    capture(monkeypatch, ours[:2])
    addresses = [(s.pending.data_ptr(), s.held.data_ptr()) for s in ours]
    for number in range(12):
        amaxes = (torch.rand(3) * 2.0**number).tolist()
        for index, amax in enumerate(amaxes):
            if index == 2 or number == 7:  # the third runs outside of the graph, and once all do
                record(ours[index], amax)
            else:
                replay(ours[index], amax)
            record(eager[index], amax)
        done = torch.tensor(number != 5)
        update_all(ours, done)
        update_all(eager, done)
        for mine, other in zip(ours, eager, strict=True):
            assert all(torch.equal(mine.state_dict()[name], value) for name, value in other.state_dict().items())
            assert torch.equal(mine.scale(torch.ones(1), E4M3.max), other.scale(torch.ones(1), E4M3.max))
    assert addresses == [(s.pending.data_ptr(), s.held.data_ptr()) for s in ours]


def test_a_step_without_a_replay_leaves_no_trace(seed, monkeypatch):
    scalings = [DelayedScaling(warmup=0) for _ in range(2)]
    for scaling in scalings:
        record(scaling, 3.0)
    update_all(scalings)
    capture(monkeypatch, scalings)
    histories = [scaling.history.clone() for scaling in scalings]
    update_all(scalings)
    replay(scalings[1], 5.0)
    assert [bool(s.state_dict()["recorded"]) for s in scalings] == [False, True]
    update_all(scalings)
    assert torch.equal(scalings[0].history, histories[0]) and scalings[0].held == 3
    assert scalings[1].history[:2].tolist() == [5, 3] and scalings[1].held == 5


def test_windows_that_a_graph_holds_cannot_move(seed, monkeypatch):
    scalings = [DelayedScaling(warmup=0) for _ in range(2)]
    capture(monkeypatch, scalings[:1])
    replay(scalings[0], 1.0)
    with pytest.raises(RuntimeError, match="1 of 2 delayed scalings.*once before the graph is captured"):
        update_all(scalings)
    copies = copy.deepcopy(scalings)  # no graph holds these
    record(copies[0], 1.0)
    update_all(copies)
    assert copies[0].held == 1


def test_a_layer_whose_step_is_captured(seed, monkeypatch):
    layer = make(64, 96, DELAYED)
    on_stream(monkeypatch, 1)
    run(layer)
    layer.update_scaling()
    on_stream(monkeypatch, streams.CAPTURED)
    run(layer)
    on_stream(monkeypatch, 1)
    for _, scaling in layer.scalings():
        assert scaling.takes_part
        scaling.pending.fill_(1000.0)
    layer.update_scaling()
    assert all(scaling.held == 1000 and scaling.updates == 2 for _, scaling in layer.scalings())


def test_E1_calls_without_tokens_are_no_steps(seed):
    """An expert that got none keeps its window and its warm-up, in eager mode and compiled."""
    for compiled in (False, True):
        layer = make(64, 96, DELAYED)
        call = torch.compile(layer, backend="aot_eager") if compiled else layer
        run(layer)
        layer.update_scaling()
        before = scaling_state(layer)
        for _ in range(16):
            x = torch.randn(0, 64, requires_grad=True)
            call(x).sum().backward()
            layer.update_scaling()
        assert equal_states(before, scaling_state(layer)) and not layer.input_scaling.warm


def test_E1_an_expert_with_tokens_in_one_micro_batch_counts_them(seed):
    model = convert(nn.Sequential(nn.Linear(64, 96)), DELAYED, filter=lambda module, fqn: True)
    layer = model[0]
    assert isinstance(layer, FP8Linear)
    for tokens in (0, 8, 0):
        model(torch.full((tokens, 64), 2.0, requires_grad=True)).sum().backward()
    layer.update_scaling()
    assert layer.input_scaling.held == 2 and layer.input_scaling.updates == layer.grad_output_scaling.updates == 1
