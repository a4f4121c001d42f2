"""GGUF files, read through transformers (which needs the packages gguf and accelerate) and saved as safetensors.

The weights are de-quantised to FP32, in which the values of all GGUF formats are exact, and the tokenizer is rebuilt from the
file's own tables. From there on the folder is a checkpoint like any other.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from octavo.data.files import file_digest
from octavo.hf.load import _first_line, libraries

MAGIC = b"GGUF"


def convert_gguf(path: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> Path:
    """Saves the GGUF file `path` as a Hugging Face checkpoint in `folder`, weights in `dtype`, and returns the folder.

    Raises `ValueError` if the file is no GGUF or of an architecture that transformers cannot read, or if `folder` is not empty.
    """
    path, folder = Path(path).expanduser(), Path(folder).expanduser()
    _check(path)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder")
    library = libraries().transformers
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True) as made:
        try:
            _save(library, path, Path(made), dtype)
        except ImportError as error:
            raise ValueError(
                f"{path} needs the packages gguf and accelerate: pip install '.[hf]' in octavo's folder ({error})"
            ) from None
        except (ValueError, RuntimeError, OSError, KeyError, NotImplementedError) as error:
            raise ValueError(f"{path} cannot be read by transformers: {_first_line(error)}") from None
        if folder.exists():
            folder.rmdir()
        shutil.copytree(made, folder)
    return folder


def cached_conversion(path: Path, cache: Path) -> Path:
    """The folder under `cache` that holds the GGUF file `path` as a checkpoint, converted now if it is not there."""
    _check(path)
    folder = cache / f"gguf-{file_digest(path, 'blake2b')[:16]}"
    return folder if (folder / "config.json").is_file() else convert_gguf(path, folder)


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a .gguf file") from None
    if magic != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")


def _save(library: Any, path: Path, folder: Path, dtype: torch.dtype) -> None:
    where = {"gguf_file": path.name, "local_files_only": True}
    model = library.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the one that was read remembers that it was quantised, and saves itself as such.
    fresh = type(model)(config).to(dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.save_pretrained(folder)
    library.AutoTokenizer.from_pretrained(path.parent, **where).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
