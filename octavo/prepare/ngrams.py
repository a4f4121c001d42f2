"""Words and n-grams of a text as 64-bit hashes, by NumPy, some 20 MB of text a second: what the filters count and look up.

A *word* is a maximal run of letters, digits and marks (Unicode categories L, N, M) or underscores, in lower case; everything
else separates. "Don't" is `don`, `t`, however its apostrophe is written. Scripts without spaces give one word a phrase.

Let c_0 … c_{m-1} be the code points of a word. Its hash is mix(Σ_j code(c_j) B^j mod 2^64) with B odd, where code() scatters
code points over 64 bits and mix() is an invertible finaliser. The sum over a word is a difference of two prefix sums divided by
B^start, which is exact as B is invertible modulo 2^64; so all words of a text cost a few passes over an array. An n-gram hashes
likewise over the hashes of its words. Two different n-grams out of N collide with a probability of about N^2 / 2^65: 3e-6 for
ten million. The hashes are part of file formats: changing them makes older files useless.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import NamedTuple

import numpy as np

BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
NGRAM_BASE = 0xD1342543DE82EF95
BLOCK = 1 << 16
"""Code points hashed at once: the arrays stay in the processor's cache and the tables of powers small."""


class Words(NamedTuple):
    """The n words of a text."""

    hashes: np.ndarray
    """uint64 [n]."""
    starts: np.ndarray
    """int64 [n], index of each word's first character in the text."""
    ends: np.ndarray
    """int64 [n], index after its last."""


def find_words(text: str) -> Words:
    """The words of `text`, see the module's text."""
    raw = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    lower, is_word = _tables()
    known = np.minimum(raw, len(lower) - 1) if raw.size and raw.max() >= len(lower) else raw
    inside = np.empty(raw.size + 2, dtype=bool)
    inside[0] = inside[-1] = False
    inside[1:-1] = is_word[known]
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    codes = lower[known] if known is raw else np.where(raw < len(lower), lower[known], raw)
    hashes = np.empty(len(starts), dtype=np.uint64)
    first = 0
    while first < len(starts):  # blocks of whole words; a word longer than a block makes a block of its own
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + BLOCK, side="right")))
        begin, end = int(starts[first]), int(ends[last - 1])
        hashes[first:last] = _span_hashes(codes[begin:end], starts[first:last] - begin, ends[first:last] - begin)
        first = last
    return Words(hashes, starts, ends)


def word_hashes(text: str) -> np.ndarray:
    """uint64 [n]: the hashes of the n words of `text`."""
    return find_words(text).hashes


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """uint64 [len(words) - n + 1], empty if there are fewer than n words: the hash of each n consecutive words."""
    count = max(0, len(words) - n + 1)
    total = np.zeros(count, dtype=np.uint64)
    for position in range(n):  # Horner's rule, so that the order of the words counts
        total *= np.uint64(NGRAM_BASE)
        total += words[position : position + count]
    return mix(total + np.uint64(n))


def mix(values: np.ndarray) -> np.ndarray:
    """An invertible scrambling of uint64, in which every input bit moves every output bit."""
    values = values ^ (values >> np.uint64(32))
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


class HashTable:
    """Positions of hashes in a sorted array: found by a table of the leading bits, then a step or two along the array."""

    def __init__(self, keys: np.ndarray) -> None:
        """`keys`: uint64 [n], ascending, without repeats. Raises `ValueError` if they are not."""
        if keys.dtype != np.uint64 or keys.ndim != 1 or not bool((keys[1:] > keys[:-1]).all()):
            raise ValueError("hashes are not sorted: the file is damaged or was written by something else")
        self.keys = keys
        bits = max(1, int(len(keys)).bit_length())
        self.shift = np.uint64(64 - bits)
        bounds = np.arange(1 << bits, dtype=np.uint64) << self.shift
        self.first = np.append(np.searchsorted(keys, bounds), len(keys)).astype(np.int32)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int64, the shape of `hashes`: the index of each in `keys`, or -1."""
        found = np.full(len(hashes), -1, dtype=np.int64)
        bucket = (hashes >> self.shift).astype(np.int64)
        at, end = self.first[bucket], self.first[bucket + 1]
        left = np.flatnonzero(at < end)
        at, end, wanted = at[left], end[left], hashes[left]
        while len(left):
            hit = self.keys[at] == wanted
            found[left[hit]] = at[hit]
            at = at + np.int32(1)
            on = np.flatnonzero(~hit & (at < end))
            left, at, end, wanted = left[on], at[on], end[on], wanted[on]
        return found


def _span_hashes(codes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    powers, inverses = _powers(max(BLOCK, 1 << len(codes).bit_length()))
    terms = (codes.astype(np.uint64) + np.uint64(1)) * np.uint64(0xA0761D6478BD642F)
    terms ^= terms >> np.uint64(29)
    terms *= powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(terms, out=sums[1:])
    return mix((sums[ends] - sums[starts]) * inverses[starts])


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """B^j and B^-j modulo 2^64 for j < count."""
    tables = []
    for base in (BASE, INVERSE):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors, dtype=np.uint64))
    return tables[0], tables[1]


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """For code points below 65,536: the lower case (where it is one code point), and whether it belongs to a word.

    The last entry stands for all higher code points: the emoji and rare scripts there count as parts of words.
    """
    lower = np.arange(0x10000, dtype=np.uint32)
    is_word = np.zeros(0x10000, dtype=bool)
    for code in range(0x10000):
        character = chr(code)
        is_word[code] = character == "_" or unicodedata.category(character)[0] in "LNM"
        small = character.lower()
        if len(small) == 1:
            lower[code] = ord(small)
    is_word[-1] = True
    return lower, is_word
