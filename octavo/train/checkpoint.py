"""Checkpoints that resume bitwise and survive a kill at any moment.

A checkpoint is a folder `step-00000100` of `torch.distributed.checkpoint` files and one `meta.json`. Tensors are plain: a scaled
weight is stored as the codes and the scale that it is, because de-quantising and quantising again need not give the same codes
(a fresh scale may be larger), and a resumed run must equal an uninterrupted one bit for bit. The JSON holds the complete config
with the recipe, the versions, the position in the data and the counters.

    write  step-00000100 as  .tmp-step-00000100  ->  fsync files and folder  ->  rename  ->  fsync parent  ->  remove the oldest

Rename is atomic, so a folder named `step-…` is always complete, whenever the process dies; leftovers begin with `.tmp-` and are
removed by the next run. A full disk removes the temporary folder and raises `CheckpointError`; older checkpoints are untouched.
Loading compares each file with its checksum, and each tensor with the shape and dtype that are wanted, before it changes anything.
Which folders there are is `octavo.train.checkpoint_folder`, and what a config may change in between `octavo.train.resume`.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from octavo.distributed.collectives import CollectiveError
from octavo.distributed.launch import Place
from octavo.linear import FP8Linear, drop_weight_cache
from octavo.linear.module import SCALINGS
from octavo.scaling import DelayedScaling
from octavo.tensor import ScaledTensor
from octavo.train.checkpoint_folder import (
    TEMPORARY,
    checkpoints,
    checksums,
    damaged,
    latest,
    name_of,
    publish,
    read_meta,
    remove,
)


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

    try:
        place.on_first(prepare)
        with _quiet_single_process():
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            dcp.save(dict(tensors), storage_writer=writer, process_group=place.host_group)
        place.on_first(lambda: publish(temporary, final, meta))
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
            remove(old)
    return final


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Tensor] | None = None
) -> None:
    """Fill model, optimizer state and `extra` from the checkpoint at `path`, in place and without a second copy.

    Without an optimizer, its state stays on the disk. `extra` are tensors that need not be there, such as the random state of a
    device that the run did not have.
    Raises `ValueError`, before anything changes, when a file is damaged or a tensor is missing or has another shape or dtype.
    """
    if read_meta(path)["checksums"] != checksums(path):
        raise damaged(path)
    saved = _read_index(path)
    tensors = plain_tensors(model, optimizer)
    tensors.update({name: tensor for name, tensor in (extra or {}).items() if name in saved})
    fresh = {} if optimizer is None else _fresh_states(model, saved, tensors)
    tensors.update({key: tensor for key, (_, _, tensor) in fresh.items()})
    _check_shapes(path, saved, tensors)
    try:
        with _quiet_single_process():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    except dcp.CheckpointException as error:
        raise damaged(path) from error
    for parameter, field, tensor in fresh.values():
        assert optimizer is not None
        optimizer.state[parameter][field] = tensor
    for name, scaling in _scalings(model).items():
        scaling.load_state_dict({k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")})
    drop_weight_cache(model.parameters())


def _read_index(path: Path) -> dict[str, Any]:
    """Name → size and dtype of each tensor of the checkpoint."""
    try:
        return dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except PermissionError:
        raise
    except Exception as error:  # It is a pickle, and a damaged one can raise anything.
        raise damaged(path) from error


def _fresh_states(
    model: nn.Module, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """Name → (parameter, key of its state, memory) of optimizer states that were saved and are not among `tensors`.

    A new optimizer has none yet: they appear at its first step.
    """
    parameters = dict(model.named_parameters())
    fresh = {}
    for key, entry in saved.items():
        name, _, field = key.removeprefix("optim/").rpartition("/")
        if key.startswith("optim/") and key not in tensors and name in parameters:
            memory = torch.empty(entry.size, dtype=entry.properties.dtype, device=parameters[name].device)
            fresh[key] = parameters[name], field, memory
    return fresh


def _check_shapes(path: Path, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` if one of `tensors` was not saved, or with another shape or dtype."""
    for key, tensor in tensors.items():
        if key not in saved:
            raise ValueError(f"{path} has no {key}: it was saved from another model or recipe")
        size, dtype = saved[key].size, saved[key].properties.dtype
        if size != tensor.shape or dtype != tensor.dtype:
            raise ValueError(
                f"{path} holds {key} as {tuple(size)} {dtype}, and this run needs {tuple(tensor.shape)} {tensor.dtype}: "
                "it was saved from another model or recipe"
            )


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


@contextlib.contextmanager
def _quiet_single_process() -> Iterator[None]:
    """Without a process group DCP works and warns that it does; one process is the ordinary case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
