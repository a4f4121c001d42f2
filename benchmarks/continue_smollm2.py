"""FP8 on weights that others trained: continues a checkpoint, such as SmolLM2-135M, on given text in BF16, O1 and O2.

Weights trained for trillions of tokens have outliers that fresh ones lack, and SmolLM2's width of 576 is no multiple of 128. All runs
share data, seed and hyper-parameters. Four tables come out: `loss.csv` (recipe, step, loss, grad_norm, skipped, val_loss), `casts.csv`
(recipe, step, layer group, kind of cast, share of saturated and of flushed values), `layers.csv` (recipe, layer, kind of cast, the same
shares, in one micro-batch after the last step) and `final.csv`: the last validation loss as the run computes it, and that of the same
weights in BF16, which is what a user gets who trains in FP8 and serves in BF16. The first has in it what rounding the operands of a forward
costs; the second what training in FP8 did to the weights.

    python benchmarks/continue_smollm2.py --model SmolLM2-135M --text corpus --steps 1500 --out runs/smollm2
    python benchmarks/continue_smollm2.py --model SmolLM2-135M --text corpus --steps 3 --seq-len 128 --micro-batch 1   # on a CPU

`--recipes` also takes `torchao-tensorwise` and `torchao-rowwise`, when torchao is installed: the BF16 run with its optimizer, the layers
of its blocks in torchao's FP8.

`docs/huggingface.md` says how to get the checkpoint. Runs that were interrupted go on when the same command is given again.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn

import octavo
from octavo.bench.peers import torchao_float8
from octavo.linear import collect_stats
from octavo.models.layers import Linear
from octavo.settings import override
from octavo.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from octavo.train.metrics import read_metrics
from octavo.train.trainer import Trainer

LOSS = ("recipe", "step", "loss", "grad_norm", "skipped", "val_loss")
FINAL = ("recipe", "val_loss", "val_loss_bf16")
PEERS = {"torchao-tensorwise": "tensorwise", "torchao-rowwise": "rowwise"}
CASTS = ("recipe", "step", "group", "kind", "saturated", "flushed")
LAYERS = ("recipe", "layer", "kind", "saturated", "flushed")


def run_config(arguments: argparse.Namespace) -> TrainConfig:
    """The run, but for its recipe: AdamW at a tenth of a pre-training rate, in BF16 outside of the products."""
    steps = arguments.steps
    return TrainConfig(
        name="continue",
        model=ModelConfig.from_checkpoint(arguments.model, break_even=None),
        data=DataConfig(
            path=arguments.text,
            seq_len=arguments.seq_len,
            micro_batch=arguments.micro_batch,
            val_fraction=0.02,
            cache=f"{arguments.out}/cache",
        ),
        optim=OptimConfig(lr=1e-4, warmup_steps=min(100, steps // 10)),
        train=LoopConfig(steps=steps, eval_every=max(1, steps // 10), eval_batches=20),
        checkpoint=CheckpointConfig(every=max(1, steps // 4), keep=1),
        log=LogConfig(every=max(1, min(10, steps // 10)), stats_every=max(1, steps // 10), tensorboard=False),
    )


def tables(recipe: str, records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of both tables from a run's metrics."""
    losses: dict[int, dict[str, Any]] = {}
    casts = []
    for record in records:
        step = record["step"]
        row = {key: record[key] for key in LOSS if key in record}
        if len(row) > 1:
            losses.setdefault(step, {"recipe": recipe, "step": step}).update(row)
        for name, shares in record.get("casts", {}).items():
            group, _, kind = name.rpartition("/")
            casts.append({"recipe": recipe, "step": step, "group": group, "kind": kind, **shares})
    return list(losses.values()), casts


def layer_casts(recipe: str, trainer: Trainer) -> list[dict[str, Any]]:
    """Shares of saturated and flushed values by layer and kind of cast, in one more micro-batch of training text.

    Rows for `layers.csv`; none if nothing was cast. Weights and moments stay as they are.
    """
    trainer.optimizer.zero_grad()
    with torch.compiler.set_stance("force_eager"), collect_stats(trainer.model) as stats:
        trainer.parallel(*trainer.data.next_batch()).backward()
    trainer.optimizer.zero_grad()
    return [
        {"recipe": recipe, "layer": layer, "kind": kind}
        | {name: counts[name] / counts["numel"] for name in ("saturated", "flushed")}
        for layer, kinds in stats.items()
        for kind, counts in kinds.items()
        if counts["numel"]
    ]


def print_worst(layers: list[dict[str, Any]]) -> None:
    """Of each recipe and kind of cast, the layer that saturates most and the one that flushes most."""
    for recipe, kind in dict.fromkeys((row["recipe"], row["kind"]) for row in layers):
        rows = [row for row in layers if (row["recipe"], row["kind"]) == (recipe, kind)]
        worst = {name: max(rows, key=lambda row: row[name]) for name in ("saturated", "flushed")}
        parts = [f"{name} {row[name]:.2e}" + f" ({row['layer']})" * (row[name] > 0) for name, row in worst.items()]
        print(f"{recipe:8s} {kind:12s} at most {', '.join(parts)}")


def back_from_torchao(model: nn.Module) -> None:
    """Let the layers compute in BF16 again; torchao kept their parameters as they were."""
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.__class__ = Linear


def write(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a checkpoint in BF16, O1 and O2.")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint, or a .gguf file")
    parser.add_argument("--text", required=True, help="text file or folder, or a prepared corpus")
    parser.add_argument("--out", default="runs/continue")
    parser.add_argument("--recipes", default="bf16,O1,O2")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as for octavo train")
    arguments = parser.parse_args()
    losses: list[dict[str, Any]] = []
    casts: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    final: list[dict[str, Any]] = []
    for recipe in arguments.recipes.split(","):
        scaling = PEERS.get(recipe)
        sets = [*arguments.set, f"recipe={'bf16' if scaling else recipe}", f"out={arguments.out}/{recipe}"]
        trainer = Trainer(override(run_config(arguments), sets), resume=True)
        if scaling:
            torchao_float8(trainer.model.get_submodule("blocks"), trainer.device, scaling)
        trainer.run()
        rows, counted = tables(recipe, read_metrics(trainer.folder / "metrics.jsonl"))
        losses, casts = losses + rows, casts + counted
        val_loss = next(row["val_loss"] for row in reversed(rows) if "val_loss" in row)
        layers += layer_casts(recipe, trainer)
        if scaling:
            back_from_torchao(trainer.model)
        octavo.export(trainer.model)
        final.append({"recipe": recipe, "val_loss": val_loss, "val_loss_bf16": trainer.validation_loss()})
        write(Path(arguments.out) / "loss.csv", LOSS, losses)
        write(Path(arguments.out) / "casts.csv", CASTS, casts)
        write(Path(arguments.out) / "layers.csv", LAYERS, layers)
        write(Path(arguments.out) / "final.csv", FINAL, final)
    base = next((row["val_loss"] for row in final if row["recipe"] == "bf16"), None)
    for row in final:
        parts = [f"{row[key]:.4f}" + (f" ({row[key] / base - 1:+.2%})" if base else "") for key in FINAL[1:]]
        print(f"{row['recipe']:8s} validation loss {parts[0]}, of the same weights in BF16 {parts[1]}")
    print_worst(layers)


if __name__ == "__main__":
    main()
