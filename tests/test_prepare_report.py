"""The report adds up: every document read is kept or dropped for a named reason, and the page holds it all by itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from corpora import corpus_config, text, write_sources

from octavo.data.corpus import PreparedCorpus
from octavo.prepare.pipeline import prepare
from octavo.prepare.report import UNREADABLE_FILES


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    sources = write_sources(folder, seed=21, documents=30)
    rng = random.Random(22)
    (folder / "books" / "mail.txt").write_text(
        text(rng, 20) + "\nWrite to some.one@printers.org from 93.184.216.34 for more.\n"
    )
    for number in range(3):
        (folder / "books" / f"short{number}.txt").write_text("<b>Too short</b> & rest.")
    (folder / "books" / "broken.txt").write_bytes(b"\xff\xfe\xfa broken \xff" * 9 + b"\0")
    return prepare(corpus_config(folder, sources))


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def test_every_document_is_kept_or_dropped_for_a_reason(report: dict[str, Any]) -> None:
    for source in report["sources"].values():
        unreadable = len(source["unreadable"])
        for unit in ("documents",) if source["replaced"] else ("documents", "bytes"):
            dropped = sum(a[unit] for reason, a in source["dropped"].items() if reason not in ("binary", "encoding"))
            assert source["read"][unit] == source["kept"][unit] + dropped
        assert source["kept"]["documents"] == source["train"]["documents"] + source["validation"]["documents"]
        assert unreadable == sum(a["documents"] for r, a in source["dropped"].items() if r in ("binary", "encoding"))
    books = report["sources"]["books"]
    assert books["dropped"]["few_words"]["documents"] == 3
    assert books["samples"]["few_words"][0]["text"].startswith("<b>Too short</b>")
    assert [Path(entry["path"]).name for entry in books["unreadable"]] == ["broken.txt"]
    assert books["replaced"] == {"emails": 1, "ip_addresses": 1}


def test_near_duplicates_have_examples(report: dict[str, Any]) -> None:
    clusters = report["near_duplicates"]
    dropped = sum(s["dropped"].get("near_duplicate", {"documents": 0})["documents"] for s in report["sources"].values())
    assert clusters["dropped"] == dropped > 0
    largest = clusters["largest"][0]
    assert largest["text"][:40] == largest["dropped"][0]["text"][:40] and largest["source"] in report["sources"]


def test_numbers_are_those_of_the_corpus(out: Path, report: dict[str, Any]) -> None:
    for source in PreparedCorpus.open(out).sources:
        assert report["sources"][source.name]["train"]["tokens"] == source.tokens
        assert report["sources"][source.name]["validation"]["tokens"] == source.validation_tokens
        assert report["mixture"]["shares"][source.name]["tokens"] == source.tokens


def test_stages_have_times_and_memory(report: dict[str, Any]) -> None:
    names = [stage["stage"] for stage in report["stages"]]
    assert names[:3] == ["read-books", "read-notes", "read-programs"] and names[-1] == "tokens"
    assert all(stage["seconds"] > 0 and stage["peak_bytes"] > 1 << 20 for stage in report["stages"])


def test_page_stands_alone_and_escapes_text(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "&lt;b&gt;Too short&lt;/b&gt; &amp; rest." in page and "<b>Too short" not in page
    for word in ("books", "few_words", "broken.txt", "near_duplicate", "asked", "peak GiB"):
        assert word in page
    for name in ("dropped.png", "mixture.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_every_bad_file_is_named_and_cuts_are_told(tmp_path: Path, seed: int) -> None:
    """Whoever reads the report learns of each bad file, in order, whatever the number of tasks; and what is left out."""
    rng = random.Random(seed)
    sources = write_sources(tmp_path, seed=23, documents=15)
    lines = rng.randrange(300, 400)
    (tmp_path / "notes" / "a.jsonl").write_bytes(b"\xff\xfe\n" * lines)
    (tmp_path / "notes" / "latin.jsonl").write_bytes('"caf\u00e9"\n'.encode("latin-1"))
    more = rng.randrange(1, 50)
    for number in range(UNREADABLE_FILES + more):
        (tmp_path / "notes" / f"empty{number:03}.jsonl").write_text('""')
    (tmp_path / "notes" / "zz.jsonl").write_text("{")
    found = []
    for tasks, workers in ((1, 1), (4, 2)):
        config = corpus_config(tmp_path, sources, tasks=tasks, workers=workers, out=str(tmp_path / f"out{tasks}"))
        folder = prepare(config)
        found.append(json.loads((folder / "report.json").read_text())["sources"]["notes"])
    assert found[0]["unreadable"] == found[1]["unreadable"]
    bad = found[0]["unreadable"]
    assert [(Path(e["path"]).name, e["reason"], e["records"]) for e in bad if e["reason"] != "empty"] == [
        ("a.jsonl", "encoding", lines),
        ("latin.jsonl", "encoding", 1),
        ("zz.jsonl", "not_json", 1),
    ]
    empty = [f"empty{number:03}.jsonl" for number in range(UNREADABLE_FILES)]
    assert [Path(e["path"]).name for e in bad if e["reason"] == "empty"] == empty
    assert [first["record"] for first in bad[0]["first"]] == [0, 1, 2]
    assert found[0]["unreadable_not_listed"] == found[1]["unreadable_not_listed"] == {"empty": more}
    page = (folder / "report.html").read_text()
    assert f"and {lines - 3} more records" in page and f"And {more} more files: empty." in page
    assert "latin.jsonl" in page and "zz.jsonl" in page
