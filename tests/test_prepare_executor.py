"""Tasks on this machine: each once, errors passed on, killed workers reported, one run at a time, memory and progress seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document

from octavo.prepare.executor import Counting, LocalExecutor, StageMonitor, Workers, only_run, process_memory


class Note:
    """A step that notes its rank, and fails for one."""

    def __init__(self, folder: Path, bad: int | None = None) -> None:
        self.folder, self.bad = folder, bad
        self.seen: list[int] = []

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        self.seen.append(rank)
        assert self.seen == [rank], "a task has its own copy of the steps"
        if rank == self.bad:
            raise OSError(f"task {rank} of {world_size} failed")
        with (self.folder / f"{rank}").open("a") as file:
            file.write("x")


def die(data: Any, rank: int, world_size: int) -> None:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [1, 2])
def test_each_task_runs_once_and_what_failed_runs_again(
    tmp_path: Path, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    work, notes = tmp_path / "work", tmp_path / "notes"
    work.mkdir()
    notes.mkdir()
    with only_run(work), Workers(count, work) as workers:
        with pytest.raises(OSError, match="task 3 of 4 failed"):
            LocalExecutor([Note(notes, bad=3)], 4, workers, str(work / "log")).run()
        executor = LocalExecutor([Note(notes)], 4, workers, str(work / "log"))
        assert executor.get_incomplete_ranks() == [3]
        executor.run()
        assert executor.get_incomplete_ranks() == []
    assert {path.name: path.read_text() for path in notes.iterdir()} == {str(rank): "x" for rank in range(4)}
    assert "Traceback" not in capfd.readouterr().err
    assert "task 3 of 4 failed" not in (work / "log" / "logs" / "task_00003.log").read_text()


def test_killed_worker_is_reported(tmp_path: Path) -> None:
    with only_run(tmp_path), Workers(2, tmp_path) as workers:
        with pytest.raises(OSError, match="want of memory"):
            LocalExecutor([die], 2, workers, str(tmp_path / "log")).run()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(ValueError, match="another run"), only_run(tmp_path):
        pass
    with only_run(tmp_path):
        pass


def test_a_killed_run_frees_its_folder(tmp_path: Path) -> None:
    source = (
        "import sys, time; from pathlib import Path; from octavo.prepare.executor import only_run\n"
        "with only_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another run"), only_run(tmp_path):
            pass
        process.kill()
        process.wait()
    with only_run(tmp_path):
        pass


def test_monitor_adds_up_runs_and_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counting = Counting(tmp_path / "progress")
    with StageMonitor("some stage", tmp_path, 3):
        assert len(list(counting.run(iter([Document("four", "a"), Document("letters", "b")]), 2))) == 2
        time.sleep(0.05)
    first = json.loads((tmp_path / "cost.json").read_text())
    output = capsys.readouterr().out
    assert output.count("\n") == 1 and "some stage" in output and "2 documents" in output
    with StageMonitor("some stage", tmp_path, 3):
        time.sleep(0.05)
    second = json.loads((tmp_path / "cost.json").read_text())
    assert second["seconds"] >= first["seconds"] + 0.05 and second["peak_bytes"] >= first["peak_bytes"] > 0


def test_memory_counts_processes_that_were_started() -> None:
    before = process_memory()
    block = np.ones(50 << 20, dtype=np.uint8)
    assert process_memory() - before > 40 << 20
    del block
    source = "x = bytearray(range(256)) * (200 << 12); print(1, flush=True); import time; time.sleep(60)"
    before = process_memory()
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_memory() - before > 150 << 20
        process.kill()
