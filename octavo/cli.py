"""The `octavo` command.

    octavo train PRESET [--set path=value]… [--resume]    train a preset with changes
    octavo demo [--set path=value]… [--seed N]            BF16 beside FP8 on this machine, with two figures
    octavo eval MODEL… --tasks FOLDER|hub                 zero-shot scores, perplexity, held-out loss; --compare for results
    octavo export RUN OUT [--format fp8]                  a run as a Hugging Face checkpoint
    octavo plan PRESET [--set path=value]… [--gpu h200]   bytes by kind, the peak, what fits and the time of a step
    octavo presets                                        list the presets
    octavo prepare CONFIG [--set path=value]…             a corpus from sources: filters, no copies, token shards, a report
    octavo reproduce fig7|sensitivity|mu                  experiments of the paper, its claims beside what is measured
    octavo bench [kernels|linear|block|step|optimizer]    time and memory here, beside BF16 and other libraries
    octavo doctor                                         what this machine can do

Exit codes: 0 done, or stopped by SIGTERM or SIGINT after a checkpoint; 1 the run failed (arithmetic, disk); 2 the user asked for
something that cannot be, said in one sentence before anything is written. A traceback is a defect of octavo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.bench.options import add_arguments as add_bench_arguments
from octavo.formats import NumericsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has what it wanted, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


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

    settings = {name: value for name, value in vars(arguments).items() if name not in ("run", "compare")}
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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


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
    prepare = commands.add_parser(
        "prepare",
        help="make a corpus from sources of text",
        description="Read, filter, de-duplicate and tokenize sources of text; or train the filters that need a model.",
    )
    prepare.add_argument("config", metavar="CONFIG", help="a .toml or .json file, a preset (demo), or train-filters")
    prepare.add_argument("--show", action="store_true", help="print the whole config as JSON and do nothing")
    models = prepare.add_argument_group("train-filters")
    models.add_argument("--reference", metavar="PATH", help="text to keep the like of, a file or folder")
    models.add_argument("--contrast", metavar="PATH", help="text as it comes, for the classifier to tell apart")
    models.add_argument("--out", metavar="FOLDER", help="where the models go, then filters.models of a config")
    prepare.set_defaults(run=_prepare)
    plan = commands.add_parser(
        "plan", help="what a run needs on one GPU", description="Bytes, time and what fits, without running it."
    )
    plan.add_argument("preset", metavar="PRESET", help="see `octavo presets`")
    plan.add_argument("--gpu", default="h200", metavar="NAME", help="h200 (default) or h100")
    plan.set_defaults(run=_plan)
    for command in (train, demo, prepare, plan):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="PATH=VALUE",
            help="change a setting, such as optim.lr=3e-4, recipe=O1 or data.path=corpus.txt; may be repeated",
        )

    evaluation = commands.add_parser(
        "eval",
        help="zero-shot scores, perplexity and held-out loss",
        description="Evaluate models in FP8 and BF16, and compare them item by item.",
    )
    evaluation.add_argument("models", nargs="*", metavar="MODEL", help="run of octavo train, or Hugging Face folder")
    evaluation.add_argument(
        "--tasks", metavar="FOLDER|hub", help="the nine zero-shot tasks, from JSON lines or the hub"
    )
    evaluation.add_argument("--only", type=_names, metavar="NAMES", help="tasks to take, such as piqa,copa")
    evaluation.add_argument("--text", metavar="PATH", help="text file or folder for perplexity")
    evaluation.add_argument("--corpus", metavar="FOLDER", help="prepared corpus for the loss on held-out documents")
    evaluation.add_argument("--limit", type=int, metavar="N", help="first N items of each task, windows of each text")
    evaluation.add_argument(
        "--recipe",
        dest="recipes",
        type=_names,
        default=(),
        metavar="NAMES",
        help="such as bf16,O2; default: the model's own",
    )
    evaluation.add_argument("--dtype", default="auto", help="fp32 or bf16; auto is fp32 on the CPU, bf16 on a GPU")
    evaluation.add_argument("--device", default="auto", help="auto, cpu or cuda")
    evaluation.add_argument("--window", type=int, metavar="N", help="tokens that the model sees; default: its limit")
    evaluation.add_argument(
        "--stride", type=int, metavar="N", help="tokens between windows of a text; default: the window"
    )
    evaluation.add_argument("--batch-tokens", type=int, metavar="N", help="tokens of a batch")
    evaluation.add_argument(
        "--bos", dest="add_bos", action=argparse.BooleanOptionalAction, help="special tokens before each text, or none"
    )
    evaluation.add_argument(
        "--through", default="transformers", help="Hugging Face models: transformers (default), or octavo's decoder"
    )
    evaluation.add_argument("--compare", nargs="+", metavar="JSON", help="compare results instead of evaluating")
    evaluation.add_argument("--out", default="runs/eval", metavar="FOLDER", help="of results (default runs/eval)")
    evaluation.set_defaults(run=_eval)

    export = commands.add_parser(
        "export",
        help="write a run as a Hugging Face checkpoint",
        description="Write the model of a run as a checkpoint that transformers loads.",
    )
    export.add_argument(
        "run_or_checkpoint", metavar="RUN_OR_CHECKPOINT", help="folder of octavo train (its newest), or one checkpoint"
    )
    export.add_argument("out", metavar="OUT", help="new folder")
    export.add_argument(
        "--format",
        choices=("bf16", "fp8"),
        default="bf16",
        help="fp8: E4M3 weights with one scale each, for compressed-tensors",
    )
    export.set_defaults(run=_export)

    # Its own parser reads the rest, so that nothing of the experiments is imported by other commands.
    reproduce = commands.add_parser("reproduce", help="experiments of the paper", add_help=False)
    reproduce.add_argument("-h", "--help", action="store_true")
    reproduce.add_argument("rest", nargs=argparse.REMAINDER)
    reproduce.set_defaults(run=_reproduce)

    bench = commands.add_parser(
        "bench",
        help="time and memory on this machine",
        description="Kernels, layers, blocks, steps and optimizers of octavo and its peers: see docs/benchmarks.md.",
    )
    add_bench_arguments(bench)
    bench.set_defaults(run=_bench)
    presets = commands.add_parser("presets", help="list the presets", description="List the presets.")
    presets.set_defaults(run=_presets)
    doctor = commands.add_parser(
        "doctor", help="what this machine can do", description="What this machine can do, and why not."
    )
    doctor.set_defaults(run=_doctor)
    return parser


if __name__ == "__main__":
    sys.exit(main())
