"""Scores and comparisons as plain text, in percent for accuracies and nats for losses."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.evaluate.compare import MEAN, Comparison
from octavo.evaluate.results import Measurement, Results


def scores_table(results: Results) -> str:
    """Each measurement of one model: accuracies with their standard errors, or loss and perplexity; then what is missing."""
    rows: list[Sequence[str]] = [("", "acc", "acc_norm", "items", "")]
    for measurement in results.measurements:
        if measurement.kind == "task":
            metrics = measurement.metrics
            note = f"perplexity {metrics['perplexity']:.3f}" if metrics.get("perplexity") is not None else ""
            note = ", ".join(part for part in (note, measurement.data.get("note", "")) if part)
            cells = [_accuracy(measurement, metric) for metric in ("acc", "acc_norm")]
            rows.append((measurement.name, *cells, f"{measurement.data['items']:,}", note))
    tasks = [measurement for measurement in results.measurements if measurement.kind == "task"]
    if tasks:
        acc = sum(m.metrics["acc"] or 0.0 for m in tasks) / len(tasks)
        normed = sum(m.metrics.get("acc_norm", m.metrics["acc"]) or 0.0 for m in tasks) / len(tasks)
        rows.append((MEAN, f"{100 * acc:.2f}", f"{100 * normed:.2f}", "", ""))
    lines = [results.label, *(_align(rows) if tasks else [])]
    for measurement in results.measurements:
        if measurement.kind == "loss":
            lines.append("  " + _loss(measurement))
    lines += [f"  missing: {name} ({reason})" for name, reason in results.missing.items()]
    return "\n".join(lines)


def comparison_table(comparison: Comparison) -> str:
    """The second beside the first, by their labels, with the paired differences; then what is left out."""
    first, second = comparison.first, comparison.second
    rows: list[Sequence[str]] = [("", "", first, second, "difference", "95% interval", "right in one only", "p")]
    for row in comparison.rows:
        scale, digits = (1.0, 4) if row.metric == "loss" else (100.0, 2)
        span = row.interval
        cells = [
            f"{scale * row.first:.{digits}f}",
            f"{scale * row.second:.{digits}f}",
            f"{scale * row.difference:+.{digits}f}",
        ]
        cells.append("" if span is None else f"{scale * span[0]:+.{digits}f} … {scale * span[1]:+.{digits}f}")
        if row.metric == "loss":
            cells[2] += f" ({row.difference / row.first:+.2%})" if row.first else ""
        pair = "" if row.only_first is None else f"{row.only_first} / {row.only_second}"
        rows.append((row.name, row.metric, *cells, pair, "" if row.p is None else f"{row.p:.3f}"))
    left_out = [f"  not compared: {name} ({reason})" for name, reason in comparison.left_out.items()]
    return "\n".join([f"{second} minus {first}", *_align(rows), *left_out])


def _accuracy(measurement: Measurement, metric: str) -> str:
    value, error = measurement.metrics.get(metric), measurement.metrics.get(f"{metric}_stderr")
    if value is None:
        return ""
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _loss(measurement: Measurement) -> str:
    metrics, tokens = measurement.metrics, measurement.data["tokens"]
    text = f"{measurement.name}: loss {metrics['loss']:.4f} nats a token over {tokens:,} tokens"
    names = {
        "token_perplexity": "perplexity {:.3f} a token",
        "word_perplexity": "{:.3f} a word",
        "bits_per_byte": "{:.4f} bits a byte",
    }
    return ", ".join(
        [text, *(form.format(metrics[key]) for key, form in names.items() if metrics.get(key) is not None)]
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 or not any(c.isdigit() for c in cell) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
