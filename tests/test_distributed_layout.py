"""Buckets hold any shapes, start each at a row, and gather and spread values of tensors exactly."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.layout import ROW, Layout

SHAPES = [(), (1,), (7,), (0, 4), (ROW,), (ROW + 1,), (3, 5, 7), (40, 33)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_views_hold_what_is_written_and_padding_stays_zero(world, seed):
    layout = Layout([torch.Size(shape) for shape in SHAPES], world)
    bucket = layout.zeros(torch.float32)
    assert layout.rows % world == 0 and bucket.shape == (layout.rows, ROW)
    values = [torch.randn(shape) for shape in SHAPES]
    torch._foreach_copy_(layout.views(bucket), values)
    for view, value in zip(layout.views(bucket), values, strict=True):
        assert torch.equal(view, value)
    assert int((bucket != 0).sum()) == sum(value.numel() for value in values)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_maxima_and_totals_by_tensor_from_parts(world, seed):
    layout = Layout([torch.Size(shape) for shape in SHAPES], world)
    bucket = layout.zeros(torch.float32)
    values = [torch.randn(shape) for shape in SHAPES]
    torch._foreach_copy_(layout.views(bucket), values)
    amax = torch.tensor([value.abs().amax() if value.numel() else 0.0 for value in values])
    assert torch.equal(layout.maximum(bucket.abs().amax(-1)), amax)
    parts = [layout.maximum(bucket[layout.part(rank)].abs().amax(-1), layout.part(rank)) for rank in range(world)]
    assert torch.equal(torch.stack(parts).amax(0), amax)
    ones = [layout.total((bucket[layout.part(r)] != 0).sum(-1), layout.part(r)) for r in range(world)]
    assert torch.equal(torch.stack(ones).sum(0), layout.numel)


def test_maximum_shows_nan_as_infinity():
    layout = Layout([torch.Size([ROW * 2]), torch.Size([4])], 2)
    assert layout.maximum(torch.tensor([1.0, torch.nan, 2.0, 0.0])).tolist() == [torch.inf, 2.0]


def test_spread_gives_every_row_the_value_of_its_tensor():
    layout = Layout([torch.Size([ROW + 1]), torch.Size([2])], 4)
    assert layout.spread(torch.tensor([5.0, 9.0])).tolist() == [[5.0], [5.0], [9.0], [9.0]]


def test_a_bucket_of_nothing_has_rows_for_every_rank():
    assert Layout([torch.Size([0])], 3).rows == 3
