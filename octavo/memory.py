"""Where the bytes of a training run are: weights, gradients, optimizer states and the FP8 copies that GEMMs read.

Counted are the tensors that exist at the moment of the call, each storage once however many names it has, with scales,
residuals and block scales. Activations and the workspace of kernels are not: they live inside a step, and the allocator's
peak shows them. So the report explains the resident part of a run, and the sum per parameter of converted layers is what Eq. 8 of
FP8-LM counts: 2 (FP16 + scale) + 1 (FP8 gradient) + 1 + 2 (moments) = 6 bytes for O2, where Eq. 7 has 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.linear import FP8Linear
from octavo.tensor import ScaledTensor

KINDS = ("weights", "gradients", "optimizer states", "weight cache")
"""Kinds of bytes that belong to the weights of converted layers."""
OTHER_KINDS = ("other parameters", "other gradients", "other states", "buffers")
"""Kinds of bytes that belong to everything else."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model and its optimizer, by kind."""

    by_kind: dict[str, int]
    """Bytes for each of `KINDS` and `OTHER_KINDS`."""
    converted: int
    """Parameters (elements) in weights of converted layers."""
    parameters: int
    """Parameters (elements) of the model, tied ones once."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Weights, gradients and optimizer states of converted layers, for each of their parameters; 0 if there are none."""
        return self._per_parameter(*KINDS[:3])

    def _per_parameter(self, *kinds: str) -> float:
        return sum(self.by_kind[kind] for kind in kinds) / self.converted if self.converted else 0.0

    def __str__(self) -> str:
        lines = [f"{'kind':<18} {'MiB':>12} {'B/parameter':>12}"]
        for kind, size in self.by_kind.items():
            each = f"{self._per_parameter(kind):12.3f}" if kind in KINDS and self.converted else f"{'':>12}"
            lines.append(f"{kind:<18} {size / 2**20:12.3f} {each}")
        lines.append(f"{'total':<18} {self.total / 2**20:12.3f}")
        lines.append(
            f"{self.converted:,} of {self.parameters:,} parameters are in converted layers, "
            f"at {self.bytes_per_parameter:.3f} B each without the weight cache"
        )
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Counts the bytes that `model` and `optimizer` hold now.

    Call it after `backward` and before `zero_grad` to see gradients, and before `optimizer.step` to see the weight cache.
    """
    weights = {id(module.weight) for module in model.modules() if isinstance(module, FP8Linear)}
    by_kind = dict.fromkeys(KINDS + OTHER_KINDS, 0)
    seen: set[int] = set()
    converted = parameters = 0

    def count(kind: str, value: Any) -> None:
        for tensor in plain_tensors(value):
            storage = tensor.untyped_storage()
            # On the meta device all addresses are 0, and nothing is shared as far as one can tell.
            key = storage.data_ptr() or id(tensor)
            if key not in seen:
                seen.add(key)
                by_kind[kind] += storage.nbytes()

    for param in model.parameters():
        inside = id(param) in weights
        parameters += param.numel()
        converted += param.numel() if inside else 0
        count("weights" if inside else "other parameters", param)
        count("gradients" if inside else "other gradients", param.grad)
        count("optimizer states" if inside else "other states", {} if optimizer is None else optimizer.state.get(param))
        count("weight cache", getattr(param, "_octavo_cast", None))
    count("buffers", list(model.buffers()))
    return MemoryReport(by_kind, converted, parameters)


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """All plain tensors in nested containers, those inside of a ScaledTensor included."""
    if isinstance(value, ScaledTensor):
        names, _ = value.__tensor_flatten__()
        yield from (getattr(value, name) for name in names)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from plain_tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from plain_tensors(item)
