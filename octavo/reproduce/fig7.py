"""Figure 7 of FP8-LM: what the sum of N ranks' FP8 gradients loses, for each transformer block.

The paper shows pre-, post- and auto-scaling at 128 ranks, summed along NCCL's ring; here two-shot is beside it. Of a block (its
weight matrices together), with g_i the FP32 gradient of rank i and m the mean that the reduction gives:

    SNR        10·log10( Σ ḡ² / Σ (m - ḡ)² ),  ḡ = mean of g_i in FP32
    underflow  share of the values g_i ≠ 0 that are sent as zero, whether storing or scaling flushed them
    overflow   share of the sums that reached the largest code (the ring saturates; two-shot casts the sum with a scale of its own)

µ of auto-scaling moves by Eq. 3 over hundreds of steps. The weights here stand still, so µ is put where that rule takes it: the largest
power of two at which the share of saturated sums is not above the threshold. (A run also spends about one step in a period above
it, in which it finds that out.)

The paper's figure has no unit for its SNR; as a power ratio, 150 to 200 are 21.8 to 23.0 dB.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from octavo.distributed.autoscale import CEILING, AutoScale, Strategy, lowest_mu
from octavo.distributed.emulate import Reduced, reduce_emulated
from octavo.reproduce.gradients import RankGradients
from octavo.tensor import ScaledTensor

STRATEGIES: tuple[Strategy, ...] = ("pre", "post", "auto")
ALGORITHMS = ("nccl", "two_shot")
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


def measure(gradients: RankGradients, threshold: float = 1e-5) -> Iterator[Loss]:
    """The losses of one matrix with each algorithm and strategy; `threshold` is that of Eq. 3."""
    for algorithm in ALGORITHMS:
        for strategy in STRATEGIES:
            if strategy == "auto" and algorithm == "nccl":
                mu, reduced = settle(gradients.stored, threshold)
            else:
                mu = float(
                    AutoScale(["g"], len(gradients.stored), strategy=strategy, sums_exactly=algorithm != "nccl").mu
                )
                reduced = reduce_emulated(gradients.stored, algorithm, strategy)
            yield _loss(gradients, algorithm, strategy, mu, reduced)


def settle(stored: Sequence[ScaledTensor], threshold: float) -> tuple[float, Reduced]:
    """Where auto-scaling takes µ on the ring if the gradients stay as they are, a power of two, and the reduction with it."""

    def at(exponent: int) -> Reduced:
        return reduce_emulated(stored, "nccl", "auto", mu=2.0**exponent)

    world = len(stored)
    exponent = math.floor(-0.5 * math.log2(world))  # where AutoScale begins
    least, most = round(math.log2(lowest_mu(world))), round(math.log2(CEILING))
    reduced = at(exponent)
    if float(reduced.overflow) > threshold:
        while float(reduced.overflow) > threshold and exponent > least:
            exponent -= 1
            reduced = at(exponent)
        return 2.0**exponent, reduced
    while exponent < most:
        larger = at(exponent + 1)
        if float(larger.overflow) > threshold:
            break
        exponent, reduced = exponent + 1, larger
    return 2.0**exponent, reduced


def _loss(gradients: RankGradients, algorithm: str, strategy: str, mu: float, reduced: Reduced) -> Loss:
    numel, world = gradients.mean.numel(), len(gradients.stored)
    exact = gradients.mean.double()
    # Against the values before they were stored; `reduced` itself compares with what was stored.
    noise = (reduced.mean.dequantize() - exact).square().sum()
    return Loss(
        block=gradients.block,
        name=gradients.name,
        algorithm=algorithm,
        strategy=strategy,
        mu=mu,
        signal=float(exact.square().sum()),
        noise=float(noise),
        sent=gradients.nonzero,
        flushed=gradients.flushed + round(float(reduced.underflow) * numel * world),
        summed=numel,
        saturated=round(float(reduced.overflow) * numel),
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
    """Plain text: of each algorithm and strategy the range over the blocks, the paper's figures beside the ring."""
    lines = [
        f"{'sum':9s} {'scaling':8s} {'SNR, dB':>14s} {'as a ratio':>14s} {'underflow, %':>15s} {'overflow, %':>17s}  paper (7B, ring)"
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
            claim = PAPER[strategy] if algorithm == "nccl" else ""
            lines.append(f"{algorithm:9s} {strategy:8s} {' '.join(columns)}  {claim}".rstrip())
    return "\n".join(lines)


def format_claims(blocks: Sequence[Loss]) -> str:
    """The paper's qualitative claims about the ring, and in how many blocks they hold here."""
    ring = {(loss.strategy, loss.block): loss for loss in blocks if loss.algorithm == "nccl"}
    numbers = sorted({block for _, block in ring})
    claims = {
        "auto-scaling has the best SNR": [
            ring["auto", b].snr_db >= max(ring["pre", b].snr_db, ring["post", b].snr_db) for b in numbers
        ],
        "it underflows less than pre-scaling": [ring["auto", b].underflow < ring["pre", b].underflow for b in numbers],
        "it overflows no more than post-scaling": [
            ring["auto", b].overflow <= ring["post", b].overflow for b in numbers
        ],
        "it overflows at most 0.05%": [ring["auto", b].overflow <= 5e-4 for b in numbers],
    }
    return "\n".join(f"  {claim}: in {sum(holds)} of {len(holds)} blocks" for claim, holds in claims.items())


def _range(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} - {high}"
