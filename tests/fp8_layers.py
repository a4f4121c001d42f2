"""What the tests of FP8 layers share: layers, casts of reference, comparisons, spies."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.convert import convert
from octavo.formats import E4M3, Format
from octavo.kernels import streams
from octavo.linear import FP8Linear
from octavo.recipe import O1, O2, Recipe
from octavo.tensor import ScaledTensor, cast, uncast

DELAYED = dataclasses.replace(O2, name="delayed", scaling="delayed")
LEVELS = pytest.mark.parametrize("recipe", [O1, O2], ids=["O1", "O2"])


def always(module: nn.Module, fqn: str) -> bool:
    return True


def make(k: int, n: int, recipe: str | Recipe = O2, bias: bool = True, dtype: torch.dtype = torch.float32) -> FP8Linear:
    layer = convert(nn.Linear(k, n, bias=bias, dtype=dtype), recipe, filter=always)
    assert isinstance(layer, FP8Linear)
    return layer


def fp8(x: Tensor, fmt: Format = E4M3) -> Tensor:
    """Real values of the cast of x."""
    return uncast(cast(x.detach().float(), fmt))


def relative(x: Tensor, reference: Tensor) -> float:
    x, reference = uncast(x.detach()).double(), uncast(reference.detach()).double()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-30))


def same_bits(x: Tensor, y: Tensor) -> bool:
    x, y = x.detach(), y.detach()
    if isinstance(x, ScaledTensor) and isinstance(y, ScaledTensor):
        return same_bits(x.codes, y.codes) and same_bits(x.scale, y.scale)
    return x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y))


def as_bytes(x: Tensor) -> Tensor:
    return uncast(x).reshape(-1).contiguous().view(torch.uint8)


def count_casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the matrices that are cast from now on."""
    shapes: list[tuple[int, ...]] = []
    original = kernels.quantize

    def spy(x: Tensor, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(kernels, "quantize", spy)
    return shapes


def on_stream(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """From now on, work on CPU is taken for that of a stream of a GPU, or for captured."""
    monkeypatch.setattr(streams, "place", lambda x: stream)


def scaling_state(layer: FP8Linear) -> list[Tensor]:
    return [
        tensor.clone()
        for scaling in (layer.input_scaling, layer.grad_output_scaling)
        for tensor in scaling.state_dict().values()
    ]


def equal_states(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
