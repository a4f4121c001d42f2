"""The scalars of an AdamW step for many parameters at once, on the device: bias corrections, bounds and scales.

A scale has to exist before the pass over the tensor that it is for, so it comes from an upper bound of what the pass will write.
With M, V, P the exact maxima of the stored |m|, v and |p|, and G one of |g|:

    |m'| <= β1·M + (1-β1)·G
     v'  <= β2·V + (1-β2)·G²
    |p'| <= |1 - lr·wd|·P + lr·c_t                      Adam: P + lr·c_t, with G + wd·P for G

The last needs a bound of the update ratio. By the Cauchy-Schwarz inequality exact Adam obeys |m̂| / √v̂ <= c_t with

    c_t = (1-β1)/√(1-β2) · √((1-ρ^t)/(1-ρ)) · √(1-β2^t)/(1-β1^t),     ρ = β1²/β2

1 in the first step, then at most 1.165 for betas (0.9, 0.95) and 7.27 for (0.9, 0.999). The update cuts its ratio there, unless
the formats forbid it: then a parameter that moves beyond its bound saturates. Bounds are
loose by at most a factor, so they cost range at the small end (0.5 bit of it for m, 0.2 for v, 0.03 for p, in training runs), no
mantissa. A bound grown each step from the *scale* instead of the exact maximum would lose a bit each step.

With lr = 0 the bound of |p| is P itself, so a scale that is right for p stays, and so do its codes.

A step whose bounds are not finite in FP32, because of a non-finite gradient or one whose square overflows, must not happen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import FP32, Format
from octavo.kernels.reference.adamw import Scalars, UpdateFormats, has_scale
from octavo.kernels.reference.cast import scale_from_amax

SLACK = 1 + 2**-20
"""Covers the FP32 roundings of the pass, so that no value exceeds its bound by a single one."""

RATIO_CAP = 100.0
"""Upper limit of c_t. Beyond every c_t of beta1 = 0.9 with beta2 <= 0.99999; needed for beta1² >= beta2, where c_t diverges."""


def ratio_bound(step: Tensor, beta1: float, beta2: float) -> Tensor:
    """c_t of the module's docstring for steps t >= 1 (FP64), at most `RATIO_CAP`."""
    rho = beta1**2 / max(beta2, 1e-12)
    terms = step if rho == 1 else (1 - rho**step) / (1 - rho)
    bound = (1 - beta1) / math.sqrt(1 - beta2) * terms.sqrt() * (1 - beta2**step).sqrt() / (1 - beta1**step)
    return bound.clamp(max=RATIO_CAP)


def adamw_scalars(
    step: Tensor,
    scales: Tensor,
    amaxes: Tensor,
    grad_scale: Tensor,
    grad_amax: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    residual: bool,
    formats: UpdateFormats,
) -> tuple[Scalars, tuple[Tensor, Tensor, Tensor], Tensor]:
    """(`Scalars` of columns FP32 [n], new scales of param, exp_avg and exp_avg_sq [n], ok) for a step of n
    parameters of one kind; `step` FP32 [n], from 1; ok is 0-d bool.

    scales, amaxes: FP32 [n, 3], for param, exp_avg and exp_avg_sq: the scales of the stored codes and the largest magnitudes among
    these codes. grad_scale, grad_amax: the same for the gradients, [n]; `residual` says whether those have a residual byte.
    """
    one = torch.ones_like(step, dtype=torch.float64)
    t, scales, rate = step.double(), scales.double(), one * lr
    beta1, beta2 = betas
    ratio = ratio_bound(t, beta1, beta2)

    if residual:  # adds at most half a step of E4M3: 2^-4 relative, or 2^-10 among the subnormal codes
        grad_amax = grad_amax * (1 + 2**-4) + 2**-10
    grad = grad_amax.double() / grad_scale.double()
    param, first, second = (amaxes.double() / scales).unbind(1)
    if formats.decoupled:
        param_bound = param * (1 - rate * weight_decay).abs()
    else:
        param_bound = param
        grad = grad + weight_decay * param
    # No slack without a step: the scale of the parameter then has to stay.
    param_bound = torch.where(rate == 0, param, (param_bound + rate.abs() * ratio) * SLACK)
    first_bound = (beta1 * first + (1 - beta1) * grad) * SLACK
    if formats.sqrt_exp_avg_sq:
        second = second**2
    second_bound = (beta2 * second + (1 - beta2) * grad**2) * SLACK
    ok = ((param_bound < FP32.max) & (second_bound < FP32.max) & (grad**2 < FP32.max)).all()
    if formats.sqrt_exp_avg_sq:
        second_bound = second_bound.sqrt()

    param_scale = _scale(param_bound, formats.param) if formats.param_scaled else one
    exp_avg_scale = _scale(first_bound, formats.exp_avg, formats.exp_avg_block)
    exp_avg_sq_scale = _scale(second_bound, formats.exp_avg_sq, formats.exp_avg_sq_block)
    old_param, old_first, old_second = (1 / scales).unbind(1)
    grad_factor = (-1 if maximize else 1) / grad_scale.double()
    second_factor, root_scale = old_second * exp_avg_sq_scale, exp_avg_sq_scale.sqrt()
    if formats.sqrt_exp_avg_sq:
        second_factor, root_scale = second_factor**2, exp_avg_sq_scale
    unbias1 = 1 / (1 - beta1**t)
    columns = Scalars(
        grad_decay=weight_decay * old_param / grad_factor,
        exp_avg_decay=beta1 * old_first,
        exp_avg_gain=(1 - beta1) * grad_factor,
        exp_avg_scale=exp_avg_scale,
        exp_avg_sq_decay=beta2 * second_factor,
        exp_avg_sq_gain=math.sqrt(1 - beta2) * root_scale * grad_factor,
        root_factor=(1 - beta2**t).rsqrt() / (unbias1 * root_scale),
        eps=(eps / unbias1).clamp(min=FP32.tiny),
        ratio_bound=ratio if formats.clamp_ratio else one * torch.inf,
        param_decay=weight_decay * old_param,
        param_rescale=old_param * param_scale,
        minus_rate=-rate * param_scale,
    )
    # Where a tensor is all zero its first scale is any, and factors of it overflow: 0 * inf would be NaN.
    bounded = (column if column is columns.ratio_bound else column.clamp(-FP32.max, FP32.max) for column in columns)
    return (
        Scalars(*(column.float() for column in bounded)),
        (param_scale.float(), exp_avg_scale.float(), exp_avg_sq_scale.float()),
        ok,
    )


def _scale(bound: Tensor, fmt: Format, block: int | None = None) -> Tensor:
    return scale_from_amax(bound.float(), fmt.max) if has_scale(fmt, block) else torch.ones_like(bound)
