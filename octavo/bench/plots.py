"""Bars of a run for the README: what is fast, and what is small.

One panel for each quantity that the rows have, one bar for a row; the baselines are grey, and each library has its colour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.bench.rows import Row
from octavo.train.plots import COLOURS, new_figure, write_figure

Quantity = Callable[[Row], float | None]

PANELS: tuple[tuple[str, str, Quantity], ...] = (
    ("linear", "linear layer, forward and backward:\nspeed over BF16 in the same mode", lambda row: row.speedup),
    (
        "block",
        "blocks and head, forward and backward:\nthousand tokens a second",
        lambda row: _thousand(row.tokens_per_s),
    ),
    ("step", "training step:\nthousand tokens a second", lambda row: _thousand(row.tokens_per_s)),
    ("step", "training step: peak memory, GiB", lambda row: row.peak_gib),
    ("optimizer", "AdamW step: ms", lambda row: row.ms),
    ("optimizer", "weights, gradients and states:\nbytes a parameter", lambda row: row.resident_bytes),
)
"""Benchmark, title, what is drawn."""
LIBRARIES = ("octavo", "torchao", "TransformerEngine", "flashoptim", "bitsandbytes")
"""First words of variants; any other is a baseline."""


def _thousand(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw all panels that have rows. Raises `ValueError` if none has, or without matplotlib."""
    panels = []
    for benchmark, label, quantity in PANELS:
        bars = [(row, quantity(row)) for row in rows if row.benchmark == benchmark and row.ms is not None]
        bars = [(row, value) for row, value in bars if value is not None]
        if bars:
            panels.append((label, bars))
    if not panels:
        raise ValueError(
            "there is nothing to plot: --plot shows linear, block, step and optimizer, and none of them has a row"
        )
    heights = [0.8 + 0.24 * len(bars) for _, bars in panels]
    figure, grid = new_figure(len(panels), 1, figsize=(8, sum(heights) + 0.6), height_ratios=heights, squeeze=False)
    for axes, (label, bars) in zip(grid[:, 0], panels, strict=True):
        places = range(len(bars))
        drawn = axes.barh(places, [value for _, value in bars], color=[_colour(row) for row, _ in bars])
        axes.bar_label(drawn, [f"{value:.3g}" for _, value in bars], padding=3, fontsize=8)
        axes.set_yticks(places, [_label(row) for row, _ in bars], fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(label, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=8)
    write_figure(figure, path)


def _colour(row: Row) -> str:
    library = row.variant.split()[0]
    return COLOURS[LIBRARIES.index(library) + 1] if library in LIBRARIES else COLOURS[0]


def _label(row: Row) -> str:
    batch = "" if row.micro_batch is None else f", micro-batch {row.micro_batch}"
    return f"{row.what.split(', ')[-1] if row.benchmark == 'linear' else ''} {row.variant}, {row.mode}{batch}".strip()
