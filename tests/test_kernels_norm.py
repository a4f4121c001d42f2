"""Norms that write FP8: statistics and gradients against FP64, codes against the separate operations, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same_bits, bits

from octavo import kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels.reference.norm import normalize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 17, 257)
EPS = 1e-5
centered_or_not = pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])


def inputs(m: int, k: int, centered: bool, dtype: torch.dtype = torch.float32):
    """x with rows of many magnitudes and, for LayerNorm, a mean; weight; bias."""
    x = (torch.randn(m, k) + 0.5) * torch.exp2(torch.empty(m, 1).uniform_(-6, 6))
    return x.to(dtype), 1 + torch.randn(k) / 4, torch.randn(k) / 4 if centered else None


def plain_norm(x, weight, bias, centered, eps=EPS):
    if centered:
        return F.layer_norm(x, x.shape[1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[1:], weight, eps)


@centered_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 15, 64, 257, 4096])
def test_statistics_are_those_of_fp64(k, dtype, centered, seed):
    x, weight, bias = inputs(33, k, centered, dtype)
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    exact = x.double()
    exact_mean = exact.mean(1) if centered else torch.zeros(33)
    exact_rstd = 1 / ((exact - exact_mean[:, None]).square().mean(1) + EPS).sqrt()
    if centered:
        assert ((mean - exact_mean).abs() <= 2**-21 * exact.abs().mean(1)).all()
    assert ((rstd / exact_rstd - 1).abs() <= 2**-20).all()
    assert (mean is None) != centered and rstd.dtype == amax.dtype == torch.float32
    assert amax == normalize(x, weight, bias, mean, rstd).abs().max().float()


@centered_or_not
def test_the_norm_is_that_of_pytorch(centered, seed):
    x, weight, bias = inputs(50, 768, centered)
    mean, rstd, _ = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    y = normalize(x, weight, bias, mean, rstd)
    want = plain_norm(x.double(), weight.double(), None if bias is None else bias.double(), centered)
    assert ((y - want).abs() <= 2**-21 * (want.abs() + weight.abs() * 8)).all()


@centered_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("m", SIZES)
def test_codes_are_those_of_the_separate_operations(m, k, fmt, dtype, centered, seed):
    x, weight, bias = inputs(m, k, centered, dtype)
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    scale = torch.tensor(40.0)
    counts, want_counts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    got = kernels.norm_cast(x, weight, bias, mean, rstd, scale, fmt.dtype, stats=counts)
    y = normalize(x, weight, bias, mean, rstd)
    assert y.dtype == dtype
    want = kernels.cast_transpose_amax(y, scale, fmt.dtype, stats=want_counts)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)
    assert torch.equal(counts, want_counts)
    if k:
        assert_same_bits(amax, want[2])
    codes, none, _ = kernels.norm_cast(x, weight, bias, mean, rstd, scale, fmt.dtype, col=False)
    assert none is None
    assert_same_bits(codes, want[0])
    none, codes_t, _ = kernels.norm_cast(x, weight, bias, mean, rstd, scale, fmt.dtype, row=False)
    assert none is None
    assert_same_bits(codes_t, want[1])


@centered_or_not
def test_rows_are_independent_and_strides_do_not_matter(centered, seed):
    x, weight, bias = inputs(40, 100, centered, torch.bfloat16)
    order = torch.randperm(40)
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    for view in (x[order], x.t().contiguous().t()[order]):
        other_mean, other_rstd, other_amax = kernels.norm_stats(view, weight, bias, EPS, centered=centered)
        assert torch.equal(other_rstd, rstd[order]) and other_amax == amax
        assert not centered or torch.equal(other_mean, mean[order])
    wide = torch.cat([x, x + 1], 1)[:, 100:]
    got = kernels.norm_cast(wide, weight, bias, mean, rstd, torch.tensor(8.0), E4M3.dtype)
    want = kernels.norm_cast(wide.contiguous(), weight, bias, mean, rstd, torch.tensor(8.0), E4M3.dtype)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@centered_or_not
@pytest.mark.parametrize("exponent", [-30, -3, 17])
def test_a_power_of_two_in_x_changes_no_code(exponent, centered, seed):
    """Without eps a norm forgets the scale of its input."""
    x, weight, bias = inputs(20, 64, centered)
    results = []
    for one in (x, x * 2.0**exponent):
        mean, rstd, _ = kernels.norm_stats(one, weight, bias, 0.0, centered=centered)
        results.append(kernels.norm_cast(one, weight, bias, mean, rstd, torch.tensor(16.0), E4M3.dtype))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@centered_or_not
def test_rows_of_zeros_and_constant_rows(centered):
    x = torch.stack([torch.zeros(32), torch.full((32,), 3.0)])
    weight, bias = torch.ones(32), torch.full((32,), 0.5) if centered else None
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    y = normalize(x, weight, bias, mean, rstd)
    assert y.isfinite().all() and amax == y.abs().max()
    assert torch.equal(y[0], bias if centered else torch.zeros(32))
    torch.testing.assert_close(y[1], bias if centered else torch.ones(32))


@centered_or_not
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_show(value, centered, seed):
    x, weight, bias = inputs(20, 30, centered)
    x[3, 7] = value
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    assert amax.isnan()
    codes, codes_t, amax = kernels.norm_cast(x, weight, bias, mean, rstd, torch.tensor(16.0), E4M3.dtype)
    assert amax.isnan() and codes[3, 7].isnan() and codes_t[7, 3].isnan()
    assert codes.float()[[0, 1, 2, 4]].isfinite().all()


@centered_or_not
def test_padding_is_zero_even_if_the_scale_is_nan(centered, seed):
    x, weight, bias = inputs(17, 5, centered)
    mean, rstd, _ = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    codes, codes_t, _ = kernels.norm_cast(x, weight, bias, mean, rstd, torch.tensor(torch.nan), E4M3.dtype)
    assert codes[:17, :5].float().isnan().all()
    assert not bits(codes)[17:].any() and not bits(codes)[:, 5:].any()
    assert_same_bits(codes_t, codes.t())


@centered_or_not
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 15, 257, 1024])
def test_gradients_are_those_of_autograd_in_fp64(k, dtype, with_residual, centered, seed):
    x, weight, bias = inputs(33, k, centered, dtype)
    dy = torch.randn(33, k).to(dtype)
    residual_grad = torch.randn(33, k).to(dtype) if with_residual else None
    mean, rstd, _ = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
    dx, dweight, dbias, amax = kernels.norm_backward(dy, x, weight, mean, rstd, residual_grad)
    leaves = [None if one is None else one.double().requires_grad_() for one in (x, weight, bias)]
    y = plain_norm(*leaves, centered)
    want = torch.autograd.grad(y, [one for one in leaves if one is not None], dy.double())
    exact = want[0] if residual_grad is None else want[0] + residual_grad.double()
    g = (dy.double() * weight).abs()
    n = normalize(x.double(), torch.ones(k), None, mean, rstd).abs().double()
    terms = rstd[:, None] * (g + g.mean(1, keepdim=True) + n * (g * n).mean(1, keepdim=True))
    finfo = torch.finfo(dtype)
    assert dx.dtype == dtype and dweight.dtype == torch.float32 and torch.equal(amax, kernels.amax(dx))
    assert ((dx - exact).abs() <= 0.51 * finfo.eps * exact.abs() + 2**-18 * terms + finfo.smallest_normal).all()
    dy_sum = dy.double().abs().sum(0)
    assert ((dweight - want[1]).abs() <= 2**-18 * (dy_sum + (dy.double().abs() * n).sum(0))).all()
    if centered:
        assert dbias.dtype == torch.float32 and ((dbias - want[2]).abs() <= 2**-20 * dy_sum).all()
    else:
        assert dbias is None


@centered_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_on_the_way_is_the_sum_before(dtype, centered, seed):
    x, weight, bias = inputs(33, 257, centered, dtype)
    addend = torch.randn(33, 257).to(dtype)
    total, *stats = kernels.add_norm_stats(x, addend, weight, bias, EPS, centered=centered)
    assert_same_bits(total, x + addend)
    for one, other in zip(stats, kernels.norm_stats(x + addend, weight, bias, EPS, centered=centered), strict=True):
        assert one is other is None or torch.equal(one, other)


@centered_or_not
def test_the_gradient_has_no_part_along_what_a_norm_forgets(centered, seed):
    """It is orthogonal to n and, for LayerNorm, to the constant row."""
    x, weight, bias = inputs(20, 512, centered)
    dy = torch.randn(20, 512)
    mean, rstd, _ = kernels.norm_stats(x, weight, bias, 0.0, centered=centered)
    dx, _, _, _ = kernels.norm_backward(dy, x, weight, mean, rstd)
    n = normalize(x, torch.ones(512), None, mean, rstd)
    size = dx.norm(dim=1)
    assert ((dx * n).sum(1).abs() <= 1e-4 * size).all()
    if centered:
        assert (dx.sum(1).abs() <= 1e-4 * size).all()


def test_the_residual_is_added_before_the_rounding(seed):
    x, weight, bias = inputs(20, 64, True)
    dy, residual_grad = torch.randn(20, 64), torch.randn(20, 64)
    mean, rstd, _ = kernels.norm_stats(x, weight, bias, EPS, centered=True)
    alone, *sums = kernels.norm_backward(dy, x, weight, mean, rstd)
    both, *same_sums = kernels.norm_backward(dy, x, weight, mean, rstd, residual_grad)
    assert torch.equal(both, alone + residual_grad) and all(map(torch.equal, sums[:2], same_sums[:2]))
    low = kernels.norm_backward(dy, x.bfloat16(), weight, mean, rstd, residual_grad.bfloat16())[0]
    exact = kernels.norm_backward(dy, x.bfloat16().float(), weight, mean, rstd, residual_grad.bfloat16())[0]
    assert_same_bits(low, exact.bfloat16())


def test_nothing_is_differentiable(seed):
    x, weight, bias = (one.requires_grad_() for one in inputs(4, 16, True))
    mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=True)
    codes, _, _ = kernels.norm_cast(x, weight, bias, mean, rstd, torch.tensor(1.0), E4M3.dtype)
    gradients = kernels.norm_backward(x, x, weight, mean, rstd, x)
    assert not any(one.requires_grad for one in (mean, rstd, amax, codes, *gradients))


def test_wrong_arguments_are_named():
    x, weight, rows, scale = torch.zeros(4, 32), torch.ones(32), torch.ones(4), torch.tensor(1.0)
    with pytest.raises(ValueError, match="flatten"):
        kernels.norm_stats(torch.zeros(2, 3, 4), weight, None, EPS, centered=False)
    with pytest.raises(ValueError, match="RMSNorm has no bias"):
        kernels.norm_stats(x, weight, weight, EPS, centered=False)
    with pytest.raises(ValueError, match="RMSNorm has no bias"):
        kernels.norm_cast(x, weight, weight, None, rows, scale, E4M3.dtype)
    with pytest.raises(ValueError, match=r"weight .* has shape \(32,\), not \(4,\)"):
        kernels.norm_stats(x, rows, None, EPS, centered=True)
    with pytest.raises(ValueError, match=r"statistic .* has shape \(4,\), not \(32,\)"):
        kernels.norm_cast(x, weight, None, None, weight, scale, E4M3.dtype)
    with pytest.raises(ValueError, match="0-d"):
        kernels.norm_cast(x, weight, None, None, rows, rows, E4M3.dtype)
    with pytest.raises(ValueError, match="shape of x"):
        kernels.norm_backward(x[:3], x, weight, None, rows)
    with pytest.raises(ValueError, match="shape of x"):
        kernels.norm_backward(x, x, weight, None, rows, x[:, :3])


# --- compiled ---


def test_ops_are_functional_and_their_fakes_agree(seed):
    x, weight, shift = inputs(5, 20, True)
    level, rstd, _ = kernels.norm_stats(x, weight, shift, EPS, centered=True)
    scale, op = torch.tensor(2.0), torch.ops.octavo
    checks = ("test_schema", "test_faketensor")
    for mean, bias in ((level, shift), (level, None), (None, None)):
        torch.library.opcheck(op.norm_stats, (x, weight, bias, EPS, mean is not None), test_utils=checks)
        torch.library.opcheck(op.add_norm_stats, (x, x + 1, weight, bias, EPS, mean is not None), test_utils=checks)
        for row, col, amax, count in ((True, True, True, True), (False, True, False, False), (True, False, True, True)):
            args = (x, weight, bias, mean, rstd, scale, E4M3.dtype, row, col, amax, count)
            torch.library.opcheck(op.norm_cast, args, test_utils=checks)
        for residual_grad in (None, x):
            torch.library.opcheck(op.norm_backward, (x, x, weight, mean, rstd, residual_grad), test_utils=checks)


@centered_or_not
def test_compiled_equals_eager_in_one_graph(centered, seed):
    def step(x, weight, bias, counts):
        mean, rstd, amax = kernels.norm_stats(x, weight, bias, EPS, centered=centered)
        scale = kernels.scale_from_amax(amax, E4M3.max)
        cast = kernels.norm_cast(x, weight, bias, mean, rstd, scale, E4M3.dtype, stats=counts)
        return *cast, *kernels.norm_backward(x, x, weight, mean, rstd, x), mean, rstd, scale

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in ((17, 40), (8, 33)):
        x, weight, bias = inputs(*shape, centered)
        counts, compiled_counts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        x.requires_grad_()
        got, want = compiled(x, weight, bias, compiled_counts), step(x, weight, bias, counts)
        for one, other in zip(got, want, strict=True):
            assert one is other is None or (torch.equal(one.float(), other.float()) and not one.requires_grad)
        assert torch.equal(counts, compiled_counts)
