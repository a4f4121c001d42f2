"""What the optimizer refuses, and what it warns of."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from octavo.formats import BF16, E4M3, FP16, FP32, Format
from octavo.optim.state import PLAIN, describe
from octavo.recipe import Recipe
from octavo.tensor import ScaledTensor, uncast


def check_group(group: dict[str, Any]) -> None:
    """Raises `ValueError` if a hyper-parameter or a parameter of the group is none that octavo can optimize."""
    lr, betas, eps, weight_decay, seed = (group[key] for key in ("lr", "betas", "eps", "weight_decay", "seed"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr has {lr.numel()} elements: pass a number or a tensor of one element")
    if not 0 <= float(lr) < float("inf"):
        raise ValueError(f"lr is {float(lr)}: it must be finite and not negative; to ascend, pass maximize=True")
    if len(betas) != 2:
        raise ValueError(f"betas has {len(betas)} elements: pass the pair (beta1, beta2)")
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{index}] is {beta}: it must be in [0, 1)")
    if not 0 <= eps < float("inf") or not 0 <= weight_decay < float("inf"):
        raise ValueError(f"eps is {eps} and weight_decay {weight_decay}: both must be finite and not negative")
    if not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}: it must be an int")
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    for index, param in enumerate(params):
        name, param = param if isinstance(param, tuple) else (f"parameter {index}", param)
        if isinstance(param, ScaledTensor):
            if param.format not in (FP16, BF16, E4M3) or param.scale.dim() > 0 or param.residual is not None:
                raise ValueError(
                    f"{name} is stored in {param.format}, but a master is FP16, BF16 or E4M3 with one scale"
                )
        elif isinstance(param, Tensor) and param.dtype not in PLAIN:
            raise ValueError(
                f"{name} is {param.dtype}: convert it to FP32, BF16 or FP16, or leave it out of the optimizer"
            )


def check_loadable(state_dict: dict[str, Any], recipe: Recipe) -> None:
    """Raises `ValueError` if the state was saved by an optimizer with other formats, or with amsgrad."""
    for group in state_dict["param_groups"]:
        if group.get("amsgrad"):
            raise ValueError(
                "the state was saved with amsgrad=True, which octavo does not have: start with a fresh state"
            )
        saved, ours = group.get("state_formats"), describe(recipe)
        if saved is not None and saved != ours:
            raise ValueError(
                f"the state was saved with {saved}, but recipe {recipe.name!r} keeps {ours}: "
                "build the optimizer with the recipe of the run that saved it"
            )


def warn_of_lost_updates(number: int, group: dict[str, Any], recipe: Recipe) -> None:
    """Warn if the learning rate of a group (the `number`-th) is so small that its updates cannot reach a typical weight.

    A typical update of Adam is lr. With rounding to nearest it is lost below half a step of the storage format at the weight's size;
    with stochastic rounding it counts in expectation, down to half a step of the FP32 arithmetic. Waits for the device.
    """
    lr = float(group["lr"])
    for param in group["params"]:
        stored = param.format if isinstance(param, ScaledTensor) else Format.of(param.dtype)
        fmt = stored if recipe.rounding == "nearest" else FP32
        size = uncast(param.detach()).float().abs().mean().item() if param.numel() else 0.0
        if lr < size * fmt.eps / 4:  # between eps / 2 and eps is the step relative to a weight
            warnings.warn(
                f"lr {lr:.3g} of parameter group {number} is lost on a parameter {tuple(param.shape)}: "
                f"weights of size {size:.3g} in {fmt} change in steps of about {size * fmt.eps:.3g}",
                stacklevel=3,
            )
            return
