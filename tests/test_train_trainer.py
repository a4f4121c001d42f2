"""The loop: skipped steps, full disks, what is recorded, and everything that a user can get wrong seen before it costs something."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from training import assert_same_checkpoint, exact_records, newest, read_checkpoint, small_config, write_text

from octavo.formats import NumericsError
from octavo.settings import to_dict
from octavo.train import checkpoint, checkpoint_folder
from octavo.train.metrics import read_metrics
from octavo.train.trainer import Trainer

# --- numerics


def poison(trainer: Trainer, steps: set[int]) -> None:
    """One NaN in an activation of the first micro-batch of these steps."""
    calls = {}

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        first = calls.setdefault(trainer.step, True)
        calls[trainer.step] = False
        if trainer.step not in steps or not first or not module.training:
            return output
        noise = torch.zeros_like(output)
        noise[0, 0, 0] = math.nan
        return output + noise

    trainer.model.norm.register_forward_hook(hook)


@pytest.mark.parametrize("recipe", ["bf16", "O1", "O2"])
def test_a_nan_skips_the_step_and_is_counted(tmp_path: Path, recipe: str) -> None:
    trainer = Trainer(
        small_config(tmp_path, f"recipe={recipe}", "train.steps=6", "checkpoint.every=1", "checkpoint.keep=9")
    )
    poison(trainer, {3, 5})
    trainer.run()
    losses = [record for record in read_metrics(trainer.folder / "metrics.jsonl") if "loss" in record]
    assert [record["skipped"] for record in losses] == [0, 0, 1, 1, 2, 2]
    assert [record["loss"] is None for record in losses] == [False, False, True, False, True, False]
    saved = [read_checkpoint(path) for path in checkpoint_folder.checkpoints(trainer.folder / "checkpoints")]
    assert all(torch.equal(saved[1][name], saved[2][name]) for name in saved[1])  # step 3 changed nothing
    assert any(not torch.equal(saved[2][name], saved[3][name]) for name in saved[2])


def test_too_many_skipped_steps_stop_the_run_with_the_reason(tmp_path: Path) -> None:
    trainer = Trainer(
        small_config(tmp_path, "train.steps=50", "checkpoint.every=3", "optim.max_skipped=4", "log.every=2")
    )
    poison(trainer, {5, *range(7, 50)})
    with pytest.raises(NumericsError) as error:
        trainer.run()
    message = str(error.value)
    assert "steps 7 to 10" in message and "loss nan" in message and "step-0000000" in message
    assert trainer.step <= 12
    again = Trainer(small_config(tmp_path, "train.steps=12", "optim.max_skipped=4"), resume=True)
    assert again.run().step == 12


def test_skipped_steps_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    trainer = Trainer(small_config(tmp_path, "train.steps=5", "optim.max_skipped=4"))
    poison(trainer, {4, 5})
    trainer.run()
    again = Trainer(small_config(tmp_path, "train.steps=9", "optim.max_skipped=4"), resume=True)
    poison(again, set(range(6, 10)))
    with pytest.raises(NumericsError, match="steps 4 to 7"):
        again.run()


# --- a full disk


def test_training_goes_on_when_a_checkpoint_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(small_config(tmp_path, "train.steps=6", "checkpoint.every=2", "checkpoint.keep=2"))
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0 if trainer.step == 4 else 10**12))
    assert trainer.run().step == 6
    assert "checkpoint of step 4 could not be written" in capsys.readouterr().out
    assert [path.name for path in checkpoint_folder.checkpoints(trainer.folder / "checkpoints")] == [
        "step-00000002",
        "step-00000006",
    ]


def test_last_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_config(tmp_path, "train.steps=4", "checkpoint.every=2"))
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0 if trainer.step == 4 else 10**12))
    with pytest.raises(checkpoint.CheckpointError, match="step-00000002"):
        trainer.run()


# --- what a run records


def test_records_and_run_file_are_complete(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=6", "log.every=2", "log.stats_every=4", "train.eval_every=3")
    result = Trainer(config).run()
    records = read_metrics(Path(config.out) / "metrics.jsonl")
    machine = [record for record in records if "tokens_per_s" in record]
    assert [record["step"] for record in machine] == [2, 4, 6]
    assert machine[0]["tflops"] > 0 and "mfu_bf16" not in machine[0]
    assert machine[0]["memory"]["weights"] > 0 and machine[0]["memory"]["gradients"] > 0
    assert "casts" in machine[1] and "casts" not in machine[0]
    assert {key.rsplit("/", 1)[1] for key in machine[1]["casts"]} == {"input", "weight", "grad_output", "grad"}
    assert [record["step"] for record in records if "val_loss" in record] == [3, 6]
    info = json.loads((Path(config.out) / "run.json").read_text())
    assert {**info["config"], "data": {**info["config"]["data"], "fingerprint": None}} == {
        **to_dict(config),
        "data": {**to_dict(config)["data"], "fingerprint": None},
    }
    assert info["versions"]["torch"] == torch.__version__
    assert checkpoint_folder.read_meta(newest(config))["config"] == info["config"]
    assert result.memory is not None and result.memory.converted > 0


def test_loss_falls(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=60", "optim.lr=1e-2", "log.stats_every=none")
    result = Trainer(config).run()
    first = read_metrics(Path(config.out) / "metrics.jsonl")[0]["loss"]
    assert result.train_loss < 0.7 * first and result.val_loss is not None and result.val_loss < 0.7 * first


def test_accumulation_is_one_large_batch(tmp_path: Path) -> None:
    """4 micro-batches of 2 sequences are the loss and gradient of one micro-batch of 8: the loss is divided."""
    records = []
    for micro_batch, count in ((8, 1), (2, 4)):
        settings = [
            f"data.micro_batch={micro_batch}",
            f"train.micro_batches={count}",
            "model.dtype=fp32",
            "recipe=bf16",
        ]
        config = small_config(tmp_path, *settings, "train.steps=3", f"out={tmp_path}/{count}")
        Trainer(config).run()
        records.append([record for record in read_metrics(Path(config.out) / "metrics.jsonl") if "loss" in record])
    for one, other in zip(*records, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_same_seed_same_run_and_another_seed_another(tmp_path: Path) -> None:
    runs = [
        small_config(tmp_path, "train.steps=3", f"seed={seed}", f"out={tmp_path}/{i}")
        for i, seed in enumerate((1, 1, 2))
    ]
    for run in runs:
        Trainer(run).run()
    assert_same_checkpoint(newest(runs[0]), newest(runs[1]))
    assert exact_records(Path(runs[0].out)) != exact_records(Path(runs[2].out))


def test_data_and_weights_do_not_depend_on_the_recipe(tmp_path: Path) -> None:
    trainers = [
        Trainer(small_config(tmp_path, f"recipe={recipe}", f"out={tmp_path}/{recipe}")) for recipe in ("bf16", "O2")
    ]
    weights = [trainer.model.state_dict() for trainer in trainers]
    for name in weights[0]:  # O2 stores FP16 with a scale
        assert torch.allclose(weights[0][name], weights[1][name], rtol=2**-11, atol=1e-6)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(*(trainer.data.next_batch() for trainer in trainers), strict=True))


def test_validation_changes_nothing(tmp_path: Path) -> None:
    """E1: with and without validation the run is the same, bit for bit."""
    runs = [
        small_config(tmp_path, "train.steps=5", f"train.eval_every={n}", f"out={tmp_path}/{n}") for n in ("none", "1")
    ]
    for run in runs:
        Trainer(run).run()
    assert_same_checkpoint(newest(runs[0]), newest(runs[1]))


def test_compile_option_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are compiled, and a step that counts casts runs in between; the backend does not matter here, so none is built."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend="aot_eager", **options))
    config = small_config(tmp_path, "train.steps=5", "train.compile=true", "log.stats_every=2")
    result = Trainer(config).run()
    plain = Trainer(small_config(tmp_path, "train.steps=5", f"out={tmp_path}/plain")).run()
    assert result.train_loss == pytest.approx(plain.train_loss, rel=1e-2)


def test_deterministic_is_restored(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=1", "train.deterministic=true")
    Trainer(config).run()
    assert not torch.are_deterministic_algorithms_enabled()


def test_no_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(small_config(tmp_path, "train.steps=3", "checkpoint.every=1")).run()


# --- what a user can get wrong


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=2")
    Trainer(config).run()
    with pytest.raises(ValueError, match="--resume"):
        Trainer(config)
    assert read_checkpoint(newest(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("recipe=O1", ["recipe.master", "FP16", "none"]),
        ("model.dim=64", ["model.dim", "32", "64"]),
        ("seed=1", ["seed", "0", "1"]),
        ("data.seq_len=32", ["data.seq_len", "16", "32"]),
        ("data.path={folder}/other.jsonl", ["other.jsonl", "not the one that the run was started with"]),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path: Path, change: str, words: list[str]) -> None:
    config = small_config(tmp_path, "train.steps=2")
    Trainer(config).run()
    write_text(tmp_path / "other.jsonl", documents=100)
    with pytest.raises(ValueError) as error:
        Trainer(small_config(tmp_path, "train.steps=4", change.format(folder=tmp_path)), resume=True)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_the_same_text_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=2")).run()
    write_text(tmp_path / "copy.jsonl")
    assert Trainer(small_config(tmp_path, "train.steps=3", f"data.path={tmp_path}/copy.jsonl"), resume=True).step == 2


def test_a_checkpoint_past_the_last_step_is_refused(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=4")).run()
    with pytest.raises(ValueError, match="past train.steps = 3: set it to 4 or more"):
        Trainer(small_config(tmp_path, "train.steps=3"), resume=True)


def test_replace_removes_nothing_before_the_run_begins(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=4")
    Trainer(config).run()
    trainer = Trainer(small_config(tmp_path, "train.steps=2"), replace=True)
    assert newest(config).name == "step-00000004"
    trainer.run()
    assert newest(config).name == "step-00000002"


def test_absent_device_is_refused(tmp_path: Path) -> None:
    for name in ("cuda:99", "tpu"):
        with pytest.raises(ValueError, match=f"device={name}"):
            Trainer(small_config(tmp_path, f"device={name}"))
