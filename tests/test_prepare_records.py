"""Every format gives its records with stable numbers; everything bad is a named problem, and nothing is read whole."""

from __future__ import annotations

import gzip
import json
import lzma
import tracemalloc

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from octavo.prepare.records import Problem, format_of, inner_suffix, read_records

LIMIT = 1000
COMPRESS = {
    ".gz": gzip.compress,
    ".dz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(path, data, field=None, limit=LIMIT, form=None):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_records(path, format_of(path.name) if form is None else form, field, limit))


def short(items):
    """Texts, and (number, reason) of problems."""
    return [(item.number, item.reason) if isinstance(item, Problem) else item.text for item in items]


def test_format_and_suffix():
    assert [
        format_of(name) for name in ("a.TXT", "a.rst.gz", "b.htm", "c.jsonl.zst", "d.json", "e.parquet", "f.c")
    ] == [*("txt", "txt", "html", "jsonl", "json", "parquet", "")]
    assert inner_suffix("A.PY.xz") == ".py" and inner_suffix("gcide.dict.dz") == ".dict"


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_text_and_lines_whatever_the_compression(tmp_path, suffix):
    compress = COMPRESS.get(suffix, bytes)
    assert short(read(tmp_path / f"a.txt{suffix}", compress("\ufeffGröße\n".encode()))) == ["Größe\n"]
    lines = [
        json.dumps({"text": "one"}),
        "",
        json.dumps("two"),
        '{"text": "thr',
        json.dumps({"title": "x"}),
        '{"text": ""}',
    ]
    items = read(tmp_path / f"a.jsonl{suffix}", compress("\n".join(lines).encode()))
    assert short(items) == ["one", "two", (3, "not_json"), (4, "no_text"), (5, "empty")]
    assert [item.number for item in items] == [0, 2, 3, 4, 5]


def test_nul_bytes_separate_documents_of_compressed_text_and_mark_binary_files(tmp_path):
    assert short(read(tmp_path / "a.txt.xz", lzma.compress(b"one\0two\0" + b"x" * 9000 + b"\0four"))) == [
        *("one", "two", (2, "too_long"), "four")
    ]
    assert short(read(tmp_path / "a.txt", b"\x89PNG\0\x01")) == [(0, "binary")]


def test_bad_texts(tmp_path):
    assert short(read(tmp_path / "a.txt", b"")) == short(read(tmp_path / "b.txt", b" \n\n")) == [(0, "empty")]
    assert short(read(tmp_path / "a.txt", "Größe".encode("latin-1"))) == [(0, "encoding")]
    assert short(read(tmp_path / "a.txt", "Größe".encode("utf-16"))) == ["Größe"]
    assert short(read(tmp_path / "a.txt", "x" * (LIMIT + 1))) == [(0, "too_long")]
    assert short(read(tmp_path / "a.txt", "x" * LIMIT)) == ["x" * LIMIT]
    (tmp_path / "folder.txt").mkdir()
    assert short(read_records(tmp_path / "folder.txt", "txt", None, LIMIT)) == [(0, "unreadable")]


def test_pages(tmp_path):
    assert short(read(tmp_path / "a.html", "<p>Größe</p>")) == ["Größe\n"]
    latin = '<meta charset="iso-8859-1"><p>Größe</p>'.encode("latin-1")
    assert short(read(tmp_path / "b.html", latin)) == ["Größe\n"]
    assert short(read(tmp_path / "c.html", b"<p>\xff</p>")) == [(0, "encoding")]
    assert short(read(tmp_path / "d.html", "<nav>menu</nav>")) == [(0, "no_text")]
    assert short(read(tmp_path / "e.html", "")) == [(0, "empty")]


def test_conversations_and_fields(tmp_path):
    turns = [{"from": "human", "value": " Hello? "}, {"from": "gpt", "value": "Hi.\nYes."}]
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why?"},
        {"role": "tool", "content": "7"},
    ]
    wanted = ["User: Hello?\n\nAssistant: Hi.\nYes.\n", "System: Be kind.\n\nUser: Why?\n\nTool: 7\n"]
    data = json.dumps([{"conversations": turns}, {"messages": chat}, {"messages": [{"role": 3}]}, {"messages": []}])
    assert short(read(tmp_path / "a.json", data)) == [*wanted, (2, "no_text"), (3, "empty")]
    assert short(read(tmp_path / "b.jsonl", '{"body": "x", "text": "y"}', field="body")) == ["x"]
    problem = read(tmp_path / "b.jsonl", '{"text": "y"}', field="body")[0]
    assert problem.reason == "no_text" and "'body'" in problem.detail
    assert short(read(tmp_path / "c.jsonl", '{"text": "half \\ud83d"}')) == ["half \ufffd\ufffd\ufffd"]


def test_truncated_array(tmp_path):
    text = json.dumps([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    assert short(read(tmp_path / "a.json", text[:-8])) == ["one", "two", (2, "not_json")]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(200)] + [None, ""]
    parquet.write_table(pyarrow.table({"id": range(202), "text": texts}), path)
    assert short(read_records(path, "parquet", None, LIMIT)) == [*texts[:200], (200, "no_text"), (201, "empty")]
    assert [item.number for item in read_records(path, "parquet", None, LIMIT, 1, 3)] == list(range(1, 202, 3))
    problem = next(read_records(path, "parquet", "body", LIMIT))
    assert problem.reason == "no_text" and "id, text" in problem.detail
    path.write_bytes(path.read_bytes()[:-40])
    assert short(read_records(path, "parquet", None, LIMIT)) == [(0, "damaged")]
    path.write_bytes(b"")
    assert short(read_records(path, "parquet", None, LIMIT)) == [(0, "damaged")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt.gz"])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_share_the_records(tmp_path, name, parts):
    texts = [f"text {i}" for i in range(23)]
    if name == "a.txt.gz":
        data = gzip.compress("\0".join(texts).encode())
    else:
        records = [json.dumps({"text": text} if i != 13 else {"x": 1}) for i, text in enumerate(texts)]
        data = ("\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}").encode()
    whole = read(tmp_path / name, data)
    split = [list(read_records(tmp_path / name, format_of(name), None, LIMIT, part, parts)) for part in range(parts)]
    assert sorted(item for part in split for item in part) == sorted(whole)
    assert all(item.number % parts == index for index, part in enumerate(split) for item in part)


def test_no_format_holds_a_long_file_in_memory(tmp_path):
    """100 MB in one record are passed over within a few MB."""
    block = b"word " * 20_000
    for name, head, tail in (
        ("a.txt", b"", b""),
        ("a.jsonl", b'{"text": "', b'"}\n{"text": "short"}'),
        ("a.html", b"<p>", b""),
    ):
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            for _ in range(1000):
                file.write(block)
            file.write(tail)
        tracemalloc.start()
        items = short(read_records(tmp_path / name, format_of(name), None, 10_000))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert items == [(0, "too_long")] + (["short"] if name == "a.jsonl" else [])
        assert peak < 8 << 20
