"""Figures of runs: loss curves with their difference, bytes per parameter by kind, µ of gradients over a run.

Curves of runs that saw the same batches in the same order differ by much less than either varies from step to step, so the lower
panel subtracts step by step before it smooths. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The baseline's grey, then the Okabe–Ito colours, which colour-blind readers can tell apart."""

Curve = Sequence[tuple[int, float | None]]
"""Points (step, loss); None marks a skipped step."""


def plot_losses(
    path: Path, curves: Mapping[str, Curve], baseline: str, title: str, validation: Mapping[str, float] | None = None
) -> None:
    """Draw `curves` (nats per token over steps), smoothed over their raw points, and below them each one minus `baseline`.

    `validation` gives the final validation loss of a curve, for the legend.
    """
    figure, (top, bottom) = new_figure(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 1.5))
    reference = _series(curves[baseline])
    window = max(1, len(reference) // 25)
    for (label, curve), colour in zip(curves.items(), _colours(len(curves)), strict=True):
        series = _series(curve)
        steps = np.array(list(series))
        losses = np.array(list(series.values()))
        note = f" (validation {validation[label]:.4f})" if validation and label in validation else ""
        dashed = {} if label == baseline else {"linestyle": (0, (4, 2))}
        top.plot(steps, losses, color=colour, alpha=0.18, linewidth=0.8)
        top.plot(steps, _running_mean(losses, window), color=colour, linewidth=1.8, label=label + note, **dashed)
        if label != baseline:
            shared = [step for step in series if step in reference]
            gap = np.array([series[step] - reference[step] for step in shared])
            bottom.plot(shared, gap, color=colour, alpha=0.25, linewidth=0.8)
            bottom.plot(shared, _running_mean(gap, window), color=colour, linewidth=1.8, label=f"{label} − {baseline}")
    bottom.axhline(0, color=COLOURS[0], linewidth=0.8)
    top.set_title(title, fontsize=11)
    top.set_ylabel("training loss (nats per token)")
    bottom.set_ylabel(f"loss minus {baseline}\n(nats per token)")
    bottom.set_xlabel(f"optimizer step (thick lines: running mean of {window} steps)")
    _focus(bottom, window)
    top.legend(frameon=False)
    bottom.legend(frameon=False, loc="upper right", ncols=3)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def plot_memory(path: Path, bars: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Draw one stacked bar a recipe from `bars`: recipe → kind → resident bytes per parameter of a converted layer."""
    figure, axes = new_figure(1, 1, figsize=(8, 1.6 + 0.75 * len(bars)))
    kinds = list(dict.fromkeys(kind for kinds in bars.values() for kind in kinds))
    left = np.zeros(len(bars))
    for kind, colour in zip(kinds, COLOURS[1:], strict=False):
        widths = np.array([bar.get(kind, 0.0) for bar in bars.values()])
        drawn = axes.barh(list(bars), widths, left=left, color=colour, label=kind, height=0.62)
        labels = [f"{width:.2f}".rstrip("0").rstrip(".") if width >= 0.4 else "" for width in widths]
        axes.bar_label(drawn, labels, label_type="center", color="white", fontsize=9)
        left += widths
    for row, total in enumerate(left):
        axes.text(total + 0.01 * left.max(), row, f"{total:.2f} B", va="center", fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * left.max())
    axes.set_xlabel("resident bytes per parameter of the converted layers")
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.28))
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def plot_mu(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """µ and the share of saturated sums of each tensor or group over a run, from the `reduction` of its metrics.

    Raises `ValueError` if the records have none.
    """
    found = [(record["step"], record["reduction"]) for record in records if record.get("reduction")]
    if not found:
        raise ValueError("the metrics have no µ: it is recorded by runs on several ranks with FP8 gradients")
    figure, (top, bottom) = new_figure(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2, 1))
    steps = [step for step, _ in found]
    for number, name in enumerate(found[-1][1]):
        colour = COLOURS[number % len(COLOURS)]
        for axes, key in ((top, "mu"), (bottom, "saturated")):
            values = [entry.get(name, {}).get(key) for _, entry in found]
            axes.plot(steps, [math.nan if v is None else v for v in values], color=colour, linewidth=1.2, label=name)
    top.set_yscale("log", base=2)
    bottom.set_yscale("symlog", linthresh=1e-6)
    bottom.set_ylim(bottom=0)
    top.set_ylabel("µ")
    bottom.set_ylabel("share of sums at\nthe largest code")
    bottom.set_xlabel("optimizer step")
    top.set_title(title, fontsize=10)
    if len(found[-1][1]) <= 16:
        top.legend(frameon=False, fontsize=7, ncols=2)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def loss_curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float | None]]:
    """The training-loss curve of the records of a `metrics.jsonl`."""
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def _series(curve: Curve) -> dict[int, float]:
    return {step: loss for step, loss in curve if loss is not None}


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values, over fewer at both ends, so that the curve is as long as its data."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    middle = np.arange(len(values))
    first, last = np.maximum(middle - window // 2, 0), np.minimum(middle + (window + 1) // 2, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _focus(axes: Any, skip: int) -> None:
    """Scale the difference to its bulk: the first steps, where the loss falls fastest, would flatten all the rest."""
    values = [line.get_ydata()[skip:] for line in axes.lines if len(line.get_ydata()) > 2 * skip]
    if values:
        bound = 1.3 * float(np.percentile(np.abs(np.concatenate(values)), 99.5))
        if bound > 0:
            axes.set_ylim(-bound, bound)


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("figures need matplotlib: pip install '.[train]' in octavo's folder") from error
    matplotlib.use("Agg")  # Draws without a display.
    from matplotlib import pyplot

    return pyplot


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """(figure, axes) of matplotlib's `subplots`. Raises `ValueError` if matplotlib is not installed."""
    return _pyplot().subplots(rows, columns, layout="constrained", **options)


def write_figure(figure: Any, path: Path) -> None:
    """Saves and closes the figure; makes the folder if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)
