"""What the algorithms and strategies lose, measured where the number of ranks needs no processes."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.distributed.autoscale import AutoScale
from octavo.distributed.emulate import reduce_emulated


def heavy_tailed(world: int, size: int = 20_000, common: float = 0.0) -> list[torch.Tensor]:
    """Gradients whose magnitudes span many octaves, partly common to all ranks."""
    spread = torch.exp2(torch.randn(size) * 2.5)
    shared = torch.randn(size)
    return [(common * shared + torch.randn(size)) * spread for _ in range(world)]


@pytest.mark.parametrize("world", [2, 4, 128])
def test_two_shot_rounds_twice_whatever_the_number_of_ranks(world, seed):
    reduced = reduce_emulated([torch.randn(50_000) for _ in range(world)])
    assert 28.0 < reduced.snr_db < 28.8  # two roundings to E4M3 of a Gaussian; one is 31.5 dB
    assert float(reduced.overflow) == 0


def test_a_ring_loses_with_every_hop(seed):
    snr = {world: reduce_emulated([torch.randn(20_000) for _ in range(world)], "nccl").snr_db for world in (2, 4, 32)}
    assert snr[2] > snr[4] > snr[32] + 5
    assert snr[32] < reduce_emulated([torch.randn(20_000) for _ in range(32)]).snr_db - 8


def test_hierarchical_rounds_once_more(seed):
    gradients = [torch.randn(20_000) for _ in range(16)]
    flat, levels = reduce_emulated(gradients), reduce_emulated(gradients, "hierarchical", node_size=4)
    assert flat.snr_db - 2.5 < levels.snr_db < flat.snr_db


def test_strategies_trade_underflow_for_overflow(seed):
    gradients = heavy_tailed(64, common=0.3)
    pre, post, auto = (reduce_emulated(gradients, "nccl", strategy) for strategy in ("pre", "post", "auto"))
    assert float(pre.underflow) > float(auto.underflow) > float(post.underflow)
    assert float(post.overflow) > 0 and float(pre.overflow) == 0


def test_mu_finds_a_place_without_overflow(seed):
    """Gradients common to all ranks add up to N times their size: µ has to fall from 1/√N, and then stays."""
    gradients = heavy_tailed(16, common=10.0)
    scale, every = AutoScale(["g"], 16, period=50), torch.tensor([0])
    for _ in range(12):
        reduced = reduce_emulated(gradients, "nccl", mu=scale.mu[0])
        scale.update(every, reduced.overflow.view(1), torch.tensor([True]))
    assert scale.mu[0] < 0.25 and float(reduced.overflow) <= 1e-4


@pytest.mark.parametrize("strategy", ["pre", "post", "auto"])
@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "hierarchical", "bf16", "fp32"])
def test_G4_the_mean_is_a_mean(algorithm, strategy, seed):
    """Equal gradients: the averaging factor is exact, µ and N are divided out."""
    for world in (2, 4, 6):
        gradient = torch.randn(3000) * 1e-3
        reduced = reduce_emulated([gradient] * world, algorithm, strategy, mu=0.3 / world, node_size=2)
        saturates = algorithm == "nccl" and strategy == "post"  # as Eq. 2 does
        ratio = float(reduced.mean.dequantize().norm() / gradient.norm())
        assert ratio == pytest.approx(1, abs=0.02) or (saturates and ratio < 0.98 and float(reduced.overflow) > 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "hierarchical", "bf16", "fp32"])
def test_what_is_not_finite_shows(algorithm, bad, seed):
    gradients = [torch.randn(300) for _ in range(4)]
    gradients[2][17] = bad
    mean = reduce_emulated(gradients, algorithm, node_size=2).mean
    assert mean.dequantize().isnan().all() and mean.scale.item() == 1.0


def test_zeros_of_some_ranks_cost_no_resolution(seed):
    gradients = [torch.zeros(500), torch.randn(500) * 1e-8, torch.zeros(500)]
    assert reduce_emulated(gradients).snr_db > 28
    assert reduce_emulated([torch.zeros(5)] * 3).mean.dequantize().abs().sum() == 0


def test_wrong_arguments():
    with pytest.raises(ValueError, match="two_shot"):
        reduce_emulated([torch.ones(2)], "ring")
    with pytest.raises(ValueError, match="node_size"):
        reduce_emulated([torch.ones(2)] * 3, "hierarchical", node_size=2)
    for wrong in ({"strategy": "mean"}, {"mu": 0.0}, {"mu": 2}):
        with pytest.raises(ValueError, match="mean|mu is"):
            reduce_emulated([torch.ones(2)] * 3, "nccl", **wrong)
    for gradients in ([], [torch.ones(2), torch.ones(3)]):
        with pytest.raises(ValueError, match="one shape is needed"):
            reduce_emulated(gradients)
