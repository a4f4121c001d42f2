"""The learning rate is the paper's curve and a function of the step alone; only matrices decay."""

from __future__ import annotations

import pytest
from torch import nn

from octavo.train.config import OptimConfig
from octavo.train.schedule import decay_groups, learning_rate


def test_warm_up_peak_and_end() -> None:
    optim = OptimConfig(lr=6e-4, warmup_steps=100)
    rates = [learning_rate(step, 1000, optim) for step in range(1, 1001)]
    assert rates[0] == pytest.approx(6e-6) and rates[49] == pytest.approx(3e-4)
    assert rates[99] == max(rates) == 6e-4
    assert rates[-1] == pytest.approx(6e-5)
    assert all(a > b for a, b in zip(rates[99:], rates[100:], strict=False))
    assert learning_rate(550, 1000, optim) == pytest.approx(6e-4 * 0.55)  # half of the cosine


def test_edges() -> None:
    assert learning_rate(1, 1, OptimConfig(lr=1.0, warmup_steps=0)) == pytest.approx(0.1)
    assert learning_rate(5, 3, OptimConfig(lr=1.0, warmup_steps=1)) == pytest.approx(0.1)
    assert learning_rate(3, 10, OptimConfig(lr=1.0, warmup_steps=20)) == pytest.approx(0.15)
    assert learning_rate(7, 10, OptimConfig(lr=1.0, warmup_steps=0, min_lr_ratio=1.0)) == 1.0


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4))
    groups = decay_groups(model, 0.1)
    decayed = {id(p) for group in groups if group["weight_decay"] == 0.1 for p in group["params"]}
    assert decayed == {id(model[0].weight), id(model[2].weight)}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in decay_groups(model, 0.1)] == [1]
