"""What rounding the weights and moments costs: training a small byte GPT from scratch, and going on at fine-tuning learning rates.

All matrices of the blocks are converted; all arithmetic is FP32, so that only the storage of weights, gradients and moments differs.
Both parts use the same batches for each recipe.

- From scratch (rows of Table 6 of FP8-LM): loss on held-out text after a number of steps, minus FP32's.
- Going on from one FP32 checkpoint at a constant, small learning rate: the share of FP32's progress that is kept, as the projection of
  the weights' displacement on FP32's, and as the decrease of the loss on a fixed batch.

    python benchmarks/finetune_progress.py            # about three minutes on one CPU core
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.formats import E4M3
from octavo.optim import AdamW
from octavo.recipe import RECIPES
from octavo.tensor import ScaledTensor, cast

DIM, HEADS, LAYERS, LENGTH, BATCH = 96, 4, 2, 64, 16
ROWS = ("O2", "paper", "paper-2b", "paper-3", "paper-4")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.04)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), tokens[:, 1:].flatten())


def text() -> Tensor:
    """Sources of the standard library as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batches(data: Tensor, steps: int, seed: int) -> list[Tensor]:
    at = torch.randint(len(data) - LENGTH - 1, (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([data[i : i + LENGTH + 1] for i in row]) for row in at.tolist()]


def matrices(model: GPT) -> list[tuple[nn.Linear, str]]:
    return [(m, f"{name}.weight") for name, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in name]


def run(model: GPT, recipe: str | None, stream: list[Tensor], lr: float, seed: int = 0) -> GPT:
    """A copy of `model` after one step on each batch; recipe None is FP32 with torch.optim.AdamW."""
    model = copy.deepcopy(model)
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if recipe is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        for module, _ in matrices(model):
            module.weight = nn.Parameter(cast(module.weight.detach(), RECIPES[recipe].master))
        optimizer = AdamW(model.parameters(), recipe=recipe, seed=seed, **options)
    for tokens in stream:
        optimizer.zero_grad()
        model.loss(tokens).backward()
        for parameter in model.parameters():
            if isinstance(parameter, ScaledTensor):
                parameter.grad = cast(octavo.uncast(parameter.grad), E4M3)
        optimizer.step()
    return model


def weights(model: GPT) -> Tensor:
    return torch.cat([octavo.uncast(module.weight.detach()).flatten() for module, _ in matrices(model)])


@torch.no_grad()
def evaluate(model: GPT, stream: list[Tensor]) -> float:
    return sum(model.loss(tokens).item() for tokens in stream) / len(stream)


def scratch(data: Tensor, held_out: Tensor, steps: int, seed: int) -> GPT:
    torch.manual_seed(seed)
    start, stream, check = GPT(), batches(data, steps, seed), batches(held_out, 20, 1)
    exact = run(start, None, stream, 2e-3)
    base = evaluate(exact, check)
    print(f"from scratch, {steps} steps: FP32 loss {base:.4f}")
    for recipe in ROWS:
        begin = time.perf_counter()
        loss = evaluate(run(start, recipe, stream, 2e-3), check)
        print(f"  {recipe:10} {loss - base:+.4f}   ({time.perf_counter() - begin:.0f} s)", flush=True)
    return exact


def go_on(start: GPT, data: Tensor, steps: int, seed: int) -> None:
    stream = batches(data, steps, seed + 1)
    check = stream[-10:]
    begin, before = weights(start), evaluate(start, check)
    for lr in (3e-5, 6e-6):
        exact = run(start, None, stream, lr)
        path, gain = weights(exact) - begin, before - evaluate(exact, check)
        print(f"going on, {steps} steps at lr {lr:g}: FP32 loss decrease {gain:.5f}")
        for recipe in ("O2", "paper"):
            model = run(start, recipe, stream, lr)
            moved = weights(model) - begin
            kept = (moved @ path / (path @ path)).item()
            share = (before - evaluate(model, check)) / gain
            print(f"  {recipe:10} displacement kept {kept:.1%}, loss decrease kept {share:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps from scratch")
    parser.add_argument("--more", type=int, default=120, help="steps at each small learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    data = text()
    split = len(data) * 9 // 10
    exact = scratch(data[:split], data[split:], args.steps, args.seed)
    go_on(exact, data[:split], args.more, args.seed)


if __name__ == "__main__":
    main()
