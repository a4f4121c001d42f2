"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes `content` (a string as UTF-8) beside `path`, and gives it that name when it has reached the disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def file_digest(path: Path, algorithm: str) -> str:
    """Hexadecimal digest of the bytes of a file, as `hashlib.file_digest` (which Python 3.10 lacks)."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
