"""Every algorithm, on real processes, equals its emulation in one process bit for bit, at any world size and tensor size."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

from octavo.distributed.algorithms import hierarchical, nccl, plain_mean, two_shot
from octavo.distributed.codes import rescale
from octavo.distributed.collectives import Ranks
from octavo.distributed.emulate import reduce_emulated
from octavo.distributed.layout import Layout
from octavo.distributed.scales import local_scales, mean_scale, shared_scales
from octavo.formats import E4M3
from octavo.linear import scaled_gradient
from octavo.tensor import ScaledTensor

SIZES = [1, 7, 255, 256, 4097]


def gradients(world: int, seed: int, size: int) -> list[torch.Tensor]:
    """One gradient for each rank, of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed + size)
    return [torch.randn(size, generator=generator) * 10.0 ** (rank % 3 - 4) for rank in range(world)]


def reduce_in_one_bucket(grads: list[ScaledTensor], algorithm: str, factor: float) -> list[ScaledTensor]:
    """What a reducer does with a bucket, by hand."""
    group = Ranks()
    if algorithm == "hierarchical":
        size = 2
        nodes = [list(range(i, i + size)) for i in range(0, group.world, size)]
        made = [dist.new_group(r) for r in [*nodes, *map(list, zip(*nodes, strict=True))]]
        own = [Ranks(g) for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER]
        function = hierarchical(*own)
    else:
        function = {"two_shot": two_shot, "nccl": nccl}[algorithm]
    layout = Layout([grad.shape for grad in grads], group.world)
    codes = layout.zeros(E4M3.dtype)
    torch._foreach_copy_(layout.views(codes.view(torch.uint8)), [grad.codes.view(torch.uint8) for grad in grads])
    stored = torch.stack([grad.scale for grad in grads])
    amax = torch.stack([grad.codes.float().abs().amax() for grad in grads]) / stored
    scales = local_scales(amax)
    group.all_reduce(scales, dist.ReduceOp.MIN, "scales")
    multiplier = shared_scales(scales).scale * factor
    codes = rescale(codes, None, layout.spread(multiplier / stored))
    gain = function(codes, layout, group)
    scale = mean_scale(multiplier, gain, group.world)
    return [ScaledTensor(view.clone(), s.clone()) for view, s in zip(layout.views(codes), scale, strict=True)]


def equals_emulation(seed: int, algorithm: str, alone: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [scaled_gradient(gradients(world, seed, size)[rank], torch.float32) for size in SIZES]
    batches = [[grad] for grad in mine] if alone else [mine]
    results = [result for batch in batches for result in reduce_in_one_bucket(batch, algorithm, 0.5)]
    for size, result in zip(SIZES, results, strict=True):
        wanted = reduce_emulated(gradients(world, seed, size), algorithm, mu=0.5, node_size=2).mean
        assert torch.equal(result.codes.view(torch.uint8), wanted.codes.view(torch.uint8)), (algorithm, size)
        assert torch.equal(result.scale, wanted.scale), (algorithm, size)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_two_shot_equals_the_emulation_in_any_bucket(world, seed):
    ranks.run(world, equals_emulation, seed, "two_shot", False)
    ranks.run(world, equals_emulation, seed, "two_shot", True)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_nccl_without_fp8_sums_equals_the_ring_hop_by_hop(world, seed):
    ranks.run(world, equals_emulation, seed, "nccl", True)


def test_hierarchical_equals_its_emulation(seed):
    ranks.run(4, equals_emulation, seed, "hierarchical", False)


def mean_of_real_values(seed: int, dtype: torch.dtype) -> None:
    group = Ranks()
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(group.world * 5, generator=generator).to(dtype) for _ in range(group.world)]
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    ordered = values[group.rank].clone()
    plain_mean(ordered, group, in_rank_order=True)
    assert torch.equal(ordered, (total / group.world).to(dtype))
    backend = values[group.rank].clone()
    plain_mean(backend, group, in_rank_order=False)
    torch.testing.assert_close(backend, ordered, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [3, 4])
def test_mean_of_plain_gradients_is_rounded_once(world, dtype, seed):
    ranks.run(world, mean_of_real_values, seed, dtype)
