"""How a stage is run: once, under a key of all that it depends on, in a folder of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.data.files import write_whole
from octavo.prepare.executor import StageMonitor

POLL = 2.0
"""Seconds between looks at tasks that run elsewhere."""
FORMAT = 2
"""Raised when a stage writes other things from the same settings."""
KEY = "key.json"

Executor = Callable[..., Any]
"""Called with pipeline, tasks, workers, logging_dir; what it returns has `run()` and `get_incomplete_ranks()`, as datatrove's do."""


class StageRunner:
    """Runs stages in folders below `work`. `manifest` is removed as soon as a stage has to run: the corpus is unfinished then."""

    def __init__(self, work: Path, manifest: Path, executor: Executor, workers: int) -> None:
        self.work, self.manifest, self.executor, self.workers = work, manifest, executor, workers
        self.keys: dict[str, str] = {}
        """Of the stages, and of whatever else a stage may need."""

    def run(
        self,
        name: str,
        title: str,
        settings: dict[str, Any],
        needs: Sequence[str],
        tasks: int,
        pipeline: Callable[[Path], list[Any]],
        outputs: Sequence[Path] = (),
    ) -> None:
        """Runs the unfinished tasks of a stage; all of them if its key is a new one.

        The key is a hash of `settings`, `tasks` and the keys of the stages in `needs`. `pipeline` gets the stage's folder; `outputs`
        are what the stage writes elsewhere.
        """
        folder = self.work / name
        key = digest([FORMAT, name, settings, tasks, [self.keys[need] for need in needs]])
        self.keys[name] = key
        saved = folder / KEY
        if not saved.exists() or json.loads(saved.read_text()) != key:
            self.manifest.unlink(missing_ok=True)
            saved.unlink(missing_ok=True)  # a folder without a key is emptied, should this be cut short
            for path in (*outputs, folder):
                if path.exists():
                    shutil.rmtree(path)
            folder.mkdir()
            write_whole(saved, json.dumps(key))
        logs = str((folder / "log").absolute())
        executor = self.executor(pipeline=pipeline(folder), tasks=tasks, workers=self.workers, logging_dir=logs)
        if not executor.get_incomplete_ranks(skip_completed=True):
            print(f"{title:<24} done before", flush=True)
            return
        self.manifest.unlink(missing_ok=True)
        with StageMonitor(title, folder, tasks):
            executor.run()
            while executor.get_incomplete_ranks(skip_completed=True):  # executors of clusters may return at once
                time.sleep(POLL)

    def clear(self) -> None:
        """Removes the folders of stages that no longer are."""
        for folder in self.work.iterdir():
            if folder.is_dir() and folder.name not in {*self.keys, *self.keys.values()}:
                shutil.rmtree(folder)


def fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the names, sizes and times of files and of the files below folders."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                status = file.stat()
                found.append([str(file), status.st_size, status.st_mtime_ns])
    return digest(found)


def digest(value: Any) -> str:
    """A hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
