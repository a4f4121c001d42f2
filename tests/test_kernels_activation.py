"""The references of the activation kernels against PyTorch's functions and their gradients, and against the separate steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same_bits, spread_out

from octavo import kernels
from octavo.formats import E4M3, E5M2
from octavo.kernels.reference.activation import GATED, activate, activate_backward

KINDS = tuple(GATED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 3), (5, 0), (1, 1), (1, 16), (15, 17), (33, 48), (64, 100))
ONE = torch.ones(())


def inputs(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (da, h) for a of that shape."""
    m, width = shape
    h = torch.randn(m, 2 * width if GATED[kind] else width) * 2
    return torch.randn(m, width).to(dtype), h.to(dtype)


def of_pytorch(h: torch.Tensor, kind: str) -> torch.Tensor:
    if GATED[kind]:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(h, approximate="tanh")


def gradient_of_pytorch(da: torch.Tensor, h: torch.Tensor, kind: str) -> torch.Tensor:
    h = h.detach().requires_grad_()
    return torch.autograd.grad(of_pytorch(h, kind), h, da)[0]


def exact(h: torch.Tensor, kind: str) -> torch.Tensor:
    """In FP64, and without the sum in ½·(1 + tanh u) that cancels."""
    if GATED[kind]:
        return of_pytorch(h.double(), kind)
    x = h.double()
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def exact_gradient(da: torch.Tensor, h: torch.Tensor, kind: str) -> torch.Tensor:
    h = h.detach().double().requires_grad_()
    return torch.autograd.grad(exact(h, kind), h, da.double())[0]


def every_word(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of BF16 or FP16, [256, 256]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def gates(x: torch.Tensor, kind: str) -> torch.Tensor:
    """h with `x` where the function is not linear."""
    return torch.cat([x, torch.ones_like(x)], 1) if GATED[kind] else x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_is_that_of_pytorch(kind, dtype):
    """NaN, infinities, zeros and what overflows inside included."""
    x = every_word(dtype).float()
    h, da = gates(x, kind), torch.ones_like(x)
    got, want = activate(h, kind), of_pytorch(h, kind)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~got.isnan()])
    finite = want.isfinite()
    assert ((got - want).abs() <= x.abs() * 2.0**-22)[finite].all()
    best = exact(h, kind)
    assert ((got - best).abs() <= best.abs() * 2.0**-15 + 2.0**-119)[finite].all()

    grad, want = activate_backward(da, h, kind), gradient_of_pytorch(da, h, kind)
    assert torch.equal(grad.isnan(), want.isnan())
    finite = want.isfinite()
    assert ((grad - want).abs() <= want.abs() * 2.0**-21 + 2.0**-18)[finite].all()
    best = exact_gradient(da, h, kind)
    assert ((grad - best).abs() <= best.abs() * 2.0**-15 + 2.0**-21)[finite & (h.abs() < 1e10)].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_those_of_the_separate_steps(kind, shape, seed):
    for dtype in DTYPES:
        da, h = inputs(kind, shape, dtype)
        a = exact(h, kind).float().to(dtype)
        scale = kernels.scale_from_amax(kernels.activation_amax(h, kind), E4M3.max)
        codes, codes_t, amax = kernels.activation_cast(h, kind, scale, E4M3.dtype)
        assert amax == kernels.activation_amax(h, kind)
        torch.testing.assert_close(amax, kernels.amax(a), rtol=2**-7, atol=0)
        steps = kernels.cast_transpose(a, scale, E4M3.dtype)[0]
        assert codes.shape == steps.shape and codes.dtype == E4M3.dtype
        assert (
            (kernels.uncast(codes, ONE) - kernels.uncast(steps, ONE))
            .abs()
            .le(kernels.uncast(steps, ONE).abs() / 8 + 2.0**-9)
            .all()
        )
        assert (codes.view(torch.uint8) != steps.view(torch.uint8)).sum() <= 0.01 * a.numel() + 1
        assert_same_bits(codes_t, codes.t())

        scale = kernels.scale_from_amax(kernels.activation_backward_amax(da, h, kind), E5M2.max)
        codes, codes_t, amax, column_sum = kernels.activation_backward_cast(
            da, h, kind, scale, E5M2.dtype, bias_sum=True
        )
        dh = exact_gradient(da, h, kind).float().to(dtype)
        assert amax == kernels.activation_backward_amax(da, h, kind)
        torch.testing.assert_close(amax, kernels.amax(dh), rtol=2**-7, atol=0)
        steps = kernels.cast_transpose(dh, scale, E5M2.dtype)[0]
        assert codes.shape == steps.shape
        assert (codes.view(torch.uint8) != steps.view(torch.uint8)).sum() <= 0.01 * dh.numel() + 1
        assert_same_bits(codes_t, codes.t())
        assert column_sum is not None and column_sum.dtype == torch.float32
        torch.testing.assert_close(column_sum, dh.sum(0, dtype=torch.float32), rtol=1e-5, atol=dh.numel() * 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_codes_are_the_activation(kind, seed):
    """Round trip: within half a step of E4M3 and E5M2, or of their smallest values."""
    da, h = inputs(kind, (48, 64))
    scale = kernels.scale_from_amax(kernels.activation_amax(h, kind), E4M3.max)
    codes, _, _ = kernels.activation_cast(h, kind, scale, E4M3.dtype)
    a = exact(h, kind)
    assert ((kernels.uncast(codes, scale) - a).abs() <= a.abs() * 2.0**-4 * 1.001 + E4M3.smallest / scale).all()
    scale = kernels.scale_from_amax(kernels.activation_backward_amax(da, h, kind), E5M2.max)
    codes, _, _, none = kernels.activation_backward_cast(da, h, kind, scale, E5M2.dtype)
    dh = exact_gradient(da, h, kind)
    assert none is None
    assert ((kernels.uncast(codes, scale) - dh).abs() <= dh.abs() * 2.0**-3 * 1.001 + E5M2.smallest / scale).all()


@pytest.mark.parametrize("kind", KINDS)
def test_operands_and_counts(kind, seed):
    da, h = inputs(kind, (20, 33))
    h[3, 5], scale = 100.0, torch.tensor(64.0)
    stats, want = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    codes, codes_t, amax = kernels.activation_cast(h, kind, scale, E4M3.dtype, stats=stats)
    kernels.cast(activate(h, kind), scale, E4M3.dtype, stats=want)
    assert torch.equal(stats, want) and stats[0] > 0
    for row, col in ((True, False), (False, True), (False, False)):
        one, one_t, again = kernels.activation_cast(h, kind, scale, E4M3.dtype, row=row, col=col)
        assert (one is not None) == row and (one_t is not None) == col and again == amax
        assert_same_bits(codes if one is None else one, codes)
        assert_same_bits(codes_t if one_t is None else one_t, codes_t)
        one, one_t, _, _ = kernels.activation_backward_cast(da, h, kind, scale, E5M2.dtype, row=row, col=col)
        assert (one is not None) == row and (one_t is not None) == col
    stats.zero_(), want.zero_()
    kernels.activation_backward_cast(da, h, kind, scale, E5M2.dtype, stats=stats)
    kernels.cast(activate_backward(da, h, kind), scale, E5M2.dtype, stats=want)
    assert torch.equal(stats, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show(kind, bad, seed):
    da, h = inputs(kind, (17, 20))
    h[4, 3] = bad
    assert not kernels.activation_amax(h, kind).isfinite()
    assert kernels.activation_backward_amax(da, h, kind).isnan()
    codes, _, amax = kernels.activation_cast(h, kind, torch.tensor(torch.nan), E4M3.dtype)
    assert codes[:17, :20].isnan().all() and not codes.float()[17:].any() and not codes.float()[:, 20:].any()
    assert not amax.isfinite()
    da, h = inputs(kind, (17, 20))
    da[1, 2] = bad
    assert not kernels.activation_backward_amax(da, h, kind).isfinite()


def test_padding_of_gated_gradients_is_at_the_end(seed):
    da, h = inputs("swiglu", (20, 21))
    codes, codes_t, _, column_sum = kernels.activation_backward_cast(da, h, "swiglu", ONE, E5M2.dtype, bias_sum=True)
    assert codes.shape == (32, 48) and codes_t.shape == (48, 32) and column_sum.shape == (42,)
    assert not codes.float()[20:].any() and not codes.float()[:, 42:].any()
    dh = gradient_of_pytorch(da, h, "swiglu")
    torch.testing.assert_close(codes.float()[:20, :42], dh, rtol=0.13, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_rows_and_gradients_that_are_detached(kind, seed):
    da, h = inputs(kind, (12, 16))
    wide, wide_da = torch.cat([h, h], 1), torch.cat([da, da], 1)
    for view, view_da in ((wide[:, : h.shape[1]], wide_da[:, 16:]), (h.t().contiguous().t(), da.t().contiguous().t())):
        view.requires_grad_()
        got = kernels.activation_backward_cast(view_da, view, kind, ONE, E5M2.dtype, bias_sum=True)
        want = kernels.activation_backward_cast(da, h, kind, ONE, E5M2.dtype, bias_sum=True)
        for one, other in zip(got, want, strict=True):
            assert not one.requires_grad
            torch.testing.assert_close(one.float(), other.float())


def test_what_does_not_fit_is_refused():
    h, da = torch.zeros(4, 6), torch.zeros(4, 6)
    with pytest.raises(ValueError, match="'gelu', 'swiglu'"):
        kernels.activation_amax(h, "relu")
    with pytest.raises(ValueError, match="flatten"):
        kernels.activation_amax(torch.zeros(2, 3, 4), "gelu")
    with pytest.raises(ValueError, match="even"):
        kernels.activation_amax(torch.zeros(4, 5), "swiglu")
    with pytest.raises(ValueError, match=r"\(4, 3\), not \(4, 6\)"):
        kernels.activation_backward_amax(da, h, "swiglu")
    with pytest.raises(ValueError, match="0-d"):
        kernels.activation_cast(h, "gelu", torch.ones(1), E4M3.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_operators(kind, seed):
    """Schemas and fake implementations tell the truth, and a compiled region has the same bits."""
    op, checks = torch.ops.octavo, ("test_schema", "test_faketensor")
    da, h = inputs(kind, (17, 22), torch.bfloat16)
    torch.library.opcheck(op.activation_amax, (h, kind), test_utils=checks)
    torch.library.opcheck(op.activation_backward_amax, (da, h, kind), test_utils=checks)
    for row, col, amax, count in ((True, True, True, False), (True, False, False, True), (False, True, False, False)):
        args = (ONE, E4M3.dtype, row, col)
        torch.library.opcheck(op.activation_cast, (h, kind, *args, amax, count), test_utils=checks)
        torch.library.opcheck(op.activation_backward_cast, (da, h, kind, *args, row, amax, count), test_utils=checks)

    for col, bias_sum, grad in ((True, True, da), (False, False, da), (True, False, None)):
        args = (E4M3.dtype, grad, True, col, bias_sum, True, torch.zeros((), dtype=torch.int32))
        torch.library.opcheck(op.activation_quantize, (h, kind, *args), test_utils=checks)

    def steps(da, h):
        hint = torch.zeros((), dtype=torch.int32)
        quantized = [
            *kernels.activation_quantize(h, kind, E4M3, row=False, hint=hint),
            *kernels.activation_quantize(h, kind, E5M2, da=da, col=False, bias_sum=True, power_of_two=False),
        ]
        amax = kernels.activation_amax(h, kind)
        forward = kernels.activation_cast(h, kind, kernels.scale_from_amax(amax, E4M3.max), E4M3.dtype, row=False)
        amax = kernels.activation_backward_amax(da, h, kind)
        scale = kernels.scale_from_amax(amax, E5M2.max)
        return *quantized, *forward, *kernels.activation_backward_cast(da, h, kind, scale, E5M2.dtype, bias_sum=True)

    for got, want in zip(torch.compile(steps, fullgraph=True, backend="aot_eager")(da, h), steps(da, h), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_same_bits(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_wild_values_saturate(kind, seed):
    h = spread_out((32, 32), -10, 10)
    codes, _, _ = kernels.activation_cast(h, kind, ONE, E4M3.dtype)
    a = of_pytorch(h, kind)
    assert torch.equal(codes.float()[: a.shape[0], : a.shape[1]].isnan(), a.isnan())
    assert codes.float().nan_to_num(0).abs().max() <= E4M3.max
