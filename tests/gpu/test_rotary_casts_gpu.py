"""The gradient of qkv that is cast as it is turned back has the bits of the two steps apart, whatever the hint held.

Without a GPU the kernels can be interpreted, see `interpreter`.
"""

from itertools import product

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, spread_out
from test_hints_gpu import COLD, GARBAGE, HIGH, LOW, NEGATIVE, check_column_sum, scale_word, word

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
DOUBTFUL = 6
"""In the low bits of a hint: it is not tried."""


@pytest.fixture
def cuda(monkeypatch):
    from octavo.kernels import cuda
    from octavo.kernels.cuda import hints

    if INTERPRETED:
        convert_exactly()
    monkeypatch.setattr(hints, "MIN_NUMEL", 1)
    return cuda


def inputs(batch, tokens, heads, groups, channels, dtype=torch.bfloat16, batched=False, draw=torch.randn):
    """(the three gradients, cos, sin)"""
    gradients = [draw((batch, tokens, n, channels)).to(dtype).to(DEVICE) for n in (heads, groups, groups)]
    angles = torch.randn((batch, tokens, channels // 2) if batched else (tokens, channels // 2)) * 100
    return gradients, (angles.cos().to(DEVICE), angles.sin().to(DEVICE))


def turned(gradients, table) -> torch.Tensor:
    return reference.rotary_backward(*gradients, *table)[0].flatten(2).flatten(0, 1)


def check(
    cuda, gradients, table, fmt: Format, words: list[int], power_of_two: bool = True, hinted: bool = True
) -> None:
    """With these hints, the right one, and none; column sums and single operands with the first of them.

    `hinted`: all of them are used, and left right.
    """
    x = turned(gradients, table)
    want = reference.quantize(x, fmt, power_of_two=power_of_two)
    right = scale_word(x, fmt)
    hints = [None, right.clone(), right | DOUBTFUL, *(word(value) for value in words)]
    for index, hint in enumerate(hints):
        sums = torch.float32 if index < 2 else None
        got = cuda.rotary_backward_quantize(
            *gradients, *table, fmt, power_of_two=power_of_two, column_sum=sums, hint=hint
        )
        for one, expected in zip(got[:4], want[:4], strict=True):
            assert_same_bits(one, expected)
        if sums is None:
            assert got[4] is None
        else:
            check_column_sum(got[4], x)
        assert hint is None or not hinted or hint & 0x7F800000 == right, "the next time finds what was right"
    for (row, col), hint in product(((True, False), (False, True)), (None, right.clone())):
        options = {"row": row, "col": col, "power_of_two": power_of_two, "hint": hint}
        one, one_t, *_ = cuda.rotary_backward_quantize(*gradients, *table, fmt, **options)
        assert (one is None) != row and (one_t is None) != col
        assert_same_bits(one if row else one_t, want[0] if row else want[1])


SHAPES = [
    (1, 64, 1, 1, 64),
    (2, 128, 2, 1, 128),
    (2, 9, 4, 2, 128),
    (1, 17, 1, 1, 256),
    (3, 43, 4, 4, 16),
    (2, 40, 8, 4, 80),
    (1, 33, 4, 2, 96),
    (2, 7, 5, 3, 64),
]
"""B, T, H, G, D."""
APART = [(2, 9, 3, 1, 16), (2, 7, 6, 3, 24), (1, 5, 3, 2, 80), (1, 1, 2, 2, 64), (2, 3, 3, 3, 2)]
"""Heads too few or too narrow, and a single token."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_that_fill_tiles(cuda, shape, seed):
    for batched in (False, True):
        check(cuda, *inputs(*shape, batched=batched), E5M2, [HIGH] if batched else [COLD])


@pytest.mark.parametrize("shape", APART, ids=str)
def test_heads_that_do_not(cuda, shape, seed):
    for batched in (False, True):
        check(cuda, *inputs(*shape, batched=batched), E5M2, [HIGH], hinted=False)


def test_few_programs_settle_many_parts(cuda, monkeypatch, seed):
    from octavo.kernels.cuda import rotary_casts

    for name, value in (("SETTLE_PROGRAMS", 3), ("WORDS", 4)):
        monkeypatch.setattr(rotary_casts, name, value)
    check(cuda, *inputs(2, 7, 5, 3, 64), E5M2, [HIGH])


def test_column_sums_are_the_same_in_every_run(cuda, seed):
    gradients, table = inputs(2, 300, 2, 1, 64)
    sums = [cuda.rotary_backward_quantize(*gradients, *table, E5M2, column_sum=torch.float32)[4] for _ in range(2)]
    assert_same_bits(*sums)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("turn", [False, True])
def test_dtypes(cuda, dtype, fmt, turn, seed):
    def small(shape):
        return torch.randn(shape) * torch.exp2(torch.empty(shape).uniform_(-12, 4))

    gradients, table = inputs(2, 11, 4, 2, 64, dtype, draw=small)
    check(cuda, gradients, table if turn else (None, None), fmt, [COLD, LOW, HIGH, GARBAGE, NEGATIVE])


@pytest.mark.parametrize("shape", [(2, 7, 3, 2, 7), (1, 128, 2, 2, 64), (2, 5, 4, 2, 32)], ids=str)
def test_no_table(cuda, shape, seed):
    gradients = [torch.randn(*shape[:2], n, shape[4]).bfloat16().to(DEVICE) for n in (shape[2], shape[3], shape[3])]
    check(cuda, gradients, (None, None), E5M2, [COLD], hinted=shape[4] > 7)


def test_scales_that_are_no_powers_of_two(cuda, seed):
    for shape in (SHAPES[1], SHAPES[4], APART[0]):
        check(cuda, *inputs(*shape), E5M2, [HIGH], power_of_two=False, hinted=False)


def test_strides(cuda, seed):
    gradients, table = inputs(2, 19, 4, 2, 64)
    wide = torch.randn(2, 19, 8, 64, device=DEVICE).bfloat16()
    for views in (
        list(wide.split((4, 2, 2), dim=2)),
        [one.transpose(1, 2).contiguous().transpose(1, 2) for one in gradients],
        [one.transpose(2, 3).contiguous().transpose(2, 3) for one in gradients],
        [one.transpose(0, 1).contiguous().transpose(0, 1) for one in gradients],
        [
            gradients[0],
            gradients[1].transpose(1, 2).contiguous().transpose(1, 2),
            gradients[2][:, :1].expand(2, 19, 2, 64),
        ],
    ):
        check(cuda, views, table, E5M2, [COLD])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-38, 57344.0, 3e38, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_value_decides(cuda, place, value, seed):
    gradients, table = inputs(1, 40, 2, 2, 64, draw=torch.zeros)
    gradients[place][0, 37, 1, 50] = value
    check(cuda, gradients, table, E5M2, [COLD, HIGH, LOW])


def test_values_of_all_kinds(cuda, seed):
    gradients, table = inputs(2, 30, 2, 2, 64, draw=spread_out)
    check(cuda, gradients, table, E5M2, [COLD, HIGH])


def test_small_gradients_leave_the_hint_alone(cuda, monkeypatch, seed):
    from octavo.kernels.cuda import hints

    gradients, table = inputs(*SHAPES[1])
    hint = word(COLD)
    cuda.rotary_backward_quantize(*gradients, *table, E5M2, power_of_two=False, hint=hint)
    monkeypatch.setattr(hints, "MIN_NUMEL", gradients[0].numel() + 1)
    cuda.rotary_backward_quantize(*gradients, *table, E5M2, hint=hint)
    assert hint == COLD


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(8, 2048, 32, 32, 128), (8, 2048, 32, 8, 128), (4, 1000, 12, 12, 64), (2, 2048, 9, 3, 256)], ids=str
)
def test_whole_batches(cuda, shape, seed):
    """Gradients as attention returns them, of the 7B shape and others."""
    batch, tokens, heads, groups, channels = shape
    gradients = [
        torch.randn(batch, n, tokens, channels, device="cuda").bfloat16().transpose(1, 2)
        for n in (heads, groups, groups)
    ]
    angles = torch.randn(tokens, channels // 2, device="cuda") * 100
    for table in ((angles.cos(), angles.sin()), (None, None)):
        check(cuda, gradients, table, E5M2, [COLD, HIGH, LOW])
