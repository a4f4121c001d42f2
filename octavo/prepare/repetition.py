"""Repetition filter: pages that say the same thing again and again teach a model to do so.

The rules of Gopher (Rae et al. 2021, table A1). A document goes if more than a given share of it lies in

- paragraphs or lines that are copies of an earlier one (by number, and by characters),
- the most frequent n-gram of words, n = 2, 3, 4 (one that occurs once is no repetition),
- n-grams, n = 5 … 10, that occurred before; characters are counted once however many such n-grams cover them.

An (n+1)-gram that occurred before consists of two n-grams that did, so the last share can only fall with n: if that of n = 5 is
under every limit, the others need not be computed. datatrove's GopherRepetitionFilter has the same rules, but needs spaCy for
its words and joins each n-gram to a string; here n-grams are hashes (`octavo.prepare.ngrams`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.ngrams import Words, find_words, ngram_hashes
from octavo.prepare.steps import KindFilter, kind_of


@dataclass(frozen=True)
class RepetitionRules:
    """Largest shares that are accepted, each in [0, 1]; 1 switches a rule off."""

    duplicate_paragraphs: float = 0.30
    duplicate_paragraph_characters: float = 0.20
    duplicate_lines: float = 0.30
    duplicate_line_characters: float = 0.20
    top_ngrams: tuple[tuple[int, float], ...] = ((2, 0.20), (3, 0.18), (4, 0.16))
    """(n, largest share of the most frequent n-gram)."""
    duplicate_ngrams: tuple[tuple[int, float], ...] = (
        (5, 0.15),
        (6, 0.14),
        (7, 0.13),
        (8, 0.12),
        (9, 0.11),
        (10, 0.10),
    )
    """(n, largest share of repeated n-grams), n ascending."""

    def __post_init__(self) -> None:
        shares = [self.duplicate_paragraphs, self.duplicate_paragraph_characters, self.duplicate_lines]
        shares += [self.duplicate_line_characters]
        shares += [share for _, share in self.top_ngrams + self.duplicate_ngrams]
        if bad := [share for share in shares if not 0 <= share <= 1]:
            raise ValueError(f"a repetition rule accepts a share of {bad[0]}: shares lie between 0 and 1")
        sizes = [n for n, _ in self.duplicate_ngrams]
        if sizes != sorted(set(sizes)) or any(n < 1 for n, _ in self.top_ngrams + self.duplicate_ngrams):
            raise ValueError(f"n-gram sizes {sizes} of a repetition rule must be positive and ascend")


REPETITION_RULES: dict[str, RepetitionRules] = {
    "prose": RepetitionRules(),
    # a turn takes up what an earlier one said: drafts, corrected code, lists that grow
    "dialogue": RepetitionRules(
        duplicate_paragraphs=0.5,
        duplicate_paragraph_characters=0.4,
        duplicate_lines=0.5,
        duplicate_line_characters=0.4,
        duplicate_ngrams=((5, 0.50), (10, 0.40)),
    ),
    # tables and entries share their form: short lines and formulas come back without being noise
    "reference": RepetitionRules(
        duplicate_lines=0.5,
        duplicate_line_characters=0.3,
        duplicate_ngrams=((5, 0.40), (8, 0.30), (10, 0.25)),
    ),
    # closing brackets, imports and signatures repeat in good code; whole copied blocks do not
    "code": RepetitionRules(
        duplicate_paragraphs=0.5,
        duplicate_paragraph_characters=0.4,
        duplicate_lines=1.0,
        duplicate_line_characters=0.5,
        top_ngrams=((4, 0.30),),
        duplicate_ngrams=((10, 0.50),),
    ),
}


class RepetitionFilter(KindFilter):
    """Drops documents that repeat themselves more than the rules of their kind allow; kinds without rules pass."""

    name = "repetition"

    def __init__(
        self, rules: Mapping[str, RepetitionRules] | None = None, exclusion_writer: DiskWriter | None = None
    ) -> None:
        self.rules = dict(REPETITION_RULES if rules is None else rules)
        super().__init__(self.rules, exclusion_writer)

    def reason(self, doc: Document) -> str | None:
        return repetition(doc.text, self.rules[kind_of(doc)])


def repetition(text: str, rules: RepetitionRules) -> str | None:
    """The first rule that `text` breaks, or None."""
    for unit, pieces in (("paragraph", text.split("\n\n")), ("line", text.split("\n"))):
        pieces = [piece for piece in map(str.strip, pieces) if piece]
        count, characters = _copies(pieces)
        if count > getattr(rules, f"duplicate_{unit}s") * len(pieces):
            return f"duplicate_{unit}s"
        if characters > getattr(rules, f"duplicate_{unit}_characters") * len(text):
            return f"duplicate_{unit}_characters"
    words = find_words(text)
    for n, share in rules.top_ngrams:
        if _top_characters(words, n) > share * len(text):
            return f"top_{n}_gram"
    lowest = min((share for _, share in rules.duplicate_ngrams), default=1.0) * len(text)
    for n, share in rules.duplicate_ngrams:
        characters = _repeated_characters(words, n)
        if characters > share * len(text):
            return f"duplicate_{n}_grams"
        if characters <= lowest:
            return None
    return None


def _copies(pieces: list[str]) -> tuple[int, int]:
    """Number and characters of the pieces that equal an earlier one."""
    distinct = set(pieces)
    return len(pieces) - len(distinct), sum(map(len, pieces)) - sum(map(len, distinct))


def _top_characters(words: Words, n: int) -> int:
    """Characters in the words of the most frequent n-gram, times its occurrences; 0 if none occurs twice. Ties: the longest."""
    grams = ngram_hashes(words.hashes, n)
    if not len(grams):
        return 0
    ordered = np.sort(grams)
    edges = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    counts = np.diff(np.append(edges, len(ordered)))
    most = counts.max()
    if most < 2:
        return 0
    at = np.isin(grams, ordered[edges[counts == most]])
    lengths = np.convolve(words.ends - words.starts, np.ones(n, dtype=np.int64), mode="valid")
    return int(lengths[at].max() * most)


def _repeated_characters(words: Words, n: int) -> int:
    """Characters in words that an n-gram covers which occurred before."""
    grams = ngram_hashes(words.hashes, n)
    order = np.argsort(grams, kind="stable")  # stable: among equal hashes the first is the earliest
    again = order[1:][grams[order[1:]] == grams[order[:-1]]]
    if not len(again):
        return 0
    change = np.zeros(len(words.hashes) + 1, dtype=np.int64)
    change[again] += 1
    change[again + n] -= 1  # positions in `again` are distinct, so neither sum meets one twice
    covered = np.cumsum(change[:-1]) > 0
    return int((words.ends - words.starts)[covered].sum())
