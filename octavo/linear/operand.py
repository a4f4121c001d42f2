"""Operands of FP8 GEMMs: a matrix cast once, row-major and transposed, with its scale; and a gradient as it is stored.

The weight is cast once per optimizer step, not per micro-batch: its operand stays on the parameter (2 B an element) until the
parameter changes. In a loop that does not accumulate gradients nobody would read it again, so there it goes as soon as the
gradient is made, and weights, gradients and optimizer states are all that is resident when the optimizer steps. That of a frozen
weight goes after its dgrad, and is cast again for the next micro-batch: a frozen base should cost its storage and no more.

While `torch.compile` traces there is no such cache, and dgrad casts the weight again in backward. Two casts, each of which reads 2 B and
writes 1, move 6 B an element where one that writes both halves moves 4: on an H200, 0.1 of the 26 ms of a layer of the 7B. To keep the
other half until backward would cost 1 B an element of all layers where memory peaks, 6 GiB of the 7B's, and memory is what is short.
While a CUDA graph is captured there is no cache either: replays see no version, so each has to cast the weight as it finds it.
A master that is E4M3 itself is never cast, and its transpose lives for one GEMM only.

A weight is read for its largest magnitude once in its life: its codes keep it (`kernels.maxima`), and whoever changes them at a step
knows the next one. A plain weight keeps none, for many optimizers write to it through `.data`, which nobody can see.

Non-finite values stay visible although every cast saturates: an operand that holds one gets the scale NaN, so that all that
is computed from it is NaN, as an infinity in BF16 would become one layer later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import E4M3, Format
from octavo.kernels import known_amax, remember_amax, streams
from octavo.scaling import DelayedScaling
from octavo.tensor import ScaledTensor


class Hints(NamedTuple):
    """The scales that a layer's casts with current scaling had the last time, int32, 0-d: see `octavo.kernels.quantize`.

    A cache for speed: no result depends on it, nobody saves it. Plain tensors and not numbers, for which layers would be compiled apart.
    """

    input: Tensor
    grad_output: Tensor
    grad: Tensor
    """Of the gradient of the weight."""

    @staticmethod
    def on(device: torch.device) -> Hints:
        """Hints that know nothing yet."""
        return Hints(*(torch.zeros((), dtype=torch.int32, device=device) for _ in Hints._fields))


class Operand(NamedTuple):
    """A matrix [M, K] as FP8 operands of two GEMMs; padded with zero codes to multiples of 16."""

    codes: Tensor | None
    """[Mp, Kp], row-major."""
    codes_t: Tensor | None
    """[Kp, Mp], row-major: the transpose."""
    scale: Tensor
    """FP32, 0-d; NaN if the matrix holds a value that is not finite."""
    inverse: Tensor
    """1 / scale, FP32, 0-d: what the tensor cores multiply by."""

    def row(self) -> Tensor:
        """The codes [Mp, Kp]; transposed back for this call if only `codes_t` is at hand."""
        if self.codes is not None:
            return self.codes
        assert self.codes_t is not None
        return kernels.transpose_codes(self.codes_t)

    def col(self) -> Tensor:
        """The codes [Kp, Mp]; transposed for this call if only `codes` is at hand."""
        if self.codes_t is not None:
            return self.codes_t
        assert self.codes is not None
        return kernels.transpose_codes(self.codes)


def cast_operand(
    x: Tensor,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    scaling: DelayedScaling | None = None,
    record: bool = True,
    stats: Tensor | None = None,
    hint: Tensor | None = None,
) -> Operand:
    """Casts the matrix `x` [M, K] with a scale of its own, or with the one that `scaling` has from past maxima.

    `record` lets `scaling` see the maximum of `x`, if x has elements. `stats` (int64 [3]) is increased by the numbers of saturated, flushed
    and all elements. `hint` is for a scale of its own, as in `kernels.quantize`.
    """
    return cast_and_sum(
        x,
        fmt,
        power_of_two=power_of_two,
        row=row,
        col=col,
        scaling=scaling,
        record=record,
        stats=stats,
        hint=hint,
    )[0]


def cast_and_sum(
    x: Tensor,
    fmt: Format,
    *,
    power_of_two: bool,
    row: bool,
    col: bool,
    sum_columns: torch.dtype | None = None,
    scaling: DelayedScaling | None = None,
    record: bool = True,
    amax: Tensor | None = None,
    stats: Tensor | None = None,
    hint: Tensor | None = None,
) -> tuple[Operand, Tensor | None]:
    """`cast_operand`, and the sum of the columns of `x`, [K], of the dtype `sum_columns` if there is one.

    The amax of x, FP32 0-d, is given, or on it, or not known.
    """
    counts, amax = None if stats is None else stats[:2], known_amax(x) if amax is None else amax
    if stats is not None:
        stats[2] += x.numel()
    if scaling is None:
        codes, codes_t, scale, sums, inverse = kernels.quantize(
            x,
            fmt,
            power_of_two=power_of_two,
            row=row,
            col=col,
            column_sum=sum_columns or False,
            amax=amax,
            return_inverse=True,
            stats=counts,
            hint=hint,
        )
        return Operand(codes, codes_t, scale, inverse), sums
    if amax is None:
        scale = scaling.scale(x, fmt.max)
        codes, codes_t, amax = kernels.cast_transpose_amax(x, scale, fmt.dtype, row=row, col=col, stats=counts)
    else:
        scale = scaling.scale_of(lambda: amax, x.device, fmt.max)
        codes, codes_t = kernels.cast_transpose(x, scale, fmt.dtype, row=row, col=col, stats=counts)
    operand = Operand(codes, codes_t, *scaling.visible_scale(scale, amax, record and x.numel() > 0))
    return operand, None if sum_columns is None else column_sum(x, sum_columns)


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of `x` [M, K], made in FP32 and rounded to `dtype`, [K]."""
    return x.sum(0, dtype=torch.float32).to(dtype)


def weight_operand(
    weight: Tensor,
    fmt: Format,
    *,
    power_of_two: bool = True,
    row: bool = True,
    col: bool = True,
    stats: Tensor | None = None,
) -> Operand:
    """The operand of a weight [N, K], plain or ScaledTensor, with the scale of its real values; cast only if it has changed.

    A cached operand may hold more than was asked for. A change is seen by the version counters and the address: one made in place
    through `.data` of a plain weight is not (see `drop_weight_cache`). It serves the stream that made it, and no captured graph.
    """
    values, unit = _stored(weight)
    if unit is not None and values.dtype == fmt.dtype:
        return Operand(kernels.pad_codes(values), None, unit, unit.reciprocal())
    cached, tag = None, None
    place = streams.CAPTURED if is_compiling() else streams.place(values)
    if place != streams.CAPTURED and not weight.is_inference() and not values.is_inference():
        tag = (weight._version, values._version, values.data_ptr(), place, fmt, power_of_two)
        found_tag, found = getattr(weight, "_octavo_cast", (None, None))
        if found is not None and found_tag == tag:
            has_row, has_col = found.codes is not None, found.codes_t is not None
            if (has_row or not row) and (has_col or not col):
                return found
            cached = found
    if cached is not None:  # one half of it: the other is its transpose
        operand = Operand(cached.row(), cached.col(), cached.scale, cached.inverse)
    else:
        counts = None
        if stats is not None:
            stats[2] += values.numel()
            counts = stats[:2]
        codes, codes_t, scale, _, inverse = kernels.quantize(
            values,
            fmt,
            power_of_two=power_of_two,
            row=row,
            col=col,
            keep_amax=unit is not None,
            unit=unit,
            return_inverse=True,
            stats=counts,
        )
        operand = Operand(codes, codes_t, scale, inverse)
    if tag is not None:
        weight._octavo_cast = (tag, operand)  # type: ignore[attr-defined]
    return operand


def stays(x: Tensor) -> bool:
    """Whether an operand of a weight that is made now, on the device of `x`, can be left for a later call: see the top of this file."""
    return not is_compiling() and streams.place(x) != streams.CAPTURED


def _stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """(values, scale): real weight = values / scale, or values if there is no scale.

    The codes of a master are read as they lie; with power-of-two scales their cast has the bits of a cast of the real values.
    """
    if not isinstance(weight, ScaledTensor):
        return weight.detach(), None
    if weight.scale.dim() == 0 and weight.residual is None:
        return weight.codes, weight.scale
    return weight.detach().dequantize(), None


def drop_weight_cache(params: Iterable[Tensor]) -> None:
    """Forget the FP8 operands of these weights, and maxima of their codes. Wanted after a change that no version counter sees (`.data`)."""
    for param in params:
        param.__dict__.pop("_octavo_cast", None)
        if isinstance(param, ScaledTensor):
            param.codes.__dict__.pop("_octavo_amax", None)


def release_operand(weight: Tensor, has_gradient: bool) -> None:
    """Called in backward: free the FP8 operands of `weight`, unless another micro-batch will read them before it changes.

    `has_gradient`: this backward makes one for it. A weight that wants one and gets none here has another backward to come.

    A loop that accumulates is known by a gradient that waits on the weight already, and taken for one in later steps too. The operands
    of a weight that never gets a gradient, frozen or computed from other parameters, are always freed.
    """
    if is_compiling() or (weight.requires_grad and not has_gradient):
        return
    if not (weight.requires_grad and weight.is_leaf):
        return _release(weight)
    accumulates = weight.grad is not None or getattr(weight, "_octavo_accumulates", False)
    weight._octavo_accumulates = accumulates  # type: ignore[attr-defined]
    if not accumulates:
        _release(weight)


def _release(weight: Tensor) -> None:
    weight.__dict__.pop("_octavo_cast", None)


def scaled_gradient(
    grad: Tensor, dtype: torch.dtype, stats: Tensor | None = None, hint: Tensor | None = None
) -> ScaledTensor:
    """A gradient as E4M3 codes with a fresh power-of-two scale, ready to accumulate; all NaN if a value is not finite.

    `dtype` is the logical dtype; `stats` and `hint` as in `cast_operand`.
    """
    codes, scale, largest = kernels.cast_current(
        grad, E4M3, return_amax=True, stats=None if stats is None else stats[:2], hint=hint
    )
    if not is_compiling():  # (there, the operator does)
        remember_amax(codes, largest)  # for the optimizer
    if stats is not None:
        stats[2] += grad.numel()
    return ScaledTensor(codes, scale, dtype, residual_on_add=True)
