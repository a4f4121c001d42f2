"""`octavo bench linear`: forward and backward of one linear layer, all casts included, beside BF16 and other FP8 layers.

Every call computes y = x wᵀ and the gradients of x and w, and casts the weight again, as in the first micro-batch of a step. The error
of a row is the largest of y, dx and dw relative to those of BF16 on the same inputs. Rounding an operand to E4M3 (2.6% of
normal values) and another (2.6%) or the output gradient to E5M2 (5.2%) leaves 3.7% in y and 5.8% in dx and dw, and dw is rounded once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.bench.floors import linear_ms, plain_linear_ms
from octavo.bench.peers import torchao_float8, transformer_engine_linear
from octavo.bench.rows import Row
from octavo.bench.run import Run, relative_error
from octavo.bench.timing import captured
from octavo.convert import convert
from octavo.linear import FP8Linear
from octavo.tensor import ScaledTensor

BOUND = 0.10
BASELINE = "bf16"

Layer = tuple[nn.Module, Callable[[], AbstractContextManager]]
"""A layer with BF16 weights at first, and the context of its forward."""


def run_linear(run: Run, tokens: int, shapes: list[tuple[int, int]]) -> None:
    """Each shape (inputs, outputs), each variant in each of the modes that it has."""
    for inputs, outputs in shapes:
        what = f"{tokens} tokens, {inputs} → {outputs}"
        row = Row("linear", what, BASELINE, tokens=tokens, gflops=6e-9 * tokens * inputs * outputs, bound=BOUND)
        for variant, build in variants(run, inputs, outputs).items():
            ours = variant.startswith("octavo")
            for mode in run.modes:
                if variant.startswith("TransformerEngine") and mode != "eager":
                    continue  # its layers are opaque to the compiler, and have graphs of their own
                floor = plain_linear_ms if variant == BASELINE else linear_ms if ours else None
                floor_ms = None if floor is None else floor(tokens, inputs, outputs, run.ceiling)
                one = dataclasses.replace(row, variant=variant, mode=mode, floor_ms=floor_ms)
                run.add(one, lambda row: time_layer(run, row, build, inputs, outputs), BASELINE, mode)  # noqa: B023


def variants(run: Run, inputs: int, outputs: int) -> dict[str, Callable[[], Layer]]:
    """Name → what builds the layer."""

    def plain() -> nn.Module:
        return nn.Linear(inputs, outputs, bias=False, device=run.device, dtype=torch.bfloat16)

    def octavo() -> nn.Module:
        return convert(nn.Sequential(plain()), run.recipe, filter=lambda module, fqn: True)

    return {
        BASELINE: lambda: (plain(), nullcontext),
        f"octavo {run.recipe.name}": lambda: (octavo(), nullcontext),
        "TransformerEngine delayed": lambda: transformer_engine_linear(inputs, outputs, delayed=True),
        "TransformerEngine current": lambda: transformer_engine_linear(inputs, outputs, delayed=False),
        "torchao tensorwise": lambda: (torchao_float8(nn.Sequential(plain()), run.device), nullcontext),
    }


def time_layer(run: Run, row: Row, build: Callable[[], Layer], inputs: int, outputs: int) -> Row:
    """The row with the time and error of forward and backward, in its mode and for its tokens."""
    assert row.tokens is not None
    layer, context = build()
    w = run.normal(outputs, inputs, std=inputs**-0.5, seed=1)
    (weight,) = layer.parameters()
    with torch.no_grad():
        weight.copy_(w)
    x = run.normal(row.tokens, inputs).requires_grad_()
    dy = run.normal(row.tokens, outputs, seed=2)
    forward = torch.compile(layer) if row.mode == "compiled" else layer

    def function() -> Tensor:
        x.grad = weight.grad = None
        with context():
            y = forward(x)
        y.backward(dy)
        return y

    for _ in range(run.settling):
        y = function()
        move_scales(layer)
    error = _error(y, x, weight, w, dy)
    del y  # its graph belongs to the stream that it ran on, and could not be captured on another
    timed = captured(function) if row.mode == "graph" else function
    return dataclasses.replace(row.timed(run.time(timed)), error=error)


def move_scales(model: nn.Module) -> None:
    """What the step of an optimizer does to delayed scales."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.update_scaling()


def _error(y: Tensor, x: Tensor, weight: Tensor, w: Tensor, dy: Tensor) -> float:
    """Of y and both gradients, against BF16."""
    assert x.grad is not None and weight.grad is not None
    dw = weight.grad.dequantize() if isinstance(weight.grad, ScaledTensor) else weight.grad
    want = (F.linear(x.detach(), w), dy @ w, dy.t() @ x.detach())
    return relative_error((y, x.grad, dw), want)
