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
