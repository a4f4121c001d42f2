"""Differences of paired items against a bootstrap, against sums by hand, and against the binomial distribution itself."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from octavo.evaluate.compare import Comparison, compare, mcnemar, paired
from octavo.evaluate.plots import headline, plot_comparison
from octavo.evaluate.results import Measurement, Results
from octavo.evaluate.tables import comparison_table, scores_table


def task(name: str, acc, acc_norm=None, checksum: str = "a") -> Measurement:
    columns = {"acc": acc, **({} if acc_norm is None else {"acc_norm": acc_norm})}
    metrics = {key: float(np.mean(values)) for key, values in columns.items()}
    metrics |= {f"{key}_stderr": paired(values)[1] for key, values in columns.items()}
    items = [{"item": i, **{key: float(values[i]) for key, values in columns.items()}} for i in range(len(acc))]
    return Measurement(name, "task", metrics, {"path": "x", "checksum": checksum, "items": len(acc)}, items)


def loss(name: str, losses, tokens) -> Measurement:
    items = [
        {"item": i, "loss": float(a), "tokens": int(n)} for i, (a, n) in enumerate(zip(losses, tokens, strict=True))
    ]
    data = {"path": "x", "checksum": "t", "items": len(items), "tokens": int(sum(tokens))}
    return Measurement(name, "loss", {"loss": float(sum(losses) / sum(tokens))}, data, items)


def results(label: str, *measurements: Measurement) -> Results:
    return Results(label, {"name": label}, {"name": "bf16"}, {}, {}, list(measurements), {"copa": "no copa.jsonl"})


def test_paired_error_is_that_of_the_mean_of_differences(seed):
    rng = np.random.default_rng(seed)
    d = rng.integers(-1, 2, 200).astype(float)
    mean, stderr = paired(d)
    assert mean == pytest.approx(d.mean()) and stderr == pytest.approx(d.std(ddof=1) / math.sqrt(200))
    assert paired([0.5]) == (0.5, None)
    assert paired([1.0, 1.0, 1.0]) == (1.0, 0.0)


def test_paired_error_agrees_with_a_bootstrap(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(100, 200, 400)
    d = weights * rng.normal(0.01, 0.02, 400)
    draws = rng.integers(0, 400, (4000, 400))
    bootstrap = d[draws].sum(axis=1) / weights[draws].sum(axis=1)
    mean, stderr = paired(d, weights)
    assert mean == pytest.approx(d.sum() / weights.sum())
    assert stderr == pytest.approx(bootstrap.std(), rel=0.08)


def test_mcnemar_is_the_binomial_tail(seed):
    rng = np.random.default_rng(seed)
    for b, c in [(0, 0), (0, 5), (3, 3), (700, 800), *rng.integers(0, 60, (20, 2)).tolist()]:
        n = b + c
        tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(b, c) + 1))
        assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-12)
    assert mcnemar(0, 5) == 2 / 32


def test_compare_by_hand():
    a = results(
        "a", task("piqa", [1, 1, 0, 0], [1, 0, 0, 0]), task("boolq", [1, 0, 1, 1]), loss("text", [20.0, 10.0], [10, 5])
    )
    b = results(
        "b", task("boolq", [0, 1, 0, 1]), task("piqa", [1, 1, 1, 0], [1, 1, 1, 0]), loss("text", [21.0, 10.0], [10, 5])
    )
    rows = {(row.name, row.metric): row for row in compare(a, b).rows}
    assert list(rows) == [
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
        ("boolq", "acc"),
        ("text", "loss"),
        ("mean", "acc"),
        ("mean", "acc_norm"),
    ]
    assert (rows["piqa", "acc"].first, rows["piqa", "acc"].second, rows["piqa", "acc"].difference) == (0.5, 0.75, 0.25)
    assert (rows["boolq", "acc"].only_first, rows["boolq", "acc"].only_second) == (2, 1)
    assert rows["text", "loss"].difference == pytest.approx(1 / 15)
    assert rows["mean", "acc"].difference == pytest.approx((0.25 - 0.25) / 2)
    assert rows["mean", "acc_norm"].difference == pytest.approx((0.5 - 0.25) / 2)
    errors = [rows["piqa", "acc"].stderr, rows["boolq", "acc"].stderr]
    assert rows["mean", "acc"].stderr == pytest.approx(math.hypot(*errors) / 2)
    low, high = rows["mean", "acc"].interval
    assert high - low == pytest.approx(2 * 1.959964 * rows["mean", "acc"].stderr, rel=1e-6)


def test_equal_results_do_not_differ(seed):
    rng = np.random.default_rng(seed)
    a = results("a", task("piqa", rng.integers(0, 2, 30)), loss("text", rng.random(9), np.full(9, 7)))
    for row in compare(a, a).rows:
        assert (row.difference, row.stderr) == (0.0, 0.0) and row.p in (None, 1.0)


def test_what_cannot_be_paired_is_left_out_with_the_reason():
    a = results(
        "a", task("piqa", [1, 0]), task("boolq", [1, 0]), task("copa", [1, 0]), loss("text", [1.0, 2.0], [3, 3])
    )
    b = results(
        "b",
        task("piqa", [1, 0]),
        task("boolq", [1, 0], checksum="other"),
        task("copa", [1]),
        loss("text", [1.0, 2.0], [3, 4]),
    )
    found = compare(a, b)
    assert {row.name for row in found.rows} == {"piqa", "mean"}
    assert found.left_out["boolq"] == "a has checksum a and b has other; evaluate both on the same data"
    assert found.left_out["copa"] == "a has items 2 and b has 1; use the same --limit"
    assert "their windows differ" in found.left_out["text"]


def test_equal_numbers_of_tokens_of_two_tokenizers_are_not_compared():
    """The first windows of a text are other stretches of it for another tokenizer."""
    first, second = (loss("text", [1.0, 2.0], [8, 8]) for _ in range(2))
    first.data["bytes"], second.data["bytes"] = 16, 60
    with pytest.raises(ValueError, match="their windows differ.*models of one tokenizer"):
        compare(results("a", first), results("b", second))
    with pytest.raises(ValueError, match="c and d have no measurement to compare .piqa: d has none"):
        compare(results("c", task("piqa", [1, 0])), results("d"))


def test_tables_and_figure(tmp_path, seed):
    rng = np.random.default_rng(seed)
    measurements = [
        [
            task("piqa", rng.integers(0, 2, 50), rng.integers(0, 2, 50)),
            task("boolq", rng.integers(0, 2, 50)),
            loss("text", rng.random(5) + 20, [10] * 5),
        ]
        for _ in range(2)
    ]
    a, b = (results(label, *m) for label, m in zip(("m-bf16", "m-O2"), measurements, strict=True))
    table = scores_table(a)
    assert f"{100 * a.measurements[0].metrics['acc']:.2f} ± " in table
    assert "missing: copa (no copa.jsonl)" in table and "text: loss 2." in table
    comparison = compare(a, b)
    table = comparison_table(comparison)
    assert table.splitlines()[0] == "m-O2 minus m-bf16" and "right in one only" in table
    assert [(row.name, row.metric) for row in headline(comparison)] == [
        ("piqa", "acc_norm"),
        ("boolq", "acc"),
        ("mean", "acc_norm"),
    ]
    plot_comparison(tmp_path / "new" / "plot.png", comparison)
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no task in common"):
        plot_comparison(tmp_path / "none.png", Comparison("a", "b", [], {}))


def test_one_item_has_no_error():
    rows = compare(results("a", task("piqa", [1])), results("b", task("piqa", [0]))).rows
    assert [row.stderr for row in rows] == [None] * 3 and rows[0].interval is None
    assert "± " not in scores_table(results("a", task("piqa", [1])))


def test_results_survive_the_disk(tmp_path, seed):
    rng = np.random.default_rng(seed)
    a = results("a", task("piqa", rng.integers(0, 2, 9)), loss("text", rng.random(4), [7, 7, 7, 2]))
    path = a.write(tmp_path / "out")
    assert Results.read(path) == a
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.items.jsonl", "a.json"]
    assert json.loads(path.read_text())["measurements"][0]["data"]["checksum"] == "a"


def test_damaged_results(tmp_path):
    path = results("a", task("piqa", [1, 0])).write(tmp_path)
    listing = tmp_path / "a.items.jsonl"
    items = listing.read_text()
    listing.write_text(items.replace("1.0", "0.0"))
    with pytest.raises(ValueError, match="a.items.jsonl is not the file that its JSON was written with"):
        Results.read(path)
    listing.unlink()
    with pytest.raises(ValueError, match="a.items.jsonl cannot be read"):
        Results.read(path)
    listing.write_text(items)
    content = path.read_text()
    for bad, message in (
        (content[:-40], "is no JSON"),
        ("[]", "holds no results of octavo eval"),
        (content.replace('"metrics"', '"other"'), "is damaged, it lacks 'metrics'"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            Results.read(path)
    with pytest.raises(ValueError, match="nothing.json cannot be read"):
        Results.read(tmp_path / "nothing.json")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be written to .*file"):
        results("a").write(tmp_path / "file")
