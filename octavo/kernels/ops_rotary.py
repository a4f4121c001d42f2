"""Rotary positions as an opaque operator, for `torch.compile`; see `octavo.kernels.ops`."""

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
