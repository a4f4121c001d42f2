"""Pieces make up the text, are no longer than asked for, and are judged one by one."""

from __future__ import annotations

import gzip
import random

import pytest

from octavo.prepare.pieces import cut, stream_pieces
from octavo.prepare.records import Problem, Record

COMPRESS = {".gz": gzip.compress}


def short(items):
    return [(item.number, item.reason) if isinstance(item, Problem) else item.text for item in items]


def paragraphs(seed, count=300):
    rng = random.Random(seed)
    words = ["tree", "Größe", "a", "mountain", "of", "stones"]
    return "\n\n".join(" ".join(rng.choice(words) for _ in range(rng.randrange(1, 60))) for _ in range(count))


@pytest.mark.parametrize("seed", range(5))
def test_cut_loses_nothing_and_ends_behind_paragraphs(seed):
    text = paragraphs(seed)
    pieces = cut(text, 800)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 800
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert cut("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert cut("aaaa bbbb cc", 10) == ["aaaa bbbb ", "cc"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_stream_pieces_of_a_long_text(tmp_path, suffix, monkeypatch):
    text = paragraphs(3, 2000)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(text.encode()))
    whole = [item.text for item in stream_pieces(path, 800)]
    monkeypatch.setattr("octavo.prepare.pieces.CHUNK", 5000)
    pieces = list(stream_pieces(path, 800))
    assert "".join(item.text for item in pieces) == "".join(whole) == text
    assert max(len(item.text) for item in pieces) <= 800
    parts = [list(stream_pieces(path, 800, part, 3)) for part in range(3)]
    assert sorted(item for part in parts for item in part) == pieces


def test_a_wrong_byte_costs_one_piece(tmp_path):
    data = bytearray(paragraphs(5).encode())
    place = data.index(b"tree", len(data) // 2)
    data[place] = 0xFF
    (tmp_path / "a.txt").write_bytes(data)
    items = list(stream_pieces(tmp_path / "a.txt", 800))
    bad = [item for item in items if isinstance(item, Problem)]
    assert [item.reason for item in bad] == ["encoding"] and "0xff" in bad[0].detail
    assert sum(len(item.text) for item in items if isinstance(item, Record)) > len(data) * 0.9
    (tmp_path / "b.txt").write_bytes(b"")
    assert short(stream_pieces(tmp_path / "b.txt", 800)) == [(0, "empty")]
    (tmp_path / "b.txt").write_bytes(b"text\0")
    assert short(stream_pieces(tmp_path / "b.txt", 800)) == [(0, "binary")]
