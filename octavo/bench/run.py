"""What the benchmarks of a run share: device, repeats, ceilings, inputs, and how a variant becomes a row."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.bench.peers import NotInstalledError
from octavo.bench.rows import Record, Row
from octavo.bench.timing import WARMUP, Timing, measure
from octavo.plan.ceilings import Ceiling
from octavo.recipe import Recipe
from octavo.scaling import steps_to_settle

SEED = 0


@dataclass(frozen=True)
class Run:
    """One call of `octavo bench`."""

    device: torch.device
    repeats: int
    recipe: Recipe
    record: Record
    ceiling: Ceiling | None = None
    """Measured at the start, where floors are wanted."""
    modes: tuple[str, ...] = ("eager",)
    only: tuple[str, ...] = ()
    """Parts of names of the variants to run; empty runs all."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def settling(self) -> int:
        """Calls until a step is like those after it: delayed scaling begins with steps that find their own scales."""
        return max(WARMUP, steps_to_settle(self.recipe.scaling))

    def wants(self, variant: str) -> bool:
        return not self.only or any(part in variant for part in self.only)

    def time(self, function: Callable[[], object]) -> Timing:
        return measure(function, self.device, self.repeats)

    def normal(self, *shape: int, std: float = 1.0, seed: int = SEED, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random inputs, the same for every variant."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=std, generator=generator)

    def add(
        self, row: Row, function: Callable[[Row], Row], baseline: str | None = None, mode: str | None = None
    ) -> None:
        """Add what `function` makes of `row`; if it cannot, say why. The next variant finds the device's memory free.

        What goes wrong inside of a peer, or for want of memory, is a row as well and never ends the run.
        """
        if not self.wants(row.variant):
            return
        try:
            row = function(row)
        except NotInstalledError:
            row = dataclasses.replace(row, note="not installed")
        except torch.OutOfMemoryError:
            row = dataclasses.replace(row, note="out of memory")
        except Exception as error:
            row = dataclasses.replace(row, note=f"failed: {type(error).__name__}: {_first_line(error)}")
        self.record.add(row, baseline, mode)
        self.clear()

    def clear(self) -> None:
        """Free what the last variant left, compiled code included. (The host's memory is not worth a third of a second a row.)"""
        torch._dynamo.reset()
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Most bytes allocated since `clear` or `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.is_cuda else None

    def forget_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:160]


def relative_error(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """The largest ‖got - want‖ / ‖want‖ over pairs of tensors; NaN if one has a value that is not finite."""
    errors = []
    for a, b in zip(got, want, strict=True):
        a, b = a.detach().float(), b.detach().float()
        errors.append((a - b).norm() / b.norm().clamp(min=1e-30))
    return torch.stack(errors).amax().item()
