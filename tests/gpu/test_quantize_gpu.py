"""Current scaling by two kernels equals its reference bit for bit, column sums within their bound.

Without a GPU the kernels can be interpreted, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, spread_out
from test_kernels_gpu import DTYPES, FP8, MATRICES, on, scalar, views

from octavo import kernels
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


def check_quantize(cuda, x: torch.Tensor, fmt: Format, unit: torch.Tensor | None, power_of_two: bool = True) -> None:
    stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    options = {"power_of_two": power_of_two, "unit": unit}
    want = reference.quantize(x, fmt, **options, stats=want_stats)
    codes, codes_t, scale, inverse, sums = cuda.quantize(x, fmt, **options, column_sum=torch.float32, stats=stats)
    for got, expected in zip((codes, codes_t, scale, inverse), want[:4], strict=True):
        assert_same_bits(got, expected)
    assert torch.equal(stats, want_stats)
    check_column_sum(sums, x)
    for row, col in ((True, False), (False, True)):
        one, one_t, *rest = cuda.quantize(x, fmt, **options, row=row, col=col)
        assert (one is None) != row and (one_t is None) != col and rest[2] is None
        assert_same_bits(codes if one is None else one, codes)
        assert_same_bits(codes_t if one_t is None else one_t, codes_t)
    known = cuda.quantize(x, fmt, **options, amax=reference.amax(x))
    for got, expected in zip(known, (*want[:4], None), strict=True):
        assert got is expected is None or assert_same_bits(got, expected) is None


def check_column_sum(sums: torch.Tensor, x: torch.Tensor) -> None:
    """No term takes part in more additions than this, each wrong by at most 2^-24 of the sum of magnitudes."""
    depth = len(x) / 8 + len(x) / 32 + 15
    assert sums.dtype == torch.float32 and sums.shape == x.shape[1:]
    exact, bound = x.double().sum(0), x.double().abs().sum(0) * depth * 2.0**-24
    finite = exact.isfinite()
    assert ((sums.double() - exact).abs() <= bound)[finite].all() and not sums[~finite].isfinite().any()


@pytest.mark.parametrize(("dtype", "fmt", "m", "k"), MATRICES, ids=str)
def test_quantize(cuda, m, k, fmt, dtype, seed):
    finite = torch.randn(m, k) * torch.exp2(torch.empty(m, k).uniform_(-20, 8))
    for x in views(on(finite.to(dtype))) if m else [on(torch.empty(0, k, dtype=dtype))]:
        check_quantize(cuda, x, fmt, None)
    check_quantize(cuda, x, fmt, scalar(0.3), power_of_two=False)
    x = on(spread_out((m, k), -8, 8).to(dtype))
    check_quantize(cuda, x, fmt, scalar(8.0))
    if m and k:
        x = finite.to(dtype)
        x[m // 2, k // 2] = torch.inf
        check_quantize(cuda, on(x), fmt, None)
        assert cuda.quantize(on(x), fmt)[2].isnan()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20, 1e37])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_quantize_of_extreme_magnitudes(cuda, size, power_of_two, seed):
    for fmt in FP8:
        check_quantize(cuda, on(torch.full((32, 48), size)), fmt, None, power_of_two)


@pytest.mark.parametrize(
    "shape",
    [(129, 1000), (256, 384), (512, 768), (1024, 136)]
    + ([] if INTERPRETED else [(1000, 3000), (16_384, 4096), (768, 3072)]),
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "fmt"), [(torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)], ids=str
)
def test_quantize_of_several_tiles(cuda, dtype, fmt, shape, seed):
    x = on(torch.randn(shape)).to(dtype)
    check_quantize(cuda, x, fmt, scalar(4.0))
    first, again = (cuda.quantize(x, fmt, column_sum=torch.float32)[4] for _ in range(2))
    assert_same_bits(first, again)
    for rounded in (torch.bfloat16, torch.float16):
        assert_same_bits(cuda.quantize(x, fmt, column_sum=rounded)[4], first.to(rounded))


def test_launches_follow_their_arguments(cuda, seed):
    """A compiled kernel is launched again only for arguments of its kind: dtypes, sizes, alignment, what is None."""
    flat = on(torch.randn(11_000))
    for _ in range(2):
        for m, k in ((32, 48), (33, 48), (32, 50), (130, 80)):
            for dtype in DTYPES:
                for offset in (0, 1, 8):
                    x = flat.to(dtype)[offset : offset + m * k].view(m, k)
                    for unit in (None, scalar(2.0)):
                        codes, codes_t, scale, _, sums = cuda.quantize(x, E4M3, unit=unit, column_sum=torch.float32)
                        want = reference.quantize(x, E4M3, unit=unit)
                        for got, expected in zip((codes, codes_t, scale), want, strict=False):
                            assert_same_bits(got, expected)
                        check_column_sum(sums, x)
                    assert_same_bits(cuda.amax(x), reference.amax(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (5, 1001), (3, 4096), (64, 80, 2)], ids=str)
def test_cast_current(cuda, shape, dtype, seed):
    for x in (torch.randn(shape), 1e-5 * torch.randn(shape), spread_out(shape)):
        x = on(x.to(dtype))
        for view in (x, x.transpose(0, -1)):
            for fmt in FP8:
                stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
                codes, scale, largest = cuda.cast_current(view, fmt, stats=stats)
                want = reference.cast_current(view, fmt, stats=want_stats)
                assert_same_bits(codes, want[0])
                assert_same_bits(scale, want[1])
                assert_same_bits(largest, want[2])
                assert_same_bits(largest, reference.amax(codes))
                assert torch.equal(stats, want_stats) and codes.is_contiguous()


@pytest.mark.parametrize("amax", [0.0, 1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("unit", [None, 0.3, 2.0**100])
def test_visible_scale(cuda, amax, unit):
    """And records the maximum, where it is finite."""
    unit = None if unit is None else scalar(unit)
    for scale, before in ((3.0, 0.0), (2.0**-126, 0.5), (2.0**126, 2.0)):
        pending = [scalar(before), scalar(before)]
        got, want = (
            module.visible_scale(scalar(scale), scalar(amax), unit, mine)
            for module, mine in zip((cuda, reference), pending, strict=True)
        )
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
        assert_same_bits(*pending)
        assert pending[0] == max(before, amax if amax < torch.inf else 0.0)
        assert_same_bits(cuda.visible_scale(scalar(scale), scalar(amax), unit)[0], want[0])


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_current_scale(cuda, power_of_two, limit):
    for amax in (0.0, 2.0**-149, 0.3, 448.0, 3e38, torch.inf, torch.nan):
        got, want = (module.current_scale(scalar(amax), limit, power_of_two) for module in (cuda, reference))
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


@pytest.mark.gpu
def test_quantize_in_a_captured_graph(seed):
    """A graph holds no state between its replays, nor any shared with launches outside of it."""
    x, w = (torch.randn(shape, device="cuda").bfloat16() for shape in ((512, 256), (384, 256)))

    def step():
        codes, codes_t, scale, sums, inverse = kernels.quantize(x, E5M2, column_sum=True, return_inverse=True)
        w_codes, _, _, _, w_inverse = kernels.quantize(w, E4M3, return_inverse=True)
        out = kernels.scaled_mm_nt(codes, w_codes, inverse, w_inverse, torch.bfloat16, inverse_scales=True)
        return codes, codes_t, scale, sums, out, *kernels.cast_current(out, E4M3)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for factor in (1e-3, 1e3, torch.inf, 1.0):
        x.copy_(torch.randn_like(x) * factor)
        graph.replay()
        for got, want in zip(outputs, step(), strict=True):
            assert_same_bits(got, want)
