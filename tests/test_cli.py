"""The command line: exit codes, one sentence for each mistake, no traceback, nothing lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import small_config, small_settings

from octavo import cli
from octavo.formats import NumericsError
from octavo.train import checkpoint, checkpoint_folder, demo
from octavo.train.presets import PRESETS
from octavo.train.trainer import Trainer


def train(folder: Path, *settings: str, preset: str = "tiny", resume: bool = False) -> int:
    assignments = [part for setting in [*small_settings(folder), *settings] for part in ("--set", setting)]
    return cli.main(["train", preset, *assignments, *(["--resume"] if resume else [])])


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def test_train_and_resume_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "train.steps=4") == 0
    out = capsys.readouterr().out
    assert "validation loss" in out and "step-00000004" in out
    assert train(tmp_path, "train.steps=6", resume=True) == 0
    assert "step-00000006" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optim.lrr=1"], ["optim.lrr", "optim.lr"]),
        (["train.steps=many"], ["train.steps", "integer", "many"]),
        (["train.steps"], ["path=value"]),
        (["recipe=O9"], ["O9", "O2"]),
        (["model.n_heads=3"], ["32", "3"]),
        (["data.path=/does/not/exist"], ["/does/not/exist"]),
        (["data.tokenizer=/does/not/exist.json"], ["/does/not/exist.json"]),
        (["device=cuda:99"], ["cuda:99"]),
        (["model.vocab_size=8"], ["model.vocab_size", "8", "257"]),
        ([f"out={__file__}"], ["out=", f"{__file__} is a file"]),
        ([f"out={__file__}/run"], [f"{__file__} is a file"]),
    ],
)
def test_wrong_setting_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], words: list[str]
) -> None:
    assert train(tmp_path, *settings) == 2
    message = one_sentence(capsys)
    assert all(word in message for word in words)
    assert not (tmp_path / "run").exists()


def test_wrong_preset_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, preset="gpt_125") == 2
    assert "gpt_125m" in one_sentence(capsys)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("empty.txt", b"", "empty"),
        ("binary.txt", bytes(range(256)) * 64, "binary.txt"),
        (
            "short.txt",
            b"one line",
            "short.txt gives 8 tokens of training text and 1 held out, and each side needs the 17",
        ),
    ],
)
def test_unusable_text_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, word: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert train(tmp_path, f"data.path={tmp_path / name}") == 2
    assert word in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


def test_checkpoint_of_another_run_exits_2_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "train.steps=2") == 0
    capsys.readouterr()
    found = checkpoint_folder.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    before = {path.name: path.read_bytes() for path in found.iterdir()}
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for settings, resume in (((), False), (("recipe=bf16",), True), (("model.n_layers=2",), True)):
        assert train(tmp_path, "train.steps=4", *settings, resume=resume) == 2
        one_sentence(capsys)
    assert {path.name: path.read_bytes() for path in found.iterdir()} == before
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("error", [NumericsError("loss is nan"), checkpoint.CheckpointError("disk full")])
def test_failed_run_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(trainer: Trainer) -> None:
        raise error

    monkeypatch.setattr(Trainer, "run", fail)
    assert train(tmp_path) == 1
    assert str(error) in one_sentence(capsys)


def test_too_little_gpu_memory_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trainer: Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmany lines")

    monkeypatch.setattr(Trainer, "run", fail)
    assert train(tmp_path) == 1
    assert "data.micro_batch" in one_sentence(capsys)


def test_a_defect_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: Trainer) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(ValueError, match="a bug"):
        train(tmp_path)


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli", "plan", "gpt_7b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["demo", "--seed", "x"]])
def test_unknown_command_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2 and "usage: octavo" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["--version"])
    assert error.value.code == 0 and capsys.readouterr().out.startswith("octavo ")


# --- the demo


def run_demo(folder: Path, *settings: str, seed: int = 3) -> int:
    assignments = [part for setting in [*small_settings(folder), *settings] for part in ("--set", setting)]
    return cli.main(["demo", "--seed", str(seed), *assignments])


def test_demo_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run_demo(tmp_path, "train.steps=15", "train.micro_batches=1") == 0
    out = capsys.readouterr().out
    lines = {line[:32].strip(): line[32:].split() for line in out.splitlines() if line[:32].strip()}
    assert abs(float(lines["validation loss"][0]) - float(lines["validation loss"][1])) < 0.05
    assert [float(value) for value in lines["bytes/parameter"][:2]] == pytest.approx([16.0, 6.04], abs=0.05)
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / "run" / name).stat().st_size > 10_000
    for recipe in ("bf16", "O2"):
        assert (tmp_path / "run" / recipe / "metrics.jsonl").exists()


def test_demo_can_be_repeated_but_takes_no_other_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["train.steps=6"]
    assert run_demo(tmp_path, *settings) == 0
    assert run_demo(tmp_path, *settings, "data.path=/does/not/exist") == 2
    assert (tmp_path / "run" / "O2" / "metrics.jsonl").exists()  # a mistake costs nothing
    assert run_demo(tmp_path, *settings) == 0
    capsys.readouterr()
    Trainer(small_config(tmp_path, "train.steps=2", f"out={tmp_path}/mine/O2")).run()
    capsys.readouterr()
    assert run_demo(tmp_path, *settings, f"out={tmp_path}/mine") == 2
    assert "mine/O2" in one_sentence(capsys)


def test_demo_refuses_the_baseline_against_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path, "recipe=bf16") == 2
    assert "bf16" in one_sentence(capsys)


def test_demo_takes_another_recipe(tmp_path: Path) -> None:
    trainers = demo.prepare([*small_settings(tmp_path), "recipe=O1"], seed=5)
    assert [trainer.config.recipe.name for trainer in trainers] == ["bf16", "O1"]
    assert {trainer.config.seed for trainer in trainers} == {5}
