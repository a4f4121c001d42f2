"""Scales of GEMM operands from the largest values of past steps. (From the tensor itself: `octavo.kernels.quantize`.)

`DelayedScaling` casts with a scale from a window of past maxima, so one pass casts and takes the amax for later; a tensor that grows
faster than its window saturates for one step:

    scale = scaling.scale(x, E4M3.max)
    codes, codes_t, amax = kernels.cast_transpose_amax(x, scale, E4M3.dtype)
    scaling.record(amax)                                                     # each micro-batch and each recomputation
    scaling.update()                                                         # once per optimizer step

The rules of delayed scaling are those of MS-AMP: a window of 16, its maximum, a power-of-two scale, just-in-time scales for
the first 16 steps (there is no history yet), and a maximum that is zero or not finite leaves the scale as it was. What is added:
maxima wait in `pending` until the step ends, so micro-batches count by their maximum and a recomputed forward counts once.
A step in which nothing was recorded (an expert without tokens, evaluation) leaves no trace and is no step of the warm-up.

The replays of a CUDA graph raise `pending` and run no Python. So a scaling that recorded while one was captured takes part in each step
from then on, and the device decides: a row with nothing pending leaves no trace, though the warm-up counts it. (A compiled region that is
captured by hand does not say so; `torch.compile(mode="reduce-overhead")` records as others do.)

All state is FP32 whatever the model's dtype, plain tensors, and of constant size.

A step asks little of the host. `update_all` moves the windows of all layers on at once, as rows of a few tensors (`_Windows`), and makes
their next scales, so that between two steps a scale is read where it lies. A cast then launches what has to follow it, one kernel
that records its maximum and shows in the scale whether that is finite (`kernels.visible_scale`). Apart, the windows of a model of 32
linear layers would be 800 launches a step, and its records 256 more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from octavo.kernels import amax as tensor_amax
from octavo.kernels import scale_from_amax, streams, update_windows, visible_scale

__all__ = ["DelayedScaling", "delayed_amax", "scale_from_amax", "steps_to_settle", "update_all"]


def delayed_amax(history: Tensor, old: Tensor) -> Tensor:
    """The maximum that gives the scale: that of `history`, or `old` (0-d) where it is zero or not finite. FP32, 0-d."""
    new = history.max()
    return torch.where((new > 0) & new.isfinite(), new, old)


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
        self._captured = False
        """Whether a CUDA graph holds the address of `pending`, to record there."""
        self._limit: float | None = None
        """Largest value of the format, less the margin, of the last scale."""
        self._ready: tuple[float, int, Tensor] | None = None
        """The scale for a limit as `update_all` made it, and the version of `held` that it belongs to."""
        self._place: tuple[_Windows, int] | None = None
        """The windows whose row this state is."""

    def scale(self, x: Tensor, max: float) -> Tensor:
        """The scale of `x` for a format with largest value `max`; FP32, 0-d. During the warm-up `x` is read.

        It is that of this step: the update may write the next one over it.
        """
        return self.scale_of(lambda: tensor_amax(x), x.device, max)

    def scale_of(self, amax: Callable[[], Tensor], device: torch.device, max: float) -> Tensor:
        """`scale` of a tensor whose largest magnitude is `amax()`, which is called during the warm-up only."""
        self.to(device)
        if not self.warm:
            return scale_from_amax(delayed_amax(amax().view(1), self.held), max, margin=self.margin)
        if not is_compiling():
            self._limit, ready = max * 2.0**-self.margin, self._ready
            if ready is not None and ready[0] == self._limit and ready[1] == self.held._version:
                return ready[2]
        return scale_from_amax(self.held, max, margin=self.margin)

    def record(self, amax: Tensor) -> None:
        """Counts a maximum (FP32, 0-d) in the step that goes on; one that is not finite does not count."""
        self.to(amax.device)
        self.pending.copy_(torch.maximum(self.pending, amax.nan_to_num(0.0, posinf=0.0)))
        if not is_compiling():
            self._note_record(amax)

    def visible_scale(self, scale: Tensor, amax: Tensor, record: bool) -> tuple[Tensor, Tensor]:
        """`kernels.visible_scale` of a tensor cast with `scale`, and `record(amax)` if wanted, in one launch."""
        if not record:
            return visible_scale(scale, amax)
        if is_compiling():
            self.record(amax)
            return visible_scale(scale, amax)
        self.to(amax.device)
        self._note_record(amax)
        return visible_scale(scale, amax, pending=self.pending)

    def expect_record(self) -> None:
        """Says that this step will record. Only for a compiled backward pass, which can write tensors but no attributes."""
        self._recorded = True

    def _note_record(self, amax: Tensor) -> None:
        if streams.place(amax) == streams.CAPTURED:  # which runs nothing yet
            self._captured = True
        else:
            self._recorded = True

    @property
    def takes_part(self) -> bool:
        """Whether something was recorded in this step, or a CUDA graph may have."""
        return self._recorded or self._captured

    def update(self, done: Tensor | None = None) -> None:
        """Ends the step: the pending maximum enters the window, unless `done` (bool, 0-d, on any device) is false.

        A step that was not done leaves window and scale as they were. The warm-up counts it: the host does not know of it.
        """
        update_all([self], done)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state as plain tensors: `updates` is 0-d int64, `recorded` 0-d bool, all else FP32."""
        tensors = {name: getattr(self, name).clone() for name in ("history", "pending", "held")}
        recorded = self.pending > 0 if self._captured and not self._recorded else torch.tensor(self._recorded)
        return {**tensors, "updates": torch.tensor(self.updates), "recorded": recorded}

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

    def to(self, device: torch.device) -> None:
        """Moves the state, to where the tensors are that it scales. `scale` and `record` do so too, but later."""
        if self.history.device != device:
            for name in _STATE:
                setattr(self, name, getattr(self, name).to(device))
            self._place, self._ready, self._captured = None, None, False

    def __getstate__(self) -> dict[str, object]:
        """A copy has its state for itself."""
        return {
            **self.__dict__,
            **{name: getattr(self, name).clone() for name in _STATE},
            "_place": None,
            "_ready": None,
            "_captured": False,
        }


_STATE = ("history", "pending", "held")
MAX_MASKS = 64


def steps_to_settle(scaling: str) -> int:
    """Steps after which scales are taken as in all later ones, by `Recipe.scaling`: delayed ones come from the past then."""
    return DelayedScaling().warmup + 1 if scaling == "delayed" else 0


def _spaced(x: Tensor) -> Tensor:
    """A copy of `x` [n] whose elements lie 16 bytes apart: kernels are compiled anew for an address that is no multiple of that."""
    return torch.stack([x] * 4, -1)[:, 0]


class _Windows:
    """The state of n scalings as rows of tensors, of which theirs are views: history [n, window], pending and held [n]."""

    def __init__(self, scalings: Sequence[DelayedScaling]) -> None:
        captured = sum(scaling._captured for scaling in scalings)
        if captured:
            raise RuntimeError(
                f"a CUDA graph holds the addresses of the windows of {captured} of {len(scalings)} delayed scalings, which this update "
                "would move: update the same layers together (an optimizer step does) once before the graph is captured"
            )
        self.history = torch.stack([scaling.history for scaling in scalings])
        self.pending, self.held = (_spaced(torch.stack([getattr(s, name) for s in scalings])) for name in _STATE[1:])
        self.scales = _spaced(torch.ones_like(self.held))
        self.each_scale = self.scales.unbind()
        self.limits: tuple[float, ...] = ()
        """The largest values of the formats that rows are for, 0 where nobody has asked yet; as a tensor [n]:"""
        self.limit_values = torch.zeros(len(scalings), device=self.held.device)
        self.masks: dict[tuple[bool, ...], Tensor] = {}
        """Rows, bool [n]."""
        rows = zip(scalings, self.history, self.pending, self.held, strict=True)
        for row, (scaling, history, pending, held) in enumerate(rows):
            scaling.history, scaling.pending, scaling.held, scaling._place = history, pending, held, (self, row)

    @staticmethod
    def of(scalings: Sequence[DelayedScaling]) -> _Windows:
        """The windows of which these scalings are the rows; made of them unless they are that already."""
        windows = scalings[0]._place[0] if scalings[0]._place is not None else None
        if windows is not None and len(scalings) == len(windows.held):
            places = (scaling._place for scaling in scalings)
            if all(place is not None and place == (windows, row) for row, place in enumerate(places)):
                return windows
        return _Windows(scalings)

    def update(self, scalings: Sequence[DelayedScaling], done: Tensor | None) -> None:
        """Ends a step, and leaves with each scaling the scale that it asked for before."""
        limits = tuple(scaling._limit or 0.0 for scaling in scalings)
        if limits != self.limits:
            self.limits, self.limit_values = limits, torch.tensor(limits, device=self.held.device)
        recorded = tuple(scaling._recorded for scaling in scalings)
        replayed = tuple(scaling._captured and not scaling._recorded for scaling in scalings)
        rows = None if all(recorded) else self._mask(recorded)
        if rows is not None and any(replayed):
            rows = rows | self._mask(replayed) & (self.pending > 0)
        done = None if done is None else done.to(self.held.device)
        update_windows(self.history, self.pending, self.held, self.scales, self.limit_values, rows, done)
        version = self.held._version
        for scaling, limit, scale in zip(scalings, limits, self.each_scale, strict=True):
            scaling._ready = (limit, version, scale) if limit else None

    def _mask(self, rows: tuple[bool, ...]) -> Tensor:
        if rows not in self.masks:
            if len(self.masks) >= MAX_MASKS:  # (layers that run in turn, as experts do, may make ever new sets)
                self.masks.clear()
            self.masks[rows] = torch.tensor(rows, device=self.held.device)
        return self.masks[rows]


@torch.no_grad()
def update_all(scalings: Sequence[DelayedScaling], done: Tensor | None = None) -> None:
    """`DelayedScaling.update` of many scalings in one launch for all of them.

    Call it with the same scalings in each step: the state of those on one device, with windows of one length, is kept together.
    """
    groups: dict[tuple[torch.device, int], list[DelayedScaling]] = {}
    for scaling in scalings:
        groups.setdefault((scaling.history.device, len(scaling.history)), []).append(scaling)
    for group in groups.values():
        if not any(scaling.takes_part for scaling in group):
            continue
        _Windows.of(group).update(group, done)
        for scaling in group:
            if scaling.takes_part:
                scaling._recorded = False
                scaling.updates += 1
                scaling.warm = scaling.updates >= scaling.warmup
