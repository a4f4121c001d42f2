"""Text to token shards: a tokenizer, and files of token ids that training reads in place.

A *shard* is a pair of files: `name.bin`, token ids back to back, little-endian uint16 (uint32 for a vocabulary above 65,536),
each document followed by the end-of-text token; and `name.json`, which says how many there are, of which tokenizer, and their
checksum. The ids are memory-mapped, so a shard may be larger than memory and costs nothing to open.

`prepare` turns a source into two shards, for training and validation. A document is held out when its hash falls into the
lowest share of all hash values: the choice depends on nothing but its own text, so a corpus that grows never moves a document
from one side to the other. Only when that leaves a side empty (a corpus of one book), the end of the text is held out.
Results are cached under the content of the source; they appear complete (rename) or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.data.sources import fingerprint, read_documents
from octavo.data.tokenizers import Tokenizer

LAYOUT = "octavo-tokens-1"
SPLITS = ("train.bin", "validation.bin")
BATCH_CHARACTERS = 4 << 20
"""Text that is tokenized at once: enough to keep all threads of a fast tokenizer busy, and a fixed amount of memory."""


@dataclass(frozen=True)
class TokenShard:
    """Token ids on the disk, and what is known of them."""

    path: Path
    """Of the `.bin` file."""
    count: int
    """Tokens, end-of-text ones included."""
    dtype: str
    tokenizer: str
    """Identifier of the tokenizer: ids of another one mean something else."""
    vocab_size: int
    eot: int
    checksum: str
    """BLAKE2b-128 of the `.bin` file."""

    @cached_property
    def tokens(self) -> npt.NDArray[np.unsignedinteger]:
        """The ids [count], memory-mapped and read-only."""
        if self.count == 0:  # the operating system maps no empty file
            return np.empty(0, self.dtype)
        return np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r", shape=(self.count,))

    @classmethod
    def open(cls, path: str | Path, tokenizer: Tokenizer | None = None) -> TokenShard:
        """The shard at `path` (of the `.bin` file). Raises `ValueError` if it is damaged or of another tokenizer."""
        path = Path(path)
        sidecar = path.with_suffix(".json")
        try:
            meta = json.loads(sidecar.read_text())
            size = path.stat().st_size
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no token shard ({error}): prepare the data again") from None
        if meta.pop("layout", None) != LAYOUT:
            raise ValueError(f"{sidecar} does not describe an {LAYOUT} file: prepare the data again")
        shard = cls(path=path, **meta)
        expected = shard.count * np.dtype(shard.dtype).itemsize
        if size != expected:
            raise ValueError(
                f"{path} has {size:,} bytes instead of {expected:,}: delete {path.parent} and prepare the data again"
            )
        if tokenizer is not None and shard.tokenizer != tokenizer.name:
            raise ValueError(
                f"{path} was made with tokenizer {shard.tokenizer}, not {tokenizer.name}: prepare the data again with that one"
            )
        return shard

    def verify(self) -> None:
        """Reads the whole file. Raises `ValueError` if its checksum is not the recorded one."""
        if _checksum(self.path) != self.checksum:
            raise ValueError(
                f"{self.path} has changed since it was written: delete {self.path.parent} and prepare the data again"
            )


class Corpus(NamedTuple):
    """A source, tokenized."""

    train: TokenShard
    validation: TokenShard


def prepare(
    source: str | Path,
    tokenizer: Tokenizer,
    cache: str | Path,
    *,
    validation: float = 0.01,
    max_bytes: int | None = None,
) -> Corpus:
    """Tokenizes `source` (see `octavo.data.sources`) into `cache`, unless an equal one is there.

    `validation` is the share of documents held out, `max_bytes` the text to read. Raises `ValueError` for a source without text
    and `OSError` naming `cache` when the tokens cannot be written.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation} must be a share between 0 and 1 of the documents")
    key = f"{LAYOUT} {fingerprint(source)} {tokenizer.name} {validation} {max_bytes}"
    folder = Path(cache).expanduser() / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True
            ) as made:
                _write_shards(read_documents(source, max_bytes), tokenizer, Path(made), validation)
                _publish(Path(made), folder)
        except OSError as error:
            raise OSError(
                f"the tokens of {source} cannot be written to {folder.parent} ({error.strerror or error}): free space there or "
                "choose another folder (data.cache)"
            ) from error
    return Corpus(*(TokenShard.open(folder / name, tokenizer) for name in SPLITS))


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation set: a property of its text alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _write_shards(documents: Iterable[str], tokenizer: Tokenizer, folder: Path, share: float) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    paths = [folder / name for name in SPLITS]
    with paths[0].open("wb") as train, paths[1].open("wb") as held_out:
        for batch in _batches(documents):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                block = np.append(ids, tokenizer.eot).astype(dtype)
                (held_out if is_held_out(text, share) else train).write(block.tobytes())
    _fill_empty_side(paths, share, dtype.itemsize)
    for path in paths:
        shard = TokenShard(
            path=path,
            count=path.stat().st_size // dtype.itemsize,
            dtype=dtype.name,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            checksum=_checksum(path),
        )
        meta = {"layout": LAYOUT, **dataclasses.asdict(shard)}
        del meta["path"]
        path.with_suffix(".json").write_text(json.dumps(meta, indent=2) + "\n")


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fill_empty_side(paths: list[Path], share: float, itemsize: int) -> None:
    """Holds out the end of the text when all documents fell on one side."""
    train, held_out = paths
    if train.stat().st_size and held_out.stat().st_size:
        return
    tokens = train.read_bytes() or held_out.read_bytes()
    cut = int(len(tokens) // itemsize * (1 - share)) * itemsize
    train.write_bytes(tokens[:cut])
    held_out.write_bytes(tokens[cut:])


def _publish(building: Path, folder: Path) -> None:
    """Gives a complete folder its final name, after its content has reached the disk."""
    for path in building.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, with the same content
            raise


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
