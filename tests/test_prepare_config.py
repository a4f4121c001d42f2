"""Configs from presets and files: typed, complete, and wrong ones refused with the setting's name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from octavo.prepare.config import PrepareConfig, changes, load_config
from octavo.prepare.presets import PRESETS
from octavo.settings import from_dict, to_dict

TOML = """
out = "corpora/mine"
[sources.manuals]
kind = "reference"
paths = ["/usr/share/doc"]
weight = 0.3
filters = {language_threshold = 0.3, quality_rules = {min_words = 30}}
[sources.code]
kind = "code"
paths = ["~/src"]
[filters]
languages = ["en", "de"]
quality_rules = {max_symbols = 0.5}
"""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name: str) -> None:
    config = load_config(name)
    assert from_dict(PrepareConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_demo_is_the_mixture_of_the_paper_in_kind() -> None:
    weights = {name: source.weight for name, source in load_config("demo").sources.items()}
    assert weights == {"technical": 0.40, "code": 0.20, "dialogue": 0.20, "prose": 0.10, "reference": 0.10}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reading TOML takes Python 3.11")
def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    import tomllib

    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(json.dumps(tomllib.loads(TOML)))
    one, two = (load_config(str(tmp_path / name)) for name in ("a.toml", "a.json"))
    assert one == two and list(one.sources) == ["manuals", "code"]


def write(folder: Path, **change: object) -> str:
    values = {"out": "x", "sources": {"books": {"paths": ["/books"]}}, **change}
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_filters_of_a_source_are_the_general_ones_with_its_changes(tmp_path: Path) -> None:
    source = {"paths": ["/b"], "filters": {"language": False, "quality_rules": {"min_words": 30}}}
    general = {"languages": ["de"], "quality_rules": {"max_symbols": 0.5}}
    config = load_config(write(tmp_path, sources={"books": source}, filters=general), ["filters.quality=false"])
    filters = config.filters_of("books")
    assert not filters.language and not filters.quality and filters.languages == ("de",)
    assert filters.quality_rules == {"max_symbols": 0.5, "min_words": 30}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": {}}, ["names no source"]),
        ({"sources": {"a b": {"paths": ["/x"]}}}, ["sources.a b", "names a folder"]),
        ({"sources": {"../a": {"paths": ["/x"]}}}, ["sources.../a"]),
        ({"sources": {"a": {}}}, ["sources.a", "nothing to read"]),
        ({"sources": {"a": {"paths": "/x"}}}, ["sources.a.paths", "list"]),
        ({"sources": {"a": {"paths": ["/x"], "weight": 0}}}, ["weight", "positive"]),
        ({"sources": {"a": {"paths": ["/x"], "kind": "poem"}}}, ["sources.a.kind", "poem", "prose"]),
        (
            {"sources": {"a": {"paths": ["/x"], "filters": {"langage": False}}}},
            ["sources.a.filters.langage", "language"],
        ),
        ({"dedup": {"threshold": 1.5}}, ["dedup.threshold", "1.5"]),
        ({"validation": 1}, ["validation", "between 0 and 1"]),
        ({"tokenizer": {"vocab_size": 10}}, ["tokenizer.vocab_size", "257"]),
        ({"tasks": 0}, ["tasks", "at least 1"]),
        ({"out": " "}, ["out", "folder"]),
        ({"ouput": "x"}, ["ouput", "out"]),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        load_config(write(tmp_path, **change))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, ["missing.json", "No such file"]),
        ("cut.json", '{"out": "x"', ["cut.json", "no valid JSON"]),
        ("cut.toml", "[sources", ["cut.toml"]),
        ("list.json", "[1]", ["list.json", "object"]),
        ("text.txt", "x", ["text.txt", "demo"]),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str | None, words: list[str]) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        load_config(str(tmp_path / name))
    assert all(word in str(error.value) for word in words), error.value


def test_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["sources.books.weight=2", "sources.books.filters.code_rules.min_lines=3"])
    assert config.sources["books"].weight == 2 and config.filters_of("books").code_rules == {"min_lines": 3}
    with pytest.raises(ValueError, match="sources.boks"):
        load_config(write(tmp_path), ["sources.boks.weight=2"])


def test_changes_name_what_differs() -> None:
    old = {"a": 1, "b": {"c": 1, "d": 2}, "sources": {"x": {}, "y": {}}}
    assert changes(old, old) == []
    assert changes(old, {"a": 2, "b": {"c": 1, "e": 2}, "sources": {"x": {}, "y": {}}}) == ["a", "b.d", "b.e"]
    assert changes(old, {**old, "sources": {"y": {}, "x": {}}}) == ["the order of the sources"]
