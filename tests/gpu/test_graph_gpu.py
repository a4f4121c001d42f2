"""Steps that are replayed from a CUDA graph: the same bits as without, on one rank and on two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from training import free_port, launch

from octavo.settings import override
from octavo.train import Trainer
from octavo.train.config import TrainConfig
from octavo.train.metrics import read_metrics
from octavo.train.presets import get_preset

pytestmark = pytest.mark.gpu

SETTINGS = (
    "model.dim=256",
    "model.n_heads=4",
    "data.seq_len=128",
    "data.micro_batch=4",
    "optim.clip=0.5",
    "train.steps=30",
    "train.eval_every=12",
    "log.stats_every=20",
    "log.tensorboard=false",
    "checkpoint.every=none",
)
"""FP8 in all blocks (`tiny` asks for no break-even), a norm that is clipped, a validation and a step that counts after the recording."""


def assignments(folder: Path, name: str, *settings: str) -> list[str]:
    return [*SETTINGS, f"data.cache={folder}/cache", f"out={folder}/{name}", *settings]


def config(folder: Path, name: str, *settings: str) -> TrainConfig:
    return override(get_preset("tiny"), assignments(folder, name, *settings))


def records(folder: Path) -> list[tuple[float | None, float | None]]:
    """(loss, gradient norm) of each step, and validation losses."""
    found = read_metrics(folder / "metrics.jsonl")
    return [(r.get("loss"), r.get("grad_norm", r.get("val_loss"))) for r in found if "loss" in r or "val_loss" in r]


@pytest.mark.parametrize(
    "settings",
    [
        ["recipe=bf16"],
        ["recipe=O1"],
        ["recipe=O2"],
        ["recipe=O2", "train.micro_batches=3"],
        ["recipe=O2", "train.compile=true"],
        ["recipe=O2", "recipe.scaling=delayed"],
        ["recipe=O2", "model.fused=false", "model.recompute=full"],
        ["recipe=paper", "model.dialect=llama", "train.micro_batches=2"],
    ],
    ids=" ".join,
)
def test_a_replayed_run_has_the_bits_of_an_eager_one(settings, tmp_path):
    runs = []
    for name, graph in (("eager", "false"), ("graph", "true")):
        trainer = Trainer(config(tmp_path, name, *settings, f"train.graph={graph}", "train.deterministic=true"))
        trainer.run()
        runs.append(trainer)
    assert runs[1]._graph is not None and runs[1]._graph._places  # one was recorded
    assert records(runs[0].folder) == records(runs[1].folder)
    for (name, a), b in zip(runs[0].model.state_dict().items(), runs[1].model.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name  # (what delayed scaling has recorded is known where it happens)


def test_a_gradient_that_is_not_finite_skips_a_replayed_step(tmp_path):
    trainer = Trainer(
        config(tmp_path, "run", "recipe=O2", "train.graph=true", "train.steps=12", "log.stats_every=none")
    )
    step = trainer._train_step
    norm = trainer.model.norm.weight

    def poisoned() -> None:
        before = norm.detach().clone()
        if trainer.step + 1 == 8:
            with torch.no_grad():
                norm[0] = math.nan
        step()
        if trainer.step == 8:
            with torch.no_grad():
                norm.copy_(before)

    trainer._train_step = poisoned
    trainer.run()
    losses = [loss for loss, _ in records(trainer.folder)[:12]]
    assert losses[7] is None and all(loss is not None for loss in losses[:7] + losses[8:])
    assert int(trainer.optimizer.skipped_steps) == 1


def train_on_two_ranks(settings: list[str]) -> None:
    """On this GPU. NCCL refuses two ranks of one host there, so each claims a host of its own."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    ranks = [launch(settings, rank, port, NCCL_HOSTID=f"host{rank}", **alone) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-3000:] for error in errors)


@pytest.mark.parametrize("algorithm", ["two_shot", "nccl", "bf16"])
def test_two_ranks_over_nccl_replay_what_they_run(algorithm, tmp_path):
    """Collectives and the comparison of parameters too; and with `two_shot` one rank with all of the data has nearly their losses."""
    common = ["recipe=O2", f"recipe.grad_reduce={algorithm}", "train.check_every=5", "train.deterministic=true"]
    for name, graph in (("eager", "false"), ("graph", "true")):
        train_on_two_ranks(assignments(tmp_path, name, *common, f"train.graph={graph}"))
    assert records(tmp_path / "eager") == records(tmp_path / "graph")
    whole = Trainer(config(tmp_path, "whole", *common, "data.micro_batch=8", "train.graph=true"))
    whole.run()
    for (loss, norm), (want, want_norm) in zip(records(tmp_path / "graph"), records(whole.folder), strict=True):
        if loss is not None:
            assert loss == pytest.approx(want, rel=0.02) and norm == pytest.approx(want_norm, rel=0.2)
