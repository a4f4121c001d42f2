"""From config to parts: sizes that do not fit are refused, random state and determinism come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import small_config

from octavo.train.data import Data
from octavo.train.setup import (
    choose_device,
    deterministic,
    model_config,
    random_states,
    set_random_states,
    versions,
)


def test_validation_is_the_same_text_each_time_and_never_training_text(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    data = Data(config.data, config.seed, torch.device("cpu"))
    first, second = list(data.validation(3)), list(data.validation(3))
    assert len(first) == 3
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    inputs, targets = first[0]
    assert inputs.shape == targets.shape == (2, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_is_cut_to_the_text_that_there_is(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    data = Data(config.data, config.seed, torch.device("cpu"))
    held_out = data.validation(10**9)
    (shard,) = data._held_out[0].shards
    assert len(list(held_out)) == (shard.count - 1) // 16 // 2  # windows of 16 tokens, none read twice


def test_training_order_depends_on_the_seed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    batches = [Data(config.data, seed, torch.device("cpu")).next_batch()[0] for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])


def test_vocabulary_must_hold_the_tokenizer(tmp_path: Path) -> None:
    assert model_config(small_config(tmp_path), 257).vocab_size == 257
    assert model_config(small_config(tmp_path, "model.vocab_size=512"), 257).vocab_size == 512
    with pytest.raises(ValueError, match="model.vocab_size is 100: the tokenizer has 257"):
        model_config(small_config(tmp_path, "model.vocab_size=100"), 257)


def test_random_state_comes_back() -> None:
    device = choose_device("cpu")
    states = {name: state.clone() for name, state in random_states(device).items()}
    first = torch.rand(3)
    set_random_states(states, device)
    assert torch.equal(torch.rand(3), first)


def test_determinism_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("inside")
    assert not torch.are_deterministic_algorithms_enabled()


def test_versions_name_what_wrote_a_run() -> None:
    assert versions()["torch"] == torch.__version__ and versions()["octavo"]
