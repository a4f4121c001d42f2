"""Delayed scaling keeps MS-AMP's rules; what is pending counts once, and nothing but a recorded step changes the state."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from octavo.formats import E4M3, E5M2, FP16
from octavo.kernels import cast_transpose_amax
from octavo.scaling import DelayedScaling, delayed_amax, scale_from_amax, update_all


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
    """The amax that the cast returns is the one that warm-up scales came from."""
    scaling = DelayedScaling()
    for _ in range(20):
        x = torch.randn(16, 32)
        scale = scaling.scale(x, E4M3.max)
        codes, codes_t, amax = cast_transpose_amax(x, scale, E4M3.dtype)
        scaling.record(amax)
        assert amax == x.abs().max() and codes.shape == (16, 32) and codes_t.shape == (32, 16)
        lost = (x.abs() - E4M3.max / scale).clamp(min=0)  # a value may exceed the past
        assert ((codes.float() / scale - x).abs() - lost).max() <= amax / 8
        scaling.update()


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


class Alone:
    """One scaling by the rules of delayed scaling, in Python floats."""

    def __init__(self, window: int, warmup: int) -> None:
        self.history, self.warmup = [0.0] * window, warmup
        self.pending, self.held, self.updates, self.recorded = 0.0, 0.0, 0, False

    def scale(self, amax: float, max: float) -> float:
        use = amax if self.updates < self.warmup and 0 < amax < math.inf else self.held
        return ms_amp_scale(use, max, 1.0)

    def record(self, amax: float) -> None:
        self.pending, self.recorded = max(self.pending, amax if math.isfinite(amax) else 0.0), True

    def update(self, done: bool) -> None:
        if self.recorded:
            if done:
                self.history = [self.pending, *self.history[:-1]]
            self.held = max(self.history) or self.held
            self.pending, self.recorded = 0.0, False
            self.updates += 1


@pytest.mark.parametrize("window", [1, 4, 16])
def test_a_model_of_scalings_moves_as_each_would_alone(seed, window):
    """Layers that run or not, micro-batches, values that are not finite, skipped steps, copies, saved states, moved windows."""
    limits = [E4M3.max, E5M2.max] * 3
    together = [DelayedScaling(window=window, warmup=5) for _ in limits]
    alone = [Alone(window, 5) for _ in limits]
    for number in range(50):
        for scaling, one, limit in zip(together, alone, limits, strict=True):
            for _ in range(int(torch.randint(0, 3, ()))):
                x = torch.randn(6) * 2.0 ** (30 * torch.rand(()) - 15) * (torch.rand(()) > 0.2)
                if torch.rand(()) < 0.1:
                    x[0] = (math.inf, math.nan)[number % 2]
                amax = x.abs().max()
                scale = scaling.scale(x, limit)
                assert scale == one.scale(amax.item(), limit), f"step {number}"
                visible, inverse = scaling.visible_scale(scale, amax, record=number % 7 != 3)
                assert torch.equal(inverse, 1 / visible) if amax.isfinite() else inverse.isnan()
                assert visible.isnan() or visible == scale
                if number % 7 != 3:
                    one.record(amax.item())
        done = torch.rand(()) > 0.3
        if number == 20:
            update_all(together[:2], done)  # another set of layers takes them into windows of its own
            update_all(together, done)
        elif number == 30:
            together = copy.deepcopy(together)
            update_all(together, done)
        elif number == 40:
            for scaling in together:
                scaling.update(done)
        else:
            update_all(together, done)
        for one in alone:
            one.update(bool(done))
        if number == 10:
            together[3].load_state_dict(together[3].state_dict())
        for scaling, one in zip(together, alone, strict=True):
            assert scaling.history.tolist() == one.history and scaling.held == one.held
            assert scaling.pending == one.pending and scaling.updates == one.updates


def test_a_scale_is_made_once_a_step(seed, monkeypatch):
    """By the update, for all layers: a forward reads it where it lies, until somebody changes the maximum behind it."""
    scalings = [DelayedScaling(warmup=1, margin=number) for number in range(3)]
    made = []
    monkeypatch.setattr("octavo.scaling.scale_from_amax", lambda *a, **k: made.append(a) or scale_from_amax(*a, **k))
    for amax in (1.0, 2.0, 4.0):
        scales = [scaling.scale(torch.tensor([amax]), E4M3.max) for scaling in scalings]
        for scaling, scale in zip(scalings, scales, strict=True):
            scaling.visible_scale(scale, torch.tensor(amax), record=True)
        update_all(scalings)
    made.clear()
    assert [scaling.scale(torch.zeros(1), E4M3.max) for scaling in scalings] == [64.0, 32.0, 16.0] and not made
    scalings[1].held.fill_(448.0)
    assert [scaling.scale(torch.zeros(1), E4M3.max) for scaling in scalings] == [64.0, 0.5, 16.0]
    assert scalings[0].scale(torch.zeros(1), E5M2.max) == 8192.0


def test_windows_stay_where_they_are(seed):
    """A captured graph holds their addresses, also when layers rest for a step."""
    scalings = [DelayedScaling(warmup=0) for _ in range(3)]
    addresses = set()
    for number in range(4):
        for scaling in scalings[: 3 - number % 2]:
            scaling.visible_scale(scaling.scale(torch.ones(1), E4M3.max), torch.tensor(1.0), record=True)
        update_all(scalings)
        scales = [scaling.scale(torch.ones(1), E4M3.max).data_ptr() for scaling in scalings]
        addresses.add((*(scaling.pending.data_ptr() for scaling in scalings), *scales))
    assert len(addresses) == 1 and all(address % 16 == 0 for address in addresses.pop())


def test_a_copy_has_a_state_of_its_own(seed):
    scalings = [DelayedScaling(warmup=0) for _ in range(2)]
    step(scalings[0], 3.0)
    update_all(scalings)
    duplicate = copy.deepcopy(scalings[0])
    assert duplicate.history.untyped_storage().nbytes() == 4 * 16
    step(duplicate, 100.0)
    assert scalings[0].held == 3 and duplicate.held == 100


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
