"""Times are those of one call, with the spread of the repeats; warm-up is not among them."""

import time

import pytest
import torch

from octavo.bench.timing import WARMUP, launch_us, measure

CPU = torch.device("cpu")


def test_the_time_is_that_of_one_call():
    timing = measure(lambda: time.sleep(0.002), CPU, repeats=10)
    assert timing.calls == 1 and timing.repeats == 10 and timing.host_ms is None
    assert 2.0 <= timing.ms_min <= timing.ms <= timing.ms_max


def test_short_functions_are_called_many_times_in_a_repeat():
    timing = measure(lambda: time.sleep(0.0001), CPU, repeats=10)
    assert timing.calls > 1
    assert 0.1 <= timing.ms_min <= timing.ms <= timing.ms_max


def test_warm_up_is_left_out():
    calls = []

    def function():
        calls.append(None)
        time.sleep(0.05 if len(calls) <= WARMUP else 0.001)

    assert measure(function, CPU, repeats=10).ms < 50
    assert len(calls) > WARMUP + 10


def test_a_cpu_launches_nothing():
    assert launch_us(CPU) is None


@pytest.mark.gpu
def test_a_launch_costs_the_host_microseconds():
    found = launch_us(torch.device("cuda"))
    assert found is not None and 0.5 < found < 1000


@pytest.mark.gpu
def test_a_graph_does_what_was_captured():
    from octavo.bench.timing import captured

    x = torch.zeros((), device="cuda")
    replay = captured(lambda: x.add_(1), calls=10)
    before = x.item()
    replay()
    assert x.item() == before + 10
    timing = measure(replay, torch.device("cuda"), repeats=10)
    assert timing.host_ms is not None and 0 < timing.ms_min <= timing.ms <= timing.ms_max
