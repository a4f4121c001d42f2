"""How far a recipe's forward and backward are from FP32's, at the same weights.

Loads the newest checkpoint of a run, and for each recipe measures on the same batches, all with the same weights:

- the validation loss minus that of FP32 compute: what rounding in the forward costs by itself;
- per kind of weight, the cosine between its gradient and FP32's, mean and worst over the layers. Sampling noise is equal in both,
  so 1 - cosine is what rounding adds, and it does not shrink with the batch.

A gap between two loss curves that this does not explain comes from the optimizer, or from the path that training took.

    python benchmarks/fidelity.py runs/demo/bf16 [--recipes bf16 O1 O2 paper] [--batches 4] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.recipe import RECIPES, Recipe
from octavo.tensor import ScaledTensor
from octavo.train import Trainer, get_preset, override
from octavo.train.config import TrainConfig
from octavo.train.setup import Batch, build_model

Gradients = dict[str, Tensor]


def main() -> None:
    """Measure each recipe, print a table, and write it to a CSV if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run with a checkpoint")
    parser.add_argument("--preset", default="demo", help="the preset of the run")
    parser.add_argument("--recipe", default="bf16", help="the recipe of the run")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "O1", "O2"])
    parser.add_argument("--batches", type=int, default=4, help="batches of the gradient, and of the validation loss")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="settings of the run")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    settings = [f"recipe={arguments.recipe}", f"out={arguments.run}", "model.break_even=none", *arguments.set]
    config = override(get_preset(arguments.preset), settings)
    run = Trainer(config, resume=True)
    weights = {name: value.float().clone() for name, value in run.model.state_dict().items()}
    batches = [run.data.next_batch() for _ in range(arguments.batches)]
    held_out = list(run.data.validation(arguments.batches))

    def probe(recipe: Recipe, dtype: str) -> tuple[float, Gradients]:
        chosen = override(replace(config, recipe=recipe), [f"model.dtype={dtype}"])
        return measure(chosen, weights, batches, held_out, run)

    loss, exact = probe(RECIPES["bf16"], "fp32")
    rows = []
    for name in arguments.recipes:
        recipe_loss, gradients = probe(RECIPES[name], "bf16")
        print(f"{name}: validation loss {recipe_loss:.4f}, {recipe_loss - loss:+.4f} over FP32 compute")
        for kind, cosines in sorted(cosines_by_kind(gradients, exact).items()):
            mean, worst = sum(cosines) / len(cosines), min(cosines)
            print(f"    {kind:28} 1 - cosine: mean {1 - mean:.1e}, worst layer {1 - worst:.1e}")
            rows.append(
                {"recipe": name, "loss_over_fp32": recipe_loss - loss, "kind": kind, "cosine": mean, "worst": worst}
            )
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def measure(
    config: TrainConfig, weights: dict[str, Tensor], batches: list[Batch], held_out: list[Batch], run: Trainer
) -> tuple[float, Gradients]:
    """(validation loss, gradients of all parameters in FP32) of a model of `config` with these weights."""
    model: nn.Module = build_model(config, run.data.vocab_size, run.device)
    model.load_state_dict(weights)
    with torch.no_grad():
        loss = sum(model(*batch).item() for batch in held_out) / len(held_out)
    for batch in batches:
        (model(*batch) / len(batches)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        gradients[name] = (grad.dequantize() if isinstance(grad, ScaledTensor) else grad).float()
    return loss, gradients


def cosines_by_kind(gradients: Gradients, exact: Gradients) -> dict[str, list[float]]:
    """Cosines between both gradients of each parameter, by its name without the layer; queries, keys and values apart."""
    found = defaultdict(list)
    for name, grad in gradients.items():
        kind = ".".join(part for part in name.split(".") if part != "blocks" and not part.isdigit())
        parts = {kind: (grad, exact[name])}
        if name.endswith("qkv.weight"):
            parts = {f"{kind} {c}": pair for c, *pair in zip("qkv", grad.chunk(3), exact[name].chunk(3), strict=True)}
        for key, (a, b) in parts.items():
            found[key].append(
                torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()
            )
    return found


if __name__ == "__main__":
    main()
