"""From sources to a corpus: the stages in order, each done once.

| stage | needs | tasks |
|---|---|---|
| read-SOURCE: read, filter, scrub | the source's files | `tasks` |
| sign, match, resolve: near-duplicates | all sources | a file; a band; one |
| select: without near-duplicates and contamination | read, resolve, the evaluation files | a file |
| sample, tokenizer | select | a file; one |
| tokens: shards | select, tokenizer | a file |
| manifest, report | all | – |

Each stage has a folder below OUT/work with a *key*: a hash of the settings that it depends on, of its input files' names, sizes and
times, and of the keys of the stages before it. Where the key is the same, finished tasks are not done again; where it differs, the
folder is emptied. A changed setting therefore costs the stages that depend on it, and no others. The manifest comes last: a folder
without `corpus.json` is no corpus yet.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.data.corpus import write_manifest
from octavo.data.files import write_whole
from octavo.data.tokenizers import Tokenizer, load_tokenizer
from octavo.prepare import stages
from octavo.prepare.config import PrepareConfig, changes
from octavo.prepare.contamination import build_index
from octavo.prepare.executor import LocalExecutor, Workers, only_run
from octavo.prepare.readers import Source, SourceReader, nothing_read
from octavo.prepare.report import counts_by_source, write_report
from octavo.prepare.runner import Executor, StageRunner, digest, fingerprint
from octavo.prepare.tally import read_counts
from octavo.prepare.tokenize import SPLITS, sample_shares
from octavo.settings import to_dict

NOT_CONTENT = ("workers", "out", "cache")
"""Settings that change nothing in the corpus."""


def prepare(config: PrepareConfig, executor: Executor | None = None) -> Path:
    """Makes the corpus of `config`, or what is missing of it, and returns its folder.

    `executor` runs the stages elsewhere, see `Executor`; by default they run on this machine. Raises `ValueError` for a config or a
    folder that will not do, before anything is written, and `OSError` where a disk is full or a package cannot be fetched.
    """
    config.check()
    out = Path(config.out).expanduser().absolute()
    work = out / "work"
    _refuse_foreign(out, config)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with only_run(work):
            _refuse_foreign(out, config)  # another run may have come first
            with Workers(config.processes, work) as workers:
                return _Run(config, out, work, executor or _local(workers)).all()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                f"{out} is on a full disk: free space and give the same command again; finished tasks are kept"
            ) from error
        raise


def _local(processes: Workers) -> Executor:
    def make(pipeline: list[Any], tasks: int, workers: int, logging_dir: str) -> LocalExecutor:
        return LocalExecutor(pipeline, tasks, processes, logging_dir)

    return make


def content(config: PrepareConfig) -> dict[str, Any]:
    """The settings that the corpus depends on, as JSON values."""
    return {name: value for name, value in to_dict(config).items() if name not in NOT_CONTENT}


def _refuse_foreign(out: Path, config: PrepareConfig) -> None:
    """Raises `ValueError` if `out` is another's folder, or the unfinished corpus of another config."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder as out")
    saved = out / "work" / "config.json"
    if not saved.exists():
        if out.exists() and any(path.name != "work" for path in out.iterdir()):
            raise ValueError(
                f"{out} is not empty and has no work/config.json of a corpus: give an empty or new folder as out"
            )
        return
    differences = changes(json.loads(saved.read_text()), content(config))
    if differences and not (out / "corpus.json").exists():
        raise ValueError(
            f"{out} holds an unfinished corpus of another config ({', '.join(differences[:6])} differ): finish it with that config, "
            "delete the folder, or give another out"
        )


class _Run:
    """One run through the stages."""

    def __init__(self, config: PrepareConfig, out: Path, work: Path, executor: Executor) -> None:
        self.config, self.out, self.work = config, out, work
        self.stages = StageRunner(work, out / "corpus.json", executor, config.processes)

    def all(self) -> Path:
        readers = {name: self._reader(name) for name in self.config.sources}
        for name, source in self.config.sources.items():  # wrong rules are seen before anything is written
            stages.filters_of_kind(self.config.filters_of(name), source.kind)
        index = self._contamination()
        write_whole(self.work / "config.json", json.dumps(content(self.config), indent=1))
        for name, reader in readers.items():
            self._read(name, reader)
        read = [piece for name in readers for piece in stages.pieces_of_source(name, self.work / f"read-{name}")]
        removed = self._deduplicate(read) if self.config.dedup.enabled else None
        self._select(read, removed, index)
        selected = stages.pieces_of_stage(self.work / "select")
        self._tokens(selected, self._tokenizer(selected))
        self.stages.clear()
        write_report(self.config, self.out, self.work)
        return self.out

    # --- stages

    def _reader(self, name: str) -> SourceReader:
        settings = self.config.sources[name]
        source = Source(
            name=name,
            kind=settings.kind,
            paths=settings.paths,
            debian=settings.debian,
            pypi=settings.pypi,
            include=settings.include,
            exclude=settings.exclude,
            text_field=settings.text_field,
            max_characters=settings.max_characters,
            split_characters=settings.split_characters,
        )
        return SourceReader(source, Path(self.config.cache).expanduser())

    def _contamination(self) -> Path | None:
        settings = self.config.contamination
        if settings.tasks is None:
            return None
        tasks = Path(settings.tasks).expanduser()
        index = self.work / f"contamination-{digest([fingerprint([tasks]), settings.words])}"
        if not index.exists():
            partial = index.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            build_index(tasks, partial, settings.words)
            partial.rename(index)
        self.stages.keys["contamination"] = index.name
        return index

    def _read(self, name: str, reader: SourceReader) -> None:
        settings, filters = self.config.sources[name], self.config.filters_of(name)
        models = [Path(filters.models).expanduser()] if filters.models else []
        depends = {
            "source": {k: v for k, v in to_dict(settings).items() if k not in ("weight", "max_epochs", "filters")},
            "filters": to_dict(filters),
            "models": fingerprint(models),
            "inputs": fingerprint(_inputs(reader)),
            "tasks": self.config.tasks,
        }
        stage = f"read-{name}"
        self.stages.run(
            stage,
            f"read {name}",
            depends,
            [],
            self.config.tasks,
            lambda f: stages.read(reader, filters, settings.kind, f),
        )
        counts = read_counts(self.work / stage / "tally")
        dropped = {reason: amount.documents for reason, amount in counts.dropped.items()}
        if not counts.read.documents:
            raise nothing_read(reader.source, dropped)
        if not counts.kept.documents:
            raise ValueError(
                f"sources.{name}: the filters dropped all {counts.read.documents:,} documents ({_listed(dropped)}): loosen them under "
                f"sources.{name}.filters, or give the source another kind"
            )

    def _deduplicate(self, pieces: Sequence[stages.Piece]) -> Path:
        dedup = self.config.dedup
        order = {name: rank for rank, name in enumerate(self.config.sources)}
        ranks = [order[source] for source, _ in pieces]
        settings = {"words": dedup.words, "bands": dedup.bands, "rows": dedup.rows, "order": list(order)}
        signed, matched = self.work / "sign", self.work / "match"
        read = [f"read-{name}" for name in order]
        self.stages.run("sign", "sign", settings, read, len(pieces), lambda f: stages.sign(pieces, f, dedup))
        self.stages.run("match", "match", {}, ["sign"], dedup.bands, lambda f: stages.match(signed, f, dedup))
        self.stages.run(
            "resolve",
            "resolve near-duplicates",
            {"threshold": dedup.threshold},
            ["match"],
            1,
            lambda f: stages.resolve(signed, matched, f, ranks, dedup),
        )
        return self.work / "resolve" / "removed"

    def _select(self, pieces: Sequence[stages.Piece], removed: Path | None, index: Path | None) -> None:
        needs = ["resolve"] if removed is not None else [f"read-{name}" for name in self.config.sources]
        needs += ["contamination"] if index is not None else []
        self.stages.run("select", "select", {}, needs, len(pieces), lambda f: stages.select(pieces, f, removed, index))
        counts = counts_by_source(self.work / "select")
        for name in self.config.sources:
            if not counts[name].kept.documents:
                raise ValueError(
                    f"sources.{name}: all its documents are near-duplicates of better-ranked ones, or contaminated: leave the source "
                    "out, rank it higher, or raise dedup.threshold"
                )

    def _tokenizer(self, pieces: Sequence[stages.Piece]) -> str:
        settings = self.config.tokenizer
        if settings.path is not None:
            name = settings.path if settings.path == "byte" else str(Path(settings.path).expanduser())
            self.stages.keys["tokenizer"] = load_tokenizer(name).name
            return name
        weights = {name: source.weight for name, source in self.config.sources.items()}
        sizes = {name: counts.kept.bytes for name, counts in counts_by_source(self.work / "select").items()}
        shares = sample_shares(weights, sizes, settings.sample_bytes)
        self.stages.run(
            "sample", "sample", {"shares": shares}, ["select"], len(pieces), lambda f: stages.sample(pieces, f, shares)
        )
        sampled = stages.pieces_of_stage(self.work / "sample")
        self.stages.run(
            "tokenizer",
            "train tokenizer",
            {"vocab_size": settings.vocab_size},
            ["sample"],
            1,
            lambda f: stages.train_tokenizer(sampled, f, settings.vocab_size),
        )
        return str(self.work / "tokenizer" / "tokenizer.json")

    def _tokens(self, pieces: Sequence[stages.Piece], tokenizer: str) -> None:
        shards, held_out = self.out / "shards", self.config.validation
        places: list[tuple[str, int]] = []
        for source, _ in pieces:
            places.append((source, sum(other == source for other, _ in places)))
        self.stages.run(
            "tokens",
            "write tokens",
            {"validation": held_out},
            ["select", "tokenizer"],
            len(pieces),
            lambda f: stages.write_shards(pieces, f, shards, places, tokenizer, held_out),
            outputs=[shards],
        )
        copy = self.out / "tokenizer.json"
        if tokenizer == "byte":
            copy.unlink(missing_ok=True)
        else:
            path = Path(tokenizer)
            write_whole(copy, (path / "tokenizer.json" if path.is_dir() else path).read_bytes())
        self._manifest(load_tokenizer(tokenizer))

    def _manifest(self, tokenizer: Tokenizer) -> None:
        sources = []
        for name, source in self.config.sources.items():
            train, held_out = (
                [f"shards/{name}/{path.stem}" for path in sorted((self.out / "shards" / name).glob(f"{split}-*.idx"))]
                for split in SPLITS
            )
            sources.append((name, source.weight, source.max_epochs, train, held_out))
        if not any(held_out for *_, held_out in sources):
            raise ValueError(f"validation = {self.config.validation} holds out none of so few documents: raise it")
        for name, _, _, train, _ in sources:
            if not train:
                raise ValueError(
                    f"sources.{name}: all of its few documents are held out: lower validation, or leave it out"
                )
        write_manifest(self.out, tokenizer, sources)


def _inputs(reader: SourceReader) -> list[Path]:
    return sorted({Path(unit.path) for unit in reader.units})


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items(), key=lambda c: -c[1]))
