"""Change the linear layers of a model to FP8 in place, and back.

Nothing is rebuilt: a module changes its class and its weight parameter its storage, so hooks, names, tied weights, optimizers and
references all stay valid, and no weight is copied unless its format changes. All checks come first; a model is
converted as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.convert.break_even import BreakEven, Rule, TooSlow, default_rule
from octavo.convert.policy import (
    DefaultPolicy,
    Filter,
    LayerReport,
    OutputHead,
    fp8_class,
    impossible,
    is_candidate,
    sides,
)
from octavo.linear import FP8Linear, HeadLinear, replaceable
from octavo.recipe import Recipe, get_recipe
from octavo.tensor import ScaledTensor

SKIPPED = "_octavo_skipped"
"""Attribute of a module that `convert` considered and left: the reason."""


def convert(
    model: nn.Module, recipe: str | Recipe = "O2", *, filter: Filter | None = None, break_even: Rule | bool = True
) -> nn.Module:
    """Convert the linear layers of `model` to `recipe` in place, and return it.

    Args:
        model: any module, on any device, also meta; its dtypes, `requires_grad`, hooks and names stay.
        recipe: name or `Recipe`. One without an input format (`bf16`) converts nothing.
        filter: (module, full name) -> whether to convert; replaces the default choice (all linear layers but output heads,
            routers, layers with a side under 32 and those that FP8 slows down; the backward of output heads becomes FP8 if the recipe
            has `head_grad_output`). `convert_report` tells what was skipped and why.
        break_even: which layers FP8 slows down. True takes octavo's own measurements, at 16,384 tokens and not compiled;
            `octavo.BreakEven(tokens=…, compiled=…, graph=…, table=…)` says what is the case. Where the device that holds the
            weight was not measured, which includes every CPU, none is left for its speed. False leaves none anywhere.

    Converting again with the same recipe changes nothing, except that a new filter or another `break_even` may add layers. A
    weight that layers share with a module that stays plain (a tied embedding) is multiplied in FP8 but stored plain. If every layer
    that the default would take is faster as it is, nothing changes and a warning says so; another one says if some are, where nobody
    told how the model will run.

    Raises `ValueError`, before anything changes, if the model has layers of another recipe, none that can be converted, or
    weights that a view or an unfinished backward pass holds; `TypeError` if `model` is no module or `filter` or `break_even` no
    function.
    """
    check_arguments(model, filter, break_even)
    recipe = get_recipe(recipe)
    modules = dict(model.named_modules())
    _check_recipe(modules, recipe)
    if not recipe.converts:
        return model
    chosen, heads, skipped = _choose(model, modules, recipe, filter, break_even)
    _check_chosen(modules, chosen, skipped, recipe)
    if chosen and break_even is True and default_rule() == BreakEven():
        _tell_of_slow(chosen, skipped)
    shared = _shared_with_plain(modules, chosen)
    for fqn, reason in skipped.items():
        setattr(modules[fqn], SKIPPED, reason)
    for fqn in chosen:
        module = modules[fqn]
        module.__dict__.pop(SKIPPED, None)
        if isinstance(module, HeadLinear):
            module.release()
        cls = fp8_class(module)
        assert cls is not None
        cls.adopt(module, recipe, exclusive=id(module.weight) not in shared)
        assert isinstance(module, FP8Linear)
        module.store()
    if any(isinstance(module, FP8Linear) for module in modules.values()):
        for fqn in heads:
            HeadLinear.adopt(modules[fqn], recipe)
    return model


def convert_report(model: nn.Module) -> list[LayerReport]:
    """One entry for each module that holds a weight of two dims or more, in the order of `model.named_modules()`."""
    reports = []
    for fqn, module in model.named_modules():
        if isinstance(module, FP8Linear):
            stored = "plain" if module.master is None else f"{module.master.name} and one scale"
            if not module.exclusive:
                stored += ", since a layer that stays plain reads it too"
            reports.append(LayerReport(fqn, True, f"recipe {module.recipe.name}, weight stored {stored}"))
        elif isinstance(module, HeadLinear):
            reason = f"{module.__dict__[SKIPPED]}; forward as it is, backward in FP8"
            reports.append(LayerReport(fqn, False, reason, backward=True))
        elif is_candidate(module):
            reason = module.__dict__.get(SKIPPED) or impossible(module) or "not given to convert"
            reports.append(LayerReport(fqn, False, reason))
    return reports


def left_for_speed(model: nn.Module) -> list[tuple[int, int]]:
    """Shapes (inputs, outputs) of the layers that `break_even` left as they are; a run that goes on elsewhere keeps them."""
    left = [module for module in model.modules() if isinstance(module.__dict__.get(SKIPPED), TooSlow)]
    return sorted({sides(module) for module in left})


def export(model: nn.Module) -> nn.Module:
    """Turn the model back, in place: plain classes, plain parameters with the real values, plain gradients. Returns it.

    A weight gets the dtype that it had; to keep the 11 mantissa bits of an FP16 master in a BF16 model, take
    `state_dict()`, which is FP32. Raises `ValueError`, before anything changes, if a weight is in use (see `convert`) or has a
    parametrization.
    """
    ours = {fqn: module for fqn, module in model.named_modules() if isinstance(module, FP8Linear | HeadLinear)}
    parametrized = [fqn for fqn, module in ours.items() if is_parametrized(module)]
    if parametrized:
        raise ValueError(
            f"{', '.join(parametrized)} got a parametrization after convert, which export would cut off: take it away before, by "
            'torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")'
        )
    layers = {fqn: module for fqn, module in ours.items() if isinstance(module, FP8Linear)}
    _check_replaceable({fqn: layer for fqn, layer in layers.items() if isinstance(layer.weight, ScaledTensor)})
    for module in model.modules():
        module.__dict__.pop(SKIPPED, None)
        if isinstance(module, FP8Linear | HeadLinear):
            module.release()
    return model


def check_arguments(model: nn.Module, filter: Filter | None, break_even: Rule | bool) -> None:
    """Raises `TypeError` if `model` is no module or `filter` or `break_even` no function."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, but it must be a torch.nn.Module: the model is the first argument"
        )
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter is {filter!r:.80}, but it must be a function (module, name) -> bool: "
            "to choose layers by name, pass filter=lambda module, name: name in [...]"
        )
    if not (isinstance(break_even, bool) or callable(break_even)):
        raise TypeError(
            f"break_even is {break_even!r:.80}, but it must be True, False or an octavo.BreakEven: "
            "for the tokens of a forward, pass break_even=octavo.BreakEven(tokens=...)"
        )


def _check_recipe(modules: dict[str, nn.Module], recipe: Recipe) -> None:
    for fqn, module in modules.items():
        if isinstance(module, FP8Linear | HeadLinear) and module.recipe != recipe:
            other = f"not {recipe.name!r}"
            if module.recipe.name == recipe.name:
                names = [field.name for field in dataclasses.fields(recipe)]
                changed = [name for name in names if getattr(module.recipe, name) != getattr(recipe, name)]
                other = f"and this one differs in {', '.join(changed)}"
            raise ValueError(
                f"{fqn or 'the model'} was converted with recipe {module.recipe.name!r}, {other}: "
                "turn the model back first, octavo.export(model)"
            )


def _choose(
    model: nn.Module, modules: dict[str, nn.Module], recipe: Recipe, filter: Filter | None, break_even: Rule | bool
) -> tuple[list[str], list[str], dict[str, str]]:
    """(names of the modules to convert, of the output heads whose backward to convert, reasons of all that keep their forward)."""
    rule = default_rule() if break_even is True else break_even or None
    policy = DefaultPolicy(model, rule)
    chosen, heads, skipped = [], [], {}
    for fqn, module in modules.items():
        if isinstance(module, FP8Linear) or not (is_candidate(module) or fp8_class(module)):
            continue
        if isinstance(module, HeadLinear):
            if filter is not None and filter(module, fqn):
                chosen.append(fqn)
            continue
        reason = impossible(module)
        if reason is None and filter is not None and not filter(module, fqn):
            reason = "the filter said no"
        if reason is None and filter is None:
            reason = module.__dict__.get(SKIPPED)
            if reason is None or (isinstance(reason, TooSlow) and break_even is not True):
                reason = policy.reason(module, fqn)
            if isinstance(reason, OutputHead) and recipe.head_grad_output is not None:
                objection = policy.head_reason(module, reason)
                if objection is None:
                    heads.append(fqn)
                reason = objection or reason
        if reason is None:
            chosen.append(fqn)
        else:
            skipped[fqn] = reason
    return chosen, heads, skipped


def _check_chosen(modules: dict[str, nn.Module], chosen: list[str], skipped: dict[str, str], recipe: Recipe) -> None:
    if not chosen and not any(isinstance(module, FP8Linear) for module in modules.values()):
        slow = [reason for reason in skipped.values() if isinstance(reason, TooSlow)]
        if slow:
            warnings.warn(
                f"recipe {recipe.name!r} converts no layer, since none would be faster: {slow[0]}, and "
                "break_even=octavo.BreakEven(tokens=..., compiled=True) judges them as they run under torch.compile",
                stacklevel=_depth_of_user(),
            )
            return
        layers = "".join(f"\n  {fqn or 'the model itself'}: {reason}" for fqn, reason in list(skipped.items())[:8])
        raise ValueError(
            f"recipe {recipe.name!r} would convert no layer of {type(modules['']).__name__}; pass a filter to take layers that "
            f"the default leaves, or recipe='bf16'. Layers with weights:{layers or ' none'}"
        )
    if recipe.master is not None:
        _check_replaceable({fqn: modules[fqn] for fqn in chosen})


def _tell_of_slow(chosen: list[str], skipped: dict[str, str]) -> None:
    slow = {fqn: reason for fqn, reason in skipped.items() if isinstance(reason, TooSlow)}
    if slow:
        fqn, reason = next(iter(slow.items()))
        warnings.warn(
            f"{len(slow)} of {len(slow) + len(chosen)} linear layers stay as they are, the first {fqn}: {reason}, and "
            "break_even=octavo.BreakEven(tokens=..., compiled=True) judges them as they run under torch.compile, and graph=True in a graph",
            stacklevel=_depth_of_user(),
        )


def _depth_of_user() -> int:
    """The `stacklevel` of a warning for whoever called octavo, by `convert` or from further out."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "octavo":
        depth, frame = depth + 1, frame.f_back
    return depth


def _check_replaceable(modules: dict[str, nn.Module]) -> None:
    stuck = [
        fqn for fqn, module in modules.items() if isinstance(module.weight, Tensor) and not replaceable(module.weight)
    ]
    if stuck:
        raise ValueError(
            f"the weights of {', '.join(stuck[:4]) or 'the model'} cannot change storage, because a backward "
            "pass that was not run, a view or a weak reference holds them: convert before the first forward, or delete its outputs"
        )


def _shared_with_plain(modules: dict[str, nn.Module], chosen: list[str]) -> set[int]:
    """Ids of the parameters that a module which is not converted owns too."""
    converted = {id(modules[fqn]) for fqn in chosen}
    return {
        id(param)
        for module in modules.values()
        if id(module) not in converted and not isinstance(module, FP8Linear)
        for param in module._parameters.values()
        if param is not None
    }
