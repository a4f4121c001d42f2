"""Norms as opaque operators, for `torch.compile`; see `octavo.kernels.ops`."""

from __future__ import annotations

import torch

from octavo.kernels.dispatch import backend
from octavo.kernels.operator import operator
from octavo.kernels.ops import fake_operands, new_stats, or_empty


def _norm_stats(x, weight, bias, eps, centered):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd, rstd.new_empty(())


@operator(
    "norm_stats(Tensor x, Tensor weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor, Tensor)",
    _norm_stats,
)
def norm_stats(x, weight, bias, eps, centered):
    mean, rstd, amax = backend(x).norm_stats(x, weight, bias, eps, centered=centered)
    return or_empty(mean, rstd, rstd.dtype), rstd, amax


def _add_norm_stats(x, addend, weight, bias, eps, centered):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else rstd.new_empty(0)
    return x.new_empty(x.shape), mean, rstd, rstd.new_empty(())


@operator(
    "add_norm_stats(Tensor x, Tensor addend, Tensor weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor, Tensor, Tensor)",
    _add_norm_stats,
)
def add_norm_stats(x, addend, weight, bias, eps, centered):
    total, mean, rstd, amax = backend(x).add_norm_stats(x, addend, weight, bias, eps, centered=centered)
    return total, or_empty(mean, rstd, rstd.dtype), rstd, amax


def _norm_cast(x, weight, bias, mean, rstd, scale, dtype, row, col, amax, count):
    return (
        *fake_operands(x, *x.shape, dtype, row, col),
        new_stats(x, count),
        x.new_empty(() if amax else 0, dtype=torch.float32),
    )


@operator(
    "norm_cast(Tensor x, Tensor weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor scale, ScalarType dtype, bool row, bool col,"
    " bool amax, bool count) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_cast,
)
def norm_cast(x, weight, bias, mean, rstd, scale, dtype, row, col, amax, count):
    stats = new_stats(x, count)
    codes, codes_t, maximum = backend(x).norm_cast(
        x, weight, bias, mean, rstd, scale, dtype, row=row, col=col, amax=amax, stats=stats if count else None
    )
    return or_empty(codes, x, dtype), or_empty(codes_t, x, dtype), stats, or_empty(maximum, x, torch.float32)


def _norm_backward(dy, x, weight, mean, rstd, residual_grad):
    dweight = x.new_empty(x.shape[1], dtype=torch.float32)
    dbias = dweight.new_empty(0) if mean is None else torch.empty_like(dweight)
    return x.new_empty(x.shape), dweight, dbias, dweight.new_empty(())


@operator(
    "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor? mean, Tensor rstd, Tensor? residual_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_backward,
)
def norm_backward(dy, x, weight, mean, rstd, residual_grad):
    dx, dweight, dbias, amax = backend(x).norm_backward(dy, x, weight, mean, rstd, residual_grad)
    return dx, dweight, or_empty(dbias, dweight, dweight.dtype), amax
