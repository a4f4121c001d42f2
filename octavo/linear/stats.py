"""Counts of saturated and flushed elements in the casts of converted layers, for monitoring.

With current scaling nothing saturates, and the share of flushed elements shows what the format cannot hold; with delayed
scaling the saturated ones show a scale that came too late. Counting costs a few operations a cast, so it is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import nn

from octavo.linear.module import FP8Linear
from octavo.linear.operand import drop_weight_cache

QUANTITIES = ("input", "weight", "grad_output", "grad")


class CastCounts(TypedDict):
    """Elements cast, and what was lost of them."""

    saturated: int
    """Elements beyond the largest value of the format."""
    flushed: int
    """Elements other than zero that became zero."""
    numel: int
    """All elements cast."""


@contextmanager
def collect_stats(model: nn.Module) -> Iterator[dict[str, dict[str, CastCounts]]]:
    """Counts the casts of every FP8Linear of `model` inside the block; the dict is filled at its end.

    Yields {layer: {"input" | "weight" | "grad_output" | "grad": CastCounts}}. A weight counts when it is cast, once
    for each optimizer step, and a gradient when its first micro-batch is stored. Reading them, at the end, waits for the device.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    result: dict[str, dict[str, CastCounts]] = {}
    for layer in layers.values():
        layer.stats = {name: torch.zeros(3, dtype=torch.int64, device=layer.weight.device) for name in QUANTITIES}
        layer.weight.__dict__["_octavo_stats"] = layer.stats["grad"]
        drop_weight_cache([layer.weight])
    try:
        yield result
    finally:
        for name, layer in layers.items():
            stats, layer.stats = layer.stats, None
            layer.weight.__dict__.pop("_octavo_stats", None)
            if stats is not None:
                result[name] = {key: _counts(tensor) for key, tensor in stats.items()}


def _counts(tensor: torch.Tensor) -> CastCounts:
    saturated, flushed, numel = tensor.tolist()
    return {"saturated": saturated, "flushed": flushed, "numel": numel}
