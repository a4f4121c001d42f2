"""The kernels of norms against their references: codes and maxima bit for bit from equal statistics, sums within stated bounds.

The references run on the same device. Without a GPU the kernels can be interpreted, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, bits, spread_out

from octavo import kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.reference.norm import normalize

pytestmark = [] if INTERPRETED else pytest.mark.gpu
needs_gpu = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
SHAPES = [(m, k) for m in (0, 1, 2, 15, 16, 17) for k in (1, 2, 15, 16, 17, 257)] + [(257, 33)]
SHAPES += [(256, 384), (512, 768), (1024, 136), (100, 1000), (7, 5120), (5, 8192), (5, 8193), (3, 16_384), (2, 20_000)]
SHAPES += [] if INTERPRETED else [(16_384, 4096), (5000, 8192), (3000, 12_288)]
centered_or_not = pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])


@pytest.fixture
def cuda():
    from octavo.kernels import cuda

    if INTERPRETED:
        convert_exactly()
    return cuda


def inputs(m: int, k: int, centered: bool, dtype: torch.dtype = torch.bfloat16):
    """x with rows of many magnitudes and, for LayerNorm, a mean; weight; bias."""
    x = (torch.randn(m, k, device=DEVICE) + 0.5) * torch.exp2(torch.empty(m, 1, device=DEVICE).uniform_(-6, 6))
    weight = 1 + torch.randn(k, device=DEVICE) / 4
    return x.to(dtype), weight, torch.randn(k, device=DEVICE) / 4 if centered else None


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """The matrix itself, and views of the same size of other strides and offsets that hold other values of it."""
    m, k = x.shape
    big = torch.cat([x, x, x], 0).repeat(1, 3)
    return [x, big[1 : m + 1, 3 : k + 3], big[: 2 * m : 2, 1 : 2 * k + 1 : 2], x.t().contiguous().t()]


def check_stats(cuda, x, weight, bias, centered) -> tuple[torch.Tensor | None, torch.Tensor]:
    """mean and rstd of the kernel, after comparing them with FP64, the amax with the reference of the same statistics."""
    mean, rstd, amax = cuda.norm_stats(x, weight, bias, EPS, centered=centered)
    if not INTERPRETED:  # which runs one program after the other
        again = cuda.norm_stats(x, weight, bias, EPS, centered=centered)
        assert all(one is None or torch.equal(one, other) for one, other in zip((mean, rstd, amax), again, strict=True))
    assert_stats(x, weight, bias, centered, mean, rstd, amax)
    return mean, rstd


def assert_stats(x, weight, bias, centered, mean, rstd, amax) -> None:
    assert (mean is None) != centered
    if x.numel():
        exact = x.double()
        exact_mean = exact.mean(1) if centered else torch.zeros_like(rstd)
        exact_rstd = 1 / ((exact - exact_mean[:, None]).square().mean(1) + EPS).sqrt()
        assert not centered or ((mean - exact_mean).abs() <= 2**-20 * exact.abs().mean(1)).all()
        assert ((rstd / exact_rstd - 1).abs() <= 2**-19).all()
        assert amax == reference.amax(normalize(x, weight, bias, mean, rstd))


def check_add(cuda, x, addend, weight, bias, centered) -> None:
    """The sum has the bits of the reference; from matrices that begin at multiples of 16 bytes, statistics have those of `norm_stats`."""
    total, *stats = cuda.add_norm_stats(x, addend, weight, bias, EPS, centered=centered)
    assert total.is_contiguous()
    assert_same_bits(total, x + addend)
    assert_stats(total, weight, bias, centered, *stats)
    if x.is_contiguous() and addend.is_contiguous():
        for one, other in zip(stats, cuda.norm_stats(total, weight, bias, EPS, centered=centered), strict=True):
            assert one is other is None or torch.equal(one, other)


def check_cast(cuda, x, weight, bias, mean, rstd, fmt, scale: float = 40.0) -> None:
    counts, want_counts = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    args = (x, weight, bias, mean, rstd, scalar(scale), fmt.dtype)
    want = reference.norm_cast(*args, stats=want_counts)
    for one, other in zip(cuda.norm_cast(*args, stats=counts), want, strict=True):
        assert_same_bits(one, other)
    assert torch.equal(counts, want_counts)
    for row, col in ((True, False), (False, True)):
        codes, codes_t, amax = cuda.norm_cast(*args, row=row, col=col)
        assert (codes is not None) == row and (codes_t is not None) == col
        assert_same_bits(*(codes, want[0]) if row else (codes_t, want[1]))
        assert_same_bits(amax, want[2])
        codes, codes_t, none = cuda.norm_cast(*args, row=row, col=col, amax=False)
        assert none is None
        assert_same_bits(*(codes, want[0]) if row else (codes_t, want[1]))


def check_backward(cuda, dy, x, weight, mean, rstd, residual_grad) -> None:
    args = (dy, x, weight, mean, rstd, residual_grad)
    dx, dweight, dbias, amax = cuda.norm_backward(*args)
    if not INTERPRETED:
        again = cuda.norm_backward(*args)
        first = (dx, dweight, dbias, amax)
        assert all(one is None or torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert_same_bits(amax, reference.amax(dx))
    assert dx.dtype == x.dtype and dx.is_contiguous() and (dbias is None) == (mean is None)
    m, k = x.shape
    n = (x.double() - (0 if mean is None else mean.double()[:, None])) * rstd.double()[:, None]
    g = dy.double() * weight.double()
    along, level = (g * n).sum(1, keepdim=True) / max(k, 1), g.sum(1, keepdim=True) / max(k, 1)
    exact = (g - n * along - (0 if mean is None else level)) * rstd.double()[:, None]
    terms = g.abs().sum(1, keepdim=True) / max(k, 1) + n.abs() * (g * n).abs().sum(1, keepdim=True) / max(k, 1)
    terms = (g.abs() + terms) * rstd.double()[:, None]
    if residual_grad is not None:
        exact += residual_grad.double()
    finfo = torch.finfo(x.dtype)
    rounding = 0.51 * finfo.eps * exact.abs() + finfo.smallest_normal * finfo.eps
    assert ((dx - exact).abs() <= rounding + 2**-19 * terms).all()
    summed = (m / 128 + 32) * 2.0**-24
    assert ((dweight - (dy.double() * n).sum(0)).abs() <= summed * (dy.double() * n).abs().sum(0)).all()
    if dbias is not None:
        assert ((dbias - dy.double().sum(0)).abs() <= summed * dy.double().abs().sum(0)).all()


@centered_or_not
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(cuda, shape, centered, seed):
    x, weight, bias = inputs(*shape, centered)
    mean, rstd = check_stats(cuda, x, weight, bias, centered)
    dy, residual_grad = (torch.randn(shape, device=DEVICE).to(x.dtype) for _ in range(2))
    check_cast(cuda, x, weight, bias, mean, rstd, E4M3)
    check_backward(cuda, dy, x, weight, mean, rstd, residual_grad)


@centered_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(17, 33), (128, 64)] + ([] if INTERPRETED else [(40, 16_384)]), ids=str)
def test_dtypes(cuda, shape, weight_dtype, dtype, centered, seed):
    x, weight, bias = inputs(*shape, centered, dtype)
    weight, bias = weight.to(weight_dtype), None if bias is None else bias.to(weight_dtype)
    mean, rstd = check_stats(cuda, x, weight, bias, centered)
    check_cast(cuda, x, weight, bias, mean, rstd, E5M2, 0.3)
    dy = torch.randn(shape, device=DEVICE)
    for residual_grad in (None, dy.to(dtype)):
        check_backward(cuda, dy.to(dtype), x, weight, mean, rstd, residual_grad)
    check_backward(cuda, dy, x, weight, mean, rstd, dy)


@centered_or_not
@pytest.mark.parametrize("shape", [(33, 50), (6, 600)], ids=str)
def test_views(cuda, shape, centered, seed):
    x, weight, bias = inputs(*shape, centered)
    gradient = torch.randn(shape, device=DEVICE).to(x.dtype)
    for view, dy, residual_grad in zip(views(x), reversed(views(gradient)), views(gradient), strict=True):
        check_add(cuda, view, dy, weight, bias, centered)
        mean, rstd = check_stats(cuda, view, weight, bias, centered)
        check_cast(cuda, view, weight, bias, mean, rstd, E4M3)
        check_backward(cuda, dy, view, weight, mean, rstd, residual_grad)
    weights = torch.stack([weight, weight + 1], 1)[:, 1]
    mean, rstd = check_stats(cuda, x, weights, bias, centered)
    check_cast(cuda, x, weights, bias, mean, rstd, E4M3)


@centered_or_not
@pytest.mark.parametrize("shape", [(20, 40), (128, 64), (3, 600)], ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_show(cuda, value, shape, centered, seed):
    x, weight, bias = inputs(*shape, centered)
    x[2, 7] = value
    mean, rstd, amax = cuda.norm_stats(x, weight, bias, EPS, centered=centered)
    assert amax.isnan()
    check_cast(cuda, x, weight, bias, mean, rstd, E4M3)
    dx, dweight, _, amax = cuda.norm_backward(x, x, weight, mean, rstd, None)
    assert amax.isnan()
    assert dx[2].isnan().any() and dx[[0, 1]].isfinite().all() and dweight[7].isnan()


@centered_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_from_any_statistics(cuda, dtype, centered, seed):
    """Zeros of both signs, infinities, NaN, values that saturate and that vanish: codes equal for whatever mean and rstd."""
    x, weight = spread_out((256, 130), -8, 8).to(dtype).to(DEVICE), spread_out(130, -3, 3).to(DEVICE)
    mean, rstd = spread_out(256, -3, 3).to(DEVICE) if centered else None, spread_out(256, -3, 3).abs().to(DEVICE)
    bias = spread_out(130, -3, 3).to(DEVICE) if centered else None
    for scale in (1.0, 0.3, 2.0**10, torch.nan):
        check_cast(cuda, x, weight, bias, mean, rstd, E4M3, scale)
    clean = [None if one is None else one.nan_to_num(0.0, 2.0, -2.0) for one in (x, weight, bias, mean, rstd)]
    for scale in (1.0, 2.0**-7, 2.0**120):
        check_cast(cuda, *clean, E5M2, scale)


@centered_or_not
def test_padding_is_zero_even_if_the_scale_is_nan(cuda, centered, seed):
    x, weight, bias = inputs(17, 5, centered)
    mean, rstd, _ = cuda.norm_stats(x, weight, bias, EPS, centered=centered)
    codes, codes_t, _ = cuda.norm_cast(x, weight, bias, mean, rstd, scalar(torch.nan), E4M3.dtype)
    assert codes[:17, :5].float().isnan().all()
    assert not bits(codes)[17:].any() and not bits(codes)[:, 5:].any()
    assert_same_bits(codes_t, codes.t())


# --- on a GPU only ---


@needs_gpu
@centered_or_not
def test_compiled_equals_eager_in_one_graph(centered, seed):
    def step(x, weight, bias):
        mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
        scale = kernels.scale_from_amax(amax, E4M3.max)
        codes, codes_t, again = kernels.norm_cast(x, weight, bias, mean, rstd, scale, E4M3.dtype)
        return codes, codes_t, again, *kernels.norm_backward(x, x, weight, mean, rstd, x), mean, rstd

    compiled = torch.compile(step, fullgraph=True)
    for shape in ((100, 96), (257, 80)):
        tensors = inputs(*shape, centered)
        for got, want in zip(compiled(*tensors), step(*tensors), strict=True):
            assert got is want is None or torch.equal(got.float(), want.float())


@needs_gpu
def test_no_host_synchronisation(seed):
    x, weight, bias = inputs(64, 128, True)
    counts, scale = torch.zeros(2, dtype=torch.int64, device="cuda"), scalar(16.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mean, rstd, _ = kernels.norm_stats(x, weight, bias, EPS, centered=True)
        kernels.norm_cast(x, weight, bias, mean, rstd, scale, E4M3.dtype, stats=counts)
        kernels.norm_backward(x, x, weight, mean, rstd, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.slow
@centered_or_not
def test_B20_more_than_two_to_the_31_elements(centered, seed):
    m, k, tail = 2**19 + 64, 4096, 128
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    x[-tail:], weight, bias = inputs(tail, k, centered)
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    last_mean = None if mean is None else mean[-tail:]
    codes, codes_t, again = kernels.norm_cast(x, weight, bias, mean, rstd, scalar(16.0), E4M3.dtype)
    want = reference.norm_cast(x[-tail:], weight, bias, last_mean, rstd[-tail:], scalar(16.0), E4M3.dtype)
    assert_same_bits(codes[m - tail :], want[0])
    assert_same_bits(codes_t[:, m - tail :], want[1])
    assert amax == again == want[2]
    del codes, codes_t
    dx, dweight, _, _ = kernels.norm_backward(x, x, weight, mean, rstd, x)
    last = kernels.norm_backward(x[-tail:], x[-tail:], weight, last_mean, rstd[-tail:], x[-tail:])
    assert_same_bits(dx[-tail:], last[0])
    torch.testing.assert_close(dweight, last[1], rtol=1e-4, atol=1e-2)
