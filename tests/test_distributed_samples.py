"""What a sample says of a reduction is what a comparison by hand says, and taking it changes no gradient."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from distributed import (
    batch,
    build,
    gradient_bits,
    gradients,
    local_gradients,
    loss_of,
    mean_gradients,
    snr_db,
    variant,
)

from octavo import DataParallel


def measures(seed: int, algorithm: str, micro_batches: int):
    rank = dist.get_rank()
    results = []
    for sampled in (False, True):
        model = DataParallel(build(seed, variant("O2", grad_reduce=algorithm)), bucket_mb=0.004)
        for micro in range(micro_batches - 1):
            with model.no_sync():
                (loss_of(model, batch(seed + micro, rank)) / micro_batches).backward()
        loss = loss_of(model, batch(seed + micro_batches - 1, rank)) / micro_batches
        if sampled:
            with model.measure() as found:
                loss.backward()
        else:
            loss.backward()
        results.append(gradient_bits(model))
    assert results[0] == results[1]
    assert model.wire["samples"] > 0
    return found, gradients(model)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("algorithm", ["two_shot", "nccl"])
def test_samples_are_true(algorithm, micro_batches, seed):
    world = 3
    exact = mean_gradients(local_gradients(seed, world, micro_batches=micro_batches))
    for found, gradient in ranks.run(world, measures, seed, algorithm, micro_batches):
        assert set(found) == {"1.weight", "3.weight", "5.weight", "7.weight"}
        for name, loss in found.items():
            assert loss.snr_db == pytest.approx(snr_db(gradient[name], exact[name]), abs=0.01)
            assert 0 <= loss.underflow < 0.5 and 0 <= loss.overflow < 0.1


def one_rank(seed: int) -> None:
    model = DataParallel(build(seed), group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    with model.measure() as found:
        loss_of(model, batch(seed)).backward()
    assert found == {}


def test_one_rank_loses_nothing(seed):
    ranks.run(2, one_rank, seed)
    assert torch.is_grad_enabled()
