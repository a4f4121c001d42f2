"""What a run tells while it trains: records in `metrics.jsonl`, and a bar or lines for the user.

Losses, norms and skips are read where a step is logged, all of them at once, because reading waits for the device. Throughput is
that of the steps in between; the time of validation and of saving is left out (`off_the_clock`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.distributed import DataParallel
from octavo.distributed.launch import Place
from octavo.distributed.samples import Loss
from octavo.formats import NumericsError
from octavo.linear import collect_stats
from octavo.memory import MemoryReport
from octavo.tensor import ScaledTensor
from octavo.train import checkpoint_folder
from octavo.train.config import TrainConfig
from octavo.train.ledger import StepLedger, StepNumbers
from octavo.train.metrics import (
    MetricsLog,
    Peak,
    Silent,
    device_memory,
    gradient_stats,
    group_reduction,
    group_stats,
    throughput,
)
from octavo.train.progress import Progress


class Reports:
    """The records of a run that begins after `step` steps and `tokens` tokens; one on each rank, of which the first writes and shows.

    `flops` is that of a token, forward and backward. What it writes to is there within `open`.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        model: nn.Module,
        parallel: DataParallel,
        place: Place,
        ledger: StepLedger,
        *,
        step: int,
        tokens: int,
        flops: float,
        peak: Peak | None,
    ) -> None:
        self.config, self.folder, self.model, self.parallel, self.place = config, folder, model, parallel, place
        self.ledger, self.flops, self.peak = ledger, flops, peak
        self.memory: MemoryReport | None = None
        """Bytes by kind at the last log step, set by whoever trains."""
        self.step = step
        """The last step that is recorded."""
        self._tokens = tokens, step  # at the start
        self._sent = sum(parallel.wire.values())
        self._rates: list[float] = []
        self._stats: dict[str, Any] | None = None
        self._losses: dict[str, Loss] = {}
        self._scales: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Reports]:
        """Show progress and write records inside; the clock starts."""
        config, first = self.config, self.place.is_first
        with (
            contextlib.closing(
                MetricsLog(self.folder, self.step, config.log.tensorboard) if first else Silent()
            ) as self._log,
            (
                Progress(f"{config.name} {config.recipe.name}", config.train.steps, self.step) if first else Silent()
            ) as self._progress,
        ):
            self._clock, self._clock_step = time.perf_counter(), self.step
            yield self

    @property
    def path(self) -> Path:
        """The file of records."""
        return self._log.path

    @property
    def tokens_per_s(self) -> float:
        """Median over the log steps, the first left out; NaN with fewer than two."""
        return statistics.median(self._rates[1:]) if len(self._rates) > 1 else math.nan

    def tokens_at(self, step: int) -> int:
        """Tokens that all ranks together have trained on; before a resume there may have been another number of them."""
        tokens, start = self._tokens
        return tokens + (step - start) * self.config.tokens_per_step * self.place.world

    def note(self, text: str) -> None:
        """Show a line."""
        self._progress.note(text)

    def advance(self, step: int) -> None:
        """Show that `step` is done."""
        self._progress.step(step)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the casts inside saturate and flush, and what reduction loses, for the next log step."""
        # Compiled blocks would be compiled anew for their counters, so this step runs uncompiled.
        with (
            torch.compiler.set_stance("force_eager"),
            collect_stats(self.model) as self._stats,
            self.parallel.measure() as self._losses,
        ):
            yield
        grads = ((name, param.grad) for name, param in self.model.named_parameters())
        # Copied, as clipping changes them in place.
        self._scales = {name: grad.scale.clone() for name, grad in grads if isinstance(grad, ScaledTensor)}

    def record_steps(self) -> float:
        """Wait for the device, write the records of the steps since the last call, and return their mean loss.

        Raises `NumericsError` after `optim.max_skipped` skipped steps in a row.
        """
        steps = self.ledger.read()
        for numbers in steps:
            self.step = numbers.step
            self._log.write(
                {
                    "step": numbers.step,
                    "tokens": self.tokens_at(numbers.step),
                    "loss": numbers.loss,
                    "grad_norm": numbers.grad_norm,
                    "lr": numbers.lr,
                    "skipped": numbers.skipped,
                }
            )
        self._log.flush()
        for numbers in steps:
            self._check_skipped(numbers)
        losses = [numbers.loss for numbers in steps if math.isfinite(numbers.loss)]
        return statistics.fmean(losses) if losses else math.nan

    def _check_skipped(self, numbers: StepNumbers) -> None:
        if numbers.in_a_row >= self.config.optim.max_skipped:
            saved = checkpoint_folder.latest(self.folder / checkpoint_folder.FOLDER)
            raise NumericsError(
                f"steps {numbers.step - numbers.in_a_row + 1} to {numbers.step} all had a non-finite gradient (last loss "
                f"{numbers.loss:g}) and were skipped, so the weights have not changed since: look at the data of these steps "
                f"or lower optim.lr; the last good checkpoint is {saved or 'none'}"
            )

    def log_step(self, device: torch.device, epochs: dict[str, float]) -> None:
        """A log step: what depends on the machine, to the records and to the user."""
        loss = self.record_steps()
        seconds, steps = time.perf_counter() - self._clock, self.step - self._clock_step
        rates = throughput(steps * self.config.tokens_per_step, seconds, self.flops, self.peak)
        rates["tokens_per_s"] *= self.place.world
        self._rates.append(rates["tokens_per_s"])
        record: dict[str, Any] = {"step": self.step, **rates, "device_memory": device_memory(device), "epochs": epochs}
        if self.memory is not None:
            record["memory"] = {kind: size for kind, size in self.memory.by_kind.items() if size}
        if self._stats is not None:
            report = {} if self.place.world == 1 else self.parallel.autoscale.report()
            record["gradients"] = gradient_stats(self._scales, report, self._losses)
            record["casts"], self._stats = group_stats(self._stats), None
        sent = sum(self.parallel.wire.values())
        if self.place.world > 1:
            record["wire"] = dict(self.parallel.wire)
            record["reduction"] = group_reduction(self.parallel.autoscale.report())
        self._log.write(record)
        self._log.flush()
        self._progress.report(
            self.step,
            loss,
            rates["tokens_per_s"],
            record["device_memory"],
            self.ledger.skipped,
            rates.get("mfu_bf16"),
            (sent - self._sent) / steps,
        )
        self._sent = sent
        self._clock, self._clock_step = time.perf_counter(), self.step

    def validated(self, step: int, loss: float) -> None:
        """A validation loss, to the records and to the user."""
        self._log.write({"step": step, "val_loss": loss})
        self._log.flush()
        self.note(f"step {step}  validation loss {loss:.4f}")

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave what happens inside out of tokens per second. The device has finished the steps before it starts."""
        self.record_steps()
        start = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start
