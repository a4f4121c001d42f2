"""Batches: every window once an epoch, the same for any split over ranks, and resumed to the token."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.data import IndexedShard, IndexedWriter, TokenStream
from octavo.data.stream import Source, permute, round_keys


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


def permuted(size: int, *name: int) -> np.ndarray:
    """0 ... `size` - 1 in the order of the permutation `name`."""
    return np.array([permute(index, size, round_keys(*name)) for index in range(size)])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_is_one(size, seed):
    order = permuted(size, seed, 0)
    assert sorted(order.tolist()) == list(range(size))
    if size > 60:
        assert not np.array_equal(order, permuted(size, seed, 1))
        assert not np.array_equal(order, permuted(size, seed + 1, 0))


def test_permutation_looks_random(seed):
    """Over 30 keys, the correlation of neighbours, the means of first halves and the mean place of each index are as uniform orders'.

    The means are taken together: the mean of their squares, in units of the variance, is chi-square with 30 degrees of freedom over
    30, which is above 2.9 once in three million.
    """
    size, keys = 10_000, 30
    ranks = np.stack([permuted(size, seed, key) for key in range(keys)]) / size - 0.5
    assert abs((ranks[:, :-1] * ranks[:, 1:]).mean() * 12) < 5 / np.sqrt(size * keys)
    assert (ranks[:, : size // 2].mean(1) ** 2).mean() * 12 * size < 2.9
    assert np.abs(ranks.mean(0)).max() < 6 * np.sqrt(1 / 12 / keys)


def test_permutation_never_changes():
    """Saved runs depend on it."""
    assert permuted(10, 0, 0).tolist() == GOLDEN


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


@pytest.mark.parametrize("change", ["seq_len", "seed", "text.tokens"])
def test_state_of_another_stream_is_refused_and_changes_nothing(make_shard, change):
    shard = make_shard(1000)
    state = TokenStream(shard, 16, 4, seed=1).state_dict()
    stream = {
        "seq_len": TokenStream(shard, 32, 4, seed=1),
        "seed": TokenStream(shard, 16, 4, seed=2),
        "text.tokens": TokenStream(make_shard(1001), 16, 4, seed=1),
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
        ({"sources": []}, "no shard"),
        ({"sources": [Source("a", ())]}, "no shard"),
        ({"documents": "apart"}, "documents='apart' must be"),
    ],
)
def test_wrong_arguments(make_shard, arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenStream(**{"sources": make_shard(100), "seq_len": 8, "batch_size": 2, **arguments})


def test_shards_of_two_tokenizers_do_not_mix(make_shard):
    with pytest.raises(ValueError, match=r"2 tokenizers \(a, b\)"):
        TokenStream([make_shard(100, 0, "a"), make_shard(100, 1, "b")], 8, 2)


def test_an_empty_shard_among_others_is_nothing(make_shard):
    stream = TokenStream([make_shard(0), make_shard(100)], 8, 2)
    assert stream.windows == 12 and next(stream)[0].shape == (2, 8)


def test_the_order_of_one_source_never_changes(make_shard):
    """Saved runs depend on it: the windows of the first epochs are the permutation under (seed, epoch)."""
    stream = TokenStream(make_shard(10 * 4 + 1), 4, 10, seed=3)
    for epoch in range(2):
        expected = permuted(10, 3, epoch) * 4
        assert next(stream)[0][:, 0].tolist() == expected.tolist()


# --- mixtures


@pytest.fixture
def make_mixture(make_shard):
    """Three sources whose tokens show where they come from: 0 …, 20,000 … in two shards, and 40,000 ….

    With 9 tokens a window there are 50, 20 + 7 and 12 windows of seq_len 8.
    """

    def make(weights=(0.5, 0.3, 0.2), epochs=(None, None, None)) -> list[Source]:
        shards = [
            (make_shard(403),),
            (make_shard(161, 20_000), make_shard(60, 30_000)),
            (make_shard(103, 40_000),),
        ]
        return [Source(*parts) for parts in zip("abc", shards, weights, epochs, strict=True)]

    return make


def source_of(inputs: torch.Tensor) -> list[int]:
    return (inputs[:, 0] // 20_000).tolist()


def test_shares_are_exact(make_mixture, seed):
    stream = TokenStream(make_mixture(), 8, 10, seed=seed)
    counts = np.zeros(3)
    for step, inputs in enumerate(take(stream, 60), 1):
        counts += np.bincount(source_of(inputs), minlength=3)
        assert np.abs(counts - step * 10 * np.array([0.5, 0.3, 0.2])).max() <= 0.5 + 1.5 * 0.5
    assert counts.tolist() == [300, 180, 120]
    assert stream.epochs == {"a": 300 / 50, "b": 180 / 27, "c": 120 / 12}


def test_every_window_of_a_source_comes_once_an_epoch(make_mixture, seed):
    inputs = torch.cat(take(TokenStream(make_mixture(), 8, 10, seed=seed), 60))
    starts = {
        "a": range(0, 400, 8),
        "b": [*range(20_000, 20_160, 8), *range(30_000, 30_056, 8)],
        "c": range(40_000, 40_096, 8),
    }
    for number, expected in enumerate(starts.values()):
        own = [
            first for first, source in zip(inputs[:, 0].tolist(), source_of(inputs), strict=True) if source == number
        ]
        epochs = [sorted(own[i : i + len(expected)]) for i in range(0, len(own) - len(expected) + 1, len(expected))]
        assert len(epochs) >= 6 and all(epoch == sorted(expected) for epoch in epochs)
        assert own[: len(expected)] != own[len(expected) : 2 * len(expected)]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_one_order_of_a_mixture(make_mixture, world, seed):
    sources = make_mixture(epochs=(None, 2.0, 1.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = torch.cat(take(TokenStream(sources, 8, 12, seed=seed), 20))
        ranks = [TokenStream(sources, 8, 12 // world, seed=seed, rank=rank, world=world) for rank in range(world)]
        parts = [take(stream, 20) for stream in ranks]
    assert torch.equal(torch.cat([parts[rank][step] for step in range(20) for rank in range(world)]), whole)
    assert all(stream.state_dict() == ranks[0].state_dict() for stream in ranks)


@pytest.mark.filterwarnings("ignore:source")
def test_a_mixture_resumes_to_the_token_at_any_batch_and_world(make_mixture, seed):
    sources = make_mixture(epochs=(None, 2.0, 1.0))
    whole = torch.cat(take(TokenStream(sources, 8, 6, seed=seed), 40))
    for taken in (1, 7, 13, 20):
        stream = TokenStream(sources, 8, 6, seed=seed)
        take(stream, taken)
        state = json.loads(json.dumps(stream.state_dict()))
        assert len(json.dumps(state)) < 600
        ranks = [TokenStream(sources, 8, 3, seed=seed, rank=rank, world=4) for rank in range(4)]
        for rank in ranks:
            rank.load_state_dict(state)
        rest = torch.cat([torch.cat([next(rank)[0] for rank in ranks]) for _ in range(3)])
        assert torch.equal(rest, whole[taken * 6 : taken * 6 + 36])


def test_a_used_up_source_is_announced_once_and_shares_its_place(make_mixture, seed):
    """c gives its 12 windows once, 20 of 100 windows while it lasts, then a and b go on as 5 to 3."""
    sources = make_mixture(epochs=(None, None, 1.0))
    stream = TokenStream(sources, 8, 10, seed=seed)
    with pytest.warns(
        UserWarning, match=r"source c has been read 1 times after \d\d sequences; .*: a 62.5%, b 37.5%"
    ) as caught:
        counts = np.bincount(source_of(torch.cat(take(stream, 70))), minlength=3)
    assert len(caught) == 1
    assert counts[2] == 12 and abs(counts[0] - counts[1] * 5 / 3) < 4
    again = TokenStream(sources, 8, 10, seed=seed)
    again.load_state_dict(stream.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(again)


@pytest.mark.filterwarnings("ignore:source")
def test_a_stream_ends_with_the_reason_when_all_sources_are_used_up(make_mixture, seed):
    stream = TokenStream(make_mixture(epochs=(1.0, 2.0, 0.5)), 8, 10, seed=seed)
    assert stream.total == 50 + 54 + 6
    windows = torch.cat(take(stream, 11))
    assert np.bincount(source_of(windows)).tolist() == [50, 54, 6]
    with pytest.raises(ValueError, match="hold 110 sequences of 8 tokens within their max_epochs, and 120 are wanted"):
        next(stream)
    assert stream.position == 110
    stream.check_length(110)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (0.5, 0.3, 0.3)}, r"saved with c\.weight=0\.2 and now has 0\.3"),
        ({"epochs": (None, None, 3.0)}, r"saved with c\.max_epochs=None and now has 3\.0"),
    ],
)
def test_state_of_another_mixture_is_refused(make_mixture, change, message):
    state = TokenStream(make_mixture(), 8, 2).state_dict()
    with pytest.raises(ValueError, match=message):
        TokenStream(make_mixture(**change), 8, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with sources=a, b, c and now has a, b"):
        TokenStream(make_mixture()[:2], 8, 2).load_state_dict(state)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_must_be_positive(make_shard, weight):
    with pytest.raises(ValueError, match=f"weight of source a is {weight}: it must be a positive number"):
        Source("a", (make_shard(100),), weight)
    with pytest.raises(ValueError, match=f"max_epochs of source a is {weight}"):
        Source("a", (make_shard(100),), 1.0, weight)


def test_each_source_must_have_a_window(make_shard):
    sources = [Source("a", (make_shard(100),)), Source("b", (make_shard(7), make_shard(8, 9)))]
    with pytest.raises(
        ValueError, match=r"source b: .*8-9-byte\.bin holds 8 tokens, fewer than the 9 that seq_len=8 needs"
    ):
        TokenStream(sources, 8, 2)
    with pytest.raises(ValueError, match="source a: .*max_epochs=0.01 of them is not one window"):
        TokenStream([Source("a", (make_shard(100),), 1.0, 0.01)], 8, 2)
    with pytest.raises(ValueError, match="two sources are called a"):
        TokenStream([sources[0], sources[0]], 8, 2)


def test_an_id_beyond_the_vocabulary_is_named_with_file_and_position(tmp_path, make_shard):
    with IndexedWriter(tmp_path / "wrong", "int32") as writer:
        writer.add([*range(30), 257, *range(30)])
    stream = TokenStream(IndexedShard.open(tmp_path / "wrong"), 10, 6, vocab_size=257)
    with pytest.raises(ValueError, match=r"wrong\.bin holds token id 257 at position 30, and the vocabulary has 257"):
        next(stream)
    assert stream.position == 0
    assert next(TokenStream(IndexedShard.open(tmp_path / "wrong"), 10, 6, vocab_size=258))
    with IndexedWriter(tmp_path / "negative", "int32") as writer:
        writer.add([3, 4, -1, *range(20)])
    with pytest.raises(ValueError, match=r"negative\.bin holds token id -1 at position 2"):
        next(TokenStream(IndexedShard.open(tmp_path / "negative"), 10, 2, vocab_size=300))
    # the shards' own vocabulary, 60,000 here, is the default
    assert TokenStream(make_shard(100), 8, 2).vocab_size == 60_000


# --- documents


def test_documents_are_numbered_and_no_target_is_in_another(tmp_path, seed):
    """Token i is i, so that its document can be looked up."""
    lengths = np.random.randint(1, 40, size=60)
    ends = np.cumsum(lengths)
    with IndexedWriter(tmp_path / "shard", "int32") as writer:
        for length, end in zip(lengths, ends, strict=True):
            writer.add(np.arange(end - length, end))
    shard = IndexedShard.open(tmp_path / "shard")
    joined, separate = (TokenStream(shard, 32, 4, seed=seed, documents=kind) for kind in ("joined", "separate"))
    for (tokens, following), (inputs, targets, documents) in itertools.islice(zip(joined, separate, strict=False), 8):
        assert torch.equal(tokens, inputs) and documents.dtype == torch.int32 and documents.shape == inputs.shape
        of = torch.from_numpy(np.searchsorted(ends, inputs.numpy(), side="right"))
        assert torch.equal(documents, (of - of[:, :1]).int())
        crosses = torch.from_numpy(np.searchsorted(ends, following.numpy(), side="right")) != of
        assert crosses.any() and torch.equal(targets, following.masked_fill(crosses, -100))


@pytest.mark.parametrize("documents", [100, 50_000])
def test_memory_does_not_grow_with_the_corpus(tmp_path, documents, seed):
    """What Python and NumPy hold for a stream over 20 tokens a document, tables of documents included."""
    with IndexedWriter(tmp_path / "shard", "uint16") as writer:
        for i in range(documents):
            writer.add(np.full(20, i % 1000))
    gc.collect()
    tracemalloc.start()
    stream = TokenStream(IndexedShard.open(tmp_path / "shard"), 64, 4, documents="separate", vocab_size=1000)
    for _ in range(50):
        next(stream)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000


@pytest.mark.gpu
def test_pinned_batches(make_shard):
    inputs, targets = next(TokenStream(make_shard(1000), 16, 4, pin_memory=True))
    assert inputs.is_pinned() and targets.is_pinned()
