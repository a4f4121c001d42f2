"""What the tests of kernels compare with: an independent rounding, inputs that hold every kind of value, equality of bits."""

import torch

from octavo.formats import Format


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but any NaN equals any NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype
    same = (bits(got) == bits(want)) | (got.float().isnan() & want.float().isnan())
    assert same.all(), (
        f"first difference at {(~same).nonzero()[0].tolist()}: {got[~same][0]} instead of {want[~same][0]}"
    )


def values_of(fmt: Format) -> torch.Tensor:
    """All finite non-negative values of `fmt`, FP64, ascending from 0; the index of a value is its code."""
    words = torch.arange(2 ** (fmt.bits - 1), dtype=torch.int32).to(torch.uint8 if fmt.bits == 8 else torch.int16)
    values = words.view(fmt.dtype).double()
    return values[values.isfinite()]


def nearest(y: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round-to-nearest-even with saturation by search in the list of values: the oracle."""
    values = values_of(fmt)
    magnitude = y.double().abs().contiguous().nan_to_num(0, posinf=fmt.max).clamp(max=fmt.max)
    upper = torch.searchsorted(values, magnitude)
    lower = (upper - 1).clamp(min=0)
    down, up = magnitude - values[lower], values[upper] - magnitude
    code = torch.where((down < up) | ((down == up) & (lower % 2 == 0)), lower, upper)
    rounded = torch.where(y.isnan(), torch.nan, values[code].copysign(y.double()))
    return rounded.to(fmt.dtype)


def spread_out(shape, low: int = -20, high: int = 20) -> torch.Tensor:
    """Random values of both signs over binades 2^low ... 2^high, with zeros of both signs, infinities and NaN among them."""
    x = torch.randn(shape) * torch.exp2(torch.empty(shape).uniform_(low, high))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    where = torch.rand(shape) < 0.05
    x[where] = special[torch.randint(5, (int(where.sum()),))]
    return x
