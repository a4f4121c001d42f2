"""`octavo prepare` on the command line: a corpus, a config to start from, filters that are trained, one sentence for each mistake."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from corpora import corpus_config, text, write_sources

from octavo.cli import main
from octavo.prepare.config import load_config
from octavo.settings import to_dict


def test_corpus_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus_config(tmp_path, write_sources(tmp_path, seed=31, documents=12), validation=0.3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    assert main(["prepare", str(path), "--set", "tokenizer.path=byte", "--set", f"out={tmp_path / 'other'}"]) == 0
    output = capsys.readouterr().out
    assert "report.html" in output and "weight 0.50" in output
    assert (tmp_path / "other" / "corpus.json").exists() and not (tmp_path / "out").exists()


def test_show_gives_a_config_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "demo", "--show", "--set", "tasks=3"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert load_config(str(tmp_path / "mine.json")) == load_config("demo", ["tasks=3"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], ["nothing", "demo"]),
        (["demo", "--set", "sources.code.wieght=1"], ["sources.code.wieght", "weight"]),
        (["demo", "--out", "models"], ["--out", "train-filters"]),
        (["train-filters", "--reference", "x"], ["--contrast", "--out"]),
        (["train-filters", "--reference", "/nowhere", "--contrast", "/nowhere", "--out", "/nowhere"], ["/nowhere"]),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


def test_trained_filters_judge_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(32)
    reference, contrast = tmp_path / "reference", tmp_path / "contrast"
    for folder in (reference, contrast):
        folder.mkdir()
    for number in range(120):
        (reference / f"{number}.txt").write_text(text(rng, 60))
        noise = " ".join(
            "".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randrange(3, 9))) for _ in range(600)
        )
        (contrast / f"{number}.txt").write_text(f"the of and {noise} to be have that.")
    models = tmp_path / "models"
    command = [
        "prepare",
        "train-filters",
        "--reference",
        str(reference),
        "--contrast",
        str(contrast),
        "--out",
        str(models),
    ]
    assert main(command) == 0, capsys.readouterr().err
    sources = write_sources(tmp_path / "sources", seed=33, documents=12)
    (tmp_path / "sources" / "books" / "noise.txt").write_text((contrast / "0.txt").read_text())
    filters = {"language": False, "quality": False, "repetition": False, "models": str(models)}
    config = corpus_config(tmp_path, {"books": sources["books"]}, filters=filters, validation=0.3)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    assert main(["prepare", str(path)]) == 0, capsys.readouterr().err
    dropped = json.loads((tmp_path / "out" / "report.json").read_text())["sources"]["books"]["samples"]
    judged = [
        Path(entry["path"]).name for name in ("perplexity", "unlike_reference") for entry in dropped.get(name, [])
    ]
    assert "noise.txt" in judged
