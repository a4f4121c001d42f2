"""Rotary positions as opaque operators, for `torch.compile`; see `octavo.kernels.ops`."""

from __future__ import annotations

import torch

from octavo.kernels.dispatch import backend


@torch.library.custom_op(
    "octavo::rotary",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, SymInt heads, bool backward) -> Tensor",
)
def rotary(qkv, cos, sin, heads, backward):
    return backend(qkv).rotary(qkv, cos, sin, heads, backward=backward)


@rotary.register_fake
def _(qkv, cos, sin, heads, backward):
    return qkv.new_empty(qkv.shape)


@torch.library.custom_op(
    "octavo::rotary_", mutates_args=("qkv",), schema="(Tensor(a!) qkv, Tensor cos, Tensor sin, SymInt heads) -> ()"
)
def rotary_(qkv, cos, sin, heads):
    backend(qkv).rotary_(qkv, cos, sin, heads)


@torch.library.custom_op(
    "octavo::rotary_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin) -> (Tensor, Tensor)",
)
def rotary_backward(dq, dk, dv, cos, sin):
    return backend(dq).rotary_backward(dq, dk, dv, cos, sin)


@rotary_backward.register_fake
def _(dq, dk, dv, cos, sin):
    batch, tokens, heads, channels = dq.shape
    shape = (batch, tokens, heads + 2 * dk.shape[2], channels)
    return dq.new_empty(shape), dq.new_empty((), dtype=torch.float32)
