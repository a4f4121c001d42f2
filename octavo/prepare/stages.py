"""The stages as ordinary datatrove pipelines: lists of steps that any of datatrove's executors runs, one task after another or at once.

`pipeline.prepare` runs them in order and hands the folder of each to those that need it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets, MinhashDedupFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from octavo.prepare.classifier import ClassifierFilter
from octavo.prepare.code import CodeFilter, CodeRules
from octavo.prepare.config import DedupConfig, FilterConfig
from octavo.prepare.contamination import ContaminationFilter
from octavo.prepare.dedup import Resolve, Signatures, minhash_config
from octavo.prepare.executor import Counting
from octavo.prepare.language import LanguageFilter
from octavo.prepare.perplexity import PerplexityFilter
from octavo.prepare.personal import PersonalDataFormatter
from octavo.prepare.quality import QUALITY_RULES, QualityFilter, QualityRules
from octavo.prepare.readers import SourceReader
from octavo.prepare.repetition import REPETITION_RULES, RepetitionFilter, RepetitionRules
from octavo.prepare.tally import Excerpts, Tally
from octavo.prepare.tokenize import Sample, TrainTokenizer, WriteShards
from octavo.settings import from_dict

Steps = list[PipelineStep]
Piece = tuple[str, Path]
"""A source and a file of its documents."""
SOURCES = "sources.json"
PERPLEXITY, CLASSIFIER = "perplexity", "classifier"
"""Folders of the two models below `filters.models`."""
LINES = 4096
"""Records that datatrove reads at a time from a file of signatures."""


def read(reader: SourceReader, filters: FilterConfig, kind: str, folder: Path) -> Steps:
    """Reads, filters and scrubs one source, into `folder`/documents."""
    tally = Tally(folder / "tally")
    reader.exclusion_writer = tally
    steps = [reader, tally.reading(), *filters_of_kind(filters, kind, tally)]
    return [*steps, _writer(folder), tally, Counting(folder / "progress")]


def filters_of_kind(filters: FilterConfig, kind: str, tally: Tally | None = None) -> Steps:
    """The filters that are on and judge this kind of document."""
    steps: Steps = []
    if filters.language:
        steps.append(LanguageFilter(filters.languages, filters.language_threshold, exclusion_writer=tally))
    if filters.quality and kind in QUALITY_RULES:
        steps.append(QualityFilter({kind: _rules(QUALITY_RULES[kind], filters.quality_rules)}, tally))
    if filters.repetition and kind in REPETITION_RULES:
        steps.append(RepetitionFilter({kind: _rules(REPETITION_RULES[kind], filters.repetition_rules)}, tally))
    if filters.code and kind == "code":
        steps.append(CodeFilter(_rules(CodeRules(), filters.code_rules), tally))
    if filters.models is not None:
        models = Path(filters.models).expanduser()
        steps.append(PerplexityFilter(models / PERPLEXITY, filters.perplexity_quantile, exclusion_writer=tally))
        steps.append(ClassifierFilter(models / CLASSIFIER, filters.classifier_quantile, exclusion_writer=tally))
    if filters.personal:
        steps.append(PersonalDataFormatter())
    return steps


def _rules(default: Any, change: dict[str, Any]) -> Any:
    """`default` rules with some changed. Raises `ValueError` that names an unknown rule."""
    return from_dict(type(default), {**_plain(asdict(default)), **change}, f"filters.{_setting(default)}")


def _setting(rules: Any) -> str:
    return {QualityRules: "quality_rules", RepetitionRules: "repetition_rules", CodeRules: "code_rules"}[type(rules)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def sign(pieces: Sequence[Piece], folder: Path, dedup: DedupConfig) -> Steps:
    """Signatures and shingles of the documents; one task a file."""
    config = minhash_config(dedup.words, dedup.bands, dedup.rows)
    return [_reader(pieces, folder), Counting(folder / "progress"), Signatures(folder, config)]


def match(signed: Path, folder: Path, dedup: DedupConfig) -> Steps:
    """Candidates; one task a band."""
    config = minhash_config(dedup.words, dedup.bands, dedup.rows)
    return [
        MinhashDedupBuckets(
            str(signed / "signatures"), str(folder / "candidates"), config=config, lines_to_buffer=LINES
        )
    ]


def resolve(signed: Path, matched: Path, folder: Path, ranks: Sequence[int], dedup: DedupConfig) -> Steps:
    """Which documents go; one task."""
    return [Resolve(signed, matched / "candidates", folder / "removed", ranks, dedup.threshold)]


def select(pieces: Sequence[Piece], folder: Path, removed: Path | None, contamination: Path | None) -> Steps:
    """Drops near-duplicates and contaminated documents; one task a file, into `folder`/documents."""
    tally = Tally(folder / "tally", default="near_duplicate")
    steps: Steps = [_reader(pieces, folder), tally.reading()]
    if removed is not None:
        steps.append(Excerpts(removed / "clusters.json", folder / "excerpts"))
        steps.append(MinhashDedupFilter(str(removed), exclusion_writer=tally, lines_to_buffer=LINES))
    if contamination is not None:
        steps.append(ContaminationFilter(contamination, exclusion_writer=tally))
    return [*steps, _writer(folder), tally, Counting(folder / "progress")]


def sample(pieces: Sequence[Piece], folder: Path, shares: dict[str, float]) -> Steps:
    """The tokenizer's training text; one task a file, into `folder`/documents."""
    return [_reader(pieces, folder), Sample(shares), _writer(folder), Counting(folder / "progress")]


def train_tokenizer(pieces: Sequence[Piece], folder: Path, vocab_size: int) -> Steps:
    """A tokenizer, into `folder`/tokenizer.json; one task."""
    return [
        _reader(pieces, folder),
        Counting(folder / "progress"),
        TrainTokenizer(folder / "tokenizer.json", vocab_size),
    ]


def write_shards(
    pieces: Sequence[Piece],
    folder: Path,
    shards: Path,
    places: Sequence[tuple[str, int]],
    tokenizer: str,
    held_out: float,
) -> Steps:
    """Token shards below `shards`, numbers in `folder`/counts; one task a file."""
    return [
        _reader(pieces, folder),
        Counting(folder / "progress"),
        WriteShards(shards, folder / "counts", places, tokenizer, held_out),
    ]


def _writer(folder: Path) -> PipelineStep:
    """Writes `folder`/documents/RANK.jsonl.zst, unless there is no document."""
    return JsonlWriter(str(folder / "documents"), "${rank}.jsonl.zst", compression="zstd")


def _reader(pieces: Sequence[Piece], folder: Path) -> PipelineStep:
    """Reads piece number `rank`, or with fewer tasks every one of its turn."""
    inputs = folder / "inputs.txt"
    inputs.write_text("".join(f"{path}\n" for _, path in pieces))
    (folder / SOURCES).write_text(json.dumps([source for source, _ in pieces]))
    return JsonlReader("/", paths_file=str(inputs), compression="zstd", add_file_path=False)


def pieces_of_source(name: str, folder: Path) -> list[Piece]:
    """The documents that stage `read` left of one source."""
    return [(name, path.absolute()) for path in sorted((folder / "documents").glob("*"))]


def pieces_of_stage(folder: Path) -> list[Piece]:
    """The documents that another stage left, with the source that each piece is of."""
    sources = sources_of_stage(folder)
    return [(sources[int(path.name[:5])], path.absolute()) for path in sorted((folder / "documents").glob("*"))]


def sources_of_stage(folder: Path) -> list[str]:
    """The source of each task of a stage."""
    return json.loads((folder / SOURCES).read_text())
