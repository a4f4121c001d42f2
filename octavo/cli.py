"""The `octavo` command.

    octavo train PRESET [--set path=value]… [--resume]    train a preset with changes
    octavo demo [--set path=value]… [--seed N]            BF16 beside FP8 on this machine, with two figures
    octavo presets                                        list the presets
    octavo doctor                                         what this machine can do

Exit codes: 0 done, or stopped by SIGTERM or SIGINT after a checkpoint; 1 the run failed (arithmetic, disk); 2 the user asked for
something that cannot be, said in one sentence before anything is written. A traceback is a defect of octavo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

import torch

from octavo.formats import NumericsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


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


def _presets(arguments: argparse.Namespace) -> int:
    from octavo.train.presets import PRESETS

    for name, preset in PRESETS.items():
        print(f"{name:12s} {(preset.__doc__ or '').splitlines()[0]}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from octavo.doctor import main

    return main()


def _fail(code: int, error: Exception) -> int:
    if isinstance(error, torch.OutOfMemoryError):
        error = RuntimeError(
            "the GPU has too little memory for this run: lower data.micro_batch and raise train.micro_batches by the same factor, "
            f"or set model.recompute=full ({str(error).splitlines()[0]})"
        )
    print(f"octavo: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="FP8 training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"octavo {importlib.metadata.version('octavo')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a preset", description="Train a preset, with changes.")
    train.add_argument("preset", metavar="PRESET", help="see `octavo presets`")
    train.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the run's folder, if any"
    )
    train.set_defaults(run=_train)

    demo = commands.add_parser(
        "demo",
        help="train a small model in BF16 and in FP8 and compare",
        description="BF16 beside FP8 on this machine.",
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights, data order and rounding (default 0)")
    demo.set_defaults(run=_demo)
    for command in (train, demo):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="PATH=VALUE",
            help="change a setting, such as optim.lr=3e-4, recipe=O1 or data.path=corpus.txt; may be repeated",
        )

    presets = commands.add_parser("presets", help="list the presets", description="List the presets.")
    presets.set_defaults(run=_presets)
    doctor = commands.add_parser(
        "doctor", help="what this machine can do", description="What this machine can do, and why not."
    )
    doctor.set_defaults(run=_doctor)
    return parser


if __name__ == "__main__":
    sys.exit(main())
