"""Checkpoints that resume bitwise and survive a kill at any moment.

A checkpoint is a folder `step-00000100` of `torch.distributed.checkpoint` files and one `meta.json`. Tensors are plain: a scaled
weight is stored as the codes and the scale that it is, because de-quantising and quantising again need not give the same codes
(a fresh scale may be larger), and a resumed run must equal an uninterrupted one bit for bit. The JSON holds the complete config
with the recipe, the versions, the position in the data and the counters.

    write  step-00000100 as  .tmp-step-00000100  ->  fsync files and folder  ->  rename  ->  fsync parent  ->  remove the oldest

Rename is atomic, so a folder named `step-…` is always complete, whenever the process dies; leftovers begin with `.tmp-` and are
removed by the next run. A full disk removes the temporary folder and raises `CheckpointError`; older checkpoints are untouched.
Loading compares the saved config with the one asked for, and each file with its checksum, before it changes anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from octavo.convert.break_even import Left
from octavo.distributed.collectives import CollectiveError
from octavo.distributed.launch import Place
from octavo.linear import FP8Linear, drop_weight_cache
from octavo.linear.module import SCALINGS
from octavo.scaling import DelayedScaling
from octavo.settings import to_dict
from octavo.tensor import ScaledTensor
from octavo.train.config import TrainConfig

META = "meta.json"
FOLDER = "checkpoints"
"""Of a run, below its own."""
LEFT = "left"
"""Entry of `META`: shapes (inputs, outputs) of the linear layers that stayed as they are for their speed; none in older checkpoints."""
ENTRIES = {"step": int, "config": dict, "stream": dict, "checksums": dict}
"""What `META` must hold for a run to go on."""
TEMPORARY = ".tmp-"
FIXED = ("recipe", "model", "data", "seed")
"""Groups of the config that a resumed run may not change: they decide what the tensors and the data position mean."""
FINGERPRINT = "data.fingerprint"
FREE = (
    "recipe.name",
    "model.recompute",
    "model.recompute_layers",
    "model.fused",
    "model.break_even",
    "data.cache",
    "data.path",
)
"""Settings within those groups that change nothing: the text itself is compared by its fingerprint, not its path, and the layers that
stay as they are by those of `LEFT`."""


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""


def plain_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The state of a run as plain tensors, by name; without an optimizer, of the model alone.

    `model/NAME` is a plain parameter or buffer; `model/NAME.codes`, `.scale` and, where there is one, `.residual` are the parts
    of a scaled one; `optim/NAME/KEY` is an entry of the optimizer's state: these share memory with the model and the optimizer.
    `scaling/NAME/KEY` is a copy of the past maxima of a layer with delayed scaling. A tied parameter appears once.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, ScaledTensor):
            for part in ("codes", "scale", "residual"):
                value = getattr(tensor, part)
                if value is not None:
                    tensors[f"model/{name}.{part}"] = value
        else:
            tensors[f"model/{name}"] = tensor.detach()
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for name, parameter in model.named_parameters():
        for key, value in state.get(parameter, {}).items():
            tensors[f"optim/{name}/{key}"] = value
    for name, scaling in _scalings(model).items():
        tensors.update({f"{name}/{key}": value for key, value in scaling.state_dict().items()})
    return tensors


def _scalings(model: nn.Module) -> dict[str, DelayedScaling]:
    layers = {fqn: module for fqn, module in model.named_modules() if isinstance(module, FP8Linear)}
    found = {f"scaling/{fqn}.{name}": getattr(layer, name) for fqn, layer in layers.items() for name in SCALINGS}
    return {name: scaling for name, scaling in found.items() if scaling is not None}


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int,
    place: Place | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder`, keep the newest `keep`, and return its path.

    With several ranks all call it: they share the writing of what they hold alike, and each adds what only it has.
    Raises `CheckpointError`, in one sentence and on all ranks, when the disk is full or cannot be written; nothing else has changed then.
    """
    place = place or Place()
    final = folder / name_of(step)
    temporary = folder / (TEMPORARY + final.name)
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < need:
            raise OSError("No space left on device")
        shutil.rmtree(temporary, ignore_errors=True)

    def publish() -> None:
        with open(temporary / META, "w") as file:
            json.dump({**meta, "checksums": _checksums(temporary)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():  # The same step, saved again: its bits are the same.
            _remove(final)
        os.rename(temporary, final)
        _sync_folder(folder)

    try:
        place.on_first(prepare)
        with _quiet_single_process():
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            dcp.save(dict(tensors), storage_writer=writer, process_group=place.host_group)
        place.on_first(publish)
    except CollectiveError:
        raise  # no fault of the disk
    except (OSError, dcp.CheckpointException) as error:
        if place.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder} ({_reason(error)}): it needs {need / 1e6:,.1f} MB "
            f"and {_free(folder) / 1e6:,.1f} MB are free; the last good one is {latest(folder) or 'none'}"
        ) from error
    if place.is_first:
        for old in checkpoints(folder)[:-keep]:
            _remove(old)
    return final


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Tensor] | None = None
) -> None:
    """Fill model, optimizer state and `extra` from the checkpoint at `path`, in place and without a second copy.

    Without an optimizer, its state stays on the disk. `extra` are tensors that need not be there, such as the random state of a
    device that the run did not have.
    Raises `ValueError`, before anything changes, when a file is damaged or a tensor is missing or has another shape or dtype.
    """
    if read_meta(path)["checksums"] != _checksums(path):
        raise _damaged(path)
    try:
        saved: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except PermissionError:
        raise
    except Exception as error:  # It is a pickle, and a damaged one can raise anything.
        raise _damaged(path) from error
    tensors = plain_tensors(model, optimizer)
    tensors.update({name: tensor for name, tensor in (extra or {}).items() if name in saved})
    parameters = dict(model.named_parameters())
    fresh: list[tuple[nn.Parameter, str, str]] = []
    for key, entry in saved.items() if optimizer is not None else ():
        if (
            key.startswith("optim/") and key not in tensors
        ):  # States appear at the first step, so a new optimizer has none.
            name, _, field = key.removeprefix("optim/").rpartition("/")
            if name in parameters:
                tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=parameters[name].device)
                fresh.append((parameters[name], field, key))
    for key, tensor in tensors.items():
        if key not in saved:
            raise ValueError(f"{path} has no {key}: it was saved from another model or recipe")
        size, dtype = saved[key].size, saved[key].properties.dtype
        if size != tensor.shape or dtype != tensor.dtype:
            raise ValueError(
                f"{path} holds {key} as {tuple(size)} {dtype}, and this run needs {tuple(tensor.shape)} {tensor.dtype}: "
                "it was saved from another model or recipe"
            )
    try:
        with _quiet_single_process():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    except dcp.CheckpointException as error:
        raise _damaged(path) from error
    for parameter, field, key in fresh:
        assert optimizer is not None
        optimizer.state[parameter][field] = tensors[key]
    for name, scaling in _scalings(model).items():
        scaling.load_state_dict({k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")})
    drop_weight_cache(model.parameters())


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint. Raises `ValueError` if it is damaged."""
    try:
        meta = json.loads((path / META).read_text())
    except (FileNotFoundError, ValueError) as error:
        raise _damaged(path) from error
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), kind) for key, kind in ENTRIES.items()):
        raise _damaged(path)
    return meta


def layers_left(meta: Mapping[str, Any]) -> Left:
    """Which layers the model of a checkpoint has as they were."""
    return Left(frozenset((inputs, outputs) for inputs, outputs in meta.get(LEFT, ())))


def _checksums(path: Path) -> dict[str, int]:
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


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged: remove it, and --resume takes the checkpoint before it")


def check_match(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming both values where a setting that a resumed run may not change differs.

    A setting that octavo did not have yet when the run was saved counts as its default.
    """
    now = _flatten(wanted)
    defaults = _flatten(to_dict(TrainConfig()))
    before = {key: defaults[key] for key in now if key in defaults} | _flatten(saved)
    for key in [*now, *(key for key in before if key not in now)]:
        if key.split(".")[0] in FIXED and key not in FREE and before.get(key) != now.get(key):
            if key == FINGERPRINT:
                raise ValueError(
                    f"{path} cannot be resumed: the text (data.path = {now.get('data.path')}) or the file of the tokenizer "
                    f"(data.tokenizer = {now.get('data.tokenizer')}) is not the one that the run was started with; give the "
                    "old one, or another folder (--set out=…) for a new run"
                )
            raise ValueError(
                f"{path} cannot be resumed: it was saved with {key} = {_show(before.get(key))}, and this run has "
                f"{key} = {_show(now.get(key))}; use the saved value, or another folder (--set out=…) for a new run"
            )


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
    """Remove what a killed process left half-written."""
    for path in folder.glob(TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    # Renamed first, so that a kill half-way through the removal leaves no checkpoint that looks complete.
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _reason(error: BaseException) -> str:
    # DCP reports a write that failed half-way through the zip writer's own consistency check, which says nothing to a user.
    if isinstance(error, OSError):
        return error.strerror or str(error)
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    strerrors = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    if not strerrors and not all(isinstance(cause, (OSError, RuntimeError)) for cause in causes):
        raise error  # Not the disk: a defect, to be seen in full.
    return strerrors[0] if strerrors else "a file could not be written in full"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _show(value: object) -> str:
    return "none" if value is None else str(value)


@contextlib.contextmanager
def _quiet_single_process() -> Iterator[None]:
    """Without a process group DCP works and warns that it does; one process is the ordinary case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
