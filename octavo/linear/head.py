"""`HeadLinear`: an output head whose forward stays in the compute dtype and whose two backward GEMMs run in FP8.

Logits decide the loss: FP8 rounding in the forward of a head costs 1.6% of it (docs/numerics.md). Its gradients carry no more noise
than those of every other FP8 layer, and they are two thirds of its arithmetic. Legend as in `octavo.linear.gemm`, N the vocabulary:

    fprop   y  [M, N] = x · wᵀ      compute dtype
    dgrad   dx [M, K] = dy · w      E5M2 · E4M3, promoted accumulation
    wgrad   dw [N, K] = dyᵀ · x     E5M2 · E4M3, promoted accumulation

Weight and gradient are plain tensors, tied to an embedding or not. Of the input only transposed FP8 codes are kept for backward, 1 B an
element instead of 2; the weight is cast when backward reads it, 1 B an element for the time of dgrad.

The gradients of a softmax's logits add up to zero over the vocabulary, so dx does not see what all rows of w have in common. Their codes
do not add up to zero, and in a trained model the mean row µ is as long as two thirds of a row: rounding would multiply it into dx, for all
tokens alike. So dgrad multiplies w - µ, and what the sum of dy over the vocabulary is worth is added apart, dx += (Σ dy) · µ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import kernels
from octavo.formats import E4M3, Format
from octavo.linear.gemm import check_version, differentiable_once, gemm, weight_version
from octavo.linear.operand import cast_and_sum, cast_operand
from octavo.recipe import Recipe


class HeadLinear(nn.Linear):
    """y = x · wᵀ + bias of x [..., in_features] with any number of leading dims and tokens, also zero; gradients by FP8 GEMMs.

    Made by `octavo.convert` where the recipe has `head_grad_output`, never built directly. The output has the autocast dtype if
    autocast is on, else that of `x`. Raises `ValueError` for an input of integers.
    """

    recipe: Recipe
    plain_class: type[nn.Module]
    """What `octavo.export` turns the layer back into."""

    @classmethod
    def adopt(cls, module: nn.Module, recipe: Recipe) -> None:
        """Make `module` a layer of this class; its parameters stay as they are."""
        plain_class = type(module)
        module.__class__ = cls
        assert isinstance(module, HeadLinear)
        module.recipe, module.plain_class = recipe, plain_class

    def release(self) -> None:
        """Undo `adopt`."""
        self.__class__ = self.plain_class  # type: ignore[assignment]
        del self.recipe, self.plain_class

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(f"the head takes floating [..., {self.in_features}], but the input is {x.dtype}")
        weight, bias, device = self.weight, self.bias, x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if not torch.is_grad_enabled():
            return _product(x.to(dtype), weight, bias)
        fmt = self.recipe.head_grad_output
        assert fmt is not None
        return HeadFunction.apply(x, weight, bias, dtype, fmt, self.recipe.power_of_two)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class HeadFunction(torch.autograd.Function):
    """y [..., N] = x · wᵀ + bias of `dtype`, and the gradients of x [..., K], w [N, K] and bias [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        fmt: Format,
        power_of_two: bool,
    ) -> Tensor:
        ctx.fmt, ctx.power_of_two, ctx.shape, ctx.dtype = fmt, power_of_two, x.shape, x.dtype
        ctx.weight, ctx.version = weight, weight_version(weight)  # (itself, as in `LinearFunction`)
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = x.to(dtype)
        if ctx.needs_input_grad[1] and x.numel():
            flat = rows.reshape(-1, x.shape[-1])
            operand = cast_operand(flat, E4M3, power_of_two=power_of_two, row=False)
            ctx.save_for_backward(operand.codes_t, operand.inverse)
        return _product(rows, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, needs = ctx.weight, ctx.needs_input_grad
        check_version(weight, ctx.version)
        (n, k), dx, dw = weight.shape, None, None
        bias_dtype = ctx.bias_dtype if needs[2] else None
        dy = dy.reshape(-1, n)
        if dy.shape[0] == 0:
            dx = dy.new_zeros(ctx.shape, dtype=ctx.dtype) if needs[0] else None
            dw = torch.zeros(weight.shape, dtype=weight.dtype, device=dy.device) if needs[1] else None
            db = None if bias_dtype is None else dy.new_zeros(n, dtype=bias_dtype)
            return dx, dw, db, None, None, None
        # One read of dy gives the amax for its cast and something else besides: the sums of its columns for a bias, or of its rows.
        sums, amax = kernels.row_sums(dy) if needs[0] and bias_dtype is None else (None, None)
        # No power of two: the gradients of all targets are near -1/count, which it would round alike, by up to an eighth. With this
        # scale they are near the largest code.
        operand, db = cast_and_sum(
            dy, ctx.fmt, power_of_two=False, row=needs[0], col=needs[1], sum_columns=bias_dtype, amax=amax
        )
        if needs[0]:
            codes_t, inverse, mean = weight_codes_t(weight, ctx.power_of_two)
            # (A sum over the vocabulary may be beyond FP16 where dx is not.)
            wide = torch.float32 if ctx.dtype == torch.float16 else ctx.dtype
            dx = gemm(operand.row(), codes_t, operand.inverse, inverse, wide)[: dy.shape[0], :k]
            sums = dy.sum(1, dtype=torch.float32) if sums is None else sums
            dx = torch.addr(dx, sums.to(wide), mean.to(wide)).to(ctx.dtype).reshape(ctx.shape)
        if needs[1]:
            codes_t, inverse = ctx.saved_tensors
            dw = gemm(operand.col(), codes_t, operand.inverse, inverse, weight.dtype)[:n, :k]
        return dx, dw, db, None, None, None


def weight_codes_t(weight: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(E4M3 codes [Kp, Np] of (w - µ)ᵀ, 1 / scale, µ) of a weight [N, K] and its mean row µ [K], in its dtype: what dgrad reads."""
    weight = weight.detach()
    mean = weight.mean(0, dtype=torch.float32).to(weight.dtype)
    _, codes_t, _, _, inverse = kernels.quantize(
        weight, E4M3, power_of_two=power_of_two, row=False, shift=mean, return_inverse=True
    )
    return codes_t, inverse, mean


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · wᵀ + bias in the dtype of x. (The casts are ours: one that autocast made without gradients would stay in its cache.)"""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
