"""A source gives the same documents with the same ids however its work is divided, and names whatever it cannot read."""

from __future__ import annotations

import json
import pickle
import random
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from octavo.prepare import readers
from octavo.prepare.readers import Source, SourceReader, list_units, nothing_read


class Writer:
    """Keeps what a datatrove writer would write."""

    def __init__(self):
        self.documents = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write(self, document, rank=0):
        self.documents.append(document)


def read(source, tasks=1, writer=None):
    reader = SourceReader(source, exclusion_writer=writer)
    return [document for rank in range(tasks) for document in reader.run(None, rank, tasks)]


@pytest.fixture
def folder(tmp_path):
    """Documents of several formats, some of them bad."""
    base = tmp_path / "corpus"
    (base / "sub").mkdir(parents=True)
    (base / ".hidden").mkdir()
    rng = random.Random(11)
    (base / "a.txt").write_text("plain text")
    (base / "sub" / "b.md").write_text("# marked\n")
    (base / "sub" / "c.jsonl").write_text(
        "\n".join(json.dumps({"text": f"record {i} {rng.random()}"}) for i in range(40))
    )
    (base / "page.html").write_text("<nav>menu</nav><p>The page.</p>")
    (base / "empty.txt").write_bytes(b"")
    (base / "binary.txt").write_bytes(b"\x7fELF\0\0")
    (base / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (base / "broken.jsonl").write_text('{"text": "good"}\n{"text": "bro')
    (base / "image.png").write_bytes(b"\x89PNG\0")
    (base / ".hidden" / "x.txt").write_text("hidden")
    (base / "link.txt").symlink_to(base / "a.txt")
    return base


BAD = {("corpus/empty.txt", 0): "empty", ("corpus/binary.txt", 0): "binary", ("corpus/latin.txt", 0): "encoding"}
BAD[("corpus/broken.jsonl", 1)] = "not_json"


@pytest.mark.parametrize("tasks", [1, 2, 7, 100])
def test_any_division_gives_the_same_documents(folder, tasks, monkeypatch):
    source = Source("mix", "prose", paths=(str(folder),))
    whole = {document.id: (document.text, document.metadata) for document in read(source)}
    monkeypatch.setattr(readers, "PART_BYTES", 300)  # makes several units of the 40 records
    writer = Writer()
    documents = read(source, tasks, writer)
    assert {document.id: (document.text, document.metadata) for document in documents} == whole
    assert len(documents) == len(whole) == 44
    assert {(d.metadata["path"], d.metadata["record"]): d.metadata["filter_reason"] for d in writer.documents} == BAD
    assert all(d.metadata["detail"] and d.metadata["file"].startswith(str(folder)) for d in writer.documents)
    assert len({document.id for document in writer.documents} | set(whole)) == 48


def test_metadata_and_ids_do_not_depend_on_where_the_folder_lies(folder, tmp_path):
    documents = read(Source("mix", "reference", paths=(str(folder),)))
    (tmp_path / "deeper").mkdir()
    moved = folder.rename(tmp_path / "deeper" / "corpus") / "sub" / ".."
    again = read(Source("mix", "reference", paths=(str(moved),)))
    assert [document.id for document in again] == [document.id for document in documents]
    first = documents[0].metadata
    assert first == {"source": "mix", "kind": "reference", "path": "corpus/a.txt", "record": 0}
    renamed = read(Source("other", "reference", paths=(str(moved),)))
    assert not {document.id for document in renamed} & {document.id for document in documents}


def test_statistics_count_documents_and_reasons(folder):
    reader = SourceReader(Source("mix", paths=(str(folder),)))
    list(reader.run())
    counts = {name: stat.total for name, stat in reader.stats.stats.items()}
    assert counts["documents"] == 44 and counts["input_files"] == 8
    assert {name: count for name, count in counts.items() if name.startswith("skipped_")} == {
        "skipped_empty": 1,
        "skipped_binary": 1,
        "skipped_encoding": 1,
        "skipped_not_json": 1,
    }


def test_patterns_choose_files(folder):
    def names(**kwargs):
        return {unit.name for unit in list_units(Source("mix", paths=(str(folder),), **kwargs))}

    assert names(include=("*.md", "*.html")) == {"corpus/sub/b.md", "corpus/page.html"}
    assert names(include=("*/sub/*",), exclude=("*.md",)) == {"corpus/sub/c.jsonl"}
    assert [unit.form for unit in list_units(Source("mix", paths=(str(folder),), include=("*.png",)))] == ["txt"]


def test_places_of_the_same_name_are_kept_apart(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name / "docs").mkdir(parents=True)
        (tmp_path / name / "docs" / "a.txt").write_text(f"text {name}")
    source = Source("two", paths=(str(tmp_path / "x/docs"), str(tmp_path / "y/docs")))
    documents = read(source)
    assert [document.text for document in documents] == ["text x", "text y"]
    assert len({document.id for document in documents}) == 2


def test_code_takes_sources_and_leaves_out_what_no_person_wrote(tmp_path):
    good = "def add(a, b):\n    return a + b\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "made.go").write_text("// Code generated by protoc. DO NOT EDIT.\npackage x\n")
    (tmp_path / "small.js").write_text("var a=1;" * 1000)
    (tmp_path / "readme.txt").write_text("no code")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "other.js").write_text("var b")
    writer = Writer()
    documents = read(Source("code", "code", paths=(str(tmp_path),)), writer=writer)
    assert [document.text for document in documents] == [good]
    assert {Path(d.metadata["path"]).name: d.metadata["filter_reason"] for d in writer.documents} == {
        "made.go": "generated",
        "small.js": "minified",
    }


def test_the_standard_library_is_code():
    source = Source("stdlib", "code", paths=(sysconfig.get_paths()["stdlib"] + "/json",))
    documents = read(source)
    assert {Path(document.metadata["path"]).name for document in documents} >= {
        "decoder.py",
        "encoder.py",
        "scanner.py",
    }


@pytest.mark.parametrize("tasks", [1, 3])
def test_split_covers_every_document(tmp_path, tasks):
    rng = random.Random(3)
    text = "\n\n".join("word " * rng.randrange(1, 60) for _ in range(400))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "book.html").write_text("".join(f"<p>{part}</p>" for part in text.split("\n\n")))
    documents = read(Source("books", paths=(str(tmp_path),), max_characters=200_000, split_characters=1000), tasks)
    assert max(len(document.text) for document in documents) <= 1000
    for suffix in (".txt", ".html"):
        pieces = [document for document in documents if document.metadata["path"].endswith(suffix)]
        assert Counter("".join(piece.text for piece in pieces).split()) == Counter(text.split())
    assert len({document.id for document in documents}) == len(documents)


def test_links_to_files_elsewhere_are_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere.txt").write_text("text")
    (tmp_path / "data" / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "data" / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    assert [document.text for document in read(Source("mix", paths=(str(tmp_path / "data"),)))] == ["text"]


def test_long_documents_are_skipped_not_read(tmp_path):
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate(2 << 30)  # 2 GiB of holes: nothing on the disk
    (tmp_path / "short.txt").write_text("short")
    writer = Writer()
    assert [d.text for d in read(Source("mix", paths=(str(tmp_path),), max_characters=1000), writer=writer)] == [
        "short"
    ]
    assert [d.metadata["filter_reason"] for d in writer.documents] == ["too_long"]


def test_a_source_without_a_document_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    source = Source("hollow", paths=(str(tmp_path),))
    with pytest.raises(ValueError, match="source 'hollow' yields no document from .*: 1 empty, 1 encoding"):
        read(source)
    assert read(source, tasks=2) == []  # a task alone cannot know
    assert "3 binary" in str(nothing_read(source, {"binary": 3}))


def test_places_that_hold_nothing(tmp_path):
    with pytest.raises(ValueError, match="source 'x': .*/missing does not exist"):
        SourceReader(Source("x", paths=(str(tmp_path / "missing"),)))
    with pytest.raises(ValueError, match=r"source 'x': .* holds no file to read \(looked for known formats\)"):
        SourceReader(Source("x", paths=(str(tmp_path),)))
    with pytest.raises(ValueError, match="source 'x' names packages: give a cache folder"):
        SourceReader(Source("x", debian=("some-doc",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a/b", "paths": ("x",)}, "'a/b' must serve as the name of a folder"),
        ({"name": "a", "kind": "poem", "paths": ("x",)}, "of the kind 'poem': choose from prose"),
        ({"name": "a"}, "'a' names no place"),
        ({"name": "a", "paths": "x"}, "paths must be a list, not the string 'x'"),
        ({"name": "a", "paths": ("x",), "max_characters": 0}, "max_characters = 0 must be positive"),
        ({"name": "a", "paths": ("x",), "split_characters": 5}, "split_characters = 5 must be at least 100"),
    ],
)
def test_sources_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        Source(**fields)


def test_reader_travels_to_other_processes(folder):
    reader = pickle.loads(pickle.dumps(SourceReader(Source("mix", paths=(str(folder),)))))
    assert len(list(reader.run())) == 44
