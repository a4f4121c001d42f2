"""A prepared corpus: a folder of token shards by source, with the mixture that they are meant for.

    FOLDER/corpus.json       tokenizer, vocabulary, and for each source its weight, epochs, shards and counts
    FOLDER/tokenizer.json    the tokenizer; absent for the byte tokenizer
    FOLDER/shards/SOURCE/{train,validation}-NNNNN.{bin,idx,json}

`corpus.json` names shards by their prefixes relative to the folder, so that a folder can be moved. Everything in it is checked
against the shards when it is opened. It is written last: a folder without one is not finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.data.files import write_whole
from octavo.data.indexed import IndexedShard
from octavo.data.tokenizers import Tokenizer, load_tokenizer

LAYOUT = "octavo-corpus-1"
MANIFEST = "corpus.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class CorpusSource:
    """One source of a prepared corpus."""

    name: str
    weight: float
    """Share of the training sequences, relative to those of the other sources."""
    max_epochs: float | None
    """Passes over its training text after which the other sources share its place; None is no limit."""
    train: tuple[IndexedShard, ...]
    validation: tuple[IndexedShard, ...]
    documents: int
    """Training documents."""
    tokens: int
    """Training tokens, end-of-text ones included."""
    validation_tokens: int


@dataclass(frozen=True)
class PreparedCorpus:
    """A folder with a `corpus.json`, see `PreparedCorpus.open`."""

    folder: Path
    tokenizer: str
    """`Tokenizer.name` of its tokenizer."""
    vocab_size: int
    eot: int
    sources: tuple[CorpusSource, ...]

    @staticmethod
    def is_one(folder: str | Path) -> bool:
        """Whether `folder` holds a prepared corpus rather than text. Raises `ValueError` if it holds one that is not finished."""
        folder = Path(folder).expanduser()
        finished = (folder / MANIFEST).is_file()
        if not finished and next(folder.glob("shards/*/*.idx"), None) is not None:
            raise ValueError(
                f"{folder} holds token shards and no {MANIFEST}, which comes last: finish the preparation of the corpus"
            )
        return finished

    @classmethod
    def open(cls, folder: str | Path) -> PreparedCorpus:
        """The corpus in `folder`. Raises `ValueError`, naming the file or source, if anything is missing, damaged or contradicts."""
        folder = Path(folder).expanduser()
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): give the folder of a prepared corpus") from None
        return cls._of(folder, manifest)

    @classmethod
    def _of(cls, folder: Path, manifest: Any) -> PreparedCorpus:
        path = folder / MANIFEST
        if not isinstance(manifest, dict) or manifest.get("layout") != LAYOUT:
            raise ValueError(f"{path} does not describe an {LAYOUT} folder: prepare the corpus again")
        tokenizer, vocab_size, eot = (
            _get(path, "the corpus", manifest, field, kind)
            for field, kind in (("tokenizer", str), ("vocab_size", int), ("eot", int))
        )
        entries = _get(path, "the corpus", manifest, "sources", list)
        if not 0 <= eot < vocab_size or not entries:
            raise ValueError(
                f"{path} has vocab_size {vocab_size}, eot {eot} and {len(entries)} sources: eot must be an id of the vocabulary, and "
                "there must be a source"
            )
        corpus = cls(folder, tokenizer, vocab_size, eot, tuple(_open_source(folder, entry) for entry in entries))
        names = [source.name for source in corpus.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"{path} has two sources of one name ({', '.join(names)}): prepare the corpus again")
        for source in corpus.sources:
            for shard in (*source.train, *source.validation):
                corpus._check(shard)
        return corpus

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the corpus. Raises `ValueError` if the one in the folder is not it."""
        tokenizer = load_tokenizer("byte" if self.tokenizer == "byte" else self.folder / TOKENIZER)
        for field, here, noted in (
            ("name", tokenizer.name, self.tokenizer),
            ("vocab_size", tokenizer.vocab_size, self.vocab_size),
            ("eot", tokenizer.eot, self.eot),
        ):
            if here != noted:
                raise ValueError(
                    f"{self.folder / TOKENIZER} is not the tokenizer of {self.folder / MANIFEST}: its {field} is {here}, not {noted}; "
                    "put the old file back, or prepare the corpus again"
                )
        return tokenizer

    def _check(self, shard: IndexedShard) -> None:
        for field, here, noted in (
            ("tokenizer", shard.tokenizer, self.tokenizer),
            ("vocabulary", shard.vocab_size, self.vocab_size),
            ("end-of-text token", shard.eot, self.eot),
        ):
            if here is not None and here != noted:
                raise ValueError(
                    f"{shard.path} was written with {field} {here}, and {self.folder / MANIFEST} says {noted}: prepare the corpus again"
                )


def write_manifest(
    folder: str | Path,
    tokenizer: Tokenizer,
    sources: Sequence[tuple[str, float, float | None, Sequence[str], Sequence[str]]],
) -> PreparedCorpus:
    """Writes `corpus.json`, after all shards of `folder`, and opens the corpus.

    `sources` are (name, weight, max_epochs, prefixes of training shards, prefixes of validation shards), the prefixes relative to
    `folder`. Documents and tokens are counted from the shards. Raises `ValueError` as `PreparedCorpus.open` does, and writes nothing
    then.
    """
    folder = Path(folder).expanduser()
    entries = []
    for name, weight, max_epochs, train, validation in sources:
        opened = [IndexedShard.open(folder / prefix) for prefix in train]
        held_out = [IndexedShard.open(folder / prefix) for prefix in validation]
        entries.append(
            {
                "name": name,
                "weight": weight,
                "max_epochs": max_epochs,
                "train": list(map(str, train)),
                "validation": list(map(str, validation)),
                "documents": sum(shard.documents for shard in opened),
                "tokens": sum(shard.count for shard in opened),
                "validation_tokens": sum(shard.count for shard in held_out),
            }
        )
    manifest = {
        "layout": LAYOUT,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "sources": entries,
    }
    corpus = PreparedCorpus._of(folder, manifest)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return corpus


def _open_source(folder: Path, entry: Any) -> CorpusSource:
    path = folder / MANIFEST
    if not isinstance(entry, dict):
        raise ValueError(f"{path} has a source that is no object: prepare the corpus again")
    name = _get(path, "a source", entry, "name", str)
    label = f"source {name}"
    weight = _positive(path, label, "weight", entry.get("weight"))
    max_epochs = entry.get("max_epochs")
    if max_epochs is not None:
        max_epochs = _positive(path, label, "max_epochs", max_epochs)
    sides = []
    for side in ("train", "validation"):
        prefixes = _get(path, label, entry, side, list)
        if not all(isinstance(prefix, str) for prefix in prefixes):
            raise ValueError(
                f"{path}: {side} of {label} must be a list of prefixes of shards: prepare the corpus again"
            )
        sides.append(tuple(IndexedShard.open(folder / prefix) for prefix in prefixes))
    train, validation = sides
    if not train:
        raise ValueError(f"{path}: {label} has no training shard: prepare the corpus again, or leave the source out")
    counted = {
        "documents": sum(shard.documents for shard in train),
        "tokens": sum(shard.count for shard in train),
        "validation_tokens": sum(shard.count for shard in validation),
    }
    for field, count in counted.items():
        noted = _get(path, label, entry, field, int)
        if noted != count:
            raise ValueError(
                f"{path}: {label} has {noted:,} {field} and its shards hold {count:,}: prepare the corpus again"
            )
    return CorpusSource(name, weight, max_epochs, train, validation, **counted)


def _get(path: Path, label: str, entry: dict[str, Any], field: str, kind: type) -> Any:
    value = entry.get(field)
    if type(value) is not kind:
        raise ValueError(f"{path}: {field} of {label} is {value!r}, not a {kind.__name__}: prepare the corpus again")
    return value


def _positive(path: Path, label: str, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # NaN is not either
        raise ValueError(f"{path}: {field} of {label} is {value!r}: it must be a positive number")
    return float(value)
