"""Records of local files: checked with file and line, and turned into the harness's own prompts."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from evaluating import task_records, write_lines

from octavo.evaluate.tasks import TASKS, WHOLE_CONTEXT, choose_tasks, find_file, harness_tasks, read_tasks


def test_the_nine_tasks_in_their_order():
    assert list(TASKS) == [
        "hellaswag",
        "lambada_openai",
        "boolq",
        "piqa",
        "copa",
        "winogrande",
        "arc_challenge",
        "arc_easy",
        "openbookqa",
    ]


def test_unknown_names_get_the_closest():
    with pytest.raises(ValueError, match="no task is called 'arc_hard'; did you mean arc_"):
        choose_tasks(["piqa", "arc_hard"])
    with pytest.raises(ValueError, match="there are hellaswag, lambada_openai"):
        choose_tasks(["zzz"])
    assert [task.name for task in choose_tasks(["piqa", "boolq"])] == ["boolq", "piqa"]


def test_files_by_name_with_split_and_gz(tmp_path, seed):
    records = task_records(random.Random(seed), 3)
    write_lines(tmp_path / "piqa_valid.jsonl", records["piqa"])
    (tmp_path / "boolq.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(r) + "\n" for r in records["boolq"]).encode())
    )
    tasks, missing = read_tasks(tmp_path, limit=2)
    assert {one.task.name: one.records for one in tasks} == {"boolq": records["boolq"][:2], "piqa": records["piqa"][:2]}
    assert missing["copa"] == "no copa.jsonl" and len(missing) == 7
    write_lines(tmp_path / "piqa.jsonl", records["piqa"])
    with pytest.raises(ValueError, match=r"several files for piqa: piqa.jsonl, piqa_valid.jsonl"):
        find_file(tmp_path, "piqa")


@pytest.mark.parametrize("name", list(TASKS))
def test_a_missing_field_or_a_wrong_one_names_file_and_line(tmp_path, seed, name):
    rng = random.Random(seed)
    good = task_records(rng, 4)[name]
    for field in good[0]:
        if (name, field) == ("hellaswag", "ctx_b"):
            continue  # many records of the hub have an empty one
        for bad in ({k: v for k, v in good[2].items() if k != field}, {**good[2], field: None}, {**good[2], field: ""}):
            path = write_lines(tmp_path / f"{name}.jsonl", [*good[:2], bad, good[3]])
            with pytest.raises(ValueError, match=rf"{name}\.jsonl, line 3: .*'{field}") as error:
                read_tasks(tmp_path, [name], limit=1)
            assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"goal": "a", "sol1": "b", "so', "is no JSON"),
        ('"text"', "it is a str, and a record is an object"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', "must be from 0 to 1"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": true}', "must be"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": NaN}', "must be"),
    ],
)
def test_damaged_lines(tmp_path, line, message):
    good = '{"goal": "a", "sol1": "b", "sol2": "c", "label": 1}\n'
    (tmp_path / "piqa.jsonl").write_text(good + "\n" + line)
    with pytest.raises(ValueError, match=f"piqa.jsonl, line 3.*{message}"):
        read_tasks(tmp_path, ["piqa"])


def test_damaged_files(tmp_path, seed):
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match="piqa.jsonl is empty"):
        read_tasks(tmp_path, ["piqa"])
    path.write_bytes(b'{"goal": "\xff"}')
    with pytest.raises(ValueError, match="line 1, is no UTF-8"):
        read_tasks(tmp_path, ["piqa"])
    path.unlink()
    content = gzip.compress(
        "".join(json.dumps(r) + "\n" for r in task_records(random.Random(seed), 200)["piqa"]).encode()
    )
    (tmp_path / "piqa.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="piqa.jsonl.gz cannot be read after line"):
        read_tasks(tmp_path, ["piqa"])
    with pytest.raises(ValueError, match="has no file of a task: looked for copa.jsonl"):
        read_tasks(tmp_path, ["copa"])
    with pytest.raises(ValueError, match="is no folder"):
        read_tasks(tmp_path / "nowhere")


def test_answers_must_be_among_the_labels(tmp_path):
    record = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"}
    write_lines(tmp_path / "arc_easy.jsonl", [record])
    with pytest.raises(ValueError, match="line 1: 'answerKey' is 'C'"):
        read_tasks(tmp_path, ["arc_easy"])


def test_prompts_are_those_of_the_harness(tmp_path):
    """Of the tasks whose prompts the harness computes with code of its own, and of one that only has a template."""
    records = {
        "hellaswag": {
            "activity_label": "Roofs",
            "ctx_a": "A man [title] sits  up.",
            "ctx_b": "he",
            "endings": ["sings.", "[x] falls."],
            "label": "1",
        },
        "copa": {
            "premise": "It rained.",
            "choice1": "We went in.",
            "choice2": "We sang.",
            "question": "effect",
            "label": 0,
        },
        "winogrande": {"sentence": "Ann saw Bo because _ ran.", "option1": "Ann", "option2": "Bo", "answer": "2"},
        "boolq": {"passage": "Water is wet.", "question": "is water wet", "label": 1},
    }
    for name, record in records.items():
        write_lines(tmp_path / "data" / f"{name}.jsonl", [record])
    local, _ = read_tasks(tmp_path / "data")
    tasks = harness_tasks(local, tmp_path)["tasks"]
    found = {}
    for name, task in tasks.items():
        task.set_config(key="num_fewshot", value=0)
        task.build_all_requests()
        found[name] = [request.args for request in task.instances]
    assert found == {
        "hellaswag": [("Roofs: A man. sits up. He", " sings."), ("Roofs: A man. sits up. He", "  falls.")],
        "copa": [("It rained therefore", "  we went in."), ("It rained therefore", "  we sang.")],
        "winogrande": [("Ann saw Bo because Ann", " ran."), ("Ann saw Bo because Bo", " ran.")],
        "boolq": [("Water is wet.\nQuestion: is water wet?\nAnswer:", f" {answer}") for answer in ("no", "yes")],
    }


def test_hellaswag_in_one_piece_differs_by_a_capital_alone(tmp_path):
    split = {"activity_label": "Roofs", "ctx_a": "A man sits up.", "ctx_b": "he", "endings": ["a", "b"], "label": 0}
    whole = {"query": "Roofs: A man sits up. he", "endings": ["a", "b"], "label": 0}
    queries = []
    for number, record in enumerate((split, whole)):
        write_lines(tmp_path / f"data{number}" / "hellaswag.jsonl", [record])
        local, _ = read_tasks(tmp_path / f"data{number}", ["hellaswag"])
        assert local[0].note == (WHOLE_CONTEXT if number else "")
        (tmp_path / f"scratch{number}").mkdir()
        task = harness_tasks(local, tmp_path / f"scratch{number}")["tasks"]["hellaswag"]
        queries.append(task.doc_to_text(task.eval_docs[0]))
    assert queries == ["Roofs: A man sits up. He", "Roofs: A man sits up. he"]
    write_lines(tmp_path / "hellaswag.jsonl", [{**whole, "query": "no colon"}])
    with pytest.raises(ValueError, match="line 1: the field 'query'"):
        read_tasks(tmp_path, ["hellaswag"])


def test_a_template_of_the_harness_is_compiled_once(tmp_path, seed):
    from lm_eval.utils import apply_template, env

    records = task_records(random.Random(seed), 2)
    write_lines(tmp_path / "piqa.jsonl", records["piqa"])
    (tmp_path / "scratch").mkdir()
    for _ in range(2):
        harness_tasks(read_tasks(tmp_path)[0], tmp_path / "scratch")
    template = f"{seed}: {{{{goal}}}}"
    answers = [apply_template(template, record) for record in records["piqa"]]
    assert answers == [f"{seed}: {record['goal']}" for record in records["piqa"]]
    assert env.from_string(template) is env.from_string(template)
