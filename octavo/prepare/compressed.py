"""Compressed files as streams of bytes, whatever the compression: decompressed as they are read, errors of one kind.

A few bytes can decompress to gigabytes, so no more is decompressed at once than is asked for, or than a small input can make.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, cast

COMPRESSED = (".gz", ".xz", ".zst", ".dz")
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
"""What reading raises if the data break off or are no compressed data."""
CHUNK = 1 << 20
ZSTD_BYTES = 1 << 9
"""Bytes that are decompressed at once: at the highest rate, 128 KiB from 4 bytes, they make 16 MiB."""


def open_file(path: Path) -> IO[bytes]:
    """The decompressed bytes of a file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix in (".gz", ".dz"):
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(path))
    if suffix == ".zst":
        import zstandard

        return cast(IO[bytes], io.BufferedReader(cast(Any, _Zstd(zstandard, path)), CHUNK))
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """A zstd file whose errors are those of other compressions, also where the stream breaks off."""

    def __init__(self, zstandard: Any, path: Path) -> None:
        self.file = path.open("rb")
        self.error = zstandard.ZstdError
        self.decompressor = zstandard.ZstdDecompressor
        self.current: Any = None
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            chunk = self.current.unused_data if self.current is not None and self.current.eof else b""
            chunk = chunk or self.file.read(ZSTD_BYTES)
            if not chunk:
                if self.current is not None and not self.current.eof:
                    raise EOFError("the zstd stream is incomplete")
                return 0
            if self.current is None or self.current.eof:
                self.current = self.decompressor().decompressobj()
            try:
                self.ready = memoryview(self.current.decompress(chunk))
            except self.error as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()
