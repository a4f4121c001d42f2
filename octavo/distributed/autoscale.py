"""Auto-scaling: the factor µ that keeps a sum of FP8 gradients within its format (Eq. 3 of FP8-LM, arXiv 2310.18313).

N ranks add E4M3 codes that share one scale s, chosen so that the largest value of any rank fits. Their sum may then be N times too
large. Dividing by N first (*pre-scaling*, Eq. 1) is safe and flushes small values; dividing afterwards (*post-scaling*, Eq. 2)
keeps them and saturates. Auto-scaling multiplies by a µ of each tensor, between the two:

    codes_i = FP8(µ · s · g_i),   mean = Σ codes_i / (N · µ · s)
    µ <- µ / 2              if more than `threshold` (1e-5) of the values reached the largest code in this step
    µ <- µ · 2^(1/period)   else: twice as large after `period` (1,000) steps

All three strategies are the same arithmetic with another µ: 1/N, 1, or one that moves. As µ is part of the scale that is stored
with the reduced gradient, it is divided out wherever the gradient is read, and cannot be divided out twice.

Two rules are ours. What multiplies is the power of two below µ, since E4M3 codes survive that without being rounded again (a factor
such as 1.4 would cost 3 dB). And µ has bounds: above 1 the cast of a single rank's values would saturate, and below 1/(2N) nothing is
gained, as no sum can reach the largest code any more; a tensor whose µ sits at the floor is reported.

State is plain tensors on the device, FP64 for µ, so that a thousand small growths are exactly one doubling; no host ever waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.reference.reduce_scalars import CEILING, next_mu, power_of_two_below

__all__ = ["CEILING", "AutoScale", "Strategy", "lowest_mu", "next_mu", "power_of_two_below"]

Strategy = Literal["auto", "pre", "post"]


def lowest_mu(world: int) -> float:
    """Half of the largest power of two with which `world` values cannot add up beyond the largest code."""
    return 2.0 ** -(math.ceil(math.log2(world)) + 1)


class AutoScale:
    """µ of a list of tensors.

    Args:
        names: of the tensors; keys of the saved state.
        world: ranks that are summed.
        strategy: "pre" holds µ at 1/world (a power of two, rounded down), "post" at 1, "auto" moves it.
        sums_exactly: whether sums are taken in FP32 and cast with a scale of their own, so that they cannot saturate: µ then
            begins, and stays, at 1. Otherwise it begins at 1/√world, which is right for gradients that are independent.
        threshold, period: of Eq. 3.

    Raises `ValueError` for an unknown strategy, and a threshold or period out of range.
    """

    def __init__(
        self,
        names: Sequence[str],
        world: int,
        *,
        strategy: Strategy = "auto",
        sums_exactly: bool = False,
        threshold: float = 1e-5,
        period: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= threshold < 1 or period < 1:
            raise ValueError(
                f"threshold={threshold}, period={period}: a share in [0, 1) and at least one step are needed"
            )
        if strategy not in get_args(Strategy):
            raise ValueError(f"no strategy is called {strategy!r}: use one of {', '.join(get_args(Strategy))}")
        self.names, self.strategy, self.threshold, self.period = list(names), strategy, threshold, period
        self.fp8_sums = not sums_exactly
        """Whether sums can reach the largest code."""
        self.moves = strategy == "auto" and self.fp8_sums
        """Whether µ changes at all."""
        self.floor = lowest_mu(world)
        start = {"pre": 2.0 ** -math.ceil(math.log2(world)), "post": 1.0}.get(
            strategy, 1.0 if sums_exactly else world**-0.5
        )
        count = len(self.names)
        self.mu = torch.full((count,), start, dtype=torch.float64, device=device)
        """FP64 [tensors]."""
        self._fixed = self.mu.clone()
        self.ratio = torch.zeros(count, dtype=torch.float32, device=device)
        """Share of values at the largest code in the last step."""
        self.floor_steps = torch.zeros(count, dtype=torch.int64, device=device)
        """Steps in a row, up to the last, after which µ was at the floor."""

    def current(self, index: Tensor) -> Tensor:
        """µ of the tensors `index` (int64 [t]) in this step, FP64 [t]."""
        return (self.mu if self.moves else self._fixed)[index]

    def factor(self, index: Tensor) -> Tensor:
        """What multiplies the codes of the tensors `index`: powers of two, FP32 [t]."""
        return power_of_two_below(self.current(index))

    def update(self, index: Tensor, ratio: Tensor, usable: Tensor) -> None:
        """Ends a step of the tensors `index`: `ratio` FP32 [t], `usable` bool [t] is false where the sum is not finite."""
        kernels.update_mu(
            kernels.MuState(self.mu, self.ratio, self.floor_steps),
            index,
            ratio,
            usable,
            moves=self.moves,
            threshold=self.threshold,
            period=self.period,
            floor=self.floor,
        )

    def report(self) -> dict[str, dict[str, float]]:
        """{name: {"mu", "saturated", "floor_steps"}}; waits for the device."""
        columns = zip(self.names, self.mu.tolist(), self.ratio.tolist(), self.floor_steps.tolist(), strict=True)
        return {name: {"mu": mu, "saturated": ratio, "floor_steps": steps} for name, mu, ratio, steps in columns}

    def state_dict(self) -> dict[str, Tensor]:
        """The state by "tensor/entry"; 0-d views that share memory, to save and to load in place."""
        entries = ("mu", "ratio", "floor_steps")
        return {f"{name}/{entry}": getattr(self, entry)[i] for i, name in enumerate(self.names) for entry in entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the tensors that `state` has, also from another number of ranks: µ is brought within the bounds of this one.

        Where µ does not move nothing is restored.

        Raises `ValueError`, before anything changes, for a µ that is not positive.
        """
        for name, value in state.items():
            if name.endswith("/mu") and not float(value) > 0:
                raise ValueError(f"the saved {name} is {float(value)}: it must be positive; the checkpoint is damaged")
        if self.moves:
            for name, own in self.state_dict().items():
                if name in state:
                    own.copy_(state[name])
            self.mu.clamp_(self.floor, CEILING)
