"""Long texts in pieces: books, logs and dictionaries of any length, as documents that a filter can judge.

A piece ends behind a blank line if one lies in its second half, else behind a line, else behind a word, else where it must.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from octavo.prepare.compressed import DAMAGE, open_file
from octavo.prepare.records import Problem, Record, checked

CHUNK = 1 << 20
"""Characters that are read at a time."""


def stream_pieces(path: Path, size: int, part: int = 0, parts: int = 1) -> Iterator[Record | Problem]:
    """A plain text of any length, cut into pieces of at most `size` characters, see `cut`; `part` as in `read_records`.

    Each piece is judged by itself, so that a wrong byte costs one piece of a long text.
    """
    number, rest = 0, ""
    found: Problem | None = None
    try:
        with (
            open_file(path) as file,
            io.TextIOWrapper(cast(Any, file), encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
        ):
            chunk = text.read(CHUNK)
            while chunk and "\0" not in chunk:
                *pieces, rest = cut(rest + chunk, size)
                chunk = text.read(CHUNK)
                for piece in pieces if chunk else [*pieces, rest]:
                    if number % parts == part:
                        yield _piece(number, piece, size)
                    number += 1
            if chunk:
                found = Problem(number, "binary", "it holds NUL bytes")
            elif not number:
                found = Problem(0, "empty", "it holds no text")
    except DAMAGE as error:
        found = Problem(number, "damaged", f"the compressed data break off or are none: {error}")
    except OSError as error:
        found = Problem(number, "unreadable", error.strerror or str(error))
    if found and number % parts == part:
        yield found


def cut(text: str, size: int) -> list[str]:
    """`text` in pieces of at most `size` characters, cut behind a blank line, else a line, else a word, in their second half."""
    pieces = []
    start = 0
    while len(text) - start > size:
        for mark in ("\n\n", "\n", " "):
            end = text.rfind(mark, start + size // 2, start + size)
            if end >= 0:
                end += len(mark)
                break
        else:
            end = start + size
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _piece(number: int, text: str, limit: int) -> Record | Problem:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte that is no UTF-8 was decoded to half a surrogate pair
            return Problem(number, "encoding", f"it is no UTF-8: byte {ord(text[error.start]) - 0xDC00:#04x}")
    return checked(Record(number, text), limit)
