"""Log-probabilities of continuations, in batches.

    log p(c | x) = Σ_i log softmax(l(x, c_1 … c_{i-1}))[c_i],    is_greedy = every c_i is the argmax at its place

The tokens x and c go through the model in one row, without the last one, which predicts nothing. A row longer than the window
loses tokens on its left. Rows are sorted by length, longest first, and padded on the right, which a causal model cannot see;
a batch holds as many rows as its token budget takes. Requests whose rows are equal, such as one-token answers to one
question, share one row. Softmax and sums are FP32 whatever the model computes in.

In FP8 an activation has one scale for a batch, so a score depends a little on the rows beside it; the batches depend on the
requests and on the budget alone, so equal calls give equal scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.formats import NumericsError

BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Tokens of a batch, padding included, by type of device."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Context, at least one token, and continuation, at least one token."""


class Score(NamedTuple):
    """Of one continuation."""

    logprob: float
    """Natural logarithm of its probability."""
    greedy: bool
    """Whether greedy decoding would give it."""


@dataclass(frozen=True)
class Scorer:
    """A causal model that scores; it maps tokens to logits, is in eval mode, on `device`, and sees at most `window` tokens at once."""

    model: nn.Module
    window: int
    batch_tokens: int
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("window", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] on the device → logits [B, T, V]."""
        logits: Tensor = self.model(tokens)
        return logits

    def score(self, pairs: Sequence[Pair], advance: Callable[[int], None] | None = None) -> list[Score]:
        """One score a pair, in their order; `advance` is called with the number of pairs after each batch.

        Raises `ValueError` for an empty context or continuation and one longer than the window, `NumericsError` when
        the model gives a log-probability that is not finite.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if not context or not continuation or len(continuation) > self.window:
                raise ValueError(
                    f"request {number} has {len(context)} tokens of context and {len(continuation)} of continuation: the context "
                    f"must have one or more, the continuation from 1 to the window's {self.window}"
                )
            row = (*context, *continuation)[-(self.window + 1) : -1]
            rows.setdefault(row, []).append(number)
        scores: list[Score | None] = [None] * len(pairs)
        for batch in self._batches(sorted(rows, key=lambda row: (-len(row), row))):
            numbers = [rows[row] for row in batch]
            flat = [number for group in numbers for number in group]
            for number, score in zip(flat, self._score_batch(batch, numbers, pairs), strict=True):
                scores[number] = score
            if advance is not None:
                advance(len(flat))
        return [score for score in scores if score is not None]

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
        """`rows`, longest first, in slices that the budget takes, or of one row."""
        start = 0
        while start < len(rows):
            count = max(1, self.batch_tokens // len(rows[start]))
            yield rows[start : start + count]
            start += count

    def _score_batch(
        self, rows: Sequence[tuple[int, ...]], numbers: list[list[int]], pairs: Sequence[Pair]
    ) -> list[Score]:
        tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
        places: list[int] = []  # of the logits that are needed, in the flattened [B · T]
        spans: list[tuple[int, int]] = []  # of each request's, in `places`
        targets: list[int] = []
        width = tokens.shape[1]
        for i, (row, group) in enumerate(zip(rows, numbers, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            longest = max(len(pairs[number][1]) for number in group)
            places += range(i * width + len(row) - longest, i * width + len(row))
            for number in group:
                continuation = pairs[number][1]
                spans.append((len(places) - len(continuation), len(places)))
                targets += continuation
        logits = self.logits(tokens.to(self.device)).flatten(0, 1)
        index = torch.tensor(places, device=self.device)
        logprobs = logits[index].float().log_softmax(dim=-1)
        chosen = torch.cat([torch.arange(*span) for span in spans]).to(self.device)
        wanted = torch.tensor(targets, device=self.device)
        right = (logprobs.argmax(dim=-1)[chosen] == wanted).split([b - a for a, b in spans])
        values = logprobs[chosen, wanted].split([b - a for a, b in spans])
        sums = torch.stack([part.sum() for part in values]).tolist()
        greedy = torch.stack([part.all() for part in right]).tolist()
        wrong = [value for value in sums if not math.isfinite(value)]
        if wrong:
            raise NumericsError(
                f"the model gives {len(wrong)} of {len(sums)} continuations the log-probability {wrong[0]}: its weights are damaged, "
                "or values overflow; see whether they do with the recipe bf16 and the dtype fp32 too"
            )
        return [Score(*pair) for pair in zip(sums, greedy, strict=True)]
