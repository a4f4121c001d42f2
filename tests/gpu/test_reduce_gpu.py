"""The kernels that reduce a bucket equal their references bit for bit, for any shapes, scales, residuals and values.

With TRITON_INTERPRET=1 they run on CPU, see `interpreter`.
"""

import math

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits

from octavo.formats import E4M3
from octavo.kernels import ROW, Gradients, MuState, Places, reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SIZES = ((), (7,), (0, 4), (ROW,), (33, 17), (4096,), (40_000,), (3, 256, 50))


@pytest.fixture(autouse=True)
def _convert():
    if INTERPRETED:
        convert_exactly()


def places_of(shapes, rows_more: int = 0) -> Places:
    numels = [math.prod(shape) for shape in shapes]
    counts = [-(-numel // ROW) for numel in numels]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return Places(tuple(numels), tuple(firsts), max(sum(counts), 1) + rows_more)


def random_codes(shape) -> torch.Tensor:
    """All finite codes, subnormal ones and zeros of both signs too."""
    bits = torch.randint(0, 127, shape, dtype=torch.uint8) | torch.randint(0, 2, shape, dtype=torch.uint8) << 7
    return bits.to(DEVICE).view(E4M3.dtype)


def random_gradients(shapes, residual: str = "none", rows_more: int = 3) -> Gradients:
    codes, residuals = [], []
    for i, shape in enumerate(shapes):
        high, low = random_codes(shape), None
        if residual == "all" or (residual == "some" and i % 2):
            high, low = reference.cast_residual(
                torch.randn(shape, device=DEVICE) * 10.0 ** torch.randint(-4, 3, shape).to(DEVICE),
                torch.ones((), device=DEVICE),
            )
        codes.append(high)
        residuals.append(low)
    scales = [torch.tensor(2.0 ** float(torch.randint(-100, 100, ())), device=DEVICE) for _ in shapes]
    return Gradients(codes, residuals, scales, [False] * len(codes), places_of(shapes, rows_more))


def scalars(gradients: Gradients) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(minimum, mu, gain) as another rank might make them."""
    minimum = reference.local_scales(gradients)
    minimum *= torch.exp2(torch.randint(-8, 1, minimum.shape).to(minimum))
    mu = torch.rand(minimum.shape, device=DEVICE, dtype=torch.float64) + 1e-3
    mu[0] = 0.5 - 2.0**-40  # counts as 0.5
    return minimum, mu, torch.exp2(torch.randint(-4, 1, minimum.shape).to(minimum))


def copy_of(gradients: Gradients) -> Gradients:
    clone = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in gradients.codes]
    for new, old in zip(clone, gradients.codes, strict=True):
        new.view(torch.uint8).copy_(old.view(torch.uint8))
    scales = [scale.clone() for scale in gradients.scales]
    return Gradients(clone, gradients.residuals, scales, gradients.absent, gradients.places)


def check(gradients: Gradients, world: int, minimum=None, count: bool = True) -> None:
    """All stages around the sum."""
    from octavo.kernels.cuda import local_scales, pack_codes, unpack_codes

    twin = copy_of(gradients)
    assert_same_bits(local_scales(gradients), reference.local_scales(twin))
    smallest, mu, gain = scalars(gradients)
    minimum = smallest if minimum is None else minimum
    sent = pack_codes(gradients, minimum, mu)
    assert_same_bits(sent, reference.pack_codes(twin, minimum, mu))
    got = unpack_codes(gradients, sent, minimum, mu, gain, world, count)
    want = reference.unpack_codes(twin, sent, minimum, mu, gain, world, count)
    assert torch.equal(got.finite, want.finite) and torch.equal(got.usable, want.usable)
    assert (torch.equal(got.largest, want.largest)) if count else (got.largest is want.largest is None)
    for got, want in zip([*gradients.codes, *gradients.scales], [*twin.codes, *twin.scales], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("residual", ["none", "some", "all"])
def test_out_of_gradients_and_back(residual, seed):
    check(random_gradients(SIZES, residual), world=3, count=residual != "all")


def test_one_tensor_and_one_empty(seed):
    check(random_gradients([(50, 10)], rows_more=0), world=2)
    check(random_gradients([(0,)], rows_more=0), world=2)


def test_any_strides_and_offsets(seed):
    gradients = random_gradients([(65, 33), (5000,), (300,)])
    gradients.codes = [gradients.codes[0].t(), random_codes((5003,))[3:], gradients.codes[2]]
    check(gradients, world=2)


@pytest.mark.parametrize("stored", [3.7, 448 / 5e-3])
def test_stored_scales_that_are_no_powers_of_two(stored, seed):
    gradients = random_gradients([(70, 70), (300,)], "some")
    gradients.scales = [torch.tensor(stored, device=DEVICE) for _ in gradients.scales]
    check(gradients, world=4)


def test_what_is_not_finite_absent_or_zero(seed):
    shapes = [(5000,), (300,), (40, 30), (7,), (9,)]
    gradients = random_gradients(shapes, "some")
    gradients.codes[0].view(torch.uint8)[int(torch.randint(5000, ()))] = 0xFF
    gradients.codes[2].view(torch.uint8).zero_()
    gradients.absent = [False, False, True, False, False]
    gradients.codes[3].view(torch.uint8).fill_(0x80)
    gradients.residuals[3].zero_()
    gradients.scales[4].fill_(2.0**-126)
    check(gradients, world=3, minimum=reference.local_scales(gradients))
    assert reference.local_scales(gradients)[:3].isinf().tolist() == [False, False, True]
    again = random_gradients(shapes)
    check(again, world=3, minimum=torch.tensor([0.0, torch.inf, 2.0**100, 2.0**-120, 1.0], device=DEVICE))


@pytest.mark.parametrize("world", [1, 2, 3, 7, 9, 130])
def test_sums_of_any_part(world, seed):
    from octavo.kernels.cuda import cast_sum, sum_codes

    places = places_of(SIZES, rows_more=5)
    parts = [(0, places.rows), (1, 3), (places.rows - 7, 7)] if world < 9 else [(2, 20)]
    for first, count in parts:
        received = random_codes((world, count, ROW))
        zeros = torch.rand(received.shape, device=DEVICE) < 0.2
        received.view(torch.uint8)[zeros] = 0x80
        received[:, -1].view(torch.uint8)[0, :3] = 0x7F  # in padding or in the last tensor
        amax, sums = sum_codes(received, places, first)
        wanted, total = reference.sum_codes(received, places, first)
        assert_same_bits(amax, wanted)
        wanted = wanted * 2  # of all ranks
        for got, want in zip(
            cast_sum(sums, wanted, places, first), reference.cast_sum(total, wanted, places, first), strict=True
        ):
            assert_same_bits(got, want)


@pytest.mark.parametrize("moves", [True, False])
def test_mu_moves_as_in_the_reference(moves, seed):
    from octavo.kernels.cuda import update_mu

    count = 700
    settings = {"moves": moves, "threshold": 1e-5, "period": int(torch.randint(1, 2000, ())), "floor": 2.0**-5}
    mu = torch.rand(count, dtype=torch.float64, device=DEVICE).clamp_(2.0**-5, 1)
    steps = torch.randint(3, (count,), device=DEVICE)
    states = [MuState(mu.clone(), torch.zeros(count, device=DEVICE), steps.clone()) for _ in range(2)]
    for _ in range(8):
        index = torch.randperm(count, device=DEVICE)[:300]
        ratio = torch.rand(300, device=DEVICE) * 2e-5
        ratio[:3] = torch.tensor([1e-5, torch.nan, 0.0])
        usable = torch.rand(300, device=DEVICE) < 0.8
        update_mu(states[0], index, ratio, usable, **settings)
        reference.update_mu(states[1], index, ratio, usable, **settings)
        for got, want in zip(*states, strict=True):
            assert torch.equal(got.nan_to_num(nan=9), want.nan_to_num(nan=9))
