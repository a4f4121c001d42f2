"""What the filters that are trained on reference text share: segments of it, quantiles of its scores, files.

A limit on a score means little by itself: the perplexity of good text depends on the model, the words and the subject. So limits
are quantiles of the scores of reference text that the model did not see: every tenth segment is held out, and "0.95" is the value
under which 95% of the held-out segments lie.

A trained filter is two files in a folder of the user's: `<name>.npz` with its arrays and `<name>.json` with all the rest. Neither
can hold code: arrays of objects are refused.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.prepare.ngrams import word_hashes

SEGMENT = 250
"""Words of a segment."""
SHORTEST = 25
"""Words of the shortest text that is scored by itself: fewer say nothing."""
HELD_OUT = 10
"""Every so many segments, one is kept for the quantiles."""
MIN_HELD_OUT = 10
"""Fewer segments make no quantiles."""


def segments(documents: Iterable[str], most: int) -> Iterator[np.ndarray]:
    """The word hashes, uint64 [≤ SEGMENT], of the segments of each document, until `most` words are given."""
    given = 0
    for document in documents:
        words = word_hashes(document)
        for start in range(0, len(words), SEGMENT):
            part = words[start : start + SEGMENT]
            if len(part) >= SHORTEST:
                given += len(part)
                yield part
        if given >= most:
            return


def split_held_out(parts: Iterable[np.ndarray], what: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(for training, held out). Raises `ValueError` naming `what` if that is too little for quantiles."""
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    for number, part in enumerate(parts):
        (held_out if number % HELD_OUT == HELD_OUT - 1 else train).append(part)
    if len(held_out) < MIN_HELD_OUT:
        words = sum(map(len, train + held_out))
        raise ValueError(
            f"the {what} has {words:,} words in {len(train) + len(held_out)} segments: give at least "
            f"{SEGMENT * HELD_OUT * MIN_HELD_OUT:,} words of running text"
        )
    return train, held_out


def percentiles(scores: Iterable[float]) -> list[float]:
    """The 0th, 1st, …, 100th percentile of `scores`."""
    return [round(float(value), 6) for value in np.percentile(np.fromiter(scores, dtype=np.float64), np.arange(101))]


def limit_at(settings: dict[str, Any], quantile: float) -> float:
    """The score at a quantile in [0, 1] of the held-out reference. Raises `ValueError` for another number."""
    if not 0 <= quantile <= 1:
        raise ValueError(
            f"quantile {quantile} must be between 0 and 1: 0.95 is what 95% of the reference text stays below"
        )
    return float(np.interp(100 * quantile, np.arange(101), settings["percentiles"]))


def save_model(folder: Path, name: str, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
    """Writes both files; each appears complete, the arrays first."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.{os.getpid()}"
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(folder / f"{name}.npz")
    partial.write_text(json.dumps(settings, indent=1) + "\n")
    partial.replace(folder / f"{name}.json")


def load_model(folder: str | Path, name: str, version: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, settings). Raises `ValueError` naming the file that is missing, damaged or of another version."""
    file = Path(folder) / f"{name}.json"
    try:
        settings = json.loads(file.read_text())
        form = settings.get("format")
        if form == f"octavo-{name}-{version}":
            file = file.with_suffix(".npz")
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays), settings
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: make it first") from None
    except (OSError, EOFError, zipfile.BadZipFile, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}): make it again") from None
    raise ValueError(f"{file} is of the format {form!r}, not octavo-{name}-{version}: make it again")
