"""From the command line of `octavo bench` to its rows: the sizes of a preset, the ceilings if floors are wanted, then each benchmark."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch

from octavo.bench.break_even import REPEATS, run_break_even
from octavo.bench.ceilings import describe, measure_ceiling
from octavo.bench.kernels import run_kernels
from octavo.bench.linear import run_linear
from octavo.bench.models import Workload, run_block, run_step
from octavo.bench.optimizer import run_optimizer
from octavo.bench.options import BENCHMARKS, MODES
from octavo.bench.plots import plot
from octavo.bench.rows import Record, Row, conditions
from octavo.bench.run import Run
from octavo.convert.break_even import capability_of
from octavo.plan import Setup, setup_of
from octavo.settings import override
from octavo.train.presets import get_preset
from octavo.train.setup import choose_device

VOCABULARY = {"cuda": 50_257, "cpu": 257}
"""Tokens, where the preset leaves them to a tokenizer."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What the options are on a kind of device."""

    preset: str
    modes: tuple[str, ...]
    tokens: int
    shapes: list[tuple[int, int]]
    layers: int
    micro_batch: tuple[int, ...]


DEFAULTS = {
    "cuda": Defaults("gpt_7b", MODES, 16_384, [(4096, 4096), (4096, 16_384), (2048, 2048), (1024, 1024)], 8, (8,)),
    "cpu": Defaults("tiny", ("eager",), 256, [(64, 64), (64, 256)], 2, (2,)),
}


def bench(arguments: argparse.Namespace, say: Callable[[str], None] = print) -> list[Row]:
    """Run what `arguments` ask for. Raises `ValueError` for what cannot be, before anything is measured."""
    names = [name for name in BENCHMARKS if name in arguments.benchmarks] or list(BENCHMARKS)
    if arguments.break_even is not None and arguments.benchmarks:
        raise ValueError(
            f"--break-even runs alone, and {arguments.benchmarks[0]!r} is a benchmark: leave one of them out"
        )
    unknown = sorted({*arguments.benchmarks} - {*BENCHMARKS})
    if unknown:
        raise ValueError(f"there is no benchmark {unknown[0]!r}: use {', '.join(BENCHMARKS)}")
    if arguments.repeats < 10:
        raise ValueError(f"--repeats={arguments.repeats}: a median and a spread need at least 10")
    device = choose_device(arguments.device)
    options = _complete(arguments, DEFAULTS[device.type])
    if not {*options.modes} <= {*MODES} or (device.type == "cpu" and "graph" in options.modes):
        raise ValueError(f"--modes={','.join(options.modes)}: use {', '.join(MODES)} (graph on a GPU)")
    settings = [f"train.micro_batches={options.micro_batches}", *options.set]
    config = override(get_preset(options.preset), settings)
    if config.model.vocab_size is None:
        config = override(config, [f"model.vocab_size={VOCABULARY[device.type]}"])
    setup = setup_of(config, capability_of(device))
    if setup.model.dtype != torch.bfloat16:
        raise ValueError("model.dtype must be bf16: everything is compared with BF16")
    record = Record(conditions(device), say, options.csv)
    say(", ".join(f"{name} {value}" for name, value in record.conditions.items() if value))
    if options.break_even is not None:
        return run_break_even(Run(device, REPEATS, config.recipe, record, only=options.only), options.break_even)
    ceiling = None
    if options.roofline or "kernels" in names:
        ceiling = measure_ceiling(device, options.repeats)
        say(describe(ceiling))
    run = Run(device, options.repeats, config.recipe, record, ceiling, options.modes, options.only)
    for name in names:
        say(f"\n{name}")
        _run(name, run, options, setup)
    if not record.rows:
        raise ValueError(f"--only={','.join(options.only)}: no variant of {', '.join(names)} has that in its name")
    if options.plot is not None:
        facts = record.conditions
        plot(
            options.plot,
            record.rows,
            f"{facts['device']}, torch {facts['torch']}, octavo {facts['commit']}, {facts['date']}",
        )
    return record.rows


def _run(name: str, run: Run, options: argparse.Namespace, setup: Setup) -> None:
    layers = min(options.layers or DEFAULTS[run.device.type].layers, setup.model.n_layers)
    if name == "kernels":
        run_kernels(run, setup.model, options.tokens, setup.model.dim * setup.model.ffn_width)
    elif name == "linear":
        run_linear(run, options.tokens, options.shapes)
    elif name == "optimizer":
        run_optimizer(run, setup.model, layers)
    elif name == "block":
        run_block(run, _workload(options, setup, layers, options.micro_batch[0], 1))
    else:
        depth = options.layers or setup.model.n_layers
        works = [_workload(options, setup, depth, size, options.micro_batches) for size in options.micro_batch]
        run_step(run, works)


def _workload(options: argparse.Namespace, setup: Setup, layers: int, micro_batch: int, micro_batches: int) -> Workload:
    model = dataclasses.replace(setup.model, n_layers=layers)
    setup = dataclasses.replace(setup, model=model, micro_batch=micro_batch, micro_batches=micro_batches)
    name = f"{layers} layers of {options.preset}"
    changed = [setting for setting in options.set if setting.startswith("model.")]
    return Workload(" ".join([name, *changed]), setup)


def _complete(arguments: argparse.Namespace, defaults: Defaults) -> argparse.Namespace:
    """The arguments, with defaults where None was given."""
    given = vars(arguments)
    chosen = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(defaults)
        if given[field.name] is None and field.name != "layers"
    }
    return argparse.Namespace(**{**given, **chosen})


def failures(rows: list[Row]) -> list[str]:
    """What went wrong: checks of any variant, and rows of octavo itself that could not be measured."""
    wrong = [f"{row.what}, {row.variant}: error {row.error:.3g}, at most {row.bound:g}" for row in rows if row.wrong]
    failed = [
        f"{row.what}, {row.variant}, {row.mode}: {row.note}"
        for row in rows
        if row.note.startswith("failed") and "octavo" in row.variant
    ]
    return wrong + failed
