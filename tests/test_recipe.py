"""A recipe is a value: it names every format, refuses what cannot work, and its bytes are those of the paper."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from octavo.formats import BF16, E4M3, E5M2, FP16, FP32
from octavo.recipe import RECIPES, Recipe, get_recipe

O2 = RECIPES["O2"]


def resident_bytes(recipe: Recipe) -> float:
    """Bytes of a weight, its gradient and its moments between steps, without scales; plain tensors are FP32."""
    stored = (recipe.master or FP32, recipe.grad or FP32, recipe.exp_avg, recipe.exp_avg_sq)
    return sum(fmt.bits for fmt in stored) / 8


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bf16", 16), ("O1", 13), ("O2", 6), ("paper", 6), ("paper-2b", 6), ("paper-3", 5), ("paper-4", 5)],
)
def test_bytes_per_parameter(name, expected):
    """Eq. 7 (16) and Eq. 8 (6) of FP8-LM, and the other rows of its Table 6."""
    assert resident_bytes(RECIPES[name]) == expected


def test_rows_of_table_6_differ_in_one_field_only():
    def differences(recipe: Recipe) -> dict:
        fields = (field.name for field in dataclasses.fields(Recipe) if field.name != "name")
        return {
            name: getattr(recipe, name) for name in fields if getattr(recipe, name) != getattr(RECIPES["paper"], name)
        }

    assert differences(RECIPES["paper-2b"]) == {"master": BF16}
    assert differences(RECIPES["paper-3"]) == {"master": E4M3}
    assert differences(RECIPES["paper-4"]) == {"exp_avg_sq": E4M3}


def test_lookup():
    assert get_recipe("O2") is O2
    assert get_recipe(O2) is O2
    with pytest.raises(ValueError, match=r"'O9'.*bf16, O1, O2, paper"):
        get_recipe("O9")


def test_names_are_those_of_the_table():
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert not RECIPES["bf16"].converts and RECIPES["O1"].converts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": None}, "set together"),
        ({"weight": FP16}, "E4M3 or E5M2"),
        ({"weight": E5M2}, "must be E4M3"),
        ({"input": None, "weight": None, "grad_output": None}, "without an input format none is converted"),
        ({"head_grad_output": FP16}, "head_grad_output must be E5M2, E4M3 or None"),
        (
            {
                "input": None,
                "weight": None,
                "grad_output": None,
                "master": None,
                "grad": None,
                "head_grad_output": E5M2,
            },
            "set head_grad_output=None",
        ),
        ({"master": FP32}, "keep FP32 parameters"),
        ({"grad": E5M2}, "grad must be E4M3"),
        ({"grad": None}, "set grad=E4M3"),
        ({"exp_avg_block": 100}, "power of two"),
        ({"exp_avg_block": 8192}, "16 to 4096"),
        ({"exp_avg": FP32}, "needs no scale"),
        ({"moments_of": "all"}, "moments_of is 'all': use one of converted, matrices"),
        ({"rounding": "up"}, "'nearest' or 'stochastic'"),
        ({"scaling": "past"}, "'current' or 'delayed'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"recipe 'mine'.*{words}"):
        dataclasses.replace(O2, name="mine", **changes)


def test_frozen_hashable_and_equal_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        O2.master = BF16
    assert dataclasses.replace(O2) == O2 and hash(dataclasses.replace(O2)) == hash(O2)
    assert dataclasses.replace(O2, exp_avg_block=256) != O2


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_copies_keep_the_formats_themselves(recipe):
    """Formats are compared with `is`."""
    for again in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert again == recipe
        assert again.input is recipe.input and again.exp_avg is recipe.exp_avg and again.master is recipe.master
