"""`octavo bench optimizer`: the step of AdamW over the linear layers of a model, beside other optimizers with small states.

Three steps with gradients that differ are checked first: the distance to FP32 AdamW over the layers of the first block, relative to how
far that moved the weights. Then the last step is timed again and again. As in training, an FP8 gradient knows the largest magnitude of
its codes, so that the step reads it once. BF16 weights have no master, unless the optimizer keeps one of its own; their rounding, at a
learning rate of 1e-3, is a few per cent of the movement.

Bytes a parameter are those of weights, gradients and states: on a GPU what its allocator says, and the most that it held during a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.bench.floors import bytes_ms
from octavo.bench.peers import SMALL_OPTIMIZERS, small_optimizer
from octavo.bench.rows import Row
from octavo.bench.run import Run
from octavo.convert import convert
from octavo.formats import FP32
from octavo.linear import scaled_gradient
from octavo.models import TransformerConfig
from octavo.optim import AdamW
from octavo.plan.shapes import Setup
from octavo.tensor import ScaledTensor

BOUND = 0.20
BASELINE = "torch AdamW, FP32"
LR = 1e-3
BETAS = (0.9, 0.95)
STEPS = 3
GRADIENT_STD = 1e-3


@dataclass(frozen=True)
class Variant:
    """An optimizer, and the dtype of weights and gradients that it is given."""

    dtype: torch.dtype
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    converted: bool = False
    """Weights and gradients are those of octavo's recipe."""


def run_optimizer(run: Run, config: TransformerConfig, layers: int) -> None:
    """All variants, over the linear layers of `layers` blocks."""
    shapes = list(Setup(config, run.recipe, config.max_seq_len, 1).linears.values())
    count = layers * sum(inputs * outputs for inputs, outputs in shapes)
    what = f"{count / 1e6:,.4g}M parameters, {layers} blocks of d {config.dim}"
    for name, variant in variants(run).items():
        row = Row("optimizer", what, name, bound=BOUND)
        if variant.converted:
            gbytes = count * _moved(run) / 1e9
            row = dataclasses.replace(row, gbytes=gbytes, floor_ms=bytes_ms(gbytes, run.ceiling))
        run.add(row, lambda row: _time(run, row, variant, shapes, layers), BASELINE)  # noqa: B023


def variants(run: Run) -> dict[str, Variant]:
    """By name; octavo's after the baselines, peers last."""
    options = {"lr": LR, "betas": BETAS, "weight_decay": 0.1}

    def stock(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, **options, fused=True)  # type: ignore[arg-type]

    def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW(params, **options, recipe=run.recipe)  # type: ignore[arg-type]

    def small(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        return lambda params: small_optimizer(name, params, **options)

    return {
        BASELINE: Variant(torch.float32, stock),
        "torch AdamW, BF16 without master": Variant(torch.bfloat16, stock),
        f"octavo AdamW, {run.recipe.name}": Variant(torch.bfloat16, ours, converted=run.recipe.converts),
        **{name: Variant(torch.bfloat16, small(name)) for name in SMALL_OPTIMIZERS},
    }


def _moved(run: Run) -> float:
    """Bytes that a step of one pass reads and writes a parameter: the gradient once, all else in and out."""
    recipe = run.recipe
    moved = 1.0 if recipe.grad is not None else 4.0
    moved += 2 * (2 if recipe.master is None else recipe.master.dtype.itemsize)
    for fmt, block in ((recipe.exp_avg, recipe.exp_avg_block), (recipe.exp_avg_sq, recipe.exp_avg_sq_block)):
        moved += 2 * (fmt.dtype.itemsize + (4 / block if block and fmt is not FP32 else 0))
    return moved


def _time(run: Run, row: Row, variant: Variant, shapes: list[tuple[int, int]], layers: int) -> Row:
    base = torch.cuda.memory_allocated(run.device) if run.is_cuda else 0
    model = nn.ModuleList(
        nn.Linear(inputs, outputs, bias=False, device=run.device, dtype=variant.dtype)
        for _ in range(layers)
        for inputs, outputs in shapes
    )
    if variant.converted:
        convert(model, run.recipe, filter=lambda module, fqn: True)
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    for number, param in enumerate(params):
        with torch.no_grad():
            param.copy_(_values(run, param, number, 0.02))
    optimizer = variant.build(params)
    for step in range(STEPS):
        for number, param in enumerate(params):
            param.grad = None
            param.grad = _gradient(run, variant, param, number, step)
        optimizer.step()
    error = _error(run, params[: len(shapes)])
    resident = torch.cuda.memory_allocated(run.device) - base if run.is_cuda else _bytes(params, optimizer)
    run.forget_peak()
    timing = run.time(optimizer.step)
    peak = (torch.cuda.max_memory_allocated(run.device) - base) / count if run.is_cuda else None
    return dataclasses.replace(row.timed(timing), error=error, resident_bytes=resident / count, peak_bytes=peak)


def _bytes(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Of weights, gradients and states."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    gradients = [param.grad for param in params if param.grad is not None]
    return sum(_size(tensor) for tensor in (*params, *gradients, *states))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, or of those inside of it."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_size(getattr(tensor, name)) for name in names)


def _values(run: Run, param: Tensor, number: int, std: float, step: int = -1) -> Tensor:
    """FP32 values of the parameter `number`: its weights, or its gradient in a step."""
    return run.normal(*param.shape, std=std, seed=number + 1000 * (step + 1), dtype=torch.float32)


def _gradient(run: Run, variant: Variant, param: Tensor, number: int, step: int) -> Tensor:
    gradient = _values(run, param, number, GRADIENT_STD, step)
    if isinstance(param, ScaledTensor):
        return scaled_gradient(gradient, param.dtype)
    return gradient.to(variant.dtype)


def _error(run: Run, params: list[nn.Parameter]) -> float:
    """‖w - FP32's‖ / ‖FP32's - w before‖, the largest over the parameters."""
    errors = []
    for number, param in enumerate(params):
        before = _values(run, param, number, 0.02)
        exact = nn.Parameter(before.clone())
        optimizer = torch.optim.AdamW([exact], lr=LR, betas=BETAS, weight_decay=0.1)
        for step in range(STEPS):
            exact.grad = _values(run, param, number, GRADIENT_STD, step)
            optimizer.step()
        got = (param.dequantize() if isinstance(param, ScaledTensor) else param).detach().float()
        errors.append((got - exact.detach()).norm() / (exact.detach() - before).norm())
    return torch.stack(errors).amax().item()
