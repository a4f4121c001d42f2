"""Rotary positions as opaque operators, for `torch.compile`; see `octavo.kernels.ops`, and `octavo.kernels.ops_quantize` for a `hint`."""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.kernels.dispatch import backend
from octavo.kernels.operator import operator
from octavo.kernels.ops import fake_operands, or_empty


def _rotary(qkv, cos, sin, heads, backward):
    return qkv.new_empty(qkv.shape)


@operator("rotary(Tensor qkv, Tensor cos, Tensor sin, SymInt heads, bool backward) -> Tensor", _rotary)
def rotary(qkv, cos, sin, heads, backward):
    return backend(qkv).rotary(qkv, cos, sin, heads, backward=backward)


@torch.library.custom_op(
    "octavo::rotary_", mutates_args=("qkv",), schema="(Tensor(a!) qkv, Tensor cos, Tensor sin, SymInt heads) -> ()"
)
def rotary_(qkv, cos, sin, heads):
    backend(qkv).rotary_(qkv, cos, sin, heads)


def _rotary_backward(dq, dk, dv, cos, sin):
    batch, tokens, heads, channels = dq.shape
    shape = (batch, tokens, heads + 2 * dk.shape[2], channels)
    return dq.new_empty(shape), dq.new_empty((), dtype=torch.float32)


@operator(
    "rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin) -> (Tensor, Tensor)", _rotary_backward
)
def rotary_backward(dq, dk, dv, cos, sin):
    return backend(dq).rotary_backward(dq, dk, dv, cos, sin)


def _rotary_backward_quantize(dq, dk, dv, cos, sin, dtype, power_of_two, row, col, column_sum, hint):
    batch, tokens, heads, channels = dq.shape
    columns = (heads + 2 * dk.shape[2]) * channels
    return (
        *fake_operands(dq, batch * tokens, columns, dtype, row, col),
        dq.new_empty((), dtype=torch.float32),
        dq.new_empty((), dtype=torch.float32),
        dq.new_empty(columns if column_sum else 0, dtype=torch.float32),
    )


@operator(
    "rotary_backward_quantize(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin, ScalarType dtype, bool power_of_two,"
    " bool row, bool col, bool column_sum, Tensor? hint) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rotary_backward_quantize,
)
def rotary_backward_quantize(dq, dk, dv, cos, sin, dtype, power_of_two, row, col, column_sum, hint):
    codes, codes_t, scale, inverse, sums = backend(dq).rotary_backward_quantize(
        dq,
        dk,
        dv,
        cos,
        sin,
        Format.of(dtype),
        power_of_two=power_of_two,
        row=row,
        col=col,
        column_sum=torch.float32 if column_sum else None,
        hint=hint,
    )
    return or_empty(codes, dq, dtype), or_empty(codes_t, dq, dtype), scale, inverse, or_empty(sums, dq, torch.float32)
