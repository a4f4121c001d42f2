"""Perplexity of a text, and loss on held-out tokens.

    nll = -Σ_d Σ_i log p(t_i | the tokens before t_i in the window that predicts it),    over documents d and their tokens t_1 … t_n

    token perplexity = exp(nll / tokens)      word perplexity = exp(nll / words)      bits per byte = nll / (bytes · ln 2)

Windows of `window` tokens move by `stride`: the first predicts all of its tokens, the others their last `stride`, so that every
token is predicted once and, after the first window, from at least window - stride + 1 tokens (the very first token of a document from the
beginning- or end-of-text token). stride = window is fastest; a smaller one gives more context and a lower perplexity. Words are what
`str.split` gives, bytes are UTF-8.

The loss of a prepared corpus is the mean over the tokens of windows back to back, across documents, as training with
`data.documents=joined` reports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.data.indexed import token_dtype
from octavo.data.long_texts import encode_pieces
from octavo.evaluate.codec import Codec
from octavo.evaluate.models import LoadedModel
from octavo.evaluate.scoring import Pair, Scorer

CHUNK = 512
"""Windows that are sorted by length and scored together: enough to fill batches, and a bounded amount of memory."""


@dataclass(frozen=True)
class TextLoss:
    """Of a text, document after document."""

    documents: int
    tokens: int
    words: int
    bytes: int
    windows: list[tuple[float, int]]
    """(-log-probability in nats, tokens predicted) of each window."""

    @property
    def nll(self) -> float:
        """-log-probability of the whole text, in nats."""
        return math.fsum(loss for loss, _ in self.windows)

    @property
    def metrics(self) -> dict[str, float]:
        """`loss` in nats a token, and the perplexities of the module's head."""
        return {
            "loss": self.nll / self.tokens,
            "token_perplexity": _exp(self.nll / self.tokens),
            "word_perplexity": _exp(self.nll / max(self.words, 1)),
            "bits_per_byte": self.nll / (self.bytes * math.log(2)),
        }


def text_loss(
    loaded: LoadedModel,
    documents: Iterable[str],
    *,
    stride: int | None = None,
    limit: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> TextLoss:
    """The loss of `loaded` on `documents`; `stride` None is the window, `limit` stops after so many windows.

    A document that the limit cuts counts with the tokens that were predicted and the share of words and bytes that they are; it is
    tokenized as far as that takes, piece by piece (see `octavo.data.long_texts`).
    Raises `ValueError` for a stride that is not in 1 … window and for a text without tokens.
    """
    window, codec = loaded.scorer.window, loaded.codec
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(f"the stride is {stride}: it must be from 1 to the window of {window} tokens")
    prefix = codec.eos if codec.bos is None else codec.bos
    texts: list[npt.NDArray[Any]] = []
    plan: list[tuple[int, int, int]] = []  # document, first and last + 1 of the tokens to predict
    words = size = tokens = 0
    for text in documents:
        wanted = None if limit is None else window + (limit - len(plan) - 1) * stride
        ids, some_words, some_bytes = _encode(codec, text, wanted)
        if len(ids):
            plan += [(len(texts), *span) for span in windows(len(ids), window, stride)]
            words, size, tokens = words + some_words, size + some_bytes, tokens + len(ids)
            texts.append(ids)
        if limit is not None and len(plan) >= limit:
            break
    if not tokens:
        raise ValueError("the text has no token: there is nothing to predict")
    losses: list[tuple[float, int]] = []
    for start in range(0, len(plan), CHUNK):
        pairs = []
        for document, first, last in plan[start : start + CHUNK]:
            ids = texts[document]
            before = max(0, last - window - 1)
            context = ids[before:first].tolist()
            pairs.append((context if last > window else [prefix, *context], ids[first:last].tolist()))
        losses += _losses(loaded.scorer, pairs)
        advance(len(losses), len(plan))
    return TextLoss(len(texts), tokens, words, size, losses)


def _encode(codec: Codec, text: str, wanted: int | None) -> tuple[npt.NDArray[Any], int, int]:
    """(the first `wanted` ids of `text`, or all; its words; its bytes), of the piece that the limit cuts the share of the ids."""
    taken: list[npt.NDArray[Any]] = []
    words = size = tokens = 0
    last = " "
    for piece, ids in encode_pieces(lambda part: codec.encode(part, special=False), text, token_dtype(codec.size)):
        taken.append(ids if wanted is None else ids[: wanted - tokens])
        tokens += len(taken[-1])
        share = len(taken[-1]) / max(len(ids), 1)
        begins_inside = not last.isspace() and not piece[:1].isspace()  # a word that was counted with the piece before
        words += round(share * (len(piece.split()) - begins_inside))
        size += round(share * len(piece.encode()))
        last = piece[-1:]
        if tokens == wanted:
            break
    return np.concatenate(taken), words, size


def windows(count: int, window: int, stride: int) -> Iterable[tuple[int, int]]:
    """(first, last + 1) of the tokens that each window predicts, of a document of `count` tokens."""
    first = 0
    while first < count:
        last = min(count, first + (stride if first else window))
        yield first, last
        first = last


def token_loss(
    scorer: Scorer,
    tokens: npt.NDArray[np.integer],
    *,
    limit: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[float, int]]:
    """(-log-probability in nats, tokens predicted) of each window of `window` + 1 of `tokens`, back to back, the first `limit`.

    Neighbours share a token, so every token but the first is predicted once; a rest shorter than a window is left out, as in
    training. Raises `ValueError` for fewer tokens than one window needs.
    """
    count = (len(tokens) - 1) // scorer.window
    if count < 1:
        raise ValueError(
            f"{len(tokens):,} tokens are fewer than the {scorer.window + 1:,} of one window: use a smaller --window"
        )
    count = count if limit is None else min(count, limit)
    losses: list[tuple[float, int]] = []
    for start in range(0, count, CHUNK):
        pairs = []
        for number in range(start, min(count, start + CHUNK)):
            begin = number * scorer.window
            ids = np.asarray(tokens[begin : begin + scorer.window + 1]).tolist()
            pairs.append((ids[:1], ids[1:]))
        losses += _losses(scorer, pairs)
        advance(len(losses), count)
    return losses


def _losses(scorer: Scorer, pairs: Sequence[Pair]) -> list[tuple[float, int]]:
    scores = scorer.score(pairs)
    return [(-score.logprob, len(pair[1])) for score, pair in zip(scores, pairs, strict=True)]


def _exp(value: float) -> float:
    """exp, and infinity where a double ends."""
    return math.exp(value) if value < 700 else math.inf
