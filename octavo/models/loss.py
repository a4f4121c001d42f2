"""Cross-entropy of a language model's head without the logits of the whole batch.

    loss = mean over targets t ≠ IGNORE of  log Σ_v exp(l_v) - l_t,    l = x Wᵀ,    ∂loss/∂l = (softmax(l) - onehot(t)) / count

16,384 tokens and a vocabulary of 50,304 make 1.6 GB of logits in BF16 and 3.3 GB in FP32, more than all other activations of a
large model. The gradient of a chunk of tokens is known as soon as its logits are, so it is taken at once: forward computes
the loss, ∂loss/∂x and ∂loss/∂W chunk by chunk, and backward only multiplies them by the gradient of the loss. No logits outlive
their chunk and none are computed twice. Softmax and sums are FP32; the factor 1/count comes last, so that it costs the
gradient of the logits no range.

With a `grad_output` format the two products with that gradient run in FP8 (`octavo.models.head_gradients`), the logits as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import Format
from octavo.kernels.cross_entropy import softmax_gradient
from octavo.kernels.reference.cross_entropy import losses_and_gradient
from octavo.linear.gemm import differentiable_once
from octavo.models.head_gradients import FP8Gradients, unit_scale

IGNORE = -100
"""Targets of this value do not count, as in PyTorch. Any other that is no class is an error, and where nobody looks makes the loss NaN."""
CHUNK_ELEMENTS = 1 << 27
"""Logits of one chunk: 268 MB in BF16, 2,560 tokens of a vocabulary of 50,304; smaller batches are one chunk."""

ChunkLoss = Callable[[Tensor, Tensor, int, Format | None], tuple[Tensor, Tensor]]


def chunk_loss(logits: Tensor, targets: Tensor, classes: int, fmt: Format | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the losses, 0-d FP32, and its gradient, in the logits' dtype; logits [n, V], targets int64 [n] below `classes` ≤ V.

    With `fmt`, FP8, the gradient as codes of that format with the scale `unit_scale(fmt)`.
    """
    places, counts = (part.squeeze(1) for part in _places(targets, classes))
    if fmt is not None:
        losses, gradient = softmax_gradient(logits, places, counts, fmt, unit_scale(fmt))
    else:
        losses, gradient = losses_and_gradient(logits, places, counts)
        gradient = gradient.to(logits.dtype)
    return losses.sum(), gradient


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    classes: int | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    chunk_loss: ChunkLoss = chunk_loss,
    grad_output: Format | None = None,
) -> Tensor:
    """Mean cross-entropy of x Wᵀ against `targets`, a 0-d FP32 tensor; 0 if every target is `IGNORE`.

    x [n, C] in the compute dtype, weight [V, C] of any dtype (cast to that of x), targets int64 [n]. A chunk holds about
    `chunk_elements` logits; `chunk_loss` may be a compiled one. Rows of `weight` from `classes` on are padding: they take no
    probability and get a gradient of zero. `grad_output` is the format of the logits' gradient in FP8 GEMMs; None computes in the dtype
    of x. It can be differentiated once.

    Raises `ValueError` if x and targets differ in length, or on a CPU if a target is no class; on a GPU, where nobody waits for the
    answer, loss and gradients are then NaN, and the optimizer skips the step.
    """
    classes = len(weight) if classes is None else classes
    if targets.shape != x.shape[:1]:
        raise ValueError(
            f"there are {list(targets.shape)} targets for {list(x.shape[:1])} rows of x: give one for each"
        )
    _check_classes(targets, classes)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(x, weight, targets, classes, chunk_elements, chunk_loss, grad_output)
    w = weight.to(x.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    for rows in _chunks(len(x), len(w), chunk_elements):
        loss += _sum(_logits(x[rows], w, classes), targets[rows], classes)
    return loss / _count(targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of the losses of logits [n, V], 0-d FP32, where they exist already; targets and errors as of `linear_cross_entropy`."""
    _check_classes(targets, logits.shape[1])
    return _sum(logits, targets, logits.shape[1]) / _count(targets)


def chunk_tokens(vocabulary: int, chunk_elements: int = CHUNK_ELEMENTS) -> int:
    """Tokens of a chunk: a multiple of 128, or where that is too many of 16, which is what kernels read at a time."""
    size = chunk_elements // vocabulary
    return size // 128 * 128 if size >= 128 else max(size // 16, 1) * 16


def _places(targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(a class for each target, int64 [n, 1]; FP32 [n, 1]: 1 where it is the target's, 0 for IGNORE and NaN where there is none)."""
    valid = (targets >= 0) & (targets < classes)
    counts = torch.where(valid, 1.0, torch.where(targets == IGNORE, 0.0, math.nan))
    return torch.where(valid, targets, 0)[:, None], counts[:, None]


def _check_classes(targets: Tensor, classes: int) -> None:
    if is_compiling() or type(targets) is not Tensor or targets.device.type != "cpu":
        return
    wrong = _places(targets, classes)[1].isnan().squeeze(1)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"target {place} is {int(targets[place])}: classes are 0 to {classes - 1}, and targets of {IGNORE} do not count"
        )


def _sum(logits: Tensor, targets: Tensor, classes: int) -> Tensor:
    places, counts = _places(targets, classes)
    return -(logits.float().log_softmax(dim=-1).gather(1, places) * counts).sum()


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE).sum().clamp(min=1)


def _logits(x: Tensor, weight: Tensor, classes: int) -> Tensor:
    """x Wᵀ, minus infinity for padding: masked rather than cut off, since a GEMM of an odd width is slow."""
    logits = x @ weight.t()
    if classes < len(weight):
        logits[:, classes:] = -math.inf
    return logits


def _chunks(tokens: int, vocabulary: int, chunk_elements: int) -> list[slice]:
    size = chunk_tokens(vocabulary, chunk_elements)
    whole = (
        tokens // size
    )  # which alone the compiler takes for a constant, so that it compiles once for many numbers of tokens
    chunks = [slice(size * index, size * (index + 1)) for index in range(whole)]
    return chunks if tokens == size * whole else [*chunks, slice(size * whole, tokens)]


class Gradients(Protocol):
    """Takes the gradient of the logits chunk by chunk, and gives dx and dw, each None if it is not needed."""

    def add(self, rows: slice, gradient: Tensor) -> None: ...

    def finish(self) -> tuple[Tensor | None, Tensor | None]: ...


class PlainGradients:
    """dx [n, C] in the dtype of x, dw [V, C] summed in FP32."""

    def __init__(self, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> None:
        self.x, self.weight = x, weight
        self.dx = torch.empty_like(x) if need_x else None
        self.dw = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if need_w else None

    def add(self, rows: slice, gradient: Tensor) -> None:
        """gradient [rows, V] in the dtype of x."""
        if self.dx is not None:
            self.dx[rows] = gradient @ self.weight
        if self.dw is not None:
            _add_product(self.dw, gradient.t(), self.x[rows])

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """(dx, dw)."""
        return self.dx, self.dw


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, in FP32; on a GPU within the GEMM, which saves a product of the size of the head, its rounding and two passes."""
    if total.is_cuda and a.itemsize == 2 and a.dtype == b.dtype:  # (autocast may have changed one)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _over_chunks(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    classes: int,
    chunk_elements: int,
    chunk_loss: ChunkLoss,
    fmt: Format | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """(sum of the losses, what all chunks gave to the gradients); weights and logits are gone on return."""
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    chunks = _chunks(len(x), len(w), chunk_elements)
    gradients: Gradients
    if fmt is None or len(x) == 0:
        gradients = PlainGradients(x, w, needs[0], needs[1])
    else:
        gradients = FP8Gradients(x, w, fmt, needs[0], needs[1], chunks[0].stop)
    for rows in chunks:
        chunk_sum, gradient = chunk_loss(_logits(x[rows], w, classes), targets[rows], classes, fmt)
        loss += chunk_sum
        gradients.add(rows, gradient)
    return loss, gradients


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        classes: int,
        chunk_elements: int,
        chunk_loss: ChunkLoss,
        fmt: Format | None,
    ) -> Tensor:
        loss, gradients = _over_chunks(
            x, weight.to(x.dtype), targets, classes, chunk_elements, chunk_loss, fmt, ctx.needs_input_grad
        )
        dx, dw = gradients.finish()
        count = _count(targets)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(dx, dw, count)
        return loss / count

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, count = ctx.saved_tensors
        factor = grad_outputs[0] / count
        dx = None if dx is None else _times(dx, factor, dx.dtype)
        dw = None if dw is None else _times(dw, factor, ctx.weight_dtype)
        return dx, dw, None, None, None, None, None


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor, FP32 0-d, made in FP32 and rounded to `dtype`; in one pass but for FP16, whose overflow has to show."""
    if dtype == torch.float16:
        return (x.float() * factor).to(dtype)
    return kernels.uncast(x, factor.reciprocal(), dtype)
