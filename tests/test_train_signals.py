"""The first signal asks, its echo says nothing, the second one acts, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from octavo.train import signals
from octavo.train.signals import stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop and stop.signal == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_acts_and_an_echo_does_not(second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[int] = []
    before = signal.signal(second, lambda number, _: acted.append(number))
    mine = signal.getsignal(second)
    try:
        with stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), second)  # torchrun passes on what a scheduler has sent to all
            assert not acted and stop.signal == "SIGTERM"
            monkeypatch.setattr(signals, "ECHO", 0.0)
            os.kill(os.getpid(), second)
            assert acted == [second] and signal.getsignal(second) is mine
    finally:
        signal.signal(second, before)


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
