"""Accumulation of FP8 gradients as an opaque operator; see `octavo.kernels.ops`."""

from __future__ import annotations

import torch

from octavo.kernels.dispatch import backend


@torch.library.custom_op(
    "octavo::accumulate",
    mutates_args=("codes", "residual", "scale"),
    schema="(Tensor(a!) codes, Tensor(b!) residual, Tensor(c!) scale, Tensor other, Tensor other_scale, bool first) -> ()",
)
def accumulate(codes, residual, scale, other, other_scale, first):
    backend(codes).accumulate(codes, residual, scale, other, other_scale, first)
