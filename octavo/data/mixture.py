"""Which source gives the window at each position of a mixture: shares exact without chance, any position known at once.

Window j (from 0) of source i has the virtual time (2j + 1) · s_i, where the stride s_i is the sum of all weights over the source's
own, times 2³² and rounded to an integer. The mixture is all windows sorted by time, equal times by source. This is the divisor
method of Webster and Sainte-Laguë, which gives each seat of a parliament to the party that deserves it most.

Exactness: at time t source i has given floor(t / s_i + 1) / 2 windows, within ½ of t / 2s_i. So after n windows it has given
n · share_i within ½ + k · share_i / 2, k being the number of sources: however long the stretch, never more than a few windows off.
(Chance alone would be off by √n.) Rounding a stride moves a share by less than one part in 2³².

Random access: counts grow with t, so the t of position n is found by bisection over integers, some hundred steps, with no state
and no memory. Every rank finds its own part of a batch, and a run resumes, from the position alone.

A source with a limit leaves when it is used up, the time starts anew and the others share its place by their weights. This
happens at positions that are known from the start, at most one for each source: the *phases*.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

ONE = 1 << 32


@dataclass(frozen=True)
class Phase:
    """Positions from `start` to the start of the next phase."""

    start: int
    counts: tuple[int, ...]
    """Windows that each source has given before."""
    active: tuple[int, ...]
    """The sources that take part."""


class Mixture:
    """The sequence for `weights`, positive numbers of any sum; source i gives at most `limits[i]` windows, or any number if None."""

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None]) -> None:
        total = math.fsum(weights)
        self._strides = [max(1, round(ONE * total / weight)) for weight in weights]
        self._limits = limits
        self.phases = [Phase(0, (0,) * len(weights), tuple(range(len(weights))))]
        self.total: int | None = None
        """Windows of the whole sequence; None if it does not end."""
        while self.total is None and (following := self._after(self.phases[-1])) is not None:
            if following.active:
                self.phases.append(following)
            else:
                self.total = following.start

    def counts(self, position: int) -> list[int]:
        """How many windows each source has given before `position`."""
        phase = self.phases[self._phase(position)]
        counts = list(phase.counts)
        for source, count in zip(phase.active, self._first(position - phase.start, phase.active), strict=True):
            counts[source] += count
        return counts

    def take(self, position: int, count: int) -> list[tuple[int, int]]:
        """(source, its window's place in the order of that source) at `position` ... `position + count - 1`."""
        taken: list[tuple[int, int]] = []
        while len(taken) < count:
            at = position + len(taken)
            number = self._phase(at)
            phase, counts = self.phases[number], self.counts(at)
            ends = [following.start for following in self.phases[number + 1 :]] + [position + count]
            queue = [((2 * (counts[i] - phase.counts[i]) + 1) * self._strides[i], i) for i in phase.active]
            heapq.heapify(queue)
            for _ in range(min(ends[0], position + count) - at):
                time, source = queue[0]
                heapq.heapreplace(queue, (time + 2 * self._strides[source], source))
                taken.append((source, counts[source]))
                counts[source] += 1
        return taken

    def _phase(self, position: int) -> int:
        return bisect.bisect_right(self.phases, position, key=lambda phase: phase.start) - 1

    def _first(self, count: int, active: tuple[int, ...]) -> list[int]:
        """How many of the first `count` windows of a phase come from each of its sources."""
        strides = [self._strides[source] for source in active]
        low, high = 0, 2 * count * min(strides)  # by then the quickest source alone has given them
        while low < high:
            middle = (low + high) // 2
            if sum(_until(middle, stride) for stride in strides) >= count:
                high = middle
            else:
                low = middle + 1
        counts = [_until(low - 1, stride) for stride in strides]
        for i, stride in enumerate(strides):  # those of equal time `low`, in order
            if sum(counts) < count:
                counts[i] = _until(low, stride)
        return counts

    def _after(self, phase: Phase) -> Phase | None:
        """The phase that begins when the first source of `phase` is used up; None if none ever is."""
        last: list[tuple[int, int]] = []
        for source in phase.active:
            limit = self._limits[source]
            if limit is not None:
                last.append(((2 * (limit - phase.counts[source]) - 1) * self._strides[source], source))
        if not last:
            return None
        time, gone = min(last)
        counts = list(phase.counts)
        for source in phase.active:
            counts[source] += _until(time if source <= gone else time - 1, self._strides[source])
        return Phase(sum(counts), tuple(counts), tuple(source for source in phase.active if source != gone))


def _until(time: int, stride: int) -> int:
    """Windows of one source up to and including `time`."""
    return (time // stride + 1) // 2
