"""Batches from token shards: a mixture of sources, shuffled without a buffer, split over ranks, resumable to the token.

A *window* is `seq_len` + 1 consecutive tokens of one shard; neighbours share a token, so every token but a shard's first is
a target once an epoch (a rest shorter than a window is left out). An epoch of a source visits every window of it once, in an
order that is a permutation computed where it is needed: four Feistel rounds over 2k bits, repeated while the result lies outside
the number of windows (cycle walking). It takes no memory, and the window at any position of any epoch is known without the ones
before. Which source comes next is a function of the position too (`octavo.data.mixture`): shares are exact, not sampled.

All ranks walk one global sequence of windows: of the `world` x `batch_size` windows at global position p, rank r takes the r-th
`batch_size`. The state is p alone, so a run continues exactly, also on another number of ranks or with another batch size.

With `documents="separate"` each token comes with a number of its document, for a model that keeps documents apart, and the
first token of a document is no target: what precedes it does not predict it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.data.indexed import IndexedShard
from octavo.data.mixture import Mixture
from octavo.models.loss import IGNORE

ROUNDS = 4
WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Source:
    """One part of a mixture. Raises `ValueError` for a weight or a number of epochs that is no positive number."""

    name: str
    shards: tuple[IndexedShard, ...]
    weight: float = 1.0
    """Share of the windows, relative to those of the other sources."""
    max_epochs: float | None = None
    """Passes over its windows after which the source is used up and the others share its place; None repeats it for ever."""

    def __post_init__(self) -> None:
        for field in ("weight", "max_epochs"):
            value = getattr(self, field)
            if not (value is None and field == "max_epochs") and not 0 < value < math.inf:  # NaN is not either
                raise ValueError(f"{field} of source {self.name} is {value}: it must be a positive number")


class TokenStream:
    """An endless iterator over (inputs, targets), each int64 [batch_size, seq_len]; targets are the tokens that follow.

    `sources` are a shard, several shards of one source, or `Source`s. With `documents="separate"` a third tensor, int32
    [batch_size, seq_len], numbers the documents of each row, and targets in another document than their input are -100.
    `pin_memory` gives page-locked tensors, for copies to a GPU that do not block. Raises `ValueError` for shards of different
    tokenizers, for a source without a single window of `seq_len` + 1 tokens, for numbers out of range; and while reading for a token id
    of `vocab_size` or more (by default the size noted with the shards), and when all sources are used up.
    """

    def __init__(
        self,
        sources: IndexedShard | Sequence[IndexedShard] | Sequence[Source],
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        documents: Literal["joined", "separate"] = "joined",
        vocab_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.sources = _as_sources(sources)
        if seq_len < 1 or batch_size < 1:
            raise ValueError(f"seq_len={seq_len} and batch_size={batch_size} must be positive")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must be in 0 ... world - 1, and world is {world}")
        if documents not in ("joined", "separate"):
            raise ValueError(f"documents={documents!r} must be 'joined' or 'separate'")
        self.seq_len, self.batch_size, self.documents = seq_len, batch_size, documents
        self.seed, self.rank, self.world = seed, rank, world
        self.vocab_size = _vocabulary(self.sources) if vocab_size is None else vocab_size
        self.pin_memory = pin_memory
        self.position = 0
        """Windows that all ranks together have taken."""
        self._orders = [_Order(source, seq_len, seed, i) for i, source in enumerate(self.sources)]
        self._mixture = Mixture([source.weight for source in self.sources], [order.limit for order in self._orders])
        self.windows = sum(order.windows for order in self._orders)
        """Windows in an epoch of every source, over all ranks."""
        self.total = self._mixture.total
        """Windows until all sources are used up; None if one never is."""

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        start, step = self.position + self.rank * self.batch_size, self.world * self.batch_size
        self.check_length(self.position + step)
        # Two tensors: a slice of one would not be contiguous, and its copy to a GPU would block.
        shape, pin = (self.batch_size, self.seq_len), self.pin_memory
        inputs, targets = torch.empty(2, *shape, dtype=torch.int64, pin_memory=pin)
        separate = self.documents == "separate"
        documents = torch.empty(*shape, dtype=torch.int32, pin_memory=pin) if separate else None
        for row, (number, index) in enumerate(self._mixture.take(start, self.batch_size)):
            shard, begin = self._orders[number].place(index)
            tokens = shard.tokens[begin : begin + self.seq_len + 1]
            self._check_ids(shard, begin, tokens)
            inputs.numpy()[row], targets.numpy()[row] = tokens[:-1], tokens[1:]
            if documents is not None:
                numbers = shard.document_ids(begin, begin + self.seq_len + 1)
                documents.numpy()[row] = numbers[:-1]
                targets.numpy()[row][numbers[1:] != numbers[:-1]] = IGNORE
        self._announce(self.position, self.position + step)
        self.position += step
        return (inputs, targets) if documents is None else (inputs, targets, documents)

    def check_length(self, windows: int) -> None:
        """Raises `ValueError` if all sources are used up before the stream has given so many windows, counted from its beginning."""
        if self.total is not None and windows > self.total:
            raise ValueError(
                f"the sources hold {self.total:,} sequences of {self.seq_len:,} tokens within their max_epochs, and {windows:,} are "
                "wanted: take fewer steps, raise max_epochs or give more text"
            )

    def _check_ids(self, shard: IndexedShard, begin: int, tokens: npt.NDArray[np.integer]) -> None:
        size = self.vocab_size
        if size is not None and (tokens.max() >= size or tokens.min() < 0):
            at = int(((tokens >= size) | (tokens < 0)).argmax())
            raise ValueError(
                f"{shard.path} holds token id {tokens[at]} at position {begin + at:,}, and the vocabulary has {size:,}: the shard is "
                "damaged or of another tokenizer"
            )

    def _announce(self, before: int, after: int) -> None:
        """Warns once, on the first rank, when a source is used up."""
        phases = self._mixture.phases
        for earlier, phase in zip(phases, phases[1:], strict=False):
            if before < phase.start <= after and self.rank == 0:
                (gone,) = set(earlier.active) - set(phase.active)
                total = math.fsum(self.sources[i].weight for i in phase.active)
                shares = ", ".join(f"{self.sources[i].name} {self.sources[i].weight / total:.1%}" for i in phase.active)
                warnings.warn(
                    f"source {self.sources[gone].name} has been read {self.sources[gone].max_epochs:g} times after {phase.start:,} "
                    f"sequences; the others go on without it: {shares}",
                    stacklevel=3,
                )

    @property
    def epoch(self) -> float:
        """Passes over the data so far, by all ranks together: the mean over the windows of all sources."""
        return self.position / self.windows

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each source so far, by all ranks together."""
        counts = self._mixture.counts(self.position)
        return {s.name: n / order.windows for s, n, order in zip(self.sources, counts, self._orders, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """What continues this stream exactly: the same on every rank. JSON values; its size depends on the number of sources alone."""
        return {
            "position": self.position,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "sources": {source.name: describe(source) for source in self.sources},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises `ValueError`, and changes nothing, if it is of another sequence of windows."""
        own = self.state_dict()
        saved, present = state["sources"], own["sources"]
        differences = [(field, state[field], own[field]) for field in ("seq_len", "seed")]
        differences.append(("sources", ", ".join(saved), ", ".join(present)))
        for name in present:
            for field, value in present[name].items():
                differences.append((f"{name}.{field}", saved.get(name, {}).get(field), value))
        for field, before, now in differences:
            if before != now:
                raise ValueError(
                    f"the data stream was saved with {field}={before} and now has {now}: resume with the same data, weights, "
                    "seq_len and seed, or start a new run"
                )
        self.position = state["position"]


class _Order:
    """The windows of one source, epoch after epoch."""

    def __init__(self, source: Source, seq_len: int, seed: int, number: int) -> None:
        windows = [max(0, shard.count - 1) // seq_len for shard in source.shards]
        self.windows = sum(windows)
        self.limit = None if source.max_epochs is None else int(source.max_epochs * self.windows)
        if not self.windows or self.limit == 0:
            longest = max(source.shards, key=lambda shard: shard.count)
            problem = (
                f"fewer than the {seq_len + 1:,} that seq_len={seq_len} needs: give more text or a smaller seq_len"
                if not self.windows
                else f"and max_epochs={source.max_epochs} of them is not one window: raise it, or leave the source out"
            )
            raise ValueError(f"source {source.name}: {longest.path} holds {longest.count:,} tokens, {problem}")
        self._shards, self._seq_len, self._seed, self._number = source.shards, seq_len, seed, number
        self._first_window = list(itertools.accumulate(windows, initial=0))

    def place(self, index: int) -> tuple[IndexedShard, int]:
        """Shard and first token of the window that comes at `index` of the source's own order."""
        epoch, inside = divmod(index, self.windows)
        window = permute(inside, self.windows, round_keys(self._seed, epoch, self._number))
        shard = bisect.bisect_right(self._first_window, window) - 1
        return self._shards[shard], (window - self._first_window[shard]) * self._seq_len


def describe(source: Source) -> dict[str, Any]:
    """What decides the windows of `source`, as small JSON values; `tokens` is a checksum of its shards' checksums."""
    digest = hashlib.blake2b("".join(shard.checksum for shard in source.shards).encode(), digest_size=16)
    return {"weight": source.weight, "max_epochs": source.max_epochs, "tokens": digest.hexdigest()}


def _as_sources(given: IndexedShard | Sequence[IndexedShard] | Sequence[Source]) -> tuple[Source, ...]:
    parts = (given,) if isinstance(given, IndexedShard) else tuple(given)
    sources = tuple(part for part in parts if isinstance(part, Source))
    if len(sources) != len(parts):
        sources = (Source("text", tuple(part for part in parts if isinstance(part, IndexedShard))),)
    if not sources or not all(source.shards for source in sources):
        raise ValueError("no shard to read: prepare the data first")
    repeated = [source.name for i, source in enumerate(sources) if source.name in [s.name for s in sources[:i]]]
    if repeated:
        raise ValueError(f"two sources are called {repeated[0]}: give each its own name")
    names = {shard.tokenizer for source in sources for shard in source.shards} - {None}
    if len(names) > 1:
        raise ValueError(
            f"the shards are of {len(names)} tokenizers ({', '.join(sorted(map(str, names)))}): prepare all with one"
        )
    return sources


def _vocabulary(sources: Sequence[Source]) -> int | None:
    return next((s.vocab_size for source in sources for s in source.shards if s.vocab_size is not None), None)


def permute(index: int, size: int, keys: Sequence[int]) -> int:
    """Where a pseudo-random permutation of 0 ... `size` - 1, chosen by the 64-bit `keys` of its rounds, sends `index`.

    A batch has few windows: Python's integers are quicker for them than arrays.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=64)
def round_keys(*entropy: int) -> tuple[int, ...]:
    """Keys of a permutation, from numbers that name it."""
    return tuple(np.random.SeedSequence(entropy).generate_state(ROUNDS, np.uint64).tolist())


def _mix(x: int) -> int:
    """The 64-bit finaliser of SplitMix64: every input bit changes every output bit with probability 1/2."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)
