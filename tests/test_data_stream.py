"""Batches: every window once an epoch, the same for any split over ranks, and resumed to the token."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.data import IndexedShard, IndexedWriter, TokenStream
from octavo.data.stream import permute


@pytest.fixture
def make_shard(tmp_path):
    """Shards of which token i is (start + i) mod 60,000, so that a window shows where it lies."""

    def make(count: int, start: int = 0, tokenizer: str = "byte") -> IndexedShard:
        prefix = tmp_path / f"{count}-{start}-{tokenizer}"
        with IndexedWriter(prefix, "uint16", SimpleNamespace(name=tokenizer, vocab_size=60_000, eot=0)) as writer:
            if count:
                writer.add((start + np.arange(count)) % 60_000)
        return IndexedShard.open(prefix)

    return make


def take(stream: TokenStream, count: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in itertools.islice(stream, count)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_is_one(size, seed):
    order = permute(np.arange(size), size, (seed, 0))
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(permute(np.arange(size)[::-1], size, (seed, 0)), order[::-1])
    if size > 60:
        assert not np.array_equal(order, permute(np.arange(size), size, (seed, 1)))
        assert not np.array_equal(order, permute(np.arange(size), size, (seed + 1, 0)))


def test_permutation_looks_random(seed):
    """Means and the correlation of neighbours over 40 keys stay within five standard deviations of a uniform order's."""
    size, keys = 10_000, 40
    ranks = np.stack([permute(np.arange(size), size, (seed, key)) for key in range(keys)]) / size - 0.5
    assert abs((ranks[:, :-1] * ranks[:, 1:]).mean() * 12) < 5 / np.sqrt(size * keys)
    assert np.abs(ranks[:, : size // 2].mean(1)).max() < 5 * np.sqrt(1 / 12 / size)
    assert np.abs(ranks.mean(0)).max() < 6 * np.sqrt(1 / 12 / keys)


def test_permutation_never_changes():
    """Saved runs depend on it."""
    assert permute(np.arange(10), 10, (0, 0)).tolist() == permute(np.arange(10), 10, (0, 0)).tolist()
    assert permute(np.arange(10), 10, (0, 0)).tolist() == GOLDEN


GOLDEN = [1, 9, 6, 4, 7, 0, 8, 3, 5, 2]


def test_batches_are_windows_and_their_successors(make_shard, seed):
    stream = TokenStream(make_shard(1000), 16, 4, seed=seed)
    inputs, targets = next(stream)
    for batch in (inputs, targets):
        assert batch.shape == (4, 16) and batch.dtype == torch.int64 and batch.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % 16 == 0).all()


def test_an_epoch_visits_every_window_once(make_shard, seed):
    shards = [make_shard(1000), make_shard(5, 30_000), make_shard(97, 40_000)]
    stream = TokenStream(shards, 16, 4, seed=seed)
    assert stream.windows == 62 + 0 + 6
    epochs = [sorted(torch.cat(take(stream, 17))[:, 0].tolist()) for _ in range(2)]
    expected = sorted([*range(0, 62 * 16, 16), *range(40_000, 40_000 + 6 * 16, 16)])
    assert epochs[0] == epochs[1] == expected
    assert stream.epoch == 2


def test_epochs_and_seeds_have_their_own_order(make_shard, seed):
    shard = make_shard(64 * 16 + 1)
    stream = TokenStream(shard, 16, 64, seed=seed)
    first, second = take(stream, 2)
    (other,) = take(TokenStream(shard, 16, 64, seed=seed + 1), 1)
    (again,) = take(TokenStream(shard, 16, 64, seed=seed), 1)
    assert not torch.equal(first, second) and not torch.equal(first, other) and torch.equal(first, again)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_one_global_order(make_shard, world, seed):
    """Also across the end of an epoch, at which no window is left out or repeated."""
    shard = make_shard(16 * 50 + 3)
    whole = torch.cat(take(TokenStream(shard, 16, 12, seed=seed), 10))
    ranks = [TokenStream(shard, 16, 12 // world, seed=seed, rank=rank, world=world) for rank in range(world)]
    parts = [take(stream, 10) for stream in ranks]
    assert torch.equal(torch.cat([parts[rank][step] for step in range(10) for rank in range(world)]), whole)


def test_micro_batches_are_parts_of_the_batch(make_shard, seed):
    shard = make_shard(2000)
    assert torch.equal(
        torch.cat(take(TokenStream(shard, 8, 12, seed=seed), 3)),
        torch.cat(take(TokenStream(shard, 8, 4, seed=seed), 9)),
    )


def test_resume_continues_with_the_next_token(make_shard, seed):
    shard = make_shard(1000)
    stream = TokenStream(shard, 16, 4, seed=seed)
    take(stream, 21)  # into the second epoch
    state = json.loads(json.dumps(stream.state_dict()))
    expected = take(stream, 5)
    resumed = TokenStream(shard, 16, 4, seed=seed)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(take(resumed, 5), expected, strict=True))


def test_resume_on_another_number_of_ranks(make_shard, seed):
    shard = make_shard(1000)
    stream = TokenStream(shard, 16, 4, seed=seed)
    take(stream, 3)
    ranks = [TokenStream(shard, 16, 2, seed=seed, rank=rank, world=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(stream.state_dict())
    assert torch.equal(torch.cat([take(rank, 1)[0] for rank in ranks]), take(stream, 1)[0])


@pytest.mark.parametrize("change", ["seq_len", "seed", "shards"])
def test_state_of_another_stream_is_refused_and_changes_nothing(make_shard, change):
    shard = make_shard(1000)
    state = TokenStream(shard, 16, 4, seed=1).state_dict()
    stream = {
        "seq_len": TokenStream(shard, 32, 4, seed=1),
        "seed": TokenStream(shard, 16, 4, seed=2),
        "shards": TokenStream(make_shard(1001), 16, 4, seed=1),
    }[change]
    next(stream)
    with pytest.raises(ValueError, match=f"saved with {change}="):
        stream.load_state_dict(state)
    assert stream.position == 4


def test_smallest_text(make_shard):
    stream = TokenStream(make_shard(17), 16, 3)
    inputs, targets = next(stream)
    assert inputs.tolist() == [list(range(16))] * 3 and targets.tolist() == [list(range(1, 17))] * 3
    with pytest.raises(ValueError, match="holds 16 tokens, fewer than the 17 that seq_len=16 needs"):
        TokenStream(make_shard(16), 16, 3)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        TokenStream(make_shard(0), 16, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"shards": []}, "no shard"),
    ],
)
def test_wrong_arguments(make_shard, arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenStream(**{"shards": make_shard(100), "seq_len": 8, "batch_size": 2, **arguments})


def test_shards_of_two_tokenizers_do_not_mix(make_shard):
    with pytest.raises(ValueError, match=r"2 tokenizers \(a, b\)"):
        TokenStream([make_shard(100, 0, "a"), make_shard(100, 1, "b")], 8, 2)


@pytest.mark.gpu
def test_pinned_batches(make_shard):
    inputs, targets = next(TokenStream(make_shard(1000), 16, 4, pin_memory=True))
    assert inputs.is_pinned() and targets.is_pinned()
