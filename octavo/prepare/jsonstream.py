"""The values of a JSON file one at a time, of a file of any size, also of one that breaks off or has a bad value inside.

The file is an array of values, or values one after the other, or a single value. The decoder of the standard library reads a
value from a buffer that grows until the value is whole. Where it fails, the value's end is looked for by counting brackets
outside of strings: a bad value is one whose brackets close but that cannot be read, and reading goes on behind it; a value whose
brackets never close is where the file breaks off.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

CHUNK = 1 << 20
SPACE = re.compile(r"[\s,]*")
MARK = re.compile(r'["\[\]{}]')
STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
SCALAR_END = re.compile(r"[,\]\n]")
DELIMITERS = " \t\r\n,]}"
DECODER = json.JSONDecoder()


def json_values(file: IO[bytes], limit: int) -> Iterator[Any]:
    """Each value; for one that is bad, a `ValueError(reason, detail)` in its place. At most about `limit` bytes are held."""
    source = _Buffer(file)
    try:
        if source.skip(SPACE) and source.text[source.at] == "[":
            source.at += 1
        while source.skip(SPACE):
            if source.text[source.at] == "]":
                source.at += 1
                continue
            yield _value(source, limit)
    except UnicodeDecodeError as error:
        yield ValueError("encoding", f"it is no UTF-8: byte {error.object[error.start]:#04x}")


class _Buffer:
    """The decoded text of a file from some place on: `text[at:]` is what is not read yet."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text = ""
        self.at = 0
        self.complete = False

    def grow(self) -> bool:
        """Reads on; as much as is held, so that a long value is tried a few times only. False at the end of the file."""
        if self.complete:
            return False
        data = self.file.read(max(CHUNK, len(self.text) - self.at))
        self.complete = not data
        self.text = self.text[self.at :] + self.decode(data, final=self.complete)
        self.at = 0
        return not self.complete

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Moves behind what `pattern` matches. False if that is the end of the file."""
        while True:
            match = pattern.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return True
            if not self.grow() and self.at >= len(self.text):
                return False


def _value(source: _Buffer, limit: int) -> Any:
    """The next value, or a `ValueError`; `source` stands behind it."""
    while True:  # a number may go on where the buffer ends: "1" or "1." for 1.5
        try:
            value, end = DECODER.raw_decode(source.text, source.at)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if source.complete or (end < len(source.text) and (not number or source.text[end] in DELIMITERS)):
                source.at = end
                return value
        except (ValueError, RecursionError) as error:
            detail = str(error)
        else:
            detail = ""
        if detail and _end(source.text, source.at, _State()) is not None:
            _pass_over(source)
            return ValueError("not_json", detail)
        if len(source.text) - source.at > limit:
            _pass_over(source)
            return ValueError("too_long", "a value of more bytes than a text of the allowed length has")
        if not source.grow() and detail:
            source.at = len(source.text)
            return ValueError("not_json", f"the file breaks off within this value: {detail}")


class _State:
    """Where a scan for the end of a value stands, between one piece of text and the next."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False


def _end(text: str, at: int, state: _State) -> int | None:
    """Index behind the value that `text[at:]` goes on with; None if it goes on behind `text`."""
    while at < len(text):
        if state.escaped:
            state.escaped = False
            at += 1
        elif state.in_string:
            at = STRING.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere
            if at < len(text):  # a quotation mark, or a backslash without what it escapes
                state.escaped = text[at] == "\\"
                state.in_string = state.escaped
                at += 1
                if state.depth == 0 and not state.in_string:
                    return at
        else:
            match = MARK.search(text, at)
            if state.depth == 0:
                end = SCALAR_END.search(text, at, match.end() if match else len(text))
                if end is not None:
                    return max(end.start(), at + 1)
            if match is None:
                return None
            at = match.end()
            if match.group() == '"':
                state.in_string = True
            else:
                state.depth += 1 if match.group() in "[{" else -1
                if state.depth <= 0:
                    return at
    return None


def _pass_over(source: _Buffer) -> bool:
    """Moves behind the next value without reading it. False if the file ends before the value does."""
    state = _State()
    while True:
        end = _end(source.text, source.at, state)
        if end is not None:
            source.at = end
            return True
        source.at = len(source.text)
        if not source.grow():
            return False
