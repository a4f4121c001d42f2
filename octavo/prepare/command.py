"""What `octavo prepare` does with its arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.prepare.config import load_config
from octavo.settings import to_dict


def prepare_corpus(arguments: argparse.Namespace) -> None:
    """Makes the corpus of a config. Raises `ValueError` for wrong settings or input, `OSError` for disk and network."""
    _only_for_filters(arguments)
    config = load_config(arguments.config, arguments.set)
    _need_packages()
    from octavo.prepare.pipeline import prepare

    out = prepare(config)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    for name, source in report["sources"].items():
        read, kept = source["read"]["bytes"] / 1e6, source["kept"]["bytes"] / 1e6
        tokens = source["train"]["tokens"] + source["validation"]["tokens"]
        share = report["mixture"]["shares"][name]
        print(
            f"{name:<16} {read:8,.1f} MB read {kept:8,.1f} kept {tokens:12,} tokens  weight {share['asked']:.2f} got {share['got']:.2f}"
        )
    print(f"corpus {out} (octavo train … --set data.path={out}), report {out / 'report.html'}")


def show_config(arguments: argparse.Namespace) -> None:
    """Prints a config as JSON, a start for one's own."""
    _only_for_filters(arguments)
    print(json.dumps(to_dict(load_config(arguments.config, arguments.set)), indent=2))


def train_filters(arguments: argparse.Namespace) -> None:
    """Trains the perplexity model and the classifier on reference text. Raises `ValueError`, `OSError`."""
    if arguments.set or arguments.show or not (arguments.reference and arguments.contrast and arguments.out):
        raise ValueError("train-filters takes --reference PATH --contrast PATH --out FOLDER, and nothing else")
    _need_packages()
    from octavo.data.sources import read_documents
    from octavo.prepare.classifier import train_classifier
    from octavo.prepare.perplexity import train_perplexity
    from octavo.prepare.stages import CLASSIFIER, PERPLEXITY

    out = Path(arguments.out).expanduser()
    results = {
        PERPLEXITY: train_perplexity(read_documents(arguments.reference), out / PERPLEXITY),
        CLASSIFIER: train_classifier(
            read_documents(arguments.reference), read_documents(arguments.contrast), out / CLASSIFIER
        ),
    }
    for name, result in results.items():
        print(f"{out / name}: {json.dumps(result)}")


def _only_for_filters(arguments: argparse.Namespace) -> None:
    for name in ("reference", "contrast", "out"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} belongs to train-filters; a corpus takes its settings by --set")


def _need_packages() -> None:
    try:
        import datatrove  # noqa: F401
        import orjson  # noqa: F401
    except ImportError as error:
        raise ValueError(f"octavo prepare needs {error.name}: pip install '.[data]' in octavo's folder") from None
