"""Cross-entropy of logits with its gradient in FP8, for a loss that takes its gradient at once (`octavo.models.loss`).

    loss_m = w_m · (log Σ_v exp(l_mv) - l_mc),    ∂loss_m/∂l_mv = w_m · (softmax(l_m)_v - [v = c_m])

The logits of 16,384 tokens and a vocabulary of 50,304 are 1.6 GB of BF16. A softmax, a gradient and a cast in PyTorch read or write
FP32 copies of them eight times, and what a compiler makes of it reads them three times. Here a row is read twice, the second time, a
few microseconds later, out of the second cache: 2 + 1 bytes an element of memory.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from octavo.formats import Format
from octavo.kernels import ops_cross_entropy
from octavo.kernels.dispatch import backend


def softmax_gradient(
    logits: Tensor, classes: Tensor, weights: Tensor, fmt: Format, scale: float
) -> tuple[Tensor, Tensor]:
    """(losses FP32 [n], codes [n, V] of their gradients · scale) of logits [n, V]; softmax and sums are FP32.

    Args:
        logits: any float; minus infinity takes no probability.
        classes: int64 [n], each in [0, V).
        weights: FP32 [n], in [-1, 1]; what is NaN makes its row NaN.
        fmt: FP8; `scale` is one that 1 bears, or it saturates.

    Raises `ValueError` for shapes that do not match.
    """
    if logits.dim() != 2 or not classes.shape == weights.shape == logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)}, classes {tuple(classes.shape)} and weights {tuple(weights.shape)} are to be [n, V], [n], [n]"
        )
    logits = logits.detach()
    if is_compiling():
        return ops_cross_entropy.softmax_gradient(logits, classes, weights, fmt.dtype, scale)
    return backend(logits).softmax_gradient(logits, classes, weights, fmt.dtype, scale)
