"""What a head's backward reads: a cast of x - shift and the sums of rows equal their references, bit for bit or within their bound.

Without a GPU the kernels can be interpreted, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits
from test_kernels_gpu import DTYPES, FP8, on, views

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
needs_gpu = pytest.mark.gpu
SHAPES = [(1, 9), (9, 1), (2, 2), (17, 33), (128, 64), (129, 331), (256, 384)]
ROWS = [
    (1, 1),
    (1, 7),
    (7, 1),
    (33, 16),
    (600, 20),
    (40, 331),
    (5, 2048),
    (5, 2049),
    (3, 8192),
    (3, 9001),
    (2, 50_257),
    (1, 131_081),
]
FEW_LONG, MANY_SHORT = (3, 1_000_003), (20_001, 129)


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


def check_shift(cuda, x: torch.Tensor, shift: torch.Tensor, fmt: Format, power_of_two: bool = True) -> None:
    """All results are those of the difference that PyTorch makes."""
    stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    want = cuda.quantize(x - shift, fmt, power_of_two=power_of_two, stats=want_stats)
    got = cuda.quantize(x, fmt, power_of_two=power_of_two, stats=stats, shift=shift)
    for one, expected in zip(got[:4], want[:4], strict=True):
        assert_same_bits(one, expected)
    assert torch.equal(stats, want_stats) and got[4] is None
    for other, expected in zip(
        reference.quantize(x, fmt, power_of_two=power_of_two, shift=shift)[:4], want, strict=False
    ):
        assert_same_bits(other, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k"), SHAPES, ids=str)
def test_shift(cuda, m, k, dtype, seed):
    base = torch.randn(m, k) * torch.exp2(torch.empty(m, k).uniform_(-12, 4))
    for x in views(on(base.to(dtype))) if m < 100 else [on(base.to(dtype))]:
        check_shift(cuda, x, x.float().mean(0).to(dtype), E4M3)
    row = on(torch.randn(2 * k).to(dtype))
    check_shift(cuda, x, row[::2], E5M2, power_of_two=False)
    check_shift(cuda, x, row[k:], E4M3)
    check_shift(cuda, x, x[-1].clone(), E4M3)  # zeros, and their signs
    whole, whole_t, *_ = cuda.quantize(x, E4M3, shift=row[k:])
    for wanted in ((True, False), (False, True)):
        codes, codes_t, *_ = cuda.quantize(x, E4M3, row=wanted[0], col=wanted[1], shift=row[k:])
        assert (codes is not None, codes_t is not None) == wanted
        assert_same_bits(whole if codes is None else codes, whole)
        assert_same_bits(whole_t if codes_t is None else codes_t, whole_t)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["x", "shift", "both"])
def test_shift_of_what_is_not_finite(cuda, where, bad, seed):
    for m, k in ((40, 80), (128, 64)):
        x, shift = on(torch.randn(m, k).bfloat16()), on(torch.randn(k).bfloat16())
        if where != "shift":
            x[torch.randint(m, ()), 5] = bad
        if where != "x":
            shift[5] = bad
        for fmt in FP8:
            check_shift(cuda, x, shift, fmt)
        assert cuda.quantize(x, E4M3, shift=shift)[2].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_shift_that_overflows(cuda, dtype, seed):
    """A difference beyond the dtype is infinite, as PyTorch's is."""
    x, shift = on(torch.randn(20, 40).to(dtype)), on(torch.randn(40).to(dtype))
    x[3, 4], shift[4] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    check_shift(cuda, x, shift, E4M3)
    assert cuda.quantize(x, E4M3, shift=shift)[2].isnan()


@pytest.mark.parametrize(("m", "k"), [(17_000, 20), (4100, 300)])
def test_shift_of_many_rows(cuda, m, k, seed):
    """More than the programs that run at a time have tiles; the largest is anywhere."""
    from octavo.kernels.cuda.shifted import shifted_amax_parts

    x, shift = on(torch.randn(m, k).bfloat16()), on(torch.randn(k).bfloat16())
    for row in (m - 1, torch.randint(m, ())):
        x[row, torch.randint(k, ())] = 10 + torch.rand(()).item()
        amax = shifted_amax_parts(x, shift).max().view(torch.float32)
        assert_same_bits(amax, reference.amax(x - shift))
        x[row] = 0


@needs_gpu
@pytest.mark.parametrize("shape", [(50_304, 4096), (50_257, 768), (128_256, 4096)], ids=str)
def test_shift_of_a_head(cuda, shape, seed):
    x = 0.02 * torch.randn(shape, device=DEVICE).bfloat16() + torch.randn(shape[1], device=DEVICE).bfloat16()
    check_shift(cuda, x, x.mean(0, dtype=torch.float32).bfloat16(), E4M3)


def check_rows(cuda, x: torch.Tensor) -> None:
    """No term takes part in more additions than this, each wrong by at most 2^-24 of the sum of magnitudes."""
    sums, amax = cuda.row_sums(x)
    again, _ = cuda.row_sums(x)
    assert_same_bits(sums, again)
    assert_same_bits(amax, reference.row_sums(x)[1])
    assert sums.dtype == torch.float32 and sums.shape == x.shape[:1] and sums.is_contiguous()
    depth = x.shape[1] / 8192 + 30
    for rows, got in zip(x.split(1024), sums.split(1024), strict=True):
        exact, bound = rows.double().sum(1), rows.double().abs().sum(1) * depth * 2.0**-24
        finite = exact.isfinite()
        assert ((got.double() - exact).abs() <= bound)[finite].all() and not got[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), *ROWS], ids=str)
def test_row_sums(cuda, m, n, dtype, seed):
    x = on((torch.randn(m, n) * torch.exp2(torch.empty(m, n).uniform_(-12, 4))).to(dtype))
    if not x.numel():
        sums, amax = cuda.row_sums(x)
        assert torch.equal(sums, torch.zeros(m, device=DEVICE)) and amax == 0
        return
    for view in views(x) if m * n < 10_000 else [x]:
        check_rows(cuda, view)
    check_rows(cuda, torch.cat([x, x], 1)[:, 1 : n + 1])  # rows that begin anywhere
    for bad in (torch.inf, torch.nan):
        x[torch.randint(m, ()), torch.randint(n, ())] = bad
        check_rows(cuda, x)
        assert not cuda.row_sums(x)[1].isfinite()


@pytest.mark.parametrize("at", [0, 7, 8, 2048, 9000, -9, -1])
@pytest.mark.parametrize("n", [9001, 9008])
def test_no_column_is_left_out_or_taken_twice(cuda, n, at, seed):
    x = torch.zeros(3, n)
    x[:, at] = on(torch.tensor([1.0, -2.0, 4.0])).cpu()
    sums, amax = cuda.row_sums(on(x.bfloat16()))
    assert sums.tolist() == [1.0, -2.0, 4.0] and amax == 4
    ones, _ = cuda.row_sums(on(torch.ones(3, n)))
    assert ones.tolist() == [n] * 3


@needs_gpu
@pytest.mark.parametrize(
    "shape",
    [(16_384, 128_256), (16_384, 50_304), (2560, 50_304), (4096, 50_257), FEW_LONG, MANY_SHORT, (1_000_000, 17)],
    ids=str,
)
def test_row_sums_of_a_head(cuda, shape, seed):
    check_rows(cuda, torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_())


@needs_gpu
def test_row_sums_beyond_31_bits(cuda, seed):
    x = torch.empty(20_000, 128_256, dtype=torch.bfloat16, device=DEVICE).normal_()
    x[-1, -1] = 1000
    check_rows(cuda, x)
    assert cuda.row_sums(x)[1] == 1000
