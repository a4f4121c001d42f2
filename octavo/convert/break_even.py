"""Where FP8 begins to save time: measured, never guessed.

An FP8 layer saves time in its three GEMMs and spends some on casts and launches. Which of them is more depends on the GPU, the shape of
the layer, the tokens that it sees at once, and on whether launches are hidden by a CUDA graph or `torch.compile`. The kernels of a fused
block save more than those of its layers alone, so whole blocks are measured too. `octavo bench --break-even` times forward and
backward, casts included, over grids of shapes; `break_even.csv`, beside this file, holds what was measured so far, by compute
capability. What a table does not have, a device or a kind of shape, is not judged.

Between measured points log(speedup) is linear in log(tokens), log √(inputs · outputs) and log(longer side / shorter side); beyond the
grid it is that of the nearest edge.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy
import torch

MEASURED = Path(__file__).with_name("break_even.csv")
"""octavo's own measurements."""
TOKENS = 16_384
"""Tokens of a forward, where nobody says how many."""
LAYER, BLOCK = "layer", "block"
"""What is measured: one linear layer; or a fused block, with the model's dim as inputs and the features of its widest layer as outputs."""
EAGER, GRAPH, COMPILED = "eager", "graph", "compiled"
"""A CUDA graph shows a layer or a block without launches; blocks are also compiled as the trainer compiles them, launches included."""

Grid = dict[float, dict[float, dict[float, float]]]
"""Log speedup by the logs of aspect, side and tokens."""
Rule = Callable[[int, int, torch.device], str | None]
"""(inputs, outputs, device that holds the weight) → why a layer of that shape should stay as it is, or None."""


@dataclass(frozen=True)
class Measurement:
    """Forward and backward of one layer or block in BF16 and in FP8."""

    capability: str
    """Of the device, such as 9.0; `cpu` for a CPU."""
    device: str
    mode: str
    """`eager` or `graph`; or `compiled` for a block."""
    tokens: int
    inputs: int
    outputs: int
    bf16_us: float
    """Microseconds."""
    fp8_us: float
    what: str = LAYER

    @property
    def speedup(self) -> float:
        return self.bf16_us / self.fp8_us


@dataclass(frozen=True)
class Table:
    """The measurements of one device."""

    measurements: Sequence[Measurement]
    grids: dict[tuple[str, str], Grid] = field(init=False, compare=False)
    """By what was measured and the mode."""

    def __post_init__(self) -> None:
        grids: dict[tuple[str, str], Grid] = {}
        for one in self.measurements:
            side, aspect = _coordinates(one.inputs, one.outputs)
            sides = grids.setdefault((one.what, one.mode), {}).setdefault(aspect, {})
            sides.setdefault(side, {})[numpy.log2(one.tokens)] = numpy.log2(one.speedup)
        object.__setattr__(self, "grids", grids)

    @property
    def device(self) -> str:
        return self.measurements[0].device

    def modes(self, what: str = LAYER) -> list[str]:
        return sorted(mode for kind, mode in self.grids if kind == what)

    def tokens(self, what: str = LAYER) -> list[int]:
        return sorted({one.tokens for one in self.measurements if one.what == what})

    def speedup(self, tokens: int, inputs: int, outputs: int, mode: str, what: str = LAYER) -> float | None:
        """Of FP8 over BF16; of another mode if this one was not measured, None if nothing of that kind was."""
        modes = self.modes(what)
        if not modes:
            return None
        grid = self.grids[what, mode if mode in modes else modes[0]]
        side, aspect = _coordinates(inputs, outputs)
        at = numpy.log2(max(tokens, 1))

        def over_sides(sides: dict[float, dict[float, float]]) -> float:
            return _interpolate(side, {one: _interpolate(at, values) for one, values in sides.items()})

        return float(2 ** _interpolate(aspect, {one: over_sides(sides) for one, sides in grid.items()}))

    def smallest(self, tokens: int, mode: str, what: str = LAYER) -> int | None:
        """The smallest measured d from which on square layers, or blocks of all shapes, are faster in FP8; None if the largest is not."""
        shapes: dict[int, set[int]] = {}
        for one in self.measurements:
            if one.what == what and (what == BLOCK or one.inputs == one.outputs):
                shapes.setdefault(one.inputs, set()).add(one.outputs)
        found = None
        for d in sorted(shapes, reverse=True):
            speedups = [self.speedup(tokens, d, outputs, mode, what) for outputs in shapes[d]]
            if any(speedup is None or speedup < 1 for speedup in speedups):
                break
            found = d
        return found

    def describe(self) -> list[str]:
        """A line for each kind and mode: where square layers and blocks begin to be faster in FP8."""
        lines = []
        for what, mode in sorted(self.grids, key=lambda kind: (kind[0] != LAYER, kind)):
            least = [(tokens, self.smallest(tokens, mode, what)) for tokens in self.tokens(what)]
            parts = [f"at {n:,} tokens {'never' if d is None else f'from d = {d:,}'}" for n, d in least]
            lines.append(f"{'square layers' if what == LAYER else 'blocks'}, {mode}: {', '.join(parts)}")
        return lines


def _coordinates(inputs: int, outputs: int) -> tuple[float, float]:
    """log2 of the geometric mean of the sides, and of their ratio."""
    a, b = numpy.log2(inputs), numpy.log2(outputs)
    return float(a + b) / 2, float(abs(a - b))


def _interpolate(at: float, points: dict[float, float]) -> float:
    """Linear between points, constant beyond them."""
    xs = sorted(points)
    return float(numpy.interp(at, xs, [points[x] for x in xs]))


@functools.lru_cache
def read_tables(path: Path) -> dict[str, Table]:
    """The tables of a CSV file by compute capability; other columns are its conditions. A process reads a file once.

    A file without the column `what` is of layers. Raises `ValueError` for a file that is no table.
    """
    names = {one.name: one.type for one in fields(Measurement)}
    found: dict[str, list[Measurement]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if "what" not in (reader.fieldnames or ()):
            del names["what"]
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path} has no column {missing[0]!r}: make it with `octavo bench --break-even {path.name}`"
            )
        for row in reader:
            kinds = {"int": int, "float": float, "str": str}
            try:
                one = Measurement(**{name: kinds[str(kind)](row[name]) for name, kind in names.items()})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
            if min(one.tokens, one.inputs, one.outputs, one.bf16_us, one.fp8_us) <= 0:
                raise ValueError(f"{path}, line {reader.line_num}: sizes and times must be positive")
            if one.what not in (LAYER, BLOCK):
                raise ValueError(f"{path}, line {reader.line_num}: what is {one.what!r}: use {LAYER} or {BLOCK}")
            found.setdefault(one.capability, []).append(one)
    return {capability: Table(tuple(rows)) for capability, rows in found.items()}


def capability_of(device: torch.device) -> str:
    """What a table calls the device: `9.0` for a Hopper GPU, else the type."""
    if device.type != "cuda":
        return device.type
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def find_table(capability: str, path: Path | None = None) -> Table | None:
    """The measurements of this kind of device in the file at `path`, or in octavo's own; None if there are none.

    Raises `ValueError` if the file at `path` is not there or no table.
    """
    if path is None:
        return read_tables(MEASURED).get(capability) if MEASURED.is_file() else None
    if not path.is_file():
        raise ValueError(f"there is no file {path}: make it with `octavo bench --break-even {path}`")
    return read_tables(path).get(capability)


class TooSlow(str):
    """A reason that speaks of time alone: another `break_even` may overrule it."""


@dataclass(frozen=True)
class BreakEven:
    """Leaves a layer as it is where FP8 was measured to be slower than BF16 on the device that holds its weight.

    Raises `ValueError` for a number of tokens that cannot be.
    """

    tokens: int = TOKENS
    """That a layer sees in one forward: sequences of a micro-batch times their length."""
    compiled: bool = False
    """The layers will run under `torch.compile`."""
    table: str | Path | None = None
    """A file of `octavo bench --break-even`; None is octavo's own measurements."""
    together: tuple[tuple[int, int], ...] = ()
    """Shapes (inputs, outputs) of the layers of a fused block: its time decides for all, since one that is left takes the block apart."""
    graph: bool = False
    """The layers will be replayed from a CUDA graph, without launches."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(
                f"tokens={self.tokens!r} must be a whole number of at least one, which a layer sees in a forward"
            )

    def speedup(self, inputs: int, outputs: int, capability: str) -> float | None:
        """Of FP8 over BF16 on devices of that name (see `capability_of`), of the block for one of its layers; None if not measured."""
        return self._judge(inputs, outputs, capability)[0]

    def _judge(self, inputs: int, outputs: int, capability: str) -> tuple[float | None, str]:
        """(the speedup, words for what was measured); (None, "") where nothing was.

        Where no block was measured, its speedup is estimated from its layers, as if their time in BF16 were in proportion to their
        arithmetic.
        """
        table = find_table(capability, None if self.table is None else Path(self.table))
        if table is None:
            return None, ""
        mode = GRAPH if self.compiled or self.graph else EAGER
        if (inputs, outputs) not in self.together:
            return table.speedup(self.tokens, inputs, outputs, mode), f"{inputs:,} → {outputs:,}"
        dim, widest = max(self.together, key=lambda shape: shape[1])
        whole = GRAPH if self.graph else COMPILED if self.compiled else EAGER
        block = table.speedup(self.tokens, dim, widest, whole, BLOCK)
        # Where no block was measured in a graph, layers in one say more than blocks with launches, if there are any.
        by_layers = self.graph and GRAPH not in table.modes(BLOCK) and table.modes(LAYER)
        if block is not None and not by_layers:
            return block, f"a fused block whose widest layer is {dim:,} → {widest:,}"
        bf16 = fp8 = 0.0
        for k, n in self.together:
            layer = table.speedup(self.tokens, k, n, mode)
            assert layer is not None, "a table has layers or blocks"
            bf16, fp8 = bf16 + k * n, fp8 + k * n / layer
        return bf16 / fp8, f"a fused block, by its layers {named(self.together)}"

    def __call__(self, inputs: int, outputs: int, device: torch.device) -> TooSlow | None:
        capability = capability_of(device)
        speedup, what = self._judge(inputs, outputs, capability)
        if speedup is None or speedup >= 1:
            return None
        return TooSlow(
            f"FP8 has {speedup:.3g}× the speed of BF16 at {self.tokens:,} tokens, {what}, {self._way} "
            f"(measured at compute capability {capability}); break_even=False converts it"
        )

    @property
    def _way(self) -> str:
        return "in a CUDA graph" if self.graph else "compiled" if self.compiled else "eager"


def named(shapes: Iterable[tuple[int, int]]) -> str:
    """Shapes (inputs, outputs) for people."""
    return ", ".join(f"{inputs} → {outputs}" for inputs, outputs in sorted(shapes))


@dataclass(frozen=True)
class Left:
    """Decisions that were made before: layers of these shapes, (inputs, outputs), stay as they are on any device."""

    shapes: frozenset[tuple[int, int]]

    def __call__(self, inputs: int, outputs: int, device: torch.device) -> TooSlow | None:
        if (inputs, outputs) not in self.shapes:
            return None
        return TooSlow(
            f"FP8 is slower for {inputs:,} → {outputs:,} on the device that the model was planned for or trained on first"
        )


_default: ContextVar[Rule | None] = ContextVar("octavo_break_even", default=BreakEven())  # noqa: B039


@contextmanager
def deciding_by(rule: Rule | None) -> Iterator[None]:
    """Inside, `convert` takes this rule where none is given: for code that converts while it builds a model."""
    token = _default.set(rule)
    try:
        yield
    finally:
        _default.reset(token)


def default_rule() -> Rule | None:
    """The rule of `deciding_by`, else octavo's measurements at `TOKENS`, not compiled."""
    return _default.get()
