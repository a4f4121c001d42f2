"""Quality rules: is this text written by people for people?

The heuristics of Gopher (Rae et al. 2021, appendix A.1.1), by words between white space: how many, how long on average, how
many with a letter; hash signs and ellipses per word; lines that begin as list items or end in an ellipsis; and at least two of
eight frequent English words. They drop menus, tables of numbers, link lists, cut-off teasers and lists of keywords. Other kinds
of documents than prose are judged by looser rules; source code has its own (`octavo.prepare.code`).

datatrove's GopherQualityFilter has such rules too, but needs spaCy to find words, at a tenth of the speed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.steps import KindFilter, kind_of

STOP_WORDS = frozenset("the be to of and that have with".split())
BULLETS = ("•", "-", "*", "‣", "◦", "·")
ELLIPSES = ("...", "…")
LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True)
class QualityRules:
    """Bounds, all inclusive. A share is in [0, 1]."""

    min_words: int = 50
    max_words: int = 1_000_000
    """Gopher has 100,000, which would drop every book."""
    min_word_length: float = 3.0
    """Mean number of characters of the words."""
    max_word_length: float = 10.0
    max_symbols: float = 0.1
    """Hash signs per word, and ellipses per word."""
    max_bullet_lines: float = 0.9
    """Share of the lines that begin with a list mark."""
    max_ellipsis_lines: float = 0.3
    """Share of the lines that end with an ellipsis."""
    min_letter_words: float = 0.8
    """Share of the words that have a letter."""
    min_stop_words: int = 2
    """How many of "the be to of and that have with" must occur; 0 for languages other than English."""

    def __post_init__(self) -> None:
        if self.min_words > self.max_words or self.min_word_length > self.max_word_length:
            raise ValueError(
                f"quality rules ask for {self.min_words} to {self.max_words} words of {self.min_word_length} to "
                f"{self.max_word_length} characters: no text has that"
            )


QUALITY_RULES: dict[str, QualityRules] = {
    "prose": QualityRules(),
    "dialogue": QualityRules(min_words=20, min_letter_words=0.6, min_stop_words=1),
    "reference": QualityRules(min_words=20, min_word_length=2.0, min_letter_words=0.5, min_stop_words=1),
}


class QualityFilter(KindFilter):
    """Drops documents that break the rules of their kind; kinds without rules (code, unless given) pass."""

    name = "quality"

    def __init__(
        self, rules: Mapping[str, QualityRules] | None = None, exclusion_writer: DiskWriter | None = None
    ) -> None:
        self.rules = dict(QUALITY_RULES if rules is None else rules)
        super().__init__(self.rules, exclusion_writer)

    def reason(self, doc: Document) -> str | None:
        return quality(doc.text, self.rules[kind_of(doc)])


def quality(text: str, rules: QualityRules) -> str | None:
    """The first rule that `text` breaks, or None."""
    words = text.split()
    if len(words) < max(1, rules.min_words):
        return "few_words"
    if len(words) > rules.max_words:
        return "many_words"
    length = sum(map(len, words)) / len(words)
    if length < rules.min_word_length:
        return "short_words"
    if length > rules.max_word_length:
        return "long_words"
    if max(text.count("#"), sum(map(text.count, ELLIPSES))) > rules.max_symbols * len(words):
        return "symbols"
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if sum(line.startswith(BULLETS) for line in lines) > rules.max_bullet_lines * len(lines):
        return "bullets"
    if sum(line.endswith(ELLIPSES) for line in lines) > rules.max_ellipsis_lines * len(lines):
        return "ellipses"
    if sum(word.isalpha() or bool(LETTER.search(word)) for word in words) < rules.min_letter_words * len(words):
        return "few_letters"
    if len(STOP_WORDS.intersection(map(str.lower, words))) < rules.min_stop_words:
        return "few_stop_words"
    return None
