"""Tokens: a sample of the mixture, a byte-level BPE trained on it, and token shards with a held-out split.

The sample takes each document by a hash of its text, so it is the same however the corpus is cut into tasks, and its size is
bounded: a source gives the bytes that its weight asks for, or all that it has. The tokenizer is trained once, by one task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from octavo.data.indexed import IndexedWriter, token_dtype
from octavo.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from octavo.data.tokens import is_held_out

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once."""
SPLITS = ("train", "validation")


def sample_shares(weights: Mapping[str, float], sizes: Mapping[str, int], budget: int) -> dict[str, float]:
    """The share of each source's text, so that together they give about `budget` bytes in proportion to `weights`."""
    total = sum(weights.values())
    return {name: min(1.0, budget * weights[name] / total / max(1, sizes[name])) for name in weights}


class Sample(PipelineStep):
    """Passes on a share of the documents of each source, chosen by a hash of the text."""

    type = "🔻 - FILTER"
    name = "sample"

    def __init__(self, shares: Mapping[str, float]) -> None:
        super().__init__()
        self.shares = dict(shares)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in data:
            digest = hashlib.blake2b(document.text.encode(), digest_size=8, person=b"tokenizer").digest()
            if int.from_bytes(digest, "little") < self.shares[document.metadata["source"]] * 2**64:
                yield document


class TrainTokenizer(PipelineStep):
    """Trains a byte-level BPE of `vocab_size` tokens on all documents and writes it to `path`; one task."""

    type = "🔢 - TOKENIZER"
    name = "train"

    def __init__(self, path: Path, vocab_size: int) -> None:
        super().__init__()
        self.path, self.vocab_size = path, vocab_size

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Consumes the documents. Raises `ValueError` if there is none."""
        texts = (document.text for document in data)
        first = next(texts, None)
        if first is None:
            raise ValueError("no document is left to train a tokenizer on: loosen the filters, or give tokenizer.path")
        train_bpe(_chain(first, texts), self.vocab_size, self.path)


def _chain(first: str, others: Iterator[str]) -> Iterator[str]:
    yield first
    yield from others


class WriteShards(PipelineStep):
    """Writes the documents of task `rank` to the shards `folder`/SOURCE/{train,validation}-NNNNN and their numbers to `counts`.

    `places` gives the source and the number of each task; a split without documents has no shard. Each document ends with the
    tokenizer's end-of-text token; a share of `held_out` is the validation split.
    """

    type = "🔢 - TOKENIZER"
    name = "shards"

    def __init__(
        self, folder: Path, counts: Path, places: Sequence[tuple[str, int]], tokenizer: str, held_out: float
    ) -> None:
        super().__init__()
        self.folder, self.counts, self.places = folder, counts, list(places)
        self.tokenizer, self.held_out = tokenizer, held_out

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Consumes the documents."""
        tokenizer = load_tokenizer(self.tokenizer)
        source, number = self.places[rank]
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {
            split: IndexedWriter(self.folder / source / f"{split}-{number:05d}", dtype, tokenizer) for split in SPLITS
        }
        numbers = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
        with writers["train"], writers["validation"]:
            for text, ids in _encoded(data, tokenizer):
                split = SPLITS[is_held_out(text, self.held_out)]
                writers[split].add(np.append(ids, tokenizer.eot))
                numbers[split]["documents"] += 1
                numbers[split]["tokens"] += len(ids) + 1
            for split in SPLITS:
                if not numbers[split]["documents"]:
                    writers[split].discard()
        self.counts.mkdir(parents=True, exist_ok=True)
        (self.counts / f"{rank:05d}.json").write_text(json.dumps(numbers))


def _encoded(documents: DocumentsPipeline, tokenizer: Tokenizer) -> Iterator[tuple[str, Any]]:
    for texts in _batches(documents):
        yield from zip(texts, tokenizer.encode_batch(texts), strict=True)


def _batches(documents: Iterator[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
