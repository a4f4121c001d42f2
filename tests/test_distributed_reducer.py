"""`DataParallel`: the mean gradient on every rank, in FP8, whatever the model does with its parameters."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import ranks
import torch
import torch.distributed as dist
from distributed import (
    WIDTH,
    batch,
    bits,
    build,
    gradient_bits,
    gradients,
    local_gradients,
    loss_of,
    mean_gradients,
    model_bits,
    optimizer_of,
    snr_db,
    variant,
)
from fp8_layers import on_stream
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import DataParallel
from octavo.convert import convert
from octavo.distributed import CollectiveError
from octavo.distributed.emulate import reduce_emulated
from octavo.distributed.replicas import CHECKS, PARAMETERS
from octavo.formats import E4M3, NumericsError
from octavo.kernels import streams
from octavo.linear import FP8Linear
from octavo.optim import clip_grad_norm_
from octavo.tensor import ScaledTensor, cast, uncast


def everywhere(world: int, function, *arguments) -> object:
    """The result of every rank, which must be the same."""
    results = ranks.run(world, function, *arguments)
    assert all(result == results[0] for result in results), "the ranks differ"
    return results[0]


# --- the mean


def train_from_different_seeds(seed: int, recipe, steps: int = 3):
    rank = dist.get_rank()
    model = DataParallel(build(seed + rank, recipe), bucket_mb=0.002)
    optimizer = optimizer_of(model, recipe)
    for step in range(steps):
        loss_of(model, batch(seed + step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert int(optimizer.skipped_steps) == int(model.nonfinite_steps) == 0
    return model_bits(model)


@pytest.mark.parametrize("recipe", ["O2", "O1", "bf16", "paper"])
def test_F20_ranks_from_different_seeds_start_and_stay_equal(recipe, seed):
    everywhere(3, train_from_different_seeds, seed, recipe)


def sends_scales_and_histories(seed: int):
    rank = dist.get_rank()
    recipe = variant("O2", scaling="delayed")
    inner = build(seed + rank, recipe)
    inner.register_buffer("table", torch.randn(5, 3).t() + rank)
    loss_of(inner, batch(seed, rank)).backward()
    for layer in inner.modules():
        if isinstance(layer, FP8Linear):
            layer.update_scaling()
    model = DataParallel(inner)
    state = [
        value.numpy().tobytes()
        for layer in inner.modules()
        if isinstance(layer, FP8Linear)
        for scaling in (layer.input_scaling, layer.grad_output_scaling)
        for value in scaling.state_dict().values()
    ]
    return model_bits(model), bits(inner.table), state


def test_buffers_and_delayed_scales_are_those_of_the_first_rank(seed):
    everywhere(2, sends_scales_and_histories, seed)


def reduced(seed: int, recipe, micro_batches: int = 1, bucket_mb: float = 0.002, **options):
    rank = dist.get_rank()
    model = DataParallel(build(seed, recipe), bucket_mb=bucket_mb, **options)
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with torch.enable_grad() if last else model.no_sync():
            (loss_of(model, batch(seed + micro, rank)) / micro_batches).backward()
    for param in model.parameters():
        if isinstance(param.grad, ScaledTensor):
            assert param.grad.residual is None  # 1 byte a parameter is left
    assert not any(bucket.grads or bucket.kept for bucket in model._buckets)
    return gradient_bits(model), gradients(model), dict(model.wire)


def worst_snr(found: dict, wanted: dict) -> float:
    return min(snr_db(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("algorithm", "world", "least"),
    [
        ("two_shot", 2, 25),
        ("two_shot", 4, 25),
        ("two_shot", 7, 25),
        ("hierarchical", 4, 23),
        ("nccl", 3, 20),
        ("bf16", 3, 25),
        ("fp32", 3, 25),
    ],
)
def test_G4_gradients_are_the_mean(algorithm, world, least, seed):
    recipe = variant("O2", grad_reduce=algorithm)
    options = {"node_size": 2} if algorithm == "hierarchical" else {}
    wanted = mean_gradients(local_gradients(seed, world, recipe))
    results = (
        ranks.run(world, reduced, seed, recipe, 1, 0.002, *[])
        if not options
        else ranks.run(world, reduced_in_nodes, seed, recipe)
    )
    assert all(result[0] == results[0][0] for result in results)
    found = results[0][1]
    assert worst_snr(found, wanted) > least
    norms = [torch.stack([g[name].double().norm() for name in wanted]).norm() for g in (found, wanted)]
    assert 0.98 < float(norms[0] / norms[1]) < 1.02


def reduced_in_nodes(seed: int, recipe):
    return reduced(seed, recipe, node_size=2)


def test_G5_bits_do_not_depend_on_the_bucket_size(seed):
    """1 KB, a few tensors, everything; and they are those of the emulation in one process."""
    world = 3
    results = [ranks.run(world, reduced, seed, "O2", 2, size) for size in (1e-3, 0.004, 5.0)]
    first = results[0][0][0]
    assert all(result[0] == first for run in results for result in run)
    locals_ = []
    for rank in range(world):
        model = build(seed)
        for micro in range(2):
            (loss_of(model, batch(seed + micro, rank)) / 2).backward()
        locals_.append([p.grad for p in model.parameters()])
    for i, stored in enumerate(zip(*locals_, strict=True)):
        if isinstance(stored[0], ScaledTensor):
            assert stored[0].residual is not None
            assert bits(reduce_emulated(stored).mean) == first[i]


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_E10_all_micro_batches_are_reduced(recipe, seed):
    wanted = mean_gradients(local_gradients(seed, 2, "bf16", micro_batches=4))
    exact = mean_gradients(local_gradients(seed, 2, recipe, micro_batches=4))
    found = ranks.run(2, reduced, seed, recipe, 4)[0][1]
    assert worst_snr(found, exact) > 25
    assert (
        worst_snr(found, wanted) > 13
    )  # with FP8 GEMMs on the one side; one of four micro-batches lost leaves 12 at best


def sent_bytes(algorithm: str) -> dict[str, int]:
    model = DataParallel(
        convert(
            nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))), variant("O2", grad_reduce=algorithm)
        )
    )
    model(torch.randn(4, 256)).sum().backward()
    return dict(model.wire)


def test_wire_bytes_of_converted_weights_are_a_quarter():
    sent = {name: ranks.run(4, sent_bytes, name)[0] for name in ("two_shot", "nccl", "bf16", "fp32")}
    for name, share in (("two_shot", 0.25), ("nccl", 0.25), ("bf16", 0.5)):
        assert sent[name]["gradients"] / sent["fp32"]["gradients"] == pytest.approx(share, abs=0.01)
    assert sent["two_shot"]["scales"] == 2 * sent["nccl"]["scales"] < 1e-3 * sent["two_shot"]["gradients"]


# --- which parameters have gradients


class Branches(nn.Module):
    """Three layers of which a call uses some; one is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        for number in use:
            x = self.layers[number](x)
        return x


def branches(seed: int, recipe, use: list[list[int]], algorithm: str = "two_shot"):
    rank = dist.get_rank()
    torch.manual_seed(seed)
    recipe = variant(recipe, grad_reduce=algorithm)
    model = DataParallel(convert(Branches(), recipe), bucket_mb=0.001)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank + seed))
    model(x, use[rank]).square().mean().backward()
    return gradient_bits(model), gradients(model)


@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "fp32"])
@pytest.mark.parametrize("recipe", ["O1", "O2", "bf16"])
def test_G12_a_rank_without_a_gradient_counts_as_zero(recipe, algorithm, seed):
    use = [[0, 1], [0], [0]]
    results = ranks.run(3, branches, seed, recipe, use, algorithm)
    assert all(result[0] == results[0][0] for result in results)
    found = results[0][1]
    assert found["layers.2.weight"] is None and found["layers.2.bias"] is None  # used by nobody: as without the wrapper
    torch.manual_seed(seed)
    model = convert(Branches(), recipe if recipe != "bf16" else "bf16")
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x, use[0]).square().mean().backward()
    alone = gradients(model)
    for name in ("layers.1.weight", "layers.1.bias"):
        assert snr_db(found[name], alone[name] / 3) > (18 if algorithm == "nccl" else 25)


def test_shared_layers_and_any_order_of_use(seed):
    everywhere(2, branches_of_every_kind, seed)


def branches_of_every_kind(seed: int):
    results = []
    for recipe in ("O1", "O2"):
        for use in ([0, 1, 2], [2, 1, 0], [0, 1, 0, 1], [2, 2]):
            results.append(branches(seed, recipe, [use] * 2)[0])
    return results


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_ranks_may_use_layers_in_different_orders(recipe, seed):
    results = ranks.run(3, branches, seed, recipe, [[0, 1, 2], [2, 1, 0], [1]])
    assert all(result[0] == results[0][0] for result in results)
    assert all(gradient is not None for gradient in results[0][1].values())


def overlaps(seed: int) -> None:
    """The first layer's backward waits until the last layer's gradient is reduced, which only an overlap lets happen."""
    rank = dist.get_rank()
    model = DataParallel(build(seed), bucket_mb=1e-4)
    reduce, done = model._reduction.reduce, threading.Event()

    def noted(bucket) -> None:
        reduce(bucket)
        done.set()

    model._reduction.reduce = noted
    model.module[1].register_full_backward_hook(lambda *_: seen.append(done.wait(timeout=20)))
    seen: list[bool] = []
    loss_of(model, batch(seed, rank)).backward()
    assert seen == [True]


def test_buckets_are_reduced_beside_backward(seed):
    ranks.run(2, overlaps, seed)


def tied(seed: int, recipe):
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    model = DataParallel(convert(model, recipe))
    assert model.module[2].weight is model.module[0].weight
    model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    return gradient_bits(model)


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_F19_tied_weights_are_reduced_once(recipe, seed):
    everywhere(2, tied, seed, recipe)


def freezes_and_unfreezes(seed: int, recipe):
    rank = dist.get_rank()
    model = DataParallel(build(seed, recipe), bucket_mb=0.002)
    optimizer = optimizer_of(model, recipe)
    before, found = model_bits(model), []
    names = [name for name, _ in model.module.named_parameters()]
    frozen = model.module[1].weight
    for step, trainable in enumerate([True, False, False, True]):
        frozen.requires_grad_(trainable)
        loss_of(model, batch(seed + step, rank)).backward()
        assert (frozen.grad is not None) == trainable
        optimizer.step()
        optimizer.zero_grad()
        after = model_bits(model)
        changed = [name for name, a, b in zip(names, before, after, strict=True) if a != b]
        assert ("1.weight" in changed) == trainable and "3.weight" in changed
        before = after
        found.append(after)
    return found


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_parameters_frozen_and_unfrozen_midway(recipe, seed):
    everywhere(2, freezes_and_unfreezes, seed, recipe)


def keeps_residuals_over_new_buckets(seed: int):
    rank = dist.get_rank()
    results = []
    for freeze in (False, True):
        model = DataParallel(build(seed), bucket_mb=0.001 if freeze else 5)
        other = model.module[3].weight
        with model.no_sync():
            loss_of(model, batch(seed, rank)).backward()
            loss_of(model, batch(seed + 1, rank)).backward()
        if freeze:  # forward with other buckets, and back again
            other.requires_grad_(False)
            model(batch(seed, rank)[0])
            other.requires_grad_(True)
        assert all(p.grad.residual is not None for p in model.parameters() if isinstance(p.grad, ScaledTensor))
        loss_of(model, batch(seed + 2, rank)).backward()
        results.append(gradient_bits(model))
    assert results[0] == results[1]
    return results[0]


def test_E21_residuals_belong_to_parameters_not_to_buckets(seed):
    everywhere(2, keeps_residuals_over_new_buckets, seed)


def burns_in(seed: int):
    rank = dist.get_rank()
    found = []
    for burn in (False, True):
        model = DataParallel(build(seed), bucket_mb=0.002)
        if burn:
            with torch.no_grad():
                loss_of(model, batch(seed + 9, rank))
            loss_of(model, batch(seed + 9, rank))  # a forward whose backward never comes
        loss_of(model, batch(seed, rank)).backward()
        found.append(gradient_bits(model))
    assert found[0] == found[1]
    return found[0]


def test_E22_forwards_without_backward_change_nothing(seed):
    everywhere(2, burns_in, seed)


def frees_gradients(seed: int):
    model = DataParallel(build(seed))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(ValueError, match="was freed before the ranks could average it"):
        loss_of(model, batch(seed)).backward()


def test_gradients_that_are_released_in_backward_are_refused(seed):
    ranks.run(2, frees_gradients, seed)


def waits_for_a_silent_rank(seed: int) -> str:
    """Rank 1 has no backward; rank 0 gives up after its timeout and says what to do."""
    model = DataParallel(build(seed), timeout=1.0)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        loss_of(model, batch(seed)).backward()
    return str(caught.value)


def test_D19_a_silent_rank_is_an_error_and_no_hang(seed):
    message = ranks.run(2, waits_for_a_silent_rank, seed)[0]
    assert "rank 0 of 2" in message and "another rank died, hangs or does other work" in message
    ranks.forget(2)


def sparse(seed: int):
    torch.manual_seed(seed)
    model = DataParallel(nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(ValueError, match="sparse=False"):
        loss_of(model, batch(seed)).backward()


def test_sparse_gradients_are_refused(seed):
    ranks.run(2, sparse, seed)


class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("too large")


def goes_on_after_an_error(seed: int):
    """An error in the middle of backward, on all ranks, and then another batch."""
    rank = dist.get_rank()
    model = DataParallel(build(seed), bucket_mb=0.001)
    with pytest.raises(MemoryError):
        handle = model.module[4].register_forward_hook(lambda module, inputs, output: Interrupts.apply(output))
        loss_of(model, batch(seed, rank)).backward()
    handle.remove()
    model.zero_grad()
    loss_of(model, batch(seed + 1, rank)).backward()
    fresh = DataParallel(build(seed), bucket_mb=0.001)
    loss_of(fresh, batch(seed + 1, rank)).backward()
    assert gradient_bits(model) == gradient_bits(fresh)
    return gradient_bits(model)


def test_an_error_in_backward_leaves_no_trace(seed):
    everywhere(2, goes_on_after_an_error, seed)


# --- accumulation


def accumulates_constants(seed: int):
    """(share of 320 equal gradients that is kept before they are sent, and after; SNR after)."""
    torch.manual_seed(seed)
    model = DataParallel(convert(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), "O2"))
    weight, x = model.module[0].weight, torch.randn(16, WIDTH)

    def kept() -> float:
        return float((uncast(weight.grad, torch.float32) * once).sum() / once.square().sum() / 320)

    model(x).square().sum().backward()
    once = uncast(weight.grad, torch.float32).clone()
    weight.grad = None
    with model.no_sync():
        for _ in range(320):
            model(x).square().sum().backward()
    before = kept()
    (model(x).sum() * 0).backward()
    return before, kept(), snr_db(weight.grad, once * 320)


def test_a_constant_gradient_survives_320_micro_batches(seed):
    for before, after, snr in ranks.run(2, accumulates_constants, seed):
        assert 0.995 < before < 1.005
        # All codes are multiplied by 320 = 2^8 · 1.25 and rounded alike once, when they are sent.
        assert 0.97 < after < 1.03 and snr > 26


def test_sums_rounded_to_nearest_stop_growing(seed):
    """What E4M3 alone keeps of the same constant gradient: the sum stops at 16 times its increment."""
    gradient = torch.randn(WIDTH, WIDTH)
    total = cast(gradient, E4M3)
    for _ in range(319):
        total = cast(uncast(total) + gradient, E4M3)
    kept = float((uncast(total) * gradient).sum() / gradient.square().sum() / 320)
    assert kept < 0.5


def accumulates_noise(seed: int):
    """(SNR of FP32 accumulation, SNR of ours), both against the sum of the unrounded gradients, both cast once to be sent."""
    rank = dist.get_rank()
    model = DataParallel(convert(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), "O2"))
    weight = model.module[0].weight
    total = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for micro in range(64):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed + 1000 * rank + micro))
        with model.no_sync() if micro < 63 else torch.enable_grad():
            held, weight.grad = weight.grad, None
            with model.no_sync():
                model(x).square().sum().backward()
            total += uncast(weight.grad, torch.float32).double()
            weight.grad = held
            model(x).square().sum().backward()
    whole = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, total)
    exact = torch.stack(whole).mean(0)
    in_fp32 = reduce_emulated([part.float() for part in whole]).mean
    return snr_db(in_fp32, exact), snr_db(weight.grad, exact)


def test_64_noisy_micro_batches_are_within_1_db_of_fp32(seed):
    for in_fp32, ours in ranks.run(2, accumulates_noise, seed):
        assert ours > in_fp32 - 1


# --- values that are not finite


def one_rank_is_bad(seed: int, recipe, bad: float, algorithm: str):
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = variant(recipe, grad_reduce=algorithm)
    model = DataParallel(build(seed, recipe), bucket_mb=0.002, node_size=2 if algorithm == "hierarchical" else None)
    optimizer = optimizer_of(model, recipe)
    for step in range(3):
        inputs, targets = batch(seed + step, rank)
        if step == 1 and rank == world - 1:
            targets[3, 5] = bad
        before = model_bits(model)
        loss_of(model, (inputs, targets)).backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert math.isfinite(norm) == (step != 1)
        optimizer.step()
        optimizer.zero_grad()
        assert (model_bits(model) == before) == (step == 1)
    mu = model.autoscale.mu.tolist()
    assert int(optimizer.skipped_steps) == int(model.nonfinite_steps) == 1
    return model_bits(model), mu


@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "hierarchical", "bf16", "fp32"])
@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_A8_a_value_that_is_not_finite_on_one_rank_makes_all_skip(recipe, algorithm, seed):
    for bad in (math.nan, math.inf):
        everywhere(4 if algorithm == "hierarchical" else 2, one_rank_is_bad, seed, recipe, bad, algorithm)


def overflows_on_one_rank(seed: int):
    """FP16 on one rank overflows, then all clip, with a collective of the user's own in between."""
    rank = dist.get_rank()
    model = DataParallel(build(seed))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = optimizer_of(model)
    for step in range(2):
        loss = loss_of(model, batch(seed + step, rank))
        scaler.scale(loss * (torch.inf if step == 0 and rank == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        dist.all_reduce(norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model_bits(model), scaler.get_scale()


def test_D19_all_ranks_take_the_same_way_after_an_overflow_on_one(seed):
    _, scale = everywhere(2, overflows_on_one_rank, seed)
    assert scale == 2.0**7


# --- µ


def clips(seed: int, factor: float, strategy: str):
    rank = dist.get_rank()
    recipe = variant("O2", grad_reduce="nccl", grad_scaling=strategy)
    model = DataParallel(build(seed, recipe))
    if strategy == "auto":
        model.autoscale.mu.fill_(factor)
    optimizer = optimizer_of(model)
    loss_of(model, batch(seed, rank)).backward()
    found = gradients(model)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return float(norm), found


def test_D17_clipping_sees_gradients_without_mu(seed):
    """The norm, the clipped gradient and so the update do not depend on µ, beyond what FP8 rounds."""
    norms = {key: ranks.run(2, clips, seed, *key)[0][0] for key in ((0.5, "auto"), (0.25, "auto"), (1.0, "pre"))}
    wanted = mean_gradients(local_gradients(seed, 2))
    exact = float(torch.stack([g.norm() for g in wanted.values()]).norm())
    for norm in norms.values():
        assert norm == pytest.approx(exact, rel=0.01)


def clips_always(seed: int, always: bool):
    """Clipping in each micro-batch, as a loop that clips too often does; the limit is never reached."""
    rank = dist.get_rank()
    model = DataParallel(build(seed, variant("O2", grad_reduce="nccl")))
    model.autoscale.mu.fill_(0.25)
    for micro in range(4):
        with model.no_sync() if micro < 3 else torch.enable_grad():
            loss_of(model, batch(seed + micro, rank)).backward()
        if always or micro == 3:
            clip_grad_norm_(model.parameters(), 1e6)
    return gradient_bits(model)


def test_D18_nothing_can_be_unscaled_twice(seed):
    assert everywhere(2, clips_always, seed, True) == everywhere(2, clips_always, seed, False)


def synchronises_twice(seed: int):
    """A second synchronising pass adds to what is reduced already: (mean + g2) of all ranks is mean + mean(g2)."""
    rank = dist.get_rank()
    model = DataParallel(build(seed))
    loss_of(model, batch(seed, rank)).backward()
    loss_of(model, batch(seed + 1, rank)).backward()
    return gradients(model)


def test_D18_two_synchronising_passes_add_up(seed):
    found = ranks.run(2, synchronises_twice, seed)[0]
    both = mean_gradients(local_gradients(seed, 2, micro_batches=2))
    assert worst_snr(found, {name: 2 * value for name, value in both.items()}) > 22


def mu_follows_overflow(seed: int):
    """Equal gradients on all ranks: their sum is N times as large, so µ has to fall from 1/√N to 1/N."""
    model = DataParallel(build(seed, variant("O2", grad_reduce="nccl")))
    for _ in range(3):
        loss_of(model, batch(seed, 0)).backward()
        model.zero_grad()
    return list(model.autoscale.report().values())


def test_overflow_after_the_sum_is_counted_and_feeds_mu(seed):
    for entry in everywhere(4, mu_follows_overflow, seed):
        assert entry["mu"] <= 0.26 * 2 ** (2 / 1000)


def mu_is_saved(seed: int):
    rank = dist.get_rank()
    recipe = variant("O2", grad_reduce="nccl", mu_period=3)
    model = DataParallel(build(seed, recipe))
    for step in range(4):
        loss_of(model, batch(seed + step, rank)).backward()
        model.zero_grad()
    state = {name: value.clone() for name, value in model.scaling_state_dict().items()}
    other = DataParallel(build(seed, recipe))
    assert not torch.equal(other.autoscale.mu, model.autoscale.mu)
    other.load_scaling_state_dict(state)
    results = []
    for one in (model, other):
        loss_of(one, batch(seed + 9, rank)).backward()
        results.append((gradient_bits(one), one.autoscale.mu.tolist()))
    assert results[0] == results[1]
    return results[0]


def test_mu_is_state_that_continues_bitwise(seed):
    everywhere(2, mu_is_saved, seed)


# --- scales over ranks and micro-batches


def largest_micro_batch_counts(seed: int):
    rank = dist.get_rank()
    model = DataParallel(convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), variant("O2", scaling="delayed")))
    layer = model.module[0]
    for micro, size in enumerate((100.0, 1.0) if rank == 0 else (2.0, 1.0)):
        x = torch.full((4, WIDTH), size)
        with model.no_sync() if micro == 0 else torch.enable_grad():
            model(x).sum().backward()
    layer.update_scaling()
    assert float(layer.input_scaling.history.max()) == 100.0
    return layer.input_scaling.history.tolist(), layer.grad_output_scaling.history.tolist()


def test_E9_history_holds_the_maximum_over_micro_batches_and_ranks(seed):
    everywhere(2, largest_micro_batch_counts, seed)


# --- around the model


def alone(seed: int) -> None:
    """World size 1, with and without a process group."""
    wrapped, plain = (
        DataParallel(build(seed), group=dist.new_group([dist.get_rank()], use_local_synchronization=True)),
        build(seed),
    )
    optimizers = [optimizer_of(wrapped), optimizer_of(plain)]
    for step in range(3):
        for model, optimizer in zip((wrapped, plain), optimizers, strict=True):
            with model.no_sync() if model is wrapped else torch.enable_grad():
                loss_of(model, batch(seed + step)).backward()
            loss_of(model, batch(seed + step + 10)).backward()
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()
    assert model_bits(wrapped) == model_bits(plain) and gradient_bits(wrapped) == gradient_bits(plain)
    assert wrapped.wire == {} and wrapped.scaling_state_dict() == {}
    assert all(len(p._post_accumulate_grad_hooks or {}) <= 1 for p in wrapped.parameters())  # octavo's own


def test_C9_one_rank_is_the_model_itself(seed):
    ranks.run(2, alone, seed)


def test_C9_no_process_group_at_all(seed):
    model = DataParallel(build(seed))
    loss_of(model, batch(seed)).backward()
    plain = build(seed)
    loss_of(plain, batch(seed)).backward()
    assert gradient_bits(model) == gradient_bits(plain)


def names_and_values(seed: int) -> None:
    plain = build(seed)
    model = DataParallel(build(seed + 1))
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    with pytest.raises(ValueError, match="load before wrapping"):
        model.load_state_dict(plain.state_dict(), assign=True)
    assert "ranks=2, grad_reduce=two_shot" in repr(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_state_dict_has_the_names_of_the_module(seed):
    ranks.run(2, names_and_values, seed)


def different_models(seed: int, kind: str) -> str:
    rank = dist.get_rank()
    model = build(seed, {"recipe": ("O1", "O2")[rank]}.get(kind, "O2"), depth=1 + (kind == "depth" and rank == 1))
    if kind == "dtype" and rank == 1:
        model[4].to(torch.bfloat16)
    model[1].weight.requires_grad_(not (kind == "frozen" and rank == 1))
    # Buckets follow from the arguments too: ranks that cut them differently would wait for each other.
    arguments = {
        "bucket_mb": {"bucket_mb": 1.0 + rank},
        "grad_reduce": {"recipe": variant(grad_reduce=("nccl", "two_shot")[rank])},
        "check_every": {"check_every": (None, 5)[rank]},
    }
    with pytest.raises(ValueError, match="the ranks have different models") as caught:
        DataParallel(model, **arguments.get(kind, {}))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["depth", "dtype", "recipe", "frozen", "bucket_mb", "grad_reduce", "check_every"])
def test_G12_different_models_are_an_error_on_all_ranks(kind, seed):
    assert "rank 1 has" in everywhere(2, different_models, seed, kind)


def leaves_nothing(seed: int) -> None:
    """A wrapper that nobody holds is gone, with its thread and model; a parameter among the outputs collects no hooks."""

    class WithLeaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.leaf = build(seed), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.layers(x) * self.leaf, self.leaf

    threads = threading.active_count()
    model = DataParallel(WithLeaf())
    for step in range(3):
        output, leaf = model(batch(seed + step, dist.get_rank())[0])
        (output.square().mean() + leaf.sum()).backward()
    assert not model.module.leaf._backward_hooks
    with pytest.raises(TypeError, match="model.module"):
        copy.deepcopy(model)
    dropped = weakref.ref(model), weakref.ref(model.module)
    del model, output, leaf
    gc.collect()
    assert [reference() for reference in dropped] == [None, None]
    end = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < end, "the thread stays"
        time.sleep(0.01)


def test_a_wrapper_that_is_dropped_leaves_nothing(seed):
    ranks.run(2, leaves_nothing, seed)


def drifts(seed: int) -> str:
    rank = dist.get_rank()
    model = DataParallel(build(seed), check_every=2)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss = loss_of(model, batch(seed + step, rank))
        if step == 1:
            model.module[3].weight.codes.view(torch.int16)[1, 2] += rank
            with pytest.raises(NumericsError, match="1 of .* parameters differ .* 3.weight") as caught:
                loss.backward()
            return str(caught.value)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("not found")


def test_drift_is_found_and_named(seed):
    everywhere(3, drifts, seed)


def replays(seed: int) -> str:
    rank = dist.get_rank()
    model = DataParallel(build(seed), check_every=2)
    loss_of(model, batch(seed, rank)).backward()
    sent = model.wire.copy()
    with pytest.MonkeyPatch.context() as patch:
        on_stream(patch, streams.CAPTURED)
        model.zero_grad()
        loss_of(model, batch(seed + 1, rank)).backward()
    assert +model.wire == sent and model._passes == 1  # a recording sends nothing
    model.module[3].weight.codes.view(torch.int16)[1, 2] += rank
    before = model.wire.copy()
    with pytest.raises(NumericsError, match="3.weight") as caught:
        model.replayed()
    checks = Counter({CHECKS: model.wire[CHECKS] - before[CHECKS]})
    assert checks.total() > 0
    one = sent - Counter({kind: sent[kind] for kind in (PARAMETERS, "setup")})
    assert model.wire - before - checks == one
    return str(caught.value)


def records_without_a_gradient(seed: int) -> None:
    torch.manual_seed(seed)
    model = DataParallel(convert(Branches(), "O2"))
    loss = model(torch.randn(8, WIDTH), [0, 1] if dist.get_rank() else [0, 1, 2]).square().mean()
    with pytest.MonkeyPatch.context() as patch:
        on_stream(patch, streams.CAPTURED)
        refused = pytest.raises(RuntimeError, match=r"layers\.2\.\w+ has no gradient here, and a CUDA graph cannot ask")
        with refused if dist.get_rank() else contextlib.nullcontext():
            loss.backward()


def test_a_recording_without_a_gradient_is_refused(seed):
    ranks.run(2, records_without_a_gradient, seed)


def test_a_replay_counts_as_the_pass_that_was_recorded(seed):
    """In bytes, and for the comparison of parameters."""
    everywhere(2, replays, seed)


def wrong_arguments() -> None:
    model = DataParallel(build(0))
    for wrong in ({"bucket_mb": 0}, {"check_every": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="positive"):
            DataParallel(build(0), **wrong)
    with pytest.raises(ValueError, match="wrapped already"):
        DataParallel(model)
    with pytest.raises(ValueError, match="0.weight on meta: each rank holds"):
        DataParallel(nn.Sequential(nn.Linear(2, 2, bias=False, device="meta")))
    with pytest.raises(ValueError, match="node_size"):
        DataParallel(build(0, variant("O2", grad_reduce="hierarchical")), node_size=3)


def test_wrong_arguments():
    ranks.run(2, wrong_arguments)


# --- compile, checkpoint, Hugging Face


class Blocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.how == "checkpoint-reentrant")
            else:
                x = block(x)
        return x


def runs_as(seed: int, recipe, how: str):
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = DataParallel(convert(Blocks(how), recipe), bucket_mb=0.001)
    call = model
    if how == "compile-inside":
        for block in model.module.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    elif how == "compile-outside":
        call = torch.compile(model, backend="aot_eager")
    for step in range(2):
        model.zero_grad()
        for micro in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed + rank + 10 * step + 100 * micro))
            with model.no_sync() if micro == 0 else torch.enable_grad():
                call(x.requires_grad_()).square().mean().backward()
    return gradient_bits(model)


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_checkpoint_and_compile_change_no_bit(recipe, seed):
    wanted = everywhere(2, runs_as, seed, recipe, "plain")
    for how in ("checkpoint", "checkpoint-reentrant", "compile-inside", "compile-outside"):
        assert everywhere(2, runs_as, seed, recipe, how) == wanted, how


@dataclass
class Answer:
    loss: torch.Tensor
    others: dict


def segments_of_each_rank(seed: int, how: str):
    """Rank 0 runs one re-entrant segment less than rank 1, so a pass for each segment would leave rank 1 alone in its last."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = DataParallel(convert(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), "O2"), timeout=20)

    def forward(x: torch.Tensor):
        for layer in list(model.module)[: 2 + rank]:
            x = checkpoint(layer, x, use_reentrant=True)
        loss = x.square().mean()
        return Answer(loss, {}) if how == "dataclass" else loss

    model.module.forward = forward
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed + rank)).requires_grad_()
    with model.no_sync() if how == "forward in no_sync" else torch.enable_grad():
        output = model(x)
    (output.loss if how == "dataclass" else output).backward()
    return gradient_bits(model), model.wire["gradients"]


def test_a_backward_is_one_pass_wherever_its_output_is(seed):
    wanted = everywhere(2, segments_of_each_rank, seed, "tensor")
    for how in ("dataclass", "forward in no_sync"):
        assert everywhere(2, segments_of_each_rank, seed, how) == wanted, how


def hugging_face(seed: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    model = DataParallel(convert(GPT2LMHeadModel(config), "O2"))
    call = torch.compile(model, backend="eager")
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(3):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed + rank))
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    return model_bits(model)


def test_H2_hugging_face_compile_and_data_parallel(seed):
    everywhere(2, hugging_face, seed)


def in_stock_ddp(seed: int, recipe):
    """PyTorch's own reducer: it sends real values in the parameter's dtype, and the FP8 gradient is made from their mean."""
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(build(seed + rank, recipe))
    optimizer = optimizer_of(model, recipe)
    found = None
    for step in range(2):
        with model.no_sync():
            (loss_of(model, batch(seed + 2 * step, rank)) / 2).backward()
        (loss_of(model, batch(seed + 2 * step + 1, rank)) / 2).backward()
        found = gradients(model.module) if found is None else found
        assert isinstance(model.module[1].weight.grad, ScaledTensor)
        optimizer.step()
        optimizer.zero_grad()
    return model_bits(model), found


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_stock_ddp_takes_a_converted_model(recipe, seed):
    results = ranks.run(2, in_stock_ddp, seed, recipe)
    assert results[0][0] == results[1][0]
    assert worst_snr(results[0][1], mean_gradients(local_gradients(seed, 2, recipe, micro_batches=2))) > 25


def test_G1_gradients_are_not_zero_and_the_loss_moves(seed):
    losses, norm = ranks.run(2, learns, seed, "O2")[0]
    assert norm > 0 and losses[-1] < 0.9 * losses[0]


def learns(seed: int, recipe, steps: int = 8):
    rank = dist.get_rank()
    model = DataParallel(build(seed, recipe))
    optimizer = optimizer_of(model, recipe)
    losses = []
    for _ in range(steps):
        for micro in range(2):
            with model.no_sync() if micro == 0 else torch.enable_grad():
                loss = loss_of(model, batch(seed + micro, rank)) / 2
                loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, float(norm)


def test_G6_levels_agree_within_fp8_error(seed):
    """The whole curve, for a single loss of a run that has taken another path may be further off."""
    losses = {recipe: torch.tensor(ranks.run(2, learns, seed, recipe)[0][0]) for recipe in ("bf16", "O1", "O2")}
    for level in ("O1", "O2"):
        assert (losses[level] - losses["bf16"]).norm() <= 0.03 * losses["bf16"].norm()


def two_groups(seed: int):
    """Two independent models on a 2 x 2 grid of ranks: each pair reduces alone."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DataParallel(build(seed + rank % 2), group=groups[rank % 2])
    loss_of(model, batch(seed, rank)).backward()
    return gradient_bits(model), model.world


def test_G9_groups_of_a_grid_do_not_mix(seed):
    results = ranks.run(4, two_groups, seed)
    assert results[0] == results[2] and results[1] == results[3] and results[0] != results[1]
    assert results[0][1] == 2


def policy_gradient(seed: int, world: int):
    """A bandit whose policy is trained by REINFORCE: the reward of `world` ranks, or of one with all their data."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    policy = convert(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 32)), "O2")
    model = DataParallel(policy) if world > 1 else policy
    optimizer = optimizer_of(model)
    rewards = []
    for step in range(15):
        parts = range(2) if world == 1 else [rank]
        for part in parts:
            generator = torch.Generator().manual_seed(1000 * step + part)
            x = torch.randn(64, WIDTH, generator=generator)
            logits = model(x)
            action = torch.multinomial(logits.softmax(-1).detach(), 1, generator=generator)
            reward = (x.gather(1, action) > 0).float()
            loss = -(logits.log_softmax(-1).gather(1, action) * (reward - 0.5)).mean() / len(parts)
            loss.backward()
            rewards.append(float(reward.mean()))
        optimizer.step()
        optimizer.zero_grad()
    return sum(rewards[-6:]) / 6 if world == 1 else sum(rewards[-3:]) / 3


def test_G10_a_policy_earns_what_it_earns_on_one_rank(seed):
    split = ranks.run(2, policy_gradient, seed, 2)
    whole = ranks.run(2, policy_gradient, seed, 1)[0]
    assert sum(split) / 2 == pytest.approx(whole, abs=0.05)
