"""Contamination filter: training documents that hold evaluation items are left out, by n-gram overlap as for GPT-3.

Items come from a folder of files of records, a file a task, as the evaluation reads them: `boolq_val.jsonl`,
`hellaswag_val.jsonl.gz`, … (`.jsonl` or `.json`, also compressed; "_train", "_test", "_val", "_valid", "_validation" and "_dev" are
no part of the task's name). Of each record, *questions* are the strings under the names in `QUESTIONS`, *answers* the strings, or
lists of them, under those in `ANSWERS`; objects such as {"text": [...], "label": [...]} are looked into. The texts of an item are
each question, the last question with each answer behind it or in its blank "_", and each answer alone.

A document is contaminated if it shares `n` successive words with a text of an item. Case, punctuation and spacing do not count
(`octavo.prepare.ngrams` says what a word is). n = 13 unless told otherwise. An item that has no text of n words counts by its
longest text as a whole, if that has at least `SHORTEST` words: less is ordinary language.

The index holds the sorted 64-bit hashes of those n-grams and their tasks, 9 bytes each, some 20 MB for nine tasks. Looking up a
document costs a pass over its words for each length of text in the index, six at most. The hashes of a document of a million
words meet one of the index by accident with a probability of 1e-6.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.compressed import DAMAGE, open_file
from octavo.prepare.jsonstream import json_values
from octavo.prepare.ngrams import HashTable, find_words, ngram_hashes, word_hashes
from octavo.prepare.records import format_of
from octavo.prepare.reference import load_model, save_model
from octavo.prepare.steps import KINDS, KindFilter

VERSION = 1
SHORTEST = 8
"""Words of the shortest text that counts."""
QUESTIONS = "passage context ctx premise query question stem question_stem goal sentence text input prompt".split()
ANSWERS = "choices endings sol1 sol2 option1 option2 choice1 choice2 answers target completion output".split()
SPLITS = ("_train", "_test", "_val", "_valid", "_validation", "_dev")
LARGEST = 1 << 26
"""Bytes of the longest record."""


def build_index(tasks: str | Path, out: str | Path, n: int = 13) -> dict[str, Any]:
    """Writes the index of the items in the files of the folder `tasks` into the folder `out`. Returns its settings.

    Raises `ValueError` naming a file, or a record (from 1), that holds no item.
    """
    if not SHORTEST <= n <= 100:
        raise ValueError(f"n = {n} words for contamination: give a number from {SHORTEST} to 100")
    files = _task_files(Path(tasks))
    hashes: dict[int, list[np.ndarray]] = {}
    owners: dict[int, list[np.ndarray]] = {}
    items: dict[str, int] = {}
    short = 0
    names = sorted({_task_name(file) for file in files})
    for file in files:
        name = _task_name(file)
        for record in _records(file):
            items[name] = items.get(name, 0) + 1
            grams = _item_ngrams(record, n)
            short += not grams
            for length, keys in grams:
                hashes.setdefault(length, []).append(keys)
                owners.setdefault(length, []).append(np.full(len(keys), names.index(name), dtype=np.uint8))
    arrays = {}
    for length in sorted(hashes):
        keys, first = np.unique(np.concatenate(hashes[length]), return_index=True)
        arrays[f"keys{length}"], arrays[f"tasks{length}"] = keys, np.concatenate(owners[length])[first]
    settings = {
        "format": f"octavo-contamination-{VERSION}",
        "n": n,
        "lengths": sorted(hashes),
        "tasks": names,
        "items": items,
        "items_too_short": short,
        "ngrams": int(sum(len(array) for name, array in arrays.items() if name.startswith("keys"))),
    }
    save_model(Path(out), "contamination", arrays, settings)
    return settings


class ContaminationFilter(KindFilter):
    """Drops documents that hold a stretch of an evaluation item; "contaminated_words" of the metadata is that stretch."""

    name = "contamination"

    def __init__(self, index: str | Path, exclusion_writer: DiskWriter | None = None) -> None:
        """`index`: a folder that `build_index` wrote. Raises `ValueError` if it holds no index."""
        super().__init__(KINDS, exclusion_writer)
        self.index = str(index)
        load_index(self.index)

    def reason(self, doc: Document) -> str | None:
        index = load_index(self.index)
        words = find_words(doc.text)
        for length, table, tasks in index.tables:
            found = table.find(ngram_hashes(words.hashes, length))
            hits = np.flatnonzero(found >= 0)
            if len(hits):
                at = int(hits[0])
                doc.metadata["contaminated_words"] = doc.text[words.starts[at] : words.ends[at + length - 1]]
                return f"contaminated_{index.names[tasks[found[at]]]}"
        return None


class ContaminationIndex:
    """For each length of n-gram in the index: its hashes, and the number of the task of each."""

    def __init__(self, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        self.names = list(settings["tasks"])
        self.tables = [
            (int(length), HashTable(arrays[f"keys{length}"]), arrays[f"tasks{length}"])
            for length in reversed(settings["lengths"])
        ]


@lru_cache(maxsize=2)
def load_index(folder: str) -> ContaminationIndex:
    """The index in a folder, loaded once per process. Raises `ValueError` naming a file that is missing or damaged."""
    arrays, settings = load_model(folder, "contamination", VERSION)
    try:
        return ContaminationIndex(arrays, settings)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{Path(folder) / 'contamination.npz'} holds no index ({error}): make it again") from None


def item_texts(record: dict[str, Any]) -> list[str]:
    """The texts of an item by which it is recognised, see the module's text."""
    flat = dict(_flatten(record))
    questions = [text for name in QUESTIONS for text in flat.get(name, [])]
    answers = [text for name in ANSWERS for text in flat.get(name, [])]
    if not questions:
        return answers
    last = questions[-1]
    blank = " _ " in f" {last} " or "_." in last
    joined = [last.replace("_", answer, 1) if blank else f"{last} {answer}" for answer in answers]
    return [*questions, *joined, *answers]


def _flatten(record: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(name, strings) of each field; an object's "text" stands for the object, its other fields for themselves."""
    for name, value in record.items():
        if isinstance(value, dict):
            inner = dict(_flatten(value))
            yield name, inner.pop("text", [])
            yield from inner.items()
        elif isinstance(value, str):
            yield name, [value]
        elif isinstance(value, list):
            texts = [entry.get("text") if isinstance(entry, dict) else entry for entry in value]
            yield name, [text for text in texts if isinstance(text, str)]


def _item_ngrams(record: dict[str, Any], n: int) -> list[tuple[int, np.ndarray]]:
    """(length, hashes) of the n-grams of an item; of its longest text if none has n words; [] if that is too short."""
    texts = [word_hashes(text) for text in item_texts(record)]
    grams = [ngram_hashes(words, n) for words in texts if len(words) >= n]
    if grams:
        return [(n, np.unique(np.concatenate(grams)))]
    longest = max(texts, key=len)
    return [(len(words), ngram_hashes(words, len(words))) for words in texts if len(words) == len(longest) >= SHORTEST]


def _task_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one with a file of items for each evaluation task")
    files = sorted(path for path in folder.iterdir() if path.is_file() and format_of(path.name) in ("jsonl", "json"))
    if not files:
        raise ValueError(f"{folder} holds no .jsonl or .json file of evaluation items")
    return files


def _task_name(file: Path) -> str:
    name = file.name.split(".")[0]
    for split in SPLITS:
        name = name.removesuffix(split)
    return name


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. Raises `ValueError` for one that is no item."""
    number = 0
    try:
        with open_file(file) as stream:
            values: Iterable[Any] = _lines(stream) if format_of(file.name) == "jsonl" else json_values(stream, LARGEST)
            for number, value in enumerate(values, 1):
                if isinstance(value, ValueError):
                    raise ValueError(f"{file}, record {number}: {value.args[-1]}")
                if not isinstance(value, dict) or not item_texts(value):
                    raise ValueError(
                        f"{file}, record {number}, has none of the fields of an item ({', '.join(QUESTIONS + ANSWERS)})"
                    )
                yield value
    except DAMAGE as error:
        raise ValueError(f"{file} is damaged behind record {number}: {error}") from None
    if not number:
        raise ValueError(f"{file} holds no evaluation item")


def _lines(stream: Iterable[bytes]) -> Iterator[Any]:
    for line in stream:
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:  # also of bytes that are no UTF-8
                yield ValueError(str(error))
