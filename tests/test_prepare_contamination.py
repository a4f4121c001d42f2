"""Every planted item is found, however it is written; text that shares fewer words than n is left alone."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
from datatrove.data import Document
from prose import code, prose

from octavo.prepare.contamination import ContaminationFilter, build_index, item_texts


def sentence(rng, words):
    return (
        " ".join(f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(10**6)}" for _ in range(words))
        + "."
    )


def records(seed, count=20):
    """Items of the shapes of the nine tasks."""
    rng = random.Random(seed)

    def s(words):
        return sentence(rng, words)

    def options(words, count=4):
        return [s(words) for _ in range(count)]

    makers = {
        "hellaswag": lambda: {"query": s(20), "endings": options(9), "label": 1},
        "lambada_openai": lambda: {"text": s(60)},
        "boolq": lambda: {"passage": s(80), "question": s(8), "answer": True},
        "piqa": lambda: {"goal": s(7), "sol1": s(15), "sol2": s(15), "label": 0},
        "copa": lambda: {"premise": s(7), "choice1": s(6), "choice2": s(6), "label": 0},
        "winogrande": lambda: {"sentence": f"{s(9)} _ {s(5)}", "option1": s(1), "option2": s(1), "answer": "1"},
        "arc_challenge": lambda: {
            "question": s(18),
            "choices": {"text": options(3), "label": list("ABCD")},
            "answerKey": "A",
        },
        "arc_easy": lambda: {"question": {"stem": s(14), "choices": [{"text": s(3), "label": "A"}]}, "answerKey": "A"},
        "openbookqa": lambda: {
            "question_stem": s(5),
            "choices": {"text": options(4), "label": list("ABCD")},
            "answerKey": "A",
        },
    }
    return {task: [make() for _ in range(count)] for task, make in makers.items()}


@pytest.fixture(scope="module", params=[8, 13, 20])
def index(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    items = records(request.param)
    for number, (task, rows) in enumerate(items.items()):
        name = task + ["", "_test", "_val", "_validation"][number % 4]
        text = "\n".join(map(json.dumps, rows)) if number % 3 else json.dumps(rows)
        path = folder / f"{name}.{'jsonl' if number % 3 else 'json'}"
        path.write_text(text) if number % 2 else path.with_name(path.name + ".gz").write_bytes(
            gzip.compress(text.encode())
        )
    (folder / "README.md").write_text("not a task")
    settings = build_index(folder, folder / "index", request.param)
    return folder / "index", settings, items, request.param


def test_index_knows_its_tasks(index):
    _, settings, items, n = index
    assert settings["tasks"] == sorted(items) and settings["n"] == n
    assert settings["items"] == dict.fromkeys(sorted(items), 20)
    assert settings["items_too_short"] == 0 and n in settings["lengths"] and min(settings["lengths"]) >= 8


def plain(record):
    """An item as a page would show it: its longest question with its first answer."""
    question = (
        record.get("query")
        or record.get("passage")
        or record.get("text")
        or record.get("goal")
        or record.get("premise")
    )
    question = question or record.get("sentence") or record.get("question_stem") or record["question"]
    choices = record.get("choices")
    if isinstance(question, dict):
        question, choices = question["stem"], question["choices"]
    answers = (
        record.get("endings") or choices or [record.get("sol1") or record.get("choice1") or record.get("option1") or ""]
    )
    answers = answers["text"] if isinstance(answers, dict) else answers
    answer = answers[0]["text"] if isinstance(answers[0], dict) else answers[0]
    return question.replace("_", answer) if "_" in question else f"{question} {answer}"


def test_every_planted_item_is_found_however_it_is_written(index):
    folder, _, items, n = index
    rng = random.Random(1)
    step = ContaminationFilter(folder)
    for task, rows in items.items():
        for row in rows:
            planted = plain(row)
            forms = [planted, planted.upper(), planted.replace(" ", "\n  "), planted.replace(" ", ", "), f"“{planted}”"]
            document = Document(
                f"{rng.choice(prose())} {rng.choice(forms)}\n{rng.choice(prose())}", "0", metadata={"kind": "code"}
            )
            assert step.filter(document) == (False, f"contaminated_{task}"), planted
            words = document.metadata["contaminated_words"]
            assert words in document.text and len(words.split()) >= 8


def test_clean_text_is_left_alone(index):
    step = ContaminationFilter(index[0])
    texts = [*prose(), *(text for _, text in code()), "", "one word", "\n".join(prose())]
    assert all(step.filter(Document(text, "0")) is True for text in texts)


def test_fewer_than_n_words_are_no_hit(index):
    folder, _, items, n = index
    step = ContaminationFilter(folder)
    for row in items["lambada_openai"]:
        words = row["text"].split()
        for start in range(0, len(words) - n + 1, 7):
            document = Document(" ".join([*prose()[0].split()[:30], *words[start : start + n - 1], "and so on"]), "0")
            assert step.filter(document) is True
            document.text = " ".join([*prose()[0].split()[:30], *words[start : start + n], "and so on"])
            assert step.filter(document) == (False, "contaminated_lambada_openai")


def test_build_is_deterministic(index, tmp_path):
    folder, settings, _, n = index
    assert build_index(folder.parent, tmp_path, n) == settings
    first, again = (np.load(path / "contamination.npz") for path in (folder, tmp_path))
    assert all((first[name] == again[name]).all() for name in first.files)


def test_item_texts():
    assert item_texts({"passage": "p", "question": "q", "answer": True, "label": 1}) == ["p", "q"]
    assert item_texts({"query": "q", "endings": ["a", "b"]}) == ["q", "q a", "q b", "a", "b"]
    assert item_texts({"sentence": "the _ is x", "option1": "a"}) == ["the _ is x", "the a is x", "a"]
    assert item_texts({"question": {"stem": "s", "choices": [{"text": "a", "label": "A"}]}}) == ["s", "s a", "a"]
    assert item_texts({"id": "x"}) == []


def test_short_items_count_as_a_whole_or_not_at_all(tmp_path):
    rng = random.Random(5)
    long, short = sentence(rng, 9), sentence(rng, 5)
    (tmp_path / "t.jsonl").write_text(json.dumps({"question": long}) + "\n" + json.dumps({"question": short}))
    settings = build_index(tmp_path, tmp_path / "index")
    assert settings["lengths"] == [9] and settings["items_too_short"] == 1
    step = ContaminationFilter(tmp_path / "index")
    assert step.filter(Document(f"so: {long} {short}", "0")) == (False, "contaminated_t")
    assert step.filter(Document(f"so: {' '.join(long.split()[1:])} {short}", "0")) is True


def test_folders_without_items(tmp_path):
    with pytest.raises(ValueError, match="missing is no folder"):
        build_index(tmp_path / "missing", tmp_path / "index")
    with pytest.raises(ValueError, match="holds no .jsonl or .json file"):
        build_index(tmp_path, tmp_path / "index")
    path = tmp_path / "task.jsonl"
    for text, message in (
        ("", "task.jsonl holds no evaluation item"),
        ('{"query": "x"}\n{"query": ', "task.jsonl, record 2: "),
        ('{"label": 1}', "task.jsonl, record 1, has none of the fields of an item"),
        ("[1]", "task.jsonl, record 1, has none"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            build_index(tmp_path, tmp_path / "index")
    with pytest.raises(ValueError, match="n = 3 words for contamination: give a number from 8 to 100"):
        build_index(tmp_path, tmp_path / "index", 3)
    with pytest.raises(ValueError, match="contamination.json does not exist"):
        ContaminationFilter(tmp_path / "index")
    path.rename(tmp_path / "task.jsonl.gz")
    with pytest.raises(ValueError, match="task.jsonl.gz is damaged"):
        build_index(tmp_path, tmp_path / "index")
