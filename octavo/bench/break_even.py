"""`octavo bench --break-even PATH`: where FP8 linear layers begin to be faster than BF16 on this device.

Forward and backward of both layers, all casts included, as in `octavo bench linear`, over square layers and four times as wide ones;
eager, and on a GPU in a CUDA graph, which stands for everything that hides launches. The file is what `octavo.BreakEven(table=PATH)` and
`model.break_even=PATH` read. About a minute on an H200.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.bench.linear import BASELINE, BOUND, time_layer, variants
from octavo.bench.rows import Row
from octavo.bench.run import Run
from octavo.convert.break_even import EAGER, GRAPH, Measurement, Table, capability_of

REPEATS = 7
TOKENS = {"cuda": (1024, 4096, 16_384, 65_536), "cpu": (64, 256)}
SIDES = {"cuda": (512, 768, 1024, 1536, 2048, 3072, 4096), "cpu": (64, 128)}
ASPECTS = (1, 4)


def run_break_even(run: Run, path: Path) -> list[Row]:
    """Measure, say, and write the table to `path`, which is whole after each shape. Returns a row for each time.

    A shape that does not fit into memory, or whose result is wrong, is not in the table. Raises `ValueError`, before anything is
    measured, if `path` has no folder or the recipe no FP8.
    """
    if not run.recipe.converts:
        raise ValueError(f"--break-even compares FP8 with BF16, and recipe={run.recipe.name} is BF16: use O1 or O2")
    if not path.parent.is_dir():
        raise ValueError(f"--break-even={path}: there is no folder {path.parent}")
    rows: list[Row] = []
    measured: list[Measurement] = []
    modes = (EAGER, GRAPH) if run.is_cuda else (EAGER,)
    for tokens, inputs, outputs in _shapes(run.device.type):
        pairs = []
        for mode in modes:
            try:
                pairs.append(_pair(run, mode, tokens, inputs, outputs))
            except torch.OutOfMemoryError:
                run.record.say(f"{tokens:,} tokens, {inputs:,} → {outputs:,}, {mode}: out of memory")
        run.clear()
        rows += [row for pair in pairs for row in pair]
        for bf16, fp8 in pairs:
            if bf16.wrong or fp8.wrong:
                run.record.say(f"WRONG: {bf16.what}, {bf16.mode}: errors {bf16.error:.2g} and {fp8.error:.2g}")
                continue
            assert bf16.ms is not None and fp8.ms is not None
            facts = capability_of(run.device), run.record.conditions["device"], bf16.mode, tokens, inputs, outputs
            measured.append(Measurement(*facts, bf16.ms * 1e3, fp8.ms * 1e3))
        cells = [one for one in measured if (one.tokens, one.inputs, one.outputs) == (tokens, inputs, outputs)]
        if cells:
            run.record.say(_line(cells))
            write_table(path, measured, run.record.conditions, run.recipe.name)
    if measured:
        run.record.say(f"\nsquare layers are faster in FP8, forward and backward ({path}):")
        for line in Table(tuple(measured)).describe():
            run.record.say(f"  {line}")
    return rows


def _shapes(kind: str) -> Iterator[tuple[int, int, int]]:
    for tokens in TOKENS[kind]:
        for side in SIDES[kind]:
            yield from ((tokens, side, aspect * side) for aspect in ASPECTS)


def _pair(run: Run, mode: str, tokens: int, inputs: int, outputs: int) -> tuple[Row, Row]:
    """BF16 and FP8, timed right after each other."""
    found = []
    build = variants(run, inputs, outputs)
    for variant in (BASELINE, f"octavo {run.recipe.name}"):
        row = Row("break-even", f"{tokens} tokens, {inputs} → {outputs}", variant, mode, tokens=tokens, bound=BOUND)
        found.append(time_layer(run, row, build[variant], inputs, outputs))
    return found[0], found[1]


def _line(cells: list[Measurement]) -> str:
    """The modes of a shape, for people."""
    one = cells[0]
    parts = [f"{c.mode} {c.bf16_us:,.0f} µs in BF16, {c.fp8_us:,.0f} in FP8: {c.speedup:.2f}×" for c in cells]
    return f"{one.tokens:>6} tokens, {one.inputs:>4} → {one.outputs:<5}  {'   '.join(parts)}"


def write_table(path: Path, measured: list[Measurement], conditions: dict[str, str], recipe: str) -> None:
    """The columns of `Measurement`, and the conditions."""
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
