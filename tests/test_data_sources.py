"""Text of every kind that a user may have, in a fixed order, each document once; and what is said when there is none."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import warnings

import pytest

from octavo.data import sources
from octavo.data.html import strip_html
from octavo.data.sources import fingerprint, read_documents, source_files


def read(source, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(read_documents(source, **kwargs))


def test_folder_in_the_order_of_names_each_text_once(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "c.rst").write_text("three")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "d.py").write_text("two")  # a duplicate
    (tmp_path / "e.txt").write_text("  \n")  # nothing
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert read(tmp_path) == ["one\n", "three", "two"]
    assert read(str(tmp_path)) == ["one\n", "three", "two"]


def test_single_file_of_any_suffix(tmp_path):
    path = tmp_path / "main.c"
    path.write_text("int main;")
    assert read(path) == ["int main;"]


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read(tmp_path) == ["one"]


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_json_lines(tmp_path, suffix, compress):
    lines = [json.dumps({"text": "one\ntwo", "id": 3}), "", json.dumps("plain"), json.dumps({"text": "äö \ud83d"})]
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(compress("\n".join(lines).encode()))
    assert read(path) == read(tmp_path) == ["one\ntwo", "plain", "äö \ufffd\ufffd\ufffd"]


@pytest.mark.parametrize("name", ["text.xz", "text.txt.xz", "text.txt.gz", "text.gz"])
def test_compressed_text_has_documents_between_nuls(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 5)  # documents and separators across the borders of chunks
    documents = ["first document", "ä", "x" * 23, "last\n"]
    data = "\0".join(documents).encode() + b"\0"
    (tmp_path / name).write_bytes((lzma if name.endswith("xz") else gzip).compress(data))
    assert read(tmp_path / name) == read(tmp_path) == documents


def test_html_without_its_markup(tmp_path):
    page = """<!doctype html><html><head><title>T</title><style>p {color: red}</style></head><body><nav>Menu</nav>
    <h1>Head&amp;line</h1><p>One <b>bold</b>
    word.<br>Two<script>if (a < b) {}</script></p><pre>  for x:
      y</pre><ul><li>a<li>b</ul><footer>Foot</footer></body></html>"""
    (tmp_path / "page.html").write_text(page)
    (text,) = read(tmp_path)
    assert text == strip_html(page)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines == ["Head&line", "One bold word.", "Two", "for x:", "y", "a", "b"]
    assert "  for x:\n      y" in text and "\n\n\n" not in text


def test_html_that_leaves_out_end_tags():
    assert strip_html("<head><title>T<body><p>One<p>Two</body>") == "One\nTwo\n"
    assert strip_html("a < b &lt; c") == "a < b < c\n"


def test_max_bytes_ends_with_the_document_that_reaches_it(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    assert read(tmp_path, max_bytes=11) == ["a" * 10, "b" * 10]
    assert read(tmp_path, max_bytes=20) == ["a" * 10, "b" * 10]


def test_demo_is_there_on_any_machine():
    first = read("demo", max_bytes=300_000)
    assert first == read("demo", max_bytes=300_000)
    assert sum(len(text.encode()) for text in first) >= 300_000 and any("def " in text for text in first)
    size = sum(path.stat().st_size for _, path in source_files("demo"))
    assert size < sources.DEMO_BYTES * 1.2
    assert fingerprint("demo") == fingerprint("demo")


def test_fingerprint_is_of_names_and_contents_not_of_the_place(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
        (tmp_path / folder / "b.png").write_bytes(b"no text")
    original = fingerprint(tmp_path / "x")
    assert fingerprint(tmp_path / "y") == original
    (tmp_path / "y" / "b.png").write_bytes(b"another")
    assert fingerprint(tmp_path / "y") == original
    os.utime(tmp_path / "y" / "a.txt", (1, 1))
    assert fingerprint(tmp_path / "y") == original
    (tmp_path / "y" / "a.txt").write_text("test")
    assert fingerprint(tmp_path / "y") != original
    (tmp_path / "x" / "a.txt").rename(tmp_path / "x" / "c.txt")
    assert fingerprint(tmp_path / "x") != original


def test_binary_file_alone_is_an_error_among_others_a_warning(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\0cd")
    with pytest.raises(ValueError, match=r"a\.txt is no UTF-8 text"):
        read(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="no UTF-8 text"):
        read(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe latin")
    (tmp_path / "c.txt").write_text("good")
    with pytest.warns(UserWarning, match=r"a\.txt is no UTF-8 text") as caught:
        assert list(read_documents(tmp_path)) == ["good"]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', r"a\.jsonl, line 2, is no JSON"),
        ("a.jsonl", b'{"content": "x"}\n', r'line 1, has no string under "text"'),
        ("a.jsonl", b'{"text": 3}\n', r'line 1, has no string under "text"'),
        ("a.txt.gz", b"not compressed", "is damaged, or not compressed as its name says"),
        ("a.xz", b"not compressed", "is damaged, or not compressed as its name says"),
        ("a.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:40], "is damaged"),
        ("a.xz", lzma.compress(bytes(range(256)) * 400)[:100], "is damaged"),
        ("a.txt", b"", "the corpus is empty"),
        ("a.txt", b" \n ", "the corpus is empty"),
        ("a.tar.gz", b"", "is an archive: unpack it"),
        ("a.zip", b"", "is an archive: unpack it"),
    ],
)
def test_bad_files_are_named_with_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a text file, a folder of them, or 'demo'"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no text file: looked for \.txt"):
        read(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        fingerprint(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_and_folder(tmp_path):
    path = tmp_path / "folder" / "a.txt"
    path.parent.mkdir()
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read: Permission denied"):
        read(path)
    path.parent.chmod(0)
    try:
        with pytest.raises(ValueError, match="folder cannot be read: Permission denied"):
            read(tmp_path)
    finally:
        path.parent.chmod(0o700)


def test_file_that_goes_away_while_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    documents = read_documents(tmp_path)
    next(documents)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"b\.txt cannot be read: No such file"):
        next(documents)


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.txt.gz", "a.xz", "a.jsonl", "a.jsonl.gz"])
def test_a_document_that_is_too_long_is_refused_by_name_and_size(name, tmp_path, monkeypatch):
    """One of the greatest length is taken, one byte more is not; several in one file are judged one by one."""
    limit = 3000
    monkeypatch.setattr("octavo.data.sources.MAX_DOCUMENT_BYTES", limit)
    monkeypatch.setattr("octavo.data.sources.CHUNK", 700)

    def write(size):
        records = [bytes([letter]) * size for letter in b"abc"]
        if ".jsonl" in name:
            content = b"\n".join(b'"' + record[3:] + b'"' for record in records) + b"\n"  # quotes and line break count
        else:
            content = b"\0".join(records) if name.endswith(("gz", "xz")) else records[0]
        if name.endswith(("gz", "xz")):
            content = gzip.compress(content) if name.endswith("gz") else lzma.compress(content)
        (tmp_path / name).write_bytes(content)

    write(limit)
    assert len(list(read_documents(tmp_path / name))) == (1 if name in ("a.txt", "a.html") else 3)
    write(limit + 1)
    with pytest.raises(
        ValueError, match=rf"{name} .* of (at least )?3,001 bytes, and a document may have 3,000: cut it"
    ):
        list(read_documents(tmp_path))


def test_memory_that_ends_is_told_with_the_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("octavo.data.sources._whole", fail)
    with pytest.raises(ValueError, match=r"a.txt does not fit into memory"):
        list(read_documents(tmp_path))


def test_duplicates_and_sizes_of_long_texts(tmp_path, monkeypatch, seed):
    """The hash and the length of a text do not depend on how it is cut for hashing."""
    monkeypatch.setattr("octavo.data.sources.CHUNK", 7)
    text = "".join(random.Random(seed).choices("aé漢🙂 ", k=50)) + "x"
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "2.txt").write_text(text + "y")
    assert list(read_documents(tmp_path)) == [text, text + "y"]
    assert list(read_documents(tmp_path, max_bytes=len(text.encode()))) == [text]
    assert list(read_documents(tmp_path, max_bytes=len(text.encode()) + 1)) == [text, text + "y"]
