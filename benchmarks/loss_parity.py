"""Loss of recipes against a baseline over seeds: the same preset, weights, data order and hyper-parameters; only the recipe differs.

    python benchmarks/loss_parity.py demo --recipes bf16 O2 --seeds 0 1 2 --jobs 2
    python benchmarks/loss_parity.py gpt_125m --recipes bf16 paper paper-2b paper-3 paper-4 --set train.steps=2000

Writes one row a run to `OUT/loss_parity.csv` (training loss: mean of the last tenth of the steps; validation loss: held-out
documents, after the last step), the curves, each a mean over the seeds that all recipes finished, to `OUT/loss_parity.png`, and
prints for each recipe the mean difference to the baseline over the same seeds, its standard deviation, and beside it the spread of
the baseline itself over seeds: a difference within that spread is no difference. Runs that are already in OUT and complete are not
repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import torch

from octavo.train.metrics import read_metrics, smoothed_loss
from octavo.train.plots import Curve, loss_curve, plot_losses


@dataclass(frozen=True)
class Run:
    """One training run and where it is."""

    recipe: str
    seed: int
    folder: Path


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    preset: str
    recipe: str
    seed: int
    steps: int
    tokens: int
    train_loss: float
    val_loss: float
    skipped: int
    tokens_per_s: float
    device: str
    torch: str
    commit: str


def main() -> int:
    """Run what is missing, then write and print the comparison."""
    arguments = _parser().parse_args()
    if arguments.recipes[0] in arguments.recipes[1:] or len(arguments.recipes) < 2:
        raise SystemExit("--recipes takes the baseline and at least one other recipe")
    runs = [
        Run(recipe, seed, arguments.out / recipe / str(seed))
        for seed in arguments.seeds
        for recipe in arguments.recipes
    ]
    slots: Queue[int] = Queue()
    for slot in range(arguments.jobs):
        slots.put(slot)

    def execute(run: Run) -> int:
        slot = slots.get()
        try:
            return train(run, arguments, slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        failed = [run for run, code in zip(runs, pool.map(execute, runs), strict=True) if code]
    for run in failed:
        print(f"{run.recipe}, seed {run.seed} did not finish: see {run.folder}.log; the same command continues it")
    rows = [read_row(run, arguments.preset) for run in runs if run not in failed]
    write_csv(arguments.out / "loss_parity.csv", rows)
    print(summary(rows, arguments.recipes))
    plot(arguments.out / "loss_parity.png", rows, [run for run in runs if run not in failed], arguments.recipes[0])
    return 1 if failed else 0


def train(run: Run, arguments: argparse.Namespace, slot: int) -> int:
    """Train in a process of its own, continuing what an earlier call left; returns its exit code."""
    settings = [
        "model.break_even=none",  # losses are compared, not times
        *arguments.set,
        f"recipe={run.recipe}",
        f"seed={run.seed}",
        f"out={run.folder}",
        f"name={arguments.preset}",
    ]
    command = [sys.executable, "-m", "octavo.cli", "train", arguments.preset, "--resume"]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    if torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % torch.cuda.device_count())
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run.folder}.log", "w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code == 0 and not any("val_loss" in record for record in read_metrics(run.folder / "metrics.jsonl")):
        code = 1  # a signal stopped it, which is no failure of the run, but leaves nothing to compare
    print(f"{run.recipe}, seed {run.seed}: {'done' if code == 0 else 'not finished'}", flush=True)
    return code


def read_row(run: Run, preset: str) -> Row:
    """The result of a finished run."""
    records = read_metrics(run.folder / "metrics.jsonl")
    info = json.loads((run.folder / "run.json").read_text())
    steps = [record for record in records if "loss" in record]
    rates = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    return Row(
        preset=preset,
        recipe=run.recipe,
        seed=run.seed,
        steps=steps[-1]["step"],
        tokens=steps[-1]["tokens"],
        train_loss=smoothed_loss(records),
        val_loss=[record["val_loss"] for record in records if "val_loss" in record][-1],
        skipped=steps[-1]["skipped"],
        tokens_per_s=statistics.median(rates),
        device=info["device"],
        torch=info["versions"]["torch"],
        commit=_commit(),
    )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a run."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(vars(row) for row in rows)


def summary(rows: Sequence[Row], recipes: Sequence[str]) -> str:
    """Mean and standard deviation of each recipe's loss minus the baseline's at the same seed, in nats per token."""
    base = {row.seed: row for row in rows if row.recipe == recipes[0]}
    lines = [f"{'':12s}{'seeds':>6s}{'training loss':>22s}{'validation loss':>22s}{'validation':>12s}"]
    spread = [_mean_spread([getattr(row, field) for row in base.values()]) for field in ("train_loss", "val_loss")]
    lines.append(f"{recipes[0]:12s}{len(base):6d}{spread[0]:>22s}{spread[1]:>22s}")
    for recipe in recipes[1:]:
        pairs = [(row, base[row.seed]) for row in rows if row.recipe == recipe and row.seed in base]
        if not pairs:
            continue
        gaps = [[getattr(a, field) - getattr(b, field) for a, b in pairs] for field in ("train_loss", "val_loss")]
        relative = statistics.fmean(a.val_loss / b.val_loss - 1 for a, b in pairs)
        text = [_mean_spread(gap, signed=True) for gap in gaps]
        lines.append(f"{recipe + ' − base':12s}{len(pairs):6d}{text[0]:>22s}{text[1]:>22s}{relative:>+12.3%}")
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Row], runs: Sequence[Run], baseline: str) -> None:
    """The curves of all recipes, means over the seeds that every recipe finished."""
    recipes = list(dict.fromkeys([baseline, *(run.recipe for run in runs)]))
    done = {(run.recipe, run.seed): run for run in runs}
    seeds = [
        seed for seed in dict.fromkeys(run.seed for run in runs) if all((recipe, seed) in done for recipe in recipes)
    ]
    if not seeds:
        return
    curves, losses = {}, {}
    for recipe in recipes:
        folders = [done[recipe, seed].folder for seed in seeds]
        curves[recipe] = mean_curve([loss_curve(read_metrics(folder / "metrics.jsonl")) for folder in folders])
        losses[recipe] = statistics.fmean(row.val_loss for row in rows if row.recipe == recipe and row.seed in seeds)
    row = rows[0]
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"means over seeds {', '.join(map(str, seeds))}"
    title = (
        f"{row.preset}: {row.steps:,} steps, {row.tokens / 1e6:,.1f}M tokens, {which},\n{row.device}, torch {row.torch}"
    )
    plot_losses(path, curves, baseline, title, losses)
    print(f"curves in {path}")


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float | None]]:
    """Point by point; None where any of them skipped the step."""
    points = []
    for same_step in zip(*curves, strict=True):
        losses = [loss for _, loss in same_step if loss is not None]
        points.append((same_step[0][0], statistics.fmean(losses) if len(losses) == len(curves) else None))
    return points


def _mean_spread(values: Sequence[float], signed: bool = False) -> str:
    mean = statistics.fmean(values)
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return (f"{mean:+.4f}" if signed else f"{mean:.4f}") + spread


def _commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Loss of recipes against a baseline over seeds.")
    parser.add_argument("preset", help="see `octavo presets`")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "O2"], help="the baseline first (default: bf16 O2)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; over all GPUs, if there are several")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/loss_parity"), help="folder of runs and results")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of all runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
