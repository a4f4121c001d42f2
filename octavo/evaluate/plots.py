"""The figure of a comparison: scores side by side, and below the difference of each task with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.evaluate.compare import MEAN, Comparison, Difference
from octavo.train.plots import COLOURS


def plot_comparison(path: Path, comparison: Comparison) -> None:
    """Draw the accuracies of both results and their paired differences, in percentage points, into the PNG `path`.

    Each task shows `acc_norm` where it has one, else `acc`. Raises `ValueError` without matplotlib or without a task.
    """
    rows = headline(comparison)
    if not rows:
        raise ValueError(f"{comparison.first} and {comparison.second} have no task in common: there is nothing to draw")
    figure, (left, right) = _figure(len(rows))
    places = range(len(rows))
    for offset, key, label, colour in (
        (-0.19, "first", comparison.first, COLOURS[0]),
        (0.19, "second", comparison.second, COLOURS[1]),
    ):
        values = [100 * getattr(row, key) for row in rows]
        left.barh([place + offset for place in places], values, height=0.36, color=colour, label=label)
    for place, row in zip(places, rows, strict=True):
        colour = COLOURS[2] if row.name == MEAN else COLOURS[1]
        error = None if row.interval is None else 100 * (row.interval[1] - row.difference)
        right.errorbar(100 * row.difference, place, xerr=error, fmt="o", color=colour, capsize=3)
    right.axvline(0, color=COLOURS[0], linewidth=0.8)
    left.set_yticks(list(places), [f"{row.name}\n{row.metric}, n = {row.items:,}" for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("accuracy (%)")
    right.set_xlabel(f"{comparison.second} minus {comparison.first}\n(percentage points, 95% interval)")
    left.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for axes in (left, right):
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def headline(comparison: Comparison) -> list[Difference]:
    """One row a task, `acc_norm` where there is one, and last their mean."""
    accuracies = [row for row in comparison.rows if row.metric in ("acc", "acc_norm") and row.name != MEAN]
    rows = {row.name: row for row in accuracies}  # acc_norm follows acc
    means = [row for row in comparison.rows if row.name == MEAN and row.metric == "acc_norm"]
    return [*rows.values(), *means]


def _figure(rows: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures need matplotlib: pip install '.[eval]' in octavo's folder") from None
    figure = Figure(figsize=(9, 1.4 + 0.52 * rows), layout="constrained")
    return figure, figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
