"""Hashes of words and n-grams say the same as the words themselves, whatever lies around them and however long the text."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest

from octavo.prepare import ngrams
from octavo.prepare.ngrams import HashTable, find_words, mix, ngram_hashes, word_hashes

ALPHABET = "abcXYZ019_ \n\t.,;-'’“”äÖßéñ中文кИ😀\u0301#"


def words_of(text):
    """The words by their definition, one character after the other."""
    marked = ["\0" if not (c == "_" or ord(c) > 0xFFFE or unicodedata.category(c)[0] in "LNM") else c for c in text]
    return [match.span() for match in re.finditer("[^\0]+", "".join(marked))]


def lower(word):
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in word)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("block", [16, 1 << 16])
def test_words_are_where_their_definition_says_and_equal_ones_hash_equally(seed, block, monkeypatch):
    monkeypatch.setattr(ngrams, "BLOCK", block)
    rng = random.Random(seed)
    text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 3000)))
    found = find_words(text)
    spans = words_of(text)
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == spans
    hashes: dict[str, int] = {}
    for (start, end), value in zip(spans, found.hashes.tolist(), strict=True):
        assert hashes.setdefault(lower(text[start:end]), value) == value
    assert len(set(hashes.values())) == len(hashes)


def test_hashes_do_not_depend_on_the_place_and_never_change():
    """The values are part of the files of models and indices."""
    first = word_hashes("the")
    for text in ("a the", "x" * 100_000 + " The!", "ÄÖÜ " * 50_000 + "THE"):
        assert word_hashes(text)[-1] == first[0]
    assert word_hashes("The quick, brown").tolist() == [308115383027198266, 5574776914754616019, 11707904543778174082]
    assert ngram_hashes(word_hashes("The quick, brown"), 2).tolist() == [10634406713210650715, 14003918109688913451]


def test_texts_without_words():
    for text in ("", " \n", "... --- !!!"):
        assert len(word_hashes(text)) == len(ngram_hashes(word_hashes(text), 3)) == 0
    assert len(word_hashes("\ud83d half a character")) == 3


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_ngrams_are_equal_where_their_words_are(n):
    rng = random.Random(n)
    words = [rng.choice("abc") for _ in range(2000)]
    hashes = ngram_hashes(word_hashes(" ".join(words)), n)
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes.tolist(), strict=True))) == len(set(grams)) == len(set(hashes.tolist()))


def test_ngrams_of_different_length_differ():
    words = word_hashes("a b c d e f g h")
    seen = np.concatenate([ngram_hashes(words, n) for n in range(1, 9)])
    assert len(np.unique(seen)) == len(seen)


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 100_000])
def test_table_finds_every_key_and_nothing_else(count):
    rng = np.random.default_rng(count)
    keys = np.unique(mix(rng.integers(0, 1 << 63, count, dtype=np.uint64)))
    if count == 1000:
        keys = np.unique(np.concatenate([keys, np.arange(50, dtype=np.uint64), ~np.arange(50, dtype=np.uint64)]))
    table = HashTable(keys)
    order = rng.permutation(len(keys))
    assert (table.find(keys[order]) == order).all()
    others = np.setdiff1d(mix(rng.integers(0, 1 << 63, 5000, dtype=np.uint64)), keys)
    assert (table.find(others) == -1).all()


@pytest.mark.parametrize("keys", [[3, 2], [2, 2]])
def test_table_refuses_keys_out_of_order(keys):
    with pytest.raises(ValueError, match="not sorted"):
        HashTable(np.array(keys, dtype=np.uint64))
