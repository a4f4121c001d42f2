"""The text of a run as batches: a source of text, tokenized into a cache, or a prepared corpus with its own tokenizer and mixture."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.data import Source, TokenStream, load_tokenizer, prepare
from octavo.data.corpus import TOKENIZER, PreparedCorpus
from octavo.data.tokenizers import ByteTokenizer, Tokenizer
from octavo.hf.checkpoint import Checkpoint
from octavo.train.config import DataConfig
from octavo.train.source import check_vocabulary, choose_tokenizer

Batch = tuple[Tensor, ...]
"""Inputs and targets, int64 [micro_batch, seq_len] each; with `data.documents=separate` the numbers of documents, int32."""


class Data:
    """The text of a run as batches on `device`; rank `rank` of `world` takes its part of each global batch.

    Raises `ValueError` when text or a shard is missing, damaged, binary, empty or shorter than one sequence, and when the
    tokenizers of `config`, of a prepared corpus and of the checkpoint `source` are not one.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        device: torch.device,
        source: Checkpoint | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._config, self._device = config, device
        if PreparedCorpus.is_one(config.path):
            corpus = PreparedCorpus.open(config.path)
            tokenizer = corpus.load_tokenizer()
            self.tokenizer: str | Path = ByteTokenizer.name if tokenizer.name == "byte" else corpus.folder / TOKENIZER
            _check_tokenizer(config, corpus, tokenizer, source)
            _warn_ignored(config)
            train, self._held_out = _mixture(corpus, config.seq_len)
        else:
            self.tokenizer = choose_tokenizer(config.tokenizer, source)
            tokenizer = load_tokenizer(self.tokenizer)
            train, self._held_out = _text(config, tokenizer)
        if source is not None:
            check_vocabulary(source, self.tokenizer, tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self._train = self._stream(train, seed=seed, rank=rank, world=world)

    @property
    def fingerprint(self) -> str:
        """Of the tokens themselves, by source: equal for equal text, wherever it lies."""
        checksums = {
            side: [(source.name, [shard.checksum for shard in source.shards]) for source in sources]
            for side, sources in (("train", self._train.sources), ("validation", self._held_out))
        }
        return hashlib.blake2b(json.dumps(checksums).encode(), digest_size=16).hexdigest()

    def check_length(self, micro_batches: int, position: int = 0) -> None:
        """Raises `ValueError` if the corpus, within its `max_epochs`, has fewer micro-batches for each rank behind its first `position`
        sequences, which may have gone to another number of ranks."""
        self._train.check_length(position + micro_batches * self._train.batch_size * self._train.world)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over the training text of each source so far, by all ranks together."""
        return self._train.epochs

    def next_batch(self) -> Batch:
        """The next micro-batch of training text, on the device."""
        return self._send(next(self._train))

    @property
    def held_out(self) -> tuple[str, ...]:
        """Names of the sources with held-out text."""
        return tuple(source.name for source in self._held_out)

    def validation(self, count: int, source: str | None = None) -> Iterator[Batch]:
        """`count` micro-batches of held-out text, the same ones at each call; fewer if there is less text.

        Of one source by name, or of all of them at the weights of training. Raises `ValueError` for a name that is not in `held_out`.
        """
        chosen = [one for one in self._held_out if source in (None, one.name)]
        if not chosen:
            raise ValueError(f"no source {source} has held-out text: there are {', '.join(self.held_out)}")
        stream = self._stream(chosen)
        batches = min(count, max(1, stream.windows // stream.batch_size))
        return (self._send(next(stream)) for _ in range(batches))

    def state_dict(self) -> dict[str, Any]:
        """The position in the training text, and of what text."""
        return self._train.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises `ValueError` if it is of another mixture."""
        self._train.load_state_dict(state)

    def _stream(self, sources: list[Source], **options: Any) -> TokenStream:
        config = self._config
        return TokenStream(
            sources,
            config.seq_len,
            config.micro_batch,
            documents=config.documents,
            vocab_size=self.vocab_size,
            **options,
        )

    def _send(self, batch: Batch) -> Batch:
        if self._device.type != "cuda":
            return tuple(tokens.to(self._device) for tokens in batch)
        # Only a contiguous tensor in page-locked memory is copied without waiting for the device.
        return tuple(tokens.contiguous().pin_memory().to(self._device, non_blocking=True) for tokens in batch)


def _text(config: DataConfig, tokenizer: Tokenizer) -> tuple[list[Source], list[Source]]:
    """Training and held-out text of a source of plain text."""
    corpus = prepare(config.path, tokenizer, config.cache, validation=config.val_fraction, max_bytes=config.max_bytes)
    counts = [shard.count for shard in corpus]
    if min(counts) <= config.seq_len:
        raise ValueError(
            f"data.path={config.path} gives {counts[0]:,} tokens of training text and {counts[1]:,} held out, and each side "
            f"needs the {config.seq_len + 1:,} of data.seq_len={config.seq_len}: give more text, a smaller data.seq_len or "
            f"another data.val_fraction (it is {config.val_fraction})"
        )
    return [Source("text", (corpus.train,))], [Source("text", (corpus.validation,))]


def _mixture(corpus: PreparedCorpus, seq_len: int) -> tuple[list[Source], list[Source]]:
    """Training and held-out text of a prepared corpus, as mixtures of equal weights."""
    train = [Source(one.name, one.train, one.weight, one.max_epochs) for one in corpus.sources]
    held_out, short = [], []
    for one in corpus.sources:
        long_enough = any(shard.count > seq_len for shard in one.validation)
        if long_enough:
            held_out.append(Source(one.name, one.validation, one.weight))
        else:
            short.append(one.name)
    if not held_out:
        raise ValueError(
            f"no source of {corpus.folder} holds out the {seq_len + 1:,} tokens that data.seq_len={seq_len} needs in one shard: "
            "prepare the corpus with more validation text, or use a smaller data.seq_len"
        )
    if short:
        warnings.warn(
            f"validation goes without {', '.join(short)}: less than one sequence of {seq_len:,} tokens is held out there",
            stacklevel=4,
        )
    return train, held_out


def _check_tokenizer(
    config: DataConfig, corpus: PreparedCorpus, tokenizer: Tokenizer, source: Checkpoint | None
) -> None:
    """Raises `ValueError` if the config or the checkpoint wants another tokenizer than the one that made the shards."""
    wanted = {"data.tokenizer": config.tokenizer, "model.from": None if source is None else source.tokenizer}
    for setting, path in wanted.items():
        if path is None:
            continue
        other = load_tokenizer(path)
        if other.name != tokenizer.name and other.vocabulary() != tokenizer.vocabulary():
            raise ValueError(
                f"{corpus.folder} was prepared with tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} tokens), and {setting} asks "
                f"for {path} ({other.vocab_size:,} tokens): leave data.tokenizer out, or prepare the corpus with that tokenizer"
            )


def _warn_ignored(config: DataConfig) -> None:
    default = DataConfig()
    ignored = [
        f"data.{name}" for name in ("val_fraction", "max_bytes") if getattr(config, name) != getattr(default, name)
    ]
    if ignored:
        warnings.warn(
            f"{' and '.join(ignored)} do nothing here: {config.path} is a prepared corpus, which has its own split",
            stacklevel=4,
        )
