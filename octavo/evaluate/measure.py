"""What is measured of a loaded model: the tasks through the harness, the loss on a text, the loss on a corpus by source."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from octavo.data.corpus import CorpusSource, PreparedCorpus
from octavo.data.sources import read_documents
from octavo.evaluate.compare import paired
from octavo.evaluate.models import LoadedModel
from octavo.evaluate.perplexity import text_loss, token_loss
from octavo.evaluate.results import Item, Measurement, finite
from octavo.evaluate.tasks import HUB, LocalTask, ZeroShotTask, harness_tasks, hub_tasks
from octavo.train.progress import Progress

Advance = Callable[[int, int], None]
"""Called with the requests done and all of them."""


def measure_tasks(
    loaded: LoadedModel,
    label: str,
    local: Sequence[LocalTask],
    hub: Sequence[ZeroShotTask],
    *,
    limit: int | None = None,
    add_bos: bool | None = None,
) -> Iterator[Measurement]:
    """The tasks with `local` records, or else those of the `hub`, their first `limit` items, without examples in the prompt.

    `label` stands before the progress. Raises `ValueError` if the hub cannot be reached.
    """
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
        model = HarnessLM(loaded, add_bos, advance)
        found = harness_evaluate(model, tasks, limit=limit, bootstrap_iters=0, log_samples=True)
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


def measure_text(
    loaded: LoadedModel, label: str, path: str, checksum: str, *, stride: int | None = None, limit: int | None = None
) -> Measurement:
    """Loss and perplexities of the documents at `path`, whose content has the `checksum`; see `text_loss`."""
    with _progress(f"{label} text") as advance:
        loss = text_loss(loaded, read_documents(path), stride=stride, limit=limit, advance=advance)
    counts = {name: getattr(loss, name) for name in ("documents", "tokens", "words", "bytes")}
    items = [{"item": number, "loss": nats, "tokens": tokens} for number, (nats, tokens) in enumerate(loss.windows)]
    metrics = {name: finite(value) for name, value in loss.metrics.items()}
    return Measurement(
        "text", "loss", metrics, {"path": path, "checksum": checksum, **counts, "items": len(items)}, items
    )


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


def choose_sources(loaded: LoadedModel, corpus: PreparedCorpus) -> tuple[list[CorpusSource], dict[str, str]]:
    """(the sources of `corpus` that hold out enough to be measured; `corpus/NAME` → why not, for the others, which are warned of).

    Raises `ValueError` for a corpus of another tokenizer and for one without a source that holds out as much as a window.
    """
    tokenizer = corpus.load_tokenizer()
    if tokenizer.vocabulary() != loaded.codec.vocabulary():
        raise ValueError(
            f"{corpus.folder} was prepared with tokenizer {corpus.tokenizer} ({tokenizer.vocab_size:,} tokens), and "
            f"{loaded.description['path']} has another ({loaded.codec.name}): prepare it with the tokenizer of the model"
        )
    chosen, left_out = [], {}
    for source in corpus.sources:
        if reason := _too_short(source, loaded.scorer.window):
            left_out[f"corpus/{source.name}"] = reason
        else:
            chosen.append(source)
    reasons = "; ".join(f"{name.partition('/')[2]}: {reason}" for name, reason in left_out.items())
    if not chosen:
        raise ValueError(f"no source of {corpus.folder} can be measured. {reasons}")
    if left_out:
        warnings.warn(f"not every source of {corpus.folder} is measured. {reasons}", stacklevel=2)
    return chosen, left_out


def _too_short(source: CorpusSource, window: int) -> str:
    """Why no window of `window` tokens and the one before them fits into the held-out tokens; empty if one does."""
    longest = max((shard.count for shard in source.validation), default=0)
    if longest > window:
        return ""
    smaller = f", or use --window {longest - 1}" if longest > 1 else ""
    return (
        f"holds out {source.validation_tokens:,} tokens, and a shard must have {window + 1:,} for one window: prepare "
        f"more documents of it or a larger share for validation{smaller}"
    )


def measure_corpus(
    loaded: LoadedModel, label: str, folder: Path, sources: Sequence[CorpusSource], *, limit: int | None = None
) -> Iterator[Measurement]:
    """The loss on the held-out documents of each of the `sources` (see `choose_sources`) of the corpus in `folder`, the first
    `limit` windows of each."""
    for source in sources:
        losses: list[tuple[float, int]] = []
        with _progress(f"{label} {source.name}") as advance:
            for shard in source.validation:
                rest = None if limit is None else limit - len(losses)
                if shard.count > loaded.scorer.window and rest != 0:
                    losses += token_loss(loaded.scorer, shard.tokens, limit=rest, advance=advance)
        tokens = sum(count for _, count in losses)
        items = [{"item": number, "loss": nats, "tokens": count} for number, (nats, count) in enumerate(losses)]
        digest = hashlib.sha256("".join(shard.checksum for shard in source.validation).encode()).hexdigest()
        yield Measurement(
            f"corpus/{source.name}",
            "loss",
            {"loss": math.fsum(nats for nats, _ in losses) / tokens},
            {"path": str(folder), "checksum": digest, "tokens": tokens, "items": len(items)},
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
