"""The rotary kernel equals its reference bit for bit. With TRITON_INTERPRET=1 it runs on CPU, see `interpreter`."""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, convert_exactly
from oracle import assert_same_bits, spread_out

from octavo.kernels import reference

pytestmark = [] if INTERPRETED else pytest.mark.gpu
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 7, 5, 4, 8),
    (3, 5, 6, 6, 24),
    (2, 3, 40, 33, 128),
    (1, 2, 96, 64, 128),
    (2, 4, 17, 0, 64),
]
"""B, T, all heads, turned heads, D."""


def inputs(batch, tokens, total, channels, dtype, batched):
    qkv = spread_out((batch, tokens, total, channels)).to(dtype)
    angles = torch.randn((batch, tokens, channels // 2) if batched else (tokens, channels // 2)) * 100
    return qkv.to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.fixture(autouse=True)
def exact_conversion():
    if INTERPRETED:
        convert_exactly()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary(shape, dtype, batched, backward, seed):
    from octavo.kernels.cuda import rotary

    batch, tokens, total, heads, channels = shape
    qkv, cos, sin = inputs(batch, tokens, total, channels, dtype, batched)
    want = reference.rotary(qkv, cos, sin, heads, backward=backward)
    assert_same_bits(rotary(qkv, cos, sin, heads, backward=backward), want)


def test_strides(seed):
    from octavo.kernels.cuda import rotary

    qkv, cos, sin = inputs(3, 4, 12, 32, torch.bfloat16, True)
    for view in (
        qkv.transpose(0, 1).contiguous().transpose(0, 1),
        qkv[:, :, ::2],
        qkv.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert_same_bits(rotary(view, cos, sin, 5), reference.rotary(view, cos, sin, 5))
    assert rotary(qkv[:0], cos[:0], sin[:0], 5).shape == (0, 4, 12, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_place(shape, dtype, seed):
    from octavo.kernels.cuda import rotary_

    batch, tokens, total, heads, channels = shape
    qkv, cos, sin = inputs(batch, tokens, total, channels, dtype, False)
    want = reference.rotary(qkv, cos, sin, heads)
    rotary_(qkv, cos, sin, heads)
    assert_same_bits(qkv, want)


GRADIENTS = [
    (1, 1, 1, 1, 2),
    (2, 7, 5, 1, 8),
    (3, 5, 6, 6, 24),
    (2, 3, 40, 33, 128),
    (1, 2, 32, 8, 64),
    (2, 3, 2, 2, 7),
]
"""B, T, H, G, D."""


def check_backward(gradients, cos, sin):
    from octavo.kernels.cuda import rotary_backward

    for got, want in zip(
        rotary_backward(*gradients, cos, sin), reference.rotary_backward(*gradients, cos, sin), strict=True
    ):
        assert_same_bits(got, want)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_backward(shape, dtype, batched, turned, seed):
    batch, tokens, heads, groups, channels = shape
    if turned and channels % 2:
        channels += 1
    qkv, cos, sin = inputs(batch, tokens, heads + 2 * groups, channels, dtype, batched)
    gradients = [one.contiguous() for one in qkv.split((heads, groups, groups), dim=-2)]
    check_backward(gradients, *((cos, sin) if turned else (None, None)))


def test_backward_of_any_strides_and_of_values_that_are_not_finite(seed):
    qkv, cos, sin = inputs(2, 3, 12, 16, torch.bfloat16, False)
    views = list(qkv.split((6, 3, 3), dim=-2))
    check_backward(views, cos, sin)
    check_backward([one.transpose(1, 2).contiguous().transpose(1, 2) for one in views], cos, sin)
    check_backward([one.transpose(2, 3).contiguous().transpose(2, 3) for one in views], cos, sin)
    check_backward([one[:0] for one in views], cos, sin)
    from octavo.kernels.cuda import rotary_backward

    for place, bad in ((0, torch.inf), (1, -torch.inf), (2, torch.nan)):
        broken = [one.clone() for one in views]
        broken[place][1, 2, 1, 5] = bad
        assert not rotary_backward(*broken, cos, sin)[1].isfinite()


@pytest.mark.gpu
def test_backward_of_whole_batches(seed):
    """Gradients as attention returns them, of the 7B shape."""
    cos, sin = (torch.randn(2048, 64, device=DEVICE) * 100).cos(), (torch.randn(2048, 64, device=DEVICE) * 100).sin()
    check_backward([torch.randn(8, 2048, 32, 128, device=DEVICE).bfloat16() for _ in range(3)], cos, sin)
    grouped = [torch.randn(8, h, 2048, 128, device=DEVICE).bfloat16().transpose(1, 2) for h in (32, 8, 8)]
    check_backward(grouped, cos, sin)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_whole_batches(backward, seed):
    """Those of the 7B shape, and more than 2^31 elements: what is compared are the ends, and a slice between."""
    from octavo.kernels.cuda import rotary

    angles = torch.randn(2048, 64, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(8, 2048, 96, 128, device=DEVICE).bfloat16()
    assert_same_bits(
        rotary(qkv, cos, sin, 64, backward=backward), reference.rotary(qkv, cos, sin, 64, backward=backward)
    )
    qkv = torch.empty(88, 2048, 96, 128, device=DEVICE, dtype=torch.bfloat16).normal_()
    out = rotary(qkv, cos, sin, 64, backward=backward)
    for part in (slice(0, 1), slice(43, 44), slice(87, 88)):
        assert_same_bits(out[part], reference.rotary(qkv[part], cos, sin, 64, backward=backward))
