"""Other people's FP8 layers and small optimizers, where they are installed.

They are imported when a row asks for them, and never required. torchao changes how the compiler of the process writes minima and
maxima once it has converted a model, so it comes last in every benchmark.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn


class NotInstalledError(Exception):
    """A peer is not there, or cannot be imported."""


def peer(name: str) -> ModuleType:
    """The module `name`. Raises `NotInstalledError`."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # a missing shared library is an OSError
        raise NotInstalledError(f"{name}: {error}") from error


def torchao_float8(module: nn.Module, device: torch.device, scaling: str = "tensorwise") -> nn.Module:
    """All linear layers within `module` in torchao's FP8, one scale per tensor or, with `"rowwise"`, per row; emulated where there are
    no FP8 tensor cores."""
    float8 = peer("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(scaling)
    return float8.convert_to_float8_training(module, config=dataclasses.replace(config, emulate=device.type != "cuda"))


def transformer_engine_linear(
    inputs: int, outputs: int, delayed: bool
) -> tuple[nn.Module, Callable[[], AbstractContextManager]]:
    """A layer of TransformerEngine in BF16 without bias, and the context in which it computes in FP8."""
    te, recipes = peer("transformer_engine.pytorch"), peer("transformer_engine.common.recipe")
    recipe = recipes.DelayedScaling() if delayed else recipes.Float8CurrentScaling()
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    return layer, lambda: te.autocast(enabled=True, recipe=recipe)


def small_optimizer(name: str, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """One of `SMALL_OPTIMIZERS`, for BF16 weights."""
    module, cls, own = SMALL_OPTIMIZERS[name]
    return getattr(peer(module), cls)(list(params), **own, **options)


SMALL_OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flashoptim AdamW": ("flashoptim", "FlashAdamW", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8", {"bf16_stochastic_round": True}),
}
"""Name → module, class, options."""
