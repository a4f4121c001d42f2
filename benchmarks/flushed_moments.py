"""What small second moments do to single parameters: how much of v is flushed to zero, and how far the updates go.

    python benchmarks/flushed_moments.py --recipes paper paper-4 --seed 2 --steps 72

Trains the first steps of the demo and writes one row a recipe and matrix to `OUT/flushed_moments.csv`: the share of elements whose v is
stored as 0 while m is not, its largest and its mean over the steps, and the largest update of an element, in units of the learning
rate. Exact Adam with betas (0.9, 0.95) stays below 1.165, plus weight decay.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.settings import override
from octavo.tensor import uncast
from octavo.train.presets import demo
from octavo.train.trainer import Trainer


@dataclass
class Row:
    """One line of the CSV."""

    recipe: str
    seed: int
    steps: int
    parameter: str
    largest_flushed: float = 0.0
    mean_flushed: float = 0.0
    largest_update: float = 0.0


class Done(Exception):
    """Ends a run after the steps that are wanted, on the schedule of the whole one."""


def main() -> None:
    """Run each recipe and write the rows."""
    parser = argparse.ArgumentParser(description="Flushed second moments and the updates that follow from them.")
    parser.add_argument("--recipes", nargs="+", default=["paper", "paper-4"])
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=72, help="the first steps of the demo (default: 72)")
    parser.add_argument("--out", type=Path, default=Path("runs/flushed_moments"))
    arguments = parser.parse_args()
    rows = [row for recipe in arguments.recipes for row in measure(recipe, arguments)]
    with open(arguments.out / "flushed_moments.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for row in rows:
        print(
            f"{row.recipe:10s}{row.parameter:32s} flushed {row.largest_flushed:6.1%} (mean {row.mean_flushed:6.1%})"
            f"   largest update {row.largest_update:10,.1f} lr"
        )


def measure(recipe: str, arguments: argparse.Namespace) -> list[Row]:
    """One row for each matrix of the model."""
    seed, steps = arguments.seed, arguments.steps
    settings = [f"recipe={recipe}", f"seed={seed}", f"out={arguments.out / recipe}", "log.stats_every=none"]
    trainer = Trainer(override(demo(), settings), replace=True)
    params = {name: param for name, param in trainer.model.named_parameters() if param.dim() >= 2}
    rows = {name: Row(recipe, seed, steps, name) for name in params}
    before: dict[str, Tensor] = {}
    done = 0

    def note(*_: Any) -> None:
        before.update({name: uncast(param.detach()).clone() for name, param in params.items()})

    def compare(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        done += 1
        lr = float(optimizer.param_groups[0]["lr"])
        for name, param in params.items():
            row, state = rows[name], optimizer.state[param]
            flushed = ((state["exp_avg_sq"].float() == 0) & (state["exp_avg"].float() != 0)).float().mean().item()
            update = (uncast(param.detach()) - before[name]).abs().max().item() / lr
            row.largest_flushed = max(row.largest_flushed, flushed)
            row.mean_flushed += flushed / steps
            row.largest_update = max(row.largest_update, update)
        if done == steps:
            raise Done

    trainer.optimizer.register_step_pre_hook(note)
    trainer.optimizer.register_step_post_hook(compare)
    try:
        trainer.run()
    except Done:
        pass
    return list(rows.values())


if __name__ == "__main__":
    main()
