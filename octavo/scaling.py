"""Scales of GEMM operands: from the tensor itself, or from the largest values of past steps.

`CurrentScaling` reads the tensor twice, once for its amax and once to cast it. `DelayedScaling` casts with a scale from a window
of past maxima, so one pass casts and takes the amax for later; a tensor that grows faster than its window saturates for one step.
Both offer the same three calls, so a layer does not know which it has:

    scale = scaling.scale(x, E4M3.max)
    codes, codes_t, amax = kernels.cast_transpose_amax(x, scale, E4M3.dtype)
    scaling.record(amax)                                                     # each micro-batch and each recomputation
    scaling.update()                                                         # once per optimizer step

The rules of delayed scaling are those of MS-AMP: a window of 16, its maximum, a power-of-two scale, just-in-time scales for
the first 16 steps (there is no history yet), and a maximum that is zero or not finite leaves the scale as it was. What is added:
maxima wait in `pending` until the step ends, so micro-batches count by their maximum and a recomputed forward counts once.
A step in which nothing was recorded (an expert without tokens, evaluation) leaves no trace and is no step of the warm-up.

All state is FP32 whatever the model's dtype, plain tensors, and of constant size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import amax as tensor_amax
from octavo.kernels import scale_from_amax

__all__ = ["CurrentScaling", "DelayedScaling", "delayed_amax", "scale_from_amax"]


def delayed_amax(history: Tensor, old: Tensor) -> Tensor:
    """The maximum that gives the scale: that of `history`, or `old` (0-d) where it is zero or not finite. FP32, 0-d."""
    new = history.max()
    return torch.where((new > 0) & new.isfinite(), new, old)


class CurrentScaling:
    """Just-in-time scaling: the largest power of two with which this tensor does not saturate. Has no state."""

    def scale(self, x: Tensor, max: float) -> Tensor:
        """The scale of `x` for a format with largest value `max`; FP32, 0-d."""
        return scale_from_amax(tensor_amax(x), max)

    def record(self, amax: Tensor) -> None:
        """Does nothing: the past does not matter."""

    def update(self) -> None:
        """Does nothing."""


class DelayedScaling:
    """Scaling by the maximum over the last `window` optimizer steps.

    Args:
        window: steps to look back.
        warmup: steps with just-in-time scales at the start.
        margin: octaves to stay below saturation.

    Raises `ValueError` if there is no window, or a negative warm-up or margin.
    """

    def __init__(self, window: int = 16, warmup: int = 16, margin: int = 0) -> None:
        if window < 1 or warmup < 0 or margin < 0:
            raise ValueError(
                f"window={window}, warmup={warmup}, margin={margin}: a window has at least one step, and neither "
                "warm-up nor margin can be negative"
            )
        self.warmup, self.margin = warmup, margin
        self.updates = 0
        """Steps in which something was recorded."""
        self.warm = warmup == 0
        """Whether the warm-up is over; a bool, for a counter would recompile a compiled region at each step."""
        self.history = torch.zeros(window)
        """Maxima of the last steps, newest first."""
        self.pending = torch.zeros(())
        """Maximum of the step that goes on."""
        self.held = torch.zeros(())
        """The maximum that gives the scale."""
        self._recorded = False

    def scale(self, x: Tensor, max: float) -> Tensor:
        """The scale of `x` for a format with largest value `max`; FP32, 0-d. During the warm-up `x` is read."""
        return self.scale_of(lambda: tensor_amax(x), x.device, max)

    def scale_of(self, amax: Callable[[], Tensor], device: torch.device, max: float) -> Tensor:
        """`scale` of a tensor whose largest magnitude is `amax()`, which is called during the warm-up only."""
        self._to(device)
        held = self.held if self.warm else delayed_amax(amax(), self.held)
        return scale_from_amax(held, max, margin=self.margin)

    def record(self, amax: Tensor) -> None:
        """Counts a maximum (FP32, 0-d) in the step that goes on; one that is not finite does not count."""
        self._to(amax.device)
        self.pending.copy_(torch.maximum(self.pending, amax.nan_to_num(0.0, posinf=0.0)))
        if not is_compiling():
            self.expect_record()

    def expect_record(self) -> None:
        """Says that this step will record. Only for a compiled backward pass, which can write tensors but no attributes."""
        self._recorded = True

    def update(self, done: Tensor | None = None) -> None:
        """Ends the step: the pending maximum enters the window, unless `done` (bool, 0-d, on any device) is false.

        A step that was not done leaves window and scale as they were. The warm-up counts it: the host does not know of it.
        """
        if not self._recorded:
            return
        history = torch.cat([self.pending.view(1), self.history[:-1]])
        if done is not None:
            history = torch.where(done.to(history.device), history, self.history)
        self.history.copy_(history)
        self.held.copy_(delayed_amax(self.history, self.held))
        self.pending.zero_()
        self._recorded = False
        self.updates += 1
        self.warm = self.updates >= self.warmup

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state as plain tensors: `updates` is 0-d int64, `recorded` 0-d bool, all else FP32."""
        tensors = {name: getattr(self, name).clone() for name in ("history", "pending", "held")}
        return {**tensors, "updates": torch.tensor(self.updates), "recorded": torch.tensor(self._recorded)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a state exactly. Raises `ValueError` if it has another window."""
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"the saved history has {state['history'].numel()} steps, but this window has {self.history.numel()}: "
                f"use DelayedScaling(window={state['history'].numel()})"
            )
        for name in ("history", "pending", "held"):
            getattr(self, name).copy_(state[name])
        self.updates, self._recorded = int(state["updates"]), bool(state["recorded"])
        self.warm = self.updates >= self.warmup

    def _to(self, device: torch.device) -> None:
        if self.history.device != device:
            for name in ("history", "pending", "held"):
                setattr(self, name, getattr(self, name).to(device))
