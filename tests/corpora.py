"""Small corpora for the tests of preparation: texts that any machine can make, with copies and bad files among them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from octavo.prepare.config import PrepareConfig
from octavo.settings import from_dict

SUBJECTS = (
    "the reader the printer the binder a worker the press the sheet the folded leaf an old book the margin".split(
        " the "
    )
)
VERBS = "takes folds holds prints cuts moves reads turns lifts sends keeps binds carries opens closes".split()
OBJECTS = "paper ink thread leather boards glue type cloth letters lines pages copies margins covers".split()
LINKS = "and then, because of that, with care, before the evening, in the same room, to the end, that have to be seen,".split(
    ", "
)


def sentence(rng: random.Random) -> str:
    """A sentence of English words, hardly ever the same one twice."""
    number = rng.randrange(10_000)
    return (
        f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(VERBS)} {rng.choice(OBJECTS)} number {number} {rng.choice(LINKS)} "
        f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} of {rng.choice(OBJECTS)}."
    )


def text(rng: random.Random, sentences: int) -> str:
    """Paragraphs of prose."""
    lines = [sentence(rng) for _ in range(sentences)]
    return "\n\n".join(" ".join(lines[i : i + 4]) for i in range(0, len(lines), 4)) + "\n"


def code(rng: random.Random, functions: int) -> str:
    """A Python file."""
    parts = []
    for _ in range(functions):
        name, number = rng.choice(VERBS), rng.randrange(10_000)
        parts.append(
            f"def {name}_{number}({rng.choice(OBJECTS)}, size={number}):\n"
            f'    """{sentence(rng)}"""\n'
            f"    for part in range(size):\n        yield part * {rng.randrange(99)}\n"
        )
    return "\n\n".join(parts)


def write_sources(folder: Path, seed: int, documents: int = 40) -> dict[str, Any]:
    """Three sources below `folder` (books, notes as JSON lines, code), with exact and near copies within and across them."""
    rng = random.Random(seed)
    books, notes, programs = folder / "books", folder / "notes", folder / "programs"
    for path in (books, notes, programs):
        path.mkdir(parents=True)
    texts = [text(rng, rng.randrange(15, 40)) for _ in range(documents)]
    for number, content in enumerate(texts):
        (books / f"book{number:03d}.txt").write_text(content)
    records = [text(rng, rng.randrange(10, 30)) for _ in range(documents)]
    records += [texts[i] + sentence(rng) for i in range(0, documents, 5)]  # near copies of books
    records += [records[i] for i in range(0, documents, 8)]  # exact copies of notes
    rng.shuffle(records)
    for part in range(4):
        lines = [json.dumps({"text": record}) for record in records[part::4]]
        (notes / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    for number in range(documents // 2):
        (programs / f"module{number:03d}.py").write_text(code(rng, rng.randrange(4, 12)))
    return {
        "books": {"kind": "prose", "paths": [str(books)], "weight": 0.5},
        "notes": {"kind": "prose", "paths": [str(notes)], "weight": 0.3},
        "programs": {"kind": "code", "paths": [str(programs)], "weight": 0.2},
    }


def corpus_config(folder: Path, sources: dict[str, Any], **settings: Any) -> PrepareConfig:
    """A config for `sources` with a tokenizer that is trained in a moment, in one process unless told otherwise."""
    values: dict[str, Any] = {
        "out": str(folder / "out"),
        "sources": sources,
        "filters": {"repetition": False, "language_threshold": 0.2},
        "tokenizer": {"vocab_size": 400, "sample_bytes": 100_000},
        "validation": 0.1,
        "tasks": 3,
        "workers": 1,
    }
    return from_dict(PrepareConfig, {**values, **settings})


def shard_bytes(out: Path) -> dict[str, bytes]:
    """The content of every file that a training reads."""
    files = [path for path in (out / "shards").rglob("*") if path.is_file()]
    files += [out / "corpus.json", *out.glob("tokenizer.json")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}
