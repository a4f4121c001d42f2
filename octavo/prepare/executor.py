"""Stages on this machine: datatrove's local executor, made safe to kill, with live progress and a watch on memory.

A stage is an ordinary datatrove pipeline, so any of datatrove's executors can run it. What this one adds matters when a run is
killed: its worker processes must not live on and write files that the next run writes too. So

- a run holds the lock `alive.lock`; a thread of each worker waits for it, and having got it ends the worker;
- workers share the lock `workers.lock`; a new run waits until it can have it alone;
- a run holds `run.lock`; a second run at the same time is refused.

The operating system frees the locks of killed processes.

datatrove marks a finished task by a file, after the task's own files are closed; tasks without it run again from their beginning
and replace what they had written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any

import dill
from datatrove.data import DocumentsPipeline
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

POLL = 0.5
"""Seconds between looks at the progress of tasks and at memory."""
RUN_LOCK, WORKERS_LOCK, ALIVE_LOCK = "run.lock", "workers.lock", "alive.lock"
_held: list[int] = []
"""File descriptors of the locks that this worker process holds until it ends."""


class Workers:
    """The worker processes of a run, started when they are first needed and used by all its stages; a context manager.

    With one worker, tasks run in this process. The run must hold `folder` by `only_run`.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder = count, folder
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, executor: PipelineExecutor, ranks: Sequence[int]) -> None:
        """Runs tasks of `executor`. Raises what a task raised, and `OSError` if a worker was killed."""
        packed = dill.dumps(executor)
        if self.count == 1:
            for rank in ranks:
                _run_task(packed, rank)
            return
        futures = [self._started().submit(_run_task, packed, rank) for rank in ranks]
        try:
            for future in as_completed(futures):
                future.result()
        except BrokenProcessPool:
            raise OSError(
                "a worker process was killed, most likely for want of memory: set fewer workers and give the same command again"
            ) from None
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # tasks that run may finish: they need not be done again

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["octavo.prepare.stages"])  # imported once, not by each worker
            begin = (str(self.folder.absolute()),)
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin_worker, initargs=begin)
        return self._pool


class LocalExecutor(LocalPipelineExecutor):
    """Runs the tasks of a pipeline in `workers`, which end with this process; quiet on the terminal, logs in `logging_dir`.

    Of datatrove's own it keeps how a task runs and is marked; its pool would leave a process behind when this one is killed, and
    wait for ever for a worker that the system killed.
    """

    def __init__(self, pipeline: list[Any], tasks: int, workers: Workers, logging_dir: str) -> None:
        super().__init__(pipeline, tasks=tasks, workers=workers.count, logging_dir=logging_dir)
        self._workers = workers

    def run(self) -> None:
        """Runs the unfinished tasks."""
        self._workers.run(self, self.get_incomplete_ranks())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_workers"}


def _run_task(packed: bytes, rank: int) -> None:
    """Runs one task of a packed executor; its steps are its own copies."""
    executor = dill.loads(packed)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):  # the log file of the task says the same
        executor._run_for_rank(rank)


def _begin_worker(folder: str) -> None:
    """Ties a worker process to the run that holds `folder`."""
    _held.append(_open_lock(Path(folder) / WORKERS_LOCK, fcntl.LOCK_SH))
    threading.Thread(target=_end_with_run, args=(Path(folder) / ALIVE_LOCK,), daemon=True).start()
    # Each worker is one of many: threads of the tokenizer would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_run(lock: Path) -> None:
    """Ends this process when the run that holds `lock` has ended: only then can it be had."""
    _open_lock(lock, fcntl.LOCK_SH)
    os._exit(1)


def _open_lock(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Holds `folder` for this run. Raises `ValueError` if another run holds it."""
    try:
        run = _open_lock(folder / RUN_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing {folder.parent}: wait for it, or give another folder as out"
        ) from None
    alive = None
    try:
        os.close(_open_lock(folder / WORKERS_LOCK, fcntl.LOCK_EX))  # waits for workers of a run that was killed
        alive = _open_lock(folder / ALIVE_LOCK, fcntl.LOCK_EX)
        yield
    finally:
        if alive is not None:
            os.close(alive)
        os.close(run)


class Counting(PipelineStep):
    """Passes documents on and notes from time to time in `folder`/RANK how many, and how many bytes, for the progress bar."""

    type = "📊 - STATS"
    name = "progress"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{rank:05d}"
        documents = size = 0
        last = time.monotonic()
        for document in data:
            documents += 1
            size += len(document.text)
            if time.monotonic() - last > POLL:
                path.write_text(f"{documents} {size}")
                last = time.monotonic()
            yield document
        path.write_text(f"{documents} {size}")


class StageMonitor:
    """Shows a stage's progress while it runs and writes its seconds and peak memory, over all runs, to `folder`/cost.json.

    A context manager. A terminal gets a bar, a log file one line at the end.
    """

    def __init__(self, title: str, folder: Path, tasks: int) -> None:
        self.title, self.folder, self.tasks = title, folder, tasks
        self.path = folder / "cost.json"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._bar: Any = None
        self._task: Any = None
        self._peak = 0
        before = json.loads(self.path.read_text()) if self.path.exists() else {"seconds": 0.0, "peak_bytes": 0}
        self._before = before

    def __enter__(self) -> StageMonitor:
        self._began = time.monotonic()
        if sys.stdout.isatty():
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description:<24}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[numbers]}"),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(self.title, total=self.tasks, numbers="")
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        numbers = self._update()
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            print(f"{self.title:<24} {self._seconds():8.1f} s  {numbers}", flush=True)

    def _watch(self) -> None:
        turns = 0
        while not self._stop.wait(POLL):
            self._peak = max(self._peak, process_memory())
            turns += 1
            if turns % 4 == 0 or self._bar is not None:
                self._update()

    def _update(self) -> str:
        self._peak = max(self._peak, process_memory())
        cost = {
            "seconds": round(self._before["seconds"] + self._seconds(), 3),
            "peak_bytes": max(self._before["peak_bytes"], self._peak),
        }
        partial = self.path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk is the stage's to report
            partial.write_text(json.dumps(cost))
            partial.replace(self.path)
        documents, size = self._counts()
        numbers = f"{documents:,} documents  {size / 1e6:,.1f} MB" if documents else ""
        if self._bar is not None:
            done = len(list((self.folder / "log" / "completions").glob("*")))
            self._bar.update(self._task, completed=done, numbers=numbers)
        return numbers

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _counts(self) -> tuple[int, int]:
        documents = size = 0
        for path in (self.folder / "progress").glob("*"):
            with contextlib.suppress(ValueError, OSError):
                first, second = path.read_text().split()
                documents, size = documents + int(first), size + int(second)
        return documents, size


def process_memory() -> int:
    """Resident bytes of this process and all that it started; pages that they share count for each."""
    if not os.path.exists("/proc/self/statm"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS gives bytes, and workers stay unseen
    total, waiting = 0, [os.getpid()]
    page = resource.getpagesize()
    while waiting:
        pid = waiting.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except (OSError, ValueError):
            continue  # ended meanwhile
    return total
