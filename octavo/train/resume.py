"""Whether a run can go on from a checkpoint, and which settings it may change then.

What decides the meaning of tensors and of the position in the data has to stay; learning rate, number of steps, logging, device and
place on the disk may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.settings import to_dict
from octavo.train import checkpoint_folder
from octavo.train.config import TrainConfig

FIXED = ("recipe", "model", "data", "seed")
"""Groups of the config that a resumed run may not change: they decide what the tensors and the data position mean."""
FINGERPRINT = "data.fingerprint"
"""No setting but a hash of the tokens, which the trainer saves among them."""
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
stay as they are are those of the checkpoint."""


def meta_to_resume(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of the checkpoint at `path`. Raises `ValueError` if a run of these settings cannot go on from there."""
    meta, steps = checkpoint_folder.read_meta(path), settings["train"]["steps"]
    check_match(path, meta["config"], settings)
    if meta["step"] > steps:
        raise ValueError(f"{path} is past train.steps = {steps}: set it to {meta['step']} or more")
    return meta


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
