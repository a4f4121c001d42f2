"""Runs functions on several ranks of gloo, in processes that stay for the next test.

`run(world, function, *arguments)` calls the module-level `function(*arguments)` on every rank, inside an initialised process group, and
returns the results by rank. A rank that fails or does not answer fails the test, with the traceback of every rank; the processes
are then replaced. They are forked from a server that has imported torch once, which knows nothing of the tests' own threads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0
"""Seconds that one function may take."""

KEPT = 3
"""Numbers of ranks whose processes wait for the next test."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "octavo", "ranks"])


class Pool:
    """`world` processes and the pipes to them."""

    def __init__(self, world: int) -> None:
        folder = tempfile.mkdtemp(prefix="ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, rank, world, f"file://{folder}/store"), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], arguments: tuple) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + TIMEOUT
        while len(answers) < len(self.pipes) and time.monotonic() < end:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting, timeout=1.0):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError:
                    answers[rank] = (False, f"the process ended with {self.processes[rank].exitcode}")
            if any(not ok for ok, _ in answers.values()):
                end = min(end, time.monotonic() + 10)  # the others will not get far
        missing = [rank for rank in range(len(self.pipes)) if rank not in answers]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        failures += [f"rank {rank}: no answer" for rank in missing]
        if failures:
            self.close()
            _pools.pop(len(self.pipes), None)
            raise AssertionError(
                f"{function.__name__} failed on {len(failures)} of {len(self.pipes)} ranks\n" + "\n".join(failures)
            )
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_pools: dict[int, Pool] = {}


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returns on each of `world` ranks (anything that pickles)."""
    pool = _pools.pop(world, None) or Pool(world)
    _pools[world] = pool  # the newest is the last
    for oldest in list(_pools)[:-KEPT]:
        _pools.pop(oldest).close()
    return pool.call(function, arguments)


def forget(world: int) -> None:
    """Ends the processes of that number of ranks; the next `run` starts new ones."""
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.close()


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close()


def _serve(pipe: Connection, rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:  # noqa: B902
            pipe.send((False, traceback.format_exc()))
