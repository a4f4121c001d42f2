"""Preparation as a whole: what stages depend on, what a kill leaves, what does not change the corpus, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import corpus_config, shard_bytes, text, write_sources

from octavo.data.corpus import PreparedCorpus
from octavo.data.tokens import is_held_out
from octavo.prepare.config import PrepareConfig, TokenizerConfig
from octavo.prepare.executor import only_run
from octavo.prepare.pipeline import prepare
from octavo.settings import override, to_dict


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PrepareConfig]:
    """A corpus that tests copy or only read, and its config."""
    folder = tmp_path_factory.mktemp("corpus")
    config = corpus_config(folder, write_sources(folder, seed=1))
    prepare(config)
    return folder, config


@pytest.fixture
def corpus(made: tuple[Path, PrepareConfig], tmp_path: Path) -> tuple[Path, PrepareConfig]:
    """A copy of the corpus to change; its sources are the same files."""
    shutil.copytree(made[1].out, tmp_path / "out")
    return tmp_path, override(made[1], [f"out={tmp_path / 'out'}"])


def done_again(config: PrepareConfig) -> set[str]:
    """The stages that `prepare` runs tasks of."""
    completions = Path(config.out) / "work"
    before = {path: path.stat().st_mtime_ns for path in completions.glob("*/log/completions/*")}
    prepare(config)
    after = {path: path.stat().st_mtime_ns for path in completions.glob("*/log/completions/*")}
    return {path.parts[-4] for path in after if before.get(path) != after[path]}


LATE = {"sign", "match", "resolve", "select", "sample", "tokenizer", "tokens"}


def texts_of(config: PrepareConfig) -> dict[str, dict[str, list[str]]]:
    """source → split → the texts in the shards."""
    corpus = PreparedCorpus.open(config.out)
    tokenizer = corpus.load_tokenizer()
    found: dict[str, dict[str, list[str]]] = {}
    for source in corpus.sources:
        for split, shards in (("train", source.train), ("validation", source.validation)):
            texts = found.setdefault(source.name, {}).setdefault(split, [])
            for shard in shards:
                for begin, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
                    assert shard.tokens[end - 1] == tokenizer.eot
                    texts.append(tokenizer.decode(shard.tokens[begin:end].tolist()))
    return found


def test_shards_hold_each_document_once_and_by_its_split(made: tuple[Path, PrepareConfig]) -> None:
    folder, config = made
    found = texts_of(config)
    books = {path.read_text() for path in (folder / "books").iterdir()}
    notes = {
        json.loads(line)["text"] for path in (folder / "notes").iterdir() for line in path.read_text().splitlines()
    }
    everything = [t for splits in found.values() for texts in splits.values() for t in texts]
    assert len(everything) == len(set(everything))
    assert set(found["books"]["train"] + found["books"]["validation"]) == books
    kept = found["notes"]["train"] + found["notes"]["validation"]
    assert set(kept) <= notes and len(kept) == 40, "copies of books and of other notes are gone"
    for splits in found.values():
        for split, texts in splits.items():
            assert all(is_held_out(t, config.validation) == (split == "validation") for t in texts)


def test_finished_corpus_costs_nothing_again(corpus: tuple[Path, PrepareConfig]) -> None:
    _, config = corpus
    before = shard_bytes(Path(config.out))
    assert done_again(config) == set()
    assert shard_bytes(Path(config.out)) == before


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("sources.notes.weight=0.9", {"sample", "tokenizer", "tokens"}),
        ("sources.notes.max_epochs=9", set()),
        ("validation=0.2", {"tokens"}),
        ("tokenizer.vocab_size=500", {"tokenizer", "tokens"}),
        ("tokenizer.path=byte", {"tokens"}),
        ("dedup.threshold=0.9", LATE - {"sign", "match"}),
        ("dedup.rows=5", LATE),
        ("dedup.enabled=false", LATE - {"sign", "match", "resolve"}),
        ("sources.programs.filters.code=false", LATE | {"read-programs"}),
        ("workers=2", set()),
    ],
)
def test_a_setting_costs_the_stages_that_depend_on_it(
    corpus: tuple[Path, PrepareConfig], change: str, again: set[str]
) -> None:
    _, config = corpus
    config = override(config, [change])
    assert done_again(config) == again
    opened = PreparedCorpus.open(config.out)
    assert {s.name: (s.weight, s.max_epochs) for s in opened.sources} == {
        name: (s.weight, s.max_epochs) for name, s in config.sources.items()
    }


def test_a_changed_file_costs_its_source_and_what_follows(tmp_path: Path) -> None:
    config = corpus_config(tmp_path, write_sources(tmp_path, seed=2, documents=15), tasks=2)
    prepare(config)
    (tmp_path / "books" / "book003.txt").write_text(text(random.Random(3), 20))
    assert done_again(config) == LATE | {"read-books"}


def test_number_of_tasks_and_workers_changes_no_document(made: tuple[Path, PrepareConfig], tmp_path: Path) -> None:
    config = made[1]
    other = dataclasses.replace(config, out=str(tmp_path / "other"), tasks=5, workers=2)
    prepare(other)
    one, two = texts_of(config), texts_of(other)
    assert {n: {s: sorted(t) for s, t in splits.items()} for n, splits in one.items()} == {
        n: {s: sorted(t) for s, t in splits.items()} for n, splits in two.items()
    }
    assert (Path(config.out) / "tokenizer.json").read_bytes() == (tmp_path / "other" / "tokenizer.json").read_bytes()


# --- kills


SCRIPT = (
    "import json, sys; from octavo.prepare.config import PrepareConfig; from octavo.prepare.pipeline import prepare; "
    "from octavo.settings import from_dict; prepare(from_dict(PrepareConfig, json.loads(sys.argv[1])))"
)


def start(config: PrepareConfig) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(to_dict(config))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def finished_tasks(out: Path) -> int:
    return len(list(out.glob("work/*/log/completions/*")))


def kill_and_resume(config: PrepareConfig, kills: int, seed: int) -> Iterator[int]:
    """Kills runs, each at a random number of finished tasks more than the last left; then lets one finish."""
    out, rng = Path(config.out), random.Random(seed)
    for number in range(kills):
        workers = 1 + (number % 2 == 0)
        process, goal = start(dataclasses.replace(config, workers=workers)), finished_tasks(out) + rng.randrange(1, 12)
        while process.poll() is None and finished_tasks(out) < goal:
            time.sleep(0.02)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        yield finished_tasks(out)
    assert start(config).wait() == 0


def check_kills(folder: Path, config: PrepareConfig, kills: int, seed: int) -> None:
    """Runs that were killed leave the shards of a run that was not, and no process behind."""
    killed = dataclasses.replace(config, out=str(folder / "killed"))
    progress = list(kill_and_resume(killed, kills, seed))
    assert progress == sorted(progress), "no finished task is done again"
    assert shard_bytes(Path(killed.out)) == shard_bytes(Path(config.out))
    assert not list(Path(killed.out).rglob("*.partial"))
    with only_run(Path(killed.out) / "work"):
        pass  # workers of the killed runs are gone: their lock is free


@pytest.mark.timeout(900)
def test_killed_runs_end_in_the_same_bytes(made: tuple[Path, PrepareConfig], tmp_path: Path) -> None:
    check_kills(tmp_path, made[1], kills=3, seed=time.time_ns())


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_killed_runs_end_in_the_same_bytes_slow(tmp_path: Path) -> None:
    """Twenty kills, on the standard library's sources among others."""
    sources = write_sources(tmp_path, seed=5, documents=60)
    stdlib = Path(json.__file__).parent.parent
    sources["stdlib"] = {"kind": "code", "paths": [str(stdlib)], "include": ["*/[a-m]*.py"], "weight": 1.0}
    config = corpus_config(tmp_path, sources, tasks=8)
    prepare(config)
    check_kills(tmp_path, config, kills=20, seed=time.time_ns())


def test_second_run_at_the_same_time_is_refused(corpus: tuple[Path, PrepareConfig]) -> None:
    _, config = corpus
    with only_run(Path(config.out) / "work"), pytest.raises(ValueError, match=f"another run is writing {config.out}"):
        prepare(config)
    prepare(config)


# --- bad input


def test_bad_documents_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, seed=7, documents=15)
    (tmp_path / "books" / "empty.txt").write_text("")
    (tmp_path / "books" / "picture.txt").write_bytes(os.urandom(2000) + b"\0")
    with (tmp_path / "notes" / "part0.jsonl").open("a") as file:
        file.write('{"text": "cut o')
    prepare(corpus_config(tmp_path, sources, validation=0.3, tokenizer={"path": "byte"}))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    bad = {Path(entry["path"]).name: entry["reason"] for entry in report["sources"]["books"]["unreadable"]}
    assert bad == {"empty.txt": "empty", "picture.txt": "binary"}
    assert [(e["reason"], Path(e["path"]).name) for e in report["sources"]["notes"]["unreadable"]] == [
        ("not_json", "part0.jsonl")
    ]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "picture.txt" in page and "part0.jsonl" in page


def test_unfinished_corpus_of_another_config_is_refused(corpus: tuple[Path, PrepareConfig]) -> None:
    _, config = corpus
    (Path(config.out) / "corpus.json").unlink()
    with pytest.raises(ValueError, match=r"unfinished corpus of another config \(dedup.threshold, validation differ\)"):
        prepare(override(config, ["validation=0.3", "dedup.threshold=0.5"]))
    prepare(config)
    assert (Path(config.out) / "corpus.json").exists()


@pytest.mark.parametrize("foreign", ["file", "folder"])
def test_foreign_folder_is_refused_and_left_alone(tmp_path: Path, foreign: str) -> None:
    config = corpus_config(tmp_path, write_sources(tmp_path, seed=8, documents=5))
    out = Path(config.out)
    if foreign == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=str(out)):
        prepare(config)
    assert out.is_file() or [path.name for path in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"paths": ["/nowhere/at/all"]}, ["books", "/nowhere/at/all"]),
        ({"paths": []}, ["sources.books", "nothing to read"]),
        ({"filters": {"quality_rules": {"min_wrods": 3}}}, ["min_wrods", "min_words"]),
        ({"filters": {"qualty": False}}, ["sources.books.filters.qualty", "quality"]),
    ],
)
def test_wrong_sources_are_refused_before_anything_is_read(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    sources = write_sources(tmp_path, seed=9, documents=5)
    sources["books"] |= change
    config = corpus_config(tmp_path, sources)
    with pytest.raises(ValueError) as error:
        prepare(config)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out" / "work" / "config.json").exists()


def test_filters_that_drop_all_are_named(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, seed=10, documents=5)
    config = corpus_config(tmp_path, sources, filters={"quality_rules": {"min_words": 100_000}})
    with pytest.raises(ValueError, match=r"sources.books: the filters dropped all 5 documents \(few_words 5\)"):
        prepare(config)


def test_source_of_copies_only_is_named(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, seed=11, documents=5)
    sources = {"books": sources["books"], "again": {**sources["books"], "weight": 0.1}}
    with pytest.raises(ValueError, match="sources.again: all its documents are near-duplicates"):
        prepare(corpus_config(tmp_path, sources))


def test_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus_config(
        tmp_path, write_sources(tmp_path, seed=12, documents=10), validation=0.3, tokenizer={"path": "byte"}
    )

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("octavo.prepare.tally.Tally.write", full)
    monkeypatch.setattr("octavo.prepare.tally.Tally.run", full)
    with pytest.raises(OSError, match=f"{tmp_path / 'out'} is on a full disk"):
        prepare(config)
    monkeypatch.undo()
    prepare(config)


def test_any_executor_will_do(tmp_path: Path) -> None:
    """Stages are plain datatrove pipelines: its own executor makes the same corpus."""
    from datatrove.executor import LocalPipelineExecutor

    settings = {"dedup": {"enabled": False}, "tokenizer": {"path": "byte"}, "tasks": 1}
    config = corpus_config(tmp_path, write_sources(tmp_path, seed=13, documents=10), validation=0.3, **settings)
    prepare(config)
    calls = []

    def executor(pipeline: list[Any], tasks: int, workers: int, logging_dir: str) -> LocalPipelineExecutor:
        calls.append(tasks)
        return LocalPipelineExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=logging_dir)

    prepare(dataclasses.replace(config, out=str(tmp_path / "other")), executor)
    assert calls == [1, 1, 1, 3, 3]
    assert shard_bytes(tmp_path / "other") == shard_bytes(tmp_path / "out")


def test_given_tokenizer_is_copied_into_the_corpus(made: tuple[Path, PrepareConfig], tmp_path: Path) -> None:
    path = Path(made[1].out) / "tokenizer.json"
    config = dataclasses.replace(made[1], out=str(tmp_path / "out"), tokenizer=TokenizerConfig(path=str(path)))
    prepare(config)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert PreparedCorpus.open(tmp_path / "out").load_tokenizer().name == PreparedCorpus.open(made[1].out).tokenizer


def test_bytes_as_tokens(corpus: tuple[Path, PrepareConfig]) -> None:
    _, config = corpus
    prepare(override(config, ["tokenizer.path=byte"]))
    opened = PreparedCorpus.open(config.out)
    assert opened.tokenizer == "byte" and not (Path(config.out) / "tokenizer.json").exists()
    assert all(np.max(shard.tokens) == 256 for source in opened.sources for shard in source.train)
