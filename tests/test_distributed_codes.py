"""Sums and changes of scale of E4M3 codes, against FP64 and against plain loops."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.codes import exact_sum, rescale, ring_sum, row_amax, share_at_largest
from octavo.distributed.layout import ROW, Layout
from octavo.formats import E4M3
from octavo.kernels import cast_residual, uncast_residual


def random_codes(*shape: int) -> torch.Tensor:
    bits = torch.randint(0, 127, shape, dtype=torch.uint8) | torch.randint(0, 2, shape, dtype=torch.uint8) << 7
    return bits.view(E4M3.dtype)


def test_row_amax(seed):
    codes = random_codes(5, ROW)
    assert torch.equal(row_amax(codes), codes.float().abs().amax(-1))
    codes.view(torch.uint8)[2, 3] = 0xFF
    assert row_amax(codes).isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("world", [2, 7, 64])
def test_sums_of_up_to_64_ranks_are_exact_in_any_order(world, seed):
    codes = random_codes(world, 4, ROW)
    total = exact_sum(codes)
    assert torch.equal(total.double(), codes.double().sum(0))
    assert torch.equal(exact_sum(codes[torch.randperm(world)]), total)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_ring_rounds_and_saturates_at_each_hop(world, seed):
    codes = random_codes(world, 2, ROW)
    for last in range(world):
        order = [(last + 1 + i) % world for i in range(world)]
        partial = codes[order[0]].float()
        for source in order[1:]:
            partial = (partial + codes[source].float()).clamp(-448, 448).to(E4M3.dtype).float()
        assert torch.equal(ring_sum(codes, last).float(), partial)


def test_a_power_of_two_changes_no_normal_code(seed):
    codes = random_codes(3, ROW)
    factor = torch.tensor([[1.0], [0.5], [0.125]])
    new = rescale(codes, None, factor).float()
    wanted = codes.float() * factor
    normal = wanted.abs() >= E4M3.tiny
    assert torch.equal(new[normal], wanted[normal])
    assert bool(((new - wanted).abs()[~normal] <= E4M3.smallest / 2).all())


def test_a_residual_counts(seed):
    x = torch.randn(3, ROW) * 50
    codes, residual = cast_residual(x, torch.ones(()))
    factor = torch.full((3, 1), 0.7)
    wanted = (uncast_residual(codes, residual, torch.ones(())) * factor).to(E4M3.dtype)
    assert torch.equal(rescale(codes, residual, factor).float(), wanted.float())


def test_nan_factor_makes_rows_nan(seed):
    new = rescale(random_codes(2, ROW), None, torch.tensor([[torch.nan], [1.0]]))
    assert new[0].isnan().all() and not new[1].isnan().any()


def test_largest_codes_and_nan_are_counted():
    layout = Layout([torch.Size([10]), torch.Size([ROW + 6])], 1)
    codes = torch.zeros(layout.rows, ROW)
    codes[0, :5] = torch.tensor([448.0, -448.0, 416.0, torch.nan, -416.0])
    codes[2, 3] = 448.0
    torch.testing.assert_close(share_at_largest(codes.to(E4M3.dtype), layout), torch.tensor([0.3, 1 / (ROW + 6)]))


def test_more_than_64_ranks_are_added_in_groups(seed):
    codes = random_codes(130, 2, ROW)
    groups = [codes[i : i + 64].double().sum(0).float() for i in (0, 64, 128)]
    assert torch.equal(exact_sum(codes), groups[0] + groups[1] + groups[2])


@pytest.mark.parametrize("with_residual", [False, True])
def test_zeros_stay_zero_at_any_factor(with_residual):
    """A gradient of 1e25 that was set to zero keeps its scale of 2^-77; 2^100 over that is no FP32 number."""
    codes = torch.zeros(3, ROW, dtype=E4M3.dtype)
    residual = torch.zeros(3, ROW, dtype=torch.int8) if with_residual else None
    factor = torch.tensor(2.0**100) / torch.tensor([[2.0**-77], [1.0], [torch.nan]])
    result = rescale(codes, residual, factor).float()
    assert (result[:2] == 0).all() and result[2].isnan().all()
