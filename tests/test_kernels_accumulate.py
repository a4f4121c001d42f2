"""Accumulation in place has the bits of an FP32 sum that is cast afterwards, and gradients use it."""

import pytest
import torch
from oracle import assert_same_bits

from octavo import kernels
from octavo.convert import convert
from octavo.formats import E4M3, E5M2
from octavo.kernels.reference.cast import CHUNK
from octavo.tensor import ScaledTensor, cast
from octavo.tensor.storage import Storage, uncast

SHAPES = [(0,), (), (1,), (15,), (16,), (17, 3), (257,), (4095,), (4096,), (4097,), (3, 0, 5), (CHUNK + 4097,)]
ZEROS = {"none": 0, "some": 0.5, "all": 1}


def codes_of(shape, zeros: float = 0.1, low: int = -12) -> torch.Tensor:
    """Finite E4M3 codes over most binades, with zeros of both signs."""
    x = torch.randn(shape) * torch.exp2(torch.empty(shape).uniform_(low, 8))
    return kernels.cast(torch.where(torch.rand(shape) < zeros, x * 0, x), torch.ones(()), E4M3.dtype)


def sum_of(shape, zeros: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite E4M11 words, (codes, residual)."""
    x = torch.randn(shape) * torch.exp2(torch.empty(shape).uniform_(-18, 8))
    return kernels.cast_residual(torch.where(torch.rand(shape) < zeros, x * 0, x), torch.ones(()))


def random_scale(power_of_two: bool, low: float = -30, high: float = 30) -> torch.Tensor:
    exponent = torch.empty(()).uniform_(low, high)
    return torch.exp2(exponent.round() if power_of_two else exponent)


def check(codes, residual, scale, other, other_scale) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accumulates in place, compares with the separate steps, and returns codes, residual and scale."""
    kept = other.clone(), other_scale.clone()
    storage = Storage(codes.clone(), scale.clone(), None if residual is None else residual.clone(), None)
    storage.requantise(
        storage.real(torch.float32).add_(uncast(other, other_scale, None, None, torch.float32)), residual=True
    )
    result = kernels.accumulate(codes, residual, scale, other, other_scale)
    assert residual is None or result is residual
    assert_same_bits(codes, storage.codes)
    assert torch.equal(result, storage.residual) and result.dtype == torch.int8
    assert_same_bits(scale, storage.scale)
    assert_same_bits(other, kept[0])
    assert torch.equal(other_scale, kept[1])
    return codes, result, scale


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_the_separate_steps(shape, first, power_of_two, seed):
    codes, residual = (codes_of(shape), None) if first else sum_of(shape)
    check(codes, residual, random_scale(power_of_two), codes_of(shape), random_scale(power_of_two))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("zeros", ZEROS.values(), ids=list(ZEROS))
def test_zeros_keep_their_signs(zeros, first, seed):
    codes, residual = (codes_of(999, zeros), None) if first else sum_of(999, zeros)
    codes, residual, scale = check(codes, residual, random_scale(True), codes_of(999, zeros), random_scale(True))
    if zeros == 1:
        assert scale == 1 and not residual.any() and (codes.float() == 0).all()
        assert 0 < codes.float().signbit().sum() < 999  # -0 where both were


@pytest.mark.parametrize("where", ["sum", "other"])
@pytest.mark.parametrize("first", [True, False])
def test_one_nan_makes_all_codes_nan(first, where, seed):
    codes, residual = (codes_of(5000), None) if first else sum_of(5000)
    other = codes_of(5000)
    place = torch.randint(5000, ())
    (codes if where == "sum" else other).view(torch.uint8)[place] = 0x7F + 128 * int(torch.randint(2, ()))
    if residual is not None and where == "sum":
        residual[place] = 0
    codes, residual, scale = check(codes, residual, random_scale(True), other, random_scale(True))
    assert codes.float().isnan().all() and not residual.any() and scale == 1


@pytest.mark.parametrize(
    "exponents", [(-126, -126), (-120, 3), (-118, 126), (126, 126), (110, 90), (-101, 101), (-100, 100)], ids=str
)
def test_scales_at_the_ends_of_their_range(exponents, seed):
    """Values saturate at the largest of FP32, and sums of them are infinite; at the other end results are subnormal."""
    for factor in (1.0, 1.25):
        scale, other_scale = (torch.tensor(2.0**e * (factor if -126 < e < 126 else 1)) for e in exponents)
        codes, residual, scale = check(*sum_of(3000), scale, codes_of(3000), other_scale)
        assert bool(codes.float().isnan().all()) == (exponents == (-126, -126))


def test_an_infinite_sum_is_seen(seed):
    full = torch.full((20,), 448.0).to(E4M3.dtype)
    codes, _, scale = check(full.clone(), None, torch.tensor(2.0**-119), full.clone(), torch.tensor(2.0**-119))
    assert codes.float().isnan().all() and scale == 1
    codes, _, scale = check(
        full.clone(), None, torch.tensor(2.0**-119), (-full.float()).to(E4M3.dtype), torch.tensor(2.0**-119)
    )
    assert (codes.float() == 0).all() and scale == 1


def test_accumulation_keeps_the_sum(seed):
    """A constant gradient over 320 micro-batches."""
    g = codes_of(4096, zeros=0, low=0)
    scale = random_scale(True)
    real = kernels.uncast(g, scale).double()
    codes, residual, own = g.clone(), None, scale.clone()
    for _ in range(319):
        residual = kernels.accumulate(codes, residual, own, g, scale)
    total = kernels.uncast_residual(codes, residual, own).double()
    assert abs(total.abs().sum() / (320 * real.abs().sum()) - 1) < 0.01
    high = kernels.uncast(codes, own).double()
    assert abs(high.abs().sum() / (320 * real.abs().sum()) - 1) < 0.01


@pytest.mark.parametrize("first", [True, False])
def test_the_operator_of_compiled_regions(first, seed):
    codes, residual = (codes_of(300), None) if first else sum_of(300)
    other, scale, other_scale = codes_of(300), random_scale(True), random_scale(True)
    own = [codes.clone(), None if residual is None else residual.clone(), scale.clone()]
    want = check(codes, residual, scale, other, other_scale)
    compiled = torch.compile(kernels.accumulate, backend="aot_eager", fullgraph=True)
    low = compiled(*own, other, other_scale)
    for got, its in zip((own[0], low, own[2]), want, strict=True):
        assert_same_bits(got, its)
    inputs = (*want, other, other_scale, first)
    torch.library.opcheck(torch.ops.octavo.accumulate, inputs, test_utils="test_faketensor")


def gradient(*shape: int) -> ScaledTensor:
    return cast(torch.randn(shape), E4M3, residual_on_add=True)


def count_calls(monkeypatch) -> list[torch.Size]:
    seen: list[torch.Size] = []
    accumulate = kernels.accumulate
    monkeypatch.setattr(
        kernels, "accumulate", lambda codes, *rest: seen.append(codes.shape) or accumulate(codes, *rest)
    )
    return seen


def test_gradients_use_it(seed, monkeypatch):
    """And raise the versions that caches compare."""
    calls = count_calls(monkeypatch)
    total, addend = gradient(20, 30), gradient(20, 30)
    parts = total.codes, total.scale
    want = total.clone().add_(addend.dequantize())
    kernels.remember_amax(total.codes, kernels.amax(total.codes))
    assert not calls
    for times in (1, 2):
        version, outer = total.codes._version, total._version
        total.add_(addend)
        assert len(calls) == times and total.codes._version > version and total._version > outer
        assert kernels.known_amax(total.codes) is None
        assert total.codes is parts[0] and total.scale is parts[1]
        assert_same_bits(total.codes, want.codes)
        assert torch.equal(total.residual, want.residual) and torch.equal(total.scale, want.scale)
        want.add_(addend.dequantize())


def test_backward_uses_it(seed, monkeypatch):
    calls = count_calls(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48))
    convert(model, "O2")
    for _ in range(3):
        model(torch.randn(48, 32)).sum().backward()
    assert calls == [(48, 32)] * 2
    torch._foreach_add_([gradient(6, 8)], [gradient(6, 8)])
    assert calls[2:] == [(6, 8)]


def others() -> dict[str, tuple[ScaledTensor, object, dict[str, float]]]:
    total = gradient(8, 16)
    return {
        "a number": (total, 0.5, {}),
        "a plain tensor": (total, torch.randn(8, 16), {}),
        "alpha": (total, gradient(8, 16), {"alpha": 0.5}),
        "broadcasting": (total, gradient(16), {}),
        "a view": (total, gradient(2, 8, 16)[1], {}),
        "blocks": (total, cast(torch.randn(8, 16), E4M3, block=8), {}),
        "a residual": (total, gradient(8, 16).add_(1.0), {}),
        "other strides": (total, cast(torch.randn(16, 8), E4M3).t().clone(), {}),
        "itself": (total, total, {}),
        "E5M2": (total, cast(torch.randn(8, 16), E5M2), {}),
    }


@pytest.mark.parametrize("name", list(others()))
def test_all_else_is_added_in_separate_steps(name, seed, monkeypatch):
    calls = count_calls(monkeypatch)
    total, other, options = others()[name]
    real = other.dequantize() if isinstance(other, ScaledTensor) else other
    want = total.dequantize().add_(real, **options)
    total.add_(other, **options)
    assert (total.dequantize() - want).abs().max() <= want.abs().max() * 2.0**-11
    assert not calls


WRONG = {
    "other is torch.float8_e5m2": {"other": torch.zeros(4, 8).to(torch.float8_e5m2)},
    r"other is torch.float8_e4m3fn \(8, 4\)": {"other": torch.zeros(8, 4).to(E4M3.dtype)},
    "codes is torch.float32": {"codes": torch.zeros(4, 8)},
    "strides": {"codes": torch.zeros(8, 4).to(E4M3.dtype).t()},
    "residual is torch.uint8": {"residual": torch.zeros(4, 8, dtype=torch.uint8)},
    r"other_scale is torch.float32 \(1,\)": {"other_scale": torch.ones(1)},
    "scale is torch.float64": {"scale": torch.ones((), dtype=torch.float64)},
}


@pytest.mark.parametrize("message", list(WRONG))
def test_errors_name_the_tensor(message):
    arguments = {
        "codes": torch.zeros(4, 8).to(E4M3.dtype),
        "residual": None,
        "scale": torch.ones(()),
        "other": torch.zeros(4, 8).to(E4M3.dtype),
        "other_scale": torch.ones(()),
    }
    with pytest.raises(ValueError, match=message):
        kernels.accumulate(**{**arguments, **WRONG[message]})
