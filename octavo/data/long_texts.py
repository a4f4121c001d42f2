"""Long texts, tokenized piece by piece: a tokenizer of `tokenizers` takes some hundred bytes of memory for each character at once.

A text of up to `PIECE_CHARACTERS` is one piece. A longer one is cut before a space, else behind a line break, where the character
before is no white space and the one behind is a letter or digit. No token of the usual tokenizers reaches over such a place, so
the ids are those of the text as a whole. Each piece is encoded behind the character before it, whose ids are dropped again, so
that a tokenizer that puts a space before a text does it once. Ids may differ from those of the whole text at the seams of a text
without such places in half a piece (Chinese without line breaks, one endless word), and of tokenizers whose tokens span words, or
where half a piece has no space to be cut at, a line break and a word; those of the byte tokenizer never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE_CHARACTERS = 1 << 20
"""Text that is tokenized at once at most."""

Encode = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
"""The ids of a text, without special tokens."""


def encode_pieces(
    encode: Encode, text: str, dtype: np.dtype[Any], size: int = PIECE_CHARACTERS
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """(piece, its ids in `dtype`) of `text`, in pieces of at most `size` ≥ 2 characters; joined they are the text and its ids."""
    start = 0
    while start < len(text) or not start:
        end = _cut(text, start, size)
        yield text[start:end], np.asarray(_behind(encode, text[start - 1 : start], text[start:end]), dtype=dtype)
        if end == len(text):
            return
        start = end


def _cut(text: str, start: int, size: int) -> int:
    """Where the piece that begins at `start` ends: at a seam in its second half if it has one."""
    high = start + size
    if high >= len(text):
        return len(text)
    for mark, behind in ((" ", 0), ("\n", 1)):
        place = high
        while (place := text.rfind(mark, start + size // 2, place)) >= 0:
            if not text[place - 1].isspace() and text[place + 1].isalnum():
                return place + behind
    return high


def _behind(encode: Encode, before: str, piece: str) -> Sequence[int] | npt.NDArray[np.integer]:
    """The ids of `piece` where the character `before` precedes it; of `piece` alone if a token holds parts of both."""
    if not before:
        return encode(piece)
    head, ids = encode(before), encode(before + piece)
    return ids[len(head) :] if np.array_equal(ids[: len(head)], head) else encode(piece)
