"""A row of results, what it was measured on, and where rows go: a line on the terminal and the CSV file.

A number without its conditions is no result, so every line of the CSV carries the GPU, the versions, the commit and the date.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from octavo.bench.timing import Timing, launch_us
from octavo.train.setup import versions


@dataclass(frozen=True)
class Row:
    """One measurement. What does not apply is None; a row without `ms` says why in `note`."""

    benchmark: str
    what: str
    """The kernel, or the shapes."""
    variant: str
    mode: str = "eager"
    """eager, compiled or graph."""
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    host_ms: float | None = None
    repeats: int | None = None
    calls: int | None = None
    gbytes: float | None = None
    """10⁹ bytes that have to be read and written."""
    gflops: float | None = None
    """10⁹ floating-point operations of the arithmetic; of a model, without those that are repeated."""
    floor_ms: float | None = None
    """What the bytes and operations take at the ceilings of this machine."""
    tokens: int | None = None
    micro_batch: int | None = None
    speedup: float | None = None
    """Over the baseline, by tokens a second, or by time."""
    baseline: str = ""
    """Variant and mode of the baseline."""
    peak_gib: float | None = None
    resident_bytes: float | None = None
    """Bytes a parameter of weights, gradients and optimizer states."""
    peak_bytes: float | None = None
    """Most bytes a parameter inside of the optimizer's step."""
    error: float | None = None
    """Relative error, ‖result - reference‖ / ‖reference‖, the largest of the results."""
    bound: float | None = None
    note: str = ""

    def timed(self, timing: Timing, per: int = 1) -> Row:
        """The row with a timing whose calls are `per` calls each."""
        host = None if timing.host_ms is None else timing.host_ms / per
        return dataclasses.replace(
            self,
            ms=timing.ms / per,
            ms_min=timing.ms_min / per,
            ms_max=timing.ms_max / per,
            host_ms=host,
            repeats=timing.repeats,
            calls=timing.calls * per,
        )

    @property
    def gbytes_per_s(self) -> float | None:
        return None if self.ms is None or self.gbytes is None else self.gbytes / self.ms * 1e3

    @property
    def tflops(self) -> float | None:
        return None if self.ms is None or self.gflops is None else self.gflops / self.ms

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.ms is None or self.tokens is None else self.tokens / self.ms * 1e3

    @property
    def share(self) -> float | None:
        """The floor's part of the time."""
        return None if self.ms is None or self.floor_ms is None else self.floor_ms / self.ms

    @property
    def wrong(self) -> bool:
        """Whether the check failed."""
        return self.error is not None and self.bound is not None and not self.error <= self.bound

    def line(self) -> str:
        """The row for people."""
        if self.ms is None:
            return f"{self._title()}: {self.note}"
        parts = [f"{self._title()}: {_short(self.ms)} ms ({_short(self.ms_min)}–{_short(self.ms_max)})"]
        for value, form in (
            (self.host_ms, "host {} ms"),
            (self.gbytes_per_s, "{} GB/s"),
            (self.tokens_per_s, "{} tokens/s"),
            (self.tflops, "{} TFLOP/s"),
            (self.floor_ms, "floor {} ms"),
        ):
            if value is not None:
                parts.append(form.format(_short(value)))
        if self.share is not None:
            parts[-1] += f" ({self.share:.0%})"
        if self.speedup is not None:
            parts.append(f"{self.speedup:.2f}× {self.baseline}")
        for value, form in (
            (self.peak_gib, "peak {} GiB"),
            (self.resident_bytes, "{} B/param"),
            (self.peak_bytes, "peak {} B/param"),
        ):
            if value is not None:
                parts.append(form.format(_short(value)))
        if self.error is not None and self.bound is not None:
            verdict = "WRONG: error" if self.wrong else "error"
            parts.append(f"{verdict} {self.error:.2g} (at most {self.bound:g})")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)

    def _title(self) -> str:
        batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.what}{batch} | {self.variant}, {self.mode}"


DERIVED = ("gbytes_per_s", "tflops", "tokens_per_s", "share")


def _short(value: float | None) -> str:
    """Four significant digits, thousands set apart."""
    if value is None:
        return "?"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def conditions(device: torch.device) -> dict[str, str]:
    """What a number needs to be quoted. The commit is that of the sources, if they are a checkout with git."""
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    cuda, launch = device.type == "cuda", launch_us(device)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "launch_us": "" if launch is None else f"{launch:.1f}",
        "cuda": torch.version.cuda or "" if cuda else "",
        "triton": triton,
        **versions(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass
class Record:
    """The rows of a run, in order; each is said as it comes, and the CSV file is whole after each."""

    conditions: dict[str, str]
    say: Callable[[str], None]
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row, baseline: str | None = None, mode: str | None = None) -> None:
        """Take a row in, compared with the fastest row before it of the same `what`, the variant `baseline`, and `mode` if given."""
        compared = row.ms is not None and baseline not in (None, row.variant)
        base = self._fastest(row, baseline, mode) if compared else None
        if base is not None:
            row = dataclasses.replace(row, speedup=_cost(base) / _cost(row), baseline=f"{base.variant}, {base.mode}")
        self.rows.append(row)
        self.say(row.line())
        if self.path is not None:
            write_csv(self.path, self.rows, self.conditions)

    def _fastest(self, row: Row, variant: str | None, mode: str | None) -> Row | None:
        alike = [
            base
            for base in self.rows
            if (base.benchmark, base.what, base.variant) == (row.benchmark, row.what, variant)
            and base.ms is not None
            and mode in (None, base.mode)
        ]
        return min(alike, key=_cost, default=None)


def _cost(row: Row) -> float:
    """Milliseconds, of a token where there are tokens."""
    assert row.ms is not None
    return row.ms / (row.tokens or 1)


def write_csv(path: Path, rows: Sequence[Row], conditions: dict[str, str]) -> None:
    """All fields of all rows, their rates, and the conditions."""
    names = [one.name for one in dataclasses.fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *DERIVED, *conditions])
        for row in rows:
            values = [getattr(row, name) for name in (*names, *DERIVED)]
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values] + list(conditions.values()))
