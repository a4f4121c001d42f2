"""What a stage kept and dropped, and why: counted in the tasks, a few samples of each reason, one small file a task.

A `Tally` is the exclusion writer of all filters of a pipeline and its last step; `reading()` goes after the reader. datatrove's
own exclusion writers would keep every dropped text on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

SAMPLES = 2
"""Dropped documents of each reason that a task keeps a beginning of."""
SAMPLE_CHARACTERS = 400
UNREADABLE_RECORDS = 3
"""Unreadable records of a file that are described; the others are counted."""


@dataclass
class Amount:
    """Documents and their UTF-8 bytes."""

    documents: int = 0
    bytes: int = 0

    def add(self, documents: int, size: int) -> None:
        self.documents += documents
        self.bytes += size


@dataclass
class Unreadable:
    """What could not be read of one file, for one reason."""

    records: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)
    """Number and detail of the first `UNREADABLE_RECORDS`, the same however the file was dealt to tasks."""

    def add(self, records: int, first: Iterable[dict[str, Any]]) -> None:
        self.records += records
        self.first = sorted([*self.first, *first], key=lambda entry: entry["record"])[:UNREADABLE_RECORDS]


@dataclass
class Counts:
    """What became of some documents."""

    read: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    """By reason."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By reason: id, path and beginning of some documents."""
    unreadable: dict[str, dict[str, Unreadable]] = field(default_factory=dict)
    """By reason and path: every file, so that one with many bad records hides no other."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Personal data that was replaced, by kind."""

    def merge(self, other: Counts) -> None:
        """Adds what `other` counted."""
        self.read.add(other.read.documents, other.read.bytes)
        self.kept.add(other.kept.documents, other.kept.bytes)
        for reason, amount in other.dropped.items():
            self.dropped.setdefault(reason, Amount()).add(amount.documents, amount.bytes)
            samples = self.samples.setdefault(reason, [])
            samples += other.samples.get(reason, [])[: max(0, SAMPLES - len(samples))]
        for reason, files in other.unreadable.items():
            for path, found in files.items():
                self.could_not_read(reason, path, found.records, found.first)
        for kind, number in other.replaced.items():
            self.replaced[kind] = self.replaced.get(kind, 0) + number

    def could_not_read(self, reason: str, path: str, records: int, first: Iterable[dict[str, Any]]) -> None:
        """Adds unreadable records of the file at `path`, of which `first` describes some."""
        self.unreadable.setdefault(reason, {}).setdefault(path, Unreadable()).add(records, first)


class Tally(PipelineStep):
    """Counts into `folder`/RANK.json. `default` is the reason of documents that were dropped without one."""

    type = "📊 - STATS"
    name = "kept and dropped"

    def __init__(self, folder: Path, default: str = "unnamed") -> None:
        super().__init__()
        self.folder, self.default = folder, default
        self.counts = Counts()

    def reading(self) -> PipelineStep:
        """The step that counts what was read."""
        return _Reading(self)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in data:
            self.counts.kept.add(1, utf8_bytes(document.text))
            for kind in ("emails", "ip_addresses"):
                if number := document.metadata.get(kind):
                    self.counts.replaced[kind] = self.counts.replaced.get(kind, 0) + int(number)
            yield document
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{rank:05d}.json").write_text(json.dumps(asdict(self.counts)))

    # --- an exclusion writer, as datatrove's filters use one

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *_: object) -> None:
        """Counts are written by `run`, when the task is through."""

    def write(self, document: Document, rank: int = 0) -> None:
        """Counts a dropped document."""
        metadata = document.metadata
        reason = str(metadata.get("filter_reason", self.default))
        self.counts.dropped.setdefault(reason, Amount()).add(1, utf8_bytes(document.text))
        samples = self.counts.samples.setdefault(reason, [])
        if len(samples) < SAMPLES:
            samples.append(
                {"id": document.id, "path": metadata.get("path", ""), "text": document.text[:SAMPLE_CHARACTERS]}
            )
        if "detail" in metadata:
            entry = {name: metadata[name] for name in ("record", "detail")}
            self.counts.could_not_read(reason, metadata["path"], 1, [entry])


class _Reading(PipelineStep):
    type = "📊 - STATS"
    name = "read"

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in data:
            self.tally.counts.read.add(1, utf8_bytes(document.text))
            yield document


class Excerpts(PipelineStep):
    """Passes documents on and keeps path and beginning of those whose ids `clusters` names as examples, in `folder`/RANK.json."""

    type = "📊 - STATS"
    name = "excerpts"

    def __init__(self, clusters: Path, folder: Path) -> None:
        super().__init__()
        self.clusters, self.folder = clusters, folder

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        wanted = set()
        for cluster in json.loads(self.clusters.read_text())["largest"]:
            wanted |= {cluster["id"], *(entry["id"] for entry in cluster["dropped"])}
        found = {}
        for document in data:
            if document.id in wanted:
                metadata = document.metadata
                found[document.id] = {
                    "source": metadata["source"],
                    "path": metadata.get("path", ""),
                    "text": document.text[:SAMPLE_CHARACTERS],
                }
            yield document
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{rank:05d}.json").write_text(json.dumps(found))


def read_counts(folder: Path, ranks: Iterable[int] | None = None) -> Counts:
    """The sum over the tasks of a stage, or over some of them."""
    total = Counts()
    paths = sorted(folder.glob("*.json")) if ranks is None else [folder / f"{rank:05d}.json" for rank in ranks]
    for path in paths:
        values: Mapping[str, Any] = json.loads(path.read_text())
        total.merge(
            Counts(
                read=Amount(**values["read"]),
                kept=Amount(**values["kept"]),
                dropped={reason: Amount(**amount) for reason, amount in values["dropped"].items()},
                samples=values["samples"],
                unreadable={
                    reason: {path: Unreadable(**found) for path, found in files.items()}
                    for reason, files in values["unreadable"].items()
                },
                replaced=values["replaced"],
            )
        )
    return total


def utf8_bytes(text: str) -> int:
    """Length of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
