"""Current scaling is amax, scale, cast and reciprocal in one call, with the same bits; what is not finite shows."""

import math

import pytest
import torch
from oracle import assert_same_bits, spread_out
from torch import Tensor

from octavo import kernels
from octavo.formats import E4M3, E5M2, Format

FP8 = (E4M3, E5M2)


def apart(x: Tensor, fmt: Format, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """codes, codes_t, scale by one kernel after the other."""
    amax = kernels.amax(x)
    scale = kernels.scale_from_amax(amax, fmt.max, power_of_two)
    codes, codes_t = kernels.cast_transpose(x, scale, fmt.dtype)
    return codes, codes_t, scale if amax.isfinite() else torch.tensor(torch.nan)


@pytest.mark.parametrize("fmt", FP8, ids=repr)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [(0, 16), (1, 7), (17, 33), (32, 48), (257, 1)], ids=str)
def test_quantize_equals_its_parts(shape, power_of_two, fmt, seed):
    for x in (
        torch.randn(shape),
        torch.randn(shape).bfloat16(),
        torch.randn(shape[::-1]).half().t(),
        spread_out(shape),
    ):
        stats, want_stats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        want = apart(x, fmt, power_of_two)
        got = kernels.quantize(x, fmt, power_of_two=power_of_two, column_sum=True, return_inverse=True, stats=stats)
        for part, expected in zip(got, want, strict=False):
            assert_same_bits(part, expected)
        assert_same_bits(got[4], want[2].reciprocal())
        assert got[3].dtype == torch.float32
        assert torch.allclose(got[3], x.float().sum(0), equal_nan=True)
        kernels.cast_transpose(
            x, kernels.scale_from_amax(kernels.amax(x), fmt.max, power_of_two), fmt.dtype, stats=want_stats
        )
        assert torch.equal(stats, want_stats)
        codes, codes_t, _, sums = kernels.quantize(x, fmt, power_of_two=power_of_two, row=False)
        assert codes is None and sums is None
        assert_same_bits(codes_t, want[1])
        assert kernels.quantize(x, fmt, col=False)[1] is None
        rounded = kernels.quantize(x, fmt, column_sum=torch.bfloat16)[3]
        assert_same_bits(rounded, x.sum(0, dtype=torch.float32).bfloat16())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_the_scale(bad, seed):
    x = torch.randn(20, 40)
    x[3, 4] = bad
    _, _, scale, _, inverse = kernels.quantize(x, E4M3, return_inverse=True)
    assert scale.isnan() and inverse.isnan()
    codes, scale = kernels.cast_current(x, E4M3)
    assert codes.float().isnan().all() and scale == 1


def test_unit_is_that_of_the_real_values(seed):
    x, unit = torch.randn(16, 32).half(), torch.tensor(2.0**7)
    codes, _, scale, _, inverse = kernels.quantize(x, E4M3, unit=unit, return_inverse=True)
    real = x.float() / unit
    want, _, want_scale, _ = kernels.quantize(real, E4M3)
    assert_same_bits(codes, want)
    assert scale == want_scale and inverse == 1 / want_scale


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (5, 16), (3, 4, 5)], ids=str)
def test_cast_current_keeps_the_shape(shape, seed):
    for x in (torch.randn(shape), torch.randn(shape).bfloat16().transpose(0, -1) if shape else torch.randn(())):
        codes, scale = kernels.cast_current(x, E4M3)
        assert codes.shape == x.shape and codes.is_contiguous()
        assert_same_bits(scale, kernels.scale_from_amax(kernels.amax(x), E4M3.max))
        assert_same_bits(codes, kernels.cast(x, scale, E4M3.dtype))


@pytest.mark.parametrize("amax", [0.0, 3.0, torch.inf, torch.nan])
def test_visible_scale(amax):
    scale, unit = torch.tensor(0.3), torch.tensor(4.0)
    visible, inverse = kernels.visible_scale(scale, torch.tensor(amax), unit)
    if math.isfinite(amax):
        assert visible == scale * unit and inverse == 1 / (scale * unit)
    else:
        assert visible.isnan() and inverse.isnan()
    assert_same_bits(kernels.visible_scale(scale, torch.tensor(1.0))[0], scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_inverse_scales(dtype, seed):
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    a, _, a_scale, _, a_inverse = kernels.quantize(x, E4M3, power_of_two=False, return_inverse=True)
    b, _, b_scale, _, b_inverse = kernels.quantize(w, E4M3, power_of_two=False, return_inverse=True)
    want = kernels.scaled_mm_nt(a, b, a_scale, b_scale, dtype)
    assert torch.equal(kernels.scaled_mm_nt(a, b, a_inverse, b_inverse, dtype, inverse_scales=True), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 7), (17, 33), (32, 48), (257, 1)], ids=str)
def test_a_shift_is_the_subtraction_of_pytorch(shape, dtype, seed):
    for x in (torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype).t()):
        shift = torch.randn(shape[1]).to(dtype).requires_grad_()
        stats, want_stats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for options in ({}, {"power_of_two": False}, {"row": False}, {"col": False}):
            got = kernels.quantize(x, E4M3, shift=shift, return_inverse=True, stats=stats, **options)
            want = kernels.quantize(x - shift.detach(), E4M3, return_inverse=True, stats=want_stats, **options)
            for part, expected in zip(got, want, strict=True):
                assert part is expected is None or assert_same_bits(part, expected) is None
        assert torch.equal(stats, want_stats)


def test_what_a_shift_does_not_go_with_is_named(seed):
    x, one, hint = torch.randn(4, 8), torch.ones(()), torch.zeros((), dtype=torch.int32)
    for name, value in (
        ("unit", one),
        ("hint", hint),
        ("column_sum", True),
        ("column_sum", torch.bfloat16),
        ("amax", one),
        ("keep_amax", True),
    ):
        with pytest.raises(ValueError, match=f"shift and {name}: "):
            kernels.quantize(x, E4M3, shift=x[0], **{name: value})
    with pytest.raises(ValueError, match="shift and unit, amax: "):
        kernels.quantize(x, E4M3, shift=x[0], amax=one, unit=one)
    for shift in (x[0, :7], x[:1], x[0].bfloat16(), one):
        with pytest.raises(ValueError, match="one value for each column"):
            kernels.quantize(x, E4M3, shift=shift)
    with pytest.raises(ValueError, match="not FP8"):
        kernels.quantize(x.to(E4M3.dtype), E4M3, shift=x[0].to(E4M3.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 7), (17, 33), (3, 5000)], ids=str)
def test_row_sums(shape, dtype, seed):
    for x in (torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype).t().requires_grad_()):
        sums, amax = kernels.row_sums(x)
        assert sums.dtype == torch.float32 and sums.shape == shape[:1] and not sums.requires_grad
        torch.testing.assert_close(sums, x.detach().double().sum(1).float(), rtol=1e-5, atol=1e-4)
        assert_same_bits(amax, kernels.amax(x))
    if x.numel():
        x = x.detach()
        x[-1, -1] = torch.nan
        sums, amax = kernels.row_sums(x)
        assert amax.isnan() and sums.isnan().tolist() == [False] * (shape[0] - 1) + [True]


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="flatten"):
        kernels.quantize(torch.zeros(2, 3, 4), E4M3)
    with pytest.raises(ValueError, match="flatten"):
        kernels.row_sums(torch.zeros(3))


def test_ops_are_functional_and_their_fakes_agree(seed):
    x, unit = torch.randn(5, 20), torch.tensor(2.0)
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.octavo
    for args in (
        (True, True, True, True, None, False, unit, True),
        (False, False, True, False, unit, False, None, False),
        (True, True, False, False, None, True, unit, False),
    ):
        torch.library.opcheck(op.quantize, (x, E5M2.dtype, *args), test_utils=checks)
    shifted = (x, E5M2.dtype, True, False, True, False, None, False, None, True, None, x[0].clone())
    torch.library.opcheck(op.quantize, shifted, test_utils=checks)
    torch.library.opcheck(op.row_sums, (x,), test_utils=checks)
    for count in (True, False):
        torch.library.opcheck(op.cast_current, (x, E4M3.dtype, count), test_utils=checks)
    for other in (unit, None):
        torch.library.opcheck(op.visible_scale, (unit, unit, other), test_utils=checks)


def test_compiled_equals_eager_in_one_graph(seed):
    def step(x, stats):
        codes, codes_t, scale, sums, inverse = kernels.quantize(
            x, E5M2, column_sum=True, return_inverse=True, stats=stats
        )
        stored, stored_scale = kernels.cast_current(x, E4M3, stats=stats)
        rest = kernels.quantize(x, E4M3, row=False, shift=x[0], stats=stats)[1:3], kernels.row_sums(x)
        return codes, codes_t, sums, stored, stored_scale, *kernels.visible_scale(scale, inverse), *rest[0], *rest[1]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in ((17, 40), (8, 33)):
        x = torch.randn(shape, requires_grad=True)
        stats, compiled_stats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for got, want in zip(compiled(x, compiled_stats), step(x, stats), strict=True):
            assert_same_bits(got, want)
            assert not got.requires_grad
        assert torch.equal(stats, compiled_stats)
