"""Configs are complete, typed and saved exactly; wrong settings are refused with the closest right ones."""

from __future__ import annotations

import dataclasses
import json

import pytest

from octavo.formats import BF16, FP16
from octavo.recipe import RECIPES
from octavo.settings import from_dict, override, to_dict
from octavo.train.config import DataConfig, LoopConfig, OptimConfig, TrainConfig


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.steps=1_000", "train.steps", 1000),
        ("train.compile=true", "train.compile", True),
        ("train.compile=FALSE", "train.compile", False),
        ("optim.clip=none", "optim.clip", None),
        ("optim.clip=2", "optim.clip", 2.0),
        ("model.ffn_dim=512", "model.ffn_dim", 512),
        ("model.dialect=llama", "model.dialect", "llama"),
        ("data.path=/a=b/c.txt", "data.path", "/a=b/c.txt"),
        ("recipe=O1", "recipe", RECIPES["O1"]),
        ("recipe.exp_avg_sq_block=none", "recipe.exp_avg_sq_block", None),
        (" seed = 7 ", "seed", 7),
    ],
)
def test_override_is_typed_by_the_field(assignment: str, path: str, value: object) -> None:
    config = override(TrainConfig(), [assignment])
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("optim.lrr=1", ["optim.lrr", "optim.lr"]),
        ("optm.lr=1", ["optm.lr", "optim"]),
        ("zzz=1", ["zzz", "there are", "optim"]),
        ("optim.lr.x=1", ["optim.lr.x", "no parts"]),
        ("optim=1", ["optim", "group", "weight_decay"]),
        ("optim.lr", ["path=value"]),
        ("=3", ["path=value"]),
        ("optim.lr=fast", ["optim.lr", "a number", "fast"]),
        ("optim.lr=nan", ["optim.lr", "a number"]),
        ("optim.lr=-1", ["optim.lr", "-1", "positive"]),
        ("train.steps=10.5", ["train.steps", "an integer", "10.5"]),
        ("train.steps=1e400", ["train.steps", "an integer"]),
        ("train.steps=0", ["train.steps", "at least 1"]),
        ("train.compile=yess", ["train.compile", "true"]),
        ("model.dialect=gpt2", ["model.dialect", "gpt"]),
        ("recipe=O22", ["recipe", "O2"]),
        ("recipe.exp_avg=BF61", ["recipe.exp_avg", "BF16"]),
        ("recipe.exp_avg_block=17", ["exp_avg_block", "17"]),
    ],
)
def test_wrong_override_names_the_remedy(assignment: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        override(TrainConfig(), [assignment])
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_changed_recipe_does_not_keep_its_name() -> None:
    config = override(TrainConfig(), ["recipe=paper", "recipe.master=BF16"])
    assert config.recipe.master is BF16 and config.recipe.name == "paper,master=BF16"


def test_json_round_trip_is_exact() -> None:
    config = override(
        TrainConfig(), ["recipe=paper-4", "optim.lr=0.1", "optim.clip=none", "data.path=/x", "model.ffn_dim=96"]
    )
    again = from_dict(TrainConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert again.recipe.master is FP16


def test_json_is_complete() -> None:
    def leaves(config: object, prefix: str = "") -> set[str]:
        names = set()
        for entry in dataclasses.fields(config):  # type: ignore[arg-type]
            value = getattr(config, entry.name)
            nested = dataclasses.is_dataclass(value) and not hasattr(value, "mantissa_bits")
            names |= leaves(value, f"{prefix}{entry.name}.") if nested else {prefix + entry.name}
        return names

    saved = to_dict(TrainConfig())
    for name in leaves(TrainConfig()):
        value = saved
        for part in name.split("."):
            value = value[part.removesuffix("_")]


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="lrate"):
        from_dict(OptimConfig, {"lrate": 1.0})


def test_missing_fields_take_their_defaults() -> None:
    assert from_dict(LoopConfig, {"steps": 5}) == LoopConfig(steps=5)


def test_configs_are_frozen_and_validated() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().seed = 1  # type: ignore[misc]
    for wrong in ({"seq_len": 1}, {"micro_batch": 0}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"max_bytes": 0}):
        with pytest.raises(ValueError, match=f"data.{next(iter(wrong))}"):
            DataConfig(**wrong)


def test_tokens_per_step() -> None:
    config = override(TrainConfig(), ["data.seq_len=128", "data.micro_batch=3", "train.micro_batches=5"])
    assert config.tokens_per_step == 128 * 3 * 5
