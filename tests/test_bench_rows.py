"""Rows derive their rates from what was measured, know when a check failed, and leave with their conditions."""

import csv
import math

import pytest
import torch

from octavo.bench.rows import Record, Row, conditions
from octavo.bench.timing import Timing


def record(path=None) -> Record:
    return Record({"device": "none", "commit": "abc"}, lambda line: None, path)


def test_rates():
    row = Row("step", "shape", "octavo", ms=2.0, gbytes=3.0, gflops=8.0, tokens=100, floor_ms=1.5)
    assert row.gbytes_per_s == 1500 and row.tflops == 4 and row.tokens_per_s == 50_000 and row.share == 0.75
    assert Row("step", "shape", "octavo", note="not installed").tokens_per_s is None


def test_a_timing_of_several_calls_is_divided():
    row = Row("kernels", "amax", "octavo").timed(Timing(20.0, 10.0, 40.0, 5.0, 12, 3), per=10)
    assert (row.ms, row.ms_min, row.ms_max, row.host_ms, row.repeats, row.calls) == (2.0, 1.0, 4.0, 0.5, 12, 30)


@pytest.mark.parametrize("error,wrong", [(0.0, False), (0.1, False), (0.11, True), (math.nan, True), (None, False)])
def test_a_failed_check_shows(error, wrong):
    row = Row("linear", "shape", "octavo", ms=1.0, error=error, bound=0.1)
    assert row.wrong == wrong
    assert ("WRONG" in row.line()) == wrong


def test_rows_are_compared_with_the_fastest_baseline_of_the_same_shape_and_mode():
    rows = record()
    rows.add(Row("block", "a", "bf16", "eager", ms=9.0), "bf16")
    rows.add(Row("block", "a", "bf16", "compiled", ms=6.0), "bf16")
    rows.add(Row("block", "b", "bf16", "compiled", ms=1.0), "bf16")
    rows.add(Row("block", "a", "octavo", "eager", ms=3.0), "bf16")
    rows.add(Row("block", "a", "octavo", "eager", ms=3.0), "bf16", "eager")
    rows.add(Row("block", "c", "octavo", "eager", ms=3.0), "bf16")
    assert [row.speedup for row in rows.rows] == [None, None, None, 2.0, 3.0, None]
    assert rows.rows[3].baseline == "bf16, compiled"


def test_steps_are_compared_by_tokens_a_second():
    rows = record()
    rows.add(Row("step", "a", "bf16", ms=10.0, tokens=100), "bf16")
    rows.add(Row("step", "a", "bf16", ms=16.0, tokens=200), "bf16")
    rows.add(Row("step", "a", "octavo", ms=8.0, tokens=200), "bf16")
    assert rows.rows[-1].speedup == 2.0


def test_the_file_is_whole_after_each_row(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    rows = record(path)
    rows.add(Row("linear", "64 → 64", "octavo O2", ms=2.0, tokens=100))
    rows.add(Row("linear", "64 → 64", "torchao", note="not installed"))
    with path.open() as file:
        first, second = csv.DictReader(file)
    assert first["commit"] == second["commit"] == "abc"
    assert float(first["tokens_per_s"]) == 50_000 and first["what"] == "64 → 64"
    assert second["ms"] == "" and second["note"] == "not installed"


def test_conditions_name_the_machine_and_the_versions():
    found = conditions(torch.device("cpu"))
    assert found["torch"] == torch.__version__ and "CPU" in found["device"]
    assert set(found) >= {"octavo", "python", "triton", "cuda", "commit", "date"}
