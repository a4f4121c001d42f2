"""Near-duplicates: signatures are datatrove's, similarity is exact, and what goes depends on documents and ranks alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets, MinhashDedupSignature

from octavo.prepare import dedup
from octavo.prepare.dedup import Resolve, Signatures, jaccard, minhash_config, shingles

WORDS, BANDS, ROWS, THRESHOLD = 5, 12, 4, 0.8
WORD_LIST = [first + second for first in "bcdfghklmnprst" for second in ("ale", "ire", "ond", "usk")]


def words(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORD_LIST) for _ in range(count)]


def copies(seed: int, originals: int) -> list[str]:
    """Texts, copies of them with some words changed (similarities on both sides of the threshold), and degenerate texts."""
    rng = random.Random(seed)
    texts = ["", "!?", "one", "one", "two words", "Two, words!"]
    for _ in range(originals):
        original = words(rng, rng.randrange(3, 300))
        texts.append(" ".join(original))
        for _ in range(rng.randrange(4)):
            rate = rng.choice((0.0, 0.01, 0.03, 0.1))
            texts.append(" ".join(word if rng.random() > rate else "changed" for word in original))
    rng.shuffle(texts)
    return texts


def run(folder: Path, files: Sequence[Sequence[tuple[str, str]]], ranks: Sequence[int]) -> set[str]:
    """The ids that go, of files of (id, text)."""
    config = minhash_config(WORDS, BANDS, ROWS)
    for rank, documents in enumerate(files):
        Signatures(folder, config).run((Document(text=t, id=i) for i, t in documents), rank, len(files))
    for band in range(BANDS):
        MinhashDedupBuckets(str(folder / "signatures"), str(folder / "candidates"), config=config).run(
            None, band, BANDS
        )
    Resolve(folder, folder / "candidates", folder / "removed", ranks, THRESHOLD).run()
    dropped = set()
    for rank, documents in enumerate(files):
        numbers = np.fromfile(folder / "removed" / f"{rank:06d}.remove", dtype="<u4")
        assert list(numbers) == sorted(numbers)
        dropped |= {documents[number][0] for number in numbers}
    return dropped


def expected(documents: Sequence[tuple[int, str, str]]) -> set[str]:
    """The ids that go, of (rank, id, text), by comparing each text with each that stays."""
    sets = {i: set(shingles(t, WORDS).tolist()) for _, i, t in documents}
    kept: list[str] = []
    for _, i, _ in sorted(documents):
        if not any(len(sets[i] & sets[k]) >= THRESHOLD * len(sets[i] | sets[k]) for k in kept):
            kept.append(i)
    return set(sets) - set(kept)


@pytest.mark.parametrize("seed", [1, 2])
def test_drops_exactly_the_near_duplicates_of_what_stays(tmp_path: Path, seed: int) -> None:
    texts = copies(seed, 60)
    ids = [f"{random.Random(f'{seed}{n}').getrandbits(40):x}" for n in range(len(texts))]
    documents = [(n % 2, i, t) for n, (i, t) in enumerate(zip(ids, texts, strict=True))]
    files = [[(i, t) for rank, i, t in documents if rank == wanted] for wanted in (0, 1)]
    assert run(tmp_path, [*files, []], [0, 1, 1]) == expected(documents)


def test_choice_is_the_same_for_any_files(tmp_path: Path) -> None:
    texts = copies(3, 40)
    documents = [(f"d{n:03d}", text) for n, text in enumerate(texts)]
    dropped = []
    for files in (1, 2, 5):
        rng = random.Random(files)
        shuffled = rng.sample(documents, len(documents))
        dropped.append(run(tmp_path / str(files), [shuffled[k::files] for k in range(files)], [0] * files))
    assert dropped[0] == dropped[1] == dropped[2] and dropped[0]


def test_copy_of_the_better_source_stays(tmp_path: Path) -> None:
    rng = random.Random(4)
    text = " ".join(words(rng, 100))
    files = [[("a", text)], [("b", text)], [("c", text)]]
    assert run(tmp_path / "1", files, [2, 0, 1]) == {"a", "c"}
    assert run(tmp_path / "2", files, [1, 2, 0]) == {"a", "b"}


def test_a_chain_keeps_both_ends(tmp_path: Path) -> None:
    """A ~ B and B ~ C, but A and C are unlike: dropping C for B, which goes itself, would lose text that nothing keeps."""
    rng = random.Random(5)
    first = words(rng, 400)
    second = first[:370] + words(rng, 30)
    third = second[30:] + words(rng, 30)
    files = [[("a", " ".join(first)), ("b", " ".join(second)), ("c", " ".join(third))]]
    assert run(tmp_path, files, [0]) == {"b"}


def test_clusters_are_described(tmp_path: Path) -> None:
    rng = random.Random(6)
    one, two = (" ".join(words(rng, 50)) for _ in range(2))
    run(tmp_path, [[("a", one), ("b", one), ("c", two)], [("d", two), ("e", one)]], [0, 1])
    clusters = json.loads((tmp_path / "removed" / "clusters.json").read_text())
    assert (clusters["clusters"], clusters["dropped"], clusters["sizes"]) == (2, 3, {"2": 1, "3": 1})
    assert clusters["largest"][0]["id"] == "a"
    assert clusters["largest"][0]["dropped"] == [{"id": "b", "similarity": 1.0}, {"id": "e", "similarity": 1.0}]


def test_little_memory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = copies(7, 40)
    files = [[(f"d{n:03d}", text) for n, text in enumerate(texts)]]
    plain = run(tmp_path / "plain", files, [0])
    monkeypatch.setattr(dedup, "CACHE_BYTES", 1000)
    assert run(tmp_path / "small", files, [0]) == plain


@pytest.mark.parametrize("count", [1, 7, 50])
def test_signature_in_blocks_is_that_of_datatrove(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = minhash_config(WORDS, BANDS, ROWS)
    ours, theirs = Signatures(tmp_path, config), MinhashDedupSignature(str(tmp_path), config, language=dedup._Words())
    values = np.random.default_rng(count).integers(0, 1 << 64, (count, 1), dtype=np.uint64)
    monkeypatch.setattr(dedup, "BLOCK", 7)
    assert ours.get_signature(values) == theirs.get_signature(values)


def test_shingles_are_runs_of_words() -> None:
    def count(text: str) -> int:
        return len(shingles(text, 3))

    assert count("a b c d e") == 3
    assert count("a b c a b c") == 3, "a run that comes twice is one shingle"
    assert count("a b") == count("") == count("?!") == 1
    assert shingles("A, b -- c!", 3).tolist() == shingles("a b c", 3).tolist()
    assert shingles("a b c", 3).tolist() != shingles("c b a", 3).tolist()
    assert shingles("?!", 3).tolist() != shingles("!!", 3).tolist()


def test_shingles_are_the_same_in_every_process() -> None:
    source = "from octavo.prepare.dedup import shingles; print(shingles('one two three four', 3).tolist())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == shingles("one two three four", 3).tolist()


def test_jaccard_is_exact() -> None:
    def sets() -> Iterator[tuple[set[int], set[int]]]:
        rng = random.Random(8)
        for _ in range(50):
            universe = rng.sample(range(1 << 32), rng.randrange(2, 60))
            yield set(universe[: rng.randrange(1, len(universe))]), set(universe[rng.randrange(len(universe)) :])

    for first, second in sets():
        arrays = [np.array(sorted(part), dtype=np.uint32) for part in (first, second)]
        assert jaccard(*arrays) == len(first & second) / len(first | second)


def test_one_task_resolves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one task"):
        Resolve(tmp_path, tmp_path, tmp_path, [0], THRESHOLD).run(None, 0, 2)
