"""`octavo reproduce`: files and tables, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training import small_config, small_settings

from octavo import cli
from octavo.train.trainer import Trainer

pytest.importorskip("matplotlib")


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def assignments(folder: Path, *settings: str) -> list[str]:
    return [part for setting in [*small_settings(folder), *settings] for part in ("--set", setting)]


def test_fig7_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(small_config(tmp_path, "train.steps=3", "recipe=O1")).run()
    out = tmp_path / "fig7"
    assert cli.main(["reproduce", "fig7", str(tmp_path / "run"), "--ranks", "4", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "auto-scaling has the best SNR in" in text and "two_shot" in text
    assert {"fig7.csv", "fig7_tensors.csv", "fig7.png", "conditions.json"} == {path.name for path in out.iterdir()}
    conditions = json.loads((out / "conditions.json").read_text())
    assert conditions["ranks"] == 4 and conditions["step"] == 3 and conditions["recipe"] == "O1"
    assert len((out / "fig7_tensors.csv").read_text().splitlines()) == 1 + 4 * 9

    assert cli.main(["reproduce", "fig7", str(tmp_path / "run"), "--set", "recipe=O2", "--out", str(out)]) == 2
    assert "leave it out" in one_sentence(capsys)


def test_fig7_trains_a_model_if_none_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = assignments(tmp_path, "train.steps=2", "recipe=bf16")
    assert cli.main(["reproduce", "fig7", "--ranks", "2", "--out", str(tmp_path / "fig7"), *settings]) == 0
    assert (tmp_path / "fig7" / "model" / "checkpoints" / "step-00000002").is_dir()
    assert not (tmp_path / "run").exists()


def test_sensitivity_and_mu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sensitivity"
    settings = assignments(tmp_path, "train.micro_batches=1", "train.steps=2", "recipe=bf16")
    grid = ["--ranks", "2", "--thresholds", "1e-5,1e-3", "--periods", "2"]
    assert cli.main(["reproduce", "sensitivity", "tiny", *grid, "--out", str(out), *settings]) == 0
    assert "validation loss over the grid" in capsys.readouterr().out
    assert {"sensitivity.csv", "sensitivity.png", "mu.png", "conditions.json"} < {path.name for path in out.iterdir()}
    assert cli.main(["reproduce", "mu", str(out / "auto-1e-05-2"), "--out", str(tmp_path / "mu.png")]) == 0
    assert (tmp_path / "mu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["fig7", "/does/not/exist"], "/does/not/exist"),
        (["fig7", "--ranks", "1"], "at least 2 ranks"),
        (["fig7", "--memory", "nan"], "--memory=nan"),
        (["fig7", "--set", "optim.lrr=1"], "optim.lr"),
        (["sensitivity", "tinny"], "tiny"),
        (["sensitivity", "--set", "train.micro_batches=2"], "micro_batches"),
        (["mu", "/does/not/exist"], "is no run"),
    ],
)
def test_mistakes_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    out = [] if arguments[0] == "mu" else ["--out", str(tmp_path / "out")]
    assert cli.main(["reproduce", *arguments, *out]) == 2
    assert word in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


def test_a_run_without_mu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert cli.main(["reproduce", "mu", str(tmp_path)]) == 2
    assert "no µ" in one_sentence(capsys)


def test_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in ((["--help"], "sensitivity"), (["fig7", "--help"], "--ranks")):
        with pytest.raises(SystemExit) as end:
            cli.main(["reproduce", *arguments])
        assert end.value.code == 0 and word in capsys.readouterr().out
