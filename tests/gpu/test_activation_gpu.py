"""The activation kernels against their references: the same codes but for the last bits of an exponential and a reciprocal root.

Results in FP32 differ by about 2^-20 of themselves. Rounded to 16 bits and then to eight, that changes one code in some ten thousand,
by one step. Everything else is exact: transposes, padding, the two ways to a maximum, and sums that are the same in every run.
"""

import math

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, spread_out

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import reference
from octavo.kernels.reference.activation import GATED, activate, activate_backward

pytestmark = [] if INTERPRETED else pytest.mark.gpu
needs_gpu = pytest.mark.gpu
KINDS = tuple(GATED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 257)
MATRICES = [(torch.bfloat16, m, k) for m in SIZES for k in SIZES] + [
    (dtype, *size) for dtype in DTYPES for size in ((17, 33), (16, 256), (1, 7), (128, 64))
]
SIDES = ((True, False), (False, True))
SEVERAL_TILES = [(256, 384), (512, 768), (1024, 130)]
LARGE = [pytest.param((m, k), marks=needs_gpu) for m, k in ((16_384, 4096), (4096, 14_336), (1000, 3000))]


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


def on(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def inputs(kind: str, m: int, width: int, dtype: torch.dtype, draw=torch.randn) -> tuple[torch.Tensor, torch.Tensor]:
    """(da, h) for a of shape [m, width]."""
    return on(draw((m, width)).to(dtype)), on(draw((m, 2 * width if GATED[kind] else width)).to(dtype))


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """The matrix itself, and views of the same size of other strides and offsets that hold other values of it."""
    m, k = x.shape
    big = torch.cat([x, x, x], 0).repeat(1, 3)
    return [x, big[1 : m + 1, 3 : k + 3], big[: 2 * m : 2, 16 : k + 16], x.t().contiguous().t(), x[:1].expand(m, k)]


def rank(codes: torch.Tensor) -> torch.Tensor:
    """Numbers of codes in the order of their values; both zeros are 0."""
    word = codes.view(torch.uint8).int()
    return torch.where(word >= 128, 128 - word, word)


def check_codes(codes: torch.Tensor, want: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """At most one step apart, in at most one of a thousand places; or by one subnormal step of `dtype`, which can be many of the codes."""
    assert codes.shape == want.shape and codes.dtype == want.dtype and codes.is_contiguous()
    assert torch.equal(codes.isnan(), want.isnan())
    finite = ~want.isnan()
    steps = (rank(codes) - rank(want)).abs()[finite]
    apart = (codes.double() - want.double()).abs()[finite]
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((steps <= 1) | (apart <= 1.5 * smallest * scale.double())).all()
    assert (steps > 0).sum() <= steps.numel() / 1000 + 2


def check_amax(amax: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert amax.shape == () and amax.dtype == torch.float32
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 2.0**-15
    torch.testing.assert_close(amax, want, rtol=step, atol=2.0**-119, equal_nan=True)


def check_counts(stats: torch.Tensor, want: torch.Tensor, numel: int) -> None:
    assert (stats - want).abs().max() <= numel / 1000 + 2


def check_column_sum(sums: torch.Tensor, da: torch.Tensor, h: torch.Tensor, kind: str) -> None:
    """Additions in another order, terms that are wrong by 2^-15 or 2^-16·|da|, and a few of 16 bits that are one step apart."""
    dh, da = activate_backward(da, h, kind).double(), da.double().abs()
    if GATED[kind]:
        gate, up = h.double().abs().chunk(2, 1)
        da = torch.cat([da * up, da * gate], 1)
    assert sums.dtype == torch.float32 and sums.shape == dh.shape[1:]
    depth = min(len(dh), 128) + len(dh) / 128 + 1
    few = 0.0 if h.dtype == torch.float32 else (8 + len(dh) / 256) * torch.finfo(h.dtype).eps
    bound = dh.abs().sum(0) * (2.0**-15 + depth * 2.0**-24) + da.sum(0) * 2.0**-16 + 1e-30
    bound += few * (dh.abs().amax(0) if len(dh) else 0.0)
    finite = dh.sum(0).isfinite()
    assert ((sums.double() - dh.sum(0)).abs() <= bound)[finite].all() and not sums[~finite].isfinite().any()


def check(cuda, da: torch.Tensor, h: torch.Tensor, kind: str, scale: torch.Tensor, fmts: tuple[Format, Format]) -> None:
    """All four kernels on one input."""
    forward, backward = (fmt.dtype for fmt in fmts)
    stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    codes, codes_t, amax = cuda.activation_cast(h, kind, scale, forward, stats=stats)
    want = reference.activation_cast(h, kind, scale, forward, stats=want_stats)
    check_codes(codes, want[0], scale, h.dtype)
    assert_same_bits(codes_t, codes.t())
    check_amax(amax, want[2], h.dtype)
    check_counts(stats, want_stats, codes.numel())
    assert_same_bits(cuda.activation_amax(h, kind), amax)
    for row, col in SIDES:
        one, one_t, _ = cuda.activation_cast(h, kind, scale, forward, row=row, col=col)
        assert (one is None) != row and (one_t is None) != col
        assert_same_bits(codes if one is None else one, codes)
        assert_same_bits(codes_t if one_t is None else one_t, codes_t)

    stats.zero_(), want_stats.zero_()
    codes, codes_t, amax, sums = cuda.activation_backward_cast(da, h, kind, scale, backward, bias_sum=True, stats=stats)
    want = reference.activation_backward_cast(da, h, kind, scale, backward, bias_sum=True, stats=want_stats)
    check_codes(codes, want[0], scale, h.dtype)
    assert_same_bits(codes_t, codes.t())
    check_amax(amax, want[2], h.dtype)
    check_counts(stats, want_stats, codes.numel())
    check_column_sum(sums, da, h, kind)
    assert_same_bits(cuda.activation_backward_amax(da, h, kind), amax)
    for row, col in SIDES:
        one, one_t, again, none = cuda.activation_backward_cast(da, h, kind, scale, backward, row=row, col=col)
        other, other_t, *nothing = cuda.activation_backward_cast(
            da, h, kind, scale, backward, row=row, col=col, amax=False
        )
        assert nothing == [None, None]
        assert_same_bits(*(one, other) if row else (one_t, other_t))
        assert (one is None) != row and (one_t is None) != col and none is None
        assert_same_bits(again, amax)
        assert_same_bits(codes if one is None else one, codes)
        assert_same_bits(codes_t if one_t is None else one_t, codes_t)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "m", "k"), MATRICES, ids=str)
def test_of_every_kind_of_size(cuda, kind, m, k, dtype, seed):
    da, h = inputs(kind, m, k, dtype)
    check(cuda, da, h, kind, scalar(16.0), (E4M3, E5M2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_wild_values(cuda, kind, dtype, seed):
    """Over 40 binades, with zeros, infinities and NaN; in formats that saturate and flush."""
    da, h = inputs(kind, 40, 70, dtype, spread_out)
    check(cuda, da, h, kind, scalar(0.3), (E4M3, E5M2))
    check(cuda, da, h.nan_to_num(1.0, 2.0, -3.0), kind, scalar(2.0**10), (E5M2, E4M3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [17, 128])
def test_of_views(cuda, kind, m, seed):
    da, h = inputs(kind, m, 64, torch.bfloat16)
    for view_da, view in zip(views(da), views(h), strict=True):
        check(cuda, view_da, view, kind, scalar(4.0), (E4M3, E5M2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SEVERAL_TILES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16] if INTERPRETED else DTYPES, ids=str)
def test_of_several_tiles(cuda, kind, dtype, shape, seed):
    """Whole tiles and others. No stray bytes: the transposes are compared bit for bit."""
    da, h = inputs(kind, *shape, dtype)
    check(cuda, da, h, kind, scalar(16.0), (E4M3, E5M2))
    first = cuda.activation_backward_cast(da, h, kind, scalar(16.0), E5M2.dtype, bias_sum=True)
    for _ in range(1 if INTERPRETED else 5):
        again = cuda.activation_backward_cast(da, h, kind, scalar(16.0), E5M2.dtype, bias_sum=True)
        for one, other in zip(first, again, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_every_value(cuda, kind, dtype):
    """All 65,536 values of the dtype, at scales that bring each into the range of the codes."""
    x = on(torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256))
    h, da = torch.cat([x, torch.ones_like(x)], 1) if GATED[kind] else x, torch.ones_like(x)
    for exponent in (-126, -90, -60, -30, -15, 0, 15, 30, 60, 90, 126):
        scale = scalar(2.0**exponent)
        codes = cuda.activation_cast(h, kind, scale, E5M2.dtype)[0]
        check_codes(codes, reference.activation_cast(h, kind, scale, E5M2.dtype)[0], scale, dtype)
        codes = cuda.activation_backward_cast(da, h, kind, scale, E5M2.dtype)[0]
        check_codes(codes, reference.activation_backward_cast(da, h, kind, scale, E5M2.dtype)[0], scale, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_fp32_are_exact_to_rounding(cuda, kind, seed):
    """The column sums of two rows, one of them zero, are the gradients themselves."""
    x = on(torch.cat([torch.linspace(-30, 30, 6000), torch.randn(2000)]))
    h = torch.stack([torch.cat([x, torch.ones_like(x)]) if GATED[kind] else x] * 2)
    da = on(torch.stack([torch.ones(8000), torch.zeros(8000)]))
    sums = cuda.activation_backward_cast(da, h, kind, scalar(1.0), E5M2.dtype, bias_sum=True)[3]
    want = activate_backward(da, h, kind)[0]
    assert ((sums - want).abs() <= want.abs() * 2.0**-16 + 2.0**-16).all()
    if GATED[kind]:
        torch.testing.assert_close(sums[8000:], activate(h, kind)[0], rtol=2.0**-17, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show(cuda, kind, bad, seed):
    """In every maximum, although codes saturate; and a NaN scale leaves the padding zero."""
    for m, k in ((20, 40), (256, 256)):
        da, h = inputs(kind, m, k, torch.bfloat16)
        h[m // 2, k // 3] = bad
        check(cuda, da, h, kind, scalar(math.nan), (E4M3, E5M2))
        assert not cuda.activation_amax(h, kind).isfinite() and cuda.activation_backward_amax(da, h, kind).isnan()
        da, h = inputs(kind, m, k, torch.bfloat16)
        da[m // 2, k // 3] = bad
        check(cuda, da, h, kind, scalar(1.0), (E4M3, E5M2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.0, 0.1, 0.49, 0.5, 0.51, 3.0])
def test_maximum_of_gelu_where_no_element_is_large(cuda, limit, dtype, seed):
    """The largest |a| is then of a negative element, or of the largest."""
    x = torch.randn(40, 300).clamp(max=limit)
    for values in (x, -x.abs(), x.clamp(min=-limit), torch.zeros(40, 300), -torch.ones(40, 300) * 20):
        h = on(values.to(dtype))
        check_amax(cuda.activation_amax(h, "gelu"), reference.activation_amax(h, "gelu"), dtype)
        h[7, 11] = -math.inf
        assert cuda.activation_amax(h, "gelu").isnan()


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_to_the_31_elements(cuda, kind, seed):
    m, width = 2**17 + 128, 2**14 if kind == "gelu" else 2**13
    h = torch.randn(m, 2**14, device=DEVICE, dtype=torch.bfloat16)
    da = torch.randn(m, width, device=DEVICE, dtype=torch.bfloat16)
    codes, codes_t, _, _ = cuda.activation_backward_cast(da, h, kind, scalar(16.0), E5M2.dtype, bias_sum=True)
    for rows in (slice(0, 128), slice(m - 128, m)):
        want = reference.activation_backward_cast(da[rows], h[rows], kind, scalar(16.0), E5M2.dtype)
        check_codes(codes[rows], want[0], scalar(16.0), h.dtype)
        check_codes(codes_t[:, rows].contiguous(), want[1], scalar(16.0), h.dtype)
