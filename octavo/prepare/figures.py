"""The two figures of a report: what became of each source's bytes, and the mixture asked and got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_REASONS = 8
"""Rules with a colour of their own; the rest are one."""
ASKED, GOT = "#4d4d4d", "#0072b2"


def plot_dropped(path: Path, sources: Mapping[str, Mapping[str, Any]]) -> None:
    """One bar a source: the shares of its bytes that were kept and that each rule dropped."""
    pyplot = _pyplot()
    sizes: dict[str, int] = {}
    for source in sources.values():
        for reason, amount in source["dropped"].items():
            sizes[reason] = sizes.get(reason, 0) + amount["bytes"]
    named = sorted(sizes, key=lambda reason: -sizes[reason])[:MOST_REASONS]
    bars = {"kept": {name: source["kept"]["bytes"] for name, source in sources.items()}}
    for reason in named:
        bars[reason] = {name: s["dropped"].get(reason, {"bytes": 0})["bytes"] for name, s in sources.items()}
    if len(sizes) > len(named):
        bars["other rules"] = {
            name: sum(a["bytes"] for r, a in s["dropped"].items() if r not in named) for name, s in sources.items()
        }
    totals = {name: max(1, sum(bar[name] for bar in bars.values())) for name in sources}
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.5 * len(sources)), layout="constrained")
    colours = ["#009e73", *(colour for i, colour in enumerate(pyplot.get_cmap("tab10").colors) if i != 2)]  # one green
    left = dict.fromkeys(sources, 0.0)
    for (label, bar), colour in zip(bars.items(), colours, strict=False):
        widths = [bar[name] / totals[name] for name in sources]
        axes.barh(list(sources), widths, left=list(left.values()), label=label, color=colour)
        left = {name: left[name] + width for name, width in zip(sources, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the bytes read")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    _write(figure, path)


def plot_mixture(path: Path, shares: Mapping[str, Mapping[str, float]]) -> None:
    """The share of each source in the training tokens, asked and got, and how often it is seen."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.6 * len(shares)), layout="constrained")
    for row, share in enumerate(shares.values()):
        axes.barh(row - 0.2, share["asked"], 0.36, color=ASKED, label="asked" if row == 0 else None)
        axes.barh(row + 0.2, share["got"], 0.36, color=GOT, label="got" if row == 0 else None)
        axes.text(
            max(share["asked"], share["got"]) + 0.01, row, f"{share['epochs']:.2f} epochs", va="center", fontsize=8
        )
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlabel("share of the training tokens")
    axes.margins(x=0.15)
    axes.legend(frameon=False, fontsize=8)
    _write(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    return pyplot


def _write(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=130, format="png")
    _pyplot().close(figure)
    partial.replace(path)
