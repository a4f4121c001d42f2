"""A checkpoint is complete or absent, holds plain tensors, and is only loaded into the run that it belongs to."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from training import assert_same_checkpoint, newest, read_checkpoint, small_config

from octavo.train import checkpoint, checkpoint_folder
from octavo.train.checkpoint import CheckpointError, plain_tensors, save
from octavo.train.checkpoint_folder import latest, read_meta
from octavo.train.trainer import Trainer


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes, as on a disk that has just so much room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "model/w.codes": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "model/w.scale": torch.tensor(2.0),
        "e": torch.empty(0),
    }


def some_meta(step: int) -> dict[str, Any]:
    return {"step": step, "config": {"seed": 0}, "stream": {"position": 0}}


def test_round_trip_is_exact(tmp_path: Path, seed: int) -> None:
    tensors, meta = some_tensors(), some_meta(7)
    path = save(tmp_path, 7, tensors, meta, keep=1)
    saved_meta = read_meta(path)
    assert path.name == "step-00000007" and {**meta, "checksums": saved_meta["checksums"]} == saved_meta
    saved = read_checkpoint(path)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name].reshape(-1).view(torch.uint8)) for name in tensors)


def test_only_plain_tensors_are_stored(tmp_path: Path) -> None:
    """F15: codes and scales, no class of ours, so that any loader can read them."""
    trainer = Trainer(small_config(tmp_path, "train.steps=2"))
    trainer.run()
    tensors = plain_tensors(trainer.model, trainer.optimizer)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    assert tensors["model/blocks.0.ffn.up.weight.codes"].dtype == torch.float16
    assert tensors["optim/blocks.0.ffn.up.weight/exp_avg"].dtype == torch.float8_e4m3fn
    saved = dcp.FileSystemReader(latest(tmp_path / "run" / "checkpoints")).read_metadata().state_dict_metadata
    assert all(isinstance(entry, dcp.metadata.TensorStorageMetadata) for entry in saved.values())


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, some_tensors(), {"step": step}, keep=2)
    assert [path.name for path in checkpoint_folder.checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("room", [0, 300, 5000])
def test_full_disk_leaves_the_last_good_one(tmp_path: Path, room: int) -> None:
    """Whether the first or a later file is the one that does not fit."""
    good = save(tmp_path, 1, some_tensors(), some_meta(1), keep=1)
    before = read_checkpoint(good)
    with largest_file(room), pytest.raises(CheckpointError) as error:
        save(tmp_path, 2, {"big": torch.zeros(10_000), **some_tensors()}, some_meta(2), keep=1)
    message = str(error.value)
    assert "\n" not in message and "step 2" in message and "MB" in message and str(good) in message
    assert os.listdir(tmp_path) == [good.name]
    after = read_checkpoint(good)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 1, some_tensors(), some_meta(1), keep=1)
    assert os.listdir(tmp_path) == []


def test_a_defect_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises((dcp.CheckpointException, TypeError)):
        save(tmp_path, 1, some_tensors(), {"step": object()}, keep=1)
    assert latest(tmp_path) is None


class Killed(BaseException):
    """Not an `Exception`: nothing may catch it, as nothing catches SIGKILL."""


@pytest.mark.parametrize(("module", "name"), [(dcp, "save"), (json, "dump"), (os, "rename"), (shutil, "rmtree")])
@pytest.mark.parametrize("survivors", [0, 1])
def test_death_at_any_moment_leaves_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, survivors: int
) -> None:
    """A save dies in each of its calls in turn; what is called a checkpoint afterwards is whole."""
    real, calls = getattr(module, name), []

    def die(*arguments: Any, **keywords: Any) -> Any:
        ours = name != "rename" or "step-" in Path(arguments[1]).name  # DCP renames files of its own
        if ours:
            calls.append(arguments)
        if ours and len(calls) > survivors:
            raise Killed
        return real(*arguments, **keywords)

    save(tmp_path, 1, some_tensors(), some_meta(1), keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with contextlib.suppress(Killed):
            save(tmp_path, 2, some_tensors(), some_meta(2), keep=1)
    found = checkpoint_folder.checkpoints(tmp_path)
    assert found
    for path in found:
        assert read_checkpoint(path) and read_meta(path)
    checkpoint_folder.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in found}


def test_load_is_in_place_and_exact(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=4")
    Trainer(config).run()
    found = latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    trainer = Trainer(small_config(tmp_path, "train.steps=4", f"out={tmp_path}/other"))
    before = {name: tensor.data_ptr() for name, tensor in plain_tensors(trainer.model, trainer.optimizer).items()}
    checkpoint.load(found, trainer.model, trainer.optimizer)
    after = plain_tensors(trainer.model, trainer.optimizer)
    assert all(after[name].data_ptr() == pointer for name, pointer in before.items())
    again = save(tmp_path / "again", 4, {**after, "random/cpu": torch.get_rng_state()}, {}, keep=1)
    first, second = read_checkpoint(found), read_checkpoint(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first if name != "random/cpu")


def test_load_refuses_another_model_before_it_changes_anything(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=2")).run()
    found = latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    for change, word in (("model.n_layers=2", "blocks.1"), ("model.ffn_dim=64", "ffn"), ("recipe=bf16", "weight")):
        trainer = Trainer(small_config(tmp_path, change, f"out={tmp_path}/other"))
        tensors = plain_tensors(trainer.model, trainer.optimizer)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with pytest.raises(ValueError, match=word):
            checkpoint.load(found, trainer.model, trainer.optimizer)
        assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
        assert not trainer.optimizer.state


def test_random_state_of_an_absent_device_is_not_needed(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=2")).run()
    trainer = Trainer(small_config(tmp_path, f"out={tmp_path}/other"))
    state = torch.full((8,), 7, dtype=torch.uint8)
    checkpoint.load(newest(small_config(tmp_path)), trainer.model, trainer.optimizer, {"random/cuda": state})
    assert state.eq(7).all()


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    Trainer(small_config(tmp_path, "train.steps=2")).run()
    found = newest(small_config(tmp_path))
    (data,) = found.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[torch.randint(len(content), ()).item()] ^= 1  # anywhere, a weight or a moment included
    for damaged in (content, content[:100]):
        data.write_bytes(damaged)
        with pytest.raises(ValueError, match="step-00000002 is damaged"):
            Trainer(small_config(tmp_path, "train.steps=4"), resume=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("meta.json", b"{}"),
        ("meta.json", b"xx"),
        ("meta.json", b"\xff"),
        ("meta.json", None),
        (".metadata", b""),
        (".metadata", b"xx"),
        (".metadata", None),
        ("*", None),
    ],
)
def test_damage_to_any_file_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    Trainer(small_config(tmp_path, "train.steps=2")).run()
    for path in newest(small_config(tmp_path)).glob(name):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        ValueError, match="step-00000002 is damaged: remove it, and --resume takes the checkpoint before"
    ):
        Trainer(small_config(tmp_path, "train.steps=4"), resume=True)


def test_size_does_not_grow_with_steps(tmp_path: Path) -> None:
    """F14: the state is of constant size."""
    sizes = []
    for steps in (2, 12):
        Trainer(
            small_config(tmp_path, f"train.steps={steps}", f"out={tmp_path}/{steps}", "recipe.scaling=delayed")
        ).run()
        found = latest(tmp_path / str(steps) / "checkpoints")
        assert found is not None
        sizes.append({name: tensor.numel() for name, tensor in read_checkpoint(found).items()})
    assert sizes[0] == sizes[1]


def test_same_step_saved_twice_is_replaced(tmp_path: Path) -> None:
    tensors = some_tensors()
    first = save(tmp_path / "a", 3, tensors, {"step": 3}, keep=2)
    save(tmp_path / "b", 3, tensors, {"step": 3}, keep=2)
    second = save(tmp_path / "b", 3, tensors, {"step": 3}, keep=2)
    assert_same_checkpoint(first, second)
    assert os.listdir(tmp_path / "b") == [second.name]
