"""A tape of what a step allocates and frees, in order, with the peak and what was alive at it.

A plan is a program that says `hold` and `drop` where the training step allocates and frees. Sizes are bytes; every allocation
has a name, unique while it lives, and a kind, by which the report adds up.
"""

from __future__ import annotations

from collections import defaultdict


class Tape:
    """Bytes alive now, and the most that ever were."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.when = ""
        """The moment of the peak, in words."""
        self.at_peak: dict[str, int] = {}
        """Bytes by kind at the peak."""
        self.moment = ""
        """What is going on now, in words; the program sets it."""
        self._held: dict[str, tuple[int, str]] = {}
        self._kinds: dict[str, int] = defaultdict(int)
        self._pinned: set[str] = set()

    def hold(self, name: str, size: float, kind: str) -> None:
        """Allocate `size` bytes under `name`."""
        assert name not in self._held, name
        whole = round(size)
        self._held[name] = (whole, kind)
        self._kinds[kind] += whole
        self.now += whole
        if self.now > self.peak:
            self.peak, self.when = self.now, self.moment
            self.at_peak = {key: value for key, value in self._kinds.items() if value}

    def drop(self, *names: str) -> None:
        """Free these; names that are not alive are ignored, since what a mode never kept need not be freed."""
        for name in names:
            if name in self._pinned:
                continue
            size, kind = self._held.pop(name, (0, ""))
            self.now -= size
            if size:
                self._kinds[kind] -= size

    def pin(self, *kinds: str) -> None:
        """What is alive now of these kinds stays: from here on `drop` passes it over."""
        self._pinned = {name for name, (_, kind) in self._held.items() if kind in kinds}

    def brief(self, size: float, kind: str) -> None:
        """Allocate `size` bytes and free them at once."""
        self.hold("brief", size, kind)
        self.drop("brief")

    def alive(self, name: str) -> bool:
        """Whether something is held under `name`."""
        return name in self._held

    def by_kind(self) -> dict[str, int]:
        """Bytes alive now, by kind."""
        return {key: value for key, value in self._kinds.items() if value}
