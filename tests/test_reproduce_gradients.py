"""The gradients of many ranks are those that each rank would have alone, however they are grouped."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import small_config

from octavo.linear import scaled_gradient
from octavo.models import Transformer, TransformerConfig
from octavo.reproduce.gradients import block_matrices, groups_within, load_run, rank_gradients, with_plain_gradients
from octavo.tensor import ScaledTensor
from octavo.train.trainer import Trainer


def model_of(seed: int, recipe: str | None = None) -> Transformer:
    config = TransformerConfig(dim=32, n_layers=3, n_heads=2, vocab_size=64, max_seq_len=16, dtype=torch.float32)
    return Transformer.build(config, recipe=recipe, seed=seed)


def batches_of(count: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randint(64, (2, 16)), torch.randint(64, (2, 16))) for _ in range(count)]


def bits(gradient: ScaledTensor) -> tuple[bytes, float]:
    return bytes(gradient.codes.view(torch.uint8).flatten().tolist()), float(gradient.scale)


@pytest.mark.parametrize("budget", [0, 5 * 2**17, 1e12])
def test_groups_cover_all_blocks_in_order(budget):
    sizes, ranks = [1000, 90_000, 5, 7, 12_000], 8
    groups = groups_within(sizes, ranks, budget)
    assert [block for group in groups for block in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[block] for block in group) * (ranks + 4) <= budget for group in groups)
    assert len(groups) == {0: 5, 1e12: 1}.get(budget, len(groups))


def test_each_rank_has_the_gradient_of_its_own_batch(seed):
    model, batches = model_of(seed), batches_of(3)
    alone = copy.deepcopy(model)
    wanted: list[dict[str, Tensor]] = []
    for batch in batches:
        alone.zero_grad()
        alone(*batch).backward()
        wanted.append({name: param.grad.clone() for name, param in alone.named_parameters() if param.grad is not None})
    found = list(rank_gradients(model, batches, 1e12))
    assert [g.name for g in found] == [name for block in block_matrices(alone) for name, _ in block]
    for gradients in found:
        own = [grads[gradients.name] for grads in wanted]
        stored = [scaled_gradient(grad, torch.float32) for grad in own]
        assert [bits(g) for g in gradients.stored] == [bits(g) for g in stored]
        torch.testing.assert_close(gradients.mean, torch.stack(own).mean(0))
        assert gradients.nonzero == sum(int(grad.count_nonzero()) for grad in own)
        flushed = sum(int(((grad != 0) & (g.dequantize() == 0)).sum()) for grad, g in zip(own, stored, strict=True))
        assert gradients.flushed == flushed
        assert gradients.block == int(gradients.name.split(".")[1])


def test_the_budget_changes_nothing_but_memory(seed):
    batches = batches_of(3)
    together, apart = (list(rank_gradients(model_of(seed), batches, budget)) for budget in (1e12, 0))
    for one, other in zip(together, apart, strict=True):
        assert one.name == other.name and torch.equal(one.mean, other.mean)
        assert [bits(g) for g in one.stored] == [bits(g) for g in other.stored]


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_plain_gradients_are_those_that_the_recipe_stores(recipe, seed):
    """The same forward, and the same backward up to the cast into BF16 and E4M3 at its end."""
    fp8, batch = model_of(seed, recipe), batches_of(1)[0]
    plain = copy.deepcopy(fp8)
    with_plain_gradients(plain)
    losses = [model(*batch) for model in (fp8, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    parameters = dict(plain.named_parameters())
    for name, param in ((name, param) for block in block_matrices(fp8) for name, param in block):
        grad, exact = param.grad, parameters[name].grad
        assert isinstance(grad, ScaledTensor) and exact is not None and not isinstance(exact, ScaledTensor)
        if recipe == "O2":
            # A product with a BF16 output may sum in another order than one in FP32: where that crosses a tie, the code is the next one.
            stored = scaled_gradient(exact.bfloat16(), torch.float32)
            codes, others = (g.codes.view(torch.uint8).int() for g in (grad, stored))
            assert grad.scale == stored.scale and (codes - others).abs().max() <= 1
            assert (codes != others).sum() <= max(1, codes.numel() // 1000)
        torch.testing.assert_close(grad.dequantize(), exact, rtol=0.07, atol=float(exact.abs().max()) * 2**-12)


def test_what_cannot_be_measured(seed):
    with pytest.raises(ValueError, match="no numbered blocks"):
        block_matrices(nn.Linear(8, 8))
    model = model_of(seed)
    with torch.no_grad():
        next(model.blocks[1].parameters()).fill_(torch.inf)
    with pytest.raises(ValueError, match="not finite"):
        list(rank_gradients(model, batches_of(2), 1e12))


def test_a_run_goes_on_with_text_that_it_has_not_seen(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=3", "recipe=O2")
    Trainer(config).run()
    run, model, batches = load_run(tmp_path / "run", 4, torch.device("cpu"))
    assert run.config.recipe == config.recipe and model.training
    later = Trainer(replace(config, train=replace(config.train, steps=9)), resume=True)
    for batch in batches:
        assert all(map(torch.equal, batch, later.data.next_batch()))
    with pytest.raises(ValueError, match="no checkpoint"):
        load_run(tmp_path, 4, torch.device("cpu"))
