"""The command line of `octavo bench`. It imports nothing of the benchmarks, so that other commands do not either."""

from __future__ import annotations

import argparse
from pathlib import Path

BENCHMARKS = ("kernels", "linear", "block", "step", "optimizer")
MODES = ("eager", "compiled", "graph")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; what depends on the device is None until it is known."""
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        help=f"{', '.join(BENCHMARKS)}; default: all of them, in this order",
    )
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="measure copy, GEMM and attention rates first, and give each time its floor",
    )
    parser.add_argument(
        "--break-even",
        type=Path,
        metavar="PATH",
        help="instead of all benchmarks: time FP8 and BF16 layers and blocks of many shapes, and write the table that convert decides by",
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="all rows with their conditions")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="bars of throughput and memory")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="at least 10 (default 20)")
    parser.add_argument(
        "--preset", metavar="NAME", help="of `octavo presets`: sizes of all benchmarks (default gpt_7b; tiny on a CPU)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a setting of the preset; may be repeated",
    )
    parser.add_argument(
        "--only",
        type=names,
        default=(),
        metavar="NAMES",
        help="variants whose name contains one of these, such as bf16,octavo; with --break-even, layer or block",
    )
    parser.add_argument(
        "--modes", type=names, metavar="NAMES", help="eager, compiled, graph (default all three; eager on a CPU)"
    )
    parser.add_argument(
        "--tokens", type=_count, metavar="N", help="kernels, linear: tokens (default 16384; 256 on a CPU)"
    )
    parser.add_argument(
        "--shapes", type=_shapes, metavar="LIST", help="linear: inputs x outputs, such as 4096x4096,4096x16384"
    )
    parser.add_argument(
        "--layers", type=_count, metavar="N", help="block, optimizer: default 8, or 2 on a CPU; step: default all"
    )
    parser.add_argument(
        "--micro-batch",
        type=_numbers,
        metavar="LIST",
        help="step: each of these, block: the first (default 8; 2 on a CPU)",
    )
    parser.add_argument(
        "--micro-batches", type=_count, default=1, metavar="N", help="step: of an optimizer step (default 1)"
    )


def names(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(name.strip() for name in text.split(","))


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of inputs x outputs, such as 4096x4096,4096x16384")
    return [(_count(inputs), _count(outputs)) for inputs, outputs in pairs]
