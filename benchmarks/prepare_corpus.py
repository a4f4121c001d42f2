"""One compressed text corpus from folders of documentation and sources, small enough to carry to a GPU machine.

    python benchmarks/prepare_corpus.py text.xz --max-mib 62 FOLDER[:MB] FOLDER[:MB] ...

Every file below a folder that is UTF-8 text counts, `.gz` and `.dz` (dictd's gzip) ones decompressed, HTML without its markup,
up to MB megabytes of text from that folder, taken in the order of the hashes of its documents. Long files are cut into pieces.
Exact duplicates are dropped, and so are the lines that HTML pages share (menus, notices): a long line is kept the first
`SHARED_LINES` times. The documents, shuffled by hash and separated by NUL bytes, are compressed until `--max-mib` is reached:
what is left out then is a random part. `octavo.data` reads the result as it is.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from octavo.data.html import strip_html

PIECE = 200_000
"""Characters after which a document is cut at the next blank line, so that one dictionary is not one document."""
SHORTEST = 400
"""Characters below which a document is left out: mostly redirects and indexes."""
MOST_UNREADABLE = 1e-4
"""Share of characters that may be no UTF-8 before a file counts as binary."""
LONG_LINE, SHARED_LINES = 30, 4
FLUSH_MARGIN = 1 << 20
"""Compressed bytes that the encoder may still hold back when the limit is checked."""


def texts(folder: Path) -> Iterator[str]:
    """The text files below `folder`, as text."""
    shared: Counter[bytes] = Counter()
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        try:
            data = path.read_bytes()
            if path.suffix in (".gz", ".dz"):
                data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            continue
        text = data.decode(errors="replace")
        if "\0" in text or text.count("\ufffd") > len(text) * MOST_UNREADABLE:
            continue
        if ".htm" in path.name:
            text = "\n".join(line for line in strip_html(text).split("\n") if not _is_shared(line, shared))
        yield from pieces(text)


def _is_shared(line: str, seen: Counter[bytes]) -> bool:
    if len(line) < LONG_LINE:
        return False
    key = hashlib.blake2b(line.strip().encode(), digest_size=8).digest()
    seen[key] += 1
    return seen[key] > SHARED_LINES


def pieces(text: str) -> Iterator[str]:
    """`text` cut at blank lines, or else at line ends, every `PIECE` characters or a little more."""
    start = 0
    while start < len(text):
        end = start + PIECE
        cut = max(text.find("\n\n", end, end + PIECE), text.find("\n", end, end + PIECE)) if end < len(text) else -1
        end = len(text) if cut < 0 else cut + 1
        if end - start >= SHORTEST:
            yield text[start:end]
        start = end


def collect(folders: list[str]) -> tuple[list[tuple[bytes, bytes]], dict[str, int]]:
    """(hash, UTF-8 text) of the distinct documents in the order of their hashes, and the bytes of each folder."""
    documents: dict[bytes, bytes] = {}
    mix: dict[str, int] = {}
    for item in folders:
        name, _, limit = item.partition(":")
        found = {}
        for text in texts(Path(name)):
            encoded = text.encode()
            key = hashlib.blake2b(encoded, digest_size=16).digest()
            if key not in documents:
                found[key] = encoded
        mix[name] = 0
        for key in sorted(found):
            if limit and mix[name] >= float(limit) * 1e6:
                break
            documents[key] = found[key]
            mix[name] += len(found[key])
        print(f"{mix[name] / 1e6:8.1f} MB  {name}", flush=True)
    return sorted(documents.items()), mix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("folders", nargs="+", metavar="FOLDER[:MB]")
    parser.add_argument("--max-mib", type=float, default=62)
    parser.add_argument("--preset", type=int, default=6, help="of xz, 0 to 9")
    args = parser.parse_args()
    documents, mix = collect(args.folders)
    limit = int(args.max_mib * 2**20) - FLUSH_MARGIN
    compressor = lzma.LZMACompressor(preset=args.preset)
    digest = hashlib.sha256()
    text_bytes = size = count = 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("wb") as file:
        for _, text in documents:
            block = compressor.compress(text + b"\0")
            digest.update(block)
            size += file.write(block)
            text_bytes += len(text)
            count += 1
            if size >= limit:
                break
        block = compressor.flush()
        digest.update(block)
        size += file.write(block)
    total = sum(mix.values())
    report = {
        "file": args.output.name,
        "bytes": size,
        "sha256": digest.hexdigest(),
        "text_bytes": text_bytes,
        "ratio": round(text_bytes / size, 3),
        "documents": count,
        "documents_left_out": len(documents) - count,
        "mix": {Path(name).name: round(part / total, 4) for name, part in mix.items()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
