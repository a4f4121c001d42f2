"""The autograd function of `octavo.linear.fused.feed_forward`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import Format
from octavo.linear.gemm import Gemms, cast_grad_output, check_version, dgrad, differentiable_once, weight_version
from octavo.linear.operand import Operand, release_operand
from octavo.linear.regions import (
    NormSettings,
    Past,
    as_rows,
    as_shaped,
    cast_norm,
    product,
    to_dtype,
    weight_gradient,
)


def _cast_activation(
    h: Tensor,
    kind: str,
    da: Tensor | None,
    fmt: Format,
    power_of_two: bool,
    past: Past,
    hint: Tensor,
    col: bool,
    bias_sum: bool,
) -> tuple[Operand, Tensor, Tensor | None]:
    """(operand of act(h) or, given da, of the gradient for h; its scale while it is cast; sums of the columns of that gradient)."""
    if past.scaling is None:
        codes, codes_t, scale, visible, inverse, sums = kernels.activation_quantize(
            h, kind, fmt, da=da, col=col, bias_sum=bias_sum, power_of_two=power_of_two, hint=hint
        )
        return Operand(codes, codes_t, visible, inverse), scale, sums
    sums = None
    if da is None:
        scale = past.scaling.scale_of(partial(kernels.activation_amax, h, kind), h.device, fmt.max)
        codes, codes_t, amax = kernels.activation_cast(h, kind, scale, fmt.dtype, col=col)
    else:
        scale = past.scaling.scale_of(partial(kernels.activation_backward_amax, da, h, kind), h.device, fmt.max)
        codes, codes_t, amax, sums = kernels.activation_backward_cast(
            da, h, kind, scale, fmt.dtype, col=col, bias_sum=bias_sum
        )
    assert amax is not None
    return Operand(codes, codes_t, *past.scaling.visible_scale(scale, amax, past.record)), scale, sums


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
        settings: NormSettings,
        kind: str,
        gemms: tuple[Gemms, Gemms],
        past: tuple[Past, Past],
        recompute: bool,
    ) -> Tensor:
        needs, shape, (up, out) = [past[0].record and need for need in ctx.needs_input_grad], x.shape, gemms
        n, s, mean, rstd = cast_norm(as_rows(x), addend, norm_weight, norm_bias, up.recipe, settings, needs[3], past[0])
        m = s.shape[0]
        h = product(n, w1, b1, up, m, any(needs))
        fmt = out.recipe.input
        assert fmt is not None

        col = needs[5] and not recompute
        a, scale, _ = _cast_activation(
            h, kind, None, fmt, out.recipe.power_of_two, past[1], out.hints.input, col, False
        )
        ctx.gemms, ctx.weights = gemms, (w1, w2)
        ctx.versions = [weight_version(w) for w in (w1, w2)]
        ctx.kind, ctx.shape = kind, shape
        ctx.save_for_backward(s, norm_weight, mean, rstd, n.codes_t, n.inverse, h, a.codes_t, a.inverse, scale)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, b1, b2)]
        y = product(a, w2, b2, out, m, any(needs))
        if is_compiling():  # (torch 2.11 compiles a function that returns what it changed in place with zero gradients)
            return (y + s).view(shape)
        y.add_(s)
        return y if shape == y.shape else y.resize_(shape)  # (a view made here could not be written to outside)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        s, norm_weight, mean, rstd, n_codes_t, n_inverse, h, a_codes_t, a_inverse, a_scale = ctx.saved_tensors
        (w1, w2), (up, out), needs, kind = ctx.weights, ctx.gemms, ctx.needs_input_grad, ctx.kind
        for weight, version in zip(ctx.weights, ctx.versions, strict=True):
            check_version(weight, version)
        recipe, dy = out.recipe, as_rows(dy)
        norm_dtype, b1_dtype, b2_dtype = ctx.dtypes[0], ctx.dtypes[1], ctx.dtypes[2] if needs[6] else None
        operand, db2 = cast_grad_output(dy, out, True, needs[5], b2_dtype)
        da = dgrad(operand, w2, out, (s.shape[0], w2.shape[1]), s.dtype)
        dw2 = None
        if needs[5]:
            if a_codes_t is None:
                a_codes_t = kernels.activation_cast(h, kind, a_scale, recipe.input.dtype, row=False, amax=False)[1]
            dw2 = weight_gradient(operand, a_codes_t, a_inverse, w2, out)
        release_operand(w2, needs[5])
        fmt = up.recipe.grad_output
        assert fmt is not None

        past, hint = Past(up.scaling, True), up.hints.grad_output
        operand, _, db1 = _cast_activation(h, kind, da, fmt, up.recipe.power_of_two, past, hint, needs[3], needs[4])
        dn = dgrad(operand, w1, up, s.shape, s.dtype)
        dw1 = weight_gradient(operand, n_codes_t, n_inverse, w1, up) if needs[3] else None
        release_operand(w1, needs[3])
        ds, dgain, dshift, largest = kernels.norm_backward(dn, s, norm_weight, mean, rstd, dy)
        dgain, dshift = dgain.to(norm_weight.dtype), to_dtype(dshift, norm_dtype)
        gradients = (as_shaped(ds, ctx.shape, largest), dgain, dshift, dw1, to_dtype(db1, b1_dtype), dw2, db2)
        return *gradients, ds, largest, None, None, None, None, None
