"""Reference of `octavo.kernels.cross_entropy`."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_gradient(
    logits: Tensor, classes: Tensor, weights: Tensor, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor]:
    """losses = w · (logΣexp - l_c) [n], codes = (softmax - onehot) · w · scale [n, V]."""
    losses, gradient = losses_and_gradient(logits, classes, weights)
    return losses, gradient.mul_(scale).to(dtype)


def losses_and_gradient(logits: Tensor, classes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same without codes: losses [n], their gradients [n, V], FP32."""
    rows, weights = classes[:, None], weights[:, None]
    log_probabilities = logits.float().log_softmax(dim=-1)
    losses = -(log_probabilities.gather(1, rows) * weights).squeeze(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    return losses, log_probabilities.exp_().sub_((columns == rows).to(torch.uint8)).mul_(weights)
