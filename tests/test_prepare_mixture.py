"""The mixture is as asked until a source is used up, and what the stream of training windows gives."""

from __future__ import annotations

import random

import pytest

from octavo.prepare.config import SourceConfig
from octavo.prepare.mixture import mixture


def sources(weights: dict[str, float], epochs: float) -> dict[str, SourceConfig]:
    return {name: SourceConfig(weight=weight, max_epochs=epochs) for name, weight in weights.items()}


def test_short_training_gets_what_was_asked() -> None:
    mix = mixture(sources({"a": 3, "b": 1}, 4), {"a": 10_000, "b": 10_000}, 8_000)
    assert mix.shares["a"].got == pytest.approx(0.75, abs=1e-3) and mix.shares["a"].asked == 0.75
    assert mix.shares["b"].epochs == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_caps_hold_and_the_rest_is_shared_by_weight(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcde"
    given = {name: rng.randrange(1_000, 100_000) for name in names}
    config = sources({name: rng.uniform(0.1, 1) for name in names}, rng.uniform(1, 4))
    mix = mixture(config, given, rng.randrange(1_000, 400_000))
    assert sum(share.drawn for share in mix.shares.values()) == mix.train_tokens
    free = {}
    for name, share in mix.shares.items():
        limit = int(config[name].max_epochs * given[name])
        assert share.drawn <= limit
        if share.drawn < limit:
            free[name] = share.drawn / config[name].weight
    if free:
        assert max(free.values()) <= min(free.values()) * 1.01 + 10 / min(s.weight for s in config.values())


def test_first_source_to_run_out_ends_the_exact_mixture() -> None:
    config, given = sources({"a": 1, "b": 1}, 2), {"a": 1_000, "b": 50_000}
    until = mixture(config, given).as_asked_until
    assert until == pytest.approx(4_000, abs=2)
    assert mixture(config, given, until).shares["a"].got == pytest.approx(0.5, abs=1e-3)
    late = mixture(config, given, 20_000).shares
    assert late["a"].drawn == 2_000 and late["b"].drawn == 18_000


def test_training_is_no_longer_than_the_epochs_allow() -> None:
    mix = mixture(sources({"a": 1, "b": 1}, 2), {"a": 1_000, "b": 3_000}, 10**9)
    assert mix.train_tokens == mix.most_tokens == 8_000
    assert {name: share.epochs for name, share in mix.shares.items()} == {"a": 2.0, "b": 2.0}
