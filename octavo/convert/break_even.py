"""Where FP8 begins to save time: measured, never guessed.

A FP8 layer saves time in its three GEMMs and spends some on casts and launches. Which of them is more depends on the GPU, the shape of
the layer, the tokens that it sees at once, and on whether launches are hidden by a CUDA graph or `torch.compile`. `octavo bench
--break-even` times forward and backward of both layers, casts included, over a grid of shapes; `break_even.csv`, beside this file,
holds what was measured so far, by compute capability. A device that a table does not have is not judged.

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
EAGER, GRAPH = "eager", "graph"

Rule = Callable[[int, int, torch.device], str | None]
"""(inputs, outputs, device) → why a layer of that shape should stay as it is, or None."""


@dataclass(frozen=True)
class Measurement:
    """Forward and backward of one layer in BF16 and in FP8."""

    capability: str
    """Of the device, such as 9.0; `cpu` for a CPU."""
    device: str
    mode: str
    """`eager`, or `graph`: the same calls in a CUDA graph, whose launches cost nothing."""
    tokens: int
    inputs: int
    outputs: int
    bf16_us: float
    """Microseconds."""
    fp8_us: float

    @property
    def speedup(self) -> float:
        return self.bf16_us / self.fp8_us


@dataclass(frozen=True)
class Table:
    """The measurements of one device."""

    measurements: Sequence[Measurement]
    grids: dict[str, dict[float, dict[float, dict[float, float]]]] = field(init=False, compare=False)
    """Log speedup by mode and by the logs of aspect, side and tokens."""

    def __post_init__(self) -> None:
        grids: dict[str, dict[float, dict[float, dict[float, float]]]] = {}
        for one in self.measurements:
            side, aspect = _coordinates(one.inputs, one.outputs)
            sides = grids.setdefault(one.mode, {}).setdefault(aspect, {})
            sides.setdefault(side, {})[numpy.log2(one.tokens)] = numpy.log2(one.speedup)
        object.__setattr__(self, "grids", grids)

    @property
    def device(self) -> str:
        return self.measurements[0].device

    @property
    def modes(self) -> list[str]:
        return sorted(self.grids)

    @property
    def tokens(self) -> list[int]:
        return sorted({one.tokens for one in self.measurements})

    def speedup(self, tokens: int, inputs: int, outputs: int, mode: str) -> float:
        """Of FP8 over BF16; of another mode if this one was not measured."""
        grid = self.grids[mode if mode in self.grids else self.modes[0]]
        side, aspect = _coordinates(inputs, outputs)
        at = numpy.log2(max(tokens, 1))

        def over_sides(sides: dict[float, dict[float, float]]) -> float:
            return _interpolate(side, {one: _interpolate(at, values) for one, values in sides.items()})

        return float(2 ** _interpolate(aspect, {one: over_sides(sides) for one, sides in grid.items()}))

    def smallest(self, tokens: int, mode: str) -> int | None:
        """The smallest measured d from which on square layers are faster in FP8; None if the largest is not."""
        found = None
        for side in sorted({one.inputs for one in self.measurements if one.inputs == one.outputs}, reverse=True):
            if self.speedup(tokens, side, side, mode) < 1:
                break
            found = side
        return found

    def describe(self) -> list[str]:
        """A line for each mode: where square layers begin to be faster in FP8."""
        lines = []
        for mode in self.modes:
            least = [(tokens, self.smallest(tokens, mode)) for tokens in self.tokens]
            parts = [f"at {n:,} tokens {'never' if d is None else f'from d = {d:,}'}" for n, d in least]
            lines.append(f"{mode}: {', '.join(parts)}")
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

    Raises `ValueError` for a file that is no table.
    """
    names = {one.name: one.type for one in fields(Measurement)}
    found: dict[str, list[Measurement]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
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
    """The layers will run under `torch.compile` or in a CUDA graph."""
    table: str | Path | None = None
    """A file of `octavo bench --break-even`; None is octavo's own measurements."""
    together: tuple[tuple[int, int], ...] = ()
    """Shapes (inputs, outputs) of layers that a fused block runs as one: their time decides as a whole, since one that is left takes
    the block apart."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: a layer sees at least one token")

    def speedup(self, inputs: int, outputs: int, capability: str) -> float | None:
        """Of FP8 over BF16 on devices of that name (see `capability_of`); None where it was not measured.

        Of layers that go together, BF16 takes time in proportion to their arithmetic.
        """
        found = find_table(capability, None if self.table is None else Path(self.table))
        if found is None:
            return None
        mode = GRAPH if self.compiled else EAGER
        shapes = self.together if (inputs, outputs) in self.together else ((inputs, outputs),)
        bf16 = sum(k * n for k, n in shapes)
        return bf16 / sum(k * n / found.speedup(self.tokens, k, n, mode) for k, n in shapes)

    def __call__(self, inputs: int, outputs: int, device: torch.device) -> TooSlow | None:
        capability = capability_of(device)
        speedup = self.speedup(inputs, outputs, capability)
        if speedup is None or speedup >= 1:
            return None
        return TooSlow(
            f"FP8 has {speedup:.3g}× the speed of BF16 at {self.tokens:,} tokens, {inputs:,} → {outputs:,}, "
            f"{'compiled' if self.compiled else 'eager'} (measured at compute capability {capability}); break_even=False converts it"
        )


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
