"""The three GEMMs of a linear layer in FP8, as one autograd function on matrices.

Legend: M tokens, K input features, N output features; x [M, K], w [N, K], dy [M, N]; `real = codes / scale`.

    fprop   y  [M, N] = x · wᵀ      E4M3 · E4M3, fast accumulation
    dgrad   dx [M, K] = dy · w      E5M2 · E4M3, promoted accumulation
    wgrad   dw [N, K] = dyᵀ · x     E5M2 · E4M3, promoted accumulation

FP8 tensor cores contract over the last dim of both operands, so dgrad wants wᵀ, and wgrad dyᵀ and xᵀ, as real FP8 copies:
each operand is cast once, row-major and transposed in one pass over memory. Of the input, only the transposed FP8 copy is
saved for backward, one byte an element, and not even that when the weight is frozen. Fast accumulation keeps sums in about
14 bits: enough for fprop, whose error is not summed over steps, and too little for gradients (docs/numerics.md).

The weight is cast once per optimizer step, not per micro-batch: its operand stays on the parameter (2 B an element) until the
parameter changes. In a loop that does not accumulate gradients nobody would read it again, so there it goes as soon as the
gradient is made, and weights, gradients and optimizer states are all that is resident when the optimizer steps. That of a frozen
weight goes after its dgrad, and is cast again for the next micro-batch: a frozen base should cost its storage and no more. While
`torch.compile` traces there is no such cache, and dgrad casts the weight again in backward: keeping one transposed copy of each
layer alive between forward and backward would cost more memory than it saves time. A master that is E4M3 itself is never cast,
and its transpose lives for one GEMM only.

Non-finite values stay visible although every cast saturates: an operand that holds one gets the scale NaN, so that all that
is computed from it is NaN, as an infinity in BF16 would become one layer later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import E4M3, Format
from octavo.recipe import Recipe
from octavo.scaling import DelayedScaling
from octavo.tensor import ScaledTensor

GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Operand(NamedTuple):
    """A matrix [M, K] as FP8 operands of two GEMMs; padded with zero codes to multiples of 16."""

    codes: Tensor | None
    """[Mp, Kp], row-major."""
    codes_t: Tensor | None
    """[Kp, Mp], row-major: the transpose."""
    scale: Tensor
    """FP32, 0-d; NaN if the matrix holds a value that is not finite."""

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


def visible(scale: Tensor, amax: Tensor) -> Tensor:
    """`scale`, or NaN where `amax` is not finite, so that what saturation would hide shows in every result."""
    return torch.where(amax.isfinite(), scale, torch.nan)


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
) -> Operand:
    """Casts the matrix `x` [M, K] with a scale of its own, or with the one that `scaling` has from past maxima.

    `record` lets `scaling` see the maximum of `x`. `stats` (int64 [3]) is increased by the numbers of saturated, flushed and all
    elements.
    """
    counts = None if stats is None else stats[:2]
    if scaling is None:
        amax = kernels.amax(x)
        scale = kernels.scale_from_amax(amax, fmt.max, power_of_two)
        codes, codes_t = kernels.cast_transpose(x, scale, fmt.dtype, row=row, col=col, stats=counts)
    else:
        scale = scaling.scale(x, fmt.max)
        codes, codes_t, amax = kernels.cast_transpose_amax(x, scale, fmt.dtype, row=row, col=col, stats=counts)
        if record:
            scaling.record(amax)
    if stats is not None:
        stats[2] += x.numel()
    return Operand(codes, codes_t, visible(scale, amax))


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
    through `.data` of a plain weight is not (see `drop_weight_cache`).
    """
    values, unit = _stored(weight)
    if unit is not None and values.dtype == fmt.dtype:
        return Operand(kernels.pad_codes(values), None, unit)
    cached, tag = None, None
    if not is_compiling() and not weight.is_inference() and not values.is_inference():
        tag = (weight._version, values._version, values.data_ptr(), fmt, power_of_two)
        cast_tag, cached = getattr(weight, "_octavo_cast", (None, None))
        if cached is None or cast_tag != tag:
            cached = None
        elif not (row and cached.codes is None or col and cached.codes_t is None):
            return cached
    if cached is not None:  # the other half of what was cast before
        operand = Operand(cached.row(), cached.col(), cached.scale)
    else:
        operand = cast_operand(values, fmt, power_of_two=power_of_two, row=row, col=col, stats=stats)
        if unit is not None:
            operand = operand._replace(scale=operand.scale * unit)
    if tag is not None:
        weight._octavo_cast = (tag, operand)  # type: ignore[attr-defined]
    return operand


def _stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """(values, scale): real weight = values / scale, or values if there is no scale.

    The codes of a master are read as they lie; with power-of-two scales their cast has the bits of a cast of the real values.
    """
    if not isinstance(weight, ScaledTensor):
        return weight.detach(), None
    if weight.scale.dim() == 0 and weight.residual is None:
        return weight.codes, weight.scale
    return weight.dequantize(), None


def drop_weight_cache(params: Iterable[Tensor]) -> None:
    """Forget the FP8 operands of these weights. Wanted after a change that their version counter does not see (`.data`)."""
    for param in params:
        param.__dict__.pop("_octavo_cast", None)


def _release_operand(weight: Tensor) -> None:
    """Called in backward: free the FP8 operands of `weight`, unless another micro-batch will read them before it changes.

    That is known once a gradient was found waiting: then the weight belongs to a loop that accumulates, now and in later steps.
    A weight that never gets a gradient, frozen or computed from other parameters, is freed always.
    """
    if not (weight.requires_grad and weight.is_leaf):
        return drop_weight_cache([weight])
    accumulates = weight.grad is not None or getattr(weight, "_octavo_accumulates", False)
    weight._octavo_accumulates = accumulates  # type: ignore[attr-defined]
    if not accumulates:
        drop_weight_cache([weight])


def scaled_gradient(grad: Tensor, dtype: torch.dtype, stats: Tensor | None = None) -> ScaledTensor:
    """A gradient as E4M3 codes with a fresh power-of-two scale, ready to accumulate; all NaN if a value is not finite.

    `dtype` is the logical dtype; `stats` as in `cast_operand`.
    """
    amax = kernels.amax(grad)
    scale = kernels.scale_from_amax(amax, E4M3.max)
    counts = None if stats is None else stats[:2]
    codes = kernels.cast(grad, visible(scale, amax), E4M3.dtype, stats=counts)
    if stats is not None:
        stats[2] += grad.numel()
    return ScaledTensor(codes, scale, dtype, residual_on_add=True)


class Gemms(NamedTuple):
    """What the autograd function must know besides its tensors."""

    recipe: Recipe
    out_dtype: torch.dtype
    input_first: bool
    """The weight is stored [K, N], as in the Conv1D of Hugging Face."""
    scale_gradient: bool
    """Return the gradient of the weight as an E4M3 ScaledTensor, or keep it precise enough to become one."""
    scaling: DelayedScaling | None = None
    """Scales of the output gradient, from the past."""
    stats: dict[str, Tensor] | None = None


class LinearFunction(torch.autograd.Function):
    """y = x · wᵀ + bias, from operands that the caller cast; the gradients of x [M, K], w [N, K] and bias [N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_operand: Operand, w_operand: Operand, gemms: Gemms
    ) -> Tensor:
        """y [M, N] of `gemms.out_dtype`, contiguous."""
        ctx.gemms, ctx.x_dtype, ctx.shape = gemms, x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The parameter itself, not `save_for_backward`: hooks on saved tensors (checkpoint, offload) would copy it, and lose
        # its cached operand; only activations are theirs. Hence our own check that nobody changed it.
        ctx.weight = weight
        ctx.version = None if is_compiling() or weight.is_inference() else weight._version
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x_operand.codes_t, x_operand.scale)
        n = weight.shape[1] if gemms.input_first else weight.shape[0]
        if x.shape[0] == 0:
            return x.new_zeros((0, n), dtype=gemms.out_dtype)
        codes = w_operand.col() if gemms.input_first else w_operand.row()
        y = gemm(x_operand.row(), codes, x_operand.scale, w_operand.scale, gemms.out_dtype, bias, fast_accum=True)
        # (torch 2.11 compiles a function that returns an alias of a result, as `contiguous` and `to` may, with zero gradients.)
        return y if y.shape == (x.shape[0], n) else y[: x.shape[0], :n].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias, those that are needed."""
        gemms, weight, (m, k) = ctx.gemms, ctx.weight, ctx.shape
        recipe = gemms.recipe
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if ctx.version is not None and ctx.version != weight._version:
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} was changed in place between forward and backward "
                f"(version {ctx.version}, now {weight._version}): run backward before the optimizer steps"
            )
        dx = dw = None
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_b else None
        if m == 0:
            dx = dy.new_zeros((0, k), dtype=ctx.x_dtype) if need_x else None
            dw = torch.zeros(weight.shape, dtype=weight.dtype, device=dy.device) if need_w else None
        elif need_x or need_w:
            stats = gemms.stats or {}
            dy_operand = cast_operand(
                dy,
                recipe.grad_output,
                power_of_two=recipe.power_of_two,
                row=need_x,
                col=need_w,
                scaling=gemms.scaling,
                stats=stats.get("grad_output"),
            )
            if need_x:
                first = gemms.input_first
                w = weight_operand(weight, recipe.weight, power_of_two=recipe.power_of_two, row=first, col=not first)
                w_codes = w.row() if first else w.col()
                dx = gemm(dy_operand.row(), w_codes, dy_operand.scale, w.scale, ctx.x_dtype)[:m, :k]
            if need_w:
                x_codes_t, x_scale = ctx.saved_tensors
                # BF16 holds what E4M3 will keep; a gradient that stays plain gets the dtype of its parameter.
                dtype = torch.bfloat16 if gemms.scale_gradient else weight.dtype
                left, right = (dy_operand.col(), dy_operand.scale), (x_codes_t, x_scale)
                if gemms.input_first:
                    left, right = right, left
                dw = gemm(left[0], right[0], left[1], right[1], dtype)[: weight.shape[0], : weight.shape[1]]
        if dw is not None and isinstance(weight, ScaledTensor) and gemms.scale_gradient:
            dw = scaled_gradient(dw, weight.dtype, (gemms.stats or {}).get("grad"))
        elif dw is not None:
            dw = dw.to(weight.dtype)  # (an FP16 gradient that overflows shows, so that a loss scale backs off)
        if ctx.version is not None and (need_w or not weight.requires_grad):
            _release_operand(weight)
        return dx, dw, db, None, None, None


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """`kernels.scaled_mm_nt` for any floating `dtype` and an unpadded bias."""
    out_dtype = dtype if dtype in GEMM_DTYPES else torch.float32
    if bias is not None:
        bias = bias.detach().to(out_dtype)
        if bias.shape[0] < b.shape[0]:
            bias = F.pad(bias, (0, b.shape[0] - bias.shape[0]))
    out = kernels.scaled_mm_nt(a, b, a_scale, b_scale, out_dtype, fast_accum=fast_accum, bias=bias)
    return out if out_dtype == dtype else out.to(dtype)
