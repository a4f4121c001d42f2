"""µ follows Eq. 3 exactly, stays within its bounds, and its state survives a checkpoint."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.autoscale import CEILING, AutoScale, lowest_mu, next_mu, power_of_two_below


def step(mu: float, ratio: float, **changes) -> float:
    settings = {"threshold": 1e-5, "period": 1000, "floor": 2.0**-10, **changes}
    return float(next_mu(torch.tensor(mu, dtype=torch.float64), torch.tensor(ratio), **settings))


def test_halves_above_the_threshold_and_grows_below():
    assert step(0.25, 1.1e-5) == 0.125
    assert step(0.25, 1e-5) == 0.25 * 2 ** (1 / 1000)  # the paper halves what *exceeds* 0.001%
    assert step(0.25, 0.0) == 0.25 * 2 ** (1 / 1000)
    assert step(0.25, float("nan")) == 0.125


@pytest.mark.parametrize("period", [100, 1000, 10_000])
def test_doubles_in_one_period(period):
    mu = torch.tensor([0.01, 0.25], dtype=torch.float64)
    start = mu.clone()
    for _ in range(period):
        mu = next_mu(mu, torch.zeros(2), threshold=1e-5, period=period, floor=1e-3)
    torch.testing.assert_close(mu, 2 * start, rtol=1e-12, atol=0)
    assert power_of_two_below(mu).tolist() == [2.0**-6, 0.5]  # not one step late through rounding


def test_stays_between_floor_and_ceiling():
    assert step(CEILING, 0.0) == CEILING
    assert step(2.0**-10, 1.0) == 2.0**-10


def test_floor_is_where_no_sum_can_saturate():
    for world in (2, 3, 4, 7, 8, 128):
        assert 0.25 < lowest_mu(world) * world <= 0.5


def test_power_of_two_below(seed):
    x = torch.rand(1000, dtype=torch.float64).mul(30).sub(15).exp2()
    below = power_of_two_below(x)
    assert torch.equal(torch.frexp(below).mantissa, torch.full_like(below, 0.5))
    assert bool((below <= x * (1 + 2.0**-19)).all() and (below > x / 2 * (1 - 2.0**-19)).all())


@pytest.mark.parametrize("world", [2, 3, 4, 7, 128])
def test_strategies_differ_in_mu_alone(world):
    every = torch.arange(2)
    pre, post, auto, exact = (
        AutoScale(["a", "b"], world, strategy=strategy, sums_exactly=exactly)
        for strategy, exactly in (("pre", False), ("post", False), ("auto", False), ("auto", True))
    )
    assert pre.factor(every).tolist() == [2.0 ** -(world - 1).bit_length()] * 2
    assert post.factor(every).tolist() == exact.factor(every).tolist() == [1.0, 1.0]
    assert float(auto.mu[0]) == world**-0.5
    for fixed in (pre, post):
        before = fixed.mu.clone()
        fixed.update(every, torch.ones(2), torch.ones(2, dtype=torch.bool))
        assert torch.equal(fixed.mu, before)


def test_a_step_that_is_not_finite_leaves_mu(seed):
    scale = AutoScale(["a", "b"], 4)
    before = scale.mu.clone()
    scale.update(torch.tensor([0, 1]), torch.tensor([1.0, 1.0]), torch.tensor([False, True]))
    assert scale.mu.tolist() == [before[0].item(), before[1].item() / 2]
    assert scale.ratio.tolist() == [0.0, 1.0]


def test_D8_the_floor_is_reported():
    scale = AutoScale(["a", "b"], 4)
    for _ in range(200):
        scale.update(torch.tensor([1]), torch.tensor([0.5]), torch.tensor([True]))
    report = scale.report()
    assert report["b"]["mu"] == lowest_mu(4) and report["b"]["floor_steps"] > 190
    assert report["a"] == {"mu": 0.5, "saturated": 0.0, "floor_steps": 0}


def test_state_goes_to_another_number_of_ranks():
    old = AutoScale(["a", "b"], 128)
    for _ in range(20):
        old.update(torch.tensor([0]), torch.tensor([0.5]), torch.tensor([True]))
    state = {key: value.clone() for key, value in old.state_dict().items()}
    same = AutoScale(["a", "b"], 128)
    same.load_state_dict(state)
    assert torch.equal(same.mu, old.mu) and torch.equal(same.floor_steps, old.floor_steps)
    fewer = AutoScale(["a", "b"], 2)
    fewer.load_state_dict(state)
    assert fewer.mu.tolist() == [lowest_mu(2), lowest_mu(2)]
    with pytest.raises(ValueError, match="a/mu is 0"):
        fewer.load_state_dict({**state, "a/mu": torch.zeros(())})


@pytest.mark.parametrize("wrong", [{"threshold": -1e-5}, {"threshold": float("nan")}, {"period": 0}])
def test_refuses_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match="threshold"):
        AutoScale(["a"], 2, **wrong)


def test_refuses_an_unknown_strategy():
    with pytest.raises(ValueError, match="'mean': use one of auto, pre, post"):
        AutoScale(["a"], 2, strategy="mean")
