"""`octavo bench` on a CPU with tiny shapes: every benchmark runs, is checked and leaves its rows."""

import csv
import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from octavo.bench import peers
from octavo.bench.entry import failures
from octavo.bench.rows import Row
from octavo.cli import main

TINY = ("--device", "cpu", "--repeats", "10", "--set", "model.dim=32", "--set", "data.seq_len=32")


@pytest.fixture(autouse=True)
def without_peers(monkeypatch):
    """Whatever this machine has, the rows are those of a machine without peers."""
    for name in ("torchao", "flashoptim", "bitsandbytes", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)


def rows_of(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_everything_at_once(tmp_path, capsys, seed):
    path, figure = tmp_path / "rows.csv", tmp_path / "bars.png"
    assert main(["bench", *TINY, "--roofline", "--tokens", "64", "--csv", str(path), "--plot", str(figure)]) == 0
    rows = rows_of(path)
    assert [*dict.fromkeys(row["benchmark"] for row in rows)] == ["kernels", "linear", "block", "step", "optimizer"]
    assert figure.stat().st_size > 10_000
    missing = {row["variant"] for row in rows if row["note"] == "not installed"}
    assert {name.split()[0] for name in missing} == {"torchao", "flashoptim", "bitsandbytes", "TransformerEngine"}
    for row in rows:
        assert row["commit"] == rows[0]["commit"] and row["torch"] == torch.__version__
        if row["variant"] not in missing:
            assert 0 < float(row["ms_min"]) <= float(row["ms"]) <= float(row["ms_max"]) and int(row["repeats"]) == 10
        if "octavo" in row["variant"]:
            assert float(row["error"]) <= float(row["bound"]) and float(row["floor_ms"]) > 0
    assert "floor of 2 layers of tiny" in capsys.readouterr().out
    (o2,) = (row for row in rows if row["variant"] == "octavo AdamW, O2")
    assert float(o2["resident_bytes"]) == pytest.approx(6 + 4 / 128, abs=0.05)
    (fp32,) = (row for row in rows if row["variant"] == "torch AdamW, FP32")
    assert float(fp32["resident_bytes"]) == pytest.approx(16, abs=0.05)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--tokens", "0"), "'0' is no number from 1 on"),
        (("--layers", "-1"), "'-1' is no number from 1 on"),
        (("--micro-batch", "2,a"), "'a' is no number from 1 on"),
        (("--micro-batches", "0"), "'0' is no number from 1 on"),
        (("--shapes", "0x16"), "'0' is no number from 1 on"),
        (("--shapes", "4096"), "'4096' is no list of inputs x outputs"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_runs(option, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *TINY, *option])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_only_names_that_nothing_has(capsys):
    assert main(["bench", "linear", *TINY, "--only", "octavio"]) == 2
    assert "--only=octavio: no variant of linear has that in its name" in capsys.readouterr().err


def test_micro_batches_recomputation_and_release(tmp_path, seed):
    path = tmp_path / "rows.csv"
    options = ("--only", "bf16,octavo", "--set", "model.recompute=full", "--csv", str(path))
    assert main(["bench", "step", *TINY, *options, "--micro-batch", "1,2", "--micro-batches", "2"]) == 0
    rows = rows_of(path)
    assert [(row["variant"], row["micro_batch"], row["tokens"]) for row in rows] == [
        ("bf16", "1", "64"),
        ("bf16", "2", "128"),
        ("octavo O2", "1", "64"),
        ("octavo O2", "2", "128"),
    ]
    assert all("full recomputation" in row["what"] and "2 micro-batches" in row["what"] for row in rows)
    assert main(["bench", "step", *TINY, *options, "--only", "octavo", "--set", "optim.release=partial"]) == 0
    assert [row["variant"] for row in rows_of(path)] == ["octavo O2, release partial"]


def test_compiled_is_compared_with_compiled(monkeypatch, tmp_path, seed):
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: compiler(*args, **options, backend="eager")
    )  # in seconds
    path = tmp_path / "rows.csv"
    options = ("--only", "bf16,octavo", "--modes", "eager,compiled", "--shapes", "32x64", "--csv", str(path))
    assert main(["bench", "linear", "block", *TINY, *options]) == 0
    rows = {(row["benchmark"], row["variant"], row["mode"]): row for row in rows_of(path)}
    assert rows["linear", "octavo O2", "eager"]["baseline"] == "bf16, eager"
    assert rows["linear", "octavo O2", "compiled"]["baseline"] == "bf16, compiled"
    assert len(rows) == 8 and all(row["ms"] for row in rows.values())


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("lines",), "no benchmark 'lines'"),
        (("--repeats", "3"), "at least 10"),
        (("--modes", "graph"), "--modes=graph"),
        (("--preset", "gpt_8b"), "gpt_8b"),
        (("--set", "model.dtype=fp32"), "bf16"),
        (("--set", "model.n_heads=3"), "n_heads=3"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and "\n" == err[-1] and out == ""


class Doubled(nn.Linear):
    """A layer that computes the wrong thing."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_wrong_result_fails_the_run(monkeypatch, tmp_path, capsys, seed):
    def convert(module, config):
        return Doubled(module[0].in_features, module[0].out_features, bias=False, dtype=module[0].weight.dtype)

    @dataclasses.dataclass
    class Config:
        emulate: bool = False

        @classmethod
        def from_recipe_name(cls, name):
            assert name == "tensorwise"
            return cls()

    fake = types.SimpleNamespace(Float8LinearConfig=Config, convert_to_float8_training=convert)
    monkeypatch.setattr("octavo.bench.peers.peer", lambda name: fake)
    assert main(["bench", "linear", *TINY, "--shapes", "32x32", "--only", "torchao", "--tokens", "32"]) == 1
    out, err = capsys.readouterr()
    assert "WRONG: error 1 (at most 0.1)" in out and "torchao tensorwise: error 1" in err


def test_a_peer_that_breaks_is_a_row_and_no_failure(monkeypatch, tmp_path, seed):
    def broken(name):
        raise RuntimeError("no kernel for this device\nand more")

    monkeypatch.setattr("octavo.bench.peers.peer", broken)
    path = tmp_path / "rows.csv"
    assert main(["bench", "linear", *TINY, "--shapes", "32x32", "--only", "torchao", "--csv", str(path)]) == 0
    assert rows_of(path)[0]["note"] == "failed: RuntimeError: no kernel for this device"


def test_octavo_that_breaks_is_a_failure():
    ours = Row("linear", "shape", "octavo O2", note="failed: RuntimeError: no")
    assert failures([ours, Row("linear", "shape", "torchao", note="failed: it")]) == [
        "shape, octavo O2, eager: " + ours.note
    ]


def test_a_library_that_lacks_a_library_counts_as_not_installed(monkeypatch, tmp_path):
    (tmp_path / "halved.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(peers.NotInstalledError, match="libcudart"):
        peers.peer("halved")
