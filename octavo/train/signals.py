"""SIGTERM and SIGINT ask a run to stop after its current step; a second one stops it at once.

Who ends a job often signals all of its processes (Slurm, systemd, a container), and torchrun passes its own signal on: each worker then
gets two for one. A second one within `ECHO` seconds is therefore the first one again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

ECHO = 1.0
"""Seconds after a signal in which another one says the same."""


class StopRequest:
    """Whether a signal has asked for the end, and its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """A `StopRequest` that SIGTERM and SIGINT fill; the handlers that were there come back at the end, or act at the second signal.

    Signals reach Python's main thread only: in any other thread nothing is installed, and the request stays empty.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    heard = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if not request:
            request.signal, heard = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - heard > ECHO:
            restore()
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
