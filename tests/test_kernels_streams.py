"""Largest magnitudes serve the stream that found them, and pass between captured graphs and eager code where a replay makes both."""

from __future__ import annotations

import pytest
import torch
from fp8_layers import on_stream
from torch import Tensor

from octavo.kernels import known_amax, remember_amax, streams
from octavo.kernels.maxima import kept_amax


def unasked(*_: object) -> bool:
    raise AssertionError("a device without streams was asked for one")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_streams_is_not_asked(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", unasked)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", unasked, raising=False)
    assert streams.place(torch.empty(3, device=device)) == streams.HOST


def test_place_is_the_current_stream_of_the_device(monkeypatch):
    class OnGPU:
        def get_device(self) -> int:
            return 3

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    for capturing, place in ((False, 73), (True, streams.CAPTURED)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert streams.place(OnGPU()) == place


def found(x: Tensor, monkeypatch: pytest.MonkeyPatch, stream: int) -> bool:
    on_stream(monkeypatch, stream)
    return known_amax(x) is not None


def test_a_maximum_serves_its_stream(seed, monkeypatch):
    x = torch.randn(4, 5)
    on_stream(monkeypatch, 1)
    remember_amax(x, x.abs().max())
    assert [found(x, monkeypatch, stream) for stream in (1, 2, streams.CAPTURED)] == [True, False, False]
    on_stream(monkeypatch, 2)
    assert kept_amax(x) == x.abs().max()
    assert [found(x, monkeypatch, stream) for stream in (1, 2)] == [False, True]
    on_stream(monkeypatch, streams.CAPTURED)
    assert kept_amax(x) is None


def test_a_maximum_of_a_graph_serves_all_and_is_not_replaced(seed, monkeypatch):
    x, amax = torch.randn(4, 5), torch.tensor(2.0)
    on_stream(monkeypatch, streams.CAPTURED)
    remember_amax(x, amax)
    assert all(found(x, monkeypatch, stream) for stream in (1, 2, streams.CAPTURED))
    on_stream(monkeypatch, 1)
    x.mul_(2)
    remember_amax(x, torch.tensor(4.0))  # by eager code: the next replay would write x, and not this
    assert not any(found(x, monkeypatch, stream) for stream in (1, streams.CAPTURED))
