"""What each command takes. Nothing of the commands is imported here: `--help` and mistakes of spelling are answered at once."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import TYPE_CHECKING

from octavo.bench.options import add_arguments as add_bench_arguments
from octavo.bench.options import names

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` of its result is the name of the command."""
    whole = argparse.ArgumentParser(prog="octavo", description="FP8 training for PyTorch.")
    whole.add_argument("--version", action="version", version=f"octavo {importlib.metadata.version('octavo')}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_train(commands)
    _add_demo(commands)
    _add_prepare(commands)
    _add_plan(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_reproduce(commands)
    _add_bench(commands)
    commands.add_parser("presets", help="list the presets", description="List the presets.")
    commands.add_parser("doctor", help="what this machine can do", description="What this machine can do, and why not.")
    return whole


def _add_train(commands: Commands) -> None:
    train = commands.add_parser("train", help="train a preset", description="Train a preset, with changes.")
    train.add_argument("preset", metavar="PRESET", help="see `octavo presets`")
    train.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the run's folder, if any"
    )
    _add_set(train)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small model in BF16 and in FP8 and compare",
        description="BF16 beside FP8 on this machine.",
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights, data order and rounding (default 0)")
    _add_set(demo)


def _add_prepare(commands: Commands) -> None:
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
    _add_set(prepare)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan", help="what a run needs on one GPU", description="Bytes, time and what fits, without running it."
    )
    plan.add_argument("preset", metavar="PRESET", help="see `octavo presets`")
    plan.add_argument("--gpu", default="h200", metavar="NAME", help="h200 (default) or h100")
    _add_set(plan)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a setting, such as optim.lr=3e-4, recipe=O1 or data.path=corpus.txt; may be repeated",
    )


def _add_eval(commands: Commands) -> None:
    evaluation = commands.add_parser(
        "eval",
        help="zero-shot scores, perplexity and held-out loss",
        description="Evaluate models in FP8 and BF16, and compare them item by item.",
    )
    add = evaluation.add_argument
    add("models", nargs="*", metavar="MODEL", help="run of octavo train, or Hugging Face folder")
    add("--tasks", metavar="FOLDER|hub", help="the nine zero-shot tasks, from JSON lines or the hub")
    add("--only", type=names, metavar="NAMES", help="tasks to take, such as piqa,copa")
    add("--text", metavar="PATH", help="text file or folder for perplexity")
    add("--corpus", metavar="FOLDER", help="prepared corpus for the loss on held-out documents")
    add("--limit", type=int, metavar="N", help="first N items of each task, windows of each text")
    add(
        "--recipe",
        dest="recipes",
        type=names,
        default=(),
        metavar="NAMES",
        help="such as bf16,O2; default: the model's own",
    )
    add("--dtype", default="auto", help="fp32 or bf16; auto is fp32 on the CPU, bf16 on a GPU")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--window", type=int, metavar="N", help="tokens that the model sees; default: its limit")
    add("--stride", type=int, metavar="N", help="tokens between windows of a text; default: the window")
    add("--batch-tokens", type=int, metavar="N", help="tokens of a batch")
    add("--bos", dest="add_bos", action=argparse.BooleanOptionalAction, help="special tokens before each text, or none")
    add("--through", default="transformers", help="Hugging Face models: transformers (default), or octavo's decoder")
    add("--compare", nargs="+", metavar="JSON", help="compare results instead of evaluating")
    add("--out", default="runs/eval", metavar="FOLDER", help="of results (default runs/eval)")


def _add_export(commands: Commands) -> None:
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


def _add_reproduce(commands: Commands) -> None:
    # Its own parser reads the rest, so that nothing of the experiments is imported by other commands.
    reproduce = commands.add_parser("reproduce", help="experiments of the paper", add_help=False)
    reproduce.add_argument("-h", "--help", action="store_true")
    reproduce.add_argument("rest", nargs=argparse.REMAINDER)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="time and memory on this machine",
        description="Kernels, layers, blocks, steps and optimizers of octavo and its peers: see docs/benchmarks.md.",
    )
    add_bench_arguments(bench)
