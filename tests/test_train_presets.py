"""Every preset is complete, is the paper's run where it says so, and does not depend on the recipe."""

from __future__ import annotations

import pytest

from octavo.train.config import TrainConfig
from octavo.train.presets import PRESETS, get_preset


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_documented_complete_config(name: str) -> None:
    config = get_preset(name)
    assert isinstance(config, TrainConfig) and config.name == name and config.out == f"runs/{name}"
    assert PRESETS[name].__doc__


@pytest.mark.parametrize(
    ("name", "dim", "heads", "layers", "lr", "batch", "tokens"),
    [
        ("gpt_125m", 768, 12, 12, 6e-4, 2**20, 100e9),
        ("gpt_7b", 4096, 32, 32, 3e-4, 2**22, 100e9),
        ("gpt_13b", 5120, 40, 40, 3e-4, 2**22, 100e9),
        ("gpt_175b", 12288, 96, 96, 3e-5, 2**20, 40e9),
    ],
)
def test_gpt_presets_are_table_1(
    name: str, dim: int, heads: int, layers: int, lr: float, batch: int, tokens: float
) -> None:
    config = get_preset(name)
    assert (config.model.dim, config.model.n_heads, config.model.n_layers) == (dim, heads, layers)
    assert config.tokens_per_step == batch and config.data.seq_len == 2048
    assert abs(config.train.steps * batch - tokens) < batch
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.weight_decay, config.optim.clip) == (
        lr,
        1000,
        0.1,
        1.0,
    )
    assert (config.optim.beta1, config.optim.beta2, config.optim.min_lr_ratio) == (0.9, 0.95, 0.1)


def test_demo_is_long_enough_to_compare() -> None:
    assert get_preset("demo").train.steps >= 300


def test_names_may_be_written_with_hyphens() -> None:
    assert get_preset("gpt-125m") == get_preset("gpt_125m")


@pytest.mark.parametrize(("wrong", "word"), [("dmeo", "demo"), ("gpt-125", "gpt_125m"), ("zzzzzz", "llama_7b")])
def test_unknown_preset_names_the_closest(wrong: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        get_preset(wrong)
    assert wrong in str(error.value)
