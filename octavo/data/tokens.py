"""Text to token shards (`octavo.data.indexed`), with documents held out for validation.

`prepare` turns a source into two shards, for training and validation, in which the end-of-text token follows each document. A
document is held out when its hash falls into the lowest share of all hash values: the choice depends on nothing but its own
text, so a corpus that grows never moves a document from one side to the other. Only when that leaves a side empty (a corpus of
one book), the end of the text is held out. Results are cached under the content of the source; they appear complete (rename) or
not at all.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.data.indexed import IndexedShard, IndexedWriter, token_dtype
from octavo.data.long_texts import PIECE_CHARACTERS, encode_pieces
from octavo.data.sources import fingerprint, hash_text, read_documents
from octavo.data.tokenizers import Tokenizer

LAYOUT = "octavo-tokens-2"
SPLITS = ("train", "validation")
BATCH_CHARACTERS = 4 << 20
"""Text of short documents that is tokenized at once: enough to keep all threads of a fast tokenizer busy, and a fixed amount of
memory. Long documents are tokenized piece by piece, see `octavo.data.long_texts`."""


class Corpus(NamedTuple):
    """A source, tokenized."""

    train: IndexedShard
    validation: IndexedShard


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
                _fill_empty_side(Path(made), tokenizer, validation)
                _publish(Path(made), folder)
        except OSError as error:
            raise OSError(
                f"the tokens of {source} cannot be written to {folder.parent} ({error.strerror or error}): free space there or "
                "choose another folder (data.cache)"
            ) from error
    return _open(folder)


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation set: a property of its text alone."""
    digest = hashlib.blake2b(digest_size=8, person=b"held-out")
    hash_text(digest, text)
    return int.from_bytes(digest.digest(), "little") < share * 2**64


def _open(folder: Path) -> Corpus:
    try:
        return Corpus(*(IndexedShard.open(folder / name) for name in SPLITS))
    except ValueError as error:
        raise ValueError(f"{error}; it is a copy that octavo made: delete {folder} to have it made again") from None


def _write_shards(documents: Iterable[str], tokenizer: Tokenizer, folder: Path, share: float) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    train, held_out = (IndexedWriter(folder / name, dtype, tokenizer) for name in SPLITS)
    with train, held_out:
        for batch in _batches(documents):
            for text, pieces in zip(batch, _encode(tokenizer, batch, dtype), strict=True):
                ids = np.concatenate([*pieces, [tokenizer.eot]], dtype=dtype, casting="unsafe")
                (held_out if is_held_out(text, share) else train).add(ids)


def _encode(tokenizer: Tokenizer, batch: list[str], dtype: np.dtype[Any]) -> Iterable[list[npt.NDArray[Any]]]:
    """The ids of each document, in pieces."""
    if len(batch) > 1 or len(batch[0]) <= PIECE_CHARACTERS:
        return [[ids] for ids in tokenizer.encode_batch(batch)]
    return [[ids for _, ids in encode_pieces(lambda text: tokenizer.encode_batch([text])[0], batch[0], dtype)]]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents to tokenize at once; a long one is alone."""
    batch: list[str] = []
    size = 0
    for text in documents:
        if len(text) > PIECE_CHARACTERS:
            if batch:
                yield batch
            yield [text]
            batch, size = [], 0
            continue
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fill_empty_side(folder: Path, tokenizer: Tokenizer, share: float) -> None:
    """Holds out the end of the text when all documents fell on one side."""
    shards = [IndexedShard.open(folder / name) for name in SPLITS]
    if all(shard.count for shard in shards):
        return
    whole = max(shards, key=lambda shard: shard.count)
    cut = int(whole.count * (1 - share))
    tokens, offsets = np.array(whole.tokens), whole.offsets  # copies: the file is written again
    for name, begin, end in zip(SPLITS, (0, cut), (cut, whole.count), strict=True):
        with IndexedWriter(folder / name, whole.dtype, tokenizer) as writer:
            inside = offsets[(offsets > begin) & (offsets < end)]
            for part in np.split(tokens[begin:end], inside - begin):
                if len(part):
                    writer.add(part)


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
