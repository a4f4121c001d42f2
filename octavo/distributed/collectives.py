"""The collectives that octavo uses, on one process group; they count the bytes that a rank puts on the wire, by kind.

Backends differ in what they know: gloo has no FP8 dtypes, and summing FP8 codes as bytes would give garbage without an error. So
codes travel as bytes where they are only moved, and are summed by a backend only if it knows the format (`sums_fp8`).

Bytes are those of the usual ring and pairwise algorithms, sent by one of N ranks: all-reduce 2·(N-1)/N of the tensor, all-to-all
and all-gather (N-1)/N of the whole, broadcast (N-1)/N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.formats import E4M3, E5M2

FP8 = (E4M3.dtype, E5M2.dtype)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has renamed it


class CollectiveError(ConnectionError):
    """A collective did not end on this rank: another one died, left, hangs or calls something else."""


class Ranks:
    """A process group, seen from this rank.

    Every tensor is contiguous. Work is done on the current CUDA stream, or the host waits for it (gloo). Raises `CollectiveError` when a
    collective fails or times out.
    """

    def __init__(self, group: Any = None, wire: Counter[str] | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.wire: Counter[str] = Counter() if wire is None else wire
        """Bytes that this rank has sent, by kind."""

    def sums_fp8(self, device: torch.device) -> bool:
        """Whether the backend sums E4M3 on the `device` itself: NCCL from 2.24 on."""
        return backend_of(self.group, device) == "nccl" and torch.cuda.nccl.version() >= (2, 24)

    def all_reduce(self, x: Tensor, op: Any, kind: str) -> None:
        """x = op over all ranks, in place. Raises `ValueError` for FP8 where the backend would not sum it."""
        if x.dtype in FP8 and not self.sums_fp8(x.device):
            raise ValueError(
                f"{backend_of(self.group, x.device)} cannot reduce {x.dtype}: use the two_shot algorithm, which sums in FP32"
            )
        self._count(kind, 2 * _bytes(x))
        with self._report("all_reduce", kind):
            dist.all_reduce(x, op=op, group=self.group)

    def all_to_all(self, out: Tensor, x: Tensor, kind: str) -> None:
        """Part r of `x` goes to rank r, and part r of `out` comes from it; N equal parts along dim 0."""
        self._count(kind, _bytes(x))
        with self._report("all_to_all", kind):
            dist.all_to_all_single(_movable(out), _movable(x), group=self.group)

    def all_gather(self, out: Tensor, x: Tensor, kind: str) -> None:
        """`out` = the `x` of all ranks, in their order, along dim 0."""
        self._count(kind, _bytes(out))
        with self._report("all_gather", kind):
            _all_gather(_movable(out), _movable(x), group=self.group)

    def broadcast(self, x: Tensor, kind: str, source: int = 0) -> None:
        """x = that of rank `source` of this group, in place."""
        self._count(kind, _bytes(x))
        with self._report("broadcast", kind):
            dist.broadcast(_movable(x), group_src=source, group=self.group)

    def gather_objects(self, value: Any) -> list[Any]:
        """The `value` of every rank (plain Python data, pickled between processes of one job)."""
        values = [None] * self.world
        with self._report("all_gather_object", "setup"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _count(self, kind: str, size: int) -> None:
        self.wire[kind] += size * (self.world - 1) // self.world

    @contextmanager
    def _report(self, name: str, kind: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.world}: {name} of {kind} did not end ({str(error).splitlines()[0]}): another rank died, "
                "hangs or does other work; its own message says why, and the run can be started again from its last checkpoint"
            ) from error


def backend_of(group: Any, device: torch.device) -> str | None:
    """What carries the tensors of a device in a group, which may have another backend for each kind ("cpu:gloo,cuda:nccl", or what
    `init_process_group()` chooses without a name); None if nothing does."""
    for pair in dist.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        if kind == device.type:
            return backend
    return None


def new_group(members: list[int], timeout: timedelta, of: Any) -> Any:
    """A group of those of the ranks of the group `of` that call this with the same `members`; other ranks need not call it.

    PyTorch names such a group by how many there are. Ranks that have made different numbers of groups would wait for each other under
    different names; so every rank of `of` calls this equally often, and one that has made fewer makes groups of its own first.
    """
    known = dist.distributed_c10d._world.pg_names  # type: ignore[attr-defined]
    counts: list[Any] = [None] * dist.get_world_size(of)
    dist.all_gather_object(counts, len(known), group=of)
    while len(known) < max(counts):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(members, timeout=timeout, use_local_synchronization=True)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _movable(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in FP8 else x
