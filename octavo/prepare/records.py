"""What one file holds, record by record, in bounded memory: texts, and what could not be read and why.

A *record* is a document of a file: all of a plain text or page, a line of JSON lines, a value of a JSON array, a row of Parquet,
a NUL-separated part of a compressed text. Records are numbered from 0 as they stand in the file, bad ones included, so that the
number of a record never depends on what else was read. A bad record is a `Problem` and reading goes on behind it; only damage of
the file itself (a compressed stream that breaks off) ends it there.

No more of a record than `BYTES_PER_CHARACTER` times the limit in characters is held at once: what is longer is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from octavo.data.sources import CHUNK, SEPARATOR
from octavo.prepare.compressed import COMPRESSED, DAMAGE, open_file
from octavo.prepare.jsonstream import json_values
from octavo.prepare.markup import page_text

TEXT = (".txt", ".text", ".md", ".rst")
HTML = (".html", ".htm", ".xhtml")
JSONL = (".jsonl", ".ndjson")
JSON = (".json",)
PARQUET = (".parquet",)
FORMATS = {suffix: suffixes[0][1:] for suffixes in (TEXT, HTML, JSONL, JSON, PARQUET) for suffix in suffixes}

BYTES_PER_CHARACTER = 8
"""Bytes of a file that a character of text may take: four in UTF-8, more with markup around it or JSON escapes in it."""
TEXT_FIELDS = ("text", "content", "conversations", "messages")
"""Where the text of a record is looked for, if the source does not say."""
SPEAKERS = {"human": "User", "user": "User", "gpt": "Assistant", "assistant": "Assistant", "system": "System"}
CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w-]+)", re.IGNORECASE)
SAMPLE = 200
"""Characters of a bad record that are shown."""


class Record(NamedTuple):
    """A document of a file, and its number in it."""

    number: int
    text: str


class Problem(NamedTuple):
    """What could not be read, where it was and why."""

    number: int
    reason: str
    """One of the reasons in the index of `octavo.prepare`."""
    detail: str
    sample: str = ""


def format_of(name: str) -> str:
    """ "txt", "html", "jsonl", "json" or "parquet", from a file's name; "" if it does not say."""
    return FORMATS.get(inner_suffix(name), "")


def inner_suffix(name: str) -> str:
    """The suffix of a file's name in small letters, that of the compression left out: ".rst" for "A.RST.gz"."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def read_records(
    path: Path, form: str, text_field: str | None, limit: int, part: int = 0, parts: int = 1
) -> Iterator[Record | Problem]:
    """The records of a file of format `form`; of several `parts` only those whose number is `part` modulo `parts`.

    `text_field`: where a JSON or Parquet record has its text. `limit`: characters of the longest text that is taken.
    """
    number = 0
    try:
        for item in _records(path, form, text_field, limit, part, parts):
            number = item.number + 1
            if item.number % parts == part:
                yield checked(item, limit)
    except DAMAGE as error:
        found = Problem(number, "damaged", f"the compressed data break off or are none: {error}")
    except OSError as error:
        found = Problem(number, "unreadable", error.strerror or str(error))
    else:
        return
    if number % parts == part:
        yield found


def checked(item: Record | Problem, limit: int) -> Record | Problem:
    """`item`, or a `Problem` in the place of a text that is empty or longer than `limit` characters."""
    if isinstance(item, Problem):
        return item
    if len(item.text) > limit:
        detail = f"{len(item.text):,} characters, {limit:,} are allowed"
        return Problem(item.number, "too_long", detail, item.text[:SAMPLE])
    if not item.text.strip():
        return Problem(item.number, "empty", "it holds no text")
    return item


def _records(
    path: Path, form: str, text_field: str | None, limit: int, part: int, parts: int
) -> Iterator[Record | Problem]:
    if form == "parquet":
        yield from _parquet_rows(path, text_field)
        return
    with open_file(path) as file:
        if form == "jsonl":
            for number, line in enumerate(_lines(file, limit * BYTES_PER_CHARACTER)):
                if number % parts == part:  # lines of other parts need not be parsed
                    yield from _json_line(number, line, text_field)
        elif form == "json":
            for number, value in enumerate(json_values(file, limit * BYTES_PER_CHARACTER)):
                if isinstance(value, ValueError):
                    yield Problem(number, *value.args)
                else:
                    yield _json_record(number, value, text_field)
        elif form == "html":
            yield _page(_whole(file, limit * BYTES_PER_CHARACTER))
        elif path.suffix.lower() in COMPRESSED:
            for number, data in enumerate(_nul_parts(file, limit * BYTES_PER_CHARACTER)):
                item = _plain(number, data)
                yield item
                if isinstance(item, Problem) and item.reason in ("encoding", "binary"):
                    return
        else:
            yield _plain(0, _whole(file, limit * BYTES_PER_CHARACTER))


def _plain(number: int, data: bytes | None) -> Record | Problem:
    if data is None:
        return Problem(number, "too_long", "more bytes than a text of the allowed length has")
    if SEPARATOR in data[:CHUNK] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Problem(number, "binary", f"a NUL byte at {data.index(SEPARATOR)}")
    try:
        text = data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        return Problem(number, "encoding", _encoding_detail(error))
    if "\0" in text:
        return Problem(number, "binary", f"a NUL character at {text.index(chr(0))}")
    return Record(number, text)


def _page(data: bytes | None) -> Record | Problem:
    """A page in UTF-8, or in the encoding that it declares."""
    plain = _plain(0, data)
    if isinstance(plain, Problem):
        declared = CHARSET.search(data[:2048]) if data else None
        if data is None or declared is None or plain.reason != "encoding":
            return plain
        try:
            plain = Record(0, data.decode(declared[1].decode()))
        except (UnicodeDecodeError, LookupError):
            return plain
    if not plain.text.strip():
        return plain
    text = page_text(plain.text)
    return Record(0, text) if text else Problem(0, "no_text", "nothing but navigation and markup")


def _json_line(number: int, line: bytes | None, text_field: str | None) -> Iterator[Record | Problem]:
    if line is None:
        yield Problem(number, "too_long", "a line of more bytes than a text of the allowed length has")
    elif line.strip():
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            yield Problem(number, "encoding", _encoding_detail(error))
        except (ValueError, RecursionError) as error:
            yield Problem(number, "not_json", str(error), line[:SAMPLE].decode(errors="replace"))
        else:
            yield _json_record(number, value, text_field)


def _json_record(number: int, value: Any, text_field: str | None) -> Record | Problem:
    if isinstance(value, str) and text_field is None:
        return Record(number, _well_formed(value))
    if isinstance(value, dict):
        for field in TEXT_FIELDS if text_field is None else (text_field,):
            text = _field_text(value.get(field))
            if text is not None:
                return Record(number, _well_formed(text))
    wanted = repr(text_field) if text_field else " or ".join(map(repr, TEXT_FIELDS))
    return Problem(number, "no_text", f"no text and no turns of a conversation under {wanted}", repr(value)[:SAMPLE])


def _field_text(value: Any) -> str | None:
    """A string as it stands; a list of turns as "Speaker: text" paragraphs; None for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            return None
        speaker = turn.get("role", turn.get("from"))
        said = turn.get("content", turn.get("value"))
        if not isinstance(speaker, str) or not isinstance(said, str):
            return None
        turns.append(f"{SPEAKERS.get(speaker, speaker.capitalize())}: {said.strip()}\n")
    return "\n".join(turns)


def _parquet_rows(path: Path, text_field: str | None) -> Iterator[Record | Problem]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            field = next((name for name in TEXT_FIELDS if name in names), None) if text_field is None else text_field
            if field not in names:
                yield Problem(0, "no_text", f"no column {field or TEXT_FIELDS[0]!r}: it has {', '.join(names)}")
                return
            number = 0
            for batch in file.iter_batches(batch_size=64, columns=[field], use_threads=False):
                for value in batch.column(0).to_pylist():
                    text = _field_text(value)
                    yield (
                        Record(number, text)
                        if text is not None
                        else Problem(number, "no_text", f"no text in {field!r}")
                    )
                    number += 1
    except pyarrow.ArrowException as error:
        yield Problem(0, "damaged", f"it is no complete Parquet file: {error}")


def _whole(file: IO[bytes], limit: int) -> bytes | None:
    """All bytes of a file, None if there are more than `limit`."""
    data = file.read(limit + 1)
    return data if len(data) <= limit else None


def _lines(file: IO[bytes], limit: int) -> Iterator[bytes | None]:
    """The lines of a file, None for one of more than `limit` bytes."""
    while line := file.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(CHUNK)
        yield None


def _nul_parts(file: IO[bytes], limit: int) -> Iterator[bytes | None]:
    """The NUL-separated parts of a stream, None for one of more than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    for chunk in _chunks(file):
        *whole, rest = chunk.split(SEPARATOR)
        for piece in whole:
            size += len(piece)
            yield b"".join([*parts, piece]) if size <= limit else None
            parts, size = [], 0
        size += len(rest)
        if size <= limit:
            parts.append(rest)
    yield b"".join(parts) if size <= limit else None


def _chunks(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(CHUNK), b"")


def _well_formed(text: str) -> str:
    """`text` with halves of characters, which JSON can hold, replaced."""
    return text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")


def _encoding_detail(error: UnicodeDecodeError) -> str:
    return f"it is no UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
