"""Settings with named groups, free arguments and lists: overrides, JSON and the errors that name a setting.

Groups, numbers, formats and recipes are tested with the training configs (`test_train_config.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.settings import from_dict, override, to_dict


@dataclass(frozen=True)
class Leaf:
    size: int = 3
    share: float = 0.5
    on: bool = True
    names: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    leaves: dict[str, Leaf] = field(default_factory=dict)
    text: str | None = None


TREE = Tree(leaves={"oak": Leaf(), "ash": Leaf(size=1)})


def test_named_groups_free_arguments_and_lists_are_set() -> None:
    tree = override(
        TREE,
        [
            "leaves.oak.size=7",
            "leaves.ash.names=a, b",
            "leaves.ash.arguments.limit=0.25",
            "leaves.ash.arguments.rule.words=[1, 2]",
            "leaves.ash.arguments.rule.kind=plain text",
        ],
    )
    assert tree.leaves["oak"] == Leaf(size=7)
    assert tree.leaves["ash"].names == ("a", "b")
    assert tree.leaves["ash"].arguments == {"limit": 0.25, "rule": {"words": [1, 2], "kind": "plain text"}}
    assert list(tree.leaves) == ["oak", "ash"] and TREE.leaves["oak"].size == 3


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("leaves.oka.size=1", ["leaves.oka.size", "oak"]),
        ("leaves.oak=1", ["leaves.oak", "group", "size"]),
        ("leaves=1", ["leaves", "named"]),
        ("leaves.oak.siz=1", ["leaves.oak.siz", "leaves.oak.size"]),
        ("leaves.oak.size=x", ["leaves.oak.size", "integer"]),
    ],
)
def test_wrong_override_names_the_remedy(assignment: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        override(TREE, [assignment])
    for word in words:
        assert word in str(error.value)


def test_a_wrong_first_part_is_named_alone() -> None:
    with pytest.raises(ValueError, match=r"no setting is called 'leafs.oak.size'; did you mean leaves\?"):
        override(TREE, ["leafs.oak.size=1"])


def test_round_trip() -> None:
    tree = override(TREE, ["leaves.oak.names=x,y", "leaves.ash.arguments.a.b=null", "text=none"])
    assert from_dict(Tree, json.loads(json.dumps(to_dict(tree)))) == tree


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"leafs": {}}, ["leafs", "leaves"]),
        ({"leaves": {"oak": {"siz": 1}}}, ["leaves.oak.siz", "size"]),
        ({"leaves": {"oak": {"size": "1"}}}, ["leaves.oak.size", "integer", "'1'"]),
        ({"leaves": {"oak": {"size": True}}}, ["leaves.oak.size", "integer"]),
        ({"leaves": {"oak": {"share": float("nan")}}}, ["leaves.oak.share", "number"]),
        ({"leaves": {"oak": {"on": "yes"}}}, ["leaves.oak.on", "true or false"]),
        ({"leaves": {"oak": {"names": "a"}}}, ["leaves.oak.names", "list"]),
        ({"leaves": {"oak": 3}}, ["leaves.oak", "group"]),
        ({"leaves": []}, ["leaves", "group"]),
        ({"text": 3}, ["text", "3"]),
    ],
)
def test_wrong_values_name_the_setting(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        from_dict(Tree, values)
    for word in words:
        assert word in str(error.value)
