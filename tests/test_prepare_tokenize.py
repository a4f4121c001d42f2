"""The tokenizer's sample follows the weights within its budget; training and shards are the same in every run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from corpora import text
from datatrove.data import Document

from octavo.data.indexed import IndexedShard
from octavo.data.tokenizers import load_tokenizer
from octavo.data.tokens import is_held_out
from octavo.prepare.tokenize import Sample, TrainTokenizer, WriteShards, sample_shares


def documents(seed: int, count: int, source: str = "books") -> list[Document]:
    rng = random.Random(seed)
    return [Document(text(rng, rng.randrange(5, 30)), f"{source}{i}", [], {"source": source}) for i in range(count)]


def test_sample_is_shared_by_weight_and_bounded() -> None:
    sizes = {"big": 1_000_000, "small": 1_000}
    shares = sample_shares({"big": 3.0, "small": 1.0}, sizes, 100_000)
    assert shares == {"big": 0.075, "small": 1.0}
    assert sum(shares[name] * sizes[name] for name in sizes) <= 100_000


@pytest.mark.parametrize("seed", [1, 2])
def test_sample_is_a_property_of_the_text(seed: int) -> None:
    given = documents(seed, 400)
    rng = random.Random(seed)
    taken = {d.id for d in Sample({"books": 0.3}).run(iter(given))}
    shuffled = rng.sample(given, len(given))
    assert {d.id for d in Sample({"books": 0.3}).run(iter(shuffled))} == taken
    assert taken <= {d.id for d in Sample({"books": 0.5}).run(iter(given))}
    assert abs(len(taken) - 120) < 4 * (400 * 0.3 * 0.7) ** 0.5
    assert len(list(Sample({"books": 1.0}).run(iter(given)))) == 400


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Byte-equal shards after a kill depend on it."""
    source = (
        "import random, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from corpora import text; "
        "from octavo.data.tokenizers import train_bpe; rng = random.Random(3); "
        "train_bpe((text(rng, 20) for _ in range(50)), 600, Path(sys.argv[1]))"
    )
    for name in ("one", "two"):
        environment = {**os.environ, "PYTHONHASHSEED": str(len(name) + ord(name[0])), "RAYON_NUM_THREADS": "2"}
        command = [sys.executable, "-c", source, str(tmp_path / f"{name}.json"), str(Path(__file__).parent)]
        subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document is left"):
        TrainTokenizer(tmp_path / "tokenizer.json", 300).run(iter([]))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TrainTokenizer(path, 400).run(iter(documents(5, 20)))
    return str(path)


@pytest.mark.parametrize("kind", ["byte", "trained"])
def test_shards_hold_the_documents_in_order(kind: str, tokenizer: str, tmp_path: Path) -> None:
    name = "byte" if kind == "byte" else tokenizer
    loaded, given = load_tokenizer(name), documents(6, 60)
    step = WriteShards(tmp_path / "shards", tmp_path / "counts", [("other", 0), ("books", 7)], name, 0.2)

    def stream() -> Iterator[Document]:
        yield from given

    step.run(stream(), rank=1, world_size=2)
    for split, wanted in (("train", False), ("validation", True)):
        texts = [d.text for d in given if is_held_out(d.text, 0.2) == wanted]
        shard = IndexedShard.open(tmp_path / "shards" / "books" / f"{split}-00007")
        expected = [np.append(ids, loaded.eot) for ids in loaded.encode_batch(texts)]
        assert np.array_equal(shard.tokens, np.concatenate(expected))
        assert np.array_equal(shard.lengths, [len(ids) for ids in expected])


def test_split_without_documents_has_no_shard(tmp_path: Path) -> None:
    step = WriteShards(tmp_path / "shards", tmp_path / "counts", [("books", 0)], "byte", 1e-9)
    step.run(iter(documents(7, 3)), 0, 1)
    assert {path.name for path in (tmp_path / "shards" / "books").iterdir()} == {
        f"train-00000.{s}" for s in ("bin", "idx", "json")
    }
