"""`octavo eval`: from models and data to results, tables and figures.

Everything that can be checked without loading a model is checked first: that the folders hold models, recipes exist, and all
records of all tasks are whole. Then each model is loaded in each recipe, measured, written to the output folder and freed; last,
every pair of results is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.data.corpus import PreparedCorpus
from octavo.data.sources import fingerprint
from octavo.evaluate.compare import Comparison, compare
from octavo.evaluate.measure import choose_sources, measure_corpus, measure_tasks, measure_text
from octavo.evaluate.models import LoadedModel, find_model, load_model
from octavo.evaluate.plots import headline, plot_comparison
from octavo.evaluate.results import Results
from octavo.evaluate.tables import comparison_table, scores_table
from octavo.evaluate.tasks import HUB, LocalTask, choose_tasks, read_tasks
from octavo.recipe import get_recipe
from octavo.settings import to_dict
from octavo.train.setup import versions

LIBRARIES = ("lm_eval", "transformers", "tokenizers", "datasets")


@dataclass(frozen=True)
class EvalConfig:
    """What to evaluate, on what, and how. Raises `ValueError` for numbers out of range, or when there is nothing to do."""

    models: Sequence[str]
    """Folders, see `octavo.evaluate.models`."""
    recipes: Sequence[str] = ()
    """Each model is evaluated in each; none is the one that it was trained with, `bf16` for a Hugging Face model."""
    tasks: str | None = None
    """Folder of JSON lines, or `hub`."""
    only: Sequence[str] | None = None
    """Names of tasks; None is all nine."""
    limit: int | None = None
    """First items of each task, and first windows of a text and of each source."""
    text: str | None = None
    """Text file or folder for perplexity."""
    corpus: str | None = None
    """Prepared corpus for the loss on its held-out documents."""
    dtype: str = "auto"
    device: str = "auto"
    window: int | None = None
    stride: int | None = None
    batch_tokens: int | None = None
    add_bos: bool | None = None
    through: str = "transformers"
    """See `load_model`, for these and `dtype`, `device`, `window` and `batch_tokens`."""
    out: str = "runs/eval"
    """Folder of the results."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError(
                "no model is given: name a run of octavo train or a Hugging Face folder, or --compare results"
            )
        if self.tasks is None and self.text is None and self.corpus is None:
            raise ValueError(
                "nothing to evaluate is given: use --tasks FOLDER (or hub), --text PATH or --corpus FOLDER"
            )
        if self.only is not None and self.tasks is None:
            raise ValueError("--only chooses among the tasks of --tasks, which is not given")
        for name in ("limit", "window", "stride", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', '-')} is {value}: it must be positive")


def evaluate(config: EvalConfig) -> list[Results]:
    """Evaluate, write and compare; returns the results in the order of models and, within one, of recipes.

    Raises `ValueError` for what the user can put right, mostly before a model is loaded, `NumericsError` for a model that
    gives no finite scores and `OSError` if results cannot be written.
    """
    for path in config.models:
        find_model(path)
    for recipe in config.recipes:
        get_recipe(recipe)
    local: list[LocalTask] = []
    missing: dict[str, str] = {}
    if config.tasks is not None and config.tasks != HUB:
        local, missing = read_tasks(config.tasks, config.only, config.limit)
    hub = choose_tasks(config.only) if config.tasks == HUB else []
    checksum = "" if config.text is None else fingerprint(config.text)
    corpus = None if config.corpus is None else PreparedCorpus.open(config.corpus)
    if config.tasks is not None:
        _need_harness()
    results: list[Results] = []
    measured = {one.task.name for one in local} | {one.name for one in hub} | ({"text"} if config.text else set())
    measured |= {f"corpus/{source.name}" for source in corpus.sources} if corpus is not None else set()
    labels = _labels_to_keep(Path(config.out), measured)
    for path, name in itertools.product(config.models, config.recipes or (None,)):
        loaded = load_model(
            path,
            name,
            dtype=config.dtype,
            device=config.device,
            window=config.window,
            batch_tokens=config.batch_tokens,
            add_bos=config.add_bos,
            through=config.through,
        )
        precision = loaded.recipe.name if loaded.recipe.converts else loaded.description["dtype"]
        label = _label(f"{loaded.description['name']}-{precision}", labels)
        limit, window = config.limit, loaded.scorer.window
        if config.stride is not None and config.stride > window:
            raise ValueError(f"the stride is {config.stride}: it must be from 1 to the window of {window} tokens")
        sources, left_out = ([], {}) if corpus is None else choose_sources(loaded, corpus)
        measurements = [*measure_tasks(loaded, label, local, hub, limit=limit, add_bos=config.add_bos)]
        if config.text is not None:
            measurements.append(measure_text(loaded, label, config.text, checksum, stride=config.stride, limit=limit))
        if corpus is not None:
            measurements += measure_corpus(loaded, label, corpus.folder, sources, limit=limit)
        results.append(
            Results(
                label=label,
                model=loaded.description,
                recipe=to_dict(loaded.recipe),
                settings=_settings(loaded, config),
                versions={**versions(), **_libraries()},
                measurements=measurements,
                missing={**missing, **left_out},
            )
        )
        written = results[-1].write(Path(config.out))
        print(f"{scores_table(results[-1])}\n  {written}\n", flush=True)
        del loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    compare_all(results, Path(config.out))
    return results


def compare_all(results: Sequence[Results], out: Path) -> list[Comparison]:
    """Compare every pair: a table each, and in `out` a figure and a JSON. Raises `ValueError` for a pair without common data."""
    comparisons = [compare(*pair) for pair in itertools.combinations(results, 2)]
    for comparison in comparisons:
        stem = out / f"{comparison.first}-vs-{comparison.second}"
        rows = [{**dataclasses.asdict(row), "interval": row.interval} for row in comparison.rows]
        out.mkdir(parents=True, exist_ok=True)
        content = {**dataclasses.asdict(comparison), "rows": rows}
        stem.with_name(stem.name + ".json").write_text(json.dumps(content, indent=1) + "\n")
        written = [f"{stem}.json"]
        if headline(comparison):
            plot_comparison(stem.with_name(stem.name + ".png"), comparison)
            written.append(f"{stem}.png")
        print(f"{comparison_table(comparison)}\n  {', '.join(written)}\n", flush=True)
    return comparisons


def _settings(loaded: LoadedModel, config: EvalConfig) -> dict[str, Any]:
    device = loaded.scorer.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "window": loaded.scorer.window,
        "stride": config.stride or loaded.scorer.window,
        "batch_tokens": loaded.scorer.batch_tokens,
        "limit": config.limit,
        "add_bos": config.add_bos,
        "tokenizer": loaded.codec.name,
    }


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _need_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("the tasks need lm-evaluation-harness: pip install '.[eval]' in octavo's folder")


def _labels_to_keep(folder: Path, measured: set[str]) -> set[str]:
    """Labels of the results in `folder` with something that is not `measured` now, and that would be lost."""
    kept = set()
    for path in folder.glob("*.json"):
        with contextlib.suppress(ValueError):  # a comparison, or damaged: nothing to lose
            old = Results.read(path)
            if any(measurement.name not in measured for measurement in old.measurements):
                kept.add(old.label)
    return kept


def _label(wanted: str, taken: set[str]) -> str:
    """A file name like `wanted` that is not in `taken`, where it is put."""
    name = re.sub(r"[^\w.+-]+", "_", wanted)
    label, number = name, 1
    while label in taken:
        number += 1
        label = f"{name}-{number}"
    taken.add(label)
    return label
