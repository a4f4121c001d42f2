"""Cross-entropy with its gradient as an opaque operator; see `octavo.kernels.ops`."""

from __future__ import annotations

import torch

from octavo.kernels.dispatch import backend
from octavo.kernels.operator import operator


def _softmax_gradient(logits, classes, weights, dtype, scale):
    return torch.empty_like(weights), logits.new_empty(logits.shape, dtype=dtype)


@operator(
    "softmax_gradient(Tensor logits, Tensor classes, Tensor weights, ScalarType dtype, float scale) -> (Tensor, Tensor)",
    _softmax_gradient,
)
def softmax_gradient(logits, classes, weights, dtype, scale):
    return backend(logits).softmax_gradient(logits, classes, weights, dtype, scale)
