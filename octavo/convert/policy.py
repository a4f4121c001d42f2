"""Which layers become FP8, and why the others do not.

A layer is taken if octavo knows its forward to be x · wᵀ + bias and nothing else: exact classes only, for a subclass may do
more. Of those, the default leaves out what FP8 would harm or slow down: the forward of output heads (their logits decide the loss; their
backward becomes FP8 if the recipe has `head_grad_output`), routers of experts (a flipped choice is a large error), layers with a side
under 32, and those that were measured to be slower on their device (`break_even`). A filter given by the user replaces the default, not
what octavo cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from octavo.convert.break_even import Rule, TooSlow
from octavo.linear import FP8Conv1D, FP8Linear, HeadLinear

Filter = Callable[[nn.Module, str], bool]
"""(module, full name) -> whether to convert it."""

HEADS = frozenset({"lm_head", "head", "output", "classifier", "score"})
"""Names of output heads, where they stand outside of the numbered blocks of a model."""
ROUTERS = frozenset({"gate", "router"})
"""Names of routers, where they stand beside `experts`."""
MIN_SIDE = 32
"""Fewest input or output features for which a conversion can pay: below, casts cost more than the GEMM."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerReport:
    """What `convert` did with one layer."""

    fqn: str
    """Full name of the module."""
    converted: bool
    reason: str
    """Why it was skipped; of a converted layer, how its weight is stored."""
    backward: bool = False
    """Of a layer that is not converted: its backward alone runs in FP8, as that of output heads does."""

    def __str__(self) -> str:
        done = "converted" if self.converted else "backward converted" if self.backward else "skipped"
        return f"{self.fqn}: {done}, {self.reason}"


class OutputHead(str):
    """A reason that output heads have: their forward stays as it is."""


def fp8_class(module: nn.Module) -> type[FP8Linear] | None:
    """The class that `module` can become, or None if octavo does not know its forward."""
    cls = module.plain_class if isinstance(module, HeadLinear) else type(module)
    if cls is nn.Linear or (cls.__module__, cls.__name__) == ("octavo.models.layers", "Linear"):
        return FP8Linear
    if cls.__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(module.weight, nn.Parameter):
        return FP8Conv1D
    return None


def sides(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a module that has an FP8 class."""
    assert isinstance(module.weight, torch.Tensor)
    cls = fp8_class(module)
    first, second = module.weight.shape
    return (first, second) if cls is not None and cls.input_first else (second, first)


def is_candidate(module: nn.Module) -> bool:
    """Whether the module holds a weight with two dims or more, so that a user may expect it to be converted."""
    return any(dim >= 2 for dim in _dims(module))


def _dims(module: nn.Module) -> list[int]:
    """Dims of the parameters that the module itself holds; one that gets its shape at the first forward counts as a matrix."""
    return [2 if is_lazy(param) else param.dim() for param in module._parameters.values() if param is not None]


def impossible(module: nn.Module) -> str | None:
    """Why octavo cannot convert this module whatever the filter says, or None."""
    if fp8_class(module) is None:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return "an embedding looks rows up, it multiplies nothing"
        if 3 in _dims(module) and not hasattr(module, "kernel_size"):
            return f"{type(module).__name__} keeps a 3-D weight, as fused experts do: only single linear layers are converted"
        if isinstance(module, nn.Linear):
            return f"{type(module).__name__} is a subclass of Linear, whose forward may do more than a product"
        return f"{type(module).__name__} is not a linear layer"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (parametrization, weight norm), and FP8 needs it to be one"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance: convert the model before hooks of accelerate and the like"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}; FP8 layers take float32, bfloat16 and float16"
    if weight.numel() == 0:
        return f"its weight {tuple(weight.shape)} is empty"
    return None


class DefaultPolicy:
    """Why a convertible layer should stay as it is, in the context of its model and, with `break_even`, for its speed."""

    def __init__(self, model: nn.Module, break_even: Rule | None = None) -> None:
        self.break_even = break_even
        self.modules = dict(model.named_modules())
        self.embeddings = {
            id(module.weight): name for name, module in self.modules.items() if isinstance(module, nn.Embedding)
        }

    def reason(self, module: nn.Module, fqn: str) -> str | None:
        """The reason, or None to convert."""
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        path, _, name = fqn.rpartition(".")
        if id(weight) in self.embeddings:
            return OutputHead(f"an output head: its weight is tied to {self.embeddings[id(weight)]}")
        if name in HEADS and not any(part.isdigit() for part in fqn.split(".")):
            return OutputHead(f"an output head by its name {name!r}")
        if name in ROUTERS and hasattr(self.modules[path], "experts"):
            return "a router of experts"
        if min(weight.shape) < MIN_SIDE:
            return f"its weight {tuple(weight.shape)} has a side under {MIN_SIDE}, where FP8 is slower"
        return self.slow(module)

    def slow(self, module: nn.Module) -> str | None:
        """Why FP8 would slow the layer down, or None."""
        assert isinstance(module.weight, torch.Tensor)
        return None if self.break_even is None else self.break_even(*sides(module), module.weight.device)

    def head_reason(self, module: nn.Module, reason: OutputHead) -> str | None:
        """Why the backward of an output head should stay as it is too, or None."""
        if fp8_class(module) is not FP8Linear or min(sides(module)) < MIN_SIDE:
            return reason
        slow = self.slow(module)
        return slow if slow is None else TooSlow(f"{reason}; {slow}")
