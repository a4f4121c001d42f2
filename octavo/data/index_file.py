"""The index of a token shard: the layout of Megatron's `.idx` files, and its checks.

All numbers are little-endian:

| bytes of `.idx` | content |
|---|---|
| 9 | `MMIDIDX` and two zero bytes |
| 8 | version 1, uint64 |
| 1 | code of the token dtype, see `DTYPES` |
| 8 | n, number of sequences, uint64 |
| 8 | m, number of entries of the last table: documents + 1, uint64 |
| 4 n | tokens of each sequence, int32 |
| 8 n | where each sequence begins in `.bin`, in bytes, int64 |
| 8 m | the first sequence of each document, and n, int64 |

Every field is checked before it is used: the magic, version and dtype, the size that the counts ask for, and that sequences lie
back to back and make up the documents. Tables are mapped, and checked in parts, so that memory does not grow with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtypes of token ids by their codes; 6 and 7 are floats, which no ids are."""
ROWS = 1 << 20
"""Rows of a table that are checked at once."""


def map_array(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    """`count` numbers of a file from byte `offset` on, read-only, without reading them now."""
    if count == 0:  # the operating system maps no empty file
        return np.empty(0, dtype)
    # A plain view: slices of a memmap cost ten times as much to make.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def read_header(index: Path) -> tuple[int, int, int]:
    """Dtype code, sequences and entries of the last table; the file has the size that they ask for."""
    try:
        size = index.stat().st_size
        with index.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise ValueError(
            f"{index} cannot be read ({error.strerror}): a shard is named by its prefix, without .idx or .bin"
        ) from None
    if not header.startswith(MAGIC):
        raise ValueError(
            f"{index} is no index of token shards: it does not begin with {MAGIC!r} (Megatron's MMIDIDX format)"
        )
    if len(header) < HEADER.size:
        raise ValueError(f"{index} is truncated: it has {size} bytes and its header {HEADER.size}")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise ValueError(
            f"{index} has version {version} and dtype code {code}: known are version 1 and codes {list(DTYPES)}"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size != expected or entries == 0:
        raise ValueError(
            f"{index} is damaged: it has {size:,} bytes instead of the {expected:,} of {sequences:,} sequences and {entries:,} - 1 "
            "documents"
        )
    return code, sequences, entries


def check_tables(index: Path, sequences: int, entries: int, itemsize: int) -> int:
    """Tokens of the shard. Raises `ValueError` unless sequences lie back to back and documents are made of all of them."""
    lengths = map_array(index, np.dtype("<i4"), HEADER.size, sequences)
    pointers = map_array(index, np.dtype("<i8"), HEADER.size + 4 * sequences, sequences)
    firsts = map_array(index, np.dtype("<i8"), HEADER.size + 12 * sequences, entries)
    count = 0
    for rows in _chunks(sequences):
        ends = count + np.cumsum(lengths[rows], dtype=np.int64)
        wrong = (lengths[rows] < 0) | (pointers[rows] != (ends - lengths[rows]) * itemsize)
        if wrong.any():
            row = rows.start + int(wrong.argmax())
            raise ValueError(
                f"{index} is damaged: sequence {row:,} has {lengths[row]:,} tokens at byte {pointers[row]:,}, not where the one "
                "before it ends"
            )
        count = int(ends[-1])
    last = 0
    for rows in _chunks(entries):
        steps = np.diff(firsts[rows], prepend=last)
        if (rows.start == 0 and firsts[0] != 0) or (steps < 0).any():
            raise ValueError(
                f"{index} is damaged: the first sequences of its documents do not begin with 0 or are not in order"
            )
        last = int(firsts[rows][-1])
    if last != sequences:
        raise ValueError(f"{index} is damaged: its last document ends with sequence {last:,} of {sequences:,}")
    return count


def _chunks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROWS):
        yield slice(start, min(rows, start + ROWS))
