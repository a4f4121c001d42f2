"""What each command does with its arguments, and how it fails.

A command imports what it needs when it runs, so that one does not wait for the libraries of another. The exceptions that are named here
become one sentence and an exit code; any other is a defect of octavo, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.formats import NumericsError


def _train(arguments: argparse.Namespace) -> int:
    from octavo.settings import override
    from octavo.train.presets import get_preset
    from octavo.train.trainer import Trainer

    try:
        trainer = Trainer(override(get_preset(arguments.preset), arguments.set), resume=arguments.resume)
    except (ValueError, OSError) as error:
        return _fail(2, error)
    try:
        result = trainer.run()
    except (NumericsError, OSError, torch.OutOfMemoryError) as error:
        return _fail(1, error)
    if not trainer.place.is_first:
        return 0
    if result.val_loss is not None:
        print(f"training loss {result.train_loss:.4f} (last tenth), validation loss {result.val_loss:.4f}")
    print(f"checkpoint {result.checkpoint}, metrics {trainer.folder}/metrics.jsonl")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from octavo.train.demo import compare, prepare

    try:
        trainers = prepare(arguments.set, arguments.seed)
    except (ValueError, OSError) as error:
        return _fail(2, error)
    try:
        compare(trainers)
    except (NumericsError, OSError, torch.OutOfMemoryError) as error:
        return _fail(1, error)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers would draw its own into ours
    from octavo.evaluate import EvalConfig, Results, compare_all, evaluate

    settings = {name: value for name, value in vars(arguments).items() if name not in ("command", "compare")}
    try:
        if arguments.compare is not None:
            if arguments.models or len(arguments.compare) < 2:
                raise ValueError("--compare takes two or more JSON files of results, and no MODEL")
            compare_all([Results.read(path) for path in arguments.compare], Path(arguments.out))
        else:
            evaluate(EvalConfig(**settings))
    except ValueError as error:
        return _fail(2, error)
    except torch.OutOfMemoryError as error:
        return _fail(
            1, RuntimeError(f"the GPU has too little memory: lower --batch-tokens ({str(error).splitlines()[0]})")
        )
    except (NumericsError, OSError) as error:
        return _fail(1, error)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from octavo.hf import export
    from octavo.train.restore import SavedRun

    try:
        run = SavedRun.open(arguments.run_or_checkpoint)
        source = None if run.source is None else run.source.path
        folder = export(run.load_model(), arguments.out, run.tokenizer, source=source, format=arguments.format)
    except ValueError as error:
        return _fail(2, error)
    except OSError as error:
        return _fail(1, error)
    print(f"{folder}: {run.checkpoint.name} as {arguments.format} safetensors, for transformers")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from octavo.plan import format_plan, make_plan
    from octavo.settings import override
    from octavo.train.presets import get_preset

    try:
        print(format_plan(make_plan(override(get_preset(arguments.preset), arguments.set), arguments.gpu)))
    except (ValueError, OSError) as error:
        return _fail(2, error)
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    from octavo.train.presets import PRESETS

    for name, preset in PRESETS.items():
        print(f"{name:12s} {(preset.__doc__ or '').splitlines()[0]}")
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    from octavo.prepare.command import prepare_corpus, show_config, train_filters

    if arguments.config == "train-filters":
        run = train_filters
    else:
        run = show_config if arguments.show else prepare_corpus
    try:
        run(arguments)
    except ValueError as error:
        return _fail(2, error)
    except OSError as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return _fail(1, RuntimeError("stopped; the same command goes on where it was"))
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    from octavo.reproduce.entry import parser

    chosen = parser().parse_args(["--help"] if arguments.help else arguments.rest)
    try:
        chosen.experiment(chosen)
    except ValueError as error:
        return _fail(2, error)
    except (NumericsError, OSError, torch.OutOfMemoryError) as error:
        return _fail(1, error)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from octavo.bench.entry import bench, failures

    try:
        found = failures(bench(arguments))
    except ValueError as error:
        return _fail(2, error)
    except (OSError, torch.OutOfMemoryError) as error:
        return _fail(1, error)
    return _fail(1, RuntimeError("; ".join(found))) if found else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from octavo.doctor import main

    return main()


def _fail(code: int, error: Exception) -> int:
    if code == 2 and isinstance(error, BrokenPipeError):  # (a run that loses its output says so)
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        error = RuntimeError(
            "the GPU has too little memory for this run: lower data.micro_batch and raise train.micro_batches by the same factor, "
            f"or set model.recompute=full ({str(error).splitlines()[0]})"
        )
    print(f"octavo: {error}", file=sys.stderr)
    return code


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "demo": _demo,
    "eval": _eval,
    "export": _export,
    "plan": _plan,
    "presets": _presets,
    "prepare": _prepare,
    "reproduce": _reproduce,
    "bench": _bench,
    "doctor": _doctor,
}
"""Name → function of the parsed arguments, which returns the exit code."""
