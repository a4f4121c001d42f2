"""Batches from token shards: shuffled without a shuffle buffer, split over ranks, resumable to the token.

A *window* is `seq_len` + 1 consecutive tokens of one shard; neighbours share a token, so every token but a shard's first is
a target once an epoch (a rest shorter than a window is left out). An epoch visits every window once, in an order that is a
permutation computed where it is needed: four Feistel rounds over 2k bits, repeated while the result lies outside the number
of windows (cycle walking). It takes no memory, and the window at any position of any epoch is known without the ones before.

All ranks walk one global sequence of windows, epoch after epoch: of the `world` x `batch_size` windows at global position p,
rank r takes the r-th `batch_size`. The state is p alone, so a run continues exactly, also on another number of ranks or with
another batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.data.indexed import IndexedShard

ROUNDS = 4


class TokenStream:
    """An endless iterator over (inputs, targets), each int64 [batch_size, seq_len]; targets are the tokens that follow.

    `pin_memory` gives page-locked tensors, for copies to a GPU that do not block. Raises `ValueError` for shards of different
    tokenizers, without a single window of `seq_len` + 1 tokens, or numbers out of range.
    """

    def __init__(
        self,
        shards: IndexedShard | Sequence[IndexedShard],
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self.shards = (shards,) if isinstance(shards, IndexedShard) else tuple(shards)
        if not self.shards:
            raise ValueError("no shard to read: prepare the data first")
        if seq_len < 1 or batch_size < 1:
            raise ValueError(f"seq_len={seq_len} and batch_size={batch_size} must be positive")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must be in 0 ... world - 1, and world is {world}")
        names = {shard.tokenizer for shard in self.shards}
        if len(names) > 1:
            raise ValueError(
                f"the shards are of {len(names)} tokenizers ({', '.join(sorted(map(str, names)))}): prepare all with one"
            )
        windows = [max(0, shard.count - 1) // seq_len for shard in self.shards]
        self.windows = sum(windows)
        """Windows in an epoch, over all ranks."""
        if self.windows == 0:
            longest = max(shard.count for shard in self.shards)
            raise ValueError(
                f"{self.shards[0].path} holds {longest:,} tokens, fewer than the {seq_len + 1:,} that seq_len={seq_len} needs: "
                "give more text or a smaller seq_len"
            )
        self.seq_len, self.batch_size = seq_len, batch_size
        self.seed, self.rank, self.world = seed, rank, world
        self.pin_memory = pin_memory
        self.position = 0
        """Windows that all ranks together have taken."""
        self._first_window = np.cumsum([0, *windows])

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        start = self.position + self.rank * self.batch_size
        self.position += self.world * self.batch_size
        # Two tensors: a slice of one would not be contiguous, and its copy to a GPU would block.
        inputs, targets = torch.empty(2, self.batch_size, self.seq_len, dtype=torch.int64, pin_memory=self.pin_memory)
        for row, window in enumerate(self._windows_at(start, self.batch_size)):
            shard = int(np.searchsorted(self._first_window, window, side="right")) - 1
            begin = int(window - self._first_window[shard]) * self.seq_len
            tokens = self.shards[shard].tokens[begin : begin + self.seq_len + 1]
            inputs.numpy()[row], targets.numpy()[row] = tokens[:-1], tokens[1:]
        return inputs, targets

    def _windows_at(self, start: int, count: int) -> list[int]:
        """The windows at global positions `start` ... `start + count - 1`."""
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs, indices = np.divmod(positions, self.windows)
        windows: list[int] = []
        for epoch in np.unique(epochs):
            windows += permute(indices[epochs == epoch], self.windows, (self.seed, int(epoch))).tolist()
        return windows

    @property
    def epoch(self) -> float:
        """Passes over the data so far, by all ranks together."""
        return self.position / self.windows

    def state_dict(self) -> dict[str, Any]:
        """What continues this stream exactly: the same on every rank."""
        return {
            "position": self.position,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shards": [shard.checksum for shard in self.shards],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises `ValueError`, and changes nothing, if it is of another sequence of windows."""
        own = self.state_dict()
        for field in ("shards", "seq_len", "seed"):
            if state[field] != own[field]:
                raise ValueError(
                    f"the data stream was saved with {field}={state[field]} and now has {own[field]}: "
                    "resume with the same data, seq_len and seed, or start a new run"
                )
        self.position = state["position"]


def permute(indices: npt.NDArray[np.int64], size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Where a pseudo-random permutation of 0 ... `size` - 1, chosen by `key`, sends each of `indices`."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= size
    return result.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser of SplitMix64: every input bit changes every output bit with probability 1/2."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
