"""The numbers of single steps, kept on the device until they are wanted.

Reading a loss makes the host wait for the device, and a waiting host feeds it nothing: so each step leaves its loss, gradient
norm and the optimizer's skip counter as one small tensor, and a log step reads all of them in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepNumbers:
    """What one step left."""

    step: int
    lr: float
    loss: float
    """Mean over the tokens of the step, nats."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    skipped: int
    """Steps of the run so far, this one included, whose gradient was not finite, so that the optimizer changed nothing."""
    in_a_row: int
    """Skipped steps in a row that end with this one; 0 if it was not skipped."""


class StepLedger:
    """Collects steps with `add`, gives them out with `read`, and counts the skipped ones.

    `mean` takes the mean of numbers over the ranks of a run; losses are those of all ranks, all else is the same on each.
    """

    def __init__(
        self, skipped: int = 0, in_a_row: int = 0, mean: Callable[[Tensor], Tensor] = lambda numbers: numbers
    ) -> None:
        self.skipped, self.in_a_row = skipped, in_a_row
        """As in `StepNumbers`, of the last step read."""
        self._counter = 0.0
        self._mean = mean
        self._pending: list[tuple[int, float, Tensor]] = []

    def add(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor, skip_counter: Tensor) -> None:
        """Keep the 0-d tensors of a step; `skip_counter` is the count of skipped steps of an optimizer made with this ledger."""
        numbers = [loss, grad_norm, skip_counter]
        self._pending.append((step, lr, torch.stack([number.detach().to(torch.float64) for number in numbers])))

    def read(self) -> list[StepNumbers]:
        """The steps since the last call, in order. This waits for the device."""
        if not self._pending:
            return []
        table = torch.stack([numbers for _, _, numbers in self._pending]).cpu()
        table[:, 0] = self._mean(table[:, 0])
        rows = table.tolist()
        steps = []
        for (step, lr, _), (loss, grad_norm, counter) in zip(self._pending, rows, strict=True):
            skipped, self._counter = counter > self._counter, counter
            self.skipped += skipped
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            steps.append(StepNumbers(step, lr, loss, grad_norm, self.skipped, self.in_a_row))
        self._pending.clear()
        return steps
