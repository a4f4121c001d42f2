"""SIGTERM and SIGINT ask a run to stop after its current step; a second one stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether a signal has asked for the end, and its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """A `StopRequest` that SIGTERM and SIGINT fill; the handlers that were there come back at the end, or at the first signal.

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

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name
        restore()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
