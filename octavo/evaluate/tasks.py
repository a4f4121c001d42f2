"""The nine zero-shot tasks of FP8-LM's Table 2, from local files or from the hub, with the prompts of lm-evaluation-harness.

A task is the harness's own: its configuration is included, not rewritten, and only the source of its records is replaced. So
prompts, answers and metrics are the harness's, and numbers can be compared with published ones. A local folder holds one file
of JSON lines a task, `NAME.jsonl` or `NAME_test.jsonl` (`_val`, `_valid`, `_validation`), also with `.gz`, with the field names of
the hub's data sets (docs/evaluation.md lists them). Every record is checked before anything is evaluated.

One format is not the hub's: HellaSwag records with a single `query` instead of `activity_label`, `ctx_a` and `ctx_b`. There the
harness cannot capitalise the first word of `ctx_b`, so those prompts differ in one letter's case.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.evaluate.models import sha256

Record = dict[str, Any]
SUFFIXES = ("", "_test", "_val", "_valid", "_validation")
HUB = "hub"
WHOLE_CONTEXT = "contexts in one piece: the first word of their second part keeps its case"
"""Note on HellaSwag records with a `query`."""


@dataclass(frozen=True)
class ZeroShotTask:
    """One task: where the harness keeps its configuration, and how a record of it must look."""

    name: str
    """As the harness calls it."""
    config: str
    """The YAML file below the harness's folder of tasks."""
    check: Callable[[Record], Record]
    """A record of a file → the fields that the harness reads. Raises `ValueError` that names the field."""


@dataclass(frozen=True)
class LocalTask:
    """The records of one task, read and checked."""

    task: ZeroShotTask
    path: Path
    records: list[Record] = field(repr=False)
    sha256: str
    """Of the file."""
    note: str
    """Where the prompts differ from those of the hub's data; else empty."""


def _field(record: Record, name: str, kind: type | tuple[type, ...] = str) -> Any:
    if name not in record:
        raise ValueError(f"the field {name!r} is missing; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"the field {name!r} is {value!r:.60}, and it must be a {wanted}")
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"the field {name!r} is empty")
    return value


def _label(record: Record, choices: int, name: str = "label") -> int:
    value = _field(record, name, (int, str))
    if str(value) not in map(str, range(choices)):
        raise ValueError(f"the field {name!r} is {value!r}: it must be from 0 to {choices - 1}")
    return int(value)


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(v, str) and v.strip() for v in value):
        raise ValueError(f"the field {name!r} is {value!r:.60}: it must be a list of two or more texts")
    return value


def _hellaswag(record: Record) -> Record:
    endings = _texts(_field(record, "endings", list), "endings")
    checked = {"endings": endings, "label": _label(record, len(endings))}
    if "query" in record:
        activity, colon, context = _field(record, "query").partition(": ")
        if not colon:
            raise ValueError("the field 'query' has no 'activity: ' at its beginning")
        return {"activity_label": activity, "ctx_a": context, "ctx_b": "", **checked}
    if not isinstance(record.get("ctx_b", ""), str):
        raise ValueError(f"the field 'ctx_b' is {record['ctx_b']!r:.60}, and it must be a str")
    names = ("activity_label", "ctx_a")
    return {**{name: _field(record, name) for name in names}, "ctx_b": record.get("ctx_b", ""), **checked}


def _lambada(record: Record) -> Record:
    text = _field(record, "text")
    if len(text.split(" ")) < 2 or not text.split(" ")[-1]:
        raise ValueError(f"the field 'text' is {text!r:.60}: it needs two words or more, and no blank at its end")
    return {"text": text}


def _boolq(record: Record) -> Record:
    return {"passage": _field(record, "passage"), "question": _field(record, "question"), "label": _label(record, 2)}


def _piqa(record: Record) -> Record:
    return {**{name: _field(record, name) for name in ("goal", "sol1", "sol2")}, "label": _label(record, 2)}


def _copa(record: Record) -> Record:
    question = _field(record, "question")
    if question not in ("cause", "effect"):
        raise ValueError(f"the field 'question' is {question!r}: it must be 'cause' or 'effect'")
    texts = {name: _field(record, name) for name in ("premise", "choice1", "choice2")}
    return {**texts, "question": question, "label": _label(record, 2)}


def _winogrande(record: Record) -> Record:
    sentence, answer = _field(record, "sentence"), _field(record, "answer")
    if "_" not in sentence or answer not in ("1", "2"):
        raise ValueError(
            f"'sentence' needs a '_' and 'answer' must be '1' or '2', and they are {sentence!r:.60} and {answer!r}"
        )
    return {"sentence": sentence, **{name: _field(record, name) for name in ("option1", "option2")}, "answer": answer}


def _multiple_choice(question: str) -> Callable[[Record], Record]:
    def check(record: Record) -> Record:
        choices = _field(record, "choices", dict)
        texts = _texts(choices.get("text"), "choices.text")
        labels = _texts(choices.get("label"), "choices.label")
        answer = _field(record, "answerKey").strip()
        if len(labels) != len(texts) or answer not in labels:
            raise ValueError(
                f"'answerKey' is {answer!r}, and 'choices' has {len(texts)} texts with the labels {labels}"
            )
        return {question: _field(record, question), "choices": {"text": texts, "label": labels}, "answerKey": answer}

    return check


TASKS: dict[str, ZeroShotTask] = {
    task.name: task
    for task in (
        ZeroShotTask("hellaswag", "hellaswag/hellaswag.yaml", _hellaswag),
        ZeroShotTask("lambada_openai", "lambada/lambada_openai.yaml", _lambada),
        ZeroShotTask("boolq", "super_glue/boolq/default.yaml", _boolq),
        ZeroShotTask("piqa", "piqa/piqa.yaml", _piqa),
        ZeroShotTask("copa", "super_glue/copa/default.yaml", _copa),
        ZeroShotTask("winogrande", "winogrande/default.yaml", _winogrande),
        ZeroShotTask("arc_challenge", "arc/arc_challenge.yaml", _multiple_choice("question")),
        ZeroShotTask("arc_easy", "arc/arc_easy.yaml", _multiple_choice("question")),
        ZeroShotTask("openbookqa", "openbookqa/openbookqa.yaml", _multiple_choice("question_stem")),
    )
}
"""The tasks of Table 2, by the harness's names, in its order."""


def choose_tasks(names: Sequence[str] | None) -> list[ZeroShotTask]:
    """The tasks of those names, all nine for None. Raises `ValueError` with the closest names."""
    for name in names or ():
        if name not in TASKS:
            close = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(TASKS)}"
            raise ValueError(f"no task is called {name!r}; {hint}")
    return [task for name, task in TASKS.items() if names is None or name in names]


def find_file(folder: Path, name: str) -> Path | None:
    """The file of a task in `folder`, or None. Raises `ValueError` if there are several."""
    names = [f"{name}{suffix}.jsonl{gz}" for suffix in SUFFIXES for gz in ("", ".gz")]
    found = [folder / entry for entry in names if (folder / entry).is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder} has several files for {name}: {', '.join(p.name for p in found)}; keep one of them")
    return found[0] if found else None


def read_tasks(
    folder: str | Path, names: Sequence[str] | None = None, limit: int | None = None
) -> tuple[list[LocalTask], dict[str, str]]:
    """(the tasks whose files lie in `folder`, with their first `limit` records; name → why it is missing, for the others).

    Raises `ValueError` for an unknown name, a folder without any of the files, and a record that is damaged or lacks a field, with
    its file and line. The whole file is checked, whatever the limit.
    """
    folder = Path(folder).expanduser()
    chosen = choose_tasks(names)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one with files such as {chosen[0].name}.jsonl, or {HUB!r}")
    tasks: list[LocalTask] = []
    missing: dict[str, str] = {}
    for task in chosen:
        path = find_file(folder, task.name)
        if path is None:
            missing[task.name] = f"no {task.name}.jsonl"
            continue
        records, whole = [], False
        for raw, record in _read_records(path, task.check):
            whole = whole or (task.name == "hellaswag" and "query" in raw)
            records.append(record)
        tasks.append(LocalTask(task, path, records[:limit], sha256(path), WHOLE_CONTEXT if whole else ""))
    if not tasks:
        raise ValueError(
            f"{folder} has no file of a task: looked for {', '.join(f'{task.name}.jsonl' for task in chosen)}"
        )
    return tasks, missing


def _read_records(path: Path, check: Callable[[Record], Record]) -> Iterator[tuple[Record, Record]]:
    """(record as it stands, record as the harness reads it) for each line that is not blank."""
    number = count = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"it is a {type(record).__name__}, and a record is an object")
                    yield record, check(record)
                    count += 1
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}, is no JSON ({error.msg}): {line[:60]!r}") from None
                except UnicodeDecodeError:
                    raise ValueError(f"{path}, line {number}, is no UTF-8 text: {line[:60]!r}") from None
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read after line {number} ({error}): get the file again") from None
    if count == 0:
        raise ValueError(f"{path} is empty: a task needs a record a line")


def harness_tasks(tasks: Sequence[LocalTask], folder: Path) -> Any:
    """The tasks as the harness's own `TaskDict`, with what they need in `folder`, which must outlive them."""
    import lm_eval.tasks

    _quiet()
    _keep_templates()
    root = Path(lm_eval.tasks.__file__).parent
    for local in tasks:
        data = folder / f"{local.task.name}.jsonl"
        with data.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in local.records)
        changes: Mapping[str, Any] = {
            "include": str(root / local.task.config),
            "task": local.task.name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
        }
        (folder / f"{local.task.name}.yaml").write_text(json.dumps(changes))  # JSON is YAML
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    return manager.load([local.task.name for local in tasks])


def hub_tasks(tasks: Sequence[ZeroShotTask]) -> Any:
    """The tasks with the data sets of the hub, or of its local cache. Raises `ValueError` if it cannot be reached."""
    import lm_eval.tasks

    _quiet()
    _keep_templates()
    root = Path(lm_eval.tasks.__file__).parent
    folders = sorted({str((root / task.config).parent) for task in tasks})
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    try:
        return manager.load([task.name for task in tasks])
    except (OSError, ValueError) as error:  # no network, or nothing in the cache while offline
        raise ValueError(
            f"the data sets of the hub cannot be had here ({str(error).splitlines()[0]}): give a folder of JSON lines instead"
        ) from error


def _quiet() -> None:
    """The harness warns of every default that it takes, and datasets draws a bar for every file."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def _keep_templates() -> None:
    """The harness compiles the templates of a task anew for every record, which takes longer than a small model does."""
    from lm_eval.utils import env

    if not hasattr(env.from_string, "cache_info"):
        env.from_string = functools.lru_cache(maxsize=256)(env.from_string)
