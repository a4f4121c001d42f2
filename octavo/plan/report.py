"""The plan of a run: from its config to bytes by kind, the peak, the time of a step, and what fits.

`make_plan(config, "h200")` is what `octavo plan PRESET` prints. Nothing is built and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.convert.break_even import named
from octavo.data import load_tokenizer
from octavo.data.corpus import PreparedCorpus
from octavo.models import SIZES, TransformerConfig
from octavo.plan.ceilings import GIB, GPUS, Ceiling
from octavo.plan.shapes import ATTENTION, FEED_FORWARD, KINDS, RESIDUAL, Setup
from octavo.plan.speed import StepTime, step_time
from octavo.plan.step import forward_only, simulate
from octavo.plan.tape import Tape
from octavo.recipe import RECIPES
from octavo.train.config import TrainConfig
from octavo.train.setup import model_config

LARGEST = 4096
"""Largest micro-batch that is tried."""
NOT_MODELLED = (
    "not counted: fragmentation of the allocator (leave 3 to 5%), checkpoints and validation, other processes on the GPU; under "
    "torch.compile, the temporaries of blocks that are not fused are taken as those of eager ones; under train.graph, steps that count "
    "(log.stats_every), whose activations and gradients lie beside those of the graph"
)


@dataclass(frozen=True)
class Plan:
    """What a run needs and how fast it can be."""

    name: str
    setup: Setup
    gpu: Ceiling
    tape: Tape
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the GPU."""
        return self.tape.peak <= self.gpu.memory


def make_plan(config: TrainConfig, gpu: str = "h200") -> Plan:
    """The plan of a run on one GPU. Raises `ValueError` for an unknown GPU, and for configs that no run could have."""
    if gpu not in GPUS:
        raise ValueError(f"no GPU is called {gpu!r}; there are {', '.join(GPUS)}")
    setup = setup_of(config, GPUS[gpu].capability)
    return Plan(config.name, setup, GPUS[gpu], simulate(setup), step_time(setup, GPUS[gpu]))


def setup_of(config: TrainConfig, capability: str = "9.0") -> Setup:
    """What of the config decides memory and time on a GPU of that compute capability. Raises `ValueError` where the trainer would."""
    if config.model.from_ is not None:
        raise ValueError(
            f"model.from={config.model.from_}: a plan is made of sizes, not of a checkpoint; set model.dim, model.n_layers and so on"
        )
    if config.optim.release != "none" and config.train.micro_batches > 1:
        raise ValueError(
            f"optim.release={config.optim.release} needs train.micro_batches=1, but it is {config.train.micro_batches}"
        )
    return Setup(
        model_config(config, _vocabulary(config)),
        config.recipe,
        config.data.seq_len,
        config.data.micro_batch,
        config.train.micro_batches,
        config.train.compile,
        config.optim.release,
        table=config.model.break_even,
        capability=capability,
        graph=config.train.graph,
    )


def _vocabulary(config: TrainConfig) -> int:
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if PreparedCorpus.is_one(config.data.path):
        return PreparedCorpus.open(config.data.path).load_tokenizer().vocab_size
    return load_tokenizer(config.data.tokenizer or "byte").vocab_size


def largest_micro_batch(setup: Setup, memory: int) -> int:
    """The largest micro-batch whose peak is within `memory`; 0 if not even one sequence fits."""

    def fits(size: int) -> bool:
        return simulate(replace(setup, micro_batch=size)).peak <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def alternatives(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes of settings that save memory, the cheapest in time first."""
    changes: dict[str, dict[str, Any]] = {}
    if not setup.compiled and not (setup.graph and setup.recipe.scaling == "delayed"):
        changes["train.compile=true"] = {"compiled": True}
    if setup.recipe.converts is False or setup.recipe.master is None:
        changes["recipe=O2"] = {"recipe": RECIPES["O2"]}
    if not setup.model.fused and setup.recipe.scaling == "current":
        changes["model.fused=true"] = {"fused": True}
    if setup.release == "none" and not setup.graph:
        changes["optim.release=partial train.micro_batches=1"] = {"release": "partial", "micro_batches": 1}
    modes = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}[
        setup.model.recompute
    ]
    for mode in modes:
        chosen: dict[str, Any] = {}
        words = [] if mode == setup.model.recompute else [f"model.recompute={mode}"]
        layers = None if words else setup.model.recompute_layers
        model = replace(setup.model, recompute=mode, recompute_layers=layers)  # type: ignore[arg-type]
        if words:
            yield " ".join(words), replace(setup, model=model)
        for word, change in changes.items():
            chosen |= change
            words.append(word)
            others = {field: value for field, value in chosen.items() if field != "fused"}
            fused = replace(model, fused=chosen.get("fused", model.fused))
            yield " ".join(words), replace(setup, model=fused, **others)


def format_plan(plan: Plan) -> str:
    """The plan in plain text."""
    s, tape, gpu = plan.setup, plan.tape, plan.gpu
    parameters = s.model.num_parameters
    resting = sum(s.resident().values())
    lines = [
        f"{plan.name}: {s.model.dialect.upper()}, {parameters / 1e9:.2f}B parameters ({s.converted_parameters / 1e9:.2f}B in converted "
        f"layers, vocabulary {s.model.vocab_size:,}), recipe {s.recipe.name}",
        f"micro-batch {s.micro_batch} x {s.seq_len:,} tokens, {s.micro_batches} a step, recompute {recompute_words(s.model)}, "
        f"release {s.release}, {'compiled' if s.compiled else 'not compiled'}"
        f"{', replayed from a CUDA graph' if s.graph else ''}{_fused_words(s)}",
        *([f"stay as they are, since FP8 is slower: {named(s.left)} (model.break_even)"] if s.left else []),
        "",
        f"{'at the peak':<18} {'GiB':>9} {'B/parameter':>12}",
    ]
    for kind in KINDS:
        if kind in tape.at_peak:
            size = tape.at_peak[kind]
            lines.append(f"{kind:<18} {size / GIB:9.2f} {size / parameters:12.2f}")
    lines += [
        f"{'total':<18} {tape.peak / GIB:9.2f} {tape.peak / parameters:12.2f}   at {tape.when}",
        f"{'between steps':<18} {resting / GIB:9.2f} {resting / parameters:12.2f}",
        "",
        f"backward keeps of a block{' computed again' if 0 < s.model.recomputed_layers < s.model.n_layers else ''}, bytes a token: "
        + ", ".join(f"{k} {v:,.0f}" for k, v in kept_per_token(s).items()),
        _verdict(plan),
        "",
        f"at the GPU's ceilings a step takes {plan.time.seconds:.3g} s, {plan.time.tokens_per_second:,.0f} tokens/s, "
        f"{plan.time.tflops:,.0f} TFLOP/s of the model ({gpu.measured})",
        "  " + ", ".join(f"{kind} {100 * t / plan.time.seconds:.0f}%" for kind, t in plan.time.by_kind.items()),
        NOT_MODELLED,
    ]
    return "\n".join(lines)


def recompute_words(model: TransformerConfig) -> str:
    """Such as `full` or `full, 12 of 32 blocks`."""
    some = 0 < model.recomputed_layers < model.n_layers
    return f"{model.recompute}, {model.recomputed_layers} of {model.n_layers} blocks" if some else model.recompute


def fewest_recomputed(setup: Setup, memory: float) -> int:
    """The fewest blocks of `setup`, which fits into `memory` bytes, whose recomputation lets it fit."""
    low, high = -1, setup.model.recomputed_layers
    while high - low > 1:
        middle = (low + high) // 2
        some = {"recompute_layers": middle} if middle else {"recompute": "none", "recompute_layers": None}
        fits = simulate(replace(setup, model=replace(setup.model, **some))).peak <= memory  # type: ignore[arg-type]
        low, high = (low, middle) if fits else (middle, high)
    return high


def _fused_words(setup: Setup) -> str:
    if setup.fused or not setup.model.fused:
        return ", blocks fused" if setup.fused else ""
    return ", blocks not fused: not all of their layers are FP8, or a compiler cannot trace delayed scaling"


def kept_per_token(setup: Setup) -> dict[str, float]:
    """Bytes a token that backward keeps of one block, by kind."""
    one, two = (
        forward_only(replace(setup, model=replace(setup.model, n_layers=layers))).by_kind() for layers in (1, 2)
    )
    return {
        kind: (two.get(kind, 0) - one.get(kind, 0)) / setup.tokens
        for kind in (RESIDUAL, ATTENTION, FEED_FORWARD)
        if kind in one
    }


def _verdict(plan: Plan) -> str:
    memory, setup = plan.gpu.memory, plan.setup
    room = f"{plan.gpu.name} has {memory / GIB:.1f} GiB"
    best = largest_micro_batch(setup, memory)
    if best:
        verb = "fits" if plan.fits else "does not fit"
        left = f", {(memory - plan.tape.peak) / GIB:.1f} GiB left" if plan.fits else ""
        if plan.fits and setup.model.recompute == "full":
            fewest = fewest_recomputed(setup, memory)
            if fewest < setup.model.recomputed_layers:
                left += f"; model.recompute{f'_layers={fewest}' if fewest else '=none'} would do"
        return f"{room}: it {verb}{left}; the largest micro-batch that fits is {best}"
    for words, other in alternatives(setup):
        best = largest_micro_batch(other, memory)
        if best:
            peak = simulate(replace(other, micro_batch=1)).peak
            return f"{room}: not even a micro-batch of 1 fits; it does with {words} ({peak / GIB:.1f} GiB; the largest then is {best})"
    parameters = setup.model.num_parameters
    return (
        f"{room}: nothing fits, whatever is recomputed or released; {parameters / 1e9:.1f}B parameters need a smaller model "
        f"(sizes: {', '.join(SIZES)}), a shorter data.seq_len, or more GPUs"
    )
