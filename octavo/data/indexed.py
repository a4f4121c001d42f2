"""Token shards: Megatron's MMIDIDX format, written whole or not at all and read in place.

A shard is two files that share a *prefix*. `prefix.bin` holds token ids back to back; `prefix.idx` says where documents begin
(`octavo.data.index_file` has its layout).

octavo writes one sequence a document and a third file, `prefix.json`: the checksum of the two, and the tokenizer if it is known.
Megatron and datatrove read such shards and their shards open here, where several sequences of a document count as one text.
Sequences must lie back to back, as these writers put them, so that a shard is one text that windows can be cut from.

Token ids and tables are memory-mapped: a shard may be larger than memory, and opening it reads the tables once, to check them.
"""

from __future__ import annotations

import array
import bisect
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.data.index_file import DTYPES, HEADER, MAGIC, check_tables, map_array, read_header
from octavo.data.tokenizers import Tokenizer

SUFFIXES = (".bin", ".idx", ".json")
CHUNK = 1 << 20
"""Bytes that are read at once."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype of the format that holds every id below `vocab_size` and that Megatron writes: uint16 or int32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


class IndexedWriter:
    """Writes the shard `prefix`, a document at a time; also a context manager, which publishes nothing after an exception.

    Equal documents give equal bytes. Files have other names until `close`, the `.idx` comes last, and a shard without one is
    none: a process that is killed leaves the old shard or none, never a part. `tokenizer` is noted beside the shard.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike, tokenizer: Tokenizer | None = None) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {np.dtype(name): code for code, name in DTYPES.items()}
        if self.dtype not in codes:
            raise ValueError(
                f"a shard cannot hold tokens of dtype {self.dtype}: use one of {', '.join(map(str, codes))}"
            )
        self.prefix = Path(prefix)
        self._code = codes[self.dtype]
        self._tokenizer = tokenizer
        self._lengths = array.array("i")
        self._digest = hashlib.blake2b(digest_size=16)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._partial(".bin").open("wb")

    def add(self, ids: npt.ArrayLike) -> None:
        """Appends one document, exactly these ids. Raises `ValueError` if there are none or the dtype cannot hold one."""
        given = np.asarray(ids)
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix}: document {len(self._lengths)} must be a list of token ids, at least one")
        limits = np.iinfo(self.dtype)
        if given.size > np.iinfo(np.int32).max or given.min() < limits.min or given.max() > limits.max:
            raise ValueError(
                f"{self.prefix}: document {len(self._lengths)} has {given.size:,} tokens with ids {given.min()} to {given.max()}, "
                f"and {self.dtype} takes {limits.min} to {limits.max}: choose the dtype by token_dtype(vocab_size)"
            )
        block = np.ascontiguousarray(given, self.dtype).view(np.uint8).data  # a long document is not copied
        self._bin.write(block)
        self._digest.update(block)
        self._lengths.append(given.size)

    def close(self) -> None:
        """Publishes the shard, after its bytes have reached the disk; a second call does nothing."""
        if self._bin.closed:
            return
        _sync_and_close(self._bin)
        lengths = np.asarray(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8")
        with self._partial(".idx").open("wb") as file:
            for block in (
                HEADER.pack(MAGIC, 1, self._code, len(lengths), len(lengths) + 1),
                lengths.tobytes(),
                ((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes(),
                np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
            ):
                file.write(block)
                self._digest.update(block)
            _sync_and_close(file)
        notes: dict[str, Any] = {"tokens": int(ends[-1]) if len(ends) else 0, "documents": len(lengths)}
        if self._tokenizer is not None:
            known = self._tokenizer
            notes |= {"tokenizer": known.name, "vocab_size": known.vocab_size, "eot": known.eot}
        with self._partial(".json").open("w") as notes_file:
            json.dump({**notes, "checksum": self._digest.hexdigest()}, notes_file, indent=1)
            notes_file.write("\n")
            _sync_and_close(notes_file)
        _file(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            self._partial(suffix).replace(_file(self.prefix, suffix))

    def discard(self) -> None:
        """Forgets what was added; an earlier shard of this name stays."""
        self._bin.close()
        for suffix in SUFFIXES:
            self._partial(suffix).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.partial")


@dataclass(frozen=True)
class IndexedShard:
    """A shard on the disk, see `IndexedShard.open`."""

    path: Path
    """Of the `.bin` file."""
    count: int
    """Tokens."""
    documents: int
    dtype: np.dtype[Any]
    sequences: int
    tokenizer: str | None = None
    """`Tokenizer.name` of the tokenizer, whose ids these are; None if nothing beside the shard says so."""
    vocab_size: int | None = None
    eot: int | None = None
    recorded: str | None = None
    """The checksum that was written with the shard, if one was."""

    @classmethod
    def open(cls, prefix: str | Path) -> IndexedShard:
        """The shard `prefix`. Raises `ValueError`, naming the file, if one is missing, damaged, truncated or of another format."""
        index, tokens, sidecar = (_file(prefix, suffix) for suffix in (".idx", ".bin", ".json"))
        code, sequences, entries = read_header(index)
        dtype = np.dtype(DTYPES[code])
        count = check_tables(index, sequences, entries, dtype.itemsize)
        try:
            size = tokens.stat().st_size
        except OSError as error:
            raise ValueError(f"{tokens} cannot be read ({error.strerror}): {index} belongs to it") from None
        if size != count * dtype.itemsize:
            raise ValueError(
                f"{tokens} has {size:,} bytes and {index.name} says {count * dtype.itemsize:,} ({count:,} tokens of {dtype}): the "
                "file is damaged or of another shard; write both again"
            )
        notes = _read_notes(sidecar)
        for field, value in (("tokens", count), ("documents", entries - 1)):
            if notes.pop(field, value) != value:
                raise ValueError(
                    f"{sidecar} is of another shard than {index.name}, which has {value:,} {field}: delete it"
                )
        return cls(tokens, count, entries - 1, dtype, sequences, recorded=notes.pop("checksum", None), **notes)

    @cached_property
    def tokens(self) -> npt.NDArray[np.integer]:
        """The ids [count], memory-mapped and read-only."""
        return map_array(self.path, self.dtype, 0, self.count)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the number of all, int64 [documents + 1]; 8 bytes a document of memory."""
        starts = np.append(np.asarray(self._pointers) // self.dtype.itemsize, self.count)
        return starts[np.asarray(self._first_sequences)]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each document, int32 [documents]."""
        return np.diff(self.offsets).astype(np.int32)

    def document_ids(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """A number for each of the tokens `begin` ... `end` - 1, 0 at first: equal if and only if they are of one document.

        Finds the documents by bisection in the mapped tables, so it takes no memory that grows with the shard.
        """
        documents = range(self.documents)
        first = bisect.bisect_right(documents, begin, key=self._start)
        last = bisect.bisect_left(documents, end, lo=first, key=self._start)
        begins = np.zeros(end - begin, dtype=np.int64)
        np.add.at(begins, [self._start(document) - begin for document in range(first, last)], 1)
        return begins.cumsum()

    def _start(self, document: int) -> int:
        sequence = int(self._first_sequences[document])
        return self.count if sequence == self.sequences else int(self._pointers[sequence]) // self.dtype.itemsize

    @cached_property
    def checksum(self) -> str:
        """BLAKE2b-128 of `.bin` and `.idx`: as recorded when they were written, else computed now."""
        return self.recorded or self._computed_checksum()

    def verify(self) -> None:
        """Reads the whole shard. Raises `ValueError` if its checksum is not the recorded one."""
        if self._computed_checksum() != self.checksum:
            raise ValueError(f"{self.path} or its .idx has changed since it was written: write the shard again")

    def _computed_checksum(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path in (self.path, self._index):
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()

    @property
    def _index(self) -> Path:
        return self.path.with_suffix(".idx")

    @cached_property
    def _pointers(self) -> npt.NDArray[np.int64]:
        return map_array(self._index, np.dtype("<i8"), HEADER.size + 4 * self.sequences, self.sequences)

    @cached_property
    def _first_sequences(self) -> npt.NDArray[np.int64]:
        return map_array(self._index, np.dtype("<i8"), HEADER.size + 12 * self.sequences, self.documents + 1)


def _file(prefix: str | Path, suffix: str) -> Path:
    return Path(f"{prefix}{suffix}")


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _read_notes(sidecar: Path) -> dict[str, Any]:
    """What octavo wrote beside the shard; nothing if there is no such file."""
    kinds = {"tokens": int, "documents": int, "tokenizer": str, "vocab_size": int, "eot": int, "checksum": str}
    try:
        notes = json.loads(sidecar.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{sidecar} cannot be read ({error}): delete it, or write the shard again") from None
    if not isinstance(notes, dict) or any(type(value) is not kinds.get(name) for name, value in notes.items()):
        raise ValueError(f"{sidecar} does not describe a token shard: delete it, or write the shard again")
    return notes
