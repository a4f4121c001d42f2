"""Perplexity filter: text whose words follow each other as those of reference text do, by a trigram model.

Interpolated Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999). With c the counts of the highest order and, in
lower orders, the number of distinct words seen before an n-gram:

    p(w | h) = max(c(hw) − D, 0) / c(h·) + γ(h) p(w | h'),     γ(h) = D · N₁₊(h·) / c(h·),     D = n₁ / (n₁ + 2 n₂),

where h' is h without its first word, N₁₊(h·) the number of distinct words after h, n₁ and n₂ the numbers of n-grams counted once
and twice. The lowest order interpolates with a uniform distribution. A word that the reference has only once counts as unknown;
the probability of "unknown" is shared evenly among as many words as there were such, so that gibberish is not cheap.

The tables hold log p for every n-gram that was seen and log γ for every context, keyed by hash (`octavo.prepare.ngrams`); for one
that was not seen, p(w | h) = γ(h) p(w | h'). Scoring a text is three look-ups a word, all words at once. No library on the Python
Package Index both trains and queries such models without a compiler; KenLM's models are made by a program of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.ngrams import HashTable, ngram_hashes, word_hashes
from octavo.prepare.reference import limit_at, load_model, percentiles, save_model, segments, split_held_out
from octavo.prepare.steps import KindFilter

ORDER = 3
VERSION = 1
MOST_WORDS = 20_000_000
"""Words of reference text that are read: some 120 MB of English, which make tables of about 300 MB."""
UNKNOWN = np.uint64(0)
START = np.uint64(1)
"""Hashes that stand for unknown words and for the beginning of a text; those of real words are scattered over 64 bits."""
FLOOR = -100.0
"""log p of what is never predicted, the beginning of a text."""


def train_perplexity(documents: Iterable[str], out: str | Path) -> dict[str, Any]:
    """Trains a model on reference text and writes it into the folder `out`. Returns its settings.

    Raises `ValueError` if there is too little text for quantiles.
    """
    train, held_out = split_held_out(segments(documents, MOST_WORDS), "reference text of the perplexity filter")
    arrays, settings = fit(train)
    model = NgramModel(arrays, settings)
    settings |= {
        "format": f"octavo-perplexity-{VERSION}",
        "words": int(sum(map(len, train))),
        "held_out_segments": len(held_out),
        "percentiles": percentiles(model.score_words(words) for words in held_out),
    }
    save_model(Path(out), "perplexity", arrays, settings)
    return settings


class PerplexityFilter(KindFilter):
    """Drops documents of higher perplexity than the reference text has at `quantile`. Adds "perplexity" to the metadata."""

    name = "perplexity"

    def __init__(
        self,
        model: str | Path,
        quantile: float = 0.95,
        kinds: Collection[str] = ("prose",),
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        """`model`: a folder that `train_perplexity` wrote. Raises `ValueError` if it holds no such model."""
        super().__init__(kinds, exclusion_writer)
        self.model = str(model)
        self.limit = limit_at(load_perplexity(self.model).settings, quantile)

    def reason(self, doc: Document) -> str | None:
        score = load_perplexity(self.model).score(doc.text)
        doc.metadata["perplexity"] = round(float(np.exp(min(score, 50.0))), 1)
        return None if score <= self.limit else "perplexity"


@lru_cache(maxsize=2)
def load_perplexity(folder: str) -> NgramModel:
    """The model in a folder, loaded once per process. Raises `ValueError` naming a file that is missing or damaged."""
    arrays, settings = load_model(folder, "perplexity", VERSION)
    try:
        return NgramModel(arrays, settings)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{Path(folder) / 'perplexity.npz'} holds no perplexity model ({error}): train it again"
        ) from None


class NgramModel:
    """Tables of log probabilities (natural logarithm, float32) of the n-grams of orders 1 to 3, and of log γ of contexts."""

    def __init__(self, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        self.settings = settings
        self.tables = [HashTable(arrays[f"keys{n}"]) for n in range(1, ORDER + 1)]
        self.log_p = [arrays[f"log_p{n}"] for n in range(1, ORDER + 1)]
        self.log_gamma = [arrays[f"log_gamma{n}"] for n in range(1, ORDER)]
        if any(len(table.keys) != len(values) for table, values in zip(self.tables, self.log_p, strict=True)):
            raise ValueError("its tables differ in length")
        self.unknown = int(self.tables[0].find(np.array([UNKNOWN]))[0])
        self.log_unknown_words = float(np.log(settings["unknown_words"]))

    def score(self, text: str) -> float:
        """Mean negative log probability of a word of `text`, in nats: the logarithm of its perplexity. Infinite without words."""
        return self.score_words(word_hashes(text))

    def score_words(self, words: np.ndarray) -> float:
        return float(-self.log_probabilities(words).mean()) if len(words) else float("inf")

    def log_probabilities(self, words: np.ndarray) -> np.ndarray:
        """float32 [n]: log p of each of the n words (hashes) after those before it."""
        tokens = np.concatenate([[START] * (ORDER - 1), words]).astype(np.uint64)
        at = self.tables[0].find(tokens)
        is_unknown = at < 0
        tokens = np.where(is_unknown, UNKNOWN, tokens)
        found = np.where(is_unknown, self.unknown, at)
        log_p = self.log_p[0][found]
        for n in range(2, ORDER + 1):
            context = found[:-1]  # the n-1 tokens before: the (n-1)-gram that ends one earlier
            backed_off = log_p[1:] + np.where(context >= 0, self.log_gamma[n - 2][context], np.float32(0))
            found = self.tables[n - 1].find(ngram_hashes(tokens, n))
            log_p = np.where(found >= 0, self.log_p[n - 1][found], backed_off)
        return log_p - np.where(is_unknown[ORDER - 1 :], np.float32(self.log_unknown_words), np.float32(0))


def fit(parts: list[np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tables, settings) of a model of the texts whose word hashes are `parts`."""
    start = np.full(ORDER - 1, START)
    tokens = np.concatenate([array for part in parts for array in (start, part)])
    distinct, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    rare = (counts == 1) & (distinct != START)
    unknown_words = max(1, int(rare.sum()))
    tokens = np.where(rare[inverse], UNKNOWN, tokens)
    predicted = np.flatnonzero(tokens != START)

    # what ends at each predicted token, from the highest order down: n-grams, contexts and how often each n-gram counts
    arrays: dict[str, np.ndarray] = {}
    grams = {n: np.append(np.zeros(n - 1, dtype=np.uint64), ngram_hashes(tokens, n)) for n in range(1, ORDER + 1)}
    grams[1] = tokens
    ends, weights = predicted, np.ones(len(predicted), dtype=np.int64)
    seen: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for n in range(ORDER, 0, -1):
        keys, first, inverse = np.unique(grams[n][ends], return_index=True, return_inverse=True)
        seen[n] = keys, ends[first], np.bincount(inverse, weights=weights).astype(np.int64)
        ends, weights = ends[first], np.ones(len(keys), dtype=np.int64)  # a lower order counts distinct n-grams

    keys, ends, counts = seen[1]
    if UNKNOWN not in keys:  # no word came once: "unknown" still gets its share of the uniform part
        keys, ends, counts = np.append(UNKNOWN, keys), np.append(0, ends), np.append(0, counts)
    discount = _discount(counts)
    total = counts.sum()
    kept = np.maximum(counts - discount, 0)
    p = kept / total + (1 - kept.sum() / total) / len(keys)
    arrays["keys1"], order = np.unique(np.append(keys, START), return_index=True)
    arrays["log_p1"] = np.append(np.log(p), FLOOR)[order].astype(np.float32)
    p_of = HashTable(arrays["keys1"]), np.append(p, 0.0)[order]
    for n in range(2, ORDER + 1):
        keys, ends, counts = seen[n]
        discount = _discount(counts)
        contexts, of_context = np.unique(grams[n - 1][ends - 1], return_inverse=True)
        totals = np.bincount(of_context, weights=counts)
        gammas = discount * np.bincount(of_context) / totals
        lower = p_of[1][p_of[0].find(grams[n - 1][ends])]
        p = (counts - discount) / totals[of_context] + gammas[of_context] * lower
        below = arrays[f"keys{n - 1}"]
        missing = np.setdiff1d(contexts, below)  # the beginning of a text is a context and never predicted
        if len(missing):
            below, order = np.unique(np.append(below, missing), return_index=True)
            arrays[f"log_p{n - 1}"] = np.append(arrays[f"log_p{n - 1}"], np.full(len(missing), FLOOR, np.float32))[
                order
            ]
            arrays[f"keys{n - 1}"] = below
        log_gamma = np.zeros(len(below), dtype=np.float32)
        log_gamma[np.searchsorted(below, contexts)] = np.log(gammas)
        arrays[f"log_gamma{n - 1}"] = log_gamma
        arrays[f"keys{n}"], arrays[f"log_p{n}"] = keys, np.log(p).astype(np.float32)
        p_of = HashTable(keys), p
    return arrays, {"order": ORDER, "unknown_words": unknown_words, "ngrams": [len(seen[n][0]) for n in sorted(seen)]}


def _discount(counts: np.ndarray) -> float:
    """D = n₁ / (n₁ + 2 n₂), between 0.1 and 0.9 for counts of too little text."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return float(np.clip(once / (once + 2 * twice), 0.1, 0.9)) if once else 0.5
