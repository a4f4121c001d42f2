"""The autograd functions of `octavo.linear.fused`, which says what they save and why they are as large as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import Format
from octavo.kernels import known_amax, remember_amax
from octavo.linear.gemm import (
    Gemms,
    check_version,
    dgrad,
    differentiable_once,
    fprop,
    stored_gradient,
    weight_version,
    wgrad,
)
from octavo.linear.operand import (
    Operand,
    cast_and_sum,
    cast_operand,
    release_operand,
    weight_operand,
)
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


def _cast(
    amax: Callable[[], Tensor],
    cast: Callable[[Tensor, bool], tuple[Any, ...]],
    device: torch.device,
    fmt: Format,
    power_of_two: bool,
    past: Past,
) -> tuple[Operand, Tensor, tuple[Any, ...]]:
    """(operand, its scale while it is cast, what `cast` gives besides): `cast(scale, True)` is (codes, codes_t, amax, ...).

    With false, that amax is None: current scaling has it from `amax()`.
    """
    if past.scaling is None:
        scale, *visible = kernels.current_scale(amax(), fmt.max, power_of_two)
        codes, codes_t, _, *rest = cast(scale, False)
    else:
        scale = past.scaling.scale_of(amax, device, fmt.max)
        codes, codes_t, found, *rest = cast(scale, True)
        visible = [*past.scaling.visible_scale(scale, found, past.record)]
    return Operand(codes, codes_t, *visible), scale, tuple(rest)


def _cast_norm(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    how: tuple[float, bool],
    col: bool,
    past: Past,
) -> tuple[Operand, Tensor, Tensor | None, Tensor]:
    """(operand of norm(s), s, mean, rstd) of s [M, K] = x + addend."""
    fmt = recipe.input
    assert fmt is not None
    if addend is None:
        mean, rstd, amax = kernels.norm_stats(x, weight, bias, how[0], centered=how[1])
    else:
        x, mean, rstd, amax = kernels.add_norm_stats(x, addend, weight, bias, how[0], centered=how[1])

    def cast(scale: Tensor, amax: bool) -> tuple[Any, ...]:
        return kernels.norm_cast(x, weight, bias, mean, rstd, scale, fmt.dtype, col=col, amax=amax)

    return _cast(lambda: amax, cast, x.device, fmt, recipe.power_of_two, past)[0], x, mean, rstd


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
        how: tuple[float, bool],
        gemms: Gemms,
        past: Past,
        heads: Heads,
    ) -> tuple[Tensor, ...]:
        needs = [past.record and need for need in ctx.needs_input_grad]
        operand, rows, mean, rstd = _cast_norm(
            _rows(x), None, norm_weight, norm_bias, gemms.recipe, how, needs[3], past
        )
        ctx.gemms, ctx.weight, ctx.version, ctx.heads, ctx.shape = gemms, weight, weight_version(weight), heads, x.shape
        ctx.save_for_backward(rows, norm_weight, mean, rstd, operand.codes_t, operand.inverse, cos, sin)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
        y = _product(operand, weight, bias, gemms, rows.shape[0], any(needs))
        y = y.view(*x.shape[:-1], -1, heads.channels)
        if cos is not None and sin is not None:
            kernels.rotary_(y, cos, sin, heads.queries + heads.groups)
        return *y.split((heads.queries, heads.groups, heads.groups), dim=-2), x

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, mean, rstd, codes_t, inverse, cos, sin = ctx.saved_tensors
        check_version(ctx.weight, ctx.version)
        recipe, needs = ctx.gemms.recipe, ctx.needs_input_grad
        dq, dk, dv, residual = gradients
        norm_dtype, bias_dtype = ctx.dtypes[0], ctx.dtypes[1] if needs[4] else None
        dy, amax = kernels.rotary_backward(dq, dk, dv, cos, sin)
        dy = dy.view(x.shape[0], -1)
        operand, db = cast_and_sum(
            dy,
            recipe.grad_output,
            recipe.power_of_two,
            True,
            needs[3],
            bias_dtype,
            ctx.gemms.scaling,
            True,
            amax,
            None,
            ctx.gemms.hints.grad_output,
        )
        dn = dgrad(operand, ctx.weight, ctx.gemms, x.shape, x.dtype)
        dw = _weight_gradient(operand, codes_t, inverse, ctx.weight, ctx.gemms) if needs[3] else None
        release_operand(ctx.weight, needs[3])
        dx, dgain, dshift, amax = kernels.norm_backward(dn, x, norm_weight, mean, rstd, _rows(residual))
        dx = _like(dx, ctx.shape, amax)
        dgain, dshift = dgain.to(norm_weight.dtype), _to(dshift, norm_dtype)
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
        y = _product(operand, weight, bias, gemms, x.shape[0], any(needs))
        return y, x.new_empty((), dtype=torch.float32)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, amax: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, inverse = ctx.saved_tensors
        gemms, weight, needs = ctx.gemms, ctx.weight, ctx.needs_input_grad
        check_version(weight, ctx.version)
        recipe, bias_dtype = gemms.recipe, ctx.bias_dtype if needs[2] else None
        operand, db = cast_and_sum(
            dy,
            recipe.grad_output,
            recipe.power_of_two,
            needs[0],
            needs[1],
            bias_dtype,
            gemms.scaling,
            True,
            amax,
            None,
            gemms.hints.grad_output,
        )
        dx = dgrad(operand, weight, gemms, ctx.shape, ctx.dtype) if needs[0] else None
        dw = _weight_gradient(operand, codes_t, inverse, weight, gemms) if needs[1] else None
        release_operand(weight, needs[1])
        return dx, dw, db, None, None


class FeedForward(torch.autograd.Function):
    """See `octavo.linear.fused.feed_forward`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        addend: Tensor,
        token: Tensor,
        how: tuple[float, bool],
        kind: str,
        gemms: tuple[Gemms, Gemms],
        past: tuple[Past, Past],
        recompute: bool,
    ) -> Tensor:
        needs, shape, (up, out) = [past[0].record and need for need in ctx.needs_input_grad], x.shape, gemms
        n, x, mean, rstd = _cast_norm(_rows(x), addend, norm_weight, norm_bias, up.recipe, how, needs[3], past[0])
        m = x.shape[0]
        h = _product(n, w1, b1, up, m, any(needs))
        fmt = out.recipe.input
        assert fmt is not None

        def cast(scale: Tensor, amax: bool) -> tuple[Any, ...]:
            return kernels.activation_cast(h, kind, scale, fmt.dtype, col=needs[5] and not recompute, amax=amax)

        amax = partial(kernels.activation_amax, h, kind)
        a, scale, _ = _cast(amax, cast, x.device, fmt, out.recipe.power_of_two, past[1])
        ctx.gemms, ctx.weights = gemms, (w1, w2)
        ctx.versions = [weight_version(w) for w in (w1, w2)]
        ctx.kind, ctx.shape = kind, shape
        ctx.save_for_backward(x, norm_weight, mean, rstd, n.codes_t, n.inverse, h, a.codes_t, a.inverse, scale)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, b1, b2)]
        y = _product(a, w2, b2, out, m, any(needs))
        if is_compiling():  # (torch 2.11 compiles a function that returns what it changed in place with zero gradients)
            return (y + x).view(shape)
        y.add_(x)
        return y if shape == y.shape else y.resize_(shape)  # (a view made here could not be written to outside)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, mean, rstd, n_codes_t, n_inverse, h, a_codes_t, a_inverse, a_scale = ctx.saved_tensors
        (w1, w2), (up, out), needs, kind = ctx.weights, ctx.gemms, ctx.needs_input_grad, ctx.kind
        for weight, version in zip(ctx.weights, ctx.versions, strict=True):
            check_version(weight, version)
        recipe, dy = out.recipe, _rows(dy)
        norm_dtype, b1_dtype, b2_dtype = ctx.dtypes[0], ctx.dtypes[1], ctx.dtypes[2] if needs[6] else None
        operand, db2 = cast_and_sum(
            dy,
            recipe.grad_output,
            recipe.power_of_two,
            True,
            needs[5],
            b2_dtype,
            out.scaling,
            True,
            None,
            None,
            out.hints.grad_output,
        )
        da = dgrad(operand, w2, out, (x.shape[0], w2.shape[1]), x.dtype)
        dw2 = None
        if needs[5]:
            if a_codes_t is None:
                a_codes_t = kernels.activation_cast(h, kind, a_scale, recipe.input.dtype, row=False, amax=False)[1]
            dw2 = _weight_gradient(operand, a_codes_t, a_inverse, w2, out)
        release_operand(w2, needs[5])
        fmt = up.recipe.grad_output
        assert fmt is not None

        def cast(scale: Tensor, amax: bool) -> tuple[Any, ...]:
            options = {"col": needs[3], "bias_sum": needs[4], "amax": amax}
            return kernels.activation_backward_cast(da, h, kind, scale, fmt.dtype, **options)

        amax = partial(kernels.activation_backward_amax, da, h, kind)
        operand, _, (db1,) = _cast(amax, cast, x.device, fmt, up.recipe.power_of_two, Past(up.scaling, True))
        dn = dgrad(operand, w1, up, x.shape, x.dtype)
        dw1 = _weight_gradient(operand, n_codes_t, n_inverse, w1, up) if needs[3] else None
        release_operand(w1, needs[3])
        dx, dgain, dshift, largest = kernels.norm_backward(dn, x, norm_weight, mean, rstd, dy)
        dgain, dshift = dgain.to(norm_weight.dtype), _to(dshift, norm_dtype)
        gradients = (_like(dx, ctx.shape, largest), dgain, dshift, dw1, _to(db1, b1_dtype), dw2, db2)
        return *gradients, dx, largest, None, None, None, None, None


def _product(x: Operand, weight: Tensor, bias: Tensor | None, gemms: Gemms, m: int, backward: bool) -> Tensor:
    """x · wᵀ + bias, [m, N]; a backward to come finds the transposed codes of the weight made, but for one that is compiled."""
    recipe, keep = gemms.recipe, backward and not is_compiling()
    assert recipe.weight is not None
    w = weight_operand(weight, recipe.weight, power_of_two=recipe.power_of_two, col=keep)
    return fprop(x, w, bias, gemms, (m, weight.shape[0]))


def _weight_gradient(dy: Operand, x_codes_t: Tensor, x_inverse: Tensor, weight: Tensor, gemms: Gemms) -> Tensor:
    return stored_gradient(wgrad(dy, x_codes_t, x_inverse, weight, gemms), weight, gemms)


def _to(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if x is None or dtype is None else x.to(dtype)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as a matrix [M, K], with what is known of its maximum."""
    if x.dim() == 2:
        return x
    amax = known_amax(x)
    rows = x.flatten(0, -2)
    return rows if amax is None else remember_amax(rows, amax)


def _like(dx: Tensor, shape: torch.Size, amax: Tensor) -> Tensor:
    """The gradient dx [M, K] in the shape of what it is for, with its maximum."""
    dx = dx if dx.shape == shape else dx.view(shape)
    return dx if is_compiling() else remember_amax(dx, amax)
