"""Runs that stop: 200 steps are 100 and, in a new process, 100 more, bit for bit; signals save, and SIGKILL leaves the last save."""

from __future__ import annotations

import copy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import assert_same_checkpoint, exact_records, newest, read_checkpoint, small_config, small_settings

from octavo.settings import override, to_dict
from octavo.train import checkpoint_folder
from octavo.train.config import TrainConfig
from octavo.train.resume import check_match
from octavo.train.trainer import Trainer


def command(folder: Path, *settings: str, resume: bool = False) -> list[str]:
    """A command line that trains a `small_config` in another process."""
    assignments = [part for setting in [*small_settings(folder), *settings] for part in ("--set", setting)]
    return [sys.executable, "-m", "octavo.cli", "train", "tiny", *assignments, *(["--resume"] if resume else [])]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "O2"])
def test_200_steps_are_100_a_new_process_and_100_more(tmp_path: Path, recipe: str) -> None:
    """Weights, optimizer state, random state and loss log are the same bits, with accumulation."""
    settings = [
        f"recipe={recipe}",
        "train.steps=200",
        "checkpoint.every=100",
        "checkpoint.keep=3",
        "train.eval_every=60",
    ]
    whole = Trainer(small_config(tmp_path, *settings))
    whole.run()
    halves = tmp_path / "halves"
    shutil.copytree(whole.folder / "checkpoints" / "step-00000100", halves / "checkpoints" / "step-00000100")
    shutil.copy(whole.folder / "metrics.jsonl", halves)  # with the records of steps that must be forgotten
    subprocess.run(command(tmp_path, *settings, f"out={halves}", resume=True), check=True, capture_output=True)
    assert_same_checkpoint(whole.folder / "checkpoints" / "step-00000200", halves / "checkpoints" / "step-00000200")
    records = exact_records(whole.folder)
    assert records == exact_records(halves)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 201))


@pytest.mark.parametrize(
    "settings",
    [
        ["recipe=O1"],
        ["recipe=paper"],
        ["recipe=O2", "recipe.scaling=delayed"],
        ["recipe=O2", "model.dialect=llama", "model.tie_embeddings=true"],
    ],
    ids=lambda settings: ",".join(settings),
)
def test_every_kind_of_state_resumes(tmp_path: Path, settings: list[str]) -> None:
    """Also past the 16 steps after which delayed scaling changes its rule, and from a save that is no multiple of anything."""
    settings += ["train.steps=21", "checkpoint.every=9", "checkpoint.keep=3"]
    whole = Trainer(small_config(tmp_path, *settings))
    whole.run()
    parts = small_config(tmp_path, *settings, f"out={tmp_path}/parts")
    shutil.copytree(whole.folder / "checkpoints" / "step-00000009", Path(parts.out) / "checkpoints" / "step-00000009")
    Trainer(parts, resume=True).run()
    assert_same_checkpoint(newest(whole.config), newest(parts))


def test_a_finished_run_can_be_resumed_and_extended(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=4")).run()
    result = Trainer(small_config(tmp_path, "train.steps=4"), resume=True).run()
    assert result.step == 4 and result.val_loss is not None
    result = Trainer(small_config(tmp_path, "train.steps=6"), resume=True).run()
    assert result.step == 6 and newest(small_config(tmp_path)).name == "step-00000006"


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    assert Trainer(small_config(tmp_path, "train.steps=2"), resume=True).run().step == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    settings = ["train.steps=100000", "log.every=1", "checkpoint.every=none"]
    process = subprocess.Popen(command(tmp_path, *settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_records(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"stopped by {number.name}" in out and "Traceback" not in err
    last = max(record["step"] for record in exact_records(tmp_path / "run"))
    trainer = Trainer(small_config(tmp_path, *settings), resume=True)
    assert trainer.step == last


def test_kill_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while every step saves: most of the time goes into saving, so that is where it hits."""
    settings = ["train.steps=100000", "log.every=1", "checkpoint.every=1"]
    process = subprocess.Popen(command(tmp_path, *settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_records(tmp_path / "run" / "metrics.jsonl", process)
    process.kill()
    process.wait()
    config = small_config(tmp_path, *settings)
    for path in checkpoint_folder.checkpoints(Path(config.out) / "checkpoints"):
        assert read_checkpoint(path)
    trainer = Trainer(small_config(tmp_path, f"train.steps={Trainer(config, resume=True).step + 2}"), resume=True)
    trainer.run()
    assert [record["step"] for record in exact_records(trainer.folder) if "loss" in record] == list(
        range(1, trainer.step + 1)
    )
    assert not list((trainer.folder / "checkpoints").glob(".tmp-*"))


def wait_for_records(path: Path, process: subprocess.Popen, count: int = 12) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, "the run ended before it was stopped"
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)


# --- what a resumed run may change


def test_mismatch_names_both_values() -> None:
    saved = {"recipe": {"name": "O2", "exp_avg": "E4M3"}, "model": {"dim": 64}, "seed": 0, "optim": {"lr": 1.0}}
    check_match(Path("p"), saved, {**saved, "optim": {"lr": 2.0}})
    with pytest.raises(ValueError, match="recipe.exp_avg = E4M3.*recipe.exp_avg = FP32"):
        check_match(Path("p"), saved, {**saved, "recipe": {"name": "O1", "exp_avg": "FP32"}})
    with pytest.raises(ValueError, match="model.dim = 64.*model.dim = 32"):
        check_match(Path("p"), saved, {**saved, "model": {"dim": 32}})
    with pytest.raises(ValueError, match="seed = 0.*seed = 1"):
        check_match(Path("p"), saved, {**saved, "seed": 1})


def test_a_setting_that_is_newer_than_the_checkpoint_counts_as_its_default() -> None:
    wanted = to_dict(override(TrainConfig(), ["recipe=paper"]))
    saved = copy.deepcopy(wanted)
    del saved["recipe"]["moments_of"], saved["data"]["documents"]
    with pytest.raises(ValueError, match=r"recipe.moments_of = converted.*recipe.moments_of = matrices"):
        check_match(Path("p"), saved, wanted)
    check_match(Path("p"), saved, {**wanted, "recipe": {**wanted["recipe"], "moments_of": "converted"}})


def test_another_text_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=2")
    Trainer(config).run()
    with open(config.data.path, "a") as text:
        text.write('"one more document"\n')
    with pytest.raises(ValueError, match=f"text .data.path = {config.data.path}.*not the one that the run was started"):
        Trainer(config, resume=True)
