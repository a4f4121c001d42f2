"""`octavo reproduce`: fig7, sensitivity and mu.

Files are written where `--out` says, beside a table on the terminal: CSV for further work, PNG to look at, `conditions.json` for what a
number needs to be quoted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.reproduce import fig7, figures, sensitivity
from octavo.reproduce.gradients import load_run, rank_gradients
from octavo.settings import override, to_dict
from octavo.train.metrics import read_metrics
from octavo.train.plots import plot_mu
from octavo.train.presets import get_preset
from octavo.train.setup import choose_device, run_folder, versions
from octavo.train.trainer import Trainer

Say = Callable[[str], None]


def parser() -> argparse.ArgumentParser:
    """The command line after `octavo reproduce`; what it parses has the function `experiment`, which takes the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="octavo reproduce", description="Experiments of FP8-LM, its claims beside what is measured."
    )
    experiments = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    one = experiments.add_parser(
        "fig7",
        help="SNR, underflow and overflow of FP8 gradient sums by block",
        description="Figure 7 of FP8-LM on the gradients of a trained model.",
    )
    one.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run of octavo train, or a checkpoint; default: train the preset demo first",
    )
    one.add_argument("--ranks", type=int, default=128, help="emulated on one device (default 128)")
    one.add_argument("--device", default="auto", help="auto, cpu or cuda")
    one.add_argument(
        "--memory", type=float, default=16.0, metavar="GIB", help="for the gradients of all ranks (default 16)"
    )
    one.add_argument("--out", default="runs/fig7", metavar="FOLDER")
    one.set_defaults(experiment=reproduce_fig7)

    two = experiments.add_parser(
        "sensitivity",
        help="loss over the threshold and the period of auto-scaling",
        description="Train again and again with other constants of auto-scaling.",
    )
    two.add_argument("preset", nargs="?", default="tiny", metavar="PRESET", help="see octavo presets (default tiny)")
    two.add_argument("--ranks", type=int, default=16, help="emulated on one device (default 16)")
    two.add_argument(
        "--thresholds", type=_numbers, default=sensitivity.THRESHOLDS, metavar="LIST", help="such as 1e-6,1e-5"
    )
    two.add_argument(
        "--periods", type=_numbers, default=sensitivity.PERIODS, metavar="LIST", help="steps, such as 100,1000"
    )
    two.add_argument("--out", default="runs/sensitivity", metavar="FOLDER")
    two.set_defaults(experiment=reproduce_sensitivity)

    three = experiments.add_parser("mu", help="plot µ over a run", description="Plot µ of a run on several ranks.")
    three.add_argument("run", metavar="RUN", help="its folder")
    three.add_argument("--out", metavar="PNG", help="default: mu.png in the folder")
    three.set_defaults(experiment=reproduce_mu)
    for command in (one, two):
        command.add_argument(
            "--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of the preset"
        )
    return parser


def reproduce_fig7(arguments: argparse.Namespace, say: Say = print) -> None:
    """Measure, print the table, write fig7.csv, fig7_tensors.csv and fig7.png. Raises `ValueError` for what cannot be measured."""
    ranks, out = arguments.ranks, run_folder(arguments.out)
    if ranks < 2 or not arguments.memory > 0:
        raise ValueError(
            f"--ranks={ranks} --memory={arguments.memory}: at least 2 ranks and a positive number of GiB are needed"
        )
    device = choose_device(arguments.device)
    path = arguments.run or _train(out / "model", arguments.set, arguments.device)
    if arguments.run and arguments.set:
        raise ValueError(
            f"--set changes the preset that is trained when no RUN is given, and {arguments.run} is trained: leave it out"
        )
    run, model, batches = load_run(path, ranks, device)
    threshold = run.config.recipe.mu_threshold
    losses: list[fig7.Loss] = []
    for gradients in rank_gradients(model, batches, arguments.memory * 2**30):
        losses += fig7.measure(gradients, threshold)
        found = [f"{loss.strategy} {loss.snr_db:.1f}" for loss in losses[-9:] if loss.algorithm == "one_cast"]
        say(f"{gradients.name}: SNR with one cast in dB: {', '.join(found)}")
    blocks = fig7.by_block(losses)
    conditions = {
        "run": str(run.checkpoint),
        "model": {name: getattr(run.config.model, name) for name in ("dialect", "dim", "n_layers")},
        "recipe": run.config.recipe.name,
        "step": int(run.checkpoint.name.rpartition("-")[2]),
        "ranks": ranks,
        "tokens_per_rank": batches[0][0].numel(),
        "threshold": threshold,
        **_machine(device),
    }
    _write_conditions(out, conditions)
    fig7.write_csv(out / "fig7.csv", blocks)
    fig7.write_csv(out / "fig7_tensors.csv", losses)
    say("\n" + fig7.format_table(blocks) + "\n\nclaims of the paper:\n" + fig7.format_claims(blocks))
    title = (
        f"gradients of {ranks} ranks, {conditions['tokens_per_rank']:,} tokens each: {run.config.name}, step {conditions['step']}, "
        f"recipe {run.config.recipe.name}"
    )
    figures.plot_fig7(out / "fig7.png", blocks, title)
    say(f"\n{out}/fig7.png, fig7.csv, fig7_tensors.csv, conditions.json")


def reproduce_sensitivity(arguments: argparse.Namespace, say: Say = print) -> None:
    """Train the grid, print the table, write sensitivity.csv, sensitivity.png and mu.png. Raises `ValueError` for wrong settings."""
    config, ranks = override(get_preset(arguments.preset), arguments.set), arguments.ranks
    sensitivity.check(config, ranks)
    chosen = sensitivity.variants(arguments.thresholds, [int(period) for period in arguments.periods])
    out = run_folder(arguments.out)
    say(sensitivity.HEADER)
    outcomes = sensitivity.run_grid(config, ranks, chosen, out, lambda outcome: say(sensitivity.format_line(outcome)))
    say("\n" + sensitivity.format_verdict(outcomes))
    _write_conditions(out, {"config": to_dict(config), "ranks": ranks, **_machine(choose_device(config.device))})
    sensitivity.write_csv(out / "sensitivity.csv", outcomes)
    title = f"{config.name}: {config.train.steps} steps, {ranks} ranks, ring, recipe {config.recipe.name}"
    figures.plot_sensitivity(out / "sensitivity.png", outcomes, title)
    auto = next(variant for variant in chosen if variant.algorithm == "nccl" and variant.strategy == "auto")
    plot_mu(out / "mu.png", read_metrics(out / auto.label / "metrics.jsonl"), f"{title}, {auto.label}")
    say(f"{out}/sensitivity.png, mu.png, sensitivity.csv, conditions.json")


def reproduce_mu(arguments: argparse.Namespace, say: Say = print) -> None:
    """Plot µ of a run. Raises `ValueError` if there is no run, or no µ in it."""
    folder = Path(arguments.run)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is no run: it has no metrics.jsonl")
    out = Path(arguments.out or folder / "mu.png")
    plot_mu(out, read_metrics(folder / "metrics.jsonl"), folder.name)
    say(str(out))


def _train(folder: Path, assignments: list[str], device: str) -> Path:
    config = override(get_preset("demo"), [f"device={device}", *assignments])
    Trainer(dataclasses.replace(config, out=str(folder)), resume=True).run()
    return folder


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _machine(device: torch.device) -> dict[str, Any]:
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "versions": versions()}


def _write_conditions(folder: Path, conditions: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conditions.json").write_text(json.dumps(conditions, indent=1) + "\n")
