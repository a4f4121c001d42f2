"""The plots of `octavo reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.reproduce.fig7 import ALGORITHMS, STRATEGIES, Loss
from octavo.reproduce.sensitivity import PRECISE, Outcome
from octavo.train.plots import COLOURS, new_figure, write_figure

STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "one_cast": ("one cast", {"linestyle": "-", "marker": "o"}),
    "nccl": ("ring", {"linestyle": ":", "marker": "s"}),
    "two_shot": ("two-shot", {"linestyle": (0, (4, 2)), "marker": "x"}),
}
"""Name and line of each algorithm."""


def plot_fig7(path: Path, blocks: Sequence[Loss], title: str) -> None:
    """Three panels over the blocks: SNR, underflow, overflow; a colour for each strategy, a line for each algorithm."""
    figure, panels = new_figure(1, 3, figsize=(12, 4.2))
    quantities = {
        "SNR against the FP32 mean (dB)": lambda loss: loss.snr_db,
        "underflow (% of values ≠ 0)": lambda loss: 100 * loss.underflow,
        "overflow (% of sums at the largest code)": lambda loss: 100 * loss.overflow,
    }
    for axes, (label, value) in zip(panels, quantities.items(), strict=True):
        for algorithm in ALGORITHMS:
            name, style = STYLES[algorithm]
            # Where lines coincide, the wider ones show below the others.
            for strategy, colour, width in zip(STRATEGIES, COLOURS[1:], (3.6, 2.4, 1.2), strict=False):
                chosen = [loss for loss in blocks if (loss.algorithm, loss.strategy) == (algorithm, strategy)]
                axes.plot(
                    [loss.block for loss in chosen],
                    [value(loss) for loss in chosen],
                    color=colour,
                    markersize=4,
                    linewidth=width,
                    label=f"{strategy}, {name}",
                    **style,
                )
        axes.set_xlabel("transformer block")
        axes.set_ylabel(label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=9, frameon=False, fontsize=8
    )
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)


def plot_sensitivity(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Validation loss minus that of an FP32 sum, over the threshold, one line a period; a band for chance, lines for the rest."""
    base = outcomes[0].val_loss
    precise = [o.val_loss - base for o in outcomes if o.variant.algorithm in PRECISE]
    grid = [o for o in outcomes if o.variant.algorithm == "nccl" and o.variant.strategy == "auto"]
    figure, axes = new_figure(1, 1, figsize=(7, 4.4))
    axes.axhspan(min(precise), max(precise), color=COLOURS[0], alpha=0.15, label=f"{', '.join(PRECISE)}: chance")
    for period, colour in zip(sorted({o.variant.period for o in grid}), COLOURS[1:], strict=False):
        line = sorted((o.variant.threshold, o.val_loss - base) for o in grid if o.variant.period == period)
        axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=4, label=f"auto, period {period:,}")
    for outcome, style in zip([o for o in outcomes if o.variant.strategy != "auto"], ("-.", ":"), strict=True):
        axes.axhline(
            outcome.val_loss - base, color=COLOURS[0], linestyle=style, linewidth=1, label=outcome.variant.label
        )
    axes.set_xscale("log")
    axes.set_xlabel("threshold of the share of saturated sums")
    axes.set_ylabel("validation loss minus that\nof an FP32 sum (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)
    write_figure(figure, path)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
