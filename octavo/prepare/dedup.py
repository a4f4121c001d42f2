"""Fuzzy de-duplication: MinHash finds candidates, exact similarity decides, the best-ranked copy stays.

Two documents are near-duplicates if the Jaccard similarity of their *shingles* is at least a threshold: J(A, B) = |A ∩ B| / |A ∪ B|,
where a shingle is a run of `words` words, in lower case and without punctuation. The smallest value of a random hash over A and over
B is the same with probability J (Broder 1997), so with `bands` groups of `rows` hashes each a pair agrees in at least one whole band
with probability 1 − (1 − J^rows)^bands: it becomes a candidate. datatrove computes signatures and candidates; here

1. `Signatures` (its stage 1) also keeps each document's shingles, four bytes a shingle;
2. datatrove's `MinhashDedupBuckets` (stage 2) lists documents that agree in a band;
3. `Resolve` takes the candidates in the order (rank of the source, id), computes J exactly from the shingles, and drops a document
   if and only if it is a near-duplicate of one that stays. So every dropped document has a copy in the corpus that is similar to
   it (a chain A ~ B ~ C drops nothing that is unlike what is kept, as clusters by transitivity would), no candidate pair stays
   whole, and the choice depends on documents alone: not on the number of tasks, files or workers.

The bands only decide which pairs are looked at, so they may be generous: precision comes from the exact check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

WORD = re.compile(r"\w+")
KNOWN_WORDS = 1 << 20
"""Words whose hashes a process remembers."""
BLOCK = 2048
"""Shingles that are permuted at a time, so that a document of any length takes little memory."""
CACHE_BYTES = 256 << 20
"""Shingles that `Resolve` keeps in memory."""
MOST_COMPARED = 256
"""Kept candidates that a document is compared with, those first that agree in most bands: boilerplate makes crowds of candidates."""
EXAMPLES = 20
"""Largest clusters that are described."""

Shingles = npt.NDArray[np.uint64]


def minhash_config(words: int, bands: int, rows: int) -> MinhashConfig:
    """datatrove's description of the signatures; its default hash needs a package more, and no hash of it is used."""
    return MinhashConfig(
        n_grams=words, num_buckets=bands, hashes_per_bucket=rows, hash_config=HashConfig(precision=64, hash_fc="sha1")
    )


class _Hashes(dict[str, int]):
    """64-bit hash of a word, remembered."""

    def __missing__(self, word: str) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little")
        self[word] = value
        return value


_hashes = _Hashes()


def shingles(text: str, words: int) -> Shingles:
    """The distinct hashes, uint64 and in order, of the runs of `words` words of `text`; a shorter text is one shingle."""
    found = WORD.findall(text.lower()) or [text]
    hashes = np.fromiter(map(_hashes.__getitem__, found), dtype=np.uint64, count=len(found))
    length = max(1, len(found) - words + 1)
    mixed = np.full(length, 0x9E3779B97F4A7C15, dtype=np.uint64)
    for start in range(min(words, len(found))):
        # Multiply and add modulo 2^64; the shifts carry high bits down, which a product alone never does.
        mixed = (mixed + hashes[start : start + length]) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def jaccard(first: npt.NDArray[np.uint32], second: npt.NDArray[np.uint32]) -> float:
    """|A ∩ B| / |A ∪ B| of two ordered sets."""
    # Two ordered runs merge in linear time.
    merged = np.sort(np.concatenate((first, second)), kind="stable")
    shared = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return shared / max(1, len(merged) - shared)


class _Words(WordTokenizer):
    """Stands where datatrove asks for a word tokenizer, which would need one more package; `shingles` splits words."""

    def word_tokenize(self, text: str) -> list[str]:
        return WORD.findall(text.lower())

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class Signatures(MinhashDedupSignature):
    """Writes MinHash signatures to `folder`/signatures, and ids and shingles of the documents to `folder`/shingles."""

    def __init__(self, folder: Path, config: MinhashConfig) -> None:
        super().__init__(str(folder / "signatures"), config, language=_Words())
        self.shingles = folder / "shingles"
        self._file: Any = None
        self._lengths: list[int] = []

    def get_shingles(self, text: str) -> Shingles:
        """The shingles [n, 1] of a document, whose upper halves are also written down."""
        values = shingles(text, self.config.n_grams)
        halves = np.unique((values >> np.uint64(32)).astype("<u4"))
        self._file.write(halves.tobytes())
        self._lengths.append(len(halves))
        return values.reshape(-1, 1)

    def get_signature(self, shingles: Shingles) -> list[list[int]]:
        """The signature of shingles [n, 1]: `bands` lists of `rows` integers. Equal to datatrove's, a block at a time."""
        smallest = np.min(
            [super(Signatures, self).get_signature(shingles[i : i + BLOCK]) for i in range(0, len(shingles), BLOCK)],
            axis=0,
        )
        return smallest.tolist()

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Consumes the documents."""
        self.shingles.mkdir(parents=True, exist_ok=True)
        ids: list[str] = []

        def noted(documents: Iterable[Document]) -> Iterable[Document]:
            for document in documents:
                ids.append(document.id)
                yield document

        self._lengths = []
        with (self.shingles / f"{rank:05d}.bin").open("wb") as self._file:
            super().run(noted(data), rank, world_size)
        self._file = None
        index = {"ids": ids, "lengths": self._lengths}
        (self.shingles / f"{rank:05d}.json").write_text(json.dumps(index))


class _Shingles:
    """Shingles of documents by number, read from the disk when asked for; the latest stay in memory."""

    def __init__(self, folder: Path, files: int) -> None:
        self.folder = folder
        self.ids: list[str] = []
        self.firsts = [0]
        lengths: list[int] = []
        for rank in range(files):
            index = json.loads((folder / f"{rank:05d}.json").read_text())
            self.ids += index["ids"]
            lengths += index["lengths"]
            self.firsts.append(len(self.ids))
        self.lengths = np.array(lengths, dtype=np.int64)
        self._starts = np.concatenate([np.cumsum(part) - part for part in np.split(self.lengths, self.firsts[1:-1])])
        self._cache: OrderedDict[int, npt.NDArray[np.uint32]] = OrderedDict()
        self._cached = 0

    def file_of(self, document: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The file that holds a document."""
        return np.searchsorted(self.firsts, document, side="right") - 1

    def __getitem__(self, document: int) -> npt.NDArray[np.uint32]:
        if document in self._cache:
            self._cache.move_to_end(document)
            return self._cache[document]
        path = self.folder / f"{int(self.file_of(document)):05d}.bin"
        length, start = int(self.lengths[document]), int(self._starts[document])
        values = np.fromfile(path, dtype="<u4", count=length, offset=4 * start)
        self._cache[document] = values
        self._cached += values.nbytes
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return values


class Resolve(PipelineStep):
    """Decides which candidates go; one task.

    Reads what `Signatures` wrote to `signed` and the candidates that datatrove's stage 2 wrote to `candidates`. Writes to `removed`
    the files `NNNNNN.remove` that datatrove's `MinhashDedupFilter` reads, and `clusters.json`. `ranks` gives the rank of the source
    of each file, 0 the best.
    """

    type = "🫂 - DEDUP"
    name = "exact similarity"

    def __init__(self, signed: Path, candidates: Path, removed: Path, ranks: Sequence[int], threshold: float) -> None:
        super().__init__()
        self.signed, self.candidates, self.removed = signed, candidates, removed
        self.ranks, self.threshold = list(ranks), threshold

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        if world_size != 1:
            raise ValueError(f"near-duplicates are resolved by one task, not {world_size}")
        documents = _Shingles(self.signed / "shingles", len(self.ranks))
        groups = self._groups(documents.firsts)
        dropped = self._drop(documents, groups)
        self.removed.mkdir(parents=True, exist_ok=True)
        removed = np.array(sorted(dropped), dtype=np.int64)
        files = documents.file_of(removed)
        for file in range(len(self.ranks)):
            # Also where nothing goes, so that an empty file says so.
            numbers = removed[files == file] - documents.firsts[file]
            (self.removed / f"{file:06d}.remove").write_bytes(numbers.astype("<u4").tobytes())
        self.stat_update("dropped", value=len(dropped))
        (self.removed / "clusters.json").write_text(json.dumps(_describe(documents, dropped), indent=1))

    def _groups(self, firsts: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """The documents of each group that agree in a band. datatrove writes a group as the chain of its neighbours."""
        groups = []
        offsets = np.array(firsts, dtype=np.int64)
        for path in sorted(self.candidates.glob("*.dups")):
            pairs = np.fromfile(path, dtype="<u4").reshape(-1, 4).astype(np.int64)
            left, right = offsets[pairs[:, 0]] + pairs[:, 1], offsets[pairs[:, 2]] + pairs[:, 3]
            cuts = np.flatnonzero(left[1:] != right[:-1]) + 1
            for start, end in pairwise([0, *cuts.tolist(), len(left)]):
                if end > start:
                    groups.append(np.append(left[start], right[start:end]))
        return groups

    def _drop(self, documents: _Shingles, groups: Sequence[npt.NDArray[np.int64]]) -> dict[int, tuple[int, float]]:
        """For each document that goes, the one that stays for it and their similarity."""
        memberships: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            for document in group.tolist():
                memberships.setdefault(document, []).append(number)
        rank_of = {d: self.ranks[f] for d, f in zip(memberships, documents.file_of(list(memberships)), strict=True)}
        kept: list[list[int]] = [[] for _ in groups]
        dropped: dict[int, tuple[int, float]] = {}
        for document in sorted(memberships, key=lambda d: (rank_of[d], documents.ids[d])):
            bands = Counter(other for number in memberships[document] for other in kept[number])
            # Equal counts keep the order in which the documents were kept, the best-ranked first.
            for other, _ in bands.most_common(MOST_COMPARED):
                short, long = sorted((documents.lengths[document], documents.lengths[other]))
                if short < self.threshold * long:
                    continue
                self.stat_update("compared")
                similarity = jaccard(documents[document], documents[other])
                if similarity >= self.threshold:
                    dropped[document] = (other, similarity)
                    break
            else:
                for number in memberships[document]:
                    kept[number].append(document)
        return dropped


def _describe(documents: _Shingles, dropped: dict[int, tuple[int, float]]) -> dict[str, Any]:
    """Numbers of the clusters (a document that stays, with those that went for it), the largest of them by name."""
    clusters: dict[int, list[tuple[int, float]]] = {}
    for document, (other, similarity) in dropped.items():
        clusters.setdefault(other, []).append((document, similarity))
    sizes = Counter(1 + len(members) for members in clusters.values())
    largest = sorted(clusters, key=lambda d: (-len(clusters[d]), documents.ids[d]))[:EXAMPLES]
    return {
        "clusters": len(clusters),
        "dropped": len(dropped),
        "sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "largest": [
            {
                "id": documents.ids[kept],
                "dropped": [
                    {"id": documents.ids[d], "similarity": round(s, 4)}
                    for d, s in sorted(clusters[kept], key=lambda m: documents.ids[m[0]])[:EXAMPLES]
                ],
                "size": 1 + len(clusters[kept]),
            }
            for kept in largest
        ],
    }
