"""`initialize`: a model and its optimizer become the FP8 pair in one call.

A stock Adam or AdamW becomes octavo's with the same groups, hyper-parameters and, if it has stepped, state. The groups are
the same dict objects, so a learning-rate scheduler that was attached before goes on setting the rates that are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.convert.break_even import Rule
from octavo.convert.layers import check_arguments, convert
from octavo.convert.policy import Filter
from octavo.linear import FP8Linear
from octavo.optim import Adam, AdamW
from octavo.optim.state import has_small_moments, store_moments
from octavo.recipe import Recipe, get_recipe
from octavo.scaling import update_all


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recipe: str | Recipe = "O2",
    *,
    filter: Filter | None = None,
    break_even: Rule | bool = True,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert `model` in place and return it with the optimizer to use from now on.

    Args:
        model, recipe, filter, break_even: see `convert`.
        optimizer: torch.optim.AdamW or Adam become `octavo.AdamW` or `octavo.Adam`, which take over parameter groups,
            hyper-parameters, hooks and state; stepping the old object is then an error. Octavo's own are kept. Any other is kept
            with O1, where it sees plain parameters and FP8 gradients. With `scaling="delayed"` the optimizer's step moves the
            scales of the model on.

    Raises `ValueError`, before anything changes, if the optimizer cannot work with the recipe, or `convert` cannot; `TypeError`
    for an argument in the place of another.
    """
    check_arguments(model, filter, break_even)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r:.80}, but it must be a torch.optim.Optimizer or None: "
            "call initialize(model, optimizer, recipe), or initialize(model, recipe=...) without an optimizer"
        )
    recipe = get_recipe(recipe)
    if optimizer is not None:
        _check_optimizer(optimizer, recipe)
    convert(model, recipe, filter=filter, break_even=break_even)
    if optimizer is None:
        return model, None
    if recipe.converts and type(optimizer) in _STOCK:
        optimizer = _replace(optimizer, recipe)
    if recipe.scaling == "delayed":
        _update_scales_after_step(model, optimizer)
    return model, optimizer


_STOCK: dict[type, type[AdamW]] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam}
_REFUSED = {
    "amsgrad": "its third moment has no low-precision form",
    "differentiable": "the update runs in kernels that autograd cannot see",
}


def _check_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    name = type(optimizer).__name__
    if not recipe.converts:
        return
    if isinstance(optimizer, AdamW):
        if optimizer.recipe != recipe:
            raise ValueError(
                f"the optimizer keeps recipe {optimizer.recipe.name!r} and the model gets {recipe.name!r}: "
                f"build it with recipe={recipe.name!r}"
            )
    elif type(optimizer) in _STOCK:
        if len(_decay(optimizer)) > 1:
            raise ValueError(
                f"{name} has decoupled weight decay in some parameter groups only: use one optimizer for each kind"
            )
        for number, group in enumerate(optimizer.param_groups):
            for option, reason in _REFUSED.items():
                if group.get(option):
                    raise ValueError(f"{name} has {option}=True in parameter group {number}: {reason}; set it to False")
    elif recipe.master is not None:
        raise ValueError(
            f"{name} cannot update weights that are stored as {recipe.master.name} with a scale, since it would round each "
            f"update to nearest and lose the small ones: use torch.optim.AdamW or Adam, or recipe='O1'"
        )


def _decay(optimizer: torch.optim.Optimizer) -> set[bool]:
    """Whether weight decay is decoupled, over all groups: `Adam` has an option for it in later versions of PyTorch."""
    default = type(optimizer) is torch.optim.AdamW
    return {bool(group.get("decoupled_weight_decay", default)) for group in optimizer.param_groups}


def _replace(old: torch.optim.Optimizer, recipe: Recipe) -> AdamW:
    """Octavo's optimizer in the place of a stock one."""
    cls = AdamW if _decay(old) == {True} else Adam
    keys = ("params", "lr", "betas", "eps", "weight_decay", "maximize")
    new = cls([{key: group[key] for key in keys} for group in old.param_groups], recipe=recipe)
    if old.state:
        new.load_state_dict(old.state_dict())
        for param, state in new.state.items():
            if has_small_moments(param, recipe):
                store_moments(state, recipe)
    for number, (group, fresh) in enumerate(zip(old.param_groups, new.param_groups, strict=True)):
        group.update(fresh)
        new.param_groups[number] = group
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        getattr(new, hooks).update(getattr(old, hooks))
    old.state.clear()
    old.step = _Replaced()  # type: ignore[method-assign, assignment]
    old._opt_called = True  # type: ignore[attr-defined]  # or a scheduler of the old optimizer warns that it never stepped
    return new


class _Replaced:
    """The step of an optimizer that `initialize` replaced."""

    _wrapped_by_lr_sched = True
    """Says to a scheduler that was attached before that nobody overrode its wrapper."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this optimizer was replaced: step the one that octavo.initialize returned")


def _update_scales_after_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    before: Tensor | None = None

    def note(*_: Any) -> None:
        nonlocal before
        before = optimizer.skipped_steps if isinstance(optimizer, AdamW) else None

    def update(*_: Any) -> None:
        # Compared on the device: the host never learns whether the step was skipped.
        done = None
        if isinstance(optimizer, AdamW) and before is not None:
            done = optimizer.skipped_steps == before.to(optimizer.skipped_steps.device)
        update_all([scaling for layer in layers for _, scaling in layer.scalings()], done)

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(update)
