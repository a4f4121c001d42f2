"""Text from where a user has it: a file, a folder, or the Python sources that every machine has.

A *document* is one text file, one record of a JSON-lines file, or one NUL-separated part of a compressed text file. Documents
come in a fixed order (files by name, those of a folder before its subfolders', records as they stand) and each text comes once:
exact duplicates are dropped by hash, 16 bytes a document. Equal files therefore give equal documents on every machine.

| name | read as |
|---|---|
| `.txt .md .rst .py` | one document |
| `.html .htm` | one document, without its markup |
| `.jsonl` | a document a line: a JSON string, or an object with a string under "text" |
| any of them + `.gz` or `.xz` | the same, decompressed; NUL bytes separate the documents of a text |
| `.gz`, `.xz` alone | text, NUL bytes separate documents |

A document is held in memory as a whole, so one of more than `MAX_DOCUMENT_BYTES` is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from octavo.data.html import strip_html

DEMO = "demo"
DEMO_BYTES = 24 << 20
"""Size of the demo corpus: enough for some minutes of training of a small byte-level model without a repeat."""

TEXT = (".txt", ".md", ".rst", ".py")
HTML = (".html", ".htm")
JSONL = (".jsonl",)
COMPRESSED = (".gz", ".xz")
ARCHIVES = (".tar", ".tgz", ".zip")
SEPARATOR = b"\0"
CHUNK = 1 << 20
MAX_DOCUMENT_BYTES = 1 << 30
"""Of the longest document that is taken, as it stands in its file."""


class _Kind(NamedTuple):
    """How to read a file, from its name."""

    suffix: str
    """One of `TEXT`, `HTML`, `JSONL`, or "" for a name that says nothing."""
    compression: str
    """One of `COMPRESSED`, or ""."""


def read_documents(source: str | Path, max_bytes: int | None = None) -> Iterator[str]:
    """The distinct documents of `source`: "demo", a file or a folder, up to about `max_bytes` of UTF-8.

    Raises `ValueError`, when the first document is asked for, if the source is missing, unreadable, binary or empty. In a
    folder, files that are no UTF-8 text are left out with one warning.
    """
    seen: set[bytes] = set()
    size = 0
    for text in _all_documents(source):
        hashed = hashlib.blake2b(digest_size=16)
        length, digest = hash_text(hashed, text), hashed.digest()
        if digest in seen or not text or text.isspace():
            continue
        seen.add(digest)
        size += length
        yield text
        if max_bytes is not None and size >= max_bytes:
            return
    if not seen:
        raise ValueError(f"{source} holds no text: the corpus is empty")


def hash_text(digest: Any, text: str) -> int:
    """Update `digest`, of `hashlib`, with `text` in UTF-8, without a copy of all of it; returns the number of bytes."""
    length = 0
    for begin in range(0, len(text), CHUNK):
        encoded = text[begin : begin + CHUNK].encode()
        digest.update(encoded)
        length += len(encoded)
    return length


def source_files(source: str | Path) -> list[tuple[str, Path]]:
    """(name below the source, path) of each file that `read_documents` reads, in its order. Raises `ValueError` if none."""
    if source == DEMO:
        return _demo_files()
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a text file, a folder of them, or {DEMO!r}")
    files = [(name, file) for name, file in _files_below(path) if _is_text(file)]
    if not files:
        raise ValueError(
            f"{path} holds no text file: looked for {', '.join(TEXT + HTML + JSONL)}, also with .gz or .xz"
        )
    return files


def fingerprint(source: str | Path) -> str:
    """32 hexadecimal digits of the content of `source`: the names and bytes of its files as they lie on the disk."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in source_files(source):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with _readable(path), path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _demo_files() -> list[tuple[str, Path]]:
    """The first `DEMO_BYTES` of Python sources and texts of the standard library, then of the installed packages."""
    paths = sysconfig.get_paths()
    files: list[tuple[str, Path]] = []
    size = 0
    for label in ("stdlib", "purelib"):
        for name, file in _files_below(Path(paths[label])):
            if size >= DEMO_BYTES:
                return files
            if file.suffix in TEXT:
                files.append((f"{label}/{name}", file))
                size += file.stat().st_size
    if not files:
        raise ValueError(
            f"no Python source lies in {paths['stdlib']}: give a text file or a folder instead of {DEMO!r}"
        )
    return files


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of the files below `folder`, by name, those of a folder before its subfolders'.

    Hidden ones, caches, tests and installed packages are left out.
    """
    left_out = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def _kind(path: Path) -> _Kind:
    """The kind of a file by its name; an unknown suffix counts as none. Raises `ValueError` for an archive."""
    name, suffix = path.name.lower(), path.suffix.lower()
    if any(part in ARCHIVES for part in path.suffixes):
        raise ValueError(f"{path} is an archive: unpack it into a folder and give that")
    compression = suffix if suffix in COMPRESSED else ""
    inner = Path(name[: -len(compression)]).suffix if compression else suffix
    return _Kind(inner if inner in TEXT + HTML + JSONL else "", compression)


def _is_text(path: Path) -> bool:
    if any(part in ARCHIVES for part in path.suffixes):
        return False
    kind = _kind(path)
    return kind.suffix != "" or (kind.compression != "" and Path(path.stem).suffix == "")


def _all_documents(source: str | Path) -> Iterator[str]:
    files = source_files(source)
    alone = len(files) == 1
    warned = source == DEMO  # the standard library holds some Latin-1 sources, no news to anybody
    for _, path in files:
        try:
            yield from _read_file(path)
        except UnicodeError as error:
            if alone:
                raise ValueError(
                    f'{path} is no UTF-8 text ({error}): give text, or JSON lines with a "text" field'
                ) from None
            if not warned:
                warnings.warn(f"{path} is no UTF-8 text; such files are left out", stacklevel=3)
                warned = True


def _read_file(path: Path) -> Iterator[str]:
    """The documents of one file. Raises `UnicodeError` if it is binary, `ValueError` if it is damaged, malformed or too long."""
    kind = _kind(path)
    with _readable(path), _open(path, kind.compression) as file:
        if kind.suffix in JSONL:
            yield from _records(path, file)
            return
        for part in _parts(path, file) if kind.compression else _whole(path, file):
            if SEPARATOR in part:
                raise UnicodeError(f"a NUL byte at {part.index(SEPARATOR)}")
            text = part.decode("utf-8-sig")
            del part  # a long text need not be in memory twice
            yield strip_html(text) if kind.suffix in HTML else text


def _open(path: Path, compression: str) -> IO[bytes]:
    if compression == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return cast(IO[bytes], lzma.open(path)) if compression == ".xz" else path.open("rb")


def _whole(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_DOCUMENT_BYTES:
        raise _too_long(f"{path} is one document of {size:,} bytes")
    yield file.read()


def _parts(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The NUL-separated parts of a stream that need not fit in memory."""
    pending: list[bytes] = []
    size = 0
    while chunk := file.read(CHUNK):
        first, *others = chunk.split(SEPARATOR)
        pending.append(first)
        size += len(first)
        if size > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{path} holds a document of at least {size:,} bytes")
        for other in others:
            yield b"".join(pending)
            pending, size = [other], len(other)
    yield b"".join(pending)


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{path} holds a record of at least {len(line):,} bytes")
        yield line


def _too_long(what: str) -> ValueError:
    return ValueError(
        f"{what}, and a document may have {MAX_DOCUMENT_BYTES:,}: cut it into several files or JSON lines, or prepare it with "
        "octavo prepare and split_characters"
    )


def _records(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(_lines(path, file), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is no JSON ({error}): each line must be one record") from None
        text = record.get("text") if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise ValueError(
                f'{path}, line {number}, has no string under "text": each line must be a string or such an object'
            )
        yield text.encode(errors="surrogatepass").decode(errors="replace")  # JSON can hold half a character


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what the operating system or a decompressor says into a `ValueError` of one sentence."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged, or not compressed as its name says: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise ValueError(f"{path} does not fit into memory: cut its documents into shorter ones") from None
