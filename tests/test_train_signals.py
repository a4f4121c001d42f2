"""The first signal asks, the second one acts, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from octavo.train.signals import stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number.name
        assert signal.getsignal(number) is before  # a second one stops at once
    assert signal.getsignal(number) is before


def test_handlers_come_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_are_left_alone() -> None:
    seen = []

    def run() -> None:
        with stop_on_signal() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
