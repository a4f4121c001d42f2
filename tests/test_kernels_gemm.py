"""The scaled GEMM against FP64, within the error of one rounding of its output and of FP32 sums."""

import pytest
import torch

from octavo import kernels
from octavo.formats import E4M3, E5M2


def operands(m: int, n: int, k: int, fmt_a=E4M3, fmt_b=E4M3, scale_a: float = 32.0, scale_b: float = 0.25):
    a = kernels.cast(torch.randn(m, k), torch.tensor(16.0), fmt_a.dtype)
    b = kernels.cast(torch.randn(n, k), torch.tensor(16.0), fmt_b.dtype)
    return a, b, torch.tensor(scale_a), torch.tensor(scale_b)


def exact(a, b, sa, sb):
    return a.double() @ b.double().t() / (sa.double() * sb.double())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 32, 64), (27, 48, 80), (128, 256, 512), (64, 16, 0)], ids=str)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_scaled_mm_nt(shape, formats, out_dtype, seed):
    m, n, k = shape
    a, b, sa, sb = operands(m, n, k, *formats)
    out = kernels.scaled_mm_nt(a, b, sa, sb, out_dtype)
    want = exact(a, b, sa, sb)
    terms = a.double().abs() @ b.double().abs().t() / (sa.double() * sb.double())
    bound = torch.finfo(out_dtype).eps / 2 * want.abs() + max(k, 1) * 2.0**-24 * terms
    assert out.shape == (m, n) and out.dtype == out_dtype
    assert ((out.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias(out_dtype, seed):
    a, b, sa, sb = operands(20, 32, 48)
    bias = torch.randn(32).to(out_dtype)
    out = kernels.scaled_mm_nt(a, b, sa, sb, out_dtype, bias=bias)
    want = exact(a, b, sa, sb) + bias.double()
    assert (
        (out.double() - want).abs() <= 4 * torch.finfo(out_dtype).eps * (exact(a, b, sa, sb).abs() + bias.abs()) + 1e-5
    ).all()


def test_extreme_scales_do_not_overflow(seed):
    """The product of the scales is not representable, the result is."""
    a, b, _, _ = operands(16, 16, 32)
    out = kernels.scaled_mm_nt(a, b, torch.tensor(2.0**100), torch.tensor(2.0**-126), torch.float32)
    assert torch.allclose(out.double(), exact(a, b, torch.tensor(2.0**100), torch.tensor(2.0**-126)), rtol=1e-5)
    out = kernels.scaled_mm_nt(a, b, torch.tensor(2.0**120), torch.tensor(2.0**60), torch.float32)
    assert not out.any()


def test_scales_are_not_rounded_to_the_output_dtype(seed):
    a, b, sa, sb = operands(128, 128, 64, scale_a=44.8 * 1.0037, scale_b=1 / 3)
    out = kernels.scaled_mm_nt(a, b, sa, sb, torch.bfloat16)
    want = exact(a, b, sa, sb)
    big = want.abs() > want.abs().mean()
    assert ((out.double() / want - 1)[big].mean()).abs() < 2e-4


def test_nan_codes_poison_their_row_and_column(seed):
    a, b, sa, sb = operands(16, 32, 16)
    a[3, 5] = torch.nan
    out = kernels.scaled_mm_nt(a, b, sa, sb, torch.bfloat16)
    assert out[3].isnan().all() and out[torch.arange(16) != 3].isfinite().all()


def test_mismatched_k_is_named():
    a, b, sa, sb = operands(16, 16, 32)
    with pytest.raises(ValueError, match=r"\(16, 32\).*\(16, 16\).*K"):
        kernels.scaled_mm_nt(a, b[:, :16], sa, sb, torch.bfloat16)


def test_two_e5m2_operands_are_refused():
    a, b, sa, sb = operands(16, 16, 32, E5M2, E5M2)
    with pytest.raises(ValueError, match="both E5M2"):
        kernels.scaled_mm_nt(a, b, sa, sb, torch.bfloat16)


def test_compiled_equals_eager(seed):
    a, b, sa, sb = operands(16, 32, 48)

    def gemm(a, b, sa, sb):
        return kernels.scaled_mm_nt(a, b, sa, sb, torch.bfloat16, fast_accum=True)

    assert torch.equal(torch.compile(gemm, fullgraph=True, backend="aot_eager")(a, b, sa, sb), gemm(a, b, sa, sb))
    args = (a, b, sa, sb, torch.bfloat16, False, None)
    torch.library.opcheck(torch.ops.octavo.scaled_mm_nt, args, test_utils="test_faketensor")
