"""The casts are exact: compared with an independent rounding in FP64 over enumerated values, never only within a tolerance."""

import math

import pytest
import torch
from oracle import assert_same_bits, bits, nearest, spread_out, values_of

from octavo import kernels
from octavo.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32

FP8 = (E4M3, E5M2)
LOW = (E4M3, E5M2, FP16)
ONE = torch.ones(())
SIZES = (0, 1, 7, 15, 16, 17, 33)


# --- amax and scales ---


def test_amax_equals_the_definition(seed):
    for x in (torch.randn(33, 7), torch.randn(5, 6).bfloat16(), torch.randn(8, 8).half().t(), -torch.rand(9)):
        assert kernels.amax(x) == x.abs().max().float() and kernels.amax(x).dtype == torch.float32
    x = torch.randn(3, 37)
    assert torch.equal(kernels.amax(x, block=16), torch.stack([b.abs().amax(1) for b in x.split(16, 1)], 1))


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_amax_of_codes(fmt, seed):
    codes = spread_out((50, 3), -5, 5).nan_to_num().clamp(-fmt.max, fmt.max).to(fmt.dtype)
    assert kernels.amax(codes) == codes.float().abs().max()
    codes[4, 1] = torch.nan
    assert kernels.amax(codes.t()).isnan()


def test_amax_of_special_values():
    assert kernels.amax(torch.tensor([1.0, torch.nan, torch.inf])).isnan()
    assert kernels.amax(torch.tensor([1.0, -torch.inf])) == torch.inf
    assert kernels.amax(torch.empty(0, 4)) == 0
    assert math.copysign(1, kernels.amax(torch.tensor([-0.0, -0.0]))) == 1
    assert kernels.amax(torch.empty(3, 0), block=16).shape == (3, 0)


def test_scale_goldens():
    amax = torch.tensor([10.0, 10000.0, 448.0, 449.0, 0.0, torch.inf, torch.nan])
    assert kernels.scale_from_amax(amax, 448.0).tolist() == [32, 1 / 32, 1, 0.5, 1, 1, 1]
    assert kernels.scale_from_amax(torch.tensor(10.0), 448.0, margin=2) == 8
    assert kernels.scale_from_amax(torch.tensor(10.0), 448.0, power_of_two=False) == torch.tensor(448.0) / 10


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=repr)
def test_scale_is_the_largest_power_of_two_that_fits(fmt, seed):
    amax = torch.randint(1, 0x7F800000, (20000,), dtype=torch.int32).view(torch.float32)
    scale = kernels.scale_from_amax(amax, fmt.max).double()
    assert (scale.log2() == scale.log2().floor()).all()
    assert ((scale >= 2.0**-126) & (scale <= 2.0**126)).all()
    inside = (scale > 2.0**-126) & (scale < 2.0**126)
    assert (amax.double() * scale <= fmt.max)[scale > 2.0**-126].all()
    assert (amax.double() * scale * 2 > fmt.max)[inside].all()


def test_A1_zero_tensor():
    x = torch.zeros(64, 64)
    scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
    assert scale == 1
    codes = kernels.cast(x, scale, E4M3.dtype)
    assert not bits(codes).any() and not kernels.uncast(codes, scale).any()
    x = torch.randn(2, 512)
    x[1, 128:256] = 0
    scale = kernels.scale_from_amax(kernels.amax(x, block=128), E4M3.max)
    assert scale[1, 1] == 1 and scale.isfinite().all()
    back = kernels.uncast(kernels.cast(x, scale, E4M3.dtype, block=128), scale, block=128)
    assert not back[1, 128:256].any() and (back - x).abs().max() <= x.abs().max() / 16


@pytest.mark.parametrize("value", [1e-38, 1e-40, 1e-45, 3e38])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_A4_extreme_amax(value, power_of_two, fmt):
    x = torch.full((16, 16), value)
    scale = kernels.scale_from_amax(kernels.amax(x), fmt.max, power_of_two)
    assert 0 < scale < torch.inf and 0 < 1 / scale < torch.inf
    codes = kernels.cast(x, scale, fmt.dtype)
    back = kernels.uncast(codes, scale)
    assert back.isfinite().all()
    small = (x * scale).abs() < fmt.tiny
    assert (small | ((back - x).abs() <= x * fmt.eps / 2)).all()
    assert (~small | ((back - x).abs() <= fmt.smallest / scale)).all()


def test_A5_tiny_block_beside_a_large_one():
    x = torch.cat([torch.full((128, 128), 3e-39), torch.full((128, 128), 1e3)], 1)
    scale = kernels.scale_from_amax(kernels.amax(x, block=128), E4M3.max)
    back = kernels.uncast(kernels.cast(x, scale, E4M3.dtype, block=128), scale, block=128)
    assert back.isfinite().all() and ((back - x).abs() <= x / 16).all()


@pytest.mark.parametrize("exponent", [-100, -66, -20, 0, 66])
def test_A7_no_floor_on_amax(exponent, seed):
    """Scaling by a power of two changes no code, however small the block: there is no floor above the 2^-118 of the format."""
    x = torch.randn(64, 128)
    codes, tiny_codes = (
        kernels.cast(y, kernels.scale_from_amax(kernels.amax(y, block=128), 448.0), E4M3.dtype, block=128)
        for y in (x, x * 2.0**exponent)
    )
    assert torch.equal(bits(codes), bits(tiny_codes))


# --- rounding to nearest ---


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_every_code_survives(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    values = codes.float()
    for scale in (ONE, torch.tensor(2.0**20), torch.tensor(0.3)):
        finite = values.isfinite()
        back = kernels.uncast(codes, scale)
        assert torch.equal(bits(kernels.cast(back, scale, fmt.dtype))[finite], bits(codes)[finite])
        assert kernels.cast(back, scale, fmt.dtype).float()[values.isnan()].isnan().all()


@pytest.mark.parametrize("fmt", LOW, ids=repr)
def test_ties_between_neighbours_go_to_even(fmt):
    values = values_of(fmt)
    ties = (values[1:] + values[:-1]) / 2
    assert torch.equal(ties.float().double(), ties)
    even = torch.arange(len(ties)) + torch.arange(len(ties)) % 2
    for sign in (1, -1):
        x = sign * ties.float()
        assert torch.equal(kernels.cast(x, ONE, fmt.dtype).double(), sign * values[even])
        below = kernels.cast(torch.nextafter(x, 0 * x), ONE, fmt.dtype).double()
        above = kernels.cast(torch.nextafter(x, sign * torch.full_like(x, torch.inf)), ONE, fmt.dtype).double()
        assert torch.equal(below, sign * values[:-1]) and torch.equal(above, sign * values[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", LOW, ids=repr)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-7, 0.3, 2.0**120])
def test_cast_equals_the_oracle(dtype, fmt, scale, seed):
    x = spread_out(20000).to(dtype)
    scale = torch.tensor(scale)
    assert_same_bits(kernels.cast(x, scale, fmt.dtype), nearest(x.float() * scale, fmt))


@pytest.mark.parametrize("fmt", LOW, ids=repr)
@pytest.mark.parametrize("exponent", [-126, -30, 0, 9, 126])
def test_all_bf16_words(fmt, exponent):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scale = torch.tensor(2.0**exponent)
    assert_same_bits(kernels.cast(x, scale, fmt.dtype), nearest(x.float() * scale, fmt))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=repr)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_special_values(fmt, rounding):
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    codes = kernels.cast(x, torch.tensor(16.0), fmt.dtype, rounding=rounding, key=kernels.make_key(0, 0, 0, "cpu"))
    assert codes.float()[4].isnan()
    assert codes.float()[[0, 1, 2, 3, 5, 6]].tolist() == [0, 0, fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert torch.equal(bits(codes)[:2] != 0, torch.tensor([False, True]))
    poisoned = kernels.cast(
        x, torch.tensor(torch.nan), fmt.dtype, rounding=rounding, key=kernels.make_key(0, 0, 0, "cpu")
    )
    assert poisoned.float().isnan().all()


def test_fp32_and_bf16_targets(seed):
    x = torch.randn(1000)
    assert torch.equal(kernels.cast(x, ONE, FP32.dtype), x)
    assert torch.equal(kernels.cast(x, ONE, BF16.dtype), x.bfloat16())


@pytest.mark.parametrize("fmt", LOW, ids=repr)
def test_counts_of_saturated_and_flushed(fmt, seed):
    x = spread_out(10000, -30, 30)
    stats = torch.tensor([5, 7])
    codes = kernels.cast(x, torch.tensor(0.25), fmt.dtype, stats=stats)
    y = x.double() * 0.25
    assert stats[0] - 5 == (y.abs() > fmt.max).sum()
    assert stats[1] - 7 == ((y != 0) & (codes.double() == 0)).sum() > 0


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_F10_casting_again_changes_nothing(power_of_two, fmt, seed):
    """With its scale kept, a block returns the same codes; with a power-of-two scale taken anew, the same values."""
    x = torch.randn(10000, 64) * torch.exp2(torch.randint(-30, 30, (10000, 1)))
    scale = kernels.scale_from_amax(kernels.amax(x, block=64), fmt.max, power_of_two)
    codes = kernels.cast(x, scale, fmt.dtype, block=64)
    back = kernels.uncast(codes, scale, block=64)
    assert torch.equal(bits(kernels.cast(back, scale, fmt.dtype, block=64)), bits(codes))
    anew = kernels.scale_from_amax(kernels.amax(back, block=64), fmt.max, power_of_two)
    codes_anew = kernels.cast(back, anew, fmt.dtype, block=64)
    if power_of_two:
        assert torch.equal(kernels.uncast(codes_anew, anew, block=64), back)
    else:
        assert torch.equal(bits(codes_anew), bits(codes))


# --- shapes, strides and blocks ---


def test_B14_slices_equal_their_copies(seed):
    big = torch.randn(8, 64)
    for view in (big[3], big[:, 5:37], big[1:, 7], big.t(), big[:, ::2], big[2].expand(5, 64), big[1, 2]):
        for x in (view, view.bfloat16().clone().as_strided(view.size(), view.clone().stride())):
            codes = kernels.cast(x, ONE, E4M3.dtype)
            assert codes.is_contiguous() and codes.shape == x.shape
            assert_same_bits(codes, kernels.cast(x.clone(memory_format=torch.contiguous_format), ONE, E4M3.dtype))
            assert torch.equal(kernels.uncast(codes, ONE), codes.float())
    assert_same_bits(kernels.cast(big.bfloat16().t(), ONE, E5M2.dtype), nearest(big.bfloat16().t(), E5M2))


def test_B17_empty_tensors_and_absurd_blocks():
    for shape in ((0,), (0, 16), (16, 0)):
        x = torch.zeros(shape)
        scale = kernels.scale_from_amax(kernels.amax(x), 448.0)
        codes = kernels.cast(x, scale, E4M3.dtype)
        assert codes.shape == shape and kernels.uncast(codes, scale).shape == shape and scale == 1
        scale = kernels.scale_from_amax(kernels.amax(x, block=8), 448.0)
        assert kernels.cast(x, scale, E4M3.dtype, block=8).shape == shape
    for block in (0, -1, 2**64):
        with pytest.raises(ValueError, match="block is"):
            kernels.cast(torch.zeros(4, 4), torch.ones(4, 1), E4M3.dtype, block=block)
    with pytest.raises(ValueError, match="0-d"):
        kernels.amax(torch.zeros(()), block=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", LOW, ids=repr)
def test_finite_codes_have_finite_values(fmt, dtype):
    largest = torch.finfo(dtype).max
    codes = torch.tensor([[fmt.max, -fmt.max, torch.nan, 0.0]]).to(fmt.dtype)
    scale = torch.tensor(2.0**-126)
    want = [largest, -largest, torch.nan, 0.0]
    for x in (kernels.uncast(codes, scale, dtype), kernels.uncast(codes, scale.view(1, 1), dtype, block=4)):
        torch.testing.assert_close(x[0], torch.tensor(want, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    if fmt is not E4M3:
        infinite = torch.tensor([torch.inf, -torch.inf]).to(fmt.dtype)
        assert kernels.uncast(infinite, ONE, dtype).tolist() == [torch.inf, -torch.inf]


def test_B18_error_is_smooth_in_the_block(seed):
    x = torch.randn(64, 4096)
    ratios = []
    for block in (64, 128, 256, 512, 1024, 2048, 4096):
        scale = kernels.scale_from_amax(kernels.amax(x, block=block), E4M3.max, power_of_two=False)
        back = kernels.uncast(kernels.cast(x, scale, E4M3.dtype, block=block), scale, block=block)
        ratios.append(10 * math.log10(x.square().sum() / (back - x).square().sum()))
    assert min(ratios) > 31 and max(ratios) - min(ratios) < 1.5
    assert all(abs(a - b) < 0.5 for a, b in zip(ratios, ratios[1:], strict=False))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_blocks_equal_one_cast_each(length, rounding, seed):
    x, key = spread_out((3, length)), kernels.make_key(1, 2, 3, "cpu")
    scale = torch.exp2(torch.randint(-3, 4, (3, -(-length // 16))))
    codes = kernels.cast(x, scale, E4M3.dtype, block=16, rounding=rounding, key=key, offset=11)
    back = kernels.uncast(codes, scale, block=16)
    for i in range(3):
        for b in range(scale.shape[1]):
            part = slice(16 * b, min(16 * b + 16, length))
            options = {"rounding": rounding, "key": key, "offset": 11 + i * length + 16 * b}
            assert_same_bits(codes[i, part], kernels.cast(x[i, part], scale[i, b], E4M3.dtype, **options))
            assert_same_bits(back[i, part], codes[i, part].float() / scale[i, b])


def test_wrong_arguments_are_named():
    x = torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"has shape \(4, 2\), not \(4, 1\)"):
        kernels.cast(x, torch.ones(4, 1), E4M3.dtype, block=16)
    with pytest.raises(ValueError, match=r"has shape \(\), not \(1,\)"):
        kernels.cast(x, torch.ones(1), E4M3.dtype)
    with pytest.raises(ValueError, match="make_key"):
        kernels.cast(x, ONE, E4M3.dtype, rounding="stochastic")
    with pytest.raises(ValueError, match="'up'"):
        kernels.cast(x, ONE, E4M3.dtype, rounding="up")
    with pytest.raises(ValueError, match="flatten"):
        kernels.cast_transpose(torch.zeros(2, 3, 4), ONE, E4M3.dtype)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_cast_transpose(m, k, fmt, seed):
    big = spread_out((m + 3, 2 * k + 1), -8, 8)
    scale = torch.tensor(0.5)
    for x in (big[:m, :k].contiguous(), big[3:, 1::2], big[:m, :k].t().contiguous().t(), big[:m, :k].bfloat16()):
        stats, stats_t = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        want = kernels.cast(x, scale, fmt.dtype, stats=stats)
        codes, codes_t, maximum = kernels.cast_transpose_amax(x, scale, fmt.dtype, stats=stats_t)
        assert torch.equal(stats, stats_t)
        assert codes.shape == (-(-m // 16) * 16, -(-k // 16) * 16) and codes_t.shape == codes.t().shape
        assert codes.is_contiguous() and codes_t.is_contiguous()
        assert_same_bits(codes_t, codes.t())
        assert_same_bits(codes[:m, :k].contiguous(), want)
        assert not bits(codes)[m:].any() and not bits(codes)[:, k:].any()
        assert torch.equal(maximum.nan_to_num(-1), kernels.amax(x).nan_to_num(-1))
        none, only_t = kernels.cast_transpose(x, scale, fmt.dtype, row=False)
        assert none is None
        assert_same_bits(only_t, codes_t)
        only, none = kernels.cast_transpose(x, scale, fmt.dtype, col=False)
        assert none is None
        assert_same_bits(only, codes)
        assert_same_bits(kernels.transpose_codes(want), codes_t)
        assert_same_bits(kernels.pad_codes(want), codes)


# --- compiled ---


def test_ops_are_functional_and_their_fakes_agree(seed):
    x, scale = torch.randn(5, 20), torch.tensor(2.0)
    key = kernels.make_key(0, 0, 0, "cpu")
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.octavo
    torch.library.opcheck(op.amax, (x, None), test_utils=checks)
    torch.library.opcheck(op.amax, (x, 16), test_utils=checks)
    for args in ((E4M3.dtype, "nearest", None, 0, None, True), (E5M2.dtype, "stochastic", key, 3, None, False)):
        torch.library.opcheck(op.cast, (x, scale, *args), test_utils=checks)
    for row, col, count, amax in ((True, True, True, True), (False, True, False, False), (True, False, True, False)):
        torch.library.opcheck(op.cast_transpose, (x, scale, E4M3.dtype, row, col, count, amax), test_utils=checks)
    torch.library.opcheck(op.transpose_codes, (x.to(E4M3.dtype),), test_utils="test_faketensor")
    torch.library.opcheck(op.scale_from_amax, (x, 448.0, True, 0), test_utils=checks)
    torch.library.opcheck(op.cast_residual, (x, scale), test_utils=checks)
    codes, residual = kernels.cast_residual(x, scale)
    torch.library.opcheck(op.uncast_residual, (codes, residual, scale, torch.bfloat16), test_utils="test_faketensor")
    torch.library.opcheck(op.uncast, (codes, scale, torch.float16, None), test_utils="test_faketensor")


def test_compiled_equals_eager_in_one_graph(seed):
    def step(x, stats):
        scale = kernels.scale_from_amax(kernels.amax(x), E4M3.max)
        codes, codes_t = kernels.cast_transpose(x, scale, E4M3.dtype, stats=stats)
        key = kernels.make_key(1, torch.tensor(2), 3, "cpu")
        noisy = kernels.cast(x, scale, E5M2.dtype, rounding="stochastic", key=key)
        high, low = kernels.cast_residual(x, scale)
        return codes, codes_t, kernels.uncast(codes, scale), noisy, kernels.uncast_residual(high, low, scale), scale

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in ((17, 40), (8, 33)):
        x = torch.randn(shape, requires_grad=True)
        stats, compiled_stats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for got, want in zip(compiled(x, compiled_stats), step(x, stats), strict=True):
            assert_same_bits(got, want)
            assert not got.requires_grad
        assert torch.equal(stats, compiled_stats)
