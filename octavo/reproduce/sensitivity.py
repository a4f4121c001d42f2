"""How much the loss of training depends on the two constants of auto-scaling, the threshold (1e-5) and the period (1,000) of Eq. 3.

The same short training again and again, with the same weights, batches and learning rates: N emulated ranks compute one micro-batch
each, the gradients of their block matrices are stored in E4M3 and summed along a ring (the algorithm for which µ matters), and one
optimizer steps with the mean. Beside the grid of thresholds and periods stand reductions that have no such constants: pre- and
post-scaling on the ring, and the FP32, BF16 and two-shot sums. These last three lose so little (28 dB and better) that how far
apart they end is chance: a difference that is not larger says nothing.

A share of saturated sums is a count over the values of a matrix, so thresholds that allow the same counts in all matrices are the same
training, which is done once. In a small model 1e-6 and 1e-5 both mean "not one".
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.distributed.autoscale import AutoScale, Strategy
from octavo.distributed.emulate import reduce_emulated
from octavo.linear import scaled_gradient
from octavo.optim import clip_grad_norm_
from octavo.reproduce.gradients import block_matrices
from octavo.tensor import ScaledTensor
from octavo.train.config import TrainConfig
from octavo.train.data import Data
from octavo.train.metrics import MetricsLog
from octavo.train.schedule import learning_rate
from octavo.train.setup import build_model, build_optimizer, choose_device

THRESHOLDS = (1e-6, 1e-5, 1e-4, 1e-3)
PERIODS = (100, 1000, 10_000)
PRECISE = ("fp32", "bf16", "two_shot")
"""Sums whose differences are chance."""


@dataclass(frozen=True)
class Variant:
    """One way to reduce gradients."""

    algorithm: str
    strategy: Strategy = "auto"
    threshold: float = 1e-5
    period: int = 1000

    @property
    def label(self) -> str:
        """A name for tables and folders."""
        if self.algorithm != "nccl":
            return self.algorithm
        return self.strategy if self.strategy != "auto" else f"auto-{self.threshold:.0e}-{self.period}"


@dataclass(frozen=True)
class Outcome:
    """A training with one of them."""

    variant: Variant
    train_loss: float
    """Mean of the last tenth of the steps, nats per token."""
    val_loss: float
    mu: float
    """Geometric mean of µ over the matrices after the last step."""
    saturated: float
    """Share of sums at the largest code, mean over steps and matrices."""
    skipped: int
    """Steps with a gradient that was not finite."""


def variants(thresholds: Sequence[float], periods: Sequence[int]) -> list[Variant]:
    """The reductions without the two constants, FP32 first, then the grid."""
    plain = [*map(Variant, PRECISE), Variant("nccl", "pre"), Variant("nccl", "post")]
    return plain + [Variant("nccl", "auto", t, p) for p in periods for t in thresholds]


def check(config: TrainConfig, ranks: int) -> None:
    """Raises `ValueError` for settings with which there is nothing to compare."""
    if ranks < 2:
        raise ValueError(f"--ranks is {ranks}: a sum needs at least 2")
    if config.train.micro_batches != 1 or config.optim.release != "none":
        raise ValueError(
            "train.micro_batches must be 1 and optim.release none: each rank computes one micro-batch a step"
        )


def run_grid(
    config: TrainConfig, ranks: int, chosen: Sequence[Variant], folder: Path, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Train once for each of `chosen`, metrics in folders of their names under `folder`; equal trainings are done once."""
    sizes = _matrix_sizes(config)
    done: dict[tuple, Outcome] = {}
    outcomes = []
    for variant in chosen:
        counts = tuple(int(variant.threshold * size) for size in sizes) if variant.strategy == "auto" else ()
        key = (variant.algorithm, variant.strategy, counts, variant.period)
        if key not in done:
            done[key] = train(config, ranks, variant, folder / variant.label)
        outcomes.append(replace(done[key], variant=variant))
        report(outcomes[-1])
    return outcomes


def _matrix_sizes(config: TrainConfig) -> list[int]:
    device = choose_device(config.device)
    model = build_model(config, Data(config.data, config.seed, device).vocab_size, device)
    return [weight.numel() for _, weight in _matrices(model)]


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [named for block in block_matrices(model) for named in block]


def train(config: TrainConfig, ranks: int, variant: Variant, folder: Path) -> Outcome:
    """One training of `config`, whose micro-batch is that of a rank. Writes loss and µ of each step to `folder`/metrics.jsonl."""
    device = choose_device(config.device)
    data = Data(config.data, config.seed, device)
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocab_size, device)
    optimizer = build_optimizer(config, model)
    scale = AutoScale(
        [name for name, _ in _matrices(model)],
        ranks,
        strategy=variant.strategy,
        sums_exactly=variant.algorithm != "nccl",
        threshold=variant.threshold,
        period=variant.period,
        device=device,
    )
    folder.mkdir(parents=True, exist_ok=True)
    losses, shares = [], []
    log = MetricsLog(folder, tensorboard=False)
    for step in range(1, config.train.steps + 1):
        lr = learning_rate(step, config.train.steps, config.optim)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = torch.stack([*_backward(model, data, ranks, variant, scale)]).mean()
        norm = clip_grad_norm_(model.parameters(), float("inf") if config.optim.clip is None else config.optim.clip)
        optimizer.step()
        losses.append(loss.item())
        shares.append(scale.ratio.mean().item())
        log.write({"step": step, "loss": losses[-1], "grad_norm": norm.item(), "lr": lr, "reduction": scale.report()})
    model.eval()
    with torch.no_grad():
        val_loss = torch.stack([model(*batch) for batch in data.validation(config.train.eval_batches)]).mean().item()
    log.write({"step": config.train.steps, "val_loss": val_loss})
    log.close()
    return Outcome(
        variant,
        statistics.fmean(losses[-max(1, len(losses) // 10) :]),
        val_loss,
        float(scale.mu.log().mean().exp()),
        statistics.fmean(shares),
        int(optimizer.skipped_steps),
    )


def _backward(model: nn.Module, data: Data, ranks: int, variant: Variant, scale: AutoScale) -> Iterator[Tensor]:
    """The loss of each rank; when the last is taken, `grad` of all parameters is the mean over the ranks, reduced as `variant` says."""
    weights = [weight for _, weight in _matrices(model)]
    stored: list[list[ScaledTensor]] = [[] for _ in weights]
    scaled = False
    for _ in range(ranks):
        loss = model(*data.next_batch())
        loss.backward()
        for weight, gradients in zip(weights, stored, strict=True):
            grad, weight.grad = weight.grad, None
            assert grad is not None
            gradients.append(grad if isinstance(grad, ScaledTensor) else scaled_gradient(grad, grad.dtype))
            scaled = isinstance(grad, ScaledTensor)
        yield loss.detach()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= ranks
    for number, (weight, gradients) in enumerate(zip(weights, stored, strict=True)):
        index = torch.tensor([number], device=scale.mu.device)
        reduced = reduce_emulated(gradients, variant.algorithm, variant.strategy, mu=scale.mu[number])
        scale.update(index, reduced.overflow.view(1), reduced.signal.isfinite().view(1))
        weight.grad = reduced.mean if scaled else reduced.mean.dequantize()


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """One row a training."""
    fields = [
        "label",
        "algorithm",
        "strategy",
        "threshold",
        "period",
        "train_loss",
        "val_loss",
        "mu",
        "saturated",
        "skipped",
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        for outcome in outcomes:
            v = outcome.variant
            constants = [v.threshold, v.period] if v.strategy == "auto" and v.algorithm == "nccl" else ["", ""]
            numbers = [f"{x:.6g}" for x in (outcome.train_loss, outcome.val_loss, outcome.mu, outcome.saturated)]
            writer.writerow([v.label, v.algorithm, v.strategy, *constants, *numbers, outcome.skipped])


def format_line(outcome: Outcome) -> str:
    """One training as a line of a table; see `HEADER`."""
    return (
        f"{outcome.variant.label:18s} {outcome.train_loss:10.4f} {outcome.val_loss:10.4f} {outcome.mu:10.4f} "
        f"{100 * outcome.saturated:12.4f} {outcome.skipped:8d}"
    )


HEADER = (
    f"{'reduction':18s} {'training':>10s} {'held out':>10s} {'mu at end':>10s} {'saturated, %':>12s} {'skipped':>8s}"
)


def format_verdict(outcomes: Sequence[Outcome]) -> str:
    """The spread over the grid beside that of chance, in validation loss."""
    precise = [o.val_loss for o in outcomes if o.variant.algorithm in PRECISE]
    grid = [o.val_loss for o in outcomes if o.variant.algorithm == "nccl" and o.variant.strategy == "auto"]
    return (
        f"validation loss over the grid: {min(grid):.4f} to {max(grid):.4f} (spread {max(grid) - min(grid):.4f}); "
        f"of the {', '.join(PRECISE)} sums, which differ by chance: {min(precise):.4f} to {max(precise):.4f} "
        f"(spread {max(precise) - min(precise):.4f})"
    )
