"""The trainer on several ranks: the same run as on one, resumed bit for bit, on any number of ranks, and after a rank was killed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from training import assert_same_checkpoint, exact_records, free_port, launch, newest, small_config, small_settings

from octavo.distributed.collectives import CollectiveError
from octavo.formats import NumericsError
from octavo.train.config import TrainConfig
from octavo.train.metrics import read_metrics
from octavo.train.trainer import Trainer


def configure(folder: Path, *assignments: str) -> TrainConfig:
    return small_config(folder, "train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", *assignments)


def train(config: TrainConfig, resume: bool = False) -> tuple[int, float | None]:
    result = Trainer(config, resume=resume).run()
    return result.step, result.val_loss


def copy_run(source: TrainConfig, target: TrainConfig, step: int) -> None:
    """The run as it was when the checkpoint of `step` was its newest."""
    shutil.copytree(source.out, target.out)
    for path in (Path(target.out) / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


@pytest.mark.parametrize(
    "settings",
    [(), ("recipe=O1", "recipe.grad_reduce=nccl"), ("recipe.scaling=delayed",), ("recipe=bf16",)],
    ids=["O2", "O1-nccl", "delayed", "bf16"],
)
def test_F1_resume_on_the_same_ranks_is_bitwise(settings, tmp_path):
    whole = configure(tmp_path, *settings)
    ranks.run(2, train, whole)
    halves = configure(tmp_path, *settings, f"out={tmp_path}/halves")
    copy_run(whole, halves, 4)
    ranks.run(2, train, halves, True)
    assert_same_checkpoint(newest(whole), newest(halves))
    assert exact_records(Path(whole.out)) == exact_records(Path(halves.out))


def test_C8_resume_on_another_number_of_ranks(tmp_path):
    two = configure(tmp_path, "train.eval_every=4")
    ranks.run(2, train, two)
    for world in (1, 4):
        other = configure(tmp_path, "train.eval_every=4", f"out={tmp_path}/on{world}")
        copy_run(two, other, 4)
        if world == 1:
            train(other, resume=True)
        else:
            ranks.run(world, train, other, True)
        tokens = [record["tokens"] for record in read_metrics(Path(other.out) / "metrics.jsonl") if "tokens" in record]
        step = two.tokens_per_step
        assert tokens == [2 * step * i for i in (1, 2, 3, 4)] + [8 * step + world * step * i for i in (1, 2, 3, 4)]
        losses = [r["loss"] for r in read_metrics(Path(other.out) / "metrics.jsonl") if "loss" in r]
        assert all(torch.tensor(losses[4:]) < losses[0])


@pytest.mark.parametrize("recipe", ["O2", "O1"])
def test_ranks_times_micro_batches_is_one_rank_with_all_of_them(recipe, tmp_path):
    """The same windows of text in each step, so the same run within FP8 error."""
    settings = [f"recipe={recipe}", "train.steps=12", "optim.lr=3e-3"]
    one = configure(tmp_path, *settings, "train.micro_batches=4", f"out={tmp_path}/one")
    train(one)
    curves = {1: exact_records(Path(one.out))}
    for world, micro_batches in ((2, 2), (4, 1)):
        config = configure(tmp_path, *settings, f"train.micro_batches={micro_batches}", f"out={tmp_path}/{world}")
        ranks.run(world, train, config)
        curves[world] = exact_records(Path(config.out))
    for world in (2, 4):
        for key, close in (("loss", 0.005), ("grad_norm", 0.05)):
            found, wanted = ([r[key] for r in curves[w] if key in r] for w in (world, 1))
            assert len(found) == 12
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=close, atol=0)
        assert [r["tokens"] for r in curves[world] if "tokens" in r] == [
            r["tokens"] for r in curves[1] if "tokens" in r
        ]


def printed(config: TrainConfig) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        Trainer(config).run()
    return text.getvalue()


def test_metrics_show_bytes_and_mu(tmp_path):
    config = configure(tmp_path, "recipe.grad_reduce=nccl")
    first, second = ranks.run(2, printed, config)
    assert "MB sent a step" in first and "validation loss" in first and second == ""
    record = [r for r in read_metrics(Path(config.out) / "metrics.jsonl") if "wire" in r][-1]
    assert set(record["wire"]) == {"parameters", "gradients", "scales"}
    assert record["reduction"]["ffn.up.weight"].keys() == {"mu", "saturated", "floor_steps"}
    assert json.loads((Path(config.out) / "run.json").read_text())["ranks"] == 2


@pytest.mark.parametrize("algorithm", ["nccl", "two_shot"])
def test_metrics_show_what_the_reduction_of_each_gradient_lost(algorithm, tmp_path):
    config = configure(tmp_path, f"recipe.grad_reduce={algorithm}", "log.stats_every=4", "log.every=4", "train.steps=4")
    ranks.run(2, printed, config)
    (record,) = [r for r in read_metrics(Path(config.out) / "metrics.jsonl") if "gradients" in r]
    assert len(record["gradients"]) == 4 and record["wire"]["samples"] > 0
    for entry in record["gradients"].values():
        assert entry["scale"] > 0 and math.log2(entry["mu"]) <= 0
        assert 20 < entry["snr_db"] < 45
        assert 0 <= entry["underflow"] < 0.2 and 0 <= entry["overflow"] <= (0.01 if algorithm == "nccl" else 0)


def stops_by_a_signal_to_one(config: TrainConfig) -> tuple[int, str | None]:
    trainer = Trainer(config)
    step = trainer._train_step

    def counted() -> None:
        step()
        if trainer.step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._train_step = counted
    result = trainer.run()
    return result.step, result.stopped_by


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    config = configure(tmp_path)
    results = ranks.run(2, stops_by_a_signal_to_one, config)
    assert {step for step, _ in results} == {4} and newest(config).name == "step-00000004"
    assert sorted(by for _, by in results) == ["SIGTERM", "a signal to another rank"]
    whole = configure(tmp_path, f"out={tmp_path}/whole")
    ranks.run(2, train, whole)
    ranks.run(2, train, config, True)
    assert_same_checkpoint(newest(whole), newest(config))


def has_bad_data_on_one(config: TrainConfig) -> str:
    trainer = Trainer(config)
    if dist.get_rank() == 1:
        parallel = trainer.parallel.forward
        trainer.parallel.forward = lambda *args: parallel(*args) * float("nan")
    with pytest.raises(NumericsError, match="had a non-finite gradient") as caught:
        trainer.run()
    return str(caught.value)


def test_A8_bad_data_on_one_rank_ends_the_run_on_all(tmp_path):
    first, second = ranks.run(2, has_bad_data_on_one, configure(tmp_path, "optim.max_skipped=3"))
    assert first == second


def cannot_write(config: TrainConfig) -> str:
    trainer = Trainer(config)
    if dist.get_rank() == 0:
        (trainer.folder / "checkpoints").parent.mkdir(parents=True, exist_ok=True)
        (trainer.folder / "checkpoints").write_text("in the way")
    with pytest.raises(OSError, match="could not be written") as caught:
        trainer.run()
    assert not isinstance(caught.value, CollectiveError)
    return type(caught.value).__name__


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all(tmp_path):
    assert ranks.run(2, cannot_write, configure(tmp_path, "checkpoint.every=none")) == ["CheckpointError"] * 2


def test_a_killed_rank_ends_the_others_and_torchrun_resumes_bitwise(tmp_path):
    settings = [
        *small_settings(tmp_path),
        "train.steps=400",
        "checkpoint.every=4",
        "checkpoint.keep=200",
        "train.timeout=60",
    ]
    processes = [launch(settings, rank, port) for port in [free_port()] for rank in range(2)]
    checkpoints = tmp_path / "run" / "checkpoints"
    end = time.monotonic() + 120
    while not list(checkpoints.glob("step-*")):
        assert time.monotonic() < end and all(p.poll() is None for p in processes), [
            p.stderr.read() for p in processes if p.poll()
        ]
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    output, errors = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1, errors
    assert "another rank died" in errors and "last checkpoint" in errors and "Traceback" not in errors
    processes[1].communicate()
    last = newest(small_config(tmp_path))
    step = int(last.name.removeprefix("step-")) + 4
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "octavo.cli",
        "train",
        "tiny",
        "--resume",
    ]
    for setting in [*settings, "checkpoint.every=4"]:
        command += ["--set", setting]
    # The learning rate depends on the number of steps, so the run goes on as it was and is stopped once the next checkpoint is there.
    relaunched = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    following = checkpoints / f"step-{step:08d}"
    end = time.monotonic() + 120
    while not following.exists():
        assert time.monotonic() < end and relaunched.poll() is None, relaunched.communicate()[0]
        time.sleep(0.02)
    relaunched.send_signal(signal.SIGTERM)
    relaunched.communicate(timeout=60)
    whole = small_config(tmp_path, *settings[len(small_settings(tmp_path)) :], f"out={tmp_path}/whole")
    ranks.run(2, train_until, whole, step)
    assert_same_checkpoint(Path(whole.out) / "checkpoints" / following.name, following)


def train_until(config: TrainConfig, step: int) -> None:
    trainer = Trainer(config)
    once = trainer._train_step

    def counted() -> None:
        once()
        if trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._train_step = counted
    assert trainer.run().step == step
