"""`octavo demo`: the same small model twice on this machine, in BF16 and in FP8, and what the difference is.

Both runs have the same initial weights, batches in the same order and hyper-parameters; only the recipe differs. On a CPU the
FP8 arithmetic is the reference one: it computes what a GPU computes, and takes longer for it, so losses and bytes mean the same
there and tokens/s does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.linear import FP8Linear
from octavo.memory import plain_tensors
from octavo.recipe import BASELINE
from octavo.settings import override
from octavo.train.config import TrainConfig
from octavo.train.metrics import read_metrics
from octavo.train.plots import loss_curve, plot_losses, plot_memory
from octavo.train.presets import demo
from octavo.train.trainer import RunResult, Trainer

KINDS = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}


def prepare(assignments: Sequence[str], seed: int) -> list[Trainer]:
    """The two runs, BF16 first: the `demo` preset with `assignments` and `seed`. They replace an earlier demo in their folders.

    Raises `ValueError` for wrong assignments and wrong data.
    """
    config = override(replace(demo(), seed=seed), assignments)
    if not config.recipe.converts:
        raise ValueError(f"recipe={config.recipe.name} is the baseline itself: choose another one to compare with it")
    pair = [replace(config, recipe=recipe, out=f"{config.out}/{recipe.name}") for recipe in (BASELINE, config.recipe)]
    return [Trainer(run, replace=_is_earlier_demo(run)) for run in pair]


def compare(trainers: Sequence[Trainer]) -> None:
    """Train both, print the table and draw `loss.png` and `memory.png` beside their folders. Raises as `Trainer.run` does."""
    results: list[RunResult] = []
    for trainer in trainers:
        results.append(trainer.run())
        if results[-1].stopped_by:
            return
    baseline, fp8 = (trainer.config.recipe.name for trainer in trainers)
    names = [f"{name}.weight" for name, module in trainers[1].model.named_modules() if isinstance(module, FP8Linear)]
    memory = {t.config.recipe.name: bytes_per_parameter(t.model, t.optimizer, names) for t in trainers}
    print("\n" + format_table([baseline, fp8], results, list(memory.values())))
    if trainers[0].device.type == "cpu":
        print("tokens/s: a CPU has no FP8 arithmetic; octavo's reference stands in for it here, exact and slow")

    folder, title = trainers[0].folder.parent, _conditions(trainers[0])
    curves = {t.config.recipe.name: loss_curve(read_metrics(t.folder / "metrics.jsonl")) for t in trainers}
    validation = {
        t.config.recipe.name: r.val_loss for t, r in zip(trainers, results, strict=True) if r.val_loss is not None
    }
    plot_losses(folder / "loss.png", curves, baseline, title, validation)
    plot_memory(folder / "memory.png", memory, title)
    print(f"\nfigures {folder}/loss.png and {folder}/memory.png; runs {folder}/{baseline} and {folder}/{fp8}")


def bytes_per_parameter(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, float]:
    """Bytes held for the parameters `names`, scales included, over their number of elements, by kind."""
    parameters = dict(model.named_parameters())
    kinds = dict.fromkeys(("weight", "gradient", *KINDS.values()), 0)
    for name in names:
        parameter = parameters[name]
        kinds["weight"] += _bytes(parameter)
        kinds["gradient"] += _bytes(parameter.grad)
        for key, value in optimizer.state[parameter].items():
            kind = KINDS.get(key.removesuffix("_scale"))
            if kind is not None:
                kinds[kind] += _bytes(value)
    count = sum(parameters[name].numel() for name in names)
    return {kind: size / count for kind, size in kinds.items()}


def format_table(names: Sequence[str], results: Sequence[RunResult], memory: Sequence[Mapping[str, float]]) -> str:
    """The comparison in plain text: one column a recipe, and FP8 relative to the baseline."""
    rows: list[tuple[str, list[float], str]] = [
        ("training loss, last tenth", [result.train_loss for result in results], ".4f"),
        ("validation loss", [result.val_loss or float("nan") for result in results], ".4f"),
    ]
    rows += [(f"bytes/parameter: {kind}", [bar[kind] for bar in memory], ".2f") for kind in memory[0]]
    rows += [
        ("bytes/parameter", [sum(bar.values()) for bar in memory], ".2f"),
        ("tokens/s", [result.tokens_per_s for result in results], ",.0f"),
    ]
    lines = [f"{'':32s}" + "".join(f"{name:>12s}" for name in [*names, "difference"])]
    for label, (base, other), form in rows:
        change = f"{100 * (other / base - 1):+.2f}%" if base else ""
        lines.append(f"{label:32s}{base:12{form}}{other:12{form}}{change:>12s}")
    return "\n".join(lines)


def _is_earlier_demo(run: TrainConfig) -> bool:
    """Whether the folder of `run` holds a run of the same name; any other one is the user's own, and `Trainer` refuses it."""
    try:
        return json.loads((Path(run.out) / "run.json").read_text())["config"]["name"] == run.name
    except (OSError, ValueError, KeyError):
        return False


def _bytes(value: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in plain_tensors(value))


def _conditions(trainer: Trainer) -> str:
    config, dialect = trainer.config, trainer.config.model.dialect
    where = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "CPU"
    return (
        f"{config.name}: {dialect.upper() if dialect else 'model'} of {trainer.model.num_parameters() / 1e6:.1f}M parameters, "
        f"{Path(trainer.data.tokenizer).name} tokens, "
        f"{config.tokens_per_step:,} a step,\n{config.train.steps} steps, seed {config.seed}, {where}, torch {torch.__version__}"
    )
