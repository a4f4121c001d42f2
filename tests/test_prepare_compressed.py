"""Compressed files read like plain ones; those that break off say so; none is decompressed all at once."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import tracemalloc

import pytest
import zstandard

from octavo.prepare.compressed import DAMAGE, open_file
from octavo.prepare.records import Problem, format_of, read_records

LIMIT = 1000
COMPRESS = {
    ".gz": gzip.compress,
    ".dz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(path, data):
    path.write_bytes(data)
    return list(read_records(path, format_of(path.name), None, LIMIT))


def short(items):
    return [(item.number, item.reason) if isinstance(item, Problem) else item.text for item in items]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_bytes_come_back_also_from_several_streams_in_a_row(tmp_path, suffix):
    rng = random.Random(1)
    blocks = [rng.randbytes(rng.randrange(200_000)) for _ in range(3)] + [b"", b"end"]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], blocks)))
    with open_file(path) as file:
        assert file.read() == b"".join(blocks)
    with open_file(path) as file:
        assert b"".join(iter(lambda: file.read(777), b"")) == b"".join(blocks)
    path.write_bytes(COMPRESS[suffix](b"x" * 100_000)[:-3])
    with pytest.raises(DAMAGE), open_file(path) as file:
        file.read()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_data_that_break_off(tmp_path, suffix):
    rng = random.Random(7)
    lines = [json.dumps({"text": f"{rng.random()} " * 20}) for _ in range(3000)]
    data = COMPRESS[suffix]("\n".join(lines).encode())
    items = read(tmp_path / f"a.jsonl{suffix}", data[: len(data) // 2])
    assert isinstance(items[-1], Problem) and items[-1].reason in ("damaged", "not_json")
    assert [item.text for item in items[:-1]] == [json.loads(line)["text"] for line in lines[: len(items) - 1]]
    assert short(read(tmp_path / f"b.jsonl{suffix}", b"this is not compressed at all")) == [(0, "damaged")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_data_that_grow_are_not_held_either(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"a" * (64 << 20)))
    tracemalloc.start()
    items = short(read_records(path, "txt", None, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert items == [(0, "too_long")]
    assert peak < 45 << 20
