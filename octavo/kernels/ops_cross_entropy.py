"""Cross-entropy with its gradient as an opaque operator; see `octavo.kernels.ops`."""

from __future__ import annotations

import torch

from octavo.kernels.dispatch import backend


@torch.library.custom_op(
    "octavo::softmax_gradient",
    mutates_args=(),
    schema="(Tensor logits, Tensor classes, Tensor weights, ScalarType dtype, float scale) -> (Tensor, Tensor)",
)
def softmax_gradient(logits, classes, weights, dtype, scale):
    return backend(logits).softmax_gradient(logits, classes, weights, dtype, scale)


@softmax_gradient.register_fake
def _(logits, classes, weights, dtype, scale):
    return torch.empty_like(weights), logits.new_empty(logits.shape, dtype=dtype)
