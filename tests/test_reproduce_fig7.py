"""Losses are counted as defined, µ settles where Eq. 3 takes it, and blocks pool their matrices."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import pytest
import torch

from octavo.distributed.autoscale import lowest_mu
from octavo.distributed.emulate import reduce_emulated
from octavo.formats import E4M3
from octavo.linear import scaled_gradient
from octavo.reproduce.fig7 import (
    ALGORITHMS,
    SATURATING,
    STRATEGIES,
    Loss,
    by_block,
    format_claims,
    format_table,
    measure,
    reduce,
    settle,
    write_csv,
)
from octavo.reproduce.figures import plot_fig7
from octavo.reproduce.gradients import RankGradients


def gradients_of(world: int, size: int = 6000, common: float = 0.3, block: int = 0, name: str = "w") -> RankGradients:
    """Magnitudes over many octaves, partly common to all ranks, some of them zero."""
    spread = torch.exp2(torch.randn(size) * 3)
    shared = torch.randn(size)
    real = [(common * shared + torch.randn(size)) * spread * (torch.rand(size) > 0.1) for _ in range(world)]
    stored = [scaled_gradient(g, torch.float32) for g in real]
    nonzero = sum(int(g.count_nonzero()) for g in real)
    flushed = sum(int(((g != 0) & (s.dequantize() == 0)).sum()) for g, s in zip(real, stored, strict=True))
    return RankGradients(name, block, stored, torch.stack(real).mean(0), nonzero, flushed)


@pytest.mark.parametrize("world", [2, 6, 16])
def test_losses_are_those_of_the_definitions(world, seed):
    gradients = gradients_of(world)
    losses = list(measure(gradients))
    assert [(loss.algorithm, loss.strategy) for loss in losses] == [(a, s) for a in ALGORITHMS for s in STRATEGIES]
    real = [g.dequantize() for g in gradients.stored]
    shared = min(2.0 ** math.floor(math.log2(448 / float(g.abs().max()))) for g in real)
    for loss in losses:
        sent = [(g * shared * loss.mu).to(E4M3.dtype).float() for g in real]
        flushed = sum(int(((g != 0) & (s == 0)).sum()) for g, s in zip(real, sent, strict=True))
        assert (loss.sent, loss.flushed) == (gradients.nonzero, gradients.flushed + flushed)
        if loss.algorithm == "one_cast":
            total = torch.stack(sent).double().sum(0).clamp(-448, 448).float().to(E4M3.dtype).double()
            mean = total / (world * shared * loss.mu)
            assert loss.saturated == int((total.abs() == 448).sum())
        else:
            mean = reduce_emulated(gradients.stored, loss.algorithm, "auto", mu=loss.mu).mean.dequantize().double()
        exact = gradients.mean.double()
        snr = 10 * math.log10(float(exact.square().sum() / (mean - exact).square().sum()))
        assert loss.snr_db == pytest.approx(snr, abs=1e-4)  # means in FP32: 6e-8 of a value beside an error of 4%
        assert loss.summed == exact.numel() and 0 <= loss.saturated <= loss.summed


def test_strategies_have_their_mu(seed):
    for loss in measure(gradients_of(8, 500)):
        if loss.strategy == "pre":
            assert loss.mu == 1 / 8
        elif loss.strategy == "post" or loss.algorithm == "two_shot":
            assert loss.mu == 1
        if loss.algorithm == "two_shot":
            assert loss.saturated == 0


@pytest.mark.parametrize("common", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("world", [3, 16])
def test_mu_settles_at_the_largest_power_of_two_that_is_allowed(world, common, seed):
    stored, threshold = gradients_of(world, common=common).stored, 1e-3
    for algorithm in SATURATING:
        at = functools.partial(reduce, stored, algorithm)
        mu = settle(at, world, threshold)
        assert math.log2(mu).is_integer() and lowest_mu(world) <= mu <= 1
        assert float(at(mu).overflow) <= threshold or mu == lowest_mu(world)
        assert mu == 1 or float(at(2 * mu).overflow) > threshold


def test_two_ranks_make_one_hop(seed):
    stored = gradients_of(2).stored
    for mu in (1.0, 0.25):
        one, ring = (reduce(stored, algorithm, mu) for algorithm in SATURATING)
        assert torch.equal(one.mean, ring.mean) and float(one.underflow) == pytest.approx(float(ring.underflow))
        assert float(one.overflow) == pytest.approx(float(ring.overflow))


def test_what_mu_is_for(seed):
    """Auto-scaling keeps what pre-scaling flushes, as far as nothing saturates, where post-scaling does."""
    found = {loss.strategy: loss for loss in measure(gradients_of(64, common=0.5)) if loss.algorithm == "one_cast"}
    pre, post, auto = (found[strategy] for strategy in STRATEGIES)
    assert pre.flushed >= auto.flushed > post.flushed and pre.saturated == auto.saturated == 0 < post.saturated
    assert auto.noise <= 1.01 * pre.noise and auto.noise < post.noise


def test_blocks_pool_their_matrices(seed):
    parts = [gradients_of(4, 400, block=b, name=f"blocks.{b}.{n}") for b in (0, 1, 10) for n in ("a", "b")]
    losses = [loss for gradients in parts for loss in measure(gradients)]
    blocks = by_block(losses)
    assert len(blocks) == 3 * len(ALGORITHMS) * len(STRATEGIES)
    for whole in blocks:
        own = [
            x for x in losses if (x.block, x.algorithm, x.strategy) == (whole.block, whole.algorithm, whole.strategy)
        ]
        assert len(own) == 2
        assert whole.snr_db == pytest.approx(10 * math.log10(sum(x.signal for x in own) / sum(x.noise for x in own)))
        assert whole.underflow == sum(x.flushed for x in own) / sum(x.sent for x in own)
        assert whole.overflow == sum(x.saturated for x in own) / sum(x.summed for x in own)
        assert math.log2(whole.mu) == pytest.approx(sum(math.log2(x.mu) for x in own) / 2)
    assert [x.block for x in blocks[:3]] == [0, 1, 10]


def test_no_noise_is_infinite_snr():
    assert Loss(0, "w", "nccl", "auto", 1.0, 2.0, 0.0, 0, 0, 0, 0).snr_db == math.inf
    nothing = Loss(0, "w", "nccl", "auto", 1.0, 0.0, 1.0, 0, 0, 0, 0)
    assert nothing.snr_db == -math.inf and nothing.underflow == nothing.overflow == 0


def test_table_claims_files(seed, tmp_path: Path):
    pytest.importorskip("matplotlib")
    blocks = by_block(loss for b in range(2) for loss in measure(gradients_of(4, 300, block=b)))
    table = format_table(blocks)
    assert table.count("\n") == len(ALGORITHMS) * len(STRATEGIES) and "SNR 150-200" in table
    best = sum(
        snr["auto"] >= max(snr.values())
        for b in range(2)
        for snr in [{x.strategy: x.snr_db for x in blocks if x.block == b and x.algorithm == "nccl"}]
    )
    assert f"nccl: auto-scaling has the best SNR in {best} of 2 blocks" in format_claims(blocks)
    write_csv(tmp_path / "fig7.csv", blocks)
    with open(tmp_path / "fig7.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["snr_db"]) for row in rows] == [pytest.approx(x.snr_db, rel=1e-5) for x in blocks]
    plot_fig7(tmp_path / "fig7.png", blocks, "title")
    assert (tmp_path / "fig7.png").read_bytes().startswith(b"\x89PNG")
