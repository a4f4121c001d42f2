"""Counts add up over tasks; samples and lists stay short however much is dropped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from datatrove.data import Document

from octavo.prepare.tally import (
    SAMPLE_CHARACTERS,
    SAMPLES,
    UNREADABLE_RECORDS,
    Excerpts,
    Tally,
    read_counts,
    utf8_bytes,
)


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


def problem(path: str, record: int, reason: str = "binary") -> Document:
    metadata = {"filter_reason": reason, "path": path, "record": record, "detail": f"a NUL byte in {record}"}
    return Document("", f"{path}.{record}", [], metadata)


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_file_of_many_bad_records_hides_no_other(tmp_path: Path, tasks: int, seed: int) -> None:
    """The same list for any number of tasks, also where the records of a file were dealt to several."""
    problems = [problem("a.jsonl", record) for record in range(1000)]
    problems += [problem(f"f{number}", 0) for number in range(500)] + [problem("f7", 9, "not_json")]
    random.Random(seed).shuffle(problems)
    for rank in range(tasks):
        tally = Tally(tmp_path)
        for document in problems[rank::tasks]:
            tally.write(document)
        assert list(tally.run(iter([]), rank)) == []
    counts = read_counts(tmp_path)
    assert counts.dropped["binary"].documents == 1500
    binary = counts.unreadable["binary"]
    assert sorted(binary) == sorted(["a.jsonl", *(f"f{number}" for number in range(500))])
    assert binary["a.jsonl"].records == 1000 and binary["f3"].records == 1
    first = [{"record": record, "detail": f"a NUL byte in {record}"} for record in range(UNREADABLE_RECORDS)]
    assert binary["a.jsonl"].first == first
    assert counts.unreadable["not_json"]["f7"].first == [{"record": 9, "detail": "a NUL byte in 9"}]


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
