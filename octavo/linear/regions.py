"""The autograd functions of `octavo.linear.fused` around attention, and what they share with that of `feed_forward`.

`octavo.linear.fused` says what they save and why they are as large as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo import kernels
from octavo.kernels import known_amax, remember_amax
from octavo.linear.gemm import (
    Gemms,
    cast_grad_output,
    check_version,
    dgrad,
    differentiable_once,
    fprop,
    stored_gradient,
    turn_and_cast,
    weight_version,
    wgrad,
)
from octavo.linear.operand import Operand, cast_operand, release_operand, stays, weight_operand
from octavo.recipe import Recipe
from octavo.scaling import DelayedScaling


class Heads(NamedTuple):
    """How the output of a layer is cut."""

    queries: int
    groups: int
    """Heads of keys, and of values."""
    channels: int


class Past(NamedTuple):
    """Scales of a layer's input from past maxima."""

    scaling: DelayedScaling | None
    record: bool
    """Whether backward may follow, which an autograd function is not told: only such a forward counts for later ones."""


class NormSettings(NamedTuple):
    """What a norm is, besides its parameters."""

    eps: float
    centered: bool
    """Whether the mean is subtracted: a LayerNorm, no RMSNorm."""


def cast_norm(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    settings: NormSettings,
    col: bool,
    past: Past,
) -> tuple[Operand, Tensor, Tensor | None, Tensor]:
    """(operand of norm(s), s, mean, rstd) of s [M, K] = x + addend."""
    fmt = recipe.input
    assert fmt is not None
    s = x
    if addend is None:
        mean, rstd, amax = kernels.norm_stats(s, weight, bias, settings.eps, centered=settings.centered)
    else:
        s, mean, rstd, amax = kernels.add_norm_stats(x, addend, weight, bias, settings.eps, centered=settings.centered)

    norm = s, weight, bias, mean, rstd
    if past.scaling is None:
        scale, *visible = kernels.current_scale(amax, fmt.max, recipe.power_of_two)
        codes, codes_t, _ = kernels.norm_cast(*norm, scale, fmt.dtype, col=col, amax=False)
    else:
        scale = past.scaling.scale_of(lambda: amax, x.device, fmt.max)
        codes, codes_t, found = kernels.norm_cast(*norm, scale, fmt.dtype, col=col)
        assert found is not None
        visible = [*past.scaling.visible_scale(scale, found, past.record)]
    return Operand(codes, codes_t, *visible), s, mean, rstd


class NormHeads(torch.autograd.Function):
    """See `octavo.linear.fused.norm_heads`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        settings: NormSettings,
        gemms: Gemms,
        past: Past,
        heads: Heads,
    ) -> tuple[Tensor, ...]:
        needs = [past.record and need for need in ctx.needs_input_grad]
        operand, rows, mean, rstd = cast_norm(
            as_rows(x), None, norm_weight, norm_bias, gemms.recipe, settings, needs[3], past
        )
        ctx.gemms, ctx.weight, ctx.version, ctx.heads, ctx.shape = gemms, weight, weight_version(weight), heads, x.shape
        ctx.save_for_backward(rows, norm_weight, mean, rstd, operand.codes_t, operand.inverse, cos, sin)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
        y = product(operand, weight, bias, gemms, rows.shape[0], any(needs))
        y = y.view(*x.shape[:-1], -1, heads.channels)
        if cos is not None and sin is not None:
            kernels.rotary_(y, cos, sin, heads.queries + heads.groups)
        return *y.split((heads.queries, heads.groups, heads.groups), dim=-2), x

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, mean, rstd, codes_t, inverse, cos, sin = ctx.saved_tensors
        check_version(ctx.weight, ctx.version)
        needs = ctx.needs_input_grad
        dq, dk, dv, residual = gradients
        norm_dtype, bias_dtype = ctx.dtypes[0], ctx.dtypes[1] if needs[4] else None
        operand, db = turn_and_cast((dq, dk, dv), (cos, sin), ctx.gemms, needs[3], bias_dtype)
        dn = dgrad(operand, ctx.weight, ctx.gemms, x.shape, x.dtype)
        dw = weight_gradient(operand, codes_t, inverse, ctx.weight, ctx.gemms) if needs[3] else None
        release_operand(ctx.weight, needs[3])
        dx, dgain, dshift, amax = kernels.norm_backward(dn, x, norm_weight, mean, rstd, as_rows(residual))
        dx = as_shaped(dx, ctx.shape, amax)
        dgain, dshift = dgain.to(norm_weight.dtype), to_dtype(dshift, norm_dtype)
        return dx, dgain, dshift, dw, db, None, None, None, None, None, None


class Projection(torch.autograd.Function):
    """(x · wᵀ + bias of x [M, K], a token): the gradient of the token, FP32 0-d, is the largest magnitude of that of the product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemms: Gemms, past: Past
    ) -> tuple[Tensor, Tensor]:
        needs, recipe = [past.record and need for need in ctx.needs_input_grad], gemms.recipe
        assert recipe.input is not None
        operand = cast_operand(
            x,
            recipe.input,
            power_of_two=recipe.power_of_two,
            col=needs[1],
            scaling=past.scaling,
            record=past.record,
            hint=gemms.hints.input,
        )
        ctx.gemms, ctx.weight, ctx.version, ctx.shape, ctx.dtype = (
            gemms,
            weight,
            weight_version(weight),
            x.shape,
            x.dtype,
        )
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(operand.codes_t, operand.inverse)
        y = product(operand, weight, bias, gemms, x.shape[0], any(needs))
        return y, x.new_empty((), dtype=torch.float32)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, amax: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, inverse = ctx.saved_tensors
        gemms, weight, needs = ctx.gemms, ctx.weight, ctx.needs_input_grad
        check_version(weight, ctx.version)
        bias_dtype = ctx.bias_dtype if needs[2] else None
        operand, db = cast_grad_output(dy, gemms, needs[0], needs[1], bias_dtype, amax)
        dx = dgrad(operand, weight, gemms, ctx.shape, ctx.dtype) if needs[0] else None
        dw = weight_gradient(operand, codes_t, inverse, weight, gemms) if needs[1] else None
        release_operand(weight, needs[1])
        return dx, dw, db, None, None


def product(x: Operand, weight: Tensor, bias: Tensor | None, gemms: Gemms, m: int, backward: bool) -> Tensor:
    """x · wᵀ + bias, [m, N]; a backward to come finds the transposed codes of the weight made, if they can stay."""
    recipe, keep = gemms.recipe, backward and stays(x.scale)
    assert recipe.weight is not None
    w = weight_operand(weight, recipe.weight, power_of_two=recipe.power_of_two, col=keep)
    return fprop(x, w, bias, gemms, (m, weight.shape[0]))


def weight_gradient(dy: Operand, x_codes_t: Tensor, x_inverse: Tensor, weight: Tensor, gemms: Gemms) -> Tensor:
    """dw as autograd is to see it."""
    return stored_gradient(wgrad(dy, x_codes_t, x_inverse, weight, gemms), weight, gemms)


def to_dtype(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """`x` in `dtype`; None if either is."""
    return None if x is None or dtype is None else x.to(dtype)


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] as a matrix [M, K], with what is known of its maximum."""
    if x.dim() == 2:
        return x
    amax = known_amax(x)
    rows = x.flatten(0, -2)
    return rows if amax is None else remember_amax(rows, amax)


def as_shaped(dx: Tensor, shape: torch.Size, amax: Tensor) -> Tensor:
    """The gradient dx [M, K] in the shape of what it is for, with its maximum."""
    dx = dx if dx.shape == shape else dx.view(shape)
    return dx if is_compiling() else remember_amax(dx, amax)
