"""Two results on the same items: differences, their errors, and whether they could be chance.

Items are paired, so what the two have in common cancels. With d_i the difference of item i and n_i its weight (1 for a task, the
tokens of a window for a loss),

    D = Σ d_i / Σ n_i        e_i = d_i - D n_i        SE(D)² = m/(m - 1) · Σ e_i² / (Σ n_i)²        95% interval: D ± 1.96 SE

which for n_i = 1 is the paired standard error s/√m, exact, without a bootstrap and its seed. The mean over T tasks has
SE² = Σ SE_t² / T². McNemar's exact test looks at the items that one of the two alone answers right, b and c of them: under
no difference b is binomial(b + c, 1/2), and p is its two-sided tail. With few such items (under ten, say) the interval is
too narrow and p is the number to trust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.evaluate.results import Measurement, Results

Z = 1.959963984540054
"""The normal distribution's 97.5% point."""
MEAN = "mean"


@dataclass(frozen=True)
class Difference:
    """Of one metric: the second result minus the first."""

    name: str
    """The measurement, or `mean`."""
    metric: str
    first: float
    second: float
    difference: float
    stderr: float | None
    """None with a single item, and for perplexities."""
    items: int
    only_first: int | None = None
    """Items that the first alone answers right; None for a loss and for means."""
    only_second: int | None = None
    p: float | None = None
    """Of McNemar's exact test, two-sided."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of the difference."""
        if self.stderr is None:
            return None
        return self.difference - Z * self.stderr, self.difference + Z * self.stderr


@dataclass(frozen=True)
class Comparison:
    """All differences of two results."""

    first: str
    """Labels."""
    second: str
    rows: list[Difference]
    left_out: dict[str, str]
    """Measurement → why it is not compared."""


def paired(differences: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> tuple[float, float | None]:
    """(mean difference, its standard error) of paired items, weighted as the module's head says; no error for a single item."""
    d = np.asarray(differences, dtype=np.float64)
    n = np.ones_like(d) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = d.sum() / n.sum()
    if len(d) < 2:
        return float(mean), None
    residual = d - mean * n
    return float(mean), float(math.sqrt(len(d) / (len(d) - 1) * (residual**2).sum()) / n.sum())


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p of McNemar's exact test: 1 without any item that only one answers right."""
    n = only_first + only_second
    term = tail = 1
    for k in range(min(only_first, only_second)):
        term = term * (n - k) // (k + 1)  # n over k + 1
        tail += term
    return min(1.0, 2 * tail / 2**n)


def compare(first: Results, second: Results) -> Comparison:
    """Every metric that both have, measurement by measurement, then the means over the tasks.

    The means are those of `acc`, and of `acc_norm` with `acc` for tasks that have no other. What only one has, or what is of
    different data or windows, is left out and listed. Raises `ValueError` when nothing remains.
    """
    rows: list[Difference] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(m.name for m in (*first.measurements, *second.measurements)):
        a, b = first.find(name), second.find(name)
        if a is None or b is None:
            left_out[name] = f"{(first if a is None else second).label} has none"
            continue
        reason = _mismatch(a, b, first.label, second.label)
        if reason:
            left_out[name] = reason
        else:
            rows += _differences(a, b)
    if not rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "neither has any"
        raise ValueError(f"{first.label} and {second.label} have no measurement to compare ({reasons})")
    return Comparison(first.label, second.label, rows + _means(rows), left_out)


def _mismatch(a: Measurement, b: Measurement, first: str, second: str) -> str:
    """Why the two cannot be paired; empty if they can."""
    for key, remedy in (("checksum", "evaluate both on the same data"), ("items", "use the same --limit")):
        if a.data.get(key) != b.data.get(key):
            return f"{first} has {key} {a.data.get(key)} and {second} has {b.data.get(key)}; {remedy}"
    # Under a limit, equal numbers of tokens of two tokenizers are different stretches of text.
    if a.kind == "loss" and (_tokens(a) != _tokens(b) or a.data.get("bytes") != b.data.get("bytes")):
        return "their windows differ; use the same --window and --stride, and models of one tokenizer"
    return ""


def _tokens(measurement: Measurement) -> list[int]:
    return [item["tokens"] for item in measurement.items]


def _differences(a: Measurement, b: Measurement) -> list[Difference]:
    if a.kind == "loss":
        losses = [b_item["loss"] - a_item["loss"] for a_item, b_item in zip(a.items, b.items, strict=True)]
        difference, stderr = paired(losses, _tokens(a))
        first, second = (m.metrics["loss"] or 0.0 for m in (a, b))
        return [Difference(a.name, "loss", first, second, difference, stderr, len(a.items))]
    rows = []
    for metric in ("acc", "acc_norm"):
        if metric in a.metrics and metric in b.metrics:
            x = np.array([item[metric] for item in a.items])
            y = np.array([item[metric] for item in b.items])
            difference, stderr = paired(y - x)
            lost, won = int(((x == 1) & (y == 0)).sum()), int(((x == 0) & (y == 1)).sum())
            rows.append(
                Difference(
                    a.name,
                    metric,
                    float(x.mean()),
                    float(y.mean()),
                    difference,
                    stderr,
                    len(x),
                    lost,
                    won,
                    mcnemar(lost, won),
                )
            )
    return rows


def _means(rows: list[Difference]) -> list[Difference]:
    plain = [row for row in rows if row.metric == "acc"]
    normed = {row.name: row for row in plain} | {row.name: row for row in rows if row.metric == "acc_norm"}
    return [_mean(group, metric) for group, metric in ((plain, "acc"), (list(normed.values()), "acc_norm")) if group]


def _mean(rows: list[Difference], metric: str) -> Difference:
    count = len(rows)
    errors = [row.stderr for row in rows]
    stderr = None if None in errors else math.sqrt(sum(error**2 for error in errors if error is not None)) / count
    first, second, difference = (
        math.fsum(getattr(row, key) for row in rows) / count for key in ("first", "second", "difference")
    )
    return Difference(MEAN, metric, first, second, difference, stderr, sum(row.items for row in rows))
