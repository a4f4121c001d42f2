"""Figure 7 of FP8-LM: what the sum of N ranks' FP8 gradients loses, for each transformer block.

The paper compares pre-, post- and auto-scaling at 128 ranks, and does not say how its sums were rounded. Here are three ways:

    one_cast   Eqs. 1-6 as they are written: codes of one scale, summed without rounding, and the sum cast with that scale
    nccl       the same along a ring, which rounds at each of N - 1 hops
    two_shot   the sum cast with a scale of its own (octavo's default), so that µ has nothing to do and stays at 1

Of a block (its weight matrices together), with g_i the FP32 gradient of rank i and m the mean that the reduction gives:

    SNR        10·log10( Σ ḡ² / Σ (m - ḡ)² ),  ḡ = mean of g_i in FP32
    underflow  share of the values g_i ≠ 0 that are sent as zero, whether storing or scaling flushed them
    overflow   share of the sums that reached the largest code; none with two-shot

µ of auto-scaling moves by Eq. 3 over hundreds of steps. The weights here stand still, so µ is put where that rule takes it: the largest
power of two at which the share of saturated sums is not above the threshold. (A run also spends about one step in a period above
it, in which it finds that out.)

The paper's figure has no unit for its SNR: if it is a ratio of powers, 150 to 200 are 21.8 to 23.0 dB.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from octavo import kernels
from octavo.distributed.autoscale import CEILING, AutoScale, Strategy, lowest_mu
from octavo.distributed.emulate import reduce_emulated
from octavo.formats import E4M3
from octavo.reproduce.gradients import RankGradients
from octavo.tensor import ScaledTensor

STRATEGIES: tuple[Strategy, ...] = ("pre", "post", "auto")
ALGORITHMS = ("one_cast", "nccl", "two_shot")
SATURATING = ("one_cast", "nccl")
"""Those whose sums can overflow, so that µ matters."""
PAPER = {
    "pre": "SNR 50-100, underflow 20-60%",
    "post": "SNR 50-150, overflow 0.05-0.25%",
    "auto": "SNR 150-200, underflow about 0, overflow up to 0.05%",
}
"""What its Figure 7 shows for a 7B model on 128 ranks."""

assert set(STRATEGIES) == set(get_args(Strategy))


@dataclass(frozen=True)
class Loss:
    """What one reduction of one matrix has lost, or several together; counts are over all ranks (`sent`) or of the result."""

    block: int
    name: str
    algorithm: str
    strategy: str
    mu: float
    signal: float
    """Σ of the squares of the FP32 mean."""
    noise: float
    """Σ of the squares of the errors."""
    sent: int
    """Values other than zero, over all ranks."""
    flushed: int
    """Those that were sent as zero."""
    summed: int
    """Values of the result."""
    saturated: int
    """Those at the largest code."""

    @property
    def snr_db(self) -> float:
        """In dB; infinite without noise, minus infinite where all gradients are zero and the result is not."""
        if not self.noise or not self.signal:
            return -math.inf if self.noise else math.inf
        return 10 * math.log10(self.signal / self.noise)

    @property
    def underflow(self) -> float:
        """In [0, 1]."""
        return self.flushed / max(self.sent, 1)

    @property
    def overflow(self) -> float:
        """In [0, 1]."""
        return self.saturated / max(self.summed, 1)


class Sum(NamedTuple):
    """A reduction of one matrix."""

    mean: Tensor
    """FP32."""
    underflow: Tensor
    """Share of all stored values, over all ranks, that were not zero and were sent as zero; 0-d."""
    overflow: Tensor
    """Share of the sums at the largest code; 0-d."""


def reduce(stored: Sequence[ScaledTensor], algorithm: str, mu: float) -> Sum:
    """The mean of the gradients of all ranks by one of `ALGORITHMS`, with µ a power of two. (The strategies are values of µ.)"""
    if algorithm == "one_cast":
        return _one_cast(stored, mu)
    reduced = reduce_emulated(stored, algorithm, "auto", mu=mu)
    return Sum(reduced.mean.dequantize(), reduced.underflow, reduced.overflow)


def _one_cast(stored: Sequence[ScaledTensor], mu: float) -> Sum:
    one = torch.ones((), device=stored[0].device)
    largest = torch.stack([kernels.amax(kernels.uncast(g.codes, g.scale)) for g in stored]).amax()
    multiplier = kernels.scale_from_amax(largest, E4M3.max) * mu
    total, flushed = torch.zeros(stored[0].shape, device=one.device), torch.zeros((), device=one.device)
    for gradient in stored:
        values = kernels.uncast(gradient.codes, one)
        sent = kernels.uncast(kernels.cast(values, multiplier / gradient.scale, E4M3.dtype), one)
        flushed += values.count_nonzero() - sent.count_nonzero()
        total += sent
    result = kernels.uncast(kernels.cast(total, one, E4M3.dtype), one)
    overflow = (result.abs() == E4M3.max).float().mean()
    return Sum(result / (len(stored) * multiplier), flushed / (total.numel() * len(stored)), overflow)


def measure(gradients: RankGradients, threshold: float = 1e-5) -> Iterator[Loss]:
    """The losses of one matrix with each algorithm and strategy; `threshold` is that of Eq. 3."""
    world = len(gradients.stored)
    for algorithm in ALGORITHMS:
        at = functools.cache(functools.partial(reduce, gradients.stored, algorithm))
        for strategy in STRATEGIES:
            if strategy == "auto" and algorithm in SATURATING:
                mu = settle(at, world, threshold)
            else:
                scale = AutoScale(["g"], world, strategy=strategy, sums_exactly=algorithm not in SATURATING)
                mu = float(scale.factor(torch.tensor([0])))
            yield _loss(gradients, algorithm, strategy, mu, at(mu))


def settle(at: Callable[[float], Sum], world: int, threshold: float) -> float:
    """Where auto-scaling takes µ if the gradients stay as they are: a power of two. `at` reduces them with a µ."""
    mu = 2.0 ** math.floor(-0.5 * math.log2(world))  # where it begins
    while float(at(mu).overflow) > threshold and mu > lowest_mu(world):
        mu /= 2
    if float(at(mu).overflow) <= threshold:
        while mu < CEILING and float(at(2 * mu).overflow) <= threshold:
            mu *= 2
    return mu


def _loss(gradients: RankGradients, algorithm: str, strategy: str, mu: float, result: Sum) -> Loss:
    numel, world = gradients.mean.numel(), len(gradients.stored)
    exact = gradients.mean.double()
    # Against the values before they were stored, not those that were sent.
    noise = (result.mean - exact).square().sum()
    return Loss(
        block=gradients.block,
        name=gradients.name,
        algorithm=algorithm,
        strategy=strategy,
        mu=mu,
        signal=float(exact.square().sum()),
        noise=float(noise),
        sent=gradients.nonzero,
        flushed=gradients.flushed + round(float(result.underflow) * numel * world),
        summed=numel,
        saturated=round(float(result.overflow) * numel),
    )


def by_block(losses: Iterable[Loss]) -> list[Loss]:
    """The losses of all matrices of a block together; µ is their geometric mean."""
    groups: dict[tuple[str, str, int], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.algorithm, loss.strategy, loss.block), []).append(loss)
    whole = []
    for (algorithm, strategy, block), parts in groups.items():
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("signal", "noise", "sent", "flushed", "summed", "saturated")
        }
        mu = math.exp(sum(math.log(part.mu) for part in parts) / len(parts))
        whole.append(Loss(block, f"block {block}", algorithm, strategy, mu, **sums))
    return sorted(
        whole, key=lambda loss: (ALGORITHMS.index(loss.algorithm), STRATEGIES.index(loss.strategy), loss.block)
    )


def write_csv(path: Path, losses: Sequence[Loss]) -> None:
    """One row a loss, with SNR in dB and the shares of underflow and overflow."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        fields = list(asdict(losses[0]))
        writer.writerow([*fields, "snr_db", "underflow", "overflow"])
        for loss in losses:
            row = [*asdict(loss).values(), loss.snr_db, loss.underflow, loss.overflow]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])


def format_table(blocks: Sequence[Loss]) -> str:
    """Plain text: of each algorithm and strategy the range over the blocks, the paper's figures beside those that saturate."""
    lines = [
        f"{'sum':9s} {'scaling':8s} {'SNR, dB':>14s} {'as a ratio':>14s} {'underflow, %':>15s} {'overflow, %':>17s}  paper (7B, 128 ranks)"
    ]
    for algorithm in ALGORITHMS:
        for strategy in STRATEGIES:
            chosen = [loss for loss in blocks if (loss.algorithm, loss.strategy) == (algorithm, strategy)]
            snr = [loss.snr_db for loss in chosen]
            columns = [
                f"{_range(snr, '.1f'):>14s}",
                f"{_range([10 ** (value / 10) for value in snr], '.0f'):>14s}",
                f"{_range([100 * loss.underflow for loss in chosen], '.2f'):>15s}",
                f"{_range([100 * loss.overflow for loss in chosen], '.4f'):>17s}",
            ]
            claim = PAPER[strategy] if algorithm in SATURATING else ""
            lines.append(f"{algorithm:9s} {strategy:8s} {' '.join(columns)}  {claim}".rstrip())
    return "\n".join(lines)


def format_claims(blocks: Sequence[Loss]) -> str:
    """The paper's qualitative claims, and in how many blocks they hold here for each algorithm whose sums can overflow."""
    lines = []
    for algorithm in SATURATING:
        found = {(loss.strategy, loss.block): loss for loss in blocks if loss.algorithm == algorithm}
        trios = [[found[strategy, block] for strategy in STRATEGIES] for block in sorted({block for _, block in found})]
        claims = {
            "auto-scaling has the best SNR": [auto.snr_db >= max(pre.snr_db, post.snr_db) for pre, post, auto in trios],
            "it underflows less than pre-scaling": [auto.underflow < pre.underflow for pre, _, auto in trios],
            "it overflows less than post-scaling": [auto.overflow < post.overflow for _, post, auto in trios],
            "it overflows at most 0.05%": [auto.overflow <= 5e-4 for _, _, auto in trios],
        }
        margins = [auto.snr_db - max(pre.snr_db, post.snr_db) for pre, post, auto in trios]
        lines += [f"  {algorithm}: {claim} in {sum(holds)} of {len(holds)} blocks" for claim, holds in claims.items()]
        lines.append(
            f"  {algorithm}: its SNR minus the better of the other two is {min(margins):+.3f} to {max(margins):+.3f} dB"
        )
    return "\n".join(lines)


def _range(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} - {high}"
