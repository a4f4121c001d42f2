"""`octavo eval`: from models and data to results, tables and figures.

Everything that can be checked without loading a model is checked first: that the folders hold models, recipes exist, and all
records of all tasks are whole. Then each model is loaded in each recipe, measured, written to the output folder and freed; last,
every pair of results is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from octavo.data.corpus import PreparedCorpus
from octavo.data.sources import fingerprint, read_documents
from octavo.evaluate.compare import Comparison, compare, paired
from octavo.evaluate.models import LoadedModel, find_model, load_model
from octavo.evaluate.perplexity import text_loss, token_loss
from octavo.evaluate.plots import headline, plot_comparison
from octavo.evaluate.results import Item, Measurement, Results, finite
from octavo.evaluate.tables import comparison_table, scores_table
from octavo.evaluate.tasks import HUB, LocalTask, ZeroShotTask, choose_tasks, harness_tasks, hub_tasks, read_tasks
from octavo.recipe import get_recipe
from octavo.settings import to_dict
from octavo.train.progress import Progress
from octavo.train.setup import versions

LIBRARIES = ("lm_eval", "transformers", "tokenizers", "datasets")
Advance = Callable[[int, int], None]


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
            raise ValueError("no model is given: name a run of octavo train or a Hugging Face folder, or --compare results")
        if self.tasks is None and self.text is None and self.corpus is None:
            raise ValueError("nothing to evaluate is given: use --tasks FOLDER (or hub), --text PATH or --corpus FOLDER")
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
    _need_harness()
    results: list[Results] = []
    labels: set[str] = set()
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
        measurements = [*_tasks(loaded, label, local, hub, config)]
        if config.text is not None:
            measurements.append(_text(loaded, label, config.text, checksum, config))
        if corpus is not None:
            measurements += _corpus(loaded, label, corpus, config.limit)
        results.append(
            Results(
                label=label,
                model=loaded.description,
                recipe=to_dict(loaded.recipe),
                settings=_settings(loaded, config),
                versions={**versions(), **_libraries()},
                measurements=measurements,
                missing=missing,
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


def _tasks(
    loaded: LoadedModel, label: str, local: list[LocalTask], hub: list[ZeroShotTask], config: EvalConfig
) -> Iterator[Measurement]:
    if not local and not hub:
        return
    from lm_eval.evaluator import evaluate as harness_evaluate

    from octavo.evaluate.harness import HarnessLM

    with (
        tempfile.TemporaryDirectory(prefix="octavo-eval-") as scratch,
        contextlib.redirect_stderr(_WithoutBars(sys.stderr)),  # type: ignore[type-var]
        _progress(label) as advance,
    ):
        tasks = harness_tasks(local, Path(scratch)) if local else hub_tasks(hub)
        for task in tasks["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        model = HarnessLM(loaded, config.add_bos, advance)
        found = harness_evaluate(model, tasks, limit=config.limit, bootstrap_iters=0, log_samples=True)
    data = {
        one.task.name: {"path": str(one.path), "checksum": one.sha256, **({"note": one.note} if one.note else {})}
        for one in local
    }
    for name, metrics in found["results"].items():
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        items = [_item(sample) for sample in samples]
        if name not in data:
            digest = hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode()).hexdigest()
            data[name] = {"path": HUB, "checksum": digest}
        scores: dict[str, float | None] = {
            key.removesuffix(",none"): finite(value)
            for key, value in metrics.items()
            if key.endswith(",none") and "stderr" not in key
        }
        for metric in ("acc", "acc_norm"):
            if metric in scores:
                scores[f"{metric}_stderr"] = paired([item[metric] for item in items])[1]
        yield Measurement(name, "task", scores, {**data[name], "items": len(items)}, items)


def _item(sample: dict[str, Any]) -> Item:
    """What to keep of one of the harness's samples."""
    answers = [tuple(answer) for answer in sample["filtered_resps"]]
    return {
        "item": sample["doc_id"],
        **{metric: float(sample[metric]) for metric in ("acc", "acc_norm") if metric in sample},
        "logprobs": [float(logprob) for logprob, _ in answers],
        "greedy": [bool(greedy) for _, greedy in answers],
        "prompt": sample["prompt_hash"],
    }


def _text(loaded: LoadedModel, label: str, path: str, checksum: str, config: EvalConfig) -> Measurement:
    with _progress(f"{label} text") as advance:
        loss = text_loss(loaded, read_documents(path), stride=config.stride, limit=config.limit, advance=advance)
    counts = {name: getattr(loss, name) for name in ("documents", "tokens", "words", "bytes")}
    items = [{"item": number, "loss": nats, "tokens": tokens} for number, (nats, tokens) in enumerate(loss.windows)]
    metrics = {name: finite(value) for name, value in loss.metrics.items()}
    return Measurement("text", "loss", metrics, {"path": path, "checksum": checksum, **counts, "items": len(items)}, items)


class _WithoutBars:
    """A stream that leaves out bars, which begin their lines anew: the harness draws one for each task and has no switch."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if "\r" not in text and text != "\n":
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _corpus(loaded: LoadedModel, label: str, corpus: PreparedCorpus, limit: int | None) -> Iterator[Measurement]:
    """The loss on the held-out documents of each source."""
    tokenizer = corpus.load_tokenizer()
    if tokenizer.vocabulary() != loaded.codec.vocabulary():
        raise ValueError(
            f"{corpus.folder} was prepared with tokenizer {corpus.tokenizer} ({tokenizer.vocab_size:,} tokens), and "
            f"{loaded.description['path']} has another ({loaded.codec.name}): prepare it with the tokenizer of the model"
        )
    for source in corpus.sources:
        losses: list[tuple[float, int]] = []
        with _progress(f"{label} {source.name}") as advance:
            for shard in source.validation:
                rest = None if limit is None else limit - len(losses)
                if shard.count > loaded.scorer.window and rest != 0:
                    losses += token_loss(loaded.scorer, shard.tokens, limit=rest, advance=advance)
        if not losses:
            raise ValueError(
                f"source {source.name} of {corpus.folder} holds out {source.validation_tokens:,} tokens, fewer than the "
                f"{loaded.scorer.window + 1:,} of one window: use a smaller --window"
            )
        tokens = sum(count for _, count in losses)
        items = [{"item": number, "loss": nats, "tokens": count} for number, (nats, count) in enumerate(losses)]
        digest = hashlib.sha256("".join(shard.checksum for shard in source.validation).encode()).hexdigest()
        yield Measurement(
            f"corpus/{source.name}",
            "loss",
            {"loss": math.fsum(nats for nats, _ in losses) / tokens},
            {"path": str(corpus.folder), "checksum": digest, "tokens": tokens, "items": len(items)},
            items,
        )


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Advance]:
    """A bar on a terminal, a line at each tenth elsewhere; it appears with the first call, which knows the total."""
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        shown = 0

        def advance(done: int, total: int) -> None:
            nonlocal bar, shown
            if bar is None:
                bar = stack.enter_context(Progress(title, total))
            bar.step(done)
            if not sys.stdout.isatty() and 10 * done // total > shown:
                shown = 10 * done // total
                bar.note(f"{done:,} of {total:,} requests")

        yield advance


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
        raise ValueError("evaluation needs lm-evaluation-harness: pip install 'octavo[eval]'")


def _label(wanted: str, taken: set[str]) -> str:
    """A file name like `wanted` that is not in `taken`, where it is put."""
    name = re.sub(r"[^\w.+-]+", "_", wanted)
    label, number = name, 1
    while label in taken:
        number += 1
        label = f"{name}-{number}"
    taken.add(label)
    return label
