"""Results on the disk: `NAME.json`, which a person reads, and `NAME.items.jsonl`, one line for each item of each measurement.

The JSON names everything that a number depends on: model folder with the SHA-256 of its files, recipe, dtype, settings, versions,
and for each measurement its data with a checksum. Comparing needs these two files and no model. A file appears complete or
not at all; the JSON holds the checksum of the items, so that a pair that does not belong together is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from octavo.data.files import write_whole

LAYOUT = "octavo-eval-1"
Item = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """One task, text or source of a corpus."""

    name: str
    """Of the task, `text`, or `corpus/` and the source."""
    kind: Literal["task", "loss"]
    metrics: dict[str, float | None]
    """Of a task: acc, acc_norm where the harness has it, each with `_stderr`, and perplexity of LAMBADA; of a loss: see
    `octavo.evaluate.perplexity`. None is a number that does not exist, such as the standard error of one item."""
    data: dict[str, Any]
    """Where the items come from: path, checksum, how many, and a note."""
    items: list[Item] = field(repr=False)
    """Of a task: acc, acc_norm, log-probabilities and greediness of the answers; of a loss: nats and tokens of each window."""


@dataclass(frozen=True)
class Results:
    """Of one model in one recipe."""

    label: str
    model: dict[str, Any]
    recipe: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    measurements: list[Measurement]
    missing: dict[str, str]
    """Tasks, and sources of a corpus (`corpus/NAME`), that were asked for and not evaluated → why."""

    def find(self, name: str) -> Measurement | None:
        """The measurement of that name, or None."""
        return next((measurement for measurement in self.measurements if measurement.name == name), None)

    def write(self, folder: Path) -> Path:
        """Write both files, and return the path of the JSON. Raises `OSError` naming the folder if it cannot be written."""
        items = "".join(
            json.dumps({"measurement": measurement.name, **item}, allow_nan=False) + "\n"
            for measurement in self.measurements
            for item in measurement.items
        ).encode()
        listing = folder / f"{self.label}.items.jsonl"
        content = {"layout": LAYOUT, **{f.name: getattr(self, f.name) for f in fields(self)}}
        content["measurements"] = [_without_items(measurement) for measurement in self.measurements]
        content["items"] = {"file": listing.name, "sha256": hashlib.sha256(items).hexdigest()}
        path = folder / f"{self.label}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(listing, items)
            write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(
                f"the results cannot be written to {folder} ({error.strerror or error}): choose another folder with --out"
            ) from error
        return path

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """The results at `path`, of the JSON. Raises `ValueError` naming the file if it or its items are missing or damaged."""
        path = Path(path).expanduser()
        content = _load(path)
        if not isinstance(content, dict) or content.get("layout") != LAYOUT:
            raise ValueError(f"{path} holds no results of octavo eval: give a file that it wrote")
        try:
            listing = path.parent / content["items"]["file"]
            items = _read_items(listing, content["items"]["sha256"])
            measurements = [
                Measurement(
                    name=entry["name"],
                    kind=entry["kind"],
                    metrics=entry["metrics"],
                    data=entry["data"],
                    items=items.pop(entry["name"], []),
                )
                for entry in content["measurements"]
            ]
            others = {f.name: content[f.name] for f in fields(cls) if f.name != "measurements"}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged, it lacks {error}: evaluate again") from None
        return cls(measurements=measurements, **others)


def finite(value: Any) -> float | None:
    """A number as JSON can hold it: None for what is no finite number, such as the harness's "N/A"."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _without_items(measurement: Measurement) -> dict[str, Any]:
    entry = asdict(measurement)
    del entry["items"]
    return entry


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give the JSON that octavo eval wrote") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): give the JSON that octavo eval wrote") from None


def _read_items(path: Path, checksum: str) -> dict[str, list[Item]]:
    """Name of the measurement → its items."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): it belongs beside the JSON of the results"
        ) from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise ValueError(
            f"{path} is not the file that its JSON was written with: evaluate again, or take both from one place"
        )
    items: dict[str, list[Item]] = {}
    for line in content.splitlines():
        item = json.loads(line)
        items.setdefault(item.pop("measurement"), []).append(item)
    return items
