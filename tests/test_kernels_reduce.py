"""A bucket of codes, packed, summed and unpacked, holds what a plain loop over tensors in FP64 gives."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import kernels
from octavo.formats import E4M3
from octavo.kernels import ROW, Gradients, Places, cast_residual, uncast, uncast_residual

SHAPES = [(), (7,), (0, 4), (ROW,), (33, 17), (3, 256, 5)]


def places_of(shapes, rows_more: int = 3) -> Places:
    counts = [-(-math.prod(shape) // ROW) for shape in shapes]
    firsts = tuple(sum(counts[:i]) for i in range(len(counts)))
    return Places(tuple(math.prod(shape) for shape in shapes), firsts, sum(counts) + rows_more)


def random_gradients(residuals: bool) -> Gradients:
    """Real values of many magnitudes, in the scale that each of them bears."""
    codes, lows, scales = [], [], []
    for shape in SHAPES:
        x = torch.randn(shape) * 10.0 ** float(torch.empty(()).uniform_(-9, 9))
        scales.append(kernels.scale_from_amax(kernels.amax(x), E4M3.max))
        high, low = cast_residual(x, scales[-1])
        codes.append(high)
        lows.append(low if residuals else None)
    return Gradients(codes, lows, scales, [False] * len(SHAPES), places_of(SHAPES))


def real_values(gradients: Gradients) -> list[torch.Tensor]:
    return [
        uncast(codes, scale) if low is None else uncast_residual(codes, low, scale)
        for codes, low, scale in zip(gradients.codes, gradients.residuals, gradients.scales, strict=True)
    ]


def views(bucket: torch.Tensor, places: Places) -> list[torch.Tensor]:
    flat = bucket.reshape(-1)
    return [flat[row * ROW :][:numel] for row, numel in zip(places.first_rows, places.numels, strict=True)]


def test_local_scales_fit_and_twice_as_much_does_not(seed):
    gradients = random_gradients(residuals=False)
    scales = kernels.local_scales(gradients)
    for x, scale in zip(real_values(gradients), scales, strict=True):
        if x.numel():
            assert 224 < float(x.abs().max() * scale) <= 448
        else:
            assert scale == 2.0**100


def test_what_is_absent_or_not_finite(seed):
    gradients = random_gradients(residuals=False)
    gradients.codes[4].view(torch.uint8)[5, 3] = 0x7F
    gradients.codes[1].view(torch.uint8).zero_()
    gradients.absent = [False, True, True, False, False, False]
    scales = kernels.local_scales(gradients)
    assert scales[1:3].isinf().all() and scales[4] == 0 and bool((scales[[0, 3, 5]] > 0).all())
    ones = torch.ones(len(SHAPES))
    codes = kernels.pack_codes(gradients, scales, ones.double())
    assert views(codes.float(), gradients.places)[4].isnan().all()
    result = kernels.unpack_codes(gradients, codes, scales, ones.double(), ones, 2, count=True)
    assert not result.finite
    assert result.usable.tolist() == [True, False, False, True, False, True]
    assert result.largest[4] == 33 * 17 and gradients.codes[4].float().isnan().all() and gradients.scales[4] == 1


@pytest.mark.parametrize("residuals", [False, True])
def test_packs_the_nearest_codes_and_zeros_between(residuals, seed):
    gradients = random_gradients(residuals)
    minimum = kernels.local_scales(gradients) / 4
    codes = kernels.pack_codes(gradients, minimum, torch.full((len(SHAPES),), 0.7, dtype=torch.float64))
    assert codes.shape == (gradients.places.rows, ROW)
    seen = 0
    for view, x, scale in zip(views(codes, gradients.places), real_values(gradients), minimum, strict=True):
        wanted = (x.double() * scale.double() * 0.5).float().to(E4M3.dtype)  # µ counts as the power of two below
        assert torch.equal(view.float(), wanted.float().reshape(-1))
        seen += int((wanted.float() != 0).sum())
    assert int((codes.float() != 0).sum()) == seen


@pytest.mark.parametrize("world", [2, 5])
def test_sums_of_parts_make_the_whole(world, seed):
    places = places_of(SHAPES)
    bits = torch.randint(0, 127, (world, places.rows, ROW), dtype=torch.uint8)
    bits |= torch.randint(0, 2, bits.shape, dtype=torch.uint8) << 7
    bits[:, ~_inside(places)] = 0
    received = bits.view(E4M3.dtype)
    total = received.double().sum(0)
    middle = int(torch.randint(1, places.rows, ()))
    parts = [(0, middle), (middle, places.rows - middle)]
    found = [
        kernels.sum_codes(received[:, first : first + count].contiguous(), places, first) for first, count in parts
    ]
    amax = torch.stack([maximum for maximum, _ in found]).amax(0)
    assert amax.tolist() == [float(x.abs().max()) if x.numel() else 0 for x in views(total, places)]
    cast = [kernels.cast_sum(sums, amax, places, first) for (first, _), (_, sums) in zip(parts, found, strict=True)]
    gain = cast[0][1]
    assert torch.equal(gain, cast[1][1])
    codes = torch.cat([part for part, _ in cast])
    for got, x, factor in zip(views(codes, places), views(total, places), gain, strict=True):
        assert torch.equal(got.float(), (x * factor.double()).float().to(E4M3.dtype).float())
        assert not x.numel() or 224 < float(x.abs().max() * factor) <= 448


def _inside(places: Places) -> torch.Tensor:
    inside = torch.zeros(places.rows * ROW, dtype=torch.bool)
    for view in views(inside, places):
        view.fill_(True)
    return inside.view(-1, ROW)


def test_zeros_stay_zero_whatever_their_scale():
    gradients = random_gradients(residuals=True)
    for codes, low, scale in zip(gradients.codes, gradients.residuals, gradients.scales, strict=True):
        codes.view(torch.uint8).zero_()
        low.zero_()
        scale.fill_(2.0**-77)
    minimum = torch.full((len(SHAPES),), 2.0**100)
    minimum[0] = 0.0
    codes = views(kernels.pack_codes(gradients, minimum, torch.ones(len(SHAPES)).double()).float(), gradients.places)
    assert codes[0].isnan().all() and all(bool((x == 0).all()) for x in codes[1:])


def test_an_infinite_sum_anywhere_shows_in_every_part(seed):
    places = places_of([(600,), (300,)], rows_more=0)
    _, sums = kernels.sum_codes(torch.zeros(2, 1, ROW).to(E4M3.dtype), places, 1)
    codes, gain = kernels.cast_sum(sums, torch.tensor([torch.inf, 1.0]), places, 1)
    assert codes.float().isnan().all() and gain.tolist() == [1.0, 256.0]


def test_unpacks_into_any_strides_and_counts(seed):
    gradients = random_gradients(residuals=False)
    gradients.codes[4] = torch.zeros(17, 33).to(E4M3.dtype).t()
    codes = (torch.randn(gradients.places.rows, ROW) * 300).clamp_(-448, 448).to(E4M3.dtype)
    minimum, gain = torch.exp2(torch.arange(6.0)), torch.full((6,), 0.25)
    result = kernels.unpack_codes(gradients, codes, minimum, torch.ones(6).double(), gain, 3, count=True)
    assert result.finite and result.usable.all()
    for own, scale, view, s, n in zip(
        gradients.codes, gradients.scales, views(codes, gradients.places), minimum, result.largest, strict=True
    ):
        assert torch.equal(own.float(), view.float().view(own.shape))
        assert scale == 3 * s * 0.25
        assert n == (view.float().abs() == 448).sum()
    assert kernels.unpack_codes(gradients, codes, minimum, torch.ones(6).double(), gain, 3).largest is None
