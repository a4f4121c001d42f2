"""The windows of delayed scaling (see `octavo.scaling`): what the end of a step does to all of them, in one launch."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.dispatch import backend


def update_windows(
    history: Tensor,
    pending: Tensor,
    held: Tensor,
    scales: Tensor,
    limits: Tensor,
    rows: Tensor | None = None,
    done: Tensor | None = None,
) -> None:
    """Ends a step of n scalings, in place: pending enters history and becomes zero, held and scales follow.

        history = [pending, history[:-1]]    held = max(history), unless that is zero or not finite    scale = scale_from_amax(held, limit)

    Args:
        history: [n, window], newest first, contiguous; pending, held, scales: [n], of one stride. All FP32, no value negative.
        limits: FP32 [n]: the largest value of the format, at least 1; where it is 0, there is no scale to make.
        rows: bool [n]: those that take part, the others stay as they are; None is all of them.
        done: bool, 0-d: if false, history stays.

    Not for compiled regions.
    """
    backend(held).update_windows(history, pending, held, scales, limits, rows, done)
