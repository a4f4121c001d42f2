"""Every Triton kernel equals its reference bit for bit; the GEMM within the error of its accumulation.

The references run on the same device. Without a GPU the kernels can be interpreted, see `interpreter`.
"""

import math

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, bits, spread_out

from octavo import kernels
from octavo.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
needs_gpu = pytest.mark.gpu
FP8 = (E4M3, E5M2)
SIZES = (0, 1, 7, 15, 16, 17, 31, 33, 257)
LENGTHS = (0, 1, 7, 4095, 4096, 4097, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each kind of size makes Triton compile anew: all sizes for one pair of dtypes, one of each kind for the others.
CASTS = [(torch.bfloat16, E4M3, n) for n in LENGTHS] + [
    (d, f, n) for d in DTYPES for f in FORMATS.values() for n in (4096, 5003)
]
MATRICES = [(torch.bfloat16, E4M3, m, k) for m in SIZES for k in SIZES] + [
    (d, f, *size) for d in DTYPES for f in FP8 for size in ((17, 33), (16, 256), (1, 7))
]


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


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """The matrix itself, and views of the same size of other strides and offsets that hold other values of it."""
    m, k = x.shape
    big = torch.cat([x, x, x], 0).repeat(1, 3)
    return [
        x,
        big[1 : m + 1, 3 : k + 3],
        big[: 2 * m : 2, 1 : 2 * k + 1 : 2],
        x.t().contiguous().t(),
        x[:1].expand(m, k),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_amax(cuda, length, dtype, seed):
    x = on(torch.randn(length).to(dtype))
    assert_same_bits(cuda.amax(x), reference.amax(x))
    if length > 7:
        assert_same_bits(cuda.amax(x[3::2]), reference.amax(x[3::2]))
        x[length // 2] = torch.inf
        assert cuda.amax(x) == torch.inf
        x[length // 3] = -torch.nan
        assert cuda.amax(x).isnan()
    codes = on(torch.randn(length)).to(E4M3.dtype)
    assert_same_bits(cuda.amax(codes), reference.amax(codes))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=repr)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_scale_from_amax(cuda, fmt, power_of_two, seed):
    amax = on(torch.randint(0, 0x7FC00000, (30000,), dtype=torch.int32)).view(torch.float32)
    amax[:5] = on(torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 1e-39]))
    for x in (amax, amax[0], amax[1234], amax[:0], amax.view(100, 300).t()):
        want = reference.scale_from_amax(x, fmt.max, power_of_two, 1)
        assert_same_bits(cuda.scale_from_amax(x, fmt.max, power_of_two, 1), want)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("dtype", "fmt", "length"), CASTS, ids=str)
def test_cast(cuda, length, fmt, dtype, rounding, seed):
    x, key = on(spread_out(length).to(dtype)), kernels.make_key(seed, 1, 2, DEVICE)
    for scale, offset in ((1.0, 0), (0.3, 12345), (2.0**-9, 2**32 - 1000), (torch.nan, 7)):
        stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
        options = {"rounding": rounding, "key": key, "offset": offset}
        codes = cuda.cast(x, scalar(scale), fmt.dtype, **options, stats=stats)
        assert_same_bits(codes, reference.cast(x, scalar(scale), fmt.dtype, **options, stats=want_stats))
        assert torch.equal(stats, want_stats)
        assert_same_bits(cuda.uncast(codes, scalar(scale)), reference.uncast(codes, scalar(scale)))
        assert_same_bits(cuda.uncast(codes, scalar(scale), dtype), reference.uncast(codes, scalar(scale), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=repr)
def test_cast_of_all_words(cuda, fmt, dtype):
    x = on(torch.arange(-(2**15), 2**15, dtype=torch.int32)).to(torch.int16).view(dtype)
    for exponent in (-126, -30, -3, 0, 9, 126):
        want = reference.cast(x, scalar(2.0**exponent), fmt.dtype)
        assert_same_bits(cuda.cast(x, scalar(2.0**exponent), fmt.dtype), want)


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_cast_of_ties_and_their_neighbours(cuda, fmt):
    values = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (torch.inf, 0))
    x = on(torch.cat([values, ties, up, down]))
    for signed in (x, -x):
        assert_same_bits(cuda.cast(signed, scalar(1.0), fmt.dtype), reference.cast(signed, scalar(1.0), fmt.dtype))


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_uncast_of_all_codes(cuda, fmt):
    codes = on(torch.arange(256, dtype=torch.uint8)).view(fmt.dtype)
    for scale in (1.0, 3.0, 2.0**126, 2.0**-100, 2.0**-126):
        for dtype in DTYPES:
            assert_same_bits(cuda.uncast(codes, scalar(scale), dtype), reference.uncast(codes, scalar(scale), dtype))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", [1, 16, 100, 128, 2**30])
@pytest.mark.parametrize("shape", [(5, 7), (3, 128), (2, 3, 1000), (0, 16), (16, 0)], ids=str)
def test_blocks(cuda, shape, block, rounding, seed):
    x, key = on(spread_out(shape)), kernels.make_key(seed, 1, 2, DEVICE)
    amax = reference.amax(x, block=block)
    assert_same_bits(cuda.amax(x, block=block), amax)
    scale = reference.scale_from_amax(amax.nan_to_num(1.0), 448.0)
    options = {"rounding": rounding, "key": key, "offset": 7, "block": block}
    codes = cuda.cast(x, scale, E4M3.dtype, **options)
    assert_same_bits(codes, reference.cast(x, scale, E4M3.dtype, **options))
    assert_same_bits(cuda.uncast(codes, scale, block=block), reference.uncast(codes, scale, block=block))


@pytest.mark.parametrize("fmt", [E4M3, FP16], ids=repr)
def test_B14_views(cuda, fmt, seed):
    for x in views(on(spread_out((33, 50)))):
        assert_same_bits(cuda.cast(x, scalar(2.0), fmt.dtype), reference.cast(x, scalar(2.0), fmt.dtype))
        codes = x.clamp(-400, 400).to(fmt.dtype)
        assert_same_bits(cuda.uncast(codes.t(), scalar(2.0)), reference.uncast(codes.t(), scalar(2.0)))


@pytest.mark.parametrize(("dtype", "fmt", "m", "k"), MATRICES, ids=str)
def test_cast_transpose(cuda, m, k, fmt, dtype, seed):
    for x in views(on(spread_out((m, k), -8, 8).to(dtype))) if m else [on(torch.empty(0, k, dtype=dtype))]:
        stats, want_stats = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
        want = reference.cast_transpose_amax(x, scalar(2.0), fmt.dtype, stats=want_stats)
        codes, codes_t, amax = cuda.cast_transpose_amax(x, scalar(2.0), fmt.dtype, stats=stats)
        assert_same_bits(codes, want[0])
        assert_same_bits(codes_t, codes.t())
        assert_same_bits(amax, want[2])
        assert torch.equal(stats, want_stats)
        inner = codes[:m, :k]
        for part in (inner, inner.t()):
            want = reference.transpose_codes(part)
            assert_same_bits(cuda.transpose_codes(part), want)
            stash = torch.full((want.shape[0], want.shape[1] + 48), 7.0, device=DEVICE).to(fmt.dtype)
            columns = stash[:, 16 : 16 + want.shape[1]]
            assert cuda.transpose_codes(part, out=columns) is columns
            assert_same_bits(columns, want)
            assert (stash[:, :16].float() == 7).all() and (stash[:, -32:].float() == 7).all()
    for row, col in ((True, False), (False, True)):
        one, one_t = cuda.cast_transpose(x, scalar(2.0), fmt.dtype, row=row, col=col)
        assert (one is None) != row and (one_t is None) != col
        assert_same_bits(codes if one is None else one, codes)
        assert_same_bits(codes_t if one_t is None else one_t, codes_t)


# Whole tiles on both sides, as real layers have: (tokens, features) and (out features, features).
@pytest.mark.parametrize(
    "shape", [(1000, 3000), (129, 4096), (256, 384)] + ([] if INTERPRETED else [(65_536, 768), (768, 3072)]), ids=str
)
@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [(torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3), (torch.float32, E4M3)],
    ids=["input", "grad_output", "master", "weight"],
)
def test_cast_transpose_of_several_tiles_has_no_stray_bytes(cuda, dtype, fmt, shape, seed):
    """triton#11111: transposed 1-byte stores beside NaN-propagating maxima left stray NaN bytes."""
    for _ in range(3):
        x = on(torch.randn(shape)).to(dtype)
        codes, codes_t, amax = cuda.cast_transpose_amax(x, scalar(16.0), fmt.dtype)
        want = reference.cast_transpose(x, scalar(16.0), fmt.dtype)
        assert_same_bits(codes, want[0])
        assert_same_bits(codes_t, want[1])
        assert amax == x.abs().max()


@pytest.mark.parametrize("numel", [4096 * 1100 + 5] + ([] if INTERPRETED else [2**27 + 3]))
def test_amax_of_many_tiles_sees_every_element(cuda, numel, seed):
    x = on(torch.zeros(numel, dtype=torch.bfloat16))
    for place in (numel // 3, numel - 1):
        x[place] = -3.0
        assert cuda.amax(x) == 3
        x[place] = 0.0


def test_padding_is_zero_even_if_the_scale_is_nan(cuda):
    codes, codes_t = cuda.cast_transpose(on(torch.randn(17, 5)), scalar(torch.nan), E4M3.dtype)
    assert codes[:17, :5].float().isnan().all()
    assert not bits(codes)[17:].any() and not bits(codes)[:, 5:].any()
    assert_same_bits(codes_t, codes.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_residual(cuda, length, dtype, seed):
    x = on(spread_out(length, -20, 8).to(dtype))
    for scale in (1.0, 0.3, 2.0**-9, torch.nan):
        codes, residual = cuda.cast_residual(x, scalar(scale))
        want = reference.cast_residual(x, scalar(scale))
        assert_same_bits(codes, want[0])
        assert torch.equal(residual, want[1])
    words = on(torch.arange(2**16, dtype=torch.int32))
    codes, residual = kernels.split_e4m11(words[(words & 0x7FFF) <= 0x7E7F].to(torch.int16))
    for scale in (1.0, 3.0, 2.0**100, 2.0**-126):
        want = reference.uncast_residual(codes, residual, scalar(scale), dtype)
        assert_same_bits(cuda.uncast_residual(codes, residual, scalar(scale), dtype), want)


def test_random_bits_are_those_of_the_cpu(seed):
    for offset in (0, 2**32 - 5, 2**40):
        key = kernels.make_key(seed, 3, 4, DEVICE)
        assert key.cpu() == kernels.make_key(seed, 3, 4, "cpu")
        assert torch.equal(
            kernels.random_bits(key, offset, 100, DEVICE).cpu(), kernels.random_bits(key.cpu(), offset, 100, "cpu")
        )


# --- on a GPU only ---


@needs_gpu
@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_gpu_and_cpu_references_agree(fmt, seed):
    x = spread_out(100_000)
    for options in ({}, {"rounding": "stochastic", "offset": 99}):
        keys = [kernels.make_key(seed, 1, 2, device) for device in ("cpu", "cuda")]
        want = kernels.cast(x, torch.tensor(0.5), fmt.dtype, key=keys[0], **options)
        assert_same_bits(
            kernels.cast(x.cuda(), torch.tensor(0.5).cuda(), fmt.dtype, key=keys[1], **options).cpu(), want
        )


@needs_gpu
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 16, 16), (16, 16, 16), (1, 32, 64), (27, 48, 80), (17, 16, 0), (512, 768, 4096)], ids=str
)
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemm(shape, formats, out_dtype, fast_accum, with_bias, seed):
    m, n, k = shape
    a = kernels.cast(torch.randn(m, k, device="cuda"), scalar(64.0), formats[0].dtype)
    b = kernels.cast(torch.randn(n, k, device="cuda"), scalar(64.0), formats[1].dtype)
    sa, sb = scalar(512.0), scalar(0.7)  # outputs about 700, for FP16 ends at 65,504
    bias = torch.randn(n, device="cuda").to(out_dtype) if with_bias else None
    out = kernels.scaled_mm_nt(a, b, sa, sb, out_dtype, fast_accum=fast_accum, bias=bias)
    want = a.double() @ b.double().t() / float(sa * sb) + (bias.double() if with_bias else 0)
    terms = (a.double().abs() @ b.double().abs().t()) / float(sa * sb)
    # Truncation to about 13 bits for each step of a tensor core that sums 32 products, or promoted after at most 4 of these.
    accumulation = 2.0**-12 * math.sqrt(max(k, 1) / 32) if fast_accum else 2.0**-12
    bound = 2 * torch.finfo(out_dtype).eps * want.abs() + accumulation * terms + 1e-6
    assert out.shape == (m, n) and out.dtype == out_dtype
    assert ((out.double() - want).abs() <= bound).all()


@needs_gpu
def test_gemm_propagates_nan(seed):
    a = torch.randn(32, 64, device="cuda").to(E4M3.dtype)
    b = torch.randn(16, 64, device="cuda").to(E4M3.dtype)
    a[3, 5] = torch.nan
    out = kernels.scaled_mm_nt(a, b, scalar(1.0), scalar(1.0), torch.bfloat16)
    assert out[3].isnan().all() and out.isnan().sum() == 16


@needs_gpu
def test_compiled_equals_eager_in_one_graph(seed):
    def step(x, w):
        scale, w_scale = (kernels.scale_from_amax(kernels.amax(t), E4M3.max) for t in (x, w))
        codes, codes_t = kernels.cast_transpose(x, scale, E4M3.dtype)
        w_codes, _ = kernels.cast_transpose(w, w_scale, E4M3.dtype, col=False)
        out = kernels.scaled_mm_nt(codes, w_codes, scale, w_scale, torch.bfloat16, fast_accum=True)
        noisy = kernels.cast(x, scale, FP16.dtype, rounding="stochastic", key=kernels.make_key(1, 2, 3, "cuda"))
        high, low = kernels.cast_residual(x, scale)
        return codes, codes_t, out, noisy, kernels.uncast_residual(high, low, scale), kernels.uncast(codes, scale)

    compiled = torch.compile(step, fullgraph=True)
    for shape in ((100, 96), (257, 80)):
        x, w = torch.randn(shape, device="cuda"), torch.randn(64, shape[1], device="cuda")
        for got, want in zip(compiled(x, w), step(x, w), strict=True):
            assert_same_bits(got, want)


@needs_gpu
def test_no_host_synchronisation(seed):
    x, scale = torch.randn(64, 64, device="cuda"), scalar(2.0)
    stats = torch.zeros(2, dtype=torch.int64, device="cuda")
    step = torch.tensor(3.0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale = kernels.scale_from_amax(kernels.amax(x), 448.0)
        codes, _ = kernels.cast_transpose(x, scale, E4M3.dtype, stats=stats)
        kernels.scaled_mm_nt(codes, codes, scale, scale, torch.bfloat16)
        kernels.quantize(x, E5M2, column_sum=True, unit=scale, return_inverse=True, stats=stats)
        kernels.visible_scale(kernels.cast_current(x, E4M3)[1], kernels.amax(x), scale)
        key = kernels.make_key(1, step, 2, "cuda")
        kernels.uncast(kernels.cast(x, scale, E4M3.dtype, rounding="stochastic", key=key), scale)
        kernels.uncast_residual(*kernels.cast_residual(x, scale), scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.slow
def test_B20_more_than_two_to_the_31_elements():
    n, tail = 2**31 + 65536, 131072
    if torch.cuda.mem_get_info()[0] < 20 * n // 2:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-tail:] = torch.randn(tail, device="cuda")
    x[-1] = 1000.0
    assert kernels.amax(x) == 1000
    key = kernels.make_key(1, 2, 3, "cuda")
    for options in ({}, {"rounding": "stochastic", "key": key}):
        codes = kernels.cast(x, scalar(0.25), E4M3.dtype, **options)
        want = reference.cast(x[-tail:], scalar(0.25), E4M3.dtype, offset=n - tail, **options)
        assert_same_bits(codes[-tail:], want)
        assert not bits(codes[: 2**20]).any()
        back = kernels.uncast(codes, scalar(0.25), torch.bfloat16)
        assert_same_bits(back[-tail:], reference.uncast(want, scalar(0.25), torch.bfloat16))
        del codes, back
    high, low = kernels.cast_residual(x, scalar(0.25))
    want = reference.cast_residual(x[-tail:], scalar(0.25))
    assert_same_bits(high[-tail:], want[0])
    assert torch.equal(low[-tail:], want[1])
    del high, low
    rows = x.view(-1, 65536)
    codes, codes_t = kernels.cast_transpose(rows, scalar(0.25), E4M3.dtype)
    want = reference.cast(rows[-2:], scalar(0.25), E4M3.dtype)
    m = rows.shape[0]
    assert_same_bits(codes[m - 2 : m], want)
    assert_same_bits(codes_t[:, m - 2 : m].t(), want)


@needs_gpu
def test_fp32_and_bf16_are_untouched_by_a_scale_of_one(seed):
    x = torch.randn(10_000, device="cuda")
    assert torch.equal(kernels.cast(x, scalar(1.0), FP32.dtype), x)
    assert torch.equal(kernels.cast(x, scalar(1.0), BF16.dtype), x.bfloat16())
