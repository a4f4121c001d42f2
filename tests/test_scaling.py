"""Delayed scaling keeps MS-AMP's rules; what is pending counts once, and nothing but a recorded step changes the state."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.formats import E4M3, E5M2, FP16
from octavo.kernels import cast_transpose_amax
from octavo.scaling import CurrentScaling, DelayedScaling, delayed_amax, scale_from_amax


def ms_amp_scale(amax: float, max: float, old: float, margin: int = 0) -> float:
    """The rule as MS-AMP writes it, in Python floats."""
    if not 0 < amax < math.inf:
        return old
    return 2.0 ** (math.floor(math.log2(max / amax)) - margin)


def step(scaling: DelayedScaling, *amaxes: float) -> None:
    for amax in amaxes:
        scaling.record(torch.tensor(amax))
    scaling.update()


@pytest.mark.parametrize(
    ("amax", "expected"), [(10.0, 32.0), (10_000.0, 1 / 32), (448.0, 1.0), (448.1, 0.5), (0.0, 1.0)]
)
def test_golden_values_of_e4m3(amax, expected):
    assert CurrentScaling().scale(torch.tensor([amax, -amax / 3]), E4M3.max) == expected
    assert scale_from_amax(torch.tensor(amax), E4M3.max) == expected
    scaling = DelayedScaling(warmup=0)
    step(scaling, amax)
    assert scaling.scale(torch.zeros(1), E4M3.max) == expected


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16])
@pytest.mark.parametrize("margin", [0, 2])
def test_follows_ms_amp_over_a_run(seed, fmt, margin):
    scaling = DelayedScaling(margin=margin)
    history = [0.0] * 16
    expected = 1.0
    for number in range(60):
        x = torch.randn(7, 5) * 2.0 ** (20 * torch.rand(()) - 10) * (number % 20 > 2)
        if number % 11 == 5:
            x[0, 0] = math.inf
        scale = scaling.scale(x, fmt.max)
        amax = x.abs().max().item()
        assert scale == (ms_amp_scale(amax, fmt.max, expected, margin) if number < 16 else expected), f"step {number}"
        step(scaling, amax)
        # A maximum that is not finite enters the window as nothing, so it cannot hold the scale back for 16 steps.
        history = [amax if math.isfinite(amax) else 0.0, *history[:-1]]
        expected = ms_amp_scale(max(history), fmt.max, expected, margin)


def test_window_forgets_after_its_length():
    scaling = DelayedScaling(window=4, warmup=0)
    step(scaling, 448.0)
    for _ in range(3):
        step(scaling, 1.0)
        assert scaling.scale(torch.zeros(1), E4M3.max) == 1
    step(scaling, 1.0)
    assert scaling.scale(torch.zeros(1), E4M3.max) == 256


def test_zero_and_nonfinite_maxima_keep_the_scale():
    for bad in (0.0, math.inf, math.nan):
        scaling = DelayedScaling(window=2, warmup=0)
        step(scaling, 10.0)
        for _ in range(5):
            step(scaling, bad)
            assert scaling.scale(torch.zeros(1), E4M3.max) == 32, f"after {bad}"
        warming = DelayedScaling()
        step(warming, 10.0)
        assert warming.scale(torch.full((3,), bad), E4M3.max) == 32, f"warm-up, {bad}"


def test_E9_micro_batches_count_by_their_maximum_and_recomputation_once():
    scaling = DelayedScaling(warmup=0)
    step(scaling, 100.0, 1.0, 100.0, 1.0)
    assert scaling.history[0] == 100 and (scaling.history[1:] == 0).all() and scaling.pending == 0


def test_E1_a_step_that_records_nothing_leaves_no_trace(seed):
    scaling = DelayedScaling()
    step(scaling, 3.0)
    before = scaling.state_dict()
    scaling.scale(torch.randn(8), E4M3.max)
    scaling.update()
    assert all(torch.equal(before[name], value) for name, value in scaling.state_dict().items())


def test_one_pass_protocol(seed):
    """The amax that the cast returns is the one that warm-up scales came from, for both kinds of scaling."""
    for scaling in (CurrentScaling(), DelayedScaling()):
        for _ in range(20):
            x = torch.randn(16, 32)
            scale = scaling.scale(x, E4M3.max)
            codes, codes_t, amax = cast_transpose_amax(x, scale, E4M3.dtype)
            scaling.record(amax)
            scaling.update()
            assert amax == x.abs().max() and codes.shape == (16, 32) and codes_t.shape == (32, 16)
            assert (codes.float() / scale - x).abs().max() <= amax / 8


def test_A11_state_is_fp32_whatever_the_input(seed):
    scaling = DelayedScaling()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(5, dtype=dtype)
        assert scaling.scale(x, E4M3.max).dtype is torch.float32
        scaling.record(x.abs().max().float())
        scaling.update()
    assert {scaling.history.dtype, scaling.pending.dtype, scaling.held.dtype} == {torch.float32}


def test_F14_state_round_trips_and_keeps_its_size(seed, tmp_path):
    scaling, other = DelayedScaling(), DelayedScaling()
    sizes = set()
    for _ in range(20):
        step(scaling, *torch.rand(3).tolist())
        torch.save(scaling.state_dict(), tmp_path / "state.pt")
        sizes.add((tmp_path / "state.pt").stat().st_size)
    assert len(sizes) == 1
    scaling.record(torch.tensor(7.0))  # in the middle of a step
    torch.save(scaling.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for amaxes in ([], [0.25], [3.0, 1.0]):
        step(scaling, *amaxes)
        step(other, *amaxes)
        assert all(torch.equal(scaling.state_dict()[name], value) for name, value in other.state_dict().items())
        assert scaling.warm and other.warm


def test_delayed_amax():
    old = torch.tensor(5.0)
    assert delayed_amax(torch.tensor([0.0, 2.0, 1.0]), old) == 2
    for bad in ([0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]):
        assert delayed_amax(torch.tensor(bad), old) == 5


def test_errors_say_what_to_do():
    for options in ({"window": 0}, {"warmup": -1}, {"margin": -1}):
        with pytest.raises(ValueError, match="window="):
            DelayedScaling(**options)
    with pytest.raises(ValueError, match="use DelayedScaling\\(window=16\\)"):
        DelayedScaling(window=8).load_state_dict(DelayedScaling().state_dict())
