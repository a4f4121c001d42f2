"""A Hugging Face checkpoint on the disk: config.json, safetensors in one file or in shards, tokenizer files.

`Checkpoint.open` reads the config alone; the index of tensors is read, and checked against the files, when it is first asked
for. Values are read a slice at a time through a mapping of the file that is opened for it: pages of a mapped file count as
memory of the process until it is closed, and a model is to be loaded in the memory of its parameters. Weights in FP8 with a
scale (compressed-tensors, one scale a tensor or a row) are de-quantised as they are read. No pickle is ever loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "tf_model.h5")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Everything that a model needs besides its weights."""
CHUNK_BYTES = 8 << 20
"""Bytes of a tensor that are read at once."""
DTYPES = ("F64", "F32", "BF16", "F16")
SCALE = "_scale"
"""Added to the name of a weight in FP8, the name of its scale: real = codes · scale."""


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is."""

    file: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A folder in the layout of `save_pretrained`."""

    path: Path
    config: dict[str, Any]
    """config.json."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """The checkpoint in the folder `path`. Raises `ValueError` if there is none or its config.json is damaged."""
        path = Path(path).expanduser()
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}: give the folder of a Hugging Face checkpoint, or a .gguf file")
        try:
            config = json.loads((path / "config.json").read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{path} has no config.json: give the folder that save_pretrained wrote, or that was downloaded whole"
            ) from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}/config.json is damaged ({error}): copy the checkpoint again") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path}/config.json is no JSON object: copy the checkpoint again")
        return cls(path, config)

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json, if it has one."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    def copy_settings(self, folder: Path) -> None:
        """Copies everything but the weights to `folder`: config, generation settings, tokenizer."""
        for name in SMALL_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name. Raises `ValueError`, naming the file, for pickles and for files that are missing or damaged."""
        found: dict[str, TensorInfo] = {}
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed else [self._single()]:
            with _opened(file) as handle:
                for name in handle.keys():
                    part = handle.get_slice(name)
                    found[name] = TensorInfo(file, part.get_dtype(), tuple(part.get_shape()))
        for name, file in listed.items():
            if name not in found or found[name].file != file:
                raise ValueError(f"{file} does not hold {name}, which {INDEX} promises: copy the checkpoint again")
        return found

    def _listed(self) -> dict[str, Path]:
        """Tensor → file as the index says; empty without one."""
        file = self.path / INDEX
        if not file.is_file():
            return {}
        try:
            listed = {name: self.path / part for name, part in json.loads(file.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error!r}): copy the checkpoint again") from None
        missing = sorted({part.name for part in listed.values() if not part.is_file()})
        if missing:
            raise ValueError(
                f"{self.path} lacks {missing[0]}, which {INDEX} names{_more(missing)}: copy the rest of it"
            )
        return listed

    def _single(self) -> Path:
        files = sorted(self.path.glob("*.safetensors"))
        if self.path / SINGLE in files:
            return self.path / SINGLE
        if len(files) == 1:
            return files[0]
        if files:
            raise ValueError(f"{self.path} has {len(files)} safetensors files and no {INDEX}: copy the index too")
        pickles = [name for name in PICKLES if (self.path / name).exists()]
        if pickles:
            raise ValueError(
                f"{self.path} holds its weights as {pickles[0]} only, and loading that can run code: convert it where you trust it, "
                f"AutoModelForCausalLM.from_pretrained({str(self.path)!r}).save_pretrained(FOLDER), and give FOLDER"
            )
        raise ValueError(f"{self.path} holds no weights: looked for {SINGLE}, {INDEX} and *.safetensors")

    def read(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """The real values of a tensor, some rows after the others, in FP32 or FP64; a 0-d tensor has one row.

        Raises `ValueError`, naming tensor and file, for a dtype that is no weight's and for a file that changed or is damaged.
        """
        info = self.tensors[name]
        scale = self._scale(name, info)
        rows = info.shape[0] if info.shape else 1
        size = max(1, CHUNK_BYTES // (4 * max(1, torch.Size(info.shape[1:]).numel())))
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            with _opened(info.file) as handle:
                values = handle.get_slice(name)[part] if info.shape else handle.get_tensor(name)
            values = values if values.dtype == torch.float64 else values.float()
            if scale is not None:
                values *= scale if scale.numel() == 1 else scale[part]
            yield part, values

    def _scale(self, name: str, info: TensorInfo) -> Tensor | None:
        """The scale of a weight in FP8, [1] or [rows, 1]; None for a plain one."""
        if info.dtype in DTYPES:
            return None
        scale = self.tensors.get(name + SCALE)
        if info.dtype != "F8_E4M3" or scale is None:
            raise ValueError(
                f"{name} in {info.file} is {info.dtype}: weights are {', '.join(DTYPES)}, or F8_E4M3 beside a {name}{SCALE}"
            )
        if scale.shape not in ((), (1,), (1, 1), (info.shape[0], 1)):
            raise ValueError(
                f"{name}{SCALE} in {scale.file} has shape {scale.shape}: only one scale a tensor or a row is known, not blocks"
            )
        with _opened(scale.file) as handle:
            value: Tensor = handle.get_tensor(name + SCALE)
        return value.float()


class _opened:
    """A safetensors file, mapped while inside."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ValueError(
                "checkpoints need the package safetensors: pip install '.[hf]' in octavo's folder"
            ) from None
        self._error = SafetensorError
        try:
            self._handle = safe_open(self._file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{self._file} is damaged ({error}): copy it again") from None
        return self._handle.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._handle.__exit__(kind, error, trace)
        del self._handle
        if isinstance(error, self._error):
            raise ValueError(f"{self._file} is damaged ({error}): copy it again") from None


def _more(names: list[str]) -> str:
    """How many follow the one that a message names."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
