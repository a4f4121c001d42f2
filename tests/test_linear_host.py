"""The benchmark of the host's time runs on tiny shapes, checks what it times, and writes its conditions down."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "linear_host.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("linear_host", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_and_their_conditions(benchmark, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    arguments = [
        "--device",
        "cpu",
        "--shapes",
        "64x48",
        "32x32",
        "--tokens",
        "128",
        "--repeats",
        "2",
        "--csv",
        str(path),
    ]
    rows = benchmark.main(arguments)
    assert [(row["inputs"], row["outputs"], row["variant"]) for row in rows] == [
        (64, 48, "bf16"), (64, 48, "O2"), (32, 32, "bf16"), (32, 32, "O2"),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["host_ms_min"] <= row["host_ms"] <= row["host_ms_max"]
        assert row["error"] < (0.01 if row["variant"] == "bf16" else benchmark.BOUND)
    with path.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == 4 and all(row["torch"] == torch.__version__ and row["commit"] for row in written)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_wrong_layer_is_not_timed(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "BOUND", 1e-3)
    with pytest.raises(RuntimeError, match="relative error"):
        benchmark.measure("O2", "eager", 32, 32, 64, 1, torch.device("cpu"))
