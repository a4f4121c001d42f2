"""Clipping without the norm of the same step: what each rule costs in loss.

Gradient release updates a parameter as soon as its gradient exists, when the norm of the whole gradient is not known yet, so a
rule has to guess the factor. This trains small models in FP32 with all gradients at hand, applies the factor that each rule
would have used (parameters in the order in which backward finishes them), and compares the loss with that of exact clipping at
equal seeds. Only the rule differs: weights, data order, hyper-parameters and arithmetic are the same.

    python benchmarks/clip_rules.py --preset demo --rules exact none previous partial --clips 1.0 0.5 --seeds 0 1 2 --csv OUT.csv

With n_i the norm of parameter i, N that of all, S_k the sum of squares of the parameters finished before and with k, a bar an
average over past steps and ' the step before:

    exact       c / N                                 the rule that all others are compared with
    none        1
    previous    c / N'
    running     c / mean(N)                           exponential mean, 0.9
    shares      c · n̄_i / (N̄ · n_i)                   each parameter to its usual share of the norm c, 0.98
    adaptive    1.05 · γ_i / n_i                      γ_i: mean of the clipped norms, 0.98 (the adaptive clipping of AdaGC)
    partial     c / (N' · √(S_k / S'_k))              the norm so far, scaled up as in the step before
    smooth      the same with mean squares of the past, 0.9

Factors are at most 1. The first step of all rules is exact. Rows are appended, and rows that exist are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octavo.settings import override
from octavo.train.data import Data
from octavo.train.presets import get_preset
from octavo.train.schedule import decay_groups, learning_rate
from octavo.train.setup import build_model

Rule = Callable[[Tensor], Tensor]
"""Norms of all parameters in the order of backward, FP64 [n] → their factors, FP64 [n]."""


def make_rule(name: str, clip: float) -> Rule:
    """The rule with a memory of its own."""
    past: dict[str, Tensor] = {}

    def mean(key: str, value: Tensor, decay: float) -> Tensor:
        """The mean before this step; `value` enters it."""
        before = past.get(key, value)
        past[key] = decay * before + (1 - decay) * value
        return before

    def rule(norms: Tensor) -> Tensor:
        squares = norms**2
        total = squares.sum().sqrt()
        exact = (clip / total).clamp(max=1).expand_as(norms)
        first = not past.setdefault("started", torch.zeros(()))
        past["started"] = torch.ones(())
        if name in ("exact", "none"):
            return exact if name == "exact" else torch.ones_like(norms)
        if name in ("previous", "running"):
            return (clip / mean("total", total, 0.0 if name == "previous" else 0.9)).clamp(max=1).expand_as(norms)
        if name == "shares":
            usual = mean("norms", norms, 0.98)
            return (clip * usual / (usual.norm() * norms)).clamp(max=1)
        if name == "adaptive":
            factor = exact if first else (1.05 * past["clipped"] / norms).clamp(max=1)
            mean("clipped", factor * norms, 0.98)
            return factor
        before = mean("squares", squares, 0.0 if name == "partial" else 0.9)
        guess = (before.sum() * squares.cumsum(0) / before.cumsum(0)).sqrt()
        return (clip / guess).clamp(max=1)

    return rule


RULES = ("exact", "none", "previous", "running", "shares", "adaptive", "partial", "smooth")


def train(preset: str, settings: list[str], rule_name: str, clip: float, seed: int) -> dict[str, float]:
    """One run: losses, the share of the steps that exact clipping would have cut, and how far the factors were from exact."""
    config = override(get_preset(preset), ["recipe=bf16", "model.dtype=fp32", f"seed={seed}", "device=cpu", *settings])
    data = Data(config.data, config.seed, torch.device("cpu"))
    torch.manual_seed(seed)
    model = build_model(config, data.vocab_size, torch.device("cpu"))
    optim = config.optim
    optimizer = torch.optim.AdamW(
        decay_groups(model, optim.weight_decay), betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )
    order: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(order.append)
    rule, losses, cut, errors = make_rule(rule_name, clip), [], 0, []
    for step in range(1, config.train.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, optim)
        order.clear()
        loss = model(*data.next_batch())
        loss.backward()
        norms = torch.stack([p.grad.double().norm() for p in order])
        factors = rule(norms)
        for parameter, factor in zip(order, factors.float(), strict=True):
            parameter.grad.mul_(factor)
        exact = min(1.0, clip / norms.norm().item())
        cut += exact < 1
        # Weighted by squared norms: the error of the gradient as a whole.
        errors.append((((factors / exact - 1) * norms).norm() / norms.norm()).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [model(*batch).item() for batch in data.validation(config.train.eval_batches)]
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "steps": config.train.steps,
        "clipped": cut / config.train.steps,
        "factor_error": statistics.fmean(errors),
        "train_loss": statistics.fmean(tail),
        "val_loss": statistics.fmean(held_out),
    }


def main() -> None:
    """Run what is missing, then print for each clip the mean difference to exact clipping over equal seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--clips", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--csv", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = " ".join([arguments.preset, *arguments.set])
    rows = list(csv.DictReader(arguments.csv.open())) if arguments.csv.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for seed in arguments.seeds:
        for clip in arguments.clips:
            for rule in arguments.rules:
                key = {"run": name, "rule": rule, "clip": str(clip), "seed": str(seed)}
                if any(all(row[k] == v for k, v in key.items()) for row in rows):
                    continue
                numbers = train(arguments.preset, arguments.set, rule, clip, seed)
                row = {
                    **key,
                    **{k: f"{v:.6g}" for k, v in numbers.items()},
                    "torch": torch.__version__,
                    "commit": commit,
                }
                print(row, flush=True)
                new = not arguments.csv.exists()
                with arguments.csv.open("a", newline="") as file:
                    writer = csv.DictWriter(file, fieldnames=list(row))
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
    summarise(list(csv.DictReader(arguments.csv.open())))


def summarise(rows: list[dict[str, str]]) -> None:
    """Mean difference of the losses to exact clipping, ± the standard deviation over seeds."""
    cases = sorted({(row["run"], row["clip"]) for row in rows})
    for run, clip in cases:
        group = [row for row in rows if (row["run"], row["clip"]) == (run, clip)]
        exact = {row["seed"]: row for row in group if row["rule"] == "exact"}
        print(f"\n{run}, clip {clip}")
        for rule in RULES:
            mine = [row for row in group if row["rule"] == rule and row["seed"] in exact]
            if not mine:
                continue
            text = f"  {rule:9s} {len(mine)} seeds, {100 * statistics.fmean(float(row['clipped']) for row in mine):5.1f}% clipped"
            text += f", factors off by {100 * statistics.fmean(float(row['factor_error']) for row in mine):5.2f}%"
            for loss in ("train_loss", "val_loss"):
                values = [float(row[loss]) for row in mine]
                deltas = [value - float(exact[row["seed"]][loss]) for value, row in zip(values, mine, strict=True)]
                spread = statistics.stdev(deltas) if len(deltas) > 1 else float("nan")
                text += f", {loss} {statistics.fmean(values):.4f} ({statistics.fmean(deltas):+.4f} ± {spread:.4f})"
            print(text)


if __name__ == "__main__":
    main()
