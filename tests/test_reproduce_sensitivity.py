"""Trainings that differ in the reduction alone: the same start, µ by Eq. 3, equal constants trained once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from training import small_config

from octavo.distributed.autoscale import lowest_mu, next_mu
from octavo.reproduce.figures import plot_sensitivity
from octavo.reproduce.sensitivity import Outcome, Variant, check, format_verdict, run_grid, train, variants, write_csv
from octavo.train.config import TrainConfig
from octavo.train.metrics import read_metrics


def config_of(folder: Path, *assignments: str) -> TrainConfig:
    return small_config(
        folder, "train.micro_batches=1", "recipe=bf16", "model.dtype=fp32", "train.steps=4", *assignments
    )


def reductions(folder: Path) -> list[dict]:
    return [record["reduction"] for record in read_metrics(folder / "metrics.jsonl") if "reduction" in record]


@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_mu_moves_by_equation_3(recipe, tmp_path: Path) -> None:
    ranks, period, threshold = 4, 3, 1e-3
    config = config_of(tmp_path, f"recipe={recipe}")
    outcome = train(config, ranks, Variant("nccl", "auto", threshold, period), tmp_path / "out")
    assert outcome.skipped == 0 and 0 < outcome.val_loss < 20
    found = reductions(tmp_path / "out")
    assert len(found) == config.train.steps and len(found[0]) == 4
    mu = {name: torch.tensor(ranks**-0.5, dtype=torch.float64) for name in found[0]}
    for step in found:
        for name, entry in step.items():
            ratio = torch.tensor(entry["saturated"])
            mu[name] = next_mu(mu[name], ratio, threshold=threshold, period=period, floor=lowest_mu(ranks))
            assert entry["mu"] == float(mu[name])


def test_all_reductions_start_alike_and_go_on_apart(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    losses = {}
    for variant in (Variant("fp32"), Variant("two_shot"), Variant("nccl", "pre"), Variant("nccl", "post")):
        train(config, 4, variant, tmp_path / variant.label)
        losses[variant.label] = [
            r["loss"] for r in read_metrics(tmp_path / variant.label / "metrics.jsonl") if "loss" in r
        ]
    assert len({curve[0] for curve in losses.values()}) == 1 and len({curve[-1] for curve in losses.values()}) > 1
    assert max(curve[-1] for curve in losses.values()) - min(curve[-1] for curve in losses.values()) < 0.05


def test_equal_constants_are_trained_once(tmp_path: Path) -> None:
    chosen = [Variant("nccl", "auto", t, 5) for t in (1e-6, 1e-5, 1e-2)]
    said: list[Outcome] = []
    outcomes = run_grid(config_of(tmp_path, "train.steps=2"), 2, chosen, tmp_path / "grid", said.append)
    assert outcomes == said and [outcome.variant for outcome in outcomes] == chosen
    assert sorted(path.name for path in (tmp_path / "grid").iterdir()) == [chosen[2].label, chosen[0].label]
    assert outcomes[0].val_loss == outcomes[1].val_loss


def test_grid_and_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chosen = variants((1e-6, 1e-3), (10, 100))
    assert len({variant.label for variant in chosen}) == len(chosen) == 5 + 4
    outcomes = [Outcome(v, 2.0, 2.0 + 0.01 * i, 0.5, 1e-4, 0) for i, v in enumerate(chosen)]
    write_csv(tmp_path / "s.csv", outcomes)
    with open(tmp_path / "s.csv") as file:
        rows = list(csv.DictReader(file))
    assert (
        [row["label"] for row in rows] == [v.label for v in chosen]
        and rows[0]["period"] == ""
        and rows[-1]["period"] == "100"
    )
    assert "spread 0.0300" in format_verdict(outcomes) and "spread 0.0200" in format_verdict(outcomes)
    plot_sensitivity(tmp_path / "s.png", outcomes, "title")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_settings(tmp_path: Path) -> None:
    check(config_of(tmp_path), 2)
    with pytest.raises(ValueError, match="--ranks is 1"):
        check(config_of(tmp_path), 1)
    with pytest.raises(ValueError, match="micro_batches"):
        check(config_of(tmp_path, "train.micro_batches=2"), 2)
