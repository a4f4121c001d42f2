"""Collectives count what they send, move codes as bytes and never sum them as bytes."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

from octavo.distributed.collectives import Ranks
from octavo.formats import E4M3, E5M2


def moves_codes():
    group = Ranks()
    rank, world = group.rank, group.world
    codes = torch.arange(world * 2, dtype=torch.uint8).add_(16 * rank).view(E4M3.dtype)
    out = torch.empty_like(codes)
    group.all_to_all(out, codes, "codes")
    wanted = [16 * source + 2 * rank + i for source in range(world) for i in range(2)]
    assert out.view(torch.uint8).tolist() == wanted
    whole = torch.empty(world, dtype=E5M2.dtype)
    group.all_gather(whole, torch.full((1,), rank, dtype=torch.uint8).view(E5M2.dtype), "codes")
    assert whole.view(torch.uint8).tolist() == list(range(world))
    value = torch.tensor([float(rank)]).to(E4M3.dtype)
    group.broadcast(value, "codes", source=world - 1)
    assert value.float().item() == world - 1
    numbers = torch.tensor([float(rank), -float(rank)])
    group.all_reduce(numbers, dist.ReduceOp.MIN, "numbers")
    assert numbers.tolist() == [0.0, 1.0 - world]
    return dict(group.wire)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_counted_by_kind(world):
    share = world - 1
    for wire in ranks.run(world, moves_codes):
        assert wire == {"codes": 2 * share + share + share // world, "numbers": 2 * 8 * share // world}


def refuses_byte_sums():
    for dtype in (E4M3.dtype, E5M2.dtype):
        x = torch.ones(4).to(dtype)
        with pytest.raises(ValueError, match="two_shot"):
            Ranks().all_reduce(x, dist.ReduceOp.SUM, "codes")
        assert x.float().tolist() == [1.0] * 4


def test_G7_fp8_is_never_summed_as_bytes():
    ranks.run(2, refuses_byte_sums)
