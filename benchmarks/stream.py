"""Tokens per second that one core reads from memory-mapped shards, as training batches of a five-source mixture.

Writes random documents (log-normal lengths, mean about 800 tokens) as shards, reads them once so that they are in the page cache,
and times `next(TokenStream)` alone, in batches of 8 sequences. The last column is the rate over what a 7B model consumes on
one H200 (21,000 tokens/s), as the goal is at least 10. `--world` reads the part of the last of so many ranks.

    OMP_NUM_THREADS=1 python benchmarks/stream.py [--tokens 200e6] [--seconds 5] [--csv results/stream.csv]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from octavo.data import IndexedShard, IndexedWriter, Source, TokenStream

WEIGHTS = {"technical": 0.4, "code": 0.2, "dialogue": 0.2, "prose": 0.1, "reference": 0.1}
VOCABULARY = 50_257
CONSUMED = 21_000
"""Tokens/s of a 7B model in training on one H200."""


def write(folder: Path, tokens: int) -> list[Source]:
    """Sources of equal size in shards of up to 20M tokens."""
    generator = np.random.default_rng(0)
    sources = []
    for name, weight in WEIGHTS.items():
        left, shards = tokens // len(WEIGHTS), []
        while left > 0:
            prefix = folder / f"{name}-{len(shards):05}"
            with IndexedWriter(prefix, "uint16") as writer:
                size = min(left, 20_000_000)
                left -= size
                while size > 0:
                    length = min(size, 1 + int(generator.lognormal(6.2, 1.0)))
                    writer.add(generator.integers(VOCABULARY, size=length, dtype=np.uint16))
                    size -= length
            shards.append(IndexedShard.open(prefix))
            shards[-1].tokens.max()  # into the page cache
        sources.append(Source(name, tuple(shards), weight))
    return sources


def measure(sources: list[Source], seq_len: int, documents: str, world: int, seconds: float) -> dict[str, object]:
    """Median rate of windows of about a fifth of `seconds`, after one that does not count."""
    stream = TokenStream(
        sources,
        seq_len,
        8,
        world=world,
        rank=world - 1,
        documents=documents,
        vocab_size=VOCABULARY,  # type: ignore[arg-type]
    )
    rates = []
    for _ in range(6):
        start, batches = time.perf_counter(), 0
        while time.perf_counter() - start < seconds / 5:
            batches += sum(1 for _ in itertools.islice(stream, 10))
        rates.append(batches * 8 * seq_len / (time.perf_counter() - start))
    rate = statistics.median(rates[1:])
    return {
        "seq_len": seq_len,
        "documents": documents,
        "world": world,
        "sources": len(sources),
        "tokens": sum(shard.count for source in sources for shard in source.shards),
        "tokens_per_s": round(rate),
        "tokens_per_s_min": round(min(rates[1:])),
        "times_7b": round(rate / CONSUMED, 1),
        "cpu": _cpu(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure both kinds of documents at two lengths, and a rank of many; print, or write to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = write(Path(folder), int(args.tokens))
        cases = [(2048, "joined", 1), (2048, "separate", 1), (8192, "joined", 1), (2048, "joined", args.world)]
        rows = [measure(sources, *case, args.seconds) for case in cases]
    for row in rows:
        print(row)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
