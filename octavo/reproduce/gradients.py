"""The gradients of N data-parallel ranks, one after another on one device, in bounded memory.

Rank r of N computes on its own micro-batch with the same weights, so N ranks are N forward and backward passes. What Figure 7 needs
of all ranks together is, of each weight matrix: the code and scale that each rank would hold (E4M3, 1 byte a value), and the
mean of the values before they were stored (FP32, 4 bytes, once). So N ranks of P parameters take (N + 4) · P bytes and not 4 · N · P:
for the 85M block parameters of GPT 125M and 128 ranks 11 GB, in one go on a GPU. What does not fit is done in groups of
consecutive blocks, with a pass over the micro-batches for each; the weights outside of the group are frozen meanwhile, so that these passes
make no gradient of theirs and end at the group's first block.

Forward and backward are those of the run, FP8 GEMMs included, but the gradients of weights leave them in FP32. The error that is then
measured is what storing and summing in FP8 adds, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.convert import convert, export
from octavo.linear import FP8Linear, HeadLinear, scaled_gradient
from octavo.tensor import ScaledTensor
from octavo.train import checkpoint_folder
from octavo.train.data import Batch, Data
from octavo.train.restore import SavedRun


class RankGradients(NamedTuple):
    """The gradients of one weight matrix on all ranks."""

    name: str
    block: int
    stored: list[ScaledTensor]
    """E4M3 with a scale each, as backward leaves them on each rank."""
    mean: Tensor
    """FP32 mean over the ranks of the values before they were stored."""
    nonzero: int
    """Values other than zero, over all ranks, before they were stored."""
    flushed: int
    """Those of them that storing made zero."""


def load_run(path: str | Path, ranks: int, device: torch.device) -> tuple[SavedRun, nn.Module, list[Batch]]:
    """A saved run, its model with plain gradients, and a micro-batch for each of `ranks` ranks, which the run has not trained on yet.

    Raises `ValueError` if there is no run, if it is damaged, or if its text has changed or is too short.
    """
    run = SavedRun.open(path)
    data = Data(run.config.data, run.config.seed, device, run.source)
    data.load_state_dict(checkpoint_folder.read_meta(run.checkpoint)["stream"])
    batches = []
    for rank in range(ranks):
        try:
            batches.append(data.next_batch())
        except StopIteration:
            raise ValueError(
                f"the text of {run.checkpoint} has {rank} more micro-batches, and {ranks} ranks need one each"
            ) from None
    model = run.load_model(device)
    with_plain_gradients(model)
    return run, model.train(), batches


def with_plain_gradients(model: nn.Module) -> None:
    """Keeps the GEMMs of a converted model and turns its weights and their gradients into plain tensors, in place."""
    layers = {name: layer.recipe for name, layer in model.named_modules() if isinstance(layer, FP8Linear)}
    heads = [module for module in model.modules() if isinstance(module, HeadLinear)]
    if layers:
        export(model)
        recipe = next(iter(layers.values()))
        plain = dataclasses.replace(recipe, name=f"{recipe.name},grad=none", master=None, grad=None)
        convert(model, plain, filter=lambda module, name: name in layers)
        for head in heads:
            HeadLinear.adopt(head, plain)


def block_matrices(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """The weight matrices of each transformer block by name, in order; a block is a numbered part of the model.

    Raises `ValueError` if there is none.
    """
    blocks: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is not None and param.ndim >= 2:
            blocks.setdefault(number, []).append((name, param))
    if not blocks:
        raise ValueError(
            "the model has no numbered blocks with weight matrices, so there is nothing to measure by block"
        )
    return [blocks[number] for number in sorted(blocks)]


def groups_within(sizes: Sequence[int], ranks: int, budget: float) -> list[range]:
    """Consecutive blocks that are held at a time, from the parameters of each block and a `budget` in bytes; at least one block each."""
    groups, start, total = [], 0, 0
    for number, size in enumerate(sizes):
        need = size * (ranks + 4)
        if number > start and total + need > budget:
            groups.append(range(start, number))
            start, total = number, 0
        total += need
    return [*groups, range(start, len(sizes))]


def rank_gradients(model: nn.Module, batches: Sequence[Batch], budget: float) -> Iterator[RankGradients]:
    """The gradients of each matrix in the blocks of `model`, rank r on `batches[r]`, with about `budget` bytes of them held at a time.

    `model` is changed: no parameter requires a gradient afterwards. Raises `ValueError` for a gradient that is not finite.
    """
    blocks = block_matrices(model)
    model.requires_grad_(False)
    for group in groups_within([sum(p.numel() for _, p in block) for block in blocks], len(batches), budget):
        members = [(number, name, param) for number in group for name, param in blocks[number]]
        yield from _of_group(model, batches, members)


def _of_group(
    model: nn.Module, batches: Sequence[Batch], members: list[tuple[int, str, nn.Parameter]]
) -> list[RankGradients]:
    stored: list[list[ScaledTensor]] = [[] for _ in members]
    totals = [torch.zeros_like(param, dtype=torch.float32) for _, _, param in members]
    counts = torch.zeros(len(members), 2, dtype=torch.int64, device=totals[0].device)
    for _, _, param in members:
        param.requires_grad_(True)
    for batch in batches:
        model(*batch).backward()
        for position, (_, name, param) in enumerate(members):
            grad = param.grad
            if grad is None:
                raise ValueError(f"{name} has no gradient: the model does not use it")
            grad, param.grad = grad.float(), None
            codes = scaled_gradient(grad, torch.float32)
            totals[position] += grad
            zero = (codes.codes.view(torch.uint8) & 0x7F) == 0
            counts[position] += torch.stack([grad.count_nonzero(), ((grad != 0) & zero).sum()])
            stored[position].append(codes)
    found = []
    numbers = counts.tolist()
    for (block, name, param), codes_of, total, (nonzero, flushed) in zip(members, stored, totals, numbers, strict=True):
        param.requires_grad_(False)
        if not total.isfinite().all():
            raise ValueError(f"the gradient of {name} is not finite: the run has diverged; take an earlier checkpoint")
        found.append(RankGradients(name, block, codes_of, total.div_(len(batches)), nonzero, flushed))
    return found
