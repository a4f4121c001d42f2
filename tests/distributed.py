"""What tests of data parallelism share: a small model, its data, and what one process would have computed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from octavo import DataParallel
from octavo.convert import convert
from octavo.optim import AdamW
from octavo.recipe import RECIPES, Recipe
from octavo.tensor import ScaledTensor, uncast

WIDTH = 32


def build(seed: int, recipe: str | Recipe = "O2", depth: int = 2) -> nn.Module:
    """Linear layers with a norm between, FP8 where it is converted, FP32 elsewhere."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Embedding(50, WIDTH)]
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)]
    return convert(nn.Sequential(*layers), recipe)


def batch(seed: int, rank: int = 0, rows: int = 16) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a rank: [rows] int64, [rows, WIDTH]."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(50, (rows,), generator=generator), torch.randn(rows, WIDTH, generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean square error."""
    inputs, targets = data
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(model: nn.Module, recipe: str | Recipe = "O2") -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, recipe=recipe)


def variant(name: str = "O2", **changes) -> Recipe:
    """A recipe with changes."""
    return dataclasses.replace(RECIPES[name], name="variant", **changes)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Real gradients by name, copies; names without the wrapper's prefix."""
    module = model.module if isinstance(model, DataParallel) else model
    return {
        name: None if p.grad is None else uncast(p.grad, torch.float32).clone() for name, p in module.named_parameters()
    }


def bits(tensor: Tensor) -> bytes:
    """Every bit of a tensor, codes and scale of a scaled one."""
    parts = [tensor.codes, tensor.scale] if isinstance(tensor, ScaledTensor) else [tensor.detach()]
    return b"".join(p.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for p in parts)


def model_bits(model: nn.Module) -> list[bytes]:
    """The bits of all parameters."""
    return [bits(p) for p in model.parameters()]


def gradient_bits(model: nn.Module) -> list[bytes | None]:
    """The bits of all gradients."""
    return [None if p.grad is None else bits(p.grad) for p in model.parameters()]


def snr_db(x: Tensor, reference: Tensor) -> float:
    """10·log10 of signal over noise."""
    x, reference = uncast(x).double(), uncast(reference).double()
    return float(10 * torch.log10(reference.square().sum() / (x - reference).square().sum().clamp_min(1e-300)))


def local_gradients(seed: int, world: int, recipe: str | Recipe = "O2", micro_batches: int = 1) -> list[dict]:
    """The gradients that each rank has before they are reduced, computed in this process: names to real values."""
    results = []
    for rank in range(world):
        model = build(seed, recipe)
        for micro in range(micro_batches):
            (loss_of(model, batch(seed + micro, rank)) / micro_batches).backward()
        results.append(gradients(model))
    return results


def mean_gradients(locals_: list[dict]) -> dict[str, Tensor]:
    """Their exact mean, FP64."""
    return {name: torch.stack([g[name].double() for g in locals_]).mean(0) for name in locals_[0]}
