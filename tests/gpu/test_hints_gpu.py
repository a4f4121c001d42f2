"""A cast with a hint of its scale has the bits of current scaling, whatever the hint held; it leaves the right one there.

Without a GPU the kernels can be interpreted, see `interpreter`.
"""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, spread_out
from test_kernels_gpu import DTYPES, FP8, on

from octavo import kernels
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu

COLD, LOW, HIGH, GARBAGE, NEGATIVE = 0, 1, 254 << 23, 0x3FC12345, -1
"""Words that are no scale of use: none, far too small, far too large, no power of two, and NaN."""


@pytest.fixture
def cuda(monkeypatch):
    from octavo.kernels import cuda
    from octavo.kernels.cuda import hints

    if INTERPRETED:
        convert_exactly()
    monkeypatch.setattr(hints, "MIN_NUMEL", 1)
    return cuda


def word(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device=DEVICE)


def scale_word(x: torch.Tensor, fmt: Format, factor: float = 1.0) -> torch.Tensor:
    return (reference.scale_from_amax(reference.amax(x), fmt.max) * factor).view(torch.int32)


def all_hints(x: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    words = [word(value) for value in (COLD, LOW, HIGH, GARBAGE, NEGATIVE)]
    return [scale_word(x, fmt), *words, *(scale_word(x, fmt, factor) for factor in (0.5, 2.0, 2.0**40))]


def check_quantize(cuda, x: torch.Tensor, fmt: Format, hints: list[torch.Tensor]) -> None:
    want = reference.quantize(x, fmt)
    right = scale_word(x, fmt)
    for hint in (hint.clone() for hint in hints):
        codes, codes_t, scale, inverse, sums = cuda.quantize(x, fmt, column_sum=torch.float32, hint=hint)
        for got, expected in zip((codes, codes_t, scale, inverse), want[:4], strict=True):
            assert_same_bits(got, expected)
        assert hint & 0x7F800000 == right, "the next time finds what was right"
        check_column_sum(sums, x)
    for hint in hints[:2]:
        for row, col in ((True, False), (False, True)):
            one, one_t, *_ = cuda.quantize(x, fmt, row=row, col=col, hint=hint.clone())
            assert (one is None) != row and (one_t is None) != col
            assert_same_bits(codes if one is None else one, codes)
            assert_same_bits(codes_t if one_t is None else one_t, codes_t)


def check_column_sum(sums: torch.Tensor, x: torch.Tensor) -> None:
    """No term takes part in more additions than this, each wrong by at most 2^-24 of the sum of magnitudes."""
    depth = min(len(x), 128) + len(x) / 1024 + 10
    assert sums.dtype == torch.float32 and sums.shape == x.shape[1:]
    exact, bound = x.double().sum(0), x.double().abs().sum(0) * depth * 2.0**-24
    finite = exact.isfinite()
    assert ((sums.double() - exact).abs() <= bound)[finite].all() and not sums[~finite].isfinite().any()


@pytest.mark.parametrize(
    ("dtype", "fmt", "shape"),
    [(d, f, (17, 33)) for d in DTYPES for f in FP8]
    + [(torch.bfloat16, E4M3, shape) for shape in ((2, 2), (15, 130), (129, 16), (256, 128), (300, 64))],
    ids=str,
)
def test_quantize(cuda, dtype, fmt, shape, seed):
    x = on((torch.randn(shape) * torch.exp2(torch.empty(shape).uniform_(-20, 8))).to(dtype))
    check_quantize(cuda, x, fmt, all_hints(x, fmt))


@pytest.mark.parametrize("fmt", FP8, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 448.0, 57344.0, 3e38, torch.inf, -torch.inf, torch.nan])
def test_one_value_decides(cuda, value, fmt, seed):
    """Zeros, the ends of the range, and values that are not finite, in one tile of several."""
    for rest in (0.0, 1e-44):
        x = torch.full((130, 80), rest)
        x[128, 70] = value
        x = on(x)
        check_quantize(cuda, x, fmt, all_hints(x, fmt))
        check_cast_current(cuda, x, fmt)


@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_the_limit_itself_needs_no_smaller_scale(cuda, fmt, seed):
    for amax in (fmt.max, fmt.max * (1 + 2.0**-20), fmt.max / 2, fmt.max / 2 * (1 - 2.0**-20)):
        x = on(torch.rand(40, 50) * amax / 2)
        x[1, 2] = amax
        check_quantize(cuda, x, fmt, [word(127 << 23), word(128 << 23), word(126 << 23)])


def test_strided_matrices(cuda, seed):
    x = on(torch.randn(100, 300)).bfloat16()
    for view in (x.t(), x[::2, 1:200:3]):
        check_quantize(cuda, view, E4M3, all_hints(view, E4M3))


def check_cast_current(cuda, x: torch.Tensor, fmt: Format) -> None:
    want = reference.cast_current(x, fmt)
    for hint in all_hints(x, fmt):
        for got, expected in zip(cuda.cast_current(x, fmt, hint=hint), want, strict=True):
            assert_same_bits(got, expected)
        assert hint & 0x7F800000 == want[1].view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 1001), (3, 4096), (64, 80, 9)], ids=str)
def test_cast_current(cuda, shape, dtype, seed):
    for x in (torch.randn(shape), 1e-5 * torch.randn(shape), spread_out(shape)):
        x = on(x.to(dtype))
        for fmt in FP8:
            check_cast_current(cuda, x, fmt)
            check_cast_current(cuda, x.transpose(0, -1), fmt)


def check_activation(cuda, h: torch.Tensor, kind: str, da: torch.Tensor | None, fmt: Format, hints: list[int]) -> None:
    """Two reads, for which `tests/gpu/test_activation_gpu.py` answers, have the same bits, sums of columns included."""
    options = {"da": da, "bias_sum": da is not None}
    want = cuda.activation_quantize(h, kind, fmt, **options)
    right = want[2].view(torch.int32)
    for hint in (right.clone(), *map(word, hints)):
        for got, expected in zip(cuda.activation_quantize(h, kind, fmt, **options, hint=hint), want, strict=True):
            assert got is expected is None or assert_same_bits(got, expected) is None
        assert hint & 0x7F800000 == right
    for row, col in ((True, False), (False, True)):
        one = cuda.activation_quantize(h, kind, fmt, da=da, row=row, col=col, hint=word(COLD))
        assert (one[0] is None) != row and (one[1] is None) != col and one[5] is None
        assert_same_bits(one[0] if row else one[1], want[0] if row else want[1])


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (33, 70), (256, 128)], ids=str)
def test_activation_quantize(cuda, kind, dtype, shape, seed):
    m, f = shape
    width = 2 * f if kind == "swiglu" else f
    for draw in (torch.randn, spread_out):
        h, da = on(draw((m, width)).to(dtype)), on(draw((m, f)).to(dtype))
        check_activation(cuda, h, kind, None, E4M3, [COLD, HIGH])
        check_activation(cuda, h, kind, da, E5M2, [COLD, LOW, GARBAGE])


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_activations_are_those_of_the_reference(cuda, kind, seed):
    h, da = on(torch.randn(40, 64)), on(torch.randn(40, 64 if kind == "gelu" else 32))
    for grad, fmt in ((None, E4M3), (da, E5M2)):
        got = cuda.activation_quantize(h, kind, fmt, da=grad, hint=word(COLD))
        want = reference.activation_quantize(h, kind, fmt, da=grad)
        for one, other in zip(got[2:5], want[2:5], strict=True):
            assert_same_bits(one, other)
        different = got[0].view(torch.uint8) != want[0].view(torch.uint8)
        assert different.float().mean() <= 1e-2 and got[0].shape == want[0].shape


def test_a_hint_that_is_often_wrong_is_not_tried(cuda, monkeypatch, seed):
    """Above a third of misses the first launch writes no codes for long; below it does, and soon again once the scale stays."""
    from octavo.kernels.cuda import speculative

    launch, tried = speculative._launch_cast_current, []

    def spied(programs: int, tensors: tuple[torch.Tensor, ...], *scalars: float) -> None:
        tensors[2].view(torch.uint8).fill_(0x55)
        launch(programs, tensors, *scalars)
        tried.append(bool((tensors[2].view(torch.uint8) != 0x55).any()))

    def share(misses: list[bool], hint: torch.Tensor) -> float:
        """Of casts that tried a hint."""
        tried.clear()
        x = on(torch.randn(100))
        for miss in misses:
            x = x * (0.5 if miss else 1.0)
            for got, want in zip(cuda.cast_current(x, E4M3, hint=hint), reference.cast_current(x, E4M3), strict=True):
                assert_same_bits(got, want)
        return sum(tried) / len(tried)

    monkeypatch.setattr(speculative, "_launch_cast_current", spied)
    assert share([True] * 20, hint := word(COLD)) <= 0.15 and hint & 0xF == 8
    assert share([False] * 20, hint) >= 0.7 and hint & 0xF == 0
    assert share([False, False, True, False, False] * 4, hint) == 1
    assert share([True, False] * 20, hint) <= 0.3


@pytest.mark.parametrize("odd", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_hint_that_changes_between_two_programs(cuda, odd, factor, seed):
    """What another stream may do: one program has used another scale than the rest, which may even be right."""
    from octavo.kernels.cuda import hints, speculative

    x, words = on(torch.randn(3 * 128, 64)).bfloat16(), []
    x[odd * 128 : (odd + 1) * 128] /= 1024  # so that the odd program has nothing to object to either scale
    want, right = reference.quantize(x, E4M3), scale_word(x, E4M3)
    launch = speculative._launch_quantize

    def first(programs: int, tensors: tuple[torch.Tensor, ...], *scalars: float) -> None:
        """The first launch with two hints: parts and codes of one program are those of the second."""
        _, hint, codes, codes_t, parts, _ = tensors
        launch(programs, tensors, *scalars)
        other = [torch.empty_like(tensor) for tensor in (codes, codes_t, parts)]
        launch(programs, (x, (right.view(torch.float32) * factor).view(torch.int32), *other, None), *scalars)
        rows = slice(odd * 128, (odd + 1) * 128)
        codes.view(torch.uint8)[rows] = other[0].view(torch.uint8)[rows]
        codes_t.view(torch.uint8)[:, rows] = other[1].view(torch.uint8)[:, rows]
        half = [tensor[programs:].view(torch.int16) for tensor in (parts, other[2])]
        half[0][odd] = half[1][odd]
        words.append(half[0][:programs].tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "_launch_quantize", first)
        got = cuda.quantize(x, E4M3, hint=right.clone())
    assert len({word >> 2 for word in words[0]}) == 2 and hints.MIN_NUMEL == 1
    for one, expected in zip(got[:4], want[:4], strict=True):
        assert_same_bits(one, expected)


def test_what_takes_the_two_reads(cuda, monkeypatch, seed):
    """Hints are left alone where counts are wanted, the maximum is known, or the tensor is small."""
    from octavo.kernels.cuda import hints

    x, stats = on(torch.randn(32, 48)), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    hint = word(COLD)
    cuda.quantize(x, E4M3, hint=hint, stats=stats)
    cuda.quantize(x, E4M3, hint=hint, amax=reference.amax(x))
    cuda.quantize(x, E4M3, hint=hint, power_of_two=False)
    cuda.quantize(x[:1], E4M3, hint=hint)
    cuda.cast_current(x, E4M3, hint=hint, stats=stats)
    cuda.cast_current(x[:0], E4M3, hint=hint)
    monkeypatch.setattr(hints, "MIN_NUMEL", x.numel() + 1)
    cuda.quantize(x, E4M3, hint=hint)
    assert hint == COLD


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16_384, 4096), (4096, 11_008), (1000, 5000), (16_384, 2048)], ids=str)
def test_large_matrices(cuda, shape, seed):
    x = torch.randn(shape, device="cuda").bfloat16()
    for fmt in FP8:
        check_quantize(cuda, x, fmt, [word(COLD), scale_word(x, fmt), scale_word(x, fmt, 2.0)])
        check_cast_current(cuda, x, fmt)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(16_384, 11_008), (1000, 5000)], ids=str)
def test_large_activations(cuda, kind, shape, seed):
    m, f = shape
    h = torch.randn(m, 2 * f if kind == "swiglu" else f, device="cuda").bfloat16()
    check_activation(cuda, h, kind, None, E4M3, [COLD, HIGH])
    check_activation(cuda, h, kind, torch.randn(m, f, device="cuda").bfloat16(), E5M2, [COLD, LOW])


@pytest.mark.gpu
def test_a_captured_graph(cuda, seed):
    """Replays keep the hint up to date by themselves."""
    x, hints = torch.randn(512, 256, device="cuda").bfloat16(), [word(COLD), word(COLD)]

    def step() -> tuple[torch.Tensor, ...]:
        operand = kernels.quantize(x, E5M2, column_sum=True, return_inverse=True, hint=hints[0])
        return *operand, *kernels.cast_current(x, E4M3, return_amax=True, hint=hints[1])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for factor in (1e-3, 1e3, torch.inf, 1.0):
        x.copy_(torch.randn_like(x) * factor)
        for _ in range(2):
            graph.replay()
            for got, want in zip(outputs, step(), strict=True):
                assert_same_bits(got, want)
            for hint, fmt in zip(hints, (E5M2, E4M3), strict=True):
                assert hint & 0x7F800000 == scale_word(x, fmt)
