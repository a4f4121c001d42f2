"""`octavo bench --break-even PATH`: where FP8 linear layers and fused blocks begin to be faster than BF16 on this device.

Forward and backward of both layers, all casts included, as in `octavo bench linear`, over square layers and four times as wide ones;
eager, and on a GPU in a CUDA graph, which stands for everything that hides launches. Then blocks, see `octavo.bench.break_even_blocks`.
The file is what `octavo.BreakEven(table=PATH)` and `model.break_even=PATH` read. `--only layer` and `--only block` measure one of the two.
At most four minutes on an H200, most of them for compiling blocks.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from octavo.bench import break_even_blocks as blocks
from octavo.bench.linear import BASELINE, BOUND, time_layer, variants
from octavo.bench.rows import Row
from octavo.bench.run import Run
from octavo.convert.break_even import BLOCK, EAGER, GRAPH, LAYER, Measurement, Table, capability_of

REPEATS = 7
# The grid of layers, by type of device: inputs are SIDES, outputs as many or four times as many.
MODES = {"cuda": (EAGER, GRAPH), "cpu": (EAGER,)}
TOKENS = {"cuda": (1024, 4096, 16_384, 65_536), "cpu": (64, 256)}
SIDES = {"cuda": (512, 768, 1024, 1536, 2048, 3072, 4096), "cpu": (64, 128)}
ASPECTS = (1, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed at once: a layer or a block, over some tokens."""

    what: str
    tokens: int
    inputs: int
    outputs: int
    modes: tuple[str, ...]
    time: Callable[[str], tuple[Row, Row]]
    """Mode → BF16 and FP8, timed right after each other."""


def run_break_even(run: Run, path: Path) -> list[Row]:
    """Measure, print, and write the table to `path`, which is whole after each shape. Returns a row for each time.

    A shape that does not fit into memory, or whose result is wrong, is not in the table. Raises `ValueError`, before anything is
    measured, if `path` has no folder, the recipe no FP8, or `run.only` wants neither layers nor blocks.
    """
    if not run.recipe.converts:
        raise ValueError(f"--break-even compares FP8 with BF16, and recipe={run.recipe.name} is BF16: use O1 or O2")
    if not path.parent.is_dir():
        raise ValueError(f"--break-even={path}: there is no folder {path.parent}")
    if not (run.wants(LAYER) or run.wants(BLOCK)):
        raise ValueError(f"--only={','.join(run.only)}: --break-even measures {LAYER} and {BLOCK}")
    rows: list[Row] = []
    measured: list[Measurement] = []
    for case in _cases(run):
        timed, found = _measure(run, case)
        rows += timed
        if found:
            parts = [f"{m.mode} {m.bf16_us:,.0f} µs in BF16, {m.fp8_us:,.0f} in FP8: {m.speedup:.2f}×" for m in found]
            run.record.say(f"{_title(case)}  {'   '.join(parts)}")
            measured += found
            write_table(path, measured, run.record.conditions, run.recipe.name)
    if measured:
        run.record.say(f"\nFP8 is faster, forward and backward, in ({path}):")
        for line in Table(tuple(measured)).describe():
            run.record.say(f"  {line}")
    return rows


def _measure(run: Run, case: Case) -> tuple[list[Row], list[Measurement]]:
    """(rows of what was timed, a measurement for each mode that fits into memory and gives the right result)."""
    rows: list[Row] = []
    found = []
    for mode in case.modes:
        try:
            bf16, fp8 = case.time(mode)
        except torch.OutOfMemoryError:
            run.record.say(f"{_title(case)}, {mode}: out of memory")
            continue
        rows += [bf16, fp8]
        if bf16.wrong or fp8.wrong:
            run.record.say(f"WRONG: {bf16.what}, {bf16.mode}: errors {bf16.error:.2g} and {fp8.error:.2g}")
            continue
        assert bf16.ms is not None and fp8.ms is not None
        found.append(
            Measurement(
                capability_of(run.device),
                run.record.conditions["device"],
                mode,
                case.tokens,
                case.inputs,
                case.outputs,
                bf16_us=bf16.ms * 1e3,
                fp8_us=fp8.ms * 1e3,
                what=case.what,
            )
        )
    return rows, found


def _title(case: Case) -> str:
    return f"{case.what} {case.tokens:>6} tokens, {case.inputs:>4} → {case.outputs:<5}"


def _cases(run: Run) -> Iterator[Case]:
    """Layers one by one; blocks one by one, over all tokens, since each is compiled once."""
    kind = run.device.type
    if run.wants(LAYER):
        for tokens, inputs, outputs in _shapes(kind):
            time = functools.partial(_pair, run, tokens, inputs, outputs)
            yield Case(LAYER, tokens, inputs, outputs, MODES[kind], time)
            run.clear()
    if run.wants(BLOCK):
        for dialect in blocks.DIALECTS:
            for dim in blocks.DIMS[kind]:
                pair = blocks.BlockPair(run, dialect, dim)
                for tokens in blocks.TOKENS[kind]:
                    time = functools.partial(pair.time, tokens)
                    yield Case(BLOCK, tokens, dim, pair.outputs, blocks.MODES[kind], time)
                del pair, time
                run.clear()


def _shapes(kind: str) -> Iterator[tuple[int, int, int]]:
    for tokens in TOKENS[kind]:
        for side in SIDES[kind]:
            yield from ((tokens, side, aspect * side) for aspect in ASPECTS)


def _pair(run: Run, tokens: int, inputs: int, outputs: int, mode: str) -> tuple[Row, Row]:
    """The rows of a BF16 and an FP8 layer, timed right after each other."""
    found = []
    build = variants(run, inputs, outputs)
    for variant in (BASELINE, f"octavo {run.recipe.name}"):
        row = Row("break-even", f"{tokens} tokens, {inputs} → {outputs}", variant, mode, tokens=tokens, bound=BOUND)
        found.append(time_layer(run, row, build[variant], inputs, outputs))
    return found[0], found[1]


def write_table(path: Path, measured: list[Measurement], conditions: dict[str, str], recipe: str) -> None:
    """A CSV file with the fields of `Measurement` as its columns, then the conditions: what `read_tables` reads."""
    facts = {"recipe": recipe, "repeats": str(REPEATS), **conditions}
    names = [one.name for one in dataclasses.fields(Measurement)]
    extra = [name for name in facts if name not in names]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *extra])
        for one in measured:
            values = [getattr(one, name) for name in names]
            writer.writerow(
                [f"{v:.5g}" if isinstance(v, float) else v for v in values] + [facts[name] for name in extra]
            )
