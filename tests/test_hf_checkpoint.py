"""Checkpoints on the disk: what is read is what was saved; what is missing or damaged is named, and no pickle is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import change_tensors, save, tensors_of

from octavo.hf import Checkpoint
from octavo.hf.checkpoint import CHUNK_BYTES, INDEX


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save("llama", folder, torch.bfloat16, shards="60KB")
    return folder


def copy(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved, folder / "copy"))


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return torch.cat([values for _, values in checkpoint.read(name)])


def test_reads_what_was_saved(saved: Path) -> None:
    checkpoint = Checkpoint.open(saved)
    expected = tensors_of(saved)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, info in checkpoint.tensors.items():
        assert info.dtype == "BF16" and info.shape == tuple(expected[name].shape)
        assert torch.equal(read(checkpoint, name), expected[name].float())


def test_large_tensors_come_in_parts(seed: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight = torch.randn(CHUNK_BYTES // 4 // 1000 + 300, 1000)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    parts = list(Checkpoint.open(tmp_path).read("w"))
    assert len(parts) == 2 and torch.equal(torch.cat([values for _, values in parts]), weight)
    assert parts[1][0] == slice(len(parts[0][1]), len(weight))


@pytest.mark.parametrize("rows", [1, 5])
def test_fp8_weights_are_dequantised(rows: int, seed: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    codes, scale = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(rows, 1) + 0.1
    save_file({"w.weight": codes, "w.weight_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(read(Checkpoint.open(tmp_path), "w.weight"), codes.float() * scale)
    save_file({"w.weight": codes, "w.weight_scale": torch.rand(5, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"w.weight_scale.*\(5, 2\).*not blocks"):
        read(Checkpoint.open(tmp_path), "w.weight")


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no config.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="config.json is damaged"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="config.json is damaged"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        Checkpoint.open(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        _ = Checkpoint.open(tmp_path).tensors


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (tmp_path.joinpath("exploded").touch, ())

    (tmp_path / "config.json").write_text("{}")
    torch.save({"w": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin only.*run code.*save_pretrained"):
        _ = Checkpoint.open(tmp_path).tensors
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("cut", ["tail", "header", "empty"])
def test_damaged_files_are_named(cut: str, saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    file = sorted(folder.glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes({"tail": content[:-10], "header": b"\xff" * 8 + content[8:], "empty": b""}[cut])
    with pytest.raises(ValueError, match=f"{file.name} is damaged.*copy it again"):
        _ = Checkpoint.open(folder).tensors


def test_shards_and_their_index_must_agree(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    first = sorted(folder.glob("*.safetensors"))[0]
    shutil.move(first, tmp_path / "aside")
    with pytest.raises(ValueError, match=f"lacks {first.name}"):
        _ = Checkpoint.open(folder).tensors
    shutil.move(tmp_path / "aside", first)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.imagined.weight"] = first.name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"does not hold model.imagined.weight"):
        _ = Checkpoint.open(folder).tensors
    (folder / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match=f"{INDEX} is damaged"):
        _ = Checkpoint.open(folder).tensors
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=f"safetensors files and no {INDEX}"):
        _ = Checkpoint.open(folder).tensors


def test_settings_are_copied_without_weights(saved: Path, tmp_path: Path) -> None:
    Checkpoint.open(saved).copy_settings(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json"}
    assert Checkpoint.open(tmp_path).config == Checkpoint.open(saved).config
    assert Checkpoint.open(saved).tokenizer is None


def test_tensors_of_one_file_need_no_index(tmp_path: Path) -> None:
    save("llama", tmp_path)
    change_tensors(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.float64))
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert read(Checkpoint.open(tmp_path), "model.norm.weight").dtype == torch.float64
