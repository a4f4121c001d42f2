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
