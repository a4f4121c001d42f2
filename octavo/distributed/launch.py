"""One process or many: what `torchrun` says, as a value, and what the ranks of a run have to agree on.

With one process nothing of this exists: there is no process group, and each call returns what it was given. The host side
(files, signals, errors) speaks over gloo also where gradients go over NCCL, so that it never waits for a GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.collectives import CollectiveError


class Place:
    """This process among the ranks of a run.

    Made by `join`. `rank` and `world` are those of the run; `node_size` is the number of ranks on a node; `timeout` is that of `join`.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, local_rank: int = 0, node_size: int = 1, timeout: float = 600.0
    ) -> None:
        self.rank, self.world, self.local_rank, self.node_size = rank, world, local_rank, node_size
        self._timeout = timeout
        self.host_group: Any = None
        """A gloo group of all ranks; None with one."""
        self._votes: tuple[Tensor, Any] | None = None
        self._joined = False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks of CPU tensors of equal shapes; in the order of the ranks, so its bits are the same everywhere."""
        if self.world == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world)]
        with self._report("a mean of metrics"):
            dist.all_gather(parts, values.contiguous(), group=self.host_group)
        return torch.stack(parts).mean(0)

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        if self.world > 1:
            with self._report("a barrier"):
                dist.barrier(group=self.host_group)

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Rank 0 does what is inside while the others wait, then they do it: they find the files that it has made.

        It may take longer than the timeout. An error of rank 0 reaches the others as a `ValueError` that names it.
        """
        if self.is_first:
            try:
                with self._at_work():
                    yield
            except BaseException as error:
                self.share(f"{type(error).__name__}: {error}")
                raise
            self.share(None)
        else:
            self._wait_for_work()
            problem = self.share(None)
            if problem:
                raise ValueError(f"rank 0 failed: {problem}")
            yield

    def on_first(self, work: Callable[[], None]) -> None:
        """Rank 0 does `work`, however long; all return when it is done, or raise `OSError` if it failed with one."""
        problem = None
        if self.is_first:
            try:
                with self._at_work():
                    work()
            except OSError as error:
                if self.world == 1:
                    raise
                problem = error.strerror or str(error)
        else:
            self._wait_for_work()
        problem = self.share(problem)
        if problem is not None:
            raise OSError(problem)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Around work of rank 0: the others, in `_wait_for_work`, hear from it several times in a timeout, which is for ranks that died."""
        if self.world == 1:
            yield
            return
        done = threading.Event()

        def tell() -> None:
            with contextlib.suppress(CollectiveError):  # which meets the main thread too, when it shares
                while not done.wait(self._timeout / 4):
                    self.share(True)

        thread = threading.Thread(target=tell, name="octavo-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.share(False)

    def _wait_for_work(self) -> None:
        """Returns when the work of rank 0 has ended, well or not."""
        while self.share(None):
            pass

    def share(self, value: Any) -> Any:
        """The `value` of rank 0 (plain Python data)."""
        if self.world == 1:
            return value
        box = [value]
        with self._report("a broadcast"):
            dist.broadcast_object_list(box, group_src=0, group=self.host_group)
        return box[0]

    def any_so_far(self, flag: bool) -> bool:
        """Whether any rank gave a true `flag` at the call before this one; with one rank, at this one.

        All ranks call it equally often and get the same answer. The answer is one call old, so that nobody has to wait for a slower rank.
        """
        if self.world == 1:
            return flag
        before = self._votes
        vote = torch.tensor([int(flag)])
        with self._report("a vote on stopping"):
            self._votes = (vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.host_group, async_op=True))
            if before is None:
                return False
            before[1].wait()
        return bool(before[0])

    def leave(self) -> None:
        """Ends the process group, if `join` made it."""
        if self._joined:
            self._votes, self._joined = None, False
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _report(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.world}: {what} did not end ({str(error).splitlines()[0]}): another rank died or hangs; "
                "its own message says why, and the run can be started again from its last checkpoint"
            ) from error


def join(device: str = "auto", timeout: float = 600.0) -> Place:
    """The place of this process: from `torchrun`, or from a process group that is there already, or alone.

    Args:
        device: `auto`, `cpu` or `cuda`; with CUDA gradients go over NCCL, else over gloo.
        timeout: seconds after which a collective that another rank does not answer is an error.

    Raises `ValueError` if torchrun started more processes on this node than it has GPUs.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        place = Place(dist.get_rank(), dist.get_world_size(), *_local(), timeout)
    elif world > 1:
        cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        local_rank, node_size = _local()
        if cuda and local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started {node_size} processes here, and there are {torch.cuda.device_count()} GPUs: start one for each GPU, "
                "or set device=cpu"
            )
        if cuda:
            torch.cuda.set_device(local_rank)
        limit = timedelta(seconds=timeout)
        store, rank, _ = next(dist.rendezvous("env://", timeout=limit))
        if node_size == world:
            # The store of torchrun outlasts a restart (--max-restarts), and gloo would find addresses of processes that have ended there.
            # (Several nodes may count their restarts differently.)
            store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=limit)
        place = Place(rank, world, local_rank, node_size, timeout)
        place._joined = True
    else:
        return Place()
    if place.world > 1:
        place.host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return place


def _local() -> tuple[int, int]:
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
