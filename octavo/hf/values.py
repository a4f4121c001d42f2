"""Values that no trained checkpoint has: what a broken download or a run that diverged leaves. Each is refused by its name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn


def check_values(name: str, values: Tensor, path: Path) -> None:
    """Raises `ValueError` for a matrix of zeros or a value that is not finite."""
    if not values.isfinite().all():
        raise ValueError(not_finite(name, path))
    if values.ndim > 1 and not values.any():
        raise ValueError(zeros(name, path))


@torch.no_grad()
def check_gains(model: nn.Module, path: Path) -> None:
    """Raises `ValueError` for a norm of any model whose weight is all zeros, so that its output is the same for every input.

    Some families add 1 to the weight, and zeros are then a gain of 1: the norm itself is asked, with two inputs.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if "norm" not in type(module).__name__.lower() or weight is None or weight.ndim != 1 or weight.any():
            continue
        try:
            first, second = module(torch.eye(2, weight.numel(), dtype=weight.dtype))
            dead = torch.equal(first, second)
        except Exception:  # one that takes more than a tensor of its width, or returns more, cannot be asked
            continue
        if dead:
            raise ValueError(zeros(f"{name}.weight", path))


def zeros(name: str, path: Path) -> str:
    """What is said of a weight of zeros."""
    return f"{name} in {path} is all zeros: the checkpoint was not written in full, or its weights were never set"


def not_finite(name: str, path: Path) -> str:
    """What is said of a tensor with an infinity or NaN."""
    return f"{name} in {path} holds an infinity or NaN: the run that wrote it had diverged"
