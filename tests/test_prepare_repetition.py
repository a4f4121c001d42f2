"""Repetition counts as its definition says, on a slow count with strings; real text passes, copies do not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from datatrove.data import Document
from prose import code, prose

from octavo.prepare.ngrams import find_words
from octavo.prepare.repetition import (
    REPETITION_RULES,
    RepetitionFilter,
    RepetitionRules,
    _repeated_characters,
    _top_characters,
    repetition,
)

RULES = RepetitionRules()


def repeated(words, n):
    """Characters in words that an n-gram covers which occurred before, by strings."""
    seen, covered = set(), set()
    for i in range(len(words) - n + 1):
        gram = tuple(words[i : i + n])
        if gram in seen:
            covered.update(range(i, i + n))
        seen.add(gram)
    return sum(len(words[i]) for i in covered)


def top(words, n):
    counts = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    most = max(counts.values(), default=0)
    return 0 if most < 2 else most * max(sum(map(len, gram)) for gram, count in counts.items() if count == most)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_counts_agree_with_their_definition(seed, n):
    rng = random.Random(seed)
    words = [rng.choice(["a", "bb", "ccc", "dddd"][: 2 + seed % 3]) for _ in range(rng.randrange(400))]
    found = find_words(" ".join(words))
    assert _repeated_characters(found, n) == repeated(words, n)
    assert _top_characters(found, n) == top(words, n)


def test_running_text_and_code_pass():
    kept = [repetition(text, RULES) is None for text in prose()]
    assert sum(kept) >= 0.85 * len(kept)  # manuals say some things in the same words
    kept = [repetition(text, REPETITION_RULES["code"]) is None for _, text in code()]
    assert sum(kept) >= 0.97 * len(kept)


def distinct(rng, count):
    return " ".join(f"w{rng.randrange(10**9)}" for _ in range(count))


@pytest.mark.parametrize("seed", range(3))
def test_rules(seed):
    rng = random.Random(seed)
    lines = [distinct(rng, 8) for _ in range(20)]
    assert repetition("\n".join(lines), RULES) is None
    assert repetition("\n\n".join(lines[:5] + lines[:5]), RULES) == "duplicate_paragraphs"
    long = distinct(rng, 60)
    assert repetition("\n\n".join([*lines, long, long]), RULES) == "duplicate_paragraph_characters"
    assert repetition("\n".join(["intro"] * 8 + lines), RULES) is None
    assert repetition("\n".join(["intro"] * 12 + lines), RULES) == "duplicate_lines"
    assert repetition("\n".join([*lines, long, long]), RULES) == "duplicate_line_characters"
    pair = " ".join(f"buy now {distinct(rng, 1)}" for _ in range(40))
    assert repetition(pair, RULES) == "top_2_gram"
    phrase = distinct(rng, 12)
    mixed = " ".join(f"{distinct(rng, 30)} {phrase}" for _ in range(6))
    assert repetition(mixed, RULES) == "duplicate_5_grams"
    loose = RepetitionRules(duplicate_ngrams=((5, 1.0), (10, 0.1)))
    assert repetition(mixed, loose) == "duplicate_10_grams"
    assert repetition("", RULES) is repetition("one", RULES) is repetition("one two three", RULES) is None


def test_filter_judges_by_kind():
    text = "\n".join(["}"] * 30 + [f"call_{i}(x)" for i in range(20)])
    step = RepetitionFilter()
    assert step.filter(Document(text, "0", metadata={"kind": "prose"})) == (False, "duplicate_lines")
    assert step.filter(Document(text, "0", metadata={"kind": "code"})) is True
    assert RepetitionFilter({"code": RULES}).filter(Document(text, "0", metadata={"kind": "prose"})) is True


@pytest.mark.parametrize("fields", [{"duplicate_lines": 2}, {"top_ngrams": ((2, -0.1),)}])
def test_shares_out_of_range(fields):
    with pytest.raises(ValueError, match="shares lie between 0 and 1"):
        RepetitionRules(**fields)


@pytest.mark.parametrize("sizes", [((6, 0.1), (5, 0.1)), ((0, 0.1),)])
def test_sizes_out_of_order(sizes):
    with pytest.raises(ValueError, match="must be positive and ascend"):
        RepetitionRules(duplicate_ngrams=sizes)
