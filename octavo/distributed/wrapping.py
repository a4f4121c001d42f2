"""What a model, a process group and a parameter must be to be wrapped by `DataParallel`; how it finds outputs and hears of gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.distributed.collectives import backend_of, new_group
from octavo.kernels.untraced import untraced
from octavo.linear import FP8Linear
from octavo.recipe import BASELINE, Recipe


def world_of(group: Any) -> int:
    """The number of ranks. Raises `ValueError` where there are others that this process does not know, or is not one of."""
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group, so every rank would train a model of its own: "
                "call torch.distributed.init_process_group() before wrapping"
            )
        return 1
    world = dist.get_world_size(group)
    if world < 1:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: wrap the model on the ranks of the group only")
    return world


def recipe_of(module: nn.Module) -> Recipe:
    """That of the first converted layer, or the baseline."""
    return next((layer.recipe for layer in module.modules() if isinstance(layer, FP8Linear)), BASELINE)


def scaled_parameters(module: nn.Module) -> list[Tensor]:
    """Weights whose gradients are stored in FP8."""
    layers = [layer for layer in module.modules() if isinstance(layer, FP8Linear)]
    return [layer.weight for layer in layers if layer.gradient_format is not None and layer.weight.is_leaf]


def device_of(module: nn.Module) -> torch.device:
    """Where all its parameters are. Raises `ValueError` if they are on several devices, or on none."""
    devices = {str(param.device): name for name, param in module.named_parameters()}
    if len(devices) > 1 or "meta" in devices:
        places = " and ".join(f"{name} on {device}" for device, name in list(devices.items())[:2])
        raise ValueError(
            f"the module has {places}: each rank holds the whole model on one real device, so move it there first"
        )
    return torch.device(next(iter(devices), "cpu"))


def own_group(group: Any, device: torch.device, timeout: timedelta) -> Any:
    """A group for the reductions alone: with gloo they run in a thread, and must not mix with other work on the user's group.

    Raises `ValueError` if the group has no backend for the device.
    """
    backend = backend_of(group, device)
    if backend is None:
        raise ValueError(
            f"the module is on {device}, which {dist.get_backend(group)} does not serve: move it there before wrapping, or initialise "
            "the process group with another backend"
        )
    if backend == "nccl":
        return group
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return new_group(ranks, timeout, of=group)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returns: in containers that PyTorch knows, and in dataclasses, which it does not."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


class _Hook:
    """After accumulation: tells the wrapper of a parameter.

    It does not keep the wrapper alive: the garbage collector cannot see through a hook, and would never free either.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = ref(wrapper)

    @untraced
    def __call__(self, param: Tensor) -> None:
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper._ready(param)


def watch(param: Tensor, wrapper: Any) -> None:
    """Registers a hook, on frozen parameters too: they may be unfrozen. It takes the place of that of any wrapper before, for two that
    write to one gradient at a time would spoil it."""
    hooks = param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
        before = hooks.pop(key).wrapper()
        if before is not None:
            before._replaced = True
    requires_grad = param.requires_grad
    param.requires_grad_(True).register_post_accumulate_grad_hook(_Hook(wrapper))
    param.requires_grad_(requires_grad)
