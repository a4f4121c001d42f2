"""Live progress on a terminal, plain lines elsewhere.

A terminal gets one line that rewrites itself (bar, loss, tokens/s, memory, time left); a pipe or log file gets one plain line a
log step, so that nothing is lost and no control characters are written.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows the steps of a run. Use as a context manager; `title` is printed before each line."""

    def __init__(self, title: str, steps: int, start: int = 0) -> None:
        self._title, self._steps, self._start = title, steps, start
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if sys.stdout.isatty():
            self._bar, self._task = _rich_bar(title, steps, start)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int) -> None:
        """Advance the bar to `step`; plain output prints nothing."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(
        self,
        step: int,
        loss: float,
        tokens_per_s: float,
        memory: int,
        skipped: int,
        mfu: float | None,
        sent: float = 0.0,
    ) -> None:
        """Show the numbers of a log step: loss in nats, memory in bytes, MFU a share of the BF16 peak, bytes sent a step."""
        text = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {memory / 2**30:.2f} GiB"
        if mfu is not None:
            text += f"  MFU {mfu:.1%} of BF16"
        if sent:
            text += f"  {sent / 1e6:,.1f} MB sent a step"
        if skipped:
            text += f"  {skipped} skipped"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        else:
            print(f"{self._title}  step {step}/{self._steps}  {text}  {self._left(step)} left", flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(f"{self._title}  {text}", markup=False, highlight=False)
        else:
            print(f"{self._title}  {text}", flush=True)

    def _left(self, step: int) -> str:
        done = max(step - self._start, 1)
        seconds = round((time.monotonic() - self._began) / done * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _rich_bar(title: str, steps: int, start: int) -> tuple[Any, Any]:
    try:
        from rich import progress
    except ImportError:
        return None, None
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
        progress.TimeRemainingColumn(),
        refresh_per_second=4,
    )
    return bar, bar.add_task(title, total=steps, completed=start, numbers="")
