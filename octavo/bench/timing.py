"""Time of a function on a device: median and spread of repeats.

A repeat is as many calls in a row as take 10 ms, between two CUDA events (on a CPU 1 ms, between two readings of a clock), divided by the
calls: the launch of the first call is then no part of a short kernel. Small inputs so stay in the caches; inputs larger than the
L2 cache (60 MB on an H200) do not. The host is timed apart: how long it takes to ask for a call, without waiting for the result.

Where the host is slower than the device, a CUDA graph (`captured`) shows the time of the device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARMUP = 3
"""Calls before the first repeat; the compiler works in the first two."""
SECONDS = {"cuda": 0.01, "cpu": 0.001}
MOST_CALLS = 100
IN_GRAPH = 10
"""Calls in one graph of a short kernel: its replay costs about as much as a launch."""

Function = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    ms: float
    ms_min: float
    ms_max: float
    host_ms: float | None
    """Median time that the host needs to ask for one call; None where the host is the device."""
    repeats: int
    calls: int
    """Calls of a repeat."""


def measure(function: Function, device: torch.device, repeats: int, warmup: int = WARMUP) -> Timing:
    """Time `function` on `device`."""
    for _ in range(warmup):
        function()
    first, _ = _repeat(function, 1, device)
    calls = min(MOST_CALLS, max(1, math.ceil(SECONDS[device.type] * 1e3 / max(first, 1e-6))))
    times, host_times = zip(*(_repeat(function, calls, device) for _ in range(repeats)), strict=True)
    host = statistics.median(host_times) if device.type == "cuda" else None
    return Timing(statistics.median(times), min(times), max(times), host, repeats, calls)


def _repeat(function: Function, calls: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a call on the device, and on the host."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        passed = (time.perf_counter() - start) * 1e3 / calls
        return passed, passed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    host = (time.perf_counter() - start) * 1e3 / calls
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls, host


def launch_us(device: torch.device) -> float | None:
    """Microseconds in which the host asks for the smallest kernel there is: below so many times its kernels no eager layer can get.

    It is between 3 and 90 from machine to machine. None where the host is the device.
    """
    x = torch.zeros(1, device=device)
    host = measure(x.zero_, device, repeats=10).host_ms
    return None if host is None else host * 1e3


def captured(function: Function, calls: int = 1) -> Function:
    """A function that replays `calls` calls of `function` as one CUDA graph. Raises what the capture raises."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is done at first calls only, such as loading kernels, cannot be captured
        for _ in range(WARMUP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    return graph.replay
