"""FP8 layers with what surrounds them: a norm before, an activation between, the residual sum after, each as one autograd function.

    norm_linear     y = norm(x) · wᵀ + b
    feed_forward    y = x + act(norm(x) · w₁ᵀ + b₁) · w₂ᵀ + b₂

On their own, norms and activations write BF16 that a cast reads twice, for its maximum and for its codes. Here their kernels write
the codes (`octavo.kernels.norm`, `octavo.kernels.activation`), so that the norm of x, act(h) and the gradient of h exist in FP8 only. In
bytes an element of the GEMM's operand, read and written beside the codes: norm 8 → 4, GELU 8 → 4, its gradient 12 → 8; the sum of the
columns of an output gradient, for a bias, costs nothing (`kernels.quantize`), and the gradient of the residual joins that of the norm.

Saved for backward: x, two numbers a row, the transposed codes of both operands and h in the compute dtype, as without fusion. With
`recompute`, the codes of act(h) are made again from h: 1 byte an element for a pass of 3 bytes.

A region between two matrices is one function because a gradient in FP8 cannot pass between two: autograd would want it in the dtype of the
output. Legend as in `octavo.linear.gemm`. With delayed scaling the passes for maxima fall away as well, but `torch.compile` cannot trace
a function that writes to the windows of the past in forward: then the layers run apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from octavo import kernels
from octavo.formats import Format
from octavo.linear.gemm import Gemms, check_version, dgrad, fprop, stored_gradient, weight_version, wgrad
from octavo.linear.module import FP8Linear
from octavo.linear.operand import Operand, cast_and_sum, release_operand, weight_operand
from octavo.recipe import Recipe
from octavo.scaling import DelayedScaling

Norm = nn.LayerNorm | nn.RMSNorm


def can_fuse(*modules: nn.Module) -> bool:
    """Whether the functions below do all that a call of these layers and norms would do.

    Layers have to be converted, count nothing at the moment, and scale as this module can; norms to have weights, for one dim. Nobody
    calls a module that is fused, so its hooks would not run: none may have any.
    """
    return not has_hooks(*modules) and all(map(_fits, modules))


def has_hooks(*modules: nn.Module) -> bool:
    """Whether a call of one of `modules` would run hooks of its own."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )


def _fits(module: nn.Module) -> bool:
    if isinstance(module, FP8Linear):
        scales = module.recipe.scaling == "current" or not is_compiling()
        return scales and not module.input_first and module.stats is None
    return isinstance(module, Norm) and module.weight is not None and module.weight.dim() == 1


def norm_linear(x: Tensor, norm: Norm, layer: nn.Linear) -> Tensor:
    """layer(norm(x)) of x [M, K], as [M, N] in the dtype of x; M is at least 1."""
    tensors = (x, norm.weight, _bias(norm), layer.weight, layer.bias)
    return _NormLinear.apply(*tensors, _centered(norm, x), _gemms(layer, x), _past(layer))


def feed_forward(x: Tensor, norm: Norm, up: nn.Linear, out: nn.Linear, kind: str, *, recompute: bool = False) -> Tensor:
    """x + out(act(up(norm(x)))) of x [M, K], in the dtype of x; M is at least 1. `kind` as in `kernels.activation_cast`."""
    tensors = (x, norm.weight, _bias(norm), up.weight, up.bias, out.weight, out.bias)
    gemms, past = (_gemms(up, x), _gemms(out, x)), (_past(up), _past(out))
    return _FeedForward.apply(*tensors, _centered(norm, x), kind, gemms, past, recompute)


def _bias(norm: Norm) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _centered(norm: Norm, x: Tensor) -> tuple[float, bool]:
    """(eps, whether the mean is subtracted)."""
    eps = norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps
    return eps, isinstance(norm, nn.LayerNorm)


def _gemms(layer: nn.Linear, x: Tensor) -> Gemms:
    assert isinstance(layer, FP8Linear)
    if not is_compiling():
        layer.watch_gradient()
    scaling = layer.grad_output_scaling if layer.training else None
    return Gemms(layer.recipe, x.dtype, False, layer.gradient_format is not None, scaling)


class Past(NamedTuple):
    """Scales of a layer's input from past maxima."""

    scaling: DelayedScaling | None
    record: bool
    """Whether backward may follow, which an autograd function is not told: only such a forward counts for later ones."""


def _past(layer: nn.Linear) -> Past:
    assert isinstance(layer, FP8Linear)
    return Past(layer.input_scaling if layer.training else None, torch.is_grad_enabled())


def _cast(
    amax: Callable[[], Tensor],
    cast: Callable[[Tensor], tuple[Any, ...]],
    device: torch.device,
    fmt: Format,
    power_of_two: bool,
    past: Past,
) -> tuple[Operand, Tensor, tuple[Any, ...]]:
    """(operand, its scale while it is cast, what `cast` gives besides): `cast(scale)` is (codes, codes_t, amax, ...)."""
    if past.scaling is None:
        maximum = amax()
        scale = kernels.scale_from_amax(maximum, fmt.max, power_of_two)
    else:
        scale = past.scaling.scale_of(amax, device, fmt.max)
    codes, codes_t, found, *rest = cast(scale)
    if past.scaling is not None:
        maximum = found
        if past.record:
            past.scaling.record(found)
    return Operand(codes, codes_t, *kernels.visible_scale(scale, maximum, None)), scale, tuple(rest)


def _cast_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, how: tuple[float, bool], col: bool, past: Past
) -> tuple[Operand, Tensor | None, Tensor]:
    """(operand of norm(x), mean, rstd)."""
    fmt = recipe.input
    assert fmt is not None
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, how[0], centered=how[1])

    def cast(scale: Tensor) -> tuple[Any, ...]:
        return kernels.norm_cast(x, weight, bias, mean, rstd, scale, fmt.dtype, col=col)

    return _cast(lambda: amax, cast, x.device, fmt, recipe.power_of_two, past)[0], mean, rstd


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        how: tuple[float, bool],
        gemms: Gemms,
        past: Past,
    ) -> Tensor:
        needs = [past.record and need for need in ctx.needs_input_grad]
        operand, mean, rstd = _cast_norm(x, norm_weight, norm_bias, gemms.recipe, how, needs[3], past)
        ctx.gemms, ctx.weight, ctx.version = gemms, weight, weight_version(weight)
        ctx.save_for_backward(x, norm_weight, mean, rstd, operand.codes_t, operand.inverse)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, bias)]
        return _product(operand, weight, bias, gemms, x.shape[0], any(needs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, mean, rstd, codes_t, inverse = ctx.saved_tensors
        check_version(ctx.weight, ctx.version)
        recipe, needs = ctx.gemms.recipe, ctx.needs_input_grad
        operand, db = cast_and_sum(
            dy, recipe.grad_output, recipe.power_of_two, True, needs[3], needs[4], ctx.gemms.scaling, True, None, None
        )
        dn = dgrad(operand, ctx.weight, ctx.gemms, x.shape, x.dtype)
        dw = _weight_gradient(operand, codes_t, inverse, ctx.weight, ctx.gemms) if needs[3] else None
        release_operand(ctx.weight, needs[3])
        dx, dgain, dshift = kernels.norm_backward(dn, x, norm_weight, mean, rstd, None)
        return dx, dgain.to(norm_weight.dtype), _to(dshift, ctx.dtypes[0]), dw, _to(db, ctx.dtypes[1]), None, None, None


class _FeedForward(torch.autograd.Function):
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
        how: tuple[float, bool],
        kind: str,
        gemms: tuple[Gemms, Gemms],
        past: tuple[Past, Past],
        recompute: bool,
    ) -> Tensor:
        needs, m, (up, out) = [past[0].record and need for need in ctx.needs_input_grad], x.shape[0], gemms
        n, mean, rstd = _cast_norm(x, norm_weight, norm_bias, up.recipe, how, needs[3], past[0])
        h = _product(n, w1, b1, up, m, any(needs))
        fmt = out.recipe.input
        assert fmt is not None

        def cast(scale: Tensor) -> tuple[Any, ...]:
            return kernels.activation_cast(h, kind, scale, fmt.dtype, col=needs[5] and not recompute)

        amax = partial(kernels.activation_amax, h, kind)
        a, scale, _ = _cast(amax, cast, x.device, fmt, out.recipe.power_of_two, past[1])
        ctx.gemms, ctx.weights = gemms, (w1, w2)
        ctx.versions = [weight_version(w) for w in (w1, w2)]
        ctx.kind = kind
        ctx.save_for_backward(x, norm_weight, mean, rstd, n.codes_t, n.inverse, h, a.codes_t, a.inverse, scale)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, b1, b2)]
        return _product(a, w2, b2, out, m, any(needs)).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, mean, rstd, n_codes_t, n_inverse, h, a_codes_t, a_inverse, a_scale = ctx.saved_tensors
        (w1, w2), (up, out), needs, kind = ctx.weights, ctx.gemms, ctx.needs_input_grad, ctx.kind
        for weight, version in zip(ctx.weights, ctx.versions, strict=True):
            check_version(weight, version)
        recipe = out.recipe
        operand, db2 = cast_and_sum(
            dy, recipe.grad_output, recipe.power_of_two, True, needs[5], needs[6], out.scaling, True, None, None
        )
        da = dgrad(operand, w2, out, (x.shape[0], w2.shape[1]), x.dtype)
        dw2 = None
        if needs[5]:
            if a_codes_t is None:
                a_codes_t = kernels.activation_cast(h, kind, a_scale, recipe.input.dtype, row=False)[1]
            dw2 = _weight_gradient(operand, a_codes_t, a_inverse, w2, out)
        release_operand(w2, needs[5])
        fmt = up.recipe.grad_output
        assert fmt is not None

        def cast(scale: Tensor) -> tuple[Any, ...]:
            return kernels.activation_backward_cast(da, h, kind, scale, fmt.dtype, col=needs[3], bias_sum=needs[4])

        amax = partial(kernels.activation_backward_amax, da, h, kind)
        operand, _, (db1,) = _cast(amax, cast, x.device, fmt, up.recipe.power_of_two, Past(up.scaling, True))
        dn = dgrad(operand, w1, up, x.shape, x.dtype)
        dw1 = _weight_gradient(operand, n_codes_t, n_inverse, w1, up) if needs[3] else None
        release_operand(w1, needs[3])
        dx, dgain, dshift = kernels.norm_backward(dn, x, norm_weight, mean, rstd, dy)
        norm_dtype, b1_dtype, b2_dtype = ctx.dtypes
        gradients = (dx, dgain.to(norm_weight.dtype), _to(dshift, norm_dtype), dw1, _to(db1, b1_dtype), dw2)
        return *gradients, _to(db2, b2_dtype), None, None, None, None, None


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
