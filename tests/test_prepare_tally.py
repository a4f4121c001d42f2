"""Counts add up over tasks; samples and lists stay short however much is dropped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from datatrove.data import Document

from octavo.prepare.tally import SAMPLE_CHARACTERS, SAMPLES, UNREADABLE, Excerpts, Tally, read_counts, utf8_bytes


def run(folder: Path, rank: int, texts: list[str]) -> Tally:
    """Drops the texts that begin with "no" and passes on the others."""
    tally = Tally(folder, default="by the step")
    documents = [Document(text, f"{rank}.{number}", [], {"path": f"p{number}"}) for number, text in enumerate(texts)]
    documents[0].metadata["emails"] = 2

    def kept():
        for document in tally.reading().run(iter(documents)):
            if document.text.startswith("no"):
                if document.text.startswith("now"):
                    document.metadata["filter_reason"] = "now"
                with tally as writer:
                    writer.write(document, rank)
            else:
                yield document

    assert [d.text for d in tally.run(kept(), rank)] == [text for text in texts if not text.startswith("no")]
    return tally


@pytest.mark.parametrize("seed", [1, 2])
def test_counts_add_up(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = [["yes " + "é" * rng.randrange(9), *rng.choices(["no", "now ß", "yes ü", "yes"], k=30)] for _ in range(3)]
    for rank, texts in enumerate(files):
        run(tmp_path, rank, texts)
    for ranks, chosen in ((None, files), ([0, 2], [files[0], files[2]])):
        counts = read_counts(tmp_path, ranks)
        texts = [text for file in chosen for text in file]
        for amount, wanted in (
            (counts.read, texts),
            (counts.kept, [t for t in texts if not t.startswith("no")]),
            (counts.dropped["now"], [t for t in texts if t.startswith("now")]),
            (counts.dropped["by the step"], [t for t in texts if t == "no"]),
        ):
            assert (amount.documents, amount.bytes) == (len(wanted), sum(len(t.encode()) for t in wanted))
        assert counts.replaced == {"emails": 2 * len(chosen)}


def test_samples_are_few_and_short(tmp_path: Path) -> None:
    run(tmp_path, 0, ["yes", *["no" * 1000] * 50])
    run(tmp_path, 1, ["yes", *["no" * 1000] * 50])
    samples = read_counts(tmp_path).samples["by the step"]
    assert len(samples) == SAMPLES and all(len(sample["text"]) == SAMPLE_CHARACTERS for sample in samples)


def test_unreadable_files_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    tally = Tally(tmp_path)
    for number in range(UNREADABLE + 50):
        metadata = {"filter_reason": "binary", "path": f"f{number}", "record": 0, "detail": "a NUL byte"}
        tally.write(Document("", str(number), [], metadata))
    assert list(tally.run(iter([]))) == []
    counts = read_counts(tmp_path)
    assert counts.dropped["binary"].documents == UNREADABLE + 50
    assert len(counts.unreadable) == UNREADABLE
    assert counts.unreadable[0] == {"path": "f0", "record": 0, "detail": "a NUL byte", "reason": "binary"}


def test_excerpts_are_of_the_named_documents(tmp_path: Path) -> None:
    (tmp_path / "clusters.json").write_text('{"largest": [{"id": "a", "dropped": [{"id": "c", "similarity": 1}]}]}')
    documents = [Document(name * 500, name, [], {"source": "s", "path": f"/{name}"}) for name in "abcd"]
    step = Excerpts(tmp_path / "clusters.json", tmp_path / "excerpts")
    assert len(list(step.run(iter(documents), 3))) == 4
    text = (tmp_path / "excerpts" / "00003.json").read_text()
    assert '"a"' in text and '"c"' in text and '"b"' not in text and "/c" in text


def test_bytes_are_those_of_utf8() -> None:
    for text in ("", "ascii", "é", "日本", "\U0001f600"):
        assert utf8_bytes(text) == len(text.encode())
