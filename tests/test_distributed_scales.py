"""The shared scalar: the smallest scale of all ranks, a flag for values that are not finite, and no pressure from zeros."""

from __future__ import annotations

import torch

from octavo.distributed.scales import LARGEST, local_scales, mean_scale, shared_scales

INF = torch.inf


def share(*amaxes: list[float], absent: list[list[bool]] | None = None):
    flags = absent or [None] * len(amaxes)
    scales = [
        local_scales(torch.tensor(a), None if f is None else torch.tensor(f))
        for a, f in zip(amaxes, flags, strict=True)
    ]
    return shared_scales(torch.stack(scales).amin(0))


def test_the_smallest_scale_wins():
    shared = share([448.0, 1e-3, 3.0], [224.0, 1e3, 3.0])
    assert shared.scale.tolist() == [1.0, 0.25, 128.0]
    assert shared.finite.all() and shared.present.all()


def test_zeros_of_one_rank_do_not_press_the_others():
    assert share([0.0], [1e-9]).scale.tolist() == share([1e-9]).scale.tolist()


def test_A8_one_bad_rank_is_seen_by_the_minimum():
    shared = share([1.0, 1.0], [INF, 2.0])
    assert shared.finite.tolist() == [False, True]
    assert shared.scale.isnan().tolist() == [True, False]  # and so is every code that is multiplied by it
    assert mean_scale(shared.scale, torch.ones(2), 2).tolist() == [1.0, 256.0]


def test_absent_is_neither_zero_nor_bad():
    shared = share([0.0, 0.0, INF], [2.0, 0.0, 1.0], absent=[[True, True, False], [False, True, True]])
    assert shared.present.tolist() == [True, False, True]
    assert shared.finite.tolist() == [True, True, False]
    assert shared.scale[0].item() == 128.0


def test_scales_stay_finite_at_any_magnitude():
    tiny = torch.tensor([1e-45, 1e-38, 3e38])
    shared = shared_scales(local_scales(tiny))
    assert shared.scale.tolist()[:2] == [LARGEST, LARGEST]
    mean = mean_scale(shared.scale, torch.full((3,), 2.0**17), 128)
    assert mean.isfinite().all() and (mean > 0).all()


def test_the_scale_of_the_mean_is_exact():
    for world in (2, 3, 7):
        scale = mean_scale(torch.tensor([32.0]), torch.tensor([2.0]), world)
        assert scale.item() == 64.0 * world
