"""`DataParallel` where something goes wrong: errors in backward, wrappers around wrappers, groups and models that do not fit."""

from __future__ import annotations

import time

import pytest
import ranks
import torch
import torch.distributed as dist
from distributed import batch, build, gradient_bits, loss_of, variant
from torch import nn

from octavo import DataParallel
from octavo.convert import convert
from octavo.distributed.collectives import backend_of
from octavo.tensor import uncast


def goes_on_with_the_same_graph(seed: int) -> None:
    """A second backward through a graph whose first one failed, without a forward between them, is reduced as any other."""
    rank = dist.get_rank()
    for bucket_mb in (1e-4, 5.0):  # when it fails, some buckets have been sent, or none
        model = DataParallel(build(seed), bucket_mb=bucket_mb)
        reduce, failed = model._reduction.reduce, []

        def slow(bucket, reduce=reduce):
            time.sleep(0.05)
            reduce(bucket)

        def fail_once(grad, failed=failed):
            if not failed:
                failed.append(True)
                raise MemoryError("too large")

        model._reduction.reduce = slow
        model.module[5].register_forward_hook(lambda _, __, output, fail=fail_once: output.register_hook(fail) and None)
        loss = loss_of(model, batch(seed, rank))
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        fresh = DataParallel(build(seed), bucket_mb=bucket_mb)
        loss_of(fresh, batch(seed, rank)).backward()
        assert gradient_bits(model) == gradient_bits(fresh)


def test_backward_again_after_an_error_is_reduced(seed):
    ranks.run(2, goes_on_with_the_same_graph, seed)


def test_ranks_without_a_process_group_are_refused(seed, monkeypatch):
    """Each would train by itself, and nothing would say so."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        DataParallel(build(seed))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DataParallel(build(seed)).world == 1


def wraps_outside_of_the_group(seed: int) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        loss_of(DataParallel(build(seed), group=group), batch(seed)).backward()
    else:
        with pytest.raises(ValueError, match="rank 2 is not in the group"):
            DataParallel(build(seed), group=group)


def test_a_rank_outside_of_the_group_is_told(seed):
    ranks.run(3, wraps_outside_of_the_group, seed)
    ranks.forget(3)


def test_a_wrapper_inside_of_another_is_refused(seed):
    with pytest.raises(ValueError, match="wrapped already"):
        DataParallel(nn.Sequential(DataParallel(build(seed)), nn.Linear(32, 4)))


def test_a_module_that_holds_a_wrapper_loads_its_own_state(seed):
    def held(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict({"net": DataParallel(build(seed)), "head": nn.Linear(32, 4)})

    first, second = held(seed), held(seed + 1)
    assert "net.1.weight" in first.state_dict()
    second.load_state_dict(first.state_dict(), strict=True)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    state = first.state_dict()
    del state["net.1.bias"]
    with pytest.raises(RuntimeError, match="Missing key.*net.*1.bias"):
        second.load_state_dict(state)


def wraps_again(seed: int) -> None:
    rank = dist.get_rank()
    module = build(seed)
    old = DataParallel(module, bucket_mb=0.001)
    loss_of(old, batch(seed + 1, rank)).backward()
    module.zero_grad()
    new = DataParallel(module, bucket_mb=0.001)
    with new.no_sync():
        loss_of(new, batch(seed, rank)).backward()
    alone = build(seed)
    loss_of(alone, batch(seed, rank)).backward()
    assert gradient_bits(module) == gradient_bits(alone)  # nobody else has averaged them
    with pytest.raises(RuntimeError, match="a newer DataParallel"):
        old(batch(seed, rank)[0])
    module.zero_grad()
    sent = dict(old.wire)
    loss_of(new, batch(seed, rank)).backward()
    fresh = DataParallel(build(seed), bucket_mb=0.001)
    loss_of(fresh, batch(seed, rank)).backward()
    assert gradient_bits(new) == gradient_bits(fresh) and old.wire == sent


def test_a_newer_wrapper_takes_the_place_of_an_older_one(seed):
    ranks.run(2, wraps_again, seed)


def wraps_after_groups_of_some_ranks(seed: int):
    """Ranks 0 and 1 have a model of their own first, and so more process groups than rank 2."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    if rank < 2:
        own = DataParallel(build(seed), group=pair, timeout=20)
        loss_of(own, batch(seed, rank)).backward()
    model = DataParallel(build(seed), timeout=20)
    loss_of(model, batch(seed, rank)).backward()
    return gradient_bits(model)


def test_ranks_may_have_made_different_numbers_of_groups(seed):
    results = ranks.run(3, wraps_after_groups_of_some_ranks, seed)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl", "cpu", None),
    ],
)
def test_the_backend_is_that_of_the_device(config, device, backend, monkeypatch):
    """`init_process_group()` without a name has NCCL for GPUs and gloo for the rest, and calls itself undefined."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_of(None, torch.device(device)) == backend


def averages_large_fp16(algorithm: str) -> list[float]:
    """The mean of gradients whose sum FP16 cannot hold."""
    model = DataParallel(nn.Linear(4, 3).half(), recipe=variant("bf16", grad_reduce=algorithm))
    model.module.bias.register_hook(lambda grad: torch.full_like(grad, 40000.0 + 64 * dist.get_rank()))
    model(torch.ones(2, 4, dtype=torch.float16)).float().sum().backward()
    return model.module.bias.grad.tolist()


@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "fp32"])
def test_a_mean_in_fp16_overflows_no_earlier_than_its_value(algorithm):
    for mean in ranks.run(2, averages_large_fp16, algorithm):
        assert mean == [40032.0] * 3


def sends_expanded_buffers() -> list[float]:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((1, 3), float(dist.get_rank() + 1)).expand(4, 3))
    return DataParallel(model).module.mask.flatten().tolist()


def test_expanded_buffers_are_sent():
    assert ranks.run(2, sends_expanded_buffers) == [[1.0] * 12] * 2


def wraps_complex_parameters() -> None:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="phase is torch.complex64: .*view_as_real"):
        DataParallel(model)


def test_complex_parameters_are_refused():
    ranks.run(2, wraps_complex_parameters)


def assigns_plain_gradients(seed: int):
    """A user replaces an FP8 gradient by a plain one, and the next backward does not add to it."""
    rank = dist.get_rank()
    model = DataParallel(build(seed))
    loss_of(model, batch(seed, rank)).backward()
    weight = model.module[1].weight
    weight.grad = torch.full(weight.shape, 1.0 + rank)
    model.module[8].weight.grad = None
    model.module[8](torch.ones(2, 32)).sum().backward()
    assert uncast(weight.grad).unique().tolist() == [1.5]
    return gradient_bits(model)


def test_a_plain_gradient_of_a_converted_weight_is_reduced(seed):
    results = ranks.run(2, assigns_plain_gradients, seed)
    assert results[0] == results[1]


def differentiates_on_one_rank(seed: int):
    rank = dist.get_rank()
    model = DataParallel(build(seed), timeout=10)
    if rank == 0:
        with model.no_sync():
            torch.autograd.grad(loss_of(model, batch(seed)), [model.module[1].bias])
    loss_of(model, batch(seed, rank)).backward()
    return gradient_bits(model)


def test_autograd_grad_of_one_rank_needs_no_other_inside_no_sync(seed):
    results = ranks.run(2, differentiates_on_one_rank, seed)
    assert results[0] == results[1]


def converts_after_wrapping() -> None:
    """The only gradient of a bucket is still plain when it is sent, and stored in FP8 afterwards."""
    for recipe in ("O1", "O2"):
        model = DataParallel(nn.Sequential(nn.Linear(32, 64, bias=False)))
        convert(model, recipe)
        with pytest.raises(ValueError, match="convert the model before wrapping it"):
            model(torch.ones(2, 32)).sum().backward()


def test_a_model_that_is_converted_when_it_is_wrapped_is_refused():
    ranks.run(2, converts_after_wrapping)


def assigns_through_a_parent(seed: int) -> None:
    parent = nn.ModuleDict({"net": DataParallel(build(seed))})
    with pytest.raises(ValueError, match="load before wrapping"):
        parent.load_state_dict(parent.state_dict(), assign=True)


def test_a_module_that_holds_a_wrapper_cannot_replace_its_parameters(seed):
    ranks.run(2, assigns_through_a_parent, seed)
