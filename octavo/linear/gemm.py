"""The three GEMMs of a linear layer in FP8, as one autograd function on matrices.

Legend: M tokens, K input features, N output features; x [M, K], w [N, K], dy [M, N]; `real = codes / scale`.

    fprop   y  [M, N] = x · wᵀ      E4M3 · E4M3, fast accumulation
    dgrad   dx [M, K] = dy · w      E5M2 · E4M3, promoted accumulation
    wgrad   dw [N, K] = dyᵀ · x     E5M2 · E4M3, promoted accumulation

FP8 tensor cores contract over the last dim of both operands, so dgrad wants wᵀ, and wgrad dyᵀ and xᵀ, as real FP8 copies:
each operand is cast once, row-major and transposed in one pass over memory. Of the input, only the transposed FP8 copy is
saved for backward, one byte an element, and not even that when the weight is frozen. Fast accumulation keeps sums in about
14 bits: enough for fprop, whose error is not summed over steps, and too little for gradients (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from octavo import kernels
from octavo.kernels.untraced import untraced
from octavo.linear.operand import (
    Hints,
    Operand,
    cast_and_sum,
    column_sum,
    release_operand,
    scaled_gradient,
    weight_operand,
)
from octavo.recipe import Recipe
from octavo.scaling import DelayedScaling
from octavo.tensor import ScaledTensor

GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Gemms(NamedTuple):
    """What the autograd function must know besides its tensors."""

    recipe: Recipe
    out_dtype: torch.dtype
    input_first: bool
    """The weight is stored [K, N], as in the Conv1D of Hugging Face."""
    scale_gradient: bool
    """Return the gradient of the weight as an E4M3 ScaledTensor, or keep it precise enough to become one."""
    hints: Hints
    scaling: DelayedScaling | None = None
    """Scales of the output gradient, from the past."""
    stats: dict[str, Tensor] | None = None


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, whose change of grad mode costs the host as much as a launch, only where autograd records backward.

    There it guards results of constant gradients too: they depend on the weight and the input, which `once_differentiable` cannot see.
    """
    guarded = once_differentiable(backward)

    @untraced
    @wraps(backward)
    def choose(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        return guarded(ctx, *(None if one is None else one.detach().requires_grad_() for one in gradients))

    return choose


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
        ctx.weight, ctx.version = weight, weight_version(weight)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x_operand.codes_t, x_operand.inverse)
        n = weight.shape[1] if gemms.input_first else weight.shape[0]
        if x.shape[0] == 0:
            return x.new_zeros((0, n), dtype=gemms.out_dtype)
        return fprop(x_operand, w_operand, bias, gemms, (x.shape[0], n))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias, those that are needed."""
        gemms, weight, (m, k) = ctx.gemms, ctx.weight, ctx.shape
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        check_version(weight, ctx.version)
        dx = dw = db = None
        if m == 0:
            dx = dy.new_zeros((0, k), dtype=ctx.x_dtype) if need_x else None
            dw = torch.zeros(weight.shape, dtype=weight.dtype, device=dy.device) if need_w else None
        elif need_x or need_w:
            dy_operand, db = cast_grad_output(dy, gemms, need_x, need_w, ctx.bias_dtype if need_b else None)
            if need_x:
                dx = dgrad(dy_operand, weight, gemms, ctx.shape, ctx.x_dtype)
            if need_w:
                x_codes_t, x_inverse = ctx.saved_tensors
                dw = wgrad(dy_operand, x_codes_t, x_inverse, weight, gemms)
        if dw is not None:
            dw = stored_gradient(dw, weight, gemms)
        release_operand(weight, need_w)
        if need_b and db is None:
            db = column_sum(dy, ctx.bias_dtype)
        return dx, dw, db, None, None, None


def cast_grad_output(
    dy: Tensor, gemms: Gemms, row: bool, col: bool, bias_dtype: torch.dtype | None, amax: Tensor | None = None
) -> tuple[Operand, Tensor | None]:
    """(dy [M, N] as operand of dgrad, `row`, and of wgrad, `col`; the gradient of a bias of `bias_dtype`). `amax` as in `cast_and_sum`."""
    recipe, stats = gemms.recipe, (gemms.stats or {}).get("grad_output")
    assert recipe.grad_output is not None
    return cast_and_sum(
        dy,
        recipe.grad_output,
        power_of_two=recipe.power_of_two,
        row=row,
        col=col,
        sum_columns=bias_dtype,
        scaling=gemms.scaling,
        amax=amax,
        stats=stats,
        hint=gemms.hints.grad_output,
    )


def turn_and_cast(
    gradients: tuple[Tensor, Tensor, Tensor],
    table: tuple[Tensor | None, Tensor | None],
    gemms: Gemms,
    col: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Operand, Tensor | None]:
    """`cast_grad_output` of the gradient of qkv, from those of turned queries, turned keys and values, [B, T, heads, D].

    With current scaling that gradient exists in FP8 only (`kernels.rotary_backward_quantize`).
    """
    recipe = gemms.recipe
    if gemms.scaling is not None or gemms.stats is not None:
        dy, amax = kernels.rotary_backward(*gradients, *table)
        return cast_grad_output(dy.flatten(2).flatten(0, 1), gemms, True, col, bias_dtype, amax)
    assert recipe.grad_output is not None
    codes, codes_t, scale, sums, inverse = kernels.rotary_backward_quantize(
        *gradients,
        *table,
        recipe.grad_output,
        power_of_two=recipe.power_of_two,
        col=col,
        column_sum=bias_dtype or False,
        hint=gemms.hints.grad_output,
    )
    return Operand(codes, codes_t, scale, inverse), sums


def fprop(x: Operand, w: Operand, bias: Tensor | None, gemms: Gemms, shape: tuple[int, int]) -> Tensor:
    """y of `shape` [M, N], contiguous."""
    codes = w.col() if gemms.input_first else w.row()
    y = gemm(x.row(), codes, x.inverse, w.inverse, gemms.out_dtype, bias, fast_accum=True)
    # (torch 2.11 compiles a function that returns an alias of a result, as `contiguous` and `to` may, with zero gradients.)
    return y if y.shape == shape else y[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)


def dgrad(dy: Operand, weight: Tensor, gemms: Gemms, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """dx of `shape` [M, K]."""
    recipe, first = gemms.recipe, gemms.input_first
    assert recipe.weight is not None
    w = weight_operand(weight, recipe.weight, power_of_two=recipe.power_of_two, row=first, col=not first)
    dx = gemm(dy.row(), w.row() if first else w.col(), dy.inverse, w.inverse, dtype)
    return dx if dx.shape == shape else dx[: shape[0], : shape[1]]


def wgrad(dy: Operand, x_codes_t: Tensor, x_inverse: Tensor, weight: Tensor, gemms: Gemms) -> Tensor:
    """dw of the shape of `weight`."""
    # BF16 holds what E4M3 will keep; a gradient that stays plain gets the dtype of its parameter.
    dtype = torch.bfloat16 if gemms.scale_gradient else weight.dtype
    left, right = (dy.col(), dy.inverse), (x_codes_t, x_inverse)
    if gemms.input_first:
        left, right = right, left
    dw = gemm(left[0], right[0], left[1], right[1], dtype)
    return dw if dw.shape == weight.shape else dw[: weight.shape[0], : weight.shape[1]]


def stored_gradient(dw: Tensor, weight: Tensor, gemms: Gemms) -> Tensor:
    """`dw` as autograd is to see it: in FP8 if the weight is a ScaledTensor that wants it so."""
    if isinstance(weight, ScaledTensor) and gemms.scale_gradient:
        return scaled_gradient(dw, weight.dtype, (gemms.stats or {}).get("grad"), gemms.hints.grad)
    return dw.to(weight.dtype)  # (an FP16 gradient that overflows shows, so that a loss scale backs off)


def weight_version(weight: Tensor) -> int | None:
    """What `check_version` compares; None where there is none."""
    return None if is_compiling() or weight.is_inference() else weight._version


def check_version(weight: Tensor, version: int | None) -> None:
    """Raises `RuntimeError` if `weight` was changed since forward."""
    if version is not None and version != weight._version:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} was changed in place between forward and backward "
            f"(version {version}, now {weight._version}): run backward before the optimizer steps"
        )


def gemm(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """`kernels.scaled_mm_nt` of inverse scales, for any floating `dtype` and an unpadded bias."""
    out_dtype = dtype if dtype in GEMM_DTYPES else torch.float32
    if bias is not None:
        bias = bias if bias.dtype == out_dtype else bias.to(out_dtype)
        if bias.shape[0] < b.shape[0]:
            bias = F.pad(bias, (0, b.shape[0] - bias.shape[0]))
    out = kernels.scaled_mm_nt(
        a, b, a_inverse, b_inverse, out_dtype, fast_accum=fast_accum, bias=bias, inverse_scales=True
    )
    return out if out_dtype == dtype else out.to(dtype)
