"""`octavo bench block` and `octavo bench step`: octavo's own decoder, beside BF16 and torchao's FP8 of the same model.

    block   N layers of a size and its head, forward and backward; parameters are BF16, all of the compared compiled BF16, and of
            octavo those that it does not convert
    step    the same with clipping to norm 1 and the optimizer, over micro-batches; compared with BF16 that has FP32 parameters and states

All variants begin with the same weights, see the same random tokens, take the fastest attention and the loss in chunks. The loss of the
first call must be within 2% of that of BF16. Peak memory is the most that the allocator held in the timed calls. Model FLOPs count
no recomputation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.bench.floors import step_ms
from octavo.bench.linear import move_scales
from octavo.bench.peers import small_optimizer, torchao_float8
from octavo.bench.profile import profile
from octavo.bench.rows import Row
from octavo.bench.run import SEED, Run
from octavo.bench.timing import captured
from octavo.convert import convert, initialize
from octavo.convert.break_even import Left, deciding_by, named
from octavo.models import Transformer, TransformerConfig
from octavo.optim import AdamW, clip_grad_norm_, release_gradients
from octavo.plan.report import recompute_words
from octavo.plan.shapes import Setup

BOUND = 0.02
BASELINE = "bf16"
TORCHAO = "torchao tensorwise"
LR = 1e-4
MAX_NORM = 1.0


@dataclass(frozen=True)
class Workload:
    """What a variant has to do."""

    name: str
    """Such as "8 layers of gpt_7b"."""
    setup: Setup

    @property
    def model(self) -> TransformerConfig:
        return self.setup.model

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random tokens and targets of a micro-batch."""
        generator = torch.Generator(device).manual_seed(SEED)
        shape = (2, self.setup.micro_batch, self.setup.seq_len)
        tokens, targets = torch.randint(self.model.vocab_size, shape, device=device, generator=generator)
        return tokens, targets

    def row(self, benchmark: str, variant: str, mode: str) -> Row:
        setup = self.setup
        tokens = setup.tokens * setup.micro_batches
        what = f"{self.name}, {setup.seq_len} tokens"
        if self.model.recompute != "none":
            what += f", {recompute_words(self.model)} recomputation"
        if setup.micro_batches > 1:
            what += f", {setup.micro_batches} micro-batches"
        return Row(
            benchmark,
            what,
            variant,
            mode,
            tokens=tokens,
            gflops=self.model.flops_per_token(setup.seq_len) * tokens / 1e9,
            micro_batch=setup.micro_batch,
            bound=BOUND,
        )


def build_plain(run: Run, config: TransformerConfig) -> Transformer:
    """A model with BF16 parameters."""
    return build_bf16(run, config).to(torch.bfloat16)


def build_bf16(run: Run, config: TransformerConfig) -> Transformer:
    """A model that computes in BF16 and has FP32 parameters. Nothing of it is fused by hand: the compiler fuses only what it can see."""
    return Transformer.build(dataclasses.replace(config, fused=False), None, run.device, SEED)


def build_torchao(run: Run, config: TransformerConfig) -> Transformer:
    """The same, its blocks in torchao's FP8; the head stays BF16, as in octavo."""
    model = build_plain(run, config)
    torchao_float8(model.blocks, run.device)
    return model


def build_octavo(run: Run, config: TransformerConfig) -> Transformer:
    """A model in the recipe of the run; what is not converted has FP32 parameters."""
    return Transformer.build(config, run.recipe, run.device, SEED)


def convert_plain(run: Run, config: TransformerConfig) -> Transformer:
    """A model with BF16 parameters in the recipe of the run: what is not converted keeps them, as in a user's own model."""
    model = Transformer.build(config, None, run.device, SEED).to(torch.bfloat16)
    convert(model, run.recipe)
    return model


def baseline_losses(run: Run, works: list[Workload]) -> list[float]:
    """The losses of BF16 for the same weights and tokens; all works have the same model."""
    model = build_plain(run, works[0].model)
    with torch.no_grad():
        losses = [model(*work.batch(run.device)).item() for work in works]
    del model
    run.clear()
    return losses


# --- block


def run_block(run: Run, work: Workload) -> None:
    """Forward and backward of all variants."""
    (expected,) = baseline_losses(run, [work])
    variants: dict[str, Callable[[Run, TransformerConfig], Transformer]] = {
        BASELINE: build_plain,
        f"octavo {run.recipe.name}": convert_plain,
        TORCHAO: build_torchao,
    }
    baseline_mode = "compiled" if "compiled" in run.modes else "eager"
    for variant, build in variants.items():
        row = work.row("block", variant, "")
        if variant.startswith("octavo"):
            row = with_floor(run, row, work, without="optimizer")
        for mode in sorted(run.modes):  # compiled before the others, which are compared with it
            row = dataclasses.replace(row, mode=mode)
            run.add(row, lambda row: _time_block(run, row, work, build, expected), BASELINE, baseline_mode)  # noqa: B023


def with_floor(run: Run, row: Row, work: Workload, without: str = "") -> Row:
    """The row with its floor, which is said by kind."""
    if run.ceiling is None or not run.wants(row.variant):
        return row
    kinds = {kind: ms for kind, ms in step_ms(work.setup, run.ceiling).items() if kind != without}
    total = sum(kinds.values())
    parts = ", ".join(f"{kind} {ms:.4g}" for kind, ms in kinds.items())
    run.record.say(f"floor of {row.what}, micro-batch {row.micro_batch}: {parts}; together {total:.4g} ms")
    return dataclasses.replace(row, floor_ms=total)


def _time_block(
    run: Run, row: Row, work: Workload, build: Callable[[Run, TransformerConfig], Transformer], expected: float
) -> Row:
    left = dataclasses.replace(work.setup, compiled=row.mode != "eager").left
    with deciding_by(Left(left)):
        model = build(run, work.model)
    if row.mode == "compiled":
        model.compile_blocks()
    row = _with_left(row, left)
    tokens, targets = work.batch(run.device)

    def function() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, targets)
        loss.backward()
        return loss.detach()

    return _measure(run, row, function, expected, lambda: move_scales(model))


def _with_left(row: Row, left: frozenset[tuple[int, int]]) -> Row:
    """A row of octavo with the layers that FP8 would slow down, and that it therefore leaves as they are."""
    ours = left and row.variant.startswith("octavo")
    return dataclasses.replace(row, note=f"not FP8, since slower: {named(left)}") if ours else row


def _measure(
    run: Run, row: Row, function: Callable[[], Tensor], expected: float, between: Callable[[], None] = lambda: None
) -> Row:
    """The row with time, peak and error of `function`, which returns the loss; where its time goes is said, if floors are wanted.

    `between` is called between the calls that are not timed.
    """
    error = abs(function().item() / expected - 1)
    for _ in range(run.settling):
        between()
        function()
    run.forget_peak()
    timing = run.time(captured(function) if row.mode == "graph" else function)
    row = dataclasses.replace(row.timed(timing), error=error, peak_gib=run.peak_gib())
    if run.ceiling is not None and run.is_cuda:
        kinds = profile(function)
        parts = ", ".join(f"{kind} {ms:.4g}" for kind, ms in kinds.items())
        run.record.say(f"kernels of {row.variant}, {row.mode}: {parts}; together {sum(kinds.values()):.4g} ms")
    return row


# --- step


def run_step(run: Run, works: list[Workload]) -> None:
    """Whole training steps of all variants, each at every micro-batch; what does not fit is a row as well."""
    ours = f"octavo {run.recipe.name}"
    variants: dict[str, Callable[[Run, TransformerConfig], tuple[Transformer, torch.optim.Optimizer]]] = {
        BASELINE: _bf16,
        ours: _octavo,
        f"{TORCHAO}, AdamW8bit without master": _torchao,
    }
    mode = "compiled" if "compiled" in run.modes else "eager"
    losses = baseline_losses(run, works)
    for variant, build in variants.items():
        for work, expected in zip(works, losses, strict=True):
            released = work.setup.release if variant == ours else "none"
            label = variant if released == "none" else f"{variant}, release {released}"
            row = work.row("step", label, mode)
            if variant == ours:
                row = with_floor(run, row, work)
            run.add(row, lambda row: _time_step(run, row, work, build, released, expected), BASELINE)  # noqa: B023


def _bf16(run: Run, config: TransformerConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build_bf16(run, config)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _octavo(run: Run, config: TransformerConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build_octavo(run, config)
    optimizer = AdamW(model.parameters(), lr=LR, recipe=run.recipe)
    initialize(model, optimizer, run.recipe)  # its steps move delayed scales on
    return model, optimizer


def _torchao(run: Run, config: TransformerConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build_torchao(run, config)
    return model, small_optimizer("torchao AdamW8bit", model.parameters(), lr=LR)


def _time_step(
    run: Run,
    row: Row,
    work: Workload,
    build: Callable[[Run, TransformerConfig], tuple[Transformer, torch.optim.Optimizer]],
    released: str,
    expected: float,
) -> Row:
    left = dataclasses.replace(work.setup, compiled=row.mode != "eager").left
    with deciding_by(Left(left)):
        model, optimizer = build(run, work.model)
    row = _with_left(row, left)
    octavo = isinstance(optimizer, AdamW)
    clip = clip_grad_norm_ if octavo else torch.nn.utils.clip_grad_norm_
    release = None
    if octavo and released != "none":
        release = release_gradients(model, optimizer, MAX_NORM, released)  # type: ignore[arg-type]
    if row.mode == "compiled":
        model.compile_blocks()
    tokens, targets = work.batch(run.device)

    def function() -> Tensor:
        for _ in range(work.setup.micro_batches):
            loss = model(tokens, targets)
            if release is not None:
                release.step(loss)
            else:
                (loss / work.setup.micro_batches).backward()
        if release is None:
            clip(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return _measure(run, row, function, expected)
