"""The folders of checkpoints: which are complete, what their JSON says, and how one appears and goes without ever being half there.

A folder named `step-…` is always complete. What is being written or removed begins with `TEMPORARY`; see `octavo.train.checkpoint`.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.convert.break_even import Left

META = "meta.json"
FOLDER = "checkpoints"
"""The one of all checkpoints, in the folder of a run."""
LEFT = "left"
"""Entry of `META`: shapes (inputs, outputs) of the linear layers that stayed as they are for their speed; none in older checkpoints."""
ENTRIES = {"step": int, "config": dict, "stream": dict, "checksums": dict}
"""What `META` must hold for a run to go on."""
TEMPORARY = ".tmp-"


def name_of(step: int) -> str:
    """Name of the folder that holds the checkpoint of this step."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints under `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for path in folder.glob(TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, path: Path, meta: Mapping[str, Any]) -> None:
    """Make the folder `temporary`, in which all tensors are, the checkpoint at `path`: with `meta` and checksums, and safe on the disk."""
    with open(temporary / META, "w") as file:
        json.dump({**meta, "checksums": checksums(temporary)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(temporary)
    if path.exists():  # The same step, saved again: its bits are the same.
        remove(path)
    os.rename(temporary, path)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint. Renamed first, so that a kill half-way through leaves none that looks complete."""
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint. Raises `ValueError` if it is damaged."""
    try:
        meta = json.loads((path / META).read_text())
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path) from error
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), kind) for key, kind in ENTRIES.items()):
        raise damaged(path)
    return meta


def layers_left(meta: Mapping[str, Any]) -> Left:
    """Which layers the model of a checkpoint has as they were."""
    return Left(frozenset((inputs, outputs) for inputs, outputs in meta.get(LEFT, ())))


def checksums(path: Path) -> dict[str, int]:
    """CRC-32 of each file of a checkpoint but `META`: a flipped bit on a disk is found, at about 3 GB/s."""
    result = {}
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name != META:
            crc = 0
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    crc = zlib.crc32(chunk, crc)
            result[file.name] = crc
    return result


def damaged(path: Path) -> ValueError:
    """The error to raise for a checkpoint that cannot be read."""
    return ValueError(f"{path} is damaged: remove it, and --resume takes the checkpoint before it")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
