"""Segments cover a text, the held-out tenth is never trained on, and files that are not ours are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octavo.prepare.ngrams import word_hashes
from octavo.prepare.reference import (
    HELD_OUT,
    SEGMENT,
    SHORTEST,
    limit_at,
    load_model,
    percentiles,
    save_model,
    segments,
    split_held_out,
)


def text(words, start=0):
    return " ".join(f"w{i}" for i in range(start, start + words))


def test_segments_cover_each_document_but_short_ends():
    documents = [text(2 * SEGMENT + SHORTEST), text(SEGMENT + SHORTEST - 1), text(SHORTEST - 1)]
    parts = list(segments(documents, 10**6))
    assert [len(part) for part in parts] == [SEGMENT, SEGMENT, SHORTEST, SEGMENT]
    assert (np.concatenate(parts[:3]) == word_hashes(documents[0])).all()


def test_no_more_is_read_than_asked_for():
    def endless():
        number = 0
        while True:
            yield text(SEGMENT, number)
            number += SEGMENT

    assert sum(map(len, segments(endless(), 10 * SEGMENT))) == 10 * SEGMENT


def test_every_tenth_segment_is_held_out():
    parts = [np.array([number], dtype=np.uint64) for number in range(20 * HELD_OUT)]
    train, held_out = split_held_out(parts, "text")
    assert [int(part[0]) for part in held_out] == list(range(HELD_OUT - 1, 20 * HELD_OUT, HELD_OUT))
    assert len(train) == 18 * HELD_OUT + 0 * len(held_out)
    with pytest.raises(ValueError, match="the little text has 20 words in 20 segments: give at least 25,000"):
        split_held_out(parts[:20], "little text")


def test_limits_are_quantiles():
    values = np.random.default_rng(3).normal(size=5000)
    settings = {"percentiles": percentiles(values)}
    for quantile in (0.0, 0.05, 0.5, 0.951, 1.0):
        assert abs(np.mean(values <= limit_at(settings, quantile)) - quantile) < 0.002
    for quantile in (-0.1, 95, float("nan")):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            limit_at(settings, quantile)


def test_files_come_back_as_they_were(tmp_path):
    arrays = {"a": np.arange(5, dtype=np.uint64), "b": np.array([0.5], dtype=np.float32)}
    save_model(tmp_path / "new", "thing", arrays, {"format": "octavo-thing-1", "x": [1, 2]})
    loaded, settings = load_model(tmp_path / "new", "thing", 1)
    assert settings == {"format": "octavo-thing-1", "x": [1, 2]}
    assert all((loaded[name] == array).all() and loaded[name].dtype == array.dtype for name, array in arrays.items())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["thing.json", "thing.npz"]


def test_files_that_are_not_ours(tmp_path):
    with pytest.raises(ValueError, match="thing.json does not exist: make it first"):
        load_model(tmp_path, "thing", 1)
    save_model(tmp_path, "thing", {"a": np.arange(5)}, {"format": "octavo-thing-1"})
    with pytest.raises(ValueError, match="of the format 'octavo-thing-1', not octavo-thing-2: make it again"):
        load_model(tmp_path, "thing", 2)
    whole = (tmp_path / "thing.npz").read_bytes()
    (tmp_path / "thing.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="thing.npz is damaged"):
        load_model(tmp_path, "thing", 1)
    np.savez(tmp_path / "thing.npz", a=np.array([{}], dtype=object))  # a pickle
    with pytest.raises(ValueError, match="thing.npz.*allow_pickle=False"):
        load_model(tmp_path, "thing", 1)
    for damage in ("{", "[]", json.dumps(3)):
        (tmp_path / "thing.json").write_text(damage)
        with pytest.raises(ValueError, match="thing.json is damaged"):
            load_model(tmp_path, "thing", 1)
